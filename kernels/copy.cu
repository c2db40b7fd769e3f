/* Copies between arrays on devices, of any strides, and between them and the host.
 *
 * What crosses the bus is contiguous: a strided array on a device is packed there first, by the one
 * kernel of this file, and a strided array on the host by transfer.cu, in the order in which it
 * lies. What is to lie in another order is turned on the device. */
#include "common.cuh"
#include "slab.cuh"
#include "transfer.cuh"

#include <string.h>

#ifdef __CUDACC__

/* Order between streams. */

Status begin_reading(const View *view, Stream *stream)
{
    return stream_wait(stream, view->stream);
}

Status begin_writing(const View *view, Stream *stream)
{
    Status status = begin_reading(view, stream);
    if (status == STATUS_OK && view->memory != NULL)
        status = memory_await_uses(view->memory, stream);
    return status;
}

/* What is queued cannot be called back: who cannot be made to wait for it finds it done. */
static Status make_wait(Stream *waiting, Stream *awaited)
{
    Status status = stream_wait(waiting, awaited);
    if (status == STATUS_OK) return status;
    return even_so(status, [&] { return stream_drain(awaited->handle); });
}

/* Our own memory waits for its uses when it is written or freed. Of another library's, nobody knows
 * in which order it is freed, whatever its stream; and what is queued there next may write to it.
 */
Status end_reading(const View *view, Stream *stream)
{
    const bool is_ours = view->memory != NULL && !memory_is_foreign(view->memory);
    Status status = STATUS_OK;
    if (!is_ours) status = make_wait(view->stream, stream);
    if (view->memory == NULL || (is_ours && in_same_order(view->stream, stream))) return status;
    return even_so(status, [&] { return memory_note_use(view->memory, stream); });
}

Status end_writing(const View *view, Stream *stream)
{
    Status status = make_wait(view->stream, stream);
    if (status == STATUS_OK && view->memory != NULL && memory_is_foreign(view->memory))
        status = memory_note_use(view->memory, stream);
    return status;
}

/* The kernels. */

constexpr int THREADS = 256, ITEMS_IN_FLIGHT = 4;

struct CopyLoop {
    Divider count;
    int64_t size, target, source; /* strides in bytes */
};

constexpr int MOST_ITEM_BYTES = 16;

/* Item by item in C order of the target; Word is as wide as an item's pieces may be. Without a
 * source, the item that goes with the arguments stands in every place. */
template <class Word>
struct CopyItems {
    static constexpr int MAX_THREADS = THREADS;

    char *target;
    const char *source;
    alignas(16) char item[MOST_ITEM_BYTES];
    int64_t items;
    int ndim;
    CopyLoop loops[GPUOPS_MAX_DIMS];

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t step = (int64_t)thread.threads * ITEMS_IN_FLIGHT;
        for (int64_t first = thread.block * step + thread.thread; first < items;
             first += thread.blocks * step) {
            Word loaded[ITEMS_IN_FLIGHT];
            int64_t places[ITEMS_IN_FLIGHT];
            UNROLL
            for (int k = 0; k < ITEMS_IN_FLIGHT; k++) {
                const int64_t number = first + k * (int64_t)thread.threads;
                int64_t from = 0;
                places[k] = 0;
                if (number >= items) continue;
                if (items <= UINT32_MAX)
                    decode(static_cast<uint32_t>(number), &places[k], &from);
                else
                    decode(static_cast<uint64_t>(number), &places[k], &from);
                loaded[k] =
                    *reinterpret_cast<const Word *>((source != NULL ? source : item) + from);
            }
            /* Where elements of the target share memory, a fill writes the same to it. */
            UNROLL
            for (int k = 0; k < ITEMS_IN_FLIGHT; k++)
                if (first + k * (int64_t)thread.threads < items)
                    store_same(reinterpret_cast<Word *>(target + places[k]), loaded[k]);
        }
    }

    HOST_DEVICE void decode(uint32_t number, int64_t *to, int64_t *from) const
    {
        for (int i = ndim - 1; i >= 0; i--) {
            const uint32_t rest = loops[i].count.divide(number);
            const int64_t position = number - rest * loops[i].count.divisor;
            *to += position * loops[i].target;
            *from += position * loops[i].source;
            number = rest;
        }
    }

    HOST_DEVICE void decode(uint64_t number, int64_t *to, int64_t *from) const
    {
        for (int i = ndim - 1; i >= 0; i--) {
            const uint64_t rest = number / loops[i].size;
            const int64_t position = static_cast<int64_t>(number - rest * loops[i].size);
            *to += position * loops[i].target;
            *from += position * loops[i].source;
            number = rest;
        }
    }
};

