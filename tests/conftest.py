"""The options of the suite and the fixtures that let one test run on every device.

A test takes `gpuops`, the module to call, and runs three times:

    cpu     the installed package on its CPU backend
    fake    the build on the fake CUDA runtime (tests/faults/), imported as `gpuops_fake`
    cuda    the installed package on a real GPU, skipped where there is none

The default device of the test's thread is set already. A test that starts threads or needs to know
where it runs takes `device` too: `device.spec` is "cpu" or "cuda", `device.name` one of the above,
`device.fake` the controls of the fake runtime or None. On the fake a test fails if it leaves memory
or a stream or another current device behind, or did anything that a real GPU would punish. A test
of device arrays takes `gpu` instead, and runs on the last two.

Write options that name a folder with an equals sign, --package=DIR: pytest looks for its settings
near every path that stands alone on the command line.
"""

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from faults import build
from faults.fake import Fake, load_package
from helpers import SCHEDULERS

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    group = parser.getgroup("gpuops")
    group.addoption("--require-gpu", action="store_true", help="fail where there is no usable GPU")
    group.addoption("--require-fake", action="store_true", help="fail where there is no fake build")
    group.addoption("--package", metavar="DIR", help="test the package in DIR, not the installed")
    group.addoption("--fake", metavar="DIR", help="a finished fake build, or none (build/fake)")


def pytest_configure(config):
    # `python -m pytest` puts the sources on the path, which hide the installed package but hold no
    # compiled module, unless they were built in place.
    if not list(ROOT.glob("gpuops/_core*.so")):
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    config.addinivalue_line(
        "markers", "not_under_tsan(reason): skipped under TSan, for what it does itself"
    )
    package = config.getoption("--package")
    if package:
        sys.path.insert(0, str(Path(package).resolve()))
    # A shell's jobs in the background ignore Ctrl-C, and so do the processes that they start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    allow_fixtures_under_hypothesis()
    let_classes_die()


def let_classes_die():
    """Once a thread was started, Python 3.13 without the GIL keeps all classes that are made, and
    what their methods hold, unless it is told not to."""
    with contextlib.suppress(ImportError):
        from _testinternalcapi import suppress_immortalization

        suppress_immortalization(True)


def allow_fixtures_under_hypothesis():
    """A fixture is set up once for all examples of a test, which is right for a device."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        return
    settings.register_profile(
        "gpuops", suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
    )
    settings.load_profile("gpuops")


def pytest_sessionstart(session):
    if session.config.getoption("--require-gpu"):
        problem = gpu_problem()
        if problem:
            pytest.exit(f"--require-gpu: {problem}", returncode=1)
    if session.config.getoption("--require-fake"):
        problem = fake_problem(session.config)
        if problem:
            pytest.exit(f"--require-fake: {problem}", returncode=1)


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("not_under_tsan")
    if marker and "libtsan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip(f"TSan: {marker.args[0]}")


def pytest_terminal_summary(terminalreporter):
    """What the sweeps of test_faults.py take, which shall stay below five minutes on two cores."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    seconds = [
        report.duration
        for report in reports
        if getattr(report, "when", "") == "call" and "may_fail" in report.nodeid
    ]
    if seconds:
        terminalreporter.write_line(
            f"{len(seconds)} sweeps of calls that fail took {sum(seconds):.0f} s, of 300"
        )


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """A test that collects garbage does not wait until the collector has looked at all tests, and
    at what is kept of those before."""
    gc.collect()
    gc.freeze()


def gpu_problem():
    """Why there is no GPU to test on, or None."""
    import gpuops

    if Path(gpuops.__path__[0]).with_name("cudart").is_dir():
        return "the package under test was built on the fake runtime"
    return None if gpuops.is_available() else gpuops.show_config(mode="dicts")["cuda_problem"]


@functools.cache
def fake_problem(config):
    """Why there is nothing to test on the fake runtime, or None; brings build/fake up to date."""
    folder = config.getoption("--fake")
    if folder:
        found = Path(folder, "gpuops").is_dir()
        return None if found else f"there is no fake build in {folder}"
    # As a process of its own, because setuptools changes the process that imports it.
    outcome = subprocess.run([sys.executable, build.__file__], capture_output=True, text=True)
    if outcome.returncode not in (0, build.NO_COMPILER):
        raise RuntimeError(outcome.stderr)
    return outcome.stderr.strip() if outcome.returncode else None


