/* DLPack's C exchange API: arrays of types that offer it, results of their kind, and our own. */
#include "foreign.h"

static const char EXCHANGE_API[] = "dlpack_exchange_api";

enum { MOST_OLD_APIS = 16 };

const DLPackExchangeAPI *find_api(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, EXCHANGE_API)) return NULL;
    const DLPackExchangeAPIHeader *header = PyCapsule_GetPointer(capsule, EXCHANGE_API);
    for (int i = 0; i < MOST_OLD_APIS && header != NULL; i++) {
        if (header->version.major == DLPACK_MAJOR) break;
        header = header->prev_api;
    }
    if (header == NULL || header->version.major != DLPACK_MAJOR) return NULL;
    const DLPackExchangeAPI *api = (const DLPackExchangeAPI *)header;
    const bool complete = api->managed_tensor_allocator != NULL &&
                          api->managed_tensor_from_py_object_no_sync != NULL &&
                          api->managed_tensor_to_py_object_no_sync != NULL &&
                          api->current_work_stream != NULL;
    return complete ? api : NULL;
}

/* Torch, for one, tells its reasons in a RuntimeError that goes on about its C++ sources. */
static int refuse_export(const char *name)
{
    PyObject *type, *value, *traceback, *text = NULL;
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_BufferError, "%s could not be exported, for reasons it does not tell",
                     name);
        return -1;
    }
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value != NULL) text = PyObject_Str(value);
    const char *reason = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, NULL);
    if (reason == NULL) {
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    } else {
        char line[256];
        snprintf(line, sizeof line, "%.*s", (int)strcspn(reason, "\n"), reason);
        PyErr_Format(PyExc_BufferError, "%s cannot be shared: %s", name, line);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    }
    Py_XDECREF(text);
    return -1;
}

