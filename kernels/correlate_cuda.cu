/* correlate on a GPU.
 *
 * A block computes a tile of an image. It loads the pixels that the tile needs into shared memory,
 * as numbers of the type that sums are taken in and with the border resolved, and each thread then
 * computes a patch of the tile in registers, several columns wide and several rows high: it takes
 * one row of pixels after the other from shared memory, in words of 16 bytes, and adds it to all
 * the sums that it takes part in. So each sum is taken in the order of the weights, and each pixel
 * that is read serves many sums.
 *
 *     FewPixels        weights of up to 3 x 3 on small images: nothing is shared
 *     SmallFilter      weights of up to 9 x 9, with every loop unrolled: from the kernel's
 *                      arguments at no cost, or from shared memory if they are on the device
 *     LargeFilter      all others: the rows of pixels go through shared memory band by band
 *     SeparableFilter  weights of rank one: sums down the columns, and of these along the rows
 *
 * Tiles inside the image are loaded with as little arithmetic as possible: it was half of all
 * instructions of a filter of 7 x 7. For the others, the border is resolved once for each row and
 * column of the tile, so that nobody waits for one pixel after the other: the last tiles of an
 * image are among them, and no other work is left that would hide it. */
#include "correlate.cuh"

#ifdef __CUDACC__

#ifdef __CUDA_ARCH__
#define UNROLL_THRICE _Pragma("unroll 3")
#else
#define UNROLL_THRICE
#endif

/* As many numbers as a word of 16 bytes has. */
template <class Sum>
constexpr int WORD = 16 / sizeof(Sum);

template <class Sum>
struct alignas(16) Word {
    Sum items[WORD<Sum>];
};

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Pixels {
    T items[COUNT];
};

/* The images, and what lies beyond their borders. */
template <class Sum>
struct Images {
    const char *data;
    int64_t image_stride, row_stride; /* in bytes; the pixels of a row follow one another */
    int64_t height, width;
    Dtype dtype;
    Border border;
    Sum beyond;
    bool whole_words; /* all rows begin at the address of a word of WORD pixels */
};

template <class Sum>
struct Results {
    char *data;
    int64_t height, width;
    Dtype dtype;
    bool whole_words; /* they are of the type Sum, and rows consist of whole words */
};

/* Which tile of which image a block computes. */
struct Tiles {
    Divider across, down;

    HOST_DEVICE void place(unsigned block, unsigned *x, unsigned *y, unsigned *image) const
    {
        const unsigned line = across.divide(block);
        *x = block - line * across.divisor;
        *image = down.divide(line);
        *y = line - *image * down.divisor;
    }
};

/* A part of an image, which may reach beyond the borders. Its first column is that of a whole word,
 * and goes to column -skip of what it is loaded into: what is left of column 0 is left out. */
template <class Sum>
struct Window {
    int64_t y, x;
    int rows, skip;
    Divider words; /* in a row */
    bool inside;   /* the image */

    HOST_DEVICE Window(const Images<Sum> &in, int64_t top, int64_t left, int height, int left_out,
                       Divider row_words)
        : y(top), x(left), rows(height), skip(left_out), words(row_words),
          inside(y >= 0 && y + rows <= in.height && x >= 0 && x + columns() <= in.width)
    {
    }

    HOST_DEVICE int columns() const { return (int)words.divisor * WORD<Sum>; }
};

/* In shared memory, for windows that are not inside: where their rows are in the image, and behind
 * them the columns; -1: beyond the border. */
struct Positions {
    static constexpr int MOST = 320;
    int64_t items[MOST];

    template <class Sum>
    HOST_DEVICE void find(const Images<Sum> &in, const Window<Sum> &window, Thread thread)
    {
        if (window.inside) return;
        const int count = window.rows + window.columns();
        NO_UNROLL
        for (int at = (int)thread.thread; at < count; at += (int)thread.threads)
            items[at] = at < window.rows
                            ? position_of(window.y + at, in.height, in.border)
                            : position_of(window.x + at - window.rows, in.width, in.border);
    }
};

/* Rows of pixels in shared memory. SKEW: as many rows at a time are a word further on. */
template <class Sum, int SKEW>
struct Rows {
    Sum *items;
    int pitch;

    HOST_DEVICE Sum *at(int row) const
    {
        return items + (row * pitch + (SKEW == 0 ? 0 : row / (SKEW + !SKEW) * WORD<Sum>));
    }
};

/* Loads the words that are between the left and the right border, BATCH of them on their way at
 * once. Returns 0, or NaN if one is not finite. */
template <bool INSIDE, int BATCH, class Pixel, class Sum, int SKEW>
HOST_DEVICE inline Sum load_words(const Images<Sum> &in, const char *image,
                                  const Window<Sum> &window, const Positions &positions,
                                  Rows<Sum, SKEW> target, Thread thread)
{
    using Loaded = Pixels<Pixel, WORD<Sum>>;
    const unsigned count = (unsigned)window.rows * window.words.divisor;
    const char *origin = image + window.x * (int64_t)sizeof(Pixel);
    if (INSIDE) origin += window.y * in.row_stride;
    Sum check = 0;
    NO_UNROLL
    for (unsigned first = thread.thread; first < count; first += BATCH * thread.threads) {
        Loaded batch[BATCH] = {};
        int rows[BATCH], columns[BATCH];
        bool there[BATCH], beyond[BATCH];
        UNROLL
        for (int b = 0; b < BATCH; b++) {
            const unsigned word = first + (unsigned)b * thread.threads;
            rows[b] = (int)window.words.divide(word);
            const int column = (int)word - rows[b] * (int)window.words.divisor;
            columns[b] = column * WORD<Sum>;
            const int64_t x = window.x + columns[b];
            there[b] = word < count && (INSIDE || (x >= 0 && x + WORD<Sum> <= in.width));
            const int64_t y = INSIDE || !there[b] ? rows[b] : positions.items[rows[b]];
            beyond[b] = y < 0;
            if (there[b] && !beyond[b])
                batch[b] = reinterpret_cast<const Loaded *>(origin + y * in.row_stride)[column];
        }
        UNROLL
        for (int b = 0; b < BATCH; b++) {
            if (!there[b]) continue;
            Word<Sum> word;
            UNROLL
            for (int i = 0; i < WORD<Sum>; i++) {
                word.items[i] = beyond[b] ? in.beyond : from_pixel<Sum>(batch[b].items[i]);
                check = add_term(check, Sum(0), word.items[i]);
            }
            const int column = columns[b] - window.skip;
            Sum *place = target.at(rows[b]) + column;
            if (window.skip == 0) {
                *reinterpret_cast<Word<Sum> *>(place) = word;
            } else {
                UNROLL
                for (int i = 0; i < WORD<Sum>; i++)
                    if (column + i >= 0) place[i] = word.items[i];
            }
        }
    }
    return check;
}

/* Loads the given columns of a window, all of them if it is inside, one pixel at a time from
 * wherever the border has them. */
