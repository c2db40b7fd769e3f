"""Arrays of torch, JAX and the array API on the host, and the C exchange API made by hand.

The same libraries on a GPU are in test_libraries.py. A type with the exchange API of our own, whose
arrays are on the host, on the fake runtime or on a real GPU, stands for those of torch.
"""

import array
import contextlib
import ctypes
import gc
import os
import sys
import timeit

import capsules
import numpy as np
import pytest
from capsules import CPU, CUDA, METAL, READ_ONLY, Producer, new_kind
from conftest import leaving_nothing
from faults.paths import Interface, Lender
from helpers import filled_array, run_child, same

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What the libraries warn of is no concern of these tests.
pytestmark = pytest.mark.filterwarnings("default")

HOST = np.arange(12.0).reshape(4, 3)


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def cpu_jax():
    """JAX with its arrays on the host, and with 64 bits."""
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(jax.devices("cpu")[0]):
        yield jax
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def strict():
    return pytest.importorskip("array_api_strict")


def same_tensor(torch, result, expected):
    """Equal in kind, dtype, shape and in every bit."""
    assert type(result) is torch.Tensor
    assert (result.dtype, result.shape, result.device) == (
        expected.dtype,
        expected.shape,
        expected.device,
    )
    assert bytes(result.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
        expected.contiguous().reshape(-1).view(torch.uint8).numpy()
    )


# torch


def test_torch(gpuops, torch):
    x = torch.arange(12.0).reshape(4, 3)
    indices = torch.tensor([2, -1, 2])
    same_tensor(torch, gpuops.gather(x, indices), x[indices])
    same_tensor(torch, gpuops.gather(x, [2, -1, 2]), x[indices])
    same_tensor(torch, gpuops.gather(x, indices[:2], axis=1), x[:, [2, -1]])
    same_tensor(torch, gpuops.take(x, torch.tensor([7, 0])), torch.take(x, torch.tensor([7, 0])))
    along = torch.tensor([[2, 1, 0]])
    expected = torch.take_along_dim(x, along, 0)
    same_tensor(torch, gpuops.take_along_axis(x, along, 0), expected)
    # The data decide, and not the indices.
    same(gpuops.gather(HOST, indices), HOST[[2, -1, 2]])


