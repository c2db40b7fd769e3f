"""Large copies between NumPy's memory and the GPU: through rings of page-locked buffers."""

import contextlib
import ctypes
import functools
import time
from pathlib import Path

import numpy as np
import pytest
from faults.sweep import FATAL, documented_codes
from helpers import (
    constant,
    launches,
    locked_by_somebody_else,
    numbers,
    read_only,
    run_child,
    run_threads,
    same,
)

DEVICE_ERROR = 999
OUT_OF_MEMORY = 2
NOT_READY = 600


RING_BUFFERS = constant("transfer.cu", "RING_BUFFERS")
BUFFER_BYTES = constant("transfer.cu", "BUFFER_BYTES")
SLICE_BYTES = constant("transfer.cu", "SLICE_BYTES")
PIECE_BYTES = constant("transfer.cu", "PIECE_BYTES")
LEAST_RING_BYTES = constant("transfer.cu", "LEAST_RING_BYTES")
LEAST_CHUNKS = constant("transfer.cu", "LEAST_CHUNKS")
DIRECT_BYTES = constant("transfer.cu", "DIRECT_BYTES")
RING_BYTES = RING_BUFFERS * BUFFER_BYTES

# Where one more byte makes one more piece, or slice, or chunk, or round through the ring.
BOUNDARIES = sorted(
    {LEAST_RING_BYTES, LEAST_CHUNKS * SLICE_BYTES, BUFFER_BYTES, RING_BYTES}
    | {RING_BYTES + BUFFER_BYTES, RING_BYTES + SLICE_BYTES, 3 * SLICE_BYTES}
    | {BUFFER_BYTES + more for more in (PIECE_BYTES, SLICE_BYTES - PIECE_BYTES)}
    | {LEAST_RING_BYTES + PIECE_BYTES, RING_BYTES + SLICE_BYTES + PIECE_BYTES}
)
SIZES = [size + more for size in BOUNDARIES for more in (-1, 0, 1)]
LEAST = max(BUFFER_BYTES, LEAST_RING_BYTES)  # of at least one buffer
ABOVE = RING_BYTES + BUFFER_BYTES + SLICE_BYTES + 5  # of several rounds

MARGIN = 100
DEVICE_BYTES = 1 << 30  # of the fake's devices


