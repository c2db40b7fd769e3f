"""The compiled module itself: what it holds, as CPython's garbage collector sees it."""

import gc

import pytest

HELD = [
    "DeviceError", "DeviceLostError", "ForkedProcessError", "DeviceArray", "Stream", "Event",
    "Module", "Kernel", "Pointer", "In", "Out", "InOut",
]  # fmt: skip


@pytest.mark.parametrize("build", ["cpu_device", "fake_device"])
def test_the_collector_sees_what_the_module_holds(request, build):
    """Through the module's own traversal: its dict is another object."""
    core = request.getfixturevalue(build).gpuops._core
    seen = [id(held) for held in gc.get_referents(core)]
    unseen = [name for name in HELD if id(getattr(core, name)) not in seen]
    assert unseen == []


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
