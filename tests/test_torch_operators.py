"""gpuops.torch: values, gradients, and the graph of torch.compile, on CPU and CUDA tensors."""

import doctest
import inspect
import itertools
import warnings

import numpy as np
import pytest
from helpers import run_child

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import gpuops  # noqa: E402 (the package that conftest.py put on the path)
import gpuops.torch as operators  # noqa: E402

# What torch warns of, while it compiles above all, is no concern of these tests.
pytestmark = pytest.mark.filterwarnings("default")

BORDERS = ("reflect", "mirror", "nearest", "constant", "wrap")


def needs(name):
    """Marks tests of an operator that this build may not have."""
    reason = f"this build of gpuops has no {name}"
    return pytest.mark.skipif(not hasattr(gpuops, name), reason=reason)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
        if not gpuops.is_available():
            pytest.skip(gpuops.show_config(mode="dicts")["cuda_problem"])
    torch.manual_seed(20)
    yield request.param
    if request.param == "cuda":
        gpuops.synchronize()


def random(device, *shape, dtype=torch.float64, grad=True):
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=grad)


def equal(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual.detach().cpu(), expected.detach().cpu())


# The import


def test_torch_is_imported_by_nobody_else():
    run_child(
        gpuops,
        """if True:
        import sys, gpuops
        gpuops.gather([1, 2], [0], device="cpu")
        gpuops.show_config(mode="dicts")
        assert "torch" not in sys.modules and not hasattr(gpuops, "torch")
        """,
    )


def test_without_torch():
    printed = run_child(
        gpuops,
        """if True:
        import sys, traceback
        class NoTorch:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")
        sys.meta_path.insert(0, NoTorch())
        import gpuops
        try:
            import gpuops.torch
        except ModuleNotFoundError as error:
            assert error.name == "torch"
            print(traceback.format_exc())
        """,
    )
    assert "During handling" not in printed
    assert printed.strip().splitlines()[-1] == (
        "ModuleNotFoundError: gpuops.torch needs PyTorch, which is not installed: pip install torch"
    )


def test_an_old_torch():
    printed = run_child(
        gpuops,
        """if True:
        import sys, types
        torch = types.ModuleType("torch")
        torch.library, torch.__version__ = types.SimpleNamespace(), "2.3.1"
        sys.modules["torch"] = torch
        try:
            import gpuops.torch
        except ImportError as error:
            print(error)
        """,
    )
    assert printed == "gpuops.torch needs PyTorch 2.4 or later, and found 2.3.1\n"


def test_everything_public_is_documented():
    assert sorted(operators.__all__) == operators.__all__
    for name in operators.__all__:
        item = getattr(operators, name)
        assert "Examples\n--------\n>>> " in inspect.getdoc(item), name
        if inspect.isfunction(item):
            for part in ("Parameters", "Returns", "Raises", "See Also"):
                assert f"{part}\n{'-' * len(part)}\n" in inspect.getdoc(item), (name, part)


@pytest.mark.parametrize("name", operators.__all__)
def test_the_examples(name):
    source = {"Gather": "gather", "Sigmoid": "sigmoid", "scatter_add_": "scatter_add"}
    if not hasattr(gpuops, source.get(name, name)):
        pytest.skip(f"this build of gpuops has no {name}")
    if name == "gather" and not hasattr(gpuops, "scatter_add"):
        pytest.skip("the gradient of gather needs scatter_add")
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for test in finder.find(getattr(operators, name), name, globs={}):
        runner.run(test)
    assert runner.failures == 0 and runner.tries > 0


def test_signatures_follow_those_of_gpuops():
    for name in operators.__all__:
        if inspect.isclass(getattr(operators, name)) or not hasattr(gpuops, name):
            continue
        theirs = inspect.signature(getattr(gpuops, name)).parameters
        for parameter in inspect.signature(getattr(operators, name)).parameters.values():
            assert parameter.kind == theirs[parameter.name].kind
            assert parameter.default == theirs[parameter.name].default


# Values


def test_gather(device):
    x = torch.arange(12.0, device=device).reshape(4, 3)
    indices = torch.tensor([[3, 0], [-1, 3]], device=device)
    equal(operators.gather(x, indices), x[indices])
    equal(operators.gather(x, indices[0], axis=-1, mode="wrap"), x[:, [0, 0]])
    equal(operators.gather(x, [3, 0]), x[[3, 0]])
    equal(operators.gather(x, 2), x[2])
    equal(operators.gather(x, []), x[:0])
    equal(operators.gather(x, torch.tensor(7, device=device), axis=None), x.flatten()[7])
    for fill_value in (-1, np.float32(-1)):
        filled = operators.gather(x[:, 0], [1, 9], mode="fill", fill_value=fill_value)
        equal(filled, torch.tensor([3.0, -1.0]))
    equal(operators.gather(x.T, indices.T, axis=1), x.T[:, indices.T])
    for dtype in (torch.bool, torch.int16, torch.uint16, torch.bfloat16, torch.complex128):
        # torch's own indexing takes fewer dtypes on a GPU.
        expected = x.to(dtype).cpu()[indices.cpu()]
        equal(operators.gather(x.to(dtype), indices.short()), expected)
    with pytest.raises(np.exceptions.AxisError):
        operators.gather(x, indices, axis=2)
    with pytest.raises(IndexError, match="integer"):
        operators.gather(x, x)
    with pytest.raises(ValueError, match="mode must be"):
        operators.gather(x, indices, mode="foo")


