"""gather: `x[indices]` along an axis. Literals first, then NumPy; never the other backend."""

import array
import ctypes
import mmap
import re
import threading

import numpy as np
import pytest
import reference
from helpers import DTYPES, INDEX_DTYPES, Guarded, filled_array, read_only, same
from numpy.exceptions import AxisError
from numpy.lib.stride_tricks import sliding_window_view

TABLE = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]], np.int32)
LINE = np.array([1.5, 2.5, 3.5, 4.5, 5.5])


# Literals.


def test_rows(gpuops):
    result = gpuops.gather(TABLE, np.array([2, 0, 2]))
    assert type(result) is np.ndarray
    assert result.dtype == np.int32
    assert result.tolist() == [[30, 31, 32], [10, 11, 12], [30, 31, 32]]


def test_elements(gpuops):
    assert gpuops.gather(LINE, np.array([4, 0, 1, 1])).tolist() == [5.5, 1.5, 2.5, 2.5]


def test_columns(gpuops):
    result = gpuops.gather(TABLE, np.array([2, 0]), axis=1)
    assert result.tolist() == [[12, 10], [22, 20], [32, 30], [42, 40]]
    assert gpuops.gather(TABLE, np.array([2, 0]), axis=-1).tolist() == result.tolist()


def test_no_axis_means_flattened(gpuops):
    assert gpuops.gather(TABLE, np.array([0, 5, 11]), axis=None).tolist() == [10, 22, 42]


def test_negative_indices_count_from_the_end(gpuops):
    assert gpuops.gather(LINE, np.array([-1, -5, -2])).tolist() == [5.5, 1.5, 4.5]


def test_indices_of_any_shape_stand_in_for_the_axis(gpuops):
    result = gpuops.gather(TABLE, np.array([[[0], [3]], [[1], [-1]]]))
    assert result.shape == (2, 2, 1, 3)
    assert result[:, :, 0, 0].tolist() == [[10, 40], [20, 40]]


def test_one_index_takes_the_axis_away(gpuops):
    assert gpuops.gather(TABLE, 1).tolist() == [20, 21, 22]
    assert gpuops.gather(TABLE, np.array(1), axis=1).tolist() == [11, 21, 31, 41]


def test_one_element_is_a_scalar(gpuops):
    result = gpuops.gather(LINE, 3)
    assert type(result) is np.float64
    assert result == 4.5
    assert type(gpuops.gather(np.array([True, False]), -2)) is np.bool_


def test_python_lists(gpuops):
    result = gpuops.gather([1, 2, 3], [2, 0])
    assert result.tolist() == [3, 1]
    assert gpuops.gather(((1, 2), (3, 4)), ([1], [0])).tolist() == [[[3, 4]], [[1, 2]]]
    assert gpuops.gather(LINE, range(1, 3)).tolist() == [2.5, 3.5]


@pytest.mark.parametrize("index", [1, np.int8(1), np.uint64(1), np.array(1, np.int16)])
def test_scalar_indices(gpuops, index):
    same(gpuops.gather(LINE, index), LINE[1])


def test_zero_dimensions(gpuops):
    x = np.array(7, np.int16)
    assert gpuops.gather(x, 0) == 7
    assert type(gpuops.gather(x, -1)) is np.int16
    assert gpuops.gather(x, [0, -1, 0]).tolist() == [7, 7, 7]
    assert gpuops.gather(5.0, [0]).tolist() == [5.0]
    with pytest.raises(IndexError, match="index 1 is out of bounds for axis 0 with size 1"):
        gpuops.gather(x, [1])
    with pytest.raises(AxisError, match="axis 1 is out of bounds for array of dimension 1"):
        gpuops.gather(x, [0], axis=1)


def test_wrap(gpuops):
    assert gpuops.gather(LINE, [5, -6, 12, -1], mode="wrap").tolist() == [1.5, 5.5, 3.5, 5.5]


def test_clip(gpuops):
    # As in NumPy, a negative index is below the axis, not counted from its end.
    assert gpuops.gather(LINE, [5, -6, -1, 3], mode="clip").tolist() == [5.5, 1.5, 1.5, 4.5]


def test_fill(gpuops):
    assert gpuops.gather(LINE, [5, -6, -1, 3], mode="fill").tolist() == [0, 0, 5.5, 4.5]
    result = gpuops.gather(LINE, [0, 99], mode="fill", fill_value=-2)
    assert result.tolist() == [1.5, -2.0]
    result = gpuops.gather(TABLE, [[1], [4]], mode="fill", fill_value=7)
    assert result.tolist() == [[[20, 21, 22]], [[7, 7, 7]]]
    result = gpuops.gather(TABLE, [3, 0], axis=1, mode="fill", fill_value=-1)
    assert result.tolist() == [[-1, 10], [-1, 20], [-1, 30], [-1, 40]]
    assert gpuops.gather(LINE, 7, mode="fill", fill_value=0.25) == 0.25


def test_fill_is_the_zero_of_the_dtype(gpuops):
    assert gpuops.gather(np.array(["a", "b"]), [0, 9], mode="fill").tolist() == ["a", ""]
    dates = np.array(["2020-01-01", "2021-01-01"], "M8[D]")
    assert gpuops.gather(dates, [9], mode="fill")[0] == np.datetime64("1970-01-01")
    missing = gpuops.gather(dates, [9, 1], mode="fill", fill_value=np.datetime64("NaT", "D"))
    assert np.isnat(missing[0]) and missing[1] == dates[1]
    pairs = np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")])
    assert gpuops.gather(pairs, [1, 2], mode="fill").tolist() == [(3, 4.0), (0, 0.0)]
    result = gpuops.gather(pairs, [1, 2], mode="fill", fill_value=(8, 9.0))
    assert result.tolist() == [(3, 4.0), (8, 9.0)]


def test_fill_value_that_is_part_of_out(gpuops):
    out = np.array([1.0, 9.0, 3.0])
    gpuops.gather(LINE, [0, 7, 7], mode="fill", fill_value=out[1:2].reshape(()), out=out)
    assert out.tolist() == [1.5, 9.0, 9.0]
    out = np.array([9.0, 2.0, 3.0])
    gpuops.gather(LINE, [0, 7, 7], mode="fill", fill_value=out[:1].reshape(()), out=out)
    assert out.tolist() == [1.5, 9.0, 9.0]


