/* gather on a GPU: between arrays in its memory, and between arrays on the host, which go through
 * device memory, in tiles where they do not fit as a whole, or where they are small through a slab.
 * The kernel is in gather_rows.cu. */
#include "gather.cuh"
#include "pipeline.cuh"
#include "slab.cuh"

#include <stdlib.h>
#include <string.h>

#ifdef __CUDACC__

constexpr int THREADS = 256;

/* Looks for bad indices and does nothing else. */
template <class Index>
struct CheckIndices {
    static constexpr int MAX_THREADS = THREADS;

    const char *indices;
    int64_t count, first;
    IndexReport report;

    HOST_DEVICE void operator()(Thread thread) const
    {
        for (int64_t i = thread.block * (int64_t)thread.threads + thread.thread; i < count;
             i += thread.blocks * (int64_t)thread.threads) {
            const Index index = reinterpret_cast<const Index *>(indices)[i];
            if (place_of(index, report.axis_size, MODE_RAISE) < 0)
                report.note(static_cast<uint64_t>(first + i), index);
        }
    }
};

static Status launch_check(const char *indices, Dtype dtype, int64_t first, int64_t count,
                           const IndexReport &report, void *stream)
{
    Status status = STATUS_OK;
    with_index_type(dtype, [&](auto zero) {
        const int64_t blocks = (count + 8 * THREADS - 1) / (8 * THREADS);
        CheckIndices<decltype(zero)> body = {indices, count, first, report};
        status = launch(body, Grid{(unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX), THREADS},
                        stream);
    });
    return status;
}

/* Between arrays on the device. */

void set_loops(const Gather &gather, DeviceGather *device, DeviceLoop *loops)
{
    device->rows = gather_rows(gather);
    device->row_bytes = gather.row_bytes;
    device->axis_size = gather.axis_size;
    device->axis_stride = gather.axis_ndim > 0 ? gather.axis_strides[0] : 0;
    device->axis_begin = 0;
    device->axis_end = gather.axis_size;
    device->mode = gather.mode;
    for (int i = 0; i < gather.ndim; i++)
        loops[i] = {gather.loops[i].count, gather.loops[i].x, gather.loops[i].index};
}

/* An element that repeats within 16 bytes goes with the kernel's arguments. */
static bool set_pattern(const void *fill, int64_t item_bytes, DeviceGather *device)
{
    memset(device->pattern, 0, sizeof device->pattern);
    device->fill = NULL;
    if (fill == NULL || item_bytes == 0) return true;
    const char *bytes = static_cast<const char *>(fill);
    bool zero = true;
    for (int64_t i = 0; i < item_bytes && zero; i++) zero = bytes[i] == 0;
    if (zero) return true;
    if (16 % item_bytes != 0) return false;
    for (int64_t at = 0; at < 16; at += item_bytes)
        memcpy(device->pattern + at, fill, (size_t)item_bytes);
    return true;
}

/* A row of the fill in device memory, for elements that no pattern can hold. */
static Status make_fill_row(const Call *call, int64_t row_bytes, View *row)
{
    View item;
    view_copy(&item, &call->out);
    item.device = DEVICE_CPU;
    item.data = const_cast<void *>(call->fill);
    item.ndim = 1;
    item.shape[0] = row_bytes / item.item_bytes;
    item.strides[0] = 0;
    return pack_on_device(&item, call->stream, row);
}

Status open_device_gather(const Call *call, const Gather &gather, int64_t index_count,
                          DeviceGather *device, Memory **fill_row)
{
    *fill_row = NULL;
    device->out = gather.out;
    device->indices = gather.indices;
    device->index_dtype = gather.index_dtype;
    Status status = STATUS_OK;
    if (gather.mode == MODE_RAISE && index_count > 0)
        status = open_report(call, gather.axis_size, &device->report);
    const void *fill = gather.mode == MODE_FILL && gather.row_bytes > 0 ? call->fill : NULL;
    if (status != STATUS_OK || set_pattern(fill, call->out.item_bytes, device)) return status;
    View row;
    status = make_fill_row(call, gather.row_bytes, &row);
    if (status != STATUS_OK) return status;
    device->fill = static_cast<const char *>(row.data);
    *fill_row = row.memory;
    return STATUS_OK;
}