template <bool INSIDE, int BATCH, class Pixel, class Sum, int SKEW>
HOST_DEVICE inline Sum load_pixels(const Images<Sum> &in, const char *image,
                                   const Window<Sum> &window, const Positions &positions,
                                   unsigned first_column, unsigned columns, Rows<Sum, SKEW> target,
                                   Thread thread)
{
    const unsigned count = (unsigned)window.rows * columns;
    const bool all = INSIDE || columns == (unsigned)window.columns();
    if (INSIDE) image += window.y * in.row_stride + window.x * (int64_t)sizeof(Pixel);
    Sum check = 0;
    NO_UNROLL
    for (unsigned first = thread.thread; first < count; first += BATCH * thread.threads) {
        Pixel batch[BATCH] = {};
        int rows[BATCH], places[BATCH]; /* in a row; -1: there is nothing to load */
        bool beyond[BATCH];
        UNROLL
        for (int b = 0; b < BATCH; b++) {
            const unsigned at = first + (unsigned)b * thread.threads;
            const unsigned row = all ? window.words.divide(at / WORD<Sum>) : at / columns;
            rows[b] = (int)row;
            const unsigned column = first_column + at - row * columns;
            const int place = (int)column - window.skip;
            places[b] = at < count && place >= 0 ? place : -1;
            int64_t y = row, x = column;
            if (!INSIDE && places[b] >= 0) {
                y = positions.items[row];
                x = positions.items[window.rows + (int)column];
            }
            beyond[b] = y < 0 || x < 0;
            if (places[b] >= 0 && !beyond[b])
                batch[b] = reinterpret_cast<const Pixel *>(image + y * in.row_stride)[x];
        }
        UNROLL
        for (int b = 0; b < BATCH; b++) {
            if (places[b] < 0) continue;
            const Sum value = beyond[b] ? in.beyond : from_pixel<Sum>(batch[b]);
            check = add_term(check, Sum(0), value);
            target.at(rows[b])[places[b]] = value;
        }
    }
    return check;
}

/* Those of with_pixel that are summed in float32. */
template <class Function>
HOST_DEVICE inline void with_pixel_of(float, Dtype dtype, Function function)
{
    if (dtype == DTYPE_FLOAT32)
        function(float());
    else if (dtype == DTYPE_FLOAT16)
        function(Half());
    else
        function(BFloat16());
}

template <class Function>
HOST_DEVICE inline void with_pixel_of(double, Dtype dtype, Function function)
{
    with_real_on_device(dtype, function);
}

/* Integers are loaded one by one: their sums in float64 take longer than that. */
template <class Pixel, class Sum>
constexpr bool HAS_WORDS = sizeof(Sum) == sizeof(float);
template <>
constexpr bool HAS_WORDS<double, double> = true;

/* Loads a window, and leaves the mark if there is a NaN or an infinity in it. The caller waits for
 * the other threads, before and after. */
template <int BATCH, class Sum, int SKEW>
HOST_DEVICE inline void load_window(const Images<Sum> &in, unsigned image,
                                    const Window<Sum> &window, const Positions &positions,
                                    Rows<Sum, SKEW> target, Thread thread, unsigned mark,
                                    unsigned *marked)
{
    const char *data = in.data + image * in.image_stride;
    const int columns = window.columns();
    with_pixel_of(Sum(), in.dtype, [&](auto zero) {
        using Pixel = decltype(zero);
        const bool words = HAS_WORDS<Pixel, Sum> && in.whole_words && window.x % WORD<Sum> == 0;
        Sum check = 0;
        if (window.inside && words) {
            check = load_words<true, BATCH, Pixel>(in, data, window, positions, target, thread);
        } else if (window.inside) {
            check = load_pixels<true, BATCH, Pixel>(in, data, window, positions, 0,
                                                    (unsigned)columns, target, thread);
        } else {
            /* Left and right of these, the pixels are loaded one by one. */
            int64_t begin = columns, end = columns;
            if (words) {
                begin = window.x < 0 ? -window.x : 0;
                if (begin > columns) begin = columns;
                end = in.width - in.width % WORD<Sum> - window.x;
                if (end > columns) end = columns;
                if (end < begin) end = begin;
                check =
                    load_words<false, BATCH, Pixel>(in, data, window, positions, target, thread);
            }
            NO_UNROLL
            for (int side = 0; side < 2; side++) {
                const unsigned first = side == 0 ? 0 : (unsigned)end;
                const unsigned count = side == 0 ? (unsigned)begin : (unsigned)(columns - end);
                if (count != 0)
                    check += load_pixels<false, BATCH, Pixel>(in, data, window, positions, first,
                                                              count, target, thread);
            }
        }
        if (check != 0) store_same(marked, mark);
    });
}

/* Stores results from shared memory, in whatever type they are wanted. */
template <class Sum>
HOST_DEVICE inline void store_from_shared(const Results<Sum> &out, unsigned image, int64_t y,
                                          int64_t x, int rows, int columns, const Sum *sums,
                                          int pitch, Thread thread)
{
    const int lane = thread.thread % 32;
    if (out.height - y < rows) rows = (int)(out.height - y);
    if (out.width - x < columns) columns = (int)(out.width - x);
    const int64_t origin = (image * out.height + y) * out.width + x;
    with_pixel_of(Sum(), out.dtype, [&](auto zero) {
        using Pixel = decltype(zero);
        Pixel *pixels = reinterpret_cast<Pixel *>(out.data) + origin;
        for (int row = thread.thread / 32; row < rows; row += thread.threads / 32) {
            NO_UNROLL
            for (int column = lane; column < columns; column += 32)
                pixels[row * out.width + column] = ToPixel<Pixel>::of(sums[row * pitch + column]);
        }
    });
}

/* Stores a patch whose rows are whole words, as far as it is inside the image. */
template <class Sum, int ROWS, int COLUMNS>
HOST_DEVICE inline void store_patch(const Results<Sum> &out, unsigned image, int64_t y, int64_t x,
                                    const Sum (&sums)[ROWS][COLUMNS])
{
    const int rows = out.height - y < ROWS ? (int)(out.height - y) : ROWS;
    const int columns = out.width - x < COLUMNS ? (int)(out.width - x) : COLUMNS;
    Sum *target = reinterpret_cast<Sum *>(out.data) + (image * out.height + y) * out.width + x;
    UNROLL
    for (int row = 0; row < ROWS; row++, target += out.width) {
        UNROLL
        for (int column = 0; column < COLUMNS; column += WORD<Sum>) {
            if (row >= rows || column >= columns) continue;
            Word<Sum> word;
            UNROLL
            for (int i = 0; i < WORD<Sum>; i++) word.items[i] = sums[row][column + i];
#ifdef __CUDA_ARCH__
            /* Not needed again soon, unlike the pixels that tiles share. */
            __stcs(reinterpret_cast<uint4 *>(target + column), bits_as<uint4>(word));
#else
            *reinterpret_cast<Word<Sum> *>(target + column) = word;
#endif
        }
    }
}

template <class Sum>
HOST_DEVICE inline Word<Sum> word_at(const Sum *shared)
{
    return *reinterpret_cast<const Word<Sum> *>(shared);
}

/* Weights in the kernel's arguments, SIZE x SIZE of them. */
template <class Sum, int SIZE>
struct WeightsByValue {
    Sum items[SIZE * SIZE];

    HOST_DEVICE const Sum *take(Sum *, Thread) const { return items; }
};

/* Weights in device memory, of any dtype and strides, with zeros around them. */
template <class Sum>
struct GivenWeights {
    const char *data;
    Dtype dtype;
    int64_t rows, columns, row_stride, column_stride;
    bool flipped;

    HOST_DEVICE Sum at(int64_t row, int64_t column) const
    {
        if (row < 0 || row >= rows || column < 0 || column >= columns) return 0;
        const int64_t i = flipped ? rows - 1 - row : row;
        const int64_t j = flipped ? columns - 1 - column : column;
        const char *place = data + i * row_stride + j * column_stride;
        Sum weight = 0;
        with_real_on_device(dtype, [&](auto pixel) {
            pixel = *reinterpret_cast<const decltype(pixel) *>(place);
            weight = without_tiny<Sum>(from_pixel<double>(pixel));
        });
        return weight;
    }
};

/* They go through shared memory, from column -begin on. */
template <class Sum, int SIZE>
struct WeightsThere {
    GivenWeights<Sum> given;
    int64_t begin;

    HOST_DEVICE const Sum *take(Sum *shared, Thread thread) const
    {
        for (unsigned at = thread.thread; at < SIZE * SIZE; at += thread.threads)
            shared[at] = given.at(at / SIZE, at % SIZE - begin);
        return shared;
    }
};

