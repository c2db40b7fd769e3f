"""gpuops.matmul against numpy.matmul, and cuBLASLt's part in it against one of our own."""

import ctypes
import functools
import importlib.metadata
import itertools
import re
import shutil
import subprocess
import tomllib
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import run_child

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests" / "faults"

INTEGERS = "b B h H i I q Q".split()
FLOATS = "e f d F D".split()
NUMBERS = ["?", *INTEGERS, *FLOATS]


def whole_numbers(rng, shape, dtype):
    """Numbers of which all sums of products are exact, or wrap."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.2
    if dtype.kind in "iu":
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    numbers = rng.integers(-4, 5, shape)
    return (numbers + 1j * rng.integers(-4, 5, shape) if dtype.kind == "c" else numbers).astype(
        dtype
    )


LAYOUTS = {
    "C": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "padded": lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 3)])[..., : x.shape[-1]],
    "backward": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "misaligned": lambda x: misaligned(x),
}


def misaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)
    result = memory[1:].view(x.dtype).reshape(x.shape)
    result[...] = x
    return result


def exact_product(a, b):
    """numpy.matmul of numbers whose sums are exact, which takes long to add up in float16."""
    if a.dtype != np.float16:
        return np.matmul(a, b)
    with np.errstate(invalid="ignore"):  # which a BLAS may find in lanes that it does not use
        return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(np.float16)


def assert_same(result, expected):
    assert type(result) is type(expected)
    assert result.dtype == expected.dtype and result.shape == expected.shape
    np.testing.assert_array_equal(result, expected)


def test_literals(gpuops):
    a, b = [[1, 2], [3, 4]], [[5, 6], [7, 8]]
    assert gpuops.matmul(a, b).tolist() == [[19, 22], [43, 50]]
    assert gpuops.matmul(a, [5, 6]).tolist() == [17, 39]
    assert gpuops.matmul([5, 6], a).tolist() == [23, 34]
    assert gpuops.matmul([5, 6], [7, 8]) == 83
    assert gpuops.matmul([a, b], a).tolist() == [[[7, 10], [15, 22]], [[23, 34], [31, 46]]]
    assert gpuops.matmul([[1j]], [[2 - 1j]]).tolist() == [[1 + 2j]]
    assert gpuops.matmul(np.ones((3, 0)), np.ones((0, 2))).tolist() == [[0, 0]] * 3


# The extents at which another kernel takes over or a tile has its edge, and those beside them.
SHAPES = [
    ((5,), (5,)), ((3000,), (3000,)), ((5,), (5, 7)), ((7, 5), (5,)), ((1, 1), (1, 1)),
    ((3, 4), (4, 2)), ((64, 1), (1, 70)), ((8, 32), (32, 8)), ((9, 33), (33, 9)),
    ((16, 40), (40, 200)), ((200, 40), (40, 16)), ((4, 600), (600, 300)), ((300, 600), (600, 4)),
    ((17, 33), (33, 65)), ((32, 8), (8, 32)), ((33, 100), (100, 40)), ((49, 16), (16, 128)),
    ((128, 24), (24, 128)), ((130, 37), (37, 129)), ((20, 3000), (3000, 20)),
    ((2, 3, 20, 30), (30, 25)), ((4, 1, 20, 9), (3, 9, 21)), ((3, 20, 9), (9,)), ((9,), (3, 9, 20)),
    ((2, 1, 3, 4), (1, 3, 4, 2)), ((5, 2, 20, 20), (5, 2, 20, 20)),
    ((1, 2, 1, 3, 5), (4, 1, 2, 5, 6)),
    ((600, 9), (9, 70)),
    ((0, 3), (3, 2)), ((2, 0), (0, 3)), ((0, 2, 3), (3, 2)), ((3, 0), (0,)), ((0,), (0,)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", NUMBERS)
def test_shapes(gpuops, dtype):
    rng = np.random.default_rng(1)
    for first, second in SHAPES:
        a, b = whole_numbers(rng, first, dtype), whole_numbers(rng, second, dtype)
        assert_same(gpuops.matmul(a, b), exact_product(a, b))


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_layouts(gpuops, device, first, second):
    """Of host arrays, and of arrays on the device with the same strides."""
    rng = np.random.default_rng(2)
    for dtype in "BefD":
        for shape, other in [((20, 30), (30, 25)), ((3, 70), (70, 20)), ((5, 6), (6,)),
                             ((2000,), (2000,)), ((2, 20, 9), (2, 9, 20))]:  # fmt: skip
            a = LAYOUTS[first](whole_numbers(rng, shape, dtype))
            b = LAYOUTS[second](whole_numbers(rng, other, dtype))
            expected = exact_product(np.array(a), np.array(b))
            assert_same(gpuops.matmul(a, b), expected)
            if device.spec == "cuda" and "misaligned" not in (first, second):
                result = gpuops.matmul(on_device(gpuops, a), on_device(gpuops, b))
                np.testing.assert_array_equal(result.to_host(), expected)


@pytest.mark.parametrize("layouts", ["C C", "transposed C", "C transposed", "padded padded"])
@pytest.mark.parametrize("dtype", "BefdFD")
def test_large_tiles(gpuops, dtype, layouts):
    """As many as a GPU has room for, in more than one band of them, with edges on both sides."""
    rng = np.random.default_rng(10)
    first, second = layouts.split()
    # The second is for the largest tiles, of which the fake GPU, as an H200, has room for 132.
    for rows, columns in [(1100, 1900)] + [(2700, 1500)] * (dtype in "ef"):
        a, b = whole_numbers(rng, (rows, 9), dtype), whole_numbers(rng, (9, columns), dtype)
        result = gpuops.matmul(LAYOUTS[first](a), LAYOUTS[second](b))
        assert_same(result, exact_product(a, b))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_threads(gpu, seed):
    """Threads that did not wait for each other where they have to would read old factors."""
    if gpu.fake is None:
        pytest.skip("only the fake says in which order threads run")
    gpu.fake.set_scheduler("shuffled", seed)
    rng = np.random.default_rng(seed)
    for dtype in "Bef":
        for first, second in [((3000,), (3000,)), ((3, 600), (600, 300)), ((300, 600), (600, 4)),
                              ((70, 90), (90, 65)), ((40, 2000), (2000, 40))]:  # fmt: skip
            a, b = whole_numbers(rng, first, dtype), whole_numbers(rng, second, dtype)
            result = gpu.gpuops.matmul(a, b)
            assert_same(result, np.matmul(a, b))


class DeviceView:
    """An array on a device with the strides of one on the host."""

    def __init__(self, memory, offset, like):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": like.shape,
            "strides": like.strides,
            "typestr": like.dtype.str,
            "data": (memory.ptr + offset, False),
            "version": 3,
            "stream": None,
        }


def on_device(gpuops, array):
    low, high = np.lib.array_utils.byte_bounds(array)
    span = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    skew = low % 16  # the alignment, too
    memory = gpuops.to_device(np.concatenate([np.zeros(skew, np.uint8), span]))
    return DeviceView(memory, array.ctypes.data - low + skew, array)


@pytest.mark.parametrize("layout", ["C", "transposed", "padded"])
def test_views_are_read_in_place(gpu, layout):
    """One launch, that of the product, where the strides are those of C or Fortran order."""
    if gpu.fake is None:
        pytest.skip("only the fake counts launches")
    a, b = np.ones((40, 20), "f"), np.ones((20, 50), "f")
    for first, second, launches in [(layout, "C", 1), ("C", layout, 1), ("backward", layout, 2)]:
        x, y = on_device(gpu.gpuops, LAYOUTS[first](a)), on_device(gpu.gpuops, LAYOUTS[second](b))
        before = gpu.fake.calls("cudaLaunchKernel")
        result = gpu.gpuops.matmul(x, y)
        assert gpu.fake.calls("cudaLaunchKernel") - before == launches
        assert (result.to_host() == 20).all()


def test_broadcast_matrices_are_not_copied(gpu):
    """A matrix that a view repeats is packed once, however often it is repeated."""
    gpuops, count = gpu.gpuops, 200
    one = np.arange(30.0).reshape(5, 6)[:, ::-1]
    a = np.lib.stride_tricks.as_strided(one, (count, 5, 6), (0, *one.strides))
    memory = gpuops.to_device(np.ascontiguousarray(one[:, ::-1]))
    view = DeviceView(memory, 40, a)
    b = gpuops.to_device(np.ones((count, 6, 3)))
    gpuops.synchronize()
    before = gpuops.memory_info().peak
    result = gpuops.matmul(view, b)
    assert gpuops.memory_info().peak - before < 2 * result.nbytes
    np.testing.assert_array_equal(result.to_host(), a @ np.ones((count, 6, 3)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_error_is_that_of_the_dtype(gpuops, dtype):
    """At most the error of adding up in the dtype that sums have, one after the other."""
    rng = np.random.default_rng(3)
    for rows, depth, columns in [(60, 300, 50), (3, 5000, 20), (40, 700, 1), (1, 4000, 1)]:
        a, b = rng.standard_normal((rows, depth)), rng.standard_normal((depth, columns))
        if dtype in "FD":
            a, b = a + 1j * rng.standard_normal(a.shape), b - 1j * rng.standard_normal(b.shape)
        a, b = a.astype(dtype), b.astype(dtype)
        exact = a.astype("D" if dtype in "FD" else "d") @ b.astype("D" if dtype in "FD" else "d")
        eps = np.finfo("f" if dtype in "eF" else dtype).eps
        bound = 4 * depth * eps * (np.abs(a.astype("D")) @ np.abs(b.astype("D"))).real
        if dtype == "e":
            bound += np.finfo("e").eps * np.abs(exact)
        result = gpuops.matmul(a, b)
        assert result.dtype == dtype
        assert (np.abs(result - exact) <= bound).all()


@pytest.mark.parametrize("shape", [(1, 1), (20, 30), (3, 40), (70, 3), (130, 140)])
def test_float16_is_added_up_in_float32(gpuops, shape):
    """In float16, sums of ones end at 2048, and 2049 is no number."""
    rows, columns = shape
    a, b = np.ones((rows, 4096), "e"), np.ones((4096, columns), "e")
    assert (gpuops.matmul(a, b) == 4096).all()
    a[:, 0] = 2049  # rounds to 2048 in itself
    a[:, 1:] = 0
    a[:, 1:4] = 1
    assert (gpuops.matmul(a, b) == 2052).all()  # 2051, rounded to even once


def test_float16_overflows_to_infinity(gpuops):
    a = np.full((20, 20), 300, "e")
    with np.errstate(over="ignore"):
        assert np.isposinf(gpuops.matmul(a, a)).all()
        assert np.isneginf(gpuops.matmul(a, -a)).all()


@pytest.mark.parametrize("shape", [(1, 1), (20, 30), (3, 40), (130, 140)])
def test_bfloat16(gpuops, shape):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(4)
    a = rng.standard_normal((shape[0], 500)).astype(bfloat16)
    b = rng.standard_normal((500, shape[1])).astype(bfloat16)
    result = gpuops.matmul(a, b)
    assert result.dtype == bfloat16
    exact = a.astype("d") @ b.astype("d")
    bound = 2.0**-8 * np.abs(exact) + 2000 * 2.0**-24 * (
        np.abs(a.astype("d")) @ np.abs(b.astype("d"))
    )
    assert (np.abs(result.astype("d") - exact) <= bound).all()
    ones = np.ones((shape[0], 4096), bfloat16), np.ones((4096, shape[1]), bfloat16)
    assert (gpuops.matmul(*ones) == 4096).all()
    assert gpuops.matmul(a, b.astype("f")).dtype == np.float32


@pytest.mark.parametrize("dtype", ["b", "B", "h", "H"])
def test_small_integers_wrap(gpuops, dtype):
    a, b = np.full((20, 1000), 100, dtype), np.full((1000, 20), 3, dtype)
    assert (gpuops.matmul(a, b) == np.int64(300000).astype(dtype)).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (70, 3), (20, 30), (130, 140)])
def test_bool_is_or_of_and(gpuops, shape):
    """Whatever the number of true ones, and whatever byte stands for true."""
    rows, columns = shape
    a = np.zeros((rows, 512), "B")
    a[:, ::2] = 2
    a[0] = 0
    result = gpuops.matmul(a.view("?"), np.ones((512, columns), "?"))
    expected = np.ones(shape, "?")
    expected[0] = False
    assert_same(result, expected)
    assert (result.view("B") <= 1).all()


@pytest.mark.parametrize("first", NUMBERS)
def test_every_pair_of_dtypes(gpuops, device, first):
    rng = np.random.default_rng(5)
    for second in NUMBERS:
        # Sums of whole numbers are exact, in whatever order a library takes them.
        a = rng.integers(0, 5, (5, 7)).astype(first)
        b = rng.integers(0, 5, (7, 6)).astype(second)
        expected = np.matmul(a, b)
        assert_same(gpuops.matmul(a, b), expected)
        if device.spec == "cuda":
            x, y = gpuops.to_device(a), gpuops.to_device(b)
            assert_same(gpuops.matmul(x, y).to_host(), expected)


def test_infinities_and_nan(gpuops):
    for size in (3, 20, 40):
        a, b = np.eye(size, dtype="f"), np.full((size, size), 2, "f")
        b[1, 1], b[2, 2] = np.inf, np.nan
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(gpuops.matmul(a, b), a @ b)


@pytest.mark.parametrize("dtype", "fdFD")
def test_infinities_and_nan_in_sums_of_one_term(gpuops, device, dtype):
    """A BLAS that is told to scale by 0 or 1 looks at nothing else."""
    row = np.array([[np.nan, np.inf, 2, -np.inf]], dtype)
    for factor in (0, 1, 3):
        one, column = np.full((1, 1), factor, dtype), np.full((2, 1), factor, dtype)
        pairs = [(one, row), (row.T, one), (one[0], row), (row.T, one[0]), (column, row)]
        for a, b in pairs:
            with np.errstate(invalid="ignore"):
                expected = a @ b
                result = gpuops.matmul(a, b)
            if dtype in "fd" or device.name != "cuda":
                np.testing.assert_array_equal(result, expected)
            else:  # of which parts NVIDIA's library makes a NaN is its own matter
                np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))


MISTAKES = [
    ((), (3,)), ((3,), ()), ((), ()), ((3,), (4,)), ((2, 3), (4,)), ((3,), (4, 5)),
    ((2, 3), (4, 5)), ((2, 3, 4), (2, 5, 5)), ((4, 2, 3), (5, 4, 3)), ((2, 3, 4), (3, 4, 5)),
    ((2, 3, 4), (3, 7, 4, 5)), ((1, 2, 3, 4), (3, 4, 5)), ((4, 2, 3, 4), (3, 4, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), MISTAKES)
def test_mistakes_in_shapes_have_the_text_of_numpy(gpuops, first, second):
    a, b = np.ones(first), np.ones(second)
    with pytest.raises(ValueError) as expected:
        np.matmul(a, b)
    with pytest.raises(ValueError) as caught:
        gpuops.matmul(a, b)
    assert " ".join(str(caught.value).split()) == " ".join(str(expected.value).split())


def test_python_scalars_are_refused(gpuops):
    with pytest.raises(ValueError, match="operand 1 does not have enough dimensions"):
        gpuops.matmul([1.0, 2.0], 2)


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[s]", "S3", "U2", "V4", "longdouble"])
def test_dtypes_without_a_product(gpuops, dtype):
    a = np.zeros((2, 2), dtype)
    with pytest.raises(TypeError, match="did not contain a loop"):
        gpuops.matmul(a, a)
    with pytest.raises(TypeError, match="did not contain a loop"):
        gpuops.matmul(np.ones((2, 2)), a)


def test_out(gpuops):
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 9, (20, 30)).astype("d"), rng.integers(0, 9, (30, 25)).astype("d")
    memory = np.full((40, 60), -1.0)
    for out in (np.empty((20, 25)), np.empty((25, 20)).T, memory[::2, 5:55:2], memory[::-2, :25]):
        memory[:] = -1
        assert gpuops.matmul(a, b, out=out) is out
        np.testing.assert_array_equal(out, a @ b)
    assert (memory[::2] == -1).all() and (memory[1::2, 25:] == -1).all()
    scalar = np.zeros(())
    assert gpuops.matmul(a[0], b[:, 0], out=scalar) is scalar and scalar == a[0] @ b[:, 0]


@pytest.mark.parametrize("dtype", ["e", "f", "i"])
def test_out_may_be_an_operand(gpuops, dtype):
    a = np.arange(400).reshape(20, 20).astype(dtype) % 5
    b = np.arange(400).reshape(20, 20).astype(dtype) % 7
    expected = a @ b
    x = a.copy()
    gpuops.matmul(x, b, out=x)
    np.testing.assert_array_equal(x, expected)
    y = b.copy()
    gpuops.matmul(a, y.T, out=y)
    np.testing.assert_array_equal(y, a @ b.T)


def test_a_wrong_out_is_left_alone(gpuops):
    a = np.ones((3, 4))
    for out in (np.zeros((3, 4)), np.zeros(3), np.zeros((1, 3, 3)), np.zeros((3, 1))):
        with pytest.raises(ValueError, match="out"):
            gpuops.matmul(a, a.T, out=out)
        assert not out.any()
    out = np.zeros((3, 3))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gpuops.matmul(a, a.T, out=out)
    with pytest.raises(ValueError, match="mismatch"):
        gpuops.matmul(a, a, out=np.zeros((3, 4)))
    out = np.zeros((3, 3), "i")
    with pytest.raises(TypeError):
        gpuops.matmul(a, a.T, out=out)
    assert not out.any()


def test_precision(gpuops):
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((40, 50)).astype("f"), rng.standard_normal((50, 30)).astype("f")
    result = gpuops.matmul(a, b, precision="tf32")
    assert (np.abs(result - a @ b) <= 2.0**-9 * (np.abs(a) @ np.abs(b))).all()
    whole = np.arange(6.0).reshape(2, 3)
    assert_same(gpuops.matmul(whole, whole.T, precision="tf32"), whole @ whole.T)
    for wrong in ("half", "TF32", "", 1):
        with pytest.raises((ValueError, TypeError), match="precision"):
            gpuops.matmul(a, b, precision=wrong)


def test_subclasses_come_back_as_arrays(gpuops):
    a = np.arange(4.0).reshape(2, 2).view(np.matrix)
    result = gpuops.matmul(a, [1.0, 2.0])
    assert type(result) is np.ndarray and result.tolist() == [2.0, 8.0]


def test_kinds(gpu):
    gpuops = gpu.gpuops
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    x, y = gpuops.to_device(a), gpuops.to_device(b)
    for first, second in [(x, y), (x, b), (a, y), (x, b.tolist())]:
        result = gpuops.matmul(first, second)
        assert type(result) is gpuops.DeviceArray
        np.testing.assert_array_equal(result.to_host(), a @ b)
    out = gpuops.empty((2, 4))
    assert gpuops.matmul(x, y, out=out) is out
    np.testing.assert_array_equal(out.to_host(), a @ b)
    assert gpuops.matmul(gpuops.to_device([1.0, 2.0]), [3.0, 4.0]).shape == ()


def test_streams_order_products(gpu):
    gpuops = gpu.gpuops
    if gpu.fake:
        gpu.fake.set_scheduler("shuffled", 5)
    a = np.arange(900.0).reshape(30, 30) % 7
    expected = a
    with gpuops.Stream():
        x = gpuops.to_device(a)
        result = x
        for _ in range(3):
            result = gpuops.matmul(result, x)
            expected = expected @ a
    np.testing.assert_array_equal(result.to_host(), expected)


@pytest.mark.parametrize("shape", [(1, 20000, 1), (3, 9000, 50), (50, 9000, 3), (40, 6000, 40)])
def test_split_sums_are_the_same_each_time(gpu, shape):
    """Where there are few elements and many products for each, blocks share them."""
    rows, depth, columns = shape
    rng = np.random.default_rng(8)
    x = gpu.gpuops.to_device(rng.standard_normal((rows, depth)).astype("f"))
    y = gpu.gpuops.to_device(rng.standard_normal((depth, columns)).astype("f"))
    before = gpu.fake and gpu.fake.calls("cudaLaunchKernel")
    first = gpu.gpuops.matmul(x, y).to_host()
    if gpu.fake:
        assert gpu.fake.calls("cudaLaunchKernel") - before == 2  # the parts, and their sum
        gpu.fake.set_scheduler("shuffled", 3)
    for _ in range(3):
        assert (gpu.gpuops.matmul(x, y).to_host() == first).all()


# What a child process says of products: those of the fast kernels, and of cuBLASLt, against those
# of the simple one, bit for bit where all sums are exact.
PRODUCTS = """
import ctypes, json, os
import numpy as np
import gpuops
from test_matmul import SHAPES, whole_numbers

