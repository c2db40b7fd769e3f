/* scatter and scatter_add on the CPU, in C order for every element of x: the last write wins, and
 * sums are those of numpy.add.at, bit for bit. So that this holds with several workers, each has
 * parts of x to itself: positions before the axis where there are enough of them, else ranges of
 * the axis, whose elements are dealt out to it (scatter_ranges.cu) or, if they are long rows, among
 * which it looks for its own. */
#include "arithmetic.cuh"
#include "scatter_cpu.cuh"

#include <pthread.h>
#include <stdlib.h>

/* What is worth looking at all indices in each worker. */
constexpr int64_t PARTED_BYTES = 4 << 20;
constexpr int64_t LARGE_TABLE_BYTES = 1 << 20; /* more than a core's own cache */
constexpr int SUMS = 256;                      /* numbers of a row that are summed at once */

constexpr int BLOCK = 512; /* indices that are looked at before what they name is */

/* The places of a block of indices that lie in begin..end, and which of these indices they are. */
using FindPlaces = int (*)(const Scatter &, int64_t first, int count, int64_t begin, int64_t end,
                           int64_t *places, int *elements);

struct Work {
    const Scatter *scatter;
    FindPlaces find; /* for the type of the indices */
    int64_t ranges;  /* that the axis is cut into */
    bool prefetch;
    pthread_mutex_t lock;
    const char *bad; /* the first index that is out of bounds, or NULL */
    char value[8];   /* what it was when it was read */
    struct Entry *entries;
    int64_t entry_count;
};

/* Before anything is written. */
template <class Index>
static void check_range(void *context, int64_t begin, int64_t end)
{
    Work *work = static_cast<Work *>(context);
    const Scatter &scatter = *work->scatter;
    const char *first = scatter.indices + begin * (int64_t)sizeof(Index);
    if (!has_bad<Index>(first, end - begin, static_cast<uint64_t>(scatter.axis_size))) return;
    for (int64_t i = begin; i < end; i++) {
        const char *at = scatter.indices + i * (int64_t)sizeof(Index);
        const Index index = load_unaligned<Index>(at);
        if (place_of(index, scatter.axis_size, MODE_RAISE) >= 0) continue;
        pthread_mutex_lock(&work->lock);
        if (work->bad == NULL || at < work->bad) {
            work->bad = at;
            memcpy(work->value, &index, sizeof index);
        }
        pthread_mutex_unlock(&work->lock);
        return;
    }
}

static void outer_offsets(const Scatter &scatter, int64_t number, int64_t *x, int64_t *value)
{
    *x = *value = 0;
    for (int i = scatter.outer - 1; i >= 0; i--) {
        const ScatterLoop &loop = scatter.loops[i];
        *x += number % loop.count * loop.x;
        *value += number % loop.count * loop.value;
        number /= loop.count;
    }
}

/* What is done with the rows under one index. The innermost loop goes to the function as a whole,
 * with a count and the strides. */
template <class Function>
static void for_inner(const ScatterLoop *loops, int count, char *x, const char *value,
                      const Function &function)
{
    if (count == 0) return function(x, value, ScatterLoop{1, 0, 0});
    if (count == 1) return function(x, value, loops[0]);
    for (int64_t i = 0; i < loops[0].count; i++)
        for_inner(loops + 1, count - 1, x + i * loops[0].x, value + i * loops[0].value, function);
}

/* Rows, as they are written; WIDTH is the length of one in bytes, or 0 for any. */
template <int WIDTH>
struct Write {
    static void row(char *x, const char *value, int64_t row_bytes)
    {
        memcpy(x, value, WIDTH > 0 ? WIDTH : (size_t)row_bytes);
    }
};

/* Rows, as they are added. */
template <class T, int COUNT>
struct Add {
    static void row(char *x, const char *value, int64_t row_bytes)
    {
        const int64_t count = COUNT > 0 ? COUNT : row_bytes / (int64_t)sizeof(T);
        constexpr int64_t STEP = sizeof(T);
        for (int64_t i = 0; i < count; i++)
            store_unaligned<T>(x + i * STEP, static_cast<T>(load_unaligned<T>(x + i * STEP) +
                                                            load_unaligned<T>(value + i * STEP)));
    }
};