TORCH_DTYPES = {
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_torch_dtypes(gpuops, torch, name):
    dtype = getattr(torch, name)
    raw = torch.arange(5 * dtype.itemsize, dtype=torch.uint8)
    x = (raw.view(torch.bool) > 2) if name == "bool" else raw.view(dtype)
    order = [4, 0, 3]
    raw_rows = x.view(torch.uint8).reshape(5, -1)
    result = gpuops.gather(x, order)
    assert (type(result), result.dtype, result.shape) == (torch.Tensor, dtype, (3,))
    assert torch.equal(result.view(torch.uint8).reshape(3, -1), raw_rows[order])
    out = torch.zeros(3, dtype=torch.uint8).to(dtype) if dtype.itemsize == 1 else None
    if out is not None:
        assert gpuops.gather(x, order, out=out) is out
        assert torch.equal(out.view(torch.uint8), raw_rows[order].reshape(-1))


def test_torch_without_ml_dtypes(gpuops, torch):
    source = """
        import sys
        sys.modules["ml_dtypes"] = None
        import torch, gpuops
        x = torch.arange(6).to(torch.bfloat16)
        print(gpuops.gather(x, [5, 0], device="cpu"))
        print(gpuops.gather(x.reshape(2, 3), 1, device="cpu"))
        """
    assert run_child(gpuops, source.replace("\n        ", "\n")) == (
        "tensor([5., 0.], dtype=torch.bfloat16)\ntensor([3., 4., 5.], dtype=torch.bfloat16)\n"
    )


def test_torch_without_ml_dtypes_is_refused_by_arithmetic(gpuops, torch):
    """The text names the package that is missing: a tensor has no dtype that the caller could mend.

    On the CPU; a GPU computes with what it has.
    """
    source = """
import sys
sys.modules["ml_dtypes"] = None
import torch, gpuops
x = torch.arange(6).to(torch.bfloat16)
gpuops.scatter(x, [0], x[5:], device="cpu")
for name, arguments in [
    ("add", (x, x)), ("saxpy", (2.0, x, x)), ("sigmoid", (x,)), ("matmul", (x, x)),
    ("correlate", (x, [1, 1])), ("scatter_add", (x, [0], x[:1])),
]:
    try:
        getattr(gpuops, name)(*arguments, device="cpu")
    except TypeError as error:
        print("bfloat16 without the package ml_dtypes" in str(error), end=" ")
small = x.to(torch.float8_e4m3fn)
for y, values in [(small, 1), (small, "1"), (torch.ones(1), small[:1]), (x, small[:1])]:
    try:
        gpuops.scatter(y, [0], values, device="cpu")
    except TypeError as error:
        print("float8_e4m3fn" in str(error), end=" ")
print(x.tolist())
"""
    printed = run_child(gpuops, source)
    assert printed == 10 * "True " + "[5.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n"


def test_torch_floats_of_8_bits_are_cast_to(gpuops, torch):
    pytest.importorskip("ml_dtypes")
    x = torch.zeros(4).to(torch.float8_e4m3fn)
    for index, values in enumerate([2, 0.3, torch.ones(1), torch.ones(1).to(torch.float8_e5m2)]):
        gpuops.scatter(x, [index], values)
    assert x.float().tolist() == [2, 0.3125, 1, 1]
    with pytest.raises(TypeError, match=r"from dtype\('int64'\) to dtype\('<M8\[s\]'\)"):
        gpuops.scatter(np.zeros(2, "M8[s]"), [0], torch.ones(1, dtype=torch.int64))


TORCH_VIEWS = {
    "transposed": lambda x: x.T,
    "every second": lambda x: x[::2],
    "a column": lambda x: x[:, 1],
    "one row": lambda x: x[1],
    "expanded": lambda x: x[0].expand(5, 3),
    "no rows": lambda x: x[:0],
    "with an offset": lambda x: x[1:, 1:],
    "flipped": lambda x: x.flip(0),
    "imaginary parts": lambda x: x.to(dtype=x.dtype.to_complex()).imag,
}


@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_torch_views(gpuops, torch, name):
    x = TORCH_VIEWS[name](torch.arange(12.0).reshape(4, 3))
    indices = [0, -1] if len(x) else []
    expected = x[torch.tensor(indices, dtype=torch.int64)]
    same_tensor(torch, gpuops.gather(x, np.array(indices, int)), expected)


def test_torch_scalars(gpuops, torch):
    x = torch.arange(4, dtype=torch.int16)
    same_tensor(torch, gpuops.gather(x, 3), x[3])
    same_tensor(torch, gpuops.gather(x, torch.tensor(3)), x[3])
    same_tensor(torch, gpuops.take(torch.tensor(5.0), [0]), torch.tensor([5.0]))
    assert gpuops.gather(x, 3).shape == ()


def test_torch_out(gpuops, torch):
    x = torch.arange(12.0).reshape(4, 3)
    out = torch.zeros(2, 3)
    before = out.data_ptr()
    assert gpuops.gather(x, [3, 0], out=out) is out
    assert out.data_ptr() == before
    assert torch.equal(out, x[[3, 0]])
    strided = torch.zeros(3, 2).T
    assert gpuops.gather(x, [3, 0], out=strided) is strided
    assert torch.equal(strided, x[[3, 0]])
    # Overlapping operands act as if they had been copied first.
    expected = x[[1, 2, 3, 0]]
    assert gpuops.gather(x, [1, 2, 3, 0], out=x) is x
    assert torch.equal(x, expected)
    mixed = torch.zeros(2, 3, dtype=torch.float64)
    assert gpuops.gather(HOST, [3, 0], out=mixed) is mixed
    same(mixed.numpy(), HOST[[3, 0]])
    array = np.zeros((2, 3), np.float32)
    assert gpuops.gather(x, [3, 0], out=array) is array
    same(array, x[[3, 0]].numpy())
    for wrong in (torch.zeros(3, 3), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises((TypeError, ValueError), match="output array does not match"):
            gpuops.gather(x, [3, 0], out=wrong)
        assert not wrong.any()
    with pytest.raises(ValueError, match="share memory with each other"):
        gpuops.gather(x, [3, 0], out=torch.zeros(3).expand(2, 3))


def test_torch_errors(gpuops, torch):
    x = torch.arange(12.0).reshape(4, 3)
    with pytest.raises(IndexError, match="index 4 is out of bounds for axis 0 with size 4"):
        gpuops.gather(x, torch.tensor([0, 4]))
    with pytest.raises(IndexError, match="integer"):
        gpuops.gather(x, torch.tensor([0.5]))


REFUSED_TENSORS = {
    "requires grad": (lambda torch: torch.ones(3, requires_grad=True), r"x\.detach\(\)"),
    "a parameter": (lambda torch: torch.nn.Parameter(torch.ones(3)), r"x\.detach\(\)"),
    "computed with grad": (
        lambda torch: torch.ones(3, requires_grad=True) * 2,
        r"x\.detach\(\)",
    ),
    "a conjugate": (
        lambda torch: torch.ones(3, dtype=torch.complex64).conj(),
        r"x\.resolve_conj\(\)",
    ),
    "a negative": (
        lambda torch: torch.ones(3, dtype=torch.complex64).conj().imag,
        r"x\.resolve_neg\(\)",
    ),
    "a negative in one piece": (lambda torch: torch._neg_view(torch.ones(3)), r"resolve_neg\(\)"),
    "sparse": (lambda torch: torch.eye(3).to_sparse(), "x cannot be shared: .*storage"),
    "compressed": (lambda torch: torch.eye(3).to_sparse_csr(), "x cannot be shared: .*storage"),
    "meta": (lambda torch: torch.ones(3, device="meta"), "x cannot be shared: .*meta"),
    "quantized": (
        lambda torch: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "x cannot be shared: .*QInt",
    ),
    "two numbers in a byte": (
        lambda torch: torch.empty(4, dtype=torch.float4_e2m1fn_x2),
        "DLPack type code 17, 4 bits, 2 lanes",
    ),
}


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_torch_tensors_that_are_refused(gpuops, torch, name):
    make, match = REFUSED_TENSORS[name]
    x = make(torch)
    with pytest.raises(BufferError, match=match):
        gpuops.gather(x, [0])
    with pytest.raises(BufferError, match=match.replace("x", "indices", 1)):
        gpuops.gather(HOST, x)
    if name == "requires grad":
        with pytest.raises(BufferError, match=r"out requires grad"):
            gpuops.gather(torch.ones(3), [0, 0, 0], out=x)
        same_tensor(torch, gpuops.gather(x.detach(), [0]), torch.ones(1))
    if name == "a negative":
        same_tensor(torch, gpuops.gather(x.resolve_neg(), [0]), -torch.zeros(1))


def test_fake_tensors(gpuops, torch):
    subclasses = pytest.importorskip("torch._subclasses")
    with subclasses.FakeTensorMode():
        x = torch.ones(3)
    with pytest.raises(BufferError, match="NULL, as that of a fake or lazy array"):
        gpuops.gather(x, [0])


def test_tensors_inside_vmap(gpuops, torch):
    def body(x):
        with pytest.raises(BufferError, match="x cannot be shared"):
            gpuops.gather(x, [0])
        return x

    torch.vmap(body)(torch.ones(2, 3))


def test_torch_subclasses(gpuops, torch):
    class Own(torch.Tensor):
        pass

    x = torch.ones(3).as_subclass(Own)
    assert type(gpuops.gather(x, [0])) is torch.Tensor
    # More types than are remembered.
    for number in range(300):
        kind = type(f"Own{number}", (torch.Tensor,), {})
        assert gpuops.gather(torch.ones(3).as_subclass(kind), [0]).shape == (1,)


def test_torch_results_live_on(gpuops, torch):
    results = [gpuops.gather(torch.full((1000,), float(n)), [n]) for n in range(100)]
    gc.collect()
    assert [float(result) for result in results] == [float(n) for n in range(100)]
    result = gpuops.gather(torch.ones(3), [0, 1])
    result += 1
    assert result.tolist() == [2.0, 2.0]
    assert result.untyped_storage().nbytes() == 8


def test_torch_arrays_are_told_quickly(cpu_device, torch):
    """Well under a microsecond for each; the margin is for busy machines."""
    gpuops = cpu_device.gpuops
    x, indices = np.arange(10.0), np.array([1, 2])
    tensor = torch.from_numpy(indices)

    def best(call):
        return min(timeit.repeat(call, number=1000, repeat=20)) / 1000

    plain = best(lambda: gpuops.gather(x, indices, device="cpu"))
    mixed = best(lambda: gpuops.gather(x, tensor, device="cpu"))
    assert mixed - plain < 2e-6


def test_to_torch_and_numpy(gpu, torch):
    d = gpu.gpuops.to_device(HOST)
    same(np.from_dlpack(d, device="cpu"), HOST)
    same(np.from_dlpack(d, device="cpu", copy=True), HOST)
    with pytest.raises((BufferError, ValueError, RuntimeError)):
        np.from_dlpack(d)
    with pytest.raises((BufferError, ValueError)):
        np.from_dlpack(d, device="cpu", copy=False)
    tensor = torch.utils.dlpack.from_dlpack(d.__dlpack__(dl_device=(CPU, 0), max_version=(1, 0)))
    same(tensor.numpy(), HOST)
    half = gpu.gpuops.to_device(torch.arange(6).to(torch.bfloat16))
    capsule = half.__dlpack__(dl_device=(CPU, 0), max_version=(1, 0))
    tensor = torch.utils.dlpack.from_dlpack(capsule)
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_torch_tensors_are_copied_up(gpu, torch):
    gpuops = gpu.gpuops
    x = torch.arange(12.0).reshape(4, 3).T
    for d in (gpuops.to_device(x), gpuops.asarray(x), gpuops.from_dlpack(x, device="cuda")):
        same(d.to_host(), np.ascontiguousarray(x.numpy()))
    with pytest.raises(BufferError, match="x is on the host"):
        gpuops.from_dlpack(x)
    with pytest.raises(BufferError, match="detach"):
        gpuops.to_device(torch.ones(3, requires_grad=True))
    d = gpuops.to_device(HOST)
    same(gpuops.gather(d, torch.tensor([2, 0])).to_host(), HOST[[2, 0]])
    with pytest.raises(TypeError, match="out on the host"):
        gpuops.gather(d, [0], out=torch.zeros(1, 3, dtype=torch.float64))


# JAX


def test_jax(gpuops, cpu_jax):
    jnp = cpu_jax.numpy
    x = jnp.arange(12.0).reshape(4, 3)
    indices = jnp.array([2, -1, 2])
    flat = jnp.array([7, 0])
    for result, expected in [
        (gpuops.gather(x, indices), x[indices]),
        (gpuops.gather(x, [2, -1, 2], axis=1), x[:, indices]),
        (gpuops.gather(x, 1), x[1]),
        (gpuops.gather(x.T, indices), x.T[indices]),
        (gpuops.gather(x[:0], jnp.array([], int)), x[:0]),
        (gpuops.take(x, flat), jnp.take(x, flat)),
        (gpuops.take(x, 7), jnp.take(x, 7)),
    ]:
        assert isinstance(result, cpu_jax.Array)
        assert (result.dtype, result.device) == (expected.dtype, expected.device)
        same(np.asarray(result), np.asarray(expected))
    along = jnp.array([[2, 1, 0]])
    result = gpuops.take_along_axis(x, along, 0)
    assert isinstance(result, cpu_jax.Array)
    same(np.asarray(result), np.take_along_axis(np.asarray(x), np.asarray(along), 0))
    same(gpuops.gather(HOST, indices), HOST[[2, -1, 2]])


JAX_DTYPES = [
    "bool", "int4", "uint4", "int8", "int64", "uint16", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz",
]  # fmt: skip


@pytest.mark.parametrize("name", JAX_DTYPES)
def test_jax_dtypes(gpuops, cpu_jax, name):
    jnp = cpu_jax.numpy
    x = jnp.arange(5).astype(name)
    result = gpuops.gather(x, [4, 0, 3])
    assert isinstance(result, cpu_jax.Array)
    assert result.dtype == x.dtype
    assert (result == x[jnp.array([4, 0, 3])]).all()


def test_jax_arrays_are_not_written(gpuops, cpu_jax):
    """JAX takes its arrays to be immutable, and says so by the form of its capsules."""
    out = cpu_jax.numpy.zeros(2)
    with pytest.raises(ValueError, match="read-only"):
        gpuops.gather(np.arange(3.0), [1, 2], out=out)
    assert not out.any()
    assert capsules.Export(out.__dlpack__(max_version=(1, 3))).name == capsules.LEGACY


def test_jax_inside_jit(gpuops, cpu_jax):
    with pytest.raises(TypeError):
        cpu_jax.jit(lambda x: gpuops.gather(x, [0]))(cpu_jax.numpy.ones(3))


def test_jax_takes_a_copy(gpu, cpu_jax):
    gpuops = gpu.gpuops
    x = cpu_jax.numpy.arange(6.0)
    same(gpuops.to_device(x).to_host(), np.arange(6.0))
    d = gpuops.to_device(HOST)
    same(gpuops.gather(d, cpu_jax.numpy.array([1, 0])).to_host(), HOST[[1, 0]])


# The array API


def test_array_api_strict(gpuops, strict):
    x = strict.asarray(HOST)
    result = gpuops.gather(x, strict.asarray([2, 0]))
    assert type(result) is type(x)
    assert result.device == x.device
    same(np.asarray(result), HOST[[2, 0]])
    assert type(gpuops.gather(x, 1)) is type(x)


def test_a_namespace_without_devices(gpuops):
    class Named(Producer):
        def __array_namespace__(self):
            return self

        def asarray(self, array):
            return "made", array

    name, array = gpuops.gather(Named(HOST), [1])
    assert name == "made"
    same(array, HOST[[1]])

    class Failing(Named):
        device = "somewhere"

        def asarray(self, array, device=None):
            raise ValueError(f"no room {device}")

    with pytest.raises(ValueError, match="no room somewhere"):
        gpuops.gather(Failing(HOST), [1])


def test_a_namespace_on_a_device(gpu):
    gpuops = gpu.gpuops

    class Named(Producer):
        def __array_namespace__(self):
            return self

        def from_dlpack(self, array):
            return "made", array

    name, array = gpuops.gather(Named(gpuops.to_device(HOST)), [1])
    assert name == "made"
    same(array.to_host(), HOST[[1]])


class TestArrayAPI:
    """What the array API says about __dlpack__, for DeviceArray."""

    def test_signature(self, gpu):
        d = gpu.gpuops.to_device(HOST)
        d.__dlpack__(stream=None, max_version=None, dl_device=None, copy=None)
        with pytest.raises(TypeError):
            d.__dlpack__(None)

    def test_device(self, gpu):
        kind, number = gpu.gpuops.to_device(HOST).__dlpack_device__()
        assert (kind, number) == (CUDA, 0)

    def test_versions(self, gpu):
        d = gpu.gpuops.to_device(HOST)
        assert "dltensor_versioned" in repr(d.__dlpack__(max_version=(1, 0)))
        assert '"dltensor"' in repr(d.__dlpack__())

    def test_round_trip(self, gpu):
        gpuops = gpu.gpuops
        for dtype in capsules.DTYPES:
            host = filled_array((3, 2), dtype)
            d = gpuops.to_device(host)
            again = gpuops.from_dlpack(d)
            assert (again.dtype, again.shape, again.ptr) == (d.dtype, d.shape, d.ptr)
            same(again.to_host(), host)
            same(np.from_dlpack(d, device="cpu"), host)

    def test_copy(self, gpu):
        gpuops = gpu.gpuops
        d = gpuops.to_device(HOST)
        copied = gpuops.from_dlpack(d, copy=True)
        copied.fill(0)
        same(d.to_host(), HOST)
        shared = gpuops.from_dlpack(d, copy=False)
        shared.fill(0)
        same(d.to_host(), np.zeros_like(HOST))

    def test_other_devices(self, gpu):
        d = gpu.gpuops.to_device(HOST)
        for device in [(METAL, 0), (CUDA, 100)]:
            with pytest.raises(BufferError):
                d.__dlpack__(dl_device=device)


# What NumPy does with data on the host


def test_asarray_casts_as_numpy_does(gpu):
    gpuops = gpu.gpuops
    for x, dtype in [
        ([1, None], "f8"),
        ([2**70, -1], "f4"),
        ([1.5, 2.5], "i2"),
        ("1.5", "f8"),
        ([["1", "2"]], "i8"),
        (["2020-01-01", "NaT"], "M8[D]"),
        (HOST[::-1, 1:], "f4"),
        (HOST, "f8"),
        (memoryview(b"abc"), "i4"),
        (Producer(HOST), "f4"),
        (7, "c8"),
    ]:
        plain = HOST if isinstance(x, Producer) else x
        same(gpuops.asarray(x, dtype=dtype).to_host(), np.array(np.asarray(plain, dtype)))
    for x, dtype, error in [
        ([1, None], "i8", TypeError),
        (["one"], "f8", ValueError),
        ([2**70], "i8", OverflowError),
        (np.ma.array([1, 2], mask=[0, 1]), "f8", TypeError),
        ([1, None], None, TypeError),
        ([1], "O", TypeError),
    ]:
        with pytest.raises(error):
            gpuops.asarray(x, dtype=dtype)


def test_advice_for_dtypes(gpu):
    gpuops = gpu.gpuops
    for dtype, advice in [(object, "ask for a dtype of fixed size"), (">f8", "newbyteorder")]:
        for make in (gpuops.empty, gpuops.zeros):
            with pytest.raises(TypeError, match=f"^dtype is .*: .*{advice}"):
                make(2, dtype)
        with pytest.raises(
            TypeError, match=rf"x has dtype .*x\.astype\(\.\.\.\) to .*{advice[-10:]}"
        ):
            gpuops.to_device(np.zeros(2, dtype))


# Streams of libraries whose objects say where they are, as the protocol does not


SAID = {
    "torch": {"device_index": 1},
    "CuPy": {"device_id": 1},
    "cuda.core": {"device": type("Device", (), {"device_id": 1})()},
    "gpuops": {"device": 1},
}


@pytest.mark.parametrize("name", SAID)
def test_streams_of_another_device(fake_device, name):
    gpuops = fake_device.gpuops
    with leaving_nothing(fake_device):
        first, second = gpuops.Stream(0), gpuops.Stream(1)
        handle = second.ptr
        protocol = {"__cuda_stream__": lambda self: (0, handle)}
        foreign = type("Foreign", (), SAID[name] | protocol)()
        first.wait(foreign)
        first.record().wait(foreign)
        assert gpuops.Stream.from_external(foreign) == second
        with pytest.raises(ValueError, match="device"):
            gpuops.Event(device=0).record(foreign)
        # CuPy's null stream is of no device in particular.
        null = type("Null", (), {"device_id": -1, "__cuda_stream__": lambda self: (0, 0)})()
        assert gpuops.Stream.from_external(null, device=1).device == 1
        assert gpuops.Stream.from_external(null) == gpuops.current_stream(0)
        del first, second


# The C exchange API, consumed. Its arrays are on the host, or on the device that is tested.


@pytest.fixture(params=["cpu-host", "fake-host", "cuda-host", "fake-device", "cuda-device"])
def place(request):
    """Makes an ndarray or a DeviceArray, and reads it back."""
    name, where = request.param.split("-")
    device = request.getfixturevalue(f"{name}_device")
    with leaving_nothing(device), device.gpuops.device(device.default):
        yield Place(device.gpuops, device if where == "device" else None)


class Place:
    def __init__(self, gpuops, gpu):
        self.gpuops = gpuops
        self.gpu = gpu

    def put(self, host):
        return self.gpuops.to_device(host) if self.gpu else host

    def get(self, data):
        return data.to_host() if self.gpu else data

    def empty(self, shape, dtype, device):
        assert device == ((CUDA, 0) if self.gpu else (CPU, 0))
        return self.gpuops.empty(shape, dtype)


@pytest.fixture(params=[True, False], ids=["lends", "exports"])
def lends(request):
    return request.param


def test_exchange(place, lends):
    kind = new_kind(lends=lends, empty=place.empty)
    x = kind(place.put(HOST))
    result = place.gpuops.gather(x, [2, 0])
    assert type(result) is kind
    same(place.get(result.data), HOST[[2, 0]])
    indices = kind(place.put(np.array([3, 1])))
    same(place.get(place.gpuops.gather(x, indices).data), HOST[[3, 1]])
    same(place.get(place.gpuops.gather(place.put(HOST), indices)), HOST[[3, 1]])
    assert ("lend" in kind.calls, "from_object" in kind.calls) == (lends, not lends)
    assert ("allocate" in kind.calls) == (place.gpu is not None)
    gc.collect()
    if not lends:
        assert x.producer.deleted == x.producer.made


def test_exchange_out(place, lends):
    kind = new_kind(lends=lends, empty=place.empty)
    x, out = kind(place.put(HOST)), kind(place.put(np.zeros((2, 3))))
    assert place.gpuops.gather(x, [2, 0], out=out) is out
    same(place.get(out.data), HOST[[2, 0]])
    frozen = kind(place.put(np.zeros((2, 3))), flags=READ_ONLY)
    with pytest.raises(ValueError, match="read-only"):
        place.gpuops.gather(x, [2, 0], out=frozen)
    same(place.get(frozen.data), np.zeros((2, 3)))
    gc.collect()
    assert out.producer.deleted == out.producer.made == 1
    assert frozen.producer.deleted == frozen.producer.made == 1


def test_exchange_of_what_is_written_without_out(place, lends):
    gpuops, kind = place.gpuops, new_kind(lends=lends, empty=place.empty)
    calls = [
        (lambda x: gpuops.scatter(x, [1], 5.0), lambda x: x.__setitem__([1], 5.0)),
        (lambda x: gpuops.scatter_add(x, [1], 5.0), lambda x: np.add.at(x, [1], 5.0)),
        (
            lambda x: gpuops.correlate(place.put(HOST), [[2.0]], output=x),
            lambda x: x.__setitem__(..., 2 * HOST),
        ),
    ]
    for call, expected in calls:
        x, y = kind(place.put(HOST.copy())), HOST.copy()
        call(x)
        expected(y)
        same(place.get(x.data), y)
        frozen = kind(place.put(HOST.copy()), flags=READ_ONLY)
        with pytest.raises(ValueError, match="read-only"):
            call(frozen)
        same(place.get(frozen.data), HOST)
        gc.collect()
        for pot in (x, frozen):
            assert pot.producer.deleted == pot.producer.made == 1


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "c16"])
def test_exchange_indices_of_host_data(gpu, dtype):
    """The indices are on the GPU, and so is the result, but its elements are those of the data."""
    gpuops = gpu.gpuops
    kind = new_kind(empty=Place(gpuops, gpu).empty)
    indices = kind(gpuops.to_device(np.array([2, 0, 1, 2])))
    for host in (filled_array((10,), dtype), filled_array((4, 3), dtype)):
        result = gpuops.gather(host, indices)
        assert type(result) is kind
        same(result.data.to_host(), host[[2, 0, 1, 2]])
    with pytest.raises(TypeError, match="x has dtype <U3, for which DLPack has no word"):
        gpuops.gather(np.zeros(3, "U3"), indices)


