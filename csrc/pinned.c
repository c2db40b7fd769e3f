/* Page-locked NumPy arrays: pin, pinned_empty, and an allocator for NumPy (NEP 49). */
#include "core.h"

/* pin(x). */

typedef struct PinObject {
    PyObject_HEAD
    Pin *pin;             /* owned; NULL once it is released */
    PyArrayObject *array; /* held as long as there is a pin: over the memory of x */
    PyObject *weak_references;
} PinObject;

typedef struct PinWork {
    const View *view;
    bool writable;
    int device;
    Pin *pin;
} PinWork;

static Status do_pin(void *context)
{
    PinWork *work = context;
    return pin_create(work->device, work->view, work->writable, &work->pin);
}

static Status do_unpin(void *pin)
{
    pin_destroy(pin);
    return STATUS_OK;
}

/* An array over the memory of x, and no copy. */
static PyArrayObject *array_to_pin(PyObject *x)
{
    if (PyArray_Check(x) || (PyObject_CheckBuffer(x) && !PyArray_CheckScalar(x)))
        return as_array(x, "x");
    PyErr_Format(PyExc_TypeError,
                 "x must be a NumPy array, or an object with a buffer on the host, for pin() to "
                 "lock its memory; it is %R",
                 Py_TYPE(x));
    return NULL;
}

static PyObject *pin_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", NULL};
    State *state = state_of(type);
    PyObject *x;
    View view;
    PinWork work = {.view = &view};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:pin", names, &x)) return NULL;
    PyArrayObject *array = array_to_pin(x);
    if (array == NULL) return NULL;
    PinObject *self = NULL;
    if (fill_view(array, "x", &view) < 0) goto done;
    if (read_ordinal(state, Py_None, "pin", &work.device) < 0) goto done;
    self = PyObject_New(PinObject, type);
    if (self == NULL) goto done;
    self->pin = NULL;
    self->array = NULL;
    self->weak_references = NULL;
    work.writable = PyArray_ISWRITEABLE(array);
    Status status = without_gil(do_pin, &work);
    if (status == STATUS_OK) {
        self->pin = work.pin;
        self->array = hold(array);
    } else {
        Py_CLEAR(self);
        raise_status(state, status, "pin", work.device);
    }

done:
    release(array);
    return (PyObject *)self;
}

static void unpin(PinObject *self)
{
    Pin *pin;
    PyArrayObject *array;
    BEGIN_ALONE(self);
    pin = self->pin;
    array = self->array;
    STORE_SHARED(self->pin, NULL);
    self->array = NULL;
    END_ALONE();
    if (pin != NULL) (void)without_gil(do_unpin, pin);
    release(array);
}

static void pin_dealloc(PyObject *self)
{
    PinObject *object = (PinObject *)self;
    PyTypeObject *type = Py_TYPE(self);
    CLEAR_WEAK_REFERENCES(self, object->weak_references);
    unpin(object);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *pin_release(PyObject *self, PyObject *unused)
{
    (void)unused;
    unpin((PinObject *)self);
    Py_RETURN_NONE;
}

static PyObject *pin_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (LOAD_SHARED(((PinObject *)self)->pin) != NULL) return Py_NewRef(self);
    PyErr_SetString(PyExc_ValueError, "the memory was released: pin(x) locks it once more");
    return NULL;
}

static PyObject *pin_get_locked(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(LOAD_SHARED(((PinObject *)self)->pin) != NULL);
}

static PyObject *pin_repr(PyObject *self)
{
    PyObject *array; /* which may be released meanwhile */
    BEGIN_ALONE(self);
    array = Py_XNewRef((PyObject *)((PinObject *)self)->array);
    END_ALONE();
    if (array == NULL) return PyUnicode_FromString("<gpuops.pin, released>");
    PyObject *shape = PyObject_GetAttrString(array, "shape");
    PyObject *text = shape == NULL
                         ? NULL
                         : PyUnicode_FromFormat("<gpuops.pin of shape %R, dtype %S>", shape,
                                                (PyObject *)PyArray_DESCR((PyArrayObject *)array));
    Py_XDECREF(shape);
    Py_DECREF(array);
    return text;
}

