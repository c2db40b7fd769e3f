/* correlate on the CPU.
 *
 * Threads share the rows of all images. Each takes a strip of columns at a time, narrow enough that
 * the rows which the weights span stay in the cache: they are kept in a ring, as numbers of the
 * type that sums are taken in and with the pixels beyond the border in place, so that the inner
 * loops know nothing of dtypes and borders. */
#include "correlate.cuh"

#include <stdlib.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

/* One row of the result, or two that follow each other: pixels[i] is the row that meets row i of
 * the weights for the first, and row i - 1 for the second, which may be NULL. */
template <class Sum>
struct RowSums {
    const Sum *const *pixels;
    const Sum *weights; /* in C order */
    int64_t row_count, column_count;
    int64_t width; /* of the result; what is read and written is rounded up to LANES */
    bool skips;    /* there are zeros in the weights, which count for nothing beside a NaN, too */
    Sum *first, *second;
};

/* How many sums the inner loop keeps in registers for each row. */
template <class Sum>
constexpr int64_t LANES = 128 / (int64_t)sizeof(Sum);

template <class Sum>
static void sum_row(const RowSums<Sum> &at, const Sum *const *pixels, Sum *sums)
{
    for (int64_t x = 0; x < at.width; x++) sums[x] = 0;
    for (int64_t i = 0; i < at.row_count; i++) {
        for (int64_t j = 0; j < at.column_count; j++) {
            const Sum weight = at.weights[i * at.column_count + j];
            const Sum *row = pixels[i] + j;
            if (weight == 0) continue;
            for (int64_t x = 0; x < at.width; x++) sums[x] += weight * row[x];
        }
    }
}

template <class Sum>
static void sum_rows(const RowSums<Sum> &at)
{
    sum_row(at, at.pixels, at.first);
    if (at.second != NULL) sum_row(at, at.pixels + 1, at.second);
}

#ifdef __x86_64__

#define WIDE __attribute__((target("avx2,fma"))) static inline
#define WIDE_INLINE __attribute__((target("avx2,fma"), always_inline)) static inline

WIDE_INLINE __m256 load(const float *from)
{
    return _mm256_loadu_ps(from);
}
WIDE_INLINE __m256d load(const double *from)
{
    return _mm256_loadu_pd(from);
}
WIDE_INLINE void store(float *to, __m256 lanes)
{
    _mm256_storeu_ps(to, lanes);
}
WIDE_INLINE void store(double *to, __m256d lanes)
{
    _mm256_storeu_pd(to, lanes);
}
WIDE_INLINE __m256 repeat(float value)
{
    return _mm256_set1_ps(value);
}
WIDE_INLINE __m256d repeat(double value)
{
    return _mm256_set1_pd(value);
}
WIDE_INLINE __m256 add_product(__m256 sum, __m256 weight, __m256 pixels)
{
    return _mm256_fmadd_ps(weight, pixels, sum);
}
/* SciPy rounds the product, too. */
WIDE_INLINE __m256d add_product(__m256d sum, __m256d weight, __m256d pixels)
{
    return _mm256_add_pd(sum, _mm256_mul_pd(weight, pixels));
}

template <class Sum>
struct LanesOf {
    using Type = __m256;
};
template <>
struct LanesOf<double> {
    using Type = __m256d;
};

/* What one row of pixels adds to one row of sums or to both. */
template <bool FIRST, bool SECOND, bool SKIPS, class Sum, class Lanes>
WIDE_INLINE void add_row(const Sum *pixels, const Sum *upper, const Sum *lower, int64_t count,
                         Lanes (&first)[4], Lanes (&second)[4])
{
    constexpr int64_t STEP = 32 / (int64_t)sizeof(Sum);
    for (int64_t j = 0; j < count; j++, pixels++) {
        const Lanes p0 = load(pixels), p1 = load(pixels + STEP), p2 = load(pixels + 2 * STEP),
                    p3 = load(pixels + 3 * STEP);
        if (FIRST && (!SKIPS || upper[j] != 0)) {
            const Lanes weight = repeat(upper[j]);
            first[0] = add_product(first[0], weight, p0);
            first[1] = add_product(first[1], weight, p1);
            first[2] = add_product(first[2], weight, p2);
            first[3] = add_product(first[3], weight, p3);
        }
        if (SECOND && (!SKIPS || lower[j] != 0)) {
            const Lanes weight = repeat(lower[j]);
            second[0] = add_product(second[0], weight, p0);
            second[1] = add_product(second[1], weight, p1);
            second[2] = add_product(second[2], weight, p2);
            second[3] = add_product(second[3], weight, p3);
        }
    }
}

