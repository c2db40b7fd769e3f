/* Products of matrices by our own kernels, for every dtype and without cuBLAS: a simple one, which
 * is also the oracle of the others, one for few rows or columns, which reads the large operand at
 * the speed of memory, and one of tiles in shared memory and registers for all the rest.
 *
 * 16-bit floats are added up in float32 and rounded once; small integers wrap, as NumPy's do, so
 * that they are added up as unsigned numbers of 32 bits. Where there are too few blocks for the
 * GPU, the sums are split along the depth, and the parts are added in a fixed order afterwards: the
 * same product gives the same bits each time. */
#include "matmul.cuh"

#include <stdlib.h>
#include <string.h>

#include <type_traits>

#ifdef __CUDACC__

/* The types. Signed integers take part as unsigned ones, which wrap alike. */

/* What a type is added up in, and how: by default as itself. */
template <class T>
struct Arithmetic {
    using Sum = T;
    HOST_DEVICE static Sum widen(T value) { return value; }
    HOST_DEVICE static T narrow(Sum sum) { return sum; }
    HOST_DEVICE static Sum add(Sum x, Sum y) { return x + y; }
    HOST_DEVICE static Sum add_product(Sum x, Sum y, Sum sum) { return x * y + sum; }
};

HOST_DEVICE inline float fused(float x, float y, float z)
{
    return fmaf(x, y, z);
}

HOST_DEVICE inline double fused(double x, double y, double z)
{
    return fma(x, y, z);
}

template <class T, class Real>
struct FloatArithmetic {
    using Sum = Real;
    HOST_DEVICE static Sum widen(T value) { return static_cast<Sum>(value); }
    HOST_DEVICE static T narrow(Sum sum) { return T(sum); }
    HOST_DEVICE static Sum add(Sum x, Sum y) { return x + y; }
    HOST_DEVICE static Sum add_product(Sum x, Sum y, Sum sum) { return fused(x, y, sum); }
};

template <>
struct Arithmetic<float> : FloatArithmetic<float, float> {};
template <>
struct Arithmetic<double> : FloatArithmetic<double, double> {};
template <>
struct Arithmetic<Half> : FloatArithmetic<Half, float> {};
template <>
struct Arithmetic<BFloat16> : FloatArithmetic<BFloat16, float> {};

template <class T>
struct SmallArithmetic {
    using Sum = uint32_t;
    HOST_DEVICE static Sum widen(T value) { return value; }
    HOST_DEVICE static T narrow(Sum sum) { return static_cast<T>(sum); }
    HOST_DEVICE static Sum add(Sum x, Sum y) { return x + y; }
    HOST_DEVICE static Sum add_product(Sum x, Sum y, Sum sum) { return x * y + sum; }
};

template <>
struct Arithmetic<uint8_t> : SmallArithmetic<uint8_t> {};
template <>
struct Arithmetic<uint16_t> : SmallArithmetic<uint16_t> {};

/* "Or" of "and", as NumPy has it, however many are true. */
template <>
struct Arithmetic<Bool> {
    using Sum = uint32_t;
    HOST_DEVICE static Sum widen(Bool value) { return value.byte != 0; }
    HOST_DEVICE static Bool narrow(Sum sum) { return Bool(sum != 0); }
    HOST_DEVICE static Sum add(Sum x, Sum y) { return x | y; }
    HOST_DEVICE static Sum add_product(Sum x, Sum y, Sum sum) { return sum | (x & y); }
};

template <class Real>
struct Arithmetic<Complex<Real>> {
    using Sum = Complex<Real>;
    HOST_DEVICE static Sum widen(Sum value) { return value; }
    HOST_DEVICE static Sum narrow(Sum sum) { return sum; }
    HOST_DEVICE static Sum add(Sum x, Sum y) { return x + y; }
    HOST_DEVICE static Sum add_product(Sum x, Sum y, Sum sum)
    {
        sum.real = fused(x.real, y.real, sum.real);
        sum.imaginary = fused(x.real, y.imaginary, sum.imaginary);
        sum.real = fused(-x.imaginary, y.imaginary, sum.real);
        sum.imaginary = fused(x.imaginary, y.real, sum.imaginary);
        return sum;
    }
};

template <class T>
using SumOf = typename Arithmetic<T>::Sum;

/* Neighbours that are read or written at once. */
template <class T, int WIDTH>
struct alignas(WIDTH * sizeof(T)) Pack {
    T items[WIDTH];
};

/* Of the items that exist, those that fit into a pack, and zeros behind them. */
template <class T, int WIDTH>
HOST_DEVICE inline Pack<T, WIDTH> load_pack(const T *items, int64_t exist, bool aligned)
{
    if (aligned && exist >= WIDTH) return *reinterpret_cast<const Pack<T, WIDTH> *>(items);
    Pack<T, WIDTH> pack;
    memset(&pack, 0, sizeof pack);
    UNROLL
    for (int i = 0; i < WIDTH; i++)
        if (i < exist) pack.items[i] = items[i];
    return pack;
}

HOST_DEVICE constexpr int least(int one, int other)
{
    return one < other ? one : other;
}

/* A product, as every kernel takes it. */
template <class T>
struct Terms {
    using Sum = SumOf<T>;

    const T *a, *b;
    T *out;
    int64_t a_row, a_column, b_row, b_column, out_row, out_column;
    int64_t rows, columns, depth;
    /* Where the depth is split, each part of a sum goes to its own copy of out, of that many items.
     */
    Sum *parts;
    int64_t items, splits, split_depth;
    /* Packs may be read and written, as wide as the kernel at hand has them. */
    bool a_aligned, b_aligned, out_aligned;
    int64_t first_matrix; /* of this launch */
    int ndim;
    BatchLoop loops[GPUOPS_MAX_DIMS];

    HOST_DEVICE static void add_steps(BatchLoop *at, const BatchLoop &loop, int64_t position)
    {
        at->a += position * loop.a;
        at->b += position * loop.b;
        at->out += position * loop.out;
    }

    HOST_DEVICE BatchLoop place(int64_t matrix) const
    {
        BatchLoop at = {0, 0, 0, 0};
        for (int i = ndim - 1; i > 0; i--) {
            const int64_t rest = matrix / loops[i].count;
            add_steps(&at, loops[i], matrix - rest * loops[i].count);
            matrix = rest;
        }
        if (ndim > 0) add_steps(&at, loops[0], matrix);
        return at;
    }

