/* The one path that every operator takes: arguments, plan, output, work, result. It is too long for
 * the shortest calls, which brief.c makes. */
#include "core.h"

#include <stdarg.h>

/* Whether two 0-d arrays hold equal values; -1 with an exception. */
static int same_value(PyArrayObject *one, PyArrayObject *other)
{
    PyObject *first = PyArray_Return(hold(one));
    PyObject *second = first == NULL ? NULL : PyArray_Return(hold(other));
    int same = second == NULL ? -1 : PyObject_RichCompareBool(first, second, Py_EQ);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return same;
}

/* One element of an array's dtype, made of fill_value; NULL stands for a zero. A cast from float to
 * integer, say, drops what does not fit, so that a number is looked at as it came, too. */
static PyArrayObject *read_fill(PyObject *object, PyArray_Descr *descr)
{
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
                     object, descr);
    release(natural);
    if (same == 1) return fill;
    release(fill);
    return NULL;
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

/* A device's errors say which operator, operands and device they befell, and carry CUDA's code and
 * name. */
static void raise_device_error(PyObject *type, const char *op, const char *operands, int device)
{
    const Failure *failure = last_failure();
    PyObject *text = device >= 0 ? PyUnicode_FromFormat("%s%s on cuda:%d: %s", op, operands, device,
                                                        failure->text)
                                 : PyUnicode_FromFormat("%s%s: %s", op, operands, failure->text);
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
 * the environment, which PyErr_Format takes as they are. What the operands were tells how much was
 * asked of the machine; faults of the caller are described in their own texts. */
static void *raise_failure(State *state, Status status, const char *op, const char *operands,
                           int device)
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
        PyErr_Format(PyExc_MemoryError, "%s%s: %s", op, operands, text);
        break;
    case STATUS_DEVICE_ERROR:
        raise_device_error(state->device_error, op, operands, device);
        break;
    case STATUS_DEVICE_LOST:
        raise_device_error(state->device_lost_error, op, operands, device);
        break;
    case STATUS_FORKED:
        raise_device_error(state->forked_process_error, op, operands, device);
        break;
    case STATUS_LIBRARY_ERROR:
        PyErr_Format(PyExc_OSError, "%s", text);
        break;
    case STATUS_INTERRUPTED: /* the exception is there */
        break;
    }
    return NULL;
}

void *raise_status(State *state, Status status, const char *op, int device)
{
    return raise_failure(state, status, op, "", device);
}

/* The only place where the GIL is released. */
PyThreadState *release_gil(void)
{
    return PyEval_SaveThread();
}

Status without_gil_for_now(Status (*work)(void *), void *context, PyThreadState **saved)
{
    *saved = release_gil();
    const Status status = work(context);
    PyEval_RestoreThread(*saved);
    return status;
}

Status without_gil(Status (*work)(void *), void *context)
{
    PyThreadState *saved;
    return without_gil_for_now(work, context, &saved);
}

static bool is_in_place(const Signature *signature)
{
    return signature->parameters[0].role == ROLE_TARGET;
}

/* Everything that may run Python code, which could resize an array that has been looked at. */
typedef struct Arguments {
    Operand inputs[GPUOPS_MAX_INPUTS];
    Operand out; /* object is NULL where out= was not given */
    int count;
    unsigned huge; /* bit i: inputs[i] is an integer that is too large for any dtype of integers */
    PyArrayObject *fill;
    PyArray_Descr *wanted;
    PyObject *fill_value, *device, *stream; /* borrowed */
    bool shows_progress;
} Arguments;

static int read_output(State *state, PyObject *object, const char *op, const char *name,
                       Operand *out)
{
    if (read_operand(state, object, op, name, USE_WRITTEN, out) < 0) return -1;
    if (is_on_device(out)) return 0;
    if (out->kind == KIND_HOST && out->descr == NULL && !PyArray_Check(object)) {
        release(out->array);
        out->array = as_output(object, name);
        return out->array == NULL ? -1 : 0;
    }
    if (out->read_only == READ_ONLY_UNSAID) {
        PyErr_Format(PyExc_ValueError, "%s is read-only%s: pass another array", name,
                     why_read_only(out->read_only));
        return -1;
    }
    return PyArray_FailUnlessWriteable(out->array, name);
}

/* Text of a fixed size, to which more is added as long as there is room. */
typedef struct Text {
    char bytes[512];
    size_t length;
} Text;

