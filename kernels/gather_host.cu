/* gather on a GPU from a table on the host: which way it takes, and the ways to a result that is on
 * the device (gather_cuda.cu has those to a result on the host).
 *
 *     whole, range     the table, or the places that are taken, go up, and are gathered from there
 *     windows          the same part by part, each into one of two buffers, on a stream of its own:
 *                      while one is gathered from, the next is on its way
 *     in place         the kernel reads the page-locked table over the bus; where that is so large
 *                      that the device does not know all its addresses, in the order of these
 *     on the host      threads gather the rows into page-locked buffers, which go up
 *
 * Whichever it is, an index is checked where it is used, and what was copied is what is used. The
 * call waits for what uses page-locked memory of the caller. */
#include "gather.cuh"
#include "pipeline.cuh"
#include "radix.cuh"

#include <stdlib.h>
#include <string.h>

#ifdef __CUDACC__

/* The way. */

static Status fail_indices(int64_t bytes)
{
    return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for indices",
                (long long)bytes);
}

static bool is_reachable(const Gather &gather, int64_t *to_device)
{
    const Box span = table_span(gather);
    void *there;
    if (gather.axis_ndim > 1 || !pinned_reach(span.base, span.item_bytes, &there)) return false;
    *to_device = static_cast<char *>(there) - span.base;
    return true;
}

/* Parts of rows that share memory go up packed. */
static int64_t bytes_up(const Gather &gather, int64_t room_bytes)
{
    const int64_t bytes = table_bytes(gather);
    return bytes <= room_bytes ? bytes : packed_bytes(gather);
}

static void measure_range(const Gather &gather, GatherCase *found)
{
    found->range_bytes = bytes_up(gather, found->room_bytes);
    found->span_bytes = gather.axis_ndim > 1 ? found->range_bytes : table_span(gather).item_bytes;
}

void describe_case(Gather *gather, int device, int64_t index_count, int64_t room_bytes,
                   GatherCase *found)
{
    *found = {};
    found->room_bytes = room_bytes;
    measure_range(*gather, found);
    found->table_bytes = found->range_bytes;
    found->place_bytes = packed_bytes(*gather) / axis_places(*gather);
    found->rows = gather_rows(*gather);
    found->row_bytes = gather->row_bytes;
    found->index_bytes = index_count * gather->index_bytes;
    route_gather_rates(device, (double)found->table_bytes, &found->rates);
    if (found->table_bytes > GATHER_LEAST_CHOICE_BYTES)
        found->is_reachable = is_reachable(*gather, &gather->to_device);
}

Status choose_way(Gather *gather, int64_t index_count, GatherCase *found, GatherPlan *plan,
                  char **copy)
{
    *plan = gather_way(found);
    const bool goes_up = plan->way != GATHER_IN_PLACE && plan->way != GATHER_ON_HOST;
    if (!goes_up || gather->axis_ndim != 1 || found->indices_on_device || !gather_scan_pays(found))
        return STATUS_OK;
    if (*copy == NULL) *copy = static_cast<char *>(malloc((size_t)found->index_bytes));
    if (*copy == NULL) return fail_indices(found->index_bytes);
    copy_and_scan(gather, gather->indices, index_count, *copy);
    measure_range(*gather, found);
    *plan = gather_way(found);
    return STATUS_OK;
}

/* What one call has. */
struct HostTable {
    Call *call;
    Gather gather;  /* with the indices of the host, if they are known there */
    bool is_locked; /* page-locked: the stream may still write to the table */
    bool has_room;  /* for more on the device, until it turns out that there is none */
    int64_t index_count;
    GatherCase found;
    char *host_indices; /* a copy of ours, or NULL */
    View packed;        /* the indices on the device, without gaps, */
    Memory *indices;    /* and where that is a copy, its memory */
    DeviceGather device;
    Memory *fill_row;
    Memory *buffers; /* for windows */
    Lanes *lanes;    /* where there are several */
};

/* Indices. */

