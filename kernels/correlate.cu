/* correlate and convolve: filters of images, with the semantics of scipy.ndimage.
 *
 *     out[y, x] = sum over i, j of weights[i, j] * in[y + i - top, x + j - left]
 *
 * where top and left are half of the weights' size, rounded down, plus the origin. A convolution is
 * the correlation with the weights in reverse order. An image is the last two axes of the input, in
 * C order with any strides between rows and columns, and every image has the same weights.
 *
 * Sums are taken in float32 if the input and the result are float16, bfloat16 or float32. All
 * others are taken in float64, over i and then j in ascending order, with two roundings for each
 * term: what SciPy does, so that the results are the same bit for bit. */
#include "correlate.cuh"

#include <math.h>
#include <stdlib.h>

#ifdef __CUDACC__
static Status run_correlate_in_parts(Call *call, bool any, bool *done);
static Status run_convolve_in_parts(Call *call, bool any, bool *done);
#endif

/* Plans: what the caller can get wrong, and the shape of the result. */

static bool is_pixel(Dtype dtype)
{
    return dtype == DTYPE_BOOL || dtype_is_integer(dtype) || dtype_is_float(dtype);
}

static Status check_pixel(const View *view, const char *name)
{
    if (is_pixel(view->dtype)) return STATUS_OK;
    return fail(STATUS_TYPE_ERROR,
                "%s has dtype %s, which is not supported: expected bool, an integer or a real "
                "float%s",
                name, view->dtype_name,
                dtype_is_complex(view->dtype) ? "; filter the real and imaginary parts one by one"
                                              : "");
}

/* The weights have the image's two axes; any before them have one element. */
static Status check_weights(const View *input, const View *weights)
{
    const int axes = input->ndim == 1 ? 1 : 2;
    bool fits = weights->ndim >= axes && weights->ndim <= input->ndim;
    for (int i = 0; fits && i < weights->ndim - axes; i++) fits = weights->shape[i] == 1;
    if (!fits)
        return fail(STATUS_VALUE_ERROR,
                    "filter weights array has incorrect shape: weights have %d dimensions for an "
                    "input of %d; expected %s",
                    weights->ndim, input->ndim,
                    axes == 1 ? "one, as the input has"
                              : "two, for the last two axes of the input, or up to as many as "
                                "that has, of which the others have size 1");
    /* A broadcast array takes no memory, but the numbers that sums are taken with do. */
    int64_t bytes = 2 * (int64_t)sizeof(double);
    bool is_too_big = false;
    for (int i = 0; i < weights->ndim; i++) {
        if (weights->shape[i] == 0)
            return fail(STATUS_VALUE_ERROR,
                        "filter weights array has incorrect shape: axis %d has no elements", i);
        is_too_big |= __builtin_mul_overflow(bytes, weights->shape[i], &bytes);
    }
    if (is_too_big)
        return fail(STATUS_VALUE_ERROR,
                    "filter weights array is too big: as float64 it would not fit into any memory");
    return STATUS_OK;
}

/* As SciPy turns an origin around for a convolution. */
static int64_t origin_of(int64_t origin, int64_t size, bool flipped)
{
    if (!flipped) return origin;
    return size % 2 == 0 ? -origin - 1 : -origin;
}

static Status check_origin(int64_t origin, int64_t size, bool flipped)
{
    const int64_t centre = size / 2 + origin_of(origin, size, flipped);
    if (centre >= 0 && centre < size) return STATUS_OK;
    return fail(STATUS_VALUE_ERROR,
                "Invalid origin; origin must satisfy -(weights.shape[k] // 2) <= origin[k] <= "
                "(weights.shape[k]-1) // 2");
}

static Status plan(Call *call, bool flipped)
{
    const View *input = &call->inputs[0], *weights = &call->inputs[1];
    Status status = check_pixel(input, "input");
    if (status == STATUS_OK) status = check_pixel(weights, "weights");
    if (status != STATUS_OK) return status;
    if (input->ndim == 0)
        return fail(STATUS_VALUE_ERROR, "input must have at least one dimension, not 0");
    status = check_weights(input, weights);
    const int given = call->origin_count;
    if (status == STATUS_OK && given != 0 && given != input->ndim &&
        (given != 2 || input->ndim == 1))
        return fail(STATUS_VALUE_ERROR,
                    "origin has %d numbers for an input of %d dimensions: expected one number, or "
                    "one for each of the last two axes",
                    given, input->ndim);
    if (status == STATUS_OK && input->ndim > 1)
        status = check_origin(call->origins[0], weights->shape[weights->ndim - 2], flipped);
    if (status == STATUS_OK)
        status = check_origin(call->origins[1], weights->shape[weights->ndim - 1], flipped);
    if (status != STATUS_OK) return status;

    View *out = &call->out;
    out->dtype = call->wanted == DTYPE_OPAQUE ? input->dtype : call->wanted;
    if (!is_pixel(out->dtype))
        return fail(STATUS_TYPE_ERROR,
                    "output has dtype %s, which is not supported: expected bool, an integer or a "
                    "real float",
                    dtype_name(out->dtype));
    out->item_bytes = dtype_bytes(out->dtype);
    out->ndim = input->ndim;
    for (int i = 0; i < input->ndim; i++) out->shape[i] = input->shape[i];
    call->host_inputs |= 2;
    call->operations = view_count(out, 0, out->ndim) * view_count(weights, 0, weights->ndim);
#ifdef __CUDACC__
    call->run_in_parts = flipped ? run_convolve_in_parts : run_correlate_in_parts;
#endif
    return STATUS_OK;
}

Status plan_correlate(Call *call)
{
    return plan(call, false);
}