def test_a_bad_index(device):
    x = torch.arange(4.0, device=device, requires_grad=True)
    message = "index 4 is out of bounds for axis 0 with size 4"
    with pytest.raises(IndexError, match=message):
        operators.gather(x, [0, 4])
        gpuops.synchronize()
    if hasattr(gpuops, "scatter_add"):
        for add in (operators.scatter_add, operators.scatter_add_):
            target = x.detach().clone()
            with pytest.raises(IndexError, match=message):
                add(target, [0, 4], 1.0)
                gpuops.synchronize()
            equal(target, x)


@needs("scatter_add")
def test_scatter_add(device):
    x = torch.zeros(4, 2, device=device)
    indices = torch.tensor([3, 0, 3], device=device)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [6.0, 8.0]])
    total = operators.scatter_add(x, indices, values)
    equal(total, expected)
    equal(x, torch.zeros(4, 2))
    equal(operators.scatter_add(x, indices, values, deterministic=True), expected)
    equal(operators.scatter_add(x, [1], 0.5, axis=1)[0], torch.tensor([0.0, 0.5]))
    equal(operators.scatter_add(x, 7, 1, axis=None)[3], torch.tensor([0.0, 1.0]))
    total = operators.scatter_add(x.T, indices, values.T, axis=1)
    equal(total, expected.T)
    assert total.is_contiguous()
    dropped = operators.scatter_add(x[:, 0], [9, 1], 2.0, mode="fill")
    equal(dropped, torch.tensor([0.0, 2.0, 0.0, 0.0]))
    with pytest.raises(TypeError, match="cast"):
        operators.scatter_add(torch.zeros(3, dtype=torch.int64, device=device), [0], 0.5)


INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip


@needs("scatter_add")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_scatter_add_of_python_integers(device, dtype):
    """They have no dtype of their own, as for NumPy, and are not cut to fit."""
    most = int(np.iinfo(str(dtype).partition(".")[2]).max)
    for value in (most, [most], [[most], [most]]):
        x = torch.zeros(2, dtype=dtype, device=device)
        total = operators.scatter_add(x, [[1], [0]] if value == [[most], [most]] else [1], value)
        assert total.dtype == dtype
        assert total.tolist() == ([most, most] if value == [[most], [most]] else [0, most])
        assert operators.scatter_add_(x, [0], 1).tolist() == [1, 0]
    for add in (operators.scatter_add, operators.scatter_add_):
        x = torch.ones(2, dtype=dtype, device=device)
        name = str(dtype).partition(".")[2]
        for value, one in ((most + 1, most + 1), ([0, most + 1], most + 1), (-most - 2, -most - 2)):
            with pytest.raises(
                OverflowError, match=f"Python integer {one} out of bounds for {name}"
            ):
                add(x, [0, 1], value)
        for value in (0.5, [1, 0.5], np.float64(1)):
            with pytest.raises(TypeError, match="cast"):
                add(x, [0, 1], value)
        assert x.tolist() == [1, 1]


@needs("scatter_add")
def test_scatter_add_of_scalars(device):
    """A scalar stays on the CPU, from where a kernel takes it in its arguments."""
    x = torch.zeros(2, dtype=torch.float16, device=device)
    for value in (2, 2.0, True, np.float64(2), np.uint8(2)):
        tensor = operators._as_values(value, x)
        assert (tensor.dtype, tensor.device.type, tensor.ndim) == (x.dtype, "cpu", 0)
        equal(operators.scatter_add(x, [1], value)[:1], torch.zeros(1, dtype=torch.float16))
        assert operators.scatter_add(x, [1, 1], value).tolist() == [0, 2 * value]
    x = torch.zeros(2, dtype=torch.complex64, device=device)
    assert operators.scatter_add(x, [1], 2 - 1j).tolist() == [0, 2 - 1j]
    with pytest.raises(TypeError, match="bool"):
        operators.scatter_add(torch.zeros(2, dtype=torch.bool, device=device), [0], 1)


@needs("scatter_add")
@pytest.mark.parametrize("grad", [False, True])
def test_scatter_add_in_place_to_a_lazy_view(device, grad):
    plain = torch.tensor([1 + 2j, 3 - 4j], device=device)
    value = torch.tensor([1 - 1j], device=device, requires_grad=grad)
    x = plain.clone()
    assert operators.scatter_add_(x.conj(), [0, 0], value).is_conj()
    equal(x, torch.tensor([3 + 4j, 3 - 4j]))
    x = plain.clone()
    assert operators.scatter_add_(x.conj().imag, [1], value.real * 2).is_neg()
    equal(x, torch.tensor([1 + 2j, 3 - 6j]))


