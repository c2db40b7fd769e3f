"""device="auto", explain and last_route: the cost model, what it is measured by, and its choices.

The cost model is the process's, so that all this happens in processes of their own, with rates that
the test has made up, in a cache of their own.
"""

import importlib
import itertools
import json
import math
import re
import time

import numpy as np
import pytest
from helpers import constant, run_child, same
from operators import EXAMPLES, OPERATORS, ROOT, required_arguments

from gpuops import _calibration

WORKS = ("elements", "rows", "products", "filters")

# A machine with a fast GPU behind a slow link, where a unit of work takes the CPU a nanosecond.
RATES = {"integer_factor": 10.0, "gpu_double_factor": 2.0, "gpu_short_factor": 0.125}
for way in ("up", "down"):
    RATES |= {f"{way}_small": 4e-11, f"{way}_middle": 8e-22**0.5}  # half of the way
    RATES |= {f"{way}_large": 2e-11, f"{way}_far": 2e-11}
RATES |= {"up_locked": 2e-11, "part_start": 1e-9, "slab_start": 1e-5}
for operator in OPERATORS:
    RATES |= {f"{operator.name}.cpu_{size}": 1e-9 for size in ("small", "large", "far")}
    RATES |= {f"{operator.name}.gpu": 1e-12, f"{operator.name}.start": 1e-5}

# A machine with an H200 behind PCIe 5 and 16 threads, on which whole calls were timed.
H200 = {"integer_factor": 20.0, "gpu_double_factor": 2.0, "gpu_short_factor": 0.125}
for way in ("up", "down"):
    H200 |= {f"{way}_small": 8e-11, f"{way}_middle": 8e-11}
    H200 |= {f"{way}_large": 1 / 41e9, f"{way}_far": 1 / 41e9}
H200 |= {"up_locked": 1 / 55e9, "part_start": 8e-5, "slab_start": 1e-5}
for names, on_cpu, on_gpu, start in [
    ("add multiply saxpy", (5e-11, 8e-12, 1e-11), 3.3e-13, 27e-6),
    ("sigmoid sigmoid_backward", (8e-11, 1.4e-11, 1.4e-11), 3.3e-13, 27e-6),
    ("gather take take_along_axis", (1.3e-11, 4.4e-12, 1.3e-11), 3.3e-13, 27e-6),
    ("scatter scatter_add", (2.6e-11, 1e-11, 2.6e-11), 6e-13, 30e-6),
    ("matmul", (1.9e-11, 4.8e-12, 1.8e-12), 4e-14, 30e-6),
    ("correlate convolve", (8e-11, 1e-11, 1e-11), 5e-13, 35e-6),
]:
    for name in names.split():
        sizes = zip(("small", "large", "far"), on_cpu, strict=True)
        H200 |= {f"{name}.cpu_{size}": rate for size, rate in sizes}
        H200 |= {f"{name}.gpu": on_gpu, f"{name}.start": start}

# Sources of child processes begin with this.
PRELUDE = f"""
import importlib, json, os, sys, time
import numpy as np
import gpuops
sys.path.insert(0, {str(ROOT / "tests")!r})
from faults.fake import Fake
from operators import EXAMPLES, OPERATORS, is_in_place, required_arguments
from pathlib import Path

cache = importlib.import_module(gpuops.__name__ + "._cache")
calibration = importlib.import_module(gpuops.__name__ + "._calibration")
calibration._MOST_WAITING = 2  # for processors, which other tests may have: it is a part
cudart = Path(gpuops.__path__[0]).parent / "cudart"
fake = Fake(cudart) if cudart.is_dir() else None
launches = lambda: fake.calls("cudaLaunchKernel")

rates = json.loads({json.dumps(RATES)!r})

def key(work="elements"):
    return cache.key_of([*calibration._machine(0), work.encode()])

def keep(**changed):
    rates.update(changed)
    for work in {WORKS}:
        cache.store(key(work), json.dumps(rates).encode(), cache.CALIBRATION)

def kept(work="elements"):
    found = cache.load(key(work), cache.CALIBRATION)
    return None if found is None else json.loads(found)

def no_measuring(ordinal, work):
    raise AssertionError("this machine was measured")

def candidates(*args, **keywords):
    return {{c.way: c for c in gpuops.explain(*args, **keywords).candidates}}

def near(a, b):
    assert abs(a - b) <= 1e-6 * abs(b), (a, b)

x = np.arange(1 << 18, dtype="f4")
"""


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def child(fake_device, tmp_path):
    """Runs source after PRELUDE, on the fake runtime, with an empty cache."""

    def run(source, **environment):
        environment = {"GPUOPS_CACHE_DIR": str(tmp_path / "cache"), **environment}
        return run_child(fake_device.gpuops, PRELUDE + source, **environment)

    return run


# The model, for which only the candidates are looked at.


def test_the_bytes_that_each_way_moves(child):
    child("""
keep()
def bytes_of(*args, **keywords):
    found = candidates(*args, **keywords)
    assert found["cpu"].bytes_up == found["cpu"].bytes_down == 0
    return found["cuda"].bytes_up, found["cuda"].bytes_down
n = 4096
f4, f8, i8 = np.ones(n, "f4"), np.ones(n, "f8"), np.zeros(100, "i8")
assert bytes_of("add", f4, f4) == (2 * 4 * n, 4 * n)
assert bytes_of("add", f4, f8) == (2 * 8 * n, 8 * n)  # both go up as what is computed in
assert bytes_of("add", f4, 1) == (4 * n, 4 * n)  # a number goes with the arguments of a kernel
assert bytes_of("add", np.ones((8, 1), "f4"), f4) == (4 * 8 + 4 * n, 4 * 8 * n)
assert bytes_of("add", np.broadcast_to(f4, (8, n)), f4) == (2 * 4 * n, 4 * 8 * n)
assert bytes_of("sigmoid", f4) == (4 * n, 4 * n)
assert bytes_of("saxpy", 2.0, f4, f4) == (2 * 4 * n, 4 * n)
assert bytes_of("gather", f4, i8) == (4 * n + 800, 400)
assert bytes_of("gather", np.ones((n, 3), "f4"), i8) == (12 * n + 800, 1200)
assert bytes_of("scatter", f4, i8, np.float32(1)) == (4 * n + 800, 4 * n)
assert bytes_of("scatter_add", f4, i8, np.ones(100, "f4")) == (4 * n + 1200, 4 * n)
assert bytes_of("matmul", np.ones((8, 9)), np.ones((9, 4))) == (8 * (72 + 36), 8 * 32)
assert bytes_of("correlate", np.ones((32, 32), "f4"), np.ones((3, 3))) == (4096, 4096)
""")


def test_the_time_that_each_way_takes(child):
    child("""
keep(part_start=1e-4, **{"add.cpu_far": 1e-15})
def times(*args, **keywords):
    found = candidates(*args, **keywords)
    return found["cpu"].seconds, found["cuda"].seconds
n = 1 << 21
cpu, cuda = times("add", np.ones(n, "f4"), np.zeros(n, "f4"))
near(cpu, 12e-9 * n)
# Up to two parts nothing goes on at the same time; far above, the longest copy is most of it.
copy = 4 * n * 2e-11 * 2 ** (1 / 6)  # of 8 MiB, between those of 2 and of 16 MiB
near(cuda, 1e-5 + 3 * copy + n * 12e-12)
few = 1 << 14
cpu, cuda = times("sigmoid", np.ones(few, "f4"))
near(cpu, 8e-9 * few)
near(cuda, 1e-5 + few * (8 * 4e-11 + 8e-12))
for size, parts in [(32 << 20, 1), ((32 << 20) + 1, 3), (1 << 28, 16), (1 << 30, 32)]:
    cpu, cuda = times("add", np.empty(size, "i1"), np.int8(1))
    copy, work, begun = size * 2e-11, 2e-12 * size, parts * 1e-4 * (parts > 1)
    assert abs(cuda / (1e-5 + begun + copy + (copy + work) / parts) - 1) < 1e-5, (size, cuda)
# Rows: what is moved, and the lines that are touched for it.
i = np.zeros(1 << 16, "i8")
cpu, cuda = times("gather", np.ones(n, "f4"), i)
near(cpu, 1e-9 * (1 << 16) * (4 + 8 + 64))
cpu, cuda = times("gather", np.ones((n // 64, 64), "f4"), i)
near(cpu, 1e-9 * (1 << 16) * (256 + 8 + 256))
# Sums: multiplications of float32, what others are worth of these, and no less than the memory.
a = np.ones((256, 256), "f4")
cpu, cuda = times("matmul", a, a)
near(cpu, 1e-9 * 256**3)
for dtype, on_cpu, on_gpu in [("f8", 2, 2), ("c8", 4, 4), ("c16", 8, 8), ("i4", 10, 4)]:
    b = a.astype(dtype)
    cpu, cuda = times("matmul", b, b)
    near(cpu, on_cpu * 1e-9 * 256**3)
    half = b[:, :128].copy().T[:, :64], b[:64, :128].copy()  # 32 Ki elements at most
    cpu, cuda = times("matmul", *half)
    near(cuda, 1e-5 + 3 * 128 * 64 * b.itemsize * 4e-11 + (128 * 128 - 8192) * b.itemsize * 4e-11
         + on_gpu * 1e-12 * 64 * 128**2)
cpu, cuda = times("correlate", a, np.ones((5, 5), "f4"))
near(cpu, 1e-9 * 25 * 256**2)
cpu, cuda = times("correlate", a.astype("f8"), np.ones((5, 5), "f4"))
near(cpu, 2e-9 * 25 * 256**2)
cpu, cuda = times("matmul", np.ones((1, 1 << 20), "f4"), np.ones((1 << 20, 1), "f4"))
near(cpu, 1e-9 * (8 << 20))
""")


def test_rates_lie_between_those_that_were_measured(child):
    child("""
keep(**{f"{name}.cpu_small": 1e-10 for name in ("sigmoid", "add")})
def rate(count):
    return candidates("sigmoid", np.ones(count, "f4"))["cpu"].seconds / (8 * count)
found = [rate(1 << power) for power in range(8, 24)]
assert found == sorted(found)
near(found[0], 1e-10)
near(found[-1], 1e-9)
""")


