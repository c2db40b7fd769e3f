/* Page-locked memory of the host: locks on memory that somebody else owns, and a pool of our own.
 *
 * What is page-locked can be copied to and from a device without another copy on the host, by
 * copies that go on when the driver has returned. All calls of this package wait for those they
 * make, and as long as they do, the memory stays locked, whoever unlocks it meanwhile. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for MAP_ANONYMOUS and madvise */
#endif
#include "common.cuh"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifdef __CUDACC__

#include <cuda.h>

/* Whether CUDA has to be left alone: then what is locked is left to the driver. */
static bool is_out_of_reach(void)
{
    return runtime_is_leaving() || runtime_is_lost();
}

/* On the device that is current. */
static Status register_memory(void *memory, int64_t bytes, unsigned flags)
{
    Status status = STATUS_OK;
    in_spite_of_captures([&] {
        status = cuda_allocation_status(cudaHostRegister(memory, (size_t)bytes, flags),
                                        "cudaHostRegister");
    });
    return status;
}

/* False where it stays locked, for all that is known. */
static bool unregister_memory(int device, void *memory)
{
    int previous;
    if (is_out_of_reach() || !device_try_enter(device, &previous)) return false;
    cudaError_t code = cudaSuccess;
    in_spite_of_captures([&] {
        code = cudaHostUnregister(memory);
        cuda_ignore(code);
    });
    device_leave(device, previous);
    return code == cudaSuccess;
}

/* Memory of others.
 *
 * CUDA locks a byte once, and unlocks only what was locked by one call. Arrays may share memory, so
 * what is locked is kept as spans that do not overlap, each with the number of those who want it
 * locked. Who comes later locks the gaps between the spans that there are. The driver takes no copy
 * that reaches over the end of a span: transfer.cu cuts it there. */
struct Span {
    char *low, *high;
    uint64_t number; /* in the order in which they came */
    int device;
    int references;
    bool changing; /* somebody is locking or unlocking it, without the lock of the list */
    bool locked;   /* by us; else by somebody else, whose it is */
    int stuck;     /* of the references: for work that nobody could be made to wait for */
    int settling;  /* of these, that are being waited for once more */
    int stuck_device;
    Span *next; /* in the order of the addresses */
    Span *also; /* in the list of those that are changed at a time */
};

struct Pin {
    char *low, *high;
    uint64_t last; /* the number of the newest span that may be meant */
};

static struct {
    pthread_mutex_t lock; /* never held across a call of CUDA */
    pthread_cond_t changed;
    Span *first;
    PinnedUse *uses;
    uint64_t last; /* number given */
    int count;     /* read without the lock: where nobody pins anything, nothing is looked for */
    int stuck;     /* spans that were stuck since they were settled last; read without the lock */
    bool settling;
} spans = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, NULL, 0, 0, 0, false};

static bool is_within(const Span *span, const char *low, const char *high)
{
    return span->low < high && low < span->high;
}

/* With the lock, which is dropped meanwhile. */
static void await_changes(const char *low, const char *high)
{
    for (bool changing = true; changing;) {
        changing = false;
        for (const Span *span = spans.first; span != NULL; span = span->next)
            changing = changing || (span->changing && is_within(span, low, high));
        if (changing) pthread_cond_wait(&spans.changed, &spans.lock);
    }
}

static int hold_spans(const char *low, const char *high)
{
    int count = 0;
    for (Span *span = spans.first; span != NULL; span = span->next) {
        if (!is_within(span, low, high)) continue;
        span->references++;
        count++;
    }
    return count;
}

static void remove_span(Span *span)
{
    Span **link = &spans.first;
    while (*link != span) link = &(*link)->next;
    *link = span->next;
    free(span);
    __atomic_sub_fetch(&spans.count, 1, __ATOMIC_RELAXED);
}

/* With the lock: adds the span to those that nobody needs any more. */
static void drop_references(Span *span, int count, Span **over)
{
    span->references -= count;
    if (count == 0 || span->references > 0) return;
    span->changing = true;
    span->also = *over;
    *over = span;
}

