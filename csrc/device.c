/* Devices: which one is meant, which there are, and a greeting from each of their threads. */
#include "foreign.h"

/* What `with gpuops.device(...)` set on this thread. */
enum { DEVICE_UNSET = INT_MIN };
static _Thread_local int thread_device = DEVICE_UNSET;

static int parse_device(const char *text, int *device)
{
    if (strcmp(text, "cpu") == 0) {
        *device = DEVICE_CPU;
    } else if (strcmp(text, "auto") == 0) {
        *device = DEVICE_AUTO;
    } else if (strcmp(text, "cuda") == 0) {
        *device = DEVICE_CUDA;
    } else if (strncmp(text, "cuda:", 5) == 0 &&
               strspn(text + 5, "0123456789") == strlen(text + 5) && text[5] != '\0' &&
               strlen(text + 5) < 6) {
        *device = atoi(text + 5);
    } else {
        return -1;
    }
    return 0;
}

static const char *const EXPECTED =
    "'cpu', 'cuda', 'cuda:0' (or another ordinal, also as an int) or 'auto'";

/* The dict behind os.environ, in which names and values are bytes. To look there takes a fraction
 * of the time of getenv, which compares every name; and Python keeps its threads apart in it, as
 * the C library does not: getenv may read a list of variables that another thread has just moved.
 * It is there for as long as the process, and so is what is kept here. NULL: the program has put
 * something else in the place of os.environ. */
static PyObject *environment, *variable;

int keep_environment(void)
{
    if (variable == NULL) variable = PyBytes_FromString("GPUOPS_DEVICE");
    if (variable == NULL || environment != NULL) return variable == NULL ? -1 : 0;
    PyObject *module = PyImport_ImportModule("os"), *data = NULL;
    PyObject *environ = module == NULL ? NULL : PyObject_GetAttrString(module, "environ");
    const int status = environ == NULL ? -1 : find_attribute(environ, "_data", &data);
    if (data != NULL && PyDict_CheckExact(data))
        environment = data;
    else
        Py_XDECREF(data);
    Py_XDECREF(environ);
    Py_XDECREF(module);
    return status;
}

#ifdef Py_GIL_DISABLED

static const char *variable_of_device(void)
{
    static _Thread_local char text[128]; /* what is longer is wrong in any case */
    PyObject *value;
    if (environment == NULL) return getenv("GPUOPS_DEVICE");
    if (PyDict_GetItemRef(environment, variable, &value) <= 0) {
        PyErr_Clear();
        return NULL;
    }
    const bool is_text = PyBytes_Check(value);
    if (is_text) snprintf(text, sizeof text, "%s", PyBytes_AsString(value));
    Py_DECREF(value);
    return is_text ? text : NULL;
}

#else

static const char *variable_of_device(void)
{
    if (environment == NULL) return getenv("GPUOPS_DEVICE");
    PyObject *value = PyDict_GetItemWithError(environment, variable);
    if (value == NULL) PyErr_Clear();
    return value != NULL && PyBytes_Check(value) ? PyBytes_AsString(value) : NULL;
}

#endif

static int default_device(int *device)
{
    if (thread_device != DEVICE_UNSET) {
        *device = thread_device;
        return 0;
    }
    const char *text = variable_of_device();
    *device = DEVICE_DEFAULT;
    if (text == NULL || *text == '\0' || parse_device(text, device) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "GPUOPS_DEVICE is '%s': expected %s", text, EXPECTED);
    return -1;
}

int read_device(PyObject *object, int *device)
{
    if (object == Py_None) return default_device(device);
    if (PyUnicode_Check(object)) {
        const char *text = PyUnicode_AsUTF8AndSize(object, NULL);
        if (text == NULL) return -1;
        if (parse_device(text, device) == 0) return 0;
        PyErr_Format(PyExc_ValueError, "unknown device %R: expected %s", object, EXPECTED);
        return -1;
    }
    if (PyIndex_Check(object) && !PyBool_Check(object)) {
        PyObject *index = PyNumber_Index(object);
        if (index == NULL) return -1;
        int overflow;
        long ordinal = PyLong_AsLongAndOverflow(index, &overflow);
        Py_DECREF(index);
        if (overflow == 0 && ordinal >= 0 && ordinal < INT_MAX) {
            *device = (int)ordinal;
            return 0;
        }
        PyErr_Format(PyExc_ValueError, "unknown device %R: an ordinal counts from 0", object);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "device must be None, %s, not %R", EXPECTED, object);
    return -1;
}

typedef struct OrdinalWork {
    int wanted;
    bool by_default;
    int ordinal;
} OrdinalWork;

static Status find_ordinal(void *context)
{
    OrdinalWork *work = context;
    int count;
    Status status = cuda_device_count(&count);
    if (status != STATUS_OK) return status;
    if (work->wanted >= 0) {
        work->ordinal = work->wanted;
        return cuda_check_ordinal(work->wanted);
    }
    if (work->wanted == DEVICE_CPU && !work->by_default)
        return fail(STATUS_VALUE_ERROR,
                    "device=\"cpu\": a DeviceArray is in the memory of a GPU; on the CPU, "
                    "numpy.ndarray is the array");
    return cuda_current_device(&work->ordinal);
}

