/* The types that operators compute with, alike on both sides of a GPU: 16-bit floats, which are
 * computed in float32 and rounded once, and complex numbers. */
#ifndef GPUOPS_ARITHMETIC_CUH
#define GPUOPS_ARITHMETIC_CUH

#include "common.cuh"

#include <math.h>
#include <string.h>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

template <class To, class From>
HOST_DEVICE inline To bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

/* A float32 that rounds to the same 16 bits as the float64 it stands for: what was cut off leaves a
 * bit behind ("round to odd"), so that a second rounding sees on which side of the middle it was.
 */
HOST_DEVICE inline float round_to_odd(double value)
{
    const float nearest = static_cast<float>(value);
    const double back = nearest;
    if (back == value || isnan(value) || isinf(nearest)) return nearest;
    uint32_t bits = bits_as<uint32_t>(nearest);
    if (bits & 1) return nearest;
    /* An even neighbour: one step towards the value is the odd one. */
    const bool away = (back < value) == (value > 0) || nearest == 0;
    bits = away ? bits + 1 : bits - 1;
    if (nearest == 0) bits = value < 0 ? 0x80000001u : 1;
    return bits_as<float>(bits);
}

/* All bits or none: to choose without a branch, which would keep a loop from becoming vectors. */
HOST_DEVICE inline uint32_t mask_of(bool chosen)
{
    return 0u - static_cast<uint32_t>(chosen);
}

struct Half {
    uint16_t bits;

    Half() = default;
    HOST_DEVICE explicit Half(float value) : bits(round(value)) {}
    HOST_DEVICE explicit operator float() const { return widen(bits); }

    HOST_DEVICE static uint16_t round(float value)
    {
#ifdef __CUDA_ARCH__
        return __half_as_ushort(__float2half_rn(value));
#else
        const uint32_t all = bits_as<uint32_t>(value);
        const uint32_t sign = all >> 16 & 0x8000, rest = all & 0x7fffffff;
        /* Adding a power of two far above lets the float unit round what becomes subnormal. */
        const uint32_t tiny =
            bits_as<uint32_t>(bits_as<float>(rest) + bits_as<float>(0x3f000000u)) - 0x3f000000u;
        const uint32_t normal = (rest - 0x38000000u + 0xfff + (rest >> 13 & 1)) >> 13;
        const uint32_t huge = 0x7c00u | (mask_of(static_cast<int32_t>(rest) > 0x7f800000) & 0x200);
        const uint32_t is_huge = mask_of(static_cast<int32_t>(rest) >= 0x47800000);
        const uint32_t is_tiny = mask_of(static_cast<int32_t>(rest) < 0x38800000);
        return static_cast<uint16_t>(sign | (huge & is_huge) | (tiny & is_tiny) |
                                     (normal & ~(is_huge | is_tiny)));
#endif
    }

    HOST_DEVICE static float widen(uint16_t bits)
    {
#ifdef __CUDA_ARCH__
        return __half2float(__ushort_as_half(bits));
#else
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
        const float tiny = bits_as<float>(rest + 0x3f000000u) - bits_as<float>(0x3f000000u);
        const uint32_t normal = (rest << 13) + 0x38000000u;
        const uint32_t huge = (rest << 13) + 0x70000000u;
        const uint32_t small = bits_as<uint32_t>(tiny);
        const uint32_t is_huge = mask_of(rest >= 0x7c00), is_small = mask_of(rest < 0x400);
        return bits_as<float>(sign | (huge & is_huge) | (small & is_small) |
                              (normal & ~(is_huge | is_small)));
#endif
    }
};

struct BFloat16 {
    uint16_t bits;

