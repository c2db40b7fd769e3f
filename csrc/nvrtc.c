/* What gpuops/_compile.py needs of the lower layer: NVRTC, what is in machine code, and for which
 * device to compile. */
#include "core.h"

#include <stdatomic.h>

typedef struct OpenWork {
    const char *path;
    int major, minor;
} OpenWork;

static Status do_open(void *context)
{
    OpenWork *work = context;
    return nvrtc_open(work->path, &work->major, &work->minor);
}

static PyObject *open_nvrtc(PyObject *module, PyObject *path)
{
    OpenWork work = {NULL, 0, 0};
    PyObject *bytes = NULL;
    if (path != Py_None) {
        if (!PyUnicode_FSConverter(path, &bytes)) return NULL;
        work.path = PyBytes_AsString(bytes);
    }
    Status status = without_gil(do_open, &work);
    Py_XDECREF(bytes);
    if (status == STATUS_OK) return Py_BuildValue("(ii)", work.major, work.minor);
    return raise_status(PyModule_GetState(module), status, "compile", DEVICE_CPU);
}

static Status do_compile(void *compilation)
{
    return nvrtc_compile(compilation);
}

/* The text of bytes, for as long as these live; NULL with an exception. */
static const char *text_of(PyObject *bytes)
{
    char *text;
    return PyBytes_AsStringAndSize(bytes, &text, NULL) < 0 ? NULL : text;
}

/* Sets texts[i] for each item of a tuple. */
static int read_texts(PyObject *tuple, const char **texts)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        texts[i] = text_of(PyTuple_GetItem(tuple, i));
        if (texts[i] == NULL) return -1;
    }
    return 0;
}

static int read_headers(PyObject *headers, const char **names, const char **texts)
{
    PyObject *name, *text;
    Py_ssize_t at = 0, count = 0;
    while (PyDict_Next(headers, &at, &name, &text)) {
        names[count] = text_of(name);
        texts[count] = names[count] == NULL ? NULL : text_of(text);
        if (texts[count++] == NULL) return -1;
    }
    return 0;
}

