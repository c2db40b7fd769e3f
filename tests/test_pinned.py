"""Page-locked NumPy arrays: pin, pinned_empty, and the blocks of pinned_memory."""

import asyncio
import contextlib
import ctypes
import doctest
import functools
import gc
import inspect
import io
import mmap
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from faults.fake import PointerAttributes
from helpers import (
    DTYPES,
    filled_array,
    locked_by_somebody_else,
    read_only,
    run_child,
    run_threads,
    same,
)
from numpy._core.multiarray import get_handler_name

INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED, UNKNOWN = 1, 2, 801, 999
CHUNK = 2 << 20  # bytes of the pool that are locked at a time
MOST_IDLE = 256 << 20  # and that stay locked though nobody uses them


@pytest.fixture
def gpuops(gpu):
    return gpu.gpuops


@pytest.fixture
def fake(fake):
    fake.gpuops.empty_cache()
    return fake


def locked_bytes(fake):
    return fake.fake.live().registered_bytes


def attributes_of(fake, address):
    found = PointerAttributes()
    fake.fake.library.cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(address))
    return found


def is_locked(fake, array):
    """From its first byte to its last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return all(attributes_of(fake, address).type == 1 for address in (low, high - 1))


def span_of(array):
    low, high = np.lib.array_utils.byte_bounds(array)
    return high - low


@pytest.mark.parametrize("name", ["pin", "pinned_empty", "pinned_memory"])
def test_the_examples_in_the_documentation(device, name, monkeypatch):
    # They say `import gpuops` and mean the build under test.
    monkeypatch.setitem(sys.modules, "gpuops", device.gpuops)
    text = inspect.getdoc(getattr(device.gpuops, name))
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples
    printed = []
    with device.gpuops.device(device.default):
        failed = doctest.DocTestRunner().run(test, out=printed.append).failed
    assert failed == 0, "".join(printed)


# Errors.


def test_without_a_gpu(cpu_device):
    gpuops = cpu_device.gpuops
    if gpuops.is_available():
        pytest.skip("there is a GPU")

    def text_of(call):
        with pytest.raises(gpuops.DeviceError) as caught:
            call()
        operator, _, text = str(caught.value).partition(": ")
        assert operator == caught.value.operator
        return operator, text

    _, expected = text_of(lambda: gpuops.to_device([1]))
    assert text_of(lambda: gpuops.pin(np.zeros(3))) == ("pin", expected)
    assert text_of(lambda: gpuops.pinned_empty(3)) == ("pinned_empty", expected)
    assert text_of(gpuops.pinned_memory().__enter__) == ("pinned_memory", expected)
    assert get_handler_name(np.zeros(3)) == "default_allocator"


@pytest.mark.parametrize("x", [[1, 2], 5, "text", None, np.float64(3), {}], ids=repr)
def test_what_has_no_memory_to_lock(gpuops, x):
    with pytest.raises(TypeError, match=r"x must be a NumPy array, or an object with a buffer"):
        gpuops.pin(x)


def test_what_cannot_be_moved(gpuops):
    with pytest.raises(TypeError, match="x must be a NumPy array"):
        gpuops.pin(gpuops.zeros(3))
    with pytest.raises(TypeError, match="Python objects"):
        gpuops.pin(np.array([None]))
    with pytest.raises(TypeError, match="masked array"):
        gpuops.pin(np.ma.zeros(3))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((-1,), {}, ValueError, "negative"),
        (((1 << 40, 1 << 40),), {}, ValueError, "too big"),
        ((3, "O"), {}, TypeError, "Python objects"),
        ((3, ">f8"), {}, TypeError, "byte order"),
        ((3,), {"order": "K"}, ValueError, "order must be 'C' or 'F', not 'K'"),
        ((3, "f8", "F"), {}, TypeError, "positional"),
        ((), {}, TypeError, "shape"),
    ],
)
def test_no_such_array(gpuops, arguments, options, error, text):
    with pytest.raises(error, match=text):
        gpuops.pinned_empty(*arguments, **options)


@pytest.mark.parametrize("size", [1 << 60, 2**63 - 1])
def test_more_than_there_is(gpuops, size):
    gpuops.pinned_empty(3)  # whose memory the pool keeps
    with pytest.raises(MemoryError, match=r"^pinned_empty: .*bytes"):
        gpuops.pinned_empty(size, "u1")
    with gpuops.pinned_memory(), pytest.raises(MemoryError):
        np.zeros(size, "u1")
    assert gpuops.pinned_empty(3).shape == (3,)


# pin.


def test_a_block(fake):
    x = np.arange(1000.0)
    with fake.gpuops.pin(x) as locked:
        assert locked.locked and is_locked(fake, x)
        assert locked_bytes(fake) == x.nbytes
        assert repr(locked) == "<gpuops.pin of shape (1000,), dtype float64>"
    assert not locked.locked and not is_locked(fake, x)
    assert locked_bytes(fake) == 0 and repr(locked) == "<gpuops.pin, released>"
    with pytest.raises(ValueError, match="was released"), locked:
        pass
    with pytest.raises(ZeroDivisionError), fake.gpuops.pin(x):
        _ = 1 // 0
    assert locked_bytes(fake) == 0


def test_until_it_is_released_or_gone(fake):
    x = np.arange(10.0)
    held = sys.getrefcount(x)
    locked = fake.gpuops.pin(x)
    assert sys.getrefcount(x) == held + 1
    assert locked.release() is None and locked.release() is None
    assert sys.getrefcount(x) == held and locked_bytes(fake) == 0
    locked = fake.gpuops.pin(x)
    alive = weakref.ref(locked)
    assert alive() is locked and locked_bytes(fake) == x.nbytes
    del locked
    assert alive() is None and locked_bytes(fake) == 0 and sys.getrefcount(x) == held


def test_it_keeps_the_memory(fake):
    locked = fake.gpuops.pin(np.arange(100_000.0))
    x = bytearray(100)
    other = fake.gpuops.pin(x)
    with pytest.raises(BufferError):
        x.append(1)
    assert locked_bytes(fake) == 800_100
    del locked, other
    x.append(1)
    assert locked_bytes(fake) == 0


LAYOUTS = {
    "contiguous": lambda x: x,
    "every second": lambda x: x[::2],
    "backward": lambda x: x[::-1],
    "transposed": lambda x: x.reshape(8, -1).T,
    "columns": lambda x: x.reshape(8, -1)[:, 3:-5],
    "backward columns": lambda x: x.reshape(8, -1)[::-1, 3:-5],
    "repeated": lambda x: np.broadcast_to(x[5:6], (3, 4)),
    "one": lambda x: x[7:8].reshape(()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_the_lowest_to_the_highest_byte(fake, layout):
    x = LAYOUTS[layout](np.arange(4096, dtype="i2"))
    with fake.gpuops.pin(x):
        assert locked_bytes(fake) == span_of(x) and is_locked(fake, x)
        same(fake.gpuops.to_device(x).to_host(), np.ascontiguousarray(x).reshape(x.shape))
    assert locked_bytes(fake) == 0


@pytest.mark.parametrize("shape", [0, (3, 0), (0, 1 << 40)])
def test_nothing_to_lock(fake, shape):
    with fake.gpuops.pin(np.zeros(shape)):
        assert locked_bytes(fake) == 0


def test_neighbours_on_one_page(fake):
    page = np.zeros(4096, np.uint8)
    with fake.gpuops.pin(page[10:20]), fake.gpuops.pin(page[20:30]), fake.gpuops.pin(page[40:50]):
        assert locked_bytes(fake) == 30
        page[...] = np.arange(4096)
        same(fake.gpuops.to_device(page).to_host(), page)
    assert locked_bytes(fake) == 0


def test_the_same_memory_more_than_once(fake):
    x = np.zeros(100, np.uint8)
    first, second, part = fake.gpuops.pin(x), fake.gpuops.pin(x), fake.gpuops.pin(x[30:40])
    assert locked_bytes(fake) == 100
    first.release()
    part.release()
    assert locked_bytes(fake) == 100
    second.release()
    assert locked_bytes(fake) == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_parts_in_any_order(fake, seed):
    """What is locked is what some pin has locked, up to the ends of the calls that locked it."""
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, 1000, np.uint8)
    fake.fake.set_scheduler("lazy")
    pins = []
    for _ in range(60):
        if pins and random.random() < 0.45:
            pins.pop(random.integers(len(pins)))[0].release()
        else:
            low, high = sorted(random.integers(0, 1001, 2))
            pins.append((fake.gpuops.pin(x[low:high]), low, high))
        wanted = np.zeros(1000, bool)
        for _, low, high in pins:
            wanted[low:high] = True
        for byte in random.integers(0, 1000, 20):
            assert not wanted[byte] or is_locked(fake, x[byte : byte + 1])
        low, high = sorted(random.integers(0, 1001, 2))
        expected = x[low:high].copy()
        d = fake.gpuops.to_device(x[low:high])
        x[low:high] += 1
        same(d.to_host(), expected)
        d.to_host(x[low:high])
        same(x[low:high], expected)
    while pins:
        pins.pop()[0].release()
    assert locked_bytes(fake) == 0


def test_a_large_array_of_which_a_part_is_locked(fake):
    x = np.random.default_rng(0).integers(0, 256, 3 * CHUNK, np.uint8)
    rows = x.reshape(16, -1)
    expected = x.copy()
    fake.fake.set_scheduler("lazy")
    for part in (x[:100], x[-100:], x[CHUNK:-CHUNK], x[100:-100], rows[3]):
        with fake.gpuops.pin(part):
            for layout in (x, rows[:, 1:], rows[::-1, 5:]):
                right = np.array(layout, order="C")
                d = fake.gpuops.to_device(layout)
                layout[...] = 0
                same(d.to_host(), right)
                d.to_host(layout)
                same(x, expected)
    fake.gpuops.empty_cache()  # of rings, which are locked too
    assert locked_bytes(fake) == 0


READ_ONLY = {
    "by a flag": lambda folder: read_only(np.arange(5000.0)),
    "bytes": lambda folder: np.frombuffer(bytes(range(256)) * 10, np.uint8),
    "a file": lambda folder: np.memmap(filled_file(folder), np.uint8, "r"),
    "a part of a file": lambda folder: np.memmap(filled_file(folder), "u2", "r", 8)[5:100:3],
}


def filled_file(folder):
    path = folder / "file"
    path.write_bytes(np.random.default_rng(0).bytes(10_000))
    return path


@pytest.mark.parametrize("kind", READ_ONLY)
def test_read_only(gpu, tmp_path, kind):
    x = READ_ONLY[kind](tmp_path)
    with gpu.gpuops.pin(x):
        assert gpu.fake is None or is_locked(gpu, x)
        same(gpu.gpuops.to_device(x).to_host(), np.array(x))
        same(np.asarray(gpu.gpuops.gather(x, [3, 1])), np.asarray(x[[3, 1]]))


def test_a_file_that_may_be_written_to(gpuops, tmp_path):
    x = np.memmap(filled_file(tmp_path), np.uint8, "r+")
    expected = np.array(x)[::-1].copy()
    try:
        pin = gpuops.pin(x)
    except gpuops.DeviceError as error:
        # On a real system it depends on where the file is.
        assert error.code == INVALID_VALUE and "files" in str(error), error
        pytest.skip("memory of files cannot be page-locked here")
    with pin:
        gpuops.to_device(expected).to_host(x)
    assert (tmp_path / "file").read_bytes() == expected.tobytes()


def test_memory_that_cannot_be_locked(fake):
    x = np.arange(10_000.0)
    with (
        fake.fake.fail(1, INVALID_VALUE, function="cudaHostRegister"),
        pytest.raises(
            fake.gpuops.DeviceError, match=r"InvalidValue.*files.*: pin a copy of it$"
        ) as caught,
    ):
        fake.gpuops.pin(x)
    assert (caught.value.code, caught.value.name) == (INVALID_VALUE, "cudaErrorInvalidValue")
    assert locked_bytes(fake) == 0
    same(fake.gpuops.to_device(x).to_host(), x)


def test_read_only_memory_that_cannot_be_locked(fake, tmp_path):
    x = np.memmap(filled_file(tmp_path), np.uint8, "r")
    assert not is_locked(fake, x)
    with (
        fake.fake.fail(2, NOT_SUPPORTED, function="cudaHostRegister"),
        pytest.raises(fake.gpuops.DeviceError, match=r"^pin on cuda:0: .*NotSupported"),
    ):
        fake.gpuops.pin(x)
    assert locked_bytes(fake) == 0
    source = f"""
