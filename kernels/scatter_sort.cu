/* scatter_add, and scatter into large tables, on a GPU by way of sorting.
 *
 * Indices are sorted by place, from the lowest digit to the highest, and those of one place stay in
 * their order. Each pass is three kernels: CountDigits counts the digits in every block's part of
 * the keys, ScanDigits makes of that where each block puts its first key of each digit, MoveDigits
 * puts the keys there. It sorts a tile in shared memory first, so that neighbours go to neighbours.
 *
 * add_in_order then lets one thread add up all that goes to an element of x, in the order of the
 * indices: the sum is the same in every run, and that of numpy.add.at. It is also the way for
 * dtypes that are summed in a wider one, since it rounds once and needs no room but for the
 * indices. Where a row is a single number, that is what goes along with the keys: AddNumbers has
 * its blocks load them, and WriteLast writes them. Otherwise the numbers of the indices go along,
 * and AddRuns looks for the rows. */
#include "scatter_device.cuh"
#include "transfer.cuh"

#ifdef __CUDACC__

constexpr int THREADS = SCATTER_THREADS, LANES = 32, WARPS = THREADS / LANES;
constexpr int MOST_DIGIT_BITS = 8, MOST_DIGITS = 1 << MOST_DIGIT_BITS;
static_assert(MOST_DIGITS == THREADS, "a thread for each digit");
constexpr int64_t MOST_PARTS = 4096; /* which a pass cuts the keys into */

/* One digit of the keys, and how they are cut: part of a block, made of whole tiles. */
struct Pass {
    int64_t count, part;
    int parts;
    int shift, bits;

    HOST_DEVICE uint32_t digit_of(uint64_t key) const
    {
        return static_cast<uint32_t>(key >> shift) & ((1u << bits) - 1);
    }

    HOST_DEVICE int64_t begin_of(unsigned block) const { return block * part; }
    HOST_DEVICE int64_t end_of(unsigned block) const
    {
        return count - part < begin_of(block) ? count : begin_of(block) + part;
    }
};

/* The places that the indices mean; where there is none, the size of the axis. */
template <class Word>
struct MakeKeys {
    static constexpr int MAX_THREADS = THREADS, ITEMS = 4;

    DeviceScatter scatter;
    Word *keys;
    unsigned *rejected;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t first = thread.block * (int64_t)(THREADS * ITEMS) + thread.thread;
        int64_t elements[ITEMS], values[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const int64_t element = first + k * THREADS;
            elements[k] = element < scatter.index_count ? element : 0;
        }
        load_indices<ITEMS>(scatter.indices, scatter.index_dtype, elements, values);
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const int64_t element = first + k * THREADS;
            if (element >= scatter.index_count) continue;
            const int64_t place = scatter.place_of(values[k]);
            keys[element] = static_cast<Word>(place < 0 ? scatter.axis_size : place);
            if (place >= 0 || scatter.mode != MODE_RAISE) continue;
            store_same(rejected, 1u);
            scatter.note(element, values[k]);
        }
    }
};

template <class Key, class Word>
struct CountDigits {
    static constexpr int MAX_THREADS = THREADS;
    struct Shared {
        uint32_t counts[MOST_DIGITS];
    };

    Pass pass;
    const Key *keys;
    Word *counts; /* of each digit, one after the other, in every part */

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        shared->counts[thread.thread] = 0;
        thread.sync();
        const int64_t end = pass.end_of(thread.block);
        for (int64_t i = pass.begin_of(thread.block) + thread.thread; i < end; i += THREADS)
            atomic_add(&shared->counts[pass.digit_of(keys[i])], 1u);
        thread.sync();
        if (thread.thread < 1u << pass.bits)
            counts[thread.thread * (int64_t)pass.parts + thread.block] =
                shared->counts[thread.thread];
    }
};

/* Every count becomes the sum of those before it of the same digit: a block for each. */
template <class Word>
struct ScanDigits {
    static constexpr int MAX_THREADS = 1024;
    struct Shared {
        Word sums[MAX_THREADS];
    };

