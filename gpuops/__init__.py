"""NumPy's missing GPU operators.

``gpuops.gather(x, indices)`` takes NumPy arrays as they are, runs on the GPU, or on all cores of
the CPU where there is no GPU, and gives back what ``x[indices]`` gives: the same values, the same
shape, the same exceptions. Arrays that are on the GPU stay there, without a copy: gpuops' own, and
those of torch, CuPy, JAX, Numba and whoever else speaks DLPack or ``__cuda_array_interface__``.

Operators
    gather, take, take_along_axis, scatter, scatter_add, add, multiply, saxpy, sigmoid,
    sigmoid_backward, matmul, correlate, convolve
Arrays on the GPU
    DeviceArray, to_device, empty, zeros, asarray, from_dlpack
Streams
    Stream, Event, current_stream, synchronize
Page-locked NumPy arrays
    pin, pinned_empty, pinned_memory
Memory of the GPU
    memory_info, MemoryInfo, memory_limit, empty_cache
Devices
    device, devices, device_count, is_available, hello, show_config, explain, last_route
Your own kernels
    compile, Module, Kernel, In, Out, InOut, Pointer; in Jupyter ``%load_ext gpuops``
Errors
    DeviceError, DeviceLostError, ForkedProcessError, CompileError

Importing this package makes no CUDA call. Run ``python -m gpuops demo`` to see it at work.
"""

import contextlib
import contextvars
import threading
from typing import Any, NamedTuple, Self

try:
    from ._core import __version__
except ModuleNotFoundError:
    # Where Python runs in the folder of the sources, these hide the installed package, which alone
    # has the compiled module.
    import pkgutil

    __path__ = pkgutil.extend_path(__path__, __name__)
    from ._core import __version__

# A row in kernels/ops.def is enough to publish an operator here.
from . import _core
from ._core import *  # noqa: F403
from ._jit import CompileError, compile  # noqa: A004
from ._route import explain, last_route

__all__ = ["CompileError", "Device", "__version__", "compile", "device", "devices", "explain"]
__all__ += ["last_route", "pinned_memory", "show_config"]
__all__ += [name for name in vars(_core) if not name.startswith("_")]


class Device(NamedTuple):
    """One CUDA device, as `devices` lists it."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int


def devices() -> list[Device]:
    """List the CUDA devices of this machine.

    Returns
    -------
    list of Device
        In the order of their ordinals; empty where there is none. `show_config` says why.

    Examples
    --------
    >>> import gpuops
    >>> len(gpuops.devices()) == gpuops.device_count()
    True
    """
    found = []
    for ordinal in range(_core.device_count()):
        name, major, minor, multiprocessors, memory_bytes, _ = _core._device_info(ordinal)
        found.append(Device(ordinal, name, (major, minor), multiprocessors, memory_bytes))
    return found


# Each thread has its own default device. As a thread-local object, one `device` can be entered by
# several threads, or several times by one, and every exit restores what its own entry found.
class device(contextlib.ContextDecorator, threading.local):  # noqa: N801 (used like a function)
    """Set the default device of this thread: a context manager, also usable as a decorator.

    It decides for calls that leave ``device=None``, and goes before the environment variable
    ``GPUOPS_DEVICE``.

    Parameters
    ----------
    spec : {"cpu", "cuda", "cuda:N", "auto"}, int or None
        ``"cuda"`` or an ordinal insists on the GPU, ``"cpu"`` on the CPU, ``"auto"`` takes
        whichever is expected to be faster, as `explain` tells, and None goes back to what holds
        outside any ``with``.

    Raises
    ------
    ValueError
        On entry, if `spec` names no kind of device. That there is no such device is a
        `DeviceError` of the calls inside.

    Examples
    --------
    >>> import gpuops
    >>> with gpuops.device("cpu"):
    ...     gpuops.gather([10, 20, 30], [2, 0])
    array([30, 10])

    >>> @gpuops.device("cpu")
    ... def last(x):
    ...     return gpuops.gather(x, -1)
    >>> int(last([10, 20, 30]))
    30
    """

    def __init__(self, spec: str | int | None) -> None:
        self._spec = spec
        self._previous: list[str | int | None] = []

    def __enter__(self) -> Self:
        self._previous.append(_core._exchange_device(self._spec))
        return self

    def __exit__(self, *exception: object) -> None:
        _core._exchange_device(self._previous.pop())

    def __repr__(self) -> str:
        return f"gpuops.device({self._spec!r})"


# What NumPy allocated with before each block that is entered, innermost last. NumPy keeps its
# allocator in the context, and so does this: a thread, or a task of asyncio, has its own.
_entered: contextvars.ContextVar[tuple] = contextvars.ContextVar("entered", default=())


class pinned_memory(contextlib.ContextDecorator):  # noqa: N801 (used like a function)
    """Let NumPy make arrays in page-locked memory: a context manager, also usable as a decorator.

    Every array that NumPy allocates in the block, on this thread or in this task of asyncio, is in
    page-locked memory, also the results of NumPy's functions, and those of gpuops on the host.
    Copies between such arrays and a GPU take the direct way. They live on behind the block as any
    array does. The memory comes from a pool, to which it goes back when they are freed;
    `empty_cache` gives back what the pool holds for arrays to come.

    Where the system has no more memory to lock, NumPy raises its MemoryError. In a process that is
    forked within the block, where CUDA cannot be used, memory that the pool adds is not locked.

    Raises
    ------
    DeviceError
        On entry, if there is no GPU.
    ForkedProcessError
        On entry, in a process that was forked after CUDA came into use.

    See Also
    --------
    pinned_empty : One array in such memory.
    pin : Locks memory that there is already.

    Examples
    --------
    >>> import contextlib
    >>> import gpuops
    >>> import numpy as np
    >>> with gpuops.pinned_memory() if gpuops.is_available() else contextlib.nullcontext():
    ...     x = np.arange(4.0)
    ...     y = x + 1
    >>> gpuops.add(x, y)
    array([1., 3., 5., 7.])
    """

    def __enter__(self) -> Self:
        previous = _core._enter_pinned_memory()
        try:
            _entered.set((*_entered.get(), previous))
        except BaseException:
            _core._leave_pinned_memory(previous)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        entered = _entered.get()
        if not entered:
            raise RuntimeError(
                "pinned_memory() is left where it was not entered: each thread, "
                "and each task of asyncio, has blocks of its own"
            )
        _core._leave_pinned_memory(entered[-1])
        _entered.set(entered[:-1])

    def __repr__(self) -> str:
        return "gpuops.pinned_memory()"


def show_config(mode: str = "stdout") -> dict | None:
    """Show how gpuops was built and what it found on this machine.

    Without a usable GPU it says why there is none, and what to do about it.

    Parameters
    ----------
    mode : {"stdout", "dicts"}
        ``"stdout"`` prints a report, ``"dicts"`` returns the same facts as a dictionary.

    Returns
    -------
    dict or None
        None in mode ``"stdout"``.

    Raises
    ------
    ValueError
        For any other mode.

    Examples
    --------
    >>> import gpuops
    >>> gpuops.show_config(mode="dicts")["version"] == gpuops.__version__
    True
    """
    # The report is rarely asked for, so its code stays out of the import.
    from ._report import configuration, report

    if mode == "dicts":
        return configuration()
    if mode != "stdout":
        raise ValueError(f"mode must be 'stdout' or 'dicts' (got {mode!r})")
    print(report())
    return None


def load_ipython_extension(shell: Any) -> None:
    """Register ``%%cuda`` and ``%gpu_timeit``; ``%load_ext gpuops`` calls this."""
    from .ipython import load_magics

    load_magics(shell)
