/* The worker pool of the CPU backend and of large copies to and from the GPU.
 *
 * One loop runs on the pool at a time; a caller that finds it taken works alone, so that any number
 * of Python threads may call at once without waiting for each other. A loop over a range has as
 * many workers as there are grains for, which are what is worth waking one for. One whose work
 * comes bit by bit has those who are called when there is some, and who leave when there is none.
 * To wake a thread takes some microseconds: the caller wakes four, and each of these four more. Its
 * processor may take ten times as long to wake, or have others to run for milliseconds. So whoever
 * has nothing to do looks for some time whether there is, and sleeps only then, or where others
 * were quicker; and no loop waits for a worker who sleeps. Workers are never joined (the process
 * may end at any time), and are started anew in a forked child, where only the forking thread lives
 * on. */
#define _GNU_SOURCE
#include "gpuops.h"
#include "waiting.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_THREADS = 1024 };
/* As long as a part of a large copy is on its way, and twice as long as waking up takes. */
enum { AWAKE_MICROSECONDS = 100 };
/* Where 15 sleep, 4 to 64 MiB go up from the host of an H200 in 0.13 to 0.18 ms less than if each
 * woke two, and in 0.1 less than if the caller woke all. */
enum { WOKEN_BY_EACH = 4 };

static struct {
    pthread_mutex_t taken; /* held for the length of one loop */
    pthread_mutex_t lock;  /* guards all that follows, but for next */
    pthread_cond_t wake, idle;
    int workers;  /* threads started */
    int sleeping; /* of these, */
    int woken;    /* of whom these have yet to come */
    int looking;  /* awake, and in no loop */
    int active;   /* inside the loop; atomic, as others watch it without the lock */
    int wanted;   /* that the loop still has a place for; atomic likewise */
    RangeFunction function;
    void *context;
    int64_t count, chunk; /* 0: work comes bit by bit */
    int64_t next;         /* first index that nobody has taken; atomic */
} pool = {.taken = PTHREAD_MUTEX_INITIALIZER,
          .lock = BRIEF_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .idle = PTHREAD_COND_INITIALIZER};

static void reset_after_fork(void)
{
    pool.taken = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.lock = (pthread_mutex_t)BRIEF_MUTEX_INITIALIZER;
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.idle = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.workers = 0;
    pool.active = 0;
    pool.sleeping = pool.woken = pool.looking = pool.wanted = 0;
}

static void watch_for_fork(void)
{
    pthread_atfork(NULL, NULL, reset_after_fork);
}

static int known_threads; /* atomic; what all threads would find is the same: a race is harmless */

/* Apart, so that those who ask later need no room on the stack, nor have it guarded. */
__attribute__((noinline)) static Status find_threads(int *count)
{
    const char *wanted = getenv("GPUOPS_NUM_THREADS");
    if (wanted != NULL && *wanted != '\0') {
        char *end;
        long value = strtol(wanted, &end, 10);
        if (*end != '\0' || value < 1 || value > MAX_THREADS)
            return fail(STATUS_VALUE_ERROR,
                        "GPUOPS_NUM_THREADS is '%.40s': expected a number from 1 to %d", wanted,
                        MAX_THREADS);
        *count = (int)value;
    } else {
        cpu_set_t allowed;
        *count = sched_getaffinity(0, sizeof allowed, &allowed) == 0
                     ? CPU_COUNT(&allowed)
                     : (int)sysconf(_SC_NPROCESSORS_ONLN);
        if (*count < 1) *count = 1;
        if (*count > MAX_THREADS) *count = MAX_THREADS;
    }
    __atomic_store_n(&known_threads, *count, __ATOMIC_RELAXED);
    return STATUS_OK;
}

Status cpu_threads(int *count)
{
    *count = __atomic_load_n(&known_threads, __ATOMIC_RELAXED);
    return *count > 0 ? STATUS_OK : find_threads(count);
}

static void take_chunks(RangeFunction function, void *context, int64_t count, int64_t chunk)
{
    for (;;) {
        int64_t begin = __atomic_fetch_add(&pool.next, chunk, __ATOMIC_RELAXED);
        if (begin >= count) return;
        function(context, begin, begin + chunk < count ? begin + chunk : count);
    }
}

static void set(int *number, int value)
{
    __atomic_store_n(number, value, __ATOMIC_RELAXED);
}

