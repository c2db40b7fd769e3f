/* The one path that every operator takes: arguments, plan, output, work, result. */
#include "core.h"

/* Signatures.
 *
 * An operator's row says how it is called in Python's own words, for example
 * "x, indices, /, *, axis=0, mode='raise', out=None". The text is read once, at import. */

static const struct {
    const char *name;
    Role role;
} ROLES[] = {
    {"axis", ROLE_AXIS}, {"mode", ROLE_MODE},     {"fill_value", ROLE_FILL},
    {"out", ROLE_OUT},   {"device", ROLE_DEVICE}, {"stream", ROLE_STREAM},
};

static Role role_of(PyObject *name)
{
    for (size_t i = 0; i < sizeof ROLES / sizeof ROLES[0]; i++)
        if (PyUnicode_CompareWithASCIIString(name, ROLES[i].name) == 0) return ROLES[i].role;
    return ROLE_INPUT;
}

int read_signature(Signature *signature)
{
    bool by_position = true;
    const char *at = signature->op.signature;
    while (*at != '\0') {
        size_t length = strcspn(at, ",");
        if (*at == '/') {
            for (int i = 0; i < signature->count; i++) signature->parameters[i].by_keyword = false;
        } else if (*at == '*') {
            by_position = false;
        } else {
            size_t name_length = strcspn(at, "=,");
            Parameter *parameter = &signature->parameters[signature->count++];
            parameter->name = PyUnicode_FromStringAndSize(at, (Py_ssize_t)name_length);
            if (parameter->name == NULL) return -1;
            PyUnicode_InternInPlace(&parameter->name);
            parameter->role = role_of(parameter->name);
            parameter->by_keyword = true;
            parameter->required = at[name_length] != '=';
            signature->by_position += by_position;
            if (parameter->role == ROLE_AXIS) {
                const char *value = at + name_length + 1;
                signature->axis_is_none = *value == 'N';
                signature->axis = signature->axis_is_none ? 0 : atoi(value);
            }
        }
        at += length;
        at += strspn(at, ", ");
    }
    return 0;
}

/* Binding: which argument belongs to which parameter, with the errors that Python would give. */

static int bind_keyword(const Signature *signature, PyObject *name, PyObject *value,
                        PyObject **values)
{
    const char *op = signature->op.name;
    int found = -1;
    for (int i = 0; i < signature->count && found < 0; i++)
        if (signature->parameters[i].name == name) found = i;
    for (int i = 0; i < signature->count && found < 0; i++)
        if (PyUnicode_Compare(signature->parameters[i].name, name) == 0) found = i;
    if (found < 0) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", op, name);
        return -1;
    }
    if (!signature->parameters[found].by_keyword) {
        PyErr_Format(PyExc_TypeError,
                     "%s() got some positional-only arguments passed as keyword arguments: '%U'",
                     op, name);
        return -1;
    }
    if (values[found] != NULL) {
        PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", op, name);
        return -1;
    }
    values[found] = value;
    return 0;
}

static int bind_arguments(const Signature *signature, PyObject *const *args, Py_ssize_t count,
                          PyObject *names, PyObject **values)
{
    if (count > signature->by_position) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d positional arguments but %zd were given",
                     signature->op.name, signature->by_position, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < signature->count; i++) values[i] = i < count ? args[i] : NULL;
    Py_ssize_t keywords = names == NULL ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < keywords; i++)
        if (bind_keyword(signature, PyTuple_GetItem(names, i), args[count + i], values) < 0)
            return -1;
    for (int i = 0; i < signature->count; i++) {
        if (values[i] == NULL && signature->parameters[i].required) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%U' (pos %d)",
                         signature->op.name, signature->parameters[i].name, i + 1);
            return -1;
        }
    }
    return 0;
}

/* Options. */

static int read_axis(PyObject *object, Call *call)
{
    call->axis_is_none = object == Py_None;
    call->axis = 0;
    if (call->axis_is_none) return 0;
    PyObject *index = PyBool_Check(object) ? NULL : PyNumber_Index(object);
    if (index == NULL) {
        if (PyBool_Check(object))
            PyErr_SetString(PyExc_TypeError, "an integer is required for the axis, not a bool");
        return -1;
    }
    long axis = PyLong_AsLong(index);
    Py_DECREF(index);
    if (axis == -1 && PyErr_Occurred()) return -1;
    if (axis > INT_MAX || axis < INT_MIN) {
        PyErr_SetString(PyExc_ValueError, "integer won't fit into a C int: axis is out of bounds");
        return -1;
    }
    call->axis = (int)axis;
    return 0;
}

