"""Stream and Event: whose they are, which one is current, and the order that they keep."""

import contextlib
import ctypes
import gc
import inspect
import itertools
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from helpers import filled_array, join_in_full, keep_busy, run_child, same

SCHEDULERS = [("now", 0), ("lazy", 0), ("shuffled", 1), ("shuffled", 2), ("shuffled", 3)]


@pytest.fixture
def gpuops(gpu):
    return gpu.gpuops


@pytest.fixture(params=SCHEDULERS, ids=lambda scheduler: "{}-{}".format(*scheduler))
def scheduler(request, gpu):
    """Every order that the fake runtime can work in; a real GPU has its own."""
    if gpu.fake is None:
        if request.param != SCHEDULERS[0]:
            pytest.skip("a real GPU decides for itself")
        return "now"
    if not hasattr(gpu.fake, "set_scheduler"):
        pytest.skip("this fake runtime has one scheduler")
    gpu.fake.set_scheduler(*request.param)
    return request.param[0]


@pytest.fixture
def two_devices(gpuops):
    if gpuops.device_count() < 2:
        pytest.skip("this machine has one GPU")


class Foreign:
    """A stream of another library."""

    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def foreign(stream):
    return Foreign((0, stream.ptr))


# What a stream is.


def test_attributes(gpuops):
    stream = gpuops.Stream()
    assert type(stream.ptr) is int and stream.ptr > 2
    assert type(stream.device) is int and stream.device == 0
    assert stream.__cuda_stream__() == (0, stream.ptr)
    assert f"{stream.ptr:#x}" in repr(stream) and "cuda:0" in repr(stream)
    for name in ("device", "ptr", "nonsense"):
        with pytest.raises(AttributeError):
            setattr(stream, name, 1)
    for arguments in ({"nonblocking": False}, {"priority": -1}, {"priority": 0}, {"device": 0}):
        assert gpuops.Stream(**arguments).ptr > 2
    assert gpuops.Stream("cuda:0").device == gpuops.Stream(0).device == 0


def test_the_types(gpuops):
    for kind in (gpuops.Stream, gpuops.Event):
        assert kind.__module__ == "gpuops" and inspect.getdoc(kind)
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Mine", (kind,), {})
        with pytest.raises(TypeError, match="immutable"):
            kind.nonsense = 1
        for name, member in vars(kind).items():
            if callable(getattr(kind, name)) and not name.startswith("__"):
                assert inspect.getdoc(member), name
                assert inspect.signature(member), name
        reference = weakref.ref(kind())
        gc.collect()
        assert reference() is None
    expected = {
        gpuops.Stream: "(device=None, *, nonblocking=True, priority=0)",
        gpuops.Event: "(*, timing=True, blocking_sync=False, device=None)",
        gpuops.Stream.from_external: "(obj, *, device=None)",
        gpuops.Stream.record: "(self, /, event=None)",
        gpuops.Stream.wait: "(self, /, event_or_stream)",
        gpuops.Event.record: "(self, /, stream=None)",
        gpuops.Event.wait: "(self, /, stream=None)",
        gpuops.Event.elapsed_time: "(self, end, /)",
        gpuops.synchronize: "(device=None)",
        gpuops.current_stream: "(device=None)",
    }
    for function, signature in expected.items():
        assert str(inspect.signature(function)) == signature


def test_wrong_arguments(gpuops):
    for arguments, keywords in [
        ((0, True), {}), ((), {"nonsense": 1}), ((), {"priority": 1.5}), ((1.5,), {}),
    ]:  # fmt: skip
        with pytest.raises(TypeError):
            gpuops.Stream(*arguments, **keywords)
    with pytest.raises(TypeError):
        gpuops.Event(True)
    count = gpuops.device_count()
    for make in (
        gpuops.Stream,
        gpuops.synchronize,
        gpuops.current_stream,
        lambda device: gpuops.Event(device=device),
        lambda device: gpuops.Stream.from_external(Foreign((0, 0)), device=device),
    ):
        with pytest.raises(ValueError, match="GPU"):
            make("cpu")
        with pytest.raises(gpuops.DeviceError, match="there is no cuda:"):
            make(count)


def test_equal_streams_are_the_same_stream(gpuops):
    stream, other = gpuops.Stream(), gpuops.Stream()
    again = gpuops.Stream.from_external(foreign(stream))
    assert stream == again and hash(stream) == hash(again) and stream is not again
    assert stream != other and not stream == other  # noqa: SIM201
    assert len({stream, again, other}) == 2
    assert stream != stream.ptr and stream != None and (stream == 5) is False  # noqa: E711
    with pytest.raises(TypeError):
        stream < other  # noqa: B015
    d = gpuops.zeros(3, stream=stream)
    assert d.stream == stream == d[1:].stream and gpuops.zeros(3).stream != stream