@needs("scatter_add")
def test_scatter_add_in_place(device):
    x = torch.zeros(3, 4, device=device)
    columns = x.T
    assert operators.scatter_add_(columns, [3, 0, 3], 1.0) is columns
    equal(x, torch.tensor([[1.0, 0.0, 0.0, 2.0]] * 3))

    # With a gradient the way is another, and the result the same.
    x = torch.zeros(4, device=device)
    values = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
    assert operators.scatter_add_(x, [3, 0, 3], values) is x
    equal(x, torch.tensor([2.0, 0.0, 0.0, 4.0]))
    (x * torch.arange(4.0, device=device)).sum().backward()
    equal(values.grad, torch.tensor([3.0, 0.0, 3.0]))

    with pytest.raises(RuntimeError, match="leaf"):
        operators.scatter_add_(values, [0], 1.0)


@needs("scatter_add")
def test_autograd_sees_a_change_in_place(device):
    weight = torch.ones(3, device=device, requires_grad=True)
    x = torch.ones(3, device=device)
    product = weight * x
    operators.scatter_add_(x, [0], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_saxpy(device):
    x = torch.tensor([1.0, 2.0, 3.0], device=device)
    equal(operators.saxpy(2, x, x), torch.tensor([3.0, 6.0, 9.0]))
    equal(operators.saxpy(x[:, None], x, x)[2], torch.tensor([4.0, 8.0, 12.0]))
    # One rounding: with two, the sum would be 0.
    a = torch.tensor([1 + 2.0**-12], device=device)
    equal(operators.saxpy(a, a, -(a * a)), torch.tensor([2.0**-24]))
    for a in (np.float32(2), np.float64(2), np.int8(2), np.array(2.0)[()]):
        equal(operators.saxpy(a, x.half(), x.half()), torch.tensor([3.0, 6.0, 9.0]).half())
    with pytest.raises(ValueError, match="broadcast"):
        operators.saxpy(2, x, x[:2])


@needs("sigmoid")
def test_sigmoid(device):
    x = torch.tensor([-1000.0, -0.0, 1000.0, torch.nan], device=device)
    expected = torch.tensor([0.0, 0.5, 1.0])
    equal(operators.sigmoid(x)[:3], expected)
    assert operators.sigmoid(x)[3].isnan()
    x = random(device, 50, 3, grad=False)
    torch.testing.assert_close(operators.sigmoid(x.T), torch.sigmoid(x.T))
    equal(operators.Sigmoid()(x), operators.sigmoid(x))
    assert operators.sigmoid(torch.ones(2, dtype=torch.int32, device=device)).dtype == torch.float64
    y = torch.sigmoid(x)
    torch.testing.assert_close(operators.sigmoid_backward(x, y), x * y * (1 - y))
    with pytest.raises(TypeError, match="complex"):
        operators.sigmoid(x.to(torch.complex64))


MATMULS = [
    ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)), ((2, 3), (5, 3, 4)), ((1, 2, 3), (5, 3, 4)), ((3,), (5, 3, 4)),
    ((2, 1, 2, 3), (5, 3, 4)), ((2, 0), (0, 3)), ((0, 3), (3, 2)),
]  # fmt: skip


@needs("matmul")
@pytest.mark.parametrize(("a", "b"), MATMULS, ids=str)
def test_matmul(device, a, b):
    x, y = random(device, *a, grad=False), random(device, *b, grad=False)
    torch.testing.assert_close(operators.matmul(x, y), torch.matmul(x, y))


@needs("matmul")
def test_matmul_refuses(device):
    x = random(device, 2, 3)
    for call in (operators.matmul, torch.compile(operators.matmul, backend="eager")):
        with pytest.raises(Exception, match="mismatch in its core dimension 0"):
            call(x, x)
        with pytest.raises(Exception, match="(?i)dimensions"):
            call(x, x[0, 0])
    with pytest.raises(ValueError, match="precision"):
        operators.matmul(x, x.T, precision="half")


@needs("correlate")
@pytest.mark.parametrize("mode", BORDERS)
def test_correlate(device, mode):
    ndimage = pytest.importorskip("scipy.ndimage")
    image = random(device, 4, 5, grad=False)
    weights = random(device, 2, 3, grad=False)
    actual = operators.correlate(image, weights, mode=mode, cval=2.0, origin=(-1, 1))
    expected = ndimage.correlate(
        image.cpu().numpy(), weights.cpu().numpy(), mode=mode, cval=2.0, origin=(-1, 1)
    )
    torch.testing.assert_close(actual.cpu(), torch.from_numpy(expected))
    twice = operators.correlate(torch.stack((image, image)), weights, mode=mode, cval=2.0)
    for origin in ([0, 0], np.int64(0), np.array([0, 0]), (np.int8(0), 0)):
        equal(twice[1], operators.correlate(image, weights, mode=mode, cval=2.0, origin=origin))


@needs("correlate")
def test_correlate_refuses(device):
    image, weights = random(device, 4, 5), random(device, 3, 3)
    with pytest.raises(ValueError, match="origin"):
        operators.correlate(image, weights, origin=2)
    for origin in (0.0, [0, 0.5], None):
        with pytest.raises(TypeError):
            operators.correlate(image, weights, origin=origin)
    with pytest.raises(ValueError, match="mode"):
        operators.correlate(image, weights, mode="foo")
    with pytest.raises(ValueError, match="weights"):
        operators.correlate(image, random(device, 2, 3, 3))