def test_a_host_result_without_a_word(gpuops):
    """The result is of the kind of the indices, also where its elements are as long as theirs."""
    kind = new_kind()
    indices = kind(np.array([0, 0]))
    same(gpuops.take(np.float32(7), indices, device="cpu").data, np.array([7, 7], "f4"))
    for scalar in (np.str_("ab"), np.str_("abc"), np.datetime64(3, "s"), np.void(b"12345678")):
        with pytest.raises(BufferError, match="DLPack has no word for dtype") as caught:
            gpuops.take(scalar, indices, device="cpu")
        assert str(scalar.dtype) in str(caught.value)


def test_a_host_result_that_numpy_has_no_word_for(gpuops):
    """Complex numbers of twice 16 bits, say, are plain bytes on their way."""
    kept = []

    @capsules.TO_OBJECT
    def to_object(address, out):
        name = ctypes.addressof(capsules.NAMES[capsules.VERSIONED])
        export = capsules.Export(capsules.capsule_new(address, name, None))
        kept.append((export.dtype, export.shape, ctypes.string_at(export.data, 8)))
        export.consume()()
        return -1

    kind = new_kind(wrong={"to_object": ctypes.cast(to_object, ctypes.c_void_p)})
    data = np.array([1, 2, 3], "u4")
    with pytest.raises(RuntimeError, match="could not take the result over"):
        gpuops.gather(kind(data, code=5, bits=32), [2, 0])
    assert kept == [((5, 32), (2,), data[[2, 0]].tobytes())]