static void unlock_spans(Span *over)
{
    if (over == NULL) return;
    for (Span *span = over; span != NULL; span = span->also)
        if (span->locked) (void)unregister_memory(span->device, span->low);
    pthread_mutex_lock(&spans.lock);
    while (over != NULL) {
        Span *span = over;
        over = span->also;
        remove_span(span);
    }
    pthread_cond_broadcast(&spans.changed);
    pthread_mutex_unlock(&spans.lock);
}

static void let_go_of_spans(const char *low, const char *high, uint64_t last)
{
    Span *over = NULL;
    pthread_mutex_lock(&spans.lock);
    for (Span *span = spans.first; span != NULL; span = span->next)
        if (is_within(span, low, high) && span->number <= last) drop_references(span, 1, &over);
    pthread_mutex_unlock(&spans.lock);
    unlock_spans(over);
}

static void hold_on_to_spans(const char *low, const char *high, uint64_t last, int device)
{
    pthread_mutex_lock(&spans.lock);
    for (Span *span = spans.first; span != NULL; span = span->next) {
        if (!is_within(span, low, high) || span->number > last) continue;
        span->stuck++;
        span->stuck_device = device;
        __atomic_add_fetch(&spans.stuck, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&spans.lock);
}

static bool is_idle(int device)
{
    int previous;
    if (!device_try_enter(device, &previous)) return false;
    const bool is_over = device_await(device);
    device_leave(device, previous);
    return is_over;
}

/* Waits once more for the work that nobody could be made to wait for. */
static void settle(void)
{
    if (__atomic_load_n(&spans.stuck, __ATOMIC_RELAXED) == 0 || is_out_of_reach()) return;
    bool wanted[MAX_DEVICES] = {};
    pthread_mutex_lock(&spans.lock);
    const bool others = spans.settling;
    spans.settling = true;
    for (Span *span = spans.first; span != NULL && !others; span = span->next) {
        span->settling = span->stuck;
        wanted[span->stuck_device] = wanted[span->stuck_device] || span->stuck > 0;
    }
    pthread_mutex_unlock(&spans.lock);
    if (others) return;
    for (int device = 0; device < MAX_DEVICES; device++)
        wanted[device] = wanted[device] && is_idle(device);
    Span *over = NULL;
    pthread_mutex_lock(&spans.lock);
    for (Span *span = spans.first; span != NULL; span = span->next) {
        const int settled = wanted[span->stuck_device] ? span->settling : 0;
        span->settling = 0;
        span->stuck -= settled;
        __atomic_sub_fetch(&spans.stuck, settled, __ATOMIC_RELAXED);
        drop_references(span, settled, &over);
    }
    spans.settling = false;
    pthread_mutex_unlock(&spans.lock);
    unlock_spans(over);
}

/* With the lock: calls that are going on may have the driver copy, from now on, what is locked. */
static void hold_for_uses(Span *span)
{
    for (PinnedUse *use = spans.uses; use != NULL; use = use->next) {
        if (!is_within(span, use->low, use->high)) continue;
        span->references++;
        use->last = span->number;
        __atomic_add_fetch(&use->held, 1, __ATOMIC_RELAXED);
    }
}

/* With the lock: a span for each gap. They are yet to be locked; *fresh are these. */
static Status fill_gaps(char *low, char *high, int device, Span **fresh)
{
    Span **link = &spans.first;
    while (*link != NULL && (*link)->high <= low) link = &(*link)->next;
    while (low < high) {
        Span *after = *link;
        char *end = after != NULL && after->low < high ? after->low : high;
        if (low < end) {
            Span *span = static_cast<Span *>(calloc(1, sizeof *span));
            if (span == NULL)
                return fail(STATUS_MEMORY_ERROR, "out of host memory to note what is page-locked");
            span->low = low;
            span->high = end;
            span->number = ++spans.last;
            span->device = device;
            span->changing = true;
            span->also = *fresh;
            *fresh = span;
            span->next = after;
            *link = span;
            link = &span->next;
            hold_for_uses(span);
            __atomic_add_fetch(&spans.count, 1, __ATOMIC_RELAXED);
        }
        if (after == NULL) break;
        low = after->high;
        link = &after->next;
    }
    return STATUS_OK;
}

static Status is_known_to_cuda(const char *address, bool *known)
{
    cudaPointerAttributes attributes;
    CUDA_TRY(cudaPointerGetAttributes(&attributes, address));
    *known = attributes.type != cudaMemoryTypeUnregistered;
    return STATUS_OK;
}

/* A copy of the failure, for the last one is overwritten. */
static Status refuse_to_lock(const Failure first, const char *why)
{
    char text[sizeof first.text];
    snprintf(text, sizeof text, "%.500s. %s: pin a copy of it", first.text, why);
    return fail_cuda(STATUS_DEVICE_ERROR, first.cuda_code, first.cuda_name, text);
}

/* What a device only reads may be locked where nobody can write to it. */
static Status lock_read_only(const Span *span)
{
    const Failure first = *last_failure();
    int supported = 0;
    CUDA_TRY(
        cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, span->device));
    if (supported)
        return register_memory(span->low, span->high - span->low, cudaHostRegisterReadOnly);
    return refuse_to_lock(first, "x is read-only, and this GPU cannot lock memory that is");
}

