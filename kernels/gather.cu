/* gather, take and take_along_axis: what the caller can get wrong, the shape of the result, and its
 * description as loops (gather.cuh), which gather_cpu.cu and gather_cuda.cu compute. */
#include "gather.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Plans: what the caller can get wrong, and the shape of the result. */

static const char *advice_for(const View *indices)
{
    return indices->dtype == DTYPE_BOOL
               ? "a mask is not positions: use x[mask], or pass numpy.flatnonzero(mask)"
               : "convert them with indices.astype(numpy.int64)";
}

static void append_shape(View *out, const View *from, int begin, int end)
{
    for (int i = begin; i < end; i++) out->shape[out->ndim++] = from->shape[i];
}

static int64_t count_of(const View *view, int begin, int end)
{
    int64_t count = 1;
    for (int i = begin; i < end; i++) count *= view->shape[i];
    return count;
}

/* There are several ways for a table on the host, and some of them look at the indices there. */
static void stay_on_host(Call *call)
{
    call->own_transfer = true;
    call->host_inputs = 3;
}

static Status plan_shape(Call *call)
{
    const View *x = &call->inputs[0], *indices = &call->inputs[1];
    /* As in NumPy, a 0-d array counts as an axis of one element. */
    Status status = check_axis(call, x->ndim == 0 ? 1 : x->ndim);
    if (status != STATUS_OK) return status;
    if (x->ndim == 0) call->axis_is_none = true;

    const int axis_begin = call->axis_is_none ? 0 : call->axis;
    const int axis_end = call->axis_is_none ? x->ndim : call->axis + 1;
    const int ndim = x->ndim - (axis_end - axis_begin) + indices->ndim;
    if (ndim > GPUOPS_MAX_DIMS)
        return fail(STATUS_VALUE_ERROR,
                    "number of dimensions must be within [0, %d]: the result would have %d",
                    GPUOPS_MAX_DIMS, ndim);
    View *out = &call->out;
    stay_on_host(call);
    out->dtype = x->dtype;
    out->item_bytes = x->item_bytes;
    out->ndim = 0;
    append_shape(out, x, 0, axis_begin);
    append_shape(out, indices, 0, indices->ndim);
    call->operations = view_count(out, 0, out->ndim);
    append_shape(out, x, axis_end, x->ndim);
    return STATUS_OK;
}

/* Whether there is something to take, but nothing to take it from. */
static bool takes_from_nothing(const Call *call)
{
    const View *x = &call->inputs[0];
    int64_t axis_size = call->axis_is_none ? count_of(x, 0, x->ndim) : x->shape[call->axis];
    return axis_size == 0 && count_of(&call->out, 0, call->out.ndim) > 0;
}

static Status fail_empty_take(void)
{
    return fail(STATUS_INDEX_ERROR, "cannot do a non-empty take from an empty axes.");
}

Status plan_gather(Call *call)
{
    const View *indices = &call->inputs[1];
    Status status = check_not_mask(indices, advice_for(indices));
    if (status != STATUS_OK) return status;
    if (!dtype_is_integer(indices->dtype))
        return fail(STATUS_INDEX_ERROR,
                    "arrays used as indices must be of integer (or boolean) type; indices has "
                    "dtype %s: %s",
                    indices->dtype_name, advice_for(indices));
    status = plan_shape(call);
    if (status != STATUS_OK) return status;
    if ((call->mode == MODE_WRAP || call->mode == MODE_CLIP) && takes_from_nothing(call))
        return fail_empty_take();
    return STATUS_OK;
}

Status plan_take(Call *call)
{
    const View *indices = &call->inputs[1];
    Status status = check_not_mask(indices, advice_for(indices));
    if (status != STATUS_OK) return status;
    if (!dtype_is_integer(indices->dtype))
        return fail(STATUS_TYPE_ERROR,
                    "Cannot cast array data from dtype('%s') to dtype('int64') according to the "
                    "rule 'same_kind'; indices must be integers: %s",
                    indices->dtype_name, advice_for(indices));
    status = plan_shape(call);
    if (status != STATUS_OK) return status;
    if (call->mode != MODE_FILL && takes_from_nothing(call)) return fail_empty_take();
    /* numpy.take does not look at the indices where there is nothing before the axis. */
    if (!call->axis_is_none && count_of(&call->inputs[0], 0, call->axis) == 0)
        call->mode = MODE_CLIP;
    return STATUS_OK;
}

