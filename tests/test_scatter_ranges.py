"""scatter and scatter_add of many numbers on the CPU, which are dealt out by ranges of places.

How that is done depends on the number of workers, which a process chooses once. So every check runs
in processes of its own.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers import run_child

LARGE = 1_100_001  # places, for which two workers are enough if they have four bytes each
SMALL = 2000
MANY = 600_000  # numbers, enough for any way
SOME = 150_000  # enough for a large table
SEVERAL = 2_200_000  # more than are dealt out at a time


def rough(random, count, dtype):
    """Numbers whose sum is another one in every order."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, count, dtype, endpoint=True)
    numbers = random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)
    return (numbers * (1 - 2j) + 1j if dtype.kind == "c" else numbers).astype(dtype)


def check_call(gpuops, x, indices, values, axis=0, **options):
    """Both functions beside NumPy's, bit for bit; x stays as it is."""
    places = np.asarray(indices)
    size = x.shape[axis]
    if options.get("mode") == "wrap":
        places = places % size
    elif options.get("mode") == "clip":
        places = np.clip(places, 0, size - 1)
    values = np.broadcast_to(values, (*places.shape, *x.shape[1:]))
    if options.get("mode") == "fill":
        inside = (places >= -size) & (places < size)
        places, values_inside = places[inside], values[inside]
    else:
        values_inside = values
    for name in ("scatter", "scatter_add"):
        expected, result = x.copy(), x.copy()
        if x.strides != result.strides:  # the same distances as in x
            room = np.zeros(2 * len(x), x.dtype)
            result = room[::2] if x.strides[0] > 0 else room[: len(x)][::-1]
            result[...] = x
        if name == "scatter":
            expected[places] = values_inside
        elif x.dtype.itemsize == 2 and x.dtype.kind not in "iu":
            wide = x.astype(np.float32)
            np.add.at(wide, places, values_inside.astype(np.float32))
            with np.errstate(over="ignore"):
                expected = wide.astype(x.dtype)
        else:
            np.add.at(expected, places, values_inside)
        getattr(gpuops, name)(result, indices, values, device="cpu", **options)
        assert result.tobytes() == expected.tobytes(), (name, x.dtype, x.shape, options)


def check_dtypes(gpuops):
    random = np.random.default_rng(1)
    for dtype in ("f4", "f8", "i8", "u4", "i2", "c8", "c16", "f2", ml_dtypes.bfloat16):
        for count, size in ((SOME, LARGE), (MANY, SMALL)):
            x = rough(random, size * 2, dtype)[:size]
            check_call(gpuops, x, random.integers(-size, size, count), rough(random, count, dtype))
    x = rough(random, 4 * LARGE, "i1")
    check_call(gpuops, x, random.integers(0, len(x), SOME), rough(random, SOME, "i1"))


def check_indices(gpuops):
    random = np.random.default_rng(2)
    x = rough(random, LARGE, "f4")
    values = rough(random, SOME, "f4")
    for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"):
        info = np.iinfo(dtype)
        lowest, highest = max(info.min, -LARGE), min(info.max, LARGE - 1)
        check_call(gpuops, x, random.integers(lowest, highest, SOME).astype(dtype), values)
    outside = random.integers(-3 * LARGE, 3 * LARGE, SOME)
    for mode in ("wrap", "clip", "fill"):
        check_call(gpuops, x, outside, values, mode=mode)
        check_call(gpuops, x.astype("f2"), outside, values.astype("f2"), mode=mode)


def check_orders(gpuops):
    """Numbers that are not spread over the table."""
    random = np.random.default_rng(3)
    for dtype in ("f4", "f2"):
        x = rough(random, LARGE, dtype)
        values = rough(random, SOME, dtype)
        for indices in (
            np.full(SOME, LARGE - 1),
            np.sort(random.integers(0, LARGE, SOME)),
            np.arange(SOME)[::-1] * 2,
            random.integers(0, 2, SOME) * (LARGE - 1),
            (random.random(SOME) ** 8 * LARGE).astype(int),
        ):
            check_call(gpuops, x, indices, values)


def check_batches(gpuops):
    random = np.random.default_rng(4)
    for dtype in ("f4", "f2"):
        x = rough(random, LARGE, dtype)
        indices = random.integers(0, LARGE, SEVERAL)
        check_call(gpuops, x, indices, rough(random, SEVERAL, dtype))


def check_long_tables(gpuops):
    """Of which no range is as short as it should be: there would be too many."""
    random = np.random.default_rng(6)
    for dtype in ("f4", "f2"):
        x = rough(random, 12_000_001, dtype)
        indices = random.integers(0, len(x), 2 * SOME)
        check_call(gpuops, x, indices, rough(random, 2 * SOME, dtype))
    # As many ranges as there may be, and one more, since no line begins where the table does.
    x = rough(random, (1 << 24) + 1, "i2")[1:]
    indices = np.r_[random.integers(0, len(x), 2 * SOME), len(x) - 1]
    check_call(gpuops, x, indices, rough(random, len(indices), "i2"))


