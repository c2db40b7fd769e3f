"""Modules and the launches of their kernels: the real compiler, on the fake runtime and on a GPU.

On the fake a kernel is what the test gives as its host twin; everything before and after is real.
"""

import contextlib
import gc
import re
import threading
import weakref

import numpy as np
import pytest
from faults.fake import device_array
from helpers import read_only, run_child
from rtc import (
    SAXPY,
    SAXPY_TYPES,
    cubin,
    load,
    open_nvrtc,
    own_architecture,
    page_locked,
    random_pair,
    saxpy_module,
    saxpy_twin,
    twins,
)

N = 1000

# What child processes begin with.
LOADED = """
import gpuops
from rtc import SAXPY, cubin, own_architecture

code, _ = cubin(gpuops, SAXPY, own_architecture(gpuops))
module = gpuops._core._load_module(code, {"saxpy": ("saxpy", None)}, 0, {})
kernel = module["saxpy"]
"""


@pytest.fixture
def lend(gpu, request):
    """Lends a test what is to be gone when `gpu` looks at what the test leaves behind."""

    def lend(kernel, **functions):
        with twins(gpu, **functions):
            yield kernel
        request.node.funcargs.clear()

    return lend


@pytest.fixture
def saxpy(gpu, lend):
    yield from lend(saxpy_module(gpu)["saxpy"], saxpy=saxpy_twin)


# Launches.


def test_a_launch_between_arrays_on_the_device(gpu, saxpy):
    x, y = random_pair(N)
    device_x, device_y = gpu.gpuops.to_device(x), gpu.gpuops.to_device(y)
    assert saxpy[4, 256](2.5, device_x, device_y, N) is None
    np.testing.assert_allclose(device_y.to_host(), np.float32(2.5) * x + y, rtol=1e-6)
    assert (device_x.to_host() == x).all()


def test_a_launch_between_numpy_arrays(gpu, saxpy):
    x, y = random_pair(N)
    expected = np.float32(2.5) * x + y
    saxpy[4, 256](2.5, x, y, N)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_a_launch_between_both_kinds(gpu, saxpy):
    x, y = random_pair(N)
    device_y = gpu.gpuops.to_device(y)
    saxpy[4, 256](1, x, device_y, N)
    np.testing.assert_allclose(device_y.to_host(), x + y, rtol=1e-6)
    expected = device_y.to_host() + x
    saxpy[4, 256](1, device_y, x, N)
    np.testing.assert_allclose(x, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "launch",
    [
        lambda kernel, *args: kernel[(4,), (256, 1)](*args),
        lambda kernel, *args: kernel[np.int64(4), np.uint8(200), None](*args),
        lambda kernel, *args: kernel[(4, 1, 1), (256, 1, 1), None, 0](*args),
        lambda kernel, *args: kernel.launch(4, 256, *args),
        lambda kernel, *args: kernel.launch((4,), 256, *args, stream=None, shared_bytes=16),
        lambda kernel, *args: kernel.forall(800)(*args),
    ],
)
def test_the_forms_of_a_launch(gpu, saxpy, launch):
    x, y = random_pair(800)
    expected = x + y
    launch(saxpy, 1, x, y, 800)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_forall_of_nothing_checks_its_arguments_and_does_nothing(gpu, saxpy):
    x, y = random_pair(4)
    before = y.copy()
    saxpy.forall(0)(1, x, y, 4)
    assert (y == before).all()
    with pytest.raises(TypeError):
        saxpy.forall(0)(1, x, y)


