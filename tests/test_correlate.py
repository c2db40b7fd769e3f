"""correlate: `scipy.ndimage.correlate` of images. What it shares with convolve is tested here."""

import numpy as np
import pytest
import reference_filters as reference
from helpers import Guarded, photograph, read_only, same
from reference_filters import MODES

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

INTEGERS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"]
IMAGE = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
BOTH = ["correlate", "convolve"]


def random_image(shape, dtype, seed=0):
    generator = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        most = min(np.iinfo(dtype).max, 1 << 20)
        return generator.integers(most // -2 if dtype.kind == "i" else 0, most, shape).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    return generator.standard_normal(shape).astype(dtype)


def random_weights(shape, seed=0):
    return np.random.default_rng(seed + 1).standard_normal(shape).round(3)


def check(result, image, weights, dtype=None, name="correlate", **options):
    """Against the reference: bit for bit where the sums are taken in float64."""
    dtype = np.dtype(dtype or image.dtype)
    sums = getattr(reference, name)(image, weights, **options)
    assert result.shape == image.shape and result.dtype == dtype
    short = [np.dtype(one) in (np.float16, np.float32) for one in (image.dtype, dtype)]
    if all(short):
        # Of n terms in float32, and of the one rounding to the result.
        options["cval"] = abs(options.get("cval", 0.0))
        terms = getattr(reference, name)(np.abs(image), np.abs(weights), **options)
        error = np.abs(result.astype(np.float64) - sums)
        bound = 2.0**-22 * np.sqrt(weights.size) + np.finfo(dtype).eps / 2
        assert (error <= bound * terms + np.finfo(dtype).smallest_subnormal).all()
    else:
        same(result, reference.as_dtype(sums, dtype))


# Literals.


@pytest.mark.parametrize(
    "mode, extended",
    [
        ("reflect", "2 1 1 2 3 4 4 3"),
        ("mirror", "3 2 1 2 3 4 3 2"),
        ("nearest", "1 1 1 2 3 4 4 4"),
        ("constant", "9 9 1 2 3 4 9 9"),
        ("wrap", "3 4 1 2 3 4 1 2"),
    ],
)
def test_what_is_beyond_the_border(gpuops, mode, extended):
    extended = [int(value) for value in extended.split()]
    line = np.array([[1, 2, 3, 4]])
    for step in range(5):
        weights = np.zeros((1, 5))
        weights[0, step] = 1
        result = gpuops.correlate(line, weights, mode=mode, cval=9)
        assert result.tolist() == [extended[step : step + 4]]
        result = gpuops.correlate(line.T, weights.T, mode=mode, cval=9)
        assert result.ravel().tolist() == extended[step : step + 4]


def test_sums(gpuops):
    result = gpuops.correlate(IMAGE, [[1, 0], [0, 1]])
    assert type(result) is np.ndarray and result.dtype == IMAGE.dtype
    assert result.tolist() == [[2, 3, 5], [5, 6, 8], [11, 12, 14]]
    assert gpuops.correlate(IMAGE, np.ones((3, 3)), mode="constant").tolist() == [
        [12, 21, 16],
        [27, 45, 33],
        [24, 39, 28],
    ]
    assert gpuops.correlate(IMAGE, np.ones((3, 3)), mode="constant", cval=1).tolist() == [
        [17, 24, 21],
        [30, 45, 36],
        [29, 42, 33],
    ]


def test_origin(gpuops):
    assert gpuops.correlate(IMAGE, [[1, 1]], origin=(0, -1)).tolist() == [
        [3, 5, 6],
        [9, 11, 12],
        [15, 17, 18],
    ]
    weights = [[1, 1, 1]]
    assert gpuops.correlate(IMAGE[:1], weights, mode="wrap", origin=(0, 1)).tolist() == [[6, 6, 6]]
    moved = gpuops.correlate(IMAGE[:1], [[1, 0, 0]], mode="constant", origin=(0, 1))
    assert moved.tolist() == [[0, 0, 1]]
    moved = gpuops.correlate(IMAGE[:1], [[1, 0, 0]], mode="constant", origin=[0, -1])
    assert moved.tolist() == [[1, 2, 3]]
    moved = gpuops.correlate(IMAGE, np.eye(3)[[0, 2, 2]] * [1, 0, 0], mode="constant", origin=1)
    assert moved.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]


