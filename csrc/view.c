/* Any object -> View; the dtype table. */
#include "core.h"

/* Indexed by NumPy's type number. */
static const struct {
    Dtype dtype;
    const char *name;
} DTYPES[] = {
    [NPY_BOOL] = {DTYPE_BOOL, "bool"},
    [NPY_BYTE] = {DTYPE_INT8, "int8"},
    [NPY_UBYTE] = {DTYPE_UINT8, "uint8"},
    [NPY_SHORT] = {DTYPE_INT16, "int16"},
    [NPY_USHORT] = {DTYPE_UINT16, "uint16"},
    [NPY_INT] = {DTYPE_INT32, "int32"},
    [NPY_UINT] = {DTYPE_UINT32, "uint32"},
    [NPY_LONG] = {sizeof(long) == 8 ? DTYPE_INT64 : DTYPE_INT32, "int64"},
    [NPY_ULONG] = {sizeof(long) == 8 ? DTYPE_UINT64 : DTYPE_UINT32, "uint64"},
    [NPY_LONGLONG] = {DTYPE_INT64, "int64"},
    [NPY_ULONGLONG] = {DTYPE_UINT64, "uint64"},
    [NPY_HALF] = {DTYPE_FLOAT16, "float16"},
    [NPY_FLOAT] = {DTYPE_FLOAT32, "float32"},
    [NPY_DOUBLE] = {DTYPE_FLOAT64, "float64"},
    [NPY_LONGDOUBLE] = {DTYPE_OPAQUE, "longdouble"},
    [NPY_CFLOAT] = {DTYPE_COMPLEX64, "complex64"},
    [NPY_CDOUBLE] = {DTYPE_COMPLEX128, "complex128"},
    [NPY_CLONGDOUBLE] = {DTYPE_OPAQUE, "clongdouble"},
    [NPY_OBJECT] = {DTYPE_OPAQUE, "object"},
    [NPY_STRING] = {DTYPE_OPAQUE, "bytes"},
    [NPY_UNICODE] = {DTYPE_OPAQUE, "str"},
    [NPY_VOID] = {DTYPE_OPAQUE, "void"},
    [NPY_DATETIME] = {DTYPE_OPAQUE, "datetime64"},
    [NPY_TIMEDELTA] = {DTYPE_OPAQUE, "timedelta64"},
};

enum { BUILTIN_DTYPES = sizeof DTYPES / sizeof DTYPES[0] };

/* An allow-list: a dtype is moved only if its bytes are known to be all there is to it. */
int check_dtype(PyArrayObject *array, const char *name)
{
    PyArray_Descr *descr = PyArray_DESCR(array);
    bool builtin = descr->type_num >= 0 && descr->type_num < BUILTIN_DTYPES;
    if (!builtin && !PyTypeNum_ISUSERDEF(descr->type_num)) {
        PyErr_Format(PyExc_TypeError,
                     "%s has dtype %S, whose elements are not of fixed size: convert it with "
                     "%s.astype(...), for example to a fixed-width string such as 'U20'",
                     name, descr, name);
        return -1;
    }
    if (PyDataType_REFCHK(descr)) {
        PyErr_Format(PyExc_TypeError,
                     "%s has dtype %S, whose elements are Python objects: gpuops moves plain bytes "
                     "only; convert it with %s.astype(...) to a dtype of fixed size",
                     name, descr, name);
        return -1;
    }
    if (PyArray_ISBYTESWAPPED(array)) {
        PyErr_Format(PyExc_TypeError,
                     "%s has dtype %S, which is not in this machine's byte order: convert it with "
                     "%s.astype(%s.dtype.newbyteorder('='))",
                     name, descr, name, name);
        return -1;
    }
    return 0;
}

int fill_view(PyArrayObject *array, const char *name, View *view)
{
    if (check_dtype(array, name) < 0) return -1;
    int type = PyArray_TYPE(array);
    view->data = PyArray_DATA(array);
    view->dtype = type < BUILTIN_DTYPES ? DTYPES[type].dtype : DTYPE_OPAQUE;
    view->dtype_name = type < BUILTIN_DTYPES ? DTYPES[type].name : "a user-defined dtype";
    view->item_bytes = PyArray_ITEMSIZE(array);
    view->ndim = PyArray_NDIM(array);
    for (int i = 0; i < view->ndim; i++) {
        view->shape[i] = PyArray_DIM(array, i);
        view->strides[i] = PyArray_STRIDE(array, i);
    }
    return 0;
}

/* A memoryview keeps the exporter's buffer for as long as the array lives, so that for example an
 * array.array cannot be resized in the middle of a call. */
static PyArrayObject *array_of_buffer(PyObject *object)
{
    PyObject *view = PyMemoryView_FromObject(object);
    if (view == NULL) return NULL;
    PyObject *array = PyArray_FromAny(view, NULL, 0, 0, 0, NULL);
    Py_DECREF(view);
    return (PyArrayObject *)array;
}

