/* What the files of this folder share. */
#ifndef GPUOPS_CORE_H
#define GPUOPS_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define PY_ARRAY_UNIQUE_SYMBOL gpuops_ARRAY_API
#ifndef GPUOPS_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "dlpack.h"
#include "gpuops.h"
#include "shared.h"

enum { MAX_PARAMETERS = 16 };

/* How an argument is read; its name in the signature decides. */
typedef enum Role {
    ROLE_INPUT,
    ROLE_TARGET, /* the array that an operator changes in place */
    ROLE_AXIS,
    ROLE_MODE,
    ROLE_FILL,
    ROLE_DETERMINISTIC,
    ROLE_PRECISION,
    ROLE_BORDER,
    ROLE_BORDER_VALUE,
    ROLE_ORIGIN,
    ROLE_OUT,
    ROLE_OUTPUT, /* an array, or the dtype of a fresh one */
    ROLE_DEVICE,
    ROLE_STREAM,
    ROLE_PROGRESS
} Role;

typedef struct Parameter {
    PyObject *name;   /* interned */
    const char *text; /* the same in UTF-8 */
    Role role;
    bool by_keyword, required;
} Parameter;

/* An operator and what its signature says. */
typedef struct Signature {
    Operator op;
    int count;       /* parameters */
    int by_position; /* those that may be given without their names */
    int axis;        /* the default, unless it is None */
    bool axis_is_none;
    Parameter parameters[MAX_PARAMETERS];
} Signature;

typedef struct State {
    Signature signatures[OPERATORS];
    PyObject *device_error, *device_lost_error, *forked_process_error;
    PyTypeObject *array_type, *stream_type, *event_type, *pin_type;
    PyTypeObject *module_type, *kernel_type, *launcher_type, *pointer_type;
    PyTypeObject *in_type, *out_type, *in_out_type;
    PyObject *attributes_type; /* the named tuple that Kernel.attributes is */
    PyObject *numpy_matmul;    /* or NULL, until it is needed */
    PyObject *libraries;       /* dict: type -> what operand.c knows of it, or None */
    /* Interned: "__dlpack_c_exchange_api__", and three attributes of tensors. */
    PyObject *exchange_api_name, *requires_grad_name, *is_conj_name, *is_neg_name;
} State;

/* Who must not write to an array. What came in a form that has no word for it is not written to
 * either, but may be passed on in the same form. */
enum { READ_ONLY = 1, READ_ONLY_UNSAID = 2 };

/* For messages, after "is read-only". */
static inline const char *why_read_only(int read_only)
{
    return read_only == READ_ONLY_UNSAID
               ? " (it came as DLPack of the old kind, which does not say whether it may be "
                 "written to)"
               : "";
}

/* DeviceArray: elements in device memory. */
typedef struct DeviceArray {
    PyObject_VAR_HEAD
    Memory *memory;       /* held */
    char *data;           /* the element at position 0, ..., 0; NULL where there are no elements */
    PyArray_Descr *descr; /* held */
    PyObject *weak_references;
    int read_only; /* 0, or one of the above */
    int ndim;
    int64_t sizes[]; /* the shape, then the strides in bytes */
} DeviceArray;

/* What an argument is, which decides of what kind the result will be. */
typedef enum Kind {
    KIND_HOST,      /* anything that NumPy makes an array of; gives numpy.ndarray */
    KIND_ARRAY,     /* DeviceArray, and device arrays of libraries without a way back (Numba) */
    KIND_EXCHANGE,  /* the type offers DLPack's C exchange API (torch.Tensor) */
    KIND_NAMESPACE, /* __dlpack__, and an array namespace to go back to (CuPy, JAX) */
} Kind;

/* What an array is for. What is written is looked at more closely: whether it may be. */
typedef enum Use { USE_READ, USE_WRITTEN } Use;

/* An array argument in the middle of a call; operand_clear releases what it holds. Of another
 * library's data on a device, import makes memory that lasts, given the stream of the call. Where
 * that is pending it has to be done, and of the view only the device is sure until then; where it
 * is not, the memory is borrowed for the length of the call. */