rng = np.random.default_rng(9)
for dtype in {dtypes!r}:
    for first, second in SHAPES[:{count}]:
        a, b = whole_numbers(rng, first, dtype), whole_numbers(rng, second, dtype)
        result = gpuops.matmul(a, b, device="cuda")
        expected = np.matmul(a, b)
        assert result.dtype == expected.dtype and np.array_equal(result, expected), (first, second)
"""


@pytest.mark.parametrize("wanted", ["0", "simple"])
def test_our_own_kernels(gpu, wanted):
    source = PRODUCTS.format(dtypes="?Bhiqefd", count=len(SHAPES))
    assert run_child(gpu.gpuops, source, GPUOPS_BLAS=wanted, timeout=300) == ""


@pytest.fixture(scope="module")
def blas(tmp_path_factory, fake_folder):
    """The path of a cuBLASLt that runs on the fake runtime."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    cudart = fake_folder / "cudart"
    path = tmp_path_factory.mktemp("blas") / "libcublasLt.so"
    command = [compiler, "-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra"]
    command += ["-Werror", str(FAULTS / "cublaslt.c"), "-o", str(path), "-lm"]
    command += [f"-L{cudart}", "-lcudart", f"-Wl,-rpath,{cudart}"]
    subprocess.run(command, check=True)
    return path


