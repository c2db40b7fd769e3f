"""take: `numpy.take`, argument for argument. What it shares with gather is in test_gather.py."""

import array

import numpy as np
import pytest
import reference
from helpers import DTYPES, INDEX_DTYPES, Guarded, filled_array, same
from numpy.exceptions import AxisError

LINE = np.array([4, 3, 5, 7, 6, 8])
TABLE = np.array([[1, 2, 3], [4, 5, 6]], np.int16)


# Literals.


def test_elements(gpuops):
    result = gpuops.take(LINE, [0, 1, 4])
    assert type(result) is np.ndarray and result.dtype == LINE.dtype
    assert result.tolist() == [4, 3, 6]
    assert gpuops.take(LINE, [[0, 1], [2, 3]]).tolist() == [[4, 3], [5, 7]]


def test_flattened_unless_an_axis_is_given(gpuops):
    assert gpuops.take(TABLE, [0, 3, -1]).tolist() == [1, 4, 6]
    assert gpuops.take(TABLE, [0, 3, -1], None).tolist() == [1, 4, 6]
    assert gpuops.take(TABLE, [1, 0], 0).tolist() == [[4, 5, 6], [1, 2, 3]]
    assert gpuops.take(TABLE, [2, 0], 1).tolist() == [[3, 1], [6, 4]]
    assert gpuops.take(TABLE.T, [0, 1, 2]).tolist() == [1, 4, 2]


def test_positional_arguments_in_numpys_order(gpuops):
    out = np.zeros((2, 2), np.int16)
    assert gpuops.take(TABLE, [5, -1], 1, out, "clip") is out
    assert out.tolist() == [[3, 1], [6, 4]]
    assert gpuops.take(a=TABLE, indices=1, axis=0, out=None, mode="raise").tolist() == [4, 5, 6]


def test_modes(gpuops):
    assert gpuops.take(LINE, [6, -7, -1], mode="wrap").tolist() == [4, 8, 8]
    assert gpuops.take(LINE, [6, -7, -1, 2], mode="clip").tolist() == [8, 4, 4, 5]


def test_scalars(gpuops):
    assert type(gpuops.take(LINE, 2)) is np.int64
    assert gpuops.take(LINE, 2) == 5
    assert gpuops.take(TABLE, -1) == 6
    assert gpuops.take(7, 0) == 7
    assert gpuops.take(np.array(5), [0, 0]).tolist() == [5, 5]
    assert gpuops.take(np.array(5), [0], axis=0).tolist() == [5]
    assert gpuops.take([1, 2, 3], np.uint8(2)) == 3


def test_index_errors(gpuops):
    for call, text in [
        (lambda: gpuops.take(LINE, [0, 6]), "index 6 is out of bounds for axis 0 with size 6"),
        (lambda: gpuops.take(LINE, -7), "index -7 is out of bounds for axis 0 with size 6"),
        (lambda: gpuops.take(TABLE, [6]), "index 6 is out of bounds for axis 0 with size 6"),
        (lambda: gpuops.take(TABLE, [3], 1), "index 3 is out of bounds for axis 1 with size 3"),
        (lambda: gpuops.take(TABLE, [3], -1), "index 3 is out of bounds for axis 1 with size 3"),
        (lambda: gpuops.take([], [0]), "cannot do a non-empty take from an empty axes."),
        (lambda: gpuops.take([], 0), "cannot do a non-empty take from an empty axes."),
        (
            lambda: gpuops.take(np.zeros((0, 2)), [0], 0, None, "clip"),
            "cannot do a non-empty take from an empty axes.",
        ),
    ]:
        with pytest.raises(IndexError) as caught:
            call()
        assert str(caught.value) == text


def test_axis_errors(gpuops):
    for axis in (2, -3):
        with pytest.raises(AxisError) as caught:
            gpuops.take(TABLE, [0], axis)
        assert str(caught.value) == f"axis {axis} is out of bounds for array of dimension 2"
    with pytest.raises(AxisError, match="axis 1 is out of bounds for array of dimension 1"):
        gpuops.take(5, 0, 1)


def test_fill_is_the_one_mode_that_numpy_has_not(gpuops):
    assert gpuops.take(LINE, [6, -7, -1], mode="fill").tolist() == [0, 0, 8]
    with pytest.raises(ValueError, match="clipmode must be one of 'clip', 'raise', or 'wrap'"):
        gpuops.take(LINE, [0], mode="foo")
    with pytest.raises(TypeError, match="fill_value"):
        gpuops.take(LINE, [0], fill_value=0)