def check_layouts(gpuops):
    random = np.random.default_rng(5)
    indices = random.integers(-LARGE, LARGE, SOME)
    for dtype in ("f4", "f2"):
        values = rough(random, 3 * SOME, dtype)
        for x in (rough(random, 2 * LARGE, dtype)[::2], rough(random, LARGE, dtype)[::-1]):
            check_call(gpuops, x, indices, values[::3])
            check_call(gpuops, x, indices, values[0])
        check_call(gpuops, x, indices.reshape(300, -1), values[:SOME].reshape(-1, 300).T)
        check_call(gpuops, x, indices.reshape(300, -1), values[: SOME // 300])
    rows = (4001, 3, "f2"), (LARGE, 16, "f2"), (500, 40, "f2"), (LARGE, 2, "f4"), (LARGE, 2, "f8")
    for size, width, dtype in rows:
        x, values = rough(random, size * width, dtype), rough(random, SOME * width, dtype)
        places = random.integers(-size, size, SOME)
        check_call(gpuops, x.reshape(-1, width), places, values.reshape(-1, width))


def check_what_is_left(gpuops):
    """Of places without an index the bits stay, which a sum of zeros would change."""
    for dtype, bits in ((np.float32, 0x7FA00001), (np.float16, 0x7D01)):
        x = np.zeros(LARGE, dtype)
        whole = x.view(f"u{x.itemsize}")
        whole[...] = bits
        named = np.arange(0, LARGE, 3)
        x[named] = -0.0
        gpuops.scatter_add(x, np.tile(named, 2), dtype(1), device="cpu")
        assert (x[named] == 2).all()
        assert (np.delete(whole, named) == bits).all()
        before = x.copy()
        wrong = np.tile(named, 8)
        wrong[-1] = LARGE
        with pytest.raises(IndexError, match=f"^index {LARGE} is out of bounds"):
            gpuops.scatter_add(x, wrong, dtype(1), device="cpu")
        assert x.tobytes() == before.tobytes()


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}
del CHECKS["check_call"]


@pytest.mark.parametrize("threads", [1, 4, 8])
@pytest.mark.parametrize("check", CHECKS)
def test_ranges(cpu_device, check, threads):
    source = f"import gpuops, test_scatter_ranges\ntest_scatter_ranges.{check}(gpuops)"
    run_child(cpu_device.gpuops, source, timeout=120, GPUOPS_NUM_THREADS=str(threads))


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_without_memory_for_what_is_dealt_out(cpu_device, dtype):
    source = f"""
import resource
import numpy as np
import gpuops
from test_scatter_ranges import LARGE

count = 16 << 20
x, indices = np.zeros(LARGE, "{dtype}"), np.arange(count, dtype=np.int32) % LARGE
gpuops.scatter_add(x, indices[:1000], x.dtype.type(0), device="cpu")
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), -1))
try:
    gpuops.scatter_add(x, indices, x.dtype.type(1), device="cpu")
    added = 1
except MemoryError as error:
    print(str(error).rpartition(": ")[2])
    added = 0
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert (x == added * np.bincount(indices, minlength=LARGE)).all()
"""
    printed = run_child(cpu_device.gpuops, source, GPUOPS_NUM_THREADS="4")
    sorting = f"{16 << 25} bytes to sort indices\n"
    assert printed == ("" if dtype == "f4" else sorting)


def test_a_writer_beside(cpu_device):
    """An index that goes bad after all were looked at is left out."""
    source = f"""
import threading
import numpy as np
import gpuops
from numpy.lib.stride_tricks import as_strided

size, count = {LARGE}, {SOME}
room = np.full(3 * size, -7.0)
x = room[size : 2 * size]
x[:] = 0
indices = np.arange(count)
flipping = indices[:: count // 3]
good = flipping.copy()
flips = as_strided(flipping, (40_000, len(flipping)), (0, flipping.strides[0]))
written = np.tile([good, good + (1 << 40), good, good - (1 << 40)], (10_000, 1))
stop = threading.Event()

def write():
    while not stop.is_set():
        np.copyto(flips, written)

outcomes = {{"value": 0, "error": 0}}
writer = threading.Thread(target=write)
writer.start()
try:
    while min(outcomes.values()) < 4:
        try:
            gpuops.scatter_add(x, indices, 1.0, device="cpu")
            outcomes["value"] += 1
        except IndexError:
            outcomes["error"] += 1
finally:
    stop.set()
    writer.join()
steady = np.setdiff1d(np.arange(count), good)
assert (x[steady] == outcomes["value"]).all()
assert (x[good] <= outcomes["value"]).all() and (x[count:] == 0).all()
assert (room[:size] == -7).all() and (room[2 * size :] == -7).all()
"""
    run_child(cpu_device.gpuops, source, timeout=180, GPUOPS_NUM_THREADS="2")


@pytest.mark.not_under_tsan("has a thread of its own, which is counted")
def test_long_rows_are_much_work(cpu_device):
    """So are they for more than one worker, also when there are few of them."""
    source = """
import os
import numpy as np
import gpuops

def started():
    return len(os.listdir("/proc/self/task"))

count = 10_000
indices = np.arange(count) % 1000
before = started()
numbers, rows = np.zeros(1000, np.float16), np.zeros((1000, 40), np.float16)
gpuops.scatter_add(numbers, indices, np.float16(1), device="cpu")
between = started()
gpuops.scatter_add(rows, indices, np.ones((count, 40), np.float16), device="cpu")
assert (numbers == 10).all() and (rows == 10).all()
print(between - before, started() - between)
"""
    output = run_child(cpu_device.gpuops, source, GPUOPS_NUM_THREADS="3")
    assert output.split() == ["0", "2"]