static PyMethodDef pin_methods[] = {
    {"release", pin_release, METH_NOARGS,
     "release($self)\n--\n\n"
     "Unlock the memory, unless somebody else has pinned it too; once is enough.\n\n"
     "What gpuops copies meanwhile in other threads is finished first."},
    {"__enter__", pin_enter, METH_NOARGS, "__enter__($self)\n--\n\nThe pin itself."},
    {"__exit__", pin_release, METH_VARARGS,
     "__exit__($self, *exception)\n--\n\nThe same as `release`."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pin_attributes[] = {
    {"locked", pin_get_locked, NULL, "Whether it was not released yet.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef pin_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(PinObject, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pin_slots[] = {
    {Py_tp_doc,
     "pin(x, /)\n--\n\n"
     "Page-lock the memory of an array, so that copies between it and a GPU take the direct "
     "way.\n\n"
     "It stays locked until `release` is called, the ``with`` block ends, or the pin is gone, "
     "which\n"
     "keeps `x` alive so long. To lock memory takes longer than to copy it once; it is for arrays\n"
     "that are copied often. Memory may be pinned more than once, also in part, and is unlocked\n"
     "with the last pin. What is page-locked already, such as what `pinned_empty` makes, is left\n"
     "as it is.\n\n"
     "Parameters\n----------\n"
     "x : ndarray or buffer\n"
     "    An array on the host, of any strides: all bytes from its first to its last one are\n"
     "    locked. It may be read-only.\n\n"
     "Attributes\n----------\n"
     "locked : bool\n    Whether it was not released yet.\n\n"
     "Raises\n------\n"
     "TypeError\n    If `x` is no array on the host, is a masked array, or its elements are "
     "Python\n"
     "    objects or of foreign byte order.\n"
     "ValueError\n    If somebody else has locked a part of the memory.\n"
     "MemoryError\n    If the system has no more memory to lock.\n"
     "DeviceError\n    If there is no GPU, or this memory cannot be locked.\n\n"
     "See Also\n--------\n"
     "pinned_empty : A new array in page-locked memory.\n"
     "pinned_memory : A block in which NumPy makes all arrays in such memory.\n\n"
     "Examples\n--------\n"
     ">>> import gpuops\n"
     ">>> import numpy as np\n"
     ">>> x = np.arange(6.0)\n"
     ">>> if gpuops.is_available():\n"
     "...     with gpuops.pin(x):\n"
     "...         x = gpuops.to_device(x).to_host()\n"
     ">>> x\n"
     "array([0., 1., 2., 3., 4., 5.])\n"},
    {Py_tp_new, pin_new},
    {Py_tp_dealloc, pin_dealloc},
    {Py_tp_repr, pin_repr},
    {Py_tp_methods, pin_methods},
    {Py_tp_getset, pin_attributes},
    {Py_tp_members, pin_members},
    {0, NULL},
};

static PyType_Spec pin_spec = {
    .name = "gpuops.pin",
    .basicsize = sizeof(PinObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pin_slots,
};

int add_pin_type(PyObject *module, State *state)
{
    state->pin_type = add_type(module, &pin_spec);
    return state->pin_type == NULL ? -1 : 0;
}

/* Memory of the pool. */

typedef struct BlockWork {
    int device;
    int64_t bytes;
    void *block;
} BlockWork;

static Status do_allocate(void *context)
{
    BlockWork *work = context;
    return pinned_allocate(work->device, work->bytes, &work->block);
}

static Status do_free(void *block)
{
    pinned_free(block);
    return STATUS_OK;
}

static void free_block(void *block)
{
    if (!pinned_try_free(block)) (void)without_gil(do_free, block);
}

/* pinned_empty. */

static const char *const BLOCK_NAME = "gpuops.page_locked_memory";

static void free_owner(PyObject *capsule)
{
    free_block(PyCapsule_GetPointer(capsule, BLOCK_NAME));
}

static PyObject *pinned_empty(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"shape", "dtype", "order", NULL};
    State *state = PyModule_GetState(module);
    PyObject *shape, *dtype = NULL, *owner = NULL;
    const char *order = "C";
    BlockWork work = {.block = NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|O$s:pinned_empty", names, &shape, &dtype,
                                     &order))
        return NULL;
    if (strcmp(order, "C") != 0 && strcmp(order, "F") != 0)
        return PyErr_Format(PyExc_ValueError, "order must be 'C' or 'F', not '%s'", order);
    PyArrayObject *layout = read_layout(shape, dtype), *array = NULL;
    if (layout == NULL) return NULL;
    if (read_ordinal(state, Py_None, "pinned_empty", &work.device) < 0) goto done;
    work.bytes = PyArray_NBYTES(layout);
    Status status = without_gil(do_allocate, &work);
    if (status != STATUS_OK) {
        raise_status(state, status, "pinned_empty", work.device);
        goto done;
    }
    owner = PyCapsule_New(work.block, BLOCK_NAME, free_owner);
    if (owner == NULL) {
        free_block(work.block);
        goto done;
    }
    PyArray_Descr *descr = PyArray_DESCR(layout);
    Py_INCREF((PyObject *)descr); /* the function below takes a reference away */
    array = (PyArrayObject *)PyArray_NewFromDescr(
        &PyArray_Type, descr, PyArray_NDIM(layout), PyArray_DIMS(layout), NULL, work.block,
        *order == 'F' ? NPY_ARRAY_FARRAY : NPY_ARRAY_CARRAY, NULL);
    /* This one too, also where it fails. */
    if (array != NULL && PyArray_SetBaseObject(array, Py_NewRef(owner)) < 0) {
        release(array);
        array = NULL;
    }

done:
    Py_XDECREF(owner);
    release(layout);
    return (PyObject *)array;
}

/* The allocator. NumPy calls it with the GIL most of the time, but does not promise to; the pool is
 * asked without it where CUDA may be called. An array keeps the capsule of the allocator that made
 * it, and what that says of the memory holds wherever and whenever it is freed. */

static void *allocate(void *handler_context, size_t bytes)
{
    if (bytes > INT64_MAX) return NULL;
    void *block = pinned_take((int64_t)bytes);
    if (block != NULL) return block;
    BlockWork work = {.device = *(int *)handler_context, .bytes = (int64_t)bytes};
    const PyGILState_STATE gil = PyGILState_Ensure();
    const Status status = without_gil(do_allocate, &work);
    PyGILState_Release(gil);
    return status == STATUS_OK ? work.block : NULL;
}

static void *allocate_zeros(void *handler_context, size_t count, size_t item_bytes)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, item_bytes, &bytes)) return NULL;
    void *block = allocate(handler_context, bytes);
    return block == NULL ? NULL : memset(block, 0, bytes);
}

