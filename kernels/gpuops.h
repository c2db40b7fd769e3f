/* The whole contract between the two layers: csrc/ (CPython) above, kernels/ (CUDA and CPU) below.
 *
 * Plain C. Nothing here knows Python or CUDA, so a C program could call the lower layer as well.
 * Everything returns a Status; the text of the last failure is kept per thread. */
#ifndef GPUOPS_H
#define GPUOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPUOPS_VERSION "0.1.0"

enum { GPUOPS_MAX_DIMS = 64, GPUOPS_MAX_INPUTS = 3 };

/* Each status but OK becomes one Python exception, in csrc/call.c. */
typedef enum Status {
    STATUS_OK,
    STATUS_TYPE_ERROR,
    STATUS_VALUE_ERROR,
    STATUS_AXIS_ERROR,
    STATUS_INDEX_ERROR,
    STATUS_MEMORY_ERROR,
    STATUS_DEVICE_ERROR,
    STATUS_DEVICE_LOST,
    STATUS_FORKED,
    STATUS_LIBRARY_ERROR, /* a library that is opened at run time is not there, or not what it is
                           * taken for */
    STATUS_INTERRUPTED,   /* by the watch of the call */
} Status;

/* What the last failed call on this thread had to say. */
typedef struct Failure {
    int cuda_code;      /* cudaError_t, or 0 where CUDA took no part */
    char cuda_name[64]; /* "cudaErrorIllegalAddress", or "" */
    int axis, ndim;     /* of STATUS_AXIS_ERROR */
    char text[768];
} Failure;

const Failure *last_failure(void);
/* Failures of this thread go there from now on (NULL: to its own record), and what they went to so
 * far is returned: who is called in the middle of a call does not touch what that has to say. */
Failure *record_failures_in(Failure *record);

