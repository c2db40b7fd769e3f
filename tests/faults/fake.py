"""The controls of the fake CUDA runtime, and the package that was built on it.

What a package finds out once, such as the number of devices, is steered by the environment of a
child process instead; fake_cudart.c lists the variables.
"""

import contextlib
import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import numpy

LIBRARY = "libgpuops_fake_cudart.so"

MEMORY_LIMIT = 64 << 20  # bytes of each device, unless a test or GPUOPS_FAKE_MEMORY says otherwise
EXIT_MISUSE = 86  # the exit status of a process that ends with misuse which nobody has taken


class Live(ctypes.Structure):
    """The objects that exist now. The counts and bytes of allocations are those of all devices."""

    _fields_ = [
        ("allocations", ctypes.c_long),
        ("bytes", ctypes.c_long),
        ("pinned_allocations", ctypes.c_long),
        ("pinned_bytes", ctypes.c_long),
        ("pools", ctypes.c_long),
        ("peak_bytes", ctypes.c_long),
        ("streams", ctypes.c_long),
        ("events", ctypes.c_long),
        ("reserved_bytes", ctypes.c_long),  # by pools, allocated or not
        ("libraries", ctypes.c_long),  # of machine code
        ("registered", ctypes.c_long),  # memory of others that is page-locked
        ("registered_bytes", ctypes.c_long),
    ]


