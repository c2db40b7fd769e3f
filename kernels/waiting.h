/* What those need who wait for others: a clock, and a lock for moments. */
#ifndef GPUOPS_WAITING_H
#define GPUOPS_WAITING_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

static inline int64_t microseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

/* For a lock that is held for less time than it takes to sleep and to be woken: whoever finds it
 * taken tries again for a while before that. */
#ifdef PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#define BRIEF_MUTEX_INITIALIZER PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#else
#define BRIEF_MUTEX_INITIALIZER PTHREAD_MUTEX_INITIALIZER
#endif

#endif