/* dict: expression -> lowered name; empty where it was not compiled. */
static PyObject *lowered_names(const Compilation *compilation, PyObject *expressions)
{
    PyObject *names = PyDict_New();
    const bool compiled = compilation->result == NULL;
    for (int i = 0; names != NULL && compiled && i < compilation->expression_count; i++) {
        PyObject *name = PyUnicode_FromString(compilation->lowered[i]);
        if (name == NULL || PyDict_SetItem(names, PyTuple_GetItem(expressions, i), name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *result_of(const Compilation *compilation, PyObject *expressions)
{
    const bool has_cubin = compilation->result == NULL && compilation->cubin != NULL;
    PyObject *lowered = lowered_names(compilation, expressions);
    if (lowered == NULL) return NULL;
    return Py_BuildValue("(zy#yN)", compilation->result, has_cubin ? compilation->cubin : NULL,
                         (Py_ssize_t)compilation->cubin_bytes,
                         compilation->log == NULL ? "" : compilation->log, lowered);
}

static PyObject *compile_source(PyObject *module, PyObject *args)
{
    PyObject *source, *name, *options, *headers, *expressions, *result = NULL;
    if (!PyArg_ParseTuple(args, "SSO!OO!:_nvrtc_compile", &source, &name, &PyTuple_Type, &options,
                          &headers, &PyTuple_Type, &expressions))
        return NULL;
    if (headers != Py_None && !PyDict_Check(headers))
        return PyErr_Format(PyExc_TypeError, "headers must be a dict or None, not %R",
                            Py_TYPE(headers));
    /* A copy, because without the GIL anybody may change the caller's. */
    headers = headers == Py_None ? PyDict_New() : PyDict_Copy(headers);
    if (headers == NULL) return NULL;
    const Py_ssize_t option_count = PyTuple_Size(options), header_count = PyDict_Size(headers);
    const Py_ssize_t expression_count = PyTuple_Size(expressions);
    const size_t count = (size_t)(option_count + 2 * header_count + expression_count);
    const char **texts = PyMem_Calloc(count + 1, sizeof *texts);
    if (texts == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    const char **const names = texts + option_count, **const contents = names + header_count;
    Compilation compilation = {
        .source = text_of(source),
        .name = text_of(name),
        .option_count = (int)option_count,
        .header_count = (int)header_count,
        .expression_count = (int)expression_count,
        .options = texts,
        .headers = contents,
        .header_names = names,
        .expressions = contents + header_count,
    };
    if (compilation.source == NULL || compilation.name == NULL || read_texts(options, texts) < 0 ||
        read_headers(headers, names, contents) < 0 ||
        read_texts(expressions, contents + header_count) < 0)
        goto done;
    Status status = without_gil(do_compile, &compilation);
    if (status == STATUS_OK) {
        result = result_of(&compilation, expressions);
        nvrtc_clear(&compilation);
    } else {
        raise_status(PyModule_GetState(module), status, "compile", DEVICE_CPU);
    }
done:
    PyMem_Free(texts);
    Py_DECREF(headers);
    return result;
}

static bool append_name(const char *name, void *list)
{
    PyObject *text = PyUnicode_DecodeUTF8(name, (Py_ssize_t)strlen(name), NULL);
    const bool done = text != NULL && PyList_Append(list, text) == 0;
    Py_XDECREF(text);
    return done;
}

static PyObject *kernels_in(PyObject *module, PyObject *object)
{
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &data, &size) < 0) return NULL;
    PyObject *names = PyList_New(0), *result = NULL;
    if (names == NULL) return NULL;
    Status status = cubin_visit_kernels(data, (size_t)size, append_name, names);
    if (status != STATUS_OK)
        raise_status(PyModule_GetState(module), status, "compile", DEVICE_CPU);
    else if (!PyErr_Occurred())
        result = PyList_AsTuple(names);
    Py_DECREF(names);
    return result;
}

typedef struct InfoWork {
    int device;
    DeviceInfo info;
} InfoWork;

static Status do_info(void *context)
{
    InfoWork *work = context;
    return cuda_device_info(work->device, &work->info);
}

/* The compute capability of a device, 90 for 9.0, which never changes. It is asked for once, as the
 * driver takes its time to tell all about a device. */
static Status find_capability(int device, int *capability)
{
    enum { KNOWN = 64 };
    static atomic_int known[KNOWN];
    *capability = device < KNOWN ? atomic_load(&known[device]) : 0;
    if (*capability != 0) return STATUS_OK;
    InfoWork work = {.device = device};
    Status status = without_gil(do_info, &work);
    if (status != STATUS_OK) return status;
    *capability = work.info.compute_major * 10 + work.info.compute_minor;
    if (device < KNOWN) atomic_store(&known[device], *capability);
    return STATUS_OK;
}

static PyObject *find_device(PyObject *module, PyObject *args)
{
    State *state = PyModule_GetState(module);
    PyObject *device;
    const char *op;
    int ordinal, capability;
    if (!PyArg_ParseTuple(args, "Os:_find_device", &device, &op)) return NULL;
    if (read_ordinal(state, device, op, &ordinal) < 0) return NULL;
    Status status = find_capability(ordinal, &capability);
    if (status != STATUS_OK) return raise_status(state, status, op, ordinal);
    return Py_BuildValue("(iii)", ordinal, capability / 10, capability % 10);
}

static PyObject *driver_version(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLong(cuda_driver_version());
}

PyMethodDef nvrtc_methods[] = {
    {"_nvrtc_open", open_nvrtc, METH_O,
     "_nvrtc_open($module, path, /)\n--\n\n"
     "(major, minor) of NVRTC, which is opened if it is not open yet: from a path, or None."},
    {"_nvrtc_compile", compile_source, METH_VARARGS,
     "_nvrtc_compile($module, source, name, options, headers, name_expressions, /)\n--\n\n"
     "(None or the name of a failure, cubin or None, log, dict of lowered names)."},
    {"_cubin_kernels", kernels_in, METH_O,
     "_cubin_kernels($module, cubin, /)\n--\n\n"
     "The names of the kernels in machine code, a tuple of str."},
    {"_find_device", find_device, METH_VARARGS,
     "_find_device($module, device, operator, /)\n--\n\n"
     "(ordinal, major, minor) of the GPU that device= means; an error is that of an operator."},
    {"_driver_version", driver_version, METH_NOARGS,
     "_driver_version($module)\n--\n\nThe newest CUDA that the driver runs, 13000 for 13.0; or 0."},
    {NULL, NULL, 0, NULL},
};
