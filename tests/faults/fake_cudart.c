/* A fake CUDA runtime: the calls that kernels/ makes, over host memory, so that the whole CUDA path
 * runs where there is no GPU.
 *
 * A device is a number, device memory is poisoned host memory between red zones (fake_memory.c),
 * and a kernel is its host twin (kernels/common.cuh), run block by block when its turn comes on its
 * stream (fake_streams.c), and thread by thread; the threads of a kernel with shared memory take
 * turns at its barriers (fake_fibers.c). Kernels that are compiled at run time have no host twin
 * but what a test gives them (fake_modules.c). What a real GPU would punish late or not at all is
 * recorded as "misuse", which fails the test that caused it. Any call can be made to fail
 * (fake_faults.c). Tests steer the fake with the fake_ functions, child processes of tests with
 *
 *   GPUOPS_FAKE_DRIVER=none|old|stub|no-device
 *   GPUOPS_FAKE_MEMORY=bytes of each device
 *   GPUOPS_FAKE_DEVICES=count
 *   GPUOPS_FAKE_MULTIPROCESSORS=count of each device
 *   GPUOPS_FAKE_LOCKS_READ_ONLY=0|1
 *   GPUOPS_FAKE_PART_BYTES=of the parts in which large arrays on the host are worked on
 *   GPUOPS_FAKE_SLAB_BYTES=up to which a call between arrays on the host goes through a slab
 *   GPUOPS_FAKE_SCHEDULER=now|lazy|shuffled
 *   GPUOPS_FAKE_SEED=number, for shuffled
 */
#define _GNU_SOURCE
#include "fake_cudart.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_MISUSE = 86 };

struct Machine machine;

_Thread_local int current_device;
static _Thread_local cudaError_t last_error;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int take_lock(void)
{
    return pthread_mutex_lock(&lock);
}

/* The arguments of kernels are built on the stack, and what calls left there shows in the gaps
 * between members, which functor_is_usable takes for addresses. */
__attribute__((noinline)) static void clear_stack(void)
{
    unsigned char below[64 << 10];
    memset(below, 0, sizeof below);
    __asm__ volatile("" : : "r"(below) : "memory");
}

void drop_lock(const int *guard)
{
    clear_stack();
    pthread_mutex_unlock(&lock);
}

static char misuse_text[8192];
static size_t misuse_bytes;

void misuse(const char *format, ...)
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
} counters[128];

void count(const char *name)
{
    int i = 0;
    while (counters[i].name && strcmp(counters[i].name, name)) i++;
    counters[i].name = name;
    counters[i].calls++;
}

/* A driver may wait for Python, and so does a tool that asks for Python's stack in the middle of a
 * call. A test's visitor, who comes before each call, can do the same. It is told whether the
 * caller holds Python's lock, which a process without Python has not. */
extern int PyGILState_Check(void) __attribute__((weak));
static void (*visitor)(const char *call, int with_gil);

void visit(const char *call)
{
    static _Thread_local bool visiting;
    if (!visitor || visiting) return;
    visiting = true;
    visitor(call, PyGILState_Check && PyGILState_Check());
    visiting = false;
}

cudaError_t done(cudaError_t code)
{
    if (code == cudaSuccess) return code;
    last_error = code;
    return code;
}

static bool driver_is(const char *state)
{
    return strcmp(machine.driver, state) == 0;
}

cudaError_t need_driver(void)
{
    if (machine.forked) return cudaErrorInitializationError;
    if (driver_is("none") || driver_is("old")) return cudaErrorInsufficientDriver;
    if (driver_is("stub")) return cudaErrorStubLibrary;
    if (driver_is("no-device") || machine.devices == 0) return cudaErrorNoDevice;
    machine.used = true;
    return cudaSuccess;
}

/* Copies. Pinned and managed memory may stand on either side: the device can address both. What is
 * wrong with an address is said at the call if it can be, and else when the work is done. */

