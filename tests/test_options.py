"""Options of operators that are refused, each with the exception and the words that say why."""

import numpy as np
import pytest

X = np.arange(12.0).reshape(3, 4)
IMAGES = np.ones((2, 5, 5))
WEIGHTS = np.ones((3, 3))


def test_mode_none_is_raise(gpuops):
    """As in numpy.take."""
    np.testing.assert_array_equal(gpuops.take(X, [1, 0], 0, mode=None), X.take([1, 0], 0))
    with pytest.raises(IndexError, match="index 3 is out of bounds for axis 0 with size 3"):
        gpuops.take(X, [3], 0, mode=None)


def test_an_index_that_no_integer_dtype_holds(gpuops):
    with pytest.raises(IndexError, match="cannot fit 'int' into an index-sized integer"):
        gpuops.gather(X, 2**70)


@pytest.mark.parametrize("axis", [2**31, -(2**31) - 1, 2**40])
def test_an_axis_that_no_int_holds(gpuops, axis):
    with pytest.raises(ValueError, match="axis is out of bounds"):
        gpuops.gather(X, [0], axis=axis)


@pytest.mark.parametrize("flag", [1, None, "True", np.True_])
def test_a_flag_is_a_bool(gpuops, flag):
    with pytest.raises(TypeError, match="deterministic must be True or False, not "):
        gpuops.scatter_add(X.copy(), [0], 1, deterministic=flag)


@pytest.mark.parametrize("origin", [2**31, -(2**31) - 1, (0, 2**40)])
def test_an_origin_beyond_any_weights(gpuops, origin):
    with pytest.raises(ValueError, match="invalid origin: -?[0-9]+ is not within any weights"):
        gpuops.correlate(X, WEIGHTS, origin=origin)


@pytest.mark.parametrize("count", [0, 65])
def test_as_many_origins_as_no_array_has_axes(gpuops, count):
    with pytest.raises(ValueError, match=f"a sequence of one for each axis, and has {count}"):
        gpuops.correlate(X, WEIGHTS, origin=[0] * count)


def test_an_origin_of_an_axis_that_is_not_filtered(gpuops):
    result = gpuops.correlate(IMAGES, WEIGHTS, origin=[0, 1, 0])
    np.testing.assert_array_equal(result, np.full(IMAGES.shape, 9.0))
    with pytest.raises(ValueError, match="the axes before the last two are not filtered"):
        gpuops.correlate(IMAGES, WEIGHTS, origin=[1, 0, 0])


class Liar:
    """A sequence that has fewer elements than it says."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        if self.error is OSError:
            raise OSError("no length")
        return 2

    def __getitem__(self, position):
        raise self.error("no element")


@pytest.mark.parametrize("error", [IndexError, KeyError, OSError])
def test_an_origin_that_fails(gpuops, error):
    with pytest.raises(error, match="no "):
        gpuops.correlate(X, WEIGHTS, origin=Liar(error))
