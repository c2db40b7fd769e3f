"""Every way through the package on which CUDA is called, as small calls that can be made to fail.

`PATHS` holds them by name. Those of an operator come from its row in kernels/ops.def.
"""

import array
import contextlib
import contextvars
import copy
import ctypes
import functools
import importlib
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from capsules import Export, Producer, new_kind
from faults import build
from faults.apart import apart
from faults.fake import load_package
from helpers import constant
from operators import OPERATORS, is_in_place, parameters_of, required_arguments
from rtc import SAXPY, SAXPY_TYPES, cubin, saxpy_twin

ARCHITECTURE = "sm_90"


class Case:
    """One call, ready to be made.

    `run` makes it, waits, and returns what came of it, all on the host. `arguments` are the objects
    that it must not keep, and `outputs` the arrays that a MemoryError of `operator` leaves alone,
    which is that of the path, unless another function is called.
    """

    def __init__(self, run, arguments=(), outputs=(), operator=None):
        self.run = run
        self.arguments = list(arguments)
        self.outputs = list(outputs)
        self.operator = operator


class Path(NamedTuple):
    group: str  # an operator, or a part of the package
    name: str
    prepare: Callable  # given a Device, makes a Case; calls that may fail are in its run
    needs_nvrtc: bool = False
    is_first: bool = False  # nothing has called CUDA before
    survives_fork: bool = True  # what is prepared: threads do not, nor do rings

    def __str__(self):
        return f"{self.group}: {self.name}"


PATHS = {}


def add(path):
    assert str(path) not in PATHS, path
    PATHS[str(path)] = path


def path(group, **options):
    """Adds a function that prepares a case; what its name says is that of the path."""

    def decorate(prepare):
        add(Path(group, prepare.__name__.replace("_", " "), prepare, **options))
        return prepare

    return decorate


def warm_up(gpu):
    """What the first calls on the devices make and keep."""
    for ordinal in range(2):
        gpu.gpuops.gather(gpu.gpuops.to_device([1], device=ordinal), [0]).to_host()


def on_host(value):
    return value.to_host() if hasattr(value, "to_host") else value


# Operators. Each arrangement makes the operands of a call out of NumPy arrays.


def plain(gpu, arrays):
    return arrays


def without_slab(gpu, arrays):
    """As larger arrays are: through memory of the device."""
    gpu.fake.set_slab_bytes(0)
    return arrays


def strided(gpu, arrays):
    return [np.repeat(a, 2, -1)[..., ::2] if a.ndim else a for a in arrays]


def buffers(gpu, arrays):
    """What is not a NumPy array, where there is such a thing."""
    return [memoryview(a) for a in arrays]


def arrays_of_python(gpu, arrays):
    """Of one dimension, which can grow once nobody looks at their memory any more."""
    return [array.array(a.dtype.char, a.ravel()) if a.ndim else a for a in arrays]


def converted(gpu, arrays):
    """All but an array that is changed in place have to be brought to another dtype."""
    return [arrays[0], *(a.astype("i2") for a in arrays[1:])]


def on_device(gpu, arrays, **options):
    return [gpu.gpuops.to_device(a, **options) for a in arrays]


def strided_on_device(gpu, arrays):
    return [
        gpu.gpuops.to_device(np.repeat(a, 2, 0))[::2] if a.ndim else gpu.gpuops.to_device(a)
        for a in arrays
    ]


def converted_on_device(gpu, arrays):
    return on_device(gpu, converted(gpu, arrays))


def on_both(gpu, arrays):
    return [gpu.gpuops.to_device(arrays[0]), *arrays[1:]]


def on_other_stream(gpu, arrays):
    return on_device(gpu, arrays, stream=gpu.gpuops.Stream())


def on_second_device(gpu, arrays):
    return on_device(gpu, arrays, device=1)


def imported(gpu, arrays):
    return [Interface(gpu.gpuops.to_device(a)) for a in arrays]


def exchanged(gpu, arrays):
    """Arrays of a library with DLPack's C exchange API, which also makes the result.

    Its own allocator never fails: it has memory of any shape from the start.
    """
    stock = gpu.gpuops.to_device(np.full(64, 77.0))

    def empty(shape, dtype, device):
        assert np.dtype(dtype) == stock.dtype
        return stock[: int(np.prod(shape))].reshape(shape)

    kind = new_kind(empty=empty)
    return [kind(gpu.gpuops.to_device(a)) for a in arrays]


class Interface:
    """Another library's array, by __cuda_array_interface__."""

    def __init__(self, owner, stream=None):
        self.owner = owner
        self.__cuda_array_interface__ = {**owner.__cuda_array_interface__, "stream": stream}

    def to_host(self):
        return self.owner.to_host()


def output_of(operator):
    """The name of the parameter that takes an array for the result, or None."""
    return next(
        (name for name in ("out", "output") if name in parameters_of(operator).parameters), None
    )


def like_result(gpu, function, arrays):
    result = function(*arrays, device="cpu")
    return np.full_like(result, 77)


def prepare_operator(operator, arrange, arrange_out, options, gpu):
    function = getattr(gpu.gpuops, operator.name)
    arrays = required_arguments(operator)
    keywords = dict(options)
    if keywords.get("stream") is not None:
        keywords["stream"] = gpu.gpuops.Stream()
    outputs = []
    if arrange_out is not None:
        outputs = arrange_out(gpu, [like_result(gpu, function, arrays)])
        keywords[output_of(operator)] = outputs[0]
    operands = arrange(gpu, arrays)
    if is_in_place(operator):
        outputs = operands[:1]
        # NumPy may find no memory to look at what it is not itself.
        view = operands[0]
        target = np.asarray(view) if isinstance(view, memoryview) else view

    def run():
        result = function(*operands, **keywords)
        if not is_in_place(operator):
            # Of a kind of its own, a result is looked at through what it holds.
            return on_host(getattr(result, "data", result) if arrange is exchanged else result)
        assert result is None
        if isinstance(target, array.array):
            return target.tolist()
        return np.array(
            on_host(getattr(target, "data", target) if arrange is exchanged else target)
        )

    return Case(run, operands, outputs, operator.name)


