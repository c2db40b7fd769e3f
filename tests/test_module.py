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
    unseen = [
        name
        for name in HELD
        if not any(holder is core for holder in gc.get_referrers(getattr(core, name)))
    ]
    assert unseen == []
