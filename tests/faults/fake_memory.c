/* Memory of the fake CUDA runtime: poisoned host memory between red zones, and pools. */
#define _GNU_SOURCE
#include "fake_cudart.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

enum {
    POISON = 0xDB, /* fresh and freed memory */
    RED_ZONE = 0xA5,
    RED_ZONE_BYTES = 256,        /* on both sides; cudaMalloc promises this alignment */
    QUARANTINE_BYTES = 32 << 20, /* freed memory stays poisoned, and out of use, for this long */
    QUARANTINE_BLOCKS = 256,
    PAGE_BYTES = 4096,
};

Blocks live, quarantine, registered;
size_t peak_bytes;

/* What a pool has reserved belongs to the device's used memory, whether or not it is allocated. */
struct Pool {
    Pool *next;
    int device;
    size_t threshold;
    size_t reserved, most_reserved, used, most_used;
};
static Pool *pools;

static void append(Blocks *blocks, Block *block)
{
    block->next = NULL;
    *(blocks->last ? &blocks->last->next : &blocks->first) = block;
    blocks->last = block;
    blocks->count++;
    blocks->bytes += block->bytes;
    uintptr_t low = (uintptr_t)block->data, high = low + block->bytes;
    if (!blocks->high || low < blocks->low) blocks->low = low;
    if (high > blocks->high) blocks->high = high;
}

static void take_out(Blocks *blocks, Block *block)
{
    Block *before = NULL;
    for (Block *at = blocks->first; at != block; at = at->next) before = at;
    *(before ? &before->next : &blocks->first) = block->next;
    if (blocks->last == block) blocks->last = before;
    blocks->count--;
    blocks->bytes -= block->bytes;
}

const char *kind_of(const Block *block)
{
    return block->type == cudaMemoryTypeHost ? "pinned" : "device";
}

static size_t available_bytes(int device)
{
    size_t used = 0;
    for (Block *block = live.first; block; block = block->next)
        if (block->type != cudaMemoryTypeHost && block->device == device && !block->pool)
            used += block->bytes;
    for (Pool *pool = pools; pool; pool = pool->next)
        if (pool->device == device) used += pool->reserved;
    return machine.memory_bytes > used ? machine.memory_bytes - used : 0;
}

/* Only work on streams may touch device memory, and only that of its own device. In a build with
 * ASan, anybody else is caught in the act. */
static void hide(Block *block)
{
    if (block->type == cudaMemoryTypeDevice) ASAN_POISON_MEMORY_REGION(block->data, block->bytes);
}

void hide_device_memory(void)
{
    for (Block *block = live.first; block; block = block->next) hide(block);
}

void show_device_memory(int device)
{
    for (Block *block = live.first; block; block = block->next)
        if (block->device == device) ASAN_UNPOISON_MEMORY_REGION(block->data, block->bytes);
}

static bool all_bytes_are(const unsigned char *bytes, size_t count, unsigned char value)
{
    return bytes[0] == value && memcmp(bytes, bytes + 1, count - 1) == 0;
}

/* Writes a pattern where ASan allows no access, and says whether it was still there. Pages on which
 * it is are only read: a process that was forked would have to copy them first. */
static bool mend(unsigned char *bytes, size_t count, unsigned char value)
{
    bool intact = true;
    ASAN_UNPOISON_MEMORY_REGION(bytes, count);
    for (size_t done = 0, piece; done < count; done += piece) {
        unsigned char *at = bytes + done;
        piece = PAGE_BYTES - (uintptr_t)at % PAGE_BYTES;
        if (piece > count - done) piece = count - done;
        if (all_bytes_are(at, piece, value)) continue;
        memset(at, value, piece);
        intact = false;
    }
    ASAN_POISON_MEMORY_REGION(bytes, count);
    return intact;
}

static const char *mend_red_zones(unsigned char *data, size_t bytes)
{
    const char *side = NULL;
    if (!mend(data + bytes, RED_ZONE_BYTES, RED_ZONE)) side = "after";
    if (!mend(data - RED_ZONE_BYTES, RED_ZONE_BYTES, RED_ZONE)) side = "before";
    return side;
}

static void check_red_zones(Block *block)
{
    const char *side = mend_red_zones(block->data, block->bytes);
    if (side)
        misuse("a write hit the red zone %s a %s allocation of %zu bytes", side, kind_of(block),
               block->bytes);
}

static void check_freed(Block *block)
{
    block->checked = true;
    if (!mend(block->data, block->bytes, POISON))
        misuse("a %s allocation of %zu bytes was written to after it was freed", kind_of(block),
               block->bytes);
}