PRELUDE = """
import ctypes, os
import numpy as np
import gpuops
gpuops.hello()
blas = ctypes.CDLL(os.environ["GPUOPS_CUBLASLT"])
blas.fake_blas_last.restype = ctypes.c_char_p
def last():
    return blas.fake_blas_last().decode()
def fresh(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)
def device(x):
    return gpuops.to_device(x)
"""


@pytest.fixture
def with_blas(fake_device, blas):
    """Runs Python in a process where gpuops finds that cuBLASLt, and returns what it prints."""

    def run(source, **environment):
        environment = {"GPUOPS_CUBLASLT": str(blas), **environment}
        printed = run_child(fake_device.gpuops, PRELUDE + source, timeout=120, **environment)
        return "\n".join(line for line in printed.splitlines() if not line.startswith("Hello"))

    return run


def test_blas_takes_floats_alone(with_blas):
    printed = with_blas("""
for dtype in "efdFD?bBhHiIqQ":
    before = blas.fake_blas_products()
    x = np.ones((20, 20), dtype)
    assert (gpuops.matmul(x, x, device="cuda") == x @ x).all()
    print(dtype, blas.fake_blas_products() - before, end=" ")
assert blas.fake_blas_handles() == 1
""")
    assert printed.split() == "e 1 f 1 d 1 F 1 D 1 ? 0 b 0 B 0 h 0 H 0 i 0 I 0 q 0 Q 0".split()


