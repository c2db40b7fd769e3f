"""The fake CUDA runtime catches what it is there to catch: each check is seen to fail."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from faults.fake import EXIT_MISUSE, MEMORY_LIMIT, Fake

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INITIALIZATION_ERROR = 3
INVALID_CONFIGURATION = 9
STUB_LIBRARY = 34
INSUFFICIENT_DRIVER = 35
INVALID_DEVICE_FUNCTION = 98
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_RESOURCE_HANDLE = 400

HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
DEFAULT = 4

POISON = 0xDB


@pytest.fixture
def fake(fake_folder):
    fake = Fake(fake_folder / "cudart")
    assert fake.take_misuse() == ""
    before = fake.live().allocations
    yield fake
    fake.library.cudaSetDevice(0)
    fake.library.cudaGetLastError()
    fake.reset()
    assert fake.take_misuse() == ""
    assert fake.live().allocations == before


def allocate(fake, count):
    pointer = ctypes.c_void_p()
    assert fake.library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(count)) == 0
    return pointer


def copy(fake, target, source, count, kind, stream=None):
    return fake.library.cudaMemcpyAsync(
        target, source, ctypes.c_size_t(count), kind, ctypes.c_void_p(stream)
    )


def offset(pointer, count):
    return ctypes.c_void_p(pointer.value + count)


class TestMemory:
    def test_round_trip_over_poison(self, fake):
        memory = allocate(fake, 100)
        assert memory.value % 256 == 0
        host = ctypes.create_string_buffer(100)
        assert copy(fake, host, memory, 100, DEVICE_TO_HOST) == 0
        assert host.raw == bytes([POISON]) * 100
        assert copy(fake, memory, b"0123456789", 10, HOST_TO_DEVICE) == 0
        assert (
            fake.library.cudaMemsetAsync(offset(memory, 5), ord("x"), ctypes.c_size_t(2), None) == 0
        )
        assert copy(fake, host, memory, 12, DEFAULT) == 0
        assert host.raw[:12] == b"01234xx789" + bytes([POISON]) * 2
        assert fake.library.cudaFree(memory) == 0

    @pytest.mark.parametrize(("place", "side"), [(-1, "before"), (-256, "before"), (100, "after")])
    def test_damaged_red_zone(self, fake_folder, place, side):
        outcome = run_on_fake(
            fake_folder,
            f"""
            memory = allocate(fake, 100)
            ctypes.memset(offset(memory, {place}), 7, 1)
            fake.library.cudaFree(memory)
            """,
        )
        assert_caught(outcome, f"red zone {side} a device allocation of 100 bytes")

    def test_red_zones_of_live_memory_are_looked_at_too(self, fake_folder):
        outcome = run_on_fake(fake_folder, "ctypes.memset(offset(allocate(fake, 8), 8), 7, 1)")
        assert_caught(outcome, "red zone after a device allocation of 8 bytes")

    def test_write_after_free(self, fake_folder):
        outcome = run_on_fake(
            fake_folder,
            """
            memory = allocate(fake, 8)
            fake.library.cudaFree(memory)
            ctypes.memset(memory, 7, 1)
            """,
        )
        assert_caught(outcome, "allocation of 8 bytes was written to after it was freed")

    def test_host_code_that_touches_device_memory(self, fake_folder, fake):
        outcome = run_on_fake(fake_folder, "ctypes.memmove(b'01234567', allocate(fake, 8), 8)")
        sanitized = b"__asan_poison_memory_region" in fake.path.read_bytes()
        assert ("use-after-poison" in outcome.stderr) == sanitized
        assert (outcome.returncode == 0) != sanitized

    def test_freed_memory_is_poisoned_and_not_used_again(self, fake):
        first = allocate(fake, 64)
        fake.library.cudaFree(first)
        host = ctypes.create_string_buffer(64)
        assert copy(fake, host, first, 64, DEVICE_TO_HOST) == INVALID_VALUE
        assert "not inside one live device allocation" in fake.take_misuse()
        others = [allocate(fake, 64) for _ in range(100)]
        assert first.value not in [other.value for other in others]
        for other in others:
            fake.library.cudaFree(other)

    def test_quarantine_is_bounded(self, fake):
        for _ in range(1000):
            fake.library.cudaFree(allocate(fake, 1))
        for _ in range(3):
            fake.library.cudaFree(allocate(fake, MEMORY_LIMIT))

    def test_double_free(self, fake):
        memory = allocate(fake, 8)
        assert fake.library.cudaFree(memory) == 0
        assert fake.library.cudaFree(memory) == INVALID_VALUE
        assert "is not the start of a live device allocation" in fake.take_misuse()

    def test_free_of_an_address_inside(self, fake):
        memory = allocate(fake, 8)
        assert fake.library.cudaFreeAsync(offset(memory, 4), None) == INVALID_VALUE
        assert "cudaFreeAsync" in fake.take_misuse()
        assert fake.library.cudaFree(memory) == 0

    def test_byte_limit(self, fake):
        assert memory_info(fake) == (MEMORY_LIMIT, MEMORY_LIMIT)
        fake.set_memory_limit(1000)
        memory = allocate(fake, 600)
        assert memory_info(fake) == (400, 1000)
        pointer = ctypes.c_void_p(1)
        assert fake.library.cudaMalloc(ctypes.byref(pointer), 401) == MEMORY_ALLOCATION
        assert pointer.value is None
        second = allocate(fake, 400)
        assert fake.library.cudaSetDevice(1) == 0
        assert memory_info(fake) == (1000, 1000)
        for block in memory, second:
            assert fake.library.cudaFree(block) == 0
        assert fake.live().peak_bytes >= 1000

    def test_pools_and_live_objects(self, fake):
        # struct cudaMemPoolProps: allocation type 1 (pinned), no handles, a device, number 1.
        properties = (ctypes.c_int * 64)(1, 0, 1, 1)
        pool, memory = ctypes.c_void_p(), ctypes.c_void_p()
        before = fake.live()
        assert fake.library.cudaMemPoolCreate(ctypes.byref(pool), properties) == 0
        assert fake.live().pools == before.pools + 1
        size = ctypes.c_size_t(77)
        assert fake.library.cudaMallocFromPoolAsync(ctypes.byref(memory), size, pool, None) == 0
        assert fake.live().allocations == before.allocations + 1
        assert fake.live().bytes == before.bytes + 77
        assert fake.library.cudaSetDevice(1) == 0
        assert copy(fake, memory, b"1234", 4, HOST_TO_DEVICE) == 0
        assert fake.library.cudaFreeAsync(memory, None) == 0
        assert fake.live().bytes == before.bytes

    def test_pinned_memory_stands_on_both_sides(self, fake):
        pinned, device_pointer = ctypes.c_void_p(), ctypes.c_void_p()
        assert fake.library.cudaHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(16), 0) == 0
        assert fake.live().pinned_bytes == 16
        fake.library.cudaHostGetDevicePointer(ctypes.byref(device_pointer), pinned, 0)
        assert device_pointer.value == pinned.value
        memory = allocate(fake, 16)
        assert copy(fake, memory, pinned, 16, HOST_TO_DEVICE) == 0
        assert fake.library.cudaMemsetAsync(device_pointer, 7, ctypes.c_size_t(16), None) == 0
        assert ctypes.string_at(pinned, 16) == b"\7" * 16
        assert fake.library.cudaFree(pinned) == INVALID_VALUE
        assert "not the start of a live device allocation" in fake.take_misuse()
        assert fake.library.cudaFreeHost(pinned) == 0
        assert fake.library.cudaFree(memory) == 0
        assert fake.live().pinned_allocations == 0


class TestCopies:
    def test_host_pointer_as_a_device_pointer(self, fake):
        here, there = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
        assert copy(fake, there, here, 8, HOST_TO_DEVICE) == INVALID_VALUE
        assert "cudaMemcpyAsync: the target" in fake.take_misuse()
        assert fake.library.cudaGetLastError() == INVALID_VALUE
        assert fake.library.cudaMemsetAsync(there, 0, ctypes.c_size_t(8), None) == INVALID_VALUE
        assert "cudaMemsetAsync: the target" in fake.take_misuse()

    def test_device_pointer_as_a_host_pointer(self, fake):
        memory = allocate(fake, 8)
        assert copy(fake, memory, memory, 8, HOST_TO_DEVICE) == INVALID_VALUE
        assert "the source, 8 bytes at" in fake.take_misuse()
        fake.library.cudaFree(memory)
        assert copy(fake, memory, memory, 8, 0) == INVALID_VALUE
        assert "is not host memory" in fake.take_misuse()

    @pytest.mark.parametrize(("begin", "count"), [(0, 9), (4, 5), (-1, 2), (8, 1), (-1, 10)])
    def test_copy_beyond_an_allocation(self, fake, begin, count):
        memory = allocate(fake, 8)
        host = ctypes.create_string_buffer(16)
        assert copy(fake, offset(memory, begin), host, count, HOST_TO_DEVICE) == INVALID_VALUE
        assert "not inside one live device allocation" in fake.take_misuse()
        assert copy(fake, offset(memory, 8), host, 0, HOST_TO_DEVICE) == 0
        fake.library.cudaFree(memory)

    def test_memory_of_another_device(self, fake):
        memory = allocate(fake, 8)
        fake.library.cudaSetDevice(1)
        assert copy(fake, memory, b"12345678", 8, HOST_TO_DEVICE) == INVALID_VALUE
        assert "is on device 0 while device 1 is current" in fake.take_misuse()
        fake.library.cudaFree(memory)

    def test_null_and_unknown_handles(self, fake):
        memory = allocate(fake, 8)
        assert copy(fake, memory, None, 8, HOST_TO_DEVICE) == INVALID_VALUE
        assert "not host memory" in fake.take_misuse()
        for stream in 1, 2:
            assert copy(fake, memory, b"12345678", 8, HOST_TO_DEVICE, stream) == 0
        assert copy(fake, memory, b"12345678", 8, HOST_TO_DEVICE, 3) == INVALID_RESOURCE_HANDLE
        assert fake.library.cudaStreamSynchronize(ctypes.c_void_p(3)) == INVALID_RESOURCE_HANDLE
        fake.library.cudaFree(memory)


class Dimensions(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


Twin = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_uint, ctypes.c_uint
)


class Kernel:
    """Does what nvcc's start-up code does for a kernel, whose symbol can be any address."""

    def __init__(self, fake):
        self.library = fake.library
        self.name = ctypes.c_char_p(b"planted_kernel")
        self.symbol = ctypes.byref(self.name)

    def __enter__(self):
        register = self.library["__cudaRegisterFatBinary"]
        register.restype = ctypes.c_void_p
        self.module = ctypes.c_void_p(register(None))
        self.library["__cudaRegisterFunction"](
            self.module, self.symbol, None, self.name, -1, None, None, None, None, None
        )
        return self

    def __exit__(self, *exception):
        self.library["__cudaUnregisterFatBinary"](self.module)

    def give_twin(self, twin, most_threads=256):
        self.twin = Twin(twin)
        self.library.fake_cuda_twin(self.symbol, self.twin, most_threads)

    def launch(self, grid=(1, 1, 1), block=(1, 1, 1), arguments=None, shared_bytes=0, stream=None):
        return self.library.cudaLaunchKernel(
            self.symbol,
            Dimensions(*grid),
            Dimensions(*block),
            arguments,
            ctypes.c_size_t(shared_bytes),
            ctypes.c_void_p(stream),
        )


