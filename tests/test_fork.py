"""fork, forkserver and spawn: the CPU backend works in every child, CUDA says what is wrong.

Everything runs in processes of its own, each with a deadline, because what goes wrong with fork
goes wrong as a hang.
"""

import pytest
from helpers import run_child

CPU = """
import os, signal, sys
import numpy as np
import gpuops

x = np.arange(1 << 19, dtype=np.int64)
indices = np.random.default_rng(0).integers(0, 1 << 19, size=1 << 20)
expected = x[indices]

def on_cpu():
    assert (gpuops.gather(x, indices, device="cpu") == expected).all()
    try:
        gpuops.gather(x, [1 << 19], device="cpu")
    except IndexError as error:
        assert "index 524288 is out of bounds for axis 0 with size 524288" in str(error)
    else:
        raise AssertionError("no IndexError")

def in_child(function):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            function()
            status = 0
        except BaseException as error:
            print(f"in the child: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"wait status {status}"
"""

FORK_SEVERAL_TIMES = (
    CPU
    + """
def on_the_pool():
    on_cpu()
    assert len(os.listdir("/proc/self/task")) == 3, "the workers are not there"

on_the_pool()
in_child(on_the_pool)
on_the_pool()
for _ in range(5):
    in_child(lambda: (on_the_pool(), in_child(on_the_pool), on_the_pool()))
on_the_pool()
print("done")
"""
)

FORK_WHILE_THE_POOL_WORKS = (
    CPU
    + """
import threading
stop = threading.Event()
def work():
    while not stop.is_set():
        gpuops.gather(x, indices, device="cpu")
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    in_child(on_cpu)
stop.set()
for thread in threads:
    thread.join()
on_cpu()
print("done")
"""
)

CUDA_BEFORE_FORK = (
    CPU
    + """
def on_cuda():
    assert (gpuops.gather(x, indices, device="cuda") == expected).all()

def refused():
    for call in (
        lambda: gpuops.gather(x, indices, device="cuda"),
        lambda: gpuops.gather(x, indices, device=0),
        lambda: gpuops.take(x, indices, device="cuda"),
        lambda: gpuops.gather(x, indices),
        lambda: gpuops.hello(device="cuda"),
    ):
        try:
            call()
        except gpuops.ForkedProcessError as error:
            assert isinstance(error, RuntimeError)
            assert "spawn" in str(error) and "fork" in str(error), error
        else:
            raise AssertionError("no ForkedProcessError")
    out = np.zeros(3)
    try:
        gpuops.gather(np.ones(3), [0, 1, 2], out=out, device="cuda")
    except gpuops.ForkedProcessError:
        assert not out.any()
    assert gpuops.is_available() is False
    with gpuops.device("cpu"):
        on_cpu()
        assert gpuops.gather([5, 6], 1) == 6
    on_cpu()

on_cuda()
in_child(refused)
on_cuda()
in_child(lambda: in_child(refused))
on_cuda()
on_cpu()
print("done")
"""
)

CUDA_AFTER_FORK = (
    CPU
    + """
def on_cuda():
    assert (gpuops.gather(x, indices, device="cuda") == expected).all()

on_cpu()
in_child(lambda: (on_cuda(), on_cpu()))
on_cuda()
print("done")
"""
)

# Nothing here is ours: the first call that meets CUDA is one between arrays of another library.
FOREIGN_BEFORE_FORK = (
    CPU
    + """
import ctypes, gc
from pathlib import Path
from capsules import new_kind

def check(error):
    assert error == 0, f"CUDA error {error}"

def allocate(size):
    address = ctypes.c_void_p()
    fake = Path(gpuops.__path__[0]).parent / "cudart" / "libgpuops_fake_cudart.so"
    if fake.exists():
        cudart = ctypes.CDLL(str(fake))
        check(cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)))
        return address.value
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    check(driver.cuInit(0))
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(driver.cuCtxSetCurrent(context))
    check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    check(driver.cuMemsetD8_v2(address, 0, ctypes.c_size_t(size)))
    return address.value

class Theirs:
    def __init__(self, shape, dtype, device=0):
        self.shape, self.dtype, self.device = shape, np.dtype(dtype), 0
        self.strides = np.empty(shape, dtype).strides
        self.ptr = allocate(4096)

class Interface:
    def __init__(self, theirs):
        self.__cuda_array_interface__ = {
            "shape": theirs.shape, "typestr": theirs.dtype.str, "data": (theirs.ptr, False),
            "strides": None, "version": 3,
        }

INTERFACE
KIND
data, places = kind(Theirs((10,), "f8")), kind(Theirs((3,), "i8"))
out = kind(Theirs((3,), "f8"))
calls = {
    "out": lambda: gpuops.gather(data, places, out=out),
    "result": lambda: gpuops.gather(data, places),
    "asarray": lambda: gpuops.asarray(data),
}
kept = [calls[name]() for name in NAMES]

def refused():
    for call in (
        *calls.values(),
        lambda: gpuops.to_device([1]),
        lambda: gpuops.synchronize(),
        lambda: gpuops.Stream(),
        lambda: gpuops.memory_info(),
        lambda: gpuops.gather(x, indices, device="cuda"),
    ):
        try:
            call()
        except gpuops.ForkedProcessError as error:
            assert "spawn" in str(error) and "fork" in str(error), error
        else:
            raise AssertionError("no ForkedProcessError")
    kept.clear()
    gc.collect()
    on_cpu()

in_child(refused)
in_child(lambda: in_child(refused))
# A child that ends as any process does, with everything that it was born with.
sys.stdout.flush()
child = os.fork()
if child == 0:
    signal.alarm(20)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
calls["out"]()
print("done")
"""
)
FOREIGN_KINDS = {
    "interface": "kind = Interface",
    "exchange API": "kind = new_kind(empty=Theirs)",
}


