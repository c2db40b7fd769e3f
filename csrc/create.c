/* The functions that make a DeviceArray, and those that ask about the memory they use. */
#include "core.h"

/* The stream that a new array will be at home on, which also says its device. Where neither device=
 * nor stream= names one, it is the given default, or that of calls without arrays (-1). */
static Stream *read_place(State *state, PyObject *device, PyObject *stream, int default_device,
                          const char *op)
{
    int ordinal = default_device;
    if (device == Py_None && stream != Py_None) return any_stream(state, stream, default_device);
    if ((device != Py_None || ordinal < 0) && read_ordinal(state, device, op, &ordinal) < 0)
        return NULL;
    return read_stream(state, stream, ordinal);
}

/* Data on the host, of the dtype that is wanted, if any. NumPy knows best how to make numbers of
 * what is no array yet; an array is taken as it is first, so that what makes it special is seen. */
static int cast_source(Operand *operand, PyArray_Descr *wanted)
{
    PyObject *x = operand->object;
    const bool is_array = PyArray_Check(x) || PyObject_CheckBuffer(x);
    if (operand->array == NULL && wanted != NULL && !is_array) {
        Py_INCREF((PyObject *)wanted); /* this, and the function below, takes a reference away */
        operand->array =
            (PyArrayObject *)PyArray_FromAny(x, wanted, 0, 0, NPY_ARRAY_FORCECAST, NULL);
    } else if (operand->array == NULL) {
        operand->array = as_array(x, operand->name);
    } else if (require_descr(operand) < 0) { /* it is another library's */
        return -1;
    }
    if (operand->array == NULL || wanted == NULL) return operand->array == NULL ? -1 : 0;
    PyArrayObject *array = operand->array;
    Py_INCREF((PyObject *)wanted);
    operand->array = (PyArrayObject *)PyArray_FromArray(array, wanted, NPY_ARRAY_FORCECAST);
    release(array);
    Py_XDECREF((PyObject *)operand->descr);
    operand->descr = NULL;
    return operand->array == NULL ? -1 : 0;
}

/* What x is: its view is complete but for what has to be imported yet. */
static int read_source(State *state, PyObject *object, const char *op, PyArray_Descr *wanted,
                       Operand *operand)
{
    if (read_array_operand(state, object, op, "x", USE_READ, operand) < 0) return -1;
    if (is_on_device(operand)) return 0;
    return cast_source(operand, wanted) < 0 ? -1 : complete_operand(operand);
}

/* Brings in what was left to do, in the order of a stream, which may be of another device. What is
 * only borrowed for the length of a call can be made to last. */
static int complete_source(State *state, Operand *operand, Stream *stream, bool to_last)
{
    int result = 0;
    if (operand->pending || (to_last && operand->memory == NULL)) {
        const int device = operand->view.device;
        Stream *there =
            stream_device(stream) == device ? stream_hold(stream) : current_stream(state, device);
        result = there == NULL ? -1 : operand->import(state, operand, there);
        if (there != NULL) release_stream(there);
    }
    return result < 0 ? -1 : require_descr(operand);
}

/* A new array with the elements of x. */
static PyObject *copy_source(State *state, Operand *operand, PyObject *device, PyObject *stream)
{
    Stream *place = read_place(state, device, stream,
                               is_on_device(operand) ? operand->view.device : -1, operand->op);
    PyObject *result = NULL;
    if (place != NULL && complete_source(state, operand, place, false) == 0)
        result = array_copy_of(state, &operand->view, operand->descr, place, operand->op);
    if (place != NULL) release_stream(place);
    return result;
}

static PyObject *to_device(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", "device", "stream", NULL};
    State *state = PyModule_GetState(module);
    PyObject *x, *device = Py_None, *stream = Py_None, *result = NULL;
    Operand operand = {.object = NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$OO:to_device", names, &x, &device,
                                     &stream))
        return NULL;
    if (read_source(state, x, "to_device", NULL, &operand) == 0)
        result = copy_source(state, &operand, device, stream);
    operand_clear(&operand);
    return result;
}