def test_fill_from_an_empty_axis(gpuops):
    result = gpuops.gather(np.zeros((0, 2)), [0, 1, -1], mode="fill", fill_value=4)
    assert result.tolist() == [[4, 4], [4, 4], [4, 4]]


@pytest.mark.parametrize("length", [1, 3, 9, 16, 28, 64, 129, 5000])
@pytest.mark.parametrize(("dtype", "value"), [("u1", 4), ("i2", 5), ("f8", 6), ("S3", b"abc")])
def test_rows_of_every_length_from_an_empty_axis(gpu, length, dtype, value):
    """Nothing is loaded where nothing is; TSan sees what a kernel loads from where others write."""
    for shape in [(0, length), (2, 0, length), (0, 5, length)]:
        axis = shape.index(0)
        x = gpu.gpuops.to_device(np.zeros(shape, dtype))
        result = gpu.gpuops.gather(x, [0, -1, 7], axis=axis, mode="fill", fill_value=value)
        same(result.to_host(), np.full((*shape[:axis], 3, *shape[axis + 1 :]), value, dtype))
        with pytest.raises(IndexError, match="index 0 .* size 0"):
            gpu.gpuops.gather(x, [0, 1], axis=axis).to_host()


def test_the_classic_call(gpuops):
    x = np.arange(1 << 16, dtype=np.float32)
    indices = np.random.default_rng(1).integers(0, 1 << 16, size=1 << 14, dtype=np.int32)
    same(gpuops.gather(x, indices), x[indices])


def test_the_result_is_new_memory(gpuops):
    x = LINE.copy()
    result = gpuops.gather(x, np.arange(5))
    assert not np.shares_memory(result, x)
    assert result.flags.writeable and result.flags.aligned and result.flags.c_contiguous
    assert result.flags.owndata or result.base is not None


def test_the_operands_stay_as_they_are(gpuops):
    x, indices = TABLE.copy(), np.array([-1, 2, -4])
    x.flags.writeable = indices.flags.writeable = False
    gpuops.gather(x, indices)
    assert (x == TABLE).all() and indices.tolist() == [-1, 2, -4]


# Wrong indices.


@pytest.mark.parametrize("x", [LINE, LINE[:, None].repeat(3, 1)], ids=["elements", "rows"])
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_index_error_names_index_axis_and_size(gpuops, dtype, x):
    with pytest.raises(IndexError) as caught:
        gpuops.gather(x, np.array([0, 4, 5, 9], dtype))
    assert str(caught.value) == "index 5 is out of bounds for axis 0 with size 5"


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8"])
def test_index_error_names_the_index_as_it_was_written(gpuops, dtype):
    with pytest.raises(IndexError) as caught:
        gpuops.gather(TABLE, np.array([[0], [-5]], dtype), axis=0)
    assert str(caught.value) == "index -5 is out of bounds for axis 0 with size 4"
    with pytest.raises(IndexError) as caught:
        gpuops.gather(TABLE, np.array([[0], [-4]], dtype), axis=-1)
    assert str(caught.value) == "index -4 is out of bounds for axis 1 with size 3"
    with pytest.raises(IndexError) as caught:
        gpuops.gather(TABLE, np.array([12], dtype), axis=None)
    assert str(caught.value) == "index 12 is out of bounds for axis 0 with size 12"


def test_the_smallest_bad_position_is_named(gpuops):
    indices = np.zeros((50, 400), np.int64)
    indices[3, 7] = -77
    indices[2, 399] = 88
    indices[49, 0] = 99
    for same_indices in (indices, np.asfortranarray(indices), np.repeat(indices, 2, 1)[:, ::2]):
        with pytest.raises(IndexError) as caught:
            gpuops.gather(LINE, same_indices)
        assert str(caught.value) == "index 88 is out of bounds for axis 0 with size 5"