def test_forall_takes_blocks_that_fill_the_device(gpu, saxpy):
    sizes = re.findall(r"\d+", repr(saxpy.forall(10**6)).partition(" of ")[0])
    blocks, threads = int(sizes[0]), int(sizes[3])
    assert blocks == -(-(10**6) // threads)
    assert threads in ([1024] if gpu.fake else range(128, 1025, 32))
    assert f"[(1, 1, 1), ({threads}, 1, 1)]" in repr(saxpy.forall(1))
    with pytest.raises(ValueError, match="at least 0, not -1"):
        saxpy.forall(-1)
    with pytest.raises(ValueError, match="let each thread do more"):
        saxpy.forall(2**62)


def test_a_launch_in_three_dimensions(gpu):
    source = """
extern "C" __global__ void where(unsigned *out)
{
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
"""
    grid, block = (2, 3, 4), (5, 2, 3)

    def twin(launch):
        assert (launch.grid, launch.block) == (grid, block)
        (out,) = launch.read("p")
        blocks, threads = np.indices((24, 30), np.uint32)
        device_array(out, 720, "u4")[:] = (blocks * 1000 + threads).ravel()

    out = np.zeros(720, np.uint32)
    with twins(gpu, where=twin):
        load(gpu, source, {"where": ((None, "uint32*"),)})["where"][grid, block](out)
    assert out.reshape(24, 30)[23, 29] == 23029
    assert (out.reshape(24, 30) == np.arange(24)[:, None] * 1000 + np.arange(30)).all()


# What is copied where.

SUM = """
extern "C" __global__ void change(float *x, const float *c) { x[0] = x[0] + c[0]; }
"""
SUM_TYPES = (("x", "float32*"), ("c", "const float32*"))


def change_twin(launch):
    x, c = launch.read("p", "p")
    device_array(x, 1, "f4")[0] += device_array(c, 1, "f4")[0]


@pytest.fixture
def change(gpu, lend):
    yield from lend(load(gpu, SUM, {"change": SUM_TYPES})["change"], change=change_twin)


def copies(gpu, function):
    if gpu.fake is None:
        function()
        return None
    before = gpu.fake.calls("cudaMemcpyAsync")
    function()
    return gpu.fake.calls("cudaMemcpyAsync") - before


def test_what_is_copied_for_each_word(gpu, change):
    ops = gpu.gpuops
    c = np.full(3, 4, np.float32)
    x = np.array([1, 2], np.float32)
    assert copies(gpu, lambda: change[1, 1](x, c)) in (None, 3)
    assert x.tolist() == [5, 2]
    assert copies(gpu, lambda: change[1, 1](ops.InOut(x), ops.In(c))) in (None, 3)
    assert x.tolist() == [9, 2]
    assert copies(gpu, lambda: change[1, 1](ops.In(x), c)) in (None, 2)
    assert x.tolist() == [9, 2]
    assert copies(gpu, lambda: change[1, 1](ops.Out(x), c)) in (None, 2)
    assert c.tolist() == [4, 4, 4]


def test_out_is_not_read(gpu):
    source = 'extern "C" __global__ void put(int *x) { x[threadIdx.x] = threadIdx.x; }'

    def twin(launch):
        x = device_array(launch.read("p")[0], 8, "i4")
        assert (x != 77).all(), "the array was copied to the device"
        x[:] = np.arange(8)

    with twins(gpu, put=twin):
        put = load(gpu, source, {"put": (("x", "int32*"),)})["put"]
        x = np.full(8, 77, np.int32)
        put[1, 8](gpu.gpuops.Out(x))
    assert x.tolist() == list(range(8))


@pytest.mark.parametrize("layout", ["F", "strided", "backward", "offset"])
def test_host_arrays_of_any_strides_are_what_they_look_like(gpu, layout):
    source = """
extern "C" __global__ void twice(double *x) { x[threadIdx.x] *= 2; }
"""

    def twin(launch):
        device_array(launch.read("p")[0], 12, "f8")[:] *= 2

    base = np.arange(12.0).reshape(3, 4)
    x = {
        "F": np.asfortranarray(base),
        "strided": np.repeat(np.repeat(base, 2, 0), 3, 1)[::2, ::3],
        "backward": base.copy()[::-1, ::-1],
        "offset": np.frombuffer(bytearray(97 + 8), np.float64, 12, 1).reshape(3, 4),
    }[layout]
    expected = 2 * x
    with twins(gpu, twice=twin):
        load(gpu, source, {"twice": (("x", "float64*"),)})["twice"][1, 12](x)
    assert (x == expected).all()


def test_the_same_array_twice_is_one_array_to_the_kernel(gpu, change):
    x = np.array([3, 1], np.float32)
    change[1, 1](x, x)
    assert x.tolist() == [6, 1]
    d = gpu.gpuops.to_device(x)
    change[1, 1](d, d)
    assert d.to_host().tolist() == [12, 1]
    change[1, 1](gpu.gpuops.Out(x), x)
    assert x.tolist() == [12, 1]


def test_host_arrays_that_overlap_are_refused(gpu, change):
    x = np.arange(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"argument 2 \(c, const float32\*\) shares memory with"):
        change[1, 1](x[:3], x[1:])
    change[1, 1](gpu.gpuops.In(x[:3]), x[1:])
    repeated = np.lib.stride_tricks.as_strided(x, (4,), (0,))
    with pytest.raises(ValueError, match="share memory with each other"):
        change[1, 1](repeated, x[:1].copy())


def test_read_only_arrays(gpu, change):
    x = np.array([3, 1], np.float32)
    c = read_only(x)
    change[1, 1](x, c)
    assert x.tolist() == [6, 1]
    with pytest.raises(ValueError, match=r"\(x, float32\*\) was given a read-only array: pass In"):
        change[1, 1](c, x)
    change[1, 1](gpu.gpuops.In(c), x)


def test_other_buffers(gpu, change):
    import array

    x, c = array.array("f", [1, 2]), memoryview(array.array("f", [5]))
    change[1, 1](x, c)
    assert x.tolist() == [6, 2]
    x.append(3)  # nobody holds the buffer any more
    change[1, 1](gpu.gpuops.In(x), c)


def test_arrays_without_elements(gpu, saxpy):
    empty = np.empty(0, np.float32)
    saxpy[1, 1](1, empty, empty.copy(), 0)
    saxpy[1, 1](1, gpu.gpuops.to_device(empty), gpu.gpuops.empty(0, "f4"), 0)


FIND = """
extern "C" __global__ void find(float *x, int last, unsigned long long *address)
{
    *address = reinterpret_cast<unsigned long long>(x);
    x[last] = x[0] + 4;
}
"""
FIND_TYPES = (("x", "float32*"), ("last", "int32"), ("address", "uint64*"))


@contextlib.contextmanager
def find_address(gpu):
    """A kernel that tells where its first argument lies, and writes to the last element there."""

    def twin(launch):
        x, last, address = launch.read("p", "i4", "p")
        device_array(address, 1, "u8")[0] = x
        values = device_array(x, last + 1, "f4")
        values[last] = values[0] + 4

    if gpu.fake is not None:
        gpu.fake.set_scheduler("lazy")
    with twins(gpu, find=twin):
        yield load(gpu, FIND, {"find": FIND_TYPES})["find"][1, 1]


@pytest.mark.parametrize("word", [None, "In", "Out", "InOut"])
def test_page_locked_arrays_are_used_in_place(gpu, word):
    """The kernel has their own address, and the launch waits until it is done with them."""
    address = gpu.gpuops.zeros(1, "u8")
    with find_address(gpu) as find, page_locked(gpu, np.array([1, 2], np.float32)) as x:
        argument = x if word is None else getattr(gpu.gpuops, word)(x)
        assert copies(gpu, lambda: find(argument, 1, address)) in (None, 0)
        assert x.tolist() == [1, 5]
        assert address.to_host()[0] == x.ctypes.data


@pytest.mark.parametrize("locked", ["all", "the ends", "in pieces"])
def test_what_pin_has_locked(gpu, locked):
    """A kernel works in place on what was locked in one piece, from its first byte to its last."""
    x, address = np.ones(1000, np.float32), gpu.gpuops.zeros(1, "u8")
    parts = {"all": [x], "the ends": [x[:10], x[-10:]], "in pieces": [x[:500], x[500:]]}[locked]
    pins = [gpu.gpuops.pin(part) for part in parts]
    with find_address(gpu) as find:
        find(x, 999, address)
        assert x[0] == 1 and x[999] == 5
        assert (address.to_host()[0] == x.ctypes.data) == (locked == "all")
    for pin in pins:
        pin.release()


# Scalars.


def passed(gpu, kind, value, width, word=None):
    """The bytes that a kernel sees of a scalar; a word is what is known of the parameter's type."""
    source = f"""
struct Pair {{ float a; int b; }};
extern "C" __global__ void show({kind} value, char after, char *out)
{{
    memcpy(out, &value, sizeof value);
    out[sizeof value] = after;
}}
"""
    out = np.zeros(width + 1, np.uint8)

    def twin(launch):
        place = np.frombuffer(launch.parameters, np.uint64, 1, len(launch.parameters) - 8)[0]
        device_array(place, width + 1, "u1")[:] = np.frombuffer(launch.parameters, "u1", width + 1)

    types = (("value", word), (None, "char"), (None, "void*"))
    with twins(gpu, show=twin):
        load(gpu, source, {"show": types})["show"][1, 1](value, np.int8(7), out)
    assert out[width] == 7
    return out[:width].tobytes()


@pytest.mark.parametrize(
    ("kind", "word", "dtype", "value"),
    [
        ("bool", "bool", "?", True),
        ("signed char", "int8", "i1", -128),
        ("unsigned char", "uint8", "u1", 255),
        ("char", "char", "i1", -1),
        ("short", "int16", "i2", -(2**15)),
        ("unsigned short", "uint16", "u2", 2**16 - 1),
        ("int", "int32", "i4", -(2**31)),
        ("int", "int32", "i4", True),
        ("unsigned", "uint32", "u4", 2**32 - 1),
        ("long long", "int64", "i8", -(2**63)),
        ("unsigned long long", "uint64", "u8", 2**64 - 1),
        ("float", "float32", "f4", 0.1),
        ("float", "float32", "f4", 3),
        ("float", "float32", "f4", float("inf")),
        ("double", "float64", "f8", 0.1),
        ("double", "float64", "f8", 2**60),
        ("unsigned short", None, "u2", np.uint16(3)),
        ("float2", "complex64", "c8", 1.5 - 2j),
        ("double2", "complex128", "c16", 1.5 - 2j),
    ],
)
def test_python_scalars_as_the_parameter_has_them(gpu, kind, word, dtype, value):
    expected = np.array(value).astype(dtype).tobytes()
    width = np.dtype(dtype).itemsize
    assert passed(gpu, kind, value, width, word) == expected
    # NumPy's own scalars are taken byte for byte.
    assert passed(gpu, kind, np.dtype(dtype).type(value), width, word) == expected


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("signed char", "int8"),
        ("short", "int16"),
        ("int", "int32"),
        ("long long", "int64"),
        ("unsigned", "uint32"),
        (None, "int32"),
    ],
)
def test_integers_that_do_not_fit(gpu, kind, word):
    limits, width = np.iinfo(word), np.dtype(word).itemsize
    known = word if kind else None
    for value in (int(limits.min), int(limits.max)):
        assert passed(gpu, kind or "int", value, width, known) == np.array(value, word).tobytes()
    for value in (int(limits.min) - 1, int(limits.max) + 1, 2**64, -(2**70)):
        with pytest.raises(OverflowError, match=f"cannot hold the Python integer {value}"):
            passed(gpu, kind or "int", value, width, known)