def test_the_default_streams(gpuops):
    assert gpuops.current_stream().ptr == 1 and "legacy default" in repr(gpuops.current_stream())
    for handle in (0, 1):
        legacy = gpuops.Stream.from_external(Foreign((0, handle)))
        assert legacy == gpuops.current_stream() and legacy.ptr == 1
        assert legacy.__cuda_stream__() == (0, 1)
    per_thread = gpuops.Stream.from_external(Foreign((0, 2)))
    assert per_thread.ptr == 2 and "per-thread" in repr(per_thread)
    assert per_thread != gpuops.current_stream()
    assert gpuops.zeros(3).stream.ptr == 1
    for stream in (legacy, per_thread):
        d = gpuops.to_device(np.arange(5), stream=stream)
        same(d.copy(stream=stream).to_host(stream=stream), np.arange(5))
        stream.synchronize()
        assert stream.query()


def test_the_stream_of_another_library(gpuops):
    ours = gpuops.Stream()
    external = foreign(ours)
    gone = weakref.ref(external)
    stream = gpuops.Stream.from_external(external)
    assert stream.ptr == ours.ptr and stream.device == 0
    same(gpuops.to_device([1, 2], stream=external).to_host(stream=external), np.array([1, 2]))
    d = gpuops.zeros(3, stream=Foreign((0, stream.ptr)))
    assert d.stream == stream
    assert gpuops.Stream.from_external(ours) is ours
    assert gpuops.Stream.from_external(ours, device=0) == ours
    del external, stream, d
    gc.collect()
    assert gone() is None


class Owned(Foreign):
    pass


def test_another_librarys_stream_is_kept_alive(gpuops, gpu):
    """For as long as anything of ours may use it."""
    if gpu.fake is None:
        torch = pytest.importorskip("torch")
        handle = torch.cuda.Stream().cuda_stream
    else:
        handle = 0x1000
        maker = gpuops.Stream()
        handle = maker.ptr
    kept = Owned((0, handle))
    gone = weakref.ref(kept)
    d = gpuops.empty(3, stream=kept)
    del kept
    gc.collect()
    if gpu.fake is None:
        assert gone() is not None
    assert d.stream.ptr == handle
    del d
    gpuops.empty_cache()
    gc.collect()
    assert gone() is None


WRONG_ANSWERS = [None, 5, (1, 5), (0,), (0, "a"), (0, 1, 2), [0, 1], ("0", 1), (0, None), (0, 1.5)]


@pytest.mark.parametrize("answer", WRONG_ANSWERS, ids=str)
def test_wrong_answers_to_the_protocol(gpuops, answer):
    d = gpuops.zeros(3)
    stream = Foreign(answer)
    for call in (
        lambda: gpuops.Stream.from_external(stream),
        lambda: gpuops.zeros(3, stream=stream),
        lambda: d.to_host(stream=stream),
        lambda: gpuops.current_stream().wait(stream),
    ):
        with pytest.raises(TypeError, match=r"__cuda_stream__ must return \(0, handle\)"):
            call()


def test_what_is_no_stream(gpuops):
    d, event = gpuops.zeros(3), gpuops.Event()
    for wrong in (0, 1, "stream", gpuops.Stream, object(), d):
        for call in (
            lambda: gpuops.Stream.from_external(wrong),  # noqa: B023
            lambda: gpuops.zeros(3, stream=wrong),  # noqa: B023
            lambda: gpuops.to_device([1], stream=wrong),  # noqa: B023
            lambda: d.fill(1, stream=wrong),  # noqa: B023
            lambda: event.record(wrong),  # noqa: B023
        ):
            with pytest.raises(TypeError, match="__cuda_stream__"):
                call()
    with pytest.raises(ZeroDivisionError):
        gpuops.zeros(3, stream=Foreign(ZeroDivisionError()))
    with pytest.raises(TypeError, match="Event, or a stream"):
        gpuops.current_stream().wait(5)


# The current stream.


def test_with(gpuops):
    legacy = gpuops.current_stream()
    one, two = gpuops.Stream(), gpuops.Stream()
    with one as entered:
        assert entered is one and gpuops.current_stream() == one
        assert gpuops.zeros(3).stream == gpuops.to_device([1]).stream == one
        with two:
            assert gpuops.current_stream() == two == gpuops.zeros(3).copy().stream
            with one, one:
                assert gpuops.current_stream() == one
            assert gpuops.current_stream() == two
            assert gpuops.zeros(3, stream=one).stream == one
        assert gpuops.current_stream() == one
        with legacy:
            assert gpuops.current_stream() == legacy == gpuops.zeros(3).stream
        assert gpuops.current_stream() == one
    assert gpuops.current_stream() == legacy


