"""The build of gpuops: a setuptools script, and the build backend that pyproject.toml names.

The C compiler takes csrc/*.c and kernels/*.c, nvcc takes kernels/*.cu, and one link step makes
gpuops/_core.abi3.so. As a backend this is setuptools' own, which also asks for NVIDIA's compiler
wheels where the machine has no nvcc. The environment decides what is built:

    GPUOPS_CUDA=0                       CPU only, with the C++ compiler in the place of nvcc
    GPUOPS_CUDA_ARCHS="80 90"           GPU architectures, or "native"; see architectures()
    GPUOPS_CUDART=FOLDER                test builds: link the fake libcudart.so that is in FOLDER
    CUDA_HOME, CUDA_PATH                where the CUDA toolkit is
    CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS  as usual; nvcc's host compiler obeys CXX and CXXFLAGS too
"""

import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, build_meta, setup
from setuptools.build_meta import (  # noqa: F401 (the hooks that stay as they are)
    build_editable,
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

ROOT = Path(__file__).resolve().parent
SYSTEM_CUDA = "/usr/local/cuda"
CUDA_WHEELS = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime"]
DEFAULT_ARCHITECTURES = ["75", "80", "90", "100", "120"]
FEATURE_LEVELS = ["75", "80", "90"]

# A product and a sum are rounded one by one, unless fma() says otherwise: a result is the same on
# every machine.
COMPILE = ["-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread"]
COMPILE += ["-Wall", "-Wextra"]
COMPILE_C = [*COMPILE, "-std=gnu11"]
COMPILE_CXX = [*COMPILE, "-std=c++17", "-fno-exceptions", "-fno-rtti"]
# Short loops take up to twice as long where they begin in the middle of what is decoded at once.
COMPILE_CXX += ["-falign-loops=32"]
# No -O3: it is for the host's code, and would come after the -O that the user wants for that.
COMPILE_CUDA = ["-std=c++17", "-fmad=false", "--diag-error=20011,20014", "-Xfatbin=-compress-all"]
LINK = ["-shared", "-fPIC", "-static-libstdc++", "-static-libgcc"]

# Flags that are tried first, one by one, because no two compilers take the same; the first that
# works of those with a bar between them. Left out, though often recommended: -z nodlopen (Python
# could not import the result) and -ftrivial-auto-var-init=zero (every call would clear kilobytes of
# shapes and strides that nobody reads).
HARDENING = [
    *("-Wformat=2", "-Werror=format-security", "-Wimplicit-fallthrough"),
    *("-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types"),
    *("-Werror=int-conversion", "-D_FORTIFY_SOURCE=3|-D_FORTIFY_SOURCE=2"),
    *("-fstack-protector-strong|-fstack-protector", "-fstack-clash-protection"),
    *("-fcf-protection=full|-mbranch-protection=standard", "-fstrict-flex-arrays=3"),
    *("-fno-delete-null-pointer-checks", "-fno-strict-overflow", "-fno-strict-aliasing"),
]
HARDENING_LINK = [
    *("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"),
    *("-Wl,--as-needed", "-Wl,--no-copy-dt-needed-entries"),
]


# The build backend: setuptools' hooks, and nvcc where it is missing.


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + compiler_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + compiler_requirements()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # setuptools would pack what it has there of modules that were deleted since.
    for folder in (ROOT / "build").glob("lib*"):
        shutil.rmtree(folder)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def compiler_requirements():
    """Return the wheels that bring nvcc, or none where the machine has one or needs none."""
    if os.environ.get("GPUOPS_CUDA") == "0" or system_nvcc():
        return []
    return [f"{wheel}>=13.0,<14" for wheel in CUDA_WHEELS]


# Finding the tools.


def system_nvcc():
    """Return the path of the machine's own nvcc, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), SYSTEM_CUDA]
    folders = [os.path.join(home, "bin") for home in homes if home]
    folders[-1:-1] = os.get_exec_path()
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def wheel_nvcc():
    """Return the path of the nvcc that NVIDIA's wheels installed for this Python, or None."""
    folders = [os.path.join(entry, "nvidia", "cu13", "bin") for entry in sys.path]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def find_nvcc():
    """Return the path of nvcc, or None where only the CPU is wanted."""
    if os.environ.get("GPUOPS_CUDA") == "0":
        return None
    nvcc = system_nvcc() or wheel_nvcc()
    if not nvcc:
        raise PlatformError(
            f"there is no nvcc in CUDA_HOME, CUDA_PATH, PATH or {SYSTEM_CUDA}, nor from NVIDIA's "
            "wheels. Build with `pip install .`, which brings these; or install them first, with "
            f"`pip install {' '.join(CUDA_WHEELS)}`; or build for the CPU only, with GPUOPS_CUDA=0."
        )
    return nvcc


def find_compiler(variables, names, language):
    """Return a compiler as the words that start its command line."""
    for variable in variables:
        words = shlex.split(os.environ.get(variable, ""))
        if words and not shutil.which(words[0]):
            raise PlatformError(f"{variable} names a compiler that is not there: {words[0]}")
        if words:
            return words
    for name in names:
        if shutil.which(name):
            return [name]
    raise PlatformError(
        f"there is no {language} compiler: PATH has none of {', '.join(names)}. Install one (on "
        f"Debian and Ubuntu `apt install g++`), or name yours in {variables[-1]}."
    )


def header_folders():
    """Return the folders of Python's and NumPy's headers."""
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").is_file():
        raise PlatformError(
            f"Python's C headers are missing: there is no Python.h in {python}. Install them (on "
            "Debian and Ubuntu `apt install python3-dev`)."
        )
    try:
        import numpy
    except ImportError:
        numpy = None
    if numpy is None or int(numpy.__version__.partition(".")[0]) < 2:
        raise PlatformError(
            "the C headers of NumPy 2 are missing. Build with `pip install .`, which brings them; "
            "or install them first, with `pip install 'numpy>=2.0'`."
        )
    return [python, numpy.get_include()]


def run(command, **options):
    """Run a tool in the project's folder, with both its outputs in one text."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.run(command, cwd=ROOT, text=True, errors="replace", **options)
    except OSError as error:
        raise PlatformError(f"{command[0]} cannot be run: {error.strerror}") from None


# Choosing what to build, and with which flags.


def architectures(nvcc):
    """Return the GPU architectures to compile for, in ascending order: ["80", "90"].

    Those in GPUOPS_CUDA_ARCHS; else this machine's; else what runs on every GPU since 2018. The
    last one is built as PTX too, which later GPUs compile when they load it.
    """
    answer = run([nvcc, "--list-gpu-arch"])
    known = re.findall(r"compute_(\d+)", answer.stdout)
    if not known:
        raise PlatformError(explain(f"{nvcc} does not say what it can compile for", answer))
    names = parse_architectures(os.environ.get("GPUOPS_CUDA_ARCHS", ""), known)
    if not names and os.environ.get("GPUOPS_CUDART"):
        names = known[:1]  # The fake CUDA runtime never looks at the machine code.
    names = names or [name for name in local_architectures() if name in known]
    names = names or [name for name in DEFAULT_ARCHITECTURES if name in known]
    return sorted(set(names), key=lambda name: (int(name.rstrip("af")), name))


def parse_architectures(text, known):
    """Return the architectures that a text like "80 90", "8.0;sm_90a" or "native" names."""
    words = []
    for word in re.findall(r"[^\s,;]+", text.lower()):
        words += (local_architectures() or [word]) if word == "native" else [word]
    names = []
    for word in words:
        match = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)([af]?)", word)
        if not match or match[1] + match[2] not in known:
            problem = "there is no GPU here" if word == "native" else "nvcc does not know it"
            raise PlatformError(
                f"GPUOPS_CUDA_ARCHS={text!r} asks for {word!r}, but {problem}. Name any of "
                f"{', '.join(sorted(known, key=int))}, like this: GPUOPS_CUDA_ARCHS='80 90'."
            )
        names.append("".join(match.groups()))
    return names


def local_architectures():
    """Return the architectures of this machine's GPUs; none where the driver does not answer."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = run(query, timeout=30).stdout
    except (PlatformError, subprocess.TimeoutExpired):
        return []
    return [major + minor for major, minor in re.findall(r"^(\d+)\.(\d)$", answer, re.MULTILINE)]


def user_flags(*variables):
    return [word for name in variables for word in shlex.split(os.environ.get(name, ""))]


def cxx_user_flags():
    return user_flags("CXXFLAGS" if "CXXFLAGS" in os.environ else "CFLAGS")


def hardened(compiler, flags, wishes, user, suffix):
    """Return flags, those wishes that the compiler takes without a warning, and the user's."""
    if any(word.startswith("-fsanitize") for word in user):
        # Fortified functions would hide from the sanitizers what they are to look at.
        wishes = [wish for wish in wishes if "FORTIFY" not in wish]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe" + suffix)
        source.write_text("#include <string.h>\nint probe(void);\nint probe(void) { return 0; }\n")

        def build(*extra):
            stage = [] if "-shared" in flags else ["-c"]
            with tempfile.NamedTemporaryFile(dir=folder) as output:
                files = [*stage, str(source), "-o", output.name]
                return run([*compiler, *flags, *extra, *user, *files])

        def granted(wish):
            return [flag for flag in wish.split("|") if not build(*strict, flag).returncode][:1]

        plain = build()
        if plain.returncode:
            raise CompileError(explain(f"{compiler[0]} cannot build an empty function", plain))
        strict = [] if build("-Werror").returncode else ["-Werror"]  # the user's may warn as well
        with ThreadPoolExecutor() as pool:
            return [*flags, *chain.from_iterable(pool.map(granted, wishes)), *user]


class Step(NamedTuple):
    """How files of one kind are compiled: the command without their names, and where to."""

    command: list
    objects: Path


def make_step(tool, flags, versions, folders=()):
    # Under `pip install .` nvcc, Python and NumPy may be in another temporary folder at every
    # build, so it is their versions that decide whether an object can be used again.
    key = hashlib.sha256(repr([flags, versions]).encode()).hexdigest()[:16]
    includes = ["-Ikernels", *(f"-isystem{folder}" for folder in folders)]
    return Step([*tool, *flags, *includes], ROOT / "build" / "objects" / key)


def compile_steps(cc, cxx, nvcc, limited_api, jobs):
    """Return how to compile each kind of source file, by the pattern of their names."""
    headers = header_folders()
    names = architectures(nvcc) if nvcc else []
    versions = [run([*tool, "--version"]).stdout for tool in (cc, cxx)]
    compiler = versions[0].partition("\n")[0]

    c_flags = hardened(cc, COMPILE_C, HARDENING, user_flags("CFLAGS"), ".c")
    cu_flags = hardened(cxx, COMPILE_CXX, HARDENING, cxx_user_flags(), ".cpp")
    if nvcc:
        versions += [run([nvcc, "--version"]).stdout]
        versions += user_flags("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
        compiler += ", nvcc " + re.search(r"V([\d.]+)", versions[2])[1]
        ccbin = [word for word in cxx if not word.startswith("-")][-1]
        cu_tool = [nvcc, f"-ccbin={ccbin}", f"--threads={jobs}"]
        cu_flags = cuda_flags(names, cu_flags)
    else:
        cu_tool = [*cxx, "-x", "c++"]
    if nvcc and os.environ.get("GPUOPS_CUDART"):
        c_flags, cu_flags = ([*flags, "-DGPUOPS_FAKE_CUDA"] for flags in (c_flags, cu_flags))

    core = [*c_flags, f'-DGPUOPS_ARCHS="{" ".join(names)}"', f'-DGPUOPS_COMPILER="{compiler}"']
    core += ["-DNPY_TARGET_VERSION=NPY_2_0_API_VERSION"]
    core += ["-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION"]
    core += ["-DPy_LIMITED_API=0x030B0000"] if limited_api else []
    python = [versions[0], sys.version, metadata.version("numpy")]
    return {
        "kernels/*.cu": make_step(cu_tool, cu_flags, versions),
        "kernels/*.c": make_step(cc, c_flags, versions[:1]),
        "csrc/*.c": make_step(cc, core, python, headers),
    }


def cuda_flags(names, host):
    """Return nvcc's flags: machine code for each architecture, and the host compiler's flags."""
    virtual = {name: feature_level(name) for name in names}
    targets = [f"-gencode=arch=compute_{virtual[name]},code=sm_{name}" for name in names]
    last = virtual[names[-1]]
    targets.append(f"-gencode=arch=compute_{last},code=compute_{last}")
    if os.environ.get("GPUOPS_CUDART"):
        # The fake CUDA runtime runs the kernels' host twins, and never looks at this code.
        targets = [targets[-1], "-Xcicc=-O0"]
    # nvcc takes a comma for the end of a host flag, unless there is a backslash before it.
    words = [flag.replace(",", "\\,") for flag in host if not flag.startswith("-std=")]
    return [*COMPILE_CUDA, *targets, *(f"-Xcompiler={word}" for word in words)]


def feature_level(name):
    """Return the architecture whose features kernels/ uses on a GPU: those in between add none.

    The front half of nvcc's work is done once for each of these.
    """
    levels = [level for level in FEATURE_LEVELS if name.isdecimal() and int(level) <= int(name)]
    return levels[-1] if levels else name


def cudart(nvcc):
    """Return how to link the CUDA runtime: the static one that belongs to this nvcc."""
    fake = os.environ.get("GPUOPS_CUDART")
    if fake:
        folder = os.path.abspath(fake)
        if not os.path.exists(os.path.join(folder, "libcudart.so")):
            raise PlatformError(f"GPUOPS_CUDART: there is no libcudart.so in {folder}")
        return [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lcudart"]
    # nvcc may be a script or a link to a toolkit far away, so ask it where its libraries are.
    plan = run([nvcc, "--dryrun", "nothing.o"]).stdout
    folders = re.search(r"^#\$ LIBRARIES=(.*)$", plan, re.MULTILINE)
    folders = shlex.split(folders[1]) if folders else []
    return [*folders, "-lcudart_static", "-lrt", "-lpthread", "-ldl"]


def link_command(cxx, nvcc):
    """Return the linker's command line in two parts, for the objects to stand between them."""
    user = cxx_user_flags() + user_flags("LDFLAGS")
    flags = hardened(cxx, LINK, HARDENING_LINK, user, ".cpp")
    return [*cxx, *flags], ["-lm", *(cudart(nvcc) if nvcc else [])]


# Building it.


def compile_source(step, source):
    """Compile one file, unless neither it nor a header has changed since; return the object."""
    target = step.objects / f"{source.replace('/', '-')}.o"
    record = target.with_suffix(".json")
    if target.exists() and record.exists():
        seen = json.loads(record.read_text())
        if all(fingerprint(name) == value for name, value in seen.items()):
            return target
    # Taken before, because a file may be edited while nvcc works for a minute.
    files = [path for folder in ("csrc", "kernels") for path in (ROOT / folder).iterdir()]
    before = {path.relative_to(ROOT).as_posix(): fingerprint(path) for path in files}
    # A build that is interrupted, or runs beside another, must not leave half a file.
    step.objects.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=step.objects) as folder:
        draft, depfile = Path(folder, "object"), Path(folder, "depfile")
        started = time.time()
        files = ["-MMD", "-MF", str(depfile), "-c", source, "-o", str(draft)]
        if "--coverage" in step.command:
            # What gcov has to know stays beside the object, and the counts come to lie there.
            files += ["-dumpdir", f"{step.objects}/", "-dumpbase", target.stem]
        result = run([*step.command, *files])
        if result.returncode:
            raise CompileError(explain(f"could not compile {source}", result))
        print(f"{source}: {time.time() - started:.1f} s\n{result.stdout}", end="", flush=True)
        # Headers that are not below this folder belong to the tools, whose versions are known.
        names = depfile.read_text().partition(":")[2].replace("\\\n", " ").split()
        names = [os.path.normpath(name) for name in names if not os.path.isabs(name)]
        depfile.write_text(json.dumps({name: before.get(name) for name in names}, indent=1))
        os.replace(draft, target)
        os.replace(depfile, record)
    return target


def fingerprint(path):
    """Return a hash of a file of the project, or None where there is no such file."""
    path = ROOT / path
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def link(command, objects, target):
    """Link the extension, which exports one symbol only."""
    front, libraries = command
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        exports = Path(folder, "exports.map")
        exports.write_text("{ global: PyInit__core; local: *; };\n")
        files = [f"-Wl,--version-script={exports}", *map(str, objects), "-o", str(draft)]
        result = run([*front, *files, *libraries])
    if result.returncode:
        raise LinkError(explain(f"could not link {target.name}", result))
    os.replace(draft, target)


def explain(summary, result):
    """Return the message for a command that failed."""
    text = f"{summary}:\n\n{result.stdout}\nThe command was:\n{shlex.join(result.args)}\n"
    if "unsupported GNU version" in result.stdout or "unsupported clang version" in result.stdout:
        text += "\nThis nvcc refuses so new a host compiler: name an older one, like CXX=g++-13."
    return text


class BuildCore(build_ext):
    """Builds gpuops._core: compiles what is stale, on all processors, and links."""

    def build_extension(self, extension):
        if sys.platform != "linux":
            raise PlatformError("gpuops builds on Linux only; on Windows use WSL.")
        jobs = self.parallel or len(os.sched_getaffinity(0))
        cc = find_compiler(["CC"], ["cc", "gcc", "clang"], "C")
        cxx = find_compiler(["NVCC_CCBIN", "CXX"], ["g++", "c++", "clang++"], "C++")
        nvcc = find_nvcc()
        steps = compile_steps(cc, cxx, nvcc, extension.py_limited_api, jobs)
        linker = link_command(cxx, nvcc)
        sources = {
            source: step
            for pattern, step in steps.items()
            for source in glob.glob(pattern, root_dir=ROOT)
        }
        # The largest files take longest, so they start first.
        order = sorted(sources, key=lambda source: -(ROOT / source).stat().st_size)
        with ThreadPoolExecutor(jobs) as pool:
            objects = pool.map(lambda source: compile_source(sources[source], source), order)
            objects = sorted(objects, key=lambda path: path.name)
        link(linker, objects, Path(self.get_ext_fullpath(extension.name)))

    def get_source_files(self):
        """Return what an sdist needs beyond the package: all that builds and tests it."""
        folders = ["csrc", "kernels", "tests", "benchmarks", ".ci"]
        files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        files += [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", ".clang-format")]
        files = [path for path in files if path.is_file() and path.suffix not in (".pyc", ".so")]
        return sorted(path.relative_to(ROOT).as_posix() for path in files)


if __name__ == "__main__":
    # Python without the GIL has no limited API yet: there a wheel is for one version of Python.
    limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")
    setup(
        version=re.search(r'GPUOPS_VERSION "(.+)"', (ROOT / "kernels/gpuops.h").read_text())[1],
        license="MIT",
        ext_modules=[Extension("gpuops._core", [], py_limited_api=limited_api)],
        cmdclass={"build_ext": BuildCore},
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if limited_api else {},
    )
