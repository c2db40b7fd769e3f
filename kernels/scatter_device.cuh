/* What the kernels of scatter and scatter_add share. */
#ifndef GPUOPS_SCATTER_DEVICE_CUH
#define GPUOPS_SCATTER_DEVICE_CUH

#include "arithmetic.cuh"
#include "radix.cuh"
#include "scatter.cuh"

#ifdef __CUDACC__

/* For what is rare, and would otherwise stand in every kernel several times. */
#define RARE __noinline__

struct DeviceScatterLoop {
    int64_t count, x, value;
    Divider divider;
};

/* What lies where in device memory, and which row is where. A row's number counts in the order of
 * the loops; it is made of an outer position, the number of an index, and an inner position. */
struct DeviceScatter {
    char *x;
    const char *values;
    const char *indices;
    alignas(16) char pattern[16]; /* the one value, repeated, where constant is set */
    bool constant;
    bool one_loop;  /* the one over the indices */
    bool few_rows;  /* they count in 32 bits */
    bool long_rows; /* whose units do not count in 30 bits */
    Dtype index_dtype;
    Mode mode;
    int64_t rows, row_bytes, index_count;
    int64_t axis_size, axis_stride;
    int outer, index, inner;
    int axis_ndim; /* more than 1: an axis of several strides */
    Divider index_divider;
    /* Of the unit that a kernel counts in: how many a row has, and all rows. */
    int64_t units;
    WideDivider units_wide;
    Divider units_narrow;
    IndexReport report;
    const unsigned *rejected; /* set if an index is bad; NULL where none can be */
    int64_t axis_counts[GPUOPS_MAX_DIMS], axis_strides[GPUOPS_MAX_DIMS];
    DeviceScatterLoop loops[GPUOPS_MAX_DIMS];

    /* Where a block begins. What its threads count from there takes 32 bits. */
    struct Start {
        int64_t row, column;
    };

    HOST_DEVICE bool is_rejected() const { return rejected != NULL && *rejected != 0; }

    HOST_DEVICE Start start_at(int64_t unit) const
    {
        const int64_t row = static_cast<int64_t>(units_wide.divide(unit));
        return {row, unit - row * static_cast<int64_t>(units_wide.divisor)};
    }

    HOST_DEVICE void find(const Start &start, uint32_t offset, int64_t *row, int64_t *column) const
    {
        if (long_rows) {
            const uint64_t unit = start.column + offset;
            const uint64_t rows_on = units_wide.divide(unit);
            *row = start.row + static_cast<int64_t>(rows_on);
            *column = static_cast<int64_t>(unit - rows_on * units_wide.divisor);
        } else {
            const uint32_t unit = static_cast<uint32_t>(start.column) + offset;
            const uint32_t rows_on = units_narrow.divide(unit);
            *row = start.row + rows_on;
            *column = unit - rows_on * units_narrow.divisor;
        }
    }

    HOST_DEVICE int64_t position_in(const DeviceScatterLoop &loop, int64_t *number) const
    {
        const int64_t above =
            few_rows ? loop.divider.divide(static_cast<uint32_t>(*number)) : *number / loop.count;
        const int64_t position = *number - above * loop.count;
        *number = above;
        return position;
    }

    HOST_DEVICE int64_t take_element(int64_t *number) const
    {
        const int64_t above =
            few_rows ? index_divider.divide(static_cast<uint32_t>(*number)) : *number / index_count;
        const int64_t element = *number - above * index_count;
        *number = above;
        return element;
    }

    /* The number of a row's index, and its offsets without what that index adds to them. */
    HOST_DEVICE void locate(int64_t row, int64_t *x_offset, int64_t *value_offset,
                            int64_t *element) const
    {
        *x_offset = *value_offset = 0;
        *element = row;
        if (!one_loop) locate_in_loops(row, x_offset, value_offset, element);
    }

    HOST_DEVICE RARE void locate_in_loops(int64_t row, int64_t *x_offset, int64_t *value_offset,
                                          int64_t *element) const
    {
        for (int i = outer + index + inner - 1; i >= outer + index; i--)
            step_in(loops[i], &row, x_offset, value_offset);
        *element = take_element(&row);
        for (int i = outer - 1; i >= 0; i--) step_in(loops[i], &row, x_offset, value_offset);
    }

