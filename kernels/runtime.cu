/* Devices, memory and launches, as functions that return a Status.
 *
 * Every CUDA call but the transfers stands in this file. A failed call is recorded with its name
 * and code, and consumed, so that no other library in the process stumbles over our error. */
#include "common.cuh"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#ifdef __CUDACC__

enum { MAX_DEVICES = 64 };

static struct {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    bool probed = false; /* the device count, or the reason why there is none, is known */
    bool forked = false; /* this process was forked from one that used CUDA */
    int lost = 0;        /* the fatal error after which the driver answers nothing else */
    int count = 0;
    Status status = STATUS_OK;
    Failure failure = {};
    cudaMemPool_t pools[MAX_DEVICES] = {};
} cuda;

/* The errors of which the runtime's header says that the process must be started anew. */
static bool is_fatal(cudaError_t code)
{
    switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorContained:
    case cudaErrorExternalDevice:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
        return true;
    default:
        return false;
    }
}

Status cuda_status(cudaError_t code, const char *call)
{
    if (code == cudaSuccess) return STATUS_OK;
    cudaGetLastError();
    bool fatal = is_fatal(code);
    if (fatal) __atomic_store_n(&cuda.lost, (int)code, __ATOMIC_RELAXED);
    char text[sizeof last_failure()->text];
    snprintf(text, sizeof text, "%.*s failed with %s (%d): %s%s", (int)strcspn(call, "("), call,
             cudaGetErrorName(code), (int)code, cudaGetErrorString(code),
             fatal ? "; the GPU is lost to this process: start a new one, or use device=\"cpu\""
                   : "");
    Status status = fatal                               ? STATUS_DEVICE_LOST
                    : code == cudaErrorMemoryAllocation ? STATUS_MEMORY_ERROR
                                                        : STATUS_DEVICE_ERROR;
    return fail_cuda(status, code, cudaGetErrorName(code), text);
}

static void note_fork(void)
{
    cuda.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    /* A parent that never got as far as a device leaves nothing behind that could break here. */
    cuda.forked = cuda.forked || (cuda.probed && cuda.status == STATUS_OK);
}

/* Why cudaGetDeviceCount failed, in words that name the cure. */
static Status explain_absence(cudaError_t code)
{
    (void)cudaGetLastError();
    const int driver = cuda_driver_version();
    const int major = cuda_runtime_version() / 1000; /* any driver of that major version will do */
    const char *name = cudaGetErrorName(code);
    char text[512];
    if (code == cudaErrorInsufficientDriver && driver == 0)
        snprintf(text, sizeof text,
                 "there is no NVIDIA driver on this machine (libcuda.so.1 was not found): install "
                 "one for CUDA %d.0 or later, or use device=\"cpu\"",
                 major);
    else if (code == cudaErrorInsufficientDriver)
        snprintf(text, sizeof text,
                 "the NVIDIA driver is too old: it runs CUDA up to %d.%d, and this build of gpuops "
                 "needs CUDA %d.0: update the driver, or use device=\"cpu\"",
                 driver / 1000, driver % 1000 / 10, major);
    else if (code == cudaErrorStubLibrary)
        snprintf(text, sizeof text,
                 "the libcuda.so.1 that was found is the toolkit's stub library, which is for "
                 "linking only: take its folder out of LD_LIBRARY_PATH, or use device=\"cpu\"");
    else if (code == cudaErrorNoDevice)
        snprintf(text, sizeof text,
                 "there is a driver for CUDA %d.%d but no CUDA device: check nvidia-smi and "
                 "CUDA_VISIBLE_DEVICES, or use device=\"cpu\"",
                 driver / 1000, driver % 1000 / 10);
    else
        snprintf(text, sizeof text, "cudaGetDeviceCount failed with %s (%d): %s", name, (int)code,
                 cudaGetErrorString(code));
    return fail_cuda(STATUS_DEVICE_ERROR, code, name, text);
}