def test_blas_is_opened_by_who_needs_it_alone(with_blas):
    """That takes a tenth of a second, which the first call under "auto" does not have."""
    printed = with_blas("""
from gpuops import _calibration
x = np.ones((20, 20), np.float32)
_calibration._machine(0)
gpuops.explain("add", x, x)
gpuops.explain("matmul", x, x)
print(blas.fake_blas_handles(), end=" ")
gpuops.matmul(x, x, device="cuda")
print(blas.fake_blas_handles())
""")
    assert printed.split() == ["0", "1"]


def test_blas_gives_the_products_of_numpy(fake_device, blas):
    source = PRODUCTS.format(dtypes="efdFD", count=len(SHAPES))
    assert run_child(fake_device.gpuops, source, GPUOPS_CUBLASLT=str(blas), timeout=300) == ""


def test_blas_bfloat16(with_blas):
    pytest.importorskip("ml_dtypes")
    assert (
        with_blas("""
import ml_dtypes
x = (np.arange(400) % 9 - 4).reshape(20, 20).astype(ml_dtypes.bfloat16)
result = gpuops.matmul(x, x, device="cuda")
assert result.dtype == x.dtype
exact = x.astype("f") @ x.astype("f")
assert (result == exact.astype(ml_dtypes.bfloat16)).all()
print(last().split()[0], blas.fake_blas_products())
""")
        == "type=14 1"
    )


def test_blas_reads_views_in_place(with_blas):
    """The layouts of a 20 x 30 times 30 x 50, which cuBLASLt sees as 50 x 30 times 30 x 20."""
    printed = with_blas("""
from test_matmul import LAYOUTS, on_device
a, b = fresh(20, 30), fresh(30, 50, seed=2)
for first in ("C", "transposed", "padded", "backward"):
    for second in ("C", "transposed", "padded"):
        x, y = on_device(gpuops, LAYOUTS[first](a)), on_device(gpuops, LAYOUTS[second](b))
        assert np.allclose(gpuops.matmul(x, y).to_host(), a @ b)
        print(first, second, *last().split()[2:9])
""")
    lines = dict(re.findall(r"(\w+ \w+) (op=.*)", printed))
    assert lines["C C"] == "op=NN m=50 n=20 k=30 lda=50 ldb=30 ldd=50"
    assert lines["transposed C"] == "op=NT m=50 n=20 k=30 lda=50 ldb=20 ldd=50"
    assert lines["C transposed"] == "op=TN m=50 n=20 k=30 lda=30 ldb=30 ldd=50"
    assert lines["padded padded"] == "op=NN m=50 n=20 k=30 lda=53 ldb=33 ldd=50"
    assert lines["backward C"] == lines["C C"]


