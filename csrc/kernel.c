/* Kernel: what is launched, its parameters, and the grid that it is launched with. */
#include "rtc.h"

static KernelObject *kernel_of(PyObject *object)
{
    return (KernelObject *)object;
}

/* Work without the GIL. */

typedef struct KernelWork {
    Module *module;
    Kernel *kernel;
    const char *name;
    int64_t bytes;
    int number;
    KernelInfo info;
} KernelWork;

static Status do_find_kernel(void *context)
{
    KernelWork *work = context;
    Status status = kernel_find(work->module, work->name, &work->kernel);
    return status == STATUS_OK ? kernel_info(work->module, work->kernel, &work->info) : status;
}

static Status do_find_parameter(void *context)
{
    KernelWork *work = context;
    return kernel_parameter(work->module, work->kernel, work->number, &work->bytes);
}

static Status do_set_dynamic_bytes(void *context)
{
    KernelWork *work = context;
    Status status = kernel_set_dynamic_bytes(work->module, work->kernel, work->bytes);
    return status == STATUS_OK ? kernel_info(work->module, work->kernel, &work->info) : status;
}

static Status do_find_block_size(void *context)
{
    KernelWork *work = context;
    return kernel_block_size(work->module, work->kernel, work->bytes, &work->number);
}

static int carry_out(State *state, const KernelObject *kernel, Status (*function)(void *),
                     KernelWork *work)
{
    work->module = kernel->module->module;
    work->kernel = kernel->kernel;
    Status status = without_gil(function, work);
    if (status == STATUS_OK) return 0;
    raise_status(state, status, kernel->op, kernel->module->device);
    return -1;
}

/* Parameters. */

static char *copy_text(const char *text)
{
    char *copy = PyMem_Malloc(strlen(text) + 1);
    if (copy == NULL)
        PyErr_NoMemory();
    else
        strcpy(copy, text);
    return copy;
}

/* Reads a type as gpuops/_compile.py writes it, such as "const float32*"; false: it is unknown. */
static bool parse_type(const char *type, KernelParameter *parameter)
{
    static const char CONST[] = "const ";
    char word[32];
    size_t length = strlen(type);
    const bool is_pointer = length > 0 && type[length - 1] == '*';
    const bool is_const = strncmp(type, CONST, sizeof CONST - 1) == 0;
    if (is_const) type += sizeof CONST - 1;
    length = strlen(type) - is_pointer;
    if (length >= sizeof word) return false;
    memcpy(word, type, length);
    word[length] = '\0';
    parameter->is_pointer = is_pointer;
    parameter->is_const = is_const;
    parameter->is_char = strcmp(word, "char") == 0;
    parameter->is_value = strcmp(word, "value") == 0;
    parameter->dtype = parameter->is_char ? DTYPE_INT8 : DTYPE_OPAQUE;
    if (parameter->is_char || (is_pointer && strcmp(word, "void") == 0)) return true;
    for (Dtype dtype = DTYPE_BOOL; dtype <= DTYPE_COMPLEX128; dtype++)
        if (strcmp(word, dtype_name(dtype)) == 0) parameter->dtype = dtype;
    return parameter->dtype != DTYPE_OPAQUE;
}

static void forget_source(KernelParameter *parameter)
{
    PyMem_Free(parameter->name);
    PyMem_Free(parameter->type);
    parameter->name = parameter->type = NULL;
    parameter->dtype = DTYPE_OPAQUE;
    parameter->is_pointer = parameter->is_const = parameter->is_char = parameter->is_value = false;
}

/* 1 with what the source says of a parameter: a pair of a name and a type, each of which may be
 * None; 0: it cannot be that parameter, for CUDA says another size; -1 with an exception. */
