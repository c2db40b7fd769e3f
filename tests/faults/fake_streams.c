/* Streams and events of the fake CUDA runtime, and the schedulers that decide when work is done.
 *
 * Every stream is a queue. The first operation of a queue is ready when nothing that it depends on
 * is left in another one: what an event wait waits for, and between the legacy default stream of a
 * device and its blocking streams all that was enqueued earlier. Operations depend on earlier calls
 * only, so there is always one that is ready. What differs is who runs, and when:
 *
 *   now         everything at once, as it is enqueued
 *   lazy        nothing until somebody waits or asks for it, and then no more than that takes
 *   shuffled    the same, but at each wait and query any operation that is ready, at random; and
 *               the blocks of a kernel and the threads of a block in a random order
 *
 * Captures are not turned into graphs: a stream is said to be captured (fake_set_capturing), its
 * work is done all the same, and what would spoil the capture is an error and misuse.
 */
#define _GNU_SOURCE
#include "fake_cudart.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum StreamKind { MADE, LEGACY, PER_THREAD } StreamKind;

struct Stream {
    Stream *next; /* of all streams that exist */
    long id;      /* its place in the table of handles */
    StreamKind kind;
    int device;
    unsigned flags;
    int priority;
    const void *thread; /* whose default stream it is */
    bool destroyed;     /* by the caller, though there may be work left */
    long capture;       /* the number of the capture that it takes part in, or 0 */
    Operation *first, *last;
};

typedef struct Event {
    int device;
    unsigned flags;
    long stream, work; /* the operation that records it; work is 0 until there is one */
    long capture;      /* in which it was recorded, or 0 */
    struct timespec time;
} Event;

static Stream *streams;
static long live_streams, live_events;
static long last_work, last_capture;

static enum { NOW, LAZY, SHUFFLED } scheduler;
static uint64_t random_state;

static _Thread_local enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
static _Thread_local char this_thread; /* only its address is of use */

/* Handles are numbers that look like no address and are never used again, so that one which
 * outlives its object is told from all others. */

enum { HANDLE_STEP = 16 };

typedef struct Table {
    const char *kind;
    uintptr_t base; /* the handle of the first object */
    void **objects; /* NULL where there is none any more */
    long count, room;
} Table;

static Table stream_table = {.kind = "stream", .base = (uintptr_t)1 << 56};
static Table event_table = {.kind = "event", .base = (uintptr_t)2 << 56};

/* The place of a new object, or -1. */
static long add_to(Table *table, void *object)
{
    if (table->count == table->room) {
        long room = 2 * table->room + 64;
        void **objects = realloc(table->objects, (size_t)room * sizeof *objects);
        if (!objects) return -1;
        table->objects = objects;
        table->room = room;
    }
    table->objects[table->count] = object;
    return table->count++;
}

static void *handle_of(const Table *table, long id)
{
    return (void *)(table->base + (uintptr_t)id * HANDLE_STEP);
}

/* The place of a handle, or -1 if it never was one. */
static long id_of(const Table *table, const void *handle)
{
    uintptr_t offset = (uintptr_t)handle - table->base;
    bool known = offset % HANDLE_STEP == 0 && offset / HANDLE_STEP < (uintptr_t)table->count;
    return known ? (long)(offset / HANDLE_STEP) : -1;
}

static cudaError_t find(const char *call, const Table *table, const void *handle, void **object)
{
    long id = id_of(table, handle);
    *object = id < 0 ? NULL : table->objects[id];
    if (id >= 0 && !*object) misuse("%s: the %s has been destroyed", call, table->kind);
    return *object ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

/* The order of the work. */

/* Whether an operation of a stream has been done. */
static bool has_passed(long stream_id, long work)
{
    const Stream *stream = stream_table.objects[stream_id];
    return !stream || !stream->first || stream->first->number > work;
}

static bool takes_turns_with_legacy(const Stream *stream)
{
    return stream->kind != LEGACY && !(stream->flags & cudaStreamNonBlocking);
}

static void run_wait(Operation *operation) {}

/* A kernel that takes its time, which begins when it is queued: who waits for it sleeps till then,
 * and who asks is told that it goes on. */
static int64_t milliseconds_left(const Operation *operation)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return operation->end_milliseconds - (now.tv_sec * 1000 + now.tv_nsec / 1000000);
}

