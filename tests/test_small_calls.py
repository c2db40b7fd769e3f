"""Small calls between NumPy arrays on a GPU: through a slab, with a launch and a wait."""

import contextlib
import ctypes

import numpy as np
import pytest
from helpers import (
    DTYPES,
    INDEX_DTYPES,
    Guarded,
    constant,
    filled_array,
    numbers,
    run_child,
    run_threads,
    same,
)
from operators import OPERATORS, is_in_place, required_arguments

DEVICE_ERROR = 999
OUT_OF_MEMORY = 2
NEVER = 1 << 30


SLAB_BYTES = constant("slab.cu", "SLAB_BYTES")
MOST_SLABS = constant("slab.cu", "MOST_SLABS")
STAGED_BYTES = constant("gather.cuh", "GATHER_STAGED_BYTES")

X = np.arange(1000, dtype="f4")
INDICES = np.random.default_rng(0).integers(-1000, 1000, 1000)


@pytest.fixture
def gpuops(gpu):
    return gpu.gpuops


@pytest.fixture
def fake(fake):
    fake.gpuops.gather(X, INDICES)
    fake.gpuops.empty_cache(0)
    fake.gpuops.empty_cache(1)
    return fake


def slabs(fake):
    """How many there are, as a function that counts those that came since."""
    before = fake.fake.live().pinned_bytes

    def count():
        added = fake.fake.live().pinned_bytes - before
        assert added % SLAB_BYTES == 0
        return added // SLAB_BYTES

    return count


def work_of(fake, call):
    """The calls of CUDA by which a call of ours has work done, and its result."""
    with fake.fake.fail(NEVER, DEVICE_ERROR):
        result = call()
        names = fake.fake.log()
    # The last one clears what a call of another test may have left in a slot for bad indices.
    others = ("cudaGetDevice", "cudaSetDevice", "cudaMemsetAsync")
    # So that another thread's capture is not spoilt.
    others += ("cudaThreadExchangeStreamCaptureMode",)
    return [name for name in names if name not in others], result


LAUNCH_AND_WAIT = ["cudaLaunchKernel", "cudaStreamSynchronize"]


# What is called.


@pytest.mark.parametrize("scheduler", ["now", "lazy"])
@pytest.mark.parametrize(
    "operator", [o for o in OPERATORS if not is_in_place(o)], ids=lambda operator: operator.name
)
def test_a_launch_and_a_wait(fake, operator, scheduler):
    function = getattr(fake.gpuops, operator.name)
    expected = function(*required_arguments(operator), device="cpu")
    function(*required_arguments(operator))  # which makes the slab
    fake.fake.set_scheduler(scheduler)
    work, result = work_of(fake, lambda: function(*required_arguments(operator)))
    assert work == LAUNCH_AND_WAIT
    np.testing.assert_allclose(result, expected, rtol=1e-15)


@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
@pytest.mark.parametrize("scheduler", ["now", "lazy"])
def test_every_mode_of_gather(fake, mode, scheduler):
    x, indices = filled_array((40, 3), "V12"), INDICES[:50] % 40
    fake.gpuops.gather(x, indices)
    fake.fake.set_scheduler(scheduler)
    work, result = work_of(fake, lambda: fake.gpuops.gather(x, indices, mode=mode))
    assert work == LAUNCH_AND_WAIT
    same(result, x[indices])


def test_on_a_stream_of_ones_own(fake):
    stream = fake.gpuops.Stream()
    fake.gpuops.gather(X, INDICES)
    expected = ["cudaStreamQuery", *LAUNCH_AND_WAIT]  # its own work comes first
    work, result = work_of(fake, lambda: fake.gpuops.gather(X, INDICES, stream=stream))
    assert [name for name in work if name != "cudaStreamIsCapturing"] == expected
    same(result, X[INDICES])
    work, result = work_of(fake, lambda: fake.gpuops.add(X, X, stream=stream))
    assert [name for name in work if name != "cudaStreamIsCapturing"] == expected
    same(result, X + X)


ORDERED = {
    "gather": lambda gpuops, x, **options: gpuops.gather(x, INDICES, **options),
    "add": lambda gpuops, x, **options: gpuops.add(x, X, **options),
    "matmul": lambda gpuops, x, **options: gpuops.matmul(x.reshape(10, 100), M, **options),
    "with gaps": lambda gpuops, x, **options: gpuops.add(x[::2], x[1::2], **options),
    "one element": lambda gpuops, x, **options: gpuops.add(x[7:8], X, **options),
    "weights": lambda gpuops, x, **options: gpuops.correlate(M, x[:9].reshape(3, 3), **options),
    "in place": lambda gpuops, x, **options: added_up(gpuops, x[::2], **options),
    "indices": lambda gpuops, x, **options: gpuops.gather(
        TABLE, x.view("u4"), mode="wrap", **options
    ),
}
M = np.eye(100, dtype="f4")
TABLE = np.arange(4 << 20, dtype="u4")  # of which the range that is taken is looked for