PyArrayObject *read_layout(PyObject *shape_object, PyObject *dtype)
{
    static char nothing[1];
    int64_t sizes[GPUOPS_MAX_DIMS];
    npy_intp shape[GPUOPS_MAX_DIMS];
    int ndim;
    PyArray_Descr *descr = NULL;
    if (read_shape(shape_object, &ndim, sizes) < 0) return NULL;
    for (int i = 0; i < ndim; i++) shape[i] = (npy_intp)sizes[i];
    if (dtype != NULL) {
        if (!PyArray_DescrConverter(dtype, &descr)) return NULL;
    } else {
        descr = PyArray_DescrFromType(NPY_DOUBLE);
    }
    PyArrayObject *layout = (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape,
                                                                  NULL, nothing, 0, NULL);
    if (layout != NULL && check_dtype(PyArray_DESCR(layout), NULL) < 0) {
        release(layout);
        return NULL;
    }
    return layout;
}

static PyObject *make_array(PyObject *module, PyObject *args, PyObject *keywords,
                            const char *format, bool zeros, const char *op)
{
    static char *names[] = {"shape", "dtype", "device", "stream", NULL};
    State *state = PyModule_GetState(module);
    PyObject *shape_object, *dtype = NULL, *device = Py_None, *stream = Py_None, *result = NULL;
    PyArrayObject *layout = NULL;
    Stream *place = NULL;
    int64_t shape[GPUOPS_MAX_DIMS];

    if (!PyArg_ParseTupleAndKeywords(args, keywords, format, names, &shape_object, &dtype, &device,
                                     &stream))
        return NULL;
    layout = read_layout(shape_object, dtype);
    if (layout == NULL) goto done;
    for (int i = 0; i < PyArray_NDIM(layout); i++) shape[i] = PyArray_DIM(layout, i);
    place = read_place(state, device, stream, -1, op);
    if (place == NULL) goto done;
    result = array_empty(state, place, PyArray_DESCR(layout), PyArray_NDIM(layout), shape, op);
    if (result != NULL && zeros &&
        array_fill_with(state, (DeviceArray *)result, NULL, place, op) < 0)
        Py_CLEAR(result);

done:
    if (place != NULL) release_stream(place);
    release(layout);
    return result;
}

static PyObject *make_empty(PyObject *module, PyObject *args, PyObject *keywords)
{
    return make_array(module, args, keywords, "O|O$OO:empty", false, "empty");
}

static PyObject *make_zeros(PyObject *module, PyObject *args, PyObject *keywords)
{
    return make_array(module, args, keywords, "O|O$OO:zeros", true, "zeros");
}

/* A DeviceArray on the memory of x, which is on a device. */
static PyObject *wrap_source(State *state, Operand *operand, PyObject *stream_argument)
{
    Stream *stream = read_stream(state, stream_argument, operand->view.device);
    PyObject *result = NULL;
    if (stream == NULL) return NULL;
    if (complete_source(state, operand, stream, true) == 0)
        result = array_of_operand(state, operand);
    release_stream(stream);
    return result;
}

static PyObject *asarray(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", "dtype", "device", "stream", "copy", NULL};
    State *state = PyModule_GetState(module);
    PyObject *x, *dtype = Py_None, *device = Py_None, *stream = Py_None, *copy_argument = Py_None;
    PyObject *result = NULL;
    PyArray_Descr *descr = NULL;
    Stream *place = NULL;
    int copy;
    Operand operand = {.object = NULL};

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$OOOO:asarray", names, &x, &dtype, &device,
                                     &stream, &copy_argument) ||
        read_copy(copy_argument, &copy) < 0)
        return NULL;
    if (dtype != Py_None && !PyArray_DescrConverter(dtype, &descr)) return NULL;
    if (read_source(state, x, "asarray", descr, &operand) < 0) goto done;

    bool stays = false;
    if (is_on_device(&operand)) {
        int ordinal = operand.view.device;
        if (device != Py_None && read_ordinal(state, device, "asarray", &ordinal) < 0) goto done;
        stays = ordinal == operand.view.device;
    }
    if (copy == 0 && !stays) {
        PyErr_SetString(PyExc_ValueError, is_on_device(&operand)
                                              ? "x is on another GPU, which takes a copy: leave "
                                                "copy=None"
                                              : "x is in host memory, which takes a copy: leave "
                                                "copy=None, or use to_device(x)");
        goto done;
    }
    if (!stays || copy == 1)
        result = copy_source(state, &operand, device, stream);
    else if (Py_TYPE(x) != state->array_type)
        result = wrap_source(state, &operand, stream);
    else if ((place = read_stream(state, stream, operand.view.device)) != NULL)
        result = Py_NewRef(x);
    if (result != NULL && descr != NULL && !PyArray_EquivTypes(operand.descr, descr)) {
        PyErr_Format(PyExc_TypeError,
                     "x has dtype %S, and arrays on a GPU are not cast: use "
                     "gpuops.to_device(gpuops.asarray(x).to_host().astype('%S'))",
                     operand.descr, descr);
        Py_CLEAR(result);
    }

