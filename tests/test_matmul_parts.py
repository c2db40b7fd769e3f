"""Products of large NumPy arrays: in parts, panels of a result or some of many results."""

import functools

import numpy as np
import pytest
from helpers import constant, filled_array, launches, run_threads, same

PART_BYTES = 16 << 10
LEAST_PANEL = constant("matmul_parts.cu", "LEAST_PANEL")
DEVICE_ERROR = 999


@pytest.fixture
def fake(fake):
    fake.fake.set_part_bytes(PART_BYTES)
    return fake


def parts_of(fake, call):
    """How many copies of results come down is how many parts there are, and what came of them."""
    before = fake.fake.calls("cudaStreamWaitEvent")
    result = call()
    waits = fake.fake.calls("cudaStreamWaitEvent") - before
    return waits // 4, result


def check(fake, a, b, parts=None):
    made, result = parts_of(fake, lambda: fake.gpuops.matmul(a, b))
    same(result, np.matmul(a, b))
    assert made > 1 if parts is None else made == parts
    return result


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("panels", [1, 2, 3])
def test_panels(fake, panels, more):
    extent = panels * LEAST_PANEL + more
    large, small = filled_array((extent, 40), "u1"), filled_array((40, 3), "u1", 1)
    parts = panels + (more > 0)
    parts = 0 if parts == 1 else parts
    check(fake, large, small, parts)
    check(fake, small.T.copy(), large.T.copy(), parts)


@pytest.mark.parametrize("dtype", ["i4", "f4", "f8"])
def test_on_any_gpu(gpu, dtype):
    """Also with less memory than the operands take; of small numbers, all sums are exact."""
    gpuops, depth = gpu.gpuops, 2000
    if gpu.fake is not None:
        gpu.fake.set_part_bytes(PART_BYTES)
        depth = 10
    columns = 2 * LEAST_PANEL + 3 if gpu.fake is None else 5
    a = (filled_array((5 * LEAST_PANEL + 1, depth), "u1") % 16).astype(dtype)
    b = (filled_array((depth, columns), "u1", 1) % 16).astype(dtype)
    expected = a.astype("f8") @ b.astype("f8")
    np.testing.assert_array_equal(gpuops.matmul(a, b), expected)
    gpuops.empty_cache(0)
    # cuBLASLt may want some of its own.
    limit = (a.nbytes + b.nbytes) // 2 if gpu.fake is not None else 64 << 20
    gpuops.memory_limit(gpuops.memory_info(0).used + limit, device=0)
    try:
        np.testing.assert_array_equal(gpuops.matmul(a, b), expected)
    finally:
        gpuops.memory_limit(None, device=0)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "i8"])
def test_integers(fake, dtype):
    check(fake, filled_array((7000, 11), dtype), filled_array((11, 13), dtype, 1))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
def test_floats(in_any_order, dtype):
    """What the parts of a result are does not depend on the others."""
    gpuops = in_any_order.gpuops
    generator = np.random.default_rng(0)
    a = generator.standard_normal((2600, 37)).astype(dtype)
    b = generator.standard_normal((37, 29)).astype(dtype)
    parts, result = parts_of(in_any_order, lambda: gpuops.matmul(a, b))
    assert parts > 1
    scale = np.abs(a).astype("f8") @ np.abs(b).astype("f8")
    error = np.abs(result.astype("c16") - a.astype("c16") @ b.astype("c16"))
    epsilon = float(np.finfo(dtype).eps)
    assert (error <= (37 if dtype != "f2" else 2) * epsilon * scale).all()


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T.copy().T,
    "every second": lambda x: np.repeat(x, 2, -1)[:, ::2],
    "backward": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "with gaps": lambda x: np.pad(x, ((0, 1), (3, 2)))[:-1, 3:-2],
    "misaligned": lambda x: np.frombuffer(b"x" + x.tobytes(), x.dtype, x.size, 1).reshape(x.shape),
    "one row": lambda x: np.broadcast_to(x[0], x.shape),
    "one column": lambda x: np.broadcast_to(x[:, :1], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fake, layout):
    a, b = filled_array((2300, 9), "i4"), filled_array((9, 7), "i4", 1)
    for one, other in [(a, b), (b.T.copy(), a.T.copy())]:
        check(fake, LAYOUTS[layout](one), other)
        check(fake, one, LAYOUTS[layout](other))
        if layout in ("misaligned", "one row", "one column"):
            continue
        out = LAYOUTS[layout](np.zeros((len(one), other.shape[1]), "i4"))
        fake.gpuops.matmul(one, other, out=out)
        np.testing.assert_array_equal(out, one @ other)


