/* DLPack by capsules, both ways; what is read of a tensor, checked; and who owns its memory. */
#include "foreign.h"

static const char VERSIONED[] = "dltensor_versioned", USED_VERSIONED[] = "used_dltensor_versioned";
static const char LEGACY[] = "dltensor", USED_LEGACY[] = "used_dltensor";

/* Dtypes. */

static const struct {
    uint8_t code;
    uint8_t bits;
    int number; /* NumPy's */
} BUILTIN[] = {
    {DL_BOOL, 8, NPY_BOOL},       {DL_INT, 8, NPY_INT8},
    {DL_INT, 16, NPY_INT16},      {DL_INT, 32, NPY_INT32},
    {DL_INT, 64, NPY_INT64},      {DL_UINT, 8, NPY_UINT8},
    {DL_UINT, 16, NPY_UINT16},    {DL_UINT, 32, NPY_UINT32},
    {DL_UINT, 64, NPY_UINT64},    {DL_FLOAT, 16, NPY_FLOAT16},
    {DL_FLOAT, 32, NPY_FLOAT32},  {DL_FLOAT, 64, NPY_FLOAT64},
    {DL_COMPLEX, 64, NPY_CFLOAT}, {DL_COMPLEX, 128, NPY_COMPLEX128},
};

/* What the package ml_dtypes adds to NumPy. */
static const struct {
    uint8_t code, bits;
    const char *name;
} EXTENSIONS[] = {
    {DL_BFLOAT, 16, "bfloat16"},
    {DL_FLOAT8_E3M4, 8, "float8_e3m4"},
    {DL_FLOAT8_E4M3, 8, "float8_e4m3"},
    {DL_FLOAT8_E4M3B11FNUZ, 8, "float8_e4m3b11fnuz"},
    {DL_FLOAT8_E4M3FN, 8, "float8_e4m3fn"},
    {DL_FLOAT8_E4M3FNUZ, 8, "float8_e4m3fnuz"},
    {DL_FLOAT8_E5M2, 8, "float8_e5m2"},
    {DL_FLOAT8_E5M2FNUZ, 8, "float8_e5m2fnuz"},
    {DL_FLOAT8_E8M0FNU, 8, "float8_e8m0fnu"},
};

enum {
    BUILTIN_COUNT = sizeof BUILTIN / sizeof BUILTIN[0],
    EXTENSION_COUNT = sizeof EXTENSIONS / sizeof EXTENSIONS[0],
};

static const DLDataType NO_DTYPE = {DL_NONE, 0, 0};

/* NumPy's number for a dtype of ml_dtypes, or -1. A number is good for the whole process. */
static int extension_number(int extension)
{
    static atomic_int numbers[EXTENSION_COUNT];
    static atomic_bool import_was_tried;
    int number = atomic_load(&numbers[extension]);
    if (number > 0) return number;

    PyArray_Descr *descr = NULL;
    PyObject *type = NULL, *module = NULL, *name = PyUnicode_FromString("ml_dtypes");
    if (name != NULL) module = PyImport_GetModule(name);
    /* Threads that come while it is imported wait for that. */
    if (name != NULL && module == NULL && !atomic_load(&import_was_tried))
        module = PyImport_Import(name);
    atomic_store(&import_was_tried, true);
    if (module != NULL) type = PyObject_GetAttrString(module, EXTENSIONS[extension].name);
    if (type != NULL && PyArray_DescrConverter(type, &descr) &&
        PyTypeNum_ISUSERDEF(descr->type_num)) {
        number = descr->type_num;
        atomic_store(&numbers[extension], number);
    }
    PyErr_Clear();
    Py_XDECREF((PyObject *)descr);
    Py_XDECREF(type);
    Py_XDECREF(module);
    Py_XDECREF(name);
    return number > 0 ? number : -1;
}

PyArray_Descr *descr_of_dlpack(DLDataType dtype)
{
    if (dtype.lanes != 1) return NULL;
    for (int i = 0; i < BUILTIN_COUNT; i++)
        if (BUILTIN[i].code == dtype.code && BUILTIN[i].bits == dtype.bits)
            return PyArray_DescrFromType(BUILTIN[i].number);
    for (int i = 0; i < EXTENSION_COUNT; i++) {
        if (EXTENSIONS[i].code != dtype.code || EXTENSIONS[i].bits != dtype.bits) continue;
        int number = extension_number(i);
        return number < 0 ? NULL : PyArray_DescrFromType(number);
    }
    return NULL;
}

DLDataType dlpack_dtype(const PyArray_Descr *descr)
{
    const int number = descr->type_num;
    const int64_t bits = 8 * (int64_t)PyDataType_ELSIZE(descr);
    int code = DL_NONE;
    if (!PyArray_ISNBO(descr->byteorder)) return NO_DTYPE;
    if (PyTypeNum_ISBOOL(number))
        code = DL_BOOL;
    else if (PyTypeNum_ISUNSIGNED(number))
        code = DL_UINT;
    else if (PyTypeNum_ISSIGNED(number))
        code = DL_INT;
    else if (PyTypeNum_ISFLOAT(number) && bits <= 64)
        code = DL_FLOAT;
    else if (PyTypeNum_ISCOMPLEX(number) && bits <= 128)
        code = DL_COMPLEX;
    if (code != DL_NONE) return (DLDataType){(uint8_t)code, (uint8_t)bits, 1};
    for (int i = 0; i < EXTENSION_COUNT && PyTypeNum_ISUSERDEF(number); i++)
        if (extension_number(i) == number)
            return (DLDataType){EXTENSIONS[i].code, EXTENSIONS[i].bits, 1};
    return NO_DTYPE;
}

