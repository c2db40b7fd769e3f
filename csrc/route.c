/* Where calls run: the choice under device="auto", and what is told of it. */
#include "core.h"

/* The choice. */

typedef struct Choice {
    const Call *call;
    int device; /* of the GPU; DEVICE_AUTO: the current one */
    Route route;
    int unmeasured;
} Choice;

static Status choose(void *context)
{
    Choice *choice = context;
    route_choose(choice->call, choice->device, &choice->route, &choice->unmeasured);
    return STATUS_OK;
}

int choose_automatically(const Call *call, Candidate *taken)
{
    *taken = (Candidate){.way = WAY_CPU, .device = DEVICE_CPU, .seconds = -1};
    if (route_is_clear(call)) return DEVICE_AUTO;
    Choice choice = {.call = call, .device = DEVICE_AUTO};
    (void)without_gil(choose, &choice);
    if (choice.unmeasured != DEVICE_AUTO && machine_claim(choice.unmeasured, call->op->work, false))
        return choice.unmeasured;
    *taken = choice.route.candidates[choice.route.chosen];
    return DEVICE_AUTO;
}

static bool calibrate(PyObject *calibration, int device, WorkKind work)
{
    if (machine_measured(device, work) == MEASURED) return true;
    PyObject *done = PyObject_CallMethod(calibration, "calibrate", "is", device, work_name(work));
    Py_XDECREF(done);
    return done != NULL;
}

int measure_machine(PyObject *module, int device, int op)
{
    const WorkKind work = operators[op].work;
    PyObject *names = Py_BuildValue("(s)", "calibrate"), *found = NULL;
    if (names != NULL)
        found =
            PyImport_ImportModuleLevel("_calibration", PyModule_GetDict(module), NULL, names, 1);
    /* All calls go by what is known of elements. */
    const bool is_done =
        found != NULL && calibrate(found, device, WORK_ELEMENTS) && calibrate(found, device, work);
    Py_XDECREF(found);
    Py_XDECREF(names);
    /* A machine that cannot be measured is no error of the call; but Ctrl-C is for the program, and
     * says nothing of the machine. */
    const bool is_stopped = !is_done && !PyErr_ExceptionMatches(PyExc_Exception);
    machine_leave(device, !is_stopped && machine_measured(device, work) != MEASURED);
    if (is_stopped) return -1;
    if (!is_done) PyErr_Clear();
    return 0;
}

/* What was taken by the last call of each thread. */

typedef struct Taken {
    const char *op; /* NULL: there was no call */
    Candidate candidate;
    bool is_over; /* the call has waited for the end of its work */
    uint64_t started, ended;
    double seconds; /* the same, once somebody has asked; else negative */
} Taken;
static _Thread_local Taken last;

/* The two clocks when the module was imported, which tell how long a tick is. */
static uint64_t first_ticks;
static double first_seconds;

static double seconds_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void start_ticks(void)
{
    first_ticks = ticks_now();
    first_seconds = seconds_now();
}

/* Counters of two processors may differ by a little. */
static double last_seconds(void)
{
    if (last.ended <= last.started) return 0;
    if (last.seconds >= 0) return last.seconds;
    const double seconds = seconds_now() - first_seconds;
    last.seconds =
        (double)(last.ended - last.started) * seconds / (double)(ticks_now() - first_ticks);
    return last.seconds;
}

void note_route(const Operator *op, const Candidate *candidate, uint64_t started)
{
    last.op = op->name;
    last.candidate = *candidate;
    last.is_over = true;
    last.started = started;
    last.seconds = -1;
    last.ended = ticks_now();
}

void note_device_route(const Operator *op, const Candidate *candidate)
{
    last.op = op->name;
    last.candidate = *candidate;
    last.is_over = false;
}

static PyObject *seconds_or_none(double seconds)
{
    if (seconds < 0) Py_RETURN_NONE;
    return PyFloat_FromDouble(seconds);
}

static PyObject *candidate_object(const Candidate *candidate)
{
    static const char *const WAYS[] = {"cpu", "cuda", "zero-copy", "device"};
    char device[24] = "cpu";
    if (candidate->device != DEVICE_CPU)
        snprintf(device, sizeof device, "cuda:%d", candidate->device);
    return Py_BuildValue("(ssLLN)", WAYS[candidate->way], device, (long long)candidate->bytes_up,
                         (long long)candidate->bytes_down, seconds_or_none(candidate->seconds));
}