    Word *counts, *totals;
    int64_t parts;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        Word *mine = counts + thread.block * parts;
        Word before = 0;
        for (int64_t begin = 0; begin < parts; begin += thread.threads) {
            const int64_t at = begin + thread.thread;
            const Word count = at < parts ? mine[at] : 0;
            const Word sum = sum_up_to(thread, shared->sums, count);
            if (at < parts) mine[at] = before + (sum - count);
            thread.sync();
            if (thread.thread == thread.threads - 1) shared->sums[0] = sum;
            thread.sync();
            before += shared->sums[0];
            thread.sync();
        }
        if (thread.thread == 0) totals[thread.block] = before;
    }
};

/* The unsigned number as which a number goes along. */
template <int BYTES>
struct PayloadOf : BitsOf<BYTES> {};
template <>
struct PayloadOf<8> {
    using Type = uint64_t;
};

/* What goes along with the keys: as it was put by the pass before, or else the number of an index,
 * or its value. */
template <class Payload>
struct Carried {
    const Payload *payload; /* NULL: there was no pass before */
    const char *values;     /* NULL: numbers */
    int64_t value_stride;

    HOST_DEVICE Payload at(int64_t i) const
    {
        if (payload != NULL) return payload[i];
        if (values != NULL)
            return load_once(reinterpret_cast<const Payload *>(values + i * value_stride));
        return static_cast<Payload>(i);
    }
};

template <class Key, class Payload, class Word>
struct MoveDigits {
    static constexpr int MAX_THREADS = THREADS, MIN_BLOCKS = 4;
    static constexpr int BYTES = sizeof(Key) + sizeof(Payload);
    static constexpr int ITEMS = 128 / (BYTES < 8 ? 8 : BYTES), TILE = ITEMS * THREADS;

    struct Shared {
        union {
            struct {
                Key keys[TILE];
                Payload payload[TILE];
            } sorted;
            struct { /* for the host, which has no warps */
                uint16_t digits[TILE], ranks[TILE];
            } host;
        };
        uint32_t counts[WARPS][MOST_DIGITS];
        uint32_t sums[MOST_DIGITS], starts[MOST_DIGITS];
        Word offsets[MOST_DIGITS]; /* from a place in the tile to one in the output */
    };

    Pass pass;
    const Key *keys;
    Carried<Payload> carried;
    Key *sorted_keys;
    Payload *sorted_payload;
    const Word *counts, *totals;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        const unsigned warp = thread.thread / LANES, lane = thread.thread % LANES;
        const unsigned digits = 1u << pass.bits;
        /* Where the next key goes whose digit is the number of this thread. */
        const Word all = thread.thread < digits ? totals[thread.thread] : Word(0);
        Word next = sum_up_to(thread, shared->offsets, all) - all;
        if (thread.thread < digits)
            next += counts[thread.thread * (int64_t)pass.parts + thread.block];
        const int64_t end = pass.end_of(thread.block);
        for (int64_t begin = pass.begin_of(thread.block); begin < end; begin += TILE) {
            const int count = end - begin < TILE ? static_cast<int>(end - begin) : TILE;
            for (int i = 0; i < WARPS; i++) shared->counts[i][thread.thread] = 0;
            thread.sync();

            Key key[ITEMS];
            Payload payload[ITEMS];
            uint32_t rank[ITEMS];
            const int first = static_cast<int>(warp * LANES * ITEMS + lane);
            UNROLL
            for (int k = 0; k < ITEMS; k++) {
                if (first + k * LANES >= count) continue;
                key[k] = keys[begin + first + k * LANES];
                payload[k] = carried.at(begin + first + k * LANES);
            }
            rank_in_warp(thread, shared, key, first, count, rank);
            thread.sync();

            /* Thread by thread, the digits: how many there are in the warps before, in all, and of
             * all lower ones. */
            uint32_t total = 0;
            for (int i = 0; i < WARPS; i++) {
                const uint32_t here = shared->counts[i][thread.thread];
                shared->counts[i][thread.thread] = total;
                total += here;
            }
            const uint32_t start = sum_up_to(thread, shared->sums, total) - total;
            shared->starts[thread.thread] = start;
            shared->offsets[thread.thread] = next - start;
            next += total;
            thread.sync();

            UNROLL
            for (int k = 0; k < ITEMS; k++) {
                if (first + k * LANES >= count) continue;
                const uint32_t digit = pass.digit_of(key[k]);
                const uint32_t at = shared->starts[digit] + shared->counts[warp][digit] + rank[k];
                shared->sorted.keys[at] = key[k];
                shared->sorted.payload[at] = payload[k];
            }
            thread.sync();
            for (int i = thread.thread; i < count; i += THREADS) {
                const Key moved = shared->sorted.keys[i];
                const Word at = shared->offsets[pass.digit_of(moved)] + static_cast<Word>(i);
                sorted_keys[at] = moved;
                sorted_payload[at] = shared->sorted.payload[i];
            }
            thread.sync();
        }
    }

