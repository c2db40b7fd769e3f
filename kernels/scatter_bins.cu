/* scatter and scatter_add on a GPU by way of tables in the shared memory of blocks.
 *
 * Atomic operations on few places wait for each other, and those on many are bound by the second
 * cache, which takes about one address at a time in each of its slices. So every block sums what it
 * meets in a table of its own; for scatter, the table holds the last index of each place.
 *
 *     BlockTables    where the table of x fits a block: the indices as they are, into one table for
 *                    each block, or into several copies of it, for lanes side by side
 *     SortTiles      else, sorts every tile of indices, with what goes along, into buckets of
 *                    neighbouring places
 *     CountBuckets   how many indices a bucket has in all tiles
 *     TileTables     a table for each bucket, or several for one that has many indices, which it
 *                    adds to x where that can be done atomically
 *     FinishTables   else, joins the tables of an entry, and adds or writes that to x
 *     AddWindows     where the buckets are too large for a block: atomic additions, bucket after
 *                    bucket, so that those at one time are in a window that stays in the cache
 *
 * As x is written last, the indices are checked on the way. */
#include "scatter_device.cuh"

#ifdef __CUDACC__

constexpr int THREADS = 512, ITEMS = 4;
constexpr int64_t TABLE_BYTES = 48 << 10, MOST_COPIES = 32;

/* What numbers are summed in, and the sum of none of them, which changes no number: in floats that
 * is the negative zero. */
template <class T>
struct Sum {
    using Type = uint32_t;
};
template <>
struct Sum<uint64_t> {
    using Type = uint64_t;
};
template <>
struct Sum<double> {
    using Type = double;
};
template <>
struct Sum<float> {
    using Type = float;
};
template <>
struct Sum<Half> {
    using Type = float;
};
template <>
struct Sum<BFloat16> {
    using Type = float;
};

HOST_DEVICE inline bool is_none(float sum)
{
    return bits_as<uint32_t>(sum) == 0x80000000u;
}

HOST_DEVICE inline bool is_none(double sum)
{
    return bits_as<uint64_t>(sum) == 0x8000000000000000u;
}

template <class Integer>
HOST_DEVICE inline bool is_none(Integer sum)
{
    return sum == 0;
}

/* What a table holds. An entry is made of what is given for each number of x that an index means;
 * for a while that lies packed in a tile, which begins at some element. */
template <class T>
struct SumOf {
    using Number = T;
    using Entry = typename Sum<T>::Type;
    using Given = T;
    using Packed = typename BitsOf<sizeof(T)>::Type;
    /* Whether tables can be added to x without being joined first: 10 us less for 2^20 numbers. */
    static constexpr bool ATOMIC = sizeof(T) == sizeof(Entry);
    /* What pays for the tiles: others cannot be added atomically. */
    static constexpr int64_t LEAST_TILED = (ATOMIC ? 4096 : 128) << 10;

    HOST_DEVICE static Entry none() { return static_cast<Entry>(-0.0); }
    HOST_DEVICE static Given given(const DeviceScatter &scatter, int64_t, int64_t value,
                                   int64_t column)
    {
        return load_numbers<T, 1>(scatter, value, column).items[0];
    }
    HOST_DEVICE static Packed pack(Given given, int64_t) { return bits_as<Packed>(given); }
    HOST_DEVICE static Given unpack(Packed packed, int64_t) { return bits_as<T>(packed); }
    HOST_DEVICE static void put(Entry *entry, Given given)
    {
        atomic_add(entry, static_cast<Entry>(given));
    }
    HOST_DEVICE static Entry join(Entry one, Entry other) { return one + other; }
    HOST_DEVICE static void finish(const DeviceScatter &, Number *number, Entry sum)
    {
        *number = T(static_cast<Entry>(*number) + sum);
    }
};

/* The last index of a place: its number, plus 1. */
template <class Unit>
struct LastOf {
    using Number = Unit;
    using Entry = uint32_t;
    using Given = uint32_t;
    using Packed = uint16_t;
    static constexpr bool ATOMIC = false;
    static constexpr int64_t LEAST_TILED = 1 << 20;

    HOST_DEVICE static Entry none() { return 0; }
    HOST_DEVICE static Given given(const DeviceScatter &, int64_t element, int64_t, int64_t)
    {
        return static_cast<uint32_t>(element) + 1;
    }
    HOST_DEVICE static Packed pack(Given given, int64_t begin)
    {
        return static_cast<uint16_t>(given - static_cast<uint32_t>(begin));
    }
    HOST_DEVICE static Given unpack(Packed packed, int64_t begin)
    {
        return static_cast<uint32_t>(begin) + packed;
    }
    HOST_DEVICE static void put(Entry *entry, Given given) { atomic_max(entry, given); }
    HOST_DEVICE static Entry join(Entry one, Entry other) { return one < other ? other : one; }
    HOST_DEVICE static void finish(const DeviceScatter &scatter, Number *number, Entry last)
    {
        *number =
            scatter.template load_value<Unit>(scatter.value_of(static_cast<int64_t>(last) - 1), 0);
    }
};