def test_modules(device):
    x = torch.arange(6.0, device=device).reshape(3, 2)
    module = operators.Gather(axis=1, mode="fill", fill_value=9)
    equal(module(x, [1, 5])[0], torch.tensor([1.0, 9.0]))
    assert repr(module) == "Gather(axis=1, mode='fill', fill_value=9)"
    assert repr(operators.Gather()) == "Gather(axis=0)"
    assert list(operators.Sigmoid().parameters()) == []


DTYPES = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip


def test_the_compiler_is_told_the_right_dtypes():
    """The dtype of every result is what the fake kernel said, for all pairs and scalars."""
    ops = torch.ops.gpuops
    floats = [dtype for dtype in DTYPES if not dtype.is_complex]
    cases = [(ops.multiply.default, pair) for pair in itertools.product(DTYPES, DTYPES)]
    cases += [(ops.multiply.Scalar, (one, s)) for one in DTYPES for s in (True, 2, 2.5, 1j)]
    cases += [(ops.saxpy.default, some) for some in itertools.product(DTYPES, DTYPES, DTYPES[8:12])]
    if hasattr(gpuops, "matmul"):
        cases += [(ops.matmul.default, pair) for pair in itertools.product(DTYPES, DTYPES)]
    if hasattr(gpuops, "sigmoid"):
        cases += [(ops.sigmoid.default, (one,)) for one in floats]
        cases += [(ops.sigmoid_backward.default, two) for two in itertools.product(floats, floats)]
    for operator, operands in cases:
        arguments = [
            torch.ones(1, dtype=operand) if isinstance(operand, torch.dtype) else operand
            for operand in operands
        ]
        fakes = [
            argument.to("meta") if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        ]
        more = ("full",) if operator is ops.matmul.default else ()
        expected = operator(*arguments, *more)
        assert operator(*fakes, *more).dtype == expected.dtype, (operator, operands)


@pytest.mark.parametrize("meta", [False, True])
def test_dtypes_that_are_not_for_arithmetic(meta):
    x = torch.ones(2).to(torch.float8_e4m3fn)
    x, y = (one.to("meta") if meta else one for one in (x, torch.ones(2)))
    with pytest.raises(TypeError):
        operators.saxpy(2.0, x, y)
    with pytest.raises(TypeError):
        operators.saxpy(y, x, y)


@needs("scatter_add")
@pytest.mark.parametrize("axis", [0, -1, None])
def test_the_compiler_is_told_of_no_dimensions(axis):
    """A tensor of none counts as one of one element, with and without data."""
    for place in ("cpu", "meta"):
        x = torch.tensor(5.0, device=place, requires_grad=True)
        indices = torch.tensor([[0, -1, 0]], device=place)
        rows = operators.gather(x, indices, axis=axis)
        assert rows.shape == (1, 3)
        total = operators.scatter_add(x, indices, rows, axis=axis)
        assert total.shape == ()
        total.backward()
        assert x.grad.shape == ()
        with pytest.raises(np.exceptions.AxisError):
            operators.gather(x, indices, axis=1)
        with pytest.raises(np.exceptions.AxisError):
            operators.scatter_add(x, indices, 1.0, axis=-2)
    x = torch.tensor(5.0, requires_grad=True)
    torch.library.opcheck(
        torch.ops.gpuops.gather.default,
        (x, indices.new_zeros(3, device="cpu"), axis, "raise", None),
    )


def test_other_views(device):
    """Tensors that memory does not hold as they are: conjugates, negatives, expanded ones."""
    x = random(device, 3, dtype=torch.complex128, grad=False)
    equal(operators.gather(x.conj(), [2, 0]), x.conj()[[2, 0]])
    equal(operators.saxpy(1, x.conj().imag, torch.zeros(3, device=device)), -x.imag)
    equal(operators.gather(x.real.expand(2, 3), [1, 1]), x.real.expand(2, 3))
    equal(operators.gather(x.flip(0)[::2], [1]), x[:1])


# Gradients


def check(function, *inputs):
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@needs("scatter_add")
@pytest.mark.parametrize("axis", [0, -1, None])
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
def test_gradient_of_gather(device, axis, mode):
    outside = [] if mode == "raise" else [7, -9, 30]
    indices = torch.tensor([2, 0, -1, 2, *outside], device=device)
    check(lambda x: operators.gather(x, indices, axis=axis, mode=mode), random(device, 3, 4))


@needs("scatter_add")
def test_gradient_of_gather_is_deterministic(device):
    if device == "cpu":
        pytest.skip("the CPU backend always is")
    x = random(device, 10, 100, dtype=torch.float32)
    indices = torch.randint(10, (100_000,), device=device)
    gradient = torch.randn(100_000, 100, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (
            torch.autograd.grad(operators.gather(x, indices), x, gradient)[0] for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    equal(first, again)


@needs("scatter_add")
@pytest.mark.parametrize("mode", ["raise", "fill"])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (1,), ()])
def test_gradient_of_scatter_add(device, mode, shape):
    indices = torch.tensor([2, 0, 2 if mode == "raise" else 5], device=device)
    check(
        lambda x, values: operators.scatter_add(x, indices, values, mode=mode),
        random(device, 3, 4),
        random(device, *shape),
    )


