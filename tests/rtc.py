"""What the tests of kernels share that are compiled at run time: NVRTC, modules, and host twins."""

import contextlib
import ctypes
import functools
import importlib

import numpy as np
from faults.fake import device_array


def open_nvrtc(gpuops):
    """Opens NVRTC for a build of the package, or skips the test."""
    import pytest  # Not at the top: the sweep of faults/ forks all the time, which it would slow.

    try:
        return importlib.import_module(f"{gpuops.__name__}._compile").find_nvrtc()
    except gpuops.CompileError as problem:
        pytest.skip(str(problem).partition("\n")[0])


@functools.cache
def cubin(gpuops, source, architecture="sm_90", expressions=()):
    """Machine code, and the lowered names of expressions."""
    open_nvrtc(gpuops)
    options = (f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
    result, code, log, lowered = gpuops._core._nvrtc_compile(
        source.encode(), b"test.cu", options, None, tuple(name.encode() for name in expressions)
    )
    assert result is None, log.decode()
    return code, {name.decode(): symbol for name, symbol in lowered.items()}


def own_architecture(gpuops, device=0):
    _, major, minor = gpuops._core._find_device(device, "compile")
    return f"sm_{major}{minor}"


def load(gpu, source, parameters=None, *, device=0, expressions=(), names=None):
    """A module of all kernels in a source; `parameters` tells the types of some, by name."""
    core = gpu.gpuops._core
    code, lowered = cubin(gpu.gpuops, source, own_architecture(gpu.gpuops, device), expressions)
    symbols = {symbol: symbol for symbol in core._cubin_kernels(code)} | lowered
    kernels = {name: (symbol, (parameters or {}).get(name)) for name, symbol in symbols.items()}
    return core._load_module(code, kernels, device, names or {})


@contextlib.contextmanager
def twins(gpu, **functions):
    """Kernels' host twins, for the fake runtime; a real GPU runs the kernels themselves."""
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            if gpu.fake is not None:
                stack.enter_context(gpu.fake.twin(name, function))
        yield


@contextlib.contextmanager
def page_locked(gpu, array):
    """A copy of an array in page-locked memory: the fake runtime's, and torch's on a real GPU."""
    if gpu.fake is None:
        import pytest

        torch = pytest.importorskip("torch")
        yield torch.from_numpy(array).pin_memory().numpy()
        return
    copy = gpu.fake.page_locked(array)
    try:
        yield copy
    finally:
        gpu.fake.run()
        assert gpu.fake.library.cudaFreeHost(ctypes.c_void_p(copy.ctypes.data)) == 0


SAXPY = """
extern "C" __global__ void saxpy(float a, const float *x, float *y, long long n)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""

SAXPY_TYPES = (("a", "float32"), ("x", "const float32*"), ("y", "float32*"), ("n", "int64"))


def saxpy_twin(launch):
    a, x, y, n = launch.read("f4", "p", "p", "i8")
    count = min(n, launch.grid[0] * launch.block[0])
    if count > 0:
        y = device_array(y, count, "f4")
        y[:] = a * device_array(x, count, "f4") + y


def saxpy_module(gpu, **options):
    return load(gpu, SAXPY, {"saxpy": SAXPY_TYPES}, **options)


def random_pair(count):
    generator = np.random.default_rng(count)
    return [generator.random(count, np.float32) for _ in range(2)]