/* A thread computes ROWS pixels, one below the other, straight from memory. Images of few pixels
 * take less time than the code of SmallFilter, which is not in the instruction cache yet, and than
 * its threads wait for each other: this is as short as it can be, and so for pixels of the type Sum
 * alone. */
template <class Sum, int SIZE>
struct FewPixels {
    static constexpr int MAX_THREADS = 128, ROWS = 2;
    static constexpr int64_t MOST = 1 << 19;

    Images<Sum> in;
    Sum *out;
    Divider width, bands;             /* bands: of ROWS rows, in an image */
    int64_t count, height, top, left; /* height: of the results */
    bool skips;                       /* there may be zeros in the weights */
    WeightsByValue<Sum, SIZE> weights;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const uint32_t at = thread.block * thread.threads + thread.thread;
        if (at >= count) return;
        const uint32_t line = width.divide(at), image = bands.divide(line);
        const int64_t y = (int64_t)(line - image * bands.divisor) * ROWS;
        const int64_t x = at - line * width.divisor;
        int64_t columns[SIZE];
        UNROLL
        for (int j = 0; j < SIZE; j++) columns[j] = position_of(x - left + j, in.width, in.border);
        const char *data = in.data + image * in.image_stride;
        Sum sums[ROWS] = {};
        UNROLL
        for (int i = 0; i < ROWS + SIZE - 1; i++) {
            const int64_t row = position_of(y - top + i, in.height, in.border);
            const Sum *pixels = reinterpret_cast<const Sum *>(data + row * in.row_stride);
            UNROLL
            for (int j = 0; j < SIZE; j++) {
                const Sum pixel = row < 0 || columns[j] < 0 ? in.beyond : pixels[columns[j]];
                UNROLL
                for (int o = 0; o < ROWS; o++) {
                    if (i < o || i - o >= SIZE) continue;
                    const Sum weight = weights.items[(i - o) * SIZE + j];
                    if (!skips || weight != 0) sums[o] = add_term(sums[o], weight, pixel);
                }
            }
        }
        Sum *results = out + (image * height + y) * in.width + x;
        UNROLL
        for (int o = 0; o < ROWS; o++)
            if (y + o < height) results[o * in.width] = sums[o];
    }
};

/* Weights of SIZE x SIZE, which smaller ones are padded to. A thread computes a word of each of
 * ROWS rows; a warp is a line of words, and a block may have fewer of them. */
template <class Sum, int SIZE, class Weights>
struct SmallFilter {
    static constexpr int MAX_THREADS = 256, MIN_THREADS = 64;
    static constexpr int ROWS = 4;
    static constexpr int MAX_TILE_ROWS = ROWS * MAX_THREADS / 32, TILE_COLUMNS = 32 * WORD<Sum>;
    /* Tiles begin at whole words of the image, and so the first of a thread's pixels is SHIFT
     * behind the first that it loads. */
    static constexpr int SHIFT = (WORD<Sum> - SIZE / 2 % WORD<Sum>) % WORD<Sum>;
    static constexpr int WORDS = (SHIFT + WORD<Sum> + SIZE - 1 + WORD<Sum> - 1) / WORD<Sum>;
    static constexpr int PITCH = TILE_COLUMNS + (WORDS - 1) * WORD<Sum>;
    /* All words that a thread loads, on their way at once. */
    static constexpr int BATCH = (MAX_TILE_ROWS + SIZE - 1) * (PITCH / WORD<Sum>) / MAX_THREADS + 1;

    struct alignas(16) Shared {
        Sum pixels[(MAX_TILE_ROWS + SIZE - 1) * PITCH];
        Sum weights[SIZE * SIZE];
        Positions positions;
        unsigned marked;
    };

    Images<Sum> in;
    Results<Sum> out;
    Tiles tiles;
    Divider words;
    int64_t top, left;
    bool skips; /* there may be zeros in the weights */
    Weights weights;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        unsigned tile_x, tile_y, image;
        tiles.place(thread.block, &tile_x, &tile_y, &image);
        const int tile_rows = ROWS * (int)(thread.threads / 32);
        const int64_t y = (int64_t)tile_y * (unsigned)tile_rows;
        const int64_t x = (int64_t)tile_x * TILE_COLUMNS;
        const Window<Sum> window(in, y - top, x - left - SHIFT, tile_rows + SIZE - 1, 0, words);
        if (thread.thread == 0) shared->marked = 0;
        shared->positions.find(in, window, thread);
        const Sum *factors = weights.take(shared->weights, thread);
        thread.sync();
        load_window<BATCH>(in, image, window, shared->positions,
                           Rows<Sum, 0>{shared->pixels, PITCH}, thread, 1, &shared->marked);
        thread.sync();

        const int first_row = (int)thread.thread / 32 * ROWS, lane = thread.thread % 32;
        const Sum *pixels = shared->pixels + first_row * PITCH + lane * WORD<Sum>;
        Sum sums[ROWS][WORD<Sum>] = {};
        if (skips && shared->marked != 0)
            add_with_care(pixels, factors, sums);
        else
            add(pixels, factors, sums);

        if (out.whole_words) {
            store_patch(out, image, y + first_row, x + lane * WORD<Sum>, sums);
            return;
        }
        thread.sync();
        UNROLL
        for (int row = 0; row < ROWS; row++) UNROLL
        for (int i = 0; i < WORD<Sum>; i++)
            shared->pixels[(first_row + row) * PITCH + lane * WORD<Sum> + i] = sums[row][i];
        thread.sync();
        store_from_shared(out, image, y, x, tile_rows, TILE_COLUMNS, shared->pixels, PITCH, thread);
    }

    HOST_DEVICE static void add(const Sum *pixels, const Sum *weights, Sum (&sums)[ROWS][WORD<Sum>])
    {
        UNROLL
        for (int line = 0; line < ROWS + SIZE - 1; line++) {
            Sum row[WORDS * WORD<Sum>];
            UNROLL
            for (int word = 0; word < WORDS; word++) {
                const Word<Sum> loaded = word_at(pixels + line * PITCH + word * WORD<Sum>);
                UNROLL
                for (int i = 0; i < WORD<Sum>; i++) row[word * WORD<Sum> + i] = loaded.items[i];
            }
            UNROLL
            for (int o = 0; o < ROWS; o++) {
                if (line - o < 0 || line - o >= SIZE) continue;
                UNROLL
                for (int j = 0; j < SIZE; j++) UNROLL
                for (int i = 0; i < WORD<Sum>; i++)
                    sums[o][i] =
                        add_term(sums[o][i], weights[(line - o) * SIZE + j], row[SHIFT + j + i]);
            }
        }
    }

    /* A NaN or an infinity below a zero of the weights does not count. */
    HOST_DEVICE static void add_with_care(const Sum *pixels, const Sum *weights,
                                          Sum (&sums)[ROWS][WORD<Sum>])
    {
        UNROLL
        for (int o = 0; o < ROWS; o++) {
            for (int at = 0; at < SIZE * SIZE; at++) {
                if (weights[at] == 0) continue;
                const Sum *row = pixels + (o + at / SIZE) * PITCH + SHIFT + at % SIZE;
                UNROLL
                for (int i = 0; i < WORD<Sum>; i++)
                    sums[o][i] = add_term(sums[o][i], weights[at], row[i]);
            }
        }
    }
};

/* Weights of any size. A thread computes ROWS rows of COLUMNS pixels; a warp is ACROSS such patches
 * wide and DOWN high. Rows of pixels go through shared memory band by band, and with them the rows
 * of the weights that they meet. */