def test_rates_on_the_cpu_go_by_memory_or_by_the_sums(child):
    child("""
for size, rate in [("small", 1e-10), ("large", 4e-10), ("far", 1e-9)]:
    keep(**{f"{name}.cpu_{size}": rate for name in ("gather", "matmul", "correlate")})
    keep(**{f"add.cpu_{size}": 1e-15})
keep(**{"add.cpu_far": 1e-8})
def rate_of_rows(places):
    return candidates("gather", np.empty(places, "f4"), np.zeros(8, "i8"))["cpu"].seconds / 8 / 76
near(rate_of_rows(1 << 14), 1e-10)
near(rate_of_rows(1 << 18), 2e-10)  # half of the way to 4 Mi
near(rate_of_rows(4 << 20), 4e-10)
near(rate_of_rows(48 << 20), 1e-9)
near(rate_of_rows(1 << 30), 1e-9)
# Rows, up to a line of each, and indices that are more than what was measured go through memory.
def beyond(name, rows, columns, *values, index="i8"):
    x, indices = np.empty((4 << 20, columns), "f4"), np.zeros(rows, index)
    seconds = candidates(name, x, indices, *values, axis=0)["cpu"].seconds
    lines = max(4 * columns, 64)
    rate = 4e-10 if name == "gather" and columns == 1 else 1e-9
    return seconds - rate * rows * (lines + 4 * columns + indices.itemsize)
assert abs(beyond("gather", 1 << 20, 1)) < 1e-9
near(beyond("gather", 4 << 20, 1), 1e-8 * (36 << 20))
near(beyond("gather", 4 << 20, 1, index="i4"), 1e-8 * (20 << 20))
near(beyond("gather", 2 << 20, 16), 1e-8 * (132 << 20))
near(beyond("gather", 2 << 20, 256), 1e-8 * (132 << 20))
assert abs(beyond("scatter", 4 << 20, 1, 0)) < 1e-9
def rate_of_sums(rows, depth, columns):
    a, b = np.ones((rows, depth), "f4"), np.ones((depth, columns), "f4")
    return candidates("matmul", a, b)["cpu"].seconds / (rows * depth * columns)
near(rate_of_sums(64, 64, 64), 1e-10)
near(rate_of_sums(4, 1 << 16, 1), 1e-10)  # whatever memory that takes
near(rate_of_sums(128, 128, 128), 2e-10)
near(rate_of_sums(256, 256, 256), 4e-10)
near(rate_of_sums(1024, 512, 1024), 1e-9)
# Once all threads are at work, further sums come at a rate of their own.
large, far, sums = 256**3, 1024 * 512 * 1024, 512**3
seconds = 4e-10 * large + (1e-9 * far - 4e-10 * large) * (sums - large) / (far - large)
near(rate_of_sums(512, 512, 512), seconds / sums)
def rate_of_filter(height, width, side):
    image, weights = np.empty((height, width), "f4"), np.ones((side, side), "f4")
    found = candidates("correlate", image, weights)["cpu"].seconds
    return found / (height * width * side * side)
near(rate_of_filter(64, 64, 8), 1e-10)
near(rate_of_filter(512, 512, 8), 4e-10)
near(rate_of_filter(2048, 2048, 5), 1e-9)
near(rate_of_filter(4096, 4096, 5), 1e-9)
""")


def test_nothing_computes_faster_than_memory_adds(child):
    child("""
keep(**{"multiply.cpu_small": 1e-12, "matmul.cpu_small": 1e-15})
near(candidates("multiply", x[:100], x[:100])["cpu"].seconds, 1e-9 * 1200)
a = np.ones((10, 10), "f4")
near(candidates("matmul", a, a)["cpu"].seconds, 1e-9 * 1200)
""")


def test_middle_copies_are_the_shortest_that_workers_make():
    middle = constant("gpuops.h", "MIDDLE_COPY_BYTES")
    assert middle == constant("transfer.cu", "LEAST_RING_BYTES")


def test_copies_go_by_rates_of_four_lengths(child):
    child("""
keep(up_small=9e-11, up_middle=8e-11, up_large=4e-11, up_far=2e-11, **{"gather.gpu": 1e-15},
     down_small=18e-11, down_middle=16e-11, down_large=8e-11, down_far=4e-11)
i = np.zeros(1, "i8")
def rate_up(nbytes):
    found = candidates("gather", np.empty(nbytes // 4, "f4"), i)["cuda"]
    assert found.bytes_up == nbytes + 8
    return (found.seconds - 1e-5) / nbytes
def rate_down(nbytes):
    found = candidates("gather", np.empty((1, nbytes // 4), "f4"), i)["cuda"]
    assert found.bytes_down == nbytes
    return (found.seconds - 1e-5) / nbytes - rate_up(nbytes)
beyond = lambda mib: (16 * 4e-11 + (mib - 16) * 2e-11) / mib
for nbytes, up in [(64 << 10, 9e-11), (256 << 10, 9e-11), (2 << 20, 8e-11), (16 << 20, 4e-11),
                   ((2 << 20) - 4, 9e-11), (4 << 20, 8e-11 * (1 / 2) ** (1 / 3)),
                   (17 << 20, beyond(17)), (48 << 20, beyond(48)), (1 << 30, beyond(1024))]:
    assert abs(rate_up(nbytes) / up - 1) < 1e-2, (nbytes, rate_up(nbytes))
    assert abs(rate_down(nbytes) / (2 * up) - 1) < 1e-2, (nbytes, rate_down(nbytes))
""")


@pytest.mark.parametrize("memory", [5e-12, 2e-11])
def test_copies_both_ways_are_no_faster_than_memory(child, memory):
    child(f"""
keep(**{{"sigmoid.gpu": 1e-15, "add.cpu_far": {memory}}})
x = np.empty(1 << 28, "f4")
seconds = candidates("sigmoid", x)["cuda"].seconds
expected = x.nbytes * max((1 + 1 / 32) * 2e-11, 2 * {memory})
assert abs(seconds / (1e-5 + expected) - 1) < 1e-3, seconds
""")


@pytest.mark.parametrize("locked", ["", "x", "out", "x out", "x in place"])
def test_copies_of_page_locked_memory_leave_the_host_alone(child, locked):
    """Those take half as long here, and the host has no more to do than the other ones."""
    child(f"""
keep(up_locked=1e-11, **{{"sigmoid.gpu": 1e-15, "add.cpu_far": 3e-11}})
count, locked = 1 << 24, {locked!r}
x = gpuops.pinned_empty(count, "f4") if "x" in locked else np.empty(count, "f4")
out = gpuops.pinned_empty(count, "f4") if "out" in locked else np.empty(count, "f4")
if locked == "x in place":
    out = x
seconds = candidates("sigmoid", x, out=out)["cuda"].seconds
of_host = 3e-11 * x.nbytes * (("x" not in locked) + (locked in ("", "x")))
of_bus = [x.nbytes * (2e-11 if pageable else 1e-11)
          for pageable in ("x" not in locked, locked in ("", "x"))]
expected = max(of_host, max(of_bus) + min(of_bus) / 4)  # one part of four goes alone
assert abs(seconds / (1e-5 + expected) - 1) < 1e-3, (seconds, expected)
""")


def test_page_locked_operands_that_do_not_go_in_parts(child):
    child("""
keep(up_locked=1e-11)
x, i = gpuops.pinned_empty(8 << 20, "f4"), np.zeros(100, "i8")
found = candidates("scatter", x, i, np.float32(1))["cuda"].seconds
locked = found - candidates("scatter", np.empty(8 << 20, "f4"), i, np.float32(1))["cuda"].seconds
near(locked, 2 * x.nbytes * (1e-11 - 2e-11))
""")


def test_what_goes_through_a_slab_begins_sooner(child):
    child("""
keep(slab_start=2e-6, **{"correlate.start": 1e-2})
def start(*args):
    found = candidates(*args)["cuda"]
    return found.seconds - (found.bytes_up + found.bytes_down) * 4e-11
a = np.ones((64, 64), "f4")
near(start("matmul", a, a), 2e-6 + 1e-12 * 64**3)
near(start("matmul", a.astype("f8"), a.astype("f8")), 1e-5 + 2e-12 * 64**3)
i = np.zeros(100, "i8")
for places, seconds in [(1000, 2e-6), (1 << 15, 1e-5)]:
    found = start("gather", x[:places], i)
    near(found, seconds + 1e-12 * 100 * 76)
near(start("scatter", x[:1000], i, np.ones(100, "f4")), 1e-5 + 1e-12 * 100 * 76)
# Also where nobody asks CUDA, because the CPU takes less than the start.
result = gpuops.correlate(a, np.ones((5, 5), "f4"), device="auto")
assert gpuops.last_route().way == "cuda", gpuops.last_route()
gpuops.correlate(np.ones((100, 100), "f4"), np.ones((5, 5), "f4"), device="auto")
assert gpuops.last_route().way == "cpu"
fake.set_slab_bytes(0)
near(start("matmul", a, a), 1e-5 + 1e-12 * 64**3)
""")


def test_a_table_in_reach_is_read_in_place_as_gather_would(child):
    child("""
keep()
table = gpuops.pinned_empty(1 << 20, "f4")
few, many = np.zeros(100, "i8"), np.zeros(1 << 20, "i8")
found = candidates("gather", table, few)
near(found["zero-copy"].seconds, 1e-5 + 800 * 4e-11 + 100 / 600e6 + 400 * 4e-11 + 100 * 76e-12)
assert found["zero-copy"].bytes_up == 800 + 100 * 64
near(found["cuda"].seconds - found["zero-copy"].seconds, (4 << 20) * 2e-11 - 100 / 600e6)
found = candidates("gather", table, many)
assert found["cuda"].seconds < found["zero-copy"].seconds
# A small one goes up as a whole, and what is not page-locked too.
assert set(candidates("gather", table[: 1 << 18], few)) == {"cpu", "cuda"}
assert set(candidates("gather", np.ones(1 << 20, "f4"), few)) == {"cpu", "cuda"}
""")


