"""sigmoid: `scipy.special.expit`, in the float dtype of its argument."""

import decimal
import math
import warnings

import numpy as np
import pytest
from helpers import Guarded, read_only

FLOATS = [np.float16, np.float32, np.float64]
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def short_float(request):
    if request.param == "float16":
        return np.dtype(np.float16)
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def in_float64(x):
    """The formula in float64, whose error no narrower dtype can see."""
    x = np.asarray(x).astype(np.float64)
    below = np.exp(-np.abs(x))
    return np.where(x < 0, below, 1) / (1 + below)


def largest_error(result, right, fraction_bits, least_exponent):
    """In units of the last place that the result's dtype has where the right one is."""
    assert result.shape == right.shape
    result = result.astype(np.float64)
    known = ~np.isnan(right)
    assert np.array_equal(np.isnan(result), ~known)
    _, exponent = np.frexp(np.maximum(right[known], math.ldexp(1.0, least_exponent)))
    ulp = np.ldexp(1.0, exponent - 1 - fraction_bits)
    return np.max(np.abs(result[known] - right[known]) / ulp, initial=0)


# Of both floats that are computed in full, with fused multiply-adds or without.
LIMIT = 1.02


def error_of_float32(result, x):
    return largest_error(result, in_float64(x), 23, -126)


# Literals.


def test_known_values(gpuops):
    x = np.array([0.0, -0.0, 1.0, -1.0, 2.0, math.log(3), -math.log(3)])
    result = gpuops.sigmoid(x)
    assert type(result) is np.ndarray and result.dtype == np.float64
    right = [0.5, 0.5, 0.7310585786300049, 0.2689414213699951, 0.8807970779778823, 0.75, 0.25]
    assert np.allclose(result, right, rtol=2.3e-16, atol=0)
    for dtype in FLOATS:
        assert gpuops.sigmoid(np.array([0.0, -0.0], dtype)).tolist() == [0.5, 0.5]


def test_far_from_zero(gpuops):
    for dtype in FLOATS:
        x = np.array([INF, -INF, 60000, -60000, NAN], dtype)
        result = gpuops.sigmoid(x)
        assert result.dtype == dtype
        assert result[:4].tolist() == [1, 0, 1, 0] and np.isnan(result[4])
    largest = np.array([np.finfo(np.float64).max, -np.finfo(np.float64).max])
    assert gpuops.sigmoid(largest).tolist() == [1, 0]
    assert gpuops.sigmoid(np.array([5e-324, -5e-324])).tolist() == [0.5, 0.5]


def test_subnormal_results(gpuops):
    x = np.array([-100, -103.2, -103.97, -103.98, -105], np.float32)
    steps = gpuops.sigmoid(x).view(np.int32)
    assert steps.tolist() == [27, 1, 1, 0, 0]
    x = np.array([-710.0, -745.0, -745.2, -746.0, -1e6])
    result = gpuops.sigmoid(x)
    assert result[0] == pytest.approx(4.4762862256751298e-309, rel=1e-14)
    assert result[1:].view(np.int64).tolist() == [1, 0, 0, 0]
    x = np.array([-16.6, -17.0, -17.3, -17.4], np.float16)
    assert gpuops.sigmoid(x).view(np.int16).tolist() == [1, 1, 1, 0]


def test_scalars_are_scalars(gpuops):
    for x, kind in [(0, np.float64), (0.0, np.float64), (True, np.float64),
                    (np.float32(0), np.float32), (np.float16(0), np.float16),
                    (np.int8(0), np.float64), (np.array(0, np.float32), np.float32)]:  # fmt: skip
        assert type(gpuops.sigmoid(x)) is kind
        assert gpuops.sigmoid(x) == (0.5 if not x else pytest.approx(0.7310585786300049))
    assert gpuops.sigmoid([[0, 1], [2, -1]])[1, 1] == pytest.approx(0.2689414213699951)


