"""take_along_axis: NumPy's, with the modes of gather. What they share is in test_gather.py."""

import array

import numpy as np
import pytest
import reference
from helpers import DTYPES, INDEX_DTYPES, Guarded, filled_array, same
from numpy.exceptions import AxisError

SCORES = np.array([[30, 10, 20], [60, 40, 50]])


# Literals.


def test_sorting_along_the_last_axis(gpuops):
    order = np.array([[1, 2, 0], [1, 2, 0]])
    result = gpuops.take_along_axis(SCORES, order)
    assert type(result) is np.ndarray and result.dtype == SCORES.dtype
    assert result.tolist() == [[10, 20, 30], [40, 50, 60]]
    assert gpuops.take_along_axis(SCORES, order, 1).tolist() == result.tolist()
    assert gpuops.take_along_axis(arr=SCORES, indices=order, axis=-1).tolist() == result.tolist()


def test_the_first_axis(gpuops):
    assert gpuops.take_along_axis(SCORES, [[1, 0, -1]], axis=0).tolist() == [[60, 10, 50]]
    assert gpuops.take_along_axis(SCORES, [[1, 0, 1], [0, 0, 0]], 0).tolist() == [
        [60, 10, 50],
        [30, 10, 20],
    ]


def test_no_axis_means_flattened(gpuops):
    assert gpuops.take_along_axis(SCORES, [5, 0, -1], axis=None).tolist() == [50, 30, 50]


def test_one_dimension(gpuops):
    assert gpuops.take_along_axis(np.array([7, 8, 9]), np.array([2, 0])).tolist() == [9, 7]


def test_broadcasting_in_both_directions(gpuops):
    assert gpuops.take_along_axis(SCORES, [[2]], axis=1).tolist() == [[20], [50]]
    one_row = np.array([[1, 2, 3]])
    assert gpuops.take_along_axis(one_row, [[2, 0], [1, 1]], axis=1).tolist() == [[3, 1], [2, 2]]
    x = np.ones((3, 4, 1))
    assert gpuops.take_along_axis(x, np.ones((1, 2, 5), int), axis=1).shape == (3, 2, 5)


def test_modes(gpuops):
    indices = [[3, -4], [-1, 1]]
    along = gpuops.take_along_axis
    assert along(SCORES, indices, 1, mode="wrap").tolist() == [[30, 20], [50, 40]]
    assert along(SCORES, indices, 1, mode="clip").tolist() == [[20, 30], [60, 40]]
    assert along(SCORES, indices, 1, mode="fill").tolist() == [[0, 0], [50, 40]]
    filled = along(SCORES, indices, 1, mode="fill", fill_value=-7)
    assert filled.tolist() == [[-7, -7], [50, 40]]


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_index_error(gpuops, dtype):
    with pytest.raises(IndexError) as caught:
        gpuops.take_along_axis(SCORES, np.array([[0], [3]], dtype), axis=1)
    assert str(caught.value) == "index 3 is out of bounds for axis 1 with size 3"


def test_the_smallest_bad_position_is_named(gpuops):
    indices = np.array([[0, -4, 0], [7, 0, -9]])
    for same_indices in (indices, np.asfortranarray(indices)):
        with pytest.raises(IndexError) as caught:
            gpuops.take_along_axis(SCORES, same_indices, axis=1)
        assert str(caught.value) == "index -4 is out of bounds for axis 1 with size 3"
        with pytest.raises(IndexError) as caught:
            gpuops.take_along_axis(SCORES, same_indices, axis=0)
        assert str(caught.value) == "index -4 is out of bounds for axis 0 with size 2"


def test_huge_unsigned_index(gpuops):
    indices = np.full((1, 1), 2**64 - 1, np.uint64)
    with pytest.raises(IndexError) as caught:
        gpuops.take_along_axis(SCORES, indices, axis=1)
    assert str(caught.value) == f"index {2**64 - 1} is out of bounds for axis 1 with size 3"


def test_wrong_number_of_dimensions(gpuops):
    text = "`indices` and `arr` must have the same number of dimensions"
    for indices in (np.array(1), np.array([1]), np.array([[[1]]])):
        with pytest.raises(ValueError, match="number of dimensions") as caught:
            gpuops.take_along_axis(SCORES, indices, axis=1)
        assert str(caught.value).startswith(text)
    with pytest.raises(ValueError, match="when axis=None, `indices` must have a single dimension"):
        gpuops.take_along_axis(SCORES, [[1]], axis=None)


