"""The way of an array to the GPU and back, alone and as part of whole calls on NumPy arrays."""

import math
from collections.abc import Iterator
from typing import Any

import numpy

import gpuops

from . import peers, whole
from .driver import Driver
from .harness import BEST_PEER, Case, Contestant, Run, Target

MEBI = 1 << 20


def measure(run: Run) -> None:
    """Measure both ways, then whole calls, then these at every size.

    Rates count the bytes that are moved, once.
    """
    if gpuops.is_available() and peers.gpu():
        run.say("\nthe way to the GPU and back (bytes moved, counted once)")
        scale = 64 if run.quick else 1
        for case in cases(run, 256 * MEBI // scale):
            run.measure(case)
        for case in transposed(run, 64 * MEBI // scale):
            run.measure(case)
    run.say("\nwhole calls on NumPy arrays")
    run.measure(whole.small_case(run))
    for operator in whole.WHOLE:
        for case in (*whole.full_cases(run, operator), *whole.curve_cases(run, operator)):
            run.measure(case)


def cases(run: Run, size: int) -> Iterator[Case]:
    """The way up, and the way down into fresh memory and into memory that is there.

    That is to_device and to_host of gpuops, cuda(), cpu() and copy_ of torch, asarray and get of
    CuPy, and device_put of JAX. At the first call of gpuops no memory is kept that results could
    have, but for the buffers that copies go through. Beside the peers stand CUDA's driver, called
    without any library, and the same between page-locked memory and the GPU, which is all that the
    bus carries.
    """
    array = run.random.random(size, dtype=numpy.float32)
    name = f"{array.nbytes // MEBI} MiB of pageable memory"

    def case(way: str, contestants: dict, rates: dict[str, float]) -> Case:
        targets = [Target(ours, rate=rate) for ours, rate in rates.items() if not run.quick]
        name_of_case = f"transfer {name}, {way}"
        return Case(name_of_case, contestants, _same, [array], [()], array.nbytes, None, targets)

    up = {"gpuops": _up_by_gpuops()}
    first = Contestant(_to_host, convert=gpuops.to_device, before=whole.forget)
    down = {
        "gpuops": Contestant(_to_host, convert=gpuops.to_device),
        "gpuops, first call": first,
    }
    fresh = numpy.zeros_like(array)
    into = {"gpuops": Contestant(lambda there: there.to_host(out=fresh), convert=gpuops.to_device)}
    driver = Driver()
    there = driver.memory_like(array)
    locked = driver.page_locked(array)

    def sent(host: numpy.ndarray) -> Any:
        driver.up(there, host)
        return there

    def fetched(place: Any) -> numpy.ndarray:
        return driver.down(numpy.empty_like(array), place)

    up["driver: pageable"] = Contestant(sent, to_numpy=fetched)
    up["driver: page-locked"] = Contestant(sent, convert=driver.page_locked, to_numpy=fetched)
    down["driver: pageable"] = Contestant(fetched, convert=sent)
    memory = numpy.zeros_like(array)
    into["driver: pageable"] = Contestant(lambda place: driver.down(memory, place), convert=sent)
    into["driver: page-locked"] = Contestant(lambda place: driver.down(locked, place), convert=sent)
    if torch := peers.torch_on_gpu():
        tensor = torch.zeros(size)
        up["torch"] = _up_by_torch(torch)
        to_torch = up["torch"].call
        down["torch"] = Contestant(lambda there: there.cpu().numpy(), convert=to_torch)
        into["torch"] = Contestant(lambda there: tensor.copy_(there).numpy(), convert=to_torch)
    if cupy := peers.cupy_on_gpu():
        other = numpy.zeros_like(array)
        up["CuPy"] = _up_by_cupy(cupy)
        down["CuPy"] = Contestant(lambda there: there.get(), convert=cupy.asarray)
        into["CuPy"] = Contestant(lambda there: there.get(out=other), convert=cupy.asarray)
    if jax := peers.jax_on_gpu():
        # JAX keeps what it fetched, so that it has no way down that could be taken twice.
        up["JAX"] = Contestant(lambda host: jax.device_put(host).block_until_ready())
    yield case("up", up, {"gpuops": 50})
    yield case("down, fresh memory", down, {"gpuops": 50, "gpuops, first call": 45})
    yield case("down, out=", into, {"gpuops": 52})


def transposed(run: Run, size: int) -> Iterator[Case]:
    """A matrix whose columns lie together, as those of pandas do, and into one that lies so.

    The matrix on the GPU is in C order. On its way up torch and CuPy leave it as it lies, which is
    less to do. It has an odd number of rows: those that are powers of two apart share what places
    a cache has.
    """
    length = math.isqrt(size) | 1
    array = run.random.random((length, length), dtype=numpy.float32).T
    name = f"transfer {array.nbytes // MEBI} MiB of pageable memory, transposed"
    out, other = numpy.zeros_like(array), numpy.zeros_like(array)
    up = {"gpuops": _up_by_gpuops()}
    down = {"gpuops": Contestant(lambda x: x.to_host(out), convert=gpuops.to_device)}
    if torch := peers.torch_on_gpu():
        tensor = torch.from_numpy(other)
        up["torch"] = _up_by_torch(torch)
        down["torch"] = Contestant(
            lambda there: tensor.copy_(there).numpy(),
            convert=lambda host: torch.from_numpy(host).cuda().contiguous(),
        )
    if cupy := peers.cupy_on_gpu():
        up["CuPy"] = _up_by_cupy(cupy)
        third = numpy.zeros_like(array)
        down["CuPy"] = Contestant(
            lambda there: there.get(out=third),
            convert=lambda host: cupy.ascontiguousarray(cupy.asarray(host)),
        )
    targets = [Target("gpuops", BEST_PEER, ratio=1.0)]
    for way, contestants in (("up", up), ("down, out=", down)):
        yield Case(
            f"{name}, {way}", contestants, _same, [array], [()], array.nbytes, targets=targets
        )


def _same(array: numpy.ndarray) -> numpy.ndarray:
    return array


def _to_host(there: gpuops.DeviceArray) -> numpy.ndarray:
    return there.to_host()


def _up_by_gpuops() -> Contestant:
    call = peers.until_done(gpuops.to_device, peers.wait_for_gpuops)
    return Contestant(call, to_numpy=_to_host)


def _up_by_torch(torch: Any) -> Contestant:
    call = peers.until_done(lambda host: torch.from_numpy(host).cuda(), peers.wait_for_torch)
    return Contestant(call, to_numpy=lambda there: there.cpu().numpy())


def _up_by_cupy(cupy: Any) -> Contestant:
    call = peers.until_done(cupy.asarray, peers.wait_for_cupy)
    return Contestant(call, to_numpy=cupy.asnumpy)
