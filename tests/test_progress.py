"""Long calls between NumPy arrays on a GPU: a bar that shows how far they are, and signals."""

import contextlib
import gc
import importlib.util
import sys
import time
import types

import numpy as np
import pytest
from helpers import constant, run_child, run_threads, same
from operators import OPERATORS, parameters_of, required_arguments

PART_BYTES = 4 << 10
DEVICE_ERROR = 999
LOOK_SECONDS = constant("pipeline.cu", "LOOK_MICROSECONDS") / 1e6
WITH_PROGRESS = [op for op in OPERATORS if "progress" in parameters_of(op).parameters]


class Bar:
    """What the package knows of tqdm's bars, as a record of what is done with them."""

    made: list  # by the module of one test
    on_update = staticmethod(lambda bar, count: None)
    on_close = staticmethod(lambda bar: None)

    def __init__(self, **options):
        self.options, self.updates, self.closed = options, [], 0
        self.made.append(self)

    def update(self, count):
        self.updates.append(count)
        self.on_update(self, count)

    def close(self):
        self.closed += 1
        self.on_close(self)


@pytest.fixture
def bars(monkeypatch):
    module = types.ModuleType("tqdm.auto")
    module.tqdm = type("Bar", (Bar,), {"made": []})
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    return module.tqdm


@pytest.fixture
def fake(fake):
    fake.fake.set_part_bytes(PART_BYTES)
    return fake


