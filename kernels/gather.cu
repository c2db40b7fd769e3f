/* gather, take and take_along_axis: out[...] = x[at(index)], a row of bytes at a time.
 *
 * One description serves all three. The output is a nest of loops; each loop moves a pointer into
 * out, and perhaps one into x and one into the indices:
 *
 *     gather along an axis     loops over x's outer dimensions    move out, x
 *                              loops over the indices             move out, indices
 *                              loops over x's inner dimensions    move out, x
 *     take_along_axis          loops over all dimensions          move out, x and indices
 *                              but the axis                       moves out, indices
 *
 * and the index itself moves x along the axis. Loops that lie next to each other in all three
 * arrays become one, and the contiguous tail becomes a row of bytes, so that gathering rows from a
 * C-ordered table ends up as one loop over rows, whatever its dtype and number of dimensions.
 *
 * Both backends walk this description: the CPU on the caller's memory as it lies, the GPU on packed
 * copies, tile by tile where they do not fit. */
#include "common.cuh"
#include "transfer.cuh"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Loop {
    int64_t count;
    int64_t out, x, index; /* strides in bytes */
};

struct Gather {
    char *out;
    char *x;
    char *indices; /* C-contiguous */
    Dtype index_dtype;
    int64_t index_bytes;
    int64_t row_bytes;
    int ndim; /* at least 1 */
    Loop loops[GPUOPS_MAX_DIMS];
    int64_t axis_size;
    int axis_before; /* the loop before which the axis stands in x */
    int axis_ndim;   /* more than 1 only for a strided array that counts as flattened */
    int64_t axis_counts[GPUOPS_MAX_DIMS];
    int64_t axis_strides[GPUOPS_MAX_DIMS];
    Mode mode;
    const char *fill; /* one row */
};

template <class Index>
HOST_DEVICE inline bool is_negative(Index index)
{
    const bool is_signed = static_cast<Index>(-1) < static_cast<Index>(1);
    return is_signed && index < static_cast<Index>(is_signed ? 0 : 1);
}

/* The place along the axis that an index means, or -1 where it means none. One unsigned comparison
 * sees both ends; the remainder makes wrap take the same time for any index. */
template <class Index>
HOST_DEVICE inline int64_t place_of(Index index, int64_t size, Mode mode)
{
    uint64_t place = static_cast<uint64_t>(index);
    const uint64_t count = static_cast<uint64_t>(size);
    if (place < count) return static_cast<int64_t>(place);
    const bool negative = is_negative(index);
    switch (mode) {
    case MODE_CLIP:
        return negative ? 0 : size - 1;
    case MODE_WRAP:
        if (!negative) return static_cast<int64_t>(place % count);
        return size - 1 - static_cast<int64_t>(~place % count);
    default:
        if (!negative) return -1;
        place += count;
        return place < count ? static_cast<int64_t>(place) : -1;
    }
}

/* Calls function with a zero of the type that the dtype names. */
template <class Function>
static void with_index_type(Dtype dtype, const Function &function)
{
    switch (dtype) {
    case DTYPE_INT8:
        return function(int8_t());
    case DTYPE_INT16:
        return function(int16_t());
    case DTYPE_INT32:
        return function(int32_t());
    case DTYPE_UINT8:
        return function(uint8_t());
    case DTYPE_UINT16:
        return function(uint16_t());
    case DTYPE_UINT32:
        return function(uint32_t());
    case DTYPE_UINT64:
        return function(uint64_t());
    default:
        return function(int64_t());
    }
}

/* NumPy's text, with the index as the caller wrote it. */
static Status index_error(const Call *call, const Gather &gather, const void *index)
{
    char text[24];
    with_index_type(gather.index_dtype, [&](auto zero) {
        memcpy(&zero, index, sizeof zero);
        if (static_cast<decltype(zero)>(-1) < 0)
            snprintf(text, sizeof text, "%lld", static_cast<long long>(zero));
        else
            snprintf(text, sizeof text, "%llu", static_cast<unsigned long long>(zero));
    });
    return fail(STATUS_INDEX_ERROR, "index %s is out of bounds for axis %d with size %lld", text,
                call->axis, static_cast<long long>(gather.axis_size));
}

/* Making the description. */