static Status bring_indices(HostTable *table)
{
    Call *call = table->call;
    const View *given = &call->inputs[1];
    const bool is_there = given->device != DEVICE_CPU && view_is_packed(given);
    Status status = STATUS_OK;
    View source;
    view_copy(&source, given);
    if (table->host_indices != NULL) { /* the copy that was looked at */
        source.data = table->host_indices;
        view_pack(&source);
    }
    if (is_there)
        view_copy(&table->packed, given);
    else
        status = pack_on_device(&source, call->stream, &table->packed, call->watch);
    if (status == STATUS_OK && !is_there) table->indices = table->packed.memory;
    return status;
}

/* Without gaps, if they are on the host. */
static Status pack_host_indices(HostTable *table)
{
    const View *given = &table->call->inputs[1];
    if (given->device != DEVICE_CPU || view_is_packed(given) || table->host_indices != NULL)
        return STATUS_OK;
    table->host_indices = pack_indices(given, table->index_count);
    table->gather.indices = table->host_indices;
    return table->host_indices == NULL ? fail_indices(table->found.index_bytes) : STATUS_OK;
}

/* Waits for all work on the stream. */
static Status fetch_indices(HostTable *table)
{
    Call *call = table->call;
    const int64_t bytes = table->found.index_bytes;
    Status status = table->packed.data == NULL ? bring_indices(table) : STATUS_OK;
    if (status == STATUS_OK) status = stream_await(call->stream, call->watch);
    if (status != STATUS_OK) return status;
    table->host_indices = static_cast<char *>(malloc((size_t)bytes));
    if (table->host_indices == NULL) return fail_indices(bytes);
    table->gather.indices = table->host_indices;
    status = copy_to_host(table->host_indices, table->packed.data, bytes, call->stream->handle);
    return even_so(status, [&] { return stream_drain(call->stream->handle); });
}

/* Gathered on the host. */

/* What a kernel would have noted. */
template <class Index>
struct NoteIndex {
    static constexpr int MAX_THREADS = 1;

    IndexReport report;
    uint64_t position;
    Index index;

    HOST_DEVICE void operator()(Thread) const { report.note(position, index); }
};

static Status note_on_device(const HostTable &table, const MadeRows &rows)
{
    if (rows.bad == NULL) return STATUS_OK;
    const Gather &gather = table.gather;
    IndexReport report;
    Status status = open_report(table.call, gather.axis_size, &report);
    if (status != STATUS_OK) return status;
    const uint64_t position = static_cast<uint64_t>(rows.bad - gather.indices) /
                              static_cast<uint64_t>(gather.index_bytes);
    with_index_type(gather.index_dtype, [&](auto index) {
        memcpy(&index, rows.value, sizeof index);
        /* As wide as the note has it, so that there is no gap. */
        if (is_negative(static_cast<decltype(index)>(-1)))
            status = launch(NoteIndex<int64_t>{report, position, static_cast<int64_t>(index)},
                            Grid{1, 1}, table.call->stream->handle);
        else
            status = launch(NoteIndex<uint64_t>{report, position, static_cast<uint64_t>(index)},
                            Grid{1, 1}, table.call->stream->handle);
    });
    return status;
}

/* A row of the fill, or of zeros. */
static char *new_fill(const HostTable &table)
{
    const int64_t bytes = table.gather.row_bytes, item_bytes = table.call->out.item_bytes;
    char *fill = static_cast<char *>(calloc(1, (size_t)bytes));
    if (table.gather.mode == MODE_FILL)
        for (int64_t at = 0; fill != NULL && at < bytes; at += item_bytes)
            memcpy(fill + at, table.call->fill, (size_t)item_bytes);
    return fill;
}