@pytest.mark.parametrize("wrong", ["shape", "dtype", "device"])
def test_a_result_that_was_not_asked_for(gpu, wrong):
    gpuops = gpu.gpuops

    def empty(shape, dtype, device):
        if wrong == "shape":
            return gpuops.empty((*shape[:-1], shape[-1] + 1), dtype)
        return gpuops.empty(shape, "f4") if wrong == "dtype" else np.empty(shape, dtype)

    kind = new_kind(empty=empty)
    x = kind(gpuops.to_device(HOST))
    with pytest.raises(BufferError, match="allocated something else than was asked for"):
        gpuops.gather(x, [0])
    kind.alive.clear()


FLAWS = {
    "another version": {"version": (2, 0)},
    "another kind of numbers": {"code": 0},
    "fewer axes": {"ndim": 1},
    "another device": {"device": (CUDA, 1)},
    "no device": {"device": (METAL, 0)},
}


@pytest.mark.parametrize("name", FLAWS)
def test_a_result_with_a_flaw(gpu, name):
    kind = new_kind(empty=Place(gpu.gpuops, gpu).empty)
    x = kind(gpu.gpuops.to_device(HOST))
    for flaws, text in [
        (FLAWS[name], "> allocated something else than was asked for$"),
        ({"lanes": 3}, "^the result has elements that gpuops does not know"),
    ]:
        kind.flaws = flaws
        with pytest.raises(BufferError, match=text):
            gpu.gpuops.gather(x, [0])
        assert [producer.deleted for producer in kind.alive.values()] == [1]
        kind.alive.clear()


