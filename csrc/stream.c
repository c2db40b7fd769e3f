/* Stream and Event, and which stream a call is meant to work on. */
#include "core.h"

typedef struct StreamObject {
    PyObject_HEAD
    Stream *stream; /* held */
    PyObject *weak_references;
} StreamObject;

typedef struct EventObject {
    PyObject_HEAD
    Event *event; /* owned */
    PyObject *weak_references;
} EventObject;

/* What `with stream:` has entered on this thread, innermost first. The entries belong to the thread
 * and not to the Stream, so that one Stream may be entered by several threads, and more than once.
 */
typedef struct Entered {
    Stream *stream; /* held */
    struct Entered *outer;
} Entered;

static _Thread_local Entered *innermost;

/* A device has its own current stream, so entering one of another device leaves it in force. */
Stream *thread_stream(int device)
{
    for (const Entered *entered = innermost; entered != NULL; entered = entered->outer)
        if (stream_device(entered->stream) == device) return entered->stream;
    return NULL;
}

static Stream *owned_stream(State *state, int device, uintptr_t handle, Owner owner, const char *op)
{
    Stream *stream;
    Status status = stream_of_handle(device, handle, owner, &stream);
    return status == STATUS_OK ? stream : raise_status(state, status, op, device);
}

Stream *borrowed_stream(State *state, int device, uintptr_t handle, const char *op)
{
    return owned_stream(state, device, handle, (Owner){NULL, NULL}, op);
}

Stream *current_stream(State *state, int device)
{
    Stream *stream = thread_stream(device);
    if (stream != NULL) return stream_hold(stream);
    return borrowed_stream(state, device, 0, "current_stream");
}

PyObject *stream_object(State *state, Stream *stream)
{
    StreamObject *object = PyObject_New(StreamObject, state->stream_type);
    if (object == NULL) return NULL;
    object->stream = stream_hold(stream);
    object->weak_references = NULL;
    return (PyObject *)object;
}

/* Takes over the reference to the record. */
static PyObject *wrap(State *state, Stream *stream)
{
    if (stream == NULL) return NULL;
    PyObject *object = stream_object(state, stream);
    release_stream(stream);
    return object;
}

static void *refuse_stream(PyObject *object)
{
    return PyErr_Format(PyExc_TypeError,
                        "stream must be %san object with __cuda_stream__, such as a stream of "
                        "CuPy, torch or cuda.core, not %R",
                        object == Py_None ? "" : "None or ", object);
}

/* Anything with __cuda_stream__, the protocol of cuda.core: a pair of version and handle. */
static int read_handle(PyObject *object, uintptr_t *handle)
{
    const int has = has_attribute(object, "__cuda_stream__");
    if (has <= 0) {
        if (has == 0) refuse_stream(object);
        return -1;
    }
    PyObject *pair = PyObject_CallMethod(object, "__cuda_stream__", NULL);
    if (pair == NULL) return -1;
    int version;
    unsigned long long number;
    int parsed = PyTuple_Check(pair) ? PyArg_ParseTuple(pair, "iK", &version, &number) : 0;
    if (!parsed || version != 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "__cuda_stream__ must return (0, handle), two integers, and it returned %R",
                     pair);
        Py_DECREF(pair);
        return -1;
    }
    Py_DECREF(pair);
    *handle = (uintptr_t)number;
    return 0;
}

/* The device of another library's stream, as an attribute of most libraries' streams says it:
 * torch's device_index, CuPy's device_id, the device of cuda.core. */
static int device_of_foreign(PyObject *object, int by_default)
{
    static const char *const NAMES[] = {"device_index", "device_id", "device"};
    int device = -1;
    for (int i = 0; i < 3 && device < 0; i++) {
        PyObject *value = PyObject_GetAttrString(object, NAMES[i]);
        const long number = value != NULL && PyLong_Check(value) ? PyLong_AsLong(value) : -1;
        if (number >= 0 && number <= INT_MAX)
            device = (int)number;
        else if (value != NULL && i == 2 && !PyLong_Check(value))
            device = device_of_foreign(value, -1);
        Py_XDECREF(value);
        PyErr_Clear();
    }
    return device < 0 ? by_default : device;
}

