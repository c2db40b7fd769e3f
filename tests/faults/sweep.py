"""Makes the calls of CUDA fail, one after the other, on every path of paths.py.

A step is one path on which one call fails with one code, or two. It runs in a process of its own: a
fatal error costs nobody else the GPU, and a crash is seen to be that step's. Each path has a
process, too, forked from this one, which has loaded everything but never calls CUDA, so that it
begins with what a program begins with. It goes as far as the call that is to fail, once, and its
steps go on from there, as copies of it. The right result is what the path gives when nothing fails;
other tests look at that.

A step that goes wrong is named so that a command repeats it:

    python tests/faults/sweep.py "gather: host arrays" 3 700 sticky

Without the last three all steps of that path are run, or of all paths of an operator, or of all
that there are; after --pairs every two calls fail, after --memory Python's own allocations, and
after --codes every function of CUDA. GPUOPS_FAKE_BUILD names a fake build that is not in
build/fake. With GPUOPS_TEST_EVERY=N only every Nth call of a path fails, or allocation, for what
takes long: a sanitizer.

What is covered: every call of every path fails with a code of each class that the package tells
apart, once and from then on; or the context ends with it, at once and found out later. The classes
are want of memory, what passes, what ends the context, and the answers of TOLD_APART. Which code of
its class a call meets goes by turns; and so does, on paths of many calls, in which mode. That other
codes would lead to the same is shown in two steps: --codes has each function that is called, at one
of its calls, fail with every code that CUDA documents, and tests/test_faults.py that the sources
name no code beside those of the classes.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    # OpenSSL takes more than a millisecond to end, in each process. Most Pythons have hashes of
    # their own.
    if any(map(importlib.util.find_spec, ("_sha2", "_sha256"))):
        sys.modules["_hashlib"] = None

import numpy as np  # noqa: E402

try:
    from _testcapi import remove_mem_hooks, set_nomemory
except ImportError:  # an interpreter without its own tests
    set_nomemory = None
from faults import build  # noqa: E402
from faults.apart import apart, copy_process  # noqa: E402
from faults.fake import Fake, load_package  # noqa: E402
from faults.paths import (  # noqa: E402
    OPERATOR_NAMES,
    PATHS,
    idle_twins,
    machine_code,
    twins,
    warm_up,
)

OUT_OF_MEMORY = 2

# One of each kind that CUDA documents. An error is either of one call, or the end of the context.
PASSING = [
    1,  # invalid value
    46,  # devices unavailable
    101,  # invalid device
    400,  # invalid resource handle
    701,  # launch out of resources
    801,  # not supported
    999,  # unknown
]
FATAL = [
    214,  # uncorrectable ECC error
    220,  # uncorrectable NVLink error
    226,  # contained
    700,  # illegal address
    702,  # launch timeout
    710,  # assert
    714,  # hardware stack error
    715,  # illegal instruction
    716,  # misaligned address
    717,  # invalid address space
    718,  # invalid program counter
    719,  # launch failure
    721,  # tensor memory leak
    810,  # MPS client terminated
    911,  # external device
]

UNKNOWN = 999

# There is no GPU, for good, says cudaGetDeviceCount; other tests look at that.
ABSENCE = [34, 35, 100, 803, 804]
# Codes that are an answer, and of which functions: the exception that it leads to, if any.
NO_CODE = {200: "DeviceError", 209: "DeviceError"}  # the module is not for this device
TOLD_APART = {
    "cudaEventElapsedTime": {400: "ValueError", 600: "ValueError"},
    "cudaEventQuery": {600: None},
    "cudaStreamIsCapturing": {906: "ValueError"},
    "cudaStreamQuery": {600: None},
    "cudaFuncGetAttributes": NO_CODE,
    "cudaFuncGetParamInfo": {1: None},
    "cudaHostRegister": {1: "DeviceError", 712: "ValueError"},
    "cudaLibraryGetGlobal": {**NO_CODE, 500: "KeyError"},
    "cudaLibraryGetKernel": {**NO_CODE, 500: "ValueError"},
    "cudaLibraryLoadData": NO_CODE,
    "cudaMemcpyAsync": {1: None},
}

FOREIGN = 13  # another library's error, in the slot that CUDA has for the last one of a thread

NO_MEMORY = "no memory"  # a mode: it is not CUDA's call that fails, but Python's allocation
ALWAYS_NO_MEMORY = "no memory from then on"

NEVER = 1 << 30
EVERY = int(os.environ.get("GPUOPS_TEST_EVERY", 1))
MANY_CALLS = 40

# What a step may take of the processors' time, which the load of the machine does not change: what
# goes on and on is told then, and what waits for ever after apart's own deadline. Sanitizers, and
# the compiler that one path calls, take their time.
STEP_SECONDS = 10 if os.environ.get("LD_PRELOAD") else 1

# Where both of two calls fail, for what is released on the way out of a failure.
PAIRED = [
    "gather: host arrays, out",
    "gather: converted device arrays",
    "gather: device arrays on another stream",
    "gather: rows read in place",
    "gather: the range that is taken",
    "take_along_axis: device arrays, strided out",
    "add: converted device arrays",
    "add: device arrays on another stream",
    "scatter: device and host arrays",
    "scatter: host arrays",
    "scatter: strided host arrays",
    "scatter_add: many indices",
    "matmul: host arrays without a slab",
    "arrays: to device strided",
    "arrays: the first array",
    "arrays: the first large array",
    "streams: the first stream",
    "exchange: dlpack import",
    "kernels: a launch on device arrays",
]

# The arrangements of each operator on which allocations fail; of the other groups it is all paths.
STARVED = [
    "host arrays",
    "buffers",
    "arrays of Python",
    "device arrays",
    "device arrays, out",
    "arrays of another library",
]
# Nobody says how many allocations there are; some are done without. After so many such, it is taken
# that there are no more.
MOST_TOLERATED = 10
# On these, code of others runs out of memory as well: pickle, the tests' own library, NVRTC, and
# Python's context variables, which do not survive it.
NOT_STARVED = [
    "arrays: pickled",
    "exchange: dlpack given back",
    "exchange: dlpack import",
    "kernels: compile and load",
    "pinned_memory: a block",
    "streams: a long wait",
]


class Strike(NamedTuple):
    """One fault: the call of that number fails."""

    number: int
    code: int
    mode: str

    def __str__(self):
        return f"{self.number} {self.code} '{self.mode}'"


class Outcome(NamedTuple):
    problem: str | None
    reached: bool  # whether the last of the faults struck
    log: list  # the calls, from the first to the last that could fail
    result: object
    footprint: dict


class Device(NamedTuple):
    """What the tests' own `Device` has, as far as paths need it."""

    gpuops: object
    fake: Fake


