/* The worker pool of the CPU backend and of large copies to and from the GPU.
 *
 * One loop runs on the pool at a time; a caller that finds it taken works alone, so that any number
 * of Python threads may call at once without waiting for each other. A loop has as many workers as
 * there are grains for, which are what is worth waking one for. To wake a thread takes some
 * microseconds: the caller wakes two, and each of these two more. The workers sleep between loops,
 * are never joined (the process may end at any time), and are started anew in a forked child, where
 * only the forking thread lives on. */
#define _GNU_SOURCE
#include "gpuops.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_THREADS = 1024 };

static struct {
    pthread_mutex_t taken; /* held for the length of one loop */
    pthread_mutex_t lock;  /* guards all that follows, but for next */
    pthread_cond_t wake, idle;
    int workers; /* threads started */
    int active;  /* threads now inside the loop */
    int wanted;  /* that the loop still has a place for */
    int asleep;  /* of these, whom nobody has woken so far */
    RangeFunction function;
    void *context;
    int64_t count, chunk;
    int64_t next; /* first index that nobody has taken; atomic */
} pool = {.taken = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .idle = PTHREAD_COND_INITIALIZER};

static void reset_after_fork(void)
{
    pool.taken = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.idle = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.workers = 0;
    pool.active = 0;
    pool.wanted = 0;
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

/* Called with the lock held, and by a worker only where there was a place for it: one that is woken
 * in vain wakes nobody. */
static void unlock_and_wake(void)
{
    const int some = pool.asleep < 2 ? pool.asleep : 2;
    pool.asleep -= some;
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < some; i++) pthread_cond_signal(&pool.wake);
}

static void *work(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.wanted == 0) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.wanted--;
        pool.active++;
        RangeFunction function = pool.function;
        void *context = pool.context;
        int64_t count = pool.count, chunk = pool.chunk;
        unlock_and_wake();

        take_chunks(function, context, count, chunk);

        pthread_mutex_lock(&pool.lock);
        pool.wanted = pool.asleep = 0; /* nothing is left to take */
        if (--pool.active == 0) pthread_cond_signal(&pool.idle);
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

/* For as many workers as there are chunks, but for those that the caller takes. */
static bool open_loop(int64_t count, int64_t grain, RangeFunction function, void *context,
                      int64_t callers)
{
    int threads;
    if (cpu_threads(&threads) != STATUS_OK || threads == 1 ||
        pthread_mutex_trylock(&pool.taken) != 0)
        return false;

    /* Eight chunks a thread even out what the scheduler and the page faults make uneven. */
    int64_t chunk = count / (8 * (int64_t)threads);
    if (chunk < grain) chunk = grain;
    int64_t wanted = count / chunk - callers;
    if (wanted > threads - 1) wanted = threads - 1;

    pthread_mutex_lock(&pool.lock);
    /* All of them, so that threads seldom begin while another one forks. */
    if (pool.workers < threads - 1) start_workers(threads - 1);
    pool.function = function;
    pool.context = context;
    pool.count = count;
    pool.chunk = chunk;
    __atomic_store_n(&pool.next, 0, __ATOMIC_RELAXED);
    pool.wanted = pool.asleep = (int)wanted;
    unlock_and_wake();
    return true;
}

bool parallel_begin(int64_t count, int64_t grain, RangeFunction function, void *context)
{
    return open_loop(count, grain, function, context, 0);
}

/* A worker that wakes only now finds the loop closed and goes back to sleep. */
void parallel_end(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.wanted = pool.asleep = 0;
    while (pool.active > 0) pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.taken);
}

void parallel_for(int64_t count, int64_t grain, RangeFunction function, void *context)
{
    if (count / 2 >= grain && open_loop(count, grain, function, context, 1)) {
        take_chunks(function, context, count, pool.chunk);
        parallel_end();
    } else if (count > 0) {
        function(context, 0, count);
    }
}
