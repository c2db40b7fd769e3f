"""compute-sanitizer and ncu on kernels of one's own, which also shows that the former's tools see
what they are run for: each is given a planted bug, and the same kernel without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import package_parent

SCRIPT = """
import sys
import gpuops

source = open(sys.argv[1]).read()
module = gpuops.compile(source, options=sys.argv[2:], lineinfo=True)
x = gpuops.empty(1024, dtype="float32")
module["kernel"][1, 256](x)
gpuops.synchronize()
"""

# For each tool: a kernel that is wrong where PLANTED is defined, what the tool says then, and the
# line that it has to name, where it names lines.
PLANTS = {
    "memcheck": (
        """__global__ void kernel(float* x)
{
#ifdef PLANTED
    x[1024 + threadIdx.x] = 1;
#else
    x[threadIdx.x] = 1;
#endif
}
""",
        "Invalid __global__ write of size 4 bytes",
        4,
    ),
    "racecheck": (
        """__global__ void kernel(float* x)
{
    __shared__ float shared[256];
    shared[threadIdx.x] = threadIdx.x;
#ifndef PLANTED
    __syncthreads();
#endif
    x[threadIdx.x] = shared[255 - threadIdx.x];
}
""",
        "RACECHECK SUMMARY: 1 hazard",
        8,
    ),
    "initcheck": (
        """__global__ void kernel(float* x)
{
#ifndef PLANTED
    x[threadIdx.x + 256] = 1;
#endif
    x[threadIdx.x] = x[threadIdx.x + 256];
}
""",
        "Uninitialized __global__ memory read of size 4 bytes",
        6,
    ),
    "synccheck": (
        """__global__ void kernel(float* x)
{
#ifdef PLANTED
    if (threadIdx.x < 5) __syncthreads();
#else
    __syncthreads();
#endif
    x[threadIdx.x] = 1;
}
""",
        "Barrier error detected",
        4,
    ),
}


def run_with(gpuops, tool, folder, source, options):
    program = Path(folder, "program.py")
    program.write_text(SCRIPT)
    Path(folder, "kernel.cu").write_text(source)
    environment = os.environ | {"PYTHONPATH": package_parent(gpuops)}
    command = [*tool, sys.executable, "-P", str(program), str(Path(folder, "kernel.cu")), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def tool_called(name):
    path = shutil.which(name, path=os.environ["PATH"] + os.pathsep + "/usr/local/cuda/bin")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.parametrize("tool", PLANTS)
def test_a_sanitizer_sees_a_planted_bug(cuda_device, tool, tmp_path):
    source, message, line = PLANTS[tool]
    command = [tool_called("compute-sanitizer"), "--tool", tool, "--error-exitcode", "9"]
    command += ["--report-api-errors", "no"]
    status, said = run_with(cuda_device.gpuops, command, tmp_path, source, ["-DPLANTED"])
    assert status == 9 and message in said and f"source.cu:{line}" in said, said
    status, said = run_with(cuda_device.gpuops, command, tmp_path, source, [])
    assert status == 0, said


def test_a_profiler_sees_a_kernel_of_ones_own(cuda_device, tmp_path):
    command = [tool_called("ncu"), "--csv", "--clock-control", "none", "--kernel-name", "kernel"]
    command += ["--metrics", "launch__registers_per_thread,sm__cycles_elapsed.max"]
    source = PLANTS["memcheck"][0]
    status, said = run_with(cuda_device.gpuops, command, tmp_path, source, [])
    if "LibraryNotLoaded" in said or "ERR_NVGPUCTRPERM" in said:
        pytest.skip("ncu may not read the counters of this machine")
    assert status == 0 and "launch__registers_per_thread" in said, said
    assert "sm__cycles_elapsed.max" in said, said
