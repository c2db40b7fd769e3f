"""CUDA calls fail, one after the other, on every path: faults/sweep.py has the paths and promises.

Here stand what starts it, what the texts of errors say, and that the fake's faults are faults.
"""

import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from faults.apart import apart
from faults.fake import Fake
from faults.paths import PATHS
from faults.sweep import (
    ABSENCE,
    FATAL,
    PASSING,
    TOLD_APART,
    Strike,
    documented_codes,
    set_nomemory,
    strikes_at,
)
from helpers import constant, run_child
from operators import OPERATORS, ROOT, without_comments
from rtc import open_nvrtc, saxpy_module

SWEEP = Path(__file__).parent / "faults" / "sweep.py"

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_DEVICE = 101
ILLEGAL_ADDRESS = 700
LAUNCH_FAILURE = 719
UNKNOWN = 999
SLOTS = constant("stream.cu", "SLOTS")


# The sweeps.


def sweep(fake_folder, *words, every=1):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUOPS_")}
    environment["GPUOPS_TEST_EVERY"] = os.environ.get("GPUOPS_TEST_EVERY", str(every))
    # A thread of NumPy's would not survive the forks.
    environment |= {"GPUOPS_FAKE_BUILD": str(fake_folder), "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-P", str(SWEEP), *words], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout[-20_000:] + child.stderr[-5_000:]
    steps = [int(count) for count in re.findall(r"^(\d+) steps, 0 failures$", child.stdout, re.M)]
    assert sum(steps) > 0, child.stdout


@pytest.mark.parametrize("group", sorted({path.group for path in PATHS.values()} - {"cpu"}))
def test_every_cuda_call_may_fail(fake_device, fake_folder, group):
    if all(path.needs_nvrtc for path in PATHS.values() if path.group == group):
        open_nvrtc(fake_device.gpuops)
    sweep(fake_folder, group)


def test_two_cuda_calls_may_fail(fake_folder):
    """Of the first ones every third: `.ci/run long` has all of them."""
    sweep(fake_folder, "--pairs", every=3)


def test_every_function_may_fail_with_every_code(fake_folder):
    sweep(fake_folder, "--codes")


@pytest.mark.skipif(set_nomemory is None, reason="this interpreter has no _testcapi")
def test_every_allocation_of_python_may_fail(fake_folder):
    sweep(fake_folder, "--memory")


def test_what_ends_the_context_is_what_the_header_says(fake_folder):
    """And two errors of the hardware, of which it does not say how they end."""
    said = {code for _, code, text in documented_codes() if "terminated and relaunched" in text}
    assert set(FATAL) == said | {214, 220}


def test_no_code_is_told_apart_but_those_of_the_classes(fake_folder):
    """What the package does with a code of its own is a case for the sweep."""
    codes = {name: code for name, code, _ in documented_codes()}
    sources = [path for path in (ROOT / "kernels").iterdir() if path.suffix in (".cu", ".cuh")]
    text = "\n".join(without_comments(path.read_text()) for path in sources)
    named = {codes[name] for name in re.findall(r"\bcudaError[A-Z]\w+", text)}
    answers = {code for codes in TOLD_APART.values() for code in codes}
    assert named == {OUT_OF_MEMORY, *FATAL, *ABSENCE, *answers}


def test_a_new_operator_is_covered():
    for operator in OPERATORS:
        names = {path.name for path in PATHS.values() if path.group == operator.name}
        assert {"the first call", "host arrays", "device arrays", "strided device arrays"} <= names
        assert f"cpu: {operator.name} of arrays" in PATHS


def test_every_code_comes_in_every_mode():
    for shift in range(3):
        strikes = [strike for number in range(1, 57) for strike in strikes_at(number, shift)]
        for mode, codes in {
            "once": [*PASSING, *FATAL, OUT_OF_MEMORY],
            "from then on": [*PASSING, OUT_OF_MEMORY],
            "sticky": FATAL,
            "late": FATAL,
        }.items():
            assert {strike.code for strike in strikes if strike.mode == mode} == set(codes)


