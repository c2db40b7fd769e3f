/* DeviceArray: its memory, its views, its way to the host. */
#include "core.h"

/* Sizes. */

/* Unsigned, so that strides which nobody will follow may wrap around. */
static int64_t product(int64_t one, int64_t other)
{
    return (int64_t)((uint64_t)one * (uint64_t)other);
}

static int64_t items_of(int ndim, const int64_t *shape)
{
    int64_t items = 1;
    for (int i = 0; i < ndim; i++) items = product(items, shape[i]);
    return items;
}

int read_shape(PyObject *object, int *count, int64_t *sizes)
{
    PyObject *items = NULL;
    int result = -1;
    if (PyIndex_Check(object) && !PyArray_Check(object))
        items = PyTuple_Pack(1, object);
    else if (PySequence_Check(object))
        items = PySequence_Tuple(object);
    else
        PyErr_Format(PyExc_TypeError, "expected a sequence of integers or a single integer, got %R",
                     object);
    if (items == NULL) goto done;
    Py_ssize_t found = PyTuple_Size(items);
    if (found > GPUOPS_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "an array has %d dimensions at most, not %zd",
                     GPUOPS_MAX_DIMS, found);
        goto done;
    }
    for (Py_ssize_t i = 0; i < found; i++) {
        sizes[i] = PyNumber_AsSsize_t(PyTuple_GetItem(items, i), PyExc_ValueError);
        if (sizes[i] == -1 && PyErr_Occurred()) goto done;
    }
    *count = (int)found;
    result = 0;

done:
    Py_XDECREF(items);
    return result;
}

/* The object. */

static DeviceArray *array_of(PyObject *object)
{
    return (DeviceArray *)object;
}

static int device_of(const DeviceArray *array)
{
    return stream_device(memory_stream(array->memory));
}

PyObject *array_new(State *state, Memory *memory, char *data, PyArray_Descr *descr, int ndim,
                    const int64_t *shape, const int64_t *strides, int read_only)
{
    DeviceArray *array = PyObject_NewVar(DeviceArray, state->array_type, 2 * ndim);
    if (array == NULL) {
        release_memory(memory);
        return NULL;
    }
    int64_t bytes = PyDataType_ELSIZE(descr);
    int64_t step = bytes;
    for (int i = ndim - 1; i >= 0; i--) {
        array->sizes[i] = shape[i];
        array->sizes[ndim + i] = strides == NULL ? step : strides[i];
        if (shape[i] != 0) step = product(step, shape[i]);
        bytes = product(bytes, shape[i]);
    }
    array->memory = memory;
    array->data = bytes == 0 ? NULL : data;
    array->descr = (PyArray_Descr *)Py_NewRef((PyObject *)descr);
    array->weak_references = NULL;
    array->read_only = read_only;
    array->ndim = ndim;
    return (PyObject *)array;
}

static Status do_keep(void *memory)
{
    return memory_keep(memory);
}

PyObject *array_of_operand(State *state, const Operand *operand)
{
    const View *view = &operand->view;
    Status status = without_gil(do_keep, operand->memory);
    if (status != STATUS_OK) return raise_status(state, status, operand->op, view->device);
    return array_new(state, memory_hold(operand->memory), view->data, operand->descr, view->ndim,
                     view->shape, view->strides, operand->read_only);
}

/* Another array on the same memory. */
static PyObject *view_of(PyObject *self, char *data, int ndim, const int64_t *shape,
                         const int64_t *strides)
{
    const DeviceArray *array = array_of(self);
    return array_new(state_of(Py_TYPE(self)), memory_hold(array->memory), data, array->descr, ndim,
                     shape, strides, array->read_only);
}