using PointerAttributes = CUresult (*)(unsigned, CUpointer_attribute *, void **, CUdeviceptr);

/* The runtime cannot tell how far memory reaches that was locked by one call: the driver can. NULL
 * where it does not say. */
static PointerAttributes find_pointer_attributes(void)
{
    static void *known = NULL; /* every thread would find the same */
    void *function = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (function == NULL) {
        constexpr unsigned SINCE = 7000;
        cudaDriverEntryPointQueryResult found;
        const cudaError_t code = cudaGetDriverEntryPointByVersion(
            "cuPointerGetAttributes", &function, SINCE, cudaEnableDefault, &found);
        cuda_ignore(code);
        if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) return NULL;
        __atomic_store_n(&known, function, __ATOMIC_RELAXED);
    }
    return reinterpret_cast<PointerAttributes>(function);
}

/* How many bytes from there on were locked by the same call; negative where nobody tells. */
static int64_t locked_bytes_from(const char *there)
{
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                    CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    char *begin = NULL;
    size_t size = 0;
    void *found[] = {&begin, &size};
    const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(there);
    const PointerAttributes get = find_pointer_attributes();
    if (get == NULL) return -1;
    const cudaError_t code = static_cast<cudaError_t>(get(2, wanted, found, address));
    cuda_notice(code);
    if (code != cudaSuccess || begin == NULL || there < begin) return -1;
    return begin + size - there;
}

static Status lock_span(Span *span, bool writable)
{
    bool first = false, last = false;
    Status status = is_known_to_cuda(span->low, &first);
    if (status == STATUS_OK) status = is_known_to_cuda(span->high - 1, &last);
    /* Both ends may be locked, and what lies between them not. */
    const int64_t locked = first && last ? locked_bytes_from(span->low) : 0;
    if (status != STATUS_OK || locked < 0 || locked >= span->high - span->low) return status;
    status = register_memory(span->low, span->high - span->low, cudaHostRegisterDefault);
    if (status == STATUS_DEVICE_ERROR &&
        last_failure()->cuda_code == cudaErrorHostMemoryAlreadyRegistered)
        return fail(STATUS_VALUE_ERROR,
                    "part of x is page-locked already, by somebody else: unlock it there first, or "
                    "pin the other parts alone");
    if (status == STATUS_DEVICE_ERROR && !writable)
        status = lock_read_only(span);
    else if (status == STATUS_DEVICE_ERROR && last_failure()->cuda_code == cudaErrorInvalidValue)
        status = refuse_to_lock(*last_failure(),
                                "Not all memory can be locked, for one that of files on some file "
                                "systems");
    span->locked = status == STATUS_OK;
    return status;
}

/* With the lock: who comes next is not to take a span for locked that is not. Nobody holds it but
 * the pin, and calls that were going on when it was made. */