    /* Writes sums of neighbouring columns: as many of them as there are. */
    template <int WIDTH>
    HOST_DEVICE void store(int64_t split, int64_t place, Pack<Sum, WIDTH> sums, int64_t exist) const
    {
        if constexpr (std::is_same_v<T, Sum>) {
            store_pack((parts != NULL ? parts + split * items : out) + place, sums, exist);
        } else {
            if (parts != NULL) {
                store_pack(parts + split * items + place, sums, exist);
                return;
            }
            Pack<T, WIDTH> pack;
            UNROLL
            for (int i = 0; i < WIDTH; i++) pack.items[i] = Arithmetic<T>::narrow(sums.items[i]);
            store_pack(out + place, pack, exist);
        }
    }

    template <class Item, int WIDTH>
    HOST_DEVICE void store_pack(Item *place, Pack<Item, WIDTH> pack, int64_t exist) const
    {
        if (out_aligned && exist >= WIDTH) {
            *reinterpret_cast<Pack<Item, WIDTH> *>(place) = pack;
            return;
        }
        UNROLL
        for (int i = 0; i < WIDTH; i++)
            if (i < exist) place[i * out_column] = pack.items[i];
    }
};

/* The simple one: a thread for each element. Where their number is one of 32 bits, and SHORT, the
 * divisions take a tenth of the time, which is most of what products of tiny matrices take. */

constexpr int THREADS = 256;

template <class T, bool SHORT>
struct MultiplySimple {
    static constexpr int MAX_THREADS = THREADS;

    Terms<T> terms;
    Divider rows, columns; /* where it is SHORT */

    HOST_DEVICE static int64_t divide(int64_t number, int64_t divisor, Divider divider)
    {
        return SHORT ? divider.divide(static_cast<uint32_t>(number)) : number / divisor;
    }

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t step = (int64_t)thread.blocks * thread.threads;
        for (int64_t item = (int64_t)thread.block * thread.threads + thread.thread;
             item < terms.items; item += step) {
            const int64_t line = divide(item, terms.columns, columns);
            const int64_t matrix = divide(line, terms.rows, rows);
            const int64_t column = item - line * terms.columns, row = line - matrix * terms.rows;
            const BatchLoop at = terms.place(matrix);
            const T *a = terms.a + at.a + row * terms.a_row;
            const T *b = terms.b + at.b + column * terms.b_column;
            SumOf<T> sum = {};
            for (int64_t k = 0; k < terms.depth; k++)
                sum = Arithmetic<T>::add_product(Arithmetic<T>::widen(a[k * terms.a_column]),
                                                 Arithmetic<T>::widen(b[k * terms.b_row]), sum);
            const int64_t place = at.out + row * terms.out_row + column * terms.out_column;
            terms.out[place] = Arithmetic<T>::narrow(sum);
        }
    }
};

/* The parts of split sums, added up from the first to the last, of which some are on their way at
 * once. */
template <class T>
struct AddParts {
    static constexpr int MAX_THREADS = THREADS, TOGETHER = 16;

    T *out;
    const SumOf<T> *parts;
    int64_t items, splits;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t step = (int64_t)thread.blocks * thread.threads;
        for (int64_t item = (int64_t)thread.block * thread.threads + thread.thread; item < items;
             item += step) {
            SumOf<T> sum = {};
            int64_t split = 0;
            for (; split + TOGETHER <= splits; split += TOGETHER) {
                SumOf<T> batch[TOGETHER];
                UNROLL
                for (int i = 0; i < TOGETHER; i++) batch[i] = parts[(split + i) * items + item];
                UNROLL
                for (int i = 0; i < TOGETHER; i++)
                    sum = split + i == 0 ? batch[i] : Arithmetic<T>::add(sum, batch[i]);
            }
            for (; split < splits; split++)
                sum =
                    split == 0 ? parts[item] : Arithmetic<T>::add(sum, parts[split * items + item]);
            out[item] = Arithmetic<T>::narrow(sum);
        }
    }
};

/* Few rows of a, and a large b, which is read once for every group of rows. */

constexpr int MOST_FEW_ROWS = 16;

/* What a block of these kernels is to do. The rows come first, so that blocks that run at the same
 * time read the same part of b. */
struct FewRowsPart {
    int64_t matrix, column, begin, end;
    int64_t split, row;
    int rows;
};

template <class T>
HOST_DEVICE inline FewRowsPart few_rows_part(const Terms<T> &terms, unsigned block, int rows_each,
                                             unsigned row_groups, unsigned column_groups,
                                             int64_t columns_each)
{
    FewRowsPart part;
    part.row = (int64_t)(block % row_groups) * rows_each;
    block /= row_groups;
    part.column = (block % column_groups) * columns_each;
    block /= column_groups;
    part.split = block % static_cast<unsigned>(terms.splits);
    part.matrix = terms.first_matrix + block / static_cast<unsigned>(terms.splits);
    part.begin = part.split * terms.split_depth;
    part.end = part.begin + terms.split_depth;
    if (part.end > terms.depth) part.end = terms.depth;
    part.rows =
        static_cast<int>(terms.rows - part.row < rows_each ? terms.rows - part.row : rows_each);
    return part;
}

/* The rows of b are contiguous. A thread has a pack of columns; the 8 warps of a block take turns
 * along the depth, and add up what they have at the end. The factors of a, which all threads need,
 * go through shared memory: at the same places of several rows the caches would have no room for
 * them.
 */
template <class T, int ROWS>
struct MultiplyFewRowsAcross {
    using Sum = SumOf<T>;
    static constexpr int WIDTH = least(8, 16 / sizeof(T)), LANES = 32;
    static constexpr int COLUMNS = LANES * WIDTH, IN_FLIGHT = 8;
    static constexpr int BLOCK = THREADS, MAX_THREADS = BLOCK, GROUPS = BLOCK / LANES;
    static constexpr int STEP = GROUPS * IN_FLIGHT;
    static constexpr int CHUNK = least(8, (16 << 10) / (ROWS * sizeof(Sum) * STEP)) * STEP;
    static constexpr int TOGETHER = least(ROWS, 16 / sizeof(Sum));

    Terms<T> terms;
    unsigned row_groups, column_groups;

