"""torch, CuPy, JAX, Numba and cuda.core on a real GPU: arrays, memory, streams, graphs, the end.

Each library takes part where it is installed and can use the GPU. What the libraries warn of is no
concern of these tests.
"""

import ctypes
import gc
import itertools
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import reference
from helpers import (
    INDEX_DTYPES,
    UNCAPTURED,
    constant,
    filled_array,
    run_child,
    run_threads,
    same,
)
from rtc import random_pair, saxpy_module

# JAX takes most of the GPU's memory at once unless it is told not to, before it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytestmark = pytest.mark.filterwarnings("default")

SLOW = 100_000_000  # cycles of the GPU's clock, some fifty milliseconds
MEBIBYTE = 1 << 20

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None


@pytest.fixture
def gpuops(cuda_device):
    """The module; a bad index that a test provokes has to be met in that test."""
    yield cuda_device.gpuops
    cuda_device.gpuops.synchronize()


@pytest.fixture(scope="session")
def torch(cuda_device):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


@pytest.fixture(scope="session")
def cupy(cuda_device):
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("this CuPy finds no GPU")
    return cupy


@pytest.fixture(scope="session")
def jax(cuda_device):
    jax = pytest.importorskip("jax")
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("this JAX has no CUDA")
    jax.config.update("jax_enable_x64", True)
    return jax


@pytest.fixture(scope="session")
def numba(cuda_device):
    """The module numba.cuda."""
    pytest.importorskip("numba")
    # Releases of Numba that are older than NumPy 2.5 ask for a name that it has dropped.
    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack  # noqa: NPY201
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("this Numba has no CUDA")
    return cuda


@pytest.fixture(scope="session")
def cuda_core(cuda_device):
    core = pytest.importorskip("cuda.core")
    return core if hasattr(core, "Device") else pytest.importorskip("cuda.core.experimental")


NUMBERS = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")


class Torch:
    has_out = True
    dtypes = (*NUMBERS, bfloat16)

    def __init__(self, module, gpuops):
        self.module = module
        self.kind = module.Tensor

    def put(self, x):
        x = np.array(x, order="C")
        if x.dtype == bfloat16:
            return self.module.from_numpy(x.view("i2")).view(self.module.bfloat16).cuda()
        return self.module.from_numpy(x).cuda()

    def get(self, y):
        y = y.cpu()
        if y.dtype == self.module.bfloat16:
            return y.view(self.module.int16).numpy().view(bfloat16)
        return y.numpy()

    def pointer(self, y):
        return y.data_ptr()

    def view(self, d):
        return self.module.from_dlpack(d)

    def total(self, y):
        return float(y.double().sum())


class CuPy:
    has_out = True

    def __init__(self, module, gpuops):
        self.module = module
        self.kind = module.ndarray
        self.dtypes = NUMBERS
        try:
            module.asarray(np.zeros(1, bfloat16))
        except (TypeError, ValueError):
            return
        self.dtypes = (*NUMBERS, bfloat16)

    def put(self, x):
        return self.module.array(x, order="C")

    def get(self, y):
        return self.module.asnumpy(y)

    def pointer(self, y):
        return y.data.ptr

    def view(self, d):
        return self.module.from_dlpack(d)

    def total(self, y):
        return float(y.astype("f8").sum())


class Jax:
    has_out = False  # its arrays never change
    dtypes = (*NUMBERS, bfloat16)

    def __init__(self, module, gpuops):
        self.module = module
        self.kind = module.Array

    def put(self, x):
        return self.module.device_put(np.array(x, order="C"), self.module.devices("cuda")[0])

    def get(self, y):
        return np.asarray(y)

    def pointer(self, y):
        return y.unsafe_buffer_pointer()

    def view(self, d):
        return self.module.dlpack.from_dlpack(d)

    def total(self, y):
        return float(y.astype("f8").sum())


class Numba:
    """Numba has arrays but no way to make one of DLPack: results are DeviceArrays."""

    has_out = True
    dtypes = NUMBERS

    def __init__(self, module, gpuops):
        self.module = module
        self.kind = gpuops.DeviceArray

    def put(self, x):
        return self.module.to_device(np.array(x, order="C"))

    def get(self, y):
        return y.to_host() if isinstance(y, self.kind) else y.copy_to_host()

    def pointer(self, y):
        return y.device_ctypes_pointer.value or 0

    def view(self, d):
        return self.module.as_cuda_array(d)

    def total(self, y):
        return float(self.get(y).astype("f8").sum())


LIBRARIES = {"torch": Torch, "cupy": CuPy, "jax": Jax, "numba": Numba}


@pytest.fixture(params=LIBRARIES)
def library(request, gpuops):
    return LIBRARIES[request.param](request.getfixturevalue(request.param), gpuops)


@pytest.fixture
def writable(library):
    if not library.has_out:
        pytest.skip("arrays of this library cannot be written to")
    return library


def expect(library, result, expected):
    """A result of the library's kind, equal to what NumPy says in every bit."""
    assert isinstance(result, library.kind), type(result)
    same(np.asarray(library.get(result)), np.asarray(expected))


def late(index, axis, size, op="gather"):
    return (
        f"index {index} is out of bounds for axis {axis} with size {size} (found by an earlier "
        f"{op} on this stream; GPUOPS_LAUNCH_BLOCKING=1 raises at the call)"
    )


def used_bytes(gpuops):
    gc.collect()
    gpuops.synchronize()
    gpuops.empty_cache()
    return gpuops.memory_info().used


# Their arrays in, their arrays out.


def test_every_dtype(library, gpuops):
    places = np.array([6, 0, -1, 3])
    columns = np.array([[1, 0, -1, 2, 4]])
    for dtype in filter(None, library.dtypes):
        x = filled_array((7, 5), dtype)
        theirs, indices = library.put(x), library.put(places)
        expect(library, gpuops.gather(theirs, indices), x[places])
        expect(library, gpuops.gather(theirs, indices[1:3], axis=1), x[:, places[1:3]])
        expect(library, gpuops.take(theirs, indices), x.take(places))
        expect(
            library,
            gpuops.take_along_axis(theirs, library.put(columns), 1),
            np.take_along_axis(x, np.repeat(columns, 7, axis=0), 1),
        )


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "complex32"])
def test_torch_dtypes_that_numpy_has_no_word_for(torch, gpuops, name):
    dtype = getattr(torch, name)
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int32
    raw = torch.arange(35, dtype=bits, device="cuda").reshape(7, 5)
    x = raw.view(dtype)
    try:
        x.__dlpack__(max_version=(1, 3))
    except (BufferError, RuntimeError):
        pytest.skip("this torch cannot export it")
    indices = torch.tensor([6, 0, -1], device="cuda")
    for result in (gpuops.gather(x, indices), gpuops.gather(x, indices, out=x[:3].clone())):
        assert result.dtype is dtype
        assert result.view(bits).tolist() == raw[[6, 0, 6]].tolist()


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_every_index_dtype(library, gpuops, dtype):
    x = filled_array((100, 3), "f4")
    places = np.array([[99, 0, 7], [50, 98, 1]], dtype)
    theirs, indices = library.put(x), library.put(places)
    expect(library, gpuops.gather(theirs, indices), x[places])
    for mode in ("wrap", "clip", "fill"):
        far = np.array([99, np.iinfo(dtype).max, np.iinfo(dtype).min, 100], dtype)
        expect(
            library,
            gpuops.gather(theirs, library.put(far), mode=mode),
            reference.gather(x, far, 0, mode),
        )
    filled = gpuops.gather(theirs, library.put(far), mode="fill", fill_value=2.5)
    expect(library, filled, reference.gather(x, far, 0, "fill", 2.5))


