"""Tables, indices and outputs larger than the memory of the GPU: done piece by piece, exactly.

The fake runtime's devices are as small as a test wants them. The kernels and transfers are those of
a real GPU, so only sizes differ.
"""

import numpy as np
import pytest
import reference
from helpers import Guarded, filled_array, same

KIBIBYTE = 1 << 10
LIMIT = 48 * KIBIBYTE


@pytest.fixture
def small(fake_device):
    """The fake device with little memory, and the module to call."""
    fake = fake_device.fake
    gpuops = fake_device.gpuops
    gpuops.gather([1], [0], device="cuda")
    gpuops.empty_cache(0)
    before = fake.live().bytes
    fake.leave_free(LIMIT)
    with gpuops.device("cuda"):
        yield gpuops
    gpuops.empty_cache(0)
    assert fake.live().bytes <= before
    fake.reset()
    assert fake.take_misuse() == ""


# Name: shape and dtype of x, shape of the indices, axis. Every operand that is named is larger than
# the memory, most of them several times.
SHAPES = {
    "wide rows": ((12, 3000), "f8", (15,), 0),
    "wide rows, all of odd size": ((41, 1111), "V7", (53,), 0),
    "one row is larger than the memory": ((3, 30_000), "f8", (4,), 0),
    "one odd row is larger than the memory": ((3, 77_777), "V3", (5,), 0),
    "one element is larger than the memory": ((3,), "V100000", (4,), 0),
    "long table": ((300_000,), "f4", (500,), 0),
    "long table, long indices": ((100_000,), "u1", (60_000,), 0),
    "many indices": ((100,), "f4", (200_000,), 0),
    "many indices in two dimensions": ((100,), "i2", (300, 500), 0),
    "many narrow rows": ((50_000, 3), "u1", (70_000,), 0),
    "many outer": ((20_000, 5), "f4", (7,), 1),
    "many outer and inner": ((500, 9, 40), "f4", (2, 3), 1),
    "long axis in the middle": ((3, 20_000, 3), "i2", (9000,), 1),
    "long axis in the middle, wide inner": ((2, 300, 200), "i4", (60,), 1),
    "long axis last": ((4, 60_000), "u1", (50_000,), 1),
    "five dimensions": ((6, 5, 30, 5, 6), "f8", (4, 11), 2),
    "flattened": ((300, 400), "f4", (30_000,), None),
}


def operands(name, mode="raise"):
    shape, dtype, index_shape, axis = SHAPES[name]
    x = filled_array(shape, dtype)
    size = x.size if axis is None else shape[axis]
    reach = 1 if mode == "raise" else 2
    generator = np.random.default_rng(len(name))
    indices = generator.integers(-reach * size, reach * size, size=index_shape, dtype=np.int32)
    return x, indices, axis


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
def test_gather(small, fake_device, name, mode):
    x, indices, axis = operands(name, mode)
    same(small.gather(x, indices, axis=axis, mode=mode), reference.gather(x, indices, axis, mode))


@pytest.mark.parametrize("name", SHAPES)
def test_fill_value(small, name):
    x, indices, axis = operands(name, "fill")
    value = filled_array((), x.dtype, seed=5)[()]
    expected = reference.gather(x, indices, axis, "fill", value)
    same(small.gather(x, indices, axis=axis, mode="fill", fill_value=value), expected)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", ["C", "F", "strided", "backward", "misaligned", "padded"])