const char *extension_name(DLDataType dtype)
{
    for (int i = 0; i < EXTENSION_COUNT; i++)
        if (EXTENSIONS[i].code == dtype.code) return EXTENSIONS[i].name;
    return dtype.code == DL_COMPLEX ? "complex32" : "a foreign dtype";
}

int item_bytes_of(DLDataType dtype)
{
    const int bits = dtype.bits;
    bool good = false;
    if (dtype.lanes != 1) return 0;
    if (dtype.code == DL_INT || dtype.code == DL_UINT)
        good = bits == 8 || bits == 16 || bits == 32 || bits == 64;
    else if (dtype.code == DL_FLOAT)
        good = bits == 16 || bits == 32 || bits == 64;
    else if (dtype.code == DL_COMPLEX)
        good = bits == 32 || bits == 64 || bits == 128;
    else if (dtype.code == DL_BFLOAT)
        good = bits == 16;
    else if (dtype.code == DL_BOOL ||
             (dtype.code >= DL_FLOAT8_E3M4 && dtype.code <= DL_FLOAT8_E8M0FNU))
        good = bits == 8;
    return good ? bits / 8 : 0;
}

void set_dtype(Operand *operand, PyArray_Descr *descr, DLDataType dtype)
{
    Py_XDECREF((PyObject *)operand->descr);
    operand->dtype = dtype;
    operand->descr = descr;
    if (descr != NULL) {
        fill_dtype(descr, &operand->view);
    } else {
        operand->view.dtype = dtype.code == DL_BFLOAT ? DTYPE_BFLOAT16 : DTYPE_OPAQUE;
        operand->view.item_bytes = item_bytes_of(dtype);
        operand->view.dtype_name = extension_name(dtype);
    }
}

/* Sizes and addresses. */

int read_sizes(const char *name, int64_t ndim, const int64_t *shape, const int64_t *strides,
               int64_t unit_bytes, View *view, int64_t *low, int64_t *high)
{
    const int64_t item_bytes = view->item_bytes;
    int64_t bytes = item_bytes;
    bool empty = false;
    if (ndim < 0 || ndim > GPUOPS_MAX_DIMS) {
        PyErr_Format(PyExc_BufferError, "%s says that it has %lld dimensions; 0 to %d are possible",
                     name, (long long)ndim, (int)GPUOPS_MAX_DIMS);
        return -1;
    }
    if (ndim > 0 && shape == NULL) {
        PyErr_Format(PyExc_BufferError, "%s has %lld dimensions but no shape", name,
                     (long long)ndim);
        return -1;
    }
    view->ndim = (int)ndim;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) {
            PyErr_Format(PyExc_BufferError, "%s has size %lld along axis %d", name,
                         (long long)shape[i], i);
            return -1;
        }
        view->shape[i] = shape[i];
        empty |= shape[i] == 0;
        if (shape[i] > 1 && __builtin_mul_overflow(bytes, shape[i], &bytes)) goto too_large;
    }
    *low = *high = 0;
    bytes = item_bytes;
    for (int i = view->ndim - 1; i >= 0; i--) {
        view->strides[i] = bytes;
        int64_t reach;
        if (strides != NULL && !empty && shape[i] > 1 &&
            __builtin_mul_overflow(strides[i], unit_bytes, &view->strides[i]))
            goto too_large;
        if (shape[i] <= 1) continue;
        bytes *= shape[i];
        if (empty) continue;
        if (__builtin_mul_overflow(view->strides[i], shape[i] - 1, &reach)) goto too_large;
        int64_t *end = reach < 0 ? low : high;
        if (__builtin_add_overflow(*end, reach, end)) goto too_large;
    }
    if (empty) return 0;
    if (__builtin_add_overflow(*high, item_bytes, high) ||
        __builtin_sub_overflow(*high, *low, &bytes))
        goto too_large;
    return 0;

too_large:
    PyErr_Format(PyExc_BufferError, "%s says that it is larger than any memory", name);
    return -1;
}

int read_address(const char *name, uintptr_t address, uint64_t offset, int64_t low, int64_t high,
                 View *view)
{
    uintptr_t end;
    view->data = NULL;
    if (high == 0) return 0;
    if (address == 0) {
        PyErr_Format(PyExc_BufferError,
                     "%s has elements but no memory: its data pointer is NULL, as that of a fake "
                     "or lazy array",
                     name);
        return -1;
    }
    if (__builtin_add_overflow(address, (uintptr_t)offset, &address) ||
        address < (uintptr_t)0 - (uintptr_t)low ||
        __builtin_add_overflow(address, (uintptr_t)high, &end)) {
        PyErr_Format(PyExc_BufferError, "%s reaches beyond the end of the address space", name);
        return -1;
    }
    view->data = (void *)address;
    return 0;
}