/* Each records a failure and returns its status: `return fail(STATUS_VALUE_ERROR, "...", ...);` */
Status fail(Status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
Status fail_axis(int axis, int ndim);
Status fail_cuda(Status status, int code, const char *name, const char *text);

static inline int64_t smaller(int64_t one, int64_t other)
{
    return one < other ? one : other;
}

/* The next multiple of the grain. */
static inline int64_t round_up(int64_t count, int64_t grain)
{
    return (count + grain - 1) / grain * grain;
}

/* What the layers need to know of an element. Movement looks at item_bytes alone; OPAQUE is every
 * dtype that is only ever moved (structured, datetime64, void, float8, ...). */
typedef enum Dtype {
    DTYPE_OPAQUE,
    DTYPE_BOOL,
    DTYPE_INT8,
    DTYPE_INT16,
    DTYPE_INT32,
    DTYPE_INT64,
    DTYPE_UINT8,
    DTYPE_UINT16,
    DTYPE_UINT32,
    DTYPE_UINT64,
    DTYPE_FLOAT16,
    DTYPE_BFLOAT16,
    DTYPE_FLOAT32,
    DTYPE_FLOAT64,
    DTYPE_COMPLEX64,
    DTYPE_COMPLEX128,
} Dtype;

static inline bool dtype_is_integer(Dtype dtype)
{
    return dtype >= DTYPE_INT8 && dtype <= DTYPE_UINT64;
}

static inline bool dtype_is_float(Dtype dtype)
{
    return dtype >= DTYPE_FLOAT16 && dtype <= DTYPE_FLOAT64;
}

static inline bool dtype_is_complex(Dtype dtype)
{
    return dtype == DTYPE_COMPLEX64 || dtype == DTYPE_COMPLEX128;
}

int64_t dtype_bytes(Dtype dtype);       /* 0 for OPAQUE */
const char *dtype_name(Dtype dtype);    /* as NumPy writes it */
Dtype promote(Dtype one, Dtype other);  /* numpy.promote_types; OPAQUE where there is none */
bool dtype_casts(Dtype from, Dtype to); /* numpy.can_cast(from, to, "same_kind") */
/* numpy.can_cast(from, to): NumPy says nothing when it casts so, but of signalling NaNs. */
bool dtype_widens(Dtype from, Dtype to);

/* A Python scalar has a kind, but no dtype of its own: it takes that of the arrays beside it, if
 * they are of that kind or a higher one (NEP 50). A bool is not one of these. */
typedef enum Weak { WEAK_NOT, WEAK_INT, WEAK_FLOAT, WEAK_COMPLEX } Weak;

/* Where to work: a CUDA ordinal (0, 1, ...) or one of these. */
enum {
    DEVICE_CPU = -1,
    DEVICE_DEFAULT = -2, /* the GPU if there is one, else the CPU */
    DEVICE_CUDA = -3,    /* the current CUDA device, and nothing else */
    DEVICE_AUTO = -4,    /* whichever is expected to be faster */
};

/* What keeps memory or a stream of somebody else alive. release is called once, when nothing of
 * ours needs it any more, from any thread, and with no lock of ours held. */
typedef struct Owner {
    void (*release)(void *context);
    void *context;
} Owner;

/* A CUDA stream: ours, one of the two that always exist, or another library's. There is one record
 * for each device and handle, with counted references. It carries the bad indices that kernels met
 * on it until somebody waits for the stream and is told. */
typedef struct Stream Stream;

/* A stretch of device memory with counted references: allocated and freed in the order of its
 * stream, or adopted from an owner, who is told once the work that uses it is done. */
typedef struct Memory Memory;

/* An array: memory that somebody else owns. Only the first ndim entries are set. Strides are in
 * bytes, any sign; data may be unaligned. dtype_name is for messages. On a device, stream is the
 * one in whose order the data are written and freed, and memory is their record, or NULL where the
 * memory is borrowed for the call. */
typedef struct View {
    void *data;
    int device; /* DEVICE_CPU, or the ordinal of the device whose memory this is */
    Stream *stream;
    Memory *memory;
    Dtype dtype;
    Weak weak; /* of the 0-d array that a Python scalar became, until the plan is made */
    int64_t item_bytes;
    const char *dtype_name;
    int ndim;
    int64_t shape[GPUOPS_MAX_DIMS];
    int64_t strides[GPUOPS_MAX_DIMS];
} View;

/* Leaves out the kilobyte that most views have no use for. */
static inline void view_copy(View *target, const View *source)
{
    __builtin_memcpy(target, source, offsetof(View, shape));
    for (int i = 0; i < source->ndim; i++) { /* mostly so few that a call takes longer */
        target->shape[i] = source->shape[i];
        target->strides[i] = source->strides[i];
    }
}

/* The dtype that NumPy gives a sum of these, taken from left to right. */
Dtype result_dtype(const View *views, int count);
static inline int64_t view_items(const View *view)
{
    int64_t items = 1;
    for (int i = 0; i < view->ndim; i++) items *= view->shape[i];
    return items;
}

/* The product of the sizes of some axes, which may be more than any array can have. */
static inline double view_count(const View *view, int begin, int end)
{
    double count = 1;
    for (int i = begin; i < end; i++) count *= (double)view->shape[i];
    return count;
}

bool view_is_packed(const View *view); /* in C order, without gaps */
void view_pack(View *view);            /* sets the strides to those of C order */
/* The axes of other sizes than 1, from that with the longest steps to that with the shortest: tells
 * how many. */
int view_axes(const View *view, int *axes);
/* Sets the strides of a view to those of what NumPy's element-wise functions make of other views,
 * without gaps: its axes lie in memory as those of the others do (K order). Axes without steps say
 * nothing, and where views contradict each other, C order wins. */
void view_lay_out(View *view, const View *others, int count);
/* Takes of a view that broadcasts to ndim axes the given ones, in that order. */
void view_turn(View *view, int ndim, const int *axes, int count);
/* From the lowest to the highest byte that a view touches, on addresses. */
void view_extent(const View *view, uintptr_t *begin, uintptr_t *end);
/* Whether they may share bytes. Views that interleave count as overlapping. */
bool views_overlap(const View *one, const View *other);
/* Whether the elements at each position are in the same place, so that one may be written once the
 * other has been read. */
bool views_coincide(const View *one, const View *other);
/* 1 if two elements of a view share a byte, 0 if none do, -1 if there is no memory to tell. */
int overlaps_itself(const View *view);

/* What becomes of an index outside its axis: NumPy's three modes, and jax.numpy.take's fill. */
typedef enum Mode { MODE_RAISE, MODE_WRAP, MODE_CLIP, MODE_FILL } Mode;

/* What lies beyond the border of an image, in the words of scipy.ndimage. */
typedef enum Border {
    BORDER_REFLECT,  /* d c b a | a b c d | d c b a */
    BORDER_MIRROR,   /*   d c b | a b c d | c b a */
    BORDER_NEAREST,  /* a a a a | a b c d | d d d d */
    BORDER_CONSTANT, /* k k k k | a b c d | k k k k */
    BORDER_WRAP,     /* a b c d | a b c d | a b c d */
} Border;

/* What an operator does, which tells what the time of its calls grows with. */
typedef enum WorkKind {
    WORK_ELEMENTS, /* the bytes of the operands and the result */
    WORK_ROWS,     /* of those that are moved one by one, and the lines of memory that they touch */
    WORK_PRODUCTS, /* multiplications, each with an addition, of matrices, */
    WORK_FILTERS,  /* and of images */
    WORK_KINDS
} WorkKind;

/* How a product of float32 matrices is computed. */
typedef enum Precision { PRECISION_FULL, PRECISION_TF32 } Precision;

/* Somebody who is asked now and then, by calls that go through large arrays in parts, whether to go
 * on, and is told how many of the operands' bytes are done; and by calls that wait, of no bytes. A
 * wait that is given up leaves all that is queued as it is. */
typedef struct Watch {
    bool (*look)(struct Watch *watch, int64_t done_bytes, int64_t bytes);
    bool sees_ends; /* also before the first part and after the last */
} Watch;

/* One call of one operator. csrc/call.c fills in the operands and options; plan_<name> checks them,
 * says what the result looks like and what run_<name> takes; run_<name> computes it.
 *
 * An operator without out= among its parameters works in place: its first argument is out, and the
 * inputs are the others. */
typedef struct Call {
    const struct Operator *op;
    int input_count;
    View inputs[GPUOPS_MAX_INPUTS];
    /* plan sets dtype, item_bytes, ndim and shape; csrc sets the memory. In place, out is complete
     * from the start. */
    View out;
    bool out_is_fresh; /* false: the caller's own memory, which an error must leave as it was */

    /* Options. */
    int axis;          /* plan turns a negative axis into a positive one */
    bool axis_is_none; /* the array counts as flattened */
    Mode mode;
    const void *fill; /* one element for MODE_FILL */
    bool deterministic;
    Precision precision;
    Border border;
    double border_value; /* of BORDER_CONSTANT */
    int origins[2];      /* of the last two axes */
    int origin_count;    /* how many the caller gave; 0: one number for both */
    Dtype wanted;        /* of the result, where the caller named one; else OPAQUE */
    Watch *watch;        /* NULL: there is none */
    const View *given;   /* for the choice: where the caller wants the result, or NULL */
    /* What is told of the call afterwards, or NULL. gather finds out itself what of a table on the
     * host is to cross the bus. */
    struct Candidate *taken;

    /* Where to work. */
    int device;
    Stream *stream; /* on a GPU; NULL: the legacy default stream */
    int slot;       /* where kernels note bad indices; -1: that of the stream */

    /* What plan says of run; all false or OPAQUE unless it does. */
    Dtype compute;        /* what it computes in */
    unsigned cast_inputs; /* bit i: run takes inputs[i] as compute; run_call sees to that where it
                           * is of another dtype, which on the CPU has to widen to compute */
    unsigned host_inputs; /* bit i: inputs[i] stays on the host if it is there */
    bool in_place;        /* out is an operand too, and of any strides */
    bool elementwise;     /* out may be one of the inputs, and of any strides; it is converted from
                           * compute; inputs of one element stay on the host if they are there */
    bool own_transfer;    /* it takes arrays on the host to the GPU itself */
    /* Between arrays on the host, large ones or, because there is no room for them as a whole, any;
     * or NULL. Sets *done to false, and does nothing, where the call is not for it. */
    Status (*run_in_parts)(struct Call *call, bool any, bool *done);
    double operations; /* of rows: how many; of sums: multiplications; else 0 */
} Call;

typedef struct Operator {
    int number; /* of its row */
    WorkKind work;
    const char *name;
    const char *signature; /* as Python writes it, between the parentheses */
    Status (*plan)(Call *);
    Status (*run)(Call *);
} Operator;

enum {
#define OPERATOR(name, stem, work, signature, doc) OPERATOR_##name,
#include "ops.def"
#undef OPERATOR
    OPERATORS
};
extern const Operator operators[OPERATORS];

/* plan is for the caller's faults, run for the machine's (and for bad index values). */
#define OPERATOR(name, stem, work, signature, doc)                                                 \
    Status plan_##name(Call *call);                                                                \
    Status run_##name(Call *call);
#include "ops.def"
#undef OPERATOR

/* Devices. None of these makes a CUDA call before it is asked for the first time. */
typedef struct DeviceInfo {
    char name[256];
    unsigned char uuid[16];
    int compute_major, compute_minor;
    int multiprocessors, clock_khz;
    int64_t memory_bytes;
} DeviceInfo;

Status cuda_device_count(int *count); /* never 0: a failure says why there is none */
/* It is known that there is none, and so device=None means the CPU. */
bool cuda_is_missing(void);
/* There is none, or none that this process can use, for as long as it lives. */
bool cuda_is_absent(void);
Status cuda_current_device(int *device);
Status cuda_check_ordinal(int device); /* DEVICE_ERROR where there is no such device */
Status cuda_device_info(int device, DeviceInfo *info);
int cuda_runtime_version(void); /* 13000 is 13.0; 0: built without CUDA */
int cuda_driver_version(void);  /* the newest CUDA it can run; 0: no driver */

/* Every thread t of every block b of a grid prints a line and sets ran[b * threads + t]. */
Status hello(int device, int64_t blocks, int64_t threads, unsigned char *ran);

/* Streams. The functions that wait raise, as STATUS_INDEX_ERROR, the first bad index that kernels
 * met on that stream since the last time. */
Status stream_create(int device, bool nonblocking, int priority, Stream **stream);
/* The record of a handle, cudaStream_t, with one more reference: 0 is the legacy default stream,
 * and 1 and 2 are cudaStreamLegacy and cudaStreamPerThread. While there are references to the
 * record, the owner is kept; it is released at once if the record has an owner already. */
Status stream_of_handle(int device, uintptr_t handle, Owner owner, Stream **stream);
/* The device of a handle; *device stays as it is for a default stream, which every device has
 * behind the same one, and for a stream that is being captured, of which CUDA does not tell. */
Status stream_find_device(uintptr_t handle, int *device);
Stream *stream_hold(Stream *stream);
void stream_release(Stream *stream);
/* False, and nothing done, where that would take a call of CUDA. */
bool stream_try_release(Stream *stream);
/* Itself, if it is known to exist for as long as it is referred to, or else the legacy default
 * stream of its device, borrowed. Another library may destroy a stream of which only the handle is
 * known. */
Stream *stream_that_lasts(Stream *stream);
uintptr_t stream_handle(Stream *stream); /* 1 for the legacy default stream, never 0 */
int stream_device(const Stream *stream);
Status stream_synchronize(Stream *stream, Watch *watch);
Status stream_query(Stream *stream, bool *done);
/* Everything that is queued on waiting after this comes after all that is queued on awaited now.
 * Nothing is done while waiting is captured into a graph and awaited is not. */
Status stream_wait(Stream *waiting, Stream *awaited);
/* The same for somebody who asks for it: a capture takes in who waits for it, and a captured stream
 * that is to wait for another one is refused, since nothing could be done. */
Status stream_wait_as_told(Stream *waiting, Stream *awaited);
Status device_synchronize(int device, Watch *watch);

/* Events. */
typedef struct Event Event;
Status event_create(int device, bool timing, bool blocking_sync, Event **event);
void event_destroy(Event *event);
Status event_record(Event *event, Stream *stream);
Status event_query(Event *event, bool *done); /* done where it was never recorded, as CUDA has it */
Status event_synchronize(Event *event, Watch *watch);
Status event_elapsed(Event *start, Event *end, float *milliseconds);
Status event_wait(Event *event, Stream *waiting);
int event_device(const Event *event);
Stream *event_stream(Event *event); /* the last it was recorded on, held, or NULL */

/* Memory. */
typedef struct MemoryInfo {
    int64_t used;             /* by arrays */
    int64_t reserved;         /* of the device, by gpuops, for arrays that are and that will be */
    int64_t available, total; /* of the device */
    int64_t peak;             /* the most that was used */
    int64_t limit;            /* -1: none */
} MemoryInfo;

Status memory_allocate(Stream *stream, int64_t bytes, Memory **memory);
Status memory_adopt(void *data, int64_t bytes, Stream *stream, Owner owner, Memory **memory);
char *memory_data(const Memory *memory);
Stream *memory_stream(const Memory *memory); /* borrowed */
Memory *memory_hold(Memory *memory);
/* Before memory is kept beyond a call: gives it a home stream that lasts, in order with its own. */
Status memory_keep(Memory *memory);
void memory_release(Memory *memory);     /* may call CUDA, and owners */
bool memory_try_release(Memory *memory); /* true: that was done, without either */
/* The same for somebody who has let work on it be queued on a stream. Gives back that too. */
void memory_release_after(Memory *memory, Stream *stream);
Status memory_info(int device, MemoryInfo *info);
/* Whether so many bytes can be allocated, for all that is known: within the limit, and of what the
 * driver said at most so many microseconds ago. */
bool memory_has_room(int device, int64_t bytes, int64_t oldest);
Status memory_empty_cache(int device); /* gives back all that no array uses */
Status memory_set_limit(int device, int64_t bytes);
/* Whether an address is memory of that device; STATUS_VALUE_ERROR says what it is instead. */
Status memory_check(int device, const void *data);
Status memory_device_of(const void *data, int *device); /* STATUS_VALUE_ERROR: it is on none */

/* Page-locked memory of the host. A pin locks the bytes from the lowest to the highest that a view
 * on the host touches, until it is destroyed and no work that was begun before uses them any more.
 * What several pins lock is unlocked with the last of them. */
typedef struct Pin Pin;

Status pin_create(int device, const View *view, bool writable, Pin **pin);
void pin_destroy(Pin *pin); /* calls CUDA */
/* Whether kernels can read a view on the host where it is. Calls CUDA. */
bool view_is_in_reach(const View *view);

/* Memory from a pool of page-locked memory, at a multiple of 16 bytes. It is given back to the pool
 * when nothing is at work on it any more. What the pool can do without CUDA is done by the two that
 * may be called with the lock of an interpreter. */
Status pinned_allocate(int device, int64_t bytes, void **block);
void *pinned_take(int64_t bytes);        /* NULL: the pool has none */
void pinned_free(void *block);           /* calls CUDA */
bool pinned_try_free(void *block);       /* false: nothing was done */
int64_t pinned_bytes(const void *block); /* what there is room for in a block */

/* Ordinary memory of the host, at least HOST_LEAST_BYTES, for results, for rings and for what a
 * call needs beside its operands: huge pages where the system has them, from a pool that keeps what
 * was given back warm, up to a limit. What is in it is whatever was there before. No call of CUDA
 * and no lock of an interpreter. */
enum { HOST_LEAST_BYTES = 4 << 20 };
Status host_memory_limit(int64_t *bytes); /* of what is kept; 0: nothing is */
/* The bytes that a variable of the environment names, or the usual ones. Where what it says is no
 * number, zero tells what 0 is for. */
Status bytes_of_environment(const char *variable, int64_t usual, const char *zero, int64_t *bytes);
void *host_take(int64_t bytes); /* NULL where there is no memory */
void host_give(void *data);
int64_t host_bytes(const void *data); /* what there is room for */
void host_flush(void);                /* gives back to the system what nobody uses */

/* From now on, at the end of the process, whatever is not released yet is left to the driver. */
void runtime_shut_down(void);

/* Copies elements between views of the same shape and item_bytes, any strides, on the host or on
 * any device. Where the host takes part, the copy is done when this returns, and so is everything
 * queued on the stream before, with its bad indices raised as stream_synchronize does. A watch may
 * end the wait for what comes before the copy, of which some may be on its way to a device by then.
 */
Status copy_view(const View *target, const View *source, Stream *stream, Watch *watch);
/* Sets every element of a view on a device to one item. */
Status fill_view_with(const View *target, const void *item, Stream *stream);

/* The device of a call between host arrays: an ordinal or one of the names above is wanted, but for
 * DEVICE_AUTO. */
Status choose_device(int wanted, int *device);

/* The ways that a call can take. */
typedef enum RouteWay {
    WAY_CPU,
    WAY_CUDA,      /* host arrays go to a GPU, and the result comes back */
    WAY_ZERO_COPY, /* the same, but what a kernel can read in page-locked memory stays there */
    WAY_DEVICE,    /* between arrays that are on a GPU */
} RouteWay;
enum { MOST_CANDIDATES = WAY_ZERO_COPY + 1 };

/* A way, and what a call would take on it. */
typedef struct Candidate {
    RouteWay way;
    int device;
    int64_t bytes_up, bytes_down;
    double seconds; /* expected; -1: the machine was not measured */
} Candidate;

typedef struct Route {
    int count;
    Candidate candidates[MOST_CANDIDATES]; /* the CPU first */
    int chosen;
    const char *reason;
} Route;

/* How fast a machine is, by names of which rate_name lists all: seconds for a unit of work, by
 * operator, and how fast one GPU is reached. */
enum {
    RATE_CPU_SMALL, /* of an operator: for operands that a core's own cache holds, */
    RATE_CPU_LARGE, /* for those that no cache of a core does, */
    RATE_CPU_FAR,   /* and for those that no cache at all does, or for the most sums; */
    RATE_GPU,       /* for arrays on the GPU; */
    RATE_START,     /* and of a call between host arrays that goes there and does next to nothing */
    RATES_OF_OPERATOR
};
enum {
    RATE_INTEGER_FACTOR = OPERATORS * RATES_OF_OPERATOR, /* sums of integers on the CPU */
    RATE_GPU_DOUBLE_FACTOR,                              /* sums of float64 on the GPU, */
    RATE_GPU_SHORT_FACTOR,                               /* and of 16-bit floats */
    RATE_UP_SMALL,                                       /* a byte of short copies, */
    RATE_UP_MIDDLE,                                      /* of longer ones, */
    RATE_UP_LARGE,                                       /* of long ones, */
    RATE_UP_FAR,     /* and of what is longer, each byte beyond these; */
    RATE_DOWN_SMALL, /* the same of copies down; */
    RATE_DOWN_MIDDLE,
    RATE_DOWN_LARGE,
    RATE_DOWN_FAR,
    RATE_UP_LOCKED,  /* a byte of long copies from page-locked memory; */
    RATE_PART_START, /* of a part of a call that goes in parts, beside its copies and its work; */
    RATE_SLAB_START, /* of a call that goes through a slab (slab.cu), whatever it does */
    RATES
};
/* The calls that were measured: elements of float32 in an operand, far ones in a copy and in a call
 * in parts, and of a table that is read in rows; the most of these rows, of one element each; and
 * about so many multiplications of matrices, or of the most for filters. */
enum {
    SMALL_ITEMS = 16 << 10,
    LARGE_ITEMS = 4 << 20,
    FAR_ITEMS = 12 << 20,
    FAR_TABLE_ITEMS = 3 * FAR_ITEMS,
    LARGE_ROWS = 1 << 20,
    SMALL_SUMS = 1 << 18,
    LARGE_SUMS = 1 << 24,
    FAR_SUMS = 1 << 29,
    FAR_FILTER_SUMS = 100 << 20,
};
/* And copies: the driver makes short ones; workers, who have to wake, those from here on; and long
 * ones go at the speed of the bus. */
enum { SHORT_COPY_BYTES = 256 << 10, MIDDLE_COPY_BYTES = 2 << 20, LONG_COPY_BYTES = 16 << 20 };
const char *rate_name(int rate, char *text, size_t size);
/* The work that a rate is of. Those that calls of all kinds go by are of elements, the first to be
 * known. */
WorkKind work_of_rate(int rate);
const char *work_name(WorkKind work);
/* Of a copy in one of the directions, whose rates these are: of short, middle and long ones, and of
 * each byte beyond these. */
double copy_seconds(const double rates[4], double bytes);

/* What is known of a machine, by device and by work; DEVICE_CPU: of one without a GPU. */
typedef enum Measured { MEASURED_NOT, MEASURED_UNDER_WAY, MEASURED_FAILED, MEASURED } Measured;
Measured machine_measured(int device, WorkKind work);
/* Of those who come at once, one is to measure what some work needs, to tell what came of it, and
 * to leave. That it could not be done holds for a while, longer each time, for all but those who
 * try again. */
bool machine_claim(int device, WorkKind work, bool again);
void machine_tell(int device, WorkKind work, const double rates[RATES]);
void machine_leave(int device, bool failed);
/* STATUS_VALUE_ERROR where a rate of this work is no positive number. */
Status machine_check(WorkKind work, const double rates[RATES]);
/* Those that are known; the others are 0. */
void machine_rates(int device, double rates[RATES]);
/* Measures the rates of some work, all but those of products of matrices on the CPU, which are 0
 * then. What is not of elements needs the rates of these, told before. The steps in which that is
 * done (measure.cu) are for those who look where its time goes: seconds, or 0 of what there was no
 * need for. */
enum {
    STEP_MEMORY,
    STEP_DEVICE,
    STEP_LOCKED,
    STEP_UP,
    STEP_DOWN,
    STEP_KERNELS,
    STEP_STARTS,
    STEP_PARTS,
    STEP_ON_GPU,
    STEP_CPU_SMALL,
    STEP_CPU_LARGE,
    STEP_CPU_FAR,
    STEPS
};
Status machine_measure(int device, WorkKind work, double rates[RATES], double steps[STEPS]);
const char *step_name(int step);

/* How large a part of an operand of so many bytes is, where a call between arrays on the host goes
 * in parts and the operator can choose: long enough for the bus to take no note of what it costs to
 * begin one. Of calls of no more than two parts, little would be overlapped. */
int64_t part_bytes(int64_t bytes);
bool is_worth_parts(int64_t bytes);

/* Whether a call between arrays on the host would go through a slab on a GPU. */
bool call_suits_slab(const Call *call);

/* Rows, or numbers, that take less from wherever they are than it takes to let other threads of
 * Python go on; NumPy draws the line there, too. */
enum { MOST_FEW = 500 };
/* Whether a call takes less than that on the CPU. */
bool call_is_brief(const Call *call);
/* Large arrays are cast where the work is done, by all threads or on the GPU, to which they go as
 * they are, and not by NumPy. But what NumPy may warn of is its own to cast. */
bool input_is_cast_at_work(const Call *call, int i);

/* Elements of an array of one axis, and memory without gaps that they are taken to or come from.
 * False, and x is as it was, where an index is out of bounds as in mode 'raise', or elements are of
 * an unusual size. No more than MOST_FEW are written so. */
typedef struct Few {
    char *x, *packed;
    const int64_t *indices;
    int64_t size, stride, item_bytes, count;
} Few;

bool gather_briefly(const Few *few);
bool scatter_briefly(const Few *few);

/* A call between host arrays whose plan is made. True: it runs on the CPU under DEVICE_AUTO
 * whatever else there is. No call of CUDA. */
bool route_is_clear(const Call *call);
/* The candidates, and the one that is taken under DEVICE_AUTO. The device is that of the GPU, or
 * DEVICE_AUTO for the current one. *unmeasured is the device that has to be measured before the
 * choice can be made; else DEVICE_AUTO. Nothing fails: without a GPU, or one that can be used now,
 * the CPU is the way. */
void route_choose(const Call *call, int device, Route *route, int *unmeasured);
/* What the time of the call on a device that it fits grows with. */
double route_units(const Call *call);
/* One way, on a device that is known. */
void route_estimate(const Call *call, RouteWay way, int device, Candidate *candidate);
/* For call->taken: a table is read in place, or so many bytes go up with the indices. */
void route_note_table(const Call *call, bool in_place, int64_t bytes_up);
/* Whether work between host arrays on a device would be refused or disturb: a stream of it is
 * captured into a graph. */
bool device_is_captured(int device);

/* Runs an operator whose plan is made and whose views are complete, on call->device: between arrays
 * on that device if out is on it, where inputs from the host are brought there; else between host
 * arrays. Work between arrays on a device is queued on call->stream. */
Status run_call(Call *call);

/* cuBLASLt, which matmul opens when it is first needed: what finds its file, where that is not in
 * the environment or on the linker's path; and a line that says what was found, or why nothing. */
void blas_set_finder(bool (*finder)(char *path, size_t size));
Status blas_describe(char *text, size_t size);

/* NVRTC, NVIDIA's compiler of CUDA C++ at run time. It is opened from a path, or where that is
 * NULL, as the linker finds it; what was opened first stays. */
Status nvrtc_open(const char *path, int *major, int *minor);

/* What is to be compiled, and what came of it, which nvrtc_clear frees. All texts end with a zero.
 */
typedef struct Compilation {
    const char *source, *name;
    int option_count, header_count, expression_count;
    const char *const *options;
    const char *const *headers, *const *header_names;
    const char *const *expressions; /* names of kernels as C++ writes them */

    const char *result; /* NULL: it was compiled; else the name of NVRTC's status */
    char *log;
    char *cubin; /* NULL where it was not compiled, or to no machine code */
    size_t cubin_bytes;
    char **lowered; /* for each expression the name in the machine code */
} Compilation;

Status nvrtc_compile(Compilation *compilation);
void nvrtc_clear(Compilation *compilation);

/* Goes through the kernels in machine code, in the order of its symbols; STATUS_VALUE_ERROR where
 * it is none. A visitor that returns false ends it. */
Status cubin_visit_kernels(const void *cubin, size_t bytes,
                           bool (*visit)(const char *name, void *context), void *context);

/* Modules: machine code that is loaded for one device, with counted references. Its kernels exist
 * as long as it does. It is unloaded when nobody holds it and its work is done. */
typedef struct Module Module;
typedef struct Kernel Kernel;

typedef struct LaunchLimits { /* of a device */
    int grid[3], block[3];
    int threads;                /* of a block */
    int64_t most_dynamic_bytes; /* of shared memory for a block, to those who ask for that much */
} LaunchLimits;

typedef struct KernelInfo {
    int registers, max_threads;
    int64_t shared_bytes, local_bytes, constant_bytes;
    int64_t max_dynamic_shared_bytes;
    int ptx_version, binary_version; /* 90 is 9.0 */
} KernelInfo;

Status module_load(int device, const void *cubin, size_t bytes, Module **module);
Module *module_hold(Module *module);
void module_release(Module *module);
void module_limits(const Module *module, LaunchLimits *limits);
/* STATUS_VALUE_ERROR where the module has no such global. */
Status module_global(Module *module, const char *name, void **data, int64_t *bytes);

/* STATUS_VALUE_ERROR where the module has no such kernel. */
Status kernel_find(Module *module, const char *name, Kernel **kernel);
/* The bytes of parameter i; 0: there are no more than i. */
Status kernel_parameter(Module *module, Kernel *kernel, int i, int64_t *bytes);
Status kernel_info(Module *module, Kernel *kernel, KernelInfo *info);
Status kernel_set_dynamic_bytes(Module *module, Kernel *kernel, int64_t bytes);
/* The threads of a block with which most of them fit on a multiprocessor. */
Status kernel_block_size(Module *module, Kernel *kernel, int64_t shared_bytes, int *threads);

/* An array among the arguments of a launch. */
typedef struct LaunchArray {
    const View *view;
    bool is_read, is_written; /* what is on the host is brought to the device, and back */
    void **address;           /* where the kernel is to find it: a place among the values */
} LaunchArray;

typedef struct Launch {
    Module *module;
    Kernel *kernel;
    Stream *stream; /* of the module's device */
    unsigned grid[3], block[3];
    int64_t shared_bytes;
    void **values; /* for each parameter, where its bytes are */
    LaunchArray *arrays;
    int array_count;
    Watch *watch;
} Launch;

/* Queues a launch in the order of the arrays. Where one on the host is written, or is used in place
 * because it is page-locked, it waits until that is done; only what is used in place keeps the
 * watch from ending that. */
Status kernel_launch(const Launch *launch);

/* The worker pool of the CPU backend and of transfers: function is called with ranges that together
 * cover 0..count, none shorter than grain but for the last, from several threads at once. */
Status cpu_threads(int *count);
typedef void (*RangeFunction)(void *context, int64_t begin, int64_t end);
void parallel_for(int64_t count, int64_t grain, RangeFunction function, void *context);
/* The same for a caller with work of its own that comes bit by bit: as many workers as are called,
 * as far as there are any, go through the function, each of which looks for work until it finds
 * none. A call stands in the place of the one before it, of which some may have yet to come. After
 * the end none of them is in the function any more. False: the pool is taken, or there are no
 * workers, and there is nothing to end. */
bool parallel_begin(RangeFunction function, void *context);
void parallel_call(int workers);
void parallel_end(void);
/* The grain for work on what lies in the caller's caches: a few of these it has done alone sooner
 * than with others, who have to wake, and to fetch what they need from there. */
static inline int64_t grain_of_cached(int64_t count, int64_t grain)
{
    enum { FEW = 4 };
    return count < FEW * grain ? FEW * grain : grain;
}

/* The instructions that the processor has, and the user lets the CPU backend use. */
enum { CPU_LEVEL_1 = 1, CPU_LEVEL_3 = 3, CPU_LEVEL_4 = 4 };
Status cpu_level(int *level);
bool cpu_has(int level);          /* false where cpu_level fails */
const char *cpu_level_name(void); /* NULL where cpu_level fails, or there is only one */

#ifdef __cplusplus
}
#endif

#endif
