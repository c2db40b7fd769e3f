"""Results of element-wise operators lie in memory as those of NumPy's functions: in K order."""

import numpy as np
import pytest

COUNTS = {"add": 2, "multiply": 2, "saxpy": 3, "sigmoid": 1, "sigmoid_backward": 2}
# Such as fit a slab, such as go up whole, and such as go in parts.
SIDES = {"few": 6, "some": 48, "many": 160}
CASES = {"few": 100, "some": 16, "many": 6}


@pytest.fixture(params=COUNTS)
def operator(request):
    return request.param


def layout_of(*operands):
    """The axes of NumPy's own result that tell of its layout, with their strides."""
    count = len(operands)
    flags = [["readonly"]] * count + [["writeonly", "allocate"]]
    iterator = np.nditer([*operands, None], ["buffered", "zerosize_ok"], flags)
    return strides_of(iterator.operands[-1])


def strides_of(array):
    """In elements; an axis of one element may have any, which says nothing."""
    if array.size == 0:
        return ()
    pairs = zip(array.shape, array.strides, strict=True)
    return tuple(0 if size == 1 else stride // array.itemsize for size, stride in pairs)


def random_operand(rng, shape, dtype):
    """An array that broadcasts to a shape, its axes in any order, with steps of any kind."""
    shape = tuple(1 if rng.random() < 0.15 else size for size in shape)
    if rng.random() < 0.2:
        shape = shape[rng.integers(len(shape) + 1) :]
    axes = rng.permutation(len(shape)) if rng.random() < 0.7 else range(len(shape))[::-1]
    steps = [int(rng.choice([1, 1, 1, 1, 2, -1])) for _ in axes]
    base = rng.integers(0, 20, [shape[axis] * abs(steps[axis]) for axis in axes]).astype(dtype)
    x = base.transpose(np.argsort(axes))[tuple(slice(None, None, step) for step in steps)]
    if rng.random() < 0.2 and x.ndim > 0:
        axis = rng.integers(x.ndim)
        one = np.take(x, [0], axis) if x.shape[axis] > 0 else x
        x = np.broadcast_to(one, x.shape)
    return x


@pytest.mark.parametrize("side", SIDES)
def test_random_layouts(gpuops, operator, side):
    """Whatever the strides are, of one dtype or of two; the result is that of copies in C order."""
    rng = np.random.default_rng(8)
    function, peer = getattr(gpuops, operator), getattr(np, operator, None)
    in_another_order = 0
    for case in range(CASES[side]):
        ndim = int(rng.integers(1, 5)) if side == "few" else 3
        least = {"few": 0, "some": 2, "many": SIDES[side] - 6}[side]
        shape = rng.integers(least, SIDES[side] + 1, ndim)
        others = ["f4"] if side == "many" else ["f4", "i2", "f8"]
        dtypes = ["f4" if case % 3 else rng.choice(others) for _ in range(COUNTS[operator])]
        operands = [random_operand(rng, shape, dtype) for dtype in dtypes]
        result = function(*operands)
        copies = [np.ascontiguousarray(x).reshape(x.shape) for x in operands]
        np.testing.assert_array_equal(result, function(*copies))
        if peer is not None:
            np.testing.assert_array_equal(result, peer(*operands), strict=True)
            assert strides_of(result) == strides_of(peer(*operands))
        assert strides_of(result) == layout_of(*operands)
        in_another_order += not result.flags.c_contiguous
    assert in_another_order >= max(CASES[side] // 8, 1)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_out_of_any_layout(gpuops, operator, side, dtype):
    """It stays the caller's, as it is; also where the result is cast to it."""
    rng = np.random.default_rng(9)
    function = getattr(gpuops, operator)
    for _ in range(max(CASES[side] // 4, 3)):
        shape = [SIDES[side]] * 3
        operands = [random_operand(rng, shape, "f4") for _ in range(COUNTS[operator])]
        expected = function(*[np.ascontiguousarray(x).reshape(x.shape) for x in operands])
        axes = rng.permutation(expected.ndim)
        sizes = [2 * expected.shape[axis] for axis in axes]
        every_second = (*(slice(rng.integers(2), None, 2) for _ in axes), ...)
        first = (*map(slice, expected.shape), ...)
        base = np.full(sizes, 7, dtype)
        out = base.transpose(np.argsort(axes))
        out = out[every_second if rng.random() < 0.5 else first]
        before = out.strides
        assert function(*operands, out=out) is out
        assert out.strides == before
        np.testing.assert_array_equal(out, expected.astype(dtype))
        out[...] = 7
        assert (base == 7).all()


def test_in_place_in_any_order(gpuops, operator):
    """Out is one of the operands, which all are in Fortran's order."""
    function, rng = getattr(gpuops, operator), np.random.default_rng(10)
    operands = [rng.random((30, 20), "f4").T for _ in range(COUNTS[operator])]
    for i in range(len(operands)):
        mine = [x.copy("K") for x in operands]
        expected = function(*mine)
        assert function(*mine, out=mine[i]) is mine[i]
        assert mine[i].flags.f_contiguous
        np.testing.assert_array_equal(mine[i], expected)


def test_operands_of_a_transposed_array_overlap_out(gpuops):
    """As if they had been copied first, though all of them are turned around."""
    x = np.arange(600, dtype="i4").reshape(20, 30)
    expected = x[:, :20] + x[:, :20].T
    gpuops.add(x[:, :20], x[:, :20].T, out=x[:, :20])
    np.testing.assert_array_equal(x[:, :20], expected)


def test_memory_that_is_kept_warm(gpuops):
    """Large results have theirs from the pool in any order."""
    x = np.ones((2048, 1025), "f8").T
    for _ in range(3):
        result = gpuops.add(x, x)
        assert result.flags.f_contiguous and result.flags.owndata and result.flags.writeable
        assert result.strides == x.strides and (result == 2).all()


def test_many_axes(gpuops):
    """Of 32, of which the last is the outermost in memory."""
    x = np.arange(2.0**5).reshape([2] * 5 + [1] * 27).T
    result = gpuops.add(x, x)
    assert strides_of(result) == strides_of(np.add(x, x)) == strides_of(x)
    np.testing.assert_array_equal(result, x + x)
