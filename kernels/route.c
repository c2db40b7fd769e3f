/* Where a call between host arrays runs: the cost model behind device="auto" and explain().
 *
 *     CPU     units * seconds of a unit, and no less than memory takes
 *     CUDA    start, bytes up, units * seconds of a unit on the GPU, bytes down
 *
 * What a unit is depends on the work: a byte of the operands and the result; for rows, a byte of
 * these, and of the lines of memory that a row touches; for sums, a multiplication of float32. How
 * long it takes was measured on this machine, once (measure.cu), for calls of three sizes, and in
 * between it is interpolated: by the bytes within which a call works, which are in one cache or
 * another; sums are long enough to go by their number, which tells how many threads have to do.
 * Each operand has a copy of its own, and long copies take less for a byte than short ones. Calls
 * that take less than the way to a GPU and back on any machine run on the CPU, and nothing is
 * measured for them.
 *
 * What a table of gather's takes to go up, or to be read where it is, gather_way.c tells, by which
 * gather goes itself.
 */
#define _POSIX_C_SOURCE 200809L
#include "gather_way.h"
#include "gpuops.h"
#include "waiting.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LINE_BYTES = 64 };

/* A GPU takes 10 us and more to take a call in and to give its result back. */
static const double CLEAR_BYTES = 32 << 10, CLEAR_ROWS = 2048, CLEAR_SUMS = 32 << 10;

/* What takes a microsecond or so. */
static const double BRIEF_BYTES = 4 << 10, BRIEF_ROWS = MOST_FEW, BRIEF_SUMS = 4 << 10;

/* Of operators on elements, what takes some microseconds, and few page faults for an operand. */
static const double BRIEF_ITEMS = 4 << 10, BRIEF_CLOSE_BYTES = 16 << 10;
static const int64_t BRIEF_EXTENT = 32 << 10;

/* The calls that were measured, by what their rates go by. What was measured as far elements is
 * what no cache holds anything of, and some hold the most of some 100 MiB. */
enum { SIZES = 3 };
static const double OPERAND_BYTES[] = {12.0 * SMALL_ITEMS, 12.0 * LARGE_ITEMS, 512 << 20};
static const double TABLE_BYTES[] = {4.0 * SMALL_ITEMS, 4.0 * LARGE_ITEMS, 4.0 * FAR_TABLE_ITEMS};
static const double MEASURED_ROW_BYTES = LARGE_ROWS * (sizeof(int64_t) + sizeof(float));
static const double SUMS[] = {SMALL_SUMS, LARGE_SUMS, FAR_SUMS};
static const double FILTER_SUMS[] = {SMALL_SUMS, LARGE_SUMS, FAR_FILTER_SUMS};

/* Below this, nobody asks what is page-locked. */
static const double LARGE_BYTES = 16 << 20;

/* How far apart the two have to be for the GPU to be taken. Of rows both err alike. Elements that
 * no cache holds take the CPU less than is expected, products and filters the GPU more; and
 * products are NumPy's own on the CPU, than which the GPU is to take hardly longer. */
static const double DOUBT[WORK_KINDS] = {
    [WORK_ELEMENTS] = 1.05, [WORK_ROWS] = 1, [WORK_PRODUCTS] = 1.15, [WORK_FILTERS] = 1.05};

/* To ask a GPU for room takes as long as a small call: for less than this, what it said of late
 * counts. */
static const double ROOM_BYTES = 64 << 20;
enum { ROOM_MICROSECONDS = 100000 };

/* What a call takes in the smallest parts, and what cuBLASLt may want beside the operands. */
static const double PARTS_BYTES = 32 << 20, BLAS_BYTES = 32 << 20;
/* With less than this gather makes do, but only slowly; what a filter may take for each weight. */
static const double GATHER_BYTES = 1 << 20, WEIGHT_BYTES = 16;
/* What scatter and scatter_add may take for tables or counts of digits, and for each index, to sort
 * them. */
static const double SCATTER_BYTES = 36 << 20, INDEX_BYTES = 32;

/* What a call consists of. Bytes are those of the dtype that is computed in. */
typedef struct Weight {
    double up, down;    /* bytes that would go to a GPU, and come back, */
    double up_locked;   /* and of these the bytes from page-locked memory, */
    double down_locked; /* and to it, as far as that is known */
    double largest;     /* bytes of the largest operand, or of the result */
    double touched;     /* bytes that are read and written at least */
    double working;     /* bytes within which that is */
    double units;       /* of work */
    double row_bytes;   /* WORK_ROWS */
    double table;       /* bytes that would go up for the array that is read in rows, */
    bool is_reachable;  /* and whether a kernel can read it where it is */
    /* Of each operand what else goes up; the last one is what is changed in place. */
    double copied[GPUOPS_MAX_INPUTS + 1];
} Weight;