def test_blas_batches(with_blas):
    """One call for a batch, also where one of the operands is the same for all of it."""
    printed = with_blas("""
for first, second in [((7, 20, 30), (7, 30, 40)), ((7, 20, 30), (30, 40)), ((20, 30), (7, 30, 40)),
                      ((2, 7, 20, 30), (7, 30, 40)), ((2, 1, 20, 30), (1, 3, 30, 40)),
                      ((5, 4, 3, 20, 30), (5, 1, 3, 30, 40)), ((7, 1, 30), (30, 40)),
                      ((9, 30), (30,)), ((30,), (7, 30, 40))]:
    a, b = fresh(*first), fresh(*second, seed=2)
    before = blas.fake_blas_products()
    assert np.allclose(gpuops.matmul(a, b, device="cuda"), a @ b)
    print(blas.fake_blas_products() - before, last().split()[-1])
""").split("\n")
    assert printed == [
        "1 batch=7,1200,600,800",
        "1 batch=1,0,0,0",  # as a matrix of 140 rows
        "1 batch=7,1200,0,800",
        "2 batch=7,1200,600,800",
        "2 batch=3,1200,0,800",
        "12 batch=5,3600,7200,9600",
        "1 batch=1,0,0,0",
        "1 batch=1,0,0,0",
        "1 batch=7,1200,0,40",
    ]


def test_blas_is_not_called_over_and_over_for_little(with_blas):
    assert (
        with_blas("""
a, b = fresh(30, 1, 4, 5), fresh(1, 30, 5, 6, seed=2)
assert np.allclose(gpuops.matmul(a, b, device="cuda"), a @ b)
print(blas.fake_blas_products())
""")
        == "0"
    )


def test_blas_leaves_batches_of_tiny_matrices_to_us(with_blas):
    printed = with_blas("""
for first, second, dtype in [
    ((1024, 4, 4), (1024, 4, 4), "f4"), ((1023, 4, 4), (1023, 4, 4), "f4"),
    ((1024, 4, 9), (1024, 9, 4), "f4"), ((1024, 4, 4), (1024, 4, 4), "f8"),
]:
    a, b = np.ones(first, dtype), np.ones(second, dtype)
    before = blas.fake_blas_products()
    assert (gpuops.matmul(a, b, device="cuda") == first[-1]).all()
    print(blas.fake_blas_products() - before)
""")
    assert printed.split() == ["0", "1", "1", "1"]


def test_blas_leaves_few_sums_of_many_terms_to_us(with_blas):
    printed = with_blas("""
for rows, depth, dtype in (2, 1 << 18, "f4"), (2, (1 << 18) - 1, "f4"), (2, 1 << 18, "f8"):
    a, b = np.ones((rows, depth), dtype), np.ones((depth, 3), dtype)
    before = blas.fake_blas_products()
    assert (gpuops.matmul(a, b, device="cuda") == depth).all()
    print(blas.fake_blas_products() - before)
""")
    assert printed.split() == ["0", "1", "1"]


def test_blas_rounds_to_tf32_when_asked_only(with_blas):
    """The fake library takes TF32, and 16-bit sums, wherever the caller has not ruled them out."""
    printed = with_blas(
        """
a, b = fresh(40, 50).astype("f"), fresh(50, 30, seed=2).astype("f")
x, y = device(a), device(b)
scale = np.abs(a) @ np.abs(b)
full = np.abs(gpuops.matmul(x, y).to_host() - a @ b) / scale
print(last().split()[1], full.max() < 2**-20)
fast = np.abs(gpuops.matmul(x, y, precision="tf32").to_host() - a @ b) / scale
print(last().split()[1], fast.max() < 2**-9, fast.max() > 2**-16)
for dtype in "dFDe":
    gpuops.matmul(device(a.astype(dtype)), device(b.astype(dtype)), precision="tf32")
    print(last().split()[1])
half = gpuops.matmul(np.full((20, 3000), 1, "e"), np.ones((3000, 20), "e"), device="cuda")
odd = np.zeros((20, 4), "e")
odd[:] = 2048, 1, 1, 1  # 2051: two parts of 16 bits make 2050
odd = gpuops.matmul(odd, np.ones((4, 20), "e"), device="cuda")
print(*map(int, (half.min(), half.max(), odd.min(), odd.max())))
""",
        NVIDIA_TF32_OVERRIDE="1",
    ).split("\n")
    assert printed == [
        "compute=68 True", "compute=77 True True", "compute=70", "compute=68", "compute=70",
        "compute=68", "3000 3000 2052 2052",
    ]  # fmt: skip


def test_blas_plans_are_kept(with_blas):
    printed = with_blas("""
for turn in range(3):
    for size in (20, 30, 40):
        x = device(np.ones((size, size)))
        gpuops.matmul(x, x)
    print(blas.fake_blas_found(), blas.fake_blas_products(), blas.fake_blas_live())
for size in range(20, 420):
    gpuops.matmul(device(np.ones((20, size))), device(np.ones((size, 1))))
print(blas.fake_blas_found() >= 400, blas.fake_blas_live() <= 4 * 128)
""").split("\n")
    assert printed == ["3 3 12", "3 6 12", "3 9 12", "True True"]


def test_blas_has_a_handle_for_each_device(with_blas):
    assert (
        with_blas("""
for ordinal in (0, 1, 0, 1):
    x = gpuops.to_device(np.ones((20, 20)), device=ordinal)
    assert (gpuops.matmul(x, x).to_host() == 20).all()
print(blas.fake_blas_handles(), blas.fake_blas_products())
""")
        == "2 4"
    )


def test_blas_in_threads(with_blas):
    assert (
        with_blas("""
import threading
a, b = fresh(20, 30), fresh(30, 40, seed=2)
wrong = []
def work():
    for _ in range(20):
        if not np.allclose(gpuops.matmul(a, b, device="cuda"), a @ b):
            wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong, blas.fake_blas_products(), blas.fake_blas_handles())
""")
        == "[] 80 1"
    )