    HOST_DEVICE void step_in(const DeviceScatterLoop &loop, int64_t *number, int64_t *x_offset,
                             int64_t *value_offset) const
    {
        const int64_t position = position_in(loop, number);
        *x_offset += position * loop.x;
        *value_offset += position * loop.value;
    }

    HOST_DEVICE int64_t value_of(int64_t element) const
    {
        if (index == 1) return element * loops[outer].value;
        return index == 0 ? 0 : value_in_loops(element);
    }

    HOST_DEVICE RARE int64_t value_in_loops(int64_t element) const
    {
        int64_t offset = 0;
        for (int i = outer + index - 1; i >= outer; i--)
            offset += position_in(loops[i], &element) * loops[i].value;
        return offset;
    }

    HOST_DEVICE int64_t axis_offset(int64_t place) const
    {
        return axis_ndim <= 1 ? place * axis_stride : offset_on_axes(place);
    }

    HOST_DEVICE RARE int64_t offset_on_axes(int64_t place) const
    {
        int64_t offset = 0;
        for (int i = axis_ndim - 1; i >= 0; i--) {
            offset += place % axis_counts[i] * axis_strides[i];
            place /= axis_counts[i];
        }
        return offset;
    }

    /* The place that an index means, as load_indices read it; -1 where it means none. */
    HOST_DEVICE int64_t place_of(int64_t value) const
    {
        return static_cast<uint64_t>(value) < static_cast<uint64_t>(axis_size)
                   ? value
                   : place_of_other(value);
    }

    HOST_DEVICE RARE int64_t place_of_other(int64_t value) const
    {
        return place_of_loaded(value, index_dtype, axis_size, mode);
    }

    HOST_DEVICE RARE int64_t place_of_element(int64_t element) const
    {
        int64_t value;
        load_indices<1>(indices, index_dtype, &element, &value);
        return place_of(value);
    }

    /* A bad index is one without a place, in mode 'raise'. */
    HOST_DEVICE RARE void note(int64_t element, int64_t value) const
    {
        note_loaded(report, index_dtype, element, value);
    }

    /* The unit in a column of values. */
    template <class Unit>
    HOST_DEVICE Unit load_value(int64_t offset, int64_t column) const
    {
        if (constant)
            return *reinterpret_cast<const Unit *>(pattern +
                                                   column * sizeof(Unit) % sizeof pattern);
        return load_once(reinterpret_cast<const Unit *>(values + offset) + column);
    }
};

HOST_DEVICE inline void atomic_max(uint32_t *address, uint32_t value)
{
#ifdef __CUDA_ARCH__
    atomicMax(address, value);
#else
    atomically(address, [&](uint32_t before) { return before < value ? value : before; });
#endif
}

HOST_DEVICE inline void atomic_max(uint64_t *address, uint64_t value)
{
#ifdef __CUDA_ARCH__
    atomicMax(reinterpret_cast<unsigned long long *>(address), value);
#else
    atomically(address, [&](uint64_t before) { return before < value ? value : before; });
#endif
}

/* Returns what was there before 1 is added. */
HOST_DEVICE inline uint32_t atomic_next(uint32_t *address)
{
#ifdef __CUDA_ARCH__
    return atomicAdd(address, 1u);
#else
    return atomically(address, [](uint32_t before) { return before + 1; });
#endif
}

/* Returns what was there, and sets it if that was 0. */
HOST_DEVICE inline uint32_t atomic_claim(uint32_t *address, uint32_t value)
{
#ifdef __CUDA_ARCH__
    return atomicCAS(address, 0u, value);
#else
    return atomically(address, [&](uint32_t before) { return before == 0 ? value : before; });
#endif
}

HOST_DEVICE inline uint64_t atomic_claim(uint64_t *address, uint64_t value)
{
#ifdef __CUDA_ARCH__
    return atomicCAS(reinterpret_cast<unsigned long long *>(address), 0ull, value);
#else
    return atomically(address, [&](uint64_t before) { return before == 0 ? value : before; });
#endif
}

/* A vector of numbers that are added at once where the device can do that, on an address of its
 * own alignment. */
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) Numbers {
    T items[COUNT];
};

