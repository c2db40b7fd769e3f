"""The fake CUDA runtime catches what it is there to catch: each check is seen to fail."""

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from faults import build
from faults.fake import EXIT_MISUSE, LIBRARY, MEMORY_LIMIT, Fake, PointerAttributes
from helpers import join_in_full

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INITIALIZATION_ERROR = 3
CUDART_UNLOADING = 4
INVALID_CONFIGURATION = 9
STUB_LIBRARY = 34
INSUFFICIENT_DRIVER = 35
INVALID_DEVICE_FUNCTION = 98
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_RESOURCE_HANDLE = 400
NOT_READY = 600
CAPTURE_UNSUPPORTED = 900
CAPTURE_MERGE = 902
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907

HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
DEVICE_TO_DEVICE = 3
DEFAULT = 4

LEGACY = 1
PER_THREAD = 2
NON_BLOCKING = 1  # a flag of streams
NO_TIMING = 2  # a flag of events

# Attributes of memory pools.
RELEASE_THRESHOLD, RESERVED, MOST_RESERVED, USED, MOST_USED = range(4, 9)

POISON = 0xDB


@pytest.fixture(scope="module")
def own_folder(fake_folder, tmp_path_factory):
    """A second runtime in this process, on which no package has left anything."""
    Fake(fake_folder / "cudart")  # whoever comes first is the one that a package then finds
    return shutil.copytree(fake_folder / "cudart", tmp_path_factory.mktemp("fake") / "cudart")


@pytest.fixture
def fake(own_folder):
    fake = Fake(own_folder)
    fake.set_scheduler("now")
    assert fake.take_misuse() == ""
    before = left_behind(fake)
    yield fake
    fake.library.cudaSetDevice(0)
    fake.library.cudaGetLastError()
    fake.reset()
    assert fake.take_misuse() == ""
    assert left_behind(fake) == before


def is_sanitized(folder):
    return b"__asan_poison_memory_region" in Path(folder, LIBRARY).read_bytes()


def left_behind(fake):
    live = fake.live()
    return live.allocations, live.pinned_allocations, live.streams, live.events


def allocate(fake, count):
    pointer = ctypes.c_void_p()
    assert fake.library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(count)) == 0
    return pointer


def allocate_pinned(fake, count):
    """Host memory as a ctypes array, which knows nothing of its end."""
    pointer = ctypes.c_void_p()
    assert fake.library.cudaHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(count), 0) == 0
    return (ctypes.c_ubyte * count).from_address(pointer.value)


def copy(fake, target, source, count, kind, stream=None):
    return fake.library.cudaMemcpyAsync(
        target, source, ctypes.c_size_t(count), kind, ctypes.c_void_p(stream)
    )


def offset(pointer, count):
    return ctypes.c_void_p(pointer.value + count)


def fill(fake, memory, value, count, stream=None):
    return fake.library.cudaMemsetAsync(
        memory, value, ctypes.c_size_t(count), ctypes.c_void_p(stream)
    )


def fetch(fake, memory, count):
    """The bytes of device memory, once everything is done."""
    fake.run()
    host = ctypes.create_string_buffer(count)
    stream = create_stream(fake, NON_BLOCKING)
    assert copy(fake, host, memory, count, DEVICE_TO_HOST, stream) == 0
    destroy_stream(fake, stream)
    return host.raw


def create_stream(fake, flags=NON_BLOCKING, priority=0):
    stream = ctypes.c_void_p()
    code = fake.library.cudaStreamCreateWithPriority(ctypes.byref(stream), flags, priority)
    assert code == 0
    return stream.value


def destroy_stream(fake, stream):
    assert fake.library.cudaStreamDestroy(ctypes.c_void_p(stream)) == 0


def synchronize(fake, stream):
    return fake.library.cudaStreamSynchronize(ctypes.c_void_p(stream))


def query(fake, stream):
    return fake.library.cudaStreamQuery(ctypes.c_void_p(stream))


def create_event(fake, flags=NO_TIMING):
    event = ctypes.c_void_p()
    assert fake.library.cudaEventCreateWithFlags(ctypes.byref(event), flags) == 0
    return event


def record(fake, event, stream):
    return fake.library.cudaEventRecord(event, ctypes.c_void_p(stream))


def wait(fake, stream, event):
    return fake.library.cudaStreamWaitEvent(ctypes.c_void_p(stream), event, 0)


@pytest.fixture
def streams(fake):
    """Two streams that have nothing to do with each other."""
    made = [create_stream(fake), create_stream(fake)]
    yield made
    fake.run()
    for stream in made:
        fake.library.cudaStreamDestroy(ctypes.c_void_p(stream))


@pytest.fixture
def event(fake):
    made = create_event(fake)
    yield made
    fake.library.cudaEventDestroy(made)


@pytest.fixture
def pool(fake):
    return create_pool(fake, 0)


def create_pool(fake, device):
    # struct cudaMemPoolProps: allocation type 1 (pinned), no handles, a device, its number.
    properties, pool = (ctypes.c_int * 64)(1, 0, 1, device), ctypes.c_void_p()
    assert fake.library.cudaMemPoolCreate(ctypes.byref(pool), properties) == 0
    return pool


def allocate_async(fake, count, pool, stream=None):
    """A pointer, or the error."""
    pointer = ctypes.c_void_p()
    code = fake.library.cudaMallocFromPoolAsync(
        ctypes.byref(pointer), ctypes.c_size_t(count), pool, ctypes.c_void_p(stream)
    )
    return code or pointer


def free_async(fake, memory, stream=None):
    return fake.library.cudaFreeAsync(memory, ctypes.c_void_p(stream))


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
        sanitized = is_sanitized(fake.path.parent)
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
        before = fake.live()
        pool = create_pool(fake, 1)
        assert fake.live().pools == before.pools + 1
        memory = allocate_async(fake, 77, pool)
        assert fake.live().allocations == before.allocations + 1
        assert fake.live().bytes == before.bytes + 77
        assert fake.library.cudaSetDevice(1) == 0
        assert copy(fake, memory, b"1234", 4, HOST_TO_DEVICE) == 0
        assert free_async(fake, memory) == 0
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
        assert "is on device 0 and the stream on device 1" in fake.take_misuse()
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

    def give_twin(self, twin, most_threads=256, argument_bytes=0):
        self.twin = Twin(twin)
        size = ctypes.c_size_t(argument_bytes)
        self.library.fake_cuda_twin(self.symbol, self.twin, most_threads, size)

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
        kernel = Kernel(fake)
        kernel.symbol = ctypes.c_void_p(8)
        assert kernel.launch() == INVALID_DEVICE_FUNCTION
        assert "an unknown kernel has no host twin" in fake.take_misuse()

    def test_kernel_that_was_taken_back(self, fake):
        """The process is at its end, file by file, and a daemon thread may still be calling."""
        with Kernel(fake) as other:
            other.give_twin(lambda *place: None)
            with Kernel(fake) as kernel:
                kernel.give_twin(lambda *place: None)
            assert kernel.launch() == CUDART_UNLOADING
            assert other.launch() == 0
        assert fake.take_misuse() == ""

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