def test_the_smallest_bad_position_among_many(gpuops):
    # Enough indices for every thread of every backend, bad ones in each one's share.
    indices = np.zeros(1_000_000, np.int32)
    indices[123_457::1000] = np.arange(1000, 1000 + len(indices[123_457::1000]))
    for axis in (0, 1):
        with pytest.raises(IndexError) as caught:
            gpuops.gather(np.zeros((3, 3), np.int8), indices, axis=axis)
        assert str(caught.value) == f"index 1000 is out of bounds for axis {axis} with size 3"


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**63 + 5])
def test_huge_unsigned_indices_are_named_as_they_are(gpuops, value):
    with pytest.raises(IndexError, match=f"^index {value} is out of bounds for axis 0 with size 5"):
        gpuops.gather(LINE, np.array([value], np.uint64))


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**32, 2**32 + 1, -(2**32), -(2**31)])
def test_huge_indices_do_not_alias(gpuops, value):
    with pytest.raises(IndexError, match=f"^index {value} is out of bounds for axis 0 with size 5"):
        gpuops.gather(LINE, np.array([value], np.int64))


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("mode", ["wrap", "clip", "fill"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100, 127, 128, 255, 256, 300, 65537])
def test_modes_at_the_edges_of_every_index_dtype(gpuops, dtype, mode, size):
    limits = np.iinfo(dtype)
    values = {limits.min, limits.min + 1, limits.max, limits.max - 1, limits.max // 2 + 1}
    values |= {-size - 1, -size, -size + 1, -1, 0, 1, size - 1, size, size + 1, 2 * size}
    values = sorted(value for value in values if limits.min <= value <= limits.max)
    x = np.arange(1, size + 1, dtype=np.int32)
    # Python's integers have no edges.
    expected = []
    for value in values:
        if mode == "wrap":
            expected.append(value % size + 1)
        elif mode == "clip":
            expected.append(min(max(value, 0), size - 1) + 1)
        else:
            expected.append(value % size + 1 if -size <= value < size else 0)
    assert gpuops.gather(x, np.array(values, dtype), mode=mode).tolist() == expected


def test_python_integers_beyond_64_bits(gpuops):
    for value in (2**64, -(2**63) - 1, 2**100):
        with pytest.raises((IndexError, OverflowError, TypeError)):
            gpuops.gather(LINE, [value])


def test_a_thousand_bad_calls_then_a_right_one(gpuops):
    x = np.arange(1000.0)
    indices = np.arange(1000)
    for call in range(1000):
        bad = indices.copy()
        bad[call] = 1000 + call if call % 2 else -1001 - call
        with pytest.raises(IndexError) as caught:
            gpuops.gather(x, bad)
        assert str(caught.value) == f"index {bad[call]} is out of bounds for axis 0 with size 1000"
    same(gpuops.gather(x, indices[::-1]), x[::-1].copy())


# Wrong arguments.


@pytest.mark.parametrize("axis", [2, -3, 7, 10**6])
def test_axis_out_of_bounds(gpuops, axis):
    with pytest.raises(AxisError) as caught:
        gpuops.gather(TABLE, [0], axis=axis)
    assert str(caught.value) == f"axis {axis} is out of bounds for array of dimension 2"


@pytest.mark.parametrize("axis", [1.0, "0", [0], (0,), True])
def test_axis_of_a_wrong_kind(gpuops, axis):
    with pytest.raises(TypeError):
        gpuops.gather(TABLE, [0], axis=axis)


def test_axis_beyond_all_bounds(gpuops):
    with pytest.raises(OverflowError, match="Python int too large to convert to C long"):
        gpuops.gather(TABLE, [0], axis=2**70)
    with pytest.raises(ValueError, match="integer won't fit into a C int"):
        gpuops.gather(TABLE, [0], axis=2**40)
    with pytest.raises(AxisError) as caught:
        gpuops.gather(TABLE, [0], axis=-3)
    assert (caught.value.axis, caught.value.ndim) == (-3, 2)


def test_axis_may_be_anything_with_an_index(gpuops):
    assert gpuops.gather(TABLE, [0], axis=np.int8(-1)).tolist() == [[10], [20], [30], [40]]


def test_modes_that_do_not_exist(gpuops):
    for mode in ("foo", "", "RAISE", "wrapped", "ä"):
        with pytest.raises(ValueError) as caught:
            gpuops.gather(LINE, [0], mode=mode)
        assert "clipmode must be one of 'clip', 'raise', or 'wrap'" in str(caught.value)
        assert f"(got '{mode}')" in str(caught.value)
        assert "'fill'" in str(caught.value)
    for mode in (3.5, b"clip", ["clip"]):
        with pytest.raises((TypeError, ValueError)):
            gpuops.gather(LINE, [0], mode=mode)


def test_fill_value_belongs_to_fill(gpuops):
    for mode in ("raise", "wrap", "clip"):
        with pytest.raises(ValueError, match="fill"):
            gpuops.gather(LINE, [0], mode=mode, fill_value=1.0)


def test_fill_value_must_fit_the_dtype(gpuops):
    with pytest.raises((ValueError, TypeError)):
        gpuops.gather(LINE, [9], mode="fill", fill_value="many")
    with pytest.raises((ValueError, TypeError)):
        gpuops.gather(LINE, [9], mode="fill", fill_value=[1.0, 2.0])
    with pytest.raises((OverflowError, ValueError, TypeError)):
        gpuops.gather(np.zeros(3, np.int8), [9], mode="fill", fill_value=300)


@pytest.mark.parametrize(
    ("dtype", "lost"),
    [
        ("u1", np.int64(300)),
        ("i8", 1.5),
        ("i8", np.datetime64(5, "s")),
        ("?", 2),
        ("f4", np.complex64(1)),
        ("f2", 1j),
    ],
)
def test_fill_value_must_come_through(gpuops, dtype, lost):
    with pytest.raises(TypeError, match="would lose its value"):
        gpuops.gather(np.zeros(3, dtype), [9], mode="fill", fill_value=lost)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("u1", 200.0), ("i8", np.uint64(7)), ("f4", 0.1), ("c8", 1), ("?", 1), ("S3", b"ab")],
)
def test_fill_value_of_another_type(gpuops, dtype, kept):
    expected = np.array([kept]).astype(dtype)
    same(gpuops.gather(np.zeros(3, dtype), [9], mode="fill", fill_value=kept), expected)


def test_fill_value_of_a_structure(gpuops):
    dtype = np.dtype([("count", "i4"), ("place", "f4", (3,))])
    result = gpuops.gather(np.zeros(2, dtype), [5, 0], mode="fill", fill_value=(1, (1.0, 2.0, 3.0)))
    assert result["count"].tolist() == [1, 0]
    assert result["place"].tolist() == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("indices", [np.array([1.0]), 1.0, [0.5], np.array(["1"]), [1j], "1"])
def test_indices_must_be_integers(gpuops, indices):
    with pytest.raises(IndexError) as caught:
        gpuops.gather(LINE, indices)
    expected = "arrays used as indices must be of integer (or boolean) type"
    assert str(caught.value).startswith(expected)


def test_an_empty_list_counts_as_integers(gpuops):
    assert gpuops.gather(LINE, []).shape == (0,)
    assert gpuops.gather(TABLE, [[], []]).shape == (2, 0, 3)
    assert gpuops.gather(TABLE, (), axis=1).shape == (4, 0)


@pytest.mark.parametrize("indices", [np.array([True, False]), [True], True, np.bool_(False)])
def test_masks_are_refused_with_advice(gpuops, indices):
    with pytest.raises(TypeError, match="mask") as caught:
        gpuops.gather(LINE, indices)
    assert "x[mask]" in str(caught.value) and "flatnonzero" in str(caught.value)


def test_objects_are_refused_with_advice(gpuops):
    with pytest.raises(TypeError, match="object"):
        gpuops.gather(np.array([1, None], object), [0])
    with pytest.raises(TypeError, match="object"):
        gpuops.gather([object()], [0])
    with pytest.raises(TypeError):
        gpuops.gather(np.zeros(2, [("a", "i4"), ("b", object)]), [0])
    with pytest.raises((TypeError, IndexError)):
        gpuops.gather(LINE, np.array([0, 1], object))
    with pytest.raises((TypeError, IndexError)):
        gpuops.gather(LINE, None)