static void give_up(Span *span, Span **over)
{
    for (PinnedUse *use = spans.uses; use != NULL; use = use->next) {
        if (!is_within(span, use->low, use->high)) continue;
        span->references--;
        __atomic_sub_fetch(&use->held, 1, __ATOMIC_RELAXED);
    }
    drop_references(span, 1, over);
}

static Status lock_gaps(Pin *pin, int device, bool writable)
{
    Span *fresh = NULL, *over = NULL;
    pthread_mutex_lock(&spans.lock);
    await_changes(pin->low, pin->high);
    Status status = fill_gaps(pin->low, pin->high, device, &fresh);
    (void)hold_spans(pin->low, pin->high);
    pin->last = spans.last;
    pthread_mutex_unlock(&spans.lock);
    Span *failed = fresh;
    while (failed != NULL && status == STATUS_OK) {
        status = lock_span(failed, writable);
        if (status == STATUS_OK) failed = failed->also;
    }
    if (fresh == NULL) return status;
    pthread_mutex_lock(&spans.lock);
    for (Span *span = fresh; span != failed; span = span->also) span->changing = false;
    while (failed != NULL) {
        Span *span = failed;
        failed = span->also;
        give_up(span, &over);
    }
    pthread_cond_broadcast(&spans.changed);
    pthread_mutex_unlock(&spans.lock);
    unlock_spans(over);
    return status;
}

static Pin pin_of(const View *view)
{
    uintptr_t low, high;
    view_extent(view, &low, &high);
    return {reinterpret_cast<char *>(low), reinterpret_cast<char *>(high), 0};
}

Status pin_create(int device, const View *view, bool writable, Pin **pin)
{
    int previous;
    *pin = NULL;
    Status status = device_enter(device, &previous);
    if (status != STATUS_OK) return status;
    Pin *made = static_cast<Pin *>(malloc(sizeof *made));
    if (made == NULL) {
        status = fail(STATUS_MEMORY_ERROR, "out of host memory to note what is page-locked");
    } else {
        *made = pin_of(view);
        status = lock_gaps(made, device, writable);
    }
    device_leave(device, previous);
    if (status == STATUS_OK) {
        *pin = made;
    } else if (made != NULL) {
        const Failure first = *last_failure();
        pin_destroy(made);
        (void)fail_cuda(status, first.cuda_code, first.cuda_name, first.text);
    }
    return status;
}

void pin_destroy(Pin *pin)
{
    if (!runtime_is_leaving()) {
        let_go_of_spans(pin->low, pin->high, pin->last);
        settle();
    }
    free(pin);
}

void pinned_hold(const View *view, PinnedUse *use)
{
    const Pin pin = pin_of(view);
    use->low = pin.low;
    use->high = pin.high;
    use->previous = NULL;
    use->is_listed = true;
    pthread_mutex_lock(&spans.lock);
    await_changes(use->low, use->high);
    use->held = hold_spans(use->low, use->high);
    use->last = spans.last;
    use->next = spans.uses;
    if (use->next != NULL) use->next->previous = use;
    spans.uses = use;
    pthread_mutex_unlock(&spans.lock);
}

bool pinned_is_held(const PinnedUse *use)
{
    return __atomic_load_n(&use->held, __ATOMIC_RELAXED) > 0;
}

void pinned_let_go(PinnedUse *use, int device, bool is_over)
{
    if (!use->is_listed) return;
    use->is_listed = false;
    pthread_mutex_lock(&spans.lock);
    *(use->previous != NULL ? &use->previous->next : &spans.uses) = use->next;
    if (use->next != NULL) use->next->previous = use->previous;
    pthread_mutex_unlock(&spans.lock);
    if (use->held == 0) return;
    if (is_over)
        let_go_of_spans(use->low, use->high, use->last);
    else
        hold_on_to_spans(use->low, use->high, use->last, device);
}

int64_t pinned_stretch(const char *host, int64_t bytes)
{
    if (__atomic_load_n(&spans.count, __ATOMIC_RELAXED) == 0) return bytes;
    const char *end = host + bytes;
    pthread_mutex_lock(&spans.lock);
    for (const Span *span = spans.first; span != NULL; span = span->next) {
        if (span->low > host && span->low < end) end = span->low;
        if (span->high > host && span->high < end) end = span->high;
    }
    pthread_mutex_unlock(&spans.lock);
    return end - host;
}

