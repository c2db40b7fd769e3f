/* Blocks of the fake CUDA runtime whose threads wait for each other: kernels with shared memory.
 *
 * Each thread of a block is a fiber with a stack of its own. The block lets one fiber after the
 * other run until it comes to a barrier or to its end, and begins again when all have come to the
 * barrier. Threads take turns nowhere else, so that a barrier which is missing may do no harm here;
 * the shuffled scheduler, which puts the threads into another order after each barrier, brings it
 * to light.
 *
 * Fibers outlive their block and serve all later ones, of whatever thread holds the lock.
 *
 * TSan is told that all threads of a plain kernel run at the same time, and those of a block with
 * shared memory from barrier to barrier: what they do to the same memory without an atomic
 * operation is a race, though here they only ever take turns.
 */
#define _GNU_SOURCE
#include "fake_cudart.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(left, stack, bytes) ((void)(stack), (void)(bytes))
#define __sanitizer_finish_switch_fiber(entered, stack, bytes) ((void)(stack), (void)(bytes))
#endif

enum { MOST_THREADS = 1024, STACK_BYTES = 128 << 10 };

/* The compiler's own jumps. longjmp looks after what is on the stack that it leaves, as do ASan and
 * _FORTIFY_SOURCE when they see it, and swapcontext takes a system call. */
typedef void *Mark[5];
#define set(mark) __builtin_setjmp(mark)

/* Sanitizers count calls and returns, which do not match where the stack is another on the way out.
 */
#define UNSEEN __attribute__((noinline, no_sanitize("address", "thread")))

__attribute__((noreturn)) UNSEEN static void jump(Mark mark)
{
    __builtin_longjmp(mark, 1);
}

#ifdef __SANITIZE_THREAD__
/* A few of TSan's contexts stand for all threads: a prime number of them, so that those who meet
 * are hardly ever the same one. */
enum { CONTEXTS = 13 };
static void *contexts[CONTEXTS], *host_context;
static char begun, ended; /* what the threads come after, and what comes after them */

UNSEEN static void begin_threads(void)
{
    host_context = __tsan_get_current_fiber();
    __tsan_release(&begun);
}

UNSEEN static void become_thread(unsigned thread)
{
    void **context = &contexts[thread % CONTEXTS];
    if (!*context) {
        *context = __tsan_create_fiber(0);
        __tsan_set_fiber_name(*context, "of a kernel");
    }
    __tsan_switch_to_fiber(*context, __tsan_switch_to_fiber_no_sync);
    __tsan_acquire(&begun);
}

UNSEEN static void become_host(void)
{
    __tsan_release(&ended);
    __tsan_switch_to_fiber(host_context, __tsan_switch_to_fiber_no_sync);
}

UNSEEN void end_threads(void)
{
    __tsan_acquire(&ended);
}
#else
static void begin_threads(void) {}
static void become_thread(unsigned thread) {}
static void become_host(void) {}
void end_threads(void) {}
#endif

typedef struct Fiber {
    unsigned char *stack; /* the lowest address, above a page that nobody may touch */
    Mark top;             /* before it runs a thread */
    Mark place;           /* where it left off */
    void *sanitizer;      /* what ASan remembers of it */
    bool waits;           /* at a barrier */
} Fiber;
static Fiber fibers[MOST_THREADS];

typedef void Body(void *context, unsigned thread, void *shared);

/* The block that is run now; the lock protects it, for a kernel never lets go of that. */
static struct {
    Body *body;
    void *context, *shared;
    unsigned thread;
    bool given_up;

    Mark place; /* where to go on when a fiber stops */
    void *sanitizer;
    const void *stack; /* of the thread of the process that runs the block */
    size_t stack_bytes;
} block;

/* Goes back from a fiber to its block, until the block goes on with it. */
UNSEEN static void leave(Fiber *fiber)
{
    if (set(fiber->place) == 0) {
        __sanitizer_start_switch_fiber(&fiber->sanitizer, block.stack, block.stack_bytes);
        jump(block.place);
    }
    __sanitizer_finish_switch_fiber(fiber->sanitizer, &block.stack, &block.stack_bytes);
}

/* Nothing here may be thread-local: the next block may be run by another thread of the process,
 * and the compiler would know nothing of that. */
UNSEEN static void run_fiber(void)
{
    __sanitizer_finish_switch_fiber(NULL, &block.stack, &block.stack_bytes);
    set(fibers[block.thread].top);
    for (;;) {
        if (!block.given_up) block.body(block.context, block.thread, block.shared);
        leave(&fibers[block.thread]);
    }
}