static double bytes_of_input(const Call *call, int i)
{
    const View *input = &call->inputs[i];
    const bool casts = call->cast_inputs >> i & 1 && call->compute != DTYPE_OPAQUE;
    double bytes = (double)(casts ? dtype_bytes(call->compute) : input->item_bytes);
    /* Of what an element-wise operator repeats, one goes up. */
    for (int k = 0; k < input->ndim; k++)
        if (!call->elementwise || input->strides[k] != 0) bytes *= (double)input->shape[k];
    return bytes;
}

bool input_is_cast_at_work(const Call *call, int i)
{
    enum { LEAST_ITEMS = 1 << 14 }; /* for which it pays */
    const View *input = &call->inputs[i];
    return call->cast_inputs >> i & 1 && input->dtype != call->compute && input->weak == WEAK_NOT &&
           view_items(input) >= LEAST_ITEMS && dtype_widens(input->dtype, call->compute);
}

static bool is_cast_after_copy(const Call *call, int i)
{
    return call->compute != DTYPE_OPAQUE && input_is_cast_at_work(call, i);
}

/* The part of them that goes up, where the cast comes after that. */
static double part_sent(const Call *call, int i)
{
    if (!is_cast_after_copy(call, i)) return 1;
    return (double)call->inputs[i].item_bytes / (double)dtype_bytes(call->compute);
}

static bool stays_on_host(const Call *call, int i, double bytes)
{
    if (call->inputs[i].device != DEVICE_CPU) return true;
    if (call->host_inputs >> i & 1 && !call->own_transfer) return true;
    return call->elementwise && bytes <= (double)dtype_bytes(call->compute);
}

static double bytes_of_lines(const Call *call, const Weight *weight)
{
    const double row = weight->row_bytes > LINE_BYTES ? weight->row_bytes : LINE_BYTES;
    return call->operations * row;
}

static void weigh_rows(const Call *call, Weight *weight)
{
    const View *x = call->in_place ? &call->out : &call->inputs[0];
    const double rows = call->operations, indices = bytes_of_input(call, call->in_place ? 0 : 1);
    const int after = call->axis_is_none ? x->ndim : call->axis + 1;
    double moved = weight->down;
    if (call->in_place) moved = rows * view_count(x, after, x->ndim) * (double)x->item_bytes;
    weight->row_bytes = rows > 0 ? moved / rows : 0;
    weight->touched = moved + indices;
    weight->units = weight->touched + bytes_of_lines(call, weight);
    uintptr_t begin, end;
    view_extent(x, &begin, &end);
    /* Rows may share memory, which goes up as it lies. */
    weight->working =
        fmin((double)x->item_bytes * view_count(x, 0, x->ndim), (double)(end - begin));
    if (call->in_place || stays_on_host(call, 0, weight->working)) return;
    /* Of a table of which nothing is taken, nothing goes up. */
    weight->table = moved > 0 ? weight->working : 0;
    weight->up += weight->table - weight->copied[0];
    weight->copied[0] = 0;
}

/* What goes up where the kernel reads the rows of a table in place: the lines that they touch. */
static double zero_copy_bytes(const Call *call, const Weight *weight)
{
    return weight->up - weight->table + bytes_of_lines(call, weight);
}

static bool is_narrow(Dtype dtype)
{
    return dtype_is_float(dtype) && dtype != DTYPE_FLOAT64;
}

static bool has_sums(const Call *call)
{
    return call->op->work == WORK_PRODUCTS || call->op->work == WORK_FILTERS;
}

/* How many multiplications of float32 one of another dtype is worth. */
static double sums_factor(const Call *call, const double *rates, bool on_gpu)
{
    const bool multiplies = call->op->work == WORK_PRODUCTS;
    const Dtype dtype = multiplies ? call->compute : call->out.dtype;
    const double wide = on_gpu ? rates[RATE_GPU_DOUBLE_FACTOR] : 2;
    switch (dtype) {
    case DTYPE_FLOAT32:
    case DTYPE_FLOAT16:
    case DTYPE_BFLOAT16:
        /* Filters are summed in float64 unless both images are narrower. */
        if (!multiplies) return is_narrow(call->inputs[0].dtype) ? 1 : wide;
        return dtype != DTYPE_FLOAT32 && on_gpu ? rates[RATE_GPU_SHORT_FACTOR] : 1;
    case DTYPE_FLOAT64:
        return wide;
    case DTYPE_COMPLEX64:
        return 4;
    case DTYPE_COMPLEX128:
        return 4 * wide;
    default:
        return !multiplies ? wide : on_gpu ? 4 : rates[RATE_INTEGER_FACTOR];
    }
}

