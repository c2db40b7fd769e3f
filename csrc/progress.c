/* What looks after a call between large arrays on the host, which goes in parts, and after one that
 * waits: now and then it takes the GIL, for signals that have come, and between parts for a bar of
 * tqdm's if one is wanted. */
#include "core.h"

static int create_bar(Progress *progress, int64_t bytes)
{
    PyObject *arguments = PyTuple_New(0);
    PyObject *options =
        Py_BuildValue("{s:s,s:L,s:s,s:O,s:i}", "desc", progress->op, "total", (long long)bytes,
                      "unit", "B", "unit_scale", Py_True, "unit_divisor", 1024);
    if (arguments != NULL && options != NULL)
        progress->bar = PyObject_Call(progress->make_bar, arguments, options);
    Py_XDECREF(options);
    Py_XDECREF(arguments);
    return progress->bar == NULL ? -1 : 0;
}

static int tell(Progress *progress, int64_t done_bytes, int64_t bytes)
{
    if (progress->make_bar == NULL || bytes == 0) return 0;
    if (progress->bar == NULL && create_bar(progress, bytes) < 0) return -1;
    const int64_t more = done_bytes - progress->told_bytes;
    if (more == 0) return 0;
    progress->told_bytes = done_bytes;
    PyObject *told = PyObject_CallMethod(progress->bar, "update", "L", (long long)more);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

/* The exception is put aside: others may run Python code before the call has come to its end. What
 * waits once more on the way out is not to wait either. */
static bool look(Watch *watch, int64_t done_bytes, int64_t bytes)
{
    Progress *progress = (Progress *)watch;
    if (progress->type != NULL) return false;
    PyEval_RestoreThread(progress->saved);
    const bool goes_on = PyErr_CheckSignals() == 0 && tell(progress, done_bytes, bytes) == 0;
    if (!goes_on) PyErr_Fetch(&progress->type, &progress->value, &progress->traceback);
    progress->saved = release_gil();
    return goes_on;
}

void progress_init(Progress *progress, const char *op)
{
    progress->watch.look = look;
    progress->watch.sees_ends = false;
    progress->op = op;
    progress->make_bar = progress->bar = NULL;
    progress->type = progress->value = progress->traceback = NULL;
    progress->told_bytes = 0;
}

int progress_show(Progress *progress)
{
    PyObject *module = PyImport_ImportModule("tqdm.auto");
    if (module == NULL && PyErr_ExceptionMatches(PyExc_ImportError)) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_Format(PyExc_ImportError,
                     "progress=True shows a bar of tqdm's, which cannot be imported (%S): pip "
                     "install tqdm",
                     value == NULL ? Py_None : value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    }
    if (module == NULL) return -1;
    progress->make_bar = PyObject_GetAttrString(module, "tqdm");
    Py_DECREF(module);
    progress->watch.sees_ends = true;
    return progress->make_bar == NULL ? -1 : 0;
}

/* An exception of a handler goes before whatever else went wrong, and is never lost. */
Status progress_run(Progress *progress, Status (*work)(void *), void *context)
{
    const Status status = without_gil_for_now(work, context, &progress->saved);
    if (progress->type == NULL) return status;
    PyErr_Restore(progress->type, progress->value, progress->traceback);
    progress->type = progress->value = progress->traceback = NULL;
    return STATUS_INTERRUPTED;
}

void progress_close(Progress *progress, PyObject **result)
{
    if (progress->make_bar == NULL) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *closed = progress->bar == NULL ? Py_NewRef(Py_None)
                                             : PyObject_CallMethod(progress->bar, "close", NULL);
    if (closed == NULL && *result != NULL) {
        Py_CLEAR(*result);
    } else {
        if (closed == NULL) PyErr_WriteUnraisable(progress->bar);
        PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(closed);
    Py_CLEAR(progress->bar);
    Py_CLEAR(progress->make_bar);
}
