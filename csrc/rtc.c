/* Module: machine code that was compiled at run time, its kernels and its variables. */
#include "rtc.h"

static ModuleObject *module_of(PyObject *object)
{
    return (ModuleObject *)object;
}

typedef struct ModuleWork {
    Module *module;
    const char *name;
    const void *cubin;
    size_t cubin_bytes;
    int device;
    void *data;
    int64_t bytes;
} ModuleWork;

static Status do_load(void *context)
{
    ModuleWork *work = context;
    return module_load(work->device, work->cubin, work->cubin_bytes, &work->module);
}

static Status do_release(void *module)
{
    module_release(module);
    return STATUS_OK;
}

static Status do_find_global(void *context)
{
    ModuleWork *work = context;
    return module_global(work->module, work->name, &work->data, &work->bytes);
}

static void module_dealloc(PyObject *self)
{
    ModuleObject *module = module_of(self);
    PyTypeObject *type = Py_TYPE(self);
    CLEAR_WEAK_REFERENCES(self, module->weak_references);
    if (module->module != NULL) (void)without_gil(do_release, module->module);
    Py_DECREF(module->cubin);
    Py_DECREF(module->kernels);
    Py_DECREF(module->globals);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *load_module(PyObject *self, PyObject *args)
{
    State *state = PyModule_GetState(self);
    PyObject *cubin, *kernels, *device, *globals;
    ModuleWork work = {.device = DEVICE_CPU};
    if (!PyArg_ParseTuple(args, "SO!OO!:_load_module", &cubin, &PyDict_Type, &kernels, &device,
                          &PyDict_Type, &globals))
        return NULL;
    if (device != Py_None && read_ordinal(state, device, "compile", &work.device) < 0) return NULL;
    kernels = PyDict_Copy(kernels);
    globals = kernels == NULL ? NULL : PyDict_Copy(globals);
    ModuleObject *module = globals == NULL ? NULL : PyObject_New(ModuleObject, state->module_type);
    if (module == NULL) {
        Py_XDECREF(kernels);
        Py_XDECREF(globals);
        return NULL;
    }
    module->module = NULL;
    module->device = work.device;
    module->cubin = Py_NewRef(cubin);
    module->kernels = kernels;
    module->globals = globals;
    module->weak_references = NULL;
    if (work.device == DEVICE_CPU) return (PyObject *)module;
    work.cubin = PyBytes_AsString(cubin);
    work.cubin_bytes = (size_t)PyBytes_Size(cubin);
    Status status = without_gil(do_load, &work);
    if (status != STATUS_OK) {
        raise_status(state, status, "compile", work.device);
        Py_DECREF((PyObject *)module);
        return NULL;
    }
    module->module = work.module;
    module_limits(work.module, &module->limits);
    return (PyObject *)module;
}

static int require_device(const ModuleObject *module)
{
    if (module->module != NULL) return 0;
    PyErr_SetString(PyExc_RuntimeError,
                    "this module was compiled for an architecture that the options name, and is "
                    "loaded on no device: compile it without --gpu-architecture, on a machine with "
                    "a GPU, to launch its kernels");
    return -1;
}

static void *refuse_name(const ModuleObject *module, PyObject *name)
{
    PyObject *separator = PyUnicode_FromString(", ");
    PyObject *names = separator == NULL ? NULL : PyUnicode_Join(separator, module->kernels);
    PyObject *text =
        names == NULL
            ? NULL
            : PyUnicode_FromFormat("there is no kernel %R in this module: it has %S. A template is "
                                   "compiled for the types that name_expressions names",
                                   name, PyUnicode_GetLength(names) > 0 ? names : Py_None);
    if (text != NULL) PyErr_SetObject(PyExc_KeyError, text);
    Py_XDECREF(text);
    Py_XDECREF(names);
    Py_XDECREF(separator);
    return NULL;
}

static PyObject *module_get_function(PyObject *self, PyObject *name)
{
    ModuleObject *module = module_of(self);
    if (!PyUnicode_Check(name))
        return PyErr_Format(PyExc_TypeError, "a kernel is found by its name, a str, not by %R",
                            name);
    PyObject *entry = PyDict_GetItemWithError(module->kernels, name);
    if (entry == NULL) return PyErr_Occurred() ? NULL : refuse_name(module, name);
    if (require_device(module) < 0) return NULL;
    return new_kernel(state_of(Py_TYPE(self)), module, name, entry);
}

static void release_lower(void *module)
{
    module_release(module);
}

static PyObject *array_of_global(State *state, ModuleObject *module, PyArray_Descr *descr,
                                 const ModuleWork *work)
{
    static char nothing[1];
    npy_intp count = (npy_intp)(work->bytes / PyDataType_ELSIZE(descr));
    PyObject *result = NULL;
    /* An ndarray that nobody may look into, in which sub-arrays have become axes. */
    Py_INCREF((PyObject *)descr);
    PyArrayObject *layout = (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, descr, 1, &count,
                                                                  NULL, nothing, 0, NULL);
    if (layout == NULL) return NULL;
    descr = PyArray_DESCR(layout);
    Stream *stream = check_dtype(descr, NULL) < 0
                         ? NULL
                         : borrowed_stream(state, module->device, 0, "get_global");
    if (stream == NULL) goto done;
    int64_t shape[GPUOPS_MAX_DIMS];
    for (int i = 0; i < PyArray_NDIM(layout); i++) shape[i] = PyArray_DIM(layout, i);
    const Owner owner = {release_lower, module_hold(module->module)};
    Memory *memory;
    Status status = memory_adopt(work->data, work->bytes, stream, owner, &memory);
    release_stream(stream);
    if (status == STATUS_OK) {
        result =
            array_new(state, memory, work->data, descr, PyArray_NDIM(layout), shape, NULL, false);
    } else {
        module_release(module->module);
        raise_status(state, status, "get_global", module->device);
    }
done:
    release(layout);
    return result;
}

static PyObject *module_get_global(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", "dtype", NULL};
    State *state = state_of(Py_TYPE(self));
    ModuleObject *module = module_of(self);
    PyObject *name, *result = NULL;
    PyArray_Descr *descr = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "U|O&:get_global", names, &name,
                                     PyArray_DescrConverter2, &descr))
        return NULL;
    if (descr == NULL) descr = PyArray_DescrFromType(NPY_UBYTE);
    if (descr == NULL || require_device(module) < 0 || check_dtype(descr, NULL) < 0) goto done;
    PyObject *lowered = PyDict_GetItemWithError(module->globals, name);
    if (lowered == NULL && PyErr_Occurred()) goto done;
    ModuleWork work = {.module = module->module};
    work.name = PyUnicode_AsUTF8AndSize(lowered == NULL ? name : lowered, NULL);
    if (work.name == NULL) goto done;
    Status status = without_gil(do_find_global, &work);
    if (status == STATUS_VALUE_ERROR) {
        PyObject *text = PyUnicode_FromFormat(
            "there is no global variable %R in this module: one in a namespace is found by the "
            "name that name_expressions gives, such as '&name'; one that no kernel uses is left "
            "out",
            name);
        if (text != NULL) PyErr_SetObject(PyExc_KeyError, text);
        Py_XDECREF(text);
    } else if (status != STATUS_OK) {
        raise_status(state, status, "get_global", module->device);
    } else if (PyDataType_ELSIZE(descr) == 0 || work.bytes % PyDataType_ELSIZE(descr) != 0) {
        PyErr_Format(PyExc_ValueError,
                     "the global variable %R has %lld bytes, which elements of %S do not fill",
                     name, (long long)work.bytes, descr);
    } else {
        result = array_of_global(state, module, descr, &work);
    }
