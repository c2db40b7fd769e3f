/* A fake CUDA runtime: the calls that kernels/ makes, over host memory, so that the whole CUDA path
 * runs where there is no GPU.
 *
 * A device is a number, device memory is poisoned host memory between red zones, and a kernel is
 * its host twin (kernels/common.cuh), run block by block while it is launched. What a real GPU
 * would punish late or not at all is recorded at once as "misuse", which fails the test that caused
 * it. Tests steer the fake with the fake_ functions at the end, child processes of tests with
 *
 *   GPUOPS_FAKE_DRIVER=none|old|stub|no-device
 *   GPUOPS_FAKE_MEMORY=bytes of each device
 *   GPUOPS_FAKE_DEVICES=count
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    PINNED = -1, /* Block.device of page-locked host memory */
    EXIT_MISUSE = 86,
};

static struct {
    char driver[16]; /* "fine" or a value of GPUOPS_FAKE_DRIVER */
    size_t memory_bytes;
    int devices;
    bool used;   /* the driver has been needed and found */
    bool forked; /* and the process has forked since: CUDA does not survive that */
} machine;

static _Thread_local int current_device;
static _Thread_local cudaError_t last_error;

/* Every call holds the lock to its end, kernels included. The fake is not there to be fast, and so
 * no thread ever sees device memory that another thread's kernel is working on. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int take_lock(void)
{
    return pthread_mutex_lock(&lock);
}

static void drop_lock(const int *guard)
{
    pthread_mutex_unlock(&lock);
}

#define LOCKED() int guard_ __attribute__((cleanup(drop_lock), unused)) = take_lock()

static char misuse_text[8192];
static size_t misuse_bytes;

__attribute__((format(printf, 1, 2))) static void misuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t room = sizeof misuse_text - misuse_bytes;
    int written = vsnprintf(misuse_text + misuse_bytes, room, format, arguments);
    va_end(arguments);
    /* A line that does not fit is dropped: the first ones tell more. */
    bool fits = written >= 0 && (size_t)written + 2 <= room;
    if (fits) {
        misuse_bytes += (size_t)written;
        misuse_text[misuse_bytes++] = '\n';
    }
    misuse_text[misuse_bytes] = '\0';
}

static struct {
    const char *name;
    long calls;
} counters[64];

static void count(const char *name)
{
    int i = 0;
    while (counters[i].name && strcmp(counters[i].name, name)) i++;
    counters[i].name = name;
    counters[i].calls++;
}

static cudaError_t done(cudaError_t code)
{
    if (code != cudaSuccess) last_error = code;
    return code;
}

static bool driver_is(const char *state)
{
    return strcmp(machine.driver, state) == 0;
}

static cudaError_t need_driver(void)
{
    if (machine.forked) return cudaErrorInitializationError;
    if (driver_is("none") || driver_is("old")) return cudaErrorInsufficientDriver;
    if (driver_is("stub")) return cudaErrorStubLibrary;
    if (driver_is("no-device") || machine.devices == 0) return cudaErrorNoDevice;
    machine.used = true;
    return cudaSuccess;
}

/* The first lines of every call: some work without a driver, most do not. */
#define BEGIN_WITHOUT_DRIVER()                                                                     \
    LOCKED();                                                                                      \
    count(__func__)

#define BEGIN()                                                                                    \
    BEGIN_WITHOUT_DRIVER();                                                                        \
    if (need_driver() != cudaSuccess) return done(need_driver())

#define REQUIRE(condition, code)                                                                   \
    if (!(condition)) return done(code)