template <class Sum, class Weights, int ROWS, int COLUMNS>
struct LargeFilter {
    /* More than a block has: the compiler is to use no more registers than four blocks find on a
     * multiprocessor. */
    static constexpr int THREADS = 128, MAX_THREADS = 4 * THREADS;
    static constexpr int WARPS = THREADS / 32, ACROSS = 8, DOWN = 4;
    static constexpr int TILE_ROWS = WARPS * DOWN * ROWS, TILE_COLUMNS = ACROSS * COLUMNS;
    static constexpr int OTHER_ROWS = TILE_ROWS - ROWS;
    static constexpr int BANKS = 128 / sizeof(Sum), ABREAST = BANKS / COLUMNS, BELOW = 8 / ABREAST;
    static_assert(ACROSS == 8 && BELOW <= DOWN, "a warp has all patches");
    static constexpr int CAPACITY = (45 << 10) / sizeof(Sum);
    /* Rows of pixels take this much more than their pitch. */
    static constexpr int SKEW = (WORD<Sum> + ROWS - 1) / ROWS;
    /* Columns of the weights for a band of one row. */
    static constexpr int FIT =
        (CAPACITY - (OTHER_ROWS + 1) * (TILE_COLUMNS + 2 * WORD<Sum> + BANKS / ROWS + SKEW)) /
        (OTHER_ROWS + 1 + ROWS) / WORD<Sum> * WORD<Sum>;
    static constexpr int MOST_COLUMNS = FIT < 128 ? FIT : 128;

    struct alignas(16) Shared {
        Sum items[CAPACITY]; /* weights, and behind them pixels */
        Positions positions;
        unsigned marked;
    };
    using Sums = Sum[ROWS][COLUMNS];

    Images<Sum> in;
    Results<Sum> out;
    Tiles tiles;
    int64_t top, left;
    int rows, columns;         /* of the weights */
    int band_rows;             /* of a thread's pixels, that are in shared memory at a time, and */
    int chunk_columns;         /* as many columns of the weights */
    Divider words, last_words; /* of a row of pixels for a chunk, and for the last one */
    Weights weights;

    /* What is in shared memory. */
    struct Part {
        int band, height; /* rows of a thread's pixels */
        int chunk, width; /* columns of the weights */
        int pitch;        /* of the pixels */

        /* The weights are there in groups of a word of columns each, row by row: those that the
         * rows of a thread meet are behind one another. Row band - ROWS + 1 comes first. There may
         * be zeros above and below, and on the right. */
        HOST_DEVICE int factor_rows() const { return height + ROWS - 1; }
        HOST_DEVICE int factor_columns() const
        {
            return (width + WORD<Sum> - 1) / WORD<Sum> * WORD<Sum>;
        }
    };

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        unsigned tile_x, tile_y, image;
        tiles.place(thread.block, &tile_x, &tile_y, &image);
        const int64_t y = (int64_t)tile_y * TILE_ROWS, x = (int64_t)tile_x * TILE_COLUMNS;
        int first_row, first_column;
        place_patch(thread, &first_row, &first_column);
        if (thread.thread == 0) shared->marked = 0;

        Sums sums = {};
        unsigned mark = 0;
        /* Row o of a thread meets row - o of the weights in this row of its pixels. */
        const int all_rows = rows + ROWS - 1;
        const int skip = (int)(-left & (WORD<Sum> - 1));
        for (int band = 0; band < all_rows; band += band_rows) {
            const int height = all_rows - band < band_rows ? all_rows - band : band_rows;
            for (int chunk = 0; chunk < columns; chunk += chunk_columns) {
                const bool last = columns - chunk <= chunk_columns;
                const Divider row_words = last ? last_words : words;
                const Part part = {band, height, chunk, last ? columns - chunk : chunk_columns,
                                   pitch_of((int)row_words.divisor)};
                const Window<Sum> window(in, y - top + band, x - left + chunk - skip,
                                         height + OTHER_ROWS, skip, row_words);
                Sum *factors = shared->items;
                const Rows<Sum, ROWS> target = {
                    factors + part.factor_rows() * part.factor_columns(), part.pitch};
                mark++;
                shared->positions.find(in, window, thread);
                thread.sync();
                place_weights(part, factors, thread);
                load_window<3>(in, image, window, shared->positions, target, thread, mark,
                               &shared->marked);
                thread.sync();
                const Sum *pixels = target.at(first_row) + first_column;
                if (shared->marked == mark)
                    add_with_care(part, pixels, factors, sums);
                else
                    add(part, pixels, factors, sums);
            }
        }
        store(thread, shared, image, y, x, sums);
    }

    /* The words that eight threads read at a time are in all banks: ABREAST patches are beside one
     * another, and those below them a word further on. */
    HOST_DEVICE static void place_patch(Thread thread, int *row, int *column)
    {
        const int warp = (int)thread.thread / 32, eight = (int)thread.thread % 32 / 8;
        const int across = eight % BELOW * ABREAST + (int)thread.thread % ABREAST;
        const int down = eight / BELOW * BELOW + (int)thread.thread % 8 / ABREAST;
        *row = (warp * DOWN + down) * ROWS;
        *column = across * COLUMNS;
    }

    /* Of rows of so many words: ROWS rows are a multiple of all banks. */
    HOST_DEVICE static int pitch_of(int words)
    {
        constexpr int GRAIN = BANKS / ROWS;
        return (words * WORD<Sum> + GRAIN - 1) / GRAIN * GRAIN;
    }

    HOST_DEVICE void place_weights(const Part &part, Sum *factors, Thread thread) const
    {
        const int rows_there = part.factor_rows(), count = rows_there * part.factor_columns();
        for (int at = (int)thread.thread; at < count; at += (int)thread.threads) {
            const int word = at / WORD<Sum>, group = word / rows_there;
            const int row = part.band - (ROWS - 1) + word - group * rows_there;
            const int column = group * WORD<Sum> + at % WORD<Sum>;
            const bool there = row >= 0 && row < rows && column < part.width;
            factors[at] = there ? weights.items[row * (int64_t)columns + part.chunk + column] : 0;
        }
    }

    HOST_DEVICE void add(const Part &part, const Sum *pixels, const Sum *factors, Sums &sums) const
    {
        const int step = part.factor_rows() * WORD<Sum>;
        NO_UNROLL
        for (int row = part.band; row < part.band + part.height; row++) {
            /* Two words more than the rows of the thread have: the loop moves on by as many. */
            Sum window[COLUMNS + 2 * WORD<Sum>];
            UNROLL
            for (int i = 0; i < COLUMNS; i += WORD<Sum>) take_word(pixels + i, window + i);
            const Sum *next = pixels + COLUMNS, *group = factors;
            /* Which rows of the thread meet a row of the weights. */
            unsigned met = 0;
            UNROLL
            for (int o = 0; o < ROWS; o++) met |= (row - o >= 0 && row - o < rows ? 1U : 0U) << o;
            int left = part.width;
            NO_UNROLL
            for (; left >= 2 * WORD<Sum>; left -= 2 * WORD<Sum>) {
                add_columns<WORD<Sum>>(met, next, group, window, sums);
                add_columns<WORD<Sum>>(met, next + WORD<Sum>, group + step, window + WORD<Sum>,
                                       sums);
                UNROLL
                for (int i = 0; i < COLUMNS; i++) window[i] = window[i + 2 * WORD<Sum>];
                next += 2 * WORD<Sum>;
                group += 2 * step;
            }
            if (left >= WORD<Sum>) {
                add_columns<WORD<Sum>>(met, next, group, window, sums);
                UNROLL
                for (int i = 0; i < COLUMNS; i++) window[i] = window[i + WORD<Sum>];
                next += WORD<Sum>;
                group += step;
                left -= WORD<Sum>;
            }
            if (left == 1) add_columns<1>(met, next, group, window, sums);
            if (left == 2) add_columns<2>(met, next, group, window, sums);
            if (left == 3) add_columns<3>(met, next, group, window, sums);
            pixels += part.pitch;
            if ((row - part.band) % ROWS == ROWS - 1) pixels += WORD<Sum>;
            factors += WORD<Sum>;
        }
    }

    /* The terms of COUNT columns of the weights, for the rows that meet one; the pixels of the
     * first one are in the window. */
    template <int COUNT>
    HOST_DEVICE static void add_columns(unsigned met, const Sum *next, const Sum *group,
                                        Sum *window, Sums &sums)
    {
        if (COUNT > 1) take_word(next, window + COLUMNS);
        Sum factors[ROWS][WORD<Sum>];
        UNROLL
        for (int o = 0; o < ROWS; o++) take_word(group + (ROWS - 1 - o) * WORD<Sum>, factors[o]);
        UNROLL
        for (int o = 0; o < ROWS; o++) {
            if ((met >> o & 1) == 0) continue;
            UNROLL
            for (int k = 0; k < COUNT; k++) UNROLL
            for (int i = 0; i < COLUMNS; i++)
                sums[o][i] = add_term(sums[o][i], factors[o][k], window[i + k]);
        }
    }

    /* A NaN or an infinity below a zero of the weights does not count. */
    HOST_DEVICE void add_with_care(const Part &part, const Sum *pixels, const Sum *factors,
                                   Sums &sums) const
    {
        const int step = part.factor_rows() * WORD<Sum>;
        NO_UNROLL
        for (int row = part.band; row < part.band + part.height; row++) {
            NO_UNROLL
            for (int j = 0; j < part.width; j++) {
                const Sum *group = factors + j / WORD<Sum> * step + j % WORD<Sum>;
                UNROLL
                for (int o = 0; o < ROWS; o++) {
                    const Sum weight = group[(ROWS - 1 - o) * WORD<Sum>];
                    if (weight == 0) continue;
                    UNROLL
                    for (int i = 0; i < COLUMNS; i++)
                        sums[o][i] = add_term(sums[o][i], weight, pixels[j + i]);
                }
            }
            pixels += part.pitch;
            if ((row - part.band) % ROWS == ROWS - 1) pixels += WORD<Sum>;
            factors += WORD<Sum>;
        }
    }

    HOST_DEVICE static void take_word(const Sum *shared, Sum *target)
    {
        const Word<Sum> word = word_at(shared);
        UNROLL
        for (int i = 0; i < WORD<Sum>; i++) target[i] = word.items[i];
    }

    HOST_DEVICE void store(Thread thread, Shared *shared, unsigned image, int64_t y, int64_t x,
                           const Sums &sums) const
    {
        int first_row, first_column;
        place_patch(thread, &first_row, &first_column);
        if (out.whole_words) {
            store_patch(out, image, y + first_row, x + first_column, sums);
            return;
        }
        thread.sync();
        UNROLL
        for (int o = 0; o < ROWS; o++) UNROLL
        for (int i = 0; i < COLUMNS; i++)
            shared->items[(first_row + o) * TILE_COLUMNS + first_column + i] = sums[o][i];
        thread.sync();
        store_from_shared(out, image, y, x, TILE_ROWS, TILE_COLUMNS, shared->items, TILE_COLUMNS,
                          thread);
    }
};