static Status gather_on_host(HostTable *table)
{
    Call *call = table->call;
    Status status =
        table->found.indices_on_device ? fetch_indices(table) : pack_host_indices(table);
    if (status != STATUS_OK) return status;
    Gather *gather = &table->gather;
    const int64_t bytes = table->found.rows * gather->row_bytes;
    char *fill = NULL;
    if (gather->mode == MODE_RAISE || gather->mode == MODE_FILL) {
        fill = new_fill(*table);
        if (fill == NULL)
            return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for a row",
                        (long long)gather->row_bytes);
    }
    gather->fill = fill;
    MadeRows rows;
    open_rows(&rows, gather);
    status = made_upload(make_rows, &rows, bytes, call->out.data, call->stream, call->watch);
    if (status == STATUS_OK) status = note_on_device(*table, rows);
    pthread_mutex_destroy(&rows.lock);
    free(fill);
    return status;
}

/* Gathered on the device. */

constexpr int BUFFERS = 2;
constexpr int64_t ALIGNMENT = 512; /* of buffers */

/* The loops of a result that is packed, over a table with so many places of the axis. */
static void set_table(const Gather &gather, int64_t places, bool as_it_lies, DeviceGather *device,
                      DeviceLoop *loops, int *ndim)
{
    Gather packed;
    describe_on_device(gather, places, as_it_lies, &packed);
    packed.mode = gather.mode;
    set_loops(packed, device, loops);
    device->axis_size = gather.axis_size;
    device->axis_begin = gather.axis_ndim > 0 ? gather.first_place : 0;
    device->axis_end = gather.axis_ndim > 0 ? gather.end_place : gather.axis_size;
    *ndim = packed.ndim;
}

static Status gather_in_place(HostTable *table)
{
    DeviceLoop loops[GPUOPS_MAX_DIMS];
    int ndim;
    const Gather &gather = table->gather;
    set_table(gather, axis_places(gather), true, &table->device, loops, &ndim);
    table->device.x = table_box(gather).base + gather.to_device; /* of the first place */
    Stream *stream = table->call->stream;
    Scratch scratch = {};
    scratch.stream = stream;
    const bool sorts = gather_sorting_pays(&table->found);
    Status status =
        launch_gather_in_place(table->device, ndim, loops, sorts ? &scratch : NULL, stream->handle);
    if (sorts && status == STATUS_MEMORY_ERROR) /* for the order, before anything is written */
        status = launch_gather_in_place(table->device, ndim, loops, NULL, stream->handle);
    scratch_give_back(&scratch);
    return status;
}

/* The places begin..end, packed or as they lie. */
static Status gather_window(HostTable *table, int64_t begin, int64_t end, bool as_it_lies,
                            char *buffer)
{
    Gather window = table->gather;
    window.first_place = begin;
    window.end_place = end;
    const Box packed = table_box(window);
    const Box box = as_it_lies ? table_span(window) : packed;
    /* The places of a flat axis are not those of one dimension, but it is all that x has. */
    const bool is_flat = window.axis_ndim > 1;
    const Lanes *lanes = table->lanes;
    Stream *compute = table->call->stream, *up = lanes != NULL ? lanes->up : compute;
    Status status = box_bring(box, is_flat ? begin : 0, is_flat ? end : box_items(box), buffer, up,
                              NULL, &table->has_room, lanes != NULL ? NULL : table->call->watch);
    /* The next window goes up where the one before this one was. */
    if (status == STATUS_OK && lanes != NULL) status = stream_wait(up, compute);
    if (status == STATUS_OK && lanes != NULL) status = stream_wait(compute, up);
    if (status != STATUS_OK) return status;
    DeviceLoop loops[GPUOPS_MAX_DIMS];
    int ndim;
    set_table(window, axis_places(window), as_it_lies, &table->device, loops, &ndim);
    table->device.x = as_it_lies ? buffer + (packed.base - box.base) : buffer;
    table->device.leaves_others = begin > table->gather.first_place;
    return launch_gather_rows(table->device, ndim, loops, compute->handle);
}