Status gather_between_device_arrays(const Call *call, const Gather &gather, int64_t index_count)
{
    DeviceGather device = {};
    DeviceLoop loops[GPUOPS_MAX_DIMS];
    Memory *fill_row;
    set_loops(gather, &device, loops);
    device.x = gather.x;
    const bool is_empty = device.rows == 0 || device.row_bytes == 0;
    if (is_empty && (gather.mode != MODE_RAISE || index_count == 0)) return STATUS_OK;
    Status status = open_device_gather(call, gather, index_count, &device, &fill_row);
    if (status == STATUS_OK)
        status = is_empty ? launch_check(gather.indices, gather.index_dtype, 0, index_count,
                                         device.report, call->stream->handle)
                          : launch_gather_rows(device, gather.ndim, loops, call->stream->handle);
    if (fill_row != NULL) memory_release(fill_row);
    return status;
}

/* The tiles. */

/* A stretch of device memory, or a slab, from which a tile takes what it needs, and how far the
 * call is. All fits in a slab. */
struct Arena {
    const Call *call;
    int64_t done_bytes, out_bytes; /* of the result */
    int64_t looked;
    Memory *owned;
    Slab *slab;
    bool is_over;  /* no kernel is at work on the slab any more */
    bool has_room; /* for more on the device, until it turns out that there is none */
    char *memory;
    int64_t bytes, used;
    Stream *owner;       /* of the memory's order */
    cudaStream_t stream; /* its handle */
    int slot;            /* where this call's kernels note bad indices */
    IndexReport report;
    /* The part of x that the last tile left at the start of the memory. */
    Box table;
    int64_t table_begin, table_end;
};

constexpr int64_t ALIGNMENT = 256;

static char *arena_take(Arena *arena, int64_t bytes)
{
    char *memory = arena->memory + arena->used;
    arena->used += round_up(bytes, ALIGNMENT);
    return memory;
}

/* How many places of the axis are taken to the device. */
int64_t axis_places(const Gather &gather)
{
    return gather.axis_ndim > 0 ? gather.end_place - gather.first_place : 1;
}

/* The boxes of host memory that a tile consists of. */
Box table_box(const Gather &gather)
{
    Box box = {gather.x, gather.row_bytes, 0, {}, {}};
    const bool is_single = gather.axis_ndim == 1;
    if (is_single) box.base += gather.first_place * gather.axis_strides[0];
    for (int i = 0; i <= gather.ndim; i++) {
        if (i == gather.axis_before)
            for (int j = 0; j < gather.axis_ndim; j++)
                box_append(&box, is_single ? axis_places(gather) : gather.axis_counts[j],
                           gather.axis_strides[j]);
        if (i < gather.ndim && gather.loops[i].x != 0)
            box_append(&box, gather.loops[i].count, gather.loops[i].x);
    }
    return box;
}

static Box index_box(const Gather &gather)
{
    Box box = {gather.indices, gather.index_bytes, 0, {}, {}};
    for (int i = 0; i < gather.ndim; i++)
        if (gather.loops[i].index != 0)
            box_append(&box, gather.loops[i].count, gather.loops[i].index);
    return box;
}

static Box out_box(const Gather &gather)
{
    Box box = {gather.out, gather.row_bytes, 0, {}, {}};
    for (int i = 0; i < gather.ndim; i++)
        box_append(&box, gather.loops[i].count, gather.loops[i].out);
    return box;
}

static bool same_table(const Arena &arena, const Box &box, int64_t begin, int64_t end)
{
    const Box &table = arena.table;
    size_t bytes = (size_t)box.ndim * sizeof(int64_t);
    return arena.table_begin == begin && arena.table_end == end && table.base == box.base &&
           table.item_bytes == box.item_bytes && table.ndim == box.ndim &&
           memcmp(table.counts, box.counts, bytes) == 0 &&
           memcmp(table.strides, box.strides, bytes) == 0;
}

