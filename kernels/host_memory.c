/* Memory of the host for large results, and for what calls need beside them, which is kept warm.
 *
 * Fresh memory costs a page fault for each page, and the kernel clears it, which takes about as
 * long as a large result takes to cross the bus. So results have huge pages, which make that
 * several times as fast, and the memory of those that are gone is kept for those to come, up to a
 * bound.
 *
 *     | head | data, from a multiple of the huge page on ... |
 *
 * What is kept is the kernel's to take where memory is short (MADV_FREE): its pages then come back
 * as zeros, one fault each. Of huge pages to say so takes half a millisecond for a GiB, and they
 * stay as warm as they were. */
#define _GNU_SOURCE
#include "gpuops.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    HEAD_BYTES = 64 << 10, /* whole pages on every system; memory is only what is touched of it */
    HUGE_PAGE_BYTES = 2 << 20
};

static const int64_t DEFAULT_LIMIT = (int64_t)1 << 30;
/* Nobody asks for more, and no sum of sizes overflows. */
static const int64_t MOST_BYTES = (int64_t)1 << 46;

typedef struct Block {
    int64_t bytes; /* of the data, whole huge pages */
    struct Block *next;
} Block;

/* What is kept: what was given last comes first. The lock is held for no call of the kernel. */
static struct {
    pthread_mutex_t lock;
    Block *first;
    int64_t bytes;
} kept = {PTHREAD_MUTEX_INITIALIZER, NULL, 0};

static void lock_kept(void)
{
    pthread_mutex_lock(&kept.lock);
}

static void unlock_kept(void)
{
    pthread_mutex_unlock(&kept.lock);
}

/* A child has a copy of all blocks, and the list is whole while the lock is held. */
static void watch_for_fork(void)
{
    pthread_atfork(lock_kept, unlock_kept, unlock_kept);
}

Status bytes_of_environment(const char *variable, int64_t usual, const char *zero, int64_t *bytes)
{
    const char *wanted = getenv(variable);
    *bytes = usual;
    if (wanted == NULL || *wanted == '\0') return STATUS_OK;
    char *end;
    *bytes = strtoll(wanted, &end, 10);
    if (*end == '\0' && *bytes >= 0) return STATUS_OK;
    return fail(STATUS_VALUE_ERROR, "%s is '%.40s': expected a number of bytes, or 0 %s", variable,
                wanted, zero);
}

Status host_memory_limit(int64_t *bytes)
{
    static int64_t known = -1; /* every thread would find the same, so a race is harmless */
    *bytes = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (*bytes >= 0) return STATUS_OK;
    const int64_t quarter = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 4;
    const int64_t usual = quarter > 0 && quarter < DEFAULT_LIMIT ? quarter : DEFAULT_LIMIT;
    const Status status =
        bytes_of_environment("GPUOPS_HOST_CACHE", usual, "to keep no memory of results", bytes);
    if (status == STATUS_OK) __atomic_store_n(&known, *bytes, __ATOMIC_RELAXED);
    return status;
}

static char *data_of(Block *block)
{
    return (char *)block + HEAD_BYTES;
}

static Block *block_of(const void *data)
{
    return (Block *)((char *)data - HEAD_BYTES);
}

static void unmap_block(Block *block)
{
    (void)munmap(block, (size_t)block->bytes + HEAD_BYTES);
}

static Block *map_block(int64_t bytes)
{
    /* With room for a head in front of the first huge page; what is left at both ends goes back. */
    const size_t room = (size_t)bytes + HUGE_PAGE_BYTES + HEAD_BYTES;
    void *mapped = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    const uintptr_t begin = (uintptr_t)mapped, end = begin + room;
    const uintptr_t data = (begin + HEAD_BYTES + HUGE_PAGE_BYTES - 1) & -(uintptr_t)HUGE_PAGE_BYTES;
    const uintptr_t head = data - HEAD_BYTES, last = data + (uintptr_t)bytes;
    if (head > begin) (void)munmap(mapped, head - begin);
    if (end > last) (void)munmap((void *)last, end - last);
    (void)madvise((void *)data, (size_t)bytes, MADV_HUGEPAGE); /* not every system has them */
    Block *block = (Block *)head;
    block->bytes = bytes;
    return block;
}

/* The smallest that fits and is no more than a quarter too large; NULL where there is none. */
static Block *take_kept(int64_t bytes)
{
    Block **best = NULL;
    lock_kept();
    for (Block **link = &kept.first; *link != NULL; link = &(*link)->next) {
        const int64_t found = (*link)->bytes;
        if (found < bytes || found > bytes + bytes / 4) continue;
        if (best == NULL || found < (*best)->bytes) best = link;
    }
    Block *block = best == NULL ? NULL : *best;
    if (block != NULL) {
        *best = block->next;
        kept.bytes -= block->bytes;
    }
    unlock_kept();
    return block;
}

void *host_take(int64_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_for_fork);
    if (bytes > MOST_BYTES) return NULL;
    if (bytes < 1) bytes = 1;
    bytes = round_up(bytes, HUGE_PAGE_BYTES);
    Block *block = take_kept(bytes);
    if (block == NULL) block = map_block(bytes);
    if (block == NULL) { /* what is kept may be all that is missing */
        host_flush();
        block = map_block(bytes);
    }
    return block == NULL ? NULL : data_of(block);
}

/* Takes what was given first, until the rest is within a limit. */
static Block *take_surplus(int64_t limit)
{
    Block *surplus = NULL;
    while (kept.bytes > limit) {
        Block **last = &kept.first;
        while ((*last)->next != NULL) last = &(*last)->next;
        Block *block = *last;
        *last = NULL;
        kept.bytes -= block->bytes;
        block->next = surplus;
        surplus = block;
    }
    return surplus;
}

static void unmap_all(Block *block)
{
    while (block != NULL) {
        Block *next = block->next;
        unmap_block(block);
        block = next;
    }
}

void host_give(void *data)
{
    Block *block = block_of(data);
    int64_t limit;
    if (host_memory_limit(&limit) != STATUS_OK || block->bytes > limit) {
        unmap_block(block);
        return;
    }
    (void)madvise(data, (size_t)block->bytes, MADV_FREE);
    lock_kept();
    block->next = kept.first;
    kept.first = block;
    kept.bytes += block->bytes;
    Block *surplus = take_surplus(limit);
    unlock_kept();
    unmap_all(surplus);
}

void host_flush(void)
{
    lock_kept();
    Block *all = take_surplus(0);
    unlock_kept();
    unmap_all(all);
}

int64_t host_bytes(const void *data)
{
    return block_of(data)->bytes;
}