static void array_dealloc(PyObject *self)
{
    DeviceArray *array = array_of(self);
    PyTypeObject *type = Py_TYPE(self);
    CLEAR_WEAK_REFERENCES(self, array->weak_references);
    release_memory(array->memory);
    Py_DECREF((PyObject *)array->descr);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

void array_view(const DeviceArray *array, View *view)
{
    fill_dtype(array->descr, view);
    view->data = array->data;
    view->stream = memory_stream(array->memory);
    view->device = stream_device(view->stream);
    view->memory = array->memory;
    view->ndim = array->ndim;
    for (int i = 0; i < array->ndim; i++) {
        view->shape[i] = array_shape(array)[i];
        view->strides[i] = array_strides(array)[i];
    }
}

/* Work without the GIL. */

typedef struct AllocationWork {
    Stream *stream;
    int64_t bytes;
    Memory *memory;
} AllocationWork;

static Status do_allocate(void *context)
{
    AllocationWork *work = context;
    return memory_allocate(work->stream, work->bytes, &work->memory);
}

static Status do_release(void *memory)
{
    memory_release(memory);
    return STATUS_OK;
}

typedef struct CopyWork {
    const View *target, *source;
    const void *item;
    Stream *stream;
    Watch *watch;
} CopyWork;

static Status do_copy(void *context)
{
    CopyWork *work = context;
    return copy_view(work->target, work->source, work->stream, work->watch);
}

static Status do_fill(void *context)
{
    CopyWork *work = context;
    return fill_view_with(work->target, work->item, work->stream);
}

Memory *allocate_memory(State *state, Stream *stream, int64_t bytes, const char *op)
{
    AllocationWork work = {stream, bytes, NULL};
    Status status = without_gil(do_allocate, &work);
    if (status == STATUS_OK) return work.memory;
    return raise_status(state, status, op, stream_device(stream));
}

void release_memory(Memory *memory)
{
    /* Most memory goes to the store of its stream, for which the GIL is not worth releasing. */
    if (!memory_try_release(memory)) (void)without_gil(do_release, memory);
}

int copy_elements(State *state, const View *target, const View *source, Stream *stream,
                  const char *op)
{
    Progress progress;
    CopyWork work = {
        .target = target, .source = source, .stream = stream, .watch = &progress.watch};
    progress_init(&progress, op);
    Status status = progress_run(&progress, do_copy, &work);
    if (status == STATUS_OK) return 0;
    raise_status(state, status, op, stream_device(stream));
    return -1;
}

PyObject *array_try_empty(State *state, Stream *stream, PyArray_Descr *descr, int ndim,
                          const int64_t *shape, Status *status)
{
    AllocationWork work = {stream, 0, NULL};
    int64_t bytes = PyDataType_ELSIZE(descr);
    bool empty = bytes == 0, too_big = false;
    *status = STATUS_OK;
    for (int i = 0; i < ndim; i++) {
        empty |= shape[i] == 0;
        if (shape[i] != 0) too_big |= __builtin_mul_overflow(bytes, shape[i], &bytes);
    }
    if (too_big) {
        PyErr_SetString(PyExc_ValueError, "array is too big; its bytes do not fit into 63 bits");
        return NULL;
    }
    work.bytes = empty ? 0 : bytes;
    *status = without_gil(do_allocate, &work);
    if (*status != STATUS_OK) return NULL;
    return array_new(state, work.memory, memory_data(work.memory), descr, ndim, shape, NULL, false);
}

PyObject *array_empty(State *state, Stream *stream, PyArray_Descr *descr, int ndim,
                      const int64_t *shape, const char *op)
{
    Status status;
    PyObject *result = array_try_empty(state, stream, descr, ndim, shape, &status);
    if (status != STATUS_OK) raise_status(state, status, op, stream_device(stream));
    return result;
}

PyObject *array_copy_of(State *state, const View *source, PyArray_Descr *descr, Stream *stream,
                        const char *op)
{
    PyObject *result = array_empty(state, stream, descr, source->ndim, source->shape, op);
    if (result == NULL) return NULL;
    View target;
    array_view(array_of(result), &target);
    if (copy_elements(state, &target, source, stream, op) < 0) Py_CLEAR(result);
    return result;
}

int array_fill_with(State *state, DeviceArray *array, PyObject *value, Stream *stream,
                    const char *op)
{
    Py_INCREF((PyObject *)array->descr); /* which the next call takes away */
    PyArrayObject *item = (PyArrayObject *)PyArray_Zeros(0, NULL, array->descr, 0);
    int result = item == NULL || (value != NULL && PyArray_CopyObject(item, value) < 0) ? -1 : 0;
    if (result == 0 && array->data != NULL) {
        View target;
        array_view(array, &target);
        CopyWork work = {.target = &target, .item = PyArray_DATA(item), .stream = stream};
        Status status = without_gil(do_fill, &work);
        if (status != STATUS_OK) {
            raise_status(state, status, op, stream_device(stream));
            result = -1;
        }
    }
    release(item);
    return result;
}

/* Attributes. */

static PyObject *get_shape(PyObject *self, void *unused)
{
    (void)unused;
    return tuple_of_sizes(array_of(self)->ndim, array_shape(array_of(self)));
}

static PyObject *get_strides(PyObject *self, void *unused)
{
    (void)unused;
    return tuple_of_sizes(array_of(self)->ndim, array_strides(array_of(self)));
}

static PyObject *get_dtype(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef((PyObject *)array_of(self)->descr);
}

static PyObject *get_ndim(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(array_of(self)->ndim);
}

static int64_t size_of(const DeviceArray *array)
{
    return items_of(array->ndim, array_shape(array));
}

static PyObject *get_size(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(size_of(array_of(self)));
}

static PyObject *get_itemsize(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(PyDataType_ELSIZE(array_of(self)->descr));
}

static PyObject *get_nbytes(PyObject *self, void *unused)
{
    (void)unused;
    const DeviceArray *array = array_of(self);
    return PyLong_FromLongLong(product(size_of(array), PyDataType_ELSIZE(array->descr)));
}

static PyObject *get_device(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(device_of(array_of(self)));
}

static PyObject *get_stream(PyObject *self, void *unused)
{
    (void)unused;
    return stream_object(state_of(Py_TYPE(self)), memory_stream(array_of(self)->memory));
}

static PyObject *get_ptr(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(array_of(self)->data);
}

static PyGetSetDef array_attributes[] = {
    {"shape", get_shape, NULL, "The length of each axis, a tuple of ints.", NULL},
    {"dtype", get_dtype, NULL, "The dtype of the elements, a numpy.dtype.", NULL},
    {"ndim", get_ndim, NULL, "The number of axes.", NULL},
    {"size", get_size, NULL, "The number of elements.", NULL},
    {"itemsize", get_itemsize, NULL, "The bytes of one element.", NULL},
    {"nbytes", get_nbytes, NULL, "The bytes of all elements.", NULL},
    {"strides", get_strides, NULL,
     "The bytes from one element to the next along each axis, a tuple of ints.", NULL},
    {"device", get_device, NULL, "The ordinal of the GPU that the elements are on, an int.", NULL},
    {"stream", get_stream, NULL,
     "The home stream, a Stream: the one in whose order the memory was taken and will be freed.\n\n"
     "Work on any other stream waits for it, and it waits for that work.",
     NULL},
    {"ptr", get_ptr, NULL,
     "The address of the first element in the memory of the GPU, an int; 0 if there is none.",
     NULL},
    {"__cuda_array_interface__", array_cuda_interface, NULL,
     "The array in version 3 of the protocol by which Numba, CuPy and others take it as it is.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Views. */

static Py_ssize_t array_length(PyObject *self)
{
    if (array_of(self)->ndim > 0) return (Py_ssize_t)array_shape(array_of(self))[0];
    PyErr_SetString(PyExc_TypeError, "len() of unsized object: the DeviceArray has no axes");
    return -1;
}

static PyObject *whole_view(PyObject *self)
{
    const DeviceArray *array = array_of(self);
    return view_of(self, array->data, array->ndim, array_shape(array), array_strides(array));
}

static PyObject *view_of_item(PyObject *self, PyObject *key)
{
    const DeviceArray *array = array_of(self);
    const int64_t size = array_shape(array)[0];
    const Py_ssize_t given = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (given == -1 && PyErr_Occurred()) return NULL;
    const int64_t position = given < 0 ? given + size : given;
    if (position < 0 || position >= size)
        return PyErr_Format(PyExc_IndexError, "index %zd is out of bounds for axis 0 with size %zd",
                            given, (Py_ssize_t)size);
    char *data = array->data == NULL ? NULL : array->data + position * array_strides(array)[0];
    return view_of(self, data, array->ndim - 1, array_shape(array) + 1, array_strides(array) + 1);
}

static PyObject *view_of_slice(PyObject *self, PyObject *key)
{
    const DeviceArray *array = array_of(self);
    int64_t shape[GPUOPS_MAX_DIMS], strides[GPUOPS_MAX_DIMS];
    Py_ssize_t start, stop, step;
    if (PySlice_Unpack(key, &start, &stop, &step) < 0) return NULL;
    for (int i = 0; i < array->ndim; i++) {
        shape[i] = array_shape(array)[i];
        strides[i] = array_strides(array)[i];
    }
    shape[0] = PySlice_AdjustIndices((Py_ssize_t)shape[0], &start, &stop, step);
    char *data = array->data == NULL || shape[0] == 0 ? NULL : array->data + start * strides[0];
    strides[0] = product(strides[0], step);
    return view_of(self, data, array->ndim, shape, strides);
}

static PyObject *array_subscript(PyObject *self, PyObject *key)
{
    const bool is_slice = PySlice_Check(key);
    const bool is_integer = PyIndex_Check(key) && !PyBool_Check(key) &&
                            Py_TYPE(key) != Py_TYPE(self) &&
                            !(PyArray_Check(key) && PyArray_NDIM((PyArrayObject *)key) > 0);
    if (key == Py_Ellipsis || (PyTuple_Check(key) && PyTuple_Size(key) == 0))
        return whole_view(self);
    if ((is_integer || is_slice) && array_of(self)->ndim == 0)
        return PyErr_Format(PyExc_IndexError,
                            "too many indices: this DeviceArray is 0-dimensional, and has no axis "
                            "to index");
    if (is_integer) return view_of_item(self, key);
    if (is_slice) return view_of_slice(self, key);
    if (PyTuple_Check(key))
        PyErr_SetString(PyExc_IndexError,
                        "a DeviceArray is indexed along its first axis: write d[i][j] instead of "
                        "d[i, j], or d.reshape(...)");
    else if (key == Py_None)
        PyErr_SetString(PyExc_IndexError, "a DeviceArray has no newaxis: use d.reshape(...)");
    else if (PyUnicode_Check(key))
        PyErr_SetString(PyExc_IndexError,
                        "the fields of a DeviceArray have no views: use d.to_host()[...]");
    else
        PyErr_Format(PyExc_TypeError,
                     "a DeviceArray is indexed by an integer or a slice, not by %R: use "
                     "gpuops.gather(d, indices) for an array of indices",
                     Py_TYPE(key));
    return NULL;
}

static int refuse_assignment(PyObject *self, PyObject *key, PyObject *value)
{
    (void)self;
    (void)key;
    PyErr_SetString(PyExc_TypeError,
                    value == NULL
                        ? "a DeviceArray does not support item deletion"
                        : "a DeviceArray does not support item assignment: use d[i].fill(value), "
                          "or out= of an operator");
    return -1;
}

/* Finds out the one size that is given as -1, and whether the others fit. */
static int complete_shape(const DeviceArray *array, int ndim, int64_t *shape)
{
    const int64_t size = size_of(array);
    int64_t known = 1;
    int unknown = -1;
    bool fits = true;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == -1 && unknown >= 0) {
            PyErr_SetString(PyExc_ValueError, "can only specify one unknown dimension");
            return -1;
        }
        if (shape[i] == -1)
            unknown = i;
        else
            fits &= shape[i] >= 0 && !__builtin_mul_overflow(known, shape[i], &known);
    }
    if (unknown >= 0)
        fits &= known != 0 && size % known == 0;
    else
        fits &= known == size;
    if (fits) {
        if (unknown >= 0) shape[unknown] = size / known;
        return 0;
    }
    PyObject *wanted = tuple_of_sizes(ndim, shape);
    if (wanted != NULL)
        PyErr_Format(PyExc_ValueError, "cannot reshape array of size %zd into shape %S",
                     (Py_ssize_t)size, wanted);
    Py_XDECREF(wanted);
    return -1;
}

/* Axes that can be walked as one make a run. From the last axis on, each axis of the new shape
 * takes its part of a run; whether there is such a view depends on none having to take parts of
 * two. */
static bool strides_of_shape(const DeviceArray *array, int ndim, const int64_t *shape,
                             int64_t *strides)
{
    int64_t counts[GPUOPS_MAX_DIMS + 1], steps[GPUOPS_MAX_DIMS + 1];
    int run = 0; /* the first is what an array of one element has */
    counts[0] = 1;
    steps[0] = PyDataType_ELSIZE(array->descr);
    for (int i = 0; i < array->ndim; i++) {
        const int64_t size = array_shape(array)[i], stride = array_strides(array)[i];
        if (size == 1) continue;
        if (counts[run] != 1 && steps[run] == product(size, stride))
            counts[run] *= size;
        else
            counts[counts[run] == 1 ? run : ++run] = size;
        steps[run] = stride;
    }
    for (int i = ndim - 1; i >= 0; i--) {
        if (counts[run] == 1 && run > 0 && shape[i] != 1) run--;
        if (counts[run] % shape[i] != 0) return false;
        strides[i] = steps[run];
        counts[run] /= shape[i];
        steps[run] = product(steps[run], shape[i]);
    }
    return true;
}

static PyObject *array_reshape(PyObject *self, PyObject *args)
{
    const DeviceArray *array = array_of(self);
    int64_t shape[GPUOPS_MAX_DIMS], strides[GPUOPS_MAX_DIMS];
    int ndim;
    if (PyTuple_Size(args) == 0)
        return PyErr_Format(PyExc_TypeError, "reshape() takes a shape, for example reshape(-1)");
    PyObject *only = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : args;
    if (read_shape(only, &ndim, shape) < 0 || complete_shape(array, ndim, shape) < 0) return NULL;
    if (size_of(array) == 0) return view_of(self, NULL, ndim, shape, NULL);
    if (strides_of_shape(array, ndim, shape, strides))
        return view_of(self, array->data, ndim, shape, strides);
    PyErr_SetString(PyExc_ValueError,
                    "this shape is no view of the array, whose elements do not lie close enough "
                    "together: use d.copy().reshape(...)");
    return NULL;
}

/* To the host. */

/* By default on the current stream of the thread, or else on the array's own. */
static Stream *read_stream_of(State *state, const DeviceArray *array, PyObject *object)
{
    if (object == Py_None && thread_stream(device_of(array)) == NULL)
        return stream_hold(memory_stream(array->memory));
    return read_stream(state, object, device_of(array));
}

static PyObject *array_to_host(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"out", "stream", NULL};
    State *state = state_of(Py_TYPE(self));
    const DeviceArray *array = array_of(self);
    PyObject *out = Py_None, *stream_argument = Py_None, *result = NULL;
    Operand target = {.name = "out", .view.device = DEVICE_CPU};
    const Operand like = {.descr = array->descr};
    Stream *stream = NULL;
    View source;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|OO:to_host", names, &out, &stream_argument))
        return NULL;
    array_view(array, &source);
    target.array =
        out == Py_None ? host_array_new(&source, array->descr, NULL) : as_output(out, "out");
    if (target.array == NULL || complete_operand(&target) < 0) goto done;
    if (out != Py_None && check_output("to_host", &target, &source, &like, false) < 0) goto done;
    stream = read_stream_of(state, array, stream_argument);
    if (stream == NULL) goto done;
    target.view.item_bytes = source.item_bytes;
    if (copy_elements(state, &target.view, &source, stream, "to_host") < 0) goto done;
    result = Py_NewRef(out == Py_None ? (PyObject *)target.array : out);

done:
    if (stream != NULL) release_stream(stream);
    operand_clear(&target);
    return result;
}

