/* Devices, errors and launches, as functions that return a Status.
 *
 * A failed CUDA call is recorded with its name and code, and consumed, so that no other library in
 * the process stumbles over our error. */
#include "common.cuh"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#ifdef __CUDACC__

static struct {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    bool probed = false;  /* the device count, or the reason why there is none, is known */
    bool forked = false;  /* this process was forked from one that used CUDA */
    int lost = 0;         /* the fatal error after which the driver answers nothing else */
    bool leaving = false; /* the process is about to end */
    int count = 0;
    Status status = STATUS_OK;
    Failure failure = {};
} cuda;

/* The errors of which the runtime's header says that the process must be started anew, and those of
 * memory and of NVLink that nothing can correct. */
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
    case cudaErrorMpsClientTerminated:
        return true;
    default:
        return false;
    }
}

void cuda_ignore(cudaError_t code)
{
    if (code == cudaSuccess) return;
    (void)cudaGetLastError();
    cuda_notice(code);
}

void cuda_notice(cudaError_t code)
{
    if (is_fatal(code)) __atomic_store_n(&cuda.lost, (int)code, __ATOMIC_RELAXED);
}

bool runtime_is_lost(void)
{
    return __atomic_load_n(&cuda.lost, __ATOMIC_RELAXED) != cudaSuccess;
}

Status cuda_status(cudaError_t code, const char *call)
{
    if (code == cudaSuccess) return STATUS_OK;
    cuda_ignore(code);
    const bool fatal = is_fatal(code);
    char text[sizeof last_failure()->text];
    snprintf(text, sizeof text, "%.*s failed with %s (%d): %s%s", (int)strcspn(call, "("), call,
             cudaGetErrorName(code), (int)code, cudaGetErrorString(code),
             fatal ? "; the GPU is lost to this process: start a new one, or use device=\"cpu\""
                   : "");
    return fail_cuda(fatal ? STATUS_DEVICE_LOST : STATUS_DEVICE_ERROR, code, cudaGetErrorName(code),
                     text);
}

Status cuda_allocation_status(cudaError_t code, const char *call)
{
    const Status status = cuda_status(code, call);
    return code == cudaErrorMemoryAllocation ? STATUS_MEMORY_ERROR : status;
}

static void note_fork(void)
{
    cuda.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    /* A parent that never got as far as a device leaves nothing behind that could break here. */
    cuda.forked = cuda.forked || (cuda.probed && cuda.status == STATUS_OK);
}

/* There is no GPU, and there will be none for as long as this process lives. */
static bool is_absence(cudaError_t code)
{
    return code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver ||
           code == cudaErrorStubLibrary || code == cudaErrorSystemDriverMismatch ||
           code == cudaErrorCompatNotSupportedOnDevice;
}

/* Why there is no GPU, in words that name the cure. */
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

/* Asks how many devices there are; an error that may pass is not the answer. Threads that come
 * first may ask at once: no lock is held meanwhile, and one of their answers, which are the same,
 * is kept. */
static Status probe(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] { pthread_atfork(NULL, NULL, note_fork); });
    int count = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaSuccess && count == 0) code = cudaErrorNoDevice;
    if (code != cudaSuccess && !is_absence(code)) return cuda_status(code, "cudaGetDeviceCount");
    const Status status = code == cudaSuccess ? STATUS_OK : explain_absence(code);
    pthread_mutex_lock(&cuda.lock);
    if (!cuda.probed) {
        cuda.count = count < MAX_DEVICES ? count : MAX_DEVICES;
        cuda.status = status;
        if (status != STATUS_OK) cuda.failure = *last_failure();
        __atomic_store_n(&cuda.probed, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&cuda.lock);
    return STATUS_OK;
}

Status runtime_check(void)
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
    if (!__atomic_load_n(&cuda.probed, __ATOMIC_ACQUIRE)) {
        const Status status = probe();
        if (status != STATUS_OK) return status;
    }
    if (cuda.status == STATUS_OK) return STATUS_OK;
    return fail_cuda(cuda.status, cuda.failure.cuda_code, cuda.failure.cuda_name,
                     cuda.failure.text);
}

Status cuda_device_count(int *count)
{
    Status status = runtime_check();
    *count = status == STATUS_OK ? cuda.count : 0;
    return status;
}

