"""correlate beside SciPy, OpenCV, torch, CuPy and JAX, with clamped borders ("nearest")."""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy

import gpuops

from . import peers
from .harness import BEST_PEER, Case, Contestant, Run, Target, on_gpu

try:
    from scipy import ndimage, signal
except ImportError:
    ndimage = None

# Sizes of the weights, and the Gpx/s that they shall reach for 4096 x 4096 float32 on the GPU.
DEVICE_RATES = {3: 430, 5: 400, 7: 330, 9: None, 11: None, 15: 90, 31: 22}
SMALL_RATE = 50  # for 512 x 512, 3 x 3: little more than a launch
SEPARABLE_RATE = 200  # for a Gaussian of 31 x 31
TOLERANCE = 1e-5  # of sums of up to 961 terms in float32


def measure(run: Run) -> None:
    """Measure every case: whole calls on host arrays first, then arrays on the GPU."""
    if ndimage is None:
        run.say("correlate is left out: SciPy, whose results are the expected ones, is missing")
        return
    for case in host_cases(run):
        run.measure(case)
    if gpuops.is_available() and peers.gpu():
        run.say("\narrays on the GPU: the time of the work there")
        for case in device_cases(run):
            run.measure(case)


def host_cases(run: Run) -> Iterator[Case]:
    """Whole calls, from a NumPy array to a fresh NumPy array."""
    side = 512 if run.quick else 1024
    for size in (3, 7, 15):
        yield host_case(run, side, _random(run, size), f"{size} x {size}", "float32")
    yield host_case(run, side, _random(run, 3), "3 x 3", "uint8")
    yield host_case(run, side, _gauss(31), "31 x 31 Gaussian", "float32")
    yield host_case(run, 32, _random(run, 3), "3 x 3", "float32")


def device_cases(run: Run) -> Iterator[Case]:
    """Images that are on the GPU before and after the call."""
    side = 1024 if run.quick else 4096
    for size, rate in DEVICE_RATES.items():
        yield device_case(run, side, _random(run, size), f"{size} x {size}", "float32", rate)
    yield device_case(run, side, _gauss(31), "31 x 31 Gaussian", "float32", SEPARABLE_RATE)
    yield device_case(run, 512, _random(run, 3), "3 x 3", "float32", SMALL_RATE)
    yield device_case(run, side, _random(run, 3), "3 x 3", "uint8", None)
    yield device_case(run, side, _random(run, 3), "3 x 3", "float64", None)


def host_case(run: Run, side: int, weights: numpy.ndarray, which: str, dtype: str) -> Case:
    """One image on the host."""
    images = _images(run, side, dtype)
    contestants = {"gpuops on the CPU": Contestant(_ours(weights, device="cpu"))}
    if gpuops.is_available():
        contestants["gpuops on the GPU"] = Contestant(_ours(weights, device="cuda"))
    contestants["SciPy"] = Contestant(_scipy(weights))
    if dtype == "float32":
        contestants |= _opencv(weights)
        contestants |= peers.torch_cpu("conv2d", _torch(weights))
        contestants |= peers.cupy_from_host("correlate", _cupy(weights))
    targets = [Target("gpuops on the CPU", "SciPy", ratio=1.0)] if side > 100 else []
    return _case(f"correlate {_name(side, which, dtype)}", contestants, weights, images, targets)


def device_case(
    run: Run, side: int, weights: numpy.ndarray, which: str, dtype: str, rate: float | None
) -> Case:
    """One image on the GPU."""
    images = _images(run, side, dtype)
    clock = {"clock": "events"}
    contestants = {"gpuops": on_gpu(_ours(weights), **clock)}
    if weights.size <= 225:
        on_device = functools.partial(_with_weights_there, weights)
        contestants["gpuops, weights there"] = on_gpu(on_device, **clock)
    if dtype == "float32":
        contestants |= peers.torch_gpu("conv2d", _torch(weights), **clock)
        contestants |= peers.jax_gpu("conv", _jax(weights), clock="JAX's stream")
    contestants |= peers.cupy_gpu("correlate", _cupy(weights), **clock)
    targets = [Target("gpuops", BEST_PEER, ratio=1.0)]
    if rate is not None:
        targets.append(Target("gpuops", rate=rate))
    name = f"device correlate {_name(side, which, dtype)}"
    return _case(name, contestants, weights, images, targets)


