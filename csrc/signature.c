/* What an operator's signature says, and how its arguments are read. */
#include "core.h"

/* Signatures.
 *
 * An operator's row says how it is called in Python's own words, for example
 * "x, indices, /, *, axis=0, mode='raise', out=None". The text is read once, at import. */

static const struct {
    const char *name;
    Role role;
} ROLES[] = {
    {"axis", ROLE_AXIS},           {"mode", ROLE_MODE},
    {"fill_value", ROLE_FILL},     {"deterministic", ROLE_DETERMINISTIC},
    {"precision", ROLE_PRECISION}, {"cval", ROLE_BORDER_VALUE},
    {"origin", ROLE_ORIGIN},       {"out", ROLE_OUT},
    {"output", ROLE_OUTPUT},       {"device", ROLE_DEVICE},
    {"stream", ROLE_STREAM},       {"progress", ROLE_PROGRESS},
};

/* The word mode is for indices, or for the borders of images: its default tells. */
static Role role_of(PyObject *name, const char *value)
{
    for (size_t i = 0; i < sizeof ROLES / sizeof ROLES[0]; i++) {
        if (PyUnicode_CompareWithASCIIString(name, ROLES[i].name) != 0) continue;
        const bool border = ROLES[i].role == ROLE_MODE && strncmp(value, "'raise'", 7) != 0;
        return border ? ROLE_BORDER : ROLES[i].role;
    }
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
            parameter->text = PyUnicode_AsUTF8AndSize(parameter->name, NULL);
            if (parameter->text == NULL) return -1;
            parameter->required = at[name_length] != '=';
            parameter->role = role_of(parameter->name, at + name_length + !parameter->required);
            parameter->by_keyword = true;
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
    /* Without a place for the result, it takes that of the first argument. */
    bool makes_result = false;
    for (int i = 0; i < signature->count; i++)
        makes_result |= signature->parameters[i].role == ROLE_OUT ||
                        signature->parameters[i].role == ROLE_OUTPUT;
    if (!makes_result) signature->parameters[0].role = ROLE_TARGET;
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

int bind_arguments(const Signature *signature, PyObject *const *args, Py_ssize_t count,
                   PyObject *names, PyObject **values)
{
    if (count > signature->by_position) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d positional arguments but %zd were given",
                     signature->op.name, signature->by_position, count);
        return -1;
    }
    const Py_ssize_t parameters = signature->count;
    for (Py_ssize_t i = 0; i < parameters; i++) values[i] = i < count ? args[i] : NULL;
    Py_ssize_t keywords = names == NULL ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < keywords; i++)
        if (bind_keyword(signature, PyTuple_GetItem(names, i), args[count + i], values) < 0)
            return -1;
    /* None of them comes after one that has a default. */
    for (int i = (int)count; i < signature->count && signature->parameters[i].required; i++) {
        if (values[i] == NULL) {
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

/* The position of a word in a list, or -1 where it is not in it. */
static int find_word(PyObject *object, const char *const *words, int count)
{
    for (int i = 0; PyUnicode_Check(object) && i < count; i++)
        if (PyUnicode_CompareWithASCIIString(object, words[i]) == 0) return i;
    return -1;
}

static int read_mode(PyObject *object, Mode *mode)
{
    static const char *const NAMES[] = {"raise", "wrap", "clip", "fill"};
    if (object == Py_None) {
        *mode = MODE_RAISE; /* as numpy.take has it */
        return 0;
    }
    const int found = find_word(object, NAMES, 4);
    if (found >= 0) {
        *mode = (Mode)found;
        return 0;
    }
    if (PyUnicode_Check(object)) {
        PyErr_Format(PyExc_ValueError,
                     "clipmode must be one of 'clip', 'raise', or 'wrap' (got %R); gpuops also has "
                     "'fill'",
                     object);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "mode must be 'raise', 'wrap', 'clip' or 'fill', not %R", object);
    return -1;
}

/* scipy.ndimage's words; those with "grid-" differ from the others where it interpolates only. */
static int read_border(PyObject *object, Border *border)
{
    static const char *const NAMES[] = {"reflect", "mirror",      "nearest",       "constant",
                                        "wrap",    "grid-mirror", "grid-constant", "grid-wrap"};
    static const Border BORDERS[] = {BORDER_REFLECT,  BORDER_MIRROR, BORDER_NEAREST,
                                     BORDER_CONSTANT, BORDER_WRAP,   BORDER_REFLECT,
                                     BORDER_CONSTANT, BORDER_WRAP};
    const int found = find_word(object, NAMES, sizeof NAMES / sizeof NAMES[0]);
    if (found >= 0) {
        *border = BORDERS[found];
        return 0;
    }
    PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                 "mode must be 'reflect', 'mirror', 'nearest', 'constant' or 'wrap', not %R",
                 object);
    return -1;
}

static int read_border_value(PyObject *object, double *value)
{
    *value = PyFloat_AsDouble(object);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static int read_one_origin(PyObject *object, int *origin)
{
    PyObject *index = PyNumber_Index(object);
    const long value = index == NULL ? -1 : PyLong_AsLong(index);
    Py_XDECREF(index);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value > INT_MAX || value < INT_MIN) {
        PyErr_Format(PyExc_ValueError, "invalid origin: %ld is not within any weights", value);
        return -1;
    }
    *origin = (int)value;
    return 0;
}

/* A number for both axes of the image, or one for each axis, of which those before the image are
 * not filtered. */
static int read_origin(PyObject *object, Call *call)
{
    call->origin_count = 0;
    if (!PySequence_Check(object)) {
        if (read_one_origin(object, &call->origins[0]) < 0) return -1;
        call->origins[1] = call->origins[0];
        return 0;
    }
    const Py_ssize_t count = PySequence_Size(object);
    if (count < 0) return -1;
    if (count < 1 || count > GPUOPS_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError,
                     "origin must be a number or a sequence of one for each axis, and has %zd",
                     count);
        return -1;
    }
    call->origins[0] = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(object, i);
        int origin = 0;
        const int read = item == NULL ? -1 : read_one_origin(item, &origin);
        Py_XDECREF(item);
        if (read < 0) return -1;
        if (i >= count - 2) {
            call->origins[2 - (count - i)] = origin;
        } else if (origin != 0) {
            PyErr_SetString(PyExc_ValueError,
                            "invalid origin: the axes before the last two are not filtered, so "
                            "that theirs must be 0");
            return -1;
        }
    }
    call->origin_count = (int)count;
    return 0;
}