/* Lets a fiber run up to its next barrier or its end. */
UNSEEN static void enter(Fiber *fiber, const ucontext_t *first)
{
    fiber->waits = false;
    become_thread(block.thread);
    if (set(block.place) == 0) {
        __sanitizer_start_switch_fiber(&block.sanitizer, fiber->stack, STACK_BYTES);
        if (first) setcontext(first);
        jump(fiber->place);
    }
    __sanitizer_finish_switch_fiber(block.sanitizer, NULL, NULL);
    become_host();
}

static bool make_stack(Fiber *fiber)
{
    size_t guard = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *memory = mmap(NULL, guard + STACK_BYTES, PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    if (mprotect(memory + guard, STACK_BYTES, PROT_READ | PROT_WRITE)) {
        munmap(memory, guard + STACK_BYTES);
        return false;
    }
    fiber->stack = memory + guard;
    return true;
}

/* A thread's turn. False without memory. */
static bool run_thread(unsigned thread)
{
    Fiber *fiber = &fibers[thread];
    block.thread = thread;
    if (fiber->stack) {
        enter(fiber, NULL);
        return true;
    }
    if (!make_stack(fiber)) return false;
    /* Stacks all begin at the same place of a page. Without the offset they would use the same few
     * lines of the cache. */
    size_t offset = thread % 32 * 128;
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = fiber->stack;
    first.uc_stack.ss_size = STACK_BYTES - offset;
    makecontext(&first, run_fiber, 0);
    enter(fiber, &first);
    return true;
}

/* Runs every thread up to the next barrier, and returns how many wait there, or -1. */
static int run_to_barrier(unsigned threads)
{
    uint64_t order = draw_order();
    int waiting = 0;
    begin_threads();
    for (unsigned turn = 0; turn < threads; turn++) {
        unsigned thread = at_turn(order, turn, threads);
        if (!run_thread(thread)) return -1;
        waiting += fibers[thread].waits;
    }
    if (running.has_barriers) end_threads();
    return waiting;
}

/* The threads that wait for others in vain forget what they were at. */
static void give_up(unsigned threads)
{
    block.given_up = running.given_up = true;
    for (unsigned thread = 0; thread < threads; thread++)
        if (fibers[thread].waits) run_thread(thread);
    block.given_up = false;
}

static void run_block(unsigned threads, bool has_barriers, size_t shared_bytes, Body *body,
                      void *context)
{
    if (!running.kernel) {
        LOCKED();
        misuse("a block was run outside of a kernel");
        return;
    }
    const char *kernel = running.kernel->call;
    running.given_up = threads > MOST_THREADS || shared_bytes > MOST_SHARED_BYTES;
    if (running.given_up) {
        misuse("%s: no block has %u threads and %zu bytes of shared memory", kernel, threads,
               shared_bytes);
        return;
    }
    block.body = body;
    block.context = context;
    block.shared = open_shared_memory(shared_bytes);
    running.has_barriers = has_barriers;
    unsigned long barriers = 0;
    int waiting = run_to_barrier(threads);
    while (waiting == (int)threads) {
        barriers++;
        waiting = run_to_barrier(threads);
    }
    if (waiting < 0)
        misuse("%s: there is no memory for the stacks of %u threads", kernel, threads);
    else if (waiting > 0)
        misuse("%s: in block %u, %d of %u threads wait at barrier %lu for threads that have ended",
               kernel, running.block, waiting, threads, barriers + 1);
    if (waiting != 0) give_up(threads);
    running.has_barriers = false;
    const char *side = close_shared_memory();
    if (side)
        misuse("%s: block %u wrote %s its %zu bytes of shared memory", kernel, running.block, side,
               shared_bytes);
}

void fake_cuda_fibers(unsigned threads, size_t shared_bytes, Body *body, void *context)
{
    run_block(threads, true, shared_bytes, body, context);
}

/* The threads of a plain kernel's block, for TSan, to whom each needs a stack of its own. */
void fake_cuda_threads(unsigned threads, Body *body, void *context)
{
    run_block(threads, false, 0, body, context);
}

UNSEEN void fake_cuda_sync(void)
{
    if (!running.kernel) {
        LOCKED();
        misuse("a thread waits for its block outside of a kernel");
        return;
    }
    if (!running.has_barriers) {
        if (!running.given_up)
            misuse("%s: a thread waits for its block, but the kernel has no shared memory",
                   running.kernel->call);
        running.given_up = true;
        return;
    }
    Fiber *fiber = &fibers[block.thread];
    fiber->waits = true;
    leave(fiber);
    /* The one jump that leaves frames behind for good, and so the one that ASan is to see. */
    if (block.given_up) jump(fiber->top);
}

/* The threads of a plain kernel's block take their turns in this order. */
unsigned fake_cuda_thread(unsigned turn)
{
    return running.order ? at_turn(running.order, turn, running.kernel->threads) : turn;
}
