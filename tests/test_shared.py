"""One object and many threads: the same arrays, streams, pins, capsules and kernels in all of them.

With the GIL few of these races can be lost; without it, all of them can. What only reads is exact,
and what is let go of by many is let go of once.
"""

import ctypes
import functools
import gc
import itertools
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from capsules import DELETED_TWICE, LIVE, Producer
from faults.fake import MODULE_TWIN
from helpers import run_child, run_threads, same
from operators import OPERATORS, is_in_place, required_arguments
from rtc import saxpy_module

THREADS = 8
SECONDS = 1.0
HAS_GIL = not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled()


def in_threads(work, count=THREADS):
    run_threads([functools.partial(work, number) for number in range(count)])


def at_once(action, rounds, make):
    """Makes an object for each round, and lets all threads do to it what they do at one moment."""
    objects = [make(turn) for turn in range(rounds)]
    barrier = threading.Barrier(THREADS)

    def work(number):
        for each in objects:
            barrier.wait(60)
            action(number, each)

    in_threads(work)
    return objects


def test_the_gil_stays_off(cpu_device, fake_device):
    """No module of the package, in any build, makes Python take it back."""
    if HAS_GIL:
        pytest.skip("this Python has it, or was told to have it")
    source = "import sys, gpuops; gpuops.gather([1, 2], 0); print(sys._is_gil_enabled())"
    for device in (cpu_device, fake_device):
        assert run_child(device.gpuops, source) == "False\n"


# Arrays.


def outcome(function, arguments, **keywords):
    result = function(*arguments, **keywords)
    return arguments[0] if result is None else result


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_threads_share_the_operands(gpuops, device, operator, short_switch_interval):
    """All but what an operator changes in place, of which each thread has one."""
    function = getattr(gpuops, operator.name)
    arguments = required_arguments(operator)
    first = 1 if is_in_place(operator) else 0
    expected = outcome(function, [arguments[0].copy(), *arguments[1:]], device=device.spec)
    rounds = 300 if device.name == "cpu" else 20

    def work(number):
        for _ in range(rounds):
            own = [each.copy() for each in arguments[:first]]
            same(outcome(function, own + arguments[first:], device=device.spec), expected)

    in_threads(work)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_threads_share_device_arrays(gpu, operator, short_switch_interval):
    gpuops = gpu.gpuops
    function = getattr(gpuops, operator.name)
    arguments = [gpuops.to_device(each) for each in required_arguments(operator)]
    expected = outcome(function, [arguments[0].copy(), *arguments[1:]]).to_host()
    first = 1 if is_in_place(operator) else 0
    streams = [gpuops.Stream() for _ in range(3)]

    def work(number):
        for turn in range(10):
            with streams[(number + turn) % 3]:
                own = [each.copy() for each in arguments[:first]]
                result = outcome(function, own + arguments[first:])
                assert result.shape == expected.shape and result.reshape(-1).ndim == 1
                same(result.to_host(), expected)

    in_threads(work)


@pytest.mark.not_under_tsan("calls that write to the same array race, as asked")
def test_threads_write_the_same_to_one_out(gpuops, device, short_switch_interval):
    x, indices = np.arange(10_000.0), np.arange(5000) * 2
    out, sums = np.empty(5000), np.empty(10_000)

    def work(number):
        for _ in range(100 if device.name == "cpu" else 10):
            assert gpuops.gather(x, indices, out=out, device=device.spec) is out
            assert gpuops.add(x, x, out=sums, device=device.spec) is sums
            assert (out == x[indices]).all() and (sums == 2 * x).all()

    out[:], sums[:] = x[indices], 2 * x
    in_threads(work)


def test_threads_empty_the_cache_beside_calls(gpuops, device):
    x = np.arange(200_000.0)
    indices = np.arange(200_000)[::-1].copy()
    stop = threading.Event()

    def empty():
        while not stop.is_set():
            gpuops.empty_cache()

    def work():
        try:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                same(gpuops.gather(x, indices, device=device.spec), x[::-1])
                same(gpuops.gather(x, 7, device=device.spec), np.float64(7))
        finally:
            stop.set()

    run_threads([empty, *[work] * 4])


ENVIRONMENT = """
import os, threading, time
import gpuops
x = list(range(10))
stop = False
def call():
    while not stop:
        assert gpuops.gather(x, 3) == 3
os.environ["GPUOPS_DEVICE"] = "cpu"
threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
deadline = time.monotonic() + 2
while time.monotonic() < deadline:
    names = [f"GPUOPS_TEST_{i}" for i in range(2000)]
    for name in names:
        os.environ[name] = "1"
    for name in names:
        del os.environ[name]
stop = True
for thread in threads:
    thread.join()
"""