SHAPES = [
    ((), (), 0), ((), (3,), None), ((5,), (), 0), ((5,), (0,), 0), ((5,), (2, 3), 0),
    ((0,), (0,), 0), ((3, 0), (2,), 0), ((4, 3, 2), (), 1), ((4, 3, 2), (2, 2), 1),
    ((4, 3, 2), (5,), -1), ((4, 3, 2), (5,), None), ((0, 4), (2,), 1), ((1, 1), (1,), 0),
]  # fmt: skip


@pytest.mark.parametrize("shape, index_shape, axis", SHAPES)
def test_shapes(library, gpuops, shape, index_shape, axis):
    x = filled_array(shape, "f4")
    flat = x.reshape(-1) if axis is None or not shape else x
    size = flat.shape[axis or 0]
    places = (
        np.random.default_rng(0).integers(-size, size, index_shape)
        if size
        else np.zeros(index_shape, np.int64)
    )
    expected = reference.gather(x, places, axis)
    expect(library, gpuops.gather(library.put(x), library.put(places), axis=axis), expected)
    expect(library, gpuops.gather(library.put(x), places, axis=axis), expected)


VIEWS = {
    "transposed": lambda a: a.T,
    "steps": lambda a: a[::2],
    "columns": lambda a: a[:, 1:7:3],
    "shifted": lambda a: a[1:, 2:],
    "one column": lambda a: a[:, 3:4],
}
BACKWARD = {
    "rows": lambda a: a[::-1],
    "columns": lambda a: a[:, ::-2],
    "both": lambda a: a[::-3, ::-1].T,
}


@pytest.mark.parametrize("dtype", ["u1", "f4", "c16"])
@pytest.mark.parametrize("name", VIEWS)
def test_strided_arrays(library, gpuops, name, dtype):
    x, places = filled_array((9, 8), dtype), np.array([0, 5, 1, 5, -1, 3, 0, 2])
    if name == "transposed" and isinstance(library, Numba):
        pytest.skip("Numba copies to transpose")
    if isinstance(library, Jax):
        pytest.skip("JAX has no views")
    view = VIEWS[name]
    for axis in (0, 1):
        at = places % view(x).shape[axis]
        result = gpuops.gather(view(library.put(x)), library.put(at)[::2], axis=axis)
        expect(library, result, view(x).take(at[::2], axis=axis))
    along = library.put(np.zeros((1, 1), int))
    expect(library, gpuops.take_along_axis(view(library.put(x)), along, 0), view(x)[:1])


@pytest.mark.parametrize("name", BACKWARD)
def test_negative_strides(cupy, gpuops, name):
    library, view = CuPy(cupy, gpuops), BACKWARD[name]
    x, places = filled_array((9, 8), "i4"), np.array([2, 0, -1])
    theirs, indices = view(library.put(x)), library.put(places)
    expect(library, gpuops.gather(theirs, indices[::-1]), view(x)[places[::-1]])
    expect(library, gpuops.gather(theirs, indices, axis=1), view(x)[:, places])
    out = library.put(np.zeros((4, 20), "i4"))
    target = out[:3, ::-1][:, : theirs.shape[1]]
    assert gpuops.gather(theirs, indices, out=target) is target
    assert (library.get(target) == view(x)[places]).all()
    assert not library.get(out[3]).any()


def test_repeated_elements(torch, cupy, gpuops):
    """Strides of zero, in and out."""
    row = torch.arange(4.0, device="cuda")
    result = gpuops.gather(row.expand(1000, 4), torch.tensor([999, 0], device="cuda"))
    assert result.tolist() == [[0, 1, 2, 3]] * 2
    result = gpuops.gather(row, torch.tensor(2, device="cuda").expand(3, 2))
    assert result.tolist() == [[2, 2]] * 3
    with pytest.raises(ValueError, match="share memory with each other"):
        gpuops.gather(row, torch.tensor([1, 2, 3], device="cuda"), out=row[:1].expand(3))
    column = cupy.broadcast_to(cupy.arange(3)[:, None], (3, 5))
    assert gpuops.gather(column, [2, 1]).tolist() == [[2] * 5, [1] * 5]


def test_out(writable, gpuops):
    x, places = filled_array((7, 5), "f4"), np.array([3, -1, 0])
    theirs, indices = writable.put(x), writable.put(places)
    out = writable.put(np.zeros((3, 5), "f4"))
    assert gpuops.gather(theirs, indices, out=out) is out
    same(np.array(writable.get(out)), x[places])
    assert gpuops.take(theirs, indices, 0, out, "clip") is out
    same(np.array(writable.get(out)), x.take(places, 0, mode="clip"))
    around = writable.put(np.full((6, 10), 9, "f4"))
    target = around[::2, 1:10:2]
    assert gpuops.gather(theirs, indices, out=target) is target
    expected = np.full((6, 10), 9, "f4")
    expected[::2, 1:10:2] = x[places]
    same(np.array(writable.get(around)), expected)


def test_out_overlaps(writable, gpuops):
    """Operands that overlap act as if they had been copied first."""
    x, places = np.arange(10.0), np.array([0, 1, 2, 3, 4])
    theirs = writable.put(x)
    gpuops.gather(theirs, writable.put(places), out=theirs[2:7])
    expected = x.copy()
    expected[2:7] = x[places]
    same(np.array(writable.get(theirs)), expected)