static void give_back(void *handler_context, void *block, size_t bytes)
{
    (void)handler_context;
    (void)bytes;
    if (block == NULL || pinned_try_free(block)) return;
    const PyGILState_STATE gil = PyGILState_Ensure();
    (void)without_gil(do_free, block);
    PyGILState_Release(gil);
}

static void *reallocate(void *handler_context, void *block, size_t bytes)
{
    if (block == NULL) return allocate(handler_context, bytes);
    const size_t room = (size_t)pinned_bytes(block);
    if (bytes <= room && bytes >= room / 2) return block;
    void *moved = allocate(handler_context, bytes);
    if (moved == NULL) return NULL;
    memcpy(moved, block, bytes < room ? bytes : room);
    give_back(handler_context, block, room);
    return moved;
}

typedef struct Handler {
    PyDataMem_Handler handler;
    int device; /* on which it locks memory: the handler's context */
} Handler;

static const char *const HANDLER_NAME = "mem_handler"; /* as NumPy wants it */

static void free_handler(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, HANDLER_NAME));
}

static PyObject *new_handler(int device)
{
    Handler *handler = calloc(1, sizeof *handler);
    if (handler == NULL) return PyErr_NoMemory();
    handler->device = device;
    handler->handler = (PyDataMem_Handler){
        .name = "gpuops.pinned_memory",
        .version = 1,
        .allocator = {&handler->device, allocate, allocate_zeros, reallocate, give_back},
    };
    PyObject *capsule = PyCapsule_New(handler, HANDLER_NAME, free_handler);
    if (capsule == NULL) free(handler);
    return capsule;
}

