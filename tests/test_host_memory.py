"""Large results on the host: their memory comes from a pool, which keeps it for the next ones."""

import gc
import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import run_child, run_threads
from numpy._core.multiarray import get_handler_name

MEBIBYTE = 1 << 20
LEAST = 4 * MEBIBYTE  # bytes of a result from the pool
HUGE_PAGE = 2 * MEBIBYTE
OURS = "gpuops.warm_memory"


@pytest.fixture(autouse=True)
def nothing_is_kept(device):
    gc.collect()
    device.gpuops.empty_cache()
    yield
    device.gpuops.empty_cache()


def rows(gpuops, size, value=0):
    """A fresh result of so many bytes, all of one value."""
    return gpuops.gather(np.array([[value] * 64], np.uint8), np.zeros(size // 64, np.uint8))


def place(array):
    return array.__array_interface__["data"][0]


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(begin <= address < end for begin, end in ranges)


@pytest.mark.parametrize("size", [LEAST - 64, LEAST, LEAST + 64, 3 * HUGE_PAGE])
def test_which_results_come_from_the_pool(gpuops, size):
    result = rows(gpuops, size, 7)
    assert get_handler_name(result) == (OURS if size >= LEAST else "default_allocator")
    assert get_handler_name() == "default_allocator"
    assert result.flags.owndata and result.flags.writeable and result.flags.c_contiguous
    assert result.base is None and result.nbytes == size and (result == 7).all()
    if size >= LEAST:
        assert place(result) % HUGE_PAGE == 0


def flags_of(address):
    """What the kernel was told of the memory there."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            begin, end = (int(bound, 16) for bound in name.split("-"))
            found = begin <= address < end
        elif found and name == "VmFlags:":
            return rest.split()
    raise LookupError(address)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages"
)
def test_results_are_asked_to_have_huge_pages(gpuops):
    result = rows(gpuops, LEAST)
    assert "hg" in flags_of(place(result))
    assert "hg" in flags_of(place(result) + LEAST - 1)


def test_memory_of_a_result_that_is_gone_is_taken_again(gpuops):
    first = rows(gpuops, LEAST, 1)
    address = place(first)
    del first
    assert is_mapped(address)
    for value in range(3):
        again = rows(gpuops, LEAST, value)
        assert place(again) == address and (again == value).all()
        del again


def test_memory_that_is_in_use_is_not_taken(gpuops):
    """By an array, a view of it, or a buffer over it: as long as there is one."""
    results = [rows(gpuops, LEAST, value) for value in range(4)]
    assert len({place(result) for result in results}) == 4
    views = [results[0][1:3], memoryview(results[1]), results[2].T, results[3]]
    addresses = [place(result) for result in results]
    del results
    others = [rows(gpuops, LEAST, 9) for _ in range(4)]
    assert not {place(other) for other in others} & set(addresses)
    for value, view in enumerate(views):
        assert (np.asarray(view) == value).all()
    del views, view
    fresh = [rows(gpuops, LEAST, 8) for _ in range(4)]
    assert {place(array) for array in fresh} == set(addresses)
    assert all((other == 9).all() for other in others)


def test_a_block_is_taken_once(gpuops):
    first, second = rows(gpuops, LEAST, 1), rows(gpuops, LEAST, 2)
    addresses = {place(first), place(second)}
    del first, second
    third, fourth = rows(gpuops, LEAST, 3), rows(gpuops, LEAST, 4)
    assert {place(third), place(fourth)} == addresses
    assert (third == 3).all() and (fourth == 4).all()


def test_a_block_is_taken_by_results_of_about_its_size(gpuops):
    large = rows(gpuops, 10 * HUGE_PAGE)
    address = place(large)
    del large
    smaller = rows(gpuops, 7 * HUGE_PAGE)
    assert place(smaller) != address
    fitting = rows(gpuops, 8 * HUGE_PAGE)
    assert place(fitting) == address
    larger = rows(gpuops, 10 * HUGE_PAGE + 64)
    assert place(larger) not in (address, place(smaller))


def test_the_best_fit_is_taken(gpuops):
    results = [rows(gpuops, pages * HUGE_PAGE) for pages in (10, 8, 9)]
    address = place(results[1])
    del results
    assert place(rows(gpuops, 8 * HUGE_PAGE)) == address


def test_an_error_gives_the_memory_back(gpuops):
    kept = rows(gpuops, LEAST)
    address = place(kept)
    del kept
    indices = np.zeros(LEAST // 64, np.int64)
    indices[-1] = 1
    for _ in range(3):
        with pytest.raises(IndexError):
            gpuops.gather(np.ones((1, 64), np.uint8), indices)
    result = rows(gpuops, LEAST, 5)
    assert place(result) == address and (result == 5).all()


def test_other_results_come_from_there_too(gpuops, device):
    x = np.arange(LEAST // 4, dtype=np.float32)
    results = [gpuops.add(x, x), gpuops.sigmoid(x), gpuops.saxpy(2, x, x)]
    if device.spec != "cpu":
        results.append(gpuops.to_device(x).to_host())
    assert [get_handler_name(result) for result in results] == [OURS] * len(results)
    np.testing.assert_array_equal(results[0], x + x)


def test_empty_cache(gpuops, device):
    kept, used = rows(gpuops, LEAST, 1), rows(gpuops, LEAST, 2)
    address = place(kept)
    del kept
    assert gpuops.empty_cache() is None
    assert not is_mapped(address)
    assert (used == 2).all()
    assert gpuops.empty_cache() is None
    if device.spec != "cpu":
        del used
        gpuops.empty_cache("cuda:0")


def test_resize(gpuops):
    """As any array that owns its data: what it holds is kept, and zeros come behind it."""
    x = np.full(LEAST // 4, 3, np.uint32)
    result = gpuops.add(x, x * 0)
    dirty = rows(gpuops, 4 * LEAST, 9)
    del dirty
    for size in (4 * x.size, 3 * x.size):
        result.resize(size, refcheck=False)
        assert (result[: x.size] == 3).all() and not result[x.size :].any()
    for size in (100, 1):
        result.resize(size, refcheck=False)
        assert result.shape == (size,) and (result == 3).all()
    result.resize(0, refcheck=False)
    result.resize(7, refcheck=False)
    assert not result.any()
    assert get_handler_name(result) == OURS


def test_an_allocator_of_the_program_is_left_alone(gpuops, device):
    if device.spec == "cpu":
        pytest.skip("pinned_memory needs a GPU")
    with gpuops.pinned_memory():
        result = rows(gpuops, LEAST, 4)
        assert get_handler_name(result) == "gpuops.pinned_memory" == get_handler_name()
    assert (result == 4).all()


def test_tracemalloc_sees_results(gpuops):
    rows(gpuops, LEAST)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = rows(gpuops, LEAST)
        assert LEAST <= tracemalloc.get_traced_memory()[0] - before < LEAST + MEBIBYTE
        del result
        assert tracemalloc.get_traced_memory()[0] - before < MEBIBYTE
    finally:
        tracemalloc.stop()


def test_threads_share_the_pool(device):
    """Each finds what it wrote, also where arrays die on other threads than they came from."""
    numbers = itertools.count(1)
    left = []

    def work():
        with device.gpuops.device(device.default):
            for _ in range(12):
                value = next(numbers) % 251
                result = rows(device.gpuops, LEAST + value % 3 * HUGE_PAGE, value)
                left.append(result)
                assert (result == value).all()
                assert result.base is None
                del result
                if len(left) > 5:
                    left.pop(0)

    run_threads([work] * 4)


CHILD = """
import gc, os, sys
import numpy as np
import gpuops
from test_host_memory import *
"""


def in_child(device, source, **environment):
    default = f'gpuops._core._exchange_device("{device.default}")\n'
    return run_child(device.gpuops, CHILD + default + source, **environment)


@pytest.mark.parametrize("value", ["many", "-1", "1GiB", "1.5"])
def test_a_bound_that_is_no_number(device, value):
    source = """
try:
    rows(gpuops, LEAST)
except ValueError as error:
    print(error)
print(rows(gpuops, LEAST - 64).shape)
"""
    said = in_child(device, source, GPUOPS_HOST_CACHE=value).splitlines()
    assert said[0].startswith(f"GPUOPS_HOST_CACHE is '{value}': expected a number of bytes")
    assert said[1:] == [f"({LEAST // 64 - 1}, 64)"]


def test_without_the_pool(device):
    source = "print(get_handler_name(rows(gpuops, LEAST)), gpuops.empty_cache())"
    assert in_child(device, source, GPUOPS_HOST_CACHE="0") == "default_allocator None\n"


def test_no_more_is_kept_than_the_bound_allows(device):
    """What was kept longest goes first, and what is larger than the bound is not even asked for."""
    source = """
results = [rows(gpuops, LEAST) for _ in range(5)]
addresses = [place(result) for result in results]
while results:
    del results[0]
print([is_mapped(address) for address in addresses])
print(get_handler_name(rows(gpuops, 3 * LEAST)), get_handler_name(rows(gpuops, 3 * LEAST - 64)))
"""
    said = in_child(device, source, GPUOPS_HOST_CACHE=str(3 * LEAST - 1)).splitlines()
    assert said == [str([False] * 3 + [True] * 2), f"default_allocator {OURS}"]


def test_what_is_kept_makes_room(device):
    """Where the system has no more memory, what the pool keeps is given up first."""
    source = """
import resource
kept = rows(gpuops, 32 * LEAST)
indices = np.zeros(40 * LEAST // 64, np.uint8)
table = np.full((1, 64), 3, np.uint8)
gpuops.gather(table, indices[:3])
del kept
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (size + 20 * LEAST, hard))
result = gpuops.gather(table, indices, device="cpu")
print(result.min(), result.max())
try:
    gpuops.gather(table, indices, device="cpu")
except MemoryError:
    print("no memory")
"""
    assert in_child(device, source) == "3 3\nno memory\n"


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_fork(device):
    """Parent and child each have their own copies of the arrays, and of what is kept."""
    source = """
import signal
gpuops._core._exchange_device("cpu")
used, kept = rows(gpuops, LEAST, 1), rows(gpuops, LEAST, 2)
address = place(used)
del kept
child = os.fork()
if child == 0:
    signal.alarm(20)
    first = rows(gpuops, LEAST, 3)
    assert (used == 1).all() and place(first) != address
    used[...] = 4
    del used
    second = rows(gpuops, LEAST, 5)
    assert place(second) == address and (first == 3).all() and (second == 5).all()
    gpuops._core.gather(second, 0, device="cpu")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (used == 1).all()
third = rows(gpuops, LEAST, 6)
assert place(third) != address and (third == 6).all() and (used == 1).all()
print("done")
"""
    assert in_child(device, source) == "done\n"


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_fork_while_others_use_the_pool(device):
    """NumPy's zeros are made without the GIL, so not here: ASan's heap cannot stand a fork then."""
    source = """
import signal, threading
table = np.array([[1] * 64, [2] * 64], np.uint8)
indices = np.zeros(LEAST // 64, np.uint8), np.ones(LEAST // 64, np.uint8)
stop = threading.Event()
def work():
    gpuops._core._exchange_device("cpu")
    while not stop.is_set():
        gpuops.gather(table, indices[0])
gpuops._core._exchange_device("cpu")
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        assert (gpuops.gather(table, indices[1]) == 2).all()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
print("done")
"""
    assert in_child(device, source) == "done\n"


def test_results_that_live_to_the_end(device):
    """They are freed when the module is gone, or not at all."""
    source = """
import atexit, builtins
builtins.kept = rows(gpuops, LEAST, 1)
kept = rows(gpuops, LEAST, 2)
cycle = [rows(gpuops, LEAST, 3)]
cycle.append(cycle)
class Last:
    def __init__(self, array):
        self.array = array
    def __del__(self):
        print("the last one is", self.array.item(0))
last = Last(rows(gpuops, LEAST, 4))
atexit.register(rows, gpuops, LEAST, 5)
sys.modules.pop("gpuops")
del gpuops
"""
    assert in_child(device, source) == "the last one is 4\n"