/* What a tile takes besides the table. */
static int64_t bytes_beside_table(const Gather &gather)
{
    int64_t out = box_items(out_box(gather)) * gather.row_bytes;
    int64_t indices = box_items(index_box(gather)) * gather.index_bytes;
    int64_t fill = 0;
    if (gather.mode == MODE_FILL) fill = gather.fill_bytes < out ? gather.fill_bytes : out;
    return round_up(indices, ALIGNMENT) + round_up(out, ALIGNMENT) + round_up(fill, ALIGNMENT);
}

int64_t packed_bytes(const Gather &gather)
{
    return box_items(table_box(gather)) * gather.row_bytes;
}

/* The memory from the first byte of a table to its last. */
Box table_span(const Gather &gather)
{
    const Box table = table_box(gather);
    Box span = {table.base, table.item_bytes, 0, {}, {}};
    for (int i = 0; i < table.ndim; i++) {
        const int64_t reach = (table.counts[i] - 1) * table.strides[i];
        if (reach < 0) span.base += reach;
        span.item_bytes += reach < 0 ? -reach : reach;
    }
    return span;
}

/* Rows that share memory, as in a sliding window, go up as they lie: packed, each would have a copy
 * of its own, and there may be more of them than any memory holds. */
bool rows_overlap(const Gather &gather)
{
    return gather.axis_ndim <= 1 && table_span(gather).item_bytes < packed_bytes(gather);
}

int64_t table_bytes(const Gather &gather)
{
    if (gather.is_in_place) return 0;
    return rows_overlap(gather) ? table_span(gather).item_bytes : packed_bytes(gather);
}

/* The loops as they are on the device, where everything is packed, but for x if it is there as it
 * lies on the host. */
void describe_on_device(const Gather &gather, int64_t axis_count, bool as_it_lies, Gather *packed)
{
    int64_t x[GPUOPS_MAX_DIMS], index[GPUOPS_MAX_DIMS];
    int64_t x_stride = gather.row_bytes, index_stride = gather.index_bytes;
    int64_t axis_stride = x_stride;
    for (int i = gather.ndim - 1; i >= -1; i--) {
        if (i + 1 == gather.axis_before) {
            axis_stride = x_stride;
            x_stride *= axis_count;
        }
        if (i < 0) break;
        const Loop &loop = gather.loops[i];
        x[i] = as_it_lies || loop.x == 0 ? loop.x : x_stride;
        index[i] = loop.index == 0 ? 0 : index_stride;
        if (loop.x != 0) x_stride *= loop.count;
        if (loop.index != 0) index_stride *= loop.count;
    }

    packed->ndim = 0;
    packed->axis_before = 0;
    packed->fill_bytes = gather.fill_bytes;
    packed->row_bytes = gather.row_bytes;
    packed->axis_size = gather.axis_size;
    packed->axis_ndim = gather.axis_ndim > 0 ? 1 : 0;
    packed->axis_strides[0] = gather.axis_ndim == 0 ? 0
                              : as_it_lies          ? gather.axis_strides[0]
                                                    : axis_stride;
    int64_t out_stride = gather_rows(gather) * gather.row_bytes;
    for (int i = 0; i < gather.ndim; i++) {
        out_stride /= gather.loops[i].count;
        add_loop(packed, gather.loops[i].count, out_stride, x[i], index[i]);
    }
    end_loops(packed);
}

/* Waits for the kernels before, and reports the index that they found to be bad. */
static Status await_kernels(Arena *arena, Mode mode)
{
    Status status = stream_drain(arena->stream);
    arena->is_over = status == STATUS_OK && arena->slab != NULL;
    if (status != STATUS_OK || mode != MODE_RAISE) return status;
    return slot_check(arena->owner, arena->slot, false);
}

static Box box_of_bytes(const char *data, int64_t bytes)
{
    return {const_cast<char *>(data), bytes, 0, {}, {}};
}

static Status send_up(Arena *arena, const Box &box, int64_t begin, int64_t end, char *place)
{
    if (arena->slab == NULL)
        return box_bring(box, begin, end, place, arena->owner, NULL, &arena->has_room);
    box_pack(box, place);
    return STATUS_OK;
}

static Status send_down(const Arena &arena, const Box &box, char *place)
{
    if (arena.slab == NULL) return box_download(box, place, arena.stream);
    box_unpack(box, place);
    return STATUS_OK;
}

