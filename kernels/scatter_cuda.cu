/* scatter and scatter_add between arrays on a GPU.
 *
 * A bad index leaves x as it was, and the caller does not wait to hear of one. So a first kernel
 * looks at all indices and sets a word of the call's own where one is bad, and the kernels that
 * write look at that word first. Where there is little to do, one block does all of it.
 *
 *     ScatterSmall   sorts the indices in the memory of one block, and then writes or adds
 *     ClaimPlaces    checks the indices; for scatter, it also finds the last of each place
 *     WriteRows      scatter: the rows of those
 *     AddRows        scatter_add: atomic additions, 16 bytes at once where there are as many
 *
 * The ways for many indices are in scatter_bins.cu and scatter_sort.cu. */
#include "scatter_device.cuh"
#include "transfer.cuh"

#include <string.h>

#ifdef __CUDACC__

constexpr int THREADS = SCATTER_THREADS;

void set_units(DeviceScatter *scatter, int64_t unit_bytes)
{
    constexpr int64_t LONG_ROW_UNITS = 1 << 30;
    const int64_t units = scatter->row_bytes / unit_bytes;
    scatter->units = scatter->rows * units;
    scatter->long_rows = units > LONG_ROW_UNITS;
    scatter->units_wide = wide_divider_of(static_cast<uint64_t>(units));
    scatter->units_narrow = divider_of(static_cast<uint32_t>(scatter->long_rows ? 1 : units));
}

Grid scatter_grid(int64_t units, int64_t units_per_block)
{
    return {static_cast<unsigned>((units + units_per_block - 1) / units_per_block), THREADS};
}

int64_t scatter_alignment(const DeviceScatter &scatter)
{
    uint64_t bits = reinterpret_cast<uintptr_t>(scatter.x) | (uint64_t)scatter.row_bytes |
                    (uint64_t)scatter.axis_stride | 16;
    if (!scatter.constant) bits |= reinterpret_cast<uintptr_t>(scatter.values);
    for (int i = 0; scatter.axis_ndim > 1 && i < scatter.axis_ndim; i++)
        bits |= (uint64_t)scatter.axis_strides[i];
    for (int i = 0; i < scatter.outer + scatter.index + scatter.inner; i++)
        bits |= (uint64_t)scatter.loops[i].x |
                (scatter.constant ? 0 : (uint64_t)scatter.loops[i].value);
    return static_cast<int64_t>(bits & -bits);
}

Status take_rejected(DeviceScatter *scatter, Scratch *scratch)
{
    if (scatter->mode != MODE_RAISE || scatter->rejected != NULL) return STATUS_OK;
    void *data;
    Status status = scratch_take(scratch, sizeof *scatter->rejected, &data);
    if (status == STATUS_OK)
        status = clear_on_device(data, 0, sizeof *scatter->rejected, scratch->stream->handle);
    if (status == STATUS_OK) scatter->rejected = static_cast<const unsigned *>(data);
    return status;
}

/* Which index is the last of its place. The number of an index, plus 1, stands in a slot: that of
 * its place, or where the table would be mostly empty, the first free one from where the place's
 * hash points. All numbers that a slot ever holds are of one place. */
struct Slots {
    void *slots; /* NULL: every row is written */
    int64_t mask;
    bool hashed;
    bool wide; /* 64-bit numbers */

    HOST_DEVICE static int64_t hash(int64_t place)
    {
        const uint64_t mixed = static_cast<uint64_t>(place) * 0x9e3779b97f4a7c15ull;
        return static_cast<int64_t>((mixed ^ mixed >> 32) >> 1);
    }

    HOST_DEVICE int64_t number_at(int64_t slot) const
    {
        return wide ? static_cast<int64_t>(static_cast<const uint64_t *>(slots)[slot])
                    : static_cast<const uint32_t *>(slots)[slot];
    }

    HOST_DEVICE void raise_to(int64_t slot, int64_t number) const
    {
        if (wide)
            atomic_max(static_cast<uint64_t *>(slots) + slot, static_cast<uint64_t>(number));
        else
            atomic_max(static_cast<uint32_t *>(slots) + slot, static_cast<uint32_t>(number));
    }

    /* What was in a slot, which is given the number if that was none. */
    HOST_DEVICE int64_t claim_slot(int64_t slot, int64_t number) const
    {
        return wide ? static_cast<int64_t>(atomic_claim(static_cast<uint64_t *>(slots) + slot,
                                                        static_cast<uint64_t>(number)))
                    : atomic_claim(static_cast<uint32_t *>(slots) + slot,
                                   static_cast<uint32_t>(number));
    }