static Status open_windows(HostTable *table, int64_t bytes, int count)
{
    Call *call = table->call;
    /* At the end of several, whatever comes of them, all that was queued is waited for. */
    Status status = count > 1 ? stream_await(call->stream, call->watch) : STATUS_OK;
    if (status == STATUS_OK)
        status = memory_allocate(call->stream, count * round_up(bytes, ALIGNMENT), &table->buffers);
    if (status != STATUS_OK || count == 1) return status;
    status = lanes_take(call->device, &table->lanes);
    return status == STATUS_OK ? stream_wait(table->lanes->up, call->stream) : status;
}

/* Nothing of ours may still be on its way from the table, and if that cannot be waited for, its
 * buffers are not used again before it is over. */
static Status close_windows(HostTable *table, Status status)
{
    if (runtime_is_forked()) return status;
    return even_so(status, [&] {
        Status last = STATUS_OK;
        if (table->lanes != NULL) {
            last = stream_drain(table->lanes->up->handle);
            if (last != STATUS_OK)
                last = even_so(last,
                               [&] { return memory_note_use(table->buffers, table->lanes->up); });
            lanes_give(table->call->device, table->lanes);
        }
        if (table->buffers != NULL) memory_release(table->buffers);
        table->lanes = NULL;
        table->buffers = NULL;
        return last;
    });
}

static Status gather_windows(HostTable *table, bool *has_room)
{
    const Gather &gather = table->gather;
    const GatherCase &found = table->found;
    const bool fits = found.range_bytes <= found.room_bytes;
    const bool as_it_lies = fits && rows_overlap(gather);
    const int64_t first = gather.axis_ndim > 0 ? gather.first_place : 0;
    const int64_t places = axis_places(gather);
    const int64_t most = found.room_bytes / BUFFERS / ALIGNMENT * ALIGNMENT;
    const int64_t whole = most / found.place_bytes; /* 0: one fits, but for the alignment */
    const int64_t step = fits ? places : whole > 0 ? whole : 1;
    const int count = fits ? 1 : BUFFERS;
    table->has_room = fits; /* windows take it all */
    Status status = open_windows(table, fits ? found.range_bytes : step * found.place_bytes, count);
    *has_room = status != STATUS_MEMORY_ERROR;
    char *buffers = status == STATUS_OK ? memory_data(table->buffers) : NULL;
    int64_t looked = 0;
    for (int64_t done = 0; done < places && status == STATUS_OK; done += step) {
        const int64_t end = done + step < places ? done + step : places;
        char *buffer =
            buffers + done / step % count * round_up(step * found.place_bytes, ALIGNMENT);
        status = look_now_and_then(table->call, done * found.place_bytes,
                                   places * found.place_bytes, &looked);
        if (status == STATUS_OK)
            status = gather_window(table, first + done, first + end, as_it_lies, buffer);
    }
    return close_windows(table, status);
}

/* Where threads gather the rows, the indices stay with them, unless another way was tried first. */
static void note_way(const HostTable &table, GatherPlan plan)
{
    const GatherCase &found = table.found;
    const bool they_stay = plan.way == GATHER_ON_HOST && table.packed.data == NULL;
    const bool they_go = !they_stay && !found.indices_on_device;
    route_note_table(table.call, plan.way == GATHER_IN_PLACE,
                     plan.bytes_up + (they_go ? found.index_bytes : 0));
}

/* Where a way finds less memory than there seemed to be, another one is taken that needs less; the
 * one on the host needs none. Nothing has been written by then. */
static Status gather_by_the_way(HostTable *table, GatherPlan plan)
{
    note_way(*table, plan);
    if (plan.way == GATHER_ON_HOST) return gather_on_host(table);
    Status status = table->packed.data == NULL ? bring_indices(table) : STATUS_OK;
    Gather described = table->gather;
    described.indices = static_cast<char *>(table->packed.data);
    if (status == STATUS_OK)
        status = open_device_gather(table->call, described, table->index_count, &table->device,
                                    &table->fill_row);
    /* The fill is as long as a row is now, and packed, rows must not become longer. */
    if (table->fill_row != NULL) table->gather.fill_bytes = table->gather.row_bytes;
    if (status != STATUS_OK || plan.way == GATHER_IN_PLACE)
        return status == STATUS_OK ? gather_in_place(table) : status;
    for (;;) {
        bool has_room;
        status = gather_windows(table, &has_room);
        if (has_room) return status;
        GatherCase *found = &table->found;
        if (found->room_bytes > found->range_bytes) found->room_bytes = found->range_bytes;
        found->room_bytes /= 2;
        measure_range(table->gather, found);
        plan = gather_way(found);
        note_way(*table, plan);
        if (plan.way == GATHER_IN_PLACE) return gather_in_place(table);
        if (plan.way == GATHER_ON_HOST) return gather_on_host(table);
    }
}