static void weigh(const Call *call, Weight *weight)
{
    memset(weight, 0, sizeof *weight);
    weight->down = (double)call->out.item_bytes * view_count(&call->out, 0, call->out.ndim);
    if (call->in_place) weight->up = weight->copied[GPUOPS_MAX_INPUTS] = weight->down;
    weight->touched = weight->largest = weight->down;
    for (int i = 0; i < call->input_count; i++) {
        const double bytes = bytes_of_input(call, i);
        weight->touched += bytes;
        weight->largest = fmax(weight->largest, bytes);
        if (stays_on_host(call, i, bytes)) continue;
        weight->up += weight->copied[i] = bytes * part_sent(call, i);
    }
    weight->working = weight->units = weight->touched;
    if (call->op->work == WORK_ROWS) weigh_rows(call, weight);
    if (has_sums(call)) weight->units = call->operations;
}

/* The bytes of a large call that go between page-locked memory and the bus without the threads of
 * the host. Tables of gather's apart, which are known to be in reach or not. */
static void find_locked(const Call *call, Weight *weight)
{
    if (weight->up + weight->down <= LARGE_BYTES) return;
    for (int i = 0; i < call->input_count; i++) {
        if (weight->copied[i] == 0 || !view_is_in_reach(&call->inputs[i])) continue;
        weight->up_locked += weight->copied[i];
        weight->copied[i] = 0;
    }
    const View *target = call->in_place ? &call->out : call->given;
    if (target == NULL || !view_is_in_reach(target)) return;
    weight->down_locked = weight->down;
    weight->up_locked += weight->copied[GPUOPS_MAX_INPUTS];
    weight->copied[GPUOPS_MAX_INPUTS] = 0;
}

double route_units(const Call *call)
{
    Weight weight;
    weigh(call, &weight);
    return weight.units;
}

/* Seconds for one of many, between a rate that was measured for few and one for many. */
static double interpolate(double small, double large, double at, double few, double many)
{
    if (at <= few) return small;
    if (at >= many) return large;
    return small * pow(large / small, log(at / few) / log(many / few));
}

/* Of rates that were measured at some sizes. */
static double rate_at(const double rates[SIZES], const double at[SIZES], double size)
{
    int i = 0;
    while (i < SIZES - 2 && size > at[i + 1]) i++;
    return interpolate(rates[i], rates[i + 1], size, at[i], at[i + 1]);
}

static double rate_on_cpu(const double *rates, int op, const double at[SIZES], double size)
{
    return rate_at(rates + op * RATES_OF_OPERATOR + RATE_CPU_SMALL, at, size);
}

/* The driver makes short copies alone. Those by workers take some time to begin, however long they
 * are. */
double copy_seconds(const double rates[4], double bytes)
{
    if (bytes < MIDDLE_COPY_BYTES) return bytes * rates[0];
    const double beyond = fmax(bytes - LONG_COPY_BYTES, 0), rest = bytes - beyond;
    const double rate = interpolate(rates[1], rates[2], rest, MIDDLE_COPY_BYTES, LONG_COPY_BYTES);
    return rest * rate + beyond * rates[3];
}

/* Where all threads are at work, the first sums take longer than what comes on top of them. */
static double seconds_of_products(const double *rates, double sums)
{
    const double *rate = rates + OPERATOR_matmul * RATES_OF_OPERATOR + RATE_CPU_SMALL;
    if (sums <= LARGE_SUMS || sums >= FAR_SUMS) return sums * rate_at(rate, SUMS, sums);
    const double large = LARGE_SUMS * rate[1], far = FAR_SUMS * rate[2];
    return large + (far - large) * (sums - LARGE_SUMS) / (FAR_SUMS - LARGE_SUMS);
}

/* What no cache holds is read and written as fast as it is added. */
static double memory_rate(const double *rates)
{
    return rates[OPERATOR_add * RATES_OF_OPERATOR + RATE_CPU_FAR];
}

/* Rows that were measured are in a cache, with their indices. More of them, if they are taken,
 * come from memory and go there; of long rows that is in their units. Many that are set are put in
 * order first, by the parts of the table that a cache holds. */
static double seconds_of_rows(const Call *call, const Weight *weight, const double *rates)
{
    const double rate = rate_on_cpu(rates, call->op->number, TABLE_BYTES, weight->working);
    const double work = weight->units * rate;
    if (call->in_place) return work;
    const double of_long = call->operations * fmax(weight->row_bytes - LINE_BYTES, 0);
    const double beyond = fmax(weight->touched - of_long - MEASURED_ROW_BYTES, 0);
    return work + beyond * memory_rate(rates);
}

