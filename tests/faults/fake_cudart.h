/* What the files of the fake CUDA runtime share. fake_cudart.c says what it is. */
#ifndef FAKE_CUDART_H
#define FAKE_CUDART_H

#include <cuda_runtime_api.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Only the functions of the runtime and the controls leave the library. */
#pragma GCC visibility push(hidden)

extern struct Machine {
    char driver[16]; /* "fine" or a value of GPUOPS_FAKE_DRIVER */
    size_t memory_bytes;
    int devices;
    int multiprocessors; /* of each device */
    bool locks_read_only;
    int64_t part_bytes;         /* 0: what the package says */
    int64_t slab_bytes;         /* -1: what the package says */
    unsigned copy_microseconds; /* that each call of cudaMemcpyAsync takes */
    bool used;                  /* the driver has been needed and found */
    bool forked;                /* and the process has forked since: CUDA does not survive that */
} machine;

extern _Thread_local int current_device;

/* Calls. Every call holds the lock to its end, kernels included. The fake is not there to be fast,
 * and so no thread ever sees device memory that another thread's kernel is working on. */
int take_lock(void);
void drop_lock(const int *guard);
void count(const char *call);
void visit(const char *call);
cudaError_t need_driver(void);
cudaError_t done(cudaError_t code); /* remembers an error as the thread's last one */
void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define LOCKED() int guard_ __attribute__((cleanup(drop_lock), unused)) = take_lock()

/* The first lines of every call: some work without a driver, most do not. */
#define BEGIN_WITHOUT_DRIVER()                                                                     \
    visit(__func__);                                                                               \
    LOCKED();                                                                                      \
    count(__func__)

#define BEGIN()                                                                                    \
    BEGIN_WITHOUT_DRIVER();                                                                        \
    REQUIRE_SUCCESS(need_driver());                                                                \
    REQUIRE_SUCCESS(find_fault(__func__))

/* Calls that release something do so even if they report an error, which may be that of earlier
 * work, and end with `return done(fault)`. But of a lost context nothing is released. */
#define BEGIN_RELEASE()                                                                            \
    BEGIN_WITHOUT_DRIVER();                                                                        \
    REQUIRE_SUCCESS(need_driver());                                                                \
    const cudaError_t fault = find_fault(__func__);                                                \
    REQUIRE(!context_is_lost(), fault)

#define REQUIRE(condition, code)                                                                   \
    if (!(condition)) return done(code)

/* Returns the error of another function that found one. */
#define REQUIRE_SUCCESS(expression)                                                                \
    do {                                                                                           \
        cudaError_t code_ = (expression);                                                          \
        if (code_ != cudaSuccess) return done(code_);                                              \
    } while (0)

/* Calls that fail because a test wants it, in fake_faults.c. */

/* What the fault gives that befalls a call, if any does. Every call that may fail asks. */
cudaError_t find_fault(const char *call);
/* A fatal error has ended the context: no work is done any more. The caller who waits for work is
 * told, and from then on everybody. */
bool context_is_lost(void);
cudaError_t tell_of_lost_context(void);
void end_faults(void);

/* Streams and the work on them, in fake_streams.c. */

typedef struct Stream Stream;
typedef struct Operation Operation;
typedef void (*Twin)(void **arguments, unsigned block, unsigned blocks, unsigned threads);

/* One end of a copy, or what a memset sets. The allocation is known by its number, because another
 * one may stand at the same address by the time the work is done. */
typedef struct Place {
    void *address;
    long allocation; /* 0: host memory that CUDA knows nothing of */
} Place;

/* Work on a stream. Each kind has a function that does it, and uses some of the members. */
struct Operation {
    Operation *next;
    Stream *stream;
    long number;      /* in the order of all calls */
    const char *call; /* the function that asked for it, or the name of a kernel */
    void (*run)(Operation *);

    Place target, source;
    int target_device, source_device;
    size_t bytes;
    int value; /* of a memset */

    Twin twin;
    void *argument;
    unsigned blocks, threads;

    struct ModuleKernel *module_kernel; /* of a library, with the three dimensions of its launch */
    unsigned grid[3], block[3];

    int64_t end_milliseconds;          /* of a kernel that takes its time */
    long event;                        /* that is recorded */
    long awaited_stream, awaited_work; /* what a wait waits for */
    size_t copied_bytes;               /* of what the caller may change after the call: */
    _Alignas(max_align_t) unsigned char copied[]; /* the source of a copy, or a functor */
};