/* What is freed is much, and looked at after every test: once, unless it is to be again. */
void check_all_memory(bool again)
{
    for (Block *block = live.first; block; block = block->next) check_red_zones(block);
    for (Block *block = quarantine.first; block; block = block->next)
        if (again || !block->checked) check_freed(block);
}

static _Alignas(RED_ZONE_BYTES) unsigned char shared_memory[RED_ZONE_BYTES + MOST_SHARED_BYTES +
                                                            RED_ZONE_BYTES];
static size_t shared_bytes;

void *open_shared_memory(size_t bytes)
{
    unsigned char *data = shared_memory + RED_ZONE_BYTES;
    shared_bytes = bytes;
    mend_red_zones(data, bytes);
    ASAN_POISON_MEMORY_REGION(shared_memory, sizeof shared_memory);
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    memset(data, POISON, bytes);
    return data;
}

const char *close_shared_memory(void)
{
    ASAN_POISON_MEMORY_REGION(shared_memory, sizeof shared_memory);
    return mend_red_zones(shared_memory + RED_ZONE_BYTES, shared_bytes);
}

static Block *holder_among(const Blocks *blocks, const void *address, size_t bytes)
{
    for (Block *block = blocks->first; block; block = block->next) {
        size_t offset = (uintptr_t)address - (uintptr_t)block->data;
        if (offset <= block->bytes && bytes <= block->bytes - offset) return block;
    }
    return NULL;
}

Block *holder(const void *address, size_t bytes)
{
    Block *block = holder_among(&live, address, bytes);
    return block ? block : holder_among(&registered, address, bytes);
}

static bool meets(const Blocks *blocks, const void *address, size_t bytes)
{
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    for (Block *block = blocks->first; block; block = block->next) {
        uintptr_t low = (uintptr_t)block->data;
        if (end > low && begin < low + block->bytes) return true;
    }
    return false;
}

bool is_torn(const void *address, size_t bytes)
{
    return meets(&registered, address, bytes) && !holder_among(&registered, address, bytes);
}

bool touches(const Blocks *blocks, const void *address, size_t bytes)
{
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    for (Block *block = blocks->first; block; block = block->next) {
        uintptr_t low = (uintptr_t)block->data - RED_ZONE_BYTES;
        if (end > low && begin < low + block->bytes + 2 * RED_ZONE_BYTES) return true;
    }
    return false;
}

/* Each word of what a kernel is given is asked about, and few of them are addresses. */
bool is_inside(const Blocks *blocks, const void *address)
{
    if ((uintptr_t)address < blocks->low || (uintptr_t)address >= blocks->high) return false;
    for (Block *block = blocks->first; block; block = block->next)
        if ((uintptr_t)address - (uintptr_t)block->data < block->bytes) return true;
    return false;
}

/* Memory whose address is none of a float's or an int's: in programs that are not loaded anywhere
 * (PIE) the heap is where such numbers would be taken for addresses. */