static bool is_page_locked(const char *address, char **there)
{
    cudaPointerAttributes attributes;
    const cudaError_t code = cudaPointerGetAttributes(&attributes, address);
    cuda_ignore(code);
    if (code != cudaSuccess) return false;
    *there = static_cast<char *>(attributes.devicePointer);
    return attributes.type == cudaMemoryTypeHost && *there != NULL;
}

bool pinned_reach(const char *host, int64_t bytes, void **there)
{
    char *first;
    if (!is_page_locked(host, &first) || locked_bytes_from(first) < bytes) return false;
    *there = first;
    return pinned_stretch(host, bytes) == bytes;
}

bool view_is_in_reach(const View *view)
{
    uintptr_t begin, end;
    void *there;
    if (view->device != DEVICE_CPU || view_items(view) == 0) return false;
    view_extent(view, &begin, &end);
    return pinned_reach(reinterpret_cast<const char *>(begin), (int64_t)(end - begin), &there);
}

/* The pool.
 *
 * To lock memory takes long, and whole pages. So it is locked in chunks, which are cut into blocks
 * of one size each, and stay locked for a while when no block of theirs is in use. Large blocks
 * have a chunk of their own. Chunks begin at multiples of their alignment, where they say what they
 * are, so that a block needs nothing but its address to be freed. */

constexpr int64_t CHUNK_BYTES = 2 << 20;  /* of those with several blocks; also the alignment */
constexpr int64_t PAGE_BYTES = 4 << 10;   /* before the first block */
constexpr int64_t GRAIN_BYTES = 64 << 10; /* of chunks with a single block */
constexpr int64_t MOST_IDLE_BYTES = 256 << 20; /* that stay locked though nobody uses them */
constexpr int64_t MOST_BLOCK_BYTES = (CHUNK_BYTES - PAGE_BYTES) / 2;
constexpr int64_t MOST_BYTES = INT64_MAX / 2; /* so that no size of a chunk overflows */
constexpr int SIZES = 56;

struct Block { /* that is free */
    Block *next;
};

struct Chunk {
    int64_t bytes;
    int device;
    bool locked;
    int size;            /* of the blocks: a number, or SIZES where there is a single one */
    int used, cut, room; /* blocks: in use, in use or free, at most */
    Block *free;
    Chunk *next,
        *previous; /* in the list of those with room for a block of a size, or of idle ones */
};

struct ChunkList {
    Chunk *first, *last;
};

static struct {
    pthread_mutex_t lock; /* may be taken with the lock of an interpreter: nothing waits under it */
    ChunkList with_room[SIZES];
    ChunkList idle; /* the one that was used last comes first */
    int64_t idle_bytes;
} pool = {PTHREAD_MUTEX_INITIALIZER, {}, {}, 0};

/* 64, 80, 96, 112, 128, 160, ...: no more than a quarter too large. */
static int64_t size_bytes(int size)
{
    return (int64_t)(4 + size % 4) << (size / 4 + 4);
}
static_assert((int64_t)(4 + (SIZES - 1) % 4) << ((SIZES - 1) / 4 + 4) <= MOST_BLOCK_BYTES, "");

static int size_of(int64_t bytes)
{
    int size = 0;
    while (size < SIZES && size_bytes(size) < bytes) size++;
    return size;
}

static int64_t chunk_bytes(int64_t bytes)
{
    if (size_of(bytes) < SIZES) return CHUNK_BYTES;
    return round_up(bytes + PAGE_BYTES, GRAIN_BYTES);
}

static Chunk *chunk_of(const void *block)
{
    const uintptr_t place = reinterpret_cast<uintptr_t>(block);
    return reinterpret_cast<Chunk *>(place / CHUNK_BYTES * CHUNK_BYTES);
}

static void put_first(ChunkList *list, Chunk *chunk)
{
    chunk->previous = NULL;
    chunk->next = list->first;
    *(chunk->next != NULL ? &chunk->next->previous : &list->last) = chunk;
    list->first = chunk;
}

