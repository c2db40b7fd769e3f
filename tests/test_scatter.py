"""scatter: `x[indices] = values` along an axis, in place, where the last write wins."""

import datetime
import warnings
from operator import setitem

import numpy as np
import pytest
from helpers import DTYPES, INDEX_DTYPES, Guarded, filled_array
from numpy.exceptions import AxisError

MODES = ["raise", "wrap", "clip", "fill"]
LAYOUTS = ["C", "F", "strided", "padded", "backward", "misaligned"]


def assigned(x, indices, values, axis=0):
    """What is to come of it: NumPy, index by index, in C order."""
    indices = np.asarray(indices)
    result = x.copy()
    if axis is None:
        flat, axis = result.reshape(-1), 0
    else:
        flat = result if x.ndim else result.reshape(1)
        axis %= flat.ndim
    before, behind = flat.shape[:axis], flat.shape[axis + 1 :]
    values = np.asarray(values)
    while values.ndim > len(before + indices.shape + behind):
        values = values[0]
    values = np.broadcast_to(values, before + indices.shape + behind)
    whole = (slice(None),) * axis
    for position in np.ndindex(indices.shape):
        flat[(*whole, int(indices[position]))] = values[whole + position]
    return flat.reshape(x.shape)


def check(gpuops, x, indices, values, axis=0, **options):
    if x.dtype.char in "gG":  # NumPy does not copy the bytes between two of them
        x, values = x.view(f"V{x.itemsize}"), np.asarray(values).view(f"V{x.itemsize}")
    expected = assigned(x, indices, values, axis)
    x = x.copy()
    assert gpuops.scatter(x, indices, values, axis=axis, **options) is None
    assert x.tobytes() == expected.tobytes()


# Literals.


def test_elements(gpuops):
    x = np.zeros(5, np.int32)
    assert gpuops.scatter(x, [3, 0, -1], [10, 20, 30]) is None
    assert x.tolist() == [20, 0, 0, 10, 30]


def test_the_last_of_several_wins(gpuops):
    x = np.zeros(4, np.int64)
    gpuops.scatter(x, [1, 3, 1, -3, 3, 1], [1, 2, 3, 4, 5, 6])
    assert x.tolist() == [0, 6, 0, 5]
    x = np.zeros(2, np.int64)
    gpuops.scatter(x, [[1, 0, 1], [0, 1, 0]], [[1, 2, 3], [4, 5, 6]])
    assert x.tolist() == [6, 5]


def test_rows_and_columns(gpuops):
    x = np.zeros((3, 2), np.int16)
    gpuops.scatter(x, [2, 0], np.array([[1, 2], [3, 4]], np.int16))
    assert x.tolist() == [[3, 4], [0, 0], [1, 2]]
    gpuops.scatter(x, [1], np.array([[7], [8], [9]], np.int16), axis=1)
    assert x.tolist() == [[3, 7], [0, 8], [1, 9]]
    gpuops.scatter(x, 0, np.array([5, 6, 7], np.int16), axis=-1)
    assert x.tolist() == [[5, 7], [6, 8], [7, 9]]


def test_values_are_broadcast(gpuops):
    x = np.zeros((3, 2))
    gpuops.scatter(x, [0, 2], 7)
    assert x.tolist() == [[7, 7], [0, 0], [7, 7]]
    gpuops.scatter(x, [1, 2], [1.5, 2.5])
    assert x.tolist() == [[7, 7], [1.5, 2.5], [1.5, 2.5]]
    gpuops.scatter(x, [0, 1], [[3], [4]])
    assert x.tolist() == [[3, 3], [4, 4], [1.5, 2.5]]
    gpuops.scatter(x, [0], np.full((1, 1, 1, 2), 9.0))
    assert x.tolist() == [[9, 9], [4, 4], [1.5, 2.5]]