template <class Kind>
struct BlockTables {
    static constexpr int MAX_THREADS = 1024; /* so that a thread takes 64 registers at most */
    using Entry = typename Kind::Entry;
    struct Shared {
        Entry entries[TABLE_BYTES / sizeof(Entry)];
    };

    DeviceScatter scatter;
    unsigned *rejected;
    int entries; /* of a table: the axis times the numbers of a row */
    int row_numbers;
    int copies; /* a power of two */
    int unused;
    Entry *tables;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        for (int i = thread.thread; i < entries * copies; i += THREADS)
            shared->entries[i] = Kind::none();
        thread.sync();

        const int copy = static_cast<int>(thread.thread) & (copies - 1);
        const int64_t step = (int64_t)thread.blocks * THREADS;
        for (int64_t first = thread.block * (int64_t)THREADS + thread.thread; first < scatter.units;
             first += ITEMS * step) {
            int64_t element[ITEMS], index[ITEMS];
            UNROLL
            for (int k = 0; k < ITEMS; k++)
                element[k] = start_of(first + k * step < scatter.units ? first + k * step : 0).row;
            load_indices<ITEMS>(scatter.indices, scatter.index_dtype, element, index);
            typename Kind::Given given[ITEMS];
            UNROLL
            for (int k = 0; k < ITEMS; k++) {
                const int64_t unit = first + k * step < scatter.units ? first + k * step : 0;
                given[k] = Kind::given(scatter, element[k], scatter.value_of(element[k]),
                                       start_of(unit).column);
            }
            UNROLL
            for (int k = 0; k < ITEMS; k++) {
                if (first + k * step >= scatter.units) continue;
                const DeviceScatter::Start at = start_of(first + k * step);
                const int64_t place = scatter.place_of(index[k]);
                if (place >= 0) {
                    const int entry =
                        static_cast<int>(place) * row_numbers + static_cast<int>(at.column);
                    Kind::put(&shared->entries[entry * copies + copy], given[k]);
                } else if (scatter.mode == MODE_RAISE) {
                    store_same(rejected, 1u);
                    scatter.note(at.row, index[k]);
                }
            }
        }
        thread.sync();

        for (int i = thread.thread; i < entries; i += THREADS) {
            Entry entry = Kind::none();
            for (int k = 0; k < copies; k++)
                entry = Kind::join(entry, shared->entries[i * copies + k]);
            tables[thread.block * (int64_t)entries + i] = entry;
        }
    }

    HOST_DEVICE DeviceScatter::Start start_of(int64_t unit) const
    {
        return row_numbers == 1 ? DeviceScatter::Start{unit, 0} : scatter.start_at(unit);
    }
};

/* Tiles of indices. What is left of a place in a bucket, its key, and what goes along lie bucket by
 * bucket within each tile. */
constexpr int TILE_THREADS = 512, MOST_BUCKETS = THREADS - 1;

template <class Key, class Packed>
struct Tiles {
    static constexpr int ITEMS = sizeof(Key) + sizeof(Packed) <= 10 ? 8 : 4;
    static constexpr int SIZE = TILE_THREADS * ITEMS;

    int64_t count;
    int64_t buckets;
    int64_t key_bits;
    Key *keys;
    Packed *packed;
    /* Where in a tile a bucket begins, and behind the last one where that ends; of all tiles one
     * after the other, for each bucket. */
    uint16_t *starts;

    HOST_DEVICE uint16_t *start_of(int64_t bucket, int64_t tile) const
    {
        return starts + bucket * count + tile;
    }
};

/* 64 registers for a thread, and numbers that are loaded together with the indices: what spills
 * here waits for memory once more (16 us of 100 for 2^24 float32). */
template <class Kind, class Key>
struct SortTiles {
    static constexpr int MAX_THREADS = TILE_THREADS, MIN_BLOCKS = 2;
    using Packed = typename Kind::Packed;
    static constexpr int TILE_ITEMS = Tiles<Key, Packed>::ITEMS, TILE = Tiles<Key, Packed>::SIZE;
    struct Shared {
        alignas(16) Packed packed[TILE];
        alignas(16) Key keys[TILE];
        uint32_t counts[TILE_THREADS], sums[TILE_THREADS];
    };