static bool is_device_range(const char *call, const char *role, int device, const void *address,
                            size_t bytes, Place *place)
{
    Block *block = holder(address, bytes);
    *place = (Place){(void *)address, block ? block->number : 0};
    if (!block || block->freed)
        misuse("%s: the %s, %zu bytes at %p, is not inside one live device allocation", call, role,
               bytes, address);
    else if (block->type == cudaMemoryTypeDevice && block->device != device)
        misuse("%s: the %s is on device %d and the stream on device %d", call, role, block->device,
               device);
    else
        return true;
    return false;
}

static bool is_host_range(const char *call, const char *role, const void *address, size_t bytes,
                          Place *place)
{
    Block *block = holder(address, bytes);
    *place = (Place){(void *)address, block ? block->number : 0};
    if (is_torn(address, bytes)) {
        misuse("%s: the %s, %zu bytes at %p, is registered in part or in pieces", call, role, bytes,
               address);
        return false;
    }
    if (block && block->read_only && strcmp(role, "target") == 0) {
        misuse("%s: the %s, %zu bytes at %p, was registered as read-only", call, role, bytes,
               address);
        return false;
    }
    if (block && block->type != cudaMemoryTypeDevice && !block->freed) return true;
    if (address && !touches(&live, address, bytes) && !touches(&quarantine, address, bytes))
        return true;
    misuse("%s: the %s, %zu bytes at %p, is not host memory", call, role, bytes, address);
    return false;
}

/* Whether memory is still, and already, what it was when the work was enqueued. */
static bool is_usable(const Operation *operation, const char *role, Place place)
{
    if (place.allocation == 0) return true;
    const Block *block = holder(place.address, operation->bytes);
    if (!block || block->number != place.allocation)
        misuse("%s: the %s, %zu bytes at %p, was %s before the work was done", operation->call,
               role, operation->bytes, place.address,
               place.allocation < 0 ? "unregistered" : "freed");
    else if (!block->allocated)
        misuse("%s: the %s, %zu bytes at %p, is not allocated yet in the order of the streams",
               operation->call, role, operation->bytes, place.address);
    else
        return true;
    return false;
}

static void run_copy(Operation *operation)
{
    bool usable = !context_is_lost() && is_usable(operation, "target", operation->target) &&
                  is_usable(operation, "source", operation->source);
    if (!usable) return;
    show_device_memory(operation->target_device);
    show_device_memory(operation->source_device);
    memmove(operation->target.address, operation->source.address, operation->bytes);
    hide_device_memory();
}

static void run_set(Operation *operation)
{
    if (context_is_lost() || !is_usable(operation, "target", operation->target)) return;
    show_device_memory(operation->target_device);
    memset(operation->target.address, operation->value, operation->bytes);
    hide_device_memory();
}

/* Host memory that is not pinned is read before the call returns, and written too: the driver
 * copies the one into a buffer of its own and waits for the other. */
static cudaError_t enqueue_copy(const char *call, Stream *stream, Place target, int target_device,
                                Place source, int source_device, size_t bytes)
{
    bool staged = source.allocation == 0;
    Operation *operation = new_operation(call, stream, run_copy, staged ? bytes : 0);
    if (!operation) return cudaErrorMemoryAllocation;
    operation->target = target;
    operation->source = source;
    operation->target_device = target_device;
    operation->source_device = source_device;
    operation->bytes = bytes;
    if (staged) {
        memcpy(operation->copied, source.address, bytes);
        operation->source.address = operation->copied;
    }
    enqueue(operation);
    if (target.allocation != 0) return cudaSuccess;
    run_to_the_end_of(stream);
    return context_is_lost() ? tell_of_lost_context() : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes,
                            enum cudaMemcpyKind kind, cudaStream_t handle)
{
    BEGIN();
    REQUIRE(kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault,
            cudaErrorInvalidMemcpyDirection);
    Stream *stream;
    REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
    if (bytes == 0) return cudaSuccess;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) {
        to_device = holder(target, bytes) != NULL;
        from_device = holder(source, bytes) != NULL;
    }
    int device = device_of(stream);
    Place to, from;
    bool valid = (to_device ? is_device_range(__func__, "target", device, target, bytes, &to)
                            : is_host_range(__func__, "target", target, bytes, &to)) &&
                 (from_device ? is_device_range(__func__, "source", device, source, bytes, &from)
                              : is_host_range(__func__, "source", source, bytes, &from));
    REQUIRE(valid, cudaErrorInvalidValue);
    if (machine.copy_microseconds > 0) usleep(machine.copy_microseconds);
    return done(enqueue_copy(__func__, stream, to, device, from, device, bytes));
}

cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source,
                                int source_device, size_t bytes, cudaStream_t handle)
{
    BEGIN();
    REQUIRE(target_device >= 0 && target_device < machine.devices, cudaErrorInvalidDevice);
    REQUIRE(source_device >= 0 && source_device < machine.devices, cudaErrorInvalidDevice);
    Stream *stream;
    REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
    if (bytes == 0) return cudaSuccess;
    Place to, from;
    bool valid = is_device_range(__func__, "target", target_device, target, bytes, &to) &&
                 is_device_range(__func__, "source", source_device, source, bytes, &from);
    REQUIRE(valid, cudaErrorInvalidValue);
    return done(enqueue_copy(__func__, stream, to, target_device, from, source_device, bytes));
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t handle)
{
    BEGIN();
    Stream *stream;
    REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
    if (bytes == 0) return cudaSuccess;
    Place place;
    int device = device_of(stream);
    REQUIRE(is_device_range(__func__, "target", device, target, bytes, &place),
            cudaErrorInvalidValue);
    Operation *operation = new_operation(__func__, stream, run_set, 0);
    REQUIRE(operation, cudaErrorMemoryAllocation);
    operation->target = place;
    operation->target_device = device;
    operation->bytes = bytes;
    operation->value = value;
    enqueue(operation);
    return cudaSuccess;
}

/* Kernels: registered by nvcc's start-up code, given a twin by kernels/common.cuh. */

typedef struct File {
    bool taken_back; /* the process ends: nvcc's code gives up its kernels, file by file */
} File;

typedef struct Kernel {
    struct Kernel *next; /* of those with the same hash */
    const File *file;
    const void *symbol;
    const char *name;
    Twin twin;
    unsigned most_threads; /* of a block: the kernel's launch bounds */
    size_t argument_bytes; /* of the functor, the one argument */
} Kernel;
static Kernel *kernels[1 << 12]; /* there are thousands */

static Kernel **kernels_like(const void *symbol)
{
    return &kernels[(uintptr_t)symbol / 16 % (sizeof kernels / sizeof *kernels)];
}

static Kernel *find_kernel(const void *symbol)
{
    Kernel *kernel = *kernels_like(symbol);
    while (kernel && kernel->symbol != symbol) kernel = kernel->next;
    return kernel;
}

void **__cudaRegisterFatBinary(void *binary)
{
    return (void **)calloc(1, sizeof(File)); /* of which only the address is of use to nvcc */
}

void __cudaRegisterFunction(void **module, const char *symbol, char *device_symbol,
                            const char *name, int thread_limit, uint3 *thread, uint3 *block,
                            dim3 *block_size, dim3 *grid_size, int *warp_size)
{
    LOCKED();
    Kernel *kernel = malloc(sizeof *kernel), **first = kernels_like(symbol);
    if (!kernel) return; /* its launch will say so */
    *kernel = (Kernel){*first, (const File *)module, symbol, name, NULL, 0, 0};
    *first = kernel;
}

void __cudaUnregisterFatBinary(void **module)
{
    LOCKED();
    ((File *)module)->taken_back = true;
}

void fake_cuda_twin(const void *symbol, Twin twin, unsigned most_threads, size_t argument_bytes)
{
    LOCKED();
    Kernel *kernel = find_kernel(symbol);
    if (!kernel || kernel->file->taken_back) return;
    kernel->twin = twin;
    kernel->most_threads = most_threads;
    kernel->argument_bytes = argument_bytes;
}

/* A kernel reads nothing of memory that was freed before, though nobody else might notice if it
 * did. */