static void run_slowly(Operation *operation)
{
    for (int64_t left; (left = milliseconds_left(operation)) > 0;)
        nanosleep(&(struct timespec){left / 1000, left % 1000 * 1000000}, NULL);
}

static bool takes_its_time(const Operation *operation)
{
    return operation->run == run_slowly && milliseconds_left(operation) > 0;
}

/* A stream whose first operation must be done before that of this one, or NULL. */
static Stream *obstacle_to(const Stream *stream)
{
    const Operation *operation = stream->first;
    if (operation->run == run_wait &&
        !has_passed(operation->awaited_stream, operation->awaited_work))
        return stream_table.objects[operation->awaited_stream];
    for (Stream *other = streams; other; other = other->next) {
        bool ordered =
            other->device == stream->device &&
            (stream->kind == LEGACY ? takes_turns_with_legacy(other)
                                    : takes_turns_with_legacy(stream) && other->kind == LEGACY);
        if (ordered && other->first && other->first->number < operation->number) return other;
    }
    return NULL;
}

static void forget(Stream *stream)
{
    Stream **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    stream_table.objects[stream->id] = NULL;
    free(stream);
}

static void run_first_of(Stream *stream)
{
    Operation *operation = stream->first;
    operation->run(operation);
    stream->first = operation->next;
    if (!stream->first) stream->last = NULL;
    free(operation);
    if (stream->destroyed && !stream->first) forget(stream);
}

/* Does the first thing that must be done for a stream to get on, unless nobody waits and it takes
 * its time. */
static void run_one_for(Stream *stream, bool waits)
{
    for (Stream *obstacle = stream; obstacle; obstacle = obstacle_to(stream)) stream = obstacle;
    if (waits || !takes_its_time(stream->first)) run_first_of(stream);
}

static uint64_t random_below(uint64_t bound)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % bound;
}

uint64_t draw_order(void)
{
    return scheduler == SHUFFLED ? 1 + random_below(UINT64_MAX) : 0;
}

/* A grid has too many blocks for a table of them. Each step takes the numbers below a power of two
 * to each other, and what is not below count goes on until it is. */
unsigned at_turn(uint64_t order, unsigned turn, unsigned count)
{
    if (order == 0 || count == 1) return turn;
    int bits = 32 - __builtin_clz(count - 1);
    unsigned mask = UINT32_MAX >> (32 - bits), number = turn;
    do {
        uint64_t key = order;
        for (int round = 0; round < 4; round++) {
            number = (number + (unsigned)(key >> 32)) & mask;
            number = number * ((unsigned)(key >> 7) | 1) & mask;
            number ^= number >> (bits + 1) / 2;
            key = key * 0x5851F42D4C957F2Du + 0x14057B7EF767814Fu;
        }
    } while (number >= count);
    return number;
}

static void run_any(bool waits)
{
    Stream *chosen = NULL;
    uint64_t ready = 0;
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->first && !obstacle_to(stream) && (waits || !takes_its_time(stream->first)) &&
            random_below(++ready) == 0)
            chosen = stream;
    if (chosen) run_first_of(chosen);
}

/* One step towards an operation, or in no direction at all. */
static void run_one_towards(long stream_id, long work, bool waits)
{
    if (scheduler == SHUFFLED)
        run_any(waits);
    else if (!has_passed(stream_id, work))
        run_one_for(stream_table.objects[stream_id], waits);
}

static void run_until(long stream_id, long work)
{
    while (!has_passed(stream_id, work)) run_one_towards(stream_id, work, true);
}

/* Asking again and again must come to an end, and so it brings the work on: by a step, and by more
 * where nothing else is asked for but that, for who waits so asks less and less often. */
static long questions; /* since something was queued */
static void run_some_towards(long stream_id, long work)
{
    long steps = 1 + questions++ / 8;
    while (steps-- > 0 && !has_passed(stream_id, work)) run_one_towards(stream_id, work, false);
}

void run_to_the_end_of(Stream *stream)
{
    if (stream->last) run_until(stream->id, stream->last->number);
}