static PyObject *last_route(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (last.op == NULL) Py_RETURN_NONE;
    return Py_BuildValue("(sNN)", last.op, candidate_object(&last.candidate),
                         seconds_or_none(last.is_over ? last_seconds() : -1));
}

/* explain. */

static const char *words_of(int wanted, char *text, size_t size)
{
    switch (wanted) {
    case DEVICE_AUTO:
        return NULL;
    case DEVICE_DEFAULT:
        return "the default is the GPU where there is one";
    case DEVICE_CPU:
        return "device=\"cpu\" was asked for";
    case DEVICE_CUDA:
        return "device=\"cuda\" was asked for";
    default:
        snprintf(text, size, "device=\"cuda:%d\" was asked for", wanted);
        return text;
    }
}

typedef struct Wanted {
    int wanted, device;
} Wanted;

static Status find_device(void *context)
{
    Wanted *wanted = context;
    return choose_device(wanted->wanted, &wanted->device);
}

PyObject *explain_on_device(const Call *call)
{
    Candidate candidate;
    route_estimate(call, WAY_DEVICE, call->device, &candidate);
    return Py_BuildValue("(s[N]is)", call->op->name, candidate_object(&candidate), 0,
                         "the data are there");
}

/* Where the GPU was asked for; of a table in reach, gather takes the shorter way. */
static int nearest_on_gpu(const Route *route)
{
    const Candidate *ways = route->candidates;
    return route->count > 2 && ways[2].seconds < ways[1].seconds ? 2 : 1;
}

PyObject *explain_on_host(State *state, const Call *call, int wanted, int *unmeasured)
{
    Choice choice = {.call = call, .device = DEVICE_AUTO};
    Wanted device = {.wanted = wanted};
    Route *route = &choice.route;
    char text[64];
    const char *asked = words_of(wanted, text, sizeof text);
    Status status = asked == NULL ? STATUS_OK : without_gil(find_device, &device);
    if (status != STATUS_OK) return raise_status(state, status, call->op->name, wanted);
    if (asked != NULL && device.device != DEVICE_CPU) choice.device = device.device;
    (void)without_gil(choose, &choice);
    if (unmeasured != NULL) {
        const bool is_alone = route->count == 1 && route->candidates[0].seconds < 0;
        *unmeasured = is_alone ? DEVICE_CPU : choice.unmeasured;
        if (*unmeasured != DEVICE_AUTO) return NULL;
    }
    if (asked == NULL && route->chosen != 0 && route_is_clear(call)) {
        route->chosen = 0;
        route->reason = "too little work to be weighed";
    }
    if (asked != NULL) {
        const bool on_cpu = device.device == DEVICE_CPU || route->count == 1;
        route->chosen = on_cpu ? 0 : nearest_on_gpu(route);
        if (wanted != DEVICE_DEFAULT || route->chosen != 0) route->reason = asked;
    }
    if (asked == NULL && route->chosen == 0) { /* the CPU, which may be set up wrongly */
        device.wanted = DEVICE_CPU;
        status = without_gil(find_device, &device);
        if (status != STATUS_OK) return raise_status(state, status, call->op->name, wanted);
    }
    PyObject *candidates = PyList_New(0);
    for (int i = 0; i < route->count && candidates != NULL; i++) {
        PyObject *candidate = candidate_object(&route->candidates[i]);
        if (candidate == NULL || PyList_Append(candidates, candidate) < 0) Py_CLEAR(candidates);
        Py_XDECREF(candidate);
    }
    if (candidates == NULL) return NULL;
    return Py_BuildValue("(sNis)", call->op->name, candidates, route->chosen, route->reason);
}

static PyObject *explain(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    State *state = PyModule_GetState(module);
    if (count < 1 || !PyUnicode_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "explain() takes the name of an operator first");
        return NULL;
    }
    for (int i = 0; i < OPERATORS; i++)
        if (PyUnicode_CompareWithASCIIString(args[0], state->signatures[i].op.name) == 0)
            return explain_operator(module, i, args + 1, count - 1, names);
    return PyErr_Format(PyExc_ValueError, "there is no operator named %R", args[0]);
}

/* What was measured, for gpuops/_calibration.py, which keeps it on disk. */