bool functor_is_usable(const Operation *operation, bool runs)
{
    for (size_t i = 0; i + sizeof(void *) <= operation->copied_bytes; i += sizeof(void *)) {
        const void *address;
        memcpy(&address, operation->copied + i, sizeof address);
        const Block *block = holder(address, 1);
        const char *problem = NULL;
        if (is_inside(&quarantine, address) || (block && block->freed && !runs))
            problem = "was freed before";
        if (block && !block->allocated && runs)
            problem = "is not allocated yet in the order of the streams";
        if (!problem) continue;
        misuse("%s: a kernel was given memory at %p that %s", operation->call, address, problem);
        return false;
    }
    return true;
}

_Thread_local Running running;

static void run_kernel(Operation *operation)
{
    if (context_is_lost() || !functor_is_usable(operation, true)) return;
    show_device_memory(operation->target_device);
    uint64_t order = draw_order();
    for (unsigned turn = 0; turn < operation->blocks && !running.given_up; turn++) {
        unsigned block = at_turn(order, turn, operation->blocks);
        running = (Running){.kernel = operation, .block = block, .order = draw_order()};
        operation->twin(&operation->argument, block, operation->blocks, operation->threads);
    }
    running = (Running){0};
    end_threads();
    hide_device_memory();
}

cudaError_t cudaLaunchKernel(const void *symbol, dim3 grid, dim3 block, void **arguments,
                             size_t shared_bytes, cudaStream_t handle)
{
    BEGIN();
    struct ModuleKernel *module_kernel = find_module_kernel(symbol);
    Kernel *kernel = find_kernel(symbol);
    Stream *stream;
    REQUIRE(!kernel || !kernel->file->taken_back, cudaErrorCudartUnloading);
    if (module_kernel) {
        REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
        return done(
            launch_module_kernel(module_kernel, grid, block, arguments, shared_bytes, stream));
    }
    if (!kernel || !kernel->twin)
        misuse("%s: %s has no host twin", __func__, kernel ? kernel->name : "an unknown kernel");
    REQUIRE(kernel && kernel->twin, cudaErrorInvalidDeviceFunction);
    REQUIRE(grid.x >= 1 && grid.x <= INT32_MAX && grid.y == 1 && grid.z == 1 && block.x >= 1 &&
                block.x <= kernel->most_threads && block.y == 1 && block.z == 1,
            cudaErrorInvalidConfiguration);
    REQUIRE(shared_bytes <= MOST_SHARED_BYTES, cudaErrorInvalidValue);
    REQUIRE_SUCCESS(find_working_stream(__func__, handle, &stream));
    if (device_of(stream) != current_device)
        misuse("%s: %s is launched on a stream of device %d while device %d is current", __func__,
               kernel->name, device_of(stream), current_device);
    REQUIRE(device_of(stream) == current_device, cudaErrorInvalidResourceHandle);

    size_t bytes = arguments ? kernel->argument_bytes : 0;
    Operation *operation = new_operation(kernel->name, stream, run_kernel, bytes);
    REQUIRE(operation, cudaErrorMemoryAllocation);
    if (bytes) memcpy(operation->copied, arguments[0], bytes);
    operation->argument = bytes ? operation->copied : arguments ? arguments[0] : NULL;
    operation->twin = kernel->twin;
    operation->blocks = grid.x;
    operation->threads = block.x;
    operation->target_device = current_device;
    if (functor_is_usable(operation, false))
        enqueue(operation);
    else
        free(operation);
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

/* A device that fails to start is current all the same. */
cudaError_t cudaSetDevice(int device)
{
    BEGIN_WITHOUT_DRIVER();
    REQUIRE_SUCCESS(need_driver());
    REQUIRE(device >= 0 && device < machine.devices, cudaErrorInvalidDevice);
    current_device = device;
    return done(find_fault(__func__));
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    BEGIN();
    REQUIRE(device >= 0 && device < machine.devices, cudaErrorInvalidDevice);
    *properties = (struct cudaDeviceProp){
        .name = "Fake H200",
        .uuid = {.bytes = {(char)(device + 1)}},
        .major = 9,
        .multiProcessorCount = machine.multiprocessors,
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
    const int known[][2] = {
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMultiProcessorCount, machine.multiprocessors},
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrClockRate, 1980000},
        {cudaDevAttrL2CacheSize, 60 << 20},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrMaxGridDimX, INT32_MAX},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrMemoryPoolsSupported, 1},
        {cudaDevAttrCanMapHostMemory, 1},
        {cudaDevAttrHostRegisterReadOnlySupported, machine.locks_read_only},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
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

