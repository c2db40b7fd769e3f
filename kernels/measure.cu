/* How fast this machine is, for the cost model of route.c: operators are run on arrays of two sizes
 * on the CPU, some of them on arrays that no cache holds, and a filter on an image for which it
 * does not count when the threads wake up; on the GPU on arrays that are there, and on small ones
 * that come from the host; and there are a few copies, up, down and both at a time.
 *
 * The first call of each work waits for what is to be known of that (elements, rows, filters), and
 * of elements where that is not known yet, with what there is to know of copies. This is to take
 * less than 100 ms each time, so each step has a budget: what it moves for all works together, and
 * what that takes on a host with 16 cores, whose memory gives 70 GB/s, and on an H200 behind a bus
 * of 50 GB/s. benchmarks/bench_calibration shows what it did take.
 *
 *     step        what is done                                                  MiB   ms
 *     memory      is taken, and cleared, for each work                          350    9
 *     device      a stream, and memory there, which is cleared                  110    1
 *     locked      4 MiB are locked, and sent up                                  20    2
 *     up          copies of 4 KiB, 256 KiB, 2, 16, 48 MiB; a ring is locked     270   10
 *     down        the same, through that ring                                   240    6
 *     kernels     6 operators once, which loads their kernels                    20   17
 *     starts      6 operators on arrays from the host, 6 runs of 60 us each      20    3
 *     parts       48 MiB up and down, 3 runs; two more rings are locked         340    8
 *     on_gpu      6 operators, 6 runs of one call and 6 of five in a row          -    3
 *     cpu_small   8 operators, 6 runs of some 10 us each                         15    1
 *     cpu_large   the same, 2 to 6 runs of 0.2 to 2 ms each, of rows 3 or more  1350   11
 *     cpu_far     2 operators, 2 or 3 runs of 0.15 ms each, whose operands are   300    8
 *                 brought out of the caches before; rows, of 0.7 ms; and an
 *                 image, of 1 ms
 *
 * Of those that do the same work only one is run. Products of matrices are not: on the CPU they are
 * NumPy's, which _calibration.py times in some 20 ms more, or in some 100 where the threads of its
 * BLAS wait for processors, and on the GPU they may be that of a library that takes long to open.
 * There the number of multiprocessors and their clock tell.
 */
#include "common.cuh"
#include "pipeline.cuh"
#include "streamed.cuh"

#include <math.h>
#include <stdlib.h>

/* A call: elements of float32 in each operand, of which a table may have more; the rows that are
 * taken of it; and the pixels of an image's side. */
struct Size {
    int64_t items, table, rows, image;
};

constexpr int64_t WEIGHTS = 5, GPU_ITEMS = 1 << 20, FAR_ROWS = LARGE_ROWS;
constexpr Size SMALL = {SMALL_ITEMS, SMALL_ITEMS, SMALL_ITEMS / 2, 102}; /* SMALL_SUMS */
constexpr Size LARGE = {LARGE_ITEMS, LARGE_ITEMS, LARGE_ROWS, 819};      /* LARGE_SUMS */
constexpr Size FAR = {FAR_ITEMS, FAR_TABLE_ITEMS, FAR_ROWS, 2048};       /* FAR_FILTER_SUMS */
constexpr Size DROPPED = {1 << 20, 0, 0, 0};
constexpr Size ON_GPU = {GPU_ITEMS, GPU_ITEMS, GPU_ITEMS / 2, 1024};
/* More than a slab has room for, and what leaves almost all of it empty. */
constexpr Size BRIEF = {24 << 10, 24 << 10, 12 << 10, 152};
constexpr Size TINY = {256, 256, 128, 16};
constexpr int64_t TINY_COPY_BYTES = 4 << 10, LOCKED_COPY_BYTES = 4 << 20;
constexpr int64_t HUGE_PAGE_BYTES = 2 << 20;
constexpr int64_t DROPPED_GRAIN = 2048;         /* cache lines, which may take some 100 ns each */
constexpr int OPERANDS = GPUOPS_MAX_INPUTS + 1; /* and the result */

/* A figure is the best of some runs: of more where all large calls are expected by it, and of fewer
 * where that takes long. */
constexpr int LEAST_RUNS = 2, MORE_RUNS = 3, MOST_RUNS = 6;
constexpr double ENOUGH_SECONDS = 1e-3, LONG_SECONDS = 8e-3;
/* What is told apart at all. */
constexpr double LEAST_SECONDS = 1e-7;