def test_wrong_out(writable, gpuops):
    x, indices = writable.put(np.arange(5.0)), writable.put(np.array([1, 2]))
    for out, error, text in [
        (
            writable.put(np.zeros(3)),
            ValueError,
            "out has shape (3,), and the result has shape (2,)",
        ),
        (writable.put(np.zeros(2, "f4")), TypeError, "out has dtype float32"),
        (np.zeros(2), TypeError, "out"),
        ([0.0, 0.0], TypeError, "out"),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            gpuops.gather(x, indices, out=out)


def test_mixed_with_the_host_and_with_device_arrays(library, gpuops):
    x, places = np.arange(35, dtype="f4").reshape(7, 5), np.array([3, -1, 0])
    theirs, indices = library.put(x), library.put(places)
    ours, our_indices = gpuops.to_device(x), gpuops.to_device(places)
    expect(library, gpuops.gather(theirs, places), x[places])
    expect(library, gpuops.gather(theirs, places.tolist()), x[places])
    expect(library, gpuops.gather(theirs, our_indices), x[places])
    expect(library, gpuops.gather(x, indices), x[places])
    expect(library, gpuops.gather(x.tolist(), indices), x.astype("f8")[places])
    expect(library, gpuops.gather(theirs, 2), x[2])
    result = gpuops.gather(ours, indices)
    assert isinstance(result, gpuops.DeviceArray)
    same(result.to_host(), x[places])
    out = gpuops.empty((3, 5), "f4")
    assert gpuops.gather(theirs, indices, out=out) is out
    same(out.to_host(), x[places])
    with pytest.raises(ValueError, match="cpu"):
        gpuops.gather(theirs, indices, device="cpu")


def test_mixed_libraries(torch, cupy, jax, numba, gpuops):
    """The first operand on the device decides of what kind the result is."""
    x, places = filled_array((7, 5), "f4"), np.array([3, -1, 0])
    modules = {"torch": torch, "cupy": cupy, "jax": jax, "numba": numba}
    libraries = [LIBRARIES[name](module, gpuops) for name, module in modules.items()]
    for first in libraries:
        for second in libraries:
            expect(first, gpuops.gather(first.put(x), second.put(places)), x[places])
            if second.has_out:
                out = second.put(np.zeros((3, 5), "f4"))
                assert gpuops.gather(first.put(x), places, out=out) is out
                same(np.array(second.get(out)), x[places])


def test_host_tensors_come_back_as_their_kind(torch, jax, gpuops):
    x, places = filled_array((7, 5), "f4"), np.array([3, -1, 0])
    tensor, indices = torch.from_numpy(x), torch.from_numpy(places)
    for result in (
        gpuops.gather(tensor, indices),
        gpuops.gather(tensor, places, device="cpu"),
        gpuops.gather(tensor, indices, device="cuda"),
    ):
        assert isinstance(result, torch.Tensor) and result.device.type == "cpu"
        same(result.numpy(), x[places])
    out = torch.zeros(3, 5)
    assert gpuops.gather(tensor, indices, out=out) is out
    same(out.numpy(), x[places])
    assert gpuops.gather(tensor.cuda(), indices).device.type == "cuda"
    with pytest.raises(IndexError, match="^index 9 is out of bounds for axis 0 with size 7$"):
        gpuops.gather(tensor, torch.tensor([0, 9]))
    on_cpu = jax.devices("cpu")[0]
    result = gpuops.gather(jax.device_put(x, on_cpu), jax.device_put(places, on_cpu))
    assert isinstance(result, jax.Array) and result.devices() == {on_cpu}
    same(np.asarray(result), x[places])


def test_a_bad_index_is_raised_once_and_the_library_lives_on(library, gpuops):
    x = np.arange(1.0, 16).reshape(5, 3)
    theirs, expected = library.put(x), x[[4, 0, 1]]
    expected[1] = 0
    for bad in (99, -6, 2**40):
        result = gpuops.gather(theirs, library.put(np.array([4, bad, 1])))
        with pytest.raises(IndexError, match="^" + re.escape(late(bad, 0, 5)) + "$"):
            gpuops.synchronize()
        gpuops.synchronize()
        expect(library, result, expected)
        assert library.total(library.put(x)) == x.sum()
        expect(library, gpuops.gather(theirs, [1]), x[[1]])
    gpuops.take_along_axis(theirs, library.put(np.array([[0, 1, 5]])), 0)
    with pytest.raises(IndexError, match=re.escape(late(5, 0, 5, "take_along_axis"))):
        gpuops.synchronize()


def test_wrong_indices(library, gpuops):
    theirs = library.put(np.arange(5.0))
    with pytest.raises(IndexError, match="integer"):
        gpuops.gather(theirs, library.put(np.array([1.0, 2.0])))
    with pytest.raises(TypeError, match="bool"):
        gpuops.gather(theirs, library.put(np.array([True, False, True, False, True])))
    with pytest.raises(np.exceptions.AxisError):
        gpuops.gather(theirs, library.put(np.array([1])), axis=1)
    with pytest.raises(ValueError, match="clipmode"):
        gpuops.gather(theirs, library.put(np.array([1])), mode="nearest")
    with pytest.raises(TypeError, match="would lose its value"):
        gpuops.gather(library.put(np.arange(5)), [1], mode="fill", fill_value=0.5)


def test_gradients(torch, gpuops):
    """A result that lost its gradient in silence would be wrong; torch's own DLPack refuses too."""
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = torch.ones(3, device="cuda")
    for call in (
        lambda: gpuops.gather(x, [0]),
        lambda: gpuops.gather(x * 2, [0]),
        lambda: gpuops.gather(torch.nn.Parameter(y), [0]),
        lambda: gpuops.gather(y, [0], out=x[:1]),
        lambda: gpuops.asarray(x),
        lambda: gpuops.from_dlpack(x),
    ):
        with pytest.raises(BufferError, match="detach"):
            call()
    assert gpuops.gather(x.detach(), [0]).tolist() == [1]
    with torch.inference_mode():
        assert gpuops.gather(torch.ones(3, device="cuda"), [0]).tolist() == [1]


def test_torch_tensors_that_are_not_what_their_memory_says(torch, gpuops):
    """Conjugates and negatives that torch puts off, sparse, meta: right, or refused."""
    z = torch.tensor([1 + 2j, 3 - 4j], device="cuda")
    for lazy in (z.conj(), z.conj().imag, z.conj().reshape(2, 1)):
        try:
            result = gpuops.gather(lazy, [1, 0])
        except (BufferError, TypeError, ValueError):
            continue
        assert result.tolist() == lazy[[1, 0]].tolist()
    for strange in (
        torch.eye(3, device="cuda").to_sparse(),
        torch.eye(3, device="cuda").to_sparse_csr(),
        torch.ones(3, device="meta"),
    ):
        with pytest.raises((BufferError, TypeError, ValueError, RuntimeError)):
            gpuops.gather(strange, [0])
    assert gpuops.gather(z, [1]).tolist() == [3 - 4j]


def test_subclasses(torch, gpuops):
    class Tensor(torch.Tensor):
        pass

    x = torch.arange(5.0, device="cuda").as_subclass(Tensor)
    result = gpuops.gather(x, torch.tensor([3, 1], device="cuda"))
    assert isinstance(result, torch.Tensor) and result.tolist() == [3, 1]


# Memory is shared, not copied.


def test_their_view_of_ours(library, gpuops):
    x = filled_array((50, 3), "f4")
    d = gpuops.to_device(x)
    view = library.view(d)
    assert library.pointer(view) == d.ptr
    same(np.array(library.get(view)), x)
    part = library.view(d[10:20:2]) if not isinstance(library, Jax) else library.view(d[10:20])
    expected = x[10:20:2] if not isinstance(library, Jax) else x[10:20]
    same(np.array(library.get(part)), expected)
    if library.has_out:
        d.fill(7)
        gpuops.synchronize()
        assert (library.get(view) == 7).all()
        view[3:5] = 8
        assert (d.to_host()[2:6, 0] == [7, 8, 8, 7]).all()


def test_our_view_of_theirs(library, gpuops):
    x = filled_array((50, 3), "f4")
    theirs = library.put(x)
    d = gpuops.asarray(theirs)
    assert isinstance(d, gpuops.DeviceArray) and d.ptr == library.pointer(theirs)
    assert (d.shape, d.strides, d.dtype, d.device) == (x.shape, x.strides, x.dtype, 0)
    same(d.to_host(), x)
    assert gpuops.asarray(d) is d
    copied = gpuops.asarray(theirs, copy=True)
    assert copied.ptr != d.ptr
    same(copied.to_host(), x)
    if not isinstance(library, Numba):
        assert gpuops.from_dlpack(theirs).ptr == library.pointer(theirs)
        assert gpuops.from_dlpack(theirs, copy=True).ptr != library.pointer(theirs)
    if library.has_out:
        d.fill(7)
        gpuops.synchronize()
        assert (library.get(theirs) == 7).all()
        theirs[0] = 9
        assert d.to_host()[:2, 0].tolist() == [9, 7]
    with pytest.raises(TypeError, match="dtype"):
        gpuops.asarray(theirs, dtype="f8")


def test_kernels_take_theirs(library, cuda_device, gpuops):
    x, y = random_pair(1000)
    expected = np.float32(2) * x + y
    kernel, theirs = saxpy_module(cuda_device)["saxpy"], library.put(x)
    result = library.put(y) if library.has_out else gpuops.to_device(y)
    kernel[4, 256](2, theirs, result, 1000)
    gpuops.synchronize()
    result = library.get(result) if library.has_out else result.to_host()
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    same(np.array(library.get(theirs)), x)


def test_strided_views_of_theirs(cupy, torch, gpuops):
    x = filled_array((6, 8), "i4")
    for view in (*VIEWS.values(), *BACKWARD.values()):
        theirs = view(cupy.asarray(x))
        d = gpuops.asarray(theirs)
        assert d.strides == theirs.strides and d.ptr == theirs.data.ptr
        same(d.to_host(), np.ascontiguousarray(view(x)))
        same(d.copy().to_host(), np.ascontiguousarray(view(x)))
        assert cupy.from_dlpack(d).strides == theirs.strides
    for view in VIEWS.values():
        theirs = view(torch.from_numpy(x).cuda())
        d = gpuops.asarray(theirs)
        assert d.strides == tuple(4 * step for step in theirs.stride())
        same(d.to_host(), np.ascontiguousarray(view(x)))


def test_memory_lives_as_long_as_anybody_uses_it(library, gpuops):
    x = filled_array(100_000, "f4")
    d = gpuops.to_device(x)
    view = library.view(d)
    del d
    junk = [gpuops.zeros(100_000, "f4") for _ in range(20)]
    same(np.array(library.get(view)), x)
    del junk, view
    theirs = library.put(x)
    d = gpuops.asarray(theirs)[1:]
    del theirs
    junk = [library.put(x * 0) for _ in range(20)]
    same(d.to_host(), x[1:])
    del junk
    result = gpuops.gather(library.put(x), [5, 6])
    junk = [gpuops.zeros(2, "f4") for _ in range(20)] + [library.put(x[:2] * 0) for _ in range(20)]
    expect(library, result, x[5:7])
    del junk


def test_memory_is_given_back(library, gpuops):
    library.view(gpuops.zeros(1 << 20, "u1"))
    before = used_bytes(gpuops)
    d = gpuops.zeros(1 << 20, "u1")
    views = [library.view(d) for _ in range(5)]
    rows = library.view(d.reshape(1024, 1024)[5:])
    for view in (*views, rows):
        library.get(view)
    del d, view
    assert used_bytes(gpuops) >= before + (1 << 20)
    del views, rows
    # JAX frees on a thread of its own.
    deadline = time.monotonic() + 5
    while used_bytes(gpuops) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert used_bytes(gpuops) == before


class Interface:
    """An owner of memory that speaks __cuda_array_interface__ and nothing else."""

    def __init__(self, owner, read_only=False, **changes):
        self.owner = owner
        given = dict(owner.__cuda_array_interface__)
        given["data"] = (given["data"][0], read_only)
        self.__cuda_array_interface__ = {**given, **changes}


def test_read_only_stays_read_only(cupy, gpuops):
    theirs = cupy.arange(6.0)
    d = gpuops.asarray(Interface(theirs, read_only=True))
    for array in (d, d[1:], d.reshape(2, 3)):
        with pytest.raises(ValueError, match="read-only"):
            array.fill(0)
        assert array.__cuda_array_interface__["data"][1] is True
        # A capsule without flags could not say so.
        with pytest.raises(BufferError, match="read"):
            array.__dlpack__()
        array.__dlpack__(max_version=(1, 0))
    with pytest.raises(ValueError, match="read-only"):
        gpuops.gather(theirs, cupy.arange(6), out=d)
    assert not gpuops.asarray(theirs).__cuda_array_interface__["data"][1]
    d.copy().fill(0)
    assert gpuops.gather(d, [5]).to_host() == [5]
    assert theirs.tolist() == [0, 1, 2, 3, 4, 5]


def test_memory_of_torchs_allocator(torch, gpuops):
    """torch in, torch out: the result comes from torch's allocator and nothing from ours."""
    x = torch.zeros(1 << 16, 64, device="cuda")
    indices = torch.arange(1 << 14, device="cuda")
    gpuops.gather(x, indices)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), gpuops.memory_info().used
    result = gpuops.gather(x, indices)
    grown = torch.cuda.memory_allocated() - before[0]
    assert result.nbytes <= grown < 2 * result.nbytes
    assert gpuops.memory_info().used == before[1]
    assert gpuops.gather(x, indices, out=result) is result
    assert torch.cuda.memory_allocated() - before[0] == grown
    del result
    assert torch.cuda.memory_allocated() == before[0]
    with pytest.raises((MemoryError, RuntimeError, BufferError), match="memory"):
        gpuops.gather(x, torch.zeros(1, dtype=torch.int8, device="cuda").expand(1 << 34))
    assert torch.cuda.memory_allocated() == before[0]
    assert gpuops.gather(x, indices).shape == (1 << 14, 64)


