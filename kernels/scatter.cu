/* scatter and scatter_add: what the caller can get wrong, and the description as loops
 * (scatter.cuh), which scatter_cpu.cu and scatter_cuda.cu carry out. */
#include "scatter.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Plans. */

/* A Python scalar has a kind alone, and fits every dtype of numbers of that kind or a higher one.
 */
static bool casts(const View *values, const View *x)
{
    /* Whether two of these are the same is for csrc to see, which has cast what can be cast. */
    if (x->dtype == DTYPE_OPAQUE && values->dtype == DTYPE_OPAQUE) return true;
    switch (values->weak) {
    case WEAK_INT:
        return x->dtype != DTYPE_OPAQUE && x->dtype != DTYPE_BOOL;
    case WEAK_FLOAT:
        return dtype_is_float(x->dtype) || dtype_is_complex(x->dtype);
    case WEAK_COMPLEX:
        return dtype_is_complex(x->dtype);
    default:
        break;
    }
    /* An empty list has no dtype that anybody chose. */
    const bool both = x->dtype != DTYPE_OPAQUE && values->dtype != DTYPE_OPAQUE;
    return dtype_casts(values->dtype, x->dtype) || (both && view_items(values) == 0);
}

static Status check_values_dtype(const View *x, const View *values)
{
    if (casts(values, x)) return STATUS_OK;
    return fail(STATUS_TYPE_ERROR,
                "Cannot cast values from dtype('%s') to dtype('%s') according to the rule "
                "'same_kind': convert them with values.astype(x.dtype)",
                values->dtype_name, x->dtype_name);
}

static void append_sizes(int64_t *shape, int *ndim, const View *from, int begin, int end)
{
    for (int i = begin; i < end; i++) shape[(*ndim)++] = from->shape[i];
}

/* NumPy writes a shape as Python does a tuple. */
static const char *shape_text(const int64_t *shape, int ndim, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "(");
    for (int i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i == 0 ? "" : ",",
                                 (long long)shape[i]);
    if (used < size) snprintf(text + used, size - used, ndim == 1 ? ",)" : ")");
    return text;
}

/* The shape that values are broadcast to. */
static int target_shape(const Call *call, int64_t *shape)
{
    const View *x = &call->out, *indices = &call->inputs[0];
    const int axis_begin = call->axis_is_none ? 0 : call->axis;
    const int axis_end = call->axis_is_none ? x->ndim : call->axis + 1;
    int ndim = 0;
    append_sizes(shape, &ndim, x, 0, axis_begin);
    append_sizes(shape, &ndim, indices, 0, indices->ndim);
    append_sizes(shape, &ndim, x, axis_end, x->ndim);
    return ndim;
}

/* An assignment takes values with more dimensions too, if these are of one element. */
static bool broadcasts(const View *values, const int64_t *shape, int ndim, bool adds)
{
    if (adds && values->ndim > ndim) return false;
    for (int i = 0; i < values->ndim; i++) {
        const int at = ndim - values->ndim + i;
        if (values->shape[i] != 1 && (at < 0 || values->shape[i] != shape[at])) return false;
    }
    return true;
}

static Status fail_broadcast(const Call *call, const int64_t *shape, int ndim)
{
    const View *values = &call->inputs[1];
    char from[160], to[160];
    return fail(STATUS_VALUE_ERROR,
                "shape mismatch: value array of shape %s could not be broadcast to indexing "
                "result of shape %s",
                shape_text(values->shape, values->ndim, from, sizeof from),
                shape_text(shape, ndim, to, sizeof to));
}

static int64_t axis_size_of(const Call *call)
{
    return call->axis_is_none ? view_items(&call->out) : call->out.shape[call->axis];
}