/* The places of a block of indices that lie in begin..end, and which indices these are. */
template <class Index>
static int find_places(const Scatter &scatter, int64_t first, int count, int64_t begin, int64_t end,
                       int64_t *places, int *elements)
{
    const char *indices = scatter.indices + first * (int64_t)sizeof(Index);
    const uint64_t extent = static_cast<uint64_t>(end - begin);
    const uint64_t size = static_cast<uint64_t>(scatter.axis_size);
    const uint64_t from_end = scatter.mode == MODE_CLIP || scatter.mode == MODE_WRAP ? 0 : size;
    int found = 0;
    for (int i = 0; i < count; i++) {
        const Index index = load_unaligned<Index>(indices + i * sizeof(Index));
        uint64_t place = static_cast<uint64_t>(index);
        if (is_negative(index)) place += from_end;
        if (__builtin_expect(place >= size, 0))
            place = static_cast<uint64_t>(place_of(index, scatter.axis_size, scatter.mode));
        places[found] = static_cast<int64_t>(place);
        elements[found] = i;
        found += place - static_cast<uint64_t>(begin) < extent;
    }
    return found;
}

/* All indices for the outer positions begin..end, as far as their places are in a range. */
template <class Row>
static void walk(const Work *work, int64_t outer_begin, int64_t outer_end, int64_t begin,
                 int64_t end)
{
    const Scatter &scatter = *work->scatter;
    const int inner = scatter.outer + scatter.index;
    const int64_t row_bytes = scatter.row_bytes;
    const int64_t ahead = work->prefetch ? PREFETCH_DISTANCE : BLOCK;
    const auto act = [row_bytes](char *x, const char *value, const ScatterLoop &loop) {
        for (int64_t i = 0; i < loop.count; i++)
            Row::row(x + i * loop.x, value + i * loop.value, row_bytes);
    };
    int64_t places[BLOCK];
    int elements[BLOCK];
    for (int64_t outer = outer_begin; outer < outer_end; outer++) {
        int64_t x_offset, offset;
        outer_offsets(scatter, outer, &x_offset, &offset);
        char *x = scatter.x + x_offset;
        const char *values = scatter.values + offset;
        for (int64_t first = 0; first < scatter.index_count; first += BLOCK) {
            const int64_t left = scatter.index_count - first;
            const int count = work->find(scatter, first, left < BLOCK ? (int)left : BLOCK, begin,
                                         end, places, elements);
            if (scatter.inner == 0 && scatter.index <= 1 && scatter.axis_ndim <= 1) {
                const int64_t stride = scatter.index == 1 ? scatter.loops[scatter.outer].value : 0;
                const int64_t axis_stride = axis_offset(scatter, 1);
                const char *from = values + first * stride;
                for (int i = 0; i < count; i++) {
                    if (i + ahead < count)
                        __builtin_prefetch(x + places[i + ahead] * axis_stride, 1);
                    Row::row(x + places[i] * axis_stride, from + elements[i] * stride, row_bytes);
                }
            } else {
                for (int i = 0; i < count; i++)
                    for_inner(scatter.loops + inner, scatter.inner,
                              x + axis_offset(scatter, places[i]),
                              values + value_offset(scatter, first + elements[i]), act);
            }
        }
    }
}

template <class Row>
static void walk_outer(void *context, int64_t begin, int64_t end)
{
    const Work *work = static_cast<const Work *>(context);
    walk<Row>(work, begin, end, 0, work->scatter->axis_size);
}

template <class Row>
static void walk_range(void *context, int64_t begin, int64_t end)
{
    const Work *work = static_cast<const Work *>(context);
    const Scatter &scatter = *work->scatter;
    const int64_t size = scatter.axis_size;
    walk<Row>(work, 0, loops_count(scatter.loops, scatter.outer), share(size, begin, work->ranges),
              share(size, end, work->ranges));
}

template <class Row>
static void run_rows(Work *work)
{
    const Scatter &scatter = *work->scatter;
    const int64_t outer = loops_count(scatter.loops, scatter.outer);
    const int64_t inner = loops_count(scatter.loops + scatter.outer + scatter.index, scatter.inner);
    const int64_t bytes = (scatter.row_bytes + 16) * inner; /* under one index */
    const int64_t all = bytes * scatter.index_count;        /* under one outer position */
    int threads = 1;
    (void)cpu_threads(&threads);
    if (outer >= 2 * threads || all < PARTED_BYTES || threads == 1) {
        parallel_for(outer, GRAIN_BYTES / (all + 1) + 1, walk_outer<Row>, work);
    } else {
        /* To look at an index costs about as much as to add to what is in the cache. */
        const bool pays = bytes >= 128 || work->prefetch;
        work->ranges = pays ? threads : 1;
        parallel_for(work->ranges, 1, walk_range<Row>, work);
    }
}

/* Single numbers (or a Pair each), one after the other, which is what a table in the caches is
 * quickest with. */