/* What a handle stands for. The second one is for callers that are about to enqueue. */
cudaError_t find_stream(const char *call, cudaStream_t handle, Stream **stream);
cudaError_t find_working_stream(const char *call, cudaStream_t handle, Stream **stream);
int device_of(const Stream *stream);
long capture_of(const Stream *stream); /* the number of the capture that it takes part in, or 0 */

/* A zeroed operation, or NULL. It is freed once it has run. */
Operation *new_operation(const char *call, Stream *stream, void (*run)(Operation *),
                         size_t copied_bytes);
/* Puts it at the end of its stream, and runs it if the scheduler says so. */
void enqueue(Operation *operation);
void run_to_the_end_of(Stream *stream);
void run_all_of(int device);
void run_everything(void);

/* For calls that no capture sees: an error while one is going on, unless the thread is relaxed. */
cudaError_t refuse_while_capturing(const char *call);

/* The order of things that a real GPU does all at once: with the shuffled scheduler a random one,
 * and else 0, the natural one. at_turn is the number, below count, that comes next in it. */
uint64_t draw_order(void);
unsigned at_turn(uint64_t order, unsigned turn, unsigned count);

void count_streams(long *streams, long *events);
void set_scheduler(const char *name, uint64_t seed);

/* What this thread of the process is running, a block of a kernel. */
typedef struct Running {
    const Operation *kernel; /* or NULL */
    unsigned block;
    uint64_t order; /* of the block's threads */
    bool has_barriers;
    bool given_up; /* after misuse that makes the rest of the kernel meaningless */
} Running;
extern _Thread_local Running running;
/* What comes now comes after all threads that have run. */
void end_threads(void);

/* Looks at what the argument of a kernel points to: at a launch, and once more when it runs. */
bool functor_is_usable(const Operation *operation, bool runs);

/* Libraries of machine code, in fake_modules.c. */
struct ModuleKernel *find_module_kernel(const void *function);
cudaError_t launch_module_kernel(struct ModuleKernel *kernel, dim3 grid, dim3 block,
                                 void **arguments, size_t shared_bytes, Stream *stream);
long count_libraries(void);

/* Memory, in fake_memory.c. */

typedef struct Pool Pool;

typedef struct Block {
    struct Block *next;
    unsigned char *data; /* between two red zones */
    size_t bytes;
    long number; /* of the allocation: no two have the same */
    enum cudaMemoryType type;
    int device;     /* where it is, or the current one when it was made, if it is pinned */
    Pool *pool;     /* that it comes from, or NULL */
    long capture;   /* in which it was allocated, or 0 */
    bool allocated; /* in the order of its stream */
    bool freed;     /* by the caller, though perhaps not yet in the order of the stream */
    bool mapped;    /* by itself, and not from the heap */
    bool read_only; /* registered so */
    bool checked;   /* since it was freed; the next time is when its memory goes, or at the end */
} Block;

typedef struct Blocks {
    Block *first, *last; /* the oldest comes first */
    long count;
    size_t bytes;
    uintptr_t low, high; /* of all that were ever in it */
} Blocks;

/* A live allocation, poisoned; and its end. */
cudaError_t new_block(Block **made, size_t bytes, enum cudaMemoryType type, int device);
void put_into_quarantine(Block *block);

/* Registered is memory of others, which has no red zones. */
extern Blocks live, quarantine, registered;
extern size_t peak_bytes;

/* The allocation, or the registered memory, that holds all of a range, or NULL. */
Block *holder(const void *address, size_t bytes);
/* Whether a range lies in part, or in pieces, in registered memory. */
bool is_torn(const void *address, size_t bytes);
/* Whether a range meets any of the blocks or their red zones. */
bool touches(const Blocks *blocks, const void *address, size_t bytes);
bool is_inside(const Blocks *blocks, const void *address);
const char *kind_of(const Block *block);
/* Work may touch device memory between these two, and nobody else at any time. */
void show_device_memory(int device);
void hide_device_memory(void);
/* Gives back what pools of a device (-1: of all) keep beyond their release thresholds, or all. */
void trim_pools(int device, bool entirely);
long count_pools(size_t *reserved_bytes);
void check_all_memory(bool again);

/* The shared memory of the one block that is run: poisoned, between two red zones. Closing it tells
 * on which side a red zone was hit, or NULL. */
enum { MOST_SHARED_BYTES = 48 << 10 };
void *open_shared_memory(size_t bytes);
const char *close_shared_memory(void);

#pragma GCC visibility pop

#endif