    struct Shared {
        alignas(16) Sum a[CHUNK][ROWS];
        Sum sums[GROUPS][COLUMNS];
    };

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        const FewRowsPart part =
            few_rows_part(terms, thread.block, ROWS, row_groups, column_groups, COLUMNS);
        const BatchLoop at = terms.place(part.matrix);
        const int lane = thread.thread % LANES, group = thread.thread / LANES;
        const int64_t exist = terms.columns - (part.column + lane * WIDTH);
        const T *a = terms.a + at.a + part.row * terms.a_row;
        const T *b = terms.b + at.b + part.column + lane * WIDTH;
        const bool a_along = terms.a_column == 1;

        Sum sums[ROWS][WIDTH] = {};
        for (int64_t begin = part.begin; begin < part.end; begin += CHUNK) {
            const int depth = static_cast<int>(part.end - begin < CHUNK ? part.end - begin : CHUNK);
            const int padded = (depth + STEP - 1) / STEP * STEP;
            if (begin > part.begin) thread.sync();
            for (int item = static_cast<int>(thread.thread); item < padded * ROWS;
                 item += THREADS) {
                const int k = a_along ? item % padded : item / ROWS;
                const int r = a_along ? item / padded : item % ROWS;
                Sum factor = {};
                if (k < depth && r < part.rows)
                    factor =
                        Arithmetic<T>::widen(a[r * terms.a_row + (begin + k) * terms.a_column]);
                shared->a[k][r] = factor;
            }
            thread.sync();
            for (int k = group * IN_FLIGHT; k < depth; k += STEP) {
                const T *items = b + (begin + k) * terms.b_row;
                Pack<T, WIDTH> packs[IN_FLIGHT];
                if (terms.b_aligned && exist >= WIDTH && depth - k >= IN_FLIGHT) {
                    UNROLL
                    for (int i = 0; i < IN_FLIGHT; i++)
                        packs[i] =
                            *reinterpret_cast<const Pack<T, WIDTH> *>(items + i * terms.b_row);
                } else {
                    UNROLL
                    for (int i = 0; i < IN_FLIGHT; i++)
                        packs[i] = load_pack<T, WIDTH>(items + i * terms.b_row,
                                                       k + i < depth ? exist : 0, false);
                }
                UNROLL
                for (int i = 0; i < IN_FLIGHT; i++) {
                    UNROLL
                    for (int r = 0; r < ROWS; r += TOGETHER) {
                        const Pack<Sum, TOGETHER> factors =
                            *reinterpret_cast<const Pack<Sum, TOGETHER> *>(&shared->a[k + i][r]);
                        UNROLL
                        for (int l = 0; l < TOGETHER; l++) {
                            UNROLL
                            for (int j = 0; j < WIDTH; j++)
                                sums[r + l][j] = Arithmetic<T>::add_product(
                                    factors.items[l], Arithmetic<T>::widen(packs[i].items[j]),
                                    sums[r + l][j]);
                        }
                    }
                }
            }
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            if (r >= part.rows) continue; /* the same for all threads */
            thread.sync();
            UNROLL
            for (int j = 0; j < WIDTH; j++) shared->sums[group][lane * WIDTH + j] = sums[r][j];
            thread.sync();
            const int64_t column = part.column + thread.thread;
            if (thread.thread < COLUMNS && column < terms.columns) {
                Sum sum = shared->sums[0][thread.thread];
                for (int i = 1; i < GROUPS; i++)
                    sum = Arithmetic<T>::add(sum, shared->sums[i][thread.thread]);
                const int64_t place =
                    at.out + (part.row + r) * terms.out_row + column * terms.out_column;
                terms.template store<1>(part.split, place, {{sum}}, 1);
            }
        }
    }
};

/* The columns of b are contiguous. Each group of lanes, a power of two, has a few columns, which
 * they go along together. */
template <class T, int ROWS>
struct MultiplyFewRowsAlong {
    using Sum = SumOf<T>;
    static constexpr int WIDTH = least(8, 16 / sizeof(T));
    static constexpr int COLUMNS = least(ROWS == 1 ? 4 : 8, 256 / (ROWS * sizeof(Sum)));
    static constexpr int BLOCK = THREADS, MAX_THREADS = BLOCK;

    Terms<T> terms;
    unsigned row_groups, column_groups;
    int lanes;

    struct Shared {
        Sum sums[COLUMNS][THREADS];
    };

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        const int groups = THREADS / lanes;
        const int lane = thread.thread % lanes, group = thread.thread / lanes;
        const FewRowsPart part = few_rows_part(terms, thread.block, ROWS, row_groups, column_groups,
                                               (int64_t)groups * COLUMNS);
        const BatchLoop at = terms.place(part.matrix);
        const int64_t column = part.column + (int64_t)group * COLUMNS;
        const T *a = terms.a + at.a + part.row * terms.a_row;
        const T *b = terms.b + at.b + column * terms.b_column;
        const int64_t columns_left = terms.columns - column;
        const bool packed = terms.a_column == 1;

        Sum sums[ROWS][COLUMNS] = {};
        for (int64_t k = part.begin + (int64_t)lane * WIDTH; k < part.end;
             k += (int64_t)lanes * WIDTH) {
            const int64_t exist = part.end - k;
            Pack<T, WIDTH> packs[COLUMNS];
            if (terms.b_aligned && exist >= WIDTH && columns_left >= COLUMNS) {
                UNROLL
                for (int j = 0; j < COLUMNS; j++)
                    packs[j] =
                        *reinterpret_cast<const Pack<T, WIDTH> *>(b + j * terms.b_column + k);
            } else {
                UNROLL
                for (int j = 0; j < COLUMNS; j++)
                    packs[j] = load_pack<T, WIDTH>(b + j * terms.b_column + k,
                                                   j < columns_left ? exist : 0, false);
            }
            UNROLL
            for (int r = 0; r < ROWS; r++) {
                /* Nobody stores the sums of rows that there are not. */
                const int64_t row = (r < part.rows ? r : part.rows - 1) * terms.a_row;
                Pack<T, WIDTH> factors;
                if (packed) {
                    factors = load_pack<T, WIDTH>(a + row + k, exist, terms.a_aligned);
                } else {
                    memset(&factors, 0, sizeof factors);
                    UNROLL
                    for (int i = 0; i < WIDTH; i++)
                        if (i < exist) factors.items[i] = a[row + (k + i) * terms.a_column];
                }
                UNROLL
                for (int i = 0; i < WIDTH; i++) {
                    const Sum factor = Arithmetic<T>::widen(factors.items[i]);
                    UNROLL
                    for (int j = 0; j < COLUMNS; j++)
                        sums[r][j] = Arithmetic<T>::add_product(
                            factor, Arithmetic<T>::widen(packs[j].items[i]), sums[r][j]);
                }
            }
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            if (r >= part.rows) continue; /* the same for all threads */
            UNROLL
            for (int j = 0; j < COLUMNS; j++) shared->sums[j][thread.thread] = sums[r][j];
            for (int half = lanes / 2; half > 0; half /= 2) {
                thread.sync();
                if (lane >= half) continue;
                UNROLL
                for (int j = 0; j < COLUMNS; j++)
                    shared->sums[j][thread.thread] = Arithmetic<T>::add(
                        shared->sums[j][thread.thread], shared->sums[j][thread.thread + half]);
            }
            thread.sync();
            if (lane < COLUMNS && column + lane < terms.columns) {
                const int64_t place =
                    at.out + (part.row + r) * terms.out_row + (column + lane) * terms.out_column;
                terms.template store<1>(part.split, place, {{shared->sums[lane][group * lanes]}},
                                        1);
            }
            thread.sync();
        }
    }
};