template <class T, class Index, bool ADDS, bool PACKED, bool LARGE>
static void put_numbers(const Work *work)
{
    const Scatter &scatter = *work->scatter;
    const uint64_t size = static_cast<uint64_t>(scatter.axis_size);
    const int64_t axis_stride = PACKED ? (int64_t)sizeof(T) : axis_offset(scatter, 1);
    const int64_t stride = scatter.index == 1 ? scatter.loops[0].value : 0;
    const int64_t count = scatter.index_count;
    const char *indices = scatter.indices, *values = scatter.values;
    char *const table = scatter.x;
    for (int64_t i = 0; i < count; i++, values += stride) {
        if (LARGE && i + PREFETCH_DISTANCE < count) {
            /* A prefetch cannot fault, so this index may be anything. */
            const Index next =
                load_unaligned<Index>(indices + (i + PREFETCH_DISTANCE) * sizeof(Index));
            __builtin_prefetch(
                reinterpret_cast<const char *>(reinterpret_cast<uintptr_t>(table) +
                                               static_cast<uint64_t>(next) *
                                                   static_cast<uint64_t>(axis_stride)),
                1);
        }
        const Index index = load_unaligned<Index>(indices + i * (int64_t)sizeof(Index));
        uint64_t place = static_cast<uint64_t>(index);
        if (__builtin_expect(place >= size, 0)) { /* or negative, which is a large number here */
            const int64_t other = place_of(index, scatter.axis_size, scatter.mode);
            if (other < 0) continue;
            place = static_cast<uint64_t>(other);
        }
        char *x = table + static_cast<int64_t>(place) * axis_stride;
        const T number = load_unaligned<T>(values);
        store_unaligned<T>(x, ADDS ? static_cast<T>(load_unaligned<T>(x) + number) : number);
    }
}

template <class T, class Index, bool ADDS>
static void put_numbers_of(const Work *work)
{
    if (axis_offset(*work->scatter, 1) != (int64_t)sizeof(T))
        put_numbers<T, Index, ADDS, false, true>(work);
    else if (work->prefetch)
        put_numbers<T, Index, ADDS, true, true>(work);
    else
        put_numbers<T, Index, ADDS, true, false>(work);
}

/* Whether to deal out so many numbers by range costs less than to wait for memory, or than to have
 * one worker. What it costs is shared by the workers; the wait grows with the table. */
static bool ranges_pay(const Work *work)
{
    constexpr int64_t LARGE_COUNT = 128 << 10, COUNT = 256 << 10, PLACES = 1 << 10;
    constexpr int64_t FAR_BYTES = 4 << 20, FAR_PLACES = 1 << 20; /* for two workers */
    constexpr int WORKERS = 4, MANY_WORKERS = 8;
    const int64_t count = work->scatter->index_count, places = work->scatter->axis_size;
    int threads = 1;
    if (count < LARGE_COUNT) return false;
    (void)cpu_threads(&threads);
    if (threads < WORKERS)
        return threads > 1 && places >= FAR_PLACES && places > FAR_BYTES / work->scatter->row_bytes;
    if (work->prefetch) return true;
    return threads >= MANY_WORKERS && count >= COUNT && places >= PLACES;
}

/* False where an index does not name one T, or is of a rare type, or where others are quicker:
 * nothing was done. */
template <class T, bool ADDS>
static bool put_quickly(const Work *work)
{
    const Scatter &scatter = *work->scatter;
    if (!is_of_numbers(scatter, sizeof(T))) return false;
    if (ranges_pay(work) && put_by_ranges(scatter)) return true;
    if (sizeof(T) > sizeof(uint64_t) && work->prefetch) return false; /* workers walk sooner */
    if (scatter.index_dtype == DTYPE_INT64)
        put_numbers_of<T, int64_t, ADDS>(work);
    else if (scatter.index_dtype == DTYPE_INT32)
        put_numbers_of<T, int32_t, ADDS>(work);
    else
        return false;
    return true;
}

static void write_rows(Work *work)
{
    switch (work->scatter->row_bytes) {
    case 1:
        return put_quickly<uint8_t, false>(work) ? void() : run_rows<Write<1>>(work);
    case 2:
        return put_quickly<uint16_t, false>(work) ? void() : run_rows<Write<2>>(work);
    case 4:
        return put_quickly<uint32_t, false>(work) ? void() : run_rows<Write<4>>(work);
    case 8:
        return put_quickly<uint64_t, false>(work) ? void() : run_rows<Write<8>>(work);
    case 16:
        return put_quickly<Pair<uint64_t>, false>(work) ? void() : run_rows<Write<16>>(work);
    default:
        return run_rows<Write<0>>(work);
    }
}