    DeviceScatter scatter;
    unsigned *rejected;
    int64_t value_stride;
    Tiles<Key, Packed> tiles;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        shared->counts[thread.thread] = 0;
        const int64_t begin = thread.block * (int64_t)TILE;
        const int left = scatter.index_count - begin < TILE
                             ? static_cast<int>(scatter.index_count - begin)
                             : TILE;
        int64_t element[TILE_ITEMS], index[TILE_ITEMS];
        UNROLL
        for (int k = 0; k < TILE_ITEMS; k++) {
            const int i = k * TILE_THREADS + static_cast<int>(thread.thread);
            element[k] = begin + (i < left ? i : 0);
        }
        load_indices<TILE_ITEMS>(scatter.indices, scatter.index_dtype, element, index);
        typename Kind::Given given[TILE_ITEMS];
        UNROLL
        for (int k = 0; k < TILE_ITEMS; k++)
            given[k] = Kind::given(scatter, element[k], element[k] * value_stride, 0);
        constexpr uint32_t NOWHERE = ~0u;
        uint32_t place[TILE_ITEMS], rank[TILE_ITEMS];
        UNROLL
        for (int k = 0; k < TILE_ITEMS; k++) {
            const int i = k * TILE_THREADS + static_cast<int>(thread.thread);
            const bool is_plain =
                static_cast<uint64_t>(index[k]) < static_cast<uint64_t>(scatter.axis_size);
            place[k] =
                is_plain ? static_cast<uint32_t>(index[k]) : place_of_other(begin + i, index[k]);
            if (i >= left) place[k] = NOWHERE;
        }
        thread.sync();

        UNROLL
        for (int k = 0; k < TILE_ITEMS; k++)
            if (place[k] != NOWHERE)
                rank[k] = atomic_next(&shared->counts[place[k] >> tiles.key_bits]);
        thread.sync();

        /* A thread for each bucket. */
        const uint32_t count = shared->counts[thread.thread];
        const uint32_t end = sum_up_to(thread, shared->sums, count);
        shared->counts[thread.thread] = end - count;
        if (thread.thread <= tiles.buckets)
            *tiles.start_of(thread.thread, thread.block) = static_cast<uint16_t>(end - count);
        thread.sync();

        UNROLL
        for (int k = 0; k < TILE_ITEMS; k++) {
            if (place[k] == NOWHERE) continue;
            const uint32_t at = shared->counts[place[k] >> tiles.key_bits] + rank[k];
            shared->packed[at] = Kind::pack(given[k], begin);
            shared->keys[at] = static_cast<Key>(place[k] & ((1u << tiles.key_bits) - 1));
        }
        thread.sync();
        copy(thread, shared->packed, tiles.packed + begin);
        copy(thread, shared->keys, tiles.keys + begin);
    }

    /* What is behind the last index reads the first of the tile, and notes it behind that. */
    HOST_DEVICE RARE uint32_t place_of_other(int64_t element, int64_t index) const
    {
        const int64_t place = scatter.place_of_other(index);
        if (place < 0 && scatter.mode == MODE_RAISE) {
            store_same(rejected, 1u);
            scatter.note(element, index);
        }
        return static_cast<uint32_t>(place);
    }

    template <class T>
    HOST_DEVICE static void copy(Thread thread, const T *tile, T *out)
    {
        for (unsigned i = thread.thread; i < TILE * sizeof(T) / sizeof(uint4); i += TILE_THREADS)
            reinterpret_cast<uint4 *>(out)[i] = reinterpret_cast<const uint4 *>(tile)[i];
    }
};

template <class Key, class Packed>
struct CountBuckets {
    static constexpr int MAX_THREADS = 256;
    struct Shared {
        uint32_t sums[MAX_THREADS];
    };

    Tiles<Key, Packed> tiles;
    uint32_t *totals;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        uint32_t sum = 0;
        for (int64_t tile = thread.thread; tile < tiles.count; tile += MAX_THREADS)
            sum += *tiles.start_of(thread.block + 1, tile) - *tiles.start_of(thread.block, tile);
        const uint32_t total = sum_up_to(thread, shared->sums, sum);
        if (thread.thread == MAX_THREADS - 1) totals[thread.block] = total;
    }
};

/* Where many indices of a tile are in one bucket, as those of sorted indices are. */
struct LongRuns {
    uint32_t count;
    uint32_t tiles[127];
};

/* The indices of a tile from begin to end: a thread takes one of so many, and several at once so
 * that the loads need not wait for each other. */
template <class Key, class Packed, class Function>
HOST_DEVICE inline void visit_run(const Tiles<Key, Packed> &tiles, int64_t tile, int begin, int end,
                                  int step, const Function &function)
{
    constexpr int BATCH = 2;
    const int64_t tile_begin = tile * Tiles<Key, Packed>::SIZE;
    for (int first = begin; first < end; first += BATCH * step) {
        Key key[BATCH];
        Packed packed[BATCH];
        UNROLL
        for (int k = 0; k < BATCH; k++) {
            const int at = first + k * step;
            if (at >= end) continue;
            key[k] = load_once(tiles.keys + tile_begin + at);
            packed[k] = load_once(tiles.packed + tile_begin + at);
        }
        UNROLL
        for (int k = 0; k < BATCH; k++)
            if (first + k * step < end) function(key[k], packed[k], tile_begin);
    }
}