def test_with_an_exception(gpuops):
    stream = gpuops.Stream()
    with pytest.raises(ZeroDivisionError), stream:
        raise ZeroDivisionError
    assert gpuops.current_stream().ptr == 1


def test_leaving_in_another_order(gpuops):
    one, two = gpuops.Stream(), gpuops.Stream()
    with pytest.raises(RuntimeError, match="entered last"):
        one.__exit__(None, None, None)
    one.__enter__()
    two.__enter__()
    with pytest.raises(RuntimeError, match="entered last"):
        one.__exit__(None, None, None)
    assert gpuops.current_stream() == two
    assert two.__exit__(None, None, None) is None
    one.__exit__(None, None, None)
    assert gpuops.current_stream().ptr == 1
    with pytest.raises(TypeError):
        one.__exit__()


def test_each_thread_has_its_own(gpuops):
    shared = gpuops.Stream()
    errors = []
    barrier = threading.Barrier(4)

    def work(number):
        try:
            own = gpuops.Stream()
            with gpuops.device("cuda"):
                assert gpuops.current_stream().ptr == 1
                for stream in (shared, own, shared):
                    with stream:
                        barrier.wait(60)
                        assert gpuops.current_stream() == stream == gpuops.zeros(3).stream
                        with own, shared:
                            barrier.wait(60)
                            same(gpuops.to_device([number]).to_host(), np.array([number]))
                    assert gpuops.current_stream().ptr == 1
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with shared:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert not errors, errors
        assert gpuops.current_stream() == shared


def test_the_current_stream_is_kept(gpuops):
    gpuops.Stream().__enter__()
    entered = gpuops.current_stream()
    gc.collect()
    same(gpuops.to_device([1, 2]).to_host(), np.array([1, 2]))
    assert gpuops.zeros(3).stream == entered
    entered.__exit__(None, None, None)


def test_each_device_has_its_own(gpuops, two_devices):
    here, there = gpuops.Stream(0), gpuops.Stream(1)
    assert here != there and there.device == 1 and "cuda:1" in repr(there)
    with here, there:
        assert gpuops.current_stream() == gpuops.current_stream(0) == here
        assert gpuops.current_stream("cuda:1") == there
        assert gpuops.zeros(3).stream == here and gpuops.zeros(3, device=1).stream == there
        with gpuops.device("cuda:1"):
            assert gpuops.current_stream() == there
    assert gpuops.current_stream(0) != gpuops.current_stream(1)
    assert gpuops.current_stream(1).ptr == 1
    with pytest.raises(ValueError, match="cuda:1"):
        gpuops.Stream.from_external(there, device=0)


def test_another_librarys_stream_of_another_device(gpuops, two_devices):
    """The protocol does not say which GPU a stream is on, but CUDA knows."""
    there = gpuops.Stream(1)
    stream = gpuops.Stream.from_external(foreign(there))
    assert stream == there and stream.device == 1
    assert gpuops.Stream.from_external(foreign(there), device=1) == there
    with gpuops.device("cpu"):
        assert gpuops.Stream.from_external(foreign(there)) == there
    # A stream says the device of what is made with it, whoever made the stream.
    assert gpuops.zeros(3, stream=foreign(there)).device == 1
    d = gpuops.to_device(np.arange(3))
    assert d.device == 0 and gpuops.to_device(d, stream=foreign(there)).device == 1
    liar = foreign(there)
    liar.device_id = 0
    assert gpuops.Stream.from_external(liar) == there
    for call in (
        lambda: gpuops.Stream.from_external(foreign(there), device=0),
        lambda: d.to_host(stream=foreign(there)),
        lambda: d.fill(1, stream=foreign(there)),
        lambda: gpuops.gather(d, [0], stream=foreign(there)),
        lambda: gpuops.asarray(d, stream=foreign(there)),
        lambda: gpuops.zeros(3, device=0, stream=foreign(there)),
        lambda: gpuops.Event(device=0).record(foreign(there)),
    ):
        with pytest.raises(ValueError, match=r"cuda:1.*cuda:0|cuda:0.*cuda:1"):
            call()


def test_another_librarys_default_stream_of_another_device(gpuops, two_devices):
    """Every device has one behind the same handle, which an attribute may tell apart."""
    for name, value in [("device_index", 1), ("device_id", 1), ("device", 1)]:
        default = Foreign((0, 0))
        setattr(default, name, value)
        stream = gpuops.Stream.from_external(default)
        assert (stream.device, stream.ptr) == (1, 1)
        assert gpuops.zeros(3, stream=default).device == 1
        # A call knows its device.
        d = gpuops.zeros(3, device=0)
        assert d.copy(stream=default).stream == d.stream
    for value in (-1, 1 << 40, None, "1"):
        default = Foreign((0, 0))
        default.device_id = value
        assert gpuops.Stream.from_external(default).device == 0