/* The first and last elements along each long axis, as a host array without what is between them.
 *
 * They go through memory of a stream of their own: repr must not be the one to whom an IndexError
 * is raised that was left on the array's stream, for then nobody else would hear of it. */
static PyObject *array_edges(PyObject *self, PyObject *count_object)
{
    State *state = state_of(Py_TYPE(self));
    const DeviceArray *array = array_of(self);
    int axes = 0;
    PyArrayObject *host = NULL;
    PyObject *edges = NULL, *result = NULL;
    View whole, shown, source, middle, target;

    const Py_ssize_t count = PyNumber_AsSsize_t(count_object, NULL);
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (count < 0) return PyErr_Format(PyExc_ValueError, "count must not be negative");
    /* An axis of which only the edges are wanted is two: which edge, and where on it. */
    array_view(array, &whole);
    view_copy(&shown, &whole);
    view_copy(&source, &whole);
    for (int i = 0; i < whole.ndim; i++) {
        const bool is_long = whole.shape[i] / 2 >= count && whole.shape[i] != 2 * count;
        if (axes + is_long >= GPUOPS_MAX_DIMS)
            return PyErr_Format(PyExc_ValueError, "too many axes to show");
        if (is_long) {
            source.shape[axes] = 2;
            source.strides[axes++] = product(whole.shape[i] - count, whole.strides[i]);
        }
        shown.shape[i] = is_long ? 2 * count : whole.shape[i];
        source.shape[axes] = is_long ? count : whole.shape[i];
        source.strides[axes++] = whole.strides[i];
    }
    source.ndim = axes;

    Stream *stream = new_stream(state, device_of(array), true, 0, "repr");
    if (stream == NULL) return NULL;
    edges = array_copy_of(state, &source, array->descr, stream, "repr");
    host = edges == NULL ? NULL : host_array_new(&shown, array->descr, NULL);
    if (host == NULL || fill_view(host, "out", &target) < 0) goto done;
    target.item_bytes = source.item_bytes;
    target.ndim = axes;
    for (int i = 0; i < axes; i++) target.shape[i] = source.shape[i];
    view_pack(&target);
    array_view(array_of(edges), &middle);
    if (copy_elements(state, &target, &middle, stream, "repr") < 0) goto done;
    result = Py_NewRef((PyObject *)host);

done:
    release(host);
    Py_XDECREF(edges);
    release_stream(stream);
    return result;
}

