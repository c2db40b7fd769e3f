/* One call of one operator on a GPU: its arrays are brought there if they are not, in the dtype
 * that it computes in, and its work is queued in the order of its stream. */
#include "slab.cuh"
#include "transfer.cuh"

#include <stdlib.h>

static bool is_to_be_cast(const Call *call, const View *input, int i)
{
    return call->cast_inputs >> i & 1 && input->dtype != call->compute;
}

#ifdef __CUDACC__

Status open_report(const Call *call, int64_t axis_size, IndexReport *report)
{
    int slot = call->slot;
    Status status = slot < 0 ? slot_of(call->stream, &slot) : STATUS_OK;
    if (status != STATUS_OK) return status;
    return report_open(call->stream, slot, call->op->name, call->axis, axis_size, report);
}

Status await_named_stream(const Call *call)
{
    return call->stream == NULL ? STATUS_OK : stream_await(call->stream, call->watch);
}

static bool is_for_host(const Call *call, int i)
{
    return call->host_inputs >> i & 1 || (call->elementwise && view_items(&call->inputs[i]) == 1);
}

static bool stays_on_host(const Call *call, int i)
{
    const View *input = &call->inputs[i];
    return input->device == DEVICE_CPU && !is_to_be_cast(call, input, i) && is_for_host(call, i);
}

/* Fresh memory for the elements of a view in the dtype that is computed in. */
static Status new_computed(const Call *call, const View *like, View *view)
{
    View computed;
    view_copy(&computed, like);
    computed.dtype = call->compute;
    computed.dtype_name = dtype_name(call->compute);
    computed.item_bytes = dtype_bytes(call->compute);
    return new_view(&computed, call->stream, view);
}

/* What repeats is not sent up again and again: it is broadcast there as well. */
static void leave_out_repeats(const Call *call, View *input)
{
    for (int k = 0; call->elementwise && k < input->ndim; k++)
        if (input->strides[k] == 0) input->shape[k] = 1;
}

/* What is on the host is sent up as it is, which is never more. */
static Status convert_input(const Call *call, const View *given, View *input)
{
    View sent;
    view_copy(&sent, given);
    Memory *copy = NULL;
    Status status = STATUS_OK;
    if (given->device == DEVICE_CPU) {
        status = pack_on_device(given, call->stream, &sent, call->watch);
        if (status != STATUS_OK) return status;
        copy = sent.memory;
    }
    status = new_computed(call, &sent, input);
    if (status == STATUS_OK) {
        status = convert_on_device(input, &sent, call->stream);
        if (status != STATUS_OK) memory_release(input->memory);
    }
    if (copy != NULL) memory_release(copy);
    return status;
}

/* What an input is while the operator runs: itself, or a copy of ours. */
struct Brought {
    View given;
    Memory *copy; /* NULL where there is none */
    bool read;    /* the given one is on the device, and was waited for */
};

static Status bring_input(Call *call, int i, Brought *brought)
{
    View *input = &call->inputs[i];
    view_copy(&brought->given, input);
    brought->copy = NULL;
    brought->read = false;
    if (stays_on_host(call, i)) return STATUS_OK;
    if (input->device == DEVICE_CPU) leave_out_repeats(call, &brought->given);
    Status status = STATUS_OK;
    if (input->device != DEVICE_CPU) {
        status = begin_reading(input, call->stream);
        if (status != STATUS_OK) return status;
        brought->read = true;
    }
    const bool casts = is_to_be_cast(call, input, i);
    const bool is_changed = call->in_place && views_overlap(&call->out, input);
    if (casts)
        status = convert_input(call, &brought->given, input);
    else if (input->device == DEVICE_CPU || is_changed)
        status = pack_on_device(&brought->given, call->stream, input, call->watch);
    else
        return STATUS_OK;
    if (status == STATUS_OK) brought->copy = input->memory;
    return status;
}

/* Arithmetic writes whole numbers, at multiples of their size. */
static bool is_misaligned(const Call *call)
{
    const uintptr_t place = reinterpret_cast<uintptr_t>(call->out.data);
    return call->compute != DTYPE_OPAQUE && place % (size_t)dtype_bytes(call->out.dtype) != 0;
}

/* Operands that overlap act as if they had been copied first; and kernels write in C order, unless
 * they say otherwise. */
static bool needs_fresh_output(const Call *call)
{
    if (call->in_place) return false;
    if (!call->elementwise && is_misaligned(call)) return true;
    if (call->elementwise ? call->out.dtype != call->compute : !view_is_packed(&call->out))
        return true;
    for (int i = 0; i < call->input_count; i++)
        if (views_overlap(&call->out, &call->inputs[i]) &&
            !(call->elementwise && views_coincide(&call->out, &call->inputs[i])))
            return true;
    return false;
}

