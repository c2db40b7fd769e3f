/* How fast this machine is, for the cost model of route.c: each operator is run on arrays of two
 * sizes on the CPU, and on the GPU on arrays that are there; and a few copies up and down, and a
 * call from the host that hardly does anything. It takes some tens of milliseconds.
 *
 * Of a product of matrices nothing is run: on the CPU it is NumPy's, and on the GPU it may be that
 * of a library that takes long to open. There the number of multiprocessors and their clock tell.
 */
#include "common.cuh"

#include <math.h>
#include <stdlib.h>
#include <time.h>

/* Elements of float32 in each operand, and pixels of an image. */
constexpr int64_t SMALL_ITEMS = 16 << 10, LARGE_ITEMS = 4 << 20, GPU_ITEMS = 1 << 20;
constexpr int64_t SMALL_IMAGE = 128, LARGE_IMAGE = 1024, WEIGHTS = 5;
constexpr int64_t TINY_COPY_BYTES = 4 << 10, SHORT_COPY_BYTES = 256 << 10,
                  LONG_COPY_BYTES = 16 << 20;
constexpr int AREAS = GPUOPS_MAX_INPUTS + 2; /* operands, the result, and indices or weights */

constexpr int MOST_REPEATS = 5;
constexpr double ENOUGH_SECONDS = 5e-3; /* for one figure */

/* Memory on the host or on the device, with room for an operand in each area. */
struct Areas {
    char *data;
    int64_t bytes; /* of an area */
    int device;
    Stream *stream;
};

