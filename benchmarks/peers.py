"""The libraries that gpuops is measured against. Each is optional, and imported when asked for.

A peer's function takes the library as its first argument: ``torch_cpu(lambda torch, x, i: ...)``.
Every maker of contestants returns a dictionary, empty where the library or a GPU is missing.
"""

import functools
import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy


@dataclass
class Contestant:
    """One way to compute a case: `call(*inputs)`, on inputs as `convert` makes them.

    `clock` is "wall" for a call that is over when it returns, "events" for the time of the work
    that it queues on the GPU, "kernels" for the time that the GPU spends in kernels. `before` is
    called with the same inputs ahead of every call, outside the clock.
    """

    call: Callable[..., Any]
    convert: Callable[[numpy.ndarray], Any] = lambda array: array
    to_numpy: Callable[[Any], numpy.ndarray] = numpy.asarray
    clock: str = "wall"
    before: Callable[..., None] | None = None


@functools.cache
def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@functools.cache
def torch_on_gpu() -> Any:
    """Return torch where it sees a GPU, else None."""
    torch = _library("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


@functools.cache
def cupy_on_gpu() -> Any:
    """Return CuPy where it sees a GPU, else None."""
    cupy = _library("cupy")
    return cupy if cupy is not None and cupy.is_available() else None


def versions() -> dict[str, str]:
    """Return the versions of the libraries that took part."""
    libraries = {"numpy": numpy, "torch": _library("torch"), "cupy": cupy_on_gpu()}
    return {name: library.__version__ for name, library in libraries.items() if library}


def torch_cpu(name: str, function: Callable[..., Any]) -> dict:
    """Make a contestant of torch on the CPU, which shares memory with NumPy."""
    torch = _library("torch")
    if torch is None:
        return {}
    return {
        f"torch CPU {name}": Contestant(
            functools.partial(function, torch), convert=torch.from_numpy, to_numpy=_torch_to_numpy
        )
    }


def torch_from_host(name: str, function: Callable[..., Any]) -> dict:
    """Make a contestant of torch on the GPU that starts and ends with host arrays."""
    torch = torch_on_gpu()
    if torch is None:
        return {}

    def call(*arrays: Any) -> Any:
        return function(torch, *(array.cuda() for array in arrays)).cpu()

    return {
        f"torch GPU and back {name}": Contestant(
            call, convert=torch.from_numpy, to_numpy=_torch_to_numpy
        )
    }


def cupy_from_host(name: str, function: Callable[..., Any]) -> dict:
    """Make a contestant of CuPy that starts and ends with host arrays."""
    cupy = cupy_on_gpu()
    if cupy is None:
        return {}

    def call(*arrays: Any) -> Any:
        return cupy.asnumpy(function(cupy, *map(cupy.asarray, arrays)))

    return {f"CuPy and back {name}": Contestant(call)}


def torch_gpu(name: str, function: Callable[..., Any], **options: Any) -> dict:
    """Make a contestant of torch on arrays that are on the GPU already."""
    torch = torch_on_gpu()
    if torch is None:
        return {}
    return {
        f"torch {name}": Contestant(
            functools.partial(function, torch),
            convert=lambda array: torch.from_numpy(array).cuda(),
            to_numpy=_torch_to_numpy,
            **options,
        )
    }


def cupy_gpu(name: str, function: Callable[..., Any], **options: Any) -> dict:
    """Make a contestant of CuPy on arrays that are on the GPU already."""
    cupy = cupy_on_gpu()
    if cupy is None:
        return {}
    return {
        f"CuPy {name}": Contestant(
            functools.partial(function, cupy),
            convert=cupy.asarray,
            to_numpy=cupy.asnumpy,
            **options,
        )
    }


def _torch_to_numpy(tensor: Any) -> numpy.ndarray:
    return tensor.cpu().numpy()


def free_memory() -> None:
    """Give the GPU memory that the libraries keep back, before the next case."""
    if torch := torch_on_gpu():
        torch.cuda.empty_cache()
    if cupy := cupy_on_gpu():
        cupy.get_default_memory_pool().free_all_blocks()


@functools.cache
def gpu() -> Any:
    """Return the events of the first library that has some, or None."""
    if torch_on_gpu():
        return TorchGpu()
    if cupy_on_gpu():
        return CupyGpu()
    return None


# Larger than the L2 of every GPU so far; writing it leaves nothing of an input behind there.
FLUSH_BYTES = 256 << 20


class TorchGpu:
    """Events, an L2 flush and plain copies through torch."""

    def __init__(self) -> None:
        self._torch = torch_on_gpu()
        self._flush = self._torch.empty(FLUSH_BYTES, dtype=self._torch.uint8, device="cuda")

    def flush(self) -> None:
        self._flush.fill_(1)

    def elapsed(self, call: Callable[[], Any]) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)

    def copy_rates(self, size: int) -> dict[str, float]:
        torch = self._torch
        random = torch.randint(0, 256, (size,), dtype=torch.uint8)
        pinned, there = random.pin_memory(), random.cuda()
        other = torch.empty_like(there)
        return _copy_rates(
            self,
            size,
            lambda: other.copy_(there),
            lambda: there.copy_(pinned, non_blocking=True),
            lambda: pinned.copy_(there, non_blocking=True),
        )


class CupyGpu:
    """Events, an L2 flush and plain copies through CuPy."""

    def __init__(self) -> None:
        self._cupy = cupy_on_gpu()
        self._flush = self._cupy.empty(FLUSH_BYTES, dtype=numpy.uint8)

    def flush(self) -> None:
        self._flush.fill(1)

    def elapsed(self, call: Callable[[], Any]) -> float:
        start, end = (self._cupy.cuda.Event() for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1e-3 * self._cupy.cuda.get_elapsed_time(start, end)

    def copy_rates(self, size: int) -> dict[str, float]:
        cupy = self._cupy
        memory = cupy.cuda.alloc_pinned_memory(size)
        pinned = numpy.frombuffer(memory, numpy.uint8, size)
        pinned[:] = numpy.random.default_rng().integers(0, 256, size, dtype=numpy.uint8)
        there = cupy.asarray(pinned)
        other = cupy.empty_like(there)
        return _copy_rates(
            self,
            size,
            lambda: cupy.copyto(other, there),
            lambda: there.set(pinned),
            lambda: there.get(out=pinned, blocking=False),
        )


def _copy_rates(timer: Any, size: int, across: Callable, up: Callable, down: Callable) -> dict:
    def rate(call: Callable[[], Any], moved: int) -> float:
        call()
        timer.flush()
        return 1e-9 * moved / statistics.median(timer.elapsed(call) for _ in range(9))

    return {
        "device copy": rate(across, 2 * size),
        "pinned copy up": rate(up, size),
        "pinned copy down": rate(down, size),
    }
