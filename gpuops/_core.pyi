# The signatures are those of kernels/ops.def; `python -m mypy.stubtest gpuops` compares them.
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar, overload

from numpy import generic, integer, ndarray
from numpy.typing import ArrayLike, NDArray

_Item = TypeVar("_Item", bound=generic)
_Out = TypeVar("_Out", bound=ndarray[Any, Any])
_Device: TypeAlias = str | int | None
_Mode: TypeAlias = Literal["raise", "wrap", "clip", "fill"]
_Index: TypeAlias = int | integer[Any]

class _Stream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

__version__: str

class DeviceError(RuntimeError):
    code: int
    name: str
    operator: str

class DeviceLostError(DeviceError): ...
class ForkedProcessError(RuntimeError): ...

# A single index gives a scalar or an array, as the shape decides, which no type tells: hence Any.
@overload
def gather(
    x: ArrayLike,
    indices: _Index,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _Stream | None = None,
) -> Any: ...
@overload
def gather(
    x: NDArray[_Item],
    indices: ArrayLike,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _Stream | None = None,
) -> NDArray[_Item]: ...
@overload
def gather(
    x: ArrayLike,
    indices: ArrayLike,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: _Out,
    device: _Device = None,
    stream: _Stream | None = None,
) -> _Out: ...
@overload
def gather(
    x: ArrayLike,
    indices: ArrayLike,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _Stream | None = None,
) -> Any: ...
@overload
def take(
    a: ArrayLike,
    indices: _Index,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _Stream | None = None,
) -> Any: ...
@overload
def take(
    a: NDArray[_Item],
    indices: ArrayLike,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _Stream | None = None,
) -> NDArray[_Item]: ...
@overload
def take(
    a: ArrayLike,
    indices: ArrayLike,
    axis: SupportsIndex | None,
    out: _Out,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _Stream | None = None,
) -> _Out: ...
@overload
def take(
    a: ArrayLike,
    indices: ArrayLike,
    axis: SupportsIndex | None = None,
    *,
    out: _Out,
    mode: _Mode = "raise",
    device: _Device = None,
    stream: _Stream | None = None,
) -> _Out: ...
@overload
def take(
    a: ArrayLike,
    indices: ArrayLike,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _Stream | None = None,
) -> Any: ...
@overload
def take_along_axis(
    arr: NDArray[_Item],
    indices: ArrayLike,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _Stream | None = None,
) -> NDArray[_Item]: ...
@overload
def take_along_axis(
    arr: ArrayLike,
    indices: ArrayLike,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: _Out,
    device: _Device = None,
    stream: _Stream | None = None,
) -> _Out: ...
@overload
def take_along_axis(
    arr: ArrayLike,
    indices: ArrayLike,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _Stream | None = None,
) -> NDArray[Any]: ...
def hello(
    blocks: SupportsIndex = 1, threads: SupportsIndex = 3, *, device: _Device = None
) -> list[str]: ...
def is_available() -> bool: ...
def device_count() -> int: ...
def _exchange_device(spec: _Device, /) -> _Device: ...
def _device_info(ordinal: SupportsIndex, /) -> tuple[str, int, int, int, int]: ...
def _config() -> dict[str, Any]: ...