/* Calls a function of the package's module _repr, which is imported when it is first needed. The
 * package goes by the name under which it was imported. */
static PyObject *call_repr(PyObject *self, const char *function)
{
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    PyObject *names = module == NULL ? NULL : Py_BuildValue("(s)", function);
    PyObject *found = NULL, *text = NULL;
    if (names != NULL)
        found = PyImport_ImportModuleLevel("_repr", PyModule_GetDict(module), NULL, names, 1);
    if (found != NULL) text = PyObject_CallMethod(found, function, "O", self);
    Py_XDECREF(names);
    Py_XDECREF(found);
    return text;
}

static PyObject *array_repr(PyObject *self)
{
    return call_repr(self, "array_repr");
}

static PyObject *array_repr_html(PyObject *self, PyObject *unused)
{
    (void)unused;
    return call_repr(self, "array_repr_html");
}

/* On a device. */

static PyObject *array_copy(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"stream", NULL};
    State *state = state_of(Py_TYPE(self));
    const DeviceArray *array = array_of(self);
    PyObject *stream_argument = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:copy", names, &stream_argument))
        return NULL;
    Stream *stream = read_stream(state, stream_argument, device_of(array));
    if (stream == NULL) return NULL;
    View source;
    array_view(array, &source);
    PyObject *result = array_copy_of(state, &source, array->descr, stream, "copy");
    release_stream(stream);
    return result;
}

