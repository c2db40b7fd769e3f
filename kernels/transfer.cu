/* Copies between host memory of any strides and packed memory, on the host or on a device.
 *
 * Only contiguous bytes cross the bus. A strided box is packed (or unpacked) on the host, in pieces
 * that stay in the cache between the two copies. Large copies go through rings of page-locked
 * buffers, at the speed of the bus; small ones, and those of memory that is page-locked already,
 * go to the driver as they are. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for madvise */
#endif
#include "streamed.cuh"
#include "transfer.cuh"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int64_t box_items(const Box &box)
{
    int64_t items = 1;
    for (int i = 0; i < box.ndim; i++) items *= box.counts[i];
    return items;
}

void box_append(Box *box, int64_t count, int64_t stride)
{
    if (count == 1) return;
    box->counts[box->ndim] = count;
    box->strides[box->ndim] = stride;
    box->ndim++;
}

Box box_of(const View *view)
{
    Box box = {static_cast<char *>(view->data), view->item_bytes, 0, {}, {}};
    for (int i = 0; i < view->ndim; i++) box_append(&box, view->shape[i], view->strides[i]);
    return box;
}

/* The same bytes with as few dimensions as possible; a contiguous tail becomes part of the item. */
static Box box_merged(const Box &box)
{
    Box merged;
    merged.base = box.base;
    merged.item_bytes = box.item_bytes;
    merged.ndim = 0;
    for (int i = 0; i < box.ndim; i++) {
        int last = merged.ndim - 1;
        if (last >= 0 && merged.strides[last] == box.counts[i] * box.strides[i]) {
            merged.counts[last] *= box.counts[i];
            merged.strides[last] = box.strides[i];
        } else {
            box_append(&merged, box.counts[i], box.strides[i]);
        }
    }
    int last = merged.ndim - 1;
    if (last >= 0 && merged.strides[last] == merged.item_bytes) {
        merged.item_bytes *= merged.counts[last];
        merged.ndim--;
    }
    return merged;
}

static bool is_within_line(int64_t stride)
{
    return stride < CACHE_LINE_BYTES && stride > -CACHE_LINE_BYTES;
}

/* On an H200 a transposed array of 64 KiB is there in 30 us if it is turned there, and in 45 if the
 * CPU does that; one of 16 KiB in 21, and in 20. */
constexpr int64_t LEAST_TURNED_BYTES = 64 << 10;

bool box_lies_across(const Box &box)
{
    const int inner = box.ndim - 1;
    if (inner < 1 || box.item_bytes >= CACHE_LINE_BYTES || is_within_line(box.strides[inner]) ||
        box_items(box) * box.item_bytes < LEAST_TURNED_BYTES)
        return false;
    for (int i = 0; i < inner; i++)
        if (is_within_line(box.strides[i])) return true;
    return false;
}

template <int WIDTH>
static void copy_items_of(char *target, int64_t target_stride, const char *source,
                          int64_t source_stride, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(target + i * target_stride, source + i * source_stride, WIDTH);
}

void copy_items(char *target, int64_t target_stride, const char *source, int64_t source_stride,
                int64_t count, int64_t item_bytes)
{
    switch (item_bytes) {
    case 1:
        return copy_items_of<1>(target, target_stride, source, source_stride, count);
    case 2:
        return copy_items_of<2>(target, target_stride, source, source_stride, count);
    case 4:
        return copy_items_of<4>(target, target_stride, source, source_stride, count);
    case 8:
        return copy_items_of<8>(target, target_stride, source, source_stride, count);
    case 16:
        return copy_items_of<16>(target, target_stride, source, source_stride, count);
    default:
        for (int64_t i = 0; i < count; i++)
            memcpy(target + i * target_stride, source + i * source_stride, (size_t)item_bytes);
    }
}

static char *box_place(const Box &box, int64_t item)
{
    char *place = box.base;
    for (int i = box.ndim - 1; i >= 0; i--) {
        place += item % box.counts[i] * box.strides[i];
        item /= box.counts[i];
    }
    return place;
}

/* Goes through the items begin..end in stretches along the innermost dimension. */
template <bool PACK>
static void box_copy(const Box &box, int64_t begin, int64_t end, char *packed)
{
    int64_t row = box.ndim > 0 ? box.counts[box.ndim - 1] : 1;
    int64_t stride = box.ndim > 0 ? box.strides[box.ndim - 1] : 0;
    while (begin < end) {
        char *place = box_place(box, begin);
        int64_t count = row - begin % row;
        if (count > end - begin) count = end - begin;
        if (PACK)
            copy_items(packed, box.item_bytes, place, stride, count, box.item_bytes);
        else
            copy_items(place, stride, packed, box.item_bytes, count, box.item_bytes);
        packed += count * box.item_bytes;
        begin += count;
    }
}

struct BoxCopy {
    const Box *box;
    int64_t first;
    char *packed;
};

template <bool PACK>
static void box_copy_range(void *context, int64_t begin, int64_t end)
{
    const BoxCopy &copy = *static_cast<const BoxCopy *>(context);
    box_copy<PACK>(*copy.box, copy.first + begin, copy.first + end,
                   copy.packed + begin * copy.box->item_bytes);
}

template <bool PACK>
static void box_copy_parallel(const Box &box, int64_t begin, int64_t end, char *packed)
{
    if (begin >= end || box.item_bytes == 0) return; /* merged, no items are one of no bytes */
    BoxCopy copy = {&box, begin, packed};
    int64_t grain = (256 << 10) / box.item_bytes + 1;
    parallel_for(end - begin, grain, box_copy_range<PACK>, &copy);
}

void box_pack(const Box &box, char *packed)
{
    Box merged = box_merged(box);
    box_copy_parallel<true>(merged, 0, box_items(merged), packed);
}

void box_unpack(const Box &box, char *packed)
{
    Box merged = box_merged(box);
    box_copy_parallel<false>(merged, 0, box_items(merged), packed);
}

#ifdef __CUDACC__