static char *area_of(const Areas &areas, int area)
{
    return areas.data + area * areas.bytes;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* The shortest time of some runs after the first one, which brings memory into the caches, and
 * kernels to the GPU. */
template <class Function>
static Status fastest(const Function &function, double *seconds)
{
    const double begun = now();
    *seconds = 0;
    for (int i = 0; i <= MOST_REPEATS; i++) {
        const double started = now();
        Status status = function();
        if (status != STATUS_OK) return status;
        const double ended = now(), taken = fmax(ended - started, 1e-9); /* no rate is zero */
        if (i > 0 && (*seconds == 0 || taken < *seconds)) *seconds = taken;
        if (i > 0 && ended - begun > ENOUGH_SECONDS) break;
    }
    return STATUS_OK;
}

/* Arguments that an operator takes, by the names in its signature. */

static View view_of(const Areas &areas, int area, Dtype dtype, int ndim, const int64_t *shape)
{
    View view;
    view.data = area_of(areas, area);
    view.device = areas.device;
    view.stream = areas.stream;
    view.memory = NULL;
    view.dtype = dtype;
    view.weak = WEAK_NOT;
    view.item_bytes = dtype_bytes(dtype);
    view.dtype_name = dtype_name(dtype);
    view.ndim = ndim;
    for (int i = 0; i < ndim; i++) view.shape[i] = shape[i];
    view_pack(&view);
    return view;
}

static bool is_named(const char *at, size_t length, const char *name)
{
    return strlen(name) == length && memcmp(at, name, length) == 0;
}

/* The operands of a call on so many elements. False: they are matrices. */
static bool fill_operands(const Areas &areas, int64_t items, int64_t side, Call *call)
{
    const bool in_place = strstr(call->op->signature, " out=") == NULL &&
                          strstr(call->op->signature, " output=") == NULL;
    const bool filters = strstr(call->op->signature, "weights") != NULL;
    const int64_t image[] = {side, side}, weights[] = {WEIGHTS, WEIGHTS};
    const int64_t rows = items / 2; /* whose positions are as many bytes as the elements */
    call->input_count = 0;
    bool is_first = true;
    for (const char *at = call->op->signature; *at != '\0'; at += strspn(at, ", ")) {
        const size_t length = strcspn(at, ",");
        const bool is_array = *at != '*' && *at != '/' && memchr(at, '=', length) == NULL;
        const int area = call->input_count;
        if (!is_array) {
            at += length;
            continue;
        }
        if (is_named(at, length, "b")) return false;
        View view;
        if (is_named(at, length, "indices"))
            view = view_of(areas, AREAS - 1, DTYPE_INT64, 1, &rows);
        else if (is_named(at, length, "values"))
            view = view_of(areas, area, DTYPE_FLOAT32, 1, &rows);
        else if (is_named(at, length, "weights"))
            view = view_of(areas, AREAS - 1, DTYPE_FLOAT32, 2, weights);
        else if (filters)
            view = view_of(areas, area, DTYPE_FLOAT32, 2, image);
        else
            view = view_of(areas, area, DTYPE_FLOAT32, 1, &items);
        view_copy(is_first && in_place ? &call->out : &call->inputs[call->input_count++], &view);
        is_first = false;
        at += length;
    }
    if (in_place) call->out.data = area_of(areas, AREAS - 2);
    return true;
}

static Status prepare(const Operator *op, const Areas &areas, int64_t items, int64_t side,
                      Call *call, bool *is_known)
{
    memset(call, 0, sizeof *call);
    call->op = op;
    call->device = areas.device;
    call->stream = areas.stream;
    call->slot = -1;
    *is_known = fill_operands(areas, items, side, call);
    if (!*is_known) return STATUS_OK;
    Status status = op->plan(call);
    if (status != STATUS_OK || call->in_place) return status;
    View out = view_of(areas, AREAS - 2, call->out.dtype, call->out.ndim, call->out.shape);
    view_copy(&call->out, &out);
    call->out_is_fresh = true;
    return STATUS_OK;
}

/* Positions without an order, and weights that are no product of a row and a column. */
static void fill_indices(char *area, int64_t items)
{
    int64_t *indices = reinterpret_cast<int64_t *>(area);
    uint64_t state = 1;
    for (int64_t i = 0; i < items / 2; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        indices[i] = (int64_t)(state >> 33) & (items - 1);
    }
}

static void fill_weights(char *area)
{
    float *weights = reinterpret_cast<float *>(area);
    for (int i = 0; i < WEIGHTS * WEIGHTS; i++) weights[i] = 1 + (float)(i * i % 7);
}

static const Operator OPERATOR_ROWS[] = {
#define OPERATOR(name, stem, signature, doc)                                                       \
    {OPERATOR_##name, #name, signature, plan_##name, run_##name},
#include "ops.def"
#undef OPERATOR
};

/* The weights take the place of indices: each operator has one of them at most. */
static void fill_last_area(const Operator *op, char *area, int64_t items)
{
    if (strstr(op->signature, "weights") != NULL)
        fill_weights(area);
    else if (strstr(op->signature, "indices") != NULL)
        fill_indices(area, items);
}

static Status measure_on_cpu(const Areas &areas, int64_t items, int64_t side, int rate,
                             double *rates)
{
    for (const Operator &op : OPERATOR_ROWS) {
        Call call;
        bool is_known;
        double seconds;
        fill_last_area(&op, area_of(areas, AREAS - 1), items);
        Status status = prepare(&op, areas, items, side, &call, &is_known);
        if (status == STATUS_OK && is_known) {
            status = fastest([&] { return run_call(&call); }, &seconds);
            if (status == STATUS_OK)
                rates[op.number * RATES_OF_OPERATOR + rate] = seconds / route_units(&call);
        }
        if (status != STATUS_OK) return status;
    }
    return STATUS_OK;
}

static void touch(void *data, int64_t begin, int64_t end)
{
    memset(static_cast<char *>(data) + begin, 0, (size_t)(end - begin));
}

#ifdef __CUDACC__

/* Several runs after each other, less one: without the launch, and the wait for the end. */
static Status measure_on_gpu(const Areas &host, const Areas &areas, double *rates)
{
    constexpr int RUNS = 4;
    for (const Operator &op : OPERATOR_ROWS) {
        Call call;
        bool is_known;
        double one = 0, several = 0;
        const int64_t side = LARGE_IMAGE, items = GPU_ITEMS;
        Status status = prepare(&op, areas, items, side, &call, &is_known);
        if (status == STATUS_OK && is_known) {
            fill_last_area(&op, area_of(host, AREAS - 1), items);
            const int64_t bytes = items / 2 * (int64_t)sizeof(int64_t);
            View from = view_of(host, AREAS - 1, DTYPE_INT8, 1, &bytes),
                 to = view_of(areas, AREAS - 1, DTYPE_INT8, 1, &bytes);
            status = copy_view(&to, &from, areas.stream);
        }
        const auto run = [&](int runs) {
            Status done = STATUS_OK;
            for (int i = 0; i < runs && done == STATUS_OK; i++) done = run_call(&call);
            return done == STATUS_OK ? stream_synchronize(areas.stream) : done;
        };
        if (status == STATUS_OK && is_known) {
            status = fastest([&] { return run(1); }, &one);
            several = one * (1 + RUNS);
            if (status == STATUS_OK && one < ENOUGH_SECONDS)
                status = fastest([&] { return run(1 + RUNS); }, &several);
            const double seconds = several > one ? (several - one) / RUNS : one / RUNS;
            rates[op.number * RATES_OF_OPERATOR + RATE_GPU] = seconds / route_units(&call);
        }
        if (status != STATUS_OK) return status;
    }
    return STATUS_OK;
}

static_assert(LONG_COPY_BYTES <= AREAS * GPU_ITEMS * (int64_t)sizeof(float), "");

static Status time_copy(const Areas &to, const Areas &from, int64_t bytes, double *seconds)
{
    View target = view_of(to, 0, DTYPE_INT8, 1, &bytes),
         source = view_of(from, 0, DTYPE_INT8, 1, &bytes);
    Stream *stream = to.stream != NULL ? to.stream : from.stream;
    return fastest([&] { return copy_view(&target, &source, stream); }, seconds);
}

/* Seconds for a byte beyond those of the shortest copies. */
static Status measure_copies(const Areas &to, const Areas &from, double *small, double *large)
{
    double tiny = 0, few = 0, many = 0;
    Status status = time_copy(to, from, TINY_COPY_BYTES, &tiny);
    if (status == STATUS_OK) status = time_copy(to, from, SHORT_COPY_BYTES, &few);
    if (status == STATUS_OK) status = time_copy(to, from, LONG_COPY_BYTES, &many);
    const auto rate = [&](double seconds, int64_t bytes) {
        return (seconds > tiny ? seconds - tiny : seconds / 2) / (double)bytes;
    };
    *small = rate(few, SHORT_COPY_BYTES);
    *large = rate(many, LONG_COPY_BYTES);
    return status;
}

static Status measure_start(const Areas &host, int device, Stream *stream, double *seconds)
{
    /* Made anew each time: after a run its inputs are the copies that were on the GPU. */
    const auto run = [&] {
        Call call;
        bool is_known;
        Status status = prepare(&OPERATOR_ROWS[OPERATOR_add], host, 16, 16, &call, &is_known);
        call.device = device;
        call.stream = stream;
        return status == STATUS_OK ? run_call(&call) : status;
    };
    return fastest(run, seconds);
}

/* A multiprocessor does 128 multiplications of float32 at a clock, with additions, and matrices
 * reach three quarters of that; of float64 half as many where the GPU is made for that, else a
 * 64th; and of 16-bit floats eight times as many, where there are units for matrices of them. */
static Status estimate_products(int device, double *rates)
{
    DeviceInfo info;
    Status status = cuda_device_info(device, &info);
    if (status != STATUS_OK) return status;
    const int major = info.compute_major, minor = info.compute_minor;
    /* Some virtual GPUs do not tell their clock. */
    const double clocks = info.clock_khz > 0 ? 1e3 * (double)info.clock_khz : 1e9;
    const double units = 128 * (double)info.multiprocessors;
    const double seconds = 1 / (0.75 * units * clocks);
    for (const Operator &op : OPERATOR_ROWS) {
        double *rate = &rates[op.number * RATES_OF_OPERATOR + RATE_GPU];
        if (*rate == 0) *rate = seconds;
    }
    rates[RATE_GPU_DOUBLE_FACTOR] = minor == 0 && major >= 6 && major <= 10 ? 2 : 64;
    rates[RATE_GPU_SHORT_FACTOR] = major >= 8 ? 1.0 / 8 : 1;
    return STATUS_OK;
}

static Status measure_with_gpu(const Areas &host, int device, double *rates)
{
    Areas areas = {NULL, GPU_ITEMS * (int64_t)sizeof(float), device, NULL};
    const int64_t bytes = AREAS * areas.bytes;
    Memory *memory = NULL;
    Status status = stream_create(device, true, 0, &areas.stream);
    if (status == STATUS_OK) status = memory_allocate(areas.stream, bytes, &memory);
    if (status == STATUS_OK) {
        areas.data = memory_data(memory);
        const char zero = 0;
        View all = view_of(areas, 0, DTYPE_INT8, 1, &bytes);
        status = fill_view_with(&all, &zero, areas.stream);
    }
    if (status == STATUS_OK)
        status = measure_copies(areas, host, &rates[RATE_UP_SMALL], &rates[RATE_UP_LARGE]);
    if (status == STATUS_OK)
        status = measure_copies(host, areas, &rates[RATE_DOWN_SMALL], &rates[RATE_DOWN_LARGE]);
    if (status == STATUS_OK) status = measure_start(host, device, areas.stream, &rates[RATE_START]);
    if (status == STATUS_OK) status = measure_on_gpu(host, areas, rates);
    if (status == STATUS_OK) status = estimate_products(device, rates);
    /* Nothing may still be at work on memory that is about to go. */
    const Failure first = status == STATUS_OK ? Failure() : *last_failure();
    if (areas.stream != NULL && status != STATUS_OK) {
        (void)stream_synchronize(areas.stream);
        status = fail_cuda(status, first.cuda_code, first.cuda_name, first.text);
    }
    if (memory != NULL) memory_release(memory);
    if (areas.stream != NULL) stream_release(areas.stream);
    return status;
}

static Status measure_gpu(const Areas &host, int device, double *rates)
{
    if (device_is_captured(device)) return refuse_capture("measure this machine");
    int previous;
    Status status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    status = measure_with_gpu(host, device, rates);
    device_leave(device, previous);
    return status;
}

#else

static Status measure_gpu(const Areas &, int, double *)
{
    int count;
    return cuda_device_count(&count);
}

#endif

Status machine_measure(int device, double rates[RATES])
{
    const int64_t area_bytes = LARGE_ITEMS * (int64_t)sizeof(float), bytes = AREAS * area_bytes;
    char *data = static_cast<char *>(malloc((size_t)bytes));
    if (data == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes to measure this machine",
                    (long long)bytes);
    for (int i = 0; i < RATES; i++) rates[i] = 0;
    parallel_for(bytes, 1 << 20, touch, data);
    const Areas host = {data, area_bytes, DEVICE_CPU, NULL};
    Status status = measure_on_cpu(host, SMALL_ITEMS, SMALL_IMAGE, RATE_CPU_SMALL, rates);
    if (status == STATUS_OK)
        status = measure_on_cpu(host, LARGE_ITEMS, LARGE_IMAGE, RATE_CPU_LARGE, rates);
    if (status == STATUS_OK && device != DEVICE_CPU) status = measure_gpu(host, device, rates);
    free(data);
    return status;
}