/* 1 if an attribute of an object, or the method of that name, is true. */
static int is_true(PyObject *value)
{
    if (value == NULL) return -1;
    int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

/* The exchange API passes on the memory alone: of a tensor that is to be negated or conjugated when
 * it is read, or that autograd follows, it would be the wrong values, or a result without its
 * gradient. Only floating-point tensors can be so. */
static int check_autograd(State *state, const Operand *operand)
{
    PyObject *object = operand->object;
    const char *name = operand->name;
    const int code = operand->dtype.code;
    if (code == DL_INT || code == DL_UINT || code == DL_BOOL) return 0;
    int truth = is_true(PyObject_GetAttr(object, state->requires_grad_name));
    if (truth > 0)
        PyErr_Format(PyExc_BufferError,
                     "%s requires grad, and autograd does not know of gpuops: pass %s.detach()",
                     name, name);
    if (truth == 0 && code == DL_COMPLEX) {
        truth = is_true(PyObject_CallMethodObjArgs(object, state->is_conj_name, NULL));
        if (truth > 0)
            PyErr_Format(PyExc_BufferError,
                         "%s is the conjugate of what its memory holds: pass %s.resolve_conj()",
                         name, name);
    }
    if (truth == 0) {
        truth = is_true(PyObject_CallMethodObjArgs(object, state->is_neg_name, NULL));
        if (truth > 0)
            PyErr_Format(PyExc_BufferError,
                         "%s is the negative of what its memory holds: pass %s.resolve_neg()", name,
                         name);
    }
    return truth == 0 ? 0 : -1;
}

static int export_managed(Operand *operand)
{
    DLManagedTensorVersioned *tensor = NULL;
    if (operand->api->managed_tensor_from_py_object_no_sync(operand->object, &tensor) != 0)
        return refuse_export(operand->name);
    if (tensor == NULL || tensor->version.major != DLPACK_MAJOR) {
        dlpack_delete(tensor);
        PyErr_Format(PyExc_BufferError, "%s is not exported as DLPack %d", operand->name,
                     (int)DLPACK_MAJOR);
        return -1;
    }
    operand->exported = tensor;
    operand->read_only = (tensor->flags & DL_READ_ONLY) != 0;
    return 0;
}

/* The stream on which the library of an operand works now. */
static int set_work_stream(State *state, Operand *operand, int device)
{
    void *handle = NULL;
    if (operand->api->current_work_stream(DL_CUDA, device, &handle) != 0)
        return refuse_export(operand->name);
    operand->stream = borrowed_stream(state, device, (uintptr_t)handle, operand->op);
    return operand->stream == NULL ? -1 : 0;
}

/* For those who keep the memory beyond the call; what is borrowed is good for no longer. */
static int import_exchange(State *state, Operand *operand, Stream *stream)
{
    (void)stream;
    if (operand->exported == NULL && export_managed(operand) < 0) return -1;
    DLManagedTensorVersioned *exported = operand->exported;
    const Taken taken = {{dlpack_delete, exported}, &exported->dl_tensor, operand->read_only};
    operand->exported = NULL;
    return adopt_tensor(state, operand, &taken, operand->stream);
}

int classify_exchange(State *state, const Library *library, Operand *operand)
{
    const DLPackExchangeAPI *api = library->api;
    DLTensor borrowed;
    operand->kind = KIND_EXCHANGE;
    operand->api = api;
    /* The borrowed form is the faster one, and it is good as long as the object lives. But it does
     * not say whether the memory may be written. */
    const bool may_borrow =
        api->dltensor_from_py_object_no_sync != NULL && operand->use == USE_READ;
    if (may_borrow) {
        memset(&borrowed, 0, sizeof borrowed);
        if (api->dltensor_from_py_object_no_sync(operand->object, &borrowed) != 0)
            return refuse_export(operand->name);
    } else if (export_managed(operand) < 0) {
        return -1;
    }
    const DLTensor *tensor = may_borrow ? &borrowed : &operand->exported->dl_tensor;
    const DLDevice device = tensor->device;
    if (read_tensor(operand->name, tensor, &operand->view) < 0) return -1;
    set_dtype(operand, descr_of_dlpack(tensor->dtype), tensor->dtype);
    if (library->autograd && check_autograd(state, operand) < 0) return -1;
    if (is_host(device)) return set_host_array(operand, Py_NewRef(operand->object)) < 0 ? -1 : 1;
    if (!is_cuda(device)) return refuse_device(operand->name, device.device_type);
    if (check_ordinal(state, operand->op, operand->name, device.device_id) < 0 ||
        set_work_stream(state, operand, device.device_id) < 0)
        return -1;
    operand->view.device = device.device_id;
    operand->view.stream = operand->stream;
    operand->import = import_exchange;
    return 1;
}

/* Results of another library's kind. */

typedef struct AllocationError {
    char kind[64], message[512];
} AllocationError;

static void set_allocation_error(void *context, const char *kind, const char *message)
{
    AllocationError *error = context;
    snprintf(error->kind, sizeof error->kind, "%s", kind == NULL ? "" : kind);
    snprintf(error->message, sizeof error->message, "%s", message == NULL ? "" : message);
}

DLManagedTensorVersioned *exchange_allocate(const DLPackExchangeAPI *api, PyTypeObject *type,
                                            DLDataType dtype, View *view)
{
    DLTensor prototype = {
        .device = {DL_CUDA, view->device},
        .ndim = view->ndim,
        .dtype = dtype,
        .shape = view->shape,
    };
    const size_t sizes = (size_t)view->ndim * sizeof(int64_t);
    DLManagedTensorVersioned *tensor = NULL;
    AllocationError error = {"", ""};
    View found;
    if (api->managed_tensor_allocator(&prototype, &tensor, &error, set_allocation_error) != 0 ||
        tensor == NULL) {
        if (PyErr_Occurred()) return NULL;
        const bool no_memory = strcmp(error.kind, "MemoryError") == 0 ||
                               strstr(error.message, "out of memory") != NULL ||
                               strstr(error.message, "can't allocate memory") != NULL;
        error.message[strcspn(error.message, "\n")] = '\0';
        PyErr_Format(no_memory ? PyExc_MemoryError : PyExc_RuntimeError,
                     "%R could not allocate the result: %s", type, error.message);
        return NULL;
    }
    const DLTensor *made = &tensor->dl_tensor;
    if (tensor->version.major == DLPACK_MAJOR && read_tensor("the result", made, &found) == 0 &&
        made->device.device_type == DL_CUDA && made->device.device_id == view->device &&
        memcmp(&made->dtype, &dtype, sizeof dtype) == 0 && found.item_bytes == view->item_bytes &&
        found.ndim == view->ndim && memcmp(found.shape, view->shape, sizes) == 0) {
        view->data = found.data;
        memcpy(view->strides, found.strides, sizes);
        return tensor;
    }
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_BufferError, "%R allocated something else than was asked for", type);
    dlpack_delete(tensor);
    return NULL;
}