static int read_source(PyObject *pair, KernelParameter *parameter)
{
    const char *name, *type;
    if (!PyTuple_Check(pair)) {
        PyErr_SetString(PyExc_TypeError, "a parameter must be a pair of a name and a type");
        return -1;
    }
    if (!PyArg_ParseTuple(pair, "zz", &name, &type)) return -1;
    if (type != NULL && parse_type(type, parameter)) {
        const int64_t bytes =
            parameter->is_pointer ? (int64_t)sizeof(void *) : dtype_bytes(parameter->dtype);
        if (bytes != parameter->bytes) return 0;
        parameter->type = copy_text(type);
        if (parameter->type == NULL) return -1;
    }
    if (name != NULL) {
        parameter->name = copy_text(name);
        if (parameter->name == NULL) return -1;
    }
    return 1;
}

static int read_sources(KernelObject *kernel, PyObject *sources)
{
    int fits = PyTuple_Check(sources) && PyTuple_Size(sources) == kernel->count;
    for (int i = 0; i < kernel->count && fits == 1; i++)
        fits = read_source(PyTuple_GetItem(sources, i), &kernel->parameters[i]);
    for (int i = 0; i < kernel->count && fits == 0; i++) forget_source(&kernel->parameters[i]);
    return fits < 0 ? -1 : 0;
}

static int name_the_rest(KernelObject *kernel)
{
    for (int i = 0; i < kernel->count; i++) {
        char name[32];
        if (kernel->parameters[i].name != NULL) continue;
        snprintf(name, sizeof name, "argument %d", i + 1);
        kernel->parameters[i].name = copy_text(name);
        if (kernel->parameters[i].name == NULL) return -1;
    }
    return 0;
}

/* Asks CUDA for the sizes; each value is kept where its size is aligned, up to 16 bytes. */
static int find_parameters(State *state, KernelObject *kernel)
{
    KernelWork work = {.number = 0};
    for (;; kernel->count++) {
        work.number = kernel->count;
        if (carry_out(state, kernel, do_find_parameter, &work) < 0) return -1;
        if (work.bytes == 0) return 0;
        const size_t count = (size_t)kernel->count + 1;
        KernelParameter *more =
            PyMem_Realloc(kernel->parameters, count * sizeof *kernel->parameters);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        enum { ALIGNMENT = 16 };
        const size_t offset = kernel->value_bytes;
        kernel->parameters = more;
        more[kernel->count] = (KernelParameter){.bytes = work.bytes, .offset = offset};
        kernel->value_bytes =
            (offset + (size_t)work.bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    }
}

/* Launchers. */

static int read_dimension(PyObject *object, const char *name, unsigned *size)
{
    PyObject *index = NULL;
    if (PyIndex_Check(object) && !PyBool_Check(object)) {
        index = PyNumber_Index(object);
        if (index == NULL) return -1;
    } else {
        PyErr_Format(PyExc_TypeError,
                     "%s must be an integer, or a tuple of one to three of them, not %R", name,
                     object);
        return -1;
    }
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow == 0 && value >= 1 && value <= INT_MAX) {
        *size = (unsigned)value;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must be at least 1 and fit into 31 bits, not %R", name,
                 object);
    return -1;
}

