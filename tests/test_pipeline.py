"""Element-wise operators between large NumPy arrays: in parts, up, computed and down at once."""

import contextlib
import ctypes
import functools
import mmap

import numpy as np
import pytest
from helpers import (
    SCHEDULERS,
    Guarded,
    constant,
    filled_array,
    launches,
    numbers,
    run_child,
    run_threads,
    same,
)

DEVICE_ERROR = 999
OUT_OF_MEMORY = 2


REAL_PART_BYTES = constant("pipeline.cu", "PART_BYTES")
BUFFERS = constant("pipeline.cu", "BUFFERS")
# On the fake, which is not fast, parts and rings are small; of four parts each goes through a ring.
DIVISOR = 16
PART_BYTES = (3 << 20) // DIVISOR
BUFFER_BYTES = constant("transfer.cu", "BUFFER_BYTES") // DIVISOR
RING_BYTES = BUFFER_BYTES * constant("transfer.cu", "RING_BUFFERS")
HUGE_PAGE_BYTES = constant("transfer.cu", "HUGE_PAGE_BYTES")
LARGEST_WHOLE = BUFFERS * PART_BYTES
LARGE = 3 * PART_BYTES + 4097  # of four parts

SIZES = [(parts, more) for parts in (1, BUFFERS, 3, 4) for more in (-1, 0, 1)]

MARGIN = 100
DEVICE_BYTES = 1 << 30  # of the fake's devices


@contextlib.contextmanager
def small_sizes(device):
    """Rings that were made before stay as they are, and so these are given back."""
    device.fake.set_memory_limit(DEVICE_BYTES)
    device.fake.set_part_bytes(PART_BYTES)
    give_back_rings(device)
    device.fake.set_ring_divisor(DIVISOR)
    yield
    give_back_rings(device)


def give_back_rings(device):
    device.fake.run()
    for ordinal in range(2):
        device.gpuops.empty_cache(ordinal)


@pytest.fixture
def part(gpu):
    """The bytes of a part."""
    if gpu.fake is None:
        yield REAL_PART_BYTES
        return
    with small_sizes(gpu):
        yield PART_BYTES


@pytest.fixture
def gpuops(gpu, part):
    return gpu.gpuops


@pytest.fixture
def fake(fake):
    with small_sizes(fake):
        yield fake


def between_margins(like):
    """An array of the same kind, and what tells whether the bytes around it are as they were."""
    around = np.full(like.nbytes + 2 * MARGIN, 7, np.uint8)
    out = around[MARGIN:-MARGIN].view(like.dtype).reshape(like.shape)
    return out, lambda: (around[:MARGIN] == 7).all() and (around[-MARGIN:] == 7).all()


# What is computed.


@pytest.mark.parametrize(("parts", "more"), SIZES)
def test_sizes(gpuops, part, parts, more):
    size = parts * part + more
    x, y = numbers(size), numbers(size, 1)
    same(gpuops.add(x, y), x + y)
    out, is_kept = between_margins(x)
    assert gpuops.add(x, y, out=out) is out
    np.testing.assert_array_equal(out, x + y)
    assert is_kept()


@pytest.mark.parametrize(("parts", "more"), SIZES)
def test_parts(fake, parts, more):
    """None is longer than it may be, and there are no more than it takes."""
    size = parts * PART_BYTES + more
    x = numbers(size)
    count, _ = launches(fake, lambda: fake.gpuops.add(x, x))
    assert count == (1 if size <= LARGEST_WHOLE else -(-size // PART_BYTES))


def test_parts_without_a_test(fake):
    """Of the size that they have outside the tests."""
    fake.fake.set_part_bytes(0)
    fake.fake.set_ring_divisor(1)
    for more, parts in [(0, 1), (1, BUFFERS + 1)]:
        x = numbers(BUFFERS * REAL_PART_BYTES + more)
        count, result = launches(fake, lambda x=x: fake.gpuops.add(x, x))
        assert count == parts
        same(result, x + x)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "f2", "i4", "f4", "u8", "f8", "c8", "c16"])
def test_dtypes(gpuops, part, dtype, more):
    size = 3 * part // np.dtype(dtype).itemsize + more
    x, y = filled_array(size, dtype), filled_array(size, dtype, 1)
    result = gpuops.add(x, y)
    with np.errstate(all="ignore"):
        expected = x + y
    # Of what is not a number, not all bits are promised.
    same(np.nan_to_num(result), np.nan_to_num(expected))