/* Tiles.
 *
 * A block has ROWS x COLUMNS sums, and a thread ITEMS_DOWN x ITEMS_ACROSS of them in registers. The
 * factors go through shared memory, DEPTH of them for every row and column at a time, transposed so
 * that a thread reads 16 bytes along its rows and its columns, while the next ones are on their way
 * to registers. The 32 threads of a warp stand 8 x 4; that neighbours of a quarter share rows, and
 * every other one columns, keeps their reads of 16 bytes free of conflicts. */
template <class T, int ROWS, int COLUMNS, int ITEMS_DOWN, int ITEMS_ACROSS, int BLOCKS>
struct MultiplyTiles {
    using Sum = SumOf<T>;
    static constexpr int LANE = least(16 / sizeof(Sum), 4); /* sums beside each other in a thread */
    static constexpr int WARP_ROWS = 8 * ITEMS_DOWN, WARP_COLUMNS = 4 * ITEMS_ACROSS;
    static constexpr int WARPS_DOWN = ROWS / WARP_ROWS, WARPS_ACROSS = COLUMNS / WARP_COLUMNS;
    static constexpr int BLOCK = 32 * WARPS_DOWN * WARPS_ACROSS, DEPTH = 8;
    /* Not of one block, but of BLOCKS that are to share a multiprocessor and its registers. */
    static constexpr int MAX_THREADS = BLOCK * BLOCKS;
    static constexpr int TILE_ROWS = ROWS, TILE_COLUMNS = COLUMNS, BLOCKS_TOGETHER = BLOCKS;
    static constexpr int RASTER = 8; /* rows of tiles that are computed at the same time */

    Terms<T> terms;
    unsigned tile_rows, tile_columns;

    /* A gap of 16 bytes behind each row, for the sake of those who write along the depth. */
    struct Shared {
        alignas(16) Sum a[2][DEPTH][ROWS + 16 / sizeof(Sum)];
        alignas(16) Sum b[2][DEPTH][COLUMNS + 16 / sizeof(Sum)];
    };

    /* What a thread brings of one operand: EXTENT is how far that goes across the depth. */
    template <int EXTENT>
    struct Share {
        static constexpr int ITEMS = EXTENT * DEPTH / BLOCK;
        static constexpr int WIDTH = least(least(ITEMS, 8), 16 / sizeof(T)), COUNT = ITEMS / WIDTH;
        Pack<T, WIDTH> packs[COUNT];
        const T *items[COUNT]; /* where the next ones are */

        /* Where a pack of this thread stands in the tile. */
        HOST_DEVICE static void locate(unsigned thread, int number, bool along_depth, int *extent,
                                       int *depth)
        {
            const int pack = static_cast<int>(thread) + number * BLOCK;
            if (along_depth) {
                *extent = pack / (DEPTH / WIDTH);
                *depth = pack % (DEPTH / WIDTH) * WIDTH;
            } else {
                *depth = pack / (EXTENT / WIDTH);
                *extent = pack % (EXTENT / WIDTH) * WIDTH;
            }
        }

        /* Whether the edge of the matrix goes through no pack. */
        HOST_DEVICE static bool is_whole(bool along_depth, int extent_left)
        {
            return along_depth || extent_left % WIDTH == 0;
        }

        /* From the tile's first item, with the stride of what is not contiguous. Where all packs
         * are whole, those beyond the edge are read from before it: nobody stores their sums. */
        HOST_DEVICE void begin(unsigned thread, const T *tile, int64_t stride, bool whole,
                               bool along_depth, int extent_left)
        {
            const int last = extent_left - (along_depth ? 1 : WIDTH);
            UNROLL
            for (int i = 0; i < COUNT; i++) {
                int extent, depth;
                locate(thread, i, along_depth, &extent, &depth);
                if (whole && extent > last) extent = last;
                items[i] =
                    along_depth ? tile + extent * stride + depth : tile + depth * stride + extent;
            }
        }

        /* Reads the share of one tile, and goes on to the next. */
        HOST_DEVICE void load(unsigned thread, bool whole, bool along_depth, bool aligned,
                              int extent_left, int depth_left, int64_t step)
        {
            if (whole && aligned && depth_left == DEPTH) {
                UNROLL
                for (int i = 0; i < COUNT; i++)
                    packs[i] = *reinterpret_cast<const Pack<T, WIDTH> *>(items[i]);
            } else if (whole && depth_left == DEPTH) {
                UNROLL
                for (int i = 0; i < COUNT; i++) {
                    UNROLL
                    for (int j = 0; j < WIDTH; j++) packs[i].items[j] = items[i][j];
                }
            } else {
                UNROLL
                for (int i = 0; i < COUNT; i++) {
                    int extent, depth;
                    locate(thread, i, along_depth, &extent, &depth);
                    const int exist = along_depth ? (extent < extent_left ? depth_left - depth : 0)
                                                  : (depth < depth_left ? extent_left - extent : 0);
                    packs[i] = load_pack<T, WIDTH>(items[i], exist, aligned);
                }
            }
            UNROLL
            for (int i = 0; i < COUNT; i++) items[i] += step;
        }

