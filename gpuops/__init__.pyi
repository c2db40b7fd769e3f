import contextlib
import threading
from typing import Any, Literal, NamedTuple, Self, TypeAlias, overload

from ._core import (
    DeviceArray,
    DeviceError,
    DeviceLostError,
    Event,
    ForkedProcessError,
    In,
    InOut,
    Kernel,
    MemoryInfo,
    Module,
    Out,
    Pointer,
    Stream,
    __version__,
    add,
    asarray,
    convolve,
    correlate,
    current_stream,
    device_count,
    empty,
    empty_cache,
    from_dlpack,
    gather,
    hello,
    is_available,
    matmul,
    memory_info,
    memory_limit,
    multiply,
    pin,
    pinned_empty,
    saxpy,
    scatter,
    scatter_add,
    sigmoid,
    sigmoid_backward,
    synchronize,
    take,
    take_along_axis,
    to_device,
    zeros,
)
from ._jit import CompileError, compile  # noqa: A004
from ._route import explain, last_route

__all__ = [
    "CompileError",
    "Device",
    "DeviceArray",
    "DeviceError",
    "DeviceLostError",
    "Event",
    "ForkedProcessError",
    "In",
    "InOut",
    "Kernel",
    "MemoryInfo",
    "Module",
    "Out",
    "Pointer",
    "Stream",
    "__version__",
    "add",
    "asarray",
    "compile",
    "convolve",
    "correlate",
    "current_stream",
    "device",
    "device_count",
    "devices",
    "empty",
    "empty_cache",
    "explain",
    "from_dlpack",
    "gather",
    "hello",
    "is_available",
    "last_route",
    "matmul",
    "memory_info",
    "memory_limit",
    "multiply",
    "pin",
    "pinned_empty",
    "pinned_memory",
    "saxpy",
    "scatter",
    "scatter_add",
    "show_config",
    "sigmoid",
    "sigmoid_backward",
    "synchronize",
    "take",
    "take_along_axis",
    "to_device",
    "zeros",
]

_Device: TypeAlias = str | int | None

class Device(NamedTuple):
    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int

class device(contextlib.ContextDecorator, threading.local):  # noqa: N801
    def __init__(self, spec: _Device) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class pinned_memory(contextlib.ContextDecorator):  # noqa: N801
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

def devices() -> list[Device]: ...
@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def load_ipython_extension(shell: Any) -> None: ...