@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [
        ("bool", "?", True),
        ("int", "i4", -5),
        ("long long", "i8", -5),
        ("float", "f4", 0.1),
        ("double", "f8", 0.1),
        ("float2", "c8", 1 + 2j),
        ("double2", "c16", 1 + 2j),
        ("short", "i2", np.int16(-3)),
        ("float", "f4", np.float32(0.1)),
    ],
)
def test_python_scalars_where_only_the_size_is_known(gpu, kind, dtype, value):
    expected = np.array(value).astype(dtype).tobytes()
    assert passed(gpu, kind, value, np.dtype(dtype).itemsize) == expected


def test_half_precision_scalars(gpu):
    expected = np.float16(0.1).tobytes()
    assert passed(gpu, "unsigned short", 0.1, 2, "float16") == expected
    assert passed(gpu, "unsigned short", np.float16(0.1), 2, "float16") == expected
    infinity = np.float16("inf").tobytes()
    assert passed(gpu, "unsigned short", float("inf"), 2, "float16") == infinity
    assert passed(gpu, "unsigned short", -65519.99, 2, "float16") == np.float16(-65504).tobytes()


@pytest.mark.parametrize(
    ("word", "value"),
    [("float16", 65520.0), ("float16", -1e6), ("bfloat16", 3.4e38), ("bfloat16", -(10**39))],
)
def test_half_precision_scalars_that_do_not_fit(gpu, word, value):
    with pytest.raises(OverflowError, match="cannot hold the Python float"):
        passed(gpu, "unsigned short", value, 2, word)


def test_complex_scalars_that_do_not_fit(gpu):
    assert passed(gpu, "double", 1e30 - 2j, 8, "complex64") == np.complex64(1e30 - 2j).tobytes()
    for value in (1e300 + 1j, 1 - 1e300j):
        with pytest.raises(OverflowError, match="cannot hold the Python complex"):
            passed(gpu, "double", value, 8, "complex64")


def test_structures(gpu):
    pair = np.array([(1.5, -7)], dtype=[("a", "f4"), ("b", "i4")])[0]
    assert passed(gpu, "Pair", pair, 8) == pair.tobytes()
    swapped = pair.astype(pair.dtype.newbyteorder(">"))
    with pytest.raises(TypeError, match=r"fields that are not in this machine's byte order"):
        passed(gpu, "Pair", swapped, 8)


def test_structures_behind_a_pointer(gpu):
    x = np.array([(1.5, -7)], dtype=[("a", "f4"), ("b", "i4")])
    swapped = x.astype(x.dtype.newbyteorder(">"))
    source = 'extern "C" __global__ void look(const void *x) {}'
    with twins(gpu, look=lambda launch: None):
        kernel = load(gpu, source)["look"]
        kernel[1, 1](x)
        for array in (swapped, gpu.gpuops.In(swapped), gpu.gpuops.to_device(swapped)):
            with pytest.raises(TypeError, match="fields that are not in this machine's byte order"):
                kernel[1, 1](array)


