"""correlate and convolve as loops over NumPy arrays, with nothing of gpuops or SciPy in them.

Sums are taken in float64 over the weights in C order, each term with two roundings, which is the
order of SciPy's own loop: what is equal here is equal bit for bit.
"""

import numpy as np

MODES = ["reflect", "mirror", "nearest", "constant", "wrap"]
TINY = np.finfo(np.float64).eps  # SciPy leaves weights up to this out


def position(at, size, mode):
    """The position within `size` that stands for `at`; None: the constant."""
    if 0 <= at < size:
        return at
    if mode == "constant":
        return None
    if mode == "nearest":
        return 0 if at < 0 else size - 1
    if mode == "wrap":
        return at % size
    # One period of the reflection, position by position.
    there, back = list(range(size)), list(range(size - 1, -1, -1))
    period = there + back if mode == "reflect" else there + back[1:-1]
    return period[at % len(period)]


def extended(image, top, left, rows, columns, mode, cval):
    """So many rows and columns of the image and what lies beyond it, from above and left of it."""
    down = [position(y - top, image.shape[0], mode) for y in range(rows)]
    across = [position(x - left, image.shape[1], mode) for x in range(columns)]
    known = image[[y or 0 for y in down]][:, [x or 0 for x in across]]
    known[[y is None for y in down]] = cval
    known[:, [x is None for x in across]] = cval
    return known


def correlate_image(image, weights, mode, cval, origin, dtype=np.float64):
    image, weights = image.astype(dtype), weights.astype(dtype)
    total = np.zeros(image.shape, dtype)
    if image.size == 0:
        return total
    (height, width), (rows, columns) = image.shape, weights.shape
    top, left = (size // 2 + o for size, o in zip(weights.shape, origin, strict=True))
    around = extended(image, top, left, height + rows - 1, width + columns - 1, mode, cval)
    for (i, j), weight in np.ndenumerate(weights):
        if abs(weight) > TINY:
            total += weight * around[i : i + height, j : j + width]
    return total


def correlate(images, weights, mode="reflect", cval=0.0, origin=(0, 0)):
    """The sums in float64, of the last two axes of `images`."""
    images = np.asarray(images)
    weights = np.asarray(weights, np.float64)
    weights = weights.reshape(weights.shape[-2:])
    out = np.empty(images.shape)
    for at in np.ndindex(images.shape[:-2]):
        out[at] = correlate_image(images[at], weights, mode, cval, origin)
    return out


def convolve(images, weights, mode="reflect", cval=0.0, origin=(0, 0)):
    # result[y] is the sum over i of weights[i] * input[y - i + size // 2 + origin].
    weights = np.asarray(weights, np.float64)
    sizes = weights.shape[-2:]
    turned = [size - 1 - (size // 2 + o) - size // 2 for size, o in zip(sizes, origin, strict=True)]
    return correlate(images, weights[..., ::-1, ::-1], mode, cval, turned)


def as_dtype(sums, dtype):
    """What SciPy on x86 makes of sums in float64, also of those that do not fit."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return sums.astype(dtype)
    flat = [integer(float(value), dtype) for value in np.ravel(sums)]
    if dtype.kind == "b":
        return np.array([value % 256 != 0 for value in flat]).reshape(np.shape(sums))
    bits = 8 * dtype.itemsize
    unsigned = np.array([value % (1 << bits) for value in flat], f"u{dtype.itemsize}")
    return unsigned.view(dtype).reshape(np.shape(sums))


def integer(value, dtype):
    if dtype.kind in "ub" and not value > -1:
        return -integer(-value, dtype) if value == value else 1 << 63
    bits = 64 if dtype.itemsize >= 8 or dtype == np.uint32 else 32
    if value != value or not -(2.0 ** (bits - 1)) - 1 < value:
        return -(1 << (bits - 1))
    if int(min(value, 1e300)) < 1 << (bits - 1):
        return int(value)
    if dtype == np.uint64:
        return int(value) if value < 2.0**64 else 0
    return -(1 << (bits - 1))