/* Memory on the host or on the device for the operands of a call, one operand after the other. */
struct Areas {
    char *operands;
    int64_t bytes; /* from one to the next */
    char *out, *indices, *weights;
    int device;
    Stream *stream;
};

/* What is taken on the host is a table that no cache holds, where rows of one are to be measured,
 * of which all other operands take parts; the result of additions lies between theirs. Behind it is
 * what goes with that table. */
constexpr int64_t LARGE_BYTES = LARGE_ITEMS * (int64_t)sizeof(float),
                  FAR_BYTES = FAR_ITEMS * (int64_t)sizeof(float),
                  FAR_TABLE_BYTES = FAR_TABLE_ITEMS * (int64_t)sizeof(float),
                  DROPPED_BYTES = DROPPED.items * (int64_t)sizeof(float),
                  GPU_BYTES = GPU_ITEMS * (int64_t)sizeof(float);
constexpr int64_t LARGE_INDEX_BYTES = LARGE_ROWS * (int64_t)sizeof(int64_t),
                  FAR_ROW_BYTES = FAR_ROWS * (int64_t)sizeof(float),
                  FAR_INDEX_BYTES = FAR_ROWS * (int64_t)sizeof(int64_t),
                  GPU_INDEX_BYTES = GPU_ITEMS / 2 * (int64_t)sizeof(int64_t),
                  WEIGHT_BYTES = 4 << 10;
static_assert(2 * FAR_BYTES <= FAR_TABLE_BYTES &&
                  OPERANDS * LARGE_BYTES + LARGE_INDEX_BYTES <= 2 * FAR_BYTES,
              "");
static_assert(LONG_COPY_BYTES < FAR_BYTES && FAR_BYTES <= OPERANDS * LARGE_BYTES, "");
static_assert(FAR.image * FAR.image * WEIGHTS * WEIGHTS == FAR_FILTER_SUMS &&
                  FAR.image * FAR.image * (int64_t)sizeof(float) <= FAR_BYTES,
              "");

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* The shortest time of some runs: the first one may bring memory into the caches. What is to be
 * done before each of them does not count. */
template <class Function, class Before>
static Status fastest_after(const Before &before, const Function &function, double *seconds,
                            int least = LEAST_RUNS)
{
    const double begun = now();
    *seconds = 0;
    for (int i = 0; i < MOST_RUNS; i++) {
        before();
        const double started = now();
        Status status = function();
        if (status != STATUS_OK) return status;
        const double ended = now(), taken = fmax(ended - started, 1e-9); /* no rate is zero */
        if (i == 0 || taken < *seconds) *seconds = taken;
        if (i + 1 >= least && ended - begun > ENOUGH_SECONDS) break;
        if (i + 1 >= LEAST_RUNS && ended - begun > LONG_SECONDS) break;
    }
    return STATUS_OK;
}

template <class Function>
static Status fastest(const Function &function, double *seconds, int least = LEAST_RUNS)
{
    return fastest_after([] {}, function, seconds, least);
}

/* A step, or more of one, and what it takes. */
template <class Function>
static Status timed(double *seconds, const Function &function)
{
    const double started = now();
    const Status status = function();
    *seconds += now() - started;
    return status;
}

/* Arguments that an operator takes, by the names in its signature. */

static View view_of(const Areas &areas, char *data, Dtype dtype, int ndim, const int64_t *shape)
{
    View view;
    view.data = data;
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

static char *operand_in(const Areas &areas, int i)
{
    return areas.operands + i * areas.bytes;
}

/* The operands of a call. What a call in place changes is where others have their result. */
static void fill_operands(const Areas &areas, const Size &size, Call *call)
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
        View view;
        if (is_named(at, length, "indices"))
            view = view_of(areas, areas.indices, DTYPE_INT64, 1, &size.rows);
        else if (is_named(at, length, "values"))
            view = view_of(areas, areas.operands, DTYPE_FLOAT32, 1, &size.rows);
        else if (is_named(at, length, "weights"))
            view = view_of(areas, areas.weights, DTYPE_FLOAT32, 2, weights);
        else if (filters)
            view = view_of(areas, operand_in(areas, call->input_count), DTYPE_FLOAT32, 2, image);
        else
            view = view_of(areas, operand_in(areas, call->input_count), DTYPE_FLOAT32, 1,
                           takes_rows ? &size.table : &size.items);
        view_copy(is_first && in_place ? &call->out : &call->inputs[call->input_count++], &view);
        is_first = false;
        at += length;
    }
    if (in_place) call->out.data = areas.out;
}

