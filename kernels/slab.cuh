/* Page-locked memory for the operands of small calls between arrays on the host, where kernels read
 * and write them over the bus, and for small copies to the host. */
#ifndef GPUOPS_SLAB_CUH
#define GPUOPS_SLAB_CUH

#include "common.cuh"

#ifdef __CUDACC__

struct Slab {
    char *data; /* where the host finds it, and the device too */
    int device;
    cudaEvent_t end; /* of what may still be at work on it; NULL if that is not known */
    Slab *next;
};

/* What an operand takes of a slab, so that the next one begins at a multiple of any word. */
static inline int64_t slab_room(int64_t bytes)
{
    constexpr int64_t ALIGNMENT = 256;
    return round_up(bytes, ALIGNMENT);
}

/* Whether one has so many bytes. */
bool slab_has_room(int64_t bytes);
/* One with so many bytes, on the device that is current; NULL where that is too much or nothing, or
 * there is none to be had. */
Status slab_take(int device, int64_t bytes, Slab **slab);
/* is_over: nothing is at work on it any more. If not, it is lent again when what is queued on the
 * stream by now is done. */
void slab_give(Slab *slab, const Stream *stream, bool is_over);

#endif

#endif
