/* A cuBLASLt for tests on the fake CUDA runtime: the functions that kernels/matmul_blas.cu uses,
 * with plain loops, and with a look at everything it is given.
 *
 * What it is given wrong it answers with CUBLAS_STATUS_INVALID_VALUE. Of the ways to compute that
 * the caller allows it takes the worst: TF32 where that is not ruled out, and sums in two parts
 * that are rounded to the output's dtype where such reductions are not ruled out. So a caller who
 * forgets to forbid them gets wrong bits.
 *
 * FAKE_BLAS_FAIL, a word in the environment, makes things fail:
 *     create    there is no handle       memory    there is none the first time
 *     find      no algorithm is found    multiply  a product fails
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, FAILED = 13, NONE = 15 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, C_32F = 4, C_64F = 5, R_16BF = 14 };
enum { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_TF32 = 77 };
#define INPUT_16F (1ull << 16)
#define INPUT_TF32 (1ull << 18)
#define WORKSPACE ((size_t)4096)

typedef struct Description {
    int compute, scale, transposed[2];
} Description;

typedef struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t leading, apart;
    int32_t count;
} Layout;

typedef struct Preference {
    uint64_t workspace, implementations;
    uint32_t reductions, alignments[4];
} Preference;

typedef struct Algorithm { /* 64 bytes, as cublasLtMatmulAlgo_t */
    uint32_t magic, tf32, split, unused;
    uint64_t m, n, k;
    uint8_t alignments[24];
} Algorithm;

typedef struct Found {
    Algorithm algorithm;
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} Found;

/* Of the fake runtime: does all the work that is queued. */
void fake_run(void);

static long handles, found_count, products, live;
static char last[512];

long fake_blas_handles(void)
{
    return handles;
}
long fake_blas_found(void)
{
    return found_count;
}
long fake_blas_products(void)
{
    return products;
}
long fake_blas_live(void)
{
    return live;
} /* descriptions, layouts and preferences */
const char *fake_blas_last(void)
{
    return last;
}

static bool fails(const char *what)
{
    const char *wanted = getenv("FAKE_BLAS_FAIL");
    return wanted != NULL && strcmp(wanted, what) == 0;
}

size_t cublasLtGetVersion(void)
{
    return 130203;
}

const char *cublasLtGetStatusName(int status)
{
    return status == FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED" : "CUBLAS_STATUS_OTHER";
}

const char *cublasLtGetStatusString(int status)
{
    return status == FAILED ? "the function failed to launch on the GPU" : "something else";
}

int cublasLtCreate(void **handle)
{
    static bool refused;
    if (fails("create")) return NOT_INITIALIZED;
    if (fails("memory") && !refused) {
        refused = true;
        return ALLOC_FAILED;
    }
    *handle = &handles;
    handles++;
    return SUCCESS;
}

static void *make(size_t size)
{
    live++;
    return calloc(1, size);
}

static int destroy(void *object)
{
    live--;
    free(object);
    return SUCCESS;
}