struct Pair {
    char *target;
    const char *source;
    int ndim;
    int64_t item_bytes;
    int64_t counts[GPUOPS_MAX_DIMS + 1], targets[GPUOPS_MAX_DIMS + 1], sources[GPUOPS_MAX_DIMS + 1];
};

/* The loops over both arrays, those with the longest steps in the target outermost, and as few as
 * possible; a tail that is contiguous in both becomes part of the item. */
static Pair pair_of(const View *target, const View *source)
{
    Pair pair = {static_cast<char *>(target->data),
                 static_cast<const char *>(source->data),
                 0,
                 target->item_bytes,
                 {},
                 {},
                 {}};
    int order[GPUOPS_MAX_DIMS];
    const int ndim = view_axes(target, order);
    for (int i = 0; i < ndim; i++) {
        const int64_t count = target->shape[order[i]];
        const int64_t to = target->strides[order[i]], from = source->strides[order[i]];
        const int last = pair.ndim - 1;
        if (last >= 0 && pair.targets[last] == count * to && pair.sources[last] == count * from) {
            pair.counts[last] *= count;
            pair.targets[last] = to;
            pair.sources[last] = from;
        } else {
            pair.counts[pair.ndim] = count;
            pair.targets[pair.ndim] = to;
            pair.sources[pair.ndim++] = from;
        }
    }
    const int last = pair.ndim - 1;
    if (last >= 0 && pair.targets[last] == pair.item_bytes &&
        pair.sources[last] == pair.item_bytes) {
        pair.item_bytes *= pair.counts[last];
        pair.ndim--;
    }
    return pair;
}

template <class Word>
static Status launch_copy(const Pair &pair, const void *item, int64_t item_bytes, void *stream)
{
    CopyItems<Word> body = {};
    body.target = pair.target;
    body.source = pair.source;
    if (item != NULL) memcpy(body.item, item, (size_t)item_bytes);
    body.items = 1;
    body.ndim = pair.ndim;
    for (int i = 0; i < pair.ndim; i++) {
        const int64_t count = pair.counts[i];
        const uint32_t divisor = count <= UINT32_MAX ? (uint32_t)count : 1;
        body.loops[i] = {divider_of(divisor), count, pair.targets[i], pair.sources[i]};
        body.items *= count;
    }
    constexpr int64_t MOST_BLOCKS = 1 << 20;
    int64_t blocks = (body.items + THREADS * ITEMS_IN_FLIGHT - 1) / (THREADS * ITEMS_IN_FLIGHT);
    if (blocks > MOST_BLOCKS) blocks = MOST_BLOCKS;
    return launch(body, Grid{(unsigned)blocks, THREADS}, stream);
}

/* Items become one more loop over words, as wide as all addresses allow. */
static Status copy_pair(Pair pair, const void *item, void *stream)
{
    const int64_t item_bytes = pair.item_bytes;
    uint64_t bits = reinterpret_cast<uintptr_t>(pair.target) |
                    reinterpret_cast<uintptr_t>(pair.source) | (uint64_t)pair.item_bytes | 16;
    for (int i = 0; i < pair.ndim; i++)
        bits |= (uint64_t)pair.targets[i] | (uint64_t)pair.sources[i];
    const int64_t word = (int64_t)(bits & -bits);
    if (word < pair.item_bytes) {
        pair.counts[pair.ndim] = pair.item_bytes / word;
        pair.targets[pair.ndim] = pair.sources[pair.ndim] = word;
        pair.ndim++;
    }
    if (pair.ndim > GPUOPS_MAX_DIMS)
        return fail(STATUS_VALUE_ERROR,
                    "an array of %d strided dimensions cannot be copied on a "
                    "device: make it contiguous first",
                    GPUOPS_MAX_DIMS);
    switch (word) {
    case 1:
        return launch_copy<uint8_t>(pair, item, item_bytes, stream);
    case 2:
        return launch_copy<uint16_t>(pair, item, item_bytes, stream);
    case 4:
        return launch_copy<uint32_t>(pair, item, item_bytes, stream);
    case 8:
        return launch_copy<uint2>(pair, item, item_bytes, stream);
    default:
        return launch_copy<uint4>(pair, item, item_bytes, stream);
    }
}

Status copy_on_device(const View *target, const View *source, Stream *stream)
{
    if (view_items(target) == 0 || target->item_bytes == 0) return STATUS_OK;
    const Pair pair = pair_of(target, source);
    if (pair.ndim == 0)
        return copy_within_device(pair.target, pair.source, pair.item_bytes, stream->handle);
    return copy_pair(pair, NULL, stream->handle);
}

