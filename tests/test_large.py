"""More than 2**31 elements, and more than 4 GiB, out of memory that is hardly there.

On the CPU the arrays are views of memory that is reserved but never touched, so that a test costs
as much as what it reads and writes. A GPU has to hold its table for real.
"""

import mmap
import os

import numpy as np
import pytest
from helpers import same
from numpy.lib.stride_tricks import as_strided

BORDERS = [1 << 31, 1 << 32]
TABLE = (1 << 32) + 7


@pytest.fixture
def on_cpu(cpu_device):
    with cpu_device.gpuops.device("cpu"):
        yield cpu_device.gpuops


def reserved(count, dtype="u1"):
    """A one-dimensional array of zeros that takes no memory until it is written to."""
    dtype = np.dtype(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return np.frombuffer(memory, dtype)


def around_the_borders(size):
    near = [border + step for border in BORDERS for step in (-2, -1, 0, 1, 2)]
    return np.array([0, 1, *[at for at in near if at < size], size - 2, size - 1])


def marked(x):
    """Writes a value of its own wherever a truncated index could lead."""
    at = around_the_borders(len(x))
    x[at] = np.arange(1, len(at) + 1)
    return at


@pytest.mark.parametrize("dtype", ["u1", "i4"])
def test_long_table(on_cpu, dtype):
    x = reserved(TABLE, dtype)
    at = marked(x)
    expected = np.arange(1, len(at) + 1).astype(dtype)
    same(on_cpu.gather(x, at), expected)
    same(on_cpu.gather(x, at - TABLE), expected)
    same(on_cpu.gather(x, at.astype(np.uint64)), expected)
    same(on_cpu.gather(x, at + TABLE, mode="wrap"), expected)
    same(on_cpu.gather(x, [2**63 - 1, 2**62], mode="clip"), expected[[-1, -1]])
    same(on_cpu.take_along_axis(x, at), expected)
    small = at[at < 1 << 31].astype(np.int32)
    same(on_cpu.gather(x, small), expected[: len(small)])
    for index in (TABLE, -TABLE - 1, 1 << 33):
        with pytest.raises(IndexError) as caught:
            on_cpu.gather(x, [0, index])
        assert str(caught.value) == f"index {index} is out of bounds for axis 0 with size {TABLE}"


def test_long_rows(on_cpu):
    """Rows of 2 GiB and more, of which a view shows a few bytes."""
    x = reserved(3 * TABLE)
    rows = as_strided(x, (3, 4), (TABLE, TABLE // 4))
    rows[...] = np.arange(1, 13).reshape(3, 4)
    assert on_cpu.gather(rows, [2, 0]).tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert on_cpu.gather(rows, [3, -2], axis=1).tolist() == [[4, 3], [8, 7], [12, 11]]
    assert on_cpu.gather(rows[::-1, ::-1], 0).tolist() == [12, 11, 10, 9]
    assert on_cpu.gather(rows, [11, 4], axis=None).tolist() == [12, 5]
    assert on_cpu.take_along_axis(rows, [[2, 1, 0, 2]], 0).tolist() == [[9, 6, 3, 12]]


def test_distant_out_and_indices(on_cpu):
    memory = reserved(4 * TABLE)
    out = as_strided(memory, (4,), (TABLE,))
    indices = as_strided(reserved(3 * TABLE).view(np.int8), (2, 2), (TABLE, TABLE // 2))
    indices[...] = [[3, 1], [0, -1]]
    result = on_cpu.gather(np.array([10, 20, 30, 40], np.uint8), indices.reshape(-1), out=out)
    assert result is out and out.tolist() == [40, 20, 10, 40]
    assert on_cpu.gather(np.arange(4), indices).tolist() == [[3, 1], [0, 3]]


def test_more_elements_than_memory_could_hold(on_cpu):
    """Strides of zero make an array of any size, and only what is asked for is read."""
    x = np.broadcast_to(np.array([5, 6, 7], np.int16), (1 << 40, 3))
    assert on_cpu.gather(x, [(1 << 40) - 1, 0, -(1 << 40)]).tolist() == [[5, 6, 7]] * 3
    assert on_cpu.gather(x, [3 * (1 << 40) - 1, 1 << 41, 4], axis=None).tolist() == [7, 7, 6]
    with pytest.raises(IndexError, match=f"index {1 << 40} is out of bounds for axis 0"):
        on_cpu.gather(x, [1 << 40])


def test_large_and_empty(gpuops):
    """Sizes beyond any memory, of arrays without an element."""
    x = np.zeros((1 << 40, 0, 1 << 20), np.uint8)
    assert gpuops.gather(x, [5], axis=0).shape == (1, 0, 1 << 20)
    assert gpuops.gather(x, [], axis=2).shape == (1 << 40, 0, 0)
    nothing = np.broadcast_to(np.zeros((), np.int64), (1 << 40, 0))
    assert gpuops.gather(np.arange(3), nothing).shape == (1 << 40, 0)


def test_results_that_nothing_could_hold(on_cpu):
    x = np.broadcast_to(np.zeros(1), (4, 1 << 40))
    indices = np.broadcast_to(np.zeros((), np.int64), 1 << 40)
    with pytest.raises((MemoryError, ValueError)):
        on_cpu.gather(x, indices)
    with pytest.raises((MemoryError, ValueError)):
        on_cpu.gather(np.zeros(1), np.broadcast_to(np.zeros((), np.int8), 1 << 50))
    x = np.broadcast_to(np.zeros((), "V1000"), (1 << 20, 4, 1 << 20))
    with pytest.raises((MemoryError, ValueError)):
        on_cpu.gather(x, np.broadcast_to(np.zeros((), np.int8), 1 << 20), axis=1)


def test_many_indices(on_cpu):
    """A result of more than 2**31 elements, which does take its memory."""
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 4 << 30:
        pytest.skip("needs 4 GiB of free memory")
    count = (1 << 31) // 4096 + 3
    x = np.broadcast_to(np.arange(4, dtype=np.uint8)[:, None], (4, 4096))
    indices = np.zeros(count, np.int8)
    indices[-1], indices[-2] = 3, 2
    out = reserved(count * 4096).reshape(count, 4096)
    on_cpu.gather(x, indices, out=out)
    assert out[-3:, [0, -1]].tolist() == [[0, 0], [2, 2], [3, 3]]
    assert not out[:: count // 7, 5].any()


def beside(at):
    """Where a truncated index, or one that is off by some, would lead instead."""
    places = np.concatenate([at - 3, at + 3, at & 0x7FFFFFFF, at & 0xFFFFFFFF])
    return np.setdiff1d(places[(places >= 0) & (places < TABLE)], at)


@pytest.mark.parametrize("dtype", ["u1", "i4"])
def test_writes_to_a_long_table(on_cpu, dtype):
    x = reserved(TABLE, dtype)
    at = around_the_borders(TABLE)
    values = np.arange(1, len(at) + 1).astype(dtype)
    on_cpu.scatter(x, at, values)
    same(x[at], values)
    on_cpu.scatter_add(x, at - TABLE, values)
    same(x[at], 2 * values)
    on_cpu.scatter_add(x, at, values, deterministic=True)
    same(x[at], 3 * values)
    assert not x[beside(at)].any()
    for function in (on_cpu.scatter, on_cpu.scatter_add):
        for index in (TABLE, -TABLE - 1, 1 << 33):
            with pytest.raises(IndexError, match=f"^index {index} is out of bounds"):
                function(x, [0, index], 1)
    same(x[at], 3 * values)


# On a GPU, with memory for real.


@pytest.fixture
def on_gpu(cuda_device):
    with cuda_device.gpuops.device("cuda"):
        yield cuda_device.gpuops


def test_large_table_on_the_gpu(on_gpu):
    x = reserved(TABLE)
    at = marked(x)
    expected = np.arange(1, len(at) + 1).astype(np.uint8)
    same(on_gpu.gather(x, at), expected)
    same(on_gpu.gather(x, at - TABLE), expected)
    same(on_gpu.gather(x, at + TABLE, mode="wrap"), expected)
    same(on_gpu.take_along_axis(x, at), expected)
    for index in (TABLE, -TABLE - 1):
        with pytest.raises(IndexError, match=f"^index {index} is out of bounds"):
            on_gpu.gather(x, [0, index])
    rows = x[: 1 << 32].reshape(1 << 16, 1 << 16)
    indices = np.array([0, (1 << 15) - 1, 1 << 15, (1 << 16) - 1])
    same(on_gpu.gather(rows, indices), rows[indices])
    same(on_gpu.gather(rows, indices, axis=1), rows[:, indices])


def test_large_result_on_the_gpu(on_gpu):
    """More than 2**32 bytes come back."""
    x = np.arange(256, dtype=np.uint8)[:, None] * np.ones(1 << 16, np.uint8)
    indices = np.arange((1 << 16) + 1) % 256
    result = on_gpu.gather(x, indices)
    assert result.shape == ((1 << 16) + 1, 1 << 16)
    assert (result[:, 0] == indices).all() and (result[:, -1] == indices).all()
    many = np.zeros((1 << 32) + 7, np.int8)
    many[-1] = many[1 << 31] = many[1 << 32] = 5
    result = on_gpu.gather(np.arange(10, dtype=np.int8), many)
    assert (result == many).all()
    many[-1] = 10
    with pytest.raises(IndexError, match="^index 10 is out of bounds for axis 0 with size 10"):
        on_gpu.gather(np.arange(10, dtype=np.int8), many, out=result)
    assert result[-1] == 5


# Arrays that are on the GPU already.


def needs_gpu_memory(gpuops, bytes_needed):
    gpuops.empty_cache()
    if gpuops.memory_info().free < bytes_needed:
        pytest.skip(f"needs {bytes_needed >> 30} GiB of free memory on the GPU")


def test_large_table_that_is_on_the_gpu(on_gpu):
    needs_gpu_memory(on_gpu, 12 << 30)
    d = on_gpu.zeros(TABLE, "u1")
    at = around_the_borders(TABLE)
    for number, place in enumerate(at):
        d[place : place + 1].fill(number + 1)
    expected = np.arange(1, len(at) + 1).astype(np.uint8)
    assert d[int(at[-1])].to_host() == expected[-1]
    same(on_gpu.gather(d, at).to_host(), expected)
    same(on_gpu.gather(d, at - TABLE).to_host(), expected)
    same(on_gpu.gather(d, at.astype(np.uint64)).to_host(), expected)
    same(on_gpu.gather(d, at + TABLE, mode="wrap").to_host(), expected)
    same(on_gpu.gather(d, [2**63 - 1, 2**62], mode="clip").to_host(), expected[[-1, -1]])
    same(on_gpu.take_along_axis(d, at).to_host(), expected)
    # Strides, forward and backward, across all of it.
    same(on_gpu.gather(d[::-1], TABLE - 1 - at).to_host(), expected)
    odd = at[at % 2 == 1]
    same(on_gpu.gather(d[1::2], odd // 2).to_host(), expected[at % 2 == 1])
    for index in (TABLE, -TABLE - 1, 1 << 33):
        result = on_gpu.gather(d, [0, index])
        with pytest.raises(IndexError, match=f"^index {index} is out of bounds .* size {TABLE} "):
            result.to_host()
        assert result.to_host().tolist() == [1, 0]
    rows = d[: 1 << 32].reshape(1 << 16, 1 << 16)
    lines = np.array([0, (1 << 15) - 1, 1 << 15, (1 << 16) - 1])
    inside = at[at < 1 << 32]
    marks = np.zeros((4, 1 << 16), np.uint8)
    for number, place in enumerate(inside):
        marks[lines == place >> 16, place & 0xFFFF] = number + 1
    same(on_gpu.gather(rows, lines).to_host(), marks)
    same(on_gpu.gather(rows, [0, 1, -1], axis=1)[: 1 << 15].to_host()[0], marks[0, [0, 1, -1]])
    # A view that begins beyond 4 GiB, written to.
    on_gpu.gather(on_gpu.to_device(np.array([77], np.uint8)), [0, 0], out=d[-2:])
    assert on_gpu.gather(d, at[-3:]).to_host()[-2:].tolist() == [77, 77]


@pytest.mark.parametrize("index_dtype", ["i4", "i8"])
@pytest.mark.parametrize("rows", [(8 << 20) - 3, (8 << 20) + 77])
def test_elements_of_a_large_table_that_is_on_the_gpu(on_gpu, rows, index_dtype):
    """Of many and of few elements, which are loaded in ways of their own."""
    x = np.arange(64 << 20, dtype="f4") * 0.5
    table = on_gpu.to_device(x)
    indices = np.random.default_rng(5).integers(-len(x), len(x), rows).astype(index_dtype)
    given = on_gpu.to_device(indices)
    same(on_gpu.gather(table, given).to_host(), x[indices])
    out = on_gpu.empty(rows + 1, "f4")
    out.fill(7)
    on_gpu.gather(table[1:], given, out=out[1:], mode="wrap")
    same(out.to_host(), np.concatenate([[np.float32(7)], np.take(x[1:], indices, mode="wrap")]))
    indices[-1] = len(x)
    filled = on_gpu.gather(table, on_gpu.to_device(indices), mode="fill").to_host()
    same(filled, np.where(indices == len(x), np.float32(0), x[indices % len(x)]))
    with pytest.raises(IndexError, match=f"index {len(x)} is out of bounds"):
        on_gpu.gather(table, on_gpu.to_device(indices)).to_host()


def test_large_result_that_stays_on_the_gpu(on_gpu):
    """More than 2**31 single elements, and more than 4 GiB in rows."""
    needs_gpu_memory(on_gpu, 16 << 30)
    count = (1 << 31) + 7
    x = on_gpu.to_device(np.arange(10, dtype=np.uint8))
    indices = on_gpu.zeros(count, "i1")
    places = [1, (1 << 31) - 1, 1 << 31, count - 1]
    for number, place in enumerate(places):
        indices[place : place + 1].fill(number + 3)
    for result in (
        on_gpu.gather(x, indices),
        on_gpu.gather(x, indices, out=on_gpu.empty(count, "u1")),
        on_gpu.take_along_axis(x, indices, 0),
    ):
        assert result.shape == (count,)
        assert [int(result[place].to_host()) for place in places] == [3, 4, 5, 6]
    host = result.to_host()
    assert np.count_nonzero(host) == len(places) and host[places].tolist() == [3, 4, 5, 6]
    del host, result
    indices[-1:].fill(10)
    result = on_gpu.gather(x, indices)
    with pytest.raises(IndexError, match="^index 10 is out of bounds for axis 0 with size 10"):
        on_gpu.synchronize()
    assert result[-2:].to_host().tolist() == [0, 0]
    del indices, result
    rows = on_gpu.to_device(np.arange(256, dtype=np.uint8)[:, None] * np.ones(1 << 16, np.uint8))
    order = np.arange((1 << 16) + 1) % 256
    result = on_gpu.gather(rows, order)
    assert result.shape == ((1 << 16) + 1, 1 << 16)
    for column in (0, -1):
        picked = on_gpu.gather(result, [column], axis=1).to_host()[:, 0]
        assert (picked == order).all()
    backward = result[::-1].copy()
    assert (on_gpu.gather(backward, [0], axis=1).to_host()[::-1, 0] == order).all()


@pytest.mark.parametrize("dtype", ["u1", "i4"])
def test_writes_to_a_large_table_that_is_on_the_gpu(on_gpu, dtype):
    needs_gpu_memory(on_gpu, (TABLE * np.dtype(dtype).itemsize) + (4 << 30))
    d = on_gpu.zeros(TABLE, dtype)
    at = around_the_borders(TABLE)
    values = np.arange(1, len(at) + 1).astype(dtype)
    on_gpu.scatter(d, at, values)
    same(on_gpu.gather(d, at).to_host(), values)
    on_gpu.scatter_add(d, at - TABLE, values)
    same(on_gpu.gather(d, at).to_host(), 2 * values)
    assert not on_gpu.gather(d, beside(at)).to_host().any()
    for function in (on_gpu.scatter, on_gpu.scatter_add):
        function(d, [TABLE], 1)
        with pytest.raises(IndexError, match=f"^index {TABLE} is out of bounds"):
            on_gpu.synchronize()
    same(on_gpu.gather(d, at).to_host(), 2 * values)


MANY = (1 << 31) + 7
PLACES = [1, (1 << 31) - 1, 1 << 31, MANY - 1]


def many(gpuops, dtype):
    """Zeros, but for 3, 4, 5 and 6 at the places where narrow numbers end."""
    d = gpuops.zeros(MANY, dtype)
    for number, place in enumerate(PLACES):
        d[place : place + 1].fill(number + 3)
    return d


def has_at_the_places(d, expected, elsewhere=0):
    host = d.to_host()
    np.testing.assert_allclose(host[PLACES], expected, rtol=2e-3)
    return np.count_nonzero(host != host.dtype.type(elsewhere)) == len(PLACES)


def test_many_writes_on_the_gpu(on_gpu):
    needs_gpu_memory(on_gpu, 24 << 30)
    indices, x = many(on_gpu, "i1"), on_gpu.zeros(10, "i8")
    on_gpu.scatter_add(x, indices, 1)
    assert x.to_host().tolist() == [MANY - 4, 0, 0, 1, 1, 1, 1, 0, 0, 0]
    on_gpu.scatter(x, indices, 9)
    assert x.to_host().tolist() == [9, 0, 0, 9, 9, 9, 9, 0, 0, 0]


def test_many_elements_on_the_gpu(on_gpu):
    needs_gpu_memory(on_gpu, 24 << 30)
    x = many(on_gpu, "u1")
    assert has_at_the_places(on_gpu.add(x, x), [6, 8, 10, 12])
    assert has_at_the_places(on_gpu.multiply(x, x), [9, 16, 25, 36])
    backward = x[::-1].copy()
    assert has_at_the_places(on_gpu.add(backward[::-1], 0), [3, 4, 5, 6])
    del backward
    x = many(on_gpu, "f2")
    assert has_at_the_places(on_gpu.saxpy(2, x, x), [9, 12, 15, 18])
    expected = 1 / (1 + np.exp(-np.arange(3.0, 7)))
    assert has_at_the_places(on_gpu.sigmoid(x), expected, elsewhere=0.5)
    half = on_gpu.empty(MANY, "f2")
    half.fill(0.5)
    assert has_at_the_places(on_gpu.sigmoid_backward(x, half), np.arange(3, 7) / 4)


def test_a_large_product_on_the_gpu(on_gpu):
    """Of more than 2**31 elements."""
    needs_gpu_memory(on_gpu, 16 << 30)
    a, b = np.zeros(((1 << 16) + 1, 8), np.float16), np.zeros((8, 1 << 15), np.float16)
    a[:, 3] = np.arange(len(a)) % 7
    b[3] = np.arange(1 << 15) % 5
    product = on_gpu.matmul(on_gpu.to_device(a), on_gpu.to_device(b))
    assert product.shape == ((1 << 16) + 1, 1 << 15)
    columns = np.array([0, 1, 2, (1 << 15) - 1])
    picked = on_gpu.gather(product, columns, axis=1).to_host()
    assert (picked == a[:, 3:4] * b[3, columns]).all()


def test_a_large_image_on_the_gpu(on_gpu):
    """Of more than 2**31 pixels."""
    needs_gpu_memory(on_gpu, 16 << 30)
    image = on_gpu.zeros(((1 << 16) + 1, 1 << 15), "u1")
    pixels = image.reshape(-1)
    places = [1, (1 << 31) - 1, 1 << 31, image.size - 1]  # the third begins a row
    for number, place in enumerate(places):
        pixels[place : place + 1].fill(number + 3)
    weights = np.array([[0, 0, 0], [0, 2, 1], [0, 0, 0]])
    host = on_gpu.correlate(image, weights, mode="constant").reshape(-1).to_host()
    assert host[places].tolist() == [6, 8, 10, 12]
    assert host[[0, (1 << 31) - 2, image.size - 2]].tolist() == [3, 4, 6]
    assert np.count_nonzero(host) == 7