def test_products_in_a_finalizer(with_blas):
    """Making room for cuBLASLt's workspace may run anybody's __del__, which may compute products.

    Here it does, on the same device and with so many shapes that they take the place of the plan
    which the outer product has just found.
    """
    printed = with_blas("""
import pathlib
from faults.fake import Fake
fake = Fake(pathlib.Path(gpuops.__path__[0]).parent / "cudart")
rows = [device(np.ones((20, size))) for size in range(1, 400)]
columns = [device(np.ones((size, 1))) for size in range(1, 400)]
x = device(np.ones((20, 20)))
gpuops.matmul(x, x)
inner = 0
class Lent:
    def __init__(self):
        self.array = gpuops.zeros((20, 20))
        interface = self.array.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "stream": None}
    def __del__(self):
        global inner
        gpuops.matmul(x, x)
        inner += 1
        if inner % 10 == 0:
            for row, column in zip(rows, columns):
                gpuops.matmul(row, column)
other = gpuops.Stream()
nested = 0
products = []
fake.set_scheduler("shuffled", 3)
for _ in range(100):
    gpuops.add(Lent(), x, stream=other)
    before = inner
    products.append(gpuops.matmul(x, x))
    nested += inner - before
for product in products:
    assert (product.to_host() == 20).all()
print(nested > 0, repr(fake.take_misuse()))
""")
    assert printed == "True ''"


def test_the_finder_may_compute_products(fake_device, blas, tmp_path):
    """It is Python, in which anything may run; its own products do without cuBLASLt."""
    package = tmp_path / "cuda"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pathfinder.py").write_text(f"""
import numpy as np
import gpuops
a = np.arange(400.0).reshape(20, 20)
assert (gpuops.matmul(a, a, device="cuda") == a @ a).all()

def load_nvidia_dynamic_lib(name):
    class Found:
        abs_path = {str(blas)!r}
    assert (gpuops.matmul(a, a, device="cuda") == a @ a).all()
    return Found()
""")
    source = f"""
import ctypes, sys
sys.path.insert(0, {str(tmp_path)!r})
import numpy as np
import gpuops
blas = ctypes.CDLL({str(blas)!r})
a = np.arange(400.0).reshape(20, 20)
assert (gpuops.matmul(a, a, device="cuda") == a @ a).all()
print(blas.fake_blas_products())
"""
    assert run_child(fake_device.gpuops, source, GPUOPS_FAKE_FINDER="1") == "1\n"


@pytest.mark.parametrize("what", ["create", "find", "memory"])
def test_without_a_plan_our_own_kernels_take_over(with_blas, what):
    printed = with_blas(
        """
a, b = fresh(20, 30), fresh(30, 40, seed=2)
for _ in range(2):
    assert np.allclose(gpuops.matmul(a, b, device="cuda"), a @ b)
print(blas.fake_blas_products())
""",
        FAKE_BLAS_FAIL=what,
    )
    assert printed == ("1" if what == "memory" else "0")


def test_a_product_that_fails_is_an_error(with_blas):
    printed = with_blas(
        """
a = fresh(20, 20)
try:
    gpuops.matmul(a, a, device="cuda")
except gpuops.DeviceError as error:
    print(error.name, error.code, error.operator, error)
i = np.ones((20, 20), int)
print((gpuops.matmul(i, i, device="cuda") == 20).all(), gpuops.memory_info().used)
""",
        FAKE_BLAS_FAIL="multiply",
    )
    assert printed.startswith(
        "CUBLAS_STATUS_EXECUTION_FAILED 13 matmul "
        "matmul(a: float64 (20, 20), b: float64 (20, 20)) on cuda:0: cublasLtMatmul failed"
    )
    assert printed.endswith("True 0")


@pytest.mark.parametrize("path", ["/nowhere/libcublasLt.so", "not a library"])
def test_a_library_that_was_named_and_is_none(fake_device, tmp_path, path):
    if path == "not a library":
        path = tmp_path / "libcublasLt.so"
        path.write_text("not a library")
    source = """
import numpy as np
import gpuops
a = np.arange(400.0).reshape(20, 20)
try:
    gpuops.matmul(a, a, device="cuda")
except gpuops.DeviceError as error:
    print(error)
"""
    printed = run_child(fake_device.gpuops, source, GPUOPS_CUBLASLT=str(path))
    assert "GPUOPS_CUBLASLT names a library that cannot be used" in printed and str(path) in printed
    source = source.replace("except", "    print('right')\nexcept")
    printed = run_child(fake_device.gpuops, source, GPUOPS_CUBLASLT=str(path), GPUOPS_BLAS="0")
    assert printed == "right\n"


@pytest.mark.parametrize("answer", ["found", "raised", "none", "missing"])
def test_cuda_pathfinder_is_asked(fake_device, blas, tmp_path, answer):
    """Here a package of that name that the test writes; without it, our own kernels take over."""
    package = tmp_path / "cuda"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pathfinder.py").write_text(f"""
class Found:
    abs_path = {str(blas)!r} if {answer!r} == "found" else None

def load_nvidia_dynamic_lib(name):
    assert name == "cublasLt"
    if {answer!r} == "raised":
        raise RuntimeError("there is none")
    return Found()
""")
    if answer == "missing":
        (package / "pathfinder.py").unlink()
    source = f"""
import ctypes, sys
sys.path.insert(0, {str(tmp_path)!r})
import numpy as np
import gpuops
blas = ctypes.CDLL({str(blas)!r})
assert "cuda.pathfinder" not in sys.modules
a = np.arange(400.0).reshape(20, 20)
assert (gpuops.matmul(a, a, device="cuda") == a @ a).all()
print(blas.fake_blas_products())
"""
    printed = run_child(fake_device.gpuops, source, GPUOPS_FAKE_FINDER="1")
    assert printed == f"{int(answer == 'found')}\n"


def packages_of_the_extra():
    """The packages of the extra `blas`, and what is asked of their versions."""
    text = (ROOT / "pyproject.toml").read_text()
    wanted = tomllib.loads(text)["project"]["optional-dependencies"]["blas"]
    return dict(re.fullmatch(r"([a-z-]+)(.*)", package).groups() for package in wanted)


def test_the_extra_is_what_is_looked_for():
    packages = packages_of_the_extra()
    assert packages.keys() == {"cuda-pathfinder", "nvidia-cublas"}
    source = (ROOT / "kernels" / "matmul_blas.cu").read_text()
    assert "gpuops[blas]" in source
    major = re.search(r'"libcublasLt\.so\.(\d+)"', source)[1]
    assert packages["nvidia-cublas"] == f">={major},<{int(major) + 1}"
    try:
        files = importlib.metadata.files("nvidia-cublas")
    except importlib.metadata.PackageNotFoundError:
        return
    assert f"libcublasLt.so.{major}" in [file.name for file in files]


def test_the_wheel_of_the_extra_is_found(fake_device, blas, tmp_path):
    """By the real cuda-pathfinder, where pip puts it."""
    pytest.importorskip("cuda.pathfinder")
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    library.parent.mkdir(parents=True)
    shutil.copy(blas, library)
    source = f"""
