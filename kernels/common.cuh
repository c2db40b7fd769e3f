/* What every kernel file shares: the words that let one source build with nvcc and with a plain C++
 * compiler, the launch helper, and the interface of runtime.cu and transfer.cu. */
#ifndef GPUOPS_COMMON_CUH
#define GPUOPS_COMMON_CUH

#include "gpuops.h"
#include "waiting.h"

#include <string.h>

/* GPUOPS_CUDA=0 compiles the same files as C++: the CPU-only wheel, and what sanitizers run. */
#ifdef __CUDACC__
#include <cuda_runtime.h>
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#define ALWAYS_INLINE __attribute__((always_inline))

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
/* For what cpu_has() chooses. What calls no fma() is compiled without the instructions for it: GCC
 * 12.2 fuses the parts of complex products with them, whatever -ffp-contract says. */
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_FMA __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#endif

#ifdef __CUDA_ARCH__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#else
#define UNROLL
#define NO_UNROLL
#endif

/* Where a thread stands in its grid. Kernels take it as an argument instead of reading blockIdx, so
 * that a host can run them too, one thread after the other. */
struct Thread {
    unsigned block, thread, blocks, threads;

    /* Waits for all threads of the block, in kernels with shared memory; each has to come here. */
    HOST_DEVICE void sync() const;
};

struct Grid {
    unsigned blocks, threads;
};

/* Division of 32-bit numbers by one that many threads share: a multiplication and a shift, after
 * Granlund and Montgomery, "Division by invariant integers using multiplication" (1994). */
struct Divider {
    uint32_t divisor, multiplier, shift;
    /* No gap: what would be in it goes with a kernel's arguments, and the fake CUDA runtime of the
     * tests takes all of these for addresses. */
    uint32_t unused;

    HOST_DEVICE uint32_t divide(uint32_t number) const
    {
#ifdef __CUDA_ARCH__
        const uint64_t high = __umulhi(number, multiplier);
#else
        const uint64_t high = (uint64_t)number * multiplier >> 32;
#endif
        return static_cast<uint32_t>((high + number) >> shift);
    }
};

static inline Divider divider_of(uint32_t divisor)
{
    uint32_t shift = 0;
    while (shift < 32 && (uint64_t)1 << shift < divisor) shift++;
    const uint64_t excess = ((uint64_t)1 << shift) - divisor;
    return {divisor, static_cast<uint32_t>((excess << 32) / divisor + 1), shift, 0};
}

#ifdef __CUDACC__

/* Turns a failed CUDA call into a recorded failure; CUDA_TRY also returns it from its function. */
Status cuda_status(cudaError_t code, const char *call);
/* The same for calls that allocate, before which nothing was written: they can run out of memory.
 */
Status cuda_allocation_status(cudaError_t code, const char *call);
/* The same where nobody is left to tell: the last failure stays what it was, but a fatal error is
 * remembered for the next call. */
void cuda_ignore(cudaError_t code);
/* Likewise for a function of the driver, whose errors have the runtime's numbers, but are not
 * remembered by it. */
