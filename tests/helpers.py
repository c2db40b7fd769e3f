"""What several test files need: guarded memory, odd layouts, child processes."""

import contextlib
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from operators import ROOT

INDEX_DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]

SCHEDULERS = [("now", 1), ("lazy", 1), ("shuffled", 0)]  # of the fake, with their seeds

# One dtype of every kind and of every width that a kernel may treat in its own way.
DTYPES = [
    np.dtype(dtype)
    for dtype in [
        "?", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8", "c16",
        "longdouble", "clongdouble", "M8[ns]", "M8[D]", "m8[s]", "S1", "S3", "S5", "S7", "U1", "U6",
        "V3", "V12", "V16", "V17", "V24", "V32", "V100", "V1000",
        [("a", "i1"), ("b", "f4")],
        [("r", "u1"), ("g", "u1"), ("b", "u1")],
        [("point", "f4", (3,)), ("when", "M8[us]"), ("label", "S5")],
    ]
]  # fmt: skip


def filled_array(shape, dtype, seed=0):
    """An array of random bytes, so that a wrong width or a lost byte shows."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    generator = np.random.default_rng(seed)
    if dtype.kind == "b":
        return generator.integers(0, 2, size=count).astype(bool).reshape(shape)
    if dtype.kind == "U":
        letters = generator.integers(ord("a"), ord("z"), size=count * dtype.itemsize // 4)
        return letters.astype(np.uint32).view(dtype).reshape(shape)
    raw = generator.integers(0, 256, size=count * dtype.itemsize, dtype=np.uint8)
    return np.ndarray(shape, dtype, buffer=raw.tobytes()).copy()


def constant(source, name):
    """The number that a file in kernels/ has for it, so that tests follow when it is tuned."""
    text = (ROOT / "kernels" / source).read_text()
    constants = rf"^(?:constexpr \w+|enum {{.*) {name} = ([0-9 <*]+) ?[;,}}]"
    (value,) = re.findall(constants, text, re.MULTILINE)
    return eval(value)


def numbers(size, seed=0):
    """Bytes of which no two parts are alike."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def same(result, expected):
    """Equal in kind, shape, dtype and in every bit."""
    assert type(result) is type(expected), (type(result), type(expected))
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.tobytes() == expected.tobytes()


class Guarded:
    """An output array between two guards, in memory that starts out as a known pattern.

    `layout` is "C", "F", "strided" (every second element of every axis), "padded" (rows with a gap
    behind them), "backward" (the first axis runs downwards) or "misaligned" (one byte off).
    """

    GUARD = 64

    def __init__(self, shape, dtype, layout="C"):
        dtype = np.dtype(dtype)
        steps = 2 if layout == "strided" else 1
        strides = []
        nbytes = max(dtype.itemsize, 1)
        axes = list(range(len(shape)))
        for axis in axes if layout == "F" else reversed(axes):
            strides.append(nbytes * steps)
            nbytes *= max(shape[axis], 1) * steps
            if layout == "padded" and axis == len(shape) - 1:
                nbytes += 3 * max(dtype.itemsize, 1)
        if layout != "F":
            strides.reverse()
        offset = self.GUARD + (layout == "misaligned")
        if layout == "backward" and shape and shape[0]:
            offset += strides[0] * (shape[0] - 1)
            strides[0] = -strides[0]
        size = nbytes + 2 * self.GUARD + 1
        self.memory = np.resize(np.arange(251, dtype=np.uint8), size)
        self.before = self.memory.copy()
        self.array = np.ndarray(
            shape, dtype, buffer=self.memory, offset=offset, strides=tuple(strides)
        )
        mine = np.ndarray(
            shape,
            np.dtype((np.void, dtype.itemsize)),
            buffer=np.zeros(size, np.uint8),
            offset=offset,
            strides=tuple(strides),
        )
        self.mask = mine.base
        if dtype.itemsize:
            mine[...] = np.void(b"\xff" * dtype.itemsize)

    def untouched(self):
        return bool((self.memory == self.before).all())

    def kept_to_its_own(self):
        """Nothing but the array's own elements has changed."""
        others = self.mask == 0
        return bool((self.memory[others] == self.before[others]).all())


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@contextlib.contextmanager
def locked_by_somebody_else(gpu, *parts):
    runtime = pytest.importorskip("torch").cuda.cudart() if gpu.fake is None else gpu.fake.library
    word, size = (int, int) if gpu.fake is None else (ctypes.c_void_p, ctypes.c_size_t)
    with contextlib.ExitStack() as locked:
        for x in parts:
            address = word(x.ctypes.data)
            assert int(runtime.cudaHostRegister(address, size(x.nbytes), 0)) == 0
            locked.callback(runtime.cudaHostUnregister, address)
        yield


def photograph():
    """OpenCV, and a cat of scikit-image's pictures in shades of gray; or skips the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cv2 = pytest.importorskip("cv2")
    found = importlib.util.find_spec("skimage")
    if found is None:
        pytest.skip("scikit-image, which brings the photograph, is not installed")
    path = Path(found.submodule_search_locations[0], "data", "chelsea.png")
    if not path.is_file():
        pytest.skip("this scikit-image comes without its photographs")
    return cv2, cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)


def package_parent(gpuops):
    """The folder to put on a child's path so that `import gpuops` finds the same build."""
    return str(Path(gpuops.__path__[0]).resolve().parent)


