"""gpuops.add against numpy.add; what add and multiply share is tested for both, in here."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

NUMBERS = "? b B h H i I q Q e f d F D".split()
OPERATORS = {"add": np.add, "multiply": np.multiply}


@pytest.fixture(params=OPERATORS)
def operator(request):
    return request.param


@pytest.fixture
def function(gpuops, operator):
    return getattr(gpuops, operator)


@pytest.fixture
def peer(operator):
    return OPERATORS[operator]


def random_array(rng, shape, dtype):
    """Numbers of all sizes that the dtype has, among them those that overflow."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    count = int(np.prod(shape, dtype=int))
    return np.frombuffer(rng.bytes(count * dtype.itemsize), np.uint8).view(
        np.uint8 if dtype.kind == "b" else dtype
    ).reshape(shape).astype(dtype)  # fmt: skip


def assert_same(result, expected):
    assert type(result) is type(expected)
    assert result.dtype == expected.dtype and result.shape == expected.shape
    np.testing.assert_array_equal(result, expected, strict=True)


def assert_same_product(result, expected, peer):
    """The same, but where NumPy itself gives other bits on other machines: in complex products."""
    if peer is np.add or np.asarray(expected).dtype.kind != "c":
        return assert_same(result, expected)
    assert type(result) is type(expected) and result.dtype == expected.dtype
    bound = 4 * np.finfo(expected.dtype).eps * np.abs(expected) + np.finfo(expected.dtype).tiny
    finite = np.isfinite(expected)
    assert (np.abs(result - expected) <= bound)[finite].all()


def test_literals(gpuops):
    assert gpuops.add([1, 2, 3], [10, 20, 30]).tolist() == [11, 22, 33]
    assert gpuops.add(np.uint8([250, 5]), np.uint8(10)).tolist() == [4, 15]
    assert gpuops.add(np.int8([127]), np.int8([1])).tolist() == [-128]
    assert gpuops.add([True, True, False], [True, False, False]).tolist() == [True, True, False]
    assert gpuops.multiply([1.5, -2.0], [[2], [4]]).tolist() == [[3.0, -4.0], [6.0, -8.0]]
    assert gpuops.multiply([True, True, False], [True, False, False]).tolist() == [
        True, False, False,
    ]  # fmt: skip
    assert gpuops.multiply([1 + 2j], [3 - 1j]).tolist() == [5 + 5j]
    assert gpuops.multiply(np.int64([2**62]), np.int64([2])).tolist() == [-(2**63)]


@pytest.mark.parametrize("first", NUMBERS)
def test_every_pair_of_dtypes(function, peer, first):
    rng = np.random.default_rng(1)
    for second in NUMBERS:
        x, y = random_array(rng, (7, 5), first), random_array(rng, (7, 5), second)
        with np.errstate(all="ignore"):
            assert_same_product(function(x, y), peer(x, y), peer)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_python_scalars_have_no_dtype_of_their_own(function, peer, dtype):
    x = random_array(np.random.default_rng(2), (11,), dtype)
    for scalar in (True, 3, 2.5, 1 - 2j):
        with np.errstate(all="ignore"):
            assert_same_product(function(x, scalar), peer(x, scalar), peer)
            assert_same_product(function(scalar, x), peer(scalar, x), peer)


def test_python_scalars_alone(function, peer):
    for x, y in itertools.product((True, 3, 2.5, 1 - 2j), repeat=2):
        assert_same_product(function(x, y), peer(x, y), peer)


def test_a_python_integer_that_does_not_fit(function):
    x = np.uint8([1, 2])
    for wrong in (256, -1, 2**70):
        with pytest.raises(OverflowError):
            function(x, wrong)
    with pytest.raises(OverflowError):
        function(2**63, 1)
    with pytest.raises(OverflowError):
        function(10**30, 1)


def test_a_python_integer_beside_floats_may_be_of_any_size(function, peer):
    for dtype in (np.float32, np.float64, np.complex64):
        x = np.array([1.5, -2.0], dtype)
        assert_same_product(function(x, 10**30), peer(x, 10**30), peer)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
