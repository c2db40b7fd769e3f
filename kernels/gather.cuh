/* gather, take and take_along_axis: out[...] = x[at(index)], a row of bytes at a time.
 *
 * One description serves all three. The output is a nest of loops; each loop moves a pointer into
 * out, and perhaps one into x and one into the indices:
 *
 *     gather along an axis     loops over x's outer dimensions    move out, x
 *                              loops over the indices             move out, indices
 *                              loops over x's inner dimensions    move out, x
 *     take_along_axis          loops over all dimensions          move out, x and indices
 *                              but the axis                       moves out, indices
 *
 * and the index itself moves x along the axis. Loops that lie next to each other in all three
 * arrays become one, and the contiguous tail becomes a row of bytes, so that gathering rows from a
 * C-ordered table ends up as one loop over rows, whatever its dtype and number of dimensions.
 *
 * Both backends walk this description: the CPU on the caller's memory as it lies, the GPU on packed
 * copies, part by part where they do not fit, or on page-locked memory as it lies. */
#ifndef GPUOPS_GATHER_CUH
#define GPUOPS_GATHER_CUH

#include <pthread.h>

#include "gather_way.h"
#include "index.cuh"
#include "transfer.cuh"

struct Loop {
    int64_t count;
    int64_t out, x, index; /* strides in bytes */
};

struct Gather {
    char *out;
    char *x;
    char *indices; /* C-contiguous */
    Dtype index_dtype;
    int64_t index_bytes;
    int64_t row_bytes;
    int ndim; /* at least 1 */
    Loop loops[GPUOPS_MAX_DIMS];
    int64_t axis_size;
    int axis_before; /* the loop before which the axis stands in x */
    int axis_ndim;   /* 0: it moves nothing; more than 1: a strided array that counts as flat */
    int64_t axis_counts[GPUOPS_MAX_DIMS];
    int64_t axis_strides[GPUOPS_MAX_DIMS];
    /* The places of the axis that are taken to the device, where axis_ndim is 1; no index means
     * another one. All of them unless somebody has looked. */
    int64_t first_place, end_place;
    bool is_in_place; /* the device reads x where it lies on the host, and finds it so far off: */
    int64_t to_device;
    Mode mode;
    const char *fill;
    int64_t fill_bytes; /* no row may be longer; the greatest number where there is no fill */
};

static inline int64_t gather_rows(const Gather &gather)
{
    int64_t rows = 1;
    for (int i = 0; i < gather.ndim; i++) rows *= gather.loops[i].count;
    return rows;
}

/* How far along the axis a place lies, in bytes. */
static inline int64_t axis_offset(const Gather &gather, int64_t place)
{
    if (gather.axis_ndim == 1) return place * gather.axis_strides[0];
    int64_t offset = 0;
    for (int i = gather.axis_ndim - 1; i >= 0; i--) {
        offset += place % gather.axis_counts[i] * gather.axis_strides[i];
        place /= gather.axis_counts[i];
    }
    return offset;
}

/* gather.cu */
void add_loop(Gather *gather, int64_t count, int64_t out, int64_t x, int64_t index);
void end_loops(Gather *gather);

/* gather_cpu.cu, and gather_cuda.cu for arrays on the host and for arrays on a device */
Status gather_on_cpu(const Call *call, const Gather &gather, int64_t index_count);
Status gather_on_cuda(const Call *call, const Gather &gather, int64_t index_count);
Status gather_between_device_arrays(const Call *call, const Gather &gather, int64_t index_count);

/* gather_cpu.cu: copies packed indices, unless they are the copy, and finds the places from the
 * first that is meant there to behind the last. If there is none, that is the first place. */
void copy_and_scan(Gather *gather, const char *indices, int64_t count, char *copy);

/* Rows that are made by several threads, a stretch of bytes at a time, of a packed result. The
 * first bad index of mode 'raise' is noted, and its row is the fill. */
struct MadeRows {
    const Gather *gather;
    bool prefetch; /* the table is too large for the caches; */
    bool streams;  /* so is the result, in memory of its own */
    pthread_mutex_t lock;
    const char *bad; /* the first index that is out of bounds, or NULL */
    char value[8];   /* what it was when it was read */
};
void open_rows(MadeRows *rows, const Gather *gather);
void make_rows(void *rows, int64_t begin, int64_t end, char *place);

#ifdef __CUDACC__

struct DeviceLoop {
    int64_t count, x, index;
};

/* What lies where in device memory. The output's rows follow one another in the order of the loops.
 * Only the places begin..end of the axis are there; rows from elsewhere are left as they are. A row
 * without a place becomes the fill, a row of bytes, or where that is NULL the pattern, repeated. */
struct DeviceGather {
    char *out;
    const char *x;
    const char *indices;
    const char *fill;
    alignas(16) char pattern[16];
    IndexReport report;
    int64_t rows, row_bytes;
    int64_t axis_size, axis_stride, axis_begin, axis_end;
    Mode mode;
    Dtype index_dtype;
    bool leaves_others; /* rows without a place, to another launch */
    /* Where x is a small table that is read over the bus, row after row, how much of it there is;
     * otherwise 0. It begins at a multiple of 16, and may be read up to the next one. */
    int64_t staged_bytes;
};
constexpr int64_t GATHER_STAGED_BYTES = 16 << 10; /* which it is no more than */

struct Scratch;

/* gather_rows.cu: with x in device memory, or in memory of the host that the device reaches. With
 * scratch memory on the same stream, rows are read in the order in which they lie there. */
Status launch_gather_rows(DeviceGather gather, int ndim, DeviceLoop *loops, void *stream);
Status launch_gather_in_place(const DeviceGather &gather, int ndim, DeviceLoop *loops,
                              Scratch *scratch, void *stream);

/* gather_cuda.cu: what a launch is told that does not depend on where the table is. A row of the
 * fill may be made for it, for the caller to release. */
Status open_device_gather(const Call *call, const Gather &gather, int64_t index_count,
                          DeviceGather *device, Memory **fill_row);
void set_loops(const Gather &gather, DeviceGather *device, DeviceLoop *loops);

/* The boxes of host memory that a table consists of; how much of it goes up, as it lies where its
 * rows share memory; and the loops as they are on the device. */
Box table_box(const Gather &gather);
Box table_span(const Gather &gather);
bool rows_overlap(const Gather &gather);
int64_t axis_places(const Gather &gather);
int64_t packed_bytes(const Gather &gather);
int64_t table_bytes(const Gather &gather);
void describe_on_device(const Gather &gather, int64_t axis_count, bool as_it_lies, Gather *packed);

/* gather_host.cu: from a table on the host to a result on the device. */
Status gather_host_table(Call *call, const Gather &gather, int64_t index_count);
/* What is known of a call with such a table, which is held, before its way is chosen; and how far
 * off the device finds it, if it reaches it. */
void describe_case(Gather *gather, int device, int64_t index_count, int64_t room_bytes,
                   GatherCase *found);
/* The way. Where much would go up for few indices of the host, they are looked at first. That takes
 * a copy, to be freed by the caller, if there is none yet: gather goes by it from then on. */
Status choose_way(Gather *gather, int64_t index_count, GatherCase *found, GatherPlan *plan,
                  char **copy);

#endif

#endif