static Status run_in_order(Call *call)
{
    Brought brought[GPUOPS_MAX_INPUTS];
    View out;
    view_copy(&out, &call->out);
    Memory *fresh = NULL;
    Stream *stream = call->stream;
    const bool is_fresh = needs_fresh_output(call);
    Status status = begin_writing(&out, stream);
    int ready = 0;
    while (ready < call->input_count && status == STATUS_OK) {
        status = bring_input(call, ready, &brought[ready]);
        ready++;
    }
    if (status == STATUS_OK && is_fresh) {
        status = call->elementwise ? new_computed(call, &out, &call->out)
                                   : new_view(&out, stream, &call->out);
        if (status == STATUS_OK) fresh = call->out.memory;
    }
    if (status == STATUS_OK) status = call->op->run(call);
    if (status == STATUS_OK && launches_block() && call->slot < 0 && !stream_is_capturing(stream)) {
        status = stream_await(stream, call->watch);
        if (status == STATUS_OK) status = slot_check(stream, stream->slot, false);
    }
    if (status == STATUS_OK && fresh != NULL)
        status = call->elementwise ? convert_on_device(&out, &call->out, stream)
                                   : copy_on_device(&out, &call->out, stream);

    if (runtime_is_forked()) return status;
    /* What was queued before a failure is ordered all the same. */
    status = even_so(status, [&] { return end_writing(&out, stream); });
    for (int i = 0; i < ready; i++) {
        if (brought[i].copy != NULL) memory_release(brought[i].copy);
        if (brought[i].read)
            status = even_so(status, [&] { return end_reading(&brought[i].given, stream); });
    }
    if (fresh != NULL) memory_release(fresh);
    view_copy(&call->out, &out);
    return status;
}

/* Between arrays on the host: the operator runs as it does between arrays on the device, and the
 * result comes back once no kernel has found a bad index. The call's operands become those on the
 * device. *has_room becomes false where memory does not suffice for that, and nothing has come
 * back. */
static Status run_through_device(Call *call, const View *out, bool *has_room)
{
    Status status = call->in_place ? pack_on_device(out, call->stream, &call->out)
                                   : new_view(out, call->stream, &call->out);
    *has_room = status != STATUS_MEMORY_ERROR;
    if (status != STATUS_OK) return status;
    call->slot = slot_take(call->device);
    status = run_in_order(call);
    if (runtime_is_forked()) return status;
    /* Whatever happened, nothing may still be at work on the caller's memory. */
    status = even_so(status, [&] { return stream_drain(call->stream->handle); });
    if (status == STATUS_OK) status = slot_check(call->stream, call->slot, false);
    slot_give(call->device, call->slot, status != STATUS_OK);
    call->slot = -1;
    *has_room = status != STATUS_MEMORY_ERROR;
    if (status == STATUS_OK) status = copy_view(out, &call->out, call->stream, NULL);
    memory_release(call->out.memory);
    return status;
}

/* How much of a slab the operands of a call take; 0: it is not for one. In place the kernels would
 * need atomic operations on memory of the host. Whoever chooses where to work asks before operands
 * are cast on the host. */
static int64_t bytes_in_slab(const Call *call)
{
    if (call->in_place || (call->elementwise && call->out.dtype != call->compute)) return 0;
    int64_t bytes = slab_room(view_items(&call->out) * call->out.item_bytes);
    for (int i = 0; i < call->input_count; i++) {
        View input;
        view_copy(&input, &call->inputs[i]);
        const bool casts = is_to_be_cast(call, &input, i);
        if (input.device != DEVICE_CPU || (casts && input_is_cast_at_work(call, i))) return 0;
        if (is_for_host(call, i)) continue;
        leave_out_repeats(call, &input);
        const int64_t item_bytes = casts ? dtype_bytes(call->compute) : input.item_bytes;
        bytes += slab_room(view_items(&input) * item_bytes);
    }
    return bytes;
}

/* What takes its tables there itself uses a slab for these too (gather_cuda.cu). */
bool call_suits_slab(const Call *call)
{
    int64_t bytes = bytes_in_slab(call);
    if (bytes == 0) return false;
    for (int i = 0; call->own_transfer && i < call->input_count; i++)
        if (stays_on_host(call, i))
            bytes += slab_room(view_items(&call->inputs[i]) * call->inputs[i].item_bytes);
    return slab_has_room(bytes);
}

/* Puts a packed view in the place of an array on the host; what comes behind it is returned. */
static char *lay_out(char *place, const Call *call, View *view)
{
    view->data = place;
    view->device = call->device;
    view->stream = call->stream;
    view_pack(view);
    return place + slab_room(view_items(view) * view->item_bytes);
}

static Status run_in_slab(Call *call, const View *out, Slab *slab)
{
    char *place = lay_out(slab->data, call, &call->out);
    for (int i = 0; i < call->input_count; i++) {
        View *input = &call->inputs[i];
        if (stays_on_host(call, i)) continue;
        leave_out_repeats(call, input);
        const Box given = box_of(input);
        box_pack(given, place);
        place = lay_out(place, call, input);
    }
    Status status = call->op->run(call), last;
    status = even_so(status, [&] { return last = stream_drain(call->stream->handle); });
    /* As whenever somebody waits: a bad index of an earlier call is told of now. */
    if (status == STATUS_OK) status = slot_check(call->stream, call->stream->slot, true);
    if (status == STATUS_OK) box_unpack(box_of(out), static_cast<char *>(call->out.data));
    slab_give(slab, call->stream, last == STATUS_OK);
    memory_settle();
    return status;
}

