/* gather between arrays in device memory: the kernels.
 *
 * The output is one stretch of memory. It is cut into vectors, as wide as the rows allow, and every
 * thread makes a few of them, a block's width apart, so that no lane is idle whatever the length of
 * a row. It first loads the indices of all its vectors, then the vectors, then stores them, so that
 * the misses overlap. The row that a vector belongs to takes a division by the vectors of a row,
 * which Divider makes a multiplication.
 *
 * GatherRows copies vectors that lie in one row. Where no wide vector divides a row, the next two
 * put vectors together from two rows: GatherPieces from a load for each of four pieces,
 * GatherShifted from the words in which their bytes lie.
 *
 * GatherStaged takes elements of a small table over the bus, which each block reads as a whole.
 *
 * GatherInPlace reads rows over the bus, and goes by how they lie there, not by the output. Of a
 * large table it may take them part by part, as FindParts and a sort put them. */
#include "gather.cuh"
#include "radix.cuh"

#include <string.h>

#ifdef __CUDACC__

constexpr int THREADS = 256;

/* The output is written once, and should not push out of the caches what others want. Where the
 * rows end, several threads write the same. */
template <class Vector>
HOST_DEVICE inline void store_once(char *address, Vector vector)
{
#ifdef __CUDA_ARCH__
    __stcs(reinterpret_cast<Vector *>(address), vector);
#else
    store_same(reinterpret_cast<Vector *>(address), vector);
#endif
}

template <class Vector>
HOST_DEVICE inline Vector load(const char *address)
{
#ifdef __CUDA_ARCH__
    return __ldg(reinterpret_cast<const Vector *>(address));
#else
    return *reinterpret_cast<const Vector *>(address);
#endif
}

/* For elements of a large table: past the first cache, which would fetch their neighbours too. */
template <class Vector>
HOST_DEVICE inline Vector load_alone(const char *address)
{
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(Vector) == 4) {
        uint32_t value;
        asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(address));
        return value;
    } else if constexpr (sizeof(Vector) == 8) {
        uint2 value;
        asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
            : "=r"(value.x), "=r"(value.y)
            : "l"(address));
        return value;
    }
#endif
    return load<Vector>(address);
}

/* The word that begins a number of bits into the first of two words. */
HOST_DEVICE inline uint32_t shifted_word(uint32_t low, uint32_t high, unsigned bits)
{
#ifdef __CUDA_ARCH__
    return __funnelshift_r(low, high, bits);
#else
    return static_cast<uint32_t>(((uint64_t)high << 32 | low) >> bits);
#endif
}

/* The loops that the rows stand in. Where a loop over the indices is all there is, row and index
 * have the same number. */
struct OneLoop {
    using Column = uint32_t;
    static constexpr bool MANY = false;

    HOST_DEVICE void locate(int64_t row, int64_t *x, int64_t *element) const
    {
        *x = 0;
        *element = row;
    }
};

struct ManyLoops {
    using Column = uint64_t;
    static constexpr bool MANY = true;

    struct {
        int64_t count, x, element; /* strides: of x in bytes, of the indices in elements */
        Divider divider;
    } loops[GPUOPS_MAX_DIMS];
    int ndim;
    bool few_rows; /* they count in 32 bits */

    HOST_DEVICE void locate(int64_t row, int64_t *x, int64_t *element) const
    {
        *x = *element = 0;
        for (int i = ndim - 1; i > 0; i--) {
            const int64_t above = few_rows ? loops[i].divider.divide(static_cast<uint32_t>(row))
                                           : row / loops[i].count;
            const int64_t position = row - above * loops[i].count;
            *x += position * loops[i].x;
            *element += position * loops[i].element;
            row = above;
        }
        *x += row * loops[0].x;
        *element += row * loops[0].element;
    }
};

/* What all kernels know of the rows. A unit is what the kernel counts in: a vector, or a piece. */
template <class Loops>
struct Rows {
    using Column = typename Loops::Column;

    DeviceGather gather;
    Loops loops;
    WideDivider units_wide; /* of a row */
    Divider units_narrow;
    bool long_rows;    /* whose units do not count in 30 bits */
    uint64_t from_end; /* what turns a negative index into a place */
    int64_t extent;    /* of the axis, as far as it is there */

    /* Where a block begins. What its threads count from there takes 32 bits. */
    struct Start {
        int64_t unit, row;
        Column column;
    };

    HOST_DEVICE Start start_at(int64_t unit) const
    {
        const int64_t row = static_cast<int64_t>(units_wide.divide(unit));
        return {unit, row, static_cast<Column>(unit - row * units_wide.divisor)};
    }

    HOST_DEVICE void find(const Start &start, uint32_t offset, int64_t *row, Column *column) const
    {
        if (Loops::MANY && long_rows) {
            const uint64_t unit = start.unit + offset;
            *row = static_cast<int64_t>(units_wide.divide(unit));
            *column = static_cast<Column>(unit - *row * units_wide.divisor);
        } else {
            const uint32_t unit = static_cast<uint32_t>(start.column) + offset;
            const uint32_t rows = units_narrow.divide(unit);
            *row = start.row + rows;
            *column = unit - rows * units_narrow.divisor;
        }
    }

