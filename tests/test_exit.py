"""The end of a process, in every order: exit status 0 and nothing on stderr.

Each scenario is a process of its own, with a deadline. On the fake runtime it also ends with
another status if anything was done on the way out that a real GPU punishes.
"""

import pytest
from helpers import run_child

BEGIN = """
import atexit, gc, os, sys, threading, time, weakref
BEFORE_THE_IMPORT
import numpy as np
import gpuops
x, indices = np.arange(1000.0), np.array([3, 1, 2])
long = np.arange(1000).repeat(100)
def call(gather=gpuops.gather, x=x, indices=indices):
    result = gather(x, indices)
    assert result.tolist() == [3, 1, 2]
    return result
call()
"""

# Globals and stdout may be gone by then, so that it brings what it needs.
LATE = """
class Late:
    def __init__(self):
        self.call, self.write = call, os.write
    def __del__(self):
        self.call()
        self.write(1, b"late\\n")
"""

SCENARIOS = {
    "results in globals": "kept = [call() for _ in range(100)]",
    "results in a cycle": """
class Node: pass
node = Node()
node.node, node.result, node.module, node.call = node, call(), gpuops, gpuops.gather
""",
    "a call from __del__ of a global": LATE + "late = Late()",
    "a call from __del__ within a cycle": LATE + "late = Late(); late.late = late",
    "a call from __del__ of what a module holds": LATE + "gpuops.late = Late(); del call",
    "a call from __del__ of what sys holds": LATE + "sys.late = Late()",
    "handlers that were registered after the import": """
atexit.register(call)
atexit.register(lambda: print(gpuops.gather(x, 3)))
weakref.finalize(call, lambda: gpuops.take(x, [1]))
""",
    "daemon threads that call": """
def work():
    while True:
        call()
        gpuops.gather(x, long)
        started.set()
started = threading.Event()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
started.wait()
""",
    "a thread that outlives the main one": """
def work():
    threading.main_thread().join()
    for _ in range(100):
        call()
    print("late")
threading.Thread(target=work).start()
""",
    "sys.exit in a thread": """
def work():
    kept = call()
    sys.exit(3)
for _ in range(3):
    threading.Thread(target=work).start()
""",
    "sys.exit while a thread calls": """
def work():
    for _ in range(100):
        gpuops.gather(x, long)
threading.Thread(target=work).start()
kept = call()
sys.exit()
""",
    "os._exit while threads call": """
def work():
    while True:
        gpuops.gather(x, long)
        started.set()
started = threading.Event()
for _ in range(3):
    threading.Thread(target=work).start()
started.wait()
os._exit(0)
""",
    "a pool of threads that nobody shuts down": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(4)
futures = [pool.submit(gpuops.gather, x, long) for _ in range(50)]
""",
    "an event loop with calls in its threads": """
import asyncio
async def main():
    await asyncio.gather(*(asyncio.to_thread(gpuops.gather, x, long) for _ in range(10)))
    asyncio.get_running_loop().run_in_executor(None, gpuops.gather, x, long)
asyncio.run(main())
""",
    "objects that the collector does not know": """
kept = [call()]
kept.append(kept)
gc.freeze()
gc.disable()
""",
    "no names of gpuops are left": "kept = call(); del gpuops, call, sys.modules['gpuops']",
    "imported a second time": """
first, kept = gpuops, [call()]
names = [name for name in sys.modules if name.partition(".")[0] == "gpuops"]
modules = [sys.modules.pop(name) for name in names]
del gpuops
import gpuops
assert gpuops is not first
for module in (first, gpuops):
    kept.append(module.gather(x, indices))
    assert kept[-1].tolist() == [3, 1, 2]
    try:
        module.gather(x, 1000)
    except IndexError as error:
        kept.append(error)
atexit.register(lambda: first.gather(x, 1))
""",
    "unloaded, and never again imported": """
kept = [call(), gpuops.gather]
for name in [name for name in sys.modules if name.partition(".")[0] == "gpuops"]:
    del sys.modules[name]
del gpuops, call
gc.collect()
assert kept[1](x, 5) == 5
""",
    "within a block that is never left": """
def generator():
    with gpuops.device("cpu"):
        yield call()
suspended = generator()
next(suspended)
gpuops.device("cpu").__enter__()
""",
    "an exception with its frames": """
try:
    gpuops.gather(x, [1000])
except IndexError as error:
    sys.last_exc = kept = error
    kept.again = kept
""",
    "what belongs to a thread": """
local = threading.local()
local.kept = call()
def work():
    local.kept = call()
    gpuops.device("cpu").__enter__()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
""",
    "a signal whose handler leaves": """
import signal
signal.signal(signal.SIGALRM, lambda *_: sys.exit())
signal.setitimer(signal.ITIMER_REAL, 0.2)
while True:
    gpuops.gather(x, long)
""",
    "other names for main and for stdout": """
sys.modules["__main__"] = kept = call()
sys.stdout = None
""",
    "nothing was ever called": "del x, call",
}

BEFORE = {
    "handlers that were registered before the import": """
def handler():
    for _ in range(3):
        assert gpuops.gather(x, indices).tolist() == [3, 1, 2]
    print("late")
atexit.register(handler)
""",
    "a thread that was started before the import": """
def work():
    while "call" not in globals():
        time.sleep(0.01)
    while True:
        call()
threading.Thread(target=work, daemon=True).start()
""",
}

ON_THE_GPU = {
    "arrays and views": "kept = [d, d[1:], d[::-1][3], gpuops.gather(d, [1, 2]), gpuops.zeros(0)]",
    "work on streams": """
streams = [gpuops.Stream() for _ in range(3)]
big = gpuops.zeros(1 << 16)
for stream in streams * 30:
    big.fill(1, stream=stream)
    kept = gpuops.gather(d, [1, 2], stream=stream)
""",
    "a bad index that nobody has asked for": "kept = gpuops.gather(d, [5000])",
    "events": """
stream = gpuops.Stream()
events = [gpuops.Event(timing=True), stream.record(), stream.record()]
stream.wait(events[1])
events.append(events)
""",
    "within the block of a stream": """
def generator():
    with gpuops.Stream():
        yield gpuops.gather(d, [1])
suspended = generator()
next(suspended)
threading.Thread(target=gpuops.Stream().__enter__).start()
""",
    "capsules that nobody has consumed": """
kept = [d.__dlpack__(), d.__dlpack__(max_version=(1, 3)), d.__dlpack__(dl_device=(1, 0))]
kept.append(kept)
""",
    "an exported array that its consumer gives back late": """
import capsules
class Consumer:
    def __init__(self, array):
        export = capsules.Export(array.__dlpack__(max_version=(1, 3)))
        self.delete, self.address = export.managed.deleter, export.address
        export.consume()
    def __del__(self):
        self.delete(self.address)
sys.consumer, consumer = Consumer(d), Consumer(d[1:])
del d
""",
    "an array of others that is imported": """
class Owner:
    __cuda_array_interface__ = d.__cuda_array_interface__
    kept = d
    def __del__(self):
        self.kept.to_host()
imported = gpuops.asarray(Owner())
kept = [imported, imported[1:].__dlpack__()]
""",
    "page-locked arrays": """
kept = [gpuops.pin(x), gpuops.pin(x[3:]), gpuops.pinned_empty(5), gpuops.pinned_empty(1 << 20)]
kept.append(kept)
gpuops.pin(indices).__enter__()
""",
    "a block of page-locked memory that is never left": """
def generator():
    with gpuops.pinned_memory():
        yield np.arange(100_000.0)
suspended = generator()
kept = [next(suspended), np.arange(500_000.0)]
sys.kept = np.arange(10.0)
threading.Thread(target=gpuops.pinned_memory().__enter__).start()
""",
    "arrays that are made and freed late": """
class Late:
    def __init__(self):
        self.make, self.kept = np.zeros, [np.zeros(size) for size in (10, 10_000, 100 << 17)]
    def __del__(self):
        self.kept += [self.make(size) for size in (10, 10_000, 100 << 17)]
        self.kept = [array + 1 for array in self.kept]
gpuops.pinned_memory().__enter__()
late, sys.late = Late(), Late()
late.late = late
""",
    "a limit of memory": "gpuops.memory_limit(d.nbytes << 4); d = gpuops.zeros(10)",
    "calls from __del__, with arrays": """
class Late:
    def __init__(self):
        self.gather, self.d = gpuops.gather, d
    def __del__(self):
        # The device may have gone by now, but never gives wrong values.
        try:
            assert self.gather(self.d, [3]).to_host() == 3
        except RuntimeError as error:
            assert "gpuops has been unloaded" in str(error)
late, sys.late = Late(), Late()
late.late = late
""",
    "daemon threads with streams": """
def work():
    with gpuops.Stream() as stream:
        while True:
            kept = gpuops.gather(gpuops.to_device(x), [1, 2])
            stream.record().synchronize()
            started.set()
started = threading.Event()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
""",
    "daemon threads with work on their per-thread streams": """
class PerThread:
    def __cuda_stream__(self):
        return 0, 2
stream = gpuops.Stream.from_external(PerThread())
def work():
    while True:
        kept = gpuops.gather(d, long, stream=stream)
        started.set()
started = threading.Event()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
""",
    "os._exit with work on streams": """
stream = gpuops.Stream()
kept = [gpuops.gather(d, long, stream=stream) for _ in range(50)]
os._exit(0)
""",
}

MODULES = """
code = 'extern "C" __global__ void one(float *y) { *y = 1; }'
module = gpuops.compile(code)
kernel = module.get_function("one")
launcher = kernel[1, 1]
class Node: pass
node = Node()
node.node, node.kept = node, [module, kernel, launcher, gpuops.In(d), gpuops.Pointer(d.ptr)]
sys.kept = gpuops.compile(code).get_function("one")[1, 1]
"""


def leave(gpuops, device, source, before=""):
    """On the fake, with all work left undone until somebody waits for it."""
    environment = {"PYTHONFAULTHANDLER": "1", "GPUOPS_FAKE_SCHEDULER": "lazy"}
    source = BEGIN.replace("BEFORE_THE_IMPORT", before) + source
    output = run_child(gpuops, source, GPUOPS_DEVICE=device.default, **environment)
    assert set(output.split()) <= {"late", "3.0"}, output
    return output


@pytest.mark.parametrize("name", SCENARIOS)
def test_exit(gpuops, device, name):
    output = leave(gpuops, device, SCENARIOS[name])
    assert ("late" in output) == ("late" in SCENARIOS[name])


@pytest.mark.parametrize("name", BEFORE)
def test_what_was_there_before_the_import(gpuops, device, name):
    output = leave(gpuops, device, "", BEFORE[name])
    assert ("late" in output) == ("late" in BEFORE[name])


@pytest.mark.parametrize("name", ON_THE_GPU)
def test_exit_with_a_gpu(gpu, name):
    leave(gpu.gpuops, gpu, "d = gpuops.to_device(x)\n" + ON_THE_GPU[name])


def test_cuda_is_left_alone_after_the_end(fake_device):
    """When Python takes the last objects apart, the driver may have done so with its own."""
    before = """
@atexit.register
def the_end():
    last.before = fake.calls()
"""
    source = """
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")

class Last:
    def __init__(self):
        self.fake, self.write = fake, os.write
    def __del__(self):
        self.write(1, b"%d calls" % (self.fake.calls() - self.before))

class Late:
    def __init__(self):
        self.make, self.write = np.zeros, os.write
    def __del__(self):
        self.write(1, b"%d bytes, " % self.make(5 << 20).nbytes)

def keep():
    d, stream, event = gpuops.to_device(np.arange(700_000)), gpuops.Stream(), gpuops.Event()
    stream.record(event)
    with gpuops.pinned_memory():
        pinned = [np.zeros(10), np.zeros(1 << 20), gpuops.pinned_empty(3), gpuops.pin(x)]
    return [pinned, d, d[1:], gpuops.gather(d, [1], stream=stream), stream, event, d.__dlpack__()]

# What sys holds goes at the very end, in the order in which it came there.
gpuops.pinned_memory().__enter__()
sys.kept, sys.late = keep(), Late()
sys.last = last = Last()
"""
    source = BEGIN.replace("BEFORE_THE_IMPORT", before) + source
    assert (
        run_child(fake_device.gpuops, source, GPUOPS_DEVICE="cuda:0") == "41943040 bytes, 0 calls"
    )


def test_exit_with_modules(gpu, tmp_path):
    try:
        gpu.gpuops.compile("")
    except gpu.gpuops.CompileError as problem:
        pytest.skip(str(problem).partition("\n")[0])
    leave(gpu.gpuops, gpu, "d = gpuops.to_device(x)\n" + MODULES)
