# The signatures are those of kernels/ops.def; `python -m mypy.stubtest gpuops` compares them.
from collections.abc import Sequence
from os import PathLike
from types import EllipsisType, TracebackType
from typing import (
    Any,
    Literal,
    NamedTuple,
    Never,
    NoReturn,
    Protocol,
    Self,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    final,
    overload,
)

import numpy
from numpy import generic, integer, ndarray
from numpy.typing import ArrayLike, DTypeLike, NDArray
from typing_extensions import Buffer, CapsuleType

# Arrays of other libraries: torch, CuPy and JAX have the method, Numba has the property.
class _Exporter(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _SupportsStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

_Item = TypeVar("_Item", bound=generic)
_Foreign = TypeVar("_Foreign", bound=_Exporter)
_AnyArray: TypeAlias = ArrayLike | _Exporter | _CudaArray
_Out = TypeVar("_Out", bound=ndarray[Any, Any] | _Exporter | _CudaArray)
_Target: TypeAlias = ndarray[Any, Any] | _Exporter | _CudaArray | Buffer
_Shape: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...] | list[int]
_Device: TypeAlias = str | int | None
_Mode: TypeAlias = Literal["raise", "wrap", "clip", "fill"]
_Border: TypeAlias = Literal[
    "reflect", "mirror", "nearest", "constant", "wrap", "grid-mirror", "grid-constant", "grid-wrap"
]
_Index: TypeAlias = int | integer[Any]

__version__: str

class DeviceError(RuntimeError):
    code: int
    name: str
    operator: str

class DeviceLostError(DeviceError): ...
class ForkedProcessError(RuntimeError): ...

@final
class DeviceArray:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> numpy.dtype[Any]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> int: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def ptr(self) -> int: ...
    @overload
    def to_host(self, out: None = None, stream: _SupportsStream | None = None) -> NDArray[Any]: ...
    @overload
    def to_host(
        self, out: NDArray[_Item], stream: _SupportsStream | None = None
    ) -> NDArray[_Item]: ...
    @overload
    def reshape(self, shape: _Shape, /) -> DeviceArray: ...
    @overload
    def reshape(self, /, *shape: SupportsIndex) -> DeviceArray: ...
    def copy(self, stream: _SupportsStream | None = None) -> DeviceArray: ...
    def fill(self, value: ArrayLike, stream: _SupportsStream | None = None) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(
        self, key: SupportsIndex | slice | EllipsisType | tuple[()], /
    ) -> DeviceArray: ...
    def __copy__(self) -> DeviceArray: ...
    def __deepcopy__(self, memo: dict[int, Any], /) -> DeviceArray: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __sizeof__(self) -> int: ...
    def _edges(self, count: SupportsIndex, /) -> Any: ...
    def _repr_html_(self) -> str: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    __dlpack_c_exchange_api__: CapsuleType
    # These raise, with advice. With NoReturn for its result, `__array__` would make type checkers
    # take a DeviceArray for an array_like.
    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> None: ...
    def __iter__(self) -> NoReturn: ...
    def __reversed__(self) -> NoReturn: ...
    def __contains__(self, key: Never, /) -> NoReturn: ...
    def __setitem__(self, key: Never, value: Never, /) -> NoReturn: ...
    def __delitem__(self, key: Never, /) -> NoReturn: ...
    def __bool__(self) -> NoReturn: ...
    def __int__(self) -> NoReturn: ...
    def __float__(self) -> NoReturn: ...
    def __index__(self) -> NoReturn: ...

