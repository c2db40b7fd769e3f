/* gather on a GPU, between arrays in host memory: the kernel, and the tiles in which the operands
 * go through device memory where they do not fit as a whole. */
#include "gather.cuh"
#include "transfer.cuh"

#include <stdlib.h>
#include <string.h>

#ifdef __CUDACC__

/* The kernel. All operands are packed in device memory. */

/* The smallest bad position, or NO_POSITION. */
using Position = unsigned long long;
#define NO_POSITION (~0ull)

HOST_DEVICE inline void note_position(Position *first_bad, Position position)
{
#ifdef __CUDA_ARCH__
    atomicMin(first_bad, position);
#else
    if (position < *first_bad) *first_bad = position;
#endif
}

struct DeviceLoop {
    int64_t count, x, index;
};

/* What lies where in device memory. The output's rows follow one another in the order of the loops.
 * Only the places begin..end of the axis are there; rows from elsewhere are left as they are. */
struct DeviceGather {
    char *out;
    const char *x;
    const char *indices;
    const char *fill;
    Position *first_bad;
    int64_t rows, row_bytes;
    int64_t axis_size, axis_stride, axis_begin, axis_end;
    Mode mode;
    Dtype index_dtype;
};

constexpr int THREADS = 256, ROWS_IN_FLIGHT = 4;

/* A group of lanes copies ROWS_IN_FLIGHT rows at once, each lane a vector at a time: first all
 * indices are loaded, then all vectors, so that the misses overlap. */
template <class Vector, class Index, int NDIM>
struct GatherRows {
    static constexpr int MAX_THREADS = THREADS;

    DeviceGather gather;
    int lanes_log2;
    int ndim;
    DeviceLoop loops[NDIM];

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t vectors = gather.row_bytes / (int64_t)sizeof(Vector);
        const unsigned groups = thread.threads >> lanes_log2;
        const unsigned group = thread.thread >> lanes_log2;
        const unsigned lane = thread.thread & ((1u << lanes_log2) - 1);
        const int64_t step = (int64_t)groups * ROWS_IN_FLIGHT;

        for (int64_t first = thread.block * step; first < gather.rows;
             first += thread.blocks * step) {
            const Vector *source[ROWS_IN_FLIGHT];
            UNROLL
            for (int k = 0; k < ROWS_IN_FLIGHT; k++) {
                const int64_t row = first + group + k * (int64_t)groups;
                source[k] = row < gather.rows ? find(row) : nullptr;
            }
            for (int64_t v = lane; v < vectors; v += 1 << lanes_log2) {
                Vector loaded[ROWS_IN_FLIGHT];
                UNROLL
                for (int k = 0; k < ROWS_IN_FLIGHT; k++)
                    if (source[k] != nullptr) loaded[k] = source[k][v];
                UNROLL
                for (int k = 0; k < ROWS_IN_FLIGHT; k++) {
                    const int64_t row = first + group + k * (int64_t)groups;
                    if (source[k] != nullptr)
                        reinterpret_cast<Vector *>(gather.out + row * gather.row_bytes)[v] =
                            loaded[k];
                }
            }
        }
    }

    /* The address of a row's source, or NULL where there is nothing to copy. */
    HOST_DEVICE const Vector *find(int64_t row) const
    {
        int64_t x = 0, at = 0;
        if (NDIM == 1) {
            x = row * loops[0].x;
            at = row * loops[0].index;
        } else if (gather.rows <= UINT32_MAX) {
            decode(static_cast<uint32_t>(row), &x, &at);
        } else {
            decode(static_cast<uint64_t>(row), &x, &at);
        }
        const Index index = *reinterpret_cast<const Index *>(gather.indices + at);
        const int64_t place = place_of(index, gather.axis_size, gather.mode);
        if (place < 0) {
            if (gather.mode == MODE_RAISE)
                note_position(gather.first_bad, static_cast<Position>(at) / sizeof(Index));
            return reinterpret_cast<const Vector *>(gather.fill);
        }
        if (place < gather.axis_begin || place >= gather.axis_end) return nullptr;
        return reinterpret_cast<const Vector *>(gather.x + x +
                                                (place - gather.axis_begin) * gather.axis_stride);
    }

    template <class Unsigned>
    HOST_DEVICE void decode(Unsigned row, int64_t *x, int64_t *at) const
    {
        for (int i = ndim - 1; i >= 0; i--) {
            const Unsigned count = static_cast<Unsigned>(loops[i].count);
            const Unsigned position = row % count;
            row /= count;
            *x += static_cast<int64_t>(position) * loops[i].x;
            *at += static_cast<int64_t>(position) * loops[i].index;
        }
    }
};

