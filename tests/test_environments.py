"""Import and first calls in odd environments: options of the interpreter, folders, limits.

What there is without a driver, or with one that cannot be used, is in test_devices.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import package_parent

# Without these a sanitized package does not load.
SANITIZER = {
    name: os.environ[name]
    for name in ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS")
    if name in os.environ
}

CALLS = """
import numpy as np
import gpuops
x = np.array([10, 20, 30, 40])
assert gpuops.gather(x, [3, 0]).tolist() == [40, 10]
assert gpuops.add(x, 1).tolist() == [11, 21, 31, 41]
try:
    gpuops.gather(x, [9])
except IndexError as error:
    assert str(error) == "index 9 is out of bounds for axis 0 with size 4"
else:
    raise AssertionError("no IndexError")
with gpuops.device("cpu"):
    assert gpuops.matmul(x, x).item() == 3000
assert gpuops.show_config(mode="dicts")["version"] == gpuops.__version__
print("done", flush=True)
"""


def run_python(gpuops, source, *options, folder=None, environment=None, **keywords):
    """Runs source with the build under test, found by sys.path alone; returns what it printed."""
    # Everything is found without PYTHONPATH and site, of which some options know nothing.
    path = [package_parent(gpuops), str(Path(np.__file__).parent.parent)]
    source = f"import sys\nsys.path[:0] = {path!r}\n{source}"
    if environment is None:
        environment = {name: value for name, value in os.environ.items() if "GPUOPS" not in name}
    child = subprocess.run(
        [sys.executable, *options, "-c", source],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, **keywords,
    )  # fmt: skip
    assert child.returncode == 0, f"exit status {child.returncode}\n{child.stdout}{child.stderr}"
    assert child.stderr == ""
    return child.stdout


@pytest.fixture
def empty_folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        "", "-I", "-S", "-I -S", "-E -s", "-O", "-OO", "-B", "-W error", "-W error -OO", "-bb",
        "-X dev", "-X utf8=0", "-X frozen_modules=off",
        "-X int_max_str_digits=640", "-X no_debug_ranges",
    ],
)  # fmt: skip
def test_options_of_the_interpreter(gpuops, device, options, empty_folder):
    source = f"import os\nos.environ['GPUOPS_DEVICE'] = {device.default!r}\n{CALLS}"
    assert run_python(gpuops, source, *options.split(), folder=empty_folder) == "done\n"


def test_documentation_goes_with_oo_and_nothing_else(cpu_device, empty_folder):
    source = f"{CALLS}\nassert gpuops.gather.__doc__ and not gpuops.device.__doc__"
    assert run_python(cpu_device.gpuops, source, "-OO", folder=empty_folder) == "done\n"


@pytest.mark.parametrize(
    "missing", ["HOME", "PATH", "USER", "LANG", "TMPDIR", "everything", "HOME, which is nowhere"]
)
def test_variables_that_are_missing(gpuops, device, missing, empty_folder):
    environment = dict(SANITIZER) if missing == "everything" else dict(os.environ)
    environment.pop(missing, None)
    if "nowhere" in missing:
        environment["HOME"] = "/nowhere/at/all"
    environment["GPUOPS_DEVICE"] = device.default
    output = run_python(gpuops, CALLS, folder=empty_folder, environment=environment)
    assert output == "done\n"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX", "de_DE.UTF-8", "nonsense"])
def test_locales(cpu_device, locale, empty_folder):
    """A comma for the decimal point, say, changes no text of ours."""
    source = f"""
import locale
try:
    locale.setlocale(locale.LC_ALL, "")
except locale.Error:
    pass
{CALLS}
text = repr(gpuops.device(1.5))
assert "1.5" in text, text
"""
    environment = {**os.environ, "LC_ALL": locale, "GPUOPS_DEVICE": "cpu"}
    output = run_python(cpu_device.gpuops, source, folder=empty_folder, environment=environment)
    assert output == "done\n"


# Folders.


def test_a_folder_that_cannot_be_written(gpuops, device, empty_folder):
    empty_folder.chmod(0o500)
    try:
        source = f"import os\nos.environ['GPUOPS_DEVICE'] = {device.default!r}\n{CALLS}"
        assert run_python(gpuops, source, folder=empty_folder) == "done\n"
        assert list(empty_folder.iterdir()) == []
    finally:
        empty_folder.chmod(0o700)


def test_a_folder_that_is_gone(gpuops, device, empty_folder):
    # On CPython 3.13, NumPy itself cannot be imported there.
    source = f"""