static Status plan(Call *call, bool adds)
{
    const View *x = &call->out, *indices = &call->inputs[0], *values = &call->inputs[1];
    Status status = check_not_mask(indices, "a mask is not positions: pass "
                                            "numpy.flatnonzero(mask)");
    if (status != STATUS_OK) return status;
    if (!dtype_is_integer(indices->dtype))
        return fail(STATUS_INDEX_ERROR,
                    "arrays used as indices must be of integer (or boolean) type; indices has "
                    "dtype %s: convert them with indices.astype(numpy.int64)",
                    indices->dtype_name);
    /* A 0-d array counts as an axis of one element. */
    status = check_axis(call, x->ndim == 0 ? 1 : x->ndim);
    if (status != STATUS_OK) return status;
    if (x->ndim == 0 || call->axis_is_none) {
        call->axis_is_none = true;
        call->axis = 0;
    }
    const int ndim = (call->axis_is_none ? 0 : x->ndim - 1) + indices->ndim;
    if (ndim > GPUOPS_MAX_DIMS)
        return fail(STATUS_VALUE_ERROR,
                    "number of dimensions must be within [0, %d]: the indexed part of x would "
                    "have %d",
                    GPUOPS_MAX_DIMS, ndim);
    if (adds && (x->dtype == DTYPE_OPAQUE || x->dtype == DTYPE_BOOL))
        return fail(STATUS_TYPE_ERROR,
                    "scatter_add takes integers, floats and complex numbers, and x has dtype %s",
                    x->dtype_name);
    status = check_values_dtype(x, values);
    if (status != STATUS_OK) return status;
    int64_t shape[GPUOPS_MAX_DIMS];
    if (!broadcasts(values, shape, target_shape(call, shape), adds))
        return fail_broadcast(call, shape, ndim);
    if (call->mode != MODE_RAISE && call->mode != MODE_FILL && axis_size_of(call) == 0 &&
        view_items(indices) > 0)
        return fail(STATUS_INDEX_ERROR, "cannot replace elements of an empty array");

    call->operations = view_count(indices, 0, indices->ndim) * view_count(x, 0, call->axis);
    call->in_place = true;
    call->compute = x->dtype;
    call->cast_inputs = 2;
    /* One value goes with the arguments of the kernels. */
    const int64_t item_bytes = x->item_bytes;
    if (view_items(values) == 1 && item_bytes > 0 && 16 % item_bytes == 0) call->host_inputs = 2;
    return STATUS_OK;
}

Status plan_scatter(Call *call)
{
    return plan(call, false);
}

Status plan_scatter_add(Call *call)
{
    return plan(call, true);
}

/* The description. */

static void add_loop(Scatter *scatter, int *group, int64_t count, int64_t x, int64_t value)
{
    if (count == 1) return;
    ScatterLoop *next = scatter->loops + scatter_ndim(*scatter), *last = next - (*group > 0);
    if (last != next && last->x == count * x && last->value == count * value) {
        *last = {last->count * count, x, value};
        return;
    }
    *next = {count, x, value};
    *group += 1;
}

static void add_axis(Scatter *scatter, int64_t count, int64_t stride)
{
    int last = scatter->axis_ndim - 1;
    scatter->axis_size *= count;
    if (count == 1) return;
    if (last >= 0 && scatter->axis_strides[last] == count * stride) {
        scatter->axis_counts[last] *= count;
        scatter->axis_strides[last] = stride;
    } else {
        scatter->axis_counts[last + 1] = count;
        scatter->axis_strides[last + 1] = stride;
        scatter->axis_ndim++;
    }
}

/* Inner loops that both arrays hold without gaps are part of the row. */
static void end_loops(Scatter *scatter)
{
    while (scatter->inner > 0) {
        const ScatterLoop &last = scatter->loops[scatter_ndim(*scatter) - 1];
        if (last.x != scatter->row_bytes) return;
        if (last.value != scatter->row_bytes && !scatter->constant) return;
        scatter->row_bytes *= last.count;
        scatter->inner--;
    }
}

static Dtype part_of(Dtype dtype)
{
    return dtype == DTYPE_COMPLEX64    ? DTYPE_FLOAT32
           : dtype == DTYPE_COMPLEX128 ? DTYPE_FLOAT64
                                       : dtype;
}