static double seconds_on_cpu(const Call *call, const Weight *weight, const double *rates)
{
    const int op = call->op->number;
    if (call->op->work == WORK_ROWS) return seconds_of_rows(call, weight, rates);
    /* What takes no longer than the sums that it computes takes as long as memory does. */
    const double memory =
        weight->touched * rate_on_cpu(rates, OPERATOR_add, OPERAND_BYTES, weight->working);
    double work;
    if (call->op->work == WORK_PRODUCTS)
        work = seconds_of_products(rates, call->operations);
    else if (call->op->work == WORK_FILTERS)
        work = weight->units * rate_on_cpu(rates, op, FILTER_SUMS, call->operations);
    else
        work = weight->units * rate_on_cpu(rates, op, OPERAND_BYTES, weight->working);
    if (has_sums(call)) work *= sums_factor(call, rates, false);
    return fmax(work, memory);
}

/* A row costs the lines that it touches, of the table and of the indices, and its bytes twice. */
static void set_gather_rates(const double *rates, double table_bytes, GatherRates *found)
{
    const double rate = rate_on_cpu(rates, OPERATOR_gather, TABLE_BYTES, table_bytes);
    found->byte_up = rates[RATE_UP_LOCKED];
    found->byte_copied_up = copy_seconds(rates + RATE_UP_SMALL, table_bytes) / fmax(table_bytes, 1);
    found->host_row = rate * (LINE_BYTES + sizeof(int64_t));
    found->host_byte = rate * 2;
}

/* What goes through a slab is a launch and a wait, whatever the operator. */
static double start_of(const Call *call, const double *rates)
{
    const double start = rates[call->op->number * RATES_OF_OPERATOR + RATE_START];
    return call_suits_slab(call) ? fmin(start, rates[RATE_SLAB_START]) : start;
}

/* By gather, which takes the way of the two that takes less. */
static double seconds_of_table(const Call *call, const Weight *weight, const double *rates,
                               RouteWay way)
{
    if (!weight->is_reachable) return copy_seconds(rates + RATE_UP_SMALL, weight->table);
    GatherCase given = {.rows = (int64_t)fmin(call->operations, 9e18),
                        .row_bytes = (int64_t)weight->row_bytes,
                        .is_reachable = true};
    given.table_bytes = given.range_bytes = given.span_bytes = (int64_t)fmin(weight->table, 9e18);
    set_gather_rates(rates, weight->table, &given.rates);
    return gather_seconds(&given, way == WAY_ZERO_COPY ? GATHER_IN_PLACE : GATHER_WHOLE);
}

/* Large calls go in parts, so that copies up and down and the work go on at the same time. */
static double parts_of(double bytes)
{
    const int64_t whole = (int64_t)fmin(bytes, 9e18);
    return is_worth_parts(whole) ? ceil(bytes / (double)part_bytes(whole)) : 1;
}

/* Of copies up and down, of which parts go on at the same time; but the first part goes up, and the
 * last one comes down, while nothing else does. The bus has room for both. The memory of the host
 * has to read, or to write, each byte that is not page-locked, and is as fast at that as an
 * addition is: what lies between, in page-locked buffers, its caches hold. */
static double seconds_of_both(const Weight *weight, const double *rates, double up, double down,
                              double parts)
{
    const double bytes = weight->up - weight->up_locked + weight->down - weight->down_locked;
    return fmax(fmax(up, down) + fmin(up, down) / parts, bytes * memory_rate(rates));
}

/* Between host arrays. The bus is as fast down as up. */
static double seconds_on_gpu(const Call *call, const Weight *weight, const double *rates,
                             RouteWay way)
{
    const double *rate = rates + call->op->number * RATES_OF_OPERATOR;
    const double start = start_of(call, rates);
    double up = weight->up_locked * rates[RATE_UP_LOCKED];
    up += seconds_of_table(call, weight, rates, way);
    for (int i = 0; i <= GPUOPS_MAX_INPUTS; i++)
        up += copy_seconds(rates + RATE_UP_SMALL, weight->copied[i]);
    const double down = copy_seconds(rates + RATE_DOWN_SMALL, weight->down - weight->down_locked) +
                        weight->down_locked * rates[RATE_UP_LOCKED];
    double work = weight->units * rate[RATE_GPU];
    if (has_sums(call)) {
        work *= sums_factor(call, rates, true);
        work = fmax(work, weight->touched * rates[OPERATOR_add * RATES_OF_OPERATOR + RATE_GPU]);
    }
    const double parts = call->run_in_parts == NULL ? 1 : parts_of(weight->largest);
    if (parts == 1) return start + up + work + down;
    const double copies = seconds_of_both(weight, rates, up, down, parts);
    return start + parts * rates[RATE_PART_START] + fmax(copies, work) + fmin(copies, work) / parts;
}