def load(folder=None):
    # A small GPU, on which kernels have few blocks: it is the calls that fail.
    os.environ["GPUOPS_FAKE_MULTIPROCESSORS"] = "8"
    folder = Path(folder or os.environ.get("GPUOPS_FAKE_BUILD") or build.folder_of())
    gpu = Device(load_package(folder), Fake(folder / "cudart"))
    # A large import, for what Python makes when it first needs it, such as a thread's dictionary:
    # without memory for that it raises all kinds of errors, but no MemoryError.
    importlib.import_module(f"{gpu.gpuops.__name__}._compile")
    # What is there now is not looked at, and so not copied, in any step's process, nor is what
    # Python keeps for later, which a collection frees.
    gc.collect()
    gc.freeze()
    return gpu


class BrokenPromiseError(AssertionError):
    """What must hold does not."""


def require(condition, text):
    """`text` is a function where it takes long to write."""
    if not condition:
        raise BrokenPromiseError(text() if callable(text) else text)


@functools.cache
def numpy_asks_python():
    """Whether NumPy takes the memory of its arrays from Python, as it does from 2.5 on."""
    set_nomemory(0, 0)
    try:
        np.empty(10_000)
        return False
    except MemoryError:
        return True
    finally:
        remove_mem_hooks()


def snapshot(value):
    """A value that compares by bytes, and holds no array."""
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.shape, value.tobytes()
    return value