void cuda_notice(cudaError_t code);
#define CUDA_TRY(call)                                                                             \
    do {                                                                                           \
        cudaError_t code_ = (call);                                                                \
        if (__builtin_expect(code_ != cudaSuccess, 0)) return cuda_status(code_, #call);           \
    } while (0)

/* Does what is to be done whatever came before it, of which a failure stays the one that is told.
 */
template <class Function>
static Status even_so(Status status, const Function &function)
{
    if (status == STATUS_OK) return function();
    const Failure first = *last_failure();
    (void)function();
    return fail_cuda(status, first.cuda_code, first.cuda_name, first.text);
}

/* memory.cu: while any stream of the process is captured, CUDA forbids some calls to the careless,
 * and spoils the capture. Between these two they do no harm. Where even the first one fails, the
 * calls are made all the same, because memory has to be given back whatever happens. */
bool captures_ignore(int *mode);
void captures_heed(int mode);

template <class Function>
auto in_spite_of_captures(const Function &function)
{
    struct Ignoring {
        int mode = 0;
        bool ignored = captures_ignore(&mode);
        ~Ignoring()
        {
            if (ignored) captures_heed(mode);
        }
    } ignoring;
    return function();
}

/* runtime.cu: makes a device current, and the one before it again. */
Status device_enter(int device, int *previous);
/* For what is given back: nobody is told if it fails, and the failure on whose way out it comes
 * stays the last. */
bool device_try_enter(int device, int *previous);
void device_leave(int device, int previous);

/* Why CUDA cannot be called: there is no GPU, this process was forked, or it has lost the GPU. */
Status runtime_check(void);
/* A fatal error has ended what this process can do on GPUs: no work goes on any more. */
bool runtime_is_lost(void);
enum { MAX_DEVICES = 64 };
/* At the end of the process, and after a fork, what is left is left to the driver. */
bool runtime_is_leaving(void);
/* This process was forked from one that used CUDA: in the middle of a call, if the caller has done
 * it who looked after that. Then the workers, and whoever may have had a lock, are the parent's. */
bool runtime_is_forked(void);

/* stream.cu */
enum { FREE_LISTS = 14 };

struct Stream {
    cudaStream_t handle; /* 0: the legacy default stream */
    int device;
    unsigned long long number; /* of its own, whatever handles and addresses are used again */
    int slot;                  /* where its kernels note bad indices; -1: none was needed yet */
    bool ours, is_shared;      /* we made it; others know its handle */
    int references;
    unsigned uses, idle; /* a number that changes with each, and what it was when all was done */
    Owner owner;
    Stream *next;
    Memory *free_memory[FREE_LISTS]; /* by size, see memory.cu */
    int free_counts[FREE_LISTS];
    int stored_count; /* the sum of those, which others look at */
};

/* The stream in whose order memory is freed and awaited by others. Each thread has its own
 * per-thread default stream behind one handle; the legacy default stream comes after all of them.
 */
static inline cudaStream_t home_handle(const Stream *stream)
{
    return stream->handle == cudaStreamPerThread ? 0 : stream->handle;
}

/* Whether what is queued on one comes after all that was queued on the other. */
static inline bool in_same_order(const Stream *one, const Stream *other)
{
    return one == other && one->handle != cudaStreamPerThread;
}

Stream *legacy_stream(int device);
/* The streams of a device that somebody holds, all but the legacy default stream, one after the
 * other: holds the next one and releases the one before; begins at, and ends with, NULL. */
Stream *next_held_stream(int device, Stream *before);

template <class Function>
void for_each_held_stream(int device, const Function &function)
{
    Stream *stream = NULL;
    while ((stream = next_held_stream(device, stream)) != NULL) function(stream);
}

bool stream_is_capturing(const Stream *stream);
bool device_is_capturing(int device); /* as far as is known of its streams */
/* Waits for all work of the device, which is current; false: it may not be over. */
bool device_await(int device);
Status refuse_capture(const char *what);
/* An event without timing of the device that is current, from a store of them. */
Status event_take(int device, cudaEvent_t *event);
void event_give(int device, cudaEvent_t event);
void event_flush(int device); /* gives back those in the store */
/* Such an event, behind what is queued on a stream that is not captured, of the device that is
 * current; NULL where there is none to be had. */
cudaEvent_t event_at_end(const Stream *stream);
bool event_is_over(cudaEvent_t event); /* if that can be told */

/* transfer.cu: gives back the page-locked buffers of the device that is current, as far as no copy
 * is on its way through them. */
void transfer_flush(int device);
/* slab.cu: gives back the slabs of the device that is current, as far as nothing is at work there.
 */
void slab_flush(int device);

/* pinned.cu: a call that uses memory of the host. What of it is page-locked, or will be while the
 * call goes on, stays so until it is let go of, when the work on a device that uses it is over, or
 * is not known to be. */
struct PinnedUse {
    char *low, *high;
    uint64_t last;  /* the number of the newest span that may be meant */
    int held;       /* spans */
    bool is_listed; /* it was held, and not let go of */
    PinnedUse *next, *previous;
};
void pinned_hold(const View *view, PinnedUse *use);
/* Whether a copy of it may be on its way when the driver returns, as far as pin() is concerned. */
bool pinned_is_held(const PinnedUse *use);
void pinned_let_go(PinnedUse *use, int device, bool is_over);
/* How many bytes from an address on the driver takes in one copy. */
int64_t pinned_stretch(const char *host, int64_t bytes);
/* Whether memory is page-locked from its first byte to its last, so that kernels on the device that
 * is current can read it; and where they find it. */
bool pinned_reach(const char *host, int64_t bytes, void **there);
/* Gives back the page-locked memory of the pool that nobody uses. */
void pinned_flush(void);

/* pipeline.cu: streams of our own that one call has at a time. */
struct Lanes {
    Stream *up, *compute, *down;
    Lanes *next;
};
Status lanes_take(int device, Lanes **taken);
void lanes_give(int device, Lanes *given);
/* Gives back the streams that no call has now. */
void pipeline_flush(int device);

/* memory.cu: gives back what one stream, or all of a device, keep for arrays to come. */
void memory_flush(Stream *stream);
bool memory_is_stored(const Stream *stream);
void memory_flush_device(int device);
/* Gives back all that nobody uses, after the work of the device that is current, for another try to
 * get memory. */
Status memory_trim(int device);
/* Gives back what nobody holds any more but work that is over now. Without locks, for owners are
 * told. */
void memory_settle(void);
/* Memory of the device that is current. */
Status device_allocate(int device, int64_t bytes, cudaStream_t stream, void **memory);
void device_free(int device, void *memory, cudaStream_t stream);
Status device_memory_available(int device, int64_t *bytes);
/* What arrays could still take; for some of it, what is kept for later has to be given back. */
Status device_memory_room(int device, int64_t *bytes);
/* The work that a stream has been given uses this memory, and so it is not freed before. */
Status memory_note_use(Memory *memory, Stream *stream);
/* Work on a stream is about to write this memory: it comes after all other work that uses it. */
Status memory_await_uses(Memory *memory, Stream *stream);
bool memory_is_foreign(const Memory *memory);

/* copy.cu: before and after work on a stream that reads or writes an array on a device, so that it
 * comes after what is queued on the array's own stream, and before what will be. */
Status begin_reading(const View *view, Stream *stream);
Status begin_writing(const View *view, Stream *stream);
Status end_reading(const View *view, Stream *stream);
Status end_writing(const View *view, Stream *stream);
/* A view in C order, of the shape of another one, on fresh memory of the stream's device; and the
 * same with a copy of the elements, from wherever they are. The memory is the caller's to release.
 */
Status new_view(const View *like, Stream *stream, View *view);
Status pack_on_device(const View *source, Stream *stream, View *packed, Watch *watch = NULL);
/* Copies between arrays on the stream's device, which is current. */
Status copy_on_device(const View *target, const View *source, Stream *stream);
/* The failure of work on a captured stream that an array on the host takes part in. */
Status refuse_host_in_capture(void);

/* convert.cu: the same elements in the target's dtype, both on the stream's device, which is
 * current.
 */
Status convert_on_device(const View *target, const View *source, Stream *stream);

#endif

/* cast.cu: the same between host arrays, to a wider dtype. */
void cast_on_cpu(const View *target, const View *source);

#ifdef __CUDACC__

/* Bad indices. A kernel notes them where the stream it runs on, or a call that waits for its own
 * kernels, has its slot: the first one of the first call, until the host has read it. */

struct IndexState { /* in device memory */
    unsigned locked;
    unsigned long long call, position; /* call 0: nothing is noted */
};

struct BadIndex { /* in page-locked host memory */
    unsigned long long call, position;
    unsigned long long index;
    long long axis_size;
    const char *op;
    int axis;
    bool is_signed;
};

struct IndexReport {
    IndexState *state;
    BadIndex *noted;
    unsigned long long call;
    long long axis_size;
    const char *op;
    int axis;

    /* Slow, but only for those who have a bad index, and of these for those before the noted one.
     */
    template <class Index>
    HOST_DEVICE void note(unsigned long long position, Index index) const
    {
#ifdef __CUDA_ARCH__
        volatile IndexState *seen = state;
        for (;;) {
            const unsigned long long noted_call = seen->call;
            if (noted_call != 0 && (noted_call != call || seen->position <= position)) return;
            if (atomicCAS(&state->locked, 0u, 1u) != 0) continue;
            __threadfence();
            if (seen->call == 0 || (seen->call == call && position < seen->position))
                write(position, index);
            __threadfence();
            atomicExch(&state->locked, 0u);
            return;
        }
#else
        while (__atomic_exchange_n(&state->locked, 1u, __ATOMIC_ACQUIRE) != 0) continue;
        if (state->call == 0 || (state->call == call && position < state->position))
            write(position, index);
        __atomic_store_n(&state->locked, 0u, __ATOMIC_RELEASE);
#endif
    }

    template <class Index>
    HOST_DEVICE void write(unsigned long long position, Index index) const
    {
        volatile BadIndex *target = noted;
        target->position = position;
        target->index = static_cast<unsigned long long>(index);
        target->is_signed = static_cast<Index>(-1) < static_cast<Index>(1);
        target->axis_size = axis_size;
        target->axis = axis;
        target->op = op;
        volatile IndexState *seen = state;
        seen->position = position;
#ifdef __CUDA_ARCH__
        __threadfence_system();
#endif
        target->call = call;
        seen->call = call;
    }
};

/* stream.cu: the report for a call whose kernels go to a stream, in the slot of that stream or in
 * one that slot_take gave; and the failure that was noted, after the stream has been waited for. */
Status slot_of(Stream *stream, int *slot);
int slot_take(int device);
void slot_give(int device, int slot, bool stale); /* stale: something may have been left in it */
Status report_open(const Stream *stream, int slot, const char *op, int axis, int64_t axis_size,
                   IndexReport *report);
Status slot_check(const Stream *stream, int slot, bool late);
/* run.cu: the report for the kernels of a call between arrays on the device. */
Status open_report(const Call *call, int64_t axis_size, IndexReport *report);
/* run.cu: before a call between arrays on the host reads them. What the stream that the caller has
 * named is still to write to page-locked memory comes first, and much of it is the CPU that reads:
 * what goes to a slab, has gaps, is looked at, or goes with a kernel's arguments. */
Status await_named_stream(const Call *call);
/* Waits for a stream, and looks at no slot. */
Status stream_drain(void *stream);
/* The same for a stream of the device that is current, on behalf of a caller who may give up: the
 * watch, if there is one, is asked now and then whether to go on. STATUS_INTERRUPTED: it is not to,
 * and what is queued goes on without the caller. */
Status stream_await(Stream *stream, Watch *watch);
Status event_await(cudaEvent_t event, int device, Watch *watch);
/* pipeline.cu: asks whether to go on, and makes the device current again after that. Without
 * bytes there is nothing to tell of. */
Status ask_watch(Watch *watch, int device, int64_t done_bytes, int64_t bytes);
bool launches_block(void);

Status launch_kernel(const void *kernel, Grid grid, void **arguments, void *stream);
/* The same for grids and blocks of three dimensions, and blocks with dynamic shared memory. */
Status launch_kernel(const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                     void **arguments, void *stream);

/* A kernel is a functor: its members are the arguments, operator()(Thread) is the body, and
 * MAX_THREADS is the largest block that it is launched with. Of those with shared memory, one may
 * say with MIN_BLOCKS for how many such blocks at once a multiprocessor is to have registers. */
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
                               unsigned most_threads, size_t argument_bytes);