template <bool SKIPS, class Sum>
WIDE_INLINE void sum_rows_with(const RowSums<Sum> &at)
{
    using Lanes = typename LanesOf<Sum>::Type;
    constexpr int64_t STEP = 32 / (int64_t)sizeof(Sum);
    const int64_t rows = at.row_count, columns = at.column_count;
    const bool both = at.second != NULL;
    for (int64_t x = 0; x < at.width; x += LANES<Sum>) {
        const Lanes zero = repeat(Sum(0));
        Lanes first[4] = {zero, zero, zero, zero}, second[4] = {zero, zero, zero, zero};
        const Sum *weights = at.weights;
        if (both) {
            add_row<true, false, SKIPS>(at.pixels[0] + x, weights, weights, columns, first, second);
            for (int64_t i = 1; i < rows; i++, weights += columns)
                add_row<true, true, SKIPS>(at.pixels[i] + x, weights + columns, weights, columns,
                                           first, second);
            add_row<false, true, SKIPS>(at.pixels[rows] + x, weights, weights, columns, first,
                                        second);
            for (int v = 0; v < 4; v++) store(at.second + x + v * STEP, second[v]);
        } else {
            for (int64_t i = 0; i < rows; i++, weights += columns)
                add_row<true, false, SKIPS>(at.pixels[i] + x, weights, weights, columns, first,
                                            second);
        }
        for (int v = 0; v < 4; v++) store(at.first + x + v * STEP, first[v]);
    }
}

template <class Sum>
WIDE void sum_rows_wide(const RowSums<Sum> &at)
{
    if (at.skips)
        sum_rows_with<true>(at);
    else
        sum_rows_with<false>(at);
}

#endif

/* All that the threads share. */
template <class Sum>
struct Job {
    const Call *call;
    const Filter *filter;
    const Sum *weights;
    const Factors *factors; /* or NULL */
    int64_t strip;          /* columns */
    bool skips;
    Status failure; /* atomic */
};

/* What one thread works with. The ring holds the rows that the weights meet for two rows of the
 * result; of factors of rank one, their sums along the rows. */
template <class Sum>
struct Worker {
    Sum *memory;
    Sum *loaded; /* one row of pixels, before the sums along it are taken */
    Sum *ring;
    Sum *sums; /* two rows of the result */
    const Sum **rows;
    int64_t ring_rows, pitch, span; /* span: a strip and what the weights reach beside it */
};

constexpr int64_t PADDING = 64; /* bytes; the inner loop reads beyond a row, up to LANES */

template <class Sum>
static bool worker_open(const Job<Sum> &job, Worker<Sum> *worker)
{
    const Filter &filter = *job.filter;
    worker->ring_rows = filter.rows + 1;
    worker->span = job.strip + filter.columns - 1;
    worker->pitch = (worker->span + 2 * LANES<Sum>) / LANES<Sum> * LANES<Sum>;
    const int64_t items = (worker->ring_rows + 3) * worker->pitch;
    const int64_t bytes = items * (int64_t)sizeof(Sum);
    const int64_t row_bytes = worker->ring_rows * (int64_t)sizeof(Sum *);
    worker->memory = static_cast<Sum *>(calloc(1, (size_t)(bytes + row_bytes + PADDING)));
    if (worker->memory == NULL) return false;
    worker->loaded = worker->memory;
    worker->sums = worker->memory + worker->pitch;
    worker->ring = worker->sums + 2 * worker->pitch;
    worker->rows = reinterpret_cast<const Sum **>(worker->memory + items);
    return true;
}

template <class Sum, class Pixel>
static void load_pixels(const char *from, int64_t stride, int64_t count, Sum *target)
{
    Pixel pixel;
    if (stride == (int64_t)sizeof pixel) {
        for (int64_t x = 0; x < count; x++) {
            memcpy(&pixel, from + x * (int64_t)sizeof pixel, sizeof pixel);
            target[x] = from_pixel<Sum>(pixel);
        }
    } else {
        for (int64_t x = 0; x < count; x++) {
            memcpy(&pixel, from + x * stride, sizeof pixel);
            target[x] = from_pixel<Sum>(pixel);
        }
    }
}