def test_out_overlaps(fake):
    a = filled_array((3000, 8), "i4")
    expected = a @ a[:8]
    fake.gpuops.matmul(a, a[:8], out=a)
    np.testing.assert_array_equal(a, expected)


BATCHES = {
    "vectors": ((5000, 60), (60,)),
    "a vector first": ((60,), (60, 5000)),
    "small matrices": ((700, 6, 5), (700, 5, 4)),
    "small matrices and one": ((700, 6, 5), (5, 4)),
    "one and small matrices": ((6, 5), (700, 5, 4)),
    "broadcast": ((30, 1, 6, 5), (40, 5, 4)),
    "broadcast the other way": ((40, 6, 5), (30, 1, 5, 4)),
    "large matrices": ((3, 1500, 12), (3, 12, 11)),
    "large matrices and one": ((3, 1500, 12), (12, 11)),
    "one and large matrices": ((1500, 12), (3, 12, 11)),
    "broadcast large matrices": ((2, 1, 1500, 12), (3, 12, 11)),
    "many of large matrices and a vector": ((3, 4, 1500, 12), (12,)),
    "a vector and large matrices": ((12,), (2, 3, 12, 1500)),
    "large matrices on both sides": ((1300, 5), (2, 5, 1200)),
    "nothing in the batch but ones": ((1, 1, 3000, 7), (1, 7, 3)),
}


@pytest.mark.parametrize("which", BATCHES)
def test_batches(in_any_order, which):
    a, b = (filled_array(shape, "i2", seed) for seed, shape in enumerate(BATCHES[which]))
    check(in_any_order, a, b)


def test_batches_of_windows(in_any_order):
    """Matrices that share memory, or are all the same."""
    memory = filled_array(40000, "i2")
    a = np.lib.stride_tricks.as_strided(memory, (5, 1400, 6), (2800, 12, 2))
    check(in_any_order, a, filled_array((5, 6, 3), "i2", 1))
    a = np.lib.stride_tricks.as_strided(memory, (5, 1400, 6), (0, 0, 2))
    check(in_any_order, a, filled_array((5, 6, 3), "i2", 1))


def test_nothing_to_multiply(fake):
    for rows, depth, columns in [(0, 40, 9000), (9000, 40, 0), (9000, 0, 40)]:
        a, b = np.ones((rows, depth), "i4"), np.ones((depth, columns), "i4")
        parts, result = parts_of(fake, lambda a=a, b=b: fake.gpuops.matmul(a, b))
        same(result, a @ b)
        assert parts == 0


def test_long_sums_are_not_cut(fake):
    a, b = filled_array((3, 20000), "i4"), filled_array((20000, 2), "i4", 1)
    check(fake, a, b, 0)


def test_what_is_repeated_goes_up_once(fake):
    """The operand across the panels; both with panels on both sides would be more."""

    def copies(call):
        before = fake.fake.calls("cudaMemcpyAsync")
        call()
        return fake.fake.calls("cudaMemcpyAsync") - before

    a, b = filled_array((4 * LEAST_PANEL, 20), "u1"), filled_array((20, 3), "u1", 1)
    assert copies(lambda: fake.gpuops.matmul(a, b)) == 4 + 1 + 4