/* Weights in the kernel's arguments, 31 x 31 of them, or in device memory. */
constexpr int MOST_BY_VALUE = 1024;
struct ManyByValue {
    float items[MOST_BY_VALUE];
};
template <class Sum>
struct ManyInMemory {
    const Sum *items;
};

/* The sum over i of down[i] times row y + i, for a patch of columns, takes the place of row y in
 * shared memory once all threads have taken theirs; of these, the sums along the rows are taken. */
struct SeparableFilter {
    /* Registers for three blocks, as in LargeFilter. */
    static constexpr int THREADS = 256, MAX_THREADS = 3 * THREADS;
    static constexpr int WARPS = THREADS / 32, ROWS = 8;
    static constexpr int TILE_COLUMNS = 64, GROUPS = 2, GROUP_COLUMNS = 32, RUN = 8;
    static constexpr int CAPACITY = 11392;

    struct alignas(16) Shared {
        float pixels[CAPACITY];
        Factors factors;
        Positions positions;
        unsigned marked;
    };

    Images<float> in;
    Results<float> out;
    Tiles tiles;
    Divider words; /* of a row of pixels */
    int64_t top, left;
    int rows, columns; /* of the weights; columns with zeros beside them, as whole words */
    int tile_rows;     /* a multiple of ROWS */
    int pitch;         /* in shared memory: 4 more than a multiple of 32, which spreads the banks */
    Factors factors;

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        unsigned tile_x, tile_y, image;
        tiles.place(thread.block, &tile_x, &tile_y, &image);
        const int64_t y = (int64_t)tile_y * (unsigned)tile_rows;
        const int64_t x = (int64_t)tile_x * TILE_COLUMNS;
        const Window<float> window(in, y - top, x - left, tile_rows + rows - 1, 0, words);
        if (thread.thread == 0) shared->marked = 0;
        for (int i = (int)thread.thread; i < MOST_ALONG_AXIS; i += (int)thread.threads) {
            shared->factors.down[i] = factors.down[i];
            shared->factors.along[i] = factors.along[i];
        }
        shared->positions.find(in, window, thread);
        thread.sync();
        load_window<9>(in, image, window, shared->positions, Rows<float, 0>{shared->pixels, pitch},
                       thread, 1, &shared->marked);
        thread.sync();
        if (shared->marked != 0)
            filter<true>(thread, shared, image, y, x);
        else
            filter<false>(thread, shared, image, y, x);
    }

    /* CARE: a NaN or an infinity below a zero of the weights does not count. */
    template <bool CARE>
    HOST_DEVICE void filter(Thread thread, Shared *shared, unsigned image, int64_t y,
                            int64_t x) const
    {
        const unsigned patch = words.divide(thread.thread);
        const unsigned word = thread.thread - patch * words.divisor;
        const bool has_patch = (int)patch * ROWS < tile_rows;
        float down[ROWS][4] = {};
        float *column = shared->pixels + patch * (unsigned)(ROWS * pitch) + word * 4;
        if (has_patch) add_down<CARE>(shared->factors.down, column, down);
        thread.sync();
        if (has_patch) {
            UNROLL
            for (int o = 0; o < ROWS; o++) put_word(column + o * pitch, down[o]);
        }
        thread.sync();

        /* Four threads share a row, so that the words that eight of them read are in all banks. */
        const int lane = thread.thread % 32;
        const int row = (int)thread.thread / 32 * ROWS + lane / 4;
        const int first_column = lane % 4 * RUN;
        float along[GROUPS][1][RUN] = {};
        float *line = shared->pixels + row * pitch + first_column;
        if (row < tile_rows) add_along<CARE>(shared->factors.along, line, along);
        if (out.whole_words) {
            UNROLL
            for (int group = 0; group < GROUPS; group++)
                if (row < tile_rows)
                    store_patch(out, image, y + row, x + first_column + group * GROUP_COLUMNS,
                                along[group]);
            return;
        }
        thread.sync();
        if (row < tile_rows) {
            UNROLL
            for (int group = 0; group < GROUPS; group++) UNROLL
            for (int part = 0; part < RUN; part += 4)
                put_word(line + group * GROUP_COLUMNS + part, along[group][0] + part);
        }
        thread.sync();
        store_from_shared(out, image, y, x, tile_rows, TILE_COLUMNS, shared->pixels, pitch, thread);
    }

    /* The pixels of ROWS rows are in registers, in a ring that the loop turns by one for each
     * weight. */
    template <bool CARE>
    HOST_DEVICE void add_down(const float *weights, const float *column,
                              float (&sums)[ROWS][4]) const
    {
        Word<float> ring[ROWS];
        UNROLL
        for (int i = 0; i < ROWS - 1; i++) ring[i] = word_at(column + i * pitch);
        const float *next = column + (ROWS - 1) * pitch;
        int start = 0;
        for (; start + ROWS <= rows; start += ROWS)
            turn<CARE, true>(weights + start, ROWS, next, ring, sums);
        if (start < rows) turn<CARE, false>(weights + start, rows - start, next, ring, sums);
    }

    template <bool CARE, bool ALL>
    HOST_DEVICE void turn(const float *weights, int count, const float *&next,
                          Word<float> (&ring)[ROWS], float (&sums)[ROWS][4]) const
    {
        float factors[ROWS];
        UNROLL
        for (int i = 0; i < ROWS; i += 4) take_word(weights + i, factors + i);
        UNROLL
        for (int t = 0; t < ROWS; t++, next += pitch) {
            if (!ALL && t >= count) break;
            ring[(t + ROWS - 1) % ROWS] = word_at(next);
            if (CARE && factors[t] == 0) continue;
            UNROLL
            for (int o = 0; o < ROWS; o++) UNROLL
            for (int i = 0; i < 4; i++)
                sums[o][i] = add_term(sums[o][i], factors[t], ring[(t + o) % ROWS].items[i]);
        }
    }

    template <bool CARE>
    HOST_DEVICE void add_along(const float *weights, const float *line,
                               float (&sums)[GROUPS][1][RUN]) const
    {
        float window[GROUPS][RUN + 4];
        UNROLL
        for (int group = 0; group < GROUPS; group++) {
            take_word(line + group * GROUP_COLUMNS, window[group]);
            take_word(line + group * GROUP_COLUMNS + 4, window[group] + 4);
        }
        UNROLL_THRICE
        for (int j = 0; j < columns; j += 4) {
            float factors[4];
            take_word(weights + j, factors);
            UNROLL
            for (int group = 0; group < GROUPS; group++)
                take_word(line + group * GROUP_COLUMNS + j + 8, window[group] + 8);
            UNROLL
            for (int k = 0; k < 4; k++) {
                if (CARE && factors[k] == 0) continue;
                UNROLL
                for (int group = 0; group < GROUPS; group++) UNROLL
                for (int i = 0; i < RUN; i++)
                    sums[group][0][i] =
                        add_term(sums[group][0][i], factors[k], window[group][i + k]);
            }
            UNROLL
            for (int group = 0; group < GROUPS; group++) UNROLL
            for (int i = 0; i < RUN; i++) window[group][i] = window[group][i + 4];
        }
    }

    HOST_DEVICE static void take_word(const float *shared, float *target)
    {
        const Word<float> word = word_at(shared);
        UNROLL
        for (int i = 0; i < 4; i++) target[i] = word.items[i];
    }

    HOST_DEVICE static void put_word(float *shared, const float *source)
    {
        Word<float> word;
        UNROLL
        for (int i = 0; i < 4; i++) word.items[i] = source[i];
        *reinterpret_cast<Word<float> *>(shared) = word;
    }
};