static int read_dimensions(PyObject *object, const char *name, unsigned *sizes)
{
    sizes[0] = sizes[1] = sizes[2] = 1;
    if (!PyTuple_Check(object)) return read_dimension(object, name, &sizes[0]);
    const Py_ssize_t count = PyTuple_Size(object);
    if (count < 1 || count > 3) {
        PyErr_Format(PyExc_ValueError, "%s has one to three dimensions, not %zd", name, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (read_dimension(PyTuple_GetItem(object, i), name, &sizes[i]) < 0) return -1;
    return 0;
}

static int check_dimensions(const KernelObject *kernel, const char *name, const unsigned *sizes,
                            const int *limits)
{
    for (int i = 0; i < 3; i++) {
        if (sizes[i] <= (unsigned)limits[i]) continue;
        PyErr_Format(PyExc_ValueError,
                     "%s is %u in direction %c, and cuda:%d takes %d at most there", name, sizes[i],
                     "xyz"[i], kernel->module->device, limits[i]);
        return -1;
    }
    return 0;
}

static int check_launcher(const LauncherObject *launcher)
{
    const KernelObject *kernel = launcher->kernel;
    const LaunchLimits *limits = &kernel->module->limits;
    const unsigned *block = launcher->block;
    if (check_dimensions(kernel, "grid", launcher->grid, limits->grid) < 0 ||
        check_dimensions(kernel, "block", block, limits->block) < 0)
        return -1;
    const unsigned long long threads = (unsigned long long)block[0] * block[1] * block[2];
    if (threads > (unsigned long long)limits->threads) {
        PyErr_Format(PyExc_ValueError,
                     "a block of %u x %u x %u has %llu threads, and cuda:%d takes %d at most",
                     block[0], block[1], block[2], threads, kernel->module->device,
                     limits->threads);
        return -1;
    }
    if (threads > (unsigned long long)kernel->info.max_threads) {
        PyErr_Format(PyExc_ValueError,
                     "a block of %u x %u x %u has %llu threads, and %s takes %d at most, by its "
                     "__launch_bounds__ or because each of them takes %d registers",
                     block[0], block[1], block[2], threads, kernel->op, kernel->info.max_threads,
                     kernel->info.registers);
        return -1;
    }
    if (launcher->shared_bytes < 0 ||
        launcher->shared_bytes > LOAD_SHARED(kernel->info.max_dynamic_shared_bytes)) {
        PyErr_Format(PyExc_ValueError,
                     "shared_bytes is %lld, and %s takes 0 to %lld: set its "
                     "max_dynamic_shared_bytes first, which may be up to %lld on cuda:%d",
                     (long long)launcher->shared_bytes, kernel->op,
                     (long long)LOAD_SHARED(kernel->info.max_dynamic_shared_bytes),
                     (long long)(limits->most_dynamic_bytes - kernel->info.shared_bytes),
                     kernel->module->device);
        return -1;
    }
    return 0;
}

static LauncherObject *new_launcher(State *state, KernelObject *kernel, PyObject *stream,
                                    int64_t shared_bytes)
{
    LauncherObject *launcher = PyObject_New(LauncherObject, state->launcher_type);
    if (launcher == NULL) return NULL;
    launcher->kernel = kernel_of(Py_NewRef((PyObject *)kernel));
    launcher->stream = Py_NewRef(stream);
    launcher->shared_bytes = shared_bytes;
    return launcher;
}

static void launcher_dealloc(PyObject *self)
{
    LauncherObject *launcher = (LauncherObject *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF((PyObject *)launcher->kernel);
    Py_DECREF(launcher->stream);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static int refuse_keywords(const KernelObject *kernel, PyObject *keywords)
{
    if (keywords == NULL || PyDict_Size(keywords) == 0) return 0;
    PyErr_Format(PyExc_TypeError,
                 "%s() takes no keyword arguments: stream and shared_bytes go into the brackets, "
                 "kernel[grid, block, stream, shared_bytes](...)",
                 kernel->op);
    return -1;
}

static PyObject *launcher_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    const LauncherObject *launcher = (LauncherObject *)self;
    if (refuse_keywords(launcher->kernel, keywords) < 0) return NULL;
    return launch(state_of(Py_TYPE(self)), launcher, args, 0);
}

static PyObject *launcher_repr(PyObject *self)
{
    const LauncherObject *launcher = (LauncherObject *)self;
    const unsigned *grid = launcher->grid, *block = launcher->block;
    return PyUnicode_FromFormat("<%s[(%u, %u, %u), (%u, %u, %u)] of %S>", launcher->kernel->op,
                                grid[0], grid[1], grid[2], block[0], block[1], block[2],
                                launcher->kernel);
}

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "A kernel with the size of its grid: call it with the kernel's arguments."},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_call, launcher_call},
    {Py_tp_repr, launcher_repr},
    {0, NULL},
};