int read_tensor(const char *name, const DLTensor *tensor, View *view)
{
    int64_t low = 0, high = 0;
    view->item_bytes = item_bytes_of(tensor->dtype);
    if (view->item_bytes == 0) {
        PyErr_Format(PyExc_BufferError,
                     "%s has elements that gpuops does not know: DLPack type code %d, %d bits, %d "
                     "lanes",
                     name, tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
        return -1;
    }
    if (read_sizes(name, tensor->ndim, tensor->shape, tensor->strides, view->item_bytes, view, &low,
                   &high) < 0)
        return -1;
    return read_address(name, (uintptr_t)tensor->data, tensor->byte_offset, low, high, view);
}

/* A GPU reads an element at a multiple of its size, or for complex numbers of half of it. */
int check_alignment(const char *name, const View *view, int64_t alignment)
{
    bool aligned = (uintptr_t)view->data % (uintptr_t)alignment == 0;
    for (int i = 0; i < view->ndim; i++)
        aligned &= view->shape[i] <= 1 || view->strides[i] % alignment == 0;
    if (aligned || view->data == NULL) return 0;
    PyErr_Format(PyExc_BufferError,
                 "%s lies at address %p, which is not aligned to the %lld bytes of its elements: "
                 "pass a copy",
                 name, view->data, (long long)alignment);
    return -1;
}

bool is_host(DLDevice device)
{
    return device.device_type == DL_CPU || device.device_type == DL_CUDA_HOST;
}

bool is_cuda(DLDevice device)
{
    return device.device_type == DL_CUDA || device.device_type == DL_CUDA_MANAGED;
}

static const char *device_type_name(int64_t type)
{
    static const char *const NAMES[] = {
        [4] = "OpenCL",   [7] = "Vulkan", [8] = "Metal",     [9] = "VPI",
        [10] = "ROCm",    [11] = "ROCm",  [14] = "oneAPI",   [15] = "WebGPU",
        [16] = "Hexagon", [17] = "MAIA",  [18] = "Trainium",
    };
    const bool known = type >= 0 && type < (int64_t)(sizeof NAMES / sizeof NAMES[0]);
    return known && NAMES[type] != NULL ? NAMES[type] : "unknown";
}

int refuse_device(const char *name, int64_t type)
{
    PyErr_Format(PyExc_BufferError,
                 "%s is in memory of DLPack device type %lld (%s), which gpuops cannot reach: copy "
                 "it to the CPU or to a CUDA device first",
                 name, (long long)type, device_type_name(type));
    return -1;
}

/* The number of devices does not change as long as a process lives, and the GIL is not worth
 * releasing for it more than once. */
int check_ordinal(State *state, const char *op, const char *name, int64_t ordinal)
{
    static atomic_int known;
    int count = atomic_load(&known);
    if (count == 0 && ordinal >= 0) {
        Status status = without_gil(count_devices, &count);
        if (status != STATUS_OK) {
            raise_status(state, status, op, DEVICE_CPU);
            return -1;
        }
        atomic_store(&known, count);
    }
    if (ordinal >= 0 && ordinal < count) return 0;
    PyErr_Format(PyExc_BufferError, "%s says that it is on cuda:%lld, which there is not", name,
                 (long long)ordinal);
    return -1;
}

/* The bytes from the lowest to the highest that a view touches; none where it has no elements. */
typedef struct Extent {
    char *begin;
    int64_t bytes;
} Extent;

static Extent extent_of(const View *view)
{
    Extent extent = {view->data, view->item_bytes};
    if (view->data == NULL) return (Extent){NULL, 0};
    for (int i = 0; i < view->ndim; i++) {
        const int64_t reach = (view->shape[i] - 1) * view->strides[i];
        if (reach < 0) extent.begin += reach;
        extent.bytes += reach < 0 ? -reach : reach;
    }
    return extent;
}

static Status do_locate(void *context)
{
    View *view = context;
    const Extent extent = extent_of(view);
    Status status = STATUS_OK;
    if (view->device == DEVICE_CPU)
        /* Nothing is nowhere, which is as good as the current device. */
        status = extent.bytes == 0 ? cuda_current_device(&view->device)
                                   : memory_device_of(extent.begin, &view->device);
    else if (extent.bytes > 0)
        status = memory_check(view->device, extent.begin);
    if (status != STATUS_OK || extent.bytes < 2) return status;
    return memory_check(view->device, extent.begin + extent.bytes - 1);
}

int locate(State *state, const char *op, const char *name, View *view)
{
    const bool is_told = view->device != DEVICE_CPU;
    Status status = without_gil(do_locate, view);
    if (status == STATUS_OK) return 0;
    if (status != STATUS_VALUE_ERROR)
        raise_status(state, status, op, view->device);
    else if (is_told)
        PyErr_Format(PyExc_BufferError, "%s says that it is on cuda:%d: %s", name, view->device,
                     last_failure()->text);
    else
        PyErr_Format(PyExc_BufferError, "%s says that it is on a GPU, but %s", name,
                     last_failure()->text);
    return -1;
}

/* Owners of what is imported. */

/* By the book a deleter needs nothing of Python. But many are Python functions underneath, and must
 * not find, or lose, an exception that is on its way, nor what the call has to say that failed. */
typedef struct Quiet {
    Failure *failures, theirs;
    bool is_python;
    PyGILState_STATE state;
    PyObject *type, *value, *traceback;
} Quiet;

static void begin_quiet(Quiet *quiet)
{
    quiet->failures = record_failures_in(&quiet->theirs);
    quiet->is_python = Py_IsInitialized();
    if (!quiet->is_python) return;
    quiet->state = PyGILState_Ensure();
    PyErr_Fetch(&quiet->type, &quiet->value, &quiet->traceback);
}

static void end_quiet(Quiet *quiet)
{
    if (quiet->is_python) {
        PyErr_Restore(quiet->type, quiet->value, quiet->traceback);
        PyGILState_Release(quiet->state);
    }
    (void)record_failures_in(quiet->failures);
}

void dlpack_delete(void *context)
{
    DLManagedTensorVersioned *tensor = context;
    Quiet quiet;
    if (tensor == NULL || tensor->deleter == NULL) return;
    begin_quiet(&quiet);
    tensor->deleter(tensor);
    end_quiet(&quiet);
}

static void delete_legacy(void *context)
{
    DLManagedTensor *tensor = context;
    Quiet quiet;
    if (tensor->deleter == NULL) return;
    begin_quiet(&quiet);
    tensor->deleter(tensor);
    end_quiet(&quiet);
}

/* Any thread may drop the last reference to memory, and also one that never was Python's. Once the
 * interpreter is on its way out its lock must not be asked for, and the object is left alone. */
void release_object(void *object)
{
    Quiet quiet;
    begin_quiet(&quiet);
    if (quiet.is_python) Py_DECREF((PyObject *)object);
    end_quiet(&quiet);
}

void drop_owner(Owner owner)
{
    if (owner.release != NULL) owner.release(owner.context);
}

/* A capsule of our own that holds an owner: the base of a NumPy array over foreign memory. */
static void destroy_owner_capsule(PyObject *capsule)
{
    Owner owner = {PyCapsule_GetContext(capsule), PyCapsule_GetPointer(capsule, "gpuops.owner")};
    drop_owner(owner);
}

/* Takes over the owner, also where it fails. */
static PyObject *owner_capsule(Owner owner)
{
    PyObject *capsule = PyCapsule_New(owner.context, "gpuops.owner", NULL);
    if (capsule == NULL || PyCapsule_SetContext(capsule, (void *)owner.release) < 0 ||
        PyCapsule_SetDestructor(capsule, destroy_owner_capsule) < 0) {
        drop_owner(owner);
        Py_CLEAR(capsule);
    }
    return capsule;
}

int set_host_array(Operand *operand, PyObject *base)
{
    View *view = &operand->view;
    npy_intp shape[GPUOPS_MAX_DIMS], strides[GPUOPS_MAX_DIMS];
    PyArray_Descr *descr = operand->descr;
    if (base == NULL) return -1;
    for (int i = 0; i < view->ndim; i++) {
        shape[i] = view->shape[i];
        strides[i] = view->strides[i];
    }
    if (descr != NULL) {
        Py_INCREF((PyObject *)descr);
    } else if ((descr = PyArray_DescrNewFromType(NPY_VOID)) != NULL) {
        /* Plain bytes stand for what NumPy has no word for. */
        PyDataType_SET_ELSIZE(descr, (npy_intp)view->item_bytes);
    }
    if (descr != NULL)
        operand->array = (PyArrayObject *)PyArray_NewFromDescr(
            &PyArray_Type, descr, view->ndim, shape, view->data == NULL ? NULL : strides,
            view->data, operand->read_only ? 0 : NPY_ARRAY_WRITEABLE, NULL);
    if (operand->array == NULL) {
        Py_DECREF(base);
        return -1;
    }
    view->device = DEVICE_CPU;
    view->data = PyArray_DATA(operand->array);
    return PyArray_SetBaseObject(operand->array, base);
}

/* Import by method: what has to be told to, and asked from, __dlpack__. */

int has_dlpack(PyTypeObject *type)
{
    const int has = type_has(type, "__dlpack__");
    return has <= 0 ? has : type_has(type, "__dlpack_device__");
}

/* Its answer on a stream, or without one for data on the host. An older producer takes fewer
 * arguments, which shows as a TypeError. */
static PyObject *call_dlpack(PyObject *object, Stream *stream)
{
    PyObject *result = NULL, *value = NULL, *arguments = NULL, *keywords = NULL;
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    if (method == NULL || (arguments = PyTuple_New(0)) == NULL || (keywords = PyDict_New()) == NULL)
        goto done;
    if (stream != NULL) {
        value = PyLong_FromSize_t((size_t)stream_handle(stream));
        if (value == NULL || PyDict_SetItemString(keywords, "stream", value) < 0) goto done;
        Py_CLEAR(value);
    }
    value = Py_BuildValue("(ii)", DLPACK_MAJOR, DLPACK_MINOR);
    if (value == NULL || PyDict_SetItemString(keywords, "max_version", value) < 0) goto done;
    result = PyObject_Call(method, arguments, keywords);
    if (result == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        if (PyDict_DelItemString(keywords, "max_version") == 0)
            result = PyObject_Call(method, arguments, keywords);
    }
done:
    Py_XDECREF(value);
    Py_XDECREF(method);
    Py_XDECREF(keywords);
    Py_XDECREF(arguments);
    return result;
}

/* From here on the tensor is ours, and its deleter to be called. A library may hand out the same
 * capsule to two threads, of which one is to get it: this is done alone. */
static int take_capsule(PyObject *capsule, const char *name, Taken *taken)
{
    if (PyCapsule_IsValid(capsule, VERSIONED)) {
        DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, VERSIONED);
        const DLVersion version = managed->version;
        if (PyCapsule_SetName(capsule, USED_VERSIONED) < 0) return -1;
        *taken = (Taken){{dlpack_delete, managed}, &managed->dl_tensor, 0};
        if (version.major == DLPACK_MAJOR) {
            taken->read_only = (managed->flags & DL_READ_ONLY) != 0;
            return 0;
        }
        /* Of another version nothing is known but where the deleter stands. */
        drop_owner(taken->owner);
        PyErr_Format(PyExc_BufferError, "%s is exported as DLPack %u.%u, and gpuops reads %d.x",
                     name, version.major, version.minor, (int)DLPACK_MAJOR);
        return -1;
    }
    if (PyCapsule_IsValid(capsule, LEGACY)) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, LEGACY);
        if (PyCapsule_SetName(capsule, USED_LEGACY) < 0) return -1;
        *taken = (Taken){{delete_legacy, managed}, &managed->dl_tensor, READ_ONLY_UNSAID};
        return 0;
    }
    if (PyCapsule_IsValid(capsule, USED_VERSIONED) || PyCapsule_IsValid(capsule, USED_LEGACY))
        PyErr_Format(PyExc_BufferError, "%s gave a DLPack capsule that has been consumed already",
                     name);
    else
        PyErr_Format(PyExc_BufferError, "%s.__dlpack__() gave %R, and not a DLPack capsule", name,
                     capsule);
    return -1;
}