/* The thread of a block whose turn it is: one after the other, or as the seed of the shuffled
 * scheduler has it. */
extern "C" unsigned fake_cuda_thread(unsigned turn);
/* Runs them on stacks of their own. */
extern "C" void fake_cuda_threads(unsigned threads,
                                  void (*body)(void *context, unsigned thread, void *shared),
                                  void *context);
/* Runs the threads of a block as fibers, which take turns wherever they wait for each other, on
 * shared memory with red zones around it. */
extern "C" void fake_cuda_fibers(unsigned threads, size_t shared_bytes,
                                 void (*body)(void *context, unsigned thread, void *shared),
                                 void *context);
extern "C" void fake_cuda_sync(void);

template <class Body>
struct FakeBlock {
    const Body *body;
    unsigned block, blocks, threads;

    static void run_plain(void *given, unsigned thread, void *)
    {
        const FakeBlock *at = static_cast<const FakeBlock *>(given);
        (*at->body)(Thread{at->block, thread, at->blocks, at->threads});
    }

    static void run_with_shared(void *given, unsigned thread, void *shared)
    {
        const FakeBlock *at = static_cast<const FakeBlock *>(given);
        (*at->body)(Thread{at->block, thread, at->blocks, at->threads},
                    static_cast<typename Body::Shared *>(shared));
    }
};