/* NumPy's text, which lists the index arrays that it makes of x's dimensions and of indices. */
static Status fail_broadcast(const Call *call)
{
    const View *x = &call->inputs[0], *indices = &call->inputs[1];
    char shapes[512] = "";
    size_t used = 0;
    for (int i = 0; i < x->ndim && used < sizeof shapes; i++) {
        for (int j = 0; j < x->ndim && used < sizeof shapes; j++) {
            int64_t size = i == call->axis ? indices->shape[j] : i == j ? x->shape[j] : 1;
            used += (size_t)snprintf(shapes + used, sizeof shapes - used, "%s%lld%s",
                                     j == 0 ? "(" : ",", (long long)size,
                                     j < x->ndim - 1 ? ""
                                     : x->ndim == 1  ? ",) "
                                                     : ") ");
        }
    }
    return fail(STATUS_INDEX_ERROR,
                "shape mismatch: indexing arrays could not be broadcast together with shapes %s",
                shapes);
}

Status plan_take_along_axis(Call *call)
{
    const View *x = &call->inputs[0], *indices = &call->inputs[1];
    if (!dtype_is_integer(indices->dtype))
        return fail(STATUS_INDEX_ERROR, "`indices` must be an integer array; it has dtype %s: %s",
                    indices->dtype_name, advice_for(indices));
    View *out = &call->out;
    stay_on_host(call);
    out->dtype = x->dtype;
    out->item_bytes = x->item_bytes;
    if (call->axis_is_none) {
        if (indices->ndim != 1)
            return fail(STATUS_VALUE_ERROR,
                        "when axis=None, `indices` must have a single dimension.");
        call->axis = 0;
        out->ndim = 1;
        out->shape[0] = indices->shape[0];
    } else {
        Status status = check_axis(call, x->ndim);
        if (status != STATUS_OK) return status;
        if (indices->ndim != x->ndim)
            return fail(STATUS_VALUE_ERROR,
                        "`indices` and `arr` must have the same number of dimensions");
        out->ndim = x->ndim;
        for (int i = 0; i < x->ndim; i++) {
            int64_t of_x = i == call->axis ? 1 : x->shape[i], of_indices = indices->shape[i];
            if (of_x != of_indices && of_x != 1 && of_indices != 1) return fail_broadcast(call);
            out->shape[i] = of_x == 1 ? of_indices : of_x;
        }
    }
    call->operations = view_count(out, 0, out->ndim);
    if ((call->mode == MODE_WRAP || call->mode == MODE_CLIP) && takes_from_nothing(call))
        return fail_empty_take();
    return STATUS_OK;
}

/* The description. */

void add_loop(Gather *gather, int64_t count, int64_t out, int64_t x, int64_t index)
{
    if (count == 1) return;
    if (gather->ndim > 0) {
        Loop *last = &gather->loops[gather->ndim - 1];
        if (last->out == count * out && last->x == count * x && last->index == count * index) {
            *last = {last->count * count, out, x, index};
            return;
        }
    }
    gather->loops[gather->ndim++] = {count, out, x, index};
}

void end_loops(Gather *gather)
{
    if (gather->ndim > 0) {
        Loop last = gather->loops[gather->ndim - 1];
        if (last.index == 0 && last.x == gather->row_bytes && last.out == gather->row_bytes &&
            last.count * gather->row_bytes <= gather->fill_bytes) {
            gather->row_bytes *= last.count;
            gather->ndim--;
        }
    }
    /* A loop from before the axis may have become one with a loop behind it, or with the row. */
    if (gather->axis_before > gather->ndim) gather->axis_before = gather->ndim;
    if (gather->ndim == 0) gather->loops[gather->ndim++] = {1, 0, 0, 0};
    /* The axis of a broadcast array has one place in memory, whatever its size. */
    if (gather->axis_ndim == 1 && gather->axis_strides[0] == 0 && gather->axis_size > 0)
        gather->axis_ndim = 0;
    gather->first_place = 0;
    gather->end_place = gather->axis_size;
    gather->is_in_place = false;
}

