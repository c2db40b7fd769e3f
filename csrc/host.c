/* Fresh NumPy arrays on the host. Large ones have their memory from a pool that keeps it warm, as
 * an allocator of NumPy's (NEP 49): they own it as any array does. */
#include "core.h"

/* NumPy may call these without the GIL, from any thread, also when the interpreter is gone. */

static void *allocate(void *unused, size_t bytes)
{
    (void)unused;
    return bytes > INT64_MAX ? NULL : host_take((int64_t)bytes);
}

static void *allocate_zeros(void *unused, size_t count, size_t item_bytes)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, item_bytes, &bytes)) return NULL;
    void *data = allocate(unused, bytes);
    return data == NULL ? NULL : memset(data, 0, bytes);
}

static void give_back(void *unused, void *data, size_t bytes)
{
    (void)unused;
    (void)bytes;
    if (data != NULL) host_give(data);
}

static void *reallocate(void *unused, void *data, size_t bytes)
{
    if (data == NULL) return allocate(unused, bytes);
    const size_t room = (size_t)host_bytes(data);
    if (bytes <= room && bytes >= room / 2) return data;
    void *moved = allocate(unused, bytes);
    if (moved == NULL) return bytes <= room ? data : NULL;
    memcpy(moved, data, bytes < room ? bytes : room);
    host_give(data);
    return moved;
}

/* Arrays outlive the module, and so does this. */
static PyDataMem_Handler handler = {
    .name = "gpuops.warm_memory",
    .version = 1,
    .allocator = {NULL, allocate, allocate_zeros, reallocate, give_back},
};

/* Whether a result is large, and no more than what is kept; -1 with an exception. */
static int is_for_pool(const View *like)
{
    int64_t bytes = like->item_bytes, limit;
    for (int i = 0; i < like->ndim; i++)
        if (__builtin_mul_overflow(bytes, like->shape[i], &bytes)) return 0; /* NumPy says so */
    if (bytes < HOST_LEAST_BYTES) return 0;
    if (host_memory_limit(&limit) == STATUS_OK) return bytes <= limit;
    PyErr_Format(PyExc_ValueError, "%s", last_failure()->text);
    return -1;
}

/* Makes NumPy allocate with another allocator, if it is not the program that has chosen the one it
 * has: returns that one, or NULL. */
static PyObject *enter_pool(void)
{
    PyObject *current = PyDataMem_GetHandler(), *previous = NULL;
    if (current != NULL && current == PyDataMem_DefaultHandler) {
        PyObject *capsule = PyCapsule_New(&handler, "mem_handler", NULL); /* as NumPy wants it */
        if (capsule != NULL) previous = PyDataMem_SetHandler(capsule);
        Py_XDECREF(capsule);
    }
    Py_XDECREF(current);
    return previous;
}

static int leave_pool(PyObject *previous)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *ours = PyDataMem_SetHandler(previous);
    Py_DECREF(previous);
    if (ours == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return -1;
    }
    Py_DECREF(ours);
    PyErr_Restore(type, value, traceback);
    return 0;
}

static PyArrayObject *new_array(const View *like, PyArray_Descr *descr, const int64_t *strides)
{
    npy_intp shape[GPUOPS_MAX_DIMS];
    for (int i = 0; i < like->ndim; i++) shape[i] = like->shape[i];
    Py_INCREF((PyObject *)descr);
    /* NumPy makes the strings of a new array at least one character wide, which nobody fills. */
    if (like->item_bytes == 0) return (PyArrayObject *)PyArray_Zeros(like->ndim, shape, descr, 0);
    return (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, descr, like->ndim, shape, strides,
                                                 NULL, 0, NULL);
}

PyArrayObject *host_array_new(const View *like, PyArray_Descr *descr, const int64_t *strides)
{
    const int is_large = is_for_pool(like);
    if (is_large <= 0) return is_large < 0 ? NULL : new_array(like, descr, strides);
    PyObject *previous = enter_pool();
    if (previous == NULL) return PyErr_Occurred() ? NULL : new_array(like, descr, strides);
    PyArrayObject *array = new_array(like, descr, strides);
    if (leave_pool(previous) == 0) return array;
    release(array);
    return NULL;
}
