/* What the files of matmul share: a product of matrices as the kernels and cuBLASLt take it.
 *
 *     out[i, j] = sum of a[i, k] * b[k, j] over k,   for every matrix of a batch
 *
 * with i < rows, j < columns, k < depth. Strides count elements, and are those of C order or of its
 * transpose: one of a matrix's two is 1 and the other at least as large as the extent beside it. */
#ifndef GPUOPS_MATMUL_CUH
#define GPUOPS_MATMUL_CUH

#include "arithmetic.cuh"

/* One loop over the batch; 0 where an operand has one matrix for all of it. */
struct BatchLoop {
    int64_t count, a, b, out;
};

struct Matrix {
    char *data;
    int64_t row, column; /* strides */
};

struct Product {
    Dtype dtype;
    Matrix a, b, out;
    int64_t rows, columns, depth;
    int ndim;
    BatchLoop loops[GPUOPS_MAX_DIMS];
    bool tf32; /* float32 may be rounded to TF32's 10 bits before it is multiplied */
};

static inline int64_t batch_count(const Product &product)
{
    int64_t count = 1;
    for (int i = 0; i < product.ndim; i++) count *= product.loops[i].count;
    return count;
}

#ifdef __CUDACC__

/* matmul_cuda.cu: our own kernels, for every dtype. */
Status multiply_on_device(const Product &product, Stream *stream);

/* matmul_blas.cu: cuBLASLt, where there is one. Sets done to false, and does nothing, where this
 * product is not for it. */
Status multiply_with_blas(const Product &product, Stream *stream, bool *done);

/* matmul_parts.cu, as Call has it. */
Status run_matmul_in_parts(Call *call, bool any, bool *done);

/* What GPUOPS_BLAS says: "0" leaves cuBLASLt out, "simple" also our fast kernels. */
enum class Blas { AUTOMATIC, OWN, SIMPLE };
Blas blas_wanted(void);

#endif
#endif
