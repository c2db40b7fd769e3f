"""matmul beside NumPy, torch, CuPy and JAX.

With GPUOPS_BLAS=0 in the environment, gpuops computes with its own kernels instead of cuBLAS, and
has other targets.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy

import gpuops

from . import peers
from .harness import BEST_PEER, Case, Contestant, Run, Target, on_gpu

OWN_KERNELS = os.environ.get("GPUOPS_BLAS") == "0"

# Shapes of the two operands and their dtype; how fast our own kernels shall be, in G operations a
# second, where there is a target. Beside cuBLAS, it is a part of the best peer's rate.
DEVICE_CASES: Sequence[tuple[tuple[int, ...], tuple[int, ...], str, float | None]] = (
    ((4096, 4096), (4096, 4096), "float32", 40e3),
    ((8192, 8192), (8192, 8192), "float32", 40e3),
    ((4096, 4096), (4096, 4096), "float64", None),
    ((8192, 8192), (8192, 8192), "float16", None),
    ((8192, 8192), (8192, 8192), "bfloat16", None),
    ((2048, 2048), (2048, 2048), "complex64", None),
    ((512, 512), (512, 512), "float32", None),
    ((4096, 4096), (4096,), "float32", None),
    ((4096,), (4096, 4096), "float32", None),
    ((8, 8192), (8192, 8192), "float32", None),
    ((64, 1 << 20), (1 << 20, 64), "float32", None),
    ((1 << 14, 32, 32), (1 << 14, 32, 32), "float32", None),
    ((1 << 20, 4, 4), (1 << 20, 4, 4), "float32", None),
    ((64, 1024, 256), (256, 256), "float32", None),
    ((2048, 2048), (2048, 2048), "int32", None),
    ((2048, 2048), (2048, 2048), "int8", None),
)
PART_OF_PEER = 0.98


def measure(run: Run) -> None:
    """Measure whole calls on host arrays, then arrays that are on the GPU."""
    for size, dtype in ((64, "float32"), (1024, "float32"), (4096, "float32"), (256, "float16")):
        run.measure(host_case(run, min(size, 128) if run.quick else size, dtype))
    if gpuops.is_available() and peers.gpu():
        run.say("\narrays on the GPU: the time of the work there; G/s are operations")
        for first, second, dtype, rate in DEVICE_CASES:
            if dtype == "bfloat16" and _bfloat16() is None:
                continue
            run.measure(device_case(run, _scaled(run, first), _scaled(run, second), dtype, rate))


def host_case(run: Run, size: int, dtype: str) -> Case:
    """Whole calls, from NumPy arrays to a fresh NumPy array."""
    pairs = [_draw(run, (size, size), (size, size), dtype) for _ in range(2)]
    contestants = {"gpuops on the CPU": Contestant(functools.partial(gpuops.matmul, device="cpu"))}
    targets = []
    if dtype == "float32":
        targets = [Target("gpuops on the CPU", "NumPy", ratio=0.95)]
    if gpuops.is_available():
        ours = functools.partial(gpuops.matmul, device="cuda")
        contestants["gpuops on the GPU"] = Contestant(ours)
        if size == 4096:
            targets.append(Target("gpuops on the GPU", seconds=9e-3))
    contestants["NumPy"] = Contestant(numpy.matmul)
    contestants |= peers.torch_cpu("matmul", _torch)
    contestants |= peers.torch_from_host("matmul", _torch)
    contestants |= peers.cupy_from_host("matmul", _cupy)
    name = f"matmul of {size} x {size} {dtype}"
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    return Case(name, contestants, _reference, (), pairs, 0, 2 * size**3, targets, tolerance)


def device_case(
    run: Run, first: tuple[int, ...], second: tuple[int, ...], dtype: str, rate: float | None
) -> Case:
    """Arrays that are on the GPU before and after the call."""
    pairs = [_draw(run, first, second, dtype) for _ in range(2)]
    clock = {"clock": "events"}
    contestants = {"gpuops": on_gpu(gpuops.matmul, **clock)}
    if dtype == "float32" and not OWN_KERNELS:
        tf32 = functools.partial(gpuops.matmul, precision="tf32")
        contestants["gpuops, precision='tf32'"] = on_gpu(tf32, **clock)
    if dtype == "bfloat16":
        contestants |= _torch_bfloat16(clock)
    elif not dtype.startswith("int"):
        contestants |= peers.torch_gpu("matmul", _torch, **clock)
    if dtype != "bfloat16":
        contestants |= peers.cupy_gpu("matmul", _cupy, **clock)
        contestants |= peers.jax_gpu("matmul", _jax, clock="JAX's stream")
    targets = []
    if not OWN_KERNELS:
        targets = [Target("gpuops", BEST_PEER, ratio=PART_OF_PEER)]
    elif rate is not None and not run.quick:
        targets = [Target("gpuops", rate=rate)]
    shapes = " @ ".join(" x ".join(map(str, shape)) for shape in (first, second))
    result = _reference(*pairs[0])
    operations = 2 * result.size * first[-1] * (4 if dtype.startswith("complex") else 1)
    tolerance = 0.0 if dtype.startswith("int") else 1e-2 if "16" in dtype else 2e-3
    name = f"device matmul of {shapes} {dtype}"
    return Case(name, contestants, _reference, (), pairs, 0, operations, targets, tolerance)


def _scaled(run: Run, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Make the large extents small, so that a quick run takes seconds."""
    return tuple(min(size, 128) for size in shape) if run.quick else shape


