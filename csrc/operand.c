/* Operands: the arrays of a call, of whatever library they are, and results that fit them. */
#include "foreign.h"

/* What a type offers.
 *
 * Python's attribute look-up takes 10 ns where it finds something and 200 where it does not, so
 * that the answers are kept where they cannot change. */

static const char LIBRARY[] = "gpuops.library";

enum { MOST_TYPES = 256 };

static void destroy_library(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, LIBRARY));
}

static PyObject *new_library(const State *state, PyTypeObject *type, const DLPackExchangeAPI *api)
{
    Library *library = PyMem_Calloc(1, sizeof *library);
    if (library == NULL) return PyErr_NoMemory();
    PyObject *object = (PyObject *)type;
    library->api = api;
    library->autograd = api != NULL && PyObject_HasAttr(object, state->requires_grad_name) &&
                        PyObject_HasAttr(object, state->is_conj_name) &&
                        PyObject_HasAttr(object, state->is_neg_name);
    PyObject *capsule = PyCapsule_New(library, LIBRARY, destroy_library);
    if (capsule == NULL) PyMem_Free(library);
    return capsule;
}

int find_attribute(PyObject *object, const char *name, PyObject **value)
{
    *value = PyObject_GetAttrString(object, name);
    if (*value != NULL) return 0;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

int has_attribute(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    Py_XDECREF(value);
    if (value != NULL) return 1;
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
    PyErr_Clear();
    return 0;
}

int type_has(PyTypeObject *type, const char *name)
{
    return has_attribute((PyObject *)type, name);
}

/* What is known of a type: one more reference to a capsule with its Library, to None where it has
 * nothing for us, or NULL where each object has to be looked at. Nothing is ever taken out of the
 * dictionary, and of two threads that come at once the first decides. */
static int find_library(const State *state, PyTypeObject *type, PyObject **known)
{
    if (state->libraries == NULL) { /* the interpreter is being taken down */
        PyErr_SetString(PyExc_RuntimeError, "gpuops has been unloaded");
        return -1;
    }
    *known = PyDict_GetItemWithError(state->libraries, (PyObject *)type);
    if (*known != NULL) {
        Py_INCREF(*known);
        return 0;
    }
    /* A metaclass may have made its types unhashable, which is nobody's fault. */
    PyErr_Clear();
    PyObject *offered = PyObject_GetAttr((PyObject *)type, state->exchange_api_name);
    if (offered == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
    }
    const DLPackExchangeAPI *api = offered == NULL ? NULL : find_api(offered);
    Py_XDECREF(offered);
    const bool for_good = (PyType_GetFlags(type) & Py_TPFLAGS_IMMUTABLETYPE) != 0;
    PyObject *found = NULL;
    const int exchanges = api != NULL ? 1 : has_dlpack(type);
    const int has_interface =
        exchanges == 0 && for_good ? type_has(type, "__cuda_array_interface__") : 0;
    if (exchanges < 0 || has_interface < 0) return -1;
    if (exchanges) {
        found = new_library(state, type, api);
        if (found == NULL) return -1;
    } else if (for_good && !has_interface) {
        found = Py_NewRef(Py_None);
    } else {
        return 0;
    }
    /* The types are kept alive, so that there must not be any number of them. */
    if (PyDict_Size(state->libraries) < MOST_TYPES)
        *known = PyObject_CallMethod(state->libraries, "setdefault", "OO", type, found);
    if (*known == NULL) {
        PyErr_Clear();
        *known = Py_NewRef(found);
    }
    Py_DECREF(found);
    return 0;
}

/* What most arguments are, and all that NumPy has itself; other types are looked up. */
static bool is_common(PyObject *object)
{
    return PyArray_CheckExact(object) || PyList_CheckExact(object) || PyLong_CheckExact(object) ||
           PyFloat_CheckExact(object) || PyTuple_CheckExact(object) || object == Py_None ||
           PyArray_Check(object);
}

static int classify(State *state, Operand *operand)
{
    PyObject *known = NULL;
    Library *library = NULL;
    int result = 0;
    if (find_library(state, Py_TYPE(operand->object), &known) < 0) return -1;
    if (known != NULL && known != Py_None) library = PyCapsule_GetPointer(known, LIBRARY);
    if (known == Py_None) {
        /* It has nothing for us. */
    } else if (library != NULL && library->api != NULL) {
        result = classify_exchange(state, library, operand);
    } else if (library == NULL) {
        result = classify_interface(state, NULL, operand);
    } else {
        if (atomic_load(&library->interface) == INTERFACE_FIRST)
            result = classify_interface(state, library, operand);
        if (result == 0) result = classify_dlpack(state, library, operand);
    }
    Py_XDECREF(known);
    return result;
}

static void begin_operand(PyObject *object, const char *op, const char *name, Use use,
                          Operand *operand)
{
    memset(operand, 0, offsetof(Operand, view));
    operand->object = object;
    operand->op = op;
    operand->name = name;
    operand->use = use;
    operand->dtype.code = DL_NONE;
    operand->view.device = DEVICE_CPU;
    operand->view.stream = NULL;
    operand->view.memory = NULL;
}

/* 0: NumPy is to make an array of it. */
static int find_array(State *state, Operand *operand)
{
    PyObject *object = operand->object;
    if (Py_TYPE(object) != state->array_type)
        return is_common(object) ? 0 : classify(state, operand);
    DeviceArray *array = (DeviceArray *)object;
    operand->kind = KIND_ARRAY;
    operand->read_only = array->read_only;
    operand->memory = memory_hold(array->memory);
    operand->descr = (PyArray_Descr *)Py_NewRef((PyObject *)array->descr);
    array_view(array, &operand->view);
    return 1;
}

int read_array_operand(State *state, PyObject *object, const char *op, const char *name, Use use,
                       Operand *operand)
{
    begin_operand(object, op, name, use, operand);
    return find_array(state, operand);
}

int read_operand(State *state, PyObject *object, const char *op, const char *name, Use use,
                 Operand *operand)
{
    begin_operand(object, op, name, use, operand);
    const int found = PyArray_CheckExact(object) ? 0 : find_array(state, operand);
    if (found != 0) return found < 0 ? -1 : 0;
    operand->kind = KIND_HOST;
    if (PyArray_Check(object) || strcmp(name, "indices") != 0)
        operand->array = as_array(object, name);
    else
        operand->array = as_indices(object, name);
    return operand->array == NULL ? -1 : 0;
}

int complete_operand(Operand *operand)
{
    if (operand->array == NULL) return 0;
    if (fill_view(operand->array, operand->name, &operand->view) < 0) return -1;
    if (operand->descr == NULL)
        operand->descr = (PyArray_Descr *)Py_NewRef((PyObject *)PyArray_DESCR(operand->array));
    /* Plain bytes, which can be moved alone; only the tensor says what they are. */
    if (operand->dtype.code != DL_NONE && operand->view.dtype == DTYPE_OPAQUE)
        operand->view.dtype_name = operand->dtype.code == DL_BFLOAT
                                       ? "bfloat16 without the package ml_dtypes"
                                       : extension_name(operand->dtype);
    return 0;
}

void operand_clear(Operand *operand)
{
    release(operand->array);
    Py_XDECREF((PyObject *)operand->descr);
    if (operand->exported != NULL) dlpack_delete(operand->exported);
    if (operand->memory != NULL) release_memory(operand->memory);
    if (operand->stream != NULL) release_stream(operand->stream);
}

int require_descr(const Operand *operand)
{
    if (operand->descr != NULL) return 0;
    PyErr_Format(PyExc_BufferError,
                 "%s has dtype %s, which NumPy has no word for: install ml_dtypes, or pass a view "
                 "of it as integers",
                 operand->name, operand->view.dtype_name);
    return -1;
}

DLDataType dlpack_dtype_of(const Operand *operand)
{
    return operand->dtype.code != DL_NONE || operand->descr == NULL ? operand->dtype
                                                                    : dlpack_dtype(operand->descr);
}

bool same_dtype(const Operand *one, const Operand *other)
{
    if (one->descr != NULL && other->descr != NULL)
        return PyArray_EquivTypes(one->descr, other->descr);
    const DLDataType first = dlpack_dtype_of(one), second = dlpack_dtype_of(other);
    return first.code == second.code && first.bits == second.bits && first.lanes == second.lanes;
}

PyObject *tuple_of_sizes(int count, const int64_t *sizes)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++) {
        PyObject *size = PyLong_FromLongLong(sizes[i]);
        if (size == NULL || PyTuple_SetItem(tuple, i, size) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

int check_output(const char *op, const Operand *out, const View *result, const Operand *like,
                 bool casts)
{
    const View *view = &out->view;
    bool same = view->ndim == result->ndim;
    for (int i = 0; same && i < view->ndim; i++) same = view->shape[i] == result->shape[i];
    if (!same) {
        PyObject *expected = tuple_of_sizes(result->ndim, result->shape);
        PyObject *found = expected == NULL ? NULL : tuple_of_sizes(view->ndim, view->shape);
        if (found != NULL)
            PyErr_Format(PyExc_ValueError,
                         "output array does not match result of %s: out has shape %S, and the "
                         "result has shape %S",
                         op, found, expected);
        Py_XDECREF(expected);
        Py_XDECREF(found);
        return -1;
    }
    if (casts && !same_dtype(out, like) && !dtype_casts(result->dtype, view->dtype)) {
        PyErr_Format(PyExc_TypeError,
                     "Cannot cast the result of %s from dtype('%s') to dtype('%s') with casting "
                     "rule 'same_kind': pass an out of another dtype",
                     op, result->dtype_name, view->dtype_name);
        return -1;
    }
    if (!casts && !same_dtype(out, like)) {
        PyErr_Format(PyExc_TypeError,
                     "output array does not match result of %s: out has dtype %S, and the result "
                     "has dtype %S",
                     op, out->descr == NULL ? Py_None : (PyObject *)out->descr,
                     like->descr == NULL ? Py_None : (PyObject *)like->descr);
        return -1;
    }
    if (out->read_only) {
        PyErr_Format(PyExc_ValueError, "output array is read-only%s: pass one of your own",
                     why_read_only(out->read_only));
        return -1;
    }
    int overlaps = overlaps_itself(view);
    if (overlaps < 0) PyErr_NoMemory();
    if (overlaps > 0)
        PyErr_Format(PyExc_ValueError,
                     "some elements of out share memory with each other, so that it cannot hold "
                     "the result of %s: pass an array of its own, for example a copy",
                     op);
    return overlaps == 0 ? 0 : -1;
}

/* Results of another library's kind. */

/* The package that defines a type, if it takes arrays by DLPack: CuPy's arrays have no method that
 * tells. NULL without an exception where there is none. */
static PyObject *package_of(PyTypeObject *type)
{
    PyObject *name = PyObject_GetAttrString((PyObject *)type, "__module__");
    PyObject *parts = name == NULL ? NULL : PyObject_CallMethod(name, "partition", "s", ".");
    PyObject *package = parts == NULL ? NULL : PyImport_GetModule(PyTuple_GetItem(parts, 0));
    if (package != NULL && !PyObject_HasAttrString(package, "from_dlpack")) Py_CLEAR(package);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_MemoryError)) PyErr_Clear();
    Py_XDECREF(parts);
    Py_XDECREF(name);
    return package;
}

