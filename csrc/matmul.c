/* matmul on the CPU, which is the work of NumPy and its BLAS; and where NVIDIA's BLAS is installed,
 * which a Python package knows. */
#include "core.h"

#include <fenv.h>
#include <numpy/ufuncobject.h>

/* As NumPy's import_umath, which makes an ImportError even of a want of memory. */
int import_ufuncs(void)
{
    PyObject *module = PyImport_ImportModule("numpy._core._multiarray_umath");
    PyObject *capsule = module == NULL ? NULL : PyObject_GetAttrString(module, "_UFUNC_API");
    void **api = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, NULL);
    if (api != NULL) PyUFunc_API = api;
    Py_XDECREF(capsule);
    Py_XDECREF(module);
    return api == NULL ? -1 : 0;
}

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

/* On plain arrays: those of a subclass would come back to it. */
static int call_matmul(PyObject *matmul, PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    PyArrayObject *const operands[] = {a, b, out};
    PyObject *plain[] = {NULL, NULL, NULL}, *result = NULL;
    bool ready = true;
    for (int i = 0; i < 3 && ready; i++) {
        plain[i] = PyArray_EnsureArray((PyObject *)hold(operands[i]));
        ready = plain[i] != NULL;
    }
    if (ready) result = PyObject_CallFunctionObjArgs(matmul, plain[0], plain[1], plain[2], NULL);
    const int status = result == NULL ? -1 : 0;
    if (ready && status < 0 && PyErr_ExceptionMatches(PyExc_SystemError)) name_silent_failure();
    Py_XDECREF(result);
    for (int i = 0; i < 3; i++) Py_XDECREF(plain[i]);
    return status;
}

/* One call of the loop that numpy.matmul has for a dtype: out = a @ b. */
typedef struct Product {
    PyUFuncGenericFunction loop;
    void *data;
    char *operands[3];
    npy_intp sizes[4];   /* one product, of so many rows, terms and columns */
    npy_intp strides[9]; /* from one product to the next, and then two of each operand */
} Product;

/* False: numpy.matmul has been replaced, or has none for this dtype. */
static bool find_loop(PyObject *matmul, int type, Product *product)
{
    static const char *const SIGNATURE = "(n?,k),(k,m?)->(n?,m?)";
    if (!Py_IS_TYPE(matmul, &PyUFunc_Type)) return false;
    const PyUFuncObject *ufunc = (const PyUFuncObject *)matmul;
    if (ufunc->core_signature == NULL || strcmp(ufunc->core_signature, SIGNATURE) != 0)
        return false;
    for (int i = 0; i < ufunc->ntypes; i++) {
        const char *types = ufunc->types + (ptrdiff_t)3 * i;
        if (types[0] != type || types[1] != type || types[2] != type) continue;
        product->loop = ufunc->functions[i];
        product->data = ufunc->data == NULL ? NULL : ufunc->data[i];
        return product->loop != NULL;
    }
    return false;
}

/* As its ufuncs tell their loops: an axis with one place has none. */
static npy_intp stride_of(PyArrayObject *array, int axis, npy_intp size)
{
    return size == 1 ? 0 : PyArray_STRIDE(array, axis);
}

static bool is_behaved(PyArrayObject *array, int flags, int type)
{
    return PyArray_CHKFLAGS(array, flags) && PyArray_ISNOTSWAPPED(array) &&
           PyArray_TYPE(array) == type;
}

/* False: it is for numpy.matmul, which also says what is wrong where another thread has given one
 * of them another shape while they were cast. */
static bool describe_product(PyArrayObject *a, PyArrayObject *b, PyArrayObject *out,
                             Product *product)
{
    const int a_last = PyArray_NDIM(a) - 1, b_last = PyArray_NDIM(b) - 1, type = PyArray_TYPE(out);
    if (a_last < 0 || a_last > 1 || b_last < 0 || b_last > 1) return false;
    if (!is_behaved(a, NPY_ARRAY_ALIGNED, type) || !is_behaved(b, NPY_ARRAY_ALIGNED, type) ||
        !is_behaved(out, NPY_ARRAY_BEHAVED, type))
        return false;
    const npy_intp rows = a_last == 0 ? 1 : PyArray_DIM(a, 0), terms = PyArray_DIM(b, 0);
    const npy_intp columns = b_last == 0 ? 1 : PyArray_DIM(b, 1);
    if (rows == 0 || terms == 0 || columns == 0) return false;
    if (PyArray_DIM(a, a_last) != terms || PyArray_NDIM(out) != a_last + b_last ||
        (a_last == 1 && PyArray_DIM(out, 0) != rows) ||
        (b_last == 1 && PyArray_DIM(out, a_last) != columns))
        return false;
    const npy_intp sizes[] = {1, rows, terms, columns};
    const npy_intp strides[] = {
        0,
        0,
        0,
        stride_of(a, 0, rows),
        stride_of(a, a_last, terms),
        stride_of(b, 0, terms),
        stride_of(b, b_last, columns),
        stride_of(out, 0, rows),
        stride_of(out, a_last, columns),
    };
    product->operands[0] = PyArray_BYTES(a);
    product->operands[1] = PyArray_BYTES(b);
    product->operands[2] = PyArray_BYTES(out);
    memcpy(product->sizes, sizes, sizeof sizes);
    memcpy(product->strides, strides, sizeof strides);
    return true;
}

static Status run_loop(void *context)
{
    Product *product = context;
    product->loop(product->operands, product->sizes, product->strides, product->data);
    return STATUS_OK;
}

/* What numpy.matmul warns of, or raises, as numpy.errstate has it. */
static int tell_of_floats(void)
{
    const int found = fetestexcept(FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INVALID);
    if (found == 0) return 0;
    (void)feclearexcept(FE_ALL_EXCEPT);
    return PyUFunc_GiveFloatingpointErrors("matmul",
                                           (found & FE_DIVBYZERO ? UFUNC_FPE_DIVIDEBYZERO : 0) |
                                               (found & FE_OVERFLOW ? UFUNC_FPE_OVERFLOW : 0) |
                                               (found & FE_UNDERFLOW ? UFUNC_FPE_UNDERFLOW : 0) |
                                               (found & FE_INVALID ? UFUNC_FPE_INVALID : 0));
}

/* Products of two numbers, for which NumPy's ufuncs keep the GIL. */
enum { MOST_WITH_GIL = 500 };

/* numpy.matmul(a, b, out); of matrices and vectors by the loop that it would call. numpy.matmul
 * takes some 0.5 us more to come to that, and several where its code is not in the caches. */
static int multiply(State *state, PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    Product product;
    PyObject *matmul = numpy_matmul(state);
    if (matmul == NULL) return -1;
    if (!describe_product(a, b, out, &product) || !find_loop(matmul, PyArray_TYPE(out), &product))
        return call_matmul(matmul, a, b, out);
    (void)feclearexcept(FE_ALL_EXCEPT);
    if (PyArray_SIZE(a) <= MOST_WITH_GIL / product.sizes[3])
        (void)run_loop(&product);
    else
        (void)without_gil(run_loop, &product);
    return PyErr_Occurred() ? -1 : tell_of_floats(); /* there may have been no memory */
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

/* The operands are of the dtype of out, and do not overlap it. */
int matmul_on_host(State *state, PyArrayObject *a, PyArrayObject *b, PyArrayObject *out)
{
    View view;
    fill_dtype(PyArray_DESCR(out), &view);
    const bool is_short = view.dtype == DTYPE_FLOAT16 || view.dtype == DTYPE_BFLOAT16;
    return is_short ? multiply_in_float32(state, a, b, out) : multiply(state, a, b, out);
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
