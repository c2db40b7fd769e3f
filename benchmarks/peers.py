"""The libraries that gpuops is measured against. Each is optional, and imported when asked for.

A peer's function takes the library as its first argument: ``torch_cpu(lambda torch, x, i: ...)``.
Every maker of contestants returns a dictionary, empty where the library or a GPU is missing.
"""

import functools
import importlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from gpuops._calibration import come_to_rest


@dataclass
class Contestant:
    """One way to compute a case: `call(*inputs)`, on inputs as `convert` makes them.

    `clock` is "wall" for a call that is over when it returns, "again" for one
    that comes right after others of its kind, "events" for the time of the work
    that it queues on the GPU's default stream, "JAX's stream" for that of work on the stream that
    JAX keeps to itself, "queued" for what a call takes that only queues work, "told" for one that
    returns its time. `saved_bytes` are those that this way moves less than the others. `before` is
    called before each call, and takes no part in its time. What no library offers is no
    peer (`is_peer`), however fast.
    """

    call: Callable[..., Any]
    convert: Callable[[numpy.ndarray], Any] = lambda array: array
    to_numpy: Callable[[Any], numpy.ndarray] = numpy.asarray
    clock: str = "wall"
    saved_bytes: int = 0
    before: Callable[[], Any] | None = None
    is_peer: bool = True