static void add_text(Text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_text(Text *text, const char *format, ...)
{
    const size_t room = sizeof text->bytes - text->length;
    va_list arguments;
    va_start(arguments, format);
    const int added = vsnprintf(text->bytes + text->length, room, format, arguments);
    va_end(arguments);
    if (added > 0) text->length += (size_t)added < room ? (size_t)added : room - 1;
}

static void add_operand(Text *text, const Operand *operand)
{
    const View *view = &operand->view;
    add_text(text, "%s%s: %s (", text->length > 0 ? ", " : "(", operand->name, view->dtype_name);
    for (int i = 0; i < view->ndim; i++)
        add_text(text, i == 0 ? "%lld" : ", %lld", (long long)view->shape[i]);
    add_text(text, view->ndim == 1 ? ",)" : ")");
}

/* The same for a call whose operands are known: "(x: float64 (3, 4), indices: int64 (2,))". */
static void *raise_call_status(State *state, Status status, const Call *call,
                               const Arguments *arguments)
{
    Text operands = {.length = 0};
    if (call->in_place) add_operand(&operands, &arguments->out);
    for (int i = 0; i < arguments->count; i++) add_operand(&operands, &arguments->inputs[i]);
    if (!call->in_place && arguments->out.object != NULL) add_operand(&operands, &arguments->out);
    add_text(&operands, ")");
    return raise_failure(state, status, call->op->name, operands.bytes, call->device);
}

static bool names_a_dtype(PyObject *object)
{
    return PyType_Check(object) || PyUnicode_Check(object) || PyArray_DescrCheck(object);
}

static int read_wanted(PyObject *object, Call *call, Arguments *arguments)
{
    View view;
    if (!PyArray_DescrConverter(object, &arguments->wanted)) return -1;
    if (check_dtype(arguments->wanted, NULL) < 0) return -1;
    fill_dtype(arguments->wanted, &view);
    call->wanted = view.dtype;
    if (call->wanted != DTYPE_OPAQUE) return 0;
    PyErr_Format(PyExc_TypeError, "%s cannot give a result of dtype %S", call->op->name,
                 arguments->wanted);
    return -1;
}

static int read_arguments(State *state, const Signature *signature, PyObject **values, Call *call,
                          Arguments *arguments)
{
    for (int i = 0; i < signature->count; i++) {
        const Parameter *parameter = &signature->parameters[i];
        PyObject *value = values[i];
        if (value == NULL) continue;
        const char *name = parameter->text;
        switch (parameter->role) {
        case ROLE_INPUT:
            if (read_operand(state, value, call->op->name, name, USE_READ,
                             &arguments->inputs[arguments->count++]) < 0)
                return -1;
            break;
        case ROLE_OUTPUT:
            if (names_a_dtype(value)) {
                if (read_wanted(value, call, arguments) < 0) return -1;
                break;
            }
            /* fall through */
        case ROLE_OUT:
            if (value == Py_None) break;
            /* fall through */
        case ROLE_TARGET:
            if (read_output(state, value, call->op->name, name, &arguments->out) < 0) return -1;
            break;
        case ROLE_FILL:
            arguments->fill_value = value == Py_None ? NULL : value;
            break;
        case ROLE_DEVICE:
            arguments->device = value;
            break;
        case ROLE_STREAM:
            arguments->stream = value;
            break;
        case ROLE_PROGRESS:
            if (read_flag(value, name, &arguments->shows_progress) < 0) return -1;
            break;
        default:
            if (read_option(parameter->role, value, call) < 0) return -1;
        }
    }
    return 0;
}

static int read_fill_argument(const Signature *signature, Call *call, Arguments *arguments)
{
    if (is_in_place(signature)) return 0;
    if (call->mode != MODE_FILL) {
        if (arguments->fill_value == NULL) return 0;
        PyErr_SetString(PyExc_ValueError, "fill_value is for mode='fill' only");
        return -1;
    }
    const Operand *x = &arguments->inputs[0];
    PyArray_Descr *descr = x->array != NULL ? PyArray_DESCR(x->array) : x->descr;
    if (descr == NULL) return require_descr(x);
    if (check_dtype(descr, x->name) < 0) return -1;
    arguments->fill = read_fill(arguments->fill_value, descr);
    if (arguments->fill == NULL) return -1;
    call->fill = PyArray_DATA(arguments->fill);
    return 0;
}

/* What the elements of an operand are, also before its view is filled; NULL where NumPy has no word
 * for them. */
static PyArray_Descr *known_descr(const Operand *operand)
{
    if (operand->descr != NULL || operand->array == NULL) return operand->descr;
    return operand->dtype.code == DL_NONE ? PyArray_DESCR(operand->array) : NULL;
}

static bool is_only_moved(PyArray_Descr *descr)
{
    View view;
    fill_dtype(descr, &view);
    return view.dtype == DTYPE_OPAQUE;
}

/* Python's own scalars and empty lists have no dtype that anybody chose. Its times are objects to
 * NumPy, unless it is told of times. */
static bool has_chosen_dtype(const Operand *operand, PyArray_Descr *descr)
{
    PyObject *object = operand->object;
    if (operand->kind != KIND_HOST || PyArray_Check(object) || PyArray_CheckScalar(object))
        return true;
    if (PyArray_SIZE(operand->array) == 0 || PyArray_IsPythonScalar(object)) return false;
    return !PyTypeNum_ISDATETIME(descr->type_num) || PyArray_NDIM(operand->array) > 0;
}

/* Values that scatter writes, where they or what they are written to are of a dtype that is only
 * moved: NumPy casts them, on the host, which may run Python code. */
static int cast_moved_values(const Call *call, Arguments *arguments)
{
    Operand *x = &arguments->out, *values = &arguments->inputs[1];
    if (call->op->plan != plan_scatter) return 0;
    PyArray_Descr *from = known_descr(values), *to = known_descr(x);
    if (from == NULL || to == NULL || from == to || !(is_only_moved(from) || is_only_moved(to)) ||
        PyArray_EquivTypes(from, to))
        return 0;
    const bool on_device = is_on_device(x) || is_on_device(values);
    const bool chosen = !is_only_moved(to) || has_chosen_dtype(values, to);
    if (check_dtype(to, x->name) < 0 || (chosen && check_dtype(from, values->name) < 0)) return -1;
    PyArrayObject *cast = NULL;
    if (!on_device && !chosen) {
        Py_INCREF((PyObject *)to); /* which both of these take away */
        cast = (PyArrayObject *)PyArray_FromAny(values->object, to, 0, 0, 0, NULL);
    } else if (!on_device && PyArray_CanCastTypeTo(from, to, NPY_SAME_KIND_CASTING)) {
        Py_INCREF((PyObject *)to);
        cast = (PyArrayObject *)PyArray_FromArray(values->array, to, NPY_ARRAY_FORCECAST);
    } else if (on_device) {
        PyErr_Format(PyExc_TypeError,
                     "Cannot cast values from %R to %R, as x or values are on a GPU, where such "
                     "elements are only moved: pass values of the dtype of x",
                     from, to);
    } else {
        PyErr_Format(PyExc_TypeError,
                     "Cannot cast values from %R to %R according to the rule 'same_kind': convert "
                     "them with values.astype(x.dtype)",
                     from, to);
    }
    if (cast == NULL) return -1;
    release(values->array);
    values->array = cast;
    Py_XDECREF((PyObject *)values->descr);
    values->descr = NULL;
    values->dtype.code = DL_NONE;
    return 0;
}

/* The operand on a device that decides where the call runs, or NULL; all others are to be on the
 * same device or on the host. */
static int find_leader(const Arguments *arguments, const Operand **leader)
{
    *leader = NULL;
    for (int i = 0; i <= arguments->count; i++) {
        const Operand *operand = i < arguments->count ? &arguments->inputs[i] : &arguments->out;
        if (!is_on_device(operand)) continue;
        if (*leader == NULL) *leader = operand;
        if (operand->view.device == (*leader)->view.device) continue;
        PyErr_Format(PyExc_ValueError,
                     "%s is on cuda:%d and %s on cuda:%d: bring them to one device first, for "
                     "example with gpuops.to_device(..., device=%d)",
                     (*leader)->name, (*leader)->view.device, operand->name, operand->view.device,
                     (*leader)->view.device);
        return -1;
    }
    if (*leader != NULL && arguments->out.object != NULL && !is_on_device(&arguments->out)) {
        const char *out = arguments->out.name;
        if (strcmp(out, "out") == 0 || strcmp(out, "output") == 0)
            PyErr_Format(PyExc_TypeError,
                         "%s is on cuda:%d and %s on the host: leave %s away and call "
                         "result.to_host(out=...), or pass an array on the device",
                         (*leader)->name, (*leader)->view.device, out, out);
        else
            PyErr_Format(PyExc_TypeError,
                         "%s is on cuda:%d and %s, which is changed in place, on the host: bring "
                         "one to the other, with gpuops.to_device or to_host()",
                         (*leader)->name, (*leader)->view.device, out);
        return -1;
    }
    return 0;
}

static int check_device_argument(const Operand *leader, PyObject *device)
{
    int wanted;
    if (device == Py_None) return 0;
    if (read_device(device, &wanted) < 0) return -1;
    if (wanted == DEVICE_CUDA || wanted == DEVICE_AUTO || wanted == leader->view.device) return 0;
    PyErr_Format(PyExc_ValueError,
                 "device is %R, but %s is on cuda:%d, and a call runs where its data are: leave "
                 "device out, or bring the data there with %s",
                 device, leader->name, leader->view.device,
                 wanted == DEVICE_CPU ? "to_host()" : "gpuops.to_device(..., device=...)");
    return -1;
}

Stream *stream_of_call(State *state, PyObject *stream, const Operand *leader, int device)
{
    const bool follows = leader != NULL && leader->stream != NULL;
    if (stream == Py_None && follows && thread_stream(device) == NULL)
        return stream_hold(leader->stream);
    return read_stream(state, stream, device);
}

/* The stream of a call between arrays on a device, held; and the arrays that wait to be told. */
static int open_stream(State *state, Arguments *arguments, const Operand *leader, Stream **stream)
{
    *stream = stream_of_call(state, arguments->stream, leader, leader->view.device);
    if (*stream == NULL) return -1;
    for (int i = 0; i <= arguments->count; i++) {
        Operand *operand = i < arguments->count ? &arguments->inputs[i] : &arguments->out;
        if (operand->pending && operand->import(state, operand, *stream) < 0) return -1;
    }
    return 0;
}

/* Python scalars. */

static Weak weakness(PyObject *object)
{
    return PyLong_CheckExact(object)      ? WEAK_INT
           : PyFloat_CheckExact(object)   ? WEAK_FLOAT
           : PyComplex_CheckExact(object) ? WEAK_COMPLEX
                                          : WEAK_NOT;
}

/* NumPy makes objects of Python integers that no integer dtype holds. Until it is known whether the
 * call computes in floats, a zero stands for one. */
static int read_huge_integer(Arguments *arguments, int i)
{
    Operand *input = &arguments->inputs[i];
    if (!PyLong_CheckExact(input->object) || PyArray_TYPE(input->array) != NPY_OBJECT) return 0;
    release(input->array);
    input->array = (PyArrayObject *)PyArray_ZEROS(0, NULL, NPY_INT64, 0);
    arguments->huge |= 1u << i;
    return input->array == NULL ? -1 : 0;
}

static int check_huge_integers(const Call *call, const Arguments *arguments)
{
    if (arguments->huge == 0) return 0;
    const bool is_float = dtype_is_float(call->compute) || dtype_is_complex(call->compute);
    const unsigned lost = is_float ? arguments->huge & ~call->cast_inputs : arguments->huge;
    for (int i = 0; i < arguments->count; i++) {
        if (!(lost >> i & 1)) continue;
        PyErr_Format(PyExc_OverflowError, "%s is the Python integer %R, out of bounds for %s",
                     arguments->inputs[i].name, arguments->inputs[i].object,
                     dtype_is_integer(call->compute) ? dtype_name(call->compute) : "int64");
        return -1;
    }
    return 0;
}

/* The dtype of the result, as an operand of which nothing else is set: that of one of the inputs
 * wherever that is possible, because other libraries have dtypes that NumPy has not. */
static int find_like(const Call *call, const Arguments *arguments, Operand *like)
{
    like->name = "the result";
    like->dtype.code = DL_NONE;
    const Dtype dtype = call->out.dtype;
    const Operand *found = dtype == DTYPE_OPAQUE ? &arguments->inputs[0] : NULL;
    for (int i = 0; i < arguments->count && found == NULL; i++)
        if (call->inputs[i].weak == WEAK_NOT && call->inputs[i].dtype == dtype)
            found = &arguments->inputs[i];
    if (found == NULL) {
        like->descr = descr_of(dtype);
        return like->descr == NULL ? -1 : 0;
    }
    like->name = found->name;
    like->dtype = found->dtype;
    like->descr = (PyArray_Descr *)Py_XNewRef((PyObject *)found->descr);
    like->view.dtype_name = found->view.dtype_name;
    return 0;
}

/* An input on the host in the dtype that the operator computes in. NumPy checks that a Python
 * scalar fits. */
static int cast_input(Operand *input, const View *view, PyArray_Descr *descr)
{
    PyArrayObject *cast;
    if (view->weak != WEAK_NOT) {
        cast = array_of_number(input->object, descr);
    } else {
        View like;
        view_copy(&like, view);
        like.item_bytes = PyDataType_ELSIZE(descr);
        view_lay_out(&like, view, 1);
        cast = host_array_new(&like, descr, like.strides);
        if (cast != NULL && PyArray_CopyInto(cast, input->array) < 0) {
            release(cast);
            return -1;
        }
    }
    if (cast == NULL) return -1;
    release(input->array);
    input->array = cast;
    return 0;
}

static int check_unchanged(const Operand *operand, const View *view, Dtype dtype)
{
    const View *found = &operand->view;
    bool same = found->ndim == view->ndim && found->dtype == dtype;
    if (dtype == view->dtype) same = same && found->item_bytes == view->item_bytes;
    for (int i = 0; same && i < view->ndim; i++) same = found->shape[i] == view->shape[i];
    if (!same)
        PyErr_Format(PyExc_RuntimeError, "%s was changed while it was in use", operand->name);
    return same ? 0 : -1;
}

static int check_target(const char *op, const Operand *target)
{
    if (target->read_only) {
        PyErr_Format(PyExc_ValueError, "%s is read-only%s, and %s changes it in place: pass a copy",
                     target->name, why_read_only(target->read_only), op);
        return -1;
    }
    const int overlaps = overlaps_itself(&target->view);
    if (overlaps < 0) PyErr_NoMemory();
    if (overlaps > 0)
        PyErr_Format(PyExc_ValueError,
                     "some elements of %s share memory with each other, so that %s cannot change "
                     "them one by one: pass an array of its own, for example a copy",
                     target->name, op);
    return overlaps == 0 ? 0 : -1;
}

static bool is_to_be_cast(const Call *call, const Arguments *arguments, int i)
{
    return call->cast_inputs >> i & 1 && call->inputs[i].dtype != call->compute &&
           arguments->inputs[i].array != NULL;
}

/* A cast may warn, and whoever is warned may do anything to the arrays of the call. */
static int cast_inputs(Call *call, Arguments *arguments)
{
    PyArray_Descr *descr = NULL;
    unsigned cast = 0;
    for (int i = 0; i < arguments->count; i++) {
        if (!is_to_be_cast(call, arguments, i) || input_is_cast_at_work(call, i)) continue;
        if (descr == NULL) descr = descr_of(call->compute);
        if (descr == NULL || cast_input(&arguments->inputs[i], &call->inputs[i], descr) < 0)
            goto failed;
        cast |= 1u << i;
    }
    if (descr == NULL) return 0;
    for (int i = 0; i < arguments->count; i++) {
        Operand *input = &arguments->inputs[i];
        const Dtype dtype = cast >> i & 1 ? call->compute : call->inputs[i].dtype;
        if (complete_operand(input) < 0 || check_unchanged(input, &call->inputs[i], dtype) < 0)
            goto failed;
        view_copy(&call->inputs[i], &input->view);
        call->inputs[i].weak = WEAK_NOT;
    }
    Operand *out = &arguments->out;
    if (out->array != NULL && complete_operand(out) < 0) goto failed;
    if (call->in_place) {
        if (check_unchanged(out, &call->out, call->out.dtype) < 0 ||
            check_target(call->op->name, out) < 0)
            goto failed;
        view_copy(&call->out, &out->view);
    }
    Py_DECREF((PyObject *)descr);
    return 0;
failed:
    Py_XDECREF((PyObject *)descr);
    return -1;
}

/* What an operand's elements are, for messages: a new reference. */
static PyObject *dtype_text(const Operand *operand)
{
    const bool is_numpy = operand->descr != NULL && operand->dtype.code == DL_NONE;
    return is_numpy ? PyObject_Str((PyObject *)operand->descr)
                    : PyUnicode_FromString(operand->view.dtype_name);
}

/* Elements that are only moved have to be of the dtype of the array that they go to, and only the
 * descriptions tell whether they are: NumPy casts to a unit of its own where x has none. */
static int check_opaque(const Call *call, const Arguments *arguments)
{
    const Operand *target = &arguments->out;
    for (int i = 0; i < arguments->count && call->out.dtype == DTYPE_OPAQUE; i++) {
        const Operand *input = &arguments->inputs[i];
        if (call->inputs[i].dtype != DTYPE_OPAQUE || same_dtype(input, target)) continue;
        PyObject *from = dtype_text(input), *to = dtype_text(target);
        if (from != NULL && to != NULL)
            PyErr_Format(PyExc_TypeError,
                         "%s cannot cast %s from dtype %U to dtype %U, that of %s: convert them "
                         "with .astype(...)",
                         call->op->name, input->name, from, to, target->name);
        Py_XDECREF(from);
        Py_XDECREF(to);
        return -1;
    }
    return 0;
}

typedef struct Work {
    Call *call;
    int wanted_device;
    int unmeasured; /* the device to measure before the call is made, claimed; or DEVICE_AUTO */
    Candidate taken;
    Progress progress;
} Work;

/* Between host arrays; where stream= was given, the device is known already. */
static Status do_host_work(void *context)
{
    Work *work = context;
    Call *call = work->call;
    if (call->stream == NULL) {
        Status status = choose_device(work->wanted_device, &call->device);
        if (status != STATUS_OK) return status;
        if (call->device != DEVICE_CPU) call->stream = thread_stream(call->device);
    }
    if (work->taken.device != call->device)
        route_estimate(call, call->device == DEVICE_CPU ? WAY_CPU : WAY_CUDA, call->device,
                       &work->taken);
    return run_call(call);
}

/* What is over sooner than others could make use of the GIL keeps it. */
static Status work_on_host(Work *work)
{
    const bool on_cpu = work->wanted_device == DEVICE_CPU && work->call->stream == NULL;
    if (on_cpu && call_is_brief(work->call)) return do_host_work(work);
    return progress_run(&work->progress, do_host_work, work);
}

static Status do_device_work(void *call)
{
    return run_call(call);
}

static Status choose(void *context)
{
    Work *work = context;
    return choose_device(work->wanted_device, &work->call->device);
}

static int read_host_stream(State *state, PyObject *object, Work *work, Stream **stream)
{
    if (work->wanted_device == DEVICE_AUTO)
        work->wanted_device = DEVICE_CUDA; /* a stream is of one */
    Status status = without_gil(choose, work);
    if (status != STATUS_OK) {
        raise_status(state, status, work->call->op->name, work->call->device);
        return -1;
    }
    if (work->call->device == DEVICE_CPU) {
        PyErr_SetString(PyExc_ValueError,
                        "stream= orders work on a GPU, but this call runs on the CPU: leave it "
                        "out, or pass device=\"cuda\"");
        return -1;
    }
    *stream = read_stream(state, object, work->call->device);
    work->call->stream = *stream;
    return *stream == NULL ? -1 : 0;
}

/* The result on the device, of the kind of the operand that decides: an array of ours, or a tensor
 * of another library. Sets the memory of call->out. */
typedef struct Result {
    PyObject *array;
    DLManagedTensorVersioned *tensor;
} Result;

static int new_result(State *state, Call *call, const Arguments *arguments, const Operand *leader,
                      const Operand *like, Result *result)
{
    View *out = &call->out;
    out->device = call->device;
    if (leader->kind == KIND_EXCHANGE) {
        const DLDataType dtype = dlpack_dtype_of(like);
        if (dtype.code == DL_NONE) {
            PyErr_Format(PyExc_TypeError,
                         "%s has dtype %S, for which DLPack has no word, so that the result cannot "
                         "be of the kind of %s: pass %s to gpuops.from_dlpack first",
                         like->name, like->descr, leader->name, leader->name);
            return -1;
        }
        result->tensor = exchange_allocate(leader->api, Py_TYPE(leader->object), dtype, out);
        if (result->tensor == NULL) return -1;
        out->stream = leader->stream;
        out->memory = NULL;
    } else {
        if (require_descr(like) < 0) return -1;
        Status status;
        result->array = array_try_empty(state, stream_that_lasts(call->stream), like->descr,
                                        out->ndim, out->shape, &status);
        if (status != STATUS_OK) raise_call_status(state, status, call, arguments);
        if (result->array == NULL) return -1;
        array_view((DeviceArray *)result->array, out);
    }
    return 0;
}

/* A number goes with the arguments of an element-wise kernel. */
static bool has_host_input(const Call *call)
{
    for (int i = 0; i < call->input_count; i++) {
        const View *input = &call->inputs[i];
        if (input->device == DEVICE_CPU && (input->ndim > 0 || !call->elementwise)) return true;
    }
    return false;
}

static PyObject *call_on_device(State *state, Call *call, Arguments *arguments,
                                const Operand *leader, const Operand *like, Work *work)
{
    Result result = {NULL, NULL};
    PyObject *returned = NULL;
    const bool given = arguments->out.object != NULL;
    if (given && !call->in_place) {
        if (check_output(call->op->name, &arguments->out, &call->out, like, call->elementwise) < 0)
            return NULL;
        view_copy(&call->out, &arguments->out.view);
    } else if (!given && new_result(state, call, arguments, leader, like, &result) < 0) {
        return NULL;
    }
    call->out_is_fresh = !given;
    work->taken = (Candidate){.way = WAY_DEVICE, .device = call->device, .seconds = -1};
    if (has_host_input(call)) route_estimate(call, WAY_DEVICE, call->device, &work->taken);
    Status status = progress_run(&work->progress, do_device_work, call);
    note_device_route(call->op, &work->taken);
    if (status != STATUS_OK) {
        raise_call_status(state, status, call, arguments);
    } else if (given) {
        returned = Py_NewRef(call->in_place ? Py_None : arguments->out.object);
    } else if (result.tensor != NULL) {
        returned = exchange_finish(leader->api, Py_TYPE(leader->object), result.tensor);
        result.tensor = NULL;
    } else {
        returned = result_like(leader, result.array);
        result.array = NULL;
    }
    Py_XDECREF(result.array);
    dlpack_delete(result.tensor);
    return returned;
}

/* The input whose kind a result between host arrays has: scalars are of no kind. */
static const Operand *find_kind(const Arguments *arguments)
{
    for (int i = 0; i < arguments->count; i++)
        if (PyArray_Check(arguments->inputs[i].object) ||
            !PyArray_CheckAnyScalar(arguments->inputs[i].object))
            return &arguments->inputs[i];
    return &arguments->inputs[0];
}

/* Operands that overlap act as if they had been copied first. */
static int copy_overlapping_inputs(Call *call, Arguments *arguments)
{
    for (int i = 0; i < arguments->count; i++) {
        Operand *input = &arguments->inputs[i];
        if (!views_overlap(&call->out, &call->inputs[i])) continue;
        PyArrayObject *copy = host_array_new(&call->inputs[i], PyArray_DESCR(input->array), NULL);
        if (copy == NULL) return -1;
        const int copied = PyArray_CopyInto(copy, input->array);
        release(input->array);
        input->array = copy;
        if (copied < 0 || fill_view(copy, input->name, &call->inputs[i]) < 0) return -1;
    }
    return 0;
}

static PyObject *change_on_host(State *state, Call *call, Arguments *arguments, Work *work)
{
    if (copy_overlapping_inputs(call, arguments) < 0) return NULL;
    call->out_is_fresh = false;
    const uint64_t started = ticks_now();
    Status status = work_on_host(work);
    note_route(call->op, &work->taken, started);
    if (status == STATUS_OK) return Py_NewRef(Py_None);
    return raise_call_status(state, status, call, arguments);
}

/* For NumPy's own work: casts of which it says nothing, so that nobody can change the arrays. */
static int cast_for_numpy(const Call *call, Arguments *arguments)
{
    PyArray_Descr *descr = NULL;
    int status = 0;
    for (int i = 0; i < arguments->count && status == 0; i++) {
        if (!is_to_be_cast(call, arguments, i)) continue;
        if (descr == NULL) descr = descr_of(call->compute);
        status = descr == NULL ? -1 : cast_input(&arguments->inputs[i], &call->inputs[i], descr);
    }
    Py_XDECREF((PyObject *)descr);
    return status;
}

/* On the CPU, the products of matrices are NumPy's work. */
static int multiply_in_numpy(State *state, Call *call, Arguments *arguments, Work *work,
                             PyArrayObject *out, bool *computed)
{
    *computed = false;
    if (call->op->run != run_matmul) return 0;
    if (call->stream == NULL) {
        const bool on_cpu = work->wanted_device == DEVICE_CPU;
        Status status = on_cpu ? choose(work) : without_gil(choose, work);
        if (status != STATUS_OK) {
            raise_call_status(state, status, call, arguments);
            return -1;
        }
    }
    if (call->device != DEVICE_CPU) return 0;
    *computed = true;
    if (cast_for_numpy(call, arguments) < 0) return -1;
    return matmul_on_host(state, arguments->inputs[0].array, arguments->inputs[1].array, out);
}

/* Whether the result can be written where the caller wants it. */
static bool fits_in_place(const Call *call, const View *out)
{
    if (call->elementwise && out->dtype != call->compute) return false;
    for (int i = 0; i < call->input_count; i++)
        if (views_overlap(out, &call->inputs[i]) &&
            !(call->elementwise && views_coincide(out, &call->inputs[i])))
            return false;
    return true;
}

/* A fresh result on the host has the layout that NumPy's would have: that of the operands as they
 * are given, before any cast. False: C order, for which nothing is set. */
static bool lay_out(Call *call)
{
    if (!call->elementwise || call->out.ndim < 2) return false;
    bool packed = true;
    for (int i = 0; i < call->input_count && packed; i++) packed = view_is_packed(&call->inputs[i]);
    if (packed) return false;
    view_lay_out(&call->out, call->inputs, call->input_count);
    return !view_is_packed(&call->out);
}

/* Element by element, axes may be taken in any order: in that in which the result is in memory. */
static void turn_axes(Call *call)
{
    const int ndim = call->out.ndim;
    int axes[GPUOPS_MAX_DIMS];
    const int count = view_axes(&call->out, axes);
    for (int i = 0; i < call->input_count; i++) view_turn(&call->inputs[i], ndim, axes, count);
    view_turn(&call->out, ndim, axes, count);
}

static PyObject *call_on_host(State *state, Call *call, Arguments *arguments, Work *work,
                              const Operand *like, bool laid_out)
{
    PyArrayObject *given = arguments->out.array, *out = NULL;
    PyObject *returned = NULL;
    if (given != NULL &&
        check_output(call->op->name, &arguments->out, &call->out, like, call->elementwise) < 0)
        return NULL;
    call->out_is_fresh = given == NULL || !fits_in_place(call, &arguments->out.view);
    if (call->out_is_fresh)
        out = host_array_new(&call->out, like->descr, laid_out ? call->out.strides : NULL);
    else
        out = hold(given);
    if (out == NULL || fill_view(out, "out", &call->out) < 0) goto done;
    if (call->elementwise && call->out.ndim > 1 && !view_is_packed(&call->out)) turn_axes(call);

    bool computed;
    const uint64_t started = ticks_now();
    const bool failed = multiply_in_numpy(state, call, arguments, work, out, &computed) < 0;
    Status status = failed || computed ? STATUS_OK : work_on_host(work);
    note_route(call->op, &work->taken, started);
    if (failed) goto done;
    if (status != STATUS_OK) {
        raise_call_status(state, status, call, arguments);
    } else if (given != NULL) {
        if (out == given || PyArray_CopyInto(given, out) == 0)
            returned = Py_NewRef(arguments->out.object);
    } else {
        const Operand *kind = find_kind(arguments);
        returned = kind->kind == KIND_HOST ? PyArray_Return(hold(out))
                                           : result_like(kind, (PyObject *)hold(out));
    }
done:
    release(out);
    return returned;
}

/* Names the device of a call between host arrays under device="auto". False: the machine has to be
 * measured first, which may take Python code, so that the call is to begin anew after that. */
static bool settle_device(const Call *call, Work *work)
{
    if (work->wanted_device == DEVICE_DEFAULT && cuda_is_missing())
        work->wanted_device = DEVICE_CPU;
    if (work->wanted_device != DEVICE_AUTO || call->stream != NULL) return true;
    work->unmeasured = choose_automatically(call, &work->taken);
    work->wanted_device = work->taken.device;
    return work->unmeasured == DEVICE_AUTO;
}

/* The plan, and the work on what it says. */
static PyObject *call_planned(State *state, Call *call, Arguments *arguments, const Operand *leader,
                              Work *work)
{
    Status status = call->op->plan(call);
    if (status != STATUS_OK) return raise_call_status(state, status, call, arguments);
    if (check_huge_integers(call, arguments) < 0) return NULL;
    if (call->in_place && check_target(call->op->name, &arguments->out) < 0) return NULL;
    if (leader == NULL && !settle_device(call, work)) return NULL;
    Operand like;
    PyObject *result = NULL;
    if (call->in_place) {
        if (check_opaque(call, arguments) < 0 || cast_inputs(call, arguments) < 0) return NULL;
        return leader != NULL ? call_on_device(state, call, arguments, leader, NULL, work)
                              : change_on_host(state, call, arguments, work);
    }
    if (find_like(call, arguments, &like) < 0) return NULL;
    const bool laid_out = leader == NULL && lay_out(call);
    if (cast_inputs(call, arguments) == 0)
        result = leader != NULL ? call_on_device(state, call, arguments, leader, &like, work)
                                : call_on_host(state, call, arguments, work, &like, laid_out);
    Py_XDECREF((PyObject *)like.descr);
    return result;
}

/* A call from its arguments to where its plan can be made. */
typedef struct Opened {
    Call call;
    Arguments arguments;
    const Operand *leader;
    Work work;
    Stream *stream;
} Opened;

static int open_call(State *state, const Signature *signature, PyObject **values, Opened *opened)
{
    Call *call = &opened->call;
    Arguments *arguments = &opened->arguments;
    const Operand **leader = &opened->leader;
    set_defaults(signature, call);
    arguments->count = 0;
    arguments->out.object = NULL; /* and nobody looks at the rest, but for these two */
    arguments->out.array = NULL;
    arguments->out.pending = false;
    arguments->huge = 0;
    arguments->fill = NULL;
    arguments->wanted = NULL;
    arguments->fill_value = NULL;
    arguments->device = arguments->stream = Py_None;
    opened->leader = NULL;
    arguments->shows_progress = false;
    Work *work = &opened->work;
    work->call = call;
    work->wanted_device = DEVICE_DEFAULT;
    work->unmeasured = DEVICE_AUTO;
    work->taken = (Candidate){.way = WAY_CPU, .device = DEVICE_CPU, .seconds = -1};
    progress_init(&work->progress, call->op->name);
    call->watch = &work->progress.watch;
    call->taken = &work->taken;
    opened->stream = NULL;

    if (read_arguments(state, signature, values, call, arguments) < 0 ||
        find_leader(arguments, leader) < 0)
        return -1;
    if (arguments->shows_progress && progress_show(&work->progress) < 0) return -1;
    if (*leader != NULL) {
        call->device = (*leader)->view.device;
        if (check_device_argument(*leader, arguments->device) < 0 ||
            open_stream(state, arguments, *leader, &opened->stream) < 0)
            return -1;
        call->stream = opened->stream;
    } else {
        if (read_device(arguments->device, &work->wanted_device) < 0) return -1;
        if (arguments->stream != Py_None &&
            read_host_stream(state, arguments->stream, work, &opened->stream) < 0)
            return -1;
    }
    if (read_fill_argument(signature, call, arguments) < 0 ||
        cast_moved_values(call, arguments) < 0)
        return -1;
    call->input_count = arguments->count;
    for (int i = 0; i < arguments->count; i++) {
        if (read_huge_integer(arguments, i) < 0 || complete_operand(&arguments->inputs[i]) < 0)
            return -1;
        view_copy(&call->inputs[i], &arguments->inputs[i].view);
        call->inputs[i].weak = weakness(arguments->inputs[i].object);
    }
    if (arguments->out.object != NULL) {
        if (complete_operand(&arguments->out) < 0) return -1;
        call->wanted = arguments->out.view.dtype;
        call->given = &arguments->out.view;
    }
    if (is_in_place(signature)) view_copy(&call->out, &arguments->out.view);
    return 0;
}

static void close_call(Opened *opened, PyObject **result)
{
    Arguments *arguments = &opened->arguments;
    progress_close(&opened->work.progress, result);
    for (int i = 0; i < arguments->count; i++) operand_clear(&arguments->inputs[i]);
    if (arguments->out.object != NULL) operand_clear(&arguments->out);
    release(arguments->fill);
    Py_XDECREF((PyObject *)arguments->wanted);
    if (opened->stream != NULL) release_stream(opened->stream);
}

PyObject *call_operator(PyObject *module, int op, PyObject *const *args, Py_ssize_t count,
                        PyObject *names)
{
    PyObject *values[MAX_PARAMETERS], *result = NULL;
    if (call_briefly(op, args, count, names, &result)) return result;
    State *state = PyModule_GetState(module);
    const Signature *signature = &state->signatures[op];
    if (bind_arguments(signature, args, count, names, values) < 0) return NULL;

    Opened opened;
    if (open_call(state, signature, values, &opened) == 0)
        result = call_planned(state, &opened.call, &opened.arguments, opened.leader, &opened.work);
    close_call(&opened, &result);
    if (opened.work.unmeasured == DEVICE_AUTO) return result;
    if (measure_machine(module, opened.work.unmeasured, op) < 0) return NULL;
    return call_operator(module, op, args, count, names);
}

/* What call_planned and the functions that it calls look at before there is any work. */
static int check_given(const Call *call, const Arguments *arguments)
{
    if (call->in_place) {
        const int status = check_target(call->op->name, &arguments->out);
        return status < 0 ? status : check_opaque(call, arguments);
    }
    if (arguments->out.object == NULL) return 0;
    Operand like;
    if (find_like(call, arguments, &like) < 0) return -1;
    const int status =
        check_output(call->op->name, &arguments->out, &call->out, &like, call->elementwise);
    Py_XDECREF((PyObject *)like.descr);
    return status;
}

static PyObject *explain_planned(State *state, Opened *opened, int *unmeasured)
{
    Call *call = &opened->call;
    const Arguments *arguments = &opened->arguments;
    Status status = call->op->plan(call);
    if (status != STATUS_OK) return raise_call_status(state, status, call, arguments);
    if (check_huge_integers(call, arguments) < 0 || check_given(call, arguments) < 0) return NULL;
    if (opened->leader != NULL) return explain_on_device(call);
    const int wanted = call->stream != NULL ? call->device : opened->work.wanted_device;
    return explain_on_host(state, call, wanted, unmeasured);
}

static PyObject *explain_once(PyObject *module, const Signature *signature, PyObject **values,
                              int *unmeasured)
{
    State *state = PyModule_GetState(module);
    Opened opened;
    PyObject *result = NULL;
    if (open_call(state, signature, values, &opened) == 0)
        result = explain_planned(state, &opened, unmeasured);
    close_call(&opened, &result);
    return result;
}

PyObject *explain_operator(PyObject *module, int op, PyObject *const *args, Py_ssize_t count,
                           PyObject *names)
{
    State *state = PyModule_GetState(module);
    const Signature *signature = &state->signatures[op];
    PyObject *values[MAX_PARAMETERS];
    int unmeasured = DEVICE_AUTO;
    if (bind_arguments(signature, args, count, names, values) < 0) return NULL;
    PyObject *result = explain_once(module, signature, values, &unmeasured);
    if (unmeasured == DEVICE_AUTO) return result;
    if (machine_claim(unmeasured, operators[op].work, true) &&
        measure_machine(module, unmeasured, op) < 0)
        return NULL;
    return explain_once(module, signature, values, NULL);
}
