/* What the parts of correlate share: the description of a filter, pixels of every dtype, and where
 * the pixels beyond the border are. */
#ifndef GPUOPS_CORRELATE_CUH
#define GPUOPS_CORRELATE_CUH

#include "arithmetic.cuh"

#include <float.h>

/* out[y, x] = sum over i, j of weights[i, j] * in[y + i - top, x + j - left], image by image. */
struct Filter {
    int64_t images, height, width;
    int64_t in_height;     /* of the input, where that has only the rows that a part needs */
    int64_t rows, columns; /* of the weights */
    int64_t top, left;
    bool flipped;  /* the weights come in reverse order: a convolution */
    bool in_float; /* summed in float32, else in float64 */
    Border border;
    double border_value;
    Dtype in, out;
};

/* SciPy leaves weights as small as this out, and NaNs, so that a NaN or an infinity below a zero in
 * the weights does not reach the result. */
template <class Sum>
HOST_DEVICE inline Sum without_tiny(double weight)
{
    const bool counts = weight > DBL_EPSILON || weight < -DBL_EPSILON;
    return counts ? static_cast<Sum>(weight) : Sum(0);
}

/* One term of a sum. Sums in float64 are SciPy's bit for bit, which round twice. */
HOST_DEVICE inline float add_term(float sum, float weight, float pixel)
{
#ifdef __CUDA_ARCH__
    return fmaf(weight, pixel, sum);
#else
    return sum + weight * pixel;
#endif
}

HOST_DEVICE inline double add_term(double sum, double weight, double pixel)
{
    return sum + weight * pixel;
}

template <class Sum>
HOST_DEVICE inline bool is_finite(Sum value)
{
    return value - value == 0;
}

/* The position inside an axis of `size` that stands for one outside it; -1: the border's value. */
HOST_DEVICE inline int64_t reflect_position(int64_t position, int64_t size, Border border)
{
    if (border == BORDER_CONSTANT) return -1;
    if (border == BORDER_NEAREST) return position < 0 ? 0 : size - 1;
    if (border == BORDER_MIRROR && size == 1) return 0;
    const int64_t period = border == BORDER_WRAP      ? size
                           : border == BORDER_REFLECT ? 2 * size
                                                      : 2 * size - 2;
    position %= period;
    if (position < 0) position += period;
    if (position < size) return position;
    return border == BORDER_REFLECT ? period - 1 - position : period - position;
}

#ifdef __CUDACC__
/* Rarely needed, and so not worth a copy wherever pixels are loaded. */
__noinline__
#endif
    HOST_DEVICE inline int64_t position_beyond(int64_t position, int64_t size, Border border)
{
    return reflect_position(position, size, border);
}

HOST_DEVICE inline int64_t position_of(int64_t position, int64_t size, Border border)
{
    if (static_cast<uint64_t>(position) < static_cast<uint64_t>(size)) return position;
    return position_beyond(position, size, border);
}

/* Pixels. */

template <class Function>
static inline bool with_pixel(Dtype dtype, Function function)
{
    switch (dtype) {
    case DTYPE_BOOL:
        function(Bool());
        return true;
    case DTYPE_INT8:
        function(int8_t());
        return true;
    case DTYPE_INT16:
        function(int16_t());
        return true;
    case DTYPE_INT32:
        function(int32_t());
        return true;
    case DTYPE_INT64:
        function(int64_t());
        return true;
    case DTYPE_UINT8:
        function(uint8_t());
        return true;
    case DTYPE_UINT16:
        function(uint16_t());
        return true;
    case DTYPE_UINT32:
        function(uint32_t());
        return true;
    case DTYPE_UINT64:
        function(uint64_t());
        return true;
    default:
        return with_float(dtype, function);
    }
}

template <class Sum, class Pixel>
HOST_DEVICE inline Sum from_pixel(Pixel pixel)
{
    return static_cast<Sum>(pixel);
}
template <class Sum>
HOST_DEVICE inline Sum from_pixel(Half pixel)
{
    return static_cast<Sum>(static_cast<float>(pixel));
}
template <class Sum>
HOST_DEVICE inline Sum from_pixel(BFloat16 pixel)
{
    return static_cast<Sum>(static_cast<float>(pixel));
}
template <class Sum>
HOST_DEVICE inline Sum from_pixel(Bool pixel)
{
    return static_cast<Sum>(pixel.byte);
}