static void *new_memory(size_t bytes, bool *mapped)
{
    void *memory = NULL;
    if (posix_memalign(&memory, RED_ZONE_BYTES, bytes)) return NULL;
    *mapped = (uintptr_t)memory <= UINT32_MAX;
    if (!*mapped) return memory;
    free(memory);
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

cudaError_t new_block(Block **made, size_t bytes, enum cudaMemoryType type, int device)
{
    static long allocations;
    Block *block = malloc(sizeof *block);
    bool mapped = false;
    void *memory =
        block && bytes < SIZE_MAX / 2 ? new_memory(bytes + 2 * RED_ZONE_BYTES, &mapped) : NULL;
    if (!memory) {
        free(block);
        return cudaErrorMemoryAllocation;
    }
    *block = (Block){.data = (unsigned char *)memory + RED_ZONE_BYTES,
                     .bytes = bytes,
                     .number = ++allocations,
                     .type = type,
                     .device = device,
                     .allocated = true,
                     .mapped = mapped};
    mend(memory, RED_ZONE_BYTES, RED_ZONE);
    mend(block->data + bytes, RED_ZONE_BYTES, RED_ZONE);
    memset(block->data, POISON, bytes);
    hide(block);
    append(&live, block);
    if (live.bytes > peak_bytes) peak_bytes = live.bytes;
    *made = block;
    return cudaSuccess;
}

void put_into_quarantine(Block *block)
{
    check_red_zones(block);
    if (block->pool) block->pool->used -= block->bytes;
    take_out(&live, block);
    mend(block->data, block->bytes, POISON);
    append(&quarantine, block);
    while (quarantine.bytes > QUARANTINE_BYTES || quarantine.count > QUARANTINE_BLOCKS) {
        Block *oldest = quarantine.first;
        take_out(&quarantine, oldest);
        check_freed(oldest);
        unsigned char *memory = oldest->data - RED_ZONE_BYTES;
        ASAN_UNPOISON_MEMORY_REGION(memory, oldest->bytes + 2 * RED_ZONE_BYTES);
        if (oldest->mapped)
            munmap(memory, oldest->bytes + 2 * RED_ZONE_BYTES);
        else
            free(memory);
        free(oldest);
    }
}

/* The block that a call may free, or NULL, which is misuse. */
static Block *block_to_free(const char *call, void *pointer, bool pinned)
{
    Block *block = holder_among(&live, pointer, 0);
    bool right = block && block->data == pointer && !block->freed &&
                 pinned == (block->type == cudaMemoryTypeHost);
    if (right) return block;
    misuse("%s: %p is not the start of a live %s allocation", call, pointer,
           pinned ? "pinned" : "device");
    return NULL;
}

/* Memory that is there when the call returns. */

static cudaError_t allocate_now(const char *call, void **pointer, size_t bytes,
                                enum cudaMemoryType type)
{
    if (!pointer) return cudaErrorInvalidValue;
    *pointer = NULL;
    cudaError_t code = refuse_while_capturing(call);
    if (code != cudaSuccess || bytes == 0) return code;
    if (type != cudaMemoryTypeHost && bytes > available_bytes(current_device))
        return cudaErrorMemoryAllocation;
    Block *block;
    code = new_block(&block, bytes, type, current_device);
    if (code == cudaSuccess) *pointer = block->data;
    return code;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    BEGIN();
    return done(allocate_now(__func__, pointer, bytes, cudaMemoryTypeDevice));
}

cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags)
{
    BEGIN();
    REQUIRE(flags == cudaMemAttachGlobal || flags == cudaMemAttachHost, cudaErrorInvalidValue);
    REQUIRE(bytes > 0, cudaErrorInvalidValue);
    return done(allocate_now(__func__, pointer, bytes, cudaMemoryTypeManaged));
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    BEGIN();
    unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    REQUIRE((flags & ~known) == 0, cudaErrorInvalidValue);
    return done(allocate_now(__func__, pointer, bytes, cudaMemoryTypeHost));
}

cudaError_t cudaFree(void *pointer)
{
    BEGIN_RELEASE();
    if (!pointer) return done(fault);
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    Block *block = block_to_free(__func__, pointer, false);
    REQUIRE(block, cudaErrorInvalidValue);
    /* The driver waits for the device here, but not where the memory comes from a pool. */
    if (!block->pool) run_all_of(block->device);
    put_into_quarantine(block);
    return done(fault);
}

cudaError_t cudaFreeHost(void *pointer)
{
    BEGIN_RELEASE();
    if (!pointer) return done(fault);
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    Block *block = block_to_free(__func__, pointer, true);
    REQUIRE(block, cudaErrorInvalidValue);
    put_into_quarantine(block);
    return done(fault);
}

/* Whether a byte can be written to; without touching it, for other threads may be using it. */
static bool is_writable(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long begin, end;
    char rights[5];
    bool found = false;
    while (maps && !found && fscanf(maps, "%lx-%lx %4s%*[^\n]", &begin, &end, rights) == 3)
        found = begin <= (unsigned long)address && (unsigned long)address < end;
    if (maps) fclose(maps);
    return found && rights[1] == 'w';
}

/* The driver locks the pages around a range, but what it goes by are the bytes: ranges that share a
 * page are no trouble, ranges that share a byte are an error. */
cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    static long number;
    BEGIN();
    unsigned known = cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly;
    REQUIRE(memory && bytes > 0 && (flags & ~known) == 0, cudaErrorInvalidValue);
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    bool taken = meets(&registered, memory, bytes) || meets(&live, memory, bytes);
    REQUIRE(!taken, cudaErrorHostMemoryAlreadyRegistered);
    bool read_only = flags & cudaHostRegisterReadOnly;
    REQUIRE(!read_only || machine.locks_read_only, cudaErrorNotSupported);
    REQUIRE(read_only || (is_writable(memory) && is_writable((char *)memory + bytes - 1)),
            cudaErrorInvalidValue);
    Block *block = malloc(sizeof *block);
    REQUIRE(block, cudaErrorMemoryAllocation);
    *block = (Block){.data = memory,
                     .bytes = bytes,
                     .number = --number, /* those of allocations are positive */
                     .type = cudaMemoryTypeHost,
                     .device = current_device,
                     .allocated = true,
                     .read_only = read_only};
    append(&registered, block);
    return cudaSuccess;
}

