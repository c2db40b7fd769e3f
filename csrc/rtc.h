/* What rtc.c, kernel.c, argument.c and launch.c share: modules, their kernels, and how a kernel is
 * launched. */
#ifndef GPUOPS_RTC_H
#define GPUOPS_RTC_H

#include "core.h"

typedef struct ModuleObject {
    PyObject_HEAD
    Module *module;    /* held; NULL where it is loaded for no device */
    int device;        /* DEVICE_CPU where it is loaded for none */
    PyObject *cubin;   /* bytes */
    PyObject *kernels; /* dict: name -> (name in the code, parameters or None) */
    PyObject *globals; /* dict: name -> name in the code, where that is another one */
    LaunchLimits limits;
    PyObject *weak_references;
} ModuleObject;

/* A parameter of a kernel: CUDA knows its size, and the source may have said more. */
typedef struct KernelParameter {
    int64_t bytes;
    size_t offset; /* of its value, among those of all */
    char *name;    /* for messages: as in the source, or "argument 1" */
    char *type;    /* as messages write it, or NULL where it is not known; these follow from it: */
    Dtype dtype;   /* OPAQUE: any, behind a pointer */
    bool is_pointer, is_const, is_char;
    bool is_value; /* of a type that has no dtype, and is no pointer */
} KernelParameter;

typedef struct KernelObject {
    PyObject_HEAD
    ModuleObject *module; /* held */
    Kernel *kernel;
    PyObject *name;
    const char *op; /* the name as text, for as long as that lives */
    KernelInfo info;
    int block_size; /* for forall() without dynamic shared memory; 0: not known yet */
    int count;
    size_t value_bytes;
    KernelParameter *parameters;
    PyObject *weak_references;
} KernelObject;

/* kernel[grid, block, stream, shared_bytes]: what is called with the arguments. A grid of no blocks
 * does nothing. */
typedef struct LauncherObject {
    PyObject_HEAD
    KernelObject *kernel; /* held */
    unsigned grid[3], block[3];
    int64_t shared_bytes;
    PyObject *stream; /* held; as it was given */
} LauncherObject;

/* In, Out and InOut: an array, and what a kernel does with it. */
typedef struct WrapperObject {
    PyObject_HEAD
    PyObject *array; /* held */
} WrapperObject;

typedef struct PointerObject {
    PyObject_HEAD
    uintptr_t address;
} PointerObject;

/* kernel.c: a kernel of a module, by a name and what module->kernels has for it. */
PyObject *new_kernel(State *state, ModuleObject *module, PyObject *name, PyObject *entry);
int add_kernel_types(PyObject *module, State *state);

/* argument.c */
int add_argument_types(PyObject *module, State *state);

/* launch.c: calls the kernel with the items of a tuple from some position on; None, or NULL. */
PyObject *launch(State *state, const LauncherObject *launcher, PyObject *args, Py_ssize_t first);

#endif