int cublasLtMatmulDescCreate(Description **made, int compute, int scale)
{
    *made = make(sizeof **made);
    (*made)->compute = compute;
    (*made)->scale = scale;
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(Description *object, int attribute, const void *value, size_t n)
{
    if ((attribute != 3 && attribute != 4) || n != 4) return INVALID_VALUE;
    memcpy(&object->transposed[attribute - 3], value, 4);
    return SUCCESS;
}

int cublasLtMatmulDescDestroy(Description *object)
{
    return destroy(object);
}

int cublasLtMatrixLayoutCreate(Layout **made, int type, uint64_t rows, uint64_t columns, int64_t ld)
{
    if (rows == 0 || columns == 0 || ld < (int64_t)rows) return INVALID_VALUE;
    *made = make(sizeof **made);
    **made = (Layout){type, rows, columns, ld, 0, 1};
    return SUCCESS;
}

int cublasLtMatrixLayoutSetAttribute(Layout *object, int attribute, const void *value, size_t n)
{
    if (attribute == 5 && n == 4)
        memcpy(&object->count, value, 4);
    else if (attribute == 6 && n == 8)
        memcpy(&object->apart, value, 8);
    else
        return INVALID_VALUE;
    return object->count < 1 ? INVALID_VALUE : SUCCESS;
}

int cublasLtMatrixLayoutDestroy(Layout *object)
{
    return destroy(object);
}

int cublasLtMatmulPreferenceCreate(Preference **made)
{
    *made = make(sizeof **made);
    **made = (Preference){0, ~0ull, 7, {256, 256, 256, 256}};
    return SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(Preference *object, int attribute, const void *value,
                                         size_t n)
{
    if (attribute == 1 && n == 8)
        memcpy(&object->workspace, value, 8);
    else if (attribute == 3 && n == 4)
        memcpy(&object->reductions, value, 4);
    else if (attribute >= 5 && attribute <= 8 && n == 4)
        memcpy(&object->alignments[attribute - 5], value, 4);
    else if (attribute == 12 && n == 8)
        memcpy(&object->implementations, value, 8);
    else
        return INVALID_VALUE;
    return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(Preference *object)
{
    return destroy(object);
}

/* What the layouts say of the product m x n x k; false where they contradict each other. */
static bool read_shape(const Description *d, const Layout *a, const Layout *b, const Layout *c,
                       uint64_t *m, uint64_t *n, uint64_t *k)
{
    *m = d->transposed[0] ? a->columns : a->rows;
    *k = d->transposed[0] ? a->rows : a->columns;
    *n = d->transposed[1] ? b->rows : b->columns;
    const int scale = a->type == R_16F || a->type == R_16BF ? R_32F : a->type;
    const bool is_double = a->type == R_64F || a->type == C_64F;
    return (d->transposed[1] ? b->columns : b->rows) == *k && c->rows == *m && c->columns == *n &&
           a->type == b->type && a->type == c->type && a->count == b->count &&
           a->count == c->count && d->scale == scale &&
           (is_double
                ? d->compute == COMPUTE_64F
                : d->compute == COMPUTE_32F || (d->compute == COMPUTE_TF32 && a->type == R_32F));
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, const Description *d, const Layout *a,
                                   const Layout *b, const Layout *c, const Layout *out,
                                   const Preference *preference, int wanted, Found *found,
                                   int *count)
{
    Algorithm algorithm = {0x600d600d, 0, 0, 0, 0, 0, 0, {0}};
    *count = 0;
    if (handle != &handles || c != out || wanted < 1) return INVALID_VALUE;
    if (!read_shape(d, a, b, c, &algorithm.m, &algorithm.n, &algorithm.k)) return INVALID_VALUE;
    if (fails("find")) return NONE;
    algorithm.tf32 = a->type == R_32F && (preference->implementations & INPUT_TF32) != 0;
    algorithm.split = (preference->reductions & ~2u) != 0;
    /* The real one has algorithms for bfloat16 that say so, but the fast ones say 16F. */
    if (a->type == R_16BF && !(preference->implementations & INPUT_16F)) return NONE;
    for (int i = 0; i < 4; i++) memcpy(algorithm.alignments + 4 * i, &preference->alignments[i], 4);
    memset(found, 0, sizeof *found);
    found->algorithm = algorithm;
    found->workspace = preference->workspace >= WORKSPACE ? WORKSPACE : 0;
    *count = 1;
    found_count++;
    return SUCCESS;
}

/* Numbers. A 16-bit float of type R_16F is rounded to even by scaling what is subnormal. */

static float from_half(uint16_t bits)
{
    const int exponent = bits >> 10 & 31;
    const float fraction = (float)(bits & 1023);
    const float size = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                       : exponent == 0 ? ldexpf(fraction, -24)
                                       : ldexpf(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -size : size;
}

static uint16_t to_half(float value)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const float size = fabsf(value);
    if (isnan(value)) return sign | 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    if (size == 0) return sign;
    int exponent = ilogbf(size);
    if (exponent < -14) exponent = -14;
    const float scaled = rintf(ldexpf(size, 10 - exponent)); /* of 1024 parts */
    return (uint16_t)(sign | (((exponent + 14) << 10) + (int)scaled));
}

static float from_bfloat16(uint16_t bits)
{
    const uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, 4);
    return value;
}

static uint16_t to_bfloat16(float value)
{
    uint32_t all;
    memcpy(&all, &value, 4);
    return (uint16_t)((all + 0x7fff + (all >> 16 & 1)) >> 16);
}

static size_t size_of(int type)
{
    return type == R_32F ? 4 : type == R_64F || type == C_32F ? 8 : type == C_64F ? 16 : 2;
}

typedef struct Number {
    double real, imaginary;
} Number;

/* Byte by byte: a sanitized build hides device memory from the functions of the C library. */
static void move(void *target, const void *source, size_t bytes)
{
    volatile char *to = target;
    const volatile char *from = source;
    for (size_t i = 0; i < bytes; i++) to[i] = from[i];
}

static Number load(const char *data, int type)
{
    float pair[2] = {0, 0};
    Number number = {0, 0};
    uint16_t bits;
    switch (type) {
    case R_64F:
    case C_64F:
        move(&number, data, size_of(type));
        return number;
    case R_32F:
    case C_32F:
        move(pair, data, size_of(type));
        return (Number){pair[0], pair[1]};
    default:
        memcpy(&bits, data, 2);
        return (Number){type == R_16F ? from_half(bits) : from_bfloat16(bits), 0};
    }
}

static void store(char *data, int type, Number number)
{
    const float pair[2] = {(float)number.real, (float)number.imaginary};
    const uint16_t bits = type == R_16F ? to_half(pair[0]) : to_bfloat16(pair[0]);
    if (type == R_64F || type == C_64F)
        move(data, &number, size_of(type));
    else if (type == R_32F || type == C_32F)
        move(data, pair, size_of(type));
    else
        memcpy(data, &bits, 2);
}

static Number rounded(Number number, int type)
{
    char data[16];
    store(data, type, number);
    return load(data, type);
}

static double to_tf32(double value)
{
    uint32_t bits;
    float single = (float)value;
    memcpy(&bits, &single, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&single, &bits, 4);
    return single;
}

static const char *item(const char *data, const Layout *layout, bool transposed, uint64_t row,
                        uint64_t column)
{
    const uint64_t at = transposed ? column + row * (uint64_t)layout->leading
                                   : row + column * (uint64_t)layout->leading;
    return data + at * size_of(layout->type);
}

static Number dot(const Description *d, const char *a, const Layout *la, const char *b,
                  const Layout *lb, uint64_t i, uint64_t j, uint64_t begin, uint64_t end, bool tf32)
{
    Number sum = {0, 0};
    for (uint64_t k = begin; k < end; k++) {
        Number x = load(item(a, la, d->transposed[0], i, k), la->type);
        Number y = load(item(b, lb, d->transposed[1], k, j), lb->type);
        if (tf32) x.real = to_tf32(x.real), y.real = to_tf32(y.real);
        sum.real += x.real * y.real - x.imaginary * y.imaginary;
        sum.imaginary += x.real * y.imaginary + x.imaginary * y.real;
        if (d->compute != COMPUTE_64F) sum = rounded(sum, C_32F);
    }
    return sum;
}

/* alpha is to be 1 and beta 0, of the scale's type. */
static bool check_factors(const Description *d, const void *alpha, const void *beta)
{
    const bool is_complex = d->scale == C_32F || d->scale == C_64F;
    const Number one = load(alpha, d->scale), zero = load(beta, d->scale);
    return one.real == 1 && zero.real == 0 &&
           (!is_complex || (one.imaginary == 0 && zero.imaginary == 0));
}

static bool check_alignment(const Algorithm *algorithm, const void *const *pointers)
{
    for (int i = 0; i < 4; i++) {
        uint32_t alignment;
        memcpy(&alignment, algorithm->alignments + 4 * i, 4);
        if (alignment == 0 || (uintptr_t)pointers[i] % alignment != 0) return false;
    }
    return true;
}

int cublasLtMatmul(void *handle, const Description *d, const void *alpha, const char *a,
                   const Layout *la, const char *b, const Layout *lb, const void *beta,
                   const char *c, const Layout *lc, char *out, const Layout *lout,
                   const Algorithm *algorithm, void *workspace, size_t workspace_bytes,
                   void *stream)
{
    uint64_t m, n, k;
    const void *const pointers[] = {a, b, c, out};
    (void)stream;
    if (handle != &handles || c != out || lc != lout || algorithm->magic != 0x600d600d ||
        !read_shape(d, la, lb, lout, &m, &n, &k) || algorithm->m != m || algorithm->n != n ||
        algorithm->k != k || !check_factors(d, alpha, beta) ||
        !check_alignment(algorithm, pointers) || workspace_bytes != WORKSPACE ||
        (uintptr_t)workspace % 256 != 0 || workspace == NULL)
        return INVALID_VALUE;
    if (fails("multiply")) return FAILED;
    products++;
    snprintf(last, sizeof last,
             "type=%d compute=%d op=%c%c m=%llu n=%llu k=%llu lda=%lld ldb=%lld ldd=%lld "
             "batch=%d,%lld,%lld,%lld",
             la->type, d->compute, "NT"[d->transposed[0]], "NT"[d->transposed[1]],
             (unsigned long long)m, (unsigned long long)n, (unsigned long long)k,
             (long long)la->leading, (long long)lb->leading, (long long)lout->leading, lout->count,
             (long long)la->apart, (long long)lb->apart, (long long)lout->apart);
    fake_run();
    memset(workspace, 0xa5, workspace_bytes);
    const size_t size = size_of(la->type);
    const uint64_t parts = algorithm->split && k > 1 ? 2 : 1;
    for (int32_t matrix = 0; matrix < lout->count; matrix++) {
        const char *from_a = a + matrix * la->apart * (int64_t)size;
        const char *from_b = b + matrix * lb->apart * (int64_t)size;
        char *to = out + matrix * lout->apart * (int64_t)size;
        for (uint64_t i = 0; i < m; i++) {
            for (uint64_t j = 0; j < n; j++) {
                Number sum = {0, 0};
                for (uint64_t part = 0; part < parts; part++) {
                    const Number more = dot(d, from_a, la, from_b, lb, i, j, k * part / parts,
                                            k * (part + 1) / parts, algorithm->tf32);
                    sum.real += more.real;
                    sum.imaginary += more.imaginary;
                    sum = rounded(sum, la->type);
                }
                store((char *)item(to, lout, false, i, j), la->type, sum);
            }
        }
    }
    return SUCCESS;
}
