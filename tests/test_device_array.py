"""DeviceArray on its own: what it says, to the GPU and back, views, and what it refuses."""

import array
import contextlib
import copy
import gc
import inspect
import itertools
import operator
import pickle
import re
import sys
import threading
import weakref

import numpy as np
import pytest
from helpers import DTYPES, Guarded, filled_array, package_parent, read_only, run_child, same

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

EXTENSIONS = [
    np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")
    if hasattr(ml_dtypes, name)
]
LAYOUTS = ["C", "F", "strided", "padded", "backward", "misaligned"]
MEBIBYTE = 1 << 20


@pytest.fixture
def gpuops(gpu):
    return gpu.gpuops


@pytest.fixture
def two_devices(gpuops):
    if gpuops.device_count() < 2:
        pytest.skip("this machine has one GPU")


def contents(gpuops, host):
    """A DeviceArray with these elements, whatever their dtype."""
    d = gpuops.to_device(host)
    assert isinstance(d, gpuops.DeviceArray)
    return d


class External:
    """Somebody else's array: a DeviceArray seen through __cuda_array_interface__."""

    def __init__(self, d, host, view=None, read_only=False):
        view = host if view is None else view
        offset = view.__array_interface__["data"][0] - host.__array_interface__["data"][0]
        self.owner = d
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "strides": view.strides,
            "typestr": view.dtype.str,
            "data": (d.ptr + offset if view.size else 0, read_only),
            "version": 3,
            "stream": 1,
        }


# What it says of itself.


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (0,), (2, 3), (4, 0, 2), (2, 3, 4, 5), (1,) * 64]
)
def test_attributes(gpuops, shape):
    host = filled_array(shape, "f4")
    d = contents(gpuops, host)
    assert d.shape == host.shape and type(d.shape) is tuple
    assert d.dtype == host.dtype and isinstance(d.dtype, np.dtype)
    assert (d.ndim, d.size, d.nbytes, d.itemsize) == (host.ndim, host.size, host.nbytes, 4)
    assert len(d.strides) == d.ndim
    assert d.strides == host.strides or not host.size
    assert type(d.device) is int and d.device == 0
    assert isinstance(d.stream, gpuops.Stream) and d.stream.device == 0
    assert type(d.ptr) is int and (d.ptr == 0) == (host.size == 0)


def test_attributes_are_not_set(gpuops):
    d = gpuops.zeros((2, 3))
    for name in ("shape", "dtype", "ndim", "strides", "device", "stream", "ptr", "T", "nonsense"):
        with pytest.raises(AttributeError):
            setattr(d, name, 1)
    assert d.shape == (2, 3)


def test_the_type(gpuops):
    kind = gpuops.DeviceArray
    assert kind.__module__ == "gpuops" and kind.__qualname__ == "DeviceArray"
    for make in (kind, lambda: kind([1, 2]), lambda: kind.__new__(kind), lambda: kind(shape=3)):
        with pytest.raises(TypeError, match="to_device.*empty.*zeros"):
            make()
    with pytest.raises(TypeError):
        object.__new__(kind)
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Mine", (kind,), {})


def test_signatures(gpuops):
    expected = {
        gpuops.to_device: "(x, /, *, device=None, stream=None)",
        gpuops.empty: "(shape, dtype='float64', *, device=None, stream=None)",
        gpuops.zeros: "(shape, dtype='float64', *, device=None, stream=None)",
        gpuops.asarray: "(x, /, *, dtype=None, device=None, stream=None, copy=None)",
        gpuops.memory_info: "(device=None)",
        gpuops.empty_cache: "(device=None)",
        gpuops.memory_limit: "(bytes, *, device=None)",
        gpuops.DeviceArray.to_host: "(self, /, out=None, stream=None)",
        gpuops.DeviceArray.reshape: "(self, /, *shape)",
        gpuops.DeviceArray.copy: "(self, /, stream=None)",
        gpuops.DeviceArray.fill: "(self, /, value, stream=None)",
    }
    for function, signature in expected.items():
        assert str(inspect.signature(function)) == signature, function
    for name, member in vars(gpuops.DeviceArray).items():
        if name != "__dlpack_c_exchange_api__" and callable(getattr(gpuops.DeviceArray, name)):
            assert inspect.getdoc(member), name


def test_identity_hash_and_weak_references(gpuops):
    d, other = gpuops.zeros(3), gpuops.zeros(3)
    assert d == d and d != other and (d == 0) is False
    assert len({d, other, d}) == 2 and d in [other, d]
    reference = weakref.ref(d)
    gone = []
    weakref.finalize(d, gone.append, 1)
    assert reference() is d
    del d
    assert reference() is None and gone == [1]


def test_sizeof_counts_what_is_on_the_host(gpuops):
    flat, deep = gpuops.zeros(1_000_000, "u1"), gpuops.zeros((2,) * 10, "u1")
    assert flat.__sizeof__() < 200
    assert deep.__sizeof__() - flat.__sizeof__() == 9 * 2 * 8
    assert sys.getsizeof(flat) >= flat.__sizeof__()


# To the GPU and back.


