"""gpuops' operators for PyTorch: differentiable, and part of the graph under ``torch.compile``.

``gpuops.gather(x, indices)`` takes tensors as it is; what it makes of them has no gradient. The
functions here are operators of PyTorch, ``torch.ops.gpuops.*``, made of the same kernels: each has
a formula for its gradient, computed by gpuops where gpuops has an operator for it, and a fake
kernel, which tells the compiler the shape and dtype of a result. Results are those of the function
of the same name in `gpuops`, bit for bit, dtypes too: promotion is NumPy's.

Functions
    gather, scatter_add, scatter_add_, sigmoid, sigmoid_backward, saxpy, matmul, correlate
Modules
    Gather, Sigmoid

CUDA tensors are worked on where they are, on torch's current stream, CPU tensors on all cores of
the CPU. A tensor on the CPU beside one on the GPU is sent up, and its gradient comes back.
bfloat16 on the CPU needs the package ml_dtypes for all but `gather` without a gradient.

The transforms of ``torch.func`` do not differentiate operators of ``torch.library``, nor these.

Only importing this module imports torch: 2.4 or later, with or without CUDA.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

try:
    import torch  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "gpuops.torch needs PyTorch, which is not installed: pip install torch", name="torch"
    ) from None

if not hasattr(torch.library, "register_autograd"):
    raise ImportError(f"gpuops.torch needs PyTorch 2.4 or later, and found {torch.__version__}")

from . import _core

__all__ = [
    "Gather",
    "Sigmoid",
    "correlate",
    "gather",
    "matmul",
    "saxpy",
    "scatter_add",
    "scatter_add_",
    "sigmoid",
    "sigmoid_backward",
]

Tensor: TypeAlias = torch.Tensor
_Number: TypeAlias = int | float | complex
_Mode: TypeAlias = Literal["raise", "wrap", "clip", "fill"]
_Border: TypeAlias = Literal[
    "reflect", "mirror", "nearest", "constant", "wrap", "grid-mirror", "grid-constant", "grid-wrap"
]
_Precision: TypeAlias = Literal["full", "tf32"]
# What remains of an input in a formula for its gradient: its shape, dtype and device.
_Like: TypeAlias = tuple[Sequence[int], torch.dtype, torch.device]

# Registration. Every operator is defined by its schema, one function that runs it, and one that
# makes an empty tensor like the result. No schema has defaults: the public functions do.

_library = torch.library.Library("gpuops", "DEF")
_ops = torch.ops.gpuops


def _define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Make ``torch.ops.gpuops.<name>`` out of functions; `run` is told the device first."""
    name = schema.partition("(")[0]
    # Any strides are read, so that the compiler may choose those of the operands.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    _library.define(schema, tags=tags)
    for key, device in (("CPU", "cpu"), ("CUDA", None)):
        _library.impl(name, functools.partial(_run_detached, run, device), key)
    torch.library.register_fake(f"gpuops::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(
            f"gpuops::{name}", backward, setup_context=save, lib=_library
        )


def _run_detached(run: Callable[..., Any], device: str | None, *arguments: Any) -> Any:
    """Run an operator below autograd, where tensors still say that they require a gradient."""
    plain = [
        argument.detach()
        if isinstance(argument, torch.Tensor) and argument.requires_grad
        else argument
        for argument in arguments
    ]
    return run(device, *plain)


def _empty(operands: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make what a fake kernel returns: on the device of the first operand that is on a GPU."""
    devices = [operand.device for operand in operands]
    device = next((device for device in devices if device.type != "cpu"), devices[0])
    return torch.empty(shape, dtype=dtype, device=device)


def _empty_each(operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Make what the fake kernel of an element-wise operator returns.

    Its axes are in the order that those of the operands have in memory, on the CPU, as
    ``axes_in_memory`` of the library puts them; on a GPU, results are in C order.
    """
    shape = torch.broadcast_shapes(*[operand.shape for operand in operands])
    result = _empty(operands, shape, dtype)
    if result.device.type != "cpu" or all(operand.is_contiguous() for operand in operands):
        return result
    axes: list[int] = []
    for axis in reversed(range(len(shape))):
        place = 0
        for i, other in enumerate(axes):
            within = _is_within(operands, axis - len(shape), other - len(shape))
            if within is False:
                break
            if within:
                place = i + 1
        axes.insert(place, axis)
    strides, stride = [0] * len(shape), 1
    for axis in reversed(axes):
        strides[axis], stride = stride, stride * shape[axis]
    return torch.empty_strided(shape, strides, dtype=dtype)


def _is_within(operands: Sequence[Tensor], one: int, other: int) -> bool | None:
    """Tell whether one axis, counted from the last, is within another wherever both have steps."""
    within = None
    for operand in operands:
        if operand.ndim < -min(one, other) or 1 in (operand.shape[one], operand.shape[other]):
            continue
        step, other_step = operand.stride(one), operand.stride(other)
        if step != 0 and other_step != 0:
            within = within is not False and bool(step < other_step)
    return within


_NUMPY_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128"
).split()
_NUMPY_DTYPES = {getattr(torch, name): np.dtype(name) for name in _NUMPY_NAMES}
_TORCH_DTYPES = {dtype: theirs for theirs, dtype in _NUMPY_DTYPES.items()}
_LIMITS = {
    theirs: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for theirs, dtype in _NUMPY_DTYPES.items()
    if dtype.kind in "iu"
}


def _promoted(*operands: Any) -> torch.dtype:
    """Tell the dtype that gpuops promotes tensors and Python scalars to, which is NumPy's.

    bfloat16, which NumPy does not know, is promoted as float16 is.
    """
    dtypes = [operand.dtype for operand in operands if isinstance(operand, torch.Tensor)]
    if torch.bfloat16 in dtypes:
        if torch.float16 in dtypes:
            dtypes.append(torch.float32)
        dtypes = [torch.float16 if dtype == torch.bfloat16 else dtype for dtype in dtypes]
        narrow = torch.bfloat16
    else:
        narrow = torch.float16
    for dtype in dtypes:
        if dtype not in _NUMPY_DTYPES:
            raise TypeError(f"gpuops computes with no {dtype}: convert it with .to(...)")
    found = functools.reduce(np.promote_types, [_NUMPY_DTYPES[dtype] for dtype in dtypes])
    for operand in operands:
        if isinstance(operand, bool):
            found = np.promote_types(found, np.bool_)
        elif isinstance(operand, (int, torch.SymInt)):
            found = np.result_type(found, 0)
        elif isinstance(operand, (float, torch.SymFloat)):
            found = np.result_type(found, 0.0)
        elif isinstance(operand, complex):
            found = np.result_type(found, 0j)
    return narrow if found == np.float16 else _TORCH_DTYPES[found]


