"""Operands of different dtypes: large ones are cast where the work is done, as NumPy casts them."""

import itertools
import warnings

import numpy as np
import pytest
from helpers import constant, filled_array

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
LEAST = 1 << 14  # elements that are not left to NumPy
PART_BYTES = constant("pipeline.cu", "PART_BYTES")  # of a result that is computed in parts


def numbers(shape, dtype, seed=0):
    """Of every kind, so that a wrong width shows, but no NaN: NumPy's are of any bits."""
    array = filled_array(shape, dtype, seed)
    return np.nan_to_num(array) if array.dtype.kind in "fc" else array


def normal_numbers(shape, dtype, seed=0):
    """The same without subnormal numbers: a GPU's atomic additions of float32 take them for 0."""
    array = numbers(shape, dtype, seed)
    if array.dtype.kind in "fc":
        parts = array.view(array.real.dtype)
        parts[np.abs(parts) < np.finfo(parts.dtype).tiny] = 0
    return array


def equal(result, expected):
    assert result.dtype == expected.dtype and result.shape == expected.shape
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("first", DTYPES)
def test_every_pair_of_dtypes(gpuops, first):
    x = numbers(LEAST + 1, first)
    for second in DTYPES:
        y = numbers(LEAST + 1, second, 1)
        with np.errstate(all="ignore"):
            equal(gpuops.add(x, y), np.add(x, y))


@pytest.mark.parametrize("size", [LEAST - 1, LEAST, LEAST + 1, 3 * LEAST + 77])
@pytest.mark.parametrize("layout", ["packed", "backward", "strided", "misaligned", "repeated"])
def test_layouts(gpuops, size, layout):
    for narrow, wide in [("i4", "f8"), ("u1", "i2"), ("f2", "f4"), ("f4", "c16"), ("?", "u8")]:
        x, y = numbers(2 * size, narrow), numbers(size, wide, 1)
        if layout == "misaligned":
            raw = np.empty(size * x.itemsize + 1, np.uint8)
            moved = raw[1:].view(x.dtype)
            moved[...] = x[:size]
            x = moved
        else:
            x = {
                "packed": x[:size],
                "backward": x[size - 1 :: -1],
                "strided": x[::2],
                "repeated": np.broadcast_to(x[:1], size),
            }[layout]
        with np.errstate(all="ignore"):
            equal(gpuops.add(x, y), np.add(x, y))
            equal(gpuops.multiply(y.real, x.real), np.multiply(y.real, x.real))