static int numpy_understands(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (PyObject_CheckBuffer(object)) return 1;
    const int has = type_has(type, "__array__");
    return has != 0 ? has : type_has(type, "__array_interface__");
}

static int import_host_by_numpy(Operand *operand)
{
    /* Not by its buffer, which has no more words than DLPack. */
    operand->array = (PyArrayObject *)PyArray_FromAny(operand->object, NULL, 0, 0, 0, NULL);
    if (operand->array == NULL) return -1;
    PyArray_Descr *descr = PyArray_DESCR(operand->array);
    operand->read_only = !PyArray_ISWRITEABLE(operand->array);
    if (fill_view(operand->array, operand->name, &operand->view) < 0) return -1;
    operand->view.device = DEVICE_CPU;
    Py_INCREF((PyObject *)descr);
    set_dtype(operand, descr, dlpack_dtype(descr));
    return 1;
}

static int import_host(Operand *operand)
{
    const char *name = operand->name;
    PyObject *capsule = call_dlpack(operand->object, NULL);
    if (capsule == NULL) {
        /* Some dtypes of JAX, for example, have no word in DLPack but one in NumPy. */
        const bool may_try =
            PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError);
        PyObject *exception, *value, *traceback;
        PyErr_Fetch(&exception, &value, &traceback);
        if (!may_try || numpy_understands(operand->object) <= 0) {
            PyErr_Restore(exception, value, traceback);
            return -1;
        }
        Py_XDECREF(exception);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return import_host_by_numpy(operand);
    }
    Taken taken;
    int result;
    BEGIN_ALONE(capsule);
    result = take_capsule(capsule, name, &taken);
    END_ALONE();
    release_object(capsule);
    if (result < 0) return -1;
    const DLTensor *tensor = taken.tensor;
    if (!is_host(tensor->device))
        PyErr_Format(PyExc_BufferError,
                     "%s.__dlpack_device__() says that it is on the host, and its capsule that it "
                     "is on DLPack device (%d, %d)",
                     name, tensor->device.device_type, tensor->device.device_id);
    if (!is_host(tensor->device) || read_tensor(name, tensor, &operand->view) < 0) {
        drop_owner(taken.owner);
        return -1;
    }
    operand->read_only = taken.read_only;
    set_dtype(operand, descr_of_dlpack(tensor->dtype), tensor->dtype);
    return set_host_array(operand, owner_capsule(taken.owner)) < 0 ? -1 : 1;
}