# Kernels whose threads wait for each other; a Python function could not be left in its middle. They
# get the functions of the runtime as pointers, because there may be two runtimes in the process.
KERNELS = """
#include <stddef.h>

void (*run_block)(unsigned, size_t, void (*)(void *, unsigned, void *), void *);
void (*wait_for_block)(void);
unsigned (*thread_at)(unsigned);

typedef struct Functor {
    int *out;
    unsigned kind, shared_bytes;
} Functor;

typedef struct Block {
    const Functor *functor;
    unsigned number, threads;
} Block;

enum { SUM, POISONED, NO_BARRIER, ENDED, FEWER, MORE, NOTED, PLAIN, BEFORE, AFTER, DEEP };

static void note(int *out, int entry)
{
    out[++out[0]] = entry;
}

static int deeper(int levels)
{
    volatile char frame[1000];
    frame[0] = (char)levels;
    return levels ? deeper(levels - 1) + frame[0] : 0;
}

static void body(void *context, unsigned thread, void *shared)
{
    const Block *block = context;
    unsigned threads = block->threads;
    int *out = block->functor->out, *mine = out + block->number * threads + thread;
    volatile int *numbers = shared, kept[3] = {(int)thread, (int)thread + 1, (int)thread + 2};
    switch (block->functor->kind) {
    case SUM:
        numbers[thread] = (int)(block->number + thread);
        for (unsigned step = threads / 2; step > 0; step /= 2) {
            wait_for_block();
            if (thread < step) numbers[thread] += numbers[thread + step];
        }
        wait_for_block();
        *mine = numbers[0] + kept[0] + kept[1] + kept[2] - 3 * (int)thread - 3;
        return;
    case POISONED:
        *mine = numbers[thread];
        numbers[thread] = 0;
        return;
    case NO_BARRIER:
        numbers[thread] = 1;
        *mine = numbers[thread ? thread - 1 : 0];
        return;
    case ENDED:
        for (unsigned i = 0; thread >= threads / 4 && i < 3; i++) wait_for_block();
        return;
    case FEWER:
        wait_for_block();
        if (thread != 2) wait_for_block();
        return;
    case MORE:
        wait_for_block();
        wait_for_block();
        if (thread == 2) wait_for_block();
        return;
    case NOTED:
        note(out, (int)thread);
        wait_for_block();
        note(out, (int)thread);
        return;
    case BEFORE:
        ((volatile char *)shared)[-1 - (int)thread] = 0;
        return;
    case AFTER:
        ((volatile char *)shared)[block->functor->shared_bytes + thread] = 0;
        return;
    case DEEP:
        *mine = deeper(256);
        return;
    }
}

void twin(void **arguments, unsigned number, unsigned blocks, unsigned threads)
{
    const Functor *functor = arguments[0];
    Block block = {functor, number, threads};
    if (functor->kind != PLAIN) {
        run_block(threads, functor->shared_bytes, body, &block);
        return;
    }
    for (unsigned turn = 0; turn < threads; turn++)
        note(functor->out, (int)(number * threads + thread_at(turn)));
    if (functor->shared_bytes) wait_for_block();
}
"""

(SUM, POISONED, NO_BARRIER, ENDED, FEWER, MORE, NOTED, PLAIN, BEFORE, AFTER, DEEP) = range(11)


class Functor(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("kind", ctypes.c_uint), ("shared_bytes", ctypes.c_uint)]


@pytest.fixture(scope="module")
def kernels_file(own_folder, tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not compiler:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("kernels")
    source, library = folder / "kernels.c", folder / "kernels.so"
    source.write_text(KERNELS)
    flags = build.sanitizer_flags("address,undefined" if is_sanitized(own_folder) else "")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [compiler, "-O2", "-fPIC", "-shared", *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True, env=environment)
    return library


@pytest.fixture
def blocks(fake, kernels_file):
    with Blocks(fake, kernels_file) as blocks:
        yield blocks


class Blocks(Kernel):
    """The kernels above."""

    def __init__(self, fake, file):
        super().__init__(fake)
        self.fake = fake
        kernels = ctypes.CDLL(str(file))
        names = {"run_block": "fibers", "wait_for_block": "sync", "thread_at": "thread"}
        for pointer, name in names.items():
            function = ctypes.cast(fake.library["fake_cuda_" + name], ctypes.c_void_p)
            ctypes.c_void_p.in_dll(kernels, pointer).value = function.value
        self.kernels = kernels

    def __enter__(self):
        super().__enter__()
        size = ctypes.c_size_t(ctypes.sizeof(Functor))
        self.library.fake_cuda_twin(self.symbol, self.kernels.twin, 2000, size)
        return self

    def start(self, kind, out, blocks=1, threads=4, shared_bytes=None, stream=None):
        shared_bytes = 4 * threads if shared_bytes is None else shared_bytes
        functor = Functor(out.value, kind, shared_bytes)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(functor))
        return self.launch((blocks, 1, 1), (threads, 1, 1), arguments, stream=stream)

    def __call__(self, kind, blocks=1, threads=4, shared_bytes=None):
        """What the threads gave, or with notes the notes."""
        notes = kind in (NOTED, PLAIN)
        count = 1 + 2 * blocks * threads if notes else blocks * threads
        out = allocate(self.fake, 4 * count)
        if notes:
            assert fill(self.fake, out, 0, 4) == 0
        assert self.start(kind, out, blocks, threads, shared_bytes) == 0
        given = list(memoryview(fetch(self.fake, out, 4 * count)).cast("i"))
        assert self.fake.library.cudaFree(out) == 0
        return given[1 : 1 + given[0]] if notes else given


def sums(blocks, threads):
    return [sum(range(block, block + threads)) for block in range(blocks) for _ in range(threads)]


POISONED_INT = int.from_bytes([POISON] * 4, "little", signed=True)


