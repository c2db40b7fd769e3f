/* Where a call between host arrays runs: the cost model behind device="auto" and explain().
 *
 *     CPU     units * seconds of a unit, and no less than memory takes
 *     CUDA    start, bytes up, units * seconds of a unit on the GPU, bytes down
 *
 * What a unit is depends on the work: a byte of the operands and the result; for rows, a byte of
 * these, and of the lines of memory that a row touches; for sums, a multiplication of float32. How
 * long it takes was measured on this machine, once (measure.cu), for operands that a core's own
 * cache holds, and for those that none does; in between it is interpolated. Calls that take less
 * than the way to a GPU and back on any machine run on the CPU, and nothing is measured for them.
 */
#include "gpuops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LINE_BYTES = 64 };

/* A GPU takes 10 us and more to take a call in and to give its result back. */
static const double CLEAR_BYTES = 32 << 10, CLEAR_ROWS = 2048, CLEAR_SUMS = 32 << 10;

/* What takes a microsecond or so. */
static const double BRIEF_BYTES = 4 << 10, BRIEF_ROWS = 512, BRIEF_SUMS = 4 << 10;

/* The working sets that were measured; measure.cu has about these. */
static const double SMALL_BYTES = 192 << 10, LARGE_BYTES = 32 << 20;
static const double SHORT_COPY_BYTES = 256 << 10, LONG_COPY_BYTES = 16 << 20;

/* Large calls go in parts, so that copies up and down and the work go on at the same time; what is
 * no longer than a part does not. */
static const double PART_BYTES = 16 << 20;

/* Below this, nobody asks whether there is room on the GPU. */
static const double ROOM_BYTES = 64 << 20;

