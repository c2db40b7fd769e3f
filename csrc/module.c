/* The module: its state, its classes of exceptions, its table of methods. */
#define GPUOPS_IMPORTS_NUMPY
#include "core.h"

/* One thunk per row. */
#define OPERATOR(name, stem, work, signature, doc)                                                 \
    static PyObject *name##_thunk(PyObject *module, PyObject *const *args, Py_ssize_t count,       \
                                  PyObject *names)                                                 \
    {                                                                                              \
        return call_operator(module, OPERATOR_##name, args, count, names);                         \
    }
#include "ops.def"
#undef OPERATOR

static PyMethodDef operator_methods[] = {
#define OPERATOR(name, stem, work, signature, doc)                                                 \
    {#name, (PyCFunction)(void (*)(void))name##_thunk, METH_FASTCALL | METH_KEYWORDS,              \
     #name "($module, " signature ")\n--\n\n" doc},
#include "ops.def"
#undef OPERATOR
    {NULL, NULL, 0, NULL},
};

static PyObject *add_exception(PyObject *module, const char *name, const char *doc, PyObject *base)
{
    PyObject *error = PyErr_NewExceptionWithDoc(name, doc, base, NULL);
    if (error != NULL && PyModule_AddObjectRef(module, name + strlen("gpuops."), error) < 0)
        Py_CLEAR(error);
    return error;
}

static PyObject *shut_down(PyObject *nothing, PyObject *unused)
{
    (void)nothing;
    (void)unused;
    runtime_shut_down();
    Py_RETURN_NONE;
}

/* From then on nobody can tell what the driver has already taken down. The function is not the
 * module's, which it would keep alive where the import fails after all. */
static int leave_at_exit(void)
{
    static PyMethodDef method = {"_shut_down", shut_down, METH_NOARGS,
                                 "_shut_down()\n--\n\nLeave what is left to the driver."};
    PyObject *function = PyCFunction_NewEx(&method, NULL, NULL);
    PyObject *atexit = function == NULL ? NULL : PyImport_ImportModule("atexit");
    PyObject *done = atexit == NULL ? NULL : PyObject_CallMethod(atexit, "register", "O", function);
    const int result = done == NULL ? -1 : 0;
    Py_XDECREF(done);
    Py_XDECREF(atexit);
    Py_XDECREF(function);
    return result;
}

/* Devices, streams and memory are the process's, and would be shut down with any interpreter. From
 * 3.12 on Python itself keeps the others out, see below. */
static int require_main_interpreter(void)
{
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return 0;
    PyErr_SetString(PyExc_ImportError, "gpuops loads in the main interpreter only, as NumPy does");
    return -1;
}

/* As NumPy's import_array1, which makes an ImportError even of a want of memory. */
static int import_numpy(void)
{
    if (_import_array() == 0) return 0;
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
    PyErr_Print();
    PyErr_SetString(PyExc_ImportError, "numpy._core.multiarray failed to import");
    return -1;
}

static int execute(PyObject *module)
{
    if (require_main_interpreter() < 0) return -1;
    if (import_numpy() < 0 || import_ufuncs() < 0) return -1;
    blas_set_finder(find_blas);
    start_ticks();
    if (keep_environment() < 0) return -1;
    State *state = PyModule_GetState(module);

    state->device_error = add_exception(module, "gpuops.DeviceError",
                                        "The GPU cannot be used, or failed.\n\n"
                                        "`code` and `name` are CUDA's (0 and '' where it took no "
                                        "part), `operator` is the function\n"
                                        "that was called.",
                                        PyExc_RuntimeError);
    if (state->device_error == NULL) return -1;
    state->device_lost_error = add_exception(
        module, "gpuops.DeviceLostError",
        "A fatal error: this process cannot use the GPU any more; the CPU backend goes on.",
        state->device_error);
    if (state->device_lost_error == NULL) return -1;
    state->forked_process_error = add_exception(
        module, "gpuops.ForkedProcessError",
        "GPU work in a process that was forked after CUDA came into use; spawn it instead.",
        PyExc_RuntimeError);
    if (state->forked_process_error == NULL) return -1;

    for (int i = 0; i < OPERATORS; i++) {
        state->signatures[i].op = operators[i];
        if (read_signature(&state->signatures[i]) < 0) return -1;
    }
    state->libraries = PyDict_New();
    state->exchange_api_name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    state->requires_grad_name = PyUnicode_InternFromString("requires_grad");
    state->is_conj_name = PyUnicode_InternFromString("is_conj");
    state->is_neg_name = PyUnicode_InternFromString("is_neg");
    if (state->libraries == NULL || state->exchange_api_name == NULL ||
        state->requires_grad_name == NULL || state->is_conj_name == NULL ||
        state->is_neg_name == NULL)
        return -1;
    if (add_array_type(module, state) < 0 || add_stream_types(module, state) < 0 ||
        add_exchange_api(state->array_type) < 0 || add_memory_info_type(module) < 0 ||
        add_pin_type(module, state) < 0 || add_module_types(module, state) < 0)
        return -1;
    PyMethodDef *const methods[] = {operator_methods, create_methods, stream_methods,
                                    pinned_methods,   nvrtc_methods,  module_methods,
                                    route_methods};
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++)
        if (PyModule_AddFunctions(module, methods[i]) < 0) return -1;
    if (PyModule_AddStringConstant(module, "__version__", GPUOPS_VERSION) < 0) return -1;
    return leave_at_exit();
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    Py_VISIT(state->device_error);
    Py_VISIT(state->device_lost_error);
    Py_VISIT(state->forked_process_error);
    Py_VISIT(state->array_type);
    Py_VISIT(state->stream_type);
    Py_VISIT(state->event_type);
    Py_VISIT(state->pin_type);
    Py_VISIT(state->module_type);
    Py_VISIT(state->kernel_type);
    Py_VISIT(state->launcher_type);
    Py_VISIT(state->pointer_type);
    Py_VISIT(state->in_type);
    Py_VISIT(state->out_type);
    Py_VISIT(state->in_out_type);
    Py_VISIT(state->attributes_type);
    Py_VISIT(state->numpy_matmul);
    Py_VISIT(state->libraries);
    return 0;
}

static int clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->device_error);
    Py_CLEAR(state->device_lost_error);
    Py_CLEAR(state->forked_process_error);
    Py_CLEAR(state->array_type);
    Py_CLEAR(state->stream_type);
    Py_CLEAR(state->event_type);
    Py_CLEAR(state->pin_type);
    Py_CLEAR(state->module_type);
    Py_CLEAR(state->kernel_type);
    Py_CLEAR(state->launcher_type);
    Py_CLEAR(state->pointer_type);
    Py_CLEAR(state->in_type);
    Py_CLEAR(state->out_type);
    Py_CLEAR(state->in_out_type);
    Py_CLEAR(state->attributes_type);
    Py_CLEAR(state->numpy_matmul);
    Py_CLEAR(state->libraries);
    Py_CLEAR(state->exchange_api_name);
    Py_CLEAR(state->requires_grad_name);
    Py_CLEAR(state->is_conj_name);
    Py_CLEAR(state->is_neg_name);
    for (int i = 0; i < OPERATORS; i++)
        for (int j = 0; j < state->signatures[i].count; j++)
            Py_CLEAR(state->signatures[i].parameters[j].name);
    return 0;
}

