/* What the operators that take positions along an axis share: what an index means, how a kernel
 * reads it, and what is said of one that is wrong. */
#ifndef GPUOPS_INDEX_CUH
#define GPUOPS_INDEX_CUH

#include "common.cuh"

#include <string.h>

template <class Index>
HOST_DEVICE inline bool is_negative(Index index)
{
    const bool is_signed = static_cast<Index>(-1) < static_cast<Index>(1);
    return is_signed && index < static_cast<Index>(is_signed ? 0 : 1);
}

/* The place along the axis that an index means, or -1 where it means none. One unsigned comparison
 * sees both ends; the remainder makes wrap take the same time for any index. */
template <class Index>
HOST_DEVICE inline int64_t place_of(Index index, int64_t size, Mode mode)
{
    uint64_t place = static_cast<uint64_t>(index);
    const uint64_t count = static_cast<uint64_t>(size);
    if (place < count) return static_cast<int64_t>(place);
    const bool negative = is_negative(index);
    switch (mode) {
    case MODE_CLIP:
        return negative ? 0 : size - 1;
    case MODE_WRAP:
        if (!negative) return static_cast<int64_t>(place % count);
        return size - 1 - static_cast<int64_t>(~place % count);
    default:
        if (!negative) return -1;
        place += count;
        return place < count ? static_cast<int64_t>(place) : -1;
    }
}

/* On the CPU, from any address. An index is read so but once, into a register, and what was checked
 * is what is used: another thread may write to the indices meanwhile. */
template <class T>
static inline T load_unaligned(const char *at)
{
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Both ends show in the highest bit, which leaves the compiler a loop for vector instructions; no
 * axis has as many as 2^62 places. */
template <class Index>
ALWAYS_INLINE static inline bool look_for_bad(const char *indices, int64_t count, uint64_t size)
{
    const bool is_signed = static_cast<Index>(-1) < static_cast<Index>(1);
    const uint64_t from_end = is_signed ? size : 0, largest = size + from_end - 1;
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t at =
            static_cast<uint64_t>(load_unaligned<Index>(indices + i * sizeof(Index))) + from_end;
        bits |= at | (largest - at);
    }
    return bits >> 63;
}

#ifdef TARGET_AVX512
template <class Index>
TARGET_AVX2 static bool look_for_bad_avx2(const char *indices, int64_t count, uint64_t size)
{
    return look_for_bad<Index>(indices, count, size);
}

template <class Index>
TARGET_AVX512 static bool look_for_bad_avx512(const char *indices, int64_t count, uint64_t size)
{
    return look_for_bad<Index>(indices, count, size);
}
#endif

/* Whether one of the indices is out of bounds. */
template <class Index>
static bool has_bad(const char *indices, int64_t count, uint64_t size)
{
#ifdef TARGET_AVX512
    if (cpu_has(CPU_LEVEL_4)) return look_for_bad_avx512<Index>(indices, count, size);
    if (cpu_has(CPU_LEVEL_3)) return look_for_bad_avx2<Index>(indices, count, size);
#endif
    return look_for_bad<Index>(indices, count, size);
}

/* Calls function with a zero of the type that the dtype names. */
template <class Function>
static void with_index_type(Dtype dtype, const Function &function)
{
    switch (dtype) {
    case DTYPE_INT8:
        return function(int8_t());
    case DTYPE_INT16:
        return function(int16_t());
    case DTYPE_INT32:
        return function(int32_t());
    case DTYPE_UINT8:
        return function(uint8_t());
    case DTYPE_UINT16:
        return function(uint16_t());
    case DTYPE_UINT32:
        return function(uint32_t());
    case DTYPE_UINT64:
        return function(uint64_t());
    default:
        return function(int64_t());
    }
}

template <int BYTES>
struct Width {
    static constexpr int bytes = BYTES;
};