static int read_mode(PyObject *object, Mode *mode)
{
    static const char *const NAMES[] = {"raise", "wrap", "clip", "fill"};
    if (object == Py_None) {
        *mode = MODE_RAISE; /* as numpy.take has it */
        return 0;
    }
    if (PyUnicode_Check(object)) {
        for (int i = 0; i < 4; i++) {
            if (PyUnicode_CompareWithASCIIString(object, NAMES[i]) == 0) {
                *mode = (Mode)i;
                return 0;
            }
        }
        PyErr_Format(PyExc_ValueError,
                     "clipmode must be one of 'clip', 'raise', or 'wrap' (got %R); gpuops also has "
                     "'fill'",
                     object);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "mode must be 'raise', 'wrap', 'clip' or 'fill', not %R", object);
    return -1;
}

/* Whether two 0-d arrays hold equal values; -1 with an exception. */
static int same_value(PyArrayObject *one, PyArrayObject *other)
{
    PyObject *first = PyArray_Return(hold(one)), *second = PyArray_Return(hold(other));
    int same =
        first == NULL || second == NULL ? -1 : PyObject_RichCompareBool(first, second, Py_EQ);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return same;
}

/* One element of an array's dtype, made of fill_value; NULL stands for a zero. A cast from float to
 * integer, say, drops what does not fit, so that a number is looked at as it came, too. */