def add_operator(operator):
    parameters = parameters_of(operator).parameters

    def add_case(name, arrange, arrange_out=None, is_first=False, group=operator.name, **options):
        prepare = functools.partial(prepare_operator, operator, arrange, arrange_out, options)
        add(Path(group, name, prepare, is_first=is_first))

    add_case(f"{operator.name} of arrays", plain, group="cpu", device="cpu")
    add_case(f"{operator.name} of Python's arrays", arrays_of_python, group="cpu", device="cpu")
    add_case("the first call", plain, is_first=True, device="cuda")
    add_case("host arrays", plain, device="cuda")
    add_case("host arrays on a stream", plain, device="cuda", stream=True)
    add_case("host arrays without a slab", without_slab, device="cuda")
    add_case("strided host arrays", strided, device="cuda")
    add_case("buffers", buffers, device="cuda")
    add_case("arrays of Python", arrays_of_python, device="cuda")
    add_case("converted host arrays", converted, device="cuda")
    add_case("device arrays", on_device)
    add_case("device arrays on another stream", on_other_stream, stream=True)
    add_case("strided device arrays", strided_on_device)
    add_case("converted device arrays", converted_on_device)
    add_case("arrays on the second device", on_second_device)
    add_case("arrays of another library", imported)
    add_case("arrays of a library with the exchange API", exchanged)
    if len(required_arguments(operator)) > 1:
        add_case("device and host arrays", on_both)
    if not is_in_place(operator):
        add_case("host arrays, out", plain, plain, device="cuda")
        add_case("host arrays, strided out", plain, strided, device="cuda")
        add_case("device arrays, out", on_device, on_device)
        add_case("device arrays, strided out", on_device, strided_on_device)
    # What a row has in options leads to kernels of its own.
    others = {"raise": "fill" if "fill_value" in parameters else "wrap", "reflect": "constant"}
    if "mode" in parameters:
        add_case("another mode", on_device, mode=others[parameters["mode"].default])
    if "deterministic" in parameters:
        add_case("deterministic", on_device, deterministic=True)
        add_case("deterministic host arrays", plain, device="cuda", deterministic=True)


for operator in OPERATORS:
    add_operator(operator)
OPERATOR_NAMES = {operator.name for operator in OPERATORS}
IN_PLACE = {operator.name for operator in OPERATORS if is_in_place(operator)}


# Arguments with which an operator takes a way that none of the above leads to.


@path("scatter_add")
def many_indices(gpu):
    """Two tiles of them, which are sorted by two digits."""
    x = gpu.gpuops.to_device(np.zeros(300, np.float32))
    indices = gpu.gpuops.to_device((np.arange(4100) * 7 % 300).astype(np.int32))
    values = gpu.gpuops.to_device(np.ones(4100, np.float32))

    def run():
        gpu.gpuops.scatter_add(x, indices, values, deterministic=True)
        return x.to_host()

    return Case(run, [x, indices, values], [x])


@path("scatter")
def many_repeated_indices(gpu):
    x = gpu.gpuops.to_device(np.zeros(3000, np.float32))
    indices = gpu.gpuops.to_device((np.arange(5000) * 7 % 3000).astype(np.int32))
    values = gpu.gpuops.to_device(np.arange(5000, dtype=np.float32))

    def run():
        gpu.gpuops.scatter(x, indices, values)
        return x.to_host()

    return Case(run, [x, indices, values], [x])


@path("gather")
def overlapping_out(gpu):
    x = gpu.gpuops.to_device(np.arange(10.0))
    out = x[2:5]
    return Case(lambda: gpu.gpuops.gather(x, [0, 3, 1], out=out).to_host(), [x], [out])


@path("gather")
def a_bad_index(gpu):
    x = gpu.gpuops.to_device(np.arange(10.0))

    def run():
        try:
            return gpu.gpuops.gather(x, [0, 10]).to_host()
        except IndexError as error:
            return str(error)

    return Case(run, [x])


@path("gather")
def a_bad_index_between_host_arrays(gpu):
    x, out = np.arange(10.0), np.full(2, 77.0)

    def run():
        try:
            return gpu.gpuops.gather(x, [0, 10], out=out, device="cuda")
        except IndexError as error:
            return str(error)

    return Case(run, [x, out], [out])


@path("gather")
def a_large_fill_value(gpu):
    x = gpu.gpuops.to_device(np.zeros(4, "V1000"))
    call = functools.partial(gpu.gpuops.gather, x, [0, 9], mode="fill", fill_value=b"x" * 1000)
    return Case(lambda: call().to_host(), [x])


# A table on the host for which there is a choice of ways (kernels/gather_way.h).
TABLE = np.arange(300_000, dtype="f4").reshape(300, 1000)


def from_table(gpu, indices, on_device=False, pinned=False, room=None):
    """Into an array on the device, which was there, and where no more memory is to be had than
    there is `room` for."""
    x, indices = TABLE.copy(), np.asarray(indices)
    out = gpu.gpuops.to_device(np.full((*indices.shape, 1000), 77, "f4"))
    given = gpu.gpuops.to_device(indices) if on_device else indices

    def run():
        with contextlib.ExitStack() as stack:
            if pinned:
                stack.enter_context(gpu.gpuops.pin(x))
            if room is not None:
                gpu.gpuops.empty_cache()
                gpu.gpuops.memory_limit(gpu.gpuops.memory_info().used + room)
                stack.callback(gpu.gpuops.memory_limit, None)
            try:
                return gpu.gpuops.gather(x, given, out=out).to_host()
            except IndexError as error:
                return str(error)

    return Case(run, [x, given, out], [out], "gather")


@path("gather")
def rows_gathered_on_the_host(gpu):
    return from_table(gpu, [5, -1, 200])


@path("gather")
def rows_gathered_on_the_host_and_a_bad_index(gpu):
    return from_table(gpu, [5, 300, 200])


@path("gather")
def rows_gathered_on_the_host_by_indices_on_the_device(gpu):
    return from_table(gpu, [5, -1, 200], on_device=True)


