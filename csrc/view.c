/* NumPy arrays as views; the dtype table. */
#include "core.h"

#include <math.h>

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
int check_dtype(PyArray_Descr *descr, const char *name)
{
    const bool builtin = descr->type_num >= 0 && descr->type_num < BUILTIN_DTYPES;
    const char *problem, *advice;
    if (!builtin && !PyTypeNum_ISUSERDEF(descr->type_num)) {
        problem = "whose elements are not of fixed size";
        advice = "a dtype of fixed size, for example a string such as 'U20'";
    } else if (PyDataType_REFCHK(descr)) {
        problem = "whose elements are Python objects, and gpuops moves plain bytes only";
        advice = "a dtype of fixed size";
    } else if (PyDataType_ISBYTESWAPPED(descr)) {
        problem = "which is not in this machine's byte order";
        advice = "dtype.newbyteorder('=')";
    } else {
        return 0;
    }
    if (name == NULL)
        PyErr_Format(PyExc_TypeError, "dtype is %S, %s: ask for %s", descr, problem, advice);
    else
        PyErr_Format(PyExc_TypeError, "%s has dtype %S, %s: convert it with %s.astype(...) to %s",
                     name, descr, problem, name, advice);
    return -1;
}

void fill_dtype(PyArray_Descr *descr, View *view)
{
    const int type = descr->type_num;
    const bool builtin = type >= 0 && type < BUILTIN_DTYPES;
    view->dtype = builtin ? DTYPES[type].dtype : DTYPE_OPAQUE;
    view->dtype_name = builtin ? DTYPES[type].name : "a user-defined dtype";
    view->item_bytes = PyDataType_ELSIZE(descr);
    if (!PyTypeNum_ISUSERDEF(type)) return;
    const DLDataType dtype = dlpack_dtype(descr);
    if (dtype.code != DL_NONE) view->dtype_name = extension_name(dtype);
    if (dtype.code == DL_BFLOAT) view->dtype = DTYPE_BFLOAT16;
}

PyArray_Descr *descr_of(Dtype dtype)
{
    for (int type = 0; type < BUILTIN_DTYPES; type++)
        if (DTYPES[type].dtype == dtype && dtype != DTYPE_OPAQUE)
            return PyArray_DescrFromType(type);
    PyArray_Descr *descr = descr_of_dlpack((DLDataType){DL_BFLOAT, 16, 1});
    if (descr == NULL)
        PyErr_SetString(PyExc_TypeError,
                        "NumPy has no bfloat16 of its own: install ml_dtypes, which adds it");
    return descr;
}

int fill_view(PyArrayObject *array, const char *name, View *view)
{
    if (check_dtype(PyArray_DESCR(array), name) < 0) return -1;
    fill_dtype(PyArray_DESCR(array), view);
    view->data = PyArray_DATA(array);
    view->device = DEVICE_CPU;
    view->stream = NULL;
    view->memory = NULL;
    view->ndim = PyArray_NDIM(array);
    for (int i = 0; i < view->ndim; i++) {
        view->shape[i] = PyArray_DIM(array, i);
        view->strides[i] = PyArray_STRIDE(array, i);
    }
    return 0;
}

/* A memoryview keeps the exporter's buffer for as long as the array lives, so that for example an
 * array.array cannot be resized in the middle of a call. NumPy takes a view of that view; without
 * memory for one it goes through the items instead, which are copied or refused. So whatever is not
 * a view of the memory is tried once more, and an error of the exporter's own comes again. */
static PyArrayObject *array_of_buffer(PyObject *object)
{
    PyObject *view = PyMemoryView_FromObject(object);
    PyArrayObject *array = NULL;
    for (int attempt = 0; attempt < 2 && view != NULL && array == NULL; attempt++) {
        PyErr_Clear();
        array = (PyArrayObject *)PyArray_FromAny(view, NULL, 0, 0, 0, NULL);
        if (array != NULL &&
            (PyArray_BASE(array) == NULL || !PyMemoryView_Check(PyArray_BASE(array)))) {
            release(array);
            array = (PyArrayObject *)PyErr_NoMemory();
        }
    }
    Py_XDECREF(view);
    return array;
}

/* What takes no search of NumPy's: the usual numbers, to the bytes of a dtype. False: that is to be
 * NumPy's, as are errors and warnings. Integers become doubles first, as they do there. */
static bool write_number(PyObject *number, int type, void *bytes)
{
    const bool is_integer = PyLong_CheckExact(number);
    int overflow = 0;
    const long long integer = is_integer ? PyLong_AsLongLongAndOverflow(number, &overflow) : 0;
    if (overflow != 0 || (!is_integer && !PyFloat_CheckExact(number))) return false;
    const double parts[2] = {is_integer ? (double)integer : PyFloat_AsDouble(number), 0};
    const float narrow[2] = {(float)parts[0], 0};
    switch (type) {
    case NPY_INT64:
        memcpy(bytes, &integer, sizeof integer);
        return is_integer;
    case NPY_DOUBLE:
    case NPY_CDOUBLE:
        memcpy(bytes, parts, sizeof parts);
        return true;
    case NPY_FLOAT:
    case NPY_CFLOAT:
        memcpy(bytes, narrow, sizeof narrow);
        return !isinf(narrow[0]) || isinf(parts[0]);
    default:
        return false;
    }
}

PyArrayObject *array_of_number(PyObject *number, PyArray_Descr *descr)
{
    char bytes[2 * sizeof(double)]; /* those of complex128 */
    Py_INCREF((PyObject *)descr);   /* which both of these take away */
    if (!write_number(number, descr->type_num, bytes))
        return (PyArrayObject *)PyArray_FromAny(number, descr, 0, 0, 0, NULL);
    PyArrayObject *array =
        (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, descr, 0, NULL, NULL, NULL, 0, NULL);
    if (array != NULL) memcpy(PyArray_DATA(array), bytes, (size_t)PyDataType_ELSIZE(descr));
    return array;
}

PyArrayObject *array_of_object(PyObject *object, const char *name)
{
    int overflow = 0;
    const bool is_integer = PyLong_CheckExact(object);
    if (is_integer) (void)PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0 && (is_integer || PyFloat_CheckExact(object))) {
        PyArray_Descr *descr = PyArray_DescrFromType(is_integer ? NPY_INT64 : NPY_DOUBLE);
        PyArrayObject *array = descr == NULL ? NULL : array_of_number(object, descr);
        Py_XDECREF((PyObject *)descr);
        return array;
    }
    if (PyArray_Check(object)) {
        /* A masked array is more than its data, and what its mask hides must not come back. */
        const int is_masked = has_attribute(object, "_mask");
        if (is_masked < 0) return NULL;
        if (is_masked) {
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
    if (array == NULL) return NULL;
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

PyArrayObject *as_output(PyObject *object, const char *name)
{
    /* A NumPy scalar has a buffer too, but not one to write to. */
    bool is_array = PyArray_Check(object);
    if (!is_array && (PyArray_CheckScalar(object) || !PyObject_CheckBuffer(object))) {
        PyErr_Format(PyExc_TypeError,
                     "output must be an array, or an object with a writable buffer; %s is %R", name,
                     Py_TYPE(object));
        return NULL;
    }
    PyArrayObject *array = as_array(object, name);
    if (array == NULL || PyArray_FailUnlessWriteable(array, name) == 0) return array;
    release(array);
    return NULL;
}