static Status prepare(const Operator *op, const Areas &areas, const Size &size, Call *call)
{
    memset(call, 0, sizeof *call);
    call->op = op;
    call->device = areas.device;
    call->stream = areas.stream;
    call->slot = -1;
    fill_operands(areas, size, call);
    Status status = op->plan(call);
    if (status != STATUS_OK || call->in_place) return status;
    View out = view_of(areas, areas.out, call->out.dtype, call->out.ndim, call->out.shape);
    view_copy(&call->out, &out);
    call->out_is_fresh = true;
    return STATUS_OK;
}

struct Positions {
    int64_t *indices;
    uint64_t places, first; /* to have others each time */
};

/* Without an order. */
static void fill_positions(void *context, int64_t begin, int64_t end)
{
    const Positions &positions = *static_cast<const Positions *>(context);
    for (int64_t i = begin; i < end; i++) {
        uint64_t mixed = (positions.first + (uint64_t)i) * 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93u;
        positions.indices[i] = (int64_t)((mixed >> 33) * positions.places >> 31);
    }
}

static void fill_indices(const Areas &areas, const Size &size, uint64_t first = 0)
{
    Positions positions = {reinterpret_cast<int64_t *>(areas.indices), (uint64_t)size.table, first};
    parallel_for(size.rows, 64 << 10, fill_positions, &positions);
}

/* With other ones than the last time: those are in the cache of the thread that takes them again.
 */
static void fill_next_indices(const Areas &areas, const Size &size, uint64_t *first)
{
    fill_indices(areas, size, *first);
    *first += (uint64_t)size.rows;
}

/* No product of a row and a column. */
static void fill_weights(const Areas &areas)
{
    float *weights = reinterpret_cast<float *>(areas.weights);
    for (int i = 0; i < WEIGHTS * WEIGHTS; i++) weights[i] = 1 + (float)(i * i % 7);
}

/* The one that does the same work, with these operands, in the same loops and kernels or in such as
 * take as long. */
static int measured_as(int op)
{
    switch (op) {
    case OPERATOR_take:
    case OPERATOR_take_along_axis:
        return OPERATOR_gather;
    case OPERATOR_multiply:
        return OPERATOR_add;
    case OPERATOR_convolve:
        return OPERATOR_correlate;
    default:
        return op;
    }
}

/* To load an operator's kernels takes longer than all else that is done with it. Those of elements
 * are as fast as memory, and a product of small matrices takes as long to begin. */
static int measured_on_gpu_as(int op)
{
    switch (op) {
    case OPERATOR_saxpy:
    case OPERATOR_sigmoid_backward:
    case OPERATOR_matmul:
        return OPERATOR_add;
    default:
        return measured_as(op);
    }
}

static bool is_measured(const Operator &op, WorkKind work, bool on_gpu)
{
    return op.work == work &&
           (on_gpu ? measured_on_gpu_as(op.number) : measured_as(op.number)) == op.number;
}

static double *rates_of(double *rates, int op)
{
    return rates + op * RATES_OF_OPERATOR;
}

/* One of an operator's rates on the CPU. */
template <class Before>
static Status measure_rate(const Areas &areas, const Operator &op, const Size &size, int rate,
                           const Before &before, int least, double *rates)
{
    Call call;
    double seconds = 0;
    Status status = prepare(&op, areas, size, &call);
    if (status == STATUS_OK)
        status = fastest_after(before, [&] { return run_call(&call); }, &seconds, least);
    if (status == STATUS_OK) rates_of(rates, op.number)[rate] = seconds / route_units(&call);
    return status;
}

static Status measure_on_cpu(const Areas &areas, WorkKind work, const Size &size, int rate,
                             double *rates)
{
    uint64_t first = 0;
    const auto before = [&] {
        if (work == WORK_ROWS) fill_next_indices(areas, size, &first);
    };
    /* To fill in the indices takes as long as the work. */
    const int least = work == WORK_ROWS ? MORE_RUNS : LEAST_RUNS;
    Status status = STATUS_OK;
    for (const Operator &op : operators)
        if (status == STATUS_OK && is_measured(op, work, false))
            status = measure_rate(areas, op, size, rate, before, least, rates);
    return status;
}