        template <int STRIDE>
        HOST_DEVICE void store(unsigned thread, bool along_depth, Sum (*shared)[STRIDE]) const
        {
            constexpr int PIECE = least(WIDTH, LANE);
            UNROLL
            for (int i = 0; i < COUNT; i++) {
                int extent, depth;
                locate(thread, i, along_depth, &extent, &depth);
                if (along_depth) {
                    UNROLL
                    for (int j = 0; j < WIDTH; j++)
                        shared[depth + j][extent] = Arithmetic<T>::widen(packs[i].items[j]);
                } else {
                    UNROLL
                    for (int j = 0; j < WIDTH; j += PIECE) {
                        Pack<Sum, PIECE> piece;
                        UNROLL
                        for (int l = 0; l < PIECE; l++)
                            piece.items[l] = Arithmetic<T>::widen(packs[i].items[j + l]);
                        *reinterpret_cast<Pack<Sum, PIECE> *>(&shared[depth][extent + j]) = piece;
                    }
                }
            }
        }
    };

    template <int ITEMS, int APART>
    HOST_DEVICE static void read(const Sum *shared, Sum *items)
    {
        UNROLL
        for (int i = 0; i < ITEMS; i += LANE) {
            const Pack<Sum, LANE> pack =
                *reinterpret_cast<const Pack<Sum, LANE> *>(shared + i / LANE * APART);
            UNROLL
            for (int j = 0; j < LANE; j++) items[i + j] = pack.items[j];
        }
    }

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        /* Which tile: RASTER rows of them go along the columns together, so that those that run at
         * the same time share what they read. */
        const unsigned tiles = tile_rows * tile_columns;
        const unsigned tile = thread.block % tiles, rest = thread.block / tiles;
        const unsigned band = tile / (RASTER * tile_columns), first = band * RASTER;
        const unsigned in_band = tile_rows - first < RASTER ? tile_rows - first : RASTER;
        const unsigned within = tile - first * tile_columns;
        const int64_t row = (int64_t)(first + within % in_band) * ROWS;
        const int64_t column = (int64_t)(within / in_band) * COLUMNS;
        const int64_t split = rest % static_cast<unsigned>(terms.splits);
        const BatchLoop at =
            terms.place(terms.first_matrix + rest / static_cast<unsigned>(terms.splits));
        const int64_t begin = split * terms.split_depth;
        const int64_t depth =
            terms.depth - begin < terms.split_depth ? terms.depth - begin : terms.split_depth;

        const int rows_left = static_cast<int>(terms.rows - row < ROWS ? terms.rows - row : ROWS);
        const int columns_left =
            static_cast<int>(terms.columns - column < COLUMNS ? terms.columns - column : COLUMNS);
        const bool a_along = terms.a_column == 1, b_along = terms.b_column != 1;
        const bool a_whole = Share<ROWS>::is_whole(a_along, rows_left);
        const bool b_whole = Share<COLUMNS>::is_whole(b_along, columns_left);
        const int64_t a_step = DEPTH * terms.a_column, b_step = DEPTH * terms.b_row;
        const T *a = terms.a + at.a + row * terms.a_row + begin * terms.a_column;
        const T *b = terms.b + at.b + column * terms.b_column + begin * terms.b_row;

        const int lane = thread.thread % 32, warp = thread.thread / 32;
        const int row_here = warp % WARPS_DOWN * WARP_ROWS + (lane >> 1 & 7) * LANE;
        const int column_here =
            warp / WARPS_DOWN * WARP_COLUMNS + ((lane & 1) | (lane >> 3 & 2)) * LANE;

        Share<ROWS> a_share;
        Share<COLUMNS> b_share;
        Sum sums[ITEMS_DOWN][ITEMS_ACROSS] = {};
        a_share.begin(thread.thread, a, a_along ? terms.a_row : terms.a_column, a_whole, a_along,
                      rows_left);
        b_share.begin(thread.thread, b, b_along ? terms.b_column : terms.b_row, b_whole, b_along,
                      columns_left);
        const auto load = [&](int64_t left) {
            const int depth_left = left < DEPTH ? static_cast<int>(left) : DEPTH;
            a_share.load(thread.thread, a_whole, a_along, terms.a_aligned, rows_left, depth_left,
                         a_step);
            b_share.load(thread.thread, b_whole, b_along, terms.b_aligned, columns_left, depth_left,
                         b_step);
        };
        load(depth);
        a_share.store(thread.thread, a_along, shared->a[0]);
        b_share.store(thread.thread, b_along, shared->b[0]);
        thread.sync();

        int now = 0;
        for (int64_t left = depth; left > 0; left -= DEPTH, now = 1 - now) {
            const bool more = left > DEPTH;
            if (more) load(left - DEPTH);
            Sum a_items[2][ITEMS_DOWN], b_items[2][ITEMS_ACROSS];
            read<ITEMS_DOWN, 8 * LANE>(&shared->a[now][0][row_here], a_items[0]);
            read<ITEMS_ACROSS, 4 * LANE>(&shared->b[now][0][column_here], b_items[0]);
            UNROLL
            for (int k = 0; k < DEPTH; k++) {
                if (k + 1 < DEPTH) {
                    read<ITEMS_DOWN, 8 * LANE>(&shared->a[now][k + 1][row_here],
                                               a_items[(k + 1) & 1]);
                    read<ITEMS_ACROSS, 4 * LANE>(&shared->b[now][k + 1][column_here],
                                                 b_items[(k + 1) & 1]);
                }
                UNROLL
                for (int i = 0; i < ITEMS_DOWN; i++) {
                    UNROLL
                    for (int j = 0; j < ITEMS_ACROSS; j++)
                        sums[i][j] = Arithmetic<T>::add_product(a_items[k & 1][i],
                                                                b_items[k & 1][j], sums[i][j]);
                }
            }
            if (more) {
                a_share.store(thread.thread, a_along, shared->a[1 - now]);
                b_share.store(thread.thread, b_along, shared->b[1 - now]);
                thread.sync();
            }
        }