X = np.arange(20 * PART_BYTES // 4, dtype="i4")
LARGE = {
    "add": (X, X),
    "multiply": (X, X),
    "saxpy": (X, X, X),
    "sigmoid": (X.astype("f4"),),
    "sigmoid_backward": (X.astype("f4"), X.astype("f4")),
    "matmul": (X.reshape(-1, 4), X[:8].reshape(4, 2)),
    "correlate": (X.reshape(-1, 32), np.ones((3, 3))),
    "convolve": (X.reshape(-1, 32), np.ones((3, 3))),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_bar(fake, bars, name):
    operator, arguments = getattr(fake.gpuops, name), LARGE[name]
    expected = operator(*arguments)
    same(operator(*arguments, progress=False), expected)
    assert bars.made == []
    same(operator(*arguments, progress=True), expected)
    (bar,) = bars.made
    total = sum(x.nbytes for x in arguments) + expected.nbytes
    assert bar.options == {
        "desc": name, "total": total, "unit": "B", "unit_scale": True, "unit_divisor": 1024,
    }  # fmt: skip
    assert all(count > 0 for count in bar.updates)
    assert sum(bar.updates) == total
    assert bar.closed == 1


def test_it_is_for_what_goes_in_parts():
    assert {operator.name for operator in WITH_PROGRESS} == set(LARGE)


@pytest.mark.parametrize("operator", WITH_PROGRESS, ids=lambda operator: operator.name)
def test_small_calls_are_silent(gpuops, bars, operator):
    arguments, function = required_arguments(operator), getattr(gpuops, operator.name)
    same(function(*arguments, progress=True), function(*arguments))
    assert bars.made == []


def test_what_is_on_a_device_already(fake, bars):
    d = fake.gpuops.to_device(X)
    fake.gpuops.add(d, d, progress=True)
    assert bars.made == []


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_it_is_true_or_false(gpuops, value):
    with pytest.raises(TypeError, match="progress must be True or False"):
        gpuops.add(1, 2, progress=value)


def test_without_tqdm(gpuops, monkeypatch):
    """Whoever asks for a bar is told how to come by one, before anything is done."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.delitem(sys.modules, "tqdm.auto", raising=False)
    out = np.full(3, 7)
    with pytest.raises(ImportError, match=r"progress=True .* pip install tqdm"):
        gpuops.add(np.arange(3), 1, out=out, progress=True)
    assert (out == 7).all()
    gpuops.add(np.arange(3), 1, out=out, progress=False)


def test_with_tqdm(fake, capsys):
    if importlib.util.find_spec("tqdm") is None:
        pytest.skip("tqdm is not installed")
    same(fake.gpuops.add(X, X, progress=True), X + X)
    assert "add: 100%" in capsys.readouterr().err


class Ended(BaseException):
    pass


def end(*_, **__):
    raise Ended


def slowly(fake):
    """Between some parts, the time passes after which a bar is told how far the call is."""
    launches = 0

    def visit(name, _):
        nonlocal launches
        launches += name == "cudaLaunchKernel"
        if name == "cudaLaunchKernel" and launches in (5, 10):
            time.sleep(LOOK_SECONDS)

    return fake.fake.visit(visit)


def test_it_grows(fake, bars):
    with slowly(fake):
        same(fake.gpuops.add(X, X, progress=True), X + X)
    (bar,) = bars.made
    assert len(bar.updates) >= 3
    assert sum(bar.updates) == 3 * X.nbytes
    assert all(count > 0 for count in bar.updates)


@pytest.mark.parametrize("at", ["begin", "half way", "end", "close"])
@pytest.mark.parametrize("is_pinned", [False, True], ids=["pageable", "page-locked"])
@pytest.mark.parametrize("scheduler", ["now", "lazy"])
def test_a_bar_fails(fake, bars, at, scheduler, is_pinned):
    """Its exception is that of the call, which is wound up: nothing is at work on the arrays."""
    gpuops = fake.gpuops
    fake.fake.set_scheduler(scheduler)
    if at == "begin":
        bars.__init__ = end
    elif at == "close":
        bars.on_close = staticmethod(end)
    else:
        bars.on_update = staticmethod(end)
    x, out = X.copy(), np.zeros_like(X)
    before = fake.fake.calls("cudaLaunchKernel")
    with contextlib.ExitStack() as stack:
        if is_pinned:
            stack.enter_context(gpuops.pin(x))
            stack.enter_context(gpuops.pin(out))
        with (
            slowly(fake) if at == "half way" else contextlib.nullcontext(),
            pytest.raises(Ended),
        ):
            started = time.monotonic()
            gpuops.add(x, x, out=out, progress=True)
        is_quick = time.monotonic() - started < LOOK_SECONDS  # or the bar hears of it before
        out[...] = 7
        fake.fake.run()
        assert (out == 7).all()
    parts = fake.fake.calls("cudaLaunchKernel") - before
    expected = {"begin": parts == 0, "half way": 5 <= parts < 20}
    assert expected.get(at, parts == 20 or not is_quick)
    assert [bar.closed for bar in bars.made] == [1] * (at != "begin")
    same(gpuops.add(X, X), X + X)


@pytest.mark.parametrize("bar_fails", [False, True])
def test_a_call_with_a_bar_fails(fake, bars, bar_fails, monkeypatch):
    """Then the bar is closed, and the error is that of the call, whatever the bar says to that."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: unraisable.append(given.exc_type))
    if bar_fails:
        bars.on_close = staticmethod(end)
    with (
        fake.fake.fail(3, 999, "once", "cudaLaunchKernel"),
        pytest.raises(fake.gpuops.DeviceError),
    ):
        fake.gpuops.add(X, X, progress=True)
    (bar,) = bars.made
    assert bar.closed == 1
    assert unraisable == [Ended] * bar_fails


def test_a_bar_may_call_the_package(fake, bars):
    """And make another device current, which is not that of the call then."""
    gpuops = fake.gpuops
    results = []

    def call(bar, count):
        results.append(gpuops.add(X, X, device=1))
        fake.fake.library.cudaSetDevice(1)

    bars.on_update = staticmethod(call)
    same(gpuops.add(X, X, progress=True), X + X)
    assert results and all((result == X + X).all() for result in results)
    assert fake.fake.current_device() == 0


def test_threads_with_bars(fake, bars):
    def call():
        same(fake.gpuops.add(X, X, device=0, progress=True), X + X)

    run_threads([call] * 4)
    assert len(bars.made) == 4
    assert all(bar.closed == 1 for bar in bars.made)


def test_nothing_is_kept(fake, bars):
    before = sys.getrefcount(X)
    fake.gpuops.add(X, X, progress=True)
    bars.on_update = staticmethod(end)
    for _ in range(3):
        with pytest.raises(Ended):
            fake.gpuops.add(X, X, progress=True)
    gc.collect()
    assert sys.getrefcount(X) == before


# Signals. A child process calls, and another thread of it sends the signal.

INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path
import numpy as np
import gpuops
from faults.fake import Fake

fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_memory_limit(1 << 30)
gpuops.add([1], [2], device="cuda:0")

PARTS = 20_000
x = np.zeros((PARTS, 1 << 12), np.uint8)
image = np.zeros((PARTS, 1 << 9), np.float64)
fake.set_part_bytes(1 << 12)
weights = np.random.default_rng(0).standard_normal((5, 5))

def interrupt():
    while fake.calls("cudaLaunchKernel") < FIRST:
        time.sleep(0.001)
    sent.append(fake.calls("cudaLaunchKernel"))
    os.kill(os.getpid(), signal.SIGINT)

for scheduler in ("now", "lazy"):
    fake.reset()
    fake.set_memory_limit(1 << 30)
    fake.set_part_bytes(1 << 12)
    fake.set_scheduler(scheduler)
    sent, out = [], np.zeros(SHAPE)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        CALL
    except KeyboardInterrupt:
        made = fake.calls("cudaLaunchKernel")
    else:
        raise AssertionError("no KeyboardInterrupt")
    thread.join()
    # Many of the parts were never begun.
    assert made < MOST, (sent, made)
    out[...] = 7
    fake.run()
    assert (out == 7).all()
    small = np.arange(1 << 14)
    assert (gpuops.add(small, small, device="cuda:0") == 2 * small).all()
    assert fake.current_device() == 0
gpuops.synchronize(0)
assert gpuops.memory_info(0).used == 0
assert fake.take_misuse() == ""
print("done")
"""

# What is called, how many parts it makes, and after how many of them it is interrupted.
LONG_CALLS = {
    "add": ("x.shape, x.dtype", "gpuops.add(x, x, out=out, device='cuda:0')", 20_000, 20),
    "correlate": (
        "image.shape",
        "gpuops.correlate(image, weights, output=out, device='cuda:0')",
        20_000,
        20,
    ),
    "matmul": (
        "(PARTS, 8)",
        "gpuops.matmul(image, np.ones((1 << 9, 8)), out=out, device='cuda:0')",
        20,
        2,
    ),
}


# A table goes up in windows of a few rows, since there is no room for more; and since the threads
# of the host are expected to be slow.
WINDOWS = """
import importlib, os, signal, threading, time
from pathlib import Path
import numpy as np
import gpuops
from faults.fake import Fake
from test_route import RATES

fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
calibration = importlib.import_module(gpuops.__name__ + "._calibration")
calibration._core._measure_rates = lambda ordinal, work: RATES | {"gather.cpu_far": 1.0}
calibration._add_products = lambda rates: None
gpuops.explain("gather", [1], [0])
x = np.arange(8_000_000, dtype="f4").reshape(80_000, 100)
indices = np.arange(0, 80_000, 2)
out = OUT
gpuops.add([1], [2], device="cuda:0")
gpuops.empty_cache()
gpuops.memory_limit(gpuops.memory_info(0).used + indices.nbytes + 80_000)
before = fake.calls("cudaLaunchKernel")

def launches():
    return fake.calls("cudaLaunchKernel") - before

def read():
    return out if isinstance(out, np.ndarray) else out.to_host()

def interrupt():
    while launches() < 20:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

thread = threading.Thread(target=interrupt, daemon=True)
thread.start()
try:
    gpuops.gather(x, indices, out=out, device="cuda:0")
except KeyboardInterrupt:
    # The last window was never begun.
    assert not read()[-1].any()
else:
    raise AssertionError("no KeyboardInterrupt", launches())
thread.join()
gpuops.memory_limit(None)
gpuops.gather(x, indices, out=out, device="cuda:0")
assert (read() == x[indices]).all()
del out
gpuops.empty_cache()
assert gpuops.memory_info(0).used == 0 and fake.current_device() == 0
assert fake.take_misuse() == ""
print("done")
"""


@pytest.mark.parametrize("out", ["gpuops.to_device", "np.asarray"])
def test_keyboard_interrupt_of_a_table_in_windows(fake_device, tmp_path, out):
    source = WINDOWS.replace("OUT", f"{out}(np.zeros((40_000, 100), 'f4'))")
    folder = str(tmp_path)
    assert run_child(fake_device.gpuops, source, GPUOPS_CACHE_DIR=folder) == "done\n"


@pytest.mark.parametrize("name", LONG_CALLS)
def test_keyboard_interrupt(fake_device, name):
    shape, call, parts, first = LONG_CALLS[name]
    source = INTERRUPTED.replace("SHAPE", shape).replace("CALL", call)
    source = source.replace("FIRST", str(first)).replace("MOST", str(parts * 9 // 10))
    assert run_child(fake_device.gpuops, source) == "done\n"


# Another call, on a table that the GPU reads in place, which lasts for several looks at signals.
RELEASED_MEANWHILE = """
gpuops.memory_limit(gpuops.memory_info(0).used + 20_000)
fake.set_scheduler("lazy")
pin, faults = gpuops.pin(x), []
copies = fake.calls("cudaMemcpyAsync")
gpuops.gather(x, indices, out=out, device="cuda:0")
fake.slow_copies(0.5 / (fake.calls("cudaMemcpyAsync") - copies))

def release(*_):
    for name in ("cudaStreamSynchronize", "cudaDeviceSynchronize"):
        faults.append(fake.fail(1, 999, "from then on", name))
        faults[-1].__enter__()
    pin.release()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, release)
before = fake.calls("cudaLaunchKernel")
threading.Thread(target=interrupt, daemon=True).start()
try:
    gpuops.gather(x, indices, out=out, device="cuda:0")
except KeyboardInterrupt:
    print(fake.live().registered_bytes == x.nbytes)
for fault in faults:
    fault.__exit__(None, None, None)
gpuops.empty_cache()
assert fake.live().registered_bytes == 0 and fake.take_misuse() == ""
"""


def test_what_an_interrupted_call_may_be_at_stays_page_locked(fake_device, tmp_path):
    """Where nobody can be made to wait for it, until somebody has waited for the device."""
    prepared, _ = WINDOWS.split("thread = threading.Thread")
    source = prepared.replace("OUT", "np.zeros((40_000, 100), 'f4')") + RELEASED_MEANWHILE
    folder = str(tmp_path)
    assert run_child(fake_device.gpuops, source, GPUOPS_CACHE_DIR=folder) == "True\n"


# Whoever is asked may fork, and go on in the child: the workers of the call are missing there, and
# whoever had a lock, and the GPU.
FORKED = """
import sys
from test_progress import Ended

fake.set_ring_divisor(64)
fake.set_part_bytes(256 << 10)
large, number, in_parent = np.ones(16 << 20, "f4"), np.arange(1 << 19), True

def fork(*_):
    global in_parent, forked_in, calls
    child = os.fork()
    if child:
        children.append(child)
        signal.setitimer(signal.ITIMER_REAL, 0.15)  # and not while it is still forking
        return
    if not in_call:
        os._exit(4)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)
    children.clear()
    in_parent, forked_in, calls = False, turn, fake.calls()
    raise_or_return