/* Only for the failures that leave no way on. */
static Status check_usable(void)
{
    if (cuda.forked)
        return fail(STATUS_FORKED,
                    "CUDA was in use when this process was forked, and does not survive a fork: "
                    "start processes with multiprocessing.set_start_method(\"spawn\"), or use "
                    "device=\"cpu\" here");
    cudaError_t lost = (cudaError_t)__atomic_load_n(&cuda.lost, __ATOMIC_RELAXED);
    if (lost != cudaSuccess) {
        char text[256];
        snprintf(text, sizeof text,
                 "the GPU was lost to this process by an earlier %s (%d): start a new process, or "
                 "use device=\"cpu\"",
                 cudaGetErrorName(lost), (int)lost);
        return fail_cuda(STATUS_DEVICE_LOST, lost, cudaGetErrorName(lost), text);
    }
    return STATUS_OK;
}

Status cuda_device_count(int *count)
{
    *count = 0;
    Status status = check_usable();
    if (status != STATUS_OK) return status;

    pthread_mutex_lock(&cuda.lock);
    if (!cuda.probed) {
        static pthread_once_t once = PTHREAD_ONCE_INIT;
        pthread_once(&once, [] { pthread_atfork(NULL, NULL, note_fork); });
        cudaError_t code = cudaGetDeviceCount(&cuda.count);
        if (code == cudaSuccess && cuda.count == 0) code = cudaErrorNoDevice;
        cuda.status = code == cudaSuccess ? STATUS_OK : explain_absence(code);
        if (cuda.status != STATUS_OK) cuda.failure = *last_failure();
        if (cuda.count > MAX_DEVICES) cuda.count = MAX_DEVICES;
        cuda.probed = true;
    }
    pthread_mutex_unlock(&cuda.lock);

    if (cuda.status != STATUS_OK)
        return fail_cuda(cuda.status, cuda.failure.cuda_code, cuda.failure.cuda_name,
                         cuda.failure.text);
    *count = cuda.count;
    return STATUS_OK;
}

Status cuda_current_device(int *device)
{
    CUDA_TRY(cudaGetDevice(device));
    return STATUS_OK;
}

Status cuda_device_info(int device, DeviceInfo *info)
{
    int count;
    Status status = cuda_device_count(&count);
    if (status != STATUS_OK) return status;
    cudaDeviceProp properties;
    CUDA_TRY(cudaGetDeviceProperties(&properties, device));
    snprintf(info->name, sizeof info->name, "%s", properties.name);
    info->compute_major = properties.major;
    info->compute_minor = properties.minor;
    info->multiprocessors = properties.multiProcessorCount;
    info->memory_bytes = (int64_t)properties.totalGlobalMem;
    return STATUS_OK;
}

int cuda_runtime_version(void)
{
    return CUDART_VERSION;
}

int cuda_driver_version(void)
{
    int version = 0;
    if (cudaDriverGetVersion(&version) != cudaSuccess) cudaGetLastError();
    return version;
}

void device_leave(int device, int previous)
{
    if (previous != device && cudaSetDevice(previous) != cudaSuccess) cudaGetLastError();
}

Status device_enter(int device, int *previous)
{
    Status status = check_usable();
    if (status != STATUS_OK) return status;
    CUDA_TRY(cudaGetDevice(previous));
    if (*previous == device) return STATUS_OK;
    cudaError_t code = cudaSetDevice(device);
    if (code == cudaSuccess) return STATUS_OK;
    status = cuda_status(code, "cudaSetDevice");
    device_leave(device, *previous); /* a device that fails to start may be current all the same */
    return status;
}

static cudaMemPool_t pool_of(int device)
{
    return __atomic_load_n(&cuda.pools[device], __ATOMIC_ACQUIRE);
}

/* Makes the stream-ordered pool of a device; some virtual GPUs can have none. It keeps what is
 * freed, since mapping memory afresh costs far more than the work done with it. */
