"""Memory stays flat over good calls and failing ones, and so do references.

The suite makes some thousand calls of each kind; GPUOPS_TEST_CALLS=1000000 makes a million. What
the C library and Python have handed out is counted, by bytes and blocks, so that a leak shows after
few calls; the size of the process is looked at besides.
"""

import array
import ctypes
import gc
import os
import sys

import numpy as np
import pytest
from operators import OPERATORS
from test_every_op import is_in_place, parameters_of, required_arguments

# A sanitizer keeps freed memory to itself for a while; all else is looked at under it, too.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")

CALLS = {"cpu": 20_000, "fake": 4_000, "cuda": 4_000}
MEBIBYTE = 1 << 20


def number_of_calls(device):
    return int(os.environ.get("GPUOPS_TEST_CALLS", CALLS[device.name]))


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


class MallocInfo(ctypes.Structure):
    """The C library's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used fordblks keep".split()
    ]


malloc_info = ctypes.CDLL(None).mallinfo2
malloc_info.restype = MallocInfo


class Footprint:
    """What the process holds now, once all garbage is gone."""

    def __init__(self, device):
        self.device = device
        gc.collect()
        info = malloc_info()
        self.malloc_bytes = info.used + info.hblkhd
        self.python_blocks = sys.getallocatedblocks()
        self.resident_bytes = resident_bytes()

    def growth(self, before, calls, stores):
        """What has grown by more than one of fifty calls explains, in words, or None."""
        # The fake runtime keeps the last blocks that were freed, whatever their size, and a driver
        # has a store of its own.
        others = stores or {"cpu": 0, "fake": 256 << 10, "cuda": 64 << 10}[self.device.name]
        for name, unit, slack in [
            ("malloc_bytes", 16, 2048 + others),
            ("python_blocks", 1, 200),
            ("resident_bytes", 16, 2 * MEBIBYTE),
        ]:
            grown = getattr(self, name) - getattr(before, name)
            if not SANITIZED and grown >= slack + unit * calls // 50:
                return f"{name} grew by {grown}"
        return None


def assert_flat(device, make_calls, *arguments, stores=0):
    """The calls leave nothing behind. A store may grow, as a driver's does with what was once
    under way at a time, but it does not do so again and again."""
    grown = []
    for _ in range(3):
        before = Footprint(device)
        make_calls(*arguments)
        grown.append(Footprint(device).growth(before, arguments[-1], stores))
        if grown[-1] is None:
            return
    pytest.fail("; ".join(grown))


# Every operator, by its row.


def operator_calls(gpuops, operator):
    """Calls that are right, one of each kind, and calls that fail with these exceptions."""
    function = getattr(gpuops, operator.name)
    arguments = [np.asarray(argument) for argument in required_arguments(operator)]
    strided = [np.flip(argument) for argument in arguments]
    good = [
        lambda: function(*arguments),
        lambda: function(*strided),
        lambda: function(*arguments[:1], *[argument.tolist() for argument in arguments[1:]]),
        lambda: function(*arguments, device=None, stream=None),
    ]
    parameters = parameters_of(operator).parameters
    failing = [
        (TypeError, lambda: function(*arguments[:-1])),
        (TypeError, lambda: function(*arguments, nonsense=1)),
        (TypeError, lambda: function(*arguments[:-1], object())),
        (TypeError, lambda: function(objects, *arguments[1:])),
        (ValueError, lambda: function(*arguments, device="nowhere")),
        ((TypeError, ValueError), lambda: function(*arguments, stream=object())),
    ]
    if is_in_place(operator):
        frozen = arguments[0].copy()
        frozen.flags.writeable = False
        failing.append((ValueError, lambda: function(frozen, *arguments[1:])))
    else:
        name = "out" if "out" in parameters else "output"
        out = function(*arguments)
        backward = out[::-1]
        good.append(lambda: function(*arguments, **{name: out}))
        good.append(lambda: function(*arguments, **{name: backward}))
        failing.append((ValueError, lambda: function(*arguments, **{name: out[..., :1]})))
        failing.append((TypeError, lambda: function(*arguments, **{name: 5})))
    if "indices" in parameters:
        bad = [*arguments]
        bad[1] = bad[1] + 99
        failing.append((IndexError, lambda: function(*bad)))
        good.append(lambda: function(*bad, mode="wrap"))
    if "mode" in parameters:
        failing.append((ValueError, lambda: function(*arguments, mode="nonsense")))
    objects = arguments[0].astype(object)
    return arguments, good, failing


def make_in_turns(calls, count):
    for turn in range(count):
        calls[turn % len(calls)]()


def fail_in_turns(calls, count):
    for turn in range(count):
        error, call = calls[turn % len(calls)]
        try:
            call()
        except error:
            continue
        pytest.fail(f"call {turn % len(calls)}: no {error}")


@pytest.mark.parametrize("fails", [False, True], ids=["good", "failing"])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_calls_leave_nothing(gpuops, device, operator, fails):
    arguments, good, failing = operator_calls(gpuops, operator)
    make, calls = (fail_in_turns, failing) if fails else (make_in_turns, good)
    count = number_of_calls(device)

    held = [*arguments, *(argument.dtype for argument in arguments)]

    def references():
        return [sys.getrefcount(one) for one in held]

    make(calls, 20 * len(calls))
    before, live = references(), device.fake and device.fake.live()
    assert_flat(device, make, calls, count)
    # A dtype is everybody's: others may take or drop it meanwhile.
    assert all(abs(one - other) < 50 for one, other in zip(before, references(), strict=True)), (
        before,
        references(),
    )
    if live:
        now = device.fake.live()
        assert (now.allocations, now.bytes, now.pinned_allocations, now.streams, now.libraries) == (
            live.allocations, live.bytes, live.pinned_allocations, live.streams, live.libraries,
        )  # fmt: skip


# What one operator can be called with, in more ways.

X = np.arange(10.0)
ROWS = np.arange(12.0).reshape(4, 3)
WIDE = np.arange(400.0).reshape(4, 100)
MANY = (np.arange(300) % 4)[::-3]
INDICES = np.array([3, -1, 0])
ALONG = np.array([[0, 1, 2]])
BAD = np.array([0, 99])
OUT = np.zeros(3)
NARROW = np.zeros(3, np.float32)
BUFFER = array.array("d", range(10))
TIMES, HOURS, TEXTS = np.zeros(5, "M8[s]"), np.zeros(3, "M8[h]"), np.zeros(5, "U4")

GOOD = {
    "gather": lambda gpuops: gpuops.gather(X, INDICES),
    "scalar": lambda gpuops: gpuops.gather(X, 3),
    "out": lambda gpuops: gpuops.gather(X, INDICES, out=OUT),
    "fill": lambda gpuops: gpuops.gather(WIDE, BAD, mode="fill", fill_value=2),
    "converted": lambda gpuops: gpuops.gather([1.0, 2.0], [1, 0]),
    "buffer": lambda gpuops: gpuops.gather(BUFFER, BUFFER_INDICES),
    "overlap": lambda gpuops: gpuops.gather(X, INDICES, out=X[:3]),
    "strided": lambda gpuops: gpuops.gather(ROWS.T, MANY, axis=1),
    "take": lambda gpuops: gpuops.take(ROWS, INDICES, 0, None, "wrap"),
    "take_along_axis": lambda gpuops: gpuops.take_along_axis(ROWS, ALONG, 0),
    "times": lambda gpuops: gpuops.scatter(TIMES, INDICES, HOURS),
    "text": lambda gpuops: gpuops.scatter(TEXTS, INDICES, 5),
}
BUFFER_INDICES = array.array("q", [1, 2])

FAILING = {
    "index": (IndexError, lambda gpuops: gpuops.gather(X, BAD)),
    "index, out": (IndexError, lambda gpuops: gpuops.gather(X, BAD, out=OUT[:2])),
    "axis": (ValueError, lambda gpuops: gpuops.gather(X, INDICES, axis=4)),
    "mode": (ValueError, lambda gpuops: gpuops.gather(X, INDICES, mode="foo")),
    "shape of out": (ValueError, lambda gpuops: gpuops.gather(X, 1, out=OUT)),
    "dtype of out": (TypeError, lambda gpuops: gpuops.gather(X, INDICES, out=NARROW)),
    "float indices": (IndexError, lambda gpuops: gpuops.gather(X, X)),
    "no array": (TypeError, lambda gpuops: gpuops.gather(None, INDICES)),
    "fill_value": (ValueError, lambda gpuops: gpuops.gather(X, INDICES, fill_value=1)),
    "keyword": (TypeError, lambda gpuops: gpuops.gather(X, INDICES, nonsense=1)),
    "device": (ValueError, lambda gpuops: gpuops.gather(X, INDICES, device="nowhere")),
    "buffer": (IndexError, lambda gpuops: gpuops.gather(BUFFER, BAD)),
    "take": (IndexError, lambda gpuops: gpuops.take(ROWS, 50, 1)),
    "take_along_axis": (ValueError, lambda gpuops: gpuops.take_along_axis(ROWS, INDICES)),
    "times": (TypeError, lambda gpuops: gpuops.scatter(TIMES, INDICES, OUT)),
    "date": (ValueError, lambda gpuops: gpuops.scatter(TIMES, INDICES, "no date")),
}

# The plain calls are made most of the time.
SHARES = {"gather": 0.7, "index": 0.7}


def make_good_calls(gpuops, count):
    for name, call in GOOD.items():
        for _ in range(int(count * SHARES.get(name, 0.3 / (len(GOOD) - 1)))):
            call(gpuops)


def make_failing_calls(gpuops, count):
    for name, (error, call) in FAILING.items():
        for _ in range(int(count * SHARES.get(name, 0.3 / (len(FAILING) - 1)))):
            try:
                call(gpuops)
            except error:
                continue
            pytest.fail(f"{name}: no {error.__name__}")


OPERANDS = [
    X,
    ROWS,
    WIDE,
    MANY,
    INDICES,
    ALONG,
    BAD,
    OUT,
    NARROW,
    TIMES,
    HOURS,
    TEXTS,
    BUFFER,
    BUFFER_INDICES,
]


def references():
    gc.collect()
    return [sys.getrefcount(operand) for operand in OPERANDS] + [
        sys.getrefcount(operand.dtype) for operand in OPERANDS if isinstance(operand, np.ndarray)
    ]


@pytest.mark.parametrize("make_calls", [make_good_calls, make_failing_calls])
def test_many_kinds_of_calls_leave_nothing(gpuops, device, make_calls):
    count = number_of_calls(device)
    make_calls(gpuops, count // 20 + 1000)
    before, live = references(), device.fake and device.fake.live()
    assert_flat(device, make_calls, gpuops, count)
    assert all(abs(one - other) < 50 for one, other in zip(before, references(), strict=True))
    if live:
        assert device.fake.live().allocations == live.allocations
        assert device.fake.live().bytes == live.bytes
        assert device.fake.live().pinned_allocations == live.pinned_allocations
    BUFFER.append(1.0)
    BUFFER_INDICES.append(0)
    BUFFER.pop()
    BUFFER_INDICES.pop()


def test_large_results_are_freed(gpuops, device):
    x = np.zeros((64, 1 << 15), np.uint8)
    indices = np.arange(64)

    def call_often(count):
        for _ in range(count):
            gpuops.gather(x, indices)
            with pytest.raises(IndexError):
                gpuops.gather(x, indices + 1)

    call_often(50)  # what is kept for later calls, by the fake runtime above all
    resident = resident_bytes()
    call_often(100)
    assert SANITIZED or resident_bytes() - resident < 16 * MEBIBYTE


def test_a_result_holds_nothing_but_itself(gpuops):
    x, indices = np.arange(5.0), np.array([1])
    before = sys.getrefcount(x), sys.getrefcount(indices)
    result = gpuops.gather(x, indices)
    assert (sys.getrefcount(x), sys.getrefcount(indices)) == before
    assert sys.getrefcount(result) == 2
    out = np.zeros(1)
    result = gpuops.gather(x, indices, out=out)
    assert result is out and sys.getrefcount(out) == 3
    dtype = np.dtype([("only", "i4"), ("here", "i2")])
    records = np.zeros(4, dtype)
    before = sys.getrefcount(records.dtype)
    for _ in range(100):
        gpuops.gather(records, [1, 2])
        gpuops.gather(records, 1)
        gpuops.gather(records, [9], mode="fill", fill_value=(1, 2))
    assert abs(sys.getrefcount(records.dtype) - before) < 5


def test_an_error_holds_no_operand(gpuops):
    x = np.arange(5.0)
    before = sys.getrefcount(x)
    for call in (
        lambda: gpuops.gather(x, [9]),
        lambda: gpuops.gather(x, x),
        lambda: gpuops.gather(x, [0], out=[]),
        lambda: gpuops.gather(x, [0], axis=5),
        lambda: gpuops.take(x, None),
        lambda: gpuops.take_along_axis(x, [[0]]),
    ):
        with pytest.raises((LookupError, TypeError, ValueError)) as caught:
            call()
        del caught
        gc.collect()
        assert sys.getrefcount(x) == before


# Arrays on a device.


class Arrays:
    def __init__(self, gpuops):
        self.x = gpuops.to_device(X)
        self.rows = gpuops.to_device(ROWS)
        self.indices = gpuops.to_device(INDICES)
        self.along = gpuops.to_device(ALONG)
        self.out = gpuops.to_device(OUT)
        self.narrow = gpuops.to_device(NARROW)
        self.stream = gpuops.Stream()

    def __iter__(self):
        return iter(vars(self).values())


DEVICE_GOOD = {
    "gather, out": lambda gpuops, a: gpuops.gather(a.x, a.indices, out=a.out),
    "pin": lambda gpuops, a: gpuops.pin(ROWS).release(),
    "pins": lambda gpuops, a: [gpuops.pin(ROWS[1:]), gpuops.pin(ROWS)],
    "pinned_empty": lambda gpuops, a: gpuops.pinned_empty(1000),
    "pinned_memory": lambda gpuops, a: allocate_pinned(gpuops),
    "gather": lambda gpuops, a: gpuops.gather(a.x, a.indices),
    "another stream": lambda gpuops, a: gpuops.gather(a.x, a.indices, stream=a.stream),
    "a stream for once": lambda gpuops, a: gpuops.gather(
        a.x, a.indices, out=a.out, stream=gpuops.Stream()
    ),
    "host indices": lambda gpuops, a: gpuops.gather(a.rows, INDICES),
    "scalar index": lambda gpuops, a: gpuops.gather(a.rows, 1),
    "host array": lambda gpuops, a: gpuops.gather(ROWS, a.indices),
    "fill": lambda gpuops, a: gpuops.gather(a.x, BAD, mode="fill", fill_value=2),
    "strided": lambda gpuops, a: gpuops.gather(a.rows[::-2], [0, 1], axis=0),
    "overlap": lambda gpuops, a: gpuops.gather(a.x, a.indices, out=a.x[:3]),
    "take": lambda gpuops, a: gpuops.take(a.rows, a.indices, 0, None, "wrap"),
    "take_along_axis": lambda gpuops, a: gpuops.take_along_axis(a.rows, a.along, 0),
    "to_device": lambda gpuops, a: gpuops.to_device(ROWS),
    "to_host": lambda gpuops, a: a.rows.to_host(),
    "to_host, out": lambda gpuops, a: a.out.to_host(OUT),
    "copy": lambda gpuops, a: a.rows[1:].copy(),
    "views": lambda gpuops, a: a.rows.reshape(3, 4)[1][::-1],
    "fill the array": lambda gpuops, a: a.narrow.fill(3),
    "zeros": lambda gpuops, a: gpuops.zeros((3, 4), "f4"),
    "asarray": lambda gpuops, a: gpuops.asarray(a.x),
    "capsule": lambda gpuops, a: a.x.__dlpack__(),
    "versioned capsule": lambda gpuops, a: a.x.__dlpack__(max_version=(1, 3), stream=1),
    "capsule of the host": lambda gpuops, a: a.x.__dlpack__(max_version=(1, 0), dl_device=(1, 0)),
    "from_dlpack": lambda gpuops, a: gpuops.from_dlpack(a.rows[1:]),
    "interface": lambda gpuops, a: a.rows.__cuda_array_interface__,
    "attributes": lambda gpuops, a: (a.x.shape, a.x.strides, a.x.dtype, a.x.stream, a.x.ptr),
    "stream": lambda gpuops, a: gpuops.Stream().query(),
    "external stream": lambda gpuops, a: gpuops.Stream.from_external(a.stream),
    "current stream": lambda gpuops, a: enter_and_leave(a.stream),
    "event": lambda gpuops, a: a.stream.record().synchronize(),
    "memory_info": lambda gpuops, a: gpuops.memory_info(),
    "repr": lambda gpuops, a: repr(a.rows),
}

DEVICE_FAILING = {
    "index": (IndexError, lambda gpuops, a: gpuops.gather(a.x, BAD).to_host()),
    "index, out": (
        IndexError,
        lambda gpuops, a: gpuops.gather(a.x, BAD, out=a.out[:2]).stream.synchronize(),
    ),
    "axis": (ValueError, lambda gpuops, a: gpuops.gather(a.x, a.indices, axis=4)),
    "shape of out": (ValueError, lambda gpuops, a: gpuops.gather(a.x, 1, out=a.out)),
    "dtype of out": (TypeError, lambda gpuops, a: gpuops.gather(a.x, a.indices, out=a.narrow)),
    "out on the host": (TypeError, lambda gpuops, a: gpuops.gather(a.x, a.indices, out=OUT)),
    "float indices": (IndexError, lambda gpuops, a: gpuops.gather(a.x, a.x)),
    "device": (ValueError, lambda gpuops, a: gpuops.gather(a.x, a.indices, device="cpu")),
    "stream": (TypeError, lambda gpuops, a: gpuops.gather(a.x, a.indices, stream="0")),
    "memory": (MemoryError, lambda gpuops, a: gpuops.empty(1 << 55, "u1")),
    "shape": (ValueError, lambda gpuops, a: a.x.reshape(3, 4)),
    "to_host": (ValueError, lambda gpuops, a: a.x.to_host(OUT)),
    "numpy": (TypeError, lambda gpuops, a: np.asarray(a.x)),
    "iteration": (TypeError, lambda gpuops, a: list(a.x)),
    "item": (IndexError, lambda gpuops, a: a.x[10]),
    "capsule": (BufferError, lambda gpuops, a: a.x.__dlpack__(dl_device=(99, 0))),
    "from_dlpack": (TypeError, lambda gpuops, a: gpuops.from_dlpack(a)),
    "external stream": (TypeError, lambda gpuops, a: gpuops.Stream.from_external(a)),
}

# The rest is made some thousand times each.
DEVICE_SHARES = {"gather, out": 0.4, "gather": 0.3}


def allocate_pinned(gpuops):
    with gpuops.pinned_memory():
        return ROWS.copy(), ROWS.repeat(1000)


def enter_and_leave(stream):
    with stream:
        pass


def make_device_calls(gpuops, arrays, count):
    for name, call in DEVICE_GOOD.items():
        for _ in range(int(count * DEVICE_SHARES.get(name, 0.3 / (len(DEVICE_GOOD) - 2)))):
            call(gpuops, arrays)


def make_failing_device_calls(gpuops, arrays, count):
    for name, (error, call) in DEVICE_FAILING.items():
        for _ in range(count // 10 // len(DEVICE_FAILING)):
            try:
                call(gpuops, arrays)
            except error:
                continue
            pytest.fail(f"{name}: no {error.__name__}")


@pytest.mark.parametrize("make_calls", [make_device_calls, make_failing_device_calls])
def test_calls_on_device_arrays_leave_nothing(gpu, make_calls):
    gpuops, count = gpu.gpuops, 5 * number_of_calls(gpu)
    arrays = Arrays(gpuops)

    def held():
        held = [sys.getrefcount(array) for array in arrays]
        held += [sys.getrefcount(array.dtype) for array in arrays if hasattr(array, "dtype")]
        return references() + held

    def live():
        gc.collect()
        gpuops.synchronize()
        gpuops.empty_cache()
        live = gpu.fake and gpu.fake.live()
        # Events are kept for later, as many as were once needed at a time.
        counts = live and (live.allocations, live.bytes, live.pinned_allocations, live.streams)
        return gpuops.memory_info().used, counts

    make_calls(gpuops, arrays, count // 5)
    before, held_before = live(), held()
    # A real driver has a store for each stream, which comes and goes with what is under way.
    assert_flat(gpu, make_calls, gpuops, arrays, count, stores=0 if gpu.fake else 4 * MEBIBYTE)
    assert live() == before
    assert all(abs(one - other) < 50 for one, other in zip(held(), held_before, strict=True))


def test_memory_of_a_device_is_given_back(gpu):
    gpuops = gpu.gpuops
    gpuops.synchronize()
    gpuops.empty_cache()
    before = gpuops.memory_info()
    for count in (1, 10, 100):
        arrays = [gpuops.zeros(1 << 14) for _ in range(count)]
        assert gpuops.memory_info().used >= before.used + (count << 17)
        views = [array[1:] for array in arrays]
        del arrays
        assert gpuops.memory_info().used >= before.used + (count << 17)
        del views
        assert gpuops.memory_info().used == before.used
        assert gpuops.memory_info().peak >= before.used + (count << 17)
    gpuops.synchronize()
    gpuops.empty_cache()
    assert gpuops.memory_info().reserved <= before.reserved


def test_an_array_holds_nothing_but_its_memory(gpu):
    gpuops = gpu.gpuops
    with gpuops.device("cuda"):
        x, indices = gpuops.to_device(np.arange(5.0)), gpuops.to_device([1])
        before = sys.getrefcount(x), sys.getrefcount(indices)
        result = gpuops.gather(x, indices)
        view = x[1:]
        assert (sys.getrefcount(x), sys.getrefcount(indices)) == before
        assert sys.getrefcount(result) == sys.getrefcount(view) == 2
        out = gpuops.empty(1)
        result = gpuops.gather(x, indices, out=out)
        assert result is out and sys.getrefcount(out) == 3
        host = np.arange(5.0)
        held = sys.getrefcount(host)
        gpuops.to_device(host)
        gpuops.gather(x, [1, 2]).to_host(host[:2])
        assert sys.getrefcount(host) == held