def test_variable_width_strings_are_refused(gpuops):
    strings = np.array(["a", "bcd" * 20], np.dtypes.StringDType())
    with pytest.raises(TypeError, match="not of fixed size.*'U20'"):
        gpuops.gather(strings, [0])
    with pytest.raises(TypeError):
        gpuops.gather(np.array(["a", "b"]), [0], out=strings[:1])


def test_foreign_byte_order_is_refused_with_advice(gpuops):
    foreign = LINE.dtype.newbyteorder()
    with pytest.raises(TypeError, match="byte order|byteorder|byte-order"):
        gpuops.gather(LINE.astype(foreign), [0])
    with pytest.raises(TypeError, match="byte order|byteorder|byte-order"):
        gpuops.gather(LINE, np.array([0], np.dtype("i4").newbyteorder()))
    with pytest.raises(TypeError):
        gpuops.gather(LINE, [0], out=np.zeros(1, foreign))


def test_masked_arrays_are_refused(gpuops):
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(TypeError, match="mask"):
        gpuops.gather(masked, [0])
    with pytest.raises(TypeError, match="mask"):
        gpuops.gather(LINE, np.ma.masked_array([0, 1], [False, True]))
    with pytest.raises(TypeError, match="mask"):
        gpuops.gather(LINE, [0], out=masked[:1])


def test_things_that_are_no_arrays(gpuops):
    for thing in (None, object(), {1: 2}, {1, 2}, lambda: 0):
        with pytest.raises(TypeError):
            gpuops.gather(thing, [0])
    with pytest.raises(ValueError):
        gpuops.gather([[1], [1, 2]], [0])
    with pytest.raises((ValueError, IndexError)):
        gpuops.gather(LINE, [[1], [1, 2]])


def test_an_error_of_the_operand_comes_through(gpuops):
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise LookupError("no array today")

    with pytest.raises(LookupError, match="no array today"):
        gpuops.gather(Broken(), [0])
    with pytest.raises(LookupError, match="no array today"):
        gpuops.gather(LINE, Broken())


def test_subclasses_give_plain_arrays(gpuops):
    class Mine(np.ndarray):
        pass

    result = gpuops.gather(TABLE.view(Mine), np.array([1]).view(Mine))
    assert type(result) is np.ndarray and result.tolist() == [[20, 21, 22]]


# Dtypes. Only the width counts, so every width is here.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_every_dtype_with_every_index_dtype(gpuops, dtype, index_dtype):
    x = filled_array((7, 3), dtype)
    indices = np.array([[0, 6, 3], [5, 5, 1]], index_dtype)
    same(gpuops.gather(x, indices), x[indices])
    clipped = x.take(indices.astype(np.int64), axis=1, mode="clip")
    same(gpuops.gather(x, indices, axis=1, mode="clip"), clipped)
    same(gpuops.gather(x[:, 0], indices[0]), x[:, 0][indices[0]])
    assert gpuops.gather(x, indices[0, :0]).dtype == dtype


@pytest.mark.parametrize("width", range(1, 70))
def test_every_width(gpuops, width):
    x = filled_array(11, f"V{width}")
    indices = np.array([10, 0, 3, 3, -1, 7], np.int32)
    same(gpuops.gather(x, indices), x[indices])
    # Rows as wide as the elements are moved in the same way.
    rows = np.frombuffer(x.tobytes(), np.uint8).reshape(11, width)
    same(gpuops.gather(rows, indices), rows[indices])


@pytest.mark.parametrize("width", [1, 3, 4, 12, 16, 17])
@pytest.mark.parametrize("row", [1, 2, 3, 31, 32, 33, 100, 1000, 4097])
def test_rows_of_every_length(gpuops, width, row):
    x = filled_array((9, row), f"V{width}")
    indices = np.array([8, 0, 3, 3, -1, 7])
    same(gpuops.gather(x, indices), x[indices])
    same(gpuops.gather(x.T, indices, axis=1), x.T[:, indices])


def test_nothing_wide_elements(gpuops):
    x = np.zeros(4, np.dtype([]))
    result = gpuops.gather(x, [0, 3, 1])
    assert result.shape == (3,) and result.dtype == x.dtype
    with pytest.raises(IndexError, match="index 4 is out of bounds for axis 0 with size 4"):
        gpuops.gather(x, [4])


def test_strings_of_no_width(gpuops):
    """NumPy's new arrays of such strings are one character wide, and are to be empty."""
    x = np.zeros(3, [("nothing", "S0"), ("something", "i4")])["nothing"]
    assert x.itemsize == 0
    same(gpuops.gather(x, [0, 1, 2] * 12), x[[0, 1, 2] * 12])


def test_the_dtype_keeps_its_details(gpuops):
    with_unit = np.array([1, 2, 3], "M8[25s]")
    assert gpuops.gather(with_unit, [0]).dtype == with_unit.dtype
    aligned = np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    assert gpuops.gather(aligned, [0]).dtype == aligned.dtype
    titled = np.zeros(3, np.dtype({"names": ["b"], "formats": ["i2"], "offsets": [5]}))
    assert gpuops.gather(titled, [0]).dtype == titled.dtype
    assert gpuops.gather(np.zeros(3, np.longlong), [0]).dtype == np.longlong


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_ml_dtypes(gpuops, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name))
    x = np.arange(6).astype(dtype).reshape(3, 2)
    result = gpuops.gather(x, np.array([2, 0]))
    same(result, x[np.array([2, 0])])
    assert result.astype(float).tolist() == [[4.0, 5.0], [0.0, 1.0]]
    out = np.zeros((2, 2), dtype)
    assert gpuops.gather(x, [1, 1], out=out) is out
    assert out.astype(float).tolist() == [[2.0, 3.0], [2.0, 3.0]]
    filled = gpuops.gather(x, [9], mode="fill", fill_value=1)
    assert filled.astype(float).tolist() == [[1.0, 1.0]]
    same(gpuops.gather(x[:, 0], 1), x[1, 0])


def test_nan_payloads_survive(gpuops):
    bits = np.array([0x7FF8DEADBEEF0001, 0x7FF4000000000001, 0x8000000000000000], np.uint64)
    result = gpuops.gather(bits.view(np.float64), [2, 1, 0])
    assert result.view(np.uint64).tolist() == bits[::-1].tolist()


