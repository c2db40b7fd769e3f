"""Kernels that are compiled at run time: how long that takes, and how fast the result is.

What a launch costs is measured with the other calls, in bench_overhead.py.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import gpuops
from gpuops import _compile, _core

from . import peers
from .harness import Case, Contestant, Run, Target, fresh_cache, on_gpu

A = 2.5
BLOCKS, THREADS = 32_768, 512
SOURCE = """
extern "C" __global__ void saxpy(float a, const float* x, const float* y, float* out, size_t n)
{
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
"""


def measure(run: Run) -> None:
    """Measure compiling where there is an NVRTC, and the kernel where there is a GPU too."""
    try:
        _compile.find_nvrtc()
    except gpuops.CompileError as error:
        run.say(f"\nnothing can be compiled: {error}")
        return
    with fresh_cache() as folder:
        run.measure(compiling())
        if gpuops.is_available() and peers.gpu():
            run.measure(computing(run, folder))


def compiling() -> Case:
    """A small kernel: one that nobody has compiled before, and one from the cache."""
    # Without a GPU there is one to name.
    options = [] if gpuops.is_available() else ["--gpu-architecture=sm_90"]
    nvrtc = _compile.find_nvrtc()
    serial = itertools.count()

    def another() -> str:
        return f"// {next(serial)} of {os.getpid()}\n{SOURCE}"

    def compile_alone() -> Any:
        words = [word.encode() for word in options or [_architecture()]]
        return _core._nvrtc_compile(another().encode(), b"source.cu", tuple(words), None, ())

    contestants = {
        "gpuops.compile, anew": Contestant(lambda: gpuops.compile(another(), options=options)),
        "gpuops.compile, from the cache": Contestant(
            lambda: gpuops.compile(SOURCE, options=options)
        ),
        f"NVRTC {'.'.join(map(str, nvrtc.version))} alone": Contestant(compile_alone),
    }
    if cupy := peers.cupy_on_gpu():
        contestants["CuPy RawModule, anew"] = Contestant(
            lambda: cupy.RawModule(code=another()).get_function("saxpy")
        )
        contestants["CuPy RawModule, from the cache"] = Contestant(
            lambda: (cupy.clear_memo(), cupy.RawModule(code=SOURCE).get_function("saxpy"))
        )
    targets = [
        Target("gpuops.compile, anew", seconds=25e-3),
        Target("gpuops.compile, from the cache", seconds=1e-3),
    ]
    return Case("compile a small kernel", contestants, reference=None, targets=targets)


def _architecture() -> str:
    _, major, minor = _core._find_device(None, "compile")
    return f"--gpu-architecture=sm_{major}{minor}"


def computing(run: Run, folder: Path) -> Case:
    """The same kernel as NVRTC compiles it, and as nvcc does where there is one."""
    n = BLOCKS * THREADS // (64 if run.quick else 1)
    inputs = [tuple(run.random.random((2, n), dtype=numpy.float32)) for _ in range(2)]
    out = gpuops.empty(n, numpy.float32)

    def launching(kernel: Any) -> Callable[[Any, Any], Any]:
        launch = kernel[n // THREADS, THREADS]

        def call(x: Any, y: Any) -> Any:
            launch(A, x, y, out, n)
            return out

        return call

    ours = launching(gpuops.compile(SOURCE)["saxpy"])
    contestants = {"gpuops.compile": on_gpu(ours, clock="events")}
    if nvcc := _nvcc():
        theirs = launching(_compiled_by(nvcc, folder)["saxpy"])
        contestants["the same by nvcc"] = on_gpu(theirs, clock="events")
    contestants["gpuops.saxpy"] = on_gpu(
        lambda x, y: gpuops.saxpy(A, x, y, out=out), clock="events"
    )
    targets = [Target("gpuops.compile", "the same by nvcc", ratio=0.99)]
    return Case(
        f"saxpy by a kernel of one's own, {n // THREADS} x {THREADS} threads",
        contestants,
        lambda x, y: numpy.float32(A) * x + y,
        (),
        inputs,
        3 * inputs[0][0].nbytes,
        targets=targets,
        tolerance=1e-6,
    )


def _nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.path.join(home, "bin") for home in homes if home]
    return shutil.which("nvcc", path=os.pathsep.join([*folders, *os.get_exec_path()]))


def _compiled_by(nvcc: str, folder: Path) -> gpuops.Module:
    source, cubin = folder / "saxpy.cu", folder / "saxpy.cubin"
    source.write_text(SOURCE)
    command = [nvcc, "-cubin", _architecture().replace("--gpu-architecture", "-arch")]
    subprocess.run([*command, "-std=c++17", "-o", cubin, source], check=True)
    return _core._load_module(cubin.read_bytes(), {"saxpy": ("saxpy", None)}, 0, {})