Status copy_within_device(void *target, const void *source, int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemcpyAsync(target, source, (size_t)bytes, cudaMemcpyDeviceToDevice,
                             static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

Status copy_across_devices(void *target, int target_device, const void *source, int source_device,
                           int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemcpyPeerAsync(target, target_device, source, source_device, (size_t)bytes,
                                 static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

bool host_memory_is_pinned(const void *host)
{
    cudaPointerAttributes attributes;
    const cudaError_t code = cudaPointerGetAttributes(&attributes, host);
    cuda_ignore(code);
    return code != cudaSuccess || attributes.type != cudaMemoryTypeUnregistered;
}

Status clear_on_device(void *device, int byte, int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemsetAsync(device, byte, (size_t)bytes, static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

template <bool UP>
static Status copy_by_driver(char *host, char *device, int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemcpyAsync(UP ? device : host, UP ? host : device, (size_t)bytes,
                             UP ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                             static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

/* For what others have locked in part: the CPU copies it, after what the stream is still to write
 * there, and needs no memory for that, for by now the caller's output may have been written to. */
template <bool UP>
static Status copy_by_turns(char *host, char *device, int64_t bytes, void *stream)
{
    char staging[16 << 10];
    Status status = stream_drain(stream);
    for (int64_t piece; bytes > 0 && status == STATUS_OK;
         host += piece, device += piece, bytes -= piece) {
        piece = bytes < (int64_t)sizeof staging ? bytes : (int64_t)sizeof staging;
        if (UP) memcpy(staging, host, (size_t)piece);
        status = copy_by_driver<UP>(staging, device, piece, stream);
        if (status == STATUS_OK) status = stream_drain(stream);
        if (!UP && status == STATUS_OK) memcpy(host, staging, (size_t)piece);
    }
    return status;
}

/* The driver refuses what reaches over the end of a lock. Where ours end is known, and where those
 * of others do, nobody can tell. */
template <bool UP>
static Status copy_stretch(char *host, char *device, int64_t bytes, void *stream)
{
    Status status = STATUS_OK;
    for (int64_t piece; bytes > 0 && status == STATUS_OK;
         host += piece, device += piece, bytes -= piece) {
        piece = pinned_stretch(host, bytes);
        status = copy_by_driver<UP>(host, device, piece, stream);
        if (status == STATUS_DEVICE_ERROR && last_failure()->cuda_code == cudaErrorInvalidValue)
            status = copy_by_turns<UP>(host, device, piece, stream);
    }
    return status;
}

/* Rings.
 *
 * The driver copies pageable memory with one thread, at a fraction of what the bus carries. A large
 * copy goes through a ring of page-locked buffers instead: while the copy engine of the GPU is at
 * work on some of them, worker threads fill, or empty, the others.
 *
 *     up      memory -> workers -> buffer -> copy engine -> device
 *     down    device -> copy engine -> buffer -> workers -> memory
 *
 * The bytes are cut into chunks, which take the buffers in turn, and chunks into slices, which the
 * workers take. The calling thread makes all calls of CUDA: it opens a chunk to the workers when
 * the event behind the buffer's last use has passed, and sends it, by the copy engine, when all its
 * slices are copied (down: the other way round). Between that it works on slices too, so that a
 * copy comes to its end also where the pool is taken, and there are no workers.
 *
 * The copies of one caller advance together: whoever waits for one of them goes on with all others
 * meanwhile, so that what comes down does not wait for what goes up.
 *
 * What goes up is written to the buffers by way of the caches, as far as these hold them, and the
 * copy engine reads it from there: the memory has no more to do than to be read. But of what one
 * processor has in a cache of its own, the engine reads some 20 GB/s only on the host of an
 * H200, and it reads a buffer from its begin to its end. So a slice is mostly no stretch of its
 * chunk but pieces from all over it, and neighbours lie in several caches: 16 MiB go up in 0.50 ms
 * and not in 0.93, 64 MiB in 1.50 and not in 1.82. What comes down goes around the caches, which
 * are to keep the buffers; the engine writes to the one that all processors share, and stretches do
 * as well.
 *
 * A ring is lent to one copy at a time. The last chunks of a copy up may still be on their way when
 * the ring is given back; whoever has it next waits for its events, buffer by buffer. */

#ifdef GPUOPS_FAKE_CUDA
/* Tests divide these sizes, so that small copies go through rings too. */
extern "C" int64_t fake_cuda_ring_bytes(int64_t bytes);
struct RingBytes {
    constexpr RingBytes(int64_t bytes) : bytes(bytes) {}
    operator int64_t() const { return fake_cuda_ring_bytes(bytes); }
    int64_t bytes;
};
#else
using RingBytes = int64_t;
#endif

constexpr int RING_BUFFERS = 8;   /* some with the workers, the others with the copy engine: */
constexpr int OPENED_BUFFERS = 4; /* so that nobody is idle while the last slices are copied */
static_assert(OPENED_BUFFERS < RING_BUFFERS, "the copy engine would have none");
/* Long enough for the bus to take little note of the gaps. Alone, the copy engine of an H200 sends
 * 48 GB/s up by copies of 1 MiB, 51 by those of 2 MiB, and 53 by these, of the 55 that the bus
 * carries. */
constexpr RingBytes BUFFER_BYTES = 4 << 20;
/* What a worker takes at a time: long against the taking, short against the wait for the last. */
constexpr RingBytes SLICE_BYTES = 128 << 10;
/* Of a slice that goes up. From 16 KiB on the engine is held up again; with less than 4 KiB the
 * worker is. */
constexpr RingBytes PIECE_BYTES = 8 << 10;
constexpr int MOST_WORKERS = 15; /* as many as both ways of the bus, or fresh memory, keep busy */
/* Where the bus is all that is waited for, fewer threads keep it busy. On the host of an H200 with
 * 16 processors 1 GiB comes down in 20 ms by 7 to 14 of them, and in 20.5 to 21 by 16; 16 MiB go up
 * in 0.50 to 0.52 by 10 to 16, and in 0.54 by 8. */
constexpr int MOST_WORKERS_OF_BUS = 12;
constexpr int64_t PATIENCE_MICROSECONDS = 1000; /* of who keeps workers from others */
constexpr int64_t LOOK_MICROSECONDS = 100000;   /* from one look of the watch to the next */
/* Below this, the driver's own way is faster than waking the workers. */
constexpr RingBytes LEAST_RING_BYTES = 2 << 20;
constexpr int LEAST_CHUNKS = 4; /* of a copy, so that short ones overlap as well */
/* Stores that go around the cache save it the reading of what they overwrite. */
constexpr int64_t LEAST_STREAMED_BYTES = 4 << 10;

/* Memory that nobody has touched yet costs a page fault for each page, and the kernel clears it.
 * The workers have it made ready in large pieces, ahead of what is written to it; each huge page by
 * one of them, for several at once would all clear the same. NumPy asks for huge pages itself. */
constexpr int64_t LEAST_POPULATED_BYTES = 4 << 20;
constexpr int64_t HUGE_PAGE_BYTES = 2 << 20;
constexpr int64_t POPULATED_AHEAD_BYTES = 128 << 20; /* where there is nothing else to do */
/* With less, whoever copied next would have to clear the page first, as others do. */
constexpr int64_t LEAST_AHEAD_BYTES = 16 << 20;

constexpr int64_t DEFAULT_PINNED_LIMIT = 256 << 20;
constexpr int64_t DIRECT_BYTES = 64 << 10; /* stretches that go to the driver without staging */

struct Ring {
    char *buffers;
    bool is_locked;
    int home;                         /* the device on which they were locked, for all of them */
    int device;                       /* whose copies it takes, and whose events these are: */
    cudaEvent_t events[RING_BUFFERS]; /* behind the last copy from or to each buffer, */
    bool pending[RING_BUFFERS];       /* which is not known to have passed */
    int64_t chunks;                   /* that have gone through it; also the next one's number */
    cudaStream_t stream;              /* of the last copy */
    bool unmarked;                    /* there may be work that no event tells the end of */
    Ring *next;
};

static struct {
    pthread_mutex_t lock;
    Ring *idle[MAX_DEVICES];
    int64_t bytes;    /* of all rings, idle or lent */
    int64_t again_at; /* in microseconds: CUDA has refused one more, and is not asked before */
} rings = {PTHREAD_MUTEX_INITIALIZER, {}, 0, 0};

static int64_t ring_bytes(void)
{
    return RING_BUFFERS * BUFFER_BYTES;
}

Status pinned_limit(int64_t *bytes)
{
    static int64_t known = -1; /* every thread would find the same, so a race is harmless */
    *bytes = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (*bytes >= 0) return STATUS_OK;
    const Status status = bytes_of_environment("GPUOPS_PINNED_LIMIT", DEFAULT_PINNED_LIMIT,
                                               "for no page-locked buffers", bytes);
    if (status == STATUS_OK) __atomic_store_n(&known, *bytes, __ATOMIC_RELAXED);
    return status;
}

/* A child has no use for it, and must not make copies of pages that the driver goes on to use. */
static bool keep_from_children(char *memory, bool keep)
{
    return madvise(memory, (size_t)ring_bytes(), keep ? MADV_DONTFORK : MADV_DOFORK) == 0;
}

static cudaError_t create_events(Ring *ring)
{
    cudaError_t code = cudaSuccess;
    for (int i = 0; i < RING_BUFFERS && code == cudaSuccess; i++)
        code = cudaEventCreateWithFlags(&ring->events[i], cudaEventDisableTiming);
    cuda_ignore(code);
    return code;
}

static void destroy_events(Ring *ring)
{
    for (int i = 0; i < RING_BUFFERS; i++) {
        if (ring->events[i] != NULL) cuda_ignore(cudaEventDestroy(ring->events[i]));
        ring->events[i] = NULL;
    }
}

static void unlock_buffers(Ring *ring)
{
    int previous;
    if (!ring->is_locked || !device_try_enter(ring->home, &previous)) return;
    const cudaError_t code = cudaHostUnregister(ring->buffers);
    cuda_ignore(code);
    ring->is_locked = code != cudaSuccess;
    device_leave(ring->home, previous);
}

/* What CUDA does not unlock, it may go on to use; and results are for children too. */
static void ring_destroy(Ring *ring)
{
    destroy_events(ring);
    unlock_buffers(ring);
    if (!ring->is_locked && keep_from_children(ring->buffers, false)) host_give(ring->buffers);
    free(ring);
}

static void touch_pages(void *memory, int64_t begin, int64_t end)
{
    constexpr int64_t LEAST_PAGE_BYTES = 4 << 10;
    char *pages = static_cast<char *>(memory);
    for (int64_t at = begin; at < end; at += LEAST_PAGE_BYTES) pages[at] = 0;
}

/* Several threads clear huge pages, and the driver locks these, in a quarter of the time that it
 * takes for memory of its own. */
static cudaError_t lock_buffers(Ring *ring)
{
    (void)keep_from_children(ring->buffers, true);
    parallel_for(ring_bytes(), HUGE_PAGE_BYTES, touch_pages, ring->buffers);
    const cudaError_t code =
        cudaHostRegister(ring->buffers, (size_t)ring_bytes(), cudaHostRegisterPortable);
    cuda_ignore(code);
    ring->is_locked = code == cudaSuccess;
    return code;
}

/* To lock buffers in vain takes as long as to lock them. */
static void put_off_rings(int64_t pause)
{
    pthread_mutex_lock(&rings.lock);
    rings.again_at = microseconds() + pause;
    pthread_mutex_unlock(&rings.lock);
}

/* NULL where there is no memory to be page-locked, or where CUDA fails. The events are the ring's
 * own: those of the store may still stand for the work of others. */
static Ring *ring_create(int device)
{
    constexpr int64_t PAUSE_MICROSECONDS = 1000000;
    Ring *ring = static_cast<Ring *>(calloc(1, sizeof *ring));
    if (ring == NULL) return NULL;
    ring->home = ring->device = device;
    ring->buffers = static_cast<char *>(host_take(ring_bytes()));
    if (ring->buffers == NULL) {
        free(ring);
        return NULL;
    }
    if (lock_buffers(ring) == cudaSuccess && create_events(ring) == cudaSuccess) return ring;
    ring_destroy(ring);
    put_off_rings(PAUSE_MICROSECONDS);
    return NULL;
}

/* To the device that is current, which has other events: nothing is on its way through the ring.
 * NULL where CUDA fails, and then the ring is gone. */
static Ring *ring_move(Ring *ring, int device)
{
    destroy_events(ring);
    ring->device = device;
    for (bool &pending : ring->pending) pending = false;
    if (create_events(ring) == cudaSuccess) return ring;
    ring_destroy(ring);
    return NULL;
}

/* Whether nothing is on its way through the ring. */
static bool ring_is_over(const Ring *ring)
{
    return !ring->unmarked &&
           event_is_over(ring->events[(ring->chunks + RING_BUFFERS - 1) % RING_BUFFERS]);
}

/* With the lock, as the three that follow: takes the ring that *link stands for out of its list;
 * NULL at the end of that. */
static Ring *take_out(Ring **link)
{
    Ring *ring = *link;
    if (ring != NULL) *link = ring->next;
    return ring;
}

static Ring **find_ring_that_is_over(int device)
{
    Ring **link = &rings.idle[device];
    while (*link != NULL && !ring_is_over(*link)) link = &(*link)->next;
    return link;
}

/* Who takes one of these waits for nothing but the work of the own stream, and so no stream that is
 * held up can hold up others. One that this stream has used is taken first, so that streams that
 * take turns do not end up with more rings than they use at once. */
static Ring **find_ring(int device, cudaStream_t stream)
{
    Ring **link = &rings.idle[device];
    const auto is_own = [&](const Ring *ring) {
        return ring->stream == stream && stream != cudaStreamPerThread && !ring->unmarked;
    };
    while (*link != NULL && !is_own(*link)) link = &(*link)->next;
    return *link != NULL ? link : find_ring_that_is_over(device);
}

/* As another device may have had them all, and have no use for them now. */
static Ring **find_ring_elsewhere(int device)
{
    Ring **link = NULL;
    for (int i = 0; i < MAX_DEVICES && (link == NULL || *link == NULL); i++)
        if (i != device) link = find_ring_that_is_over(i);
    return link;
}

static void room_for_one_more(void)
{
    pthread_mutex_lock(&rings.lock);
    rings.bytes -= ring_bytes();
    pthread_mutex_unlock(&rings.lock);
}

/* One of the device's; or *grows: one more is allowed, whose bytes have been counted; or else one
 * of another device's; NULL where all are in use. */
static Ring *ring_take(int device, cudaStream_t stream, int64_t limit, bool *grows)
{
    pthread_mutex_lock(&rings.lock);
    Ring **link = find_ring(device, stream);
    const bool is_allowed = rings.bytes + ring_bytes() <= limit;
    *grows = is_allowed && *link == NULL && microseconds() >= rings.again_at;
    if (*link == NULL && !*grows) link = find_ring_elsewhere(device);
    Ring *ring = take_out(link);
    if (*grows) rings.bytes += ring_bytes();
    pthread_mutex_unlock(&rings.lock);
    return ring;
}

static void ring_give(Ring *ring)
{
    pthread_mutex_lock(&rings.lock);
    ring->next = rings.idle[ring->device];
    rings.idle[ring->device] = ring;
    pthread_mutex_unlock(&rings.lock);
}

/* Waits for all that is at work on the device, which is current, if nobody knows the end of what
 * goes through rings of its; false: there are none such, or none that are over now. */
static bool settle_rings(int device)
{
    Ring *unmarked = NULL;
    pthread_mutex_lock(&rings.lock);
    for (Ring **link = &rings.idle[device]; *link != NULL;) {
        if ((*link)->unmarked) {
            Ring *ring = take_out(link);
            ring->next = unmarked;
            unmarked = ring;
        } else {
            link = &(*link)->next;
        }
    }
    pthread_mutex_unlock(&rings.lock);
    const bool is_over = unmarked != NULL && device_await(device);
    while (unmarked != NULL) {
        Ring *ring = unmarked;
        unmarked = ring->next;
        ring->unmarked = !is_over;
        ring_give(ring);
    }
    return is_over;
}

static Ring *take_one_that_is_over(int device)
{
    pthread_mutex_lock(&rings.lock);
    Ring *ring = take_out(find_ring_that_is_over(device));
    pthread_mutex_unlock(&rings.lock);
    return ring;
}

void transfer_flush(int device)
{
    in_spite_of_captures([&] {
        (void)settle_rings(device);
        while (Ring *ring = take_one_that_is_over(device)) {
            ring_destroy(ring);
            room_for_one_more();
        }
        put_off_rings(0);
    });
}

struct Transfer;

/* A caller and the workers, with the copies that they make at once. What they share is behind the
 * lock. Workers who find nothing to do leave, and are called again: so at its end a copy has to
 * wait for none of them to wake up, which has taken as long as the copy itself. */
struct Crew {
    pthread_mutex_t lock = BRIEF_MUTEX_INITIALIZER;
    pthread_cond_t done = PTHREAD_COND_INITIALIZER; /* a chunk has no slices left */
    Transfer *first = NULL;  /* of the copies, in the order in which they were begun */
    int64_t slices_left = 0; /* of all of them: opened, and not copied yet */
    int helpers = 0;         /* workers who have not found yet that there is nothing to do */
    bool over = false;       /* the workers are to leave */
    char *populated = NULL, *populated_end = NULL; /* what is still to be made ready */
    char *reached = NULL;                          /* where the last slice begins */

    bool helped = false; /* the caller's alone: the crew has the pool, */
    Watch *watch = NULL; /* and somebody who may end a wait for what is queued before it */
};

/* One copy. Of the counts of chunks, which are the caller's alone, each one follows the one before:
 * up they are opened, copied and sent, down sent, opened and copied. The slices are behind the lock
 * of the crew. */
struct Transfer {
    Crew *crew;
    Transfer *next;
    bool up;
    Box box;
    int64_t begin, bytes; /* of the packed box */
    MakeBytes make;       /* what takes the place of a box, or NULL */
    void *context;
    char *device;
    cudaStream_t stream;
    int ordinal; /* of the device */
    Ring *ring;
    int64_t chunk_bytes, chunks;
    int64_t piece_bytes; /* of slices */
    void (*copy_slice)(const Transfer &, int64_t);

    int64_t sent;   /* chunks that the copy engine has or had */
    int64_t opened; /* that the workers may have or had */
    int64_t copied; /* of which no slice is left */

    int64_t opened_slices, taken_slices;
    int64_t slices_left[RING_BUFFERS]; /* of each buffer, that are not copied yet */
};

static int buffer_of(const Transfer &transfer, int64_t chunk)
{
    return static_cast<int>((transfer.ring->chunks + chunk) % RING_BUFFERS);
}

static char *place_in_ring(const Transfer &transfer, int64_t chunk)
{
    return transfer.ring->buffers + buffer_of(transfer, chunk) * BUFFER_BYTES;
}

template <bool PACK>
static void copy_bytes(char *target, const char *source, int64_t bytes)
{
    if (PACK || bytes < LEAST_STREAMED_BYTES)
        memcpy(target, source, (size_t)bytes);
    else
        copy_streamed(target, source, bytes);
}

/* The bytes begin..end of the packed box, which may begin and end within an item. */
template <bool PACK>
static void box_copy_bytes(const Box &box, int64_t begin, int64_t end, char *packed)
{
    while (begin < end) {
        const int64_t item = begin / box.item_bytes, offset = begin % box.item_bytes;
        const int64_t whole = offset == 0 ? (end - begin) / box.item_bytes : 0;
        int64_t bytes;
        if (whole > 0 && box.item_bytes < LEAST_STREAMED_BYTES) {
            bytes = whole * box.item_bytes;
            box_copy<PACK>(box, item, item + whole, packed);
        } else {
            bytes = smaller(box.item_bytes - offset, end - begin);
            char *place = box_place(box, item) + offset;
            copy_bytes<PACK>(PACK ? packed : place, PACK ? place : packed, bytes);
        }
        begin += bytes;
        packed += bytes;
    }
}

static int64_t bytes_of_chunk(const Transfer &transfer, int64_t chunk)
{
    return smaller(transfer.chunk_bytes, transfer.bytes - chunk * transfer.chunk_bytes);
}

static int64_t slices_of_chunk(const Transfer &transfer, int64_t chunk)
{
    return (bytes_of_chunk(transfer, chunk) + SLICE_BYTES - 1) / SLICE_BYTES;
}

static int64_t chunk_of_slice(const Transfer &transfer, int64_t slice)
{
    return slice * SLICE_BYTES / transfer.chunk_bytes;
}

/* Of as many pieces as the chunk has slices, one is this one's. Where pieces are as long as slices,
 * that is a stretch. */
template <class Copy>
static void for_pieces(const Transfer &transfer, int64_t slice, Copy copy)
{
    const int64_t chunk = chunk_of_slice(transfer, slice);
    const int64_t first = chunk * transfer.chunk_bytes, bytes = bytes_of_chunk(transfer, chunk);
    const int64_t piece = transfer.piece_bytes;
    const int64_t step = slices_of_chunk(transfer, chunk) * piece;
    char *place = place_in_ring(transfer, chunk);
    for (int64_t at = (slice - first / SLICE_BYTES) * piece; at < bytes; at += step)
        copy(first + at, first + smaller(at + piece, bytes), place + at);
}

template <bool UP>
static void copy_slice(const Transfer &transfer, int64_t slice)
{
    const int64_t ahead = transfer.begin;
    for_pieces(transfer, slice, [&](int64_t begin, int64_t end, char *packed) {
        box_copy_bytes<UP>(transfer.box, ahead + begin, ahead + end, packed);
    });
}

static void make_slice(const Transfer &transfer, int64_t slice)
{
    for_pieces(transfer, slice, [&](int64_t begin, int64_t end, char *place) {
        transfer.make(transfer.context, begin, end, place);
    });
}

/* Where in the memory a slice begins. */
static char *place_of_slice(const Transfer &transfer, int64_t slice)
{
    const int64_t at = transfer.begin + slice * SLICE_BYTES;
    return box_place(transfer.box, at / transfer.box.item_bytes) + at % transfer.box.item_bytes;
}

/* With the lock, which is dropped meanwhile; so is it in populate. */
static void take_slice(Transfer *transfer)
{
    Crew *crew = transfer->crew;
    const int64_t slice = transfer->taken_slices++;
    if (!transfer->up) {
        char *place = place_of_slice(*transfer, slice);
        if (place > crew->reached) crew->reached = place;
    }
    pthread_mutex_unlock(&crew->lock);
    transfer->copy_slice(*transfer, slice);
    pthread_mutex_lock(&crew->lock);
    crew->slices_left--;
    const int buffer = buffer_of(*transfer, chunk_of_slice(*transfer, slice));
    if (--transfer->slices_left[buffer] == 0) pthread_cond_signal(&crew->done);
}

static Transfer *find_slice(const Crew &crew, bool up)
{
    Transfer *transfer = crew.first;
    while (transfer != NULL &&
           (transfer->up != up || transfer->taken_slices == transfer->opened_slices))
        transfer = transfer->next;
    return transfer;
}

/* How much is ready, or about to be, of the memory that is written to next. */
static int64_t populated_ahead(Crew *crew)
{
    const int64_t passed = crew->reached - crew->populated; /* and written to, without help */
    if (passed > 0) crew->populated += passed / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    return crew->populated < crew->populated_end ? crew->populated - crew->reached : INT64_MAX;
}

static void populate(Crew *crew)
{
    char *page = crew->populated;
    const int64_t bytes = smaller(crew->populated_end - page, HUGE_PAGE_BYTES);
    crew->populated += bytes;
    pthread_mutex_unlock(&crew->lock);
    constexpr int POPULATE_WRITE = 23; /* MADV_POPULATE_WRITE, of Linux 5.14: not in all headers */
    (void)madvise(page, (size_t)bytes, POPULATE_WRITE);
    pthread_mutex_lock(&crew->lock);
}

/* With the lock. What goes up comes first, since the bus, and then the kernels, wait for it. False:
 * there is nothing to do. */
static bool do_some_work(Crew *crew)
{
    Transfer *up = find_slice(*crew, true), *down = find_slice(*crew, false);
    const int64_t ahead = populated_ahead(crew);
    if (up != NULL)
        take_slice(up);
    else if (down != NULL && ahead >= LEAST_AHEAD_BYTES)
        take_slice(down);
    else if (ahead < POPULATED_AHEAD_BYTES)
        populate(crew);
    else
        return false;
    return true;
}

static void help(void *context, int64_t, int64_t)
{
    Crew *crew = static_cast<Crew *>(context);
    pthread_mutex_lock(&crew->lock);
    crew->helpers++;
    while (!crew->over && do_some_work(crew)) continue;
    crew->helpers--;
    pthread_mutex_unlock(&crew->lock);
}

/* Takes a slice, or waits for those that others have taken; false: there are none. */
static bool work_on_slices(Crew *crew)
{
    pthread_mutex_lock(&crew->lock);
    const bool any = crew->slices_left > 0;
    Transfer *transfer = find_slice(*crew, true);
    if (transfer == NULL) transfer = find_slice(*crew, false);
    if (transfer != NULL)
        take_slice(transfer);
    else if (any)
        pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    return any;
}

/* With the lock. Whether all copies go one way, between the bus and memory that is there and has no
 * gaps: nothing else takes as long as the bus does. */
static bool waits_for_bus(const Crew &crew)
{
    if (crew.populated < crew.populated_end) return false;
    for (const Transfer *transfer = crew.first; transfer != NULL; transfer = transfer->next)
        if (transfer->make != NULL || transfer->box.ndim > 0 || transfer->up != crew.first->up)
            return false;
    return true;
}

/* To what is opened. Whoever finds them taken works alone, and tries again with the next chunk. */
static void call_workers(Crew *crew)
{
    if (!crew->helped) crew->helped = parallel_begin(help, crew);
    if (!crew->helped) return;
    pthread_mutex_lock(&crew->lock);
    const int64_t most = waits_for_bus(*crew) ? MOST_WORKERS_OF_BUS : MOST_WORKERS;
    const int missing = static_cast<int>(smaller(crew->slices_left, most)) - crew->helpers;
    pthread_mutex_unlock(&crew->lock);
    if (missing > 0) parallel_call(missing);
}

static void dismiss_workers(Crew *crew)
{
    if (!crew->helped) return;
    pthread_mutex_lock(&crew->lock);
    crew->over = true;
    pthread_mutex_unlock(&crew->lock);
    parallel_end();
    crew->over = crew->helped = false;
}

static bool is_there(char *page)
{
    unsigned char resident;
    return mincore(page, 1, &resident) == 0 && (resident & 1) != 0;
}

/* Fresh memory has no gaps, and neither has what is made ready. That of results which are gone, and
 * most of what is given, is there already; one page is taken to tell of as much as has to be ready
 * before anything is written. */
static void expect(Crew *crew, char *begin, int64_t bytes)
{
    if (bytes < LEAST_POPULATED_BYTES) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    const uintptr_t first = (address + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    const uintptr_t last = (address + bytes) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    crew->populated = reinterpret_cast<char *>(first);
    crew->populated_end = reinterpret_cast<char *>(last);
    crew->reached = begin;
    while (crew->populated < crew->populated_end && is_there(crew->populated))
        crew->populated += smaller(crew->populated_end - crew->populated, LEAST_AHEAD_BYTES);
}

/* Whether the last copy from or to the buffer of a chunk is over. */
static Status look_at_buffer(const Transfer &transfer, int64_t chunk, bool *is_free)
{
    bool *pending = &transfer.ring->pending[buffer_of(transfer, chunk)];
    if (*pending) {
        const cudaError_t code = cudaEventQuery(transfer.ring->events[buffer_of(transfer, chunk)]);
        if (code != cudaSuccess && code != cudaErrorNotReady)
            return cuda_status(code, "cudaEventQuery");
        cuda_ignore(code);
        *pending = code == cudaErrorNotReady;
    }
    *is_free = !*pending;
    return STATUS_OK;
}

static Status await_buffer(const Transfer &transfer, int64_t chunk)
{
    const int buffer = buffer_of(transfer, chunk);
    const Status status =
        event_await(transfer.ring->events[buffer], transfer.ordinal, transfer.crew->watch);
    transfer.ring->pending[buffer] = status != STATUS_OK;
    return status;
}

static void open_chunk(Transfer *transfer)
{
    Crew *crew = transfer->crew;
    const int64_t chunk = transfer->opened++;
    const int64_t slices = slices_of_chunk(*transfer, chunk);
    pthread_mutex_lock(&crew->lock);
    crew->slices_left += slices;
    transfer->opened_slices += slices;
    transfer->slices_left[buffer_of(*transfer, chunk)] = slices;
    pthread_mutex_unlock(&crew->lock);
    call_workers(crew);
}

/* Hands a chunk to the copy engine. */
static Status send_chunk(Transfer *transfer)
{
    const int64_t chunk = transfer->sent++;
    const int buffer = buffer_of(*transfer, chunk);
    char *place = place_in_ring(*transfer, chunk);
    char *device = transfer->device + chunk * transfer->chunk_bytes;
    const int64_t bytes = bytes_of_chunk(*transfer, chunk);
    Status status = transfer->up ? copy_stretch<true>(place, device, bytes, transfer->stream)
                                 : copy_stretch<false>(place, device, bytes, transfer->stream);
    if (status != STATUS_OK) return status;
    CUDA_TRY(cudaEventRecord(transfer->ring->events[buffer], transfer->stream));
    transfer->ring->pending[buffer] = true;
    return STATUS_OK;
}

static void count_copied(Transfer *transfer)
{
    pthread_mutex_lock(&transfer->crew->lock);
    while (transfer->copied < transfer->opened &&
           transfer->slices_left[buffer_of(*transfer, transfer->copied)] == 0)
        transfer->copied++;
    pthread_mutex_unlock(&transfer->crew->lock);
}

/* Sends and opens what can be without waiting. */
static Status advance(Transfer *transfer, bool *moved)
{
    count_copied(transfer);
    const int64_t chunks = transfer->chunks, copied = transfer->copied;
    const int64_t sent = transfer->up ? copied : smaller(copied + RING_BUFFERS, chunks);
    bool is_free = true;
    Status status = STATUS_OK;
    while (transfer->sent < sent) {
        status = look_at_buffer(*transfer, transfer->sent, &is_free);
        if (status == STATUS_OK && is_free) status = send_chunk(transfer);
        if (status != STATUS_OK || !is_free) break;
        *moved = true;
    }
    const int64_t opened = smaller(copied + OPENED_BUFFERS, transfer->up ? chunks : transfer->sent);
    while (transfer->opened < opened && status == STATUS_OK) {
        status = look_at_buffer(*transfer, transfer->opened, &is_free);
        if (status != STATUS_OK || !is_free) break;
        open_chunk(transfer);
        *moved = true;
    }
    return status;
}

/* A copy that fails ends all of them. */
static Status advance_all(Crew *crew, bool *moved)
{
    Status status = STATUS_OK;
    for (Transfer *transfer = crew->first; transfer != NULL && status == STATUS_OK;
         transfer = transfer->next)
        status = advance(transfer, moved);
    return status;
}

static bool is_sent(const Transfer &transfer)
{
    return transfer.sent == transfer.chunks;
}

static bool is_over(const Transfer &transfer)
{
    return is_sent(transfer) && transfer.copied == transfer.chunks;
}

/* Nobody who looks is to find the workers taken: it may be for the GIL, and run any code. */
static Status look_for_signals(Crew *crew, int device)
{
    dismiss_workers(crew);
    return runtime_is_leaving() ? STATUS_OK : ask_watch(crew->watch, device, 0, 0);
}

/* Advances all copies until one has come so far. The GPU may have other work to do before that, for
 * any time: others can have the workers meanwhile. */
static Status run_until(bool (*has_come)(const Transfer &), Transfer *transfer)
{
    Crew *crew = transfer->crew;
    int64_t begin = microseconds(), looked = begin;
    for (;;) {
        bool moved = false;
        Status status = in_spite_of_captures([&] { return advance_all(crew, &moved); });
        if (status != STATUS_OK || has_come(*transfer)) return status;
        if (crew->watch != NULL && microseconds() - looked >= LOOK_MICROSECONDS) {
            status = look_for_signals(crew, transfer->ordinal);
            if (status != STATUS_OK) return status;
            looked = microseconds();
            continue; /* with what workers have copied until they were dismissed */
        }
        if (!moved && !work_on_slices(crew)) {
            if (microseconds() - begin < PATIENCE_MICROSECONDS) continue;
            if (crew->helped) { /* workers may have copied the last slices since that look */
                dismiss_workers(crew);
                continue;
            }
            /* All that was opened is copied, so it is the next buffer that this copy waits for. */
            status = await_buffer(*transfer, transfer->opened);
            if (status != STATUS_OK) return status;
        }
        begin = microseconds();
    }
}

static int64_t piece_of(const Transfer &transfer)
{
    if (!transfer.up) return SLICE_BYTES;
    /* One worker is to read each line once. */
    if (transfer.make == NULL) return box_lies_across(transfer.box) ? SLICE_BYTES : PIECE_BYTES;
    /* These make rows hardly faster than the engine reads stretches of them, and stretches sooner:
     * of those, more rows are asked for ahead. */
    constexpr int FEW_THREADS = 2;
    int threads;
    if (cpu_threads(&threads) != STATUS_OK) threads = 1;
    return threads <= FEW_THREADS ? SLICE_BYTES : PIECE_BYTES;
}

static void begin_transfer(Transfer *transfer)
{
    const int64_t bytes = transfer->bytes;
    transfer->copy_slice = transfer->make != NULL ? make_slice
                           : transfer->up         ? copy_slice<true>
                                                  : copy_slice<false>;
    transfer->piece_bytes = piece_of(*transfer);
    const int64_t slices = (bytes + LEAST_CHUNKS * SLICE_BYTES - 1) / (LEAST_CHUNKS * SLICE_BYTES);
    transfer->chunk_bytes = smaller(slices * SLICE_BYTES, BUFFER_BYTES);
    transfer->chunks = (bytes + transfer->chunk_bytes - 1) / transfer->chunk_bytes;
    Crew *crew = transfer->crew;
    pthread_mutex_lock(&crew->lock);
    Transfer **link = &crew->first;
    while (*link != NULL) link = &(*link)->next;
    *link = transfer;
    pthread_mutex_unlock(&crew->lock);
}

/* Whatever came of it: no worker is at it any more, and the ring is given back. */
static Status end_transfer(Transfer *transfer, Status status)
{
    if (runtime_is_forked()) return status; /* somebody who was asked has done that */
    Crew *crew = transfer->crew;
    Ring *ring = transfer->ring;
    if (status != STATUS_OK) dismiss_workers(crew);
    pthread_mutex_lock(&crew->lock);
    Transfer **link = &crew->first;
    while (*link != transfer) link = &(*link)->next;
    *link = transfer->next;
    pthread_mutex_unlock(&crew->lock);

    ring->chunks += transfer->sent;
    ring->stream = transfer->stream;
    /* A wait that is given up is one in which all that was sent has its event. */
    if (status != STATUS_OK && status != STATUS_INTERRUPTED) {
        /* What is queued may have no event behind it. */
        status = even_so(status, [&] {
            const Status last = stream_drain(transfer->stream);
            ring->unmarked = last != STATUS_OK;
            return last;
        });
    }
    ring_give(ring);
    return status;
}

/* One that is there, of this or another device, or a new one, for which the workers have to be
 * free to clear its pages. */
static Ring *find_or_create_ring(Crew *crew, int device, cudaStream_t stream, int64_t limit)
{
    bool grows;
    Ring *ring = ring_take(device, stream, limit, &grows);
    if (ring == NULL && !grows && settle_rings(device))
        ring = ring_take(device, stream, limit, &grows);
    if (grows) {
        dismiss_workers(crew);
        ring = ring_create(device);
    } else if (ring != NULL && ring->device != device) {
        ring = ring_move(ring, device);
    } else {
        return ring;
    }
    if (ring == NULL) room_for_one_more();
    return ring;
}

static bool is_captured(cudaStream_t stream)
{
    if (stream == 0) return false; /* it cannot be */
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(stream, &capture);
    cuda_ignore(code);
    return code != cudaSuccess || capture != cudaStreamCaptureStatusNone;
}

/* The ring is NULL, and all else as it was, where the copy is not worth one, or there is none. */
static Status lend_ring(Transfer *transfer, Crew *crew, int64_t bytes, char *device,
                        cudaStream_t stream)
{
    transfer->ring = NULL;
    int64_t limit;
    Status status = pinned_limit(&limit); /* a wrong one is told by small copies too */
    if (status != STATUS_OK || bytes < LEAST_RING_BYTES || limit < ring_bytes()) return status;
    if (is_captured(stream)) return STATUS_OK;
    int current;
    const cudaError_t code = cudaGetDevice(&current);
    cuda_ignore(code);
    if (code != cudaSuccess) return STATUS_OK;
    Ring *ring = NULL;
    in_spite_of_captures([&] { ring = find_or_create_ring(crew, current, stream, limit); });
    if (ring == NULL) return STATUS_OK;
    *transfer = {};
    transfer->crew = crew;
    transfer->bytes = bytes;
    transfer->device = device;
    transfer->stream = stream;
    transfer->ordinal = current;
    transfer->ring = ring;
    return STATUS_OK;
}

/* Of the packed box, the bytes that follow begin. */
static Status open_transfer(Transfer *transfer, Crew *crew, const Box &box, int64_t begin,
                            int64_t bytes, char *device, cudaStream_t stream)
{
    transfer->ring = NULL;
    const bool is_direct = box.ndim == 0 || box.item_bytes >= DIRECT_BYTES;
    if (bytes >= LEAST_RING_BYTES && is_direct &&
        host_memory_is_pinned(box_place(box, begin / box.item_bytes)))
        return STATUS_OK;
    Status status = lend_ring(transfer, crew, bytes, device, stream);
    if (transfer->ring == NULL) return status;
    transfer->box = box;
    transfer->begin = begin;
    return status;
}

/* All of a copy by the ring that it was lent. */
static Status use_ring(Transfer *transfer, bool keeps_workers)
{
    begin_transfer(transfer);
    const Status status = run_until(is_over, transfer);
    if (!keeps_workers) dismiss_workers(transfer->crew);
    return end_transfer(transfer, status);
}

/* Sets *done if there was a ring for the copy: otherwise nothing has been done. */
template <bool UP>
static Status ring_transfer(const Box &box, int64_t begin, int64_t bytes, char *device,
                            cudaStream_t stream, Crew *shared, Watch *watch, bool *done)
{
    Crew own;
    own.watch = watch;
    Transfer transfer;
    Status status =
        open_transfer(&transfer, shared == NULL ? &own : shared, box, begin, bytes, device, stream);
    *done = transfer.ring != NULL;
    if (!*done) return status;
    transfer.up = UP;
    if (!UP && box.ndim == 0) expect(&own, box.base + begin, bytes);
    return use_ring(&transfer, shared != NULL);
}

/* The driver's way. */

constexpr int64_t STAGING_BYTES = 4 << 20;

/* Of what it takes from pageable memory the driver keeps little until the stream comes to that, and
 * pieces go one by one: nobody could call either back. */
static Status await_before_driver(int64_t bytes, bool in_pieces, Stream *stream, Watch *watch)
{
    const bool is_awaited = watch != NULL && (in_pieces || bytes >= LEAST_RING_BYTES);
    return is_awaited ? stream_await(stream, watch) : STATUS_OK;
}

/* Items that go one by one. Callers look whether the first of what goes up is page-locked, and wait
 * then; where it is not, but others have locked some that follow, this has to. */
template <bool UP>
static Status copy_stretches(const Box &box, int64_t begin, int64_t end, char *device, void *stream)
{
    const bool is_known = !UP || host_memory_is_pinned(box_place(box, begin));
    bool goes_on = false;
    Status status = STATUS_OK;
    for (int64_t item = begin; item < end && status == STATUS_OK; item++) {
        char *place = box_place(box, item);
        goes_on = goes_on || (!is_known && host_memory_is_pinned(place));
        status = copy_stretch<UP>(place, device, box.item_bytes, stream);
        device += box.item_bytes;
    }
    return goes_on ? even_so(status, [&] { return stream_drain(stream); }) : status;
}

/* The watch, if there is one, is asked on behalf of who waits for the stream that is awaited. */
template <bool UP>
static Status box_transfer(const Box &box, int64_t begin, int64_t end, char *device, void *stream,
                           Crew *crew = NULL, Stream *awaited = NULL, Watch *watch = NULL)
{
    if (begin >= end) return STATUS_OK;
    Box merged = box_merged(box);
    const int64_t all = (end - begin) * box.item_bytes;
    bool done = false;
    Status status = ring_transfer<UP>(merged, begin * box.item_bytes, all, device,
                                      static_cast<cudaStream_t>(stream), crew, watch, &done);
    const bool is_staged = merged.ndim > 0 && merged.item_bytes < DIRECT_BYTES;
    if (!done && status == STATUS_OK) status = await_before_driver(all, is_staged, awaited, watch);
    if (done || status != STATUS_OK) return status;
    int64_t ratio = merged.item_bytes / box.item_bytes;
    if (merged.ndim == 0)
        return copy_stretch<UP>(merged.base + begin * box.item_bytes, device,
                                (end - begin) * box.item_bytes, stream);
    if (begin % ratio != 0 || end % ratio != 0) {
        merged = box; /* the range begins or ends inside a merged item */
        ratio = 1;
    }
    begin /= ratio;
    end /= ratio;
    int64_t bytes = merged.item_bytes;

    int64_t piece = STAGING_BYTES / bytes;
    if (piece > end - begin) piece = end - begin;
    char *staging =
        bytes < DIRECT_BYTES ? static_cast<char *>(malloc((size_t)(piece * bytes))) : NULL;

    /* Long stretches need no staging; short ones do without it where there is no memory left, for
     * by now the caller's output may have been written to. */
    if (staging == NULL) return copy_stretches<UP>(merged, begin, end, device, stream);
    for (int64_t item = begin; item < end && status == STATUS_OK; item += piece) {
        if (piece > end - item) piece = end - item;
        if (UP) box_copy_parallel<true>(merged, item, item + piece, staging);
        status = copy_stretch<UP>(staging, device, piece * bytes, stream);
        if (status == STATUS_OK) status = stream_drain(stream);
        if (!UP && status == STATUS_OK)
            box_copy_parallel<false>(merged, item, item + piece, staging);
        device += piece * bytes;
    }
    free(staging);
    return status;
}

Status copy_to_host(void *host, const void *device, int64_t bytes, void *stream)
{
    const Box box = {static_cast<char *>(host), bytes, 0, {}, {}};
    char *source = static_cast<char *>(const_cast<void *>(device));
    return box_transfer<false>(box, 0, 1, source, stream);
}

Status box_upload(const Box &box, int64_t begin, int64_t end, void *device, Stream *stream,
                  Watch *watch)
{
    return box_transfer<true>(box, begin, end, static_cast<char *>(device), stream->handle, NULL,
                              stream, watch);
}

Status box_download(const Box &box, void *device, void *stream)
{
    return box_transfer<false>(box, 0, box_items(box), static_cast<char *>(device), stream);
}

struct MadePiece {
    MakeBytes make;
    void *context;
    int64_t first;
    char *staging;
};

static void make_range(void *context, int64_t begin, int64_t end)
{
    const MadePiece &piece = *static_cast<const MadePiece *>(context);
    piece.make(piece.context, piece.first + begin, piece.first + end, piece.staging + begin);
}

/* The driver has taken a copy of what is staged when it returns, for that is not page-locked. */
static Status upload_staged(MakeBytes make, void *context, int64_t bytes, char *device,
                            void *stream)
{
    const int64_t most = smaller(bytes, STAGING_BYTES);
    char *staging = static_cast<char *>(malloc((size_t)most));
    if (staging == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for a copy",
                    (long long)most);
    Status status = STATUS_OK;
    for (int64_t done = 0; done < bytes && status == STATUS_OK; done += most) {
        const int64_t count = smaller(most, bytes - done);
        MadePiece piece = {make, context, done, staging};
        parallel_for(count, SLICE_BYTES, make_range, &piece);
        status = copy_stretch<true>(staging, device + done, count, stream);
    }
    free(staging);
    return status;
}

Status made_upload(MakeBytes make, void *context, int64_t bytes, void *device, Stream *stream,
                   Watch *watch)
{
    Crew crew;
    crew.watch = watch;
    Transfer transfer;
    char *target = static_cast<char *>(device);
    Status status = lend_ring(&transfer, &crew, bytes, target, stream->handle);
    if (status == STATUS_OK && transfer.ring == NULL)
        status = await_before_driver(bytes, false, stream, watch);
    if (status != STATUS_OK) return status;
    if (transfer.ring == NULL) return upload_staged(make, context, bytes, target, stream->handle);
    transfer.up = true;
    transfer.make = make;
    transfer.context = context;
    return use_ring(&transfer, false);
}

/* Both ways at once. */

constexpr int MOST_BEGUN = 2;

struct Traffic {
    Crew crew;
    struct {
        Transfer transfer; /* without a ring: */
        Box box;
        void *device, *stream;
        bool is_sent; /* all that there is to do has been done, or queued */
    } down[MOST_BEGUN];
    int64_t begun, ended;
};

Status traffic_open(Traffic **traffic)
{
    *traffic = static_cast<Traffic *>(calloc(1, sizeof **traffic));
    if (*traffic == NULL) return fail(STATUS_MEMORY_ERROR, "out of host memory for copies");
    (*traffic)->crew = Crew();
    return STATUS_OK;
}

Status traffic_up(Traffic *traffic, const Box &box, void *device, void *stream)
{
    return box_transfer<true>(box, 0, box_items(box), static_cast<char *>(device), stream,
                              &traffic->crew);
}

void traffic_expect(Traffic *traffic, void *host, int64_t bytes)
{
    expect(&traffic->crew, static_cast<char *>(host), bytes);
}

void traffic_pause(Traffic *traffic)
{
    dismiss_workers(&traffic->crew);
}

static Status end_first_down(Traffic *traffic)
{
    auto &down = traffic->down[traffic->ended++ % MOST_BEGUN];
    if (down.is_sent) return STATUS_OK;
    if (down.transfer.ring == NULL) return box_download(down.box, down.device, down.stream);
    return end_transfer(&down.transfer, run_until(is_over, &down.transfer));
}

Status traffic_begin_down(Traffic *traffic, const Box &box, void *device, void *stream)
{
    Status status = STATUS_OK;
    if (traffic->begun - traffic->ended == MOST_BEGUN) status = end_first_down(traffic);
    if (status != STATUS_OK) return status;
    auto &down = traffic->down[traffic->begun % MOST_BEGUN];
    const Box merged = box_merged(box);
    down.box = box;
    down.device = device;
    down.stream = stream;
    down.is_sent = false;
    status =
        open_transfer(&down.transfer, &traffic->crew, merged, 0, box_items(box) * box.item_bytes,
                      static_cast<char *>(device), static_cast<cudaStream_t>(stream));
    if (status != STATUS_OK) return status;
    traffic->begun++;
    if (down.transfer.ring != NULL) {
        bool moved = false;
        begin_transfer(&down.transfer);
        status = in_spite_of_captures([&] { return advance(&down.transfer, &moved); });
    } else if (host_memory_is_pinned(merged.base)) {
        down.is_sent = true;
        status = box_download(box, device, stream);
    }
    return status;
}

Status traffic_queue_down(Traffic *traffic)
{
    if (traffic->begun == traffic->ended) return STATUS_OK;
    auto &down = traffic->down[(traffic->begun - 1) % MOST_BEGUN];
    Status status = STATUS_OK;
    if (down.transfer.ring != NULL) {
        status = run_until(is_sent, &down.transfer);
    } else if (!down.is_sent) {
        down.is_sent = true;
        status = box_download(down.box, down.device, down.stream);
    }
    return status;
}

Status traffic_end_down(Traffic *traffic)
{
    Status status = STATUS_OK;
    while (traffic->ended < traffic->begun && status == STATUS_OK) status = end_first_down(traffic);
    return status;
}

Status traffic_close(Traffic *traffic, Status status)
{
    dismiss_workers(&traffic->crew);
    for (; traffic->ended < traffic->begun; traffic->ended++) {
        Transfer *transfer = &traffic->down[traffic->ended % MOST_BEGUN].transfer;
        if (transfer->ring != NULL) status = end_transfer(transfer, status);
    }
    free(traffic);
    return status;
}

#endif
