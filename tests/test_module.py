"""The compiled module itself: what it holds, as CPython's garbage collector sees it."""

import gc
import sys

import pytest
from faults.sweep import set_nomemory
from helpers import run_child

HELD = [
    "DeviceError", "DeviceLostError", "ForkedProcessError", "DeviceArray", "Stream", "Event", "pin",
    "Module", "Kernel", "Pointer", "In", "Out", "InOut",
]  # fmt: skip


@pytest.mark.parametrize("build", ["cpu_device", "fake_device"])
def test_the_collector_sees_what_the_module_holds(request, build):
    """Through the module's own traversal: its dict is another object."""
    core = request.getfixturevalue(build).gpuops._core
    seen = [id(held) for held in gc.get_referents(core)]
    unseen = [name for name in HELD if id(getattr(core, name)) not in seen]
    assert unseen == []


# Every allocation fails in turn, alone and with all that come after it. One process does for all:
# that an import failed must not keep the next one from it.
IMPORT_WITHOUT_MEMORY = """
import collections, gc
from importlib.machinery import ExtensionFileLoader, ModuleSpec

from _testcapi import remove_mem_hooks, set_nomemory
import gpuops

# A named tuple is compiled from a text, and Python's compiler does not survive to have no memory.
collections.namedtuple = lambda name, fields: type(name, (tuple,), {})


def load():
    loader = ExtensionFileLoader("gpuops._core", gpuops._core.__file__)
    spec = ModuleSpec("gpuops._core", loader, origin=loader.path)
    module = loader.create_module(spec)
    loader.exec_module(module)
    return module


def attempt(first, last):
    module = failure = None
    set_nomemory(first, last)
    try:
        module = load()
    except BaseException as error:
        failure = error
    finally:
        remove_mem_hooks()
    if failure is not None:
        assert type(failure) is MemoryError, (first, last, failure)
    return module


def types():
    gc.collect()
    return sum(isinstance(o, type) and o.__module__ == "gpuops" for o in gc.get_objects())


load()
gc.freeze()  # what is there now is not looked at again
number = failures = successes = 0
while successes < 10:  # in a row, because some allocations are done without
    number += 1
    for last in (number, 0):
        module = attempt(number - 1, last)
        if module is None:
            failures, successes = failures + 1, 0
        else:
            successes += 1
            assert module.gather([1, 2, 3], [2], device="cpu") == 3
            del module
        assert types() == 0, (number, last, "a module that is not there has left its types")
print(failures > 500)
"""


@pytest.mark.skipif(set_nomemory is None, reason="this interpreter has no _testcapi")
@pytest.mark.skipif(
    sys.version_info >= (3, 13),
    reason="a dictionary of CPython 3.13 that cannot grow is broken; types are made of them",
)
@pytest.mark.parametrize("build", ["cpu_device", "fake_device"])
def test_every_allocation_of_an_import_may_fail(request, build):
    gpuops = request.getfixturevalue(build).gpuops
    assert run_child(gpuops, IMPORT_WITHOUT_MEMORY) == "True\n"


def test_an_import_without_numpy(cpu_device):
    source = """
import sys
import numpy
for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
    sys.modules[name] = None
sys.stderr = None  # on which NumPy's own macro would print the reason
try:
    import gpuops
except ImportError as error:
    print(error)
"""
    assert run_child(cpu_device.gpuops, source) == "numpy._core.multiarray failed to import\n"


def test_an_unknown_argument_is_refused(gpu):
    gpuops = gpu.gpuops
    x, stream = gpuops.zeros(3), gpuops.Stream()
    event = stream.record()
    for call in (
        *(x.to_host, x.copy, x.fill, x.__dlpack__),
        *(stream.record, stream.wait, stream.synchronize, event.record, event.wait),
        *(gpuops.to_device, gpuops.asarray, gpuops.zeros, gpuops.empty, gpuops.from_dlpack),
        *(gpuops.Stream, gpuops.Stream.from_external, gpuops.Event, gpuops.current_stream),
        *(gpuops.synchronize, gpuops.memory_info, gpuops.memory_limit, gpuops.empty_cache),
        *(gpuops.In, gpuops.Pointer),
    ):
        with pytest.raises(TypeError):
            call(nonsense=1)
        with pytest.raises(TypeError):
            call(*[None] * 20)
