"""gather without a bounds check, compiled at run time: beside it stands what our check costs.

It is the kernel for rows of kernels/gather_rows.cu, with all of its choices: 16-byte vectors or
single elements, as many to a thread, all indices of a thread first, then all vectors, then what it
stores, past the same caches. What it leaves out is the comparison with the size of the axis, the
negative indices, and what becomes of bad ones; and it is compiled for one width of rows, which
takes no division. So it is the least that such a kernel can take.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy

import gpuops

from .harness import on_gpu
from .peers import Contestant

NAME = "a kernel without the check"

THREADS = 256
SOURCE = """
template <class Vector, bool ALONE>
__device__ Vector load(const Vector* address)
{
    if constexpr (ALONE) {
        Vector value;
        asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(address));
        return value;
    } else {
        return __ldg(address);
    }
}

template <class Vector, class Index, unsigned UNITS, int ITEMS, bool ALONE>
__global__ void __launch_bounds__(256)
gather(const float* x, const Index* indices, float* out, long long vectors)
{
    const long long first = blockIdx.x * (long long)(ITEMS * 256), last = vectors - first - 1;
    const unsigned long long row = first / UNITS;
    unsigned offset[ITEMS];
    Index index[ITEMS];
    Vector loaded[ITEMS];
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        offset[k] = k * 256 + threadIdx.x;
        if (offset[k] > last) offset[k] = (unsigned)last;
    }
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) index[k] = __ldcs(indices + row + offset[k] / UNITS);
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const Vector* source = (const Vector*)x + (long long)index[k] * UNITS;
        loaded[k] = load<Vector, ALONE>(source + offset[k] % UNITS);
    }
    #pragma unroll
    for (int k = 0; k < ITEMS; k++) __stcs((Vector*)out + first + offset[k], loaded[k]);
}
"""

# As launch_rows in kernels/gather_rows.cu has them.
LARGE_TABLE_BYTES, FEW_VECTORS = 192 << 20, 8 << 20


def gathering(table: numpy.ndarray, indices: numpy.ndarray) -> dict[str, Contestant]:
    """Make the contestant for such a table of float32 and as many indices, all of them good.

    It compiles when it is called first. Rows have one element, or a power of two from 4 to
    2048, so that each block begins with a row.
    """
    width = table[0].size
    vectors = indices.size * max(1, width // 4)
    items, alone = 2, False
    if width == 1:
        is_large = table.nbytes > LARGE_TABLE_BYTES
        alone = is_large and vectors <= FEW_VECTORS
        items = 1 if is_large and not alone else 4

    @functools.cache
    def kernel() -> Callable[..., None]:
        name = expression(width, indices.dtype, items, alone)
        bound = gpuops.compile(SOURCE, name_expressions=[name])[name]
        return bound[-(-vectors // (items * THREADS)), THREADS]

    def call(x: Any, places: Any) -> Any:
        out = gpuops.empty((indices.size, *table.shape[1:]), numpy.float32)
        kernel()(x, places, out, vectors)
        return out

    return {NAME: on_gpu(call, clock="events", is_peer=False)}


def expression(width: int, index: numpy.dtype, items: int, alone: bool) -> str:
    """Name the kernel for rows of so many float32."""
    vector, units = ("unsigned", 1) if width == 1 else ("uint4", width // 4)
    kind = "int" if index == numpy.int32 else "long long"
    return f"gather<{vector}, {kind}, {units}, {items}, {str(alone).lower()}>"