#ifdef __CUDA_ARCH__
    /* The lanes with the same digit. __match_any_sync takes longer. */
    __device__ uint32_t same_in_warp(uint32_t digit, bool is_there) const
    {
        uint32_t same = __ballot_sync(~0u, is_there);
        UNROLL
        for (int bit = 0; bit < MOST_DIGIT_BITS; bit++) {
            const bool is_set = digit >> bit & 1;
            const uint32_t set = __ballot_sync(~0u, is_set);
            same &= is_set ? set : ~set;
        }
        return same;
    }
#endif

    /* How many keys of the same digit come before each in its warp's part of the tile, and the
     * counts of those parts. */
    HOST_DEVICE void rank_in_warp(Thread thread, Shared *shared, const Key *key, int first,
                                  int count, uint32_t *rank) const
    {
        const unsigned warp = thread.thread / LANES;
#ifdef __CUDA_ARCH__
        uint32_t *counts_here = shared->counts[warp];
        const uint32_t lower = (1u << thread.thread % LANES) - 1;
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const bool is_there = first + k * LANES < count;
            const uint32_t digit = is_there ? pass.digit_of(key[k]) : 0;
            const uint32_t same = same_in_warp(digit, is_there);
            const uint32_t before = is_there ? counts_here[digit] : 0;
            __syncwarp();
            if (is_there && (same & lower) == 0) counts_here[digit] = before + __popc(same);
            __syncwarp();
            rank[k] = before + __popc(same & lower);
        }
#else
        for (int k = 0; k < ITEMS; k++)
            if (first + k * LANES < count)
                shared->host.digits[first + k * LANES] =
                    static_cast<uint16_t>(pass.digit_of(key[k]));
        thread.sync();
        const int begin = static_cast<int>(warp) * LANES * ITEMS;
        for (int i = begin; thread.thread % LANES == 0 && i < begin + LANES * ITEMS && i < count;
             i++)
            shared->host.ranks[i] =
                static_cast<uint16_t>(shared->counts[warp][shared->host.digits[i]]++);
        thread.sync();
        for (int k = 0; k < ITEMS; k++)
            if (first + k * LANES < count) rank[k] = shared->host.ranks[first + k * LANES];
#endif
    }
};

/* A thread for each unit of each row, of which only those do something whose index is the first of
 * its place. */
template <class T, int COUNT, class Word>
struct AddRuns {
    static constexpr int MAX_THREADS = THREADS;
    static constexpr int BATCH = COUNT == 1 ? 8 : 4;

    DeviceScatter scatter;
    const Word *keys;
    const Word *numbers;

