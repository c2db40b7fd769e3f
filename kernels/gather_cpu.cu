/* gather on the CPU: every worker takes stretches of the output, and reads x where it lies. */
#include "gather.cuh"
#include "streamed.cuh"

#include <string.h>

constexpr int64_t GRAIN_BYTES = 512 << 10; /* what is worth waking a thread for */
constexpr int64_t PREFETCH_ABOVE_BYTES = 8 << 20;
/* So far ahead of its use memory is asked for: rows, or of longer ones as many as that is. */
constexpr int64_t PREFETCH_DISTANCE = 24, PREFETCH_DISTANCE_BYTES = 8 << 10;
constexpr size_t PREFETCH_BYTES = 4 << 10; /* the rest of a row follows by itself */
/* Around the caches go such rows, of such results. Of shorter ones a line is written by several
 * stores, between which others take its place. */
constexpr int64_t LEAST_STREAMED_ROW = 256, LEAST_STREAMED_BYTES = 32 << 20;

static void note_bad(MadeRows *work, const char *index, const void *value)
{
    pthread_mutex_lock(&work->lock);
    if (work->bad == NULL || index < work->bad) {
        work->bad = index;
        memcpy(work->value, value, (size_t)work->gather->index_bytes);
    }
    pthread_mutex_unlock(&work->lock);
}

/* Rows by groups, whose indices are looked at together: that takes half of the time. Ends before
 * the first group with an index beyond the axis, and returns how many rows that were. */
template <class Index, int WIDTH>
static int64_t copy_groups(char *out, const char *x, const char *indices, int64_t axis_stride,
                           uint64_t size, uint64_t from_end, int64_t count)
{
    constexpr int GROUP = 8;
    int64_t i = 0;
    for (; i + GROUP <= count; i += GROUP) {
        uint64_t places[GROUP];
        bool is_beyond = false;
        for (int k = 0; k < GROUP; k++) {
            const char *at = indices + (i + k) * (int64_t)sizeof(Index);
            places[k] = static_cast<uint64_t>(load_unaligned<Index>(at));
            is_beyond |= places[k] >= size;
        }
        if (is_beyond) { /* or negative, which is a large number here */
            for (int k = 0; k < GROUP; k++) {
                if (is_negative(static_cast<Index>(places[k]))) places[k] += from_end;
                if (places[k] >= size) return i;
            }
        }
        for (int k = 0; k < GROUP; k++)
            memcpy(out + (i + k) * WIDTH, x + static_cast<int64_t>(places[k]) * axis_stride, WIDTH);
    }
    return i;
}

static int64_t rows_ahead(int64_t row_bytes)
{
    const int64_t rows = PREFETCH_DISTANCE_BYTES / row_bytes + 1;
    return rows < PREFETCH_DISTANCE ? rows : PREFETCH_DISTANCE;
}

/* One stretch of an innermost loop that moves the indices, along an axis of one stride. PACKED says
 * that indices and rows follow one another, which lets the compiler see the strides. */
template <class Index, int WIDTH, bool PACKED>
static bool copy_rows(MadeRows *work, const Loop &loop, char *out, const char *x,
                      const char *indices, int64_t count)
{
    const Gather &gather = *work->gather;
    const Mode mode = gather.mode;
    const size_t row_bytes = WIDTH > 0 ? WIDTH : static_cast<size_t>(gather.row_bytes);
    const uint64_t size = static_cast<uint64_t>(gather.axis_size);
    const uint64_t from_end = mode == MODE_RAISE || mode == MODE_FILL ? size : 0;
    const int64_t axis_stride = axis_offset(gather, 1);
    const int64_t out_step = PACKED ? static_cast<int64_t>(row_bytes) : loop.out;
    const int64_t index_step = PACKED ? static_cast<int64_t>(sizeof(Index)) : loop.index;
    const int64_t x_step = PACKED ? 0 : loop.x;
    const int64_t ahead = work->prefetch ? rows_ahead((int64_t)row_bytes) : count;
    const bool streams = WIDTH == 0 && PACKED && work->streams && takes_words(out);
    int64_t i = 0;
    if (PACKED && WIDTH > 0 && !work->prefetch)
        i = copy_groups<Index, WIDTH>(out, x, indices, axis_stride, size, from_end, count);
    for (; i < count; i++) {
        if (i + ahead < count) {
            /* A prefetch cannot fault, so this index may be anything. */
            Index index = load_unaligned<Index>(indices + (i + ahead) * index_step);
            uintptr_t row = reinterpret_cast<uintptr_t>(x) +
                            static_cast<uint64_t>(index) * static_cast<uint64_t>(axis_stride);
            for (size_t byte = 0; byte < row_bytes && byte < PREFETCH_BYTES; byte += 64)
                __builtin_prefetch(reinterpret_cast<const char *>(row + byte));
        }
        const Index index = load_unaligned<Index>(indices + i * index_step);
        uint64_t place = static_cast<uint64_t>(index);
        if (is_negative(index)) place += from_end;
        const char *row = gather.fill;
        if (__builtin_expect(place >= size, 0)) {
            const int64_t found = place_of(index, gather.axis_size, mode);
            if (found >= 0) {
                row = x + i * x_step + found * axis_stride;
            } else if (mode != MODE_FILL) {
                note_bad(work, indices + i * index_step, &index);
                if (row == NULL) return false;
            }
        } else {
            row = x + i * x_step + static_cast<int64_t>(place) * axis_stride;
        }
        if (streams)
            stream_words(out + i * out_step, row, (int64_t)row_bytes);
        else
            memcpy(out + i * out_step, row, row_bytes);
    }
    return true;
}

