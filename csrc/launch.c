/* A launch of a kernel: its arguments are read and checked against its parameters, brought in order
 * and passed on. */
#include "rtc.h"

#include <math.h>
#include <stdint.h>

/* An array among the arguments, in the middle of a launch. */
typedef struct ArrayArgument {
    Operand operand;
    int number; /* of the parameter, from 0 */
    bool is_read, is_written;
} ArrayArgument;

/* Few arguments are kept on the stack, more of them in memory. */
enum { FEW_ARGUMENTS = 8, FEW_BYTES = 256, VALUE_ALIGNMENT = 16 };

typedef struct Arguments {
    const KernelObject *kernel;
    char *bytes;   /* the values, one behind the other */
    void **values; /* for each parameter, its place in there */
    ArrayArgument *arrays;
    LaunchArray *launch_arrays;
    int array_count;
    Stream *stream; /* held */
    void *memory;   /* of more than a few, or NULL */
    ArrayArgument few_arrays[FEW_ARGUMENTS];
    LaunchArray few_launch_arrays[FEW_ARGUMENTS];
    void *few_values[FEW_ARGUMENTS];
    _Alignas(VALUE_ALIGNMENT) char few_bytes[FEW_BYTES];
} Arguments;

static int open_arguments(Arguments *arguments, const KernelObject *kernel)
{
    arguments->kernel = kernel;
    arguments->array_count = 0;
    arguments->stream = NULL;
    arguments->memory = NULL;
    arguments->bytes = arguments->few_bytes;
    arguments->values = arguments->few_values;
    arguments->arrays = arguments->few_arrays;
    arguments->launch_arrays = arguments->few_launch_arrays;
    if (kernel->count > FEW_ARGUMENTS || kernel->value_bytes > FEW_BYTES) {
        const size_t count = (size_t)kernel->count;
        const size_t bytes = (kernel->value_bytes + VALUE_ALIGNMENT - 1) & ~(VALUE_ALIGNMENT - 1ul);
        char *memory = PyMem_Malloc(
            bytes + count * (sizeof(ArrayArgument) + sizeof(LaunchArray) + sizeof(void *)));
        if (memory == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        arguments->memory = arguments->bytes = memory;
        arguments->arrays = (ArrayArgument *)(memory + bytes);
        arguments->launch_arrays = (LaunchArray *)(arguments->arrays + count);
        arguments->values = (void **)(arguments->launch_arrays + count);
    }
    for (int i = 0; i < kernel->count; i++)
        arguments->values[i] = arguments->bytes + kernel->parameters[i].offset;
    return 0;
}

static void close_arguments(Arguments *arguments)
{
    for (int i = 0; i < arguments->array_count; i++) operand_clear(&arguments->arrays[i].operand);
    if (arguments->stream != NULL) release_stream(arguments->stream);
    PyMem_Free(arguments->memory);
}

/* Messages. */

/* A new reference: "saxpy() argument 2 (x, const float32*)". */
static PyObject *subject(const KernelObject *kernel, int i)
{
    const KernelParameter *parameter = &kernel->parameters[i];
    char name[128] = "";
    if (strncmp(parameter->name, "argument ", 9) != 0)
        snprintf(name, sizeof name, "%s, ", parameter->name);
    if (parameter->type != NULL)
        return PyUnicode_FromFormat("%s() argument %d (%s%s)", kernel->op, i + 1, name,
                                    parameter->type);
    return PyUnicode_FromFormat("%s() argument %d (%s%lld bytes)", kernel->op, i + 1, name,
                                (long long)parameter->bytes);
}

/* Raises "<subject> <what>"; -1. The object is for a %R in what, or NULL. */
static int refuse(PyObject *error, const KernelObject *kernel, int i, const char *what,
                  PyObject *object)
{
    PyObject *who = subject(kernel, i);
    PyObject *text =
        object == NULL ? PyUnicode_FromString(what) : PyUnicode_FromFormat(what, object);
    if (who != NULL && text != NULL) PyErr_Format(error, "%U %U", who, text);
    Py_XDECREF(who);
    Py_XDECREF(text);
    return -1;
}

/* Behind a pointer of an unknown type anything may be. */
static bool dtype_fits(const KernelParameter *parameter, const View *view)
{
    return parameter->dtype == DTYPE_OPAQUE || view->dtype == parameter->dtype ||
           (parameter->is_char && view->dtype == DTYPE_UINT8);
}

/* Scalars. */

static bool is_numpy_scalar(PyObject *object)
{
    return PyObject_TypeCheck(object, &PyGenericArrType_Type);
}

static bool is_scalar(PyObject *object)
{
    return PyLong_Check(object) || PyFloat_Check(object) || is_numpy_scalar(object) ||
           PyComplex_Check(object);
}

static void write_bytes(void *value, const void *from, int64_t bytes)
{
    memcpy(value, from, (size_t)bytes);
}

static int read_integer(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    const KernelParameter *parameter = &kernel->parameters[i];
    const int bits = 8 * (int)parameter->bytes;
    const bool is_unsigned = parameter->type != NULL && parameter->dtype >= DTYPE_UINT8;
    int overflow;
    const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (number == -1 && PyErr_Occurred()) return -1;
    bool fits = overflow == 0;
    unsigned long long written = (unsigned long long)number;
    if (overflow > 0 && is_unsigned && bits == 64) {
        written = PyLong_AsUnsignedLongLong(object);
        fits = PyErr_Occurred() == NULL;
        PyErr_Clear();
    } else if (is_unsigned) {
        fits = fits && number >= 0 && (bits == 64 || number >> bits == 0);
    } else if (bits < 64) {
        fits = fits && number >= -(1ll << (bits - 1)) && number < 1ll << (bits - 1);
    }
    if (!fits)
        return refuse(PyExc_OverflowError, kernel, i,
                      parameter->type != NULL
                          ? "cannot hold the Python integer %R"
                          : "cannot hold the Python integer %R, if it is signed: for an unsigned "
                            "one pass a NumPy scalar, such as numpy.uint32(...)",
                      object);
    write_bytes(value, &written, parameter->bytes); /* little endian */
    return 0;
}

/* By a cast of NumPy's, for dtypes that C has no word for. */
static int cast_float(const KernelObject *kernel, int i, double number, void *value)
{
    const KernelParameter *parameter = &kernel->parameters[i];
    PyArray_Descr *descr = descr_of(parameter->dtype);
    if (descr == NULL) return -1;
    PyObject *object = PyFloat_FromDouble(number);
    PyArrayObject *array = NULL;
    if (object == NULL)
        Py_DECREF((PyObject *)descr);
    else
        array = (PyArrayObject *)PyArray_FromAny(object, descr, 0, 0, NPY_ARRAY_FORCECAST, NULL);
    if (array != NULL) write_bytes(value, PyArray_DATA(array), parameter->bytes);
    Py_XDECREF(object);
    release(array);
    return array == NULL ? -1 : 0;
}

/* Whether a number was too large for a float; infinity and NaN are not. */
static bool is_lost(double number, float single)
{
    return number - number == 0 && single - single != 0;
}

/* The same for the dtypes that NumPy casts to: bfloat16 is made of a float. */
static bool is_lost_by_cast(double number, Dtype dtype)
{
    const double size = fabs(dtype == DTYPE_FLOAT16 ? number : (double)(float)number);
    return isfinite(number) && size >= (dtype == DTYPE_FLOAT16 ? 65520. : 0x1.ffp127);
}

static int read_float(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    const KernelParameter *parameter = &kernel->parameters[i];
    const double number = PyFloat_AsDouble(object);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (parameter->bytes == 8) {
        write_bytes(value, &number, 8);
        return 0;
    }
    const float single = (float)number;
    const bool is_cast = parameter->bytes == 2;
    if (is_cast ? is_lost_by_cast(number, parameter->dtype) : is_lost(number, single))
        return refuse(PyExc_OverflowError, kernel, i, "cannot hold the Python float %R", object);
    if (is_cast) return cast_float(kernel, i, number, value);
    write_bytes(value, &single, 4);
    return 0;
}

static int read_complex(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    const double real = PyComplex_RealAsDouble(object), imaginary = PyComplex_ImagAsDouble(object);
    if (PyErr_Occurred()) return -1;
    const double wide[] = {real, imaginary};
    const float narrow[] = {(float)real, (float)imaginary};
    const bool is_wide = kernel->parameters[i].bytes == 16;
    if (!is_wide && (is_lost(real, narrow[0]) || is_lost(imaginary, narrow[1])))
        return refuse(PyExc_OverflowError, kernel, i, "cannot hold the Python complex %R", object);
    write_bytes(value, is_wide ? (const void *)wide : narrow, kernel->parameters[i].bytes);
    return 0;
}

/* Of a parameter of which nothing but the size is known. */
static int read_scalar_by_size(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    const int64_t bytes = kernel->parameters[i].bytes;
    if (PyBool_Check(object) && bytes == 1) {
        *(char *)value = object == Py_True;
        return 0;
    }
    if (PyLong_Check(object) && !PyBool_Check(object) && (bytes == 4 || bytes == 8))
        return read_integer(kernel, i, object, value);
    if (PyFloat_Check(object) && !kernel->parameters[i].is_value && (bytes == 4 || bytes == 8))
        return read_float(kernel, i, object, value);
    if (PyComplex_Check(object) && (bytes == 8 || bytes == 16))
        return read_complex(kernel, i, object, value);
    return refuse(PyExc_TypeError, kernel, i,
                  "was given %R, and it is not known how to write that in so many bytes: pass a "
                  "NumPy scalar of that size, such as numpy.int32(...)",
                  object);
}

static int read_typed_scalar(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    const Dtype dtype = kernel->parameters[i].dtype;
    const bool is_integer = PyLong_Check(object), is_float = PyFloat_Check(object);
    if (dtype == DTYPE_BOOL && PyBool_Check(object)) {
        *(char *)value = object == Py_True;
        return 0;
    }
    if (dtype_is_integer(dtype) && is_integer) return read_integer(kernel, i, object, value);
    if (dtype_is_float(dtype) && (is_float || is_integer))
        return read_float(kernel, i, object, value);
    if (dtype_is_complex(dtype)) return read_complex(kernel, i, object, value);
    const char *what = dtype == DTYPE_BOOL       ? "was given %R: pass bool(...)"
                       : dtype_is_integer(dtype) ? "was given %R: pass int(...), if that is meant"
                                                 : "was given %R: pass its .real, if that is meant";
    return refuse(PyExc_TypeError, kernel, i, what, object);
}

static int refuse_numpy_scalar(const KernelObject *kernel, int i, const View *view)
{
    const KernelParameter *parameter = &kernel->parameters[i];
    char text[256];
    if (parameter->type == NULL)
        snprintf(text, sizeof text,
                 "was given a %s of %lld bytes: pass a scalar of the parameter's size%s",
                 view->dtype_name, (long long)view->item_bytes,
                 view->dtype == DTYPE_OPAQUE ? ", with the fields where C++ has them, as "
                                               "numpy.dtype(..., align=True) puts them"
                                             : "");
    else
        snprintf(text, sizeof text, "was given a %s: pass numpy.%s(...)", view->dtype_name,
                 dtype_name(parameter->dtype));
    return refuse(PyExc_TypeError, kernel, i, text, NULL);
}

/* The fields of a structure have byte orders of their own, and a kernel is told none. */
static int check_fields(const KernelObject *kernel, int i, PyArray_Descr *descr)
{
    if (descr == NULL || descr->type_num != NPY_VOID) return 0;
    PyObject *native = PyObject_GetAttrString((PyObject *)descr, "isnative");
    const int is_native = native == NULL ? -1 : PyObject_IsTrue(native);
    Py_XDECREF(native);
    if (is_native != 0) return is_native < 0 ? -1 : 0;
    return refuse(PyExc_TypeError, kernel, i,
                  "was given fields that are not in this machine's byte order, of %R: convert them "
                  "with x.astype(x.dtype.newbyteorder('='))",
                  (PyObject *)descr);
}

/* A NumPy scalar by its bytes. */
static int read_numpy_scalar(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    const KernelParameter *parameter = &kernel->parameters[i];
    PyArray_Descr *descr = PyArray_DescrFromScalar(object);
    PyArrayObject *array = NULL;
    View view;
    int result = -1;
    if (descr == NULL || check_dtype(descr, parameter->name) < 0 ||
        check_fields(kernel, i, descr) < 0)
        goto done;
    fill_dtype(descr, &view);
    if (view.item_bytes != parameter->bytes ||
        (parameter->type != NULL && !dtype_fits(parameter, &view))) {
        refuse_numpy_scalar(kernel, i, &view);
    } else if (PyTypeNum_ISNUMBER(descr->type_num) || PyTypeNum_ISBOOL(descr->type_num)) {
        PyArray_ScalarAsCtype(object, value);
        result = 0;
    } else {
        array = (PyArrayObject *)PyArray_FromScalar(object, NULL);
        if (array == NULL) goto done;
        write_bytes(value, PyArray_DATA(array), parameter->bytes);
        result = 0;
    }
done:
    release(array);
    Py_XDECREF((PyObject *)descr);
    return result;
}

static int read_scalar(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    /* The commonest first; numpy.float64 is a kind of float too. */
    const KernelParameter *parameter = &kernel->parameters[i];
    if (PyFloat_CheckExact(object) && parameter->dtype == DTYPE_FLOAT32 && parameter->bytes == 4)
        return read_float(kernel, i, object, value);
    if (is_numpy_scalar(object)) return read_numpy_scalar(kernel, i, object, value);
    return parameter->type == NULL ? read_scalar_by_size(kernel, i, object, value)
                                   : read_typed_scalar(kernel, i, object, value);
}

/* Arrays. */

/* What is to be made of an object; NumPy makes arrays of almost everything, but a list cannot be
 * written to, and is no argument. */
static int read_host_array(const KernelObject *kernel, int i, PyObject *object, Operand *operand)
{
    if (!PyArray_Check(object) && !PyObject_CheckBuffer(object))
        return refuse(PyExc_TypeError, kernel, i,
                      "is the address of an array, and was given %R: pass an array, In(...), "
                      "Out(...) or InOut(...) of one, or gpuops.Pointer(address)",
                      (PyObject *)Py_TYPE(object));
    operand->kind = KIND_HOST;
    operand->array = as_array(object, operand->name);
    return operand->array == NULL ? -1 : 0;
}

static int read_array(State *state, Arguments *arguments, int i, PyObject *object)
{
    const KernelObject *kernel = arguments->kernel;
    const KernelParameter *parameter = &kernel->parameters[i];
    ArrayArgument *array = &arguments->arrays[arguments->array_count];
    PyTypeObject *type = Py_TYPE(object);
    array->number = i;
    array->is_read = true;
    array->is_written = !parameter->is_const;
    if (type == state->in_type || type == state->out_type || type == state->in_out_type) {
        if (parameter->is_const && type == state->out_type)
            return refuse(PyExc_TypeError, kernel, i,
                          "is const: the kernel cannot write it, as Out(...) says: pass In(...)",
                          NULL);
        array->is_read = type != state->out_type;
        array->is_written = type != state->in_type;
        object = ((WrapperObject *)object)->array;
    }
    Operand *operand = &array->operand;
    /* The faster form of a foreign array, which does not tell whether it may be written. */
    const int found =
        read_array_operand(state, object, kernel->op, parameter->name, USE_READ, operand);
    arguments->array_count++; /* what it holds is released from now on */
    if (found != 0) return found < 0 ? -1 : 0;
    if (array->is_written && is_numpy_scalar(object))
        return refuse(PyExc_TypeError, kernel, i,
                      "was given %R, which cannot be written to: pass an array, or In(...)",
                      object);
    return read_host_array(kernel, i, object, operand);
}

static int read_pointer(const KernelObject *kernel, int i, PyObject *object, void *value)
{
    const uintptr_t address = ((PointerObject *)object)->address;
    if (kernel->parameters[i].bytes != sizeof address ||
        (kernel->parameters[i].type != NULL && !kernel->parameters[i].is_pointer))
        return refuse(PyExc_TypeError, kernel, i, "is no pointer, and was given %R", object);
    write_bytes(value, &address, sizeof address);
    return 0;
}

static int read_argument(State *state, Arguments *arguments, int i, PyObject *object)
{
    const KernelObject *kernel = arguments->kernel;
    const KernelParameter *parameter = &kernel->parameters[i];
    const bool takes_array =
        parameter->is_pointer ||
        (parameter->type == NULL && !parameter->is_value && parameter->bytes == sizeof(void *));
    /* The commonest first. */
    if (takes_array && Py_TYPE(object) == state->array_type)
        return read_array(state, arguments, i, object);
    if (Py_TYPE(object) == state->pointer_type)
        return read_pointer(kernel, i, object, arguments->values[i]);
    if (is_scalar(object)) {
        if (!parameter->is_pointer) return read_scalar(kernel, i, object, arguments->values[i]);
        return refuse(PyExc_TypeError, kernel, i,
                      "is the address of an array, and was given the scalar %R: pass an array, or "
                      "gpuops.Pointer(address)",
                      object);
    }
    if (takes_array) return read_array(state, arguments, i, object);
    return refuse(PyExc_TypeError, kernel, i,
                  "is passed by value, and was given %R: pass a number, or a NumPy scalar, which "
                  "x[()] makes of an array without axes",
                  (PyObject *)Py_TYPE(object));
}

static int refuse_count(const KernelObject *kernel, Py_ssize_t given)
{
    PyErr_Format(PyExc_TypeError, "%s() takes %d argument%s but %zd %s given: %S", kernel->op,
                 kernel->count, kernel->count == 1 ? "" : "s", given, given == 1 ? "was" : "were",
                 kernel);
    return -1;
}

static int read_arguments(State *state, Arguments *arguments, PyObject *args, Py_ssize_t first)
{
    const KernelObject *kernel = arguments->kernel;
    const Py_ssize_t given = PyTuple_Size(args) - first;
    if (given != kernel->count) return refuse_count(kernel, given);
    for (int i = 0; i < kernel->count; i++)
        if (read_argument(state, arguments, i, PyTuple_GetItem(args, first + i)) < 0) return -1;
    return 0;
}

/* Order: the stream of the launch, and the arrays that wait to be told. */

static int open_stream(State *state, Arguments *arguments, PyObject *wanted)
{
    const KernelObject *kernel = arguments->kernel;
    const int device = kernel->module->device;
    const Operand *leader = NULL;
    for (int i = 0; i < arguments->array_count; i++) {
        const Operand *operand = &arguments->arrays[i].operand;
        if (!is_on_device(operand)) continue;
        if (leader == NULL) leader = operand;
        if (operand->view.device == device) continue;
        char text[200];
        snprintf(text, sizeof text,
                 "is on cuda:%d, and the module was compiled for cuda:%d: bring it there with "
                 "gpuops.to_device(..., device=%d), or compile with device=%d",
                 operand->view.device, device, device, operand->view.device);
        return refuse(PyExc_ValueError, kernel, arguments->arrays[i].number, text, NULL);
    }
    arguments->stream = stream_of_call(state, wanted, leader, device);
    if (arguments->stream == NULL) return -1;
    for (int i = 0; i < arguments->array_count; i++) {
        Operand *operand = &arguments->arrays[i].operand;
        if (operand->pending && operand->import(state, operand, arguments->stream) < 0) return -1;
    }
    return 0;
}

/* What is known now that all arrays are complete. */

static bool may_write(const Operand *operand)
{
    if (operand->array != NULL && !PyArray_ISWRITEABLE(operand->array)) return false;
    return operand->read_only == 0;
}

static int check_array(const KernelObject *kernel, const ArrayArgument *array)
{
    const KernelParameter *parameter = &kernel->parameters[array->number];
    const Operand *operand = &array->operand;
    const View *view = &operand->view;
    const bool on_device = view->device != DEVICE_CPU;
    const int64_t item_bytes = dtype_bytes(parameter->dtype);
    char text[256] = "";
    PyObject *error = PyExc_ValueError;
    int overlaps = 0;
    if (!dtype_fits(parameter, view)) {
        error = PyExc_TypeError;
        snprintf(text, sizeof text,
                 "was given an array of %s: pass x.astype('%s'), or one of that dtype",
                 view->dtype_name, dtype_name(parameter->dtype));
    } else if (array->is_written && !may_write(operand)) {
        snprintf(text, sizeof text,
                 "was given a read-only array%s: pass In(x), if the kernel does not write it, or "
                 "declare it const",
                 why_read_only(operand->read_only));
    } else if (on_device && view_items(view) > 0 && !view_is_packed(view)) {
        snprintf(text, sizeof text,
                 "was given an array on the device that is not C-contiguous, and a kernel is told "
                 "no strides: pass a copy, or gpuops.Pointer(x.ptr)");
    } else if (on_device && item_bytes > 0 && (uintptr_t)view->data % (size_t)item_bytes != 0) {
        snprintf(text, sizeof text,
                 "was given an array at an address that is no multiple of %lld: pass a copy",
                 (long long)item_bytes);
    } else if (!on_device && array->is_written) {
        overlaps = overlaps_itself(view);
        if (overlaps > 0)
            snprintf(text, sizeof text,
                     "was given an array some of whose elements share memory with each other, and "
                     "the kernel may write them: pass a copy");
    }
    if (overlaps < 0) PyErr_NoMemory();
    if (text[0] == '\0') return overlaps < 0 ? -1 : 0;
    return refuse(error, kernel, array->number, text, NULL);
}

/* Each array on the host has a copy of its own on the device, so that what two of them share would
 * be there twice. */
static int check_overlaps(const Arguments *arguments, int i)
{
    const ArrayArgument *one = &arguments->arrays[i];
    if (is_on_device(&one->operand)) return 0;
    for (int j = 0; j < i; j++) {
        const ArrayArgument *other = &arguments->arrays[j];
        if (!(one->is_written || other->is_written) ||
            !views_overlap(&one->operand.view, &other->operand.view) ||
            views_coincide(&one->operand.view, &other->operand.view))
            continue;
        char text[200];
        snprintf(
            text, sizeof text,
            "shares memory with argument %d, and the kernel may write one of them: pass a copy",
            other->number + 1);
        return refuse(PyExc_ValueError, arguments->kernel, one->number, text, NULL);
    }
    return 0;
}

static int complete_arrays(Arguments *arguments)
{
    for (int i = 0; i < arguments->array_count; i++)
        if (complete_operand(&arguments->arrays[i].operand) < 0) return -1;
    for (int i = 0; i < arguments->array_count; i++) {
        ArrayArgument *array = &arguments->arrays[i];
        if (check_fields(arguments->kernel, array->number, array->operand.descr) < 0 ||
            check_array(arguments->kernel, array) < 0 || check_overlaps(arguments, i) < 0)
            return -1;
        arguments->launch_arrays[i] =
            (LaunchArray){&array->operand.view, array->is_read, array->is_written,
                          (void **)arguments->values[array->number]};
    }
    return 0;
}

static Status do_launch(void *launch)
{
    return kernel_launch(launch);
}

PyObject *launch(State *state, const LauncherObject *launcher, PyObject *args, Py_ssize_t first)
{
    const KernelObject *kernel = launcher->kernel;
    Arguments arguments;
    PyObject *result = NULL;
    if (open_arguments(&arguments, kernel) < 0) return NULL;
    if (read_arguments(state, &arguments, args, first) < 0 ||
        open_stream(state, &arguments, launcher->stream) < 0 || complete_arrays(&arguments) < 0)
        goto done;
    if (launcher->grid[0] == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    Progress progress;
    progress_init(&progress, kernel->op);
    Launch work = {
        .module = kernel->module->module,
        .kernel = kernel->kernel,
        .stream = arguments.stream,
        .grid = {launcher->grid[0], launcher->grid[1], launcher->grid[2]},
        .block = {launcher->block[0], launcher->block[1], launcher->block[2]},
        .shared_bytes = launcher->shared_bytes,
        .values = arguments.values,
        .arrays = arguments.launch_arrays,
        .array_count = arguments.array_count,
        .watch = &progress.watch,
    };
    Status status = progress_run(&progress, do_launch, &work);
    result = status == STATUS_OK ? Py_NewRef(Py_None)
                                 : raise_status(state, status, kernel->op, kernel->module->device);
done:
    close_arguments(&arguments);
    return result;
}