/* Looks at all indices, in C order, before anything is written. */
static Status check_all_indices(const Gather &gather, Arena *arena, int64_t count)
{
    arena->table_end = 0;
    const int64_t most = arena->bytes / gather.index_bytes;
    Status status = STATUS_OK;
    for (int64_t done = 0; done < count && status == STATUS_OK; done += most) {
        const int64_t piece = count - done < most ? count - done : most;
        const Box box =
            box_of_bytes(gather.indices + done * gather.index_bytes, piece * gather.index_bytes);
        status = send_up(arena, box, 0, 1, arena->memory);
        if (status == STATUS_OK)
            status = launch_check(arena->memory, gather.index_dtype, done, piece, arena->report,
                                  arena->stream);
    }
    return status == STATUS_OK ? await_kernels(arena, gather.mode) : status;
}

static Status gather_tile(Arena *arena, const Gather &gather)
{
    const int64_t beside = bytes_beside_table(gather);
    const bool fits = round_up(table_bytes(gather), ALIGNMENT) + beside <= arena->bytes;
    const bool as_it_lies = fits && (gather.is_in_place || rows_overlap(gather));
    const Box packed_table = table_box(gather);
    const Box table = as_it_lies ? table_span(gather) : packed_table;
    const int64_t whole = box_items(table) * table.item_bytes;
    const int64_t places = axis_places(gather);
    const int64_t place_bytes = places > 0 ? packed_bytes(gather) / places : 0;
    const int64_t step = fits ? places : (arena->bytes - beside - ALIGNMENT) / place_bytes;

    Gather packed;
    describe_on_device(gather, step, as_it_lies, &packed);
    packed.mode = gather.mode;
    DeviceGather device = {};
    DeviceLoop loops[GPUOPS_MAX_DIMS];
    set_loops(packed, &device, loops);
    device.axis_size = gather.axis_size;
    device.index_dtype = gather.index_dtype;
    device.report = arena->report;
    (void)set_pattern(NULL, 0, &device);

    arena->used = 0;
    char *x = gather.is_in_place ? table.base + gather.to_device
                                 : arena_take(arena, fits ? whole : step * place_bytes);
    const Box indices = index_box(gather), out = out_box(gather);
    char *device_indices = arena_take(arena, box_items(indices) * gather.index_bytes);
    device.out = arena_take(arena, device.rows * device.row_bytes);
    device.x = as_it_lies ? x + (packed_table.base - table.base) : x;
    device.indices = device_indices;
    if (arena->slab != NULL && !as_it_lies && device.axis_stride == device.row_bytes &&
        whole <= GATHER_STAGED_BYTES)
        device.staged_bytes = whole;

    Status status = send_up(arena, indices, 0, box_items(indices), device_indices);
    if (status == STATUS_OK && gather.mode == MODE_FILL) {
        char *fill = arena_take(arena, device.row_bytes);
        device.fill = fill;
        status = send_up(arena, box_of_bytes(gather.fill, device.row_bytes), 0, 1, fill);
    }

    const int64_t out_bytes = device.rows * device.row_bytes;
    for (int64_t begin = 0; status == STATUS_OK; begin += step) {
        int64_t end = begin + step < places ? begin + step : places;
        device.axis_begin = gather.axis_ndim > 0 ? gather.first_place + begin : 0;
        device.axis_end = gather.axis_ndim > 0 ? gather.first_place + end : gather.axis_size;
        device.leaves_others = begin > 0;
        const int64_t share = (int64_t)((double)out_bytes / (double)places * (double)begin);
        status = look_now_and_then(arena->call, arena->done_bytes + (begin > 0 ? share : 0),
                                   arena->out_bytes, &arena->looked);
        if (status != STATUS_OK) break;
        if (!gather.is_in_place && !same_table(*arena, table, begin, end)) {
            /* Parts of the axis are taken only where it is all that x consists of. */
            status = send_up(arena, table, fits ? 0 : begin, fits ? box_items(table) : end, x);
            arena->table = table;
            arena->table_begin = begin;
            arena->table_end = end;
        }
        if (status == STATUS_OK)
            status = gather.is_in_place
                         ? launch_gather_in_place(device, packed.ndim, loops, NULL, arena->stream)
                         : launch_gather_rows(device, packed.ndim, loops, arena->stream);
        if (end >= places) break;
    }
    if (status == STATUS_OK && (gather.mode == MODE_RAISE || arena->slab != NULL))
        status = await_kernels(arena, gather.mode);
    if (status == STATUS_OK) status = send_down(*arena, out, device.out);
    arena->done_bytes += out_bytes;
    return status;
}