COMPLAINTS = {
    "the kind": (b"MemoryError", b"full", MemoryError, "full"),
    "torch's text": (b"", b"CUDA out of memory. Tried", MemoryError, "CUDA out of memory. Tried"),
    "its text on the host": (b"E", b"can't allocate memory: 9", MemoryError, ".*memory: 9"),
    "another reason": (b"RuntimeError", b"no luck\n at line 7", RuntimeError, "no luck"),
    "no reason": (None, None, RuntimeError, ""),
    "a long one": (b"k" * 99, b"x" * 999, RuntimeError, "x{511}"),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_what_an_allocator_complains_of(gpu, name):
    place = Place(gpu.gpuops, gpu)
    kind = new_kind(empty=place.empty)
    *kind.complaint, error, text = COMPLAINTS[name]
    kind.fails = ("allocate",)
    x = kind(place.put(HOST))
    with pytest.raises(error, match=rf"Pot'> could not allocate the result: {text}$") as caught:
        gpu.gpuops.gather(x, [0])
    assert type(caught.value) is error


@pytest.mark.parametrize("ordinal", [2, 70, 100_000, (1 << 31) - 1])
def test_exchange_on_a_device_that_does_not_exist(fake_device, lends, ordinal):
    gpuops = fake_device.gpuops
    kind = new_kind(lends=lends)
    with leaving_nothing(fake_device):
        x = kind(gpuops.to_device(HOST), device=(CUDA, ordinal))
        for call in (lambda x: gpuops.gather(x, [0]), gpuops.asarray):
            with pytest.raises(BufferError, match=f"cuda:{ordinal}"):
                call(x)
        assert "work_stream" not in kind.calls
        assert x.producer.deleted == x.producer.made
        del x


@pytest.mark.parametrize(
    "wrong",
    [
        {"ndim": -1},
        {"ndim": 65},
        {"shape": None},
        {"shape": (-1, 3)},
        {"shape": (1 << 40, 1 << 40)},
        {"strides": (1 << 62, 1)},
        {"lanes": 2},
        {"bits": 3},
        {"data": None},
        {"byte_offset": (1 << 64) - 1},
        {"device": (METAL, 0)},
        {"device": (CUDA, -1)},
    ],
    ids=repr,
)
def test_exchange_liars(place, lends, wrong):
    kind = new_kind(lends=lends, empty=place.empty)
    x = kind(place.put(HOST), **wrong)
    with pytest.raises(BufferError):
        place.gpuops.gather(x, [0])
    gc.collect()
    if not lends:
        assert x.producer.deleted == x.producer.made == 1


def test_another_version_of_a_tensor(place):
    kind = new_kind(lends=False, empty=place.empty)
    x = kind(place.put(HOST), version=(2, 0))
    with pytest.raises(BufferError, match="not exported as DLPack 1"):
        place.gpuops.gather(x, [0])
    assert x.producer.deleted == x.producer.made == 1


FAILURES = {
    "lend": (BufferError, "x could not be exported"),
    "from_object": (BufferError, "x could not be exported"),
    "to_object": (RuntimeError, "could not take the result over"),
    "work_stream": (BufferError, "x could not be exported"),
    "allocate": (MemoryError, "could not allocate the result: the pot is full$"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_exchange_failures(place, name):
    if place.gpu is None and name in ("work_stream", "allocate"):
        pytest.skip("not on the host")
    kind = new_kind(lends=name != "from_object", empty=place.empty)
    kind.fails = (name,)
    error, match = FAILURES[name]
    x = kind(place.put(HOST))
    with pytest.raises(error, match=match):
        place.gpuops.gather(x, [0])
    kind.fails = ()
    same(place.get(place.gpuops.gather(x, [1]).data), HOST[[1]])


WITHHELD = {
    "from_object": (BufferError, "x is not exported as DLPack 1"),
    "to_object": (RuntimeError, "could not take the result over"),
    "allocate": (RuntimeError, "could not allocate the result: $"),
}


def test_what_is_lent_and_not_given(gpu):
    """A call borrows the memory, and whoever keeps it has to be given it."""
    kind = new_kind(empty=Place(gpu.gpuops, gpu).empty)
    kind.fails = ("from_object",)
    x = kind(gpu.gpuops.to_device(HOST))
    same(gpu.gpuops.gather(x, [1]).data.to_host(), HOST[[1]])
    with pytest.raises(BufferError, match="x could not be exported, for reasons it does not tell"):
        gpu.gpuops.asarray(x)


def test_an_out_that_numpy_has_no_word_for(gpu, lends):
    """On the device their dtypes are compared as DLPack says them."""
    gpuops = gpu.gpuops
    kind = new_kind(lends=lends)
    pairs = np.arange(6, dtype="u4")
    x = kind(gpuops.to_device(pairs), code=5, bits=32)
    out = kind(gpuops.to_device(pairs[:2]), code=5, bits=32)
    assert gpuops.gather(x, [5, 3], out=out) is out
    assert out.data.to_host().tolist() == [5, 3]
    named = kind(gpuops.to_device(pairs[:2]))
    with pytest.raises(TypeError, match="out has dtype uint32, and the result has dtype None"):
        gpuops.gather(x, [1, 1], out=named)
    with pytest.raises(TypeError, match="out has dtype None, and the result has dtype uint32"):
        gpuops.gather(named, [1, 1], out=out)
    other = kind(gpuops.to_device(pairs[:2].astype("u2")), code=4, bits=16, lanes=1)
    with pytest.raises(TypeError, match="output array does not match result of gather"):
        gpuops.gather(x, [1, 1], out=other)
    assert named.data.to_host().tolist() == [0, 1]


@pytest.mark.parametrize("name", WITHHELD)
def test_success_without_a_result(place, name):
    if place.gpu is None and name == "allocate":
        pytest.skip("not on the host")
    kind = new_kind(lends=False, empty=place.empty)
    kind.withholds = (name,)
    error, match = WITHHELD[name]
    x = kind(place.put(HOST))
    with pytest.raises(error, match=match):
        place.gpuops.gather(x, [0])
    kind.withholds = ()
    same(place.get(place.gpuops.gather(x, [1]).data), HOST[[1]])


@pytest.mark.parametrize("name", ["allocate", "from_object", "to_object", "work_stream"])
def test_tables_with_gaps_are_none(gpuops, name):
    kind = new_kind(wrong=[name])
    with pytest.raises((TypeError, ValueError)):
        gpuops.gather(kind(HOST), [0])


def test_versions_of_the_table(gpuops):
    first = new_kind()
    newer = new_kind(wrong={"major": 3}, previous=new_kind(wrong={"major": 2}, previous=first.table)
                     .table)  # fmt: skip
    x = newer(HOST)
    result = gpuops.gather(x, [1])
    same(result.data, HOST[[1]])
    assert first.calls
    for kind in (new_kind(wrong={"major": 2}), new_kind(wrong={"major": 0})):
        with pytest.raises((TypeError, ValueError)):
            gpuops.gather(kind(HOST), [0])


def test_a_table_in_a_circle(gpuops):
    kind = new_kind(wrong={"major": 2})
    kind.table.previous = ctypes.addressof(kind.table)
    with pytest.raises((TypeError, ValueError)):
        gpuops.gather(kind(HOST), [0])


def test_what_is_no_table(gpuops):
    class Kind:
        def __array__(self, dtype=None, copy=None):
            return HOST

    wrong = capsules.capsule_new(8, ctypes.addressof(capsules.NAMES[b"nonsense"]), None)
    for offered in (None, 7, "table", wrong):
        Kind.__dlpack_c_exchange_api__ = offered
        same(gpuops.gather(Kind(), [1]), HOST[[1]])


def test_the_table_is_an_attribute_of_the_type(gpuops):
    class Kind:
        def __init__(self):
            self.__dlpack_c_exchange_api__ = new_kind().__dlpack_c_exchange_api__

        def __array__(self, dtype=None, copy=None):
            return HOST

    same(gpuops.gather(Kind(), [1]), HOST[[1]])


def test_unhashable_types(gpuops):
    class Meta(type):
        __hash__ = None

    class Kind(metaclass=Meta):
        def __array__(self, dtype=None, copy=None):
            return HOST

    try:
        np.asarray(Kind())
    except TypeError as error:
        pytest.skip(f"NumPy does not take such types, as without the GIL: {error}")
    same(gpuops.gather(Kind(), [1]), HOST[[1]])


def test_autograd(place):
    kind = new_kind(autograd=True, empty=place.empty)
    x = kind(place.put(HOST))
    same(place.get(place.gpuops.gather(x, [1]).data), HOST[[1]])
    x.requires_grad = True
    with pytest.raises(BufferError, match=r"x requires grad.*x\.detach\(\)"):
        place.gpuops.gather(x, [1])
    x.requires_grad, x.negative = False, True
    with pytest.raises(BufferError, match="the negative of what its memory holds"):
        place.gpuops.gather(x, [1])
    numbers = kind(place.put(HOST.astype("c16")))
    numbers.conjugate = True
    with pytest.raises(BufferError, match="the conjugate of what its memory holds"):
        place.gpuops.gather(numbers, [1])
    # Integers have no gradient, and nobody asks them.
    for dtype in ("i8", "u1", "?"):
        whole = kind(place.put(np.arange(3).astype(dtype)))
        whole.requires_grad = True
        same(place.get(place.gpuops.gather(whole, [1]).data), np.array([1], dtype))


def test_autograd_without_an_answer(place):
    """What a library raises when it is asked goes through."""

    class Undecided:
        def __bool__(self):
            raise ArithmeticError("neither nor")

    def fails():
        raise ArithmeticError("no answer")

    kind = new_kind(autograd=True, empty=place.empty)
    x = kind(place.put(HOST.astype("c16")))
    for name, wrong, text in [
        ("requires_grad", Undecided(), "neither nor"),
        ("is_conj", fails, "no answer"),
        ("is_neg", fails, "no answer"),
        ("is_neg", Undecided, "neither nor"),
    ]:
        setattr(x, name, wrong)
        with pytest.raises(ArithmeticError, match=text):
            place.gpuops.gather(x, [1])
        setattr(x, name, False if name == "requires_grad" else bool)
    same(place.get(place.gpuops.gather(x, [1]).data), HOST[[1]].astype("c16"))


@pytest.mark.parametrize("missing", ["requires_grad", "is_conj", "is_neg"])
def test_a_library_that_is_not_asked_about_autograd(gpuops, missing):
    """Only a type that has all three attributes follows what is done with its arrays."""
    kind = new_kind(autograd=True)
    delattr(kind, missing)
    x = kind(HOST)
    x.requires_grad = x.negative = True
    same(gpuops.gather(x, [1], device="cpu").data, HOST[[1]])


def test_the_work_stream_of_a_library(gpu):
    gpuops = gpu.gpuops
    stream = gpuops.Stream()
    place = Place(gpuops, gpu)
    kind = new_kind(stream=stream.ptr, empty=place.empty)
    x = kind(gpuops.to_device(HOST))
    gpuops.synchronize()
    result = gpuops.gather(x, [1])
    same(result.data.to_host(stream=stream), HOST[[1]])
    # An array that is taken over is at home there.
    taken = gpuops.asarray(x)
    assert (taken.stream, taken.ptr) == (stream, x.data.ptr)
    assert x.producer.deleted < x.producer.made
    del taken
    stream.synchronize()
    gpuops.empty(1)
    assert x.producer.deleted == x.producer.made == 1


# The C exchange API, offered.


@pytest.fixture
def table(gpu):
    return capsules.exchange_api(gpu.gpuops.DeviceArray)


def test_the_table(gpu, table):
    capsule = gpu.gpuops.DeviceArray.__dlpack_c_exchange_api__
    assert capsules.capsule_name(capsule) == b"dlpack_exchange_api"
    assert (table.major, table.minor, table.previous) == (1, 3, None)
    assert all([table.allocate, table.from_object, table.to_object, table.work_stream])
    assert table.lend is None


def call_out(function, kind, *arguments):
    """Calls a function of the table that sets a pointer, and returns its status and pointer."""
    out = ctypes.c_void_p()
    status = kind(function)(*arguments, ctypes.pointer(out))
    return status, out.value


def test_from_object(gpu, table):
    d = gpu.gpuops.to_device(HOST)[1:]
    status, address = call_out(table.from_object, capsules.FROM_OBJECT, d)
    assert status == 0
    managed = capsules.Versioned.from_address(address)
    assert (managed.major, managed.minor, managed.flags) == (1, 3, 0)
    assert managed.tensor.data == d.ptr
    assert managed.tensor.shape[:2] == [3, 3]
    deleter = capsules.DELETER(managed.deleter)
    status, other = call_out(table.to_object, capsules.TO_OBJECT, address)
    assert status == 0
    again = ctypes.cast(other, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(again))
    assert type(again) is gpu.gpuops.DeviceArray
    del d
    same(again.to_host(), HOST[1:])
    del again, deleter


@pytest.mark.parametrize("wrong", [HOST, None, 7, "x"], ids=lambda wrong: type(wrong).__name__)
def test_from_object_refuses(gpu, table, wrong):
    with pytest.raises(TypeError, match=r"expected a gpuops\.DeviceArray"):
        call_out(table.from_object, capsules.FROM_OBJECT, wrong)


def test_from_object_without_a_word(gpu, table):
    d = gpu.gpuops.to_device(np.zeros(3, "U3"))
    with pytest.raises(BufferError, match="DLPack has no word for dtype"):
        call_out(table.from_object, capsules.FROM_OBJECT, d)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"version": (2, 0)}, {"ndim": -1}, {"lanes": 3}, {"device": (METAL, 0)}, {"data": 8}],
    ids=repr,
)
def test_to_object(gpu, table, wrong):
    """The tensor is taken over in any case."""
    gpuops = gpu.gpuops
    producer = Producer(gpuops.to_device(HOST), **wrong)
    managed = producer.managed()
    if wrong:
        with pytest.raises(BufferError):
            call_out(table.to_object, capsules.TO_OBJECT, ctypes.addressof(managed))
    else:
        _, address = call_out(table.to_object, capsules.TO_OBJECT, ctypes.addressof(managed))
        d = ctypes.cast(address, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(d))
        same(d.to_host(), HOST)
        assert producer.deleted == 0
        del d
        gpuops.synchronize()
        gpuops.empty(1)
    assert producer.deleted == 1