/* Views. */

static int64_t view_bytes(const View *view)
{
    return view_items(view) * view->item_bytes;
}

Status new_view(const View *like, Stream *stream, View *view)
{
    view_copy(view, like);
    view->device = stream->device;
    view->stream = stream;
    view_pack(view);
    Status status = memory_allocate(stream, view_bytes(like), &view->memory);
    if (status == STATUS_OK) view->data = memory_data(view->memory);
    return status;
}

/* With its axes in the order in which the one on the host lies. */
static void turn_as(const View *host, const View *view, View *turned)
{
    int axes[GPUOPS_MAX_DIMS];
    const int count = view_axes(host, axes);
    view_copy(turned, view);
    view_turn(turned, view->ndim, axes, count);
}

/* A kernel's first launch may take memory as well. */
static bool lacks_memory(Status status)
{
    return status == STATUS_MEMORY_ERROR ||
           (status == STATUS_DEVICE_ERROR &&
            last_failure()->cuda_code == cudaErrorMemoryAllocation);
}

static Status send_up(const Box &box, int64_t begin, int64_t end, void *device, Stream *stream,
                      Traffic *traffic, Watch *watch)
{
    return traffic != NULL ? traffic_up(traffic, box, device, stream->handle)
                           : box_upload(box, begin, end, device, stream, watch);
}

static Status send_up_and_turn(const Box &box, void *device, Stream *stream, Traffic *traffic,
                               bool *has_room, Watch *watch)
{
    View source = {}, target, lying, placed, there;
    source.data = box.base;
    source.item_bytes = box.item_bytes;
    source.ndim = box.ndim;
    memcpy(source.shape, box.counts, sizeof box.counts);
    memcpy(source.strides, box.strides, sizeof box.strides);
    view_copy(&target, &source);
    target.data = device;
    view_pack(&target);
    turn_as(&source, &source, &lying);
    turn_as(&source, &target, &placed);
    Status status = new_view(&lying, stream, &there);
    *has_room = !lacks_memory(status);
    if (status == STATUS_OK)
        status = send_up(box_of(&lying), 0, box_items(box), there.data, stream, traffic, watch);
    if (status == STATUS_OK) {
        status = copy_on_device(&placed, &there, stream);
        *has_room = !lacks_memory(status);
    }
    if (there.memory != NULL) memory_release(there.memory);
    return status;
}

Status box_bring(const Box &box, int64_t begin, int64_t end, void *device, Stream *stream,
                 Traffic *traffic, bool *has_room, Watch *watch)
{
    const bool is_whole = begin == 0 && end == box_items(box);
    if (*has_room && is_whole && box_lies_across(box)) {
        const Status status = send_up_and_turn(box, device, stream, traffic, has_room, watch);
        if (*has_room) return status;
    }
    return send_up(box, begin, end, device, stream, traffic, watch);
}

/* A graph would read the memory of the host whenever it runs, and that may be gone by then. */
Status refuse_host_in_capture(void)
{
    return fail(STATUS_VALUE_ERROR,
                "the stream is being captured into a graph, and what is on the host cannot take "
                "part in that: bring it to the device first, with gpuops.to_device before the "
                "capture");
}

/* Whether a copy up ends after what is queued on the stream, as page-locked memory is at work until
 * then. Of short ones nobody asks: that would be a part of the time that they take. */
static bool ends_behind_others(const View *source, const PinnedUse &use)
{
    constexpr int64_t SHORT_BYTES = 64 << 10;
    return pinned_is_held(&use) ||
           (view_bytes(source) >= SHORT_BYTES && host_memory_is_pinned(source->data));
}

/* If the source is page-locked memory, a copy of it may still be on its way when the driver
 * returns, also where a later one has failed; of any other memory the driver has taken a copy by
 * then. */
