"""fork, forkserver and spawn: the CPU backend works in every child, CUDA says what is wrong.

Everything runs in processes of its own, each with a deadline, because what goes wrong with fork
goes wrong as a hang.
"""

import pytest
from helpers import run_child

CPU = """
import os, signal, sys, warnings
import numpy as np
import gpuops

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads.
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


def test_cpu_after_fork(gpuops):
    # Without its own threads NumPy leaves ours to be counted.
    environment = {"GPUOPS_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"}
    assert run_child(gpuops, FORK_SEVERAL_TIMES, **environment) == "done\n"


def test_fork_while_the_pool_works(gpuops):
    assert run_child(gpuops, FORK_WHILE_THE_POOL_WORKS, GPUOPS_NUM_THREADS="3") == "done\n"


def test_cuda_before_fork(gpuops, device):
    if device.name == "cpu":
        pytest.skip("needs CUDA")
    assert run_child(gpuops, CUDA_BEFORE_FORK, GPUOPS_NUM_THREADS="2") == "done\n"


def test_cuda_after_fork(gpuops, device):
    if device.name == "cpu":
        pytest.skip("needs CUDA")
    assert run_child(gpuops, CUDA_AFTER_FORK, GPUOPS_NUM_THREADS="2") == "done\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
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
