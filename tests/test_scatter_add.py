"""scatter_add: `numpy.add.at` along an axis. What it shares with scatter is in test_scatter.py."""

import math
import threading

import numpy as np
import pytest
from helpers import INDEX_DTYPES, Guarded, run_child, turns_of
from numpy.exceptions import AxisError

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f4", "f8", "c8", "c16"]
MODES = ["raise", "wrap", "clip", "fill"]
CALLS = {"fake": 1, "cuda": 1000}  # of one kind, which all have the same bits


def added(x, indices, values, axis=0):
    """What is to come of it: NumPy, with one addition after the other."""
    result = np.array(x, order="C")
    flat = result.reshape(-1) if axis is None or x.ndim == 0 else result
    axis = 0 if axis is None or x.ndim == 0 else axis % x.ndim
    indices = np.asarray(indices)
    # NumPy 2.4 reads beyond the end of values of one dimension where the indices have two.
    values = np.broadcast_to(values, flat.shape[:axis] + indices.shape + flat.shape[axis + 1 :])
    np.add.at(flat, (slice(None),) * axis + (indices,), values)
    return result


def numbers(random, shape, dtype):
    """Numbers that a float adds without rounding, in any order."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, shape, dtype, endpoint=True)
    values = random.integers(-9, 10, shape)
    return (values + 1j * (values % 7) if dtype.kind == "c" else values).astype(dtype)


def rough_numbers(random, shape, dtype):
    """Numbers whose sum is another one in every order."""
    values = random.standard_normal(shape) * 10.0 ** random.integers(-6, 7, shape)
    return (values - 0.3j * values if np.dtype(dtype).kind == "c" else values).astype(dtype)


# Literals.


def test_duplicates_add_up(gpuops):
    x = np.zeros(5)
    assert gpuops.scatter_add(x, [3, 0, -2, 3], [0.5, 1, 2, 4]) is None
    assert x.tolist() == [1, 0, 0, 6.5, 0]


def test_a_histogram(gpuops):
    counts = np.array([100, 0, 0, 7], np.int64)
    gpuops.scatter_add(counts, [[0, 2], [2, 3], [2, 0]], 1)
    assert counts.tolist() == [102, 0, 3, 8]


def test_rows_and_columns(gpuops):
    x = np.ones((3, 2), np.int32)
    gpuops.scatter_add(x, [2, 0, 2], [[1, 2], [3, 4], [5, 6]])
    assert x.tolist() == [[4, 5], [1, 1], [7, 9]]
    gpuops.scatter_add(x, [1, 1], [[10, 1], [20, 2], [30, 3]], axis=1)
    assert x.tolist() == [[4, 16], [1, 23], [7, 42]]
    gpuops.scatter_add(x, [5, 0, 5], [1, 2, 3], axis=None)
    assert x.tolist() == [[6, 16], [1, 23], [7, 46]]


def test_integers_wrap_around(gpuops):
    for dtype, expected in [("i1", 44), ("u1", 44), ("i2", 300), ("u2", 300)]:
        x = np.zeros(2, dtype)
        gpuops.scatter_add(x, [1, 1, 1], np.array([100], dtype))
        assert x.tolist() == [0, expected]
    x = np.array([2**63 - 1], np.int64)
    gpuops.scatter_add(x, [0, 0], [1, 1])
    assert x.tolist() == [-(2**63) + 1]


def test_16_bit_floats_are_rounded_once(gpuops):
    x = np.ones(3, np.float16)
    gpuops.scatter_add(x, np.full(3000, 1), np.float16(0.0004))
    # NumPy adds nothing at all here, a little at a time.
    assert x.tolist() == [1, float(np.float16(1 + 3000 * float(np.float16(0.0004)))), 1]
    x = np.array([2048], np.float16)
    gpuops.scatter_add(x, [0, 0, 0], np.float16(1))
    assert x.tolist() == [2052]


def test_zeros_and_nans_that_nothing_is_added_to_keep_their_bits(gpuops):
    for dtype, bits in [("f4", [0x80000000, 0x7FA00001]), ("f2", [0x8000, 0x7D01])]:
        for count in (3, 20_000):
            x = np.zeros(8, dtype)
            x.view(f"u{x.itemsize}")[:2] = bits
            x[2] = 0
            gpuops.scatter_add(x, np.full(count, 2), np.zeros((), dtype))
            assert x.view(f"u{x.itemsize}").tolist() == [*bits, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_values_of_fewer_dimensions_than_the_indices(gpuops, dtype):
    x, indices, values = np.zeros(3, dtype), [[0, 1], [0, 2], [0, 0]], np.array([1, 10], dtype)
    assert added(x, indices, values).tolist() == [13, 10, 10]
    gpuops.scatter_add(x, indices, values)
    assert x.tolist() == [13, 10, 10]


def test_negative_zero_stays_if_only_such_are_added(gpuops):
    for count in (3, 20_000):
        x = np.array([-0.0, 0.0], np.float32)
        gpuops.scatter_add(x, np.arange(count) % 2, np.full(count, -0.0, np.float32))
        assert x.view(np.uint32).tolist() == [0x80000000, 0]


def test_fill_leaves_out_what_is_outside(gpuops):
    x = np.zeros(4)
    gpuops.scatter_add(x, [4, -5, 1, -1, 1], [1, 2, 3, 4, 5], mode="fill")
    assert x.tolist() == [0, 8, 0, 4]


# Errors, which leave x as it was.


@pytest.mark.parametrize("dtype", ["f4", "f2", "i8"])
@pytest.mark.parametrize(
    "count, size", [(3, 7), (3000, 7), (30_000, 7), (20_000, 15_000), (9000, 70_000)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bad_index_changes_nothing(gpuops, dtype, count, size, deterministic):
    x = Guarded((size,), dtype)
    indices = np.arange(count) % size
    for bad in (size, -size - 1):
        wrong = indices.copy()
        wrong[count // 2] = bad
        wrong[-1] = 10**9
        with pytest.raises(IndexError) as caught:
            gpuops.scatter_add(x.array, wrong, np.ones(count, dtype), deterministic=deterministic)
        assert str(caught.value) == f"index {bad} is out of bounds for axis 0 with size {size}"
        assert x.untouched()


def test_what_cannot_be_added(gpuops):
    for dtype in ("?", "M8[s]", "S3", "V4"):
        x = np.zeros(3, dtype)
        with pytest.raises(TypeError):
            gpuops.scatter_add(x, [0], np.zeros(1, dtype))
    x = np.zeros(3, np.int32)
    for values in (1.5, [1.5], [1j]):
        with pytest.raises(TypeError, match="cast|values"):
            gpuops.scatter_add(x, [0], values)
    with pytest.raises(TypeError, match="mask"):
        gpuops.scatter_add(x, [True, False, True], 1)
    with pytest.raises(AxisError):
        gpuops.scatter_add(x, [0], 1, axis=1)
    # numpy.add.at takes no values with more dimensions either.
    for values in (np.ones(2, np.int32), np.ones((1, 1, 1), np.int32)):
        with pytest.raises(ValueError, match="shape mismatch"):
            gpuops.scatter_add(x, [0, 1, 2], values)
    with pytest.raises(TypeError):
        gpuops.scatter_add(x, [0], 1, deterministic=None, extra=1)
    assert not x.any()


def test_empty_calls(gpuops):
    for deterministic in (False, True):
        for shape in ((3, 0), (0, 3), (3, 0, 2)):
            x = np.zeros(shape, np.float32)
            gpuops.scatter_add(x, [], 1, deterministic=deterministic)
            gpuops.scatter_add(x, np.zeros((2, 0), int), 1, deterministic=deterministic)
            for count in (2, 3000):
                with pytest.raises(IndexError, match="index 5 is out of bounds for axis 0"):
                    gpuops.scatter_add(x, np.full(count, 5), 1, deterministic=deterministic)
                if shape[0]:
                    gpuops.scatter_add(x, np.full(count, 2), 1, deterministic=deterministic)
                gpuops.scatter_add(x, np.full(count, 5), 1, mode="fill")
        x = np.zeros(3)
        gpuops.scatter_add(x, [], [], deterministic=deterministic)
        assert not x.any()


# NumPy as the expectation.


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, "f2"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_dtype(gpuops, dtype, deterministic):
    random = np.random.default_rng(1)
    for shape, axis in [((6, 5), 0), ((6, 5), 1), ((2, 3, 4), 1), ((6, 5), None), ((900,), 0)]:
        for counts in ((2, 3), (40,), (2000,)):
            size = int(np.prod(shape)) if axis is None else shape[axis]
            indices = random.integers(-size, size, counts)
            whole = () if axis is None else shape
            target = (*whole[: axis or 0], *counts, *(whole[axis + 1 :] if whole else ()))
            for values in (numbers(random, target, dtype), numbers(random, (), dtype)):
                x = numbers(random, shape, dtype)
                expected = added(x.astype("f4") if dtype == "f2" else x, indices, values, axis)
                gpuops.scatter_add(x, indices, values, axis=axis, deterministic=deterministic)
                assert x.tobytes() == expected.astype(dtype).tobytes()


def test_bfloat16(gpuops):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(2)
    for count, size, width in [(50, 6, 3), (5000, 7, 1), (3000, 900, 8), (3000, 900, 3)]:
        x = random.random((size, width)).astype(ml_dtypes.bfloat16)
        values = random.random((count, width)).astype(ml_dtypes.bfloat16)
        indices = random.integers(0, size, count)
        expected = added(x.astype(np.float64), indices, values.astype(np.float64))
        gpuops.scatter_add(x, indices, values)
        # One rounding, of a sum in float32.
        error = np.abs(x.astype(np.float64) - expected)
        assert (error <= np.abs(expected) * (2.0**-8 + 2.0**-14)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_every_mode_with_every_index_dtype(gpuops, mode, index_dtype):
    random = np.random.default_rng(3)
    dtypes = ["f4", "i2", "f8"]
    # Tables of tiles take the fake GPU long. There a case has one of the dtypes, but each mode has
    # all, and so has each dtype of indices.
    few = [dtypes[(MODES.index(mode) + INDEX_DTYPES.index(index_dtype)) % len(dtypes)]]
    for count, size in ((40, 5), (3000, 50), (20_000, 11), (20_000, 15_000), (8000, 40_000)):
        bound = size if mode == "raise" else 3 * size
        info = np.iinfo(index_dtype)
        indices = random.integers(max(-bound, info.min), min(bound, info.max + 1), count)
        indices = indices.astype(index_dtype)
        values = random.integers(0, 9, count).astype(np.float32)
        places = indices.astype(np.int64)
        kept = np.ones(count, bool)
        if mode == "wrap":
            places %= size
        elif mode == "clip":
            places = np.clip(places, 0, size - 1)
        else:
            kept = (places >= -size) & (places < size)
        if mode == "raise" and not kept.all():
            continue
        for dtype in dtypes if size < 10_000 else few:
            x = np.zeros(size, dtype)
            gpuops.scatter_add(x, indices, values.astype(dtype), mode=mode)
            expected = added(np.zeros(size, dtype), places[kept], values[kept].astype(dtype))
            assert x.tobytes() == expected.tobytes()


# Counts and sizes that lead to the different ways of adding: within one block, into tables in
# shared memory, of one block or one bucket, atomically, in windows of a large table, in order.
WAYS = [
    (1000, 30, 1),
    (1025, 2000, 1),
    (20_000, 1, 1),
    (20_000, 10, 1),
    (30_000, 257, 1),
    (9000, 12, 3),
    (20_000, 5000, 1),
    (20_000, 15_000, 1),
    (8000, 100_000, 1),
    (3000, 600, 4),
    (3000, 600, 2),
    (3000, 600, 7),
    (2000, 300, 64),
    (1, 5, 20_000),
]


@pytest.mark.parametrize("count, size, width", WAYS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i4", "u8", "i1", "u2", "f2"])
def test_every_way(gpuops, count, size, width, dtype):
    random = np.random.default_rng([count, size, width])
    x, values = numbers(random, (size, width), dtype), numbers(random, (count, width), dtype)
    if dtype == "f2":  # few enough to be exact in float32, and in the end in float16
        x, values = x % 2, np.sign(values) * (random.random(values.shape) < 0.02)
        values = values.astype(dtype)
    indices = random.integers(-size, size, count)
    expected = added(x.astype("f4") if dtype == "f2" else x, indices, values).astype(dtype)
    gpuops.scatter_add(x, indices, values)
    assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8", "i1", "f2"])
@pytest.mark.parametrize("size", [15_000, 100_000])
def test_most_indices_in_one_place(gpuops, size, dtype):
    random = np.random.default_rng(size)
    indices = random.integers(0, size, 40_000)
    indices[random.random(len(indices)) < 0.9] = size - 5
    values = (random.random(len(indices)) < 0.05).astype(dtype)
    expected = added(np.zeros(size, "f4" if dtype == "f2" else dtype), indices, values)
    for options in ({}, {"deterministic": True}):
        x = np.zeros(size, dtype)
        gpuops.scatter_add(x, indices, values, **options)
        assert x.tobytes() == expected.astype(dtype).tobytes()


@pytest.mark.parametrize("count, size, width", WAYS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_deterministic_sums_are_those_of_numpy(gpuops, count, size, width, dtype):
    random = np.random.default_rng([count, size, width, 1])
    x = rough_numbers(random, (size, width), dtype)
    values = rough_numbers(random, (count, width), dtype)
    indices = random.integers(-size, size, count)
    expected = added(x, indices, values)
    if count > 2 * size:
        assert added(x, indices[::-1], values[::-1]).tobytes() != expected.tobytes()
    gpuops.scatter_add(x, indices, values, deterministic=True)
    assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_deterministic_sums_along_any_axis(gpuops, device, dtype):
    if device.fake is not None:
        device.fake.set_scheduler("shuffled", 1)
    random = np.random.default_rng(6)
    for shape, axis, counts in [
        ((5, 6), 1, (40,)),
        ((50, 30), -1, (900,)),
        ((3, 40, 20), 1, (10, 50)),
        ((30, 20), None, (4000,)),
    ]:
        x = rough_numbers(random, (*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
        size = x.size if axis is None else shape[axis]
        indices = random.integers(-size, size, counts)
        target = np.take(x, indices, axis).shape
        values = np.asfortranarray(rough_numbers(random, target, dtype))
        expected = added(x, indices, values, axis)
        gpuops.scatter_add(x, indices, values, axis=axis, deterministic=True)
        assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_cpu_adds_in_order_anyway(gpuops, device, dtype):
    if device.spec != "cpu":
        pytest.skip("atomic additions come in any order")
    random = np.random.default_rng(4)
    for shape, axis, counts in [
        ((500,), 0, (70_000,)),
        ((400_000,), 0, (300_000,)),
        ((50, 30), 0, (9000,)),
        ((3, 40, 20), 1, (100, 80)),
        ((300, 70), 1, (900,)),
    ]:
        x = rough_numbers(random, shape, dtype)
        target = shape[:axis] + counts + shape[axis + 1 :]
        values = rough_numbers(random, target, dtype)
        indices = random.integers(-shape[axis], shape[axis], counts)
        expected = added(x, indices, values, axis)
        gpuops.scatter_add(x, indices, values, axis=axis)
        assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(gpuops, seed, deterministic):
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 7, random.integers(1, 5)))
    axis = [None, *range(-len(shape), len(shape))][random.integers(2 * len(shape) + 1)]
    size = int(np.prod(shape)) if axis is None else shape[axis]
    many = 1500 if seed % 4 == 0 else 1
    indices = random.integers(-size, size, (many, *random.integers(1, 5, random.integers(0, 3))))
    whole = () if axis is None else shape
    place = 0 if axis is None else axis % len(shape)
    target = whole[:place] + indices.shape + whole[place + 1 :]
    dtype = random.choice([*INTEGERS, *FLOATS])
    values = numbers(random, target, dtype)
    for i in range(values.ndim):
        if random.random() < 0.2:
            values = values.take([0], i)
    if random.random() < 0.3:
        values = np.asfortranarray(values)
    x = numbers(random, (2, *shape), dtype)[:, ::-1][1]
    expected = added(x, indices, values, axis)
    gpuops.scatter_add(x, indices, values, axis=axis, deterministic=deterministic)
    assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", ["C", "F", "strided", "padded", "backward", "misaligned"])
@pytest.mark.parametrize("dtype", ["f2", "i4", "c16"])
@pytest.mark.parametrize("count", [6, 1500])
def test_every_layout(gpuops, layout, dtype, count):
    random = np.random.default_rng(5)
    for shape, axis in [((7, 4), 0), ((7, 4), 1), ((3, 4, 5), 1), ((7, 4), None)]:
        x, indices = Guarded(shape, dtype, layout), Guarded((2, count), np.int32, layout)
        x.array[...] = numbers(random, shape, dtype) % 2 if dtype != "c16" else 1 + 2j
        indices.array[...] = random.integers(-4, 4, (2, count))
        whole = () if axis is None else shape
        target = (*whole[: axis or 0], 2, count, *(whole[axis + 1 :] if whole else ()))
        values = Guarded(target, dtype, layout)
        values.array[...] = numbers(random, target, dtype) if dtype != "f2" else 1
        expected = added(x.array, indices.array, values.array, axis)
        gpuops.scatter_add(x.array, indices.array, values.array, axis=axis)
        assert x.array.tobytes() == expected.tobytes()
        assert x.kept_to_its_own()


def test_operands_that_overlap_count_as_copied(gpuops):
    x = np.arange(6)
    gpuops.scatter_add(x, [0, 0, 1, 2, 3], x[1:])
    assert x.tolist() == [3, 4, 6, 8, 4, 5]
    x = np.arange(5000)
    gpuops.scatter_add(x, x[::-1], x)
    assert (x == 4999).all()
    x = np.arange(3.0)
    gpuops.scatter_add(x, [0, 0, 0], x)
    assert x.tolist() == [3, 1, 2]


# Arrays on a GPU.


@pytest.fixture
def on_gpu(gpu):
    yield gpu
    gpu.gpuops.synchronize()


@pytest.mark.parametrize("count, size, width", WAYS)
@pytest.mark.parametrize("more", [0, 0.3, 1.5])
def test_order_does_not_depend_on_the_grid(on_gpu, count, size, width, more):
    """More indices, which are left out, make a larger grid and move the others to other blocks.

    On the fake runtime the blocks and threads run in an order that the seed decides. On a GPU they
    share it with those of another stream. GPUOPS_TEST_CALLS is the number of calls.
    """
    gpuops = on_gpu.gpuops
    random = np.random.default_rng([count, size, width, 2])
    x = rough_numbers(random, (size, width), np.float32)
    values = rough_numbers(random, (count, width), np.float32)
    indices = random.integers(0, size, count)
    expected = added(x, indices, values).tobytes()
    left_out = math.ceil(more * count)
    indices = gpuops.to_device(np.concatenate([np.full(left_out, size), indices]))
    values = gpuops.to_device(np.concatenate([np.ones((left_out, width), np.float32), values]))
    mode = "fill" if more else "raise"
    other = gpuops.Stream()
    beside = gpuops.to_device(x)
    for call in range(turns_of(CALLS[on_gpu.name])):
        if on_gpu.fake is not None:
            on_gpu.fake.set_scheduler("shuffled", call + 1)
        else:
            gpuops.scatter_add(beside, indices, values, mode=mode, stream=other)
        array = gpuops.to_device(x)
        gpuops.scatter_add(array, indices, values, mode=mode, deterministic=True)
        assert array.to_host().tobytes() == expected


@pytest.mark.parametrize("count, size, width", WAYS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
def test_order_of_16_bit_sums_does_not_depend_on_the_grid(on_gpu, count, size, width, name, seed):
    """They are taken in float32, where what is added to a large number loses its last bits."""
    gpuops, dtype = on_gpu.gpuops, np.float16
    if name == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    if on_gpu.fake is not None:
        on_gpu.fake.set_scheduler("shuffled", seed)
    random = np.random.default_rng([count, size, width, 3])
    indices = random.integers(0, size, count)
    values = random.random((count, width)) * 0.1
    turns = np.zeros(size, int)
    for at, place in enumerate(indices):
        if turns[place] % 3 != 1:
            values[at] = 60_000 * (1 - turns[place] % 3)
        turns[place] += 1
    x, values = random.random((size, width)).astype(dtype), values.astype(dtype)
    # None of the sums may end with a large number, which would hide the bits that are lost.
    for place in np.flatnonzero(turns % 3):
        x[place] = -60_000
    expected = added(x.astype("f4"), indices, values.astype("f4")).astype(dtype)
    array = gpuops.to_device(x)
    gpuops.scatter_add(
        array, gpuops.to_device(indices), gpuops.to_device(values), deterministic=True
    )
    assert array.to_host().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "count, size", [(4, 9), (1500, 9), (30_000, 9), (20_000, 15_000), (8000, 70_000)]
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scheduler", ["now", "lazy", "shuffled"])
def test_a_late_bad_index_leaves_x_alone(on_gpu, count, size, deterministic, scheduler):
    gpuops = on_gpu.gpuops
    if on_gpu.fake is not None:
        on_gpu.fake.set_scheduler(scheduler, 3)
    x = np.arange(float(size))
    array, other, values = (gpuops.to_device(v) for v in (x, x, np.ones(count)))
    places = np.arange(count) % size
    right = gpuops.to_device(places)
    places[count // 2] = size
    wrong = gpuops.to_device(places)
    options = {"deterministic": deterministic}
    gpuops.scatter_add(array, wrong, values, **options)
    gpuops.scatter_add(other, right, values, **options)
    gpuops.scatter_add(array, wrong, 1, **options)
    with pytest.raises(IndexError, match=f"^index {size} is out .* earlier scatter_add"):
        gpuops.synchronize()
    assert array.to_host().tobytes() == x.tobytes()
    assert other.to_host().tobytes() == added(x, np.arange(count) % size, 1).tobytes()


def test_device_values_of_another_dtype(on_gpu):
    gpuops = on_gpu.gpuops
    x, values = np.zeros(4), np.arange(2000, dtype=np.int16)
    indices = np.arange(2000) % 4
    array = gpuops.to_device(x)
    gpuops.scatter_add(array, gpuops.to_device(indices), gpuops.to_device(values))
    gpuops.scatter_add(array, indices, gpuops.to_device(np.float32(0.5)))
    assert array.to_host().tolist() == [499250.0, 499750.0, 500250.0, 500750.0]
    with pytest.raises(TypeError):
        gpuops.scatter_add(gpuops.to_device(values), [0], gpuops.to_device(x))


def test_16_bit_sums_begin_with_what_is_there(gpuops):
    """In float32 the order of additions matters: the first operand is the array's own number."""
    x = np.float16([2**-14])
    gpuops.scatter_add(x, [0, 0], np.float16([60000, -60000]), deterministic=True)
    assert x.tolist() == [0.0]
    x = np.float16([-60000])
    gpuops.scatter_add(x, [0, 0], np.float16([60000, 2**-10]), deterministic=True)
    assert x.tolist() == [2**-10]