/* Calls function with the width of an element, as far as that is a usual one; else false. */
template <class Function>
static bool with_width(int64_t item_bytes, const Function &function)
{
    switch (item_bytes) {
    case 1:
        return function(Width<1>());
    case 2:
        return function(Width<2>());
    case 4:
        return function(Width<4>());
    case 8:
        return function(Width<8>());
    case 16:
        return function(Width<16>());
    default:
        return false;
    }
}

/* index.cu: what the caller can get wrong about the axis and the indices, and NumPy's text for an
 * index that is outside the axis, as the caller wrote it. */
Status check_not_mask(const View *indices, const char *advice);
Status check_axis(Call *call, int ndim);
Status index_error(const Call *call, Dtype index_dtype, int64_t axis_size, const void *index);
/* A copy of host indices without gaps between them, or NULL where there is no memory for it. */
char *pack_indices(const View *indices, int64_t count);

#ifdef __CUDACC__

/* Division of 64-bit numbers below 2^63, as Divider does it. */
struct WideDivider {
    uint64_t divisor, multiplier;
    uint32_t shift;
    uint32_t unused; /* no gap, as there */

    HOST_DEVICE uint64_t divide(uint64_t number) const
    {
#ifdef __CUDA_ARCH__
        const uint64_t high = __umul64hi(number, multiplier);
#else
        const uint64_t high =
            static_cast<uint64_t>(static_cast<unsigned __int128>(number) * multiplier >> 64);
#endif
        return (high + number) >> shift;
    }
};

static inline WideDivider wide_divider_of(uint64_t divisor)
{
    uint32_t shift = 0;
    while ((uint64_t)1 << shift < divisor) shift++;
    const unsigned __int128 excess = ((uint64_t)1 << shift) - divisor;
    return {divisor, static_cast<uint64_t>((excess << 64) / divisor + 1), shift, 0};
}

/* For what is read once and should not push out of the caches what others want. */
template <class T>
HOST_DEVICE inline T load_once(const T *address)
{
#ifdef __CUDA_ARCH__
    return __ldcs(address);
#else
    return *address;
#endif
}

template <int COUNT, class Index>
HOST_DEVICE inline void load_indices_of(const char *indices, const int64_t *elements,
                                        int64_t *values)
{
    UNROLL
    for (int k = 0; k < COUNT; k++)
        values[k] =
            static_cast<int64_t>(load_once(reinterpret_cast<const Index *>(indices) + elements[k]));
}

/* One kernel reads all types of indices: the branch is the same for all threads, and it costs
 * nothing that can be measured. uint64 is read bit for bit. */
template <int COUNT>
HOST_DEVICE inline void load_indices(const char *indices, Dtype dtype, const int64_t *elements,
                                     int64_t *values)
{
    switch (dtype) {
    case DTYPE_INT8:
        return load_indices_of<COUNT, signed char>(indices, elements, values);
    case DTYPE_INT16:
        return load_indices_of<COUNT, int16_t>(indices, elements, values);
    case DTYPE_INT32:
        return load_indices_of<COUNT, int32_t>(indices, elements, values);
    case DTYPE_UINT8:
        return load_indices_of<COUNT, uint8_t>(indices, elements, values);
    case DTYPE_UINT16:
        return load_indices_of<COUNT, uint16_t>(indices, elements, values);
    case DTYPE_UINT32:
        return load_indices_of<COUNT, uint32_t>(indices, elements, values);
    default:
        return load_indices_of<COUNT, int64_t>(indices, elements, values);
    }
}

/* place_of for an index that load_indices read. */
HOST_DEVICE inline int64_t place_of_loaded(int64_t value, Dtype dtype, int64_t size, Mode mode)
{
    return dtype == DTYPE_UINT64 ? place_of(static_cast<uint64_t>(value), size, mode)
                                 : place_of(value, size, mode);
}

HOST_DEVICE inline void note_loaded(const IndexReport &report, Dtype dtype, int64_t element,
                                    int64_t value)
{
    if (dtype == DTYPE_UINT64)
        report.note(static_cast<uint64_t>(element), static_cast<uint64_t>(value));
    else
        report.note(static_cast<uint64_t>(element), value);
}

#endif

#endif