class TestBlocks:
    @pytest.mark.parametrize("scheduler", ["now", "shuffled"])
    @pytest.mark.parametrize("threads", [1, 2, 256, 1024])
    def test_threads_that_wait_for_each_other(self, fake, blocks, scheduler, threads):
        fake.set_scheduler(scheduler)
        assert blocks(SUM, 50, threads) == sums(50, threads)

    def test_shared_memory_is_never_set(self, blocks):
        assert blocks(POISONED, 3) == [POISONED_INT] * 12

    def test_every_thread_runs_up_to_the_barrier(self, blocks):
        assert blocks(NOTED, 2, 3) == [0, 1, 2] * 4

    @pytest.mark.parametrize(
        ("kind", "waiting", "barrier"), [(ENDED, 6, 1), (FEWER, 7, 2), (MORE, 1, 3)]
    )
    @pytest.mark.parametrize("scheduler", ["now", "shuffled"])
    def test_threads_that_wait_in_vain(self, fake, blocks, kind, waiting, barrier, scheduler):
        assert blocks(SUM, 1, 8) == sums(1, 8)
        fake.set_scheduler(scheduler)
        blocks(kind, 3, 8)
        misuse = fake.take_misuse()
        expected = f"{waiting} of 8 threads wait at barrier {barrier} for threads that have ended\n"
        assert misuse.startswith("planted_kernel: in block ")
        assert misuse.endswith(expected)
        # Blocks after that are as good as ever.
        assert misuse.count("\n") == 1
        assert blocks(SUM, 2, 16) == sums(2, 16)

    @pytest.mark.parametrize(("kind", "side"), [(BEFORE, "before"), (AFTER, "after")])
    @pytest.mark.parametrize("shared_bytes", [1, 100, 48 << 10])
    def test_outside_the_shared_memory(self, fake_folder, kernels_file, kind, side, shared_bytes):
        outcome = run_on_fake(
            fake_folder,
            f"""
            with Blocks(fake, {str(kernels_file)!r}) as blocks:
                blocks({kind}, 1, 256, shared_bytes={shared_bytes})
            """,
        )
        assert_caught(outcome, f"block 0 wrote {side} its {shared_bytes} bytes of shared memory")

    @pytest.mark.not_under_tsan("reports the end of a stack without a word")
    def test_a_stack_has_an_end(self, fake_folder, kernels_file):
        source = f"""
            with Blocks(fake, {str(kernels_file)!r}) as blocks:
                blocks(SUM, 1, 16)  # so that there are other stacks to run into
                blocks(DEEP, 1, 1)
            """
        outcome = run_on_fake(fake_folder, source)
        assert outcome.returncode == -signal.SIGSEGV or "stack-overflow" in outcome.stderr

    def test_barrier_without_shared_memory(self, fake, blocks):
        assert blocks(PLAIN, 3, 2, shared_bytes=1) == [0, 1]
        assert fake.take_misuse() == (
            "planted_kernel: a thread waits for its block, but the kernel has no shared memory\n"
        )

    def test_outside_of_kernels(self, fake, blocks):
        fake.library.fake_cuda_sync()
        assert "a thread waits for its block outside of a kernel" in fake.take_misuse()
        fake.library.fake_cuda_fibers(4, ctypes.c_size_t(4), None, None)
        assert "a block was run outside of a kernel" in fake.take_misuse()

    @pytest.mark.parametrize(("threads", "shared_bytes"), [(1025, 4), (1, (48 << 10) + 1)])
    def test_more_than_a_block_has(self, fake, blocks, threads, shared_bytes):
        blocks(SUM, 2, threads, shared_bytes)
        expected = f"no block has {threads} threads and {shared_bytes} bytes of shared memory"
        assert fake.take_misuse().count(expected) == 1

    def test_blocks_that_are_run_by_other_threads(self, fake, blocks, streams):
        fake.set_scheduler("lazy")
        out = [allocate(fake, 4 * 1000 * 64) for _ in streams]

        def work(number):
            for _ in range(5):
                assert blocks.start(SUM, out[number], 100, 64, stream=streams[number]) == 0
                assert synchronize(fake, streams[1 - number]) == 0

        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for memory in out:
            given = fetch(fake, memory, 4 * 100 * 64)
            assert list(memoryview(given).cast("i")) == sums(100, 64)
            assert fake.library.cudaFree(memory) == 0


