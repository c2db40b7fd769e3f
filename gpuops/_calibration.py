"""What the cost model knows of a machine: measured once, and kept on disk beside compiled kernels.

The C core runs the operators on the CPU and the GPU and times them; of products of matrices, which
are NumPy's on the CPU, NumPy is timed here. An entry counts only for the machine that it was
measured on: the processor, the threads that may be used, the GPU and its number, the driver, what
the environment says of all these, and the versions of gpuops, NumPy, its BLAS and the C library are
its key, with the kind of work that it is for. What was measured beside other work of the process,
or while it had to wait for processors, is for this process alone.
"""

import contextlib
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy

from . import _cache, _core

_PRODUCTS = "products"  # one of work_name in kernels/route.c

# Matrices that take SMALL_SUMS, LARGE_SUMS and FAR_SUMS multiplications (kernels/gpuops.h). Each
# tells what is expected of the next; the first has no use for the threads of a BLAS.
_SIDES = {"small": 64, "large": 256, "far": 813}
# With so many threads, to this power, as many times as fast as one at the least, where the threads
# have a processor each: OpenBLAS with 16 is 3.3 and 8.6 times as fast.
_GAINS = {"small": 0.0, "large": 0.4, "far": 0.75}
_INTEGERS = 64
# A figure is the best of some runs, which go on until they have taken long enough, and then as long
# as each is so much faster than all before it, up to some number; or as long as the best of them is
# so much slower than expected, up to some time. What runs take beyond the best of them, because
# another process has the processor, counts only up to some more time.
_LEAST_RUNS, _MOST_RUNS = 3, 6
_ENOUGH_SECONDS, _LONG_SECONDS, _STEADY = 3e-3, 20e-3, 0.8
_MOST_SECONDS = 30e-3

_TASKS = "/proc/self/task"
# OpenBLAS looks for work for some 100 ms, MKL for 200.
_LOOK_SECONDS = 1e-3
_MOST_REST_SECONDS = 0.3

# The part of its time that a process may wait for processors. It is some hundredths at most where
# it has the machine to itself, and a fifth and more where half of the processors have other work.
# That of a virtual machine, whose processors its host may give to others, is counted in ticks.
_MOST_WAITING = 0.1
_TICKS = "/proc/stat"

# What decides with how many threads NumPy multiplies, with which instructions, which GPU has which
# number, and whether copies have page-locked buffers.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_INSTRUCTIONS = ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES")
_OTHERS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUOPS_PINNED_LIMIT")
_VARIABLES = (*_THREADS, *_INSTRUCTIONS, *_OTHERS)


def calibrate(ordinal: int, work: str) -> None:
    """Let the cost model know what calls of some work need of this machine.

    With a GPU, or with -1 without one. What all calls go by is told with elements, the first.
    """
    key = _cache.key_of([*_machine(ordinal), work.encode()])
    with contextlib.suppress(ValueError):
        _core._tell_rates(ordinal, work, _decoded(_load(key)))
        return
    is_alone = come_to_rest()
    before, ticks = _spent(), _ticks()
    rates = _core._measure_rates(ordinal, work)
    is_alone = is_alone and come_to_rest()  # nor has another one begun, before products are timed
    if work == _PRODUCTS:
        _add_products(rates)
    if ordinal < 0:
        _fill_up(rates)
    _core._tell_rates(ordinal, work, rates)
    waited = max(_part_waited(before, _spent()), _part_stolen(ticks, _ticks()))
    if is_alone and waited <= _MOST_WAITING:
        with contextlib.suppress(RuntimeWarning):  # Warnings may be made errors.
            _cache.store(key, json.dumps(rates).encode(), _cache.CALIBRATION)


def come_to_rest(most_seconds: float = _MOST_REST_SECONDS) -> bool:
    """Wait, though not for long, until no other thread of the process is at work.

    The threads of a BLAS go on to look for work for some time after a product, and take the
    processors from those that are to be measured.
    """
    deadline = time.perf_counter() + most_seconds
    while _others_at_work():
        if time.perf_counter() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _threads() -> list[str]:
    with contextlib.suppress(OSError):  # There is no such folder everywhere.
        return os.listdir(_TASKS)
    return []


def _read(thread: str, name: str) -> bytes:
    with open(f"{_TASKS}/{thread}/{name}", "rb") as file:
        return file.read()


def _others_at_work() -> bool:
    """Tell whether another thread has a processor, or waits for one."""
    with contextlib.suppress(OSError):
        own = os.path.basename(os.readlink("/proc/thread-self"))
        return any(thread != own and _state(thread) == b"R" for thread in _threads())
    return False


def _state(thread: str) -> bytes:
    """Return the letter for what a thread does; none where it is over."""
    with contextlib.suppress(OSError):
        return _read(thread, "stat").rpartition(b")")[2].strip()[:1]
    return b""


class _Spent(NamedTuple):
    """What a thread has spent since it began, in nanoseconds."""

    running: int
    waiting: int  # for a processor that another thread has


