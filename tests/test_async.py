"""Calls on device arrays return before the work is done: order, lifetimes, late errors, `out=`.

Everything runs on the fake runtime, whose schedulers put work off for as long as they may, and on
a real GPU.
"""

import contextlib
import ctypes
import gc
import itertools
import re
import threading
import weakref

import numpy as np
import operators
import pytest
import reference
from capsules import Producer, new_kind
from helpers import (
    INDEX_DTYPES,
    UNCAPTURED,
    constant,
    filled_array,
    keep_busy,
    run_child,
    run_threads,
    same,
    turns_of,
)

MODES = ["raise", "wrap", "clip", "fill"]
SCHEDULERS = [("now", 0), ("lazy", 0), *(("shuffled", seed) for seed in range(4))]


@pytest.fixture
def gpuops(gpu):
    """The module; a bad index that a test provokes has to be met in that test."""
    with gpu.gpuops.device("cuda"):
        yield gpu.gpuops
        gpu.gpuops.synchronize()


@pytest.fixture
def lazy(gpu):
    """On the fake runtime nothing is done until somebody waits for it."""
    yield from scheduled(gpu, "lazy", 0)


@pytest.fixture(params=SCHEDULERS, ids=lambda scheduler: "{}-{}".format(*scheduler))
def scheduler(request, gpu):
    """Every order that the fake runtime can work in; a real GPU has its own."""
    if gpu.fake is None and request.param != SCHEDULERS[0]:
        pytest.skip("a real GPU decides for itself")
    yield from scheduled(gpu, *request.param)


def scheduled(gpu, name, seed):
    if gpu.fake is None:
        yield name
        return
    if not hasattr(gpu.fake, "set_scheduler"):
        pytest.skip("this fake runtime has one scheduler")
    gpu.fake.set_scheduler(name, seed)
    yield name
    gpu.fake.set_scheduler("now", 0)


def late(index, size, axis=0, op="gather"):
    return (
        f"index {index} is out of bounds for axis {axis} with size {size} (found by an earlier "
        f"{op} on this stream; GPUOPS_LAUNCH_BLOCKING=1 raises at the call)"
    )


def index_error(call):
    """The text of the IndexError that a call raises, or None."""
    try:
        call()
    except IndexError as error:
        return str(error)
    return None


class Interface:
    """Another library's array: a view of a DeviceArray's memory by __cuda_array_interface__."""

    def __init__(self, owner, view, host, read_only=False, stream=None):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "typestr": view.dtype.str,
            "strides": view.strides,
            "data": (
                owner.ptr
                + view.__array_interface__["data"][0]
                - host.__array_interface__["data"][0],
                read_only,
            ),
            "stream": stream,
            "version": 3,
        }


def foreign(gpuops, host, view):
    """`view(host)`, on the device: an array of somebody else's, of any strides."""
    host = np.ascontiguousarray(host)
    return Interface(gpuops.to_device(host), view(host), host)


class Neighbour:
    """Another library, which calls the fake runtime itself."""

    TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3

    def __init__(self, gpu):
        if gpu.fake is None:
            pytest.skip("needs the fake runtime")
        self.library = gpu.fake.library
        self.stream = ctypes.c_void_p()
        self.check(self.library.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1))

    def __cuda_stream__(self):
        return (0, self.stream.value)

    def check(self, error):
        assert error == 0, f"CUDA error {error}"

    def copy(self, target, source):
        """Queues a copy of one DeviceArray's memory to that of another."""
        size = ctypes.c_size_t(target.nbytes)
        target, source = ctypes.c_void_p(target.ptr), ctypes.c_void_p(source.ptr)
        self.check(self.library.cudaMemcpyAsync(target, source, size, self.ON_DEVICE, self.stream))

    def dawdle(self, d, stream, turns):
        """Queues much work that changes nothing."""
        address, stream = ctypes.c_void_p(d.ptr), ctypes.c_void_p(stream.ptr)
        for _ in range(turns):
            self.check(self.library.cudaMemsetAsync(address, 0, ctypes.c_size_t(1), stream))

    def order(self, stream):
        """Makes a stream wait for what is queued on this one."""
        event, stream = ctypes.c_void_p(), ctypes.c_void_p(stream)
        self.check(self.library.cudaEventCreateWithFlags(ctypes.byref(event), 2))
        self.check(self.library.cudaEventRecord(event, self.stream))
        self.check(self.library.cudaStreamWaitEvent(stream, event, 0))
        self.check(self.library.cudaEventDestroy(event))

    def synchronize(self):
        self.check(self.library.cudaStreamSynchronize(self.stream))

    def destroy(self):
        self.check(self.library.cudaStreamDestroy(self.stream))


class Both(Producer):
    """An array of a neighbour that speaks DLPack too, and then orders the streams itself."""

    def __init__(self, neighbour, d):
        super().__init__(d)
        self.neighbour = neighbour
        self.__cuda_array_interface__ = {
            **d.__cuda_array_interface__,
            "stream": neighbour.stream.value,
        }

    def __dlpack__(self, **keywords):
        stream = keywords.get("stream")
        if stream != -1:
            self.neighbour.order(1 if stream is None else stream)
        return super().__dlpack__(**keywords)


@pytest.fixture
def neighbour(gpu):
    neighbour = Neighbour(gpu)
    yield neighbour
    if neighbour.stream:
        neighbour.destroy()


@pytest.fixture
def capture(gpu):
    """Begins a capture on a stream, which ends with the block, and must not have been spoilt."""
    if gpu.fake is None:
        pytest.skip("needs the fake runtime; test_libraries.py makes graphs")

    @contextlib.contextmanager
    def capture(stream):
        gpu.fake.set_capturing(stream.ptr, True)
        try:
            yield
        finally:
            gpu.fake.set_capturing(stream.ptr, False)
        misuse = gpu.fake.take_misuse()
        assert not misuse, misuse

    return capture


# Calls return at once.


def test_calls_return_before_the_work_is_done(gpuops, gpu, lazy):
    x, places = filled_array((1000, 3), "f4"), np.array([5, -1, 0])
    stream = gpuops.Stream()
    d, indices = gpuops.to_device(x, stream=stream), gpuops.to_device(places, stream=stream)
    out = gpuops.empty((3, 3), "f4", stream=stream)
    along = gpuops.to_device(places[:, None], stream=stream)
    seven = gpuops.to_device(7, stream=stream)

    def calls():
        return [
            gpuops.gather(d, indices),
            gpuops.gather(d, indices, out=out),
            gpuops.take(d, indices, 0, mode="wrap"),
            gpuops.take_along_axis(d, along, 0),
            gpuops.gather(d, seven),
            d.copy(),
            d[::-2].copy(),
        ]

    with stream:
        calls()
        stream.synchronize()
        assert stream.query()
        keep_busy(gpuops, gpu, stream)
        results = calls()
        event = stream.record()
        assert not event.query()
        assert not stream.query()
    assert [result.shape for result in results[2:5]] == [(3, 3), (3, 3), (3,)]
    assert all(result.stream == stream for result in results)
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()
    same(results[0].to_host(), x[places])
    same(results[5].to_host(), x)
    same(results[6].to_host(), x[::-2].copy())