    HOST_DEVICE void operator()(Thread thread) const
    {
        if (scatter.is_rejected()) return;
        const int64_t unit = thread.block * (int64_t)THREADS;
        if (thread.thread >= scatter.units - unit) return;
        const DeviceScatter::Start start = scatter.start_at(unit);
        int64_t row, column, x_offset, value, i;
        scatter.find(start, thread.thread, &row, &column);
        scatter.locate(row, &x_offset, &value, &i);
        const Word key = keys[i];
        const int64_t place = static_cast<int64_t>(key);
        if (place >= scatter.axis_size || (i > 0 && keys[i - 1] == key)) return;

        const auto number_at = [this](int64_t at) { return static_cast<int64_t>(numbers[at]); };
        auto *x = reinterpret_cast<Numbers<T, COUNT> *>(scatter.x + x_offset +
                                                        scatter.axis_offset(place)) +
                  column;
        Sums<T, COUNT> sums(*x);
        const int64_t count = scatter.index_count;
        if (i + 1 == count || keys[i + 1] != key) {
            sums.template add<1>(scatter, value, column, i, 1, number_at);
        } else {
            int some = BATCH;
            for (; some == BATCH; i += BATCH) {
                some = 0;
                UNROLL
                for (int k = 0; k < BATCH; k++)
                    some += i + k < count && keys[i + k < count ? i + k : i] == key;
                sums.template add<BATCH>(scatter, value, column, i, some, number_at);
            }
        }
        *x = sums.rounded();
    }
};

/* The same for numbers that have moved with their keys. A block loads some of them at once, and its
 * threads add up the runs that begin there; for the last run all of them load what is to come. */
template <class T>
struct AddNumbers {
    static constexpr int MAX_THREADS = THREADS, TILE = 8 * THREADS;
    using Payload = typename PayloadOf<sizeof(T)>::Type;
    using S = typename Computes<T>::Type;
    struct Shared {
        uint32_t keys[TILE];
        Payload payload[TILE];
        S sum;
        uint32_t key;
        bool goes_on;
    };

    DeviceScatter scatter;
    const uint32_t *keys;
    const Payload *payload;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        if (scatter.is_rejected()) return;
        int64_t begin = thread.block * (int64_t)TILE;
        int count = load(thread, shared, begin);
        if (thread.thread == 0) shared->goes_on = false;
        const uint32_t before = begin > 0 ? keys[begin - 1] : ~shared->keys[0];
        thread.sync();
        for (int i = thread.thread; i < count; i += THREADS) {
            const uint32_t key = shared->keys[i];
            if (key >= scatter.axis_size || key == (i > 0 ? shared->keys[i - 1] : before)) continue;
            S sum = static_cast<S>(*number_at(key));
            if (add_run(shared, key, i, count, &sum) < count) {
                *number_at(key) = T(sum);
            } else {
                shared->sum = sum;
                shared->key = key;
                shared->goes_on = true;
            }
        }
        thread.sync();
        while (shared->goes_on) {
            begin += TILE;
            thread.sync();
            count = load(thread, shared, begin);
            if (thread.thread == 0) {
                S sum = shared->sum;
                shared->goes_on =
                    add_run(shared, shared->key, 0, count, &sum) == count && count > 0;
                shared->sum = sum;
                if (!shared->goes_on) *number_at(shared->key) = T(sum);
            }
            thread.sync();
        }
    }

    HOST_DEVICE T *number_at(uint32_t place) const
    {
        return reinterpret_cast<T *>(scatter.x + place * scatter.axis_stride);
    }

    HOST_DEVICE int load(Thread thread, Shared *shared, int64_t begin) const
    {
        const int64_t left = scatter.index_count - begin;
        const int count = left < TILE ? (left < 0 ? 0 : static_cast<int>(left)) : TILE;
        UNROLL
        for (int k = 0; k < TILE / THREADS; k++) {
            const int i = k * THREADS + static_cast<int>(thread.thread);
            if (i >= count) continue;
            shared->keys[i] = load_once(keys + begin + i);
            shared->payload[i] = load_once(payload + begin + i);
        }
        thread.sync();
        return count;
    }

    /* Adds what lies under a key from i on, and returns where that ends. */
    HOST_DEVICE static int add_run(const Shared *shared, uint32_t key, int i, int count, S *sum)
    {
        constexpr int BATCH = 8;
        S here = *sum;
        for (; i + BATCH <= count && shared->keys[i + BATCH - 1] == key; i += BATCH) {
            S numbers[BATCH];
            UNROLL
            for (int k = 0; k < BATCH; k++)
                numbers[k] = static_cast<S>(bits_as<T>(shared->payload[i + k]));
            UNROLL
            for (int k = 0; k < BATCH; k++) here = static_cast<S>(here + numbers[k]);
        }
        for (; i < count && shared->keys[i] == key; i++)
            here = static_cast<S>(here + static_cast<S>(bits_as<T>(shared->payload[i])));
        *sum = here;
        return i;
    }
};