/* The GPU that is meant: without a word, the one that the defaults name, or the current one. */
int read_ordinal(State *state, PyObject *object, const char *op, int *ordinal)
{
    OrdinalWork work = {.by_default = object == Py_None};
    if (read_device(object, &work.wanted) < 0) return -1;
    Status status = without_gil(find_ordinal, &work);
    *ordinal = work.ordinal;
    if (status == STATUS_OK) return 0;
    raise_status(state, status, op, work.wanted);
    return -1;
}

static PyObject *device_as_object(int device)
{
    switch (device) {
    case DEVICE_UNSET:
        Py_RETURN_NONE;
    case DEVICE_CPU:
        return PyUnicode_FromString("cpu");
    case DEVICE_CUDA:
        return PyUnicode_FromString("cuda");
    case DEVICE_AUTO:
        return PyUnicode_FromString("auto");
    default:
        return PyLong_FromLong(device);
    }
}

static PyObject *exchange_device(PyObject *module, PyObject *object)
{
    (void)module;
    int device = DEVICE_UNSET;
    if (object != Py_None && read_device(object, &device) < 0) return NULL;
    PyObject *previous = device_as_object(thread_device);
    if (previous != NULL) thread_device = device;
    return previous;
}

Status count_devices(void *count)
{
    return cuda_device_count(count);
}

static PyObject *device_count(PyObject *module, PyObject *unused)
{
    (void)unused;
    int count;
    Status status = without_gil(count_devices, &count);
    if (status == STATUS_OK || status == STATUS_DEVICE_ERROR) return PyLong_FromLong(count);
    return raise_status(PyModule_GetState(module), status, "device_count", DEVICE_CPU);
}

static PyObject *is_available(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    int count;
    return PyBool_FromLong(without_gil(count_devices, &count) == STATUS_OK);
}

typedef struct InfoWork {
    int device;
    DeviceInfo info;
} InfoWork;

static Status ask_info(void *context)
{
    InfoWork *work = context;
    return cuda_device_info(work->device, &work->info);
}

static PyObject *device_info(PyObject *module, PyObject *object)
{
    InfoWork work;
    if (read_device(object, &work.device) < 0) return NULL;
    Status status = without_gil(ask_info, &work);
    if (status != STATUS_OK)
        return raise_status(PyModule_GetState(module), status, "devices", work.device);
    return Py_BuildValue("(siiiLy#)", work.info.name, work.info.compute_major,
                         work.info.compute_minor, work.info.multiprocessors,
                         (long long)work.info.memory_bytes, (char *)work.info.uuid,
                         (Py_ssize_t)sizeof work.info.uuid);
}

static PyObject *version_or_none(int version)
{
    if (version == 0) Py_RETURN_NONE;
    return PyUnicode_FromFormat("%d.%d", version / 1000, version % 1000 / 10);
}

enum { LINE_BYTES = 1024 };

/* It is no error that there is none; and to find out may take the GIL. */
static Status describe_blas(void *text)
{
    (void)blas_describe(text, LINE_BYTES);
    return STATUS_OK;
}

/* Apart from what config tells, since to open the library takes a tenth of a second. */
static PyObject *blas(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    char text[LINE_BYTES] = "";
    (void)without_gil(describe_blas, text);
    return PyUnicode_FromString(text);
}

static PyObject *config(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    int count = 0, threads = 0;
    Status status = without_gil(count_devices, &count);
    PyObject *problem =
        status == STATUS_OK ? Py_NewRef(Py_None) : PyUnicode_FromString(last_failure()->text);
    cpu_threads(&threads);
    return Py_BuildValue("{sssisNsssNsNsisiszss}", "version", GPUOPS_VERSION, "numpy_api",
                         (int)PyArray_GetNDArrayCFeatureVersion(), "cuda_build",
                         version_or_none(cuda_runtime_version()), "cuda_archs", GPUOPS_ARCHS,
                         "cuda_driver", version_or_none(cuda_driver_version()), "cuda_problem",
                         problem, "device_count", count, "cpu_threads", threads, "cpu_level",
                         cpu_level_name(), "compiler", GPUOPS_COMPILER);
}

enum { MOST_LINES = 1 << 20, MOST_THREADS = 1024 };

typedef struct HelloWork {
    int wanted_device, device;
    long long blocks, threads;
    unsigned char *ran;
} HelloWork;

static Status do_hello(void *context)
{
    HelloWork *work = context;
    Status status = choose_device(work->wanted_device, &work->device);
    if (status != STATUS_OK) return status;
    return hello(work->device, work->blocks, work->threads, work->ran);
}

/* A new reference to sys.stdout, or NULL where there is none. */
static PyObject *standard_output(void)
{
#ifdef Py_GIL_DISABLED
    PyObject *module = PyImport_ImportModule("sys");
    PyObject *out = module == NULL ? NULL : PyObject_GetAttrString(module, "stdout");
    Py_XDECREF(module);
    PyErr_Clear();
    return out;
#else
    return Py_XNewRef(PySys_GetObject("stdout"));
#endif
}