class TestKernels:
    def test_twin_runs_once_per_block(self, fake):
        seen = []
        arguments = (ctypes.c_void_p * 1)(4711)
        with Kernel(fake) as kernel:
            kernel.give_twin(lambda given, *place: seen.append((given[0], *place)))
            assert kernel.launch((3, 1, 1), (256, 1, 1), arguments) == 0
        assert seen == [(4711, block, 3, 256) for block in range(3)]

    def test_kernel_without_a_twin(self, fake):
        with Kernel(fake) as kernel:
            assert kernel.launch() == INVALID_DEVICE_FUNCTION
        assert "planted_kernel has no host twin" in fake.take_misuse()

    def test_kernel_that_is_not_registered(self, fake):
        with Kernel(fake):
            with Kernel(fake) as kernel:
                kernel.give_twin(lambda *place: None)
            assert kernel.launch() == INVALID_DEVICE_FUNCTION
        assert "an unknown kernel has no host twin" in fake.take_misuse()

    @pytest.mark.parametrize(
        ("grid", "block"),
        [
            ((0, 1, 1), (1, 1, 1)),
            ((2**31, 1, 1), (1, 1, 1)),
            ((1, 2, 1), (1, 1, 1)),
            ((1, 1, 0), (1, 1, 1)),
            ((1, 1, 1), (0, 1, 1)),
            ((1, 1, 1), (257, 1, 1)),  # the launch bounds of the kernel
            ((1, 1, 1), (1, 1, 2)),
        ],
    )
    def test_grid_outside_its_limits(self, fake, grid, block):
        with Kernel(fake) as kernel:
            kernel.give_twin(lambda *place: pytest.fail("it was run"))
            assert kernel.launch(grid, block) == INVALID_CONFIGURATION
            assert fake.library.cudaPeekAtLastError() == INVALID_CONFIGURATION

    def test_other_launch_arguments(self, fake):
        with Kernel(fake) as kernel:
            kernel.give_twin(lambda *place: None, most_threads=1024)
            assert kernel.launch(block=(1024, 1, 1)) == 0
            assert kernel.launch(shared_bytes=(48 << 10) + 1) == INVALID_VALUE
            assert kernel.launch(stream=5) == INVALID_RESOURCE_HANDLE

    def test_launch_by_stub(self, fake):
        size, stream = ctypes.c_size_t(0), None
        push = fake.library["__cudaPushCallConfiguration"]
        assert push(Dimensions(1, 1, 1), Dimensions(1, 1, 1), size, stream) != 0
        assert "<<<>>>" in fake.take_misuse()