static PyType_Spec launcher_spec = {
    .name = "gpuops._core._Launcher",
    .basicsize = sizeof(LauncherObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = launcher_slots,
};

/* Kernel. */

static void kernel_dealloc(PyObject *self)
{
    KernelObject *kernel = kernel_of(self);
    PyTypeObject *type = Py_TYPE(self);
    CLEAR_WEAK_REFERENCES(self, kernel->weak_references);
    for (int i = 0; i < kernel->count; i++) forget_source(&kernel->parameters[i]);
    PyMem_Free(kernel->parameters);
    Py_XDECREF(kernel->name);
    Py_DECREF((PyObject *)kernel->module);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

PyObject *new_kernel(State *state, ModuleObject *module, PyObject *name, PyObject *entry)
{
    KernelWork work = {.number = 0};
    PyObject *sources;
    if (!PyArg_ParseTuple(entry, "sO", &work.name, &sources)) return NULL;
    KernelObject *kernel = PyObject_New(KernelObject, state->kernel_type);
    if (kernel == NULL) return NULL;
    kernel->module = (ModuleObject *)Py_NewRef((PyObject *)module);
    kernel->kernel = NULL;
    kernel->name = Py_NewRef(name);
    kernel->op = PyUnicode_AsUTF8AndSize(name, NULL);
    kernel->block_size = kernel->count = 0;
    kernel->value_bytes = 0;
    kernel->parameters = NULL;
    kernel->weak_references = NULL;
    if (kernel->op == NULL || carry_out(state, kernel, do_find_kernel, &work) < 0) goto failed;
    kernel->kernel = work.kernel;
    kernel->info = work.info;
    if (find_parameters(state, kernel) < 0 ||
        (sources != Py_None && read_sources(kernel, sources) < 0) || name_the_rest(kernel) < 0)
        goto failed;
    return (PyObject *)kernel;
failed:
    Py_DECREF((PyObject *)kernel);
    return NULL;
}

/* "scale(x: float32*, 4 bytes)" */
static PyObject *kernel_str(PyObject *self)
{
    const KernelObject *kernel = kernel_of(self);
    PyObject *text = PyUnicode_FromFormat("%s(", kernel->op);
    for (int i = 0; i < kernel->count && text != NULL; i++) {
        const KernelParameter *parameter = &kernel->parameters[i];
        const bool is_named = strncmp(parameter->name, "argument ", 9) != 0;
        char bytes[32];
        snprintf(bytes, sizeof bytes, "%lld bytes", (long long)parameter->bytes);
        PyObject *longer = PyUnicode_FromFormat(
            "%U%s%s%s%s", text, i == 0 ? "" : ", ", is_named ? parameter->name : "",
            is_named ? ": " : "", parameter->type != NULL ? parameter->type : bytes);
        Py_DECREF(text);
        text = longer;
    }
    PyObject *closed = text == NULL ? NULL : PyUnicode_FromFormat("%U)", text);
    Py_XDECREF(text);
    return closed;
}

static PyObject *kernel_repr(PyObject *self)
{
    PyObject *text = kernel_str(self);
    if (text == NULL) return NULL;
    PyObject *result = PyUnicode_FromFormat("<gpuops.Kernel %U on cuda:%d>", text,
                                            kernel_of(self)->module->device);
    Py_DECREF(text);
    return result;
}

static int read_shared_bytes(PyObject *object, int64_t *bytes)
{
    if (PyLong_CheckExact(object)) {
        *bytes = PyLong_AsLongLong(object);
    } else {
        PyObject *index = PyNumber_Index(object);
        if (index == NULL) return -1;
        *bytes = PyLong_AsLongLong(index);
        Py_DECREF(index);
    }
    return *bytes == -1 && PyErr_Occurred() ? -1 : 0;
}

static LauncherObject *configure(PyObject *self, PyObject *grid, PyObject *block, PyObject *stream,
                                 PyObject *shared)
{
    int64_t shared_bytes = 0;
    if (shared != NULL && read_shared_bytes(shared, &shared_bytes) < 0) return NULL;
    LauncherObject *launcher =
        new_launcher(state_of(Py_TYPE(self)), kernel_of(self), stream, shared_bytes);
    if (launcher == NULL) return NULL;
    if (read_dimensions(grid, "grid", launcher->grid) < 0 ||
        read_dimensions(block, "block", launcher->block) < 0 || check_launcher(launcher) < 0) {
        Py_DECREF((PyObject *)launcher);
        return NULL;
    }
    return launcher;
}

static PyObject *kernel_subscript(PyObject *self, PyObject *key)
{
    const Py_ssize_t count = PyTuple_Check(key) ? PyTuple_Size(key) : 1;
    if (count < 2 || count > 4)
        return PyErr_Format(PyExc_TypeError,
                            "a kernel is launched with kernel[grid, block](...), or "
                            "kernel[grid, block, stream, shared_bytes](...), not kernel[%R]",
                            key);
    PyObject *stream = count > 2 ? PyTuple_GetItem(key, 2) : Py_None;
    PyObject *shared = count > 3 ? PyTuple_GetItem(key, 3) : NULL;
    return (PyObject *)configure(self, PyTuple_GetItem(key, 0), PyTuple_GetItem(key, 1), stream,
                                 shared);
}

/* The keywords that launch() and forall() have. */
static int read_keywords(const KernelObject *kernel, PyObject *keywords, PyObject **stream,
                         PyObject **shared)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (keywords != NULL && PyDict_Next(keywords, &at, &name, &value)) {
        if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) {
            *stream = value;
        } else if (PyUnicode_CompareWithASCIIString(name, "shared_bytes") == 0) {
            *shared = value;
        } else {
            PyErr_Format(PyExc_TypeError, "%s: unexpected keyword argument '%U'", kernel->op, name);
            return -1;
        }
    }
    return 0;
}