def test_a_numpy_scalar_is_nothing_to_write_to(gpu, saxpy):
    ops, y = gpu.gpuops, np.ones(1, np.float32)
    saxpy[1, 1](2, ops.In(np.float32(3)), y, 1)
    assert y[0] == 7
    for wrapper in (ops.Out, ops.InOut):
        with pytest.raises(TypeError, match="which cannot be written to"):
            saxpy[1, 1](2, y, wrapper(np.float32(3)), 1)


def test_what_is_passed_by_value_is_no_array(gpu):
    pair = np.array([(1.5, -7)], dtype=[("a", "f4"), ("b", "i4")])[0]
    assert passed(gpu, "Pair", pair, 8, "value") == pair.tobytes()
    assert passed(gpu, "float2", 1.5 - 2j, 8, "value") == np.complex64(1.5 - 2j).tobytes()
    for value in (np.zeros(2, np.float32), gpu.gpuops.In(np.zeros(2, np.float32)), 1.5):
        with pytest.raises(TypeError, match=r"show\(\) argument 1 \(value, 8 bytes\) (is|was) "):
            passed(gpu, "float2", value, 8, "value")


KINDS = """
struct Big { int values[20]; };
extern "C" __global__ void kinds(float f, unsigned char b, bool flag, int *x, Big big, short s) {}
"""
KINDS_TYPES = (
    ("f", "float32"), ("b", "uint8"), ("flag", "bool"), ("x", "int32*"), ("big", None), ("s", None),
)  # fmt: skip
GOOD = (1.0, 2, True, np.zeros(2, np.int32), np.zeros(1, "V80")[0], np.int16(1))


@pytest.fixture
def kinds(gpu, lend):
    launcher = load(gpu, KINDS, {"kinds": KINDS_TYPES})["kinds"][1, 1]
    yield from lend(launcher, kinds=lambda launch: None)


WRONG = [
    (0, np.float64(1), TypeError, r"\(f, float32\) was given a float64: pass numpy.float32\("),
    (0, np.int32(1), TypeError, "was given a int32: pass numpy.float32"),
    (0, 1e300, OverflowError, "cannot hold the Python float 1e.300"),
    (0, 10**400, OverflowError, "too large"),
    (0, 1j, TypeError, r"was given 1j: pass its \.real"),
    (0, "1", TypeError, "is passed by value, and was given <class 'str'>"),
    (0, np.zeros(3, np.float32), TypeError, "is passed by value"),
    (0, None, TypeError, "is passed by value"),
    (1, 256, OverflowError, r"argument 2 \(b, uint8\) cannot hold the Python integer 256"),
    (1, -1, OverflowError, "cannot hold the Python integer -1"),
    (1, 2**70, OverflowError, "cannot hold"),
    (1, 1.0, TypeError, r"was given 1.0: pass int\(...\)"),
    (1, np.int8(1), TypeError, "was given a int8: pass numpy.uint8"),
    (2, 1, TypeError, r"argument 3 \(flag, bool\) was given 1: pass bool\(...\)"),
    (3, 5, TypeError, r"\(x, int32\*\) is the address of an array, and was given the scalar 5"),
    (3, None, TypeError, "address of an array, and was given <class 'NoneType'>: pass an array"),
    (3, [1, 2], TypeError, "is the address of an array, and was given <class 'list'>"),
    (3, np.zeros(2), TypeError, r"was given an array of float64: pass x.astype\('int32'\)"),
    (3, np.zeros(2, "M8[s]"), TypeError, "was given an array of datetime64"),
    (3, np.zeros(2, object), TypeError, "Python objects"),
    (3, np.zeros(2, ">i4"), TypeError, "byte order"),
    (4, 5, TypeError, r"argument 5 \(big, 80 bytes\) was given 5"),
    (4, np.zeros(1, "V79")[0], TypeError, "was given a void of 79 bytes: pass a scalar of the"),
    (4, np.zeros(80, np.uint8), TypeError, "is passed by value"),
    (5, 5, TypeError, "was given 5, and it is not known how to write that in so many bytes"),
    (5, np.int32(5), TypeError, "was given a int32 of 4 bytes"),
]


@pytest.mark.parametrize(("i", "value", "error", "message"), WRONG)
def test_arguments_that_are_wrong(gpu, kinds, i, value, error, message):
    kinds(*GOOD)
    arguments = list(GOOD)
    arguments[i] = value
    with pytest.raises(error, match=message):
        kinds(*arguments)
    kinds(*GOOD)