/* Of the elements that have moved with their keys, those that are the last of a place. */
template <class Unit>
struct WriteLast {
    static constexpr int MAX_THREADS = THREADS, ITEMS = 4;

    DeviceScatter scatter;
    const uint32_t *keys;
    const Unit *payload;

    HOST_DEVICE void operator()(Thread thread) const
    {
        if (scatter.is_rejected()) return;
        const int64_t first = thread.block * (int64_t)(THREADS * ITEMS) + thread.thread;
        uint32_t key[ITEMS], next[ITEMS];
        Unit unit[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const int64_t i = first + k * THREADS;
            if (i >= scatter.index_count) continue;
            key[k] = keys[i];
            next[k] = i + 1 < scatter.index_count ? keys[i + 1] : ~key[k];
            unit[k] = load_once(payload + i);
        }
        UNROLL
        for (int k = 0; k < ITEMS; k++)
            if (first + k * THREADS < scatter.index_count && key[k] != next[k] &&
                key[k] < scatter.axis_size)
                *reinterpret_cast<Unit *>(scatter.x + key[k] * scatter.axis_stride) = unit[k];
    }
};

/* Launches. */

/* How many bits the keys have. */
static int key_bits(const DeviceScatter &scatter)
{
    const int64_t largest = scatter.axis_size - (scatter.mode == MODE_FILL ? 0 : 1);
    int bits = 0;
    while (bits < 63 && largest >> bits > 0) bits++;
    return bits;
}

template <class Word>
static Status make_keys(const DeviceScatter &scatter, unsigned *rejected, Word *keys,
                        Stream *stream)
{
    MakeKeys<Word> body = {};
    body.scatter = scatter;
    body.keys = keys;
    body.rejected = rejected;
    return launch(body, scatter_grid(scatter.index_count, THREADS * body.ITEMS), stream->handle);
}

template <class Key, class Payload, class Word>
static Status run_pass(int64_t count, int shift, int bits, const Key *keys,
                       const Carried<Payload> &carried, Key *sorted_keys, Payload *sorted_payload,
                       Word *counts, Stream *stream)
{
    MoveDigits<Key, Payload, Word> move = {};
    constexpr int64_t TILE = MoveDigits<Key, Payload, Word>::TILE;
    const int64_t tiles = (count + TILE - 1) / TILE;
    const int64_t each = (tiles + MOST_PARTS - 1) / MOST_PARTS;
    const int parts = static_cast<int>((tiles + each - 1) / each);
    move.pass = {count, each * TILE, parts, shift, bits};
    move.keys = keys;
    move.carried = carried;
    move.sorted_keys = sorted_keys;
    move.sorted_payload = sorted_payload;
    move.counts = counts;

    CountDigits<Key, Word> digits = {};
    digits.pass = move.pass;
    digits.keys = keys;
    digits.counts = counts;
    ScanDigits<Word> scan = {};
    scan.counts = counts;
    scan.totals = counts + MOST_PARTS * MOST_DIGITS;
    scan.parts = parts;
    move.totals = scan.totals;
    const unsigned blocks = static_cast<unsigned>(parts);
    Status status = launch_with_shared(digits, Grid{blocks, THREADS}, stream->handle);
    if (status == STATUS_OK)
        status =
            launch_with_shared(scan, Grid{1u << bits, (unsigned)scan.MAX_THREADS}, stream->handle);
    if (status == STATUS_OK)
        status = launch_with_shared(move, Grid{blocks, THREADS}, stream->handle);
    return status;
}

/* Two arrays of keys, two of what goes along with them, and the counts of a pass. */
template <class Key, class Payload, class Word>
struct Sorting {
    Key *keys[2];
    Payload *payload[2];
    Word *counts;