def test_a_thread_sets_variables_beside_calls(cpu_device):
    """The list of variables moves as it grows, and each call looks for GPUOPS_DEVICE in it."""
    assert run_child(cpu_device.gpuops, ENVIRONMENT) == ""


FIRST = """
import threading
import numpy as np
import gpuops
x = np.arange(64.0).reshape(8, 8)
calls = [
    lambda: (gpuops.gather(x, 3), x[3]),
    lambda: (gpuops.matmul(x, x, device="cpu"), x @ x),
    lambda: (gpuops.scatter_add(x * 0, [1], 1), None),
    lambda: (gpuops.add(x, x, device="auto"), x + x),
    lambda: (gpuops.correlate(x, [[1.0]], device="cpu"), x),
    lambda: (gpuops.sigmoid(x * 0), x * 0 + 0.5),
    lambda: (gpuops.is_available(), gpuops.is_available()),
    lambda: (gpuops.explain("add", x, x).operator, "add"),
]
errors = []
barrier = threading.Barrier(8)
def work(number):
    try:
        barrier.wait(60)
        for turn in range(16):
            found, expected = calls[(number + turn) % 8 if {mixed} else turn % 8]()
            assert np.array_equal(found, expected), (number, turn)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if errors:
    raise errors[0]
"""


@pytest.mark.parametrize("mixed", [True, False], ids=["each another", "all the same"])
def test_the_first_calls_of_threads_come_at_once(device, mixed, tmp_path):
    """What the first call finds out and keeps is right for all that come meanwhile."""
    source = FIRST.replace("{mixed}", str(mixed))
    for _ in range(2):
        assert run_child(device.gpuops, source, GPUOPS_CACHE_DIR=str(tmp_path)) == ""


FIRST_BFLOAT16 = """
import sys, threading
import numpy as np
from capsules import Producer, code_of
import gpuops
bits = np.arange(4, dtype="u2")
code, size = 4, 16
arrays = [Producer(bits, code=code, bits=size) for _ in range(8)]
assert "ml_dtypes" not in sys.modules
found, barrier = [], threading.Barrier(8)
def work(array):
    barrier.wait(60)
    try:
        found.append(gpuops.to_device(array, device=0).dtype.name)
    except BaseException as error:
        found.append(repr(error))
threads = [threading.Thread(target=work, args=[array]) for array in arrays]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(set(found))
"""


def test_threads_need_ml_dtypes_at_once(fake_device):
    """It is imported when the first array of such a dtype comes, and those after that wait."""
    pytest.importorskip("ml_dtypes")
    for _ in range(5):
        assert run_child(fake_device.gpuops, FIRST_BFLOAT16) == "{'bfloat16'}\n"


# Streams and events.


def test_threads_share_a_stream(gpu, short_switch_interval):
    """Entered, recorded on, waited for and used by all; each leaves what it has entered."""
    gpuops = gpu.gpuops
    stream = gpuops.Stream()
    x = np.arange(1000)
    d = gpuops.to_device(x, stream=stream)

    def work(number):
        for turn in range(20):
            with stream, stream:
                assert gpuops.current_stream() == stream
                result = gpuops.gather(d, [number, turn])
                event = stream.record()
            stream.wait(event)
            assert result.stream == stream and hash(stream) == hash(result.stream)
            same(result.to_host(stream=stream), x[[number, turn]])
            stream.synchronize()
            assert gpuops.current_stream().ptr == 1
            with pytest.raises(RuntimeError, match="entered last"):
                stream.__exit__(None, None, None)

    in_threads(work)


def test_threads_hear_of_a_bad_index_once(gpu):
    """All wait for the stream on which it was met, and it is raised to one of them."""
    gpuops = gpu.gpuops
    d = gpuops.to_device(np.arange(10))
    raised = []

    def action(number, stream):
        try:
            stream.synchronize()
        except IndexError as error:
            raised.append(str(error).partition(" (")[0])

    def make(turn):
        stream = gpuops.Stream()
        gpuops.gather(d, [100 + turn], stream=stream)
        return stream

    at_once(action, 20, make)
    assert sorted(raised) == sorted(
        f"index {100 + turn} is out of bounds for axis 0 with size 10" for turn in range(20)
    )


@pytest.mark.parametrize("kind", ["stream", "event", "array", "view"])
def test_threads_drop_the_last_references(gpu, kind):
    """To an object, and to weak references to it."""
    gpuops = gpu.gpuops
    d = gpuops.to_device(np.arange(100))
    make = {
        "stream": gpuops.Stream,
        "event": gpuops.Event,
        "array": lambda: gpuops.empty(100),
        "view": lambda: d[3:],
    }[kind]
    boxes = [[make()] for _ in range(200)]
    barrier = threading.Barrier(THREADS)

    def work(number):
        for box in boxes:
            mine = box[0]
            seen = weakref.ref(mine)
            barrier.wait(60)
            box.clear()
            del mine
            del seen

    in_threads(work)
    same(d.to_host(), np.arange(100))