# Shapes, axes and strides.


@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 5, 3), (2, 3, 4, 5), (1, 2, 1, 3, 1, 2)])
@pytest.mark.parametrize("index_shape", [(), (1,), (4,), (2, 3), (3, 1, 2)])
def test_every_axis(gpuops, shape, index_shape):
    x = filled_array(shape, "i4")
    generator = np.random.default_rng(3)
    for axis in [*range(-len(shape), len(shape)), None]:
        size = x.size if axis is None else shape[axis]
        indices = generator.integers(-size, size, size=index_shape)
        indices = np.asarray(indices)
        expected = reference.gather(x, indices, axis)
        same(gpuops.gather(x, indices, axis=axis), expected)


def test_32_dimensions_and_more(gpuops):
    for ndim in (32, 64):
        x = np.arange(4.0).reshape((1,) * (ndim - 2) + (2, 2))
        assert gpuops.gather(x, [1], axis=-1).ravel().tolist() == [1.0, 3.0]
        assert gpuops.gather(x, [[1, 0]][0], axis=ndim - 2).shape == x.shape
    x = np.zeros((1,) * 64)
    with pytest.raises(ValueError):
        gpuops.gather(x, [[0]], axis=3)
    assert gpuops.gather(x, 0, axis=3).ndim == 63
    assert gpuops.gather(np.arange(3), np.zeros((1,) * 64, int)).ndim == 64


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3), (2, 3, 0), (0, 2, 3)])
@pytest.mark.parametrize("index_shape", [(0,), (0, 2), (2, 0), (1,), (2, 2), ()])
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
def test_empty_in_every_combination(gpuops, shape, index_shape, mode):
    x = np.zeros(shape, np.int16)
    indices = np.zeros(index_shape, np.int32)
    for axis in [*range(len(shape)), None]:
        try:
            expected = reference.gather(x, indices, axis, mode)
        except IndexError as error:
            with pytest.raises(IndexError) as caught:
                gpuops.gather(x, indices, axis=axis, mode=mode)
            assert str(caught.value) == str(error)
        else:
            same(gpuops.gather(x, indices, axis=axis, mode=mode), expected)


def test_empty_axis_literals(gpuops):
    empty = np.zeros((0, 3))
    assert gpuops.gather(empty, []).shape == (0, 3)
    assert gpuops.gather(empty, [2, 0], axis=1).shape == (0, 2)
    with pytest.raises(IndexError) as caught:
        gpuops.gather(empty, [0])
    assert str(caught.value) == "index 0 is out of bounds for axis 0 with size 0"
    with pytest.raises(IndexError) as caught:
        gpuops.gather(empty, [3], axis=1)
    assert str(caught.value) == "index 3 is out of bounds for axis 1 with size 3"
    for mode in ("wrap", "clip"):
        with pytest.raises(IndexError) as caught:
            gpuops.gather(empty, [0], mode=mode)
        assert str(caught.value) == "cannot do a non-empty take from an empty axes."


LAYOUTS = {
    "C": lambda a: a,
    "F": lambda a: np.asfortranarray(a),
    "reversed": lambda a: a[::-1].copy()[::-1],
    "all reversed": lambda a: np.flip(np.flip(a).copy()),
    "every second": lambda a: np.repeat(np.repeat(a, 2, axis=0), 2, axis=-1)[::2, ..., ::2],
    "every third": lambda a: np.repeat(a, 3, axis=-1)[..., ::3],
    "swapped": lambda a: a.swapaxes(0, -1).copy().swapaxes(0, -1),
    "misaligned": lambda a: misaligned(a),
    "field": lambda a: as_field(a),
}


def misaligned(a):
    memory = np.zeros(a.nbytes + 1, np.uint8)
    result = np.ndarray(a.shape, a.dtype, buffer=memory, offset=1)
    result[...] = a
    return result


def as_field(a):
    records = np.zeros(a.shape, np.dtype([("pad", "V3"), ("value", a.dtype), ("end", "V2")]))
    records["value"] = a
    return records["value"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["u1", "i4", "c16", "V12", "V5"])
def test_every_layout(gpuops, layout, index_layout, dtype):
    x = filled_array((6, 4, 5), dtype)
    indices = np.array([[0, 3, -1, 1], [2, -4, 3, 0]])
    odd, odd_indices = LAYOUTS[layout](x), LAYOUTS[index_layout](indices)
    assert odd.tobytes() == x.tobytes() and (odd_indices == indices).all()
    for axis in (0, 1, 2, -1):
        same(gpuops.gather(odd, odd_indices, axis=axis), reference.gather(x, indices, axis))
    same(gpuops.gather(odd, odd_indices, axis=None), x.reshape(-1)[indices])


def test_zero_strides(gpuops):
    row = np.array([1, 2, 3], np.int16)
    x = np.broadcast_to(row, (1000, 3))
    assert gpuops.gather(x, [999, 0]).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert gpuops.gather(x, [2, 0], axis=1)[500].tolist() == [3, 1]
    same_index = np.broadcast_to(np.array(2), (4, 2))
    assert gpuops.gather(row, same_index).tolist() == [[3, 3]] * 4


@pytest.mark.parametrize("dtype", ["u1", "V3", "f4", "c16"])
def test_sliding_windows(gpuops, dtype):
    """Rows that share memory would take a hundred times their memory if each were copied."""
    x = filled_array(3000, dtype)
    for windows in (
        sliding_window_view(x, 101),
        sliding_window_view(x[::-1], 64)[::2],
        sliding_window_view(x, 100)[::7, ::3],
        sliding_window_view(x[:2000].reshape(40, 50), (7, 9)),
        sliding_window_view(x[:2000].reshape(40, 50), 6, axis=0)[:, ::-1],
    ):
        size = len(windows)
        for indices in ([5], [-1, 0, size - 1], np.arange(size)[::-1]):
            same(gpuops.gather(windows, indices), windows[indices])
            same(gpuops.gather(windows, indices, mode="fill"), windows[indices])
            expected = np.take(windows, [1, -2, 3], axis=-1)
            same(gpuops.gather(windows, [1, -2, 3], axis=-1), expected)
        same(gpuops.take(windows, [0, 17, -1]), np.take(windows, [0, 17, -1]))
        order = np.argsort(np.random.default_rng(0).random(windows.shape), axis=0)
        same(gpuops.take_along_axis(windows, order, 0), np.take_along_axis(windows, order, 0))