    HOST_DEVICE void claim(const DeviceScatter &scatter, int64_t place, int64_t element) const
    {
        if (hashed)
            claim_hashed(scatter, place, element + 1);
        else
            raise_to(place, element + 1);
    }

    HOST_DEVICE RARE void claim_hashed(const DeviceScatter &scatter, int64_t place,
                                       int64_t number) const
    {
        for (int64_t at = hash(place) & mask;; at = (at + 1) & mask) {
            const int64_t before = claim_slot(at, number);
            if (before == 0) return;
            if (scatter.place_of_element(before - 1) == place) return raise_to(at, number);
        }
    }

    HOST_DEVICE bool is_last(const DeviceScatter &scatter, int64_t place, int64_t element) const
    {
        if (slots == NULL) return true;
        return hashed ? is_last_hashed(scatter, place, element + 1)
                      : number_at(place) == element + 1;
    }

    /* Without slots, all that is written to a place is the same. */
    template <class Vector>
    HOST_DEVICE void store(Vector *address, Vector vector) const
    {
        if (slots == NULL)
            store_same(address, vector);
        else
            *address = vector;
    }

    HOST_DEVICE RARE bool is_last_hashed(const DeviceScatter &scatter, int64_t place,
                                         int64_t number) const
    {
        for (int64_t at = hash(place) & mask;; at = (at + 1) & mask) {
            const int64_t here = number_at(at);
            if (here == number) return true;
            if (here == 0 || scatter.place_of_element(here - 1) == place) return false;
        }
    }
};

struct ClaimPlaces {
    static constexpr int MAX_THREADS = THREADS, ITEMS = 4;

    DeviceScatter scatter;
    Slots slots;
    unsigned *rejected;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t step = (int64_t)thread.threads * ITEMS;
        for (int64_t first = thread.block * step + thread.thread; first < scatter.index_count;
             first += thread.blocks * step) {
            int64_t elements[ITEMS], values[ITEMS];
            UNROLL
            for (int k = 0; k < ITEMS; k++) {
                const int64_t element = first + k * (int64_t)thread.threads;
                elements[k] = element < scatter.index_count ? element : first;
            }
            load_indices<ITEMS>(scatter.indices, scatter.index_dtype, elements, values);
            UNROLL
            for (int k = 0; k < ITEMS; k++) {
                if (k > 0 && elements[k] == first) continue;
                const int64_t place = scatter.place_of(values[k]);
                if (place >= 0) {
                    if (slots.slots != NULL) slots.claim(scatter, place, elements[k]);
                } else if (scatter.mode == MODE_RAISE) {
                    store_same(rejected, 1u);
                    scatter.note(elements[k], values[k]);
                }
            }
        }
    }
};

template <class Vector>
struct WriteRows {
    static constexpr int MAX_THREADS = THREADS;
    static constexpr int ITEMS = sizeof(Vector) == 16 ? 2 : 4;

    DeviceScatter scatter;
    Slots slots;

    HOST_DEVICE void operator()(Thread thread) const
    {
        if (scatter.is_rejected()) return;
        const int64_t unit = thread.block * (int64_t)(ITEMS * THREADS);
        const DeviceScatter::Start start = scatter.start_at(unit);
        const int64_t left = scatter.units - unit;
        int64_t x[ITEMS], value[ITEMS], element[ITEMS], column[ITEMS], place[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            uint32_t offset = k * THREADS + thread.thread;
            if (offset >= left) offset = 0;
            int64_t row;
            scatter.find(start, offset, &row, &column[k]);
            scatter.locate(row, &x[k], &value[k], &element[k]);
        }
        load_indices<ITEMS>(scatter.indices, scatter.index_dtype, element, place);
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            place[k] = scatter.place_of(place[k]);
            if (k * THREADS + thread.thread >= left) place[k] = -1;
            if (place[k] >= 0 && !slots.is_last(scatter, place[k], element[k])) place[k] = -1;
        }
        Vector loaded[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++)
            if (place[k] >= 0)
                loaded[k] = scatter.template load_value<Vector>(
                    value[k] + scatter.value_of(element[k]), column[k]);
        UNROLL
        for (int k = 0; k < ITEMS; k++)
            if (place[k] >= 0)
                slots.store(
                    reinterpret_cast<Vector *>(scatter.x + x[k] + scatter.axis_offset(place[k])) +
                        column[k],
                    loaded[k]);
    }
};

