/* Device memory: a stream-ordered pool for each device, below a small store for each stream.
 *
 * Freed memory goes to the store of its home stream, from which the next array of that stream is
 * taken without a CUDA call; what the store has no room for goes back to the pool, which keeps it
 * too, since mapping memory afresh costs far more than the work done with it. Where memory is used
 * on other streams than its own, an event marks the end of each use, and the memory is not free
 * before it. */
#include "common.cuh"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __CUDACC__

/* The end of what a stream has been given to do with some memory. The stream itself may be gone. */
struct Use {
    unsigned long long stream; /* its number */
    int device;
    cudaEvent_t event;
};

struct Memory {
    char *data;
    int64_t bytes;
    Stream *stream; /* held, but not by memory that is stored */
    int references;
    bool foreign;  /* adopted from an owner */
    bool captured; /* allocated by a graph */
    bool unmarked; /* CUDA refused to mark the end of a use, on the device of that number */
    int unmarked_device;
    Owner owner;
    Use *uses;
    int use_count, use_room;
    Memory *next; /* in a store or in the waiting list */
};

constexpr int64_t LEAST_STORED_BYTES = 512; /* the unit of the pool */
constexpr int MOST_STORED = 16;             /* of one size class of a stream */

/* With Python's lock it is only tried. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
    cudaMemPool_t pool;
    int64_t used, stored, peak;
    int64_t limit; /* 0: none, else one more than the bytes */
    /* What could be used in all, without a limit, when the driver was asked last; 0: it was not. */
    int64_t reach, asked_at;
} devices[MAX_DEVICES];

/* Nobody holds these any more, but work that uses them may not be over. The oldest comes first. */
static struct {
    Memory *first, *last;
    int count;
} waiting;

static cudaMemPool_t pool_of(int device)
{
    return __atomic_load_n(&devices[device].pool, __ATOMIC_ACQUIRE);
}

bool captures_ignore(int *mode)
{
    cudaStreamCaptureMode exchanged = cudaStreamCaptureModeRelaxed;
    const cudaError_t code = cudaThreadExchangeStreamCaptureMode(&exchanged);
    cuda_ignore(code);
    *mode = exchanged;
    return code == cudaSuccess;
}

void captures_heed(int mode)
{
    cudaStreamCaptureMode exchanged = static_cast<cudaStreamCaptureMode>(mode);
    cuda_ignore(cudaThreadExchangeStreamCaptureMode(&exchanged));
}