/* The indices of a bucket in some tiles. Threads side by side take those of a tile together; what
 * is long is left to the whole block. */
template <int SIDE_BY_SIDE, class Key, class Packed, class Function>
HOST_DEVICE inline void visit_bucket(Thread thread, const Tiles<Key, Packed> &tiles, int64_t bucket,
                                     int64_t begin_tile, int64_t end_tile, LongRuns *runs,
                                     const Function &function)
{
    constexpr int LONG = 16 * SIDE_BY_SIDE;
    constexpr uint32_t MOST = sizeof runs->tiles / sizeof *runs->tiles;
    const int lane = static_cast<int>(thread.thread % SIDE_BY_SIDE);
    if (thread.thread == 0) runs->count = 0;
    thread.sync();
    for (int64_t tile = begin_tile + thread.thread / SIDE_BY_SIDE; tile < end_tile;
         tile += thread.threads / SIDE_BY_SIDE) {
        const int begin = *tiles.start_of(bucket, tile), end = *tiles.start_of(bucket + 1, tile);
        const bool is_long = end - begin > LONG;
        if (is_long && lane == 0) {
            const uint32_t at = atomic_next(&runs->count);
            if (at < MOST) runs->tiles[at] = static_cast<uint32_t>(tile);
        }
        if (!is_long) visit_run(tiles, tile, begin + lane, end, SIDE_BY_SIDE, function);
    }
    thread.sync();
    const auto visit_long = [&](int64_t tile) {
        const int begin = *tiles.start_of(bucket, tile), end = *tiles.start_of(bucket + 1, tile);
        if (end - begin > LONG)
            visit_run(tiles, tile, begin + static_cast<int>(thread.thread), end,
                      static_cast<int>(thread.threads), function);
    };
    if (runs->count <= MOST)
        for (uint32_t i = 0; i < runs->count; i++) visit_long(runs->tiles[i]);
    else
        for (int64_t tile = begin_tile; tile < end_tile; tile++) visit_long(tile);
}

/* A bucket that has many indices gets several blocks and tables, one after the other. */
template <class Kind>
struct TileTables {
    static constexpr int MAX_THREADS = THREADS, MIN_BLOCKS = 4;
    static constexpr int64_t BYTES = 32 << 10;
    using Key = uint16_t;
    using Entry = typename Kind::Entry;
    struct Shared {
        Entry entries[BYTES / sizeof(Entry)];
        uint32_t sums[THREADS];
        unsigned bucket, part, parts;
        LongRuns runs;
    };

    DeviceScatter scatter;
    Tiles<Key, typename Kind::Packed> tiles;
    const uint32_t *totals;
    int64_t each; /* how many indices make one more part of a bucket */
    Entry *tables;
    uint32_t
        *firsts; /* the number of a bucket's first table, and behind the last one that of all */

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        const uint32_t parts =
            thread.thread < tiles.buckets
                ? 1 + static_cast<uint32_t>(totals[thread.thread] / static_cast<uint32_t>(each))
                : 0;
        if (thread.thread == 0) shared->parts = 0;
        const uint32_t end = sum_up_to(thread, shared->sums, parts), begin = end - parts;
        if (begin <= thread.block && thread.block < end) {
            shared->bucket = thread.thread;
            shared->part = thread.block - begin;
            shared->parts = parts;
        }
        if (thread.block == 0 && thread.thread <= tiles.buckets) firsts[thread.thread] = begin;
        constexpr int ENTRIES = BYTES / sizeof(Entry);
        for (int i = thread.thread; i < ENTRIES; i += THREADS) shared->entries[i] = Kind::none();
        thread.sync();
        if (shared->parts == 0 || scatter.is_rejected()) return;

        const int64_t stretch = (tiles.count + shared->parts - 1) / shared->parts;
        const int64_t from = shared->part * stretch;
        const int64_t to = tiles.count - from < stretch ? tiles.count : from + stretch;
        visit_bucket<16>(thread, tiles, shared->bucket, from, to, &shared->runs,
                         [shared](Key key, typename Kind::Packed packed, int64_t tile_begin) {
                             Kind::put(&shared->entries[key], Kind::unpack(packed, tile_begin));
                         });
        thread.sync();
        if constexpr (Kind::ATOMIC) {
            char *x = scatter.x + shared->bucket * (int64_t)ENTRIES * scatter.axis_stride;
            for (int i = thread.thread; i < ENTRIES; i += THREADS)
                if (!is_none(shared->entries[i]))
                    atomic_add(
                        reinterpret_cast<typename Kind::Number *>(x + i * scatter.axis_stride),
                        shared->entries[i]);
        } else {
            for (int i = thread.thread; i < ENTRIES; i += THREADS)
                tables[thread.block * (int64_t)ENTRIES + i] = shared->entries[i];
        }
    }
};