# Everything of a device that a parent had, in a child that was born beside threads at work: each
# call is refused at once, whatever lock one of those threads had, and CUDA is left alone.
DEVICE_OBJECTS = (
    CPU
    + """
import gc, threading
from pathlib import Path
from faults.fake import Fake

cudart = Path(gpuops.__path__[0]).parent / "cudart"
fake = Fake(cudart) if cudart.is_dir() else None
cuda_calls = fake.calls if fake else lambda: 0

class Loan:
    def __init__(self, array):
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__

d, stream = gpuops.to_device(x), gpuops.Stream()
view, result = d[1:], gpuops.gather(d, indices, stream=stream)
event, capsule = stream.record(), d.__dlpack__(max_version=(1, 3))
imported = gpuops.from_dlpack(d)
pin, pinned = gpuops.pin(x), gpuops.pinned_empty(1 << 20)
pinned[...] = 5
with gpuops.pinned_memory():
    made = [np.arange(10), np.arange(1 << 20)]
if fake:
    fake.set_scheduler("lazy")
# Its owner is told when the work is over, which nobody asks for before the fork.
gpuops.gather(gpuops.asarray(Loan(d)), indices, stream=stream)

def refused():
    calls = cuda_calls()
    out = np.zeros_like(x)
    for call in (
        d.to_host, lambda: d.to_host(out), lambda: result.to_host(), d.copy, lambda: d.fill(1),
        lambda: gpuops.gather(d, [1]), lambda: gpuops.gather(view, [1], out=d[:1]),
        lambda: gpuops.add(d, imported), lambda: gpuops.matmul(x[:4], x[:4], device="cuda"),
        lambda: gpuops.scatter(d, [1], 2), lambda: gpuops.gather(x, [1], stream=stream),
        lambda: gpuops.to_device(x), lambda: gpuops.zeros(3), lambda: gpuops.empty(3),
        stream.synchronize, stream.query, stream.record, lambda: stream.wait(event),
        lambda: stream.wait(gpuops.current_stream()),
        event.synchronize, event.query, gpuops.Stream, gpuops.Event, gpuops.synchronize,
        gpuops.memory_info, gpuops.empty_cache, lambda: gpuops.memory_limit(1 << 20),
        lambda: d.__dlpack__(dl_device=(1, 0)), lambda: gpuops.asarray(d).to_host(),
        lambda: gpuops.pin(x), lambda: gpuops.pin(indices), lambda: gpuops.pinned_empty(3),
        gpuops.pinned_memory().__enter__,
    ):
        try:
            call()
        except gpuops.ForkedProcessError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError("no ForkedProcessError")
    assert not out.any()
    # What needs no CUDA is still there.
    assert d.shape == x.shape and d[3:].dtype == x.dtype and len(view) == len(x) - 1
    assert d.reshape(-1, 2).ndim == 2 and d.device == 0 and stream.device == 0
    on_cpu()
    assert cuda_calls() == calls, f"{cuda_calls() - calls} CUDA calls"

def drop():
    global d, view, result, stream, event, capsule, imported, pin, pinned, made
    calls = cuda_calls()
    assert (pinned == 5).all() and made[1][-1] == (1 << 20) - 1
    pinned[0], made[0][0] = 6, 1
    made[0].resize(100_000, refcheck=False)
    pin.release()
    del d, view, result, stream, event, capsule, imported, pin, pinned, made
    gc.collect()
    on_cpu()
    assert cuda_calls() == calls, f"{cuda_calls() - calls} CUDA calls"
BODY
assert (d.to_host() == x).all() and (result.to_host() == expected).all()
assert (pinned == 5).all() and made[0][0] == 0 and pin.locked
stream.synchronize()
event.synchronize()
print("done")
"""
)
DEVICE_OBJECT_BODIES = {
    "every call": "in_child(refused)",
    "dropped in the child": "in_child(drop); in_child(lambda: (refused(), drop()))",
    "beside threads at work": """
stop = threading.Event()
def work():
    with gpuops.Stream() as own:
        while not stop.is_set():
            kept = gpuops.gather(gpuops.to_device(x[:1000]), [1, 2])
            own.record().synchronize()
            gpuops.synchronize()
            gpuops.memory_info()
            gpuops.Stream().record()
            with gpuops.pinned_memory():
                gpuops.pin(np.zeros(10_000)).release()
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    in_child(lambda: (refused(), drop()))
stop.set()
for thread in threads:
    thread.join()
""",
    "by a thread within a block": """
def work():
    with gpuops.Stream(), gpuops.device("cuda"):
        gpuops.gather(d, [1])
        in_child(refused)
        in_child(lambda: sys.exit("never seen") if gpuops.is_available() else None)
        assert gpuops.gather(d, [7]).to_host() == 7
    left.append(True)
left = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert left
""",
    "within a block of page-locked memory": """
def compute():
    calls = cuda_calls()
    small = [np.arange(10) + 1 for _ in range(100)]
    large = np.zeros(5 << 20) + 1
    assert large.all() and all((one == np.arange(1, 11)).all() for one in small)
    on_cpu()
    assert cuda_calls() == calls, f"{cuda_calls() - calls} CUDA calls"
with gpuops.pinned_memory():
    in_child(compute)
    in_child(lambda: (refused(), compute(), in_child(compute), drop()))
    compute_here = np.arange(10) + 1
""",
    "a child that ends as any process does": """
sys.stdout.flush()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
""",
    "a child that becomes another program": """
import subprocess
code = "import gpuops; print(gpuops.gather(gpuops.to_device([5, 6]), [1]).to_host())"
child = os.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, "-P", "-c", code])
assert os.waitpid(child, 0)[1] == 0
output = subprocess.run([sys.executable, "-P", "-c", code], preexec_fn=lambda: on_cpu(),
                        capture_output=True, text=True, timeout=20, check=True)
assert output.stdout == "[6]\\n" and output.stderr == ""
""",
    "a grandchild whose parent is gone": """
reader, writer = os.pipe()
def orphan():
    if os.fork() == 0:
        signal.alarm(20)
        time.sleep(0.1)
        refused()
        drop()
        os.write(writer, b"well")
        os._exit(0)
import time
in_child(orphan)
os.close(writer)
assert os.read(reader, 10) == b"well"
""",
}