/* A number that does not fit becomes what SciPy makes of it on x86: what the instructions that
 * truncate to 32 or 64 bits give, the smallest integer, and of that the low bits. */
HOST_DEVICE inline int32_t truncate_to_int32(double value)
{
    const bool fits = value > -2147483649.0 && value < 2147483648.0;
    return fits ? static_cast<int32_t>(value) : INT32_MIN;
}

HOST_DEVICE inline int64_t truncate_to_int64(double value)
{
    const bool fits = value >= -9223372036854775808.0 && value < 9223372036854775808.0;
    return fits ? static_cast<int64_t>(value) : INT64_MIN;
}

HOST_DEVICE inline uint64_t truncate_to_uint64(double value)
{
    if (!(value >= 9223372036854775808.0)) return static_cast<uint64_t>(truncate_to_int64(value));
    return value < 18446744073709551616.0 ? static_cast<uint64_t>(value) : 0;
}

/* Negative numbers go to unsigned types by way of their magnitude, as in SciPy. */
HOST_DEVICE inline uint64_t truncate_to_unsigned(double value, int64_t bytes)
{
    const bool negative = !(value > -1);
    const double magnitude = negative ? -value : value;
    const uint64_t truncated = bytes == 8 ? truncate_to_uint64(magnitude)
                                          : static_cast<uint64_t>(truncate_to_int64(magnitude));
    return negative ? 0 - truncated : truncated;
}

template <class Pixel>
struct ToPixel {
    template <class Sum>
    HOST_DEVICE static Pixel of(Sum sum)
    {
        /* All that the sign could change is beyond the low bits. */
        if (sizeof(Pixel) <= 2) return static_cast<Pixel>(truncate_to_int32(sum));
        if (static_cast<Pixel>(-1) > static_cast<Pixel>(0))
            return static_cast<Pixel>(truncate_to_unsigned(sum, sizeof(Pixel)));
        if (sizeof(Pixel) == 8) return static_cast<Pixel>(truncate_to_int64(sum));
        return static_cast<Pixel>(truncate_to_int32(sum));
    }
};
template <>
struct ToPixel<float> {
    HOST_DEVICE static float of(float sum) { return sum; }
    HOST_DEVICE static float of(double sum) { return static_cast<float>(sum); }
};
template <>
struct ToPixel<double> {
    HOST_DEVICE static double of(double sum) { return sum; }
};
template <>
struct ToPixel<Half> {
    HOST_DEVICE static Half of(float sum) { return Half(sum); }
    HOST_DEVICE static Half of(double sum) { return Half(round_to_odd(sum)); }
};
template <>
struct ToPixel<BFloat16> {
    HOST_DEVICE static BFloat16 of(float sum) { return BFloat16(sum); }
    HOST_DEVICE static BFloat16 of(double sum) { return BFloat16(round_to_odd(sum)); }
};
template <>
struct ToPixel<Bool> {
    HOST_DEVICE static Bool of(double sum)
    {
        return Bool(static_cast<uint8_t>(truncate_to_int32(sum)) != 0);
    }
};

/* A filter of rank one is two of one row and one column: weights[i, j] = down[i] * along[j]. */
enum { MOST_ALONG_AXIS = 96 };
struct Factors {
    float down[MOST_ALONG_AXIS], along[MOST_ALONG_AXIS];
};

/* correlate.cu: the weights in C order, flipped for a convolution and without tiny ones; and their
 * factors if they have rank one, to a few units in the last place of float32, and are worth it. */
void read_weights(const Filter &filter, const View *weights, double *target);
bool find_factors(const Filter &filter, const double *weights, Factors *factors);

/* correlate_cpu.cu and correlate_cuda.cu. weights are those that read_weights gave, or NULL where
 * they are on the device. */
Status correlate_on_cpu(const Call *call, const Filter &filter, const double *weights);
Status correlate_on_device(Call *call, const Filter &filter, const double *weights);

/* correlate_parts.cu: whether a call is between images on the host that can be filtered in parts,
 * and so large that they are, or of any size; and that, where parts can be small enough. */
bool has_filter_parts(const Call *call, bool any);
Status correlate_in_parts(Call *call, const Filter &filter, const double *weights, bool any,
                          bool *done);

#endif