def run_child(gpuops, source, *, timeout=60, **environment):
    """Runs Python source in a fresh interpreter in which `import gpuops` is the build under test.

    Fails unless it exits with 0 and an empty stderr; returns what it printed. Where malloc finds
    nothing, AddressSanitizer says so on stderr, and goes on like malloc. Of a child that takes too
    long it tells what its threads were at.
    """
    child_environment = {
        key: value for key, value in os.environ.items() if not key.startswith("GPUOPS_")
    }
    child_environment.update(environment)
    path = [package_parent(gpuops), str(Path(__file__).parent)]
    child_environment["PYTHONPATH"] = os.pathsep.join(path)
    # -P: the folder that the tests were started in holds the sources, not the build. From Python
    # 3.12 on "This process (pid=...) is multi-threaded", where it forks.
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore:This process:DeprecationWarning", "-c", source],
        env=child_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        late = ""
        try:
            printed, errors = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            late = f"not done after {timeout} s\n{threads_of(child.pid)}\n"
        finally:
            child.kill()
        if late:
            printed, errors = child.communicate()
    assert child.returncode == 0 and not late, (
        f"{late}exit status {child.returncode}\n{printed}{errors}"
    )
    errors = re.sub(r"==\d+==WARNING: AddressSanitizer failed to allocate .*\n", "", errors)
    assert errors == "", errors
    return printed


def refusal_on_cpu(gpuops, **environment):
    """Returns the ValueError of a call on the CPU that has something wrong in its environment."""
    source = """
import gpuops
try:
    gpuops.gather([1, 2], [0], device="cpu")
except ValueError as error:
    print(error)
"""
    return run_child(gpuops, source, **environment)


def threads_of(process):
    """The threads of a process, their states, and the calls of the system that they are in."""
    lines = []
    for thread in Path(f"/proc/{process}/task").glob("*"):
        with contextlib.suppress(OSError):
            state = re.search(r"^State:\s*(.*)", Path(thread, "status").read_text(), re.MULTILINE)
            facts = [
                Path(thread, name).read_text().strip() for name in ("comm", "wchan", "syscall")
            ]
            lines.append(f"thread {thread.name}: {state[1]}, {', '.join(facts)}")
    return "\n".join(lines)


def launches(fake, call):
    """How many kernels a call launches, and what it returns."""
    before = fake.fake.calls("cudaLaunchKernel")
    result = call()
    return fake.fake.calls("cudaLaunchKernel") - before, result


def run_threads(functions, *, timeout=120):
    """Runs functions at once, each on a thread of its own; raises what the first one raised."""
    errors = []
    barrier = threading.Barrier(len(functions))

    def guarded(function):
        try:
            barrier.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=timeout)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]


# Calls with a device array of doubles and a host array, that another thread may make in the
# middle of a capture, which they have nothing to do with.
UNCAPTURED = {
    "Stream.synchronize": lambda gpuops, d, x: d.stream.synchronize(),
    "Stream.query": lambda gpuops, d, x: d.stream.query(),
    "Event.synchronize": lambda gpuops, d, x: d.stream.record().synchronize(),
    "Event.query": lambda gpuops, d, x: d.stream.record().query(),
    "to_host of a few": lambda gpuops, d, x: d[:10].to_host(),
    "to_host": lambda gpuops, d, x: d.to_host(),
    "to_host of every other one": lambda gpuops, d, x: d[::2].to_host(),
    "to_device": lambda gpuops, d, x: gpuops.to_device(x, stream=d.stream),
    "add": lambda gpuops, d, x: gpuops.add(d, d, stream=d.stream).to_host(),
    "add on the host": lambda gpuops, d, x: gpuops.add(x, x, stream=d.stream),
    "a small add on the host": lambda gpuops, d, x: gpuops.add(x[:10], x[:10], stream=d.stream),
    "gather on the host": lambda gpuops, d, x: gpuops.gather(x, [1, 2], stream=d.stream),
    "gather": lambda gpuops, d, x: gpuops.gather(d, [1, 2], stream=d.stream).to_host(),
    "scatter_add on the host": lambda gpuops, d, x: gpuops.scatter_add(x, [1], 0, stream=d.stream),
}


def turns_of(count):
    """As many turns, or GPUOPS_TEST_CALLS where that is less: tools make a kernel take longer."""
    return min(count, int(os.environ.get("GPUOPS_TEST_CALLS", count)))


def join_in_full(thread):
    """Returns when the system's thread has ended, a moment after that of Python."""
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.001)


def keep_busy(gpuops, gpu, stream):
    """Gives a stream work for some tens of milliseconds, on a GPU, or until somebody waits."""
    rows, columns, turns = (16, 1 << 26, 100) if gpu.fake is None else (4, 4, 10)
    table = gpuops.zeros((rows, columns), "u1", stream=stream)
    out = gpuops.empty((rows, columns), "u1", stream=stream)
    order = gpuops.to_device(np.arange(rows), stream=stream)
    for _ in range(turns_of(turns)):
        gpuops.gather(table, order, out=out, stream=stream)
