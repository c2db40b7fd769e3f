"""Signals while calls run: KeyboardInterrupt comes at once, and all goes on after it.

Everything runs in processes of its own: a signal that comes late must not hit the tests.
"""

import pytest
from helpers import run_child
from rtc import open_nvrtc

BEGIN = """
import gc, os, random, signal, sys, threading, time
import numpy as np
import gpuops
x = np.arange(1 << 16)
indices = np.random.default_rng(0).integers(0, 1 << 16, size=1 << 16)
expected = x[indices]

def all_is_well():
    assert (gpuops.gather(x, indices) == expected).all()
    assert (gpuops.add(x, x) == 2 * x).all()
    try:
        gpuops.gather(x, [1 << 16])
    except IndexError:
        pass
    else:
        raise AssertionError("no IndexError")

def interrupt_after(seconds, signal_number=signal.SIGINT):
    # Another thread sends it, as a terminal does: to the process.
    def send():
        time.sleep(seconds)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal_number)
    sent = []
    threading.Thread(target=send).start()
    return sent

all_is_well()
"""

# The calls of a loop that the signal ends.
LOOP = """
rows = np.zeros((64, 1 << 14))
longest = 0
sent = interrupt_after(0.3)
try:
    while True:
        begin = time.monotonic()
        CALL
        longest = max(longest, time.monotonic() - begin)
except KeyboardInterrupt:
    late = time.monotonic() - sent[0]
assert late < 1 + 2 * longest, f"{late:.2f} s, where a call takes {longest:.2f} s"
all_is_well()
print("done")
"""

LONG_CALLS = {
    "gather": "gpuops.gather(rows, np.arange(64))",
    "scatter_add": "gpuops.scatter_add(rows, np.arange(64), 1.0)",
    "sigmoid": "gpuops.sigmoid(rows)",
    "matmul": "gpuops.matmul(rows[:, :512], rows[:, :512].T)",
    "correlate": "gpuops.correlate(rows[:, :4096], np.ones((3, 3)))",
}


@pytest.mark.not_under_tsan("keeps signals back while a call computes")
@pytest.mark.parametrize("name", LONG_CALLS)
def test_keyboard_interrupt(gpuops, device, name):
    source = BEGIN + LOOP.replace("CALL", LONG_CALLS[name])
    assert run_child(gpuops, source, GPUOPS_DEVICE=device.default) == "done\n"


# Work is on its way when the signal comes, and its arrays are dropped by the exception.
PENDING = """
from pathlib import Path
cudart = Path(gpuops.__path__[0]).parent / "cudart"
if cudart.is_dir():
    from faults.fake import Fake
    Fake(cudart).set_scheduler("lazy")

def work():
    stream = gpuops.Stream()
    big = gpuops.zeros(1 << 19, stream=stream)
    results = []
    for i in range(40):
        big.fill(i, stream=stream)
        results.append(gpuops.gather(gpuops.to_device(x), indices, stream=stream))
    sent = interrupt_after(0.02)
    try:
        WAIT
        time.sleep(10)
    except KeyboardInterrupt:
        assert time.monotonic() - sent[0] < 10
        assert (results[-1].to_host() == expected).all() and (big.to_host() == 39).all()
        return
    raise AssertionError("no KeyboardInterrupt")

work()
gc.collect()
gpuops.synchronize()
assert gpuops.memory_info().used == 0
all_is_well()
print("done")
"""

WAITS = {
    "synchronize": "stream.synchronize()",
    "to_host": "results[-1].to_host()",
    "an event": "stream.record().synchronize()",
    "the device": "gpuops.synchronize()",
}


@pytest.mark.parametrize("name", WAITS)
def test_keyboard_interrupt_of_a_wait(gpu, name):
    source = BEGIN + PENDING.replace("WAIT", WAITS[name])
    assert run_child(gpu.gpuops, source, GPUOPS_DEVICE="cuda:0") == "done\n"