static Status upload(const View *target, const View *source, Stream *stream, Watch *watch)
{
    if (stream_is_capturing(stream)) return refuse_host_in_capture();
    const Box box = box_of(source);
    PinnedUse use;
    pinned_hold(source, &use);
    bool has_room = true;
    Status status = STATUS_OK;
    /* Nobody could call it back until then; and what has gaps it is the CPU that packs, after what
     * the stream is still to write there. */
    const bool is_awaited = view_is_packed(source)
                                ? watch != NULL && ends_behind_others(source, use)
                                : pinned_is_held(&use) || host_memory_is_pinned(source->data);
    if (is_awaited) {
        status = stream_await(stream, watch);
        if (runtime_is_forked()) return status;
        if (status == STATUS_INTERRUPTED) {
            pinned_let_go(&use, stream->device, true);
            return status;
        }
        watch = NULL;
    }
    if (status == STATUS_OK)
        status = box_bring(box, 0, box_items(box), target->data, stream, NULL, &has_room, watch);
    if (runtime_is_forked()) return status;
    return even_so(status, [&] {
        Status last = STATUS_OK;
        if (pinned_is_held(&use) || host_memory_is_pinned(source->data))
            last = stream_drain(stream->handle);
        pinned_let_go(&use, stream->device, last == STATUS_OK);
        return last;
    });
}

static Status copy_between_devices(const View *target, const View *source, Stream *stream);

Status pack_on_device(const View *source, Stream *stream, View *packed, Watch *watch)
{
    if (source->device == DEVICE_CPU && stream_is_capturing(stream))
        return refuse_host_in_capture();
    Status status = new_view(source, stream, packed);
    if (status != STATUS_OK) return status;
    if (view_bytes(source) == 0)
        ;
    else if (source->device == DEVICE_CPU)
        status = upload(packed, source, stream, watch);
    else if (source->device == stream->device)
        status = copy_on_device(packed, source, stream);
    else
        status = copy_between_devices(packed, source, stream);
    if (status != STATUS_OK) {
        memory_release(packed->memory);
        packed->memory = NULL;
    }
    return status;
}

/* The target is packed, and on the stream's device. The source is packed on its own device, in the
 * order of that device's default stream. */
static Status copy_between_devices(const View *target, const View *source, Stream *stream)
{
    View packed;
    view_copy(&packed, source);
    Memory *memory = NULL;
    Status status = STATUS_OK;
    if (!view_is_packed(source)) {
        Stream *there = legacy_stream(source->device);
        int previous;
        status = device_enter(source->device, &previous);
        if (status != STATUS_OK) return status;
        status = begin_reading(source, there);
        if (status == STATUS_OK) status = pack_on_device(source, there, &packed);
        if (status == STATUS_OK) memory = packed.memory;
        if (status == STATUS_OK) status = end_reading(source, there);
        device_leave(source->device, previous);
        if (status == STATUS_OK) status = begin_reading(&packed, stream);
    }
    if (status == STATUS_OK)
        status = copy_across_devices(target->data, target->device, packed.data, packed.device,
                                     view_bytes(target), stream->handle);
    if (memory != NULL) {
        if (status == STATUS_OK) status = end_reading(&packed, stream);
        memory_release(memory);
    }
    return status;
}

static Status to_device(const View *target, const View *source, Stream *stream, Watch *watch)
{
    if (view_is_packed(target))
        return source->device == DEVICE_CPU ? upload(target, source, stream, watch)
                                            : copy_between_devices(target, source, stream);
    View packed;
    Status status = pack_on_device(source, stream, &packed, watch);
    if (status != STATUS_OK) return status;
    status = copy_on_device(target, &packed, stream);
    memory_release(packed.memory);
    return status;
}

/* A small copy goes to a slab, behind what is queued, and from there to the target: so it need not
 * wait for that before it is queued, as the driver's own way would have it, and can be given up.
 * *done: it went so, if not without an error. */
static Status to_host_by_slab(const View *target, const void *packed, Stream *stream, Watch *watch,
                              bool *done)
{
    const int64_t bytes = view_bytes(target);
    Slab *slab;
    Status status = slab_take(stream->device, bytes, &slab);
    *done = slab != NULL;
    if (slab == NULL) return status;
    status = copy_to_host(slab->data, packed, bytes, stream->handle);
    if (status == STATUS_OK) status = stream_await(stream, watch);
    if (status == STATUS_OK) box_unpack(box_of(target), slab->data);
    if (!runtime_is_forked()) slab_give(slab, stream, status == STATUS_OK);
    return status;
}

static Status to_host_by_driver(const View *target, void *packed, Stream *stream)
{
    PinnedUse use;
    pinned_hold(target, &use);
    const Status status = box_download(box_of(target), packed, stream->handle);
    /* Whatever happened, nothing may still be at work on the caller's memory. */
    return even_so(status, [&] {
        const Status last = stream_drain(stream->handle);
        pinned_let_go(&use, stream->device, last == STATUS_OK);
        return last;
    });
}