/* Halves the work until it fits: first so that the table part stays as few pieces as possible, then
 * by indices, while the table stays where it is, and last by the bytes of a row. */
static Status gather_tiles(Arena *arena, const Gather &gather)
{
    const int64_t beside = bytes_beside_table(gather), table = table_bytes(gather);
    if (round_up(table, ALIGNMENT) + beside <= arena->bytes) return gather_tile(arena, gather);

    const int64_t half = arena->bytes / 2 - 4 * ALIGNMENT;
    int of_table = -1, of_indices = -1, other = -1;
    for (int i = gather.ndim - 1; i >= 0; i--) {
        if (gather.loops[i].count == 1) continue;
        other = i;
        if (gather.loops[i].x != 0) of_table = i;
        if (gather.loops[i].x == 0 && gather.loops[i].index != 0) of_indices = i;
    }
    int loop = -1;
    if (table > half && of_table >= 0)
        loop = of_table;
    else if (beside > half)
        loop = of_indices >= 0 ? of_indices : other;
    else if (axis_places(gather) > 0 && packed_bytes(gather) / axis_places(gather) <= half)
        return gather_tile(arena, gather);

    Gather first = gather, second = gather;
    if (loop >= 0) {
        const Loop &whole = gather.loops[loop];
        const int64_t count = whole.count / 2;
        first.loops[loop].count = count;
        second.loops[loop].count -= count;
        second.out += count * whole.out;
        second.x += count * whole.x;
        second.indices += count * whole.index;
    } else {
        const int64_t bytes = gather.row_bytes / 2;
        first.row_bytes = bytes;
        second.row_bytes -= bytes;
        second.out += bytes;
        second.x += bytes;
        if (gather.fill != NULL) {
            second.fill += bytes;
            second.fill_bytes -= bytes;
        }
    }
    Status status = gather_tiles(arena, first);
    return status == STATUS_OK ? gather_tiles(arena, second) : status;
}

constexpr int64_t LEAST_ARENA_BYTES = 16 << 10, ASK_ABOVE_BYTES = 64 << 20;

/* As much memory as the call wants, or as much as there is. */
static Status open_arena(Arena *arena, int64_t wanted)
{
    arena->bytes = wanted;
    Status status = slab_take(arena->owner->device, wanted, &arena->slab);
    if (arena->slab != NULL) arena->memory = arena->slab->data;
    if (status != STATUS_OK || arena->slab != NULL) return status;
    if (wanted > ASK_ABOVE_BYTES) {
        int64_t room;
        status = device_memory_room(arena->owner->device, &room);
        if (status != STATUS_OK) return status;
        room -= room / 10;
        arena->has_room = arena->bytes <= room;
        if (!arena->has_room) arena->bytes = room / ALIGNMENT * ALIGNMENT;
        if (arena->bytes < LEAST_ARENA_BYTES) arena->bytes = LEAST_ARENA_BYTES;
    }
    for (;;) {
        status = memory_allocate(arena->owner, arena->bytes, &arena->owned);
        if (status == STATUS_OK) arena->memory = memory_data(arena->owned);
        if (status != STATUS_MEMORY_ERROR || arena->bytes <= LEAST_ARENA_BYTES) return status;
        arena->bytes = round_up(arena->bytes / 2, ALIGNMENT);
        if (arena->bytes < LEAST_ARENA_BYTES) arena->bytes = LEAST_ARENA_BYTES;
    }
}