@pytest.mark.parametrize("shape", [(3000, 10, 2500), (2500, 10, 3000)])
def test_little_memory_makes_panels_smaller(in_any_order, shape):
    """On both sides, so that operands and result may be larger than the device."""
    fake, (rows, depth, columns) = in_any_order, shape
    a, b = filled_array((rows, depth), "u1"), filled_array((depth, columns), "u1", 1)
    expected = a @ b
    fake.gpuops.empty_cache(0)
    fake.fake.leave_free(1 << 20)
    try:
        made, result = parts_of(fake, lambda: fake.gpuops.matmul(a, b))
    finally:
        fake.fake.set_memory_limit(64 << 20)
    same(result, expected)
    assert made > 16


def test_too_little_memory(fake):
    gpuops = fake.gpuops
    a, b = filled_array((3000, 500), "u1"), filled_array((500, 10), "u1", 1)
    out = np.full((3000, 10), 7, "u1")
    gpuops.empty_cache(0)
    gpuops.memory_limit(gpuops.memory_info(0).used + 1500, device=0)
    try:
        with pytest.raises(MemoryError, match="within a limit"):
            gpuops.matmul(a, b, out=out)
    finally:
        gpuops.memory_limit(None, device=0)
    assert (out == 7).all()


@pytest.mark.parametrize("mode", ["once", "from then on"])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaLaunchKernel", "cudaStreamWaitEvent"])
def test_a_call_fails_half_way(fake, function, number, mode):
    a, b = filled_array((6000, 20), "u1"), filled_array((20, 3), "u1", 1)
    out = np.zeros((6000, 3), "u1")
    fake.fake.set_scheduler("lazy")
    with (
        fake.fake.fail(number, DEVICE_ERROR, mode, function) as fault,
        pytest.raises(fake.gpuops.DeviceError, match=function),
    ):
        fake.gpuops.matmul(a, b, out=out)
    assert fault.reached
    out[...] = 7
    fake.fake.run()
    assert (out == 7).all()
    check(fake, a, b)


def test_page_locked_arrays(in_any_order):
    fake = in_any_order
    a, b = filled_array((6000, 20), "i4"), filled_array((20, 3), "i4", 1)
    out = np.zeros((6000, 3), "i4")
    with fake.gpuops.pin(a), fake.gpuops.pin(b), fake.gpuops.pin(out):
        fake.gpuops.matmul(a, b, out=out)
    np.testing.assert_array_equal(out, a @ b)


def test_threads_call_at_once(in_any_order):
    gpuops = in_any_order.gpuops

    def calls(seed):
        a, b = filled_array((4000 + seed, 20), "i4", seed), filled_array((20, 3), "i4", 1)
        stream = gpuops.Stream(device=seed % 2)
        same(gpuops.matmul(a, b, device=seed % 2, stream=stream), a @ b)

    run_threads([functools.partial(calls, seed) for seed in range(8)])


def test_operands_of_any_length(fake):
    """An array that repeats one element may have more bytes than there are addresses."""
    gpuops = fake.gpuops
    gpuops.to_device(np.ones(4)).to_host()  # and leaves its memory for arrays as small
    a, b = np.broadcast_to(1.0, 1 << 50), np.broadcast_to(np.int8(1), (1 << 50, 4096))
    with pytest.raises(MemoryError, match="out of memory on cuda:0"):
        gpuops.matmul(a, b)


def test_a_transposed_operand_goes_up_as_it_lies(fake):
    """It is not turned on the way, for which each part would launch one more kernel."""
    depth = constant("transfer.cu", "LEAST_TURNED_BYTES") // LEAST_PANEL + 1
    a = filled_array((3 * LEAST_PANEL, depth), "u1")
    b = filled_array((depth, 1), "u1", 1)
    launched, expected = launches(fake, lambda: fake.gpuops.matmul(a, b))
    turned, result = launches(fake, lambda: fake.gpuops.matmul(np.asfortranarray(a), b))
    assert turned == launched
    same(result, expected)