/* What is known of the machine. */

enum { MOST_DEVICES = 64 };
enum { FIRST_PAUSE = 1000, LONGEST_PAUSE = 64000 }; /* milliseconds, after a failure */
static struct {
    unsigned known;   /* bit w: the rates of work w; atomic */
    int state;        /* a Measured, of what is not known; atomic */
    int64_t again_at; /* after a failure, when the next try is due; atomic */
    int64_t pause;    /* after the last failure */
    double rates[RATES];
} machines[MOST_DEVICES + 1]; /* the first one is the CPU alone */

/* What an addition takes that goes to the nearest of the measured devices and does nothing there,
 * as the bits of a double; 0: none is measured. All of these are atomic. */
static uint64_t least_start;
static int least_device;
static int is_without_gpu;

static int place_of_device(int device)
{
    return device < 0 ? 0 : device + 1;
}

static bool is_known(int place, WorkKind work)
{
    return __atomic_load_n(&machines[place].known, __ATOMIC_ACQUIRE) >> work & 1;
}

Measured machine_measured(int device, WorkKind work)
{
    if (device >= MOST_DEVICES) return MEASURED_FAILED;
    const int place = place_of_device(device);
    if (is_known(place, work)) return MEASURED;
    return (Measured)__atomic_load_n(&machines[place].state, __ATOMIC_ACQUIRE);
}

static const double *rates_of(int device, WorkKind work)
{
    const bool known = machine_measured(device, work) == MEASURED;
    return known ? machines[place_of_device(device)].rates : NULL;
}

/* The CPU is measured with a device, or where there is none that can be used, without. */
static const double *rates_of_cpu(WorkKind work)
{
    const bool with_device = __atomic_load_n(&least_start, __ATOMIC_ACQUIRE) != 0;
    const int device = with_device ? __atomic_load_n(&least_device, __ATOMIC_RELAXED) : DEVICE_CPU;
    const double *rates = rates_of(device, work);
    return rates != NULL ? rates : rates_of(DEVICE_CPU, work);
}

void route_gather_rates(int device, double table_bytes, GatherRates *found)
{
    const double *rates = rates_of(device, WORK_ROWS);
    int threads;
    if (rates != NULL)
        set_gather_rates(rates, table_bytes, found);
    else
        gather_guess_rates(cpu_threads(&threads) == STATUS_OK ? threads : 1, found);
}

