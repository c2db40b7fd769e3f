/* The failure record of each thread. */
#include "gpuops.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local Failure own, *instead;

static Failure *record(void)
{
    return instead == NULL ? &own : instead;
}

const Failure *last_failure(void)
{
    return record();
}

Failure *record_failures_in(Failure *other)
{
    Failure *before = instead;
    instead = other;
    return before;
}

Status fail(Status status, const char *format, ...)
{
    Failure *failure = record();
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure->text, sizeof failure->text, format, arguments);
    va_end(arguments);
    failure->cuda_code = 0;
    failure->cuda_name[0] = '\0';
    return status;
}

Status fail_axis(int axis, int ndim)
{
    Failure *failure = record();
    failure->axis = axis;
    failure->ndim = ndim;
    return fail(STATUS_AXIS_ERROR, "axis %d is out of bounds for array of dimension %d", axis,
                ndim);
}

Status fail_cuda(Status status, int code, const char *name, const char *text)
{
    Failure *failure = record();
    snprintf(failure->text, sizeof failure->text, "%s", text);
    snprintf(failure->cuda_name, sizeof failure->cuda_name, "%s", name);
    failure->cuda_code = code;
    return status;
}