@pytest.mark.parametrize("row", [8192, 12_288, 40_000, 99_991, 1 << 20, (1 << 20) + 5])
@pytest.mark.parametrize("mode", ["raise", "fill"])
def test_few_long_rows(gpuops, row, mode):
    x = filled_array((5, row), "u1")
    same(gpuops.gather(x, [4, 0, -2, 4], mode=mode), x[[4, 0, -2, 4]])
    same(gpuops.gather(x.reshape(5, row, 1)[:, :, [0, 0]], [3, 1], mode=mode)[..., 1], x[[3, 1]])
    with pytest.raises(IndexError, match="index -6 is"):
        gpuops.gather(x, [4, -6, 5])


@pytest.mark.parametrize("row_bytes", [256, 272, 1000, 1008, 5000])
@pytest.mark.parametrize("mode", ["raise", "fill"])
def test_results_that_no_cache_holds(gpuops, row_bytes, mode):
    """33 MiB of rows that are written by words, where these may begin there, or not."""
    count = (9 << 20) // row_bytes // 4 * 4  # nor does one hold the table
    x = np.arange(count * row_bytes // 4, dtype=np.uint32).view("u1").reshape(count, row_bytes)
    indices = np.random.default_rng(1).integers(-count, count, (33 << 20) // row_bytes + 1)
    expected = x[indices]
    indices[7] = -count - 1 if mode == "fill" else indices[7]
    expected[7] = 3 if mode == "fill" else expected[7]
    options = {"fill_value": 3} if mode == "fill" else {}
    same(gpuops.gather(x, indices, mode=mode, **options), expected)
    memory = np.full(expected.nbytes + 128, 99, np.uint8)
    for offset in (-memory.ctypes.data % 64 + at for at in (0, 16, 5)):
        out = memory[offset:][: expected.size].reshape(expected.shape)
        gpuops.gather(x, indices, mode=mode, out=out, **options)
        same(out, expected)
        memory[offset : offset + expected.size] = 99
        assert (memory == 99).all()
    indices[len(indices) // 2] = count
    if mode == "raise":
        with pytest.raises(IndexError, match=f"index {count} is out of bounds"):
            gpuops.gather(x, indices)


def test_columns_of_results_that_no_cache_holds(gpuops):
    """A few rows at a time, written by words."""
    x = np.random.default_rng(2).random((17_000, 5, 128), np.float32)
    same(gpuops.gather(x, [4, 0, -3, 4], axis=1), x[:, [4, 0, -3, 4]])


def test_overlapping_windows(gpuops):
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(10), 4)
    assert gpuops.gather(windows, [6, 0]).tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_random_large(gpuops, seed):
    generator = np.random.default_rng(seed)
    shape = tuple(generator.integers(1, 60, size=generator.integers(1, 4)))
    x = filled_array(shape, DTYPES[seed % len(DTYPES)], seed)
    axis = int(generator.integers(len(shape)))
    indices = generator.integers(-shape[axis], shape[axis], size=generator.integers(1, 3000))
    same(gpuops.gather(x, indices, axis=axis), reference.gather(x, indices, axis))


# Into the caller's own memory.

OUT_LAYOUTS = ["C", "F", "strided", "backward", "misaligned"]


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
@pytest.mark.parametrize("dtype", ["u1", "f4", "i8", "c16", "V3", "V12", "V100", "S7"])
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
def test_out(gpuops, layout, dtype, mode):
    x = filled_array((5, 3, 4), dtype)
    indices = np.array([[4, 0], [2, -1], [3, 1]])
    if mode != "raise":
        indices[1, 0], indices[2, 1] = 11, -13
    for axis in (0, 1, 2):
        if mode == "raise":
            indices %= x.shape[axis]
        expected = reference.gather(x, indices, axis, mode)
        out = Guarded(expected.shape, dtype, layout)
        assert gpuops.gather(x, indices, axis=axis, mode=mode, out=out.array) is out.array
        assert out.array.tobytes() == expected.tobytes()
        assert out.kept_to_its_own()


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
@pytest.mark.parametrize("dtype", ["u1", "i4", "V12"])
def test_out_is_untouched_by_a_bad_index(gpuops, layout, dtype):
    x = filled_array((5, 3), dtype)
    for axis, shape in ((0, (40, 3)), (1, (5, 40)), (None, (40,))):
        for bad in (0, 20, 39):
            indices = np.zeros(40, np.int64)
            indices[bad] = -16
            out = Guarded(shape, dtype, layout)
            with pytest.raises(IndexError, match="index -16 is out of bounds"):
                gpuops.gather(x, indices, axis=axis, out=out.array)
            assert out.untouched()


def test_large_out_is_untouched_by_a_last_bad_index(gpuops):
    x = filled_array((100, 8), "f4")
    indices = np.arange(600_000, dtype=np.int32) % 100  # enough for several threads
    indices[-1] = 100
    out = Guarded((600_000, 8), "f4")
    with pytest.raises(IndexError, match="index 100 is out of bounds for axis 0 with size 100"):
        gpuops.gather(x, indices, out=out.array)
    assert out.untouched()


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"indices": np.array([0.5, 0.5])}, IndexError),
        ({"indices": np.array([True, False])}, TypeError),
        ({"indices": np.array([0, 9])}, IndexError),
        ({"axis": 5}, AxisError),
        ({"mode": "foo"}, ValueError),
        ({"fill_value": 0}, ValueError),
        ({"x": np.array([None, None])}, TypeError),
        ({"x": np.zeros(3, np.float32)}, TypeError),
        ({"indices": np.array([0, 1, 2])}, ValueError),
        ({"x": np.zeros(0)}, IndexError),
        ({"device": "nowhere"}, ValueError),
        ({"device": 99}, RuntimeError),
    ],
)
def test_out_is_untouched_by_every_error(gpuops, arguments, error):
    out = Guarded((2,), "f8")
    call = {"x": LINE, "indices": np.array([0, 1]), **arguments}
    with pytest.raises(error):
        gpuops.gather(call.pop("x"), call.pop("indices"), out=out.array, **call)
    assert out.untouched()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 2), (0,)])
