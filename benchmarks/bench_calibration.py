"""What the first call under device="auto" waits for: the machine is measured, in steps.

Each call is the first one of a process of its own, in which CUDA has been started before. The first
process finds nothing on disk, and the second what the first has left there.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gpuops

from .harness import Run

MOST_SECONDS = 0.1
CHILD_SECONDS = 120

# Prints the seconds of the call, and of what it consists of.
CALL = """
import json, time
import numpy, gpuops

x = numpy.ones(1 << 18, numpy.float32)
if gpuops.is_available():
    gpuops.to_device(x).to_host()
parts = {}

def timed(name, function):
    def call(*args):
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            parts[name] = time.perf_counter() - started
    return call

started = time.perf_counter()
from gpuops import _cache, _calibration
parts["import"] = time.perf_counter() - started
_calibration._machine = timed("key", _calibration._machine)
_calibration._add_products = timed("products", _calibration._add_products)
_cache.load, _cache.store = timed("load", _cache.load), timed("store", _cache.store)
gpuops.explain("add", x, x, device="auto")
total = time.perf_counter() - started
parts |= {name: seconds for name, seconds in gpuops._core._measured_steps().items() if seconds}
print(json.dumps([total, parts]))
"""


def measure(run: Run) -> None:
    """Call twice, with a cache of our own."""
    run.say('\nthe first call under device="auto", which measures the machine')
    with tempfile.TemporaryDirectory() as cache:
        for name in ("nothing is known", "known from disk"):
            total, parts = call(cache)
            run.say(f"  {name}: {1e3 * total:.1f} ms")
            for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
                run.say(f"    {part:<12} {1e3 * seconds:8.2f} ms")
            if total > MOST_SECONDS and gpuops.is_available() and not run.quick:
                run.say(f"    MISSED: {1e3 * MOST_SECONDS:.0f} ms are promised")


def call(cache: str) -> tuple[float, dict[str, float]]:
    """Return the seconds of the call in a process of its own, and of its parts."""
    folder = Path(gpuops._core.__file__).parent.parent
    environment = {**os.environ, "GPUOPS_CACHE_DIR": str(Path(cache, "cache"))}
    environment["PYTHONPATH"] = str(folder)
    # -P: the folder of the sources has no compiled module, unless they were built in place.
    child = subprocess.run(
        [sys.executable, "-P", "-c", CALL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=True,
    )
    total, parts = json.loads(child.stdout)
    return total, parts