class Device(NamedTuple):
    name: str
    spec: str
    gpuops: object
    fake: Fake | None

    @property
    def default(self):
        """The default of a test: not whichever GPU another library has left current."""
        return "cuda:0" if self.spec == "cuda" else self.spec


@pytest.fixture(scope="session")
def fake_folder(request):
    problem = fake_problem(request.config)
    if problem:
        pytest.skip(problem)
    return Path(request.config.getoption("--fake") or build.folder_of())


@pytest.fixture(scope="session")
def fake_device(fake_folder):
    device = Device("fake", "cuda", load_package(fake_folder), Fake(fake_folder / "cudart"))
    # What the first call on a device makes and keeps is not left behind by the test that it is in.
    for ordinal in range(2):
        device.gpuops.gather(device.gpuops.to_device([1], device=ordinal), [0]).to_host()
    assert device.fake.calls() > 0, f"the package calls another runtime than {device.fake.path}"
    return device


@pytest.fixture(scope="session")
def cuda_device():
    problem = gpu_problem()
    if problem:
        pytest.skip(problem)
    import gpuops

    return Device("cuda", "cuda", gpuops, None)


@pytest.fixture(scope="session")
def cpu_device():
    import gpuops

    return Device("cpu", "cpu", gpuops, None)


@pytest.fixture(params=["cpu", "fake", "cuda"])
def device(request):
    device = request.getfixturevalue(f"{request.param}_device")
    with leaving_nothing(device):
        yield device


@pytest.fixture(params=["fake", "cuda"])
def gpu(request):
    """For tests of what there is on a GPU alone: `device`, without the CPU backend."""
    device = request.getfixturevalue(f"{request.param}_device")
    with leaving_nothing(device), device.gpuops.device(device.default):
        yield device


@pytest.fixture
def fake(fake_device):
    """For tests of what only the fake tells; a file's own fixture of that name prepares it more."""
    with leaving_nothing(fake_device), fake_device.gpuops.device("cuda:0"):
        yield fake_device


@pytest.fixture(params=SCHEDULERS, ids=lambda given: given[0])
def in_any_order(fake, request):
    fake.fake.set_scheduler(*request.param)
    return fake


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """What is compiled and measured here is kept for other tests, and not for the user."""
    monkeypatch.setenv("GPUOPS_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def short_switch_interval():
    """Threads take turns within a few lines of Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def leaving_nothing(device):
    if device.fake is None:
        yield
        return
    before = footprint(device)
    yield
    device.fake.reset()
    after = footprint(device)
    if after != before:
        gc.collect()  # an exception that was caught holds its frames, which hold it
        after = footprint(device)
    misuse = device.fake.take_misuse()
    assert not misuse, misuse
    changed = {name: (before[name], after[name]) for name in before if after[name] != before[name]}
    assert not changed, f"the test left this behind on the fake device (before, after): {changed}"


def footprint(device):
    """What exists once all work is done and nothing is kept for later."""
    if hasattr(device.gpuops, "empty_cache"):
        for ordinal in range(device.gpuops.device_count()):
            device.gpuops.empty_cache(ordinal)
    device.fake.run()
    live = device.fake.live()
    return {
        "allocations": live.allocations,
        "bytes": live.bytes,
        "pinned allocations": live.pinned_allocations,
        "streams": live.streams,
        "events": live.events,
        "libraries": live.libraries,
        "registered bytes": live.registered_bytes,
        "current device": device.fake.current_device(),
    }


@pytest.fixture
def gpuops(device):
    with device.gpuops.device(device.default):
        yield device.gpuops


@pytest.fixture
def limited(gpu):
    """Sets a limit of so many bytes beyond those in use, and takes it away in the end."""
    gpuops = gpu.gpuops

    def limit(room):
        gpuops.empty_cache()
        return gpuops.memory_limit(gpuops.memory_info().used + room)

    before = gpuops.memory_limit(None)
    yield limit
    gpuops.memory_limit(before)