/* Looks at a number until it is 0, or until it is not, or for long enough. */
static void watch(const int *number, bool for_zero)
{
    const int64_t begin = microseconds();
    while ((__atomic_load_n(number, __ATOMIC_RELAXED) == 0) != for_zero &&
           microseconds() - begin < AWAKE_MICROSECONDS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

/* With the lock. One that was woken on the processor of its caller, and came late, would keep that
 * from going on: hence it yields, but once, as on a busy machine others keep what they get. */
static void await_place(void)
{
    if (pool.wanted == 0) {
        pool.looking++;
        pthread_mutex_unlock(&pool.lock);
        sched_yield();
        watch(&pool.wanted, false);
        pthread_mutex_lock(&pool.lock);
        pool.looking--;
    }
    pool.sleeping++;
    while (pool.wanted == 0) {
        pthread_cond_wait(&pool.wake, &pool.lock);
        if (pool.woken > 0) pool.woken--;
    }
    pool.sleeping--;
}

/* Called with the lock held, and by a worker only where there was a place for it: one that comes
 * when the loop has no more wakes nobody. */
static void unlock_and_wake(void)
{
    const int missing = pool.wanted - pool.looking - pool.woken;
    const int some = (int)smaller(smaller(missing, pool.sleeping - pool.woken), WOKEN_BY_EACH);
    if (some > 0) pool.woken += some;
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < some; i++) pthread_cond_signal(&pool.wake);
}

static void *work(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        await_place();
        set(&pool.wanted, pool.wanted - 1);
        set(&pool.active, pool.active + 1);
        RangeFunction function = pool.function;
        void *context = pool.context;
        int64_t count = pool.count, chunk = pool.chunk;
        unlock_and_wake();

        if (count == 0)
            function(context, 0, 0);
        else
            take_chunks(function, context, count, chunk);

        pthread_mutex_lock(&pool.lock);
        if (count > 0) set(&pool.wanted, 0); /* nothing is left to take */
        set(&pool.active, pool.active - 1);
        if (pool.active == 0) pthread_cond_signal(&pool.idle);
    }
    return NULL;
}

/* Called with both locks held. Fewer threads than wanted is no error: the caller always works. */
static void start_workers(int wanted)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_for_fork);

    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's own threads */
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    while (pool.workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, NULL) != 0) break;
        pool.workers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* False: the pool is taken, or there are no workers. */
static bool take_pool(int *threads)
{
    return cpu_threads(threads) == STATUS_OK && *threads > 1 &&
           pthread_mutex_trylock(&pool.taken) == 0;
}

static void open_loop(int threads, RangeFunction function, void *context, int64_t count,
                      int64_t chunk, int64_t wanted)
{
    pthread_mutex_lock(&pool.lock);
    /* All of them, so that threads seldom begin while another one forks. */
    if (pool.workers < threads - 1) start_workers(threads - 1);
    pool.function = function;
    pool.context = context;
    pool.count = count;
    pool.chunk = chunk;
    __atomic_store_n(&pool.next, 0, __ATOMIC_RELAXED);
    set(&pool.wanted, (int)wanted);
    pool.woken = 0; /* a signal may be lost: glibc's before 2.41 do that, though very seldom */
    unlock_and_wake();
}

bool parallel_begin(RangeFunction function, void *context)
{
    int threads;
    if (!take_pool(&threads)) return false;
    open_loop(threads, function, context, 0, 0, 0);
    return true;
}

/* Those who were called before, and have yet to come, are among these. */
void parallel_call(int workers)
{
    pthread_mutex_lock(&pool.lock);
    set(&pool.wanted, (int)smaller(workers, pool.workers));
    unlock_and_wake();
}

/* A worker that wakes only now finds the loop closed and goes back to sleep. */
void parallel_end(void)
{
    pthread_mutex_lock(&pool.lock);
    set(&pool.wanted, 0);
    if (pool.active > 0) {
        pthread_mutex_unlock(&pool.lock);
        watch(&pool.active, true);
        pthread_mutex_lock(&pool.lock);
    }
    while (pool.active > 0) pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.taken);
}

void parallel_for(int64_t count, int64_t grain, RangeFunction function, void *context)
{
    int threads;
    if (count / 2 < grain || !take_pool(&threads)) {
        if (count > 0) function(context, 0, count);
        return;
    }
    /* Eight chunks a thread even out what the scheduler and the page faults make uneven. */
    int64_t chunk = count / (8 * (int64_t)threads);
    if (chunk < grain) chunk = grain;
    const int64_t others = count / chunk - 1; /* the caller takes one as well */
    open_loop(threads, function, context, count, chunk, others < threads ? others : threads - 1);
    take_chunks(function, context, count, chunk);
    parallel_end();
}
