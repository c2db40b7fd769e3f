"""The memory of a GPU: who has how much, what is kept for later, limits, and the end of it."""

import contextlib
import gc
import re
import threading
import time

import numpy as np
import pytest
from helpers import run_child, same

MEBIBYTE = 1 << 20


@pytest.fixture
def gpuops(gpu):
    gpu.gpuops.zeros(3)
    return gpu.gpuops


@pytest.fixture
def two_devices(gpuops):
    if gpuops.device_count() < 2:
        pytest.skip("this machine has one GPU")


def test_memory_info(gpuops):
    info = gpuops.memory_info()
    assert type(info) is gpuops.MemoryInfo and isinstance(info, tuple)
    assert info._fields == ("used", "reserved", "free", "total", "peak", "limit")
    assert all(type(value) is int for value in info[:5]) and info.limit is None
    assert 0 <= info.used <= info.reserved <= info.total and info.used <= info.peak
    assert 0 < info.free <= info.total
    assert repr(info).startswith("MemoryInfo(used=") and gpuops.MemoryInfo.__doc__
    assert gpuops.MemoryInfo.__module__ == "gpuops"
    assert gpuops.memory_info(0)._fields == gpuops.memory_info(device="cuda:0")._fields
    with pytest.raises(TypeError):
        gpuops.memory_info(0, 0)


@pytest.mark.parametrize("size", [0, 1, 100, 4096, MEBIBYTE, 5 * MEBIBYTE + 1])
def test_what_an_array_uses(gpuops, size):
    before = gpuops.memory_info()
    d = gpuops.empty(size, "u1")
    info = gpuops.memory_info()
    assert size <= info.used - before.used <= 2 * size + 4096
    assert info.reserved >= info.used and info.peak >= info.used
    views = [d[...], d[::-1], d.reshape(-1)]
    assert gpuops.memory_info().used == info.used
    del d
    assert gpuops.memory_info().used == info.used
    del views
    assert gpuops.memory_info().used == before.used


def test_the_peak_stays(gpuops):
    before = gpuops.memory_info()
    d = gpuops.empty(20 * MEBIBYTE, "u1")
    peak = gpuops.memory_info().peak
    assert peak >= before.used + 20 * MEBIBYTE
    del d
    assert gpuops.memory_info().peak == peak
    gpuops.empty(MEBIBYTE, "u1")
    assert gpuops.memory_info().peak == peak


def test_another_librarys_memory_is_not_counted(gpuops):
    d = gpuops.empty(MEBIBYTE, "u1")
    used = gpuops.memory_info().used

    class Shown:
        __cuda_array_interface__ = d.__cuda_array_interface__

    shown = [gpuops.asarray(Shown()) for _ in range(5)]
    assert gpuops.memory_info().used == used
    del shown


def test_empty_cache(gpuops, gpu):
    arrays = [gpuops.empty(size, "u1") for size in (10, 1000, 100_000, 3 * MEBIBYTE) * 4]
    used = gpuops.memory_info().used
    assert gpuops.memory_info().reserved >= used
    del arrays[4:]
    kept = gpuops.memory_info()
    assert kept.used < used and kept.reserved >= kept.used
    assert gpuops.empty_cache() is None
    info = gpuops.memory_info()
    assert info.used == kept.used and info.used <= info.reserved <= kept.reserved
    for d in arrays:
        d.fill(1)
        assert d.to_host().all()
    del arrays, d
    gpuops.empty_cache("cuda:0")
    gpuops.empty_cache(0)
    if gpu.fake:
        assert gpuops.memory_info().reserved <= 4 * MEBIBYTE
    with pytest.raises(TypeError):
        gpuops.empty_cache(0, 0)


