/* scatter and scatter_add on the CPU where places are many, or workers: nobody looks at all indices
 * and nobody waits for memory.
 *
 * The places are cut into ranges, of which the caches hold one. First each worker takes a part of
 * the elements and deals them out by range, in their order; then each takes ranges, and writes or
 * adds what all parts have for one, part after part. So every place sees its elements in the order
 * of the indices, whatever the number of workers.
 *
 *     part 0:  range 0 -> [block] -> [block]     an entry of a block is a place in its range, and
 *              range 1 -> [block]                the number that goes there, or for longer rows
 *     part 1:  range 0 -> [block]                the number of the element
 *              ...
 *
 * It is the radix partitioning of joins in databases (Kim et al., "Sort vs. Hash Revisited", VLDB
 * 2009), with lists of blocks in place of a first pass that counts: each index is read once, so
 * that another thread that is changing them changes what is written and never where. */
#include "arithmetic.cuh"
#include "scatter_cpu.cuh"

#include <stdlib.h>
#include <type_traits>

/* To each of them a line of the first cache is written. There is one more where the first begins
 * below the table. */
constexpr int MOST_RANGES = 256;
constexpr int RANGES_PER_WORKER = 4;
constexpr int64_t RANGE_BYTES = 128 << 10; /* which a core's own cache holds */
/* Two workers that write to one line of the caches wait for each other at every number: ranges of
 * numbers that follow one another begin where lines do, and so do the workers' sums. */
constexpr int64_t LINE_BYTES = 64, LEAST_RANGE_BYTES = 256, LEAST_SUMS = 64;
constexpr int ENTRIES = 512; /* of a block */
/* How far ahead of use memory is asked for: bytes of a block, and rows of values. */
constexpr int BYTES_AHEAD = 128, ROWS_AHEAD = 8;
/* So many numbers are dealt out at a time, if there are more: for each worker what the caches hold,
 * more or less; for a table that is larger, as many as it has places, up to a bound. */
constexpr int64_t PART_NUMBERS = 256 << 10;
constexpr int64_t MOST_BLOCK_BYTES = 192 << 20;

/* The payload of an entry, where it is not a number. */
struct Element {
    int64_t number;
};

template <class Payload>
struct __attribute__((packed)) Entry {
    uint32_t place; /* in its range */
    Payload payload;
};

template <class Payload>
struct Block {
    Block *next;
    int64_t count;
    Entry<Payload> entries[ENTRIES];
};

/* What one part has for one range; its next entry goes to `next`. */
template <class Payload>
struct Bucket {
    Entry<Payload> *next, *end; /* of the last block */
    Block<Payload> *first, *last;
};

template <class Payload>
struct Deal {
    const Scatter *scatter;
    int shift;     /* a range has 2^shift places, */
    uint64_t skew; /* the first one so many less */
    int ranges, parts;
    int64_t first, count;          /* the elements */
    Block<Payload> **first_blocks; /* parts x ranges */
    Block<Payload> *blocks;
    int64_t blocks_per_part;
    int next_range; /* that nobody has taken; atomic */
    int64_t sums_per_worker;
    float *sums;     /* for each worker, of the places of a range */
    uint32_t *named; /* likewise, those of the places that have been named, */
    bool *is_named;  /* and whether one has; false before and after */
};

static int64_t min_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

template <class Payload>
static void begin_block(Bucket<Payload> &bucket, Block<Payload> *block)
{
    (bucket.last == NULL ? bucket.first : bucket.last->next) = block;
    bucket.last = block;
    block->next = NULL;
    block->count = ENTRIES;
    bucket.next = block->entries;
    bucket.end = block->entries + ENTRIES;
}