bool machine_claim(int device, WorkKind work, bool again)
{
    if (device >= MOST_DEVICES) return false;
    const int place = place_of_device(device);
    int *state = &machines[place].state, before = __atomic_load_n(state, __ATOMIC_ACQUIRE);
    /* Whoever leaves after a failure sets these before. */
    if (before == MEASURED_FAILED && !again &&
        microseconds() / 1000 < __atomic_load_n(&machines[place].again_at, __ATOMIC_RELAXED))
        return false;
    if (before == MEASURED_UNDER_WAY ||
        !__atomic_compare_exchange_n(state, &before, MEASURED_UNDER_WAY, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return false;
    if (!is_known(place, work)) return true;
    __atomic_store_n(state, before, __ATOMIC_RELEASE); /* another one has come before */
    return false;
}

/* Memory may be there a moment later. What lasts is asked for ever more seldom. */
static void put_off(int place)
{
    int64_t pause = machines[place].pause; /* of the one who has claimed the machine */
    pause = pause == 0 ? FIRST_PAUSE : pause < LONGEST_PAUSE ? 2 * pause : pause;
    machines[place].pause = pause;
    __atomic_store_n(&machines[place].again_at, microseconds() / 1000 + pause, __ATOMIC_RELAXED);
}

void machine_leave(int device, bool failed)
{
    const int place = place_of_device(device);
    if (failed)
        put_off(place);
    else
        machines[place].pause = 0;
    __atomic_store_n(&machines[place].state, failed ? MEASURED_FAILED : MEASURED_NOT,
                     __ATOMIC_RELEASE);
}

void machine_rates(int device, double rates[RATES])
{
    for (int i = 0; i < RATES; i++) {
        const double *known = rates_of(device, work_of_rate(i));
        rates[i] = known != NULL ? known[i] : 0;
    }
}

/* Others read the rates of other work meanwhile. */
void machine_tell(int device, WorkKind work, const double rates[RATES])
{
    const int place = place_of_device(device);
    for (int i = 0; i < RATES; i++)
        if (work_of_rate(i) == work) machines[place].rates[i] = rates[i];
    __atomic_fetch_or(&machines[place].known, 1u << work, __ATOMIC_RELEASE);
    if (work != WORK_ELEMENTS || device < 0) return;
    double least;
    uint64_t bits = __atomic_load_n(&least_start, __ATOMIC_ACQUIRE);
    memcpy(&least, &bits, sizeof least);
    const double *start = &rates[OPERATOR_add * RATES_OF_OPERATOR + RATE_START];
    if (bits != 0 && least <= *start) return;
    memcpy(&bits, start, sizeof bits);
    __atomic_store_n(&least_device, device, __ATOMIC_RELAXED);
    __atomic_store_n(&least_start, bits, __ATOMIC_RELEASE);
}

const char *rate_name(int rate, char *text, size_t size)
{
    static const char *const OF_OPERATOR[] = {"cpu_small", "cpu_large", "cpu_far", "gpu", "start"};
    static const char *const OTHERS[] = {
        "integer_factor", "gpu_double_factor", "gpu_short_factor", "up_small",
        "up_middle",      "up_large",          "up_far",           "down_small",
        "down_middle",    "down_large",        "down_far",         "up_locked",
        "part_start",     "slab_start",
    };
    _Static_assert(sizeof OTHERS / sizeof *OTHERS == RATES - RATE_INTEGER_FACTOR, "");
    if (rate >= RATE_INTEGER_FACTOR)
        snprintf(text, size, "%s", OTHERS[rate - RATE_INTEGER_FACTOR]);
    else
        snprintf(text, size, "%s.%s", operators[rate / RATES_OF_OPERATOR].name,
                 OF_OPERATOR[rate % RATES_OF_OPERATOR]);
    return text;
}

WorkKind work_of_rate(int rate)
{
    if (rate < RATE_INTEGER_FACTOR) return operators[rate / RATES_OF_OPERATOR].work;
    return rate == RATE_INTEGER_FACTOR ? WORK_PRODUCTS : WORK_ELEMENTS;
}

const char *work_name(WorkKind work)
{
    static const char *const NAMES[] = {"elements", "rows", "products", "filters"};
    _Static_assert(sizeof NAMES / sizeof *NAMES == WORK_KINDS, "");
    return NAMES[work];
}

Status machine_check(WorkKind work, const double rates[RATES])
{
    char name[64];
    for (int i = 0; i < RATES; i++)
        if (work_of_rate(i) == work && !(rates[i] > 0 && rates[i] <= 1e6))
            return fail(STATUS_VALUE_ERROR, "%s is %g: expected a positive number",
                        rate_name(i, name, sizeof name), rates[i]);
    return STATUS_OK;
}

/* The choice. */

static bool is_close(const View *view)
{
    uintptr_t begin, end;
    view_extent(view, &begin, &end);
    return end - begin <= (uintptr_t)BRIEF_EXTENT;
}

/* A result that is yet to be made has no gaps. */
static bool are_close(const Call *call)
{
    for (int i = 0; i < call->input_count; i++)
        if (!is_close(&call->inputs[i])) return false;
    return call->given == NULL || is_close(call->given);
}

bool call_is_brief(const Call *call)
{
    const double most = has_sums(call) ? BRIEF_SUMS : BRIEF_ROWS;
    if (call->operations > most) return false;
    if (call->op->work == WORK_ROWS) { /* indices are looked at also where there are no rows */
        const View *indices = &call->inputs[call->in_place ? 0 : 1];
        if (view_count(indices, 0, indices->ndim) > BRIEF_ROWS) return false;
    }
    const View *out = &call->out;
    const double items = view_count(out, 0, out->ndim);
    double bytes = (double)out->item_bytes * items;
    if (call->in_place) { /* rows, of which there may be fewer than x has */
        const int after = call->axis_is_none ? out->ndim : call->axis + 1;
        bytes = call->operations * (double)out->item_bytes * view_count(out, after, out->ndim);
    }
    if (bytes <= BRIEF_BYTES) return true;
    return call->op->work == WORK_ELEMENTS && items <= BRIEF_ITEMS && bytes <= BRIEF_CLOSE_BYTES &&
           are_close(call);
}

bool route_is_clear(const Call *call)
{
    Weight weight;
    if (call_is_brief(call) || __atomic_load_n(&is_without_gpu, __ATOMIC_RELAXED)) return true;
    weigh(call, &weight);
    if (call->op->work == WORK_ROWS && call->operations <= CLEAR_ROWS &&
        weight.touched <= CLEAR_BYTES)
        return true;
    if (call->op->work != WORK_ROWS && weight.touched <= CLEAR_BYTES &&
        (call->op->work == WORK_ELEMENTS || call->operations <= CLEAR_SUMS))
        return true;
    if (__atomic_load_n(&least_start, __ATOMIC_ACQUIRE) == 0) return false;
    const double *rates =
        rates_of(__atomic_load_n(&least_device, __ATOMIC_RELAXED), call->op->work);
    if (rates == NULL) return false;
    /* Of calls of a microsecond, to find out whether the operands fit a slab takes a tenth. */
    const double seconds = seconds_on_cpu(call, &weight, rates);
    const double start = rates[call->op->number * RATES_OF_OPERATOR + RATE_START];
    return seconds <= fmin(start, rates[RATE_SLAB_START]) || seconds <= start_of(call, rates);
}

static void estimate(const Call *call, const Weight *weight, const double *rates,
                     Candidate *candidate)
{
    candidate->seconds = -1;
    candidate->bytes_up = candidate->bytes_down = 0;
    if (candidate->way == WAY_CPU) {
        if (rates != NULL) candidate->seconds = seconds_on_cpu(call, weight, rates);
        return;
    }
    const double up = candidate->way == WAY_ZERO_COPY ? zero_copy_bytes(call, weight) : weight->up;
    candidate->bytes_up = (int64_t)fmin(up, 9e18);
    candidate->bytes_down = (int64_t)fmin(weight->down, 9e18);
    if (rates != NULL) candidate->seconds = seconds_on_gpu(call, weight, rates, candidate->way);
}

void route_estimate(const Call *call, RouteWay way, int device, Candidate *candidate)
{
    Weight weight;
    weigh(call, &weight);
    const WorkKind work = call->op->work;
    weight.is_reachable = way == WAY_ZERO_COPY;
    if (weight.is_reachable) find_locked(call, &weight);
    candidate->way = way;
    candidate->device = device;
    estimate(call, &weight,
             way == WAY_DEVICE ? NULL
             : way == WAY_CPU  ? rates_of_cpu(work)
                               : rates_of(device, work),
             candidate);
    if (way != WAY_DEVICE) return;
    candidate->bytes_up -= call->in_place ? candidate->bytes_down : 0;
    candidate->bytes_down = 0;
}

void route_note_table(const Call *call, bool in_place, int64_t bytes_up)
{
    Candidate *taken = call->taken, found;
    if (taken == NULL) return;
    if (!in_place) {
        if (taken->way == WAY_ZERO_COPY) route_estimate(call, WAY_CUDA, taken->device, taken);
        taken->bytes_up = bytes_up;
        return;
    }
    if (taken->way == WAY_ZERO_COPY) return; /* as it was expected */
    route_estimate(call, WAY_ZERO_COPY, taken->device, &found);
    if (taken->way == WAY_DEVICE) { /* where the result stays */
        found.bytes_down = 0;
        found.seconds = -1;
    }
    *taken = found;
}

static void add_candidate(const Call *call, const Weight *weight, const double *rates, RouteWay way,
                          int device, Route *route)
{
    Candidate *candidate = &route->candidates[route->count++];
    candidate->way = way;
    candidate->device = device;
    estimate(call, weight, rates, candidate);
}

/* Sums of a product, and lines of an image, are whole in each part: two parts of each operand are
 * on the device, and what one is cast to, and of an image also the lines beside one. */
static double bytes_in_parts(const Call *call)
{
    const View *x = &call->inputs[0], *y = &call->inputs[1];
    if (!has_sums(call)) return PARTS_BYTES;
    const double length = x->ndim > 0 ? (double)x->shape[x->ndim - 1] : 0;
    if (call->op->work == WORK_PRODUCTS) {
        const bool casts = is_cast_after_copy(call, 0) || is_cast_after_copy(call, 1);
        const double item_bytes = (double)dtype_bytes(call->compute);
        return (casts ? 6 : 4) * item_bytes * length + PARTS_BYTES;
    }
    const double line = fmax((double)x->item_bytes, (double)call->out.item_bytes) * length;
    return fmax(2 * (1 + (double)view_count(y, 0, y->ndim - 1)) * line, PARTS_BYTES);
}

/* What a call needs beside the operands and the result is less than these again, but for what is
 * cast there, cuBLASLt, weights of a filter that go there, and rows that are written. gather makes
 * do with what there is. */
static bool has_room(const Call *call, int device, const Candidate *candidate)
{
    double whole = 2 * ((double)candidate->bytes_up + (double)candidate->bytes_down);
    for (int i = 0; i < call->input_count; i++)
        if (is_cast_after_copy(call, i)) whole += bytes_of_input(call, i);
    double bytes = whole;
    if (call->own_transfer) bytes = fmin(bytes, GATHER_BYTES);
    if (call->run_in_parts != NULL) bytes = fmin(bytes, bytes_in_parts(call));
    if (call->op->work == WORK_PRODUCTS) bytes += BLAS_BYTES;
    if (call->op->work == WORK_FILTERS)
        bytes += WEIGHT_BYTES * (double)view_items(&call->inputs[1]);
    if (call->in_place) bytes += SCATTER_BYTES + INDEX_BYTES * (double)view_items(&call->inputs[0]);
    return memory_has_room(device, (int64_t)fmin(bytes, 9e18),
                           whole > 2 * ROOM_BYTES ? 0 : ROOM_MICROSECONDS);
}

static const char *pick(const Call *call, Route *route)
{
    route->chosen = 0;
    double least = route->candidates[0].seconds / DOUBT[call->op->work];
    for (int i = 1; i < route->count; i++) {
        if (route->candidates[i].seconds >= least) continue;
        least = route->candidates[i].seconds;
        route->chosen = i;
    }
    const Candidate *chosen = &route->candidates[route->chosen];
    if (chosen->way == WAY_CPU) return "expected to be the fastest";
    if (device_is_captured(chosen->device)) {
        route->chosen = 0;
        return "a stream of the GPU is captured into a graph, in which host arrays have no place";
    }
    if (!has_room(call, chosen->device, chosen)) {
        route->chosen = 0;
        return "the GPU has no room for the operands and the result";
    }
    return "expected to be the fastest";
}

/* Of an array that counts as flat, all places have to be as far apart for a kernel to find them. */
static bool has_one_stride(const Call *call, const View *table)
{
    int64_t reach = 0; /* of the axes within this one */
    for (int i = table->ndim - 1; i >= 0 && call->axis_is_none; i--) {
        if (table->shape[i] == 1) continue;
        if (reach != 0 && table->strides[i] != reach) return false;
        reach = table->shape[i] * table->strides[i];
    }
    return true;
}

void route_choose(const Call *call, int device, Route *route, int *unmeasured)
{
    const WorkKind work = call->op->work;
    Weight weight;
    int count;
    weigh(call, &weight);
    *unmeasured = DEVICE_AUTO;
    route->count = route->chosen = 0;
    Status status = cuda_device_count(&count);
    if (status == STATUS_OK && device == DEVICE_AUTO) status = cuda_current_device(&device);
    if (status != STATUS_OK) {
        if (cuda_is_absent()) __atomic_store_n(&is_without_gpu, true, __ATOMIC_RELAXED);
        add_candidate(call, &weight, rates_of_cpu(work), WAY_CPU, DEVICE_CPU, route);
        route->reason = "there is no GPU that this process can use";
        return;
    }
    const double *rates = rates_of(device, work);
    const View *table = &call->inputs[0];
    weight.is_reachable = call->own_transfer && weight.table > GATHER_LEAST_CHOICE_BYTES &&
                          has_one_stride(call, table) && view_is_in_reach(table);
    find_locked(call, &weight);
    add_candidate(call, &weight, rates, WAY_CPU, DEVICE_CPU, route);
    add_candidate(call, &weight, rates, WAY_CUDA, device, route);
    if (weight.is_reachable) add_candidate(call, &weight, rates, WAY_ZERO_COPY, device, route);
    if (rates != NULL) {
        route->reason = pick(call, route);
        return;
    }
    const Measured measured = machine_measured(device, work);
    route->reason = measured == MEASURED_UNDER_WAY ? "another thread is measuring this machine"
                                                   : "this machine could not be measured";
    if (device_is_captured(device))
        route->reason = "this machine cannot be measured while a stream of the GPU is captured";
    else
        *unmeasured = device;
}

Status choose_device(int wanted, int *device)
{
    /* What knows of no call has nothing to weigh. */
    if (wanted == DEVICE_AUTO) wanted = DEVICE_CPU;

    if (wanted != DEVICE_CPU) {
        int count;
        Status status = cuda_device_count(&count);
        if (status == STATUS_DEVICE_ERROR && wanted == DEVICE_DEFAULT) {
            wanted = DEVICE_CPU;
        } else if (status != STATUS_OK) {
            return status;
        } else if (wanted == DEVICE_DEFAULT || wanted == DEVICE_CUDA) {
            status = cuda_current_device(&wanted);
            if (status != STATUS_OK) return status;
        } else {
            status = cuda_check_ordinal(wanted);
            if (status != STATUS_OK) return status;
        }
    }
    *device = wanted;
    if (wanted != DEVICE_CPU) return STATUS_OK;
    int threads, level;
    const Status status = cpu_threads(&threads);
    return status == STATUS_OK ? cpu_level(&level) : status;
}