/* Whether there was any work left on a device. */
static bool run_some_of(int device)
{
    Stream *stream = streams;
    while (stream && !(stream->first && (device < 0 || stream->device == device)))
        stream = stream->next;
    if (stream) run_to_the_end_of(stream);
    return stream;
}

void run_all_of(int device)
{
    while (run_some_of(device)) continue;
}

void run_everything(void)
{
    run_all_of(-1);
}

Operation *new_operation(const char *call, Stream *stream, void (*run)(Operation *),
                         size_t copied_bytes)
{
    Operation *operation = calloc(1, sizeof *operation + copied_bytes);
    if (!operation) return NULL;
    operation->call = call;
    operation->stream = stream;
    operation->run = run;
    operation->copied_bytes = copied_bytes;
    return operation;
}

void enqueue(Operation *operation)
{
    Stream *stream = operation->stream;
    operation->number = ++last_work;
    questions = 0;
    *(stream->last ? &stream->last->next : &stream->first) = operation;
    stream->last = operation;
    if (scheduler == NOW) run_to_the_end_of(stream);
}

void set_scheduler(const char *name, uint64_t seed)
{
    static const char *const names[] = {[NOW] = "now", [LAZY] = "lazy", [SHUFFLED] = "shuffled"};
    run_everything();
    for (int i = NOW; i <= SHUFFLED; i++) {
        if (strcmp(name, names[i])) continue;
        scheduler = i;
        /* Any seed gives another order, but the generator would stay at 0 for ever. */
        random_state = (seed + 1) * 0x9E3779B97F4A7C15u;
        if (random_state == 0) random_state = 1;
        for (int warm_up = 0; warm_up < 8; warm_up++) random_below(1);
        return;
    }
    misuse("there is no scheduler called %s", name);
}

/* Streams. */

static cudaError_t make_stream(Stream pattern, Stream **made)
{
    Stream *stream = malloc(sizeof *stream);
    if (!stream) return cudaErrorMemoryAllocation;
    *stream = pattern;
    stream->id = add_to(&stream_table, stream);
    if (stream->id < 0) {
        free(stream);
        return cudaErrorMemoryAllocation;
    }
    stream->next = streams;
    streams = stream;
    *made = stream;
    return cudaSuccess;
}

/* The per-thread default streams of a thread end with it. With work left on them, drivers hang. */
static void end_of_thread(void *thread)
{
    LOCKED();
    Stream *next;
    for (Stream *stream = streams; stream; stream = next) {
        next = stream->next;
        if (stream->kind != PER_THREAD || stream->thread != thread) continue;
        stream->thread = NULL; /* another thread may come to have this address */
        stream->destroyed = true;
        if (stream->first && !stream->capture)
            misuse("a thread has ended before the work on its per-thread default stream");
        if (!stream->first) forget(stream);
    }
}

static pthread_key_t this_thread_key;
static void make_key(void)
{
    pthread_key_create(&this_thread_key, end_of_thread);
}