template <class Payload, class Index>
static void deal_part(const Deal<Payload> &deal, int part)
{
    const Scatter &scatter = *deal.scatter;
    const int64_t begin = deal.first + share(deal.count, part, deal.parts);
    const int64_t end = deal.first + share(deal.count, part + 1, deal.parts);
    const int64_t stride = scatter.index == 1 ? scatter.loops[0].value : 0;
    const uint64_t size = static_cast<uint64_t>(scatter.axis_size);
    const int shift = deal.shift;
    const uint64_t skew = deal.skew;
    const uint32_t mask = static_cast<uint32_t>(((uint64_t)1 << shift) - 1);
    Block<Payload> *spare = deal.blocks + part * deal.blocks_per_part;
    /* Here, where they share no cache line with those of another part. */
    Bucket<Payload> buckets[MOST_RANGES + 1] = {};
    for (int64_t i = begin; i < end; i++) {
        const Index index = load_unaligned<Index>(scatter.indices + i * (int64_t)sizeof(Index));
        uint64_t place = static_cast<uint64_t>(index);
        if (__builtin_expect(place >= size, 0)) { /* or negative, which is a large number here */
            const int64_t other = place_of(index, scatter.axis_size, scatter.mode);
            if (other < 0) continue;
            place = static_cast<uint64_t>(other);
        }
        place += skew;
        Bucket<Payload> &bucket = buckets[place >> shift];
        if (__builtin_expect(bucket.next == bucket.end, 0)) begin_block(bucket, spare++);
        Entry<Payload> *entry = bucket.next++;
        __builtin_prefetch(reinterpret_cast<char *>(entry) + BYTES_AHEAD, 1);
        entry->place = static_cast<uint32_t>(place) & mask;
        if constexpr (std::is_same<Payload, Element>::value)
            entry->payload = {i};
        else
            entry->payload = load_unaligned<Payload>(scatter.values + i * stride);
    }
    for (int range = 0; range < deal.ranges; range++) {
        if (buckets[range].last != NULL)
            buckets[range].last->count = buckets[range].next - buckets[range].last->entries;
        deal.first_blocks[(int64_t)part * deal.ranges + range] = buckets[range].first;
    }
}

template <class Payload>
static void deal_parts(void *context, int64_t begin, int64_t end)
{
    const Deal<Payload> &deal = *static_cast<Deal<Payload> *>(context);
    with_index_type(deal.scatter->index_dtype, [&](auto zero) {
        for (int64_t part = begin; part < end; part++)
            deal_part<Payload, decltype(zero)>(deal, (int)part);
    });
}

/* Calls function with all entries of a range, block by block. */
template <class Payload, class Function>
static void for_entries(const Deal<Payload> &deal, int range, const Function &function)
{
    for (int part = 0; part < deal.parts; part++) {
        const Block<Payload> *block = deal.first_blocks[(int64_t)part * deal.ranges + range];
        for (; block != NULL; block = block->next) function(block->entries, (int)block->count);
    }
}

/* Each worker takes a range after the other. */
template <class Payload, class PutRange>
static void put_ranges(void *context, int64_t begin, int64_t end)
{
    Deal<Payload> &deal = *static_cast<Deal<Payload> *>(context);
    for (int64_t worker = begin; worker < end; worker++)
        for (;;) {
            const int range = __atomic_fetch_add(&deal.next_range, 1, __ATOMIC_RELAXED);
            if (range >= deal.ranges) break;
            PutRange::put(deal, range, (int)worker);
        }
}

/* Where the place 0 of a range is in the table, or would be. */
template <class Payload>
static char *range_begin(const Deal<Payload> &deal, int range)
{
    const int64_t place = ((int64_t)range << deal.shift) - (int64_t)deal.skew;
    return deal.scatter->x + place * axis_offset(*deal.scatter, 1);
}

/* Numbers, which are written or added. */
template <class T, bool ADDS>
struct PutNumbers {
    static void put(const Deal<T> &deal, int range, int)
    {
        const int64_t stride = axis_offset(*deal.scatter, 1);
        char *const x = range_begin(deal, range);
        for_entries(deal, range, [=](const Entry<T> *entries, int count) {
            for (int i = 0; i < count; i++) {
                if (i + PREFETCH_DISTANCE < count)
                    __builtin_prefetch(x + entries[i + PREFETCH_DISTANCE].place * stride, 1);
                char *to = x + entries[i].place * stride;
                const T number = entries[i].payload;
                store_unaligned<T>(to,
                                   ADDS ? static_cast<T>(load_unaligned<T>(to) + number) : number);
            }
        });
    }
};