static void describe(const Call *call, bool adds, Scatter *scatter)
{
    const View *x = &call->out, *indices = &call->inputs[0], *values = &call->inputs[1];
    scatter->x = static_cast<char *>(x->data);
    scatter->values = static_cast<const char *>(values->data);
    scatter->indices = static_cast<const char *>(indices->data);
    scatter->index_dtype = indices->dtype;
    scatter->index_bytes = indices->item_bytes;
    scatter->index_count = view_items(indices);
    scatter->dtype = part_of(x->dtype);
    scatter->item_bytes = scatter->row_bytes = x->item_bytes;
    scatter->outer = scatter->index = scatter->inner = 0;
    scatter->axis_size = 1;
    scatter->axis_ndim = 0;
    scatter->mode = call->mode;
    scatter->adds = adds;
    scatter->constant = call->out.device != DEVICE_CPU && values->device == DEVICE_CPU;

    /* The strides of values, broadcast to the shape of the loops. */
    int64_t shape[GPUOPS_MAX_DIMS], value[GPUOPS_MAX_DIMS];
    const int ndim = target_shape(call, shape);
    for (int i = 0; i < ndim; i++) {
        const int from = i - ndim + values->ndim;
        value[i] = from < 0 || values->shape[from] == 1 ? 0 : values->strides[from];
    }

    const int axis_begin = call->axis_is_none ? 0 : call->axis;
    const int axis_end = call->axis_is_none ? x->ndim : call->axis + 1;
    int dim = 0;
    for (int i = 0; i < axis_begin; i++, dim++)
        add_loop(scatter, &scatter->outer, x->shape[i], x->strides[i], value[dim]);
    for (int i = axis_begin; i < axis_end; i++) add_axis(scatter, x->shape[i], x->strides[i]);
    for (int i = 0; i < indices->ndim; i++, dim++)
        add_loop(scatter, &scatter->index, indices->shape[i], 0, value[dim]);
    for (int i = axis_end; i < x->ndim; i++, dim++)
        add_loop(scatter, &scatter->inner, x->shape[i], x->strides[i], value[dim]);
    end_loops(scatter);
}

/* run */

#ifdef __CUDACC__

static uint64_t address_bits(const View *view)
{
    uint64_t bits = reinterpret_cast<uintptr_t>(view->data);
    for (int i = 0; i < view->ndim; i++)
        if (view->shape[i] != 1) bits |= (uint64_t)view->strides[i];
    return bits;
}

/* What kernels add to, or add, has to lie where the device can read a number of its dtype. */
static bool is_aligned(const View *view)
{
    const bool pair = dtype_is_complex(view->dtype);
    const int64_t bytes = pair ? view->item_bytes / 2 : view->item_bytes;
    return view->device == DEVICE_CPU || address_bits(view) % (uint64_t)bytes == 0;
}

/* Replaces a view by a copy of it, and holds the memory of that. */
static Status pack(View *view, Stream *stream, Memory **memory)
{
    View given;
    view_copy(&given, view);
    Status status = pack_on_device(&given, stream, view);
    *memory = status == STATUS_OK ? view->memory : NULL;
    if (status != STATUS_OK) view_copy(view, &given);
    return status;
}

static Status run_on_device(Call *call, bool adds)
{
    View *indices = &call->inputs[0], *values = &call->inputs[1], *x = &call->out;
    View given[3];
    view_copy(&given[0], indices);
    view_copy(&given[1], values);
    view_copy(&given[2], x);
    Memory *held[3] = {};
    Status status = STATUS_OK;
    if (view_items(indices) > 0 && (!view_is_packed(indices) || !is_aligned(indices)))
        status = pack(indices, call->stream, &held[0]);
    if (status == STATUS_OK && adds && !is_aligned(values))
        status = pack(values, call->stream, &held[1]);
    if (status == STATUS_OK && adds && !is_aligned(x)) status = pack(x, call->stream, &held[2]);
    if (status == STATUS_OK) {
        Scatter scatter;
        describe(call, adds, &scatter);
        status = scatter_on_device(call, scatter);
    }
    /* After a bad index the copy is what x was. */
    if (status == STATUS_OK && held[2] != NULL) status = copy_on_device(&given[2], x, call->stream);
    for (Memory *memory : held)
        if (memory != NULL) memory_release(memory);
    view_copy(indices, &given[0]);
    view_copy(values, &given[1]);
    view_copy(x, &given[2]);
    return status;
}

#else

static Status run_on_device(Call *, bool)
{
    int count;
    return cuda_device_count(&count);
}

#endif

static Status run(Call *call, bool adds)
{
    if (call->out.device != DEVICE_CPU) return run_on_device(call, adds);
    Scatter scatter;
    describe(call, adds, &scatter);
    const View *indices = &call->inputs[0];
    if (scatter.index_count == 0 || view_is_packed(indices)) return scatter_on_cpu(call, scatter);
    char *packed = pack_indices(indices, scatter.index_count);
    if (packed == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for indices",
                    (long long)(scatter.index_count * scatter.index_bytes));
    scatter.indices = packed;
    Status status = scatter_on_cpu(call, scatter);
    free(packed);
    return status;
}

Status run_scatter(Call *call)
{
    return run(call, false);
}

Status run_scatter_add(Call *call)
{
    return run(call, true);
}