/* A block for some entries; where these are few, the tables of each are split among its warps. */
template <class Kind>
struct FinishTables {
    static constexpr int MAX_THREADS = 256;
    using Entry = typename Kind::Entry;
    using Number = typename Kind::Number;
    struct Shared {
        Entry entries[MAX_THREADS];
    };

    DeviceScatter scatter;
    int entries, row_numbers;
    int width; /* how many entries a block has */
    int count; /* of tables */
    int pitch; /* of a table */
    int key_bits;
    const uint32_t *firsts; /* NULL: all tables are of the same bucket */
    const Entry *tables;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        const int lane = static_cast<int>(thread.thread) % width;
        const int part = static_cast<int>(thread.thread) / width, parts = MAX_THREADS / width;
        const int at = static_cast<int>(thread.block) * width + lane;
        Entry entry = Kind::none();
        if (at < entries) {
            int64_t first = 0, end = count;
            int within = at;
            if (firsts != NULL) {
                first = firsts[at >> key_bits];
                end = firsts[(at >> key_bits) + 1];
                within = at & (pitch - 1);
            }
            for (int64_t i = first + part; i < end; i += parts)
                entry = Kind::join(entry, tables[i * pitch + within]);
        }
        shared->entries[thread.thread] = entry;
        thread.sync();
        if (part > 0 || at >= entries || scatter.is_rejected()) return;
        for (int i = 1; i < parts; i++)
            entry = Kind::join(entry, shared->entries[i * width + lane]);
        if (is_none(entry)) return;
        Number *number =
            reinterpret_cast<Number *>(scatter.x + at / row_numbers * scatter.axis_stride) +
            at % row_numbers;
        Kind::finish(scatter, number, entry);
    }
};

/* Some tiles of a bucket. Blocks take the buckets one after the other. */
template <class T>
struct AddWindows {
    static constexpr int MAX_THREADS = 256;
    using Kind = SumOf<T>;
    using Shared = LongRuns;

    DeviceScatter scatter;
    Tiles<uint32_t, typename Kind::Packed> tiles;
    int64_t tiles_per_block, blocks_per_bucket;
    int64_t ahead; /* how many buckets, whose window is on its way to the cache; 0: none is */

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        if (scatter.is_rejected()) return;
        const int64_t bucket = thread.block / static_cast<uint32_t>(blocks_per_bucket);
        const int64_t part = thread.block - bucket * blocks_per_bucket;
        if (ahead > 0) prefetch(thread, bucket + ahead, part);
        const int64_t from = part * tiles_per_block;
        const int64_t to =
            tiles.count - from < tiles_per_block ? tiles.count : from + tiles_per_block;
        char *window = scatter.x + (bucket << tiles.key_bits) * scatter.axis_stride;
        visit_bucket<8>(thread, tiles, bucket, from, to, shared,
                        [this, window](uint32_t key, typename Kind::Packed packed, int64_t) {
                            atomic_add(reinterpret_cast<T *>(window + key * scatter.axis_stride),
                                       bits_as<T>(packed));
                        });
    }

    /* A block's part of a window, which is loaded as a whole: by its sectors, as additions ask for
     * them, it takes longer. */
    HOST_DEVICE void prefetch(Thread thread, int64_t bucket, int64_t part) const
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        constexpr int64_t STEP = 1024;
        const int64_t begin = bucket << tiles.key_bits;
        int64_t end = begin + (1ll << tiles.key_bits);
        if (end > scatter.axis_size) end = scatter.axis_size;
        const uintptr_t from = reinterpret_cast<uintptr_t>(scatter.x) + begin * sizeof(T);
        const uintptr_t to = reinterpret_cast<uintptr_t>(scatter.x) + end * sizeof(T) & ~15ull;
        const int64_t each =
            ((1ll << tiles.key_bits) * sizeof(T) / blocks_per_bucket + STEP) & ~(STEP - 1);
        uintptr_t at = (from + 15 & ~15ull) + part * each + thread.thread * STEP;
        for (int64_t i = thread.thread * STEP; i < each && at < to; i += MAX_THREADS * STEP) {
            const uint32_t bytes = static_cast<uint32_t>(to - at < STEP ? to - at : STEP);
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes)
                         : "memory");
            at += MAX_THREADS * STEP;
        }
#else
        (void)thread, (void)bucket, (void)part;
#endif
    }
};

/* Launches. */