@pytest.mark.parametrize("dtype", DTYPES + EXTENSIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(gpuops, dtype, layout):
    for shape in [(7, 5, 3), (129,), (), (0, 4)]:
        expected = filled_array(shape, dtype)
        source = Guarded(shape, dtype, layout)
        source.array[...] = expected
        before = source.memory.copy()
        d = contents(gpuops, source.array)
        assert (d.shape, d.dtype) == (shape, dtype)
        same(d.to_host(), expected)
        assert (source.memory == before).all()
        out = Guarded(shape, dtype, layout)
        assert d.to_host(out.array) is out.array
        assert out.array.tobytes() == expected.tobytes()
        assert out.kept_to_its_own()


@pytest.mark.parametrize("shape", [(1 << 20,), (1000, 1000), (3, 333_333), (333_333, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_round_trip(gpuops, shape, layout):
    expected = filled_array(shape, "f4")
    source = Guarded(shape, "f4", layout)
    source.array[...] = expected
    d = gpuops.to_device(source.array)
    same(d.to_host(), expected)
    out = Guarded(shape, "f4", layout)
    d.to_host(out=out.array)
    assert out.array.tobytes() == expected.tobytes() and out.kept_to_its_own()


def test_what_to_device_takes(gpuops):
    for x in (5, 2.5, [1, 2, 3], [[1.5], [2.5]], (True, False), "text", np.float32(2)):
        same(gpuops.to_device(x).to_host(), np.array(x))
    same(gpuops.to_device(array.array("i", [1, 2])).to_host(), np.array([1, 2], "i4"))
    for buffer in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        same(gpuops.to_device(buffer).to_host(), np.frombuffer(b"abc", "u1"))
    same(gpuops.to_device(read_only(np.arange(3))).to_host(), np.arange(3))
    same(gpuops.to_device([]).to_host(), np.array([]))
    d = gpuops.to_device(np.arange(6).reshape(2, 3))
    again = gpuops.to_device(d)
    assert again is not d and again.ptr != d.ptr
    same(gpuops.to_device(d[::-1]).to_host(), np.arange(6).reshape(2, 3)[::-1].copy())


def test_what_to_device_refuses(gpuops):
    with pytest.raises(TypeError, match="Python objects"):
        gpuops.to_device(np.array([object()]))
    with pytest.raises(TypeError, match="Python objects"):
        gpuops.to_device(None)
    with pytest.raises(TypeError, match="Python objects"):
        gpuops.to_device(np.zeros(2, [("a", "O"), ("b", "i4")]))
    with pytest.raises(TypeError, match="byte order.*newbyteorder"):
        gpuops.to_device(np.zeros(3, ">i4"))
    with pytest.raises(TypeError, match="mask"):
        gpuops.to_device(np.ma.array([1, 2], mask=[0, 1]))
    with pytest.raises(ValueError, match="inhomogeneous"):
        gpuops.to_device([[1], [2, 3]])
    if hasattr(np.dtypes, "StringDType"):
        with pytest.raises(TypeError, match="fixed size"):
            gpuops.to_device(np.array(["a"], np.dtypes.StringDType()))
    for wrong in ((), (1, 2)):
        with pytest.raises(TypeError, match="argument"):
            gpuops.to_device(*wrong)
    with pytest.raises(TypeError):
        gpuops.to_device(x=1)
    with pytest.raises(TypeError, match="nonsense"):
        gpuops.to_device(1, nonsense=2)


def test_the_source_is_free_at_once(gpuops):
    host = np.arange(100_000)
    expected = host.copy()
    d = gpuops.to_device(host)
    host[:] = -1
    same(d.to_host(), expected)
    before = sys.getrefcount(host)
    d = gpuops.to_device(host)
    assert sys.getrefcount(host) == before
    result = d.to_host()
    result[0] = 7
    assert result.flags.owndata and result.flags.c_contiguous and result.flags.writeable
    assert d.to_host()[0] == -1


@pytest.mark.parametrize("dtype", ["S0", "U0", "V0", [("a", "V0")], []])
def test_elements_without_bytes(gpuops, dtype):
    """NumPy gives strings a width of one when it makes arrays of them; others stay empty."""
    fields = np.zeros(3, [("none", dtype if dtype != [] else "V0"), ("some", "i4")])["none"]
    assert fields.itemsize == 0
    d = gpuops.to_device(fields)
    assert d.itemsize == 0 and d.nbytes == 0 and d.size == 3 and d.ptr == 0
    assert d.to_host().shape == (3,)
    assert d[1].shape == () and d[::-1].shape == (3,)
    assert d.reshape(3, 1).shape == (3, 1)
    assert d.copy().shape == (3,)
    d.fill(np.zeros((), d.to_host().dtype)[()])
    assert repr(d).startswith("gpuops.DeviceArray(")
    assert copy.deepcopy(d).itemsize == d.to_host().itemsize
    assert gpuops.empty(4, dtype).shape == (4,)


def test_out_of_to_host(gpuops):
    d = gpuops.to_device(np.arange(6.0).reshape(2, 3))
    for out in (np.zeros((3, 2)), np.zeros(6), np.zeros((2, 3, 1)), np.zeros(())):
        with pytest.raises(ValueError, match=re.escape(f"out has shape {out.shape}")):
            d.to_host(out)
        assert not out.any()
    with pytest.raises(TypeError, match="dtype float32, and the result has dtype float64"):
        d.to_host(np.zeros((2, 3), "f4"))
    with pytest.raises(ValueError, match="read-only"):
        d.to_host(read_only(np.zeros((2, 3))))
    with pytest.raises(ValueError, match="share memory with each other"):
        d.to_host(np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8)))
    for out in ([0.0] * 6, 3, "text", b"bytes", d, np.float64(3)):
        with pytest.raises((TypeError, ValueError)):
            d.to_host(out)
    flat = gpuops.to_device(np.arange(3.0))
    buffer = array.array("d", [0, 0, 0])
    assert flat.to_host(buffer) is buffer and buffer.tolist() == [0, 1, 2]
    assert d.to_host(None).shape == d.to_host(out=None, stream=None).shape == (2, 3)
    scalar = np.zeros(())
    assert gpuops.to_device(4.5).to_host(scalar) is scalar and scalar == 4.5


def test_a_scalar_comes_back_as_an_array(gpuops):
    result = gpuops.to_device(3.5).to_host()
    assert type(result) is np.ndarray and result.shape == () and result == 3.5


# New arrays.


@pytest.mark.parametrize("dtype", DTYPES + EXTENSIONS, ids=str)
def test_zeros(gpuops, dtype):
    for shape in [(3, 4), 5, (), (0, 2), [2, 2], np.int64(3), (np.int8(2),)]:
        same(gpuops.zeros(shape, dtype).to_host(), np.zeros(shape, dtype))
        d = gpuops.empty(shape, dtype)
        expected = np.empty(shape, dtype)
        assert (d.shape, d.dtype) == (expected.shape, expected.dtype)
        assert d.strides == expected.strides or not expected.size


def test_dtypes_of_new_arrays(gpuops):
    assert gpuops.empty(3).dtype == gpuops.zeros(3, None).dtype == np.float64
    for dtype in ("S", "U", str, bytes, int, "f4, i2", ("f4", (3,)), [("a", "f4", 2)], "M8[ns]"):
        expected = np.zeros((2, 2), dtype)
        same(gpuops.zeros((2, 2), dtype).to_host(), expected)
        assert gpuops.empty((2, 2), dtype=dtype).shape == expected.shape
    for dtype in ("O", ">i4", object, [("a", "O")]):
        with pytest.raises(TypeError, match=r"Python objects|byte order"):
            gpuops.zeros(3, dtype)
    with pytest.raises(TypeError):
        gpuops.empty(3, "nonsense")


WRONG_SHAPES = {
    "negative": -1,
    "one is negative": (2, -3),
    "float": 2.5,
    "floats": (2.0, 3),
    "text": "ab",
    "None": None,
    "set": {1, 2},
    "nested": [[1]],
    "too many": (1,) * 65,
    "too big": (1 << 40, 1 << 40),
    "too big for bytes": (1 << 62,),
    "too big, but empty": (0, 1 << 62),
    "huge": 1 << 70,
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes(gpuops, name):
    shape = WRONG_SHAPES[name]
    for make in (gpuops.empty, gpuops.zeros):
        with pytest.raises((TypeError, ValueError)) as caught:
            make(shape)
        with pytest.raises((TypeError, ValueError)) as numpys:
            np.empty(shape)
        assert caught.type is numpys.type
        assert str(caught.value)


def test_strided_zeros_do_not_see_old_memory(gpuops):
    for _ in range(3):
        d = gpuops.empty(1000, "i4")
        d.fill(-1)
        del d
        assert not gpuops.zeros(1000, "i4").to_host().any()


# Views.

INDICES = [0, 1, -1, 2, -3, np.int64(1), np.uint8(2), np.array(1), True.__index__()]
BOUNDS = [None, 0, 1, 2, 5, 99, -1, -2, -99]
STEPS = [None, 1, 2, 3, 99, -1, -2, -99]


def test_integers_as_indices(gpuops):
    host = filled_array((3, 4, 5), "f4")
    d = gpuops.to_device(host)
    for index in INDICES:
        view = d[index]
        same(view.to_host(), host[index].copy())
        assert view.strides == host[index].strides
        same(view[1][-1].to_host(), np.array(host[index][1][-1]))
    for index in (3, -4, 1 << 40, -(1 << 40), np.int64(7)):
        with pytest.raises(IndexError) as caught:
            d[index]
        with pytest.raises(IndexError) as numpys:
            host[index]
        assert str(caught.value) == str(numpys.value)
    with pytest.raises(IndexError):
        d[1 << 80]
    with pytest.raises(IndexError, match="size 0"):
        gpuops.empty((0, 3))[0]
    assert gpuops.empty((3, 0))[1].shape == (0,)


@pytest.mark.parametrize("dtype", ["u1", "f4", "V3", "c16"])
def test_slices(gpuops, dtype):
    host = filled_array((6, 3), dtype)
    d = gpuops.to_device(host)
    for start, stop, step in itertools.product(BOUNDS, BOUNDS, STEPS):
        expected = host[start:stop:step]
        view = d[start:stop:step]
        assert view.shape == expected.shape
        if expected.size:
            assert view.ptr - d.ptr == expected.ctypes.data - host.ctypes.data
            assert view.strides[1] == expected.strides[1]
    for key in (slice(1, 5), slice(None, None, -1), slice(4, 0, -2), slice(2, 2)):
        same(d[key].to_host(), host[key].copy())
        same(d[key][::-1].to_host(), host[key][::-1].copy())
        same(d[key].copy().to_host(), host[key].copy())
    with pytest.raises(ValueError, match="zero"):
        d[::0]
    with pytest.raises(TypeError):
        d["a":"b"]


def test_the_whole_array_as_a_view(gpuops):
    d = gpuops.to_device(np.arange(6).reshape(2, 3))
    for view in (d[...], d[()], d[:]):
        assert view is not d and (view.ptr, view.shape, view.strides) == (d.ptr, d.shape, d.strides)
    scalar = gpuops.to_device(5)
    assert scalar[...].to_host() == scalar[()].to_host() == 5


def test_a_view_shares_the_memory_and_keeps_it(gpuops):
    d = gpuops.to_device(np.arange(12).reshape(4, 3))
    view = d[1:3]
    view.fill(-1)
    same(d.to_host(), np.array([[0, 1, 2], [-1] * 3, [-1] * 3, [9, 10, 11]]))
    d[0].reshape(3, 1)[1].fill(50)
    assert d.to_host()[0].tolist() == [0, 50, 2]
    gc.collect()
    used = gpuops.memory_info().used
    last = d[3][::-1]
    del d, view
    gc.collect()
    assert gpuops.memory_info().used == used
    gpuops.zeros((4, 3), int)
    same(last.to_host(), np.array([11, 10, 9]))
    del last
    assert gpuops.memory_info().used < used


WRONG_KEYS = [
    ([0, 1], TypeError, "gpuops.gather"),
    (np.array([0, 1]), TypeError, "gpuops.gather"),
    (np.array([True, False]), TypeError, "gpuops.gather"),
    (True, TypeError, "gpuops.gather"),
    (1.0, TypeError, "gpuops.gather"),
    ((0, 1), IndexError, r"d\[i\]\[j\]"),
    ((0,), IndexError, r"d\[i\]\[j\]"),
    ((..., 0), IndexError, r"d\[i\]\[j\]"),
    (None, IndexError, "reshape"),
    ("name", IndexError, "to_host"),
]


@pytest.mark.parametrize(("key", "error", "advice"), WRONG_KEYS, ids=lambda value: str(value)[:20])
def test_wrong_keys(gpuops, key, error, advice):
    d = gpuops.zeros((2, 3))
    with pytest.raises(error, match=advice):
        d[key]
    with pytest.raises(TypeError, match="gpuops.gather"):
        d[d]
    scalar = gpuops.zeros(())
    for key in (0, slice(None), -1):
        with pytest.raises(IndexError, match="0-dimensional"):
            scalar[key]


def test_no_assignment(gpuops):
    d = gpuops.zeros(3)
    for key in (0, slice(1), ...):
        with pytest.raises(TypeError, match=r"fill\(value\)"):
            d[key] = 1
        with pytest.raises(TypeError, match="deletion"):
            del d[key]
    same(d.to_host(), np.zeros(3))


def shapes_of(size, axes):
    """All shapes of that size with so many axes."""
    if axes == 1:
        return [(size,)]
    return [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0
        for rest in shapes_of(size // first, axes - 1)
    ]


RESHAPED = {
    "contiguous": lambda a: a,
    "backward": lambda a: a[::-1],
    "every second": lambda a: a[::2],
    "part": lambda a: a[1:3],
    "item": lambda a: a[1],
    "transposed": lambda a: a.transpose(1, 2, 0),
    "swapped": lambda a: a.swapaxes(1, 2),
    "columns": lambda a: a[:, :, ::2],
    "rows": lambda a: a[:, ::3],
    "repeated": lambda a: np.broadcast_to(a[:1], a.shape),
    "with ones": lambda a: a[:, None, :, ::2, None],
}


@pytest.mark.parametrize("name", RESHAPED)
def test_reshape(gpuops, name):
    """A view wherever NumPy makes one; else advice."""
    host = np.arange(4 * 6 * 2, dtype="i4").reshape(4, 6, 2)
    d = gpuops.to_device(host)
    view = RESHAPED[name](host)
    there = gpuops.asarray(External(d, host, view))
    same(there.to_host(), view.copy())
    outcomes = set()
    for shape in [shape for axes in (1, 2, 3, 4) for shape in shapes_of(view.size, axes)]:
        expected = view.reshape(shape)
        outcomes.add(np.shares_memory(expected, host))
        if np.shares_memory(expected, host):
            result = there.reshape(shape)
            assert result.ptr == there.ptr and result.shape == shape
            same(result.to_host(), expected.copy())
        else:
            with pytest.raises(ValueError, match=r"copy\(\).reshape"):
                there.reshape(shape)
            same(there.copy().reshape(shape).to_host(), expected)
    assert True in outcomes
    assert (False in outcomes) == (
        name in ("backward", "every second", "transposed", "swapped", "rows", "repeated")
    )


def test_arguments_of_reshape(gpuops):
    host = np.arange(24.0)
    d = gpuops.to_device(host)
    for shape in [(24,), (2, 12), (-1,), (4, -1), (-1, 3, 2), (1, 24, 1), (2, 3, 4)]:
        expected = host.reshape(shape)
        for result in (d.reshape(shape), d.reshape(*shape), d.reshape(list(shape))):
            same(result.to_host(), expected)
    same(d.reshape(np.int64(24)).to_host(), host)
    assert d[3].reshape(1, 1).shape == (1, 1) and d[3].reshape(()).shape == ()
    assert d[:1].reshape(()).to_host() == 0 and d[5:6].reshape(1, -1).shape == (1, 1)
    empty = gpuops.empty((0, 3))
    assert empty.reshape(5, 0).shape == (5, 0) and empty.reshape(3, -1).shape == (3, 0)
    for shape in [(5,), (5, -1), (25,), (), (0,), (1 << 40, 1 << 40), (-2, 12), (24, 0)]:
        with pytest.raises(ValueError, match="cannot reshape array of size 24"):
            d.reshape(shape)
    with pytest.raises(ValueError, match="one unknown dimension"):
        d.reshape(-1, -1)
    with pytest.raises(ValueError, match="cannot reshape array of size 0"):
        empty.reshape(0, -1)
    with pytest.raises(ValueError, match="64"):
        d.reshape((24,) + (1,) * 64)
    for wrong in [(), (2.5,), ("a",), (None,), ((2, 3), 4), (1 << 70,)]:
        with pytest.raises((TypeError, ValueError)):
            d.reshape(*wrong)


def test_what_is_read_only_stays_so(gpuops):
    host = np.arange(6.0).reshape(2, 3)
    d = gpuops.to_device(host)
    shown = gpuops.asarray(External(d, host, read_only=True))
    for view in (shown, shown[0], shown[::-1], shown[...], shown.reshape(3, 2)):
        with pytest.raises(ValueError, match=r"read-only.*copy\(\)"):
            view.fill(1)
    same(shown.to_host(), host)
    writable = shown.copy()
    writable.fill(1)
    same(writable.to_host(), np.ones((2, 3)))
    same(shown.to_host(), host)


# Filling and copying.

FILLED = [
    ("u1", 255), ("u1", True), ("u1", 3.9), ("i4", -7), ("i4", "12"), ("f4", 1e-3), ("f4", 10**30),
    ("f8", np.float32(0.1)), ("c8", 1 - 2j), ("c16", 3), ("?", 7), ("?", 0), ("S3", b"abcd"),
    ("S5", "ab"), ("U4", "grün"), ("M8[s]", "2024-02-29"), ("M8[D]", np.datetime64("NaT", "D")),
    ("m8[s]", np.timedelta64(5, "s")), ([("a", "i1"), ("b", "f4")], (1, 2.5)),
    ([("a", "i1"), ("b", "f4")], 3),
    ("V3", np.void(b"abc")), ("V17", np.void(bytes(range(17)))), ("f4", np.array(2.5)),
    ("i2", np.int64(-70)), ("V100", np.void(bytes(range(100)))), ("longdouble", 0.1),
]  # fmt: skip


def assigned(shape, dtype, value):
    result = np.zeros(shape, dtype)
    result[...] = value
    return result


@pytest.mark.parametrize(("dtype", "value"), FILLED, ids=str)
def test_fill(gpuops, dtype, value):
    for shape in [(), (1,), (5,), (3, 7), (0,), (1000,)]:
        d = gpuops.empty(shape, dtype)
        assert d.fill(value) is None
        assert (d.to_host() == assigned(shape, dtype, value)).all() or value != value


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("dtype", ["u1", "i2", "V3", "f4", "f8", "c16", "V17"])
def test_fill_of_a_view_fills_no_more(gpuops, name, dtype):
    host = filled_array((4, 6, 2), dtype)
    d = gpuops.to_device(host)
    value = filled_array((), dtype, seed=3)[()]
    gpuops.asarray(External(d, host, RESHAPED[name](host))).fill(value)
    if name != "repeated":  # NumPy gives that out as read-only
        RESHAPED[name](host)[...] = value
    else:
        host[0] = value
    same(d.to_host(), host)


@pytest.mark.parametrize("dtype", ["u1", "i2", "V3", "f4", "f8", "c16", "V17"])
def test_fill_of_shared_memory(gpuops, dtype):
    """All elements are written the same, however many of them lie in one place."""
    host = filled_array(40, dtype)
    item = host.itemsize
    windows = np.lib.stride_tricks.as_strided(host[2:], (30, 3, 7), (item, 0, item))
    d = gpuops.to_device(host)
    value = filled_array((), dtype, seed=3)[()]
    gpuops.asarray(External(d, host, windows)).fill(value)
    host[2:38] = value
    same(d.to_host(), host)


WRONG_VALUES = [
    ("u1", 300), ("i2", np.int64(70_000)), ("u1", -1), ("i1", 128), ("i4", 1 << 40),
    ("f4", "text"), ("i4", [1, 2]), ("M8[s]", "nonsense"), ("i4", None), ("f4", object()),
    ([("a", "i1"), ("b", "f4")], (1, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value"), WRONG_VALUES, ids=lambda value: str(value)[:20])
def test_values_that_do_not_fit(gpuops, dtype, value):
    d = gpuops.zeros(3, dtype)
    before = d.to_host()
    with pytest.raises((TypeError, ValueError, OverflowError)) as numpys:
        assigned((), dtype, value)
    with pytest.raises(numpys.type):
        d.fill(value)
    same(d.to_host(), before)
    with pytest.raises(TypeError, match="to_host"):
        d.fill(gpuops.zeros((), dtype))


def test_arguments_of_fill(gpuops):
    d = gpuops.zeros(3)
    for wrong in ((), (1, 2, 3)):
        with pytest.raises(TypeError):
            d.fill(*wrong)
    with pytest.raises(TypeError, match="__cuda_stream__"):
        d.fill(1, stream=0)
    d.fill(value=2, stream=None)
    assert d.to_host().tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("dtype", ["u1", "i2", "V3", "f4", "f8", "c16", "V20"])
def test_copy(gpuops, name, dtype):
    host = filled_array((4, 6, 2), dtype)
    d = gpuops.to_device(host)
    view = RESHAPED[name](host)
    there = gpuops.asarray(External(d, host, view))
    for result in (
        there.copy(),
        there.copy(stream=None),
        copy.copy(there),
        gpuops.to_device(there),
    ):
        assert result.strides == np.empty(view.shape, dtype).strides
        assert result.ptr != there.ptr
        same(result.to_host(), view.copy())
    result = there.copy()
    d.fill(np.zeros((), dtype)[()])
    same(result.to_host(), view.copy())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(gpuops, protocol):
    for host in (
        np.arange(6.0).reshape(2, 3),
        np.zeros((0, 2), "M8[ns]"),
        filled_array((5,), [("a", "i1"), ("b", "f4")]),
        np.array(3, "u2"),
    ):
        d = gpuops.to_device(host)
        result = pickle.loads(pickle.dumps(d, protocol))
        assert type(result) is gpuops.DeviceArray
        assert result.ptr != d.ptr or not host.size
        same(result.to_host(), host)
        same(pickle.loads(pickle.dumps(d[::-1] if d.ndim else d, protocol)).to_host(),
             host[::-1].copy() if host.ndim else host)  # fmt: skip


def test_deepcopy(gpuops, gpu):
    """Through the host, as pickle, which takes a call that waits."""
    d = gpuops.to_device(np.arange(6.0))
    if gpu.fake is not None:
        gpu.fake.reset()
    both = copy.deepcopy([d, d, {"key": d[::2]}])
    assert both[0] is both[1] and both[0].ptr != d.ptr
    if gpu.fake is not None:
        assert gpu.fake.calls("cudaStreamQuery") > 0
    same(both[2]["key"].to_host(), np.arange(0.0, 6, 2))
    d.fill(0)
    same(both[0].to_host(), np.arange(6.0))


# Refusals.

CONVERSIONS = {
    "asarray": np.asarray,
    "array": np.array,
    "a dtype": lambda d: np.asarray(d, "f4"),
    "sum": np.sum,
    "add": lambda d: np.ones(3) + d,
    "concatenate": lambda d: np.concatenate([d, d]),
    "method": lambda d: d.__array__(),
    "copy=": lambda d: d.__array__(np.float32, copy=True),
    "bool": bool,
    "not": operator.not_,
    "if": lambda d: 1 if d else 0,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "hex": hex,
    "range": range,
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_name_to_host(gpuops, name):
    for shape in ((3,), (), (1,)):
        with pytest.raises(TypeError, match=r"to_host\(\)"):
            CONVERSIONS[name](gpuops.zeros(shape))


ITERATIONS = {
    "iter": iter,
    "for": lambda d: [item + 1 for item in d],
    "unpacked": lambda d: (*d,),
    "list": list,
    "in": lambda d: 3 in d,
    "reversed": reversed,
    "sum": sum,
    "zip": lambda d: zip(d, d, strict=True),
}


@pytest.mark.parametrize("name", ITERATIONS)
def test_iteration_is_refused_with_advice(gpuops, name):
    with pytest.raises(TypeError, match=r"element by element: use to_host\(\).*gather"):
        ITERATIONS[name](gpuops.zeros(3))


def test_no_buffer(gpuops):
    d = gpuops.zeros(3, "u1")
    for take in (memoryview, bytearray, lambda d: b"".join([d])):
        with pytest.raises(TypeError):
            take(d)
    with pytest.raises(TypeError):
        bytes(d)


def test_length(gpuops):
    assert len(gpuops.zeros((4, 2))) == 4 and len(gpuops.zeros((0, 2))) == 0
    with pytest.raises(TypeError, match=r"len\(\) of unsized object"):
        len(gpuops.zeros(()))


# How it looks.


def numpys_repr(host, device=0):
    return repr(host).replace("array(", "gpuops.DeviceArray(", 1)


def words(text):
    """Without the ends of lines, and without what is said of shape, dtype and device."""
    return re.sub(r"(,\s*(shape|dtype|device)=.*)?\)$", "", " ".join(text.split()), count=1)


SHOWN = [
    np.arange(5.0), np.arange(6, dtype="f4").reshape(2, 3), np.array(3, "u2"), np.zeros((0, 3)),
    np.arange(1001), np.arange(3000).reshape(1000, 3), np.arange(3000.0).reshape(3, 1000),
    np.arange(8000).reshape(20, 20, 20), np.array(["a", "<b>"]), np.zeros(2000, "M8[ns]"),
    np.array([(1, 2.5)] * 3, [("a", "i1"), ("b", "f4")]), np.linspace(0, 1e9, 2000),
    np.array([1 + 2j, np.nan]), np.array([True, False] * 600), np.arange(2**12).reshape((2,) * 12),
    np.array([b"abc"] * 1200), np.float16([1.5, np.inf]),
]  # fmt: skip


@pytest.mark.parametrize("host", SHOWN, ids=lambda host: f"{host.dtype.kind}{host.shape}")
def test_repr(gpuops, host):
    d = gpuops.to_device(host)
    for array_on_device, expected in [(d, host)] + ([(d[::-1], host[::-1])] if host.ndim else []):
        text = repr(array_on_device)
        assert words(text) == words(numpys_repr(expected))
        assert text.endswith(")") and re.search(r"\bdevice=0\)$", text)
        assert f"{host.dtype}" in text
        assert str(array_on_device) == f"{array_on_device}" == text
        assert max(map(len, text.splitlines())) <= 90


def test_the_options_of_printing_hold(gpuops):
    host = np.arange(60.0).reshape(6, 10) / 3
    d = gpuops.to_device(host)
    for options in (
        {"precision": 2},
        {"threshold": 10},
        {"threshold": 10, "edgeitems": 1},
        {"threshold": 0, "edgeitems": 4},
        {"suppress": True, "linewidth": 40},
        {"threshold": 5, "edgeitems": 100},
    ):
        with np.printoptions(**options):
            assert words(repr(d)) == words(numpys_repr(host))
    with np.printoptions(threshold=0):
        assert words(repr(gpuops.to_device(5))) == "gpuops.DeviceArray(5"


def test_repr_in_full(gpuops):
    assert repr(gpuops.to_device(np.float32([1, 2.5]))) == (
        "gpuops.DeviceArray([1. , 2.5], dtype=float32, device=0)"
    )
    assert repr(gpuops.empty((0, 2), "S3")) == (
        "gpuops.DeviceArray([], shape=(0, 2), dtype='|S3', device=0)"
    )
    assert repr(gpuops.to_device(np.arange(2000))) == (
        "gpuops.DeviceArray([   0,    1,    2, ..., 1997, 1998, 1999],\n"
        "                   shape=(2000,), dtype=int64, device=0)"
    )


def test_only_the_edges_are_fetched(gpuops):
    """There is no room for another array of that size."""
    d = gpuops.zeros((1 << 10, 1 << 13), "u1")
    gpuops.empty_cache()
    before = gpuops.memory_limit(gpuops.memory_info().used + MEBIBYTE)
    try:
        assert "unreadable" not in repr(d)
        assert "unreadable" not in d._repr_html_()
        assert "unreadable" not in repr(d.reshape(-1)[::3])
    finally:
        gpuops.memory_limit(before)


def test_repr_leaves_errors_to_others(gpuops):
    d = gpuops.to_device(np.arange(5))
    result = gpuops.gather(d, [9, 1])
    assert repr(result) == "gpuops.DeviceArray([0, 1], dtype=int64, device=0)"
    assert "[0, 1]" in result._repr_html_()
    with pytest.raises(IndexError, match="index 9 is out of bounds for axis 0 with size 5"):
        result.to_host()
    assert result.to_host().tolist() == [0, 1]


def test_repr_of_what_cannot_be_read(gpuops):
    d = gpuops.to_device(np.arange(5))
    gpuops.empty_cache()
    before = gpuops.memory_limit(0)
    try:
        text, shown = repr(d), d._repr_html_()
    finally:
        gpuops.memory_limit(before)
    assert re.fullmatch(
        r"<gpuops\.DeviceArray shape=\(5,\) dtype=int64 device=0 unreadable: .*memory.*>", text
    )
    assert shown.startswith("<code>&lt;gpuops.DeviceArray shape=(5,)")


def test_html(gpuops):
    shown = gpuops.to_device(np.array(["<b>", "&"]))._repr_html_()
    assert "<b>" not in shown and "&lt;b&gt;" in shown and "&amp;" in shown
    assert "<table>" in shown and "(2,)" in shown and "cuda:0" in shown
    big = gpuops.zeros((5000, 5000), "u1")._repr_html_()
    assert len(big) < 2000 and "25,000,000" in big
    record = gpuops.zeros(2, [("<script>", "i4")])._repr_html_()
    assert "<script>" not in record


# asarray


def test_asarray(gpuops):
    d = gpuops.to_device(np.arange(5))
    assert gpuops.asarray(d) is d and gpuops.asarray(d, copy=False) is d
    assert gpuops.asarray(d, dtype=int, device=0) is d and gpuops.asarray(d, device="cuda:0") is d
    again = gpuops.asarray(d, copy=True)
    assert again.ptr != d.ptr
    same(again.to_host(), np.arange(5))
    for x in (3, [1, 2], np.arange(6.0)[::2], array.array("d", [1])):
        same(gpuops.asarray(x).to_host(), np.array(x))
        same(gpuops.asarray(x, copy=True).to_host(), np.array(x))
        with pytest.raises(ValueError, match="to_device"):
            gpuops.asarray(x, copy=False)
    for wrong in (1, "yes", np.True_):
        with pytest.raises(TypeError, match="copy must be"):
            gpuops.asarray(d, copy=wrong)
    assert gpuops.asarray(d, stream=gpuops.Stream()) is d
    for x in (d, [1, 2], External(d, np.arange(5))):
        for wrong in (5, "stream", d):
            with pytest.raises(TypeError, match="stream must be"):
                gpuops.asarray(x, stream=wrong)


def test_asarray_with_a_dtype(gpuops):
    for x, dtype in [
        ([1, 2], "f4"), (np.arange(3), np.float16), (2.7, int), (np.array([1.5, 300]), "u2"),
        (array.array("i", [1, 2]), "c16"), ([], "i4"), ("2024-01-01", "M8[D]"),
    ]:  # fmt: skip
        same(gpuops.asarray(x, dtype=dtype).to_host(), np.asarray(x, dtype=dtype))
    with pytest.raises(OverflowError):
        gpuops.asarray([300], dtype="u1")
    with pytest.raises(ValueError):
        gpuops.asarray(["a"], dtype=float)
    with pytest.raises(TypeError, match="Python objects"):
        gpuops.asarray([1, 2], dtype=object)
    with pytest.raises(TypeError, match="masked"):
        gpuops.asarray(np.ma.array([1, 2], mask=[0, 1]), dtype="f4")
    d = gpuops.to_device([1, 2])
    for copies in (None, True):
        with pytest.raises(TypeError, match="astype"):
            gpuops.asarray(d, dtype="f4", copy=copies)
    with pytest.raises(TypeError):
        gpuops.asarray(d, dtype="nonsense")


def test_asarray_shares_the_memory_of_others(gpuops):
    host = np.arange(6.0).reshape(2, 3)
    owner = External(gpuops.to_device(host), host, host.T)
    gone = weakref.ref(owner)
    d = gpuops.asarray(owner)
    assert d.ptr == owner.__cuda_array_interface__["data"][0]
    assert (d.shape, d.strides) == ((3, 2), (8, 24))
    same(gpuops.asarray(owner, copy=True).to_host(), host.T.copy())
    same(gpuops.to_device(owner).to_host(), host.T.copy())
    with pytest.raises(TypeError, match="astype"):
        gpuops.asarray(owner, dtype="f4")
    d.fill(7)
    assert (owner.owner.to_host() == 7).all()
    del owner
    gc.collect()
    assert gone() is not None
    same(d[1].to_host(), np.full(2, 7.0))
    del d
    gpuops.synchronize()
    gpuops.memory_info()
    gc.collect()
    assert gone() is None


# Devices.


def test_device_of_new_arrays(gpuops):
    for device in (None, 0, "cuda", "cuda:0", np.int64(0)):
        assert gpuops.to_device([1], device=device).device == 0
        assert gpuops.empty(1, device=device).device == 0
        assert gpuops.zeros(1, device=device).device == 0
        assert gpuops.asarray([1], device=device).device == 0
    with gpuops.device("cpu"):  # where there is nothing else, the current GPU is meant
        assert gpuops.zeros(1).device == 0


def test_devices_that_are_not(gpuops):
    count = gpuops.device_count()
    calls = [
        lambda device: gpuops.to_device([1], device=device),
        lambda device: gpuops.empty(1, device=device),
        lambda device: gpuops.zeros(1, device=device),
        lambda device: gpuops.asarray([1], device=device),
        lambda device: gpuops.memory_info(device),
        lambda device: gpuops.empty_cache(device),
        lambda device: gpuops.memory_limit(None, device=device),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="GPU"):
            call("cpu")
        for device in (count, f"cuda:{count + 5}"):
            with pytest.raises(gpuops.DeviceError, match=rf"there is no cuda:{str(device)[-1]}"):
                call(device)
        for device in ("nowhere", -1):
            with pytest.raises(ValueError, match="unknown device"):
                call(device)
        with pytest.raises(TypeError, match="device must be"):
            call(1.5)


def test_without_a_gpu(fake_device):
    """Everything says why there is none, but what gives memory of the host back too."""
    source = """
import gpuops
for call in (lambda: gpuops.to_device([1]), lambda: gpuops.zeros(3), lambda: gpuops.empty(3),
             lambda: gpuops.asarray([1]), gpuops.memory_info, gpuops.empty_cache, gpuops.Stream,
             lambda: gpuops.memory_limit(5), gpuops.Event, gpuops.synchronize,
             gpuops.current_stream, lambda: gpuops.to_device([1], device="cuda:1")):
    try:
        call()
    except gpuops.DeviceError as error:
        print(str(error).partition(":")[0])
    else:
        print("no error")
print(gpuops.gather([1, 2], [1])[0])
"""
    printed = run_child(fake_device.gpuops, source, GPUOPS_FAKE_DRIVER="none").splitlines()
    assert printed == [
        "to_device", "zeros", "empty", "asarray", "memory_info", "no error", "Stream",
        "memory_limit", "Event", "synchronize", "current_stream",
        "to_device on cuda", "2",
    ]  # fmt: skip


def test_two_devices(gpuops, gpu, two_devices):
    host = np.arange(6.0).reshape(2, 3)
    d = gpuops.to_device(host, device=1)
    assert (d.device, d.stream.device) == (1, 1)
    assert repr(d).endswith("device=1)")
    for result in (d.copy(), d[::-1][::-1], d.reshape(6).reshape(2, 3), copy.deepcopy(d)):
        assert result.device == 1
        same(result.to_host(), host)
    d.fill(3)
    same(d.to_host(), np.full((2, 3), 3.0))
    assert gpuops.zeros(3, device="cuda:1").device == gpuops.empty(3, device=1).device == 1
    with gpuops.device("cuda:1"):
        assert gpuops.zeros(3).device == gpuops.to_device(host).device == 1
        assert gpuops.Stream().device == gpuops.current_stream().device == 1
        assert gpuops.to_device(gpuops.to_device(host, device=0)).device == 0
    if gpu.fake:
        assert gpu.fake.current_device() == 0


def test_from_device_to_device(gpuops, two_devices):
    host = filled_array((40, 30), "V3")
    for source, target in ((0, 1), (1, 0)):
        d = gpuops.to_device(host, device=source)
        for view, expected in [(d, host), (d[::-2], host[::-2]), (d[3], host[3])]:
            expected = expected.copy()
            for result in (
                gpuops.to_device(view, device=target),
                gpuops.asarray(view, device=target),
                gpuops.to_device(view, stream=gpuops.Stream(target)),
                gpuops.asarray(view, device=target, copy=True),
            ):
                assert result.device == target
                same(result.to_host(), expected)
        with pytest.raises(ValueError, match="another GPU"):
            gpuops.asarray(d, device=target, copy=False)
        assert gpuops.to_device(d).device == gpuops.asarray(d).device == source


def test_streams_of_another_device(gpuops, two_devices):
    d, stream = gpuops.zeros(3), gpuops.Stream(1)
    for call in (
        lambda: d.to_host(stream=stream),
        lambda: d.copy(stream=stream),
        lambda: d.fill(1, stream),
        lambda: gpuops.zeros(3, device=0, stream=stream),
        lambda: gpuops.to_device([1], device=0, stream=stream),
        lambda: gpuops.asarray([1], device="cuda:0", stream=stream),
    ):
        with pytest.raises(ValueError, match="stream is on cuda:1, and the call works on cuda:0"):
            call()
    assert gpuops.zeros(3, stream=stream).device == gpuops.asarray([1], stream=stream).device == 1


# Lifetimes.


def test_dtypes_are_not_lost(gpuops):
    host = np.zeros((4, 2), [("only", "i4"), ("here", "i2")])
    d = gpuops.to_device(host)
    before = sys.getrefcount(host.dtype), sys.getrefcount(gpuops.DeviceArray)
    for _ in range(200):
        for view in (d[0], d[1:], d[...], d.reshape(-1), d.copy(), gpuops.to_device(d)):
            view.dtype  # noqa: B018
            repr(view)
        d.fill((1, 2))
        gpuops.zeros(3, host.dtype)
        d.to_host()
        with contextlib.suppress(ValueError):
            d.reshape(3)
        with contextlib.suppress(IndexError):
            d[99]
        with contextlib.suppress(TypeError):
            gpuops.to_device(host[:2], device="cuda", stream=3)
        with contextlib.suppress(TypeError):
            gpuops.asarray(d, dtype="f4", copy=True)
    gc.collect()
    after = sys.getrefcount(host.dtype), sys.getrefcount(gpuops.DeviceArray)
    assert abs(after[0] - before[0]) < 5 and abs(after[1] - before[1]) < 5


def test_memory_goes_back(gpuops):
    gpuops.zeros(5)
    used = gpuops.memory_info().used
    for _ in range(100):
        d = gpuops.to_device(np.arange(1000))
        view = d[::2]
        del d
        with contextlib.suppress(TypeError):
            gpuops.asarray(view, dtype="f4")
        with contextlib.suppress(OverflowError):
            gpuops.empty(10, "u1").fill(300)
        view.reshape(-1)[3].to_host()
        view.copy()
    del view
    assert gpuops.memory_info().used == used


def test_many_threads(gpuops, gpu):
    errors = []

    def work(number):
        try:
            with gpuops.device("cuda"):
                for turn in range(60):
                    host = np.arange(100 + number) + turn
                    d = gpuops.to_device(host)
                    views = [d[::2], d[::-1], d.reshape(-1)]
                    assert (views[0].to_host() == host[::2]).all()
                    assert (views[1].copy().to_host() == host[::-1]).all()
                    shared.fill(turn)
                    shared.to_host()
                    repr(shared)
        except BaseException as error:
            errors.append(error)

    shared = gpuops.zeros(50)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not errors, errors


def test_the_package_can_be_imported_twice(gpuops):
    """Each build pickles and shows its own arrays."""
    assert package_parent(gpuops)
    d = gpuops.to_device([1, 2])
    function, _ = d.__reduce__()
    assert function is gpuops.to_device
    assert "DeviceArray" in repr(d)