@pytest.mark.parametrize("flags", [0, READ_ONLY])
def test_to_object_may_be_read_only(gpu, table, flags):
    gpuops = gpu.gpuops
    managed = Producer(gpuops.to_device(HOST), flags=flags).managed()
    _, address = call_out(table.to_object, capsules.TO_OBJECT, ctypes.addressof(managed))
    d = ctypes.cast(address, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(d))
    refused = pytest.raises(ValueError, match="read-only")
    with refused if flags else contextlib.nullcontext():
        d.fill(0)
    assert (d.to_host() == (HOST if flags else 0)).all()
    del d
    gpuops.synchronize()
    gpuops.empty(1)


def test_to_object_of_host_memory(gpu, table):
    producer = Producer(HOST)
    managed = producer.managed()
    with pytest.raises(BufferError, match="on the CPU"):
        call_out(table.to_object, capsules.TO_OBJECT, ctypes.addressof(managed))
    assert producer.deleted == 1


@pytest.fixture(params=["nothing", "no module", "another module"])
def unloaded(gpu, request, monkeypatch):
    """Where the module of the table was, there is something else."""
    name = gpu.gpuops._core.__name__
    if request.param == "nothing":
        monkeypatch.delitem(sys.modules, name)
    else:
        monkeypatch.setitem(sys.modules, name, 7 if request.param == "no module" else array)