static int multiprocessors_of(int device)
{
    static int known[MAX_DEVICES];
    int count = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
    if (count > 0) return count;
    DeviceInfo info;
    if (cuda_device_info(device, &info) != STATUS_OK) return 1;
    __atomic_store_n(&known[device], info.multiprocessors, __ATOMIC_RELAXED);
    return info.multiprocessors;
}

template <class Kind>
static Status finish_tables(FinishTables<Kind> finish, Stream *stream)
{
    /* Enough blocks to fill the device, or else as many as there are warps for each entry. */
    finish.width = finish.entries >= 1 << 16 ? finish.MAX_THREADS : 32;
    const unsigned blocks =
        static_cast<unsigned>((finish.entries + finish.width - 1) / finish.width);
    return launch_with_shared(finish, Grid{blocks, (unsigned)finish.MAX_THREADS}, stream->handle);
}

#ifdef GPUOPS_FAKE_CUDA /* so that tests come here */
constexpr int64_t LEAST_BLOCKS = 2, LEAST_WINDOWED = 6000, LARGE_TABLE_BYTES = 256 << 10;
#else
/* An H200 adds from 2^20 numbers on faster in windows, to tables as large as half of its cache. */
constexpr int64_t LEAST_BLOCKS = 16, LEAST_WINDOWED = 1 << 20, LARGE_TABLE_BYTES = 32 << 20;
#endif

/* Where one table fits a block; *done says whether that is so. */
template <class Kind>
static Status run_blocks(DeviceScatter scatter, Scratch *scratch, bool *done)
{
    using Entry = typename Kind::Entry;
    constexpr int64_t NUMBER_BYTES = sizeof(typename Kind::Number);
    const int64_t row_numbers = scatter.row_bytes / NUMBER_BYTES;
    const int64_t most = TABLE_BYTES / (int64_t)sizeof(Entry);
    if (row_numbers > most || scatter.axis_size > most / row_numbers) return STATUS_OK;
    if (scatter.axis_size == 0) return STATUS_OK;
    const int64_t entries = scatter.axis_size * row_numbers;

    /* The tables are to be small work beside what goes into them. */
    set_units(&scatter, NUMBER_BYTES);
    int64_t blocks = scatter.units / (8 * entries + THREADS * ITEMS);
    if (blocks < LEAST_BLOCKS) return STATUS_OK;
    const int64_t most_blocks = 4 * (int64_t)multiprocessors_of(scratch->stream->device);
    if (blocks > most_blocks) blocks = most_blocks;
    int64_t copies = 1;
    while (copies < MOST_COPIES && 2 * copies * entries <= most) copies *= 2;

    void *tables;
    Status status = scratch_take(scratch, blocks * entries * (int64_t)sizeof(Entry), &tables);
    if (status == STATUS_OK) status = take_rejected(&scatter, scratch);
    if (status != STATUS_OK) return status;
    *done = true;
    BlockTables<Kind> sum = {};
    sum.scatter = scatter;
    sum.rejected = const_cast<unsigned *>(scatter.rejected);
    sum.entries = static_cast<int>(entries);
    sum.row_numbers = static_cast<int>(row_numbers);
    sum.copies = static_cast<int>(copies);
    sum.tables = static_cast<Entry *>(tables);
    status = launch_with_shared(sum, Grid{(unsigned)blocks, THREADS}, scratch->stream->handle);
    if (status != STATUS_OK) return status;
    FinishTables<Kind> finish = {};
    finish.scatter = scatter;
    finish.entries = finish.pitch = sum.entries;
    finish.row_numbers = sum.row_numbers;
    finish.count = static_cast<int>(blocks);
    finish.tables = sum.tables;
    return finish_tables(finish, scratch->stream);
}

template <class Key, class Packed>
static void set_tiles(const DeviceScatter &scatter, Tiles<Key, Packed> *tiles)
{
    constexpr int64_t TILE = Tiles<Key, Packed>::SIZE;
    tiles->count = (scatter.index_count + TILE - 1) / TILE;
    tiles->buckets = ((scatter.axis_size - 1) >> tiles->key_bits) + 1;
}

/* Sorts the tiles; 2 bytes for each tile and bucket, and for each index a key and what goes along.
 * It is the first kernel of a call, and notes bad indices: all memory is there before. */