def added_up(gpuops, x, **options):
    result = np.zeros(1000, "f4")
    gpuops.scatter_add(result, INDICES[: len(x)], x, **options)
    return result


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("slab_bytes", [SLAB_BYTES, 0])
def test_the_work_of_its_stream_comes_first(in_any_order, fake, name, slab_bytes):
    """What that is still to write to page-locked memory is there when it is read."""
    gpuops, library = in_any_order.gpuops, fake.fake.library
    fake.fake.set_slab_bytes(slab_bytes)
    x = fake.fake.page_locked(np.zeros_like(X))
    stream, d = gpuops.Stream(), gpuops.to_device(X)
    gpuops.synchronize(0)
    for options in ({"stream": stream}, {}):
        x[...] = 0
        error = library.cudaMemcpyAsync(
            *map(ctypes.c_void_p, (x.ctypes.data, d.ptr)), ctypes.c_size_t(X.nbytes), 2,
            ctypes.c_void_p(stream.ptr),
        )  # fmt: skip
        assert error == 0
        with contextlib.nullcontext() if options else stream:
            same(ORDERED[name](gpuops, x, **options), ORDERED[name](gpuops, X))
    library.cudaFreeHost(ctypes.c_void_p(x.ctypes.data))


@pytest.mark.parametrize("name", ["gather", "add", "matmul"])
def test_a_stream_that_cannot_be_waited_for(fake, name):
    """Then nothing is begun."""
    stream = fake.gpuops.Stream()
    before = fake.fake.calls("cudaLaunchKernel")
    for _ in range(3):
        with (
            fake.fake.fail(1, DEVICE_ERROR, "once", "cudaStreamQuery"),
            fake.fake.fail(1, DEVICE_ERROR, "once", "cudaStreamSynchronize"),
            pytest.raises(fake.gpuops.DeviceError, match="cudaStreamSynchronize"),
        ):
            ORDERED[name](fake.gpuops, X, stream=stream)
        assert fake.fake.calls("cudaLaunchKernel") == before


@pytest.mark.parametrize("more", [0, 1])
def test_what_has_no_room_goes_through_memory_of_the_device(fake, more):
    quarter = SLAB_BYTES // 4
    table = np.resize(np.arange(251, dtype="u1"), 2 * quarter + more)
    indices = np.resize(np.arange(256, dtype="u1"), quarter)
    work, result = work_of(fake, lambda: fake.gpuops.gather(table, indices))
    assert ("cudaMemcpyAsync" in work) == more
    same(result, table[indices])
    x, y = table[:, None], np.full(1, 3, "u1")
    work, result = work_of(fake, lambda: fake.gpuops.add(x, y))
    assert ("cudaMemcpyAsync" in work) == more
    same(result, x + y)


def test_few_rows_of_a_large_table(fake):
    """The range that is taken has room."""
    x = np.arange(4 << 20, dtype="u4")
    indices = np.arange(2_000_000, 2_000_100)
    work, result = work_of(fake, lambda: fake.gpuops.gather(x, indices))
    assert "cudaMemcpyAsync" not in work
    same(result, x[indices])


# Results.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_gather(gpuops, dtype):
    x = filled_array((7, 5), dtype)
    for indices in (np.array([3, -1, 0]), np.array([[4, 4], [-5, 2]]), np.int8(2)):
        for axis in (0, 1, None):
            same(gpuops.gather(x, indices, axis=axis), np.take(x, indices, axis))
            same(gpuops.take(x, indices, axis), np.take(x, indices, axis))
    positions = np.arange(35).reshape(7, 5) % 5
    same(gpuops.take_along_axis(x, positions, 1), np.take_along_axis(x, positions, 1))


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_dtypes_of_indices(gpuops, dtype):
    indices = np.arange(100, dtype=dtype)
    same(gpuops.gather(X, indices), X[indices])
    same(gpuops.gather(X, indices[::-3]), X[indices[::-3]])


