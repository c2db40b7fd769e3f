"""DLPack and __cuda_array_interface__ by hand: forty kinds of liar, lifetimes, every option.

Arrays on the host run through operators on every device; arrays on a GPU on the fake runtime and on
a real one.
"""

import ctypes
import gc
import subprocess
import sys
import threading
import types
import weakref

import capsules
import numpy as np
import pytest
from capsules import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, IS_COPIED, METAL, READ_ONLY, ROCM, Producer
from helpers import filled_array, run_child, same

ml_dtypes = pytest.importorskip("ml_dtypes")

MAX_DIMS = 64
SMALLEST, LARGEST = -(1 << 63), (1 << 63) - 1


class Interface:
    """Another library's array by __cuda_array_interface__; the keywords say what is wrong."""

    def __init__(self, data, /, **wrong):
        self.owner = data
        self.dict = {
            "shape": data.shape,
            "typestr": data.dtype.str,
            "strides": data.strides,
            "data": (data.ptr, False),
            "version": 3,
        }
        self.dict.update(wrong)
        for key in [key for key, value in self.dict.items() if value is MISSING]:
            del self.dict[key]
        self.asked = 0

    @property
    def __cuda_array_interface__(self):
        self.asked += 1
        return self.dict


MISSING = object()


# Liars. Each is told by what it says, where the data are: shape (2, 3) of float64.

LIARS = {
    "ndim is negative": {"ndim": -1},
    "ndim is far below zero": {"ndim": -(1 << 31)},
    "ndim is too large": {"ndim": MAX_DIMS + 1},
    "ndim is much too large": {"ndim": (1 << 31) - 1},
    "no shape": {"shape": None},
    "a size is negative": {"shape": (2, -3)},
    "a size is the smallest number": {"shape": (SMALLEST, 3)},
    "the sizes overflow": {"shape": (1 << 32, 1 << 32), "strides": None},
    "the bytes overflow": {"shape": (1, 1 << 60), "strides": None},
    "the sizes overflow beside a zero": {"shape": (1 << 62, 4, 0), "ndim": 3, "strides": None},
    "a stride overflows in bytes": {"strides": (1 << 60, 1)},
    "a stride is the smallest number": {"strides": (SMALLEST, 1)},
    "a stride reaches too far": {"shape": (1 << 20, 3), "strides": (1 << 50, 1)},
    "strides reach too far together": {"strides": ((1 << 59), (1 << 59))},
    "strides reach too far in both directions": {"strides": ((1 << 59), -(1 << 59))},
    "strides that come round to nothing": {"shape": (2,) * 4, "ndim": 4, "strides": (1 << 59,) * 4},
    "no data": {"data": None},
    "the offset overflows": {"byte_offset": (1 << 64) - 8},
    "beyond the highest address": {"data": (1 << 64) - 16},
    "below the lowest address": {"data": 64, "strides": (-100, 1)},
    "no lanes": {"lanes": 0},
    "two lanes": {"lanes": 2},
    "no bits": {"bits": 0},
    "7-bit integers": {"code": 0, "bits": 7},
    "4-bit integers": {"code": 0, "bits": 4},
    "128-bit integers": {"code": 0, "bits": 128},
    "1-bit unsigned integers": {"code": 1, "bits": 1},
    "8-bit floats of no kind": {"code": 2, "bits": 8},
    "80-bit floats": {"code": 2, "bits": 80},
    "128-bit floats": {"code": 2, "bits": 128},
    "pointers": {"code": 3, "bits": 64},
    "32-bit bfloats": {"code": 4, "bits": 32},
    "16-bit complex numbers": {"code": 5, "bits": 16},
    "1-bit bools": {"code": 6, "bits": 1},
    "16-bit float8": {"code": 10, "bits": 16},
    "float6": {"code": 15, "bits": 6},
    "float4": {"code": 17, "bits": 4},
    "a type that does not exist": {"code": 200, "bits": 64},
    "version 2": {"version": (2, 0)},
    "version 0 in a versioned capsule": {"version": (0, 8)},
    "version 4294967295": {"version": ((1 << 32) - 1, 0)},
    "a capsule of another kind": {"name": b"nonsense"},
    "a capsule that was consumed": {"name": capsules.USED_VERSIONED},
    "a legacy capsule that was consumed": {"name": capsules.USED_LEGACY},
    "another device type in the capsule": {"device": (METAL, 0)},
    "no device type in the capsule": {"device": (0, 0)},
}

# What __dlpack_device__ says.
NOWHERE = {
    "ROCm": (ROCM, 0),
    "Metal": (METAL, 0),
    "a type that does not exist": (77, 0),
    "a negative type": (-1, 0),
    "a negative device": (CUDA, -1),
    "a device that does not exist": (CUDA, 99),
    "a device beyond an int": (CUDA, 1 << 40),
    "a device beyond a long": (CUDA, 1 << 80),
    "not a tuple": 2,
    "a list": [CPU, 0],
    "None": None,
    "three numbers": (CPU, 0, 0),
    "words": ("cpu", "0"),
    "floats": (1.0, 0.0),
}

HOST = np.arange(6.0).reshape(2, 3)


def refused(call, producer, match=None):
    """The call is refused, and the producer gets back what it gave away, once."""
    with pytest.raises(BufferError, match=match) as caught:
        call(producer)
    del caught
    if producer.deleted != producer.made:
        gc.collect()
    assert producer.deleted == producer.made
    assert capsules.DELETED_TWICE == []


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
@pytest.mark.parametrize("name", LIARS)
def test_liars_on_the_host(gpuops, name, legacy):
    wrong = dict(LIARS[name])
    if legacy and (wrong.keys() & {"version", "name"}):
        pytest.skip("not in this form")
    if legacy:
        wrong["name"] = capsules.LEGACY
    if "device" in wrong:
        wrong["claimed_device"] = (CPU, 0)
    refused(lambda x: gpuops.gather(x, [0]), Producer(HOST, **wrong))
    refused(lambda x: gpuops.gather(HOST, x), Producer(HOST, **wrong))
    good = Producer(HOST)
    same(gpuops.gather(good, [1]), HOST[[1]])
    assert good.deleted == good.made == 1


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned", "legacy"])
@pytest.mark.parametrize("name", LIARS)
def test_liars_on_a_device(gpu, name, legacy):
    gpuops = gpu.gpuops
    wrong = dict(LIARS[name])
    if legacy and (wrong.keys() & {"version", "name"}):
        pytest.skip("not in this form")
    if legacy:
        wrong["name"] = capsules.LEGACY
    d = gpuops.to_device(HOST)
    if "device" in wrong:
        wrong["claimed_device"] = (CUDA, d.device)
    calls = [
        lambda x: gpuops.gather(x, [0]),
        lambda x: gpuops.gather(d, x),
        gpuops.from_dlpack,
        gpuops.asarray,
        gpuops.to_device,
    ]
    for call in calls:
        refused(call, Producer(d, **wrong))
    good = Producer(d)
    same(gpuops.from_dlpack(good).to_host(), HOST)
    same(gpuops.gather(good, [1]).to_host(), HOST[[1]])


@pytest.mark.parametrize("name", NOWHERE)
def test_devices_that_are_none(gpuops, name):
    producer = Producer(HOST, claimed_device=NOWHERE[name])
    # Where there is no GPU at all, that is the better answer.
    with pytest.raises((BufferError, gpuops.DeviceError)):
        gpuops.gather(producer, [0])
    assert producer.made == 0