PyArrayObject *as_array(PyObject *object, const char *name)
{
    if (PyArray_CheckExact(object)) return (PyArrayObject *)Py_NewRef(object);
    if (PyArray_Check(object)) {
        /* A masked array is more than its data, and what its mask hides must not come back. */
        if (PyObject_HasAttrString(object, "_mask")) {
            PyErr_Format(PyExc_TypeError,
                         "%s is a masked array, whose mask would be lost: pass %s.filled(...), or "
                         "its .data and .mask one after the other",
                         name, name);
            return NULL;
        }
        return (PyArrayObject *)Py_NewRef(object);
    }
    if (PyObject_CheckBuffer(object) && !PyArray_CheckScalar(object))
        return array_of_buffer(object);
    return (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
}

PyArrayObject *as_indices(PyObject *object, const char *name)
{
    PyArrayObject *array = as_array(object, name);
    if (array == NULL || PyArray_Check(object)) return array;
    /* An empty list has no dtype of its own, and numpy.asarray makes it float64. */
    if (PyArray_SIZE(array) == 0 && PyArray_TYPE(array) == NPY_DOUBLE && PySequence_Check(object) &&
        !PyObject_CheckBuffer(object)) {
        PyArrayObject *integers =
            (PyArrayObject *)PyArray_EMPTY(PyArray_NDIM(array), PyArray_DIMS(array), NPY_INTP, 0);
        release(array);
        return integers;
    }
    if (PyArray_TYPE(array) == NPY_OBJECT && PyLong_Check(object)) {
        release(array);
        PyErr_SetString(PyExc_IndexError, "cannot fit 'int' into an index-sized integer");
        return NULL;
    }
    return array;
}

PyArrayObject *as_output(PyObject *object)
{
    /* A NumPy scalar has a buffer too, but not one to write to. */
    bool is_array = PyArray_Check(object);
    if (!is_array && (PyArray_CheckScalar(object) || !PyObject_CheckBuffer(object))) {
        PyErr_Format(PyExc_TypeError,
                     "output must be an array, or an object with a writable buffer; out is %R",
                     Py_TYPE(object));
        return NULL;
    }
    PyArrayObject *array = as_array(object, "out");
    if (array == NULL || PyArray_FailUnlessWriteable(array, "out") == 0) return array;
    release(array);
    return NULL;
}

/* The bytes from the lowest to the highest that a view touches. */
static void extent(const View *view, uintptr_t *begin, uintptr_t *end)
{
    *begin = *end = (uintptr_t)view->data;
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) {
            *end = *begin;
            return;
        }
        int64_t reach = (view->shape[i] - 1) * view->strides[i];
        *(reach < 0 ? begin : end) += (uintptr_t)reach;
    }
    *end += (uintptr_t)view->item_bytes;
}

/* Whether they may share bytes. Views that interleave count as overlapping. */
bool views_overlap(const View *one, const View *other)
{
    uintptr_t one_begin, one_end, other_begin, other_end;
    extent(one, &one_begin, &one_end);
    extent(other, &other_begin, &other_end);
    return one_begin < other_end && other_begin < one_end;
}

/* 1 if two elements of a view share a byte, 0 if none do, -1 if there is no memory to tell. */
int overlaps_itself(const View *view)
{
    /* From the smallest stride to the largest, each step must clear all that the smaller reach. */
    int64_t strides[GPUOPS_MAX_DIMS], counts[GPUOPS_MAX_DIMS];
    int ndim = 0;
    int64_t items = 1;
    for (int i = 0; i < view->ndim; i++) {
        items *= view->shape[i];
        if (view->shape[i] == 1) continue;
        int64_t stride = view->strides[i] < 0 ? -view->strides[i] : view->strides[i];
        int j = ndim++;
        for (; j > 0 && strides[j - 1] > stride; j--) {
            strides[j] = strides[j - 1];
            counts[j] = counts[j - 1];
        }
        strides[j] = stride;
        counts[j] = view->shape[i];
    }
    if (items <= 1 || view->item_bytes == 0) return 0;
    int64_t reach = view->item_bytes;
    int dim = 0;
    for (; dim < ndim && strides[dim] >= reach; dim++) reach += (counts[dim] - 1) * strides[dim];
    if (dim == ndim) return 0;
    if (strides[0] == 0) return 1;

    /* Strides that interleave may still be free of overlap, so mark every byte. */
    uintptr_t begin, end;
    extent(view, &begin, &end);
    unsigned char *taken = calloc((end - begin + 7) / 8, 1);
    if (taken == NULL) return -1;
    int overlaps = 0;
    for (int64_t item = 0; item < items && !overlaps; item++) {
        uintptr_t at = (uintptr_t)view->data - begin;
        int64_t rest = item;
        for (int i = view->ndim - 1; i >= 0; i--) {
            at += (uintptr_t)(rest % view->shape[i] * view->strides[i]);
            rest /= view->shape[i];
        }
        for (int64_t byte = 0; byte < view->item_bytes; byte++, at++) {
            overlaps |= taken[at / 8] >> (at % 8) & 1;
            taken[at / 8] |= (unsigned char)(1 << at % 8);
        }
    }
    free(taken);
    return overlaps;
}