done:
    if (place != NULL) release_stream(place);
    operand_clear(&operand);
    Py_XDECREF((PyObject *)descr);
    return result;
}

/* A device as DLPack writes it stands for its ordinal; NULL with an exception. */
static PyObject *ordinal_of_pair(PyObject *device)
{
    long long type, ordinal;
    if (!PyTuple_Check(device)) return device;
    if (read_pair(device, "device", &type, &ordinal) < 0) return NULL;
    if (type == DL_CUDA) return PyTuple_GetItem(device, 1);
    return PyErr_Format(PyExc_ValueError,
                        "device is %R, and a DeviceArray is on a GPU: (2, ordinal) in DLPack",
                        device);
}

static PyObject *from_dlpack(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", "device", "copy", "stream", NULL};
    State *state = PyModule_GetState(module);
    PyObject *x, *device = Py_None, *copy_argument = Py_None, *stream = Py_None, *result = NULL;
    int copy, ordinal;
    Operand operand = {.object = NULL};

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$OOO:from_dlpack", names, &x, &device,
                                     &copy_argument, &stream) ||
        read_copy(copy_argument, &copy) < 0 || (device = ordinal_of_pair(device)) == NULL)
        return NULL;
    const int exports = has_dlpack(Py_TYPE(x));
    if (exports < 0) return NULL;
    if (!exports)
        return PyErr_Format(PyExc_TypeError,
                            "from_dlpack() takes an array with __dlpack__ and __dlpack_device__, "
                            "not %R: asarray() takes anything that is like an array",
                            Py_TYPE(x));
    if (read_source(state, x, "from_dlpack", NULL, &operand) < 0) goto done;
    if (!is_on_device(&operand) && (device == Py_None || copy == 0)) {
        PyErr_Format(PyExc_BufferError,
                     "x is on the host, and a DeviceArray on a GPU: %s copies it there",
                     copy == 0 ? "from_dlpack(x, device=...) without copy=False"
                               : "to_device(x), or from_dlpack(x, device=\"cuda\"),");
        goto done;
    }
    if (is_on_device(&operand) && device != Py_None) {
        if (read_ordinal(state, device, "from_dlpack", &ordinal) < 0) goto done;
        if (ordinal != operand.view.device) {
            PyErr_Format(PyExc_BufferError,
                         "x is on cuda:%d, and from_dlpack() does not copy between devices: bring "
                         "it to cuda:%d with its own library",
                         operand.view.device, ordinal);
            goto done;
        }
    }
    result = is_on_device(&operand) && copy != 1 ? wrap_source(state, &operand, stream)
                                                 : copy_source(state, &operand, device, stream);

done:
    operand_clear(&operand);
    return result;
}

/* Memory. */

typedef struct MemoryWork {
    int device;
    int64_t bytes;
    MemoryInfo info;
} MemoryWork;

static Status do_memory_info(void *context)
{
    MemoryWork *work = context;
    return memory_info(work->device, &work->info);
}

/* Page-locked buffers become memory of the host. */
static Status do_empty_cache(void *context)
{
    const Status status = memory_empty_cache(((MemoryWork *)context)->device);
    host_flush();
    return status;
}

static Status do_flush_host(void *unused)
{
    (void)unused;
    host_flush();
    return STATUS_OK;
}

static Status do_set_limit(void *context)
{
    MemoryWork *work = context;
    Status status = memory_info(work->device, &work->info);
    return status == STATUS_OK ? memory_set_limit(work->device, work->bytes) : status;
}