static PyObject *kernel_launch_method(PyObject *self, PyObject *args, PyObject *keywords)
{
    PyObject *stream = Py_None, *shared = NULL;
    if (read_keywords(kernel_of(self), keywords, &stream, &shared) < 0) return NULL;
    if (PyTuple_Size(args) < 2)
        return PyErr_Format(PyExc_TypeError,
                            "launch() takes a grid, a block and the kernel's arguments");
    LauncherObject *launcher =
        configure(self, PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1), stream, shared);
    if (launcher == NULL) return NULL;
    PyObject *result = launch(state_of(Py_TYPE(self)), launcher, args, 2);
    Py_DECREF((PyObject *)launcher);
    return result;
}

static int find_block_size(State *state, KernelObject *kernel, int64_t shared_bytes, unsigned *size)
{
    KernelWork work = {.bytes = shared_bytes, .number = LOAD_SHARED(kernel->block_size)};
    if (shared_bytes != 0 || work.number == 0) {
        if (carry_out(state, kernel, do_find_block_size, &work) < 0) return -1;
        if (shared_bytes == 0) STORE_SHARED(kernel->block_size, work.number);
    }
    *size = (unsigned)work.number;
    return 0;
}

static PyObject *kernel_forall(PyObject *self, PyObject *args, PyObject *keywords)
{
    State *state = state_of(Py_TYPE(self));
    KernelObject *kernel = kernel_of(self);
    PyObject *stream = Py_None, *shared = NULL;
    long long count;
    int64_t shared_bytes = 0;
    if (!PyArg_ParseTuple(args, "L:forall", &count) ||
        read_keywords(kernel, keywords, &stream, &shared) < 0 ||
        (shared != NULL && read_shared_bytes(shared, &shared_bytes) < 0))
        return NULL;
    if (count < 0)
        return PyErr_Format(PyExc_ValueError, "forall() takes a count of at least 0, not %lld",
                            count);
    LauncherObject *launcher = new_launcher(state, kernel, stream, shared_bytes);
    if (launcher == NULL) return NULL;
    unsigned *grid = launcher->grid, *block = launcher->block;
    grid[0] = grid[1] = grid[2] = block[0] = block[1] = block[2] = 1;
    /* First with one thread, for what is wrong with shared_bytes. */
    if (check_launcher(launcher) < 0 || find_block_size(state, kernel, shared_bytes, block) < 0)
        goto failed;
    const long long blocks = count / block[0] + (count % block[0] != 0);
    if (blocks > kernel->module->limits.grid[0]) {
        PyErr_Format(PyExc_ValueError,
                     "forall(%lld) takes %lld blocks of %u threads, and cuda:%d has %d at most in "
                     "one grid: let each thread do more, with kernel[grid, block]",
                     count, blocks, block[0], kernel->module->device,
                     kernel->module->limits.grid[0]);
        goto failed;
    }
    grid[0] = (unsigned)blocks;
    return (PyObject *)launcher;
failed:
    Py_DECREF((PyObject *)launcher);
    return NULL;
}