@pytest.mark.parametrize("count", [3, 30_000])
def test_an_empty_axis_has_no_places(gpuops, count):
    for dtype in ("f2", "f4", "i8"):
        with pytest.raises(IndexError):
            gpuops.scatter_add(np.zeros(0, dtype), np.zeros(count, int), np.ones(count, dtype))


def test_more_than_one_call_can_take(gpu):
    """Values of which every one is the same need no memory, however many they are."""
    gpuops = gpu.gpuops
    x = gpuops.zeros((2, (1 << 20) + 1), np.float16)
    with pytest.raises(ValueError, match="more than one call can take"):
        gpuops.scatter_add(x, np.zeros(1 << 20, np.int8), 1, mode="fill")
    assert not x.to_host().any()


def test_two_threads_add_to_places_of_their_own(cpu_device):
    """What no index names is not written, not even with the value that it had before."""
    x = np.zeros(1 << 17, np.float16)

    def add(first):
        mine = np.arange(first, len(x), 2)
        for _ in range(20):
            cpu_device.gpuops.scatter_add(x, mine, np.float16(1), device="cpu")

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (x == 20).all()


def test_scratch_memory_goes_with_what_is_added(cpu_device):
    source = """
import resource
import numpy as np
import gpuops

x = np.ones((7, 1 << 20), np.float16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gpuops.scatter_add(x, [3], np.float16(1), device="cpu")
kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert kibibytes < 16 << 10, kibibytes
assert (x[3] == 2).all() and (x[:3] == 1).all()
"""
    run_child(cpu_device.gpuops, source)
