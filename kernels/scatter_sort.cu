/* scatter_add, and scatter into large tables, on a GPU by way of sorting.
 *
 * Indices are sorted by place (radix.cuh), and those of one place stay in their order.
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

constexpr int THREADS = SCATTER_THREADS;

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

/* The unsigned number as which a number goes along. */
template <int BYTES>
struct PayloadOf : BitsOf<BYTES> {};
template <>
struct PayloadOf<8> {
    using Type = uint64_t;
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
    if (status == STATUS_OK) status = make_keys(scatter, rejected, sorting.keys, scratch->stream);
    if (status == STATUS_OK)
        status = sorting.sort(scatter.index_count, key_bits(scatter), given, scratch->stream);
    *keys = sorting.keys;
    *payload = sorting.payload;
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
