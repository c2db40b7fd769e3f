/* __cuda_array_interface__, versions 2 and 3, both ways. */
#include "foreign.h"

enum Field { SHAPE, TYPESTR, DATA, VERSION, STRIDES, DESCR, MASK, STREAM, FIELDS };
static const char *const KEYS[FIELDS] = {"shape",   "typestr", "data", "version",
                                         "strides", "descr",   "mask", "stream"};

/* What a dict has of the fields, borrowed; NULL stands for those that it has not. */
static int find_fields(PyObject *dict, PyObject **fields)
{
    for (int i = 0; i < FIELDS; i++) {
        PyObject *key = PyUnicode_FromString(KEYS[i]);
        fields[i] = key == NULL ? NULL : PyDict_GetItemWithError(dict, key);
        Py_XDECREF(key);
        if (fields[i] == NULL && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int refuse_interface(const char *name, enum Field field, PyObject *const *fields)
{
    PyObject *value = fields[field];
    if (PyErr_Occurred() &&
        (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)))
        return -1;
    PyErr_Clear();
    PyErr_Format(PyExc_BufferError, "%s.__cuda_array_interface__['%s'] is %R", name, KEYS[field],
                 value == NULL ? Py_None : value);
    return -1;
}

static int read_integers(const char *name, enum Field field, PyObject *const *fields,
                         int64_t *values)
{
    PyObject *tuple = fields[field];
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        values[i] = PyLong_Check(item) ? PyLong_AsLongLong(item) : -1;
        if (!PyLong_Check(item) || PyErr_Occurred()) return refuse_interface(name, field, fields);
    }
    return 0;
}

/* An address or a handle; false where it is none. */
static bool read_word(PyObject *object, uintptr_t *word)
{
    if (!PyLong_Check(object)) return false;
    *word = (uintptr_t)PyLong_AsSize_t(object);
    return !PyErr_Occurred();
}

/* A dtype without fields may be described as one field without a name. */
static bool first_describes_fields(PyObject *fields)
{
    PyObject *first = PyList_GetItem(fields, 0);
    PyObject *name =
        PyTuple_Check(first) && PyTuple_Size(first) > 0 ? PyTuple_GetItem(first, 0) : Py_None;
    return PyList_Size(fields) > 1 || !PyUnicode_Check(name) || PyUnicode_GetLength(name) > 0;
}

static bool describes_fields(PyObject *fields)
{
    if (fields == NULL || !PyList_Check(fields)) return false;
    bool result;
    BEGIN_ALONE(fields); /* it is not ours, and what is looked at is borrowed of it */
    result = PyList_Size(fields) > 0 && first_describes_fields(fields);
    END_ALONE();
    return result;
}

/* 1: it is read; 0: only DLPack has a word for it, if the library has that. ml_dtypes calls its own
 * dtypes V1, V2 and f1 here, which is not what they are. */
static int read_dtype(Operand *operand, PyObject *const *fields, bool has_dlpack)
{
    const char *name = operand->name;
    PyObject *typestr = fields[TYPESTR];
    PyArray_Descr *descr = NULL, *structured = NULL;
    if (typestr == NULL || !PyUnicode_Check(typestr) || !PyArray_DescrConverter(typestr, &descr)) {
        if (!has_dlpack || PyErr_ExceptionMatches(PyExc_MemoryError))
            return refuse_interface(name, TYPESTR, fields);
        PyErr_Clear();
        return 0;
    }
    set_dtype(operand, descr, dlpack_dtype(descr));
    const int64_t item_bytes = operand->view.item_bytes;
    if (descr->type_num == NPY_VOID && describes_fields(fields[DESCR])) {
        if (!PyArray_DescrConverter(fields[DESCR], &structured))
            return refuse_interface(name, DESCR, fields);
        set_dtype(operand, structured, dlpack_dtype(structured));
        if (operand->view.item_bytes != item_bytes) return refuse_interface(name, DESCR, fields);
    } else if (descr->type_num == NPY_VOID && has_dlpack) {
        return 0;
    }
    if (item_bytes > 0 && check_dtype(operand->descr, name) == 0) return 1;
    return refuse_interface(name, TYPESTR, fields);
}

/* 0: it has none. */
static int read_interface_stream(const char *name, PyObject *const *fields, uintptr_t *handle)
{
    PyObject *stream = fields[STREAM];
    *handle = 0;
    if (stream == NULL || stream == Py_None) return 0;
    if (!read_word(stream, handle)) return refuse_interface(name, STREAM, fields);
    if (*handle != 0) return 0;
    PyErr_Format(PyExc_BufferError,
                 "%s.__cuda_array_interface__['stream'] is 0, which could be either default "
                 "stream: it must be 1 for the legacy and 2 for the per-thread one",
                 name);
    return -1;
}

static long version_of(PyObject *const *fields)
{
    PyObject *version = fields[VERSION];
    return version != NULL && PyLong_Check(version) ? PyLong_AsLong(version) : -1;
}

/* 1: the whole view but for its device and stream; 0: of what DLPack will tell, only the address.
 */
static int read_interface(Operand *operand, PyObject *const *fields, bool has_dlpack)
{
    const char *name = operand->name;
    View *view = &operand->view;
    int64_t shape[GPUOPS_MAX_DIMS], strides[GPUOPS_MAX_DIMS], low = 0, high = 0;
    uintptr_t address = 0;
    if (version_of(fields) < 2) return refuse_interface(name, VERSION, fields);
    if (fields[MASK] != NULL && fields[MASK] != Py_None) {
        PyErr_Format(PyExc_BufferError,
                     "%s is a masked array, whose mask would be lost: pass its data and its mask "
                     "one after the other",
                     name);
        return -1;
    }
    PyObject *data = fields[DATA];
    if (data == NULL || !PyTuple_Check(data) || PyTuple_Size(data) != 2 ||
        !read_word(PyTuple_GetItem(data, 0), &address))
        return refuse_interface(name, DATA, fields);
    const int read_only = PyObject_IsTrue(PyTuple_GetItem(data, 1));
    if (read_only < 0) return refuse_interface(name, DATA, fields);
    operand->read_only = read_only != 0;
    const int said = read_dtype(operand, fields, has_dlpack);
    if (said <= 0) {
        view->data = (void *)address;
        view->item_bytes = 1;
        view->ndim = 0;
        return said;
    }

    PyObject *sizes = fields[SHAPE];
    if (sizes == NULL || !PyTuple_Check(sizes) || PyTuple_Size(sizes) > GPUOPS_MAX_DIMS)
        return refuse_interface(name, SHAPE, fields);
    const Py_ssize_t ndim = PyTuple_Size(sizes);
    if (read_integers(name, SHAPE, fields, shape) < 0) return -1;
    PyObject *steps = fields[STRIDES];
    const bool has_strides = steps != NULL && steps != Py_None;
    if (has_strides && (!PyTuple_Check(steps) || PyTuple_Size(steps) != ndim))
        return refuse_interface(name, STRIDES, fields);
    if (has_strides && read_integers(name, STRIDES, fields, strides) < 0) return -1;
    if (read_sizes(name, ndim, shape, has_strides ? strides : NULL, 1, view, &low, &high) < 0 ||
        read_address(name, address, 0, low, high, view) < 0 ||
        check_alignment(name, view, PyDataType_ALIGNMENT(operand->descr)) < 0)
        return -1;
    return 1;
}

/* Where no stream is named, nobody works on the data, and the one of the call is as good as any. */
static int import_interface(State *state, Operand *operand, Stream *stream)
{
    const Owner owner = {release_object, Py_NewRef(operand->object)};
    return adopt(state, operand, operand->stream != NULL ? operand->stream : stream, owner);
}

static int take_interface(State *state, Operand *operand, PyObject *dict, bool has_dlpack)
{
    PyObject *fields[FIELDS];
    const char *name = operand->name;
    View *view = &operand->view;
    uintptr_t handle;
    if (find_fields(dict, fields) < 0) return -1;
    const int said = read_interface(operand, fields, has_dlpack);
    if (said < 0 || read_interface_stream(name, fields, &handle) < 0) return -1;
    /* An array without elements is nowhere, but DLPack knows better. */
    if (has_dlpack && view->data == NULL) return 0;
    view->device = DEVICE_CPU; /* not known yet */
    if (locate(state, operand->op, name, view) < 0) return -1;
    if (handle != 0) {
        operand->stream = borrowed_stream(state, view->device, handle, operand->op);
        if (operand->stream == NULL) return -1;
    }
    if (!said) {
        view->device = DEVICE_CPU;
        return 0;
    }
    operand->kind = KIND_ARRAY;
    if (has_dlpack && kind_on_device(operand->object, &operand->kind) < 0) return -1;
    operand->pending = true;
    operand->import = import_interface;
    return 1;
}

/* Whether a library is to be taken by its interface, which is NULL where it has none; -1 with an
 * exception. */
static int prefers_interface(Library *library, PyObject *dict)
{
    if (atomic_load(&library->interface) == INTERFACE_UNKNOWN) {
        PyObject *fields[FIELDS] = {NULL};
        if (dict != NULL && PyDict_Check(dict) && find_fields(dict, fields) < 0) return -1;
        const bool names_stream = version_of(fields) >= 3 && fields[STREAM] != NULL;
        atomic_store(&library->interface, names_stream ? INTERFACE_FIRST : INTERFACE_NEVER);
    }
    return dict != NULL && atomic_load(&library->interface) == INTERFACE_FIRST;
}

int classify_interface(State *state, Library *library, Operand *operand)
{
    PyObject *dict;
    int result = 0;
    if (find_attribute(operand->object, "__cuda_array_interface__", &dict) < 0) {
        if (library == NULL || !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear(); /* DLPack may do better */
    }
    const int taken = library == NULL ? dict != NULL : prefers_interface(library, dict);
    if (taken < 0) {
        result = -1;
    } else if (!taken) {
        /* It is no array on a GPU, or DLPack will tell more of it. */
    } else if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_BufferError, "%s.__cuda_array_interface__ is %R, and not a dict",
                     operand->name, Py_TYPE(dict));
        result = -1;
    } else {
        /* What it holds must last, whatever the code does to it that runs when it is read. */
        PyObject *copied = PyDict_Copy(dict);
        result = copied == NULL ? -1 : take_interface(state, operand, copied, library != NULL);
        Py_XDECREF(copied);
    }
    Py_XDECREF(dict);
    return result;
}

