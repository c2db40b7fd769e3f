/* Sorting on a GPU, from the lowest digit of the keys to the highest; keys with the same digits
 * stay in their order. Each pass is three kernels: CountDigits counts the digits in every block's
 * part of the keys, ScanDigits makes of that where each block puts its first key of each digit,
 * MoveDigits puts the keys there. It sorts a tile in shared memory first, so that neighbours go to
 * neighbours. */
#ifndef GPUOPS_RADIX_CUH
#define GPUOPS_RADIX_CUH

#include <utility>

#include "index.cuh"

#ifdef __CUDACC__

/* Temporaries of a call, given back together. */
struct Scratch {
    Stream *stream;
    Memory *memory[8];
    int count;
};

static inline Status scratch_take(Scratch *scratch, int64_t bytes, void **data)
{
    Status status = memory_allocate(scratch->stream, bytes, &scratch->memory[scratch->count]);
    if (status != STATUS_OK) return status;
    *data = memory_data(scratch->memory[scratch->count++]);
    return STATUS_OK;
}

static inline void scratch_give_back(Scratch *scratch)
{
    while (scratch->count > 0) memory_release(scratch->memory[--scratch->count]);
}

constexpr int RADIX_THREADS = 256, LANES = 32, WARPS = RADIX_THREADS / LANES;
constexpr int MOST_DIGIT_BITS = 8, MOST_DIGITS = 1 << MOST_DIGIT_BITS;
static_assert(MOST_DIGITS == RADIX_THREADS, "a thread for each digit");
constexpr int64_t MOST_PARTS = 4096; /* which a pass cuts the keys into */

/* The sum of what the threads of a block up to this one have. The shared sums are as many as there
 * are threads; all have to meet before they are used again. */
template <class Count>
HOST_DEVICE inline Count sum_up_to(Thread thread, Count *sums, Count mine)
{
#ifdef __CUDA_ARCH__
    const unsigned warp = thread.thread / LANES, lane = thread.thread % LANES;
    Count sum = mine;
    UNROLL
    for (unsigned step = 1; step < LANES; step *= 2) {
        const Count before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == LANES - 1) sums[warp] = sum;
    thread.sync();
    for (unsigned i = 0; i < warp; i++) sum += sums[i];
    return sum;
#else
    sums[thread.thread] = mine;
    thread.sync();
    Count sum = 0;
    for (unsigned i = 0; i <= thread.thread; i++) sum += sums[i];
    return sum;
#endif
}

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

template <class Key, class Word>
struct CountDigits {
    static constexpr int MAX_THREADS = RADIX_THREADS;
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
        for (int64_t i = pass.begin_of(thread.block) + thread.thread; i < end; i += RADIX_THREADS)
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
    static constexpr int MAX_THREADS = RADIX_THREADS, MIN_BLOCKS = 4;
    static constexpr int BYTES = sizeof(Key) + sizeof(Payload);
    static constexpr int ITEMS = 128 / (BYTES < 8 ? 8 : BYTES), TILE = ITEMS * RADIX_THREADS;

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
            for (int i = thread.thread; i < count; i += RADIX_THREADS) {
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
    /* More would have nothing to scan. */
    unsigned threads = scan.MAX_THREADS;
    if (blocks < threads) threads = (blocks + LANES - 1) / LANES * LANES;
    Status status = launch_with_shared(digits, Grid{blocks, RADIX_THREADS}, stream->handle);
    if (status == STATUS_OK)
        status = launch_with_shared(scan, Grid{1u << bits, threads}, stream->handle);
    if (status == STATUS_OK)
        status = launch_with_shared(move, Grid{blocks, RADIX_THREADS}, stream->handle);
    return status;
}

/* Two arrays of keys, two of what goes along with them, and the counts of a pass. Keys are put into
 * the first array, and found, sorted, where keys and payload point then. */
template <class Key, class Payload, class Word>
struct Sorting {
    Key *keys, *other_keys;
    Payload *payload, *other_payload;
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
        keys = static_cast<Key *>(data[0]);
        other_keys = static_cast<Key *>(data[1]);
        payload = static_cast<Payload *>(data[2]);
        other_payload = static_cast<Payload *>(data[3]);
        counts = static_cast<Word *>(data[4]);
        return status;
    }

    /* By so many of their lowest bits. */
    Status sort(int64_t count, int bits, const Carried<Payload> &given, Stream *stream)
    {
        const int passes = bits > 0 ? (bits + MOST_DIGIT_BITS - 1) / MOST_DIGIT_BITS : 1;
        const int digit_bits = (bits + passes - 1) / passes;
        Status status = STATUS_OK;
        for (int i = 0; i < passes && status == STATUS_OK; i++) {
            Carried<Payload> carried = given;
            if (i > 0) carried.payload = payload;
            status = run_pass(count, i * digit_bits, digit_bits, keys, carried, other_keys,
                              other_payload, counts, stream);
            std::swap(keys, other_keys);
            std::swap(payload, other_payload);
        }
        return status;
    }
};

#endif

#endif