def test_of_many_calls_each_meets_every_class():
    for number in range(1, 57):
        first, second = ([*strikes_at(number, shift, many=True)] for shift in (2, 3))
        assert len(first) == len(second) == 3
        for strikes in (first, second):
            memory, passing, fatal = (strike.code for strike in strikes)
            assert memory == OUT_OF_MEMORY and passing in PASSING and fatal in FATAL
        for one, other in zip(first, second, strict=True):
            assert one.mode != other.mode


def test_a_broken_promise_is_told(fake_folder):
    """A sweep that finds nothing has looked: what no path promises is reported by name."""
    script = """
    from faults import sweep
    from faults.paths import PATHS, Case, Path

    def prepare(gpu):
        x = gpu.gpuops.to_device([1.0])
        def run():
            try:
                return x.to_host()
            except gpu.gpuops.DeviceError:
                return "nothing happened"
        return Case(run, [x])

    PATHS["deaf: path"] = Path("deaf", "path", prepare)
    assert sweep.main(["deaf: path"]), "no failure"
    """
    environment = {**os.environ, "GPUOPS_FAKE_BUILD": str(fake_folder), "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(SWEEP.parent.parent)
    environment["GPUOPS_TEST_EVERY"] = "1"  # the call in question may be any
    child = subprocess.run(
        [sys.executable, "-P", "-c", "\n".join(line[4:] for line in script.splitlines())],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert re.search(r"^python tests/faults/sweep.py \"deaf: path\" 2 \d+ '", child.stdout, re.M)
    assert "a wrong result: 'nothing happened'" in child.stdout
    assert "-> 2 cudaMemcpyAsync" in child.stdout


def test_what_goes_on_and_on_is_ended():
    def spin():
        while True:
            pass

    assert apart(spin, processor_seconds=0.05) == (None, -signal.SIGPROF)


# What errors say.


@pytest.fixture
def gpuops(fake_device):
    with fake_device.gpuops.device("cuda:0"):
        yield fake_device.gpuops


@pytest.fixture
def fake(fake_device):
    yield fake_device.fake
    assert fake_device.fake.take_misuse() == ""


def test_an_error_names_code_call_operator_operands_and_device(gpuops, fake):
    x, indices = gpuops.to_device(np.zeros((3, 4))), gpuops.to_device([0, 2])
    with (
        fake.fail(1, UNKNOWN, function="cudaLaunchKernel") as fault,
        pytest.raises(gpuops.DeviceError) as caught,
    ):
        gpuops.gather(x, indices)
    error = caught.value
    assert fault.call == "cudaLaunchKernel"
    assert type(error) is gpuops.DeviceError
    assert (error.code, error.name, error.operator) == (UNKNOWN, "cudaErrorUnknown", "gather")
    assert str(error) == (
        "gather(x: float64 (3, 4), indices: int64 (2,)) on cuda:0: cudaLaunchKernel failed with "
        "cudaErrorUnknown (999): unknown error"
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda gpuops, x: gpuops.saxpy(2.0, x, x, out=x),
            "saxpy(a: float32 (), x: float32 (2, 3), y: float32 (2, 3), out: float32 (2, 3))",
        ),
        (
            lambda gpuops, x: gpuops.scatter_add(x, [0], np.float32(1)),
            "scatter_add(x: float32 (2, 3), indices: int64 (1,), values: float32 ())",
        ),
        (lambda gpuops, x: gpuops.sigmoid(x), "sigmoid(x: float32 (2, 3))"),
        (lambda gpuops, x: gpuops.sigmoid(np.float32(x.to_host())), "sigmoid(x: float32 (2, 3))"),
        (lambda gpuops, x: x.to_host(), "to_host"),
        (lambda gpuops, x: gpuops.asarray(x, copy=True), "asarray"),
        (lambda gpuops, x: x.fill(1), "fill"),
    ],
)
def test_operands_of_an_error(gpuops, fake, call, text):
    x = gpuops.to_device(np.ones((2, 3), np.float32))
    found = []
    for number in range(1, 30):
        with fake.fail(number, INVALID_VALUE):
            try:
                call(gpuops, x)
            except gpuops.DeviceError as error:
                found.append(str(error).partition(" on cuda:0: ")[0])
    assert text in found