/* Some virtual GPUs can have no pool; they get plain allocations. */
static Status make_pool(int device)
{
    int supported = 0;
    CUDA_TRY(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device));
    if (!supported) return STATUS_OK;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;

    pthread_mutex_lock(&lock);
    Status status = STATUS_OK;
    if (pool_of(device) == NULL) {
        cudaMemPool_t pool;
        status = cuda_allocation_status(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
        if (status == STATUS_OK) {
            uint64_t all = UINT64_MAX;
            status =
                cuda_status(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all),
                            "cudaMemPoolSetAttribute");
            __atomic_store_n(&devices[device].pool, pool, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static Status allocate(int64_t bytes, cudaMemPool_t pool, cudaStream_t stream, void **memory)
{
    if (pool == NULL)
        return cuda_allocation_status(cudaMalloc(memory, (size_t)bytes), "cudaMalloc");
    return cuda_allocation_status(cudaMallocFromPoolAsync(memory, (size_t)bytes, pool, stream),
                                  "cudaMallocFromPoolAsync");
}

static Status fail_allocation(int device, int64_t bytes)
{
    int64_t available = 0;
    Status status = device_memory_available(device, &available);
    if (status != STATUS_OK) return status;
    char text[256], limit[64] = "";
    if (devices[device].limit > 0)
        snprintf(limit, sizeof limit, ", within a limit of %lld",
                 (long long)devices[device].limit - 1);
    snprintf(text, sizeof text,
             "out of memory on cuda:%d: %lld bytes were asked for, %lld are free on the device, "
             "and arrays use %lld%s",
             device, (long long)bytes, (long long)available, (long long)devices[device].used,
             limit);
    return fail_cuda(STATUS_MEMORY_ERROR, cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation",
                     text);
}

/* What is stored, and what the pool keeps, may be in pieces. */
Status memory_trim(int device)
{
    const cudaMemPool_t pool = pool_of(device);
    memory_flush_device(device);
    if (pool == NULL || device_is_capturing(device)) return STATUS_OK;
    CUDA_TRY(cudaDeviceSynchronize());
    CUDA_TRY(cudaMemPoolTrimTo(pool, 0));
    return STATUS_OK;
}

Status device_allocate(int device, int64_t bytes, cudaStream_t stream, void **memory)
{
    *memory = NULL;
    Status status = pool_of(device) == NULL ? make_pool(device) : STATUS_OK;
    if (status != STATUS_OK) return status;
    const cudaMemPool_t pool = pool_of(device);
    in_spite_of_captures([&] { status = allocate(bytes, pool, stream, memory); });
    if (status != STATUS_MEMORY_ERROR) return status;
    status = memory_trim(device);
    if (status == STATUS_OK) status = allocate(bytes, pool, stream, memory);
    return status == STATUS_MEMORY_ERROR ? fail_allocation(device, bytes) : status;
}

void device_free(int device, void *memory, cudaStream_t stream)
{
    if (memory == NULL) return;
    in_spite_of_captures([&] {
        cuda_ignore(pool_of(device) == NULL ? cudaFree(memory) : cudaFreeAsync(memory, stream));
    });
}

Status device_memory_available(int device, int64_t *bytes)
{
    memory_flush_device(device);
    if (pool_of(device) != NULL) CUDA_TRY(cudaMemPoolTrimTo(pool_of(device), 0));
    size_t available, total;
    CUDA_TRY(cudaMemGetInfo(&available, &total));
    *bytes = (int64_t)available;
    return STATUS_OK;
}

/* With the lock: what of so many bytes the limit leaves. */
static int64_t within_limit(int device, int64_t bytes)
{
    const int64_t limit = devices[device].limit;
    return limit > 0 ? smaller(bytes, limit - 1 - devices[device].used) : bytes;
}

/* What could be used beside what is in use, without a limit. What is stored is given back when it
 * has to be. */
static Status ask_for_room(int device, int64_t *bytes)
{
    size_t available, total;
    uint64_t reserved = 0, used = 0;
    const cudaMemPool_t pool = pool_of(device);
    CUDA_TRY(cudaMemGetInfo(&available, &total));
    if (pool != NULL) {
        CUDA_TRY(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved));
        CUDA_TRY(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    }
    pthread_mutex_lock(&lock);
    *bytes = (int64_t)(available + reserved - used) + devices[device].stored;
    pthread_mutex_unlock(&lock);
    return STATUS_OK;
}

Status device_memory_room(int device, int64_t *bytes)
{
    int64_t room;
    Status status = ask_for_room(device, &room);
    if (status != STATUS_OK) return status;
    pthread_mutex_lock(&lock);
    room = within_limit(device, room);
    pthread_mutex_unlock(&lock);
    *bytes = room > 0 ? room : 0;
    return STATUS_OK;
}

/* The store. */

static int size_class(int64_t bytes)
{
    int found = 0;
    while (found < FREE_LISTS && LEAST_STORED_BYTES << found < bytes) found++;
    return found; /* FREE_LISTS: too large to be stored */
}

static Memory *take_stored(Stream *stream, int64_t bytes)
{
    const int own_class = size_class(bytes);
    for (int list = own_class; list < FREE_LISTS && list <= own_class + 1; list++) {
        Memory **link = &stream->free_memory[list];
        while (*link != NULL && (*link)->bytes < bytes) link = &(*link)->next;
        Memory *found = *link;
        if (found == NULL) continue;
        *link = found->next;
        stream->free_counts[list]--;
        __atomic_sub_fetch(&stream->stored_count, 1, __ATOMIC_RELAXED);
        devices[stream->device].stored -= found->bytes;
        return found;
    }
    return NULL;
}

static bool store(Memory *memory)
{
    Stream *stream = memory->stream;
    const int list = size_class(memory->bytes);
    if (list == FREE_LISTS || stream->free_counts[list] == MOST_STORED) return false;
    memory->next = stream->free_memory[list];
    stream->free_memory[list] = memory;
    stream->free_counts[list]++;
    __atomic_add_fetch(&stream->stored_count, 1, __ATOMIC_RELAXED);
    devices[stream->device].stored += memory->bytes;
    return true;
}

bool memory_is_stored(const Stream *stream)
{
    return __atomic_load_n(&stream->stored_count, __ATOMIC_RELAXED) > 0;
}

/* Takes everything out of a stream's store, as a list. */
static Memory *empty_store(Stream *stream)
{
    Memory *found = NULL;
    pthread_mutex_lock(&lock);
    for (int list = 0; list < FREE_LISTS; list++) {
        while (stream->free_memory[list] != NULL) {
            Memory *memory = stream->free_memory[list];
            stream->free_memory[list] = memory->next;
            devices[stream->device].stored -= memory->bytes;
            memory->next = found;
            found = memory;
        }
        stream->free_counts[list] = 0;
    }
    __atomic_store_n(&stream->stored_count, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    return found;
}

static void free_list(const Stream *stream, Memory *list, bool is_current)
{
    while (list != NULL) {
        Memory *memory = list;
        list = memory->next;
        if (is_current) device_free(stream->device, memory->data, home_handle(stream));
        free(memory);
    }
}

void memory_flush(Stream *stream)
{
    if (!memory_is_stored(stream)) return;
    Memory *found = empty_store(stream);
    int previous;
    const bool entered = !runtime_is_leaving() && device_try_enter(stream->device, &previous);
    free_list(stream, found, entered);
    if (entered) device_leave(stream->device, previous);
}

/* With the device current. */
void memory_flush_device(int device)
{
    const auto flush = [](Stream *stream) {
        /* A graph must not free what it has not allocated. */
        if (memory_is_stored(stream) && !stream_is_capturing(stream))
            free_list(stream, empty_store(stream), !runtime_is_leaving());
    };
    flush(legacy_stream(device));
    for_each_held_stream(device, flush);
}

/* Memory that is held. */

static Status new_memory(Memory **memory)
{
    *memory = static_cast<Memory *>(calloc(1, sizeof **memory));
    return *memory == NULL ? fail(STATUS_MEMORY_ERROR, "out of host memory for an array")
                           : STATUS_OK;
}

static void note_used(int device, int64_t bytes)
{
    devices[device].used += bytes;
    if (devices[device].used > devices[device].peak) devices[device].peak = devices[device].used;
}

static bool exceeds_limit(int device, int64_t bytes)
{
    const int64_t limit = devices[device].limit;
    return limit > 0 && devices[device].used + devices[device].stored + bytes > limit - 1;
}

/* How many of those that wait are looked at. */
enum { FEW = 4, ALL = -1 };
static void settle(int most);

static Status allocate_afresh(Stream *stream, int64_t bytes, bool captured, Memory **memory)
{
    const int device = stream->device;
    if (exceeds_limit(device, bytes)) {
        memory_flush_device(device);
        if (exceeds_limit(device, bytes)) return fail_allocation(device, bytes);
    }
    Status status = new_memory(memory);
    if (status != STATUS_OK) return status;
    void *data;
    status = device_allocate(device, bytes, stream->handle, &data);
    if (status != STATUS_OK) {
        free(*memory);
        *memory = NULL;
        return status;
    }
    (*memory)->data = static_cast<char *>(data);
    (*memory)->bytes = bytes;
    (*memory)->captured = captured;
    return STATUS_OK;
}

Status memory_allocate(Stream *stream, int64_t bytes, Memory **memory)
{
    *memory = NULL;
    Status status = runtime_check();
    if (status != STATUS_OK) return status;
    if (bytes == 0) bytes = 1; /* every array has an address */
    settle(FEW);
    /* What a graph uses is its own: it may run again when others have the stored memory. */
    const bool captured = stream_is_capturing(stream);
    if (!captured) {
        pthread_mutex_lock(&lock);
        *memory = take_stored(stream, bytes);
        if (*memory != NULL) note_used(stream->device, (*memory)->bytes);
        pthread_mutex_unlock(&lock);
    }
    if (*memory == NULL) {
        int previous;
        status = device_enter(stream->device, &previous);
        if (status != STATUS_OK) return status;
        status = allocate_afresh(stream, bytes, captured, memory);
        device_leave(stream->device, previous);
        if (status != STATUS_OK) return status;
        pthread_mutex_lock(&lock);
        note_used(stream->device, (*memory)->bytes);
        pthread_mutex_unlock(&lock);
    }
    (*memory)->references = 1;
    (*memory)->stream = stream_hold(stream);
    return STATUS_OK;
}

Status memory_adopt(void *data, int64_t bytes, Stream *stream, Owner owner, Memory **memory)
{
    Status status = new_memory(memory);
    if (status != STATUS_OK) return status;
    (*memory)->data = static_cast<char *>(data);
    (*memory)->bytes = bytes;
    (*memory)->stream = stream_hold(stream);
    (*memory)->references = 1;
    (*memory)->foreign = true;
    (*memory)->owner = owner;
    return STATUS_OK;
}

char *memory_data(const Memory *memory)
{
    return memory->data;
}

Stream *memory_stream(const Memory *memory)
{
    return memory->stream;
}

bool memory_is_foreign(const Memory *memory)
{
    return memory->foreign;
}

Memory *memory_hold(Memory *memory)
{
    __atomic_add_fetch(&memory->references, 1, __ATOMIC_RELAXED);
    return memory;
}

static bool is_over(cudaEvent_t event)
{
    if (runtime_is_lost()) return true; /* and so is all work */
    const cudaError_t code = cudaEventQuery(event);
    cuda_ignore(code);
    return code !=
           cudaErrorNotReady; /* after any other error nobody will hear of that work again */
}

/* With the lock: forgets the uses that are over, and if many are not, makes room for more. */
static Status make_room(Memory *memory)
{
    int going_on = 0;
    in_spite_of_captures([&] {
        for (int i = 0; i < memory->use_count; i++) {
            const Use use = memory->uses[i];
            if (is_over(use.event))
                event_give(use.device, use.event);
            else
                memory->uses[going_on++] = use;
        }
        memory->use_count = going_on;
    });
    if (2 * memory->use_count < memory->use_room) return STATUS_OK;
    const int room = memory->use_room == 0 ? 4 : 2 * memory->use_room;
    void *uses = realloc(memory->uses, (size_t)room * sizeof(Use));
    if (uses == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory for the uses of an array");
    memory->uses = static_cast<Use *>(uses);
    memory->use_room = room;
    return STATUS_OK;
}

Status memory_keep(Memory *memory)
{
    Stream *before = memory->stream, *lasting = stream_that_lasts(before);
    if (lasting == before) return STATUS_OK;
    Status status = stream_wait(lasting, before);
    if (status != STATUS_OK) return status;
    memory->stream = stream_hold(lasting);
    stream_release(before);
    return STATUS_OK;
}

/* CUDA does not tell when the work on it is done that this device has been given. */
static void leave_unmarked(Memory *memory, int device)
{
    memory->unmarked_device = device;
    __atomic_store_n(&memory->unmarked, true, __ATOMIC_RELEASE);
}

Status memory_note_use(Memory *memory, Stream *stream)
{
    if (stream_is_capturing(stream)) return STATUS_OK; /* a graph's memory is the caller's care */
    Status status = STATUS_OK;
    Use *use = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < memory->use_count; i++)
        if (memory->uses[i].stream == stream->number) use = &memory->uses[i];
    if (use == NULL && memory->use_count == memory->use_room) status = make_room(memory);
    if (use == NULL && status == STATUS_OK) {
        cudaEvent_t event;
        status = event_take(stream->device, &event);
        if (status == STATUS_OK) {
            use = &memory->uses[memory->use_count++];
            *use = {stream->number, stream->device, event};
        }
    }
    if (status == STATUS_OK)
        status = cuda_status(cudaEventRecord(use->event, home_handle(stream)), "cudaEventRecord");
    pthread_mutex_unlock(&lock);
    if (status == STATUS_OK) return STATUS_OK;
    /* The work is queued and cannot be called back: without its event, it is waited for. */
    const cudaError_t code =
        in_spite_of_captures([&] { return cudaStreamSynchronize(stream->handle); });
    cuda_ignore(code);
    if (code != cudaSuccess) leave_unmarked(memory, stream->device);
    return status;
}

Status memory_await_uses(Memory *memory, Stream *stream)
{
    if (stream_is_capturing(stream)) return STATUS_OK;
    Status status = STATUS_OK;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < memory->use_count && status == STATUS_OK; i++)
        if (memory->uses[i].stream != stream->number || stream->handle == cudaStreamPerThread)
            status = cuda_status(cudaStreamWaitEvent(stream->handle, memory->uses[i].event, 0),
                                 "cudaStreamWaitEvent");
    pthread_mutex_unlock(&lock);
    return status;
}

/* Its references are gone: the end of the last one. Without the lock. */

static void forget_uses(Memory *memory)
{
    for (int i = 0; i < memory->use_count; i++)
        event_give(memory->uses[i].device, memory->uses[i].event);
    free(memory->uses);
    memory->uses = NULL;
    memory->use_count = memory->use_room = 0;
}

static bool uses_are_over(const Memory *memory)
{
    bool over = false;
    in_spite_of_captures([&] {
        over = true;
        for (int i = 0; i < memory->use_count && over; i++) over = is_over(memory->uses[i].event);
    });
    return over;
}

/* Nothing tells when that work is done, but waiting for all work does. */
static bool unmarked_work_is_over(Memory *memory)
{
    const int device = memory->unmarked_device;
    int previous;
    if (runtime_is_lost()) return true;
    if (device_is_capturing(device) || !device_try_enter(device, &previous)) return false;
    const cudaError_t code = cudaDeviceSynchronize();
    cuda_ignore(code);
    device_leave(device, previous);
    memory->unmarked = code != cudaSuccess;
    return !memory->unmarked;
}

static void end_foreign(Memory *memory)
{
    const Owner owner = memory->owner;
    Stream *stream = memory->stream;
    forget_uses(memory);
    free(memory);
    stream_release(stream);
    if (owner.release != NULL) owner.release(owner.context);
}

/* With the lock. */
static bool try_store(Memory *memory)
{
    Stream *stream = memory->stream;
    if (memory->captured || stream->handle == cudaStreamPerThread) return false;
    if (!store(memory)) return false;
    devices[stream->device].used -= memory->bytes;
    return true;
}

/* With the lock. */
static void append_waiting(Memory *memory)
{
    memory->next = NULL;
    *(waiting.first == NULL ? &waiting.first : &waiting.last->next) = memory;
    waiting.last = memory;
    __atomic_add_fetch(&waiting.count, 1, __ATOMIC_RELEASE);
}

static void let_wait(Memory *memory)
{
    /* Of what is another library's only the uses matter now, and while they go on, that library may
     * destroy a stream of which only the handle is known. */
    if (memory->foreign) {
        Stream *before = memory->stream;
        memory->stream = stream_hold(stream_that_lasts(before));
        stream_release(before);
    }
    pthread_mutex_lock(&lock);
    append_waiting(memory);
    pthread_mutex_unlock(&lock);
}

/* Makes the stream of the memory wait for all that uses it, or else waits here. */
static bool await_ends(const Memory *memory)
{
    for (int i = 0; i < memory->use_count; i++) {
        cudaError_t code =
            cudaStreamWaitEvent(home_handle(memory->stream), memory->uses[i].event, 0);
        cuda_ignore(code);
        if (code != cudaSuccess)
            code =
                in_spite_of_captures([&] { return cudaEventSynchronize(memory->uses[i].event); });
        cuda_ignore(code);
        if (code != cudaSuccess) return false;
    }
    return true;
}

/* Where CUDA refuses what it takes to give memory back, it waits for better times, rather than be
 * used again too early. Of a GPU that is lost only the record is freed. */
static void end_own(Memory *memory)
{
    Stream *stream = memory->stream;
    int previous;
    const bool entered = device_try_enter(stream->device, &previous);
    const bool ready = entered && await_ends(memory);
    if (!ready && !runtime_is_lost()) {
        if (entered) device_leave(stream->device, previous);
        let_wait(memory);
        return;
    }
    forget_uses(memory);
    pthread_mutex_lock(&lock);
    const bool stored = ready && try_store(memory);
    if (!stored) devices[stream->device].used -= memory->bytes;
    pthread_mutex_unlock(&lock);
    if (!stored) {
        if (ready) device_free(stream->device, memory->data, home_handle(stream));
        free(memory);
    }
    if (entered) device_leave(stream->device, previous);
    stream_release(stream);
}

/* Whether the memory can go back now. An owner may have it only when our work is over. Our own goes
 * back in the order of its stream; but a stream that is captured must neither wait for others, nor
 * free what its graph has not allocated. */
static bool can_end(Memory *memory)
{
    if (memory->unmarked && !unmarked_work_is_over(memory)) return false;
    if (memory->foreign) return memory->use_count == 0 || uses_are_over(memory);
    return memory->captured || !stream_is_capturing(memory->stream);
}

static void end(Memory *memory)
{
    if (memory->foreign)
        end_foreign(memory);
    else
        end_own(memory);
}

/* Looks at the oldest of those that wait; who has to go on waiting goes to the end of the line. */
static void settle(int most)
{
    if (runtime_is_leaving()) return;
    int count = __atomic_load_n(&waiting.count, __ATOMIC_ACQUIRE);
    for (count = most < 0 || count < most ? count : most; count > 0; count--) {
        pthread_mutex_lock(&lock);
        Memory *memory = waiting.first;
        if (memory != NULL) {
            waiting.first = memory->next;
            __atomic_sub_fetch(&waiting.count, 1, __ATOMIC_RELAXED);
        }
        pthread_mutex_unlock(&lock);
        if (memory == NULL) return;
        if (can_end(memory)) {
            end(memory);
        } else {
            let_wait(memory);
        }
    }
}

void memory_settle(void)
{
    settle(ALL);
}

bool memory_try_release(Memory *memory)
{
    /* Of the last one, what those before have done is seen. */
    int references = __atomic_load_n(&memory->references, __ATOMIC_ACQUIRE);
    while (references > 1)
        if (__atomic_compare_exchange_n(&memory->references, &references, references - 1, true,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return true;
    Stream *stream = memory->stream;
    if (memory->foreign || memory->use_count > 0 || memory->unmarked || runtime_is_leaving() ||
        runtime_is_lost())
        return false;
    if (__atomic_load_n(&stream->references, __ATOMIC_RELAXED) == 1 && stream->handle != 0)
        return false; /* the stream might be destroyed with it */
    if (pthread_mutex_trylock(&lock) != 0) return false;
    const bool stored = try_store(memory);
    pthread_mutex_unlock(&lock);
    if (stored) stream_release(stream);
    return stored;
}

void memory_release(Memory *memory)
{
    if (__atomic_sub_fetch(&memory->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    if (runtime_is_leaving()) return;
    if (can_end(memory)) {
        end(memory);
    } else {
        let_wait(memory);
    }
    settle(FEW);
}

void memory_release_after(Memory *memory, Stream *stream)
{
    int previous;
    if (runtime_is_leaving()) return;
    if (device_try_enter(stream->device, &previous)) {
        (void)memory_note_use(memory, stream); /* or the work is waited for */
        device_leave(stream->device, previous);
    } else {
        leave_unmarked(memory, stream->device);
    }
    memory_release(memory);
    stream_release(stream);
}

Status memory_info(int device, MemoryInfo *info)
{
    int previous;
    Status status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    settle(ALL);
    size_t available = 0, total = 0;
    status = cuda_status(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    uint64_t reserved = 0;
    if (status == STATUS_OK && pool_of(device) != NULL)
        status = cuda_status(
            cudaMemPoolGetAttribute(pool_of(device), cudaMemPoolAttrReservedMemCurrent, &reserved),
            "cudaMemPoolGetAttribute");
    device_leave(device, previous);
    pthread_mutex_lock(&lock);
    info->used = devices[device].used;
    info->peak = devices[device].peak;
    info->limit = devices[device].limit - 1;
    if (pool_of(device) == NULL) reserved = (uint64_t)(info->used + devices[device].stored);
    pthread_mutex_unlock(&lock);
    info->reserved = (int64_t)reserved;
    info->available = (int64_t)available;
    info->total = (int64_t)total;
    return status;
}

/* Of what the driver has said since then what the limit leaves; where it was not asked, INT64_MAX
 * or the limit stands for it. */
static bool is_room_known(int device, int64_t since, int64_t *room)
{
    pthread_mutex_lock(&lock);
    const bool is_known = devices[device].asked_at >= since;
    *room = is_known ? devices[device].reach - devices[device].used : INT64_MAX;
    *room = within_limit(device, *room);
    pthread_mutex_unlock(&lock);
    return is_known;
}

/* What other threads allocate or release meanwhile may count on either side. */
static Status learn_room(int device, int64_t *room)
{
    int previous;
    const int64_t now = microseconds();
    Status status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    status = ask_for_room(device, room);
    device_leave(device, previous);
    if (status != STATUS_OK) return status;
    pthread_mutex_lock(&lock);
    devices[device].reach = devices[device].used + *room;
    devices[device].asked_at = now;
    *room = within_limit(device, *room);
    pthread_mutex_unlock(&lock);
    return STATUS_OK;
}

bool memory_has_room(int device, int64_t bytes, int64_t oldest)
{
    const int64_t since = microseconds() - oldest;
    int64_t room;
    bool is_known = is_room_known(device, since, &room);
    if (is_known && bytes <= room) return true;
    settle(ALL);
    is_known = is_room_known(device, since, &room);
    if (is_known || bytes > room) return bytes <= room;
    return learn_room(device, &room) == STATUS_OK && bytes <= room;
}

Status memory_empty_cache(int device)
{
    int previous;
    Status status = runtime_check();
    if (status == STATUS_OK && device_is_capturing(device)) status = refuse_capture("empty_cache");
    if (status == STATUS_OK) status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    settle(ALL);
    memory_flush_device(device);
    if (pool_of(device) != NULL) {
        /* Only what is free by now can go back. */
        status = cuda_status(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        if (status == STATUS_OK)
            status = cuda_status(cudaMemPoolTrimTo(pool_of(device), 0), "cudaMemPoolTrimTo");
    }
    transfer_flush(device);
    slab_flush(device);
    pipeline_flush(device);
    event_flush(device);
    device_leave(device, previous);
    pinned_flush();
    return status;
}

Status memory_set_limit(int device, int64_t bytes)
{
    Status status = runtime_check();
    if (status != STATUS_OK) return status;
    pthread_mutex_lock(&lock);
    devices[device].limit = bytes < 0 ? 0 : bytes + 1;
    pthread_mutex_unlock(&lock);
    return STATUS_OK;
}

static Status attributes_of(const void *data, cudaPointerAttributes *attributes)
{
    Status status = runtime_check();
    if (status != STATUS_OK) return status;
    CUDA_TRY(cudaPointerGetAttributes(attributes, data));
    return STATUS_OK;
}

Status memory_device_of(const void *data, int *device)
{
    cudaPointerAttributes attributes;
    Status status = attributes_of(data, &attributes);
    if (status != STATUS_OK) return status;
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged)
        return fail(STATUS_VALUE_ERROR, "address %p is not in the memory of a CUDA device", data);
    *device = attributes.device;
    return STATUS_OK;
}

Status memory_check(int device, const void *data)
{
    int found = device;
    Status status = memory_device_of(data, &found);
    if (status != STATUS_OK || found == device) return status;
    return fail(STATUS_VALUE_ERROR, "address %p is in the memory of cuda:%d, not of cuda:%d", data,
                found, device);
}

#else /* a build without CUDA, in which nobody can have memory to ask about */

static Status none(void)
{
    int count;
    return cuda_device_count(&count);
}

Status memory_allocate(Stream *, int64_t, Memory **)
{
    return none();
}

Status memory_adopt(void *, int64_t, Stream *, Owner, Memory **)
{
    return none();
}

char *memory_data(const Memory *)
{
    return NULL;
}

Stream *memory_stream(const Memory *)
{
    return NULL;
}

Memory *memory_hold(Memory *memory)
{
    return memory;
}

Status memory_keep(Memory *)
{
    return none();
}

void memory_release(Memory *) {}

bool memory_try_release(Memory *)
{
    return true;
}

void memory_release_after(Memory *, Stream *) {}

Status memory_info(int, MemoryInfo *)
{
    return none();
}

bool memory_has_room(int, int64_t, int64_t)
{
    return false;
}

Status memory_empty_cache(int)
{
    return none();
}

Status memory_set_limit(int, int64_t)
{
    return none();
}

Status memory_device_of(const void *, int *)
{
    return none();
}

Status memory_check(int, const void *)
{
    return none();
}

#endif