/* A stream that exists on every device without being made. */
static cudaError_t find_default_stream(StreamKind kind, Stream **stream)
{
    const void *thread = kind == PER_THREAD ? &this_thread : NULL;
    for (*stream = streams; *stream; *stream = (*stream)->next) {
        const Stream *found = *stream;
        if (found->kind == kind && found->device == current_device && found->thread == thread &&
            !found->destroyed)
            return cudaSuccess;
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    if (kind == PER_THREAD && pthread_setspecific(this_thread_key, thread) != 0)
        return cudaErrorMemoryAllocation;
    return make_stream((Stream){.kind = kind, .device = current_device, .thread = thread}, stream);
}

cudaError_t find_stream(const char *call, cudaStream_t handle, Stream **stream)
{
    if (!handle || handle == cudaStreamLegacy) return find_default_stream(LEGACY, stream);
    if (handle == cudaStreamPerThread) return find_default_stream(PER_THREAD, stream);
    cudaError_t code = find(call, &stream_table, handle, (void **)stream);
    if (code != cudaSuccess) return code;
    /* Handles of default streams are not given to anybody. */
    if ((*stream)->kind != MADE) return cudaErrorInvalidResourceHandle;
    if (!(*stream)->destroyed) return cudaSuccess;
    misuse("%s: the stream has been destroyed", call);
    return cudaErrorInvalidResourceHandle;
}

int device_of(const Stream *stream)
{
    return stream->device;
}

long capture_of(const Stream *stream)
{
    return stream->capture;
}

/* Whether a capture on a blocking stream makes the legacy default stream unusable. */
static bool is_locked(const Stream *stream)
{
    if (stream->kind != LEGACY) return false;
    for (const Stream *other = streams; other; other = other->next)
        if (other->device == stream->device && other->capture && takes_turns_with_legacy(other))
            return true;
    return false;
}

cudaError_t find_working_stream(const char *call, cudaStream_t handle, Stream **stream)
{
    cudaError_t code = find_stream(call, handle, stream);
    if (code != cudaSuccess || !is_locked(*stream)) return code;
    misuse("%s: the legacy default stream was used while a blocking stream was captured", call);
    return cudaErrorStreamCaptureImplicit;
}

/* A stream to wait for: there is nothing to wait for in one that is captured. */
static cudaError_t find_awaited_stream(const char *call, cudaStream_t handle, Stream **stream)
{
    cudaError_t code = find_working_stream(call, handle, stream);
    if (code != cudaSuccess || !(*stream)->capture) return code;
    misuse("%s: the stream is being captured", call);
    return cudaErrorStreamCaptureUnsupported;
}

static const Stream *captured_stream(int device)
{
    const Stream *stream = streams;
    while (stream && !(stream->capture && (device < 0 || stream->device == device)))
        stream = stream->next;
    return stream;
}

cudaError_t refuse_while_capturing(const char *call)
{
    if (capture_mode == cudaStreamCaptureModeRelaxed || !captured_stream(-1)) return cudaSuccess;
    misuse("%s: not permitted during a capture, unless the thread's capture mode is relaxed", call);
    return cudaErrorStreamCaptureUnsupported;
}

static cudaError_t create_stream(cudaStream_t *handle, unsigned flags, int priority)
{
    bool known = flags == cudaStreamDefault || flags == cudaStreamNonBlocking;
    if (!handle || !known) return cudaErrorInvalidValue;
    /* Priorities outside the range are taken to its nearer end. */
    int within = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    Stream pattern = {.kind = MADE, .device = current_device, .flags = flags, .priority = within};
    Stream *stream;
    cudaError_t code = make_stream(pattern, &stream);
    if (code != cudaSuccess) return code;
    live_streams++;
    *handle = handle_of(&stream_table, stream->id);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags)
{
    BEGIN();
    return done(create_stream(handle, flags, 0));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority)
{
    BEGIN();
    return done(create_stream(handle, flags, priority));
}

/* What is queued on it will still be done. */
cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    BEGIN_RELEASE();
    Stream *stream;
    REQUIRE_SUCCESS(find_awaited_stream(__func__, handle, &stream));
    REQUIRE(stream->kind == MADE, cudaErrorInvalidResourceHandle);
    live_streams--;
    stream->destroyed = true;
    if (!stream->first) forget(stream);
    return done(fault);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    BEGIN();
    Stream *stream;
    REQUIRE_SUCCESS(find_awaited_stream(__func__, handle, &stream));
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    run_to_the_end_of(stream);
    trim_pools(stream->device, false);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    BEGIN();
    Stream *stream;
    REQUIRE_SUCCESS(find_awaited_stream(__func__, handle, &stream));
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    if (stream->last) run_some_towards(stream->id, stream->last->number);
    return done(stream->first ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void)
{
    BEGIN();
    if (captured_stream(current_device)) {
        misuse("%s: a stream of the device is being captured", __func__);
        return done(cudaErrorStreamCaptureUnsupported);
    }
    run_all_of(current_device);
    trim_pools(current_device, false);
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int *device)
{
    BEGIN();
    Stream *stream;
    REQUIRE_SUCCESS(find_stream(__func__, handle, &stream));
    REQUIRE(device, cudaErrorInvalidValue);
    if (stream->capture) {
        misuse("%s: the stream is being captured", __func__);
        return done(cudaErrorStreamCaptureUnsupported);
    }
    *device = stream->device;
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *flags)
{
    BEGIN();
    Stream *stream;
    REQUIRE_SUCCESS(find_stream(__func__, handle, &stream));
    REQUIRE(flags, cudaErrorInvalidValue);
    *flags = stream->flags;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority)
{
    BEGIN();
    Stream *stream;
    REQUIRE_SUCCESS(find_stream(__func__, handle, &stream));
    REQUIRE(priority, cudaErrorInvalidValue);
    *priority = stream->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    BEGIN();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

/* Events. */

static cudaError_t find_event(const char *call, cudaEvent_t handle, Event **event)
{
    return find(call, &event_table, handle, (void **)event);
}

static bool is_done(const Event *event)
{
    return event->work == 0 || has_passed(event->stream, event->work);
}

/* The host can learn nothing of an event that was recorded in a capture. */
static cudaError_t find_awaited_event(const char *call, cudaEvent_t handle, Event **event)
{
    cudaError_t code = find_event(call, handle, event);
    if (code != cudaSuccess || !(*event)->capture) return code;
    misuse("%s: the event was recorded in a capture", call);
    return cudaErrorCapturedEvent;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags)
{
    BEGIN();
    unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    bool timed = !(flags & cudaEventDisableTiming);
    REQUIRE(handle && (flags & ~known) == 0, cudaErrorInvalidValue);
    REQUIRE(!(timed && flags & cudaEventInterprocess), cudaErrorInvalidValue);
    Event *event = malloc(sizeof *event);
    REQUIRE(event, cudaErrorMemoryAllocation);
    *event = (Event){.device = current_device, .flags = flags};
    long id = add_to(&event_table, event);
    if (id < 0) {
        free(event);
        return done(cudaErrorMemoryAllocation);
    }
    live_events++;
    *handle = handle_of(&event_table, id);
    return cudaSuccess;
}

/* A recording that is still to come goes on without it. */
cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    BEGIN_RELEASE();
    Event *event;
    REQUIRE_SUCCESS(find_event(__func__, handle, &event));
    event_table.objects[id_of(&event_table, handle)] = NULL;
    free(event);
    live_events--;
    return done(fault);
}

static void run_record(Operation *operation)
{
    Event *event = event_table.objects[operation->event];
    if (event && event->work == operation->number) clock_gettime(CLOCK_MONOTONIC, &event->time);
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle)
{
    BEGIN();
    Event *event;
    Stream *stream;
    REQUIRE_SUCCESS(find_event(__func__, event_handle, &event));
    REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
    if (event->device != stream->device)
        misuse("%s: the event is of device %d and the stream of device %d", __func__, event->device,
               stream->device);
    REQUIRE(event->device == stream->device, cudaErrorInvalidResourceHandle);
    Operation *operation = new_operation(__func__, stream, run_record, 0);
    REQUIRE(operation, cudaErrorMemoryAllocation);
    operation->event = id_of(&event_table, event_handle);
    event->stream = stream->id;
    event->work = last_work + 1;
    event->capture = stream->capture;
    enqueue(operation);
    return cudaSuccess;
}

static bool capture_goes_on(long capture)
{
    const Stream *stream = streams;
    while (stream && stream->capture != capture) stream = stream->next;
    return stream;
}

/* What waits for an event of a capture takes part in it from then on. */
static cudaError_t join_capture(const char *call, Stream *stream, const Event *event)
{
    if (event->capture == stream->capture) return cudaSuccess;
    if (!event->capture) {
        misuse("%s: a captured stream waits for an event that was recorded outside", call);
        return cudaErrorStreamCaptureIsolation;
    }
    if (stream->capture) {
        misuse("%s: a captured stream waits for an event of another capture", call);
        return cudaErrorStreamCaptureMerge;
    }
    if (!capture_goes_on(event->capture)) {
        misuse("%s: the event was recorded in a capture that has ended", call);
        return cudaErrorCapturedEvent;
    }
    if (stream->kind == LEGACY) {
        misuse("%s: the legacy default stream waits for an event of a capture", call);
        return cudaErrorStreamCaptureImplicit;
    }
    stream->capture = event->capture;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags)
{
    BEGIN();
    Event *event;
    Stream *stream;
    REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
    REQUIRE_SUCCESS(find_event(__func__, event_handle, &event));
    REQUIRE(flags == cudaEventWaitDefault, cudaErrorInvalidValue);
    REQUIRE_SUCCESS(join_capture(__func__, stream, event));
    if (event->work == 0) return cudaSuccess;
    Operation *operation = new_operation(__func__, stream, run_wait, 0);
    REQUIRE(operation, cudaErrorMemoryAllocation);
    operation->awaited_stream = event->stream;
    operation->awaited_work = event->work;
    enqueue(operation);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    BEGIN();
    Event *event;
    REQUIRE_SUCCESS(find_awaited_event(__func__, handle, &event));
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    if (!is_done(event)) run_some_towards(event->stream, event->work);
    return done(is_done(event) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    BEGIN();
    Event *event;
    REQUIRE_SUCCESS(find_awaited_event(__func__, handle, &event));
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    if (event->work) run_until(event->stream, event->work);
    trim_pools(event->device, false);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start_handle,
                                 cudaEvent_t end_handle)
{
    BEGIN();
    Event *start, *end;
    REQUIRE(milliseconds, cudaErrorInvalidValue);
    REQUIRE_SUCCESS(find_awaited_event(__func__, start_handle, &start));
    REQUIRE_SUCCESS(find_awaited_event(__func__, end_handle, &end));
    bool recorded = start->work && end->work;
    bool timed = !((start->flags | end->flags) & cudaEventDisableTiming);
    REQUIRE(recorded && timed && start->device == end->device, cudaErrorInvalidResourceHandle);
    REQUIRE(is_done(start) && is_done(end), cudaErrorNotReady);
    *milliseconds = (float)((double)(end->time.tv_sec - start->time.tv_sec) * 1e3 +
                            (double)(end->time.tv_nsec - start->time.tv_nsec) * 1e-6);
    return cudaSuccess;
}

/* Capture. */

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    BEGIN();
    Stream *stream;
    REQUIRE_SUCCESS(find_stream(__func__, handle, &stream));
    REQUIRE(status, cudaErrorInvalidValue);
    REQUIRE(!is_locked(stream), cudaErrorStreamCaptureImplicit);
    *status = stream->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    BEGIN();
    REQUIRE(mode && *mode >= cudaStreamCaptureModeGlobal && *mode <= cudaStreamCaptureModeRelaxed,
            cudaErrorInvalidValue);
    enum cudaStreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* The controls, for tests/faults/fake.py. */

void count_streams(long *made_streams, long *made_events)
{
    *made_streams = live_streams;
    *made_events = live_events;
}

/* Begins a capture on a stream, or ends the one that it takes part in, for all its streams. */
cudaError_t fake_set_capturing(cudaStream_t handle, int on)
{
    LOCKED();
    Stream *stream;
    cudaError_t code = find_stream(__func__, handle, &stream);
    if (code != cudaSuccess) return code;
    if (stream->kind == LEGACY) return cudaErrorStreamCaptureUnsupported;
    if ((bool)on == (stream->capture != 0)) return cudaErrorIllegalState;
    long ended = stream->capture;
    stream->capture = on ? ++last_capture : 0;
    for (Stream *other = streams; ended && other; other = other->next)
        if (other->capture == ended) other->capture = 0;
    return cudaSuccess;
}

/* Queues a kernel that touches nothing, and is at work until so many milliseconds from now. */
cudaError_t fake_take_time(cudaStream_t handle, int64_t milliseconds)
{
    LOCKED();
    Stream *stream;
    cudaError_t code = find_working_stream(__func__, handle, &stream);
    if (code != cudaSuccess) return code;
    Operation *operation = new_operation(__func__, stream, run_slowly, 0);
    if (!operation) return cudaErrorMemoryAllocation;
    operation->end_milliseconds = 0;
    operation->end_milliseconds = milliseconds - milliseconds_left(operation);
    enqueue(operation);
    return cudaSuccess;
}

/* Kernels that take their time are at their end. */
void fake_hurry(void)
{
    LOCKED();
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Operation *operation = stream->first; operation; operation = operation->next)
            operation->end_milliseconds = 0;
}

/* How much work is waiting to be done, on all devices. */
long fake_pending(void)
{
    LOCKED();
    long pending = 0;
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Operation *operation = stream->first; operation; operation = operation->next)
            pending++;
    return pending;
}