static int read_precision(PyObject *object, Precision *precision)
{
    static const char *const NAMES[] = {"full", "tf32"};
    const int found = find_word(object, NAMES, 2);
    if (found < 0) {
        PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                     "precision must be 'full' or 'tf32', not %R", object);
        return -1;
    }
    *precision = (Precision)found;
    return 0;
}

int read_flag(PyObject *object, const char *name, bool *flag)
{
    if (!PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be True or False, not %R", name, object);
        return -1;
    }
    *flag = object == Py_True;
    return 0;
}

void set_defaults(const Signature *signature, Call *call)
{
    call->op = &signature->op;
    call->axis = signature->axis;
    call->axis_is_none = signature->axis_is_none;
    call->mode = MODE_RAISE;
    call->fill = NULL;
    call->deterministic = false;
    call->precision = PRECISION_FULL;
    call->border = BORDER_REFLECT;
    call->border_value = 0;
    call->origins[0] = call->origins[1] = call->origin_count = 0;
    call->wanted = DTYPE_OPAQUE;
    call->device = DEVICE_CPU;
    call->stream = NULL;
    call->slot = -1;
    call->compute = DTYPE_OPAQUE;
    call->in_place = call->elementwise = call->own_transfer = false;
    call->run_in_parts = NULL;
    call->watch = NULL;
    call->given = NULL;
    call->cast_inputs = call->host_inputs = 0;
    call->operations = 0;
}

int read_option(Role role, PyObject *value, Call *call)
{
    switch (role) {
    case ROLE_AXIS:
        return read_axis(value, call);
    case ROLE_MODE:
        return read_mode(value, &call->mode);
    case ROLE_DETERMINISTIC:
        return read_flag(value, "deterministic", &call->deterministic);
    case ROLE_PRECISION:
        return read_precision(value, &call->precision);
    case ROLE_BORDER:
        return read_border(value, &call->border);
    case ROLE_BORDER_VALUE:
        return read_border_value(value, &call->border_value);
    case ROLE_ORIGIN:
        return read_origin(value, call);
    default:
        return 0; /* an operand, or where to work */
    }
}