/* 16-bit floats, which are summed in float32 and rounded once. Nothing but what indices name is
 * read or written back: another thread may be changing it. */
template <class T, class Payload>
struct SumRows {
    static void put(const Deal<Payload> &deal, int range, int worker)
    {
        constexpr int64_t STEP = sizeof(T);
        const Scatter &scatter = *deal.scatter;
        const int64_t items = scatter.row_bytes / STEP, stride = axis_offset(scatter, 1);
        const int64_t first = worker * deal.sums_per_worker;
        float *const all_sums = deal.sums + first * items;
        bool *const is_named = deal.is_named + first;
        uint32_t *const named = deal.named + first;
        int64_t named_count = 0;
        char *const x = range_begin(deal, range);
        for_entries(deal, range, [&](const Entry<Payload> *entries, int count) {
            for (int k = 0; k < count; k++) {
                const uint32_t place = entries[k].place;
                float *sums = all_sums + place * items;
                if (!is_named[place]) {
                    is_named[place] = true;
                    named[named_count++] = place;
                    for (int64_t i = 0; i < items; i++)
                        sums[i] =
                            static_cast<float>(load_unaligned<T>(x + place * stride + i * STEP));
                }
                if constexpr (std::is_same<Payload, Element>::value) {
                    const auto row_of = [&](int entry) {
                        return scatter.values +
                               value_offset(scatter, entries[entry].payload.number);
                    };
                    if (k + ROWS_AHEAD < count) __builtin_prefetch(row_of(k + ROWS_AHEAD));
                    const char *row = row_of(k);
                    for (int64_t i = 0; i < items; i++)
                        sums[i] += static_cast<float>(load_unaligned<T>(row + i * STEP));
                } else {
                    sums[0] += static_cast<float>(entries[k].payload);
                }
            }
        });
        for (int64_t k = 0; k < named_count; k++) {
            const uint32_t place = named[k];
            is_named[place] = false;
            for (int64_t i = 0; i < items; i++)
                store_unaligned<T>(x + place * stride + i * STEP, T(all_sums[place * items + i]));
        }
    }
};

/* How many places there would be in the table's first line before the first one. */
static uint64_t skew_of(const Scatter &scatter)
{
    const int64_t stride = axis_offset(scatter, 1);
    if (stride <= 0 || LINE_BYTES % stride != 0) return 0;
    return reinterpret_cast<uintptr_t>(scatter.x) % LINE_BYTES / (uint64_t)stride;
}

static int64_t in_lines(int64_t bytes)
{
    return round_up(bytes, LINE_BYTES);
}