/* As a whole: through a slab, or memory of the device. Whatever happens, the call's operands are
 * those on the host again. */
static Status run_at_once(Call *call, bool *has_room)
{
    View inputs[GPUOPS_MAX_INPUTS], out;
    Slab *slab;
    *has_room = true;
    Status status = slab_take(call->device, bytes_in_slab(call), &slab);
    if (status != STATUS_OK) return status;
    for (int i = 0; i < call->input_count; i++) view_copy(&inputs[i], &call->inputs[i]);
    view_copy(&out, &call->out);
    status =
        slab != NULL ? run_in_slab(call, &out, slab) : run_through_device(call, &out, has_room);
    for (int i = 0; i < call->input_count; i++) view_copy(&call->inputs[i], &inputs[i]);
    view_copy(&call->out, &out);
    return status;
}

static Status run_between_host_arrays(Call *call)
{
    bool done = false, has_room;
    Status status = STATUS_OK;
    if (call->run_in_parts != NULL) status = call->run_in_parts(call, false, &done);
    if (status != STATUS_OK || done) return status;
    status = run_at_once(call, &has_room);
    if (has_room || call->run_in_parts == NULL) return status;
    const Status in_parts = call->run_in_parts(call, true, &done);
    return done ? in_parts : status;
}

/* Between arrays on the host: a wait for the stream, even one after a failure, would spoil it. */
static Status check_capture(const Call *call)
{
    const bool is_captured = call->stream != NULL && stream_is_capturing(call->stream);
    return is_captured ? refuse_host_in_capture() : STATUS_OK;
}

static Status run_on_device(Call *call)
{
    int previous;
    Status status = device_enter(call->device, &previous);
    if (status != STATUS_OK) return status;
    const bool on_host = call->out.device == DEVICE_CPU;
    if (on_host) status = await_named_stream(call);
    if (call->stream == NULL) {
        call->stream = legacy_stream(call->device);
        /* What is not for a slab waits for that as well, but so that nobody could call it back. */
        if (on_host && call->watch != NULL && !call_suits_slab(call))
            status = stream_await(call->stream, call->watch);
    }
    if (status == STATUS_OK) status = on_host ? run_between_host_arrays(call) : run_in_order(call);
    device_leave(call->device, previous);
    return status;
}

#else

bool call_suits_slab(const Call *)
{
    return false;
}

static Status check_capture(const Call *)
{
    return STATUS_OK;
}

static Status run_on_device(Call *)
{
    int count;
    return cuda_device_count(&count);
}

#endif

static Status run_with_copies(Call *call)
{
    View given[GPUOPS_MAX_INPUTS];
    void *copies[GPUOPS_MAX_INPUTS] = {};
    Status status = STATUS_OK;
    for (int i = 0; i < call->input_count && status == STATUS_OK; i++) {
        View *input = &call->inputs[i];
        if (!is_to_be_cast(call, input, i)) continue;
        View cast;
        view_copy(&cast, input);
        cast.dtype = call->compute;
        cast.dtype_name = dtype_name(call->compute);
        cast.item_bytes = dtype_bytes(call->compute);
        view_pack(&cast);
        const int64_t bytes = view_items(&cast) * cast.item_bytes;
        if (bytes == 0) continue;
        copies[i] = cast.data = malloc((size_t)bytes);
        if (cast.data == NULL)
            status = fail(STATUS_MEMORY_ERROR, "out of host memory for %lld bytes of %s",
                          (long long)bytes, cast.dtype_name);
        if (status != STATUS_OK) break;
        cast_on_cpu(&cast, input);
        view_copy(&given[i], input);
        view_copy(input, &cast);
    }
    if (status == STATUS_OK) status = call->op->run(call);
    for (int i = 0; i < call->input_count; i++) {
        if (copies[i] != NULL) view_copy(&call->inputs[i], &given[i]);
        free(copies[i]);
    }
    return status;
}

/* Element-wise loops convert what they read; for others there are copies. */
static Status run_on_cpu(Call *call)
{
    bool casts = false;
    for (int i = 0; i < call->input_count && !call->elementwise; i++)
        casts |= is_to_be_cast(call, &call->inputs[i], i);
    return casts ? run_with_copies(call) : call->op->run(call);
}

Status run_call(Call *call)
{
    if (call->elementwise && view_items(&call->out) == 0) return STATUS_OK;
    const bool on_host = call->out.device == DEVICE_CPU;
    if (on_host && call->device == DEVICE_CPU) return run_on_cpu(call);
    if (on_host) {
        Status status = check_capture(call);
        if (status != STATUS_OK) return status;
    }
    return on_host && call->own_transfer ? call->op->run(call) : run_on_device(call);
}
