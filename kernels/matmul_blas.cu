/* Products of matrices by cuBLASLt, NVIDIA's library, where it is found at run time.
 *
 * Nothing of it is needed to build: what is declared here are the functions and constants of its
 * public interface (cublasLt.h, "Using the cuBLASLt API" in NVIDIA's cuBLAS documentation) that are
 * used. The library is opened when the first product of floats is computed on a GPU, from
 *
 *     GPUOPS_CUBLASLT      a path, where it is kept somewhere unusual; nothing else is tried then
 *     cuda-pathfinder      asked by whoever set blas_set_finder
 *     libcublasLt.so.13, libcublasLt.so.12    as the dynamic linker finds them
 *
 * It has matrices in Fortran order; ours in C order are their transposes, and so the product of b
 * and a there is the product of a and b here. */
#include "matmul.cuh"

#ifdef __CUDACC__

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cublasStatus_t */
enum {
    BLAS_SUCCESS = 0,
    BLAS_NOT_INITIALIZED = 1,
    BLAS_ALLOCATION_FAILED = 3,
    BLAS_ARCHITECTURE_MISMATCH = 8,
};
/* cudaDataType_t */
enum { R_32F = 0, R_64F = 1, R_16F = 2, C_32F = 4, C_64F = 5, R_16BF = 14 };
/* cublasComputeType_t */
enum { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_32F_FAST_TF32 = 77 };
/* cublasOperation_t */
enum { OPERATION_N = 0, OPERATION_T = 1 };
/* cublasLtMatmulDescAttributes_t */
enum { DESCRIPTION_TRANSA = 3, DESCRIPTION_TRANSB = 4 };
/* cublasLtMatrixLayoutAttribute_t */
enum { LAYOUT_BATCH_COUNT = 5, LAYOUT_STRIDED_BATCH_OFFSET = 6 };
/* cublasLtMatmulPreferenceAttributes_t */
enum {
    PREFERENCE_MAX_WORKSPACE_BYTES = 1,
    PREFERENCE_REDUCTION_SCHEME_MASK = 3,
    PREFERENCE_MIN_ALIGNMENT_A_BYTES = 5, /* and B, C, D */
    PREFERENCE_IMPL_MASK = 12,
};
/* cublasLtReductionScheme_t */
enum { REDUCTION_COMPUTE_TYPE = 2, REDUCTION_ANY = 7 };
/* cublasLtNumericalImplFlags_t */
constexpr uint64_t IMPL_IMMA = 1 << 2, IMPL_ACCUMULATOR_16F = 1 << 8, IMPL_INPUT_16F = 1 << 16,
                   IMPL_INPUT_16BF = 1 << 17, IMPL_INPUT_TF32 = 1 << 18, IMPL_INPUT_8I = 1 << 21,
                   IMPL_GAUSSIAN = 1ull << 32;

struct Algorithm { /* cublasLtMatmulAlgo_t */
    uint64_t data[8];
};

