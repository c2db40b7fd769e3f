"""What `gpuops.show_config` tells: how the package was built and what it found on this machine."""

import os
import platform

import numpy

from . import _core, devices
from ._compile import CompileError, find_nvrtc

ENVIRONMENT = (
    "GPUOPS_DEVICE",
    "GPUOPS_NUM_THREADS",
    "GPUOPS_CPU_LEVEL",
    "GPUOPS_LAUNCH_BLOCKING",
    "GPUOPS_PINNED_LIMIT",
    "GPUOPS_HOST_CACHE",
    "GPUOPS_BLAS",
    "GPUOPS_CUBLASLT",
    "GPUOPS_NVRTC",
    "GPUOPS_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
)


def configuration() -> dict:
    """Collect every fact of the report."""
    facts = dict(_core._config())
    facts["devices"] = [found._asdict() for found in devices()] if facts["device_count"] else []
    facts["blas"] = _core._blas() if facts["devices"] else ""
    facts["nvrtc"] = _nvrtc()
    facts["python"] = platform.python_version()
    facts["numpy"] = numpy.__version__
    facts["environment"] = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return facts


def report() -> str:
    """Write the facts for a reader, one to a line."""
    facts = configuration()
    lines = [
        ("gpuops", facts["version"]),
        ("Python", facts["python"]),
        ("NumPy", f"{facts['numpy']} (C API {facts['numpy_api']})"),
        ("compiler", facts["compiler"]),
        ("CPU backend", _cpu(facts)),
        ("CUDA build", _cuda_build(facts)),
        (
            "CUDA driver",
            f"supports CUDA {facts['cuda_driver']}" if facts["cuda_driver"] else "none",
        ),
    ]
    lines += [(f"GPU {found['ordinal']}", _describe(found)) for found in facts["devices"]]
    if facts["devices"]:
        lines.append(("matmul", facts["blas"]))
    else:
        lines.append(("GPU", "none; every call runs on the CPU, with the same results"))
        lines.append(("  because", facts["cuda_problem"] or "the machine has no CUDA device"))
    lines.append(("compile", facts["nvrtc"]))
    lines += [(name, value) for name, value in facts["environment"].items()]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _cpu(facts: dict) -> str:
    level = facts["cpu_level"]
    return f"{facts['cpu_threads']} threads" + (f", {level}" if level else "")


def _nvrtc() -> str:
    try:
        found = find_nvrtc()
    except CompileError as error:
        return str(error).partition("\n")[0]
    version = ".".join(map(str, found.version))
    return f"NVRTC {version}, {found.path or 'as the dynamic linker finds it'}"


def _cuda_build(facts: dict) -> str:
    if facts["cuda_build"] is None:
        return "none; to get the GPU, install again without GPUOPS_CUDA=0"
    return f"CUDA {facts['cuda_build']}, architectures {facts['cuda_archs']}"


def _describe(found: dict) -> str:
    major, minor = found["compute_capability"]
    return (
        f"{found['name']}, compute capability {major}.{minor}, "
        f"{found['multiprocessors']} multiprocessors, {found['memory_bytes'] / 2**30:.1f} GiB"
    )
