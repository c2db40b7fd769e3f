"""The way of an array to the GPU and back, between ordinary (pageable) memory and device arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy

import gpuops

from . import peers
from .driver import Driver
from .harness import Case, Contestant, Run

MEBI = 1 << 20


def measure(run: Run) -> None:
    """Measure both ways. Rates count the bytes that are moved, once."""
    if not (gpuops.is_available() and peers.gpu()):
        return
    run.say("\nthe way to the GPU and back (bytes moved, counted once)")
    for case in cases(run, 256 * MEBI // (64 if run.quick else 1)):
        run.measure(case)


def cases(run: Run, size: int) -> Iterator[Case]:
    """The way up, and the way down into fresh memory and into memory that is there.

    That is to_device and to_host of gpuops, cuda(), cpu() and copy_ of torch, asarray and get of
    CuPy, and device_put of JAX. Beside the peers stand CUDA's driver, called without any library,
    and the same between page-locked memory and the GPU, which is all that the bus carries.
    """
    array = run.random.random(size, dtype=numpy.float32)
    name = f"{array.nbytes // MEBI} MiB of pageable memory"

    def case(way: str, contestants: dict) -> Case:
        return Case(f"transfer {name}, {way}", contestants, _same, [array], [()], array.nbytes)

    up = {"gpuops": Contestant(gpuops.to_device, to_numpy=_to_host)}
    down = {"gpuops": Contestant(_to_host, convert=gpuops.to_device)}
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
        up["torch"] = Contestant(
            _waiting(lambda host: torch.from_numpy(host).cuda()), to_numpy=lambda x: x.cpu().numpy()
        )
        to_torch = up["torch"].call
        down["torch"] = Contestant(lambda there: there.cpu().numpy(), convert=to_torch)
        into["torch"] = Contestant(lambda there: tensor.copy_(there).numpy(), convert=to_torch)
    if cupy := peers.cupy_on_gpu():
        other = numpy.zeros_like(array)
        up["CuPy"] = Contestant(_waiting(cupy.asarray), to_numpy=cupy.asnumpy)
        down["CuPy"] = Contestant(lambda there: there.get(), convert=cupy.asarray)
        into["CuPy"] = Contestant(lambda there: there.get(out=other), convert=cupy.asarray)
    if jax := peers.jax_on_gpu():
        # JAX keeps what it fetched, so that it has no way down that could be taken twice.
        up["JAX"] = Contestant(lambda host: jax.device_put(host).block_until_ready())
    yield case("up", up)
    yield case("down, fresh memory", down)
    yield case("down, out=", into)


def _same(array: numpy.ndarray) -> numpy.ndarray:
    return array


def _to_host(there: gpuops.DeviceArray) -> numpy.ndarray:
    return there.to_host()


def _waiting(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wait for what a call queued, so that it is over when it returns."""

    def waiting(host: numpy.ndarray) -> Any:
        there = call(host)
        peers.gpu().synchronize()
        return there

    return waiting
