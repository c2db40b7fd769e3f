/* What stands around an argument of a kernel: In, Out and InOut say what the kernel does with an
 * array, and Pointer is an address that is passed on as it is. */
#include "rtc.h"

static PyObject *wrapper_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *array;
    if (keywords != NULL && PyDict_Size(keywords) > 0)
        return PyErr_Format(PyExc_TypeError, "In, Out and InOut take no keyword arguments");
    if (!PyArg_ParseTuple(args, "O:In, Out and InOut", &array)) return NULL;
    WrapperObject *wrapper = PyObject_New(WrapperObject, type);
    if (wrapper != NULL) wrapper->array = Py_NewRef(array);
    return (PyObject *)wrapper;
}

static void wrapper_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(((WrapperObject *)self)->array);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *wrapper_get_array(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(((WrapperObject *)self)->array);
}

static PyObject *wrapper_repr(PyObject *self)
{
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(self), "__name__");
    if (name == NULL) return NULL;
    PyObject *text = PyUnicode_FromFormat("%U(%R)", name, ((WrapperObject *)self)->array);
    Py_DECREF(name);
    return text;
}

static PyGetSetDef wrapper_attributes[] = {
    {"array", wrapper_get_array, NULL, "The array.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define WRAPPER_SLOTS(doc)                                                                         \
    {                                                                                              \
        {Py_tp_doc, doc},                                                                          \
        {Py_tp_new, wrapper_new},                                                                  \
        {Py_tp_dealloc, wrapper_dealloc},                                                          \
        {Py_tp_repr, wrapper_repr},                                                                \
        {Py_tp_getset, wrapper_attributes},                                                        \
        {0, NULL},                                                                                 \
    }

static PyType_Slot in_slots[] = WRAPPER_SLOTS(
    "In(array, /)\n--\n\n"
    "An argument of a kernel that it only reads.\n\n"
    "An array on the host is copied to the GPU before the launch, and not back. It is what a\n"
    "parameter declared ``const`` gets without a word.\n\n"
    "Parameters\n----------\narray : array_like\n    A NumPy array, or one on the GPU.\n\n"
    "See Also\n--------\nOut : An array that the kernel writes.\n"
    "InOut : An array that it reads and writes.\n");

static PyType_Slot out_slots[] = WRAPPER_SLOTS(
    "Out(array, /)\n--\n\n"
    "An argument of a kernel that it writes from the first element to the last.\n\n"
    "An array on the host is copied back after the launch, and not to the GPU before. What the\n"
    "kernel does not write is undefined afterwards.\n\n"
    "Parameters\n----------\narray : array_like\n    A NumPy array, or one on the GPU.\n\n"
    "See Also\n--------\nIn : An array that the kernel only reads.\n"
    "InOut : An array that it reads and writes.\n");

static PyType_Slot in_out_slots[] = WRAPPER_SLOTS(
    "InOut(array, /)\n--\n\n"
    "An argument of a kernel that it reads and writes.\n\n"
    "An array on the host is copied to the GPU before the launch and back after it. It is what a\n"
    "plain array stands for, unless the parameter is declared ``const``.\n\n"
    "Parameters\n----------\narray : array_like\n    A NumPy array, or one on the GPU.\n\n"
    "See Also\n--------\nIn : An array that the kernel only reads.\n"
    "Out : An array that it writes.\n");

static PyType_Spec wrapper_specs[] = {
    {.name = "gpuops.In",
     .basicsize = sizeof(WrapperObject),
     .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
     .slots = in_slots},
    {.name = "gpuops.Out",
     .basicsize = sizeof(WrapperObject),
     .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
     .slots = out_slots},
    {.name = "gpuops.InOut",
     .basicsize = sizeof(WrapperObject),
     .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
     .slots = in_out_slots},
};

/* Pointer. */

static PyObject *pointer_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", NULL};
    PyObject *object;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:Pointer", names, &object)) return NULL;
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) return NULL;
    const unsigned long long address = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return PyErr_Format(PyExc_OverflowError, "%R is no address: it must be from 0 to 2**64 - 1",
                            object);
    }
    PointerObject *pointer = PyObject_New(PointerObject, type);
    if (pointer != NULL) pointer->address = (uintptr_t)address;
    return (PyObject *)pointer;
}

static void pointer_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *pointer_as_integer(PyObject *self)
{
    return PyLong_FromUnsignedLongLong(((PointerObject *)self)->address);
}

static PyObject *pointer_get_address(PyObject *self, void *unused)
{
    (void)unused;
    return pointer_as_integer(self);
}

static PyObject *pointer_repr(PyObject *self)
{
    char text[40];
    snprintf(text, sizeof text, "Pointer(0x%llx)",
             (unsigned long long)((PointerObject *)self)->address);
    return PyUnicode_FromString(text);
}

static PyGetSetDef pointer_attributes[] = {
    {"address", pointer_get_address, NULL, "The address, an int.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pointer_slots[] = {
    {Py_tp_doc,
     "Pointer(address, /)\n--\n\n"
     "An argument of a kernel that is an address, and is passed on as it is.\n\n"
     "Nothing is checked, nothing is kept alive, and no order is made with other streams: that\n"
     "is all the caller's care. ``Pointer(0)`` is a null pointer.\n\n"
     "Parameters\n----------\naddress : int\n    In the memory of the GPU, such as "
     "`DeviceArray.ptr`.\n\n"
     "Raises\n------\nOverflowError\n    If it does not fit into 64 bits.\n"},
    {Py_tp_new, pointer_new},
    {Py_tp_dealloc, pointer_dealloc},
    {Py_tp_repr, pointer_repr},
    {Py_nb_index, pointer_as_integer},
    {Py_tp_getset, pointer_attributes},
    {0, NULL},
};

static PyType_Spec pointer_spec = {
    .name = "gpuops.Pointer",
    .basicsize = sizeof(PointerObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pointer_slots,
};

int add_argument_types(PyObject *module, State *state)
{
    PyTypeObject **const types[] = {&state->in_type, &state->out_type, &state->in_out_type};
    for (int i = 0; i < 3; i++) {
        *types[i] = add_type(module, &wrapper_specs[i]);
        if (*types[i] == NULL) return -1;
    }
    state->pointer_type = add_type(module, &pointer_spec);
    return state->pointer_type == NULL ? -1 : 0;
}