static void leave_caches(void *data, int64_t begin, int64_t end)
{
    drop_from_caches(static_cast<char *>(data) + begin * CACHE_LINE_BYTES, end - begin);
}

template <class Before>
static Status measure_far(const Areas &areas, int op, const Size &size, const Before &before,
                          double *rates)
{
    return measure_rate(areas, operators[op], size, RATE_CPU_FAR, before, LEAST_RUNS, rates);
}

/* The caches of some processors hold more than can be cleared and worked on in a few milliseconds;
 * but they can be told to hold nothing of it, which may take longer than the work. */
static Status measure_far_elements(Areas areas, double *rates)
{
    areas.bytes = DROPPED_BYTES;
    areas.out = operand_in(areas, 2);
    const auto forget = [&] {
        parallel_for(3 * DROPPED_BYTES / CACHE_LINE_BYTES, DROPPED_GRAIN, leave_caches,
                     areas.operands);
    };
    const Status status = measure_far(areas, OPERATOR_add, DROPPED, forget, rates);
    if (status != STATUS_OK) return status;
    return measure_far(areas, OPERATOR_sigmoid, DROPPED, forget, rates);
}

/* Of a table that is as large as that. */
static Status measure_far_rows(const Areas &areas, double *rates)
{
    uint64_t first = 0;
    const auto before = [&] { fill_next_indices(areas, FAR, &first); };
    return measure_far(areas, OPERATOR_gather, FAR, before, rates);
}

/* An image that takes so long that it does not count when the threads wake up. No multiplication
 * takes longer in it than in a smaller one. */
static Status measure_far_image(const Areas &areas, double *rates)
{
    const Status status = measure_far(areas, OPERATOR_correlate, FAR, [] {}, rates);
    double *rate = rates_of(rates, OPERATOR_correlate);
    rate[RATE_CPU_FAR] = fmin(rate[RATE_CPU_FAR], rate[RATE_CPU_LARGE]);
    return status;
}

/* In memory that no cache holds, other rows take so many times as long as well; the rest is bound
 * by what it computes, or by memory as additions are. */
static void estimate_far(WorkKind work, double *rates)
{
    const double *gathers = rates_of(rates, OPERATOR_gather);
    const bool has_gathered = work == WORK_ROWS && gathers[RATE_CPU_FAR] != 0;
    const double times = has_gathered ? gathers[RATE_CPU_FAR] / gathers[RATE_CPU_LARGE] : 1;
    for (const Operator &op : operators) {
        double *rate = rates_of(rates, op.number);
        if (op.work != work || rate[RATE_CPU_FAR] != 0) continue;
        rate[RATE_CPU_FAR] = rate[RATE_CPU_LARGE] * times;
    }
}

/* What remains of the call that measure_parts has made, for each part, when all is known that the
 * model has for the rest: the first part goes up alone, and the last one down, and memory may be
 * slower than the bus. */
static void settle_parts(double *rates)
{
    const double *sigmoid = rates_of(rates, OPERATOR_sigmoid), bytes = (double)FAR_BYTES;
    const double up = copy_seconds(&rates[RATE_UP_SMALL], bytes),
                 down = copy_seconds(&rates[RATE_DOWN_SMALL], bytes);
    const double memory = 2 * bytes * rates_of(rates, OPERATOR_add)[RATE_CPU_FAR];
    const double parts = fmax(bytes / (double)part_bytes(FAR_BYTES), 1);
    const double copies = fmax(fmax(up, down) + fmin(up, down) / parts, memory);
    const double rest = rates[RATE_PART_START] - sigmoid[RATE_START] - copies;
    rates[RATE_PART_START] = fmax(rest / parts, LEAST_SECONDS);
}

static void clear(void *data, int64_t begin, int64_t end)
{
    memset(static_cast<char *>(data) + begin * HUGE_PAGE_BYTES, 0,
           (size_t)((end - begin) * HUGE_PAGE_BYTES));
}

#ifdef __CUDACC__