template <class Kind, class Key>
static Status sort_tiles(DeviceScatter *scatter, Scratch *scratch,
                         Tiles<Key, typename Kind::Packed> *tiles)
{
    using Packed = typename Kind::Packed;
    constexpr int64_t TILE = Tiles<Key, Packed>::SIZE;
    void *keys, *packed, *starts;
    Status status = take_rejected(scatter, scratch);
    if (status == STATUS_OK)
        status = scratch_take(scratch, tiles->count * TILE * (int64_t)sizeof(Key), &keys);
    if (status == STATUS_OK)
        status = scratch_take(scratch, tiles->count * TILE * (int64_t)sizeof(Packed), &packed);
    if (status == STATUS_OK)
        status = scratch_take(
            scratch, tiles->count * (tiles->buckets + 1) * (int64_t)sizeof(uint16_t), &starts);
    if (status != STATUS_OK) return status;
    tiles->keys = static_cast<Key *>(keys);
    tiles->packed = static_cast<Packed *>(packed);
    tiles->starts = static_cast<uint16_t *>(starts);
    SortTiles<Kind, Key> sort = {};
    sort.scatter = *scatter;
    sort.rejected = const_cast<unsigned *>(scatter->rejected);
    sort.value_stride = scatter->index == 0 ? 0 : scatter->loops[0].value;
    sort.tiles = *tiles;
    return launch_with_shared(sort, Grid{(unsigned)tiles->count, TILE_THREADS},
                              scratch->stream->handle);
}

/* So many single numbers, each of them somewhere on one axis. */
static bool can_be_tiled(const DeviceScatter &scatter, int64_t number_bytes, int64_t least)
{
    return scatter.one_loop && scatter.index <= 1 && scatter.axis_ndim == 1 &&
           scatter.row_bytes == number_bytes && scatter.index_count >= least &&
           scatter.index_count < UINT32_MAX && scatter.axis_size > 0 &&
           scatter.axis_size < UINT32_MAX;
}

template <class Kind>
static Status run_tiles(DeviceScatter scatter, Scratch *scratch, bool *done)
{
    using Entry = typename Kind::Entry;
    using Table = TileTables<Kind>;
    constexpr int ENTRIES = Table::BYTES / sizeof(Entry);
#ifdef GPUOPS_FAKE_CUDA
    constexpr int64_t LEAST = 6000;
#else
    constexpr int64_t LEAST = Kind::LEAST_TILED;
#endif
    /* Tables that are sparser than that are mostly work of their own. */
    if (!can_be_tiled(scatter, sizeof(typename Kind::Number), LEAST) ||
        scatter.axis_size > 16 * scatter.index_count ||
        scatter.axis_size > (int64_t)MOST_BUCKETS * ENTRIES)
        return STATUS_OK;
    *done = true;
    Stream *stream = scratch->stream;
    Tiles<uint16_t, typename Kind::Packed> tiles = {};
    while (1 << tiles.key_bits < ENTRIES) tiles.key_bits++;
    set_tiles(scatter, &tiles);

    /* As many blocks as run at one time, if there is enough to do, and as many as there are buckets
     * twice. Their tables are 17 MB on an H200, or 34 MB for the most buckets. */
    int64_t most_tables = Table::MIN_BLOCKS * (int64_t)multiprocessors_of(stream->device);
    if (most_tables < 2 * tiles.buckets) most_tables = 2 * tiles.buckets;
    void *tables = NULL, *totals;
    Status status = STATUS_OK;
    if (!Kind::ATOMIC) status = scratch_take(scratch, most_tables * Table::BYTES, &tables);
    if (status == STATUS_OK)
        status =
            scratch_take(scratch, (2 * tiles.buckets + 1) * (int64_t)sizeof(uint32_t), &totals);
    if (status == STATUS_OK) status = sort_tiles<Kind>(&scatter, scratch, &tiles);
    if (status != STATUS_OK) return status;
    CountBuckets<uint16_t, typename Kind::Packed> counts = {};
    counts.tiles = tiles;
    counts.totals = static_cast<uint32_t *>(totals);
    const unsigned buckets = static_cast<unsigned>(tiles.buckets);
    status =
        launch_with_shared(counts, Grid{buckets, (unsigned)counts.MAX_THREADS}, stream->handle);
    if (status != STATUS_OK) return status;
    Table table = {};
    table.scatter = scatter;
    table.tiles = tiles;
    table.totals = counts.totals;
    table.each = scatter.index_count / (most_tables - tiles.buckets) + 1;
    if (table.each < 4 * ENTRIES) table.each = 4 * ENTRIES;
    table.tables = static_cast<Entry *>(tables);
    table.firsts = counts.totals + tiles.buckets;
    status = launch_with_shared(table, Grid{(unsigned)most_tables, THREADS}, stream->handle);
    if (status != STATUS_OK || Kind::ATOMIC) return status;
    FinishTables<Kind> finish = {};
    finish.scatter = scatter;
    finish.entries = static_cast<int>(scatter.axis_size);
    finish.row_numbers = 1;
    finish.pitch = ENTRIES;
    finish.key_bits = static_cast<int>(tiles.key_bits);
    finish.firsts = table.firsts;
    finish.tables = table.tables;
    return finish_tables(finish, stream);
}