def test_the_number_of_arguments(gpu, saxpy):
    with pytest.raises(TypeError, match=r"saxpy\(\) takes 4 arguments but 0 were given: saxpy\("):
        saxpy[1, 1]()
    text = "saxpy(a: float32, x: const float32*, y: float32*, n: int64)"
    with pytest.raises(TypeError) as caught:
        saxpy[1, 1](*range(5))
    assert text in str(caught.value)
    assert str(saxpy) == text
    assert repr(saxpy) == f"<gpuops.Kernel {text} on cuda:0>"
    with pytest.raises(TypeError, match="takes no keyword arguments: stream and shared_bytes go"):
        saxpy[1, 1](stream=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'streem'"):
        saxpy.launch(1, 1, streem=None)
    with pytest.raises(TypeError, match="takes a grid, a block"):
        saxpy.launch(1)


def test_const_and_out(gpu, saxpy):
    x, y = random_pair(8)
    with pytest.raises(TypeError, match=r"is const: the kernel cannot write it"):
        saxpy[1, 8](1, gpu.gpuops.Out(x), y, 8)


def test_what_is_not_known_is_checked_by_size(gpu):
    with twins(gpu, saxpy=saxpy_twin):
        kernel = load(gpu, SAXPY)["saxpy"]
        assert str(kernel) == "saxpy(4 bytes, 8 bytes, 8 bytes, 8 bytes)"
        x, y = random_pair(N)
        expected = 2 * x + y
        kernel[4, 256](2.0, x, y, N)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        with pytest.raises(TypeError, match=r"argument 1 \(4 bytes\) is passed by value"):
            kernel[4, 256](x, x, y, N)


@pytest.mark.parametrize(
    "types",
    [
        SAXPY_TYPES[:3],
        (*SAXPY_TYPES, ("more", "int32")),
        (("a", "float64"), *SAXPY_TYPES[1:]),
        (("a", "float32*"), *SAXPY_TYPES[1:]),
    ],
)
def test_types_that_cannot_be_those_of_the_kernel_are_left_out(gpu, types):
    kernel = load(gpu, SAXPY, {"saxpy": types})["saxpy"]
    assert str(kernel) == "saxpy(4 bytes, 8 bytes, 8 bytes, 8 bytes)"


def test_words_that_are_no_types_are_left_out(gpu):
    types = (("a", "real"), ("x", "const struct*"), ("y", ""), ("n", "*" * 99))
    kernel = load(gpu, SAXPY, {"saxpy": types})["saxpy"]
    assert str(kernel) == "saxpy(a: 4 bytes, x: 8 bytes, y: 8 bytes, n: 8 bytes)"


def test_pointers(gpu, saxpy, kinds):
    ops = gpu.gpuops
    x, y = map(ops.to_device, random_pair(N))
    expected = x.to_host() + y.to_host()
    saxpy[4, 256](1, ops.Pointer(x.ptr), ops.Pointer(y.ptr), N)
    np.testing.assert_allclose(y.to_host(), expected, rtol=1e-6)
    saxpy[4, 256](1, ops.Pointer(0), ops.Pointer(0), 0)
    with pytest.raises(TypeError, match=r"argument 1 \(a, float32\) is no pointer"):
        saxpy[4, 256](ops.Pointer(1), x, y, N)


def test_many_arguments(gpu):
    count = 20
    listed = ", ".join(f"int *x{i}, double s{i}" for i in range(count))
    body = " ".join(f"*x{i} = (int)s{i};" for i in range(count))
    source = f'extern "C" __global__ void many({listed}) {{ {body} }}'

    def twin(launch):
        values = launch.read(*["p", "f8"] * count)
        for place, value in zip(values[::2], values[1::2], strict=True):
            device_array(place, 1, "i4")[0] = value

    arrays = [np.zeros(1, np.int32) for _ in range(count)]
    arguments = [value for i in range(count) for value in (arrays[i], float(i))]
    with twins(gpu, many=twin):
        many = load(gpu, source)["many"]
        many[1, 1](*arguments)
    assert [int(array[0]) for array in arrays] == list(range(count))


def test_a_kernel_without_parameters(gpu):
    ran = []
    with twins(gpu, none=lambda launch: ran.append(launch.parameters)):
        none = load(gpu, 'extern "C" __global__ void none() {}')["none"]
        none[1, 1]()
        assert str(none) == "none()"
    assert ran in ([], [b""])


# Arrays on the device.


def test_device_arrays_that_are_refused(gpu, saxpy):
    ops = gpu.gpuops
    x, y = map(ops.to_device, random_pair(N))
    with pytest.raises(ValueError, match="not C-contiguous, and a kernel is told no strides"):
        saxpy[1, 1](1, x[::2], y, 1)
    saxpy[1, 1](1, x[::2].copy(), y, 1)
    with pytest.raises(TypeError, match="was given an array of float64: pass x.astype"):
        saxpy[1, 1](1, ops.zeros(3), y, 1)
    with pytest.raises(TypeError, match="was given an array of int32"):
        saxpy[1, 1](1, ops.zeros(3, "i4"), y, 1)


def test_arrays_of_another_device_are_refused(gpu, saxpy):
    if gpu.gpuops.device_count() < 2:
        pytest.skip("this needs two GPUs")
    x, y = random_pair(N)
    there = gpu.gpuops.to_device(x, device=1)
    with pytest.raises(ValueError, match=r"is on cuda:1, and the module was compiled for cuda:0"):
        saxpy[1, 1](1, there, y, 1)
    stream = gpu.gpuops.Stream(device=1)
    with pytest.raises(ValueError, match="stream is on cuda:1"):
        saxpy[1, 1, stream](1, x, y, 1)


def test_a_module_on_another_device(gpu):
    if gpu.gpuops.device_count() < 2:
        pytest.skip("this needs two GPUs")
    x, y = random_pair(N)
    with twins(gpu, saxpy=saxpy_twin):
        module = saxpy_module(gpu, device=1)
        assert module.device == 1
        there = gpu.gpuops.to_device(y, device=1)
        module["saxpy"][4, 256](1, x, there, N)
        np.testing.assert_allclose(there.to_host(), x + y, rtol=1e-6)


class Interface:
    """An array of a library that offers __cuda_array_interface__ alone."""

    def __init__(self, array, read=False):
        self.array = array
        pointer = array.__cuda_array_interface__["data"][0]
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | {"data": (pointer, read)}


class Exporter:
    """An array of a library that offers DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("kind", [Interface, Exporter])
def test_arrays_of_other_libraries(gpu, saxpy, kind):
    x, y = random_pair(N)
    device_x, device_y = gpu.gpuops.to_device(x), gpu.gpuops.to_device(y)
    saxpy[4, 256](1, kind(device_x), kind(device_y), N)
    np.testing.assert_allclose(device_y.to_host(), x + y, rtol=1e-6)
    saxpy[4, 256](1, gpu.gpuops.In(kind(device_x)), gpu.gpuops.InOut(kind(device_y)), N)
    np.testing.assert_allclose(device_y.to_host(), 2 * x + y, rtol=1e-6)


def test_read_only_arrays_of_other_libraries(gpu, saxpy):
    x, y = map(gpu.gpuops.to_device, random_pair(N))
    saxpy[4, 256](1, Interface(x, read=True), y, N)
    with pytest.raises(ValueError, match="was given a read-only array"):
        saxpy[4, 256](1, x, Interface(y, read=True), N)


# Order.


@pytest.mark.parametrize("scheduler", ["lazy", "shuffled"])
def test_a_launch_is_ordered_against_the_streams_of_its_arrays(gpu, saxpy, scheduler):
    ops = gpu.gpuops
    if gpu.fake is not None:
        gpu.fake.set_scheduler(scheduler, 3)
    x, y = random_pair(N)
    streams = [ops.Stream() for _ in range(3)]
    device_x = ops.to_device(x, stream=streams[0])
    device_y = ops.to_device(y, stream=streams[1])
    for _ in range(3):
        saxpy[4, 256, streams[2]](1, device_x, device_y, N)
        device_x = ops.add(device_x, 1, stream=streams[0])
    np.testing.assert_allclose(device_y.to_host(), 3 * x + y + 3, rtol=1e-5)


def test_the_stream_of_the_thread_is_used(gpu, saxpy):
    ops = gpu.gpuops
    if gpu.fake is not None:
        gpu.fake.set_scheduler("lazy")
    x, y = map(ops.to_device, random_pair(N))
    ops.synchronize()
    stream = ops.Stream()
    with stream:
        saxpy[4, 256](1, x, y, N)
    if gpu.fake is not None:
        assert gpu.fake.pending() > 0
    stream.synchronize()
    with pytest.raises(TypeError, match="stream must be"):
        saxpy[4, 256, 7](1, x, y, N)


def test_sources_may_go_at_once(gpu, saxpy):
    """The kernel has its memory until it has run."""
    ops = gpu.gpuops
    if gpu.fake is not None:
        gpu.fake.set_scheduler("lazy")
    x, y = random_pair(N)
    device_y, stream = ops.to_device(y), ops.Stream()
    for _ in range(20):
        saxpy[4, 256, stream](1, ops.to_device(x), device_y, N)
        ops.empty(N, "f4").fill(7)
    np.testing.assert_allclose(device_y.to_host(), 20 * x + y, rtol=1e-5)


def test_a_launch_between_arrays_on_the_device_waits_for_nothing(gpu, saxpy):
    if gpu.fake is None:
        pytest.skip("the fake tells what waits")
    ops = gpu.gpuops
    x, y = map(ops.to_device, random_pair(N))
    ops.synchronize()
    gpu.fake.set_scheduler("lazy")
    before = gpu.fake.calls()
    saxpy[4, 256](1, x, y, N)
    calls = gpu.fake.calls() - before
    assert gpu.fake.pending() == 1
    assert calls <= 3, "current device, launch"
    before = gpu.fake.calls("cudaStreamSynchronize")
    saxpy[4, 256](1, np.zeros(N, np.float32), y, N)
    assert gpu.fake.calls("cudaStreamSynchronize") == before, "what is only read is copied at once"
    assert gpu.fake.pending() > 1


CAPTURE = """
import numpy as np
import gpuops
from conftest import Device
from faults.fake import Fake
from rtc import saxpy_module, saxpy_twin, twins

gpu = Device("fake", "cuda", gpuops, Fake(FOLDER))
with twins(gpu, saxpy=saxpy_twin):
    x, y = map(gpuops.to_device, [np.ones(9, np.float32)] * 2)
    stream = gpuops.Stream()
    module = saxpy_module(gpu)
    module["saxpy"][1, 9, stream](1, x, y, 9)
    stream.synchronize()
    gpu.fake.set_capturing(stream.ptr, True)
    module["saxpy"][1, 9, stream](1, x, y, 9)
    try:
        module["saxpy"][1, 9, stream](1, np.ones(9, np.float32), y, 9)
    except ValueError as error:
        print(error)
    assert gpu.fake.live().libraries == 1
    saxpy_module(gpu)["saxpy"].attributes  # loading does a capture no harm
    assert gpu.fake.live().libraries == 2, "it is unloaded when the capture is over"
    del module
    gpu.fake.set_capturing(stream.ptr, False)
    assert y.to_host(stream=stream).tolist() == [3] * 9
    saxpy_module(gpu)
    print(gpu.fake.live().libraries, gpu.fake.take_misuse())
"""


def test_a_launch_in_a_capture(gpu):
    """The module of a kernel that may be in a graph is never unloaded."""
    if gpu.fake is None:
        pytest.skip("torch's graphs are tested elsewhere")
    open_nvrtc(gpu.gpuops)
    script = CAPTURE.replace("FOLDER", repr(str(gpu.fake.path.parent)))
    lines = run_child(gpu.gpuops, script).splitlines()
    assert "what is on the host cannot take part in that" in lines[0]
    assert lines[1:] == ["1 "]


def test_tensors_of_torch(cuda_device):
    torch = pytest.importorskip("torch")
    kernel = saxpy_module(cuda_device)["saxpy"]
    x, y = torch.rand(N, device="cuda"), torch.rand(N, device="cuda")
    expected = 2 * x + y
    kernel[4, 256](2, x, y, N)
    torch.testing.assert_close(y, expected)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y.mul_(0)
        kernel[4, 256](1, x, y, N)
        torch.testing.assert_close(y, x)
    with pytest.raises(BufferError, match="requires grad"):
        kernel[4, 256](1, x.requires_grad_(), y, N)
    with pytest.raises(ValueError, match="not C-contiguous"):
        kernel[4, 256](1, torch.rand(8, 8, device="cuda").T, y, 64)


def test_a_launch_in_a_graph_of_torch(cuda_device):
    torch = pytest.importorskip("torch")
    x, y = torch.ones(N, device="cuda"), torch.zeros(N, device="cuda")
    graph = torch.cuda.CUDAGraph()
    kernel = saxpy_module(cuda_device)["saxpy"]
    with torch.cuda.graph(graph):
        kernel[4, 256](1, x, y, N)
    del kernel
    gc.collect()
    assert (y == 0).all()
    for _ in range(3):
        graph.replay()
    assert (y == 3).all()


def test_an_address_that_is_wrong_loses_the_device_to_its_process(cuda_device):
    open_nvrtc(cuda_device.gpuops)
    script = f"""{LOADED}
kernel[1, 1](1.0, gpuops.Pointer(16), gpuops.Pointer(16), 1)
for use in (gpuops.synchronize, lambda: module["saxpy"]):
    try:
        use()
    except gpuops.DeviceLostError as error:
        print(error.name)
"""
    lines = run_child(cuda_device.gpuops, script).splitlines()
    assert lines == ["cudaErrorIllegalAddress"] * 2


# Limits.


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ((1,), TypeError, r"kernel\[grid, block\]\(...\)"),
        ((1, 1, None, 0, 0), TypeError, r"kernel\[grid, block\]"),
        (5, TypeError, r"not kernel\[5\]"),
        ((0, 1), ValueError, "grid must be at least 1 and fit into 31 bits, not 0"),
        ((1, -1), ValueError, "block must be at least 1"),
        ((2**31, 1), ValueError, "31 bits"),
        ((2**70, 1), ValueError, "31 bits"),
        ((1.0, 1), TypeError, "grid must be an integer, or a tuple of one to three of them"),
        ((True, 1), TypeError, "grid must be an integer"),
        (((), 1), ValueError, "grid has one to three dimensions, not 0"),
        (((1, 1, 1, 1), 1), ValueError, "not 4"),
        (((1, 65536), 1), ValueError, "grid is 65536 in direction y, and .* takes 65535"),
        (((1, 1, 65536), 1), ValueError, "in direction z"),
        ((1, (1, 1, 65)), ValueError, "block is 65 in direction z, and .* takes 64 at most"),
        ((1, (1, 1025)), ValueError, "block is 1025 in direction y"),
        (
            (1, (32, 33)),
            ValueError,
            "a block of 32 x 33 x 1 has 1056 threads, and .* takes 1024",
        ),
        ((1, 1, None, -1), ValueError, "shared_bytes is -1"),
        ((1, 1, None, 2**17), ValueError, "set its max_dynamic_shared_bytes first"),
        ((1, 1, None, "1"), TypeError, "integer"),
    ],
)
def test_grids_that_no_device_runs(gpu, saxpy, key, error, message):
    with pytest.raises(error, match=message):
        saxpy[key]


def test_more_shared_memory_for_those_who_ask(gpu):
    source = """
extern __shared__ float dynamic[];
extern "C" __global__ void shared(int n, float *out)
{
    __shared__ float fixed[16];
    fixed[n % 16] = 3;
    dynamic[n - 1] = 4;
    *out = fixed[n % 16] + dynamic[n - 1];
}
"""
    seen = []

    def twin(launch):
        seen.append(launch.shared_bytes)
        device_array(launch.read("i4", "p")[1], 1, "f4")[0] = 7

    out = np.zeros(1, np.float32)
    with twins(gpu, shared=twin):
        module = load(gpu, source)
        kernel = module["shared"]
        assert kernel.attributes.shared_bytes == 64
        most = kernel.max_dynamic_shared_bytes
        assert 32 * 1024 <= most <= 48 * 1024 - 64
        kernel[1, 1, None, most](most // 4, out)
        assert out[0] == 7
        with pytest.raises(ValueError, match="max_dynamic_shared_bytes must be from 0 to"):
            kernel.max_dynamic_shared_bytes = 2**20
        with pytest.raises(ValueError, match="max_dynamic_shared_bytes must be from 0 to"):
            kernel.max_dynamic_shared_bytes = -1
        with pytest.raises(TypeError):
            kernel.max_dynamic_shared_bytes = "1"
        with pytest.raises(AttributeError):
            del kernel.max_dynamic_shared_bytes
        wanted = 60_000
        kernel.max_dynamic_shared_bytes = wanted
        assert kernel.max_dynamic_shared_bytes == wanted
        assert module["shared"].max_dynamic_shared_bytes == wanted
        out[0] = 0
        kernel.launch(1, 1, wanted // 4, out, shared_bytes=wanted)
        assert out[0] == 7
        kernel.forall(1, shared_bytes=wanted)(wanted // 4, out)
        with pytest.raises(ValueError, match="shared_bytes is 60001"):
            kernel.forall(1, shared_bytes=wanted + 1)
    assert seen in ([], [most, wanted, wanted])


def test_attributes(gpu, saxpy):
    attributes = saxpy.attributes
    assert attributes.registers > 0
    assert attributes.max_threads == 1024
    assert attributes.shared_bytes == 0
    assert attributes.local_bytes == 0
    assert f"sm_{attributes.binary_version}" == own_architecture(gpu.gpuops)
    assert saxpy.name == "saxpy"
    assert saxpy.module.kernels == ("saxpy",)


def test_launch_bounds_are_a_limit(gpu):
    kernel = load(gpu, 'extern "C" __global__ void __launch_bounds__(64) few() {}')["few"]
    assert kernel.attributes.max_threads == 64
    assert kernel[1, 64]
    with pytest.raises(ValueError, match="and few takes 64 at most, by its __launch_bounds__ or"):
        kernel[1, 65]
    assert ", (64, 1, 1)]" in repr(kernel.forall(1000))


# Modules.


def test_the_names_of_a_module(gpu):
    source = """
template <class T> __global__ void fill(T *x, T value) { x[threadIdx.x] = value; }
__global__ void plain(int *x) {}
extern "C" __global__ void c(int *x) {}
"""
    module = load(gpu, source, expressions=("fill<float>", "fill<double>"))
    symbols = {"_Z5plainPi", "c", "_Z4fillIfEvPT_S0_", "_Z4fillIdEvPT_S0_"}
    assert set(module.kernels) == symbols | {"fill<float>", "fill<double>"}
    assert module["c"].name == "c"
    assert module.get_function("fill<float>").name == "fill<float>"
    assert module.device == 0
    assert module.cubin.startswith(b"\x7fELF")
    assert repr(module).startswith("<gpuops.Module on cuda:0: ")
    with pytest.raises(KeyError, match="there is no kernel 'plain' in this module: it has "):
        module["plain"]
    with pytest.raises(TypeError):
        module[0]


def test_a_kernel_that_the_code_has_not(gpu):
    code, _ = cubin(gpu.gpuops, SAXPY, own_architecture(gpu.gpuops))
    module = gpu.gpuops._core._load_module(code, {"other": ("other", None)}, 0, {})
    with pytest.raises(ValueError, match="the module has no kernel other"):
        module["other"]


def test_global_variables(gpu):
    source = """
__constant__ float table[4] = {1, 2, 3, 4};
__device__ int counter;
namespace deep { __device__ double value; }
extern "C" __global__ void use(float *x)
{
    x[threadIdx.x] = table[threadIdx.x];
    counter += 1;
    deep::value += 1;
}
"""
    lowered = {"deep::value": "_ZN4deep5valueE"}
    x = np.zeros(4, np.float32)

    def twin(launch):
        device_array(launch.read("p")[0], 4, "f4")[:] = device_array(address, 4, "f4")

    with twins(gpu, use=twin):
        module = load(gpu, source, names=lowered)
        table = module.get_global("table", "f4")
        address = table.ptr
        assert table.to_host().tolist() == [1, 2, 3, 4]
        table.fill(5)
        module["use"][1, 4](x)
        assert x.tolist() == [5, 5, 5, 5]
        counter = module.get_global("counter", dtype=np.int32)
        assert counter.shape == (1,)
        assert counter.to_host()[0] in ([0] if gpu.fake else range(1, 5))
        assert module.get_global("deep::value", "f8").shape == (1,)
        assert module.get_global("counter").shape == (4,)
        columns = module.get_global("table", np.dtype(("f4", (2, 1))))
        assert columns.to_host().tolist() == [[[5], [5]], [[5], [5]]]
        with pytest.raises(TypeError, match="byte order"):
            module.get_global("table", np.dtype((">f4", (2, 1))))
        with pytest.raises(ValueError, match="has 4 bytes, which elements of float64 do not fill"):
            module.get_global("counter", "f8")
        with pytest.raises(KeyError, match="there is no global variable 'nothing'"):
            module.get_global("nothing")
        with pytest.raises(TypeError):
            module.get_global("table", object)
        with pytest.raises(TypeError, match="must be str, not int"):
            module.get_global(7)
        del module
        gc.collect()
        assert table.to_host().tolist() == [5, 5, 5, 5], "the array keeps the module"


def test_a_module_goes_when_nobody_needs_it(gpu):
    module = saxpy_module(gpu)
    seen = weakref.ref(module)
    kernel = module["saxpy"]
    launcher = kernel[1, 1]
    del module
    assert seen() is not None
    del kernel
    assert seen() is not None
    del launcher
    assert seen() is None


def test_a_module_is_unloaded_after_its_work(gpu):
    ops = gpu.gpuops
    if gpu.fake is not None:
        gpu.fake.set_scheduler("lazy")
    x, y = random_pair(N)
    device_y = ops.to_device(y)
    with twins(gpu, saxpy=saxpy_twin):
        for _ in range(3):
            saxpy_module(gpu)["saxpy"][4, 256, ops.Stream()](1, ops.to_device(x), device_y, N)
        np.testing.assert_allclose(device_y.to_host(), 3 * x + y, rtol=1e-5)


def test_code_that_is_not_for_this_device(gpu):
    code, _ = cubin(gpu.gpuops, SAXPY, "sm_75")
    with pytest.raises(gpu.gpuops.DeviceError, match="the machine code is not for this device"):
        gpu.gpuops._core._load_module(code, {"saxpy": ("saxpy", None)}, 0, {})["saxpy"]
    with pytest.raises(ValueError, match="no machine code of CUDA"):
        gpu.gpuops._core._load_module(code[:-1], {}, 0, {})


def test_entries_that_are_wrong(gpu):
    code, _ = cubin(gpu.gpuops, SAXPY, own_architecture(gpu.gpuops))
    core = gpu.gpuops._core
    for entry in (None, (), ("saxpy",), (1, None)):
        with pytest.raises((TypeError, SystemError)):
            core._load_module(code, {"saxpy": entry}, 0, {})["saxpy"]
    for parameters in ((1, 2, 3, 4), (("a",),) * 4, ((1, 2),) * 4):
        with pytest.raises(TypeError):
            core._load_module(code, {"saxpy": ("saxpy", parameters)}, 0, {})["saxpy"]
    with pytest.raises(TypeError):
        core._load_module("text", {}, 0, {})


def test_arguments_are_released(gpu, saxpy):
    x, y = random_pair(N)
    before = [weakref.ref(array) for array in (x, y)]
    launcher = saxpy[4, 256]
    launcher(1, x, gpu.gpuops.InOut(y), N)
    with pytest.raises(TypeError):
        launcher(1, x, y, "n")
    with pytest.raises(TypeError):
        launcher(1, x, y.astype("f8"), 1)
    del x, y
    gc.collect()
    assert [seen() for seen in before] == [None, None]


def test_threads_launch_at_once(gpu):
    if gpu.fake is not None:
        pytest.skip("a twin is Python, which runs one thread at a time")
    kernel = saxpy_module(gpu)["saxpy"]
    failures = []

    def work(seed):
        try:
            x, y = random_pair(10_000 + seed)
            device_x, device_y = gpu.gpuops.to_device(x), gpu.gpuops.to_device(y)
            stream = gpu.gpuops.Stream()
            for _ in range(100):
                kernel[64, 256, stream](1, device_x, device_y, len(x))
            np.testing.assert_allclose(device_y.to_host(), 100 * x + y, rtol=1e-3)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_module_after_a_fork(gpu):
    open_nvrtc(gpu.gpuops)
    script = f"""{LOADED}
import os
null = gpuops.Pointer(0)
if os.fork() == 0:
    uses = [
        lambda: module["saxpy"],
        lambda: kernel[1, 1](1.0, null, null, 0),
        lambda: module.get_global("x"),
        lambda: gpuops._core._load_module(code, {{}}, 0, {{}}),
    ]
    for use in uses:
        try:
            use()
        except gpuops.ForkedProcessError:
            continue
        os._exit(1)
    del module, kernel, uses, use
    os._exit(0)
print(os.wait()[1])
"""
    assert run_child(gpu.gpuops, script) == "0\n"


def test_launches_that_block(fake_device):
    open_nvrtc(fake_device.gpuops)
    script = f"""{LOADED}
from faults.fake import Fake
fake = Fake({str(fake_device.fake.path.parent)!r})
with fake.twin("saxpy", lambda launch: print("ran")):
    kernel[1, 1](1.0, gpuops.Pointer(16), gpuops.Pointer(16), 0)
    print(fake.pending())
"""
    options = {"GPUOPS_FAKE_SCHEDULER": "lazy"}
    blocking = {"GPUOPS_LAUNCH_BLOCKING": "1"}
    assert run_child(fake_device.gpuops, script, **options) == "1\nran\n"
    assert run_child(fake_device.gpuops, script, **options, **blocking) == "ran\n0\n"
