"""Cases of element-wise operators: whole calls on host arrays, and arrays that are on the GPU."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

import gpuops

from . import peers
from .harness import BEST_PEER, Case, Contestant, Run, Target, count_name, on_gpu

MEBI = 1 << 20
# Elements of strided arrays, which caches hold, and of transposed ones, which they do not.
STRIDED = 1 << 16
TRANSPOSED = 1 << 22
# Two units in the last place.
TOLERANCES = {"float16": 2.0**-9, "bfloat16": 2.0**-6}


@dataclass
class Elementwise:
    """One operator: what gpuops, NumPy and the peers call, each on `inputs` arrays.

    Peers take their library first. `rates` are the GB/s to reach on the GPU, by the number of
    elements; `host_ratio` is how many times as fast as NumPy the CPU backend shall be.
    """

    name: str
    inputs: int
    ours: Callable[..., Any]
    numpy: Callable[..., numpy.ndarray]
    torch: Callable[..., Any] | None = None
    cupy: Callable[..., Any] | None = None
    jax: Callable[..., Any] | None = None
    dtypes: Sequence[str] = ("float32",)
    rates: dict[str, dict[int, float]] = field(default_factory=dict)
    host_ratio: float | None = None
    tolerance: float = 0.0


def measure(run: Run, operator: Elementwise) -> None:
    """Measure an operator at every size, on host arrays first."""
    scale = 64 if run.quick else 1
    for count in (1000, 16 * MEBI // scale):
        run.measure(host_case(run, operator, count))
    for step in (-1, 2, 3):
        run.measure(host_case(run, operator, STRIDED // scale, step))
    run.measure(transposed_case(run, operator, TRANSPOSED // scale))
    if gpuops.is_available() and peers.gpu():
        run.say("\narrays on the GPU: the time of the work there")
        for case in device_cases(run, operator, scale):
            run.measure(case)


def host_case(run: Run, operator: Elementwise, count: int, step: int = 1) -> Case:
    """Whole calls, from NumPy arrays, or slices of such, to a fresh NumPy array."""
    case = f"{operator.name} of {count_name(count)} float32"
    if step != 1:
        case += ", backwards" if step < 0 else f", one of {step} each"

    def slices() -> list[numpy.ndarray]:
        return [array[::step] for array in _draw(run, operator, count * abs(step), "float32")]

    return _host_case(operator, case, [slices(), slices()])


def transposed_case(run: Run, operator: Elementwise, count: int) -> Case:
    """Whole calls, from square arrays in Fortran's order to a fresh one."""
    side = math.isqrt(count)

    def turned() -> list[numpy.ndarray]:
        return [array.reshape(side, side).T for array in _draw(run, operator, side**2, "float32")]

    name = f"{operator.name} of {count_name(count)} float32, transposed"
    return _host_case(operator, name, [turned(), turned()])


def _host_case(operator: Elementwise, name: str, sets: list[list[numpy.ndarray]]) -> Case:
    first = sets[0][0]
    ours = functools.partial(operator.ours, device="cpu")
    contestants = {"gpuops on the CPU": Contestant(ours), "NumPy": Contestant(operator.numpy)}
    if operator.torch and min(first.strides) > 0:  # torch has no negative strides
        contestants |= peers.torch_cpu(operator.name, operator.torch)
        contestants |= peers.torch_from_host(operator.name, operator.torch)
    if gpuops.is_available():
        ours = functools.partial(operator.ours, device="cuda")
        contestants["gpuops on the GPU"] = Contestant(ours)
    targets = []
    if operator.host_ratio and first.size >= MEBI:
        targets = [Target("gpuops on the CPU", "NumPy", ratio=operator.host_ratio)]
    moved = (operator.inputs + 1) * first.nbytes
    return Case(name, contestants, operator.numpy, (), sets, moved, None, targets,
                max(operator.tolerance, 1e-6))  # fmt: skip


def device_cases(run: Run, operator: Elementwise, scale: int) -> Iterator[Case]:
    """Arrays that are on the GPU before and after the call."""
    for dtype in operator.dtypes:
        for count in (16 * MEBI, 512 * MEBI):
            yield device_case(run, operator, count // scale, dtype, count)


def device_case(run: Run, operator: Elementwise, count: int, dtype: str, full: int) -> Case:
    """One size, beside the peers that have this dtype."""
    sets = [_draw(run, operator, count, dtype) for _ in range(1 if count > 64 * MEBI else 2)]
    clock = {"clock": "events"}
    contestants = {"gpuops": on_gpu(operator.ours, **clock)}
    if operator.torch:
        contestants |= peers.torch_gpu(operator.name, operator.torch, **clock)
    if operator.cupy:
        contestants |= peers.cupy_gpu(operator.name, operator.cupy, **clock)
    # To get arrays of several GB to JAX as well would take most of the time.
    if operator.jax and full < 512 * MEBI:
        contestants |= peers.jax_gpu(operator.name, operator.jax, clock="JAX's stream")
    targets = [Target("gpuops", BEST_PEER, ratio=1.0)]
    if rate := operator.rates.get(dtype, {}).get(full):
        targets.append(Target("gpuops", rate=rate))
    name = f"device {operator.name} of {count_name(count)} {dtype}"
    moved = (operator.inputs + 1) * sets[0][0].nbytes
    tolerance = TOLERANCES.get(dtype, operator.tolerance or 1e-6)
    return Case(name, contestants, operator.numpy, (), sets, moved, None, targets, tolerance)


def _draw(run: Run, operator: Elementwise, count: int, dtype: str) -> list[numpy.ndarray]:
    """Draw the inputs; what is beyond the caches of any GPU repeats."""
    drawn = min(count, 64 * MEBI)
    return [
        numpy.tile((8 * run.random.random(drawn, dtype=numpy.float32) - 4).astype(dtype),
                   count // drawn)
        for _ in range(operator.inputs)
    ]  # fmt: skip