class PointerAttributes(ctypes.Structure):
    """CUDA's struct cudaPointerAttributes."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    ]


class Fault:
    """A fault that was armed; what it did is known when the block of `Fake.fail` is left."""

    call = ""  # the CUDA function that it befell first

    @property
    def reached(self):
        return self.call != ""


VISITOR = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int)
MODULE_TWIN = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
)


class ModuleLaunch(NamedTuple):
    """What a kernel that was compiled at run time was launched with."""

    grid: tuple
    block: tuple
    shared_bytes: int
    parameters: bytes  # as the kernel sees them, one behind the other with C's alignment

    def read(self, *dtypes):
        """The parameters as NumPy scalars; a pointer's dtype is "p"."""
        offset, values = 0, []
        for dtype in map(numpy.dtype, dtypes):
            offset = -(-offset // dtype.alignment) * dtype.alignment
            values.append(numpy.frombuffer(self.parameters, dtype, 1, offset)[0])
            offset += dtype.itemsize
        return values


def device_array(address, count, dtype):
    """The elements at an address of the device, for a twin to work on."""
    dtype = numpy.dtype(dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(int(address))
    return numpy.frombuffer(memory, dtype)


class Fake:
    """One loaded fake runtime; `library` is for tests that call CUDA functions themselves.

    A library is loaded once per process, so this is the runtime that a package built on the same
    file uses.
    """

    def __init__(self, folder):
        self.path = Path(folder, LIBRARY).resolve()
        self.library = ctypes.CDLL(str(self.path))
        self.library.fake_calls.restype = ctypes.c_long
        self.library.fake_pending.restype = ctypes.c_long
        self.library.fake_taken.restype = ctypes.c_long
        # For all answers: a new one of this size would have to be filled with zeros each time.
        self.text = ctypes.create_string_buffer(1 << 17)

    def set_driver(self, state):
        """`state`: "fine", "none", "old", "stub" or "no-device"."""
        self.library.fake_set_driver(state.encode())

    def set_devices(self, count):
        self.library.fake_set_devices(count)

    def set_memory_limit(self, bytes_per_device):
        self.library.fake_set_memory_limit(ctypes.c_size_t(bytes_per_device))

    def set_scheduler(self, name, seed=1):
        """When work on streams is done; all that is queued is done now.

        "now": at once. "lazy": when somebody waits or asks for it, and no more than that takes.
        "shuffled": at each wait and query, work that is ready, in an order that the seed decides.

        The seed also decides on the order of a kernel's blocks, and on that of a block's threads,
        anew after each barrier. A result that is the same for many seeds does not depend on it.
        """
        self.library.fake_set_scheduler(name.encode(), ctypes.c_uint64(seed))

    def set_part_bytes(self, part_bytes):
        """The size of the parts in which large NumPy arrays are worked on; 0 is the real one."""
        self.library.fake_set_part_bytes(ctypes.c_int64(part_bytes))

    def set_slab_bytes(self, slab_bytes):
        """Up to which size of its operands a call between NumPy arrays goes through a slab.

        0: none does, so that small calls go the way of larger ones. More than the real number is
        more than a slab has room for.
        """
        self.library.fake_set_slab_bytes(ctypes.c_int64(slab_bytes))

    def set_ring_divisor(self, divisor):
        """Divides the sizes of the rings for large copies, and that from which on they are used.

        For a process of its own: rings that were made before stay as they are.
        """
        self.library.fake_set_ring_divisor(divisor)

    def slow_copies(self, seconds):
        """Makes each call of cudaMemcpyAsync take so much longer."""
        self.library.fake_slow_copies(ctypes.c_uint(round(1e6 * seconds)))

    def leave_free(self, free_bytes):
        """Leaves device 0 so many bytes beyond those that are in use now."""
        available, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.library.cudaMemGetInfo(ctypes.byref(available), ctypes.byref(total))
        self.set_memory_limit(total.value - available.value + free_bytes)

    def reset(self):
        """Undoes the eight above, with all work done, and sets the counts of calls to zero.

        Faults are disarmed, and a lost context is there again.

        Allocations, streams and events stay as they are; pools keep only what is allocated.
        """
        self.library.fake_reset()

    def calls(self, name=None):
        """How often a CUDA function was called since the last reset; without a name, any."""
        return self.library.fake_calls(name.encode() if name else None)

    def page_locked(self, array):
        """A copy of an array in page-locked memory, which cudaFreeHost(its address) frees."""
        place = ctypes.c_void_p()
        error = self.library.cudaHostAlloc(ctypes.byref(place), ctypes.c_size_t(array.nbytes), 0)
        assert error == 0, f"CUDA error {error}"
        memory = (ctypes.c_char * array.nbytes).from_address(place.value)
        copy = numpy.ndarray(array.shape, array.dtype, memory)
        copy[...] = array
        return copy

    def run(self):
        """Does all the work that is queued."""
        self.library.fake_run()

    def take_time(self, stream, seconds):
        """Queues a kernel that is at work for so long, on a stream, a handle.

        For a scheduler that works late. Calls that ask say that it goes on; those that wait sleep,
        and no other thread can call CUDA meanwhile.
        """
        error = self.library.fake_take_time(
            ctypes.c_void_p(stream), ctypes.c_int64(round(1000 * seconds))
        )
        assert error == 0, f"CUDA error {error}"

    def hurry(self):
        """Ends the kernels that take their time; not while another thread waits for one."""
        self.library.fake_hurry()

    def pending(self):
        """How many operations are queued: copies, kernels, waits and so on."""
        return self.library.fake_pending()

    def taken(self, code):
        """How often somebody has taken this error out of CUDA's slot for the last one."""
        return self.library.fake_taken(code)

    def set_capturing(self, stream, on):
        """Begins or ends a capture on a stream, a handle; the work on it is done all the same.

        A stream that waits for an event of a capture takes part in it until it ends.
        """
        error = self.library.fake_set_capturing(ctypes.c_void_p(stream), on)
        assert error == 0, f"CUDA error {error}"

    @contextlib.contextmanager
    def fail(self, number, code, mode="once", function=None):
        """The call of that number, counted from 1, fails with a CUDA error in the block of code.

        All calls count that can fail, or those of one function. `mode` is "once", or "from then
        on", for the rest of the block. The other two are for errors that end the context for good,
        until `reset`: "sticky", when all calls that need it fail from then on, and "late", when the
        call itself succeeds, and the next one that waits is the first to fail. Blocks may be
        nested. Yields a `Fault`.
        """
        fault, call = Fault(), ctypes.create_string_buffer(64)
        armed = self.library.fake_fail(
            ctypes.c_long(number), code, mode.encode(), function.encode() if function else None
        )
        try:
            yield fault
        finally:
            self.library.fake_mend(armed, call, ctypes.c_size_t(len(call)))
            fault.call = call.value.decode()

    @contextlib.contextmanager
    def visit(self, function):
        """Calls function(name, with_gil) before each call of CUDA in the block of code.

        `with_gil` tells whether the caller holds the GIL. The calls that the function makes itself
        are not visited. It is called by the caller's thread, which waits for it.
        """
        failures = []

        def call(name, with_gil):
            try:
                function(name.decode(), bool(with_gil))
            except BaseException as failure:
                failures.append(failure)

        visitor = VISITOR(call)
        self.library.fake_set_visitor(visitor)
        try:
            yield
        finally:
            self.library.fake_set_visitor(VISITOR())
        if failures:
            raise failures[0]

    def log(self):
        """The names of the CUDA functions that were called since a fault was armed last.

        Those that cannot fail are not among them.
        """
        self.library.fake_log(self.text, ctypes.c_size_t(len(self.text)))
        return self.text.value.decode().split()

    @contextlib.contextmanager
    def twin(self, name, function):
        """What a kernel that was compiled at run time does in the block of code that follows.

        `name` is that of the machine code; the function is called once for a launch, as
        function(launch), a `ModuleLaunch`. A launch of a kernel without a twin is misuse.
        """
        failures = []

        def call(grid, block, shared_bytes, parameters, size):
            try:
                data = ctypes.string_at(parameters, size)
                function(ModuleLaunch(tuple(grid[:3]), tuple(block[:3]), shared_bytes, data))
            except BaseException as failure:
                failures.append(failure)

        callback = MODULE_TWIN(call)
        self.library.fake_set_module_twin(name.encode(), callback)
        try:
            yield
        finally:
            self.run()
            self.library.fake_set_module_twin(name.encode(), MODULE_TWIN())
        if failures:
            raise failures[0]

    def live(self):
        live = Live()
        self.library.fake_live(ctypes.byref(live))
        return live

    def current_device(self):
        """The current device of this thread."""
        return self.library.fake_current_device()

    def take_misuse(self):
        """What was done that a real GPU punishes, one line each; red zones are looked at now."""
        self.library.fake_take_misuse(self.text, ctypes.c_size_t(len(self.text)))
        return self.text.value.decode()


def load_package(folder, name="gpuops_fake"):
    """Imports the package `gpuops` in a folder under another name, beside the installed one."""
    if name in sys.modules:
        return sys.modules[name]
    package = Path(folder, "gpuops").resolve()
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