def test_a_table_in_reach_is_read_in_place_where_that_is_the_fastest(child):
    child("""
keep(**{"gather.cpu_small": 1e-6, "gather.cpu_large": 1e-6, "gather.cpu_far": 1e-6})
table = gpuops.pinned_empty((1 << 16, 64), "f4")
table[...] = np.arange(table.size).reshape(table.shape)
indices = np.random.default_rng(0).integers(-len(table), len(table), 3000)
expected = gpuops.explain("gather", table, indices, device="auto").chosen
gpuops.empty_cache()
most, before = 0, fake.live().bytes
def look(name, with_gil):
    global most
    most = max(most, fake.live().bytes - before)
with fake.visit(look):
    result = gpuops.gather(table, indices, device="auto")
assert (result == table[indices]).all()
route = gpuops.last_route()
assert route.way == "zero-copy" and route[1:6] == expected, (route, expected)
assert route.elapsed_seconds > 0
assert most < table.nbytes // 4, most  # the table did not go up
""")


def test_last_route_tells_what_gather_does_with_a_table(child):
    """Which it finds out by itself, from the indices and by how much memory there is."""
    child("""
keep()
table, locked = np.arange(1 << 20, dtype="f4"), gpuops.pinned_empty(1 << 20, "f4")
locked[...] = table
few, many = np.arange(5000, 5100), np.random.default_rng(0).integers(0, 1 << 20, 1 << 20)
apart = np.array([0, (1 << 20) - 1])

def taken(x, indices, **options):
    result = gpuops.gather(x, indices, **options)
    host = indices.to_host() if isinstance(indices, gpuops.DeviceArray) else indices
    assert (np.asarray(result.to_host() if "out" in options else result) == table[host]).all()
    found = gpuops.last_route()
    assert (found.operator, found.device) == ("gather", "cuda:0")
    return found.way, found.bytes_up, found.bytes_down

# Results on the host: the range of places, all of them, or the lines that the rows touch.
assert taken(table, few, device="cuda") == ("cuda", 800 + 400, 400)
assert taken(table, apart, device="cuda") == ("cuda", 16 + (4 << 20), 8)
assert taken(table[:9000], few, device="cuda") == ("cuda", 800 + 4 * 9000, 400)
assert taken(locked, many, device="cuda") == ("cuda", (8 << 20) + (4 << 20), 4 << 20)
expected = gpuops.explain("gather", locked, few, device="cuda")
assert expected.chosen.way == "zero-copy" and "asked for" in expected.reason
assert taken(locked, few, device="cuda") == ("zero-copy", 800 + 100 * 64, 400)
assert gpuops.last_route()[1:6] == expected.chosen
assert gpuops.explain("gather", locked, many, device="cuda").chosen.way == "cuda"
assert gpuops.explain("gather", table, few, device="cuda").chosen.way == "cuda"
# On the GPU: the rows alone, where threads gather them.
there, out = gpuops.to_device(few), gpuops.empty(100, "f4")
assert taken(table, few, out=out) == taken(table, there, out=out) == ("device", 400, 0)
assert taken(locked, few, out=out) == ("zero-copy", 800 + 100 * 64, 0)
assert gpuops.last_route()[5:] == (None, None)
assert taken(locked, there, out=out) == ("zero-copy", 100 * 64, 0)
assert taken(table, many, out=gpuops.empty(1 << 20, "f4")) == ("device", 12 << 20, 0)
assert taken(table[:9000], few, out=out) == ("device", 800 + 4 * 9000, 0)
# What is there many times goes up once; and flat, this one cannot be read in place.
x = np.broadcast_to(locked[:1000], (10_000, 1000))
gpuops.gather(x, few, device="cuda")
assert gpuops.last_route()[1:5] == ("cuda", "cuda:0", 800 + 4000, 400_000)
for width, way, up in [(1024, "zero-copy", 100 * 64), (1000, "cuda", 4 * 1024 * 500)]:
    x = locked.reshape(1024, 1024)[:, :width:2]
    assert gpuops.explain("take", x, few, device="cuda").chosen.way == way
    assert (gpuops.take(x, few, device="cuda") == x.take(few)).all()
    assert gpuops.last_route()[1:4] == (way, "cuda:0", 800 + up), gpuops.last_route()
# Where there is less memory than there seemed to be, it may end in place.
out = gpuops.empty(1 << 20, "f4")
there = gpuops.to_device(many)
assert taken(locked, there, out=out) == ("device", 4 << 20, 0)
with fake.fail(1, 2, mode="from then on", function="cudaMallocFromPoolAsync"):
    gpuops.empty_cache()
    assert taken(locked, there, out=out) == ("zero-copy", 64 << 20, 0)
""")


# What was the fastest way there; elements of float32, or the side of a matrix or an image.
CPU, CUDA = "cpu", "cuda"
EVERY = [1 << power for power in (0, *range(4, 29, 2))]
FASTEST = {
    **{name: dict.fromkeys(EVERY, CPU) for name in ("add", "multiply", "saxpy")},
    "sigmoid": dict.fromkeys(EVERY[:-2], CPU),  # above, either is as fast
    "sigmoid_backward": dict.fromkeys(EVERY, CPU),
    **{
        name: dict.fromkeys(EVERY[:10], CPU) | dict.fromkeys(EVERY[10:], CUDA)
        for name in ("gather", "take", "take_along_axis")  # of 4 Mi not always
    },
    **{
        name: dict.fromkeys(EVERY[:7], CPU) | dict.fromkeys((1 << 26, 1 << 28), CUDA)
        for name in ("scatter", "scatter_add")
    },
    "matmul": dict.fromkeys((1, 16, 64, 128), CPU) | dict.fromkeys((1024, 2048, 4096), CUDA),
    "correlate": dict.fromkeys((1, 16, 64, 128, 256, 512, 1024), CPU),
    "convolve": dict.fromkeys((1, 16, 64, 128, 256, 512, 1024), CPU),
}


@pytest.mark.parametrize("bus", [41e9, 53e9])
@pytest.mark.parametrize("start", [12e-6, 27e-6])
@pytest.mark.parametrize("name", [operator.name for operator in OPERATORS])
def test_the_choices_on_a_machine_that_was_timed(child, name, start, bus):
    ways = list(FASTEST[name].items())
    child(f"""
fake.set_memory_limit(141 << 30)
rates.update(json.loads({json.dumps(H200)!r}))
rates |= dict.fromkeys(("up_large", "up_far", "down_large", "down_far"), 1 / {bus})
keep(**{{f"{{operator.name}}.start": rates[f"{{operator.name}}.start"] - 27e-6 + {start}
         for operator in OPERATORS}})
signature = next(operator.signature for operator in OPERATORS if operator.name == {name!r})
for size, way in {ways!r}:
    square = "weights" in signature or "b" in signature.split(", ")
    floats = np.empty((size, size) if square else size, "f4")  # whose memory nobody touches
    args = []
    for parameter in signature.split(", /")[0].split(", *")[0].split(", "):
        if "=" not in parameter:
            args.append(
                np.empty(size, "i8") if parameter == "indices"
                else np.ones((5, 5)) if parameter == "weights"
                else np.float32(2) if parameter == "a" and "y" in signature
                else floats
            )
    found = gpuops.explain({name!r}, *args, device="auto")
    assert found.chosen.way == way, (size, found)
""")


def test_a_small_part_of_a_large_table_is_taken_on_the_cpu(child):
    child(f"""
rates.update(json.loads({json.dumps(H200)!r}))
keep()
found = gpuops.explain("gather", np.empty(1 << 27, "f4"), np.empty(1 << 20, "i8"), device="auto")
assert found.chosen.way == "cpu"
assert 0.7e-3 < found.chosen.seconds < 1.3e-3 and 10e-3 < found.candidates[1].seconds < 20e-3
""")


@pytest.mark.parametrize("seconds", [1e-12, 1e-6])
def test_gather_goes_by_what_was_measured(child, seconds):
    """Into a result on the GPU: by the threads of the host, if these are expected to be fast."""
    child(f"""
keep(**{{"gather.cpu_large": {seconds}, "gather.cpu_far": {seconds}}})
gpuops.explain("gather", x, [0])
table, indices = np.arange(16 << 20, dtype="f4"), np.arange(1 << 18) * 37
out = gpuops.empty(len(indices), "f4")
before = launches()
gpuops.gather(table, indices, out=out)
assert (launches() > before) is ({seconds} > 1e-9)
assert (out.to_host() == table[indices]).all()
""")


# Products are NumPy's own on the CPU, which are to take hardly longer under auto.
@pytest.mark.parametrize(
    ("name", "start", "way"),
    [
        ("add", 0.97, "cpu"),
        ("add", 0.93, "cuda"),
        ("matmul", 0.89, "cpu"),
        ("matmul", 0.85, "cuda"),
        ("gather", 0.99, "cuda"),
        ("correlate", 0.97, "cpu"),
        ("correlate", 0.93, "cuda"),
    ],
)
def test_how_far_apart_the_ways_have_to_be(child, name, start, way):
    sums = {"add": 8192 * 12, "matmul": 64**3, "gather": 4096 * 76, "correlate": 64**2 * 25}
    unit = 1 / sums[name]
    child(f"""
keep(slab_start={start}, **{{"{name}.start": {start}, "{name}.cpu_small": {unit}}})
a = np.ones((64, 64), "f4")
operands = dict(add=(x[:8192],) * 2, matmul=(a, a), gather=(x[:100], np.zeros(4096, "i8")),
                correlate=(a, np.ones((5, 5))))["{name}"]
found = gpuops.explain("{name}", *operands, device="auto")
cpu, cuda = found.candidates
near(cpu.seconds, 1.0)
assert cuda.seconds < cpu.seconds and found.chosen.way == "{way}"
""")


# The choice.


def test_little_work_is_explained_as_it_is_done(child):
    child("""
keep(**{"integer_factor": 1e6, "matmul.cpu_small": 1e-10, "matmul.start": 1e-5})
for side in (20, 24, 28, 32, 64):
    a = np.ones((side, side), "i4")
    way = gpuops.explain("matmul", a, a, device="auto").chosen.way
    gpuops.matmul(a, a, device="auto")
    assert gpuops.last_route().way == way == ("cuda" if side > 32 else "cpu"), side
""")