static void add_loop(Gather *gather, int64_t count, int64_t out, int64_t x, int64_t index)
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

static void end_loops(Gather *gather)
{
    if (gather->ndim > 0) {
        Loop last = gather->loops[gather->ndim - 1];
        if (last.index == 0 && last.x == gather->row_bytes && last.out == gather->row_bytes) {
            gather->row_bytes *= last.count;
            gather->ndim--;
        }
    }
    if (gather->ndim == 0) gather->loops[gather->ndim++] = {1, 0, 0, 0};
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

static int64_t gather_rows(const Gather &gather)
{
    int64_t rows = 1;
    for (int i = 0; i < gather.ndim; i++) rows *= gather.loops[i].count;
    return rows;
}

/* How far along the axis a place lies, in bytes. */
static inline int64_t axis_offset(const Gather &gather, int64_t place)
{
    if (gather.axis_ndim == 1) return place * gather.axis_strides[0];
    int64_t offset = 0;
    for (int i = gather.axis_ndim - 1; i >= 0; i--) {
        offset += place % gather.axis_counts[i] * gather.axis_strides[i];
        place /= gather.axis_counts[i];
    }
    return offset;
}

/* The CPU backend. */

constexpr int64_t GRAIN_BYTES = 512 << 10; /* what is worth waking a thread for */
constexpr int64_t PREFETCH_ABOVE_BYTES = 8 << 20;
constexpr int64_t PREFETCH_DISTANCE = 24; /* rows */
constexpr size_t PREFETCH_BYTES = 256;    /* the rest of a row follows by itself */

struct Work {
    const Gather *gather;
    bool prefetch; /* the table is too large for the caches */
    pthread_mutex_t lock;
    const char *bad; /* the first index that is out of bounds, or NULL */
    char value[8];   /* what it was when it was read */
};

static void note_bad(Work *work, const char *index, const void *value)
{
    pthread_mutex_lock(&work->lock);
    if (work->bad == NULL || index < work->bad) {
        work->bad = index;
        memcpy(work->value, value, (size_t)work->gather->index_bytes);
    }
    pthread_mutex_unlock(&work->lock);
}

/* Each index is read once, into a register, and what was checked is what is used: another thread
 * may write to the indices meanwhile. */
template <class Index>
static inline Index read_index(const char *at)
{
    Index index;
    memcpy(&index, at, sizeof index);
    return index;
}

/* One stretch of the innermost loop in mode "raise", along an axis of one stride. PACKED says that
 * indices and rows follow one another, which lets the compiler see the strides. */
template <class Index, int WIDTH, bool PACKED>
static bool copy_checked(Work *work, const Loop &loop, char *out, const char *x,
                         const char *indices, int64_t count)
{
    const Gather &gather = *work->gather;
    const size_t row_bytes = WIDTH > 0 ? WIDTH : static_cast<size_t>(gather.row_bytes);
    const uint64_t size = static_cast<uint64_t>(gather.axis_size);
    const int64_t axis_stride = axis_offset(gather, 1);
    const int64_t out_step = PACKED ? static_cast<int64_t>(row_bytes) : loop.out;
    const int64_t index_step = PACKED ? static_cast<int64_t>(sizeof(Index)) : loop.index;
    const int64_t x_step = PACKED ? 0 : loop.x;
    const int64_t ahead = work->prefetch ? PREFETCH_DISTANCE : count;
    for (int64_t i = 0; i < count; i++) {
        if (i + ahead < count) {
            /* A prefetch cannot fault, so this index may be anything. */
            Index index = read_index<Index>(indices + (i + ahead) * index_step);
            uintptr_t row = reinterpret_cast<uintptr_t>(x) +
                            static_cast<uint64_t>(index) * static_cast<uint64_t>(axis_stride);
            for (size_t byte = 0; byte < row_bytes && byte < PREFETCH_BYTES; byte += 64)
                __builtin_prefetch(reinterpret_cast<const char *>(row + byte));
        }
        const Index index = read_index<Index>(indices + i * index_step);
        uint64_t place = static_cast<uint64_t>(index);
        if (is_negative(index)) place += size;
        if (__builtin_expect(place >= size, 0)) {
            note_bad(work, indices + i * index_step, &index);
            return false;
        }
        memcpy(out + i * out_step, x + i * x_step + static_cast<int64_t>(place) * axis_stride,
               row_bytes);
    }
    return true;
}

/* Any stretch in any mode. */
template <class Index>
static bool copy_any(Work *work, const Loop &loop, char *out, const char *x, const char *indices,
                     int64_t count)
{
    const Gather &gather = *work->gather;
    /* Where the loop does not move the indices, one serves the whole stretch. */
    const int64_t same = loop.index == 0 ? count : 1;
    for (int64_t i = 0; i < count; i += same) {
        const Index index = read_index<Index>(indices + i * loop.index);
        const int64_t place = place_of(index, gather.axis_size, gather.mode);
        if (place < 0 && gather.mode != MODE_FILL) {
            note_bad(work, indices + i * loop.index, &index);
            return false;
        }
        const char *row = place < 0 ? gather.fill : x + i * loop.x + axis_offset(gather, place);
        copy_items(out + i * loop.out, loop.out, row, place < 0 ? 0 : loop.x, same,
                   gather.row_bytes);
    }
    return true;
}

/* The rows begin..end of the output, in C order. WIDTH is the length of a row, or 0 for any. */
template <class Index, int WIDTH>
static void gather_range(void *context, int64_t begin, int64_t end)
{
    Work *work = static_cast<Work *>(context);
    const Gather &gather = *work->gather;
    const int inner = gather.ndim - 1;
    const Loop loop = gather.loops[inner];
    auto copy = copy_any<Index>;
    if (gather.mode == MODE_RAISE && gather.axis_ndim <= 1 && loop.index != 0)
        copy = loop.out == gather.row_bytes && loop.index == (int64_t)sizeof(Index) && loop.x == 0
                   ? copy_checked<Index, WIDTH, true>
                   : copy_checked<Index, WIDTH, false>;

    int64_t position[GPUOPS_MAX_DIMS];
    char *out = gather.out;
    const char *x = gather.x, *indices = gather.indices;
    int64_t first = begin % loop.count, rest = begin / loop.count;
    for (int i = inner - 1; i >= 0; i--) {
        position[i] = rest % gather.loops[i].count;
        rest /= gather.loops[i].count;
        out += position[i] * gather.loops[i].out;
        x += position[i] * gather.loops[i].x;
        indices += position[i] * gather.loops[i].index;
    }
    for (;;) {
        int64_t count = loop.count - first;
        if (count > end - begin) count = end - begin;
        if (!copy(work, loop, out + first * loop.out, x + first * loop.x,
                  indices + first * loop.index, count))
            return;
        begin += count;
        if (begin == end) return;
        first = 0;
        for (int i = inner - 1; i >= 0; i--) { /* on to the next stretch */
            const Loop &outer = gather.loops[i];
            out += outer.out;
            x += outer.x;
            indices += outer.index;
            if (++position[i] < outer.count) break;
            position[i] = 0;
            out -= outer.count * outer.out;
            x -= outer.count * outer.x;
            indices -= outer.count * outer.index;
        }
    }
}

template <class Index>
static RangeFunction gather_range_for(int64_t row_bytes)
{
    switch (row_bytes) {
    case 1:
        return gather_range<Index, 1>;
    case 2:
        return gather_range<Index, 2>;
    case 4:
        return gather_range<Index, 4>;
    case 8:
        return gather_range<Index, 8>;
    case 16:
        return gather_range<Index, 16>;
    case 32:
        return gather_range<Index, 32>;
    case 64:
        return gather_range<Index, 64>;
    default:
        return gather_range<Index, 0>;
    }
}

template <class Index>
static void check_range(void *context, int64_t begin, int64_t end)
{
    Work *work = static_cast<Work *>(context);
    const Gather &gather = *work->gather;
    for (int64_t i = begin; i < end; i++) {
        const char *place = gather.indices + i * (int64_t)sizeof(Index);
        Index index;
        memcpy(&index, place, sizeof index);
        if (place_of(index, gather.axis_size, MODE_RAISE) < 0) {
            note_bad(work, place, &index);
            return;
        }
    }
}

static Status gather_on_cpu(const Call *call, const Gather &gather, int64_t index_count)
{
    double table_bytes = (double)gather.axis_size * (double)gather.row_bytes;
    for (int i = 0; i < gather.ndim; i++)
        if (gather.loops[i].x != 0) table_bytes *= (double)gather.loops[i].count;
    Work work = {&gather, table_bytes > PREFETCH_ABOVE_BYTES, PTHREAD_MUTEX_INITIALIZER, NULL, ""};

    with_index_type(gather.index_dtype, [&](auto zero) {
        using Index = decltype(zero);
        int64_t rows = gather_rows(gather);
        /* The caller's own memory is not to be touched before all indices are known to be good. */
        if (gather.mode == MODE_RAISE && (!call->out_is_fresh || rows * gather.row_bytes == 0))
            parallel_for(index_count, GRAIN_BYTES / (int64_t)sizeof(Index), check_range<Index>,
                         &work);
        if (work.bad == NULL && gather.row_bytes > 0)
            parallel_for(rows, GRAIN_BYTES / (gather.row_bytes + 64) + 1,
                         gather_range_for<Index>(gather.row_bytes), &work);
    });
    pthread_mutex_destroy(&work.lock);
    return work.bad == NULL ? STATUS_OK : index_error(call, gather, work.value);
}

#ifdef __CUDACC__

/* The GPU backend. All operands are packed in device memory. */

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
 * Only the places begin..end of the axis are in memory; rows from elsewhere are left as they are.
 */
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

/* Rows are packed, so their length alone decides how wide a vector may be. */
static Status launch_gather_rows(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                                 void *stream)
{
    switch (gather.row_bytes & -gather.row_bytes) {
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

static char *take(Arena *arena, int64_t bytes)
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

/* What a tile takes besides the table. */
static int64_t bytes_beside_table(const Gather &gather)
{
    int64_t out = box_items(out_box(gather)) * gather.row_bytes;
    int64_t indices = box_items(index_box(gather)) * gather.index_bytes;
    return aligned(indices) + aligned(out) + (gather.mode == MODE_FILL ? aligned(out) : 0);
}

static int64_t table_bytes(const Gather &gather)
{
    return box_items(table_box(gather)) * gather.row_bytes;
}

/* The loops as they are on the device, where everything is packed. */
static void describe_on_device(const Gather &gather, int64_t axis_count, Gather *packed)
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
        x[i] = loop.x == 0 ? 0 : x_stride;
        index[i] = loop.index == 0 ? 0 : index_stride;
        if (loop.x != 0) x_stride *= loop.count;
        if (loop.index != 0) index_stride *= loop.count;
    }

    packed->ndim = 0;
    packed->row_bytes = gather.row_bytes;
    packed->axis_strides[0] = axis_stride;
    int64_t out_stride = gather_rows(gather) * gather.row_bytes;
    for (int i = 0; i < gather.ndim; i++) {
        out_stride /= gather.loops[i].count;
        add_loop(packed, gather.loops[i].count, out_stride, x[i], index[i]);
    }
    end_loops(packed);
}

static Status upload_fill(const Gather &gather, char *device, int64_t row_bytes, void *stream)
{
    char *row = static_cast<char *>(malloc((size_t)row_bytes));
    if (row == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for a row of fill_value",
                    (long long)row_bytes);
    for (int64_t at = 0; at < row_bytes; at += gather.row_bytes)
        memcpy(row + at, gather.fill, (size_t)gather.row_bytes);
    Status status = copy_to_device(device, row, row_bytes, stream);
    if (status == STATUS_OK) status = stream_synchronize(stream);
    free(row);
    return status;
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
    const Box table = table_box(gather);
    const int64_t whole = table_bytes(gather);
    const int64_t beside = bytes_beside_table(gather);
    int64_t axis_step = gather.axis_size; /* places of the axis that are in memory at a time */
    if (aligned(whole) + beside > arena->bytes)
        axis_step = (arena->bytes - beside - ALIGNMENT) / (whole / gather.axis_size);
    const int64_t place_bytes = gather.axis_size > 0 ? whole / gather.axis_size : 0;

    Gather packed;
    describe_on_device(gather, axis_step, &packed);
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
    char *x = take(arena, axis_step * place_bytes);
    const Box indices = index_box(gather), out = out_box(gather);
    char *device_indices = take(arena, box_items(indices) * gather.index_bytes);
    device.out = take(arena, device.rows * device.row_bytes);
    device.x = x;
    device.indices = device_indices;
    device.fill = NULL;

    Status status = box_upload(indices, 0, box_items(indices), device_indices, arena->stream);
    if (status == STATUS_OK && gather.mode == MODE_FILL) {
        char *fill = take(arena, device.row_bytes);
        device.fill = fill;
        status = upload_fill(gather, fill, device.row_bytes, arena->stream);
    }
    if (status == STATUS_OK && gather.mode == MODE_RAISE)
        status = clear_on_device(arena->first_bad, 0xFF, sizeof(Position), arena->stream);

    for (int64_t begin = 0; status == STATUS_OK; begin += axis_step) {
        int64_t end = begin + axis_step < gather.axis_size ? begin + axis_step : gather.axis_size;
        device.axis_begin = begin;
        device.axis_end = end;
        if (!same_table(*arena, table, begin, end)) {
            /* Parts of the axis are taken only where it is all that x consists of. */
            const bool all = axis_step == gather.axis_size;
            status =
                box_upload(table, all ? 0 : begin, all ? box_items(table) : end, x, arena->stream);
            arena->table = table;
            arena->table_begin = begin;
            arena->table_end = end;
        }
        if (status == STATUS_OK)
            status = launch_gather_rows(device, packed.ndim, loops, arena->stream);
        if (end >= gather.axis_size) break;
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
    else if (gather.axis_size > 0 && table / gather.axis_size <= half)
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
        if (gather.fill != NULL) second.fill += bytes;
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
    }
    for (;;) {
        void *memory;
        Status status = device_allocate(device, arena->bytes + ALIGNMENT, arena->stream, &memory);
        arena->memory = static_cast<char *>(memory);
        arena->first_bad = reinterpret_cast<Position *>(arena->memory + arena->bytes);
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
    Status last = stream_synchronize(arena.stream);
    device_free(call->device, arena.memory, arena.stream);
    return status == STATUS_OK ? last : status;
}

static Status gather_on_cuda(const Call *call, const Gather &gather, int64_t index_count)
{
    int previous;
    Status status = device_enter(call->device, &previous);
    if (status != STATUS_OK) return status;
    status = gather_on_current_device(call, gather, index_count);
    device_leave(call->device, previous);
    return status;
}

#else

static Status gather_on_cuda(const Call *call, const Gather &, int64_t)
{
    int count;
    (void)call;
    return cuda_device_count(&count);
}

#endif

static bool is_packed(const View *view)
{
    int64_t stride = view->item_bytes;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != stride) return false;
        stride *= view->shape[i];
    }
    return true;
}

