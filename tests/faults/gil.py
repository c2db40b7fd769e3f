"""What Python's other threads may do while one of them is in a call of CUDA: everything.

A call of CUDA can take long, and can wait for Python: for a host function on a stream that is
written in Python, or because a tool looks at Python's stack. So no call that may wait is made with
the GIL, and whoever holds the GIL never waits for a thread that is in such a call.

    python tests/faults/gil.py gather

looks at both on every path of a group of paths.py, each in a process of its own.
"""

import functools
import gc
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faults.apart import apart
from faults.paths import PATHS, twins, warm_up
from faults.sweep import load

# These ask for what the driver knows of itself or of the calling thread, or change that.
AT_ONCE = {
    "cudaDriverGetVersion",
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaGetLastError",
    "cudaPeekAtLastError",
    "cudaThreadExchangeStreamCaptureMode",
}


class Handle:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


def go(device, path, visit):
    """Takes a path while `visit` comes before each call."""
    device.fake.set_scheduler("lazy")
    with twins(device):
        if not path.is_first:
            warm_up(device)
        case = path.prepare(device)
        with device.fake.visit(visit):
            case.run()
            del case
            gc.collect()


def calls_with_the_gil(device, path):
    names = set()

    def visit(name, with_gil):
        if with_gil:
            names.add(name)

    go(device, path, visit)
    return sorted(names - AT_ONCE)


def turns_of_another_thread(device, path):
    """Each call waits until another thread has been in Python, with things of its own.

    If that thread waits for us while it holds the GIL, both wait for ever.
    """
    gpuops = device.gpuops
    wanted, done, over = threading.Event(), threading.Event(), threading.Event()
    turns, failures = 0, []

    @functools.cache
    def things():
        stream, event = gpuops.Stream(), gpuops.Event()
        event.record(stream)
        return stream, event, gpuops.to_device([1, 2, 3])

    def use_things():
        stream, event, array = things()
        with stream:
            assert gpuops.current_stream(0) == stream
        assert gpuops.Stream.from_external(Handle(stream.ptr)) == stream
        assert array.reshape(3, 1).stream == array.stream
        assert event.__cuda_stream__() == (0, stream.ptr)

    def work():
        nonlocal turns
        while wanted.wait() and not over.is_set():
            wanted.clear()
            try:
                use_things()
            except BaseException as failure:
                failures.append(failure)
            turns += 1
            done.set()

    def visit(_, with_gil):
        if not with_gil and threading.current_thread() is not thread:
            done.clear()
            wanted.set()
            done.wait(0.5)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        go(device, path, visit)
    finally:
        over.set()
        wanted.set()
        thread.join()
    if failures:
        raise failures[0]
    return turns


def main(group):
    gpu = load()
    problems, calls = [], 0
    for name, path in PATHS.items():
        if path.group != group:
            continue
        for look in (calls_with_the_gil, turns_of_another_thread):
            result, status = apart(look, gpu, path)
            if status != 0:
                problems.append(f"{name}: {look.__name__}: the process ended with {status}")
            elif look is calls_with_the_gil and result:
                problems.append(f"{name}: called with the GIL: {', '.join(result)}")
            elif look is turns_of_another_thread:
                calls += result
    print("\n".join(problems))
    print(f"{calls} calls, {len(problems)} problems")
    return calls == 0 or len(problems) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
