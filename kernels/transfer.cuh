/* Copies between host memory of any strides and packed memory, on the host or on a device. */
#ifndef GPUOPS_TRANSFER_CUH
#define GPUOPS_TRANSFER_CUH

#include "common.cuh"

/* Items of item_bytes at base + sum(position[i] * strides[i]), in C order. */
struct Box {
    char *base;
    int64_t item_bytes;
    int ndim;
    int64_t counts[GPUOPS_MAX_DIMS];
    int64_t strides[GPUOPS_MAX_DIMS];
};

int64_t box_items(const Box &box);
void box_append(Box *box, int64_t count, int64_t stride);
Box box_of(const View *view);
/* Whether there are many items, and those that follow one another lie in different lines of the
 * cache, which they share with such as come later. */
bool box_lies_across(const Box &box);

void box_pack(const Box &box, char *packed);
void box_unpack(const Box &box, char *packed);

/* count items from one place to another, both strided; source and target do not overlap. */
void copy_items(char *target, int64_t target_stride, const char *source, int64_t source_stride,
                int64_t count, int64_t item_bytes);

#ifdef __CUDACC__
Status copy_to_host(void *host, const void *device, int64_t bytes, void *stream);
Status copy_within_device(void *target, const void *source, int64_t bytes, void *stream);
Status copy_across_devices(void *target, int target_device, const void *source, int source_device,
                           int64_t bytes, void *stream);
/* What GPUOPS_PINNED_LIMIT says, in bytes. */
Status pinned_limit(int64_t *bytes);
/* Whether copies of this memory may be on their way when the driver returns. */
bool host_memory_is_pinned(const void *host);
Status clear_on_device(void *device, int byte, int64_t bytes, void *stream);

/* The items begin..end of a box to packed device memory, and all items of one back. Like
 * cudaMemcpyAsync, they may return before the copy is done, but not before memory of the host that
 * is not page-locked has been read, or written. What goes up otherwise than at once waits for what
 * is queued before it, unless the watch ends that (stream_await). */
Status box_upload(const Box &box, int64_t begin, int64_t end, void *device, Stream *stream,
                  Watch *watch);
Status box_download(const Box &box, void *device, void *stream);

/* The same for bytes that are made for it: make(context, begin, end, place) writes the bytes
 * begin..end of them to a place, and is called from several threads at once. */
typedef void (*MakeBytes)(void *context, int64_t begin, int64_t end, char *place);
Status made_upload(MakeBytes make, void *context, int64_t bytes, void *device, Stream *stream,
                   Watch *watch);

/* Copies of one caller in both directions at once. What comes down is begun, which only queues it,
 * and goes on while the caller sends other things up, begins more, or waits for the end. As long as
 * there is something to copy, the workers are kept from others. */
struct Traffic;
Status traffic_open(Traffic **traffic);
/* Where all that comes down goes: fresh memory is made ready ahead of it. */
void traffic_expect(Traffic *traffic, void *host, int64_t bytes);
Status traffic_up(Traffic *traffic, const Box &box, void *device, void *stream);
/* copy.cu: the same as box_upload, or as traffic_up, of all items, where there is traffic. A box
 * that lies across goes up as it lies, and is turned on the device: the CPU would go through it a
 * few bytes at a time, and does where there is no room for it twice, which is not looked for again.
 */
Status box_bring(const Box &box, int64_t begin, int64_t end, void *device, Stream *stream,
                 Traffic *traffic, bool *has_room, Watch *watch = NULL);
/* Two may be begun: the next one waits for the end of the first. */
Status traffic_begin_down(Traffic *traffic, const Box &box, void *device, void *stream);
/* Waits until all of what was begun last is queued. */
Status traffic_queue_down(Traffic *traffic);
/* Leaves the workers to others until there is something to copy again. */
void traffic_pause(Traffic *traffic);
/* Waits for the end of all that was begun. */
Status traffic_end_down(Traffic *traffic);
/* Given what the caller has failed with, if anything, of which it does not end what was begun. */
Status traffic_close(Traffic *traffic, Status status);
#endif

#endif