/* What a call consists of. Bytes are those of the dtype that is computed in. */
typedef struct Weight {
    double up, down;  /* bytes that would go to a GPU, and come back */
    double touched;   /* bytes that are read and written at least */
    double working;   /* bytes within which that is */
    double units;     /* of work */
    double row_bytes; /* WORK_ROWS */
    double table;     /* bytes that would go up for the array that is read in rows */
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
    weight->working = (double)x->item_bytes * view_count(x, 0, x->ndim);
    if (call->in_place) return;
    weight->table = stays_on_host(call, 0, weight->working) ? 0 : weight->working;
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

static bool is_product(const Call *call)
{
    return call->work == WORK_SUMS && call->compute != DTYPE_OPAQUE;
}

/* How many multiplications of float32 one of another dtype is worth. */
static double sums_factor(const Call *call, const double *rates, bool on_gpu)
{
    const bool multiplies = is_product(call);
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
    if (call->in_place) weight->up = weight->down;
    weight->touched = weight->down;
    for (int i = 0; i < call->input_count; i++) {
        const double bytes = bytes_of_input(call, i);
        weight->touched += bytes;
        if (!stays_on_host(call, i, bytes)) weight->up += bytes;
    }
    weight->working = weight->units = weight->touched;
    if (call->work == WORK_ROWS) weigh_rows(call, weight);
    if (call->work == WORK_SUMS) weight->units = call->operations;
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

static double rate_on_cpu(const double *rates, int op, double working)
{
    const double *rate = rates + op * RATES_OF_OPERATOR;
    return interpolate(rate[RATE_CPU_SMALL], rate[RATE_CPU_LARGE], working, SMALL_BYTES,
                       LARGE_BYTES);
}

static double seconds_on_cpu(const Call *call, const Weight *weight, const double *rates)
{
    const double rate = rate_on_cpu(rates, call->op->number, weight->working);
    if (call->work != WORK_SUMS) return weight->units * rate;
    const double sums = weight->units * sums_factor(call, rates, false) * rate;
    const double memory = weight->touched * rate_on_cpu(rates, OPERATOR_add, weight->working);
    return sums > memory ? sums : memory;
}

static double seconds_of_copy(const double *rate, double bytes)
{
    return bytes * interpolate(rate[0], rate[1], bytes, SHORT_COPY_BYTES, LONG_COPY_BYTES);
}

/* Between host arrays, with so many bytes up. */
static double seconds_on_gpu(const Call *call, const Weight *weight, const double *rates,
                             double up_bytes)
{
    const double *rate = rates + call->op->number * RATES_OF_OPERATOR;
    const double up = seconds_of_copy(rates + RATE_UP_SMALL, up_bytes);
    const double down = seconds_of_copy(rates + RATE_DOWN_SMALL, weight->down);
    double work = weight->units * rate[RATE_GPU];
    if (call->work == WORK_SUMS) {
        work *= sums_factor(call, rates, true);
        work = fmax(work, weight->touched * rates[OPERATOR_add * RATES_OF_OPERATOR + RATE_GPU]);
    }
    const double sum = up + work + down, longest = fmax(up, fmax(work, down));
    if (call->run_in_parts == NULL) return rates[RATE_START] + sum;
    const double bytes = fmax(up_bytes, weight->down);
    return rates[RATE_START] + longest + (sum - longest) * fmin(1, PART_BYTES / fmax(bytes, 1));
}

/* What is known of the machine. */

enum { MOST_DEVICES = 64 };
static struct {
    int measured; /* a Measured; atomic */
    double rates[RATES];
} machines[MOST_DEVICES + 1]; /* the first one is the CPU alone */

/* What a call takes that goes to the nearest of the measured devices and does nothing there, as the
 * bits of a double; 0: none is measured. All of these are atomic. */
static uint64_t least_start;
static int least_device;
static int is_without_gpu;

static int place_of_device(int device)
{
    return device < 0 ? 0 : device + 1;
}

Measured machine_measured(int device)
{
    if (device >= MOST_DEVICES) return MEASURED_FAILED;
    return (Measured)__atomic_load_n(&machines[place_of_device(device)].measured, __ATOMIC_ACQUIRE);
}

static const double *rates_of(int device)
{
    return machine_measured(device) == MEASURED ? machines[place_of_device(device)].rates : NULL;
}

/* The CPU is measured with the first device, or where there is none, without. */
static const double *rates_of_cpu(void)
{
    const bool with_device = __atomic_load_n(&least_start, __ATOMIC_ACQUIRE) != 0;
    return rates_of(with_device ? __atomic_load_n(&least_device, __ATOMIC_RELAXED) : DEVICE_CPU);
}

bool machine_claim(int device, bool again)
{
    if (device >= MOST_DEVICES) return false;
    int *measured = &machines[place_of_device(device)].measured;
    int expected = MEASURED_NOT;
    if (__atomic_compare_exchange_n(measured, &expected, MEASURED_UNDER_WAY, false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return true;
    expected = MEASURED_FAILED;
    return again && __atomic_compare_exchange_n(measured, &expected, MEASURED_UNDER_WAY, false,
                                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

void machine_tell(int device, Measured measured, const double rates[RATES])
{
    const int place = place_of_device(device);
    if (measured == MEASURED) memcpy(machines[place].rates, rates, sizeof machines[place].rates);
    __atomic_store_n(&machines[place].measured, measured, __ATOMIC_RELEASE);
    if (measured != MEASURED || device < 0) return;
    double least;
    uint64_t bits = __atomic_load_n(&least_start, __ATOMIC_ACQUIRE);
    memcpy(&least, &bits, sizeof least);
    if (bits != 0 && least <= rates[RATE_START]) return;
    memcpy(&bits, &rates[RATE_START], sizeof bits);
    __atomic_store_n(&least_device, device, __ATOMIC_RELAXED);
    __atomic_store_n(&least_start, bits, __ATOMIC_RELEASE);
}

const char *rate_name(int rate, char *text, size_t size)
{
    static const char *const OPERATOR_NAMES[] = {
#define OPERATOR(name, stem, signature, doc) #name,
#include "ops.def"
#undef OPERATOR
    };
    static const char *const OF_OPERATOR[] = {"cpu_small", "cpu_large", "gpu"};
    static const char *const OTHERS[] = {
        "integer_factor", "gpu_double_factor", "gpu_short_factor", "start",
        "up_small",       "up_large",          "down_small",       "down_large",
    };
    if (rate >= RATE_INTEGER_FACTOR)
        snprintf(text, size, "%s", OTHERS[rate - RATE_INTEGER_FACTOR]);
    else
        snprintf(text, size, "%s.%s", OPERATOR_NAMES[rate / RATES_OF_OPERATOR],
                 OF_OPERATOR[rate % RATES_OF_OPERATOR]);
    return text;
}

Status machine_check(const double rates[RATES])
{
    char name[64];
    for (int i = 0; i < RATES; i++)
        if (!(rates[i] > 0 && rates[i] <= 1e6))
            return fail(STATUS_VALUE_ERROR, "%s is %g: expected a positive number",
                        rate_name(i, name, sizeof name), rates[i]);
    return STATUS_OK;
}

/* The choice. */

bool call_is_brief(const Call *call)
{
    const double most = call->work == WORK_SUMS ? BRIEF_SUMS : BRIEF_ROWS;
    if (call->operations > most) return false;
    if (call->work == WORK_ROWS) { /* indices are looked at also where there are no rows */
        const View *indices = &call->inputs[call->in_place ? 0 : 1];
        if (view_count(indices, 0, indices->ndim) > BRIEF_ROWS) return false;
    }
    const View *out = &call->out;
    double bytes = (double)out->item_bytes * view_count(out, 0, out->ndim);
    if (call->in_place) { /* rows, of which there may be fewer than x has */
        const int after = call->axis_is_none ? out->ndim : call->axis + 1;
        bytes = call->operations * (double)out->item_bytes * view_count(out, after, out->ndim);
    }
    return bytes <= BRIEF_BYTES;
}

bool route_is_clear(const Call *call)
{
    Weight weight;
    if (__atomic_load_n(&is_without_gpu, __ATOMIC_RELAXED)) return true;
    weigh(call, &weight);
    if (call->work == WORK_ROWS && call->operations <= CLEAR_ROWS && weight.touched <= CLEAR_BYTES)
        return true;
    if (call->work != WORK_ROWS && weight.touched <= CLEAR_BYTES &&
        (call->work == WORK_ELEMENTS || call->operations <= CLEAR_SUMS))
        return true;
    const uint64_t bits = __atomic_load_n(&least_start, __ATOMIC_ACQUIRE);
    if (bits == 0) return false;
    double start;
    memcpy(&start, &bits, sizeof start);
    const double *rates = rates_of(__atomic_load_n(&least_device, __ATOMIC_RELAXED));
    return rates != NULL && seconds_on_cpu(call, &weight, rates) <= start;
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
    if (rates != NULL) candidate->seconds = seconds_on_gpu(call, weight, rates, up);
}

void route_estimate(const Call *call, RouteWay way, int device, Candidate *candidate)
{
    Weight weight;
    weigh(call, &weight);
    candidate->way = way;
    candidate->device = device;
    estimate(call, &weight,
             way == WAY_DEVICE ? NULL
             : way == WAY_CPU  ? rates_of_cpu()
                               : rates_of(device),
             candidate);
    if (way != WAY_DEVICE) return;
    candidate->bytes_up -= call->in_place ? candidate->bytes_down : 0;
    candidate->bytes_down = 0;
}

static void add_candidate(const Call *call, const Weight *weight, const double *rates, RouteWay way,
                          int device, Route *route)
{
    Candidate *candidate = &route->candidates[route->count++];
    candidate->way = way;
    candidate->device = device;
    estimate(call, weight, rates, candidate);
}

/* Some go in parts; what others need beside the operands and the result is less than these again.
 */
static bool has_room(const Call *call, int device, const Candidate *candidate)
{
    MemoryInfo info;
    const double bytes = (double)candidate->bytes_up + (double)candidate->bytes_down;
    if (bytes <= ROOM_BYTES || call->run_in_parts != NULL || call->own_transfer) return true;
    if (memory_info(device, &info) != STATUS_OK) return false;
    int64_t room = info.available + info.reserved - info.used;
    if (info.limit >= 0 && info.limit - info.used < room) room = info.limit - info.used;
    return 2 * bytes <= (double)room;
}

static const char *pick(const Call *call, Route *route)
{
    route->chosen = 0;
    for (int i = 1; i < route->count; i++)
        if (route->candidates[i].seconds < route->candidates[route->chosen].seconds)
            route->chosen = i;
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

void route_choose(const Call *call, int device, Route *route, int *unmeasured)
{
    Weight weight;
    int count;
    weigh(call, &weight);
    *unmeasured = DEVICE_AUTO;
    route->count = route->chosen = 0;
    Status status = cuda_device_count(&count);
    if (status == STATUS_OK && device == DEVICE_AUTO) status = cuda_current_device(&device);
    if (status != STATUS_OK) {
        if (cuda_is_absent()) __atomic_store_n(&is_without_gpu, true, __ATOMIC_RELAXED);
        add_candidate(call, &weight, rates_of_cpu(), WAY_CPU, DEVICE_CPU, route);
        route->reason = "there is no GPU that this process can use";
        return;
    }
    const double *rates = rates_of(device);
    add_candidate(call, &weight, rates, WAY_CPU, DEVICE_CPU, route);
    add_candidate(call, &weight, rates, WAY_CUDA, device, route);
    if (call->own_transfer && view_is_in_reach(&call->inputs[0]))
        add_candidate(call, &weight, rates, WAY_ZERO_COPY, device, route);
    if (rates != NULL) {
        route->reason = pick(call, route);
        return;
    }
    const Measured measured = machine_measured(device);
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
    int threads;
    return wanted == DEVICE_CPU ? cpu_threads(&threads) : STATUS_OK;
}