/* Work that still uses the memory is not waited for: it will find it gone. */
cudaError_t cudaHostUnregister(void *memory)
{
    BEGIN_RELEASE();
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    Block *block = holder_among(&registered, memory, 0);
    while (block && block->data != memory) block = block->next;
    if (!block) misuse("%s: no registered memory begins at %p", __func__, memory);
    REQUIRE(block, cudaErrorHostMemoryNotRegistered);
    if (block->device != current_device)
        misuse("%s: device %d unlocks what device %d has locked", __func__, current_device,
               block->device);
    take_out(&registered, block);
    free(block);
    return done(fault);
}

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host, unsigned flags)
{
    BEGIN();
    Block *block = holder(host, 0);
    REQUIRE(block && block->type == cudaMemoryTypeHost && flags == 0, cudaErrorInvalidValue);
    *device_pointer = host;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    BEGIN();
    *available = available_bytes(current_device);
    *total = machine.memory_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    BEGIN();
    REQUIRE(attributes, cudaErrorInvalidValue);
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered,
                                                 .device = cudaInvalidDeviceId,
                                                 .hostPointer = (void *)pointer};
    const Block *block = holder(pointer, 1);
    if (!block) return cudaSuccess;
    attributes->type = block->type;
    attributes->device = block->device;
    attributes->devicePointer = (void *)pointer;
    if (block->type == cudaMemoryTypeDevice) attributes->hostPointer = NULL;
    return cudaSuccess;
}