@functools.cache
def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@functools.cache
def torch_on_gpu() -> Any:
    """Return torch where it sees a GPU, else None; its float32 is to be float32, not TF32."""
    torch = _library("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True  # takes the algorithm that is the fastest here
    return torch


@functools.cache
def cupy_on_gpu() -> Any:
    """Return CuPy where it sees a GPU, else None."""
    cupy = _library("cupy")
    return cupy if cupy is not None and cupy.is_available() else None


@functools.cache
def jax_on_gpu() -> Any:
    """Return JAX where it sees a GPU that one of the clocks sees too, else None."""
    if gpu() is None:
        return None
    # By default JAX takes three quarters of the GPU's memory for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = _library("jax")
    return jax if jax is not None and jax.default_backend() == "gpu" else None


def versions() -> dict[str, str]:
    """Return the versions of the libraries that took part."""
    libraries = {
        "numpy": numpy,
        "torch": _library("torch"),
        "cupy": cupy_on_gpu(),
        "jax": jax_on_gpu(),
    }
    return {name: library.__version__ for name, library in libraries.items() if library}


def torch_cpu(name: str, function: Callable[..., Any]) -> dict:
    """Make a contestant of torch on the CPU, which shares memory with NumPy."""
    torch = _library("torch")
    if torch is None:
        return {}
    return {
        f"torch CPU {name}".rstrip(): Contestant(
            functools.partial(function, torch), convert=_torch_from_numpy, to_numpy=_torch_to_numpy
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
        f"torch GPU and back {name}".rstrip(): Contestant(
            call, convert=_torch_from_numpy, to_numpy=_torch_to_numpy
        )
    }


def cupy_from_host(name: str, function: Callable[..., Any]) -> dict:
    """Make a contestant of CuPy that starts and ends with host arrays."""
    cupy = cupy_on_gpu()
    if cupy is None:
        return {}

    def call(*arrays: Any) -> Any:
        return cupy.asnumpy(function(cupy, *map(cupy.asarray, arrays)))

    return {f"CuPy and back {name}".rstrip(): Contestant(call)}


def torch_gpu(name: str, function: Callable[..., Any], **options: Any) -> dict:
    """Make a contestant of torch on arrays that are on the GPU already."""
    torch = torch_on_gpu()
    if torch is None:
        return {}
    return {
        f"torch {name}": Contestant(
            functools.partial(function, torch),
            convert=lambda array: _torch_from_numpy(array).cuda(),
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


def jax_gpu(name: str, function: Callable[..., Any], **options: Any) -> dict:
    """Make a contestant of JAX, compiled, on arrays that are on the GPU already.

    JAX makes 32-bit integers of 64-bit ones, unless it is told otherwise before it starts.
    """
    jax = jax_on_gpu()
    if jax is None:
        return {}
    return {
        f"JAX {name}": Contestant(
            jax.jit(functools.partial(function, jax)),
            convert=lambda array: jax.device_put(narrow(array)),
            **options,
        )
    }


def narrow(array: numpy.ndarray) -> numpy.ndarray:
    """Make 32-bit integers of 64-bit ones, and leave other arrays alone."""
    return array.astype(numpy.int32) if array.dtype == numpy.int64 else array


def _torch_from_numpy(array: numpy.ndarray) -> Any:
    """Share an array's memory with torch, whose bfloat16 is not the one that NumPy knows."""
    torch = _library("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _torch_to_numpy(tensor: Any) -> numpy.ndarray:
    torch = _library("torch")
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view("bfloat16")
    return tensor.cpu().numpy()


def until_done(call: Callable[..., Any], wait: Callable[[Any], Any]) -> Callable[..., Any]:
    """Make a call be over when it returns: what it returns is given to a function that waits."""

    def done(*arrays: Any) -> Any:
        there = call(*arrays)
        wait(there)
        return there

    return done


# Each library waits for its own work, as its users would.


def wait_for_gpuops(there: Any) -> None:
    """Wait until an array of gpuops is there."""
    there.stream.synchronize()


def wait_for_torch(_: Any) -> None:
    """Wait for the work of torch."""
    torch_on_gpu().cuda.current_stream().synchronize()


def wait_for_cupy(_: Any) -> None:
    """Wait for the work of CuPy."""
    cupy_on_gpu().cuda.get_current_stream().synchronize()


def free_memory() -> None:
    """Give the GPU memory that the libraries keep back, before the next case."""
    if torch := torch_on_gpu():
        torch.cuda.empty_cache()
    if cupy := cupy_on_gpu():
        cupy.get_default_memory_pool().free_all_blocks()


MOST_REST_SECONDS = 0.5


def settle() -> None:
    """Wait for all that any library has queued on the GPU, on whatever stream, and for its threads.

    They share one CUDA context, so that one of them can wait for all; JAX's stream is its own. The
    threads of BLAS and OpenMP go on looking for work for a while, up to a fifth of a second, and
    would take the processor from whoever is timed next.
    """
    if (timer := gpu()) is not None:
        timer.synchronize()
    come_to_rest(MOST_REST_SECONDS)


@functools.cache
def gpu() -> Any:
    """Return the events of the first library that has some, or None."""
    if torch_on_gpu():
        return TorchGpu()
    if cupy_on_gpu():
        return CupyGpu()
    return None


# Larger than the L2 of every GPU so far; writing it leaves nothing of an input behind there.
# They are read, since what was written would go back to memory while the clock runs.
FLUSH_BYTES = 256 << 20


class TorchGpu:
    """Events, an L2 flush and plain copies through torch."""

    def __init__(self) -> None:
        self._torch = torch_on_gpu()
        self._other = self._torch.ones(FLUSH_BYTES // 8, dtype=self._torch.int64, device="cuda")

    def flush(self) -> None:
        self._other.max()

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def elapsed(self, call: Callable[[], Any]) -> tuple[float, bool]:
        """Return the seconds, and whether the GPU was there before all of the work was queued."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()  # kept, since giving memory back is no part of the call
        end.record()
        has_waited = start.query()
        end.synchronize()
        del result
        return 1e-3 * start.elapsed_time(end), has_waited

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
        self._other = self._cupy.ones(FLUSH_BYTES // 8, dtype=numpy.int64)

    def flush(self) -> None:
        self._other.max()

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()

    def elapsed(self, call: Callable[[], Any]) -> tuple[float, bool]:
        """Return the seconds, and whether the GPU was there before all of the work was queued."""
        start, end = (self._cupy.cuda.Event() for _ in range(2))
        start.record()
        result = call()
        end.record()
        has_waited = start.done
        end.synchronize()
        del result
        return 1e-3 * self._cupy.cuda.get_elapsed_time(start, end), has_waited

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


@functools.cache
def jax_timer() -> Any:
    return JaxTimer()


class JaxTimer:
    """The time of work on JAX's stream, on which nobody else can record an event.

    The work is queued several times, each time behind a flush of the L2, and then twice as often;
    and so are flushes alone. What it takes to queue and to wait drops out of the differences, since
    a flush keeps the GPU busy for longer than that. Both are done in turn, so that clocks which
    rise or fall meanwhile drop out too.
    """

    TIMES, TURNS = 6, 5

    def __init__(self) -> None:
        self._jax = jax_on_gpu()
        self._read = self._jax.jit(lambda array: array.max())
        # Four times what a flush needs, for its time.
        self._other = self._jax.device_put(numpy.ones(FLUSH_BYTES, numpy.float32))
        self._wall(self._flush, 1)

    def elapsed(self, call: Callable[[], Any]) -> float:
        def both() -> Any:
            return self._flush(), call()

        self._wall(both, 1)  # a rehearsal
        differences = (self._each(both) - self._each(self._flush) for _ in range(self.TURNS))
        # No work takes less than a microsecond; a busy moment can make it look so.
        return max(statistics.median(differences), 1e-6)

    def _flush(self) -> Any:
        return self._read(self._other)

    def _each(self, call: Callable[[], Any]) -> float:
        once, twice = (self._wall(call, times) for times in (self.TIMES, 2 * self.TIMES))
        return (twice - once) / self.TIMES

    def _wall(self, call: Callable[[], Any], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times - 1):
            call()
        self._jax.block_until_ready(call())
        return time.perf_counter() - started


def _copy_rates(timer: Any, size: int, across: Callable, up: Callable, down: Callable) -> dict:
    def rate(call: Callable[[], Any], moved: int) -> float:
        call()
        timer.flush()
        return 1e-9 * moved / statistics.median(timer.elapsed(call)[0] for _ in range(9))

    return {
        "device copy": rate(across, 2 * size),
        "pinned copy up": rate(up, size),
        "pinned copy down": rate(down, size),
    }