def test_shapes_that_do_not_broadcast(gpuops):
    with pytest.raises(IndexError) as caught:
        gpuops.take_along_axis(SCORES, np.zeros((3, 1), int), axis=1)
    assert str(caught.value) == (
        "shape mismatch: indexing arrays could not be broadcast together with shapes (2,1) (3,1) "
    )
    with pytest.raises(IndexError) as caught:
        gpuops.take_along_axis(np.zeros((3, 4, 5)), np.zeros((2, 7, 5), int), axis=1)
    with pytest.raises(IndexError) as numpys:
        np.take_along_axis(np.zeros((3, 4, 5)), np.zeros((2, 7, 5), int), axis=1)
    assert str(caught.value) == str(numpys.value)


def test_axis_errors(gpuops):
    for axis in (2, -3, 10):
        with pytest.raises(AxisError) as caught:
            gpuops.take_along_axis(SCORES, [[0]], axis=axis)
        assert str(caught.value) == f"axis {axis} is out of bounds for array of dimension 2"
    with pytest.raises(AxisError, match="axis 0 is out of bounds for array of dimension 0"):
        gpuops.take_along_axis(np.array(3), np.array(0), axis=0)
    assert gpuops.take_along_axis(np.array(3), [0, -1], axis=None).tolist() == [3, 3]


def test_indices_must_be_integers(gpuops):
    for indices in ([[0.0]], np.zeros((1, 1), complex), [["a"]]):
        with pytest.raises(IndexError) as caught:
            gpuops.take_along_axis(SCORES, indices)
        assert str(caught.value).startswith("`indices` must be an integer array")


def test_masks_are_refused_with_advice(gpuops):
    with pytest.raises((TypeError, IndexError), match=r"x\[mask\]|mask"):
        gpuops.take_along_axis(SCORES, SCORES > 30)


def test_modes_that_do_not_exist(gpuops):
    with pytest.raises(ValueError, match="clipmode must be one of 'clip', 'raise', or 'wrap'"):
        gpuops.take_along_axis(SCORES, [[0]], mode="foo")
    with pytest.raises(ValueError, match="fill"):
        gpuops.take_along_axis(SCORES, [[0]], fill_value=3)


# NumPy as the expectation.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_every_dtype_with_every_index_dtype(gpuops, dtype, index_dtype):
    arr = filled_array((4, 5, 3), dtype)
    generator = np.random.default_rng(5)
    for axis in (0, 1, 2):
        shape = [4, 5, 3]
        shape[axis] = 6
        indices = generator.integers(0, arr.shape[axis], size=shape).astype(index_dtype)
        expected = np.take_along_axis(arr, indices.astype(np.int64), axis)
        same(gpuops.take_along_axis(arr, indices, axis), expected)


@pytest.mark.parametrize("function", [np.argsort, np.argmax, np.argmin])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_with_what_numpys_functions_return(gpuops, function, axis):
    arr = np.random.default_rng(6).normal(size=(3, 4, 5))
    options = {} if function is np.argsort else {"keepdims": True}
    indices = function(arr, axis=axis, **options)
    expected = {np.argsort: np.sort, np.argmax: np.max, np.argmin: np.min}[function]
    same(gpuops.take_along_axis(arr, indices, axis), expected(arr, axis=axis, **options))


def shapes_that_broadcast():
    for arr_shape in [(3,), (2, 3), (1, 3), (3, 1), (2, 1, 3), (1, 1, 4), (2, 3, 4)]:
        for axis in range(len(arr_shape)):
            for wide in (False, True):
                shape = [1 if wide and length > 1 else length for length in arr_shape]
                shape = [5 if wide and length == 1 else length for length in shape]
                yield arr_shape, tuple(1 if wide else length for length in arr_shape), axis
                if all(a == b or 1 in (a, b) for a, b in zip(arr_shape, shape, strict=True)):
                    yield arr_shape, tuple(shape), axis


@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
def test_every_way_to_broadcast(gpuops, mode):
    generator = np.random.default_rng(7)
    for arr_shape, index_shape, axis in shapes_that_broadcast():
        arr = filled_array(arr_shape, "i4")
        size = arr_shape[axis]
        reach = 1 if mode == "raise" else 3
        indices = generator.integers(-reach * size, reach * size, size=index_shape)
        for fortran in (False, True):
            odd_arr = np.asfortranarray(arr) if fortran else arr
            odd_indices = np.asfortranarray(indices)[..., ::-1] if fortran else indices[..., ::-1]
            expected = reference.take_along_axis(arr, odd_indices, axis, mode)
            same(gpuops.take_along_axis(odd_arr, odd_indices, axis, mode=mode), expected)