import numpy as np
import gpuops
x = np.memmap({str(tmp_path / "file")!r}, np.uint8, "r")
try:
    gpuops.pin(x)
except gpuops.DeviceError as error:
    print(error)
np.testing.assert_array_equal(gpuops.to_device(x).to_host(), x)
"""
    text = run_child(fake.gpuops, source, GPUOPS_FAKE_LOCKS_READ_ONLY="0")
    assert "cudaErrorInvalidValue (1)" in text
    assert "x is read-only, and this GPU cannot lock memory that is: pin a copy of it" in text
    # A mapping that is writable is not tried as a read-only one.
    y = np.zeros(10)
    with (
        fake.fake.fail(1, INVALID_VALUE, function="cudaHostRegister"),
        pytest.raises(fake.gpuops.DeviceError, match="InvalidValue"),
    ):
        fake.gpuops.pin(y)
    assert locked_bytes(fake) == 0


def test_an_anonymous_mapping(gpuops):
    with mmap.mmap(-1, 1 << 16) as memory:
        with gpuops.pin(memory), pytest.raises(BufferError):
            memory.resize(1 << 15)
        memory[:3] = b"abc"


# What others have locked.


def test_what_somebody_else_has_locked(fake):
    x = np.arange(1000, dtype=np.uint8)
    library, address = fake.fake.library, ctypes.c_void_p(x.ctypes.data + 100)
    assert library.cudaHostRegister(address, ctypes.c_size_t(200), 0) == 0
    with fake.gpuops.pin(x[100:300]), fake.gpuops.pin(x[150:160]):
        assert locked_bytes(fake) == 200
    assert is_locked(fake, x[100:300])
    for part in (x, x[250:400], x[:101], x[99:500]):
        with pytest.raises(ValueError, match=r"^part of x is page-locked already"):
            fake.gpuops.pin(part)
        assert locked_bytes(fake) == 200
    with fake.gpuops.pin(x[:100]), fake.gpuops.pin(x[300:]):
        assert locked_bytes(fake) == 1000
    with (
        locked_by_somebody_else(fake, x[500:600]),
        pytest.raises(ValueError, match=r"^part of x is page-locked already"),
    ):
        fake.gpuops.pin(x[200:550])  # both ends, and not what lies between them
    assert library.cudaHostUnregister(address) == 0


def test_memory_that_is_made_page_locked(fake):
    x = fake.fake.page_locked(np.arange(100.0))
    with fake.gpuops.pin(x):
        assert locked_bytes(fake) == 0
    fake.fake.library.cudaFreeHost(ctypes.c_void_p(x.ctypes.data))
    y = fake.gpuops.pinned_empty(100)
    before = locked_bytes(fake)
    with fake.gpuops.pin(y), fake.gpuops.pin(y[3:7]):
        assert locked_bytes(fake) == before
    assert is_locked(fake, y)


def test_the_device_it_is_locked_by(fake):
    x = np.zeros(10)
    with fake.gpuops.device(1), fake.gpuops.pin(x):
        assert attributes_of(fake, x.ctypes.data).device == 1
        assert fake.fake.current_device() == 0
        with fake.gpuops.device(0):
            same(fake.gpuops.to_device(x).to_host(), x)
            y = np.zeros(10)
            with fake.gpuops.pin(y):
                assert attributes_of(fake, y.ctypes.data).device == 0
    with fake.gpuops.device("cpu"), fake.gpuops.pin(x):
        assert is_locked(fake, x)
    with (
        pytest.raises(fake.gpuops.DeviceError, match="there is no cuda:7"),
        fake.gpuops.device(7),
    ):
        fake.gpuops.pin(x)


def test_while_a_graph_is_captured(fake):
    x, stream = np.zeros(10), fake.gpuops.Stream()
    fake.fake.set_capturing(stream.__cuda_stream__()[1], True)
    with fake.gpuops.pin(x):
        y = fake.gpuops.pinned_empty(1 << 20)
        assert is_locked(fake, x) and is_locked(fake, y)
    fake.fake.set_capturing(stream.__cuda_stream__()[1], False)
    assert not is_locked(fake, x)


# Copies and operators.


@pytest.fixture(params=["pin", "pinned_empty", "pinned_memory"])
def copy_of(request, gpuops):
    """A copy of an array in page-locked memory."""
    pins = []

    def copy(array):
        if request.param == "pin":
            array = array.copy()
            pins.append(gpuops.pin(array))
            return array
        if request.param == "pinned_empty":
            copied = gpuops.pinned_empty(array.shape, array.dtype)
            copied[...] = array
            return copied
        with gpuops.pinned_memory():
            return array.copy()

    yield copy
    for pin in pins:
        pin.release()


@pytest.mark.parametrize("scheduler", ["now", "lazy", "shuffled"])
@pytest.mark.parametrize("size", [1, 1000, CHUNK + 5, 8 * CHUNK + 1])
def test_the_source_may_change_at_once(gpu, copy_of, size, scheduler):
    if gpu.fake is not None:
        gpu.fake.set_scheduler(scheduler, 3)
        gpu.fake.set_memory_limit(1 << 30)
    x = copy_of(np.arange(size).astype(np.uint8))
    expected = x.copy()
    stream = gpu.gpuops.Stream()
    d = gpu.gpuops.to_device(x, stream=stream)
    x[...] = 1
    del x
    same(d.to_host(), expected)
    out = copy_of(np.zeros(size, np.uint8))
    assert d.to_host(out, stream=stream) is out
    same(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(gpuops, copy_of, dtype):
    x = copy_of(filled_array((7, 5), dtype))
    same(np.asarray(gpuops.gather(x, [6, 0, 3])), x[[6, 0, 3]])
    same(gpuops.to_device(x[::-2, 1:]).to_host(), x[::-2, 1:].copy())


def test_operators(gpu, gpuops, copy_of):
    if gpu.fake is not None:
        gpu.fake.set_scheduler("lazy")
    x, y = copy_of(np.arange(12.0).reshape(3, 4)), copy_of(np.full((3, 4), 2.0))
    out = copy_of(np.zeros((3, 4)))
    assert gpuops.add(x, y, out=out) is out
    same(out, np.arange(2.0, 14.0).reshape(3, 4))
    same(gpuops.multiply(x, y), np.arange(0.0, 24.0, 2).reshape(3, 4))
    gpuops.scatter(out, copy_of(np.array([2, 0])), copy_of(np.ones((2, 4))))
    same(out, np.array([[1.0] * 4, [6.0, 7, 8, 9], [1.0] * 4]))
    gpuops.gather(x, copy_of(np.array([2, 2])), out=out[:2])
    same(out[:2], x[[2, 2]])
    same(gpuops.matmul(x, y.T), x @ y.T)
    d = gpuops.to_device(x)
    same(gpuops.add(d, y).to_host(), x + y)
    with pytest.raises(IndexError, match="index 3 is out of bounds for axis 0 with size 3"):
        gpuops.gather(x, [0, 3], out=out[:2])
    same(out[:2], x[[2, 2]])


def test_tables_larger_than_the_gpu(fake):
    x = fake.gpuops.pinned_empty((3000, 100))
    x[...] = np.arange(300_000.0).reshape(x.shape)
    indices = np.random.default_rng(0).integers(0, 3000, 1000)
    fake.fake.set_scheduler("lazy")
    fake.fake.leave_free(1 << 20)
    same(fake.gpuops.gather(x, indices), x[indices])


def test_a_copy_that_fails_half_way(fake):
    """The rows that are on their way already are waited for."""
    fake.fake.set_scheduler("lazy")
    x = np.arange(80_000.0).reshape(4, -1)
    pin = fake.gpuops.pin(x)
    with (
        fake.fake.fail(3, UNKNOWN, function="cudaMemcpyAsync"),
        pytest.raises(fake.gpuops.DeviceError, match="cudaMemcpyAsync"),
    ):
        fake.gpuops.to_device(x[:, 1:-1])
    pin.release()
    fake.fake.run()


def test_work_that_nobody_could_wait_for(fake):
    """Its memory stays locked until somebody has waited for the device."""
    fake.fake.set_scheduler("lazy")
    x = np.arange(10.0)
    pin = fake.gpuops.pin(x)
    with (
        fake.fake.fail(1, UNKNOWN, "once", "cudaStreamSynchronize"),
        pytest.raises(fake.gpuops.DeviceError, match="cudaStreamSynchronize"),
    ):
        fake.gpuops.to_device(x)
    pin.release()
    assert locked_bytes(fake) == 0
    pin = fake.gpuops.pin(x)
    with (
        fake.fake.fail(1, UNKNOWN, "from then on", "cudaStreamSynchronize"),
        fake.fake.fail(1, UNKNOWN, "from then on", "cudaDeviceSynchronize"),
    ):
        with pytest.raises(fake.gpuops.DeviceError, match="cudaStreamSynchronize"):
            fake.gpuops.to_device(x)
        pin.release()
        assert locked_bytes(fake) == x.nbytes
        with fake.gpuops.pin(x[2:5]):
            assert locked_bytes(fake) == x.nbytes
    fake.gpuops.empty_cache()
    assert locked_bytes(fake) == 0


def test_locked_and_released_half_way(fake):
    """The driver may copy later what was locked at its call, though the call before it was not."""
    fake.fake.set_scheduler("lazy")
    x, pins = np.arange(10_000.0), []

    def visit(name, _):
        if pins:
            pins[0].release()
        elif name == "cudaMemcpyAsync":
            pins.append(fake.gpuops.pin(x))

    with fake.fake.visit(visit):
        d = fake.gpuops.to_device(x)
    assert not pins[0].locked and locked_bytes(fake) == 0
    same(d.to_host(), x)


def test_released_while_threads_copy(fake):
    """What one thread unlocks stays locked until the copies of the others are done."""
    fake.fake.set_scheduler("lazy")
    x, stop = np.arange(10_000.0), threading.Event()

    def pins():
        for _ in range(300):
            fake.gpuops.pin(x).release()
        stop.set()

    def copies():
        with fake.gpuops.Stream():
            while not stop.is_set():
                same(fake.gpuops.to_device(x).to_host(), x)
                same(fake.gpuops.gather(x, [5], device="cuda"), np.array([5.0]))

    run_threads([pins, pins, copies, copies])
    assert locked_bytes(fake) == 0


def test_threads_pin_the_same_parts(fake):
    x = np.zeros(1000, np.uint8)

    def work(seed):
        random = np.random.default_rng(seed)
        pins = []
        for _ in range(200):
            low, high = sorted(random.integers(0, 1001, 2))
            pins.append(fake.gpuops.pin(x[low:high]))
            if low < high:
                assert is_locked(fake, x[low:high])
            if len(pins) > 3:
                pins.pop(random.integers(4)).release()

    run_threads([functools.partial(work, seed) for seed in range(4)])
    gc.collect()
    assert locked_bytes(fake) == 0


def test_threads_pin_what_cannot_be_locked(fake):
    """The second one waits for the first, which fails, and then locks it itself."""
    x, pins, errors, second = np.zeros(10_000, np.uint8), [], [], []

    def pin():
        try:
            with fake.gpuops.device("cuda:1"):
                pins.append(fake.gpuops.pin(x))
        except MemoryError as error:
            errors.append(error)

    def visit(name, _):
        if name == "cudaHostRegister" and not second:
            second.append(threading.Thread(target=pin))
            second[0].start()
            time.sleep(0.2)
        elif second and not errors and threading.current_thread() is not second[0]:
            time.sleep(0.2)  # while the first one makes the other device current again

    with (
        fake.fake.fail(1, OUT_OF_MEMORY, "once", "cudaHostRegister") as fault,
        fake.fake.visit(visit),
    ):
        pin()
        second[0].join()
    assert fault.reached and len(errors) == len(pins) == 1
    assert is_locked(fake, x) and locked_bytes(fake) == x.nbytes
    pins[0].release()
    assert locked_bytes(fake) == 0


def test_what_cannot_be_locked_beside_a_call_that_uses_it(fake):
    """The call goes on without, and who comes next locks it."""
    x, pins = np.arange(10_000.0), []

    def visit(name, _):
        if name != "cudaMemcpyAsync":
            return
        with (
            fake.fake.fail(1, OUT_OF_MEMORY, "once", "cudaHostRegister"),
            pytest.raises(MemoryError),
        ):
            fake.gpuops.pin(x)
        assert locked_bytes(fake) == 0
        pins.append(fake.gpuops.pin(x))
        assert locked_bytes(fake) == x.nbytes

    fake.fake.set_scheduler("lazy")
    with fake.fake.visit(visit):
        d = fake.gpuops.to_device(x)
    same(d.to_host(), x)
    pins[0].release()
    assert len(pins) == 1 and locked_bytes(fake) == 0


ON_THE_GPU = {
    "contiguous": lambda gpuops, x, d: gpuops.to_device(x, stream=d.stream),
    "with gaps": lambda gpuops, x, d: gpuops.to_device(x[::2], stream=d.stream),
    "transposed": lambda gpuops, x, d: gpuops.to_device(x.reshape(100, -1).T, stream=d.stream),
    "turned": lambda gpuops, x, d: gpuops.to_device(x.reshape(100, -1)[:, 1:].T, stream=d.stream),
    "large": lambda gpuops, x, d: gpuops.to_device(x.reshape(2, -1)[:, 5:-5], stream=d.stream),
    "operand": lambda gpuops, x, d: gpuops.add(d[:5], x[5:10]),
    "operand with gaps": lambda gpuops, x, d: gpuops.add(d[:5], x[5:0:-1]),
    "table": lambda gpuops, x, d: gpuops.gather(x, FIVE, out=d[:5]),
    "table with gaps": lambda gpuops, x, d: gpuops.gather(x[::2], FIVE, out=d[:5]),
    "flat table": lambda gpuops, x, d: gpuops.take(x.reshape(100, -1)[:, 1:], FIVE, out=d[:5]),
}
FIVE = np.array([400, 3, -1, 12, -7])


@pytest.mark.parametrize("size", [1000, 2_000_000])
@pytest.mark.parametrize("name", ON_THE_GPU)
def test_the_work_of_the_stream_comes_first(in_any_order, fake, name, size):
    """What that is still to write to page-locked memory is there when it is read."""
    gpuops, values = fake.gpuops, np.arange(float(size))
    d = gpuops.to_device(values, stream=gpuops.Stream())
    x = gpuops.pinned_empty(size, "f8")
    x[...] = 0
    d.stream.synchronize()
    error = fake.fake.library.cudaMemcpyAsync(
        *map(ctypes.c_void_p, (x.ctypes.data, d.ptr)), ctypes.c_size_t(x.nbytes), 2,
        ctypes.c_void_p(d.stream.ptr),
    )  # fmt: skip
    assert error == 0
    found = ON_THE_GPU[name](gpuops, x, d).to_host()
    same(found, ON_THE_GPU[name](gpuops, values, d).to_host())


# pinned_empty.


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), 3, (2, 3), (5, 0, 3), (1, 4, 2)])
def test_pinned_empty(gpuops, shape, order):
    x = gpuops.pinned_empty(shape, "f4", order=order)
    like = np.empty(shape, "f4", order=order)
    assert type(x) is np.ndarray and x.dtype == like.dtype
    assert x.shape == like.shape and (x.strides == like.strides or x.size == 0)
    assert x.flags.c_contiguous == like.flags.c_contiguous
    assert x.flags.f_contiguous == like.flags.f_contiguous
    assert x.flags.writeable and x.flags.aligned and not x.flags.owndata
    x[...] = 3
    assert (x == 3).all()


def test_what_pinned_empty_takes_for_a_dtype(gpuops):
    assert gpuops.pinned_empty(3).dtype == np.float64
    assert gpuops.pinned_empty(np.int64(3), np.int8).dtype == np.int8
    assert gpuops.pinned_empty([2, 3], dtype=[("a", "i4"), ("b", "S3")]).shape == (2, 3)
    assert gpuops.pinned_empty(2, ("i4", (3,))).shape == (2, 3)


def test_the_last_view_keeps_the_memory(fake):
    x = fake.gpuops.pinned_empty(CHUNK, "u1")
    assert is_locked(fake, x)
    address = x.ctypes.data
    part = x[100:200]
    del x
    fake.gpuops.empty_cache()
    assert is_locked(fake, part)
    part[...] = 5
    del part
    again = fake.gpuops.pinned_empty(CHUNK, "u1")
    assert again.ctypes.data == address
    del again
    fake.gpuops.empty_cache()
    assert locked_bytes(fake) == 0


SIZES = sorted(
    {size + more for size in (1, 64, 80, 4096, 917_504, 1_046_528, CHUNK) for more in (-1, 0, 1)}
)


def test_blocks_do_not_overlap(fake):
    arrays = []
    sizes = [size for size in SIZES for _ in range(3 if size > 9999 else 70)]
    for number, size in enumerate(sizes):
        x = fake.gpuops.pinned_empty(size, "u1")
        assert x.ctypes.data % 16 == 0 and (size == 0 or is_locked(fake, x))
        x[...] = number % 251
        arrays.append((number % 251, x))
    assert all((x == number).all() for number, x in arrays)
    order = np.random.default_rng(0).permutation(len(arrays))
    arrays = [arrays[i] for i in order[::2]]
    arrays += [(252, fake.gpuops.pinned_empty(size, "u1")) for size in SIZES]
    for number, x in arrays[-len(SIZES) :]:
        x[...] = number
    assert all((x == number).all() for number, x in arrays)


def test_small_arrays_share_what_is_locked(fake):
    before = fake.fake.calls("cudaHostRegister")
    arrays = [fake.gpuops.pinned_empty(10) for _ in range(1000)]
    assert fake.fake.calls("cudaHostRegister") == before + 1
    assert locked_bytes(fake) == CHUNK
    assert all(is_locked(fake, x) for x in arrays)


def test_what_stays_locked_is_bounded(fake):
    def make(count):
        return [fake.gpuops.pinned_empty(100 << 20, "u1") for _ in range(count)]

    arrays = make(5)
    assert locked_bytes(fake) > 500 << 20
    arrays.clear()
    assert 0 < locked_bytes(fake) <= MOST_IDLE
    calls = fake.fake.calls("cudaHostRegister")
    arrays = make(2)
    assert fake.fake.calls("cudaHostRegister") == calls
    arrays = [fake.gpuops.pinned_empty(MOST_IDLE, "u1")]
    arrays.clear()
    assert locked_bytes(fake) <= MOST_IDLE
    fake.gpuops.empty_cache()
    assert locked_bytes(fake) == 0


def test_no_memory_to_lock(fake):
    kept = fake.gpuops.pinned_empty(100 << 20, "u1")
    del kept
    # What is locked for nobody makes room.
    with fake.fake.fail(1, OUT_OF_MEMORY, "once", "cudaHostRegister"):
        x = fake.gpuops.pinned_empty(CHUNK, "u1")
    assert locked_bytes(fake) < 2 * CHUNK
    with fake.fake.fail(1, OUT_OF_MEMORY, "from then on", "cudaHostRegister"):
        with pytest.raises(MemoryError, match=r"^pinned_empty: cudaHostRegister .*\(2\)"):
            fake.gpuops.pinned_empty(CHUNK, "u1")
        with pytest.raises(MemoryError, match=r"^pin: cudaHostRegister .*\(2\)"):
            fake.gpuops.pin(np.zeros(5))
        with fake.gpuops.pinned_memory(), pytest.raises(MemoryError, match="Unable to allocate"):
            np.empty(CHUNK, "u1")
    with fake.gpuops.pinned_memory():
        assert is_locked(fake, np.empty(CHUNK, "u1")) and is_locked(fake, x)


# pinned_memory.

MAKERS = {
    "empty": lambda: np.empty(100),
    "zeros": lambda: np.zeros(100),
    "ones": lambda: np.ones((10, 10), "i2"),
    "one": lambda: np.array(5),
    "arange": lambda: np.arange(1000),
    "a sum": lambda: np.arange(1000) + np.ones(1000),
    "a copy": lambda: np.arange(10.0).copy(),
    "a part": lambda: np.concatenate([np.arange(5), np.arange(7)])[3:],
    "sorted": lambda: np.sort(np.arange(5000) % 77),
    "of a list": lambda: np.array([[1, 2], [3, 4]]),
    "of a text": lambda: np.loadtxt(io.StringIO("1 2\n" * 5000)),
    "of an iterator": lambda: np.fromiter(range(10_000), "i8"),
    "large": lambda: np.full(3 * CHUNK, 7, np.uint8),
    "random": lambda: np.random.default_rng(0).random(1000),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_numpy_in_a_block(gpu, maker):
    expected = MAKERS[maker]()
    with gpu.gpuops.pinned_memory():
        x = MAKERS[maker]()
    owner = x if x.flags.owndata else x.base
    assert get_handler_name(owner) == "gpuops.pinned_memory"
    assert gpu.fake is None or is_locked(gpu, x)
    same(gpu.gpuops.to_device(x).to_host(), expected if maker != "empty" else x.copy())
    assert maker == "empty" or (x == expected).all()
    assert get_handler_name(np.zeros(3)) == "default_allocator"


def test_results_of_ours_in_a_block(fake):
    with fake.gpuops.pinned_memory():
        on_gpu = fake.gpuops.gather(np.arange(10), [1, 2])
        on_cpu = fake.gpuops.gather(np.arange(10), [1, 2], device="cpu")
        fetched = fake.gpuops.to_device([1, 2]).to_host()
    assert all(is_locked(fake, x) and x.tolist() == [1, 2] for x in (on_gpu, on_cpu, fetched))


def test_zeros_are_zero(gpuops):
    with gpuops.pinned_memory():
        for size in (10, 1000, CHUNK):
            used = np.full(size, 255, np.uint8)
            del used
            assert not np.zeros(size, np.uint8).any()


def test_an_array_of_no_elements(gpuops):
    with gpuops.pinned_memory():
        arrays = [np.zeros(0), np.zeros((3, 0)), np.empty(0, "V0"), np.zeros(5)[:0].copy()]
    assert [x.size for x in arrays] == [0, 0, 0, 0]


def test_resizing_outside_the_block(fake):
    with fake.gpuops.pinned_memory():
        x = np.arange(10)
    for size in (11, 5000, 12_000, 6000, 10, CHUNK, 3, 0, 40):
        kept = min(size, len(x))
        before = x[:kept].copy()
        x.resize(size, refcheck=False)
        assert (x[:kept] == before).all() and not x[kept:].any()
        assert size == 0 or is_locked(fake, x)
        x[...] = np.arange(size)


def test_freed_elsewhere_by_another_thread(fake):
    arrays = []

    def make():
        with fake.gpuops.pinned_memory():
            arrays.extend(np.full(size, 3) for size in (5, 5000, 300_000))

    run_threads([make])
    assert all((x == 3).all() and is_locked(fake, x) for x in arrays)
    run_threads([arrays.clear])
    fake.gpuops.empty_cache()
    assert locked_bytes(fake) == 0


def test_blocks_in_blocks(gpuops):
    names = []

    def note():
        names.append(get_handler_name(np.zeros(3)).partition("_")[0])

    block = gpuops.pinned_memory()
    assert repr(block) == "gpuops.pinned_memory()"
    with block as entered:
        assert entered is block
        note()
        with block, gpuops.pinned_memory():
            note()
        note()
        with contextlib.suppress(ZeroDivisionError), block:
            _ = 1 // 0
        note()
    note()
    assert names == ["gpuops.pinned"] * 4 + ["default"]
    with pytest.raises(RuntimeError, match="left where it was not entered"):
        block.__exit__(None, None, None)


def test_nothing_is_entered_by_half(gpuops, monkeypatch):
    """As where there is no memory for the note of what to go back to."""

    class Full:
        def get(self):
            return ()

        def set(self, value):
            raise MemoryError

    monkeypatch.setattr(gpuops, "_entered", Full())
    with pytest.raises(MemoryError), gpuops.pinned_memory():
        pass
    assert get_handler_name(np.zeros(3)) == "default_allocator"


def test_what_is_no_allocator(gpuops):
    for previous in (None, 5, np.zeros(3)):
        with pytest.raises(TypeError, match="not an allocator of NumPy"):
            gpuops._core._leave_pinned_memory(previous)
    assert get_handler_name(np.zeros(3)) == "default_allocator"


def test_as_a_decorator(gpuops):
    @gpuops.pinned_memory()
    def make(depth):
        return [np.zeros(depth), *(make(depth - 1) if depth else [])]

    assert {get_handler_name(x) for x in make(3)} == {"gpuops.pinned_memory"}
    assert get_handler_name(np.zeros(3)) == "default_allocator"


def test_each_thread_has_its_own(gpuops):
    block, barrier = gpuops.pinned_memory(), threading.Barrier(2)

    def inside():
        with block:
            barrier.wait()
            assert get_handler_name(np.zeros(3)) == "gpuops.pinned_memory"
            barrier.wait()

    def outside():
        barrier.wait()
        assert get_handler_name(np.zeros(3)) == "default_allocator"
        barrier.wait()

    run_threads([inside, outside])


def test_each_task_has_its_own(gpuops):
    block = gpuops.pinned_memory()

    async def work(depth):
        for _ in range(3):
            assert get_handler_name(np.zeros(3)) == "default_allocator"
            await asyncio.sleep(0)
            with contextlib.ExitStack() as stack:
                for _ in range(depth):
                    stack.enter_context(block)
                    await asyncio.sleep(0)
                    assert get_handler_name(np.zeros(3)) == "gpuops.pinned_memory"

    async def main():
        await asyncio.gather(*(work(depth) for depth in (1, 2, 3, 1)))

    asyncio.run(main())
    assert get_handler_name(np.zeros(3)) == "default_allocator"


def test_threads_make_and_free(fake):
    """Each array is freed by another thread than the one that made it."""
    shelves = [[] for _ in range(4)]

    def work(number):
        random = np.random.default_rng(number)
        with fake.gpuops.pinned_memory():
            for _ in range(500):
                size = int(2 ** random.uniform(0, 17))
                shelves[(number + 1) % 4].append((size % 251, np.full(size, size % 251, np.uint8)))
                own = shelves[number]
                while len(own) > 5:
                    value, x = own.pop()
                    assert (x == value).all()

    run_threads([functools.partial(work, number) for number in range(4)])
    shelves.clear()
    gc.collect()
    fake.gpuops.empty_cache()
    assert locked_bytes(fake) == 0


def test_a_lost_gpu(fake_device):
    source = """
import numpy as np
import gpuops
from pathlib import Path
from faults.fake import Fake
fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
x = np.zeros(1000)
pin, empty = gpuops.pin(x), gpuops.pinned_empty(1 << 20)
with gpuops.pinned_memory():
    made = np.zeros(1 << 20)
    with fake.fail(1, 700, "sticky"):
        try:
            gpuops.synchronize()
        except gpuops.DeviceLostError:
            pass
    armed = fake.fail(1 << 30, 1)  # which keeps the log of what is called from here on
    armed.__enter__()
    try:
        np.zeros(1 << 22)
    except MemoryError:
        pass
    else:
        raise AssertionError("no MemoryError")
for call in (lambda: gpuops.pin(x), lambda: gpuops.pinned_empty(1 << 22)):
    try:
        call()
    except gpuops.DeviceLostError:
        pass
    else:
        raise AssertionError("no DeviceLostError")
pin.release()
made[0] = empty[0] = 1
del made, empty, pin
assert fake.log() == [], fake.log()
print("done")
"""
    assert run_child(fake_device.gpuops, source, GPUOPS_DEVICE="cuda:0") == "done\n"