def test_no_axis_means_flattened_and_in_place(gpuops):
    x = np.zeros((2, 3), np.int32)
    gpuops.scatter(x, [5, 0, -2], [1, 2, 3], axis=None)
    assert x.tolist() == [[2, 0, 0], [0, 3, 1]]
    memory = np.zeros((4, 6), np.int32)
    gpuops.scatter(memory[::2, ::2].T, [[5, 1], [0, 2]], [[1, 2], [3, 4]], axis=None)
    assert memory[::2, ::2].tolist() == [[3, 4, 0], [2, 0, 1]]
    assert memory.sum() == 10


def test_zero_dimensions(gpuops):
    x = np.array(1.0)
    gpuops.scatter(x, 0, 2)
    assert x == 2
    gpuops.scatter(x, [-1, 0], [3, 4], axis=None)
    assert x == 4
    y = np.arange(3)
    gpuops.scatter(y, 1, 9)
    assert y.tolist() == [0, 9, 2]


def test_wrap_and_clip(gpuops):
    x = np.zeros(4, np.int8)
    gpuops.scatter(x, [4, -5, 6], np.array([1, 2, 3], np.int8), mode="wrap")
    assert x.tolist() == [1, 0, 3, 2]
    gpuops.scatter(x, [9, -1, 1], np.array([7, 8, 9], np.int8), mode="clip")
    assert x.tolist() == [8, 9, 3, 7]


def test_fill_leaves_out_what_is_outside(gpuops):
    x = np.arange(4)
    gpuops.scatter(x, [4, -5, 1, -1, 2**40], [10, 11, 12, 13, 14], mode="fill")
    assert x.tolist() == [0, 12, 2, 13]
    table = np.zeros((2, 3))
    gpuops.scatter(table, [[2, -3]], 1, mode="fill")
    assert not table.any()


def test_empty_calls(gpuops):
    x = np.arange(3)
    gpuops.scatter(x, [], [])
    gpuops.scatter(x, np.zeros((0, 2), int), 5)
    assert x.tolist() == [0, 1, 2]
    empty = np.zeros((0, 3))
    gpuops.scatter(empty, [], np.zeros((0, 3)))
    gpuops.scatter(empty, [], 1, mode="clip")
    gpuops.scatter(empty, [1, 2], 1, axis=1)


# Errors, which leave x as it was.


