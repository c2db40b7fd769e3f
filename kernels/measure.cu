/* How fast this machine is, for the cost model of route.c: each operator is run on arrays of two
 * sizes on the CPU, and what is bound by memory on arrays that no cache holds; on the GPU on arrays
 * that are there, and on small ones that come from the host; and there are a few copies, up, down
 * and both at a time. It takes some tens of milliseconds.
 *
 * Of products of matrices only a small one is run, of integers, which are our own kernels' work: on
 * the CPU they are NumPy's, and those of floats on the GPU may be that of a library that takes long
 * to open. There the number of multiprocessors and their clock tell.
 */
#include "common.cuh"
#include "pipeline.cuh"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* A call: elements of float32 in each operand, of which a table may have more; the rows that are
 * taken of it, whose positions are as many bytes as the elements where they are half as many; and
 * the pixels of an image's side. */
struct Size {
    int64_t items, table, rows, image;
};

constexpr int64_t WEIGHTS = 5, GPU_ITEMS = 1 << 20;
constexpr Size SMALL = {SMALL_ITEMS, SMALL_ITEMS, SMALL_ITEMS / 2, 102}; /* SMALL_SUMS */
constexpr Size LARGE = {LARGE_ITEMS, LARGE_ITEMS, LARGE_ITEMS / 2, 819}; /* LARGE_SUMS */
constexpr Size FAR = {FAR_ITEMS, FAR_TABLE_ITEMS, 512 << 10, 0};
constexpr Size ON_GPU = {GPU_ITEMS, GPU_ITEMS, GPU_ITEMS / 2, 1024};
/* More than a slab has room for: calls that go through one begin sooner, but seldom pay on a GPU.
 */
constexpr Size BRIEF = {24 << 10, 24 << 10, 12 << 10, 152};
constexpr int64_t TINY_COPY_BYTES = 4 << 10, SHORT_COPY_BYTES = 256 << 10,
                  LONG_COPY_BYTES = 16 << 20;
constexpr int64_t LARGE_BYTES = LARGE_ITEMS * (int64_t)sizeof(float);
constexpr int AREAS = GPUOPS_MAX_INPUTS + 2; /* operands, the result, and indices or weights */

constexpr int MOST_REPEATS = 3;
constexpr double ENOUGH_SECONDS = 5e-3; /* for one figure */
/* What else disturbs a call is none of the copies' doing. */
constexpr double LEAST_SHARE = 1e-3, MOST_SHARE = 2;

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

/* The operands of a call. False: they are matrices. The table of a call in place ends where the
 * result of others does. */
static bool fill_operands(const Areas &areas, const Size &size, Call *call)
{
    const bool in_place = strstr(call->op->signature, " out=") == NULL &&
                          strstr(call->op->signature, " output=") == NULL;
    const bool filters = strstr(call->op->signature, "weights") != NULL;
    const bool takes_rows = strstr(call->op->signature, "indices") != NULL;
    const int64_t image[] = {size.image, size.image}, weights[] = {WEIGHTS, WEIGHTS};
    call->input_count = 0;
    bool is_first = true;
    for (const char *at = call->op->signature; *at != '\0'; at += strspn(at, ", ")) {
        const size_t length = strcspn(at, ",");
        const bool is_array = *at != '*' && *at != '/' && memchr(at, '=', length) == NULL;
        if (!is_array) {
            at += length;
            continue;
        }
        if (is_named(at, length, "b")) return false;
        View view;
        if (is_named(at, length, "indices"))
            view = view_of(areas, AREAS - 1, DTYPE_INT64, 1, &size.rows);
        else if (is_named(at, length, "values"))
            view = view_of(areas, 0, DTYPE_FLOAT32, 1, &size.rows);
        else if (is_named(at, length, "weights"))
            view = view_of(areas, AREAS - 1, DTYPE_FLOAT32, 2, weights);
        else if (filters)
            view = view_of(areas, call->input_count, DTYPE_FLOAT32, 2, image);
        else
            view = view_of(areas, call->input_count, DTYPE_FLOAT32, 1,
                           takes_rows ? &size.table : &size.items);
        view_copy(is_first && in_place ? &call->out : &call->inputs[call->input_count++], &view);
        is_first = false;
        at += length;
    }
    const int64_t beyond = (size.table - size.items) * (int64_t)sizeof(float);
    if (in_place) call->out.data = area_of(areas, AREAS - 2) - beyond;
    return true;
}

static void fill_matrices(const Areas &areas, const Size &size, Call *call)
{
    const int64_t shape[] = {size.image, size.image};
    call->input_count = 2;
    for (int i = 0; i < 2; i++) {
        View view = view_of(areas, i, DTYPE_INT32, 2, shape);
        view_copy(&call->inputs[i], &view);
    }
}