template <class T, int COUNT>
struct AddRows {
    static constexpr int MAX_THREADS = THREADS;
    static constexpr int ITEMS = sizeof(T) * COUNT == 16 ? 2 : 4;

    DeviceScatter scatter;

    HOST_DEVICE void operator()(Thread thread) const
    {
        if (scatter.is_rejected()) return;
        const int64_t unit = thread.block * (int64_t)(ITEMS * THREADS);
        const DeviceScatter::Start start = scatter.start_at(unit);
        const int64_t left = scatter.units - unit;
        int64_t x[ITEMS], value[ITEMS], element[ITEMS], column[ITEMS], place[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            uint32_t offset = k * THREADS + thread.thread;
            if (offset >= left) offset = 0;
            int64_t row;
            scatter.find(start, offset, &row, &column[k]);
            scatter.locate(row, &x[k], &value[k], &element[k]);
        }
        load_indices<ITEMS>(scatter.indices, scatter.index_dtype, element, place);
        Numbers<T, COUNT> loaded[ITEMS];
        UNROLL
        for (int k = 0; k < ITEMS; k++)
            loaded[k] =
                load_numbers<T, COUNT>(scatter, value[k] + scatter.value_of(element[k]), column[k]);
        UNROLL
        for (int k = 0; k < ITEMS; k++) {
            const int64_t at = scatter.place_of(place[k]);
            if (at < 0 || k * THREADS + thread.thread >= left) continue;
            char *row = scatter.x + x[k] + scatter.axis_offset(at);
            add_numbers(reinterpret_cast<T *>(row) + column[k] * COUNT, loaded[k]);
        }
    }
};

/* One block, for few indices: it sorts them by place, those of one place in their own order, with
 * the number of an index in the lowest bits of its key. */
constexpr int FEW_INDICES = 1024, NUMBER_BITS = 10;

struct SmallShared {
    uint64_t keys[FEW_INDICES];
    unsigned rejected;
};

/* What a run of indices with one place does to a unit of x. */
template <class Vector>
struct WriteUnit {
    using Unit = Vector;

    /* Of those that were sorted at begin..end, the last is written. */
    template <class NumberAt>
    HOST_DEVICE static void run(const DeviceScatter &scatter, Unit *x, int64_t value,
                                int64_t column, int, int end, const NumberAt &number_at)
    {
        *x = scatter.load_value<Unit>(value + scatter.value_of(number_at(end - 1)), column);
    }
};

template <class T>
struct AddUnit {
    using Unit = T;

    template <class NumberAt>
    HOST_DEVICE static void run(const DeviceScatter &scatter, T *x, int64_t value, int64_t column,
                                int begin, int end, const NumberAt &number_at)
    {
        constexpr int BATCH = 8;
        Sums<T, 1> sums(Numbers<T, 1>{{*x}});
        for (int i = begin; i < end; i += BATCH)
            sums.template add<BATCH>(scatter, value, column, i, end - i, number_at);
        *x = sums.rounded().items[0];
    }
};

template <class Action>
struct ScatterSmall {
    static constexpr int MAX_THREADS = THREADS;
    using Shared = SmallShared;
    using Unit = typename Action::Unit;

    DeviceScatter scatter;
    unsigned padded; /* the number of keys, a power of two */

    HOST_DEVICE void operator()(Thread thread, Shared *shared) const
    {
        if (thread.thread == 0) shared->rejected = 0;
        thread.sync();
        const unsigned count = static_cast<unsigned>(scatter.index_count);
        for (unsigned i = thread.thread; i < padded; i += thread.threads) {
            int64_t value = 0, element = i, place = -1;
            if (i < count) {
                load_indices<1>(scatter.indices, scatter.index_dtype, &element, &value);
                place = scatter.place_of(value);
                if (place < 0 && scatter.mode == MODE_RAISE) {
                    store_same(&shared->rejected, 1u);
                    scatter.note(element, value);
                }
            }
            shared->keys[i] = place < 0 ? ~0ull : static_cast<uint64_t>(place) << NUMBER_BITS | i;
        }
        thread.sync();
        if (shared->rejected) return;
        sort(thread, shared->keys);

        const auto number_at = [shared](int i) {
            return static_cast<int64_t>(shared->keys[i] & (FEW_INDICES - 1));
        };
        for (int64_t unit = thread.thread; unit < scatter.units; unit += thread.threads) {
            const DeviceScatter::Start at = scatter.start_at(unit);
            int64_t x, value, sorted;
            scatter.locate(at.row, &x, &value, &sorted);
            const int begin = static_cast<int>(sorted);
            const uint64_t place = shared->keys[begin] >> NUMBER_BITS;
            if (shared->keys[begin] == ~0ull) continue;
            if (begin > 0 && shared->keys[begin - 1] >> NUMBER_BITS == place) continue;
            int end = begin + 1;
            while (end < static_cast<int>(count) && shared->keys[end] >> NUMBER_BITS == place)
                end++;
            Unit *row = reinterpret_cast<Unit *>(scatter.x + x +
                                                 scatter.axis_offset(static_cast<int64_t>(place)));
            Action::run(scatter, row + at.column, value, at.column, begin, end, number_at);
        }
    }