static int read_dlpack_device(PyObject *object, const char *name, long long *type, long long *id)
{
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    if (device == NULL) return -1;
    const int result = read_pair(device, "device", type, id);
    if (result < 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_BufferError,
                     "%s.__dlpack_device__() gave %R, and not a tuple of device type and id", name,
                     device);
    }
    Py_DECREF(device);
    return result;
}

static int import_capsule(State *state, Operand *operand, Stream *stream)
{
    /* The producer need not wait for anything if its own stream is known. */
    if (operand->stream != NULL) stream = operand->stream;
    PyObject *capsule = call_dlpack(operand->object, stream);
    if (capsule == NULL) return -1;
    Taken taken;
    int result;
    BEGIN_ALONE(capsule);
    result = take_capsule(capsule, operand->name, &taken);
    END_ALONE();
    release_object(capsule);
    return result < 0 ? -1 : adopt_tensor(state, operand, &taken, stream);
}

int classify_dlpack(State *state, Library *library, Operand *operand)
{
    const char *name = operand->name;
    const int has_namespace = type_has(Py_TYPE(operand->object), "__array_namespace__");
    long long device_type = 0, id = 0;
    if (has_namespace < 0) return -1;
    if (read_dlpack_device(operand->object, name, &device_type, &id) < 0) return -1;
    if (device_type == DL_CPU || device_type == DL_CUDA_HOST) {
        /* NumPy may know how to convert what DLPack cannot say, such as missing values. */
        const int understands = has_namespace ? 0 : numpy_understands(operand->object);
        if (understands != 0) return understands < 0 ? -1 : 0;
        operand->kind = has_namespace ? KIND_NAMESPACE : KIND_HOST;
        return import_host(operand);
    }
    if (device_type != DL_CUDA && device_type != DL_CUDA_MANAGED)
        return refuse_device(name, device_type);
    if (check_ordinal(state, operand->op, name, id) < 0) return -1;
    if (atomic_load(&library->interface) == INTERFACE_UNKNOWN) {
        const int found = classify_interface(state, library, operand);
        if (found != 0) return found;
    }
    if (kind_on_device(operand->object, &operand->kind) < 0) return -1;
    operand->pending = true;
    operand->import = import_capsule;
    operand->view.device = (int)id;
    return 1;
}