/* False: it multiplies matrices. */
static Status prepare(const Operator *op, const Areas &areas, const Size &size, Call *call,
                      bool *is_known)
{
    memset(call, 0, sizeof *call);
    call->op = op;
    call->device = areas.device;
    call->stream = areas.stream;
    call->slot = -1;
    *is_known = fill_operands(areas, size, call);
    if (!*is_known) fill_matrices(areas, size, call);
    Status status = op->plan(call);
    if (status != STATUS_OK || call->in_place) return status;
    View out = view_of(areas, AREAS - 2, call->out.dtype, call->out.ndim, call->out.shape);
    view_copy(&call->out, &out);
    call->out_is_fresh = true;
    return STATUS_OK;
}

/* Positions without an order, and weights that are no product of a row and a column. */
static void fill_indices(char *area, const Size &size, uint64_t *state)
{
    int64_t *indices = reinterpret_cast<int64_t *>(area);
    const uint64_t places = (uint64_t)size.table;
    for (int64_t i = 0; i < size.rows; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        indices[i] = (int64_t)((*state >> 33) * places >> 31);
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
static void fill_last_area(const Operator *op, char *area, const Size &size)
{
    uint64_t state = 1;
    if (strstr(op->signature, "weights") != NULL)
        fill_weights(area);
    else if (strstr(op->signature, "indices") != NULL)
        fill_indices(area, size, &state);
}

static Status measure_on_cpu(const Areas &areas, const Size &size, int rate, double *rates)
{
    for (const Operator &op : OPERATOR_ROWS) {
        Call call;
        bool is_known;
        double seconds;
        fill_last_area(&op, area_of(areas, AREAS - 1), size);
        Status status = prepare(&op, areas, size, &call, &is_known);
        if (status == STATUS_OK && is_known) {
            status = fastest([&] { return run_call(&call); }, &seconds);
            if (status == STATUS_OK)
                rates[op.number * RATES_OF_OPERATOR + rate] = seconds / route_units(&call);
        }
        if (status != STATUS_OK) return status;
    }
    return STATUS_OK;
}

/* Rows by other positions each time, since those of the last time are in a cache; and additions,
 * which tell how fast memory is. */
static Status measure_far(const Areas &areas, double *rates)
{
    constexpr int TIMES = 2;
    uint64_t state = 1;
    for (const Operator &op : OPERATOR_ROWS) {
        Call call;
        bool is_known;
        double least = 0;
        Status status = prepare(&op, areas, FAR, &call, &is_known);
        if (call.work != WORK_ROWS && op.number != OPERATOR_add) continue;
        for (int i = 0; i < TIMES && status == STATUS_OK; i++) {
            if (call.work == WORK_ROWS) fill_indices(area_of(areas, AREAS - 1), FAR, &state);
            const double started = now();
            status = run_call(&call);
            const double taken = fmax(now() - started, 1e-9);
            if (i == 0 || taken < least) least = taken;
        }
        if (status != STATUS_OK) return status;
        rates[op.number * RATES_OF_OPERATOR + RATE_CPU_FAR] = least / route_units(&call);
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
        Status status = prepare(&op, areas, ON_GPU, &call, &is_known);
        if (status == STATUS_OK && is_known) {
            fill_last_area(&op, area_of(host, AREAS - 1), ON_GPU);
            const int64_t bytes = ON_GPU.rows * (int64_t)sizeof(int64_t);
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

static Status measure_locked_copy(const Areas &to, double *rate)
{
    void *block;
    double seconds = 0;
    Status status = pinned_allocate(to.device, LONG_COPY_BYTES, &block);
    if (status != STATUS_OK) return status;
    const Areas from = {static_cast<char *>(block), LONG_COPY_BYTES, DEVICE_CPU, NULL};
    status = time_copy(to, from, LONG_COPY_BYTES, &seconds);
    pinned_free(block);
    *rate = seconds / (double)LONG_COPY_BYTES;
    return status;
}

/* A call between host arrays on the device. */
static Status time_whole(const Operator &op, const Areas &host, int device, Stream *stream,
                         const Size &size, double *seconds)
{
    /* Made anew each time: after a run its inputs are the copies that were on the GPU. */
    const auto run = [&] {
        Call call;
        bool is_known;
        Status status = prepare(&op, host, size, &call, &is_known);
        call.device = device;
        call.stream = stream;
        return status == STATUS_OK ? run_call(&call) : status;
    };
    return fastest(run, seconds);
}

/* What the model has for the copies of a call. */
static Status count_copies(const Operator &op, const Areas &host, const Size &size,
                           const double *rates, double *seconds)
{
    Call call;
    bool is_known;
    const Status status = prepare(&op, host, size, &call, &is_known);
    if (status != STATUS_OK) return status;
    const auto bytes = [](const View &view) {
        return (double)(view_items(&view) * view.item_bytes);
    };
    double up = call.in_place ? bytes(call.out) : 0;
    for (int k = 0; k < call.input_count; k++) up += bytes(call.inputs[k]);
    *seconds = up * rates[RATE_UP_SMALL] + bytes(call.out) * rates[RATE_DOWN_SMALL];
    return STATUS_OK;
}

static Status measure_starts(const Areas &host, int device, Stream *stream, double *rates)
{
    for (const Operator &op : OPERATOR_ROWS) {
        double whole = 0, copies = 0;
        fill_last_area(&op, area_of(host, AREAS - 1), BRIEF);
        Status status = time_whole(op, host, device, stream, BRIEF, &whole);
        if (status == STATUS_OK) status = count_copies(op, host, BRIEF, rates, &copies);
        if (status != STATUS_OK) return status;
        rates[op.number * RATES_OF_OPERATOR + RATE_START] = fmax(whole - copies, whole / 2);
    }
    return STATUS_OK;
}

/* By a call whose parts go up and down at the same time, as many bytes each way. */
static Status measure_both_ways(const Areas &host, int device, Stream *stream, double *rates)
{
    const double bytes = (double)FAR.items * sizeof(float);
    const double up = bytes * rates[RATE_UP_LARGE], down = bytes * rates[RATE_DOWN_LARGE];
    double seconds = 0;
    Status status =
        time_whole(OPERATOR_ROWS[OPERATOR_sigmoid], host, device, stream, FAR, &seconds);
    seconds -= rates[OPERATOR_sigmoid * RATES_OF_OPERATOR + RATE_START];
    const double share = (seconds - fmax(up, down)) / fmin(up, down);
    /* The first part goes up alone, and the last one down. */
    const double alone = fmin((double)part_bytes((int64_t)bytes) / bytes, 0.5);
    rates[RATE_BOTH_WAYS] = fmin(fmax((share - alone) / (1 - alone), LEAST_SHARE), MOST_SHARE);
    return status;
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
    if (status == STATUS_OK) status = measure_locked_copy(areas, &rates[RATE_UP_LOCKED]);
    if (status == STATUS_OK) status = measure_starts(host, device, areas.stream, rates);
    if (status == STATUS_OK) status = measure_both_ways(host, device, areas.stream, rates);
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

/* In huge pages, as NumPy has its large arrays. */
static char *map_areas(int64_t bytes)
{
    void *data =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return NULL;
    (void)madvise(data, (size_t)bytes, MADV_HUGEPAGE); /* not every system has them */
    parallel_for(bytes, 1 << 20, touch, data);
    return static_cast<char *>(data);
}

/* Where there is no GPU, nothing is to be chosen, and less memory will do. */
Status machine_measure(int device, double rates[RATES])
{
    const int64_t items = device == DEVICE_CPU ? LARGE_ITEMS : FAR_ITEMS;
    const int64_t far_bytes = items * (int64_t)sizeof(float);
    /* Of the last area only what indices take is used. */
    const int64_t bytes = (AREAS - 1) * far_bytes + LARGE_BYTES;
    char *data = map_areas(bytes);
    if (data == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes to measure this machine",
                    (long long)bytes);
    for (int i = 0; i < RATES; i++) rates[i] = 0;
    const Areas host = {data, LARGE_BYTES, DEVICE_CPU, NULL};
    const Areas far = {data, far_bytes, DEVICE_CPU, NULL};
    Status status = measure_on_cpu(host, SMALL, RATE_CPU_SMALL, rates);
    if (status == STATUS_OK) status = measure_on_cpu(host, LARGE, RATE_CPU_LARGE, rates);
    if (status == STATUS_OK && device != DEVICE_CPU) status = measure_far(far, rates);
    /* The others are bound by what they compute, or by memory as additions are. */
    for (int i = 0; i < OPERATORS; i++) {
        double *rate = &rates[i * RATES_OF_OPERATOR];
        if (rate[RATE_CPU_FAR] == 0) rate[RATE_CPU_FAR] = rate[RATE_CPU_LARGE];
    }
    if (status == STATUS_OK && device != DEVICE_CPU) status = measure_gpu(far, device, rates);
    (void)munmap(data, (size_t)bytes);
    return status;
}
