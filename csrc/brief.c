/* The shortest calls: x[indices] and x[indices] = values for a few numbers of one axis.
 *
 * NumPy has a way of its own for them, and is done before the path of all calls (call.c) has
 * described one. So they are looked for before that. What is not one of them, or not as it should
 * be, as where an index is out of bounds, is left to that path as if nothing had been tried. */
#include "core.h"

/* As the path of all calls chooses, which tells of wrong settings. */
static bool runs_here(void)
{
    int device;
    if (read_device(Py_None, &device) < 0) {
        PyErr_Clear();
        return false;
    }
    const bool here = device == DEVICE_CPU || device == DEVICE_AUTO ||
                      (device == DEVICE_DEFAULT && cuda_is_missing());
    return here && choose_device(DEVICE_CPU, &device) == STATUS_OK;
}

/* Sets all of few but where the elements go to, or come from. */
static bool read_few(PyObject *object, PyObject *positions, Few *few)
{
    if (!PyArray_CheckExact(object) || !PyArray_CheckExact(positions)) return false;
    PyArrayObject *x = (PyArrayObject *)object, *indices = (PyArrayObject *)positions;
    const int type = PyArray_TYPE(x);
    if (PyArray_NDIM(x) != 1 || PyArray_ISBYTESWAPPED(x) ||
        !(PyTypeNum_ISNUMBER(type) || PyTypeNum_ISDATETIME(type)) || PyArray_NDIM(indices) < 1 ||
        PyArray_TYPE(indices) != NPY_INT64 || !PyArray_ISCARRAY_RO(indices))
        return false;
    few->x = PyArray_BYTES(x);
    few->size = PyArray_DIM(x, 0);
    few->stride = PyArray_STRIDE(x, 0);
    few->item_bytes = PyArray_ITEMSIZE(x);
    few->indices = PyArray_DATA(indices);
    few->count = PyArray_SIZE(indices);
    return few->count <= BRIEF_ROWS && few->count * few->item_bytes <= BRIEF_BYTES;
}

static bool take(PyObject *x, PyObject *positions, PyObject **result)
{
    Few few;
    if (!read_few(x, positions, &few) || !runs_here()) return false;
    PyArrayObject *indices = (PyArrayObject *)positions;
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)x);
    Py_INCREF((PyObject *)descr);
    *result = PyArray_NewFromDescr(&PyArray_Type, descr, PyArray_NDIM(indices),
                                   PyArray_DIMS(indices), NULL, NULL, 0, NULL);
    if (*result == NULL) return true;
    few.packed = PyArray_BYTES((PyArrayObject *)*result);
    if (gather_briefly(&few)) return true;
    Py_CLEAR(*result);
    return false;
}

/* And nobody is to be warned of that: NumPy has a flag for it, which is not public. */
static bool is_writable(PyArrayObject *array)
{
    enum {
        PLAIN = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS | NPY_ARRAY_OWNDATA |
        NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE
    };
    return PyArray_ISCARRAY(array) && (PyArray_FLAGS(array) & ~PLAIN) == 0;
}

static bool share_bytes(const void *one, int64_t bytes, const void *other, int64_t other_bytes)
{
    const uintptr_t first = (uintptr_t)one, second = (uintptr_t)other;
    return first < second + (size_t)other_bytes && second < first + (size_t)bytes;
}

static bool put(PyObject *object, PyObject *positions, PyObject *elements, PyObject **result)
{
    Few few;
    if (!PyArray_CheckExact(elements) || !read_few(object, positions, &few)) return false;
    PyArrayObject *x = (PyArrayObject *)object, *values = (PyArrayObject *)elements;
    if (!is_writable(x) || PyArray_NDIM((PyArrayObject *)positions) != 1 ||
        PyArray_NDIM(values) != 1 || PyArray_DIM(values, 0) != few.count ||
        PyArray_TYPE(values) != PyArray_TYPE(x) || PyTypeNum_ISDATETIME(PyArray_TYPE(x)) ||
        !PyArray_ISCARRAY_RO(values))
        return false;
    few.packed = PyArray_BYTES(values);
    const int64_t x_bytes = few.size * few.item_bytes;
    /* All indices are read before anything is written, but values are not. */
    if (share_bytes(few.x, x_bytes, few.packed, few.count * few.item_bytes)) return false;
    if (!runs_here() || !scatter_briefly(&few)) return false;
    *result = Py_NewRef(Py_None);
    return true;
}

bool call_briefly(int op, PyObject *const *args, Py_ssize_t count, PyObject **result)
{
    static const Candidate HERE = {.way = WAY_CPU, .device = DEVICE_CPU, .seconds = -1};
    const bool takes = count == 2 && (op == OPERATOR_gather || op == OPERATOR_take);
    if (!takes && !(count == 3 && op == OPERATOR_scatter)) return false;
    const uint64_t started = ticks_now();
    const bool is_done =
        takes ? take(args[0], args[1], result) : put(args[0], args[1], args[2], result);
    if (is_done) note_route(&operators[op], &HERE, started);
    return is_done;
}