bool cuda_is_missing(void)
{
    return __atomic_load_n(&cuda.probed, __ATOMIC_ACQUIRE) && cuda.status != STATUS_OK;
}

bool cuda_is_absent(void)
{
    return cuda.forked || runtime_is_lost() || cuda_is_missing();
}

Status cuda_check_ordinal(int device)
{
    int count;
    Status status = cuda_device_count(&count);
    if (status != STATUS_OK || device < count) return status;
    return fail(STATUS_DEVICE_ERROR,
                "there is no cuda:%d: this process sees %d CUDA device%s, cuda:0%s%.0d", device,
                count, count == 1 ? "" : "s", count == 1 ? "" : " to cuda:", count - 1);
}

Status cuda_current_device(int *device)
{
    CUDA_TRY(cudaGetDevice(device));
    return STATUS_OK;
}

bool runtime_is_leaving(void)
{
    return cuda.forked || __atomic_load_n(&cuda.leaving, __ATOMIC_RELAXED);
}

bool runtime_is_forked(void)
{
    return cuda.forked;
}

void runtime_shut_down(void)
{
    __atomic_store_n(&cuda.leaving, true, __ATOMIC_RELAXED);
}

Status cuda_device_info(int device, DeviceInfo *info)
{
    int count;
    Status status = cuda_device_count(&count);
    if (status != STATUS_OK) return status;
    cudaDeviceProp properties;
    CUDA_TRY(cudaGetDeviceProperties(&properties, device));
    snprintf(info->name, sizeof info->name, "%s", properties.name);
    static_assert(sizeof info->uuid == sizeof properties.uuid, "");
    memcpy(info->uuid, &properties.uuid, sizeof info->uuid);
    info->compute_major = properties.major;
    info->compute_minor = properties.minor;
    info->multiprocessors = properties.multiProcessorCount;
    info->memory_bytes = (int64_t)properties.totalGlobalMem;
    CUDA_TRY(cudaDeviceGetAttribute(&info->clock_khz, cudaDevAttrClockRate, device));
    return STATUS_OK;
}

int cuda_runtime_version(void)
{
    return CUDART_VERSION;
}

int cuda_driver_version(void)
{
    int version = 0;
    cuda_ignore(cudaDriverGetVersion(&version));
    return version;
}

void device_leave(int device, int previous)
{
    if (previous != device && !cuda.forked) cuda_ignore(cudaSetDevice(previous));
}

/* The error of `call`, which is the one that failed, if any. */
static cudaError_t make_current(int device, int *previous, const char **call)
{
    *call = "cudaGetDevice";
    cudaError_t code = cudaGetDevice(previous);
    if (code != cudaSuccess || *previous == device) return code;
    *call = "cudaSetDevice";
    code = cudaSetDevice(device);
    /* A device that fails to start may be current all the same. */
    if (code != cudaSuccess) device_leave(device, *previous);
    return code;
}

Status device_enter(int device, int *previous)
{
    const Status status = runtime_check();
    if (status != STATUS_OK) return status;
    const char *call;
    const cudaError_t code = make_current(device, previous, &call);
    return cuda_status(code, call);
}

bool device_try_enter(int device, int *previous)
{
    if (cuda_is_absent()) return false;
    const char *call;
    const cudaError_t code = make_current(device, previous, &call);
    cuda_ignore(code);
    return code == cudaSuccess;
}

Status launch_kernel(const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                     void **arguments, void *stream)
{
    CUDA_TRY(cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes,
                              static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

Status launch_kernel(const void *kernel, Grid grid, void **arguments, void *stream)
{
    return launch_kernel(kernel, dim3(grid.blocks), dim3(grid.threads), 0, arguments, stream);
}

#else /* a build without CUDA */

Status cuda_device_count(int *count)
{
    *count = 0;
    return fail(STATUS_DEVICE_ERROR,
                "this gpuops was built without CUDA (GPUOPS_CUDA=0): install one with it, or use "
                "device=\"cpu\"");
}

bool cuda_is_missing(void)
{
    return true;
}

bool cuda_is_absent(void)
{
    return true;
}

Status cuda_current_device(int *device)
{
    return cuda_device_count(device);
}

Status cuda_check_ordinal(int)
{
    int count;
    return cuda_device_count(&count);
}

void runtime_shut_down(void) {}

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