static PyObject *enter_pinned_memory(PyObject *module, PyObject *unused)
{
    (void)unused;
    State *state = PyModule_GetState(module);
    int device;
    if (read_ordinal(state, Py_None, "pinned_memory", &device) < 0) return NULL;
    PyObject *handler = new_handler(device);
    PyObject *previous = handler == NULL ? NULL : PyDataMem_SetHandler(handler);
    Py_XDECREF(handler);
    return previous;
}

static PyObject *leave_pinned_memory(PyObject *module, PyObject *previous)
{
    (void)module;
    if (!PyCapsule_IsValid(previous, HANDLER_NAME))
        return PyErr_Format(PyExc_TypeError, "not an allocator of NumPy: %R", previous);
    return PyDataMem_SetHandler(previous);
}

PyMethodDef pinned_methods[] = {
    {"pinned_empty", (PyCFunction)(void (*)(void))pinned_empty, METH_VARARGS | METH_KEYWORDS,
     "pinned_empty($module, shape, dtype='float64', *, order='C')\n--\n\n"
     "A new NumPy array in page-locked memory, whose elements are whatever was there before.\n\n"
     "Copies between it and a GPU take the direct way. The memory comes from a pool, to which it\n"
     "goes back with the last view of it; `empty_cache` gives back what the pool holds for arrays\n"
     "to come.\n\n"
     "Parameters\n----------\n"
     "shape : int or tuple of ints\n    The length of each axis.\n"
     "dtype : dtype_like\n    Any dtype of fixed size.\n"
     "order : {'C', 'F'}\n    Whether the last axis is contiguous, or the first.\n\n"
     "Returns\n-------\nndarray\n\n"
     "Raises\n------\n"
     "TypeError\n    If the elements would be Python objects or of foreign byte order.\n"
     "ValueError\n    If the shape is negative or too big.\n"
     "MemoryError\n    If the system has no more memory to lock.\n"
     "DeviceError\n    If there is no GPU.\n\n"
     "See Also\n--------\npin : Locks memory that there is already.\n\n"
     "Examples\n--------\n"
     ">>> import gpuops\n"
     ">>> import numpy as np\n"
     ">>> make = gpuops.pinned_empty if gpuops.is_available() else np.empty\n"
     ">>> x = make((2, 3), np.float32)\n"
     ">>> x[...] = 7\n"
     ">>> gpuops.gather(x, 1)\n"
     "array([7., 7., 7.], dtype=float32)\n"},
    {"_enter_pinned_memory", enter_pinned_memory, METH_NOARGS,
     "_enter_pinned_memory($module)\n--\n\n"
     "Make NumPy allocate page-locked memory, and return what it allocated with before."},
    {"_leave_pinned_memory", leave_pinned_memory, METH_O,
     "_leave_pinned_memory($module, previous, /)\n--\n\n"
     "Make NumPy allocate as before, and return what it allocated with."},
    {NULL, NULL, 0, NULL},
};