/* Brings weights from host memory into device memory, as many at a time as a launch can carry. */
template <class Sum>
struct PlaceWeights {
    static constexpr int MAX_THREADS = 256;
    static constexpr int MOST = (30 << 10) / sizeof(Sum);

    Sum *target;
    int count;
    Sum items[MOST];

    HOST_DEVICE void operator()(Thread thread) const
    {
        for (int i = (int)thread.thread; i < count; i += (int)thread.threads) target[i] = items[i];
    }
};

template <class Sum>
struct ReadWeights {
    static constexpr int MAX_THREADS = 256;

    Sum *target;
    GivenWeights<Sum> given;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t step = thread.blocks * (int64_t)thread.threads;
        int64_t at = thread.block * (int64_t)thread.threads + thread.thread;
        for (; at < given.rows * given.columns; at += step)
            target[at] = given.at(at / given.columns, at % given.columns);
    }
};

/* The step from image to image, if there is one step. */
static bool images_are_regular(const View &view, int64_t *step)
{
    int64_t expected = 0;
    *step = 0;
    for (int i = view.ndim - 3; i >= 0; i--) {
        if (view.shape[i] == 1) continue;
        if (expected == 0)
            *step = view.strides[i];
        else if (view.strides[i] != expected)
            return false;
        expected = view.strides[i] * view.shape[i];
        if (expected == 0) return false;
    }
    return true;
}

/* Whether a view's elements are at multiples of their size, as the kernels read them. */
static bool is_aligned(const View &view)
{
    uintptr_t all = reinterpret_cast<uintptr_t>(view.data);
    for (int i = 0; i < view.ndim; i++)
        if (view.shape[i] > 1) all |= static_cast<uintptr_t>(view.strides[i]);
    return all % (uintptr_t)view.item_bytes == 0;
}

static bool kernels_can_read(const View &input)
{
    int64_t step;
    const int last = input.ndim - 1;
    const bool dense = input.shape[last] == 1 || input.strides[last] == input.item_bytes;
    return dense && is_aligned(input) && images_are_regular(input, &step);
}

template <class Sum>
static Images<Sum> images_of(const Filter &filter, const View &input)
{
    Images<Sum> in = {};
    in.data = static_cast<char *>(input.data);
    images_are_regular(input, &in.image_stride);
    if (input.ndim > 1) in.row_stride = input.strides[input.ndim - 2];
    in.height = filter.in_height;
    in.width = filter.width;
    in.dtype = filter.in;
    in.border = filter.border;
    in.beyond = static_cast<Sum>(filter.border_value);
    const int64_t word_bytes = WORD<Sum> * input.item_bytes;
    const int64_t places = (int64_t)(uintptr_t)in.data | in.image_stride | in.row_stride;
    in.whole_words = (places & (word_bytes - 1)) == 0;
    return in;
}

template <class Sum>
static Results<Sum> results_of(const Filter &filter, const View &output)
{
    Results<Sum> out = {};
    out.data = static_cast<char *>(output.data);
    out.height = filter.height;
    out.width = filter.width;
    out.dtype = filter.out;
    const bool same = filter.out == (sizeof(Sum) == 4 ? DTYPE_FLOAT32 : DTYPE_FLOAT64);
    out.whole_words = same && out.width % WORD<Sum> == 0 && (uintptr_t)out.data % 16 == 0;
    return out;
}

/* Launches a block for each tile of each image, of more images at a time than a grid has blocks for
 * only where there are as many. */
template <class Body>
static Status launch_tiles(Body &body, const Filter &filter, int tile_rows, int tile_columns,
                           int threads, const Stream *stream)
{
    const int64_t across = (filter.width + tile_columns - 1) / tile_columns;
    const int64_t down = (filter.height + tile_rows - 1) / tile_rows;
    if (across > INT32_MAX / down)
        return fail(STATUS_VALUE_ERROR,
                    "an image of %lld x %lld pixels is too large for the GPU: filter parts of it",
                    (long long)filter.height, (long long)filter.width);
    body.tiles = {divider_of((uint32_t)across), divider_of((uint32_t)down)};
    const int64_t most = INT32_MAX / (across * down);
    const int64_t out_bytes = filter.height * filter.width * dtype_bytes(filter.out);
    for (int64_t rest = filter.images; rest > 0; rest -= most) {
        const int64_t images = rest < most ? rest : most;
        const Grid grid = {(unsigned)(across * down * images), (unsigned)threads};
        const Status status = launch_with_shared(body, grid, stream->handle);
        if (status != STATUS_OK) return status;
        body.in.data += images * body.in.image_stride;
        body.out.data += images * out_bytes;
    }
    return STATUS_OK;
}

/* Smaller tiles, where larger ones would be fewer than two for each multiprocessor of a large GPU:
 * an H200 has 132. */
constexpr int64_t FEW_TILES = 264;

static int64_t count_tiles(const Filter &filter, int tile_rows, int tile_columns)
{
    const int64_t across = (filter.width + tile_columns - 1) / tile_columns;
    const int64_t down = (filter.height + tile_rows - 1) / tile_rows;
    return across > FEW_TILES || down > FEW_TILES || filter.images > FEW_TILES
               ? FEW_TILES
               : across * down * filter.images;
}