# Streams.

SPIN = r"""
extern "C" __global__
void spin_and_write(long long cycles, float *data, long long count, float value)
{
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
    for (long long i = threadIdx.x; i < count; i += blockDim.x) data[i] = value;
}
"""


@pytest.fixture(scope="session")
def spin_and_write(cupy):
    """Queues a slow kernel on CuPy's current stream, which then writes to a CuPy array."""
    kernel = cupy.RawKernel(SPIN, "spin_and_write")

    def launch(array, value, cycles=SLOW):
        arguments = (np.int64(cycles), array, np.int64(array.size), np.float32(value))
        kernel((1,), (256,), arguments)

    launch(cupy.zeros(1, "f4"), 1, cycles=1)
    return launch


class Handle:
    """A stream of a library that does not say so itself."""

    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return (0, self.handle)


def test_work_runs_on_torchs_current_stream(torch, gpuops):
    x, y = torch.zeros(1000, device="cuda"), torch.arange(1000.0, device="cuda")
    indices, out = torch.arange(999, -1, -1, device="cuda"), torch.zeros(1000, device="cuda")
    gpuops.gather(x, indices, out=out)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for cycles in (1, SLOW):  # what torch does for the first time may wait
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
            x.copy_(y)
            result = gpuops.gather(x, indices)
            gpuops.gather(x, indices, out=out)
            after = result + out
            assert cycles == 1 or not side.query(), "the call waited"
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    side.synchronize()
    assert (result == y.flip(0)).all() and (after == 2 * y.flip(0)).all()


def test_a_tensor_that_is_taken_over_brings_its_stream(torch, gpuops):
    x, y = torch.zeros(1000, device="cuda"), torch.arange(1000.0, device="cuda")
    gpuops.gather(gpuops.asarray(x), [0])
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
        x.copy_(y)
        arrays = [gpuops.asarray(x), gpuops.from_dlpack(x)]
    results = [gpuops.gather(array, np.arange(1000)) for array in arrays]
    other = gpuops.Stream()
    results += [gpuops.gather(array, np.arange(1000), stream=other) for array in arrays]
    for result in results:
        assert (result.to_host() == np.arange(1000)).all()


def test_a_stream_argument_beside_torchs_current_stream(torch, gpuops):
    """The call waits for what torch has queued, and what torch queues next waits for the call."""
    y = torch.arange(1000.0, device="cuda")
    indices = torch.arange(999, -1, -1, device="cuda")
    ours = gpuops.Stream()
    for _ in range(2):
        x = torch.zeros(1000, device="cuda")
        gpuops.gather(x, indices, stream=ours)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW)
        x.copy_(y)
        with torch.cuda.stream(torch.cuda.ExternalStream(ours.ptr)):
            torch.cuda._sleep(SLOW)
        result = gpuops.gather(x, indices, stream=ours)
        x.zero_()
        assert (result.cpu() == y.cpu().flip(0)).all()
        # Memory that torch hands out again while the call still reads it.
        x = y.clone()
        with torch.cuda.stream(torch.cuda.ExternalStream(ours.ptr)):
            torch.cuda._sleep(SLOW)
        result = gpuops.gather(x, indices, stream=ours)
        del x
        torch.zeros(1000, device="cuda")
        assert (result == y.flip(0)).all()


