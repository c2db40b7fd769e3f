import contextlib
import threading
from typing import Any, Literal, NamedTuple, Self, TypeAlias, overload

from ._core import (
    DeviceError,
    DeviceLostError,
    ForkedProcessError,
    __version__,
    device_count,
    gather,
    hello,
    is_available,
    take,
    take_along_axis,
)

__all__ = [
    "Device",
    "DeviceError",
    "DeviceLostError",
    "ForkedProcessError",
    "__version__",
    "device",
    "device_count",
    "devices",
    "gather",
    "hello",
    "is_available",
    "show_config",
    "take",
    "take_along_axis",
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

def devices() -> list[Device]: ...
@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
