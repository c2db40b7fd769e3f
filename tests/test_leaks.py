"""Memory stays flat over a million good calls and a million failing ones, and so do references."""

import array
import gc
import os
import sys

import numpy as np
import pytest

# A sanitizer keeps freed memory to itself for a while; all else is looked at under it, too.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")

CALLS = {"cpu": 1_000_000, "fake": 20_000, "cuda": 20_000}
MEBIBYTE = 1 << 20


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


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
}

# The plain calls are made a million times, each other kind some ten thousand times.
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


OPERANDS = [X, ROWS, WIDE, MANY, INDICES, ALONG, BAD, OUT, NARROW, BUFFER, BUFFER_INDICES]


def references():
    gc.collect()
    return [sys.getrefcount(operand) for operand in OPERANDS] + [
        sys.getrefcount(operand.dtype) for operand in OPERANDS if isinstance(operand, np.ndarray)
    ]


@pytest.mark.parametrize("make_calls", [make_good_calls, make_failing_calls])
def test_a_million_calls_leave_nothing(gpuops, device, make_calls):
    count = CALLS[device.name]
    make_calls(gpuops, count // 20)
    before, live = references(), device.fake and device.fake.live()
    resident = resident_bytes()
    make_calls(gpuops, count)
    grown = resident_bytes() - resident
    assert references() == before
    # One lost reference to a result of the smallest size would cost 50 MB here on the CPU.
    assert SANITIZED or grown < 2 * MEBIBYTE, f"{grown / count:.2f} bytes a call"
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
    gpuops.gather(x, indices)
    resident = resident_bytes()
    for _ in range(100):
        gpuops.gather(x, indices)
        with pytest.raises(IndexError):
            gpuops.gather(x, indices + 1)
    assert SANITIZED or resident_bytes() - resident < 40 * MEBIBYTE


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