@needs("sigmoid")
def test_gradient_of_sigmoid(device):
    check(operators.sigmoid, random(device, 3, 4))
    check(operators.sigmoid_backward, random(device, 4), random(device, 3, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradient_of_saxpy(device, dtype):
    a, x, y = (random(device, *shape, dtype=dtype) for shape in ((3, 1), (4,), (2, 3, 4)))
    check(operators.saxpy, a, x, y)
    check(operators.saxpy, random(device), x, random(device, 1, dtype=dtype))
    scalar = 2.5 if dtype == torch.float64 else 2 - 1j
    check(lambda x, y: operators.saxpy(scalar, x, y), x, y)
    check(lambda x, y: operators.saxpy(scalar, x, y), random(device, 4), y)


@needs("matmul")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(("a", "b"), MATMULS[:10], ids=str)
def test_gradient_of_matmul(device, a, b, dtype):
    check(operators.matmul, random(device, *a, dtype=dtype), random(device, *b, dtype=dtype))


@needs("matmul")
def test_gradient_of_an_empty_product(device):
    a, b = random(device, 2, 0), random(device, 0, 3)
    operators.matmul(a, b).sum().backward()
    assert a.grad.shape == (2, 0) and b.grad.shape == (0, 3)


CORRELATIONS = [
    ((4, 5), (3, 3), 0), ((4, 5), (2, 3), (-1, 1)), ((2, 2, 3), (5, 4), (1, -2)),
    ((1, 3), (3, 1), 0), ((4,), (3,), 1), ((3,), (7,), (-3,)), ((2, 3, 4), (1, 2, 2), 0),
    ((2, 3, 4), (3, 2), (0, 1, -1)), ((1, 1), (3, 4), -1),
]  # fmt: skip


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize(("shape", "of_weights", "origin"), CORRELATIONS, ids=str)
@pytest.mark.parametrize("mode", BORDERS)
def test_gradient_of_correlate(device, mode, shape, of_weights, origin):
    check(
        lambda image, weights: operators.correlate(
            image, weights, mode=mode, cval=1.5, origin=origin
        ),
        random(device, *shape),
        random(device, *of_weights),
    )


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", BORDERS)
def test_gradient_of_correlate_in_narrow_dtypes(device, mode, dtype):
    image = random(device, 3, 40, 50)
    weights = random(device, 5, 4)
    gradient = random(device, 3, 40, 50, grad=False)
    exact = torch.autograd.grad(
        operators.correlate(image, weights, mode=mode), (image, weights), gradient
    )
    narrow = [operand.detach().to(dtype).requires_grad_() for operand in (image, weights)]
    found = torch.autograd.grad(operators.correlate(*narrow, mode=mode), narrow, gradient.to(dtype))
    limit = 4 * torch.finfo(dtype).eps
    for actual, expected in zip(found, exact, strict=True):
        assert actual.dtype == dtype
        error = (actual.double() - expected).abs().max()
        assert error / expected.abs().max() <= limit


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize("length", [1, 7, 24, 90])
def test_gradient_of_weights_in_pieces(device, length, monkeypatch):
    """As for images of more pixels than are worked on at a time."""
    monkeypatch.setattr(operators, "_PIECES", {"cpu": length, None: length})
    image, weights = random(device, 2, 4, 5, grad=False), random(device, 3, 2)
    check(lambda weights: operators.correlate(image, weights), weights)


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize("length", [1, 7, 24, 90])
@pytest.mark.parametrize(("shape", "of_weights", "origin"), CORRELATIONS, ids=str)
def test_windows_give_the_gradient_of_weights(device, shape, of_weights, origin, length):
    """The way for what is not finite, on finite numbers: against the flat dot products."""
    image, gradient = (random(device, *shape, grad=False) for _ in range(2))
    plain = torch.ops.gpuops.correlate_weights.default(
        gradient, image, of_weights, "mirror", 0.0, [0]
    )
    rows, columns = (1, *of_weights)[-2:]
    size = (1, *shape)[-2:]
    padded = operators._as_images(image)
    for axis, (before, after) in zip(
        (-2, -1), operators._sides(len(shape), (rows, columns), [0]), strict=True
    ):
        of_axis = operators._border_positions("mirror", before, size[axis], after, device)
        padded = padded.index_select(axis, of_axis)
    taps = operators._taps_of_windows(operators._as_images(gradient), padded, rows, columns, length)
    torch.testing.assert_close(taps.reshape(of_weights), plain)


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_gradient_of_weights_with_pixels_that_are_not_finite(device, bad):
    """They reach the weights that they meet, and no others."""
    line = torch.tensor([1.0, 2.0, 3.0, 4.0, bad], device=device)
    weights = torch.ones(3, device=device, requires_grad=True)
    operators.correlate(line, weights, mode="constant").sum().backward()
    assert weights.grad[0] == 10
    expected = torch.full((2,), bad)
    torch.testing.assert_close(weights.grad[1:].cpu(), expected, equal_nan=True)

    images = random(device, 2, 4, 5, grad=False)
    images[0, 0, 0] = images[1, 3, 4] = bad
    gradient = random(device, 2, 4, 5, grad=False)
    weights = random(device, 3, 3)
    operators.correlate(images, weights, mode="constant").backward(gradient)
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    expected = torch.stack(
        [(padded[:, i : i + 4, j : j + 5] * gradient).sum() for i in range(3) for j in range(3)]
    )
    torch.testing.assert_close(weights.grad.flatten(), expected, equal_nan=True)
    assert weights.grad.isfinite().tolist() == [
        [False, False, True], [False, False, False], [True, False, False]
    ]  # fmt: skip
    # Zeros after the gradient do not stand for it either.
    gradient[0, 3, 4] = bad
    (back,) = torch.autograd.grad(
        operators.correlate(torch.ones_like(images), weights), weights, gradient
    )
    torch.testing.assert_close(back, torch.full_like(back, bad), equal_nan=True)


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradient_of_weights_at_a_border_beyond_the_dtype(device, dtype):
    """The border is as exact as in the filter itself: neither infinite nor of eight bits."""
    image = torch.ones(4, 4, dtype=dtype, device=device)
    for cval in (1e6, 0.1):
        weights = torch.ones(3, 3, dtype=torch.float64, device=device, requires_grad=True)
        operators.correlate(image, weights, mode="constant", cval=cval).sum().backward()
        border = float(np.float32(cval))
        corner, edge = 9 + 7 * border, 12 + 4 * border
        expected = [[corner, edge, corner], [edge, 16, edge], [corner, edge, corner]]
        equal(weights.grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("places", [("cpu", "meta"), ("meta", "cpu")], ids=str)
def test_gradient_of_weights_of_operands_apart(places, monkeypatch):
    """As of images on the CPU with weights, and a gradient, on a GPU: here on no device at all."""
    monkeypatch.setattr(torch, "isfinite", lambda x: True)
    gradient, image = (torch.ones(3, 4, device=place) for place in places)
    taps = operators._run_correlate_weights(None, gradient, image, (1, 1), "wrap", 0.0, [0])
    assert taps.is_meta
    assert taps.shape == (1, 1)


def test_operands_come_together():
    """On the device of the first that is not the CPU, whichever it is."""
    host, device = torch.ones(2), torch.ones(2, device="meta")
    for operands in ((host, device), (device, host), (device, device)):
        assert all(operand.is_meta for operand in operators._together(*operands))
    assert operators._together(host, host) == [host, host]


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize("mode", BORDERS)
def test_gradient_of_no_images(device, mode):
    image, weights = random(device, 0, 4, 5), random(device, 3, 3)
    operators.correlate(image, weights, mode=mode).sum().backward()
    equal(image.grad, torch.zeros(0, 4, 5, dtype=torch.float64))
    equal(weights.grad, torch.zeros(3, 3, dtype=torch.float64))


@needs("matmul")
def test_gradients_keep_the_dtypes_of_the_operands(device):
    narrow = random(device, 3, 3, dtype=torch.float16)
    wide = random(device, 3, 3)
    real = random(device, 3, 3, dtype=torch.float32)
    phase = random(device, 3, 3, dtype=torch.complex64)
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no imaginary part is lost by a cast
        for function in (operators.matmul, lambda x, y: operators.saxpy(x, y, y)):
            for pair in ((narrow, wide), (real, phase), (phase, wide), (narrow, real)):
                result = function(*pair)
                gradients = torch.autograd.grad(result, pair, torch.ones_like(result))
                assert [one.dtype for one in gradients] == [one.dtype for one in pair]
    torch.set_warn_always(False)


def test_nothing_is_kept_without_need(device):
    """Of a product with constants, only the constants are saved for the gradient."""
    saved = []
    x, constant = random(device, 3), random(device, 3, grad=False)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.data_ptr()), lambda tensor: tensor
    ):
        operators.saxpy(constant, x, constant)
        if hasattr(gpuops, "matmul"):
            operators.matmul(constant, x)
        if hasattr(gpuops, "correlate"):
            operators.correlate(x, constant)
        operators.gather(x, torch.tensor([0], device=device))
    assert x.data_ptr() not in saved and constant.data_ptr() in saved


def test_training(device):
    """A few steps through several of the operators at once bring the loss down."""
    for name in ("scatter_add", "sigmoid", "matmul"):
        if not hasattr(gpuops, name):
            pytest.skip(f"this build of gpuops has no {name}")
    table = torch.nn.Parameter(torch.randn(20, 4, device=device))
    weights = torch.nn.Parameter(torch.randn(4, device=device))
    indices = torch.arange(20, device=device).repeat(3)
    wanted = (indices % 2).float()
    optimizer = torch.optim.SGD([table, weights], lr=1.0)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        found = operators.sigmoid(operators.matmul(operators.gather(table, indices), weights))
        loss = torch.nn.functional.binary_cross_entropy(found, wanted)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


# The graph


def samples(device):
    """Operators of torch.ops.gpuops with arguments, and what of gpuops they need."""

    def grad(*shape, dtype=torch.float32):
        return random(device, *shape, dtype=dtype)

    def given(*values):
        return torch.tensor(values, device=device)

    ops = torch.ops.gpuops
    yield "scatter_add", ops.gather.default, (grad(3, 4), given(2, 0, -1), 0, "raise", None)
    yield "scatter_add", ops.gather.default, (grad(3, 4), given(8, 0), None, "fill", 1.5)
    yield "gather", ops.gather.default, (given(3, 4, 5), given(1), -1, "clip", None)
    yield (
        "scatter_add",
        ops.gather_backward.default,
        (grad(2, 4), given(1, 1), [3, 4], 0, "raise"),
    )
    added = (given(2, 0), grad(2, 1), 0, "raise", False)
    yield "scatter_add", ops.scatter_add.default, (grad(3, 4), *added)
    yield (
        "scatter_add",
        ops.scatter_add_.default,
        (torch.zeros(3, 4, device=device), given(2, 0), given(5.0), 1, "wrap", True),
    )
    yield "gather", ops.multiply.default, (grad(3, 1), grad(4, dtype=torch.float64))
    yield "gather", ops.multiply.Scalar, (grad(3, 1), 2.5)
    yield "gather", ops.multiply.Scalar, (grad(3, 1), 2 - 1j)
    yield "gather", ops.saxpy.default, (grad(), grad(3, 1), grad(4))
    yield "gather", ops.saxpy.Scalar, (3, grad(3, 1), grad(4))
    yield "sigmoid", ops.sigmoid.default, (grad(3, 4).T,)
    yield "sigmoid", ops.sigmoid_backward.default, (grad(3, 1), grad(4, dtype=torch.float64))
    for a, b in MATMULS[:10]:
        yield "matmul", ops.matmul.default, (grad(*a), grad(*b), "full")
    for mode in BORDERS:
        image, weights = grad(2, 4, 5), grad(3, 2)
        yield "correlate", ops.correlate.default, (image, weights, mode, 1.5, [0])
        yield "correlate", ops.correlate_input.default, (image, weights, mode, [0, -1])
        yield (
            "correlate",
            ops.correlate_weights.default,
            (image, grad(2, 4, 5), [3, 2], mode, 1.5, [1, 0]),
        )
    line = (grad(4), grad(3), "mirror", 0.0, [-1])
    yield "correlate", ops.correlate.default, line


def test_opcheck(device):
    """Schema, registration of autograd, fake kernel, and the compiler's view of each operator."""
    checked = set()
    for name, operator, arguments in samples(device):
        if hasattr(gpuops, name) and hasattr(gpuops, "scatter_add"):
            torch.library.opcheck(operator, arguments)
        checked.add(operator)
    overloads = {
        getattr(packet, overload)
        for packet in (getattr(torch.ops.gpuops, name) for name in dir(torch.ops.gpuops))
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()
    }
    assert checked == overloads


def strided(rng, device, shape):
    """A tensor that broadcasts to a shape, its axes in any order, some with steps."""
    shape = [1 if rng.random() < 0.15 else size for size in shape][rng.integers(2) :]
    axes = rng.permutation(len(shape)) if rng.random() < 0.7 else range(len(shape))
    steps = [int(rng.choice([1, 1, 2])) for _ in axes]
    base = random(device, *[shape[axis] * steps[axis] for axis in axes], grad=False)
    x = base.permute(*np.argsort(axes).tolist())
    x = x[tuple(slice(None, None, step) for step in steps)]
    if rng.random() < 0.2:
        axis = int(rng.integers(x.ndim))
        x = x.narrow(axis, 0, min(1, x.shape[axis])).expand(x.shape)
    return x


def test_fake_kernels_have_the_layout_of_results(device):
    """Of operators of elements, whose results are in the order of their operands."""
    rng, ops = np.random.default_rng(5), torch.ops.gpuops
    counts = {ops.multiply.default: 2, ops.saxpy.default: 3}
    if hasattr(gpuops, "sigmoid"):
        counts |= {ops.sigmoid.default: 1, ops.sigmoid_backward.default: 2}
    turned = 0
    for _ in range(200):
        shape = rng.integers(0 if rng.random() < 0.1 else 1, 5, rng.integers(2, 5)).tolist()
        for operator, count in counts.items():
            operands = [strided(rng, device, shape) for _ in range(count)]
            result = operator(*operands)
            turned += not result.is_contiguous()
            with FakeTensorMode() as mode:
                fake = operator(*[mode.from_tensor(operand) for operand in operands])
            assert fake.shape == result.shape
            for size, one, other in zip(result.shape, fake.stride(), result.stride(), strict=True):
                assert size == 1 or result.numel() == 0 or one == other, operands
    assert (turned > 0) == (device == "cpu")


def compiled_cases(device):
    indices = torch.tensor([2, 0, -1, 2], device=device)
    vector = random(device, 4, dtype=torch.float32)
    matrix = random(device, 5, 4, dtype=torch.float32)

    def gather(x):
        return operators.gather(x, indices) * operators.gather(x[1:], [1], axis=1)

    def scatter_add(x):
        total = operators.scatter_add(x, indices, x[:4] * 2)
        counts = operators.scatter_add_(torch.zeros(5, device=x.device), indices, 1.0)
        whole = torch.zeros(5, dtype=torch.uint8, device=x.device)
        whole = operators.scatter_add_(whole, [1, 1], 3) + operators.scatter_add(whole, [0], [2])
        return total + counts[:, None] + whole[:, None]

    def saxpy(x, y):
        return operators.saxpy(2.5, x, operators.saxpy(x[:, :1], y, y))

    def sigmoid(x):
        return operators.Sigmoid()(x * 2)

    def turned(x, y):
        return operators.saxpy(y[:, None], operators.sigmoid(x.mT), x.mT[:, :1]) * 2

    def matmul(x, y):
        return operators.matmul(x.relu(), y)

    def correlate(x, y):
        return operators.correlate(x, y[:3, None], mode="mirror").exp()

    yield "gather scatter_add", gather, (matrix,)
    yield "scatter_add", scatter_add, (matrix,)
    yield "saxpy", saxpy, (matrix, vector)
    yield "sigmoid", sigmoid, (matrix,)
    yield "sigmoid", turned, (matrix, vector)
    yield "matmul", matmul, (matrix, vector)
    yield "correlate scatter_add", correlate, (matrix, vector)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    """One graph, forward and backward, with the results of the code as it is."""
    for names, function, operands in compiled_cases(device):
        if all(hasattr(gpuops, name) for name in names.split()):
            torch.compiler.reset()
            compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
            same_with_gradients(function, compiled, operands)


def same_with_gradients(function, compiled, operands):
    expected, actual = function(*operands), compiled(*operands)
    torch.testing.assert_close(actual, expected)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, operands, gradient),
        torch.autograd.grad(expected, operands, gradient),
    )