    /* Batcher's bitonic sort. */
    HOST_DEVICE void sort(Thread thread, uint64_t *keys) const
    {
        for (unsigned size = 2; size <= padded; size *= 2) {
            for (unsigned step = size / 2; step > 0; step /= 2) {
                for (unsigned i = thread.thread; i < padded / 2; i += thread.threads) {
                    const unsigned low = i / step * 2 * step + i % step, high = low + step;
                    const uint64_t first = keys[low], second = keys[high];
                    if ((first > second) == ((low & size) == 0)) {
                        keys[low] = second;
                        keys[high] = first;
                    }
                }
                thread.sync();
            }
        }
    }
};

/* The routes. */

static DeviceScatter on_device(const Scatter &scatter)
{
    DeviceScatter device = {};
    device.x = scatter.x;
    device.values = scatter.values;
    device.indices = scatter.indices;
    device.constant = scatter.constant;
    for (int64_t at = 0; scatter.constant && at < 16; at += scatter.item_bytes)
        memcpy(device.pattern + at, scatter.values, (size_t)scatter.item_bytes);
    device.one_loop = scatter.outer == 0 && scatter.inner == 0;
    device.rows = scatter_rows(scatter);
    device.few_rows = device.rows <= UINT32_MAX;
    device.index_dtype = scatter.index_dtype;
    device.mode = scatter.mode;
    device.row_bytes = scatter.row_bytes;
    device.index_count = scatter.index_count;
    const auto divider = [&](int64_t count) { /* where there are rows, no count is 0 */
                                              return divider_of(device.few_rows && count > 0
                                                                    ? static_cast<uint32_t>(count)
                                                                    : 1);
    };
    device.index_divider = divider(scatter.index_count);
    device.axis_size = scatter.axis_size;
    device.axis_ndim = scatter.axis_ndim;
    device.axis_stride = scatter.axis_ndim == 1 ? scatter.axis_strides[0] : 0;
    for (int i = 0; i < scatter.axis_ndim; i++) {
        device.axis_counts[i] = scatter.axis_counts[i];
        device.axis_strides[i] = scatter.axis_strides[i];
    }
    device.outer = scatter.outer;
    device.index = scatter.index;
    device.inner = scatter.inner;
    for (int i = 0; i < scatter_ndim(scatter); i++) {
        const ScatterLoop &loop = scatter.loops[i];
        device.loops[i] = {loop.count, loop.x, loop.value, divider(loop.count)};
    }
    return device;
}

template <class Action>
static Status launch_small(DeviceScatter scatter, Stream *stream)
{
    set_units(&scatter, sizeof(typename Action::Unit));
    ScatterSmall<Action> body = {};
    body.scatter = scatter;
    body.padded = 1;
    while (body.padded < scatter.index_count) body.padded *= 2;
    unsigned threads = 32;
    while (threads < THREADS && (threads < body.padded / 2 || threads < scatter.units))
        threads *= 2;
    return launch_with_shared(body, Grid{1, threads}, stream->handle);
}

