"""The least that any library pays: CUDA's driver, called through ctypes without a library between.

ctypes itself takes part of a microsecond for a call, as `no_work` shows.
"""

import ctypes
import functools
from collections.abc import Callable

import numpy

# A kernel that does nothing, which the driver compiles for the GPU at hand.
EMPTY_KERNEL = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry empty() { ret; }
"""


class Driver:
    """Calls on the legacy default stream of the context that is current on this thread."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(self._module), EMPTY_KERNEL)
        self._check("cuModuleGetFunction", ctypes.byref(self._kernel), self._module, b"empty")
        self._memory = ctypes.c_void_p()

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")

    def no_work(self) -> Callable[[], None]:
        """Ask the driver for its version, which it knows."""
        version = ctypes.c_int()
        return functools.partial(self._library.cuDriverGetVersion, ctypes.byref(version))

    def launch(self) -> Callable[[], None]:
        """Launch the empty kernel."""
        function = self._library.cuLaunchKernel
        function.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            *[ctypes.c_void_p] * 3,
        ]
        call = functools.partial(function, self._kernel, 1, 1, 1, 32, 1, 1, 0, None, None, None)
        self._check("cuLaunchKernel", *call.args)
        return call

    def allocate_and_free(self, size: int) -> Callable[[], None]:
        """Allocate memory in the order of the stream, and free it in the same way."""
        allocate, free = self._library.cuMemAllocAsync, self._library.cuMemFreeAsync
        allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        free.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        memory, place = self._memory, ctypes.byref(self._memory)

        def call() -> None:
            allocate(place, size, None)
            free(memory, None)

        self._check("cuMemAllocAsync", place, size, None)
        self._check("cuMemFreeAsync", memory, None)
        return call

    def memory_like(self, array: numpy.ndarray) -> ctypes.c_uint64:
        """Allocate as much memory of the device, for as long as the process lives."""
        place = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(array.nbytes))
        return place

    def page_locked(self, array: numpy.ndarray) -> numpy.ndarray:
        """Copy an array into page-locked memory, which lives as long as the process."""
        place = ctypes.c_void_p()
        self._check("cuMemAllocHost_v2", ctypes.byref(place), ctypes.c_size_t(array.nbytes))
        memory = (ctypes.c_char * array.nbytes).from_address(place.value)
        copy = numpy.frombuffer(memory, array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def up(self, place: ctypes.c_uint64, array: numpy.ndarray) -> None:
        """Copy an array to memory of the device."""
        data = ctypes.c_void_p(array.ctypes.data)
        self._check("cuMemcpyHtoD_v2", place, data, ctypes.c_size_t(array.nbytes))

    def down(self, array: numpy.ndarray, place: ctypes.c_uint64) -> numpy.ndarray:
        """Copy memory of the device into an array, and return that."""
        data = ctypes.c_void_p(array.ctypes.data)
        self._check("cuMemcpyDtoH_v2", data, place, ctypes.c_size_t(array.nbytes))
        return array