template <class Kind>
static Status run_tables(const DeviceScatter &scatter, Scratch *scratch, bool *done)
{
    *done = false;
    if (!scatter.one_loop || scatter.axis_ndim > 1) return STATUS_OK;
    Status status = run_blocks<Kind>(scatter, scratch, done);
    return status != STATUS_OK || *done ? status : run_tiles<Kind>(scatter, scratch, done);
}

Status add_in_tables(const DeviceScatter &scatter, Dtype dtype, Scratch *scratch, bool *done)
{
    switch (dtype) {
    case DTYPE_FLOAT16:
        return run_tables<SumOf<Half>>(scatter, scratch, done);
    case DTYPE_BFLOAT16:
        return run_tables<SumOf<BFloat16>>(scatter, scratch, done);
    case DTYPE_FLOAT32:
        return run_tables<SumOf<float>>(scatter, scratch, done);
    case DTYPE_FLOAT64:
        return run_tables<SumOf<double>>(scatter, scratch, done);
    default:
        break;
    }
    switch (dtype_bytes(dtype)) {
    case 1:
        return run_tables<SumOf<uint8_t>>(scatter, scratch, done);
    case 2:
        return run_tables<SumOf<uint16_t>>(scatter, scratch, done);
    case 4:
        return run_tables<SumOf<uint32_t>>(scatter, scratch, done);
    default:
        return run_tables<SumOf<uint64_t>>(scatter, scratch, done);
    }
}

Status write_by_tables(const DeviceScatter &scatter, int64_t alignment, Scratch *scratch,
                       bool *done)
{
    *done = false;
    if (scatter.row_bytes != alignment || scatter.index_count >= UINT32_MAX) return STATUS_OK;
    switch (alignment) {
    case 1:
        return run_tables<LastOf<uint8_t>>(scatter, scratch, done);
    case 2:
        return run_tables<LastOf<uint16_t>>(scatter, scratch, done);
    case 4:
        return run_tables<LastOf<uint32_t>>(scatter, scratch, done);
    case 8:
        return run_tables<LastOf<uint2>>(scatter, scratch, done);
    default:
        return run_tables<LastOf<uint4>>(scatter, scratch, done);
    }
}

template <class T>
static Status run_windows(DeviceScatter scatter, Scratch *scratch)
{
    /* Measured on an H200: at one time four windows are written, of 2 MiB each for 128 Mi floats,
     * and the next four are on their way. That takes 110 us for the tiles of 16 Mi additions and
     * 300 us for these; 420 us where additions fetch the windows, and 1000 us without tiles. */
    constexpr int64_t WINDOWS = 256, BLOCKS = 256, LEAST_TILES = 16, AHEAD_BYTES = 8 << 20;
    constexpr int64_t SECTOR_BYTES = 32;
    AddWindows<T> add = {};
    while (WINDOWS << add.tiles.key_bits < scatter.axis_size) add.tiles.key_bits++;
    set_tiles(scatter, &add.tiles);
    Status status = sort_tiles<SumOf<T>>(&scatter, scratch, &add.tiles);
    if (status != STATUS_OK) return status;
    add.scatter = scatter;
    add.tiles_per_block = (add.tiles.count + BLOCKS - 1) / BLOCKS;
    if (add.tiles_per_block < LEAST_TILES) add.tiles_per_block = LEAST_TILES;
    add.blocks_per_bucket = (add.tiles.count + add.tiles_per_block - 1) / add.tiles_per_block;
    const int64_t window_bytes = (int64_t)sizeof(T) << add.tiles.key_bits;
    /* Where most sectors are added to. */
    if (scatter.axis_stride == sizeof(T) &&
        scatter.index_count * SECTOR_BYTES >= scatter.axis_size * (int64_t)sizeof(T))
        add.ahead = window_bytes < AHEAD_BYTES ? AHEAD_BYTES / window_bytes : 1;
    const int64_t blocks = add.blocks_per_bucket * add.tiles.buckets;
    return launch_with_shared(add, Grid{(unsigned)blocks, (unsigned)add.MAX_THREADS},
                              scratch->stream->handle);
}

Status add_in_windows(const DeviceScatter &scatter, Dtype dtype, Scratch *scratch, bool *done)
{
    const int64_t bytes = dtype_bytes(dtype);
    const int64_t stride = scatter.axis_stride < 0 ? -scatter.axis_stride : scatter.axis_stride;
    *done = can_be_tiled(scatter, bytes, LEAST_WINDOWED) &&
            scatter.axis_size * stride >= LARGE_TABLE_BYTES;
    if (!*done) return STATUS_OK;
    if (dtype == DTYPE_FLOAT32) return run_windows<float>(scatter, scratch);
    if (dtype == DTYPE_FLOAT64) return run_windows<double>(scatter, scratch);
    return bytes == 4 ? run_windows<uint32_t>(scatter, scratch)
                      : run_windows<uint64_t>(scatter, scratch);
}

#endif