def contents(output):
    return snapshot(output.to_host() if hasattr(output, "to_host") else np.array(output))


def references(case):
    return [sys.getrefcount(argument) for argument in case.arguments]


def require_released(case):
    """An array.array can grow only when nobody looks at its memory."""
    for argument in case.arguments:
        if hasattr(argument, "append"):
            argument.append(argument[0])
            argument.pop()


def footprint(gpu):
    """What is left on the devices when all work is done, and what was kept for later is freed."""
    for ordinal in range(2):
        gpu.gpuops.empty_cache(ordinal)
    gpu.fake.run()
    live = gpu.fake.live()
    names = ["allocations", "bytes", "pinned_allocations", "streams", "events"]
    found = {name: getattr(live, name) for name in [*names, "libraries", "registered_bytes"]}
    # One pool of each device stays, which only a call makes that finds no slab.
    return found | {"pools": max(live.pools, 2)}


def without_frames(error):
    """The same exception, which holds nothing of those that it went through."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class Scene:
    """A path, of which nothing is left but to make the call and to look at what comes of it.

    What the fake has of a GPU is memory of its process, as is all that the package knows. So a copy
    of a process that has come this far is what another one would be that had done the same, and
    costs less. Nobody may hear of the fork: the package, for whom the driver of a real GPU knows
    whose process is whose, would use none from then on.
    """

    def __init__(self, gpu, path, starves):
        self.gpu = gpu
        self.path = path
        self.starves = starves
        self.is_set = False

    def set(self):
        """In this process, which becomes that of the path, or is that of a step."""
        gpu, fake = self.gpu, self.gpu.fake
        fake.set_scheduler("lazy")
        self.twins = contextlib.ExitStack()
        self.twins.enter_context(idle_twins(gpu) if self.starves else twins(gpu))
        if not self.path.is_first:
            warm_up(gpu)
        self.spare = None if self.path.is_first else gpu.gpuops.to_device(1)
        self.case = self.path.prepare(gpu)
        self.case.operator = self.case.operator or self.path.group
        self.current_device = fake.current_device()
        self.outputs = [contents(output) for output in self.case.outputs]
        gc.collect()  # what only the preparation took shall not go in the middle of the call
        fake.run()
        self.leave_foreign_error()
        self.is_set = True

    def leave_foreign_error(self):
        """Of this our calls are not to hear, and it is there for its owner after them."""
        with self.gpu.fake.fail(1, FOREIGN, function="cudaGetDevice"):
            self.gpu.fake.library.cudaGetDevice(ctypes.byref(ctypes.c_int()))
        self.taken = self.gpu.fake.taken(FOREIGN)


def scene_of(gpu, path, starves=False):
    """For many steps, that all begin where this process is then."""
    scene = Scene(gpu, path, starves)
    if copy_process and path.survives_fork:
        scene.set()
        require(len(os.listdir("/proc/self/task")) == 1, f"{path}: a copy would lack threads")
        require(gpu.fake.live().registered == 0, f"{path}: a copy would lack rings")
    return scene


class Step:
    """One run of a path in this process."""

    def __init__(self, scene, strikes, expected):
        self.scene = scene
        self.gpu = scene.gpu
        self.path = scene.path
        self.strikes = strikes
        self.expected = expected  # the outcome of a run in which nothing fails, or None
        self.codes = {strike.code for strike in strikes}
        self.starves = scene.starves
        self.loses = False  # whether a fault was reached that ends the context
        self.answers = set()  # what the codes may lead to that are none but answers
        self.reached = False
        self.log = []

    def attempt(self, case):
        """Makes the call: its result and the exception, of which one is None."""
        if self.starves:
            return self.attempt_without_memory(case)
        result = error = None
        faults = []
        with contextlib.ExitStack() as armed:
            for strike in self.strikes:
                faults.append(armed.enter_context(self.gpu.fake.fail(*strike)))
            try:
                result = snapshot(case.run())
            except Exception as caught:
                error = without_frames(caught)
            self.log = self.gpu.fake.log()
        self.reached = all(fault.reached for fault in faults)
        self.calls = [fault.call for fault in faults if fault.reached]
        self.loses = any(
            fault.reached and strike.code in FATAL
            for fault, strike in zip(faults, self.strikes, strict=True)
        )
        self.answers = {
            TOLD_APART[fault.call][strike.code]
            for fault, strike in zip(faults, self.strikes, strict=True)
            if strike.code in TOLD_APART.get(fault.call, ())
        }
        return result, error

    def attempt_without_memory(self, case):
        """The same, with Python's allocator failing instead of CUDA."""
        value = error = None
        (strike,) = self.strikes
        last = 0 if strike.mode == ALWAYS_NO_MEMORY else strike.number
        run = case.run
        set_nomemory(strike.number - 1, last)  # those after the first number fail
        try:
            value = run()
        except BaseException as caught:
            error = caught
        finally:
            remove_mem_hooks()
        self.reached = error is not None
        self.calls = [strike.mode]
        if error is not None:
            return None, without_frames(error)
        return snapshot(value), None

    def run(self):
        """Returns the result of the first attempt, which is None where that raised."""
        scene, fake = self.scene, self.gpu.fake
        case, scene.case = scene.case, None
        before = references(case)
        result, error = self.attempt(case)
        if error is None:
            expected = self.expected and self.expected.result
            right = self.expected is None or self.answers or result == expected
            require(right, lambda: f"a wrong result: {result!r}, not {expected!r}")
        else:
            self.require_documented(error)
        spares_outputs = isinstance(error, MemoryError) and str(error).startswith(case.operator)
        del error
        self.wait_for_all()
        require(references(case) == before, f"references: {references(case)}, not {before}")
        require_released(case)
        require(fake.current_device() == scene.current_device, "another current device")
        if self.loses:
            self.require_loss(case)
        else:
            self.require_foreign_error()
            if spares_outputs:
                found = [contents(output) for output in case.outputs]
                require(found == scene.outputs, "an output was changed in spite of the MemoryError")
            del case
            self.require_survival()
        misuse = fake.take_misuse()
        require(not misuse, misuse)
        return result

    def require_foreign_error(self):
        """Nobody has taken it, though CUDA may have put one of ours in its place."""
        fake = self.gpu.fake
        require(fake.taken(FOREIGN) == self.scene.taken, "another library's error was taken away")
        latched = fake.library.cudaGetLastError()
        require(latched in (0, FOREIGN), f"error {latched} is left for others to stumble over")

    def struck(self):
        """The names of all calls that failed."""
        names = []
        for strike in self.strikes:
            last = NEVER if strike.mode == "from then on" else strike.number
            names += self.log[strike.number - 1 : last]
        return names

    def wait_for_all(self):
        """After this nothing may hold an array of others because of work that uses it."""
        self.scene.spare = None  # with an array that is given back goes what had to wait
        if self.loses:
            # Nobody waits for what was queued. A GPU would no longer do it; the fake does, where
            # only one call has told of the end, and shall not do so when the operands are gone.
            self.gpu.fake.run()
            return
        for ordinal in range(2):
            with contextlib.suppress(IndexError):  # of which nobody was told because of the other
                self.gpu.gpuops.synchronize(ordinal)

    def require_documented(self, error):
        """The exception is that of one of the faults, and says all that there is to say."""
        gpuops, text = self.gpu.gpuops, str(error)
        require(self.calls, f"{error!r}, though nothing failed")
        if isinstance(error, MemoryError) and str(error).startswith("Unable to allocate"):
            # NumPy's own: it does not know what has kept its allocator from it.
            had_memory = self.path.group != "pinned_memory"
            had_memory &= not (self.starves and numpy_asks_python())
            require(not had_memory, f"{error!r}: NumPy had memory")
            return
        if isinstance(error, MemoryError):
            require(OUT_OF_MEMORY in self.codes, f"{error!r} for another code")
            return
        if type(error).__name__ in self.answers:
            return
        require(not self.starves, f"{error!r} for want of memory")
        require(isinstance(error, gpuops.DeviceError), f"{error!r} is not documented")
        require(error.code in self.codes, f"{error!r} has code {error.code}")
        is_lost = isinstance(error, gpuops.DeviceLostError)
        require(is_lost == (error.code in FATAL), f"{error!r} for code {error.code}")
        known = error.name.startswith("cudaError") or error.name == "unrecognized error code"
        require(known, f"{error!r} has name {error.name!r}")
        require(f"{error.name} ({error.code})" in text, f"no code in {text!r}")
        require(error.operator and text.startswith(error.operator), f"no operator in {text!r}")
        owners = (gpuops, gpuops.DeviceArray, gpuops.Stream, gpuops.Event, gpuops.Module)
        known = any(hasattr(owner, error.operator) for owner in owners)
        require(known or error.operator in ("saxpy", "repr"), f"operator {error.operator!r}")
        if not is_lost:
            require(any(call in text for call in self.log), f"no CUDA function in {text!r}")

    def require_survival(self):
        """After an error of one call, everything is as it was, and the next call is right."""
        gc.collect()
        case = self.path.prepare(self.gpu)
        result = snapshot(case.run())
        if self.expected is None:
            return
        right = result == self.expected.result
        require(right, lambda: f"the next call is wrong: {result!r}")
        case = None
        gc.collect()
        if {"cudaGetDevice", "cudaSetDevice"} & set(self.struck()):
            return  # what was to be freed on a device that cannot be made current stays there
        left, expected = footprint(self.gpu), self.expected.footprint
        extra = {name: (left[name], expected[name]) for name in left if left[name] > expected[name]}
        require(not extra, f"left behind (found, expected): {extra}")

    def require_loss(self, case):
        """After a fatal error the GPU is gone at once and for ever, and the CPU goes on."""
        gpuops, fake = self.gpu.gpuops, self.gpu.fake
        try:
            gpuops.synchronize(0)
            gpuops.synchronize(0)
        except gpuops.DeviceLostError as error:
            require(error.code in self.codes, f"lost by {error.code}")
        else:
            require(False, "a fatal error was not noticed")
        with fake.fail(NEVER, 1):
            try:
                gpuops.to_device(np.arange(3.0))
            except gpuops.DeviceLostError as error:
                require(error.code in self.codes, f"lost by {error.code}")
            else:
                require(False, "an array was brought to a GPU that is lost")
            try:
                case.run()
            except gpuops.DeviceLostError as error:
                require(error.code in self.codes, f"lost by {error.code}")
            except MemoryError:  # NumPy's own, for which we allocate
                require(self.path.group == "pinned_memory", "a MemoryError of a lost GPU")
            del case
            gc.collect()
            require(fake.log() == [], f"a lost GPU is called: {fake.log()}")
        result = gpuops.gather(np.arange(3.0), [2, 0], device="cpu")
        require(result.tolist() == [2, 0], "the CPU does not go on")