# The GPU is at work for much longer than anybody has to wait for the exception. What is queued is
# done all the same, in its order, and whoever waits once more finds it so.
BEHIND_A_LONG_KERNEL = """
import copy, functools, pickle
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
SECONDS = 30.0

def interrupted(call):
    begin = time.monotonic()
    interrupt_after(0.2)
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - begin
    raise AssertionError("no KeyboardInterrupt")

def work():
    stream, other = gpuops.Stream(), gpuops.Stream()
    with stream:
        source, places = gpuops.to_device(x), gpuops.to_device(indices)
        bad, out = gpuops.to_device([1 << 16]), gpuops.empty(1, int)
        stream.synchronize()
        fake.take_time(stream.ptr, SECONDS)
        result = gpuops.gather(source, places)
        event = gpuops.Event(blocking_sync=BLOCKING)
        event.record()
    gpuops.gather(source, bad, out=out, stream=stream)
    to_device = functools.partial(gpuops.to_device, stream=stream)
    square, locked = x.reshape(256, 256), gpuops.pinned_empty(x.shape, int)
    table, rows = np.zeros((1 << 14, 32)), gpuops.empty((2048, 32), stream=stream)

    there, faults = gpuops.to_device(indices[:2048] % 1000, stream=other), []
    other.synchronize()

    def gather_rows(indices):
        gpuops.gather(table, indices[:2048] % 1000 if indices is not there else there, out=rows)

    def cannot_lock():
        fake.set_ring_divisor(64)
        faults.append(fake.fail(1, 2, "from then on", "cudaHostRegister"))
        faults[0].__enter__()

    late = interrupted(lambda: WAIT)
    assert late < SECONDS / 2, f"{late:.2f} s"
    assert not stream.query() and not event.query()
    # Nobody else has memory that the kernels behind the long one are to use.
    used = [result.ptr, places.ptr]
    copied = result.copy(stream=stream)
    del result, places
    gc.collect()
    assert not {gpuops.zeros(x.size, int, stream=other).ptr for _ in range(4)} & {*used}
    assert not stream.query()
    fake.hurry()
    # The bad index is told of once.
    try:
        stream.synchronize()
    except IndexError as error:
        assert str(1 << 16) in str(error)
    else:
        raise AssertionError("no IndexError")
    assert stream.query() and event.query()
    stream.synchronize()
    event.synchronize()
    assert (copied.to_host() == expected).all()

work()
gc.collect()
gpuops.synchronize()
assert gpuops.memory_info().used == 0
all_is_well()
print("done")
"""

LONG_WAITS = {
    "synchronize": "stream.synchronize()",
    "an event": "event.synchronize()",
    "the device": "gpuops.synchronize()",
    "to_host": "result.to_host()",
    "to_host behind another stream": "result.to_host(stream=other)",
    "to_host of a few": "result[:100].to_host()",
    "to_host of a few behind another stream": "result[:100].to_host(stream=other)",
    "to_host of every other element": "result[::2].to_host()",
    "to_host into page-locked memory": "result.to_host(out=gpuops.pinned_empty(x.shape, int))",
    "repr": "repr(result)",
    "pickle": "pickle.dumps(result)",
    "deepcopy": "copy.deepcopy(result)",
    "DLPack": "np.from_dlpack(result, device='cpu')",
    "to_device of page-locked memory": "to_device(gpuops.pinned_empty(1 << 13))",
    "to_device of an array that is pinned": "(gpuops.pin(x), to_device(x))",
    "to_device of more than a ring": "fake.set_ring_divisor(256) or to_device(x)",
    "to_device of what is turned there": "fake.set_ring_divisor(256) or to_device(square.T)",
    "to_device by a ring that is in use": "fake.set_ring_divisor(64) or [*map(to_device, (x, x))]",
    "to_device of every other element": "to_device(x[::2])",
    "to_device of some page-locked elements with gaps": "to_device(locked[:2000:2])",
    "to_device of what has gaps and is turned": "to_device(square[:, :128].T)",
    "to_device without rings": "cannot_lock() or to_device(x)",
    "an operand on the host": "gpuops.add(result, locked, stream=stream)",
    "an operand that is converted": "gpuops.add(rows.reshape(-1), locked, stream=stream)",
    "indices on the host": "gpuops.gather(source, x[::2], stream=stream)",
    "rows that threads gather": "fake.set_ring_divisor(256) or gather_rows(indices)",
    "rows that threads gather without rings": "cannot_lock() or gather_rows(indices)",
    "rows that threads gather by indices from there": "gather_rows(there)",
    "a call between host arrays": "gpuops.gather(x, indices, stream=stream)",
}