/* Looks for bad indices and does nothing else. */
template <class Index>
struct CheckIndices {
    static constexpr int MAX_THREADS = THREADS;

    const char *indices;
    int64_t count, axis_size;
    Position *first_bad;

    HOST_DEVICE void operator()(Thread thread) const
    {
        for (int64_t i = thread.block * (int64_t)thread.threads + thread.thread; i < count;
             i += thread.blocks * (int64_t)thread.threads)
            if (place_of(reinterpret_cast<const Index *>(indices)[i], axis_size, MODE_RAISE) < 0)
                note_position(first_bad, static_cast<Position>(i));
    }
};

static unsigned blocks_for(int64_t work, int64_t work_per_block)
{
    int64_t blocks = (work + work_per_block - 1) / work_per_block;
    return static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX);
}

template <class Vector, class Index, int NDIM>
static Status launch_gather(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                            void *stream)
{
    GatherRows<Vector, Index, NDIM> body;
    body.gather = gather;
    body.ndim = ndim;
    for (int i = 0; i < ndim; i++) body.loops[i] = loops[i];
    body.lanes_log2 = 0;
    while (body.lanes_log2 < 5 && (int64_t)sizeof(Vector) << body.lanes_log2 < gather.row_bytes)
        body.lanes_log2++;
    const int64_t rows_per_block = (THREADS >> body.lanes_log2) * ROWS_IN_FLIGHT;
    return launch(body, Grid{blocks_for(gather.rows, rows_per_block), THREADS}, stream);
}

template <class Vector>
static Status launch_gather_of(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                               void *stream)
{
    Status status = STATUS_OK;
    with_index_type(gather.index_dtype, [&](auto zero) {
        using Index = decltype(zero);
        status = ndim == 1
                     ? launch_gather<Vector, Index, 1>(gather, ndim, loops, stream)
                     : launch_gather<Vector, Index, GPUOPS_MAX_DIMS>(gather, ndim, loops, stream);
    });
    return status;
}

/* One group of lanes copies a whole row; where rows are few and long, they are cut into pieces. */
static void cut_rows(DeviceGather *gather, int *ndim, DeviceLoop *loops)
{
    constexpr int64_t PIECE_BYTES = 4 << 10, FEW_ROWS = 1 << 15;
    const int64_t row_bytes = gather->row_bytes;
    if (gather->rows >= FEW_ROWS || row_bytes < 2 * PIECE_BYTES || *ndim == GPUOPS_MAX_DIMS) return;
    if (gather->mode == MODE_FILL) return; /* all pieces would have the first one's fill */
    const int64_t pieces = row_bytes / PIECE_BYTES;
    for (int64_t count = pieces; count < 2 * pieces && count < pieces + 256; count++) {
        if (row_bytes % (count * 16) != 0) continue;
        gather->row_bytes = row_bytes / count;
        gather->rows *= count;
        loops[(*ndim)++] = {count, gather->row_bytes, 0};
        return;
    }
}