static void take_out(ChunkList *list, Chunk *chunk)
{
    *(chunk->previous != NULL ? &chunk->previous->next : &list->first) = chunk->next;
    *(chunk->next != NULL ? &chunk->next->previous : &list->last) = chunk->previous;
}

static void take_out_idle(Chunk *chunk)
{
    take_out(&pool.idle, chunk);
    pool.idle_bytes -= chunk->bytes;
}

/* A large chunk may be used again for what is a little smaller. */
static Chunk *take_idle(int64_t bytes)
{
    for (Chunk *chunk = pool.idle.first; chunk != NULL; chunk = chunk->next)
        if (chunk->bytes >= bytes && chunk->bytes - bytes <= bytes / 4) {
            take_out_idle(chunk);
            return chunk;
        }
    return NULL;
}

/* Makes an idle chunk one for blocks of a size. */
static void dedicate(Chunk *chunk, int size)
{
    chunk->size = size;
    chunk->used = chunk->cut = 0;
    chunk->room = size == SIZES ? 1 : (int)((CHUNK_BYTES - PAGE_BYTES) / size_bytes(size));
    chunk->free = NULL;
    if (size < SIZES) put_first(&pool.with_room[size], chunk);
}

static void *take_block(Chunk *chunk)
{
    void *block = chunk->free;
    if (block != NULL)
        chunk->free = chunk->free->next;
    else
        block = reinterpret_cast<char *>(chunk) + PAGE_BYTES +
                (chunk->size == SIZES ? 0 : chunk->cut++ * size_bytes(chunk->size));
    if (++chunk->used == chunk->room && chunk->size < SIZES)
        take_out(&pool.with_room[chunk->size], chunk);
    return block;
}

/* With the lock. */
static void *take_from_pool(int64_t bytes)
{
    const int size = size_of(bytes);
    Chunk *chunk = size < SIZES ? pool.with_room[size].first : NULL;
    if (chunk == NULL) {
        chunk = take_idle(chunk_bytes(bytes));
        if (chunk == NULL) return NULL;
        dedicate(chunk, size);
    }
    return take_block(chunk);
}

void *pinned_take(int64_t bytes)
{
    if (bytes > MOST_BYTES) return NULL;
    pthread_mutex_lock(&pool.lock);
    void *block = take_from_pool(bytes);
    pthread_mutex_unlock(&pool.lock);
    return block;
}

int64_t pinned_bytes(const void *block)
{
    const Chunk *chunk = chunk_of(block);
    return chunk->size == SIZES ? chunk->bytes - PAGE_BYTES : size_bytes(chunk->size);
}

/* Of memory that CUDA may go on to use nothing is given back. */
static void destroy_chunk(Chunk *chunk)
{
    if (!chunk->locked || unregister_memory(chunk->device, chunk))
        (void)munmap(chunk, (size_t)chunk->bytes);
}

/* Memory at a multiple of its alignment, in huge pages where there are any, which are locked
 * sooner. */
static char *map_chunk(int64_t bytes)
{
    const size_t size = (size_t)(bytes + CHUNK_BYTES);
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    char *begin = static_cast<char *>(mapped), *end = begin + size;
    char *chunk = reinterpret_cast<char *>(chunk_of(begin + CHUNK_BYTES - 1));
    if (chunk > begin) (void)munmap(begin, (size_t)(chunk - begin));
    if (end > chunk + bytes) (void)munmap(chunk + bytes, (size_t)(end - chunk - bytes));
    (void)madvise(chunk, (size_t)bytes, MADV_HUGEPAGE);
    return chunk;
}