def test_results_are_device_arrays(gpuops):
    d = gpuops.to_device(np.arange(6.0).reshape(2, 3))
    for indices, shape in [(1, (3,)), ([], (0, 3)), ([[0], [1]], (2, 1, 3)), (np.int8(-1), (3,))]:
        result = gpuops.gather(d, indices)
        assert isinstance(result, gpuops.DeviceArray)
        assert result.shape == shape and result.dtype == np.float64 and result.device == 0
    scalar = gpuops.gather(gpuops.to_device([5, 6, 7]), 1)
    assert isinstance(scalar, gpuops.DeviceArray) and scalar.shape == ()
    same(scalar.to_host(), np.array(6))
    assert gpuops.gather(gpuops.empty((0, 4)), np.zeros((2, 0), int)).shape == (2, 0, 4)
    assert gpuops.gather(gpuops.empty((3, 0)), [2]).to_host().shape == (1, 0)
    # With every operand on the host nothing has changed.
    assert isinstance(gpuops.gather(np.arange(3), [1]), np.ndarray)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_values(gpuops, lazy, mode, dtype):
    """All modes and index dtypes, indices from everywhere; where there is an error, zeros."""
    generator = np.random.default_rng(1)
    limits = np.iinfo(dtype)
    for shape, axis, item in [
        ((100,), 0, "u1"), ((100, 1), 0, "i2"), ((50, 3), 0, "V3"), ((60, 64), 0, "f4"),
        ((40, 5), 0, "c16"), ((4, 30, 5), 1, "f8"), ((3, 70), -1, "V12"), ((20, 6), None, "i4"),
    ]:  # fmt: skip
        x = filled_array(shape, item)
        size = x.size if axis is None else shape[axis]
        good = generator.integers(max(-size, limits.min), min(size, limits.max + 1), 200)
        places = good.astype(dtype).reshape(20, 10)
        d, indices = gpuops.to_device(x), gpuops.to_device(places)
        expected = reference.gather(x, places, axis, mode)
        same(gpuops.gather(d, indices, axis=axis, mode=mode).to_host(), expected)
        bad = places.copy()
        bad.flat[::7] = generator.choice(np.array([limits.min, limits.max], dtype), len(places) + 9)
        outside = reference.out_of_bounds(bad, size)
        result = gpuops.gather(d, gpuops.to_device(bad), axis=axis, mode=mode)
        if mode == "raise":
            first = bad[outside][0] if outside.any() else None
            text = index_error(gpuops.synchronize)
            named = 0 if axis is None else axis % x.ndim
            assert text == (None if first is None else late(first, size, named))
            same(result.to_host(), np.asarray(reference.gather(x, bad, axis, "fill")))
        else:
            same(result.to_host(), np.asarray(reference.gather(x, bad, axis, mode)))