        UNROLL
        for (int i = 0; i < ITEMS_DOWN; i++) {
            const int64_t here = row + row_here + i / LANE * 8 * LANE + i % LANE;
            if (here >= terms.rows) continue;
            UNROLL
            for (int j = 0; j < ITEMS_ACROSS; j += LANE) {
                const int64_t there = column + column_here + j / LANE * 4 * LANE;
                const int64_t place = at.out + here * terms.out_row + there * terms.out_column;
                Pack<Sum, LANE> pack;
                UNROLL
                for (int l = 0; l < LANE; l++) pack.items[l] = sums[i][j + l];
                terms.template store<LANE>(split, place, pack, terms.columns - there);
            }
        }
    }
};

/* A size of tiles, and its speed in percent of that of the fastest, as measured with float32 on an
 * H200. */
template <class Kernel, int PERCENT>
struct Tile {
    using Body = Kernel;
    static constexpr double SPEED = PERCENT / 100.0;
};

template <class... Each>
struct TileSizes {};

/* The sizes that there are for a type. */
template <class T>
struct Tiles {
    static constexpr int BLOCKS = sizeof(SumOf<T>) > 4 ? 2 : 4;
    using Sizes = TileSizes<Tile<MultiplyTiles<T, 64, 64, 8, 4, BLOCKS>, 100>>;
};

template <class T>
struct FloatTiles {
    using Sizes = TileSizes<Tile<MultiplyTiles<T, 256, 128, 16, 8, 1>, 100>,
                            Tile<MultiplyTiles<T, 64, 128, 8, 8, 4>, 95>,
                            Tile<MultiplyTiles<T, 64, 64, 8, 4, 4>, 80>,
                            Tile<MultiplyTiles<T, 32, 32, 4, 4, 8>, 63>>;
};

template <>
struct Tiles<float> : FloatTiles<float> {};
template <>
struct Tiles<Half> : FloatTiles<Half> {};
template <>
struct Tiles<BFloat16> : FloatTiles<BFloat16> {};

template <>
struct Tiles<double> {
    using Sizes = TileSizes<Tile<MultiplyTiles<double, 128, 64, 8, 8, 2>, 100>,
                            Tile<MultiplyTiles<double, 32, 32, 4, 4, 8>, 50>>;
};

template <>
struct Tiles<Complex<double>> {
    using Sizes = TileSizes<Tile<MultiplyTiles<Complex<double>, 64, 64, 4, 4, 1>, 100>>;
};

/* Launches. */

Blas blas_wanted(void)
{
    static const Blas wanted = [] {
        const char *text = getenv("GPUOPS_BLAS");
        if (text == NULL) return Blas::AUTOMATIC;
        return strcmp(text, "0") == 0        ? Blas::OWN
               : strcmp(text, "simple") == 0 ? Blas::SIMPLE
                                             : Blas::AUTOMATIC;
    }();
    return wanted;
}

/* Known after the first time, since the driver takes a millisecond to answer. */
static int multiprocessors_of(int device)
{
    static int known[MAX_DEVICES];
    int count = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
    if (count != 0) return count;
    DeviceInfo info;
    count = cuda_device_info(device, &info) == STATUS_OK ? info.multiprocessors : 1;
    __atomic_store_n(&known[device], count, __ATOMIC_RELAXED);
    return count;
}

template <class T>
static Terms<T> terms_of(const Product &product)
{
    Terms<T> terms = {};
    terms.a = reinterpret_cast<const T *>(product.a.data);
    terms.b = reinterpret_cast<const T *>(product.b.data);
    terms.out = reinterpret_cast<T *>(product.out.data);
    terms.a_row = product.a.row;
    terms.a_column = product.a.column;
    terms.b_row = product.b.row;
    terms.b_column = product.b.column;
    terms.out_row = product.out.row;
    terms.out_column = product.out.column;
    terms.rows = product.rows;
    terms.columns = product.columns;
    terms.depth = product.depth;
    terms.items = batch_count(product) * product.rows * product.columns;
    terms.splits = 1;
    terms.split_depth = product.depth;
    terms.ndim = product.ndim;
    memcpy(terms.loops, product.loops, (size_t)product.ndim * sizeof(BatchLoop));
    return terms;
}

/* The product of the transposed matrices, in the other order, is the transposed product. */
template <class T>
static void transpose(Terms<T> *terms)
{
    Terms<T> other = *terms;
    other.a = terms->b;
    other.b = terms->a;
    other.a_row = terms->b_column;
    other.a_column = terms->b_row;
    other.b_row = terms->a_column;
    other.b_column = terms->a_row;
    other.out_row = terms->out_column;
    other.out_column = terms->out_row;
    other.rows = terms->columns;
    other.columns = terms->rows;
    for (int i = 0; i < terms->ndim; i++) {
        other.loops[i].a = terms->loops[i].b;
        other.loops[i].b = terms->loops[i].a;
    }
    *terms = other;
}

static bool is_multiple(const void *data, int64_t row, int64_t column, int64_t width,
                        int64_t item_bytes)
{
    return reinterpret_cast<uintptr_t>(data) % (uint64_t)(width * item_bytes) == 0 &&
           (row == 1 || row % width == 0) && (column == 1 || column % width == 0);
}

/* Sets which of the operands can be read or written by packs of that many items. */
template <class T>
static void set_alignment(Terms<T> *terms, int a_width, int b_width, int out_width)
{
    terms->a_aligned = is_multiple(terms->a, terms->a_row, terms->a_column, a_width, sizeof(T));
    terms->b_aligned = is_multiple(terms->b, terms->b_row, terms->b_column, b_width, sizeof(T));
    terms->out_aligned =
        terms->out_column == 1 && terms->items % out_width == 0 &&
        is_multiple(terms->out, terms->out_row, terms->out_column, out_width, sizeof(T)) &&
        terms->out_row % out_width == 0;
    for (int i = 0; i < terms->ndim; i++) {
        terms->a_aligned = terms->a_aligned && terms->loops[i].a % a_width == 0;
        terms->b_aligned = terms->b_aligned && terms->loops[i].b % b_width == 0;
        terms->out_aligned = terms->out_aligned && terms->loops[i].out % out_width == 0;
    }
}

constexpr int64_t MOST_PART_BYTES = 256 << 20, SPLIT_GRAIN = 64;