    template <int COUNT>
    HOST_DEVICE void load_indices(const int64_t *elements, int64_t *values) const
    {
        ::load_indices<COUNT>(gather.indices, gather.index_dtype, elements, values);
    }

    HOST_DEVICE int64_t fold(int64_t value, Mode mode) const
    {
        return place_of_loaded(value, gather.index_dtype, gather.axis_size, mode);
    }

    /* Makes places of indices in the modes where every index has one. */
    template <int COUNT>
    HOST_DEVICE void fold_indices(int64_t *values) const
    {
        if (gather.mode == MODE_CLIP) {
            UNROLL
            for (int k = 0; k < COUNT; k++) values[k] = fold(values[k], MODE_CLIP);
        } else if (gather.mode == MODE_WRAP) {
            UNROLL
            for (int k = 0; k < COUNT; k++) values[k] = fold(values[k], MODE_WRAP);
        }
    }

    /* How far from the first place that is there an index means; if that is not less than the
     * extent, the index needs resolve(). */
    HOST_DEVICE uint64_t place_from_begin(int64_t value) const
    {
        return value + (static_cast<uint64_t>(value >> 63) & from_end) -
               static_cast<uint64_t>(gather.axis_begin);
    }

    HOST_DEVICE const char *source_at(uint64_t place_from_begin, int64_t x) const
    {
        return gather.x + x + static_cast<int64_t>(place_from_begin) * gather.axis_stride;
    }

    /* A row's address, or where that needs resolve() the address that the first place gives it. */
    HOST_DEVICE bool find_source(int64_t value, int64_t x, const char **source) const
    {
        const uint64_t place = place_from_begin(value);
        const bool is_there = place < static_cast<uint64_t>(extent);
        *source = source_at(is_there ? place : 0, x);
        return is_there;
    }

    /* The same row twice, or the next one too. */
    HOST_DEVICE void locate_two(int64_t row, bool two, int64_t *x, int64_t *element) const
    {
        loops.locate(row, &x[0], &element[0]);
        if (two && row + 1 < gather.rows) {
            loops.locate(row + 1, &x[1], &element[1]);
        } else {
            x[1] = x[0];
            element[1] = element[0];
        }
    }

    /* Units one by one, where an index is bad or means a place that is not there, or where a vector
     * is not whole. */
    template <class Unit>
    HOST_DEVICE void make(const Start &start, uint32_t offset, int64_t count) const
    {
        int64_t row;
        Column column;
        find(start, offset, &row, &column);
        const char *source = NULL;
        char *out = gather.out + (start.unit + offset) * (int64_t)sizeof(Unit);
        bool is_there = resolve(row, column == 0, &source);
        for (int64_t i = 0; i < count; i++, column++, out += sizeof(Unit)) {
            if (column == units_wide.divisor) {
                column = 0;
                is_there = resolve(++row, true, &source);
            }
            const int64_t bytes = column * sizeof(Unit);
            if (is_there)
                store_once(out, source != NULL
                                    ? load<Unit>(source + bytes)
                                    : *reinterpret_cast<const Unit *>(gather.pattern + bytes % 16));
        }
    }

    /* What a row is made from if its index is anything: NULL is the pattern. False: it is left as
     * it is. A bad index is noted by the one that makes the first bytes of the row. */
    HOST_DEVICE bool resolve(int64_t row, bool notes, const char **source) const
    {
        int64_t x, element, value;
        loops.locate(row, &x, &element);
        load_indices<1>(&element, &value);
        const int64_t place = fold(value, gather.mode);
        if (place < 0) {
            if (gather.leaves_others) return false;
            *source = gather.fill;
            if (notes && gather.mode == MODE_RAISE)
                note_loaded(gather.report, gather.index_dtype, element, value);
            return true;
        }
        if (place < gather.axis_begin || place >= gather.axis_end) return false;
        *source = source_at(place - gather.axis_begin, x);
        return true;
    }
};

/* Of a thread. More would cost registers, and so threads. */
template <class Vector>
constexpr int ITEMS_OF = sizeof(Vector) == 16 || sizeof(Vector) == 1 ? 2 : 4;

template <class Vector, class Loops, int ITEMS>
struct GatherRows {
    static constexpr int MAX_THREADS = THREADS;

    Rows<Loops> rows;
    int64_t vectors;
    bool alone; /* each is an element of a large table */