# dtypes.


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_integers_give_float64(gpuops, dtype):
    x = np.array([0, 1, 3, 100], dtype)
    result = gpuops.sigmoid(x)
    assert result.dtype == np.float64
    assert result.tobytes() == gpuops.sigmoid(x.astype(np.float64)).tobytes()


def test_floats_keep_their_dtype(gpuops, short_float):
    for dtype in [*FLOATS, short_float]:
        assert gpuops.sigmoid(np.zeros((2, 3), dtype)).dtype == dtype


@pytest.mark.parametrize(
    "x, named",
    [
        (1j, "complex128"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.array(["a"]), "str"),
        (np.array([1], "M8[s]"), "datetime64"),
        (np.zeros(2, np.longdouble), "longdouble"),
        (np.zeros(2, [("a", "f4")]), "void"),
        ([None], "object"),
    ],
)
def test_what_has_no_sigmoid_is_refused(gpuops, x, named):
    out = np.full(2, 7.0)
    for keywords in ({}, {"out": out}):
        with pytest.raises(TypeError, match=named) as caught:
            gpuops.sigmoid(x, **keywords)
        assert "astype" in str(caught.value)
    assert out.tolist() == [7, 7]


# The error, of every value there is, or of a sample of them.


def test_every_16_bit_value(gpuops, short_float):
    x = np.arange(1 << 16, dtype=np.uint16).view(short_float)
    result = gpuops.sigmoid(x)
    assert result.dtype == short_float
    fraction_bits, least_exponent = (10, -14) if short_float == np.float16 else (7, -126)
    with np.errstate(invalid="ignore"):
        assert largest_error(result, in_float64(x), fraction_bits, least_exponent) < 0.51
        # Below 1 a step is half of the unit there, which is no error for an infinity.
        assert result[np.isinf(x)].tolist() == [1, 0]


def sample_of_float32():
    """Some of every exponent, all of the edges, both signs; and a million random values."""
    generator = np.random.default_rng(4)
    exponents = np.arange(256, dtype=np.uint32)[:, np.newaxis] << 23
    edges = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF], np.uint32)
    fractions = generator.integers(0, 1 << 23, (256, 500), dtype=np.uint32)
    bits = np.concatenate([exponents | edges, exponents | fractions], axis=1).ravel()
    # Where the exponential is rescaled, where results become subnormal, and where they end.
    near = np.arange(1, 152, dtype=np.float32) * np.float32(math.log(2) / 2)
    near = np.concatenate([near, np.float32([16, 17, 18, 60, 87, 87.5, 88, 103, 104, 105])])
    near = near.view(np.uint32)[:, np.newaxis] + np.arange(-50, 51, dtype=np.int32).view(np.uint32)
    bits = np.concatenate([bits, near.ravel(), np.uint32([0x7F800000, 0x7FC00000])])
    x = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    return np.concatenate([x, generator.uniform(-110, 110, 1_000_000).astype(np.float32)])


def test_a_sample_of_float32(gpuops):
    x = sample_of_float32()
    with np.errstate(invalid="ignore"):
        assert error_of_float32(gpuops.sigmoid(x), x) < LIMIT