import ctypes, site
site.getsitepackages = lambda: [{str(tmp_path)!r}]
import numpy as np
import gpuops
a = np.arange(400.0).reshape(20, 20)
assert (gpuops.matmul(a, a, device="cuda") == a @ a).all()
print(ctypes.CDLL({str(library)!r}).fake_blas_products())
"""
    assert run_child(fake_device.gpuops, source, GPUOPS_FAKE_FINDER="1") == "1\n"


def test_blas_can_be_switched_off(with_blas):
    assert (
        with_blas(
            """
a = fresh(20, 20)
assert np.allclose(gpuops.matmul(a, a, device="cuda"), a @ a)
print(blas.fake_blas_handles())
""",
            GPUOPS_BLAS="0",
        )
        == "0"
    )


@pytest.mark.parametrize("warm", [False, True])
def test_products_may_be_captured(with_blas, warm):
    """A handle is made outside of captures only; inside, our own kernels do without."""
    printed = with_blas(
        """
from faults.fake import Fake
import pathlib
WARM = "WARM" in os.environ
fake = Fake(pathlib.Path(gpuops.__path__[0]).parent / "cudart")
a = fresh(20, 20)
stream = gpuops.Stream()
with stream:
    x = gpuops.to_device(a)
    y = gpuops.empty((20, 20))
    if WARM:
        gpuops.matmul(x, x, out=y)
    stream.synchronize()
    fake.set_capturing(stream.ptr, True)
    gpuops.matmul(x, x, out=y)
    fake.set_capturing(stream.ptr, False)
    assert np.allclose(y.to_host(), a @ a)
print(blas.fake_blas_products(), repr(fake.take_misuse()))
""",
        **({"WARM": "1"} if warm else {}),
    )
    assert printed == ("2 ''" if warm else "0 ''")


class Shifted:
    """Memory of an array on the device, from some byte on, as other libraries may pass it."""

    def __init__(self, array, shape, dtype, offset):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": None,
            "typestr": np.dtype(dtype).str,
            "data": (array.ptr + offset, False),
            "version": 3,
        }


@pytest.mark.parametrize(("dtype", "offset"), [(np.complex128, 8), (np.complex64, 4)])
@pytest.mark.parametrize("size", [3, 40])
def test_an_output_that_lies_at_half_a_number(gpu, dtype, offset, size):
    """NumPy aligns complex numbers as their parts, and a GPU's widest stores are of both."""
    gpuops = gpu.gpuops
    rng = np.random.default_rng(1)
    parts = rng.integers(-5, 5, (4, size, size))
    a, b = (parts[0] + 1j * parts[1]).astype(dtype), (parts[2] + 1j * parts[3]).astype(dtype)
    memory = gpuops.zeros((size * size + 1) * a.itemsize, np.uint8)
    out = Shifted(memory, (size, size), dtype, offset)
    gpuops.matmul(gpuops.to_device(a), gpuops.to_device(b), out=out)
    found = memory.to_host()[offset : offset + a.nbytes].copy().view(dtype).reshape(size, size)
    np.testing.assert_array_equal(found, a @ b)


def laid(values, layout):
    if layout == "F":
        return np.asfortranarray(values)
    if layout == "reversed":
        return values[::-1].copy()[::-1]
    room = np.zeros(8 * values.nbytes, np.uint8)
    if layout == "misaligned":
        found = room[1 : 1 + values.nbytes].view(values.dtype).reshape(values.shape)
    else:
        found = room.view(values.dtype).reshape(4, 8)[::2, ::4]
    found[...] = values
    return found


@pytest.mark.parametrize("layout", ["F", "reversed", "apart", "misaligned"])
@pytest.mark.parametrize("which", ["a", "b", "out"])
def test_the_operands_of_a_product_lie_in_any_way(gpuops, which, layout):
    """The short way to NumPy's loops does not take all of them."""
    operands = {"a": [[1.0, 2], [3, 4]], "b": [[0.0, 1], [2, 3]], "out": [[0.0, 0], [0, 0]]}
    operands = {name: np.array(values) for name, values in operands.items()}
    operands[which] = laid(operands[which], layout)
    a, b, out = operands.values()
    assert gpuops.matmul(a, b, out=out) is out
    assert out.tolist() == gpuops.matmul(a, b).tolist() == [[4, 7], [8, 15]]


def test_errors_of_numpy_stay_as_they_are(cpu_device):
    """But one that it has no words for: NumPy has found no memory."""
    source = """
import numpy as np

def fails(a, b, out):
    raise SystemError(text)

np.matmul = fails
import gpuops
for text in ("out of luck", "<ufunc 'matmul'> returned NULL without setting an exception"):
    try:
        gpuops.matmul(np.eye(2)[None], np.eye(2), device="cpu")
    except (SystemError, MemoryError) as error:
        print(repr(error))
"""
    printed = run_child(cpu_device.gpuops, source).splitlines()
    assert printed == ["SystemError('out of luck')", "MemoryError()"]


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_products_are_rounded_as_numpys_are(cpu_device, dtype):
    """To the last bit, as they are by its BLAS, which adds up in an order of its own; also those of
    vectors, of single rows, terms and columns, and of a matrix and itself."""
    matmul = functools.partial(cpu_device.gpuops.matmul, device="cpu")
    rng, differ = np.random.default_rng(12), 0
    for rows, terms, columns in [(3, 5, 4), (17, 33, 9), (32, 100, 16), (1, 70, 20), (20, 70, 1),
                                 (2, 300, 2), (40, 7, 25), (31, 64, 31), (9, 1, 8)]:  # fmt: skip
        for first, second in itertools.product(LAYOUTS, repeat=2):
            a = LAYOUTS[first](rough_numbers(rng, (rows, terms), dtype))
            b = LAYOUTS[second](rough_numbers(rng, (terms, columns), dtype))
            expected = np.matmul(a, b)
            assert matmul(a, b).tobytes() == expected.tobytes()
            differ += np.einsum("ij,jk->ik", a, b).tobytes() != expected.tobytes()
            for x, y in [(a[-1], b), (a, b[:, 0]), (a[0], b[:, -1]), (a, a.T), (b.T, b)]:
                assert matmul(x, y).tobytes() == np.matmul(x, y).tobytes()
            for order in "CF":
                outs = np.empty_like(expected, order=order), np.empty_like(expected, order=order)
                matmul(a, b, out=outs[0])
                np.matmul(a, b, out=outs[1])
                assert outs[0].tobytes() == outs[1].tobytes()
    assert differ > 16