def test_a_stream_asks_for_the_gpu(child):
    child("""
keep(up_small=1e-6, up_middle=1e-6, up_large=1e-6, up_far=1e-6)
stream = gpuops.Stream()
assert gpuops.explain("add", x, x, device="auto").chosen.way == "cpu"
assert gpuops.explain("add", x, x, device="auto", stream=stream).chosen.way == "cuda"
for device in ("auto", None):
    with gpuops.device("auto"):
        assert (gpuops.add(x, x, device=device, stream=stream) == 2 * x).all()
    assert gpuops.last_route().way == "cuda"
""")


def test_bytes_are_those_that_go_up(child):
    """Of a table whose rows share memory its memory, and of one of which nothing is taken none."""
    child("""
keep()
table, few = np.ones(1 << 20, "f4"), np.arange(100)
none = few[:0]
repeated = np.broadcast_to(table[:1000], (10_000, 1000))
windows = np.lib.stride_tricks.sliding_window_view(table[:5000], 999)
for up, call in [
    (0, ("gather", table, none)),
    (0, ("take", table, none)),
    (4000 + few.nbytes, ("gather", repeated, few)),
    (20_000 + few.nbytes, ("gather", windows, few)),
    (table.nbytes * 3, ("add", table, table.astype("f8"))),
    (table.nbytes * 5 // 2, ("multiply", table.astype("f8"), table.astype("f2"))),
]:
    assert gpuops.explain(*call, device="cuda").chosen.bytes_up == up, call[0]
    getattr(gpuops, call[0])(*call[1:], device="cuda")
    assert gpuops.last_route().bytes_up == up, call[0]
""")


def test_a_product_that_raises_is_noted(child):
    child("""
a = np.full((64, 64), 1e38, "f4")
gpuops.add(a, a, device="cpu")
with np.errstate(all="raise"):
    try:
        gpuops.matmul(a, a, device="cpu")
        assert False
    except FloatingPointError:
        pass
assert gpuops.last_route().operator == "matmul"
""")


def test_a_cache_that_cannot_be_written(child):
    """Also where warnings are errors, it is no reason to measure in vain."""
    child("""
import warnings
warnings.simplefilter("error")
measured = []
calibration._core._measure_rates = lambda ordinal, work: measured.append(work) or dict(rates)
calibration.come_to_rest = lambda *given: True

def write(*given):
    raise OSError(28, "No space left on device")

cache._write = write
gpuops.gather(x, np.arange(1 << 16), device="auto")
assert measured == ["elements", "rows"], measured
assert gpuops.last_route().expected_seconds > 0
""")


def test_the_faster_way_is_taken(child):
    child("""
keep()
for device, in_block in [("auto", None), (None, "auto")]:
    for count, way in [(1 << 18, "cuda"), (100, "cpu")]:
        x = np.random.default_rng(0).random(count)
        before = launches()
        if in_block is None:
            result = gpuops.multiply(x, x, device=device)
        else:
            with gpuops.device(in_block):
                result = gpuops.multiply(x, x)
        assert (result == x * x).all()
        assert (launches() > before) is (way == "cuda")
        assert gpuops.last_route().way == way == gpuops.explain(
            "multiply", x, x, device="auto").chosen.way
print(gpuops.last_route().expected_seconds)
""")


def test_the_cpu_is_taken_where_that_is_faster(child):
    child("""
keep(up_small=1e-6, up_middle=1e-6, up_large=1e-6, up_far=1e-6)
x = np.random.default_rng(0).random(1 << 18)
before = launches()
assert (gpuops.multiply(x, x, device="auto") == x * x).all()
assert launches() == before and gpuops.last_route().way == "cpu"
route = gpuops.last_route()
near(route.expected_seconds, 1e-9 * 3 * x.nbytes)
""")


def test_the_environment_asks_for_the_choice(child):
    source = """
keep()
assert (gpuops.add(x, x) == 2 * x).all()
assert gpuops.last_route().way == "cuda"
"""
    child(source, GPUOPS_DEVICE="auto")


def test_a_small_call_makes_no_call_of_cuda_and_measures_nothing(child, tmp_path):
    child("""
calibration.calibrate = no_measuring
small = np.arange(1000, dtype="f4")
i = np.arange(1000) % 7
calls = fake.calls()
gpuops.gather(small, i, device="auto")
gpuops.take(small, i, device="auto")
gpuops.add(small, small, device="auto")
gpuops.scatter_add(small, i, small, device="auto")
gpuops.matmul(small[:900].reshape(30, 30), small[:900].reshape(30, 30), device="auto")
gpuops.correlate(small.reshape(10, 100), np.ones((3, 3)), device="auto")
assert gpuops.last_route().way == "cpu" and gpuops.last_route().expected_seconds is None
assert fake.calls() == calls
""")
    assert not (tmp_path / "cache").exists()


def test_what_is_known_saves_a_middling_call_from_asking_cuda(child):
    child("""
keep(**{"add.start": 1.0})
x = np.ones(1 << 16, "f4")
gpuops.explain("add", x, x)
calls = fake.calls()
gpuops.add(x, x, device="auto")
assert fake.calls() == calls
""")


# The others round: within a few units in the last place of float32.
TO_THE_BIT = {"gather", "take", "take_along_axis", "scatter", "add", "multiply", "saxpy"}


def test_results_are_the_same_whichever_way_is_taken(child, tmp_path):
    """Calls that are as large as calls must be for a choice, on both sides of it."""
    source = """
keep(**json.loads(os.environ["RATES"]))
random = np.random.default_rng(0)
big = {name: random.random((256, 256)).astype("f4") for name in EXAMPLES}
big |= {"indices": random.integers(0, 256, (40, 256)), "weights": random.random((3, 3))}
big |= {"values": random.random(256).astype("f4")}
for operator in OPERATORS:
    args = [big[p] for p in operator.signature.split(", /")[0].split(", *")[0].split(", ")
            if "=" not in p]
    args = [a.copy() for a in args]
    if operator.name == "take_along_axis":
        args[1] = args[1].T.copy()
    result = getattr(gpuops, operator.name)(*args, device="auto")
    if is_in_place(operator):
        result = args[0]
    route = gpuops.last_route()
    assert route.operator == operator.name and route.elapsed_seconds > 0
    np.save(os.path.join(os.environ["RESULTS"], f"{operator.name} {route.way}.npy"), result)
"""
    for rates in ({}, dict.fromkeys(("up_small", "up_middle", "up_large", "up_far"), 1.0)):
        child(source, RATES=json.dumps(rates), RESULTS=str(tmp_path))
    for name in (operator.name for operator in OPERATORS):
        on_cpu, on_gpu = (np.load(tmp_path / f"{name} {way}.npy") for way in ("cpu", "cuda"))
        if name in TO_THE_BIT:
            same(on_gpu, on_cpu)
        else:
            np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-5, strict=True)


def test_in_memory_that_is_short_the_cpu_is_taken(child):
    child("""
fake.set_memory_limit(1 << 30)
keep(**{"scatter.cpu_small": 1.0, "scatter.cpu_large": 1.0})
x, i = np.ones(10 << 20, "f4"), np.arange(5000)
assert gpuops.explain("scatter", x, i, 2, device="auto").chosen.way == "cuda"
fake.leave_free(100 << 20)
gpuops.scatter(x, i, 2, device="auto")
assert x[4999] == 2 and x[5000] == 1
assert gpuops.last_route().way == "cpu"
assert "no room" in gpuops.explain("scatter", x, i, 2, device="auto").reason
""")


ROOMLESS = """
fake.set_memory_limit(int(os.environ["MIB"]) << 20)
on_gpu = {f"{o.name}.cpu_{size}": 1.0 for o in OPERATORS for size in ("small", "large", "far")}
keep(**on_gpu)
def taken(name, *arguments):
    told = gpuops.explain(name, *arguments, device="auto")
    getattr(gpuops, name)(*arguments, device="auto")
    assert gpuops.last_route().way == told.chosen.way
    assert ("no room" in told.reason) is (told.chosen.way == "cpu"), told.reason
    return told.chosen.way
"""


@pytest.mark.parametrize(
    ("mib", "way", "way_of_products"),
    [(30, "cpu", "cpu"), (48, "cuda", "cpu"), (70, "cuda", "cuda")],
)
def test_what_goes_in_parts_has_room_where_these_have(child, mib, way, way_of_products):
    child(
        ROOMLESS
        + """
x, way, way_of_products = np.ones(8 << 20, "f4"), os.environ["WAY"], os.environ["WAY_OF_PRODUCTS"]
assert taken("add", x, x) == taken("sigmoid", x) == way
assert taken("correlate", x.reshape(-1, 1024), np.ones((3, 3))) == way
assert taken("matmul", x.reshape(-1, 64), np.ones((64, 8), "f4")) == way_of_products
""",
        MIB=str(mib),
        WAY=way,
        WAY_OF_PRODUCTS=way_of_products,
    )


def test_lines_and_sums_that_are_not_cut_need_room(child):
    """The CPU takes them where there is none for several, as gather takes all that there is."""
    child(
        ROOMLESS
        + """
line = np.ones(6 << 20, "f4")
assert taken("correlate", line.reshape(16, -1), np.ones((3, 3))) == "cuda"
assert taken("correlate", line.reshape(2, -1), np.ones((3, 3))) == "cpu"
assert taken("matmul", line.reshape(4, -1), np.ones((3 << 19, 1), "f4")) == "cuda"
assert taken("matmul", np.ones((4, 2 << 20), "f4"), np.ones((2 << 20, 1), "f4")) == "cpu"
assert taken("matmul", line.reshape(1, -1), np.ones((6 << 20, 1), "f4")) == "cpu"
assert taken("gather", np.ones(30 << 20, "f4"), np.arange(5000)) == "cuda"
""",
        MIB="92",
    )