template <class T>
static void add_rows(Work *work)
{
    const int64_t count = work->scatter->row_bytes / (int64_t)sizeof(T);
    if (put_quickly<T, true>(work)) return;
    if constexpr (std::is_floating_point<T>::value)
        if (put_quickly<Pair<T>, true>(work)) return;
    if (count == 1)
        run_rows<Add<T, 1>>(work);
    else if (count == 2)
        run_rows<Add<T, 2>>(work);
    else
        run_rows<Add<T, 0>>(work);
}

/* 16-bit floats are summed in float32, which takes all additions to a place one after the other:
 * the indices are sorted by place, those of one place in their own order. */

struct Entry {
    int64_t place, element;
};

constexpr int DIGIT_BITS = 11;

/* From the lowest digit to the highest, from entries to spare and back; true if they end in spare.
 */
static bool sort_entries(Entry *entries, Entry *spare, int64_t count, int64_t largest)
{
    bool in_spare = false;
    for (int shift = 0; shift < 63 && largest >> shift > 0; shift += DIGIT_BITS) {
        constexpr int DIGITS = 1 << DIGIT_BITS;
        int64_t next[DIGITS] = {};
        for (int64_t i = 0; i < count; i++) next[entries[i].place >> shift & (DIGITS - 1)]++;
        int64_t sum = 0;
        for (int64_t &start : next) {
            const int64_t digits = start;
            start = sum;
            sum += digits;
        }
        for (int64_t i = 0; i < count; i++)
            spare[next[entries[i].place >> shift & (DIGITS - 1)]++] = entries[i];
        Entry *sorted = spare;
        spare = entries;
        entries = sorted;
        in_spare = !in_spare;
    }
    return in_spare;
}

template <class T>
static void sum_segment(const Scatter &scatter, const Entry *entries, int64_t count, char *x,
                        const char *values, const ScatterLoop &loop)
{
    float sums[SUMS];
    const int64_t items = scatter.row_bytes / (int64_t)sizeof(T);
    for (int64_t row = 0; row < loop.count; row++, x += loop.x, values += loop.value) {
        for (int64_t begin = 0; begin < items; begin += SUMS) {
            const int64_t some = items - begin < SUMS ? items - begin : SUMS;
            char *to = x + begin * (int64_t)sizeof(T);
            for (int64_t i = 0; i < some; i++)
                sums[i] = static_cast<float>(load_unaligned<T>(to + i * sizeof(T)));
            for (int64_t k = 0; k < count; k++) {
                const char *from =
                    values + value_offset(scatter, entries[k].element) + begin * (int64_t)sizeof(T);
                for (int64_t i = 0; i < some; i++)
                    sums[i] += static_cast<float>(load_unaligned<T>(from + i * sizeof(T)));
            }
            for (int64_t i = 0; i < some; i++) store_unaligned<T>(to + i * sizeof(T), T(sums[i]));
        }
    }
}

/* The segments that begin at one of the entries begin..end. */
template <class T>
static void sum_range(void *context, int64_t begin, int64_t end)
{
    const Work *work = static_cast<const Work *>(context);
    const Scatter &scatter = *work->scatter;
    const Entry *entries = work->entries;
    const int64_t outer_count = loops_count(scatter.loops, scatter.outer);
    for (int64_t i = begin; i < end; i++) {
        if (i > 0 && entries[i - 1].place == entries[i].place) continue;
        int64_t last = i + 1;
        while (last < work->entry_count && entries[last].place == entries[i].place) last++;
        for (int64_t outer = 0; outer < outer_count; outer++) {
            int64_t x, value;
            outer_offsets(scatter, outer, &x, &value);
            for_inner(scatter.loops + scatter.outer + scatter.index, scatter.inner,
                      scatter.x + x + axis_offset(scatter, entries[i].place),
                      scatter.values + value,
                      [&](char *to, const char *from, const ScatterLoop &loop) {
                          sum_segment<T>(scatter, entries + i, last - i, to, from, loop);
                      });
        }
    }
}

