"""gather beside NumPy, torch, CuPy and JAX: of host arrays, from these to the GPU, and there."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy

import gpuops

from . import peers, unchecked
from .harness import (
    BEST_PEER,
    Case,
    Contestant,
    Run,
    Target,
    byte_name,
    count_name,
    memory_free,
    on_gpu,
)

MEBI = 1 << 20


def measure(run: Run) -> None:
    """Measure every case: whole calls on host arrays first, then arrays on the GPU."""
    scale = 64 if run.quick else 1  # divides the tables, so that a quick run takes seconds
    for case in host_cases(run, scale):
        run.measure(case)
    if gpuops.is_available() and peers.gpu():
        run.say("\ntables on the host, results on the GPU (bytes of the results, counted once)")
        table = run.random.random(512 * MEBI // scale, dtype=numpy.float32)
        for width in TABLE_ROWS:
            run.measure(host_table(run, width, table[: 128 * MEBI // scale]))
        for width in LONG_ROWS:  # so many that to begin and to end takes no time to speak of
            run.measure(host_table(run, width, table))
        del table
        for case in each_once(run, LARGE_TABLE // scale):
            run.measure(case)
        run.say("\narrays on the GPU: the time of the work there")
        for case in device_cases(run, scale):
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
    if count == MEBI:
        targets.append(Target("gpuops on the GPU", seconds=12.5e-3))
    name = f"{count_name(count)} of {count_name(size)} float32, {numpy.dtype(dtype)} indices"
    return _host_case(name, table, indices, targets, items=count)


def rows(run: Run, width: int, size: int, count: int, reuse: bool = False) -> Case:
    """Random rows of a table, written to fresh memory or, to `reuse` it, to the same each time."""
    table = run.random.random(size, dtype=numpy.float32).reshape(-1, width)
    indices = [(run.random.integers(0, len(table), count),) for _ in range(4)]
    name = f"{count_name(count)} rows of {width} float32 ({4 * width} bytes)"
    targets = [Target("gpuops on the CPU", "numpy.take", ratio=1.5)]
    if not reuse:
        return _host_case(name, table, indices, targets, gpu_too=False)
    return _host_case(f"{name}, out=", table, indices, targets, reuse=True, gpu_too=False)


def small(run: Run, count: int) -> Case:
    """Calls that are mostly overhead."""
    table = run.random.random(1000, dtype=numpy.float32)
    indices = [(run.random.integers(0, 1000, count),) for _ in range(4)]
    targets = [Target("gpuops on the CPU", "numpy.take", slower=1e-6)]
    return _host_case(f"{count} of 1000 float32", table, indices, targets, items=count)


def _host_case(
    name: str,
    table: numpy.ndarray,
    indices: list,
    targets: list[Target],
    items: int | None = None,
    reuse: bool = False,
    gpu_too: bool = True,
) -> Case:
    def out() -> dict:
        shape = indices[0][0].shape + table.shape[1:]
        return {"out": numpy.full(shape, numpy.nan, table.dtype)} if reuse else {}

    contestants = {"gpuops on the CPU": _gather(device="cpu", **out())}
    if gpu_too and gpuops.is_available():
        contestants["gpuops on the GPU"] = _gather(device="cuda", **out())
    # NumPy gathers straight into `out` in mode "clip" alone; the indices here are all in bounds.
    options = {"mode": "clip", **out()} if reuse else {}
    contestants["numpy.take"] = Contestant(functools.partial(numpy.take, axis=0, **options))
    if not reuse:
        contestants["x[indices]"] = Contestant(lambda x, i: x[i])
        contestants |= peers.torch_cpu("index_select", _index_select)
    if gpu_too:
        contestants |= peers.torch_from_host("index_select", _index_select)
        contestants |= peers.cupy_from_host("take", _take)
    moved = _moved_bytes(table, indices[0][0])
    return Case(f"gather {name}", contestants, _reference, [table], indices, moved, items, targets)


def _gather(**options: Any) -> Contestant:
    return Contestant(functools.partial(gpuops.gather, **options))


# Rows of float32, and the rates in GB/s at which they shall go up from ordinary memory and from
# page-locked memory.
TABLE_ROWS = {16: (None, 12), 64: (None, 35), 128: (None, 50), 256: (40, 50), 1024: (40, 50)}
LONG_ROWS = (64, 128, 256)
# A GPU knows the addresses of about 1 GiB of the host's memory; rows from anywhere in a larger
# table wait for lookups, unless they are taken in the order in which they lie.
LARGE_TABLE, LARGE_TABLE_ROWS = 1 << 30, (128, 256)
SORTED_ALREADY, SORTED_RATIO = "each once, sorted", 0.95


def each_once(run: Run, size: int) -> Iterator[Case]:
    """Rows of a large table, none of them twice: in the order of their places, and in any.

    Of such a table gather itself sorts the rows by the part of it that they lie in. So the second
    shall be about as fast as the first, whose indices are sorted already.
    """
    # The table, a page-locked copy, and all that is smaller.
    while 3 * 4 * size > memory_free():
        run.say(f"\na table of {byte_name(4 * size)}, each once, left out: too little host memory")
        size //= 2
    table = run.random.random(size, dtype=numpy.float32)
    for width in LARGE_TABLE_ROWS:
        for order in (SORTED_ALREADY, "each once"):
            yield host_table(run, width, table, order)


# How host tables are given: whether page-locked, and whether the indices are on the GPU.
HOST_TABLES = {
    "gpuops": (False, False),
    "gpuops, page-locked": (True, False),
    "gpuops, page-locked, indices there": (True, True),
}
TABLE_STATES = {"": "wall", ", in a loop": "again"}


def host_table(run: Run, width: int, table: numpy.ndarray, order: str = "") -> Case:
    """Random rows of a table on the host, an eighth of it, into an array on the GPU.

    All come after whatever else there was, when all threads have come to rest. gpuops' ways come
    once more, right after calls of their own for other rows, as in a loop that trains a model: this
    shows what it costs to wake the threads, and stands beside no peer.

    "each once": no row is taken twice; what has to do with sorting is in each_once().
    """
    table = table.reshape(-1, width)
    count = len(table) // 8

    def draw() -> numpy.ndarray:
        if not order:
            return run.random.integers(0, len(table), count)
        rows = run.random.permutation(len(table))[:count]
        return numpy.sort(rows) if order.endswith("sorted") else rows

    indices = [(draw(),) for _ in range(8)]
    lock = _locking_once()
    pageable, locked = TABLE_ROWS[width]
    contestants, targets = {}, []
    for state, clock in TABLE_STATES.items():
        for name, (locks, sends) in HOST_TABLES.items():
            contestants[name + state] = _into_gpu(
                count, width, lock if locks else None, sends, clock
            )
        targets += [
            Target(name + state, rate=locked) for name, (locks, _) in HOST_TABLES.items() if locks
        ]
        if pageable:
            targets.append(Target(f"gpuops{state}", rate=pageable))
    targets += [Target(ours, BEST_PEER, ratio=1.0) for ours in ("gpuops", "gpuops, page-locked")]
    if torch := peers.torch_on_gpu():
        contestants["torch CPU index_select and cuda()"] = Contestant(
            peers.until_done(lambda x, i: torch.index_select(x, 0, i).cuda(), peers.wait_for_torch),
            convert=torch.from_numpy,
            to_numpy=lambda x: x.cpu().numpy(),
        )
    if cupy := peers.cupy_on_gpu():
        contestants["numpy.take and CuPy's asarray"] = Contestant(
            peers.until_done(lambda x, i: cupy.asarray(x.take(i, axis=0)), peers.wait_for_cupy),
            to_numpy=cupy.asnumpy,
        )
    name = f"gather host table, {count_name(count)} rows of {width} float32 ({4 * width} bytes)"
    if order:
        name += f" of {byte_name(table.nbytes)}"
    if order == "each once":
        targets += [
            Target(ours, of_case=(f"{name}, {SORTED_ALREADY}", SORTED_RATIO))
            for ours, (locks, _) in HOST_TABLES.items()
            if locks
        ]
    name += f", {order}" if order else ""
    moved = count * width * table.itemsize
    return Case(name, contestants, _take_rows, [table], indices, moved, None, targets)


def _locking_once() -> Callable[[numpy.ndarray], numpy.ndarray]:
    """Make a function that copies a table into page-locked memory, once for all who want it."""
    copies: list[numpy.ndarray] = []

    def lock(table: numpy.ndarray) -> numpy.ndarray:
        if not copies:
            copies.append(gpuops.pinned_empty(table.shape, table.dtype))
            copies[0][...] = table
        return copies[0]

    return lock


def _into_gpu(
    count: int,
    width: int,
    lock: Callable[[numpy.ndarray], numpy.ndarray] | None,
    sends: bool,
    clock: str,
) -> Contestant:
    out = gpuops.empty((count, width), numpy.float32)

    def convert(array: numpy.ndarray) -> Any:
        if array.ndim == 1:
            return gpuops.to_device(array) if sends else array
        return lock(array) if lock is not None else array

    call = peers.until_done(functools.partial(gpuops.gather, out=out), peers.wait_for_gpuops)
    return Contestant(call, convert=convert, to_numpy=lambda there: there.to_host(), clock=clock)


# Rows of float32 and the rates in GB/s that they shall reach. Other widths shall come within 15 %
# of the nearest power of two, which is measured before them.
ROWS = {4: None, 8: None, 16: 2700, 32: None, 64: 4000, 128: 4000, 256: 4050, 1024: 4050}
ODD_ROWS = {3: 4, 5: 4, 7: 8, 33: 32, 100: 128}
BYTE_ROWS = {4: None, 3: 4, 16: None, 17: 16}

# The widths at which the price of the bounds check is measured. No mode goes without a check:
# "wrap" and "clip" compare as well, but have no error to report. A kernel of unchecked.py does.
CHECKED = (16, 64, 256)
OTHER_MODES = ("wrap", "clip")
CHECK_RATIO = 0.98


def device_cases(run: Run, scale: int) -> Iterator[Case]:
    """Arrays that are on the GPU before and after the call."""
    table = run.random.random(128 * MEBI // scale, dtype=numpy.float32)
    for count, size, rate in ((1, 128, 31), (128, 128, 62), (128, 32, 70)):
        yield device_elements(run, table[: size * MEBI // scale], count * MEBI // scale, rate)
    for width, rate in ROWS.items():
        targets = [Target(ours, rate=rate) for ours in ("gpuops", NARROW)] if rate else []
        yield device_rows(run, table, width, targets)
    for width, nearest in ODD_ROWS.items():
        yield device_rows(run, table, width, _near(_row_name(table, nearest)))
    table = table.view(numpy.uint8)
    for width, nearest in BYTE_ROWS.items():
        count = 16 * MEBI // scale  # half of the rows would keep NumPy busy, which checks them
        targets = _near(_row_name(table, nearest, count)) if nearest else []
        yield device_rows(run, table, width, targets, count)


def device_elements(run: Run, table: numpy.ndarray, count: int, rate: float) -> Case:
    """Single elements at random positions of a table on the GPU."""
    indices = [(run.random.integers(0, len(table), count, dtype=numpy.int32),) for _ in range(2)]
    name = f"{count_name(count)} of {count_name(len(table))} float32, int32 indices"
    targets = [Target("gpuops", BEST_PEER, ratio=1.0), Target("gpuops", rate=rate)]
    return _device_case(name, table, indices, targets, checked=True, items=count)


def device_rows(
    run: Run, table: numpy.ndarray, width: int, targets: list[Target], count: int | None = None
) -> Case:
    """Random rows of a table on the GPU, half as many as it has unless a `count` is given."""
    name = _row_name(table, width, count)
    rows = table[: table.size // width * width].reshape(-1, width)
    count = count or len(rows) // 2
    indices = [(run.random.integers(0, len(rows), count),) for _ in range(2)]
    return _device_case(name, rows, indices, targets, checked=width in CHECKED)


def _row_name(table: numpy.ndarray, width: int, count: int | None = None) -> str:
    count = count or table.size // width // 2
    kind = table.dtype if table.itemsize > 1 else "bytes"
    return f"{count_name(count)} rows of {width} {kind}"


def _near(name: str) -> list[Target]:
    return [Target(ours, of_case=(f"device {name}", 0.85)) for ours in ("gpuops", NARROW)]


NARROW = "gpuops, int32 indices"


def _device_case(
    name: str,
    table: numpy.ndarray,
    indices: list,
    targets: list[Target],
    checked: bool,
    items: int | None = None,
) -> Case:
    clock = {"clock": "events"}
    contestants = {"gpuops": on_gpu(gpuops.gather, **clock)}
    saved = {"saved_bytes": 0}
    if indices[0][0].dtype == numpy.int64:
        saved["saved_bytes"] = indices[0][0].nbytes // 2
        contestants[NARROW] = on_gpu(gpuops.gather, narrow=True, **clock, **saved)
    contestants |= peers.torch_gpu("index_select", _index_select, **clock)
    contestants |= peers.cupy_gpu("take", _take, **clock)
    contestants |= peers.jax_gpu("take, int32 indices", _jax_take, clock="JAX's stream", **saved)
    for mode in OTHER_MODES if checked else ():
        ours = f"gpuops, mode={mode!r}"
        contestants[ours] = on_gpu(functools.partial(gpuops.gather, mode=mode), **clock)
        targets = [*targets, Target("gpuops", ours, ratio=CHECK_RATIO)]
    if checked and table.dtype == numpy.float32:
        contestants |= unchecked.gathering(table, indices[0][0])
        targets = [*targets, Target("gpuops", unchecked.NAME, ratio=CHECK_RATIO)]
    moved = _moved_bytes(table, indices[0][0])
    return Case(f"device {name}", contestants, _take_rows, [table], indices, moved, items, targets)


def _reference(x: numpy.ndarray, indices: numpy.ndarray) -> numpy.ndarray:
    return x[indices]


def _take_rows(x: numpy.ndarray, indices: numpy.ndarray) -> numpy.ndarray:
    return numpy.take(x, indices, axis=0)  # faster than x[indices] for narrow rows


def _index_select(torch: Any, x: Any, indices: Any) -> Any:
    return torch.index_select(x, 0, indices)


def _take(cupy: Any, x: Any, indices: Any) -> Any:
    return cupy.take(x, indices, axis=0)


def _jax_take(jax: Any, x: Any, indices: Any) -> Any:
    return jax.numpy.take(x, indices, axis=0)


def _moved_bytes(table: numpy.ndarray, indices: numpy.ndarray) -> int:
    """Count the indices, every element that is read, and the same elements as they are written."""
    row_bytes = table.itemsize * table[0].size
    return indices.nbytes + 2 * row_bytes * indices.size
