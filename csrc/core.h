/* What the files of this folder share. */
#ifndef GPUOPS_CORE_H
#define GPUOPS_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PY_ARRAY_UNIQUE_SYMBOL gpuops_ARRAY_API
#ifndef GPUOPS_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "gpuops.h"

enum { MAX_PARAMETERS = 16 };

/* How an argument is read; its name in the signature decides. */
typedef enum Role {
    ROLE_INPUT,
    ROLE_AXIS,
    ROLE_MODE,
    ROLE_FILL,
    ROLE_OUT,
    ROLE_DEVICE,
    ROLE_STREAM
} Role;

typedef struct Parameter {
    PyObject *name; /* interned */
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

enum {
#define OPERATOR(name, stem, signature, doc) OPERATOR_##name,
#include "ops.def"
#undef OPERATOR
    OPERATORS
};

typedef struct State {
    Signature signatures[OPERATORS];
    PyObject *device_error, *device_lost_error, *forked_process_error;
} State;

/* The limited API's reference counting takes nothing but PyObject pointers. */
static inline PyArrayObject *hold(PyArrayObject *array)
{
    return (PyArrayObject *)Py_NewRef((PyObject *)array);
}

static inline void release(PyArrayObject *array)
{
    Py_XDECREF((PyObject *)array);
}

/* view.c */
PyArrayObject *as_array(PyObject *object, const char *name);
PyArrayObject *as_indices(PyObject *object, const char *name);
PyArrayObject *as_output(PyObject *object);
int check_dtype(PyArrayObject *array, const char *name);
int fill_view(PyArrayObject *array, const char *name, View *view);
bool views_overlap(const View *one, const View *other);
int overlaps_itself(const View *view);

/* call.c */
int read_signature(Signature *signature);
PyObject *call_operator(PyObject *module, int op, PyObject *const *args, Py_ssize_t count,
                        PyObject *names);
Status without_gil(Status (*work)(void *), void *context);
void *raise_status(State *state, Status status, const char *op, int device);

/* device.c */
int read_device(PyObject *object, int *device);
int read_stream(PyObject *object, void **stream);
extern PyMethodDef device_methods[];

#endif
