/* Copies between host memory of any strides and packed memory, on the host or on a device.
 *
 * Only contiguous bytes cross the bus. A strided box is packed (or unpacked) on the host, in pieces
 * that stay in the cache between the two copies. */
#include "transfer.cuh"

#include <stdlib.h>
#include <string.h>

int64_t box_items(const Box &box)
{
    int64_t items = 1;
    for (int i = 0; i < box.ndim; i++) items *= box.counts[i];
    return items;
}

void box_append(Box *box, int64_t count, int64_t stride)
{
    if (count == 1) return;
    box->counts[box->ndim] = count;
    box->strides[box->ndim] = stride;
    box->ndim++;
}

/* The same bytes with as few dimensions as possible; a contiguous tail becomes part of the item. */
static Box box_merged(const Box &box)
{
    Box merged;
    merged.base = box.base;
    merged.item_bytes = box.item_bytes;
    merged.ndim = 0;
    for (int i = 0; i < box.ndim; i++) {
        int last = merged.ndim - 1;
        if (last >= 0 && merged.strides[last] == box.counts[i] * box.strides[i]) {
            merged.counts[last] *= box.counts[i];
            merged.strides[last] = box.strides[i];
        } else {
            box_append(&merged, box.counts[i], box.strides[i]);
        }
    }
    int last = merged.ndim - 1;
    if (last >= 0 && merged.strides[last] == merged.item_bytes) {
        merged.item_bytes *= merged.counts[last];
        merged.ndim--;
    }
    return merged;
}

template <int WIDTH>
static void copy_items_of(char *target, int64_t target_stride, const char *source,
                          int64_t source_stride, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(target + i * target_stride, source + i * source_stride, WIDTH);
}

void copy_items(char *target, int64_t target_stride, const char *source, int64_t source_stride,
                int64_t count, int64_t item_bytes)
{
    switch (item_bytes) {
    case 1:
        return copy_items_of<1>(target, target_stride, source, source_stride, count);
    case 2:
        return copy_items_of<2>(target, target_stride, source, source_stride, count);
    case 4:
        return copy_items_of<4>(target, target_stride, source, source_stride, count);
    case 8:
        return copy_items_of<8>(target, target_stride, source, source_stride, count);
    case 16:
        return copy_items_of<16>(target, target_stride, source, source_stride, count);
    default:
        for (int64_t i = 0; i < count; i++)
            memcpy(target + i * target_stride, source + i * source_stride, (size_t)item_bytes);
    }
}

static char *box_place(const Box &box, int64_t item)
{
    char *place = box.base;
    for (int i = box.ndim - 1; i >= 0; i--) {
        place += item % box.counts[i] * box.strides[i];
        item /= box.counts[i];
    }
    return place;
}

/* Goes through the items begin..end in stretches along the innermost dimension. */
template <bool PACK>
static void box_copy(const Box &box, int64_t begin, int64_t end, char *packed)
{
    int64_t row = box.ndim > 0 ? box.counts[box.ndim - 1] : 1;
    int64_t stride = box.ndim > 0 ? box.strides[box.ndim - 1] : 0;
    while (begin < end) {
        char *place = box_place(box, begin);
        int64_t count = row - begin % row;
        if (count > end - begin) count = end - begin;
        if (PACK)
            copy_items(packed, box.item_bytes, place, stride, count, box.item_bytes);
        else
            copy_items(place, stride, packed, box.item_bytes, count, box.item_bytes);
        packed += count * box.item_bytes;
        begin += count;
    }
}

struct BoxCopy {
    const Box *box;
    int64_t first;
    char *packed;
};

template <bool PACK>
static void box_copy_range(void *context, int64_t begin, int64_t end)
{
    const BoxCopy &copy = *static_cast<const BoxCopy *>(context);
    box_copy<PACK>(*copy.box, copy.first + begin, copy.first + end,
                   copy.packed + begin * copy.box->item_bytes);
}

template <bool PACK>
static void box_copy_parallel(const Box &box, int64_t begin, int64_t end, char *packed)
{
    BoxCopy copy = {&box, begin, packed};
    int64_t grain = (256 << 10) / box.item_bytes + 1;
    parallel_for(end - begin, grain, box_copy_range<PACK>, &copy);
}