static PyObject *array_plain_copy(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyObject_CallMethod(self, "copy", NULL);
}

static PyObject *array_fill(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"value", "stream", NULL};
    State *state = state_of(Py_TYPE(self));
    DeviceArray *array = array_of(self);
    PyObject *value, *stream_argument = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|O:fill", names, &value, &stream_argument))
        return NULL;
    if (array->read_only)
        return PyErr_Format(PyExc_ValueError, "the DeviceArray is read-only%s: fill a copy() of it",
                            why_read_only(array->read_only));
    Stream *stream = read_stream(state, stream_argument, device_of(array));
    if (stream == NULL) return NULL;
    int result = array_fill_with(state, array, value, stream, "fill");
    release_stream(stream);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *array_reduce(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    PyObject *function = module == NULL ? NULL : PyObject_GetAttrString(module, "to_device");
    PyObject *host = function == NULL ? NULL : PyObject_CallMethod(self, "to_host", NULL);
    PyObject *result = host == NULL ? NULL : Py_BuildValue("(O(O))", function, host);
    Py_XDECREF(function);
    Py_XDECREF(host);
    return result;
}

static PyObject *array_deep_copy(PyObject *self, PyObject *memo)
{
    (void)memo;
    PyObject *call = array_reduce(self, NULL);
    PyObject *where =
        call == NULL ? NULL : Py_BuildValue("{s:i}", "device", device_of(array_of(self)));
    PyObject *result =
        where == NULL ? NULL
                      : PyObject_Call(PyTuple_GetItem(call, 0), PyTuple_GetItem(call, 1), where);
    Py_XDECREF(call);
    Py_XDECREF(where);
    return result;
}