def starves(strikes):
    return any(strike.mode in (NO_MEMORY, ALWAYS_NO_MEMORY) for strike in strikes)


def run_step(scene, strikes, expected=None):
    """Runs a step in a process of its own."""
    # Where Python's memory fails the process ends as C ends one, which writes what gcov has
    # counted: the ways out of that are taken nowhere else. Of CUDA's errors other tests take them,
    # and there are too many steps for the 6 ms that it lasts.
    leave = ctypes.CDLL(None).exit if scene.starves else os._exit
    fork = copy_process if scene.is_set else os.fork
    outcome, status = apart(
        run_here,
        scene,
        strikes,
        expected,
        fork=fork,
        leave=leave,
        processor_seconds=STEP_SECONDS,
    )
    outcome = outcome or Outcome(None, True, [], None, {})
    if status != 0 and not outcome.problem:
        outcome = outcome._replace(problem=f"the process ended with {status}")
    return outcome


def run_here(scene, strikes, expected):
    step = Step(scene, strikes, expected)
    result, problem, left = None, None, {}
    try:
        if not scene.is_set:
            scene.set()
        with scene.twins:
            result = step.run()
            if expected is None:
                gc.collect()
                left = footprint(scene.gpu)
    except BrokenPromiseError as found:
        problem = str(found)
    except BaseException:
        problem = traceback.format_exc()
    if expected is not None and problem is None:  # nobody asks for more, and that can be much
        return Outcome(None, step.reached, [], None, {})
    return Outcome(problem, step.reached, step.log, result, left)