Status plan_convolve(Call *call)
{
    return plan(call, true);
}

/* The description. */

static bool fits_float32(Dtype dtype)
{
    return dtype_is_float(dtype) && dtype != DTYPE_FLOAT64;
}

static Filter describe(const Call *call, bool flipped)
{
    const View *input = &call->inputs[0], *weights = &call->inputs[1];
    Filter filter = {};
    filter.images = 1;
    for (int i = 0; i < input->ndim - 2; i++) filter.images *= input->shape[i];
    filter.height = input->ndim > 1 ? input->shape[input->ndim - 2] : 1;
    filter.in_height = filter.height;
    filter.width = input->shape[input->ndim - 1];
    filter.rows = input->ndim > 1 ? weights->shape[weights->ndim - 2] : 1;
    filter.columns = weights->shape[weights->ndim - 1];
    const int64_t row_origin = input->ndim > 1 ? call->origins[0] : 0;
    filter.top = filter.rows / 2;
    if (input->ndim > 1) filter.top += origin_of(row_origin, filter.rows, flipped);
    filter.left = filter.columns / 2 + origin_of(call->origins[1], filter.columns, flipped);
    filter.flipped = flipped;
    filter.in = input->dtype;
    filter.out = call->out.dtype;
    filter.in_float = fits_float32(filter.in) && fits_float32(filter.out);
    filter.border = call->border;
    filter.border_value = call->border_value;
    return filter;
}

void read_weights(const Filter &filter, const View *weights, double *target)
{
    const int64_t row_stride = weights->ndim > 1 ? weights->strides[weights->ndim - 2] : 0;
    const int64_t column_stride = weights->strides[weights->ndim - 1];
    const char *data = static_cast<char *>(weights->data);
    with_pixel(weights->dtype, [&](auto pixel) {
        for (int64_t i = 0; i < filter.rows; i++) {
            for (int64_t j = 0; j < filter.columns; j++) {
                const int64_t row = filter.flipped ? filter.rows - 1 - i : i;
                const int64_t column = filter.flipped ? filter.columns - 1 - j : j;
                memcpy(&pixel, data + row * row_stride + column * column_stride, sizeof pixel);
                target[i * filter.columns + j] = without_tiny<double>(from_pixel<double>(pixel));
            }
        }
    });
}

bool find_factors(const Filter &filter, const double *weights, Factors *factors)
{
    const int64_t rows = filter.rows, columns = filter.columns;
    if (!filter.in_float || rows > MOST_ALONG_AXIS || columns > MOST_ALONG_AXIS) return false;
    if (rows * columns <= 2 * (rows + columns)) return false;
    int64_t largest = 0;
    for (int64_t at = 0; at < rows * columns; at++) {
        if (!is_finite(weights[at])) return false;
        if (fabs(weights[at]) > fabs(weights[largest])) largest = at;
    }
    const double *row = weights + largest / columns * columns,
                 *column = weights + largest % columns;
    const double peak = weights[largest];
    if (peak == 0 || fabs(peak) > FLT_MAX) return false;
    for (int64_t i = 0; i < rows; i++) {
        const double down = column[i * columns] / peak;
        /* What is not a normal float32 has lost digits that the product would need. */
        if (down != 0 && (fabs(down) < FLT_MIN || fabs(down * peak) < 2 * FLT_MIN)) return false;
        for (int64_t j = 0; j < columns; j++) {
            const double weight = weights[i * columns + j];
            if (row[j] != 0 && (fabs(row[j]) < FLT_MIN || fabs(row[j] / peak) < 2 * FLT_MIN))
                return false;
            if (fabs(down * row[j] - weight) > 4 * FLT_EPSILON * fabs(weight)) return false;
            factors->along[j] = static_cast<float>(row[j]);
        }
        factors->down[i] = static_cast<float>(down);
    }
    return true;
}

/* work is given the weights, read from the host. */
template <class Work>
static Status with_weights(const Call *call, const Filter &filter, const Work &work)
{
    const int64_t bytes = filter.rows * filter.columns * (int64_t)sizeof(double);
    double *weights = static_cast<double *>(malloc((size_t)bytes));
    if (weights == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for the weights",
                    (long long)bytes);
    read_weights(filter, &call->inputs[1], weights);
    const Status status = work(weights);
    free(weights);
    return status;
}

static Status run(Call *call, bool flipped)
{
    const Filter filter = describe(call, flipped);
    if (filter.images == 0 || filter.height == 0 || filter.width == 0) return STATUS_OK;
    if (call->inputs[1].device != DEVICE_CPU) return correlate_on_device(call, filter, NULL);
    return with_weights(call, filter, [&](const double *weights) {
        return call->out.device == DEVICE_CPU ? correlate_on_cpu(call, filter, weights)
                                              : correlate_on_device(call, filter, weights);
    });
}

#ifdef __CUDACC__
static Status run_in_parts(Call *call, bool flipped, bool any, bool *done)
{
    *done = has_filter_parts(call, any);
    if (!*done) return STATUS_OK;
    const Filter filter = describe(call, flipped);
    return with_weights(call, filter, [&](const double *weights) {
        return correlate_in_parts(call, filter, weights, any, done);
    });
}

static Status run_correlate_in_parts(Call *call, bool any, bool *done)
{
    return run_in_parts(call, false, any, done);
}

static Status run_convolve_in_parts(Call *call, bool any, bool *done)
{
    return run_in_parts(call, true, any, done);
}
#endif

Status run_correlate(Call *call)
{
    return run(call, false);
}

Status run_convolve(Call *call)
{
    return run(call, true);
}
