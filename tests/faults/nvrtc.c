/* An NVRTC for tests: it compiles nothing, and does as it is told, which is mostly to fail.
 *
 * What it gives for a program is always the same: the log "a log", the machine code "code", and for
 * an expression its name with "_Z" before it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Program {
    char name[64];
} Program;

static const char LOG[] = "a log", CODE[] = "code";

static const char *failing = "";
static int failure;
static size_t log_bytes = sizeof LOG, code_bytes = sizeof CODE - 1;
static long live_programs;

/* From now on a function, by its name without "nvrtc", gives a code; "" is none. */
void fake_nvrtc_fail(const char *function, int code)
{
    static char name[64];
    snprintf(name, sizeof name, "%s", function);
    failing = name;
    failure = code;
}

/* What the log and the code are said to measure; no more than what there is is ever written. */
void fake_nvrtc_set_sizes(size_t log, size_t code)
{
    log_bytes = log;
    code_bytes = code;
}

long fake_nvrtc_live(void)
{
    return live_programs;
}

static int status_of(const char *function)
{
    return strcmp(function, failing) == 0 ? failure : 0;
}

const char *nvrtcGetErrorString(int code)
{
    return code == 11 ? "NVRTC_ERROR_INTERNAL_ERROR" : "NVRTC_ERROR_UNKNOWN";
}

int nvrtcVersion(int *major, int *minor)
{
    *major = 77;
    *minor = 3;
    return status_of("Version");
}

int nvrtcCreateProgram(Program **program, const char *source, const char *name, int header_count,
                       const char *const *headers, const char *const *header_names)
{
    const int status = status_of("CreateProgram");
    if (status != 0) return status;
    *program = calloc(1, sizeof **program);
    live_programs++;
    return 0;
}

int nvrtcDestroyProgram(Program **program)
{
    free(*program);
    *program = NULL;
    live_programs--;
    return 0;
}

int nvrtcAddNameExpression(Program *program, const char *expression)
{
    return status_of("AddNameExpression");
}

int nvrtcCompileProgram(Program *program, int option_count, const char *const *options)
{
    return status_of("CompileProgram");
}

int nvrtcGetProgramLogSize(Program *program, size_t *size)
{
    *size = log_bytes;
    return status_of("GetProgramLogSize");
}

int nvrtcGetProgramLog(Program *program, char *log)
{
    memcpy(log, LOG, log_bytes < sizeof LOG ? log_bytes : sizeof LOG);
    return status_of("GetProgramLog");
}

int nvrtcGetCUBINSize(Program *program, size_t *size)
{
    *size = code_bytes;
    return status_of("GetCUBINSize");
}

int nvrtcGetCUBIN(Program *program, char *code)
{
    memcpy(code, CODE, code_bytes < sizeof CODE ? code_bytes : sizeof CODE);
    return status_of("GetCUBIN");
}

int nvrtcGetLoweredName(Program *program, const char *expression, const char **name)
{
    const int status = status_of("GetLoweredName");
    if (status != 0) return status;
    snprintf(program->name, sizeof program->name, "_Z%s", expression);
    *name = program->name;
    return 0;
}