int adopt(State *state, Operand *operand, Stream *stream, Owner owner)
{
    const Extent extent = extent_of(&operand->view);
    Status status = memory_adopt(extent.begin, extent.bytes, stream, owner, &operand->memory);
    if (status != STATUS_OK) {
        raise_status(state, status, operand->op, operand->view.device);
        drop_owner(owner);
        return -1;
    }
    operand->view.stream = stream; /* which the memory holds */
    operand->view.memory = operand->memory;
    operand->pending = false;
    return 0;
}

int adopt_tensor(State *state, Operand *operand, const Taken *taken, Stream *stream)
{
    const char *name = operand->name;
    const DLTensor *tensor = taken->tensor;
    const DLDevice device = tensor->device;
    View *view = &operand->view;
    if (!is_cuda(device) || device.device_id != view->device) {
        PyErr_Format(PyExc_BufferError,
                     "%s says that it is on cuda:%d, and its tensor that it is on DLPack device "
                     "(%d, %d)",
                     name, view->device, device.device_type, device.device_id);
        goto failed;
    }
    if (read_tensor(name, tensor, view) < 0) goto failed;
    set_dtype(operand, descr_of_dlpack(tensor->dtype), tensor->dtype);
    if (require_descr(operand) < 0 ||
        check_alignment(name, view, view->item_bytes / (tensor->dtype.code == DL_COMPLEX ? 2 : 1)) <
            0 ||
        locate(state, operand->op, name, view) < 0)
        goto failed;
    operand->read_only = taken->read_only;
    return adopt(state, operand, stream, taken->owner);

failed:
    drop_owner(taken->owner);
    return -1;
}

/* Export. */

static Status do_release_exported(void *context)
{
    const Export *export = context;
    if (export->consumer == NULL)
        memory_release(export->memory);
    else
        memory_release_after(export->memory, export->consumer);
    return STATUS_OK;
}

/* Whoever deletes may hold the GIL or not, and what may take time is done without it. */
static void release_exported(Export *export)
{
    if (export->consumer == NULL && memory_try_release(export->memory)) return;
    Quiet quiet;
    begin_quiet(&quiet);
    if (quiet.is_python)
        (void)without_gil(do_release_exported, export);
    else
        (void)do_release_exported(export);
    end_quiet(&quiet);
}

static void free_export(Export *export)
{
    if (export->memory != NULL) release_exported(export);
    if (export->object != NULL) release_object(export->object);
    free(export->host_data);
    free(export);
}

static void delete_export_versioned(DLManagedTensorVersioned *tensor)
{
    free_export((Export *)tensor);
}

static void delete_export_legacy(DLManagedTensor *tensor)
{
    free_export((Export *)tensor);
}

/* Nobody has consumed it, unless it has another name by now. */
static void destroy_export_capsule(PyObject *capsule)
{
    const char *name = PyCapsule_IsValid(capsule, VERSIONED) ? VERSIONED : LEGACY;
    if (!PyCapsule_IsValid(capsule, name)) return;
    Export *export = PyCapsule_GetPointer(capsule, name);
    if (export->consumer != NULL) release_stream(export->consumer);
    export->consumer = NULL;
    free_export(export);
}