def rough_numbers(rng, shape, dtype):
    """Numbers whose sum is another one in every order."""
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype in "FD" else values).astype(dtype)


def test_who_goes_the_short_way(cpu_device):
    """Products of matrices and vectors need not one of the many things that numpy.matmul makes."""
    short_way = functools.partial(cpu_device.gpuops.matmul, device="cpu")

    def makes_little(function, a, b, out):
        function(a, b, out=out)
        tracemalloc.start()
        function(a, b, out=out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak < 200

    eye, row = np.eye(4), np.ones(4)
    for a, b in [
        (eye, eye), (eye.astype("F"), eye.astype("F")), (row, eye), (eye, row), (row, row),
        (eye[:1, :1], eye[:1, :1]), (eye[::2], eye.T), (eye.astype(int), eye.astype(int)),
    ]:  # fmt: skip
        out = np.array(a @ b)
        assert makes_little(short_way, a, b, out) and not makes_little(np.matmul, a, b, out)
    for a, b, out in [
        (eye[None], eye, eye[None].copy()), (eye[:0], eye, eye[:0].copy()),
        (eye, eye, laid(eye, "misaligned")), (laid(eye, "misaligned"), eye, eye.copy()),
    ]:  # fmt: skip
        assert not makes_little(short_way, a, b, out)


def test_matmul_that_has_been_replaced(cpu_device):
    """By whatever; that is called, and no loop of it."""
    source = """
import numpy as np
numpys, own = np.matmul, lambda a, b, out: numpys(2 * a, b, out)
np.matmul = {}
import gpuops
x = np.arange(9.0).reshape(3, 3)
assert np.array_equal(gpuops.matmul(x, x, device="cpu"), {}(x, x, np.empty_like(x)))
"""
    for name in ("own", "np.add", "np.vecdot"):
        run_child(cpu_device.gpuops, source.format(name, name))


RACES = {
    "a cast": ("np.ones((200, 300), 'b')", "np.ones((300, 200))", "b", (200, 300)),
    "short": ("np.ones((200, 300), 'e')", "np.ones((300, 200), 'e')", "b", (20, 3000)),
    "the result": ("np.ones((200, 300), 'b')", "np.ones((300, 200))", "out", (40000, 1)),
}


@pytest.mark.parametrize("race", RACES)
def test_operands_that_get_another_shape_meanwhile(cpu_device, race):
    """By another thread, while one of them is cast: then it is right, or an error."""
    a, b, which, shape = RACES[race]
    source = f"""
import sys, threading, time, warnings
import numpy as np
import gpuops
sys.setswitchinterval(1e-6)
warnings.simplefilter("ignore")  # NumPy warns of this way to set a shape
a, b, out = {a}, {b}, np.ones((200, 200))
changing, options = {which}, {{"out": out}} if {which!r} == "out" else {{}}
shapes, is_over = [{which}.shape, {shape}], False

def change():
    while not is_over:
        for shape in shapes:
            changing.shape = shape

thread = threading.Thread(target=change)
thread.start()
right, end = 0, time.monotonic() + 1
try:
    while time.monotonic() < end or right == 0:
        try:
            result = gpuops.matmul(a, b, device="cpu", **options)
        except (ValueError, RuntimeError):
            continue
        assert (result == 300).all()
        right += 1
finally:
    is_over = True
    thread.join()
"""
    run_child(cpu_device.gpuops, source)


def test_no_memory_in_the_loop_of_numpy(cpu_device):
    """Which may copy operands there that its BLAS cannot read."""
    source = """
import functools, resource
import numpy as np
import gpuops
a, b = np.broadcast_to(1.0, (4, 10**8)), np.broadcast_to(1.0, (10**8, 2))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
outcomes = []
for matmul in (np.matmul, functools.partial(gpuops.matmul, device="cpu")):
    try:
        outcomes.append(matmul(a, b, out=np.empty((4, 2))).tolist())
    except MemoryError as error:
        outcomes.append(str(error))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert outcomes[0] == outcomes[1], outcomes
"""
    run_child(cpu_device.gpuops, source)


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_what_numpy_warns_of(cpu_device, dtype):
    """Whether it is asked to, and whatever was left in the processor by somebody before."""
    matmul = functools.partial(cpu_device.gpuops.matmul, device="cpu")
    heard = []
    limits = np.finfo(dtype)
    large, small = np.full((5, 5), limits.max, dtype), np.full((5, 5), limits.tiny, dtype)
    infinite = np.diag(np.full(5, np.inf, dtype))
    for x in (large, small, infinite, np.eye(5, dtype=dtype), np.tile(large, (80, 80))):
        for state in (
            {}, {"all": "warn"}, {"all": "ignore"}, {"all": "raise"},
            {"all": "call", "call": lambda *said: heard.append(said)},
        ):  # fmt: skip
            outcomes = []
            for function in (np.matmul, matmul):
                heard.clear()
                with np.errstate(all="ignore"):
                    np.divide(large, 0)
                with np.errstate(**state), warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        said = [function(x, x).tobytes()]
                    except FloatingPointError as error:
                        said = [str(error)]
                outcomes.append(said + heard + [(one.category, str(one.message)) for one in caught])
            assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_a_product_of_two_numbers_is_numpys(cpu_device, dtype):
    """To the last bit, and so is what it warns of: "raise" makes errors of that."""
    tiny = np.finfo(dtype).tiny
    parts = [0, -0.0, 1, -2.5, 1 / 3, np.inf, np.nan, -np.nan, tiny, 1 / tiny]
    numbers = np.array(parts, np.finfo(dtype).dtype)
    if np.dtype(dtype).kind == "c":
        imaginary = numbers[[0, 1, 4, 5, 6]]
        numbers = np.array(list(itertools.product(numbers, imaginary))).view(dtype).ravel()
    for a, b in itertools.product(numbers, repeat=2):
        a, b = np.array([[a]]), np.array([[b]])
        outcomes = []
        for function in (np.matmul, functools.partial(cpu_device.gpuops.matmul, device="cpu")):
            try:
                with np.errstate(all="raise"):
                    outcomes.append(function(a, b).tobytes())
            except FloatingPointError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