    Status open(int64_t count, Scratch *scratch)
    {
        void *data[5] = {};
        const int64_t bytes[5] = {count * (int64_t)sizeof(Key), count * (int64_t)sizeof(Key),
                                  count * (int64_t)sizeof(Payload),
                                  count * (int64_t)sizeof(Payload),
                                  (MOST_PARTS + 1) * MOST_DIGITS * (int64_t)sizeof(Word)};
        Status status = STATUS_OK;
        for (int i = 0; i < 5 && status == STATUS_OK; i++)
            status = scratch_take(scratch, bytes[i], &data[i]);
        for (int i = 0; i < 2; i++) {
            keys[i] = static_cast<Key *>(data[i]);
            payload[i] = static_cast<Payload *>(data[2 + i]);
        }
        counts = static_cast<Word *>(data[4]);
        return status;
    }
};

template <class T, int COUNT, class Word>
static Status launch_runs(DeviceScatter scatter, const Word *keys, const Word *numbers,
                          Stream *stream)
{
    set_units(&scatter, COUNT * sizeof(T));
    AddRuns<T, COUNT, Word> body = {};
    body.scatter = scatter;
    body.keys = keys;
    body.numbers = numbers;
    return launch(body, scatter_grid(scatter.units, THREADS), stream->handle);
}

template <class T, class Word>
static Status launch_runs_of(const DeviceScatter &scatter, const Word *keys, const Word *numbers,
                             Stream *stream)
{
    return scatter_alignment(scatter) == 16
               ? launch_runs<T, 16 / sizeof(T)>(scatter, keys, numbers, stream)
               : launch_runs<T, 1>(scatter, keys, numbers, stream);
}

/* Makes the keys and sorts them, with what goes along. */
template <class Payload, class Word>
static Status sort_keys(const DeviceScatter &scatter, unsigned *rejected,
                        const Carried<Payload> &given, Scratch *scratch, const Word **keys,
                        const Payload **payload)
{
    Sorting<Word, Payload, Word> sorting;
    Status status = sorting.open(scatter.index_count, scratch);
    if (status == STATUS_OK)
        status = make_keys(scatter, rejected, sorting.keys[0], scratch->stream);
    const int bits = key_bits(scatter);
    const int passes = bits > 0 ? (bits + MOST_DIGIT_BITS - 1) / MOST_DIGIT_BITS : 1;
    const int digit_bits = (bits + passes - 1) / passes;
    for (int i = 0; i < passes && status == STATUS_OK; i++) {
        Carried<Payload> carried = given;
        if (i > 0) carried.payload = sorting.payload[i % 2];
        status = run_pass(scatter.index_count, i * digit_bits, digit_bits, sorting.keys[i % 2],
                          carried, sorting.keys[1 - i % 2], sorting.payload[1 - i % 2],
                          sorting.counts, scratch->stream);
    }
    *keys = sorting.keys[passes % 2];
    *payload = sorting.payload[passes % 2];
    return status;
}

/* Whether a row is one number and they lie in a line, so that values can go along with the keys. */
static bool rows_are_numbers(const DeviceScatter &scatter, int64_t number_bytes)
{
    return scatter.one_loop && scatter.index == 1 && scatter.axis_ndim == 1 && !scatter.constant &&
           scatter.row_bytes == number_bytes && scatter.index_count < UINT32_MAX &&
           scatter.axis_size < UINT32_MAX;
}

template <class Payload>
static Status sort_values(const DeviceScatter &scatter, unsigned *rejected, Scratch *scratch,
                          const uint32_t **keys, const Payload **payload)
{
    const Carried<Payload> carried = {NULL, scatter.values, scatter.loops[0].value};
    return sort_keys(scatter, rejected, carried, scratch, keys, payload);
}