@pytest.mark.parametrize("row", [1, 2, 4, 8, 16, 3, 12, 48])
@pytest.mark.parametrize("size", ["one row", "one word", "full", "one more"])
def test_tables_that_a_block_reads_as_a_whole(gpuops, row, size):
    """The last word of one may have a part of it, and the indices fill one block or more."""
    full = STAGED_BYTES // row
    rows = {"one row": 1, "one word": -(-17 // row), "full": full, "one more": full + 1}[size]
    x = numbers(rows * row).view(f"V{row}")
    for count in (1, 255, 2049):
        count = min(count, (SLAB_BYTES // 2) // (row + 2))
        indices = np.random.default_rng(count).integers(-rows, rows, count, "i2")
        indices[-1] = rows - 1
        same(gpuops.gather(x, indices), x[indices])
        beyond = np.where(np.arange(count) % 3 == 1, indices + rows, indices)
        same(gpuops.take(x, beyond, mode="wrap"), np.take(x, beyond, mode="wrap"))
        same(gpuops.take(x, beyond, mode="clip"), np.take(x, beyond, mode="clip"))
        filled = gpuops.gather(x, beyond, mode="fill", fill_value=x[0])
        valid = (beyond >= -rows) & (beyond < rows)
        same(filled, np.where(valid, x[np.where(valid, beyond, 0)], x[0]))
        if count > 1:
            with pytest.raises(IndexError, match=f"index {beyond[~valid][0]} is out of bounds"):
                gpuops.gather(x, beyond)


def test_small_tables_of_other_layouts(gpuops):
    """What repeats lies in the slab once, and rows that overlap lie there as they do anywhere."""
    windows = np.lib.stride_tricks.sliding_window_view(X[:100], 4)
    one_again = np.broadcast_to(X[7:8], (1000,))
    for x in (one_again, X[::-1], X[::3], X[5:6], windows, X.reshape(10, 100).T):
        indices = INDICES % len(x)
        same(gpuops.gather(x, indices), x[indices])
        same(gpuops.gather(x, indices - len(x), mode="clip"), np.take(x, indices * 0, axis=0))
        same(gpuops.gather(x, indices[:1]), x[indices[:1]])


ELEMENTS = ["?", "i1", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_dtypes_of_elements(gpuops, dtype):
    x = np.arange(60).astype(dtype).reshape(3, 4, 5)
    same(gpuops.add(x, x), x + x)
    same(gpuops.multiply(x, x[1:2, ::-1]), x * x[1:2, ::-1])
    same(gpuops.add(x, np.arange(5)), x + np.arange(5))
    same(gpuops.add(x, x.dtype.type(1)), x + x.dtype.type(1))


LAYOUTS = {
    "C": lambda x: x,
    "strided": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backward": lambda x: x[::-1, ::-1],
    "transposed": lambda x: x.T.copy().T,
    "broadcast rows": lambda x: np.broadcast_to(x[:1], x.shape),
    "broadcast columns": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "misaligned": lambda x: np.frombuffer(b"a" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_layout", ["C", "F", "strided", "padded", "backward", "misaligned"])
def test_layouts(gpuops, layout, out_layout):
    base = np.arange(130.0).reshape(13, 10)
    x = LAYOUTS[layout](base)
    out = Guarded((13, 10), "f8", out_layout)
    gpuops.add(x, base, out=out.array)
    np.testing.assert_array_equal(out.array, x + base)
    assert out.kept_to_its_own()
    out = Guarded((2, 2, 10), "f8", out_layout)
    indices = LAYOUTS[layout](np.array([[3, -1], [0, 12]]))
    gpuops.gather(x, indices, out=out.array)
    np.testing.assert_array_equal(out.array, x[indices])
    assert out.kept_to_its_own()
    positions = LAYOUTS[layout](np.arange(130).reshape(13, 10) * 7 % 13)
    same(gpuops.take_along_axis(x, positions, 0), np.take_along_axis(x, positions, 0))
    np.testing.assert_array_equal(gpuops.matmul(x, base.T), x @ base.T)


def test_out_of_another_dtype_and_out_that_is_an_operand(gpuops):
    out = np.zeros(1000)
    assert gpuops.add(X, X, out=out) is out
    np.testing.assert_array_equal(out, X + X)
    out = np.arange(1000.0)
    gpuops.add(out, out[::-1], out=out)
    np.testing.assert_array_equal(out, 999.0)
    out = np.arange(10)
    gpuops.gather(out, out[::-1], out=out)
    np.testing.assert_array_equal(out, np.arange(10)[::-1])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing(gpuops, shape):
    x = np.zeros(shape)
    same(gpuops.add(x, 1.0), x + 1.0)
    same(gpuops.gather(x, np.zeros((0, 2), int)), x[np.zeros((0, 2), int)])
    same(gpuops.matmul(np.zeros((2, 0)), np.zeros((0, 3))), np.zeros((2, 3)))
    same(gpuops.gather(np.zeros(0), [0, 1], mode="fill"), np.zeros(2))
    empty = np.zeros((3, 0))
    same(gpuops.gather(empty, [2, 0]), empty[[2, 0]])
    with pytest.raises(IndexError, match="index 3 is out of bounds for axis 0 with size 3"):
        gpuops.gather(empty, [2, 3])


# Bad indices.


@pytest.mark.parametrize("scheduler", ["now", "lazy"])
def test_a_bad_index(fake, scheduler):
    fake.fake.set_scheduler(scheduler)
    bad = INDICES.copy()
    bad[[500, 700]] = 1000, -1001
    out = Guarded((1000,), "f4")
    for _ in range(3):
        with pytest.raises(IndexError, match="index 1000 is out of bounds for axis 0 with size"):
            fake.gpuops.gather(X, bad, out=out.array)
        assert out.untouched()
        same(fake.gpuops.gather(X, INDICES), X[INDICES])


def test_a_bad_index_of_an_earlier_call_is_told_of(fake):
    gpuops = fake.gpuops
    stream = gpuops.Stream()
    kept = gpuops.gather(gpuops.to_device(X, stream=stream), [1000], stream=stream)
    out = Guarded((1000,), "f4")
    with pytest.raises(IndexError, match=r"index 1000 .* an earlier gather on this stream"):
        gpuops.add(X, X, out=out.array, stream=stream)
    assert out.untouched()
    same(gpuops.add(X, X, stream=stream), X + X)
    del kept


# Slabs.


def test_one_slab_for_one_call_after_the_other(fake):
    count = slabs(fake)
    for _ in range(3):
        fake.gpuops.gather(X, INDICES)
        fake.gpuops.add(X, X)
        assert count() == 1
    fake.gpuops.add(X, X, device="cuda:1")
    assert count() == 2
    fake.gpuops.empty_cache(0)
    assert count() == 1
    fake.gpuops.empty_cache(1)
    assert count() == 0
    assert fake.fake.current_device() == 0


@pytest.mark.parametrize("scheduler", ["now", "lazy"])
def test_threads_have_slabs_of_their_own(fake, scheduler):
    gpuops = fake.gpuops
    count = slabs(fake)
    fake.fake.set_scheduler(scheduler)

    def work(seed):
        x = np.random.default_rng(seed).random(1000)
        with gpuops.device("cuda:0"):
            for turn in range(50):
                same(gpuops.gather(x, INDICES), x[INDICES])
                same(gpuops.add(x, turn + 0.5), x + (turn + 0.5))

    run_threads([lambda seed=seed: work(seed) for seed in range(4)])
    assert 1 <= count() <= 4


CALLS = {
    "gather": lambda gpuops, out: gpuops.gather(X, INDICES, out=out),
    "add": lambda gpuops, out: gpuops.add(X, X, out=out),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scheduler", ["now", "lazy"])
def test_a_slab_with_which_nobody_knows_what_goes_on(fake, name, scheduler):
    """It is lent to no other call, and given back once the device was waited for."""
    count = slabs(fake)
    fake.fake.set_scheduler(scheduler)
    for failed in range(1, 4):
        out = Guarded((1000,), "f4")
        with (
            fake.fake.fail(1, DEVICE_ERROR, "from then on", "cudaStreamSynchronize"),
            fake.fake.fail(1, DEVICE_ERROR, "from then on", "cudaEventRecord"),
            pytest.raises(fake.gpuops.DeviceError, match="cudaStreamSynchronize"),
        ):
            CALLS[name](fake.gpuops, out.array)
        assert out.untouched()
        assert count() == failed
    same(fake.gpuops.gather(X, INDICES), X[INDICES])
    assert count() == 4
    with fake.fake.fail(1, DEVICE_ERROR, "from then on", "cudaDeviceSynchronize"):
        with pytest.raises(fake.gpuops.DeviceError):
            fake.gpuops.empty_cache(0)
        assert count() in (3, 4)
    fake.gpuops.empty_cache(0)
    assert count() == 0


@pytest.mark.parametrize("name", CALLS)
def test_a_slab_is_lent_again_once_all_is_over(fake, name):
    count = slabs(fake)
    fake.fake.set_scheduler("lazy")
    for turn in range(3):
        with (
            fake.fake.fail(1, DEVICE_ERROR, "from then on", "cudaStreamSynchronize"),
            pytest.raises(fake.gpuops.DeviceError, match="cudaStreamSynchronize"),
        ):
            CALLS[name](fake.gpuops, np.zeros(1000, "f4"))
        assert count() == 1 + (turn > 0)
        same(fake.gpuops.add(X, X), X + X)  # in another one, as nothing is done yet
        assert count() == 2
        fake.fake.run()
    fake.gpuops.empty_cache(0)
    assert count() == 0


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_was_not_begun_leaves_no_doubt(fake, name):
    count = slabs(fake)
    for _ in range(3):
        with (
            fake.fake.fail(1, DEVICE_ERROR, "once", "cudaLaunchKernel"),
            pytest.raises(fake.gpuops.DeviceError, match="cudaLaunchKernel"),
        ):
            CALLS[name](fake.gpuops, np.zeros(1000, "f4"))
        assert count() == 1


def test_there_are_no_more_slabs_than_that(fake):
    count = slabs(fake)
    for _ in range(MOST_SLABS + 2):
        with (
            fake.fake.fail(1, DEVICE_ERROR, "from then on", "cudaStreamSynchronize"),
            fake.fake.fail(1, DEVICE_ERROR, "from then on", "cudaEventRecord"),
            pytest.raises(fake.gpuops.DeviceError),
        ):
            fake.gpuops.add(X, X)
    assert count() == MOST_SLABS
    for call, expected in ((fake.gpuops.gather, X[INDICES]), (fake.gpuops.add, X + INDICES)):
        work, result = work_of(fake, lambda call=call: call(X, INDICES))
        assert "cudaMemcpyAsync" in work
        np.testing.assert_array_equal(result, expected)
    fake.gpuops.empty_cache(0)
    work, _ = work_of(fake, lambda: fake.gpuops.gather(X, INDICES))
    assert "cudaMemcpyAsync" not in work and count() == 1


def test_memory_that_cannot_be_page_locked(fake):
    count = slabs(fake)
    with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaHostAlloc") as fault:
        for _ in range(MOST_SLABS + 1):
            same(fake.gpuops.gather(X, INDICES), X[INDICES])
            same(fake.gpuops.add(X, X), X + X)
    assert fault.reached and count() == 0
    same(fake.gpuops.add(X, X), X + X)
    assert count() == 1


def test_without_slabs(fake):
    """The way of larger calls, with the same results."""
    count = slabs(fake)
    fake.fake.set_slab_bytes(0)
    work, result = work_of(fake, lambda: fake.gpuops.gather(X, INDICES))
    assert work.count("cudaMemcpyAsync") == 3
    same(result, X[INDICES])
    work, result = work_of(fake, lambda: fake.gpuops.add(X, X))
    assert work.count("cudaMemcpyAsync") == 3
    same(result, X + X)
    assert count() == 0


ALLOCATIONS = """
import numpy as np
import gpuops
from faults.fake import Fake
from pathlib import Path
fake = Fake(Path(gpuops.__path__[0]).with_name("cudart"))
x = np.arange(1000.0)
with gpuops.device("cuda"):
    gpuops.gather(x, [999])
    assert (gpuops.add(x, x) == x + x).all()
    assert (gpuops.gather(x, range(10)) == x[:10]).all()
print(fake.live().pinned_allocations, fake.calls("cudaMemcpyAsync") > 0)
"""


@pytest.mark.parametrize(("limit", "expected"), [("0", "1 True"), (str(SLAB_BYTES), "2 False")])
def test_without_page_locked_buffers(fake_device, limit, expected):
    """What notes bad indices is page-locked all the same."""
    said = run_child(fake_device.gpuops, ALLOCATIONS, GPUOPS_PINNED_LIMIT=limit)
    assert said.strip() == expected


def test_a_limit_that_is_no_number(fake_device):
    source = """
import numpy as np
import gpuops
out = np.full(3, 7.0)
for call in (lambda: gpuops.add(out, out, out=out), lambda: gpuops.gather(out, [0] * 3, out=out)):
    try:
        with gpuops.device("cuda"):
            call()
    except ValueError as error:
        print(error)
assert (out == 7).all()
"""
    said = run_child(fake_device.gpuops, source, GPUOPS_PINNED_LIMIT="many").splitlines()
    assert len(said) == 2 and said[0] == said[1]
    assert said[0].startswith("GPUOPS_PINNED_LIMIT is 'many': expected a number of bytes")