# Page-locked memory.


def test_threads_release_a_pin(gpu, short_switch_interval):
    """Once, however many do it; its memory is the array's, which goes when nobody needs it."""
    gpuops = gpu.gpuops
    arrays = [np.arange(1000.0) for _ in range(100)]
    before = [sys.getrefcount(array) for array in arrays]

    def action(number, pin):
        if number % 4 == 0:
            pin.__exit__(None, None, None)
        elif number % 4 == 1:
            text = repr(pin)
            assert text == "<gpuops.pin, released>" or "(1000,)" in text
        elif number % 4 == 2:
            assert pin.locked in (True, False)
            pin.release()
        else:
            try:
                with pin:
                    pass
            except ValueError as error:
                assert "was released" in str(error)

    pins = at_once(action, len(arrays), lambda turn: gpuops.pin(arrays[turn]))
    assert not any(pin.locked for pin in pins)
    assert [sys.getrefcount(array) for array in arrays] == before


def test_threads_make_arrays_in_pinned_memory(gpu):
    gpuops = gpu.gpuops

    def work(number):
        for turn in range(30):
            with gpuops.pinned_memory():
                x = np.full(1000 * (1 + turn % 3), number)
            y = gpuops.pinned_empty(x.shape, x.dtype)
            y[...] = gpuops.add(x, 1)
            assert (y == number + 1).all()

    in_threads(work)


# Other libraries' arrays.


def test_threads_are_given_the_same_capsule(gpu):
    """By a library that hands it out twice: one of them gets the array, and gives it back once."""
    gpuops = gpu.gpuops
    d = gpuops.to_device(np.arange(10))
    gpuops.synchronize()
    outcomes = []

    class Twice(Producer):
        def __dlpack__(self, **keywords):
            return self.handed_out

    def make(turn):
        producer = Twice(d)
        producer.handed_out = producer.capsule()
        return producer

    def action(number, producer):
        try:
            gpuops.from_dlpack(producer)
        except BufferError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("taken")

    producers = at_once(action, 100, make)
    assert outcomes.count("taken") == len(producers)
    assert set(outcomes) == {"taken", "x gave a DLPack capsule that has been consumed already"}
    gpuops.empty_cache()
    assert [producer.deleted for producer in producers] == [1] * len(producers)
    assert not DELETED_TWICE and not LIVE


def test_threads_bring_a_new_type(gpu):
    """What a type offers is found out by whoever comes first, for all."""
    gpuops = gpu.gpuops
    d = gpuops.to_device(np.arange(10))
    gpuops.synchronize()

    def make(turn):
        kind = type(f"Kind{turn}", (Producer,), {})
        return [kind(d) for _ in range(THREADS)]

    def action(number, arrays):
        same(gpuops.from_dlpack(arrays[number]).to_host(), np.arange(10))

    for arrays in at_once(action, 20, make):
        gpuops.empty_cache()
        assert [array.deleted for array in arrays] == [1] * THREADS


def test_threads_export_one_array(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(np.arange(100))

    def work(number):
        for _ in range(50):
            capsule = d.__dlpack__(stream=-1, max_version=(1, 0))
            assert d.__cuda_array_interface__["shape"] == (100,)
            del capsule
            assert gpuops.from_dlpack(d).ptr == d.ptr

    in_threads(work)
    gc.collect()


# Kernels.


def test_threads_share_a_kernel(gpu, short_switch_interval):
    """It is launched by some while others ask it, and set what it may take."""
    module = saxpy_module(gpu)
    kernel = module["saxpy"]
    if gpu.fake is not None:  # a twin that does nothing; one in Python would be slow
        nothing = ctypes.cast(ctypes.CDLL(None).abs, MODULE_TWIN)
        gpu.fake.library.fake_set_module_twin(b"saxpy", nothing)
    sizes = itertools.cycle([1000, 2000, 4000])
    x, y = gpu.gpuops.zeros(100, "f4"), gpu.gpuops.zeros(100, "f4")

    def work(number):
        for _ in range(50):
            if number % 4 == 0:
                kernel.max_dynamic_shared_bytes = next(sizes)
            assert kernel.max_dynamic_shared_bytes >= 1000 or number % 4 != 0
            assert kernel.attributes.max_threads > 0
            assert module["saxpy"].name == "saxpy" and "saxpy" in repr(module)
            kernel.forall(100)(1, x, y, 0)
            kernel[1, 32, None, 500](1, x, y, 0)

    try:
        kernel.max_dynamic_shared_bytes = 1000
        in_threads(work)
    finally:
        if gpu.fake is not None:
            gpu.fake.library.fake_set_module_twin(b"saxpy", MODULE_TWIN())