def _case(
    name: str, contestants: dict, weights: numpy.ndarray, images: list, targets: list[Target]
) -> Case:
    image = images[0][0]
    tolerance = TOLERANCE if image.dtype == numpy.float32 else 0.0
    return Case(name, contestants, _reference(weights), (), images, 2 * image.nbytes, image.size,
                targets, tolerance)  # fmt: skip


def _name(side: int, which: str, dtype: str) -> str:
    return f"{which} of {side} x {side} {dtype}"


def _images(run: Run, side: int, dtype: str) -> list:
    images = [run.random.random((side, side), dtype=numpy.float32) for _ in range(2)]
    if dtype == "uint8":
        images = [255 * image for image in images]
    return [(image.astype(dtype),) for image in images]


def _random(run: Run, size: int) -> numpy.ndarray:
    return run.random.random((size, size), dtype=numpy.float32) / size**2


def _gauss(size: int) -> numpy.ndarray:
    line = numpy.exp(-0.5 * (6 * (numpy.arange(size) - size // 2) / size) ** 2)
    line /= line.sum()
    return numpy.outer(line, line).astype(numpy.float32)


def _ours(weights: numpy.ndarray, **options: Any) -> Any:
    return functools.partial(gpuops.correlate, weights=weights, mode="nearest", **options)


def _with_weights_there(weights: numpy.ndarray, image: Any) -> Any:
    return gpuops.correlate(image, _there(weights.tobytes(), weights.shape), mode="nearest")


@functools.cache
def _there(weights: bytes, shape: tuple[int, ...]) -> Any:
    return gpuops.to_device(numpy.frombuffer(weights, numpy.float32).reshape(shape))


def _scipy(weights: numpy.ndarray) -> Any:
    return functools.partial(ndimage.correlate, weights=weights, mode="nearest")


def _reference(weights: numpy.ndarray) -> Any:
    """Compute as SciPy does; by FFT where that would take minutes."""

    def by_fft(image: numpy.ndarray) -> numpy.ndarray:
        if image.size * weights.size < 1 << 30:
            return _scipy(weights)(image)
        half = weights.shape[0] // 2
        padded = numpy.pad(image.astype(numpy.float64), half, mode="edge")
        return signal.oaconvolve(padded, weights[::-1, ::-1], mode="valid").astype(image.dtype)

    return by_fft


def _opencv(weights: numpy.ndarray) -> dict:
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError:
        return {}
    filter2d = functools.partial(
        cv2.filter2D, ddepth=-1, kernel=weights, borderType=cv2.BORDER_REPLICATE
    )
    return {"OpenCV filter2D": Contestant(filter2d)}


def _torch(weights: numpy.ndarray) -> Any:
    half = weights.shape[0] // 2
    there = functools.cache(
        lambda torch, device: torch.from_numpy(weights).to(device)[None, None]
    )  # to bring them there is no part of the work

    def conv2d(torch: Any, image: Any) -> Any:
        kernel = there(torch, image.device)
        pad = torch.nn.functional.pad(image[None, None], (half,) * 4, mode="replicate")
        return torch.nn.functional.conv2d(pad, kernel)[0, 0]

    return conv2d


def _cupy(weights: numpy.ndarray) -> Any:
    there = functools.cache(lambda cupy: cupy.asarray(weights))

    def correlate(cupy: Any, image: Any) -> Any:
        their = importlib.import_module("cupyx.scipy.ndimage")
        return their.correlate(image, there(cupy), mode="nearest")

    return correlate


def _jax(weights: numpy.ndarray) -> Any:
    half = weights.shape[0] // 2

    def conv(jax: Any, image: Any) -> Any:
        pad = jax.numpy.pad(image, half, mode="edge")[None, None]
        kernel = jax.numpy.asarray(weights)[None, None]
        precision = jax.lax.Precision.HIGHEST
        return jax.lax.conv(pad, kernel, (1, 1), "VALID", precision=precision)[0, 0]

    return conv