typedef struct FindWork {
    uintptr_t handle;
    int device;
} FindWork;

static Status do_find_device(void *context)
{
    FindWork *work = context;
    return stream_find_device(work->handle, &work->device);
}

/* The record of another library's stream, which keeps that library's object alive. CUDA knows the
 * device of a stream, but does not tell while it is captured: then the object is asked. Default
 * streams, which every device has behind the same handles, are of the given one, or where that is
 * -1, of the one on which new arrays are made. */
static Stream *foreign_stream(State *state, PyObject *object, int device)
{
    FindWork work = {.device = -1};
    if (read_handle(object, &work.handle) < 0) return NULL;
    Status status = without_gil(do_find_device, &work);
    if (status != STATUS_OK) return raise_status(state, status, "stream", device);
    const bool is_default = work.handle <= 2;
    int found = work.device;
    if (found < 0) found = is_default ? device : device_of_foreign(object, device);
    if (found < 0 && read_ordinal(state, Py_None, "stream", &found) < 0) return NULL;
    const Owner owner = {release_object, Py_NewRef(object)};
    return owned_stream(state, found, work.handle, owner, "stream");
}

static StreamObject *as_stream(State *state, PyObject *object)
{
    return Py_TYPE(object) == state->stream_type ? (StreamObject *)object : NULL;
}

Stream *read_stream(State *state, PyObject *object, int device)
{
    if (object == Py_None) return current_stream(state, device);
    const StreamObject *own = as_stream(state, object);
    Stream *stream = own == NULL ? foreign_stream(state, object, device) : stream_hold(own->stream);
    if (stream == NULL || stream_device(stream) == device) return stream;
    PyErr_Format(
        PyExc_ValueError,
        "stream is on cuda:%d, and the call works on cuda:%d: pass a stream of that device",
        stream_device(stream), device);
    release_stream(stream);
    return NULL;
}

Stream *any_stream(State *state, PyObject *object, int device)
{
    const StreamObject *own = as_stream(state, object);
    if (own != NULL) return stream_hold(own->stream);
    if (object == Py_None) return current_stream(state, device);
    return foreign_stream(state, object, device_of_foreign(object, device));
}

/* Work without the GIL. */

typedef struct StreamWork {
    Stream *stream, *other;
    Event *event, *end;
    Watch *watch;
    int device, priority;
    bool nonblocking, timing, blocking_sync;
    bool done;
    float milliseconds;
} StreamWork;

static Status do_stream_create(void *context)
{
    StreamWork *work = context;
    return stream_create(work->device, work->nonblocking, work->priority, &work->stream);
}

static Status do_stream_release(void *stream)
{
    stream_release(stream);
    return STATUS_OK;
}

static Status do_stream_synchronize(void *context)
{
    StreamWork *work = context;
    return stream_synchronize(work->stream, work->watch);
}

static Status do_stream_query(void *context)
{
    StreamWork *work = context;
    return stream_query(work->stream, &work->done);
}

static Status do_stream_wait(void *context)
{
    StreamWork *work = context;
    return stream_wait(work->stream, work->other);
}

static Status do_stream_wait_as_told(void *context)
{
    StreamWork *work = context;
    return stream_wait_as_told(work->stream, work->other);
}

static Status do_device_synchronize(void *context)
{
    StreamWork *work = context;
    return device_synchronize(work->device, work->watch);
}

static Status do_event_create(void *context)
{
    StreamWork *work = context;
    return event_create(work->device, work->timing, work->blocking_sync, &work->event);
}

static Status do_event_destroy(void *event)
{
    event_destroy(event);
    return STATUS_OK;
}

static Status do_event_record(void *context)
{
    StreamWork *work = context;
    return event_record(work->event, work->stream);
}

static Status do_event_query(void *context)
{
    StreamWork *work = context;
    return event_query(work->event, &work->done);
}

static Status do_event_synchronize(void *context)
{
    StreamWork *work = context;
    return event_synchronize(work->event, work->watch);
}

static Status do_event_wait(void *context)
{
    StreamWork *work = context;
    return event_wait(work->event, work->stream);
}

static Status do_event_elapsed(void *context)
{
    StreamWork *work = context;
    return event_elapsed(work->event, work->end, &work->milliseconds);
}