PyObject *exchange_finish(const DLPackExchangeAPI *api, PyTypeObject *type,
                          DLManagedTensorVersioned *tensor)
{
    void *object = NULL;
    if (api->managed_tensor_to_py_object_no_sync(tensor, &object) == 0 && object != NULL)
        return object;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_RuntimeError, "%R could not take the result over", type);
    return NULL;
}

PyObject *exchange_host_result(const Operand *like, PyArrayObject *array)
{
    View view;
    DLDataType dtype = dlpack_dtype(PyArray_DESCR(array));
    /* Of a dtype that NumPy has no word for, both are plain bytes. */
    if (dtype.code == DL_NONE && PyArray_EquivTypes(PyArray_DESCR(array), like->descr))
        dtype = like->dtype;
    if (fill_view(array, "the result", &view) < 0) return NULL;
    if (dtype.code == DL_NONE) {
        PyErr_Format(PyExc_BufferError, "DLPack has no word for dtype %S", PyArray_DESCR(array));
        return NULL;
    }
    Export *export = new_export(&view, dtype, (DLDevice){DL_CPU, 0}, 0, DLPACK_MINOR);
    if (export == NULL) return NULL;
    export->object = Py_NewRef((PyObject *)array);
    return exchange_finish(like->api, Py_TYPE(like->object), &export->tensor.versioned);
}

/* The exchange API that we offer.
 *
 * Its functions are not told which module they belong to, and may be called when it is long gone.
 * So they look it up by name; NumPy, and with it the module, is in the main interpreter only. */

static char module_name[128];
static _Atomic(PyModuleDef *) module_definition;

static State *own_state(void)
{
    PyObject *name = PyUnicode_FromString(module_name);
    PyObject *module = name == NULL ? NULL : PyImport_GetModule(name);
    State *state = NULL;
    if (module != NULL && PyModule_Check(module) &&
        PyModule_GetDef(module) == atomic_load(&module_definition))
        state = PyModule_GetState(module);
    if (state == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "gpuops has been unloaded");
    /* What keeps the module now is what kept it before. */
    Py_XDECREF(module);
    Py_XDECREF(name);
    return state;
}

static Stream *work_stream(State *state, DLDevice device)
{
    if (is_cuda(device))
        return check_ordinal(state, "from_dlpack", "the tensor", device.device_id) < 0
                   ? NULL
                   : current_stream(state, device.device_id);
    refuse_device("the tensor", device.device_type);
    return NULL;
}

static int api_from_object(void *object, DLManagedTensorVersioned **out)
{
    State *state = own_state();
    *out = NULL;
    if (state == NULL) return -1;
    if (Py_TYPE((PyObject *)object) != state->array_type) {
        PyErr_Format(PyExc_TypeError, "expected a gpuops.DeviceArray, not %R",
                     Py_TYPE((PyObject *)object));
        return -1;
    }
    /* The stream on which the consumer is to work is the current one, and not the array's own. */
    View view;
    array_view(object, &view);
    Stream *consumer = current_stream(state, view.device);
    if (consumer == NULL) return -1;
    if (await_stream(state, consumer, view.stream, "DLPack") < 0) {
        release_stream(consumer);
        return -1;
    }
    Export *export = export_array(object, consumer, 0, DLPACK_MINOR);
    if (export == NULL) return -1;
    *out = &export->tensor.versioned;
    return 0;
}

static int api_to_object(DLManagedTensorVersioned *tensor, void **out)
{
    State *state = own_state();
    const DLDevice device = tensor->dl_tensor.device;
    Taken taken = {{dlpack_delete, tensor}, &tensor->dl_tensor, false};
    Operand operand = {.op = "from_dlpack", .name = "the tensor", .view.device = device.device_id};
    Stream *stream = NULL;
    *out = NULL;
    if (state == NULL) {
        /* The exception is set. */
    } else if (tensor->version.major != DLPACK_MAJOR) {
        PyErr_Format(PyExc_BufferError, "the tensor is of DLPack %u.%u, and gpuops reads %d.x",
                     tensor->version.major, tensor->version.minor, (int)DLPACK_MAJOR);
    } else if (is_host(device)) {
        PyErr_SetString(PyExc_BufferError,
                        "the tensor is on the CPU, and a DeviceArray on a GPU: to_device() copies");
    } else {
        stream = work_stream(state, device);
    }
    if (stream == NULL) {
        drop_owner(taken.owner);
        return -1;
    }
    taken.read_only = (tensor->flags & DL_READ_ONLY) != 0;
    if (adopt_tensor(state, &operand, &taken, stream) == 0)
        *out = array_of_operand(state, &operand);
    operand_clear(&operand);
    release_stream(stream);
    return *out == NULL ? -1 : 0;
}