/* Several runs after each other, less one: without the launch, and the wait for the end. */
static Status measure_on_gpu(const Areas &areas, WorkKind work, double *rates)
{
    constexpr int RUNS = 4;
    for (const Operator &op : operators) {
        Call call;
        double one = 0, several = 0;
        if (!is_measured(op, work, true)) continue;
        Status status = prepare(&op, areas, ON_GPU, &call);
        const auto run = [&](int runs) {
            Status done = STATUS_OK;
            for (int i = 0; i < runs && done == STATUS_OK; i++) done = run_call(&call);
            return done == STATUS_OK ? stream_synchronize(areas.stream, NULL) : done;
        };
        if (status == STATUS_OK) status = fastest([&] { return run(1); }, &one);
        several = one * (1 + RUNS);
        if (status == STATUS_OK && one < ENOUGH_SECONDS)
            status = fastest([&] { return run(1 + RUNS); }, &several);
        if (status != STATUS_OK) return status;
        const double seconds = several > one ? (several - one) / RUNS : one / RUNS;
        rates_of(rates, op.number)[RATE_GPU] = seconds / route_units(&call);
    }
    return STATUS_OK;
}

/* What goes up may still be on its way when the copy returns. */
static Status time_copy(const Areas &to, const Areas &from, int64_t bytes, double *seconds,
                        int least)
{
    View target = view_of(to, to.operands, DTYPE_INT8, 1, &bytes),
         source = view_of(from, from.operands, DTYPE_INT8, 1, &bytes);
    Stream *stream = to.stream != NULL ? to.stream : from.stream;
    const auto run = [&] {
        const Status status = copy_view(&target, &source, stream, NULL);
        return status == STATUS_OK ? stream_synchronize(stream, NULL) : status;
    };
    return fastest(run, seconds, least);
}

/* Seconds for a byte beyond those of the shortest copies. */
static double rate_beyond(double tiny, double seconds, int64_t bytes)
{
    return (seconds > tiny ? seconds - tiny : seconds / 2) / (double)bytes;
}

/* Of short copies, of middle and long ones, and of what is still longer than these. The first one
 * that workers make starts them, and locks the buffers of a ring. */
static Status measure_copies(const Areas &to, const Areas &from, double byte_locked, double *rates)
{
    double tiny = 0, few = 0, some = 0, many = 0, more = 0;
    Status status = time_copy(to, from, TINY_COPY_BYTES, &tiny, LEAST_RUNS);
    if (status == STATUS_OK) status = time_copy(to, from, SHORT_COPY_BYTES, &few, LEAST_RUNS);
    if (status == STATUS_OK) status = time_copy(to, from, MIDDLE_COPY_BYTES, &some, LEAST_RUNS);
    if (status == STATUS_OK) status = time_copy(to, from, MIDDLE_COPY_BYTES, &some, MORE_RUNS);
    if (status == STATUS_OK) status = time_copy(to, from, LONG_COPY_BYTES, &many, MORE_RUNS);
    if (status == STATUS_OK) status = time_copy(to, from, FAR_BYTES, &more, MORE_RUNS);
    rates[0] = rate_beyond(tiny, few, SHORT_COPY_BYTES);
    rates[1] = rate_beyond(tiny, some, MIDDLE_COPY_BYTES);
    rates[2] = rate_beyond(tiny, many, LONG_COPY_BYTES);
    /* A busy moment makes the difference too large or too small, but no copy is faster than the
     * bus, nor slower at its end than all in all. */
    const double further = (more - many) / (double)(FAR_BYTES - LONG_COPY_BYTES);
    rates[3] = fmin(fmax(further, byte_locked), rate_beyond(tiny, more, FAR_BYTES));
    return status;
}

/* To lock memory takes ten times as long as to send it up. */
static Status measure_locked_copy(const Areas &to, double *rate)
{
    void *block;
    double tiny = 0, seconds = 0;
    Status status = pinned_allocate(to.device, LOCKED_COPY_BYTES, &block);
    if (status != STATUS_OK) return status;
    const Areas from = {
        static_cast<char *>(block), LOCKED_COPY_BYTES, NULL, NULL, NULL, DEVICE_CPU, NULL};
    status = time_copy(to, from, TINY_COPY_BYTES, &tiny, LEAST_RUNS);
    if (status == STATUS_OK) status = time_copy(to, from, LOCKED_COPY_BYTES, &seconds, MORE_RUNS);
    pinned_free(block);
    *rate = rate_beyond(tiny, seconds, LOCKED_COPY_BYTES);
    return status;
}

