/* Page-locked memory for the operands of small calls between arrays on the host, and for small
 * copies to the host.
 *
 * What takes time in such a call are not its bytes but the calls of CUDA: a copy takes the driver
 * about as long as a launch does, and memory that is not page-locked has it wait each time. So the
 * CPU copies the operands to a slab and the result from it, the kernel reads and writes them there
 * over the bus, and nothing is left to do but a launch and a wait.
 *
 * A slab is lent to one call at a time, which gives it back once it has waited for its kernels. A
 * copy may be given up before: its slab is lent again when that is over. */
#include "slab.cuh"
#include "transfer.cuh"

#include <pthread.h>
#include <stdlib.h>

#ifdef __CUDACC__

/* For more than this, the copy engine is faster than kernels that read over the bus. */
constexpr int64_t SLAB_BYTES = 64 << 10;
/* Of a device. When more calls go on at a time, the others do without. */
constexpr int MOST_SLABS = 16;

#ifdef GPUOPS_FAKE_CUDA
/* Tests let small calls go the way of those that no slab has room for. */
extern "C" int64_t fake_cuda_slab_bytes(int64_t bytes);
static int64_t most_bytes(void)
{
    return fake_cuda_slab_bytes(SLAB_BYTES);
}
#else
static int64_t most_bytes(void)
{
    return SLAB_BYTES;
}
#endif

static struct {
    pthread_mutex_t lock;
    struct {
        Slab *idle;
        Slab *doubtful; /* something may still be at work on them */
        int count;      /* of all, idle or not */
    } devices[MAX_DEVICES];
} slabs = {PTHREAD_MUTEX_INITIALIZER, {}};

static void slab_destroy(Slab *slab)
{
    if (slab->data != NULL) cuda_ignore(cudaFreeHost(slab->data));
    free(slab);
}

/* NULL where there is no memory to be page-locked, or where CUDA fails. */
static Slab *slab_create(int device)
{
    Slab *slab = static_cast<Slab *>(calloc(1, sizeof *slab));
    if (slab == NULL) return NULL;
    void *memory = NULL;
    in_spite_of_captures([&] {
        const cudaError_t code = cudaHostAlloc(&memory, SLAB_BYTES, cudaHostAllocMapped);
        cuda_ignore(code);
        if (code != cudaSuccess) memory = NULL;
    });
    slab->data = static_cast<char *>(memory);
    slab->device = device;
    if (memory != NULL) return slab;
    slab_destroy(slab);
    return NULL;
}

static bool count_one_more(int device)
{
    pthread_mutex_lock(&slabs.lock);
    const bool there_is_room = slabs.devices[device].count < MOST_SLABS;
    if (there_is_room) slabs.devices[device].count++;
    pthread_mutex_unlock(&slabs.lock);
    return there_is_room;
}

static void count_one_less(int device)
{
    pthread_mutex_lock(&slabs.lock);
    slabs.devices[device].count--;
    pthread_mutex_unlock(&slabs.lock);
}

static bool has_room(int64_t bytes, int64_t limit)
{
    return bytes <= most_bytes() && limit >= SLAB_BYTES;
}

bool slab_has_room(int64_t bytes)
{
    int64_t limit;
    return pinned_limit(&limit) == STATUS_OK && has_room(bytes, limit);
}

static void put(Slab *slab, bool is_over)
{
    auto &of_device = slabs.devices[slab->device];
    pthread_mutex_lock(&slabs.lock);
    Slab **list = is_over ? &of_device.idle : &of_device.doubtful;
    slab->next = *list;
    *list = slab;
    pthread_mutex_unlock(&slabs.lock);
}

static Slab *take_all(Slab **list)
{
    pthread_mutex_lock(&slabs.lock);
    Slab *all = *list;
    *list = NULL;
    pthread_mutex_unlock(&slabs.lock);
    return all;
}

/* Puts those that are doubtful back to where they belong by now. all_are_over: it is known. */
static void sort_doubtful(int device, bool all_are_over)
{
    for (Slab *doubtful = take_all(&slabs.devices[device].doubtful); doubtful != NULL;) {
        Slab *slab = doubtful;
        doubtful = slab->next;
        const bool is_over = all_are_over || (slab->end != NULL && event_is_over(slab->end));
        if (is_over && slab->end != NULL) {
            event_give(device, slab->end);
            slab->end = NULL;
        }
        put(slab, is_over);
    }
}

/* *doubtful: there is none, but one of those may be it. */
static Slab *take_idle(int device, bool *doubtful)
{
    auto &of_device = slabs.devices[device];
    pthread_mutex_lock(&slabs.lock);
    Slab *slab = of_device.idle;
    *doubtful = slab == NULL && of_device.doubtful != NULL;
    if (slab != NULL) of_device.idle = slab->next;
    pthread_mutex_unlock(&slabs.lock);
    return slab;
}

Status slab_take(int device, int64_t bytes, Slab **slab)
{
    *slab = NULL;
    int64_t limit;
    Status status = pinned_limit(&limit);
    if (status != STATUS_OK || bytes == 0 || !has_room(bytes, limit)) return status;
    bool doubtful;
    *slab = take_idle(device, &doubtful);
    if (doubtful) {
        sort_doubtful(device, false);
        *slab = take_idle(device, &doubtful);
    }
    if (*slab != NULL || !count_one_more(device)) return STATUS_OK;
    *slab = slab_create(device);
    if (*slab == NULL) count_one_less(device);
    return STATUS_OK;
}

void slab_give(Slab *slab, const Stream *stream, bool is_over)
{
    if (!is_over) slab->end = event_at_end(stream);
    put(slab, is_over);
}

static bool has_doubtful(int device)
{
    pthread_mutex_lock(&slabs.lock);
    const bool has = slabs.devices[device].doubtful != NULL;
    pthread_mutex_unlock(&slabs.lock);
    return has;
}

void slab_flush(int device)
{
    auto &of_device = slabs.devices[device];
    in_spite_of_captures([&] {
        sort_doubtful(device, false);
        if (has_doubtful(device)) sort_doubtful(device, device_await(device));
        for (Slab *idle = take_all(&of_device.idle); idle != NULL;) {
            Slab *slab = idle;
            idle = slab->next;
            slab_destroy(slab);
            count_one_less(device);
        }
    });
}

#endif
