/* What element-wise operators have in common beside their functions. */
#include "each.cuh"

#include <stdio.h>
#include <stdlib.h>

static Status fail_shapes(const Call *call)
{
    char text[512] = "";
    size_t used = 0;
    for (int k = 0; k < call->input_count; k++) {
        const View *input = &call->inputs[k];
        for (int i = 0; i < input->ndim && used < sizeof text - 32; i++)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%lld", i == 0 ? " (" : ",",
                                     (long long)input->shape[i]);
        if (used < sizeof text - 32)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s",
                                     input->ndim == 0   ? " ()"
                                     : input->ndim == 1 ? ",)"
                                                        : ")");
    }
    return fail(STATUS_VALUE_ERROR, "operands could not be broadcast together with shapes%s", text);
}

static Status plan_shape(Call *call)
{
    View *out = &call->out;
    out->ndim = 0;
    for (int k = 0; k < call->input_count; k++)
        if (call->inputs[k].ndim > out->ndim) out->ndim = call->inputs[k].ndim;
    int64_t items = 1;
    bool is_empty = false, too_large = false;
    for (int i = 0; i < out->ndim; i++) {
        int64_t count = 1;
        for (int k = 0; k < call->input_count; k++) {
            const View *input = &call->inputs[k];
            const int axis = i - (out->ndim - input->ndim);
            if (axis < 0 || input->shape[axis] == 1) continue;
            if (count != 1 && count != input->shape[axis]) return fail_shapes(call);
            count = input->shape[axis];
        }
        out->shape[i] = count;
        is_empty |= count == 0;
        too_large |= count != 0 && __builtin_mul_overflow(items, count, &items);
    }
    too_large |= (bool)__builtin_mul_overflow(items, dtype_bytes(call->compute), &items);
    if (too_large && !is_empty)
        return fail(STATUS_VALUE_ERROR,
                    "array is too big: the operands of %s broadcast to more than 2**63 bytes",
                    call->op->name);
    return STATUS_OK;
}

Status plan_each(Call *call, Dtype compute)
{
    call->compute = compute;
    call->elementwise = true;
#ifdef __CUDACC__
    call->run_in_parts = run_each_in_parts;
#endif
    call->cast_inputs = (1u << call->input_count) - 1;
    call->out.dtype = compute;
    call->out.dtype_name = dtype_name(compute);
    call->out.item_bytes = dtype_bytes(compute);
    return plan_shape(call);
}

Status fail_dtype(const Call *call, const char *expected)
{
    for (int k = 0; k < call->input_count; k++)
        if (call->inputs[k].dtype == DTYPE_OPAQUE)
            return fail(STATUS_TYPE_ERROR, "%s takes %s, and no %s: convert it with .astype(...)",
                        call->op->name, expected, call->inputs[k].dtype_name);
    return fail(STATUS_TYPE_ERROR, "%s takes %s, and no %s: convert it with .astype(...)",
                call->op->name, expected,
                dtype_name(result_dtype(call->inputs, call->input_count)));
}

void each_loops(const Call *call, EachLoops *loops)
{
    const View *out = &call->out;
    const int last = call->input_count;
    loops->operands = last + 1;
    for (int k = 0; k < last; k++) loops->data[k] = static_cast<char *>(call->inputs[k].data);
    loops->data[last] = static_cast<char *>(out->data);

    /* Outermost where the output takes the longest steps. */
    int order[GPUOPS_MAX_DIMS];
    const int ndim = view_axes(out, order);
    loops->ndim = 0;
    for (int i = 0; i < ndim; i++) {
        const int64_t count = out->shape[order[i]];
        int64_t strides[GPUOPS_MAX_INPUTS + 1];
        bool follows = loops->ndim > 0;
        for (int k = 0; k <= last; k++) {
            const View *operand = k < last ? &call->inputs[k] : out;
            const int axis = order[i] - (out->ndim - operand->ndim);
            strides[k] = axis < 0 || operand->shape[axis] == 1 ? 0 : operand->strides[axis];
            if (follows) follows = loops->strides[k][loops->ndim - 1] == count * strides[k];
        }
        if (follows)
            loops->counts[loops->ndim - 1] *= count;
        else
            loops->counts[loops->ndim++] = count;
        for (int k = 0; k <= last; k++) loops->strides[k][loops->ndim - 1] = strides[k];
    }
    if (loops->ndim == 0) {
        loops->ndim = 1;
        loops->counts[0] = 1;
        /* On the CPU a single element counts as one that follows others, which needs no buffer. */
        for (int k = 0; k < last; k++)
            loops->strides[k][0] = out->device == DEVICE_CPU ? call->inputs[k].item_bytes : 0;
        loops->strides[last][0] = out->item_bytes;
    }
}

void each_casts(const Call *call, EachLoops *loops)
{
    for (int k = 0; k < call->input_count; k++)
        loops->casts[k] = each_cast(call->inputs[k].dtype, call->compute);
}

#ifdef __CUDACC__

bool each_has_words(const EachLoops &loops, int64_t item_bytes)
{
    constexpr uint64_t WORD = 16;
    const int last = loops.operands - 1, inner = loops.ndim - 1;
    uint64_t bits = 0;
    int64_t rows = 1;
    for (int i = 0; i < inner; i++) rows *= loops.counts[i];
    for (int k = 0; k <= last; k++) {
        if (k < last && loops.strides[k][inner] == 0) continue;
        if (loops.strides[k][inner] != item_bytes) return false;
        bits |= reinterpret_cast<uintptr_t>(loops.data[k]);
        for (int i = 0; i < inner; i++) bits |= (uint64_t)loops.strides[k][i];
    }
    const int64_t row_bytes = loops.counts[inner] * item_bytes;
    if (rows > 1) {
        bits |= (uint64_t)row_bytes;
        if (rows > UINT32_MAX / (row_bytes / (int64_t)WORD + 1)) return false;
    }
    return loops.ndim <= EACH_PACKED_DIMS && bits % WORD == 0;
}

static bool is_aligned(const View *view)
{
    uint64_t bits = reinterpret_cast<uintptr_t>(view->data);
    for (int i = 0; i < view->ndim; i++)
        if (view->shape[i] > 1) bits |= (uint64_t)view->strides[i];
    return bits % (uint64_t)view->item_bytes == 0;
}

Status each_begin(Call *call, EachOperands *operands)
{
    Status status = STATUS_OK;
    operands->fresh = NULL;
    for (int k = 0; k < call->input_count; k++) {
        View *input = &call->inputs[k];
        operands->packed[k] = NULL;
        view_copy(&operands->given[k], input);
        if (status != STATUS_OK || input->device == DEVICE_CPU || is_aligned(input)) continue;
        status = pack_on_device(&operands->given[k], call->stream, input);
        if (status == STATUS_OK) operands->packed[k] = input->memory;
    }
    view_copy(&operands->out, &call->out);
    if (status != STATUS_OK || is_aligned(&call->out)) return status;
    status = new_view(&operands->out, call->stream, &call->out);
    if (status == STATUS_OK) operands->fresh = call->out.memory;
    return status;
}

Status each_end(Call *call, EachOperands *operands, Status status)
{
    if (status == STATUS_OK && operands->fresh != NULL)
        status = copy_on_device(&operands->out, &call->out, call->stream);
    if (operands->fresh != NULL) memory_release(operands->fresh);
    view_copy(&call->out, &operands->out);
    for (int k = 0; k < call->input_count; k++) {
        if (operands->packed[k] != NULL) memory_release(operands->packed[k]);
        view_copy(&call->inputs[k], &operands->given[k]);
    }
    return status;
}

#endif