def test_another_librarys_captured_stream_of_another_device(gpuops, two_devices, fake_device):
    """CUDA does not tell the device of a captured stream, so the object is asked."""
    if gpuops is not fake_device.gpuops:
        pytest.skip("needs the fake runtime")
    there = gpuops.Stream(1)
    stranger = foreign(there)
    stranger.device_index = 1
    fake_device.fake.set_capturing(there.ptr, True)
    try:
        with pytest.raises(ValueError, match="cuda:1"):
            gpuops.gather(gpuops.zeros(3, device=0), [0], stream=stranger)
        assert gpuops.Stream.from_external(stranger).device == 1
    finally:
        fake_device.fake.set_capturing(there.ptr, False)


# Waiting.


def test_query_and_synchronize(gpuops, gpu):
    stream = gpuops.Stream()
    assert stream.query() is True and stream.synchronize() is None
    if gpu.fake:
        gpu.fake.set_scheduler("lazy")
    keep_busy(gpuops, gpu, stream)
    event = stream.record()
    assert stream.query() is False and event.query() is False
    assert event.synchronize() is None and event.query() is True
    keep_busy(gpuops, gpu, stream)
    assert stream.query() is False
    stream.synchronize()
    assert stream.query() is True
    keep_busy(gpuops, gpu, stream)
    assert gpuops.synchronize() is None
    assert stream.query() is True


def test_events(gpuops):
    stream = gpuops.Stream()
    event = gpuops.Event()
    assert event.device == 0 and event.query() is True
    event.synchronize()
    with pytest.raises(ValueError, match="never recorded"):
        event.__cuda_stream__()
    assert event.record(stream) is None
    assert event.__cuda_stream__() == (0, stream.ptr)
    assert stream.record(event) is event and stream.record(event=None) is not event
    event.record()
    assert event.__cuda_stream__() == (0, 1)
    with stream:
        event.record()
    assert event.__cuda_stream__() == (0, stream.ptr)
    event.record(foreign(stream))
    for kind in ({"timing": False}, {"blocking_sync": True}, {"device": "cuda"}):
        event = gpuops.Event(**kind)
        event.record(stream)
        event.synchronize()
        assert event.query()
    for wrong in (stream, 5, "event", gpuops.Event):
        with pytest.raises(TypeError, match="event must be"):
            stream.record(wrong)


def test_an_event_keeps_its_stream(gpuops):
    event = gpuops.Stream().record()
    gc.collect()
    version, handle = event.__cuda_stream__()
    assert version == 0 and handle > 2
    gpuops.Stream.from_external(event).synchronize()
    event.synchronize()


def test_elapsed_time(gpuops, gpu):
    stream = gpuops.Stream()
    start = stream.record()
    keep_busy(gpuops, gpu, stream)
    end = stream.record()
    end.synchronize()
    milliseconds = start.elapsed_time(end)
    assert type(milliseconds) is float and 0 <= milliseconds < 60_000
    assert gpu.fake or milliseconds > 1
    assert end.elapsed_time(start) <= 0
    untimed = gpuops.Event(timing=False)
    untimed.record(stream)
    untimed.synchronize()
    for wrong in (untimed, gpuops.Event()):
        with pytest.raises(ValueError, match="timing=True"):
            start.elapsed_time(wrong)
        with pytest.raises(ValueError, match="timing=True"):
            wrong.elapsed_time(end)
    for wrong in (None, 5, stream):
        with pytest.raises(TypeError, match="end must be"):
            start.elapsed_time(wrong)


