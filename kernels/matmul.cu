/* matmul: what the caller can get wrong, the shape of the result, and the product as a batch of
 * matrices with one unit stride each, which cuBLASLt (matmul_blas.cu) or our own kernels
 * (matmul_cuda.cu) compute. On the CPU, NumPy's BLAS does the work, above the border. */
#include "matmul.cuh"
#include "transfer.cuh"

#include <stdio.h>
#include <string.h>

/* The plan, with the errors of numpy.matmul in its order. */

static const char SIGNATURE[] = "(n?,k),(k,m?)->(n?,m?)";

static Status check_dtype(const Call *call)
{
    const View *a = &call->inputs[0], *b = &call->inputs[1];
    if (a->dtype != DTYPE_OPAQUE && b->dtype != DTYPE_OPAQUE) return STATUS_OK;
    return fail(STATUS_TYPE_ERROR,
                "ufunc 'matmul' did not contain a loop with signature matching types (dtype('%s'), "
                "dtype('%s')) -> None: gpuops multiplies matrices of bool, integers, float16, "
                "bfloat16, float32, float64, complex64 and complex128; convert with .astype(...)",
                a->dtype_name, b->dtype_name);
}

static Status check_ndim(const Call *call)
{
    for (int i = 0; i < 2; i++)
        if (call->inputs[i].ndim == 0)
            return fail(STATUS_VALUE_ERROR,
                        "matmul: Input operand %d does not have enough dimensions (has 0, gufunc "
                        "core with signature %s requires 1)",
                        i, SIGNATURE);
    return STATUS_OK;
}

/* How many of the leading dimensions count the matrices of a batch. */
static int batch_ndim(const View *view)
{
    return view->ndim > 2 ? view->ndim - 2 : 0;
}

static size_t append_shape(char *text, size_t size, size_t used, const View *view, bool remapped)
{
    const int ndim = remapped ? batch_ndim(view) : view->ndim;
    const char *last = remapped ? ",newaxis,newaxis" : "";
    for (int i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i == 0 ? "(" : ",",
                                 (long long)view->shape[i]);
    if (used < size) used += (size_t)snprintf(text + used, size - used, "%s)", last);
    return used;
}

static Status fail_broadcast(const Call *call, int64_t rows, int64_t columns)
{
    char shapes[512] = "";
    size_t used = 0;
    for (int i = 0; i < 2 && used < sizeof shapes; i++) {
        used = append_shape(shapes, sizeof shapes, used, &call->inputs[i], false);
        if (used < sizeof shapes)
            used += (size_t)snprintf(shapes + used, sizeof shapes - used, "->");
        if (used < sizeof shapes)
            used = append_shape(shapes, sizeof shapes, used, &call->inputs[i], true);
        if (used < sizeof shapes)
            used += (size_t)snprintf(shapes + used, sizeof shapes - used, " ");
    }
    return fail(STATUS_VALUE_ERROR,
                "operands could not be broadcast together with remapped shapes "
                "[original->remapped]: %s and requested shape (%lld,%lld)",
                shapes, (long long)rows, (long long)columns);
}

/* The size of the batch along one of its dimensions, for an operand: 1 where it has none. */
static int64_t batch_size(const View *view, int dim, int batch)
{
    const int own = dim - (batch - batch_ndim(view));
    return own < 0 ? 1 : view->shape[own];
}