/* The parts of the table that go up, if not all of it does; result and indices come first. */
static Status choose_parts(const Call *call, Gather *gather, int64_t index_count, char **copy)
{
    GatherCase found;
    GatherPlan plan;
    describe_case(gather, call->device, index_count, INT64_MAX, &found);
    if (found.table_bytes <= GATHER_LEAST_CHOICE_BYTES) {
        route_note_table(call, false, found.table_bytes + found.index_bytes);
        return STATUS_OK;
    }
    Status status = choose_way(gather, index_count, &found, &plan, copy);
    if (status != STATUS_OK) return status;
    gather->is_in_place = plan.way == GATHER_IN_PLACE;
    route_note_table(call, gather->is_in_place, plan.bytes_up + found.index_bytes);
    return STATUS_OK;
}

/* *is_over: no work is going on any more on the memory of the host. */
static Status gather_on_current_device(const Call *call, Gather gather, int64_t index_count,
                                       bool *is_over)
{
    const int64_t rows = gather.row_bytes > 0 ? gather_rows(gather) : 0;
    if (rows == 0 && (index_count == 0 || gather.mode != MODE_RAISE)) return STATUS_OK;

    Arena arena = {};
    arena.call = call;
    arena.out_bytes = rows * gather.row_bytes;
    arena.has_room = true;
    arena.owner = call->stream == NULL ? legacy_stream(call->device) : call->stream;
    arena.stream = arena.owner->handle;
    char *copy = NULL;
    Status status = STATUS_OK;
    if (rows > 0 && gather.axis_size > 0) status = choose_parts(call, &gather, index_count, &copy);
    const int64_t whole =
        rows > 0 ? round_up(table_bytes(gather), ALIGNMENT) + bytes_beside_table(gather)
                 : round_up(index_count * gather.index_bytes, ALIGNMENT);
    if (status == STATUS_OK && call->stream == NULL && call->watch != NULL && !slab_has_room(whole))
        status = stream_await(arena.owner, call->watch);
    arena.slot = slot_take(call->device);
    /* Before there is an arena, which may leave no memory. */
    if (status == STATUS_OK && gather.mode == MODE_RAISE)
        status = report_open(arena.owner, arena.slot, call->op->name, call->axis, gather.axis_size,
                             &arena.report);
    if (status == STATUS_OK) status = open_arena(&arena, whole);
    if (status != STATUS_OK) {
        slot_give(call->device, arena.slot, false);
        free(copy);
        return status;
    }
    /* A single tile is checked as it is gathered, before it is written to the host. */
    if (status == STATUS_OK && gather.mode == MODE_RAISE && (rows == 0 || arena.bytes < whole))
        status = check_all_indices(gather, &arena, index_count);
    if (status == STATUS_OK && rows > 0) status = gather_tiles(&arena, gather);
    if (runtime_is_forked()) return status;
    /* Whatever happened, nothing may still be at work on the caller's memory. */
    return even_so(status, [&] {
        const Status last = arena.is_over ? STATUS_OK : stream_drain(arena.stream);
        *is_over = last == STATUS_OK;
        slot_give(call->device, arena.slot, status != STATUS_OK);
        if (arena.slab != NULL)
            slab_give(arena.slab, arena.owner, last == STATUS_OK);
        else
            memory_release(arena.owned);
        free(copy);
        return last;
    });
}

Status gather_on_cuda(const Call *call, const Gather &gather, int64_t index_count)
{
    int previous;
    Status status = device_enter(call->device, &previous);
    if (status != STATUS_OK) return status;
    const View *const views[] = {&call->inputs[0], &call->inputs[1], &call->out};
    PinnedUse uses[3];
    for (int i = 0; i < 3; i++) pinned_hold(views[i], &uses[i]);
    bool is_over = true;
    status = await_named_stream(call);
    if (status == STATUS_OK) status = gather_on_current_device(call, gather, index_count, &is_over);
    if (runtime_is_forked()) return status;
    for (int i = 0; i < 3; i++) pinned_let_go(&uses[i], call->device, is_over);
    device_leave(call->device, previous);
    return status;
}

#else

Status gather_on_cuda(const Call *, const Gather &, int64_t)
{
    int count;
    return cuda_device_count(&count);
}

Status gather_between_device_arrays(const Call *, const Gather &, int64_t)
{
    int count;
    return cuda_device_count(&count);
}

#endif