@pytest.mark.parametrize("name", LONG_WAITS)
def test_keyboard_interrupt_behind_a_long_kernel(fake, name):
    source = BEGIN + BEHIND_A_LONG_KERNEL.replace("WAIT", LONG_WAITS[name])
    source = source.replace("BLOCKING", str(name == "an event"))
    assert run_child(fake.gpuops, source, GPUOPS_DEVICE="cuda:0") == "done\n"


# The signals come at any moment of copies through rings, most of which end before the exception is
# raised.
RINGS = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
gpuops.empty_cache()
fake.set_ring_divisor(16)
large, out = np.arange(1 << 20), np.zeros(1 << 20, int)
interrupts, times = 0, random.Random(0)

def interrupt(*_):
    raise KeyboardInterrupt

def there_and_back():
    there = gpuops.to_device(large)
    assert there.to_host(out) is out and (out == large).all()
    there.fill(0)
    out[...] = 0

begin = time.monotonic()
there_and_back()
span = 3 * (time.monotonic() - begin)  # a sanitizer makes it take longer
signal.signal(signal.SIGALRM, interrupt)
chunks = fake.calls("cudaMemcpyAsync")
for _ in range(40):
    try:
        signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-4, span))
        begin = time.monotonic()
        while time.monotonic() < begin + 10:
            there_and_back()
    except KeyboardInterrupt:
        interrupts += 1
    assert (out == large).all() or not out.any()
assert interrupts == 40
assert fake.calls("cudaMemcpyAsync") - chunks > 40 * 20
gc.collect()
gpuops.synchronize()
assert gpuops.memory_info().used == 0 and fake.take_misuse() == ""
assert (gpuops.to_device(large).to_host() == large).all()
all_is_well()
print("done")
"""


# A long copy does not have to come to its end.
LONG_COPY = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
large = np.zeros(1 << 26, np.uint8)[::2]
calls = fake.calls("cudaMemcpyAsync")
gpuops.to_device(large)
whole = fake.calls("cudaMemcpyAsync") - calls
fake.slow_copies(0.4 / whole)
deadline, sent = time.monotonic() + 40, 0
while not 0 < sent < whole and time.monotonic() < deadline:  # on a busy machine it may come late
    calls = fake.calls("cudaMemcpyAsync")
    interrupt_after(0.02)
    try:
        gpuops.to_device(large)
        time.sleep(10)
    except KeyboardInterrupt:
        sent = fake.calls("cudaMemcpyAsync") - calls
assert 0 < sent < whole, (sent, whole)

def fork(*_):
    global child
    child = os.fork()
    signal.alarm(20 if child == 0 else 0)  # as it must not wait for threads that it does not have

signal.signal(signal.SIGUSR1, fork)
status = LATE = 1
while status == LATE and time.monotonic() < deadline:
    child = None
    interrupt_after(0.02, signal.SIGUSR1)
    try:
        gpuops.to_device(large)
        while child is None:
            time.sleep(0.01)
    except gpuops.ForkedProcessError:
        os._exit(0)
    if child == 0:
        os._exit(LATE)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
fake.slow_copies(0)
gpuops.synchronize()
assert gpuops.memory_info().used == 0 and fake.take_misuse() == ""
assert (gpuops.to_device(large).to_host() == large).all()
all_is_well()
print("done")
"""