/* The widest vector that every row can be copied with. */
static Status launch_gather_rows(DeviceGather gather, int ndim, DeviceLoop *loops, void *stream)
{
    cut_rows(&gather, &ndim, loops);
    uint64_t bits = reinterpret_cast<uintptr_t>(gather.x) | (uint64_t)gather.axis_stride |
                    (uint64_t)gather.row_bytes;
    for (int i = 0; i < ndim; i++) bits |= (uint64_t)loops[i].x;
    switch (bits & -bits) {
    case 1:
        return launch_gather_of<uint8_t>(gather, ndim, loops, stream);
    case 2:
        return launch_gather_of<uint16_t>(gather, ndim, loops, stream);
    case 4:
        return launch_gather_of<uint32_t>(gather, ndim, loops, stream);
    case 8:
        return launch_gather_of<uint2>(gather, ndim, loops, stream);
    default:
        return launch_gather_of<uint4>(gather, ndim, loops, stream);
    }
}

/* The tiles. */

/* A stretch of device memory from which a tile takes what it needs. */
struct Arena {
    char *memory;
    int64_t bytes, used;
    void *stream;
    Position *first_bad;
    /* The part of x that the last tile left at the start of the memory. */
    Box table;
    int64_t table_begin, table_end;
};

constexpr int64_t ALIGNMENT = 256;

