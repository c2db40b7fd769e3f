/* What the ways of scatter and scatter_add on the CPU share: how one walks over Scatter's loops and
 * reads its indices. */
#ifndef GPUOPS_SCATTER_CPU_CUH
#define GPUOPS_SCATTER_CPU_CUH

#include "scatter.cuh"

#include <string.h>

constexpr int64_t GRAIN_BYTES = 512 << 10; /* what is worth waking a thread for */
constexpr int PREFETCH_DISTANCE = 24;

template <class T>
static inline void store_unaligned(char *at, T value)
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

/* Where part `number` of a count begins, without a product that may be too large. */
static inline int64_t share(int64_t count, int64_t number, int64_t parts)
{
    return count / parts * number + count % parts * number / parts;
}

/* What is written or added as one number: a complex number, a row of two floats, or 16 bytes. */
template <class T>
struct Pair {
    T first, second;

    Pair operator+(Pair other) const
    {
        return {static_cast<T>(first + other.first), static_cast<T>(second + other.second)};
    }
};

/* Whether an index names one number (or Pair) of so many bytes, and nothing else. */
static inline bool is_of_numbers(const Scatter &scatter, size_t bytes)
{
    return scatter.outer == 0 && scatter.inner == 0 && scatter.index <= 1 &&
           scatter.axis_ndim <= 1 && scatter.row_bytes == (int64_t)bytes;
}

/* scatter_ranges.cu, for what is put quickly (scatter_cpu.cu), and for rows of 16-bit floats
 * without other loops than over indices, along an axis of one stride. False: there is no memory for
 * it, and nothing was done. */
bool put_by_ranges(const Scatter &scatter);

#endif
