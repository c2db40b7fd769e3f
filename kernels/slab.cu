/* Page-locked memory for the operands of small calls between arrays on the host.
 *
 * What takes time in such a call are not its bytes but the calls of CUDA: a copy takes the driver
 * about as long as a launch does, and memory that is not page-locked has it wait each time. So the
 * CPU copies the operands to a slab and the result from it, the kernel reads and writes them there
 * over the bus, and nothing is left to do but a launch and a wait.
 *
 * A slab is lent to one call at a time, which gives it back once it has waited for its kernels. */
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

Status slab_take(int device, int64_t bytes, Slab **slab)
{
    *slab = NULL;
    int64_t limit;
    Status status = pinned_limit(&limit);
    if (status != STATUS_OK || bytes == 0 || !has_room(bytes, limit)) return status;
    auto &of_device = slabs.devices[device];
    pthread_mutex_lock(&slabs.lock);
    *slab = of_device.idle;
    const bool grows = *slab == NULL && of_device.count < MOST_SLABS;
    if (*slab != NULL) of_device.idle = (*slab)->next;
    if (grows) of_device.count++;
    pthread_mutex_unlock(&slabs.lock);
    if (!grows) return STATUS_OK;
    *slab = slab_create(device);
    if (*slab == NULL) count_one_less(device);
    return STATUS_OK;
}

void slab_give(Slab *slab, bool is_over)
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

/* Whether all work on the device that is current is over, which is waited for. */
static bool await_device(int device)
{
    if (device_is_capturing(device)) return false;
    const cudaError_t code = cudaDeviceSynchronize();
    cuda_ignore(code);
    return code == cudaSuccess;
}

void slab_flush(int device)
{
    auto &of_device = slabs.devices[device];
    in_spite_of_captures([&] {
        Slab *doubtful = take_all(&of_device.doubtful);
        const bool is_over = doubtful != NULL && await_device(device);
        while (doubtful != NULL) {
            Slab *slab = doubtful;
            doubtful = slab->next;
            slab_give(slab, is_over);
        }
        for (Slab *idle = take_all(&of_device.idle); idle != NULL;) {
            Slab *slab = idle;
            idle = slab->next;
            slab_destroy(slab);
            count_one_less(device);
        }
    });
}

#endif