in_time, children, turn, in_call = 0, [], 0, False
signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.15)
while in_time < 2:
    turn += 1
    try:
        in_call = True
        CALL
        in_call = False
    except (gpuops.ForkedProcessError, Ended):
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert not in_parent and fake.calls() == calls
        assert (gpuops.add(number, number, device="cpu") == 2 * number).all()
        os._exit(0 if turn == forked_in else 4)  # 4: after the call, or between two
    while children:
        status = os.waitstatus_to_exitcode(os.waitpid(children.pop(), 0)[1])
        assert status in (0, 4), status
        in_time += status == 0
signal.signal(signal.SIGALRM, signal.SIG_IGN)
print("done")
"""

FORKED_CALLS = {
    "parts": ("None", "gpuops.add(large, large, device='cuda:0')"),
    "windows": (
        "gpuops.to_device(np.zeros((2_000, 100), 'f4'))",
        "gpuops.gather(x, indices, out=out, device='cuda:0')",
    ),
    "tiles": (
        "np.zeros((2_000, 100), 'f4')",
        "gpuops.gather(x, indices, out=out, device='cuda:0')",
    ),
}


@pytest.mark.not_under_tsan("dies where a forked child starts threads")
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", FORKED_CALLS)
def test_fork_in_the_middle_of_a_call(fake_device, tmp_path, name, raises):
    out, call = FORKED_CALLS[name]
    few_rows = WINDOWS.replace("80_000, 2", "80_000, 40")
    prepared, _ = few_rows.replace("OUT", out).split("def interrupt():")
    if name == "parts":
        prepared = prepared.replace("gpuops.memory_limit", "(lambda _: None)")
    source = prepared + FORKED.replace("raise_or_return", "raise Ended" * raises or "return")
    source = source.replace("CALL", call)
    environment = {"GPUOPS_NUM_THREADS": "3", "GPUOPS_CACHE_DIR": str(tmp_path)}
    assert run_child(fake_device.gpuops, source, **environment) == "done\n"


def test_a_full_bar_has_its_result(fake, bars):
    fake.fake.set_scheduler("lazy")
    out, found = np.zeros_like(X), []

    def look(bar, count):
        if sum(bar.updates) == bar.options["total"]:
            found.append((out == 2 * X).all())

    bars.on_update = staticmethod(look)
    fake.gpuops.add(X, X, out=out, progress=True)
    assert found == [True]


def test_what_is_pinned_is_let_go_when_a_bar_fails(fake, bars):
    """Nobody waits for the work of others when it is unlocked."""
    x = X.copy()
    bars.on_update = staticmethod(end)
    with fake.gpuops.pin(x):
        with pytest.raises(Ended):
            fake.gpuops.add(x, x, progress=True)
        before = fake.fake.calls("cudaDeviceSynchronize")
    assert fake.fake.calls("cudaDeviceSynchronize") == before


def test_what_is_pinned_is_kept_while_nobody_knows_whether_all_is_over(fake):
    """Its memory stays locked until somebody has waited for the device."""
    x = X.copy()
    with fake.gpuops.pin(x):
        with (
            fake.fake.fail(1, DEVICE_ERROR, "from then on", "cudaStreamSynchronize"),
            pytest.raises(fake.gpuops.DeviceError),
        ):
            fake.gpuops.add(x, x)
        before = fake.fake.calls("cudaDeviceSynchronize")
    assert fake.fake.calls("cudaDeviceSynchronize") > before


WORKERS = """
import sys, time, types
from pathlib import Path
import numpy as np
import gpuops
from faults.fake import Fake