static void add_axis(Gather *gather, int64_t count, int64_t stride)
{
    int last = gather->axis_ndim - 1;
    gather->axis_size *= count;
    if (count == 1) return;
    if (last >= 0 && gather->axis_strides[last] == count * stride) {
        gather->axis_counts[last] *= count;
        gather->axis_strides[last] = stride;
    } else {
        gather->axis_counts[last + 1] = count;
        gather->axis_strides[last + 1] = stride;
        gather->axis_ndim++;
    }
}

static void begin_loops(Gather *gather, const Call *call)
{
    const View *x = &call->inputs[0], *indices = &call->inputs[1];
    gather->out = static_cast<char *>(call->out.data);
    gather->x = static_cast<char *>(x->data);
    gather->indices = static_cast<char *>(indices->data);
    gather->index_dtype = indices->dtype;
    gather->index_bytes = indices->item_bytes;
    gather->row_bytes = x->item_bytes;
    gather->ndim = 0;
    gather->axis_size = 1;
    gather->axis_before = 0;
    gather->axis_ndim = 0;
    gather->mode = call->mode;
    gather->fill = NULL;
    gather->fill_bytes = INT64_MAX;
}

static void describe_gather(const Call *call, Gather *gather)
{
    const View *x = &call->inputs[0], *indices = &call->inputs[1], *out = &call->out;
    begin_loops(gather, call);
    int dim = 0; /* of out */
    int axis_begin = call->axis_is_none ? 0 : call->axis;
    int axis_end = call->axis_is_none ? x->ndim : call->axis + 1;
    for (int i = 0; i < axis_begin; i++, dim++)
        add_loop(gather, x->shape[i], out->strides[dim], x->strides[i], 0);

    gather->axis_before = gather->ndim;
    for (int i = axis_begin; i < axis_end; i++) add_axis(gather, x->shape[i], x->strides[i]);

    int64_t index_stride = gather->index_bytes;
    for (int i = 0; i < indices->ndim; i++) index_stride *= indices->shape[i];
    for (int i = 0; i < indices->ndim; i++, dim++) {
        if (indices->shape[i] > 0) index_stride /= indices->shape[i];
        add_loop(gather, indices->shape[i], out->strides[dim], 0, index_stride);
    }
    for (int i = axis_end; i < x->ndim; i++, dim++)
        add_loop(gather, x->shape[i], out->strides[dim], x->strides[i], 0);
    end_loops(gather);
}

static void describe_along_axis(const Call *call, Gather *gather)
{
    const View *x = &call->inputs[0], *indices = &call->inputs[1], *out = &call->out;
    begin_loops(gather, call);
    if (call->axis_is_none) {
        for (int i = 0; i < x->ndim; i++) add_axis(gather, x->shape[i], x->strides[i]);
        add_loop(gather, out->shape[0], out->strides[0], 0, gather->index_bytes);
        end_loops(gather);
        return;
    }
    int64_t index_stride = gather->index_bytes;
    for (int i = 0; i < indices->ndim; i++) index_stride *= indices->shape[i];
    for (int i = 0; i < out->ndim; i++) {
        if (indices->shape[i] > 0) index_stride /= indices->shape[i];
        int64_t index = indices->shape[i] == 1 ? 0 : index_stride;
        if (i == call->axis) {
            gather->axis_before = gather->ndim;
            add_axis(gather, x->shape[i], x->strides[i]);
            add_loop(gather, out->shape[i], out->strides[i], 0, index);
        } else {
            int64_t stride = x->shape[i] == 1 ? 0 : x->strides[i];
            add_loop(gather, out->shape[i], out->strides[i], stride, index);
        }
    }
    end_loops(gather);
}

static Status fail_memory(int64_t bytes, const char *what)
{
    return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for %s", (long long)bytes,
                what);
}