/* The threads of other blocks that TSan sees at the same time read what is set here. */
template <class Body>
__attribute__((no_sanitize_thread)) void twin(void **arguments, unsigned block, unsigned blocks,
                                              unsigned threads)
{
    FakeBlock<Body> all = {static_cast<const Body *>(arguments[0]), block, blocks, threads};
#ifdef __SANITIZE_THREAD__
    fake_cuda_threads(threads, FakeBlock<Body>::run_plain, &all);
#else
    for (unsigned turn = 0; turn < threads; turn++)
        FakeBlock<Body>::run_plain(&all, fake_cuda_thread(turn), NULL);
#endif
}

template <class Body>
void twin_with_shared(void **arguments, unsigned block, unsigned blocks, unsigned threads)
{
    FakeBlock<Body> all = {static_cast<const Body *>(arguments[0]), block, blocks, threads};
    fake_cuda_fibers(threads, sizeof(typename Body::Shared), FakeBlock<Body>::run_with_shared,
                     &all);
}
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 ||                                             \
    (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100)
constexpr int MULTIPROCESSOR_THREADS = 2048;
#else
constexpr int MULTIPROCESSOR_THREADS = __CUDA_ARCH__ < 800 ? 1024 : 1536;
#endif

/* MIN_BLOCKS of a body, as far as there can be as many threads at once. */
template <class Body>
constexpr int min_blocks_of(decltype(Body::MIN_BLOCKS) *)
{
    return Body::MIN_BLOCKS * Body::MAX_THREADS <= MULTIPROCESSOR_THREADS
               ? Body::MIN_BLOCKS
               : MULTIPROCESSOR_THREADS / Body::MAX_THREADS;
}
template <class Body>
constexpr int min_blocks_of(...)
{
    return 0; /* as many as there are */
}

