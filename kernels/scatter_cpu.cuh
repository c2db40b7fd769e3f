/* What the ways of scatter and scatter_add on the CPU share: how one walks over Scatter's loops and
 * reads its indices. */
#ifndef GPUOPS_SCATTER_CPU_CUH
#define GPUOPS_SCATTER_CPU_CUH

#include "scatter.cuh"

#include <string.h>

constexpr int64_t GRAIN_BYTES = 512 << 10; /* what is worth waking a thread for */
constexpr int BLOCK = 512;                 /* indices that are looked at before what they name is */
constexpr int PREFETCH_DISTANCE = 24;

/* The places of a block of indices that lie in begin..end, and which of these indices they are. */
using FindPlaces = int (*)(const Scatter &, int64_t first, int count, int64_t begin, int64_t end,
                           int64_t *places, int *elements);

template <class T>
static inline T load(const char *at)
{
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

template <class T>
static inline void store(char *at, T value)
{
    memcpy(at, &value, sizeof value);
}

static inline int64_t axis_offset(const Scatter &scatter, int64_t place)
{
    if (scatter.axis_ndim == 1) return place * scatter.axis_strides[0];
    int64_t offset = 0;
    for (int i = scatter.axis_ndim - 1; i >= 0; i--) {
        offset += place % scatter.axis_counts[i] * scatter.axis_strides[i];
        place /= scatter.axis_counts[i];
    }
    return offset;
}

/* How far into values the element of an index lies. */
static inline int64_t value_offset(const Scatter &scatter, int64_t element)
{
    const ScatterLoop *loops = scatter.loops + scatter.outer;
    if (scatter.index == 1) return element * loops[0].value;
    int64_t offset = 0;
    for (int i = scatter.index - 1; i >= 0; i--) {
        offset += element % loops[i].count * loops[i].value;
        element /= loops[i].count;
    }
    return offset;
}

static inline void outer_offsets(const Scatter &scatter, int64_t number, int64_t *x, int64_t *value)
{
    *x = *value = 0;
    for (int i = scatter.outer - 1; i >= 0; i--) {
        const ScatterLoop &loop = scatter.loops[i];
        *x += number % loop.count * loop.x;
        *value += number % loop.count * loop.value;
        number /= loop.count;
    }
}

/* What is done with the rows under one index. The innermost loop goes to the function as a whole,
 * with a count and the strides. */
template <class Function>
static void for_inner(const ScatterLoop *loops, int count, char *x, const char *value,
                      const Function &function)
{
    if (count == 0) return function(x, value, ScatterLoop{1, 0, 0});
    if (count == 1) return function(x, value, loops[0]);
    for (int64_t i = 0; i < loops[0].count; i++)
        for_inner(loops + 1, count - 1, x + i * loops[0].x, value + i * loops[0].value, function);
}

/* Whether an index names one number of so many bytes, and nothing else. */
static inline bool is_of_numbers(const Scatter &scatter, size_t bytes)
{
    return scatter.outer == 0 && scatter.inner == 0 && scatter.index <= 1 &&
           scatter.axis_ndim <= 1 && scatter.row_bytes == (int64_t)bytes;
}

/* scatter_ranges.cu, for single numbers and for any rows of 16-bit floats; false: nothing was done,
 * for there is no memory for it. */
bool put_by_ranges(const Scatter &scatter);

#endif