static void describe_table(HostTable *table, int64_t room_bytes)
{
    const Call *call = table->call;
    describe_case(&table->gather, call->device, table->index_count, room_bytes, &table->found);
    table->found.result_on_device = true;
    table->found.indices_on_device = call->inputs[1].device != DEVICE_CPU;
}

/* The indices come first, and some is left to others. */
static Status find_room(const HostTable &table, int64_t *room)
{
    const View *indices = &table.call->inputs[1];
    const bool is_there = indices->device != DEVICE_CPU && view_is_packed(indices);
    Status status = device_memory_room(table.call->device, room);
    *room -= *room / 10 + (is_there ? 0 : table.index_count * table.gather.index_bytes);
    if (*room < 0) *room = 0;
    return status;
}

/* Ways that leave the table where it is need no room, and more of it makes none of them better: so
 * that is asked for only where all the room there could be would have the table go up. */
static Status find_way(HostTable *table, GatherPlan *plan)
{
    describe_table(table, INT64_MAX);
    *plan = gather_way(&table->found);
    if (plan->way == GATHER_IN_PLACE) return STATUS_OK;
    /* Where the CPU reads the table, that comes after what is still to be written there. */
    Status status =
        table->is_locked ? stream_await(table->call->stream, table->call->watch) : STATUS_OK;
    const bool is_small = table->found.table_bytes <= GATHER_LEAST_CHOICE_BYTES;
    if (status != STATUS_OK || is_small || plan->way == GATHER_ON_HOST) return status;
    int64_t room = 0;
    status = find_room(*table, &room);
    if (status == STATUS_OK) status = pack_host_indices(table);
    if (status != STATUS_OK) return status;
    describe_table(table, room);
    return choose_way(&table->gather, table->index_count, &table->found, plan,
                      &table->host_indices);
}

static void release_all(HostTable *table)
{
    if (table->indices != NULL) memory_release(table->indices);
    if (table->fill_row != NULL) memory_release(table->fill_row);
    free(table->host_indices);
}

Status gather_host_table(Call *call, const Gather &gather, int64_t index_count)
{
    if (stream_is_capturing(call->stream)) return refuse_host_in_capture();
    HostTable table = {};
    table.call = call;
    table.gather = gather;
    table.index_count = index_count;
    PinnedUse use;
    pinned_hold(&call->inputs[0], &use);
    table.is_locked = pinned_is_held(&use) || host_memory_is_pinned(call->inputs[0].data);
    GatherPlan plan;
    Status status = find_way(&table, &plan);
    const bool is_begun = status == STATUS_OK;
    if (is_begun) status = gather_by_the_way(&table, plan);
    if (runtime_is_forked()) return status;
    return even_so(status, [&] {
        Status last = STATUS_OK;
        /* Of a table that somebody else has locked in part, the range may be locked. */
        if (is_begun && (table.is_locked || pinned_is_held(&use) ||
                         host_memory_is_pinned(table_box(table.gather).base)))
            last = stream_drain(call->stream->handle);
        const bool is_waited_for =
            status == STATUS_OK || status == STATUS_MEMORY_ERROR || status == STATUS_INTERRUPTED;
        pinned_let_go(&use, call->device, last == STATUS_OK && is_waited_for);
        release_all(&table);
        return last;
    });
}

#endif