@pytest.mark.parametrize("threads", ["1", "3"])
def test_keyboard_interrupt_of_a_long_copy(fake, threads):
    environment = {"GPUOPS_DEVICE": "cuda:0", "GPUOPS_NUM_THREADS": threads}
    assert run_child(fake.gpuops, BEGIN + LONG_COPY, **environment) == "done\n"


# The default stream is at work, and the call is not to begin.
BETWEEN_HOST_ARRAYS = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
square = np.ones((512, 512), np.float32)
for call in (
    lambda: gpuops.gather(x, indices, device="cuda"),
    lambda: gpuops.add(x[::2], x[1::2], device="cuda"),
    lambda: gpuops.matmul(square, square, device="cuda"),
    lambda: gpuops.scatter(x.copy(), indices, x, device="cuda"),
):
    fake.take_time(0, 30)
    interrupt_after(0.2)
    try:
        call()
    except KeyboardInterrupt:
        assert fake.pending()
    else:
        raise AssertionError("no KeyboardInterrupt")
    fake.hurry()
    gpuops.synchronize()
all_is_well()
print("done")
"""


def test_keyboard_interrupt_of_calls_between_host_arrays(fake):
    assert run_child(fake.gpuops, BEGIN + BETWEEN_HOST_ARRAYS, GPUOPS_DEVICE="cuda:0") == "done\n"


# Here they have to wait for what is queued, which is not waited for once they are given up; and
# whoever has the ring next waits for what is on its way there.
BUSY_RINGS = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
fake.set_ring_divisor(64)
large, stream, times = np.arange(1 << 18), gpuops.Stream(), random.Random(0)
table, many, few = large.reshape(-1, 16), np.arange(6000), large[: 6 << 13]
kept = [gpuops.to_device(large - i, stream=stream) for i in range(3)]
rows = gpuops.empty((6000, 16), int, stream=stream)
stream.synchronize()

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
interrupts = 0
for i in range(60):
    fake.take_time(stream.ptr, 0.08)
    before = gpuops.to_device(few + i, stream=stream)  # is on its way in most of the ring
    try:
        signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-4, 0.1))
        begin = time.monotonic()
        while time.monotonic() < begin + 10:
            with stream:
                last = [gpuops.to_device(large + i), gpuops.add(kept[0], large)]
                gpuops.gather(table, many, out=rows)
                last.append(gpuops.to_device(large.reshape(512, 512).T))
    except KeyboardInterrupt:
        interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    after = gpuops.to_device(large - i, stream=stream)
    assert (after.to_host() == large - i).all(), i
    assert (before.to_host() == few + i).all(), i
assert interrupts == 60
for i, array in enumerate(kept):
    assert (array.to_host() == large - i).all()
    assert (gpuops.gather(array, indices[:10]).to_host() == large[indices[:10]] - i).all()
for _ in range(2):  # as no signal has ended it, and that once more
    with stream:
        last = [gpuops.to_device(large), gpuops.add(kept[1], large)]
        gpuops.gather(table, many, out=rows)
        last.append(gpuops.to_device(large.reshape(512, 512).T))
    assert (last[0].to_host() == large).all() and (last[1].to_host() == 2 * large - 1).all()
    assert (rows.to_host() == table[:6000]).all()
    assert (last[2].to_host() == large.reshape(512, 512).T).all()
del kept, rows, last, before, after, array
gc.collect()
gpuops.synchronize()
assert gpuops.memory_info().used == 0 and fake.take_misuse() == ""
all_is_well()
print("done")
"""


def test_keyboard_interrupt_of_copies_that_wait_for_a_ring(fake):
    printed = run_child(fake.gpuops, BEGIN + BUSY_RINGS, timeout=240, GPUOPS_DEVICE="cuda:0")
    assert printed == "done\n"


