/* What the caller can get wrong about positions along an axis. */
#include "index.cuh"
#include "transfer.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* NumPy would take True and False for the positions 1 and 0, or the mask for what it is; which one
 * is meant, the caller has to say. */
Status check_not_mask(const View *indices, const char *advice)
{
    if (indices->dtype != DTYPE_BOOL) return STATUS_OK;
    return fail(STATUS_TYPE_ERROR, "indices has dtype bool: %s", advice);
}

Status check_axis(Call *call, int ndim)
{
    if (call->axis < -ndim || call->axis >= ndim) return fail_axis(call->axis, ndim);
    if (call->axis < 0) call->axis += ndim;
    return STATUS_OK;
}

Status index_error(const Call *call, Dtype index_dtype, int64_t axis_size, const void *index)
{
    char text[24];
    with_index_type(index_dtype, [&](auto zero) {
        memcpy(&zero, index, sizeof zero);
        if (static_cast<decltype(zero)>(-1) < 0)
            snprintf(text, sizeof text, "%lld", static_cast<long long>(zero));
        else
            snprintf(text, sizeof text, "%llu", static_cast<unsigned long long>(zero));
    });
    return fail(STATUS_INDEX_ERROR, "index %s is out of bounds for axis %d with size %lld", text,
                call->axis, static_cast<long long>(axis_size));
}

char *pack_indices(const View *indices, int64_t count)
{
    char *packed = static_cast<char *>(malloc((size_t)(count * indices->item_bytes)));
    if (packed == NULL) return NULL;
    box_pack(box_of(indices), packed);
    return packed;
}