def test_torch_works_on_our_streams(torch, gpuops):
    stream = gpuops.Stream()
    side = torch.cuda.ExternalStream(stream.ptr)
    x, y = torch.zeros(1000, device="cuda"), torch.arange(1000.0, device="cuda")
    d = gpuops.zeros(1000, "f4", stream=stream)
    indices = gpuops.to_device(np.arange(1000), stream=stream)
    view = torch.from_dlpack(d)
    gpuops.gather(x, indices)
    gpuops.gather(d, indices)
    torch.cuda.synchronize()
    with torch.cuda.stream(side), stream:
        assert gpuops.current_stream() == stream
        torch.cuda._sleep(SLOW)
        x.copy_(y)
        view.copy_(y)
        result = gpuops.gather(x, indices)
        ours = gpuops.gather(d, indices)
        assert ours.stream == stream and not stream.query()
    assert gpuops.current_stream() != stream
    assert (ours.to_host() == np.arange(1000)).all()
    side.synchronize()
    assert (result == y).all()


def test_cupys_current_stream(cupy, spin_and_write, gpuops):
    x = cupy.zeros(1000, "f4")
    gpuops.gather(x, [0])
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream()):
        cupy.cuda.runtime.deviceSynchronize()
        given = stream if hasattr(stream, "__cuda_stream__") else Handle(stream.ptr)
        with stream:
            # CuPy is asked for its array, and so orders its stream and ours.
            spin_and_write(x, 3)
            result = gpuops.gather(x, np.arange(1000))
            assert (cupy.asnumpy(result) == 3).all()
            # On CuPy's own stream all is in order, what it does next to the operands included.
            spin_and_write(x, 4)
            out = cupy.zeros(1000, "f4")
            gpuops.gather(x, np.arange(1000), out=out, stream=given)
            result = gpuops.gather(x, np.arange(1000), stream=given)
            spin_and_write(x, 5, cycles=1)
            assert (cupy.asnumpy(out) == 4).all() and (cupy.asnumpy(result) == 4).all()


def test_out_beside_cupys_current_stream(cupy, spin_and_write, gpuops):
    """The call is in order with what CuPy has queued on its stream and with what it queues next."""
    x, places = cupy.zeros(1000, "f4"), cupy.arange(999, -1, -1)
    ours, our_places = gpuops.to_device(np.arange(1000, dtype="f4")), gpuops.to_device(places.get())
    gpuops.gather(x, places, out=cupy.zeros(1000, "f4"))
    expected = np.arange(999, -1, -1, dtype="f4")
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream()):
        with stream:
            out = cupy.zeros(1000, "f4")
            cases = ((ours, our_places), expected), ((x, places), None)
            # What CuPy does for the first time on a stream may wait.
            for (operands, given), cycles in itertools.product(cases, (1, SLOW)):
                cupy.cuda.runtime.deviceSynchronize()
                spin_and_write(out, 9, cycles)
                spin_and_write(x, 4, cycles)
                assert gpuops.gather(*operands, out=out) is out
                spin_and_write(x, 5, cycles=1)
                copied = out.copy()
                assert cycles == 1 or not stream.done, "the call waited"
                same(cupy.asnumpy(copied), np.full(1000, 4, "f4") if given is None else given)
            # The default stream is behind: what is read may not be written to meanwhile.
            cupy.cuda.runtime.deviceSynchronize()
            spin_and_write(x, 6, cycles=1)
            with cupy.cuda.Stream.null:
                spin_and_write(cupy.zeros(1, "f4"), 0)
            result = gpuops.gather(x, places)
            spin_and_write(x, 7, cycles=1)
            assert (cupy.asnumpy(result) == 6).all()


def test_cupy_works_on_our_streams(cupy, spin_and_write, gpuops):
    with gpuops.Stream() as stream:
        d, indices = gpuops.zeros(1000, "f4"), gpuops.to_device(np.arange(1000))
        gpuops.gather(d, indices)
        with cupy.cuda.ExternalStream(stream.ptr):
            view = cupy.from_dlpack(d)
            spin_and_write(view, 3)
            result = gpuops.gather(d, indices)
            assert result.stream == stream == d.stream and not stream.query()
            assert (cupy.from_dlpack(result).get() == 3).all()
    assert (result.to_host() == 3).all()


def test_a_slow_kernel_on_another_stream_is_not_overtaken(cupy, spin_and_write, gpuops):
    one, other = gpuops.Stream(), gpuops.Stream()
    indices = gpuops.to_device(np.arange(1000))
    d = gpuops.zeros(1000, "f4", stream=one)
    gpuops.gather(d, indices, stream=other).to_host()
    for value in (1, 2):
        with cupy.cuda.ExternalStream(one.ptr):
            spin_and_write(cupy.from_dlpack(d), value)
        result = gpuops.gather(d, indices, stream=other)
        assert not one.query(), "the call waited"
        assert result.stream == other
        assert (result.to_host() == value).all()
    # The other way round: a write on one stream does not overtake a slow reader on another.
    with cupy.cuda.ExternalStream(other.ptr):
        spin_and_write(cupy.zeros(1, "f4"), 0)
    result = gpuops.gather(d, indices, stream=other)
    d.fill(9)
    again = gpuops.gather(d, indices, stream=one)
    assert (result.to_host() == 2).all() and (again.to_host() == 9).all()


def test_export_to_a_stream(cupy, torch, spin_and_write, gpuops):
    """__dlpack__(stream=...) makes the consumer's stream wait for ours."""
    ours = gpuops.Stream()
    d = gpuops.zeros(1000, "f4", stream=ours)
    side, torchs = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    for value in (1, 2, 3):
        with cupy.cuda.ExternalStream(ours.ptr):
            spin_and_write(cupy.from_dlpack(d), value)
        if value == 1:
            with side:
                assert (cupy.asnumpy(cupy.from_dlpack(d)) == 1).all()
        elif value == 2:
            with torch.cuda.stream(torchs):
                assert (torch.from_dlpack(d) == 2).all().item()
        else:
            # The interface names the stream, and CuPy waits for it.
            assert d.__cuda_array_interface__["stream"] == ours.ptr
            with side:
                assert (cupy.asnumpy(cupy.asarray(Interface(d))) == 3).all()


def test_streams_of_others(torch, cupy, numba, gpuops):
    numbas = numba.stream()
    streams = [
        torch.cuda.Stream(),
        cupy.cuda.Stream(non_blocking=True),
        Handle(cupy.cuda.Stream.null.ptr),
        Handle(1),
        Handle(2),
        numbas if hasattr(numbas, "__cuda_stream__") else Handle(int(numbas)),
    ]
    if hasattr(streams[1], "__cuda_stream__"):
        streams.append(cupy.cuda.Stream())
    else:
        streams[1] = Handle(streams[1].ptr)
    x, places = filled_array(1000, "f4"), np.arange(999, -1, -1)
    d, indices = gpuops.to_device(x), gpuops.to_device(places)
    for foreign in streams:
        stream = gpuops.Stream.from_external(foreign)
        handle = foreign.__cuda_stream__()[1]
        assert stream.ptr == (handle or 1) and stream.__cuda_stream__() == (0, stream.ptr)
        assert stream == gpuops.Stream.from_external(Handle(handle))
        assert hash(stream) == hash(gpuops.Stream.from_external(Handle(handle)))
        for given in (stream, foreign):
            result = gpuops.gather(d, indices, stream=given)
            assert result.stream == stream
            same(result.to_host(), x[places])
            # A bad index belongs to the stream, whoever brings it.
            gpuops.gather(d, [1000], stream=given)
            with pytest.raises(IndexError, match=re.escape(late(1000, 0, 1000))):
                stream.synchronize()
        with stream:
            same(gpuops.gather(d, indices).to_host(), x[places])
        stream.synchronize()
        assert stream.query()