static Status run_small(const DeviceScatter &device, const Scatter &scatter, int64_t alignment,
                        Stream *stream)
{
    if (!scatter.adds) {
        switch (alignment) {
        case 1:
            return launch_small<WriteUnit<uint8_t>>(device, stream);
        case 2:
            return launch_small<WriteUnit<uint16_t>>(device, stream);
        case 4:
            return launch_small<WriteUnit<uint32_t>>(device, stream);
        case 8:
            return launch_small<WriteUnit<uint2>>(device, stream);
        default:
            return launch_small<WriteUnit<uint4>>(device, stream);
        }
    }
    switch (scatter.dtype) {
    case DTYPE_FLOAT16:
        return launch_small<AddUnit<Half>>(device, stream);
    case DTYPE_BFLOAT16:
        return launch_small<AddUnit<BFloat16>>(device, stream);
    case DTYPE_FLOAT32:
        return launch_small<AddUnit<float>>(device, stream);
    case DTYPE_FLOAT64:
        return launch_small<AddUnit<double>>(device, stream);
    default:
        break;
    }
    switch (dtype_bytes(scatter.dtype)) {
    case 1:
        return launch_small<AddUnit<uint8_t>>(device, stream);
    case 2:
        return launch_small<AddUnit<uint16_t>>(device, stream);
    case 4:
        return launch_small<AddUnit<uint32_t>>(device, stream);
    default:
        return launch_small<AddUnit<uint64_t>>(device, stream);
    }
}

static Status launch_claims(const DeviceScatter &scatter, const Slots &slots, unsigned *rejected,
                            Stream *stream)
{
    constexpr int64_t MOST_BLOCKS = 1 << 16;
    ClaimPlaces body = {};
    body.scatter = scatter;
    body.slots = slots;
    body.rejected = rejected;
    Grid grid = scatter_grid(scatter.index_count < MOST_BLOCKS * body.ITEMS * THREADS
                                 ? scatter.index_count
                                 : MOST_BLOCKS * body.ITEMS * THREADS,
                             body.ITEMS * THREADS);
    return launch(body, grid, stream->handle);
}

template <class Vector>
static Status launch_writes(DeviceScatter scatter, const Slots &slots, Stream *stream)
{
    set_units(&scatter, sizeof(Vector));
    WriteRows<Vector> body = {};
    body.scatter = scatter;
    body.slots = slots;
    return launch(body, scatter_grid(scatter.units, body.ITEMS * THREADS), stream->handle);
}

/* A word that says whether the call is rejected, and slots for as many numbers of indices as it
 * takes to find the last of each place; all clear. */
static Status run_writes(DeviceScatter scatter, int64_t alignment, Scratch *scratch)
{
    Stream *stream = scratch->stream;
    bool done = false;
    if (scatter.rows > 0 && scatter.row_bytes > 0) {
        Status status = write_by_tables(scatter, alignment, scratch, &done);
        if (status == STATUS_OK && !done)
            status = write_in_order(scatter, alignment, scratch, &done);
        if (status != STATUS_OK || done) return status;
    }
    constexpr int64_t HEAD_BYTES = 16;
    Slots slots = {};
    slots.wide = scatter.index_count >= UINT32_MAX;
    int64_t slot_count = 0;
    if (!scatter.constant && scatter.index_count > 1) {
        slots.hashed = scatter.axis_size > 8 * scatter.index_count;
        slot_count = scatter.axis_size;
        if (slots.hashed)
            for (slot_count = 1; slot_count < 2 * scatter.index_count;) slot_count *= 2;
        slots.mask = slot_count - 1;
    }
    unsigned *rejected = NULL;
    if (slot_count > 0 || scatter.mode == MODE_RAISE) {
        const int64_t bytes = HEAD_BYTES + slot_count * (slots.wide ? 8 : 4);
        void *data;
        Status status = scratch_take(scratch, bytes, &data);
        if (status == STATUS_OK) status = clear_on_device(data, 0, bytes, stream->handle);
        if (status != STATUS_OK) return status;
        rejected = static_cast<unsigned *>(data);
        if (slot_count > 0) slots.slots = static_cast<char *>(data) + HEAD_BYTES;
        status = launch_claims(scatter, slots, rejected, stream);
        if (status != STATUS_OK) return status;
    }
    if (scatter.rows == 0 || scatter.row_bytes == 0) return STATUS_OK;
    scatter.rejected = scatter.mode == MODE_RAISE ? rejected : NULL;
    switch (alignment) {
    case 1:
        return launch_writes<uint8_t>(scatter, slots, stream);
    case 2:
        return launch_writes<uint16_t>(scatter, slots, stream);
    case 4:
        return launch_writes<uint32_t>(scatter, slots, stream);
    case 8:
        return launch_writes<uint2>(scatter, slots, stream);
    default:
        return launch_writes<uint4>(scatter, slots, stream);
    }
}

template <class T, int COUNT>
static Status launch_adds(DeviceScatter scatter, Stream *stream)
{
    set_units(&scatter, sizeof(T) * COUNT);
    AddRows<T, COUNT> body = {};
    body.scatter = scatter;
    return launch(body, scatter_grid(scatter.units, body.ITEMS * THREADS), stream->handle);
}