/* A call between host arrays on the device. */
static Status run_whole(const Operator &op, const Areas &host, const Areas &areas, const Size &size)
{
    Call call;
    Status status = prepare(&op, host, size, &call);
    call.device = areas.device;
    call.stream = areas.stream;
    return status == STATUS_OK ? run_call(&call) : status;
}

static Status upload(const Areas &areas, char *to, const Areas &host, char *from, int64_t bytes)
{
    View target = view_of(areas, to, DTYPE_INT8, 1, &bytes),
         source = view_of(host, from, DTYPE_INT8, 1, &bytes);
    return copy_view(&target, &source, areas.stream, NULL);
}

/* To load a kernel takes much longer than to run it, and is over when it has been run once. */
static Status load_kernels(const Areas &host, const Areas &areas, WorkKind work)
{
    Status status = STATUS_OK;
    if (work == WORK_ROWS) {
        fill_indices(host, ON_GPU);
        status = upload(areas, areas.indices, host, host.indices, GPU_INDEX_BYTES);
        fill_indices(host, BRIEF);
    } else if (work == WORK_FILTERS) {
        status = upload(areas, areas.weights, host, host.weights, WEIGHT_BYTES);
    }
    for (const Operator &op : operators) {
        Call call;
        if (!is_measured(op, work, true)) continue;
        if (status == STATUS_OK) status = prepare(&op, areas, ON_GPU, &call);
        if (status == STATUS_OK) status = run_call(&call);
        if (status == STATUS_OK) status = run_whole(op, host, areas, BRIEF);
    }
    return status == STATUS_OK ? stream_synchronize(areas.stream, NULL) : status;
}

/* What the model has for the copies of a call. */
static Status count_copies(const Operator &op, const Areas &host, const Size &size,
                           const double *rates, double *seconds)
{
    Call call;
    const Status status = prepare(&op, host, size, &call);
    if (status != STATUS_OK) return status;
    const auto bytes = [](const View &view) {
        return (double)(view_items(&view) * view.item_bytes);
    };
    double up = call.in_place ? bytes(call.out) : 0;
    for (int k = 0; k < call.input_count; k++) up += bytes(call.inputs[k]);
    *seconds = up * rates[RATE_UP_SMALL] + bytes(call.out) * rates[RATE_DOWN_SMALL];
    return STATUS_OK;
}

static Status measure_starts(const Areas &host, const Areas &areas, WorkKind work, double *rates)
{
    if (work == WORK_ROWS) fill_indices(host, BRIEF);
    for (const Operator &op : operators) {
        double whole = 0, copies = 0;
        if (!is_measured(op, work, true)) continue;
        Status status = fastest([&] { return run_whole(op, host, areas, BRIEF); }, &whole);
        if (status == STATUS_OK) status = count_copies(op, host, BRIEF, rates, &copies);
        if (status != STATUS_OK) return status;
        rates_of(rates, op.number)[RATE_START] = fmax(whole - copies, whole / 2);
    }
    if (work != WORK_ELEMENTS) return STATUS_OK;
    const Operator &add = operators[OPERATOR_add];
    return fastest([&] { return run_whole(add, host, areas, TINY); }, &rates[RATE_SLAB_START]);
}

/* By a call whose parts go up and down at the same time, as many bytes each way. */
static Status measure_parts(const Areas &host, const Areas &areas, double *rates)
{
    const Operator &sigmoid = operators[OPERATOR_sigmoid];
    return fastest([&] { return run_whole(sigmoid, host, areas, FAR); }, &rates[RATE_PART_START],
                   MORE_RUNS);
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
    rates_of(rates, OPERATOR_matmul)[RATE_GPU] = 1 / (0.75 * units * clocks);
    rates[RATE_GPU_DOUBLE_FACTOR] = minor == 0 && major >= 6 && major <= 10 ? 2 : 64;
    rates[RATE_GPU_SHORT_FACTOR] = major >= 8 ? 1.0 / 8 : 1;
    return STATUS_OK;
}