def test_operands_of_foreign_arrays(gpuops, fake):
    class Foreign:
        def __init__(self, array):
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    x = Foreign(gpuops.to_device(np.ones(3)))
    with (
        fake.fail(1, INVALID_VALUE, function="cudaPointerGetAttributes"),
        pytest.raises(gpuops.DeviceError, match="^sigmoid") as caught,
    ):
        gpuops.sigmoid(x)
    assert caught.value.operator == "sigmoid"


def test_the_name_of_a_kernel(fake_device, gpuops, fake):
    open_nvrtc(gpuops)
    kernel = saxpy_module(fake_device)["saxpy"]
    x = gpuops.to_device(np.ones(3, np.float32))
    with (
        fake.fail(1, 701, function="cudaLaunchKernel"),
        pytest.raises(gpuops.DeviceError, match="^saxpy on cuda:0: cudaLaunchKernel failed"),
    ):
        kernel[1, 32](1.0, x, x, 3)


def test_names_of_axes_that_do_not_fit_in_a_message(gpuops, fake):
    x = gpuops.to_device(np.ones((1,) * 64))
    with (
        fake.fail(1, UNKNOWN, function="cudaLaunchKernel"),
        pytest.raises(gpuops.DeviceError, match="cudaLaunchKernel failed with"),
    ):
        gpuops.sigmoid(x)


def test_a_message_is_of_the_first_error(gpuops, fake):
    """What fails on the way out does not stand in its place."""
    x = np.ones((3, 4))
    with (
        fake.fail(1, UNKNOWN, function="cudaLaunchKernel"),
        fake.fail(1, INVALID_VALUE, "from then on", "cudaFreeAsync"),
        fake.fail(1, INVALID_VALUE, function="cudaStreamSynchronize"),
        pytest.raises(gpuops.DeviceError, match="cudaLaunchKernel") as caught,
    ):
        gpuops.sigmoid(x)
    assert caught.value.code == UNKNOWN


def test_what_is_given_back_after_a_failure_says_nothing(gpuops, fake):
    """Nor does it where it fails, too."""
    after = []
    for number in range(1, 10):
        x = np.ones((3, 4))
        gpuops.scatter(x, [0], 1)  # the next one finds the memory of this one
        with (
            fake.fail(1, UNKNOWN, function="cudaLaunchKernel") as launch,
            fake.fail(number, INVALID_VALUE, function="cudaGetDevice") as later,
            pytest.raises(gpuops.DeviceError) as caught,
        ):
            gpuops.scatter(x, [0], 1)
        assert caught.value.code == (UNKNOWN if launch.reached else INVALID_VALUE)
        after.append(launch.reached and later.reached)
    assert any(after)
    gpuops.synchronize()


# Out of memory.


def test_an_allocation_is_tried_again_once(gpuops, fake):
    gc.collect()  # what an exception still holds may have room for more beside it
    gpuops.empty_cache()
    with fake.fail(1, OUT_OF_MEMORY, function="cudaMallocFromPoolAsync"):
        x = gpuops.to_device(np.arange(3.0))
        log = fake.log()
    assert x.to_host().tolist() == [0, 1, 2]
    assert log.count("cudaMallocFromPoolAsync") == 2
    begin = log.index("cudaMallocFromPoolAsync")
    between = log[begin : log.index("cudaMallocFromPoolAsync", begin + 1)]
    assert "cudaDeviceSynchronize" in between and "cudaMemPoolTrimTo" in between


def test_out_of_memory_has_numbers(gpuops, fake):
    gpuops.empty_cache()
    x = np.zeros(10000)  # more than a slab has room for
    with fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaMallocFromPoolAsync"):
        with pytest.raises(MemoryError) as caught:
            gpuops.sigmoid(x)
        log = fake.log()
    assert log.count("cudaMallocFromPoolAsync") == 2
    available = gpuops.memory_info().free
    assert re.fullmatch(
        r"sigmoid\(x: float64 \(10000,\)\): out of memory on cuda:0: 80000 bytes were asked for, "
        rf"{available} are free on the device, and arrays use \d+",
        str(caught.value),
    )
    assert (gpuops.sigmoid(x) == 0.5).all()


