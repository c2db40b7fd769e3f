"""gather from tables in the memory of the host: every way gives the same, bit for bit.

Which way a call took shows in what it took of the device's memory, and in whether a kernel ran.
"""

import contextlib
import ctypes
import functools
import mmap

import numpy as np
import pytest
import reference
from helpers import (
    DTYPES,
    INDEX_DTYPES,
    filled_array,
    locked_by_somebody_else,
    run_child,
    run_threads,
    same,
)

MEBI = 1 << 20
TABLE_BYTES = 3 * MEBI  # a table that is small goes up as a whole
MODES = ["raise", "wrap", "clip", "fill"]
OUT_OF_MEMORY, UNKNOWN = 2, 999

# Around the lines that go over the bus, the words that are loaded, and where rows are cut or
# written around the cache.
ROW_BYTES = [1, 2, 3, 4, 8, 12, 15, 16, 17, 20, 24, 31, 32, 33, 64, 96, 100, 127, 128, 129, 200]
ROW_BYTES += [255, 256, 257, 400, 511, 512, 513, 1000, 1024, 3967, 3968, 3969, 3970, 4095, 4096]
ROW_BYTES += [4097, 8191, 8192, 8193, 10_001]


@pytest.fixture
def gpuops(gpu):
    return gpu.gpuops


@pytest.fixture
def fake(fake):
    fake.gpuops.empty_cache()
    return fake


def numbers(nbytes):
    """Bytes of which no two stretches are alike, soon made."""
    words = np.arange(nbytes // 4 + 1, dtype=np.uint32) * np.uint32(2654435761)
    return words.view(np.uint8)[:nbytes]


def table_of(row_bytes, nbytes=TABLE_BYTES, offset=0):
    count = nbytes // row_bytes
    memory = numbers(offset + count * row_bytes)
    return memory[offset:].reshape(count, row_bytes)


def positions(count, size, mode="raise", seed=0, dtype=np.int64):
    reach = size if mode == "raise" else 2 * size
    return np.random.default_rng(seed).integers(-reach, reach, count).astype(dtype)


@contextlib.contextmanager
def seen(fake):
    """What the block takes of the device's memory, and how many kernels it launches."""
    fake.gpuops.empty_cache()
    before = fake.fake.live().bytes
    launches = fake.fake.calls("cudaLaunchKernel")
    found = {"bytes": 0}

    def look(name, with_gil):
        found["bytes"] = max(found["bytes"], fake.fake.live().bytes - before)

    with fake.fake.visit(look):
        yield found
    found["launches"] = fake.fake.calls("cudaLaunchKernel") - launches


def to_device_result(gpuops, x, indices, **options):
    """The result of a call that leaves it on the device."""
    there = gpuops.to_device(indices)
    return gpuops.gather(x, there, **options).to_host()


# Rows on the host into a result on the device.


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("pinned", [False, True])
def test_few_rows_of_every_length(gpuops, row_bytes, pinned):
    for offset in (0, 1, 4, 8, 100):
        x = table_of(row_bytes, offset=offset)
        indices = positions(50, len(x), seed=row_bytes)
        with gpuops.pin(x) if pinned else contextlib.nullcontext():
            same(to_device_result(gpuops, x, indices), x[indices])
            out = gpuops.empty((51, row_bytes), "u1")[1:]  # of every alignment
            assert gpuops.gather(x, indices, out=out) is out
            same(out.to_host(), x[indices])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("pinned", [False, True])
def test_modes_and_dtypes_of_indices(gpuops, mode, dtype, pinned):
    x = table_of(40_000)
    limits = np.iinfo(dtype)
    ends = np.array([limits.min, limits.max], dtype)
    indices = positions(30, len(x), mode).astype(dtype)
    if mode == "raise":
        indices %= np.array(len(x), dtype)
    else:
        indices = np.concatenate([indices, ends])
    expected = reference.gather(x, indices, mode=mode)
    with gpuops.pin(x) if pinned else contextlib.nullcontext():
        same(to_device_result(gpuops, x, indices, mode=mode), expected)
        same(gpuops.gather(x, indices, mode=mode, device="cuda"), expected)
        same(to_device_result(gpuops, x, np.repeat(indices, 2)[::2], mode=mode), expected)
        out = gpuops.empty(expected.shape, "u1")
        gpuops.gather(x, np.repeat(indices, 2)[::2], mode=mode, out=out)
        same(out.to_host(), expected)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind != "c"], ids=str)
