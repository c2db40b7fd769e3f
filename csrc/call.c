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
            parameter->by_position = by_position;
            parameter->by_keyword = true;
            parameter->required = at[name_length] != '=';
            signature->inputs += parameter->role == ROLE_INPUT;
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
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) return -1;
    int overflow;
    long axis = PyLong_AsLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (axis == -1 && PyErr_Occurred()) return -1;
    /* No array has that many dimensions, so plan will say that the axis is out of bounds. */
    if (overflow != 0 || axis > INT_MAX || axis < INT_MIN)
        axis = overflow < 0 || axis < 0 ? INT_MIN : INT_MAX;
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

/* One element of an array's dtype, made of fill_value; NULL stands for a zero. */
static PyArrayObject *read_fill(PyObject *object, PyArrayObject *like)
{
    PyArray_Descr *descr = PyArray_DESCR(like);
    Py_INCREF((PyObject *)descr);
    if (object == NULL || object == Py_None)
        return (PyArrayObject *)PyArray_Zeros(0, NULL, descr, 0);

    PyArrayObject *natural = (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
    PyArrayObject *fill = NULL;
    if (natural == NULL) {
        Py_DECREF((PyObject *)descr);
        return NULL;
    }
    bool to_integer = PyTypeNum_ISINTEGER(descr->type_num) || PyTypeNum_ISBOOL(descr->type_num);
    bool to_real = to_integer || PyTypeNum_ISFLOAT(descr->type_num);
    int type = PyArray_TYPE(natural);
    if ((to_integer && PyTypeNum_ISFLOAT(type)) || (to_real && PyTypeNum_ISCOMPLEX(type))) {
        PyErr_Format(PyExc_TypeError,
                     "fill_value %R would lose its value in an array of dtype %S: pass one of that "
                     "dtype",
                     object, descr);
        Py_DECREF((PyObject *)descr);
    } else {
        fill = (PyArrayObject *)PyArray_FromAny(object, descr, 0, GPUOPS_MAX_DIMS,
                                                NPY_ARRAY_CARRAY | NPY_ARRAY_FORCECAST, NULL);
        if (fill != NULL && PyArray_NDIM(fill) != 0) {
            PyErr_Format(PyExc_ValueError,
                         "fill_value must be a scalar, not an array of %d dimensions",
                         PyArray_NDIM(fill));
            release(fill);
            fill = NULL;
        }
    }
    release(natural);
    return fill;
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
    return (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, descr, call->out.ndim, shape, NULL,
                                                 NULL, 0, NULL);
}

/* Errors. */

static PyObject *axis_error(void)
{
    PyObject *module = PyImport_ImportModule("numpy.exceptions");
    PyObject *type = module == NULL ? NULL : PyObject_GetAttrString(module, "AxisError");
    Py_XDECREF(module);
    return type;
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

/* Sets the exception that a failed status stands for, and returns NULL. */
void *raise_status(State *state, Status status, const char *op, int device)
{
    const char *text = last_failure()->text;
    PyObject *type = NULL;
    switch (status) {
    case STATUS_OK:
        break;
    case STATUS_TYPE_ERROR:
        PyErr_SetString(PyExc_TypeError, text);
        break;
    case STATUS_VALUE_ERROR:
        PyErr_SetString(PyExc_ValueError, text);
        break;
    case STATUS_INDEX_ERROR:
        PyErr_SetString(PyExc_IndexError, text);
        break;
    case STATUS_AXIS_ERROR:
        type = axis_error();
        if (type != NULL) PyErr_SetString(type, text);
        Py_XDECREF(type);
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
    Py_BEGIN_ALLOW_THREADS status = work(context);
    Py_END_ALLOW_THREADS return status;
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
    Work work = {&call, DEVICE_DEFAULT};
    PyArrayObject *inputs[GPUOPS_MAX_INPUTS] = {NULL};
    PyArrayObject *fill = NULL, *given = NULL, *out = NULL;
    PyObject *fill_value = NULL, *out_argument = NULL, *device = Py_None, *result = NULL;
    int input = 0;

    for (int i = 0; i < signature->count; i++) {
        const Parameter *parameter = &signature->parameters[i];
        PyObject *value = values[i];
        if (value == NULL) continue;
        switch (parameter->role) {
        case ROLE_INPUT: {
            const char *name = PyUnicode_AsUTF8AndSize(parameter->name, NULL);
            if (name == NULL) goto done;
            inputs[input] =
                strcmp(name, "indices") == 0 ? as_indices(value, name) : as_array(value, name);
            if (inputs[input] == NULL) goto done;
            if (fill_view(inputs[input], name, &call.inputs[input]) < 0) goto done;
            input++;
            break;
        }
        case ROLE_AXIS:
            if (read_axis(value, &call) < 0) goto done;
            break;
        case ROLE_MODE:
            if (read_mode(value, &call.mode) < 0) goto done;
            break;
        case ROLE_FILL:
            fill_value = value == Py_None ? NULL : value;
            break;
        case ROLE_OUT:
            out_argument = value == Py_None ? NULL : value;
            break;
        case ROLE_DEVICE:
            device = value;
            break;
        case ROLE_STREAM:
            if (read_stream(value, &call.stream) < 0) goto done;
            break;
        }
    }
    if (read_device(device, &work.wanted_device) < 0) goto done;

    Status status = call.op->plan(&call);
    if (status != STATUS_OK) {
        raise_status(state, status, call.op->name, call.device);
        goto done;
    }
    if (call.mode == MODE_FILL) {
        fill = read_fill(fill_value, inputs[0]);
        if (fill == NULL) goto done;
        call.fill = PyArray_DATA(fill);
    } else if (fill_value != NULL) {
        PyErr_SetString(PyExc_ValueError, "fill_value is for mode='fill' only");
        goto done;
    }

    if (out_argument != NULL) {
        given = as_output(out_argument);
        View view;
        if (given == NULL || fill_view(given, "out", &view) < 0 ||
            check_output(&call, &view, given, inputs[0]) < 0)
            goto done;
        bool overlaps = false;
        for (int i = 0; i < input; i++) overlaps |= views_overlap(&view, &call.inputs[i]);
        /* Operands that overlap act as if they had been copied first. */
        out = overlaps ? new_output(&call, inputs[0]) : hold(given);
    } else {
        out = new_output(&call, inputs[0]);
    }
    if (out == NULL || fill_view(out, "out", &call.out) < 0) goto done;
    call.out_is_fresh = out != given;

    status = without_gil(do_work, &work);
    if (status != STATUS_OK) {
        raise_status(state, status, call.op->name, call.device);
    } else if (given == NULL) {
        result = PyArray_Return(hold(out));
    } else if (out == given || PyArray_CopyInto(given, out) == 0) {
        result = Py_NewRef(out_argument);
    }

done:
    for (int i = 0; i < GPUOPS_MAX_INPUTS; i++) release(inputs[i]);
    release(fill);
    release(given);
    release(out);
    return result;
}