static Status to_host_as_it_is(const View *target, const View *source, Stream *stream, Watch *watch)
{
    View packed;
    view_copy(&packed, source);
    Memory *memory = NULL;
    Status status = STATUS_OK;
    const bool empty = view_bytes(target) == 0;
    bool done = false;
    if (!empty && !view_is_packed(source)) {
        status = pack_on_device(source, stream, &packed);
        memory = status == STATUS_OK ? packed.memory : NULL;
    }
    if (status == STATUS_OK && !empty)
        status = to_host_by_slab(target, packed.data, stream, watch, &done);
    /* The driver would wait in the middle of the copy, from which nobody could call it back. */
    if (status == STATUS_OK && !done && (empty || watch != NULL))
        status = stream_await(stream, watch);
    if (status == STATUS_OK && !done && !empty)
        status = to_host_by_driver(target, packed.data, stream);
    if (runtime_is_forked()) return status;
    if (memory != NULL) memory_release(memory);
    if (status == STATUS_OK) status = slot_check(stream, stream->slot, true);
    if (status == STATUS_OK && source->stream != stream)
        status = slot_check(source->stream, source->stream->slot, true);
    return status;
}

/* What is to lie across is put in that order on the device, if there is memory for it. */
static Status to_host(const View *target, const View *source, Stream *stream, Watch *watch)
{
    if (box_lies_across(box_of(target))) {
        View lying, there;
        turn_as(target, target, &lying);
        turn_as(target, source, &there);
        const Status status = to_host_as_it_is(&lying, &there, stream, watch);
        if (!lacks_memory(status) || runtime_is_forked()) return status;
    }
    return to_host_as_it_is(target, source, stream, watch);
}

static Status copy_in_order(const View *target, const View *source, Stream *stream, Watch *watch)
{
    const bool from_host = source->device == DEVICE_CPU, to_host_too = target->device == DEVICE_CPU;
    Status status = from_host ? STATUS_OK : begin_reading(source, stream);
    if (status == STATUS_OK && !to_host_too) status = begin_writing(target, stream);
    if (status == STATUS_OK && to_host_too && stream_is_capturing(stream))
        status = refuse_capture("to_host");
    if (status != STATUS_OK) return status;
    if (view_bytes(target) == 0 && !to_host_too)
        return STATUS_OK;
    else if (to_host_too)
        status = to_host(target, source, stream, watch);
    else if (source->device == target->device)
        status = copy_on_device(target, source, stream);
    else
        status = to_device(target, source, stream, watch);
    if (runtime_is_forked()) return status;
    /* What was queued before a failure, or is not waited for any more, still reads and writes. */
    if (!from_host) status = even_so(status, [&] { return end_reading(source, stream); });
    if (!to_host_too) status = even_so(status, [&] { return end_writing(target, stream); });
    return status;
}

Status copy_view(const View *target, const View *source, Stream *stream, Watch *watch)
{
    int previous;
    Status status = device_enter(stream->device, &previous);
    if (status != STATUS_OK) return status;
    status = copy_in_order(target, source, stream, watch);
    device_leave(stream->device, previous);
    memory_settle();
    return status;
}

/* A source without strides stands for one item everywhere. */
static Status fill_on_device(const View *target, const void *item, Stream *stream)
{
    View all;
    view_copy(&all, target);
    for (int i = 0; i < all.ndim; i++) all.strides[i] = 0;
    if (target->item_bytes <= MOST_ITEM_BYTES) {
        all.data = NULL;
        return copy_pair(pair_of(target, &all), item, stream->handle);
    }
    View one, there;
    view_copy(&one, target);
    one.data = const_cast<void *>(item);
    one.device = DEVICE_CPU;
    one.ndim = 0;
    Status status = pack_on_device(&one, stream, &there);
    if (status != STATUS_OK) return status;
    all.data = there.data;
    status = copy_on_device(target, &all, stream);
    memory_release(there.memory);
    return status;
}

Status fill_view_with(const View *target, const void *item, Stream *stream)
{
    if (view_bytes(target) == 0) return STATUS_OK;
    int previous;
    Status status = device_enter(stream->device, &previous);
    if (status != STATUS_OK) return status;
    status = begin_writing(target, stream);
    if (status == STATUS_OK) status = fill_on_device(target, item, stream);
    if (status == STATUS_OK) status = end_writing(target, stream);
    device_leave(stream->device, previous);
    return status;
}

#else /* a build without CUDA */

static Status none(void)
{
    int count;
    return cuda_device_count(&count);
}

Status copy_view(const View *, const View *, Stream *, Watch *)
{
    return none();
}

Status fill_view_with(const View *, const void *, Stream *)
{
    return none();
}

#endif