/* What memory_info returns; Python's own named tuples have all that one expects of them. */
int add_memory_info_type(PyObject *module)
{
    PyObject *collections = PyImport_ImportModule("collections");
    PyObject *type = NULL, *name = NULL, *doc = NULL;
    int result = -1;
    if (collections != NULL)
        type = PyObject_CallMethod(collections, "namedtuple", "ss", "MemoryInfo",
                                   "used reserved free total peak limit");
    name = PyUnicode_FromString("gpuops");
    doc = PyUnicode_FromString(
        "What `memory_info` tells about the memory of a GPU, in bytes.\n\n"
        "Attributes\n----------\n"
        "used : int\n    What the arrays of gpuops take.\n"
        "reserved : int\n    What gpuops keeps of the GPU, for these arrays and for those to "
        "come.\n"
        "free, total : int\n    What is free on the GPU, for all processes, and what it has.\n"
        "peak : int\n    The most that was used.\n"
        "limit : int or None\n    What `memory_limit` set.\n");
    if (type != NULL && name != NULL && doc != NULL &&
        PyObject_SetAttrString(type, "__module__", name) == 0 &&
        PyObject_SetAttrString(type, "__doc__", doc) == 0)
        result = PyModule_AddObjectRef(module, "MemoryInfo", type);
    Py_XDECREF(collections);
    Py_XDECREF(type);
    Py_XDECREF(name);
    Py_XDECREF(doc);
    return result;
}