shares = []

def share(_):
    all_threads, own = time.process_time(), time.thread_time()
    gpuops.sigmoid(large, out=out, device="cpu")
    own = time.thread_time() - own
    return 1 - own / (time.process_time() - all_threads)

class Bar:
    def __init__(self, **options):
        pass
    def update(self, count):
        # What part of each call on the CPU other threads do: on a busy machine some come too late.
        shares.append(max(map(share, range(3))))
    def close(self):
        pass

fake = Fake(Path(gpuops.__path__[0]).with_name("cudart"))
fake.set_memory_limit(1 << 28)
fake.set_part_bytes(1 << 20)
fake.set_ring_divisor(32)
sys.modules["tqdm"], sys.modules["tqdm.auto"] = (types.ModuleType(name) for name in "ab")
sys.modules["tqdm.auto"].tqdm = Bar
x = np.ones(8 << 20, "u1")
large, out = np.ones((2, 4 << 20), "f4")
fake.slow_copies(0.02)
gpuops.add(x, x, device="cuda:0", progress=True)
assert len(shares) > 3
print(max(shares[1:-1]))  # in the first and the last nothing is on its way
"""


def test_a_bar_finds_the_workers_free(fake):
    assert float(run_child(fake.gpuops, WORKERS, GPUOPS_NUM_THREADS="2")) > 0.3