class TestOrderWithinKernels:
    def test_natural(self, fake, blocks):
        for scheduler in "now", "lazy":
            fake.set_scheduler(scheduler)
            assert blocks(PLAIN, 3, 4, shared_bytes=0) == list(range(12))

    @pytest.mark.parametrize(
        ("kind", "count", "threads"), [(PLAIN, 3, 1), (PLAIN, 1, 4), (NOTED, 1, 3)]
    )
    def test_shuffled_comes_to_every_order(self, fake, blocks, kind, count, threads):
        found = set()
        for seed in range(600):
            fake.set_scheduler("shuffled", seed)
            found.add(tuple(blocks(kind, count, threads, shared_bytes=0)))
        orders = list(itertools.permutations(range(count * threads)))
        if kind == NOTED:  # The order is another one after the barrier.
            orders = [first + second for first in orders for second in orders]
        assert found == set(orders)

    @pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 3), (1, 1000), (777, 1), (33, 65)])
    def test_everything_has_its_turn_once(self, fake, blocks, count, threads):
        for seed in range(20):
            fake.set_scheduler("shuffled", seed)
            order = blocks(PLAIN, count, threads, shared_bytes=0)
            assert sorted(order) == list(range(count * threads))
            # Blocks still come one after the other.
            assert len(list(itertools.groupby(entry // threads for entry in order))) == count
            if count * threads > 100:
                assert order != sorted(order)

    def test_every_block_has_an_order_of_its_own(self, fake, blocks):
        fake.set_scheduler("shuffled")
        order = blocks(PLAIN, 20, 30, shared_bytes=0)
        assert (
            len({tuple(entry % 30 for entry in order[i : i + 30]) for i in range(0, 600, 30)}) == 20
        )

    def test_a_seed_gives_the_same_order_again(self, fake, blocks):
        def orders():
            fake.set_scheduler("shuffled", 5)
            return [blocks(PLAIN, 5, 5, shared_bytes=0) for _ in range(4)]

        assert (first := orders()) == orders()
        assert len(set(map(tuple, first))) == 4

    def test_a_barrier_that_was_forgotten(self, fake, blocks):
        assert blocks(NO_BARRIER, 1, 32) == [1] * 32
        fake.set_scheduler("shuffled")
        assert POISONED_INT in blocks(NO_BARRIER, 1, 32)


class Journal:
    """Kernels that note when they run."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.entries = []
        kernel.give_twin(lambda given, *place: self.entries.append(given[0]))

    def note(self, entry, stream):
        assert self.kernel.launch(arguments=(ctypes.c_void_p * 1)(entry), stream=stream) == 0


@pytest.fixture
def journal(fake):
    with Kernel(fake) as kernel:
        yield Journal(kernel)
        fake.run()


class TestStreams:
    def test_what_a_stream_was_made_with(self, fake):
        assert fake.library.cudaSetDevice(1) == 0
        number = ctypes.c_int()
        for priority, expected in [(0, 0), (-3, -3), (-99, -5), (7, 0)]:
            stream = create_stream(fake, NON_BLOCKING, priority)
            handle = ctypes.c_void_p(stream)
            for read, value in [("Priority", expected), ("Flags", NON_BLOCKING), ("Device", 1)]:
                assert fake.library[f"cudaStreamGet{read}"](handle, ctypes.byref(number)) == 0
                assert number.value == value
            destroy_stream(fake, stream)
        least, greatest = ctypes.c_int(9), ctypes.c_int(9)
        fake.library.cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        assert (least.value, greatest.value) == (0, -5)
        assert fake.library.cudaStreamCreateWithFlags(ctypes.byref(handle), 2) == INVALID_VALUE
        assert fake.library.cudaStreamCreateWithFlags(None, 0) == INVALID_VALUE

    def test_default_streams_are_there_on_every_device(self, fake):
        device = ctypes.c_int()
        for current in 0, 1:
            fake.library.cudaSetDevice(current)
            for stream in None, LEGACY, PER_THREAD:
                handle = ctypes.c_void_p(stream)
                assert fake.library.cudaStreamGetDevice(handle, ctypes.byref(device)) == 0
                assert device.value == current
                assert synchronize(fake, stream) == query(fake, stream) == 0
                assert fake.library.cudaStreamDestroy(handle) == INVALID_RESOURCE_HANDLE

    def test_use_after_destruction(self, fake):
        stream, event = create_stream(fake), create_event(fake)
        before = fake.live()
        destroy_stream(fake, stream)
        assert fake.library.cudaEventDestroy(event) == 0
        assert (fake.live().streams, fake.live().events) == (before.streams - 1, before.events - 1)
        for use in (
            lambda: synchronize(fake, stream),
            lambda: query(fake, stream),
            lambda: wait(fake, stream, event),
            lambda: fake.library.cudaStreamDestroy(ctypes.c_void_p(stream)),
            lambda: wait(fake, None, event),
            lambda: record(fake, event, None),
            lambda: fake.library.cudaEventQuery(event),
            lambda: fake.library.cudaEventSynchronize(event),
            lambda: fake.library.cudaEventDestroy(event),
        ):
            assert use() == INVALID_RESOURCE_HANDLE
            assert "has been destroyed" in fake.take_misuse()
        others = [create_stream(fake) for _ in range(3)]
        assert stream not in others
        for other in others:
            destroy_stream(fake, other)

    def test_no_handle_at_all(self, fake, event):
        assert synchronize(fake, 3) == INVALID_RESOURCE_HANDLE
        assert synchronize(fake, event.value) == INVALID_RESOURCE_HANDLE
        assert fake.library.cudaEventQuery(None) == INVALID_RESOURCE_HANDLE
        assert wait(fake, None, ctypes.c_void_p(4096)) == INVALID_RESOURCE_HANDLE

    def test_streams_and_events_belong_to_a_device(self, fake, streams, event):
        memory = allocate(fake, 8)
        fake.library.cudaSetDevice(1)
        there = create_stream(fake)
        assert record(fake, event, there) == INVALID_RESOURCE_HANDLE
        assert "the event is of device 0 and the stream of device 1" in fake.take_misuse()
        with Kernel(fake) as kernel:
            kernel.give_twin(lambda *place: pytest.fail("it was run"))
            assert kernel.launch(stream=streams[0]) == INVALID_RESOURCE_HANDLE
        assert "on a stream of device 0 while device 1 is current" in fake.take_misuse()
        # Copies only look at the stream, and anybody may wait for an event.
        assert copy(fake, memory, b"12345678", 8, HOST_TO_DEVICE, streams[0]) == 0
        assert record(fake, event, streams[0]) == 0
        assert wait(fake, there, event) == 0
        assert synchronize(fake, there) == 0
        destroy_stream(fake, there)
        assert fake.library.cudaFree(memory) == 0

    def test_copy_between_devices(self, fake):
        def peer_copy(target, target_device, source, source_device):
            size = ctypes.c_size_t(8)
            return fake.library.cudaMemcpyPeerAsync(
                target, target_device, source, source_device, size, None
            )

        here = allocate(fake, 8)
        fake.library.cudaSetDevice(1)
        there = allocate(fake, 8)
        fake.library.cudaSetDevice(0)
        assert fill(fake, here, 7, 8) == 0
        assert peer_copy(there, 1, here, 0) == 0
        assert peer_copy(there, 2, here, 0) == INVALID_DEVICE
        assert peer_copy(there, 0, here, 1) == INVALID_VALUE
        assert "the target is on device 1" in fake.take_misuse()
        fake.library.cudaSetDevice(1)
        assert fetch(fake, there, 8) == b"\7" * 8
        assert fake.library.cudaFree(here) == fake.library.cudaFree(there) == 0


class TestNow:
    def test_work_is_done_when_it_is_enqueued(self, fake, streams, event):
        memory = allocate(fake, 4)
        pinned = allocate_pinned(fake, 4)
        assert fill(fake, memory, 7, 4, streams[0]) == 0
        assert copy(fake, pinned, memory, 4, DEVICE_TO_HOST, streams[1]) == 0
        assert record(fake, event, streams[1]) == 0
        assert bytes(pinned) == b"\7" * 4
        assert query(fake, streams[0]) == fake.library.cudaEventQuery(event) == 0
        assert fake.pending() == 0
        assert fake.library.cudaFree(memory) == fake.library.cudaFreeHost(pinned) == 0


@pytest.fixture(params=["lazy", "shuffled"])
def later(request, fake):
    """The fake, doing its work late."""
    fake.set_scheduler(request.param, seed=7)
    return fake


class TestLater:
    def test_nothing_is_done_before_somebody_waits(self, later, streams):
        memory = allocate(later, 4)
        pinned = allocate_pinned(later, 4)
        pinned[:] = b"abcd"
        assert copy(later, memory, pinned, 4, HOST_TO_DEVICE, streams[0]) == 0
        pinned[:] = b"efgh"  # Pinned memory is read when the copy is done.
        assert copy(later, pinned, memory, 2, DEVICE_TO_HOST, streams[0]) == 0
        assert fill(later, memory, 7, 1, streams[0]) == 0
        assert bytes(pinned) == b"efgh"
        assert later.pending() == 3
        assert synchronize(later, streams[0]) == 0
        assert later.pending() == 0
        assert fetch(later, memory, 4) == b"\7fgh"
        assert later.library.cudaFree(memory) == later.library.cudaFreeHost(pinned) == 0

    def test_pageable_memory_is_read_and_written_at_the_call(self, later, streams):
        memory = allocate(later, 100_000)
        host = ctypes.create_string_buffer(b"x" * 100_000, 100_000)
        assert copy(later, memory, host, 100_000, HOST_TO_DEVICE, streams[0]) == 0
        assert later.pending() == 1
        ctypes.memset(host, 0, 100_000)
        assert copy(later, host, memory, 100_000, DEVICE_TO_HOST, streams[0]) == 0
        assert later.pending() == 0
        assert host.raw == b"x" * 100_000
        assert later.library.cudaFree(memory) == 0

    def test_a_kernel_gets_a_copy_of_its_functor(self, later, streams):
        seen = []
        functor = (ctypes.c_int * 2)(4, 5)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(functor))

        def twin(given, *place):
            seen.append(list((ctypes.c_int * 2).from_address(given[0])))

        with Kernel(later) as kernel:
            kernel.give_twin(twin, argument_bytes=8)
            assert kernel.launch(arguments=arguments, stream=streams[0]) == 0
            functor[:] = 0, 0
            arguments[0] = None
            assert seen == []
            assert synchronize(later, streams[0]) == 0
        assert seen == [[4, 5]]

    @pytest.mark.parametrize("ask", ["stream", "event"])
    def test_asking_brings_the_work_on(self, later, streams, event, journal, ask):
        for entry in 1, 2, 3:
            journal.note(entry, streams[0])
        assert record(later, event, streams[0]) == 0
        answers = []
        while not answers or answers[-1]:
            if ask == "stream":
                answers.append(query(later, streams[0]))
            else:
                answers.append(later.library.cudaEventQuery(event))
        assert answers == [NOT_READY] * 3 + [0]
        assert later.library.cudaGetLastError() == NOT_READY
        assert journal.entries == [1, 2, 3]

    def test_a_kernel_that_takes_its_time(self, later, streams, event, journal):
        begin = time.monotonic()
        later.take_time(streams[0], 0.3)
        journal.note(1, streams[0])
        assert record(later, event, streams[0]) == 0
        journal.note(2, streams[1])
        while later.pending() > 3:
            assert query(later, streams[1]) in (0, NOT_READY)
            assert query(later, streams[0]) == NOT_READY
            assert later.library.cudaEventQuery(event) == NOT_READY
        assert journal.entries == [2] and time.monotonic() - begin < 0.29
        assert synchronize(later, streams[0]) == 0
        assert journal.entries == [2, 1] and time.monotonic() - begin > 0.29
        assert later.library.cudaEventQuery(event) == 0

    def test_device_synchronize(self, later, streams, journal):
        journal.note(1, streams[0])
        journal.note(2, streams[1])
        later.library.cudaSetDevice(1)
        journal.note(3, None)
        assert later.library.cudaSetDevice(0) == 0
        assert later.library.cudaDeviceSynchronize() == 0
        assert sorted(journal.entries)[:2] == [1, 2]
        later.library.cudaSetDevice(1)
        assert later.library.cudaDeviceSynchronize() == 0
        assert sorted(journal.entries) == [1, 2, 3]
        later.library.cudaSetDevice(0)

    def test_an_event_orders_two_streams(self, later, streams, event, journal):
        assert wait(later, streams[0], event) == 0  # It was never recorded: nothing to wait for.
        journal.note(1, streams[0])
        assert record(later, event, streams[0]) == 0
        assert wait(later, streams[1], event) == 0
        journal.note(2, streams[1])
        # What is recorded afterwards changes nothing for those who wait already.
        journal.note(3, streams[0])
        assert record(later, event, streams[0]) == 0
        assert synchronize(later, streams[1]) == 0
        assert journal.entries.index(1) < journal.entries.index(2)

    def test_an_event_that_goes_while_it_is_used(self, later, streams, journal):
        event = create_event(later)
        journal.note(1, streams[0])
        assert record(later, event, streams[0]) == 0
        assert wait(later, streams[1], event) == 0
        assert later.library.cudaEventDestroy(event) == 0
        journal.note(2, streams[1])
        assert synchronize(later, streams[1]) == 0
        assert journal.entries == [1, 2]

    def test_a_destroyed_stream_does_its_work(self, later, streams, event, journal):
        stream = create_stream(later)
        journal.note(1, stream)
        assert record(later, event, stream) == 0
        destroy_stream(later, stream)
        assert wait(later, streams[0], event) == 0
        journal.note(2, streams[0])
        assert synchronize(later, streams[0]) == 0
        assert journal.entries == [1, 2]
        assert later.library.cudaEventSynchronize(event) == 0

    @pytest.mark.parametrize("legacy", [None, LEGACY])
    def test_the_legacy_stream_takes_turns_with_blocking_streams(self, later, journal, legacy):
        blocking = create_stream(later, flags=0)
        for entry, stream in enumerate([blocking, legacy, PER_THREAD, legacy, blocking], 1):
            journal.note(entry, stream)
        assert synchronize(later, blocking) == 0
        assert journal.entries == [1, 2, 3, 4, 5]
        destroy_stream(later, blocking)

    def test_other_devices_and_threads_have_default_streams_of_their_own(self, later, journal):
        journal.note(1, PER_THREAD)

        def note_and_wait():
            journal.note(2, PER_THREAD)
            assert synchronize(later, PER_THREAD) == 0

        other = threading.Thread(target=note_and_wait)
        other.start()
        other.join()
        assert 2 in journal.entries
        later.set_scheduler("lazy")
        journal.entries.clear()
        journal.note(3, None)
        later.library.cudaSetDevice(1)
        journal.note(4, None)
        assert synchronize(later, None) == 0
        assert journal.entries == [4]
        later.library.cudaSetDevice(0)

    def test_a_thread_ends_after_the_work_on_its_default_stream(self, later, journal):
        other = threading.Thread(target=lambda: journal.note(1, PER_THREAD))
        other.start()
        join_in_full(other)
        assert "a thread has ended before the work" in later.take_misuse()
        assert journal.entries == []
        later.run()
        assert journal.entries == [1]

    def test_reset_and_a_change_of_scheduler_do_all_work(
        self, later, streams, journal, monkeypatch
    ):
        monkeypatch.delenv("GPUOPS_FAKE_SCHEDULER", raising=False)
        journal.note(1, streams[0])
        later.set_scheduler("now")
        journal.note(2, streams[0])
        assert journal.entries == [1, 2]
        later.set_scheduler("lazy")
        journal.note(3, streams[0])
        later.reset()
        journal.note(4, streams[0])
        assert journal.entries == [1, 2, 3, 4]
        later.set_scheduler("eager")
        assert "no scheduler called eager" in later.take_misuse()


class TestOrder:
    def test_lazy_does_no_more_than_is_needed(self, fake, streams, event, journal):
        fake.set_scheduler("lazy")
        journal.note(1, streams[0])
        assert record(fake, event, streams[0]) == 0
        journal.note(2, streams[0])
        journal.note(3, streams[1])
        assert wait(fake, streams[1], event) == 0
        journal.note(4, streams[1])
        journal.note(5, None)
        assert fake.library.cudaEventSynchronize(event) == 0
        assert journal.entries == [1]
        assert synchronize(fake, streams[1]) == 0
        assert journal.entries == [1, 3, 4]
        assert fake.pending() == 2

    def shuffled(self, fake, streams, event, journal, seed):
        """What five kernels did in the order that a seed gives; 3 waits for 1."""
        fake.set_scheduler("shuffled", seed)
        journal.entries.clear()
        journal.note(1, streams[0])
        assert record(fake, event, streams[0]) == 0
        journal.note(2, streams[0])
        assert wait(fake, streams[1], event) == 0
        journal.note(3, streams[1])
        journal.note(4, None)
        journal.note(5, None)
        assert fake.library.cudaDeviceSynchronize() == 0
        return tuple(journal.entries)

    def test_shuffled_comes_to_every_order_that_is_allowed(self, fake, streams, event, journal):
        found = {self.shuffled(fake, streams, event, journal, seed) for seed in range(2000)}
        allowed = {
            order
            for order in itertools.permutations([1, 2, 3, 4, 5])
            if all(order.index(a) < order.index(b) for a, b in [(1, 2), (1, 3), (4, 5)])
        }
        assert found == allowed

    def test_a_seed_gives_the_same_order_again(self, fake, streams, event, journal):
        first, again = (
            [self.shuffled(fake, streams, event, journal, seed) for seed in range(20)]
            for _ in range(2)
        )
        assert first == again

    def test_the_environment_of_a_child(self, fake_folder):
        source = """
            memory = allocate(fake, 8)
            fill(fake, memory, 1, 8)
            print(fake.pending())
            fake.set_scheduler("now")
            fake.reset()
            fill(fake, memory, 1, 8)
            print(fake.pending())
            """
        for scheduler, pending in [("now", 0), ("lazy", 1), ("shuffled", 1)]:
            outcome = run_on_fake(
                fake_folder, source, GPUOPS_FAKE_SCHEDULER=scheduler, GPUOPS_FAKE_SEED="3"
            )
            assert outcome.stdout == f"{pending}\n" * 2, outcome.stderr
            assert outcome.returncode == 0


class TestStreamOrderedMisuse:
    @pytest.mark.parametrize("with_event", [False, True])
    def test_work_that_a_free_overtakes(self, fake, streams, event, pool, with_event):
        fake.set_scheduler("lazy")
        memory = allocate_async(fake, 8, pool, streams[0])
        assert synchronize(fake, streams[0]) == 0
        assert fill(fake, memory, 1, 8, streams[1]) == 0
        if with_event:
            assert record(fake, event, streams[1]) == 0
            assert wait(fake, streams[0], event) == 0
        assert free_async(fake, memory, streams[0]) == 0
        assert fake.live().bytes == 8
        assert synchronize(fake, streams[0]) == 0
        assert fake.live().bytes == 0
        assert synchronize(fake, streams[1]) == 0
        caught = "the target, 8 bytes at" in (text := fake.take_misuse())
        assert caught == ("was freed before the work was done" in text) == (not with_event)

    @pytest.mark.parametrize("with_event", [False, True])
    def test_work_that_overtakes_its_allocation(self, fake, streams, event, pool, with_event):
        fake.set_scheduler("lazy")
        memory = allocate_async(fake, 8, pool, streams[0])
        if with_event:
            assert record(fake, event, streams[0]) == 0
            assert wait(fake, streams[1], event) == 0
        assert fill(fake, memory, 1, 8, streams[1]) == 0
        assert synchronize(fake, streams[1]) == 0
        assert ("not allocated yet" in fake.take_misuse()) == (not with_event)
        assert free_async(fake, memory, streams[0]) == 0

    @pytest.mark.parametrize("scheduler", ["now", "lazy"])
    def test_work_after_the_free(self, fake, streams, pool, scheduler):
        fake.set_scheduler(scheduler)
        memory = allocate_async(fake, 8, pool, streams[0])
        assert free_async(fake, memory, streams[0]) == 0
        assert fill(fake, memory, 1, 8, streams[0]) == INVALID_VALUE
        assert "not inside one live device allocation" in fake.take_misuse()
        assert free_async(fake, memory, streams[0]) == INVALID_VALUE
        assert "not the start of a live device allocation" in fake.take_misuse()

    def test_memory_that_is_freed_and_allocated_anew(self, fake, streams, pool):
        """The quarantine ends when the work is still to come, and the address may be in use."""
        fake.set_scheduler("lazy")
        memory = allocate_async(fake, 64, pool, streams[0])
        assert synchronize(fake, streams[0]) == 0
        assert fill(fake, memory, 1, 64, streams[1]) == 0
        assert free_async(fake, memory, streams[0]) == 0
        assert synchronize(fake, streams[0]) == 0
        for _ in range(300):
            fake.library.cudaFree(allocate(fake, 64))
        others = [allocate(fake, 64) for _ in range(300)]
        assert synchronize(fake, streams[1]) == 0
        assert "was freed before the work was done" in fake.take_misuse()
        for other in others:
            assert fake.library.cudaFree(other) == 0

    def test_pinned_memory_that_is_freed_too_early(self, fake, streams):
        fake.set_scheduler("lazy")
        memory, pinned = allocate(fake, 8), allocate_pinned(fake, 8)
        assert copy(fake, memory, pinned, 8, HOST_TO_DEVICE, streams[0]) == 0
        assert fake.library.cudaFreeHost(pinned) == 0
        assert synchronize(fake, streams[0]) == 0
        assert "the source, 8 bytes at" in fake.take_misuse()
        assert fake.library.cudaFree(memory) == 0

    def test_free_waits_for_the_device(self, fake, streams):
        fake.set_scheduler("lazy")
        memory = allocate(fake, 8)
        assert fill(fake, memory, 1, 8, streams[0]) == 0
        assert fake.library.cudaFree(memory) == 0
        assert fake.pending() == 0

    def arguments(self, memory):
        functor = (ctypes.c_void_p * 2)(1, memory.value)
        return (ctypes.POINTER(type(functor)) * 1)(ctypes.pointer(functor))

    @pytest.mark.parametrize("overtaken", [False, True])
    def test_kernel_with_freed_memory(self, fake, streams, pool, overtaken):
        fake.set_scheduler("lazy")
        memory = allocate_async(fake, 8, pool, streams[0])
        assert synchronize(fake, streams[0]) == 0
        arguments = self.arguments(offset(memory, 7))
        with Kernel(fake) as kernel:
            kernel.give_twin(lambda *place: pytest.fail("it was run"), argument_bytes=16)
            if overtaken:
                assert kernel.launch(arguments=arguments, stream=streams[1]) == 0
            assert free_async(fake, memory, streams[0]) == 0
            if overtaken:
                assert synchronize(fake, streams[0]) == 0
            else:
                assert kernel.launch(arguments=arguments, stream=streams[1]) == 0
            fake.run()
        expected = (
            f"planted_kernel: a kernel was given memory at {hex(memory.value + 7)} that was freed"
        )
        assert fake.take_misuse().count(expected) == 1

    def test_kernel_with_memory_to_come(self, fake, streams, pool):
        fake.set_scheduler("lazy")
        memory = allocate_async(fake, 8, pool, streams[0])
        arguments = self.arguments(memory)
        with Kernel(fake) as kernel:
            kernel.give_twin(lambda *place: None, argument_bytes=16)
            assert kernel.launch(arguments=arguments, stream=streams[1]) == 0
            assert synchronize(fake, streams[1]) == 0
            assert "not allocated yet" in fake.take_misuse()
            assert free_async(fake, memory, streams[0]) == 0


class TestEvents:
    def elapsed(self, fake, start, end):
        milliseconds = ctypes.c_float(-1)
        code = fake.library.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end)
        return code, milliseconds.value

    def test_elapsed_time(self, fake, streams):
        fake.set_scheduler("lazy")
        start, end = create_event(fake, 0), create_event(fake, 0)
        assert self.elapsed(fake, start, end) == (INVALID_RESOURCE_HANDLE, -1)
        with Kernel(fake) as kernel:
            kernel.give_twin(lambda *place: time.sleep(0.02))
            assert record(fake, start, streams[0]) == 0
            assert kernel.launch(stream=streams[0]) == 0
            assert record(fake, end, streams[0]) == 0
            assert self.elapsed(fake, start, end) == (NOT_READY, -1)
            assert fake.library.cudaEventSynchronize(start) == 0
            assert self.elapsed(fake, start, end) == (NOT_READY, -1)
            assert fake.library.cudaEventSynchronize(end) == 0
        code, milliseconds = self.elapsed(fake, start, end)
        assert code == 0
        assert 20 <= milliseconds < 20_000
        assert self.elapsed(fake, start, start) == (0, 0)
        assert self.elapsed(fake, end, start) == (0, -milliseconds)
        for event in start, end:
            assert fake.library.cudaEventDestroy(event) == 0

    def test_events_that_have_no_time(self, fake, event):
        timed = create_event(fake, 0)
        for made in timed, event:
            assert record(fake, made, None) == 0
        assert self.elapsed(fake, timed, event)[0] == INVALID_RESOURCE_HANDLE
        fake.library.cudaSetDevice(1)
        there = create_event(fake, 0)
        assert record(fake, there, None) == 0
        assert self.elapsed(fake, timed, there)[0] == INVALID_RESOURCE_HANDLE
        for made in timed, there:
            assert fake.library.cudaEventDestroy(made) == 0

    def test_an_event_that_was_never_recorded_is_done(self, fake, event):
        assert fake.library.cudaEventQuery(event) == fake.library.cudaEventSynchronize(event) == 0

    @pytest.mark.parametrize("flags", [4, 8])
    def test_flags_that_cannot_be(self, fake, flags):
        event = ctypes.c_void_p()
        assert fake.library.cudaEventCreateWithFlags(ctypes.byref(event), flags) == INVALID_VALUE


class TestPools:
    def attribute(self, fake, pool, attribute):
        value = ctypes.c_uint64()
        assert fake.library.cudaMemPoolGetAttribute(pool, attribute, ctypes.byref(value)) == 0
        return value.value

    def set_threshold(self, fake, pool, value):
        value = ctypes.c_uint64(value)
        return fake.library.cudaMemPoolSetAttribute(pool, RELEASE_THRESHOLD, ctypes.byref(value))

    def all_of(self, fake, pool):
        return tuple(self.attribute(fake, pool, which) for which in range(RESERVED, MOST_USED + 1))

    def test_what_a_pool_keeps(self, fake, pool, streams):
        fake.set_scheduler("lazy")
        assert self.set_threshold(fake, pool, 1000) == 0
        assert self.attribute(fake, pool, RELEASE_THRESHOLD) == 1000
        first, second = (allocate_async(fake, 800, pool, streams[0]) for _ in range(2))
        assert self.all_of(fake, pool) == (1600, 1600, 1600, 1600)
        assert free_async(fake, first, streams[0]) == free_async(fake, second, streams[0]) == 0
        assert self.all_of(fake, pool) == (1600, 1600, 1600, 1600)
        assert synchronize(fake, streams[0]) == 0
        assert self.all_of(fake, pool) == (1000, 1600, 0, 1600)
        assert memory_info(fake) == (MEMORY_LIMIT - 1000, MEMORY_LIMIT)
        assert fake.live().reserved_bytes >= 1000
        assert fake.library.cudaMemPoolTrimTo(pool, ctypes.c_size_t(100)) == 0
        assert self.all_of(fake, pool) == (100, 1600, 0, 1600)
        zero = ctypes.c_uint64(0)
        for which in MOST_RESERVED, MOST_USED:
            assert fake.library.cudaMemPoolSetAttribute(pool, which, ctypes.byref(zero)) == 0
        assert self.all_of(fake, pool) == (100, 100, 0, 0)
        fake.reset()
        assert self.all_of(fake, pool) == (0, 100, 0, 0)

    def test_memory_that_is_freed_on_the_same_stream_is_used_again(self, fake, pool, streams):
        fake.set_scheduler("lazy")
        fake.set_memory_limit(1000)
        assert self.set_threshold(fake, pool, 1000) == 0
        for _ in range(3):
            memory = allocate_async(fake, 900, pool, streams[0])
            assert free_async(fake, memory, streams[0]) == 0
        assert allocate_async(fake, 900, pool, streams[1]) == MEMORY_ALLOCATION
        assert synchronize(fake, streams[0]) == 0
        memory = allocate_async(fake, 900, pool, streams[1])
        assert allocate_async(fake, 101, pool, streams[1]) == MEMORY_ALLOCATION
        assert free_async(fake, memory, streams[1]) == 0

    def test_pool_that_keeps_others_from_memory(self, fake, pool, streams):
        fake.set_memory_limit(1000)
        assert self.set_threshold(fake, pool, 1000) == 0
        assert free_async(fake, allocate_async(fake, 900, pool)) == 0
        other = create_pool(fake, 0)
        assert allocate_async(fake, 500, other) == MEMORY_ALLOCATION
        assert fake.library.cudaMemPoolTrimTo(pool, ctypes.c_size_t(0)) == 0
        assert free_async(fake, allocate_async(fake, 500, other)) == 0

    def test_arguments(self, fake, pool):
        value = ctypes.c_uint64()
        assert fake.library.cudaMemPoolGetAttribute(pool, 99, ctypes.byref(value)) == INVALID_VALUE
        assert fake.library.cudaMemPoolGetAttribute(pool, USED, None) == INVALID_VALUE
        assert fake.library.cudaMemPoolTrimTo(ctypes.c_void_p(8), 0) == INVALID_VALUE
        assert allocate_async(fake, 1, None) == INVALID_VALUE
        assert allocate_async(fake, 1, pool, 3) == INVALID_RESOURCE_HANDLE
        assert allocate_async(fake, 0, pool).value is None


def test_pointer_attributes(fake):
    def attributes(pointer):
        found = PointerAttributes()
        assert fake.library.cudaPointerGetAttributes(ctypes.byref(found), pointer) == 0
        return found.type, found.device, found.device_pointer, found.host_pointer

    fake.library.cudaSetDevice(1)
    memory, pinned, managed = allocate(fake, 8), allocate_pinned(fake, 8), ctypes.c_void_p()
    assert fake.library.cudaMallocManaged(ctypes.byref(managed), ctypes.c_size_t(8), 1) == 0
    fake.library.cudaSetDevice(0)
    host, address = ctypes.create_string_buffer(8), ctypes.addressof(pinned)
    inside = offset(memory, 7)
    assert attributes(inside) == (2, 1, inside.value, None)
    assert attributes(pinned) == (1, 1, address, address)
    assert attributes(managed) == (3, 1, managed.value, managed.value)
    assert attributes(host) == (0, -2, None, ctypes.addressof(host))
    assert attributes(offset(memory, 8)) == (0, -2, None, memory.value + 8)
    ctypes.memset(managed, 7, 8)
    assert copy(fake, host, managed, 8, DEVICE_TO_HOST) == 0
    assert host.raw == b"\7" * 8
    assert fake.library.cudaFree(memory) == fake.library.cudaFreeHost(pinned) == 0
    assert fake.library.cudaFree(managed) == 0
    assert attributes(memory)[0] == 0


class TestCapture:
    """What spoils a capture is both an error and misuse."""

    @pytest.fixture
    def captured(self, fake, streams):
        fake.set_capturing(streams[0], True)
        yield streams[0]
        fake.set_capturing(streams[0], False)
        assert self.status(fake, streams[0]) == (0, 0)

    def status(self, fake, stream):
        status = ctypes.c_int(-1)
        handle = ctypes.c_void_p(stream)
        return fake.library.cudaStreamIsCapturing(handle, ctypes.byref(status)), status.value

    def refused(self, fake, code, expected, text):
        assert code == expected
        assert text in fake.take_misuse()

    def exchange(self, fake, mode):
        mode = ctypes.c_int(mode)
        assert fake.library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
        return mode.value

    def test_work_is_done_all_the_same(self, fake, streams, captured, pool):
        assert self.status(fake, captured) == (0, 1)
        assert self.status(fake, streams[1]) == self.status(fake, None) == (0, 0)
        memory = allocate_async(fake, 8, pool, captured)
        assert fill(fake, memory, 7, 8, captured) == 0
        assert fetch(fake, memory, 8) == b"\7" * 8
        assert free_async(fake, memory, captured) == 0

    def test_nobody_can_wait_for_it(self, fake, streams, captured):
        unsupported = CAPTURE_UNSUPPORTED, "the stream is being captured"
        self.refused(fake, synchronize(fake, captured), *unsupported)
        self.refused(fake, query(fake, captured), *unsupported)
        code = fake.library.cudaStreamDestroy(ctypes.c_void_p(captured))
        self.refused(fake, code, *unsupported)
        code = fake.library.cudaDeviceSynchronize()
        self.refused(fake, code, CAPTURE_UNSUPPORTED, "a stream of the device")
        self.exchange(fake, 2)
        assert synchronize(fake, streams[1]) == 0
        self.exchange(fake, 0)
        fake.library.cudaSetDevice(1)
        assert fake.library.cudaDeviceSynchronize() == 0

    def test_it_waits_for_no_event_from_outside(self, fake, streams, captured, event):
        assert record(fake, event, streams[1]) == 0
        self.refused(fake, wait(fake, captured, event), CAPTURE_ISOLATION, "recorded outside")

    def test_events_of_a_capture(self, fake, streams, captured, event):
        assert record(fake, event, captured) == 0
        assert wait(fake, captured, event) == 0
        for wait_for in fake.library.cudaEventQuery, fake.library.cudaEventSynchronize:
            self.refused(fake, wait_for(event), CAPTURED_EVENT, "was recorded in a capture")
        assert wait(fake, streams[1], event) == 0
        assert self.status(fake, streams[1]) == (0, 1)
        fake.set_capturing(captured, False)
        assert self.status(fake, streams[1]) == (0, 0)
        self.refused(fake, wait(fake, streams[1], event), CAPTURED_EVENT, "that has ended")
        fake.set_capturing(captured, True)

    def test_two_captures(self, fake, streams, captured, event):
        assert record(fake, event, captured) == 0
        fake.set_capturing(streams[1], True)
        self.refused(fake, wait(fake, streams[1], event), CAPTURE_MERGE, "of another capture")
        fake.set_capturing(streams[1], False)

    def test_calls_that_no_capture_sees(self, fake, streams, captured, event):
        pointer = ctypes.c_void_p()

        def calls():
            size = ctypes.c_size_t(8)
            yield fake.library.cudaMalloc(ctypes.byref(pointer), size)
            yield fake.library.cudaFree(pointer)
            yield fake.library.cudaHostAlloc(ctypes.byref(pointer), size, 0)
            yield fake.library.cudaFreeHost(pointer)
            yield fake.library.cudaEventQuery(event)
            yield fake.library.cudaEventSynchronize(event)
            yield query(fake, streams[1])
            yield synchronize(fake, streams[1])

        for mode in 0, 1:
            self.exchange(fake, mode)
            codes = calls()
            self.refused(fake, next(codes), CAPTURE_UNSUPPORTED, "cudaMalloc: not permitted")
            assert pointer.value is None
        codes = []
        other = threading.Thread(target=lambda: codes.extend(calls()))
        other.start()
        other.join()
        # Without a pointer there is nothing to free.
        refused = [CAPTURE_UNSUPPORTED]
        assert codes == [*refused, 0, *refused, 0, *refused * 4]
        assert fake.take_misuse().count("\n") == 6
        assert self.exchange(fake, 2) == 1
        assert list(calls()) == [0] * 8
        assert self.exchange(fake, 0) == 2
        assert fake.library.cudaThreadExchangeStreamCaptureMode(None) == INVALID_VALUE

    def test_a_blocking_stream_locks_the_legacy_stream(self, fake, event):
        stream = create_stream(fake, flags=0)
        fake.set_capturing(stream, True)
        for use in (
            lambda: synchronize(fake, None),
            lambda: wait(fake, LEGACY, event),
            lambda: record(fake, event, None),
        ):
            self.refused(fake, use(), CAPTURE_IMPLICIT, "the legacy default stream was used")
        assert self.status(fake, None)[0] == CAPTURE_IMPLICIT
        self.exchange(fake, 2)
        assert query(fake, PER_THREAD) == 0
        self.exchange(fake, 0)
        fake.set_capturing(stream, False)
        assert synchronize(fake, None) == 0
        destroy_stream(fake, stream)

    def test_a_capture_frees_only_what_it_allocates(self, fake, captured, streams, pool):
        memory = allocate_async(fake, 8, pool, streams[1])
        code = free_async(fake, memory, captured)
        self.refused(fake, code, INVALID_VALUE, "allocated outside of it")
        assert free_async(fake, memory, streams[1]) == 0


@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        (NOT_READY, "cudaErrorNotReady", "device not ready"),
        (700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"),
        (719, "cudaErrorLaunchFailure", "unspecified launch failure"),
        (CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "not permitted when stream"),
        (CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "uncaptured work"),
        (12345, "unrecognized error code", "unrecognized error code"),
    ],
)
def test_error_texts(fake, code, name, text):
    library = fake.library
    library.cudaGetErrorName.restype = library.cudaGetErrorString.restype = ctypes.c_char_p
    assert library.cudaGetErrorName(code).decode() == name
    assert text in library.cudaGetErrorString(code).decode()


class TestDevices:
    def test_two_h200_like_devices(self, fake):
        count, attribute = ctypes.c_int(), ctypes.c_int()
        assert fake.library.cudaGetDeviceCount(ctypes.byref(count)) == 0
        assert count.value == 2
        multiprocessors = int(os.environ.get("GPUOPS_FAKE_MULTIPROCESSORS", 132))
        for number, expected in [(75, 9), (76, 0), (16, multiprocessors)]:
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
