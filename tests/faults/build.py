"""Builds the package variants that the tests load besides the installed one.

    python tests/faults/build.py                                            build/fake
    python tests/faults/build.py --sanitize address,undefined               build/fake-asan
    python tests/faults/build.py --cpu-only                                 build/cpu
    python tests/faults/build.py --cpu-only --sanitize address,undefined    build/cpu-asan
    python tests/faults/build.py --sanitize thread                          build/fake-tsan
    python tests/faults/build.py --coverage                                 build/fake-gcov

Each is a folder with a complete package `gpuops`. The fake ones are linked against the fake CUDA
runtime, which is built first, into the subfolder `cudart`. Nothing is done where nothing changed.

A sanitized package loads only into a process that has the sanitizer's runtime from its start, and
Python's own memory would all be reported as leaked:

    LD_PRELOAD="$(cc -print-file-name=libasan.so) $(cc -print-file-name=libstdc++.so)" \\
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \\
        python -m pytest --package=build/cpu-asan --fake=build/fake-asan --require-fake

libstdc++ stands there for other extension modules: ASan must find the function that throws C++
exceptions when it starts. TSan needs its runtime alone, and a file for its reports, which pytest
would swallow. Python is not built for it, but its locks are of the kinds that TSan knows, the GIL
too, so that what they put in order raises no alarm:

    LD_PRELOAD="$(cc -print-file-name=libtsan.so)" TSAN_OPTIONS=log_path=build/tsan \\
        python -m pytest --package=build/cpu-tsan --fake=build/fake-tsan -k thread
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

FAULTS = Path(__file__).resolve().parent
ROOT = FAULTS.parent.parent
BUILD = ROOT / "build"

# The file has a name of its own, so that no process takes it for the real runtime that another
# library has loaded; libcudart.so is only what the linker looks for. For the same reason every
# symbol carries that name as its version: torch makes the real runtime's symbols global.
LIBRARY = "libgpuops_fake_cudart.so"
LINKER_NAME = "libcudart.so"
COMPILER = "libgpuops_fake_nvrtc.so"  # stands beside it

NO_COMPILER = 77  # the exit status where there is nothing to build the fake ones with

SANITIZERS = {"address,undefined": "asan", "thread": "tsan"}


def find_nvcc():
    """The nvcc that setup.py takes, or None."""
    sys.path.insert(0, str(ROOT))
    try:
        import setup
    except ImportError:  # There is no setuptools, which is needed to build at all.
        return None
    return setup.system_nvcc() or setup.wheel_nvcc()


def folder_of(sanitize="", coverage=False, cpu_only=False):
    words = ["cpu" if cpu_only else "fake"]
    words += [SANITIZERS[sanitize]] if sanitize else []
    words += ["gcov"] if coverage else []
    return BUILD / "-".join(words)


def build(sanitize="", coverage=False, cpu_only=False):
    """Brings one variant up to date and returns its folder."""
    # The runtime of a sanitizer that is meant for the tests would run in every compiler too.
    os.environ.pop("LD_PRELOAD", None)
    folder = folder_of(sanitize, coverage, cpu_only)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        if not cpu_only:
            build_library(folder / "cudart", sanitize)
        build_package(folder, sanitize, coverage, cpu_only)
    return folder


@contextlib.contextmanager
def locked(path):
    """Lets two test runs that start at once build one after the other."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def unless_current(stamp, sources, *words):
    """Yields whether there is work to do, and once it is done remembers what it was done with."""
    state = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(sources)]
    state = repr((state, words))
    stale = not stamp.exists() or stamp.read_text() != state
    if stale:
        stamp.unlink(missing_ok=True)
    yield stale
    if stale:
        stamp.write_text(state)


def sanitizer_flags(sanitize):
    if not sanitize:
        return []
    # The report shows lines; more for a debugger, or faster code, takes the compiler four times as
    # long.
    flags = ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1"]
    if sanitize == "thread":
        # The C library has other threads free what one had to itself, unless that lies beside its
        # stack, and TSan does not see that it has ended before.
        flags.append("-ftls-model=initial-exec")
    return [f"-fsanitize={sanitize}", *flags]


def build_library(folder, sanitize):
    sources = sorted(FAULTS.glob("fake_*.c"))
    headers = sorted(FAULTS.glob("fake_*.h"))
    folder.mkdir(exist_ok=True)
    # nvcc drives the C compiler because it knows where its headers are.
    compiler = ["-std=gnu11", "-O1", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    compiler += ["-Wno-unused-parameter", *sanitizer_flags(sanitize)]
    shared = [find_nvcc(), "-x", "c", "-shared", "-cudart=none"]
    shared += [f"-Xcompiler={escaped(flag)}" for flag in compiler]
    command = [*shared, f"-Xlinker=-soname={LIBRARY}", "-Xlinker=--default-symver"]
    command += [*map(str, sources), "-o", str(folder / LIBRARY)]
    nvrtc = FAULTS / "nvrtc.c"
    with unless_current(folder / "stamp", [*sources, *headers, nvrtc], command) as stale:
        if stale:
            run(command)
            run([*shared, str(nvrtc), "-o", str(folder / COMPILER)])
            (folder / LINKER_NAME).unlink(missing_ok=True)
            (folder / LINKER_NAME).symlink_to(LIBRARY)


def build_package(folder, sanitize, coverage, cpu_only):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUOPS_")}
    if cpu_only:
        environment["GPUOPS_CUDA"] = "0"
    else:
        environment["GPUOPS_CUDA_ARCHS"] = "90"
        environment["GPUOPS_CUDART"] = str(folder / "cudart")
    # The C files are those whose lines are counted, and as they are written: not optimized.
    counted = ["--coverage"] if coverage else []
    flags = {
        "CFLAGS": [*sanitizer_flags(sanitize), *counted, *(["-O0"] if coverage else [])],
        "CXXFLAGS": sanitizer_flags(sanitize),
        "LDFLAGS": [*sanitizer_flags(sanitize), *counted],
    }
    for variable, words in flags.items() if sanitize or coverage else ():
        environment[variable] = " ".join([environment.get(variable, ""), *words]).strip()

    command = [sys.executable, "setup.py", "-q", "build"]
    command += [f"--build-base={folder}/temporary", f"--build-lib={folder}/new"]
    sources = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    for part in ("gpuops", "csrc", "kernels"):
        sources += [path for path in (ROOT / part).iterdir() if path.is_file()]
    knobs = [environment.get(name) for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")]
    with unless_current(folder / "stamp", sources, command, knobs, sys.version) as stale:
        if stale:
            for name in ("new", "old"):
                shutil.rmtree(folder / name, ignore_errors=True)
            run(command, cwd=ROOT, env=environment)
            # At once, because another test run may be about to import the one that is there.
            if (folder / "gpuops").exists():
                (folder / "gpuops").rename(folder / "old")
            (folder / "new" / "gpuops").rename(folder / "gpuops")


def escaped(flag):
    """nvcc splits the options that it passes on at commas."""
    return flag.replace(",", "\\,")


def run(command, **options):
    """Runs a build step; its output is only of interest when it fails."""
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nexit status {result.returncode}\n{result.stdout}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitize", default="", choices=SANITIZERS)
    parser.add_argument("--coverage", action="store_true", help="count the lines of the C files")
    parser.add_argument("--cpu-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.cpu_only and find_nvcc() is None:
        print("the fake CUDA runtime cannot be built without nvcc and setuptools", file=sys.stderr)
        sys.exit(NO_COMPILER)
    try:
        print(build(**vars(arguments)).relative_to(ROOT))
    except RuntimeError as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main()