def test_keyboard_interrupt_of_copies_through_rings(fake):
    assert run_child(fake.gpuops, BEGIN + RINGS, GPUOPS_DEVICE="cuda:0") == "done\n"


# The page-locked memory that a small copy was to go through is not for the next one.
SMALL_COPIES = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
stream, other = gpuops.Stream(), gpuops.Stream()
late, early = gpuops.to_device([1.0], stream=stream), gpuops.to_device([2.0], stream=other)
assert early.to_host() == 2
locked = fake.calls("cudaHostAlloc")
fake.take_time(stream.ptr, 1)
interrupt_after(0.1)
try:
    late.to_host()
except KeyboardInterrupt:
    assert not stream.query() and fake.calls("cudaHostAlloc") == locked
else:
    raise AssertionError("no KeyboardInterrupt")
assert early.to_host() == 2 and not stream.query()
assert fake.calls("cudaHostAlloc") == locked + 1
assert late.to_host() == 1
gpuops.empty_cache()
assert late.to_host() == 1
print("done")
"""


def test_a_small_copy_that_was_given_up(fake):
    assert run_child(fake.gpuops, BEGIN + SMALL_COPIES, GPUOPS_DEVICE="cuda:0") == "done\n"


# With GPUOPS_LAUNCH_BLOCKING=1 the call of an operator is such a wait.
BLOCKING_CALL = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
stream = gpuops.Stream()
source, places = (gpuops.to_device(array, stream=stream) for array in (x, indices))
out = gpuops.empty(x.shape, int, stream=stream)
fake.take_time(stream.ptr, 30)
interrupt_after(0.2)
try:
    gpuops.gather(source, places, out=out, stream=stream)
except KeyboardInterrupt:
    assert not stream.query()
else:
    raise AssertionError("no KeyboardInterrupt")
fake.hurry()
assert (out.to_host() == expected).all()
all_is_well()
print("done")
"""


def test_keyboard_interrupt_of_a_call_that_blocks(fake):
    environment = {"GPUOPS_DEVICE": "cuda:0", "GPUOPS_LAUNCH_BLOCKING": "1"}
    assert run_child(fake.gpuops, BEGIN + BLOCKING_CALL, **environment) == "done\n"


# A kernel of one's own writes to an array on the host: the launch is what waits.
LAUNCH = """
from pathlib import Path
from faults.fake import Fake
from rtc import SAXPY, SAXPY_TYPES, cubin, own_architecture, saxpy_twin
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
code, _ = cubin(gpuops, SAXPY, own_architecture(gpuops))
saxpy = gpuops._core._load_module(code, {"saxpy": ("saxpy", SAXPY_TYPES)}, 0, {})["saxpy"]
fake.set_scheduler("lazy")
stream, x, y = gpuops.Stream(), np.ones(100, np.float32), np.zeros(100, np.float32)
x, y = (PLACE(array, stream=stream) for array in (x, y))
with fake.twin("saxpy", saxpy_twin):
    fake.take_time(stream.ptr, 30)
    interrupt_after(0.2)
    try:
        saxpy[1, 128, stream](2, x, y, 100)
    except KeyboardInterrupt:
        assert not stream.query()
    else:
        raise AssertionError("no KeyboardInterrupt")
    fake.hurry()
    stream.synchronize()
    saxpy[1, 128, stream](2, x, y, 100)
    del x
    gpuops.synchronize()
print(EXPECTED)
"""


@pytest.mark.parametrize(
    "place, expected, blocks",
    [
        ("lambda array, stream: array", "y.max()", "0"),
        ("gpuops.to_device", "y.to_host().max()", "1"),
    ],
    ids=["arrays on the host", "arrays on the device, with launches that block"],
)
def test_keyboard_interrupt_of_a_launch(fake, place, expected, blocks):
    open_nvrtc(fake.gpuops)
    source = BEGIN + LAUNCH.replace("PLACE", f"({place})").replace("EXPECTED", expected)
    environment = {"GPUOPS_DEVICE": "cuda:0", "GPUOPS_LAUNCH_BLOCKING": blocks}
    # What was launched before the exception has changed what is on the device, and nothing else.
    assert run_child(fake.gpuops, source, **environment) == ("2.0\n" if blocks == "0" else "4.0\n")