typedef struct Operand {
    PyObject *object; /* borrowed: what the caller passed */
    const char *op;   /* the function, for errors of the machine */
    const char *name; /* of the parameter, for messages */
    Use use;
    Kind kind;
    bool pending;
    int read_only; /* 0, or one of the above */
    int (*import)(State *state, struct Operand *operand, Stream *stream);
    const DLPackExchangeAPI *api;       /* KIND_EXCHANGE */
    DLManagedTensorVersioned *exported; /* KIND_EXCHANGE: the tensor, for the length of the call */
    PyArrayObject *array;               /* held: data on the host */
    Memory *memory;       /* held: data on a device, or NULL where they are borrowed */
    Stream *stream;       /* held: on which its library works now, or NULL where nobody knows */
    PyArray_Descr *descr; /* held; NULL for a foreign dtype that NumPy has no word for */
    DLDataType dtype;     /* the same as DLPack writes it, or DL_NONE */
    View view;
} Operand;

/* The limited API's reference counting takes nothing but PyObject pointers. */
static inline PyArrayObject *hold(PyArrayObject *array)
{
    return (PyArrayObject *)Py_NewRef((PyObject *)array);
}

static inline void release(PyArrayObject *array)
{
    Py_XDECREF((PyObject *)array);
}

static inline bool is_on_device(const Operand *operand)
{
    return operand->object != NULL && operand->view.device != DEVICE_CPU;
}