def test_advice_for_other_devices(gpuops):
    for device, text in [((ROCM, 0), "ROCm"), ((METAL, 0), "Metal"), ((77, 0), "unknown")]:
        with pytest.raises(BufferError, match=rf"x is in memory of .*{text}.*copy it to the CPU"):
            gpuops.gather(Producer(HOST, claimed_device=device), [0])


def test_the_device_that_was_told_first_counts(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    refused(lambda x: gpuops.gather(x, [0]), Producer(d, claimed_device=(CPU, 0)))
    refused(gpuops.asarray, Producer(HOST, claimed_device=(CUDA, 0)))
    refused(gpuops.asarray, Producer(d, device=(CUDA, 1), claimed_device=(CUDA, 0)))
    refused(gpuops.asarray, Producer(d, device=(CUDA_HOST, 0), claimed_device=(CUDA, 0)))


def test_memory_that_is_not_on_the_device(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    refused(gpuops.asarray, Producer(d, data=HOST.ctypes.data), "says that it is on cuda:0")
    refused(gpuops.asarray, Producer(d, data=8))
    # It begins on the device and ends nowhere.
    refused(gpuops.asarray, Producer(d, shape=(1 << 40, 3), strides=(3, 1)))
    refused(gpuops.asarray, Producer(d, strides=(-(1 << 40), 1)))


def test_misaligned_memory_on_a_device(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(np.arange(10.0))
    for offset in (1, 2, 4, 7):
        refused(gpuops.asarray, Producer(d[:9], byte_offset=offset), "not aligned to the 8 bytes")
    numbers = gpuops.to_device(np.arange(10, dtype="c16"))
    refused(gpuops.asarray, Producer(numbers[:9], byte_offset=4), "aligned")
    same(gpuops.asarray(Producer(numbers[:1], byte_offset=16)).to_host(), np.array([1], "c16"))
    half = gpuops.asarray(Producer(numbers[:9], byte_offset=8))
    same(half.to_host(), np.arange(10, dtype="c16").view("f8")[1:19].view("c16"))


def test_misaligned_memory_on_the_host(gpuops):
    raw = np.frombuffer(b"\0" + HOST.tobytes(), np.uint8)
    producer = Producer(HOST, data=raw.ctypes.data, byte_offset=1)
    same(gpuops.gather(producer, [1, 0]), HOST[[1, 0]])


def test_what_is_no_capsule(gpuops):
    for answer in (None, 7, "capsule", HOST):
        producer = Producer(HOST)
        producer.capsule = lambda answer=answer: answer
        with pytest.raises(BufferError, match="not a DLPack capsule"):
            gpuops.gather(producer, [0])


def test_errors_of_the_producer_go_through(gpuops):
    class Failing(Producer):
        def __dlpack__(self, **keywords):
            raise self.error

    class Nowhere(Producer):
        def __dlpack_device__(self):
            raise self.error

    for kind in (Failing, Nowhere):
        for error in (
            BufferError("no"),
            KeyError("no"),
            KeyboardInterrupt("no"),
            MemoryError("no"),
        ):
            producer = kind(HOST)
            producer.error = error
            with pytest.raises(type(error), match="no"):
                gpuops.gather(producer, [0])


# Good producers.


@pytest.mark.parametrize("name", [capsules.VERSIONED, capsules.LEGACY])
@pytest.mark.parametrize("dtype", [*capsules.DTYPES, *capsules.ML_DTYPES])
def test_every_dtype_on_the_host(gpuops, dtype, name):
    host = filled_array((5, 3), np.dtype(dtype))
    producer = Producer(host, name=name)
    same(gpuops.gather(producer, [4, 0, 4]), host[[4, 0, 4]])
    assert producer.deleted == producer.made == 1


@pytest.mark.parametrize("name", [capsules.VERSIONED, capsules.LEGACY])
@pytest.mark.parametrize("dtype", [*capsules.DTYPES, *capsules.ML_DTYPES])
def test_every_dtype_on_a_device(gpu, dtype, name):
    gpuops = gpu.gpuops
    host = filled_array((5, 3), np.dtype(dtype))
    d = gpuops.to_device(host)
    producer = Producer(d, name=name)
    imported = gpuops.from_dlpack(producer)
    assert (imported.ptr, imported.dtype, imported.shape) == (d.ptr, d.dtype, d.shape)
    same(imported.to_host(), host)
    del imported
    gpuops.synchronize()
    assert producer.deleted == 1
    export = capsules.Export(d.__dlpack__(max_version=(1, 3)))
    assert (export.dtype, export.lanes) == (capsules.code_of(host.dtype), 1)


@pytest.mark.parametrize("dtype", ["S5", "U3", "M8[ns]", "m8[s]", "V7", "f4,i2", "longdouble"])
def test_dtypes_without_a_word(gpu, dtype):
    d = gpu.gpuops.to_device(filled_array((3,), dtype))
    with pytest.raises(BufferError, match="DLPack has no word for dtype"):
        d.__dlpack__()
    with pytest.raises(BufferError, match="DLPack has no word for dtype"):
        d.__dlpack__(dl_device=(CPU, 0))


def test_without_ml_dtypes(gpuops):
    outcome = run_child(
        gpuops,
        """
        import sys
        sys.modules["ml_dtypes"] = None
        import numpy as np, gpuops
        from capsules import Producer

        bits = np.array([1, 2, 3], np.uint16)
        print(repr(gpuops.gather(Producer(bits, code=4), [2, 0], device="cpu").view("u2")))
        """.replace("\n        ", "\n"),
    )
    assert outcome == "array([3, 1], dtype=uint16)\n"


def test_complex32_is_moved(gpuops):
    pairs = np.arange(6, dtype=np.uint32)
    moved = gpuops.gather(Producer(pairs, code=5, bits=32), [5, 0])
    assert moved.view(np.uint32).tolist() == [5, 0]


def test_complex32_has_no_word_in_numpy(gpu):
    pairs = np.arange(6, dtype=np.uint32)
    for data in (pairs, gpu.gpuops.to_device(pairs)):
        x = Producer(data, code=5, bits=32)
        with pytest.raises(BufferError, match="x has dtype complex32, which NumPy has no word for"):
            gpu.gpuops.asarray(x)
        assert x.deleted == x.made == 1


VIEWS = {
    "C order": lambda x: x,
    "F order": lambda x: x.T,
    "every second": lambda x: x[::2, ::2],
    "backwards": lambda x: x[::-1],
    "backwards along all axes": lambda x: x[::-1, ::-2],
    "a column": lambda x: x[:, 1],
    "one row": lambda x: x[1:2],
    "one element": lambda x: x[1, 1, ...],
    "repeated": lambda x: np.broadcast_to(x[0], (4, 6)),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_strides_on_the_host(gpuops, name):
    host = np.atleast_1d(VIEWS[name](filled_array((4, 6), "f4")))
    indices = np.array([-1, 0] if host.shape[0] else [], int)
    same(gpuops.gather(Producer(host), indices), host[indices])


@pytest.mark.parametrize("name", VIEWS)
def test_strides_on_a_device(gpu, name):
    gpuops = gpu.gpuops
    whole = filled_array((4, 6), "f4")
    host = VIEWS[name](whole)
    d = gpuops.to_device(whole)
    offset = host.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    producer = Producer(
        d,
        ndim=host.ndim,
        shape=host.shape,
        strides=tuple(stride // 4 for stride in host.strides),
        byte_offset=offset if host.size else 0,
    )
    imported = gpuops.asarray(producer)
    assert imported.shape == host.shape
    assert imported.ptr == (d.ptr + offset if host.size else 0)
    same(imported.to_host(), np.ascontiguousarray(host).reshape(host.shape))
    again = gpuops.from_dlpack(imported)
    assert (again.ptr, again.strides) == (imported.ptr, imported.strides)
    export = capsules.Export(imported.__dlpack__(max_version=(1, 3)))
    assert export.shape == host.shape
    if host.ndim == 0:
        assert export.strides is None or export.strides == ()
    elif host.size:
        for size, stride, expected in zip(host.shape, export.strides, host.strides, strict=True):
            assert size == 1 or stride == expected // 4
    else:
        assert export.data == 0 and export.strides is not None


def test_no_strides_and_no_shape(gpuops):
    same(gpuops.gather(Producer(HOST, strides=None), 1), HOST[1])
    # Sizes of 1 and 0 make strides meaningless, however wild.
    same(gpuops.gather(Producer(HOST, shape=(1, 3), strides=(LARGEST, 1)), 0), HOST[0])
    wild = Producer(HOST, shape=(0, 3), strides=(LARGEST, SMALLEST), data=None)
    assert gpuops.gather(wild, np.array([], int)).shape == (0, 3)


def test_most_dimensions(gpuops):
    host = np.arange(2.0)
    shape = (2, *[1] * (MAX_DIMS - 1))
    producer = Producer(host, ndim=MAX_DIMS, shape=shape, strides=None)
    same(gpuops.gather(producer, [1, 0]), host[[1, 0]].reshape(shape))


@pytest.mark.parametrize(
    "accepts",
    [("stream", "max_version"), ("stream",), ("max_version",), ()],
    ids=lambda accepts: "+".join(accepts) or "none",
)
def test_older_producers(gpuops, accepts):
    producer = Producer(HOST, accepts=accepts, name=capsules.LEGACY)
    same(gpuops.gather(producer, [1]), HOST[[1]])
    assert producer.calls == [{"max_version": (1, 3)} if "max_version" in accepts else {}]


def test_older_producers_on_a_device(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    own = gpuops.Stream()
    for accepts in [("stream", "max_version"), ("stream",)]:
        for stream, handle in [(None, 1), (own, own.ptr)]:
            producer = Producer(d, accepts=accepts, name=capsules.LEGACY)
            imported = gpuops.from_dlpack(producer, stream=stream)
            same(imported.to_host(), HOST)
            expected = {"stream": handle, "max_version": (1, 3)}
            assert producer.calls == [{key: expected[key] for key in accepts}]
            assert imported.stream.ptr == handle
    with pytest.raises(TypeError):
        gpuops.from_dlpack(Producer(d, accepts=()))
    with own:
        producer = Producer(d)
        gpuops.gather(producer, [0])
    assert producer.calls[0]["stream"] == own.ptr


class Named(Producer):
    """An array with a namespace, as the array API has it; its results are lists."""

    def __array_namespace__(self):
        return self

    def asarray(self, array):
        return array.tolist()


def test_read_only(gpuops):
    for wrong in ({"flags": READ_ONLY}, {"name": capsules.LEGACY}):
        out = Named(HOST.copy(), **wrong)
        assert gpuops.gather(out, [1]) == [[3.0, 4.0, 5.0]]
        with pytest.raises(ValueError, match="read-only"):
            gpuops.gather(HOST, [1, 0], out=out)
        same(out.owner, HOST)
    out = Named(np.zeros((2, 3)))
    assert gpuops.gather(HOST, [1, 0], out=out) is out
    same(out.owner, HOST[[1, 0]])


def test_read_only_on_a_device(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    frozen = gpuops.from_dlpack(Producer(d, flags=READ_ONLY))
    with pytest.raises((TypeError, ValueError)):
        frozen.fill(1)
    with pytest.raises(ValueError, match="read-only"):
        gpuops.gather(d, [1, 0], out=frozen)
    with pytest.raises(ValueError, match="x is read-only, and scatter changes it in place"):
        gpuops.scatter(frozen, [0], 7.0)
    with pytest.raises(BufferError, match="read-only"):
        frozen.__dlpack__()
    export = capsules.Export(frozen.__dlpack__(max_version=(1, 0)))
    assert export.flags == READ_ONLY
    assert capsules.Export(frozen.__dlpack__(copy=True)).name == capsules.LEGACY
    assert capsules.Export(frozen.__dlpack__(copy=True, max_version=(1, 0))).flags == IS_COPIED
    assert frozen.__cuda_array_interface__["data"] == (d.ptr, True)
    unsaid = gpuops.from_dlpack(Producer(d, name=capsules.LEGACY))
    for view in (unsaid, unsaid[1:]):
        with pytest.raises(ValueError, match=r"read-only \(it came as DLPack of the old.*copy"):
            view.fill(1)
    unsaid.copy().fill(1)
    same(d.to_host(), HOST)


class Speechless(Named):
    """An array of a dtype that DLPack has no word for, and NumPy has one."""

    def __dlpack__(self, **options):
        raise BufferError("no word")


class Convertible(Speechless):
    def __array__(self, dtype=None, copy=None):
        if self.fields["data"] is None:
            raise ArithmeticError("no array")
        return self.owner


def test_numpy_converts_what_dlpack_has_no_word_for(gpuops):
    dates = np.array(["2000-01-01", "2000-01-02"], "M8[D]")
    x = Convertible(HOST)
    x.owner = dates
    assert gpuops.gather(x, [1], device="cpu") == dates[[1]].tolist()
    dates.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        gpuops.gather(dates, [1, 0], out=x, device="cpu")
    with pytest.raises(BufferError, match="no word"):
        gpuops.gather(Speechless(HOST), [1], device="cpu")
    with pytest.raises(ArithmeticError, match="no array"):
        gpuops.gather(Convertible(HOST, data=None), [1], device="cpu")


def test_a_library_without_a_namespace(gpu, monkeypatch):
    """Its package makes the result, if that takes arrays by DLPack; if not, it is our own."""
    gpuops = gpu.gpuops
    package = types.ModuleType("library")
    package.from_dlpack = lambda array: ["made", array.to_host()]
    monkeypatch.setitem(sys.modules, "library", package)

    class Array(Producer):
        __module__ = "library.core"

    class Last(Array):
        __module__ = "library.core"

        def __dlpack__(self, **options):
            del package.from_dlpack
            return super().__dlpack__(**options)

    d = gpuops.to_device(HOST)
    made, array = gpuops.gather(Array(d), [1])
    assert made == "made"
    same(array, HOST[[1]])
    with pytest.raises(TypeError, match="Last'> has no namespace"):
        gpuops.gather(Last(d), [1])
    for module in ("library.core", "nowhere.core", 7):
        Array.__module__ = module
        result = gpuops.gather(Array(d), [1])
        assert type(result) is gpuops.DeviceArray
        same(result.to_host(), HOST[[1]])


# Lifetimes.


def test_no_deleter(gpuops):
    producer = Producer(HOST, has_deleter=False)
    same(gpuops.gather(producer, [1]), HOST[[1]])
    assert (producer.made, producer.deleted) == (1, 0)


def test_no_deleter_on_a_device(gpu):
    d = gpu.gpuops.to_device(HOST)
    for wrong in ({}, {"name": capsules.LEGACY}, {"version": (2, 0)}):
        producer = Producer(d, has_deleter=False, **wrong)
        try:
            same(gpu.gpuops.from_dlpack(producer).to_host(), HOST)
        except BufferError:
            assert "version" in wrong
        assert (producer.made, producer.deleted) == (1, 0)


def test_a_capsule_is_good_for_once(gpuops):
    producer = Producer(HOST)
    capsule = producer.capsule()
    producer.capsule = lambda: capsule
    same(gpuops.gather(producer, [1]), HOST[[1]])
    assert producer.deleted == 1
    for _ in range(3):
        with pytest.raises(BufferError, match="consumed already"):
            gpuops.gather(producer, [1])
    assert capsules.capsule_name(capsule) == capsules.USED_VERSIONED
    del producer.capsule
    capsule = None
    assert producer.deleted == 1


def test_a_capsule_is_good_for_one_argument(gpu):
    gpuops = gpu.gpuops
    producer = Producer(gpuops.to_device(np.array([1, 0])))
    capsule = producer.capsule()
    producer.capsule = lambda: capsule
    with pytest.raises(BufferError, match="indices gave a DLPack capsule that has been consumed"):
        gpuops.gather(producer, producer)
    assert producer.deleted == 1


def test_the_deleter_runs_when_the_last_view_is_gone(gpu):
    gpuops = gpu.gpuops
    producer = Producer(gpuops.to_device(HOST))
    first = gpuops.from_dlpack(producer)
    row, again = first[1], first.reshape(6)
    capsule = first.__dlpack__(max_version=(1, 0))
    give_back = capsules.Export(first.__dlpack__()).consume()
    del first
    gpuops.synchronize()
    assert producer.deleted == 0
    same(row.to_host(), HOST[1])
    del row, again
    assert producer.deleted == 0
    del capsule
    assert producer.deleted == 0
    give_back()
    gpuops.synchronize()
    assert producer.deleted == 1


def test_an_operand_is_given_back_after_the_call(gpu):
    gpuops = gpu.gpuops
    table, indices = Producer(gpuops.to_device(HOST)), Producer(gpuops.to_device(np.array([1, 0])))
    result = gpuops.gather(table, indices)
    same(result.to_host(), HOST[[1, 0]])
    gpuops.empty(1)
    assert (table.made, table.deleted) == (1, 1)
    assert (indices.made, indices.deleted) == (1, 1)


def test_never_consumed(gpu):
    d = gpu.gpuops.to_device(HOST)
    for options in ({}, {"max_version": (1, 3)}, {"copy": True}, {"dl_device": (CPU, 0)}):
        for _ in range(10):
            d.__dlpack__(**options)
    same(d.to_host(), HOST)


def run_without_python(function, argument):
    """Calls a C function in a thread that Python knows nothing of."""
    library, thread = ctypes.CDLL(None), ctypes.c_ulong()
    function, argument = ctypes.c_void_p(function), ctypes.c_void_p(argument)
    assert library.pthread_create(ctypes.byref(thread), None, function, argument) == 0
    assert library.pthread_join(thread, None) == 0


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"max_version": (1, 3)}, {"copy": True}, {"dl_device": (CPU, 0)}], ids=repr
)
def test_consumed_and_given_back_without_the_gil(gpu, options, own_stream):
    """In threads of Python's and in others; memory outlives the array, and no longer."""
    gpuops = gpu.gpuops
    home = gpuops.Stream() if own_stream else gpuops.current_stream()
    before = gpuops.memory_info().used
    d = gpuops.to_device(HOST, stream=home)
    give_back = capsules.Export(d.__dlpack__(**options)).consume()
    del d
    thread = threading.Thread(target=give_back)
    thread.start()
    thread.join()
    gpuops.synchronize()
    assert gpuops.memory_info().used == before
    export = capsules.Export(gpuops.to_device(HOST, stream=home).__dlpack__(**options))
    deleter = ctypes.cast(export.managed.deleter, ctypes.c_void_p).value
    export.consume()
    run_without_python(deleter, export.address)
    gpuops.synchronize()
    assert gpuops.memory_info().used == before


def capsule_of(d, stream, **options):
    """Exports an array to a consumer that works on a stream; what gives it back."""
    return capsules.Export(d.__dlpack__(stream=stream.ptr, **options)).consume()


def managed_of(d, stream):
    """The same by the C exchange API."""
    out = ctypes.c_void_p()
    with stream:
        from_object = capsules.exchange_api(type(d)).from_object
        assert capsules.FROM_OBJECT(from_object)(d, ctypes.pointer(out)) == 0
    deleter = capsules.DELETER(capsules.Versioned.from_address(out.value).deleter)
    return lambda: deleter(out.value)


EXPORTED = {
    "versioned": lambda d, stream: capsule_of(d, stream, max_version=(1, 3)),
    "legacy": capsule_of,
    "exchange": managed_of,
}


@pytest.mark.parametrize("how", EXPORTED)
def test_a_consumer_goes_on_with_what_it_has_given_back(in_any_order, how):
    """It reads what was written before, and the memory is not used again before it has read it."""
    gpuops = in_any_order.gpuops
    own, default = gpuops.Stream(), gpuops.current_stream()
    for home, theirs in [(own, default), (default, own), (own, gpuops.Stream())]:
        d = gpuops.empty(1000, stream=home)
        busy = [d.copy(stream=home) for _ in range(20)]
        d.fill(5, stream=home)
        give_back = EXPORTED[how](d, theirs)
        interface, address = Interface(d, stream=theirs.ptr), d.ptr
        shown = gpuops.asarray(interface, stream=theirs)
        interface.owner = d = None
        busy += [shown.copy(stream=theirs) for _ in range(20)]
        seen = shown.copy(stream=theirs)
        give_back()
        again = gpuops.zeros(1000, stream=home)
        assert again.ptr == address
        same(seen.to_host(stream=theirs), np.full(1000, 5.0))
        del busy, shown, seen, again


def test_exports_hold_no_python_object(gpu):
    d = gpu.gpuops.to_device(HOST)
    reference = weakref.ref(d)
    give_back = capsules.Export(d.__dlpack__()).consume()
    del d
    assert reference() is None
    give_back()


def test_references_stay_level(gpuops):
    producer = Producer(HOST)
    objects = [producer.claimed_device, np.dtype("f8"), HOST]
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(50):
        gpuops.gather(producer, [1])
        with pytest.raises(IndexError):
            gpuops.gather(producer, [7])
    assert producer.made == producer.deleted == 100
    after = [sys.getrefcount(one) for one in objects]
    assert all(abs(one - other) < 10 for one, other in zip(before, after, strict=True))


def test_references_stay_level_on_a_device(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    interface = Interface(d)
    objects = [d, interface, d.dtype]
    if sys.version_info < (3, 12):
        objects.append(None)  # of which nobody keeps count since it is immortal
    gpuops.synchronize()
    gc.collect()  # what earlier tests have left
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(200):
        gpuops.asarray(interface)
        gpuops.from_dlpack(d)
        assert d.__cuda_array_interface__
        d.__dlpack__(max_version=(1, 3), copy=True)
        with pytest.raises(BufferError):
            d.__dlpack__(dl_device=(METAL, 0))
    gpuops.synchronize()
    gpuops.empty(1)
    after = [sys.getrefcount(one) for one in objects]
    assert all(abs(one - other) < 50 for one, other in zip(before, after, strict=True))


FINALISATION = {
    "an export is given back": """
        import ctypes, capsules
        capsule = d.__dlpack__(max_version=(1, 3), **options)
        export = capsules.Export(capsule)
        deleter, address = export.managed.deleter, export.address
        export.consume()
        # Handlers of the C library run when the interpreter is gone.
        libc = ctypes.CDLL(None)
        handler = libc["__cxa_atexit"]
        handler.argtypes = [ctypes.c_void_p] * 3
        assert handler(deleter, address, None) == 0
        """,
    "an export is never consumed": """
        capsule = d.__dlpack__(max_version=(1, 3), **options)
        sys.keep = capsule
        """,
    "an import is never given back": """
        from capsules import Producer
        producer = Producer(d)
        sys.keep = gpuops.from_dlpack(producer)
        """,
    "an owner with an interface": """
        class Owner:
            __cuda_array_interface__ = d.__cuda_array_interface__
            kept = d
        sys.keep = gpuops.asarray(Owner())
        sys.exported = sys.keep.__dlpack__()
        """,
}


@pytest.mark.not_under_tsan("is gone by then")
@pytest.mark.parametrize("name", FINALISATION)
@pytest.mark.parametrize("options", [{}, {"copy": True}, {"dl_device": (1, 0)}], ids=repr)
def test_after_the_interpreter(gpu, name, options):
    source = f"""
        import sys
        import numpy as np
        import gpuops
        options = {options!r}
        d = gpuops.to_device(np.arange(6.0))
        """
    source += FINALISATION[name] + "\n        print('done')"
    assert run_child(gpu.gpuops, source.replace("\n        ", "\n")) == "done\n"


# Export: every option.


def test_device(gpu):
    d = gpu.gpuops.to_device(HOST)
    assert d.__dlpack_device__() == (CUDA, d.device)
    assert all(type(number) is int for number in d.__dlpack_device__())


def test_the_fields_of_an_export(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    export = capsules.Export(d.__dlpack__(max_version=(1, 3)))
    assert export.name == capsules.VERSIONED
    assert (export.version, export.flags) == ((1, 3), 0)
    assert (export.data, export.device) == (d.ptr, (CUDA, d.device))
    assert (export.shape, export.strides, export.byte_offset) == ((2, 3), (3, 1), 0)
    row = d[1]
    assert capsules.Export(row.__dlpack__()).data == d.ptr + 24
    single = gpuops.to_device(np.float32(2))
    export = capsules.Export(single.__dlpack__())
    assert (export.name, export.ndim, export.shape) == (capsules.LEGACY, 0, ())
    assert export.data == single.ptr
    nothing = gpuops.empty((3, 0, 2))
    export = capsules.Export(nothing.__dlpack__(max_version=(1, 3)))
    assert (export.data, export.shape) == (0, (3, 0, 2))
    assert export.strides is not None


@pytest.mark.parametrize(
    ("max_version", "version"),
    [
        (None, None),
        ((0, 8), None),
        ((0, 0), None),
        ((-1, 5), None),
        ((1, 0), (1, 0)),
        ((1, 1), (1, 1)),
        ((1, 3), (1, 3)),
        ((1, 4), (1, 3)),
        ((1, 99), (1, 3)),
        ((2, 0), (1, 3)),
        ((1 << 40, 0), (1, 3)),
        ((np.int64(1), np.uint8(0)), (1, 0)),
    ],
)
@pytest.mark.parametrize("dl_device", [None, (CPU, 0)])
def test_max_version(gpu, max_version, version, dl_device):
    d = gpu.gpuops.to_device(HOST)
    export = capsules.Export(d.__dlpack__(max_version=max_version, dl_device=dl_device))
    assert export.name == (capsules.LEGACY if version is None else capsules.VERSIONED)
    if version:
        assert export.version == version


@pytest.mark.parametrize("stream", [None, 1, 2, -1, "own", "numpy"])
@pytest.mark.parametrize("copy", [None, True])
def test_streams(gpu, stream, copy):
    gpuops = gpu.gpuops
    own, home = gpuops.Stream(), gpuops.Stream()
    d = gpuops.to_device(HOST, stream=home)
    value = {"own": own.ptr, "numpy": np.int64(own.ptr)}.get(stream, stream)
    if gpu.fake:
        gpu.fake.reset()
    capsules.Export(d.__dlpack__(stream=value, copy=copy))
    if gpu.fake:
        # Whoever is told of a stream is made to wait for the array's own.
        assert gpu.fake.calls("cudaStreamWaitEvent") == (0 if stream == -1 else 1)
    if gpu.fake:
        gpu.fake.reset()
    d.__dlpack__(stream=home.ptr)
    if gpu.fake:
        assert gpu.fake.calls("cudaStreamWaitEvent") == 0


@pytest.mark.parametrize("stream", [0, -2, SMALLEST])
def test_streams_that_are_none(gpu, stream):
    d = gpu.gpuops.to_device(HOST)
    with pytest.raises(ValueError, match="stream must be None or 1 for the legacy"):
        d.__dlpack__(stream=stream)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stream": "1"}, TypeError),
        ({"stream": 1.0}, TypeError),
        ({"stream": True}, TypeError),
        ({"stream": 1 << 70}, OverflowError),
        ({"max_version": 1}, TypeError),
        ({"max_version": (1,)}, TypeError),
        ({"max_version": [1, 0]}, TypeError),
        ({"max_version": ("1", "0")}, TypeError),
        ({"max_version": (1, 0, 0)}, TypeError),
        ({"max_version": (1 << 70, 0)}, OverflowError),
        ({"dl_device": "cpu"}, TypeError),
        ({"dl_device": (1, None)}, TypeError),
        ({"dl_device": (CPU, 1)}, BufferError),
        ({"dl_device": (CUDA, 7)}, BufferError),
        ({"dl_device": (CUDA_HOST, 0)}, BufferError),
        ({"dl_device": (CUDA_MANAGED, 0)}, BufferError),
        ({"dl_device": (ROCM, 0)}, BufferError),
        ({"dl_device": (-1, -1)}, BufferError),
        ({"dl_device": (CPU, 0), "copy": False}, BufferError),
        ({"dl_device": (CPU, 0), "stream": 1}, ValueError),
        ({"dl_device": (CPU, 0), "stream": -1}, ValueError),
        ({"copy": 1}, TypeError),
        ({"copy": "yes"}, TypeError),
        ({"nonsense": None}, TypeError),
    ],
    ids=repr,
)
def test_options_that_cannot_be(gpu, options, error):
    d = gpu.gpuops.to_device(HOST)
    with pytest.raises(error):
        d.__dlpack__(**options)


def test_options_have_names(gpu):
    d = gpu.gpuops.to_device(HOST)
    with pytest.raises(TypeError, match="takes no positional arguments"):
        d.__dlpack__(None)


@pytest.mark.parametrize("copy", [None, False, True])
@pytest.mark.parametrize("here", [False, True])
def test_copy(gpu, copy, here):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)[::-1]
    options = {"dl_device": (CUDA, d.device)} if here else {}
    export = capsules.Export(d.__dlpack__(copy=copy, max_version=(1, 3), **options))
    assert export.flags == (IS_COPIED if copy else 0)
    assert (export.data == d.ptr) == (not copy)
    assert export.strides == ((3, 1) if copy else (-3, 1))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("copy", [None, True])
def test_export_to_the_host(gpu, name, copy):
    gpuops = gpu.gpuops
    whole = filled_array((4, 6), "c8")
    host = VIEWS[name](whole)
    d = gpuops.to_device(np.ascontiguousarray(host).reshape(host.shape))
    export = capsules.Export(d.__dlpack__(dl_device=(CPU, 0), copy=copy, max_version=(1, 3)))
    assert export.device == (CPU, 0)
    assert export.flags == IS_COPIED
    assert export.shape == host.shape
    assert export.data % 64 == 0
    if host.size:
        assert export.host_array().tobytes() == host.tobytes()
        same(np.from_dlpack(d, device="cpu"), np.ascontiguousarray(host).reshape(host.shape))


def test_export_to_the_host_waits_and_tells(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    bad = gpuops.gather(d, gpuops.to_device(np.array([0, 9])))
    with pytest.raises(IndexError, match="index 9 is out of bounds for axis 0 with size 2"):
        bad.__dlpack__(dl_device=(CPU, 0))
    bad.__dlpack__()
    export = capsules.Export(bad.__dlpack__(dl_device=(CPU, 0)))
    same(export.host_array(), np.array([HOST[0], [0, 0, 0]]))


def test_strides_between_elements(gpu):
    """A field of a record is not at a multiple of its own size."""
    gpuops = gpu.gpuops
    raw = gpuops.to_device(np.arange(24, dtype=np.int32))
    odd = gpuops.asarray(Interface(raw, shape=(8,), strides=(12,), typestr="<c8"))
    with pytest.raises(BufferError, match="no multiples of its 8 bytes"):
        odd.__dlpack__()
    export = capsules.Export(odd.__dlpack__(copy=True))
    assert export.strides == (1,)
    assert odd.__cuda_array_interface__["strides"] == (12,)


def test_views_of_nothing(gpu):
    gpuops = gpu.gpuops
    for shape in [(0,), (3, 0), (0, 1 << 40)]:
        nothing = gpuops.empty(shape, "f4")
        again = gpuops.from_dlpack(Producer(nothing))
        assert (again.shape, again.ptr, again.size) == (shape, 0, 0)
        assert np.from_dlpack(again, device="cpu").shape == shape
        assert again.__cuda_array_interface__["data"] == (0, False)


# from_dlpack


def test_from_dlpack_shares(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    for copy in (None, False):
        shared = gpuops.from_dlpack(Producer(d), copy=copy)
        assert type(shared) is gpuops.DeviceArray
        assert shared.ptr == d.ptr
    shared.fill(7)
    same(d.to_host(), np.full((2, 3), 7.0))
    copied = gpuops.from_dlpack(Producer(d), copy=True)
    assert copied.ptr != d.ptr
    copied.fill(1)
    same(d.to_host(), np.full((2, 3), 7.0))
    managed = gpuops.from_dlpack(Producer(d, device=(CUDA_MANAGED, d.device)))
    assert managed.ptr == d.ptr
    for device in ("cuda", d.device, f"cuda:{d.device}"):
        assert gpuops.from_dlpack(Producer(d), device=device).ptr == d.ptr


def test_from_dlpack_does_not_copy_between_devices(fake_device):
    gpuops = fake_device.gpuops
    producer = Producer(gpuops.to_device(HOST, device=0))
    with pytest.raises(BufferError, match="x is on cuda:0, and from_dlpack.. does not copy"):
        gpuops.from_dlpack(producer, device=1)
    same(gpuops.from_dlpack(producer, device=0).to_host(), HOST)


def test_from_dlpack_to_a_device_of_dlpack(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    assert gpuops.from_dlpack(d, device=(CUDA, d.device)).ptr == d.ptr
    assert gpuops.from_dlpack(d, device=d.__dlpack_device__()).ptr == d.ptr
    same(gpuops.from_dlpack(Producer(HOST), device=(np.int32(CUDA), 0)).to_host(), HOST)
    for device in ((CPU, 0), (ROCM, 0), (CUDA, -1)):
        with pytest.raises(ValueError):
            gpuops.from_dlpack(d, device=device)
    for device in (("cuda", 0), (CUDA,), (CUDA, 0, 0), [CUDA, 0]):
        with pytest.raises(TypeError):
            gpuops.from_dlpack(d, device=device)
    with pytest.raises(gpuops.DeviceError, match="no cuda:99"):
        gpuops.from_dlpack(d, device=(CUDA, 99))


def test_from_dlpack_of_our_own(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    again = gpuops.from_dlpack(d)
    assert again is not d
    assert again.ptr == d.ptr
    copied = gpuops.from_dlpack(d, copy=True)
    assert copied.ptr != d.ptr
    same(copied.to_host(), HOST)


def test_from_dlpack_of_host_data(gpu):
    gpuops = gpu.gpuops
    for x in (HOST, Producer(HOST), Producer(HOST, device=(CUDA_HOST, 0))):
        with pytest.raises(BufferError, match=r"x is on the host.*to_device\(x\)"):
            gpuops.from_dlpack(x)
        with pytest.raises(BufferError, match="copy"):
            gpuops.from_dlpack(x, device="cuda", copy=False)
        for copy in (None, True):
            same(gpuops.from_dlpack(x, device="cuda", copy=copy).to_host(), HOST)


def test_from_dlpack_refuses(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    for x in ([1], 1, None, "x", object(), Interface(d), d.__dlpack__()):
        with pytest.raises(TypeError, match="asarray"):
            gpuops.from_dlpack(x)
    with pytest.raises(TypeError):
        gpuops.from_dlpack()
    with pytest.raises(TypeError):
        gpuops.from_dlpack(x=d)
    with pytest.raises(TypeError):
        gpuops.from_dlpack(d, copy="no")
    with pytest.raises(TypeError):
        gpuops.from_dlpack(d, stream="no")
    with pytest.raises(ValueError, match="GPU"):
        gpuops.from_dlpack(Producer(d), device="cpu")


def test_from_dlpack_without_a_gpu(cpu_device):
    gpuops = cpu_device.gpuops
    with pytest.raises(BufferError, match="to_device"):
        gpuops.from_dlpack(HOST)
    if not gpuops.is_available():
        with pytest.raises(gpuops.DeviceError):
            gpuops.from_dlpack(HOST, device="cuda")
        with pytest.raises(gpuops.DeviceError):
            gpuops.from_dlpack(Producer(HOST, device=(CUDA, 0)))


# __cuda_array_interface__


def test_interface(gpu):
    gpuops = gpu.gpuops
    own = gpuops.Stream()
    d = gpuops.to_device(HOST, stream=own)
    assert d.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<f8",
        "data": (d.ptr, False),
        "strides": None,
        "stream": own.ptr,
        "version": 3,
    }
    assert gpuops.to_device(HOST).__cuda_array_interface__["stream"] == 1
    assert d[::-1].__cuda_array_interface__["strides"] == (-24, 8)
    assert d[::-1].__cuda_array_interface__["data"] == (d.ptr + 24, False)
    assert gpuops.to_device(np.int8(1)).__cuda_array_interface__["shape"] == ()


@pytest.mark.parametrize("dtype", ["U3", "S5", "M8[ns]", "m8[D]", "V7", "longdouble", "?", "f2"])
def test_interface_of_every_dtype(gpu, dtype):
    gpuops = gpu.gpuops
    host = filled_array((4,), dtype)
    d = gpuops.to_device(host)
    assert d.__cuda_array_interface__["typestr"] == host.dtype.str
    again = gpuops.asarray(Interface(d))
    assert again.ptr == d.ptr
    same(again.to_host(), host)
    same(gpuops.gather(Interface(d), [3, 0]).to_host(), host[[3, 0]])


def test_interface_of_records(gpu):
    gpuops = gpu.gpuops
    host = filled_array((4,), [("a", "i1"), ("b", "<f4", (2,))])
    d = gpuops.to_device(host)
    interface = d.__cuda_array_interface__
    assert (interface["typestr"], interface["descr"]) == ("|V9", host.dtype.descr)
    again = gpuops.asarray(Interface(d, descr=interface["descr"]))
    same(again.to_host(), host)
    plain = gpuops.asarray(Interface(d, descr=[("", "|V9")]))
    assert plain.dtype.itemsize == 9


@pytest.mark.parametrize("dtype", capsules.ML_DTYPES)
def test_interface_has_no_word(gpu, dtype):
    d = gpu.gpuops.to_device(np.zeros(3, dtype))
    assert not hasattr(d, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="use __dlpack__"):
        d.__getattribute__("__cuda_array_interface__")


FALSE_INTERFACES = {
    "no version": {"version": MISSING},
    "version 1": {"version": 1},
    "a word for a version": {"version": "3"},
    "no shape": {"shape": MISSING},
    "a list for a shape": {"shape": [2, 3]},
    "a negative size": {"shape": (2, -3)},
    "a float for a size": {"shape": (2.0, 3)},
    "a size beyond 64 bits": {"shape": (1 << 64, 3)},
    "too many dimensions": {"shape": (1,) * (MAX_DIMS + 1), "strides": None},
    "the sizes overflow": {"shape": (1 << 32, 1 << 32), "strides": None},
    "the bytes overflow": {"shape": (1, 1 << 60), "strides": None},
    "no typestr": {"typestr": MISSING},
    "no typestr but None": {"typestr": None},
    "bytes for a typestr": {"typestr": b"<f8"},
    "a type that does not exist": {"typestr": "<x8"},
    "a width that does not exist": {"typestr": "<f3"},
    "objects": {"typestr": "|O"},
    "the other byte order": {"typestr": ">f8"},
    "elements of no size": {"typestr": "|S0"},
    "strides of another length": {"strides": (8,)},
    "a list for strides": {"strides": [24, 8]},
    "a word for a stride": {"strides": ("24", 8)},
    "a stride beyond 64 bits": {"strides": (1 << 64, 8)},
    "a stride reaches too far": {"strides": ((1 << 63) - 8, 8)},
    "strides reach too far together": {"strides": (1 << 62, 1 << 62)},
    "no data": {"data": MISSING},
    "no data but None": {"data": None},
    "a number for data": {"data": 1 << 20},
    "a list for data": {"data": [1 << 20, False]},
    "data without a flag": {"data": (1 << 20,)},
    "a word for an address": {"data": ("0", False)},
    "a negative address": {"data": (-8, False)},
    "an address beyond 64 bits": {"data": (1 << 64, False)},
    "the highest address": {"data": ((1 << 64) - 8, False)},
    "address 0": {"data": (0, False)},
    "an address of nobody": {"data": (8, False)},
    "an address on the host": {"data": (HOST.ctypes.data, False)},
    "misaligned strides": {"strides": (24, 7)},
    "a mask": {"mask": np.zeros((2, 3), bool)},
    "stream 0": {"stream": 0},
    "a negative stream": {"stream": -1},
    "a word for a stream": {"stream": "1"},
    "a stream beyond 64 bits": {"stream": 1 << 64},
    "fields of another size": {"typestr": "|V8", "descr": [("a", "f4")]},
    "fields that are none": {"typestr": "|V8", "descr": [7]},
    "fields of objects": {"typestr": "|V8", "descr": [("a", "O")]},
}


@pytest.mark.parametrize("name", FALSE_INTERFACES)
def test_false_interfaces(gpu, name):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    liar = Interface(d, **FALSE_INTERFACES[name])
    before = sys.getrefcount(liar)
    calls = (
        gpuops.asarray,
        gpuops.to_device,
        lambda x: gpuops.gather(x, [0]),
        lambda x: gpuops.gather(d, x),
    )
    for call in calls:
        with pytest.raises(BufferError):
            call(liar)
    assert sys.getrefcount(liar) == before
    same(gpuops.asarray(Interface(d)).to_host(), HOST)


def test_misaligned_interface(gpu):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)
    with pytest.raises(BufferError, match="not aligned to the 8 bytes"):
        gpuops.asarray(Interface(d, data=(d.ptr + 1, False), shape=(1, 3)))


def test_interfaces_that_are_none(gpuops):
    class Wrapped:
        def __init__(self, interface):
            self.__cuda_array_interface__ = interface

    for interface in (None, 7, [], "typestr"):
        with pytest.raises(BufferError, match="not a dict"):
            gpuops.gather(Wrapped(interface), [0])

    class Absent:
        @property
        def __cuda_array_interface__(self):
            raise AttributeError("not on a GPU")

        def __array__(self, dtype=None, copy=None):
            return HOST

    same(gpuops.gather(Absent(), [1]), HOST[[1]])

    class Failing:
        @property
        def __cuda_array_interface__(self):
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        gpuops.gather(Failing(), [0])


def test_an_interface_that_goes_away_as_it_is_read(gpu):
    """In a process whose freed memory is overwritten at once."""
    source = """
import gpuops
d = gpuops.to_device([1.0, 2.0])

class Fickle:
    def __init__(self, error):
        class ReadOnly:
            def __bool__(flag):
                self.__cuda_array_interface__.clear()
                if error:
                    raise error
                return False

        interface = d.__cuda_array_interface__
        interface.update(shape=tuple([1 + 1]), data=tuple([d.ptr, ReadOnly()]))
        self.__cuda_array_interface__ = interface

try:
    gpuops.asarray(Fickle(ValueError()))
except BufferError as error:
    print(str(error)[:30])
print(gpuops.asarray(Fickle(None)).to_host())
"""
    environment = {"PYTHONMALLOC": "debug", "GPUOPS_DEVICE": "cuda"}
    printed = run_child(gpu.gpuops, source, **environment)
    assert printed == "x.__cuda_array_interface__['da\n[1. 2.]\n"


def test_an_interface_is_read_once(gpu):
    """It may say something else the next time, as for a library whose current stream changes."""
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)

    class Fickle(Interface):
        @property
        def __cuda_array_interface__(self):
            self.asked += 1
            said = dict(self.dict)
            self.dict.update(data=(HOST.ctypes.data, False), version=1, shape=(2, -1), stream=0)
            return said

    for call in (lambda x: gpuops.gather(x, [1, 0]), gpuops.asarray, gpuops.to_device):
        fickle = Fickle(d)
        call(fickle).to_host()
        assert fickle.asked == 1


@pytest.mark.parametrize("name", VIEWS)
def test_strides_of_an_interface(gpu, name):
    gpuops = gpu.gpuops
    whole = filled_array((4, 6), "i2")
    host = VIEWS[name](whole)
    d = gpuops.to_device(whole)
    offset = host.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    data = (d.ptr + offset if host.size else 0, False)
    there = Interface(d, shape=host.shape, strides=host.strides, data=data)
    same(gpuops.asarray(there).to_host(), np.ascontiguousarray(host).reshape(host.shape))
    if host.ndim and host.shape[0]:
        same(gpuops.gather(there, [-1, 0]).to_host(), host[[-1, 0]])


@pytest.mark.parametrize("stream", [MISSING, None, 1, 2, "own"])
@pytest.mark.parametrize("version", [2, 3])
def test_streams_of_an_interface(gpu, stream, version):
    gpuops = gpu.gpuops
    own = gpuops.Stream()
    d = gpuops.to_device(HOST, stream=own)
    own.synchronize()
    handle = own.ptr if stream == "own" else stream
    there = Interface(d, stream=handle, version=version)
    taken = gpuops.asarray(there)
    assert taken.stream.ptr == (1 if handle in (MISSING, None) else handle)
    same(taken.to_host(), HOST)
    work = gpuops.Stream()
    same(gpuops.gather(there, [1], stream=work).to_host(), HOST[[1]])


def test_an_interface_keeps_its_owner(gpu):
    gpuops = gpu.gpuops
    owner = Interface(gpuops.to_device(HOST))
    reference = weakref.ref(owner)
    taken = gpuops.asarray(owner)
    row = taken[1]
    exported = taken.__dlpack__()
    del owner, taken
    gc.collect()
    assert reference() is not None
    same(row.to_host(), HOST[1])
    del row
    assert reference() is not None
    give_back = capsules.Export(exported).consume()
    thread = threading.Thread(target=give_back)
    thread.start()
    thread.join()
    gpuops.synchronize()
    gpuops.empty(1)
    assert reference() is None


# Libraries that have both, as CuPy and JAX do.


@pytest.fixture
def new_library():
    """Makes array types with a namespace, whose interfaces name the stream they work on now."""
    made = []

    def make(version=3, **wrong):
        class Array(Producer):
            asked = 0
            current = MISSING

            @property
            def __cuda_array_interface__(self):
                type(self).asked += 1
                if isinstance(self.owner, np.ndarray):
                    raise AttributeError("not on a GPU")
                stream = self.current if self.current is MISSING else self.current.ptr
                return Interface(self.owner, stream=stream, version=version, **wrong).dict

            def __array_namespace__(self):
                return type(self)

            @classmethod
            def from_dlpack(cls, array):
                return cls(array)

            @classmethod
            def asarray(cls, array):
                return cls(array)

        made.append(Array)
        return Array

    yield make
    for kind in made:  # which gpuops remembers
        kind.current = MISSING


def test_an_interface_that_names_the_stream(gpu, new_library):
    gpuops = gpu.gpuops
    library = new_library()
    library.current = gpuops.Stream()
    x = library(gpuops.to_device(HOST))
    gpuops.synchronize()
    for calls in (1, 2, 3):
        result = gpuops.gather(x, [1, 0])
        assert type(result) is library
        assert result.owner.stream == library.current
        same(result.owner.to_host(), HOST[[1, 0]])
        assert (library.asked, x.calls) == (calls, [])
    own = gpuops.Stream()
    assert gpuops.gather(x, [1], stream=own).owner.stream == own
    with own:
        result = gpuops.gather(x, [1])
    assert result.owner.stream == own
    own.synchronize()
    # The stream that is current decides at each call anew.
    library.current = gpuops.Stream()
    assert gpuops.gather(x, [1]).owner.stream == library.current
    assert gpuops.asarray(x).stream == library.current
    gpuops.synchronize()
    # On the host it has no interface.
    result = gpuops.gather(library(HOST), [1])
    same(result.owner, HOST[[1]])
    assert x.made == 0


@pytest.fixture(params=range(10))
def shuffled(gpu, request):
    if gpu.fake:
        gpu.fake.set_scheduler("shuffled", request.param)
    elif request.param:
        pytest.skip("once is enough")
    return gpu.gpuops


def test_such_a_library_goes_on_with_what_was_written(shuffled, new_library):
    gpuops = shuffled
    table, places = gpuops.to_device(np.arange(8.0)), gpuops.to_device(np.arange(8))
    library = new_library()
    stream = library.current = gpuops.Stream()
    memory = gpuops.zeros(8, stream=stream)
    out = library(memory)
    busy = [gpuops.gather(table, places) for _ in range(20)]
    assert gpuops.gather(table, places, out=out) is out
    # On its own stream, and without a word to gpuops, as far as another record of it is concerned.
    same(memory.copy(stream=stream).to_host(stream=stream), np.arange(8.0))
    del busy


def test_such_a_library_goes_on_with_what_was_read(shuffled, new_library):
    gpuops = shuffled
    places = gpuops.to_device(np.arange(8))
    library = new_library()
    stream, own = gpuops.Stream(), gpuops.Stream()
    library.current = stream
    memory = gpuops.zeros(8, stream=stream)
    busy = [memory.copy(stream=stream) for _ in range(20)]
    memory.fill(5, stream=stream)
    result = gpuops.gather(library(memory), places, stream=own)
    memory.fill(7, stream=stream)
    same(result.owner.to_host(stream=own), np.full(8, 5.0))
    del busy


def test_an_interface_that_names_no_stream(gpu, new_library):
    """Reading the interface of JAX may wait for the GPU: it is not read again."""
    gpuops = gpu.gpuops
    for version, current in ((2, gpuops.Stream()), (3, MISSING)):
        library = new_library(version)
        library.current = current
        for calls in (1, 2, 3):
            x = library(gpuops.to_device(HOST))
            same(gpuops.gather(x, [1]).owner.to_host(), HOST[[1]])
            assert (library.asked, len(x.calls)) == (1, 1), calls


def test_an_interface_that_fails(gpu, new_library):
    gpuops = gpu.gpuops
    d = gpuops.to_device(HOST)

    class Failing(Producer):
        @property
        def __cuda_array_interface__(self):
            raise self.error("not now")

    for error, raised in ((RuntimeError, False), (KeyboardInterrupt, True)):
        kind = type("Failing", (Failing,), {"error": error})
        if raised:
            with pytest.raises(KeyboardInterrupt, match="not now"):
                gpuops.gather(kind(d), [1])
        else:
            same(gpuops.gather(kind(d), [1]).to_host(), HOST[[1]])
    library = new_library(data=(8, False))
    library.current = gpuops.Stream()
    with pytest.raises(BufferError, match="says that it is on a GPU, but"):
        gpuops.gather(library(d), [1])


def test_dtypes_that_an_interface_cannot_say(gpu, new_library):
    gpuops = gpu.gpuops
    library = new_library()
    library.current = gpuops.Stream()
    for dtype in ("bfloat16", "float8_e5m2"):
        host = filled_array((4,), np.dtype(dtype))
        x = library(gpuops.to_device(host))
        gpuops.synchronize()
        result = gpuops.gather(x, [3, 0])
        assert result.owner.stream == library.current
        same(result.owner.to_host(), host[[3, 0]])
        assert [call["stream"] for call in x.calls] == [library.current.ptr]
    fields = library.__new__(library)
    fields.owner = gpuops.to_device(np.zeros(3, "f4,i2"))
    descr = [("a", "f4"), ("b", "i2")]
    library.__cuda_array_interface__ = Interface(fields.owner, descr=descr).dict
    assert gpuops.asarray(fields).dtype.names == ("a", "b")
    # DLPack knows where an array without elements is.
    nothing = new_library()(gpuops.empty((0, 3)))
    nothing.current = gpuops.current_stream()
    for _ in range(2):
        assert gpuops.gather(nothing, np.array([], int)).owner.shape == (0, 3)
    assert len(nothing.calls) == 2


def test_a_type_without_an_interface_for_its_object(gpuops):
    class Both(Producer):
        @property
        def __cuda_array_interface__(self):
            raise AssertionError("on the host nobody asks for it")

    same(gpuops.gather(Both(HOST), [1]), HOST[[1]])


def test_the_tests_see_what_they_look_for():
    """The hand-made capsules are good ones: NumPy takes them."""
    producer = Producer(HOST)
    same(np.from_dlpack(producer).copy(), HOST)
    gc.collect()
    assert producer.deleted == producer.made == 1
    assert subprocess.run([sys.executable, "-c", "import ctypes"]).returncode == 0