static Status take_areas(int64_t bytes, Memory **memory, Areas *areas)
{
    Status status = memory_allocate(areas->stream, bytes, memory);
    if (status != STATUS_OK) return status;
    areas->operands = memory_data(*memory);
    areas->out = operand_in(*areas, OPERANDS - 1);
    areas->indices = operand_in(*areas, OPERANDS);
    areas->weights = areas->indices + GPU_INDEX_BYTES;
    const char zero = 0;
    View all = view_of(*areas, areas->operands, DTYPE_INT8, 1, &bytes);
    return fill_view_with(&all, &zero, areas->stream);
}

/* Nothing may still be at work on memory that goes. */
static Status give_areas(Memory *memory, const Areas &areas, Status status)
{
    if (status != STATUS_OK)
        status = even_so(status, [&] { return stream_synchronize(areas.stream, NULL); });
    if (memory != NULL) memory_release(memory);
    return status;
}

static Status measure_all_copies(const Areas &host, Areas areas, double *rates, double *steps)
{
    Memory *memory = NULL;
    Status status =
        timed(&steps[STEP_DEVICE], [&] { return take_areas(FAR_BYTES, &memory, &areas); });
    const auto step = [&](int number, const auto &function) {
        if (status == STATUS_OK) status = timed(&steps[number], function);
    };
    const double *bus = &rates[RATE_UP_LOCKED];
    step(STEP_LOCKED, [&] { return measure_locked_copy(areas, &rates[RATE_UP_LOCKED]); });
    step(STEP_UP, [&] { return measure_copies(areas, host, *bus, &rates[RATE_UP_SMALL]); });
    step(STEP_DOWN, [&] { return measure_copies(host, areas, *bus, &rates[RATE_DOWN_SMALL]); });
    return give_areas(memory, areas, status);
}

static Status measure_calls(const Areas &host, const Areas &far, Areas areas, WorkKind work,
                            double *rates, double *steps)
{
    constexpr int64_t BYTES = OPERANDS * GPU_BYTES + GPU_INDEX_BYTES + WEIGHT_BYTES;
    Memory *memory = NULL;
    Status status = timed(&steps[STEP_DEVICE], [&] { return take_areas(BYTES, &memory, &areas); });
    const auto step = [&](int number, const auto &function) {
        if (status == STATUS_OK) status = timed(&steps[number], function);
    };
    step(STEP_KERNELS, [&] { return load_kernels(host, areas, work); });
    step(STEP_STARTS, [&] { return measure_starts(host, areas, work, rates); });
    if (work == WORK_ELEMENTS) step(STEP_PARTS, [&] { return measure_parts(far, areas, rates); });
    step(STEP_ON_GPU, [&] { return measure_on_gpu(areas, work, rates); });
    return give_areas(memory, areas, status);
}

static Status measure_with_gpu(const Areas &host, const Areas &far, int device, WorkKind work,
                               double *rates, double *steps)
{
    Areas areas = {NULL, GPU_BYTES, NULL, NULL, NULL, device, NULL};
    Status status =
        timed(&steps[STEP_DEVICE], [&] { return stream_create(device, true, 0, &areas.stream); });
    if (status != STATUS_OK) return status;
    if (work == WORK_ELEMENTS) status = measure_all_copies(host, areas, rates, steps);
    if (status == STATUS_OK) status = measure_calls(host, far, areas, work, rates, steps);
    stream_release(areas.stream);
    return status;
}

static Status measure_gpu(const Areas &host, const Areas &far, int device, WorkKind work,
                          double *rates, double *steps)
{
    if (device_is_captured(device)) return refuse_capture("measure this machine");
    int previous;
    Status status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    status = measure_with_gpu(host, far, device, work, rates, steps);
    device_leave(device, previous);
    return status;
}

#else

static Status measure_gpu(const Areas &, const Areas &, int, WorkKind, double *, double *)
{
    int count;
    return cuda_device_count(&count);
}

static Status estimate_products(int, double *)
{
    int count;
    return cuda_device_count(&count);
}

#endif

/* In huge pages, of which each is touched by one thread. Afterwards results have them. */
static char *take_memory(int64_t bytes)
{
    void *data = host_take(bytes);
    if (data != NULL) parallel_for(bytes / HUGE_PAGE_BYTES, 1, clear, data);
    return static_cast<char *>(data);
}

const char *step_name(int step)
{
    static const char *const NAMES[] = {
        "memory", "device", "locked", "up",        "down",      "kernels",
        "starts", "parts",  "on_gpu", "cpu_small", "cpu_large", "cpu_far",
    };
    static_assert(sizeof NAMES / sizeof *NAMES == STEPS, "");
    return NAMES[step];
}

