"""gpuops.multiply against numpy.multiply; test_add.py tests what it shares with add."""

import numpy as np
import pytest


def test_literals(gpuops):
    assert gpuops.multiply([2, 3], [[5], [7]]).tolist() == [[10, 15], [14, 21]]
    assert gpuops.multiply(np.uint16([65535]), np.uint16([65535])).tolist() == [1]
    assert gpuops.multiply(np.int16([-300]), np.int16([300])).tolist() == [-24464]
    assert gpuops.multiply(2.5, 4) == 10.0


@pytest.mark.parametrize("dtype", ["b", "B", "h", "H", "i", "I", "q", "Q"])
def test_integers_wrap_around(gpuops, dtype):
    info = np.iinfo(dtype)
    x = np.array([info.min, info.max, info.max // 3, info.min // 2, 3], dtype)
    expected = [(int(a) * int(b)) % 2**info.bits for a in x for b in x]
    result = gpuops.multiply(x[:, None], x[None, :]).ravel()
    assert [int(value) % 2**info.bits for value in result] == expected


def test_small_integers_exhaustively(gpuops):
    for dtype in (np.int8, np.uint8):
        x = np.arange(256, dtype=np.uint8).view(dtype)
        with np.errstate(all="ignore"):
            expected = np.multiply.outer(x, x)
        np.testing.assert_array_equal(gpuops.multiply(x[:, None], x), expected, strict=True)


def test_complex_numbers(gpuops):
    """Products of small whole numbers are exact, whatever the order of the operations."""
    rng = np.random.default_rng(1)
    for dtype in (np.complex64, np.complex128):
        x, y = ((rng.integers(-9, 9, 999) + 1j * rng.integers(-9, 9, 999)).astype(dtype)
                for _ in range(2))  # fmt: skip
        np.testing.assert_array_equal(gpuops.multiply(x, y), x * y, strict=True)


def test_the_parts_of_a_complex_product_are_rounded_one_by_one(gpuops):
    # (1 + e)(1 + e) - 1 * 1, whose exact value an fma would not lose
    e = np.finfo(np.float64).eps
    result = gpuops.multiply(complex(1 + e, 1), complex(1 + e, 1))
    assert result.real == np.float64(1 + e) * np.float64(1 + e) - 1.0
    rng = np.random.default_rng(2)
    for real in (np.float32, np.float64):
        a, b, c, d = rng.standard_normal((4, 1000)).astype(real)
        x, y = np.empty((2, 1000), np.result_type(real, np.complex64))
        x.real, x.imag, y.real, y.imag = a, b, c, d
        result = gpuops.multiply(x, y)
        np.testing.assert_array_equal(result.real, a * c - b * d, strict=True)
        np.testing.assert_array_equal(result.imag, a * d + b * c, strict=True)