template <class Sum>
static GivenWeights<Sum> given_weights(const Filter &filter, const View &weights)
{
    GivenWeights<Sum> given = {};
    given.data = static_cast<char *>(weights.data);
    given.dtype = weights.dtype;
    given.rows = filter.rows;
    given.columns = filter.columns;
    if (weights.ndim > 1) given.row_stride = weights.strides[weights.ndim - 2];
    given.column_stride = weights.strides[weights.ndim - 1];
    given.flipped = filter.flipped;
    return given;
}

template <class Sum, int SIZE, class Weights>
static Status launch_padded(const Filter &filter, const View &input, const View &output,
                            int64_t begin, SmallFilter<Sum, SIZE, Weights> &body,
                            const Stream *stream)
{
    using Body = SmallFilter<Sum, SIZE, Weights>;
    body.in = images_of<Sum>(filter, input);
    body.out = results_of<Sum>(filter, output);
    body.words = divider_of(Body::PITCH / WORD<Sum>);
    body.top = filter.top;
    body.left = filter.left + begin;
    int threads = Body::MAX_THREADS, rows = Body::MAX_TILE_ROWS;
    while (threads > Body::MIN_THREADS &&
           count_tiles(filter, rows, Body::TILE_COLUMNS) < FEW_TILES) {
        threads /= 2;
        rows /= 2;
    }
    return launch_tiles(body, filter, rows, Body::TILE_COLUMNS, threads, stream);
}

template <class Sum, int SIZE>
static bool are_few_pixels(const Filter &filter)
{
    constexpr int64_t MOST = FewPixels<Sum, SIZE>::MOST;
    const Dtype dtype = sizeof(Sum) == sizeof(float) ? DTYPE_FLOAT32 : DTYPE_FLOAT64;
    return filter.in == dtype && filter.out == dtype && filter.height <= MOST &&
           filter.width <= MOST / filter.height &&
           filter.images <= MOST / (filter.height * filter.width);
}

template <class Sum, int SIZE>
static Status launch_few(const Filter &filter, const View &input, const View &output, int64_t begin,
                         const WeightsByValue<Sum, SIZE> &weights, bool skips, const Stream *stream)
{
    using Body = FewPixels<Sum, SIZE>;
    Body body = {};
    body.in = images_of<Sum>(filter, input);
    body.out = static_cast<Sum *>(output.data);
    const int64_t bands = (filter.height + Body::ROWS - 1) / Body::ROWS;
    body.width = divider_of((uint32_t)filter.width);
    body.bands = divider_of((uint32_t)bands);
    body.count = filter.images * bands * filter.width;
    body.height = filter.height;
    body.top = filter.top;
    body.left = filter.left + begin;
    body.skips = skips;
    body.weights = weights;
    const int64_t blocks = (body.count + Body::MAX_THREADS - 1) / Body::MAX_THREADS;
    const Grid grid = {(unsigned)blocks, Body::MAX_THREADS};
    return launch(body, grid, stream->handle);
}

/* Whether small filters have kernels for weights on the device: these would double the time that it
 * takes to compile those of float64. */
template <class Sum>
constexpr bool SMALL_TAKES_THEM = sizeof(Sum) == sizeof(float);

/* weights is NULL where the given ones are on the device. */
template <class Sum, int SIZE>
static Status launch_small(const Filter &filter, const View &input, const View &output,
                           const View &given, const double *weights, const Stream *stream)
{
    /* Zeros on the left bring the weights to the middle, where the tiles are whole words. */
    int64_t begin = SIZE / 2 - filter.left;
    if (begin > SIZE - filter.columns) begin = SIZE - filter.columns;
    if (begin < 0) begin = 0;
    if constexpr (SMALL_TAKES_THEM<Sum>) {
        if (weights == NULL) {
            SmallFilter<Sum, SIZE, WeightsThere<Sum, SIZE>> body = {};
            body.weights.given = given_weights<Sum>(filter, given);
            body.weights.begin = begin;
            body.skips = true;
            return launch_padded(filter, input, output, begin, body, stream);
        }
    }
    SmallFilter<Sum, SIZE, WeightsByValue<Sum, SIZE>> body = {};
    Sum *items = body.weights.items;
    for (int64_t i = 0; i < filter.rows; i++)
        for (int64_t j = 0; j < filter.columns; j++)
            items[i * SIZE + begin + j] = static_cast<Sum>(weights[i * filter.columns + j]);
    for (const Sum weight : body.weights.items) body.skips = body.skips || weight == 0;
    if constexpr (SIZE == 3)
        if (are_few_pixels<Sum, SIZE>(filter))
            return launch_few<Sum, SIZE>(filter, input, output, begin, body.weights, body.skips,
                                         stream);
    return launch_padded(filter, input, output, begin, body, stream);
}

template <class Sum, class Weights, int ROWS, int COLUMNS>
static Status launch_patches(const Filter &filter, const View &input, const View &output,
                             const Weights &weights, const Stream *stream)
{
    using Body = LargeFilter<Sum, Weights, ROWS, COLUMNS>;
    Body body = {};
    body.in = images_of<Sum>(filter, input);
    body.out = results_of<Sum>(filter, output);
    body.top = filter.top;
    body.left = filter.left;
    body.rows = (int)filter.rows;
    body.columns = (int)filter.columns;
    body.weights = weights;
    /* Rows of the weights too long for a band of one row are taken in parts, one after the other,
     * so that the order of the terms stays the same. */
    const int chunk = body.columns < Body::MOST_COLUMNS ? body.columns : Body::MOST_COLUMNS;
    const int last = (body.columns - 1) % chunk + 1;
    const int skip = (int)(-filter.left & (WORD<Sum> - 1));
    const int others = skip + Body::TILE_COLUMNS - 1 + WORD<Sum> - 1;
    const int words = (others + chunk) / WORD<Sum>, last_words = (others + last) / WORD<Sum>;
    const int pitch = Body::pitch_of(words) + Body::SKEW;
    const int factors = (chunk + WORD<Sum> - 1) / WORD<Sum> * WORD<Sum>;
    const int room = Body::CAPACITY - Body::OTHER_ROWS * pitch - (ROWS - 1) * factors;
    body.chunk_columns = chunk;
    const int band = room / (pitch + factors);
    const int most = Positions::MOST - Body::OTHER_ROWS - pitch;
    body.band_rows = chunk < body.columns ? 1 : band < most ? band : most;
    body.words = divider_of((uint32_t)words);
    body.last_words = divider_of((uint32_t)last_words);
    return launch_tiles(body, filter, Body::TILE_ROWS, Body::TILE_COLUMNS, Body::THREADS, stream);
}

template <class Sum, class Weights>
static Status launch_large(const Filter &filter, const View &input, const View &output,
                           const Weights &weights, const Stream *stream)
{
    constexpr int ROWS = 4, COLUMNS = 4 * WORD<Sum>;
    using Body = LargeFilter<Sum, Weights, ROWS, COLUMNS>;
    if (filter.columns > Body::MOST_COLUMNS ||
        count_tiles(filter, Body::TILE_ROWS, Body::TILE_COLUMNS) < FEW_TILES)
        return launch_patches<Sum, Weights, ROWS / 2, COLUMNS / 2>(filter, input, output, weights,
                                                                   stream);
    return launch_patches<Sum, Weights, ROWS, COLUMNS>(filter, input, output, weights, stream);
}

template <class Sum>
static Status place_weights(const Filter &filter, const double *weights, Sum *target,
                            const Stream *stream)
{
    PlaceWeights<Sum> body = {};
    const int64_t count = filter.rows * filter.columns;
    for (int64_t at = 0; at < count; at += body.MOST) {
        body.target = target + at;
        body.count = count - at < body.MOST ? (int)(count - at) : body.MOST;
        for (int i = 0; i < body.count; i++) body.items[i] = static_cast<Sum>(weights[at + i]);
        const Status status = launch(body, Grid{1, (unsigned)body.MAX_THREADS}, stream->handle);
        if (status != STATUS_OK) return status;
    }
    return STATUS_OK;
}