def test_a_foreign_stream_is_kept_while_it_is_needed(torch, gpuops):
    x = np.arange(1000.0)
    theirs = torch.cuda.Stream()
    stream = gpuops.Stream.from_external(theirs)
    d = gpuops.to_device(x, stream=stream)
    del stream, theirs
    gc.collect()
    result = gpuops.gather(d, [5, 7])
    assert result.to_host().tolist() == [5, 7]


def test_cuda_core(cuda_core, gpuops):
    device = cuda_core.Device()
    device.set_current()
    theirs = device.create_stream()
    x = np.arange(1000.0)
    d = gpuops.to_device(x, stream=theirs)
    stream = gpuops.Stream.from_external(theirs)
    assert d.stream == stream and stream.ptr == int(theirs.handle)
    result = gpuops.gather(d, [5, 7], stream=theirs)
    theirs.sync()
    assert result.to_host().tolist() == [5, 7]
    ours = gpuops.Stream()
    back = device.create_stream(ours)
    assert int(back.handle) == ours.ptr
    result = gpuops.gather(d, [5, 7], stream=back)
    assert result.stream == ours
    back.sync()
    assert result.to_host().tolist() == [5, 7]


def test_cuda_bindings(cuda_device, gpuops):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    code, theirs = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    assert int(code) == 0
    stream = gpuops.Stream.from_external(Handle(int(theirs)))
    result = gpuops.gather(gpuops.to_device(np.arange(10.0), stream=stream), [3], stream=stream)
    assert result.to_host().tolist() == [3]
    del result, stream
    gc.collect()
    runtime.cudaStreamDestroy(theirs)


# Graphs.


def captured(torch, call):
    """What a call returns that runs while torch captures a graph, and the graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = call()
    return result, graph


def test_torch_captures_torch_tensors(torch, gpuops):
    x, places = torch.rand(1000, 8, device="cuda"), torch.arange(100, device="cuda")
    out = torch.zeros(100, 8, device="cuda")
    gpuops.gather(x, places, out=out)

    def call():
        first = gpuops.gather(x, places)
        gpuops.gather(first, places.flip(0), out=out)
        return first

    result, graph = captured(torch, call)
    for seed in range(5):
        torch.manual_seed(seed)
        x.copy_(torch.rand(1000, 8))
        places.copy_(torch.randperm(100))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, x[places])
        assert torch.equal(out, result[places.flip(0)])
    gpuops.synchronize()


@pytest.mark.parametrize("name", UNCAPTURED)
def test_other_threads_spoil_no_capture_of_torch(torch, gpuops, name):
    """torch captures in the mode in which CUDA forbids other threads what would spoil a capture."""
    host = np.random.default_rng(0).random(1 << 20)
    d = gpuops.to_device(host, stream=gpuops.Stream())
    x, places = torch.rand(1000, 8, device="cuda"), torch.arange(100, device="cuda")
    gpuops.gather(x, places)

    def call():
        first = gpuops.gather(x, places)
        run_threads([lambda: UNCAPTURED[name](gpuops, d, host)])
        return gpuops.gather(first, places)

    result, graph = captured(torch, call)
    places.copy_(torch.arange(99, -1, -1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, x[places][places])


def test_torch_captures_every_operator(torch, gpuops):
    """A replay takes what the operands hold by then, and leaves its result in the same memory."""
    x, y, target = (torch.rand(64, 64, device="cuda") for _ in range(3))
    places, weights = torch.randperm(64, device="cuda"), np.full((3, 3), 0.125, "f4")
    calls = {
        "take": lambda: gpuops.take(x, places, 1),
        "take_along_axis": lambda: gpuops.take_along_axis(x, places[None], 0),
        "add": lambda: gpuops.add(x, y),
        "multiply": lambda: gpuops.multiply(x, 2.5),
        "saxpy": lambda: gpuops.saxpy(2.5, x, y),
        "sigmoid": lambda: gpuops.sigmoid(x),
        "sigmoid_backward": lambda: gpuops.sigmoid_backward(x, y),
        "matmul": lambda: gpuops.matmul(x, y),
        "correlate": lambda: gpuops.correlate(x, weights),
        "correlate, weights there": lambda: gpuops.correlate(x, y[:31, :31]),
        "convolve": lambda: gpuops.convolve(x, np.arange(4096.0).reshape(64, 64), mode="wrap"),
        "scatter": lambda: gpuops.scatter(target, places, y),
        "scatter_add": lambda: gpuops.scatter_add(target, places, y),
        "scatter_add, in order": lambda: gpuops.scatter_add(target, places, y, deterministic=True),
    }
    for name, call in calls.items():
        call()
        result, graph = captured(torch, call)
        for _ in range(3):
            x.copy_(torch.rand(64, 64))
            places.copy_(torch.randperm(64))
            target.zero_()
            graph.replay()
            found = (target if result is None else result).clone()
            target.zero_()
            expected = call()
            assert torch.allclose(found, target if expected is None else expected), name
    gpuops.synchronize()


def test_host_operands_in_a_capture(torch, gpuops):
    """They are refused, and the capture goes on as if there had been no such call."""
    x, places = torch.arange(1000.0, device="cuda"), torch.arange(3, device="cuda")
    d, our_places = gpuops.to_device(np.arange(1000.0)), gpuops.to_device([5, 6, 7])
    old = [gpuops.zeros(size, "u1") for size in (100, 100_000, 8 * MEBIBYTE)]
    out = gpuops.zeros(3)
    gpuops.gather(x, places)
    gpuops.gather(d, our_places, out=out)

    def call():
        stream = torch.cuda.current_stream()
        for bad in (
            lambda: gpuops.gather(x, [1, 2, 3]),
            lambda: gpuops.gather(x, np.array([1, 2, 3])),
            lambda: gpuops.gather(d, np.arange(6)[::2], out=out, stream=stream),
            lambda: gpuops.gather(np.arange(1000.0), places),
            lambda: gpuops.gather(np.arange(1000.0), our_places, out=out, stream=stream),
        ):
            with pytest.raises(ValueError, match="captur"):
                bad()
        old.clear()
        gpuops.gather(d, our_places, out=out, stream=stream)
        return gpuops.gather(x, places)

    result, graph = captured(torch, call)
    places += 10
    out.fill(0)
    gpuops.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [10, 11, 12] and out.to_host().tolist() == [5, 6, 7]
    assert gpuops.gather(d, [1, 2]).to_host().tolist() == [1, 2]


BLOCKING_CAPTURE = """
import torch, gpuops
x, places = torch.arange(1.0, 6.0, device="cuda"), torch.arange(3, device="cuda")
d, our_places, out = gpuops.zeros(5), gpuops.to_device([1, 2]), gpuops.zeros(2)
gpuops.gather(x, places)
gpuops.gather(d, our_places, out=out)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = gpuops.gather(x, places)
    gpuops.gather(d, our_places, out=out, stream=torch.cuda.current_stream())
places += 2
graph.replay()
torch.cuda.synchronize()
assert result.tolist() == [3, 4, 5]
places += 1
graph.replay()
torch.cuda.synchronize()
try:
    gpuops.synchronize()
except IndexError as error:
    print(str(error).partition(" (")[0])
try:
    gpuops.gather(x, places)
except IndexError as error:
    print(error)