/* Where there is no GPU, nothing is to be chosen, and less memory will do. */
static int64_t bytes_of(int device, WorkKind work)
{
    const int64_t large = OPERANDS * LARGE_BYTES + LARGE_INDEX_BYTES,
                  far = work == WORK_ROWS ? FAR_TABLE_BYTES + FAR_ROW_BYTES + FAR_INDEX_BYTES
                                          : 2 * FAR_BYTES;
    const int64_t used = WEIGHT_BYTES + (device == DEVICE_CPU ? large : far);
    return round_up(used, HUGE_PAGE_BYTES);
}

static Status measure(char *data, int device, WorkKind work, double *rates, double *steps)
{
    const bool with_gpu = device != DEVICE_CPU;
    char *indices = data + OPERANDS * LARGE_BYTES, *rows = data + FAR_TABLE_BYTES;
    char *weights = data + bytes_of(device, work) - WEIGHT_BYTES;
    const Areas host = {
        data, LARGE_BYTES, data + (OPERANDS - 1) * LARGE_BYTES, indices, weights, DEVICE_CPU, NULL};
    const Areas far = {data,       2 * FAR_BYTES, data + FAR_BYTES, rows + FAR_ROW_BYTES, weights,
                       DEVICE_CPU, NULL};
    Areas table = far;
    table.out = rows;
    fill_weights(host);
    Status status = STATUS_OK;
    const auto step = [&](int number, const auto &function) {
        if (status == STATUS_OK) status = timed(&steps[number], function);
    };
    /* First the GPU: what the process has done before may have left the processors slow. */
    if (with_gpu) status = measure_gpu(host, far, device, work, rates, steps);
    step(STEP_CPU_SMALL, [&] { return measure_on_cpu(host, work, SMALL, RATE_CPU_SMALL, rates); });
    step(STEP_CPU_LARGE, [&] { return measure_on_cpu(host, work, LARGE, RATE_CPU_LARGE, rates); });
    if (with_gpu)
        step(STEP_CPU_FAR, [&] {
            return work == WORK_ROWS      ? measure_far_rows(table, rates)
                   : work == WORK_FILTERS ? measure_far_image(far, rates)
                                          : measure_far_elements(host, rates);
        });
    if (status == STATUS_OK && with_gpu && work == WORK_ELEMENTS) settle_parts(rates);
    return status;
}

/* Of operators that others have been measured for. */
static void copy_rates(WorkKind work, double *rates)
{
    for (const Operator &op : operators) {
        double *rate = rates_of(rates, op.number);
        const double *on_cpu = rates_of(rates, measured_as(op.number)),
                     *on_gpu = rates_of(rates, measured_on_gpu_as(op.number));
        if (op.work != work) continue;
        if (on_cpu != rate) memcpy(rate, on_cpu, RATES_OF_OPERATOR * sizeof *rate);
        if (work != WORK_PRODUCTS) rate[RATE_GPU] = on_gpu[RATE_GPU];
        rate[RATE_START] = on_gpu[RATE_START];
    }
}

static Status measure_in_memory(int device, WorkKind work, double *rates, double *steps)
{
    const int64_t bytes = bytes_of(device, work);
    const double started = now();
    char *data = take_memory(bytes);
    if (data == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes to measure this machine",
                    (long long)bytes);
    steps[STEP_MEMORY] = now() - started;
    Status status = measure(data, device, work, rates, steps);
    const double ended = now();
    host_give(data);
    steps[STEP_MEMORY] += now() - ended;
    return status;
}

Status machine_measure(int device, WorkKind work, double rates[RATES], double steps[STEPS])
{
    Status status = STATUS_OK;
    machine_rates(device, rates);
    for (int i = 0; i < RATES; i++)
        if (work_of_rate(i) == work) rates[i] = 0;
    for (int i = 0; i < STEPS; i++) steps[i] = 0;
    if (work != WORK_PRODUCTS) status = measure_in_memory(device, work, rates, steps);
    if (status == STATUS_OK && device != DEVICE_CPU) status = estimate_products(device, rates);
    if (status != STATUS_OK) return status;
    estimate_far(work, rates);
    copy_rates(work, rates);
    return STATUS_OK;
}