MULTIPROCESSING = """
import multiprocessing, sys
import numpy as np
import gpuops

def work(device):
    x = np.arange(300_000.0)
    indices = np.arange(299_999, -1, -1)
    try:
        return (gpuops.gather(x, indices, device=device) == x[::-1]).all().item()
    except gpuops.ForkedProcessError as error:
        return "spawn" in str(error)

if __name__ == "__main__":
    method, device = sys.argv[1:]
    assert work(device) is True
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map_async(work, ["cpu", device, "cpu", device]).get(60) == [True] * 4
    assert work(device) is True
    print("done")
"""


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_cpu_after_fork(gpuops):
    # Without its own threads NumPy leaves ours to be counted.
    environment = {"GPUOPS_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"}
    assert run_child(gpuops, FORK_SEVERAL_TIMES, **environment) == "done\n"


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_fork_while_the_pool_works(gpuops):
    assert run_child(gpuops, FORK_WHILE_THE_POOL_WORKS, GPUOPS_NUM_THREADS="3") == "done\n"


def test_cuda_before_fork(gpuops, device):
    if device.name == "cpu":
        pytest.skip("needs CUDA")
    assert run_child(gpuops, CUDA_BEFORE_FORK, GPUOPS_NUM_THREADS="2") == "done\n"


@pytest.mark.parametrize("first", ["out", "result", "asarray"])
@pytest.mark.parametrize("kind", FOREIGN_KINDS)
def test_arrays_of_others_before_fork(gpuops, device, kind, first):
    if device.name == "cpu":
        pytest.skip("needs CUDA")
    source = FOREIGN_BEFORE_FORK.replace("INTERFACE\nKIND", FOREIGN_KINDS[kind])
    source = source.replace("NAMES", repr([first]))
    environment = {"GPUOPS_NUM_THREADS": "2", "GPUOPS_DEVICE": "cpu"}
    assert run_child(gpuops, source, **environment) == "done\n"


@pytest.mark.parametrize("name", DEVICE_OBJECT_BODIES)
def test_objects_of_a_device(gpu, name):
    source = DEVICE_OBJECTS.replace("BODY", DEVICE_OBJECT_BODIES[name])
    environment = {"GPUOPS_NUM_THREADS": "2", "GPUOPS_DEVICE": "cuda:0"}
    output = run_child(gpu.gpuops, source, **environment)
    assert output.splitlines()[-1] == "done"


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
def test_cuda_after_fork(gpuops, device):
    if device.name == "cpu":
        pytest.skip("needs CUDA")
    assert run_child(gpuops, CUDA_AFTER_FORK, GPUOPS_NUM_THREADS="2") == "done\n"


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            "fork", marks=pytest.mark.not_under_tsan("dies where a forked child starts threads")
        ),
        "spawn",
        "forkserver",
    ],
)
def test_multiprocessing(gpuops, device, method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MULTIPROCESSING)
    # The script has to be a file, which the children of spawn and forkserver can find.
    source = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-W", "ignore", {str(script)!r}, {method!r},
                       {device.spec!r}], timeout=90)
sys.exit(done.returncode)
"""
    assert run_child(gpuops, source, timeout=100) == "done\n"