@pytest.mark.parametrize("pinned", [False, True])
def test_dtypes_and_fill_values(gpuops, dtype, pinned):
    x = filled_array(MEBI // dtype.itemsize + 100, dtype).reshape(1, -1).repeat(3, 0)
    value = filled_array((), dtype, seed=5)[()]
    indices = np.array([[2, 9], [-1, -7]])
    expected = reference.gather(x, indices, 0, "fill", value)
    with gpuops.pin(x) if pinned else contextlib.nullcontext():
        there = gpuops.to_device(indices)
        result = gpuops.gather(x, there, mode="fill", fill_value=value)
        same(result.to_host(), expected)
        one = x[0, :-1].reshape(-1, 1)
        indices = np.array([5, 2 * len(one), -1])
        there = gpuops.to_device(indices)
        result = gpuops.gather(one, there, mode="fill", fill_value=value)
        same(result.to_host(), reference.gather(one, indices, 0, "fill", value))


LAYOUTS = {
    "every second row": lambda x: x[::2],
    "backwards": lambda x: x[::-1],
    "a part of each row": lambda x: x[:, 3:-5],
    "every second element": lambda x: x[:, ::2],
    "columns": lambda x: x.T,
    "the same row": lambda x: np.broadcast_to(x[0], (5000, *x.shape[1:])),
    "rows of rows": lambda x: x[: len(x) // 4 * 4].reshape(-1, 4, x.shape[1])[:, 1:3],
    "a sliding window": lambda x: np.lib.stride_tricks.sliding_window_view(x.reshape(-1), 999),
    "axes in another order": lambda x: x.reshape(-1, 5, 20, 10).transpose(1, 3, 0, 2),
}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("nbytes", [1000, TABLE_BYTES])
def test_fill_values_that_no_word_repeats_in_every_layout(gpuops, nbytes, pinned):
    """On the device, where all is packed, rows are longer than on the host."""
    x = numbers(nbytes // 96 * 96).view("V12").reshape(-1, 8)
    fill = np.array([b"twelve bytes"], "V12")[0]
    indices = np.array([0, 99_999, -1, 99_999])
    for view in (x, x[:, ::2], x[:, 1:4], x[::-1, ::-1]):
        expected = view[[0, 0, -1, 0]]
        expected[[1, 3]] = fill
        with gpuops.pin(x) if pinned else contextlib.nullcontext():
            found = to_device_result(gpuops, view, indices, mode="fill", fill_value=fill)
            same(found, expected)
            out = gpuops.empty(expected.shape, "V12")
            gpuops.gather(view, indices, mode="fill", fill_value=fill, out=out)
            same(out.to_host(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pinned", [False, True])
def test_layouts_and_axes(gpuops, layout, pinned):
    memory = table_of(1000)
    x = LAYOUTS[layout](memory)
    with gpuops.pin(memory) if pinned else contextlib.nullcontext():
        for axis in (*range(x.ndim), None):
            size = x.size if axis is None else x.shape[axis]
            if x.size // size > MEBI // 4 or size > 1 << 30:
                continue
            indices = positions((3, 2), size)
            expected = reference.gather(x, indices, axis)
            there = gpuops.to_device(indices)
            same(gpuops.gather(x, there, axis=axis).to_host(), expected)
            same(gpuops.gather(x, indices, axis=axis, device="cuda"), expected)


@pytest.mark.parametrize("which", ["all rows", "a range", "a range, NumPy to NumPy"])
def test_tables_in_fortran_order_are_turned_on_the_gpu(fake, which):
    """What goes up of them, where there is room for it once more."""
    gpuops, c = fake.gpuops, table_of(400).view("f4")
    f = np.asfortranarray(c)
    third = len(c) // 3
    indices = np.random.default_rng(0).integers(third, 2 * third, 10_000)
    given = gpuops.to_device(indices) if which == "all rows" else indices
    out = None if "NumPy" in which else gpuops.empty((len(indices), 100), "f4")
    options = {"device": "cuda"} if out is None else {"out": out}

    def launched(x):
        with seen(fake) as found:
            result = gpuops.gather(x, given, **options)
        same(result if out is None else out.to_host(), c[indices])
        return found["launches"]

    assert launched(f) == launched(c) + 1


@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("pinned", [False, True])
def test_take_and_take_along_axis(gpuops, axis, pinned):
    x = table_of(80).view("f4").reshape(3, -1, 20).view("i4")
    with gpuops.pin(x) if pinned else contextlib.nullcontext():
        size = x.size if axis is None else x.shape[axis]
        indices = positions(7, size)
        same(gpuops.take(x, gpuops.to_device(indices), axis).to_host(), x.take(indices, axis))
        shape = [7] if axis is None else list(x.shape)
        if axis is not None:
            shape[axis] = 2
        indices = positions(shape, size)
        there = gpuops.to_device(indices)
        expected = np.take_along_axis(x, indices, axis)
        same(gpuops.take_along_axis(x, there, axis).to_host(), expected)
        same(gpuops.take_along_axis(x, indices, axis, device="cuda"), expected)


@pytest.mark.parametrize("rows", [511, 512, 513, 700, 6145])
def test_rows_that_go_through_the_ring(fake, rows):
    """From 2 MiB on; 6144 rows fill it, and no row ends where a slice of the work does."""
    for row_bytes in (4096, 4097) if rows < 1000 else (4097,):
        # So large that it does not go up as a whole, whatever other tests have measured.
        x = table_of(row_bytes, nbytes=(32 if rows < 1000 else 8) * rows * row_bytes)
        indices = positions(rows, len(x))
        with seen(fake) as found:
            out = fake.gpuops.empty((rows, row_bytes), "u1")
            fake.gpuops.gather(x, indices, out=out)
        assert found["launches"] == 0 and found["bytes"] == out.nbytes
        same(out.to_host(), x[indices])


@pytest.mark.parametrize("threads", [1, 2, 3, 12])
def test_rows_that_any_number_of_threads_make(fake, threads):
    """Two make stretches of the result, and more of them pieces from all over it."""
    source = """
from pathlib import Path
import gpuops
from faults.fake import Fake
from helpers import same
from test_host_tables import positions, table_of

fake = Fake(Path(gpuops.__path__[0]).with_name("cudart"))
for rows, row_bytes in ((40_001, 64), (7003, 300), (511, 8195), (70, 60_001)):
    x = table_of(row_bytes, nbytes=32 * rows * row_bytes)
    indices = positions(rows, len(x))
    out = gpuops.empty((rows, row_bytes), "u1", device=0)
    launches = fake.calls("cudaLaunchKernel")
    gpuops.gather(x, indices, out=out)
    assert fake.calls("cudaLaunchKernel") == launches
    same(out.to_host(), x[indices])
"""
    run_child(fake.gpuops, source, GPUOPS_NUM_THREADS=str(threads))


# Which way.


@pytest.mark.parametrize("on_device", [False, True])
def test_few_rows_take_no_memory_for_the_table(fake, on_device):
    x = table_of(1000)
    indices = positions(20, len(x))
    given = fake.gpuops.to_device(indices) if on_device else indices
    out = fake.gpuops.empty((20, 1000), "u1")
    with seen(fake) as found:
        fake.gpuops.gather(x, given, out=out)
    assert found["launches"] == 0 and found["bytes"] == 0
    same(out.to_host(), x[indices])
    with fake.gpuops.pin(x), seen(fake) as found:
        fake.gpuops.gather(x, given, out=out)
    assert found["launches"] == 1 and found["bytes"] == (0 if on_device else indices.nbytes)
    same(out.to_host(), x[indices])


def test_few_rows_of_a_page_locked_table_into_memory_of_the_host(fake):
    x = fake.gpuops.pinned_empty((3000, 1000), "u1")
    x[...] = table_of(1000)[:3000]
    indices = positions(20, len(x))
    with seen(fake) as found:
        result = fake.gpuops.gather(x, indices, device="cuda")
    assert found["bytes"] < 2 * result.nbytes
    same(result, x[indices])


def test_a_table_that_is_locked_in_part_is_not_read_in_place(fake):
    x = table_of(1000)
    indices = np.arange(-3, len(x), 100)
    for locked in (x[:-1], x[1:], x[5:-5], x[: len(x) // 2]):
        with fake.gpuops.pin(locked):
            out = fake.gpuops.empty((len(indices), 1000), "u1")
            with seen(fake) as found:
                fake.gpuops.gather(x, indices, out=out)
            assert found["launches"] == 0
            same(out.to_host(), x[indices])
    with fake.gpuops.pin(x[:1000]), fake.gpuops.pin(x[900:]):
        fake.gpuops.gather(x, indices, out=out)
        same(out.to_host(), x[indices])


def test_a_table_that_somebody_else_has_locked_in_part(fake):
    x = table_of(1000)
    indices = np.arange(-3, len(x), 100)
    out = fake.gpuops.empty((len(indices), 1000), "u1")
    for locked, is_all in ((x[:-1], False), (x[1:], False), (x, True)):
        with locked_by_somebody_else(fake, locked), seen(fake) as found:
            fake.gpuops.gather(x, indices, out=out)
        assert found["launches"] == is_all
        same(out.to_host(), x[indices])


@pytest.mark.parametrize("gap", [0, 50])
def test_a_table_that_somebody_else_has_locked_in_two_pieces(gpu, gap):
    """A kernel that read what lies between them would end all work on the GPU."""
    x = table_of(1000)
    middle = len(x) // 2
    indices = np.arange(-3, len(x), 100)
    out = gpu.gpuops.empty((len(indices), 1000), "u1")
    with locked_by_somebody_else(gpu, x[: middle - gap], x[middle + gap :]):
        launches = 0 if gpu.fake is None else gpu.fake.calls("cudaLaunchKernel")
        gpu.gpuops.gather(x, indices, out=out)
        assert gpu.fake is None or gpu.fake.calls("cudaLaunchKernel") == launches
        same(out.to_host(), x[indices])


@pytest.mark.parametrize("first", [0, 1, 1500, -2])
@pytest.mark.parametrize("count", [1, 2, 700])
def test_only_the_range_that_is_taken_goes_up(fake, first, count):
    x = table_of(1000)[:3000]
    first %= len(x)
    last = min(first + count, len(x)) - 1
    indices = np.array([first, last, (first + last) // 2, first - len(x)]).repeat(3)
    fake.fake.set_slab_bytes(0)
    with seen(fake) as found:
        result = fake.gpuops.gather(x, indices, device="cuda")
    taken = (last - first + 1) * 1000
    assert taken <= found["bytes"] < taken + 20_000 + result.nbytes
    same(result, x[indices])


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_range_is_that_of_the_mode(fake, mode):
    x = table_of(1000)[:3000]
    indices = {
        "wrap": [3005, -2990, 6000 + 7],
        "clip": [2999, 5000, 1 << 40],
        "fill": [-1 << 62, 8, 9000, 9],
    }[mode]
    with seen(fake) as found:
        result = fake.gpuops.gather(x, indices, mode=mode, device="cuda")
    assert found["bytes"] < 20_000
    same(result, reference.gather(x, np.array(indices), mode=mode))
    nothing = fake.gpuops.gather(x, [9000, 9001], mode="fill", device="cuda")
    assert not nothing.any()


def test_a_range_of_many_rows_into_memory_of_the_device(fake):
    """More of them than threads would gather sooner."""
    x = table_of(4, nbytes=8 * MEBI).view("f4")
    for low, high in ((0, 100_000), (777_777, 888_888), (len(x) - 100_000, len(x))):
        indices = np.random.default_rng(0).integers(low, high, (120_000, 1), dtype=np.int32)
        indices[[5, 70_000]] = [[low], [high - 1 - len(x)]]
        out = fake.gpuops.empty((120_000, 1, 1), "f4")
        with seen(fake) as found:
            fake.gpuops.gather(x, indices, out=out)
        taken = 4 * (high - low)
        assert found["launches"] == 1 and taken <= found["bytes"] - indices.nbytes < taken + 1024
        same(out.to_host(), x[indices])


# Windows.

BUFFERS = 2


def windows_of(gpu, places, room):
    """A table of so many rows of 16 bytes, taken as often, where there is so much memory beside
    the result and the indices; and how many rows make a window."""
    x = table_of(16, nbytes=16 * places)
    indices = np.random.default_rng(1).permutation(places).astype(np.int32)
    indices[::3] -= places
    there = gpu.gpuops.to_device(indices)
    out = gpu.gpuops.empty(x.shape, "u1")
    gpu.gpuops.synchronize()
    gpu.gpuops.empty_cache()
    gpu.gpuops.memory_limit(gpu.gpuops.memory_info().used + room)
    step = (room - room // 10) // BUFFERS // 512 * 512 // 16
    return x, indices, there, out, step


@pytest.fixture
def unlimited(fake):
    yield
    fake.gpuops.memory_limit(None)


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_windows(fake, unlimited, in_any_order, count, more):
    room = TABLE_BYTES // count // 512 * 512
    step = windows_of(fake, 1, room)[-1]
    fake.gpuops.memory_limit(None)
    places = step * (2 * count + 1) + more
    x, indices, there, out, _ = windows_of(fake, places, room)
    with seen(fake) as found:
        fake.gpuops.gather(x, there, out=out)
        fake.gpuops.synchronize()
    same(out.to_host(), x[indices])
    assert found["bytes"] <= room
    assert found["launches"] == 2 * count + 1 + (more > 0)


@pytest.mark.parametrize("mode", MODES)
def test_windows_in_every_mode(gpu, limited, mode):
    x, indices, _, out, _ = windows_of(gpu, TABLE_BYTES // 16, MEBI)
    if mode != "raise":
        indices[5::7] += np.int32(3 * len(x))
    there = gpu.gpuops.gather(gpu.gpuops.to_device(indices[:1]), [0])  # as the indices would
    gpu.gpuops.memory_limit(gpu.gpuops.memory_info().used + MEBI + indices.nbytes)
    gpu.gpuops.gather(x, indices, mode=mode, out=out)
    same(out.to_host(), reference.gather(x, indices, mode=mode))
    assert there.size == 1


def test_windows_along_another_axis(gpu, limited):
    x = table_of(64, nbytes=2 * MEBI).view("u4").reshape(4, -1, 16)
    indices = np.random.default_rng(1).permutation(x.shape[1])
    for axis, taken in ((1, indices), (2, np.arange(40) % 16), (0, np.arange(5) % 4)):
        expected = np.take(x, taken, axis)
        there, out = gpu.gpuops.to_device(taken), gpu.gpuops.empty(expected.shape, "u4")
        gpu.gpuops.memory_limit(gpu.gpuops.memory_info().used + MEBI)
        gpu.gpuops.gather(x, there, axis=axis, out=out)
        gpu.gpuops.memory_limit(None)
        same(out.to_host(), expected)
    flat = x.transpose(1, 0, 2)[::-1]
    taken = positions(flat.size // 3, flat.size)
    there, out = gpu.gpuops.to_device(taken), gpu.gpuops.empty(len(taken), "u4")
    gpu.gpuops.memory_limit(gpu.gpuops.memory_info().used + MEBI)
    gpu.gpuops.take(flat, there, out=out)
    same(out.to_host(), flat.take(taken))


def test_windows_on_another_device(fake):
    gpuops = fake.gpuops
    with gpuops.device("cuda:1"):
        x, indices, there, out, _ = windows_of(fake, TABLE_BYTES // 16, MEBI)
        try:
            gpuops.gather(x, there, out=out)
            same(gpuops.gather(x, indices, device=1), x[indices])
        finally:
            gpuops.memory_limit(None)
        same(out.to_host(), x[indices])


def test_windows_of_a_page_locked_table(fake, unlimited, in_any_order):
    """Which is not read any more when the call returns."""
    x, indices, there, out, _ = windows_of(fake, TABLE_BYTES // 16, MEBI)
    with fake.gpuops.pin(x):
        expected = x[indices]
        fake.gpuops.gather(x, there, out=out)
        x[...] = 0
        same(out.to_host(), expected)


def test_a_table_larger_than_the_memory_between_arrays_on_the_host(gpu, limited):
    x, indices, there, out, _ = windows_of(gpu, TABLE_BYTES // 16, MEBI)
    del there, out
    result = gpu.gpuops.gather(x, indices, device="cuda")
    same(result, x[indices])
    with gpu.gpuops.pin(x):
        same(gpu.gpuops.gather(x, indices[:50], device="cuda"), x[indices[:50]])


def test_less_memory_than_there_seemed_to_be(fake):
    """Whoever is given less than there is room for takes smaller windows, or none."""
    x = table_of(4, nbytes=2 * MEBI)  # of rows so short that 16 threads are no faster
    indices = np.random.default_rng(1).permutation(len(x))
    there, out = fake.gpuops.to_device(indices), fake.gpuops.empty(x.shape, "u1")
    allocate = "cudaMallocFromPoolAsync"
    for failures in (2, 6, 100):  # each allocation is tried twice
        out.fill(0)
        with contextlib.ExitStack() as stack:
            for number in range(1, min(failures, 8) + 1):
                mode = "from then on" if failures == 100 else "once"
                stack.enter_context(
                    fake.fake.fail(number, OUT_OF_MEMORY, mode=mode, function=allocate)
                )
            launches = fake.fake.calls("cudaLaunchKernel")
            fake.gpuops.gather(x, there, out=out)
            launches = fake.fake.calls("cudaLaunchKernel") - launches
        assert launches == {2: 4, 6: 16, 100: 0}[failures]
        same(out.to_host(), x[indices])


def without_the_first_buffer(fake, first, call):
    """The allocation of that number is refused, which is tried twice."""
    fake.gpuops.empty_cache()
    with contextlib.ExitStack() as stack:
        faults = [
            stack.enter_context(
                fake.fake.fail(
                    number, OUT_OF_MEMORY, mode="once", function="cudaMallocFromPoolAsync"
                )
            )
            for number in (first, first + 1)
        ]
        call()
    assert all(fault.reached for fault in faults)


def test_parts_of_a_flat_table_that_lies_across(fake):
    """They go up as they are asked for: it is a whole table that can be turned."""
    x = numbers(2 * MEBI).view("f4").reshape(1024, 512).T
    indices = positions(3000, x.size)
    out = np.empty(3000, "f4")
    without_the_first_buffer(
        fake, 1, lambda: fake.gpuops.gather(x, indices, axis=None, out=out, device="cuda")
    )
    same(out, x.reshape(-1)[indices])


def test_a_range_for_which_there_is_less_memory_than_there_seemed_to_be(fake):
    """Then it is read in place, from its first place on."""
    x = table_of(1 << 16, nbytes=4 * MEBI)
    indices = np.array([len(x) - 3, len(x) - 2] * 100)
    out = fake.gpuops.empty((len(indices), 1 << 16), "u1")
    with fake.gpuops.pin(x):
        without_the_first_buffer(fake, 2, lambda: fake.gpuops.gather(x, indices, out=out))
    same(out.to_host(), x[indices])


def test_windows_of_one_place_that_is_no_multiple_of_their_alignment(fake):
    x = numbers(4 * 400_004).reshape(4, -1)
    indices = np.arange(64) % 4
    there, out = fake.gpuops.to_device(indices), fake.gpuops.empty((64, 400_004), "u1")
    without_the_first_buffer(fake, 1, lambda: fake.gpuops.gather(x, there, out=out))
    same(out.to_host(), x[indices])


def test_no_memory_for_what_the_way_needs(fake, unlimited):
    """The result has to fit, and so have indices that a kernel reads; out is as it was."""
    x = table_of(16, nbytes=2 * MEBI)
    indices = np.random.default_rng(1).permutation(len(x))
    out = fake.gpuops.to_device(np.full(x.shape, 77, np.uint8))
    fake.gpuops.memory_limit(fake.gpuops.memory_info().used + 1000)
    message = r"gather.*: out of memory on cuda:0: \d+ bytes were asked for, \d+ are free"
    there = fake.gpuops.to_device(indices[:100])
    with pytest.raises(MemoryError, match=message):
        fake.gpuops.gather(x, there)
    fake.gpuops.gather(x, indices, out=out)  # threads gather them
    same(out.to_host(), x[indices])


# Sorted by where they lie.

LARGE_BYTES = 1 << 30  # beyond what a GPU knows the addresses of
MANY = 60_000  # rows, beside the pages of the table: several share one
SORTING = 5  # kernels: FindParts, the three of a pass, and the one that reads
# Rows of 64 bytes to 400 no number of threads gathers sooner, and longer ones keep the bus busy.


@pytest.fixture(scope="module")
def large():
    """Memory that is hardly there: what nobody writes takes none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, LARGE_BYTES, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, "u1")


def written(x, indices, mode="wrap"):
    """Writes the rows that indices mean, each like no other, and returns the indices."""
    places = np.clip(indices, 0, len(x) - 1) if mode == "clip" else indices % len(x)
    x[places] = numbers(places.size * x[0].size).reshape(-1, *x.shape[1:])
    return indices


def many(indices, count=MANY):
    return np.random.default_rng(1).choice(indices, count)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row_bytes", [64, 128, 200, 333, 600])
def test_many_rows_of_a_large_table_are_sorted(fake, large, row_bytes, mode):
    x = large[: LARGE_BYTES // row_bytes * row_bytes].reshape(-1, row_bytes)
    indices = many(written(x, positions(3000, len(x), mode), mode))
    given = fake.gpuops.to_device(indices)
    out = fake.gpuops.empty((MANY, row_bytes), "u1")
    with locked_by_somebody_else(fake, large), seen(fake) as found:
        fake.gpuops.gather(x, given, mode=mode, out=out)
    assert found["launches"] == (SORTING if row_bytes < 400 else 1)
    same(out.to_host(), reference.gather(x, indices, mode=mode))


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_sorting_by_every_type_of_index(fake, large, dtype):
    """And by places behind one another the other way round."""
    x = large.reshape(-1, 256)[::-2, -200:]
    indices = written(x, positions(3000, min(len(x), np.iinfo(dtype).max), "raise", 1))
    indices = many(np.abs(indices) if np.dtype(dtype).kind == "u" else indices)
    out = fake.gpuops.empty((MANY, 200), "u1")
    with locked_by_somebody_else(fake, large), seen(fake) as found:
        fake.gpuops.gather(x, fake.gpuops.to_device(indices.astype(dtype)), out=out)
    assert found["launches"] == SORTING
    same(out.to_host(), x[indices])


def test_sorting_along_another_axis(fake, large):
    x = large.reshape(4, -1, 256)
    indices = positions(1000, x.shape[1])
    for some in x:
        written(some, indices)
    indices = many(indices, MANY // 4)
    out = fake.gpuops.empty((4, MANY // 4, 256), "u1")
    with locked_by_somebody_else(fake, large), seen(fake) as found:
        fake.gpuops.gather(x, fake.gpuops.to_device(indices), axis=1, out=out)
    assert found["launches"] == SORTING
    same(out.to_host(), x[:, indices])


def test_a_bad_index_among_sorted_ones(fake, large):
    """The first of them is raised, and its row is zeros."""
    x = large.reshape(-1, 256)
    indices = many(written(x, positions(3000, len(x))))
    bad = indices.copy()
    bad[[40, 50_000]] = len(x) + 3, -len(x) - 1
    out = fake.gpuops.empty((MANY, 256), "u1")
    with locked_by_somebody_else(fake, large), seen(fake) as found:
        fake.gpuops.gather(x, fake.gpuops.to_device(bad), out=out)
    assert found["launches"] == SORTING
    with pytest.raises(IndexError, match=f"index {len(x) + 3} is out of bounds for axis 0"):
        out.to_host()
    expected = x[indices]
    expected[[40, 50_000]] = 0
    same(out.to_host(), expected)


def test_no_memory_to_sort_in(fake, unlimited, large):
    """Then the rows are read as they come."""
    x = large.reshape(-1, 256)
    indices = many(written(x, positions(3000, len(x))))
    given, out = fake.gpuops.to_device(indices), fake.gpuops.empty((MANY, 256), "u1")
    fake.gpuops.empty_cache()
    used = fake.gpuops.memory_info().used
    for room in (0, 200_000, 500_000, 750_000, 1_000_000):
        out.fill(0)
        fake.gpuops.memory_limit(used + room)
        with locked_by_somebody_else(fake, large), seen(fake) as found:
            fake.gpuops.gather(x, given, out=out)
        fake.gpuops.memory_limit(None)
        assert found["launches"] == 1
        same(out.to_host(), x[indices])
        assert fake.gpuops.memory_info().used == used


# Errors.


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", ["i4", "u8"])
@pytest.mark.parametrize("row_bytes", [8, 1000, 9000])
def test_a_bad_index_into_memory_of_the_device(gpuops, pinned, dtype, row_bytes):
    """Leaves zeros, and is raised by who waits; the others are there."""
    x = table_of(row_bytes) | 1
    indices = np.array([3, len(x), 5, len(x) + 1, 7], dtype)
    with gpuops.pin(x) if pinned else contextlib.nullcontext():
        for given in (indices, gpuops.to_device(indices)):
            out = gpuops.empty((5, row_bytes), "u1")
            gpuops.gather(x, given, out=out)
            text = f"index {len(x)} is out of bounds for axis 0 with size {len(x)}"
            with pytest.raises(IndexError, match=text):
                out.to_host()
            found = out.to_host()
            assert not found[[1, 3]].any()
            same(found[::2], x[[3, 5, 7]])


def test_a_bad_index_in_windows(gpu, limited):
    x, indices, _, out, _ = windows_of(gpu, TABLE_BYTES // 16, MEBI)
    gpu.gpuops.memory_limit(None)
    indices[[10, 5000]] = len(x) + 1, len(x)
    there = gpu.gpuops.to_device(indices)
    gpu.gpuops.memory_limit(gpu.gpuops.memory_info().used + MEBI)
    gpu.gpuops.gather(x, there, out=out)
    with pytest.raises(IndexError, match=f"index {len(x) + 1} is out of bounds"):
        out.to_host()
    good = (indices >= -len(x)) & (indices < len(x))
    expected = np.where(good[:, None], x[np.where(good, indices, 0)], 0)
    same(out.to_host(), expected.astype(np.uint8))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("indices", [[1, 2, 1 << 40], [-4000, 5], [10, 2999, 3000, 3001]])
def test_a_bad_index_leaves_out_as_it_was(gpuops, pinned, indices):
    x = table_of(1000)[:3000]
    out = np.full((len(indices), 1000), 77, np.uint8)
    text = "index (1099511627776|-4000|3000) is out of bounds for axis 0 with size 3000"
    locked = gpuops.pin(x) if pinned else contextlib.nullcontext()
    with locked, pytest.raises(IndexError, match=text):
        gpuops.gather(x, indices, out=out, device="cuda")
    assert (out == 77).all()


def test_nothing_is_taken(gpuops):
    """From much, or from nothing; the indices are looked at all the same."""
    x = table_of(1000)
    none = gpuops.to_device(np.zeros((0, 2), int))
    assert gpuops.gather(x, none).shape == (0, 2, 1000)
    assert gpuops.gather(x[:, :0], gpuops.to_device([1, 2])).shape == (2, 0)
    result = gpuops.gather(x[:, :0], gpuops.to_device([1, 9000]))
    with pytest.raises(IndexError, match="index 9000 is out of bounds"):
        result.to_host()
    result = gpuops.gather(x[:0], gpuops.to_device([1]), mode="fill", fill_value=3)
    same(result.to_host(), np.full((1, 1000), 3, np.uint8))


def test_a_captured_stream_takes_no_table_of_the_host(fake):
    stream = fake.gpuops.Stream()
    there = fake.gpuops.to_device([1, 2], stream=stream)
    out = fake.gpuops.empty((2, 1000), "u1", stream=stream)
    x = table_of(1000)
    for table in (x, x[:3], fake.fake.page_locked(x)):
        fake.fake.set_capturing(stream.ptr, True)
        try:
            with pytest.raises(ValueError, match="captured into a graph"):
                fake.gpuops.gather(table, there, out=out, stream=stream)
        finally:
            fake.fake.set_capturing(stream.ptr, False)
    assert fake.fake.library.cudaFreeHost(ctypes.c_void_p(table.ctypes.data)) == 0


# Order.


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("rows", [20, 3000])
def test_the_table_may_change_after_the_call(in_any_order, pinned, rows):
    """And what was queued on the stream before comes before."""
    gpuops = in_any_order.gpuops
    stream, other = gpuops.Stream(), gpuops.Stream()
    x = table_of(1000)[:3000]
    indices = positions(rows, len(x))
    with gpuops.pin(x) if pinned else contextlib.nullcontext():
        expected = x[indices]
        empty = gpuops.to_device(np.zeros(rows, int), stream=other)
        gpuops.gather(gpuops.to_device(indices), np.arange(rows), out=empty, stream=other)
        out = gpuops.empty(expected.shape, "u1", stream=other)
        out.fill(1)
        gpuops.gather(x, empty, out=out, stream=stream)
        x[...] = 0
        same(out.to_host(), expected)


def test_a_part_of_the_table_is_locked_half_way(fake):
    """What was ordinary memory at the begin of the call may be the GPU's to read by its end."""
    fake.fake.set_scheduler("lazy")
    x, pins = table_of(1000)[:1000], []
    indices = many(positions(1000, len(x)))
    expected = x[indices]
    out = fake.gpuops.empty(expected.shape, "u1")

    def visit(name, _):
        if not pins and name == "cudaMemcpyAsync":  # of the indices
            pins.append(fake.gpuops.pin(x[100:]))

    with fake.fake.visit(visit):
        fake.gpuops.gather(x, indices, out=out)
    x[...] = 0
    same(out.to_host(), expected)
    pins[0].release()


def test_rows_in_place_wait_for_nothing_before(fake):
    """Neither for what the stream has to do, nor for the driver to tell what memory is free."""
    x = table_of(1000)
    indices = fake.gpuops.to_device(positions(100, len(x)))
    out = fake.gpuops.empty((100, 1000), "u1")
    with fake.gpuops.pin(x):
        calls = {
            name: fake.fake.calls(name) for name in ("cudaMemGetInfo", "cudaStreamSynchronize")
        }
        fake.gpuops.gather(x, indices, out=out)
        for name, count in (("cudaMemGetInfo", 0), ("cudaStreamSynchronize", 1)):
            assert fake.fake.calls(name) - calls[name] == count, name


def test_indices_may_change_after_the_call(in_any_order):
    gpuops = in_any_order.gpuops
    x = table_of(1000)[:3000]
    for pinned in (False, True):
        for rows in (20, 3000):
            indices = positions(rows, len(x))
            expected = x[indices]
            out = gpuops.empty(expected.shape, "u1")
            with gpuops.pin(indices) if pinned else contextlib.nullcontext():
                gpuops.gather(x, indices, out=out)
                indices[...] = 1 << 60
            same(out.to_host(), expected)


def test_threads_gather_from_one_table(fake):
    """Some of them in place, some on the host, while the table is locked and unlocked."""
    gpuops, x = fake.gpuops, table_of(1000)[:3000]

    def gather(seed):
        with gpuops.device(f"cuda:{seed // 4}"):
            for turn in range(4):
                indices = positions(100, len(x), seed=10 * seed + turn)
                with gpuops.pin(x) if seed == 0 else contextlib.nullcontext():
                    out = gpuops.empty((100, 1000), "u1", stream=gpuops.Stream())
                    gpuops.gather(x, indices, out=out)
                    same(out.to_host(), x[indices])
                    same(gpuops.gather(x, indices, device="cuda"), x[indices])

    run_threads([functools.partial(gather, seed) for seed in range(8)])


def test_without_page_locked_buffers(fake):
    run_child(
        fake.gpuops,
        """
import sys, numpy as np
import gpuops
x = np.arange(16 << 18, dtype=np.uint32).reshape(-1, 1024)
i = np.random.default_rng(0).integers(0, len(x), 1100)
out = gpuops.empty((1100, 1024), np.uint32, device=0)
for table in (x, np.concatenate([x, x])):
    gpuops.gather(table, i, out=out)
    assert (out.to_host() == table[i]).all()
""",
        GPUOPS_PINNED_LIMIT="0",
    )