static int api_work_stream(int32_t device_type, int32_t device_id, void **out)
{
    *out = NULL;
    const DLDevice device = {device_type, device_id};
    if (is_host(device)) return 0;
    State *state = own_state();
    Stream *stream = state == NULL ? NULL : work_stream(state, device);
    if (stream == NULL) return -1;
    *out = (void *)stream_handle(stream);
    release_stream(stream);
    return 0;
}

static Export *allocate_like(State *state, const DLTensor *prototype)
{
    View view;
    int64_t low = 0, high = 0;
    view.item_bytes = item_bytes_of(prototype->dtype);
    if (view.item_bytes == 0) {
        PyErr_SetString(PyExc_BufferError, "gpuops does not know elements of that type");
        return NULL;
    }
    if (read_sizes("the prototype", prototype->ndim, prototype->shape, NULL, 1, &view, &low,
                   &high) < 0)
        return NULL;
    Stream *stream = work_stream(state, prototype->device);
    if (stream == NULL) return NULL;
    Memory *memory = allocate_memory(state, stream, high, "DLPack");
    release_stream(stream);
    if (memory == NULL) return NULL;
    view.data = memory_data(memory);
    const DLDevice device = {DL_CUDA, prototype->device.device_id};
    Export *export = new_export(&view, prototype->dtype, device, 0, DLPACK_MINOR);
    if (export == NULL)
        release_memory(memory);
    else
        export->memory = memory;
    return export;
}

/* Tells the exception that is set to somebody who may not know Python, and clears it. */
static void tell_error(void *context, void (*set_error)(void *, const char *, const char *))
{
    PyObject *type, *value, *traceback, *kind = NULL, *text = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (type != NULL) kind = PyObject_GetAttrString(type, "__name__");
    if (value != NULL) text = PyObject_Str(value);
    const char *kind_text = kind == NULL ? NULL : PyUnicode_AsUTF8AndSize(kind, NULL);
    const char *message = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, NULL);
    PyErr_Clear();
    if (set_error != NULL)
        set_error(context, kind_text == NULL ? "RuntimeError" : kind_text,
                  message == NULL ? "gpuops could not allocate memory" : message);
    Py_XDECREF(text);
    Py_XDECREF(kind);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

/* The one function that may be called without the GIL. */
static int api_allocate(DLTensor *prototype, DLManagedTensorVersioned **out, void *context,
                        void (*set_error)(void *, const char *, const char *))
{
    *out = NULL;
    if (!Py_IsInitialized()) {
        if (set_error != NULL) set_error(context, "RuntimeError", "Python has come to its end");
        return -1;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    State *state = own_state();
    Export *export = state == NULL ? NULL : allocate_like(state, prototype);
    if (export == NULL)
        tell_error(context, set_error);
    else
        *out = &export->tensor.versioned;
    PyGILState_Release(gil);
    return export == NULL ? -1 : 0;
}

/* A DeviceArray counts its strides in bytes and DLPack in elements, so that there is no tensor
 * inside it that could be lent out. */
static const DLPackExchangeAPI EXPORTED_API = {
    .header = {{DLPACK_MAJOR, DLPACK_MINOR}, NULL},
    .managed_tensor_allocator = api_allocate,
    .managed_tensor_from_py_object_no_sync = api_from_object,
    .managed_tensor_to_py_object_no_sync = api_to_object,
    .dltensor_from_py_object_no_sync = NULL,
    .current_work_stream = api_work_stream,
};

int add_exchange_api(PyTypeObject *array_type)
{
    PyObject *module = PyType_GetModule(array_type);
    const char *name = module == NULL ? NULL : PyModule_GetName(module);
    if (name == NULL) return -1;
    snprintf(module_name, sizeof module_name, "%s", name);
    atomic_store(&module_definition, PyModule_GetDef(module));
    PyObject *capsule = PyCapsule_New((void *)&EXPORTED_API, EXCHANGE_API, NULL);
    if (capsule == NULL) return -1;
    int result =
        PyObject_SetAttrString((PyObject *)array_type, "__dlpack_c_exchange_api__", capsule);
    Py_DECREF(capsule);
    return result;
}