static PyObject *namespace_of(PyObject *object)
{
    const int has = type_has(Py_TYPE(object), "__array_namespace__");
    if (has < 0) return NULL;
    if (has) return PyObject_CallMethod(object, "__array_namespace__", NULL);
    PyObject *package = package_of(Py_TYPE(object));
    if (package == NULL && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%R has no namespace", Py_TYPE(object));
    return package;
}

int kind_on_device(PyObject *object, Kind *kind)
{
    PyTypeObject *type = Py_TYPE(object);
    const int has = type_has(type, "__array_namespace__");
    if (has < 0) return -1;
    PyObject *package = has ? NULL : package_of(type);
    *kind = has || package != NULL ? KIND_NAMESPACE : KIND_ARRAY;
    Py_XDECREF(package);
    return PyErr_Occurred() ? -1 : 0;
}

/* namespace.asarray(array, device=like.device), and without device= where that is not taken. */
static PyObject *namespace_asarray(PyObject *namespace, PyObject *like, PyObject *array)
{
    PyObject *result = NULL, *device = NULL, *arguments = NULL, *keywords = NULL;
    PyObject *function = PyObject_GetAttrString(namespace, "asarray");
    if (function == NULL || (arguments = PyTuple_Pack(1, array)) == NULL ||
        (keywords = PyDict_New()) == NULL || find_attribute(like, "device", &device) < 0 ||
        (device != NULL && PyDict_SetItemString(keywords, "device", device) < 0))
        goto done;
    result = PyObject_Call(function, arguments, keywords);
    if (result == NULL && device != NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        result = PyObject_Call(function, arguments, NULL);
    }
done:
    Py_XDECREF(device);
    Py_XDECREF(function);
    Py_XDECREF(keywords);
    Py_XDECREF(arguments);
    return result;
}

static PyObject *namespace_result(const Operand *like, PyObject *result)
{
    PyObject *namespace = namespace_of(like->object);
    if (namespace == NULL) return NULL;
    PyObject *converted = PyArray_Check(result)
                              ? namespace_asarray(namespace, like->object, result)
                              : PyObject_CallMethod(namespace, "from_dlpack", "O", result);
    Py_DECREF(namespace);
    return converted;
}

PyObject *result_like(const Operand *like, PyObject *result)
{
    if (result == NULL || like->kind == KIND_HOST || like->kind == KIND_ARRAY) return result;
    PyObject *converted = like->kind == KIND_EXCHANGE
                              ? exchange_host_result(like, (PyArrayObject *)result)
                              : namespace_result(like, result);
    Py_DECREF(result);
    return converted;
}