static Status run(const Call *call, Gather *gather)
{
    const View *indices = &call->inputs[1];
    int64_t index_count = 1;
    for (int i = 0; i < indices->ndim; i++) index_count *= indices->shape[i];

    Status status = STATUS_OK;
    char *packed = NULL, *fill = NULL;
    if (index_count > 0 && !is_packed(indices)) {
        packed = static_cast<char *>(malloc((size_t)(index_count * gather->index_bytes)));
        if (packed != NULL) {
            Box box = {gather->indices, gather->index_bytes, 0, {}, {}};
            for (int i = 0; i < indices->ndim; i++)
                box_append(&box, indices->shape[i], indices->strides[i]);
            box_pack(box, packed);
            gather->indices = packed;
        } else {
            status = fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for the indices",
                          (long long)(index_count * gather->index_bytes));
        }
    }
    if (gather->mode == MODE_FILL && gather->row_bytes > 0) {
        const int64_t item_bytes = call->inputs[0].item_bytes;
        fill = static_cast<char *>(malloc((size_t)gather->row_bytes));
        gather->fill = fill;
        if (fill != NULL)
            for (int64_t at = 0; at < gather->row_bytes; at += item_bytes)
                memcpy(fill + at, call->fill, (size_t)item_bytes);
        else
            status =
                fail(STATUS_MEMORY_ERROR, "out of host memory: %lld bytes for a row of fill_value",
                     (long long)gather->row_bytes);
    }
    if (status == STATUS_OK)
        status = call->device == DEVICE_CPU ? gather_on_cpu(call, *gather, index_count)
                                            : gather_on_cuda(call, *gather, index_count);
    free(packed);
    free(fill);
    return status;
}