import os, numpy
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
os.environ["GPUOPS_DEVICE"] = {device.default!r}
{CALLS}
"""
    assert run_python(gpuops, source, folder=empty_folder) == "done\n"


def test_a_folder_with_names_of_ours(gpuops, device, empty_folder):
    """Modules that stand there hide ours only where Python says so, by its own rules."""
    for name in ("_core", "_compile", "_cache", "_repr", "numpy_", "gpuops_"):
        (empty_folder / f"{name}.py").write_text("raise RuntimeError('the wrong module')")
    source = f"import os\nos.environ['GPUOPS_DEVICE'] = {device.default!r}\n{CALLS}"
    assert run_python(gpuops, source, folder=empty_folder) == "done\n"


# Streams of text that are closed.


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_closed_descriptors(gpuops, device, closed, empty_folder):
    source = f"""
import os
os.environ["GPUOPS_DEVICE"] = {device.default!r}
{CALLS.replace('print("done", flush=True)', "")}
with open("done", "w") as done:
    done.write("well")
"""

    def close():
        for descriptor in closed:
            os.close(descriptor)

    run_python(gpuops, source, folder=empty_folder, preexec_fn=close)
    assert (empty_folder / "done").read_text() == "well"


# Limits of the process.

LIMITS = {
    "few files": "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))",
    "no core files": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "no files are written": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "no locked memory": "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))",
    "a small stack": "resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))",
    "one processor": "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])",
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(gpuops, device, name, empty_folder):
    if device.name == "cuda":
        pytest.skip("a driver has needs of its own")
    source = f"""
import os, resource
os.environ["GPUOPS_DEVICE"] = {device.default!r}
{LIMITS[name]}
{CALLS}
long = np.arange(1 << 20)
assert (gpuops.gather(long, long[::-1]) == long[::-1]).all()
"""
    assert run_python(gpuops, source, folder=empty_folder) == "done\n"


def test_threads_that_cannot_be_started(cpu_device, empty_folder):
    """The CPU backend goes on with those that it has."""
    if SANITIZER:
        pytest.skip("a sanitizer reserves more memory than any limit leaves it")
    source = f"""
import mmap, os, resource
{CALLS}
long = np.arange(1 << 20)
expected, out = long[::-1].copy(), np.empty_like(long)
tasks = len(os.listdir("/proc/self/task"))
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
# The stack of not even one more thread.
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 19), resource.RLIM_INFINITY))
assert gpuops.gather(long, expected, out=out) is out
assert len(os.listdir("/proc/self/task")) == tasks
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert (out == expected).all()
"""
    environment = {**os.environ, "GPUOPS_DEVICE": "cpu", "GPUOPS_NUM_THREADS": "64"}
    output = run_python(cpu_device.gpuops, source, folder=empty_folder, environment=environment)
    assert output == "done\n"


# Interpreters.

SUBINTERPRETERS = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
code = '''
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = PATH
try:
    import gpuops
except ImportError:
    print("refused", flush=True)
'''
for _ in range(3):
    interpreter = interpreters.create()
    interpreters.run_string(interpreter, code.replace("PATH", repr(sys.path)))
    interpreters.destroy(interpreter)
assert gpuops.gather(x, 1) == 20
"""


def test_other_interpreters_are_refused(gpuops, device, empty_folder):
    """By an ImportError, as by NumPy: what goes with an interpreter would shut the devices down."""
    environment = {**os.environ, "GPUOPS_DEVICE": device.default}
    output = run_python(
        gpuops, CALLS + SUBINTERPRETERS, folder=empty_folder, environment=environment
    )
    assert output.split() == ["done", *["refused"] * 3]


@pytest.mark.parametrize(
    "value", ["nonsense", "cuda:", "cuda:99999999999999", "CPU", "\udcff", "a" * 5000]
)
def test_a_device_that_is_nonsense(gpuops, device, value, empty_folder):
    """The import does not look at it; the call names it; what says where it runs goes on."""
    source = """
import numpy as np
import gpuops
try:
    gpuops.gather([1, 2], [1])
except (ValueError, gpuops.DeviceError, OverflowError) as error:
    assert "GPUOPS_DEVICE" in str(error), error
else:
    raise AssertionError("no error")
assert gpuops.gather([1, 2], [1], device="cpu").tolist() == [2]
with gpuops.device("cpu"):
    assert gpuops.gather([1, 2], [1]).tolist() == [2]
print("done")
"""
    environment = {**os.environ, "GPUOPS_DEVICE": value}
    output = run_python(gpuops, source, folder=empty_folder, environment=environment)
    assert output == "done\n"