@pytest.mark.parametrize("count", [1, 50, 3000, 20_000])
@pytest.mark.parametrize("width", [1, 3, 40])
def test_a_bad_index_changes_nothing(gpuops, count, width):
    x = Guarded((7, width), np.float32)
    indices = np.arange(count) % 7
    for bad in (7, -8, 2**62):
        for position in {0, count // 2, count - 1}:
            wrong = indices.copy()
            wrong[position] = bad
            with pytest.raises(IndexError) as caught:
                gpuops.scatter(x.array, wrong, np.ones((count, width), np.float32))
            assert str(caught.value) == f"index {bad} is out of bounds for axis 0 with size 7"
            assert x.untouched()
            with pytest.raises(IndexError):
                gpuops.scatter(x.array, wrong, 1)
            assert x.untouched()
    gpuops.scatter(x.array, indices, 1)
    assert (x.array[: min(count, 7)] == 1).all() and x.kept_to_its_own()


def test_the_first_bad_index_among_many_is_named(gpuops):
    """Of bad ones in the share of every thread of every backend."""
    x = np.zeros(3, np.int8)
    indices = np.zeros(1_000_000, np.int32)
    indices[123_457::1000] = np.arange(1000, 1000 + len(indices[123_457::1000]))
    for name in ("scatter", "scatter_add"):
        with pytest.raises(IndexError) as caught:
            getattr(gpuops, name)(x, indices, 1)
        assert str(caught.value) == "index 1000 is out of bounds for axis 0 with size 3"
        assert not x.any()


def test_the_first_bad_index_is_named(gpuops):
    x = np.zeros((3, 5000), np.uint8)
    indices = np.arange(4000, dtype=np.uint64)
    indices[[1234, 3999]] = [2**63 + 5, 6000]
    with pytest.raises(IndexError) as caught:
        gpuops.scatter(x, indices, np.uint8(1), axis=1)
    text = "index 9223372036854775813 is out of bounds for axis 1 with size 5000"
    assert str(caught.value) == text
    assert not x.any()


def test_nothing_to_write_to(gpuops):
    x = np.zeros((0, 2))
    with pytest.raises(IndexError, match="index 0 is out of bounds for axis 0 with size 0"):
        gpuops.scatter(x, [0], 1)
    with pytest.raises(IndexError, match="index 5 is out of bounds for axis 0 with size 3"):
        gpuops.scatter(np.zeros((3, 0)), [5], 1)
    for mode in ("wrap", "clip"):
        with pytest.raises(IndexError, match="cannot replace elements of an empty array"):
            gpuops.scatter(x, [0], 1, mode=mode)
    gpuops.scatter(x, [0], 1, mode="fill")


def test_values_of_another_shape(gpuops):
    x = Guarded((5, 3), np.float64)
    for indices, values, axis in [
        ([0, 1], np.ones(2), 0),
        ([0, 1], np.ones((3, 3)), 0),
        ([[0, 1]], np.ones((2, 1, 1, 3)), 0),
        ([0], np.ones((5, 2)), 1),
        ([0, 1], np.ones(3), None),
    ]:
        with pytest.raises(ValueError) as caught:
            gpuops.scatter(x.array, indices, values, axis=axis)
        key = (slice(None),) * (axis or 0) + (np.array(indices),)
        with pytest.raises(ValueError) as expected:
            (x.array.reshape(-1) if axis is None else x.array)[key] = values
        text = str(caught.value)
        assert text == str(expected.value).replace("  could", " could"), text
    assert x.untouched()


@pytest.mark.parametrize(
    "dtype, values",
    [
        ("i4", 1.5),
        ("i4", np.array([1.5])),
        ("i8", np.array([1j])),
        ("f4", np.array([1j])),
        ("f8", 1j),
        ("u1", np.array([1])),
        ("u8", np.array([1], "i1")),
        ("?", np.array([1])),
        ("?", 1),
        ("V3", np.zeros(1)),
        ("f8", np.zeros(1, "V8")),
        ("M8[s]", np.zeros(1, "m8[s]")),
        ("S3", np.array(["a"])),
        ("U3", None),
        ("m8[s]", [2.5]),
    ],
)
def test_values_that_do_not_cast(gpuops, dtype, values):
    x = Guarded((5,), dtype)
    with pytest.raises(TypeError, match="values|cast"):
        gpuops.scatter(x.array, [0], values)
    assert x.untouched()


@pytest.mark.parametrize(
    "dtype, values",
    [
        ("f4", np.array([1.1, 2.2])),
        ("f2", np.array([1.1, 70000.0])),
        ("i1", np.array([1000, -3], "i8")),
        ("i8", np.array([1, 200], "u1")),
        ("f8", np.array([1, 2], "u8")),
        ("c8", np.array([1, 2.5])),
        ("u4", np.array([True, False])),
        ("c16", 2),
        ("f4", 0.1),
        ("u1", 200),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_values_are_cast(gpuops, dtype, values):
    x = np.zeros(5, dtype)
    gpuops.scatter(x, [3, 1], values)
    expected = np.zeros(5, dtype)
    expected[[3, 1]] = values
    assert x.tobytes() == expected.tobytes()


PAIR = np.dtype([("a", "i4"), ("b", "f4")])
MOVED = [
    *["M8[D]", "M8[s]", "M8[ms]", "m8[D]", "m8[s]", "m8[Y]", "U2", "U4", "S2", "S4", "V4", "V8"],
    *[PAIR, [("a", "i8"), ("b", "f8")], [("b", "f4"), ("a", "i4")], "U2, M8[s]", "U4, M8[D]"],
    *["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "g"],
]
OTHERS = ["?", "i8", "u2", "f2", "f8", "c16", "bfloat16", ">M8[s]", ">U4"]


def as_dtype(name):
    if isinstance(name, str) and name.endswith(("int4", "float16", "fn", "m2", "fnuz")):
        return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    return np.dtype(name)


def elements(dtype):
    """Two elements: made of numbers, wherever that is possible."""
    result = np.zeros(2, dtype)
    if dtype.names is not None:
        for name in dtype.names:
            result[name] = elements(dtype[name])
    elif dtype.type is np.void:
        result[...] = [b"12", b"34"]
    else:
        result[...] = np.array([1, 2]).astype(dtype)
    return result


def outcome(assign, values, x):
    """What becomes of x, or the error; a longdouble has bytes that mean nothing."""
    try:
        assign(x, [3, 1], values)
    except Exception as error:
        return error
    return str(x) if x.dtype.char == "g" else x.tobytes()


def refuse(x, indices, values):
    raise TypeError


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
def test_what_is_only_moved_is_cast_by_numpy(gpuops, device, dtype):
    """Where 'same_kind' allows it, an assignment's result or its error; else TypeError."""
    dtype, refused = as_dtype(dtype), 0
    for other in [*MOVED, *OTHERS]:
        other = as_dtype(other)
        values = elements(other)
        for x_dtype, given in ((dtype, values), (dtype, values[0]), (other, elements(dtype))):
            if device.fake and x_dtype.char == "g" and given.ndim == 0:
                continue  # which takes for addresses what is in the bytes that mean nothing
            foreign = not (x_dtype.isnative and given.dtype.isnative)
            casts = np.can_cast(given.dtype, x_dtype, "same_kind") and not foreign
            expected = outcome(setitem if casts else refuse, given, np.zeros(5, x_dtype))
            result = outcome(gpuops.scatter, given, np.zeros(5, x_dtype))
            if isinstance(expected, Exception):
                assert type(result) is type(expected), (x_dtype, given.dtype, result)
                refused += 1
            else:
                assert result == expected, (x_dtype, given.dtype, result)
            if foreign:
                assert "byte order" in str(result)
            elif not casts:
                assert repr(x_dtype) in str(result) and repr(given.dtype) in str(result)
    assert 0 < refused < 3 * len(MOVED + OTHERS)


PYTHON_SCALARS = [
    *[0, 1, -2, True, 1.5, -0.1, float("nan"), 2j, "7", "text", "2020-02-03", b"x", b"xyz"],
    *[datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3), datetime.timedelta(3), 10**30],
]


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_python_scalars_are_read_as_in_an_assignment(gpuops, dtype):
    dtype, taken = as_dtype(dtype), 0
    for value in PYTHON_SCALARS:
        is_time = isinstance(value, (datetime.date, datetime.timedelta))
        assign = refuse if is_time and dtype.kind not in "mM" else setitem
        expected = outcome(assign, value, np.zeros(5, dtype))
        result = outcome(gpuops.scatter, value, np.zeros(5, dtype))
        if isinstance(expected, Exception):
            assert type(result) is type(expected), (value, result, expected)
        else:
            assert result == expected, (value, result)
            taken += 1
    assert taken > 1


def test_casts_of_what_is_only_moved(gpuops):
    x = np.zeros(4, "M8[s]")
    gpuops.scatter(x, [2, 0, 2], np.array(["1970-01-02", "1970-01-03", "1970-01-04"], "M8[D]"))
    assert x.astype(int).tolist() == [172800, 0, 259200, 0]
    gpuops.scatter(x, [], [])
    gpuops.scatter(x, [[0]], datetime.date(1970, 1, 2))
    gpuops.scatter(x, 1, None)
    assert x.astype(int).tolist() == [86400, np.iinfo(np.int64).min, 259200, 0]
    texts = np.array([["one", "two"], ["three", "four"]])
    gpuops.scatter(texts[:, ::-1], [[1, 0]], np.array(["a", "longer than that"]), axis=None)
    assert texts.tolist() == [["a", "longe"], ["three", "four"]]
    # Values that share memory with x are cast before any is written.
    x = np.array([1, 2, 3, 4], "M8[s]")
    gpuops.scatter(x, [1, 2, 3], x[:3].view("M8[m]"))
    assert x.astype(int).tolist() == [1, 60, 120, 180]
    with pytest.raises(ValueError, match="shape mismatch"):
        gpuops.scatter(x, [0, 1, 2], np.zeros(2, "M8[D]"))
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        gpuops.scatter(x, [4], "2020")


def test_other_errors(gpuops):
    x = Guarded((3, 3), np.int64)
    for error, match, call in [
        (TypeError, "mask", lambda: gpuops.scatter(x.array, [True, False, True], 1)),
        (IndexError, "integer", lambda: gpuops.scatter(x.array, [0.5], 1)),
        (AxisError, "axis 2", lambda: gpuops.scatter(x.array, [0], 1, axis=2)),
        (AxisError, "axis -3", lambda: gpuops.scatter(x.array, [0], 1, axis=-3)),
        (ValueError, "mode", lambda: gpuops.scatter(x.array, [0], 1, mode="drop")),
        (TypeError, "values", lambda: gpuops.scatter(x.array, [0])),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert x.untouched()
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only|writ"):
        gpuops.scatter(fixed, [0], 1)
    with pytest.raises((TypeError, ValueError)):
        gpuops.scatter([1, 2, 3], [0], 1)
    with pytest.raises(ValueError, match="overlap|memory"):
        gpuops.scatter(np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)), [0], 1)


# NumPy as the expectation.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(gpuops, dtype):
    for shape, axis in [((6, 5), 0), ((6, 5), 1), ((2, 3, 4), 1), ((6, 5), None)]:
        x, indices = filled_array(shape, dtype), np.array([[0, 2, 1], [-1, 0, 2]])
        counts = (shape[axis],) if axis is not None else ()
        other = tuple(shape[:axis] if axis else ()) + indices.shape
        other += shape[axis + 1 :] if counts else ()
        check(gpuops, x, indices, filled_array(other, dtype, seed=1), axis)
        check(gpuops, x, indices, filled_array((), dtype, seed=2), axis)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_ml_dtypes(gpuops, name):
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    for count in (4, 3000):
        x = (np.arange(12) % 7).astype(dtype).reshape(6, 2)
        indices = np.arange(count) % 5
        values = (np.arange(2 * count) % 6).astype(dtype).reshape(count, 2)
        expected = assigned(x, indices, values)
        assert gpuops.scatter(x, indices, values) is None
        assert x.tobytes() == expected.tobytes()
        gpuops.scatter(x, [5, 0], values[3, 1])
        assert x.astype(float)[[0, 5]].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    if name.startswith("float8"):
        with pytest.raises(TypeError, match=f"x has dtype {name}$"):
            gpuops.scatter_add(x, [0], 1)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_every_index_dtype(gpuops, index_dtype, mode):
    info = np.iinfo(index_dtype)
    indices = np.array([0, 3, 2, 3, info.max, info.min], index_dtype)
    size = 5
    places = [int(index) for index in indices]
    if mode == "raise":
        indices, places = indices[:4], places[:4]
    elif mode == "wrap":
        places = [place % size for place in places]
    elif mode == "clip":
        places = [min(max(place, 0), size - 1) for place in places]
    values = np.arange(1.0, len(indices) + 1)
    kept = [i for i, place in enumerate(places) if mode != "fill" or -size <= place < size]
    x = np.zeros(size)
    gpuops.scatter(x, indices, values, mode=mode)
    assert x.tolist() == assigned(np.zeros(size), [places[i] for i in kept], values[kept]).tolist()


@pytest.mark.parametrize("dtype", ["u1", "f4", "V12", "c16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(gpuops, layout, dtype):
    for shape, axis in [((7, 4), 0), ((7, 4), 1), ((3, 4, 5), 1), ((7, 4), None)]:
        x = Guarded(shape, dtype, layout)
        indices = Guarded((2, 3), np.int32, layout)
        indices.array[...] = [[1, 0, 3], [-1, 1, 0]]
        whole = () if axis is None else shape
        counts = (*whole[: axis or 0], 2, 3, *(whole[axis + 1 :] if whole else ()))
        values = Guarded(counts, dtype, layout)
        values.array[...] = filled_array(counts, dtype)
        expected = assigned(x.array.copy(), indices.array, values.array, axis)
        gpuops.scatter(x.array, indices.array, values.array, axis=axis)
        assert x.array.tobytes() == expected.tobytes()
        one = filled_array((), dtype, seed=1)
        expected = assigned(expected, indices.array, one, axis)
        gpuops.scatter(x.array, indices.array, one, axis=axis)
        assert x.array.tobytes() == expected.tobytes()
        assert x.kept_to_its_own()


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 33, 64])
def test_rows_of_every_width(gpuops, width):
    for count in (5, 700):
        x = filled_array((97, width), "u1")
        indices = np.random.default_rng(count).integers(-97, 97, count)
        check(gpuops, x, indices, filled_array((count, width), "u1", seed=1))
        check(gpuops, x[:, 1:], indices, filled_array((count, width - 1), "u1", seed=1))


# Counts and sizes that lead to the different kernels: few indices, many into a table about as
# large, and many into one that is far larger; and one index of a long row.
@pytest.mark.parametrize(
    "count, size, width",
    [
        (1000, 30, 1),
        (1024, 5000, 1),
        (1025, 40, 1),
        (5000, 1, 1),
        (5000, 700, 3),
        (5000, 6000, 1),
        (20_000, 5000, 1),
        (20_000, 15_000, 1),
        (5000, 100_000, 1),
        (3000, 90_000, 2),
        (1, 4, 40_000),
        (2, 4, 40_000),
        (3000, 20, 16),
    ],
)
@pytest.mark.parametrize("index_dtype", ["i8", "u4"])
def test_many_writes_to_few_places(gpuops, count, size, width, index_dtype):
    random = np.random.default_rng([count, size, width])
    x = random.random((size, width), np.float32)
    # Half of the indices are among a few, which most of the others meet nowhere.
    indices = random.integers(0, size, count)
    indices[::2] = random.integers(0, min(size, 10), len(indices[::2]))
    values = random.random((count, width), np.float32)
    expected = x.copy()
    last = {int(place): number for number, place in enumerate(indices)}
    for place, number in last.items():
        expected[place] = values[number]
    for given in (indices, indices - size) if index_dtype == "i8" else (indices,):
        result = x.copy()
        gpuops.scatter(result, given.astype(index_dtype), values)
        assert result.tobytes() == expected.tobytes()
    result = x.copy()
    gpuops.scatter(result, indices, 5)
    expected[list(last)] = 5
    assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("count, size", [(20_000, 5000), (20_000, 15_000), (8000, 300_000)])
def test_many_elements_of_every_width(gpuops, count, size, dtype):
    random = np.random.default_rng(count + size)
    indices = random.integers(-2 * size, 2 * size, count)
    indices[::2] = random.integers(0, 50, len(indices[::2]))
    values = random.integers(0, 250, count).astype(dtype)
    for mode, kept, places in (
        ("fill", np.abs(2 * indices + 1) < 2 * size, indices),
        ("wrap", np.ones(count, bool), indices % size),
        ("clip", np.ones(count, bool), np.clip(indices, 0, size - 1)),
    ):
        for given in (values, values[:1]):
            x = (np.arange(size) % 99).astype(dtype)
            expected = assigned(x, places[kept], np.broadcast_to(given, count)[kept])
            gpuops.scatter(x, indices, given, mode=mode)
            assert x.tobytes() == expected.tobytes()


def test_dropped_writes_do_not_hide_others(gpuops):
    for size in (50, 60_000):
        indices = np.arange(4000) % (2 * size)
        values = np.arange(4000.0)
        x = np.zeros(size)
        gpuops.scatter(x, indices, values, mode="fill")
        kept = indices < size
        assert x.tobytes() == assigned(np.zeros(size), indices[kept], values[kept]).tobytes()


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(gpuops, seed):
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 7, random.integers(1, 5)))
    axis = [None, *range(-len(shape), len(shape))][random.integers(2 * len(shape) + 1)]
    size = int(np.prod(shape)) if axis is None else shape[axis]
    indices = random.integers(-size, size, tuple(random.integers(1, 6, random.integers(0, 4))))
    if axis is None:
        target = indices.shape
    else:
        place = axis % len(shape)
        target = shape[:place] + indices.shape + shape[place + 1 :]
    values = random.random(target)
    for i in range(values.ndim):
        if random.random() < 0.2:
            values = values.take([0], i)
    if random.random() < 0.3:
        values = np.asfortranarray(values)
    if random.random() < 0.3:
        indices = indices.T.copy().T
    check(gpuops, random.random(shape), indices, values, axis)