/* The one function of the driver that gpuops calls. */
static CUresult get_pointer_attributes(unsigned wanted, CUpointer_attribute *attributes,
                                       void **data, CUdeviceptr pointer)
{
    const char *name = "cuPointerGetAttributes";
    visit(name);
    LOCKED();
    count(name);
    cudaError_t fault = find_fault(name);
    if (fault != cudaSuccess) return (CUresult)fault; /* the same numbers */
    const Block *block = holder((const void *)pointer, 1);
    for (unsigned i = 0; i < wanted; i++) {
        if (attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
            *(void **)data[i] = block ? block->data : NULL;
        else if (attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
            *(size_t *)data[i] = block ? block->bytes : 0;
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    BEGIN();
    REQUIRE(symbol && function && version > 0 && flags == 0, cudaErrorInvalidValue);
    const bool is_known = strcmp(symbol, "cuPointerGetAttributes") == 0;
    *function = is_known ? (void *)get_pointer_attributes : NULL;
    if (result)
        *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* Pools: memory that comes and goes in the order of a stream. */

static size_t larger(size_t one, size_t other)
{
    return one > other ? one : other;
}

static void trim(Pool *pool, size_t bytes_to_keep)
{
    if (pool->reserved > bytes_to_keep) pool->reserved = larger(pool->used, bytes_to_keep);
}

void trim_pools(int device, bool entirely)
{
    for (Pool *pool = pools; pool; pool = pool->next)
        if (device < 0 || pool->device == device) trim(pool, entirely ? 0 : pool->threshold);
}

long count_pools(size_t *reserved_bytes)
{
    long count = 0;
    *reserved_bytes = 0;
    for (Pool *pool = pools; pool; pool = pool->next) {
        count++;
        *reserved_bytes += pool->reserved;
    }
    return count;
}

static Pool *find_pool(cudaMemPool_t handle)
{
    Pool *pool = pools;
    while (pool && pool != (Pool *)handle) pool = pool->next;
    return pool;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *handle, const struct cudaMemPoolProps *properties)
{
    BEGIN();
    REQUIRE(handle && properties, cudaErrorInvalidValue);
    int device = properties->location.id;
    REQUIRE(properties->allocType == cudaMemAllocationTypePinned, cudaErrorInvalidValue);
    REQUIRE(properties->location.type == cudaMemLocationTypeDevice, cudaErrorInvalidValue);
    REQUIRE(device >= 0 && device < machine.devices, cudaErrorInvalidDevice);
    Pool *pool = malloc(sizeof *pool);
    REQUIRE(pool, cudaErrorMemoryAllocation);
    *pool = (Pool){.next = pools, .device = device};
    pools = pool;
    *handle = (cudaMemPool_t)pool;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute,
                                    void *value)
{
    BEGIN();
    Pool *pool = find_pool(handle);
    REQUIRE(pool && value, cudaErrorInvalidValue);
    switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies:
    case cudaMemPoolReuseAllowOpportunistic:
    case cudaMemPoolReuseAllowInternalDependencies:
        break;
    case cudaMemPoolAttrReleaseThreshold:
        pool->threshold = *(uint64_t *)value;
        break;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
        REQUIRE(*(uint64_t *)value == 0, cudaErrorInvalidValue);
        if (attribute == cudaMemPoolAttrUsedMemHigh)
            pool->most_used = pool->used;
        else
            pool->most_reserved = pool->reserved;
        break;
    default:
        return done(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute,
                                    void *value)
{
    BEGIN();
    Pool *pool = find_pool(handle);
    REQUIRE(pool && value, cudaErrorInvalidValue);
    size_t result;
    switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies:
    case cudaMemPoolReuseAllowOpportunistic:
    case cudaMemPoolReuseAllowInternalDependencies:
        *(int *)value = 1;
        return cudaSuccess;
    case cudaMemPoolAttrReleaseThreshold:
        result = pool->threshold;
        break;
    case cudaMemPoolAttrReservedMemCurrent:
        result = pool->reserved;
        break;
    case cudaMemPoolAttrReservedMemHigh:
        result = pool->most_reserved;
        break;
    case cudaMemPoolAttrUsedMemCurrent:
        result = pool->used;
        break;
    case cudaMemPoolAttrUsedMemHigh:
        result = pool->most_used;
        break;
    default:
        return done(cudaErrorInvalidValue);
    }
    *(uint64_t *)value = result;
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t bytes_to_keep)
{
    BEGIN();
    Pool *pool = find_pool(handle);
    REQUIRE(pool, cudaErrorInvalidValue);
    trim(pool, bytes_to_keep);
    return cudaSuccess;
}

static bool has_room(const Pool *pool, size_t bytes)
{
    size_t unused = pool->reserved - pool->used;
    return bytes <= unused || bytes - unused <= available_bytes(pool->device);
}

/* The allocation with a number, or NULL if it is none any more. */
static Block *numbered_block(long number)
{
    Block *block = live.first;
    while (block && block->number != number) block = block->next;
    return block;
}

static void run_allocation(Operation *operation)
{
    Block *block = numbered_block(operation->target.allocation);
    if (block) block->allocated = true;
}

static void run_free(Operation *operation)
{
    Block *block = numbered_block(operation->target.allocation);
    if (!block) {
        misuse("%s: %p was freed before the free ran", operation->call, operation->target.address);
        return;
    }
    if (!block->allocated)
        misuse("%s: %p is not allocated yet in the order of the streams", operation->call,
               operation->target.address);
    put_into_quarantine(block);
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t handle,
                                    cudaStream_t stream_handle)
{
    BEGIN();
    Pool *pool = find_pool(handle);
    REQUIRE(pool && pointer, cudaErrorInvalidValue);
    Stream *stream;
    REQUIRE_SUCCESS(find_working_stream(__func__, stream_handle, &stream));
    *pointer = NULL;
    if (bytes == 0) return cudaSuccess;
    /* A pool uses again what was freed earlier on the same stream, even if that is still to come.
     * Work may be done early, and so this looks the same. */
    if (!has_room(pool, bytes)) run_to_the_end_of(stream);
    REQUIRE(has_room(pool, bytes), cudaErrorMemoryAllocation);

    Operation *operation = new_operation(__func__, stream, run_allocation, 0);
    REQUIRE(operation, cudaErrorMemoryAllocation);
    Block *block;
    cudaError_t code = new_block(&block, bytes, cudaMemoryTypeDevice, pool->device);
    if (code != cudaSuccess) {
        free(operation);
        return done(code);
    }
    block->pool = pool;
    block->capture = capture_of(stream);
    block->allocated = false;
    pool->used += bytes;
    pool->reserved = larger(pool->reserved, pool->used);
    pool->most_used = larger(pool->most_used, pool->used);
    pool->most_reserved = larger(pool->most_reserved, pool->reserved);
    *pointer = block->data;
    operation->target = (Place){block->data, block->number};
    enqueue(operation);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t handle)
{
    BEGIN_RELEASE();
    Stream *stream;
    REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
    Block *block = block_to_free(__func__, pointer, false);
    REQUIRE(block, cudaErrorInvalidValue);
    /* A graph can free nothing but what it allocates itself. */
    if (capture_of(stream) && block->capture != capture_of(stream)) {
        misuse("%s: the capture frees %p, which was allocated outside of it", __func__, pointer);
        return done(cudaErrorInvalidValue);
    }
    Operation *operation = new_operation(__func__, stream, run_free, 0);
    REQUIRE(operation, cudaErrorMemoryAllocation);
    operation->target = (Place){pointer, block->number};
    block->freed = true;
    enqueue(operation);
    return done(fault);
}
