/* The shortest calls: x[indices] and x[indices] = values for a few numbers of one axis.
 *
 * NumPy has a way of its own for them, and is done before the path of all calls (call.c) has
 * described one. So they are looked for before that. What is not one of them, or not as it should
 * be, as where an index is out of bounds, is left to that path as if nothing had been tried. */
#include "core.h"

/* Others may run while more than MOST_FEW are taken, as NumPy has it. */
enum { MOST_TAKEN = 1 << 10, MOST_ITEM_BYTES = 16 };

/* As the path of all calls chooses, which tells of wrong settings. */
static bool runs_here(PyObject *wanted)
{
    int device;
    if (read_device(wanted, &device) < 0) {
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
    /* Those of users have negative numbers, or large ones. */
    if (PyArray_NDIM(x) != 1 || PyArray_ISBYTESWAPPED(x) || type < 0 ||
        !(PyTypeNum_ISNUMBER(type) || PyTypeNum_ISDATETIME(type)) || PyArray_NDIM(indices) < 1 ||
        PyArray_TYPE(indices) != NPY_INT64 || !PyArray_ISCARRAY_RO(indices))
        return false;
    few->x = PyArray_BYTES(x);
    few->size = PyArray_DIM(x, 0);
    few->stride = PyArray_STRIDE(x, 0);
    few->item_bytes = PyArray_ITEMSIZE(x);
    few->indices = PyArray_DATA(indices);
    few->count = PyArray_SIZE(indices);
    return few->count <= MOST_TAKEN && few->item_bytes <= MOST_ITEM_BYTES;
}

static Status gather_without_gil(void *few)
{
    return gather_briefly(few) ? STATUS_OK : STATUS_INDEX_ERROR;
}

/* The arguments are held while others could resize them: who passes them may only borrow them. */
static bool gather_few(PyObject *const *args, Few *few)
{
    if (few->count <= MOST_FEW) return gather_briefly(few);
    PyObject *x = Py_NewRef(args[0]), *indices = Py_NewRef(args[1]);
    const Status status = without_gil(gather_without_gil, few);
    Py_DECREF(x);
    Py_DECREF(indices);
    return status == STATUS_OK;
}

static bool take(PyObject *const *args, PyObject *device, PyObject **result)
{
    Few few;
    if (!read_few(args[0], args[1], &few) || !runs_here(device)) return false;
    PyArrayObject *indices = (PyArrayObject *)args[1];
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)args[0]);
    Py_INCREF((PyObject *)descr);
    *result = PyArray_NewFromDescr(&PyArray_Type, descr, PyArray_NDIM(indices),
                                   PyArray_DIMS(indices), NULL, NULL, 0, NULL);
    if (*result == NULL) return true;
    few.packed = PyArray_BYTES((PyArrayObject *)*result);
    if (gather_few(args, &few)) return true;
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

/* Of arrays without gaps; views_overlap() takes views, which take longer to fill. */
static bool share_bytes(const void *one, int64_t bytes, const void *other, int64_t other_bytes)
{
    const uintptr_t first = (uintptr_t)one, second = (uintptr_t)other;
    return first < second + (size_t)other_bytes && second < first + (size_t)bytes;
}

static bool put(PyObject *const *args, PyObject *device, PyObject **result)
{
    Few few;
    if (!PyArray_CheckExact(args[2]) || !read_few(args[0], args[1], &few)) return false;
    PyArrayObject *x = (PyArrayObject *)args[0], *values = (PyArrayObject *)args[2];
    if (few.count > MOST_FEW || !is_writable(x) || PyArray_NDIM((PyArrayObject *)args[1]) != 1 ||
        PyArray_NDIM(values) != 1 || PyArray_DIM(values, 0) != few.count ||
        PyArray_TYPE(values) != PyArray_TYPE(x) || PyTypeNum_ISDATETIME(PyArray_TYPE(x)) ||
        !PyArray_ISCARRAY_RO(values))
        return false;
    few.packed = PyArray_BYTES(values);
    const int64_t x_bytes = few.size * few.item_bytes;
    /* All indices are read before anything is written, but values are not. */
    if (share_bytes(few.x, x_bytes, few.packed, few.count * few.item_bytes)) return false;
    if (!runs_here(device) || !scatter_briefly(&few)) return false;
    *result = Py_NewRef(Py_None);
    return true;
}

/* NULL: the keywords are others. What is neither a text nor None may be code of Python's, which is
 * to run once. */
static PyObject *device_of(PyObject *names, PyObject *const *keywords)
{
    if (names == NULL) return Py_None;
    if (PyTuple_Size(names) != 1) return NULL;
    if (!PyUnicode_CheckExact(keywords[0]) && keywords[0] != Py_None) return NULL;
    PyObject *name = PyTuple_GetItem(names, 0);
    return PyUnicode_CompareWithASCIIString(name, "device") == 0 ? keywords[0] : NULL;
}

bool call_briefly(int op, PyObject *const *args, Py_ssize_t count, PyObject *names,
                  PyObject **result)
{
    static const Candidate HERE = {.way = WAY_CPU, .device = DEVICE_CPU, .seconds = -1};
    const bool takes = count == 2 && (op == OPERATOR_gather || op == OPERATOR_take);
    if (!takes && !(count == 3 && op == OPERATOR_scatter)) return false;
    PyObject *device = device_of(names, args + count);
    if (device == NULL) return false;
    const uint64_t started = ticks_now();
    const bool is_done = takes ? take(args, device, result) : put(args, device, result);
    if (is_done && *result != NULL) note_route(&operators[op], &HERE, started);
    return is_done;
}