@path("gather", survives_fork=False)
def rows_through_the_ring(gpu):
    gpu.fake.set_ring_divisor(16)
    indices = np.arange(66) * 9
    x = np.arange(600_000, dtype="f4").reshape(600, 1000)
    out = gpu.gpuops.to_device(np.full((66, 1000), 77, "f4"))
    return Case(lambda: gpu.gpuops.gather(x, indices, out=out).to_host(), [x, indices, out], [out])


@path("gather")
def rows_read_in_place(gpu):
    return from_table(gpu, [5, -1, 200], pinned=True)


@path("gather")
def a_bad_index_in_place(gpu):
    return from_table(gpu, [5, 300, 200], on_device=True, pinned=True)


@path("gather")
def rows_read_in_place_between_host_arrays(gpu):
    x, indices, out = TABLE.copy(), np.array([5, -1, 200]), np.full((3, 1000), 77, "f4")

    def run():
        with gpu.gpuops.pin(x):
            return gpu.gpuops.gather(x, indices, out=out, device="cuda").copy()

    return Case(run, [x, indices, out], [out], "gather")


@path("gather")
def the_range_that_is_taken(gpu):
    return from_table(gpu, [5, 6, 7] * 110)


@path("gather")
def the_range_that_is_taken_between_host_arrays(gpu):
    x, indices, out = TABLE.copy(), np.array([5, 7, 200]), np.full((3, 1000), 77, "f4")
    call = functools.partial(gpu.gpuops.gather, x, indices, out=out, device="cuda")
    return Case(lambda: call().copy(), [x, indices, out], [out])


@path("gather")
def windows(gpu):
    return from_table(gpu, np.arange(-300, 30), on_device=True, room=1_000_000)


PART_BYTES = 16 << 10
LEAST_IN_PARTS = 2 * PART_BYTES + 16  # bytes of a result on the host: three parts
LEAST_AROUND = (128 << 10) + 8  # bytes of a copy that uses a buffer of its ring a second time


def with_small_sizes(gpu):
    """Lets small arrays take the ways of large ones: rings, from 8 KiB on, and parts."""
    gpu.fake.set_ring_divisor(256)
    gpu.fake.set_part_bytes(PART_BYTES)