@pytest.mark.parametrize("name", ["scatter", "scatter_add", "add", "matmul", "correlate"])
def test_a_limit_leaves_small_calls_to_the_cpu(child, name):
    """At once, without asking the device; and so it does when more of the limit is in use."""
    child(
        ROOMLESS
        + f"""
name = {name!r}
x, i = np.ones((512, 1024), "f4"), np.arange(5000)
arguments = {{"scatter": (x.ravel(), i, 2), "scatter_add": (x.ravel(), i, 2), "add": (x, x)}}.get(
    name, (x, x.T.copy() if name == "matmul" else np.ones((3, 3))))
assert taken(name, *arguments) == "cuda"
def asks():
    before = fake.calls("cudaMemGetInfo")
    assert taken(name, *arguments) == "cuda"
    return fake.calls("cudaMemGetInfo") > before
assert name == "matmul" or not all(asks() for _ in range(20))  # of some in a tenth of a second
gpuops.memory_limit(1 << 20)
before = fake.calls("cudaMemGetInfo")
assert taken(name, *arguments) == "cpu"
assert fake.calls("cudaMemGetInfo") == before
gpuops.memory_limit(50 << 20)
assert taken(name, *arguments) == "cuda"
array = gpuops.empty(48 << 20, "u1", device="cuda")
assert taken(name, *arguments) == "cpu"
del array
assert taken(name, *arguments) == "cuda"
""",
        MIB="64",
    )


def test_what_others_take_of_a_device_is_seen_before_long(child):
    """And what they give back. Small calls do not ask each time: that takes longer than they do."""
    child(
        ROOMLESS
        + """
x, i = np.ones(1 << 19, "f4"), np.arange(5000)
assert taken("scatter", x, i, 2) == "cuda"
gpuops.empty_cache()
fake.leave_free(1 << 20)
def asks():
    before = fake.calls("cudaMemGetInfo")
    assert taken("scatter", x, i, 2) == "cpu"
    return fake.calls("cudaMemGetInfo") > before
time.sleep(0.15)
assert not all(asks() for _ in range(20))
fake.leave_free(60 << 20)
time.sleep(0.15)
assert taken("scatter", x, i, 2) == "cuda"
""",
        MIB="64",
    )


def test_memory_that_is_kept_for_later_is_there(child):
    """Nobody has the arrays any more, and what is kept of them is given back when it has to be."""
    child(
        ROOMLESS
        + """
x = np.ones(3 << 20, "f4")
arrays = [gpuops.empty(4 << 20, "u1", device="cuda") for _ in range(10)]
assert taken("add", x, x) == "cpu"
del arrays
gpuops.synchronize()
assert gpuops.memory_info().used == 0 < gpuops.memory_info().reserved
time.sleep(0.15)
assert taken("add", x, x) == "cuda"
""",
        MIB="64",
    )


def test_small_calls_need_room_as_well(child):
    """For weights that go to the GPU, what sums in parts take, and where all slabs are in use."""
    child(
        ROOMLESS
        + """
x, table, i = np.ones((70, 70)), np.ones(5000, "f4"), np.arange(5000)
calls = [("add", table, table), ("gather", table, i), ("take", table, i),
         ("scatter", table, i, 1), ("scatter_add", table, i, 0),
         ("correlate", x, np.ones((9, 9))), ("matmul", x.astype("i4"), x.astype("i4"))]
assert {taken(*call) for call in calls} == {"cuda"}
gpuops.memory_limit(0)
assert {taken(*call) for call in calls} == {"cpu"}
gpuops.memory_limit(512 << 10)
assert taken("correlate", x, np.ones((300, 300))) == taken("matmul", x, x) == "cpu"
assert taken("correlate", x, np.ones((9, 9))) == "cuda"
""",
        MIB="64",
    )


@pytest.mark.parametrize("slab_bytes", [0, 64 << 10])
def test_rows_that_are_sorted_or_summed_in_tables_need_room(child, slab_bytes):
    """However much there is, the call is made."""
    child(
        ROOMLESS
        + f"fake.set_slab_bytes({slab_bytes})"
        + """
i = np.random.default_rng(0).integers(0, 100, 1 << 17)
one, many = np.float32(1), np.ones(i.size)
for name, x, i, values, given in [
    ("scatter_add", np.zeros(100, "f4"), i.astype("i1"), one, {"deterministic": True}),
    ("scatter_add", np.zeros(100, "f8"), i, many, {"deterministic": True}),
    ("scatter_add", np.zeros(30000, "f2"), i.astype("i2"), one, {}),
    ("scatter_add", np.zeros((100, 77), "f2"), i[:246], np.ones((246, 77), "f2"), {}),
    ("scatter_add", np.zeros(1 << 20, "f4"), i, many.astype("f4"), {}),
    ("scatter_add", np.zeros(100, "i8"), i.astype("u1"), 1, {}),
    ("scatter", np.zeros(100, "f4"), i.astype("i1"), many, {}),
    ("scatter", np.zeros(1 << 20, "f8"), i, many, {}),
    ("scatter", np.zeros((1 << 16, 3), "u1"), i, np.ones((i.size, 3), "u1"), {}),
    ("scatter", np.zeros((100, 1024), "c16"), i[:4096], np.ones((4096, 1024), "i1"), {}),
]:
    ways = []
    for limit in [0, *(1 << bits for bits in range(16, 29))]:
        gpuops.empty_cache()
        gpuops.memory_limit(limit)
        getattr(gpuops, name)(x, i, values, device="auto", **given)
        ways.append(gpuops.last_route().way)
    assert ways[0] == "cpu" and ways[-1] == "cuda", (name, x.shape, x.dtype, ways)
for limit, way in [(64 << 20, "cpu"), (256 << 20, "cuda")]:  # where it takes 72 MiB
    gpuops.memory_limit(limit)
    many = np.zeros(4 << 20, "i1")
    assert gpuops.explain("scatter_add", np.zeros(9), many, 1, device="auto").chosen.way == way
""",
        MIB="300",
    )


def test_what_is_cast_on_the_gpu_needs_room(child):
    """Beside what was sent of it; of a product whose sums are not cut, in each part."""
    child(
        ROOMLESS
        + """
keep(**{f"add.cpu_{size}": 1e-12 for size in ("small", "large", "far")})  # what casts go by
x = np.ones((2, 5 << 20), "i8")
for mib, way in [(238, "cpu"), (400, "cuda")]:
    gpuops.memory_limit(mib << 20)
    assert taken("matmul", x, x.T.astype("u8")) == way
x, y = np.ones(8 << 20, "i1"), np.ones(8 << 20, "u4")
for mib, way in [(140, "cpu"), (400, "cuda")]:
    gpuops.memory_limit(mib << 20)
    assert taken("matmul", x, y) == way
""",
        MIB="512",
    )


@pytest.mark.parametrize(
    "call",
    [
        '"saxpy", 2.0, x, x',
        '"add", x, 2',
        '"add", np.arange(1000), x',
        '"sigmoid", np.arange(10)',
        '"matmul", np.ones((9, 9), "i2"), np.ones((9, 9), "f4")',
        '"multiply", x.astype("f2"), x',
    ],
)
def test_what_is_cast_on_the_host_is_expected_to_take_as_long_as_it_does(child, call):
    """explain sees operands before they are cast, and the work begins after that."""
    child(f"""
keep(slab_start=2e-6)
x = np.ones(1000, "f4")
name, *arguments = {call}
found = gpuops.explain(name, *arguments, device="cuda").chosen
getattr(gpuops, name)(*arguments, device="cuda")
near(found.seconds, gpuops.last_route().expected_seconds)
assert 2e-6 < found.seconds < 1e-5
""")


def test_a_captured_stream_is_left_alone(child):
    child("""
keep()
stream = gpuops.Stream()
fake.set_capturing(stream.ptr, True)
measured = calibration.calibrate
calibration.calibrate = no_measuring
with stream:
    assert (gpuops.add(x, x, device="auto") == 2 * x).all()
assert gpuops.last_route().way == "cpu"
assert "captured" in gpuops.explain("add", x, x, device="auto").reason
calibration.calibrate = measured
fake.set_capturing(stream.ptr, False)
with stream:
    assert (gpuops.add(x, x, device="auto") == 2 * x).all()
assert gpuops.last_route().way == "cuda"
fake.set_capturing(stream.ptr, True)
with stream:
    gpuops.add(x, x, device="auto")
assert gpuops.last_route().way == "cpu"
fake.set_capturing(stream.ptr, False)
assert fake.take_misuse() == ""
""")


def test_an_error_of_the_call_is_raised_and_no_other_way_tried(child):
    child("""
keep()
gpuops.add(x, x, device="auto")
with_fault = fake.fail(1, 719, function="cudaLaunchKernel")
with with_fault:
    try:
        gpuops.add(x, x, device="auto")
    except gpuops.DeviceError:
        print("raised")
assert gpuops.last_route().way == "cuda"
# After that the GPU is lost to the process, and the CPU goes on.
assert (gpuops.add(x, x, device="auto") == 2 * x).all()
assert gpuops.last_route().way == "cpu"
""")


def test_cuda_is_called_without_the_gil(child):
    child("""
seen = []
calibration._core._measure_rates = lambda ordinal, work: dict(rates)
calibration._add_products = lambda rates: None
with fake.visit(lambda name, with_gil: seen.append((name, with_gil))):
    gpuops.add(x, x, device="auto")
    gpuops.explain("add", x, x, device="auto")
# But for what the driver answers at once, as gil.py has it.
assert seen and {name for name, with_gil in seen if with_gil} <= {"cudaDriverGetVersion"}, seen
""")


@pytest.mark.parametrize("driver", ["none", "no-device"])
def test_without_a_gpu_the_cpu_is_the_only_way(child, driver):
    child(
        """
assert (gpuops.add(x, x, device="auto") == 2 * x).all()
found = gpuops.explain("add", x, x, device="auto")
assert found.chosen.way == "cpu" and len(found.candidates) == 1 and "no GPU" in found.reason
assert 0 < found.chosen.seconds < 10
try:
    gpuops.explain("add", x, x, device="cuda")
except gpuops.DeviceError as error:
    assert "add" in str(error)
else:
    raise AssertionError("no DeviceError")
""",
        GPUOPS_FAKE_DRIVER=driver,
    )


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_a_forked_child_takes_the_cpu(child):
    child("""
keep()
gpuops.add(x, x, device="auto")
assert gpuops.last_route().way == "cuda"
child = os.fork()
if child == 0:
    good = (gpuops.add(x, x, device="auto") == 2 * x).all() and gpuops.last_route().way == "cpu"
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0
""")


# What is measured.