/* Columns begin..begin+count of a row of an image, either of which may be beyond its border. */
template <class Sum>
static void load_row(const Filter &filter, const char *image, int64_t row_stride,
                     int64_t column_stride, int64_t row, int64_t begin, int64_t count, Sum *target)
{
    const int64_t y = position_of(row, filter.height, filter.border);
    const Sum beyond = static_cast<Sum>(filter.border_value);
    if (y < 0) {
        for (int64_t x = 0; x < count; x++) target[x] = beyond;
        return;
    }
    const char *from = image + y * row_stride;
    const int64_t end = begin + count;
    const int64_t inner = begin > 0 ? begin : 0;
    const int64_t inner_end = end < filter.width ? end : filter.width;
    with_pixel(filter.in, [&](auto zero) {
        using Pixel = decltype(zero);
        auto load_beyond = [&](int64_t x, int64_t last) {
            for (; x < last; x++) {
                const int64_t at = position_of(x, filter.width, filter.border);
                if (at < 0)
                    target[x - begin] = beyond;
                else
                    load_pixels<Sum, Pixel>(from + at * column_stride, column_stride, 1,
                                            target + (x - begin));
            }
        };
        if (inner >= inner_end) {
            load_beyond(begin, end);
            return;
        }
        load_beyond(begin, inner);
        load_pixels<Sum, Pixel>(from + inner * column_stride, column_stride, inner_end - inner,
                                target + (inner - begin));
        load_beyond(inner_end, end);
    });
}

template <class Sum>
static void store_row(Dtype dtype, const Sum *sums, int64_t count, char *to, int64_t stride)
{
    with_pixel(dtype, [&](auto zero) {
        using Pixel = decltype(zero);
        if (stride == (int64_t)sizeof(Pixel)) {
            for (int64_t x = 0; x < count; x++) {
                const Pixel pixel = ToPixel<Pixel>::of(sums[x]);
                memcpy(to + x * (int64_t)sizeof pixel, &pixel, sizeof pixel);
            }
        } else {
            for (int64_t x = 0; x < count; x++) {
                const Pixel pixel = ToPixel<Pixel>::of(sums[x]);
                memcpy(to + x * stride, &pixel, sizeof pixel);
            }
        }
    });
}

/* Where an image of a view begins, and the strides in it. */
struct Image {
    char *data;
    int64_t row_stride, column_stride;
};

static Image image_of(const View &view, int64_t number)
{
    Image image = {static_cast<char *>(view.data), 0, view.strides[view.ndim - 1]};
    if (view.ndim > 1) image.row_stride = view.strides[view.ndim - 2];
    for (int i = view.ndim - 3; i >= 0; i--) {
        image.data += number % view.shape[i] * view.strides[i];
        number /= view.shape[i];
    }
    return image;
}

template <class Sum>
static void take_sums(const RowSums<Sum> &at)
{
#ifdef __x86_64__
    if (cpu_has(CPU_LEVEL_3)) return sum_rows_wide(at);
#endif
    sum_rows(at);
}

/* Columns left..left+width of the rows begin..end of one image. */
template <class Sum>
static void filter_strip(const Job<Sum> &job, const Worker<Sum> &worker, const Image &in,
                         const Image &out, int64_t begin, int64_t end, int64_t left, int64_t width)
{
    const Filter &filter = *job.filter;
    const int64_t span = width + filter.columns - 1, ring_rows = worker.ring_rows;
    int64_t loaded = begin - filter.top; /* the next row of the image to load */
    for (int64_t y = begin; y < end; y += 2) {
        const bool both = y + 1 < end;
        const int64_t last = y - filter.top + filter.rows + both;
        for (; loaded < last; loaded++) {
            const int64_t place = (loaded - begin + filter.top) % ring_rows;
            Sum *row = worker.ring + place * worker.pitch;
            Sum *target = job.factors != NULL ? worker.loaded : row;
            load_row(filter, in.data, in.row_stride, in.column_stride, loaded, left - filter.left,
                     span, target);
            if (job.factors == NULL) continue;
            const Sum *pixels = worker.loaded;
            take_sums(RowSums<Sum>{&pixels, job.weights + filter.rows, 1, filter.columns, width,
                                   job.skips, row, NULL});
        }
        for (int64_t i = 0; i < ring_rows; i++)
            worker.rows[i] = worker.ring + (y - begin + i) % ring_rows * worker.pitch;
        Sum *second = both ? worker.sums + worker.pitch : NULL;
        take_sums(RowSums<Sum>{worker.rows, job.weights, filter.rows,
                               job.factors != NULL ? 1 : filter.columns, width, job.skips,
                               worker.sums, second});
        for (int64_t row = 0; row < 1 + both; row++)
            store_row(filter.out, worker.sums + row * worker.pitch, width,
                      out.data + (y + row) * out.row_stride + left * out.column_stride,
                      out.column_stride);
    }
}