def test_elapsed_time_of_what_is_not_done(gpuops, gpu):
    if gpu.fake:
        gpu.fake.set_scheduler("lazy")
    stream = gpuops.Stream()
    start = stream.record()
    keep_busy(gpuops, gpu, stream)
    end = stream.record()
    with pytest.raises(ValueError, match=r"synchronize\(\)"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_events_of_another_device(gpuops, two_devices):
    here, there = gpuops.Stream(0), gpuops.Stream(1)
    event = gpuops.Event(device=1)
    assert event.device == 1
    for call in (lambda: here.record(event), lambda: event.record(here)):
        with pytest.raises(ValueError, match=r"cuda:1.*cuda:0"):
            call()
    d = gpuops.to_device(np.arange(5), stream=there)
    there.record(event)
    here.wait(event)
    event.wait(here)
    here.wait(there)
    same(gpuops.to_device(d, stream=here).to_host(), np.arange(5))


# Order. Under the lazy scheduler nothing is done before somebody waits for it, and under the
# shuffled one whatever is ready, in any order: what is not ordered by an event goes wrong.


def test_an_array_is_used_on_another_stream(gpuops, scheduler):
    home, other = gpuops.Stream(), gpuops.Stream()
    host = filled_array((100, 3), "f4")
    for turn in range(20):
        d = gpuops.to_device(host, stream=home)
        d[10:20].fill(turn, stream=home)
        expected = host.copy()
        expected[10:20] = turn
        copies = [d.copy(stream=other), d[::-1].copy(stream=other), gpuops.to_device(d)]
        d.fill(-1, stream=home)
        same(copies[0].to_host(), expected)
        same(copies[1].to_host(), expected[::-1].copy())
        same(copies[2].to_host(stream=home), expected)
        same(d.to_host(stream=other), np.full((100, 3), -1, "f4"))


def test_writing_on_another_stream(gpuops, scheduler):
    home, *others = (gpuops.Stream() for _ in range(4))
    d = gpuops.zeros(64, "i4", stream=home)
    for turn in range(60):
        d.fill(turn, stream=others[turn % 3])
        if turn % 7 == 0:
            assert (d.to_host() == turn).all()
        if turn % 5 == 0:
            assert (d.copy(stream=others[(turn + 1) % 3]).to_host() == turn).all()
    assert (d.to_host(stream=home) == 59).all()


def test_sources_that_are_dropped_at_once(gpuops, scheduler):
    """The next array gets the memory of what is gone, whose last reader has yet to run."""
    streams = [gpuops.current_stream(), *(gpuops.Stream() for _ in range(3))]
    for turn in range(6 if scheduler == "shuffled" else 25):
        copies = []
        for i in range(40):
            home, other = streams[i % 4], streams[(i + turn) % 4]
            copies.append(gpuops.to_device(np.full(50, i), stream=home).copy(stream=other))
            gpuops.zeros(50, int, stream=home)
            gpuops.empty(50, int, stream=other).fill(-1, stream=home)
        for i, result in enumerate(copies):
            assert (result.to_host() == i).all()


def test_large_sources_that_are_dropped_at_once(gpuops, scheduler):
    """What is too large to be kept for the next array goes back in the order of its own stream."""
    home, other = gpuops.Stream(), gpuops.Stream()
    host = np.arange(700_000)
    for turn in range(4):
        results = []
        for stream in (home, other):
            large = gpuops.to_device(host + turn, stream=home)
            results.append(gpuops.gather(large, [0, 1, -1], stream=stream))
            del large
            gpuops.empty(host.shape, host.dtype, stream=other).fill(-1)
        for result in results:
            assert result.to_host().tolist() == [turn, turn + 1, turn + 699_999]


def test_a_slow_stream_is_not_overtaken(gpuops, gpu, scheduler):
    slow, fast = gpuops.Stream(), gpuops.Stream()
    d = gpuops.zeros(1000, "i4", stream=slow)
    keep_busy(gpuops, gpu, slow)
    d.fill(7, stream=slow)
    result = d.copy(stream=fast)
    assert (result.to_host() == 7).all()
    keep_busy(gpuops, gpu, slow)
    result = d.copy(stream=slow)
    d.fill(8, stream=fast)
    assert (result.to_host(stream=fast) == 7).all()
    assert (d.to_host() == 8).all()


@pytest.mark.parametrize("way", ["event", "stream", "event.wait", "foreign", "foreign event"])
def test_wait(gpuops, gpu, scheduler, way):
    """With memory that nothing else orders: a view by address, of no stream in particular."""
    one, two = gpuops.Stream(), gpuops.Stream()
    d = gpuops.zeros(100, "i4", stream=one)
    one.synchronize()

    class Unordered:
        def __init__(self):
            self.__cuda_array_interface__ = {**d.__cuda_array_interface__, "stream": None}

    shown = gpuops.asarray(Unordered(), stream=two)
    for turn in range(5):
        keep_busy(gpuops, gpu, one)
        d.fill(turn, stream=one)
        if way == "event":
            assert two.wait(one.record()) is None
        elif way == "event.wait":
            assert one.record(gpuops.Event(timing=False)).wait(two) is None
        elif way == "stream":
            assert two.wait(one) is None
        elif way == "foreign":
            two.wait(foreign(one))
        else:
            two.wait(foreign(gpuops.Stream.from_external(one.record())))
        assert (shown.to_host(stream=two) == turn).all()
        one.wait(two)
    with two:
        one.record().wait()
    one.wait(one)
    del shown


@pytest.mark.parametrize("way", ["own", "foreign"])
def test_wait_for_a_stream_of_another_device(gpuops, gpu, scheduler, two_devices, way):
    here, there = gpuops.Stream(0), gpuops.Stream(1)
    awaited = there if way == "own" else foreign(there)
    d = gpuops.zeros(100, "i4", stream=there)
    there.synchronize()

    class Unordered:
        def __init__(self):
            self.__cuda_array_interface__ = {**d.__cuda_array_interface__, "stream": None}

    with gpuops.device(1):
        shown = gpuops.asarray(Unordered())
    for turn in range(5):
        keep_busy(gpuops, gpu, there)
        d.fill(turn, stream=there)
        here.wait(awaited)
        event = here.record()
        gpuops.current_stream(1).wait(event)
        assert (shown.to_host() == turn).all()


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


def is_captured(gpu, stream):
    status = ctypes.c_int()
    handle = ctypes.c_void_p(stream.ptr)
    assert gpu.fake.library.cudaStreamIsCapturing(handle, ctypes.byref(status)) == 0
    return status.value == 1


@pytest.mark.parametrize("way", ["stream", "event", "event.wait"])
def test_a_capture_takes_in_who_waits_for_it(gpuops, gpu, capture, way):
    """As CUDA has it; what the second stream does is then part of the graph."""
    captured, other = gpuops.Stream(), gpuops.Stream()
    with capture(captured):
        assert is_captured(gpu, captured) and not is_captured(gpu, other)
        if way == "stream":
            other.wait(captured)
        elif way == "event":
            other.wait(captured.record())
        else:
            captured.record().wait(other)
        assert is_captured(gpu, other)
        captured.wait(other)
    assert not is_captured(gpu, other)


def test_a_capture_waits_for_nobody(gpuops, gpu, capture):
    captured, other = gpuops.Stream(), gpuops.Stream()
    before = other.record()
    with capture(captured):
        for call in (
            lambda: captured.wait(other),
            lambda: captured.wait(foreign(other)),
            lambda: captured.wait(before),
            lambda: other.record().wait(captured),
        ):
            with pytest.raises(ValueError, match="wait before the capture"):
                call()
        captured.wait(gpuops.Event())
        for call in (captured.synchronize, captured.query, gpuops.synchronize):
            with pytest.raises(ValueError, match="call it after the capture"):
                call()
        assert other.query() is True
    captured.wait(other)
    assert captured.query() is True


@pytest.mark.parametrize("behind", ["first", "second"])
def test_a_capture_that_begins_while_the_device_is_waited_for(fake, behind):
    """Its stream is left alone, and the device, for which nobody can wait then."""
    gpuops = fake.gpuops
    fake.fake.set_scheduler("lazy")
    streams = [gpuops.Stream(), gpuops.Stream()]
    slow, captured = streams if behind == "first" else streams[::-1]
    fake.fake.take_time(slow.ptr, 0.4)
    begin = threading.Timer(0.1, lambda: fake.fake.set_capturing(captured.ptr, True))
    begin.start()
    with pytest.raises(ValueError, match="call it after the capture"):
        gpuops.synchronize()
    assert slow.query() and is_captured(fake, captured)
    assert not fake.fake.take_misuse()
    fake.fake.set_capturing(captured.ptr, False)
    gpuops.synchronize()


def test_the_per_thread_stream_of_two_threads(gpuops, gpu, scheduler):
    """One handle, and yet two streams: what one thread writes, the other one's work waits for."""
    per_thread = gpuops.Stream.from_external(Foreign((0, 2)))
    there = {"stream": per_thread}

    def elsewhere(function):
        results = []
        thread = threading.Thread(target=lambda: results.append(function()))
        thread.start()
        thread.join(60)
        assert results, "the thread has failed"
        return results[0]

    for turn in range(1, 7):
        d = gpuops.zeros(64, "i4", stream=per_thread)
        per_thread.synchronize()
        keep_busy(gpuops, gpu, per_thread)
        d.fill(turn, stream=per_thread)
        copied = elsewhere(lambda: d.copy(**there).to_host(**there))  # noqa: B023
        assert (copied == turn).all()
        keep_busy(gpuops, gpu, per_thread)
        d.fill(-turn, stream=per_thread)
        assert (elsewhere(lambda: d.to_host(stream=per_thread)) == -turn).all()  # noqa: B023

        def fill():
            keep_busy(gpuops, gpu, per_thread)
            d.fill(100 + turn, stream=per_thread)  # noqa: B023
            return True

        assert elsewhere(fill)
        result = gpuops.gather(d, np.arange(64), stream=per_thread)
        assert (result.to_host(stream=per_thread) == 100 + turn).all()
        gpuops.synchronize()


THREADS_THAT_END = """
import threading
from pathlib import Path
import gpuops
from faults.fake import Fake
from helpers import join_in_full, keep_busy

class Foreign:
    def __cuda_stream__(self):
        return 0, 2

class gpu:
    cudart = Path(gpuops.__path__[0]).with_name("cudart")
    fake = Fake(cudart) if cudart.is_dir() else None

if gpu.fake:
    gpu.fake.set_scheduler("lazy")
stream = gpuops.Stream.from_external(Foreign())
for turn in range(3):
    thread = threading.Thread(target=keep_busy, args=(gpuops, gpu, stream))
    thread.start()
    join_in_full(thread)
    d = gpuops.to_device([turn], stream=stream)
    assert d.copy(stream=stream).to_host(stream=stream) == turn
gpuops.synchronize()
print("done")
"""


def test_a_thread_ends_while_its_per_thread_stream_is_at_work(gpu):
    """In a process that has not done much yet: there, drivers hang if nobody waits for it."""
    assert run_child(gpu.gpuops, THREADS_THAT_END, GPUOPS_DEVICE=gpu.default) == "done\n"


THREAD_WITH_WORK = """
import threading
from pathlib import Path
import gpuops
from faults.fake import Fake
from helpers import join_in_full

class Foreign:
    def __cuda_stream__(self):
        return 0, 2

fake = Fake(Path(gpuops.__path__[0]).with_name("cudart"))
streams = []

def work(seconds):
    streams.append(gpuops.Stream.from_external(Foreign()))
    fake.take_time(streams[0].ptr, seconds)
"""
LATE = {"GPUOPS_DEVICE": "cuda:0", "GPUOPS_FAKE_SCHEDULER": "lazy"}


def test_a_thread_that_has_only_named_its_per_thread_stream(fake):
    """Others may have given it work."""
    source = """
thread = threading.Thread(target=work, args=(0.2,))
thread.start()
join_in_full(thread)
"""
    run_child(fake.gpuops, THREAD_WITH_WORK + source, **LATE)


def test_the_main_thread_leaves_its_work_to_the_driver(fake):
    run_child(fake.gpuops, THREAD_WITH_WORK + "work(1000)", timeout=40, **LATE)


def test_a_thread_ends_whose_per_thread_stream_is_captured(gpuops, capture):
    per_thread, captured = gpuops.Stream.from_external(Foreign((0, 2))), gpuops.Stream()

    begin = gpuops.Event()
    with capture(captured):
        begin.record(captured)
        thread = threading.Thread(target=begin.wait, args=(per_thread,))
        thread.start()
        join_in_full(thread)


def test_nothing_waits_that_need_not(gpuops, gpu):
    """Making, filling, copying and dropping arrays are queued."""
    if gpu.fake is None:
        pytest.skip("the fake runtime counts the calls")
    streams = [gpuops.Stream() for _ in range(2)]
    d = gpuops.to_device(np.arange(100), stream=streams[0])
    gpu.fake.reset()
    gpu.fake.set_scheduler("lazy")
    for first, second in itertools.product(streams, streams):
        copied = d.copy(stream=first)
        copied.fill(3, stream=second)
        copied[::2].copy(stream=second)
        gpuops.zeros(5, stream=first)
        first.wait(second)
        second.record().wait(first)
        del copied
    for name in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"):
        assert gpu.fake.calls(name) == 0, name
    assert gpu.fake.pending() > 0


def test_synchronize_asks_only_streams_in_use(gpuops, gpu, scheduler):
    """It asks them one by one, so that a signal can end it: an idle one costs next to nothing."""
    if gpu.fake is None:
        pytest.skip("the fake runtime counts the calls")

    def asked():
        before = gpu.fake.calls("cudaStreamQuery")
        gpuops.synchronize()
        return gpu.fake.calls("cudaStreamQuery") - before

    stream, event = gpuops.Stream(), gpuops.Stream().record()
    many = [gpuops.Stream() for _ in range(20)]
    d, out = gpuops.to_device(np.arange(100), stream=stream), gpuops.zeros(1, "i8", stream=stream)
    gc.collect()
    gpuops.synchronize()
    others = asked()
    uses = {
        "nothing": lambda: None,
        "fill": lambda: d.fill(3, stream=stream),
        "gather": lambda: gpuops.gather(d, [5], out=out, stream=stream),
        "with": lambda: gpuops.add(d, d),
        "to_device": lambda: gpuops.to_device(np.arange(3), stream=stream),
        "wait for an event": lambda: stream.wait(event),
        "wait for a stream": lambda: stream.wait(many[0]),
    }
    for name, use in uses.items():
        if name == "with":
            with stream:
                use()
        else:
            use()
        # A stream that is waited for is used, too.
        assert asked() - others == {"nothing": 0}.get(name, 2 if "wait" in name else 1), name
        assert asked() == others, name
    for known in many[:3]:
        assert known.ptr  # others may use it from now on
        others += 1
        assert asked() == asked() == others
    del known
    many.clear()
    assert asked() == others - 3


def test_streams_come_and_go(gpuops, scheduler):
    """Arrays outlive the streams that they were made on."""
    arrays = []
    for i in range(60):
        stream = gpuops.Stream(nonblocking=i % 2 == 0)
        d = gpuops.to_device(np.full(20, i), stream=stream)
        arrays.append(d[::-1].copy(stream=stream))
        with gpuops.Stream():
            gpuops.zeros(20, int).fill(-1)
        del stream, d
    for i, d in enumerate(arrays):
        d.stream.synchronize()
        assert (d.to_host() == i).all()


def test_events_from_many_threads(gpuops):
    errors = []
    event, streams = gpuops.Event(), [gpuops.Stream() for _ in range(3)]

    def work(number):
        try:
            for turn in range(100):
                stream = streams[(number + turn) % 3]
                event.record(stream)
                streams[turn % 3].wait(event)
                event.query()
                if turn % 10 == 0:
                    event.synchronize()
                assert event.__cuda_stream__()[1] in [each.ptr for each in streams]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.mark.parametrize("others", ["idle", "slow"])
def test_an_event_that_is_recorded_anew_while_it_is_waited_for(fake, others):
    """The wait is for what was recorded when it began, and not for what comes instead."""
    gpuops = fake.gpuops
    fake.fake.set_scheduler("lazy")
    stream, other, event = gpuops.Stream(), gpuops.Stream(), gpuops.Event()
    fake.fake.take_time(stream.ptr, 0.5)
    event.record(stream)
    if others == "slow":
        fake.fake.take_time(other.ptr, 3)
    anew = threading.Timer(0.1, lambda: event.record(other))
    anew.start()
    event.synchronize()
    assert stream.query()
    anew.join()
    assert event.query() == other.query() == (others == "idle")
    gpuops.synchronize()


def test_an_event_that_is_recorded_anew_when_its_stream_is_captured(fake):
    """Nothing tells any more when that was done, and the question would spoil the capture."""
    gpuops = fake.gpuops
    fake.fake.set_scheduler("lazy")
    stream, other, event = gpuops.Stream(), gpuops.Stream(), gpuops.Event()
    fake.fake.take_time(stream.ptr, 0.4)
    event.record(stream)

    def anew():
        fake.fake.set_capturing(stream.ptr, True)
        event.record(other)

    timer = threading.Timer(0.1, anew)
    timer.start()
    with pytest.raises(ValueError, match="call it after the capture"):
        event.synchronize()
    timer.join()
    assert not fake.fake.take_misuse()
    fake.fake.set_capturing(stream.ptr, False)
    gpuops.synchronize()


def test_an_event_of_streams_that_are_gone(gpuops):
    """It keeps the last one, which another thread may replace as it is asked for.

    What is wrong here AddressSanitizer sees, under which CI runs this as well.
    """
    event = gpuops.Event()
    event.record(gpuops.Stream())
    errors, before, end = [], sys.getswitchinterval(), time.monotonic() + 2

    def repeat(function):
        try:
            while time.monotonic() < end:
                for _ in range(20):
                    function()
        except BaseException as error:
            errors.append(error)

    functions = [
        lambda: event.record(gpuops.Stream()),
        event.__cuda_stream__,
        event.synchronize,
    ]
    threads = [threading.Thread(target=repeat, args=(function,)) for function in functions]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(before)
    assert not errors, errors


def test_the_end_of_the_process(gpuops):
    """Streams, events and arrays that are still there do no harm, whichever goes first."""
    source = """
import gpuops, sys
stream = gpuops.Stream()
stream.__enter__()
event = stream.record()
d = gpuops.zeros(100)
class Cycle: pass
cycle = Cycle()
cycle.items = [cycle, stream, event, d, gpuops.zeros(5), gpuops.Stream(), gpuops.Event()]
sys.kept = [cycle, gpuops.current_stream(), d[1:]]
class Foreign:
    def __cuda_stream__(self):
        return 0, 2
sys.foreign = gpuops.Stream.from_external(Foreign())
sys.more = gpuops.zeros(5, stream=Foreign())
print("done")
"""
    assert run_child(gpuops, source, GPUOPS_DEVICE="cuda") == "done\n"
