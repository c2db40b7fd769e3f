/* Faults of the fake CUDA runtime: calls that fail because a test wants to know what happens then.
 *
 * A fault befalls the k-th call, of all functions or of one, and then it is
 *
 *   once           over: the next call is answered as ever
 *   from then on   there for all that follows, until the test is over it
 *   sticky         the end of the context: whatever needs one gives that code, until the process
 *                  ends, or fake_reset
 *   late           the same, but found out later: calls that only queue work succeed, until one
 * that waits for it has to tell. An illegal address in a kernel is such a fault.
 *
 * Of a context that has ended no work is done any more, and nothing can be freed. What a real
 * driver answers without a context it still answers, and so does the fake. */
#define _GNU_SOURCE
#include "fake_cudart.h"

#include <stdio.h>
#include <string.h>

typedef enum Mode { ONCE, FROM_THEN_ON, STICKY, LATE } Mode;
enum { MOST_FAULTS = 8, MOST_LOGGED = 4096 };

static struct Fault {
    bool armed;
    char function[64]; /* the only one that it befalls, or "" */
    long number, seen; /* of those that have been called since it was armed */
    cudaError_t code;
    Mode mode;
    const char *call; /* the first one that it befell, or NULL */
} faults[MOST_FAULTS];

static struct {
    cudaError_t code;
    bool told; /* to a caller, so that every call gives it */
} lost;

static const char *logged[MOST_LOGGED]; /* while a fault is armed */
static long log_count;
static int armed_count;

bool context_is_lost(void)
{
    return lost.code != cudaSuccess;
}

static bool needs_context(const char *call)
{
    static const char *const none[] = {
        "cudaGetDevice",          "cudaGetDeviceCount",      "cudaGetDeviceProperties",
        "cudaDeviceGetAttribute", "cudaMemPoolSetAttribute", "cudaThreadExchangeStreamCaptureMode",
    };
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        if (strcmp(call, none[i]) == 0) return false;
    return true;
}

static bool waits(const char *call)
{
    static const char *const all[] = {
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize",
        "cudaStreamQuery",       "cudaEventQuery",        "cudaFree",
        "cudaLibraryUnload",
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(call, all[i]) == 0) return true;
    return false;
}

static cudaError_t befall(struct Fault *fault, const char *call)
{
    if (!fault->armed || (fault->function[0] && strcmp(fault->function, call))) return cudaSuccess;
    fault->seen++;
    bool strikes =
        fault->mode == FROM_THEN_ON ? fault->seen >= fault->number : fault->seen == fault->number;
    if (!strikes) return cudaSuccess;
    if (!fault->call) fault->call = call;
    if (fault->mode == STICKY || fault->mode == LATE) {
        lost.code = fault->code;
        lost.told = fault->mode == STICKY;
        return cudaSuccess;
    }
    return fault->code;
}

cudaError_t tell_of_lost_context(void)
{
    lost.told = true;
    return lost.code;
}

cudaError_t find_fault(const char *call)
{
    if (armed_count > 0 && log_count < MOST_LOGGED) logged[log_count++] = call;
    cudaError_t code = cudaSuccess;
    for (int i = 0; i < MOST_FAULTS; i++) {
        cudaError_t found = befall(&faults[i], call);
        if (code == cudaSuccess) code = found;
    }
    if (context_is_lost() && needs_context(call) && (lost.told || waits(call)))
        return tell_of_lost_context();
    return code;
}

void end_faults(void)
{
    memset(faults, 0, sizeof faults);
    lost.code = cudaSuccess;
    log_count = armed_count = 0;
}

/* The controls, for tests/faults/fake.py. */

/* Arms a fault, and returns its number. The log begins anew with the first of several. */
int fake_fail(long number, int code, const char *mode, const char *function)
{
    static const char *const modes[] = {"once", "from then on", "sticky", "late"};
    LOCKED();
    int free_place = -1, wanted = -1;
    for (int i = 0; i < MOST_FAULTS; i++)
        if (!faults[i].armed) free_place = i;
    for (int i = ONCE; i <= LATE; i++)
        if (strcmp(mode, modes[i]) == 0) wanted = i;
    if (free_place < 0 || wanted < 0) {
        misuse("a fault of mode %s cannot be armed", mode);
        return -1;
    }
    if (armed_count++ == 0) log_count = 0;
    struct Fault *fault = &faults[free_place];
    *fault = (struct Fault){
        .armed = true, .number = number, .code = (cudaError_t)code, .mode = (Mode)wanted};
    snprintf(fault->function, sizeof fault->function, "%s", function ? function : "");
    return free_place;
}

/* Disarms a fault, and tells which call it befell: "" if none. A lost context stays lost. */
void fake_mend(int number, char *call, size_t bytes)
{
    LOCKED();
    if (number < 0 || !faults[number].armed) return;
    snprintf(call, bytes, "%s", faults[number].call ? faults[number].call : "");
    faults[number].armed = false;
    armed_count--;
}

/* The calls that could have failed while a fault was armed, in order. */
void fake_log(char *text, size_t bytes)
{
    LOCKED();
    size_t written = 0;
    if (bytes > 0) text[0] = '\0';
    for (long i = 0; i < log_count; i++) {
        size_t length = strlen(logged[i]) + 1;
        if (written + length >= bytes) return;
        snprintf(text + written, bytes - written, "%s\n", logged[i]);
        written += length;
    }
}
