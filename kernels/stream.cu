/* Streams and events, and the bad indices that kernels note on the way.
 *
 * There is one record for each device and handle, so that whoever brings the same stream, and in
 * whatever form, meets the same pending error and the same free memory. Records of streams that are
 * not ours stay for the length of the process; there are as many as there are handles. */
#include "common.cuh"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __CUDACC__

struct Event {
    cudaEvent_t handle;
    int device;
    bool sleeps;                /* who waits for it leaves the core to others */
    unsigned begun, recordings; /* so far; while it is recorded, one more has begun */
    Stream *stream;             /* on which it was recorded last, held */
};

enum { SLOTS = 4096, SHARED_SLOT = SLOTS - 1, STORED_EVENTS = 64 };

/* It is taken by threads that hold Python's lock, and so it is never held across a call of CUDA:
 * such a call may wait for something that waits for Python. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Where kernels note bad indices. Slots are handed out one after the other, so that a slot is used
 * again as late as possible. */
struct Slots {
    IndexState *states; /* in device memory */
    BadIndex *noted;    /* in page-locked memory, which the device writes */
    bool taken[SLOTS];
    bool stale[SLOTS];              /* something may have been left there */
    unsigned long long told[SLOTS]; /* the last call whose bad index was told of */
    int next;
};

static struct {
    Stream *streams; /* all but the legacy default stream */
    Stream legacy;
    Slots slots;
    cudaEvent_t events[STORED_EVENTS];
    int event_count;
} devices[MAX_DEVICES];

/* A call that was captured has its number again whenever its graph runs. */
constexpr unsigned long long REPLAYED = 1ull << 63;
static unsigned long long calls;

static unsigned long long next_number(void)
{
    static unsigned long long last;
    return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}

Stream *legacy_stream(int device)
{
    Stream *stream = &devices[device].legacy;
    if (__atomic_load_n(&stream->references, __ATOMIC_ACQUIRE) > 0) return stream;
    pthread_mutex_lock(&lock);
    if (stream->references == 0) {
        stream->device = device;
        stream->number = next_number();
        stream->slot = -1;
        __atomic_store_n(&stream->references, 1, __ATOMIC_RELEASE); /* which nobody gives back */
    }
    pthread_mutex_unlock(&lock);
    return stream;
}

static Status new_stream(int device, cudaStream_t handle, Stream **stream)
{
    *stream = static_cast<Stream *>(calloc(1, sizeof **stream));
    if (*stream == NULL) return fail(STATUS_MEMORY_ERROR, "out of host memory for a stream");
    (*stream)->handle = handle;
    (*stream)->device = device;
    (*stream)->number = next_number();
    (*stream)->slot = -1;
    return STATUS_OK;
}

static void add_stream(Stream *stream)
{
    stream->next = devices[stream->device].streams;
    devices[stream->device].streams = stream;
}

Status stream_create(int device, bool nonblocking, int priority, Stream **stream)
{
    int previous;
    *stream = NULL;
    Status status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    cudaStream_t handle = NULL;
    const unsigned flags = nonblocking ? cudaStreamNonBlocking : cudaStreamDefault;
    status = cuda_allocation_status(cudaStreamCreateWithPriority(&handle, flags, priority),
                                    "cudaStreamCreateWithPriority");
    if (status == STATUS_OK) {
        status = new_stream(device, handle, stream);
        if (status != STATUS_OK) cuda_ignore(cudaStreamDestroy(handle));
    }
    if (status == STATUS_OK) {
        (*stream)->ours = true;
        pthread_mutex_lock(&lock);
        add_stream(stream_hold(*stream));
        pthread_mutex_unlock(&lock);
    }
    device_leave(device, previous);
    return status;
}

static bool is_capturing(cudaStream_t handle)
{
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(handle, &capture);
    cuda_ignore(code);
    return code == cudaSuccess && capture == cudaStreamCaptureStatusActive;
}

/* CUDA gives a thread's per-thread default streams back when the thread ends. Where work is left on
 * them, and memory has come from a pool, drivers (580.159 is one) hang in that for ever, and with
 * them whoever calls CUDA next. So a thread that ends waits for its own. With the main thread the
 * process ends, which leaves them to the driver. */
struct PerThreadStreams {
    uint64_t devices = 0; /* a bit for each on which this thread has used one */
    ~PerThreadStreams()
    {
        if (syscall(SYS_gettid) == getpid()) return;
        int previous;
        for (int device = 0; device < MAX_DEVICES; device++) {
            if (!(devices >> device & 1) || !device_try_enter(device, &previous)) continue;
            if (!is_capturing(cudaStreamPerThread)) (void)stream_drain(cudaStreamPerThread);
            device_leave(device, previous);
        }
    }
};
static_assert(MAX_DEVICES <= 64, "a bit for each device");
static thread_local PerThreadStreams per_thread_streams;

/* Work is queued by those who hold it, before they let go, and may be waited for before that. */
static void note_use(Stream *stream)
{
    __atomic_add_fetch(&stream->uses, 1, __ATOMIC_RELAXED);
    if (stream->handle == cudaStreamPerThread)
        per_thread_streams.devices |= uint64_t{1} << stream->device;
}

