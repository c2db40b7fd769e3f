"""Python's other threads go on while one is in a call of CUDA; faults/gil.py says why and how."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.paths import PATHS
from rtc import open_nvrtc

GIL = Path(__file__).parent / "faults" / "gil.py"


@pytest.mark.parametrize("group", sorted({path.group for path in PATHS.values()} - {"cpu"}))
def test_other_threads_go_on(fake_device, fake_folder, group):
    if all(path.needs_nvrtc for path in PATHS.values() if path.group == group):
        open_nvrtc(fake_device.gpuops)
    environment = os.environ | {"GPUOPS_FAKE_BUILD": str(fake_folder), "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-P", str(GIL), group], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout[-20_000:] + child.stderr[-5_000:]