static void free_module(void *module)
{
    clear(module);
}

/* Slots that CPython knows from 3.12 and 3.13 on. One binary serves all versions from 3.11, so they
 * are named by number and left out where the interpreter would refuse them. */
enum { SLOT_MULTIPLE_INTERPRETERS = 3, SLOT_GIL = 4 };

PyMODINIT_FUNC PyInit__core(void)
{
    static PyModuleDef_Slot slots[4];
    static struct PyModuleDef definition = {
        .m_base = PyModuleDef_HEAD_INIT,
        .m_name = "gpuops._core",
        .m_doc = "The C core of gpuops.",
        .m_size = sizeof(State),
        .m_methods = device_methods,
        .m_slots = slots,
        .m_traverse = traverse,
        .m_clear = clear,
        .m_free = free_module,
    };
    int count = 0;
    slots[count++] = (PyModuleDef_Slot){Py_mod_exec, (void *)execute};
    /* NumPy itself loads in the main interpreter only. */
    if (Py_Version >= 0x030C0000)
        slots[count++] = (PyModuleDef_Slot){SLOT_MULTIPLE_INTERPRETERS, (void *)0};
    if (Py_Version >= 0x030D0000) slots[count++] = (PyModuleDef_Slot){SLOT_GIL, (void *)1};
    slots[count] = (PyModuleDef_Slot){0, NULL};
    return PyModuleDef_Init(&definition);
}