/* Rows begin..end of all images, one after the other. */
template <class Sum>
static void filter_rows(void *context, int64_t begin, int64_t end)
{
    Job<Sum> &job = *static_cast<Job<Sum> *>(context);
    const Filter &filter = *job.filter;
    Worker<Sum> worker;
    if (!worker_open(job, &worker)) {
        __atomic_store_n(&job.failure, STATUS_MEMORY_ERROR, __ATOMIC_RELAXED);
        return;
    }
    while (begin < end) {
        const int64_t number = begin / filter.height, row = begin % filter.height;
        const int64_t rest = filter.height - row;
        const int64_t rows = end - begin < rest ? end - begin : rest;
        const Image in = image_of(job.call->inputs[0], number),
                    out = image_of(job.call->out, number);
        for (int64_t left = 0; left < filter.width; left += job.strip) {
            const int64_t width = filter.width - left < job.strip ? filter.width - left : job.strip;
            filter_strip(job, worker, in, out, row, row + rows, left, width);
        }
        begin += rows;
    }
    free(worker.memory);
}

/* Half of a usual second-level cache for the ring. */
constexpr int64_t RING_BYTES = 256 << 10;

/* What is worth waking a thread for, in bytes of products: some 30 us where they are vectors. */
constexpr int64_t GRAIN_BYTES = 2 << 20;

template <class Sum>
static Status filter_images(const Call *call, const Filter &filter, const Sum *weights,
                            int64_t weight_count, const Factors *factors)
{
    Job<Sum> job = {call, &filter, weights, factors, 0, false, STATUS_OK};
    for (int64_t i = 0; i < weight_count; i++) job.skips = job.skips || weights[i] == 0;
    const int64_t row_bytes = (filter.rows + 4) * (int64_t)sizeof(Sum);
    job.strip = RING_BYTES / row_bytes - filter.columns;
    if (job.strip < 4 * filter.columns) job.strip = 4 * filter.columns;
    job.strip = (job.strip + LANES<Sum> - 1) / LANES<Sum> * LANES<Sum>;
    if (job.strip > filter.width) job.strip = filter.width;

    /* Each share of the rows loads what the weights span once more, so it should be longer. */
    const int64_t row_work = filter.width * weight_count;
    constexpr int64_t GRAIN = GRAIN_BYTES / (int64_t)sizeof(Sum);
    int64_t grain = GRAIN / (row_work < GRAIN ? row_work : GRAIN);
    if (grain < filter.rows) grain = filter.rows;
    parallel_for(filter.images * filter.height, grain + grain % 2, filter_rows<Sum>, &job);
    if (job.failure == STATUS_OK) return STATUS_OK;
    return fail(STATUS_MEMORY_ERROR, "out of host memory: no room for %lld rows of an image",
                (long long)filter.rows);
}

template <class Sum>
static Status filter_with(const Call *call, const Filter &filter, const double *weights,
                          const Factors *factors)
{
    int64_t count = filter.rows * filter.columns;
    if (factors != NULL) count = filter.rows + filter.columns;
    Sum *converted = static_cast<Sum *>(malloc((size_t)count * sizeof(Sum)));
    if (converted == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld weights", (long long)count);
    for (int64_t i = 0; i < count; i++)
        converted[i] = static_cast<Sum>(factors == NULL   ? weights[i]
                                        : i < filter.rows ? factors->down[i]
                                                          : factors->along[i - filter.rows]);
    const Status status = filter_images(call, filter, converted, count, factors);
    free(converted);
    return status;
}

/* No sum along a row is to be larger than the pixels, lest it overflows before it is weighted with
 * those above and below. A power of two leaves all digits as they are. False: it would not. */
static bool balance_factors(const Filter &filter, Factors *factors)
{
    double total = 0;
    for (int64_t j = 0; j < filter.columns; j++) total += fabs((double)factors->along[j]);
    const int exponent = -ilogb(total) - 1;
    bool fits = true;
    for (int64_t j = 0; j < filter.columns; j++) {
        const float weight = ldexpf(factors->along[j], exponent);
        fits = fits && (factors->along[j] == 0 || fabsf(weight) >= FLT_MIN);
        factors->along[j] = weight;
    }
    for (int64_t i = 0; i < filter.rows; i++) {
        factors->down[i] = ldexpf(factors->down[i], -exponent);
        fits = fits && is_finite(factors->down[i]);
    }
    return fits;
}

Status correlate_on_cpu(const Call *call, const Filter &filter, const double *weights)
{
    if (!filter.in_float) return filter_with<double>(call, filter, weights, NULL);
    Factors factors;
    const bool separable =
        find_factors(filter, weights, &factors) && balance_factors(filter, &factors);
    return filter_with<float>(call, filter, weights, separable ? &factors : NULL);
}