def test_a_machine_is_measured_once_and_kept(child):
    source = f"""
for operator in OPERATORS:
    found = gpuops.explain(operator.name, *required_arguments(operator))
    assert found.chosen.seconds is not None, found
found = [kept(work) for work in {WORKS}]
assert sorted(name for each in found for name in each) == sorted(rates)
assert all(0 < rate < 1e3 for each in found for rate in each.values())
gpuops.empty_cache()
live, misuse = fake.live(), fake.take_misuse()
assert live.streams == 0 and live.allocations == 1 and not misuse, (live.allocations, misuse)
"""
    assert child(source) == ""
    again = """
gpuops._core._measure_rates = no_measuring
before = kept()
gpuops.add(x, x, device="auto")
near(candidates("add", x, x)["cpu"].seconds, gpuops.explain("add", x, x).candidates[0].seconds)
assert gpuops.explain("add", x, x).chosen.seconds is not None and kept() == before
"""
    assert child(again) == ""


MEASURING = """
asked = []
def measure(ordinal, work):
    asked.append(work)
    return dict(rates)
calibration._core._measure_rates = measure
calibration._add_products = lambda rates: asked.append("NumPy's")
square = np.ones((200, 200), "f4")
indices = np.arange(0, 1 << 18, 4)
"""
# One of each work.
CALLS = """
gpuops.add(x, x, device="auto")
gpuops.gather(x, indices, device="auto")
gpuops.matmul(square, square, device="auto")
gpuops.correlate(square, square[:3, :3], device="auto")
"""


def test_what_some_work_needs_is_measured_at_its_first_call(child):
    child(
        MEASURING
        + """
gpuops.gather(x, indices, device="auto")
assert asked == ["elements", "rows"], asked
gpuops.take(x, indices, device="auto")
gpuops.add(x, x, device="auto")
assert asked == ["elements", "rows"], asked
gpuops.matmul(square, square, device="auto")
gpuops.matmul(square, square, device="auto")
assert asked == ["elements", "rows", "products", "NumPy's"], asked
gpuops.correlate(square, square[:3, :3], device="auto")
gpuops.convolve(square, square[:3, :3], device="auto")
assert asked[4:] == ["filters"], asked
assert all(kept(work) == rates for work in asked if work != "NumPy's")
"""
    )
    child(
        MEASURING
        + CALLS
        + """
assert asked == []
"""
    )


def test_what_is_known_to_the_process_is_not_measured_for_other_work(child):
    """Where there is no disk to ask."""
    child(
        MEASURING
        + CALLS
        + """
assert asked == ["elements", "rows", "products", "NumPy's", "filters"], asked
""",
        GPUOPS_CACHE_DIR="",
    )


def test_without_the_gpu_that_was_measured_the_cpu_is_known(child):
    """Also for work of which nothing was known before the GPU was lost."""
    child(
        MEASURING
        + """
gpuops.add(x, x, device="auto")
with fake.fail(1, 719, function="cudaLaunchKernel"):
    try:
        gpuops.add(x, x, device="cuda")
    except gpuops.DeviceError:
        print("lost")
for _ in range(2):
    found = gpuops.explain("gather", x, indices, device="auto")
    assert found.chosen.way == "cpu" and found.chosen.seconds is not None, found
# Nothing can be known of the one that is lost.
assert asked == ["elements", "elements", "rows"], asked
"""
    )


def test_what_is_known_counts_while_more_is_measured_and_when_that_fails(child):
    child(
        MEASURING
        + """
def fail(ordinal, work):
    asked.append(work)
    # Another thread's call.
    for call in (lambda: gpuops.add(x, x, device="auto"),
                 lambda: gpuops.take(x, indices, device="auto")):
        call()
        ways.append(gpuops.last_route().way)
    raise MemoryError
ways = []
gpuops.add(x, x, device="auto")
calibration._core._measure_rates = fail
gpuops.gather(x, indices, device="auto")
assert gpuops.last_route().way == "cpu" and ways == ["cuda", "cpu"], ways
assert asked == ["elements", "rows"], asked
gpuops.add(x, x, device="auto")
assert gpuops.last_route().way == "cuda"
found = gpuops.explain("gather", x, indices, device="auto")
assert "could not be measured" in found.reason, found.reason
calibration._core._measure_rates = measure
assert gpuops.explain("gather", x, indices).chosen.seconds is not None
assert asked[-1] == "rows" and kept("rows") == rates
"""
    )


def test_there_is_no_other_work(child):
    child("""
for call in (lambda: gpuops._core._measure_rates(0, "sums"),
             lambda: gpuops._core._tell_rates(0, "sums", rates)):
    try:
        call()
    except ValueError as error:
        assert "sums" in str(error)
    else:
        raise AssertionError("no ValueError")
""")


def test_what_is_measured_beside_other_work_is_not_kept(child):
    """Threads that look for work after a product are waited for; those that go on are not."""
    child("""
import hashlib, threading
calibration._core._measure_rates = lambda ordinal, work: dict(rates)
calibration._add_products = lambda rates: None
busy, work = True, bytes(64 << 20)
def compute():
    while busy:
        hashlib.sha256(work)
threads = [threading.Thread(target=compute, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
started = time.perf_counter()
assert gpuops.explain("add", x, x, device="auto").chosen.seconds is not None
assert time.perf_counter() - started >= calibration._MOST_REST_SECONDS
assert kept() is None
busy = False
for thread in threads:
    thread.join()
calibration.calibrate(0, "elements")
assert kept() == rates
""")


def test_what_is_measured_beside_other_processes_is_not_kept(child):
    """Of two threads, beside one that ends meanwhile, and one that is over when it is looked at."""
    child(f"""
calibration._MOST_WAITING = {_calibration._MOST_WAITING}
calibration._core._measure_rates = lambda ordinal, work: write(*spent) or dict(rates)
calibration.come_to_rest = lambda: True
calibration._TASKS = Path(os.environ["GPUOPS_CACHE_DIR"]).with_name("task")
calibration._TICKS = "nowhere"
def write(*spent):
    (calibration._TASKS / "2/schedstat").unlink(missing_ok=True)
    for thread, (running, waiting) in enumerate(spent):
        folder = calibration._TASKS / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{{running}} {{waiting}} 12\\n")

for spent, is_kept in (
    ([(601, 100), (709, 102)], False),
    ([(610, 101), (710, 102)], False),
    ([(614, 101), (714, 102)], True),
):
    write((600, 100), (700, 100), (1000, 1000))
    (calibration._TASKS / "77").mkdir(exist_ok=True)
    calibration.calibrate(0, "elements")
    assert (kept() is not None) == is_kept, spent
""")


def test_what_is_measured_while_the_host_has_the_processors_is_not_kept(child):
    """Those of a virtual machine. A single tick may have been over before."""
    child(f"""
calibration._MOST_WAITING = {_calibration._MOST_WAITING}
calibration._core._measure_rates = lambda ordinal, work: write(*late) or dict(rates)
calibration.come_to_rest = lambda: True
calibration._part_waited = lambda before, after: 0
calibration._TICKS = Path(os.environ["GPUOPS_CACHE_DIR"]).with_name("stat")
def write(*ticks):
    calibration._TICKS.write_text(" ".join(map(str, ("cpu ", *ticks))) + " 0 0\\ncpu0 1 2 3\\n")

early = (100, 10, 50, 70_000, 9, 0, 5, 3)
for work, late, is_kept in (
    ("elements", (103, 11, 53, 70_100, 90, 1, 6, 5), False),
    ("elements", (103, 11, 53, 70_100, 90, 1, 6, 4), True),
    ("rows", (113, 11, 60, 70_100, 90, 1, 6, 5), True),
    ("filters", early, True),
):
    write(*early)
    calibration.calibrate(0, work)
    assert (kept(work) is not None) == is_kept, late
calibration._TICKS.write_text("cpu 1 2 3\\n")
assert calibration._ticks() == (0, 0)
calibration._TICKS = "nowhere"
assert calibration._ticks() == (0, 0)
""")


@pytest.mark.skipif(
    not any(thread.running for thread in _calibration._spent().values()),
    reason="the scheduler tells nothing",
)
def test_waiting_for_a_processor_is_seen(cpu_device):
    """One that three other processes want, too. What does not tell of it tells of no waiting."""
    source = """
import os, subprocess, sys, time
from gpuops import _calibration

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
time.sleep(0.5)
try:
    before, end = _calibration._spent(), time.monotonic() + 1
    while time.monotonic() < end:
        pass
    after = _calibration._spent()
finally:
    for other in others:
        other.kill()
        other.wait()
part = _calibration._part_waited(before, after)
assert 0.5 < part < 1, part
for tasks in ("nowhere", "/proc/self/fd", "/proc/self"):
    _calibration._TASKS = tasks
    assert _calibration._spent() == {}
assert _calibration._part_waited({}, {}) == 0
"""
    assert run_child(cpu_device.gpuops, source) == ""


def test_threads_that_cannot_be_looked_at_are_taken_to_rest(monkeypatch, tmp_path):
    """Where there is no /proc, or a thread is over before it is looked at."""
    monkeypatch.setattr(_calibration, "_TASKS", str(tmp_path / "task"))
    assert _calibration.come_to_rest()
    (tmp_path / "task/77").mkdir(parents=True)
    assert _calibration.come_to_rest()
    (tmp_path / "task/77/stat").write_text("77 (a) b) R 1 2 3")
    assert _calibration._others_at_work()
    with monkeypatch.context() as patch:
        patch.setattr(_calibration.time, "sleep", pytest.fail)
        assert not _calibration.come_to_rest(0)
    (tmp_path / "task/77/stat").write_text("77 (R) S 1 2 3")
    assert _calibration.come_to_rest()