typedef struct Measuring {
    int device;
    WorkKind work;
    double rates[RATES], steps[STEPS];
} Measuring;
/* Seconds of the last measuring on each thread. */
static _Thread_local double last_steps[STEPS];

static Status measure(void *context)
{
    Measuring *measuring = context;
    return machine_measure(measuring->device, measuring->work, measuring->rates, measuring->steps);
}

static int add_number(PyObject *dict, const char *name, double number)
{
    PyObject *value = PyFloat_FromDouble(number);
    const int status = value == NULL ? -1 : PyDict_SetItemString(dict, name, value);
    Py_XDECREF(value);
    return status;
}

static int find_work(const char *name, WorkKind *work)
{
    for (int i = 0; i < WORK_KINDS; i++)
        if (strcmp(name, work_name((WorkKind)i)) == 0) {
            *work = (WorkKind)i;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "there is no work named \"%s\"", name);
    return -1;
}

static PyObject *measure_rates(PyObject *module, PyObject *args)
{
    Measuring measuring = {.device = 0};
    const char *work;
    if (!PyArg_ParseTuple(args, "is:_measure_rates", &measuring.device, &work)) return NULL;
    if (find_work(work, &measuring.work) < 0) return NULL;
    Status status = without_gil(measure, &measuring);
    if (status != STATUS_OK)
        return raise_status(PyModule_GetState(module), status, "calibrate", measuring.device);
    memcpy(last_steps, measuring.steps, sizeof last_steps);
    PyObject *rates = PyDict_New();
    char name[64];
    for (int i = 0; i < RATES && rates != NULL; i++)
        if (work_of_rate(i) == measuring.work &&
            add_number(rates, rate_name(i, name, sizeof name), measuring.rates[i]) < 0)
            Py_CLEAR(rates);
    return rates;
}

static PyObject *measured_steps(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *steps = PyDict_New();
    for (int i = 0; i < STEPS && steps != NULL; i++)
        if (add_number(steps, step_name(i), last_steps[i]) < 0) Py_CLEAR(steps);
    return steps;
}

static int read_rate(PyObject *given, int rate, double *value)
{
    char name[64];
    PyObject *key = PyUnicode_FromString(rate_name(rate, name, sizeof name));
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(given, key);
    if (key != NULL && found == NULL && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s is missing", name);
    Py_XDECREF(key);
    if (found == NULL) return -1;
    *value = PyFloat_AsDouble(found);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *tell_rates(PyObject *module, PyObject *args)
{
    PyObject *given;
    double rates[RATES] = {0};
    const char *name;
    int device;
    WorkKind work;
    if (!PyArg_ParseTuple(args, "isO!:_tell_rates", &device, &name, &PyDict_Type, &given))
        return NULL;
    if (find_work(name, &work) < 0) return NULL;
    for (int i = 0; i < RATES; i++)
        if (work_of_rate(i) == work && read_rate(given, i, &rates[i]) < 0) return NULL;
    Status status = machine_check(work, rates);
    if (status != STATUS_OK)
        return raise_status(PyModule_GetState(module), status, "calibrate", device);
    if (machine_measured(device, work) == MEASURED_UNDER_WAY) machine_tell(device, work, rates);
    Py_RETURN_NONE;
}

PyMethodDef route_methods[] = {
    {"_explain", (PyCFunction)(void (*)(void))explain, METH_FASTCALL | METH_KEYWORDS,
     "_explain($module, op, /, *args, **keywords)\n--\n\n"
     "(operator, candidates, chosen, reason) of a call that is not made."},
    {"_last_route", last_route, METH_NOARGS,
     "_last_route($module)\n--\n\n"
     "(operator, candidate, elapsed) of the last call of this thread, or None."},
    {"_measure_rates", measure_rates, METH_VARARGS,
     "_measure_rates($module, ordinal, work, /)\n--\n\n"
     "Measure what some work needs to be known of this machine with a GPU, or with -1 without\n"
     "one; a dict, in which what was not measured is 0."},
    {"_measured_steps", measured_steps, METH_NOARGS,
     "_measured_steps($module)\n--\n\n"
     "Seconds that each step of this thread's last _measure_rates took; a dict."},
    {"_tell_rates", tell_rates, METH_VARARGS,
     "_tell_rates($module, ordinal, work, rates, /)\n--\n\n"
     "Let the cost model have the rates of some work, if it waits for them; ValueError if they\n"
     "are not usable."},
    {NULL, NULL, 0, NULL},
};