    HOST_DEVICE void operator()(Thread thread) const
    {
        const auto start = rows.start_at(thread.block * (int64_t)(ITEMS * THREADS));
        const int64_t last = vectors - start.unit - 1;

        /* Beyond the last vector it is that one again. */
        uint32_t offset[ITEMS];
        int64_t x[ITEMS], element[ITEMS], index[ITEMS];
        typename Loops::Column column[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            offset[k] = k * THREADS + thread.thread;
            if (offset[k] > last) offset[k] = static_cast<uint32_t>(last);
            int64_t row;
            rows.find(start, offset[k], &row, &column[k]);
            rows.loops.locate(row, &x[k], &element[k]);
        }
        rows.template load_indices<ITEMS>(element, index);
        rows.template fold_indices<ITEMS>(index);

        unsigned others = 0; /* that need make(), and load what the first place has */
        Vector loaded[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const char *source;
            if (!rows.find_source(index[k], x[k], &source)) others |= 1u << k;
            source += column[k] * sizeof(Vector);
            loaded[k] = alone ? load_alone<Vector>(source) : load<Vector>(source);
        }
        char *out = rows.gather.out + start.unit * (int64_t)sizeof(Vector);
        UNROLL
        for (int k = 0; k < ITEMS; k++)
            if (!(others >> k & 1)) store_once(out + offset[k] * sizeof(Vector), loaded[k]);

        for (uint32_t at = thread.thread; others != 0; others >>= 1, at += THREADS)
            if (others & 1)
                rows.template make<Vector>(start, at < last ? at : static_cast<uint32_t>(last), 1);
    }
};

/* Elements of a small table over the bus. Each block reads all of it into shared memory while its
 * indices are on their way, and waits for the bus no second time, but for a fill. The remainders of
 * mode 'wrap' would take memory for registers that are saved. */
template <class Vector>
struct GatherStaged {
    static constexpr int MAX_THREADS = THREADS, ITEMS = 4;
    static constexpr int WORDS = GATHER_STAGED_BYTES / sizeof(uint4) / THREADS; /* of a thread */

    struct Shared {
        uint4 words[WORDS * THREADS];
    };

    DeviceGather gather;

    HOST_DEVICE void operator()(Thread thread, Shared *table) const
    {
        uint4 words[WORDS];
        UNROLL
        for (int k = 0; k < WORDS; k++) {
            const int64_t at = (k * THREADS + thread.thread) * (int64_t)sizeof(uint4);
            if (at < gather.staged_bytes) words[k] = load<uint4>(gather.x + at);
        }
        int64_t element[ITEMS], index[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            element[k] = (thread.block * (int64_t)ITEMS + k) * THREADS + thread.thread;
            if (element[k] >= gather.rows) element[k] = gather.rows - 1;
        }
        load_indices<ITEMS>(gather.indices, gather.index_dtype, element, index);
        UNROLL
        for (int k = 0; k < WORDS; k++) {
            const int at = k * THREADS + thread.thread;
            if (at * (int64_t)sizeof(uint4) < gather.staged_bytes) table->words[at] = words[k];
        }
        thread.sync();

        const Vector *staged = reinterpret_cast<const Vector *>(table->words);
        const uint64_t places = static_cast<uint64_t>(gather.axis_end - gather.axis_begin);
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const int64_t place = gather.mode == MODE_CLIP ? place_in<MODE_CLIP>(index[k])
                                                           : place_in<MODE_RAISE>(index[k]);
            const uint64_t at = static_cast<uint64_t>(place - gather.axis_begin);
            char *out = gather.out + element[k] * (int64_t)sizeof(Vector);
            if (place >= 0 && at < places)
                store_once(out, staged[at]);
            else if (place < 0 && gather.mode == MODE_RAISE)
                note_loaded(gather.report, gather.index_dtype, element[k], index[k]);
            else if (place < 0)
                store_once(out, load<Vector>(gather.fill));
        }
    }

    template <Mode MODE>
    HOST_DEVICE int64_t place_in(int64_t value) const
    {
        return place_of_loaded(value, gather.index_dtype, gather.axis_size, MODE);
    }
};

/* Vectors of four pieces. Rows have at least three, so that a vector has a part in no more than
 * two, which follow one another. */
template <class Piece, class Loops>
struct GatherPieces {
    static constexpr int MAX_THREADS = THREADS;
    static constexpr int PIECES = 4, ITEMS = Loops::MANY ? 1 : 2;

    Rows<Loops> rows;
    int64_t pieces;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const auto start = rows.start_at(thread.block * (int64_t)(ITEMS * THREADS * PIECES));
        const int64_t left = pieces - start.unit;