static Status create_chunk(int device, int64_t bytes, Chunk **created)
{
    int previous;
    /* Nobody can use a device any more in a process that was forked, or that is about to end; but
     * NumPy goes on to need memory in the block that it is in. */
    const bool locks = !runtime_is_leaving();
    char *memory = map_chunk(bytes);
    if (memory == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes were to be page-locked",
                    (long long)bytes);
    Status status = locks ? device_enter(device, &previous) : STATUS_OK;
    if (status == STATUS_OK && locks) {
        status = register_memory(memory, bytes, cudaHostRegisterDefault);
        device_leave(device, previous);
    }
    if (status != STATUS_OK) {
        (void)munmap(memory, (size_t)bytes);
        return status;
    }
    *created = reinterpret_cast<Chunk *>(memory);
    (*created)->bytes = bytes;
    (*created)->device = device;
    (*created)->locked = locks;
    return STATUS_OK;
}

/* A child must not find the lock taken by a thread that it does not have. */
static void watch_for_forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] {
        pthread_atfork([] { pthread_mutex_lock(&pool.lock); },
                       [] { pthread_mutex_unlock(&pool.lock); },
                       [] { pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; });
    });
}

Status pinned_allocate(int device, int64_t bytes, void **block)
{
    watch_for_forks();
    *block = pinned_take(bytes);
    if (*block != NULL) return STATUS_OK;
    if (bytes > MOST_BYTES)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes were to be page-locked",
                    (long long)bytes);
    Chunk *chunk;
    Status status = create_chunk(device, chunk_bytes(bytes), &chunk);
    if (status == STATUS_MEMORY_ERROR) {
        pinned_flush();
        status = create_chunk(device, chunk_bytes(bytes), &chunk);
    }
    if (status != STATUS_OK) return status;
    pthread_mutex_lock(&pool.lock);
    dedicate(chunk, size_of(bytes));
    *block = take_block(chunk);
    pthread_mutex_unlock(&pool.lock);
    return STATUS_OK;
}

/* With the lock: whether so much more may stay locked. */
static bool has_room_for_idle(int64_t bytes)
{
    return pool.idle_bytes + bytes <= MOST_IDLE_BYTES;
}

static void give_block(Chunk *chunk, void *block)
{
    Block *given = static_cast<Block *>(block);
    given->next = chunk->free;
    chunk->free = given;
    if (chunk->used-- == chunk->room && chunk->size < SIZES)
        put_first(&pool.with_room[chunk->size], chunk);
    if (chunk->used > 0) return;
    if (chunk->size < SIZES) take_out(&pool.with_room[chunk->size], chunk);
    put_first(&pool.idle, chunk);
    pool.idle_bytes += chunk->bytes;
}

bool pinned_try_free(void *block)
{
    Chunk *chunk = chunk_of(block);
    pthread_mutex_lock(&pool.lock);
    const bool done = chunk->used > 1 || has_room_for_idle(chunk->bytes) || is_out_of_reach();
    if (done) give_block(chunk, block);
    pthread_mutex_unlock(&pool.lock);
    return done;
}

void pinned_free(void *block)
{
    pthread_mutex_lock(&pool.lock);
    give_block(chunk_of(block), block);
    Chunk *over = NULL;
    while (pool.idle_bytes > MOST_IDLE_BYTES) {
        Chunk *oldest = pool.idle.last;
        take_out_idle(oldest);
        oldest->next = over;
        over = oldest;
    }
    pthread_mutex_unlock(&pool.lock);
    while (over != NULL) {
        Chunk *chunk = over;
        over = chunk->next;
        destroy_chunk(chunk);
    }
}

void pinned_flush(void)
{
    settle();
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        Chunk *chunk = pool.idle.first;
        if (chunk != NULL) take_out_idle(chunk);
        pthread_mutex_unlock(&pool.lock);
        if (chunk == NULL) return;
        destroy_chunk(chunk);
    }
}

#else /* a build without CUDA, in which there is nothing that these could be called with */

static Status none(void)
{
    int count;
    return cuda_device_count(&count);
}

Status pin_create(int, const View *, bool, Pin **)
{
    return none();
}

void pin_destroy(Pin *) {}

bool view_is_in_reach(const View *)
{
    return false;
}

Status pinned_allocate(int, int64_t, void **)
{
    return none();
}

void *pinned_take(int64_t)
{
    return NULL;
}

bool pinned_try_free(void *)
{
    return true;
}

void pinned_free(void *) {}

int64_t pinned_bytes(const void *)
{
    return 0;
}

#endif