@pytest.mark.parametrize("indices", [np.array([0.0]), np.array([1j]), np.float32(1)])
def test_indices_must_cast_safely(gpuops, indices):
    dtype = indices.dtype
    with pytest.raises(TypeError) as caught:
        gpuops.take(LINE, indices)
    expected = f"Cannot cast array data from dtype('{dtype}') to dtype('int64') according to"
    assert str(caught.value).startswith(expected)


def test_masks_are_refused_with_advice(gpuops):
    with pytest.raises(TypeError, match=r"x\[mask\]"):
        gpuops.take(LINE, LINE > 4)


def test_refused_dtypes(gpuops):
    with pytest.raises(TypeError, match="object"):
        gpuops.take(np.array([None]), [0])
    with pytest.raises(TypeError):
        gpuops.take(LINE.astype(LINE.dtype.newbyteorder()), [0])
    with pytest.raises(TypeError, match="mask"):
        gpuops.take(np.ma.masked_array(LINE, LINE > 4), [0])


# NumPy as the expectation.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip"])
def test_every_dtype(gpuops, dtype, mode):
    a = filled_array((4, 5), dtype)
    indices = np.array([[0, 3], [-2, 1]])
    for axis in (0, 1, -1, None):
        for index_dtype in INDEX_DTYPES[:4]:
            expected = np.take(a, indices, axis, mode=mode)
            same(gpuops.take(a, indices.astype(index_dtype), axis, mode=mode), expected)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3), (2, 3, 0), (0, 2, 3)])
@pytest.mark.parametrize("index_shape", [(0,), (0, 2), (2, 0), (1,), (2, 2), ()])
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip"])
def test_empty_in_every_combination(gpuops, shape, index_shape, mode):
    a = np.zeros(shape, np.int16)
    for value in (0, 9):
        indices = np.full(index_shape, value, np.int32)
        for axis in [*range(len(shape)), None]:
            try:
                expected = reference.take(a, indices, axis, mode)
            except IndexError as error:
                with pytest.raises(IndexError) as caught:
                    gpuops.take(a, indices, axis, mode=mode)
                assert str(caught.value) == str(error)
            else:
                same(gpuops.take(a, indices, axis, mode=mode), expected)


@pytest.mark.parametrize("mode", ["raise", "wrap", "clip"])
@pytest.mark.parametrize("layout", ["C", "F", "strided", "backward", "misaligned"])
def test_out(gpuops, mode, layout):
    for dtype in ("u1", "f4", "V12"):
        a = filled_array((5, 4), dtype)
        indices = np.array([[4, 0, 1], [2, 3, 3]])
        for axis in (0, 1, None):
            used = indices % (4 if axis == 1 else 5)
            expected = np.take(a, used, axis, mode=mode)
            out = Guarded(expected.shape, dtype, layout)
            assert gpuops.take(a, used, axis, out.array, mode) is out.array
            assert out.array.tobytes() == expected.tobytes()
            assert out.kept_to_its_own()


def test_wrong_out(gpuops):
    out = Guarded((3,), LINE.dtype)
    with pytest.raises(ValueError, match="output array does not match result of take"):
        gpuops.take(LINE, [0, 1], out=out.array)
    with pytest.raises(TypeError):
        gpuops.take(LINE.astype(np.float32), [0, 1, 2], out=out.array)
    with pytest.raises(IndexError):
        gpuops.take(LINE, [0, 1, 6], out=out.array)
    with pytest.raises(ValueError, match="read-only|writ"):
        gpuops.take(LINE, [0], out=np.frombuffer(bytes(8), LINE.dtype))
    assert out.untouched()


def test_overlap(gpuops):
    for mode in ("raise", "wrap", "clip"):
        x = np.arange(5)
        assert gpuops.take(x, [1, 2, 3], out=x[2:5], mode=mode).tolist() == [1, 2, 3]
        x = np.arange(5)
        assert gpuops.take(x, x[::-1], out=x, mode=mode).tolist() == [4, 3, 2, 1, 0]


def test_buffers(gpuops):
    x, indices = array.array("h", [5, 6, 7]), array.array("I", [2, 0])
    assert gpuops.take(x, indices).tolist() == [7, 5]
    with pytest.raises(IndexError):
        gpuops.take(x, array.array("b", [3]))
    x.append(8)
    indices.append(1)


def test_a_thousand_bad_calls_then_a_right_one(gpuops):
    for call in range(1000):
        with pytest.raises(IndexError):
            gpuops.take(TABLE, [0, 3 + call], 1)
    assert gpuops.take(TABLE, [0, 2], 1).tolist() == [[1, 3], [4, 6]]