        /* Two for each vector: of the row it begins in, and of the next if it goes on there. Those
         * that are not whole take the place of the block's first. */
        unsigned others = 0, whole = 0;
        int64_t x[2 * ITEMS], element[2 * ITEMS], index[2 * ITEMS];
        uint32_t column[ITEMS], split[ITEMS]; /* how many pieces are in the first row */
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            uint32_t offset = (k * THREADS + thread.thread) * PIECES;
            if (offset + PIECES <= left)
                whole |= 1u << k;
            else if (offset < left)
                others |= 1u << k;
            if (offset + PIECES > left) offset = 0;
            int64_t row;
            typename Loops::Column at;
            rows.find(start, offset, &row, &at);
            column[k] = static_cast<uint32_t>(at);
            split[k] = rows.units_narrow.divisor - column[k];
            rows.locate_two(row, split[k] < PIECES, &x[2 * k], &element[2 * k]);
        }
        rows.template load_indices<2 * ITEMS>(element, index);
        rows.template fold_indices<2 * ITEMS>(index);

        Piece loaded[ITEMS][PIECES];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const char *first, *second;
            const bool is_there = rows.find_source(index[2 * k], x[2 * k], &first) &
                                  rows.find_source(index[2 * k + 1], x[2 * k + 1], &second);
            first += column[k] * (int64_t)sizeof(Piece);
            second -= split[k] * (int64_t)sizeof(Piece);
            UNROLL
            for (unsigned j = 0; j < PIECES; j++)
                loaded[k][j] = load<Piece>((j < split[k] ? first : second) + j * sizeof(Piece));
            if ((whole >> k & 1) && !is_there) {
                others |= 1u << k;
                whole &= ~(1u << k);
            }
        }
        UNROLL
        for (int k = 0; k < ITEMS; k++)
            if (whole >> k & 1) {
                const int64_t at = start.unit + (k * THREADS + thread.thread) * PIECES;
                store_pieces(rows.gather.out + at * sizeof(Piece), loaded[k]);
            }

        for (uint32_t at = thread.thread * PIECES; others != 0;
             others >>= 1, at += THREADS * PIECES)
            if (others & 1)
                rows.template make<Piece>(start, at, at + PIECES < left ? PIECES : left - at);
    }

    HOST_DEVICE static void store_pieces(char *address, const uint32_t *pieces)
    {
        store_once(address, uint4{pieces[0], pieces[1], pieces[2], pieces[3]});
    }

    HOST_DEVICE static void store_pieces(char *address, const uint16_t *pieces)
    {
        store_once(address, uint2{pieces[0] | static_cast<uint32_t>(pieces[1]) << 16,
                                  pieces[2] | static_cast<uint32_t>(pieces[3]) << 16});
    }

    HOST_DEVICE static void store_pieces(char *address, const uint8_t *pieces)
    {
        store_once(address, static_cast<uint32_t>(pieces[0] | pieces[1] << 8 | pieces[2] << 16) |
                                static_cast<uint32_t>(pieces[3]) << 24);
    }
};

/* The same with bytes for pieces and 16 of them in a vector: they are read as the aligned words
 * that they lie in, at most five of each row, none without a byte that is wanted, and shifted into
 * place. */
template <class Loops>
struct GatherShifted {
    static constexpr int MAX_THREADS = THREADS;
    static constexpr int ITEMS = Loops::MANY ? 1 : 2, BYTES = 16, WORDS = 4;

    Rows<Loops> rows;
    int64_t bytes;
    /* The whole words of x: words at its ends that are only partly its own are not read as such. */
    uint64_t first_word, end_word;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const auto start = rows.start_at(thread.block * (int64_t)(ITEMS * THREADS * BYTES));
        const int64_t left = bytes - start.unit;

        /* As in GatherPieces. */
        int64_t x[2 * ITEMS], element[2 * ITEMS], index[2 * ITEMS];
        uint32_t column[ITEMS];
        int split[ITEMS]; /* how many bytes are in the first row */
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            uint32_t offset = (k * THREADS + thread.thread) * BYTES;
            if (offset >= left) offset = 0;
            int64_t row;
            typename Loops::Column at;
            rows.find(start, offset, &row, &at);
            column[k] = static_cast<uint32_t>(at);
            const uint32_t rest = rows.units_narrow.divisor - column[k];
            split[k] = rest < BYTES ? static_cast<int>(rest) : BYTES;
            rows.locate_two(row, split[k] < BYTES, &x[2 * k], &element[2 * k]);
        }
        rows.template load_indices<2 * ITEMS>(element, index);
        rows.template fold_indices<2 * ITEMS>(index);

        /* The address that a vector's first byte has, or would have in the second row. */
        unsigned simple = 0, others = 0;
        uint64_t source[2 * ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const bool first =
                find_words(index[2 * k], x[2 * k], column[k], 0, split[k], &source[2 * k]);
            const bool second = find_words(index[2 * k + 1], x[2 * k + 1], -(int64_t)split[k],
                                           split[k], BYTES, &source[2 * k + 1]);
            const int64_t rest = left - (k * THREADS + thread.thread) * BYTES;
            if (first && (second || split[k] == BYTES) && rest >= BYTES)
                simple |= 1u << k;
            else if (rest > 0)
                others |= 1u << k;
        }

        uint32_t words[2 * ITEMS][WORDS + 1];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const bool loads = simple >> k & 1;
            load_words(source[2 * k], 0, loads ? split[k] : -BYTES, words[2 * k]);
            load_words(source[2 * k + 1], split[k], loads && split[k] < BYTES ? BYTES : -BYTES,
                       words[2 * k + 1]);
        }
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            if (!(simple >> k & 1)) continue;
            uint32_t made[WORDS];
            shift_words(source[2 * k], words[2 * k], made);
            if (split[k] < BYTES) {
                uint32_t second[WORDS];
                shift_words(source[2 * k + 1], words[2 * k + 1], second);
                UNROLL
                for (int j = 0; j < WORDS; j++) {
                    const int rest = split[k] - 4 * j;
                    const uint32_t mask = rest >= 4 ? ~0u : rest <= 0 ? 0 : (1u << 8 * rest) - 1;
                    made[j] = (made[j] & mask) | (second[j] & ~mask);
                }
            }
            store_once(rows.gather.out + start.unit + (k * THREADS + thread.thread) * BYTES,
                       uint4{made[0], made[1], made[2], made[3]});
        }

        for (uint32_t offset = thread.thread * BYTES; others != 0;
             others >>= 1, offset += THREADS * BYTES)
            if (others & 1)
                rows.template make<uint8_t>(start, offset,
                                            offset + BYTES < left ? BYTES : left - offset);
    }

    /* Where the bytes begin..end of a vector come from, and whether they can be read as words. */
    HOST_DEVICE bool find_words(int64_t index, int64_t x, int64_t shift, int begin, int end,
                                uint64_t *source) const
    {
        const char *row;
        const bool is_there = rows.find_source(index, x, &row);
        *source = reinterpret_cast<uintptr_t>(row) + shift;
        return is_there && ((*source + begin) & ~3ull) >= first_word && *source + end <= end_word;
    }

    HOST_DEVICE static void load_words(uint64_t source, int begin, int end, uint32_t *words)
    {
        const int ahead = source & 3;
        const char *base = reinterpret_cast<const char *>(source - ahead);
        UNROLL
        for (int i = 0; i <= WORDS; i++)
            words[i] =
                4 * i + 4 > begin + ahead && 4 * i < end + ahead ? load<uint32_t>(base + 4 * i) : 0;
    }

    HOST_DEVICE static void shift_words(uint64_t source, const uint32_t *words, uint32_t *made)
    {
        UNROLL
        for (int j = 0; j < WORDS; j++)
            made[j] = shifted_word(words[j], words[j + 1], 8 * (source & 3));
    }
};