def test_out_of_another_shape(gpuops, shape):
    out = Guarded(shape, "f8")
    with pytest.raises(ValueError) as caught:
        gpuops.gather(LINE, [0, 1], out=out.array)
    assert str(caught.value).startswith("output array does not match result of gather")
    assert out.untouched()


@pytest.mark.parametrize("dtype", ["f4", "i8", "V8", "c16", "u1", "M8[s]", [("a", "f8")]])
def test_out_of_another_dtype(gpuops, dtype):
    out = Guarded((2,), dtype)
    with pytest.raises(TypeError):
        gpuops.gather(LINE, [0, 1], out=out.array)
    assert out.untouched()


def test_out_with_another_unit(gpuops):
    out = Guarded((1,), "M8[ms]")
    with pytest.raises(TypeError):
        gpuops.gather(np.zeros(3, "M8[s]"), [0], out=out.array)
    assert out.untouched()


def test_out_must_be_writable(gpuops):
    for out in (read_only(np.ones(2)), np.frombuffer(bytes(16))):
        with pytest.raises(ValueError, match="read-only|writ"):
            gpuops.gather(LINE, [0, 1], out=out)
    with pytest.raises((ValueError, BufferError, TypeError)):
        gpuops.gather(b"abc", [0, 1], out=b"xy")


@pytest.mark.parametrize("out", [[0.0, 0.0], (0, 0), 5, "ab", object()])
def test_out_must_be_an_array(gpuops, out):
    with pytest.raises(TypeError):
        gpuops.gather(LINE, [0, 1], out=out)


def test_out_must_not_be_a_scalar(gpuops):
    """A NumPy scalar has a buffer, but nobody would see what is written to it."""
    with pytest.raises(TypeError, match="output must be an array"):
        gpuops.gather(LINE, 1, out=np.float64(0))


class ResizesOnUse:
    """Indices, or an axis, that pull the memory away under another operand."""

    def __init__(self, victim, value):
        self.victim, self.value = victim, value

    def act(self):
        self.victim.resize(4, refcheck=False)
        return self.value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.act())

    def __index__(self):
        return self.act()


def test_operands_that_are_resized_by_the_arguments_after_them(gpuops):
    x = np.arange(1 << 20)
    with pytest.raises(IndexError, match=f"index {(1 << 20) - 1} is out of bounds .* size 4"):
        gpuops.gather(x, ResizesOnUse(x, [(1 << 20) - 1]))
    x = np.arange(1 << 20)
    with pytest.raises(IndexError, match="with size 4"):
        gpuops.gather(x, [1 << 19], axis=ResizesOnUse(x, 0))
    out = np.arange(1 << 20)
    with pytest.raises(ValueError, match="output array does not match"):
        gpuops.take(np.arange(5), np.zeros(1 << 20, int), ResizesOnUse(out, 0), out)


def test_out_may_not_overlap_itself(gpuops):
    memory = np.arange(4.0)
    for out in (
        np.lib.stride_tricks.as_strided(memory, (3,), (0,)),
        np.lib.stride_tricks.as_strided(memory, (3,), (4,)),
        np.broadcast_to(memory[:1], (3,)),
    ):
        with pytest.raises(ValueError):
            gpuops.gather(LINE, [0, 1, 2], out=out)
    assert memory.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_strides_that_interleave_are_no_overlap(gpuops):
    memory = np.zeros(8, np.int64)
    out = np.lib.stride_tricks.as_strided(memory, (2, 3), (24, 16))
    gpuops.gather(np.arange(1, 4), [[0, 1, 2], [2, 1, 0]], out=out)
    assert memory.tolist() == [1, 0, 2, 3, 3, 2, 0, 1]


def test_a_single_element_with_stride_zero_is_no_overlap(gpuops):
    memory = np.zeros(1)
    out = np.lib.stride_tricks.as_strided(memory, (1, 1), (0, 0))
    gpuops.gather(LINE, [[4]], out=out)
    assert memory[0] == 5.5


def test_zero_dimensional_out(gpuops):
    out = np.zeros(())
    assert gpuops.gather(LINE, 2, out=out) is out
    assert out == 3.5


def test_empty_out(gpuops):
    out = np.zeros((0, 3), np.int32)
    assert gpuops.gather(TABLE, [], out=out) is out
    out = Guarded((2, 0), "f8")
    with pytest.raises(IndexError, match="index 4 is out of bounds for axis 0 with size 4"):
        gpuops.gather(np.zeros((4, 0)), [0, 4], out=out.array)
    assert out.untouched()


def test_out_overlaps_x(gpuops):
    """As if x were copied first, whatever the direction of the overlap."""
    for length in (5, 1000, 100_000):
        for shift in (0, 1, 2):
            for backwards in (False, True):
                memory = np.arange(length + 2, dtype=np.int64)
                x = memory[:length]
                out = memory[shift : shift + length]
                indices = np.arange(length)[::-1] if backwards else np.roll(np.arange(length), 1)
                expected = x[indices]
                gpuops.gather(x, indices, out=out)
                assert (out == expected).all()


def test_out_overlaps_x_with_strides(gpuops):
    for axis in (0, 1):
        memory = np.arange(36).reshape(6, 6)
        indices = np.array([5, 0, 3, 1, 2, 4])
        expected = memory.take(indices, axis=axis)
        gpuops.gather(memory, indices, axis=axis, out=memory.T)
        assert (expected == memory.T).all()


def test_out_overlaps_the_indices(gpuops):
    x = np.arange(10, dtype=np.int64) * 3
    for shift in (0, 1, -1):
        memory = np.array([9, 1, 8, 2, 7, 3, 6, 4])
        indices = memory[1:7]
        out = memory[1 + shift : 7 + shift]
        expected = x[indices]
        gpuops.gather(x, indices, out=out)
        assert out.tolist() == expected.tolist()