/* Splits the depth where there are fewer blocks than the GPU has room for. */
template <class T>
static void split_depth(Terms<T> *terms, int64_t blocks, int64_t room, int64_t least_depth)
{
    if (2 * blocks > room) return;
    int64_t splits = room / blocks;
    const int64_t by_depth = terms->depth / least_depth;
    const int64_t by_bytes = MOST_PART_BYTES / (terms->items * (int64_t)sizeof(SumOf<T>));
    if (splits > by_depth) splits = by_depth;
    if (splits > by_bytes) splits = by_bytes;
    if (splits < 2) return;
    int64_t each = (terms->depth + splits - 1) / splits;
    each = (each + SPLIT_GRAIN - 1) / SPLIT_GRAIN * SPLIT_GRAIN;
    terms->split_depth = each;
    terms->splits = (terms->depth + each - 1) / each;
}

static unsigned grid_of_items(int64_t items)
{
    constexpr int64_t MOST = 1 << 20;
    const int64_t blocks = (items + THREADS - 1) / THREADS;
    return static_cast<unsigned>(blocks < MOST ? blocks : MOST);
}

/* Launches a kernel with that many blocks for each matrix, for as many matrices at once as a grid
 * can have; and where the depth is split, the sum of the parts. */
template <class Body, class T>
static Status launch_matrices(Body *body, const Terms<T> &terms, int64_t matrices, int64_t blocks,
                              Stream *stream)
{
    if (blocks * terms.splits > INT32_MAX)
        return fail(STATUS_VALUE_ERROR, "a product of %lld x %lld elements is too large",
                    (long long)terms.rows, (long long)terms.columns);
    body->terms = terms;
    Memory *memory = NULL;
    Status status = STATUS_OK;
    if (terms.splits > 1) {
        const int64_t bytes = terms.splits * terms.items * (int64_t)sizeof(SumOf<T>);
        status = memory_allocate(stream, bytes, &memory);
        if (status != STATUS_OK) return status;
        body->terms.parts = reinterpret_cast<SumOf<T> *>(memory_data(memory));
    }
    const int64_t each = blocks * terms.splits, at_once = INT32_MAX / each;
    for (int64_t first = 0; first < matrices && status == STATUS_OK; first += at_once) {
        const int64_t count = matrices - first < at_once ? matrices - first : at_once;
        body->terms.first_matrix = first;
        const Grid grid = {static_cast<unsigned>(count * each), Body::BLOCK};
        status = launch_with_shared(*body, grid, stream->handle);
    }
    if (memory != NULL && status == STATUS_OK) {
        AddParts<T> sum = {};
        sum.out = terms.out;
        sum.parts = body->terms.parts;
        sum.items = terms.items;
        sum.splits = terms.splits;
        status = launch(sum, Grid{grid_of_items(terms.items), THREADS}, stream->handle);
    }
    if (memory != NULL) memory_release(memory);
    return status;
}

template <class Body, class T>
static Status launch_tiles(Terms<T> terms, int64_t matrices, Stream *stream)
{
    Body body = {};
    const int64_t tile_rows = (terms.rows + Body::TILE_ROWS - 1) / Body::TILE_ROWS;
    const int64_t tile_columns = (terms.columns + Body::TILE_COLUMNS - 1) / Body::TILE_COLUMNS;
    if (tile_rows * tile_columns > INT32_MAX)
        return fail(STATUS_VALUE_ERROR, "a product of %lld x %lld elements is too large",
                    (long long)terms.rows, (long long)terms.columns);
    body.tile_rows = static_cast<unsigned>(tile_rows);
    body.tile_columns = static_cast<unsigned>(tile_columns);
    constexpr int A = Body::template Share<Body::TILE_ROWS>::WIDTH;
    constexpr int B = Body::template Share<Body::TILE_COLUMNS>::WIDTH;
    set_alignment(&terms, A, B, Body::LANE);
    return launch_matrices(&body, terms, matrices, tile_rows * tile_columns, stream);
}

/* A way to compute a product with tiles, and its cost: how many multiplications a multiprocessor
 * would do in that time, with the fastest tiles. */
template <class T>
struct Way {
    double cost;
    int64_t splits, split_depth;
    Status (*launch)(Terms<T>, int64_t, Stream *);
};

/* Splitting the depth gives every multiprocessor as many blocks as the others, up to MOST_BLOCKS.
 * It costs a launch, some 3 us, and a way there and back for each part of a sum: a multiprocessor's
 * share of the memory moves one float32 in the time of about 16 multiplications. */
constexpr int MOST_BLOCKS = 12;
constexpr double ITEM_COST = 16, ADD_COST = 5e5;

template <class Size, class T>
static Way<T> plan_way(const Terms<T> &terms, int64_t matrices, int multiprocessors)
{
    using Body = typename Size::Body;
    const int64_t tiles = matrices * ((terms.rows + Body::TILE_ROWS - 1) / Body::TILE_ROWS) *
                          ((terms.columns + Body::TILE_COLUMNS - 1) / Body::TILE_COLUMNS);
    int64_t most = MOST_PART_BYTES / (terms.items * (int64_t)sizeof(SumOf<T>));
    if (most > terms.depth / (2 * SPLIT_GRAIN)) most = terms.depth / (2 * SPLIT_GRAIN);
    if (most < 1) most = 1;
    Way<T> best = {0, 0, 0, launch_tiles<Body, T>};
    for (int64_t wanted = 0; wanted <= MOST_BLOCKS; wanted++) {
        Way<T> way = best;
        way.splits = wanted * multiprocessors / tiles;
        if (way.splits < 1) way.splits = 1;
        if (way.splits > most) way.splits = most;
        if (way.splits == best.splits) continue;
        way.split_depth = terms.depth;
        if (way.splits > 1) {
            way.split_depth = (terms.depth + way.splits - 1) / way.splits;
            way.split_depth = (way.split_depth + SPLIT_GRAIN - 1) / SPLIT_GRAIN * SPLIT_GRAIN;
            way.splits = (terms.depth + way.split_depth - 1) / way.split_depth;
        }
        /* Where fewer blocks are on a multiprocessor than fit, half of what is left to them goes
         * unused; less, where others were there before, as these do not all end at once. */
        const int64_t each = (tiles * way.splits + multiprocessors - 1) / multiprocessors;
        const int64_t rounds = each / Body::BLOCKS_TOGETHER, rest = each % Body::BLOCKS_TOGETHER;
        const double idle = rest == 0 ? 0 : 0.5 * (double)(Body::BLOCKS_TOGETHER - rest);
        way.cost = ((double)each + idle / (double)(rounds < 1 ? 1 : rounds)) * Body::TILE_ROWS *
                   Body::TILE_COLUMNS * (double)way.split_depth / Size::SPEED;
        if (way.splits > 1)
            way.cost += ADD_COST + ITEM_COST * (double)(2 * way.splits + 1) * (double)terms.items /
                                       multiprocessors;
        if (best.splits == 0 || way.cost < best.cost) best = way;
    }
    return best;
}

