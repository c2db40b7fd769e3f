"""Many threads at once, a writer that races with calls, and the worker pool's size.

Each race lasts for two seconds, or for GPUOPS_TEST_SECONDS.
"""

import ctypes
import os
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from faults.fake import MODULE_TWIN
from helpers import refusal_on_cpu, run_child, run_threads
from numpy.lib.stride_tricks import as_strided
from rtc import saxpy_module

THREADS = 8
RACE_SECONDS = float(os.environ.get("GPUOPS_TEST_SECONDS", 2))


def test_eight_threads_on_shared_arrays(gpuops, device, short_switch_interval):
    generator = np.random.default_rng(0)
    table = generator.integers(0, 1 << 30, size=(20_000, 8), dtype=np.int32)
    sizes = [3, 100, 5000, 60_000]
    indices = [generator.integers(-20_000, 20_000, size=size) for size in sizes]
    expected = [table[each] for each in indices]
    columns = generator.integers(0, 8, size=(20_000, 3))
    along = np.take_along_axis(table, columns, 1)
    rounds = 40 if device.name == "cpu" else 8

    def work(number):
        for turn in range(rounds):
            which = (number + turn) % len(sizes)
            kind = (number + turn // len(sizes)) % 4
            if kind == 0:
                result = gpuops.gather(table, indices[which], device=device.spec)
                assert (result == expected[which]).all()
            elif kind == 1:
                out = np.empty_like(expected[which])
                gpuops.take(table, indices[which], 0, out, device=device.spec)
                assert (out == expected[which]).all()
            elif kind == 2:
                result = gpuops.take_along_axis(table, columns, 1, device=device.spec)
                assert (result == along).all()
            else:
                bad = indices[which].copy()
                bad[-1] = 20_000 + number
                with pytest.raises(IndexError, match=f"^index {20_000 + number} is out of bounds"):
                    gpuops.gather(table, bad, device=device.spec)

    run_threads([lambda number=number: work(number) for number in range(THREADS)])


def test_small_calls_from_many_threads(gpuops, device, short_switch_interval):
    x = np.arange(100.0)
    rounds = 3000 if device.name == "cpu" else 200

    def work(number):
        for turn in range(rounds):
            position = (number * 13 + turn) % 100
            assert gpuops.gather(x, position, device=device.spec) == position
            try:
                gpuops.gather(x, 100 + position, device=device.spec)
            except IndexError as error:
                assert f"index {100 + position} " in str(error)
            else:
                pytest.fail("no IndexError")

    run_threads([lambda number=number: work(number) for number in range(THREADS)])


def test_a_racing_writer_never_leads_out_of_bounds(gpuops, device):
    """An index that flips while a call runs gives its value before, after, or IndexError."""
    x = np.arange(1000, dtype=np.int64)
    indices = np.arange(1000).repeat(50)
    rows = np.arange(4000, dtype=np.int64).reshape(1000, 4)
    place = 30_000
    # They differ in one byte alone: a copy of them need not take a number at a time.
    good = int(indices[place])
    bad = [good + (1 << 60), good - (1 << 60)]
    # NumPy writes all these values to one place, one after the other, and holds no GIL meanwhile:
    # many times between any two instructions of the call.
    flips = as_strided(indices[place:], (200_000,), (0,))
    values = np.tile([good, bad[0], good, bad[1]], 50_000)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            np.copyto(flips, values)

    writer = threading.Thread(target=write)
    writer.start()
    outcomes = {"value": 0, "error": 0}
    expected = np.arange(1000).repeat(50)
    out = np.zeros(50_000, np.int64)
    try:
        deadline = time.monotonic() + RACE_SECONDS
        turn = 0
        while time.monotonic() < deadline:
            turn += 1
            try:
                if turn % 3 == 0:
                    result = gpuops.gather(rows, indices)[:, 0] // 4
                elif turn % 3 == 1:
                    result = gpuops.gather(x, indices)
                else:
                    result = gpuops.gather(x, indices, out=out)
            except IndexError as error:
                assert any(f"index {index} " in str(error) for index in bad)
                outcomes["error"] += 1
            else:
                assert (result == expected).all()
                outcomes["value"] += 1
    finally:
        stop.set()
        writer.join()
    assert min(outcomes.values()) > 0, outcomes


@pytest.mark.parametrize(
    "targets",
    [
        "own",
        pytest.param(
            "shared",
            marks=pytest.mark.not_under_tsan("calls that write to the same array race, as asked"),
        ),
    ],
)
def test_eight_threads_race_with_a_writer(gpuops, device, targets, short_switch_interval):
    """Calls take each index as it is at some moment, or refuse one; none leads out of bounds.

    A copy to a GPU need not take a number at a time: each byte is that of some moment.

    The CPU backend looks at all indices before it writes anything. One that goes bad after that is
    left out.
    """
    size, count = 1000, 5000
    # Every operand lies between two fences, and nothing in them is like a fence.
    memory = np.full((1 + 2 * THREADS, 3 * size), -7)
    table, *rest = memory[:, size : 2 * size]
    table[:] = np.arange(size)
    sums, places = rest[:THREADS], rest[THREADS:]
    for target in rest:
        target[:] = 0
    # A few indices are now good, now bad, and change many times while a call runs.
    random = np.random.default_rng(0)
    indices = random.integers(-size, size, count)
    flipping = indices[:: count // 4]
    good = random.integers(0, 256, (2, len(flipping)))
    states = np.array([*good, *(good + (1 << 60)), *(good - (1 << 60))])
    bad = states[2:].ravel().tolist()
    flipping[:] = good[0]
    flips = as_strided(flipping, (40_000, len(flipping)), (0, flipping.strides[0]))
    written = np.tile(states[[2, 0, 5, 1]], (10_000, 1))
    seen = np.array([indices] * len(states))
    seen[:, :: count // 4] = states
    expected = table[seen[:2]]
    values = np.arange(count)
    outcomes = []
    deadline = time.monotonic() + RACE_SECONDS
    stop = threading.Event()

    def write():
        while not stop.is_set():
            np.copyto(flips, written)

    def call(function, *arguments):
        try:
            result = function(*arguments, device=device.spec)
        except IndexError as error:
            assert any(f"index {index} " in str(error) for index in bad)
            outcomes.append("error")
            return False, None
        outcomes.append("value")
        return True, result

    def work(number):
        calls = 0
        target = 0 if targets == "shared" else number
        while time.monotonic() < deadline:
            for function in (gpuops.gather, gpuops.take, gpuops.take_along_axis):
                done, result = call(function, table, indices)
                assert not done or (result == expected).any(axis=0).all()
            done, result = call(gpuops.add, indices, 1)
            assert (result - 1 == seen).any(axis=0).all()
            call(gpuops.scatter, places[target], indices, values)
            assert ((places[target] >= 0) & (places[target] < count)).all()
            done, _ = call(gpuops.scatter_add, sums[target], indices, 1)
            calls += done
            left_out = calls * count - sums[target].sum()
            assert targets == "shared" or 0 <= left_out <= calls * len(flipping)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        run_threads(
            [lambda number=number: work(number) for number in range(THREADS)],
            timeout=120 + RACE_SECONDS,
        )
    finally:
        stop.set()
        writer.join()
    assert (memory[:, :size] == -7).all() and (memory[:, 2 * size :] == -7).all()
    assert {"value", "error"} == set(outcomes)


def test_the_gil_is_free_while_data_move(gpuops, device):
    """Another thread gets on with its Python while a long call runs."""
    if device.name == "fake":
        pytest.skip("the fake runtime computes as slowly as it pleases, but outside of the GIL too")
    x = np.zeros((64, 1 << 20), np.uint8)
    indices = np.arange(64).repeat(4)
    out = np.empty((256, 1 << 20), np.uint8)
    assert_gil_is_free(lambda: gpuops.gather(x, indices, out=out))


def test_the_gil_is_free_while_numpy_multiplies(cpu_device):
    x, out = np.ones((256, 256), np.int64), np.empty((256, 256), np.int64)
    assert_gil_is_free(lambda: cpu_device.gpuops.matmul(x, x, out=out, device="cpu"))


def assert_gil_is_free(call):
    counted = []
    stop = threading.Event()

    def count():
        while not stop.is_set():
            counted.append(time.perf_counter())
            time.sleep(0)

    call()
    counter = threading.Thread(target=count)
    counter.start()
    try:
        # The call's own workers may leave the counter no core for once, but not every time.
        for _ in range(300):
            counted.clear()
            begin = time.perf_counter()
            call()
            end = time.perf_counter()
            inside = [begin, *(at for at in list(counted) if begin < at < end), end]
            longest_pause = max(later - at for at, later in pairwise(inside))
            if len(inside) > 10 and longest_pause < (end - begin) / 2:
                return
    finally:
        stop.set()
        counter.join()
    pytest.fail(f"another thread stood still for {longest_pause:.3f} of {end - begin:.3f} s")


POOL_SIZE = """
import os, gpuops, numpy as np
{before}
os.environ.pop("OMP_NUM_THREADS", None)
threads = lambda: len(os.listdir("/proc/self/task"))
at_first = threads()
x = np.arange(1 << 20)
indices = np.random.default_rng(0).integers(0, 1 << 20, size=1 << 21)
expected = x[indices]
for _ in range(3):
    assert (gpuops.gather(x, indices, device="cpu") == expected).all()
started = threads() - at_first # a GPU's driver has threads too, and show_config wakes it
print(gpuops.show_config(mode="dicts")["cpu_threads"], started)
"""


def test_each_part_of_the_work_is_done_once(cpu_device):
    """No range is taken by two workers, which would add everything in it twice."""
    source = """
import gpuops, numpy as np
indices = np.random.default_rng(0).integers(0, 1000, size=20_000)
expected = np.bincount(indices, minlength=1000)
for _ in range(30):
    x = np.zeros((1000, 32))
    gpuops.scatter_add(x, indices, np.ones((20_000, 32)), device="cpu")
    assert (x == expected[:, None]).all()
"""
    assert run_child(cpu_device.gpuops, source, GPUOPS_NUM_THREADS="4") == ""


WOKEN = """
import os, time, gpuops, numpy as np
tasks = lambda: set(os.listdir("/proc/self/task"))
at_first = tasks()
def sleeps():
    counts = []
    for task in sorted(tasks() - at_first):
        lines = open(f"/proc/self/task/{task}/status").read().splitlines()
        counts += [int(line.split()[1]) for line in lines if line.startswith("voluntary")]
    return np.array(counts)
def add(count):
    x = np.zeros(count, np.float32)
    gpuops.add(x, 1, out=x, device="cpu")
    assert (x == 1).all()
"""


@pytest.mark.not_under_tsan("has a thread of its own, which is counted")
def test_few_threads_are_woken_for_little_work(cpu_device):
    """As many as have a share of it that is worth it, also when there are more from before."""
    source = """
started = []
for count in (3 << 17, 1 << 19, 3 << 18, 1 << 24):
    add(count)
    started.append(len(sleeps()))
print(*started)
woken = []
for _ in range(51):
    before = sleeps()
    add(1 << 19)
    time.sleep(0.005)  # until nobody looks for work any more
    woken.append((sleeps() > before).sum())
assert np.median(woken) <= 3, woken
"""
    output = run_child(cpu_device.gpuops, WOKEN + source, GPUOPS_NUM_THREADS="16")
    assert output.split() == ["0", "15", "15", "15"]  # the first loop starts them all


def test_many_threads_are_woken_for_much_work(cpu_device):
    """By one another: the caller wakes two. On a busy machine it may be done before all are up."""
    source = """
add(1 << 24)
deadline = time.monotonic() + 60
most = 0
while most < 8 and time.monotonic() < deadline:
    time.sleep(0.01)
    before = sleeps()
    add(1 << 24)
    most = max(most, (sleeps() > before).sum())
assert most >= 8, most
"""
    assert run_child(cpu_device.gpuops, WOKEN + source, GPUOPS_NUM_THREADS="16") == ""


@pytest.mark.not_under_tsan("has a thread of its own, which is counted")
def test_threads_look_for_work_before_they_sleep(cpu_device):
    """Loops that follow one another are mostly not waited for in sleep.

    On a busy machine some are: of twenty one or two, where nobody looked seven or more.
    """
    source = """
x = np.zeros(1 << 21, np.float32)
def sleeps_of_twenty():
    before = sleeps().sum()
    for _ in range(20):
        gpuops.add(x, 1, out=x, device="cpu")
    return sleeps().sum() - before
sleeps_of_twenty()
deadline = time.monotonic() + 60
median = 20
while median > 3 and time.monotonic() < deadline:
    median = np.median([sleeps_of_twenty() for _ in range(51)])
assert median <= 3, median
"""
    assert run_child(cpu_device.gpuops, WOKEN + source, GPUOPS_NUM_THREADS="2", timeout=90) == ""


@pytest.mark.not_under_tsan("has a thread of its own, which is counted")
@pytest.mark.parametrize("count", [1, 2, 5])
def test_number_of_threads_can_be_set(cpu_device, count):
    output = run_child(
        cpu_device.gpuops, POOL_SIZE.format(before=""), GPUOPS_NUM_THREADS=str(count)
    )
    # The calling thread works too.
    assert output.split() == [str(count), str(count - 1)]


@pytest.mark.not_under_tsan("has a thread of its own, which is counted")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_cpu_affinity_is_respected(cpu_device):
    allowed = sorted(os.sched_getaffinity(0))
    for cores in {1, len(allowed)}:
        before = f"os.sched_setaffinity(0, {set(allowed[:cores])})"
        output = run_child(cpu_device.gpuops, POOL_SIZE.format(before=before))
        assert output.split() == [str(cores), str(cores - 1)]


@pytest.mark.parametrize(
    "value", ["0", "-1", "many", "1.5", "99999999999999999999", "2 ", "é" * 60]
)
def test_a_wrong_number_of_threads_is_refused(cpu_device, value):
    output = refusal_on_cpu(cpu_device.gpuops, GPUOPS_NUM_THREADS=value)
    assert "GPUOPS_NUM_THREADS" in output and value.strip()[:15] in output


def test_calls_from_daemon_threads_at_exit(gpuops, device):
    """The interpreter ends in silence while threads are still calling."""
    source = f"""
import threading, gpuops, numpy as np
x, indices = np.arange(1000.0), np.arange(1000).repeat(500)
started = threading.Event()
def work():
    while True:
        gpuops.gather(x, indices, device={device.spec!r})
        started.set()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
"""
    for _ in range(3):
        assert run_child(gpuops, source) == ""


def test_eight_threads_launch_a_kernel(gpu, short_switch_interval):
    """On the fake with a twin in C that does nothing: those in Python take turns."""
    kernel = saxpy_module(gpu)["saxpy"]
    if gpu.fake is not None:
        nothing = ctypes.cast(ctypes.CDLL(None).abs, MODULE_TWIN)
        gpu.fake.library.fake_set_module_twin(b"saxpy", nothing)

    def work(number):
        x, y = np.ones((2, 1000), np.float32)
        for turn in range(1, 11):
            kernel[4, 256](1, x, gpu.gpuops.InOut(y), len(x))
            assert (y == (1 if gpu.fake else 1 + turn)).all()

    try:
        run_threads([lambda number=number: work(number) for number in range(THREADS)])
    finally:
        if gpu.fake is not None:
            gpu.fake.library.fake_set_module_twin(b"saxpy", MODULE_TWIN())
