"""gpuops.saxpy: one rounding for float32 and float64, checked with exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

FLOATS = ["e", "f", "d"]


def exact(a, x, y, dtype):
    """a * x + y of floats, rounded once: by way of fractions, or of float64 where that is exact."""
    total = Fraction(float(a)) * Fraction(float(x)) + Fraction(float(y))
    if dtype == np.float64:
        return float(total)  # Python rounds a quotient of integers correctly
    nearest = float(total)
    result = np.dtype(dtype).type(nearest)
    # The float64 may itself be rounded, onto the middle between two of the narrower ones.
    below, above = (
        np.nextafter(result, -np.inf, dtype=dtype),
        np.nextafter(result, np.inf, dtype=dtype),
    )
    candidates = [value for value in (below, result, above) if np.isfinite(value)]
    even = lambda value: int(value.view(f"u{value.itemsize}")) % 2  # noqa: E731
    return min(candidates, key=lambda v: (abs(Fraction(float(v)) - total), even(v)))


def test_literals(gpuops):
    assert gpuops.saxpy(2, [1.0, 2.0], [10.0, 20.0]).tolist() == [12.0, 24.0]
    assert gpuops.saxpy([2, 3], [[1], [2]], 10).tolist() == [[12, 13], [14, 16]]
    assert gpuops.saxpy(np.int8([100]), np.int8([2]), np.int8([1])).tolist() == [-55]
    assert gpuops.saxpy(1j, [1 + 1j], [2.0]).tolist() == [1 + 1j]


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_the_product_is_not_rounded(gpuops, dtype):
    """Sums that cancel all but the part of the product that a rounding would drop."""
    eps = np.finfo(dtype).eps
    x = np.array([1 + eps, 1 - eps / 2, 3 + 4 * eps, 1.1, 7.7], dtype)
    y = (-(x * x)).astype(dtype)
    expected = [exact(v, v, w, np.dtype(dtype)) for v, w in zip(x, y, strict=True)]
    assert any(value != 0 for value in expected)
    assert gpuops.saxpy(x, x, y).tolist() == [float(value) for value in expected]


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_random_numbers_are_rounded_once(gpuops, dtype):
    rng = np.random.default_rng(1)
    a, x, y = (rng.standard_normal(500).astype(dtype) for _ in range(3))
    y[::2] = (-(a * x)[::2]).astype(dtype)
    expected = [float(exact(*numbers, np.dtype(dtype))) for numbers in zip(a, x, y, strict=True)]
    assert gpuops.saxpy(a, x, y).tolist() == expected
    for size in (1, 7, 8, 9, 31, 33):
        assert gpuops.saxpy(a[:size], x[:size], y[:size]).tolist() == expected[:size]


def test_float16_is_computed_in_float32(gpuops):
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal(4096).astype(np.float16) for _ in range(2))
    wide = np.float32(1.7) * 0 + np.float16(1.7).astype(np.float32)
    expected = (wide.astype(np.float64) * x + y).astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(gpuops.saxpy(1.7, x, y), expected, strict=True)


def test_bfloat16(gpuops):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(4096).astype(bfloat16) for _ in range(2))
    # A product of two such numbers has 16 bits, of which a rounding would drop eight.
    product = float(bfloat16(1.7)) * x.astype(np.float64)
    expected = (product + y.astype(np.float64)).astype(np.float32).astype(bfloat16)
    result = gpuops.saxpy(1.7, x, y)
    assert result.dtype == bfloat16
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["b", "H", "i", "Q"])
def test_integers_wrap_around(gpuops, dtype):
    rng = np.random.default_rng(4)
    a, x, y = (rng.integers(0, 120, 1000).astype(dtype) for _ in range(3))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(gpuops.saxpy(a, x, y), a * x + y, strict=True)


@pytest.mark.parametrize("dtype", ["F", "D"])
def test_complex(gpuops, dtype):
    rng = np.random.default_rng(5)
    a, x, y = ((rng.standard_normal(1000) + 1j * rng.standard_normal(1000)).astype(dtype)
               for _ in range(3))  # fmt: skip
    result, expected = gpuops.saxpy(a, x, y), a.astype("D") * x + y
    assert result.dtype == dtype
    bound = 4 * np.finfo(dtype).eps * (np.abs(a) * np.abs(x) + np.abs(y))
    assert (np.abs(result - expected) <= bound).all()


def test_in_place_as_blas_has_it(gpuops):
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
    assert gpuops.saxpy(0.5, x, y, out=y) is y
    np.testing.assert_array_equal(y, np.arange(1000, dtype=np.float32) / 2 + 1)
    scipy_blas = pytest.importorskip("scipy.linalg.blas")
    z = np.ones(1000, np.float32)
    np.testing.assert_allclose(y, scipy_blas.saxpy(x, z, a=0.5), rtol=1e-6)


def test_promotion(gpuops):
    x = np.ones(3, np.float32)
    assert gpuops.saxpy(2.0, x, x).dtype == np.float32
    assert gpuops.saxpy(np.float64(2), x, x).dtype == np.float64
    assert gpuops.saxpy(2, np.int8([1]), np.int16([1])).dtype == np.int16
    assert gpuops.saxpy(1j, x, x).dtype == np.complex64


def test_what_it_refuses(gpuops):
    with pytest.raises(TypeError, match="bool"):
        gpuops.saxpy(True, [True], [False])
    with pytest.raises(TypeError):
        gpuops.saxpy("2", [1.0], [1.0])
    with pytest.raises(ValueError, match=r"\(\) \(2,\) \(3,\)"):
        gpuops.saxpy(2, np.ones(2), np.ones(3))
    y = np.ones(3, np.float32)
    with pytest.raises(TypeError, match="same_kind"):
        gpuops.saxpy(1j, y, y, out=y)
    assert y.tolist() == [1, 1, 1]


def test_kinds(gpuops):
    torch = pytest.importorskip("torch")
    x = torch.arange(5.0)
    result = gpuops.saxpy(2.0, x, x)
    assert isinstance(result, torch.Tensor) and result.tolist() == [0, 3, 6, 9, 12]


def test_on_the_device(gpu):
    gpuops = gpu.gpuops
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    dx, dy = gpuops.to_device(x), gpuops.to_device(y)
    assert gpuops.saxpy(3.0, dx, dy, out=dy) is dy
    np.testing.assert_array_equal(dy.to_host(), 3 * x + 1)
    factor = gpuops.to_device(np.float32(3))
    np.testing.assert_array_equal(gpuops.saxpy(factor, dx, 1.0).to_host(), 3 * x + 1)