static PyObject *kernel_get_name(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(kernel_of(self)->name);
}

static PyObject *kernel_get_module(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef((PyObject *)kernel_of(self)->module);
}

static PyObject *kernel_get_attributes(PyObject *self, void *unused)
{
    (void)unused;
    const KernelInfo *info = &kernel_of(self)->info;
    return PyObject_CallFunction(state_of(Py_TYPE(self))->attributes_type, "iLLLiii",
                                 info->registers, (long long)info->shared_bytes,
                                 (long long)info->local_bytes, (long long)info->constant_bytes,
                                 info->max_threads, info->ptx_version, info->binary_version);
}

static PyObject *kernel_get_dynamic_bytes(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(LOAD_SHARED(kernel_of(self)->info.max_dynamic_shared_bytes));
}

static int kernel_set_dynamic_bytes_attribute(PyObject *self, PyObject *value, void *unused)
{
    (void)unused;
    State *state = state_of(Py_TYPE(self));
    KernelObject *kernel = kernel_of(self);
    ModuleObject *module = kernel->module;
    KernelWork work = {.bytes = 0};
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "max_dynamic_shared_bytes cannot be deleted");
        return -1;
    }
    if (read_shared_bytes(value, &work.bytes) < 0) return -1;
    const int64_t most = module->limits.most_dynamic_bytes - kernel->info.shared_bytes;
    if (work.bytes < 0 || work.bytes > most) {
        PyErr_Format(PyExc_ValueError,
                     "max_dynamic_shared_bytes must be from 0 to %lld on cuda:%d, not %lld: a "
                     "block has %lld bytes there, and %s takes %lld of them already",
                     (long long)most, module->device, (long long)work.bytes,
                     (long long)module->limits.most_dynamic_bytes, kernel->op,
                     (long long)kernel->info.shared_bytes);
        return -1;
    }
    if (carry_out(state, kernel, do_set_dynamic_bytes, &work) < 0) return -1;
    /* All else is as it was, and others may be reading it. */
    STORE_SHARED(kernel->info.max_dynamic_shared_bytes, work.info.max_dynamic_shared_bytes);
    return 0;
}