def test_broadcasting(gpuops):
    column, row = numbers((260, 1), "i2"), numbers(LEAST, "i4", 1)
    table = numbers((260, LEAST // 260 + 1), "f4", 2)
    equal(gpuops.add(column, row[:64]), column + row[:64])
    equal(gpuops.add(table, row[: table.shape[1]]), table + row[: table.shape[1]])
    equal(gpuops.add(table.T, column[:, 0]), table.T + column[:, 0])
    equal(gpuops.add(row, 2.5), row + 2.5)
    equal(gpuops.add(row, np.float32(2.5)), row + np.float32(2.5))
    wide = row.astype("f8")
    equal(gpuops.saxpy(np.float32(3), row, wide), 3 * wide + wide)


def test_sigmoid_of_integers(gpuops):
    x = np.arange(-LEAST, LEAST, dtype=np.int32)
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    result = gpuops.sigmoid(x)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected, rtol=4e-16, atol=1e-300)


@pytest.mark.parametrize("dtype", ["i8", "u4", "f4"])
def test_out_on_the_memory_of_an_operand(gpuops, dtype):
    """It is written as if all had been read before."""
    memory = np.zeros(2 * LEAST + 8)
    for shift in (0, 1, 8):
        memory[...] = 0
        out = memory[shift : shift + LEAST]
        x = memory[:LEAST].view(dtype)[:LEAST]
        x[...] = np.arange(LEAST)
        expected = x.astype("f8") + 0.5
        assert gpuops.add(x, np.full(LEAST, 0.5), out=out) is out
        equal(out, expected)


def test_out_of_another_dtype(gpuops):
    x, y = numbers(LEAST, "i4"), numbers(LEAST, "i8", 1)
    out = np.zeros(LEAST, np.float32)
    gpuops.add(x, y, out=out)
    equal(out, (x + y).astype(np.float32))


def test_values_that_are_scattered(gpuops):
    indices = np.random.default_rng(0).permutation(LEAST)
    for narrow, wide in [("i4", "f8"), ("u1", "i2"), ("f2", "f4"), ("?", "i4"), ("f4", "c16")]:
        values = numbers(2 * LEAST, narrow)[::2]
        x, expected = normal_numbers(LEAST, wide, 1), normal_numbers(LEAST, wide, 1)
        gpuops.scatter_add(x, indices, values)
        np.add.at(expected, indices, values)
        equal(x, expected)
        gpuops.scatter(x, indices, values)
        expected[indices] = values
        equal(x, expected)


def test_values_on_the_memory_that_changes(gpuops):
    memory = numbers(LEAST, "i8")
    values, indices = memory.view("i4")[:LEAST], np.arange(LEAST)[::-1]
    expected = memory.copy()
    np.add.at(expected, indices, values.copy())
    gpuops.scatter_add(memory, indices, values)
    equal(memory, expected)


def test_a_bad_index_beside_values_of_another_dtype(gpuops):
    x, indices = numbers(LEAST, "f8"), np.arange(LEAST)
    indices[-1] = LEAST
    before = x.copy()
    with pytest.raises(IndexError, match=f"index {LEAST} is out of bounds"):
        gpuops.scatter_add(x, indices, numbers(LEAST, "f4"))
    equal(x, before)


@pytest.mark.parametrize(
    ("first", "second"), [("f4", "f8"), ("i1", "f4"), ("?", "f8"), ("i4", "i8"), ("c8", "f8")]
)
def test_products_of_matrices(gpuops, first, second):
    generator = np.random.default_rng(0)
    a = generator.integers(0, 2, (129, 128)).astype(first)
    b = generator.integers(0, 2, (128, 130)).astype(second)
    equal(gpuops.matmul(a, b), np.matmul(a, b))
    equal(gpuops.matmul(b.T, a.T), np.matmul(b.T, a.T))


def test_bfloat16(gpuops):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    short = (np.arange(LEAST) % 250).astype(bfloat16)
    for dtype, result in [
        ("u1", bfloat16),
        ("f2", "f4"),
        ("i4", "f8"),
        ("c8", "c8"),
        ("?", bfloat16),
    ]:
        other = (np.arange(LEAST) % 3).astype(dtype)
        wide = "c16" if dtype == "c8" else "f8"
        equal(gpuops.add(short, other), (short.astype(wide) + other).astype(result))
    square = short.reshape(128, 128) % 2
    ones = np.ones((128, 128), np.int32)
    equal(gpuops.matmul(square, ones), np.matmul(square.astype("f8"), ones))


def test_narrowing_warns_as_numpy_does(gpuops):
    """What may warn is NumPy's to cast; what widens says nothing."""
    x, indices = np.zeros(LEAST, np.float32), np.arange(LEAST)
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
        gpuops.scatter_add(x, indices, np.full(LEAST, 1e300))
    assert np.isinf(x).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        huge = np.full(LEAST, np.iinfo(np.int64).max)
        equal(gpuops.add(huge, np.ones(LEAST, np.float32)), huge + np.ones(LEAST, np.float32))
        infinite = np.full(LEAST, np.inf, np.float32)
        equal(gpuops.add(infinite, np.ones(LEAST)), infinite + np.ones(LEAST))


def test_host_memory_is_sent_up_before_a_kernel_reads_it(fake_device):
    """Both operands, each once, in the dtypes that they have; and the result comes down."""
    x, y = np.arange(LEAST, dtype=np.int32), np.ones(LEAST)
    fake = fake_device.fake
    for operands in ([x, y], [x[::-1], y], [y, x]):
        fake.reset()
        result = fake_device.gpuops.add(*operands, device="cuda:0")
        assert fake.calls("cudaMemcpyAsync") == 3
        equal(result, operands[0] + operands[1])


PIPED = 2 * PART_BYTES // 8 + 12345  # elements of float64


@pytest.mark.parametrize("dtypes", [("i4", "f4"), ("i1", "f8"), ("f8", "f4")])
def test_in_parts(gpuops, dtypes):
    x, y = (np.arange(PIPED) % 101).astype(dtypes[0]), (np.arange(PIPED) % 103).astype(dtypes[1])
    equal(gpuops.add(x, y), np.add(x, y, dtype="f8"))


def test_in_parts_with_broadcasting(gpuops):
    """A part of what repeats is sent up once, and is there for all parts that need it."""
    rows = PIPED // LEAST + 1
    column = np.arange(rows, dtype=np.int16)[:, None]
    row = np.arange(LEAST, dtype=np.float32)
    table = (np.arange(rows * LEAST) % 97).astype(np.int32).reshape(rows, LEAST)
    wide = row.astype("f8")
    equal(gpuops.add(table, row), table + wide)
    equal(gpuops.saxpy(wide, table, row), wide * table + row)
    equal(gpuops.multiply(np.broadcast_to(column, table.shape), wide), column * wide)
    equal(gpuops.add(table[::-1, ::-1], wide), table[::-1, ::-1] + wide)


def test_in_parts_on_the_memory_of_an_operand(gpuops):
    x = np.arange(PIPED)
    expected = x + 0.5
    out = x.view("f8")
    gpuops.add(x, np.full(PIPED, 0.5, "f4"), out=out)
    equal(out, expected)


def test_beside_arrays_on_the_gpu(gpu):
    gpuops = gpu.gpuops
    for narrow, wide in itertools.product(["i4", "f2"], ["f8", "c8"]):
        x, y = numbers(2 * LEAST, narrow)[::2], normal_numbers(LEAST, wide, 1)
        equal(gpuops.add(gpuops.to_device(y), x).to_host(), np.add(y, x))
        target = gpuops.to_device(y)
        if np.promote_types(narrow, wide) != wide:
            continue
        gpuops.scatter_add(target, np.arange(LEAST), x)
        equal(target.to_host(), y + x)