/* Streams do nothing yet; these are the handles that exist without being made. */
static bool is_stream(cudaStream_t stream)
{
    return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

/* Memory. */

typedef struct Block {
    struct Block *next;
    unsigned char *data; /* between two red zones */
    size_t bytes;
    int device;
} Block;

typedef struct Blocks {
    Block *first, *last; /* the oldest comes first */
    long count;
    size_t bytes;
} Blocks;

static Blocks live, quarantine;
static size_t peak_bytes;

static void append(Blocks *blocks, Block *block)
{
    block->next = NULL;
    *(blocks->last ? &blocks->last->next : &blocks->first) = block;
    blocks->last = block;
    blocks->count++;
    blocks->bytes += block->bytes;
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

static const char *kind_of(const Block *block)
{
    return block->device == PINNED ? "pinned" : "device";
}

static size_t available_bytes(int device)
{
    size_t used = 0;
    for (Block *block = live.first; block; block = block->next)
        if (block->device == device) used += block->bytes;
    return machine.memory_bytes > used ? machine.memory_bytes - used : 0;
}

/* Only copies and kernels may touch device memory, and only that of the current device. In a build
 * with ASan, anybody else is caught in the act. */
static void hide(Block *block)
{
    if (block->device != PINNED) ASAN_POISON_MEMORY_REGION(block->data, block->bytes);
}

static void hide_device_memory(void)
{
    for (Block *block = live.first; block; block = block->next) hide(block);
}

static void show_device_memory(void)
{
    for (Block *block = live.first; block; block = block->next)
        if (block->device == current_device) ASAN_UNPOISON_MEMORY_REGION(block->data, block->bytes);
}

static bool all_bytes_are(const unsigned char *bytes, size_t count, unsigned char value)
{
    return bytes[0] == value && memcmp(bytes, bytes + 1, count - 1) == 0;
}

/* Writes a pattern where ASan allows no access, and first says whether it was still there. */
static bool mend(unsigned char *bytes, size_t count, unsigned char value)
{
    ASAN_UNPOISON_MEMORY_REGION(bytes, count);
    bool intact = all_bytes_are(bytes, count, value);
    memset(bytes, value, count);
    ASAN_POISON_MEMORY_REGION(bytes, count);
    return intact;
}

static void check_red_zones(Block *block)
{
    const char *side = NULL;
    if (!mend(block->data + block->bytes, RED_ZONE_BYTES, RED_ZONE)) side = "after";
    if (!mend(block->data - RED_ZONE_BYTES, RED_ZONE_BYTES, RED_ZONE)) side = "before";
    if (side)
        misuse("a write hit the red zone %s a %s allocation of %zu bytes", side, kind_of(block),
               block->bytes);
}

static void check_freed(Block *block)
{
    if (!mend(block->data, block->bytes, POISON))
        misuse("a %s allocation of %zu bytes was written to after it was freed", kind_of(block),
               block->bytes);
}

static cudaError_t allocate(void **pointer, size_t bytes, int device)
{
    if (!pointer) return cudaErrorInvalidValue;
    *pointer = NULL;
    if (bytes == 0) return cudaSuccess;
    if (device != PINNED && bytes > available_bytes(device)) return cudaErrorMemoryAllocation;
    Block *block = malloc(sizeof *block);
    void *memory = NULL;
    bool fits = bytes < SIZE_MAX / 2;
    if (!block || !fits || posix_memalign(&memory, RED_ZONE_BYTES, bytes + 2 * RED_ZONE_BYTES)) {
        free(block);
        return cudaErrorMemoryAllocation;
    }
    *block = (Block){NULL, (unsigned char *)memory + RED_ZONE_BYTES, bytes, device};
    mend(memory, RED_ZONE_BYTES, RED_ZONE);
    mend(block->data + bytes, RED_ZONE_BYTES, RED_ZONE);
    memset(block->data, POISON, bytes);
    hide(block);
    append(&live, block);
    if (live.bytes > peak_bytes) peak_bytes = live.bytes;
    *pointer = block->data;
    return cudaSuccess;
}

/* The allocation that holds all of a range, or NULL. */
static Block *holder(const void *address, size_t bytes)
{
    for (Block *block = live.first; block; block = block->next) {
        size_t offset = (uintptr_t)address - (uintptr_t)block->data;
        if (offset <= block->bytes && bytes <= block->bytes - offset) return block;
    }
    return NULL;
}

/* Whether a range meets any of the blocks or their red zones. */
static bool touches(const Blocks *blocks, const void *address, size_t bytes)
{
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    for (Block *block = blocks->first; block; block = block->next) {
        uintptr_t low = (uintptr_t)block->data - RED_ZONE_BYTES;
        if (end > low && begin < low + block->bytes + 2 * RED_ZONE_BYTES) return true;
    }
    return false;
}

static cudaError_t release(const char *call, void *pointer, bool pinned)
{
    Block *block = holder(pointer, 0);
    if (!block || block->data != pointer || pinned != (block->device == PINNED)) {
        misuse("%s: %p is not the start of a live %s allocation", call, pointer,
               pinned ? "pinned" : "device");
        return cudaErrorInvalidValue;
    }
    check_red_zones(block);
    take_out(&live, block);
    mend(block->data, block->bytes, POISON);
    append(&quarantine, block);
    while (quarantine.bytes > QUARANTINE_BYTES || quarantine.count > QUARANTINE_BLOCKS) {
        Block *oldest = quarantine.first;
        take_out(&quarantine, oldest);
        check_freed(oldest);
        unsigned char *memory = oldest->data - RED_ZONE_BYTES;
        ASAN_UNPOISON_MEMORY_REGION(memory, oldest->bytes + 2 * RED_ZONE_BYTES);
        free(memory);
        free(oldest);
    }
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    BEGIN();
    return done(allocate(pointer, bytes, current_device));
}

cudaError_t cudaFree(void *pointer)
{
    BEGIN();
    return done(pointer ? release(__func__, pointer, false) : cudaSuccess);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    BEGIN();
    unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    REQUIRE((flags & ~known) == 0, cudaErrorInvalidValue);
    return done(allocate(pointer, bytes, PINNED));
}

cudaError_t cudaFreeHost(void *pointer)
{
    BEGIN();
    return done(pointer ? release(__func__, pointer, true) : cudaSuccess);
}

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host, unsigned flags)
{
    BEGIN();
    Block *block = holder(host, 0);
    REQUIRE(block && block->device == PINNED && flags == 0, cudaErrorInvalidValue);
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

/* Of a pool only the device matters: nothing is kept when it is freed. */
struct CUmemPoolHandle_st {
    int device;
};
static long live_pools;

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties)
{
    BEGIN();
    int device = properties->location.id;
    REQUIRE(properties->allocType == cudaMemAllocationTypePinned, cudaErrorInvalidValue);
    REQUIRE(properties->location.type == cudaMemLocationTypeDevice, cudaErrorInvalidValue);
    REQUIRE(device >= 0 && device < machine.devices, cudaErrorInvalidDevice);
    *pool = malloc(sizeof **pool);
    REQUIRE(*pool, cudaErrorMemoryAllocation);
    (*pool)->device = device;
    live_pools++;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
    BEGIN();
    bool known = attribute >= cudaMemPoolReuseFollowEventDependencies &&
                 attribute <= cudaMemPoolAttrReleaseThreshold;
    return done(pool && known && value ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes_to_keep)
{
    BEGIN();
    return done(pool ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream)
{
    BEGIN();
    REQUIRE(pool, cudaErrorInvalidValue);
    REQUIRE(is_stream(stream), cudaErrorInvalidResourceHandle);
    return done(allocate(pointer, bytes, pool->device));
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    BEGIN();
    REQUIRE(is_stream(stream), cudaErrorInvalidResourceHandle);
    return done(release(__func__, pointer, false));
}

/* Copies. Pinned memory may stand on either side: the device can address it too. */

static bool is_device_range(const char *call, const char *role, const void *address, size_t bytes)
{
    Block *block = holder(address, bytes);
    if (block && (block->device == PINNED || block->device == current_device)) return true;
    if (block)
        misuse("%s: the %s is on device %d while device %d is current", call, role, block->device,
               current_device);
    else
        misuse("%s: the %s, %zu bytes at %p, is not inside one live device allocation", call, role,
               bytes, address);
    return false;
}

static bool is_host_range(const char *call, const char *role, const void *address, size_t bytes)
{
    Block *block = holder(address, bytes);
    if (block && block->device == PINNED) return true;
    if (address && !touches(&live, address, bytes) && !touches(&quarantine, address, bytes))
        return true;
    misuse("%s: the %s, %zu bytes at %p, is not host memory", call, role, bytes, address);
    return false;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes,
                            enum cudaMemcpyKind kind, cudaStream_t stream)
{
    BEGIN();
    REQUIRE(kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault,
            cudaErrorInvalidMemcpyDirection);
    REQUIRE(is_stream(stream), cudaErrorInvalidResourceHandle);
    if (bytes == 0) return cudaSuccess;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) {
        to_device = holder(target, bytes) != NULL;
        from_device = holder(source, bytes) != NULL;
    }
    bool valid = (to_device ? is_device_range : is_host_range)(__func__, "target", target, bytes) &&
                 (from_device ? is_device_range : is_host_range)(__func__, "source", source, bytes);
    REQUIRE(valid, cudaErrorInvalidValue);
    show_device_memory();
    memmove(target, source, bytes);
    hide_device_memory();
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream)
{
    BEGIN();
    REQUIRE(is_stream(stream), cudaErrorInvalidResourceHandle);
    if (bytes == 0) return cudaSuccess;
    REQUIRE(is_device_range(__func__, "target", target, bytes), cudaErrorInvalidValue);
    show_device_memory();
    memset(target, value, bytes);
    hide_device_memory();
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    BEGIN();
    return done(is_stream(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

/* Kernels: registered by nvcc's start-up code, given a twin by kernels/common.cuh. */

typedef void (*Twin)(void **arguments, unsigned block, unsigned blocks, unsigned threads);

typedef struct Kernel {
    struct Kernel *next;
    void **module;
    const void *symbol;
    const char *name;
    Twin twin;
    unsigned most_threads; /* of a block: the kernel's launch bounds */
} Kernel;
static Kernel *kernels;

static Kernel *find_kernel(const void *symbol)
{
    Kernel *kernel = kernels;
    while (kernel && kernel->symbol != symbol) kernel = kernel->next;
    return kernel;
}

void **__cudaRegisterFatBinary(void *binary)
{
    return malloc(sizeof(void *)); /* only the address is of use */
}

void __cudaRegisterFunction(void **module, const char *symbol, char *device_symbol,
                            const char *name, int thread_limit, uint3 *thread, uint3 *block,
                            dim3 *block_size, dim3 *grid_size, int *warp_size)
{
    LOCKED();
    Kernel *kernel = malloc(sizeof *kernel);
    if (!kernel) return; /* its launch will say so */
    *kernel = (Kernel){kernels, module, symbol, name, NULL, 0};
    kernels = kernel;
}

void __cudaUnregisterFatBinary(void **module)
{
    LOCKED();
    for (Kernel **link = &kernels; *link;) {
        Kernel *kernel = *link;
        if (kernel->module == module) {
            *link = kernel->next;
            free(kernel);
        } else {
            link = &kernel->next;
        }
    }
    free(module);
}

void fake_cuda_twin(const void *symbol, Twin twin, unsigned most_threads)
{
    LOCKED();
    Kernel *kernel = find_kernel(symbol);
    if (!kernel) return;
    kernel->twin = twin;
    kernel->most_threads = most_threads;
}

cudaError_t cudaLaunchKernel(const void *symbol, dim3 grid, dim3 block, void **arguments,
                             size_t shared_bytes, cudaStream_t stream)
{
    BEGIN();
    /* At the end of the process nvcc's code takes all kernels back. */
    REQUIRE(kernels, cudaErrorCudartUnloading);
    Kernel *kernel = find_kernel(symbol);
    if (!kernel || !kernel->twin)
        misuse("%s: %s has no host twin", __func__, kernel ? kernel->name : "an unknown kernel");
    REQUIRE(kernel && kernel->twin, cudaErrorInvalidDeviceFunction);
    REQUIRE(grid.x >= 1 && grid.x <= INT32_MAX && grid.y == 1 && grid.z == 1 && block.x >= 1 &&
                block.x <= kernel->most_threads && block.y == 1 && block.z == 1,
            cudaErrorInvalidConfiguration);
    REQUIRE(shared_bytes <= 48 << 10, cudaErrorInvalidValue);
    REQUIRE(is_stream(stream), cudaErrorInvalidResourceHandle);
    show_device_memory();
    for (unsigned i = 0; i < grid.x; i++) kernel->twin(arguments, i, grid.x, block.x);
    hide_device_memory();
    return cudaSuccess;
}

/* The rest of what nvcc's code refers to. Twins use device variables as the host variables that
 * they also are. The stubs behind <<<>>> are in every object, but nobody should launch that way. */

void __cudaRegisterFatBinaryEnd(void **module) {}

void __cudaRegisterVar(void **module, char *host, char *device, const char *name, int external,
                       size_t bytes, int constant, int global)
{
}

char __cudaInitModule(void **module)
{
    return 1;
}

cudaError_t __cudaPushCallConfiguration(void)
{
    LOCKED();
    misuse("a kernel was launched with <<<>>> instead of cudaLaunchKernel");
    return done(cudaErrorNotSupported);
}

#define ALSO_REFUSED __attribute__((alias("__cudaPushCallConfiguration")))
cudaError_t __cudaPopCallConfiguration(void) ALSO_REFUSED;
cudaError_t __cudaGetKernel(void) ALSO_REFUSED;
cudaError_t __cudaLaunchKernel(void) ALSO_REFUSED;

/* Devices. */

cudaError_t cudaGetDeviceCount(int *devices)
{
    BEGIN();
    *devices = machine.devices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    BEGIN();
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    BEGIN();
    REQUIRE(device >= 0 && device < machine.devices, cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    BEGIN();
    REQUIRE(device >= 0 && device < machine.devices, cudaErrorInvalidDevice);
    *properties = (struct cudaDeviceProp){
        .name = "Fake H200",
        .major = 9,
        .multiProcessorCount = 132,
        .totalGlobalMem = machine.memory_bytes,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxGridSize = {INT32_MAX, 65535, 65535},
        .sharedMemPerBlock = 48 << 10,
        .l2CacheSize = 60 << 20,
        .canMapHostMemory = 1,
        .unifiedAddressing = 1,
        .memoryPoolsSupported = 1,
    };
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    static const int known[][2] = {
        {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMultiProcessorCount, 132},  {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrL2CacheSize, 60 << 20},     {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrMaxGridDimX, INT32_MAX},    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMemoryPoolsSupported, 1},   {cudaDevAttrCanMapHostMemory, 1},
    };
    BEGIN();
    REQUIRE(device >= 0 && device < machine.devices, cudaErrorInvalidDevice);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i][0] != (int)attribute) continue;
        *value = known[i][1];
        return cudaSuccess;
    }
    misuse("%s: the fake does not know attribute %d", __func__, attribute);
    return done(cudaErrorInvalidValue);
}

/* Versions and errors. */

cudaError_t cudaDriverGetVersion(int *version)
{
    BEGIN_WITHOUT_DRIVER();
    bool absent = driver_is("none") || driver_is("stub");
    *version = absent ? 0 : driver_is("old") ? 12020 : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    BEGIN_WITHOUT_DRIVER();
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    BEGIN_WITHOUT_DRIVER();
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

cudaError_t cudaPeekAtLastError(void)
{
    BEGIN_WITHOUT_DRIVER();
    return last_error;
}

typedef struct ErrorText {
    cudaError_t code;
    const char *name, *text;
} ErrorText;

static const ErrorText *find_text(cudaError_t code)
{
    /* The unknown one comes last. */
    static const ErrorText texts[] = {
        {cudaSuccess, "cudaSuccess", "no error"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
        {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
        {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
        {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
         "invalid configuration argument"},
        {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
         "invalid copy direction for memcpy"},
        {cudaErrorStubLibrary, "cudaErrorStubLibrary", "CUDA driver is a stub library"},
        {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
         "CUDA driver version is insufficient for CUDA runtime version"},
        {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction",
         "invalid device function"},
        {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
         "invalid resource handle"},
        {cudaErrorUnknown, "unrecognized error code", "unrecognized error code"},
    };
    const ErrorText *found = texts;
    while (found->code != code && found->code != cudaErrorUnknown) found++;
    return found;
}

const char *cudaGetErrorName(cudaError_t code)
{
    BEGIN_WITHOUT_DRIVER();
    return find_text(code)->name;
}

const char *cudaGetErrorString(cudaError_t code)
{
    BEGIN_WITHOUT_DRIVER();
    return find_text(code)->text;
}

/* The controls, for tests/faults/fake.py. */

void fake_set_driver(const char *state)
{
    LOCKED();
    snprintf(machine.driver, sizeof machine.driver, "%s", state);
}

void fake_set_devices(int devices)
{
    LOCKED();
    machine.devices = devices;
}

void fake_set_memory_limit(size_t bytes_per_device)
{
    LOCKED();
    machine.memory_bytes = bytes_per_device;
}

int fake_current_device(void)
{
    return current_device;
}

/* The number of calls of one function, or with NULL of all. */
long fake_calls(const char *name)
{
    LOCKED();
    long calls = 0;
    for (int i = 0; counters[i].name; i++)
        if (!name || strcmp(counters[i].name, name) == 0) calls += counters[i].calls;
    return calls;
}

typedef struct Live {
    long allocations, bytes, pinned_allocations, pinned_bytes, pools, peak_bytes;
} Live;

void fake_live(Live *result)
{
    LOCKED();
    *result = (Live){.pools = live_pools, .peak_bytes = (long)peak_bytes};
    for (Block *block = live.first; block; block = block->next) {
        bool pinned = block->device == PINNED;
        *(pinned ? &result->pinned_allocations : &result->allocations) += 1;
        *(pinned ? &result->pinned_bytes : &result->bytes) += (long)block->bytes;
    }
}

/* Inspects all memory, then hands over what was recorded since the last time: "" is good. */
void fake_take_misuse(char *text, size_t bytes)
{
    LOCKED();
    for (Block *block = live.first; block; block = block->next) check_red_zones(block);
    for (Block *block = quarantine.first; block; block = block->next) check_freed(block);
    snprintf(text, bytes, "%s", misuse_text);
    misuse_bytes = 0;
    misuse_text[0] = '\0';
}

static size_t number(const char *variable, size_t otherwise)
{
    const char *text = getenv(variable);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* Back to the machine that the environment describes, with all counts at zero. Memory stays. */
void fake_reset(void)
{
    LOCKED();
    const char *driver = getenv("GPUOPS_FAKE_DRIVER");
    snprintf(machine.driver, sizeof machine.driver, "%s", driver ? driver : "fine");
    machine.devices = (int)number("GPUOPS_FAKE_DEVICES", 2);
    machine.memory_bytes = number("GPUOPS_FAKE_MEMORY", 64 << 20);
    memset(counters, 0, sizeof counters);
    peak_bytes = live.bytes;
}

/* A fork waits for the lock, or the child would find it taken for ever. */
static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void)
{
    machine.forked = machine.used;
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void set_up(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    fake_reset();
}

/* Nobody takes the misuse of a child process of a test, so its exit status tells. */
__attribute__((destructor)) static void tear_down(void)
{
    char text[sizeof misuse_text];
    fake_take_misuse(text, sizeof text);
    if (text[0] == '\0') return;
    fprintf(stderr, "fake CUDA runtime: %s", text);
    fflush(NULL);
    _exit(EXIT_MISUSE);
}
