"""gather of host arrays beside NumPy, torch and CuPy, and its CUDA kernel beside theirs."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy

import gpuops

from . import peers
from .harness import Case, Contestant, Run, Target, count_name

MEBI = 1 << 20


def measure(run: Run) -> None:
    """Measure every case: whole calls on host arrays first, then the kernels alone."""
    scale = 64 if run.quick else 1  # divides the tables, so that a quick run takes seconds
    for case in host_cases(run, scale):
        run.measure(case)
    if gpuops.is_available() and peers.torch_on_gpu():
        run.say(
            "\nkernels alone (the GPU's time in kernels; peers also by events, tables on the GPU)"
        )
        for case in kernel_cases(run, scale):
            run.measure(case)


def host_cases(run: Run, scale: int) -> Iterator[Case]:
    """Whole calls, from NumPy arrays to a fresh NumPy array."""
    size = 128 * MEBI // scale
    yield elements(run, size, MEBI // scale, numpy.int32)
    yield elements(run, size, 16 * MEBI // scale, numpy.int64, sets=2)
    for width in (16, 64, 256, 1024):
        yield rows(run, width, size, count=size // 2 // width)
    yield rows(run, 256, size, count=size // 512, reuse=True)
    for count in (100, 1000):
        yield small(run, count)


def elements(run: Run, size: int, count: int, dtype: type, sets: int = 8) -> Case:
    """Single elements at random positions of a table far larger than the caches."""
    table = run.random.random(size, dtype=numpy.float32)
    indices = [(run.random.integers(0, size, count, dtype=dtype),) for _ in range(sets)]
    targets = [Target("gpuops on the CPU", "numpy.take", ratio=1.2)]
    name = f"{count_name(count)} of {count_name(size)} float32, {numpy.dtype(dtype)} indices"
    return _host_case(name, table, indices, targets, items=count)


def rows(run: Run, width: int, size: int, count: int, reuse: bool = False) -> Case:
    """Random rows of a table, written to fresh memory or, to `reuse` it, to the same each time."""
    table = run.random.random(size, dtype=numpy.float32).reshape(-1, width)
    indices = [(run.random.integers(0, len(table), count),) for _ in range(4)]
    name = f"{count_name(count)} rows of {width} float32 ({4 * width} bytes)"
    targets = [Target("gpuops on the CPU", "numpy.take", ratio=1.5)]
    if not reuse:
        return _host_case(name, table, indices, targets)
    return _host_case(f"{name}, out=", table, indices, targets, reuse=True)


def small(run: Run, count: int) -> Case:
    """Calls that are mostly overhead."""
    table = run.random.random(1000, dtype=numpy.float32)
    indices = [(run.random.integers(0, 1000, count),) for _ in range(4)]
    targets = [Target("gpuops on the CPU", "numpy.take", seconds=1e-6)]
    return _host_case(f"{count} of 1000 float32", table, indices, targets, items=count)


def _host_case(
    name: str,
    table: numpy.ndarray,
    indices: list,
    targets: list[Target],
    items: int | None = None,
    reuse: bool = False,
) -> Case:
    def out() -> dict:
        shape = indices[0][0].shape + table.shape[1:]
        return {"out": numpy.full(shape, numpy.nan, table.dtype)} if reuse else {}

    contestants = {"gpuops on the CPU": _gather(device="cpu", **out())}
    if gpuops.is_available():
        contestants["gpuops on the GPU"] = _gather(device="cuda", **out())
    # NumPy gathers straight into `out` in mode "clip" alone; the indices here are all in bounds.
    options = {"mode": "clip", **out()} if reuse else {}
    contestants["numpy.take"] = Contestant(functools.partial(numpy.take, axis=0, **options))
    if not reuse:
        contestants["x[indices]"] = Contestant(lambda x, i: x[i])
        contestants |= peers.torch_cpu("index_select", _index_select)
        contestants |= peers.torch_from_host("index_select", _index_select)
        contestants |= peers.cupy_from_host("take", _take)
    moved = _moved_bytes(table, indices[0][0])
    return Case(f"gather {name}", contestants, _reference, [table], indices, moved, items, targets)


def _gather(**options: Any) -> Contestant:
    return Contestant(functools.partial(gpuops.gather, **options))


def kernel_cases(run: Run, scale: int) -> Iterator[Case]:
    """The time of the kernels, beside that of the peers on tables that are on the GPU already."""
    size = 128 * MEBI // scale
    for count, table_size in ((MEBI, 128), (128 * MEBI, 128), (128 * MEBI, 32)):
        table = run.random.random(table_size * MEBI // scale, dtype=numpy.float32)
        count = count // scale
        index_type = numpy.int32
        indices = [(run.random.integers(0, len(table), count, dtype=index_type),) for _ in range(2)]
        name = f"{count_name(count)} of {count_name(len(table))} float32, int32 indices"
        yield _kernel_case(name, table, indices, items=count)
    for width in (16, 64, 128, 256, 1024, 3, 7, 33, 100):
        table = run.random.random(size // width * width, dtype=numpy.float32).reshape(-1, width)
        count = len(table) // 2
        indices = [(run.random.integers(0, len(table), count),) for _ in range(2)]
        yield _kernel_case(f"{count_name(count)} rows of {width} float32", table, indices)


def _kernel_case(name: str, table: numpy.ndarray, indices: list, items: int | None = None) -> Case:
    contestants = {"gpuops": _gather(device="cuda")}
    contestants["gpuops"].clock = "kernels"
    # Our call has just written the table when its kernel runs. So that the L2 holds the same part
    # of it for everybody, the peers' tables are written ahead of each call too.
    kernels: dict[str, Any] = {"clock": "kernels", "before": _rewrite}
    contestants |= peers.torch_gpu("index_select", _index_select, **kernels)
    contestants |= peers.cupy_gpu("take", _take, **kernels)
    contestants |= peers.torch_gpu("index_select, events", _index_select, clock="events")
    contestants |= peers.cupy_gpu("take, events", _take, clock="events")
    moved = _moved_bytes(table, indices[0][0])
    return Case(f"kernel {name}", contestants, _reference, [table], indices, moved, items)


def _rewrite(table: Any, indices: Any) -> None:
    table *= 1


def _reference(x: numpy.ndarray, indices: numpy.ndarray) -> numpy.ndarray:
    return x[indices]


def _index_select(torch: Any, x: Any, indices: Any) -> Any:
    return torch.index_select(x, 0, indices)


def _take(cupy: Any, x: Any, indices: Any) -> Any:
    return cupy.take(x, indices, axis=0)


def _moved_bytes(table: numpy.ndarray, indices: numpy.ndarray) -> int:
    """Count the indices, every element that is read, and the same elements as they are written."""
    row_bytes = table.itemsize * table[0].size
    return indices.nbytes + 2 * row_bytes * indices.size