@pytest.mark.parametrize("mode", MODES)
def test_values_along_an_axis(gpuops, lazy, mode):
    generator = np.random.default_rng(2)
    for shape, index_shape, axis in [
        ((7, 5), (3, 5), 0), ((7, 5), (7, 9), 1), ((4, 1, 6), (4, 8, 6), 1), ((5, 3), (1, 4), -1),
        ((9,), (20,), 0), ((6, 4), (11,), None),
    ]:  # fmt: skip
        x = filled_array(shape, "f4")
        size = x.size if axis is None else shape[axis]
        places = generator.integers(-size, size, index_shape)
        d = gpuops.to_device(x)
        result = gpuops.take_along_axis(d, gpuops.to_device(places), axis, mode=mode)
        same(result.to_host(), reference.take_along_axis(x, places, axis, mode))
        places.flat[len(places) // 2] = size
        result = gpuops.take_along_axis(d, gpuops.to_device(places), axis, mode=mode)
        if mode == "raise":
            named = 0 if axis is None else axis % x.ndim
            assert index_error(gpuops.synchronize) == late(size, size, named, "take_along_axis")
            same(result.to_host(), reference.take_along_axis(x, places, axis, "fill"))
        else:
            same(result.to_host(), reference.take_along_axis(x, places, axis, mode))


def test_fill_value(gpuops, lazy):
    x, places = filled_array((5, 4), "f4"), np.array([4, 5, -6, 0])
    d = gpuops.to_device(x)
    for value in (2.5, np.float32(-1), None):
        result = gpuops.gather(d, places, mode="fill", fill_value=value)
        same(result.to_host(), reference.gather(x, places, 0, "fill", value))
    records = np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f8")])
    result = gpuops.gather(gpuops.to_device(records), [1, 9], mode="fill", fill_value=(7, 8))
    assert result.to_host().tolist() == [(3, 4.5), (7, 8)]
    with pytest.raises(TypeError, match="would lose its value"):
        gpuops.gather(gpuops.to_device([1, 2]), [0], mode="fill", fill_value=1.5)
    with pytest.raises(ValueError, match="for mode='fill' only"):
        gpuops.gather(d, [0], fill_value=1)


# A bad index is raised late, once.

OPERATORS = {
    "gather": lambda gpuops, d: gpuops.gather(d, [1, 7, 9]),
    "take": lambda gpuops, d: gpuops.take(d, [1, 7, 9], 0),
    "take_along_axis": lambda gpuops, d: gpuops.take_along_axis(d, [1, 7, 9], 0),
}

SYNCHRONISING = {
    "to_host": lambda gpuops, d: d.to_host(),
    "to_host, out": lambda gpuops, d: d.to_host(np.empty(3)),
    "Stream.synchronize": lambda gpuops, d: d.stream.synchronize(),
    "synchronize": lambda gpuops, d: gpuops.synchronize(),
    "synchronize, device": lambda gpuops, d: gpuops.synchronize("cuda:0"),
    "Event.synchronize": lambda gpuops, d: d.stream.record().synchronize(),
    "DLPack to the host": lambda gpuops, d: d.__dlpack__(dl_device=(1, 0), max_version=(1, 0)),
}
if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
    SYNCHRONISING["numpy.from_dlpack"] = lambda gpuops, d: np.from_dlpack(d, device="cpu")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("name", SYNCHRONISING)
def test_raised_by_whoever_waits(gpuops, lazy, name, own_stream, operator):
    stream = gpuops.Stream() if own_stream else gpuops.current_stream()
    with stream:
        d = gpuops.to_device(np.arange(1.0, 6.0))
        for _ in range(2):
            result = OPERATORS[operator](gpuops, d)
            text = index_error(lambda result=result: SYNCHRONISING[name](gpuops, result))
            assert text == late(7, 5, 0, operator)
            for wait in SYNCHRONISING.values():
                wait(gpuops, result)
            assert result.to_host().tolist() == [2, 0, 0]
            assert gpuops.gather(d, [4]).to_host() == [5]


def test_what_does_not_wait_raises_nothing(gpuops, lazy):
    with gpuops.Stream() as stream:
        d = gpuops.to_device(np.arange(5.0))
        result = gpuops.gather(d, [9])
        gpuops.gather(d, [1], out=result)
        assert result[0].shape == () and result.reshape(1, 1).nbytes == 8
        result.copy()
        result.fill(1)
        result.__dlpack__(max_version=(1, 0))
        assert result.__cuda_array_interface__["shape"] == (1,)
        event = stream.record()
        event.query()
        stream.query()
        event.wait()
        stream.wait(event)
        del result, d
        gc.collect()
        assert index_error(stream.synchronize) == late(9, 5)
        stream.synchronize()


def test_an_error_belongs_to_its_stream(gpuops, lazy):
    one, other = gpuops.Stream(), gpuops.Stream()
    d = gpuops.to_device(np.arange(5.0))
    d.stream.synchronize()
    for wait in (one.synchronize, gpuops.synchronize):
        result = gpuops.gather(d, [8], stream=one)
        good = gpuops.gather(d, [3], stream=other)
        other.synchronize()
        assert good.to_host().tolist() == [3]
        gpuops.current_stream().synchronize()
        assert index_error(wait) == late(8, 5)
        for stream in (one, other):
            stream.synchronize()
        gpuops.synchronize()
        assert result.to_host().tolist() == [0]
    # With an error on each of them, none gets lost, and none is raised twice.
    gpuops.gather(d, [8], stream=one)
    gpuops.gather(d, [9], stream=other)
    waits = (gpuops.synchronize, gpuops.synchronize, one.synchronize, other.synchronize)
    texts = [index_error(wait) for wait in waits]
    assert texts[0] is not None
    assert sorted(filter(None, texts)) == [late(8, 5), late(9, 5)]


def test_an_error_is_raised_to_one_of_two_threads(gpuops):
    """Whoever of them waits, each error is raised once, and none is lost."""
    d, stream = gpuops.to_device(np.arange(5.0)), gpuops.Stream()
    barrier, texts = threading.Barrier(2, timeout=60), []
    turns = range(500)

    def wait(number):
        for turn in turns:
            barrier.wait()
            if number == 0:
                gpuops.gather(d, [10 + turn], stream=stream)
            barrier.wait()
            if (text := index_error(stream.synchronize)) is not None:
                texts.append(text)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert texts == [late(10 + turn, 5) for turn in turns]


def test_the_first_of_all_bad_indices_is_named(gpuops, lazy):
    d = gpuops.to_device(np.arange(1000.0))
    for places, first in [
        ([5, 1001, 1002], 1001), ([1002, 1001], 1002), ([-1001, 5000], -1001),
    ]:  # fmt: skip
        gpuops.gather(d, [0, 5])
        gpuops.gather(d, places)
        gpuops.gather(d, [7777, 8888])
        gpuops.gather(d, [0, 5])
        assert index_error(gpuops.synchronize) == late(first, 1000)
        gpuops.synchronize()
    # Whichever thread of the GPU comes first.
    many = np.arange(100_000) + 1000
    many[:60_000] = 3
    result = gpuops.gather(d, many)
    assert index_error(result.to_host) == late(61_000, 1000)
    host = result.to_host()
    assert (host[:60_000] == 3).all() and not host[60_000:].any()
    # An error that is cleared makes room for the next, though the stream went on.
    gpuops.gather(d, [2000])
    assert index_error(gpuops.synchronize) == late(2000, 1000)


def test_the_largest_indices(gpuops, lazy):
    d = gpuops.to_device(np.arange(5.0))
    for dtype in INDEX_DTYPES:
        limits = np.iinfo(dtype)
        for value in {limits.min, limits.max} - {0}:
            result = gpuops.gather(d, np.array([2, value, 3], dtype))
            assert index_error(gpuops.synchronize) == late(value, 5)
            assert result.to_host().tolist() == [2, 0, 3]


def test_out_of_a_bad_call(gpuops, lazy):
    """Its good rows are written, its bad ones are zero, and nothing else is."""
    x = np.arange(1.0, 13.0).reshape(4, 3)
    d, out = gpuops.to_device(x), gpuops.to_device(np.full((5, 3), 9.0))
    assert gpuops.gather(d, [3, 4, -5], out=out[1:4]).shape == (3, 3)
    assert index_error(gpuops.synchronize) == late(4, 4)
    expected = np.full((5, 3), 9.0)
    expected[1], expected[2:4] = x[3], 0
    same(out.to_host(), expected)
    # What is found before any work is done leaves it as it was.
    for call, error in [
        (lambda: gpuops.gather(d, [0.5], out=out[:1]), IndexError),
        (lambda: gpuops.gather(d, [0], axis=2, out=out[:1]), np.exceptions.AxisError),
        (lambda: gpuops.gather(d, [0], mode="x", out=out[:1]), ValueError),
    ]:
        with pytest.raises(error):
            call()
        same(out.to_host(), expected)


def test_host_arrays_raise_at_the_call(gpuops, lazy):
    """A call that brings its result to the host has waited for it."""
    d = gpuops.to_device(np.arange(5.0))
    gpuops.gather(d, [9])
    with pytest.raises(IndexError, match="^index 6 is out of bounds for axis 0 with size 5$"):
        gpuops.gather(np.arange(5.0), [6])
    assert gpuops.gather(np.arange(5.0), [4]).tolist() == [4]
    assert index_error(gpuops.synchronize) == late(9, 5)


def test_a_stream_that_is_gone_leaves_no_error_behind(gpu):
    """In a process of its own, because it goes through all the places that hold such errors."""
    source = """
import gpuops
for _ in range(5000):
    stream = gpuops.Stream()
    stream.synchronize()
    gpuops.gather(gpuops.to_device([1.0, 2.0, 3.0], stream=stream), [7], stream=stream)
    del stream
# Whether an error that has lost its stream is still told is left open, but not to whom.
for _ in range(10_000):
    try:
        gpuops.synchronize()
        break
    except IndexError:
        pass
for _ in range(100):
    with gpuops.Stream() as stream:
        d = gpuops.gather(gpuops.to_device([1.0, 2.0, 3.0]), [1])
        stream.synchronize()
        assert d.to_host() == [2]
gpuops.synchronize()
print("done")
"""
    assert run_child(gpu.gpuops, source) == "done\n"


def test_an_error_of_a_stream_that_its_library_has_destroyed(gpuops, neighbour):
    """It may still be told or not, once; nobody may work on that stream any more."""
    d = gpuops.to_device(np.arange(5.0))
    gpuops.synchronize()
    result = gpuops.gather(d, [9], stream=neighbour)
    neighbour.synchronize()
    del result
    gc.collect()
    neighbour.destroy()
    neighbour.stream = None
    texts = [index_error(gpuops.synchronize) for _ in range(3)]
    assert texts in ([None, None, None], [late(9, 5), None, None])
    with gpuops.Stream() as stream:
        assert gpuops.gather(d, [4]).to_host() == [4]
        stream.synchronize()


@pytest.mark.parametrize("slow", [False, True])
def test_an_event_between_two_errors(gpuops, gpu, scheduler, slow):
    """Whoever waits for the event is told of the first, and that is told to nobody else."""
    stream = gpuops.Stream()
    with stream:
        d = gpuops.to_device(np.arange(5.0))
        stream.synchronize()
        for turn in range(3):
            gpuops.gather(d, [9 + turn])
            event = stream.record()
            if slow:
                keep_busy(gpuops, gpu, stream)
            gpuops.gather(d, [6])
            first = index_error(event.synchronize)
            rest = [index_error(wait) for wait in (stream.synchronize,) * 2 + (event.synchronize,)]
            assert first == late(9 + turn, 5)
            assert rest in ([None, None, None], [late(6, 5), None, None])
        assert gpuops.gather(d, [4]).to_host() == [4]


SLOTS_OF_TWO_DEVICES = """
import gpuops, numpy as np
d = gpuops.to_device(np.arange(5.0), device=0)
stream = gpuops.Stream(0)
result = gpuops.gather(d, [9], stream=stream)
# The memory of the result is awaited by someone who is not told.
gpuops.gather(np.arange(5.0), [1], device=0)
result.copy(stream=gpuops.Stream(0)).stream.query()
del result, stream, d
x = np.arange(5.0)
for _ in range(4200):
    gpuops.gather(x, [1], device=1)
lost = 0
for _ in range(4200):
    try:
        gpuops.gather(x, [9], device=0)
        lost += 1
    except IndexError:
        pass
print(lost)
"""


def test_no_error_is_lost_beside_a_second_device(gpu):
    """In a process of its own, which goes through all the places that hold bad indices."""
    if gpu.fake is None and gpu.gpuops.device_count() < 2:
        pytest.skip("there is one GPU")
    assert run_child(gpu.gpuops, SLOTS_OF_TWO_DEVICES, GPUOPS_FAKE_DEVICES="2") == "0\n"


def test_launch_blocking(gpu):
    source = """
import gpuops, numpy as np
def error_of(call):
    try:
        call()
    except IndexError as error:
        return error
d = gpuops.to_device(np.arange(1.0, 6.0))
out = gpuops.to_device(np.full(2, 9.0))
with gpuops.Stream() as stream:
    print(error_of(lambda: gpuops.gather(d, [0, 7])))
    print(error_of(lambda: gpuops.take(d, [-6], 0)))
    print(error_of(lambda: gpuops.take_along_axis(d, [5], 0)))
    print(error_of(lambda: gpuops.gather(d, [0, 7], out=out)))
    print(error_of(lambda: gpuops.scatter(out, [1, 2], 0.0)))
    print(error_of(lambda: gpuops.scatter_add(out, [1, -3], 0.0)))
    stream.synchronize()
gpuops.synchronize()
print(gpuops.gather(d, [4]).to_host(), gpuops.gather(d, [4, 9], mode="fill").to_host())
"""
    assert run_child(gpu.gpuops, source, GPUOPS_LAUNCH_BLOCKING="1").splitlines() == [
        "index 7 is out of bounds for axis 0 with size 5",
        "index -6 is out of bounds for axis 0 with size 5",
        "index 5 is out of bounds for axis 0 with size 5",
        "index 7 is out of bounds for axis 0 with size 5",
        "index 2 is out of bounds for axis 0 with size 2",
        "index -3 is out of bounds for axis 0 with size 2",
        "[5.] [5. 0.]",
    ]
    source = source.split("with gpuops")[0] + "print(error_of(lambda: gpuops.gather(d, [7])))"
    for value in ("0", ""):
        assert run_child(gpu.gpuops, source, GPUOPS_LAUNCH_BLOCKING=value) == "None\n"


BLOCKING_CAPTURE = """
from pathlib import Path
import gpuops, numpy as np
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
stream = gpuops.Stream()
d, indices = gpuops.to_device(np.arange(5.0)), gpuops.to_device([1, 2])
out = gpuops.empty(2)
gpuops.gather(d, indices, out=out, stream=stream)
fake.set_capturing(stream.ptr, True)
gpuops.gather(d, indices, out=out, stream=stream)
gpuops.take(d, indices, 0, stream=stream)
d.copy(stream=stream)
out.fill(7, stream=stream)
fake.set_capturing(stream.ptr, False)
print(fake.take_misuse() + "done")
"""


def test_launch_blocking_does_not_wait_for_a_captured_stream(gpu):
    if gpu.fake is None:
        pytest.skip("needs the fake runtime; test_libraries.py makes graphs")
    assert run_child(gpu.gpuops, BLOCKING_CAPTURE, GPUOPS_LAUNCH_BLOCKING="1") == "done\n"


# Work that is queued keeps what it needs.


def test_a_copy_to_the_host_that_fails_half_way(fake):
    """The kernel that packs it is queued, and memory that it is to read goes to nobody else."""
    gpuops, home, other = fake.gpuops, fake.gpuops.Stream(), fake.gpuops.Stream()
    fake.fake.set_scheduler("lazy")
    source = gpuops.zeros(2000, stream=home)
    home.synchronize()
    fake.fake.take_time(other.ptr, 0.2)
    with (
        fake.fake.fail(1, 999, function="cudaMemcpyAsync"),
        pytest.raises(gpuops.DeviceError, match="cudaMemcpyAsync"),
    ):
        source[::2].to_host(stream=other)
    place = source.ptr
    del source
    used = [gpuops.zeros(2000, stream=home) for _ in range(4)]
    home.synchronize()
    assert other.query() or place not in [array.ptr for array in used]
    other.synchronize()


def test_ten_thousand_submissions_whose_sources_are_dropped_at_once(gpuops, scheduler):
    streams = [gpuops.Stream() for _ in range(3)]
    generator = np.random.default_rng(0)
    for turn in range(turns_of(10 if scheduler == "shuffled" else 100)):
        values = generator.integers(0, 1 << 30, (100, 16), dtype=np.int32)
        places = generator.integers(-16, 16, (100, 8))
        results = [
            gpuops.gather(
                gpuops.to_device(values[i], stream=streams[i % 3]),
                gpuops.to_device(places[i], stream=streams[(i + turn) % 3]),
                stream=streams[i % 2],
            )
            for i in range(100)
        ]
        for i, result in enumerate(results):
            same(result.to_host(), values[i][places[i]])


def test_a_chain_of_results_that_nobody_keeps(gpuops, scheduler):
    size = 1000
    shift = gpuops.to_device(np.roll(np.arange(size), -1))
    streams = [gpuops.Stream() for _ in range(3)]
    d = gpuops.to_device(np.arange(size))
    turns = turns_of(1000)
    for turn in range(turns):
        d = gpuops.gather(d, shift, stream=streams[turn % 3])
    assert (d.to_host() == (np.arange(size) + turns) % size).all()
    for _ in range(100):
        d = gpuops.gather(d, shift, stream=gpuops.Stream())
    assert (d.to_host() == (np.arange(size) + turns + 100) % size).all()


@pytest.mark.parametrize("seed", range(3))
def test_random_work_on_several_streams(gpuops, scheduler, seed):
    """Whatever the streams do, the arrays hold what the calls in their order would make of them."""
    generator = np.random.default_rng(seed)
    streams = [gpuops.current_stream(), *(gpuops.Stream() for _ in range(3))]
    streams.append(gpuops.Stream(nonblocking=False))
    size = 512
    model = [generator.integers(0, 1 << 20, size) for _ in range(6)]
    arrays = [gpuops.to_device(values, stream=streams[i % 5]) for i, values in enumerate(model)]
    tables = [generator.integers(-size, size, size) for _ in range(4)]
    indices = [gpuops.to_device(places) for places in tables]
    for _ in range(300):
        target, source, table, stream = generator.integers([6, 6, 4, 5])
        stream = streams[stream]
        kind = generator.integers(7)
        if kind == 0:
            arrays[target] = gpuops.gather(arrays[source], indices[table], stream=stream)
            model[target] = model[source][tables[table]]
        elif kind == 1:
            gpuops.gather(arrays[source], indices[table], out=arrays[target], stream=stream)
            model[target] = model[source][tables[table]]
        elif kind == 2:
            value = int(generator.integers(1 << 20))
            arrays[target][100:200].fill(value, stream=stream)
            model[target] = model[target].copy()
            model[target][100:200] = value
        elif kind == 3:
            arrays[target] = arrays[source].copy(stream=stream)
            model[target] = model[source]
        elif kind == 4:
            arrays[target] = gpuops.take(arrays[source][::-1], indices[table], stream=stream)
            model[target] = model[source][::-1][tables[table]]
        elif kind == 5:
            out = arrays[target][::-1]
            gpuops.gather(arrays[source], indices[table], out=out, stream=stream)
            model[target] = model[source][tables[table]][::-1]
        elif generator.integers(8) == 0:
            same(arrays[source].to_host(stream=stream), np.ascontiguousarray(model[source]))
    for array, values in zip(arrays, model, strict=True):
        same(array.to_host(), np.ascontiguousarray(values))


def test_views_keep_their_memory(gpuops, scheduler):
    x = filled_array((64, 8), "f4")
    views = [gpuops.to_device(x)[i : i + 8] for i in range(50)]
    junk = [gpuops.to_device(np.zeros_like(x)) for _ in range(50)]
    results = [gpuops.gather(view, [7, 0]) for view in views]
    del views, junk
    for i, result in enumerate(results):
        same(result.to_host(), x[[i + 7, i]])


OWNERS_GO_AT = {
    "synchronize": lambda gpuops, out: gpuops.synchronize(),
    "Stream.synchronize": lambda gpuops, out: out.stream.synchronize(),
    "to_host": lambda gpuops, out: out.to_host(),
}


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("name", OWNERS_GO_AT)
def test_owners_are_let_go_by_whoever_waits(gpuops, gpu, lazy, name, own_stream):
    """Once the work on their memory is done, and not only when the next array is made."""
    stream = gpuops.Stream() if own_stream else gpuops.current_stream()
    with stream:
        host = np.arange(100.0)
        d, indices, out = gpuops.to_device(host), gpuops.to_device([1, 2]), gpuops.empty(2)
        stream.synchronize()
        for _ in range(3):
            for _ in range(5 if gpu.fake else 1):
                keep_busy(gpuops, gpu, stream)
            theirs = Interface(d, host, host)
            gone = weakref.ref(theirs)
            gpuops.gather(theirs, indices, out=out)
            del theirs
            assert gone() is not None
            OWNERS_GO_AT[name](gpuops, out)
            assert gone() is None


# Strides.

VIEWS = {
    "backward": lambda a: a[::-1],
    "steps": lambda a: a[::2],
    "steps backward": lambda a: a[7:0:-3],
    "steps of steps": lambda a: a[1:][::-2][:3],
    "one": lambda a: a[3],
    "one of one": lambda a: a[-1][1],
    "none": lambda a: a[5:2],
}
FOREIGN = {
    "transposed": lambda a: a.T,
    "swapped": lambda a: a.transpose(1, 2, 0),
    "columns": lambda a: a[:, 1::2],
    "backward": lambda a: a[::-1, ::-1, ::-1],
    "corner": lambda a: a[2:, 1:, 3:],
    "repeated": lambda a: np.broadcast_to(a[:1], a.shape),
    "diagonal": lambda a: np.einsum("iij->ij", a[:3, :3]),
}
ITEMS = ["u1", "i2", "V3", "f4", "f8", "c16", "V20"]


@pytest.mark.parametrize("dtype", ITEMS)
@pytest.mark.parametrize("name", VIEWS)
def test_slices(gpuops, lazy, name, dtype):
    x = filled_array((9, 4, 5), dtype)
    view, d = VIEWS[name], VIEWS[name](gpuops.to_device(x))
    host = view(x)
    assert (d.shape, d.strides) == (host.shape, host.strides) or d.size == 0
    check_gathers(gpuops, d, host)


@pytest.mark.parametrize("dtype", ITEMS)
@pytest.mark.parametrize("name", FOREIGN)
def test_strides_of_others(gpuops, lazy, name, dtype):
    x = filled_array((9, 4, 5), dtype)
    check_gathers(gpuops, foreign(gpuops, x, FOREIGN[name]), FOREIGN[name](x))


def check_gathers(gpuops, d, host):
    for axis in range(host.ndim):
        size = host.shape[axis]
        places = np.array([0, -1, size // 2, 0]) % size if size else np.zeros(0, int)
        expected = np.ascontiguousarray(host.take(places, axis=axis))
        result = gpuops.gather(d, places, axis=axis)
        assert isinstance(result, gpuops.DeviceArray)
        same(result.to_host(), expected)
        backward = gpuops.to_device(np.repeat(places, 2)[::-1].copy())[::-2]
        same(gpuops.gather(d, backward, axis=axis).to_host(), expected)
        along = np.zeros((*host.shape[:axis], 2, *host.shape[axis + 1 :]), np.int8)
        if size:
            result = gpuops.take_along_axis(d, along, axis)
            same(result.to_host(), np.ascontiguousarray(np.take_along_axis(host, along, axis)))
    flat = np.ascontiguousarray(host).reshape(-1)
    if flat.size:
        same(gpuops.take(d, [flat.size - 1, 0]).to_host(), flat[[-1, 0]])


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_strided_indices(gpuops, lazy, dtype):
    x, places = filled_array((50, 2), "i4"), np.arange(48, dtype=dtype).reshape(4, 3, 4)
    d = gpuops.to_device(x)
    for view in FOREIGN.values():
        indices = foreign(gpuops, places, view)
        same(gpuops.gather(d, indices).to_host(), x[view(places)])
        same(gpuops.gather(x, indices).to_host(), x[view(places)])


@pytest.mark.parametrize("name", ["transposed", "swapped", "columns", "backward", "corner"])
@pytest.mark.parametrize("dtype", ["u1", "V3", "f4", "c16"])
def test_strided_out(gpuops, lazy, name, dtype):
    view = FOREIGN[name]
    before = filled_array((6, 6, 6), dtype, seed=1)
    expected = before.copy()
    out = foreign(gpuops, before, view)
    shape = view(before).shape
    x = filled_array((9, *shape[1:]), dtype)
    places = np.arange(shape[0]) - 2
    assert gpuops.gather(gpuops.to_device(x), places, out=out) is out
    view(expected)[...] = x[places]
    same(out.owner.to_host(), expected)


# out=


def test_out(gpuops, lazy):
    x, places = filled_array((7, 5), "f4"), np.array([3, -1, 0])
    d, indices = gpuops.to_device(x), gpuops.to_device(places)
    out = gpuops.empty((3, 5), "f4")
    address = out.ptr
    assert gpuops.gather(d, indices, out=out) is out
    assert out.ptr == address
    same(out.to_host(), x[places])
    assert gpuops.take(d, indices, 1, gpuops.empty((7, 3), "f4"), "wrap").shape == (7, 3)
    whole = gpuops.zeros((6, 5), "f4")
    for target in (whole[1:4], whole[::2], whole[::-2]):
        assert gpuops.gather(d, indices, out=target) is target
        same(target.to_host(), x[places])
    # A host operand makes no difference, and the array that is written to decides with the others.
    same(gpuops.gather(d, places, out=out).to_host(), x[places])
    same(gpuops.gather(x, indices, out=out).to_host(), x[places])
    other = gpuops.Stream()
    gpuops.gather(d, indices[::-1], out=out, stream=other)
    same(out.to_host(), x[places[::-1]])


def test_operands_that_overlap_act_as_if_copied_first(gpuops, lazy):
    x = filled_array((12, 3), "i4")
    generator = np.random.default_rng(3)
    slices = [slice(0, 4), slice(3, 7), slice(8, 12), slice(0, 8, 2), slice(11, 3, -2)]
    for inner, outer in itertools.product(slices, slices):
        places = generator.integers(-4, 4, 4)
        d = gpuops.to_device(x)
        gpuops.gather(d[inner], places, out=d[outer])
        expected = x.copy()
        expected[outer] = x[inner][places]
        same(d.to_host(), expected)
    # The indices themselves.
    places = np.array([3, 1, 0, 2])
    d = gpuops.to_device(places)
    assert gpuops.gather(d, d, out=d) is d
    same(d.to_host(), places[places])
    d = gpuops.to_device(places)
    gpuops.gather(gpuops.to_device([10, 11, 12, 13]), d, out=d[::-1])
    same(d.to_host(), (places + 10)[::-1].copy())
    # Also by way of another library's view of the memory.
    d = gpuops.to_device(x)
    gpuops.gather(d, [1, 2, 3], out=Interface(d, x[:3, ::-1], x))
    expected = x.copy()
    expected[:3, ::-1] = x[1:4]
    same(d.to_host(), expected)


def test_wrong_out(gpuops, gpu):
    x = np.arange(5.0)
    d = gpuops.to_device(x)
    read_only = gpuops.asarray(Interface(d, x, x, read_only=True))
    for out, error, text in [
        (gpuops.empty(3), ValueError, "out has shape (3,), and the result has shape (2,)"),
        (gpuops.empty((2, 1)), ValueError, "out has shape (2, 1), and the result has shape (2,)"),
        (
            gpuops.empty(2, "f4"),
            TypeError,
            "out has dtype float32, and the result has dtype float6",
        ),
        (gpuops.empty(2, "i8"), TypeError, "output array does not match result of gather"),
        (read_only[:2], ValueError, "read-only"),
        (Interface(d, np.broadcast_to(x[:1], 2), x), ValueError, "share memory with each other"),
        (np.empty(2), TypeError, "out"),
        ([1.0, 2.0], TypeError, "out"),
        (3.0, TypeError, "out"),
    ]:
        for given in (d, x):
            if given is x and not hasattr(out, "__cuda_array_interface__"):
                continue
            with pytest.raises(error, match=re.escape(text)):
                gpuops.gather(given, gpuops.to_device([0, 1]), out=out)
    with pytest.raises(TypeError, match="to_host|DeviceArray"):
        gpuops.gather(d, [0, 1], out=np.empty(2))
    same(d.to_host(), x)


# Where a call runs.


def test_operands_from_host_and_device(gpuops, lazy):
    x, places = np.arange(35, dtype="f4").reshape(7, 5), np.array([3, -1, 0])
    d, indices = gpuops.to_device(x), gpuops.to_device(places)
    for operands in [
        (d, indices),
        (d, places),
        (d, [3, -1, 0]),
        (x, indices),
        (d, np.int8([3, 6, 0])),
    ]:
        result = gpuops.gather(*operands)
        assert isinstance(result, gpuops.DeviceArray)
        same(result.to_host(), x[places])
    same(gpuops.gather(x.tolist(), indices).to_host(), x.astype("f8")[places])
    same(gpuops.take_along_axis(d, places[:, None], 0).to_host(), x[places])
    result = gpuops.gather(d, np.asfortranarray(np.array([[0, 1], [2, 3]]).T))
    same(result.to_host(), x[[[0, 2], [1, 3]]])


@pytest.mark.parametrize("dtype", ["f4", "u1", "i2", "f8", "c16"])
def test_indices_of_another_kind_beside_an_array_on_the_host(gpuops, lazy, dtype):
    """The result is of the indices' kind, but of the array's dtype."""
    made = []

    def empty(shape, dtype, device):
        made.append((shape, str(dtype), device))
        return gpuops.empty(shape, dtype)

    kind = new_kind(empty=empty)
    places = np.array([2, 0, 1, 2])
    indices = kind(gpuops.to_device(places))
    for x in (np.arange(10), np.arange(12).reshape(4, 3), np.arange(12).reshape(3, 4).T):
        x = x.astype(dtype)
        for result in (gpuops.gather(x, indices), gpuops.gather(x, indices, mode="wrap")):
            assert type(result) is kind
            same(result.data.to_host(), np.ascontiguousarray(x[places]))
            assert made[-1] == (x[places].shape, x.dtype.name, (2, 0))
    result = gpuops.take(x.tolist(), indices)
    assert type(result) is kind
    same(result.data.to_host(), np.take(np.asarray(x.tolist()), places))


@pytest.mark.parametrize("protocol", ["interface", "DLPack too"])
@pytest.mark.parametrize("theirs", ["x", "out", "x and out"])
def test_the_stream_that_an_array_of_others_names(gpuops, neighbour, scheduler, theirs, protocol):
    """The work comes after what its library has queued there, and before what it queues next."""

    def show(d):
        if protocol == "DLPack too":
            return Both(neighbour, d)
        return Interface(d, host, host, stream=neighbour.stream.value)

    host = np.arange(8.0)
    source, junk = gpuops.to_device(host), gpuops.to_device(host - 100)
    places = gpuops.to_device([7, 6, 5, 4, 3, 2, 1, 0])
    for _ in range(3):
        x, out, seen = gpuops.zeros(8), gpuops.zeros(8), gpuops.zeros(8)
        gpuops.synchronize()
        busy = [gpuops.gather(source, places) for _ in range(20)]
        given = show(x) if "x" in theirs else source
        target = show(out) if "out" in theirs else None
        neighbour.copy(x, source)
        neighbour.copy(out, junk)
        result = gpuops.gather(given, places, out=target)
        neighbour.copy(x, junk)
        neighbour.copy(seen, out)
        neighbour.synchronize()
        if target is None:
            same(result.to_host(), host[::-1].copy())
        else:
            assert result is target
            same(seen.to_host(), host[::-1].copy())
            same(out.to_host(), host[::-1].copy())
        del busy, result


def test_device_that_contradicts_the_data(gpuops):
    d = gpuops.to_device(np.arange(5.0))
    for place in ("cuda", "cuda:0", 0, None):
        assert gpuops.gather(d, [1], device=place).device == 0
    for operands in ((d, [1]), (np.arange(5.0), gpuops.to_device([1]))):
        with pytest.raises(ValueError, match="cpu"):
            gpuops.gather(*operands, device="cpu")
        with pytest.raises((ValueError, gpuops.DeviceError)):
            gpuops.gather(*operands, device=gpuops.device_count())
    # A default is no wish for this call.
    with gpuops.device("cpu"):
        assert gpuops.gather(d, [1]).to_host() == [1]


def test_wrong_operands(gpuops):
    d = gpuops.to_device(np.arange(5.0))
    for indices in (d, np.array([1.0]), foreign(gpuops, np.arange(5.0), lambda x: x[::-1])):
        with pytest.raises(IndexError, match="integer"):
            gpuops.gather(d, indices)
    with pytest.raises(TypeError, match="bool"):
        gpuops.gather(d, gpuops.to_device([True] * 5))
    with pytest.raises(np.exceptions.AxisError):
        gpuops.gather(d, [0], axis=1)
    with pytest.raises(ValueError, match="single dimension"):
        gpuops.take_along_axis(d, gpuops.to_device([[0]]), None)
    with pytest.raises(ValueError, match="dimension"):
        gpuops.take_along_axis(d, gpuops.to_device([[0]]), 0)
    for stream in (0, "0", object()):
        with pytest.raises(TypeError, match="__cuda_stream__"):
            gpuops.gather(d, [0], stream=stream)


TWO_DEVICES = """
import gpuops, numpy as np
x, places = np.arange(100.0), np.array([5, -1, 7])
first, second = gpuops.to_device(x), gpuops.to_device(x, device=1)
indices = gpuops.to_device(places, device="cuda:1")
assert (first.device, second.device, indices.device, first.stream.device) == (0, 1, 1, 0)
for operands in ((second, indices), (second, places), (x, indices)):
    result = gpuops.gather(*operands)
    assert result.device == 1 and (result.to_host() == x[places]).all()
    assert gpuops.empty(1).device == 0, "the current device has changed"
for operands in ((first, indices), (second, gpuops.to_device(places))):
    try:
        gpuops.gather(*operands)
    except ValueError as error:
        print(error)
for keywords in ({"device": 0}, {"out": gpuops.empty(3)}, {"stream": gpuops.Stream(0)}):
    try:
        gpuops.gather(second, indices, **keywords)
    except ValueError as error:
        print(type(error).__name__, error)
for moved in (gpuops.to_device(second, device=0), gpuops.to_device(second[::-1], device=0)[::-1]):
    assert moved.device == 0 and (moved.to_host() == x).all()
gpuops.gather(second, [100])
gpuops.synchronize(0)
try:
    gpuops.synchronize(1)
except IndexError as error:
    print(error)
with gpuops.device(1):
    assert gpuops.empty(1).device == 1 and gpuops.gather(first, places).device == 0
before = gpuops.memory_info(1).used
del second, indices, result, operands
assert gpuops.memory_info(1).used < before
"""


def test_two_devices(gpu):
    if gpu.fake is None and gpu.gpuops.device_count() < 2:
        pytest.skip("there is one GPU")
    output = run_child(gpu.gpuops, TWO_DEVICES, GPUOPS_FAKE_DEVICES="2").splitlines()
    assert len(output) == 6, output
    for line in output[:2]:
        assert "x is on cuda:" in line and "indices on cuda:" in line
    assert all(line.startswith("ValueError") and "cuda:1" in line for line in output[2:5])
    assert output[5] == late(100, 100)


# What a call costs.

WAITING = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"]
ALLOCATING = [
    "cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync", "cudaHostAlloc", "cudaMallocHost",
    "cudaFree", "cudaFreeAsync", "cudaFreeHost", "cudaMemGetInfo", "cudaEventCreateWithFlags",
    "cudaStreamCreateWithPriority",
]  # fmt: skip


@pytest.mark.parametrize("own_stream", [False, True])
def test_calls_allocate_nothing_beyond_the_result_and_never_wait(fake_device, own_stream):
    gpuops, fake = fake_device.gpuops, fake_device.fake
    stream = gpuops.Stream() if own_stream else gpuops.current_stream()
    x, places = filled_array((1000, 4), "f4"), np.arange(100)
    with stream:
        d, indices = gpuops.to_device(x), gpuops.to_device(places)
        along = gpuops.to_device(np.zeros((1, 4), int))
        out, narrow = gpuops.empty((100, 4), "f4"), gpuops.empty((1, 4), "f4")
        calls = {
            "gather": lambda: gpuops.gather(d, indices),
            "gather, out": lambda: gpuops.gather(d, indices, out=out),
            "gather, clip": lambda: gpuops.gather(d, indices, mode="clip"),
            "gather, slices": lambda: gpuops.gather(d[10:], indices[5:], out=out[:95]),
            "take": lambda: gpuops.take(d, indices, 0, out),
            "take_along_axis": lambda: gpuops.take_along_axis(d, along, 0, out=narrow),
        }
        for name, call in calls.items():
            call()
            before = {call: fake.calls(call) for call in (*WAITING, *ALLOCATING)}
            launches = fake.calls("cudaLaunchKernel")
            used = gpuops.memory_info().used
            for _ in range(20):
                call()
            after = {call: fake.calls(call) for call in (*WAITING, *ALLOCATING)}
            # memory_info asks the device itself.
            after["cudaMemGetInfo"] = before["cudaMemGetInfo"]
            assert after == before, name
            assert fake.calls("cudaLaunchKernel") == launches + 20, name
            assert gpuops.memory_info().used == used, name
        stream.synchronize()
    same(out.to_host(), x[places])
    same(narrow.to_host(), x[:1])


def calls_of_every_operator(gpuops):
    """Calls on arrays on the GPU, by names that begin with the operator's, and what some change."""
    d, e = (gpuops.to_device(filled_array((64, 64), "f4")) for _ in range(2))
    target, indices = d.copy(), gpuops.to_device(np.arange(64)[::-1])
    along, weights = gpuops.to_device(np.zeros((1, 64), int)), filled_array((3, 3), "f4")
    weights_there, many = gpuops.to_device(weights), gpuops.to_device(np.arange(9000) % 64)
    calls = {
        "gather": lambda: gpuops.gather(d, indices),
        "take": lambda: gpuops.take(d, indices, 1),
        "take_along_axis": lambda: gpuops.take_along_axis(d, along, 0),
        "add": lambda: gpuops.add(d, e),
        "multiply": lambda: gpuops.multiply(d[0], e),
        "saxpy": lambda: gpuops.saxpy(2.5, d, e),
        "sigmoid": lambda: gpuops.sigmoid(d),
        "sigmoid_backward": lambda: gpuops.sigmoid_backward(d, e),
        "matmul": lambda: gpuops.matmul(d, e),
        "correlate": lambda: gpuops.correlate(d, weights),
        "correlate, weights there": lambda: gpuops.correlate(d, weights_there, mode="nearest"),
        "convolve": lambda: gpuops.convolve(d, weights, mode="wrap"),
        "scatter": lambda: gpuops.scatter(target, indices, e),
        "scatter_add": lambda: gpuops.scatter_add(target, indices, e),
        "scatter_add, in order": lambda: gpuops.scatter_add(target, indices, e, deterministic=True),
        "scatter_add, many": lambda: gpuops.scatter_add(target[0], many, 1.0),
    }
    names = {name.partition(",")[0] for name in calls}
    assert names == {operator.name for operator in operators.OPERATORS}
    return calls, target


def test_no_operator_waits_or_takes_memory_over_and_over(fake_device):
    """None takes more than its result, but for those in place, which may need room to work in."""
    gpuops, fake = fake_device.gpuops, fake_device.fake
    calls, _ = calls_of_every_operator(gpuops)
    for name, call in calls.items():
        for _ in range(2):
            call()
        before = {cuda: fake.calls(cuda) for cuda in (*WAITING, *ALLOCATING)}
        for _ in range(10):
            call()
        assert {cuda: fake.calls(cuda) for cuda in before} == before, name
        result = call()
        if result is not None:
            room, result = result.nbytes, None
            gpuops.empty_cache()
            gpuops.memory_limit(gpuops.memory_info().used + room)
            try:
                call()
            finally:
                gpuops.memory_limit(None)
    gpuops.synchronize()


class Late:
    """The module, but each array is at home on a stream that brings its elements late."""

    def __init__(self, gpuops, gpu):
        self.gpuops, self.made = gpuops, []
        slow = gpuops.Stream()
        keep_busy(gpuops, gpu, slow)
        self.begin = slow.record()

    def __getattr__(self, name):
        return getattr(self.gpuops, name)

    def to_device(self, x):
        there, order = self.gpuops.to_device(x), self.gpuops.to_device(np.arange(len(x)))
        home = self.gpuops.Stream()
        d = self.gpuops.zeros(there.shape, there.dtype, stream=home)
        there.stream.synchronize()
        home.wait(self.begin)
        self.gpuops.gather(there, order, out=d, stream=home)
        self.made.append((d, there, order))  # to free these makes their stream wait
        return d


def test_every_operator_waits_for_its_operands(gpuops, gpu, scheduler):
    """What was queued on their streams before comes first, and what is queued next comes after."""
    expected = {}
    calls, target = calls_of_every_operator(gpuops)
    for name, call in calls.items():
        target.fill(0)
        result = call()
        expected[name] = (target if result is None else result).to_host().tobytes()
    for name in expected:
        late, stream = Late(gpuops, gpu), gpuops.Stream()
        calls, target = calls_of_every_operator(late)
        target.fill(0)
        with stream:
            result = calls[name]()
        for d, _, _ in late.made:
            d.fill(0, stream=d.stream)
        found = (target if result is None else result).to_host(stream=stream)
        assert found.tobytes() == expected[name], name


def test_every_operator_may_be_captured(gpuops, capture):
    """Into fresh memory too, and also where its stream has not been used before."""
    calls, target = calls_of_every_operator(gpuops)

    def outcome(call):
        target.fill(0)
        result = call()
        return (target if result is None else result).to_host().tobytes()

    for name, call in calls.items():
        expected = outcome(call)
        target.fill(0)
        gpuops.synchronize()
        stream = gpuops.Stream()
        with capture(stream), stream:
            result = call()
        stream.synchronize()
        assert (target if result is None else result).to_host().tobytes() == expected, name


def test_a_captured_stream_waits_for_nobody(gpuops, gpu):
    """What would spoil a capture is misuse of the fake runtime; test_libraries.py makes graphs."""
    if gpu.fake is None or not hasattr(gpu.fake, "set_capturing"):
        pytest.skip("needs the fake runtime")
    x, places = filled_array((100, 4), "f4"), np.arange(10)
    d, indices = gpuops.to_device(x), gpuops.to_device(places)
    stream, other = gpuops.Stream(), gpuops.Stream()
    out = gpuops.empty((10, 4), "f4", stream=other)
    gpuops.gather(d, indices, out=out, stream=stream)
    gpuops.synchronize()
    for captured in (stream, gpuops.Stream()):
        gpu.fake.set_capturing(captured.ptr, True)
        gpuops.gather(d, indices, out=out, stream=captured)
        gpuops.gather(d, indices, mode="wrap", out=out, stream=captured)
        fresh = gpuops.gather(d, indices, stream=captured)
        gpu.fake.set_capturing(captured.ptr, False)
        captured.synchronize()
        same(out.to_host(), x[places])
        same(fresh.to_host(), x[places])
        del fresh


@pytest.mark.parametrize("name", UNCAPTURED)
def test_other_threads_spoil_no_capture(gpuops, capture, lazy, name):
    """While one captures in the mode that is the default, others ask and wait all the same."""
    x, captured = np.random.default_rng(0).random(1 << 20), gpuops.Stream()
    d = gpuops.to_device(x, stream=gpuops.Stream())
    d.fill(1, stream=d.stream)
    with capture(captured):
        run_threads([lambda: UNCAPTURED[name](gpuops, d, x)])


AT_WORK_AFTER_IT_WAS_TOLD_OF = """
import ctypes, struct, gpuops
stream, other, event = gpuops.Stream(), gpuops.Stream(), gpuops.Event()
x, out, bad = gpuops.zeros(5), gpuops.zeros(1), gpuops.to_device([12345678])
event.record(stream)
gpuops.gather(x, bad, out=out, stream=stream)

# Where kernels note what they find: the call, the position, the index and the size.
wanted, found = struct.pack("<QQq", 0, 12345678, 5), []
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps.read().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if not line.split()[1].startswith("rw") or end - begin > 1 << 30:
            continue
        memory.seek(begin)
        try:
            data, at = memory.read(end - begin), 7
        except OSError:  # what sanitizers have mapped
            continue
        while (at := data.find(wanted, at + 1)) >= 0:
            if 0 < struct.unpack_from("<Q", data, at - 8)[0] < 1000:
                found.append(begin + at - 8)
(place,) = found
noted = ctypes.c_uint64.from_address(place)

def told(call):
    try:
        call()
    except IndexError as error:
        return str(error).split()[1]
number = noted.value
assert told(event.synchronize) == "12345678" and noted.value == 0
noted.value = number  # by the kernel, which has found one in front of that
gpuops.gather(x, gpuops.to_device([9]), out=out, stream=other)
assert told(gpuops.synchronize) == "9"
assert told(stream.synchronize) is None and noted.value == 0
gpuops.gather(x, bad, out=out, stream=stream)
assert told(gpuops.synchronize) == "12345678"
"""


def test_a_call_at_work_after_it_was_told_of_hides_no_other(fake_device):
    run_child(fake_device.gpuops, AT_WORK_AFTER_IT_WAS_TOLD_OF)


CLEARED_APART = """
import gpuops
from faults.fake import Fake
fake = Fake({folder!r})
x, bad, out = gpuops.zeros(5), gpuops.to_device([7]), gpuops.zeros(1)
def cleared_in_capture(call):  # how often something was, and never by the graph
    before = fake.calls("cudaStreamDestroy"), fake.calls("cudaMemsetAsync")
    fake.set_capturing(stream.ptr, True)
    call(lambda: gpuops.gather(x, bad, out=out, stream=stream))
    fake.set_capturing(stream.ptr, False)
    apart, cleared = fake.calls("cudaStreamDestroy"), fake.calls("cudaMemsetAsync")
    assert apart - before[0] == cleared - before[1]
    return apart - before[0]
def told(call):
    try:
        call()
    except IndexError:
        return True
    return False
# By streams that are gone, in all the places that hold bad indices.
for _ in range({count}):
    gpuops.gather(x, bad, out=out, stream=gpuops.Stream())
stream = gpuops.Stream()
assert cleared_in_capture(lambda gather: gather()) == 1
assert cleared_in_capture(lambda gather: gather()) == 0
assert told(stream.synchronize)
# By a call before the capture, of which is told in it.
gpuops.gather(x, bad, out=out, stream=stream)
event = gpuops.Event()
event.record(stream)
assert cleared_in_capture(lambda gather: told(event.synchronize) or 1 / 0) == 1
assert cleared_in_capture(lambda gather: gather()) == 0
assert told(stream.synchronize)
gpuops.gather(x, bad, out=out, stream=stream)
assert told(stream.synchronize)
print(fake.take_misuse())
"""


def test_no_graph_clears_what_calls_before_have_noted(fake_device, fake_folder):
    """It may never run, and bad indices are lost where nobody has cleared their place."""
    folder, count = str(fake_folder / "cudart"), constant("stream.cu", "SLOTS") + 100
    source = CLEARED_APART.format(folder=folder, count=count)
    assert run_child(fake_device.gpuops, source) == "\n"


def test_host_operands_in_a_capture(gpuops, capture):
    """A graph would copy from memory that is gone when it runs: nothing is queued but an error."""
    x, places = np.arange(20.0), [3, 1, 2]
    stream = gpuops.Stream()
    d, indices, out = gpuops.to_device(x), gpuops.to_device(places), gpuops.zeros(3)
    gpuops.gather(d, indices, out=out, stream=stream)
    gpuops.synchronize()
    for call in (
        lambda: gpuops.gather(d, places, out=out, stream=stream),
        lambda: gpuops.gather(d, np.array(places), out=out, stream=stream),
        lambda: gpuops.gather(d, np.arange(20)[::2][:3], out=out, stream=stream),
        lambda: gpuops.gather(d, np.array(places, "u1"), stream=stream),
        lambda: gpuops.gather(d, 3, stream=stream),
        lambda: gpuops.gather(x, indices, out=out, stream=stream),
        lambda: gpuops.gather(x[::2], indices, stream=stream),
        lambda: gpuops.take(d, places, 0, stream=stream),
        lambda: gpuops.take_along_axis(d, places, 0, stream=stream),
    ):
        with capture(stream):
            with pytest.raises(ValueError, match=r"to_device") as caught:
                call()
            assert "captur" in str(caught.value)
            out.fill(0, stream=stream)
            gpuops.gather(d, indices, out=out, stream=stream)
        stream.synchronize()
        same(out.to_host(), x[places])
    # Another stream is no concern of the capture.
    with capture(stream):
        result = gpuops.gather(d, places, stream=gpuops.Stream())
    same(result.to_host(), x[places])


def test_large_fill_values_in_a_capture(gpuops, capture):
    """Up to sixteen bytes go along with the call; more would have to be copied from the host."""
    stream = gpuops.Stream()
    record = np.array((1, 2.5, b"abcdefghijklmnop"), [("a", "i8"), ("b", "f8"), ("c", "S16")])
    wide, narrow = gpuops.zeros(4, record.dtype), gpuops.zeros(4, "c16")
    indices = gpuops.to_device([1, 9])
    wide_out, narrow_out = gpuops.zeros(2, record.dtype), gpuops.zeros(2, "c16")
    gpuops.gather(narrow, indices, mode="fill", out=narrow_out, stream=stream)
    gpuops.gather(wide, indices, mode="wrap", out=wide_out, stream=stream)
    gpuops.synchronize()
    with capture(stream):
        for call in (
            lambda: wide.fill(record, stream=stream),
            lambda: gpuops.gather(
                wide, indices, mode="fill", fill_value=record, out=wide_out, stream=stream
            ),
        ):
            with pytest.raises(ValueError, match="captur"):
                call()
        gpuops.gather(narrow, indices, mode="fill", fill_value=3j, out=narrow_out, stream=stream)
        narrow.fill(2j, stream=stream)
    stream.synchronize()
    assert narrow_out.to_host().tolist() == [0, 3j]
    assert narrow.to_host().tolist() == [2j] * 4
    assert not wide.to_host().view("u1").any()


def test_many_operands_of_others_behind_a_slow_stream(gpuops, gpu, lazy, neighbour):
    """What is asked of the GPU grows with the number of calls, not with its square."""
    host = np.arange(100.0)
    d, indices, out = gpuops.to_device(host), gpuops.to_device([1, 2]), gpuops.empty(2)
    stream, junk = gpuops.Stream(), gpuops.zeros(1)
    gpuops.synchronize()
    # Every question brings the lazy scheduler a step further.
    neighbour.dawdle(junk, stream, 60_000)
    asked = [gpu.fake.calls("cudaEventQuery")]
    for _ in range(2):
        for _ in range(1000):
            gpuops.gather(Interface(d, host, host), indices, out=out, stream=stream)
        asked.append(gpu.fake.calls("cudaEventQuery"))
    first, second = np.diff(asked)
    assert first <= 8000 and second <= 8000, (first, second)
    assert not stream.query()
    same(out.to_host(), host[1:3])


# Threads.


def test_threads_with_streams_of_their_own(gpuops, gpu, scheduler):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 1 << 30, (5000, 4), dtype=np.int32)
    table = gpuops.to_device(x)
    rounds = turns_of(300 if gpu.fake is None else 25)
    errors = []
    barrier = threading.Barrier(8)

    def work(number):
        generator = np.random.default_rng(number)
        with gpuops.device("cuda"), gpuops.Stream() as stream:
            for turn in range(rounds):
                places = generator.integers(-5000, 5000, 100)
                result = gpuops.gather(table, gpuops.to_device(places))
                assert result.stream == stream
                if turn % 5 == number % 5:
                    bad = 5000 + 10 * turn + number
                    gpuops.gather(table, [0, bad])
                    assert index_error(stream.synchronize) == late(bad, 5000)
                else:
                    stream.synchronize()
                same(result.to_host(), x[places])

    def guarded(number):
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a call hangs"
    assert not errors, errors


# The end of the process.

ENDS = {
    "live arrays": "kept = [d, d[1:], gpuops.gather(d, [1, 2]), gpuops.zeros(100)]",
    "work that is not done": """
s = gpuops.Stream()
big = gpuops.zeros(1 << 20, stream=s)
for _ in range(100):
    big.fill(1, stream=s)
results = [gpuops.gather(d, x.astype(int), stream=s) for _ in range(100)]
""",
    "an error that nobody has seen": "result = gpuops.gather(d, [5000])",
    "capsules": "kept = [d.__dlpack__(), d.__dlpack__(max_version=(1, 3)), gpuops.from_dlpack(d)]",
    "a current stream": """
s = gpuops.Stream()
s.__enter__()
event = s.record()
result = gpuops.gather(d, [1])
""",
    "a cycle": """
class Node:
    pass
node = Node()
node.node, node.array, node.stream = node, d[2:], gpuops.Stream()
""",
    "late calls": """
import atexit, weakref
class Late:
    def __del__(self):
        print(self.gather(self.array, [3]).to_host())
late = Late()
late.gather, late.array = gpuops.gather, d
atexit.register(lambda: print(gpuops.gather(d, [4]).to_host()))
weakref.finalize(late, lambda: None)
""",
    "threads": """
import threading
started = threading.Event()
def work():
    with gpuops.Stream() as s:
        while True:
            gpuops.gather(d, [1, 2]).to_host()
            started.set()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
""",
    "another order": """
import sys
array, s = d, gpuops.Stream()
view = gpuops.from_dlpack(gpuops.gather(d, [1, 2], stream=s))
del sys.modules["gpuops"], gpuops, d
""",
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_the_process(gpu, name):
    source = f"""
import numpy as np
import gpuops
x = np.arange(1000.0)
d = gpuops.to_device(x)
{ENDS[name]}
"""
    lines = run_child(gpu.gpuops, source).splitlines()
    # At the very end a call may find less than it needs, but never an array with wrong values.
    assert set(lines) <= {"[3.]", "[4.]"}
    assert name != "late calls" or "[4.]" in lines
