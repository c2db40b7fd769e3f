"""The way of an array to the GPU and back, alone and as part of whole calls on NumPy arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy

import gpuops

from . import peers, whole
from .driver import Driver
from .harness import Case, Contestant, Run, Target

MEBI = 1 << 20


def measure(run: Run) -> None:
    """Measure both ways, then whole calls, then these at every size.

    Rates count the bytes that are moved, once.
    """
    if gpuops.is_available() and peers.gpu():
        run.say("\nthe way to the GPU and back (bytes moved, counted once)")
        for case in cases(run, 256 * MEBI // (64 if run.quick else 1)):
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

    up = {"gpuops": Contestant(gpuops.to_device, to_numpy=_to_host)}
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
    yield case("up", up, {"gpuops": 50})
    yield case("down, fresh memory", down, {"gpuops": 50, "gpuops, first call": 45})
    yield case("down, out=", into, {"gpuops": 52})


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