Export *new_export(const View *view, DLDataType dtype, DLDevice device, uint64_t flags, int minor)
{
    const size_t ndim = (size_t)view->ndim;
    Export *export = malloc(sizeof *export + 2 * ndim * sizeof(int64_t));
    if (export == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    memset(export, 0, sizeof *export);
    int64_t *shape = export->sizes, *strides = export->sizes + ndim, contiguous = 1;
    bool empty = false, whole = true;
    for (size_t i = 0; i < ndim; i++) empty |= view->shape[i] == 0;
    for (size_t i = ndim; i-- > 0;) {
        const bool steps = !empty && view->shape[i] > 1;
        shape[i] = view->shape[i];
        strides[i] = steps ? view->strides[i] / view->item_bytes : contiguous;
        whole &= !steps || view->strides[i] % view->item_bytes == 0;
        if (shape[i] > 1) contiguous *= shape[i];
    }
    if (!whole) {
        PyErr_Format(PyExc_BufferError,
                     "the strides of this array are no multiples of its %lld bytes wide elements, "
                     "which DLPack cannot say: export a copy()",
                     (long long)view->item_bytes);
        free(export);
        return NULL;
    }
    const DLTensor tensor = {.data = empty ? NULL : view->data,
                             .device = device,
                             .ndim = view->ndim,
                             .dtype = dtype,
                             .shape = ndim == 0 ? NULL : shape,
                             .strides = ndim == 0 ? NULL : strides};
    if (minor == LEGACY_FORM)
        export->tensor.legacy = (DLManagedTensor){tensor, NULL, delete_export_legacy};
    else
        export->tensor.versioned = (DLManagedTensorVersioned){
            {DLPACK_MAJOR, (uint32_t)minor}, NULL, delete_export_versioned, flags, tensor};
    return export;
}

/* Takes over the export, also where it fails. */
static PyObject *capsule_of(Export *export, int minor)
{
    PyObject *capsule =
        PyCapsule_New(export, minor == LEGACY_FORM ? LEGACY : VERSIONED, destroy_export_capsule);
    if (capsule == NULL) free_export(export);
    return capsule;
}

static int exportable_dtype(const PyArray_Descr *descr, DLDataType *dtype)
{
    *dtype = dlpack_dtype(descr);
    if (dtype->code != DL_NONE) return 0;
    PyErr_Format(PyExc_BufferError,
                 "DLPack has no word for dtype %S: export a copy in another dtype, made with "
                 "to_host()",
                 descr);
    return -1;
}

typedef struct ExportOptions {
    bool has_stream, on_host;
    long long stream;
    int minor;
    int copy; /* -1: as needed */
} ExportOptions;

int read_pair(PyObject *object, const char *keyword, long long *first, long long *second)
{
    if (PyTuple_Check(object) && PyTuple_Size(object) == 2 &&
        PyIndex_Check(PyTuple_GetItem(object, 0)) && PyIndex_Check(PyTuple_GetItem(object, 1))) {
        *first = PyLong_AsLongLong(PyTuple_GetItem(object, 0));
        if (!PyErr_Occurred()) *second = PyLong_AsLongLong(PyTuple_GetItem(object, 1));
        return PyErr_Occurred() ? -1 : 0;
    }
    PyErr_Format(PyExc_TypeError, "%s must be None or a tuple of two ints, not %R", keyword,
                 object);
    return -1;
}

static int read_export_stream(PyObject *object, ExportOptions *options)
{
    options->has_stream = object != Py_None;
    if (!options->has_stream) return 0;
    if (!PyIndex_Check(object) || PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError, "stream must be None or an int, not %R", object);
        return -1;
    }
    options->stream = PyLong_AsLongLong(object);
    if (options->stream == -1 && PyErr_Occurred()) return -1;
    if (options->stream > 0 || options->stream == -1) return 0;
    PyErr_Format(PyExc_ValueError,
                 "stream must be None or 1 for the legacy default stream, 2 for the per-thread "
                 "one, -1 for no order at all, or a handle; %lld is none of them%s",
                 options->stream,
                 options->stream == 0 ? ", because it could be either default stream" : "");
    return -1;
}

int read_copy(PyObject *object, int *copy)
{
    *copy = object == Py_None ? -1 : object == Py_True;
    if (object == Py_None || PyBool_Check(object)) return 0;
    PyErr_Format(PyExc_TypeError, "copy must be None, True or False, not %R", object);
    return -1;
}