static Stream *find_stream(int device, cudaStream_t handle)
{
    Stream *stream = devices[device].streams;
    while (stream != NULL && stream->handle != handle) stream = stream->next;
    return stream;
}

Status stream_of_handle(int device, uintptr_t number, Owner owner, Stream **stream)
{
    const cudaStream_t handle = reinterpret_cast<cudaStream_t>(number);
    Status status = cuda_check_ordinal(device);
    if (status != STATUS_OK) {
        /* There will be no record to keep it. */
    } else if (handle == 0 || handle == cudaStreamLegacy) {
        *stream = stream_hold(legacy_stream(device));
    } else {
        pthread_mutex_lock(&lock);
        *stream = find_stream(device, handle);
        if (*stream == NULL) {
            status = new_stream(device, handle, stream);
            if (status == STATUS_OK) add_stream(*stream);
        }
        if (status == STATUS_OK) stream_hold(*stream);
        if (status == STATUS_OK && (*stream)->owner.release == NULL && !(*stream)->ours) {
            (*stream)->owner = owner;
            owner.release = NULL;
        }
        pthread_mutex_unlock(&lock);
    }
    if (owner.release != NULL) owner.release(owner.context);
    return status;
}

Status stream_find_device(uintptr_t number, int *device)
{
    const cudaStream_t handle = reinterpret_cast<cudaStream_t>(number);
    if (handle == 0 || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
        return STATUS_OK;
    Status status = runtime_check();
    if (status != STATUS_OK) return status;
    /* The question would spoil a capture. */
    cudaStreamCaptureStatus capture;
    CUDA_TRY(cudaStreamIsCapturing(handle, &capture));
    if (capture == cudaStreamCaptureStatusNone) CUDA_TRY(cudaStreamGetDevice(handle, device));
    return STATUS_OK;
}

Stream *stream_hold(Stream *stream)
{
    __atomic_add_fetch(&stream->references, 1, __ATOMIC_RELAXED);
    note_use(stream);
    return stream;
}

static void destroy_stream(Stream *stream)
{
    int previous;
    if (device_try_enter(stream->device, &previous)) {
        cuda_ignore(cudaStreamDestroy(stream->handle));
        device_leave(stream->device, previous);
    }
    if (stream->slot >= 0) slot_give(stream->device, stream->slot, true);
    free(stream);
}

/* False: the stream may have to be given back, which takes time, and is not wanted. */
static bool release(Stream *stream, bool at_once)
{
    if (runtime_is_leaving()) return true;
    /* While another reference is left, nobody else can bring the count to zero. */
    int references = __atomic_load_n(&stream->references, __ATOMIC_RELAXED);
    while (references > 1)
        if (__atomic_compare_exchange_n(&stream->references, &references, references - 1, true,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return true;

    Owner owner = {NULL, NULL};
    bool last = false, destroy = false;
    pthread_mutex_lock(&lock);
    const bool released = !at_once || !(stream->ours || memory_is_stored(stream));
    if (released && __atomic_sub_fetch(&stream->references, 1, __ATOMIC_ACQ_REL) == 0) {
        last = true;
        owner = stream->owner;
        stream->owner = {NULL, NULL};
        destroy = stream->ours;
        if (destroy) {
            Stream **link = &devices[stream->device].streams;
            while (*link != stream) link = &(*link)->next;
            *link = stream->next;
        }
    }
    pthread_mutex_unlock(&lock);
    /* What is stored for arrays to come has to go back while the handle is known to exist. */
    if (last) memory_flush(stream);
    if (destroy) destroy_stream(stream);
    if (owner.release != NULL) owner.release(owner.context);
    return released;
}

bool stream_try_release(Stream *stream)
{
    note_use(stream);
    return release(stream, true);
}

void stream_release(Stream *stream)
{
    note_use(stream);
    (void)release(stream, false);
}

Stream *next_held_stream(int device, Stream *before)
{
    pthread_mutex_lock(&lock);
    Stream *stream = before == NULL ? devices[device].streams : before->next;
    while (stream != NULL && __atomic_load_n(&stream->references, __ATOMIC_RELAXED) == 0)
        stream = stream->next;
    if (stream != NULL) __atomic_add_fetch(&stream->references, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    if (before != NULL) (void)release(before, false);
    return stream;
}

Stream *stream_that_lasts(Stream *stream)
{
    const bool lasts = stream->ours || stream->handle == 0 ||
                       stream->handle == cudaStreamPerThread || stream->owner.release != NULL;
    return lasts ? stream : legacy_stream(stream->device);
}

uintptr_t stream_handle(Stream *stream)
{
    __atomic_store_n(&stream->is_shared, true, __ATOMIC_RELAXED);
    const cudaStream_t handle = stream->handle == 0 ? cudaStreamLegacy : stream->handle;
    return reinterpret_cast<uintptr_t>(handle);
}

int stream_device(const Stream *stream)
{
    return stream->device;
}

bool stream_is_capturing(const Stream *stream)
{
    if (stream->handle == 0 || runtime_is_lost()) return false; /* it cannot be captured */
    return is_capturing(stream->handle);
}

bool device_is_capturing(int device)
{
    bool capturing = false;
    for_each_held_stream(
        device, [&](Stream *stream) { capturing = capturing || stream_is_capturing(stream); });
    return capturing;
}

bool device_await(int device)
{
    if (device_is_capturing(device)) return false;
    const cudaError_t code = cudaDeviceSynchronize();
    cuda_ignore(code);
    return code == cudaSuccess;
}

/* The legacy default stream of the device that is current waits for streams of other libraries, of
 * which nothing is known here, and cannot be asked where one of them is captured. */
static bool legacy_waits_for_captured(void)
{
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(cudaStreamLegacy, &capture);
    cuda_ignore(code);
    return code == cudaErrorStreamCaptureImplicit;
}

bool device_is_captured(int device)
{
    int previous;
    if (!device_try_enter(device, &previous)) return false;
    const bool captured = legacy_waits_for_captured() || device_is_capturing(device);
    device_leave(device, previous);
    return captured;
}

Status stream_drain(void *stream)
{
    return in_spite_of_captures([&] {
        return cuda_status(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)),
                           "cudaStreamSynchronize");
    });
}

static Status event_drain(cudaEvent_t event)
{
    return in_spite_of_captures(
        [&] { return cuda_status(cudaEventSynchronize(event), "cudaEventSynchronize"); });
}

/* Waits that may be given up. CUDA's own cannot be, and so an event is asked for over and over
 * instead, at first as fast as that answers: CUDA does the same. */

constexpr int64_t WATCH_MICROSECONDS = 25000; /* from one look of the watch to the next */
/* What a wait may be longer than it has to be: one part in so many. Asking all the time would keep
 * other threads from the driver's locks. */
constexpr int64_t SHARE = 128;
/* The system wakes nobody sooner, and for less the core is kept busy, as CUDA does. */
constexpr int64_t LEAST_SLEEP_MICROSECONDS = 100;
constexpr int64_t MOST_SLEEP_MICROSECONDS = 1000;

enum Answer { DONE, NOT_YET, NO_ANSWER };

/* Errors are for the call that waits after this: it meets them again, or they have passed. */
static Answer answer_of(cudaError_t code)
{
    cuda_ignore(code);
    return code == cudaSuccess ? DONE : code == cudaErrorNotReady ? NOT_YET : NO_ANSWER;
}

/* It is not captured, which the question would spoil. */
static Answer ask_stream(const Stream *stream)
{
    return in_spite_of_captures([&] { return answer_of(cudaStreamQuery(stream->handle)); });
}

bool event_is_over(cudaEvent_t event)
{
    return in_spite_of_captures([&] { return answer_of(cudaEventQuery(event)); }) == DONE;
}

static void pause_in_wait(int64_t waited, bool sleeps)
{
    int64_t time = waited / SHARE;
    if (time > MOST_SLEEP_MICROSECONDS) time = MOST_SLEEP_MICROSECONDS;
    if (sleeps && time < LEAST_SLEEP_MICROSECONDS) time = LEAST_SLEEP_MICROSECONDS;
    if (time >= LEAST_SLEEP_MICROSECONDS) {
        const struct timespec pause = {0, time * 1000};
        (void)nanosleep(&pause, NULL);
    } else if (time > 0) {
        const int64_t end = microseconds() + time;
        while (microseconds() < end) continue;
    }
}

/* Asks until there is another answer than NOT_YET, or it is time to look for signals again. */
template <class Ask>
static Answer ask_for_a_while(int64_t begin, bool sleeps, const Ask &ask)
{
    const int64_t end = microseconds() + WATCH_MICROSECONDS;
    Answer answer = ask();
    for (int64_t now = 0; answer == NOT_YET && now < end; answer = ask()) {
        now = microseconds();
        pause_in_wait(now - begin, sleeps);
    }
    return answer;
}

/* The same for as long as it takes, on the device that is current. *done: the answer was DONE; if
 * not, CUDA's own wait is to follow. */
template <class Ask>
static Status ask_until_done(Watch *watch, int device, bool sleeps, bool *done, const Ask &ask)
{
    *done = false;
    if (watch == NULL) return STATUS_OK;
    const int64_t begin = microseconds();
    Answer answer;
    while ((answer = in_spite_of_captures([&] { return ask_for_a_while(begin, sleeps, ask); })) ==
           NOT_YET) {
        const Status status = runtime_is_leaving() ? STATUS_OK : ask_watch(watch, device, 0, 0);
        if (status != STATUS_OK) return status;
    }
    *done = answer == DONE;
    return STATUS_OK;
}

Status event_await(cudaEvent_t event, int device, Watch *watch)
{
    bool done;
    const Status status = ask_until_done(watch, device, false, &done,
                                         [&] { return answer_of(cudaEventQuery(event)); });
    return status == STATUS_OK && !done ? event_drain(event) : status;
}

/* NULL where there is none. */
static cudaEvent_t take_stored(int device)
{
    cudaEvent_t event = NULL;
    pthread_mutex_lock(&lock);
    if (devices[device].event_count > 0)
        event = devices[device].events[--devices[device].event_count];
    pthread_mutex_unlock(&lock);
    return event;
}

/* The last failure stays what it is. */
cudaEvent_t event_at_end(const Stream *stream)
{
    cudaEvent_t event = take_stored(stream->device);
    cudaError_t code = cudaSuccess;
    if (event == NULL) code = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cuda_ignore(code);
    if (code != cudaSuccess) return NULL;
    code = cudaEventRecord(event, stream->handle);
    cuda_ignore(code);
    if (code == cudaSuccess) return event;
    event_give(stream->device, event);
    return NULL;
}

/* A stream is asked but once: an event comes to its end though others queue more for ever, and
 * where the stream is the legacy default one, CUDA would look at all streams each time. */
static Status await_end(const Stream *stream, Watch *watch, bool *done)
{
    *done = false;
    const cudaEvent_t end = event_at_end(stream);
    if (end == NULL) return STATUS_OK;
    Status status = ask_until_done(watch, stream->device, false, done,
                                   [&] { return answer_of(cudaEventQuery(end)); });
    if (!runtime_is_forked()) event_give(stream->device, end);
    return status;
}

Status stream_await(Stream *stream, Watch *watch)
{
    bool done = false;
    Status status = STATUS_OK;
    note_use(stream);
    if (watch != NULL && !stream_is_capturing(stream)) {
        const Answer answer = ask_stream(stream);
        done = answer == DONE;
        if (answer == NOT_YET) status = await_end(stream, watch, &done);
    }
    return status == STATUS_OK && !done ? stream_drain(stream->handle) : status;
}

/* Calls function on a device, which is current meanwhile. */
template <class Function>
static Status on_device(int device, const Function &function)
{
    int previous;
    Status status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    status = function();
    device_leave(device, previous);
    return status;
}

Status refuse_capture(const char *what)
{
    return fail(
        STATUS_VALUE_ERROR,
        "%s is for work that runs, and the stream is being captured into a graph, where nothing "
        "is done yet: call it after the capture",
        what);
}

Status stream_synchronize(Stream *stream, Watch *watch)
{
    Status status = on_device(stream->device, [&] {
        if (stream_is_capturing(stream)) return refuse_capture("synchronize");
        Status drained = stream_await(stream, watch);
        return drained == STATUS_OK ? slot_check(stream, stream->slot, true) : drained;
    });
    memory_settle();
    return status;
}

static Status is_done(cudaError_t code, const char *call, bool *done)
{
    *done = code == cudaSuccess;
    if (code != cudaErrorNotReady) return cuda_status(code, call);
    (void)cudaGetLastError();
    return STATUS_OK;
}

Status stream_query(Stream *stream, bool *done)
{
    return on_device(stream->device, [&] {
        /* The question alone would spoil the capture. */
        if (stream_is_capturing(stream)) return refuse_capture("query");
        return in_spite_of_captures(
            [&] { return is_done(cudaStreamQuery(stream->handle), "cudaStreamQuery", done); });
    });
}

/* NULL: no call has needed it yet. */
static const BadIndex *noted_on(int device)
{
    return __atomic_load_n(&devices[device].slots.noted, __ATOMIC_ACQUIRE);
}

/* What is noted there is of a call that its caller has heard of. */
static bool is_stale(int device, int slot)
{
    return __atomic_load_n(&devices[device].slots.stale[slot], __ATOMIC_ACQUIRE);
}

/* The number of the call that noted a bad index there; 0: nobody did, or who did has told. */
static unsigned long long noted_in(int device, int slot)
{
    const BadIndex *noted = noted_on(device);
    if (slot < 0 || noted == NULL || is_stale(device, slot)) return 0;
    return __atomic_load_n(&noted[slot].call, __ATOMIC_ACQUIRE);
}

/* A call that has been told of may still be at work, and find a bad index before that one. */
static bool is_told(int device, int slot, unsigned long long call)
{
    return call == __atomic_load_n(&devices[device].slots.told[slot], __ATOMIC_RELAXED) &&
           !(call & REPLAYED);
}

/* The number of the call that noted a bad index on a stream; the greatest number if none did. */
static unsigned long long noted_call(const Stream *stream)
{
    const int slot = __atomic_load_n(&stream->slot, __ATOMIC_RELAXED);
    const unsigned long long call = noted_in(stream->device, slot);
    return call == 0 || is_told(stream->device, slot, call) ? ~0ull : call;
}

/* A stream that only we know, and that nobody has used since all on it was done. Those of pipelines
 * are held by nobody, but what is queued there is done in moments. */
static bool is_known_idle(const Stream *stream, unsigned uses)
{
    return stream->ours && !__atomic_load_n(&stream->is_shared, __ATOMIC_RELAXED) &&
           uses == __atomic_load_n(&stream->idle, __ATOMIC_RELAXED);
}

/* A device cannot be asked: its streams are, as far as they are known and not idle. None is
 * captured at first, but one may be while others are waited for, and is left alone then. */
static Status await_streams(int device, Watch *watch, bool *waited)
{
    *waited = false;
    if (watch == NULL) return STATUS_OK;
    Status status = STATUS_OK;
    const auto await = [&](Stream *stream) {
        const unsigned uses = __atomic_load_n(&stream->uses, __ATOMIC_RELAXED);
        if (status != STATUS_OK || is_known_idle(stream, uses)) return;
        if (*waited && stream_is_capturing(stream)) return;
        const Answer answer = ask_stream(stream);
        bool done = answer == DONE;
        if (answer == NOT_YET) {
            *waited = true;
            status = await_end(stream, watch, &done);
        }
        if (done) __atomic_store_n(&stream->idle, uses, __ATOMIC_RELAXED);
    };
    await(legacy_stream(device));
    for_each_held_stream(device, await);
    return status;
}

Status device_synchronize(int device, Watch *watch)
{
    Status status = on_device(device, [&]() -> Status {
        if (device_is_captured(device)) return refuse_capture("synchronize");
        bool waited;
        Status awaited = await_streams(device, watch, &waited);
        if (awaited != STATUS_OK) return awaited;
        if (waited && device_is_captured(device)) return refuse_capture("synchronize");
        CUDA_TRY(cudaDeviceSynchronize());
        /* The first of all is told of now, and the others at the next times. */
        Stream *first = legacy_stream(device);
        pthread_mutex_lock(&lock);
        for (Stream *stream = devices[device].streams; stream != NULL; stream = stream->next)
            if (noted_call(stream) < noted_call(first)) first = stream;
        /* A record that nobody holds stays, but its handle may be gone: slot_check has to know. */
        const bool is_held = __atomic_load_n(&first->references, __ATOMIC_RELAXED) > 0;
        if (is_held) stream_hold(first);
        pthread_mutex_unlock(&lock);
        Status found = slot_check(first, first->slot, true);
        if (is_held) stream_release(first);
        return found;
    });
    memory_settle();
    return status;
}

/* Events. */

Status event_take(int device, cudaEvent_t *event)
{
    *event = take_stored(device);
    if (*event == NULL) CUDA_TRY(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    return STATUS_OK;
}

void event_give(int device, cudaEvent_t event)
{
    pthread_mutex_lock(&lock);
    const bool stored = devices[device].event_count < STORED_EVENTS;
    if (stored) devices[device].events[devices[device].event_count++] = event;
    pthread_mutex_unlock(&lock);
    if (!stored) cuda_ignore(cudaEventDestroy(event));
}

void event_flush(int device)
{
    cudaEvent_t events[STORED_EVENTS];
    pthread_mutex_lock(&lock);
    const int count = devices[device].event_count;
    memcpy(events, devices[device].events, count * sizeof *events);
    devices[device].event_count = 0;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < count; i++) cuda_ignore(cudaEventDestroy(events[i]));
}

/* CUDA would give the whole capture up. */
static Status check_captures(const Stream *waiting, const Stream *awaited)
{
    if (!stream_is_capturing(waiting) || stream_is_capturing(awaited)) return STATUS_OK;
    return fail(STATUS_VALUE_ERROR,
                "the stream is being captured into a graph, which cannot wait for work that is not "
                "part of it: wait before the capture");
}

static Status wait_by_event(Stream *waiting, Stream *awaited)
{
    cudaEvent_t event = NULL;
    Status status = on_device(awaited->device, [&] {
        Status taken = event_take(awaited->device, &event);
        if (taken != STATUS_OK) return taken;
        return cuda_status(cudaEventRecord(event, home_handle(awaited)), "cudaEventRecord");
    });
    if (status == STATUS_OK)
        status = on_device(waiting->device, [&] {
            return cuda_status(cudaStreamWaitEvent(waiting->handle, event, 0),
                               "cudaStreamWaitEvent");
        });
    note_use(waiting);
    if (event != NULL) event_give(awaited->device, event);
    return status;
}

Status stream_wait(Stream *waiting, Stream *awaited)
{
    if (in_same_order(waiting, awaited) ||
        stream_is_capturing(waiting) != stream_is_capturing(awaited))
        return STATUS_OK;
    return wait_by_event(waiting, awaited);
}

Status stream_wait_as_told(Stream *waiting, Stream *awaited)
{
    if (in_same_order(waiting, awaited)) return STATUS_OK;
    Status status = runtime_check();
    if (status == STATUS_OK) status = check_captures(waiting, awaited);
    return status == STATUS_OK ? wait_by_event(waiting, awaited) : status;
}

Status event_create(int device, bool timing, bool blocking_sync, Event **event)
{
    *event = static_cast<Event *>(calloc(1, sizeof **event));
    if (*event == NULL) return fail(STATUS_MEMORY_ERROR, "out of host memory for an event");
    (*event)->device = device;
    (*event)->sleeps = blocking_sync;
    const unsigned flags = (timing ? cudaEventDefault : cudaEventDisableTiming) |
                           (blocking_sync ? cudaEventBlockingSync : 0);
    Status status = on_device(device, [&] {
        return cuda_allocation_status(cudaEventCreateWithFlags(&(*event)->handle, flags),
                                      "cudaEventCreateWithFlags");
    });
    if (status != STATUS_OK) {
        free(*event);
        *event = NULL;
    }
    return status;
}

void event_destroy(Event *event)
{
    int previous;
    if (!runtime_is_leaving() && device_try_enter(event->device, &previous)) {
        cuda_ignore(cudaEventDestroy(event->handle));
        device_leave(event->device, previous);
    }
    if (event->stream != NULL) stream_release(event->stream);
    free(event);
}

Status event_record(Event *event, Stream *stream)
{
    if (stream->device != event->device)
        return fail(STATUS_VALUE_ERROR,
                    "the event belongs to cuda:%d and the stream to cuda:%d: make an event for "
                    "that device with Event(device=%d)",
                    event->device, stream->device, stream->device);
    __atomic_add_fetch(&event->begun, 1, __ATOMIC_SEQ_CST);
    Status status = on_device(event->device, [&] {
        return cuda_status(cudaEventRecord(event->handle, stream->handle), "cudaEventRecord");
    });
    pthread_mutex_lock(&lock);
    Stream *before = status == STATUS_OK ? event->stream : NULL;
    if (status == STATUS_OK) event->stream = stream_hold(stream);
    __atomic_add_fetch(&event->recordings, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&lock);
    if (before != NULL) stream_release(before);
    return status;
}

int event_device(const Event *event)
{
    return event->device;
}

Stream *event_stream(Event *event)
{
    pthread_mutex_lock(&lock);
    Stream *stream = event->stream == NULL ? NULL : stream_hold(event->stream);
    pthread_mutex_unlock(&lock);
    return stream;
}

Status event_query(Event *event, bool *done)
{
    return on_device(event->device, [&] {
        return in_spite_of_captures(
            [&] { return is_done(cudaEventQuery(event->handle), "cudaEventQuery", done); });
    });
}

/* Whether it was not recorded anew since then, nor is so now. */
static bool is_recording(const Event *event, unsigned number)
{
    return __atomic_load_n(&event->begun, __ATOMIC_SEQ_CST) == number;
}

/* What is waited for is what was recorded when the wait began. Once others record the event anew,
 * it tells nothing of that, but the stream does: it may have more to do, but not less. */
static Status await_recording(Event *event, unsigned number, Stream *stream, Watch *watch)
{
    bool done, holds = true;
    Status status = ask_until_done(watch, event->device, event->sleeps, &done, [&] {
        const Answer answer = answer_of(cudaEventQuery(event->handle));
        holds = is_recording(event, number);
        return holds ? answer : NO_ANSWER;
    });
    if (status == STATUS_OK && !holds)
        return stream_is_capturing(stream) ? refuse_capture("synchronize")
                                           : stream_await(stream, watch);
    return status == STATUS_OK && !done ? event_drain(event->handle) : status;
}

Status event_synchronize(Event *event, Watch *watch)
{
    return on_device(event->device, [&]() -> Status {
        pthread_mutex_lock(&lock);
        const unsigned number = __atomic_load_n(&event->recordings, __ATOMIC_SEQ_CST);
        Stream *stream = event->stream == NULL ? NULL : stream_hold(event->stream);
        pthread_mutex_unlock(&lock);
        if (stream == NULL) return STATUS_OK; /* it was never recorded */
        Status status = await_recording(event, number, stream, watch);
        if (runtime_is_forked()) return status;
        if (status == STATUS_OK) status = slot_check(stream, stream->slot, true);
        stream_release(stream);
        return status;
    });
}

Status event_elapsed(Event *start, Event *end, float *milliseconds)
{
    return on_device(start->device, [&]() -> Status {
        cudaError_t code = cudaEventElapsedTime(milliseconds, start->handle, end->handle);
        if (code != cudaErrorNotReady && code != cudaErrorInvalidResourceHandle)
            return cuda_status(code, "cudaEventElapsedTime");
        (void)cudaGetLastError();
        return fail(STATUS_VALUE_ERROR,
                    code == cudaErrorNotReady
                        ? "the events have not both been reached yet: call synchronize() on the "
                          "later one first"
                        : "both events must have been made with timing=True, for the same device, "
                          "and recorded");
    });
}

Status event_wait(Event *event, Stream *waiting)
{
    Status status = runtime_check();
    if (status != STATUS_OK) return status;
    Stream *awaited = event_stream(event);
    if (awaited == NULL) return STATUS_OK; /* it was never recorded */
    status = check_captures(waiting, awaited);
    stream_release(awaited);
    if (status != STATUS_OK) return status;
    status = on_device(waiting->device, [&] {
        return cuda_status(cudaStreamWaitEvent(waiting->handle, event->handle, 0),
                           "cudaStreamWaitEvent");
    });
    note_use(waiting);
    return status;
}

/* Bad indices. */

/* At once, and as no part of a capture. */
static Status clear_now(void *states, size_t bytes)
{
    cudaStream_t stream = NULL;
    CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Status status = cuda_status(cudaMemsetAsync(states, 0, bytes, stream), "cudaMemsetAsync");
    if (status == STATUS_OK) status = stream_drain(stream);
    cuda_ignore(cudaStreamDestroy(stream));
    return status;
}

/* Clear memory for the states, and page-locked memory. */
static Status allocate_slots(void **states, void **noted)
{
    const size_t bytes = SLOTS * sizeof(IndexState);
    Status status = cuda_allocation_status(
        cudaHostAlloc(noted, SLOTS * sizeof(BadIndex), cudaHostAllocMapped), "cudaHostAlloc");
    if (status != STATUS_OK) return status;
    memset(*noted, 0, SLOTS * sizeof(BadIndex));
    status = cuda_allocation_status(cudaMalloc(states, bytes), "cudaMalloc");
    return status == STATUS_OK ? clear_now(*states, bytes) : status;
}

/* In the middle of a capture too. */
static Status try_to_make_slots(Slots *slots)
{
    void *states = NULL, *noted = NULL;
    Status status = STATUS_OK;
    in_spite_of_captures([&] {
        status = allocate_slots(&states, &noted);
        if (status == STATUS_OK) {
            __atomic_store_n(&slots->noted, static_cast<BadIndex *>(noted), __ATOMIC_RELEASE);
            __atomic_store_n(&slots->states, static_cast<IndexState *>(states), __ATOMIC_RELEASE);
        } else {
            if (states != NULL) cuda_ignore(cudaFree(states));
            if (noted != NULL) cuda_ignore(cudaFreeHost(noted));
        }
    });
    return status;
}

static Status make_slots(int device)
{
    Slots *slots = &devices[device].slots;
    Status status = try_to_make_slots(slots);
    if (status != STATUS_MEMORY_ERROR) return status;
    status = memory_trim(device);
    return status == STATUS_OK ? try_to_make_slots(slots) : status;
}

/* In the order of a stream, but where that is captured: its graph may never run. */
static Status clear_slot(int device, int slot, cudaStream_t handle, bool is_captured)
{
    IndexState *state = devices[device].slots.states + slot;
    if (is_captured) return in_spite_of_captures([&] { return clear_now(state, sizeof *state); });
    return cuda_status(cudaMemsetAsync(state, 0, sizeof *state, handle), "cudaMemsetAsync");
}

/* With the lock. Where all are taken, which takes thousands of streams at once, the last is shared:
 * its error may then be raised on another stream than its own, and by who comes later, and of two
 * at a time one is lost. */
static int find_slot(int device)
{
    Slots &slots = devices[device].slots;
    for (int tried = 0; tried < SHARED_SLOT; tried++) {
        const int slot = slots.next;
        slots.next = (slots.next + 1) % SHARED_SLOT;
        if (slots.taken[slot]) continue;
        slots.taken[slot] = true;
        return slot;
    }
    return SHARED_SLOT;
}

int slot_take(int device)
{
    pthread_mutex_lock(&lock);
    const int slot = find_slot(device);
    pthread_mutex_unlock(&lock);
    return slot;
}

void slot_give(int device, int slot, bool stale)
{
    pthread_mutex_lock(&lock);
    if (stale && slot != SHARED_SLOT)
        __atomic_store_n(&devices[device].slots.stale[slot], true, __ATOMIC_RELAXED);
    devices[device].slots.taken[slot] = false;
    pthread_mutex_unlock(&lock);
}

Status slot_of(Stream *stream, int *slot)
{
    *slot = __atomic_load_n(&stream->slot, __ATOMIC_RELAXED);
    if (*slot >= 0) return STATUS_OK;
    pthread_mutex_lock(&lock);
    if (stream->slot < 0)
        __atomic_store_n(&stream->slot, find_slot(stream->device), __ATOMIC_RELAXED);
    *slot = stream->slot;
    pthread_mutex_unlock(&lock);
    return STATUS_OK;
}

/* By one of the threads whose calls are the first on a stream. */
static Status freshen(const Stream *stream, int slot, bool is_captured)
{
    static pthread_mutex_t clearing = PTHREAD_MUTEX_INITIALIZER;
    Slots &slots = devices[stream->device].slots;
    Status status = STATUS_OK;
    pthread_mutex_lock(&clearing);
    if (is_stale(stream->device, slot)) {
        slots.noted[slot].call = 0;
        status = clear_slot(stream->device, slot, stream->handle, is_captured);
        if (status == STATUS_OK) __atomic_store_n(&slots.stale[slot], false, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&clearing);
    return status;
}

Status report_open(const Stream *stream, int slot, const char *op, int axis, int64_t axis_size,
                   IndexReport *report)
{
    Slots &slots = devices[stream->device].slots;
    if (__atomic_load_n(&slots.states, __ATOMIC_ACQUIRE) == NULL) {
        static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
        pthread_mutex_lock(&making);
        Status status = slots.states == NULL ? make_slots(stream->device) : STATUS_OK;
        pthread_mutex_unlock(&making);
        if (status != STATUS_OK) return status;
    }
    const bool is_captured = stream_is_capturing(stream);
    if (is_stale(stream->device, slot)) {
        Status status = freshen(stream, slot, is_captured);
        if (status != STATUS_OK) return status;
    }
    report->state = slots.states + slot;
    report->noted = slots.noted + slot;
    report->call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (is_captured) report->call |= REPLAYED;
    report->axis_size = axis_size;
    report->op = op;
    report->axis = axis;
    return STATUS_OK;
}

static Status fail_by(const BadIndex *noted, bool late)
{
    char index[24], when[160] = "";
    const unsigned long long value = noted->index;
    if (noted->is_signed)
        snprintf(index, sizeof index, "%lld", static_cast<long long>(value));
    else
        snprintf(index, sizeof index, "%llu", value);
    if (late)
        snprintf(when, sizeof when,
                 " (found by an earlier %s on this stream; GPUOPS_LAUNCH_BLOCKING=1 raises at the "
                 "call)",
                 noted->op);
    return fail(STATUS_INDEX_ERROR, "index %s is out of bounds for axis %d with size %lld%s", index,
                noted->axis, noted->axis_size, when);
}

static Status tell(const Stream *stream, int slot, bool late)
{
    Slots &slots = devices[stream->device].slots;
    BadIndex *noted = slots.noted + slot;
    unsigned long long call = __atomic_load_n(&noted->call, __ATOMIC_ACQUIRE);
    if (call == 0) return STATUS_OK;
    Status found = STATUS_OK;
    if (!is_told(stream->device, slot, call)) found = fail_by(noted, late);
    const Failure failure = *last_failure();
    __atomic_store_n(&slots.told[slot], call, __ATOMIC_RELAXED);
    /* The note of a later call stays. */
    (void)__atomic_compare_exchange_n(&noted->call, &call, 0ull, false, __ATOMIC_RELEASE,
                                      __ATOMIC_RELAXED);
    /* The next call on this stream comes after it is clear. Of another library's stream that nobody
     * holds any more, the handle may be gone, and all work done. */
    const bool is_there = __atomic_load_n(&stream->references, __ATOMIC_RELAXED) > 0;
    const Status cleared = clear_slot(stream->device, slot, is_there ? stream->handle : 0,
                                      is_there && stream_is_capturing(stream));
    if (cleared != STATUS_OK) __atomic_store_n(&slots.stale[slot], true, __ATOMIC_RELAXED);
    return found == STATUS_OK ? found : fail_cuda(found, 0, "", failure.text);
}

Status slot_check(const Stream *stream, int slot, bool late)
{
    /* One of several threads that wait at once is told, and the next call's index is not lost. */
    static pthread_mutex_t telling = PTHREAD_MUTEX_INITIALIZER;
    if (noted_in(stream->device, slot) == 0) return STATUS_OK;
    pthread_mutex_lock(&telling);
    Status status = tell(stream, slot, late);
    pthread_mutex_unlock(&telling);
    return status;
}

bool launches_block(void)
{
    static const bool blocking = [] {
        const char *text = getenv("GPUOPS_LAUNCH_BLOCKING");
        return text != NULL && strcmp(text, "1") == 0;
    }();
    return blocking;
}

#else /* a build without CUDA */

bool device_is_captured(int)
{
    return false;
}

static Status none(void)
{
    int count;
    return cuda_device_count(&count);
}

Status stream_create(int, bool, int, Stream **)
{
    return none();
}

Status stream_of_handle(int, uintptr_t, Owner owner, Stream **)
{
    if (owner.release != NULL) owner.release(owner.context);
    return none();
}

Status stream_find_device(uintptr_t, int *)
{
    return none();
}

/* Without CUDA there is no stream or event that these could be called with. */
Stream *stream_hold(Stream *stream)
{
    return stream;
}

bool stream_try_release(Stream *)
{
    return true;
}

void stream_release(Stream *) {}

Stream *stream_that_lasts(Stream *stream)
{
    return stream;
}

uintptr_t stream_handle(Stream *)
{
    return 0;
}

int stream_device(const Stream *)
{
    return DEVICE_CPU;
}

Status stream_synchronize(Stream *, Watch *)
{
    return none();
}

Status stream_query(Stream *, bool *)
{
    return none();
}

Status stream_wait(Stream *, Stream *)
{
    return none();
}

Status stream_wait_as_told(Stream *, Stream *)
{
    return none();
}

Status device_synchronize(int, Watch *)
{
    return none();
}

Status event_create(int, bool, bool, Event **)
{
    return none();
}

void event_destroy(Event *) {}

Status event_record(Event *, Stream *)
{
    return none();
}

Status event_query(Event *, bool *)
{
    return none();
}

Status event_synchronize(Event *, Watch *)
{
    return none();
}

Status event_elapsed(Event *, Event *, float *)
{
    return none();
}

Status event_wait(Event *, Stream *)
{
    return none();
}

int event_device(const Event *)
{
    return DEVICE_CPU;
}

Stream *event_stream(Event *)
{
    return NULL;
}

#endif