def test_one_line_of_pixels(gpuops):
    assert gpuops.correlate([1, 2, 3], [1, 1]).tolist() == [2, 3, 5]
    assert gpuops.correlate([1, 2, 3], [1, 1], origin=-1).tolist() == [3, 5, 6]
    assert gpuops.convolve([1, 2, 3], [1, 1]).tolist() == [3, 5, 6]
    assert gpuops.correlate([1.5], [2.0]).tolist() == [3.0]


def test_result_has_the_dtype_of_the_input(gpuops):
    for dtype in ["?", *INTEGERS, "f2", "f4", "f8"]:
        image = np.ones((2, 3), dtype)
        assert gpuops.correlate(image, [[1.0]]).dtype == dtype
        same(gpuops.correlate(image, [[0, 1, 0]]), image)


def test_truncated_to_integers(gpuops):
    image = np.array([[10, 20, 31], [255, 0, 7]], np.uint8)
    assert gpuops.correlate(image, [[0.5]]).tolist() == [[5, 10, 15], [127, 0, 3]]
    assert gpuops.correlate(image, [[-0.5]], output="i2").tolist() == [
        [-5, -10, -15],
        [-127, 0, -3],
    ]
    assert gpuops.correlate(image, [[2]]).tolist() == [[20, 40, 62], [254, 0, 14]]
    assert gpuops.correlate(image, [[-1]]).tolist() == [[246, 236, 225], [1, 0, 249]]