template <class Sum>
static Status read_weights_there(const Filter &filter, const View &weights, Sum *target,
                                 const Stream *stream)
{
    ReadWeights<Sum> body = {};
    body.target = target;
    body.given = given_weights<Sum>(filter, weights);
    const int64_t blocks = (filter.rows * filter.columns + body.MAX_THREADS - 1) / body.MAX_THREADS;
    const Grid grid = {(unsigned)(blocks < 1024 ? blocks : 1024), (unsigned)body.MAX_THREADS};
    return launch(body, grid, stream->handle);
}

/* weights is NULL where the given ones are on the device. */
template <class Sum>
static Status launch_in_memory(const Filter &filter, const View &input, const View &output,
                               const View &given, const double *weights, Stream *stream)
{
    Memory *memory = NULL;
    Status status =
        memory_allocate(stream, filter.rows * filter.columns * (int64_t)sizeof(Sum), &memory);
    if (status != STATUS_OK) return status;
    Sum *target = reinterpret_cast<Sum *>(memory_data(memory));
    status = weights != NULL ? place_weights(filter, weights, target, stream)
                             : read_weights_there(filter, given, target, stream);
    if (status == STATUS_OK)
        status = launch_large<Sum>(filter, input, output, ManyInMemory<Sum>{target}, stream);
    memory_release(memory);
    return status;
}

static Status launch_by_value(const Filter &filter, const View &input, const View &output,
                              const double *weights, const Stream *stream)
{
    ManyByValue many = {};
    for (int64_t at = 0; at < filter.rows * filter.columns; at++)
        many.items[at] = static_cast<float>(weights[at]);
    return launch_large<float>(filter, input, output, many, stream);
}

/* Whether the factors fit: too few rows in a tile would be more work than without them. */
static Status launch_separable(const Filter &filter, const View &input, const View &output,
                               const Factors &factors, const Stream *stream, bool *fits)
{
    using Body = SeparableFilter;
    /* The columns of the weights as whole words, with zeros on the left so that the pixels that
     * they meet are whole words too. */
    const int begin = (int)(-filter.left & (WORD<float> - 1));
    const int columns = (begin + (int)filter.columns + 3) / 4 * 4;
    const int needed = Body::TILE_COLUMNS + columns;
    const int pitch = (needed - 4 + 31) / 32 * 32 + 4, words = needed / 4;
    int tile_rows = (Body::CAPACITY / pitch - (int)filter.rows + 1) / Body::ROWS * Body::ROWS;
    const int most = Body::THREADS / words * Body::ROWS;
    if (tile_rows > most) tile_rows = most;
    if (tile_rows > Body::WARPS * Body::ROWS) tile_rows = Body::WARPS * Body::ROWS;
    *fits = columns <= MOST_ALONG_AXIS && tile_rows >= 2 * Body::ROWS;
    if (!*fits) return STATUS_OK;

    Body body = {};
    body.in = images_of<float>(filter, input);
    body.out = results_of<float>(filter, output);
    body.words = divider_of((uint32_t)words);
    body.top = filter.top;
    body.left = filter.left + begin;
    body.rows = (int)filter.rows;
    body.columns = columns;
    body.tile_rows = tile_rows;
    body.pitch = pitch;
    /* No sum of the first pass is larger than the pixels, lest it overflows before the second
     * weights it. A power of two leaves all digits as they are. */
    float total = 0;
    for (int i = 0; i < body.rows; i++) total += fabsf(factors.down[i]);
    const int exponent = -ilogbf(total) - 1;
    for (int i = 0; i < body.rows; i++) body.factors.down[i] = ldexpf(factors.down[i], exponent);
    for (int j = 0; j < filter.columns; j++) {
        const float weight = ldexpf(factors.along[j], -exponent);
        *fits = *fits && is_finite(weight);
        body.factors.along[begin + j] = weight;
    }
    if (!*fits) return STATUS_OK;
    return launch_tiles(body, filter, tile_rows, Body::TILE_COLUMNS, Body::THREADS, stream);
}

/* In float64, larger weights take so long that nothing is gained by unrolling. */
template <class Sum>
constexpr int LARGEST_SMALL = sizeof(Sum) == sizeof(float) ? 9 : 7;

template <class Sum>
static Status launch_filter(const Filter &filter, const View &input, const View &output,
                            const View &given, const double *weights, Stream *stream)
{
    int64_t size = filter.rows > filter.columns ? filter.rows : filter.columns;
    constexpr int LARGEST = LARGEST_SMALL<Sum>;
    if (weights == NULL && !SMALL_TAKES_THEM<Sum>) size = LARGEST + 1;
    if (size <= 3) return launch_small<Sum, 3>(filter, input, output, given, weights, stream);
    if (size <= 5) return launch_small<Sum, 5>(filter, input, output, given, weights, stream);
    if (size <= 7) return launch_small<Sum, 7>(filter, input, output, given, weights, stream);
    if (size <= LARGEST)
        return launch_small<Sum, LARGEST>(filter, input, output, given, weights, stream);

    Factors factors = {};
    if (weights != NULL && find_factors(filter, weights, &factors)) {
        bool fits;
        const Status status = launch_separable(filter, input, output, factors, stream, &fits);
        if (fits || status != STATUS_OK) return status;
    }
    if (weights != NULL && sizeof(Sum) == sizeof(float) &&
        filter.rows * filter.columns <= MOST_BY_VALUE)
        return launch_by_value(filter, input, output, weights, stream);
    return launch_in_memory<Sum>(filter, input, output, given, weights, stream);
}

/* Kernels count the rows and columns of the weights in 32 bits. */
constexpr int64_t MOST_EXTENT = 1 << 30;

/* Copies of operands that the kernels cannot take as they are. */
Status correlate_on_device(Call *call, const Filter &filter, const double *weights)
{
    const View *input = &call->inputs[0], *given = &call->inputs[1], *output = &call->out;
    View packed_input, packed_weights, fresh_output;
    Memory *copies[3] = {};
    Status status = STATUS_OK;
    if (filter.rows > MOST_EXTENT || filter.columns > MOST_EXTENT)
        return fail(STATUS_VALUE_ERROR, "weights of %lld x %lld are more than a GPU can take",
                    (long long)filter.rows, (long long)filter.columns);
    if (!kernels_can_read(*input)) {
        status = pack_on_device(input, call->stream, &packed_input);
        if (status == STATUS_OK) copies[0] = packed_input.memory;
        input = &packed_input;
    }
    if (status == STATUS_OK && weights == NULL && !is_aligned(*given)) {
        status = pack_on_device(given, call->stream, &packed_weights);
        if (status == STATUS_OK) copies[1] = packed_weights.memory;
        given = &packed_weights;
    }
    if (status == STATUS_OK && !is_aligned(*output)) {
        status = new_view(output, call->stream, &fresh_output);
        if (status == STATUS_OK) copies[2] = fresh_output.memory;
        output = &fresh_output;
    }
    if (status == STATUS_OK)
        status =
            filter.in_float
                ? launch_filter<float>(filter, *input, *output, *given, weights, call->stream)
                : launch_filter<double>(filter, *input, *output, *given, weights, call->stream);
    if (status == STATUS_OK && copies[2] != NULL)
        status = copy_on_device(&call->out, output, call->stream);
    for (Memory *memory : copies)
        if (memory != NULL) memory_release(memory);
    return status;
}

#else

Status correlate_on_device(Call *, const Filter &, const double *)
{
    int count;
    return cuda_device_count(&count);
}

#endif