def test_operands_that_overlap_count_as_copied(gpuops):
    x = np.arange(6)
    gpuops.scatter(x, [0, 1, 2, 3, 4], x[1:])
    assert x.tolist() == [1, 2, 3, 4, 5, 5]
    x = np.arange(6)
    gpuops.scatter(x, [1, 2, 3, 4, 5], x[:-1])
    assert x.tolist() == [0, 0, 1, 2, 3, 4]
    x = np.arange(6)
    gpuops.scatter(x, x[::-1], x)
    assert x.tolist() == [5, 4, 3, 2, 1, 0]
    x = np.arange(5000)
    gpuops.scatter(x, x[::-1], x)
    assert x.tolist() == list(range(4999, -1, -1))


def test_buffers(gpuops):
    x = bytearray(b"abcdef")
    gpuops.scatter(x, [5, 0], np.frombuffer(b"xy", np.uint8))
    assert x == b"ybcdex"


# Arrays on a GPU.


@pytest.fixture
def on_gpu(gpu):
    yield gpu
    gpu.gpuops.synchronize()


SIZES = [(4, 9), (1500, 9), (1500, 40_000)]


@pytest.mark.parametrize("count, size", SIZES)
def test_arrays_on_the_device(on_gpu, count, size):
    gpuops = on_gpu.gpuops
    random = np.random.default_rng(count)
    x = random.random((size, 3))
    indices, values = random.integers(0, size, count), random.random((count, 3))
    expected = assigned(x, indices, values)
    for where in (np.asarray, gpuops.to_device):
        for bring in (np.asarray, gpuops.to_device):
            array = gpuops.to_device(x)
            assert gpuops.scatter(array, where(indices), bring(values)) is None
            assert array.to_host().tobytes() == expected.tobytes()
    array = gpuops.to_device(x)
    gpuops.scatter(array[::-1], gpuops.to_device(indices), gpuops.to_device(values))
    assert array.to_host().tobytes() == assigned(x[::-1], indices, values)[::-1].tobytes()
    gpuops.scatter(array, indices, 4)
    assert (array.to_host()[indices] == 4).all()
    narrow = gpuops.to_device(values.astype(np.float32))
    gpuops.scatter(array, indices, narrow)
    wide = values.astype(np.float32).astype(np.float64)
    assert (array.to_host()[indices] == assigned(x, indices, wide)[indices]).all()


