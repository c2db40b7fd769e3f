/* Where the elements of views lie. */
#include "gpuops.h"

#include <stdlib.h>
#include <string.h>

bool view_is_packed(const View *view)
{
    int64_t stride = view->item_bytes;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != stride) return false;
        /* Of what has no elements, sizes may be of any product. */
        (void)__builtin_mul_overflow(stride, view->shape[i], &stride);
    }
    return true;
}

void view_pack(View *view)
{
    int64_t stride = view->item_bytes;
    for (int i = view->ndim - 1; i >= 0; i--) {
        view->strides[i] = stride;
        stride *= view->shape[i];
    }
}

int view_axes(const View *view, int *axes)
{
    int count = 0;
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 1) continue;
        const int64_t step = llabs(view->strides[i]);
        int at = count++;
        for (; at > 0 && llabs(view->strides[axes[at - 1]]) < step; at--) axes[at] = axes[at - 1];
        axes[at] = i;
    }
    return count;
}

/* Whether one axis lies within another in all views in which both have steps; -1: in none has. */
static int is_within(const View *views, int count, int ndim, int one, int other)
{
    int within = -1;
    for (int k = 0; k < count; k++) {
        const View *view = &views[k];
        const int lacking = ndim - view->ndim;
        if (one < lacking || view->shape[one - lacking] == 1) continue;
        if (other < lacking || view->shape[other - lacking] == 1) continue;
        const int64_t step = llabs(view->strides[one - lacking]);
        const int64_t other_step = llabs(view->strides[other - lacking]);
        if (step == 0 || other_step == 0) continue;
        within = within != 0 && step < other_step;
    }
    return within;
}

/* From the outermost in memory to the innermost. */
static void axes_in_memory(const View *views, int count, int ndim, int *axes)
{
    for (int axis = ndim - 1; axis >= 0; axis--) {
        int place = axis;
        for (int i = axis + 1; i < ndim; i++) {
            const int within = is_within(views, count, ndim, axis, axes[i]);
            if (within == 0) break;
            if (within > 0) place = i;
        }
        for (int i = axis; i < place; i++) axes[i] = axes[i + 1];
        axes[place] = axis;
    }
}

void view_lay_out(View *view, const View *others, int count)
{
    int axes[GPUOPS_MAX_DIMS];
    int64_t stride = view->item_bytes;
    axes_in_memory(others, count, view->ndim, axes);
    for (int i = view->ndim - 1; i >= 0; i--) {
        view->strides[axes[i]] = stride;
        (void)__builtin_mul_overflow(stride, view->shape[axes[i]], &stride);
    }
}

void view_turn(View *view, int ndim, const int *axes, int count)
{
    View given;
    view_copy(&given, view);
    view->ndim = count;
    for (int i = 0; i < count; i++) {
        const int axis = axes[i] - (ndim - given.ndim);
        view->shape[i] = axis < 0 ? 1 : given.shape[axis];
        view->strides[i] = axis < 0 ? 0 : given.strides[axis];
    }
}

void view_extent(const View *view, uintptr_t *begin, uintptr_t *end)
{
    uintptr_t below = 0, above = (uintptr_t)view->item_bytes;
    *begin = *end = (uintptr_t)view->data;
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) return;
        const int64_t reach = (view->shape[i] - 1) * view->strides[i];
        below += (uintptr_t)(reach < 0 ? reach : 0);
        above += (uintptr_t)(reach < 0 ? 0 : reach);
    }
    *begin += below;
    *end += above;
}

bool views_overlap(const View *one, const View *other)
{
    uintptr_t one_begin, one_end, other_begin, other_end;
    if (one->device != other->device) return false;
    view_extent(one, &one_begin, &one_end);
    view_extent(other, &other_begin, &other_end);
    return one_begin < other_end && other_begin < one_end;
}

bool views_coincide(const View *one, const View *other)
{
    if (one->data != other->data || one->device != other->device || one->ndim != other->ndim ||
        one->item_bytes != other->item_bytes)
        return false;
    for (int i = 0; i < one->ndim; i++) {
        if (one->shape[i] != other->shape[i]) return false;
        if (one->shape[i] > 1 && one->strides[i] != other->strides[i]) return false;
    }
    return true;
}

int overlaps_itself(const View *view)
{
    /* From the smallest stride to the largest, each step must clear all that the smaller reach. */
    int axes[GPUOPS_MAX_DIMS];
    const int64_t items = view_items(view);
    if (items <= 1 || view->item_bytes == 0) return 0;
    const int count = view_axes(view, axes);
    if (view->strides[axes[count - 1]] == 0) return 1;
    int64_t reach = view->item_bytes;
    int outer = count;
    for (; outer > 0; outer--) {
        const int axis = axes[outer - 1];
        const int64_t step = llabs(view->strides[axis]);
        if (step < reach) break;
        reach += (view->shape[axis] - 1) * step;
    }
    if (outer == 0) return 0;

    /* Strides that interleave may still be free of overlap, so mark every byte. */
    uintptr_t begin, end;
    view_extent(view, &begin, &end);
    unsigned char *taken = calloc((end - begin + 7) / 8, 1);
    if (taken == NULL) return -1;
    int overlaps = 0;
    for (int64_t item = 0; item < items && !overlaps; item++) {
        uintptr_t at = (uintptr_t)view->data - begin;
        int64_t rest = item;
        for (int i = view->ndim - 1; i >= 0; i--) {
            at += (uintptr_t)(rest % view->shape[i] * view->strides[i]);
            rest /= view->shape[i];
        }
        for (int64_t byte = 0; byte < view->item_bytes; byte++, at++) {
            overlaps |= taken[at / 8] >> (at % 8) & 1;
            taken[at / 8] |= (unsigned char)(1 << at % 8);
        }
    }
    free(taken);
    return overlaps;
}