def test_a_bad_index_in_an_overlapping_out_changes_nothing(gpuops):
    memory = np.array([0, 1, 2, 3, 99])
    for x, indices in ((memory, memory.copy()), (memory.copy(), memory)):
        with pytest.raises(IndexError, match="index 99 is out of bounds for axis 0 with size 5"):
            gpuops.gather(x, indices, out=memory)
        assert memory.tolist() == [0, 1, 2, 3, 99]


def test_every_small_overlap(gpuops):
    """Every pair of views of seven elements that NumPy's own overlap rule has to tell apart."""
    for length in (1, 2, 3):
        views = [
            (start, step)
            for start in range(7)
            for step in (-3, -2, -1, 1, 2, 3)
            if 0 <= start + step * (length - 1) < 7
        ]
        for x_start, x_step in views:
            for out_start, out_step in views:
                memory = np.arange(10, 17)
                x = np.array([memory[x_start + x_step * i] for i in range(length)])
                view = np.lib.stride_tricks.as_strided
                item = memory.itemsize
                odd_x = view(memory[x_start:], (length,), (item * x_step,))
                out = view(memory[out_start:], (length,), (item * out_step,))
                gpuops.gather(odd_x, np.arange(length)[::-1], out=out)
                assert out.tolist() == x[::-1].tolist()


# Any exporter of the buffer protocol is an array.


def test_array_array(gpuops):
    x = array.array("i", [1, 2, 3, 4])
    result = gpuops.gather(x, array.array("b", [3, -4]))
    assert type(result) is np.ndarray
    assert result.dtype == np.intc and result.tolist() == [4, 1]
    x.append(5)
    assert gpuops.gather(x, [-1]).tolist() == [5]


def test_bytes_and_bytearray(gpuops):
    assert gpuops.gather(b"hello", [4, 0]).tolist() == [ord("o"), ord("h")]
    assert gpuops.gather(b"hello", [4, 0]).dtype == np.uint8
    x = bytearray(b"hello")
    assert gpuops.gather(x, bytearray([1, 2])).tobytes() == b"el"
    x.append(0)


def test_memoryview(gpuops):
    view = memoryview(np.arange(12, dtype=np.int16).reshape(3, 4))
    assert gpuops.gather(view, [2]).tolist() == [[8, 9, 10, 11]]
    strided = memoryview(bytearray(range(20)))[::3]
    assert gpuops.gather(strided, [1, -1]).tolist() == [3, 18]
    backwards = memoryview(bytearray(range(20)))[::-1]
    assert gpuops.gather(backwards, [0, 5]).tolist() == [19, 14]
    assert gpuops.gather(LINE, memoryview(array.array("q", [4, 1]))).tolist() == [5.5, 2.5]


def test_mmap(gpuops):
    with mmap.mmap(-1, 4096) as memory:
        memory[100] = 42
        assert gpuops.gather(memory, [0, 100, 4095]).tolist() == [0, 42, 0]
        out = memoryview(memory)[8:11]
        gpuops.gather(b"xyz", [2, 1, 0], out=out)
        assert memory[8:11] == b"zyx"
        out.release()


class BitField(ctypes.Structure):
    _fields_ = [("low", ctypes.c_int, 3), ("high", ctypes.c_int, 5)]


class PointerOrNot(ctypes.Union):
    _fields_ = [("pointer", ctypes.POINTER(ctypes.c_int)), ("text", ctypes.c_char * 3)]


class FunctionOrNot(ctypes.Union):
    _fields_ = [("function", ctypes.CFUNCTYPE(None)), ("text", ctypes.c_char * 3)]


@pytest.mark.filterwarnings("ignore:A builtin ctypes object gave a PEP3118 format:RuntimeWarning")
@pytest.mark.parametrize("kind", [BitField, PointerOrNot, FunctionOrNot])
def test_buffers_that_numpy_has_no_dtype_for(gpuops, kind):
    with pytest.raises((TypeError, NotImplementedError)) as expected:
        np.asarray((kind * 2)())
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        gpuops.gather((kind * 2)(), [0])


def test_ctypes(gpuops):
    x = (ctypes.c_double * 3)(1.5, 2.5, 3.5)
    assert gpuops.gather(x, (ctypes.c_int * 2)(2, 0)).tolist() == [3.5, 1.5]


def test_out_may_be_a_buffer(gpuops):
    out = bytearray(b"....")
    assert gpuops.gather(b"abcdef", [5, 4, 3, 2], out=out) is out
    assert out == b"fedc"
    out.append(0)
    values = array.array("d", [0, 0])
    assert gpuops.gather(LINE, [4, 3], out=values) is values
    assert values.tolist() == [5.5, 4.5]
    values.append(1.0)


@pytest.mark.parametrize(
    "change",
    [{"indices": [99]}, {"axis": 9}, {"mode": "foo"}, {"indices": [0.5]}, {"device": "nowhere"}],
)
def test_buffers_are_released_after_errors(gpuops, change):
    x, indices, out = array.array("d", [1, 2]), array.array("q", [1]), bytearray(8)
    out = array.array("d", [0])
    arguments = {"indices": indices, **change}
    for _ in range(3):
        with pytest.raises((LookupError, ValueError, AxisError)):
            gpuops.gather(x, arguments["indices"], out=out, **{
                key: value for key, value in change.items() if key != "indices"
            })  # fmt: skip
    # None of these can grow while somebody holds its memory.
    x.append(3.0)
    indices.append(0)
    out.append(0.0)


def test_a_released_memoryview_is_refused(gpuops):
    view = memoryview(bytearray(4))
    view.release()
    with pytest.raises(ValueError):
        gpuops.gather(view, [0])
    with pytest.raises(ValueError):
        gpuops.gather(LINE, view)


def test_buffers_are_held_for_the_whole_call(gpuops):
    """While a call runs, the operand cannot be resized from another thread."""
    x = array.array("d", range(1000))
    refused = []
    stop = threading.Event()

    def grow():
        while not stop.is_set():
            try:
                x.append(0.0)
                x.pop()
            except BufferError:
                refused.append(1)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        indices = np.random.default_rng(0).integers(0, 1000, size=200_000)
        expected = np.arange(1000.0)[indices]
        for _ in range(20):
            assert (gpuops.gather(x, indices) == expected).all()
    finally:
        stop.set()
        thread.join()
    x.append(1.0)