/* Which part of the table each row lies in: equal stretches of memory, of a power of two. */
template <class Loops>
struct FindParts {
    static constexpr int MAX_THREADS = THREADS, ITEMS = 4;

    Rows<Loops> rows;
    uint64_t first; /* of all bytes of the table */
    int shift;
    uint32_t unused; /* no gap, as in Divider */
    uint32_t *parts;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t begin = thread.block * (int64_t)(ITEMS * THREADS) + thread.thread;
        int64_t row[ITEMS], x[ITEMS], element[ITEMS], index[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            row[k] = begin + k * THREADS;
            if (row[k] >= rows.gather.rows) row[k] = rows.gather.rows - 1;
            rows.loops.locate(row[k], &x[k], &element[k]);
        }
        rows.template load_indices<ITEMS>(element, index);
        rows.template fold_indices<ITEMS>(index);
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            if (begin + k * THREADS >= rows.gather.rows) continue;
            const char *source;
            (void)rows.find_source(index[k], x[k], &source);
            parts[row[k]] =
                static_cast<uint32_t>((reinterpret_cast<uintptr_t>(source) - first) >> shift);
        }
    }
};

/* Rows of page-locked memory of the host. What comes over the bus is asked for in whole lines of
 * 128 bytes, each by one instruction: a few lanes of a warp share a row, begin with the line that
 * it begins in, and load aligned words. They write the bytes of these as wide as the output's
 * alignment allows, which costs nothing beside the bus. Long rows are cut into segments. */
template <class Loops>
struct GatherInPlace {
    static constexpr int MAX_THREADS = THREADS;
    static constexpr int ROWS = 4; /* in flight for each lane */
    static constexpr int LINE = 128, WORD = sizeof(uint4);
    static constexpr int64_t SEGMENT = 4 << 10;