def _promoted_float(*operands: Any) -> torch.dtype:
    dtype = _promoted(*operands)
    return dtype if dtype.is_floating_point else torch.float64


def _like(operand: Tensor) -> _Like:
    return operand.shape, operand.dtype, operand.device


def _reduced(gradient: Tensor, like: _Like) -> Tensor:
    """Take a gradient back through the broadcast and the cast of the operand that it is for."""
    shape, dtype, device = like
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient.sum_to_size(shape).to(device=device, dtype=dtype)


def _together(*operands: Tensor) -> list[Tensor]:
    """Bring tensors on the CPU to the GPU if one of the others is there."""
    devices = [operand.device for operand in operands]
    device = next((device for device in devices if device.type != "cpu"), devices[0])
    return [operand.to(device) if operand.device.type == "cpu" else operand for operand in operands]


def _as_number(number: Any) -> Any:
    """Make a Python number of one of NumPy's: the dispatcher takes no other."""
    return number.item() if isinstance(number, np.generic) else number


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Tell in which dtype sums of several roundings are taken: float32 for 16-bit floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# gather and scatter_add: each is the transpose of the other.


def _run_gather(
    device: str | None,
    x: Tensor,
    indices: Tensor,
    axis: int | None,
    mode: _Mode,
    fill_value: _Number | None,
) -> Any:
    return _core.gather(x, indices, axis=axis, mode=mode, fill_value=fill_value, device=device)