/* Runs it and raises what went wrong; 0, or -1 with an exception. */
static int carry_out(State *state, Status (*function)(void *), StreamWork *work, const char *op,
                     int device)
{
    Status status = without_gil(function, work);
    if (status == STATUS_OK) return 0;
    raise_status(state, status, op, device);
    return -1;
}

/* The same for what waits, which signals may end. */
static int wait_out(State *state, Status (*function)(void *), StreamWork *work, int device)
{
    Progress progress;
    progress_init(&progress, "synchronize");
    work->watch = &progress.watch;
    Status status = progress_run(&progress, function, work);
    if (status == STATUS_OK) return 0;
    raise_status(state, status, progress.op, device);
    return -1;
}

int await_stream(State *state, Stream *waiting, Stream *awaited, const char *op)
{
    StreamWork work = {.stream = waiting, .other = awaited};
    return carry_out(state, do_stream_wait, &work, op, stream_device(waiting));
}

/* Stream. */

Stream *new_stream(State *state, int device, bool nonblocking, int priority, const char *op)
{
    StreamWork work = {.device = device, .nonblocking = nonblocking, .priority = priority};
    return carry_out(state, do_stream_create, &work, op, device) < 0 ? NULL : work.stream;
}

void release_stream(Stream *stream)
{
    /* For most, which are of others or held by others, the GIL is not worth releasing. */
    if (!stream_try_release(stream)) (void)without_gil(do_stream_release, stream);
}

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "nonblocking", "priority", NULL};
    State *state = state_of(type);
    PyObject *device = Py_None;
    int nonblocking = 1, priority = 0, ordinal;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O$pi:Stream", names, &device, &nonblocking,
                                     &priority))
        return NULL;
    if (read_ordinal(state, device, "Stream", &ordinal) < 0) return NULL;
    return wrap(state, new_stream(state, ordinal, nonblocking != 0, priority, "Stream"));
}

static void stream_dealloc(PyObject *self)
{
    StreamObject *object = (StreamObject *)self;
    PyTypeObject *type = Py_TYPE(self);
    CLEAR_WEAK_REFERENCES(self, object->weak_references);
    release_stream(object->stream);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static Stream *stream_of(PyObject *self)
{
    return ((StreamObject *)self)->stream;
}

static PyObject *stream_from_external(PyObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"obj", "device", NULL};
    State *state = state_of((PyTypeObject *)type);
    PyObject *object, *device = Py_None;
    int ordinal;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$O:from_external", names, &object, &device))
        return NULL;
    if (object == Py_None) return refuse_stream(object);
    if (device == Py_None)
        return as_stream(state, object) != NULL ? Py_NewRef(object)
                                                : wrap(state, any_stream(state, object, -1));
    if (read_ordinal(state, device, "from_external", &ordinal) < 0) return NULL;
    return wrap(state, read_stream(state, object, ordinal));
}

static PyObject *stream_get_device(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(stream_device(stream_of(self)));
}

static PyObject *stream_get_ptr(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(stream_handle(stream_of(self)));
}

static PyObject *protocol_pair(Stream *stream)
{
    return Py_BuildValue("(iK)", 0, (unsigned long long)stream_handle(stream));
}

static PyObject *stream_protocol(PyObject *self, PyObject *unused)
{
    (void)unused;
    return protocol_pair(stream_of(self));
}