@pytest.mark.parametrize(
    "dtype, expected",
    [
        ("i1", [0, 0, -1, 0, 44, 0, -1, 0, 0, 0, 0, 0]),
        ("u1", [0, 0, 255, 0, 44, 0, 255, 0, 0, 0, 0, 0]),
        ("u2", [0, 0, 65535, 256, 300, 51712, 65535, 0, 0, 0, 0, 0]),
        ("i4", [0, 0, -1, 256, 300, 10**9, 2**31 - 1] + 5 * [-(2**31)]),
        ("u4", [0, 0, 2**32 - 1, 256, 300, 10**9, 2**31 - 1, 2**31, 7, 0, 0, 0]),
        ("i8", [0, 0, -1, 256, 300, 10**9, 2**31 - 1, 2**31, 2**32 + 7] + 3 * [-(2**63)]),
        ("u8", [0, 0, 2**64 - 1, 256, 300, 10**9, 2**31 - 1, 2**31, 2**32 + 7, 0, 0, 2**63]),
        ("?", [0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_numbers_that_do_not_fit(gpuops, dtype, expected):
    """As SciPy has them on x86, on every machine and device."""
    values = [0.5, -0.99, -1.5, 256, 300.7, 1e9, 2**31 - 0.5, 2.0**31, 2.0**32 + 7, 1e30, np.inf,
              np.nan]  # fmt: skip
    result = gpuops.correlate(np.array([values]), [[1]], output=dtype)
    same(result, np.array([expected], dtype))
    sums = np.array([values])
    same(reference.as_dtype(sums, dtype), result)


def test_a_nan_counts_where_it_has_a_weight(gpuops):
    image = np.zeros((5, 7))
    image[2, 3] = np.nan
    image[4, 6] = np.inf
    cross = [[0, 1, 0], [1, -4, 1], [0, 1, 0]]
    for dtype in ("f4", "f8"):
        result = gpuops.correlate(image.astype(dtype), cross, mode="constant")
        assert np.argwhere(np.isnan(result)).tolist() == [[1, 3], [2, 2], [2, 3], [2, 4], [3, 3]]
        assert np.argwhere(np.isinf(result)).tolist() == [[3, 6], [4, 5], [4, 6]]
        tiny = gpuops.correlate(image.astype(dtype), [[1e-17, 1.0, np.nan]], mode="constant")
        assert (np.isnan(tiny) == np.isnan(image)).all()


@pytest.mark.parametrize("size", [(3, 3), (5, 4), (7, 7), (9, 9), (11, 13), (15, 15), (40, 40)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_nans_on_every_path(gpuops, size, dtype):
    """A ring of weights around zeros: the NaN counts in the ring alone."""
    weights = np.ones(size)
    weights[1:-1, 1:-1] = 0
    image = random_image((45, 150), dtype)
    image[20, 100] = np.nan
    image[44, 149] = -np.inf
    result = gpuops.correlate(image, weights, mode="nearest")
    with np.errstate(invalid="ignore"):
        sums = reference.correlate(image, weights, mode="nearest")
    assert (np.isnan(result) == np.isnan(sums)).all()
    assert (np.isinf(result) == np.isinf(sums)).all()
    finite = np.isfinite(sums)
    assert np.allclose(result[finite], sums[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(11, 13), (15, 15), (40, 40)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_nans_and_weights_of_rank_one(gpuops, size, dtype):
    image = random_image((45, 150), dtype)
    image[20, 100] = np.nan
    image[44, 149] = -np.inf
    for zeros in ([], [3]):
        column, row = np.ones(size[0]), np.ones(size[1])
        column[zeros], row[zeros] = 0, 0
        weights = np.outer(column, row)
        with np.errstate(invalid="ignore"):
            sums = reference.correlate(image, weights, mode="nearest")
        result = gpuops.correlate(image, weights, mode="nearest")
        assert (np.isnan(result) == np.isnan(sums)).all()
        assert (np.isinf(result) == np.isinf(sums)).all()


def test_nan_beyond_the_border(gpuops):
    for dtype in ("u1", "f4", "f8"):
        image = np.ones((3, 4), dtype)
        result = gpuops.correlate(image, [[0, 1, 1]], mode="constant", cval=np.nan, output="f4")
        assert np.isnan(result).tolist() == 3 * [[False, False, False, True]]
        # 2 x 2 weights are padded by the kernels, which must not be seen.
        result = gpuops.correlate(
            image, [[1, 1], [1, 1]], mode="constant", cval=np.inf, output="f8", origin=-1
        )
        assert np.isinf(result).tolist() == 2 * [[False, False, False, True]] + [4 * [True]]


# The reference as the expectation: every path, and where one ends and the next begins.


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 2), (4, 5)])
def test_weights_larger_than_the_image(gpuops, name, mode, shape):
    image = random_image(shape, "f8")
    for size in [(1, 7), (8, 1), (7, 8), (15, 11), (12, 33)]:
        weights = random_weights(size)
        for origin in [(0, 0), (-(size[0] // 2), (size[1] - 1) // 2)]:
            options = {"mode": mode, "cval": 1.25, "origin": origin}
            result = getattr(gpuops, name)(image, weights, **options)
            check(result, image, weights, name=name, **options)


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 17, 31])
def test_every_size_of_weights(gpuops, dtype, size):
    image = random_image((37, 141), dtype)
    weights = random_weights((size, size))
    check(gpuops.correlate(image, weights), image, weights)
    if size > 1:
        weights = random_weights((size, size - 1), 1)
        check(gpuops.convolve(image, weights), image, weights, name="convolve")
        weights = random_weights((1, size), 2)
        check(gpuops.correlate(image, weights, mode="wrap"), image, weights, mode="wrap")
        weights = random_weights((size, 1), 2)
        check(gpuops.correlate(image, weights, mode="mirror"), image, weights, mode="mirror")


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(31, 127), (32, 128), (33, 129), (65, 256), (9, 257), (2, 520)])
def test_edges_of_tiles(gpuops, dtype, shape):
    image = random_image(shape, dtype)
    for size in [(3, 3), (7, 5), (11, 13)]:
        weights = random_weights(size)
        for mode in ("nearest", "wrap"):
            check(gpuops.correlate(image, weights, mode=mode), image, weights, mode=mode)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_many_tiles(gpuops, device, dtype):
    """Where there is enough for a whole GPU to do, tiles are larger, and threads do more."""
    # One size for each kernel; the fake runtime takes seconds for as many tiles.
    for size in (3, 5, 7, 9, 11, 15) if device.name == "cuda" else (3, 11):
        # Few pixels would go to another kernel with weights of 3 x 3.
        images = random_image((900 if size == 3 else 270, 20, 30), dtype)
        images[::40, 5, 7] = np.nan
        weights = random_weights((size, size))
        weights[1, 1] = 0
        sums = reference.correlate(images, weights)
        results = [gpuops.correlate(images, weights)]
        if device.name == "cuda":
            on_device = gpuops.correlate(*map(gpuops.to_device, (images, weights)))
            results += [on_device.to_host()]
        for result in results:
            same(np.isnan(result), np.isnan(sums))
            assert np.allclose(result, sums, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [(35, 40), (1, 230), (2, 500), (120, 3)])
def test_weights_in_parts(gpuops, dtype, size):
    """More weights than a kernel takes by value, and rows that do not fit into shared memory."""
    image = random_image((20, 30), dtype)
    weights = random_weights(size)
    check(gpuops.correlate(image, weights), image, weights)


def test_weights_in_parts_within_a_large_image(gpuops):
    image = random_image((36, 1000), "f4")
    weights = random_weights((2, 430))
    check(gpuops.correlate(image, weights), image, weights)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *(("f2", size) for size in [(11, 11), (12, 40)]),
        *(("f4", size) for size in [(15, 15), (31, 31), (90, 10), (60, 64)]),
    ],
)
def test_weights_of_rank_one(gpuops, size, dtype):
    column = random_weights((size[0], 1))
    row = random_weights((1, size[1]), 5)
    column[size[0] // 3] = 0
    image = random_image((70, 130), dtype)
    for mode, origin in [("reflect", (0, 0)), ("constant", (2, -1))]:
        options = {"mode": mode, "cval": 0.5, "origin": origin}
        check(gpuops.correlate(image, column * row, **options), image, column * row, **options)
        # Of weights that were rounded to float32 it is known, too.
        weights = (column.astype("f4") * row.astype("f4")).astype("f4")
        check(
            gpuops.convolve(image, weights, **options), image, weights, name="convolve", **options
        )


def test_weights_of_rank_one_are_two_passes(gpuops):
    """Which round to other bits than the sum over all weights."""
    weights = random_weights((15, 1)) * random_weights((1, 15), 5)
    others = weights.copy()
    others[0, 0] *= 2
    image = random_image((70, 130), "f4")
    image[:40, :60] = 0  # all that the weight which differs meets, in the part that is compared
    part = np.s_[30:47, 10:67]
    result = gpuops.correlate(image, weights, mode="constant")[part]
    in_one = gpuops.correlate(image, others, mode="constant")[part]
    assert np.allclose(result, in_one, rtol=1e-4, atol=1e-4)
    assert (result != in_one).mean() > 0.1
    others[0, 0] = 0
    same(gpuops.correlate(image, others, mode="constant")[part], in_one)


def test_almost_rank_one_is_not(gpuops):
    weights = np.ones((15, 15))
    weights[3, 4] += 1e-5
    image = np.zeros((40, 40), "f4")
    image[20, 20] = 1
    result = gpuops.correlate(image, weights, mode="constant")
    assert result[24, 23] == np.float32(1 + 1e-5)
    assert result[25, 22] == result[25, 23] == result[24, 22] == 1
    weights[3, 4] = 0
    assert gpuops.correlate(image, weights, mode="constant")[24, 23] == 0


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", ["?", *INTEGERS, "f2", "f4", "f8"])
@pytest.mark.parametrize("output", ["?", "u1", "i2", "i4", "u8", "f2", "f4", "f8"])
def test_every_pair_of_dtypes(gpuops, name, dtype, output):
    image = random_image((6, 9), dtype)
    for size in [(3, 2), (11, 3)]:
        weights = random_weights(size)
        result = getattr(gpuops, name)(image, weights, output=output)
        check(result, image, weights, output, name=name)
        out = np.zeros(image.shape, output)
        assert getattr(gpuops, name)(image, weights, output=out) is out
        same(out, result)


@pytest.mark.parametrize("dtype", ["?", *INTEGERS, "f2", "f4", "f8"])
def test_weights_of_every_dtype(gpuops, dtype):
    image = random_image((5, 6), "f8")
    weights = random_image((3, 3), dtype)
    check(gpuops.correlate(image, weights), image, weights)
    check(gpuops.correlate(image, weights[::-1, ::2]), image, weights[::-1, ::2])


@pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
def test_bfloat16(gpuops):
    image = random_image((20, 140), "f4").astype(ml_dtypes.bfloat16)
    weights = random_weights((3, 3))
    result = gpuops.correlate(image, weights)
    assert result.dtype == image.dtype
    sums = reference.correlate(image.astype("f8"), weights)
    assert np.allclose(result.astype("f8"), sums, rtol=2**-8, atol=1e-6)
    assert gpuops.correlate(image, weights, output="f4").dtype == np.float32
    result = gpuops.correlate(image.astype("f4"), weights.astype(ml_dtypes.bfloat16))
    check(result, image.astype("f4"), weights.astype(ml_dtypes.bfloat16).astype("f8"))


def test_half_precision_is_rounded_once(gpuops):
    # 1 + 2^-11 + 2^-22 is above the middle, and in float32 still so.
    image = np.array([[1, 2.0**-11, 2.0**-22]], "f2")
    assert gpuops.correlate(image, [[1, 1, 1]], mode="constant")[0, 1] == np.float16(1 + 2.0**-10)
    image = np.array([[1, 2.0**-11, 2.0**-30]])
    assert gpuops.correlate(image, [[1, 1, 1]], mode="constant", output="f2")[0, 1] > 1


@pytest.mark.parametrize("shape", [(2, 5, 6), (3, 1, 2, 4, 5), (0, 4, 5), (2, 0, 5), (2, 5, 0)])
def test_images_one_after_the_other(gpuops, shape):
    images = random_image(shape, "i4")
    weights = random_weights((3, 2))
    result = gpuops.correlate(images, weights)
    check(result, images, weights)
    same(gpuops.correlate(images, weights[None]), result)
    for at in np.ndindex(shape[:-2]):
        same(gpuops.correlate(images[at], weights), result[at])


LAYOUTS = {
    "rows with gaps": lambda x: x[..., :-3],
    "every second pixel": lambda x: x[..., ::2],
    "backward": lambda x: x[..., ::-1, ::-1],
    "transposed": lambda x: x.swapaxes(-1, -2),
    "repeated": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "images in reverse": lambda x: x[::-1],
    "axes swapped": lambda x: x.swapaxes(0, 1),
    "off by a pixel": lambda x: x[..., 1:],
    "one image many times": lambda x: np.broadcast_to(x[:1], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
def test_layouts_of_the_input(gpuops, layout, dtype):
    images = LAYOUTS[layout](random_image((3, 12, 24), dtype))
    weights = random_weights((3, 3))
    expected = gpuops.correlate(np.ascontiguousarray(images), weights)
    same(gpuops.correlate(images, weights), expected)
    check(expected, images, weights)
    odd = np.frombuffer(b"x" + np.ascontiguousarray(images).tobytes(), np.uint8)[1:]
    same(gpuops.correlate(odd.view(dtype).reshape(images.shape), weights), expected)


@pytest.mark.parametrize("layout", ["C", "F", "strided", "padded", "backward", "misaligned"])
def test_output(gpuops, layout):
    for dtype in ("u1", "f4", "f8"):
        image = random_image((7, 9), dtype)
        weights = random_weights((3, 3))
        out = Guarded(image.shape, dtype, layout)
        assert gpuops.correlate(image, weights, output=out.array) is out.array
        same(out.array.copy(), gpuops.correlate(image, weights))
        assert out.kept_to_its_own()


def test_output_that_overlaps(gpuops):
    for dtype in ("f4", "f8", "i4"):
        memory = random_image((12, 12), dtype)
        weights = random_weights((3, 3))
        expected = gpuops.correlate(memory, weights)
        gpuops.correlate(memory, weights, output=memory)
        same(memory, expected)
        memory = random_image((12, 12), dtype)
        expected = gpuops.correlate(memory[:-2], weights)
        gpuops.correlate(memory[:-2], weights, output=memory[2:])
        same(memory[2:], expected)
        weights = memory[:3, :3].copy()
        expected = gpuops.correlate(memory, weights)
        gpuops.correlate(memory, memory[:3, :3], output=memory)
        same(memory, expected)


# Errors.


@pytest.mark.parametrize("name", BOTH)
def test_errors(gpuops, name):
    function = getattr(gpuops, name)
    out = Guarded(IMAGE.shape, IMAGE.dtype)
    ones = np.ones((3, 3))
    for error, text, arguments, options in [
        (TypeError, "input has dtype complex128.*real and imaginary", (IMAGE * 1j, ones), {}),
        (TypeError, "weights has dtype complex128", (IMAGE, ones * 1j), {}),
        (TypeError, "M8|datetime64", (IMAGE.astype("M8[s]"), ones), {}),
        (TypeError, "weights has dtype", (IMAGE, np.array([["a"]])), {}),
        (ValueError, "incorrect shape", (IMAGE, [1, 2]), {}),
        (ValueError, "incorrect shape", (IMAGE[0], ones), {}),
        (ValueError, "incorrect shape", (IMAGE, ones[None]), {}),
        (ValueError, "incorrect shape", (IMAGE[None], np.ones((2, 3, 3))), {}),
        (ValueError, "incorrect shape.*no elements", (IMAGE, np.ones((0, 3))), {}),
        (ValueError, "incorrect shape.*no elements", (IMAGE, np.ones((3, 0))), {}),
        (ValueError, "too big", (IMAGE, np.broadcast_to(np.int8(1), (2**31, 2**30))), {}),
        (ValueError, "too big", (IMAGE[0], np.broadcast_to(np.int8(1), 2**61)), {}),
        (ValueError, "at least one dimension", (5, ones), {}),
        (ValueError, "Invalid origin", (IMAGE, ones), {"origin": 2}),
        (ValueError, "Invalid origin", (IMAGE, ones), {"origin": (0, -2)}),
        (ValueError, "Invalid origin", (IMAGE, ones), {"origin": (2, 0)}),
        (ValueError, "origin", (IMAGE, ones), {"origin": (0, 0, 0)}),
        (ValueError, "mode must be", (IMAGE, ones), {"mode": "symmetric"}),
        (TypeError, "mode must be", (IMAGE, ones), {"mode": ["reflect", "wrap"]}),
        (TypeError, "real number|float", (IMAGE, ones), {"cval": "0"}),
        (TypeError, "integer", (IMAGE, ones), {"origin": 0.5}),
    ]:
        with pytest.raises(error, match=text):
            function(*arguments, output=out.array, **options)
    assert out.untouched()
    assert function(IMAGE, np.ones((2, 2)), origin=-1).shape == (3, 3)
    with pytest.raises(ValueError, match="Invalid origin"):
        function(IMAGE, np.ones((2, 2)), origin=1)


def test_wrong_output(gpuops):
    ones = np.ones((3, 3))
    for output in (np.zeros((3, 4)), np.zeros(9), read_only(np.zeros((3, 3)))):
        before = output.copy()
        with pytest.raises(ValueError):
            gpuops.correlate(IMAGE, ones, output=output)
        assert (output == before).all()
    for output in ("complex64", "M8[s]", "S4", object, "no dtype"):
        with pytest.raises(TypeError):
            gpuops.correlate(IMAGE, ones, output=output)


# Arrays on a GPU.


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
@pytest.mark.parametrize("size", [(3, 3), (4, 6), (15, 13), (40, 33)])
def test_weights_on_the_device(gpu, dtype, size):
    gpuops = gpu.gpuops
    image, weights = random_image((40, 150), dtype), random_weights(size)
    for name in BOTH:
        result = getattr(gpuops, name)(gpuops.to_device(image), gpuops.to_device(weights))
        assert isinstance(result, gpuops.DeviceArray)
        check(result.to_host(), image, weights, name=name)
        result = getattr(gpuops, name)(gpuops.to_device(image), weights)
        check(result.to_host(), image, weights, name=name)
        backward = gpuops.to_device(weights[::-1])[::-1]
        result = getattr(gpuops, name)(gpuops.to_device(image), backward, mode="wrap")
        check(result.to_host(), image, weights, name=name, mode="wrap")


def test_weights_on_the_device_that_are_too_big(gpu):
    gpuops = gpu.gpuops
    one = gpuops.to_device(np.ones(1, "i1"))
    image = gpuops.to_device(IMAGE)

    class Broadcast:
        def __init__(self, *shape):
            sizes = {"shape": shape, "strides": (0,) * len(shape)}
            self.__cuda_array_interface__ = {**one.__cuda_array_interface__, **sizes}

    for shape, text in [((2**31, 2**30), "too big"), ((1, 2**31), "more than a GPU")]:
        with pytest.raises(ValueError, match=text):
            gpuops.correlate(image, Broadcast(*shape))
    assert gpuops.correlate(image, Broadcast(1, 1)).to_host().tolist() == IMAGE.tolist()


def test_nans_and_weights_on_the_device(gpu):
    gpuops = gpu.gpuops
    image = random_image((9, 20), "f4")
    image[4, 5] = np.nan
    weights = np.array([[0, 1, 0], [1e-17, 1, np.nan], [0, 1, 0]])
    result = gpuops.correlate(gpuops.to_device(image), gpuops.to_device(weights)).to_host()
    assert np.argwhere(np.isnan(result)).tolist() == [[3, 5], [4, 5], [5, 5]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_on_the_device(gpu, layout):
    gpuops = gpu.gpuops
    images = random_image((3, 12, 24), "f4")
    weights = random_weights((3, 5))
    torch = pytest.importorskip("torch") if gpu.name == "cuda" else None
    if torch is None:
        view = LAYOUTS[layout](images)
        given = gpuops.to_device(view)
    else:
        view = LAYOUTS[layout](images)
        given = torch.as_tensor(np.ascontiguousarray(view)).cuda()
    result = gpuops.correlate(given, weights)
    check(np.asarray(result.to_host() if torch is None else result.cpu()), view, weights)
    half = gpuops.to_device(images)[::2]
    check(gpuops.correlate(half, weights).to_host(), images[::2], weights)


def test_output_on_the_device(gpu):
    gpuops = gpu.gpuops
    image, weights = random_image((12, 40), "f4"), random_weights((3, 3))
    given = gpuops.to_device(image)
    out = gpuops.empty(image.shape, "f8")
    assert gpuops.correlate(given, weights, output=out) is out
    check(out.to_host(), image, weights, "f8")
    gpuops.correlate(given, weights, output=given)
    check(given.to_host(), image, weights)
    images = gpuops.zeros((4, 12, 40), "f4")
    gpuops.correlate(gpuops.to_device(image), weights, output=images[2])
    host = images.to_host()
    check(host[2], image, weights)
    assert not host[[0, 1, 3]].any()


# SciPy as the expectation.


@pytest.fixture
def ndimage():
    return pytest.importorskip("scipy.ndimage")


def scipy_is_right(image, weights, mode, origin):
    """SciPy 1.17 reads outside the image where weights in mode "reflect" reach two images back."""
    reach = [size // 2 + abs(o) + 1 for size, o in zip(weights.shape, origin, strict=True)]
    return mode != "reflect" or all(
        far < 2 * size for far, size in zip(reach, image.shape, strict=True)
    )


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", ["?", *INTEGERS, "f4", "f8"])
@pytest.mark.parametrize("mode", MODES)
def test_scipy(gpuops, ndimage, name, dtype, mode):
    image = random_image((19, 22), dtype)
    for size in [(3, 3), (2, 5), (10, 4), (11, 11)]:
        weights = random_weights(size)
        for origin in [(0, 0), (-1, 1)]:
            options = {"mode": mode, "cval": -1.5, "origin": origin}
            result = getattr(gpuops, name)(image, weights, **options)
            expected = getattr(ndimage, name)(image, weights, **options)
            if dtype == "?":
                expected = expected.view(np.uint8) != 0  # SciPy leaves other bytes than 0 and 1
            if dtype == "f4":
                np.testing.assert_allclose(result, expected, rtol=0, atol=4e-5)
            else:
                same(result, expected)


def test_random_calls(gpuops, ndimage):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.given(data=st.data())
    @hypothesis.settings(max_examples=60, database=None)
    def compare(data):
        draw = data.draw
        shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 40)))
        size = draw(st.tuples(st.integers(1, 13), st.integers(1, 13)))
        origin = tuple(draw(st.integers(-(n // 2), (n - 1) // 2)) for n in size)
        options = {"mode": draw(st.sampled_from(MODES)), "origin": origin}
        options["cval"] = draw(st.sampled_from([0.0, 1.0, -2.5]))
        dtype = draw(st.sampled_from([*INTEGERS, "f2", "f4", "f8"]))
        output = draw(st.sampled_from([dtype, "u1", "i4", "f4", "f8"]))
        seed = draw(st.integers(0, 1000))
        image, weights = random_image(shape, dtype, seed), random_weights(size, seed)
        name = draw(st.sampled_from(BOTH))
        result = getattr(gpuops, name)(image, weights, output=output, **options)
        check(result, image, weights, output, name=name, **options)
        if dtype != "f2" and scipy_is_right(image, weights, options["mode"], origin):
            expected = getattr(ndimage, name)(image, weights, output=np.dtype(output), **options)
            if dtype == output == "f4":
                np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)
            else:
                same(result, expected)

    compare()


GAUSS = np.exp(-0.5 * (np.arange(-3, 4) / 1.2) ** 2)
FILTERS = {
    "sharpen": np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]]),
    "sobel": np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]),
    "gauss": np.outer(GAUSS, GAUSS) / GAUSS.sum() ** 2,
    "motion": np.eye(15) / 15,
    "box": np.full((31, 31), 1 / 961),
}


@pytest.mark.parametrize("which", FILTERS)
def test_a_photograph_with_clamped_borders(gpuops, device, ndimage, which):
    cv2, image = photograph()
    weights = FILTERS[which]
    if device.name == "fake":
        image = image[100:180, 120:300]  # the fake GPU is slow
    assert image.std() > 10
    result = gpuops.correlate(image, weights, mode="nearest")
    same(result, ndimage.correlate(image, weights, mode="nearest"))

    floats = image.astype("f4")
    result = gpuops.correlate(floats, weights, mode="nearest")
    expected = ndimage.correlate(floats, weights, mode="nearest")
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-4)
    theirs = cv2.filter2D(floats, -1, weights.astype("f4"), borderType=cv2.BORDER_REPLICATE)
    np.testing.assert_allclose(result, theirs, rtol=0, atol=2e-3)


def test_sums_that_would_overflow_without_their_weights(gpuops):
    image = np.full((40, 40), 1e38, np.float32)
    weights = np.full((11, 11), 0.01)
    result = gpuops.correlate(image, weights, mode="nearest")
    np.testing.assert_allclose(result, np.float32(1.21e38), rtol=1e-5)


def test_sums_along_one_axis_that_would_overflow(gpuops, ndimage):
    """Of two passes, the first one's sums are weighted by the second."""
    image = np.zeros((60, 60), "f4")
    image[30, 30] = 1e38
    for size in (5, 11, 15):
        line = 2.0 ** -np.abs(np.arange(size) - size // 2) * 8
        for weights in (np.outer(line, line), np.outer(line, line) / 1e3):
            expected = ndimage.correlate(image, weights)
            np.testing.assert_allclose(gpuops.correlate(image, weights), expected, rtol=1e-6)


@pytest.mark.parametrize("middle", [1, 0])
def test_large_pixels_reach_no_further_than_the_weights(gpuops, middle):
    """Weights of rank one are two passes, of which the first must not overflow."""
    image = np.zeros((40, 80), "f4")
    image[:, 40] = 1e38
    weights = np.ones((11, 11))
    weights[:, 5] = middle
    result = gpuops.correlate(image, weights)
    assert (result[:, :35] == 0).all() and (result[:, 46:] == 0).all()
    assert np.isinf(result[:, 38:40]).all()
    if not middle:
        assert (result[:, 40] == 0).all()