# Threads that are still waiting when the process ends do not keep it, or spoil its end.
EXIT = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
streams = [gpuops.Stream() for _ in range(8)]
for stream in streams:
    d = gpuops.zeros(1, stream=stream)
    fake.take_time(stream.ptr, 1)
    for wait in (stream.synchronize, stream.record().synchronize, d.to_host, gpuops.synchronize):
        threading.Thread(target=wait, daemon=True).start()
time.sleep(0.1)
print("done", flush=True)
"""


# One array's way back fails before the signal comes while another one's is waited for.
FAILED_LAUNCH = """
from pathlib import Path
from faults.fake import Fake
from rtc import SAXPY, cubin, own_architecture
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
code, _ = cubin(gpuops, SAXPY, own_architecture(gpuops))
types = ("a", "float32"), ("x", "float32*"), ("y", "float32*"), ("n", "int64")
saxpy = gpuops._core._load_module(code, {"saxpy": ("saxpy", types)}, 0, {})["saxpy"]
fake.set_scheduler("lazy")
stream, x, y = gpuops.Stream(), np.ones(100, np.float32), np.zeros(100, np.float32)
with fake.twin("saxpy", lambda launch: None):
    saxpy[1, 128, stream](2, x, y, 100)
    fake.take_time(stream.ptr, 1)
    interrupt_after(0.2)
    with fake.fail(3, 999, function="cudaMemcpyAsync") as fault:
        try:
            saxpy[1, 128, stream](2, x, y, 100)
        except KeyboardInterrupt:
            assert not stream.query()
        else:
            raise AssertionError("no KeyboardInterrupt")
    assert fault.reached
    gpuops.synchronize()
print("done")
"""


def test_keyboard_interrupt_beside_a_failure(fake):
    open_nvrtc(fake.gpuops)
    assert run_child(fake.gpuops, BEGIN + FAILED_LAUNCH, GPUOPS_DEVICE="cuda:0") == "done\n"


# A handler forks: in the child, which has no CUDA, nothing is left to be done.
FORKED = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
stream, other, event = gpuops.Stream(), gpuops.Stream(), gpuops.Event()
d, large = (gpuops.to_device(np.arange(n), stream=stream) for n in (100, 100_000))
table, rows = np.zeros((1 << 14, 32)), gpuops.empty((2048, 32), stream=stream)
stream.synchronize()
fake.set_ring_divisor(256)
NAMES = [
    "cudaEventQuery", "cudaEventRecord", "cudaEventDestroy", "cudaStreamQuery", "cudaFreeAsync",
    "cudaStreamSynchronize", "cudaStreamWaitEvent", "cudaDeviceSynchronize",
    "cudaEventSynchronize", "cudaPointerGetAttributes", "cudaThreadExchangeStreamCaptureMode",
    "cudaMemcpyAsync", "cudaMallocFromPoolAsync", "cudaSetDevice", "cudaGetDevice",
]

class InTheChild(Exception):
    pass

def calls():
    return {name: fake.calls(name) for name in NAMES}

def handler(number, frame):
    global child, before
    assert fake.pending()  # it is in the middle of the wait
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        before = calls()
        if raises:
            raise InTheChild
    else:
        fake.hurry()

signal.signal(signal.SIGINT, handler)
for wait in (
    stream.synchronize, event.synchronize, gpuops.synchronize, d.to_host, large.to_host,
    lambda: d[::2].to_host(stream=other), lambda: gpuops.to_device(x, stream=stream),
    lambda: gpuops.to_device(x.reshape(256, 256).T, stream=stream),
    lambda: gpuops.add(large[:x.size], x, stream=stream),
    lambda: gpuops.gather(table, indices[:2048] % 1000, out=rows, stream=stream),
    lambda: gpuops.add(x[::2], x[1::2], device="cuda"), lambda: gpuops.gather(x, x, device="cuda"),
    lambda: gpuops.add(table, table, device="cuda"),
):
    for raises in True, False:
        fake.take_time(stream.ptr, 30)
        fake.take_time(0, 30)  # the default stream
        event.record(stream)
        interrupt_after(0.1)
        try:
            wait()
        except (InTheChild, gpuops.ForkedProcessError) as error:
            after = calls()
            os._exit(after != before or isinstance(error, InTheChild) != raises)
        assert os.waitpid(child, 0)[1] == 0, (wait, raises)
print("done")
"""


