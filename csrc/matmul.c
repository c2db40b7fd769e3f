/* matmul on the CPU, which is the work of NumPy and its BLAS; and where NVIDIA's BLAS is installed,
 * which a Python package knows. */
#include "core.h"

#include <fenv.h>
#include <stddef.h>

/* numpy.matmul, which is looked up once. */
static PyObject *numpy_matmul(State *state)
{
    if (LOAD_SHARED(state->numpy_matmul) != NULL) return LOAD_SHARED(state->numpy_matmul);
    PyObject *module = PyImport_ImportModule("numpy");
    PyObject *function = module == NULL ? NULL : PyObject_GetAttrString(module, "matmul");
    Py_XDECREF(module);
    if (function == NULL) return NULL;
    if (!SET_SHARED_ONCE(state->numpy_matmul, function)) /* another thread may have been faster */
        Py_DECREF(function);
    return LOAD_SHARED(state->numpy_matmul);
}

/* Where NumPy's ufuncs run out of memory they may fail without an exception, and Python takes that
 * for an error of its own. All other errors stay as they are. */
static void name_silent_failure(void)
{
    static const char *const SILENT = "returned NULL without setting an exception";
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *text = PyObject_Str(value);
    const char *said = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, NULL);
    const bool is_silent = said == NULL || strstr(said, SILENT) != NULL;
    Py_XDECREF(text);
    PyErr_Clear(); /* no memory for the text either */
    if (!is_silent) {
        PyErr_Restore(type, value, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    PyErr_NoMemory();
}

/* numpy.matmul(a, b, out), on plain arrays: those of a subclass would come back to it. */
static int multiply(State *state, PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    PyArrayObject *const operands[] = {a, b, out};
    PyObject *plain[] = {NULL, NULL, NULL};
    PyObject *function = numpy_matmul(state), *result = NULL;
    bool ready = function != NULL;
    for (int i = 0; i < 3 && ready; i++) {
        plain[i] = PyArray_EnsureArray((PyObject *)hold(operands[i]));
        ready = plain[i] != NULL;
    }
    if (ready) result = PyObject_CallFunctionObjArgs(function, plain[0], plain[1], plain[2], NULL);
    const int status = result == NULL ? -1 : 0;
    if (ready && status < 0 && PyErr_ExceptionMatches(PyExc_SystemError)) name_silent_failure();
    Py_XDECREF(result);
    for (int i = 0; i < 3; i++) Py_XDECREF(plain[i]);
    return status;
}

/* Of sums of one term, which numpy.matmul computes without a BLAS, numpy.dot makes other calls. An
 * operand of one element is a factor to scale by, and where that is 0 the BLAS looks no further,
 * not even for a NaN; complex products are multiplied by 1 once more, which makes a NaN of an
 * infinity. */
static bool is_scaling(PyArrayObject *a, PyArrayObject *b)
{
    const bool is_single = PyArray_DIM(a, PyArray_NDIM(a) - 1) == 1;
    return is_single &&
           (PyTypeNum_ISCOMPLEX(PyArray_TYPE(a)) || PyArray_SIZE(a) == 1 || PyArray_SIZE(b) == 1);
}

/* For matrices as a BLAS takes them numpy.dot makes the same call of it, and comes to it in half
 * the time. It writes to arrays in C order only, and clears them first, which takes longer than
 * that where they are not small. */
static bool is_for_dot(PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    enum { MOST_BYTES = 16 << 10 }; /* which are cleared in the time that is saved */
    const int type = PyArray_TYPE(out);
    if (is_scaling(a, b) || PyArray_NBYTES(out) > MOST_BYTES) return false;
    return PyArray_NDIM(a) <= 2 && PyArray_NDIM(b) <= 2 && PyArray_ISONESEGMENT(a) &&
           PyArray_ISONESEGMENT(b) && PyArray_ISCARRAY(out) &&
           (PyTypeNum_ISFLOAT(type) || PyTypeNum_ISCOMPLEX(type));
}

/* The product of two numbers is one call of their dtype's dot, which numpy.matmul makes as well,
 * also with strides of 0, but comes to in ten times as long. False: it is not that, or it is for
 * NumPy to warn of what came of it; then nothing was written. */
static bool multiply_numbers(PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    const int type = PyArray_TYPE(out);
    _Alignas(max_align_t) char product[sizeof(npy_clongdouble)];
    if (PyArray_SIZE(a) != 1 || PyArray_SIZE(b) != 1 || !PyArray_ISBEHAVED_RO(a) ||
        !PyArray_ISBEHAVED_RO(b) || !PyArray_ISBEHAVED(out) ||
        !(PyTypeNum_ISFLOAT(type) || PyTypeNum_ISCOMPLEX(type)))
        return false;
    PyDataType_GetArrFuncs(PyArray_DESCR(out))
        ->dotfunc(PyArray_DATA(a), 0, PyArray_DATA(b), 0, product, 1, NULL);
    if (fetestexcept(FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INVALID) != 0) return false;
    memcpy(PyArray_DATA(out), product, (size_t)PyArray_ITEMSIZE(out));
    return true;
}

static int dot(PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    PyObject *result = PyArray_MatrixProduct2((PyObject *)a, (PyObject *)b, out);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyArrayObject *as_float32(PyArrayObject *array)
{
    return (PyArrayObject *)PyArray_FromArray(array, PyArray_DescrFromType(NPY_FLOAT),
                                              NPY_ARRAY_FORCECAST);
}

/* NumPy adds the products of float16 up in float32 too, but one by one, without its BLAS. */
static int multiply_in_float32(State *state, PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    PyArrayObject *wide_a = as_float32(a), *wide_b = NULL, *wide_out = NULL;
    int status = -1;
    if (wide_a != NULL) wide_b = as_float32(b);
    if (wide_b != NULL)
        wide_out =
            (PyArrayObject *)PyArray_EMPTY(PyArray_NDIM(out), PyArray_DIMS(out), NPY_FLOAT, 0);
    if (wide_out != NULL) status = multiply(state, wide_a, wide_b, wide_out);
    if (status == 0) status = PyArray_CopyInto(out, wide_out);
    release(wide_out);
    release(wide_b);
    release(wide_a);
    return status;
}

/* NumPy releases the GIL itself. The operands are of the dtype of out. */
int matmul_on_host(State *state, PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    View view;
    fill_dtype(PyArray_DESCR(out), &view);
    const bool is_short = view.dtype == DTYPE_FLOAT16 || view.dtype == DTYPE_BFLOAT16;
    if (is_short) return multiply_in_float32(state, a, b, out);
    if (multiply_numbers(a, b, out)) return 0;
    return is_for_dot(a, b, out) ? dot(a, b, out) : multiply(state, a, b, out);
}

static bool copy_path(PyObject *found, char *path, size_t size)
{
    PyObject *name = PyObject_GetAttrString(found, "abs_path");
    PyObject *bytes =
        name != NULL && PyUnicode_Check(name) ? PyUnicode_EncodeFSDefault(name) : NULL;
    const char *text = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    const bool fits = text != NULL && strlen(text) < size;
    if (fits) strcpy(path, text);
    Py_XDECREF(bytes);
    Py_XDECREF(name);
    return fits;
}

/* For blas_set_finder: cuda-pathfinder knows the wheels, conda, CUDA_PATH and what is loaded. */
bool find_blas(char *path, size_t size)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *module = PyImport_ImportModule("cuda.pathfinder");
    PyObject *found = module == NULL
                          ? NULL
                          : PyObject_CallMethod(module, "load_nvidia_dynamic_lib", "s", "cublasLt");
    const bool is_found = found != NULL && copy_path(found, path, size);
    if (PyErr_Occurred()) {
        /* That there is none is no error; but Ctrl-C is for the program. */
        if (!PyErr_ExceptionMatches(PyExc_Exception)) PyErr_SetInterrupt();
        PyErr_Clear();
    }
    Py_XDECREF(found);
    Py_XDECREF(module);
    PyGILState_Release(gil);
    return is_found;
}