template <class Word>
static Status add_sorted(const DeviceScatter &scatter, Dtype dtype, unsigned *rejected,
                         Scratch *scratch)
{
    Stream *stream = scratch->stream;
    const Word *keys, *numbers;
    Status status =
        sort_keys(scatter, rejected, Carried<Word>{NULL, NULL, 0}, scratch, &keys, &numbers);
    if (status != STATUS_OK) return status;
    switch (dtype) {
    case DTYPE_FLOAT16:
        return launch_runs_of<Half>(scatter, keys, numbers, stream);
    case DTYPE_BFLOAT16:
        return launch_runs_of<BFloat16>(scatter, keys, numbers, stream);
    case DTYPE_FLOAT32:
        return launch_runs_of<float>(scatter, keys, numbers, stream);
    case DTYPE_FLOAT64:
        return launch_runs_of<double>(scatter, keys, numbers, stream);
    default:
        return dtype_bytes(dtype) == 1 ? launch_runs_of<uint8_t>(scatter, keys, numbers, stream)
                                       : launch_runs_of<uint16_t>(scatter, keys, numbers, stream);
    }
}

template <class T>
static Status add_numbers(const DeviceScatter &scatter, unsigned *rejected, Scratch *scratch)
{
    AddNumbers<T> body = {};
    Status status = sort_values(scatter, rejected, scratch, &body.keys, &body.payload);
    if (status != STATUS_OK) return status;
    body.scatter = scatter;
    return launch_with_shared(body, scatter_grid(scatter.index_count, body.TILE),
                              scratch->stream->handle);
}

Status add_in_order(DeviceScatter scatter, Dtype dtype, unsigned *rejected, Scratch *scratch)
{
    if (rows_are_numbers(scatter, dtype_bytes(dtype))) {
        switch (dtype) {
        case DTYPE_FLOAT16:
            return add_numbers<Half>(scatter, rejected, scratch);
        case DTYPE_BFLOAT16:
            return add_numbers<BFloat16>(scatter, rejected, scratch);
        case DTYPE_FLOAT32:
            return add_numbers<float>(scatter, rejected, scratch);
        case DTYPE_FLOAT64:
            return add_numbers<double>(scatter, rejected, scratch);
        default:
            return dtype_bytes(dtype) == 1 ? add_numbers<uint8_t>(scatter, rejected, scratch)
                                           : add_numbers<uint16_t>(scatter, rejected, scratch);
        }
    }
    const bool narrow = scatter.index_count < UINT32_MAX && scatter.axis_size < UINT32_MAX;
    return narrow ? add_sorted<uint32_t>(scatter, dtype, rejected, scratch)
                  : add_sorted<uint64_t>(scatter, dtype, rejected, scratch);
}

template <class Unit>
static Status write_sorted(DeviceScatter scatter, Scratch *scratch)
{
    WriteLast<Unit> body = {};
    Status status = take_rejected(&scatter, scratch);
    if (status == STATUS_OK)
        status = sort_values(scatter, const_cast<unsigned *>(scatter.rejected), scratch, &body.keys,
                             &body.payload);
    if (status != STATUS_OK) return status;
    body.scatter = scatter;
    return launch(body, scatter_grid(scatter.index_count, THREADS * body.ITEMS),
                  scratch->stream->handle);
}

Status write_in_order(DeviceScatter scatter, int64_t alignment, Scratch *scratch, bool *done)
{
#ifdef GPUOPS_FAKE_CUDA /* so that tests come here */
    constexpr int64_t LARGE_TABLE_BYTES = 256 << 10, MANY = 6000;
#else
    /* Measured on an H200: where x fits about half of its cache, or for fewer, claims are faster.
     */
    constexpr int64_t LARGE_TABLE_BYTES = 32 << 20, MANY = 512 << 10;
#endif
    const int64_t stride = scatter.axis_stride < 0 ? -scatter.axis_stride : scatter.axis_stride;
    *done = rows_are_numbers(scatter, alignment) && alignment <= 8 && scatter.index_count >= MANY &&
            scatter.axis_size * stride >= LARGE_TABLE_BYTES;
    if (!*done) return STATUS_OK;
    switch (alignment) {
    case 1:
        return write_sorted<uint8_t>(scatter, scratch);
    case 2:
        return write_sorted<uint16_t>(scatter, scratch);
    case 4:
        return write_sorted<uint32_t>(scatter, scratch);
    default:
        return write_sorted<uint64_t>(scatter, scratch);
    }
}

#endif