def test_runs_go_on_while_they_become_faster_or_are_slower_than_expected(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_calibration.time, "perf_counter", lambda: now[0])

    def fastest(*runs, expected=math.inf):
        now[0] = 0.0
        left = list(runs)

        def call():
            now[0] += left.pop(0)

        return round(_calibration._fastest(call, expected), 6), len(runs) - len(left)

    found = [
        fastest(5e-3, 2e-3, 1.9e-3, 1e-3),  # enough
        fastest(2e-2, 1.7e-2, 1.5e-3, 1.5e-3, 1e-4),
        fastest(2e-2, 2.1e-2, 1e-3),  # long
        fastest(2e-1, 2.1e-2, 1e-3),
        fastest(3e-2, 2e-3, *[1e-3] * 4),  # threads that were started
        fastest(4e-3, 3e-3, 2e-3, 1.5e-3, 1e-3, 7e-4, 4e-4, 3e-4),
        fastest(*[7e-6] * 999),
        fastest(*[5e-5] * 50, *[7e-6] * 999),  # a processor that was at rest
        # Another process has the processor.
        fastest(5e-5, 1.2e-2, 4e-5, 1.2e-2, *[7e-6] * 999),
        fastest(5e-5, 1.2e-2, 4e-5, 1.2e-2, 3e-5, 1.2e-2, *[7e-6] * 999),
        # Threads that do not yet have a processor each.
        fastest(2e-2, *[3e-3] * 6, 1e-4, 1e-4, *[7e-6] * 999, expected=1e-3),
        fastest(2e-2, *[2e-3] * 7, 1.2e-3, 1e-4, expected=1e-3),
        fastest(2e-2, *[3e-3] * 12, expected=1e-3),  # long
        fastest(3e-3, 3e-3, 3e-3, *[2e-4] * 99, expected=1e-3),
        fastest(3e-3, 1.2e-3, 1.2e-3, 1.2e-3, 1e-5, expected=1e-3),  # near enough
    ]
    monkeypatch.undo()
    assert found == [
        (1.9e-3, 3), (1.5e-3, 4), (2e-2, 2), (2.1e-2, 2), (1e-3, 4), (7e-4, 6), (7e-6, 430),
        (7e-6, 430), (7e-6, 430), (3e-5, 6),
        (7e-6, 430), (1.2e-3, 9), (3e-3, 8), (2e-4, 16), (1.2e-3, 4),
    ]  # fmt: skip


def test_products_of_larger_matrices_are_not_slower(monkeypatch):
    """Else a host that was busy for a moment would have the GPU taken for all of them."""
    times = {64: 3.0, 256: 2.0, 813: 1.0}  # of a multiplication
    asked = []

    def seconds(matrix, expected=math.inf):
        asked.append(expected / len(matrix) ** 3)
        return times[len(matrix)] * len(matrix) ** 3

    def products():
        rates = {}
        asked.clear()
        _calibration._add_products(rates)
        return [rates[f"matmul.cpu_{size}"] for size in ("small", "large", "far")]

    monkeypatch.setattr(_calibration, "_seconds_of_product", seconds)
    for name in _calibration._THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_calibration.os, "sched_getaffinity", lambda _: {7})
    assert products() == [3.0, 2.0, 1.0]
    assert asked == [math.inf, 3.0, 2.0, math.inf]  # of integers nothing is expected
    monkeypatch.setattr(_calibration.os, "sched_getaffinity", lambda _: set(range(16)))
    assert products() == [3.0, 2.0, 1.0]
    assert asked == [math.inf, pytest.approx(3.0 / 16**0.4), 3.0 / 8, math.inf]
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # of nested loops
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert products() == [3.0, 2.0, 1.0]
    assert asked == [math.inf, 3.0, 2.0, math.inf]
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "99")
    monkeypatch.setenv("MKL_NUM_THREADS", "0")
    times[256] = 0.25
    assert products() == [3.0, 0.25, 0.25] and asked[2] == 0.25
    times[256] = 2.0
    times[813] = 300.0
    assert products() == [3.0, 2.0, 2.0]
    times[256] = 300.0
    assert products() == [3.0, 3.0, 3.0]


@pytest.mark.not_under_tsan("makes it take minutes")
def test_the_steps_of_measuring_are_told(child):
    child("""
def measure(ordinal, work):
    started = time.perf_counter()
    found = gpuops._core._measure_rates(ordinal, work)
    taken, steps = time.perf_counter() - started, gpuops._core._measured_steps()
    assert 0.5 * taken < sum(steps.values()) <= taken, (taken, steps)
    return found, {name for name, seconds in steps.items() if seconds}
assert not any(gpuops._core._measured_steps().values())
found, steps = measure(0, "elements")
assert steps == set(gpuops._core._measured_steps())
gpuops.explain("add", x, x)
cpu = {"memory", "cpu_small", "cpu_large"}
for work in ("rows", "filters"):
    more, taken = measure(0, work)
    # The machine is known.
    assert taken == steps - {"locked", "up", "down", "parts"}, taken
    found |= more
    assert measure(-1, work)[1] == cpu
assert measure(-1, "elements")[1] == cpu
products = gpuops._core._measure_rates(0, "products")
assert not any(gpuops._core._measured_steps().values())
assert products["matmul.gpu"] > 0 and products["matmul.start"] == kept()["add.start"]
# What does the same work is measured once, and rows far away by those of gather.
for same, name in [("take", "gather"), ("take_along_axis", "gather"), ("multiply", "add"),
                   ("convolve", "correlate")]:
    for rate in ("cpu_small", "cpu_large", "cpu_far", "gpu", "start"):
        assert found[f"{same}.{rate}"] == found[f"{name}.{rate}"] > 0
times = found["gather.cpu_far"] / found["gather.cpu_large"]
for name in ("scatter", "scatter_add"):
    near(found[f"{name}.cpu_far"], times * found[f"{name}.cpu_large"])
assert found["saxpy.cpu_far"] == found["saxpy.cpu_large"]
assert found["correlate.cpu_far"] <= found["correlate.cpu_large"]
for name in ("add", "sigmoid"):
    assert found[f"{name}.cpu_far"] != found[f"{name}.cpu_large"]
""")


@pytest.mark.not_under_tsan("makes it take minutes")
def test_what_is_measured_of_operators_is_by_the_work_in_their_rows(cpu_device):
    for work in WORKS:
        rates = cpu_device.gpuops._core._measure_rates(-1, work)
        measured = {name.partition(".")[0] for name in rates if "." in name}
        rows = {row.name for row in OPERATORS if row.work == f"WORK_{work.upper()}"}
        assert measured == rows and rows


def test_products_are_timed(child):
    child("""
seen = set()
def matmul(a, b, out, numpys=np.matmul):
    seen.add((a.dtype.kind, len(a)))
    return numpys(a, b, out)
np.matmul = matmul
calibration._add_products(rates)
assert seen == {("f", 64), ("f", 256), ("f", 813), ("i", 64)}, seen
""")


@pytest.mark.parametrize(
    "entry",
    [b"", b"{}", b"[1]", b"\xff", b"null", b'{"add.start": 1.0}', "negative", "text", "of another"],
)
def test_an_entry_that_is_no_use_is_measured_anew(child, entry):
    child(f"""
entry = {entry!r}
good = dict(rates)
calibration._core._measure_rates = lambda ordinal, work: dict(good)
calibration._add_products = lambda rates: None
if entry == "negative":
    keep(**{{"add.start": -1.0}})
elif entry == "text":
    keep(**{{"add.start": "soon"}})
elif entry == "of another":
    machine = calibration._machine
    calibration._machine = lambda ordinal: [*machine(ordinal), b"another"]
    keep(**{{"add.start": 2.0}})
    calibration._machine = machine
else:
    cache.store(key(), entry, cache.CALIBRATION)
near(candidates("add", x[:1], x[:1])["cuda"].seconds, 1e-5 + 12 * 4e-11 + 12e-12 - 8 * 4e-11)
assert kept() == good
""")


def test_each_fact_of_a_machine_counts(child):
    child("""
import platform
calibration._core._measure_rates = no_measuring
keys = {key()}
real = calibration._core._config
facts = real()
for name in ("version", "cpu_threads", "cpu_level", "cuda_build", "cuda_driver"):
    calibration._core._config = lambda: {**facts, name: "another"}
    keys.add(key())
calibration._core._config = real
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
             "OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES",
             "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUOPS_PINNED_LIMIT"):
    os.environ[name] = "77"
    keys.add(key())
affinity = os.sched_getaffinity
os.sched_getaffinity = lambda process: range(77)
keys.add(key())
os.sched_getaffinity = affinity
real, np.__version__ = np.__version__, "another"
keys.add(key())
np.__version__ = real
for name in ("_blas", "_c_library"):
    real = getattr(calibration, name)
    assert real()
    setattr(calibration, name, lambda: "another")
    keys.add(key())
    setattr(calibration, name, real)
keys.add(cache.key_of([*calibration._machine(1), b"elements"]))
keys.add(key("rows"))
processor = calibration._processor
assert processor()
calibration._processor = lambda: "another"
keys.add(key())
info = calibration._core._device_info
calibration._core._device_info = lambda ordinal: ("another", *info(ordinal)[1:])
keys.add(key())
calibration._core._device_info = lambda ordinal: (*info(ordinal)[:-1], b"another of its kind")
keys.add(key())
assert info(0)[-1] != info(1)[-1]
assert len(keys) == 25, len(keys)
""")


def test_a_damaged_file_is_measured_anew(child):
    child("""
calibration._core._measure_rates = lambda ordinal, work: dict(rates)
calibration._add_products = lambda rates: None
keep()
for path in Path(os.environ["GPUOPS_CACHE_DIR"]).iterdir():
    path.write_bytes(path.read_bytes()[:-1] + b"!")
assert gpuops.explain("add", x, x).chosen.way == "cuda"
assert kept() == rates
""")


@pytest.mark.parametrize("filters", ["ignore", "error"])
def test_a_folder_that_cannot_be_used_is_survived(child, tmp_path, filters):
    (tmp_path / "file").write_text("")
    child(
        f"""
import warnings
warnings.simplefilter({filters!r})
measured = []
calibration._core._measure_rates = lambda ordinal, work: measured.append(1) or dict(rates)
calibration._add_products = lambda rates: None
for _ in range(3):
    gpuops.add(x, x, device="auto")
    assert gpuops.last_route().way == "cuda"
assert measured == [1]
""",
        GPUOPS_CACHE_DIR=str(tmp_path / "file"),
    )