class TestDevices:
    def test_two_h200_like_devices(self, fake):
        count, attribute = ctypes.c_int(), ctypes.c_int()
        assert fake.library.cudaGetDeviceCount(ctypes.byref(count)) == 0
        assert count.value == 2
        for number, expected in [(75, 9), (76, 0), (16, 132)]:
            assert fake.library.cudaDeviceGetAttribute(ctypes.byref(attribute), number, 1) == 0
            assert attribute.value == expected
        assert fake.library.cudaDeviceGetAttribute(ctypes.byref(attribute), 75, 2) == INVALID_DEVICE
        assert fake.library.cudaSetDevice(2) == INVALID_DEVICE
        assert fake.library.cudaSetDevice(-1) == INVALID_DEVICE
        assert fake.library.cudaDeviceGetAttribute(ctypes.byref(attribute), 9999, 0) != 0
        assert "does not know attribute 9999" in fake.take_misuse()

    def test_current_device_and_last_error_belong_to_a_thread(self, fake):
        assert fake.library.cudaSetDevice(1) == 0
        assert fake.library.cudaSetDevice(7) == INVALID_DEVICE
        there = []
        other = threading.Thread(
            target=lambda: there.extend([fake.current_device(), fake.library.cudaGetLastError()])
        )
        other.start()
        other.join()
        assert there == [0, 0]
        assert fake.current_device() == 1
        assert fake.library.cudaPeekAtLastError() == INVALID_DEVICE
        assert fake.library.cudaGetLastError() == INVALID_DEVICE
        assert fake.library.cudaGetLastError() == 0

    def test_calls_are_counted(self, fake):
        fake.reset()
        assert fake.calls() == 0
        for _ in range(3):
            fake.library.cudaSetDevice(0)
        fake.library.cudaStreamSynchronize(None)
        assert fake.calls("cudaSetDevice") == 3
        assert fake.calls("cudaMalloc") == 0
        assert fake.calls() == 4

    @pytest.mark.parametrize(
        ("state", "error", "driver_major"),
        [
            ("fine", 0, 13),
            ("none", INSUFFICIENT_DRIVER, 0),
            ("old", INSUFFICIENT_DRIVER, 12),
            ("stub", STUB_LIBRARY, 0),
            ("no-device", NO_DEVICE, 13),
        ],
    )
    @pytest.mark.parametrize("from_environment", [False, True])
    def test_driver_states(self, fake, monkeypatch, state, error, driver_major, from_environment):
        if from_environment:
            monkeypatch.setenv("GPUOPS_FAKE_DRIVER", state)
            fake.reset()
            monkeypatch.undo()
        else:
            fake.set_driver(state)
        number = ctypes.c_int(-1)
        assert fake.library.cudaGetDeviceCount(ctypes.byref(number)) == error
        assert number.value == (-1 if error else 2)
        pointer = ctypes.c_void_p()
        assert fake.library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(0)) == error
        assert fake.library.cudaDriverGetVersion(ctypes.byref(number)) == 0
        assert number.value // 1000 == driver_major
        fake.library.cudaGetErrorName.restype = ctypes.c_char_p
        name = fake.library.cudaGetErrorName(error).decode()
        assert name.startswith("cudaError") == bool(error)

    def test_the_environment_of_a_child(self, fake_folder):
        outcome = run_on_fake(
            fake_folder,
            """
            fake.library.cudaSetDevice(2)
            print(fake.current_device(), memory_info(fake), fake.calls())
            """,
            GPUOPS_FAKE_DEVICES="3",
            GPUOPS_FAKE_MEMORY="1000",
        )
        assert (outcome.returncode, outcome.stderr) == (0, "")
        assert outcome.stdout == "2 (1000, 1000) 2\n"

    def test_nothing_works_after_a_fork(self, fake_folder):
        outcome = run_on_fake(
            fake_folder,
            """
            import os
            if os.fork() == 0:
                os._exit(fake.library.cudaSetDevice(0))
            unused = os.waitstatus_to_exitcode(os.wait()[1])
            fake.library.cudaSetDevice(0)
            if os.fork() == 0:
                os._exit(fake.library.cudaSetDevice(0))
            print(unused, os.waitstatus_to_exitcode(os.wait()[1]))
            """,
        )
        assert (outcome.returncode, outcome.stderr) == (0, "")
        assert outcome.stdout == f"0 {INITIALIZATION_ERROR}\n"


def memory_info(fake):
    available, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert fake.library.cudaMemGetInfo(ctypes.byref(available), ctypes.byref(total)) == 0
    return available.value, total.value


def run_on_fake(fake_folder, source, **environment):
    """Runs source in a child, which ends as the misuse in it demands."""
    here = Path(__file__).parent
    prelude = (
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "from test_fake import *\n"
        f"fake = Fake({str(fake_folder / 'cudart')!r})\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", prelude + textwrap.dedent(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_caught(outcome, text):
    """By the fake's own look at the memory, or on a sanitized build by ASan as it happens."""
    if "AddressSanitizer" in outcome.stderr:
        assert "use-after-poison" in outcome.stderr
        return
    assert outcome.returncode == EXIT_MISUSE, outcome.stderr
    assert text in outcome.stderr