done:
    Py_XDECREF((PyObject *)descr);
    return result;
}

static PyObject *module_get_cubin(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(module_of(self)->cubin);
}

static PyObject *module_get_kernels(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *names = PyDict_Keys(module_of(self)->kernels);
    PyObject *tuple = names == NULL ? NULL : PyList_AsTuple(names);
    Py_XDECREF(names);
    return tuple;
}

static PyObject *module_get_device(PyObject *self, void *unused)
{
    (void)unused;
    const ModuleObject *module = module_of(self);
    if (module->module == NULL) Py_RETURN_NONE;
    return PyLong_FromLong(module->device);
}

static PyObject *module_repr(PyObject *self)
{
    const ModuleObject *module = module_of(self);
    PyObject *separator = PyUnicode_FromString(", ");
    PyObject *names = separator == NULL ? NULL : PyUnicode_Join(separator, module->kernels);
    PyObject *text = NULL;
    if (names != NULL && module->module == NULL)
        text = PyUnicode_FromFormat("<gpuops.Module on no device: %U>", names);
    else if (names != NULL)
        text = PyUnicode_FromFormat("<gpuops.Module on cuda:%d: %U>", module->device, names);
    Py_XDECREF(names);
    Py_XDECREF(separator);
    return text;
}

static PyMethodDef module_type_methods[] = {
    {"get_function", module_get_function, METH_O,
     "get_function($self, name, /)\n--\n\n"
     "A kernel of the module; ``module[name]`` is the same.\n\n"
     "Parameters\n----------\n"
     "name : str\n    As in the source, or a template as `name_expressions` wrote it.\n\n"
     "Returns\n-------\nKernel\n\n"
     "Raises\n------\nKeyError\n    If there is no such kernel; the message lists those there "
     "are.\n"
     "RuntimeError\n    If the module is loaded on no device.\n"},
    {"get_global", (PyCFunction)(void (*)(void))module_get_global, METH_VARARGS | METH_KEYWORDS,
     "get_global($self, name, /, dtype='uint8')\n--\n\n"
     "A ``__device__`` or ``__constant__`` variable of the module, in the memory of the GPU.\n\n"
     "Parameters\n----------\n"
     "name : str\n    As in the source.\n"
     "dtype : dtype_like\n    Of the elements; the module knows only how many bytes there are.\n\n"
     "Returns\n-------\nDeviceArray\n    With one axis. It keeps the module loaded.\n\n"
     "Raises\n------\nKeyError\n    If there is no such variable.\n"
     "ValueError\n    If its bytes are no whole number of elements.\n"
     "RuntimeError\n    If the module is loaded on no device.\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef module_attributes[] = {
    {"cubin", module_get_cubin, NULL, "The machine code, as bytes.", NULL},
    {"kernels", module_get_kernels, NULL, "The names of the kernels, a tuple of str.", NULL},
    {"device", module_get_device, NULL,
     "The ordinal of the GPU that it is loaded on, an int; None: it is loaded on none.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef module_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ModuleObject, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot module_slots[] = {
    {Py_tp_doc,
     "What `compile` returns: kernels, and variables on the GPU.\n\n"
     "It is unloaded when neither it nor a kernel or variable of it is referred to any more.\n\n"
     "Attributes\n----------\n"
     "kernels : tuple of str\n    The names of its kernels: ``module[name]`` is one.\n"
     "device : int or None\n    The ordinal of the GPU that it is loaded on.\n"
     "cubin : bytes\n    The machine code, an ELF file.\n\n"
     "See Also\n--------\ncompile : Compile CUDA C++ from a string.\n"},
    {Py_tp_dealloc, module_dealloc},
    {Py_tp_repr, module_repr},
    {Py_mp_subscript, module_get_function},
    {Py_tp_methods, module_type_methods},
    {Py_tp_getset, module_attributes},
    {Py_tp_members, module_members},
    {0, NULL},
};

static PyType_Spec module_spec = {
    .name = "gpuops.Module",
    .basicsize = sizeof(ModuleObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = module_slots,
};

int add_module_types(PyObject *module, State *state)
{
    state->module_type = add_type(module, &module_spec);
    if (state->module_type == NULL) return -1;
    if (add_kernel_types(module, state) < 0) return -1;
    return add_argument_types(module, state);
}

PyMethodDef module_methods[] = {
    {"_load_module", load_module, METH_VARARGS,
     "_load_module($module, cubin, kernels, device, globals, /)\n--\n\n"
     "The Module of machine code; kernels has a pair for each name, see csrc/rtc.h."},
    {NULL, NULL, 0, NULL},
};