Status plan_matmul(Call *call)
{
    const View *a = &call->inputs[0], *b = &call->inputs[1];
    View *out = &call->out;
    Status status = check_dtype(call);
    if (status == STATUS_OK) status = check_ndim(call);
    if (status != STATUS_OK) return status;

    const int64_t depth = a->shape[a->ndim - 1], other = b->shape[b->ndim > 1 ? b->ndim - 2 : 0];
    if (depth != other)
        return fail(STATUS_VALUE_ERROR,
                    "matmul: Input operand 1 has a mismatch in its core dimension 0, with gufunc "
                    "signature %s (size %lld is different from %lld)",
                    SIGNATURE, (long long)other, (long long)depth);
    const int64_t rows = a->ndim > 1 ? a->shape[a->ndim - 2] : 1;
    const int64_t columns = b->ndim > 1 ? b->shape[b->ndim - 1] : 1;

    out->dtype = promote(a->dtype, b->dtype);
    out->item_bytes = dtype_bytes(out->dtype);
    call->compute = out->dtype;
    call->cast_inputs = 3; /* both */
#ifdef __CUDACC__
    call->run_in_parts = run_matmul_in_parts;
#endif
    const int batch = batch_ndim(a) > batch_ndim(b) ? batch_ndim(a) : batch_ndim(b);
    out->ndim = batch;
    for (int i = 0; i < batch; i++) {
        const int64_t of_a = batch_size(a, i, batch), of_b = batch_size(b, i, batch);
        if (of_a != of_b && of_a != 1 && of_b != 1) return fail_broadcast(call, rows, columns);
        out->shape[i] = of_a == 1 ? of_b : of_a;
    }
    if (a->ndim > 1) out->shape[out->ndim++] = rows;
    if (b->ndim > 1) out->shape[out->ndim++] = columns;
    call->operations = view_count(out, 0, out->ndim) * (double)depth;
    return STATUS_OK;
}

#ifdef __CUDACC__

/* An operand as a batch of matrices: a vector is a matrix of one row, or of one column. */
struct Operand {
    View view;      /* without the dimensions along which it has one matrix for all */
    Memory *packed; /* of a copy, or NULL */
    int64_t rows, columns;
    Matrix matrix;
};

static void set_matrix(Operand *operand, bool is_first)
{
    const View *view = &operand->view;
    const int last = view->ndim - 1;
    int64_t row = 0, column = 0;
    if (view->ndim > 1) {
        row = view->strides[last - 1];
        column = view->strides[last];
    } else {
        *(is_first ? &column : &row) = view->strides[last];
    }
    operand->rows = view->ndim > 1 ? view->shape[last - 1] : is_first ? 1 : view->shape[last];
    operand->columns = view->ndim > 1 ? view->shape[last] : is_first ? view->shape[last] : 1;
    operand->matrix = {static_cast<char *>(view->data), row / view->item_bytes,
                       column / view->item_bytes};
    /* Along an extent of one there is nowhere to go, and the stride may be what suits best. */
    Matrix *matrix = &operand->matrix;
    if (operand->columns == 1) matrix->column = 1;
    if (operand->rows == 1 && matrix->column == 1) matrix->row = operand->columns;
    if (operand->rows == 1 && matrix->column != 1) matrix->row = 1;
}

/* Whether the kernels and cuBLASLt can read it as it is. */
static bool is_readable(const Operand &operand)
{
    const View *view = &operand.view;
    uint64_t bits = reinterpret_cast<uintptr_t>(view->data);
    for (int i = 0; i < view->ndim; i++)
        if (view->shape[i] > 1) bits |= (uint64_t)view->strides[i];
    if (bits % (uint64_t)view->item_bytes != 0) return false;
    const Matrix &matrix = operand.matrix;
    return (matrix.column == 1 && matrix.row >= operand.columns) ||
           (matrix.row == 1 && matrix.column >= operand.rows);
}

/* Brings an operand to strides that can be read, if need be with a copy, which has each of its
 * matrices once, however often they are broadcast. */
static Status prepare(const View *input, bool is_first, Stream *stream, Operand *operand)
{
    View *view = &operand->view;
    view_copy(view, input);
    operand->packed = NULL;
    for (int i = 0; i < batch_ndim(view); i++)
        if (view->strides[i] == 0) view->shape[i] = 1;
    set_matrix(operand, is_first);
    if (is_readable(*operand)) return STATUS_OK;

    View source;
    view_copy(&source, view);
    Status status = pack_on_device(&source, stream, view);
    if (status != STATUS_OK) return status;
    operand->packed = view->memory;
    set_matrix(operand, is_first);
    return STATUS_OK;
}