struct Found { /* cublasLtMatmulHeuristicResult_t */
    Algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

typedef void *Handle, *Description, *Layout, *Preference;

static struct Library {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    bool settled; /* it was opened, or never will be; the functions and the text are final then */
    void *handle; /* of dlopen, or NULL */
    bool named;   /* by GPUOPS_CUBLASLT */
    char text[512] = "cuBLASLt is being looked for";
    int (*create)(Handle *);
    size_t (*version)(void);
    const char *(*status_name)(int);
    const char *(*status_text)(int);
    int (*description_create)(Description *, int compute, int scale);
    int (*description_set)(Description, int attribute, const void *, size_t);
    int (*description_destroy)(Description);
    int (*layout_create)(Layout *, int type, uint64_t rows, uint64_t columns, int64_t leading);
    int (*layout_set)(Layout, int attribute, const void *, size_t);
    int (*layout_destroy)(Layout);
    int (*preference_create)(Preference *);
    int (*preference_set)(Preference, int attribute, const void *, size_t);
    int (*preference_destroy)(Preference);
    int (*find)(Handle, Description, Layout a, Layout b, Layout c, Layout d, Preference, int wanted,
                Found *, int *found);
    int (*multiply)(Handle, Description, const void *alpha, const void *a, Layout, const void *b,
                    Layout, const void *beta, const void *c, Layout, void *d, Layout,
                    const Algorithm *, void *workspace, size_t workspace_bytes, cudaStream_t);
} library;

/* Opening it. */

static bool (*find_path)(char *path, size_t size);

void blas_set_finder(bool (*finder)(char *path, size_t size))
{
    find_path = finder;
}

static bool load_functions(void *handle)
{
    const struct {
        const char *name;
        void **function;
    } FUNCTIONS[] = {
        {"cublasLtCreate", (void **)&library.create},
        {"cublasLtGetVersion", (void **)&library.version},
        {"cublasLtGetStatusName", (void **)&library.status_name},
        {"cublasLtGetStatusString", (void **)&library.status_text},
        {"cublasLtMatmulDescCreate", (void **)&library.description_create},
        {"cublasLtMatmulDescSetAttribute", (void **)&library.description_set},
        {"cublasLtMatmulDescDestroy", (void **)&library.description_destroy},
        {"cublasLtMatrixLayoutCreate", (void **)&library.layout_create},
        {"cublasLtMatrixLayoutSetAttribute", (void **)&library.layout_set},
        {"cublasLtMatrixLayoutDestroy", (void **)&library.layout_destroy},
        {"cublasLtMatmulPreferenceCreate", (void **)&library.preference_create},
        {"cublasLtMatmulPreferenceSetAttribute", (void **)&library.preference_set},
        {"cublasLtMatmulPreferenceDestroy", (void **)&library.preference_destroy},
        {"cublasLtMatmulAlgoGetHeuristic", (void **)&library.find},
        {"cublasLtMatmul", (void **)&library.multiply},
    };
    for (const auto &wanted : FUNCTIONS) {
        *wanted.function = dlsym(handle, wanted.name);
        if (*wanted.function == NULL) return false;
    }
    return true;
}

static bool open_library(const char *path)
{
    void *handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (handle == NULL) {
        const char *problem = dlerror();
        snprintf(library.text, sizeof library.text, "%s", problem == NULL ? path : problem);
        return false;
    }
    if (!load_functions(handle)) {
        snprintf(library.text, sizeof library.text,
                 "%s does not have all functions of cuBLASLt 12 or later", path);
        dlclose(handle);
        return false;
    }
    const size_t version = library.version();
    Dl_info info;
    const bool known = dladdr((void *)library.multiply, &info) != 0 && info.dli_fname != NULL;
    snprintf(library.text, sizeof library.text, "cuBLASLt %zu.%zu.%zu from %s", version / 10000,
             version / 100 % 100, version % 100, known ? info.dli_fname : path);
    library.handle = handle;
    return true;
}

static const char *given_path(void)
{
    const char *given = getenv("GPUOPS_CUBLASLT");
    return given != NULL && given[0] != '\0' ? given : NULL;
}

/* The real library has nothing to do with the devices of the fake runtime, in whose builds the
 * finder is asked when a test wants that. */
static bool asks_finder(void)
{
#ifdef GPUOPS_FAKE_CUDA
    if (getenv("GPUOPS_FAKE_FINDER") == NULL) return false;
#endif
    return find_path != NULL && given_path() == NULL;
}

static void open_first(const char *found)
{
    const char *given = given_path();
    if (given != NULL) {
        library.named = true;
        open_library(given);
        return;
    }
    if (found != NULL && open_library(found)) return;
#ifndef GPUOPS_FAKE_CUDA
    for (const char *name : {"libcublasLt.so.13", "libcublasLt.so.12"})
        if (open_library(name)) return;
#endif
    snprintf(library.text, sizeof library.text,
             "cuBLASLt was not found: matmul uses gpuops' own kernels; for NVIDIA's, pip install "
             "\"gpuops[blas]\", or name libcublasLt.so in GPUOPS_CUBLASLT");
}

/* The finder runs Python, and so no lock is held: any code may run in it, even a product. Such a
 * product does without cuBLAS and settles nothing, as the finder is not through. */
static bool has_library(void)
{
    static thread_local bool finding;
    if (__atomic_load_n(&library.settled, __ATOMIC_ACQUIRE)) return library.handle != NULL;
    if (finding) return false;
    char path[4096];
    finding = true;
    const bool found = asks_finder() && find_path(path, sizeof path);
    finding = false;
    pthread_mutex_lock(&library.lock);
    if (!library.settled) {
        open_first(found ? path : NULL);
        __atomic_store_n(&library.settled, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&library.lock);
    return library.handle != NULL;
}

Status blas_describe(char *text, size_t size)
{
    if (blas_wanted() != Blas::AUTOMATIC) {
        snprintf(text, size, "cuBLASLt is switched off by GPUOPS_BLAS");
        return fail(STATUS_DEVICE_ERROR, "%s", text);
    }
    const bool found = has_library();
    snprintf(text, size, "%s", library.text);
    return found ? STATUS_OK : fail(STATUS_DEVICE_ERROR, "%s", text);
}

/* Plans: how cuBLASLt computes a product of certain extents, strides and alignment. Finding out
 * takes tens of microseconds, and so it is kept. */

struct Shape { /* compared as bytes */
    int64_t type, compute;
    int64_t rows, columns, depth; /* of ours */
    int64_t a_transposed, b_transposed, a_leading, b_leading, out_leading;
    int64_t count, a_apart, b_apart, out_apart; /* of the batch */
    int64_t a_alignment, b_alignment, out_alignment;
};

struct Plan {
    Shape shape;
    bool known, usable;
    Description description;
    Layout a, b, out;
    Algorithm algorithm;
    size_t workspace_bytes;
};

enum { PLANS = 128 };

/* What a device has; used by one thread at a time, which holds the device's lock. No memory is
 * allocated or released under it: that may run Python, where somebody's __del__ may well compute a
 * product on the same device. */
struct DeviceBlas {
    Handle handle;
    Plan plans[PLANS];
};

static DeviceBlas *devices[MAX_DEVICES];
static pthread_mutex_t locks[MAX_DEVICES]; /* zeros are PTHREAD_MUTEX_INITIALIZER */

constexpr uint64_t WORKSPACE_BYTES = 32 << 20; /* as NVIDIA recommends for Hopper */

static Status fail_blas(int code, const char *call)
{
    const char *name = library.status_name(code);
    char text[512];
    snprintf(text, sizeof text,
             "%s failed with %s (%d): %s; GPUOPS_BLAS=0 in the environment does without cuBLAS",
             call, name, code, library.status_text(code));
    return fail_cuda(code == BLAS_ALLOCATION_FAILED ? STATUS_MEMORY_ERROR : STATUS_DEVICE_ERROR,
                     code, name, text);
}

/* NULL where there is none, because it could not be created, or not now. */
static DeviceBlas *device_blas(Stream *stream)
{
    DeviceBlas **device = &devices[stream->device];
    if (*device != NULL) return (*device)->handle == NULL ? NULL : *device;
    /* It allocates, which would spoil a graph that is being captured. */
    if (stream_is_capturing(stream)) return NULL;
    DeviceBlas *made = static_cast<DeviceBlas *>(calloc(1, sizeof *made));
    if (made == NULL) return NULL;
    const int code = library.create(&made->handle);
    const bool lasting = code == BLAS_NOT_INITIALIZED || code == BLAS_ARCHITECTURE_MISMATCH;
    if (code != BLAS_SUCCESS && !lasting) { /* such as too little memory: it may work next time */
        free(made);
        return NULL;
    }
    if (code != BLAS_SUCCESS) made->handle = NULL;
    *device = made;
    return made->handle == NULL ? NULL : made;
}

static void forget(Plan *plan)
{
    if (plan->description != NULL) library.description_destroy(plan->description);
    for (Layout layout : {plan->a, plan->b, plan->out})
        if (layout != NULL) library.layout_destroy(layout);
    memset(plan, 0, sizeof *plan);
}

static int make_layout(Layout *layout, const Shape &shape, int64_t rows, int64_t columns,
                       int64_t leading, int64_t apart)
{
    const int32_t count = static_cast<int32_t>(shape.count);
    int code = library.layout_create(layout, static_cast<int>(shape.type), (uint64_t)rows,
                                     (uint64_t)columns, leading);
    if (code == BLAS_SUCCESS)
        code = library.layout_set(*layout, LAYOUT_BATCH_COUNT, &count, sizeof count);
    if (code == BLAS_SUCCESS)
        code = library.layout_set(*layout, LAYOUT_STRIDED_BATCH_OFFSET, &apart, sizeof apart);
    return code;
}

static bool is_16_bits(const Shape &shape)
{
    return shape.type == R_16F || shape.type == R_16BF;
}

/* Which ways of computing are right: what the environment asks of NVIDIA's libraries (TF32, or
 * emulation by 16-bit or 8-bit numbers) is for others, and sums of 16-bit floats are float32's. The
 * fastest algorithms for bfloat16 say that they are for 16F, and so the two are not told apart. */
static uint64_t allowed_implementations(const Shape &shape)
{
    uint64_t refused = IMPL_ACCUMULATOR_16F | IMPL_GAUSSIAN | IMPL_IMMA | IMPL_INPUT_8I;
    if (!is_16_bits(shape)) refused |= IMPL_INPUT_16F | IMPL_INPUT_16BF;
    if (shape.compute != COMPUTE_32F_FAST_TF32) refused |= IMPL_INPUT_TF32;
    return ~refused;
}

static int set_preference(Preference preference, const Shape &shape)
{
    const uint64_t allowed = allowed_implementations(shape);
    /* Where the output is narrower than the sums, their parts are rounded once, at the end. */
    const uint32_t reduction = is_16_bits(shape) ? REDUCTION_COMPUTE_TYPE : REDUCTION_ANY;
    const uint32_t alignments[] = {(uint32_t)shape.b_alignment, (uint32_t)shape.a_alignment,
                                   (uint32_t)shape.out_alignment, (uint32_t)shape.out_alignment};
    int code = library.preference_set(preference, PREFERENCE_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES,
                                      sizeof WORKSPACE_BYTES);
    if (code == BLAS_SUCCESS)
        code = library.preference_set(preference, PREFERENCE_REDUCTION_SCHEME_MASK, &reduction,
                                      sizeof reduction);
    if (code == BLAS_SUCCESS)
        code = library.preference_set(preference, PREFERENCE_IMPL_MASK, &allowed, sizeof allowed);
    for (int i = 0; i < 4 && code == BLAS_SUCCESS; i++)
        code = library.preference_set(preference, PREFERENCE_MIN_ALIGNMENT_A_BYTES + i,
                                      &alignments[i], sizeof alignments[i]);
    return code;
}

/* Whatever fails here, our own kernels can do it. */
static void make_plan(Handle handle, const Shape &shape, Plan *plan)
{
    forget(plan);
    plan->shape = shape;
    plan->known = true;
    const int type = static_cast<int>(shape.type);
    const int scale = is_16_bits(shape) ? static_cast<int>(R_32F) : type;
    /* Theirs is the transpose of ours, so that b is their first operand. */
    const int32_t first = shape.b_transposed ? OPERATION_T : OPERATION_N;
    const int32_t second = shape.a_transposed ? OPERATION_T : OPERATION_N;
    Preference preference = NULL;
    Found found = {};
    int count = 0;

    int code =
        library.description_create(&plan->description, static_cast<int>(shape.compute), scale);
    if (code == BLAS_SUCCESS)
        code = library.description_set(plan->description, DESCRIPTION_TRANSA, &first, sizeof first);
    if (code == BLAS_SUCCESS)
        code =
            library.description_set(plan->description, DESCRIPTION_TRANSB, &second, sizeof second);
    if (code == BLAS_SUCCESS)
        code = make_layout(&plan->b, shape, shape.b_transposed ? shape.depth : shape.columns,
                           shape.b_transposed ? shape.columns : shape.depth, shape.b_leading,
                           shape.b_apart);
    if (code == BLAS_SUCCESS)
        code = make_layout(&plan->a, shape, shape.a_transposed ? shape.rows : shape.depth,
                           shape.a_transposed ? shape.depth : shape.rows, shape.a_leading,
                           shape.a_apart);
    if (code == BLAS_SUCCESS)
        code = make_layout(&plan->out, shape, shape.columns, shape.rows, shape.out_leading,
                           shape.out_apart);
    if (code == BLAS_SUCCESS) code = library.preference_create(&preference);
    if (code == BLAS_SUCCESS) code = set_preference(preference, shape);
    if (code == BLAS_SUCCESS)
        code = library.find(handle, plan->description, plan->b, plan->a, plan->out, plan->out,
                            preference, 1, &found, &count);
    if (preference != NULL) library.preference_destroy(preference);
    plan->usable = code == BLAS_SUCCESS && count > 0 && found.status == BLAS_SUCCESS;
    plan->algorithm = found.algorithm;
    plan->workspace_bytes = found.workspace_bytes;
}

static const Plan *plan_for(DeviceBlas *device, const Shape &shape)
{
    uint64_t hash = 0;
    int64_t words[sizeof shape / sizeof(int64_t)];
    memcpy(words, &shape, sizeof shape);
    for (int64_t word : words) hash = (hash ^ (uint64_t)word) * 0x9e3779b97f4a7c15ull;
    Plan *plan = &device->plans[hash >> 32 & (PLANS - 1)];
    if (!plan->known || memcmp(&plan->shape, &shape, sizeof shape) != 0)
        make_plan(device->handle, shape, plan);
    return plan->usable ? plan : NULL;
}

/* From a product to plans. */

static bool data_type(Dtype dtype, int64_t *type)
{
    switch (dtype) {
    case DTYPE_FLOAT16:
        *type = R_16F;
        return true;
    case DTYPE_BFLOAT16:
        *type = R_16BF;
        return true;
    case DTYPE_FLOAT32:
        *type = R_32F;
        return true;
    case DTYPE_FLOAT64:
        *type = R_64F;
        return true;
    case DTYPE_COMPLEX64:
        *type = C_32F;
        return true;
    case DTYPE_COMPLEX128:
        *type = C_64F;
        return true;
    default:
        return false;
    }
}

static int64_t alignment_of(const void *data)
{
    const uintptr_t place = reinterpret_cast<uintptr_t>(data) | 256;
    return static_cast<int64_t>(place & -place);
}

/* The distance between what lies along the other axis than the unit stride, at least as long as
 * that, which it need not be where there is only one. */
static int64_t leading(int64_t stride, int64_t extent, int64_t others)
{
    return others > 1 ? stride : extent;
}

static Shape shape_of(const Product &product, int64_t type, const BatchLoop &batch)
{
    Shape shape = {};
    shape.type = type;
    shape.compute = product.dtype == DTYPE_FLOAT64 || product.dtype == DTYPE_COMPLEX128
                        ? COMPUTE_64F
                    : product.tf32 ? COMPUTE_32F_FAST_TF32
                                   : COMPUTE_32F;
    shape.rows = product.rows;
    shape.columns = product.columns;
    shape.depth = product.depth;
    shape.a_transposed = product.a.column != 1;
    shape.b_transposed = product.b.column != 1;
    shape.a_leading = shape.a_transposed ? leading(product.a.column, product.rows, product.depth)
                                         : leading(product.a.row, product.depth, product.rows);
    shape.b_leading = shape.b_transposed ? leading(product.b.column, product.depth, product.columns)
                                         : leading(product.b.row, product.columns, product.depth);
    shape.out_leading = leading(product.out.row, product.columns, product.rows);
    shape.count = batch.count;
    shape.a_apart = batch.a;
    shape.b_apart = batch.b;
    shape.out_apart = batch.out;
    return shape;
}

/* Enqueues one call if there is a plan, and a workspace as large as it wants; else *wanted says how
 * many bytes are missing. */
static int multiply_locked(const Shape &shape, const Matrix &a, const Matrix &b, const Matrix &out,
                           Stream *stream, Memory *workspace, size_t bytes, size_t *wanted,
                           bool *done)
{
    static const float SINGLE[] = {1, 0, 0, 0};
    static const double DOUBLE[] = {1, 0, 0, 0};
    const bool is_double = shape.compute == COMPUTE_64F;
    const void *alpha = is_double ? (const void *)DOUBLE : SINGLE;
    const void *beta = is_double ? (const void *)(DOUBLE + 2) : SINGLE + 2;
    DeviceBlas *device = device_blas(stream);
    const Plan *plan = device == NULL ? NULL : plan_for(device, shape);
    *wanted = 0;
    *done = false;
    if (plan == NULL) return BLAS_SUCCESS;
    if (plan->workspace_bytes > bytes) {
        *wanted = plan->workspace_bytes;
        return BLAS_SUCCESS;
    }
    *done = true;
    return library.multiply(device->handle, plan->description, alpha, b.data, plan->b, a.data,
                            plan->a, beta, out.data, plan->out, out.data, plan->out,
                            &plan->algorithm, workspace == NULL ? NULL : memory_data(workspace),
                            plan->workspace_bytes, stream->handle);
}

/* The plan is looked up again with the workspace that it wants, as another product may have taken
 * its place in the meantime. */
static Status multiply_batch(Shape shape, const Matrix &a, const Matrix &b, const Matrix &out,
                             Stream *stream, bool *done)
{
    pthread_mutex_t *lock = &locks[stream->device];
    Memory *workspace = NULL;
    size_t bytes = 0, wanted = 0;
    shape.a_alignment = alignment_of(a.data);
    shape.b_alignment = alignment_of(b.data);
    shape.out_alignment = alignment_of(out.data);
    for (;;) {
        pthread_mutex_lock(lock);
        const int code = multiply_locked(shape, a, b, out, stream, workspace, bytes, &wanted, done);
        pthread_mutex_unlock(lock);
        if (workspace != NULL) memory_release(workspace);
        if (code != BLAS_SUCCESS) return fail_blas(code, "cublasLtMatmul");
        if (wanted == 0) return STATUS_OK;
        bytes = wanted;
        const Status status = memory_allocate(stream, (int64_t)bytes, &workspace);
        if (status != STATUS_OK) return status;
    }
}

/* One call does a batch along one loop, the longest; the others are gone through one by one, unless
 * that is many calls with little work in each: our own kernels do all of it in one launch. */
constexpr int64_t MANY_CALLS = 16;
constexpr double LITTLE_WORK = 1e8; /* multiplications, some microseconds of them */

static int longest_loop(const Product &product)
{
    int longest = 0;
    for (int i = 1; i < product.ndim; i++)
        if (product.loops[i].count > product.loops[longest].count) longest = i;
    return longest;
}

static Status multiply_batches(const Product &product, int64_t type, Stream *stream, bool *done)
{
    const int inner = longest_loop(product);
    const BatchLoop batch = product.ndim > 0 ? product.loops[inner] : BatchLoop{1, 0, 0, 0};
    const int64_t calls = batch_count(product) / batch.count;
    const double work = (double)product.rows * (double)product.columns * (double)product.depth *
                        (double)batch.count;
    if (batch.count > INT32_MAX || (calls > MANY_CALLS && work < LITTLE_WORK)) return STATUS_OK;
    const Shape shape = shape_of(product, type, batch);
    const int64_t item_bytes = dtype_bytes(product.dtype);
    for (int64_t call = 0; call < calls; call++) {
        Matrix a = product.a, b = product.b, out = product.out;
        int64_t rest = call;
        for (int i = product.ndim - 1; i >= 0; i--) {
            if (i == inner) continue;
            const int64_t position = rest % product.loops[i].count * item_bytes;
            a.data += position * product.loops[i].a;
            b.data += position * product.loops[i].b;
            out.data += position * product.loops[i].out;
            rest /= product.loops[i].count;
        }
        bool computed;
        const Status status = multiply_batch(shape, a, b, out, stream, &computed);
        if (status != STATUS_OK) return status;
        if (!computed) return STATUS_OK; /* all is done again, by our own kernels */
    }
    *done = true;
    return STATUS_OK;
}

/* Few rows, or columns, times a large matrix of single precision: our own kernels read it at nearly
 * the speed of memory, which cuBLASLt does not. On an H200, 8 x 8192 times 8192 x 8192 takes 126 us
 * with cuBLASLt 13.1 and 94 with ours, and 16 rows 149 and 131. Where the large matrix is
 * contiguous along the sums, 1 row takes 99 us and 74, 4 rows 139 and 109, but 8 rows 141 and 165.
 */
constexpr int64_t LARGE_MATRIX = 16 << 20;
/* So are batches of tiny matrices: 1 Mi products of 4 x 4 take 1.94 ms with cuBLASLt and 0.15 with
 * ours. */
constexpr int64_t TINY_EXTENT = 8, MANY_MATRICES = 1024;

/* And so are few sums of very many terms, whose parts cuBLASLt adds up with two blocks: 64 x 1 Mi
 * times 1 Mi x 64 take 345 us with it, and 282 with ours. */
constexpr int64_t FEW_SUMS = 64, MANY_TERMS = 1 << 18;

static bool is_faster_without(const Product &product)
{
    const bool single = product.dtype == DTYPE_FLOAT32 && !product.tf32;
    if (!single && product.dtype != DTYPE_COMPLEX64) return false;
    if (single && product.rows <= FEW_SUMS && product.columns <= FEW_SUMS &&
        product.depth >= MANY_TERMS && batch_count(product) == 1)
        return true;
    if (single && product.rows <= TINY_EXTENT && product.columns <= TINY_EXTENT &&
        product.depth <= TINY_EXTENT && batch_count(product) >= MANY_MATRICES)
        return true;
    const bool few_rows = product.rows <= product.columns;
    const int64_t few = few_rows ? product.rows : product.columns;
    const int64_t many = few_rows ? product.columns : product.rows;
    if (many * product.depth < LARGE_MATRIX) return false;
    const bool along = few_rows ? product.b.column != 1 : product.a.column == 1;
    return few == 1 ? along && single : few <= (along ? 4 : 16);
}

Status multiply_with_blas(const Product &product, Stream *stream, bool *done)
{
    int64_t type;
    *done = false;
    if (!data_type(product.dtype, &type)) return STATUS_OK;
    if (!has_library()) {
        /* Who named one wants that one. */
        if (!library.named) return STATUS_OK;
        return fail(STATUS_DEVICE_ERROR,
                    "GPUOPS_CUBLASLT names a library that cannot be used: %s; leave it out, or set "
                    "GPUOPS_BLAS=0 for gpuops' own kernels",
                    library.text);
    }
    return is_faster_without(product) ? STATUS_OK : multiply_batches(product, type, stream, done);
}

#else /* a build without CUDA */

#include <stdio.h>

void blas_set_finder(bool (*)(char *, size_t)) {}

Status blas_describe(char *text, size_t size)
{
    snprintf(text, size, "this gpuops was built without CUDA, and has no use for cuBLAS");
    return fail(STATUS_DEVICE_ERROR, "%s", text);
}

#endif
