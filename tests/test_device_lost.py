"""Faults of a GPU that end its context, brought about by kernels that are really wrong.

Each has a process of its own, which has to go on with the CPU backend and to end as if nothing had
happened.
"""

import pytest
from helpers import run_child

# What the kernel does, and the CUDA error that follows from it.
FAULTS = {
    "illegal address": ("*(volatile int*)16 = 1;", "cudaErrorIllegalAddress", 700),
    "assertion": ("assert(x == nullptr);", "cudaErrorAssert", 710),
    "misaligned address": (
        "*(volatile int*)((char*)x + 1) = 1;",
        "cudaErrorMisalignedAddress",
        716,
    ),
    "trap": ("__trap();", "cudaErrorLaunchFailure", 719),
}

SETUP = """
import os
import time
import numpy
import gpuops

def lost(call):
    try:
        call()
    except gpuops.DeviceLostError as error:
        return error
    raise SystemExit("the loss of the device went by unnoticed")

module = gpuops.compile("__global__ void fault(int* x) { BODY }")
kernel = module["fault"]
x = gpuops.to_device(numpy.arange(1000, dtype=numpy.int32))
event = gpuops.Event()
stream = gpuops.Stream()
indices = gpuops.to_device([999])
assert gpuops.gather(x, indices).to_host() == [999]
"""

FAULT = """
stderr = os.dup(2)  # a failed assertion tells of itself there
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
kernel[1, 1](x)
first = lost(WAIT)
os.dup2(stderr, 2)
print(first.name, first.code)
"""

AFTERWARDS = """
later = [
    lambda: gpuops.gather(x, indices),
    lambda: gpuops.add(x, x, out=x),
    lambda: gpuops.matmul(numpy.ones((2, 2)), numpy.ones((2, 2)), device="cuda"),
    x.to_host,
    x.copy,
    lambda: x.fill(1),
    lambda: gpuops.to_device([1]),
    lambda: kernel[1, 1](x),
    lambda: module["fault"],
    lambda: gpuops.compile("__global__ void other() {}"),
    event.record,
    stream.synchronize,
    gpuops.Stream,
    gpuops.synchronize,
]
start = time.perf_counter()
for number, call in enumerate(later):
    error = lost(call)
    assert (error.name, error.code) == (first.name, first.code), (number, error)
    assert "start a new process" in str(error), (number, error)
assert time.perf_counter() - start < 1

numbers = numpy.arange(1000)
assert (gpuops.gather(numbers, [3, 5], device="cpu") == [3, 5]).all()
assert gpuops.add(numbers, 1, device="cpu")[-1] == 1000
print("done")
"""

WAITS = {
    "synchronize": "gpuops.synchronize",
    "to_host": "x.to_host",
    "out": "lambda: x[:3].to_host(out=numpy.empty(3, numpy.int32))",
}


def run_after(gpuops, fault, *parts, wait="synchronize", **environment):
    script = "".join(parts).replace("BODY", FAULTS[fault][0]).replace("WAIT", WAITS[wait])
    return run_child(gpuops, script, **environment)


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_told_at_once_from_then_on(cuda_device, fault):
    _, name, code = FAULTS[fault]
    said = run_after(cuda_device.gpuops, fault, SETUP, FAULT, AFTERWARDS)
    assert said == f"{name} {code}\ndone\n"


@pytest.mark.parametrize("wait", WAITS)
def test_whatever_waits_for_the_device_tells(cuda_device, wait):
    _, name, code = FAULTS["illegal address"]
    said = run_after(cuda_device.gpuops, "illegal address", SETUP, FAULT, AFTERWARDS, wait=wait)
    assert said == f"{name} {code}\ndone\n"


def test_a_launch_that_blocks_tells_itself(cuda_device):
    launch = "error = lost(lambda: kernel[1, 1](x))\nprint(error.operator, error.code)\n"
    options = {"GPUOPS_LAUNCH_BLOCKING": "1"}
    said = run_after(cuda_device.gpuops, "illegal address", SETUP, launch, **options)
    assert said == "fault 700\n"


def test_the_process_ends_well_with_all_it_holds(cuda_device):
    """Nobody asks: the error is pending when the interpreter ends."""
    assert run_after(cuda_device.gpuops, "illegal address", SETUP, "kernel[1, 1](x)\n") == ""