/* The stride, in elements, of a dimension of the batch. */
static int64_t batch_stride(const View *view, int dim, int batch)
{
    const int own = dim - (batch - batch_ndim(view));
    return own < 0 || view->shape[own] == 1 ? 0 : view->strides[own] / view->item_bytes;
}

static void add_loop(Product *product, BatchLoop loop)
{
    if (loop.count == 1) return;
    if (product->ndim > 0) {
        BatchLoop *last = &product->loops[product->ndim - 1];
        if (last->a == loop.count * loop.a && last->b == loop.count * loop.b &&
            last->out == loop.count * loop.out) {
            *last = {last->count * loop.count, loop.a, loop.b, loop.out};
            return;
        }
    }
    product->loops[product->ndim++] = loop;
}

/* Matrices that lie one below the other, all times the same matrix, are one with more rows. */
static void absorb_batch(Product *product)
{
    if (product->ndim == 0) return;
    const BatchLoop &last = product->loops[product->ndim - 1];
    const bool single = product->rows == 1;
    if (last.b != 0 || product->a.column != 1) return;
    if (single ? last.a < product->depth : last.a != product->rows * product->a.row) return;
    if (single) product->a.row = last.a;
    product->rows *= last.count;
    product->ndim--;
}

static void describe(const Call *call, const Operand &a, const Operand &b, Product *product)
{
    const View *out = &call->out;
    product->dtype = out->dtype;
    product->a = a.matrix;
    product->b = b.matrix;
    product->rows = a.rows;
    product->columns = b.columns;
    product->depth = a.columns;
    product->out = {static_cast<char *>(out->data), b.columns, 1};
    product->tf32 = call->precision == PRECISION_TF32 && out->dtype == DTYPE_FLOAT32;
    product->ndim = 0;
    const int ndim_a = batch_ndim(&a.view), ndim_b = batch_ndim(&b.view);
    const int batch = ndim_a > ndim_b ? ndim_a : ndim_b;
    int64_t matrices = 1;
    for (int i = 0; i < batch; i++) matrices *= out->shape[i];
    for (int i = 0; i < batch; i++) {
        matrices /= out->shape[i];
        add_loop(product,
                 {out->shape[i], batch_stride(&a.view, i, batch), batch_stride(&b.view, i, batch),
                  matrices * product->rows * product->columns});
    }
    absorb_batch(product);
}

static Status multiply(const Product &product, Stream *stream)
{
    bool done = false;
    if (blas_wanted() == Blas::AUTOMATIC) {
        const Status status = multiply_with_blas(product, stream, &done);
        if (status != STATUS_OK || done) return status;
    }
    return multiply_on_device(product, stream);
}

static Status run_on_device(Call *call)
{
    const int64_t items = view_items(&call->out);
    if (items == 0) return STATUS_OK;
    const View *first = &call->inputs[0];
    if (first->shape[first->ndim - 1] == 0) /* sums of nothing */
        return clear_on_device(call->out.data, 0, items * call->out.item_bytes,
                               call->stream->handle);
    Operand a = {}, b = {};
    Status status = prepare(&call->inputs[0], true, call->stream, &a);
    if (status == STATUS_OK) status = prepare(&call->inputs[1], false, call->stream, &b);
    if (status == STATUS_OK) {
        Product product = {};
        describe(call, a, b, &product);
        status = multiply(product, call->stream);
    }
    if (a.packed != NULL) memory_release(a.packed);
    if (b.packed != NULL) memory_release(b.packed);
    return status;
}

#else

static Status run_on_device(Call *)
{
    int count;
    return cuda_device_count(&count);
}

#endif

Status run_matmul(Call *call)
{
    if (call->out.device != DEVICE_CPU) return run_on_device(call);
    return fail(STATUS_VALUE_ERROR, "matmul on the CPU is the work of the caller's own BLAS");
}