Status run_gather(Call *call)
{
    Gather gather;
    describe_gather(call, &gather);
    return run(call, &gather);
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
    Gather gather;
    describe_along_axis(call, &gather);
    return run(call, &gather);
}

/* Plans: what the caller can get wrong, and the shape of the result. */

static const char *const TO_INTEGERS = "convert them with indices.astype(numpy.int64)";

static Status check_not_mask(const View *indices)
{
    if (indices->dtype != DTYPE_BOOL) return STATUS_OK;
    return fail(STATUS_TYPE_ERROR,
                "indices has dtype bool, which is a mask and not positions: use x[mask], or pass "
                "numpy.flatnonzero(mask)");
}

static Status check_axis(Call *call)
{
    const int ndim = call->inputs[0].ndim;
    /* As in NumPy, a 0-d array counts as an axis of one element. */
    if (ndim == 0 && (call->axis == 0 || call->axis == -1)) call->axis_is_none = true;
    if (call->axis_is_none) {
        call->axis = 0;
        return STATUS_OK;
    }
    if (call->axis < -ndim || call->axis >= ndim)
        return fail(STATUS_AXIS_ERROR, "axis %d is out of bounds for array of dimension %d",
                    call->axis, ndim == 0 ? 1 : ndim);
    if (call->axis < 0) call->axis += ndim;
    return STATUS_OK;
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

static Status plan_shape(Call *call)
{
    const View *x = &call->inputs[0], *indices = &call->inputs[1];
    Status status = check_axis(call);
    if (status != STATUS_OK) return status;

    const int axis_begin = call->axis_is_none ? 0 : call->axis;
    const int axis_end = call->axis_is_none ? x->ndim : call->axis + 1;
    const int ndim = x->ndim - (axis_end - axis_begin) + indices->ndim;
    if (ndim > GPUOPS_MAX_DIMS)
        return fail(STATUS_VALUE_ERROR,
                    "number of dimensions must be within [0, %d]: the result would have %d",
                    GPUOPS_MAX_DIMS, ndim);
    View *out = &call->out;
    out->dtype = x->dtype;
    out->item_bytes = x->item_bytes;
    out->ndim = 0;
    append_shape(out, x, 0, axis_begin);
    append_shape(out, indices, 0, indices->ndim);
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
    Status status = check_not_mask(indices);
    if (status != STATUS_OK) return status;
    if (!dtype_is_integer(indices->dtype))
        return fail(STATUS_INDEX_ERROR,
                    "arrays used as indices must be of integer (or boolean) type; indices has "
                    "dtype %s: %s",
                    indices->dtype_name, TO_INTEGERS);
    status = plan_shape(call);
    if (status != STATUS_OK) return status;
    if ((call->mode == MODE_WRAP || call->mode == MODE_CLIP) && takes_from_nothing(call))
        return fail_empty_take();
    return STATUS_OK;
}

Status plan_take(Call *call)
{
    const View *indices = &call->inputs[1];
    Status status = check_not_mask(indices);
    if (status != STATUS_OK) return status;
    if (!dtype_is_integer(indices->dtype))
        return fail(STATUS_TYPE_ERROR,
                    "Cannot cast array data from dtype('%s') to dtype('int64') according to the "
                    "rule 'safe'; indices must be integers: %s",
                    indices->dtype_name, TO_INTEGERS);
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
    Status status = check_not_mask(indices);
    if (status != STATUS_OK) return status;
    if (!dtype_is_integer(indices->dtype))
        return fail(STATUS_INDEX_ERROR, "`indices` must be an integer array; it has dtype %s: %s",
                    indices->dtype_name, TO_INTEGERS);
    View *out = &call->out;
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
        if (call->axis < -x->ndim || call->axis >= x->ndim)
            return fail(STATUS_AXIS_ERROR, "axis %d is out of bounds for array of dimension %d",
                        call->axis, x->ndim);
        if (call->axis < 0) call->axis += x->ndim;
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
    if ((call->mode == MODE_WRAP || call->mode == MODE_CLIP) && takes_from_nothing(call))
        return fail_empty_take();
    return STATUS_OK;
}