/* The same with memory that the threads of a block share: Body::Shared is its type, at most 48 KiB,
 * and not set at first; the body is operator()(Thread, Shared *), which may call Thread::sync. */
template <class Body>
__global__ void __launch_bounds__(Body::MAX_THREADS, min_blocks_of<Body>(nullptr))
    kernel_with_shared(const __grid_constant__ Body body)
{
    __shared__ alignas(16) unsigned char shared[sizeof(typename Body::Shared)];
    body(Thread{blockIdx.x, threadIdx.x, gridDim.x, blockDim.x},
         reinterpret_cast<typename Body::Shared *>(shared));
}

HOST_DEVICE inline void Thread::sync() const
{
#ifdef __CUDA_ARCH__
    __syncthreads();
#elif defined(GPUOPS_FAKE_CUDA)
    fake_cuda_sync();
#endif
}

/* For what several threads may write, if all of them write the same. On the host TSan, which is to
 * find the races, takes whole words written like this for none. */
template <class T>
HOST_DEVICE inline void store_same(T *address, T value)
{
#ifdef __CUDA_ARCH__
    *address = value;
#else
    if constexpr (sizeof(T) == 16) {
        uint64_t words[2];
        memcpy(words, &value, sizeof words);
        for (int i = 0; i < 2; i++)
            __atomic_store_n(reinterpret_cast<uint64_t *>(address) + i, words[i], __ATOMIC_RELAXED);
    } else {
        __atomic_store(address, &value, __ATOMIC_RELAXED);
    }
#endif
}

/* Atomic operations; on the host too, where the threads only take turns, so that it shows where
 * there is none. */

#ifndef __CUDA_ARCH__
/* Sets a number to what a function makes of it, and returns what it was. */
template <class T, class Function>
inline T atomically(T *address, const Function &function)
{
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do after = static_cast<T>(function(before));
    while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
    return before;
}
#endif

template <class T>
HOST_DEVICE inline void atomic_add(T *address, T value)
{
#ifdef __CUDA_ARCH__
    atomicAdd(address, value);
#else
    atomically(address, [&](T before) { return before + value; });
#endif
}

HOST_DEVICE inline void atomic_add(uint64_t *address, uint64_t value)
{
#ifdef __CUDA_ARCH__
    atomicAdd(reinterpret_cast<unsigned long long *>(address), value);
#else
    atomically(address, [&](uint64_t before) { return before + value; });
#endif
}

/* Launches with cudaLaunchKernel: CUDA 13's <<<>>> drops the status of the launch. */
template <class Body>
Status launch(const Body &body, Grid grid, void *stream)
{
    const void *symbol = reinterpret_cast<const void *>(&kernel<Body>);
#ifdef GPUOPS_FAKE_CUDA
    fake_cuda_twin(symbol, twin<Body>, Body::MAX_THREADS, sizeof(Body));
#endif
    void *arguments[] = {const_cast<Body *>(&body)};
    return launch_kernel(symbol, grid, arguments, stream);
}

template <class Body>
Status launch_with_shared(const Body &body, Grid grid, void *stream)
{
    static_assert(sizeof(typename Body::Shared) <= 48 << 10, "more than a block has");
    const void *symbol = reinterpret_cast<const void *>(&kernel_with_shared<Body>);
#ifdef GPUOPS_FAKE_CUDA
    fake_cuda_twin(symbol, twin_with_shared<Body>, Body::MAX_THREADS, sizeof(Body));
#endif
    void *arguments[] = {const_cast<Body *>(&body)};
    return launch_kernel(symbol, grid, arguments, stream);
}

#endif /* __CUDACC__ */

#endif
