"""`compile` and its error, apart from the code behind them, which importing gpuops does not read.

A module that finds names when they are asked for (`__getattr__`) is read without Python's caches:
every ``gpuops.add`` of a program would take a tenth of a small call more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from . import _core

__all__ = ["CompileError", "compile"]

# By this name messages and debuggers speak of the source. It has no folder, so that, as with a file
# that nvcc compiles, `#include "..."` looks in the current one.
SOURCE_NAME = "source.cu"


class CompileError(RuntimeError):
    """The source could not be compiled, or there is no NVRTC to compile it.

    Attributes
    ----------
    name : str
        NVRTC's name of what went wrong, such as ``"NVRTC_ERROR_COMPILATION"``; empty where there is
        no NVRTC.
    log : str
        What NVRTC said, as it said it.
    options : tuple of str
        The options that it was given.
    """

    __module__ = "gpuops"

    def __init__(
        self, message: str, *, name: str = "", log: str = "", options: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.name = name
        self.log = log
        self.options = options

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = {"name": self.name, "log": self.log, "options": self.options}
        return type(self), self.args, attributes


def compile(  # noqa: A001 (the word of this field)
    source: str,
    *,
    options: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    device: str | int | None = None,
    lineinfo: bool = False,
) -> "_core.Module":
    """Compile CUDA C++ for the GPU at hand, and load it.

    NVRTC compiles it to machine code; ``pip install 'gpuops[jit]'`` brings it, with CUDA's headers,
    and cuda-pathfinder, which finds those of a CUDA toolkit or of conda as well. What was compiled
    once is kept on disk, and taken from there when source, options, architecture, headers, NVRTC
    and driver are the same. C++17 is the default, and fast maths is off, unless `options` say
    otherwise. NVRTC's warnings become a `UserWarning`.

    Parameters
    ----------
    source : str
        CUDA C++. ``extern "C"`` is not needed: kernels are known by their names in the source, and
        the types of their parameters are checked at the launch.
    options : sequence of str, optional
        For NVRTC, such as ``"-DN=16"``, ``"-I/my/headers"`` or ``"--use_fast_math"``. With
        ``"--gpu-architecture=sm_90"`` it compiles for another GPU than the one at hand, or without
        any: the module then has its `cubin` and its `kernels`, and cannot launch them.
    name_expressions : sequence of str, optional
        Instances of templates that are wanted, such as ``"scale<float>"``: their names in the
        module.
    headers : mapping of str to str, optional
        Headers that the source may include, by name.
    device : optional
        The GPU; None is the default one. See `gpuops.device`.
    lineinfo : bool, optional
        Whether profilers and compute-sanitizer shall know the lines of the source.

    Returns
    -------
    Module

    Raises
    ------
    CompileError
        With NVRTC's messages, the lines of the source that they are about, and the options; or
        where NVRTC is not found.
    DeviceError
        If there is no GPU to compile for, and no architecture in `options`.
    TypeError, ValueError
        For arguments that make no sense.

    Examples
    --------
    >>> import gpuops
    >>> module = gpuops.compile(
    ...     "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }",
    ...     options=["--gpu-architecture=sm_90"],
    ... )
    >>> module.kernels
    ('twice',)
    """
    from ._compile import compile_named

    return compile_named(
        SOURCE_NAME, source, options, name_expressions, headers, device, lineinfo=lineinfo
    )