static PyObject *stream_do_synchronize(PyObject *self, PyObject *unused)
{
    (void)unused;
    StreamWork work = {.stream = stream_of(self)};
    if (wait_out(state_of(Py_TYPE(self)), do_stream_synchronize, &work,
                 stream_device(work.stream)) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *stream_do_query(PyObject *self, PyObject *unused)
{
    (void)unused;
    StreamWork work = {.stream = stream_of(self)};
    if (carry_out(state_of(Py_TYPE(self)), do_stream_query, &work, "query",
                  stream_device(work.stream)) < 0)
        return NULL;
    return PyBool_FromLong(work.done);
}

static PyObject *new_event(State *state, int device, bool timing, bool blocking_sync)
{
    StreamWork work = {.device = device, .timing = timing, .blocking_sync = blocking_sync};
    if (carry_out(state, do_event_create, &work, "Event", device) < 0) return NULL;
    EventObject *object = PyObject_New(EventObject, state->event_type);
    if (object == NULL) {
        event_destroy(work.event);
        return NULL;
    }
    object->event = work.event;
    object->weak_references = NULL;
    return (PyObject *)object;
}

static int record(State *state, EventObject *event, Stream *stream)
{
    StreamWork work = {.event = event->event, .stream = stream};
    return carry_out(state, do_event_record, &work, "record", event_device(event->event));
}

static PyObject *stream_record(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"event", NULL};
    State *state = state_of(Py_TYPE(self));
    PyObject *event = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:record", names, &event)) return NULL;
    if (event == Py_None)
        event = new_event(state, stream_device(stream_of(self)), true, false);
    else if (Py_TYPE(event) == state->event_type)
        Py_INCREF(event);
    else
        return PyErr_Format(PyExc_TypeError, "event must be None or a gpuops.Event, not %R", event);
    if (event != NULL && record(state, (EventObject *)event, stream_of(self)) < 0) Py_CLEAR(event);
    return event;
}

static int await_event(State *state, EventObject *event, Stream *stream)
{
    StreamWork work = {.event = event->event, .stream = stream};
    return carry_out(state, do_event_wait, &work, "wait", stream_device(stream));
}

static PyObject *stream_do_wait(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"event_or_stream", NULL};
    State *state = state_of(Py_TYPE(self));
    PyObject *object;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:wait", names, &object)) return NULL;
    if (Py_TYPE(object) == state->event_type) {
        if (await_event(state, (EventObject *)object, stream_of(self)) < 0) return NULL;
        Py_RETURN_NONE;
    }
    const int has = has_attribute(object, "__cuda_stream__");
    if (has < 0) return NULL;
    if (!has)
        return PyErr_Format(PyExc_TypeError,
                            "wait takes a gpuops.Event, or a stream with __cuda_stream__, not %R",
                            object);
    Stream *awaited = any_stream(state, object, stream_device(stream_of(self)));
    if (awaited == NULL) return NULL;
    StreamWork work = {.stream = stream_of(self), .other = awaited};
    int result =
        carry_out(state, do_stream_wait_as_told, &work, "wait", stream_device(work.stream));
    release_stream(awaited);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *stream_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    Entered *entered = PyMem_Malloc(sizeof *entered);
    if (entered == NULL) return PyErr_NoMemory();
    entered->stream = stream_hold(stream_of(self));
    entered->outer = innermost;
    innermost = entered;
    return Py_NewRef(self);
}

static PyObject *stream_exit(PyObject *self, PyObject *args)
{
    PyObject *kind, *error, *traceback;
    if (!PyArg_ParseTuple(args, "OOO:__exit__", &kind, &error, &traceback)) return NULL;
    Entered *entered = innermost;
    if (entered == NULL || entered->stream != stream_of(self)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this Stream is not the one that was entered last on this thread: leave "
                        "`with` blocks of streams in the opposite order, on their own thread");
        return NULL;
    }
    innermost = entered->outer;
    release_stream(entered->stream);
    PyMem_Free(entered);
    Py_RETURN_NONE;
}

static PyObject *stream_repr(PyObject *self)
{
    Stream *stream = stream_of(self);
    const uintptr_t handle = stream_handle(stream);
    const int device = stream_device(stream);
    if (handle == 1)
        return PyUnicode_FromFormat("<gpuops.Stream: the legacy default stream of cuda:%d>",
                                    device);
    if (handle == 2)
        return PyUnicode_FromFormat("<gpuops.Stream: the per-thread default stream of cuda:%d>",
                                    device);
    return PyUnicode_FromFormat("<gpuops.Stream: %p of cuda:%d>", (void *)handle, device);
}