static PyMethodDef kernel_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))kernel_launch_method, METH_VARARGS | METH_KEYWORDS,
     "launch($self, grid, block, /, *args, stream=None, shared_bytes=0)\n--\n\n"
     "Launch the kernel: ``kernel[grid, block, stream, shared_bytes](*args)`` in one call.\n\n"
     "Parameters\n----------\n"
     "grid, block : int or tuple of up to three ints\n"
     "    The blocks of the grid, and the threads of a block, in the directions x, y and z.\n"
     "*args\n    The arguments of the kernel, see `Kernel`.\n"
     "stream : optional\n"
     "    A `Stream`, or an object with ``__cuda_stream__``; by default that of the thread.\n"
     "shared_bytes : int\n    Bytes of dynamic shared memory for each block.\n\n"
     "Raises\n------\nTypeError\n"
     "    If the arguments are not what the kernel takes, in number, kind or dtype.\n"
     "ValueError\n    If the device cannot run such a grid, or an array cannot be passed.\n"
     "OverflowError\n    If a number does not fit into its parameter.\n"
     "DeviceError\n    If the launch failed.\n"},
    {"forall", (PyCFunction)(void (*)(void))kernel_forall, METH_VARARGS | METH_KEYWORDS,
     "forall($self, count, /, *, stream=None, shared_bytes=0)\n--\n\n"
     "The kernel for at least so many threads: call the result with the kernel's arguments.\n\n"
     "The threads of a block are as many as keep the most threads of the GPU at work. There may\n"
     "be more threads than asked for, so the kernel has to look whether its own number is below\n"
     "the count.\n\n"
     "Parameters\n----------\n"
     "count : int\n    Where it is 0 nothing is launched.\n"
     "stream : optional\n    As in `launch`.\n"
     "shared_bytes : int\n    As in `launch`.\n\n"
     "Returns\n-------\ncallable\n\n"
     "Raises\n------\nValueError\n    If one grid cannot have so many threads.\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef kernel_attributes[] = {
    {"name", kernel_get_name, NULL, "The name by which the module has it, a str.", NULL},
    {"module", kernel_get_module, NULL, "The `Module` that it belongs to.", NULL},
    {"attributes", kernel_get_attributes, NULL,
     "What the kernel takes of the GPU, a named tuple: registers of a thread; shared_bytes of a "
     "block,\nnot counting dynamic ones; local_bytes of a thread; constant_bytes; max_threads of a "
     "block;\nptx_version and binary_version, 90 for 9.0.",
     NULL},
    {"max_dynamic_shared_bytes", kernel_get_dynamic_bytes, kernel_set_dynamic_bytes_attribute,
     "The most bytes of dynamic shared memory that a block can be launched with; may be set, to "
     "more\nthan the 48 KiB that every kernel may have.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef kernel_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(KernelObject, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_doc,
     "A kernel of a `Module`: launched as ``kernel[grid, block](*args)``.\n\n"
     "``kernel[grid, block, stream, shared_bytes]`` also names the stream, and the bytes of\n"
     "dynamic shared memory of a block. Grid and block are an int or a tuple of up to three.\n\n"
     "Arguments that are pointers are arrays: on the GPU they are passed as they are, a\n"
     "`DeviceArray` or any other library's, and the launch is queued in the order of their\n"
     "streams; NumPy arrays are copied there and back around the launch, which waits for that,\n"
     "as `In`, `Out` and `InOut` say. A plain one is `InOut`, or `In` where the parameter is\n"
     "declared ``const``; a page-locked one is used in place. `Pointer` passes an address.\n\n"
     "Arguments that are values are numbers: Python's, which are checked to fit, and NumPy\n"
     "scalars, which have to be of the very type; structures are NumPy's structured scalars.\n\n"
     "Number, sizes and, as far as the source tells them, types are checked before the launch.\n\n"
     "Attributes\n----------\n"
     "name : str\n    The name by which the module has it.\n"
     "module : Module\n    The module that it belongs to.\n"
     "attributes : tuple\n    What it takes of the GPU: registers and so on.\n"
     "max_dynamic_shared_bytes : int\n    May be set; see `shared_bytes` of `launch`.\n"},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_repr, kernel_repr},
    {Py_tp_str, kernel_str},
    {Py_mp_subscript, kernel_subscript},
    {Py_tp_methods, kernel_methods},
    {Py_tp_getset, kernel_attributes},
    {Py_tp_members, kernel_members},
    {0, NULL},
};

static PyType_Spec kernel_spec = {
    .name = "gpuops.Kernel",
    .basicsize = sizeof(KernelObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = kernel_slots,
};

/* What Kernel.attributes is; Python's own named tuples have all that one expects of them. */
static PyObject *new_attributes_type(void)
{
    PyObject *collections = PyImport_ImportModule("collections");
    PyObject *name = PyUnicode_FromString("gpuops"), *type = NULL;
    if (collections != NULL && name != NULL)
        type = PyObject_CallMethod(collections, "namedtuple", "ss", "KernelAttributes",
                                   "registers shared_bytes local_bytes constant_bytes max_threads "
                                   "ptx_version binary_version");
    if (type != NULL && PyObject_SetAttrString(type, "__module__", name) < 0) Py_CLEAR(type);
    Py_XDECREF(name);
    Py_XDECREF(collections);
    return type;
}

int add_kernel_types(PyObject *module, State *state)
{
    state->kernel_type = add_type(module, &kernel_spec);
    if (state->kernel_type == NULL) return -1;
    state->launcher_type = new_type(module, &launcher_spec);
    if (state->launcher_type == NULL) return -1;
    state->attributes_type = new_attributes_type();
    return state->attributes_type == NULL ? -1 : 0;
}
