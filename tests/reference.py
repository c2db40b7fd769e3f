"""What NumPy answers to `gather`, `take` and `take_along_axis`: what the tests expect.

NumPy itself computes every value, and raises every error that it can. What it has no name for
(unsigned indices of 64 bits, `mode="fill"`) or takes hours for (wrapping an index of 2**63) is
first brought into a form that NumPy knows.
"""

import numpy as np


def out_of_bounds(indices, size):
    """Where an index lies outside an axis of `size`, negatives counting from the end."""
    if indices.dtype == np.uint64:
        return indices >= np.uint64(size)
    signed = indices.astype(np.int64)
    return (signed < -size) | (signed >= size)


def positions(indices, size, mode, axis):
    """Every index as a position that NumPy's indexing takes: int64, in C order.

    Raises the IndexError of `mode="raise"`. An index outside becomes 0 in `mode="fill"`.
    """
    indices = np.array(indices, order="C")
    bad = out_of_bounds(indices, size)
    if mode == "raise":
        if bad.any():
            first = indices[bad][0]
            raise IndexError(f"index {first} is out of bounds for axis {axis} with size {size}")
    elif mode == "fill":
        indices[bad] = 0
    elif mode == "wrap" and size:
        if indices.dtype == np.uint64:
            indices %= np.uint64(size)
        else:
            indices = indices.astype(np.int64) % size
    elif mode == "clip" and size:
        if indices.dtype == np.uint64:
            indices = np.minimum(indices, np.uint64(size - 1))
        else:
            indices = np.clip(indices.astype(np.int64), 0, size - 1)
    return indices.astype(np.int64)


def flattened(x, axis):
    """The array and the non-negative axis that a call with this `axis` looks at."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    if x.ndim == 0:
        x = x.reshape(1)
    if not -x.ndim <= axis < x.ndim:
        raise np.exceptions.AxisError(axis, x.ndim)
    return x, axis % x.ndim


def filled(result, where, x, fill_value):
    result = np.array(result)
    result[where] = np.zeros((), x.dtype) if fill_value is None else fill_value
    return result[()]


def gather(x, indices, axis=0, mode="raise", fill_value=None):
    """`x[indices]` along `axis`."""
    x, axis = flattened(x, axis)
    size = x.shape[axis]
    before = (slice(None),) * axis
    shape = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
    at = positions(indices, size, mode, axis)
    if mode == "raise":
        return x[(*before, at)]
    if mode == "fill":
        bad = out_of_bounds(indices, size)
        values = x.take(at, axis=axis) if size else np.zeros(shape, x.dtype)
        return filled(values, (*before, bad), x, fill_value)
    # NumPy wraps by adding the size until the index fits: for ever, if the size is 0.
    return x.take(at, axis=axis, mode=mode if size else "clip")


def take(a, indices, axis=None, mode="raise"):
    """`numpy.take`, for indices of any size."""
    x, axis = flattened(a, axis)
    size = x.shape[axis]
    # NumPy looks at no index where there is nothing before the axis to take from, and takes from an
    # empty axis where nothing comes of it.
    empty = 0 in x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
    if 0 in x.shape[:axis] or (size == 0 and not (empty and mode == "raise")):
        return x.take(np.zeros(indices.shape, np.int64), axis=axis, mode="clip")
    return x.take(positions(indices, size, mode, axis), axis=axis, mode=mode)


def take_along_axis(arr, indices, axis=-1, mode="raise", fill_value=None):
    """`numpy.take_along_axis`, with the modes of `gather`."""
    x = arr
    if axis is None:
        if indices.ndim != 1:
            raise ValueError("when axis=None, `indices` must have a single dimension.")
        x, axis = x.reshape(-1), 0
    if not -x.ndim <= axis < x.ndim:
        raise np.exceptions.AxisError(axis, x.ndim)
    axis %= x.ndim
    size = x.shape[axis]
    # The shape rules are NumPy's own: zeros stand in for the indices, and an axis of 1 for theirs.
    stretched = np.broadcast_to(np.zeros((), x.dtype), (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    shape = np.take_along_axis(stretched, np.zeros(indices.shape, np.int64), axis=axis).shape
    if 0 in shape:
        # NumPy looks at no index that has been broadcast away.
        return np.zeros(shape, x.dtype)
    at = positions(indices, size, mode, axis)
    if mode == "fill":
        bad = np.broadcast_to(out_of_bounds(indices, size), shape)
        values = np.take_along_axis(x, at, axis=axis) if size else np.zeros(shape, x.dtype)
        return filled(values, bad, x, fill_value)
    if size == 0:
        raise IndexError("cannot do a non-empty take from an empty axes.")
    return np.take_along_axis(x, at, axis=axis)