"""


def test_launch_blocking_in_a_capture(torch, gpuops):
    environment = {"GPUOPS_LAUNCH_BLOCKING": "1", "PYTHONWARNINGS": "ignore"}
    text = "index 5 is out of bounds for axis 0 with size 5\n"
    assert run_child(gpuops, BLOCKING_CAPTURE, timeout=120, **environment) == 2 * text


def test_torch_captures_device_arrays(torch, gpuops):
    generator = np.random.default_rng(0)
    x, places = gpuops.zeros((1000, 8), "f4"), gpuops.zeros(100, "i8")
    out, picked = gpuops.zeros((100, 8), "f4"), gpuops.zeros((100, 2), "f4")
    columns = gpuops.to_device([7, 0])

    def call():
        stream = torch.cuda.current_stream()
        gpuops.gather(x, places, out=out, stream=stream)
        gpuops.take(out, columns, 1, picked, stream=stream)

    call()
    _, graph = captured(torch, call)
    theirs, their_places = torch.from_dlpack(x), torch.from_dlpack(places)
    for _ in range(5):
        values = generator.random((1000, 8), dtype=np.float32)
        indices = generator.integers(-1000, 1000, 100)
        theirs.copy_(torch.from_numpy(values))
        their_places.copy_(torch.from_numpy(indices))
        graph.replay()
        torch.cuda.synchronize()
        same(out.to_host(), values[indices])
        same(picked.to_host(), values[indices][:, [7, 0]])


def test_a_fresh_device_array_in_a_graph(torch, gpuops):
    x, places = gpuops.to_device(np.arange(1000.0)), gpuops.to_device(np.arange(100))
    their_places = torch.from_dlpack(places)
    gpuops.gather(x, places)

    def call():
        return gpuops.gather(x, places, stream=torch.cuda.current_stream())

    result, graph = captured(torch, call)
    for step in (1, 3, 9):
        their_places.copy_(step * torch.arange(100))
        graph.replay()
        torch.cuda.synchronize()
        assert (result.to_host() == step * np.arange(100)).all()
    del result
    graph.replay()
    torch.cuda.synchronize()
    del graph
    assert gpuops.gather(x, places).to_host()[99] == 891


def test_a_bad_index_in_a_replay(torch, gpuops):
    x, places = torch.arange(1.0, 6.0, device="cuda"), torch.zeros(3, dtype=torch.int32).cuda()
    gpuops.gather(x, places)
    result, graph = captured(torch, lambda: gpuops.gather(x, places))
    for bad in (5, -6):
        places.copy_(torch.tensor([4, bad, 0]))
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match=re.escape(late(bad, 0, 5))):
            gpuops.synchronize()
        gpuops.synchronize()
        assert result.tolist() == [5, 0, 1]
        places.fill_(2)
        graph.replay()
        gpuops.synchronize()
        assert result.tolist() == [3, 3, 3]


CAPTURED_WHERE_OTHERS_HAVE_NOTED = """
import torch, gpuops
x, bad, out = gpuops.zeros(5), gpuops.to_device([7]), gpuops.zeros(1)
for _ in range({count}):  # in all the places that hold bad indices
    gpuops.gather(x, bad, out=out, stream=gpuops.Stream())
stream, graph = gpuops.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(stream.ptr)):
    gpuops.gather(x, bad, out=out, stream=stream)
try:  # The graph has not run.
    gpuops.gather(x, bad, out=out, stream=stream)
    stream.synchronize()
except IndexError as error:
    print(error)
"""


def test_a_capture_that_never_runs_hides_no_bad_index(torch, gpuops):
    source = CAPTURED_WHERE_OTHERS_HAVE_NOTED.format(count=constant("stream.cu", "SLOTS") + 100)
    found = run_child(gpuops, source, timeout=120)
    assert found == late(7, 0, 5) + "\n"


def test_cupy_captures(cupy, gpuops):
    stream = cupy.cuda.Stream(non_blocking=True)
    given = gpuops.Stream.from_external(Handle(stream.ptr))
    with stream:  # which does not wait for another that has yet to fill them
        x, places, out = cupy.zeros(1000, "f4"), cupy.zeros(100, "i4"), cupy.zeros(100, "f4")
        ours, our_places = gpuops.asarray(x), gpuops.asarray(places)
    our_out = gpuops.zeros(100, "f4")

    def call():
        gpuops.gather(x, places, out=out, stream=given)
        gpuops.gather(ours, our_places, out=our_out, stream=given)

    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
    generator = np.random.default_rng(0)
    for _ in range(5):
        values = generator.random(1000, dtype=np.float32)
        indices = generator.integers(0, 1000, 100, dtype=np.int32)
        with stream:
            x.set(values)
            places.set(indices)
            graph.launch(stream)
        stream.synchronize()
        same(cupy.asnumpy(out), values[indices])
        same(our_out.to_host(), values[indices])
    with stream:
        places.fill(1000)
        graph.launch(stream)
    with pytest.raises(IndexError, match=re.escape(late(1000, 0, 1000))):
        gpuops.synchronize()
    gpuops.synchronize()


# Numba.


def test_numba_kernels_take_device_arrays(numba, gpuops):
    @numba.jit
    def add_to_each(data, step):
        place = numba.grid(1)
        if place < data.shape[0]:
            data[place] += step

    d = gpuops.to_device(np.arange(100.0))
    add_to_each[1, 128](d, 1)
    add_to_each[1, 128](d[::2], 10)
    add_to_each[1, 128](d[::-1], 100)
    expected = np.arange(100.0) + 101
    expected[::2] += 10
    assert (d.to_host() == expected).all()
    stream = gpuops.Stream()
    d = gpuops.zeros(100, "f8", stream=stream)
    add_to_each[1, 128, numba.external_stream(stream.ptr)](d, 5)
    assert (gpuops.gather(d, [0, 99], stream=stream).to_host() == 5).all()


def test_numba_arrays_with_a_stream(numba, gpuops):
    stream = numba.stream()
    x = np.arange(100_000.0)
    for _ in range(10):
        theirs = numba.to_device(x, stream=stream)
        result = gpuops.gather(theirs, np.arange(99_999, -1, -1))
        assert (result.to_host() == x[::-1]).all()


# Many times, and among the mistakes of others.


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


TRIPS = 100_000


@pytest.mark.parametrize("name", LIBRARIES)
def test_round_trips_leave_nothing(request, gpuops, name):
    """A hundred thousand of them, of which JAX and Numba take some ten seconds."""
    library = LIBRARIES[name](request.getfixturevalue(name), gpuops)
    d, theirs = gpuops.to_device(np.arange(16.0)), library.put(np.arange(16.0))
    pointers = d.ptr, library.pointer(theirs)

    def trips(count):
        made = 0
        while made < count:
            assert gpuops.asarray(library.view(d)).ptr == pointers[0]
            assert library.pointer(library.view(gpuops.asarray(theirs))) == pointers[1]
            made += 2
        return made

    trips(TRIPS // 100)
    used, resident = used_bytes(gpuops), resident_bytes()
    assert trips(TRIPS) == TRIPS
    assert used_bytes(gpuops) == used
    grown = resident_bytes() - resident
    assert grown < 4 * MEBIBYTE, f"{grown / TRIPS:.1f} bytes a trip"
    same(d.to_host(), np.arange(16.0))
    same(np.array(library.get(theirs)), np.arange(16.0))


def test_calls_leave_nothing(library, gpuops):
    x = library.put(np.arange(1000.0))
    good, bad = library.put(np.arange(100)), library.put(np.array([1, 1000]))
    count = 2_000 if isinstance(library, Jax) else 10_000

    def calls():
        for _ in range(count):
            gpuops.gather(x, good)
            gpuops.gather(x, bad, mode="clip")
        for _ in range(count // 10):
            gpuops.gather(x, bad)
            with pytest.raises(IndexError):
                gpuops.synchronize()
            with pytest.raises(ValueError):
                gpuops.gather(x, good, axis=3)

    calls()
    used, resident = used_bytes(gpuops), resident_bytes()
    calls()
    assert used_bytes(gpuops) == used
    assert resident_bytes() - resident < 4 * MEBIBYTE


def test_threads_with_streams_of_their_own(torch, gpuops):
    """GPUOPS_TEST_CALLS is the number of calls of each."""
    count = int(os.environ.get("GPUOPS_TEST_CALLS", 200))
    table = torch.rand(10_000, 16, device="cuda")
    errors = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                generator = torch.Generator(device="cuda").manual_seed(number)
                for _ in range(count):
                    indices = torch.randint(10_000, (300,), device="cuda", generator=generator)
                    result = gpuops.gather(table, indices)
                    assert torch.equal(result, table[indices])
        except BaseException as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def loaded_cudart():
    """The CUDA runtime that a library has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart.so" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[5])
    pytest.skip("no library has loaded a shared CUDA runtime")