static inline State *state_of(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

/* view.c */
PyArrayObject *array_of_object(PyObject *object, const char *name);
/* Without dimensions. NumPy sees to it that the number fits the dtype. */
PyArrayObject *array_of_number(PyObject *number, PyArray_Descr *descr);
PyArrayObject *as_indices(PyObject *object, const char *name);
PyArrayObject *as_output(PyObject *object, const char *name);
/* Fails for elements that are more than their bytes; without a name there is no array yet. */
int check_dtype(PyArray_Descr *descr, const char *name);
void fill_dtype(PyArray_Descr *descr, View *view); /* dtype, item_bytes and dtype_name */
PyArray_Descr *descr_of(Dtype dtype);              /* a new reference, or NULL with an exception */
int fill_view(PyArrayObject *array, const char *name, View *view);

/* Without a call for what most arguments are. */
static inline PyArrayObject *as_array(PyObject *object, const char *name)
{
    return PyArray_CheckExact(object) ? hold((PyArrayObject *)object)
                                      : array_of_object(object, name);
}

/* operand.c */
int read_operand(State *state, PyObject *object, const char *op, const char *name, Use use,
                 Operand *operand);
/* The same for all but what NumPy is to make an array of; 0: it is nothing else. */
int read_array_operand(State *state, PyObject *object, const char *op, const char *name, Use use,
                       Operand *operand);
/* The view of data on the host. After this no Python code may run before the work is done. */
int complete_operand(Operand *operand);
void operand_clear(Operand *operand);
/* Fails where the dtype is a foreign one that NumPy has no word for. */
int require_descr(const Operand *operand);
DLDataType dlpack_dtype_of(const Operand *operand);
bool same_dtype(const Operand *one, const Operand *other);
/* Fails unless out= can hold a result of that shape and of the dtype of an operand, or of one that
 * is cast to its own as NumPy's ufuncs cast. */
int check_output(const char *op, const Operand *out, const View *result, const Operand *like,
                 bool casts);
/* A result of the kind of the operand that decides: takes over the reference to a DeviceArray or
 * numpy.ndarray. */
PyObject *result_like(const Operand *like, PyObject *result);
PyObject *tuple_of_sizes(int count, const int64_t *sizes);

/* host.c: a new array, whose elements are not set. Without strides, which must leave no gaps, it is
 * in C order. */
PyArrayObject *host_array_new(const View *like, PyArray_Descr *descr, const int64_t *strides);

/* signature.c */
int read_signature(Signature *signature);
int bind_arguments(const Signature *signature, PyObject *const *args, Py_ssize_t count,
                   PyObject *names, PyObject **values);
void set_defaults(const Signature *signature, Call *call);
int read_option(Role role, PyObject *value, Call *call);
int read_flag(PyObject *object, const char *name, bool *flag);

/* progress.c: what looks after a call between large arrays on the host, or one that waits: signals,
 * and a bar. */
typedef struct Progress {
    Watch watch;
    const char *op;
    PyThreadState *saved;               /* while the GIL is released */
    PyObject *make_bar;                 /* tqdm, or NULL: none is wanted */
    PyObject *bar;                      /* NULL until the first part */
    int64_t told_bytes;                 /* by the bar */
    PyObject *type, *value, *traceback; /* of the exception that ended the call */
} Progress;

void progress_init(Progress *progress, const char *op);
int progress_show(Progress *progress); /* with a bar, if the call goes in parts */
/* without_gil for work that is given the watch; what its last look raised is there after it. */
Status progress_run(Progress *progress, Status (*work)(void *), void *context);
/* Closes the bar, and drops *result for an exception if that fails. */
void progress_close(Progress *progress, PyObject **result);

/* brief.c: makes a call at once if it is one of the shortest. True: *result is what it returns, or
 * NULL with an exception. */
bool call_briefly(int op, PyObject *const *args, Py_ssize_t count, PyObject *names,
                  PyObject **result);

/* call.c */
PyObject *call_operator(PyObject *module, int op, PyObject *const *args, Py_ssize_t count,
                        PyObject *names);
/* The stream of a call on a device, held: the one that stream= names, or that of the thread, or
 * that on which the library of the first array on the device works, if there is one that tells. */
Stream *stream_of_call(State *state, PyObject *stream, const Operand *leader, int device);
Status without_gil(Status (*work)(void *), void *context);
/* The same for work that may take the GIL for a while, with what is saved, and releases it again.
 */
Status without_gil_for_now(Status (*work)(void *), void *context, PyThreadState **saved);
PyThreadState *release_gil(void);
void *raise_status(State *state, Status status, const char *op, int device);

/* The candidates of a call that is not made, for explain. */
PyObject *explain_operator(PyObject *module, int op, PyObject *const *args, Py_ssize_t count,
                           PyObject *names);

/* route.c */
/* The way of a call between host arrays under device="auto", whose plan is made; or the device that
 * the caller is to measure first, else DEVICE_AUTO. */
int choose_automatically(const Call *call, Candidate *taken);
/* Runs Python code. -1 with an exception that is not about the machine. */
int measure_machine(PyObject *module, int device, int op);
/* For last_route: a call between host arrays that was begun at that time and is over now, and one
 * between arrays on a device. */
void note_route(const Operator *op, const Candidate *candidate, uint64_t started);
void note_device_route(const Operator *op, const Candidate *candidate);
void start_ticks(void); /* at import */

/* A clock that takes a fifth of the time of the system's, which is a tenth of a small call. */
static inline uint64_t ticks_now(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
#endif
}
/* What _explain returns. NULL without an exception: *unmeasured is to be measured first. Where
 * unmeasured is NULL, what is not measured has no expected time. */
PyObject *explain_on_host(State *state, const Call *call, int wanted, int *unmeasured);
PyObject *explain_on_device(const Call *call);
extern PyMethodDef route_methods[];

/* device.c */
int keep_environment(void); /* at import */
int read_device(PyObject *object, int *device);
int read_ordinal(State *state, PyObject *object, const char *op, int *ordinal);
Status count_devices(void *count); /* for without_gil; an int */
extern PyMethodDef device_methods[];

/* array.c: sizes are int64_t; strides NULL means C order. array_new takes over the reference to
 * memory, also where it fails. */
int add_array_type(PyObject *module, State *state);
PyObject *array_new(State *state, Memory *memory, char *data, PyArray_Descr *descr, int ndim,
                    const int64_t *shape, const int64_t *strides, int read_only);
PyObject *array_of_operand(State *state, const Operand *operand); /* on its memory */
void array_view(const DeviceArray *array, View *view);
/* A new array in C order on the device of a stream; its elements are not set. op is for errors. */
PyObject *array_empty(State *state, Stream *stream, PyArray_Descr *descr, int ndim,
                      const int64_t *shape, const char *op);
/* The same for callers who raise a failure of the machine in words of their own: status tells. */
PyObject *array_try_empty(State *state, Stream *stream, PyArray_Descr *descr, int ndim,
                          const int64_t *shape, Status *status);
/* A new array in C order with the elements of a view, wherever that is. */
PyObject *array_copy_of(State *state, const View *source, PyArray_Descr *descr, Stream *stream,
                        const char *op);
/* Sets every element to a value, which NumPy casts as it does when one is assigned; NULL stands for
 * zero. */
int array_fill_with(State *state, DeviceArray *array, PyObject *value, Stream *stream,
                    const char *op);
/* copy_view with the GIL released; -1 with an exception that names op, or of a signal. */
int copy_elements(State *state, const View *target, const View *source, Stream *stream,
                  const char *op);
Memory *allocate_memory(State *state, Stream *stream, int64_t bytes, const char *op);
void release_memory(Memory *memory); /* without the GIL where that may take time */
int read_shape(PyObject *object, int *ndim, int64_t *shape); /* an int, or a sequence of them */

static inline const int64_t *array_shape(const DeviceArray *array)
{
    return array->sizes;
}

static inline const int64_t *array_strides(const DeviceArray *array)
{
    return array->sizes + array->ndim;
}

/* create.c */
int add_memory_info_type(PyObject *module);
/* An ndarray that nobody may look into: NumPy's rules for shapes and dtypes, and its errors,
 * without its memory. Sub-arrays have become axes, and strings have a width. dtype may be NULL. */
PyArrayObject *read_layout(PyObject *shape, PyObject *dtype);
extern PyMethodDef create_methods[]; /* to_device, empty, zeros, asarray, memory_info, ... */

/* stream.c: each gives one more reference, or NULL with an exception. */
int add_stream_types(PyObject *module, State *state);
/* A type, and one that the module has under its name: new references. */
PyTypeObject *new_type(PyObject *module, PyType_Spec *spec);
PyTypeObject *add_type(PyObject *module, PyType_Spec *spec);
/* What a stream= argument names on a device: an object with __cuda_stream__, or None for the
 * current stream of this thread (`with stream:`), which is the legacy default stream unless it was
 * set. */
Stream *read_stream(State *state, PyObject *object, int device);
/* A stream of any device. The given device is that of None, and of a default stream of another
 * library that does not say its own; -1 stands for the one on which new arrays are made. */
Stream *any_stream(State *state, PyObject *object, int device);
Stream *current_stream(State *state, int device);
Stream *borrowed_stream(State *state, int device, uintptr_t handle, const char *op);
Stream *new_stream(State *state, int device, bool nonblocking, int priority, const char *op);
int await_stream(State *state, Stream *waiting, Stream *awaited, const char *op);
Stream *thread_stream(int device); /* the one that `with stream:` set, borrowed, or NULL; no GIL */
PyObject *stream_object(State *state, Stream *stream); /* a Stream for a record */
void release_stream(Stream *stream); /* without the GIL where that may take time */
extern PyMethodDef stream_methods[]; /* synchronize, current_stream */

/* dlpack.c */
DLDataType dlpack_dtype(const PyArray_Descr *descr);   /* DL_NONE: there is none */
const char *extension_name(DLDataType dtype);          /* of one that NumPy itself has not */
PyArray_Descr *descr_of_dlpack(DLDataType dtype);      /* a new reference; NULL: there is none */
int has_dlpack(PyTypeObject *type);                    /* -1 with an exception */
int has_attribute(PyObject *object, const char *name); /* the same */
/* For Owner.release, from any thread: a DLManagedTensorVersioned, or NULL; a Python object. */
void dlpack_delete(void *tensor);
void release_object(void *object);
int read_copy(PyObject *object, int *copy); /* a bool, or -1 for None */
int read_pair(PyObject *object, const char *keyword, long long *first, long long *second);
/* Methods of DeviceArray: __dlpack__ and __dlpack_device__. */
PyObject *array_dlpack(PyObject *self, PyObject *args, PyObject *keywords);
PyObject *array_dlpack_device(PyObject *self, PyObject *unused);

/* exchange.c */
/* Memory for a result, from the allocator of the library of a type. Of the view all is set but data
 * and strides. The tensor becomes an object of that library with exchange_finish, which takes it
 * over. */
DLManagedTensorVersioned *exchange_allocate(const DLPackExchangeAPI *api, PyTypeObject *type,
                                            DLDataType dtype, View *view);
PyObject *exchange_finish(const DLPackExchangeAPI *api, PyTypeObject *type,
                          DLManagedTensorVersioned *tensor);
int add_exchange_api(PyTypeObject *array_type);

/* matmul.c: what NumPy does; and a finder for blas_set_finder. */
int import_ufuncs(void); /* once, before that */
int matmul_on_host(State *state, PyArrayObject *a, PyArrayObject *b, PyArrayObject *out);
bool find_blas(char *path, size_t size);

/* pinned.c: pin, pinned_empty, ... */
int add_pin_type(PyObject *module, State *state);
extern PyMethodDef pinned_methods[];

/* nvrtc.c */
extern PyMethodDef nvrtc_methods[]; /* _nvrtc_open, _nvrtc_compile, ... */

/* rtc.c: Module, Kernel, what a launch takes; _load_module */
int add_module_types(PyObject *module, State *state);
extern PyMethodDef module_methods[];

/* interface.c: the getter of __cuda_array_interface__. */
PyObject *array_cuda_interface(PyObject *self, void *unused);

#endif