@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
@pytest.mark.parametrize("value", [0, 9, -9])
def test_empty_in_every_combination(gpuops, mode, value):
    lengths = (0, 1, 2)
    for rows in lengths:
        for columns in lengths:
            arr = np.zeros((rows, columns), np.int16)
            for index_rows in lengths:
                for index_columns in lengths:
                    indices = np.full((index_rows, index_columns), value)
                    for axis in (0, 1):
                        check_like_numpy(gpuops, arr, indices, axis, mode)


def check_like_numpy(gpuops, arr, indices, axis, mode):
    try:
        expected = reference.take_along_axis(arr, indices, axis, mode)
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error)) as caught:
            gpuops.take_along_axis(arr, indices, axis, mode=mode)
        assert str(caught.value) == str(error)
    else:
        same(gpuops.take_along_axis(arr, indices, axis, mode=mode), expected)


@pytest.mark.parametrize("layout", ["C", "F", "strided", "backward", "misaligned"])
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
def test_out(gpuops, layout, mode):
    for dtype in ("u1", "f4", "c16", "V3", "V100"):
        arr = filled_array((4, 3, 5), dtype)
        for axis, shape in ((0, (2, 3, 5)), (1, (4, 6, 5)), (2, (4, 1, 2))):
            indices = np.random.default_rng(8).integers(0, arr.shape[axis], size=shape)
            if mode != "raise":
                indices.flat[3] = 99
            expected = reference.take_along_axis(arr, indices, axis, mode)
            out = Guarded(expected.shape, dtype, layout)
            result = gpuops.take_along_axis(arr, indices, axis, mode=mode, out=out.array)
            assert result is out.array
            assert out.array.tobytes() == expected.tobytes()
            assert out.kept_to_its_own()


@pytest.mark.parametrize("layout", ["C", "F", "strided", "backward", "misaligned"])
def test_out_is_untouched_by_a_bad_index(gpuops, layout):
    arr = filled_array((40, 30), "f4")
    for axis in (0, 1):
        for bad in (0, 600, 1199):
            indices = np.zeros((40, 30), np.int32)
            indices.flat[bad] = 40
            out = Guarded((40, 30), "f4", layout)
            with pytest.raises(IndexError, match="index 40 is out of bounds"):
                gpuops.take_along_axis(arr, indices, axis, out=out.array)
            assert out.untouched()


def test_wrong_out(gpuops):
    out = Guarded((2, 2), SCORES.dtype)
    for indices, arr, error in [
        ([[0]], SCORES, ValueError),
        ([[0, 1]], SCORES.astype("f4"), TypeError),
        ([[0, 3]], SCORES, IndexError),
        ([[0.0, 1.0]], SCORES, IndexError),
    ]:
        with pytest.raises(error):
            gpuops.take_along_axis(arr, indices, 1, out=out.array)
    assert out.untouched()


def test_overlap(gpuops):
    for axis in (0, 1):
        memory = np.arange(36).reshape(6, 6)
        indices = np.random.default_rng(9).integers(0, 6, size=(6, 6))
        expected = np.take_along_axis(memory, indices, axis)
        gpuops.take_along_axis(memory, indices, axis, out=memory.T)
        assert (expected == memory.T).all()
        memory = indices.copy()
        expected = np.take_along_axis(indices, indices, axis)
        gpuops.take_along_axis(indices.copy(), memory, axis, out=memory)
        assert (memory == expected).all()


def test_buffers(gpuops):
    x, indices = array.array("f", [1.5, 2.5]), array.array("b", [1, -2, 0])
    assert gpuops.take_along_axis(x, indices).tolist() == [2.5, 1.5, 1.5]
    with pytest.raises(IndexError):
        gpuops.take_along_axis(x, array.array("b", [2]))
    x.append(0)
    indices.append(0)


def test_large(gpuops):
    arr = filled_array((300, 700), "f4")
    indices = np.random.default_rng(10).integers(-700, 700, size=(300, 1000), dtype=np.int16)
    same(gpuops.take_along_axis(arr, indices), np.take_along_axis(arr, indices, 1))
    indices = np.random.default_rng(11).integers(-300, 300, size=(500, 700), dtype=np.int16)
    same(gpuops.take_along_axis(arr, indices, 0), np.take_along_axis(arr, indices, 0))
    indices[499, 699] = 300
    with pytest.raises(IndexError, match="index 300 is out of bounds for axis 0 with size 300"):
        gpuops.take_along_axis(arr, indices, 0)