@final
class Stream:
    def __new__(
        cls, device: _Device = None, *, nonblocking: bool = True, priority: SupportsIndex = 0
    ) -> Self: ...
    @classmethod
    def from_external(cls, obj: _SupportsStream, *, device: _Device = None) -> Stream: ...
    @property
    def device(self) -> int: ...
    @property
    def ptr(self) -> int: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...
    def record(self, event: Event | None = None) -> Event: ...
    def wait(self, event_or_stream: Event | _SupportsStream) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
    def __cuda_stream__(self) -> tuple[int, int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Event:
    def __new__(
        cls, *, timing: bool = True, blocking_sync: bool = False, device: _Device = None
    ) -> Self: ...
    @property
    def device(self) -> int: ...
    def record(self, stream: _SupportsStream | None = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: _SupportsStream | None = None) -> None: ...
    def elapsed_time(self, end: Event, /) -> float: ...
    def __cuda_stream__(self) -> tuple[int, int]: ...

@final
class pin:  # noqa: N801
    def __new__(cls, x: ndarray[Any, Any] | Buffer, /) -> Self: ...
    @property
    def locked(self) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class MemoryInfo(NamedTuple):
    used: int
    reserved: int
    free: int
    total: int
    peak: int
    limit: int | None

_Dimensions: TypeAlias = (
    SupportsIndex
    | tuple[SupportsIndex]
    | tuple[SupportsIndex, SupportsIndex]
    | tuple[SupportsIndex, SupportsIndex, SupportsIndex]
)

class _KernelAttributes(NamedTuple):
    registers: int
    shared_bytes: int
    local_bytes: int
    constant_bytes: int
    max_threads: int
    ptx_version: int
    binary_version: int

# What a launch takes: arrays, In, Out, InOut, Pointer and numbers, as the kernel has it.
class _Launcher(Protocol):
    def __call__(self, *args: Any) -> None: ...

@final
class In:
    def __new__(cls, array: _AnyArray, /) -> Self: ...
    @property
    def array(self) -> Any: ...

@final
class Out:
    def __new__(cls, array: _Target, /) -> Self: ...
    @property
    def array(self) -> Any: ...

@final
class InOut:
    def __new__(cls, array: _Target, /) -> Self: ...
    @property
    def array(self) -> Any: ...

@final
class Pointer:
    def __new__(cls, address: SupportsIndex, /) -> Self: ...
    def __index__(self) -> int: ...
    @property
    def address(self) -> int: ...

@final
class Kernel:
    @property
    def name(self) -> str: ...
    @property
    def module(self) -> Module: ...
    @property
    def attributes(self) -> _KernelAttributes: ...
    @property
    def max_dynamic_shared_bytes(self) -> int: ...
    @max_dynamic_shared_bytes.setter
    def max_dynamic_shared_bytes(self, bytes: SupportsIndex, /) -> None: ...  # noqa: A002
    def __getitem__(
        self,
        key: tuple[_Dimensions, _Dimensions]
        | tuple[_Dimensions, _Dimensions, _SupportsStream | None]
        | tuple[_Dimensions, _Dimensions, _SupportsStream | None, SupportsIndex],
        /,
    ) -> _Launcher: ...
    def launch(
        self,
        grid: _Dimensions,
        block: _Dimensions,
        /,
        *args: Any,
        stream: _SupportsStream | None = None,
        shared_bytes: SupportsIndex = 0,
    ) -> None: ...
    def forall(
        self,
        count: SupportsIndex,
        /,
        *,
        stream: _SupportsStream | None = None,
        shared_bytes: SupportsIndex = 0,
    ) -> _Launcher: ...

@final
class Module:
    @property
    def cubin(self) -> bytes: ...
    @property
    def device(self) -> int | None: ...
    @property
    def kernels(self) -> tuple[str, ...]: ...
    def __getitem__(self, name: str, /) -> Kernel: ...
    def get_function(self, name: str, /) -> Kernel: ...
    def get_global(self, name: str, /, dtype: DTypeLike = "uint8") -> DeviceArray: ...

def to_device(
    x: _AnyArray, /, *, device: _Device = None, stream: _SupportsStream | None = None
) -> DeviceArray: ...
def empty(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> DeviceArray: ...
def zeros(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> DeviceArray: ...
def asarray(
    x: _AnyArray,
    /,
    *,
    dtype: DTypeLike | None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    copy: bool | None = None,
) -> DeviceArray: ...
def from_dlpack(
    x: _Exporter,
    /,
    *,
    device: _Device | tuple[int, int] = None,
    copy: bool | None = None,
    stream: _SupportsStream | None = None,
) -> DeviceArray: ...
def synchronize(device: _Device = None) -> None: ...
def current_stream(device: _Device = None) -> Stream: ...
def memory_info(device: _Device = None) -> MemoryInfo: ...
def memory_limit(
    bytes: SupportsIndex | None,  # noqa: A002
    *,
    device: _Device = None,
) -> int | None: ...
@overload
def pinned_empty(
    shape: _Shape, dtype: type[_Item] | numpy.dtype[_Item], *, order: Literal["C", "F"] = "C"
) -> NDArray[_Item]: ...
@overload
def pinned_empty(
    shape: _Shape, dtype: DTypeLike = "float64", *, order: Literal["C", "F"] = "C"
) -> NDArray[Any]: ...
def empty_cache(device: _Device = None) -> None: ...

# What comes back is of the kind of the first operand on a device, else of `x`. Where no type tells
# it, or whether a single index gives a scalar or an array, the result is Any.
@overload
def add(
    x: DeviceArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def add(
    x: _AnyArray,
    y: DeviceArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def add(
    x: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: _Out,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def add(
    x: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
@overload
def multiply(
    x: DeviceArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def multiply(
    x: _AnyArray,
    y: DeviceArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def multiply(
    x: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: _Out,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def multiply(
    x: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
@overload
def matmul(
    a: DeviceArray,
    b: _AnyArray,
    /,
    *,
    out: None = None,
    precision: Literal["full", "tf32"] = "full",
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def matmul(
    a: _AnyArray,
    b: DeviceArray,
    /,
    *,
    out: None = None,
    precision: Literal["full", "tf32"] = "full",
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def matmul(
    a: _AnyArray,
    b: _AnyArray,
    /,
    *,
    out: _Out,
    precision: Literal["full", "tf32"] = "full",
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def matmul(
    a: _AnyArray,
    b: _AnyArray,
    /,
    *,
    out: None = None,
    precision: Literal["full", "tf32"] = "full",
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
@overload
def saxpy(
    a: DeviceArray,
    x: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def saxpy(
    a: _AnyArray,
    x: DeviceArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def saxpy(
    a: _AnyArray,
    x: _AnyArray,
    y: DeviceArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def saxpy(
    a: _AnyArray,
    x: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: _Out,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def saxpy(
    a: _AnyArray,
    x: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
@overload
def sigmoid(
    x: DeviceArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def sigmoid(
    x: _AnyArray,
    /,
    *,
    out: _Out,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def sigmoid(
    x: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
@overload
def sigmoid_backward(
    grad: DeviceArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def sigmoid_backward(
    grad: _AnyArray,
    y: DeviceArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def sigmoid_backward(
    grad: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: _Out,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def sigmoid_backward(
    grad: _AnyArray,
    y: _AnyArray,
    /,
    *,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
@overload
def gather(
    x: DeviceArray,
    indices: _AnyArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> DeviceArray: ...
@overload
def gather(
    x: NDArray[Any],
    indices: _Index | _CudaArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> Any: ...
@overload
def gather(
    x: NDArray[_Item],
    indices: _AnyArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> NDArray[_Item]: ...
@overload
def gather(
    x: _Foreign,
    indices: _AnyArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> _Foreign: ...
@overload
def gather(
    x: _AnyArray,
    indices: _AnyArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: _Out,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> _Out: ...
@overload
def gather(
    x: _AnyArray,
    indices: _AnyArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> Any: ...
@overload
def take(
    a: DeviceArray,
    indices: _AnyArray,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> DeviceArray: ...
@overload
def take(
    a: NDArray[Any],
    indices: _Index | _CudaArray,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> Any: ...
@overload
def take(
    a: NDArray[_Item],
    indices: _AnyArray,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> NDArray[_Item]: ...
@overload
def take(
    a: _Foreign,
    indices: _AnyArray,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> _Foreign: ...
@overload
def take(
    a: _AnyArray,
    indices: _AnyArray,
    axis: SupportsIndex | None,
    out: _Out,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> _Out: ...
@overload
def take(
    a: _AnyArray,
    indices: _AnyArray,
    axis: SupportsIndex | None = None,
    *,
    out: _Out,
    mode: _Mode = "raise",
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> _Out: ...
@overload
def take(
    a: _AnyArray,
    indices: _AnyArray,
    axis: SupportsIndex | None = None,
    out: None = None,
    mode: _Mode = "raise",
    *,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> Any: ...
@overload
def take_along_axis(
    arr: DeviceArray,
    indices: _AnyArray,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> DeviceArray: ...
@overload
def take_along_axis(
    arr: NDArray[Any],
    indices: _CudaArray,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> Any: ...
@overload
def take_along_axis(
    arr: NDArray[_Item],
    indices: _AnyArray,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> NDArray[_Item]: ...
@overload
def take_along_axis(
    arr: _Foreign,
    indices: _AnyArray,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> _Foreign: ...
@overload
def take_along_axis(
    arr: _AnyArray,
    indices: _AnyArray,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: _Out,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> _Out: ...
@overload
def take_along_axis(
    arr: _AnyArray,
    indices: _AnyArray,
    axis: SupportsIndex | None = -1,
    *,
    mode: _Mode = "raise",
    fill_value: Any = None,
    out: None = None,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> Any: ...
def scatter(
    x: _Target,
    indices: _AnyArray,
    values: _AnyArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> None: ...
def scatter_add(
    x: _Target,
    indices: _AnyArray,
    values: _AnyArray,
    /,
    *,
    axis: SupportsIndex | None = 0,
    mode: _Mode = "raise",
    deterministic: bool = False,
    device: _Device = None,
    stream: _SupportsStream | None = None,
) -> None: ...
@overload
def correlate(
    input: DeviceArray,
    weights: _AnyArray,
    *,
    output: DTypeLike | None = None,
    mode: _Border = "reflect",
    cval: float = 0.0,
    origin: SupportsIndex | Sequence[SupportsIndex] = 0,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def correlate(
    input: _AnyArray,
    weights: _AnyArray,
    *,
    output: _Out,
    mode: _Border = "reflect",
    cval: float = 0.0,
    origin: SupportsIndex | Sequence[SupportsIndex] = 0,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def correlate(
    input: _AnyArray,
    weights: _AnyArray,
    *,
    output: DTypeLike | None = None,
    mode: _Border = "reflect",
    cval: float = 0.0,
    origin: SupportsIndex | Sequence[SupportsIndex] = 0,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
@overload
def convolve(
    input: DeviceArray,
    weights: _AnyArray,
    *,
    output: DTypeLike | None = None,
    mode: _Border = "reflect",
    cval: float = 0.0,
    origin: SupportsIndex | Sequence[SupportsIndex] = 0,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> DeviceArray: ...
@overload
def convolve(
    input: _AnyArray,
    weights: _AnyArray,
    *,
    output: _Out,
    mode: _Border = "reflect",
    cval: float = 0.0,
    origin: SupportsIndex | Sequence[SupportsIndex] = 0,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> _Out: ...
@overload
def convolve(
    input: _AnyArray,
    weights: _AnyArray,
    *,
    output: DTypeLike | None = None,
    mode: _Border = "reflect",
    cval: float = 0.0,
    origin: SupportsIndex | Sequence[SupportsIndex] = 0,
    device: _Device = None,
    stream: _SupportsStream | None = None,
    progress: bool = False,
) -> Any: ...
def hello(
    blocks: SupportsIndex = 1, threads: SupportsIndex = 3, *, device: _Device = None
) -> list[str]: ...
def is_available() -> bool: ...
def device_count() -> int: ...
def _exchange_device(spec: _Device, /) -> _Device: ...
def _enter_pinned_memory() -> CapsuleType: ...
def _leave_pinned_memory(previous: CapsuleType, /) -> CapsuleType: ...
def _device_info(ordinal: SupportsIndex, /) -> tuple[str, int, int, int, int, bytes]: ...
def _config() -> dict[str, Any]: ...
def _blas() -> str: ...
def _explain(
    op: str, /, *args: Any, **keywords: Any
) -> tuple[str, list[tuple[str, str, int, int, float | None]], int, str]: ...
def _last_route() -> tuple[str, tuple[str, str, int, int, float | None], float | None] | None: ...
def _measure_rates(ordinal: SupportsIndex, work: str, /) -> dict[str, float]: ...
def _measured_steps() -> dict[str, float]: ...
def _tell_rates(ordinal: SupportsIndex, work: str, rates: dict[str, float], /) -> None: ...
def _nvrtc_open(path: str | bytes | PathLike[str] | None, /) -> tuple[int, int]: ...
def _nvrtc_compile(
    source: bytes,
    name: bytes,
    options: tuple[bytes, ...],
    headers: dict[bytes, bytes] | None,
    name_expressions: tuple[bytes, ...],
    /,
) -> tuple[str | None, bytes | None, bytes, dict[bytes, str]]: ...
def _cubin_kernels(cubin: bytes, /) -> tuple[str, ...]: ...
def _find_device(device: _Device, operator: str, /) -> tuple[int, int, int]: ...
def _driver_version() -> int: ...
def _load_module(
    cubin: bytes,
    kernels: dict[str, tuple[str, tuple[tuple[str | None, str | None], ...] | None]],
    device: _Device,
    globals: dict[str, str],  # noqa: A002
    /,
) -> Module: ...