def test_compile_by_the_default_backend(device, tmp_path, monkeypatch):
    """The real compiler, with code around the operators that it makes kernels of."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("scatter_add", "sigmoid", "matmul"):
        if not hasattr(gpuops, name):
            pytest.skip(f"this build of gpuops has no {name}")
    indices = torch.tensor([2, 0, -1, 2], device=device)

    def model(x, weights):
        rows = operators.gather(x * 2, indices).relu()
        sums = operators.saxpy(0.5, operators.matmul(rows, weights), rows[:, 0])
        return operators.sigmoid(sums) + operators.sigmoid(x.mT).sum()

    operands = (
        random(device, 5, 4, dtype=torch.float32),
        random(device, 4, dtype=torch.float32),
    )
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = torch.compile(model, fullgraph=True)
            compiled(*operands)
        except torch._inductor.exc.InductorError as error:
            if "compiler" not in str(error):
                raise
            pytest.skip("torch finds no C++ compiler")
        same_with_gradients(model, compiled, operands)


def test_export(device):
    """A program that is exported holds the operators by name."""
    module = operators.Gather()
    indices = torch.tensor([1, 0], device=device)
    program = torch.export.export(module, (torch.ones(3, 2, device=device), indices))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "gpuops.gather.default" in targets


# CUDA tensors alone


@pytest.fixture
def stream():
    if not (torch.cuda.is_available() and gpuops.is_available()):
        pytest.skip("no torch with CUDA, or no GPU")
    return torch.cuda.Stream()


def test_the_current_stream_of_torch(stream):
    """Work is queued behind what torch has queued, and torch's behind it."""
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = x.detach() + 3
        total = operators.saxpy(2, x, late)
        before = stream.query()
        total.sum().backward()
        sums = total.sum()
    assert not before
    stream.synchronize()
    assert float(sums) == 3 * (1 << 20)
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_a_tensor_on_the_cpu_beside_one_on_the_gpu(stream):
    x = torch.arange(4.0, device="cuda", requires_grad=True)
    y = torch.ones(4, requires_grad=True)
    total = operators.saxpy(2, x, y)
    assert total.is_cuda
    total.sum().backward()
    assert not y.grad.is_cuda
    rows = operators.gather(y, torch.tensor([1, 1], device="cuda"))
    assert rows.is_cuda
    if hasattr(gpuops, "scatter_add"):
        (gradient,) = torch.autograd.grad(rows.sum(), y)
        assert torch.equal(gradient, torch.tensor([0.0, 2.0, 0.0, 0.0]))


@needs("correlate")
@needs("scatter_add")
@pytest.mark.parametrize("mode", BORDERS)
@pytest.mark.parametrize("above", [0, 1])
def test_gradients_of_correlate_across_devices(stream, mode, above):
    operands = [random("cpu", 4, 5), random("cpu", 3, 3)]
    mixed = [operand.detach().clone().requires_grad_() for operand in operands]
    mixed[above] = mixed[above].detach().cuda().requires_grad_()
    results = operators.correlate(*operands, mode=mode), operators.correlate(*mixed, mode=mode)
    assert results[1].is_cuda
    gradient = torch.randn_like(results[0])
    expected = torch.autograd.grad(results[0], operands, gradient)
    found = torch.autograd.grad(results[1], mixed, gradient.cuda())
    for one, other, operand in zip(found, expected, mixed, strict=True):
        assert one.device == operand.device
        torch.testing.assert_close(one.cpu(), other)


def test_a_graph_of_cuda(stream):
    if not hasattr(gpuops, "sigmoid"):
        pytest.skip("this build of gpuops has no sigmoid")
    x = torch.zeros(1000, device="cuda")
    operators.sigmoid(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = operators.sigmoid(x)
    x.fill_(1000.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.ones_like(y))