    Rows<Loops> rows;              /* whose units are segments */
    int64_t segments;              /* of all rows */
    int64_t segment_bytes;         /* from the begin of a line */
    uint64_t first_word, end_word; /* between which x has every byte of a word */
    const uint32_t *order;         /* of the rows; NULL: as they come */
    uint32_t lanes;                /* that share a segment: a power of two */
    uint32_t unused;               /* no gap, as in Divider */

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t teams = THREADS / lanes, team = thread.thread / lanes;
        const int64_t step = thread.blocks * teams * ROWS;
        for (int64_t first = (thread.block * teams + team) * ROWS; first < segments; first += step)
            copy(first, thread.thread % lanes);
    }

    HOST_DEVICE void copy(int64_t first, uint32_t lane) const
    {
        /* Beyond the last segment it is that one again, which nobody stores. */
        int64_t row[ROWS], segment[ROWS], x[ROWS], element[ROWS], index[ROWS];
        UNROLL
        for (int k = 0; k < ROWS; k++) {
            const int64_t number = first + k < segments ? first + k : segments - 1;
            row[k] = static_cast<int64_t>(rows.units_wide.divide(number));
            segment[k] = number - row[k] * static_cast<int64_t>(rows.units_wide.divisor);
            if (order != NULL) row[k] = order[row[k]];
            rows.loops.locate(row[k], &x[k], &element[k]);
        }
        rows.template load_indices<ROWS>(element, index);
        rows.template fold_indices<ROWS>(index);

        uint64_t source[ROWS];
        bool is_there[ROWS];
        UNROLL
        for (int k = 0; k < ROWS; k++) {
            const char *address;
            is_there[k] = rows.find_source(index[k], x[k], &address) && first + k < segments;
            source[k] = reinterpret_cast<uintptr_t>(address);
            if (!is_there[k] && first + k < segments) make(row[k], segment[k], lane);
        }

        const int64_t bytes = rows.gather.row_bytes;
        for (int64_t at = lane * WORD; at < segment_bytes; at += lanes * WORD) {
            uint4 words[ROWS] = {};
            UNROLL
            for (int k = 0; k < ROWS; k++) {
                const uint64_t word = word_at(source[k], segment[k], at);
                if (is_there[k] && is_of_row(word, source[k], bytes) && is_whole(word))
                    words[k] = load<uint4>(reinterpret_cast<const char *>(word));
            }
            UNROLL
            for (int k = 0; k < ROWS; k++) {
                const uint64_t word = word_at(source[k], segment[k], at);
                if (!is_there[k] || !is_of_row(word, source[k], bytes)) continue;
                const int64_t ahead = static_cast<int64_t>(source[k] - word);
                const int64_t behind = ahead + bytes;
                store(rows.gather.out + row[k] * bytes - ahead, word, words[k],
                      ahead > 0 ? static_cast<int>(ahead) : 0,
                      behind < WORD ? static_cast<int>(behind) : WORD);
            }
        }
    }

    HOST_DEVICE uint64_t word_at(uint64_t source, int64_t segment, int64_t at) const
    {
        return source / LINE * LINE + segment * segment_bytes + at;
    }

    HOST_DEVICE static bool is_of_row(uint64_t word, uint64_t source, int64_t bytes)
    {
        return word + WORD > source && word < source + bytes;
    }

    HOST_DEVICE bool is_whole(uint64_t word) const { return word >= first_word && word < end_word; }

    /* The bytes begin..end of a word to where its first byte would go. */
    HOST_DEVICE void store(char *out, uint64_t word, const uint4 &loaded, int begin, int end) const
    {
        if (!is_whole(word)) {
            for (int i = begin; i < end; i++)
                store_once(out + i, load<uint8_t>(reinterpret_cast<const char *>(word + i)));
            return;
        }
        const uint32_t parts[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        const int alignment = reinterpret_cast<uintptr_t>(out) & (WORD - 1);
        const bool is_all = begin == 0 && end == WORD;
        if (is_all && alignment == 0) {
            store_once(out, loaded);
        } else if (is_all && alignment % 4 == 0) {
            UNROLL
            for (int i = 0; i < 4; i++) store_once(out + 4 * i, parts[i]);
        } else {
            UNROLL
            for (int i = 0; i < WORD; i++)
                if (i >= begin && i < end)
                    store_once(out + i, static_cast<uint8_t>(parts[i / 4] >> 8 * (i % 4)));
        }
    }

    /* A segment's share of a row without a place that is there. */
    HOST_DEVICE void make(int64_t row, int64_t segment, uint32_t lane) const
    {
        const char *source = NULL;
        if (!rows.resolve(row, segment == 0 && lane == 0, &source)) return;
        const int64_t bytes = rows.gather.row_bytes;
        const int64_t begin = segment * segment_bytes, left = bytes - begin;
        const int64_t end = left < segment_bytes ? bytes : begin + segment_bytes;
        for (int64_t i = begin + lane; i < end; i += lanes)
            store_once(rows.gather.out + row * bytes + i,
                       source != NULL ? load<uint8_t>(source + i)
                                      : static_cast<uint8_t>(rows.gather.pattern[i % WORD]));
    }
};

/* A power of two that divides everything a row's address is made of, up to 16. */
static int64_t alignment_of(const DeviceGather &gather, int ndim, const DeviceLoop *loops)
{
    uint64_t bits = reinterpret_cast<uintptr_t>(gather.x) | (uint64_t)gather.axis_stride |
                    (uint64_t)gather.row_bytes | 16;
    if (gather.fill != NULL) bits |= reinterpret_cast<uintptr_t>(gather.fill);
    for (int i = 0; i < ndim; i++) bits |= (uint64_t)loops[i].x;
    return static_cast<int64_t>(bits & -bits);
}

static void set_loops(OneLoop *, const DeviceGather &, int, const DeviceLoop *) {}

static void set_loops(ManyLoops *many, const DeviceGather &gather, int ndim,
                      const DeviceLoop *loops)
{
    int64_t index_bytes = 8;
    with_index_type(gather.index_dtype, [&](auto zero) { index_bytes = sizeof zero; });
    many->ndim = ndim;
    many->few_rows = gather.rows <= UINT32_MAX;
    for (int i = 0; i < ndim; i++)
        many->loops[i] = {loops[i].count, loops[i].x, loops[i].index / index_bytes,
                          divider_of(many->few_rows ? static_cast<uint32_t>(loops[i].count) : 1)};
}

constexpr int64_t LONG_ROW_UNITS = 1 << 30;