@path("add")
def large_host_arrays(gpu):
    """Up and down through rings."""
    with_small_sizes(gpu)
    x, out = np.arange(LEAST_IN_PARTS // 16) + 0j, np.full(LEAST_IN_PARTS // 16, 77 + 7j)
    return Case(lambda: gpu.gpuops.add(x, 1j, out=out, device="cuda"), [x, out], [out])


@path("add")
def large_page_locked_arrays(gpu):
    """With as few calls of CUDA for each part as there can be."""
    with_small_sizes(gpu)
    x, y = np.arange(LEAST_IN_PARTS // 512 + 1)[:, None] + 0j, np.arange(32) + 1j
    out = gpu.fake.page_locked(np.full((x.size, y.size), 77 + 7j))
    return Case(lambda: gpu.gpuops.add(x, y, out=out, device="cuda"), [x, y, out], [out])


LEAST_CAST_AT_WORK = 1 << 14  # elements, with which NumPy is not asked


@path("add")
def host_arrays_of_two_dtypes(gpu):
    x, y = np.arange(LEAST_CAST_AT_WORK, dtype="i4"), np.arange(LEAST_CAST_AT_WORK) + 0.5
    return Case(lambda: gpu.gpuops.add(x, y, device="cuda"), [x, y])


@path("add")
def large_host_arrays_of_two_dtypes(gpu):
    with_small_sizes(gpu)
    gpu.fake.set_part_bytes(96 << 10)
    x = np.arange(LEAST_CAST_AT_WORK + 1, dtype="f4")[:, None]
    y = np.arange(1) + 1j
    out = gpu.fake.page_locked(np.full((x.size, y.size), 77 + 7j))
    return Case(lambda: gpu.gpuops.add(x, y, out=out, device="cuda"), [x, y, out], [out])


@path("scatter_add")
def values_of_another_dtype(gpu):
    x = np.zeros(LEAST_CAST_AT_WORK)
    values = np.arange(LEAST_CAST_AT_WORK, dtype="f4")
    indices = np.arange(LEAST_CAST_AT_WORK)
    call = functools.partial(gpu.gpuops.scatter_add, x, indices, values, device="cuda")
    return Case(lambda: [call(), x.copy()][1], [x, indices, values], [x])


@path("scatter_add")
def host_values_of_another_dtype_beside_the_device(gpu):
    x = gpu.gpuops.to_device(np.zeros(LEAST_CAST_AT_WORK))
    values = np.arange(LEAST_CAST_AT_WORK, dtype="f4")
    indices = np.arange(LEAST_CAST_AT_WORK)
    return Case(lambda: gpu.gpuops.scatter_add(x, indices, values), [indices, values])


@path("matmul")
def panels(gpu):
    """Of large arrays on the host; a part is small here."""
    gpu.fake.set_part_bytes(4 << 10)
    a, b = np.arange(3 * 1024 * 4.0).reshape(-1, 4) % 100, np.arange(8.0).reshape(4, 2)
    out = np.full((len(a), 2), 77.0)
    return Case(lambda: gpu.gpuops.matmul(a, b, out=out, device="cuda"), [a, b, out], [out])


@path("correlate")
def rows_of_a_large_image(gpu):
    """With weights that take memory of the device for each part."""
    gpu.fake.set_part_bytes(2 << 10)
    image, weights = np.arange(70.0 * 20).reshape(-1, 20), np.arange(24.0).reshape(3, 8)
    out = np.full_like(image, 77)
    call = functools.partial(gpu.gpuops.correlate, image, weights, output=out, device="cuda")
    return Case(call, [image, weights, out], [out])


@path("matmul")
def batches(gpu):
    a, b = np.arange(60.0).reshape(5, 3, 4), np.arange(12.0).reshape(4, 3)
    operands = on_device(gpu, [a, b])
    return Case(lambda: gpu.gpuops.matmul(*operands).to_host(), operands)


@path("correlate")
def large_weights(gpu):
    image, weights = np.arange(400.0).reshape(20, 20), np.arange(130.0).reshape(13, 10)
    operands = on_device(gpu, [image, weights])
    return Case(lambda: gpu.gpuops.correlate(*operands).to_host(), operands)


@path("hello")
def lines(gpu):
    return Case(lambda: gpu.gpuops.hello(2, 3, device="cuda"))


# Arrays.


@path("arrays", is_first=True)
def the_first_array(gpu):
    x = np.arange(12.0).reshape(3, 4)
    return Case(lambda: gpu.gpuops.to_device(x).to_host(), [x])


@path("arrays")
def to_device(gpu):
    x = np.arange(12.0).reshape(3, 4)
    return Case(lambda: gpu.gpuops.to_device(x).to_host(), [x])


@path("arrays")
def to_device_strided(gpu):
    x = np.arange(24.0).reshape(3, 8)[:, ::2]
    return Case(lambda: gpu.gpuops.to_device(x).to_host(), [x])


@path("arrays")
def to_device_of_a_buffer(gpu):
    x = array.array("d", range(5))
    return Case(lambda: gpu.gpuops.to_device(x).to_host(), [x])


@path("arrays", is_first=True)
def the_first_large_array(gpu):
    """What page-locked buffers take part in, which are made for it."""
    with_small_sizes(gpu)
    x = np.arange(10_000, dtype=np.uint8)
    return Case(lambda: gpu.gpuops.to_device(x).to_host(), [x])


@path("arrays", survives_fork=False)
def a_large_array(gpu):
    with_small_sizes(gpu)
    items = LEAST_AROUND // 8
    x, out = np.arange(2.0 * items)[::2], np.full(2 * items, 77.0)[::2]
    gpu.gpuops.to_device(x).to_host()
    return Case(lambda: gpu.gpuops.to_device(x).to_host(out), [x, out], [out], "to_host")


@path("arrays")
def large_arrays_on_two_streams(gpu):
    """A ring is taken over from a stream that may still be at it."""
    with_small_sizes(gpu)
    x, y = (np.resize(np.arange(251, dtype="u1"), LEAST_AROUND + more) for more in range(2))
    streams = gpu.gpuops.Stream(device=0), gpu.gpuops.Stream(device=0)

    def run():
        copies = [gpu.gpuops.to_device(a, stream=s) for a, s in zip((x, y), streams, strict=True)]
        return [copy.to_host() for copy in copies]

    return Case(run, [x, y])


@path("arrays")
def a_large_array_without_buffers(gpu):
    """What is left where no memory is to be page-locked: the driver's way, piece by piece."""
    x, out = np.arange(20_000.0)[::2], np.full(20_000, 77.0)[::2]
    return Case(lambda: gpu.gpuops.to_device(x).to_host(out), [x, out], [out], "to_host")


@path("arrays")
def arrays_whose_axes_are_turned(gpu):
    with_small_sizes(gpu)
    rows = constant("transfer.cu", "LEAST_TURNED_BYTES") // (64 * 16)
    x, out = np.arange(64.0 * rows).reshape(rows, -1) + 1j, np.full((rows, 64), 77 + 7j)
    return Case(lambda: gpu.gpuops.to_device(x.T).to_host(out.T), [x, out], [out], "to_host")


@path("add")
def parts_whose_axes_are_turned(gpu):
    gpu.fake.set_part_bytes(constant("transfer.cu", "LEAST_TURNED_BYTES"))
    x = np.arange(3 * 64 * 64).reshape(-1, 64) + 0j
    y, out = np.asfortranarray(x + 1j), np.full_like(x, 77 + 7j)
    return Case(lambda: gpu.gpuops.add(x, y, out=out, device="cuda"), [x, y, out], [out])


@path("arrays")
def to_device_of_page_locked_memory(gpu):
    x = gpu.fake.page_locked(np.arange(5.0))
    return Case(lambda: gpu.gpuops.to_device(x).to_host(), [x])


@path("pin", is_first=True)
def the_first_pin(gpu):
    x = np.arange(12.0)

    def run():
        with gpu.gpuops.pin(x):
            return x.copy()

    return Case(run, [x], [x], "pin")


@path("pin")
def a_copy_both_ways(gpu):
    x = np.arange(12.0).reshape(3, 4)

    def run():
        with gpu.gpuops.pin(x[:, 1:]):
            gpu.gpuops.to_device(x).to_host(x[::-1])
            gpu.gpuops.to_device(x).to_host(x[::-1])
            return x.copy()

    return Case(run, [x])


@path("pin")
def parts_that_overlap(gpu):
    x = np.arange(100.0)

    def run():
        pins = [gpu.gpuops.pin(part) for part in (x[20:30], x[50:60], x[10:80], x)]
        return gpu.gpuops.to_device(x).to_host(), len(pins)

    return Case(run, [x], [x], "pin")


@path("pin")
def read_only_memory(gpu):
    x = np.frombuffer(bytes(range(100)), np.uint8)

    def run():
        with gpu.gpuops.pin(x):
            return gpu.gpuops.to_device(x).to_host()

    return Case(run, [x], [x], "pin")


@path("pin")
def host_operands_that_are_pinned(gpu):
    x, indices, out = np.arange(12.0).reshape(6, 2), np.array([5, 0]), np.full((2, 2), 77.0)

    def run():
        with gpu.gpuops.pin(x), gpu.gpuops.pin(indices), gpu.gpuops.pin(out):
            return gpu.gpuops.gather(x, indices, out=out, device="cuda").copy()

    return Case(run, [x, indices, out], [out], "gather")


@path("pinned_empty", is_first=True)
def the_first_page_locked_array(gpu):
    return Case(lambda: gpu.gpuops.pinned_empty((2, 3), "i4").shape)


@path("pinned_empty")
def large_and_small(gpu):
    def run():
        arrays = [gpu.gpuops.pinned_empty(size, "u1") for size in (5, 3 << 20, 5000, 300 << 20)]
        return [array.nbytes for array in arrays]

    return Case(run)


@path("pinned_empty")
def copied_both_ways(gpu):
    def run():
        x = gpu.gpuops.pinned_empty(5, order="F")
        x[...] = 3
        return gpu.gpuops.to_device(x).to_host(x)

    return Case(run)


@path("pinned_memory")
def a_block(gpu):
    def run():
        with gpu.gpuops.pinned_memory():
            x = np.arange(300_000.0)
        return gpu.gpuops.to_device(x).to_host()[-1]

    return Case(run)


@path("pinned_memory")
def an_array_in_a_block(gpu):
    """Without the ends of the block, where NumPy sets a context variable."""
    context = contextvars.copy_context()
    context.run(gpu.gpuops.pinned_memory().__enter__)
    return Case(lambda: context.run(np.full, 300_000, 7.0)[-1])


@path("arrays")
def to_the_other_device(gpu):
    x = gpu.gpuops.to_device(np.arange(5.0))
    return Case(lambda: gpu.gpuops.to_device(x, device=1).to_host(), [x])


@path("arrays")
def to_host_into_an_array(gpu):
    x, out = gpu.gpuops.to_device(np.arange(5.0)), np.full(5, 77.0)
    return Case(lambda: x.to_host(out), [x, out], [out], "to_host")


@path("arrays")
def to_host_into_a_strided_array(gpu):
    x, out = gpu.gpuops.to_device(np.arange(6.0).reshape(2, 3)), np.full((2, 6), 77.0)[:, ::2]
    return Case(lambda: x.to_host(out), [x, out], [out], "to_host")


@path("arrays")
def to_host_of_a_slice(gpu):
    x = gpu.gpuops.to_device(np.arange(12.0).reshape(6, 2))
    return Case(lambda: x[::-2].to_host(), [x])


@path("arrays")
def to_host_on_another_stream(gpu):
    x, stream = gpu.gpuops.to_device(np.arange(5.0)), gpu.gpuops.Stream()
    return Case(lambda: x.to_host(stream=stream), [x])


@path("arrays")
def copies(gpu):
    x = gpu.gpuops.to_device(np.arange(12.0).reshape(6, 2))[::2]
    return Case(lambda: [c.to_host() for c in (x.copy(), copy.copy(x), copy.deepcopy(x))], [x])


@path("arrays")
def fill(gpu):
    x = gpu.gpuops.to_device(np.arange(5.0))

    def run():
        x.fill(3)
        return x.to_host()

    return Case(run, [x], [x], "fill")


@path("arrays")
def fill_a_slice(gpu):
    x = gpu.gpuops.to_device(np.arange(12.0).reshape(6, 2))

    def run():
        x[::2].fill(2)
        return x.to_host()

    return Case(run, [x], [x], "fill")


@path("arrays")
def new_arrays(gpu):
    gpuops = gpu.gpuops
    # Without memory for one, Python's thread-local objects are a SystemError.
    cuda = gpuops.device("cuda")

    def run():
        with cuda:
            empty = gpuops.empty((3, 4), "f4")
            return (
                gpuops.zeros((3, 4), "f4").to_host(),
                gpuops.zeros(2, "i8").to_host(),
                empty.shape,
            )

    return Case(run)


@path("arrays")
def asarray(gpu):
    x = gpu.gpuops.to_device(np.arange(5))
    other = Interface(x)
    call = gpu.gpuops.asarray
    return Case(lambda: [call(x).to_host(), call(other).to_host()], [x, other])


@path("arrays")
def items_and_slices(gpu):
    x = gpu.gpuops.to_device(np.arange(12.0).reshape(6, 2))
    return Case(lambda: [x[1].to_host(), x.reshape(3, 4)[1:][::-1].to_host(), len(x)], [x])


@path("arrays")
def edges(gpu):
    """What repr shows, which itself never fails."""
    x = gpu.gpuops.to_device(np.arange(3000.0))
    return Case(lambda: x._edges(3), [x])


@path("arrays")
def pickled(gpu):
    x = gpu.gpuops.to_device(np.arange(5.0))
    return Case(lambda: pickle.dumps(x, 5) and pickle.loads(pickle.dumps(x)).to_host(), [x])


@path("memory")
def information(gpu):
    return Case(lambda: gpu.gpuops.memory_info(0).total)


@path("memory")
def empty_cache(gpu):
    x = gpu.gpuops.to_device(np.arange(5.0))
    del x
    return Case(lambda: gpu.gpuops.empty_cache(0))


@path("memory")
def used_on_several_streams(gpu):
    gpuops = gpu.gpuops

    def run():
        streams = [gpuops.Stream(device=0) for _ in range(2)]
        x = gpuops.to_device(np.arange(5.0), device=0)
        results = [gpuops.gather(x, [1, 2], stream=stream) for stream in streams]
        del x
        return [result.to_host() for result in results]

    return Case(run)


@path("devices", is_first=True)
def without_a_choice(gpu):
    """Neither the caller nor the environment names a device: it is the GPU where there is one."""
    x = np.arange(5.0)
    return Case(lambda: gpu.gpuops.gather(x, [1, 2]), [x])


@path("devices")
def properties(gpu):
    return Case(lambda: [tuple(device) for device in gpu.gpuops.devices()])


# Streams and events.


@path("streams", is_first=True)
def the_first_stream(gpu):
    return Case(lambda: gpu.gpuops.Stream(device=0).query())


@path("streams")
def a_stream(gpu):
    def run():
        stream = gpu.gpuops.Stream(device=0)
        stream.synchronize()
        return stream.query(), stream.device

    return Case(run)


@path("streams")
def waits(gpu):
    gpuops = gpu.gpuops
    one, other = gpuops.Stream(device=0), gpuops.Stream(device=0)
    x = gpuops.to_device(np.arange(5.0), stream=one)

    def run():
        event = one.record()
        other.wait(event)
        other.wait(one)
        event.synchronize()
        return event.query(), gpuops.gather(x, [1, 2], stream=other).to_host()

    return Case(run, [x])


LONG_SECONDS = 0.026  # a look at whether a wait is to be given up comes sooner


@path("streams")
def a_long_wait(gpu):
    x = gpu.gpuops.to_device(np.arange(5.0))

    def run():
        questions = iter(["the first one"])

        def linger(name, _):
            if name == "cudaEventQuery" and next(questions, None):
                time.sleep(LONG_SECONDS)

        with gpu.fake.visit(linger):
            return gpu.gpuops.add(x, 1.0).to_host()

    return Case(run, [x])


@path("streams")
def waits_across_devices(gpu):
    gpuops = gpu.gpuops
    one, other = gpuops.Stream(device=0), gpuops.Stream(device=1)

    def run():
        other.wait(one)
        one.wait(other.record())
        gpuops.synchronize(0)
        gpuops.synchronize(1)
        return True

    return Case(run)


@path("streams")
def timed_events(gpu):
    gpuops = gpu.gpuops

    def run():
        start, end = gpuops.Event(timing=True, device=0), gpuops.Event(timing=True, device=0)
        stream = gpuops.Stream(device=0)
        start.record(stream)
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) >= 0

    return Case(run)


@path("streams")
def elapsed_time(gpu):
    """Of what is over: where there is nothing to wait for, other libraries' errors stay as well."""
    stream = gpu.gpuops.Stream(device=0)
    start, end = (gpu.gpuops.Event(timing=True, device=0) for _ in range(2))
    start.record(stream)
    end.record(stream)
    end.synchronize()
    return Case(lambda: start.elapsed_time(end) >= 0)


@path("streams")
def current_stream(gpu):
    gpuops = gpu.gpuops
    x = gpuops.to_device(np.arange(5.0))

    def run():
        with gpuops.Stream(device=0) as stream:
            result = gpuops.gather(x, [1, 2])
        return result.stream == stream, result.to_host()

    return Case(run, [x])


class Lender:
    """A stream of another library, which has made it itself."""

    def __init__(self, gpu):
        self.handle, self.library = ctypes.c_void_p(), gpu.fake.library
        assert self.library.cudaStreamCreateWithFlags(ctypes.byref(self.handle), 1) == 0

    def __cuda_stream__(self):
        return (0, self.handle.value)


@path("streams")
def external_stream(gpu):
    gpuops, lender = gpu.gpuops, Lender(gpu)
    x = gpuops.to_device(np.arange(5.0))

    def run():
        stream = gpuops.Stream.from_external(lender)
        return gpuops.gather(x, [1, 2], stream=stream).to_host()

    return Case(run, [x, lender])


# Other libraries.


@path("exchange")
def dlpack_on_the_device(gpu):
    gpuops = gpu.gpuops
    x, stream = gpuops.to_device(np.arange(5.0)), gpuops.Stream()

    def run():
        capsules = [x.__dlpack__(), x.__dlpack__(max_version=(1, 3), stream=stream.ptr, copy=True)]
        return len(capsules), gpuops.from_dlpack(x).to_host()

    return Case(run, [x])


@path("exchange")
def dlpack_of_a_large_array_that_is_gone(gpu):
    """What nobody takes out of a capsule goes back to CUDA, for no store has room for it."""

    def run():
        capsule = gpu.gpuops.empty(5 << 20, "u1").__dlpack__()
        return capsule is None

    return Case(run)


@path("exchange")
def dlpack_given_back(gpu):
    """By a consumer that works on another stream than the array's own."""
    gpuops, home = gpu.gpuops, gpu.gpuops.Stream()

    def run():
        for size in (1, 5 << 16):  # for the store of the stream, and too large for it
            d = gpuops.zeros(size, "c16", stream=home)  # of large items, of which there are few
            give_back = Export(d.__dlpack__()).consume()
            del d
            give_back()
        return gpuops.zeros(5, "u1", stream=home).to_host()

    return Case(run)


@path("exchange")
def dlpack_to_the_host(gpu):
    x = gpu.gpuops.to_device(np.arange(5.0))
    return Case(lambda: np.array(np.from_dlpack(x, device="cpu", copy=True)), [x])


@path("exchange")
def dlpack_import(gpu):
    gpuops = gpu.gpuops
    x = gpuops.to_device(np.arange(5.0))
    producer = Producer(x)

    def run():
        result = gpuops.gather(gpuops.from_dlpack(producer), [1, 2]).to_host()
        gpuops.synchronize(0)
        return result

    return Case(run, [x, producer])


@path("exchange")
def interface_with_a_stream(gpu):
    gpuops, lender = gpu.gpuops, Lender(gpu)
    x = gpuops.to_device(np.arange(5.0))
    other = Interface(x, lender.handle.value)

    def run():
        result = gpuops.gather(other, [1, 2]).to_host()
        gpuops.synchronize(0)
        return result

    return Case(run, [x, other])


@path("cpu")
def interface_for_others(gpu):
    x = gpu.gpuops.to_device(np.arange(5.0))
    return Case(lambda: x.__cuda_array_interface__["shape"], [x])


# On the CPU, where only Python's memory can run out.


class HostArray:
    """An array of a library with a namespace, which has results of its own kind."""

    def __init__(self, data):
        self.data = data
        self.device = "the host"

    def __dlpack__(self, **options):
        return self.data.__dlpack__()

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()

    def __array_namespace__(self):
        return HostArray

    @staticmethod
    def asarray(data, device=None):
        return data if device == "the host" else None


class BareHostArray(HostArray):
    """The same of a library whose asarray knows of no devices."""

    def __array_namespace__(self):
        return BareHostArray

    @staticmethod
    def asarray(data):
        return data


def cpu_path(name, function, *operands, **options):
    """A call of a function, or the error that it ends with."""

    in_place = function in IN_PLACE

    def prepare(gpu):
        arguments = [operands[0].copy(), *operands[1:]] if in_place else operands

        def run():
            try:
                call = getattr(gpu.gpuops, function)
                result = on_host(call(*arguments, device="cpu", **options))
                return arguments[0].copy() if in_place else result
            except (TypeError, ValueError, IndexError, OverflowError) as error:
                return type(error).__name__, str(error)

        outputs = [options["out"]] if "out" in options else arguments[:1] if in_place else []
        return Case(run, [*arguments, *outputs], outputs, function)

    add(Path("cpu", name, prepare))


SQUARE = np.arange(9.0).reshape(3, 3)
cpu_path("matmul", "matmul", SQUARE, SQUARE)
cpu_path("matmul of float16", "matmul", SQUARE.astype("f2"), SQUARE.astype("f2"))
cpu_path("matmul of a subclass", "matmul", SQUARE.view(np.recarray), SQUARE)
cpu_path("a result with a namespace", "gather", HostArray(np.arange(5.0)), np.array([3, 1]))
cpu_path("a namespace without devices", "gather", BareHostArray(np.arange(5.0)), np.array([3, 1]))
cpu_path("an out of another shape", "sigmoid", SQUARE, out=np.zeros(3))
cpu_path("an out of another dtype", "gather", SQUARE, np.array([0]), out=np.zeros((1, 3), "i4"))
cpu_path("an out that meets itself", "sigmoid", SQUARE, out=np.broadcast_to(np.zeros(3), (3, 3)))
cpu_path("shapes that do not match", "add", SQUARE, np.zeros(4))
cpu_path("a dtype without arithmetic", "sigmoid", np.array(["text"]))
cpu_path("a number that does not fit", "add", np.zeros(3, "u1"), 300)
cpu_path("a number of many digits", "add", SQUARE, 10**30)
cpu_path("an axis that is not there", "gather", SQUARE, np.array([0]), axis=7)
cpu_path("an index that is not there", "gather", SQUARE, np.array([9]))
cpu_path("values of another dtype", "scatter_add", np.zeros(3), np.array([0, 1]), np.ones(2, "i4"))
cpu_path(
    "values that NumPy casts", "scatter", np.zeros(3, "M8[s]"), np.array([0]), np.ones(1, "M8[m]")
)
cpu_path("a scalar that NumPy casts", "scatter", np.zeros(3, "U4"), np.array([0, 1]), 7)
cpu_path("values that do not cast", "scatter", np.zeros(3, "M8[s]"), np.array([0]), np.ones(1))
cpu_path("an out that an operand meets", "gather", SQUARE, np.array([2, 1, 0]), out=SQUARE.copy())
cpu_path("a list", "gather", [[1.0, 2.0], [3.0, 4.0]], [1, 0])
cpu_path("a dtype of complex numbers", "add", SQUARE, 1j)
cpu_path("a dtype that is asked for", "correlate", SQUARE, np.ones((2, 2)), output="f4")
cpu_path("an origin", "correlate", SQUARE, np.ones((2, 2)), origin=(0, -1))
cpu_path("an argument that there is not", "gather", SQUARE, np.array([0]), nonsense=1)


def told(function, *arguments, **options):
    """What a call that is bound to fail says."""
    try:
        return function(*arguments, **options)
    except (BufferError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, RecursionError):
            raise
        return type(error).__name__, str(error)


def quiet_path(name, call, **options):
    """A call that needs neither the GPU nor an array."""
    add(Path("cpu", name, lambda gpu: Case(lambda: call(gpu.gpuops)), **options))


quiet_path("a greeting", lambda gpuops: gpuops.hello(2, 3, device="cpu"))
quiet_path("the configuration", lambda gpuops: gpuops._core._config()["version"])
quiet_path("the library of products", lambda gpuops: gpuops._core._blas())
quiet_path("an unknown device", lambda gpuops: told(gpuops.hello, device="here"))
quiet_path("an ordinal below zero", lambda gpuops: told(gpuops.hello, device=-1))
quiet_path("threads beyond a block", lambda gpuops: told(gpuops.hello, threads=2000))
quiet_path(
    "a module on an unknown device",
    lambda gpuops: told(gpuops._core._load_module, b"", {}, "here", {}),
)
quiet_path("a pointer", lambda gpuops: repr(gpuops.Pointer(77)))
quiet_path("an address", lambda gpuops: gpuops.Pointer(1 << 40).address)
quiet_path("an address below zero", lambda gpuops: told(gpuops.Pointer, -1))
quiet_path("a wrapped list", lambda gpuops: repr(gpuops.In([1, 2])))


@path("cpu")
def the_default_device(gpu):
    auto, cuda, third = (gpu.gpuops.device(spec) for spec in ("auto", "cuda", 3))

    def run():
        with auto, cuda, third:
            return gpu.gpuops._core._exchange_device(3)

    return Case(run)


@functools.cache
def neighbour(gpu):
    """The package once more, as another library: its arrays have the exchange API, all in C."""
    with tempfile.TemporaryDirectory() as folder:
        # A copy, because the same file would not be loaded twice.
        copy = shutil.copytree(gpu.gpuops.__path__[0], os.path.join(folder, "gpuops"))
        gpuops = load_package(os.path.dirname(copy), "gpuops_neighbour")
    gpuops.gather(gpuops.to_device([1], device=0), [0]).to_host()
    return gpuops


@path("cpu")
def an_array_of_a_neighbour(gpu):
    theirs = neighbour(gpu)
    x, out = theirs.to_device(np.arange(5.0)), theirs.to_device(np.zeros(2))

    def run():
        result = gpu.gpuops.gather(x, [1, 2])
        assert gpu.gpuops.gather(x, [3, 1], out=out) is out
        return type(result) is theirs.DeviceArray, result.to_host(), out.to_host()

    return Case(run, [x, out], operator="gather")


@path("cpu")
def a_neighbours_array_that_is_taken_over(gpu):
    x = neighbour(gpu).to_device(np.arange(5.0))
    return Case(lambda: gpu.gpuops.asarray(x).to_host(), [x], operator="asarray")


@path("cpu")
def a_neighbours_integers(gpu):
    """The result is of their kind, and of the dtype of NumPy's data."""
    indices = neighbour(gpu).to_device(np.array([3, 1]))
    return Case(lambda: gpu.gpuops.gather(SQUARE, indices[:1]).to_host(), [indices])


# Kernels that are compiled at run time.

GLOBAL = SAXPY + "\n__device__ double table[4] = {1, 2, 3, 4};\n"


@functools.cache
def machine_code(gpuops):
    """Compiled before any call fails, and without a call of CUDA; None without NVRTC.

    Another process opens that. In this one it would have every fork copy what it brings along, and
    a sweep forks for each of its steps.
    """
    code, status = apart(compile_here, gpuops)
    assert status == 0, f"NVRTC's process ended with {status}"
    return code


def compile_here(gpuops):
    try:
        importlib.import_module(f"{gpuops.__name__}._compile").find_nvrtc()
    except gpuops.CompileError:
        return None
    return cubin(gpuops, GLOBAL, ARCHITECTURE)[0]


def load_module(gpu):
    code = machine_code(gpu.gpuops)
    return gpu.gpuops._core._load_module(code, {"saxpy": ("saxpy", SAXPY_TYPES)}, 0, {})


def kernel_path(prepare):
    return path("kernels", needs_nvrtc=True)(prepare)


@contextlib.contextmanager
def twins(gpu):
    """What the kernel does."""
    with gpu.fake.twin("saxpy", saxpy_twin):
        yield


@contextlib.contextmanager
def idle_twins(gpu):
    """The kernel does nothing, for which it needs no memory: any function of C can do that."""
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    gpu.fake.library.fake_set_module_twin(b"saxpy", nothing)
    yield
    gpu.fake.library.fake_set_module_twin(b"saxpy", None)


@kernel_path
def compile_and_load(gpu):
    # Not what fails here, and to open it takes longer than all that does.
    importlib.import_module(f"{gpu.gpuops.__name__}._compile").find_nvrtc()

    def run():
        module = gpu.gpuops.compile(SAXPY)
        return module.kernels, module.device, module["saxpy"].name

    return Case(run)


@kernel_path
def a_module(gpu):
    def run():
        module = load_module(gpu)
        kernel = module.get_function("saxpy")
        return kernel.name, kernel.attributes.registers >= 0, module.get_global("table").nbytes

    return Case(run)


# Of these only Python's memory can run out.


def described_path(prepare):
    return path("cpu", needs_nvrtc=True)(prepare)


@described_path
def what_a_module_shows(gpu):
    load = gpu.gpuops._core._load_module
    code, kernels = (
        machine_code(gpu.gpuops),
        {"saxpy": ("saxpy", SAXPY_TYPES), "other": ("o", None)},
    )

    def run():
        module = load(code, kernels, None, {"table": "table"})
        return repr(module), module.kernels, module.device, len(module.cubin)

    return Case(run)


@described_path
def kernels_of_machine_code(gpu):
    code = machine_code(gpu.gpuops)
    return Case(lambda: gpu.gpuops._core._cubin_kernels(code))


@described_path
def what_a_module_does_not_have(gpu):
    module = load_module(gpu)
    return Case(lambda: [told(module.get_function, "other"), told(module.get_global, "other")])


@described_path
def what_a_kernel_shows(gpu):
    kernel = load_module(gpu)["saxpy"]
    return Case(lambda: (repr(kernel), str(kernel), kernel.attributes.registers >= 0))


@described_path
def a_launch_that_is_refused(gpu):
    kernel = load_module(gpu)["saxpy"]
    launch = kernel[1, 32]
    (x,) = on_device(gpu, [np.ones(10, np.float32)])
    wrong = [(2.0, x, x), ("a", x, x, 10), (2.0, x, [1], 10), (10**99, x, x, 10), (2.0, x, x, 1.5)]

    def run():
        counts = [told(kernel.forall, count) for count in (-1, 1 << 62, "a")]
        too_much = told(kernel.forall, 10, shared_bytes=1 << 40)
        return [*counts, too_much, *[told(launch, *arguments) for arguments in wrong]]

    return Case(run, [x])


@path("cpu")
def a_compilation(gpu):
    """By the tests' own compiler, which needs no memory of Python's."""
    core = gpu.gpuops._core
    core._nvrtc_open(str(gpu.fake.path.with_name(build.COMPILER)))
    arguments = b"", b"name", (b"option",), {b"header": b"text"}, (b"one", b"two")
    return Case(lambda: list(map(str, core._nvrtc_compile(*arguments))))


@path("cpu")
def the_version_of_a_compiler(gpu):
    compiler = str(gpu.fake.path.with_name(build.COMPILER))
    return Case(lambda: gpu.gpuops._core._nvrtc_open(compiler))


@kernel_path
def a_launch_on_device_arrays(gpu):
    kernel = load_module(gpu)["saxpy"]
    x, y = on_device(gpu, [np.ones(10, np.float32), np.arange(10, dtype=np.float32)])

    def run():
        kernel[1, 32](2.0, x, y, 10)
        return y.to_host()

    return Case(run, [x, y])


@kernel_path
def a_launch_on_host_arrays(gpu):
    kernel = load_module(gpu)["saxpy"]
    x, y = np.ones(10, np.float32), np.arange(10, dtype=np.float32)

    def run():
        kernel.forall(10)(2.0, x, y, 10)
        return y.copy()

    return Case(run, [x, y], [y], "saxpy")


@kernel_path
def a_launch_of_a_thread_for_each_element(gpu):
    kernel = load_module(gpu)["saxpy"]
    x, y = on_device(gpu, [np.ones(10, np.float32), np.arange(10, dtype=np.float32)])

    def run():
        kernel.forall(10)(2.0, x, y, 10)
        return y.to_host()

    return Case(run, [x, y])


@kernel_path
def a_launch_on_page_locked_arrays(gpu):
    kernel = load_module(gpu)["saxpy"]
    x = gpu.fake.page_locked(np.ones(10, np.float32))
    y = gpu.fake.page_locked(np.arange(10, dtype=np.float32))

    def run():
        kernel[1, 32](2.0, x, y, 10)
        return y.copy()

    return Case(run, [x, y])


@kernel_path
def a_launch_on_a_stream(gpu):
    gpuops = gpu.gpuops
    kernel = load_module(gpu)["saxpy"]
    x, y = on_device(gpu, [np.ones(10, np.float32), np.arange(10, dtype=np.float32)])

    def run():
        stream = gpuops.Stream(device=0)
        kernel[1, 32, stream](2.0, gpuops.In(Interface(x)), gpuops.InOut(y), 10)
        return y.to_host()

    return Case(run, [x, y])


@kernel_path
def a_kernel_with_much_shared_memory(gpu):
    kernel = load_module(gpu)["saxpy"]

    def run():
        kernel.max_dynamic_shared_bytes = 100_000
        return kernel.max_dynamic_shared_bytes

    return Case(run)