static PyArrayObject *read_fill(PyObject *object, PyArrayObject *like)
{
    PyArray_Descr *descr = PyArray_DESCR(like);
    bool to_integer = PyTypeNum_ISINTEGER(descr->type_num) || PyTypeNum_ISBOOL(descr->type_num);
    bool to_real = to_integer || PyTypeNum_ISFLOAT(descr->type_num);
    PyArrayObject *fill = NULL, *natural = NULL;
    int same = 1;

    Py_INCREF((PyObject *)descr); /* both of these take a reference away */
    if (object == NULL) return (PyArrayObject *)PyArray_Zeros(0, NULL, descr, 0);
    if (to_real) {
        natural = (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
        same = natural == NULL ? -1 : !PyTypeNum_ISCOMPLEX(PyArray_TYPE(natural));
    }
    if (same == 1)
        fill = (PyArrayObject *)PyArray_FromAny(object, descr, 0, 0,
                                                NPY_ARRAY_CARRAY | NPY_ARRAY_FORCECAST, NULL);
    else
        Py_DECREF((PyObject *)descr);
    if (fill != NULL && PyArray_NDIM(fill) != 0) {
        PyErr_Format(PyExc_ValueError, "fill_value must be a scalar, not an array of %d dimensions",
                     PyArray_NDIM(fill));
        same = -1;
    } else if (fill != NULL && to_integer) {
        same = same_value(natural, fill);
    }
    if (same == 0)
        PyErr_Format(PyExc_TypeError,
                     "fill_value %R would lose its value in an array of dtype %S: pass one of that "
                     "dtype",
                     object, PyArray_DESCR(like));
    release(natural);
    if (same == 1) return fill;
    release(fill);
    return NULL;
}

/* Results. */

static int check_output(const Call *call, const View *given, PyArrayObject *array,
                        PyArrayObject *like)
{
    const View *out = &call->out;
    bool same = given->ndim == out->ndim;
    for (int i = 0; same && i < out->ndim; i++) same = given->shape[i] == out->shape[i];
    if (!same) {
        npy_intp shape[GPUOPS_MAX_DIMS];
        for (int i = 0; i < out->ndim; i++) shape[i] = out->shape[i];
        PyObject *expected = PyArray_IntTupleFromIntp(out->ndim, shape);
        PyObject *found = PyArray_IntTupleFromIntp(given->ndim, PyArray_DIMS(array));
        if (expected != NULL && found != NULL)
            PyErr_Format(PyExc_ValueError,
                         "output array does not match result of %s: out has shape %S, and the "
                         "result has shape %S",
                         call->op->name, found, expected);
        Py_XDECREF(expected);
        Py_XDECREF(found);
        return -1;
    }
    if (!PyArray_EquivTypes(PyArray_DESCR(array), PyArray_DESCR(like))) {
        PyErr_Format(PyExc_TypeError,
                     "output array does not match result of %s: out has dtype %S, and the result "
                     "has dtype %S",
                     call->op->name, PyArray_DESCR(array), PyArray_DESCR(like));
        return -1;
    }
    int overlaps = overlaps_itself(given);
    if (overlaps < 0) PyErr_NoMemory();
    if (overlaps > 0)
        PyErr_Format(PyExc_ValueError,
                     "some elements of out share memory with each other, so that it cannot hold "
                     "the result of %s: pass an array of its own, for example a copy",
                     call->op->name);
    return overlaps == 0 ? 0 : -1;
}

static PyArrayObject *new_output(const Call *call, PyArrayObject *like)
{
    npy_intp shape[GPUOPS_MAX_DIMS];
    for (int i = 0; i < call->out.ndim; i++) shape[i] = call->out.shape[i];
    PyArray_Descr *descr = PyArray_DESCR(like);
    Py_INCREF((PyObject *)descr);
    /* NumPy makes the strings of a new array at least one character wide, which nobody fills. */
    if (PyArray_ITEMSIZE(like) == 0)
        return (PyArrayObject *)PyArray_Zeros(call->out.ndim, shape, descr, 0);
    return (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, descr, call->out.ndim, shape, NULL,
                                                 NULL, 0, NULL);
}

/* Errors. */

static void raise_axis_error(void)
{
    const Failure *failure = last_failure();
    PyObject *module = PyImport_ImportModule("numpy.exceptions");
    PyObject *type = module == NULL ? NULL : PyObject_GetAttrString(module, "AxisError");
    PyObject *error =
        type == NULL ? NULL : PyObject_CallFunction(type, "ii", failure->axis, failure->ndim);
    if (error != NULL) PyErr_SetObject(type, error);
    Py_XDECREF(error);
    Py_XDECREF(type);
    Py_XDECREF(module);
}

static int set_attribute(PyObject *error, const char *name, PyObject *value)
{
    int result = value == NULL ? -1 : PyObject_SetAttrString(error, name, value);
    Py_XDECREF(value);
    return result;
}

/* A device's errors say which operator and device they befell, and carry CUDA's code and name. */
static void raise_device_error(PyObject *type, const char *op, int device)
{
    const Failure *failure = last_failure();
    PyObject *text = device >= 0
                         ? PyUnicode_FromFormat("%s on cuda:%d: %s", op, device, failure->text)
                         : PyUnicode_FromFormat("%s: %s", op, failure->text);
    PyObject *error = text == NULL ? NULL : PyObject_CallFunctionObjArgs(type, text, NULL);
    Py_XDECREF(text);
    if (error == NULL) return;
    if (set_attribute(error, "code", PyLong_FromLong(failure->cuda_code)) == 0 &&
        set_attribute(error, "name", PyUnicode_FromString(failure->cuda_name)) == 0 &&
        set_attribute(error, "operator", PyUnicode_FromString(op)) == 0)
        PyErr_SetObject(type, error);
    Py_DECREF(error);
}

/* Sets the exception that a failed status stands for, and returns NULL. The text may hold bytes of
 * the environment, which PyErr_Format takes as they are. */
void *raise_status(State *state, Status status, const char *op, int device)
{
    const char *text = last_failure()->text;
    switch (status) {
    case STATUS_OK:
        break;
    case STATUS_TYPE_ERROR:
        PyErr_Format(PyExc_TypeError, "%s", text);
        break;
    case STATUS_VALUE_ERROR:
        PyErr_Format(PyExc_ValueError, "%s", text);
        break;
    case STATUS_INDEX_ERROR:
        PyErr_Format(PyExc_IndexError, "%s", text);
        break;
    case STATUS_AXIS_ERROR:
        raise_axis_error();
        break;
    case STATUS_MEMORY_ERROR:
        PyErr_Format(PyExc_MemoryError, "%s: %s", op, text);
        break;
    case STATUS_DEVICE_ERROR:
        raise_device_error(state->device_error, op, device);
        break;
    case STATUS_DEVICE_LOST:
        raise_device_error(state->device_lost_error, op, device);
        break;
    case STATUS_FORKED:
        raise_device_error(state->forked_process_error, op, device);
        break;
    }
    return NULL;
}

/* The only place where the GIL is released. */
Status without_gil(Status (*work)(void *), void *context)
{
    Status status;
    Py_BEGIN_ALLOW_THREADS
    status = work(context);
    Py_END_ALLOW_THREADS
    return status;
}

typedef struct Work {
    Call *call;
    int wanted_device;
} Work;

static Status do_work(void *context)
{
    Work *work = context;
    Status status = choose_device(work->call, work->wanted_device);
    return status == STATUS_OK ? work->call->op->run(work->call) : status;
}

/* Everything that may run Python code, which could resize an array that has been looked at. */
typedef struct Arguments {
    PyArrayObject *inputs[GPUOPS_MAX_INPUTS];
    const char *names[GPUOPS_MAX_INPUTS];
    int count;
    PyArrayObject *out;     /* what out= holds, or NULL */
    PyObject *out_argument; /* out= itself, borrowed */
    PyArrayObject *fill;
    int device;
} Arguments;

static int read_arguments(const Signature *signature, PyObject **values, Call *call,
                          Arguments *arguments)
{
    PyObject *fill_value = NULL, *device = Py_None;
    for (int i = 0; i < signature->count; i++) {
        const Parameter *parameter = &signature->parameters[i];
        PyObject *value = values[i];
        if (value == NULL) continue;
        switch (parameter->role) {
        case ROLE_INPUT: {
            const char *name = PyUnicode_AsUTF8AndSize(parameter->name, NULL);
            if (name == NULL) return -1;
            PyArrayObject *input =
                strcmp(name, "indices") == 0 ? as_indices(value, name) : as_array(value, name);
            if (input == NULL) return -1;
            arguments->inputs[arguments->count] = input;
            arguments->names[arguments->count++] = name;
            break;
        }
        case ROLE_AXIS:
            if (read_axis(value, call) < 0) return -1;
            break;
        case ROLE_MODE:
            if (read_mode(value, &call->mode) < 0) return -1;
            break;
        case ROLE_FILL:
            fill_value = value == Py_None ? NULL : value;
            break;
        case ROLE_OUT:
            if (value == Py_None) break;
            arguments->out_argument = value;
            arguments->out = as_output(value);
            if (arguments->out == NULL) return -1;
            break;
        case ROLE_DEVICE:
            device = value;
            break;
        case ROLE_STREAM:
            if (read_stream(value, &call->stream) < 0) return -1;
            break;
        }
    }
    if (call->mode == MODE_FILL) {
        if (check_dtype(arguments->inputs[0], arguments->names[0]) < 0) return -1;
        arguments->fill = read_fill(fill_value, arguments->inputs[0]);
        if (arguments->fill == NULL) return -1;
        call->fill = PyArray_DATA(arguments->fill);
    } else if (fill_value != NULL) {
        PyErr_SetString(PyExc_ValueError, "fill_value is for mode='fill' only");
        return -1;
    }
    return read_device(device, &arguments->device);
}

PyObject *call_operator(PyObject *module, int op, PyObject *const *args, Py_ssize_t count,
                        PyObject *names)
{
    State *state = PyModule_GetState(module);
    const Signature *signature = &state->signatures[op];
    PyObject *values[MAX_PARAMETERS];
    if (bind_arguments(signature, args, count, names, values) < 0) return NULL;

    Call call;
    call.op = &signature->op;
    call.axis = signature->axis;
    call.axis_is_none = signature->axis_is_none;
    call.mode = MODE_RAISE;
    call.fill = NULL;
    call.device = DEVICE_CPU;
    call.stream = NULL;
    Arguments arguments = {.device = DEVICE_DEFAULT};
    PyArrayObject *out = NULL;
    PyObject *result = NULL;

    if (read_arguments(signature, values, &call, &arguments) < 0) goto done;
    for (int i = 0; i < arguments.count; i++)
        if (fill_view(arguments.inputs[i], arguments.names[i], &call.inputs[i]) < 0) goto done;

    Status status = call.op->plan(&call);
    if (status != STATUS_OK) {
        raise_status(state, status, call.op->name, call.device);
        goto done;
    }

    PyArrayObject *given = arguments.out;
    if (given != NULL) {
        View view;
        if (fill_view(given, "out", &view) < 0 ||
            check_output(&call, &view, given, arguments.inputs[0]) < 0)
            goto done;
        bool overlaps = false;
        for (int i = 0; i < arguments.count; i++) overlaps |= views_overlap(&view, &call.inputs[i]);
        /* Operands that overlap act as if they had been copied first. */
        out = overlaps ? new_output(&call, arguments.inputs[0]) : hold(given);
    } else {
        out = new_output(&call, arguments.inputs[0]);
    }
    if (out == NULL || fill_view(out, "out", &call.out) < 0) goto done;
    call.out_is_fresh = out != given;

    Work work = {&call, arguments.device};
    status = without_gil(do_work, &work);
    if (status != STATUS_OK) {
        raise_status(state, status, call.op->name, call.device);
    } else if (given == NULL) {
        result = PyArray_Return(hold(out));
    } else if (out == given || PyArray_CopyInto(given, out) == 0) {
        result = Py_NewRef(arguments.out_argument);
    }

done:
    for (int i = 0; i < arguments.count; i++) release(arguments.inputs[i]);
    release(arguments.fill);
    release(arguments.out);
    release(out);
    return result;
}