def test_running_out_of_memory_after_the_work_has_begun_is_no_memory_error(gpuops, fake):
    """A MemoryError promises that nothing was written."""
    x = np.zeros(3)
    with (
        fake.fail(1, OUT_OF_MEMORY, function="cudaStreamSynchronize"),
        pytest.raises(gpuops.DeviceError) as caught,
    ):
        gpuops.sigmoid(x, out=x)
    assert caught.value.code == OUT_OF_MEMORY


def test_a_bad_index_is_not_told_of_by_a_later_call(gpuops, fake):
    """Of one whose call ended with another error, and left a note where thousands come after it."""
    x = np.arange(10.0)
    with fake.fail(1, UNKNOWN, function="cudaStreamSynchronize"), pytest.raises(gpuops.DeviceError):
        gpuops.gather(np.zeros(10_000), np.full(10_000, 10_000))
    fake.set_slab_bytes(0)
    for _ in range(SLOTS):
        gpuops.multiply(x, x)
    for _ in range(SLOTS):  # and in its place a new one is
        with pytest.raises(IndexError, match="index 10 is out of bounds"):
            gpuops.gather(x, [10])


ALL_PLACES_IN_USE = """
import gpuops
x, out = gpuops.zeros(5), gpuops.zeros(1)
good, bad = gpuops.to_device([1]), gpuops.to_device([9])
streams = [gpuops.Stream() for _ in range({count})]
for stream in streams:
    gpuops.gather(x, good, out=out, stream=stream)
gpuops.gather(x, bad, out=out, stream=streams[-2])
del stream, streams[-1]
try:
    streams[-1].synchronize()
except IndexError as error:
    print(str(error).partition(" (")[0])
"""


def test_no_bad_index_is_lost_where_all_places_for_them_are_in_use(fake_device):
    """The last of them is shared by all streams that there are no others for."""
    found = run_child(fake_device.gpuops, ALL_PLACES_IN_USE.format(count=SLOTS + 1))
    assert found == "index 9 is out of bounds for axis 0 with size 5\n"


NO_MEMORY_FOR_PLACES = """
import gpuops, numpy as np
from faults.fake import Fake
fake = Fake({folder!r})
fake.set_memory_limit(64 << 20)
x, i = np.arange(20 << 17, dtype="f8"), np.arange(1 << 20)
gpuops.gather(x, i, mode="clip")
gpuops.empty_cache()
{short}
assert (gpuops.gather(x, i) == i).all()
try:
    gpuops.gather(x, x.size + i)
except IndexError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "short",
    [
        "fake.leave_free(36 << 20)  # just what gather takes",
        "gpuops.zeros((64 << 20) - 4096, 'u1', device='cuda')  # which is kept for later",
    ],
)
def test_memory_for_bad_indices_is_found(fake_device, fake_folder, short):
    """With the first call that may have one: before gather takes all there is, or in the pool."""
    folder = str(fake_folder / "cudart")
    source = NO_MEMORY_FOR_PLACES.format(folder=folder, short=short)
    found = run_child(fake_device.gpuops, source)
    assert found == "index 2621440 is out of bounds for axis 0 with size 2621440\n"


# Errors of others.


def test_an_error_of_another_library_is_left_to_it(gpuops, fake):
    x = gpuops.to_device(np.arange(3.0))
    assert fake.library.cudaSetDevice(99) == INVALID_DEVICE
    assert gpuops.gather(x, [1, 0]).to_host().tolist() == [1, 0]
    gpuops.synchronize()
    assert fake.library.cudaPeekAtLastError() == INVALID_DEVICE
    assert fake.library.cudaGetLastError() == INVALID_DEVICE


# The first question.


def test_an_answer_that_may_pass_is_not_kept(fake_device, fake_folder):
    source = f"""
import gpuops
from faults.fake import Fake
fake = Fake({str(fake_folder / "cudart")!r})
with fake.fail(1, {UNKNOWN}):
    print(gpuops.is_available(), gpuops.device_count())
with fake.fail(1, {UNKNOWN}):
    print(gpuops.is_available(), fake.log())
"""
    assert run_child(fake_device.gpuops, source) == "False 2\nTrue []\n"


def test_an_answer_for_good_is_kept(fake_device, fake_folder):
    source = f"""