template <class T, class... Size>
static Status multiply_tiles(TileSizes<Size...>, Terms<T> terms, int64_t matrices,
                             int multiprocessors, Stream *stream)
{
    const Way<T> ways[] = {plan_way<Size>(terms, matrices, multiprocessors)...};
    const Way<T> *best = ways;
    for (const Way<T> &way : ways)
        if (way.cost < best->cost) best = &way;
    terms.splits = best->splits;
    terms.split_depth = best->split_depth;
    return best->launch(terms, matrices, stream);
}

template <class T, int ROWS>
static Status multiply_across(Terms<T> terms, int64_t matrices, int multiprocessors, Stream *stream)
{
    MultiplyFewRowsAcross<T, ROWS> body = {};
    const int64_t row_groups = (terms.rows + ROWS - 1) / ROWS;
    const int64_t groups = (terms.columns + body.COLUMNS - 1) / body.COLUMNS;
    set_alignment(&terms, 1, body.WIDTH, 1);
    if (groups <= INT32_MAX)
        split_depth(&terms, matrices * groups * row_groups, 2ll * multiprocessors, 2 * body.STEP);
    body.row_groups = static_cast<unsigned>(row_groups);
    body.column_groups = static_cast<unsigned>(groups);
    return launch_matrices(&body, terms, matrices, groups * row_groups, stream);
}

template <class T, int ROWS>
static Status multiply_along(Terms<T> terms, int64_t matrices, int multiprocessors, Stream *stream)
{
    MultiplyFewRowsAlong<T, ROWS> body = {};
    const int64_t row_groups = (terms.rows + ROWS - 1) / ROWS;
    int lanes = 8;
    while (lanes < THREADS && lanes * body.WIDTH * 2 < terms.depth) lanes *= 2;
    const int64_t columns = (int64_t)(THREADS / lanes) * body.COLUMNS;
    const int64_t groups = (terms.columns + columns - 1) / columns;
    set_alignment(&terms, body.WIDTH, body.WIDTH, 1);
    split_depth(&terms, matrices * groups * row_groups, 4ll * multiprocessors,
                4ll * THREADS * body.WIDTH);
    body.row_groups = static_cast<unsigned>(row_groups);
    body.column_groups = static_cast<unsigned>(groups);
    body.lanes = lanes;
    return launch_matrices(&body, terms, matrices, groups * row_groups, stream);
}

template <class T>
static Status multiply_few_rows(const Terms<T> &terms, int64_t matrices, int multiprocessors,
                                Stream *stream)
{
    if (terms.b_row == 1 && (terms.b_column != 1 || terms.columns == 1))
        return terms.rows == 1 ? multiply_along<T, 1>(terms, matrices, multiprocessors, stream)
                               : multiply_along<T, 4>(terms, matrices, multiprocessors, stream);
    return terms.rows == 1   ? multiply_across<T, 1>(terms, matrices, multiprocessors, stream)
           : terms.rows <= 4 ? multiply_across<T, 4>(terms, matrices, multiprocessors, stream)
                             : multiply_across<T, 8>(terms, matrices, multiprocessors, stream);
}

template <bool SHORT, class T>
static Status multiply_simply(const Terms<T> &terms, Stream *stream)
{
    MultiplySimple<T, SHORT> body = {};
    body.terms = terms;
    if (SHORT) {
        body.rows = divider_of(static_cast<uint32_t>(terms.rows));
        body.columns = divider_of(static_cast<uint32_t>(terms.columns));
    }
    return launch(body, Grid{grid_of_items(terms.items), THREADS}, stream->handle);
}

/* Where a thread has little to do for each element, there is nothing to share. */
template <class T>
static bool is_tiny(const Terms<T> &terms)
{
    return terms.depth <= 4 || (terms.rows <= 8 && terms.columns <= 8 && terms.depth <= 32);
}

template <class T>
static Status multiply(const Product &product, Stream *stream)
{
    Terms<T> terms = terms_of<T>(product);
    const int64_t matrices = batch_count(product);
    if (blas_wanted() == Blas::SIMPLE || is_tiny(terms)) {
        return terms.items <= UINT32_MAX ? multiply_simply<true>(terms, stream)
                                         : multiply_simply<false>(terms, stream);
    }
    const int multiprocessors = multiprocessors_of(stream->device);
    if (terms.rows > MOST_FEW_ROWS && terms.columns > MOST_FEW_ROWS)
        return multiply_tiles(typename Tiles<T>::Sizes(), terms, matrices, multiprocessors, stream);
    if (terms.columns < terms.rows) transpose(&terms);
    return multiply_few_rows(terms, matrices, multiprocessors, stream);
}

Status multiply_on_device(const Product &product, Stream *stream)
{
    switch (product.dtype) {
    case DTYPE_BOOL:
        return multiply<Bool>(product, stream);
    case DTYPE_INT8:
    case DTYPE_UINT8:
        return multiply<uint8_t>(product, stream);
    case DTYPE_INT16:
    case DTYPE_UINT16:
        return multiply<uint16_t>(product, stream);
    case DTYPE_INT32:
    case DTYPE_UINT32:
        return multiply<uint32_t>(product, stream);
    case DTYPE_INT64:
    case DTYPE_UINT64:
        return multiply<uint64_t>(product, stream);
    case DTYPE_FLOAT16:
        return multiply<Half>(product, stream);
    case DTYPE_BFLOAT16:
        return multiply<BFloat16>(product, stream);
    case DTYPE_FLOAT32:
        return multiply<float>(product, stream);
    case DTYPE_FLOAT64:
        return multiply<double>(product, stream);
    case DTYPE_COMPLEX64:
        return multiply<Complex<float>>(product, stream);
    case DTYPE_COMPLEX128:
        return multiply<Complex<double>>(product, stream);
    default:
        return fail(STATUS_TYPE_ERROR, "matmul has no kernel for %s", dtype_name(product.dtype));
    }
}

#endif