/* How long a row under one index may become when the loops behind the indices are merged. */
static int64_t longest_row(const Gather &gather)
{
    int64_t bytes = gather.row_bytes;
    for (int i = gather.ndim - 1; i >= 0 && gather.loops[i].index == 0; i--)
        bytes *= gather.loops[i].count;
    return bytes;
}

static char *repeat_fill(const Call *call, int64_t bytes)
{
    const int64_t item_bytes = call->inputs[0].item_bytes;
    char *fill = static_cast<char *>(malloc((size_t)bytes));
    for (int64_t at = 0; fill != NULL && at < bytes; at += item_bytes)
        memcpy(fill + at, call->fill, (size_t)item_bytes);
    return fill;
}

#ifdef __CUDACC__

/* The kernels take indices without gaps, and an axis with one stride; other operands are packed, as
 * are indices from the host. Of a table on the host where nothing is taken, nothing goes up. */
static Status run_on_device(Call *call, void (*describe)(const Call *, Gather *), Gather *gather,
                            int64_t index_count)
{
    View x, indices;
    view_copy(&x, &call->inputs[0]);
    view_copy(&indices, &call->inputs[1]);
    if (x.device == DEVICE_CPU && view_items(&call->out) > 0 && x.item_bytes > 0 &&
        gather->axis_size > 0)
        return gather_host_table(call, *gather, index_count);
    Memory *packed[2] = {};
    Status status = STATUS_OK;
    if (gather->axis_ndim > 1 && x.device != DEVICE_CPU) {
        status = pack_on_device(&x, call->stream, &call->inputs[0]);
        if (status == STATUS_OK) packed[0] = call->inputs[0].memory;
    }
    const bool is_usable = indices.device != DEVICE_CPU && view_is_packed(&indices);
    if (status == STATUS_OK && index_count > 0 && !is_usable) {
        status = pack_on_device(&indices, call->stream, &call->inputs[1], call->watch);
        if (status == STATUS_OK) packed[1] = call->inputs[1].memory;
    }
    if (packed[0] != NULL || packed[1] != NULL) describe(call, gather);
    if (status == STATUS_OK) status = gather_between_device_arrays(call, *gather, index_count);
    for (Memory *memory : packed)
        if (memory != NULL) memory_release(memory);
    view_copy(&call->inputs[0], &x);
    view_copy(&call->inputs[1], &indices);
    return status;
}

#else

static Status run_on_device(Call *, void (*)(const Call *, Gather *), Gather *, int64_t)
{
    int count;
    return cuda_device_count(&count);
}

#endif

static Status run(Call *call, void (*describe)(const Call *, Gather *))
{
    Gather gather;
    describe(call, &gather);
    const View *indices = &call->inputs[1];
    const int64_t index_count = view_items(indices);
    if (call->out.device != DEVICE_CPU) return run_on_device(call, describe, &gather, index_count);

    Status status = STATUS_OK;
    char *packed = NULL, *fill = NULL;
    if (index_count > 0 && !view_is_packed(indices)) {
        packed = pack_indices(indices, index_count);
        gather.indices = packed;
        if (packed == NULL) status = fail_memory(index_count * gather.index_bytes, "indices");
    }
    if (gather.mode == MODE_FILL && longest_row(gather) > 0 && status == STATUS_OK) {
        gather.fill_bytes = longest_row(gather);
        fill = repeat_fill(call, gather.fill_bytes);
        gather.fill = fill;
        if (fill == NULL) status = fail_memory(gather.fill_bytes, "a row of fill_value");
    }
    if (status == STATUS_OK)
        status = call->device == DEVICE_CPU ? gather_on_cpu(call, gather, index_count)
                                            : gather_on_cuda(call, gather, index_count);
    free(packed);
    free(fill);
    return status;
}

Status run_gather(Call *call)
{
    return run(call, describe_gather);
}

Status run_take(Call *call)
{
    return run_gather(call);
}

Status run_take_along_axis(Call *call)
{
    /* NumPy does not look at indices that were broadcast away. */
    for (int i = 0; i < call->out.ndim; i++)
        if (call->out.shape[i] == 0) return STATUS_OK;
    return run(call, describe_along_axis);
}