def test_a_machine_that_cannot_be_measured_takes_the_cpu(child):
    child("""
tries, began = [], time.monotonic()
def fail(ordinal, work):
    tries.append(ordinal)
    raise gpuops.DeviceError("no")
calibration._core._measure_rates = fail
for _ in range(3):
    assert (gpuops.add(x, x, device="auto") == 2 * x).all()
    assert gpuops.last_route().way == "cpu"
assert tries == [0] or time.monotonic() - began > 0.9
# explain tries again.
tries.clear()
found = gpuops.explain("add", x, x, device="auto")
assert tries == [0] and "could not be measured" in found.reason
assert [c.seconds for c in found.candidates] == [None, None]
""")


def test_a_failure_to_measure_passes(child):
    child("""
times = []
def measure(ordinal, work):
    times.append(time.monotonic())
    if len(times) < 3:
        raise MemoryError
    return dict(rates)
calibration._core._measure_rates = measure
calibration._add_products = lambda rates: None
while len(times) < 3:
    gpuops.add(x, x, device="auto")
    assert times[0] + 30 > time.monotonic()
assert gpuops.last_route().way == "cuda"
# Ever more seldom.
assert 0.9 < times[1] - times[0] and 1.9 < times[2] - times[1], times
gpuops.add(x, x, device="auto")
assert len(times) == 3
""")


@pytest.mark.parametrize("function", ["cudaMallocFromPoolAsync", "cudaStreamCreateWithPriority"])
def test_a_failure_of_cuda_while_measuring_is_not_raised(child, function):
    child(f"""
with fake.fail(1, 2, mode="from then on", function={function!r}):
    assert (gpuops.add(x, x, device="auto") == 2 * x).all()
    assert gpuops.last_route().way == "cpu"
assert kept() is None
gpuops.empty_cache()
live = fake.live()
assert live.allocations == 0 and live.streams == 0, (live.allocations, live.streams)
""")


def test_an_interrupt_while_measuring_is_for_the_program(child):
    child("""
def interrupt(ordinal, work):
    raise KeyboardInterrupt
measure = calibration._core._measure_rates
calibration._core._measure_rates = interrupt
out = np.full_like(x, 7)
for call in (lambda: gpuops.add(x, x, out=out, device="auto"), lambda: gpuops.explain("add", x, x)):
    try:
        call()
    except KeyboardInterrupt:
        assert (out == 7).all()
    else:
        raise AssertionError("no KeyboardInterrupt")
# It says nothing about the machine.
calibration._core._measure_rates = lambda ordinal, work: dict(rates)
calibration._add_products = lambda rates: None
gpuops.add(x, x, out=out, device="auto")
assert gpuops.last_route().way == "cuda" and (out == 2 * x).all()
""")


def test_threads_that_come_first_measure_once(child):
    child("""
from helpers import run_threads
measured = []
def slowly(ordinal, work):
    measured.append(1)
    time.sleep(0.3)
    return dict(rates)
calibration._core._measure_rates = slowly
calibration._add_products = lambda rates: None
ways = []
def work():
    assert (gpuops.add(x, x, device="auto") == 2 * x).all()
    ways.append(gpuops.last_route().way)
run_threads([work] * 4)
assert measured == [1] and ways == ["cpu"] * 3 + ["cuda"], (measured, ways)
work()
assert ways[-1] == "cuda"
""")


# explain and last_route.


@pytest.fixture
def known(gpuops, own_cache):
    """The machine need not be measured in this process, in which others go by these rates as well.

    They expect that few rows of a table are not worth all of it.
    """
    rates = RATES | {f"gather.cpu_{size}": 2e-11 for size in ("small", "large", "far")}
    calibration = importlib.import_module(f"{gpuops.__name__}._calibration")
    for ordinal, work in itertools.product(range(-1, gpuops.device_count()), WORKS):
        key = calibration._cache.key_of([*calibration._machine(ordinal), work.encode()])
        calibration._cache.store(key, json.dumps(rates).encode(), "calibration")


def test_explain_and_last_route_know_every_operator(gpuops, device, known):
    with gpuops.device(device.spec):
        for operator in OPERATORS:
            function = getattr(gpuops, operator.name)
            args = required_arguments(operator)
            found = gpuops._core._explain(operator.name, *args)
            name, candidates, chosen, reason = found
            assert name == operator.name and reason
            assert candidates[chosen][0] == device.spec
            # Nothing was done.
            for arg, fresh in zip(args, required_arguments(operator), strict=True):
                assert np.array_equal(arg, fresh)
            function(*args)
            route = gpuops.last_route()
            assert route.operator == operator.name
            assert route.way == device.spec
            assert route.device == ("cpu" if device.spec == "cpu" else "cuda:0")
            assert route[3:5] == candidates[chosen][2:4]
            assert 0 < route.elapsed_seconds < 60


def test_explain_takes_a_function_or_its_name(gpuops, known):
    args = required_arguments(OPERATORS[0])
    by_name = gpuops.explain(OPERATORS[0].name, *args)
    assert gpuops.explain(getattr(gpuops, OPERATORS[0].name), *args)[2:] == by_name[2:]
    for wrong, error in [(7, TypeError), ("there is none", ValueError), (np.add, TypeError)]:
        with pytest.raises(error):
            gpuops.explain(wrong, *args)
    with pytest.raises(TypeError):
        gpuops._core._explain()


def test_explain_is_a_table(gpuops, known):
    text = repr(gpuops.explain("add", EXAMPLES["x"], EXAMPLES["y"]))
    first, heads, *rows = text.split("\n")
    assert first.startswith("add runs on ")
    assert re.split("  +", heads.strip()) == [
        "way", "device", "bytes up", "bytes down", "expected",
    ]  # fmt: skip
    assert sum(row.startswith(">") for row in rows) == 1
    assert all(re.search(r"( (s|ms|us)|-)$", row) for row in rows), text


def test_explain_refuses_what_the_call_refuses(gpuops, known):
    with pytest.raises(IndexError, match="integer"):
        gpuops.explain("gather", np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="broadcast"):
        gpuops.explain("add", np.ones(3), np.ones(4))
    with pytest.raises(TypeError, match="missing required argument 'indices'"):
        gpuops.explain("gather", np.ones(3))
    with pytest.raises(ValueError, match="read-only"):
        gpuops.explain("scatter", np.broadcast_to(1.0, 3), [0], 1.0)
    with pytest.raises(ValueError, match="unknown device"):
        gpuops.explain("add", np.ones(3), 1, device="here")
    for name, *args in [("add", np.ones(3), 1.0), ("gather", np.ones(4), [0, 1, 2])]:
        with pytest.raises(ValueError, match=r"out has shape \(2,\)"):
            gpuops.explain(name, *args, out=np.ones(2))
        with pytest.raises(TypeError, match="int64"):
            gpuops.explain(name, *args, out=np.ones(3, np.int64))
        with pytest.raises(ValueError, match="read-only"):
            gpuops.explain(name, *args, out=np.broadcast_to(1.0, 3).reshape(3))
        assert gpuops.explain(name, *args, out=np.ones(3)).operator == name


def test_explain_of_auto_needs_a_cpu_that_can_be_used(gpuops):
    source = """
import numpy as np, gpuops
for call in (gpuops.add, lambda *args, **options: gpuops.explain("add", *args, **options)):
    try:
        call(np.ones(1 << 16), 1.0, device="auto")
    except ValueError as error:
        print("GPUOPS_NUM_THREADS" in str(error))
"""
    assert run_child(gpuops, source, GPUOPS_NUM_THREADS="zz") == "True\nTrue\n"


def test_explain_makes_nothing_and_runs_nothing(gpu):
    def work():
        fake = gpu.fake
        return (fake.calls("cudaLaunchKernel"), fake.live().allocations) if fake else None

    target = np.zeros(5)
    huge = np.broadcast_to(np.float32(1), (1 << 30, 1 << 20))
    for _ in range(2):  # the first time the machine may be measured
        before = work()
        gpu.gpuops.explain("scatter", target, [1], 2.0)
        found = gpu.gpuops.explain("sigmoid", huge)
    assert found.candidates[-1].bytes_down == 1 << 52
    assert not target.any()
    assert work() == before


def test_arrays_on_a_gpu_stay_there(gpu):
    gpuops = gpu.gpuops
    x = gpuops.to_device(np.arange(5.0))
    found = gpuops.explain("add", x, np.ones(5), device="auto")
    assert found.chosen == ("device", "cuda:0", 40, 0, None)
    assert found.candidates == (found.chosen,)
    assert gpuops.add(x, np.ones(5), device="auto").to_host().tolist() == [1, 2, 3, 4, 5]
    assert gpuops.last_route() == ("add", "device", "cuda:0", 40, 0, None, None)
    gpuops.add(x, x)
    assert gpuops.last_route() == ("add", "device", "cuda:0", 0, 0, None, None)


def test_explain_refuses_what_a_call_on_a_gpu_refuses(gpu):
    gpuops = gpu.gpuops
    x, plain, seconds = (gpuops.to_device(np.zeros(3, dtype)) for dtype in ("f8", "m8", "m8[s]"))
    for call in (gpuops.scatter, lambda *args: gpuops.explain("scatter", *args)):
        with pytest.raises(TypeError, match="annot cast values"):
            call(plain, [0, 1, 2], seconds)
    for call in (gpuops.add, lambda *args, **options: gpuops.explain("add", *args, **options)):
        with pytest.raises(ValueError, match="does not match result"):
            call(x, x, out=gpuops.empty(2))
        with pytest.raises(TypeError, match="same_kind"):
            call(x, x, out=gpuops.empty(3, "i8"))


def test_the_elapsed_time_is_that_of_the_call(gpuops):
    x = np.ones(1 << 20)
    started = time.perf_counter()
    gpuops.sigmoid(x, device="cpu")
    ended = time.perf_counter()
    # A small part of it is what reads the arguments.
    assert 0 < gpuops.last_route().elapsed_seconds <= 1.01 * (ended - started)
    assert gpuops.last_route() == gpuops.last_route()


def test_each_thread_has_its_own_last_route(gpuops):
    from helpers import run_threads

    gpuops.add(np.ones(3), 1, device="cpu")

    def work():
        assert gpuops.last_route() is None
        gpuops.multiply(np.ones(3), 1, device="cpu")
        assert gpuops.last_route().operator == "multiply"

    run_threads([work, work])
    assert gpuops.last_route().operator == "add"