UNLOADED = "gpuops has been unloaded"


def test_the_table_outlives_its_module(gpu, table, unloaded):
    producer = Producer(gpu.gpuops.to_device(HOST))
    managed = producer.managed()
    for name, kind, arguments in [
        ("from_object", capsules.FROM_OBJECT, [producer.owner]),
        ("to_object", capsules.TO_OBJECT, [ctypes.addressof(managed)]),
        ("work_stream", capsules.WORK_STREAM, [CUDA, 0]),
    ]:
        with pytest.raises(RuntimeError, match=UNLOADED):
            call_out(getattr(table, name), kind, *arguments)
    assert producer.deleted == 1
    assert call_out(table.work_stream, capsules.WORK_STREAM, CPU, 0) == (0, None)
    assert allocate(table, (3,)) == ("RuntimeError", UNLOADED)


OWN_FUNCTIONS = {
    "from_object": (BufferError, f"x cannot be shared: {UNLOADED}$"),
    "work_stream": (BufferError, f"x cannot be shared: {UNLOADED}$"),
    "allocate": (RuntimeError, f"could not allocate the result: {UNLOADED}$"),
    "to_object": (RuntimeError, f"^{UNLOADED}$"),
}


@pytest.mark.parametrize("name", OWN_FUNCTIONS)
def test_what_functions_in_c_raise(gpu, table, unloaded, name):
    """One function of a library is that of a module which is gone."""
    place = Place(gpu.gpuops, gpu)
    kind = new_kind(lends=False, empty=place.empty, wrong={name: getattr(table, name)})
    x = kind(place.put(HOST))
    error, text = OWN_FUNCTIONS[name]
    with pytest.raises(error, match=text):
        gpu.gpuops.gather(x, [0])
    kind.alive.clear()
    gc.collect()
    assert x.producer.deleted == x.producer.made


def test_an_exception_of_a_function_in_c(gpu, table):
    kind = new_kind(lends=False, wrong={"from_object": table.from_object})
    with pytest.raises(TypeError, match=r"expected a gpuops\.DeviceArray, not <class .*Pot'>"):
        gpu.gpuops.gather(kind(gpu.gpuops.to_device(HOST)), [0])


