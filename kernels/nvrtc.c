/* NVRTC, NVIDIA's compiler of CUDA C++ at run time, where it is found at run time.
 *
 * Nothing of it is needed to build: what is declared here are the functions of its public interface
 * (nvrtc.h, "NVRTC" in NVIDIA's CUDA documentation) that are used. It compiles without a GPU and
 * without a driver, and several threads may do so at once. */
#include "gpuops.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* nvrtcResult */
enum { NVRTC_OK = 0, NVRTC_OUT_OF_MEMORY = 1 };

typedef void *Program;

static struct {
    pthread_mutex_t lock;
    bool is_open; /* the functions are final then */
    int major, minor;
    int (*version)(int *major, int *minor);
    const char *(*status_name)(int);
    int (*create)(Program *, const char *source, const char *name, int header_count,
                  const char *const *headers, const char *const *header_names);
    int (*destroy)(Program *);
    int (*add_expression)(Program, const char *);
    int (*compile)(Program, int option_count, const char *const *options);
    int (*log_size)(Program, size_t *);
    int (*log)(Program, char *);
    int (*cubin_size)(Program, size_t *);
    int (*cubin)(Program, char *);
    int (*lowered_name)(Program, const char *expression, const char **name);
} library = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Opening it. */

static bool load_functions(void *handle)
{
    const struct {
        const char *name;
        void **function;
    } functions[] = {
        {"nvrtcVersion", (void **)&library.version},
        {"nvrtcGetErrorString", (void **)&library.status_name},
        {"nvrtcCreateProgram", (void **)&library.create},
        {"nvrtcDestroyProgram", (void **)&library.destroy},
        {"nvrtcAddNameExpression", (void **)&library.add_expression},
        {"nvrtcCompileProgram", (void **)&library.compile},
        {"nvrtcGetProgramLogSize", (void **)&library.log_size},
        {"nvrtcGetProgramLog", (void **)&library.log},
        {"nvrtcGetCUBINSize", (void **)&library.cubin_size},
        {"nvrtcGetCUBIN", (void **)&library.cubin},
        {"nvrtcGetLoweredName", (void **)&library.lowered_name},
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        *functions[i].function = dlsym(handle, functions[i].name);
        if (*functions[i].function == NULL) return false;
    }
    return library.version(&library.major, &library.minor) == NVRTC_OK;
}

/* Opens a library by its path or name, or adds to the reasons why none could be opened. */
static bool open_library(const char *path, char *problems, size_t size)
{
    void *handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    const size_t used = strlen(problems);
    const char *separator = used == 0 ? "" : "; ";
    if (handle == NULL) {
        snprintf(problems + used, size - used, "%s%s", separator, dlerror());
        return false;
    }
    if (load_functions(handle)) return true;
    snprintf(problems + used, size - used, "%s%s does not have all functions of NVRTC 12 or later",
             separator, path);
    dlclose(handle);
    return false;
}

static bool open_first(const char *path, char *problems, size_t size)
{
    if (path != NULL) return open_library(path, problems, size);
    return open_library("libnvrtc.so.13", problems, size) ||
           open_library("libnvrtc.so.12", problems, size);
}

Status nvrtc_open(const char *path, int *major, int *minor)
{
    char problems[512] = "";
    pthread_mutex_lock(&library.lock);
    bool is_open = library.is_open;
    if (!is_open) {
        is_open = open_first(path, problems, sizeof problems);
        __atomic_store_n(&library.is_open, is_open, __ATOMIC_RELEASE);
    }
    *major = library.major;
    *minor = library.minor;
    pthread_mutex_unlock(&library.lock);
    if (is_open) return STATUS_OK;
    return fail(STATUS_LIBRARY_ERROR, "NVRTC cannot be opened: %s", problems);
}

/* Compiling. */

static Status no_memory(void)
{
    return fail(STATUS_MEMORY_ERROR, "out of host memory for the compiler's results");
}

/* A failure of NVRTC is a result like any other, unless there is no memory left. */
static Status note(Compilation *compilation, int code)
{
    if (code == NVRTC_OUT_OF_MEMORY) return no_memory();
    if (code != NVRTC_OK && compilation->result == NULL)
        compilation->result = library.status_name(code);
    return STATUS_OK;
}

static Status take_log(Program program, Compilation *compilation)
{
    size_t size = 0;
    int code = library.log_size(program, &size);
    compilation->log = calloc(size + 1, 1);
    if (compilation->log == NULL) return no_memory();
    if (code == NVRTC_OK && size > 0) code = library.log(program, compilation->log);
    return note(compilation, code);
}

/* Options may ask for something else than machine code, of which there is none then. */
static Status take_cubin(Program program, Compilation *compilation)
{
    size_t size = 0;
    if (library.cubin_size(program, &size) != NVRTC_OK || size == 0) return STATUS_OK;
    compilation->cubin = malloc(size);
    if (compilation->cubin == NULL) return no_memory();
    compilation->cubin_bytes = size;
    return note(compilation, library.cubin(program, compilation->cubin));
}

static Status take_names(Program program, Compilation *compilation)
{
    const int count = compilation->expression_count;
    compilation->lowered = calloc((size_t)count + 1, sizeof(char *));
    if (compilation->lowered == NULL) return no_memory();
    for (int i = 0; i < count; i++) {
        const char *name = NULL;
        const int code = library.lowered_name(program, compilation->expressions[i], &name);
        Status status = note(compilation, code);
        if (status != STATUS_OK) return status;
        if (code != NVRTC_OK) break;
        compilation->lowered[i] = strdup(name);
        if (compilation->lowered[i] == NULL) return no_memory();
    }
    return STATUS_OK;
}

static Status compile_program(Program program, Compilation *compilation)
{
    for (int i = 0; i < compilation->expression_count; i++) {
        Status status =
            note(compilation, library.add_expression(program, compilation->expressions[i]));
        if (status != STATUS_OK) return status;
    }
    if (compilation->result == NULL) {
        const int code = library.compile(program, compilation->option_count, compilation->options);
        Status status = note(compilation, code);
        if (status != STATUS_OK) return status;
    }
    Status status = take_log(program, compilation);
    if (status == STATUS_OK && compilation->result == NULL)
        status = take_names(program, compilation);
    if (status == STATUS_OK && compilation->result == NULL)
        status = take_cubin(program, compilation);
    return status;
}

Status nvrtc_compile(Compilation *compilation)
{
    if (!__atomic_load_n(&library.is_open, __ATOMIC_ACQUIRE))
        return fail(STATUS_LIBRARY_ERROR, "NVRTC has not been opened");
    compilation->result = NULL;
    compilation->log = compilation->cubin = NULL;
    compilation->cubin_bytes = 0;
    compilation->lowered = NULL;

    Program program = NULL;
    const int code =
        library.create(&program, compilation->source, compilation->name, compilation->header_count,
                       compilation->headers, compilation->header_names);
    Status status = note(compilation, code);
    if (status == STATUS_OK && code == NVRTC_OK) status = compile_program(program, compilation);
    if (program != NULL) library.destroy(&program);
    if (status != STATUS_OK) nvrtc_clear(compilation);
    return status;
}

void nvrtc_clear(Compilation *compilation)
{
    for (int i = 0; compilation->lowered != NULL && i < compilation->expression_count; i++)
        free(compilation->lowered[i]);
    free(compilation->lowered);
    free(compilation->cubin);
    free(compilation->log);
    compilation->lowered = NULL;
    compilation->cubin = compilation->log = NULL;
}