/* Refusals. */

static PyObject *refuse_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)type;
    (void)args;
    (void)keywords;
    PyErr_SetString(PyExc_TypeError,
                    "a DeviceArray is made by gpuops.to_device(x), empty(shape), zeros(shape) or "
                    "from_dlpack(x)");
    return NULL;
}

static PyObject *refuse_conversion(PyObject *self)
{
    (void)self;
    PyErr_SetString(PyExc_TypeError,
                    "a DeviceArray is not converted to a value or an array of the host by itself: "
                    "use its method to_host()");
    return NULL;
}

static int refuse_bool(PyObject *self)
{
    refuse_conversion(self);
    return -1;
}

static PyObject *refuse_array(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)args;
    (void)keywords;
    return refuse_conversion(self);
}

static PyObject *refuse_iteration(PyObject *self)
{
    (void)self;
    PyErr_SetString(PyExc_TypeError,
                    "iterating over a DeviceArray would fetch it element by element: use to_host() "
                    "to have it all, or gpuops.gather for some of it");
    return NULL;
}

static PyObject *refuse_reversed(PyObject *self, PyObject *unused)
{
    (void)unused;
    return refuse_iteration(self);
}

static int refuse_contains(PyObject *self, PyObject *value)
{
    (void)value;
    refuse_iteration(self);
    return -1;
}