    BFloat16() = default;
    HOST_DEVICE explicit BFloat16(float value)
    {
#ifdef __CUDA_ARCH__
        bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
        const uint32_t all = bits_as<uint32_t>(value);
        const uint32_t rounded = (all + 0x7fff + (all >> 16 & 1)) >> 16;
        const uint32_t nan = (all >> 16 & 0x8000) | 0x7fc0;
        bits = static_cast<uint16_t>((all & 0x7fffffff) > 0x7f800000 ? nan : rounded);
#endif
    }
    HOST_DEVICE explicit operator float() const
    {
        return bits_as<float>(static_cast<uint32_t>(bits) << 16);
    }
};

/* NumPy's bool: a byte, of which anything but 0 is true. */
struct Bool {
    uint8_t byte;

    Bool() = default;
    HOST_DEVICE explicit Bool(bool value) : byte(value) {}
    HOST_DEVICE explicit operator bool() const { return byte != 0; }
};

template <class Real>
struct alignas(2 * sizeof(Real)) Complex {
    Real real, imaginary;
};

template <class Real>
HOST_DEVICE inline Complex<Real> operator+(Complex<Real> x, Complex<Real> y)
{
    return {x.real + y.real, x.imaginary + y.imaginary};
}

/* As NumPy has it: no care for infinities that meet, which C's own product takes. */
template <class Real>
HOST_DEVICE inline Complex<Real> operator*(Complex<Real> x, Complex<Real> y)
{
    return {x.real * y.real - x.imaginary * y.imaginary,
            x.real * y.imaginary + x.imaginary * y.real};
}

/* What a type is computed in. */
template <class T>
struct Computes {
    using Type = T;
};
template <>
struct Computes<Bool> {
    using Type = bool;
};
template <>
struct Computes<Half> {
    using Type = float;
};
template <>
struct Computes<BFloat16> {
    using Type = float;
};

/* Calls function with a value of the C++ type of a dtype; false where the dtype is not of the set.
 */
template <class Function>
static inline bool with_float(Dtype dtype, Function function)
{
    switch (dtype) {
    case DTYPE_FLOAT16:
        function(Half());
        return true;
    case DTYPE_BFLOAT16:
        function(BFloat16());
        return true;
    case DTYPE_FLOAT32:
        function(float());
        return true;
    case DTYPE_FLOAT64:
        function(double());
        return true;
    default:
        return false;
    }
}

/* Unsigned types stand for the signed ones of the same width where only the bits of the result
 * count, as in sums and products that wrap around. */
template <class Function>
static inline bool with_integer_bits(Dtype dtype, Function function)
{
    if (!dtype_is_integer(dtype)) return false;
    switch (dtype_bytes(dtype)) {
    case 1:
        function(uint8_t());
        break;
    case 2:
        function(uint16_t());
        break;
    case 4:
        function(uint32_t());
        break;
    default:
        function(uint64_t());
    }
    return true;
}

template <class Function>
static inline bool with_complex(Dtype dtype, Function function)
{
    switch (dtype) {
    case DTYPE_COMPLEX64:
        function(Complex<float>());
        return true;
    case DTYPE_COMPLEX128:
        function(Complex<double>());
        return true;
    default:
        return false;
    }
}

/* The same on either side, of every dtype that is neither complex nor opaque. */
template <class Function>
HOST_DEVICE inline void with_real_on_device(Dtype dtype, const Function &function)
{
    switch (dtype) {
    case DTYPE_BOOL:
        return function(Bool());
    case DTYPE_INT8:
        return function(int8_t());
    case DTYPE_INT16:
        return function(int16_t());
    case DTYPE_INT32:
        return function(int32_t());
    case DTYPE_INT64:
        return function(int64_t());
    case DTYPE_UINT8:
        return function(uint8_t());
    case DTYPE_UINT16:
        return function(uint16_t());
    case DTYPE_UINT32:
        return function(uint32_t());
    case DTYPE_UINT64:
        return function(uint64_t());
    case DTYPE_FLOAT16:
        return function(Half());
    case DTYPE_BFLOAT16:
        return function(BFloat16());
    case DTYPE_FLOAT32:
        return function(float());
    default:
        return function(double());
    }
}

#endif