import gpuops
from faults.fake import Fake
fake = Fake({str(fake_folder / "cudart")!r})
with fake.fail(1, 803, function="cudaGetDeviceCount"):
    for _ in range(2):
        try:
            gpuops.zeros(3, device="cuda")
        except gpuops.DeviceError as error:
            print(error.code, gpuops.is_available())
    print(fake.log().count("cudaGetDeviceCount"))
"""
    assert run_child(fake_device.gpuops, source) == "803 False\n803 False\n1\n"


# The end of the GPU.

LOSE = """
import ctypes, sys
import numpy as np
import gpuops
from faults.fake import Fake

fake = Fake(FOLDER)
x = gpuops.to_device(np.arange(3.0))
stream, event = gpuops.Stream(), gpuops.Event()
event.record(stream)
y = gpuops.gather(x, [0, 1], stream=stream)
fault = fake.fail(1, 700, MODE)
fault.__enter__()
try:
    gpuops.gather(x, [1, 2]).to_host()
except gpuops.DeviceLostError as error:
    print(error.code, error.name, error.operator)
"""


@pytest.mark.parametrize("mode", ["once", "sticky", "late"])
def test_a_process_that_has_lost_the_gpu_goes_on_and_ends(fake_device, fake_folder, mode):
    source = LOSE.replace("FOLDER", repr(str(fake_folder / "cudart"))).replace("MODE", repr(mode))
    source += "\n".join(
        [
            "",
            "for call in (lambda: gpuops.zeros(3), stream.synchronize, event.query, x.to_host):",
            "    try:",
            "        call()",
            "    except gpuops.DeviceLostError as error:",
            "        print(error.code)",
            "print(gpuops.gather([1, 2, 3], [2], device='cpu'))",
            "print(gpuops.is_available())",
        ]
    )
    printed = run_child(fake_device.gpuops, source).splitlines()
    assert re.fullmatch(r"700 cudaErrorIllegalAddress (gather|to_host)", printed[0])
    assert printed[1:-1] == ["700"] * 4 + ["[3]"]


# The fake's faults.


@pytest.fixture
def own(fake_folder, tmp_path):
    """A second runtime in this process, which no package calls."""
    fake = Fake(shutil.copytree(fake_folder / "cudart", tmp_path / "cudart"))
    yield fake
    fake.reset()
    assert fake.take_misuse() == ""


def allocate(fake, size=64):
    pointer = ctypes.c_void_p()
    code = fake.library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
    return code, pointer


def fill(fake, pointer, value):
    return fake.library.cudaMemsetAsync(pointer, value, ctypes.c_size_t(64), None)


def fetch(fake, pointer):
    host = ctypes.create_string_buffer(64)
    return fake.library.cudaMemcpyAsync(host, pointer, ctypes.c_size_t(64), 2, None), host.raw


def test_the_call_of_a_number_fails_once(own):
    _, pointer = allocate(own)
    with own.fail(2, UNKNOWN) as fault:
        codes = [fill(own, pointer, 1) for _ in range(4)]
        log = own.log()
    assert codes == [0, UNKNOWN, 0, 0]
    assert fault.reached and fault.call == "cudaMemsetAsync"
    assert log == ["cudaMemsetAsync"] * 4
    assert own.library.cudaGetLastError() == UNKNOWN
    assert own.library.cudaGetLastError() == 0
    assert own.library.cudaFree(pointer) == 0


def test_all_calls_fail_from_then_on(own):
    _, pointer = allocate(own)
    with own.fail(2, UNKNOWN, "from then on"):
        assert [fill(own, pointer, 1) for _ in range(4)] == [0] + 3 * [UNKNOWN]
    assert fill(own, pointer, 1) == 0
    assert own.library.cudaFree(pointer) == 0


def test_a_function_fails(own):
    with own.fail(2, OUT_OF_MEMORY, function="cudaMalloc") as fault:
        (first, pointer), count = allocate(own), ctypes.c_int()
        assert own.library.cudaGetDevice(ctypes.byref(count)) == 0
        second, nothing = allocate(own)
    assert (first, second) == (0, OUT_OF_MEMORY)
    assert fault.call == "cudaMalloc" and not nothing
    assert own.library.cudaFree(pointer) == 0


def test_a_fault_that_is_not_reached(own):
    with own.fail(3, UNKNOWN) as fault:
        _, pointer = allocate(own)
        assert own.library.cudaFree(pointer) == 0
    assert not fault.reached


def test_two_faults(own):
    with own.fail(1, UNKNOWN), own.fail(3, INVALID_VALUE) as last:
        codes = [own.library.cudaDeviceSynchronize() for _ in range(4)]
    assert codes == [UNKNOWN, 0, INVALID_VALUE, 0]
    assert last.call == "cudaDeviceSynchronize"


def test_what_releases_does_so_and_fails(own):
    _, pointer = allocate(own)
    before = own.live().allocations
    with own.fail(1, UNKNOWN):
        assert own.library.cudaFree(pointer) == UNKNOWN
    assert own.live().allocations == before - 1


def test_a_sticky_error_stays_until_the_end(own):
    _, pointer = allocate(own)
    with own.fail(1, ILLEGAL_ADDRESS, "sticky"):
        assert fill(own, pointer, 1) == ILLEGAL_ADDRESS
    for call in (
        lambda: fill(own, pointer, 1),
        lambda: fetch(own, pointer)[0],
        lambda: allocate(own)[0],
        lambda: own.library.cudaFree(pointer),
        own.library.cudaDeviceSynchronize,
        own.library.cudaPeekAtLastError,
        own.library.cudaGetLastError,
        own.library.cudaGetLastError,
    ):
        assert call() == ILLEGAL_ADDRESS
    assert own.live().allocations == 1
    count = ctypes.c_int()
    assert own.library.cudaGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 2
    own.reset()
    assert own.library.cudaFree(pointer) == 0


def test_a_late_error_is_told_to_whoever_waits(own):
    _, pointer = allocate(own)
    assert fill(own, pointer, 1) == 0
    with own.fail(1, LAUNCH_FAILURE, "late"):
        assert fill(own, pointer, 2) == 0
        assert fill(own, pointer, 3) == 0
        assert own.library.cudaGetLastError() == 0
        assert own.library.cudaDeviceSynchronize() == LAUNCH_FAILURE
        assert fill(own, pointer, 4) == LAUNCH_FAILURE
    own.reset()
    # No work was done any more.
    assert fetch(own, pointer) == (0, b"\1" * 64)
    assert own.library.cudaFree(pointer) == 0


def test_a_late_error_is_told_by_a_copy_to_pageable_memory(own):
    _, pointer = allocate(own)
    with own.fail(1, LAUNCH_FAILURE, "late"):
        assert fill(own, pointer, 2) == 0
        assert fetch(own, pointer)[0] == LAUNCH_FAILURE
    own.reset()
    assert own.library.cudaFree(pointer) == 0


def test_a_device_that_fails_to_start_is_current(own):
    with own.fail(1, UNKNOWN):
        assert own.library.cudaSetDevice(1) == UNKNOWN
    assert own.current_device() == 1
    own.library.cudaSetDevice(0)


def test_a_mode_that_there_is_not(own):
    with own.fail(1, UNKNOWN, "often"):
        pass
    assert "a fault of mode often" in own.take_misuse()


def test_the_command_of_a_step():
    assert str(Strike(3, 700, "sticky")) == "3 700 'sticky'"


def test_memory_outlives_work_whose_end_cannot_be_marked(gpuops, fake):
    """Neither an event nor waiting is to be had: what the work uses stays until it is done."""
    fake.set_scheduler("lazy")
    stream, home = gpuops.Stream(), gpuops.Stream()
    x = gpuops.to_device(np.arange(1 << 16), stream=home)
    fake.run()
    with (
        fake.fail(2, UNKNOWN, "from then on", "cudaEventRecord"),
        fake.fail(1, UNKNOWN, "from then on", "cudaStreamSynchronize"),
        pytest.raises(gpuops.DeviceError, match="cudaEventRecord failed"),
    ):
        gpuops.gather(x, [1, 2], stream=stream)
    assert fake.pending() > 0
    del x
    gpuops.empty_cache()
    fake.run()
    fake.set_scheduler("now")