static PyMethodDef array_type_methods[] = {
    {"to_host", (PyCFunction)(void (*)(void))array_to_host, METH_VARARGS | METH_KEYWORDS,
     "to_host($self, out=None, stream=None)\n--\n\n"
     "Copy the array to host memory, and wait until it is there.\n\n"
     "A signal whose handler raises, such as Ctrl-C, ends the wait for work that comes before the\n"
     "copy.\n\n"
     "Parameters\n----------\n"
     "out : ndarray, optional\n"
     "    Array to write to, of the same shape and dtype and of any strides.\n"
     "stream : object with ``__cuda_stream__``, optional\n"
     "    The CUDA stream that orders the copy. By default that of ``with stream:``, else the\n"
     "    home stream of the array.\n\n"
     "Returns\n-------\nndarray\n    A new array in C order, or `out`.\n\n"
     "Raises\n------\nIndexError\n"
     "    If an operator on the stream or the home stream met an index outside its axis, in mode\n"
     "    'raise', and that was not raised yet. Of several such calls on a stream since somebody\n"
     "    last waited for it, the first is told of, and no other.\n"
     "TypeError\n    If `out` is no array, or of another dtype.\n"
     "ValueError\n    If `out` is read-only or of another shape.\n"
     "DeviceError\n    If the copy, or work before it, has failed.\n"},
    {"reshape", array_reshape, METH_VARARGS,
     "reshape($self, *shape)\n--\n\n"
     "A view of the same elements in another shape.\n\n"
     "Parameters\n----------\n"
     "*shape : ints, or one tuple of ints\n    One of them may be -1: what remains.\n\n"
     "Returns\n-------\nDeviceArray\n    It shares the memory, and keeps it alive.\n\n"
     "Raises\n------\nValueError\n"
     "    If the shape has another size, or needs a copy because the elements are strided.\n"},
    {"copy", (PyCFunction)(void (*)(void))array_copy, METH_VARARGS | METH_KEYWORDS,
     "copy($self, stream=None)\n--\n\n"
     "A new array in C order on the same GPU; the call does not wait for it.\n\n"
     "Parameters\n----------\n"
     "stream : object with ``__cuda_stream__``, optional\n"
     "    The CUDA stream that orders the copy, and the home stream of the new array. By default\n"
     "    the current stream of the thread.\n\n"
     "Returns\n-------\nDeviceArray\n\n"
     "Raises\n------\nMemoryError\n    If there is no memory for it.\n"},
    {"fill", (PyCFunction)(void (*)(void))array_fill, METH_VARARGS | METH_KEYWORDS,
     "fill($self, value, stream=None)\n--\n\n"
     "Set every element to one value; the call does not wait for it.\n\n"
     "Parameters\n----------\n"
     "value : scalar\n    Cast to the dtype as in ``ndarray[...] = value``.\n"
     "stream : object with ``__cuda_stream__``, optional\n"
     "    The CUDA stream that orders the work. By default the current stream of the thread.\n\n"
     "Raises\n------\nOverflowError\n    If `value` is an integer that the dtype cannot hold.\n"
     "ValueError\n    If the array is read-only, or `value` no scalar.\n"},
    {"__dlpack__", (PyCFunction)(void (*)(void))array_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
     "The array in a DLPack capsule, for the library that is to use it without a copy.\n\n"
     "Parameters\n----------\n"
     "stream : int, optional\n"
     "    The handle of the stream on which it will be used: 1 for the legacy default stream,\n"
     "    which None stands for, 2 for the per-thread one, -1 for no order at all.\n"
     "max_version : tuple of int, optional\n"
     "    The newest DLPack that the caller reads; without it the capsule is of the old kind.\n"
     "dl_device : tuple of int, optional\n"
     "    Where the array is wanted: its own device, or (1, 0) for a copy in host memory.\n"
     "copy : bool, optional\n    True: a copy in any case; False: none.\n\n"
     "Returns\n-------\ncapsule\n"
     "    Whoever takes the array out of it calls its deleter once, from any thread, when all use\n"
     "    of the memory is done, or comes before what the home stream `stream` of the array is\n"
     "    given next. What a default stream or one of gpuops, given as `stream`, has been given\n"
     "    to do by then need not be done.\n\n"
     "Raises\n------\nBufferError\n    If the array cannot be given in that way.\n"},
    {"__dlpack_device__", array_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self)\n--\n\n"
     "The device as DLPack writes it: (2, ordinal)."},
    {"__array__", (PyCFunction)(void (*)(void))refuse_array, METH_VARARGS | METH_KEYWORDS,
     "__array__($self, dtype=None, copy=None)\n--\n\n"
     "Raises TypeError: `to_host` is the way to an ndarray."},
    {"__reversed__", refuse_reversed, METH_NOARGS,
     "__reversed__($self)\n--\n\nRaises TypeError, as iteration does."},
    {"__copy__", array_plain_copy, METH_NOARGS, "__copy__($self)\n--\n\nThe same as `copy`."},
    {"__deepcopy__", array_deep_copy, METH_O,
     "__deepcopy__($self, memo, /)\n--\n\n"
     "Through the host, as pickle, and back to the array's own GPU; `copy` stays there."},
    {"__reduce__", array_reduce, METH_NOARGS,
     "__reduce__($self)\n--\n\n"
     "For pickle: the elements go through the host, and to the default GPU when they are read."},
    {"_edges", array_edges, METH_O,
     "_edges($self, count, /)\n--\n\n"
     "An ndarray of the first and last `count` elements along each axis that has more."},
    {"_repr_html_", array_repr_html, METH_NOARGS,
     "_repr_html_($self)\n--\n\nThe array as notebooks show it."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef array_type_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(DeviceArray, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot array_type_slots[] = {
    {Py_tp_doc,
     "An array in the memory of a GPU: made by `to_device`, `empty`, `zeros`, `asarray`,\n"
     "`from_dlpack`, and by operators on such arrays.\n\n"
     "It is as long-lived as the longest-lived of its views. Operators on it enqueue their work\n"
     "and return; `to_host` waits. Libraries that speak DLPack or ``__cuda_array_interface__``\n"
     "take it without a copy. Comparison is by identity. ``copy.copy`` copies on the GPU,\n"
     "as `copy` does; pickle and ``copy.deepcopy`` go through the host.\n\n"
     "``d[i]`` and ``d[a:b:c]`` are views along the first axis, ``d[...]`` is one of the whole\n"
     "array. Nothing fetches it unless told to: NumPy functions, iteration and truth value raise\n"
     "TypeError.\n\n"
     "Attributes\n----------\n"
     "shape : tuple of int\n    The length of each axis.\n"
     "dtype : numpy.dtype\n    Any dtype of fixed size.\n"
     "ndim, size, itemsize, nbytes : int\n"
     "    The number of axes and of elements, the bytes of one and of all elements.\n"
     "strides : tuple of int\n    The bytes from one element to the next along each axis.\n"
     "device : int\n    The ordinal of the GPU.\n"
     "stream : Stream\n    The home stream.\n"
     "ptr : int\n    The address of the first element; 0 if there is none.\n\n"
     "See Also\n--------\ngather : Elements at given positions, for arrays of indices.\n"},
    {Py_tp_new, refuse_new},
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_repr, array_repr},
    {Py_tp_iter, refuse_iteration},
    {Py_tp_methods, array_type_methods},
    {Py_tp_getset, array_attributes},
    {Py_tp_members, array_type_members},
    {Py_mp_length, array_length},
    {Py_mp_subscript, array_subscript},
    {Py_mp_ass_subscript, refuse_assignment},
    {Py_sq_contains, refuse_contains},
    {Py_nb_bool, refuse_bool},
    {Py_nb_int, refuse_conversion},
    {Py_nb_float, refuse_conversion},
    {Py_nb_index, refuse_conversion},
    {0, NULL},
};

static PyType_Spec array_spec = {
    .name = "gpuops.DeviceArray",
    .basicsize = offsetof(DeviceArray, sizes),
    .itemsize = sizeof(int64_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = array_type_slots,
};

int add_array_type(PyObject *module, State *state)
{
    state->array_type = add_type(module, &array_spec);
    return state->array_type == NULL ? -1 : 0;
}
