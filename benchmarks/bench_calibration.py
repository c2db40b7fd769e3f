"""What the first calls under device="auto" wait for: the machine is measured, in steps.

What calls need to know depends on their work: of elements, which are measured first, of rows,
products or filters. Each is the first call of its work in a process of its own, in which CUDA has
been started before. Half of the processes find nothing on disk, and half what another has left
there.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import gpuops

from .harness import Case, Contestant, Run, Target

UNKNOWN, KNOWN = "gpuops, nothing is known", "gpuops, known from disk"
WORKS = ("elements", "rows", "products", "filters")
MOST_SECONDS = 0.1
CHILD_SECONDS = 120

# Prints the seconds of the call, and of what it consists of.
CALL = """
import json, sys, time
import numpy, gpuops

work = sys.argv[1]
x = numpy.ones(1 << 18, numpy.float32)
image = numpy.ones((256, 256), numpy.float32)
calls = {
    "elements": ("add", x, x),
    "rows": ("gather", x, numpy.arange(1 << 17)),
    "products": ("matmul", image, image),
    "filters": ("correlate", image, image[:3, :3]),
}
if gpuops.is_available():
    gpuops.to_device(x).to_host()
if work != "elements":
    gpuops.explain(*calls["elements"], device="auto")
parts = {}

def timed(name, function):
    def call(*args):
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - started
    return call

started = time.perf_counter()
from gpuops import _cache, _calibration
parts["import"] = time.perf_counter() - started
_calibration._machine = timed("key", _calibration._machine)
_calibration._add_products = timed("products", _calibration._add_products)
_cache.load, _cache.store = timed("load", _cache.load), timed("store", _cache.store)
gpuops.explain(*calls[work], device="auto")
total = time.perf_counter() - started
parts |= {name: seconds for name, seconds in gpuops._core._measured_steps().items() if seconds}
print(json.dumps([total, parts]))
"""


def measure(run: Run) -> None:
    """Call with a cache that is empty, and with one that stays as it is."""
    for work in WORKS:
        parts: dict[str, list[dict[str, float]]] = {UNKNOWN: [], KNOWN: []}
        with tempfile.TemporaryDirectory() as folder:
            run.measure(first_call(work, folder, parts))
        tell(run, parts)


def tell(run: Run, parts: dict[str, list[dict[str, float]]]) -> None:
    """Say what the calls consisted of."""
    for name, calls in parts.items():
        run.say(f"  {name}")
        medians = {
            part: statistics.median(called.get(part, 0.0) for called in calls)
            for part in {part for called in calls for part in called}
        }
        for part, seconds in sorted(medians.items(), key=lambda item: -item[1]):
            if seconds:
                run.say(f"    {part:<12} {1e3 * seconds:8.2f} ms")


def first_call(work: str, folder: str, parts: dict[str, list[dict[str, float]]]) -> Case:
    """Make the case; what the time of each call consists of is added to `parts`."""

    def contestant(name: str) -> Contestant:
        cache = Path(folder, name)

        def timed() -> float:
            total, found = call(work, cache)
            parts[name].append(found)
            return total

        def forget() -> None:
            shutil.rmtree(cache, ignore_errors=True)

        return Contestant(timed, clock="told", before=forget if name == UNKNOWN else None)

    targets = [Target(name, seconds=MOST_SECONDS) for name in parts if gpuops.is_available()]
    name = f'the first call of {work} under device="auto", which measures the machine for it'
    contestants = {name: contestant(name) for name in parts}
    return Case(name, contestants, reference=None, targets=targets)


def call(work: str, cache: Path) -> tuple[float, dict[str, float]]:
    """Return the seconds of the call in a process of its own, and of its parts."""
    folder = Path(gpuops._core.__file__).parent.parent
    environment = {**os.environ, "GPUOPS_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = str(folder)
    # -P: the folder of the sources has no compiled module, unless they were built in place.
    child = subprocess.run(
        [sys.executable, "-P", "-c", CALL, work],
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=True,
    )
    total, parts = json.loads(child.stdout)
    return total, parts