def test_a_handler_that_forks(fake):
    assert run_child(fake.gpuops, BEGIN + FORKED, GPUOPS_DEVICE="cuda:0") == "done\n"


def test_the_process_ends_while_threads_wait(fake):
    assert run_child(fake.gpuops, BEGIN + EXIT, GPUOPS_DEVICE="cuda:0") == "done\n"


# A thread that waits for what is queued is not kept by those who go on to queue more.
QUEUED_MEANWHILE = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
stream, over = gpuops.Stream(), threading.Event()
d, event = gpuops.zeros(1, stream=stream), gpuops.Event()
stream.synchronize()

def go_on():
    while not over.is_set():
        for _ in range(20):
            d.fill(1, stream=stream)
            event.record(stream)
        time.sleep(0.001)

thread = threading.Thread(target=go_on)
thread.start()
for wait in stream.synchronize, event.synchronize, gpuops.synchronize, d.to_host:
    fake.run()
    fake.take_time(stream.ptr, 0.2)
    wait()
assert thread.is_alive()
over.set()
thread.join()
print("done")
"""


def test_a_wait_ends_though_more_is_queued(fake):
    assert run_child(fake.gpuops, BEGIN + QUEUED_MEANWHILE, GPUOPS_DEVICE="cuda:0") == "done\n"


# What a signal's handler does in the middle of a wait is not undone, and the wait goes on.
HANDLED = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
fake.set_scheduler("lazy")
stream, seen = gpuops.Stream(), []

def handler(number, frame):
    fake.library.cudaSetDevice(1)  # as other libraries do
    seen.append((stream.query(), gpuops.gather(x, indices)))

signal.signal(signal.SIGINT, handler)
event, d = gpuops.Event(), gpuops.to_device(x, stream=stream)
for wait in stream.synchronize, event.synchronize, gpuops.synchronize, d.to_host:
    begin = time.monotonic()
    fake.take_time(stream.ptr, 0.5)
    event.record(stream)
    interrupt_after(0.1)
    wait()
    seconds = time.monotonic() - begin
    assert 0.49 <= seconds < 5 and event.query(), seconds
    done, result = seen.pop()
    assert not done and (result == expected).all() and not seen
    fake.library.cudaSetDevice(0)
all_is_well()
print("done")
"""


def test_a_wait_goes_on_after_a_handler(fake):
    assert run_child(fake.gpuops, BEGIN + HANDLED, GPUOPS_DEVICE="cuda:0") == "done\n"