static Status launch_atomic_adds(const DeviceScatter &scatter, Dtype dtype, int64_t alignment,
                                 Stream *stream)
{
    if (dtype == DTYPE_FLOAT32)
        return alignment == 16  ? launch_adds<float, 4>(scatter, stream)
               : alignment == 8 ? launch_adds<float, 2>(scatter, stream)
                                : launch_adds<float, 1>(scatter, stream);
    if (dtype == DTYPE_FLOAT64)
        return alignment == 16 ? launch_adds<double, 2>(scatter, stream)
                               : launch_adds<double, 1>(scatter, stream);
    if (dtype_bytes(dtype) == 4)
        return alignment == 16 ? launch_adds<uint32_t, 4>(scatter, stream)
                               : launch_adds<uint32_t, 1>(scatter, stream);
    return alignment == 16 ? launch_adds<uint64_t, 2>(scatter, stream)
                           : launch_adds<uint64_t, 1>(scatter, stream);
}

/* A number that the device cannot add to atomically, or not without rounding, or a sum whose order
 * matters to the caller. */
static bool needs_order(const Call *call, const Scatter &scatter)
{
    return dtype_bytes(scatter.dtype) < 4 ||
           (call->deterministic && !dtype_is_integer(scatter.dtype));
}

static Status run_adds(const Call *call, DeviceScatter device, const Scatter &scatter,
                       int64_t alignment, Scratch *scratch)
{
    Stream *stream = scratch->stream;
    Status status = take_rejected(&device, scratch);
    unsigned *rejected = const_cast<unsigned *>(device.rejected);
    const bool adds = device.rows > 0 && device.row_bytes > 0;
    bool done = false;
    if (status == STATUS_OK && adds && !(call->deterministic && dtype_is_float(scatter.dtype)))
        status = add_in_tables(device, scatter.dtype, scratch, &done);
    if (status != STATUS_OK || done) return status;
    if (adds && needs_order(call, scatter))
        return add_in_order(device, scatter.dtype, rejected, scratch);
    if (adds) status = add_in_windows(device, scatter.dtype, scratch, &done);
    if (status != STATUS_OK || done) return status;
    if (rejected != NULL) status = launch_claims(device, Slots{}, rejected, stream);
    if (status != STATUS_OK || !adds) return status;
    return launch_atomic_adds(device, scatter.dtype, alignment, stream);
}

/* What one block does about as fast as it is launched. */
static bool is_small(const DeviceScatter &device, int64_t unit_bytes)
{
    constexpr int64_t MOST_UNITS = 4096;
    return device.index_count <= FEW_INDICES && device.rows > 0 && device.row_bytes > 0 &&
           device.rows <= MOST_UNITS && device.row_bytes / unit_bytes <= MOST_UNITS &&
           device.rows * (device.row_bytes / unit_bytes) <= MOST_UNITS;
}

Status scatter_on_device(const Call *call, const Scatter &scatter)
{
    if (scatter.index_count == 0) return STATUS_OK;
    DeviceScatter device = on_device(scatter);
    if (scatter.mode == MODE_RAISE) {
        Status status = open_report(call, scatter.axis_size, &device.report);
        if (status != STATUS_OK) return status;
    } else if (device.rows == 0 || device.row_bytes == 0) {
        return STATUS_OK;
    }
    const int64_t alignment = scatter_alignment(device);
    const int64_t unit_bytes = scatter.adds ? dtype_bytes(scatter.dtype) : alignment;
    /* Values may be broadcast, and so be more than any memory holds. */
    constexpr int64_t MOST_UNITS = (int64_t)INT32_MAX * THREADS;
    if (device.row_bytes > 0 && device.rows > MOST_UNITS / (device.row_bytes / unit_bytes))
        return fail(STATUS_VALUE_ERROR, "%lld rows of %lld bytes are more than one call can take",
                    (long long)device.rows, (long long)device.row_bytes);
    if (is_small(device, unit_bytes)) return run_small(device, scatter, alignment, call->stream);

    Scratch scratch = {};
    scratch.stream = call->stream;
    Status status = scatter.adds ? run_adds(call, device, scatter, alignment, &scratch)
                                 : run_writes(device, alignment, &scratch);
    scratch_give_back(&scratch);
    return status;
}

#else

Status scatter_on_device(const Call *, const Scatter &)
{
    int count;
    return cuda_device_count(&count);
}

#endif