def describe(path, strikes, outcome):
    words = " ".join(str(strike) for strike in strikes)
    first = strikes[0].number
    calls = [
        f"{'->' if any(number == s.number for s in strikes) else '  '} {number} {call}"
        for number, call in enumerate(outcome.log, 1)
        if number > first - 10
    ]
    command = f'python tests/faults/sweep.py "{path}" {words}'
    return "\n".join([command, outcome.problem.rstrip(), *calls[:40]])


def clean_outcome(scene):
    mode = NO_MEMORY if scene.starves else "once"
    outcome = run_step(scene, [Strike(NEVER, 1, mode)])
    if outcome.problem:
        raise BrokenPromiseError(f"{scene.path}: nothing fails, and yet: {outcome.problem}")
    return outcome


def turn(items, number):
    return items[number % len(items)]


def strikes_at(number, shift, call="", many=False):
    """What befalls the call of a number: codes of each class, which take turns, and answers.

    Of many calls, each meets a class in one of the modes.
    """
    fatal = Strike(number, turn(FATAL, number + shift), turn(["sticky", "once"], number))
    found_out_later = Strike(number, turn(FATAL, number + shift + 9), "late")
    classes = [
        [Strike(number, code, mode) for mode in ("once", "from then on")]
        for code in (OUT_OF_MEMORY, turn(PASSING, number + shift))
    ]
    for strikes in [*classes, [fatal, found_out_later]]:
        yield from [turn(strikes, number + shift)] if many else strikes
    for code in TOLD_APART.get(call, ()):
        yield Strike(number, code, "once")