/* Fields of a structured dtype, or nothing where they cannot be said in this way. */
static int add_fields(PyObject *dict, PyArray_Descr *descr)
{
    if (!PyDataType_HASFIELDS(descr)) return 0;
    PyObject *fields = PyObject_GetAttrString((PyObject *)descr, "descr");
    if (fields == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ValueError)) return -1;
        PyErr_Clear();
        return 0;
    }
    int result = PyDict_SetItemString(dict, "descr", fields);
    Py_DECREF(fields);
    return result;
}

PyObject *array_cuda_interface(PyObject *self, void *unused)
{
    (void)unused;
    const DeviceArray *array = (DeviceArray *)self;
    View view;
    array_view(array, &view);
    /* ml_dtypes calls its own dtypes V1 and V2 here, which is not what they are. */
    if (PyTypeNum_ISUSERDEF(array->descr->type_num)) {
        PyErr_Format(PyExc_AttributeError,
                     "__cuda_array_interface__ has no word for dtype %S: use __dlpack__",
                     array->descr);
        return NULL;
    }
    const bool packed = view_items(&view) == 0 || view_is_packed(&view);
    const unsigned long long address = (unsigned long long)(uintptr_t)array->data;
    PyObject *shape = NULL, *strides = NULL, *typestr = NULL, *data = NULL, *stream = NULL;
    PyObject *dict = NULL;
    /* One after the other: with an error that is set already, an attribute is not found. */
    if ((shape = tuple_of_sizes(view.ndim, view.shape)) != NULL &&
        (strides = packed ? Py_NewRef(Py_None) : tuple_of_sizes(view.ndim, view.strides)) != NULL &&
        (typestr = PyObject_GetAttrString((PyObject *)array->descr, "str")) != NULL &&
        (data = Py_BuildValue("(KO)", address, array->read_only ? Py_True : Py_False)) != NULL &&
        (stream = PyLong_FromSize_t((size_t)stream_handle(view.stream))) != NULL)
        dict = Py_BuildValue("{sOsOsOsOsOsi}", "shape", shape, "typestr", typestr, "data", data,
                             "strides", strides, "stream", stream, "version", 3);
    if (dict != NULL && add_fields(dict, array->descr) < 0) Py_CLEAR(dict);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(typestr);
    Py_XDECREF(data);
    Py_XDECREF(stream);
    return dict;
}