def _draw(
    run: Run, first: tuple[int, ...], second: tuple[int, ...], dtype: str
) -> tuple[numpy.ndarray, numpy.ndarray]:
    return _numbers(run, first, dtype), _numbers(run, second, dtype)


def _numbers(run: Run, shape: tuple[int, ...], dtype: str) -> numpy.ndarray:
    if dtype.startswith("int"):
        return run.random.integers(-100, 100, shape).astype(dtype)
    numbers = run.random.standard_normal(shape, dtype=numpy.float32)
    if dtype.startswith("complex"):
        numbers = numbers + 1j * run.random.standard_normal(shape, dtype=numpy.float32)
    return numbers.astype(_bfloat16() if dtype == "bfloat16" else dtype)


def _reference(a: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    # NumPy takes minutes for large products of 16-bit floats, and of integers.
    if a.dtype.itemsize == 2 and a.dtype.kind != "i":
        return numpy.matmul(a.astype(numpy.float32), b.astype(numpy.float32)).astype(a.dtype)
    if a.dtype.kind == "i":
        exact = numpy.matmul(a.astype(numpy.float64), b.astype(numpy.float64))
        return exact.astype(numpy.int64).astype(a.dtype)
    return numpy.matmul(a, b)


@functools.cache
def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return ml_dtypes.bfloat16


def _torch_bfloat16(clock: dict) -> dict:
    """Make a contestant of torch, to which bfloat16 comes as integers."""
    torch = peers.torch_on_gpu()
    if torch is None:
        return {}

    def convert(array: numpy.ndarray) -> Any:
        return torch.from_numpy(array.view(numpy.int16)).cuda().view(torch.bfloat16)

    def to_numpy(tensor: Any) -> numpy.ndarray:
        return tensor.view(torch.int16).cpu().numpy().view(_bfloat16())

    return {"torch matmul": Contestant(torch.matmul, convert=convert, to_numpy=to_numpy, **clock)}


def _torch(torch: Any, a: Any, b: Any) -> Any:
    return torch.matmul(a, b)


def _cupy(cupy: Any, a: Any, b: Any) -> Any:
    return cupy.matmul(a, b)


def _jax(jax: Any, a: Any, b: Any) -> Any:
    return jax.numpy.matmul(a, b, precision="highest")
