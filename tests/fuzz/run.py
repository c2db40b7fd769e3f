"""Builds the fuzz targets with clang and libFuzzer, and runs each for a while.

    python tests/fuzz/run.py --seconds 20            all targets, 20 seconds together
    python tests/fuzz/run.py --target plans FILE     one of them on one input, to look at a failure
    python tests/fuzz/run.py --compiler              which clang is taken, or that there is none

    plans       every operator's plan, and the CPU backend on what it accepts
    cubin       the reader of machine code
    arguments   the operators as Python calls them

All code is watched by ASan and UBSan. A target starts from the inputs in corpus/, which are kept
small, and from those that it found before, in build/fuzz, where it also leaves one that fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).resolve().parent
ROOT = FUZZ.parent.parent
BUILD = ROOT / "build" / "fuzz"

TARGETS = {"plans": "plans.cpp", "cubin": "cubin.c", "arguments": "arguments.py"}
CLANGS = ["clang", *(f"clang-{version}" for version in range(30, 13, -1))]
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
FLAGS += ["-fsanitize=fuzzer-no-link,address,undefined"]

OPTIONS = [
    "-timeout=10",
    "-rss_limit_mb=2048",
    "-max_len=400",
    "-verbosity=0",
    "-print_final_stats=1",
]
ENVIRONMENT = {
    # Too large an allocation is a MemoryError, as ever.
    "ASAN_OPTIONS": "allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "GPUOPS_NUM_THREADS": "2",
}


def find_clang():
    """Return the names of the C and the C++ compiler."""
    for name in CLANGS:
        library = "libclang_rt.fuzzer_no_main-x86_64.a"
        if shutil.which(name) and os.path.isabs(runtime(name, library)):
            return name, name.replace("clang", "clang++")
    sys.exit("there is no clang with libFuzzer: on Debian, apt install clang-19 libclang-rt-19-dev")


def runtime(clang, library):
    """Return where a library of the compiler is; just its name where it is not."""
    for name in (library, library.replace("-x86_64", "")):
        command = [clang, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if os.path.isabs(path):
            return path
    return library


def build(cc, cxx):
    """Compile as setup.py does without CUDA, with other flags, and link the three targets."""
    flags = " ".join(FLAGS)
    os.environ.update(GPUOPS_CUDA="0", CFLAGS=flags, CXXFLAGS=flags)
    sys.path.insert(0, str(ROOT))
    import setup

    BUILD.mkdir(parents=True, exist_ok=True)
    steps = setup.compile_steps([cc], [cxx], None, True, 1)
    objects = {}
    for pattern, step in steps.items():
        for source in sorted(ROOT.glob(pattern)):
            source = source.relative_to(ROOT).as_posix()
            objects[source] = str(setup.compile_source(step, source))
    kernels = [path for source, path in objects.items() if source.startswith("kernels/")]

    link = [cxx, "-fsanitize=fuzzer,address,undefined", "-Ikernels", *FLAGS, "-pthread"]
    call([*link, "-std=c++17", FUZZ / "plans.cpp", *kernels, "-o", BUILD / "plans"])
    cubin = [objects["kernels/cubin.c"], objects["kernels/status.c"]]
    call([*link, "-xc", FUZZ / "cubin.c", "-xnone", *cubin, "-o", BUILD / "cubin"])

    package = BUILD / "package" / "gpuops"
    package.mkdir(parents=True, exist_ok=True)
    for source in (ROOT / "gpuops").glob("*.py"):
        shutil.copy(source, package)
    shared = [cxx, "-shared", "-fsanitize=address,undefined", "-shared-libasan", *objects.values()]
    archive = runtime(cc, "libclang_rt.fuzzer_no_main-x86_64.a")
    # ASan has empty functions of the same names as those that count what is reached.
    own = ["-Wl,-Bsymbolic", "-Wl,-u,LLVMFuzzerRunDriver", archive]
    call([*shared, *own, "-o", package / "_core.abi3.so"])


def call(command):
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)


def command_of(target, cc):
    """Return a target's command line, and what else it needs in the environment."""
    if target != "arguments":
        return [BUILD / target], {}
    # Python's own memory would all be reported as leaked.
    preload = runtime(cc, "libclang_rt.asan-x86_64.so")
    leaks = ENVIRONMENT["ASAN_OPTIONS"] + ":detect_leaks=0"
    command = [sys.executable, FUZZ / "arguments.py", BUILD / "package", "-detect_leaks=0"]
    return command, {"LD_PRELOAD": preload, "ASAN_OPTIONS": leaks}


def run(target, cc, words):
    command, extra = command_of(target, cc)
    words = [*command, *OPTIONS, f"-artifact_prefix={BUILD}/{target}-", *words]
    print(f"== {target}", flush=True)
    return subprocess.run(list(map(str, words)), env=os.environ | ENVIRONMENT | extra).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--compiler", action="store_true", help="only say which clang there is")
    parser.add_argument("inputs", nargs="*", help="files to run a target on, instead of fuzzing")
    arguments = parser.parse_args()
    if arguments.inputs and not arguments.target:
        parser.error("inputs are for one --target")
    targets = [arguments.target] if arguments.target else TARGETS
    cc, cxx = find_clang()
    if arguments.compiler:
        print(cc)
        return
    build(cc, cxx)
    failed = []
    for target in targets:
        found = BUILD / f"found-{target}"
        found.mkdir(exist_ok=True)
        seconds = max(1, round(arguments.seconds / len(targets)))
        words = arguments.inputs or [f"-max_total_time={seconds}", found, FUZZ / "corpus" / target]
        if run(target, cc, words):
            failed.append(target)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the inputs are in {BUILD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