/* What Python has printed so far is to stand above what C prints. */
static int flush_python(void)
{
    PyObject *out = standard_output();
    PyObject *done = out == NULL || out == Py_None ? Py_NewRef(Py_None)
                                                   : PyObject_CallMethod(out, "flush", NULL);
    Py_XDECREF(out);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *lines_of(const HelloWork *work)
{
    PyObject *lines = PyList_New(0);
    const char *where = work->device == DEVICE_CPU ? "CPU" : "GPU";
    for (long long i = 0; lines != NULL && i < work->blocks * work->threads; i++) {
        if (!work->ran[i]) continue;
        char text[96];
        snprintf(text, sizeof text, "Hello World From %s! block %lld, thread %lld", where,
                 i / work->threads, i % work->threads);
        PyObject *line = PyUnicode_FromString(text);
        if (line == NULL || PyList_Append(lines, line) < 0) Py_CLEAR(lines);
        Py_XDECREF(line);
    }
    return lines;
}

static PyObject *say_hello(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"blocks", "threads", "device", NULL};
    HelloWork work = {.blocks = 1, .threads = 3, .device = DEVICE_CPU};
    PyObject *device = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|LL$O:hello", names, &work.blocks,
                                     &work.threads, &device))
        return NULL;
    if (work.threads < 1 || work.threads > MOST_THREADS)
        return PyErr_Format(PyExc_ValueError, "threads must be from 1 to %d, not %lld",
                            MOST_THREADS, work.threads);
    if (work.blocks < 1 || work.blocks > MOST_LINES / work.threads)
        return PyErr_Format(PyExc_ValueError,
                            "blocks must be from 1 to %lld for blocks of %lld threads, not %lld",
                            MOST_LINES / work.threads, work.threads, work.blocks);
    if (read_device(device, &work.wanted_device) < 0 || flush_python() < 0) return NULL;
    work.ran = PyMem_Calloc((size_t)(work.blocks * work.threads), 1);
    if (work.ran == NULL) return PyErr_NoMemory();

    Status status = without_gil(do_hello, &work);
    PyObject *lines = status == STATUS_OK
                          ? lines_of(&work)
                          : raise_status(PyModule_GetState(module), status, "hello", work.device);
    PyMem_Free(work.ran);
    return lines;
}

PyMethodDef device_methods[] = {
    {"is_available", is_available, METH_NOARGS,
     "is_available($module)\n--\n\n"
     "Whether there is a GPU that this build of gpuops can use.\n\n"
     "The first call asks the driver; it makes no CUDA context, and never raises.\n\n"
     "Returns\n-------\nbool\n"},
    {"device_count", device_count, METH_NOARGS,
     "device_count($module)\n--\n\n"
     "The number of CUDA devices that this process sees; 0 where there is no driver.\n\n"
     "Returns\n-------\nint\n\n"
     "Raises\n------\nForkedProcessError\n"
     "    In a process that was forked after CUDA came into use.\n"
     "DeviceLostError\n    After a fatal error of the device.\n"},
    {"hello", (PyCFunction)(void (*)(void))say_hello, METH_VARARGS | METH_KEYWORDS,
     "hello($module, blocks=1, threads=3, *, device=None)\n--\n\n"
     "Print a line from every thread of a grid: the smoke test of a new machine.\n\n"
     "On a GPU a kernel prints ``Hello World From GPU!`` from each of its threads, in the order "
     "in\n"
     "which they get to it. Without one the lines come from the CPU, and say so.\n\n"
     "Parameters\n----------\n"
     "blocks : int\n    Number of blocks of the grid.\n"
     "threads : int\n    Threads in a block, 1 to 1024; there may be 2**20 threads in all.\n"
     "device : optional\n    Where to run; see `gpuops.device`.\n\n"
     "Returns\n-------\nlist of str\n"
     "    One line for each thread that ran, sorted by block and thread. What the threads print\n"
     "    goes to the standard output of the process, which a notebook does not show; the list is\n"
     "    for there.\n\n"
     "Raises\n------\nValueError\n    If `blocks` or `threads` is out of range.\n"
     "DeviceError\n    If a GPU was asked for and there is none.\n\n"
     "Examples\n--------\n"
     ">>> import gpuops\n"
     ">>> len(gpuops.hello(blocks=2, threads=2, device=\"cpu\"))\n4\n"},
    {"_exchange_device", exchange_device, METH_O,
     "_exchange_device($module, spec, /)\n--\n\n"
     "Set the default device of this thread, and return the one before."},
    {"_device_info", device_info, METH_O,
     "_device_info($module, ordinal, /)\n--\n\n"
     "(name, major, minor, multiprocessors, memory_bytes, uuid) of a CUDA device."},
    {"_config", config, METH_NOARGS,
     "_config($module)\n--\n\nHow this package was built and what it found, as a dict."},
    {"_blas", blas, METH_NOARGS,
     "_blas($module)\n--\n\nWhich library multiplies matrices on the GPU, or why none does."},
    {NULL, NULL, 0, NULL},
};