def test_every_layout(small, name, layout):
    """x, indices and out all lie oddly in host memory."""
    x, indices, axis = operands(name)
    expected = reference.gather(x, indices, axis)
    odd = Guarded(x.shape, x.dtype, layout)
    odd.array[...] = x
    x = odd.array
    indices = np.repeat(indices, 2, axis=-1)[..., ::2]
    out = Guarded(expected.shape, x.dtype, layout)
    assert small.gather(x, indices, axis=axis, out=out.array) is out.array
    assert out.array.tobytes() == expected.tobytes()
    assert out.kept_to_its_own()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_bad_index_leaves_out_as_it_was(small, name, where):
    x, indices, axis = operands(name)
    size = x.size if axis is None else x.shape[axis]
    place = {"first": 0, "middle": indices.size // 2, "last": indices.size - 1}[where]
    indices.flat[place] = size
    # A second one further on: the first is named, whichever piece comes first.
    indices.flat[-1] = size if where == "last" else -size - 1
    before = x.shape[:axis] if axis is not None else ()
    after = x.shape[axis + 1 :] if axis is not None else ()
    out = Guarded(before + indices.shape + after, x.dtype)
    with pytest.raises(IndexError) as caught:
        small.gather(x, indices, axis=axis, out=out.array)
    named = axis or 0
    assert str(caught.value) == f"index {size} is out of bounds for axis {named} with size {size}"
    assert out.untouched()
    indices %= size
    same(small.gather(x, indices, axis=axis), reference.gather(x, indices, axis))


ALONG = {
    "both large, last axis": ((300, 200), "f4", (300, 250), 1),
    "both large, first axis": ((300, 200), "f4", (350, 200), 0),
    "one long row": ((100_000,), "f4", (90_000,), 0),
    "few long rows": ((2, 60_000), "i2", (2, 70_000), 1),
    "long columns": ((60_000, 2), "i2", (70_000, 2), 0),
    "middle axis": ((20, 50, 60), "u1", (20, 70, 60), 1),
    "indices broadcast": ((50, 40, 60), "f4", (1, 70, 60), 1),
    "array broadcasts": ((1, 40, 600), "f4", (50, 7, 600), 1),
    "wide elements": ((20, 30), "V333", (20, 40), 1),
    "flattened": ((300, 200), "f4", (70_000,), None),
}


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("mode", ["raise", "wrap", "clip", "fill"])
def test_take_along_axis(small, name, mode):
    shape, dtype, index_shape, axis = ALONG[name]
    x = filled_array(shape, dtype)
    size = x.size if axis is None else shape[axis]
    reach = 1 if mode == "raise" else 2
    indices = np.random.default_rng(4).integers(-reach * size, reach * size, size=index_shape)
    expected = reference.take_along_axis(x, indices, axis, mode)
    same(small.take_along_axis(x, indices, axis, mode=mode), expected)
    same(
        small.take_along_axis(np.asfortranarray(x), np.asfortranarray(indices), axis, mode=mode),
        expected,
    )
    if mode == "raise":
        indices.flat[-1] = size
        out = Guarded(expected.shape, x.dtype)
        with pytest.raises(IndexError, match=f"index {size} is out of bounds"):
            small.take_along_axis(x, indices, axis, out=out.array)
        assert out.untouched()


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes(small, fake_device, seed):
    generator = np.random.default_rng(seed)
    free = int(generator.integers(24, 200)) * KIBIBYTE
    ndim = int(generator.integers(1, 5))
    shape = [1] * ndim
    while np.prod(shape) < 60_000:
        shape[generator.integers(ndim)] *= int(generator.integers(2, 9))
    x = filled_array(shape, ["u1", "i2", "V3", "f4", "V6"][seed % 5], seed)
    x = x.transpose(generator.permutation(ndim))
    # The time grows with how many pieces there are of the table, times those of the indices.
    fake_device.fake.leave_free(max(free, x.nbytes // 16))
    axis = int(generator.integers(ndim))
    size = x.shape[axis]
    count = max(1, 150_000 // (x.size // size))
    mode = ["raise", "wrap", "clip", "fill"][seed % 4]
    indices = generator.integers(-size, size, size=count)
    same(small.gather(x, indices, axis=axis, mode=mode), reference.gather(x, indices, axis, mode))
    indices = generator.integers(-size, size, size=x.shape)
    expected = reference.take_along_axis(x, indices, axis, mode)
    same(small.take_along_axis(x, indices, axis, mode=mode), expected)


def test_odd_layouts_of_some_mebibytes(fake_device):
    """More than is packed on the host at a time, and no multiple of it."""
    gpuops = fake_device.gpuops
    for dtype, shape in (("f4", (3001, 701)), ("V3", (2, 1_500_001)), ("V70001", (101,))):
        for layout in ("strided", "backward", "F"):
            x, out = Guarded(shape, dtype, layout), Guarded(shape, dtype, layout)
            x.array[...] = filled_array(shape, dtype)
            indices = np.random.default_rng(1).permutation(shape[0])
            gpuops.gather(x.array, indices, out=out.array, device="cuda")
            assert out.array.tobytes() == x.array[indices].tobytes()
            assert out.kept_to_its_own()


def test_every_amount_of_memory(small, fake_device):
    """With too little the call says so; with enough it is right; nothing stays behind."""
    x = filled_array((60, 500), "f4")
    indices = np.random.default_rng(0).integers(0, 60, size=80)
    outcomes = []
    for limit in [0, 1, 256, 1 << 10, 4 << 10, *range(8 << 10, 400 << 10, 7777), 1 << 20]:
        small.empty_cache(0)
        fake_device.fake.leave_free(limit)
        out = Guarded((80, 500), "f4")
        live = fake_device.fake.live()
        try:
            small.gather(x, indices, out=out.array)
        except MemoryError as error:
            outcomes.append("error")
            assert "cuda:0" in str(error) and out.untouched()
        else:
            outcomes.append("value")
            assert out.array.tobytes() == x[indices].tobytes()
        small.empty_cache(0)
        assert fake_device.fake.live().allocations == live.allocations
        assert fake_device.fake.live().bytes <= live.bytes
    assert outcomes[0] == "error" and outcomes[-1] == "value"
    # More memory never makes it worse.
    assert outcomes == sorted(outcomes)


def test_memory_that_others_use(fake_device):
    """What is free counts, not what the device has; the default of the fake is 64 MiB."""
    gpuops, fake = fake_device.gpuops, fake_device.fake
    x = np.zeros((120, 1 << 20), np.uint8)
    x[:, 7] = np.arange(120)
    indices = np.arange(119, -1, -5)
    result = gpuops.gather(x, indices, device="cuda")
    assert (result[:, 7] == indices).all() and result.sum() == indices.sum()
    live = fake.live()
    assert live.peak_bytes - live.pinned_bytes <= 64 << 20
    columns = gpuops.gather(x, [7, 8], axis=1, device="cuda")
    assert (columns == x[:, 7:9]).all()


@pytest.mark.parametrize("mode", ["raise", "clip"])
def test_hardly_any_memory_is_left_for_a_large_table(fake_device, mode):
    """Above 64 MiB the free memory is asked for first, and the answer may be next to nothing."""
    gpuops, fake = fake_device.gpuops, fake_device.fake
    x = np.zeros(65 << 20, np.uint8)
    places = [0, 1000, len(x) - 1]
    x[places] = [1, 2, 3]
    for limit in [0, 1, 255, 256, 300, 560, 800, 1100, 1500, 4000, 20_000]:
        fake.leave_free(limit)
        try:
            result = gpuops.gather(x, places, mode=mode, device="cuda")
        except MemoryError as error:
            assert "out of memory on cuda:0" in str(error)
            assert limit < 20_000
        else:
            assert result.tolist() == [1, 2, 3]
    fake.reset()


def test_what_fits_as_it_lies_takes_no_more(fake_device):
    """Windows and fill rows count with the memory that they need, not with a multiple of it."""
    gpuops, fake = fake_device.gpuops, fake_device.fake
    memory = filled_array(100_000, "u1")
    windows = np.lib.stride_tricks.sliding_window_view(memory, 50_000)
    gpuops.empty_cache(0)
    fake.reset()
    before = fake.live().peak_bytes
    same(gpuops.gather(windows, [7, -1], device="cuda"), windows[[7, -1]])
    assert fake.live().peak_bytes - before < 300_000
    gpuops.empty_cache(0)
    fake.reset()
    indices = np.zeros(100_000, np.int8)
    result = gpuops.gather(memory, indices, mode="fill", device="cuda")
    assert (result == memory[0]).all()
    assert fake.live().peak_bytes - before < 310_000
    fake.reset()