def number_before_first(path):
    """Another one on each path, where not all calls are to fail."""
    return 1 + sum(map(ord, str(path))) % EVERY - EVERY


def sweep(gpu, path):
    """Fails every call of a path in turn; returns the failures and how many steps there were."""
    failures, steps, reached, scene = [], 0, True, scene_of(gpu, path)
    expected = clean_outcome(scene)
    require(expected.log, f"{path}: calls nothing, or not this runtime")
    shift = sum(map(ord, str(path)))
    number = number_before_first(path)
    while reached:
        number += EVERY
        call = expected.log[number - 1] if number <= len(expected.log) else ""
        for strike in strikes_at(number, shift, call, len(expected.log) > MANY_CALLS):
            outcome = run_step(scene, [strike], expected)
            steps += 1
            if outcome.problem:
                failures.append(describe(path, [strike], outcome))
            reached = outcome.reached
            if not reached:
                break  # nothing has failed, nor would it in any other mode
    return failures, steps


def sweep_pairs(gpu, path):
    """The same with two calls: of the second one it matters that it comes after the first.

    That may end the context, which the error of the first does not tell of.
    """
    failures, steps, first, reached = [], 0, number_before_first(path), True
    scene = scene_of(gpu, path)
    expected = clean_outcome(scene)
    while reached:
        first += EVERY
        second, both = first, True
        while both:
            second += 1
            code = turn([OUT_OF_MEMORY, *PASSING], first + second)
            later = turn(turn([PASSING, FATAL], first + second), second)
            strikes = [Strike(first, code, "once"), Strike(second, later, "once")]
            outcome = run_step(scene, strikes, expected)
            steps += 1
            both = outcome.reached
            if outcome.problem:
                failures.append(describe(path, strikes, outcome))
        reached = check_reaches(scene, first, expected)
    return failures, steps