# Whatever a call was doing when a signal came, its operands and callbacks are those of a call that
# failed: the next one is right, and nothing is left behind.
RANDOM = """
class Interrupted(Exception):
    pass

def handler(number, frame):
    global armed, interrupted
    if armed:
        armed = False
        interrupted += 1
        raise Interrupted

class Index:
    def __init__(self, value):
        self.value = value
    def __index__(self):
        return sum([self.value for _ in range(50)]) // 50

class Array:
    def __array__(self, dtype=None, copy=None):
        return np.array([sum(range(100)), 2.0])

def refused():
    try:
        gpuops.gather(small, [0, 99])
    except IndexError:
        pass

small, places, out = np.arange(10.0), np.array([3, -1, 0]), np.zeros(3)
square = np.arange(16.0).reshape(4, 4)
operands = [x, indices, small, places, out, square]
calls = [
    lambda: gpuops.gather(small, places),
    lambda: gpuops.gather(small, places, out=out),
    lambda: gpuops.gather(x, indices),
    lambda: gpuops.gather(square, [0, 3], axis=Index(1)),
    lambda: gpuops.gather(Array(), [1, 0]),
    lambda: gpuops.scatter_add(out, [0, 2, 2], 1.0),
    lambda: gpuops.saxpy(2.0, x, x),
    lambda: gpuops.matmul(square, square),
    lambda: gpuops.correlate(square, square[:3, :3]),
    refused,
]
if os.environ["GPUOPS_DEVICE"] != "cpu":
    d, stream = gpuops.to_device(small), gpuops.Stream()
    class Foreign:
        @property
        def __cuda_array_interface__(self):
            return {**d.__cuda_array_interface__, "stream": sum([1] * 50) // 50}
    foreign = Foreign()
    operands += [d, stream, foreign]
    calls += [
        lambda: gpuops.gather(d, places, stream=stream).to_host(),
        lambda: gpuops.gather(foreign, [1, 2]),
        lambda: gpuops.add(d, foreign, stream=stream),
        lambda: gpuops.asarray(foreign)[1:].copy(),
        lambda: gpuops.from_dlpack(d).__dlpack__(),
        lambda: stream.record().synchronize(),
        lambda: repr(d),
        gpuops.synchronize,
    ]

def state():
    gc.collect()
    if os.environ["GPUOPS_DEVICE"] != "cpu":
        gpuops.synchronize()
        gpuops.empty_cache()  # what waited for work on other streams is given back now
    held = [sys.getrefcount(operand) for operand in operands]
    if os.environ["GPUOPS_DEVICE"] != "cpu":
        held.append(gpuops.memory_info().used)
    return held

def send(stop):
    while not stop.wait(random.uniform(0.001, 0.01)):
        os.kill(os.getpid(), signal.SIGINT)

def call_until_interrupted(call):  # a function, all of which is within the caller's try
    global armed
    armed = True
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
    while armed:
        call()

armed, interrupted, turns = False, 0, 0
for number in (signal.SIGINT, signal.SIGALRM):
    signal.signal(number, handler)
for call in calls * 3:
    call()
stop = threading.Event()
sender = threading.Thread(target=send, args=(stop,))
sender.start()
before = state()
deadline = time.monotonic() + 2
while time.monotonic() < deadline:
    turns += 1
    try:
        call_until_interrupted(random.choice(calls))
    except Interrupted:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
stop.set()
sender.join()
assert interrupted == turns > 50, (interrupted, turns)
assert state() == before, (before, state())
all_is_well()
print("done")
"""


def test_random_signals(gpuops, device):
    assert run_child(gpuops, BEGIN + RANDOM, GPUOPS_DEVICE=device.default) == "done\n"


@pytest.mark.not_under_tsan("has a thread of its own, which takes signals")
def test_signals_go_to_threads_of_python(gpuops):
    """Not to the workers of the CPU backend, who would be stopped in the middle of their work."""
    source = """
import os, gpuops, numpy as np
before = set(os.listdir("/proc/self/task"))
x = np.zeros((64, 1 << 16))
gpuops.gather(x, np.arange(64), device="cpu")
workers = set(os.listdir("/proc/self/task")) - before
for worker in workers:
    with open(f"/proc/self/task/{worker}/status") as status:
        blocked = next(line for line in status if line.startswith("SigBlk:"))
    mask = int(blocked.split()[1], 16)
    assert all(mask >> number - 1 & 1 for number in (1, 2, 3, 10, 13, 14, 15)), blocked
print(len(workers))
"""
    environment = {"GPUOPS_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"}
    assert run_child(gpuops, source, **environment) == "2\n"
