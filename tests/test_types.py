"""The type stubs: shipped, complete, and right about what comes back."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import package_parent

SNIPPET = """
from typing import Any, assert_type

import gpuops
import numpy as np
from numpy.typing import NDArray

class Tensor:  # an array of a library that speaks DLPack
    def __dlpack__(self, stream: int | None = None) -> object:
        return stream

    def __array__(self, dtype: Any = None) -> Any:
        return dtype

class OnlyCuda:  # one of a library that does not
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}

class OtherStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 1

x = np.zeros(3, np.float32)
out = np.zeros(2, np.float32)
indices = np.array([0, 1])
assert_type(gpuops.gather(x, indices), NDArray[np.float32])
assert_type(gpuops.gather(x, [1, 0], axis=None, mode="wrap"), NDArray[np.float32])
assert_type(gpuops.take(x, indices, 0, None, "clip"), NDArray[np.float32])
assert_type(gpuops.take_along_axis(x, indices), NDArray[np.float32])
assert_type(gpuops.device_count(), int)
assert_type(gpuops.is_available(), bool)
assert_type(gpuops.hello(), list[str])
gpuops.gather(x, indices, out=out).shape
gpuops.gather([1, 2], 0, device="cuda:1")
with gpuops.device("cpu"):
    pass

d = gpuops.to_device(x, device="cuda:1", stream=OtherStream())
assert_type(d, gpuops.DeviceArray)
assert_type(gpuops.empty((2, 3), np.float32), gpuops.DeviceArray)
assert_type(gpuops.zeros(5, dtype="i4", device=0), gpuops.DeviceArray)
assert_type(gpuops.asarray(OnlyCuda(), copy=False), gpuops.DeviceArray)
assert_type(gpuops.from_dlpack(Tensor()), gpuops.DeviceArray)
assert_type(gpuops.from_dlpack(d), gpuops.DeviceArray)
assert_type(d.to_host(), NDArray[Any])
assert_type(d.to_host(out=out), NDArray[np.float32])
assert_type(d.shape, tuple[int, ...])
assert_type(d.dtype, np.dtype[Any])
assert_type(d[0][1:2][...].reshape(2, -1).reshape((1, 2)).copy(), gpuops.DeviceArray)
assert_type(d.stream, gpuops.Stream)
assert_type(len(d), int)
d.fill(1.5)

assert_type(gpuops.gather(d, [1, 2]), gpuops.DeviceArray)
assert_type(gpuops.gather(d, d, axis=1), gpuops.DeviceArray)
assert_type(gpuops.gather(d, 0), gpuops.DeviceArray)
assert_type(gpuops.take(d, indices, 0, mode="clip"), gpuops.DeviceArray)
assert_type(gpuops.take_along_axis(d, indices), gpuops.DeviceArray)
assert_type(gpuops.gather(d, [1, 2], out=d), gpuops.DeviceArray)
assert_type(gpuops.gather(Tensor(), Tensor()), Tensor)
assert_type(gpuops.gather(Tensor(), 0), Tensor)
assert_type(gpuops.take(Tensor(), indices, 0), Tensor)
assert_type(gpuops.take_along_axis(Tensor(), d), Tensor)
assert_type(gpuops.gather(Tensor(), d, out=d), gpuops.DeviceArray)
gpuops.gather(OnlyCuda(), OnlyCuda()).shape
gpuops.gather(x, d).shape

with gpuops.Stream(priority=-1) as stream:
    assert_type(stream, gpuops.Stream)
    event = stream.record()
    assert_type(event, gpuops.Event)
    assert_type(event.elapsed_time(gpuops.Event()), float)
    assert_type(stream.query(), bool)
    stream.wait(event)
    gpuops.gather(d, d, stream=stream)
assert_type(gpuops.Stream.from_external(OtherStream()), gpuops.Stream)
assert_type(gpuops.current_stream(), gpuops.Stream)
gpuops.synchronize()
assert_type(gpuops.memory_info().free, int)
assert_type(gpuops.memory_limit(1 << 30), int | None)
gpuops.memory_limit(None)
gpuops.empty_cache()

assert_type(gpuops.pinned_empty((2, 3), np.float32, order="F"), NDArray[np.float32])
assert_type(gpuops.pinned_empty(5), NDArray[Any])
with gpuops.pinned_memory(), gpuops.pin(x) as locked:
    assert_type(locked, gpuops.pin)
    assert_type(locked.locked, bool)