def check_reaches(scene, number, expected):
    return run_step(scene, [Strike(number, 1, "once")], expected).reached


def sweep_memory(gpu, path):
    """Fails every allocation of Python's in turn, alone and with all that come after it."""
    failures, steps, number, quiet = [], 0, number_before_first(path), 0
    scene = scene_of(gpu, path, starves=True)
    expected = clean_outcome(scene)
    while quiet < MOST_TOLERATED:
        number += EVERY
        quiet += EVERY
        for mode in (NO_MEMORY, ALWAYS_NO_MEMORY):
            strike = Strike(number, OUT_OF_MEMORY, mode)
            outcome = run_step(scene, [strike], expected)
            steps += 1
            if outcome.reached:
                quiet = 0
            if outcome.problem:
                failures.append(describe(path, [strike], outcome))
    return failures, steps


# All codes.


def documented_codes():
    """Of each error in the runtime's header its name, the code, and what is said about it."""
    source = "#include <driver_types.h>\n"
    command = [build.find_nvcc(), "-x", "c", "-E", "-Xcompiler=-CC", "-"]
    header = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    (codes,) = re.findall(r"enum [^{}]*\bcudaError\s*\{(.*?)\n\}", header.stdout, re.DOTALL)
    found = re.findall(r"/\*\*(.*?)\*/\s*cuda(Error\w+)\s*=\s*(\d+)", codes, re.DOTALL)
    return [
        (f"cuda{name}", int(code), " ".join(text.replace("*", " ").split()))
        for text, name, code in found
    ]


class FunctionOnPath(NamedTuple):
    """A function of CUDA, and a path that calls it."""

    function: str
    path: object
    codes: list


# Called only where something takes long, which on a busy machine anything may. test_transfer.py
# makes it fail, with every code, where it is called for certain.
AFTER_A_WHILE = {"cudaEventSynchronize"}


def functions_on_paths(gpu, paths):
    """Each function that is called, with the path on which that takes the fewest calls."""
    codes, found = [code for _, code, _ in documented_codes()], {}
    # None of them is set here: they are many paths, and this process is to remain without CUDA.
    logs = [(path.is_first, clean_outcome(Scene(gpu, path, False)).log, path) for path in paths]
    for _, log, path in sorted(logs, key=lambda item: (item[0], len(item[1]))):
        for function in log:
            if function not in AFTER_A_WHILE:
                found.setdefault(function, FunctionOnPath(function, path, codes))
    return list(found.values())


def outcomes_here(gpu, path, function, codes):
    """What comes of it when a function fails with each code, where the call is made at all."""
    gpu.fake.set_scheduler("lazy")
    if not path.is_first:
        warm_up(gpu)
    outcomes = {}
    with twins(gpu):
        for code in codes:
            case, error = path.prepare(gpu), None
            with gpu.fake.fail(1, code, function=function) as fault:
                try:
                    case.run()
                except Exception as caught:
                    error = without_frames(caught)
            if fault.reached:
                outcomes[code] = describe_error(error, code)
    return outcomes


def describe_error(error, code):
    """An error but for which code it is."""
    if error is None:
        return "no error"
    text = re.sub(r"failed with .*", "failed", str(error))
    return f"{type(error).__name__}: {text}, with the code: {getattr(error, 'code', None) == code}"


def passing_outcomes(gpu, place, codes):
    """One process for all codes, and for those at which nobody calls any more, one for each."""
    outcomes, status = apart(outcomes_here, gpu, place.path, place.function, codes)
    outcomes = outcomes or {UNKNOWN: f"the process ended with {status}"}
    for code in codes:
        if code not in outcomes:
            found, status = apart(outcomes_here, gpu, place.path, place.function, [code])
            outcomes |= found or {code: f"not called, or the process ended with {status}"}
    return outcomes