def test_python_scalars_at_the_edges_of_dtypes(function, peer, dtype):
    """Rounded as NumPy rounds them, and warned of where NumPy warns."""
    x = np.array([1.0, -1.5, 0.0], dtype)
    odd = [2**24 + 1, 2**53 - 1, 2**53, 2**53 + 1, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    real = [-0.0, 5e-324, 1e-46, 6e-8, 65519.0, 65520.0, 3.4028235677973366e38, 3.5e38, 1e300]
    for scalar in [*odd, *(-number for number in odd), *real, np.inf, -np.inf, np.nan]:
        results, casts = [], []
        for called in (function, peer):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(called(x, scalar))
            casts.append({str(one.message) for one in caught if "cast" in str(one.message)})
        assert casts[0] == casts[1], scalar
        with np.errstate(all="ignore"):
            assert_same_product(*results, peer)


def test_an_array_that_changes_when_a_cast_warns(gpuops, monkeypatch):
    """Whoever shows warnings can change the arrays of the call, which must not go unnoticed."""
    x = np.zeros(4096, np.float16)

    def shows(*arguments, **options):
        warnings.simplefilter("ignore")  # NumPy warns of this way to set a dtype
        x.dtype = np.uint8
        x.resize(4096, refcheck=False)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", shows)
        with pytest.raises(RuntimeError, match="x was changed while it was in use"):
            gpuops.multiply(x, 1e6)


def test_repeated_operands_are_not_sent_up_expanded(fake_device):
    gpuops = fake_device.gpuops
    one = np.broadcast_to(np.float64(1), (1 << 20, 3))
    fake_device.fake.leave_free(30 << 20)
    try:
        result = gpuops.add(one, np.ones(3), device="cuda")
    finally:
        fake_device.fake.reset()
    assert result.shape == one.shape and (result == 2).all()
    huge = np.broadcast_to(np.float64(1), (2**40, 1, 1))
    assert gpuops.add(huge, np.empty((1, 0)), device="cuda").shape == (2**40, 1, 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ()),
        ((), (3,)),
        ((1,), (3,)),
        ((3, 1), (1, 4)),
        ((2, 1, 4), (3, 1)),
        ((5, 1, 1, 3), (2, 4, 3)),
        ((0,), (1,)),
        ((3, 0), (1, 1)),
        ((1,) * 40, (2,)),
        ((1000, 7), (7,)),
        ((1000, 7), (1000, 1)),
    ],
)
def test_broadcasting(function, peer, first, second):
    rng = np.random.default_rng(3)
    x, y = random_array(rng, first, "f"), random_array(rng, second, "f")
    assert_same(function(x, y), peer(x, y))
    assert_same(function(y, x), peer(y, x))


def test_shapes_that_do_not_broadcast(function):
    with pytest.raises(ValueError) as caught:
        function(np.ones((2, 3)), np.ones(4))
    expected = "operands could not be broadcast together with shapes (2,3) (4,)"
    assert str(caught.value).strip() == expected


def test_operands_of_any_strides(function, peer):
    base = random_array(np.random.default_rng(4), (12, 10, 8), "f")
    views = [
        base[:4, :5, :6],
        base[::-1, ::2, :][:4, :5, :6],
        base.transpose(2, 1, 0)[:4, :5, :6],
        base.transpose(1, 2, 0)[:4, :5, :6][::-1],
        np.broadcast_to(base[0, 0, :6], (4, 5, 6)),
        np.broadcast_to(base[:4, :5, :1], (4, 5, 6)),
    ]
    for x, y in itertools.product(views, repeat=2):
        np.testing.assert_array_equal(function(x, y), peer(x, y), strict=True)


@pytest.mark.parametrize("step", [-3, -2, -1, 2, 3, 4, 5])
def test_every_step(function, peer, step):
    """Some steps have loops of their own, which end somewhere in a vector, or are not aligned."""
    rng = np.random.default_rng(6)
    for dtype in NUMBERS:
        size = np.dtype(dtype).itemsize
        for count in (1, 2, 7, 33, 600, 5001):
            x = random_array(rng, count * abs(step), dtype)
            shifted = np.empty(x.nbytes + 1, "u1")[1:].view(dtype) if size > 1 else x.copy()
            shifted[:] = x[::-1]
            for a, b in ((x[::step], x[:count]), (shifted[::step], x[::step])):
                with np.errstate(all="ignore"):
                    assert_same_product(function(a, b), peer(a, b), peer)