template <class T>
static Status sort_and_sum(Work *work)
{
    const Scatter &scatter = *work->scatter;
    const size_t bytes = (size_t)scatter.index_count * sizeof(Entry);
    Entry *entries = static_cast<Entry *>(malloc(2 * bytes));
    if (entries == NULL)
        return fail(STATUS_MEMORY_ERROR, "out of host memory: %zu bytes to sort indices",
                    2 * bytes);
    Entry *spare = entries + scatter.index_count;
    int64_t count = 0;
    with_index_type(scatter.index_dtype, [&](auto zero) {
        for (int64_t i = 0; i < scatter.index_count; i++) {
            memcpy(&zero, scatter.indices + i * sizeof zero, sizeof zero);
            entries[count] = {place_of(zero, scatter.axis_size, scatter.mode), i};
            count += entries[count].place >= 0;
        }
    });
    work->entries = sort_entries(entries, spare, count, scatter.axis_size - 1) ? spare : entries;
    work->entry_count = count;
    const int64_t row_bytes = scatter_rows(scatter) /
                              (scatter.index_count > 0 ? scatter.index_count : 1) *
                              scatter.row_bytes;
    parallel_for(count, GRAIN_BYTES / (row_bytes + 64) + 1, sum_range<T>, work);
    free(entries);
    return STATUS_OK;
}

/* Sorting is quicker where most places have no index, and for long rows where many have few. */
template <class T>
static Status sum_rows(Work *work)
{
    constexpr int64_t SHORT_ROW = 16, FEW_PLACES = 64, FEW_NUMBERS = 4; /* to an index */
    const Scatter &scatter = *work->scatter;
    const int64_t items = scatter.row_bytes / (int64_t)sizeof(T), count = scatter.index_count;
    const int64_t most = items <= SHORT_ROW ? FEW_PLACES * count : FEW_NUMBERS * count / items;
    if (scatter.outer == 0 && scatter.inner == 0 && scatter.axis_ndim <= 1 &&
        scatter.axis_size <= most && put_by_ranges(scatter))
        return STATUS_OK;
    return sort_and_sum<T>(work);
}

/* Unsigned numbers stand for those with a sign too: their sums have the same bits. */
static Status add_all(Work *work)
{
    switch (work->scatter->dtype) {
    case DTYPE_FLOAT16:
        return sum_rows<Half>(work);
    case DTYPE_BFLOAT16:
        return sum_rows<BFloat16>(work);
    case DTYPE_FLOAT32:
        add_rows<float>(work);
        return STATUS_OK;
    case DTYPE_FLOAT64:
        add_rows<double>(work);
        return STATUS_OK;
    default:
        break;
    }
    switch (dtype_bytes(work->scatter->dtype)) {
    case 1:
        add_rows<uint8_t>(work);
        break;
    case 2:
        add_rows<uint16_t>(work);
        break;
    case 4:
        add_rows<uint32_t>(work);
        break;
    default:
        add_rows<uint64_t>(work);
        break;
    }
    return STATUS_OK;
}

Status scatter_on_cpu(const Call *call, const Scatter &scatter)
{
    const bool large =
        (double)scatter.axis_size * (double)scatter.row_bytes > (double)LARGE_TABLE_BYTES;
    Work work = {&scatter, NULL, 1, large, PTHREAD_MUTEX_INITIALIZER, NULL, "", NULL, 0};
    with_index_type(scatter.index_dtype, [&](auto zero) {
        using Index = decltype(zero);
        work.find = find_places<Index>;
        if (scatter.mode == MODE_RAISE)
            parallel_for(scatter.index_count,
                         grain_of_cached(scatter.index_count, GRAIN_BYTES / (int64_t)sizeof(Index)),
                         check_range<Index>, &work);
    });
    pthread_mutex_destroy(&work.lock);
    if (work.bad != NULL)
        return index_error(call, scatter.index_dtype, scatter.axis_size, work.value);
    if (scatter_rows(scatter) == 0 || scatter.index_count == 0 || scatter.row_bytes == 0)
        return STATUS_OK;
    if (scatter.adds) return add_all(&work);
    write_rows(&work);
    return STATUS_OK;
}

/* All places are known before anything is written, and are used as they were then. */
template <int WIDTH>
static bool scatter_few(const Few &few)
{
    const int64_t *indices = few.indices, count = few.count, stride = few.stride;
    const char *values = few.packed;
    char *x = few.x; /* all of these here: for the compiler, what is written may be few */
    const uint64_t size = static_cast<uint64_t>(few.size);
    int64_t places[MOST_FEW];
    for (int64_t i = 0; i < count; i++) {
        uint64_t place = static_cast<uint64_t>(indices[i]);
        if (__builtin_expect(place >= size, 0)) {
            if (is_negative(static_cast<int64_t>(place))) place += size;
            if (place >= size) return false;
        }
        places[i] = static_cast<int64_t>(place);
    }
    for (int64_t i = 0; i < count; i++) memcpy(x + places[i] * stride, values + i * WIDTH, WIDTH);
    return true;
}

bool scatter_briefly(const Few *few)
{
    return with_width(few->item_bytes,
                      [few](auto width) { return scatter_few<decltype(width)::bytes>(*few); });
}