static Status make_pool(int device)
{
    int supported = 0;
    CUDA_TRY(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device));
    if (!supported) return STATUS_OK;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;

    pthread_mutex_lock(&cuda.lock);
    Status status = STATUS_OK;
    if (pool_of(device) == NULL) {
        cudaMemPool_t pool;
        status = cuda_status(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
        if (status == STATUS_OK) {
            uint64_t all = UINT64_MAX;
            status =
                cuda_status(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all),
                            "cudaMemPoolSetAttribute");
            __atomic_store_n(&cuda.pools[device], pool, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&cuda.lock);
    return status;
}

static Status allocate(int64_t bytes, cudaMemPool_t pool, cudaStream_t stream, void **memory)
{
    if (pool == NULL) CUDA_TRY(cudaMalloc(memory, (size_t)bytes));
    if (pool != NULL) CUDA_TRY(cudaMallocFromPoolAsync(memory, (size_t)bytes, pool, stream));
    return STATUS_OK;
}

Status device_allocate(int device, int64_t bytes, void *stream, void **memory)
{
    *memory = NULL;
    Status status = pool_of(device) == NULL ? make_pool(device) : STATUS_OK;
    if (status != STATUS_OK) return status;
    const cudaMemPool_t pool = pool_of(device);
    cudaStream_t ordered = static_cast<cudaStream_t>(stream);
    status = allocate(bytes, pool, ordered, memory);
    if (status == STATUS_MEMORY_ERROR && pool != NULL) {
        /* What the pool keeps may be in pieces: give them back, and try once more. */
        CUDA_TRY(cudaStreamSynchronize(ordered));
        CUDA_TRY(cudaMemPoolTrimTo(pool, 0));
        status = allocate(bytes, pool, ordered, memory);
    }
    if (status != STATUS_MEMORY_ERROR) return status;

    int64_t available = 0;
    status = device_memory_available(device, &available);
    if (status != STATUS_OK) return status;
    char text[256];
    snprintf(text, sizeof text,
             "out of memory on cuda:%d: %lld bytes were asked for and %lld are free", device,
             (long long)bytes, (long long)available);
    return fail_cuda(STATUS_MEMORY_ERROR, cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation",
                     text);
}

void device_free(int device, void *memory, void *stream)
{
    if (memory == NULL) return;
    /* Nobody is left to tell, but the next call shall know if the device is gone. */
    if (pool_of(device) == NULL)
        (void)cuda_status(cudaFree(memory), "cudaFree");
    else
        (void)cuda_status(cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)),
                          "cudaFreeAsync");
}

Status device_memory_available(int device, int64_t *bytes)
{
    if (pool_of(device) != NULL) CUDA_TRY(cudaMemPoolTrimTo(pool_of(device), 0));
    size_t available, total;
    CUDA_TRY(cudaMemGetInfo(&available, &total));
    *bytes = (int64_t)available;
    return STATUS_OK;
}

Status stream_synchronize(void *stream)
{
    CUDA_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

Status launch_kernel(const void *kernel, Grid grid, void **arguments, void *stream)
{
    CUDA_TRY(cudaLaunchKernel(kernel, dim3(grid.blocks), dim3(grid.threads), arguments, 0,
                              static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

#else /* a build without CUDA */

Status cuda_device_count(int *count)
{
    *count = 0;
    return fail(STATUS_DEVICE_ERROR,
                "this gpuops was built without CUDA (GPUOPS_CUDA=0): install one with it, or use "
                "device=\"cpu\"");
}

Status cuda_current_device(int *device)
{
    return cuda_device_count(device);
}

Status cuda_device_info(int, DeviceInfo *)
{
    int count;
    return cuda_device_count(&count);
}

int cuda_runtime_version(void)
{
    return 0;
}

int cuda_driver_version(void)
{
    return 0;
}

#endif