@pytest.mark.parametrize("dtype", ["h", "f", "d"])
def test_operands_of_any_alignment(gpuops, function, peer, dtype):
    rng = np.random.default_rng(5)
    size = np.dtype(dtype).itemsize
    for shift in range(1, 4):
        x = np.frombuffer(bytearray(100 * size + shift), np.uint8)[shift:].view(dtype)
        x[:] = random_array(rng, 100, dtype)
        y = random_array(rng, 101, dtype)[1:]
        out = np.frombuffer(bytearray(100 * size + shift), np.uint8)[shift:].view(dtype)
        assert_same(function(x, y), peer(x, y))
        assert function(x, y, out=out) is out
        np.testing.assert_array_equal(out, peer(x, y))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 511, 512, 513, 4095, 4096, 4097, 100_003])
def test_every_size_of_the_tail(function, peer, size):
    rng = np.random.default_rng(6)
    for dtype in ("B", "e", "f", "d"):
        x, y = random_array(rng, size, dtype), random_array(rng, size, dtype)
        assert_same(function(x, y), peer(x, y))
        assert_same(function(x[1:], y[:-1]), peer(x[1:], y[:-1]))
        assert_same(function(x, y[0]), peer(x, y[0]))


def test_float16_is_rounded_once(function, peer):
    """Every value of float16, beside values of all sizes."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for y in (1.0, 3.0e-5, 6.0e-8, 1000.0, -65504.0, np.inf, np.nan):
        y = np.float16(y)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(function(x, y), peer(x, y), strict=True)


def test_bfloat16(function, peer):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = np.arange(2**16, dtype=np.uint16).view(bfloat16)
    for y in (1.0, 3.0e-5, 1.0e38, -256.0, np.inf, np.nan):
        y = bfloat16(y)
        with np.errstate(all="ignore"):
            result = function(x, y)
            assert result.dtype == bfloat16
            # NumPy does not know that NaN of this dtype may be equal.
            expected = peer(x, y).astype(np.float32)
            np.testing.assert_array_equal(result.astype(np.float32), expected)
    assert function(x[:4], 1.0).dtype == bfloat16
    assert function(x[:4], np.ones(4, np.float32)).dtype == np.float32
    assert function(x[:4], np.ones(4, np.float16)).dtype == np.float32
    assert function(x[:4], np.ones(4, np.int8)).dtype == bfloat16


class TestOut:
    def test_it_is_returned(self, function, peer):
        x = np.arange(6.0).reshape(2, 3)
        out = np.full((2, 3), 9.0)
        assert function(x, 2, out=out) is out
        np.testing.assert_array_equal(out, peer(x, 2))

    def test_in_place(self, function, peer):
        x, y = np.arange(1000.0), np.arange(1000.0)[::-1].copy()
        expected = peer(x, y)
        function(x, y, out=x)
        np.testing.assert_array_equal(x, expected)
        expected = peer(x, x)
        function(x, x, out=x)
        np.testing.assert_array_equal(x, expected)

    @pytest.mark.parametrize("shift", [1, 2, 7, 64])
    def test_operands_that_overlap_count_as_copied_first(self, function, peer, shift):
        base = np.arange(500.0)
        expected = peer(base[:-shift].copy(), base[shift:].copy())
        function(base[:-shift], base[shift:].copy(), out=base[shift:])
        np.testing.assert_array_equal(base[shift:], expected)
        base = np.arange(500.0)
        expected = peer(base.copy(), base[::-1].copy())
        function(base, base[::-1], out=base)
        np.testing.assert_array_equal(base, expected)

    def test_any_strides(self, function, peer):
        x = np.arange(24.0).reshape(2, 3, 4)
        for out in (
            np.zeros((4, 3, 2)).T,
            np.zeros((2, 3, 8))[..., ::2],
            np.zeros((2, 3, 4))[::-1, :, ::-1],
        ):
            function(x, 1, out=out)
            np.testing.assert_array_equal(out, peer(x, 1))

    def test_it_is_cast_by_the_rule_of_the_same_kind(self, function, peer):
        x = np.arange(5, dtype=np.int32)
        for dtype in (np.int8, np.int64, np.float16, np.float64, np.complex64):
            out = np.zeros(5, dtype)
            assert function(x, x, out=out) is out
            np.testing.assert_array_equal(out, peer(x, x, out=np.zeros(5, dtype)), strict=True)
        for dtype in (np.uint32, bool):
            out = np.ones(5, dtype)
            with pytest.raises(TypeError, match="same_kind"):
                function(x, x, out=out)
            assert out.tolist() == [1] * 5

    def test_wrong_ones(self, function):
        x = np.ones(4)
        read_only = np.zeros(4)
        read_only.flags.writeable = False
        for out, error in [
            (np.zeros(5), ValueError),
            (np.zeros((1, 4)), ValueError),
            (read_only, ValueError),
            (np.broadcast_to(np.zeros(1), 4), ValueError),
            ([0.0] * 4, TypeError),
        ]:
            with pytest.raises(error):
                function(x, x, out=out)


@pytest.mark.parametrize(
    "wrong",
    [
        np.array(["a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(1, [("a", "f4")]),
        np.zeros(1, np.longdouble),
        np.array([object()]),
        np.zeros(1, ">f4"),
    ],
)
def test_dtypes_without_arithmetic(function, wrong):
    for x, y in [(wrong, np.ones(1)), (np.ones(1), wrong)]:
        with pytest.raises(TypeError):
            function(x, y)


@settings(max_examples=60)
@given(data=st.data())
def test_random_cases(function, peer, data):
    shapes = data.draw(npst.mutually_broadcastable_shapes(num_shapes=2, max_dims=5, max_side=6))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    operands = []
    for shape in shapes.input_shapes:
        array = random_array(rng, shape, data.draw(st.sampled_from(NUMBERS)))
        steps = tuple(slice(None, None, data.draw(st.sampled_from([1, -1]))) for _ in shape)
        operands.append(array[steps])
    with np.errstate(all="ignore"):
        assert_same_product(function(*operands), peer(*operands), peer)


class TestOnTheDevice:
    def test_device_arrays(self, gpu):
        gpuops = gpu.gpuops
        x, y = np.arange(1000.0), np.arange(1000.0) * 3
        d, e = gpuops.to_device(x), gpuops.to_device(y)
        result = gpuops.add(d, e)
        assert isinstance(result, gpuops.DeviceArray)
        np.testing.assert_array_equal(result.to_host(), x + y, strict=True)
        assert gpuops.multiply(d, e, out=d) is d
        np.testing.assert_array_equal(d.to_host(), x * y)

    def test_mixed_operands_and_dtypes(self, gpu):
        gpuops = gpu.gpuops
        x = np.arange(20, dtype=np.int16).reshape(4, 5)
        d = gpuops.to_device(x)
        row = np.arange(5, dtype=np.float32)
        np.testing.assert_array_equal(gpuops.add(d, row).to_host(), x + row, strict=True)
        np.testing.assert_array_equal(gpuops.add(2.5, d).to_host(), 2.5 + x, strict=True)
        np.testing.assert_array_equal(
            gpuops.multiply(d, np.int16(3)).to_host(), x * np.int16(3), strict=True
        )
        column = gpuops.to_device(row[:4].reshape(4, 1))
        np.testing.assert_array_equal(
            gpuops.add(d, column).to_host(), x + row[:4].reshape(4, 1), strict=True
        )

    @pytest.mark.parametrize("first", NUMBERS)
    def test_conversions(self, gpu, first):
        gpuops, rng = gpu.gpuops, np.random.default_rng(7)
        for second in NUMBERS:
            x, y = random_array(rng, 77, first), random_array(rng, 77, second)
            d, e = gpuops.to_device(x), gpuops.to_device(y[::-1])
            with np.errstate(all="ignore"):
                expected = np.add(x[::2], y[::-1][::2])
                np.testing.assert_array_equal(
                    gpuops.add(d[::2], e[::2]).to_host(), expected, strict=True
                )
                if np.can_cast(expected.dtype, first, "same_kind"):
                    gpuops.add(d, e, out=d)
                    np.testing.assert_array_equal(d.to_host(), np.add(x, y[::-1], out=x))

    def test_nothing_is_allocated_but_the_result(self, fake_device):
        gpuops = fake_device.gpuops
        d = gpuops.to_device(np.arange(1000.0))
        before = fake_device.fake.calls("cudaLaunchKernel")
        result = gpuops.add(d, 2.0)
        assert fake_device.fake.calls("cudaLaunchKernel") == before + 1
        for name in ("cudaMemcpyAsync", "cudaStreamSynchronize", "cudaEventSynchronize"):
            count = fake_device.fake.calls(name)
            gpuops.add(d, 2.0, out=result)
            assert fake_device.fake.calls(name) == count

    def test_more_than_a_stride_can_count(self, gpu):
        gpuops = gpu.gpuops
        column = np.broadcast_to(np.float32(1), (2**31, 1))
        with pytest.raises(ValueError, match="too big"):
            gpuops.add(column, np.broadcast_to(np.float32(1), (1, 2**31)))