void box_pack(const Box &box, char *packed)
{
    Box merged = box_merged(box);
    box_copy_parallel<true>(merged, 0, box_items(merged), packed);
}

#ifdef __CUDACC__

constexpr int64_t STAGING_BYTES = 4 << 20;
constexpr int64_t DIRECT_BYTES = 64 << 10; /* what goes to the driver without staging */

Status copy_to_device(void *device, const void *host, int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemcpyAsync(device, host, (size_t)bytes, cudaMemcpyHostToDevice,
                             static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

Status copy_to_host(void *host, const void *device, int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemcpyAsync(host, device, (size_t)bytes, cudaMemcpyDeviceToHost,
                             static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

Status copy_within_device(void *target, const void *source, int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemcpyAsync(target, source, (size_t)bytes, cudaMemcpyDeviceToDevice,
                             static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

Status copy_across_devices(void *target, int target_device, const void *source, int source_device,
                           int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemcpyPeerAsync(target, target_device, source, source_device, (size_t)bytes,
                                 static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

bool host_memory_is_pinned(const void *host)
{
    cudaPointerAttributes attributes;
    const cudaError_t code = cudaPointerGetAttributes(&attributes, host);
    cuda_ignore(code);
    return code != cudaSuccess || attributes.type != cudaMemoryTypeUnregistered;
}

Status clear_on_device(void *device, int byte, int64_t bytes, void *stream)
{
    CUDA_TRY(cudaMemsetAsync(device, byte, (size_t)bytes, static_cast<cudaStream_t>(stream)));
    return STATUS_OK;
}

template <bool UP>
static Status copy_stretch(char *host, char *device, int64_t bytes, void *stream)
{
    return UP ? copy_to_device(device, host, bytes, stream)
              : copy_to_host(host, device, bytes, stream);
}

template <bool UP>
static Status box_transfer(const Box &box, int64_t begin, int64_t end, char *device, void *stream)
{
    if (begin >= end) return STATUS_OK;
    Box merged = box_merged(box);
    int64_t ratio = merged.item_bytes / box.item_bytes;
    if (merged.ndim == 0)
        return copy_stretch<UP>(merged.base + begin * box.item_bytes, device,
                                (end - begin) * box.item_bytes, stream);
    if (begin % ratio != 0 || end % ratio != 0) {
        merged = box; /* the range begins or ends inside a merged item */
        ratio = 1;
    }
    begin /= ratio;
    end /= ratio;
    int64_t bytes = merged.item_bytes;

    int64_t piece = STAGING_BYTES / bytes;
    if (piece > end - begin) piece = end - begin;
    char *staging =
        bytes < DIRECT_BYTES ? static_cast<char *>(malloc((size_t)(piece * bytes))) : NULL;

    Status status = STATUS_OK;
    if (staging == NULL) {
        /* Long stretches need no staging; short ones do without it where there is no memory left,
         * for by now the caller's output may have been written to. */
        for (int64_t item = begin; item < end && status == STATUS_OK; item++, device += bytes)
            status = copy_stretch<UP>(box_place(merged, item), device, bytes, stream);
        return status;
    }
    for (int64_t item = begin; item < end && status == STATUS_OK; item += piece) {
        if (piece > end - item) piece = end - item;
        if (UP) box_copy_parallel<true>(merged, item, item + piece, staging);
        status = copy_stretch<UP>(staging, device, piece * bytes, stream);
        if (status == STATUS_OK) status = stream_drain(stream);
        if (!UP && status == STATUS_OK)
            box_copy_parallel<false>(merged, item, item + piece, staging);
        device += piece * bytes;
    }
    free(staging);
    return status;
}

Status box_upload(const Box &box, int64_t begin, int64_t end, void *device, void *stream)
{
    return box_transfer<true>(box, begin, end, static_cast<char *>(device), stream);
}

Status box_download(const Box &box, void *device, void *stream)
{
    return box_transfer<false>(box, 0, box_items(box), static_cast<char *>(device), stream);
}

#endif