/* Any other stretch. */
template <class Index>
static bool copy_any(MadeRows *work, const Loop &loop, char *out, const char *x,
                     const char *indices, int64_t count)
{
    const Gather &gather = *work->gather;
    /* Where the loop does not move the indices, one serves the whole stretch. */
    const int64_t same = loop.index == 0 ? count : 1;
    for (int64_t i = 0; i < count; i += same) {
        const Index index = load_unaligned<Index>(indices + i * loop.index);
        const int64_t place = place_of(index, gather.axis_size, gather.mode);
        if (place < 0 && gather.mode != MODE_FILL) {
            note_bad(work, indices + i * loop.index, &index);
            if (gather.fill == NULL) return false;
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
    MadeRows *work = static_cast<MadeRows *>(context);
    const Gather &gather = *work->gather;
    const int inner = gather.ndim - 1;
    const Loop loop = gather.loops[inner];
    auto copy = copy_any<Index>;
    if (gather.axis_ndim <= 1 && loop.index != 0)
        copy = loop.out == gather.row_bytes && loop.index == (int64_t)sizeof(Index) && loop.x == 0
                   ? copy_rows<Index, WIDTH, true>
                   : copy_rows<Index, WIDTH, false>;

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
            break;
        begin += count;
        if (begin == end) break;
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
    if (work->streams) end_streaming();
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
    MadeRows *work = static_cast<MadeRows *>(context);
    const Gather &gather = *work->gather;
    const char *first = gather.indices + begin * (int64_t)sizeof(Index);
    if (!has_bad<Index>(first, end - begin, static_cast<uint64_t>(gather.axis_size))) return;
    for (int64_t i = begin; i < end; i++) {
        const char *place = gather.indices + i * (int64_t)sizeof(Index);
        const Index index = load_unaligned<Index>(place);
        if (place_of(index, gather.axis_size, MODE_RAISE) < 0) {
            note_bad(work, place, &index);
            return;
        }
    }
}

static bool is_beyond_caches(const Gather &gather)
{
    double bytes = (double)gather.axis_size * (double)gather.row_bytes;
    for (int i = 0; i < gather.ndim; i++)
        if (gather.loops[i].x != 0) bytes *= (double)gather.loops[i].count;
    return bytes > PREFETCH_ABOVE_BYTES;
}

static bool is_streamed(const Gather &gather)
{
    const int64_t row_bytes = gather.row_bytes;
    return row_bytes >= LEAST_STREAMED_ROW && row_bytes % STREAMED_WORD == 0 &&
           gather_rows(gather) > LEAST_STREAMED_BYTES / row_bytes;
}

void open_rows(MadeRows *rows, const Gather *gather)
{
    *rows = {gather, is_beyond_caches(*gather), false, PTHREAD_MUTEX_INITIALIZER, NULL, ""};
}

/* A part of one row, at first where it lies in x, and in the fill. */
static void make_part(MadeRows *whole, int64_t row, int64_t offset, int64_t bytes, char *place)
{
    Gather part = *whole->gather;
    part.x += offset;
    if (part.fill != NULL) part.fill += offset;
    part.row_bytes = bytes;
    /* The loops lead to the row, and a packed result's begin is as far before the place. */
    part.out = place - row * whole->gather->row_bytes;
    MadeRows made = {&part, false, false, PTHREAD_MUTEX_INITIALIZER, NULL, ""};
    with_index_type(part.index_dtype,
                    [&](auto zero) { gather_range<decltype(zero), 0>(&made, row, row + 1); });
    if (made.bad != NULL) note_bad(whole, made.bad, made.value);
    pthread_mutex_destroy(&made.lock);
}

void make_rows(void *context, int64_t begin, int64_t end, char *place)
{
    MadeRows *whole = static_cast<MadeRows *>(context);
    const int64_t row_bytes = whole->gather->row_bytes;
    const int64_t head = begin % row_bytes;
    if (head > 0) {
        const int64_t rest = row_bytes - head;
        const int64_t bytes = rest < end - begin ? rest : end - begin;
        make_part(whole, begin / row_bytes, head, bytes, place);
        begin += bytes;
        place += bytes;
    }
    const int64_t rows = (end - begin) / row_bytes;
    if (rows > 0) {
        Gather stretch = *whole->gather;
        stretch.out = place - begin;
        MadeRows made = {&stretch, whole->prefetch, false, PTHREAD_MUTEX_INITIALIZER, NULL, ""};
        with_index_type(stretch.index_dtype, [&](auto zero) {
            gather_range_for<decltype(zero)>(row_bytes)(&made, begin / row_bytes,
                                                        begin / row_bytes + rows);
        });
        if (made.bad != NULL) note_bad(whole, made.bad, made.value);
        pthread_mutex_destroy(&made.lock);
        begin += rows * row_bytes;
        place += rows * row_bytes;
    }
    if (begin < end) make_part(whole, begin / row_bytes, 0, end - begin, place);
}

struct Scan {
    const Gather *gather;
    const char *indices;
    char *copy;
    pthread_mutex_t lock;
    int64_t first, last;
};

/* In pieces that are still in the cache when they are looked at. What is copied is what counts:
 * another thread may write to the indices meanwhile. */
template <class Index>
static void scan_range(void *context, int64_t begin, int64_t end)
{
    constexpr int64_t PIECE = (16 << 10) / sizeof(Index);
    Scan *scan = static_cast<Scan *>(context);
    const Gather &gather = *scan->gather;
    int64_t first = INT64_MAX, last = -1;
    for (; begin < end; begin += PIECE) {
        const int64_t count = end - begin < PIECE ? end - begin : PIECE;
        const int64_t offset = begin * (int64_t)sizeof(Index);
        if (scan->copy != scan->indices)
            memcpy(scan->copy + offset, scan->indices + offset, (size_t)count * sizeof(Index));
        for (int64_t i = 0; i < count; i++) {
            const Index index = load_unaligned<Index>(scan->copy + offset + i * sizeof(Index));
            const int64_t place = place_of(index, gather.axis_size, gather.mode);
            if (place < 0) continue;
            if (place < first) first = place;
            if (place > last) last = place;
        }
    }
    pthread_mutex_lock(&scan->lock);
    if (first < scan->first) scan->first = first;
    if (last > scan->last) scan->last = last;
    pthread_mutex_unlock(&scan->lock);
}

void copy_and_scan(Gather *gather, const char *indices, int64_t count, char *copy)
{
    Scan scan = {gather, indices, copy, PTHREAD_MUTEX_INITIALIZER, INT64_MAX, -1};
    with_index_type(gather->index_dtype, [&](auto zero) {
        using Index = decltype(zero);
        parallel_for(count, GRAIN_BYTES / (int64_t)sizeof(Index), scan_range<Index>, &scan);
    });
    pthread_mutex_destroy(&scan.lock);
    gather->indices = copy;
    gather->first_place = scan.last < 0 ? 0 : scan.first;
    gather->end_place = scan.last < 0 ? 1 : scan.last + 1;
}

Status gather_on_cpu(const Call *call, const Gather &gather, int64_t index_count)
{
    MadeRows work;
    open_rows(&work, &gather);
    work.streams = is_streamed(gather);
    with_index_type(gather.index_dtype, [&](auto zero) {
        using Index = decltype(zero);
        int64_t rows = gather_rows(gather);
        /* The caller's own memory is not to be touched before all indices are known to be good. */
        if (gather.mode == MODE_RAISE && (!call->out_is_fresh || rows * gather.row_bytes == 0))
            parallel_for(index_count,
                         grain_of_cached(index_count, GRAIN_BYTES / (int64_t)sizeof(Index)),
                         check_range<Index>, &work);
        if (work.bad == NULL && gather.row_bytes > 0)
            parallel_for(rows,
                         work.prefetch
                             ? GRAIN_BYTES / (gather.row_bytes + 64) + 1
                             : grain_of_cached(rows, GRAIN_BYTES / (gather.row_bytes + 16) + 1),
                         gather_range_for<Index>(gather.row_bytes), &work);
    });
    pthread_mutex_destroy(&work.lock);
    return work.bad == NULL ? STATUS_OK
                            : index_error(call, gather.index_dtype, gather.axis_size, work.value);
}

template <int WIDTH>
static bool gather_few(const Few &few)
{
    const char *indices = reinterpret_cast<const char *>(few.indices);
    const int64_t size = few.size;
    int64_t i = copy_groups<int64_t, WIDTH>(few.packed, few.x, indices, few.stride, (uint64_t)size,
                                            (uint64_t)size, few.count);
    for (; i < few.count; i++) {
        const int64_t index = load_unaligned<int64_t>(indices + i * (int64_t)sizeof index);
        const int64_t place = place_of(index, size, MODE_RAISE);
        if (place < 0) return false;
        memcpy(few.packed + i * WIDTH, few.x + place * few.stride, WIDTH);
    }
    return true;
}

bool gather_briefly(const Few *few)
{
    return with_width(few->item_bytes,
                      [few](auto width) { return gather_few<decltype(width)::bytes>(*few); });
}