/* There is one record for each device and handle. */
static PyObject *stream_compare(PyObject *self, PyObject *other, int operation)
{
    if (Py_TYPE(self) != Py_TYPE(other) || (operation != Py_EQ && operation != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    const bool same = stream_of(self) == stream_of(other);
    return PyBool_FromLong(same == (operation == Py_EQ));
}

static Py_hash_t stream_hash(PyObject *self)
{
    const uintptr_t handle = stream_handle(stream_of(self));
    /* The low bits of an address are always zero. */
    Py_hash_t hash = (Py_hash_t)(handle >> 4 ^ handle << 24) + stream_device(stream_of(self));
    return hash == -1 ? -2 : hash;
}

static PyMethodDef stream_type_methods[] = {
    {"from_external", (PyCFunction)(void (*)(void))stream_from_external,
     METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "from_external($type, obj, *, device=None)\n--\n\n"
     "The Stream of another library's stream.\n\n"
     "Parameters\n----------\n"
     "obj : object with ``__cuda_stream__``\n"
     "    A stream of torch, CuPy, Numba or cuda.core, for example. It is kept alive. Of the\n"
     "    per-thread default stream each thread has its own, and waits for it when it ends.\n"
     "device : optional\n"
     "    The GPU that the stream belongs to, see `gpuops.device`. It has to be given only for a\n"
     "    default stream, which is the same for every GPU, and only where no attribute of `obj`\n"
     "    says it (`device`, `device_id` or `device_index`): then it is by default the one on\n"
     "    which new arrays are made.\n\n"
     "Returns\n-------\nStream\n\n"
     "Raises\n------\nTypeError\n    If `obj` is no stream.\n"
     "ValueError\n    If `obj` is a stream of another device than `device`.\n"
     "DeviceError\n    If there is no such GPU.\n"},
    {"synchronize", stream_do_synchronize, METH_NOARGS,
     "synchronize($self)\n--\n\n"
     "Wait until all that is queued on the stream is done.\n\n"
     "A signal whose handler raises, such as Ctrl-C, ends the wait, and what is queued goes on.\n\n"
     "Raises\n------\nIndexError\n"
     "    If an operator on this stream met an index outside its axis, in mode 'raise', and that\n"
     "    was not raised yet. Of several such calls since somebody last waited for the stream, "
     "the\n"
     "    first is told of, and no other.\n"
     "DeviceError\n    If work on the stream has failed.\n"
     "ValueError\n    If the stream is being captured into a CUDA graph.\n"},
    {"query", stream_do_query, METH_NOARGS,
     "query($self)\n--\n\n"
     "Whether all that is queued on the stream is done; does not wait.\n\n"
     "Returns\n-------\nbool\n\n"
     "Raises\n------\nDeviceError\n    If work on the stream has failed.\n"
     "ValueError\n    If the stream is being captured into a CUDA graph.\n"},
    {"record", (PyCFunction)(void (*)(void))stream_record, METH_VARARGS | METH_KEYWORDS,
     "record($self, event=None)\n--\n\n"
     "Note this place in the stream's order in an event.\n\n"
     "Parameters\n----------\n"
     "event : Event, optional\n    Of the same device; by default a new one with timing.\n\n"
     "Returns\n-------\nEvent\n\n"
     "Raises\n------\nTypeError\n    If `event` is no `Event`.\n"
     "ValueError\n    If it belongs to another device.\n"},
    {"wait", (PyCFunction)(void (*)(void))stream_do_wait, METH_VARARGS | METH_KEYWORDS,
     "wait($self, event_or_stream)\n--\n\n"
     "Let what is queued on this stream from now on come after an event, or after all that is\n"
     "queued on another stream now. The call itself does not wait.\n\n"
     "Parameters\n----------\n"
     "event_or_stream : Event, or object with ``__cuda_stream__``\n"
     "    Of any device. If that is being captured into a CUDA graph, this stream becomes part of\n"
     "    the capture.\n\n"
     "Raises\n------\nTypeError\n    For anything else.\n"
     "ValueError\n"
     "    If this stream is being captured and the other one is not, whose work is not part of "
     "the\n"
     "    graph.\n"},
    {"__cuda_stream__", stream_protocol, METH_NOARGS,
     "__cuda_stream__($self)\n--\n\n"
     "The protocol by which libraries tell each other streams: the pair (0, handle)."},
    {"__enter__", stream_enter, METH_NOARGS,
     "__enter__($self)\n--\n\n"
     "Make this the current stream of this thread, for the device of the stream."},
    {"__exit__", stream_exit, METH_VARARGS,
     "__exit__($self, kind, error, traceback, /)\n--\n\n"
     "Go back to the stream that was current before."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_type_attributes[] = {
    {"device", stream_get_device, NULL, "The ordinal of its GPU, an int.", NULL},
    {"ptr", stream_get_ptr, NULL,
     "Its handle, the address that CUDA knows it by, as an int; 1 is the legacy default stream, 2 "
     "the per-thread "
     "one.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef stream_type_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(StreamObject, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot stream_type_slots[] = {
    {Py_tp_doc,
     "Stream(device=None, *, nonblocking=True, priority=0)\n--\n\n"
     "A CUDA stream: work that is queued on it is done in that order.\n\n"
     "In ``with stream:`` it is the current stream of the thread, on which calls work that are\n"
     "given no `stream`. Streams are equal if they stand for the same stream of CUDA.\n\n"
     "It also keeps the first bad index that an operator met on it, in mode 'raise', until\n"
     "somebody waits for the stream, to whom the IndexError is raised. Of further bad calls in\n"
     "the meantime nothing is told.\n\n"
     "Parameters\n----------\n"
     "device : optional\n"
     "    The GPU, see `gpuops.device`; by default the one on which new arrays are made.\n"
     "nonblocking : bool\n"
     "    False makes a stream that is ordered with the legacy default stream.\n"
     "priority : int\n"
     "    Work of a lower number goes first; CUDA allows for about -5 to 0.\n\n"
     "Attributes\n----------\n"
     "device : int\n    The ordinal of its GPU.\n"
     "ptr : int\n    Its handle: the address that CUDA knows it by.\n\n"
     "Raises\n------\nDeviceError\n    If there is no such GPU.\n"
     "ValueError\n    If `device` names no GPU.\n\n"
     "See Also\n--------\nStream.from_external : The Stream of another library's stream.\n"},
    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_repr, stream_repr},
    {Py_tp_richcompare, stream_compare},
    {Py_tp_hash, stream_hash},
    {Py_tp_methods, stream_type_methods},
    {Py_tp_getset, stream_type_attributes},
    {Py_tp_members, stream_type_members},
    {0, NULL},
};

static PyType_Spec stream_spec = {
    .name = "gpuops.Stream",
    .basicsize = sizeof(StreamObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = stream_type_slots,
};

/* Event. */

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"timing", "blocking_sync", "device", NULL};
    State *state = state_of(type);
    PyObject *device = Py_None;
    int timing = 1, blocking_sync = 0, ordinal;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$ppO:Event", names, &timing, &blocking_sync,
                                     &device))
        return NULL;
    if (read_ordinal(state, device, "Event", &ordinal) < 0) return NULL;
    return new_event(state, ordinal, timing != 0, blocking_sync != 0);
}

static void event_dealloc(PyObject *self)
{
    EventObject *object = (EventObject *)self;
    PyTypeObject *type = Py_TYPE(self);
    CLEAR_WEAK_REFERENCES(self, object->weak_references);
    (void)without_gil(do_event_destroy, object->event);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *event_do_record(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"stream", NULL};
    State *state = state_of(Py_TYPE(self));
    EventObject *event = (EventObject *)self;
    PyObject *object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:record", names, &object)) return NULL;
    /* What a stream of another device means to an event, the lower layer says. */
    Stream *stream = any_stream(state, object, event_device(event->event));
    if (stream == NULL) return NULL;
    int result = record(state, event, stream);
    release_stream(stream);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *event_do_query(PyObject *self, PyObject *unused)
{
    (void)unused;
    const EventObject *event = (EventObject *)self;
    StreamWork work = {.event = event->event};
    if (carry_out(state_of(Py_TYPE(self)), do_event_query, &work, "query",
                  event_device(event->event)) < 0)
        return NULL;
    return PyBool_FromLong(work.done);
}

static PyObject *event_do_synchronize(PyObject *self, PyObject *unused)
{
    (void)unused;
    const EventObject *event = (EventObject *)self;
    StreamWork work = {.event = event->event};
    if (wait_out(state_of(Py_TYPE(self)), do_event_synchronize, &work, event_device(event->event)) <
        0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *event_do_wait(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"stream", NULL};
    State *state = state_of(Py_TYPE(self));
    EventObject *event = (EventObject *)self;
    PyObject *object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:wait", names, &object)) return NULL;
    Stream *stream = any_stream(state, object, event_device(event->event));
    if (stream == NULL) return NULL;
    int result = await_event(state, event, stream);
    release_stream(stream);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *event_elapsed_time(PyObject *self, PyObject *end)
{
    State *state = state_of(Py_TYPE(self));
    const EventObject *event = (EventObject *)self;
    if (Py_TYPE(end) != Py_TYPE(self))
        return PyErr_Format(PyExc_TypeError, "end must be a gpuops.Event, not %R", end);
    StreamWork work = {.event = event->event, .end = ((EventObject *)end)->event};
    if (carry_out(state, do_event_elapsed, &work, "elapsed_time", event_device(event->event)) < 0)
        return NULL;
    return PyFloat_FromDouble(work.milliseconds);
}

static PyObject *event_protocol(PyObject *self, PyObject *unused)
{
    (void)unused;
    Stream *stream = event_stream(((EventObject *)self)->event);
    if (stream == NULL)
        return PyErr_Format(PyExc_ValueError,
                            "this Event stands for no stream: it was never recorded on one");
    PyObject *pair = protocol_pair(stream);
    release_stream(stream);
    return pair;
}

static PyObject *event_get_device(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(event_device(((EventObject *)self)->event));
}

static PyMethodDef event_type_methods[] = {
    {"record", (PyCFunction)(void (*)(void))event_do_record, METH_VARARGS | METH_KEYWORDS,
     "record($self, stream=None)\n--\n\n"
     "Note the present end of a stream's queue, in place of what was noted before.\n\n"
     "Parameters\n----------\n"
     "stream : object with ``__cuda_stream__``, optional\n"
     "    By default the current stream of this thread.\n\n"
     "Raises\n------\nValueError\n    If `stream` belongs to another device.\n"},
    {"query", event_do_query, METH_NOARGS,
     "query($self)\n--\n\n"
     "Whether all that was queued before the event is done; does not wait.\n\n"
     "True as well for an event that was never recorded.\n\n"
     "Returns\n-------\nbool\n\n"
     "Raises\n------\nDeviceError\n    If that work has failed.\n"},
    {"synchronize", event_do_synchronize, METH_NOARGS,
     "synchronize($self)\n--\n\n"
     "Wait until all that was queued before the event is done.\n\n"
     "That is what it was recorded behind when the wait began, also where others record it anew\n"
     "meanwhile; the wait may then take in what followed on that stream.\n\n"
     "A signal whose handler raises, such as Ctrl-C, ends the wait, and what is queued goes on.\n\n"
     "Raises\n------\nIndexError\n"
     "    If an operator on its stream met an index outside its axis, in mode 'raise', and that\n"
     "    was not raised yet: the first of these, as in `Stream.synchronize`.\n"
     "DeviceError\n    If that work has failed.\n"},
    {"wait", (PyCFunction)(void (*)(void))event_do_wait, METH_VARARGS | METH_KEYWORDS,
     "wait($self, stream=None)\n--\n\n"
     "Let what is queued on a stream from now on come after the event. The call itself does not\n"
     "wait.\n\n"
     "Parameters\n----------\n"
     "stream : object with ``__cuda_stream__``, optional\n"
     "    By default the current stream of this thread.\n\n"
     "Raises\n------\nValueError\n"
     "    If that stream is being captured into a CUDA graph, of which the event is no part.\n"},
    {"elapsed_time", event_elapsed_time, METH_O,
     "elapsed_time($self, end, /)\n--\n\n"
     "The time from this event to a later one, in milliseconds.\n\n"
     "Parameters\n----------\n"
     "end : Event\n    Both must have been reached: call ``end.synchronize()`` first.\n\n"
     "Returns\n-------\nfloat\n    With a resolution of about half a microsecond.\n\n"
     "Raises\n------\nValueError\n"
     "    If one of them was not recorded, not reached, or made without timing.\n"},
    {"__cuda_stream__", event_protocol, METH_NOARGS,
     "__cuda_stream__($self)\n--\n\n"
     "The pair (0, handle) of the stream that the event was last recorded on."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_type_attributes[] = {
    {"device", event_get_device, NULL, "The ordinal of its GPU, an int.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef event_type_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(EventObject, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot event_type_slots[] = {
    {Py_tp_doc,
     "Event(*, timing=True, blocking_sync=False, device=None)\n--\n\n"
     "A place in the order of a stream, to wait for or to take the time of.\n\n"
     "Parameters\n----------\n"
     "timing : bool\n    Whether `elapsed_time` is wanted; without it an event is cheaper.\n"
     "blocking_sync : bool\n"
     "    Whether `synchronize` lets the core sleep, in place of asking over and over.\n"
     "device : optional\n"
     "    The GPU, see `gpuops.device`; by default the one on which new arrays are made.\n\n"
     "Attributes\n----------\n"
     "device : int\n    The ordinal of its GPU.\n\n"
     "Raises\n------\nDeviceError\n    If there is no such GPU.\n"
     "ValueError\n    If `device` names no GPU.\n"},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_type_methods},
    {Py_tp_getset, event_type_attributes},
    {Py_tp_members, event_type_members},
    {0, NULL},
};

static PyType_Spec event_spec = {
    .name = "gpuops.Event",
    .basicsize = sizeof(EventObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = event_type_slots,
};

PyTypeObject *new_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    /* Python 3.11 says nothing where it has no memory for the name. */
    if (type == NULL && !PyErr_Occurred()) PyErr_NoMemory();
    return type;
}

PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = new_type(module, spec);
    if (type != NULL && PyModule_AddType(module, type) < 0) Py_CLEAR(type);
    return type;
}

int add_stream_types(PyObject *module, State *state)
{
    state->stream_type = add_type(module, &stream_spec);
    if (state->stream_type == NULL) return -1;
    state->event_type = add_type(module, &event_spec);
    return state->event_type == NULL ? -1 : 0;
}

/* Functions. */

static PyObject *synchronize_device(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", NULL};
    State *state = PyModule_GetState(module);
    PyObject *device = Py_None;
    StreamWork work = {.stream = NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:synchronize", names, &device)) return NULL;
    if (read_ordinal(state, device, "synchronize", &work.device) < 0 ||
        wait_out(state, do_device_synchronize, &work, work.device) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *get_current_stream(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", NULL};
    State *state = PyModule_GetState(module);
    PyObject *device = Py_None;
    int ordinal;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:current_stream", names, &device))
        return NULL;
    if (read_ordinal(state, device, "current_stream", &ordinal) < 0) return NULL;
    return wrap(state, current_stream(state, ordinal));
}

PyMethodDef stream_methods[] = {
    {"synchronize", (PyCFunction)(void (*)(void))synchronize_device, METH_VARARGS | METH_KEYWORDS,
     "synchronize($module, device=None)\n--\n\n"
     "Wait until all that is queued on a GPU is done, on every stream.\n\n"
     "A signal whose handler raises, such as Ctrl-C, ends the wait for streams that gpuops knows,\n"
     "and what is queued goes on.\n\n"
     "Parameters\n----------\n"
     "device : optional\n"
     "    The GPU, see `gpuops.device`; by default the one on which new arrays are made.\n\n"
     "Raises\n------\nIndexError\n"
     "    If an operator on one of its streams met an index outside its axis, in mode 'raise', "
     "and\n"
     "    that was not raised yet: the first of all. If there is one on another stream too, the\n"
     "    next call raises it; of one stream only the first is told of.\n"
     "DeviceError\n    If there is no such GPU, or its work has failed.\n"
     "ValueError\n"
     "    If `device` names no GPU, or one of its streams is being captured into a graph.\n"},
    {"current_stream", (PyCFunction)(void (*)(void))get_current_stream,
     METH_VARARGS | METH_KEYWORDS,
     "current_stream($module, device=None)\n--\n\n"
     "The stream on which this thread works unless a call is told another.\n\n"
     "Parameters\n----------\n"
     "device : optional\n"
     "    The GPU, see `gpuops.device`; by default the one on which new arrays are made.\n\n"
     "Returns\n-------\nStream\n"
     "    That of the innermost ``with stream:`` of the device, else its legacy default stream.\n\n"
     "Raises\n------\nDeviceError\n    If there is no such GPU.\n"
     "ValueError\n    If `device` names no GPU.\n"},
    {NULL, NULL, 0, NULL},
};
