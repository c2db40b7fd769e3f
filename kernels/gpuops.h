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
} Status;

/* What the last failed call on this thread had to say. */
typedef struct Failure {
    int cuda_code;      /* cudaError_t, or 0 where CUDA took no part */
    char cuda_name[64]; /* "cudaErrorIllegalAddress", or "" */
    int axis, ndim;     /* of STATUS_AXIS_ERROR */
    char text[768];
} Failure;

const Failure *last_failure(void);

/* Each records a failure and returns its status: `return fail(STATUS_VALUE_ERROR, "...", ...);` */
Status fail(Status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
Status fail_axis(int axis, int ndim);
Status fail_cuda(Status status, int code, const char *name, const char *text);

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
    DTYPE_FLOAT32,
    DTYPE_FLOAT64,
    DTYPE_COMPLEX64,
    DTYPE_COMPLEX128,
} Dtype;

static inline bool dtype_is_integer(Dtype dtype)
{
    return dtype >= DTYPE_INT8 && dtype <= DTYPE_UINT64;
}

/* Where to work: a CUDA ordinal (0, 1, ...) or one of these. */
enum {
    DEVICE_CPU = -1,
    DEVICE_DEFAULT = -2, /* the GPU if there is one, else the CPU */
    DEVICE_CUDA = -3,    /* the current CUDA device, and nothing else */
    DEVICE_AUTO = -4,    /* whichever is expected to be faster */
};

/* An array: memory that somebody else owns. Only the first ndim entries are set. Strides are in
 * bytes, any sign; data may be unaligned. dtype_name is for messages. */
typedef struct View {
    void *data;
    Dtype dtype;
    int64_t item_bytes;
    int ndim;
    int64_t shape[GPUOPS_MAX_DIMS];
    int64_t strides[GPUOPS_MAX_DIMS];
    const char *dtype_name;
} View;

/* What becomes of an index outside its axis: NumPy's three modes, and jax.numpy.take's fill. */
typedef enum Mode { MODE_RAISE, MODE_WRAP, MODE_CLIP, MODE_FILL } Mode;

/* One call of one operator. csrc/call.c fills in the operands and options; plan_<name> checks them
 * and says what the result looks like; run_<name> computes it. */
typedef struct Call {
    const struct Operator *op;
    View inputs[GPUOPS_MAX_INPUTS];
    View out;          /* plan sets dtype, item_bytes, ndim and shape; csrc sets the memory */
    bool out_is_fresh; /* false: the caller's own memory, which an error must leave as it was */
    int axis;          /* plan turns a negative axis into a positive one */
    bool axis_is_none; /* the array counts as flattened */
    Mode mode;
    const void *fill; /* one element for MODE_FILL */
    int device;
    void *stream; /* cudaStream_t; NULL is the legacy default stream */
} Call;

typedef struct Operator {
    const char *name;
    const char *signature; /* as Python writes it, between the parentheses */
    Status (*plan)(Call *);
    Status (*run)(Call *);
} Operator;

/* plan is for the caller's faults, run for the machine's (and for bad index values). */
#define OPERATOR(name, stem, signature, doc)                                                       \
    Status plan_##name(Call *call);                                                                \
    Status run_##name(Call *call);
#include "ops.def"
#undef OPERATOR

/* Devices. None of these makes a CUDA call before it is asked for the first time. */
typedef struct DeviceInfo {
    char name[256];
    int compute_major, compute_minor;
    int multiprocessors;
    int64_t memory_bytes;
} DeviceInfo;

Status cuda_device_count(int *count); /* never 0: a failure says why there is none */
Status cuda_current_device(int *device);
Status cuda_device_info(int device, DeviceInfo *info);
int cuda_runtime_version(void); /* 13000 is 13.0; 0: built without CUDA */
int cuda_driver_version(void);  /* the newest CUDA it can run; 0: no driver */

/* Every thread t of every block b of a grid prints a line and sets ran[b * threads + t]. */
Status hello(int device, int64_t blocks, int64_t threads, unsigned char *ran);

/* Sets call->device from what the caller asked for: an ordinal or one of the names below. */
Status choose_device(Call *call, int wanted);

/* The worker pool of the CPU backend: function is called with ranges that together cover
 * 0..count, none shorter than grain but for the last, from several threads at once. */
Status cpu_threads(int *count);
typedef void (*RangeFunction)(void *context, int64_t begin, int64_t end);
void parallel_for(int64_t count, int64_t grain, RangeFunction function, void *context);

#ifdef __cplusplus
}
#endif

#endif