template <class Loops>
static void set_rows(Rows<Loops> *rows, const DeviceGather &gather, int ndim,
                     const DeviceLoop *loops, int64_t units)
{
    rows->gather = gather;
    set_loops(&rows->loops, gather, ndim, loops);
    rows->long_rows = units > LONG_ROW_UNITS;
    rows->units_wide = wide_divider_of(static_cast<uint64_t>(units));
    rows->units_narrow = divider_of(static_cast<uint32_t>(rows->long_rows ? 1 : units));
    rows->from_end = gather.index_dtype == DTYPE_UINT64 ? 0 : gather.axis_size;
    rows->extent = gather.axis_end - gather.axis_begin;
}

static Grid grid_for(int64_t units, int64_t units_per_block)
{
    return {static_cast<unsigned>((units + units_per_block - 1) / units_per_block), THREADS};
}

template <class Vector, class Loops, int ITEMS = ITEMS_OF<Vector>>
static Status launch_items(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                           bool alone, void *stream)
{
    const int64_t units = gather.row_bytes / (int64_t)sizeof(Vector);
    GatherRows<Vector, Loops, ITEMS> body = {};
    set_rows(&body.rows, gather, ndim, loops, units);
    body.vectors = gather.rows * units;
    body.alone = alone;
    return launch(body, grid_for(body.vectors, ITEMS * THREADS), stream);
}

template <class Vector, class Loops>
static Status launch_rows(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                          void *stream)
{
    if constexpr (!Loops::MANY)
        if (gather.staged_bytes > 0 && gather.row_bytes == (int64_t)sizeof(Vector) &&
            gather.mode != MODE_WRAP) {
            const GatherStaged<Vector> body = {gather};
            return launch_with_shared(body, grid_for(gather.rows, body.ITEMS * THREADS), stream);
        }
    /* A large table leaves the caches nothing to keep. Where few elements are taken from it,
     * passing by the first cache gains 10 % on an H200; in long runs it loses 4 %, and threads with
     * a single element each are the quickest, by 1 %. */
    constexpr int64_t LARGE_TABLE_BYTES = 192 << 20, FEW_VECTORS = 8 << 20;
    const int64_t reach = (gather.axis_end - gather.axis_begin) * gather.axis_stride;
    const bool is_element = gather.row_bytes == (int64_t)sizeof(Vector) &&
                            (reach > LARGE_TABLE_BYTES || reach < -LARGE_TABLE_BYTES);
    if constexpr (sizeof(Vector) == 4 && !Loops::MANY)
        if (is_element && gather.rows > FEW_VECTORS)
            return launch_items<Vector, Loops, 1>(gather, ndim, loops, false, stream);
    return launch_items<Vector, Loops>(gather, ndim, loops,
                                       is_element && gather.rows <= FEW_VECTORS, stream);
}

template <class Piece, class Loops>
static Status launch_pieces(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                            void *stream)
{
    const int64_t units = gather.row_bytes / (int64_t)sizeof(Piece);
    GatherPieces<Piece, Loops> body = {};
    set_rows(&body.rows, gather, ndim, loops, units);
    body.pieces = gather.rows * units;
    return launch(body, grid_for(body.pieces, body.ITEMS * THREADS * body.PIECES), stream);
}

/* From the first byte of x that an index can mean to behind the last. */
static void find_reach(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                       uint64_t *first, uint64_t *end)
{
    uint64_t last = *first = reinterpret_cast<uintptr_t>(gather.x);
    const int64_t axis_reach = (gather.axis_end - gather.axis_begin - 1) * gather.axis_stride;
    *(axis_reach < 0 ? first : &last) += axis_reach;
    for (int i = 0; i < ndim; i++) {
        const int64_t reach = (loops[i].count - 1) * loops[i].x;
        *(reach < 0 ? first : &last) += reach;
    }
    *end = last + gather.row_bytes;
}

template <class Loops>
static Status launch_shifted(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                             void *stream)
{
    GatherShifted<Loops> body = {};
    set_rows(&body.rows, gather, ndim, loops, gather.row_bytes);
    body.bytes = gather.rows * gather.row_bytes;
    uint64_t first, end;
    find_reach(gather, ndim, loops, &first, &end);
    body.first_word = (first + 3) & ~3ull;
    body.end_word = end & ~3ull;
    return launch(body, grid_for(body.bytes, body.ITEMS * THREADS * body.BYTES), stream);
}

template <class Loops>
static Status launch_gather(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                            void *stream)
{
    const uint64_t out_bits = reinterpret_cast<uintptr_t>(gather.out) | 16;
    const int64_t out_alignment = static_cast<int64_t>(out_bits & -out_bits);
    const int64_t x_alignment = alignment_of(gather, ndim, loops);
    const int64_t bytes = gather.row_bytes;
    /* Each bound is where, on an H200, one way begins to be faster than the other. */
    if (bytes <= LONG_ROW_UNITS) {
        if (x_alignment == 4 && out_alignment == 16 && bytes >= 28)
            return launch_pieces<uint32_t, Loops>(gather, ndim, loops, stream);
        if (x_alignment == 2 && out_alignment >= 8 && bytes >= 16 && bytes < 64)
            return launch_pieces<uint16_t, Loops>(gather, ndim, loops, stream);
        if (x_alignment == 1 && out_alignment >= 4 && bytes >= 8 && bytes < 24)
            return launch_pieces<uint8_t, Loops>(gather, ndim, loops, stream);
        if (x_alignment <= 2 && out_alignment == 16 && bytes >= 24)
            return launch_shifted<Loops>(gather, ndim, loops, stream);
    }

    switch (x_alignment < out_alignment ? x_alignment : out_alignment) {
    case 1:
        return launch_rows<uint8_t, Loops>(gather, ndim, loops, stream);
    case 2:
        return launch_rows<uint16_t, Loops>(gather, ndim, loops, stream);
    case 4:
        return launch_rows<uint32_t, Loops>(gather, ndim, loops, stream);
    case 8:
        return launch_rows<uint2, Loops>(gather, ndim, loops, stream);
    default:
        return launch_rows<uint4, Loops>(gather, ndim, loops, stream);
    }
}