static int64_t aligned(int64_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static char *arena_take(Arena *arena, int64_t bytes)
{
    char *memory = arena->memory + arena->used;
    arena->used += aligned(bytes);
    return memory;
}

/* The boxes of host memory that a tile consists of. */
static Box table_box(const Gather &gather)
{
    Box box = {gather.x, gather.row_bytes, 0, {}, {}};
    for (int i = 0; i <= gather.ndim; i++) {
        if (i == gather.axis_before)
            for (int j = 0; j < gather.axis_ndim; j++)
                box_append(&box, gather.axis_counts[j], gather.axis_strides[j]);
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

/* How many places the axis has in memory. */
static int64_t axis_places(const Gather &gather)
{
    return gather.axis_ndim > 0 ? gather.axis_size : 1;
}

/* What a tile takes besides the table. */
static int64_t bytes_beside_table(const Gather &gather)
{
    int64_t out = box_items(out_box(gather)) * gather.row_bytes;
    int64_t indices = box_items(index_box(gather)) * gather.index_bytes;
    int64_t fill = 0;
    if (gather.mode == MODE_FILL) fill = gather.fill_bytes < out ? gather.fill_bytes : out;
    return aligned(indices) + aligned(out) + aligned(fill);
}

static int64_t packed_bytes(const Gather &gather)
{
    return box_items(table_box(gather)) * gather.row_bytes;
}

/* The memory from the first byte of a table to its last. */
static Box table_span(const Gather &gather)
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
static bool rows_overlap(const Gather &gather)
{
    return gather.axis_ndim <= 1 && table_span(gather).item_bytes < packed_bytes(gather);
}

static int64_t table_bytes(const Gather &gather)
{
    return rows_overlap(gather) ? table_span(gather).item_bytes : packed_bytes(gather);
}

/* The loops as they are on the device, where everything is packed, but for x if it is there as it
 * lies on the host. */
static void describe_on_device(const Gather &gather, int64_t axis_count, bool as_it_lies,
                               Gather *packed)
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
static Status check_first_bad(const Call *call, const Gather &gather, const Arena &arena,
                              const char *indices)
{
    Position first_bad;
    Status status = copy_to_host(&first_bad, arena.first_bad, sizeof first_bad, arena.stream);
    if (status == STATUS_OK) status = stream_synchronize(arena.stream);
    if (status != STATUS_OK || first_bad == NO_POSITION) return status;

    char value[8];
    status = copy_to_host(value, indices + first_bad * (Position)gather.index_bytes,
                          gather.index_bytes, arena.stream);
    if (status == STATUS_OK) status = stream_synchronize(arena.stream);
    return status == STATUS_OK ? index_error(call, gather, value) : status;
}

/* Looks at all indices, in C order, before anything is written. */
static Status check_all_indices(const Call *call, const Gather &gather, Arena *arena, int64_t count)
{
    arena->used = 0;
    arena->table_end = 0;
    const int64_t most = arena->bytes / gather.index_bytes;
    Status status = clear_on_device(arena->first_bad, 0xFF, sizeof(Position), arena->stream);
    for (int64_t done = 0; done < count && status == STATUS_OK; done += most) {
        int64_t piece = count - done < most ? count - done : most;
        status = copy_to_device(arena->memory, gather.indices + done * gather.index_bytes,
                                piece * gather.index_bytes, arena->stream);
        if (status != STATUS_OK) break;
        with_index_type(gather.index_dtype, [&](auto zero) {
            CheckIndices<decltype(zero)> body = {arena->memory, piece, gather.axis_size,
                                                 arena->first_bad};
            status = launch(body, Grid{blocks_for(piece, 8 * THREADS), THREADS}, arena->stream);
        });
        if (status == STATUS_OK) status = check_first_bad(call, gather, *arena, arena->memory);
    }
    return status;
}

static Status gather_tile(const Call *call, Arena *arena, const Gather &gather)
{
    const int64_t beside = bytes_beside_table(gather);
    const bool fits = aligned(table_bytes(gather)) + beside <= arena->bytes;
    const bool as_it_lies = fits && rows_overlap(gather);
    const Box table = as_it_lies ? table_span(gather) : table_box(gather);
    const int64_t whole = box_items(table) * table.item_bytes;
    const int64_t places = axis_places(gather);
    const int64_t place_bytes = places > 0 ? packed_bytes(gather) / places : 0;
    const int64_t step = fits ? places : (arena->bytes - beside - ALIGNMENT) / place_bytes;

    Gather packed;
    describe_on_device(gather, step, as_it_lies, &packed);
    DeviceGather device;
    device.rows = gather_rows(packed);
    device.row_bytes = packed.row_bytes;
    device.axis_size = gather.axis_size;
    device.axis_stride = packed.axis_strides[0];
    device.mode = gather.mode;
    device.index_dtype = gather.index_dtype;
    device.first_bad = arena->first_bad;
    DeviceLoop loops[GPUOPS_MAX_DIMS];
    for (int i = 0; i < packed.ndim; i++)
        loops[i] = {packed.loops[i].count, packed.loops[i].x, packed.loops[i].index};

    arena->used = 0;
    char *x = arena_take(arena, fits ? whole : step * place_bytes);
    const Box indices = index_box(gather), out = out_box(gather);
    char *device_indices = arena_take(arena, box_items(indices) * gather.index_bytes);
    device.out = arena_take(arena, device.rows * device.row_bytes);
    device.x = as_it_lies ? x + (gather.x - table.base) : x;
    device.indices = device_indices;
    device.fill = NULL;

    Status status = box_upload(indices, 0, box_items(indices), device_indices, arena->stream);
    if (status == STATUS_OK && gather.mode == MODE_FILL) {
        char *fill = arena_take(arena, device.row_bytes);
        device.fill = fill;
        status = copy_to_device(fill, gather.fill, device.row_bytes, arena->stream);
    }
    if (status == STATUS_OK && gather.mode == MODE_RAISE)
        status = clear_on_device(arena->first_bad, 0xFF, sizeof(Position), arena->stream);

    for (int64_t begin = 0; status == STATUS_OK; begin += step) {
        int64_t end = begin + step < places ? begin + step : places;
        device.axis_begin = begin;
        device.axis_end = gather.axis_ndim > 0 ? end : gather.axis_size;
        if (!same_table(*arena, table, begin, end)) {
            /* Parts of the axis are taken only where it is all that x consists of. */
            status = box_upload(table, fits ? 0 : begin, fits ? box_items(table) : end, x,
                                arena->stream);
            arena->table = table;
            arena->table_begin = begin;
            arena->table_end = end;
        }
        if (status == STATUS_OK)
            status = launch_gather_rows(device, packed.ndim, loops, arena->stream);
        if (end >= places) break;
    }
    if (status == STATUS_OK && gather.mode == MODE_RAISE)
        status = check_first_bad(call, gather, *arena, device_indices);
    if (status == STATUS_OK) status = box_download(out, device.out, arena->stream);
    return status;
}

/* Halves the work until it fits: first so that the table part stays as few pieces as possible, then
 * by indices, while the table stays where it is, and last by the bytes of a row. */
static Status gather_tiles(const Call *call, Arena *arena, const Gather &gather)
{
    const int64_t beside = bytes_beside_table(gather), table = table_bytes(gather);
    if (aligned(table) + beside <= arena->bytes) return gather_tile(call, arena, gather);

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
        return gather_tile(call, arena, gather);

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
    Status status = gather_tiles(call, arena, first);
    return status == STATUS_OK ? gather_tiles(call, arena, second) : status;
}

constexpr int64_t LEAST_ARENA_BYTES = 16 << 10, ASK_ABOVE_BYTES = 64 << 20;

/* As much memory as the call wants, or as much as there is. */
static Status open_arena(Arena *arena, int device, int64_t wanted)
{
    arena->bytes = wanted;
    if (wanted > ASK_ABOVE_BYTES) {
        int64_t available;
        Status status = device_memory_available(device, &available);
        if (status != STATUS_OK) return status;
        available -= available / 10;
        if (arena->bytes > available) arena->bytes = available / ALIGNMENT * ALIGNMENT;
        if (arena->bytes < LEAST_ARENA_BYTES) arena->bytes = LEAST_ARENA_BYTES;
    }
    for (;;) {
        void *memory;
        Status status = device_allocate(device, arena->bytes + ALIGNMENT, arena->stream, &memory);
        if (status == STATUS_OK) {
            arena->memory = static_cast<char *>(memory);
            arena->first_bad = reinterpret_cast<Position *>(arena->memory + arena->bytes);
        }
        if (status != STATUS_MEMORY_ERROR || arena->bytes <= LEAST_ARENA_BYTES) return status;
        arena->bytes = aligned(arena->bytes / 2);
        if (arena->bytes < LEAST_ARENA_BYTES) arena->bytes = LEAST_ARENA_BYTES;
    }
}

static Status gather_on_current_device(const Call *call, const Gather &gather, int64_t index_count)
{
    const int64_t rows = gather.row_bytes > 0 ? gather_rows(gather) : 0;
    const int64_t whole = rows > 0 ? aligned(table_bytes(gather)) + bytes_beside_table(gather)
                                   : aligned(index_count * gather.index_bytes);
    if (rows == 0 && (index_count == 0 || gather.mode != MODE_RAISE)) return STATUS_OK;

    Arena arena = {};
    arena.stream = call->stream;
    Status status = open_arena(&arena, call->device, whole);
    if (status != STATUS_OK) return status;
    /* A single tile is checked as it is gathered, before it is written to the host. */
    if (gather.mode == MODE_RAISE && (rows == 0 || arena.bytes < whole))
        status = check_all_indices(call, gather, &arena, index_count);
    if (status == STATUS_OK && rows > 0) status = gather_tiles(call, &arena, gather);
    /* Whatever happened, nothing may still be at work on the caller's memory. */
    const Failure first = status == STATUS_OK ? Failure() : *last_failure();
    Status last = stream_synchronize(arena.stream);
    device_free(call->device, arena.memory, arena.stream);
    if (status == STATUS_OK) return last;
    return fail_cuda(status, first.cuda_code, first.cuda_name, first.text);
}

Status gather_on_cuda(const Call *call, const Gather &gather, int64_t index_count)
{
    int previous;
    Status status = device_enter(call->device, &previous);
    if (status != STATUS_OK) return status;
    status = gather_on_current_device(call, gather, index_count);
    device_leave(call->device, previous);
    return status;
}

#else

Status gather_on_cuda(const Call *, const Gather &, int64_t)
{
    int count;
    return cuda_device_count(&count);
}

#endif