template <class T, int COUNT>
HOST_DEVICE inline void add_numbers(T *address, const Numbers<T, COUNT> &numbers)
{
    UNROLL
    for (int i = 0; i < COUNT; i++) atomic_add(address + i, numbers.items[i]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
HOST_DEVICE inline void add_numbers(float *address, const Numbers<float, 4> &numbers)
{
    const float *items = numbers.items;
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(items[0]),
                 "f"(items[1]), "f"(items[2]), "f"(items[3])
                 : "memory");
}

HOST_DEVICE inline void add_numbers(float *address, const Numbers<float, 2> &numbers)
{
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(numbers.items[0]),
                 "f"(numbers.items[1])
                 : "memory");
}
#endif

/* The unsigned number of so many bytes, as which others are loaded. */
template <int BYTES>
struct BitsOf;
template <>
struct BitsOf<1> {
    using Type = uint8_t;
};
template <>
struct BitsOf<2> {
    using Type = uint16_t;
};
template <>
struct BitsOf<4> {
    using Type = uint32_t;
};
template <>
struct BitsOf<8> {
    using Type = uint2;
};
template <>
struct BitsOf<16> {
    using Type = uint4;
};

/* Numbers of values, in a column that counts in as many numbers. */
template <class T, int COUNT>
HOST_DEVICE inline Numbers<T, COUNT> load_numbers(const DeviceScatter &scatter, int64_t offset,
                                                  int64_t column)
{
    using Unit = typename BitsOf<COUNT * sizeof(T)>::Type;
    return bits_as<Numbers<T, COUNT>>(scatter.load_value<Unit>(offset, column));
}

/* What is added to numbers of one place, in the order of the indices: of `some` of them at once, so
 * that the loads need not wait for each other. */
template <class T, int COUNT>
struct Sums {
    using Sum = typename Computes<T>::Type;
    Sum sums[COUNT];

    HOST_DEVICE explicit Sums(const Numbers<T, COUNT> &numbers)
    {
        UNROLL
        for (int i = 0; i < COUNT; i++) sums[i] = static_cast<Sum>(numbers.items[i]);
    }

    template <int BATCH, class NumberAt>
    HOST_DEVICE void add(const DeviceScatter &scatter, int64_t offset, int64_t column,
                         int64_t begin, int some, const NumberAt &number_at)
    {
        Numbers<T, COUNT> loaded[BATCH];
        UNROLL
        for (int k = 0; k < BATCH; k++)
            if (k < some)
                loaded[k] = load_numbers<T, COUNT>(
                    scatter, offset + scatter.value_of(number_at(begin + k)), column);
        UNROLL
        for (int k = 0; k < BATCH; k++) {
            if (k >= some) continue;
            UNROLL
            for (int i = 0; i < COUNT; i++)
                sums[i] = static_cast<Sum>(sums[i] + static_cast<Sum>(loaded[k].items[i]));
        }
    }

    HOST_DEVICE Numbers<T, COUNT> rounded() const
    {
        Numbers<T, COUNT> numbers;
        UNROLL
        for (int i = 0; i < COUNT; i++) numbers.items[i] = T(sums[i]);
        return numbers;
    }
};

constexpr int SCATTER_THREADS = 256;

/* Cuts rows into units of some bytes, for a kernel with blocks of so many units. */
void set_units(DeviceScatter *scatter, int64_t unit_bytes);
Grid scatter_grid(int64_t units, int64_t units_per_block);
/* The widest power of two, up to 16, that divides all addresses and lengths of rows. */
int64_t scatter_alignment(const DeviceScatter &scatter);

/* Gives the call a word that says whether it is rejected, if it has none and a bad index can be. */
Status take_rejected(DeviceScatter *scatter, Scratch *scratch);

/* scatter_sort.cu: sums in the order of the indices. */
Status add_in_order(DeviceScatter scatter, Dtype dtype, unsigned *rejected, Scratch *scratch);
/* The last of each place, if there are so many single elements that this pays. */
Status write_in_order(DeviceScatter scatter, int64_t alignment, Scratch *scratch, bool *done);
/* scatter_bins.cu: each sets *done where it has queued the work. Sums, or the last of each place,
 * in tables that fit the memory of a block; and sums in windows of a large table. */
Status add_in_tables(const DeviceScatter &scatter, Dtype dtype, Scratch *scratch, bool *done);
Status write_by_tables(const DeviceScatter &scatter, int64_t alignment, Scratch *scratch,
                       bool *done);
Status add_in_windows(const DeviceScatter &scatter, Dtype dtype, Scratch *scratch, bool *done);

#endif

#endif