def test_every_float32(cuda_device):
    """All 2**32, against torch's float64 on the same GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    sigmoid = cuda_device.gpuops.sigmoid
    chunk = 1 << 26
    offsets = torch.arange(chunk, dtype=torch.int32, device="cuda")
    largest, nans = 0.0, 0
    for begin in range(-(1 << 31), 1 << 31, chunk):
        x = (offsets + begin).view(torch.float32)
        result, right = sigmoid(x), torch.sigmoid(x.double())
        assert torch.equal(result.isnan(), x.isnan())
        nans += int(x.isnan().sum())
        normal = right.clamp(min=2.0**-126)
        ulp = normal / normal.frexp().mantissa * 2.0**-24
        error = (result.double() - right).abs() / ulp
        largest = max(largest, float(error.nan_to_num(nan=0.0).max()))
    assert nans == 2 * ((1 << 23) - 1)
    assert largest < LIMIT


def exact_error(result, x):
    """In ulps, with forty digits."""
    with decimal.localcontext() as context:
        context.prec = 40
        below = decimal.Decimal(-abs(x)).exp()
        right = (below if x < 0 else 1) / (1 + below)
        return float(abs(decimal.Decimal(result) - right) / decimal.Decimal(math.ulp(float(right))))


def test_a_sample_of_float64(gpuops):
    generator = np.random.default_rng(8)
    near = np.arange(1, 1080) * (math.log(2) / 2)
    x = np.concatenate(
        [
            generator.uniform(-2, 2, 4000),
            generator.uniform(-40, 40, 4000),
            generator.uniform(-746, 50, 4000),
            generator.uniform(-746, -700, 2000),
            np.ldexp(generator.uniform(-1, 1, 2000), generator.integers(-1070, 11, 2000)),
            near, -near, np.nextafter(near, 0), np.nextafter(-near, 0),
        ]
    )  # fmt: skip
    result = gpuops.sigmoid(x)
    assert max(map(exact_error, result.tolist(), x.tolist())) < LIMIT


def test_results_lie_between_0_and_1(gpuops):
    x = sample_of_float32()
    for dtype in FLOATS:
        with np.errstate(over="ignore", invalid="ignore"):
            result = gpuops.sigmoid(x.astype(dtype))
        assert np.array_equal(np.isnan(result), np.isnan(x))
        assert np.nanmin(result) == 0 and np.nanmax(result) == 1


def test_no_warnings(gpuops):
    x = np.array([INF, -INF, NAN, 3e38, -3e38, -100, 1e-45], np.float32)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for dtype in (np.float32, np.float64):
            gpuops.sigmoid(x.astype(dtype))
            np.add(x[3:], 1)  # NumPy looks for what the processor noted


# Shapes and layouts. An element's bits do not depend on where it lies.


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_length(gpuops, dtype):
    x = np.random.default_rng(1).uniform(-20, 20, 3000).astype(dtype)
    whole = gpuops.sigmoid(x)
    for count in [*range(40), 255, 511, 512, 513, 1023, 1025, 2999]:
        assert gpuops.sigmoid(x[:count]).tobytes() == whole[:count].tobytes()
        assert gpuops.sigmoid(x[count:]).tobytes() == whole[count:].tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_layout(gpuops, dtype):
    x = np.random.default_rng(2).uniform(-20, 20, (9, 14, 5)).astype(dtype)
    right = gpuops.sigmoid(x)
    shifted = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(dtype).reshape(x.shape)
    for view, same in [
        (np.asfortranarray(x), right),
        (x.transpose(1, 2, 0), right.transpose(1, 2, 0)),
        (x[::-1, ::3, ::-2], right[::-1, ::3, ::-2]),
        (x[:, :, :1], right[:, :, :1]),
        (np.broadcast_to(x[:, :1], (4, *x.shape)), np.broadcast_to(right[:, :1], (4, *x.shape))),
        (shifted, right),
        (x[:0], right[:0]),
        (x[4, 5, 3], right[4, 5, 3]),
        (read_only(x), right),
    ]:
        result = gpuops.sigmoid(view)
        assert result.shape == np.shape(same) and result.dtype == dtype
        assert np.array_equal(result, same)


@pytest.mark.parametrize("layout", ["C", "F", "strided", "padded", "backward", "misaligned"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_out(gpuops, layout, dtype):
    x = np.random.default_rng(3).uniform(-20, 20, (7, 33)).astype(dtype)
    guarded = Guarded(x.shape, dtype, layout)
    assert gpuops.sigmoid(x, out=guarded.array) is guarded.array
    assert np.array_equal(guarded.array, gpuops.sigmoid(x))
    assert guarded.kept_to_its_own()


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place(gpuops, dtype):
    x = np.random.default_rng(5).uniform(-20, 20, (5, 1000)).astype(dtype)
    for view in (slice(None), (slice(None), slice(None, None, 2)), (slice(None), slice(7, 900))):
        y = x.copy()
        right = y.copy()
        right[view] = gpuops.sigmoid(x[view])
        assert gpuops.sigmoid(y[view], out=y[view]) is not None
        assert np.array_equal(y, right)


def test_out_that_overlaps(gpuops):
    x = np.random.default_rng(6).uniform(-20, 20, 5000).astype(np.float32)
    right = gpuops.sigmoid(x)
    for source, target in [(slice(1, None), slice(-1)), (slice(-1), slice(1, None))]:
        y = x.copy()
        gpuops.sigmoid(y[source], out=y[target])
        assert np.array_equal(y[target], right[source])
    y = x.copy()
    gpuops.sigmoid(y, out=y[::-1])
    assert np.array_equal(y[::-1], right)


def test_out_of_another_dtype(gpuops):
    x = np.array([-1, 0, 1], np.float64)
    for dtype in FLOATS:
        out = np.full(3, 7, dtype)
        assert gpuops.sigmoid(x, out=out) is out
        assert np.array_equal(out, gpuops.sigmoid(x).astype(dtype))
    out = np.full(3, 7)
    with pytest.raises(TypeError, match="same_kind"):
        gpuops.sigmoid(x, out=out)
    assert out.tolist() == [7, 7, 7]


def test_out_that_is_wrong(gpuops):
    x = np.zeros(3)
    for out in (np.full(2, 7.0), np.full((3, 1), 7.0), read_only(np.full(3, 7.0))):
        with pytest.raises(ValueError):
            gpuops.sigmoid(x, out=out)
        assert set(out.ravel().tolist()) == {7.0}


def test_many_elements(gpuops):
    """More than one worker or one block takes; the sample checks their values."""
    x = np.random.default_rng(7).uniform(-110, 30, 700_001).astype(np.float32)
    assert error_of_float32(gpuops.sigmoid(x), x) < LIMIT


# Arrays on a GPU.


@pytest.mark.parametrize("dtype", FLOATS)
def test_device_arrays(gpu, dtype):
    gpuops = gpu.gpuops
    x = np.random.default_rng(9).uniform(-20, 20, (6, 1000)).astype(dtype)
    right = gpuops.sigmoid(x)
    there = gpuops.to_device(x)
    result = gpuops.sigmoid(there)
    assert type(result) is gpuops.DeviceArray and result.dtype == dtype
    assert np.array_equal(result.to_host(), right)
    assert np.array_equal(gpuops.sigmoid(there[1:4]).to_host(), right[1:4])
    assert gpuops.sigmoid(there, out=there) is there
    assert np.array_equal(there.to_host(), right)


def test_device_arrays_of_integers(gpu):
    gpuops = gpu.gpuops
    x = np.arange(-50, 50, dtype=np.int16)
    result = gpuops.sigmoid(gpuops.to_device(x))
    assert result.dtype == np.float64
    assert np.array_equal(result.to_host(), gpuops.sigmoid(x))


def test_device_arrays_without_sigmoid(gpu):
    gpuops = gpu.gpuops
    with pytest.raises(TypeError, match="complex64"):
        gpuops.sigmoid(gpuops.to_device(np.zeros(3, np.complex64)))


class Repeated:
    """One element of an array on the device, as often as it takes."""

    def __init__(self, array, shape, offset=0):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": (0,) * len(shape),
            "typestr": array.dtype.str,
            "data": (array.ptr + offset, False),
            "version": 3,
        }


@pytest.mark.parametrize("shape", [(1,), (40,), (5, 40)])
def test_an_element_that_repeats_on_the_device(gpu, shape):
    gpuops = gpu.gpuops
    for dtype in (np.float32, np.float64):
        x = gpuops.to_device(np.arange(64, dtype=dtype))
        for number in (0, 1, 3):
            view = Repeated(x, shape, number * x.itemsize)
            expected = gpuops.sigmoid(np.full(shape, number, dtype), device="cpu")
            np.testing.assert_allclose(gpuops.sigmoid(view).to_host(), expected, rtol=1e-6)