/* Puts the rows in the order of the parts of the table. */
template <class Loops>
static Status sort_rows(const Rows<Loops> &rows, uint64_t first, uint64_t end, Scratch *scratch,
                        const uint32_t **order)
{
    Sorting<uint32_t, uint32_t, uint32_t> sorting;
    Status status = sorting.open(rows.gather.rows, scratch);
    if (status != STATUS_OK) return status;
    FindParts<Loops> body = {};
    body.rows = rows;
    body.first = first;
    while ((end - 1 - first) >> body.shift >= MOST_DIGITS) body.shift++;
    body.parts = sorting.keys;
    status =
        launch(body, grid_for(rows.gather.rows, body.ITEMS * THREADS), scratch->stream->handle);
    if (status == STATUS_OK)
        status =
            sorting.sort(rows.gather.rows, MOST_DIGIT_BITS, Carried<uint32_t>{}, scratch->stream);
    *order = sorting.payload;
    return status;
}

template <class Loops>
static Status launch_in_place(const DeviceGather &gather, int ndim, const DeviceLoop *loops,
                              Scratch *scratch, void *stream)
{
    constexpr int64_t MOST_BLOCKS = 1024; /* one wave: enough rows in flight for any bus */
    GatherInPlace<Loops> body = {};
    const int64_t bytes = gather.row_bytes;
    /* A row begins anywhere in its first line. */
    const int64_t reach = bytes + body.LINE - 1;
    const bool is_cut = bytes > body.SEGMENT;
    const int64_t segments = is_cut ? (reach + body.SEGMENT - 1) / body.SEGMENT : 1;
    set_rows(&body.rows, gather, ndim, loops, segments);
    body.segments = gather.rows * segments;
    body.segment_bytes = is_cut ? body.SEGMENT : reach;
    body.lanes = bytes <= body.LINE ? 8 : bytes <= 2 * body.LINE ? 16 : 32;
    uint64_t first, end;
    find_reach(gather, ndim, loops, &first, &end);
    body.first_word = (first + body.WORD - 1) / body.WORD * body.WORD;
    body.end_word = end / body.WORD * body.WORD;
    if (scratch != NULL && gather.rows <= UINT32_MAX) {
        const Status status = sort_rows(body.rows, first, end, scratch, &body.order);
        if (status != STATUS_OK) return status;
    }
    const int64_t blocks = grid_for(body.segments, THREADS / body.lanes * body.ROWS).blocks;
    return launch(body, Grid{(unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), THREADS},
                  stream);
}

static bool is_one_loop(const DeviceGather &gather, int ndim, const DeviceLoop *loops)
{
    int64_t index_bytes = 8;
    with_index_type(gather.index_dtype, [&](auto zero) { index_bytes = sizeof zero; });
    return ndim == 1 && loops[0].x == 0 && loops[0].index == index_bytes &&
           gather.row_bytes <= LONG_ROW_UNITS;
}

Status launch_gather_in_place(const DeviceGather &gather, int ndim, DeviceLoop *loops,
                              Scratch *scratch, void *stream)
{
    /* A row that is one word is one request whoever makes it. */
    if (gather.row_bytes <= GATHER_WORD_BYTES)
        return launch_gather_rows(gather, ndim, loops, stream);
    return is_one_loop(gather, ndim, loops)
               ? launch_in_place<OneLoop>(gather, ndim, loops, scratch, stream)
               : launch_in_place<ManyLoops>(gather, ndim, loops, scratch, stream);
}

Status launch_gather_rows(DeviceGather gather, int ndim, DeviceLoop *loops, void *stream)
{
    if (gather.rows == 0 || gather.row_bytes == 0) return STATUS_OK;
    /* The other kernels load the first place's row for all that have none, and here is none. */
    const bool is_empty = gather.axis_begin >= gather.axis_end;
    if (is_empty) {
        gather.axis_stride = 0;
        gather.axis_end = gather.axis_begin;
        for (int i = 0; i < ndim; i++) loops[i].x = 0;
    }
    if (is_one_loop(gather, ndim, loops))
        return is_empty ? launch_in_place<OneLoop>(gather, ndim, loops, NULL, stream)
                        : launch_gather<OneLoop>(gather, ndim, loops, stream);
    return is_empty ? launch_in_place<ManyLoops>(gather, ndim, loops, NULL, stream)
                    : launch_gather<ManyLoops>(gather, ndim, loops, stream);
}

#endif