def test_errors_of_others_are_left_to_them(torch, gpuops):
    x = torch.arange(5.0, device="cuda")
    d = gpuops.to_device(np.arange(5.0))
    cudart = loaded_cudart()
    cudart.cudaGetLastError()
    code = cudart.cudaSetDevice(9999)
    assert code != 0
    try:
        assert gpuops.gather(x, [3]).shape == (1,)
        assert gpuops.gather(d, [3]).to_host().tolist() == [3]
        gpuops.gather(d, [5])
        with pytest.raises(IndexError):
            gpuops.synchronize()
        with pytest.raises(MemoryError):
            gpuops.empty(1 << 50, "u1")
        assert cudart.cudaPeekAtLastError() == code
    finally:
        cudart.cudaGetLastError()
    # And ours are not left to others.
    assert cudart.cudaPeekAtLastError() == 0
    assert float(x.sum()) == 10


def test_a_launch_of_others_that_fails(cupy, gpuops):
    kernel = cupy.RawKernel(SPIN, "spin_and_write")
    x = cupy.zeros(4, "f4")
    arguments = (np.int64(0), x, np.int64(4), np.float32(1))
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        kernel((1,), (4096,), arguments)
    assert gpuops.gather(x, [3]).tolist() == [0]
    assert gpuops.to_device([1, 2]).to_host().tolist() == [1, 2]
    assert float(x.sum()) == 0


# Several GPUs.


@pytest.fixture
def two_gpus(gpuops):
    if gpuops.device_count() < 2:
        pytest.skip("there is one GPU")
    return gpuops


def test_two_gpus(two_gpus, torch):
    gpuops = two_gpus
    x, places = np.arange(1000.0), np.array([5, -1, 7])
    torch.cuda.set_device(0)
    first, second = gpuops.to_device(x), gpuops.to_device(x, device=1)
    indices = gpuops.to_device(places, device="cuda:1")
    assert (first.device, second.device, indices.device) == (0, 1, 1)
    assert second.__dlpack_device__() == (2, 1)
    for operands in ((second, indices), (second, places), (x, indices)):
        result = gpuops.gather(*operands)
        assert result.device == 1 and result.stream.device == 1
        same(result.to_host(), x[places])
        assert torch.cuda.current_device() == 0
    theirs = torch.from_numpy(x).to("cuda:1")
    result = gpuops.gather(theirs, torch.from_numpy(places).to("cuda:1"))
    assert result.device == torch.device("cuda:1") and result.tolist() == x[places].tolist()
    assert gpuops.asarray(theirs).device == 1
    assert torch.from_dlpack(second).device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    for operands in ((first, indices), (theirs, first), (theirs, torch.tensor([1]).cuda(0))):
        with pytest.raises(ValueError, match="cuda:0.*cuda:1|cuda:1.*cuda:0"):
            gpuops.gather(*operands)
    with pytest.raises(ValueError, match="cuda:1|device"):
        gpuops.gather(second, indices, device=0)
    with pytest.raises(ValueError):
        gpuops.gather(second, indices, out=gpuops.empty(3))
    with pytest.raises(ValueError):
        gpuops.gather(second, indices, stream=gpuops.Stream(0))
    with torch.cuda.device(1):
        assert gpuops.gather(first, places).device == 0
        assert torch.cuda.current_device() == 1
    # From one to the other.
    moved = gpuops.to_device(second, device=0)
    assert moved.device == 0
    same(moved.to_host(), x)
    same(gpuops.to_device(first[::-1], device=1).to_host(), x[::-1].copy())
    assert torch.cuda.current_device() == 0
    gpuops.gather(second, [1000])
    gpuops.synchronize(0)
    with pytest.raises(IndexError, match="index 1000 is out of bounds"):
        gpuops.synchronize(1)
    used = gpuops.memory_info(1).used
    del second, indices, result
    gc.collect()
    assert gpuops.memory_info(1).used < used


def test_every_gpu_works_at_once(two_gpus):
    gpuops = two_gpus
    x = np.arange(100_000.0)
    tables = [gpuops.to_device(x, device=number) for number in range(gpuops.device_count())]
    results = [
        gpuops.gather(table, np.arange(turn, 100_000, 7)) for turn in range(7) for table in tables
    ]
    for number, result in enumerate(results):
        same(result.to_host(), x[number // len(tables) :: 7])


# The end of the process.

PRELUDE = """
import atexit, threading
import numpy as np
{imports}
x = np.arange(1000.0)
"""

ENDS = {
    "torch": """
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    torch.cuda._sleep(100_000_000)
    results = [gpuops.gather(torch.zeros(1000, device="cuda"), [1, 2]) for _ in range(50)]
ours = gpuops.Stream.from_external(s)
d = gpuops.gather(gpuops.to_device(x), [5, 7], stream=s)
t = torch.from_dlpack(gpuops.to_device(x))
e = gpuops.asarray(torch.zeros(1000, device="cuda"))
class Late:
    def __del__(self):
        self.kept = None
late = Late()
late.kept = [gpuops.asarray(results[0]), torch.from_dlpack(d), d.__dlpack__()]
cycle = [late, d]
cycle.append(cycle)
atexit.register(lambda: gpuops.gather(t, [0]).cpu())
gpuops.gather(d, [99])
""",
    "torch, a graph": """
t, i = torch.zeros(1000, device="cuda"), torch.zeros(10, dtype=torch.int64, device="cuda")
d = gpuops.zeros(10)
gpuops.gather(t, i)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = gpuops.gather(t, i)
graph.replay()
""",
    "cupy": """
a = cupy.from_dlpack(gpuops.to_device(x))
b = gpuops.gather(cupy.asarray(x), [1, 2])
c = gpuops.asarray(cupy.zeros(10))
with gpuops.Stream() as s, cupy.cuda.ExternalStream(s.ptr):
    e = gpuops.gather(a, [3]) + 1
""",
    "jax": """
a = jax.dlpack.from_dlpack(gpuops.to_device(x.astype("f4")))
b = gpuops.gather(jax.numpy.arange(10), [1, 2])
c = gpuops.asarray(jax.numpy.arange(10))
""",
    "numba": """
from numba import cuda
a = cuda.as_cuda_array(gpuops.to_device(x))
b = gpuops.asarray(cuda.to_device(x))
c = gpuops.gather(b, [1, 2], stream=gpuops.Stream())
""",
}


@pytest.mark.parametrize("name", [*ENDS, "torch, imported last"])
def test_the_end_of_the_process(request, gpuops, name):
    """Silence, in whichever order the modules go away."""
    library, _, variation = name.partition(", ")
    request.getfixturevalue(library)
    imports = [f"import {library}", "import gpuops"]
    if variation == "imported last":
        imports.reverse()
        name = library
    source = PRELUDE.format(imports="\n".join(imports)) + ENDS[name]
    environment = {
        "PYTHONWARNINGS": "ignore",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    assert run_child(gpuops, source, timeout=120, **environment) == ""