gpuops.pin(b"bytes").release()

module = gpuops.compile("", options=["-DN=1"], name_expressions=("f",), headers={"a.h": ""})
assert_type(module, gpuops.Module)
assert_type(module.kernels, tuple[str, ...])
assert_type(module["f"], gpuops.Kernel)
assert_type(module.get_function("f").attributes.registers, int)
assert_type(module.get_global("g", dtype="f4"), gpuops.DeviceArray)
module["f"][1, (16, 16)](x, gpuops.In(d), gpuops.Out(out), gpuops.Pointer(0), 1.5)
module["f"][1, 256, stream, 1024](d)
module["f"].forall(1000, stream=stream)(d)
module["f"].launch((1, 2, 3), 32, d, stream=stream)
try:
    gpuops.compile("")
except gpuops.CompileError as error:
    assert_type(error.log, str)

gpuops.pin([1, 2])  # type: ignore[arg-type]
gpuops.compile(b"")  # type: ignore[arg-type]
gpuops.compile("", options=3)  # type: ignore[arg-type]
module["f"](d)  # type: ignore[operator]
gpuops.gather(x, indices, mode="foo")  # type: ignore[call-overload]
gpuops.gather(x, indices, nonsense=1)  # type: ignore[call-overload]
gpuops.gather(x=x, indices=indices)  # type: ignore[call-overload]
gpuops.gather(x)  # type: ignore[call-overload]
gpuops.gather(x, indices, axis="0")  # type: ignore[call-overload]
gpuops.device(1.5)  # type: ignore[arg-type]
gpuops.to_device(x, nonsense=1)  # type: ignore[call-arg]
gpuops.gather(d, d, stream=0)  # type: ignore[call-overload]
gpuops.from_dlpack(OnlyCuda())  # type: ignore[arg-type]
d.shape = (1,)  # type: ignore[misc]
d["name"]  # type: ignore[index]
gpuops.Stream("cuda", True)  # type: ignore[call-arg]
d[0] = 1  # type: ignore[assignment, index]
"""


def test_the_stubs_are_installed(gpuops):
    package = Path(gpuops.__path__[0])
    assert (package / "py.typed").is_file()
    for name in ("__init__.pyi", "_core.pyi"):
        ast.parse((package / name).read_text())


def names_in(path):
    body = ast.parse(path.read_text()).body
    # What is written in Python has its types in place, and its stub is an import.
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {
        name.name for node in imports if node.module in ("_jit", "_route") for name in node.names
    } | {
        node.name if not isinstance(node, ast.AnnAssign) else node.target.id
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign))
    }


def test_every_public_name_has_a_stub(gpuops):
    package = Path(gpuops.__path__[0])
    known = names_in(package / "__init__.pyi") | names_in(package / "_core.pyi")
    assert set(gpuops.__all__) <= known
    public = {name for name in vars(gpuops._core) if not name.startswith("__")}
    assert public <= names_in(package / "_core.pyi")


def test_every_public_name_has_documentation(gpuops):
    for name in gpuops.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(gpuops, name)), name
    assert np.lib.NumpyVersion(gpuops.__version__) >= "0.0.0"


def test_all_is_what_there_is(gpuops):
    for name in gpuops.__all__:
        assert hasattr(gpuops, name)
    assert len(set(gpuops.__all__)) == len(gpuops.__all__)
    expected = {
        "gather", "take", "take_along_axis", "hello", "is_available", "device_count", "devices",
        "show_config", "device", "DeviceError", "DeviceLostError", "ForkedProcessError",
        "DeviceArray", "to_device", "empty", "zeros", "asarray", "from_dlpack", "Stream", "Event",
        "synchronize", "current_stream", "memory_info", "MemoryInfo", "memory_limit", "empty_cache",
        "__version__", "compile", "CompileError", "Module", "Kernel", "In", "Out", "InOut",
        "Pointer",
    }  # fmt: skip
    assert expected <= set(gpuops.__all__)


def test_a_type_checker_agrees(cpu_device, tmp_path):
    pytest.importorskip("mypy")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(snippet)],
        env={"MYPYPATH": package_parent(cpu_device.gpuops), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