@pytest.mark.parametrize("count, size", SIZES)
@pytest.mark.parametrize("scheduler", ["now", "lazy", "shuffled"])
def test_a_late_bad_index_leaves_x_alone(on_gpu, count, size, scheduler):
    gpuops = on_gpu.gpuops
    if on_gpu.fake is not None:
        on_gpu.fake.set_scheduler(scheduler, 3)
    x = np.arange(float(size))
    array, values = gpuops.to_device(x), gpuops.to_device(np.ones(count))
    wrong = np.arange(count) % size
    wrong[count // 2] = size
    right = np.arange(count) % size
    wrong, right = gpuops.to_device(wrong), gpuops.to_device(right)
    gpuops.scatter(array, wrong, values)
    # A bad index that nobody has been told of yet is no concern of the calls after it, and neither
    # is a good call before it.
    other = gpuops.to_device(x)
    gpuops.scatter(other, right, values)
    gpuops.scatter(array, wrong, values)
    with pytest.raises(IndexError, match="found by an earlier scatter on this stream"):
        gpuops.synchronize()
    assert array.to_host().tobytes() == x.tobytes()
    assert other.to_host().tobytes() == assigned(x, right.to_host(), np.ones(count)).tobytes()


def test_a_graph_is_as_good_as_its_indices(on_gpu):
    """Work that was captured runs again, on other indices, and each time for itself."""
    if on_gpu.fake is None:
        pytest.skip("test_libraries.py makes graphs")
    gpuops = on_gpu.gpuops
    stream = gpuops.Stream()
    x = gpuops.to_device(np.zeros(3000))
    indices, values = gpuops.to_device(np.arange(2000)), gpuops.to_device(np.ones(2000))
    stream.wait(gpuops.current_stream()) if hasattr(stream, "wait") else gpuops.synchronize()
    on_gpu.fake.set_capturing(stream.ptr, True)
    gpuops.scatter(x, indices, values, stream=stream)
    gpuops.scatter(x, indices, 2, stream=stream)
    on_gpu.fake.set_capturing(stream.ptr, False)
    stream.synchronize()
    assert x.to_host().sum() == 4000


def test_what_is_only_moved_is_not_cast_on_the_device(on_gpu):
    gpuops = on_gpu.gpuops
    x, days = np.zeros(3, "M8[s]"), np.ones(1, "M8[D]")
    array = gpuops.to_device(x)
    for target, values in ((array, days), (array, gpuops.to_device(days)), (array, 1)):
        with pytest.raises(TypeError, match="on a GPU.*pass values of the dtype of x") as caught:
            gpuops.scatter(target, [0], values)
        assert repr(x.dtype) in str(caught.value)
    gpuops.scatter(array, [0], days.astype(x.dtype))
    assert array.to_host().astype(int).tolist() == [86400, 0, 0]


def test_x_has_to_be_on_the_device_of_the_others(on_gpu):
    gpuops = on_gpu.gpuops
    x = np.zeros(3)
    with pytest.raises((TypeError, ValueError)):
        gpuops.scatter(x, gpuops.to_device([0]), 1)
    assert not x.any()


def test_a_target_that_moves_when_a_cast_warns(gpuops, monkeypatch):
    """Whoever shows warnings can give the array other memory, which is then the one to write to."""
    count = 1 << 16
    x, others = np.zeros(count, np.float16), []

    def shows(*arguments, **options):
        x.resize(count * 64, refcheck=False)
        x.resize(count, refcheck=False)
        others.append(np.full(count, 7, np.float16))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", shows)
        gpuops.scatter(x, np.arange(count), np.full(count, 1e6))
    assert others and all((other == 7).all() for other in others)
    assert np.isinf(x).all()


@pytest.mark.parametrize("count", [3, 30_000])
def test_an_empty_axis_has_no_places(gpuops, count):
    for dtype in ("f2", "f4", "i8"):
        with pytest.raises(IndexError):
            gpuops.scatter(np.zeros(0, dtype), np.zeros(count, int), np.ones(count, dtype))