OPERATORS = {
    "add": 2,
    "multiply": 2,
    "saxpy": 3,
    "sigmoid": 1,
    "sigmoid_backward": 2,
}


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(gpuops, part, name, dtype):
    """Bit for bit what they give between arrays on the device, in one piece."""
    size = (3 * part + 4097) // np.dtype(dtype).itemsize
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(size).astype(dtype) for _ in range(OPERATORS[name])]
    operator = getattr(gpuops, name)
    whole = operator(*map(gpuops.to_device, arrays)).to_host()
    same(operator(*arrays), whole)


def misaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)
    moved = memory[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


LAYOUTS = {
    "contiguous": lambda x: x,
    "every second": lambda x: np.repeat(x, 2, -1)[:, ::2],
    "backward": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "upside down": lambda x: x[::-1].copy()[::-1],
    "transposed": lambda x: x.T.copy().T,
    "with gaps": lambda x: np.pad(x, ((0, 1), (3, 2)))[:-1, 3:-2],
    "misaligned": misaligned,
}
SHAPES = {
    "long rows": lambda part: (3, part // 4 + 3),
    "rows": lambda part: (part // 4096 * 3 + 1, 1025),
    "short rows": lambda part: (part // 4 + 1, 3),
}


@pytest.mark.parametrize("which", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(gpuops, part, layout, which):
    shape = SHAPES[which](part)
    x, y = filled_array(shape, "i4"), filled_array(shape, "i4", 1)
    same(gpuops.add(LAYOUTS[layout](x), y), x + y)
    same(gpuops.add(x, LAYOUTS[layout](y)), x + y)
    before = np.full(shape, 7, "i4")
    out = LAYOUTS[layout](before)
    gpuops.add(x, y, out=out)
    np.testing.assert_array_equal(out, x + y)


@pytest.mark.parametrize("has_room", [True, False])
def test_parts_that_lie_across_are_turned(in_any_order, fake, has_room):
    """On the device, if it has room for one more; it is not asked again for each of them."""
    gpuops, rows, columns = fake.gpuops, 3 * PART_BYTES // 4096, 1024
    assert constant("transfer.cu", "LEAST_TURNED_BYTES") <= PART_BYTES
    x, y = filled_array((rows, columns), "i4"), filled_array((columns, rows), "i4", 1).T
    gpuops.empty_cache(0)
    fake.fake.leave_free((3 * BUFFERS + has_room) * PART_BYTES)
    before = fake.fake.calls("cudaMallocFromPoolAsync")
    count, found = launches(fake, lambda: gpuops.add(x, y))
    same(found, x + y)
    assert count == (6 if has_room else 3)
    assert fake.fake.calls("cudaMallocFromPoolAsync") - before <= 4
    fake.fake.set_memory_limit(DEVICE_BYTES)


def test_gaps_of_out_stay_as_they_are(gpuops, part):
    shape = SHAPES["rows"](part)
    x = filled_array(shape, "i4")
    around = np.full((shape[0] + 1, 2 * shape[1] + 5), 7, "i4")
    out = around[:-1, 3:-2:2]
    gpuops.add(x, x, out=out)
    np.testing.assert_array_equal(out, x + x)
    out[...] = 7
    assert (around == 7).all()


BLOCK = PART_BYTES // 4096
BROADCAST = {
    "a row": ((3 * BLOCK, 1024), (1024,)),
    "a column": ((3 * BLOCK, 1024), (3 * BLOCK, 1)),
    "a row and a column": ((1, 1024), (3 * BLOCK, 1)),
    "one element": ((3 * BLOCK, 1024), (1, 1)),
    "a long row": ((3, 700 * BLOCK), (700 * BLOCK,)),
    "a long row of many": ((2, 1024 * BLOCK + 5), (1, 1024 * BLOCK + 5)),
    "a column of long rows": ((3, 1024 * BLOCK - 1), (3, 1)),
    "in the middle": ((3, 5, 300 * BLOCK), (3, 1, 300 * BLOCK)),
    "in the middle of long rows": ((2, 3, 600 * BLOCK), (2, 1, 600 * BLOCK)),
    "of pieces": ((3, 2 * BLOCK, 600), (3, 1, 600)),
    "at both ends": ((3, 1024 * BLOCK, 2), (1024 * BLOCK, 1)),
    "more dimensions": ((3 * BLOCK, 1, 1024), (1, 3 * BLOCK, 1, 1)),
}


@pytest.mark.parametrize("which", BROADCAST)
def test_broadcasting(in_any_order, fake, which):
    x, y = (filled_array(shape, "i4", seed) for seed, shape in enumerate(BROADCAST[which]))
    parts, result = launches(fake, lambda: in_any_order.gpuops.add(x, y))
    assert parts > BUFFERS
    same(result, x + y)
    same(in_any_order.gpuops.saxpy(y, y, x), y * y + x)


LEAST_CHUNKS = constant("transfer.cu", "LEAST_CHUNKS")
SLICE_BYTES = constant("transfer.cu", "SLICE_BYTES") // DIVISOR
LEAST_RING_BYTES = constant("transfer.cu", "LEAST_RING_BYTES") // DIVISOR


def copies_of(size):
    """How many copies of CUDA's so many bytes take, which come from a ring or go there."""
    if size < LEAST_RING_BYTES:
        return 1
    slices = -(-size // (LEAST_CHUNKS * SLICE_BYTES))
    return -(-size // min(slices * SLICE_BYTES, BUFFER_BYTES))


@pytest.mark.parametrize(
    ("which", "pieces"),
    [("a row", 1), ("a long row", 1), ("a long row of many", 2), ("one element", 0)],
)
def test_what_is_repeated_goes_up_once(fake, which, pieces):
    x, y = (filled_array(shape, "i4", seed) for seed, shape in enumerate(BROADCAST[which]))
    before = fake.fake.calls("cudaMemcpyAsync")
    parts, _ = launches(fake, lambda: fake.gpuops.add(x, y))
    made = fake.fake.calls("cudaMemcpyAsync") - before
    repeated = pieces * copies_of(y.nbytes // max(pieces, 1))
    assert made == 2 * parts * copies_of(x.nbytes // parts) + repeated


def test_windows_that_overlap(in_any_order):
    """Parts of the input that begin at the same place, and are not of the same length."""
    memory = filled_array(LARGE, "u1")
    shape = (2, PART_BYTES + 4099)
    x = np.lib.stride_tricks.as_strided(memory, shape, (PART_BYTES // 2 + 2050, 1))
    y = filled_array(shape, "u1", 1)
    same(in_any_order.gpuops.add(x, y), x + y)
    x = np.lib.stride_tricks.as_strided(memory, shape, (0, 1))
    same(in_any_order.gpuops.add(x, y), x + y)


def test_scalars(gpuops, part):
    x = filled_array(part, "i4")
    same(gpuops.multiply(x, 3), x * 3)
    same(gpuops.multiply(np.int32(3), x), x * 3)
    same(gpuops.saxpy(np.array([[2]], "i4"), x, 5)[0], x * 2 + 5)


def test_other_dtypes(gpuops, part):
    x, y = filled_array(part, "i2"), filled_array(part, "i4", 1)
    same(gpuops.add(x, y), x + y)
    out = np.zeros(len(x), "f8")
    gpuops.add(x, y, out=out)
    np.testing.assert_array_equal(out, x + y)


# out among the operands.


@pytest.mark.parametrize("operand", [0, 1, 2])
def test_out_is_an_operand(in_any_order, operand):
    arrays = [filled_array(LARGE // 4, "i4", seed) for seed in range(3)]
    a, x, y = (array.copy() for array in arrays)
    in_any_order.gpuops.saxpy(*arrays, out=arrays[operand])
    np.testing.assert_array_equal(arrays[operand], a * x + y)
    for k, unchanged in enumerate([a, x, y]):
        if k != operand:
            np.testing.assert_array_equal(arrays[k], unchanged)


def test_out_is_every_operand(in_any_order):
    x = filled_array(SHAPES["rows"](PART_BYTES), "i4")[:, ::-1]
    expected = x * x + x
    in_any_order.gpuops.saxpy(x, x, x, out=x)
    np.testing.assert_array_equal(x, expected)


OVERLAPS = {
    "ahead": lambda memory: (memory[:-5], memory[5:]),
    "behind": lambda memory: (memory[5:], memory[:-5]),
    "backward": lambda memory: (memory[::-1], memory),
    "in between": lambda memory: (memory[:-1:2], memory[1::2]),
    "by a part": lambda memory: (memory[: -PART_BYTES // 4], memory[PART_BYTES // 4 :]),
    "transposed": lambda memory: (memory.reshape(256, 256).T, memory.reshape(256, 256)),
}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_out_overlaps(in_any_order, overlap):
    memory = filled_array(1 << 17 if overlap == "in between" else 1 << 16, "i8")
    if overlap == "by a part":
        memory = filled_array(LARGE // 2, "i4")
    x, out = OVERLAPS[overlap](memory)
    y = filled_array(x.shape, x.dtype, 1)
    expected = x + y
    in_any_order.gpuops.add(x, y, out=out)
    np.testing.assert_array_equal(out, expected)


# Memory.


def test_arrays_larger_than_the_device(in_any_order, fake):
    device_bytes = 8 * PART_BYTES
    fake.fake.set_memory_limit(device_bytes)
    x = filled_array(device_bytes + 12345, "u1")
    same(in_any_order.gpuops.add(x, x[::-1]), x + x[::-1])
    in_any_order.gpuops.add(x, x, out=x[::-1])


def test_memory_that_it_takes(fake):
    """So many buffers of a part, for any size, or of smaller parts where there is no room.

    And without any of them out stays as it was.
    """
    gpuops = fake.gpuops
    x, y = numbers(6 * PART_BYTES), numbers(6 * PART_BYTES, 1)
    gpuops.add(x, y)
    launches = []
    rooms = (PART_BYTES, PART_BYTES - 1, PART_BYTES // 2 - 1, PART_BYTES // 8, PART_BYTES // 16)
    for room in rooms:
        gpuops.empty_cache(0)
        fake.fake.leave_free(3 * BUFFERS * room)
        before = fake.fake.calls("cudaLaunchKernel")
        same(gpuops.add(x, y), x + y)
        launches.append(fake.fake.calls("cudaLaunchKernel") - before)
    assert launches == [6, 12, 24, 48, 96]
    gpuops.empty_cache(0)
    fake.fake.leave_free(3 * BUFFERS * PART_BYTES // 16 - 1)
    out = np.full_like(x, 7)
    with pytest.raises(MemoryError, match="out of memory on cuda:0"):
        gpuops.add(x, y, out=out)
    assert (out == 7).all()


def test_limit_of_memory(fake):
    gpuops = fake.gpuops
    x = numbers(6 * PART_BYTES)
    used = gpuops.memory_info(0).used
    gpuops.memory_limit(used + 2 * BUFFERS * PART_BYTES, device=0)
    try:
        same(gpuops.multiply(x, np.uint8(3)), x * 3)
        gpuops.memory_limit(used + BUFFERS * PART_BYTES // 16, device=0)
        out = np.full_like(x, 7)
        with pytest.raises(MemoryError, match="within a limit"):
            gpuops.add(x, x[::-1], out=out)
        assert (out == 7).all()
    finally:
        gpuops.memory_limit(None, device=0)


# Calls too small for parts, whose operands are not broadcast, and too large for a slab.
WHOLE = {
    "add": lambda: (numbers(LARGEST_WHOLE), numbers(LARGEST_WHOLE, 1)),
    "multiply": lambda: (numbers(LARGEST_WHOLE // 4).astype("f2"), numbers(LARGEST_WHOLE // 4)),
    "saxpy": lambda: (3.0, *np.ones((2, LARGEST_WHOLE // 4), "f4")),
    "sigmoid": lambda: (np.linspace(-9, 9, LARGEST_WHOLE // 4, dtype="f4"),),
    "sigmoid_backward": lambda: tuple(np.full((2, LARGEST_WHOLE // 8), 0.25)),
    "matmul": lambda: (numbers(LARGEST_WHOLE).reshape(-1, 64), numbers(64 * 40, 1).reshape(64, 40)),
    "correlate": lambda: (numbers(LARGEST_WHOLE).reshape(-1, 512), np.ones((5, 3))),
    "convolve": lambda: (numbers(LARGEST_WHOLE).reshape(-1, 64, 64), np.ones((3, 3))),
}


@pytest.mark.parametrize("name", WHOLE)
def test_no_room_for_a_small_call_as_a_whole(in_any_order, name):
    """It goes in parts as well then, as a large one does; and without any room, out stays."""
    fake, gpuops, arguments = in_any_order.fake, in_any_order.gpuops, WHOLE[name]()
    operator = functools.partial(getattr(gpuops, name), *arguments)
    out_of = {"correlate": "output", "convolve": "output"}.get(name, "out")
    whole, expected = launches(in_any_order, operator)
    needed = expected.nbytes + sum(np.asarray(x).nbytes for x in arguments if np.ndim(x) > 0)
    out = np.empty_like(expected)
    for options in ({}, {out_of: out}):
        gpuops.empty_cache(0)
        fake.leave_free(needed * 3 // 4)
        made, result = launches(in_any_order, functools.partial(operator, **options))
        same(out if options else result, expected)
        assert made > whole
    gpuops.empty_cache(0)
    fake.leave_free(1000)
    out[...] = 7
    with pytest.raises(MemoryError, match="out of memory on cuda:0"):
        operator(**{out_of: out})
    assert (out == 7).all()


@pytest.mark.parametrize("layout", ["C", "F", "strided", "padded", "backward"])
@pytest.mark.parametrize("name", WHOLE)
def test_no_room_for_the_result_of_a_small_call(fake, name, layout):
    """Its parts go to where it lies, and nothing goes beside it."""
    arguments = WHOLE[name]()
    operator = functools.partial(getattr(fake.gpuops, name), *arguments)
    expected = operator()
    out = Guarded(expected.shape, expected.dtype, layout)
    fake.gpuops.empty_cache(0)
    fake.fake.leave_free(expected.nbytes * 7 // 8)
    operator(**{"output" if name in ("correlate", "convolve") else "out": out.array})
    same(out.array, expected)
    assert out.kept_to_its_own()


LEAST_PART_BYTES = PART_BYTES // constant("each_parts.cu", "LEAST_SHARE")


def tries_with_room(fake, items, free):
    """How often a call is tried in vain before there is room for it in parts."""
    x, y = np.arange(items) ** 0.5, np.linspace(-1, 1, items)
    fake.gpuops.empty_cache(0)
    fake.fake.leave_free(free)
    before = fake.fake.calls("cudaMemPoolTrimTo")
    same(fake.gpuops.multiply(x, y), np.multiply(x, y))
    return (fake.fake.calls("cudaMemPoolTrimTo") - before) // 2


def test_a_small_call_is_tried_as_a_whole_once(fake):
    """The first parts take half as much at most; while there is no room, they are halved."""
    items, more = LARGEST_WHOLE // 8, 3072  # for what buffers are multiples of
    whole = 3 * LARGEST_WHOLE
    rooms = [whole - 1, *(whole // share + more for share in (2, 4, 8))]
    assert [tries_with_room(fake, items, room) for room in rooms] == [1, 1, 2, 3]


def test_the_smallest_call_that_goes_in_parts(fake):
    """It has more of the smallest parts than are on the device at once."""
    items = BUFFERS * LEAST_PART_BYTES // 8
    assert tries_with_room(fake, items + 1, 24 * items) == 1
    with pytest.raises(MemoryError, match=f" {8 * items} bytes were asked for"):
        tries_with_room(fake, items, 24 * items - 1)


def test_no_room_for_what_is_not_cut(fake):
    """Then it is as for the call as a whole that memory does not suffice."""
    line, out = numbers(LARGEST_WHOLE), np.full(LARGEST_WHOLE, 7, np.uint8)
    fake.gpuops.empty_cache(0)
    fake.fake.leave_free(LARGEST_WHOLE * 3 // 2)
    with pytest.raises(MemoryError, match=f" {LARGEST_WHOLE} bytes were asked for"):
        fake.gpuops.correlate(line, [1, 2, 1], output=out)
    assert (out == 7).all()


@pytest.mark.parametrize("mode", ["once", "from then on"])
@pytest.mark.parametrize(
    ("function", "number"),
    [("cudaMallocFromPoolAsync", 1), *(("cudaStreamCreateWithPriority", k) for k in (1, 2, 3))],
)
def test_memory_runs_out(fake, function, number, mode):
    """What lasts is told, and leaves out as it was; what passes is over when it is tried again."""
    gpuops = fake.gpuops
    x, out = numbers(LARGE), np.full(LARGE, 7, np.uint8)
    with contextlib.ExitStack() as stack:
        fault = stack.enter_context(fake.fake.fail(number, OUT_OF_MEMORY, mode, function))
        if mode != "once":
            stack.enter_context(pytest.raises(MemoryError))
        gpuops.add(x, x, out=out)
    assert fault.reached
    same(out, x + x if mode == "once" else np.full_like(x, 7))
    same(gpuops.add(x, x), x + x)


def test_no_page_locked_memory(fake):
    gpuops = fake.gpuops
    x, y = numbers(LARGE), numbers(LARGE, 1)
    for scheduler in SCHEDULERS:
        fake.fake.set_scheduler(*scheduler)
        gpuops.empty_cache(0)
        with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaHostRegister") as fault:
            same(gpuops.add(x, y), x + y)
            same(gpuops.add(x[::2], y[::2]), x[::2] + y[::2])
        assert fault.reached


def test_page_locked_arrays(in_any_order, fake):
    x, y, out = (fake.fake.page_locked(numbers(LARGE, seed)) for seed in range(3))
    expected = x + y
    in_any_order.gpuops.add(x, y, out=out)
    np.testing.assert_array_equal(out, expected)
    in_any_order.gpuops.add(x, y, out=x)
    np.testing.assert_array_equal(x, expected)
    in_any_order.gpuops.add(y[: len(y) // 2 * 2].reshape(2, -1), y[: len(y) // 2])
    for array in (x, y, out):
        fake.fake.library.cudaFreeHost(ctypes.c_void_p(array.ctypes.data))


def test_a_pin_is_released_half_way(fake):
    """What is unlocked meanwhile stays locked until the call is over."""
    fake.fake.set_scheduler("lazy")
    x = numbers(LARGE)
    fake.gpuops.add(x, x, device="cuda")
    before = fake.fake.live().registered_bytes
    pin = fake.gpuops.pin(x)

    def visit(name, _):
        if name == "cudaLaunchKernel":
            pin.release()

    with fake.fake.visit(visit):
        same(fake.gpuops.add(x, x, device="cuda"), x + x)
    assert not pin.locked
    assert fake.fake.live().registered_bytes == before


def test_streams_and_rings_are_used_again(fake):
    gpuops = fake.gpuops
    gpuops.empty_cache(0)
    before = fake.fake.live()
    x = numbers(LARGE)
    gpuops.add(x, x)
    between = fake.fake.live()
    assert between.streams == before.streams + 3
    for scheduler in SCHEDULERS:
        fake.fake.set_scheduler(*scheduler)
        gpuops.add(x, x[::-1])
        gpuops.multiply(x, x, stream=gpuops.Stream())
        assert fake.fake.live().streams == between.streams
        assert fake.fake.live().registered_bytes <= before.registered_bytes + 3 * RING_BYTES
    gpuops.empty_cache(1)
    assert fake.fake.live().streams == between.streams
    gpuops.empty_cache(0)
    assert fake.fake.live().streams == before.streams
    assert fake.fake.live().registered_bytes == before.registered_bytes


# Failures.


@pytest.mark.parametrize("mode", ["once", "from then on"])
@pytest.mark.parametrize("number", [1, 3, 12])
@pytest.mark.parametrize(
    "function",
    ["cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaLaunchKernel"],
)
def test_a_call_fails_half_way(fake, function, number, mode):
    """Then nothing is at work on the arrays of the caller any more."""
    gpuops = fake.gpuops
    x, y, out = (
        numbers(13 * PART_BYTES),
        numbers(13 * PART_BYTES, 1),
        np.empty(13 * PART_BYTES, "u1"),
    )
    fake.fake.set_scheduler("lazy")
    with (
        fake.fake.fail(number, DEVICE_ERROR, mode, function) as fault,
        pytest.raises(gpuops.DeviceError, match=function),
    ):
        gpuops.add(x, y, out=out)
    assert fault.reached
    out[...] = 7
    fake.fake.run()
    assert (out == 7).all()
    same(gpuops.add(x, y), x + y)


@pytest.mark.parametrize("number", [1, 12])
def test_queries_fail(fake, number):
    """How many there are depends on who is quicker. A ring that cannot be asked counts as taken."""
    gpuops = fake.gpuops
    x, y = numbers(13 * PART_BYTES), numbers(13 * PART_BYTES, 1)
    out = np.empty_like(x)
    fake.fake.set_scheduler("lazy")
    for mode in ("once", "from then on"):
        raised = False
        with fake.fake.fail(number, DEVICE_ERROR, mode, "cudaEventQuery") as fault:
            try:
                gpuops.add(x, y, out=out)
            except gpuops.DeviceError as error:
                assert "cudaEventQuery" in str(error)
                raised = True
        assert fault.reached or number > 1
        assert raised or mode == "once" or not fault.reached
        if raised:
            out[...] = 7
            fake.fake.run()
            assert (out == 7).all()
        else:
            same(out, x + y)
    same(gpuops.add(x, y), x + y)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_end_cannot_be_waited_for(fake, number):
    """The buffers are not used again before the work is over that could not be waited for.

    They are large, so that what comes next would have them.
    """
    gpuops, size = fake.gpuops, DIVISOR * LARGE
    fake.fake.set_part_bytes(DIVISOR * PART_BYTES)
    x, y = fake.fake.page_locked(numbers(size)), fake.fake.page_locked(numbers(size, 1))
    out = fake.fake.page_locked(x)
    fake.fake.set_scheduler("lazy")
    with (
        fake.fake.fail(number, DEVICE_ERROR, "once", "cudaStreamSynchronize") as fault,
        pytest.raises(gpuops.DeviceError, match="cudaStreamSynchronize"),
    ):
        gpuops.add(x, y, out=out)
    assert fault.reached
    later = gpuops.to_device(y)
    fake.fake.run()
    same(later.to_host(), y)
    np.testing.assert_array_equal(out, x + y)
    for array in (x, y, out):
        fake.fake.library.cudaFreeHost(ctypes.c_void_p(array.ctypes.data))


# Streams and devices.


def test_the_work_of_its_stream_comes_first(in_any_order, fake):
    """What that is still to write to page-locked memory is there when it is read."""
    gpuops, library = in_any_order.gpuops, fake.fake.library
    x = fake.fake.page_locked(np.zeros(LARGE, np.uint8))
    y = numbers(LARGE)
    stream, d = gpuops.Stream(), gpuops.to_device(y)
    gpuops.synchronize(0)
    error = library.cudaMemcpyAsync(
        *map(ctypes.c_void_p, (x.ctypes.data, d.ptr)), ctypes.c_size_t(LARGE), 2,
        ctypes.c_void_p(stream.ptr),
    )  # fmt: skip
    assert error == 0
    same(gpuops.add(x, y, stream=stream), y + y)
    library.cudaFreeHost(ctypes.c_void_p(x.ctypes.data))


def test_bad_indices_of_its_stream_are_told(gpuops, part):
    x = numbers(3 * part)
    stream = gpuops.Stream()
    gpuops.gather(gpuops.to_device([1.0], stream=stream), [3], stream=stream)
    with pytest.raises(IndexError, match="found by an earlier gather"):
        gpuops.add(x, x, stream=stream)
    same(gpuops.add(x, x, stream=stream), x + x)


def test_while_streams_are_captured(fake):
    gpuops = fake.gpuops
    x = numbers(LARGE)
    captured = gpuops.Stream()
    fake.fake.set_capturing(captured.ptr, True)
    try:
        same(gpuops.add(x, x, stream=gpuops.Stream()), x + x)
        out = np.full_like(x, 7)
        with pytest.raises(ValueError, match="captured into a graph"):
            gpuops.add(x, x, out=out, stream=captured)
        assert (out == 7).all()
    finally:
        fake.fake.set_capturing(captured.ptr, False)
    same(gpuops.add(x, x, stream=captured), x + x)


def test_two_devices(fake):
    x = numbers(LARGE)
    same(fake.gpuops.add(x, x, device=1), x + x)
    same(fake.gpuops.add(x, x, device=0), x + x)
    assert fake.fake.current_device() == 0


@pytest.mark.parametrize("scheduler", SCHEDULERS[1:3], ids=lambda given: given[0])
def test_threads_call_at_once(fake, scheduler):
    gpuops = fake.gpuops
    fake.fake.set_scheduler(*scheduler)

    def calls(seed):
        x, y = numbers(LARGE + seed, seed), numbers(LARGE + seed, seed + 1)
        stream = gpuops.Stream(device=seed % 2) if seed % 3 else None
        for _ in range(2):
            same(gpuops.add(x, y, device=seed % 2, stream=stream), x + y)

    def small():
        x = np.arange(1000)
        for _ in range(20):
            same(gpuops.add(x, x, device=0), x + x)

    run_threads([functools.partial(calls, seed) for seed in range(7)] + [small])


# In processes of their own.

SMALL_PARTS = {"GPUOPS_FAKE_PART_BYTES": str(PART_BYTES)}

FAKE_OF_CHILD = """
from pathlib import Path
from faults.fake import Fake
from test_pipeline import *
import gpuops

fake = Fake(Path(gpuops.__path__[0]).with_name("cudart"))
fake.set_ring_divisor(DIVISOR)
"""

IN_CHILD = (
    FAKE_OF_CHILD
    + """
x, y = numbers(LARGE), numbers(LARGE, 1)
same(gpuops.add(x, y, device="cuda"), x + y)
out = np.zeros((2, LARGE), np.uint8)[:, ::-1]
same(gpuops.add(np.stack([x, y]), y, out=out, device="cuda"), np.stack([x + y, y + y]))
"""
)


@pytest.mark.parametrize(
    "environment",
    [
        {"GPUOPS_PINNED_LIMIT": "0"},
        {"GPUOPS_PINNED_LIMIT": str(RING_BYTES)},
        {"GPUOPS_PINNED_LIMIT": str(2 * RING_BYTES)},
        {"GPUOPS_NUM_THREADS": "1"},
        {"GPUOPS_NUM_THREADS": "12"},
        {"GPUOPS_LAUNCH_BLOCKING": "1"},
    ],
    ids=lambda given: "=".join(*given.items()),
)
def test_environments(fake_device, environment):
    run_child(fake_device.gpuops, IN_CHILD, **SMALL_PARTS, **environment)


WATCHED = (
    FAKE_OF_CHILD
    + """
import mmap, time
launches = 0

def at_launch(number, look):
    def visit(name, _):
        global launches
        launches += name == "cudaLaunchKernel"
        if name == "cudaLaunchKernel" and launches == number:
            print(look())
    return fake.visit(visit)
"""
)


def watched(device, source, **environment):
    environment["GPUOPS_FAKE_MEMORY"] = str(DEVICE_BYTES)
    return run_child(device.gpuops, WATCHED + source, **environment)


LONG_PARTS = """
part = 2 * RING_BYTES
fake.set_part_bytes(part)
fake.set_scheduler("{scheduler}")
x, out = numbers(3 * part), np.zeros(3 * part, np.uint8)
with at_launch(2, lambda: np.any(out[:part])):
    gpuops.add(x, x, out=out, device="cuda")
np.testing.assert_array_equal(out, x + x)
"""


def test_copies_advance_together(fake_device):
    """Alone, a caller writes to the result while the next operands wait for the bus."""
    source = LONG_PARTS.format(scheduler="lazy")
    assert watched(fake_device, source, GPUOPS_NUM_THREADS="1") == "True\n"


def test_a_part_is_sent_before_its_buffer_is_used_again(fake_device):
    """Also where it is longer than a ring, and the bus never keeps the way up waiting."""
    source = LONG_PARTS.format(scheduler="now")
    assert watched(fake_device, source, GPUOPS_NUM_THREADS="1") == "False\n"


def kernel_makes_ready():
    """Linux does so from 5.14 on."""
    memory, populate_write = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8), 23
    place, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
    return ctypes.CDLL(None).madvise(place, size, populate_write) == 0


@pytest.mark.parametrize("there", [0, 1, 12 << 20])
def test_all_of_the_result_is_made_ready(fake_device, there):
    """By the workers, before there is anything to be written to it, and though some is there."""
    if not kernel_makes_ready():
        pytest.skip("the kernel has no MADV_POPULATE_WRITE")
    source = """
def is_there():
    page = out[-2 * HUGE_PAGE_BYTES :].ctypes.data & -mmap.PAGESIZE
    known = ctypes.c_ubyte()
    assert mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(known)) == 0
    return bool(known.value & 1)

def gets_there():
    end = time.monotonic() + 20
    while not is_there() and time.monotonic() < end:
        time.sleep(0.01)
    return is_there()

mincore = ctypes.CDLL(None).mincore
fake.set_ring_divisor(1)
fake.set_part_bytes(3 << 20)
x = numbers((27 << 20) + 4097)  # of many huge pages
out = np.frombuffer(mmap.mmap(-1, len(x)), np.uint8)
first = -out.ctypes.data % HUGE_PAGE_BYTES
out[first : first + THERE] = 1
print(is_there())
with at_launch(1, gets_there):
    gpuops.add(x, x, out=out, device="cuda")
np.testing.assert_array_equal(out, x + x)
"""
    source = source.replace("THERE", str(there))
    said = watched(fake_device, source, GPUOPS_NUM_THREADS="3")
    assert said == "False\nTrue\n"


def test_a_limit_that_is_no_number(fake_device):
    source = """
import numpy as np
from test_pipeline import LARGE, numbers
import gpuops

out = np.full(LARGE, 7, np.uint8)
try:
    gpuops.add(numbers(LARGE), numbers(LARGE), out=out, device="cuda")
except ValueError as error:
    print(error)
assert (out == 7).all()
"""
    said = run_child(fake_device.gpuops, source, **SMALL_PARTS, GPUOPS_PINNED_LIMIT="many")
    assert said.startswith("GPUOPS_PINNED_LIMIT is 'many': expected a number of bytes")


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_fork_leaves_the_streams_behind(fake_device):
    source = (
        IN_CHILD
        + """
import os, signal
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        gpuops.add(x, y, device="cuda")
    except gpuops.ForkedProcessError:
        os._exit(0 if (gpuops.add(x, y, device="cpu") == x + y).all() else 1)
    os._exit(2)
print(os.waitpid(child, 0)[1])
same(gpuops.add(x, y, device="cuda"), x + y)
"""
    )
    environment = SMALL_PARTS | {"GPUOPS_NUM_THREADS": "3"}
    assert run_child(fake_device.gpuops, source, **environment) == "0\n"