def test_no_memory_is_taken_over_and_over(gpuops, gpu):
    """What one array gives back, the next one of that stream takes."""
    for stream in (gpuops.current_stream(), gpuops.Stream()):
        with stream:
            d = gpuops.to_device(np.arange(1000))
            for _ in range(3):
                d.copy()
            gpu.fake and gpu.fake.reset()
            reserved = gpuops.memory_info().reserved
            for _ in range(200):
                d.copy()
                gpuops.empty(1000)
            assert gpuops.memory_info().reserved == reserved
            if gpu.fake:
                for name in ("cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync"):
                    assert gpu.fake.calls(name) == 0, name
            del d


def test_memory_stays_flat(gpuops):
    def work(count):
        for i in range(count):
            d = gpuops.empty(1 + i * 7919 % 100_000, "u1")
            d[: d.size // 2].copy()
            gpuops.zeros(i % 50)

    work(200)
    gc.collect()
    before = gpuops.memory_info()
    work(2000)
    after = gpuops.memory_info()
    assert after.used == before.used
    assert after.reserved <= before.reserved + 32 * MEBIBYTE


def test_the_pool_keeps_what_is_freed(gpuops):
    """Also what is too large for the stores, and when somebody waits, where a pool lets go."""
    gpuops.empty_cache()
    d = gpuops.zeros(8 * MEBIBYTE, "u1")
    reserved = gpuops.memory_info().reserved
    del d
    gpuops.synchronize()
    assert gpuops.memory_info().reserved == reserved >= 8 * MEBIBYTE


# Limits.


def test_memory_limit(gpuops, limited):
    assert limited(8 * MEBIBYTE) is None
    limit = gpuops.memory_info().limit
    assert type(limit) is int and limit == gpuops.memory_info().used + 8 * MEBIBYTE
    assert gpuops.memory_limit(limit) == limit
    with pytest.raises(MemoryError) as caught:
        gpuops.empty(9 * MEBIBYTE, "u1")
    text = str(caught.value)
    assert text.startswith("empty: ")
    numbers = set(map(int, re.findall(r"\d+", text)))
    assert {9 * MEBIBYTE, limit} <= numbers
    assert "free" in text and "limit" in text
    d = gpuops.empty(7 * MEBIBYTE, "u1")
    d.fill(1)
    for call in (
        d.copy,
        lambda: gpuops.zeros(d.shape, "u1"),
        lambda: gpuops.to_device(d),
        lambda: gpuops.to_device(np.zeros(d.shape, "u1")),
        lambda: gpuops.gather(d, np.zeros(2 * MEBIBYTE, np.intp)),
    ):
        with pytest.raises(MemoryError, match="limit"):
            call()
    assert d.to_host().all()
    assert gpuops.memory_limit(None) == limit
    assert gpuops.memory_info().limit is None
    assert d.copy().to_host().all()


def test_a_limit_is_exact(gpuops, limited):
    limited(3 * MEBIBYTE + 1)
    d = gpuops.empty(3 * MEBIBYTE + 1, "u1")
    with pytest.raises(MemoryError, match="limit"):
        gpuops.empty(1, "u1")
    del d
    gpuops.empty_cache()
    with pytest.raises(MemoryError, match="limit"):
        gpuops.empty(3 * MEBIBYTE + 2, "u1")
    assert gpuops.empty(3 * MEBIBYTE + 1, "u1").size


def test_a_limit_below_what_is_used(gpuops, limited):
    d = gpuops.to_device(np.arange(1000))
    gpuops.empty_cache()
    gpuops.memory_limit(0)
    assert gpuops.memory_info().limit == 0
    with pytest.raises(MemoryError):
        gpuops.empty(5000)
    same(d.to_host(), np.arange(1000))
    same(d[5].to_host(), np.array(5))


def test_what_is_kept_makes_room(gpuops, limited):
    """A limit counts what is kept for later, which is given back when it is in the way."""
    limited(6 * MEBIBYTE)
    streams = [gpuops.Stream() for _ in range(3)]
    for size in (10_000, 300_000, MEBIBYTE, 2 * MEBIBYTE, 5 * MEBIBYTE, 1000):
        for stream in streams:
            for _ in range(5):
                gpuops.empty(size, "u1", stream=stream).fill(1)


WRONG_LIMITS = [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (1 << 70, ValueError)]


@pytest.mark.parametrize(("limit", "error"), WRONG_LIMITS)
def test_wrong_limits(gpuops, limited, limit, error):
    with pytest.raises(error):
        gpuops.memory_limit(limit)
    assert gpuops.memory_info().limit is None
    with pytest.raises(TypeError):
        gpuops.memory_limit()
    with pytest.raises(TypeError):
        gpuops.memory_limit(1, 0)
    assert gpuops.memory_limit(np.int64(1 << 40)) is None
    assert gpuops.memory_limit(bytes=None, device="cuda") == 1 << 40


def test_each_device_has_its_own(gpuops, limited, two_devices):
    here, there = gpuops.memory_info(0), gpuops.memory_info(1)
    d = gpuops.empty(MEBIBYTE, "u1", device=1)
    assert gpuops.memory_info(0).used == here.used
    assert gpuops.memory_info(1).used >= there.used + MEBIBYTE
    gpuops.empty_cache(1)
    assert gpuops.memory_limit(gpuops.memory_info(1).used, device=1) is None
    try:
        assert gpuops.memory_info(0).limit is None
        with pytest.raises(MemoryError, match="cuda:1"):
            gpuops.empty(MEBIBYTE, "u1", device=1)
        gpuops.empty(MEBIBYTE, "u1", device=0)
        gpuops.to_device(d, device=0)
    finally:
        gpuops.memory_limit(None, device=1)
    with gpuops.device("cuda:1"):
        assert gpuops.memory_info().used >= MEBIBYTE


# Out of memory.


def test_out_of_memory(gpuops):
    for make in (gpuops.empty, gpuops.zeros):
        with pytest.raises(MemoryError) as caught:
            make((1 << 20, 1 << 20, 8), "u1")
        text = str(caught.value)
        assert text.startswith(make.__name__) and "cuda:0" in text and "free" in text
        assert str(1 << 43) in text
    same(gpuops.to_device([1, 2]).to_host(), np.array([1, 2]))


def test_the_next_smaller_call_works(gpuops, gpu):
    if gpu.fake is None:
        pytest.skip("this takes all memory of the device")
    gpuops.empty_cache()
    gpu.fake.set_memory_limit(gpu.fake.live().bytes + 8 * MEBIBYTE)
    d = gpuops.empty(5 * MEBIBYTE, "u1")
    with pytest.raises(MemoryError) as caught:
        gpuops.empty(5 * MEBIBYTE, "u1")
    numbers = set(map(int, re.findall(r"\d+", str(caught.value))))
    assert 5 * MEBIBYTE in numbers
    assert any(2 * MEBIBYTE < number < 4 * MEBIBYTE for number in numbers)
    small = gpuops.empty(2 * MEBIBYTE, "u1")
    small.fill(1)
    d.fill(2)
    assert small.to_host().all() and (d.to_host() == 2).all()
    del d, small
    gpuops.empty(7 * MEBIBYTE, "u1").fill(1)


def test_what_is_kept_is_given_back_when_memory_is_short(gpuops, gpu):
    if gpu.fake is None:
        pytest.skip("this takes all memory of the device")
    gpuops.empty_cache()
    gpu.fake.set_memory_limit(gpu.fake.live().bytes + 8 * MEBIBYTE)
    streams = [gpuops.current_stream(), gpuops.Stream(), gpuops.Stream()]
    for stream in streams:
        arrays = [gpuops.empty(200_000, "u1", stream=stream) for _ in range(6)]
        del arrays
    for stream in streams:
        gpuops.empty(7 * MEBIBYTE, "u1", stream=stream).fill(1)


@pytest.mark.parametrize("size", [50_000, 5 * MEBIBYTE])
def test_memory_that_other_streams_have_yet_to_give_back(gpuops, gpu, size):
    """What fits once their work is done is worth waiting for."""
    if gpu.fake is None:
        pytest.skip("this takes all memory of the device")
    count = 5 * MEBIBYTE // size
    streams = [gpuops.Stream() for _ in range(3)]
    gpuops.synchronize()
    gpuops.empty_cache()
    gpu.fake.leave_free(7 * MEBIBYTE)
    gpu.fake.set_scheduler("lazy")
    for turn in range(6):
        stream = streams[turn % 3]
        arrays = [gpuops.empty(size, "u1", stream=stream) for _ in range(count)]
        for d in arrays:
            d.fill(turn, stream=stream)
        kept = arrays[0][:10].copy(stream=stream)
        del arrays, d
        assert gpu.fake.pending() > 0
        large = gpuops.empty(5 * MEBIBYTE, "u1", stream=streams[(turn + 1) % 3])
        large.fill(9)
        assert (kept.to_host() == turn).all() and (large[-1:].to_host() == 9).all()
        del kept, large
        gpuops.empty_cache()


def test_a_copy_that_has_no_room_leaves_nothing(gpuops, limited):
    d = gpuops.empty(4 * MEBIBYTE, "u1")
    d.fill(1)
    limited(MEBIBYTE)
    used = gpuops.memory_info().used
    for _ in range(50):
        for call in (d.copy, lambda: gpuops.to_device(d), lambda: gpuops.zeros(2 * MEBIBYTE)):
            with pytest.raises(MemoryError):
                call()
    assert gpuops.memory_info().used == used
    assert d.to_host().all()


# Captures: a graph may free nothing but what it has allocated itself.


@pytest.fixture
def capture(gpuops, gpu):
    """Begins a capture on a stream, which ends with the block, and must not have been spoilt."""
    if gpu.fake is None:
        pytest.skip("needs the fake runtime")

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


@pytest.mark.parametrize("size", [100, 100_000, 8 * MEBIBYTE])
def test_arrays_that_are_dropped_during_a_capture(gpuops, gpu, capture, size):
    stream = gpuops.Stream()
    gpuops.empty_cache()
    before = gpu.fake.live().allocations
    for _ in range(3):
        homes = (stream, gpuops.Stream(), gpuops.current_stream())
        arrays = [gpuops.zeros(size, "u1", stream=home) for home in homes]
        for d in arrays:
            d[:1].copy(stream=stream)
            d[:1].copy(stream=homes[1])
        gpuops.synchronize()
        with capture(stream):
            del arrays, d
            gpuops.zeros(size, "u1", stream=homes[1])
            gpuops.zeros(size, "u1", stream=stream)
        stream.synchronize()
        # All of it is of use again.
        gpuops.zeros(size, "u1", stream=stream)
        del homes
    gpuops.synchronize()
    gpuops.empty_cache()
    gpu.fake.run()
    assert gpu.fake.live().allocations == before


@pytest.mark.parametrize("captured", [True, False])
def test_out_of_memory_during_a_capture(gpuops, gpu, capture, captured):
    """Neither what fails, nor what is tried to make it right, may spoil the capture."""
    stream, other = gpuops.Stream(), gpuops.Stream()
    gpuops.empty(1, stream=other)
    with capture(stream), pytest.raises(MemoryError, match="are free on the device"):
        gpuops.empty(1 << 40, "u1", stream=stream if captured else other)
    assert gpuops.empty(100, "u1", stream=stream).nbytes == 100


def test_what_is_kept_during_a_capture(gpuops, limited, capture):
    """A captured stream keeps what it has for later; the others give theirs back."""
    stream, other = gpuops.Stream(), gpuops.Stream()

    def make_room():
        gpuops.memory_limit(gpuops.memory_info().used + 4096)
        with contextlib.suppress(MemoryError):
            gpuops.empty(16_384, "u1", stream=other)
        gpuops.memory_limit(None)

    def fail():
        with pytest.raises(MemoryError):
            gpuops.empty(1 << 40, "u1", stream=other)

    calls = {
        "empty_cache": gpuops.empty_cache,
        "limit": make_room,
        "memory_info": gpuops.memory_info,
        "out of memory": fail,
    }
    for name, call in calls.items():
        for home in (stream, other):
            gpuops.zeros(1000, "u1", stream=home)
        gpuops.synchronize()
        # What cannot be done without waiting may say so, but must not try.
        with capture(stream), contextlib.suppress(ValueError):
            call()
        stream.synchronize()
        gpuops.empty_cache()
        assert gpuops.zeros(1000, "u1", stream=stream).to_host().sum() == 0, name


def test_many_threads(gpuops, gpu):
    errors = []

    def work(number):
        try:
            with gpuops.device("cuda"), gpuops.Stream():
                for turn in range(80):
                    d = gpuops.empty(1 + (number * 7919 + turn * 104_729) % 50_000, "i4")
                    d.fill(number)
                    result = d[::2].copy()
                    del d
                    assert (result.to_host() == number).all()
                    if turn % 20 == number:
                        gpuops.empty_cache()
                    if turn % 10 == 0:
                        info = gpuops.memory_info()
                        assert info.used <= info.peak
        except BaseException as error:
            errors.append(error)

    before = gpuops.memory_info().used
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors, errors
    assert gpuops.memory_info().used == before


def test_arrays_that_others_drop(gpuops):
    """The last reference may go on another thread than that which made the array."""
    arrays = [gpuops.empty(1000, stream=gpuops.Stream()) for _ in range(50)]
    used = gpuops.memory_info().used
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join(60)
    assert not arrays and gpuops.memory_info().used <= used - 50 * 8000


def test_other_threads_go_on_while_memory_is_given_back(gpuops, gpu):
    """What does not go to the store of its stream takes CUDA, which may keep one waiting."""
    if gpu.fake is None:
        pytest.skip("needs the fake runtime, where one call waits for the end of another")
    large, slow = [gpuops.empty(16 * MEBIBYTE, "u1")], gpuops.Stream()
    work = gpuops.empty((1024, 1024), "u1", stream=slow)
    for fills in (40, 80, 160, 320):  # until it takes long enough to be seen
        gpu.fake.set_scheduler("lazy")
        for turn in range(fills):
            work[::2].fill(turn % 256, stream=slow)
        # As another library does, in a call of CUDA that comes back when all is done.
        busy = threading.Thread(target=gpu.fake.library.cudaDeviceSynchronize)
        ticks, over = 0, False

        def tick():
            nonlocal ticks
            while not over:  # noqa: B023
                ticks += 1
                time.sleep(1e-4)

        ticking = threading.Thread(target=tick)
        ticking.start()
        busy.start()
        time.sleep(0.02)
        before, started = ticks, time.perf_counter()
        large.clear()
        waited, found = time.perf_counter() - started, ticks - before
        over = True
        ticking.join(60)
        busy.join(60)
        if waited > 0.05:
            break
        large.append(gpuops.empty(16 * MEBIBYTE, "u1"))
    assert waited > 0.05 and found > 5, (waited, found)


def test_small_arrays_are_cheap(gpuops):
    """Views and small arrays cost about as much as they do in NumPy."""
    d = gpuops.empty((10, 10))
    d[0]
    best = min(timed(lambda: d[0]) for _ in range(5))
    assert best < 20e-6


def timed(function, count=1000):
    begin = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - begin) / count


def test_importing_and_asking_takes_no_memory(gpuops):
    source = """
import gpuops
assert gpuops.memory_info().used == gpuops.memory_info().peak == 0
assert gpuops.memory_info().limit is None
d = gpuops.zeros(1000)
assert gpuops.memory_info().used >= 8000
del d
assert gpuops.memory_info().used == 0 and gpuops.memory_info().peak >= 8000
"""
    assert run_child(gpuops, source, GPUOPS_DEVICE="cuda") == ""