static PyObject *get_memory_info(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", NULL};
    State *state = PyModule_GetState(module);
    PyObject *device = Py_None;
    MemoryWork work = {.bytes = 0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:memory_info", names, &device)) return NULL;
    if (read_ordinal(state, device, "memory_info", &work.device) < 0) return NULL;
    Status status = without_gil(do_memory_info, &work);
    if (status != STATUS_OK) return raise_status(state, status, "memory_info", work.device);
    PyObject *type = PyObject_GetAttrString(module, "MemoryInfo");
    if (type == NULL) return NULL;
    const MemoryInfo *info = &work.info;
    PyObject *limit =
        info->limit < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong((long long)info->limit);
    PyObject *result =
        limit == NULL ? NULL
                      : PyObject_CallFunction(type, "LLLLLO", (long long)info->used,
                                              (long long)info->reserved, (long long)info->available,
                                              (long long)info->total, (long long)info->peak, limit);
    Py_XDECREF(limit);
    Py_DECREF(type);
    return result;
}

static PyObject *empty_cache(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", NULL};
    State *state = PyModule_GetState(module);
    PyObject *device = Py_None;
    MemoryWork work = {.bytes = 0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:empty_cache", names, &device)) return NULL;
    int count;
    if (device == Py_None && without_gil(count_devices, &count) == STATUS_DEVICE_ERROR) {
        (void)without_gil(do_flush_host, NULL);
        Py_RETURN_NONE;
    }
    if (read_ordinal(state, device, "empty_cache", &work.device) < 0) return NULL;
    Status status = without_gil(do_empty_cache, &work);
    if (status != STATUS_OK) return raise_status(state, status, "empty_cache", work.device);
    Py_RETURN_NONE;
}

static PyObject *set_memory_limit(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"bytes", "device", NULL};
    State *state = PyModule_GetState(module);
    PyObject *bytes, *device = Py_None;
    MemoryWork work = {.bytes = -1};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$O:memory_limit", names, &bytes, &device))
        return NULL;
    if (bytes != Py_None) {
        work.bytes = PyNumber_AsSsize_t(bytes, PyExc_ValueError);
        if (work.bytes == -1 && PyErr_Occurred()) return NULL;
        if (work.bytes < 0)
            return PyErr_Format(PyExc_ValueError,
                                "bytes must be None, for no limit, or from 0 on, not %R", bytes);
    }
    if (read_ordinal(state, device, "memory_limit", &work.device) < 0) return NULL;
    Status status = without_gil(do_set_limit, &work);
    if (status != STATUS_OK) return raise_status(state, status, "memory_limit", work.device);
    if (work.info.limit < 0) Py_RETURN_NONE;
    return PyLong_FromLongLong(work.info.limit);
}

#define DEVICE_DOC                                                                                 \
    "device : optional\n"                                                                          \
    "    The GPU: 'cuda' for the current one, 'cuda:N', or an ordinal. By default what\n"          \
    "    `gpuops.device` or GPUOPS_DEVICE says, else the current one.\n"

#define NEW_STREAM_DOC                                                                             \
    "stream : object with ``__cuda_stream__``, optional\n"                                         \
    "    The CUDA stream that orders the work, and the home stream of the new array. By default\n" \
    "    the current stream of the thread. A stream also says the device.\n\n"

#define PLACE_ERRORS_DOC                                                                           \
    "MemoryError\n    If there is no memory for it; the text has the numbers.\n"                   \
    "DeviceError\n    If there is no such GPU.\n"

PyMethodDef create_methods[] = {
    {"to_device", (PyCFunction)(void (*)(void))to_device, METH_VARARGS | METH_KEYWORDS,
     "to_device($module, x, /, *, device=None, stream=None)\n--\n\n"
     "Copy an array to a GPU.\n\n"
     "Parameters\n----------\n"
     "x : array_like or array on a GPU\n"
     "    Anything that NumPy makes an array of, in a dtype of fixed size; a `DeviceArray`; an\n"
     "    array of another library, on any GPU.\n"
     "device : optional\n"
     "    The GPU: 'cuda' for the current one, 'cuda:N', or an ordinal. By default the one that\n"
     "    `x` is on; for host arrays what `gpuops.device` or GPUOPS_DEVICE says, else the\n"
     "    current one.\n" NEW_STREAM_DOC "Returns\n-------\nDeviceArray\n"
     "    A new array in C order, of the shape and dtype of `x`. Host data are there, or kept,\n"
     "    when the call returns. That is after what is queued for page-locked arrays, for short\n"
     "    ones with gaps, and where the 32 MiB of buffers are full. A signal whose handler "
     "raises,\n"
     "    such as Ctrl-C, ends that wait, but not for page-locked arrays of less than 64 KiB.\n\n"
     "Raises\n------\n"
     "TypeError\n    If the elements of `x` are Python objects or of foreign byte order.\n"
     "ValueError\n    If `device` names no GPU, or `stream` belongs to "
     "another.\n" PLACE_ERRORS_DOC},
    {"empty", (PyCFunction)(void (*)(void))make_empty, METH_VARARGS | METH_KEYWORDS,
     "empty($module, shape, dtype='float64', *, device=None, stream=None)\n--\n\n"
     "A new array on a GPU, whose elements are whatever was there before.\n\n"
     "Parameters\n----------\n"
     "shape : int or tuple of ints\n    The length of each axis.\n"
     "dtype : dtype_like\n    Any dtype of fixed size.\n" DEVICE_DOC NEW_STREAM_DOC
     "Returns\n-------\nDeviceArray\n    In C order.\n\n"
     "Raises\n------\n"
     "TypeError\n    If the elements would be Python objects or of foreign byte order.\n"
     "ValueError\n    If the shape is negative or too big, or `device` names no "
     "GPU.\n" PLACE_ERRORS_DOC},
    {"zeros", (PyCFunction)(void (*)(void))make_zeros, METH_VARARGS | METH_KEYWORDS,
     "zeros($module, shape, dtype='float64', *, device=None, stream=None)\n--\n\n"
     "A new array of zeros on a GPU.\n\n"
     "Parameters\n----------\n"
     "shape : int or tuple of ints\n    The length of each axis.\n"
     "dtype : dtype_like\n    Any dtype of fixed size.\n" DEVICE_DOC NEW_STREAM_DOC
     "Returns\n-------\nDeviceArray\n    In C order.\n\n"
     "Raises\n------\n"
     "TypeError\n    If the elements would be Python objects or of foreign byte order.\n"
     "ValueError\n    If the shape is negative or too big, or `device` names no "
     "GPU.\n" PLACE_ERRORS_DOC},
    {"asarray", (PyCFunction)(void (*)(void))asarray, METH_VARARGS | METH_KEYWORDS,
     "asarray($module, x, /, *, dtype=None, device=None, stream=None, copy=None)\n--\n\n"
     "Make a `DeviceArray` of anything, with a copy only where there has to be one.\n\n"
     "Parameters\n----------\n"
     "x : array_like or array on a GPU\n"
     "    A `DeviceArray` is returned as it is; an array of another library on a GPU shares its\n"
     "    memory; all else is copied to a GPU.\n"
     "dtype : dtype_like, optional\n"
     "    The dtype that is wanted. NumPy casts data on the host to it.\n"
     "device : optional\n    As in `to_device`.\n"
     "stream : object with ``__cuda_stream__``, optional\n"
     "    The CUDA stream that orders the work. By default the current stream of the thread.\n"
     "copy : bool, optional\n    True: a copy in any case; False: none.\n\n"
     "Returns\n-------\nDeviceArray\n\n"
     "Raises\n------\n"
     "TypeError\n    If `x` is on a GPU and of another dtype; else as in `to_device`.\n"
     "ValueError\n    If `copy` is False and there has to be one; else as in "
     "`to_device`.\n" PLACE_ERRORS_DOC},
    {"from_dlpack", (PyCFunction)(void (*)(void))from_dlpack, METH_VARARGS | METH_KEYWORDS,
     "from_dlpack($module, x, /, *, device=None, copy=None, stream=None)\n--\n\n"
     "Make a DeviceArray over the memory of another library's array on a GPU.\n\n"
     "The two share their elements: what is written through one is seen through the other. The\n"
     "memory lives for as long as either does.\n\n"
     "Parameters\n----------\n"
     "x : object with ``__dlpack__`` and ``__dlpack_device__``\n"
     "    An array of PyTorch, CuPy, JAX, or any library that speaks DLPack.\n"
     "device : optional\n"
     "    The GPU on which the result is to be, see `gpuops.device`, or as DLPack writes it:\n"
     "    (2, ordinal). Data on the host are copied there; without it they are refused.\n"
     "copy : bool, optional\n"
     "    True copies in any case, and False never. None, the default, copies data from the host.\n"
     "stream : Stream or object with ``__cuda_stream__``, optional\n"
     "    The stream that is to use the array first; by default the current one of this thread.\n\n"
     "Returns\n-------\nDeviceArray\n\n"
     "Raises\n------\nBufferError\n"
     "    If `x` cannot be shared: it is on the host or on another device, or what it says about\n"
     "    itself cannot be.\n"
     "TypeError\n    If `x` does not speak DLPack.\n"
     "DeviceError\n    If there is no GPU.\n"},
    {"memory_info", (PyCFunction)(void (*)(void))get_memory_info, METH_VARARGS | METH_KEYWORDS,
     "memory_info($module, device=None)\n--\n\n"
     "The memory of a GPU, and what gpuops has of it.\n\n"
     "Parameters\n----------\n" DEVICE_DOC "\n"
     "Returns\n-------\nMemoryInfo\n"
     "    A named tuple in bytes: `used` by arrays, `reserved` by gpuops for these and for arrays\n"
     "    to come, `free` and `total` of the GPU, `peak` of `used`, and `limit` or None.\n\n"
     "Raises\n------\nDeviceError\n    If there is no such GPU.\n"
     "ValueError\n    If `device` names no GPU.\n"},
    {"empty_cache", (PyCFunction)(void (*)(void))empty_cache, METH_VARARGS | METH_KEYWORDS,
     "empty_cache($module, device=None)\n--\n\n"
     "Give back the memory of a GPU that no array uses; waits for the GPU.\n\n"
     "The page-locked buffers of large copies and of small calls are given back as well, and the\n"
     "memory of the host that is kept for results to come. Without a GPU, that is all there is to\n"
     "give back.\n\n"
     "Parameters\n----------\n" DEVICE_DOC "\n"
     "Raises\n------\nDeviceError\n    If there is no such GPU, and `device` was given.\n"
     "ValueError\n    If `device` names no GPU.\n"},
    {"memory_limit", (PyCFunction)(void (*)(void))set_memory_limit, METH_VARARGS | METH_KEYWORDS,
     "memory_limit($module, bytes, *, device=None)\n--\n\n"
     "Set how much memory of a GPU the arrays of this process may use.\n\n"
     "Parameters\n----------\n"
     "bytes : int or None\n    None lifts the limit.\n" DEVICE_DOC "\n"
     "Returns\n-------\nint or None\n    The limit before.\n\n"
     "Raises\n------\nDeviceError\n    If there is no such GPU.\n"
     "ValueError\n    If `bytes` is negative, or `device` names no GPU.\n"},
    {NULL, NULL, 0, NULL},
};