/* A place has place_bytes in the caches: of the table, or of a worker's sums for it. */
template <class Payload, class PutRange>
static bool deal_and_put(const Scatter &scatter, int64_t place_bytes, bool sums)
{
    int threads;
    if (cpu_threads(&threads) != STATUS_OK) threads = 1;
    const int64_t size = scatter.axis_size;
    int64_t most = scatter.index_count; /* elements at a time; sums are rounded but once */
    if (!sums) {
        int64_t some = min_of(size, MOST_BLOCK_BYTES / (int64_t)sizeof(Entry<Payload>));
        if (some < PART_NUMBERS * threads) some = PART_NUMBERS * threads;
        most = min_of(most, some);
    }
    Deal<Payload> deal = {};
    deal.scatter = &scatter;
    const int64_t work_bytes = most * ((int64_t)sizeof(Entry<Payload>) + scatter.row_bytes);
    deal.parts = (int)min_of(threads, work_bytes / GRAIN_BYTES + 1);
    if (!sums) deal.skew = skew_of(scatter); /* less than a range has */
    int64_t ranges = size / (RANGE_BYTES / place_bytes + 1) + 1;
    if (ranges < RANGES_PER_WORKER * deal.parts) ranges = RANGES_PER_WORKER * deal.parts;
    ranges = min_of(ranges, MOST_RANGES);
    while ((size - 1) >> deal.shift >= ranges ||
           (!sums && place_bytes << deal.shift < LEAST_RANGE_BYTES))
        deal.shift++;
    if (deal.shift > 32) return false; /* of elements that are in the same memory */
    deal.ranges = (int)((size - 1 + (int64_t)deal.skew) >> deal.shift) + 1;
    const int64_t part = most / deal.parts + 1;
    deal.blocks_per_part = part / ENTRIES + min_of(deal.ranges, part);

    const int64_t workers = min_of(deal.parts, deal.ranges);
    deal.sums_per_worker = (int64_t)1 << deal.shift;
    if (place_bytes < LINE_BYTES && deal.sums_per_worker < LEAST_SUMS)
        deal.sums_per_worker = LEAST_SUMS;
    const int64_t places = sums ? workers * deal.sums_per_worker : 0;
    const int64_t block_bytes = deal.parts * deal.blocks_per_part * (int64_t)sizeof *deal.blocks;
    const int64_t first_bytes =
        in_lines((int64_t)deal.parts * deal.ranges * (int64_t)sizeof(void *));
    const bool huge = block_bytes >= HOST_LEAST_BYTES;
    void *blocks = huge ? host_take(block_bytes) : malloc((size_t)block_bytes);
    const int64_t rest_bytes = first_bytes + places * (place_bytes + (int64_t)sizeof *deal.named);
    char *rest = static_cast<char *>(aligned_alloc(LINE_BYTES, (size_t)in_lines(rest_bytes)));
    void *is_named = calloc((size_t)places + 1, sizeof *deal.is_named);
    const bool taken = blocks != NULL && rest != NULL && is_named != NULL;
    if (taken) {
        deal.blocks = static_cast<Block<Payload> *>(blocks);
        deal.first_blocks = reinterpret_cast<Block<Payload> **>(rest);
        deal.sums = reinterpret_cast<float *>(rest + first_bytes);
        deal.named = reinterpret_cast<uint32_t *>(rest + first_bytes + places * place_bytes);
        deal.is_named = static_cast<bool *>(is_named);
        for (; deal.first < scatter.index_count; deal.first += deal.count) {
            deal.count = min_of(scatter.index_count - deal.first, most);
            deal.next_range = 0;
            parallel_for(deal.parts, 1, deal_parts<Payload>, &deal);
            parallel_for(workers, 1, put_ranges<Payload, PutRange>, &deal);
        }
    }
    free(is_named);
    free(rest);
    if (!huge)
        free(blocks);
    else if (blocks != NULL)
        host_give(blocks);
    return taken;
}

template <class T>
static bool put_numbers(const Scatter &scatter)
{
    return scatter.adds ? deal_and_put<T, PutNumbers<T, true>>(scatter, sizeof(T), false)
                        : deal_and_put<T, PutNumbers<T, false>>(scatter, sizeof(T), false);
}

template <class T>
static bool put_floats(const Scatter &scatter)
{
    return scatter.row_bytes == sizeof(T) ? put_numbers<T>(scatter) : put_numbers<Pair<T>>(scatter);
}

template <class T>
static bool sum_rows(const Scatter &scatter)
{
    const int64_t place_bytes = scatter.row_bytes / (int64_t)sizeof(T) * (int64_t)sizeof(float);
    if (is_of_numbers(scatter, sizeof(T)))
        return deal_and_put<T, SumRows<T, T>>(scatter, place_bytes, true);
    return deal_and_put<Element, SumRows<T, Element>>(scatter, place_bytes, true);
}

bool put_by_ranges(const Scatter &scatter)
{
    if (scatter.adds) {
        switch (scatter.dtype) {
        case DTYPE_FLOAT16:
            return sum_rows<Half>(scatter);
        case DTYPE_BFLOAT16:
            return sum_rows<BFloat16>(scatter);
        case DTYPE_FLOAT32:
            return put_floats<float>(scatter);
        case DTYPE_FLOAT64:
            return put_floats<double>(scatter);
        default:
            break;
        }
    }
    switch (scatter.row_bytes) {
    case 1:
        return put_numbers<uint8_t>(scatter);
    case 2:
        return put_numbers<uint16_t>(scatter);
    case 4:
        return put_numbers<uint32_t>(scatter);
    case 8:
        return put_numbers<uint64_t>(scatter);
    default:
        return deal_and_put<Pair<uint64_t>, PutNumbers<Pair<uint64_t>, false>>(scatter, 16, false);
    }
}
