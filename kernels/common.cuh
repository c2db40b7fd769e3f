/* What every kernel file shares: the words that let one source build with nvcc and with a plain C++
 * compiler, the launch helper, and the interface of runtime.cu and transfer.cu. */
#ifndef GPUOPS_COMMON_CUH
#define GPUOPS_COMMON_CUH

#include "gpuops.h"

/* GPUOPS_CUDA=0 compiles the same files as C++: the CPU-only wheel, and what sanitizers run. */
#ifdef __CUDACC__
#include <cuda_runtime.h>
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#ifdef __CUDA_ARCH__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

/* Where a thread stands in its grid. Kernels take it as an argument instead of reading blockIdx, so
 * that a host can run them too, one thread after the other. */
struct Thread {
    unsigned block, thread, blocks, threads;
};

struct Grid {
    unsigned blocks, threads;
};

#ifdef __CUDACC__

/* Turns a failed CUDA call into a recorded failure; CUDA_TRY also returns it from its function. */
Status cuda_status(cudaError_t code, const char *call);
#define CUDA_TRY(call)                                                                             \
    do {                                                                                           \
        cudaError_t code_ = (call);                                                                \
        if (__builtin_expect(code_ != cudaSuccess, 0)) return cuda_status(code_, #call);           \
    } while (0)

/* Makes a device current, and the one before it again. */
Status device_enter(int device, int *previous);
void device_leave(int device, int previous);

/* Memory of the device that is current, in the order of a stream. */
Status device_allocate(int device, int64_t bytes, void *stream, void **memory);
void device_free(int device, void *memory, void *stream);
Status device_memory_available(int device, int64_t *bytes);
Status stream_synchronize(void *stream);

Status launch_kernel(const void *kernel, Grid grid, void **arguments, void *stream);

/* A kernel is a functor: its members are the arguments, operator()(Thread) is the body, and
 * MAX_THREADS is the largest block that it is launched with. */
template <class Body>
__global__ void __launch_bounds__(Body::MAX_THREADS) kernel(const __grid_constant__ Body body)
{
    body(Thread{blockIdx.x, threadIdx.x, gridDim.x, blockDim.x});
}

#ifdef GPUOPS_FAKE_CUDA
/* Test builds run on a fake CUDA runtime (tests/faults/), which calls a kernel's host twin, the
 * same functor, once per block of the launch. */
extern "C" void fake_cuda_twin(const void *kernel,
                               void (*twin)(void **, unsigned, unsigned, unsigned),
                               unsigned most_threads);

template <class Body>
void twin(void **arguments, unsigned block, unsigned blocks, unsigned threads)
{
    const Body &body = *static_cast<const Body *>(arguments[0]);
    for (unsigned thread = 0; thread < threads; thread++)
        body(Thread{block, thread, blocks, threads});
}
#endif

/* Launches with cudaLaunchKernel: CUDA 13's <<<>>> drops the status of the launch. */
template <class Body>
Status launch(const Body &body, Grid grid, void *stream)
{
    const void *symbol = reinterpret_cast<const void *>(&kernel<Body>);
#ifdef GPUOPS_FAKE_CUDA
    fake_cuda_twin(symbol, twin<Body>, Body::MAX_THREADS);
#endif
    void *arguments[] = {const_cast<Body *>(&body)};
    return launch_kernel(symbol, grid, arguments, stream);
}

#endif /* __CUDACC__ */

#endif