enum { CODES = cudaErrorUnknown + 1 }; /* tests make up others, which nobody asks for */
static long taken[CODES];

cudaError_t cudaGetLastError(void)
{
    BEGIN_WITHOUT_DRIVER();
    cudaError_t code = last_error;
    if (context_is_lost()) return code; /* nobody gets rid of this kind */
    last_error = cudaSuccess;
    if ((int)code < CODES) taken[code]++;
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
    /* What is not in the list comes last. */
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
        {cudaErrorInvalidKernelImage, "cudaErrorInvalidKernelImage",
         "device kernel image is invalid"},
        {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
         "no kernel image is available for execution on the device"},
        {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
        {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
         "invalid resource handle"},
        {cudaErrorIllegalState, "cudaErrorIllegalState",
         "the operation cannot be performed in the present state"},
        {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
        {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable",
         "CUDA-capable device(s) is/are busy or unavailable"},
        {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable",
         "uncorrectable ECC error encountered"},
        {cudaErrorNvlinkUncorrectable, "cudaErrorNvlinkUncorrectable",
         "uncorrectable NVLink error detected during the execution"},
        {cudaErrorContained, "cudaErrorContained",
         "Invalid access of peer GPU memory over nvlink or a hardware error"},
        {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
         "too many resources requested for launch"},
        {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout",
         "the launch timed out and was terminated"},
        {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
        {cudaErrorHardwareStackError, "cudaErrorHardwareStackError", "hardware stack error"},
        {cudaErrorIllegalInstruction, "cudaErrorIllegalInstruction",
         "an illegal instruction was encountered"},
        {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
        {cudaErrorInvalidAddressSpace, "cudaErrorInvalidAddressSpace",
         "operation not supported on global/shared address space"},
        {cudaErrorInvalidPc, "cudaErrorInvalidPc", "invalid program counter"},
        {cudaErrorTensorMemoryLeak, "cudaErrorTensorMemoryLeak",
         "Tensor Memory not completely freed"},
        {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
        {cudaErrorMpsClientTerminated, "cudaErrorMpsClientTerminated",
         "the MPS client has been terminated"},
        {cudaErrorExternalDevice, "cudaErrorExternalDevice",
         "an async error has occured in external entity outside of CUDA"},
        {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
         "an illegal memory access was encountered"},
        {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
        {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
         "part or all of the requested memory range is already mapped"},
        {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
         "pointer does not correspond to a registered memory region"},
        {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
        {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
         "operation not permitted when stream is capturing"},
        {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
         "operation failed due to a previous error during capture"},
        {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
         "operation would result in a merge of separate capture sequences"},
        {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
         "capture was not ended in the same stream as it began"},
        {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
         "capturing stream has unjoined work"},
        {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
         "dependency created on uncaptured work in another stream"},
        {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
         "operation would make the legacy stream depend on a capturing blocking stream"},
        {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
         "operation not permitted on an event last recorded in a capturing stream"},
        {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
         "attempt to terminate a thread-local capture sequence from another thread"},
        {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
        {cudaErrorApiFailureBase, "unrecognized error code", "unrecognized error code"},
    };
    const ErrorText *found = texts;
    while (found->code != code && found->code != cudaErrorApiFailureBase) found++;
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
    trim_pools(-1, true);
}

void fake_set_part_bytes(int64_t bytes)
{
    LOCKED();
    machine.part_bytes = bytes;
}

/* What the package takes instead of its own number, unless nobody has set it. */
int64_t fake_cuda_part_bytes(int64_t bytes)
{
    LOCKED();
    return machine.part_bytes > 0 ? machine.part_bytes : bytes;
}

void fake_set_slab_bytes(int64_t bytes)
{
    LOCKED();
    machine.slab_bytes = bytes;
}

int64_t fake_cuda_slab_bytes(int64_t bytes)
{
    LOCKED();
    return machine.slab_bytes >= 0 ? machine.slab_bytes : bytes;
}

void fake_slow_copies(unsigned microseconds)
{
    LOCKED();
    machine.copy_microseconds = microseconds;
}

/* How often somebody has taken this error out of the slot for the last one. */
long fake_taken(int code)
{
    LOCKED();
    return taken[code];
}

static atomic_int ring_divisor; /* asked for too often to take the lock */

void fake_set_ring_divisor(int divisor)
{
    ring_divisor = divisor;
}

int64_t fake_cuda_ring_bytes(int64_t bytes)
{
    return bytes / ring_divisor;
}

void fake_set_visitor(void (*function)(const char *call, int with_gil))
{
    visitor = function;
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
    long streams, events, reserved_bytes, libraries, registered, registered_bytes;
} Live;

void fake_live(Live *result)
{
    LOCKED();
    size_t reserved;
    *result = (Live){.peak_bytes = (long)peak_bytes};
    result->pools = count_pools(&reserved);
    result->reserved_bytes = (long)reserved;
    count_streams(&result->streams, &result->events);
    result->libraries = count_libraries();
    result->registered = registered.count;
    result->registered_bytes = (long)registered.bytes;
    for (Block *block = live.first; block; block = block->next) {
        bool pinned = block->type == cudaMemoryTypeHost;
        *(pinned ? &result->pinned_allocations : &result->allocations) += 1;
        *(pinned ? &result->pinned_bytes : &result->bytes) += (long)block->bytes;
    }
}

/* Inspects all memory, then hands over what was recorded since the last time: "" is good. */
void fake_take_misuse(char *text, size_t bytes)
{
    LOCKED();
    check_all_memory(false);
    snprintf(text, bytes, "%s", misuse_text);
    misuse_bytes = 0;
    misuse_text[0] = '\0';
}

static size_t number(const char *variable, size_t otherwise)
{
    const char *text = getenv(variable);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* Does the work that is queued. An unknown name is misuse. */
void fake_set_scheduler(const char *name, uint64_t seed)
{
    LOCKED();
    set_scheduler(name, seed);
}

/* Does all the work that is queued. */
void fake_run(void)
{
    LOCKED();
    run_everything();
}

/* Back to the machine that the environment describes, with all work done and all counts at zero.
 * Allocations, streams and events stay. No real process gets a lost context back: it is for tests
 * of the fake itself. */
void fake_reset(void)
{
    LOCKED();
    const char *driver = getenv("GPUOPS_FAKE_DRIVER");
    const char *scheduler = getenv("GPUOPS_FAKE_SCHEDULER");
    set_scheduler(scheduler ? scheduler : "now", number("GPUOPS_FAKE_SEED", 1));
    snprintf(machine.driver, sizeof machine.driver, "%s", driver ? driver : "fine");
    machine.devices = (int)number("GPUOPS_FAKE_DEVICES", 2);
    machine.multiprocessors = (int)number("GPUOPS_FAKE_MULTIPROCESSORS", 132);
    ring_divisor = 1;
    machine.memory_bytes = number("GPUOPS_FAKE_MEMORY", 64 << 20);
    machine.locks_read_only = number("GPUOPS_FAKE_LOCKS_READ_ONLY", 1);
    machine.part_bytes = (int64_t)number("GPUOPS_FAKE_PART_BYTES", 0);
    machine.slab_bytes = (int64_t)number("GPUOPS_FAKE_SLAB_BYTES", -1);
    machine.copy_microseconds = 0;
    trim_pools(-1, true);
    memset(counters, 0, sizeof counters);
    end_faults();
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
    {
        LOCKED();
        check_all_memory(true);
    }
    fake_take_misuse(text, sizeof text);
    if (text[0] == '\0') return;
    fprintf(stderr, "fake CUDA runtime: %s", text);
    fflush(NULL);
    _exit(EXIT_MISUSE);
}