def _spent() -> dict[str, _Spent]:
    """Ask the scheduler for each thread of this process; some tell nothing, and some are over."""
    found = {}
    for thread in _threads():
        with contextlib.suppress(OSError, ValueError):
            running, waiting, _ = map(int, _read(thread, "schedstat").split())
            found[thread] = _Spent(running, waiting)
    return found


def _part_waited(before: dict[str, _Spent], after: dict[str, _Spent]) -> float:
    """Return the part of their time that threads which are still there have waited."""
    running = waiting = 0
    for thread, late in after.items():
        early = before.get(thread, _Spent(0, 0))
        running += late.running - early.running
        waiting += late.waiting - early.waiting
    return waiting / max(running + waiting, 1)


def _ticks() -> tuple[int, int]:
    """Return for how long all processors have worked, and the host has had them for others."""
    with contextlib.suppress(OSError, ValueError), open(_TICKS, "rb") as file:
        user, nice, system, _, _, interrupts, soft, stolen = map(int, file.readline().split()[1:9])
        return user + nice + system + interrupts + soft, stolen
    return 0, 0


def _part_stolen(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the part of the time that the host has had; of one tick, most may be of before."""
    worked, stolen = (late - early for early, late in zip(before, after, strict=True))
    return stolen / (worked + stolen) if stolen > 1 else 0.0


def _load(key: str) -> bytes | None:
    """Return the entry of a machine; that there is no cache is no reason to fail."""
    with contextlib.suppress(RuntimeWarning):  # Warnings may be made errors.
        return _cache.load(key, _cache.CALIBRATION)
    return None


def _machine(ordinal: int) -> list[bytes]:
    """Name all that the rates depend on."""
    facts = _core._config()
    found = [
        facts["version"], numpy.__version__, _blas(), _c_library(), _processor(),
        facts["cpu_threads"], facts["cpu_level"], len(os.sched_getaffinity(0)),
        [os.environ.get(name) for name in _VARIABLES], facts["cuda_build"], facts["cuda_driver"],
        ordinal, _core._device_info(ordinal) if ordinal >= 0 else None,
    ]  # fmt: skip
    return [b"calibration", *(repr(fact).encode() for fact in found)]


def _blas() -> object:
    """Name what multiplies for NumPy: the same version comes with one or another."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        found = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return found["name"], found.get("version")
    return None


def _c_library() -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return os.confstr("CS_GNU_LIBC_VERSION")
    return None


def _processor() -> str:
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return f"{platform.machine()} {platform.processor()}"


def _decoded(entry: bytes | None) -> dict[str, float]:
    """Return the rates of an entry; ValueError where it holds none."""
    rates = json.loads(entry) if entry is not None else None
    if not isinstance(rates, dict) or any(type(rate) is not float for rate in rates.values()):
        raise ValueError("no rates")
    return rates


def _blas_threads() -> int:
    """Return with how many threads a BLAS multiplies, as far as that is known."""
    found = [len(os.sched_getaffinity(0))]
    for name in _THREADS:
        with contextlib.suppress(ValueError):
            found.append(int(os.environ.get(name, "")))
    return min(count for count in found if count > 0)


def _add_products(rates: dict[str, float]) -> None:
    threads = _blas_threads()
    alone = least = math.inf  # what one multiplication takes, with its addition
    for size, side in _SIDES.items():
        matrix, sums = numpy.ones((side, side), numpy.float32), side**3
        expected = min(alone / threads ** _GAINS[size], least)
        # Of larger matrices it takes no longer, whatever their threads have to wait for.
        least = min(_seconds_of_product(matrix, expected * sums) / sums, least)
        rates[f"matmul.cpu_{size}"] = least
        if size == "small":
            alone = least
    integers = _seconds_of_product(numpy.ones((_INTEGERS, _INTEGERS), numpy.int32))
    rates["integer_factor"] = max(integers / _INTEGERS**3 / rates["matmul.cpu_small"], 1.0)


def _seconds_of_product(matrix: numpy.ndarray, expected: float = math.inf) -> float:
    """Return how long a product takes, to whose loop csrc/matmul.c comes sooner than NumPy."""
    out = numpy.empty_like(matrix)
    return _fastest(lambda: numpy.matmul(matrix, matrix, out), expected)


def _fastest(call: Callable[[], object], expected: float = math.inf) -> float:
    best = math.inf
    spent = 0.0  # but for the first run, which may have started threads
    for run in itertools.count(1):
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        spent += seconds if run > 1 else 0
        is_steady, best = seconds > _STEADY * best, min(seconds, best)
        worked = best * (run - 1)  # where it had to wait, this is less than what it has spent
        is_enough = run >= _LEAST_RUNS and worked >= _ENOUGH_SECONDS
        is_done = is_enough and (is_steady or run >= _MOST_RUNS)
        is_expected = _STEADY * best <= expected
        if worked >= _LONG_SECONDS or (is_done and is_expected):
            break
        if run >= _LEAST_RUNS and spent >= _MOST_SECONDS:
            break
    return max(best, 1e-9)


def _fill_up(rates: dict[str, float]) -> None:
    """Set what stands for a GPU where there is none, and is not looked at."""
    rates.update({name: 1.0 for name, rate in rates.items() if not rate})