def chunks_of(size):
    slices = -(-size // (LEAST_CHUNKS * SLICE_BYTES))
    return -(-size // min(slices * SLICE_BYTES, BUFFER_BYTES))


@pytest.fixture
def gpuops(gpu):
    if gpu.fake is not None:
        gpu.fake.set_memory_limit(DEVICE_BYTES)
    return gpu.gpuops


@pytest.fixture
def fake(fake):
    fake.fake.set_memory_limit(DEVICE_BYTES)
    return fake


DIVISOR = 16
ABOVE_DIVIDED = (ABOVE - 5) // DIVISOR + 5  # of several rounds through small rings


@pytest.fixture
def small_rings(fake):
    """All sizes are divided: what is about calls and not about bytes takes a while otherwise."""

    def divide(divisor):
        fake.fake.run()
        fake.gpuops.empty_cache(0)
        fake.gpuops.empty_cache(1)
        fake.fake.set_ring_divisor(divisor)

    divide(DIVISOR)
    yield fake
    divide(1)


def round_trip(gpuops, x, **options):
    """What comes back of an array, in a result of its own and in memory between two margins."""
    d = gpuops.to_device(x, **options)
    result = d.to_host()
    np.testing.assert_array_equal(result, x)
    around = np.full(x.nbytes + 2 * MARGIN, 7, np.uint8)
    out = around[MARGIN:-MARGIN].view(x.dtype).reshape(x.shape)
    assert d.to_host(out) is out
    np.testing.assert_array_equal(out, x)
    assert (around[:MARGIN] == 7).all() and (around[-MARGIN:] == 7).all()


@pytest.mark.parametrize("size", SIZES)
def test_sizes(gpuops, size):
    round_trip(gpuops, numbers(size))


@pytest.mark.parametrize("offset", [1, 3, 8, 15, 17, 63])
def test_alignments(gpuops, offset):
    around = numbers(BUFFER_BYTES + LEAST_RING_BYTES + MARGIN)
    x = around[offset : BUFFER_BYTES + LEAST_RING_BYTES]
    d = gpuops.to_device(x)
    out = np.full_like(around, 7)
    for other in (0, 1, offset):
        out[...] = 7
        d.to_host(out[other : other + len(x)])
        np.testing.assert_array_equal(out[other : other + len(x)], x)
        assert (out[:other] == 7).all() and (out[other + len(x) :] == 7).all()
    # A copy may also begin within what is on the device.
    np.testing.assert_array_equal(d[offset:].to_host(), x[offset:])


LAYOUTS = {
    "every second": lambda x: x[::2],
    "backward": lambda x: x[::-1],
    "transposed": lambda x: x.reshape(512, -1).T,
    "short rows": lambda x: x[: len(x) // 24 * 24].reshape(-1, 24)[:, 5:16],
    "long rows": lambda x: x[: len(x) // 9000 * 9000].reshape(-1, 9000)[:, 1:-1],
    "longer rows": lambda x: x[: len(x) // 300_000 * 300_000].reshape(-1, 300_000)[:, 1:-1],
    "planes": lambda x: x.reshape(4, 8, -1)[::2, 1:-1],
}


@pytest.mark.parametrize("dtype", ["u1", "V3", "<f4", "V12", "V100"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided(gpuops, layout, dtype):
    dtype = np.dtype(dtype)
    count = 3 * LEAST_RING_BYTES // dtype.itemsize * 4 // 4096 * 4096
    x = LAYOUTS[layout](numbers(count * dtype.itemsize).view(dtype))
    d = gpuops.to_device(x)
    assert d.to_host().tobytes() == x.tobytes()
    base = np.zeros(count, dtype)
    out = LAYOUTS[layout](base)
    d.to_host(out)
    expected = np.zeros(count, dtype)
    LAYOUTS[layout](expected)[...] = x
    assert base.tobytes() == expected.tobytes()


LEAST_TURNED_BYTES = constant("transfer.cu", "LEAST_TURNED_BYTES")
ACROSS = {
    "two axes": lambda x: x.T,
    "three axes": lambda x: x.reshape(4, 128, -1).transpose(2, 0, 1),
    "backward": lambda x: x[::-1, ::-1].T,
    "with gaps": lambda x: x[:, 3:-5].T,
    "one of two": lambda x: x.T[::2],
    "with ones": lambda x: x.T[:, None, :, None],
    "repeated": lambda x: np.broadcast_to(x.T, (2, *x.T.shape)),
}


def across(layout, dtype, more=0):
    """An array, and its elements in another order: so many, and some, as axes are turned for."""
    dtype = np.dtype(dtype)
    columns = -(-LEAST_TURNED_BYTES // 512 // dtype.itemsize) * 2 + 8 + more
    base = numbers(512 * columns * dtype.itemsize).view(dtype).reshape(512, columns)
    return base, ACROSS[layout](base)


def launched(gpu, call):
    """What a call returns, and how many kernels it launches, or None where nobody tells."""
    return launches(gpu, call)[::-1] if gpu.fake is not None else (call(), None)


@pytest.mark.parametrize("dtype", ["u1", "V3", "<f4", "c16"])
@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("layout", ACROSS)
def test_axes_are_turned_on_the_gpu(gpu, gpuops, limited, layout, has_room, dtype):
    """Where it has memory for that; and else by the CPU."""
    base, x = across(layout, dtype)
    some, expected = 1000, (None if gpu.fake is None else has_room)
    limited((1 + has_room) * x.nbytes + some)
    d, count = launched(gpu, lambda: gpuops.to_device(x))
    assert count == expected
    assert d.shape == x.shape and d.to_host().tobytes() == x.tobytes()
    if layout == "repeated":
        return
    out = np.zeros_like(base)
    limited(has_room * x.nbytes + some)
    _, count = launched(gpu, lambda: d.to_host(ACROSS[layout](out)))
    assert count == expected
    right = np.zeros_like(base)
    ACROSS[layout](right)[...] = x
    assert out.tobytes() == right.tobytes()


def test_which_axes_are_turned(fake):
    """Of large arrays those, and only those, that the CPU would go through across its lines."""
    base, x = across("two axes", "f4")
    long = np.broadcast_to(base[:, :1], base.shape)
    wide = numbers(64 * 4096).view("V64").reshape(64, -1)
    small = base[:, : LEAST_TURNED_BYTES // 512 // 4]
    cases = [
        (x, 1), (base, 0), (base[::2], 0), (base[:, ::2], 0), (long, 0),
        (long.T, 1), (wide.T, 0), (small.T, 1), (small[1:].T, 0), (base[:, 0], 0), (base[0], 0),
    ]  # fmt: skip
    for source, count in cases:
        found, d = launches(fake, lambda source=source: fake.gpuops.to_device(source))
        assert found == count, (source.shape, source.strides)
        assert d.to_host().tobytes() == source.tobytes()


@pytest.mark.parametrize("call", ["cudaMallocFromPoolAsync", "cudaLaunchKernel"])
def test_no_memory_to_turn_axes(fake, call):
    """A kernel's first launch takes some, too."""
    base, x = across("two axes", "f4")
    expected = np.ascontiguousarray(x)
    # The first memory is for the result, and what is refused is asked for again.
    fault = (2, "from then on") if call == "cudaMallocFromPoolAsync" else (1, "once")
    fake.gpuops.empty_cache()
    with fake.fake.fail(fault[0], OUT_OF_MEMORY, fault[1], call) as fault:
        count, d = launches(fake, lambda: fake.gpuops.to_device(x))
    assert fault.reached and count == (call == "cudaLaunchKernel")
    same(d.to_host(), expected)
    base[...] = 0
    with fake.fake.fail(1, OUT_OF_MEMORY, "once", "cudaLaunchKernel") as fault:
        d.to_host(x)
    assert fault.reached
    same(np.ascontiguousarray(x), expected)


def test_page_locked_axes_are_turned(in_any_order):
    """The call waits for the GPU, which reads and writes that memory itself."""
    gpuops = in_any_order.gpuops
    base, x = across("two axes", "f4")
    expected = np.ascontiguousarray(x)
    with gpuops.pin(base):
        count, d = launches(in_any_order, lambda: gpuops.to_device(x))
        assert count == 1
        base[...] = 0
        same(d.to_host(), expected)
        d.to_host(x)
        same(np.ascontiguousarray(x), expected)


def test_axes_are_not_turned_in_a_capture(fake):
    """Which is refused, with no more memory in the graph than for what lies in order."""
    stream, allocated = fake.gpuops.Stream(), []
    for x in across("two axes", "f4"):
        before = fake.fake.calls("cudaMallocFromPoolAsync")
        fake.fake.set_capturing(stream.ptr, True)
        try:
            with pytest.raises(ValueError, match="captured into a graph"):
                fake.gpuops.to_device(x, stream=stream)
        finally:
            fake.fake.set_capturing(stream.ptr, False)
        allocated.append(fake.fake.calls("cudaMallocFromPoolAsync") - before)
    assert allocated[0] == allocated[1]


def test_read_only_source(gpuops):
    round_trip(gpuops, read_only(numbers(ABOVE)))


def test_source_may_change_at_once(gpu, gpuops):
    """And the way back begins while the way up may still be going on."""
    x = numbers(ABOVE)
    expected = x.copy()
    for scheduler in ("now", "lazy", "shuffled"):
        if gpu.fake is not None:
            gpu.fake.set_scheduler(scheduler, 3)
        stream = gpuops.Stream()
        arrays = []
        for k in range(3):
            x[...] = expected
            x[0] = k
            arrays.append(gpuops.to_device(x, stream=stream))
            x[...] = 0
        for k, d in enumerate(arrays):
            result = d.to_host()
            assert result[0] == k and (result[1:] == expected[1:]).all()
        if gpu.fake is None:
            return


@pytest.mark.parametrize("seed", range(4))
def test_streams_in_any_order(fake, seed):
    gpuops = fake.gpuops
    fake.fake.set_scheduler("shuffled", seed)
    streams = [gpuops.Stream() for _ in range(3)]
    sources = [numbers(LEAST + k * SLICE_BYTES, k) for k in range(6)]
    arrays = [gpuops.to_device(source, stream=streams[k % 3]) for k, source in enumerate(sources)]
    for source, d in zip(sources, arrays, strict=True):
        np.testing.assert_array_equal(d.to_host(stream=streams[2]), source)


def test_host_operands(gpuops):
    """The ways of operators, and of kernels that are not the caller's own, to the GPU and back."""
    x = np.random.default_rng(0).random(ABOVE // 8)
    indices = np.random.default_rng(1).integers(0, len(x), LEAST_RING_BYTES // 4)
    np.testing.assert_array_equal(gpuops.gather(x, indices, device="cuda"), x[indices])
    np.testing.assert_array_equal(gpuops.add(x, x[::-1], device="cuda"), x + x[::-1])
    out = np.zeros((2, len(x)))[:, ::-1]
    gpuops.multiply(np.stack([x, x]), 2.0, out=out, device="cuda")
    np.testing.assert_array_equal(out, np.stack([x, x]) * 2)


# What is called, and what is kept.


def counted(fake, call):
    """How often a call of ours had CUDA copy bytes."""
    before = fake.calls("cudaMemcpyAsync")
    result = call()
    return fake.calls("cudaMemcpyAsync") - before, result


@pytest.mark.parametrize("size", SIZES)
def test_chunks(fake, size):
    x = numbers(size)
    expected = chunks_of(size) if size >= LEAST_RING_BYTES else 1
    count, d = counted(fake.fake, lambda: fake.gpuops.to_device(x))
    assert count == expected
    count, _ = counted(fake.fake, d.to_host)
    assert count == expected


def pinned(fake, size):
    """An array in page-locked memory, and what frees it."""
    address = ctypes.c_void_p()
    assert fake.library.cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), 0) == 0
    memory = (ctypes.c_char * size).from_address(address.value)
    return np.frombuffer(memory, np.uint8), lambda: fake.library.cudaFreeHost(address)


def test_page_locked_memory_goes_directly(fake):
    memory, free = pinned(fake.fake, ABOVE)
    memory[...] = numbers(ABOVE)
    up, d = counted(fake.fake, lambda: fake.gpuops.to_device(memory))
    expected = memory.copy()
    memory[...] = 0
    down, _ = counted(fake.fake, functools.partial(d.to_host, memory))
    assert up == down == 1
    np.testing.assert_array_equal(memory, expected)
    free()


LOCKED = {
    "the begin": [slice(0, 700)],
    "the end": [slice(-700, None)],
    "the middle": [slice(300, 600)],
    "all but the middle": [slice(0, 300), slice(-300, None)],
    "two parts that touch": [slice(0, 800), slice(800, None)],
}


@pytest.mark.parametrize(
    "locked, size",
    [(locked, size) for locked in LOCKED for size in (1000, LEAST_RING_BYTES)]
    + [("all but the middle", ABOVE)],
)
def test_memory_that_somebody_else_has_locked_in_part(gpu, gpuops, locked, size):
    """The driver refuses copies of it."""
    x = numbers(size)
    expected = x.copy()
    with locked_by_somebody_else(gpu, *(x[part] for part in LOCKED[locked])):
        d = gpuops.to_device(x)
        x[...] = 0
        d.to_host(x)
        same(x, expected)
        same(gpuops.add(x, x, out=x, device="cuda"), 2 * expected)
        same(gpuops.to_device(x[::-1]).to_host(), 2 * expected[::-1])
    if gpu.fake is not None:
        lines = gpu.fake.take_misuse().splitlines()
        assert all("is registered in part or in pieces" in line for line in lines)


def test_rows_of_which_somebody_else_has_locked_some(gpu, gpuops):
    """The driver goes on to read these when it has taken a copy of the others."""
    rows = numbers(8 * (DIRECT_BYTES + 4096)).reshape(8, -1)
    x, indices = rows[:, :DIRECT_BYTES], [6, 4, 7, 5]
    expected, taken = x.copy(), gpuops.empty((4, DIRECT_BYTES), "u1")
    with locked_by_somebody_else(gpu, rows[4:]):
        if gpu.fake is not None:
            gpu.fake.set_scheduler("lazy")
        d = gpuops.to_device(x)
        gpuops.gather(x, indices, out=taken)
        x[...] = 0
        same(d.to_host(), expected)
        same(taken.to_host(), expected[indices])


def rings(fake, before):
    bytes_now = fake.fake.live().registered_bytes
    assert (bytes_now - before) % RING_BYTES == 0
    return (bytes_now - before) // RING_BYTES


@pytest.fixture
def no_rings(fake):
    fake.gpuops.empty_cache(0)
    fake.gpuops.empty_cache(1)
    return fake.fake.live().registered_bytes


def test_one_ring_for_one_copy_after_the_other(fake, no_rings):
    small = numbers(LEAST_RING_BYTES - 1)
    fake.gpuops.to_device(small).to_host()
    assert rings(fake, no_rings) == 0
    for _ in range(3):
        round_trip(fake.gpuops, numbers(ABOVE))
        assert rings(fake, no_rings) == 1
    fake.gpuops.empty_cache(1)
    assert rings(fake, no_rings) == 1
    fake.gpuops.empty_cache(0)
    assert rings(fake, no_rings) == 0


def test_a_stream_that_is_held_up_holds_up_no_other(fake, no_rings):
    gpuops = fake.gpuops
    fake.fake.set_scheduler("lazy")
    held_up, other = gpuops.Stream(), gpuops.Stream()
    x = numbers(RING_BYTES)
    arrays = [gpuops.to_device(x, stream=held_up)]
    assert rings(fake, no_rings) == 1
    pending = fake.fake.pending()
    assert pending > RING_BUFFERS
    # Its own next copy waits for the buffers; another stream's takes others.
    arrays.append(gpuops.to_device(x[:LEAST], stream=other))
    assert rings(fake, no_rings) == 2
    assert not held_up.query()
    arrays.append(gpuops.to_device(x, stream=held_up))
    assert rings(fake, no_rings) == 2
    # What is still on its way is not given back.
    for d in arrays:
        np.testing.assert_array_equal(d.to_host(), x[: d.size])


def test_a_new_ring_has_nothing_to_do_with_what_others_wait_for(fake, no_rings):
    """An event that one stream has just waited for another by is not one of the ring's."""
    gpuops = fake.gpuops
    fake.fake.set_scheduler("lazy")
    held_up, waiting = gpuops.Stream(), gpuops.Stream()
    arrays = [gpuops.to_device(np.arange(1000.0), stream=held_up) for _ in range(10)]
    waiting.wait(held_up)
    pending = fake.fake.pending()
    x = numbers(RING_BYTES)
    np.testing.assert_array_equal(gpuops.to_device(x, stream=gpuops.Stream()).to_host(), x)
    assert fake.fake.pending() >= pending
    del arrays


def test_two_devices(fake, no_rings):
    x, y = numbers(ABOVE), numbers(ABOVE, 1)
    on_both = [fake.gpuops.to_device(x, device=0), fake.gpuops.to_device(y, device=1)]
    assert rings(fake, no_rings) == 2
    np.testing.assert_array_equal(on_both[1].to_host(), y)
    np.testing.assert_array_equal(on_both[0].to_host(), x)
    np.testing.assert_array_equal(fake.gpuops.to_device(on_both[0], device=1).to_host(), x)
    assert rings(fake, no_rings) == 2
    assert fake.fake.current_device() == 0


def bytes_of_mappings(wanted, flag=None):
    """The sum of what /proc says under a name of all memory of this process, or with a flag."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            size = int(value.split()[0]) << 10
        elif name == "VmFlags" and (flag is None or flag in value.split()):
            total += size
    return total


def bytes_kept_from_children():
    return bytes_of_mappings("Size", "dc")


def test_children_have_no_rings(fake, no_rings):
    """They could not use them, and copies of pages would part their parent from the driver."""
    before = bytes_kept_from_children()
    round_trip(fake.gpuops, numbers(ABOVE))
    assert bytes_kept_from_children() >= before + RING_BYTES
    fake.gpuops.empty_cache(0)
    assert bytes_kept_from_children() == before


def test_the_system_gets_the_memory_of_rings_back(fake, no_rings):
    x = numbers(ABOVE)
    round_trip(fake.gpuops, x)
    with_ring = bytes_of_mappings("Rss")
    fake.gpuops.empty_cache(0)
    assert bytes_of_mappings("Rss") < with_ring - RING_BYTES // 2


def test_no_memory_for_a_ring_is_no_error_of_cuda(fake_device):
    """What somebody else's call has left there stays."""
    source = """
import resource
x = numbers(LEAST)
gpuops.to_device(x[:100]).to_host()
assert fake.library.cudaSetDevice(99) == 101
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + RING_BYTES // 2, -1))
d = gpuops.to_device(x)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(rings(), fake.library.cudaGetLastError())
round_trip(gpuops, x)
print(rings())
"""
    assert in_child(fake_device, source).split() == ["0.0", "101", "1.0"]


def test_memory_that_cannot_be_page_locked(fake, no_rings):
    x = numbers(ABOVE)
    with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaHostRegister") as fault:
        round_trip(fake.gpuops, x)
        round_trip(fake.gpuops, x[::2].copy()[::2])
    assert fault.reached and rings(fake, no_rings) == 0
    fake.gpuops.empty_cache(0)
    round_trip(fake.gpuops, x)
    assert rings(fake, no_rings) == 1


def test_a_ring_without_its_events(fake, no_rings):
    """Other events of the store are in use by then."""
    x = numbers(ABOVE)
    events = [fake.gpuops.Event() for _ in range(3)]
    with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaEventCreateWithFlags"):
        fake.gpuops.to_device(x).to_host()
    fake.gpuops.empty_cache(0)  # so that a ring is made at once
    round_trip(fake.gpuops, x)
    assert rings(fake, no_rings) == 1
    del events


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaEventCreateWithFlags"])
def test_a_refused_ring_is_not_asked_for_each_time(fake, no_rings, call):
    """As that takes a while: for a second, or until there is said to be room."""
    x = numbers(LEAST)
    give_up = time.monotonic() + 60
    begin = 0
    while begin + 1 < time.monotonic() < give_up:  # on a busy machine it may take so long
        fake.gpuops.empty_cache(0)
        begin = time.monotonic()
        with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", call):
            fake.gpuops.to_device(x)
            tried = fake.fake.calls("cudaHostRegister")
            for _ in range(5):
                fake.gpuops.to_device(x)
            again = fake.fake.calls("cudaHostRegister") - tried
    assert again == 0
    while rings(fake, no_rings) == 0 and time.monotonic() < give_up:
        round_trip(fake.gpuops, x)
    assert rings(fake, no_rings) == 1


def test_a_refused_ring_is_asked_for_again_when_there_may_be_room(fake, no_rings):
    x = numbers(LEAST)
    with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaHostRegister"):
        fake.gpuops.to_device(x)
    fake.gpuops.empty_cache(0)
    fake.gpuops.to_device(x)
    assert rings(fake, no_rings) == 1


def test_a_ring_goes_where_no_more_memory_is_locked(fake, no_rings):
    x = numbers(LEAST_RING_BYTES)
    fake.gpuops.to_device(x, device=0)
    with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaHostRegister"):
        fake.gpuops.to_device(x, device=1)
        chunks, d = counted(fake.fake, lambda: fake.gpuops.to_device(x, device=1))
    assert chunks > 1 and rings(fake, no_rings) == 1
    np.testing.assert_array_equal(d.to_host(), x)


@pytest.mark.parametrize("mode", ["once", "from then on"])
@pytest.mark.parametrize("number", [1, RING_BUFFERS, RING_BUFFERS + 1])
@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaEventRecord", "cudaEventQuery"])
@pytest.mark.parametrize("scheduler", ["now", "lazy"])
def test_a_call_fails_half_way(small_rings, function, number, mode, scheduler):
    fake, gpuops = small_rings, small_rings.gpuops
    x = numbers(ABOVE_DIVIDED)
    d = gpuops.to_device(x)
    fake.fake.set_scheduler(scheduler)
    for call in (lambda: gpuops.to_device(x), d.to_host):
        with (
            fake.fake.fail(number, DEVICE_ERROR, mode, function) as fault,
            pytest.raises(gpuops.DeviceError, match=function),
        ):
            call()
        assert fault.reached
    np.testing.assert_array_equal(d.to_host(), x)
    x[0] += 1
    round_trip(gpuops, x)


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_that_is_busy_for_long(small_rings, fails):
    """Then the workers are given back, and called again."""
    fake, x = small_rings, numbers(ABOVE_DIVIDED)
    d = fake.gpuops.to_device(x)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(fake.fake.fail(1, NOT_READY, "from then on", "cudaEventQuery"))
        if fails:
            enter(fake.fake.fail(2, DEVICE_ERROR, "once", "cudaEventSynchronize"))
            enter(pytest.raises(fake.gpuops.DeviceError, match="cudaEventSynchronize"))
        np.testing.assert_array_equal(d.to_host(), x)
    round_trip(fake.gpuops, x)


def test_a_copy_up_behind_long_work(small_rings):
    """Once the ring is full it is asked for, so that a signal can end that: until it has passed."""
    gpuops, fake, x = small_rings.gpuops, small_rings.fake, numbers(ABOVE_DIVIDED)
    stream = gpuops.Stream()
    gpuops.to_device(x, stream=stream).to_host()
    fake.set_scheduler("lazy")
    for _ in range(3):
        waits, begin = fake.calls("cudaEventSynchronize"), time.monotonic()
        fake.take_time(stream.ptr, 0.1)
        d = gpuops.to_device(x, stream=stream)
        assert time.monotonic() - begin > 0.09
        assert fake.calls("cudaEventSynchronize") == waits
        np.testing.assert_array_equal(d.to_host(), x)


def test_a_wait_fails_with_every_code(small_rings):
    """What faults/sweep.py leaves out, since most copies are over before they wait so."""
    fake, x = small_rings, numbers(ABOVE_DIVIDED)
    d = fake.gpuops.to_device(x)
    passing = [code for _, code, _ in documented_codes() if code not in (OUT_OF_MEMORY, *FATAL)]
    for code in passing:
        with (
            fake.fake.fail(1, NOT_READY, "from then on", "cudaEventQuery"),
            fake.fake.fail(1, code, "once", "cudaEventSynchronize") as fault,
            pytest.raises(fake.gpuops.DeviceError, match="cudaEventSynchronize") as caught,
        ):
            d.to_host()
        assert fault.reached and caught.value.code == code
        assert type(caught.value) is fake.gpuops.DeviceError
    round_trip(fake.gpuops, x)
    assert len(passing) > 80


@pytest.mark.parametrize("scheduler", ["now", "lazy"])
def test_work_that_nothing_marks_the_end_of(fake, no_rings, scheduler):
    """A chunk is queued, and neither its event nor its end can be had: nobody gets its ring."""
    gpuops, library = fake.gpuops, fake.fake
    x = numbers(ABOVE)
    gpuops.to_device(x).to_host()
    library.set_scheduler(scheduler)
    with (
        library.fail(3, DEVICE_ERROR, "from then on", "cudaEventRecord"),
        library.fail(1, DEVICE_ERROR, "from then on", "cudaStreamSynchronize"),
        pytest.raises(gpuops.DeviceError, match="cudaEventRecord"),
    ):
        gpuops.to_device(x)
    assert rings(fake, no_rings) == 1
    d = gpuops.to_device(x)
    assert rings(fake, no_rings) == 2
    np.testing.assert_array_equal(d.to_host(), x)
    with library.fail(2, DEVICE_ERROR, "from then on", "cudaDeviceSynchronize") as fault:
        gpuops.empty_cache(0)  # which waits for the device before
    assert fault.reached and rings(fake, no_rings) == 1
    gpuops.empty_cache(0)
    assert rings(fake, no_rings) == 0


def test_a_ring_that_nothing_marks_the_end_of_is_used_again(fake_device):
    """Once the device has been waited for, where there is no other."""
    source = """
x = numbers(LEAST_RING_BYTES)
with (
    fake.fail(1, DEVICE_ERROR, "from then on", "cudaEventRecord"),
    fake.fail(1, DEVICE_ERROR, "from then on", "cudaStreamSynchronize"),
    pytest.raises(gpuops.DeviceError, match="cudaEventRecord"),
):
    gpuops.to_device(x)
with fake.fail(1, DEVICE_ERROR, "from then on", "cudaDeviceSynchronize"):
    print(counted(fake, lambda: gpuops.to_device(x))[0], rings())
print(counted(fake, lambda: gpuops.to_device(x))[0] > 1, rings())
"""
    said = in_child(fake_device, source, GPUOPS_PINNED_LIMIT=str(RING_BYTES)).splitlines()
    assert said == ["1 1.0", "True 1.0"]


def test_while_another_stream_is_captured(small_rings):
    fake, gpuops = small_rings, small_rings.gpuops
    x = numbers(ABOVE_DIVIDED)
    captured, drawn_in = gpuops.Stream(), gpuops.Stream()
    fake.fake.set_capturing(captured.ptr, True)
    try:
        drawn_in.wait(captured)  # by an event that then stands for nothing but the capture
        d = gpuops.to_device(x, stream=gpuops.Stream())
        np.testing.assert_array_equal(d.to_host(), x)
        with pytest.raises(ValueError, match="captured into a graph"):
            gpuops.to_device(x, stream=captured)
    finally:
        fake.fake.set_capturing(captured.ptr, False)
    round_trip(gpuops, x)


# Threads.


def test_eight_threads_copy_at_once(gpu, gpuops):
    """Beside them the CPU backend has the workers, or has to do without."""

    def copies(seed):
        def run():
            x = numbers(LEAST + seed * SLICE_BYTES + seed, seed)
            stream = gpuops.Stream() if seed % 2 else None
            for _ in range(3):
                round_trip(gpuops, x, stream=stream)

        return run

    def on_cpu():
        x = np.arange(200_000)
        for _ in range(20):
            np.testing.assert_array_equal(gpuops.gather(x, x[::-1], device="cpu"), x[::-1])

    run_threads([copies(seed) for seed in range(7)] + [on_cpu])


IN_CHILD = """
from pathlib import Path
from faults.fake import Fake
from test_transfer import *
import gpuops

fake = Fake(Path(gpuops.__path__[0]).with_name("cudart"))
gpuops.gather(gpuops.to_device([1]), [0]).to_host()
before = fake.live().registered_bytes

def rings():
    return (fake.live().registered_bytes - before) / RING_BYTES
"""


def in_child(device, source, **environment):
    environment["GPUOPS_FAKE_MEMORY"] = str(DEVICE_BYTES)
    return run_child(device.gpuops, IN_CHILD + source, **environment)


@pytest.mark.parametrize("code", FATAL)
def test_a_wait_finds_the_gpu_lost(fake_device, code):
    source = f"""
x = numbers(ABOVE)
d = gpuops.to_device(x)
def lost():
    try:
        d.to_host()
    except gpuops.DeviceLostError as error:
        assert error.code == {code}
        return str(error)
with (
    fake.fail(1, {NOT_READY}, "from then on", "cudaEventQuery"),
    fake.fail(1, {code}, "once", "cudaEventSynchronize"),
):
    assert "cudaEventSynchronize" in lost()
assert lost()
np.testing.assert_array_equal(gpuops.add(x, x, device="cpu"), x + x)
print("as promised")
"""
    assert in_child(fake_device, source) == "as promised\n"


@pytest.mark.parametrize("threads", [1, 2, 12])
def test_any_number_of_worker_threads(fake_device, threads):
    source = """
for size in (LEAST_RING_BYTES, LEAST + 1, ABOVE):
    round_trip(gpuops, numbers(size))
run_threads([lambda: round_trip(gpuops, numbers(LEAST))] * 3)
print("done")
"""
    assert in_child(fake_device, source, GPUOPS_NUM_THREADS=str(threads)) == "done\n"


@pytest.mark.not_under_tsan("has a thread of its own, which is counted")
def test_workers_who_sleep_are_called_again(fake_device):
    """They leave a copy when there is nothing to do, and come back when there is."""
    source = """
import os, time
tasks = lambda: set(os.listdir("/proc/self/task"))
at_first = tasks()
x = numbers(ABOVE)
gpuops.to_device(x)
workers = tasks() - at_first
def sleeps():
    texts = [Path(f"/proc/self/task/{worker}/status").read_text() for worker in workers]
    return sum(int(text.partition("\\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)
seen = []
def wait(name, with_gil):
    if name == "cudaMemcpyAsync":
        time.sleep(0.05)  # until all that is opened is copied, and no worker has looked for more
        seen.append(sleeps())
with fake.visit(wait):
    gpuops.to_device(x)
assert len(workers) == 3 and len(seen) > RING_BUFFERS, (workers, seen)
assert seen[-1] > seen[0], seen
"""
    assert in_child(fake_device, source, GPUOPS_NUM_THREADS="4") == ""


def test_what_workers_have_copied_is_sent_before_anybody_waits(fake_device):
    """Also what they have copied since the caller has looked for it."""
    source = """
import random, time
x, chance = numbers(2 << 20), random.Random(0)
def stall(name, with_gil):
    if name == "cudaThreadExchangeStreamCaptureMode" and chance.random() < 0.3:
        time.sleep(0.003)  # now and then after that look, and until the workers are done
for _ in range(8):
    with fake.fail(1, NOT_READY, "from then on", "cudaEventQuery"), fake.visit(stall):
        arrays = [gpuops.to_device(x, stream=gpuops.Stream()) for _ in range(8)]
    assert all((d.to_host() == x).all() for d in arrays)
    del arrays
    gpuops.empty_cache(0)
print("done")
"""
    assert in_child(fake_device, source, GPUOPS_NUM_THREADS="4") == "done\n"


THREADS_OF_A_LIMIT = """
x = numbers(LEAST)
run_threads([lambda: [round_trip(gpuops, x) for _ in range(3)]] * 6)
print(rings())
"""


@pytest.mark.parametrize("limit", [0, RING_BYTES - 1, RING_BYTES, 2 * RING_BYTES + 1])
def test_limit_of_page_locked_memory_of_threads(fake_device, limit):
    said = in_child(fake_device, THREADS_OF_A_LIMIT, GPUOPS_PINNED_LIMIT=str(limit))
    most = limit // RING_BYTES
    assert min(most, 1) <= float(said) <= most


@pytest.mark.parametrize(
    ("limit", "most"),
    [(None, (256 << 20) // RING_BYTES * RING_BYTES), (3 * RING_BYTES, 3 * RING_BYTES)],
)
def test_no_more_rings_than_the_limit_allows(fake_device, limit, most):
    """As long as nobody can tell that work is over, each stream's copy keeps its ring."""
    source = """
x = numbers(LEAST_RING_BYTES)
with fake.fail(1, NOT_READY, "from then on", "cudaEventQuery"):
    arrays = [gpuops.to_device(x, stream=gpuops.Stream()) for _ in range(40)]
    print(rings() * RING_BYTES)
assert all((d.to_host() == x).all() for d in arrays)
"""
    environment = {} if limit is None else {"GPUOPS_PINNED_LIMIT": str(limit)}
    assert float(in_child(fake_device, source, **environment)) == most


def test_a_ring_goes_to_the_device_that_has_use_for_it(fake_device):
    """Where the limit allows no more: but not as long as a copy is on its way through it."""
    source = """
x = numbers(LEAST_RING_BYTES)
for device in (0, 1, 1, 0):
    chunks, d = counted(fake, lambda: gpuops.to_device(x, device=device))
    print(chunks > 1, rings(), (d.to_host() == x).all())
fake.set_scheduler("lazy")
late = gpuops.to_device(x, device=0)
chunks, d = counted(fake, lambda: gpuops.to_device(x, device=1))
print(chunks > 1, rings(), (d.to_host() == x).all(), (late.to_host() == x).all())
fake.set_scheduler("now")
with fake.fail(3, OUT_OF_MEMORY, "from then on", "cudaEventCreateWithFlags"):
    chunks, d = counted(fake, lambda: gpuops.to_device(x, device=1))
    print(chunks > 1, rings(), (d.to_host() == x).all())
gpuops.empty_cache(1)
gpuops.to_device(x, device=1)
print(rings())
gpuops.empty_cache(0)
print(rings())
gpuops.empty_cache(1)
print(rings())
"""
    said = in_child(fake_device, source, GPUOPS_PINNED_LIMIT=str(RING_BYTES)).splitlines()
    assert said[:4] == ["True 1.0 True"] * 4
    assert said[4:] == ["False 1.0 True True", "False 0.0 True", "1.0", "1.0", "0.0"]


@pytest.mark.parametrize("value", ["many", "-1", "64MiB", "1.5"])
def test_a_limit_that_is_no_number(fake_device, value):
    """Small copies tell it as well, which go through no ring."""
    source = """
from test_transfer import *
import gpuops
x = numbers(LEAST_RING_BYTES)
out = np.full_like(x, 7)
d = gpuops.empty(LEAST_RING_BYTES, "u1", device="cuda")
for call in (lambda: gpuops.to_device(x), lambda: d.to_host(out), lambda: gpuops.to_device(x[:9])):
    try:
        call()
    except ValueError as error:
        print(error)
assert (out == 7).all()
"""
    said = run_child(fake_device.gpuops, source, GPUOPS_PINNED_LIMIT=value).splitlines()
    assert said[0] == said[1] == said[2]
    assert said[0].startswith(f"GPUOPS_PINNED_LIMIT is '{value}': expected a number of bytes")


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_fork_leaves_the_rings_behind(fake_device):
    source = """
import os, signal
x = numbers(ABOVE)
round_trip(gpuops, x)
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        gpuops.to_device(x)
    except gpuops.ForkedProcessError:
        index = np.arange(ABOVE)[::-1]
        os._exit(0 if (gpuops.gather(x, index, device="cpu") == x[::-1]).all() else 1)
    os._exit(2)
print(os.waitpid(child, 0)[1])
round_trip(gpuops, x)
"""
    assert in_child(fake_device, source, GPUOPS_NUM_THREADS="3") == "0\n"