def _gathered_shape(x: Tensor, indices: Tensor, axis: int | None) -> tuple[int, ...]:
    if axis is None:
        return tuple(indices.shape)
    # A tensor of no dimensions counts as one of one element.
    ndim = max(x.ndim, 1)
    if not -ndim <= axis < ndim:
        raise np.exceptions.AxisError(axis, ndim)
    axis %= ndim
    return (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _fake_gather(
    x: Tensor, indices: Tensor, axis: int | None, mode: _Mode, fill_value: _Number | None
) -> Tensor:
    return _empty((x, indices), _gathered_shape(x, indices, axis), x.dtype)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, indices, ctx.axis, ctx.mode, _ = inputs
    ctx.x = _like(x)
    ctx.save_for_backward(indices)


def _backward_gather(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    shape, _, device = ctx.x
    back = _ops.gather_backward.default(gradient, indices, shape, ctx.axis, ctx.mode)
    return back.to(device), None, None, None, None


_define(
    "gather(Tensor x, Tensor indices, int? axis, str mode, Scalar? fill_value) -> Tensor",
    _run_gather,
    _fake_gather,
    _save_gather,
    _backward_gather,
)


def _run_gather_backward(
    device: str | None,
    gradient: Tensor,
    indices: Tensor,
    shape: Sequence[int],
    axis: int | None,
    mode: _Mode,
) -> Tensor:
    back = gradient.new_zeros(shape)
    _add_in_place(device, back, indices, gradient, axis, mode, False)
    return back


def _fake_gather_backward(
    gradient: Tensor, indices: Tensor, shape: Sequence[int], axis: int | None, mode: _Mode
) -> Tensor:
    return gradient.new_empty(shape)


def _save_gather_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, _, ctx.axis, ctx.mode = inputs
    ctx.save_for_backward(indices)


def _backward_gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    again = _ops.gather.default(gradient, indices, ctx.axis, ctx.mode, None)
    return again, None, None, None, None


_define(
    "gather_backward(Tensor gradient, Tensor indices, SymInt[] shape, int? axis, str mode)"
    " -> Tensor",
    _run_gather_backward,
    _fake_gather_backward,
    _save_gather_backward,
    _backward_gather_backward,
)


def _add_in_place(
    device: str | None,
    x: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int | None,
    mode: _Mode,
    deterministic: bool,
) -> None:
    _core.scatter_add(
        x,
        indices,
        values,
        axis=axis,
        mode=mode,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        device=device,
    )


def _run_scatter_add(device: str | None, x: Tensor, *arguments: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _add_in_place(device, total, *arguments)
    return total


def _fake_scatter_add(
    x: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int | None,
    mode: _Mode,
    deterministic: bool,
) -> Tensor:
    _gathered_shape(x, indices, axis)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save_scatter_add(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, values, ctx.axis, ctx.mode, _ = inputs
    ctx.values = _like(values)
    ctx.save_for_backward(indices)


def _backward_scatter_add(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    of_values = None
    if ctx.needs_input_grad[2]:
        taken = _ops.gather.default(gradient, indices, ctx.axis, ctx.mode, None)
        of_values = _reduced(taken, ctx.values)
    return gradient, None, of_values, None, None, None


_define(
    "scatter_add(Tensor x, Tensor indices, Tensor values, int? axis, str mode, bool deterministic)"
    " -> Tensor",
    _run_scatter_add,
    _fake_scatter_add,
    _save_scatter_add,
    _backward_scatter_add,
)


def _run_scatter_add_in_place(device: str | None, x: Tensor, *arguments: Any) -> None:
    _add_in_place(device, x, *arguments)
    # Autograd looks at this count to see that what it saved has not been changed.
    torch.autograd.graph.increment_version(x)


def _fake_scatter_add_in_place(
    x: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int | None,
    index_mode: _Mode,
    deterministic: bool,
) -> None:
    _gathered_shape(x, indices, axis)


# The compiler cannot take apart an operator that changes an argument and calls another one `mode`.
_define(
    "scatter_add_(Tensor(a!) x, Tensor indices, Tensor values, int? axis, str index_mode, "
    "bool deterministic) -> ()",
    _run_scatter_add_in_place,
    _fake_scatter_add_in_place,
)


def _as_indices(indices: Any, x: Tensor) -> Tensor:
    if isinstance(indices, torch.Tensor):
        return indices
    # An empty list is one of integers here, as for NumPy.
    none = isinstance(indices, Sequence) and len(indices) == 0
    return torch.as_tensor(indices, dtype=torch.int64 if none else None, device=x.device)


def _are_integers(values: Any, dtype: torch.dtype) -> bool:
    """Tell whether all of `values` are Python integers, having checked that they fit `dtype`."""
    if isinstance(values, (list, tuple)):
        return all(_are_integers(value, dtype) for value in values)
    if not isinstance(values, int):
        return False
    least, most = _LIMITS[dtype]
    if not least <= values <= most:
        name = _NUMPY_DTYPES[dtype].name
        raise OverflowError(f"Python integer {values} out of bounds for {name}")
    return True


def _as_values(values: Any, x: Tensor) -> Tensor:
    if isinstance(values, torch.Tensor):
        return values
    # Python's integers have no dtype of their own. Floats are not cut to fit into integers: the
    # operator refuses them.
    cast = x.dtype.is_floating_point or x.dtype.is_complex
    cast = cast or (x.dtype in _LIMITS and _are_integers(values, x.dtype))
    # One value stays on the CPU: it reaches a GPU in the arguments of the kernel.
    one = isinstance(values, (int, float, complex, np.generic))
    return torch.as_tensor(
        values, dtype=x.dtype if cast else None, device="cpu" if one else x.device
    )


def gather(
    x: Tensor,
    indices: Tensor | Sequence[int] | int,
    /,
    *,
    axis: int | None = 0,
    mode: _Mode = "raise",
    fill_value: _Number | None = None,
) -> Tensor:
    """Take elements or rows of a tensor by their positions: ``x[indices]`` along `axis`.

    Parameters
    ----------
    x : Tensor
        Of any shape, strides and dtype.
    indices : Tensor of integers, sequence of int or int
        Positions along `axis`, of any shape and any integer dtype. Negative ones count from the
        end.
    axis : int or None, optional
        The axis that the positions count along, by default the first. None flattens `x`.
    mode : {'raise', 'wrap', 'clip', 'fill'}, optional
        What becomes of an index outside the axis, as in `gpuops.gather`.
    fill_value : scalar, optional
        For mode 'fill' alone; by default zero.

    Returns
    -------
    Tensor
        Of the dtype of `x` and the shape ``x.shape[:axis] + indices.shape + x.shape[axis + 1:]``,
        in C order. Its gradient is added up by `gpuops.scatter_add`, into zeros; where
        `fill_value` was put, it goes nowhere.

    Raises
    ------
    IndexError
        If an index is outside the axis, in mode 'raise'; or `indices` are not integers. For CUDA
        tensors an index outside leaves zeros in its place, and the exception is raised by the next
        call that waits for the stream through gpuops: ``gpuops.synchronize()``, for one.
    TypeError
        If `indices` are bool.
    ValueError
        If `mode` is not one of the four, or tensors are on two GPUs.
    numpy.exceptions.AxisError
        If `x` has no such axis.
    MemoryError, gpuops.DeviceError
        If memory does not suffice; if CUDA reports an error.

    See Also
    --------
    Gather, gpuops.gather, torch.index_select

    Notes
    -----
    Sums of the gradient on a GPU are taken in any order, unless
    ``torch.use_deterministic_algorithms(True)`` asks for the same bits in every run.

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import gather
    >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    >>> rows = gather(table, torch.tensor([2, 0, 2]))
    >>> rows.detach()
    tensor([[5., 6.],
            [1., 2.],
            [5., 6.]])
    >>> rows.sum().backward()
    >>> table.grad
    tensor([[1., 1.],
            [0., 0.],
            [2., 2.]])
    """
    return _ops.gather.default(x, _as_indices(indices, x), axis, mode, _as_number(fill_value))


def scatter_add(
    x: Tensor,
    indices: Tensor | Sequence[int] | int,
    values: Tensor | _Number,
    /,
    *,
    axis: int | None = 0,
    mode: _Mode = "raise",
    deterministic: bool = False,
) -> Tensor:
    """Add to elements or rows of a copy of a tensor by their positions.

    Unlike `gpuops.scatter_add` and `scatter_add_`, which work in place, this leaves `x` as it was
    and returns the sums in a tensor of its own, as ``torch.index_add`` does.

    Parameters
    ----------
    x : Tensor
        What is added to: integers, floats or complex numbers, of any shape and strides.
    indices : Tensor of integers, sequence of int or int
        Positions along `axis`, of any shape and any integer dtype. Negative ones count from the
        end. What belongs to one position several times is added several times.
    values : Tensor or scalar
        What is added: broadcast to ``x.shape[:axis] + indices.shape + x.shape[axis + 1:]``, and
        cast to the dtype of `x` if NumPy's rule 'same_kind' allows it. Python integers take the
        dtype of `x`.
    axis : int or None, optional
        The axis that the positions count along, by default the first. With None, `x` counts as
        flattened; the result has its shape all the same.
    mode : {'raise', 'wrap', 'clip', 'fill'}, optional
        What becomes of an index outside the axis, as in `gpuops.scatter_add`; 'fill' leaves out
        its values.
    deterministic : bool, optional
        Whether floats are added in the order of the indices on a GPU too, so that every run gives
        the same bits. ``torch.use_deterministic_algorithms(True)`` asks for it as well.

    Returns
    -------
    Tensor
        The sums, of the shape and dtype of `x`, in C order. Its gradient is that of `x`, and
        `gpuops.gather` of it that of `values`.

    Raises
    ------
    IndexError
        If an index is outside the axis, in mode 'raise', or `indices` are not integers; for CUDA
        tensors later, as in `gather`, and the result is then a copy of `x`.
    TypeError
        If `x` holds no numbers, `values` do not cast to its dtype, or `indices` are bool.
    OverflowError
        If a Python integer does not fit the dtype of `x`.
    ValueError
        If `values` do not broadcast, or tensors are on two devices.
    numpy.exceptions.AxisError
        If `x` has no such axis.
    MemoryError, gpuops.DeviceError
        If memory does not suffice; if CUDA reports an error.

    See Also
    --------
    scatter_add_, gather, gpuops.scatter_add, torch.index_add, numpy.add.at

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import scatter_add
    >>> x = torch.zeros(4)
    >>> scatter_add(x, torch.tensor([3, 0, 3]), torch.tensor([0.5, 1.0, 2.0]))
    tensor([1.0000, 0.0000, 0.0000, 2.5000])
    >>> x
    tensor([0., 0., 0., 0.])
    """
    return _ops.scatter_add.default(
        x, _as_indices(indices, x), _as_values(values, x), axis, mode, deterministic
    )


def scatter_add_(
    x: Tensor,
    indices: Tensor | Sequence[int] | int,
    values: Tensor | _Number,
    /,
    *,
    axis: int | None = 0,
    mode: _Mode = "raise",
    deterministic: bool = False,
) -> Tensor:
    """Add to elements or rows of a tensor in place, by their positions.

    Parameters
    ----------
    x : Tensor
        What is added to, and changed. It must not be a leaf that requires a gradient.
    indices : Tensor of integers, sequence of int or int
        Positions along `axis`, as in `scatter_add`.
    values : Tensor or scalar
        What is added, as in `scatter_add`.
    axis : int or None, optional
        The axis that the positions count along, as in `scatter_add`.
    mode : {'raise', 'wrap', 'clip', 'fill'}, optional
        What becomes of an index outside the axis, as in `scatter_add`.
    deterministic : bool, optional
        Whether floats are added in the order of the indices, as in `scatter_add`.

    Returns
    -------
    Tensor
        `x` itself.

    Raises
    ------
    IndexError, TypeError, OverflowError, ValueError, numpy.exceptions.AxisError
        As in `scatter_add`; `x` is then as it was.
    MemoryError, gpuops.DeviceError
        As in `scatter_add`; `x` is then as it was.
    RuntimeError
        If `x` is a leaf that requires a gradient, as torch's own operators in place have it.

    See Also
    --------
    scatter_add, gpuops.scatter_add, torch.Tensor.index_add_

    Notes
    -----
    Where a gradient is to flow, the sums are taken in a new tensor and copied into `x`; also where
    `x` is conjugated or negated lazily, as ``torch.conj`` does it.

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import scatter_add_
    >>> counts = torch.zeros(4, dtype=torch.int64)
    >>> scatter_add_(counts, [0, 2, 2, 3, 2], 1)
    tensor([1, 0, 3, 1])
    >>> counts
    tensor([1, 0, 3, 1])
    """
    indices, values = _as_indices(indices, x), _as_values(values, x)
    differentiated = torch.is_grad_enabled() and (x.requires_grad or values.requires_grad)
    # The compiler cannot ask a tensor whether it is lazy.
    lazy = not torch.compiler.is_compiling() and (x.is_conj() or x.is_neg())
    if differentiated or lazy:
        return x.copy_(_ops.scatter_add.default(x, indices, values, axis, mode, deterministic))
    _ops.scatter_add_.default(x, indices, values, axis, mode, deterministic)
    return x


# multiply: for the gradients of saxpy and sigmoid_backward.


def _run_multiply(device: str | None, x: Tensor, y: Any) -> Any:
    return _core.multiply(x, y, device=device)


def _fake_multiply(x: Tensor, y: Tensor) -> Tensor:
    return _empty_each((x, y), _promoted(x, y))


def _save_multiply(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y = inputs
    ctx.x, ctx.y = _like(x), _like(y)
    needs_x, needs_y = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_y else None, y if needs_x else None)


def _backward_multiply(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    needs_x, needs_y = ctx.needs_input_grad[:2]
    return (
        _reduced(_ops.multiply.default(gradient, y.conj()), ctx.x) if needs_x else None,
        _reduced(_ops.multiply.default(gradient, x.conj()), ctx.y) if needs_y else None,
    )


_define(
    "multiply(Tensor x, Tensor y) -> Tensor",
    _run_multiply,
    _fake_multiply,
    _save_multiply,
    _backward_multiply,
)


def _fake_multiply_scalar(x: Tensor, y: _Number) -> Tensor:
    return _empty_each((x,), _promoted(x, y))


def _save_multiply_scalar(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.y = inputs
    ctx.x = _like(x)


def _backward_multiply_scalar(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    back = _ops.multiply.Scalar(gradient, _conjugate(ctx.y))
    return _reduced(back, ctx.x), None


def _conjugate(number: _Number) -> _Number:
    return number.conjugate() if isinstance(number, complex) else number


_define(
    "multiply.Scalar(Tensor x, Scalar y) -> Tensor",
    _run_multiply,
    _fake_multiply_scalar,
    _save_multiply_scalar,
    _backward_multiply_scalar,
)

# saxpy


def _run_saxpy(device: str | None, a: Any, x: Tensor, y: Tensor) -> Any:
    return _core.saxpy(a, x, y, device=device)


def _fake_saxpy(a: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return _empty_each((a, x, y), _promoted(a, x, y))


def _save_saxpy(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, x, y = inputs
    ctx.a, ctx.x, ctx.y = _like(a), _like(x), _like(y)
    needs_a, needs_x = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_x else None, x if needs_a else None)


def _backward_saxpy(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, x = ctx.saved_tensors
    needs_a, needs_x, needs_y = ctx.needs_input_grad[:3]
    return (
        _reduced(_ops.multiply.default(gradient, x.conj()), ctx.a) if needs_a else None,
        _reduced(_ops.multiply.default(gradient, a.conj()), ctx.x) if needs_x else None,
        _reduced(gradient, ctx.y) if needs_y else None,
    )


_define(
    "saxpy(Tensor a, Tensor x, Tensor y) -> Tensor",
    _run_saxpy,
    _fake_saxpy,
    _save_saxpy,
    _backward_saxpy,
)


def _fake_saxpy_scalar(a: _Number, x: Tensor, y: Tensor) -> Tensor:
    return _empty_each((x, y), _promoted(x, y, a))


def _save_saxpy_scalar(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.a, x, y = inputs
    ctx.x, ctx.y = _like(x), _like(y)


def _backward_saxpy_scalar(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_y = ctx.needs_input_grad[1:3]
    of_x = None
    if needs_x:
        of_x = _reduced(_ops.multiply.Scalar(gradient, _conjugate(ctx.a)), ctx.x)
    return None, of_x, _reduced(gradient, ctx.y) if needs_y else None


_define(
    "saxpy.Scalar(Scalar a, Tensor x, Tensor y) -> Tensor",
    _run_saxpy,
    _fake_saxpy_scalar,
    _save_saxpy_scalar,
    _backward_saxpy_scalar,
)


def saxpy(a: Tensor | _Number, x: Tensor, y: Tensor, /) -> Tensor:
    """Compute ``a * x + y``, element by element, with one rounding.

    Parameters
    ----------
    a : Tensor or scalar
        The factor. A scalar of Python or NumPy takes the dtype of the tensors.
    x, y : Tensor
        Numbers. `a`, `x` and `y` broadcast against each other.

    Returns
    -------
    Tensor
        The sums, of the shape that the operands broadcast to and the dtype that NumPy promotes
        theirs to; in memory in the order of the operands on the CPU, and in C order on a GPU. The
        gradient of a tensor that was broadcast is summed to its shape.

    Raises
    ------
    TypeError
        If the operands are bool.
    ValueError
        If the shapes do not broadcast, or tensors are on two GPUs.
    OverflowError
        If a Python integer does not fit the dtype of the result.
    MemoryError, gpuops.DeviceError
        If memory does not suffice; if CUDA reports an error.

    See Also
    --------
    gpuops.saxpy, torch.addcmul

    Notes
    -----
    float32 and float64 are computed with one fused multiply-add (IEEE 754's fma), 16-bit floats in
    float32. A tensor of no dimensions counts like any other for the dtype of the result, as in
    NumPy and unlike torch.

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import saxpy
    >>> x = torch.tensor([10.0, 20.0, 30.0], requires_grad=True)
    >>> total = saxpy(2, x, torch.ones(3))
    >>> total.detach()
    tensor([21., 41., 61.])
    >>> total.sum().backward()
    >>> x.grad
    tensor([2., 2., 2.])
    """
    if isinstance(a, torch.Tensor):
        return _ops.saxpy.default(a, x, y)
    return _ops.saxpy.Scalar(_as_number(a), x, y)


# sigmoid


def _run_sigmoid(device: str | None, x: Tensor) -> Any:
    return _core.sigmoid(x, device=device)


def _fake_sigmoid(x: Tensor) -> Tensor:
    return _empty_each((x,), _promoted_float(x))


def _save_sigmoid(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward_sigmoid(ctx: Any, gradient: Tensor) -> Tensor:
    return _ops.sigmoid_backward.default(gradient, *ctx.saved_tensors)


_define(
    "sigmoid(Tensor x) -> Tensor", _run_sigmoid, _fake_sigmoid, _save_sigmoid, _backward_sigmoid
)


def _run_sigmoid_backward(device: str | None, grad: Tensor, y: Tensor) -> Any:
    return _core.sigmoid_backward(grad, y, device=device)


def _fake_sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    return _empty_each((grad, y), _promoted_float(grad, y))


def _save_sigmoid_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, y = inputs
    ctx.grad, ctx.y = _like(grad), _like(y)
    ctx.save_for_backward(grad if ctx.needs_input_grad[1] else None, y)


def _backward_sigmoid_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    grad, y = ctx.saved_tensors
    needs_grad, needs_y = ctx.needs_input_grad[:2]
    of_grad = of_y = None
    if needs_grad:
        of_grad = _reduced(_ops.sigmoid_backward.default(gradient, y), ctx.grad)
    if needs_y:
        slope = _ops.multiply.default(grad, 1 - 2 * y)
        of_y = _reduced(_ops.multiply.default(gradient, slope), ctx.y)
    return of_grad, of_y


_define(
    "sigmoid_backward(Tensor grad, Tensor y) -> Tensor",
    _run_sigmoid_backward,
    _fake_sigmoid_backward,
    _save_sigmoid_backward,
    _backward_sigmoid_backward,
)


def sigmoid(x: Tensor, /) -> Tensor:
    """Compute the logistic function, element by element: ``1 / (1 + exp(-x))``.

    Parameters
    ----------
    x : Tensor
        Real numbers or bools, of any shape and strides.

    Returns
    -------
    Tensor
        Numbers from 0 to 1, of the shape of `x`; in memory in the order of `x` on the CPU, and in C
        order on a GPU. float16, bfloat16, float32 and float64 keep their dtype; integers and bools
        give float64, as in ``scipy.special.expit`` and unlike ``torch.sigmoid``.

    Raises
    ------
    TypeError
        If `x` is complex.
    MemoryError, gpuops.DeviceError
        If memory does not suffice; if CUDA reports an error.

    See Also
    --------
    Sigmoid, sigmoid_backward, gpuops.sigmoid, torch.sigmoid

    Notes
    -----
    The gradient is `gpuops.sigmoid_backward` of the result, which is all that is kept for it.

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import sigmoid
    >>> sigmoid(torch.tensor([-1000.0, 0.0, 1000.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    return _ops.sigmoid.default(x)


def sigmoid_backward(grad: Tensor, y: Tensor, /) -> Tensor:
    """Take a gradient back through `sigmoid`, element by element: ``grad * y * (1 - y)``.

    Parameters
    ----------
    grad : Tensor
        The gradient with respect to the result of `sigmoid`: real numbers.
    y : Tensor
        That result. `grad` and `y` broadcast against each other.

    Returns
    -------
    Tensor
        The gradient with respect to what `sigmoid` was given, of the shape that the operands
        broadcast to and the float dtype that NumPy promotes theirs to; in memory in the order of
        the operands on the CPU, and in C order on a GPU. It can be differentiated again.

    Raises
    ------
    TypeError
        If an operand is complex.
    ValueError
        If the shapes do not broadcast, or tensors are on two GPUs.
    MemoryError, gpuops.DeviceError
        If memory does not suffice; if CUDA reports an error.

    See Also
    --------
    sigmoid, gpuops.sigmoid_backward

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import sigmoid_backward
    >>> sigmoid_backward(torch.tensor([1.0, 8.0]), torch.tensor([0.5, 0.25]))
    tensor([0.2500, 1.5000])
    """
    return _ops.sigmoid_backward.default(grad, y)


# matmul


def _run_matmul(device: str | None, a: Tensor, b: Tensor, precision: _Precision) -> Any:
    return _core.matmul(a, b, precision=precision, device=device)


def _fake_matmul(a: Tensor, b: Tensor, precision: _Precision) -> Tensor:
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError("matmul: an operand has no dimensions, and needs at least one")
    depth, other = a.shape[-1], b.shape[-2 if b.ndim > 1 else -1]
    if depth != other:
        raise ValueError(
            "matmul: Input operand 1 has a mismatch in its core dimension 0 "
            f"(size {other} is different from {depth})"
        )
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[-2:-1])
    return _empty((a, b), shape + tuple(b.shape[-1:] if b.ndim > 1 else ()), _promoted(a, b))


def _save_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.precision = inputs
    ctx.a, ctx.b = _like(a), _like(b)
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _backward_matmul(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    a_shape, b_shape = ctx.a[0], ctx.b[0]
    needs_a, needs_b = ctx.needs_input_grad[:2]
    of_a = of_b = None
    # A vector is a matrix of one row, or of one column, that the result does not show.
    if len(b_shape) == 1:
        gradient = gradient.unsqueeze(-1)
    if len(a_shape) == 1:
        gradient = gradient.unsqueeze(-2)
    if needs_a:
        columns = b if b.ndim > 1 else b.unsqueeze(-1)
        of_a = _ops.matmul.default(gradient, columns.mH, ctx.precision)
        of_a = _reduced(of_a.squeeze(-2) if len(a_shape) == 1 else of_a, ctx.a)
    if needs_b:
        rows = a if a.ndim > 1 else a.unsqueeze(-2)
        if len(b_shape) <= 2 and rows.ndim > 2:
            # One matrix for a whole batch: the batch is one long sum, not many to add up.
            rows, gradient = rows.flatten(0, -2), gradient.flatten(0, -2)
        of_b = _ops.matmul.default(rows.mH, gradient, ctx.precision)
        of_b = _reduced(of_b.squeeze(-1) if len(b_shape) == 1 else of_b, ctx.b)
    return of_a, of_b, None


_define(
    "matmul(Tensor a, Tensor b, str precision) -> Tensor",
    _run_matmul,
    _fake_matmul,
    _save_matmul,
    _backward_matmul,
)


def matmul(a: Tensor, b: Tensor, /, *, precision: _Precision = "full") -> Tensor:
    """Multiply matrices, or stacks of them: ``a @ b``.

    Parameters
    ----------
    a, b : Tensor
        Numbers or bools, of one dimension or more: ``(..., n, k)`` and ``(..., k, m)``, where the
        dimensions before the last two broadcast. Of one dimension, `a` counts as a row, and `b` as
        a column, which the result then has not.
    precision : {'full', 'tf32'}, optional
        'tf32' lets tensor cores round float32 factors to 10 bits, in the gradients too, as in
        `gpuops.matmul`.

    Returns
    -------
    Tensor
        The product, of the shape ``(..., n, m)`` and the dtype that NumPy promotes those of `a`
        and `b` to, in C order. Its gradients are two products more, summed to the shape of what
        was broadcast.

    Raises
    ------
    ValueError
        If an operand has no dimensions, the inner ones differ, or the outer ones do not broadcast.
    MemoryError, gpuops.DeviceError
        If memory does not suffice; if CUDA reports an error.

    See Also
    --------
    gpuops.matmul, torch.matmul

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import matmul
    >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> product = matmul(a, torch.tensor([[10.0, 0.0], [0.0, 100.0]]))
    >>> product.detach()
    tensor([[ 10., 200.],
            [ 30., 400.]])
    >>> product.sum().backward()
    >>> a.grad
    tensor([[ 10., 100.],
            [ 10., 100.]])
    """
    return _ops.matmul.default(a, b, precision)


# correlate: the sum over all pixels of gradient * correlate(input, weights) is linear in each of
# the three. With two of them given, its derivative with respect to the third is an operator:
#
#     correlate(input, weights)               with respect to the gradient
#     correlate_input(gradient, weights)      with respect to the input: the transpose of the first
#     correlate_weights(gradient, input)      with respect to the weights
#
# and the derivatives of each of these three are the other two. Only a border of `cval` that is not
# zero is not linear, but affine: the two that differentiate along the input leave it out.

_BORDERS: dict[_Border, _Border] = {
    "grid-mirror": "reflect",
    "grid-constant": "constant",
    "grid-wrap": "wrap",
}


def _as_matrix(weights: Tensor) -> Tensor:
    return weights.unsqueeze(0) if weights.ndim == 1 else weights.reshape(weights.shape[-2:])


def _as_images(images: Tensor) -> Tensor:
    return images.unsqueeze(0) if images.ndim == 1 else images


def _sides(ndim: int, matrix: Sequence[int], origin: Sequence[int]) -> list[tuple[int, int]]:
    """Tell how many pixels beyond either border the weights reach, along each of two axes."""
    rows = 0 if ndim == 1 else origin[0] if len(origin) == 1 else origin[-2]
    befores = [size // 2 + of for size, of in zip(matrix, (rows, origin[-1]), strict=True)]
    return [(before, size - 1 - before) for size, before in zip(matrix, befores, strict=True)]


def _border_positions(
    mode: _Border, before: int, size: int, after: int, device: torch.device
) -> Tensor:
    """Tell which pixel stands for each one along an axis and beyond its ends; `size` for none."""
    positions = torch.arange(-before, size + after, device=device)
    if mode == "nearest":
        return positions.clamp(0, size - 1)
    if mode == "constant":
        return torch.where((positions < 0) | (positions >= size), size, positions)
    if mode == "wrap" or size == 1:
        return positions % size
    last = 2 * size - 1 if mode == "reflect" else 2 * size - 2
    positions = positions % (2 * size if mode == "reflect" else last)
    return torch.minimum(positions, last - positions)


def _run_correlate(
    device: str | None,
    images: Tensor,
    weights: Tensor,
    mode: _Border,
    cval: float,
    origin: Sequence[int],
) -> Any:
    of_axes: Any = origin[0] if len(origin) == 1 else tuple(origin)
    return _core.correlate(images, weights, mode=mode, cval=cval, origin=of_axes, device=device)


def _fake_correlate(
    images: Tensor, weights: Tensor, mode: _Border, cval: float, origin: Sequence[int]
) -> Tensor:
    return _empty((images, weights), images.shape, images.dtype)


def _save_correlate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weights, ctx.mode, ctx.cval, ctx.origin = inputs
    ctx.images, ctx.weights = _like(images), _like(weights)
    needs_images, needs_weights = ctx.needs_input_grad[:2]
    ctx.save_for_backward(images if needs_weights else None, weights if needs_images else None)


def _backward_correlate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    images, weights = ctx.saved_tensors
    of_images = of_weights = None
    if ctx.needs_input_grad[0]:
        back = _ops.correlate_input.default(gradient, weights, ctx.mode, ctx.origin)
        of_images = _reduced(back, ctx.images)
    if ctx.needs_input_grad[1]:
        of_weights = _of_weights(ctx, gradient, images, ctx.cval)
    return of_images, of_weights, None, None, None


def _of_weights(ctx: Any, gradient: Tensor, images: Tensor, cval: float) -> Tensor:
    shape = ctx.weights[0]
    taps = _ops.correlate_weights.default(gradient, images, shape, ctx.mode, cval, ctx.origin)
    return _reduced(taps, ctx.weights)


_define(
    "correlate(Tensor images, Tensor weights, str mode, float cval, int[] origin) -> Tensor",
    _run_correlate,
    _fake_correlate,
    _save_correlate,
    _backward_correlate,
)


def _run_correlate_input(
    device: str | None, gradient: Tensor, weights: Tensor, mode: _Border, origin: Sequence[int]
) -> Tensor:
    mode = _BORDERS.get(mode, mode)
    gradient, weights = _together(gradient, weights)
    images, matrix = _as_images(gradient), _as_matrix(weights)
    turned = matrix.flip(-2, -1)
    sides = _sides(gradient.ndim, matrix.shape, origin)
    if images.numel() == 0:
        return torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    if mode in ("constant", "wrap"):
        # Turned around, what reached back reaches forward; the border transposes to itself.
        origins = [after - size // 2 for (_, after), size in zip(sides, matrix.shape, strict=True)]
        back = _core.correlate(images, turned, mode=mode, origin=tuple(origins), device=device)
        return back.reshape(gradient.shape)
    # First the gradient of the images with their borders around them, then the borders are added
    # to the pixels that they are copies of.
    rows, columns = (size - 1 for size in matrix.shape)
    images = images.to(_accumulator(images.dtype))
    padded = torch.nn.functional.pad(images, (0, columns, 0, rows))
    origins = [(size - 1) // 2 for size in matrix.shape]
    back = _core.correlate(padded, turned, mode="constant", origin=tuple(origins), device=device)
    for axis, (before, after) in zip((-2, -1), sides, strict=True):
        size = images.shape[axis]
        positions = _border_positions(mode, before, size, after, images.device)
        centre = back.narrow(axis, before, size)
        for start, count in ((0, before), (before + size, after)):
            if count > 0:
                where, what = positions[start : start + count], back.narrow(axis, start, count)
                _add_in_place(device, centre, where, what, axis, "clip", False)
        back = centre
    return back.reshape(gradient.shape).to(gradient.dtype).contiguous()


def _fake_correlate_input(
    gradient: Tensor, weights: Tensor, mode: _Border, origin: Sequence[int]
) -> Tensor:
    return _empty((gradient, weights), gradient.shape, gradient.dtype)


def _save_correlate_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, weights, ctx.mode, ctx.origin = inputs
    ctx.gradient, ctx.weights = _like(gradient), _like(weights)
    needs_gradient, needs_weights = ctx.needs_input_grad[:2]
    ctx.save_for_backward(gradient if needs_weights else None, weights if needs_gradient else None)


def _backward_correlate_input(ctx: Any, images: Tensor) -> tuple[Tensor | None, ...]:
    gradient, weights = ctx.saved_tensors
    of_gradient = of_weights = None
    if ctx.needs_input_grad[0]:
        again = _ops.correlate.default(images, weights, ctx.mode, 0.0, ctx.origin)
        of_gradient = _reduced(again, ctx.gradient)
    if ctx.needs_input_grad[1]:
        of_weights = _of_weights(ctx, gradient, images, 0.0)
    return of_gradient, of_weights, None, None


_define(
    "correlate_input(Tensor gradient, Tensor weights, str mode, int[] origin) -> Tensor",
    _run_correlate_input,
    _fake_correlate_input,
    _save_correlate_input,
    _backward_correlate_input,
)


# How many pixels become float64 at a time: what a CPU has room for in a cache, and enough to keep a
# GPU busy with one dot product.
_PIECES = {"cpu": 2**18, None: 2**24}


def _run_correlate_weights(
    device: str | None,
    gradient: Tensor,
    images: Tensor,
    shape: Sequence[int],
    mode: _Border,
    cval: float,
    origin: Sequence[int],
) -> Tensor:
    mode = _BORDERS.get(mode, mode)
    rows, columns = (1, *shape)[-2:]
    sides = _sides(images.ndim, (rows, columns), origin)
    gradient, images = _together(_as_images(gradient), _as_images(images))
    if images.numel() == 0:
        return torch.zeros(tuple(shape), dtype=torch.float64, device=images.device)
    if mode == "constant" and cval != 0:
        # The border has more digits and a wider range than 16-bit pixels.
        images = images.to(_accumulator(images.dtype))
    for axis, (before, after) in zip((-2, -1), sides, strict=True):
        if before + after > 0:
            size = images.shape[axis]
            positions = _border_positions(mode, before, size, after, images.device)
            images = _run_gather(
                device,
                images,
                positions,
                axis,
                *(("fill", cval) if mode == "constant" else ("clip", None)),
            )
    # With zeros after its lines and images, the gradient lies in memory as the images with their
    # borders do: a tap is one dot product, with what is as many pixels further in the images.
    lines = torch.nn.functional.pad(gradient, (0, columns - 1, 0, rows - 1)).reshape(-1)
    pixels = images.reshape(-1)
    taps = torch.zeros(rows * columns, dtype=torch.float64, device=images.device)
    further = [i * images.shape[-1] + j for i in range(rows) for j in range(columns)]
    length = _PIECES[device]
    if images.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nobody can look at the taps then.
        return _taps_of_windows(gradient, images, rows, columns, length).reshape(shape)
    for start in range(0, len(lines), length):
        line = lines[start : start + length].double()
        piece = pixels[start : start + length + further[-1]].double()
        parts = [piece[by : by + length] for by in further]
        taps += torch.stack([torch.dot(line[: len(part)], part) for part in parts])
    # The first dot product goes over all pixels and all of the gradient. Infinity or NaN among them
    # times one of those zeros is NaN, in taps that do not meet them.
    if not torch.isfinite(taps[0]):
        taps = _taps_of_windows(gradient, images, rows, columns, length)
    return taps.reshape(shape)


def _taps_of_windows(
    gradient: Tensor, images: Tensor, rows: int, columns: int, length: int
) -> Tensor:
    """Take the sum of the gradient times the pixels in a window, for each of its places.

    That is slower than dot products of all there is, but it multiplies only what belongs together.
    """
    height, width = gradient.shape[-2:]
    gradient = gradient.reshape(-1, height, width)
    images = images.reshape(-1, *images.shape[-2:])
    lines = min(height, max(1, length // width))
    count = max(1, length // (lines * width))
    taps = torch.zeros(rows * columns, dtype=torch.float64, device=images.device)
    for first in range(0, len(gradient), count):
        for top in range(0, height, lines):
            part = gradient[first : first + count, top : top + lines].double()
            piece = images[first : first + count, top : top + lines + rows - 1].double()
            tall = part.shape[1]
            windows = [
                piece[:, i : i + tall, j : j + width] for i in range(rows) for j in range(columns)
            ]
            taps += torch.stack([(part * window).sum() for window in windows])
    return taps


def _fake_correlate_weights(
    gradient: Tensor,
    images: Tensor,
    shape: Sequence[int],
    mode: _Border,
    cval: float,
    origin: Sequence[int],
) -> Tensor:
    return _empty((gradient, images), shape, torch.float64)


def _save_correlate_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, images, _, ctx.mode, ctx.cval, ctx.origin = inputs
    ctx.gradient, ctx.images = _like(gradient), _like(images)
    needs_gradient, needs_images = ctx.needs_input_grad[:2]
    ctx.save_for_backward(gradient if needs_images else None, images if needs_gradient else None)


def _backward_correlate_weights(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
    gradient, images = ctx.saved_tensors
    of_gradient = of_images = None
    if ctx.needs_input_grad[0]:
        again = _ops.correlate.default(images, weights, ctx.mode, ctx.cval, ctx.origin)
        of_gradient = _reduced(again, ctx.gradient)
    if ctx.needs_input_grad[1]:
        back = _ops.correlate_input.default(gradient, weights, ctx.mode, ctx.origin)
        of_images = _reduced(back, ctx.images)
    return of_gradient, of_images, None, None, None, None


_define(
    "correlate_weights(Tensor gradient, Tensor images, SymInt[] shape, str mode, float cval, "
    "int[] origin) -> Tensor",
    _run_correlate_weights,
    _fake_correlate_weights,
    _save_correlate_weights,
    _backward_correlate_weights,
)


def correlate(
    input: Tensor,  # noqa: A002
    weights: Tensor,
    *,
    mode: _Border = "reflect",
    cval: float = 0.0,
    origin: int | Sequence[int] = 0,
) -> Tensor:
    """Filter images with weights: the correlation of `input` with `weights`.

    Parameters
    ----------
    input : Tensor
        An image, or images: the last two axes are filtered. Of bool, an integer, float16,
        bfloat16, float32 or float64.
    weights : Tensor
        Of two dimensions, or of up to as many as `input` has, of which those before the last two
        have size 1; of one for one line of pixels. Any size, also larger than the image.
    mode : {'reflect', 'mirror', 'nearest', 'constant', 'wrap'}, optional
        What is beyond the border of an image, as in `gpuops.correlate`.
    cval : float, optional
        What is beyond the border in mode 'constant'. It gets no gradient.
    origin : int or sequence of int, optional
        Moves the weights, for both axes or for each: 0 is their middle, 1 is one further.

    Returns
    -------
    Tensor
        The filtered images, of the shape and dtype of `input`, in C order. Both `input` and
        `weights` get a gradient, of any order.

    Raises
    ------
    TypeError
        If a dtype is none of those above.
    ValueError
        If the shape of `weights` does not fit, `weights` are empty, `mode` is none of those above,
        or `origin` is outside the weights.
    MemoryError, gpuops.DeviceError
        If memory does not suffice; if CUDA reports an error.

    See Also
    --------
    gpuops.correlate, scipy.ndimage.correlate, torch.nn.functional.conv2d

    Notes
    -----
    The gradient of `input` is a correlation with the weights turned around; what falls beyond a
    border is added, by `gpuops.scatter_add`, to the pixel that stood there. The gradient of
    `weights` is one sum for each weight, over all pixels of all images: the dot product of the
    gradient with the images, moved by the place of the weight. It is taken in float64.

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import correlate
    >>> image = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
    >>> difference = correlate(image, torch.tensor([[-1.0, 1.0]]), mode="nearest")
    >>> difference.detach()
    tensor([[0., 1., 2.]])
    >>> difference.sum().backward()
    >>> image.grad
    tensor([[-1.,  0.,  1.]])
    """
    try:
        origins: tuple[int, ...] = (operator.index(origin),)  # type: ignore[arg-type]
    except TypeError:
        origins = tuple(operator.index(of_axis) for of_axis in origin)  # type: ignore[union-attr]
    return _ops.correlate.default(input, weights, mode, cval, origins)


# Modules


class Gather(torch.nn.Module):
    """Take elements or rows of a tensor by their positions: `gather` as a module.

    Parameters
    ----------
    axis : int or None, optional
        The axis that the positions count along, by default the first. None flattens.
    mode : {'raise', 'wrap', 'clip', 'fill'}, optional
        What becomes of an index outside the axis.
    fill_value : scalar, optional
        For mode 'fill' alone; by default zero.

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import Gather
    >>> columns = Gather(axis=1)
    >>> columns
    Gather(axis=1)
    >>> columns(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1]))
    tensor([[2],
            [4]])
    """

    def __init__(
        self, axis: int | None = 0, mode: _Mode = "raise", fill_value: _Number | None = None
    ) -> None:
        super().__init__()
        self.axis = axis
        self.mode = mode
        self.fill_value = fill_value

    def forward(self, x: Tensor, indices: Tensor | Sequence[int] | int) -> Tensor:
        """Call `gather` with the settings of this module."""
        return gather(x, indices, axis=self.axis, mode=self.mode, fill_value=self.fill_value)

    def extra_repr(self) -> str:
        """Tell the settings, without those that are the defaults after the first."""
        text = f"axis={self.axis}"
        if self.mode != "raise":
            text += f", mode={self.mode!r}"
        if self.fill_value is not None:
            text += f", fill_value={self.fill_value!r}"
        return text


class Sigmoid(torch.nn.Module):
    """Compute the logistic function, element by element: `sigmoid` as a module.

    Examples
    --------
    >>> import torch
    >>> from gpuops.torch import Sigmoid
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1), Sigmoid())
    >>> model(torch.zeros(2, 4)).shape
    torch.Size([2, 1])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Call `sigmoid`."""
        return sigmoid(x)