def sweep_codes(gpu, place):
    """Fails a function, the first time that the path calls it, with every code there is."""
    others = {OUT_OF_MEMORY, *FATAL, *TOLD_APART.get(place.function, ())}
    others |= set(ABSENCE) if place.function == "cudaGetDeviceCount" else set()
    codes = [UNKNOWN, *(code for code in place.codes if code not in others)]
    outcomes = passing_outcomes(gpu, place, codes)  # before this process calls CUDA
    failures = [
        f"{place.path}: {place.function} fails with {code}: {outcome}, not {outcomes[UNKNOWN]}"
        for code, outcome in outcomes.items()
        if outcome != outcomes[UNKNOWN]
    ]
    scene = scene_of(gpu, place.path)
    expected = clean_outcome(scene)
    number = expected.log.index(place.function) + 1
    for code in FATAL:
        strike = Strike(number, code, "once")
        outcome = run_step(scene, [strike], expected)
        if outcome.problem:
            failures.append(describe(place.path, [strike], outcome))
    return failures, len(FATAL) + len(codes)


def is_starved(path):
    if path.group in OPERATOR_NAMES:
        return path.name in STARVED
    return str(path) not in NOT_STARVED


def sweep_all(gpu, paths, sweep, most):
    """Sweeps over paths, prints the failures, and tells if there are any.

    Each path has a process of its own, and so many of them are at work at once.
    """
    reader, writer = os.pipe()  # for the numbers of steps and of failures
    statuses, begun = [], 0
    while len(statuses) < len(paths):
        if begun < len(paths) and begun - len(statuses) < most:
            if os.fork() == 0:
                sweep_here(gpu, paths[begun], sweep, writer)
            begun += 1
        else:
            statuses.append(os.wait()[1])
    os.close(writer)
    with open(reader) as pipe:
        numbers = [[int(number) for number in line.split()] for line in pipe]
    steps, failed = sum(line[0] for line in numbers), sum(line[1] for line in numbers)
    print(f"{steps} steps, {failed} failures", flush=True)
    return any(statuses)


def sweep_here(gpu, path, sweep, writer):
    """Sweeps over a path in this process, and ends it."""
    status = 1
    try:
        failures, steps = sweep(gpu, path)
        for failure in failures:
            print(failure, end="\n\n", flush=True)
        os.write(writer, f"{steps} {len(failures)}\n".encode())
        status = len(failures) > 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(words):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUOPS_CACHE_DIR"] = folder  # all steps share what one of them has compiled
        return run(words)


SWEEPS = {"--pairs": sweep_pairs, "--memory": sweep_memory, "--codes": sweep_codes}


def run(words):
    gpu = load()
    chosen = next((SWEEPS[word] for word in words if word in SWEEPS), sweep)
    words = [word for word in words if word not in SWEEPS]
    if len(words) < 4:
        paths = [p for name, p in PATHS.items() if not words or words[0] in (name, p.group)]
        if chosen is sweep_pairs:
            paths = [path for path in paths if str(path) in PAIRED]
        if chosen is sweep_memory:
            paths = [path for path in paths if is_starved(path)]
        else:  # those on the CPU call nothing that could fail
            paths = [path for path in paths if path.group != "cpu"]
        if any(path.needs_nvrtc for path in paths) and not machine_code(gpu.gpuops):
            paths = [path for path in paths if not path.needs_nvrtc]
        if chosen is sweep_codes:
            paths = functions_on_paths(gpu, paths)
        return sweep_all(gpu, paths, chosen, os.cpu_count())
    path = PATHS[words[0]]
    if path.needs_nvrtc:
        machine_code(gpu.gpuops)
    strikes = [
        Strike(int(words[i]), int(words[i + 1]), words[i + 2]) for i in range(1, len(words), 3)
    ]
    scene = scene_of(gpu, path, starves(strikes))
    outcome = run_step(scene, strikes, clean_outcome(scene))
    print(describe(path, strikes, outcome) if outcome.problem else "as promised")
    return outcome.problem is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