def test_work_stream(gpu, table):
    gpuops = gpu.gpuops
    ask = capsules.WORK_STREAM
    assert call_out(table.work_stream, ask, CUDA, 0) == (0, 1)
    stream = gpuops.Stream()
    with stream:
        assert call_out(table.work_stream, ask, CUDA, 0) == (0, stream.ptr)
    assert call_out(table.work_stream, ask, CUDA, 0) == (0, 1)
    assert call_out(table.work_stream, ask, CPU, 0) == (0, None)
    for device in [(CUDA, 99), (CUDA, -1), (METAL, 0)]:
        with pytest.raises(BufferError):
            call_out(table.work_stream, ask, *device)


def allocate(table, shape, device=(CUDA, 0), code=2, bits=64, without_gil=False):
    """The outcome of the allocator: a managed tensor, or what it says is wrong."""
    sizes = capsules.integers(shape)
    prototype = capsules.Tensor(
        device_type=device[0], device_id=device[1], ndim=len(shape), code=code, bits=bits, lanes=1
    )
    prototype.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    errors = []

    @capsules.SET_ERROR
    def set_error(context, kind, message):
        errors.append((context, kind.decode(), message.decode()))

    kind = capsules.ALLOCATE
    if without_gil:
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int,
            ctypes.POINTER(capsules.Tensor),
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
            capsules.SET_ERROR,
        )
    out = ctypes.c_void_p()
    status = kind(table.allocate)(ctypes.pointer(prototype), ctypes.pointer(out), 77, set_error)
    assert (status == 0) == (not errors)
    if errors:
        assert out.value is None
        assert len(errors) == 1 and errors[0][0] == 77
        return errors[0][1:]
    return capsules.Versioned.from_address(out.value)


@pytest.mark.parametrize("without_gil", [False, True])
def test_allocate(gpu, table, without_gil):
    gpuops = gpu.gpuops
    before = gpuops.memory_info().used
    managed = allocate(table, (4, 3), without_gil=without_gil)
    tensor = managed.tensor
    assert tensor.shape[:2] == [4, 3]
    assert tensor.strides[:2] == [3, 1]
    assert tensor.data % 256 == 0
    assert gpuops.memory_info().used > before
    capsules.DELETER(managed.deleter)(ctypes.addressof(managed))
    assert gpuops.memory_info().used == before
    for shape in [(), (0, 3)]:
        managed = allocate(table, shape, without_gil=without_gil)
        assert managed.tensor.ndim == len(shape)
        assert bool(managed.tensor.data) == (shape == ())
        capsules.DELETER(managed.deleter)(ctypes.addressof(managed))


def test_allocate_fails_for_somebody_who_does_not_ask_why(gpu, table):
    sizes = capsules.integers((1 << 50,))
    prototype = capsules.Tensor(device_type=CUDA, ndim=1, code=2, bits=64, lanes=1, shape=sizes)
    out = ctypes.c_void_p(7)
    allocate = capsules.ALLOCATE(table.allocate)
    quiet = ctypes.cast(None, capsules.SET_ERROR)
    assert allocate(ctypes.pointer(prototype), ctypes.pointer(out), None, quiet) == -1
    assert out.value is None


@pytest.mark.parametrize("without_gil", [False, True])
def test_allocate_fails(gpu, table, without_gil):
    def fails(*arguments, **options):
        return allocate(table, *arguments, **options, without_gil=without_gil)

    kind, message = fails((1 << 50,))
    assert kind == "MemoryError" and "bytes" in message
    for outcome in [
        fails((-1,)),
        fails((1 << 40, 1 << 40)),
        fails((3,), bits=7),
        fails((3,), device=(CPU, 0)),
        fails((3,), device=(CUDA, 99)),
    ]:
        assert outcome[0] == "BufferError", outcome


def test_one_build_takes_arrays_of_another(fake_device, cpu_device):
    """DeviceArray among foreign types: what another library does with ours."""
    if cpu_device.gpuops.is_available():
        pytest.skip("a real GPU must not be given the addresses of a fake one")
    gpuops = fake_device.gpuops
    d = gpuops.to_device(HOST)
    with pytest.raises((BufferError, cpu_device.gpuops.DeviceError)):
        cpu_device.gpuops.gather(d, [0])
    same(d.to_host(), HOST)


@pytest.mark.parametrize("where", ["their stream", "another stream"])
@pytest.mark.parametrize("role", ["x", "out"])
def test_their_stream_may_be_gone_when_the_work_is_over(fake_device, role, where):
    """Of an array that nobody holds any more, the work is waited for, and not their stream."""
    gpuops, fake = fake_device.gpuops, fake_device.fake

    def call():
        lender = Lender(fake_device)
        x, out = gpuops.to_device(HOST), gpuops.empty(HOST[[2, 0]].shape, HOST.dtype)
        theirs = Interface(x if role == "x" else out, lender.handle.value)
        operands = {"x": x, "out": out, role: theirs}
        stream = gpuops.Stream() if where == "another stream" else None
        gpuops.gather(operands["x"], [2, 0], out=operands["out"], stream=stream)
        del theirs, operands
        fake.run()
        assert fake.library.cudaStreamDestroy(lender.handle) == 0
        gpuops.synchronize(0)
        same(out.to_host(), HOST[[2, 0]])

    with leaving_nothing(fake_device), gpuops.device("cuda:0"):
        fake.set_scheduler("lazy")
        call()


def test_owners_that_call_do_not_touch_what_a_failed_call_says(fake_device):
    """An owner is let go in the middle of a call, which has failed, and calls gpuops itself."""
    gpuops, fake, told = fake_device.gpuops, fake_device.fake, []

    class Owner:
        def __init__(self, d):
            self.d, self.__cuda_array_interface__ = d, d.__cuda_array_interface__

        def __del__(self):
            with pytest.raises(IndexError, match="index 7 is out of bounds"):
                gpuops.gather(np.arange(3), [7], device="cpu")
            told.append(gpuops)

    d, stream = gpuops.to_device(np.arange(100.0)), gpuops.Stream()
    places = gpuops.to_device(np.arange(40))[::2]
    for number in (1, 2):  # the kernel that packs the indices, and the one that gathers
        fake.set_scheduler("lazy")
        imported = gpuops.asarray(Owner(d))
        gpuops.gather(imported, [1], stream=stream)
        del imported
        launches = []

        def finish(name, with_gil, launches=launches, number=number):
            launches += [name] * (name == "cudaLaunchKernel")
            if len(launches) == number:
                assert not told  # it is still read
                fake.run()

        with (
            fake.fail(number, 1, function="cudaLaunchKernel") as fault,
            fake.visit(finish),
            pytest.raises(gpuops.DeviceError, match=r"cudaErrorInvalidValue \(1\)"),
        ):
            gpuops.gather(d, places)
        assert fault.reached and told == [gpuops]
        told.clear()
        fake.reset()
        gpuops.synchronize()