static int read_export_options(PyObject *args, PyObject *keywords, int device,
                               ExportOptions *options)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *version = Py_None, *place = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOOO:__dlpack__", names, &stream, &version,
                                     &place, &copy) ||
        read_export_stream(stream, options) < 0 || read_copy(copy, &options->copy) < 0)
        return -1;

    long long major = 0, minor = 0;
    if (version != Py_None && read_pair(version, "max_version", &major, &minor) < 0) return -1;
    options->minor = DLPACK_MINOR;
    if (major < DLPACK_MAJOR)
        options->minor = LEGACY_FORM;
    else if (major == DLPACK_MAJOR && minor >= 0 && minor < DLPACK_MINOR)
        options->minor = (int)minor;

    long long type = DL_CUDA, id = device;
    if (place != Py_None && read_pair(place, "dl_device", &type, &id) < 0) return -1;
    options->on_host = type == DL_CPU && id == 0;
    if (options->on_host && options->has_stream) {
        PyErr_SetString(PyExc_ValueError, "stream must be None for an export to the CPU");
        return -1;
    }
    if (options->on_host && options->copy == 0) {
        PyErr_Format(PyExc_BufferError,
                     "an array on cuda:%d cannot be on the CPU without a copy, and copy is False",
                     device);
        return -1;
    }
    if (options->on_host || (type == DL_CUDA && id == device)) return 0;
    PyErr_Format(PyExc_BufferError,
                 "an array on cuda:%d cannot be exported to DLPack device (%lld, %lld): only to "
                 "(2, %d), where it is, and to (1, 0), the CPU",
                 device, type, id, device);
    return -1;
}

static Export *export_to_host(State *state, const View *view, DLDataType dtype,
                              const ExportOptions *options)
{
    View target;
    view_copy(&target, view);
    view_pack(&target);
    const int64_t bytes = view_items(view) * view->item_bytes;
    target.device = DEVICE_CPU;
    target.stream = NULL;
    target.memory = NULL;
    target.data = NULL;
    /* DLPack wants 256 bytes for devices; 64 are what CPUs can make use of. */
    if (posix_memalign(&target.data, 64, bytes > 0 ? (size_t)bytes : 64) != 0) {
        PyErr_NoMemory();
        return NULL;
    }
    Export *export = NULL;
    if (copy_elements(state, &target, view, view->stream, "__dlpack__") == 0)
        export = new_export(&target, dtype, (DLDevice){DL_CPU, 0}, DL_IS_COPIED, options->minor);
    if (export == NULL)
        free(target.data);
    else
        export->host_data = target.data;
    return export;
}

/* What the consumer queues on its stream comes after what is queued on the array's own. */
static int order_consumer(State *state, const View *view, const ExportOptions *options,
                          Stream **consumer)
{
    if (options->has_stream && options->stream == -1) return 0;
    const uintptr_t handle = options->has_stream ? (uintptr_t)options->stream : 1;
    *consumer = borrowed_stream(state, view->device, handle, "__dlpack__");
    return *consumer == NULL ? -1 : await_stream(state, *consumer, view->stream, "__dlpack__");
}

Export *export_array(const DeviceArray *array, Stream *consumer, uint64_t flags, int minor)
{
    Export *export = NULL;
    DLDataType dtype;
    View view;
    array_view(array, &view);
    if (exportable_dtype(array->descr, &dtype) == 0) {
        if (array->read_only) flags |= DL_READ_ONLY;
        export = new_export(&view, dtype, (DLDevice){DL_CUDA, view.device}, flags, minor);
    }
    if (export != NULL) export->memory = memory_hold(array->memory);
    /* Of one that its library may have destroyed by then, the end of the work cannot be marked. */
    if (export != NULL && consumer != NULL && consumer != view.stream &&
        stream_that_lasts(consumer) == consumer)
        export->consumer = consumer;
    else if (consumer != NULL)
        release_stream(consumer);
    return export;
}

PyObject *array_dlpack(PyObject *self, PyObject *args, PyObject *keywords)
{
    State *state = state_of(Py_TYPE(self));
    const DeviceArray *array = (DeviceArray *)self;
    PyObject *copied = NULL;
    Stream *consumer = NULL;
    Export *export = NULL;
    ExportOptions options = {.minor = LEGACY_FORM};
    DLDataType dtype;
    View view;
    if (state == NULL) return NULL;
    array_view(array, &view);
    if (read_export_options(args, keywords, view.device, &options) < 0 ||
        exportable_dtype(array->descr, &dtype) < 0)
        return NULL;
    if (options.on_host) {
        export = export_to_host(state, &view, dtype, &options);
        return export == NULL ? NULL : capsule_of(export, options.minor);
    }
    if (options.copy == 1) {
        copied = array_copy_of(state, &view, array->descr, view.stream, "__dlpack__");
        if (copied == NULL) return NULL;
        array = (DeviceArray *)copied;
    } else if (array->read_only == READ_ONLY && options.minor == LEGACY_FORM) {
        PyErr_SetString(PyExc_BufferError,
                        "this array is read-only, which DLPack can say from version 1 on: pass "
                        "max_version=(1, 0), or copy=True");
        return NULL;
    }
    if (order_consumer(state, &view, &options, &consumer) == 0)
        export = export_array(array, consumer, copied != NULL ? DL_IS_COPIED : 0, options.minor);
    else if (consumer != NULL)
        release_stream(consumer);
    Py_XDECREF(copied);
    return export == NULL ? NULL : capsule_of(export, options.minor);
}

PyObject *array_dlpack_device(PyObject *self, PyObject *unused)
{
    (void)unused;
    View view;
    array_view((DeviceArray *)self, &view);
    return Py_BuildValue("(ii)", DL_CUDA, view.device);
}
