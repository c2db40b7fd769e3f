"""Filters of large NumPy images: in parts, of rows of one image or of whole images."""

import functools

import numpy as np
import pytest
from helpers import constant, filled_array, launches, run_threads, same

PART_BYTES = 4 << 10
LARGEST_WHOLE = 2 * PART_BYTES
BORDERS = ["reflect", "mirror", "nearest", "constant", "wrap"]
DEVICE_ERROR, OUT_OF_MEMORY = 999, 2


@pytest.fixture
def fake(fake):
    fake.fake.set_part_bytes(PART_BYTES)
    return fake


def numbers(shape, dtype, seed=0):
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 100, shape).astype(dtype)


def check(fake, image, weights, *, parts=None, name="correlate", **options):
    """In parts, a filter gives bit for bit what it gives for the image as a whole."""
    operator = getattr(fake.gpuops, name)
    fake.fake.set_part_bytes(0)
    whole_launches, whole = launches(fake, lambda: operator(image, weights, **options))
    fake.fake.set_part_bytes(PART_BYTES)
    made, result = launches(fake, lambda: operator(image, weights, **options))
    same(result, whole)
    assert made > whole_launches if parts is None else made == parts
    return result


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_sizes(fake, parts, more):
    """So many rows of 64 bytes, of which a part has 64."""
    rows = parts * PART_BYTES // 64 + more
    expected = parts + (more > 0)
    image = numbers((rows, 64), "u1")
    check(fake, image, np.ones((3, 3)), parts=1 if expected <= 2 else expected)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("weights", [(1, 1), (3, 3), (5, 1), (1, 4), (4, 2), (9, 9), (13, 3)])
def test_borders(in_any_order, border, weights):
    image = numbers((211, 53), "f4")
    check(in_any_order, image, numbers(weights, "f8", 1), mode=border, cval=2.5)


@pytest.mark.parametrize("border", BORDERS)
def test_on_any_gpu(gpu, border):
    """Also with less memory than the image takes."""
    gpuops, part, width = gpu.gpuops, constant("pipeline.cu", "PART_BYTES"), 2048
    if gpu.fake is not None:
        gpu.fake.set_part_bytes(PART_BYTES)
        part, width = PART_BYTES, 32
    image = numbers((12 * part // (4 * width) + 1, width), "f4")
    weights = numbers((5, 3), "f8", 1)
    expected = gpuops.correlate(gpuops.to_device(image), weights, mode=border, cval=2).to_host()
    same(gpuops.correlate(image, weights, mode=border, cval=2), expected)
    gpuops.empty_cache(0)
    gpuops.memory_limit(gpuops.memory_info(0).used + 6 * part, device=0)
    try:
        same(gpuops.correlate(image, weights, mode=border, cval=2), expected)
    finally:
        gpuops.memory_limit(None, device=0)


KINDS = {
    "small": ("f4", numbers((5, 5), "f4", 1)),
    "small, in float64": ("i4", numbers((5, 5), "f8", 1)),
    "separable": ("f4", np.ones((17, 15))),
    "by value": ("f4", numbers((17, 15), "f4", 1)),
    "in memory": ("f4", numbers((33, 33), "f4", 1)),
    "large, in float64": ("f8", numbers((17, 15), "f8", 1)),
    "wide": ("f4", numbers((1, 200), "f4", 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_filters(fake, kind):
    dtype, weights = KINDS[kind]
    image = numbers((460, 41), dtype)
    for border in ("mirror", "constant"):
        check(fake, image, weights, mode=border, cval=1)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_origins(fake, border, rows):
    """The weights reach up and down as far as their origin says."""
    image, weights = numbers((150, 67), "i2"), numbers((rows, 2), "f8", 1)
    for origin in range(-(rows // 2), (rows - 1) // 2 + 1):
        for name in ("correlate", "convolve"):
            backward = -origin - (rows % 2 == 0) if name == "convolve" else origin
            if -(rows // 2) <= backward <= (rows - 1) // 2:
                check(fake, image, weights, name=name, mode=border, origin=(origin, 0), cval=-1)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("rows", [70, 151, 300])
def test_weights_taller_than_a_part(fake, border, rows):
    """And than the image: its rows are reflected, or repeated, several times."""
    image = numbers((290, 33), "f8")
    image[10, 10] = np.inf
    fake.fake.set_part_bytes(PART_BYTES)
    check(fake, image, numbers((rows, 1), "f8", 1), mode=border, parts=None if rows < 73 else 2)


@pytest.mark.parametrize("border", BORDERS)
def test_little_memory_makes_parts_smaller(fake, border):
    """Down to fewer rows than the weights have, which then reach beyond the next part."""
    image, weights = numbers((160, 64), "f4"), numbers((31, 3), "f4", 1)
    expected = fake.gpuops.correlate(image, weights, mode=border, cval=0.5)
    fake.gpuops.empty_cache(0)
    limit = 2 * (40 + 30) * 256 + 2 * 40 * 256
    fake.gpuops.memory_limit(fake.gpuops.memory_info(0).used + limit, device=0)
    try:
        same(fake.gpuops.correlate(image, weights, mode=border, cval=0.5), expected)
        out = np.full_like(image, 7)
        fake.gpuops.memory_limit(fake.gpuops.memory_info(0).used + 2000, device=0)
        with pytest.raises(MemoryError, match="within a limit"):
            fake.gpuops.correlate(image, weights, mode=border, output=out)
        assert (out == 7).all()
    finally:
        fake.gpuops.memory_limit(None, device=0)


def test_little_memory_for_the_first_part(fake):
    """With room for the parts, but not for the weights beside them."""
    gpuops = fake.gpuops
    image, weights = numbers((640, 64), "f4"), numbers((40, 40), "f4", 1)
    parts, expected = launches(fake, lambda: gpuops.correlate(image, weights))
    gpuops.empty_cache(0)
    rows = 640 // (parts // 2)
    gpuops.memory_limit(gpuops.memory_info(0).used + 2 * (2 * rows + 39) * 256, device=0)
    try:
        made, result = launches(fake, lambda: gpuops.correlate(image, weights))
    finally:
        gpuops.memory_limit(None, device=0)
    same(result, expected)
    assert made > parts


@pytest.mark.parametrize("output", [None, "u1", "f4", "f8", "i8"])
@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f2", "f4", "f8", "u8"])
def test_dtypes(fake, dtype, output):
    image = numbers((300, 61), dtype)
    for border in ("constant", "wrap"):
        check(fake, image, numbers((3, 3), "f8", 1) / 9, output=output, mode=border, cval=0.5)


@pytest.mark.parametrize("columns", [1, 2, 3, PART_BYTES, PART_BYTES + 1])
def test_widths(fake, columns):
    """One row may be longer than a part."""
    rows = 3 * PART_BYTES if columns < 10 else 21
    image = numbers((rows, columns), "u1")
    weights = np.ones((3, 3), "f4")
    check(fake, image, weights, mode="mirror")


BATCHES = {
    "small images": (40, 17, 23),
    "a part each": (5, 64, 64),
    "a little more": (5, 65, 64),
    "large images": (3, 200, 41),
    "two axes": (3, 5, 31, 29),
    "images of one row": (200, 1, 64),
    "images of one column": (3, 90, 64, 1),
}


@pytest.mark.parametrize("which", BATCHES)
def test_batches(in_any_order, which):
    image = numbers(BATCHES[which], "u1")
    for border in ("reflect", "wrap"):
        check(in_any_order, image, np.arange(9.0).reshape(3, 3), mode=border)


LAYOUTS = {
    "every second": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backward": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda x: x.T.copy().T,
    "with gaps": lambda x: np.pad(x, ((0, 1), (3, 2)))[:-1, 3:-2],
    "misaligned": lambda x: np.frombuffer(b"x" + x.tobytes(), x.dtype, x.size, 1).reshape(x.shape),
    "one row": lambda x: np.broadcast_to(x[0], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fake, layout):
    image = LAYOUTS[layout](numbers((123, 57), "i4"))
    weights = np.arange(15.0).reshape(5, 3)
    expected = check(fake, image, weights, mode="wrap")
    if layout not in ("one row", "misaligned"):
        out = LAYOUTS[layout](np.zeros((123, 57), "i4"))
        fake.gpuops.correlate(image, weights, mode="wrap", output=out)
        np.testing.assert_array_equal(out, expected)


def test_output_overlaps(fake):
    memory = numbers((131, 64), "u1")
    expected = fake.gpuops.correlate(memory[:-1].copy(), np.ones((3, 1)))
    fake.gpuops.correlate(memory[:-1], np.ones((3, 1)), output=memory[1:])
    np.testing.assert_array_equal(memory[1:], expected)
    expected = fake.gpuops.correlate(memory.copy(), np.ones((3, 1)))
    fake.gpuops.correlate(memory, np.ones((3, 1)), output=memory)
    np.testing.assert_array_equal(memory, expected)


def test_what_is_not_finite(fake):
    """Below zeros of the weights, also those that the kernels add, a NaN does not count."""
    image = numbers((300, 40), "f4")
    image[63::64] = np.nan
    image[128, 3] = np.inf
    for weights in ([[1, 0, 1], [0, 0, 0], [1, 0, 1]], [[1.0], [0], [0], [0]], np.ones((1, 2))):
        check(fake, image, np.asarray(weights, float), mode="nearest")
        check(fake, image, np.asarray(weights, float), mode="constant", cval=np.nan)


def test_an_image_larger_than_the_device(in_any_order):
    fake = in_any_order
    fake.fake.set_part_bytes(64 << 10)
    image = numbers((1000, 1000), "u1")
    expected = fake.gpuops.correlate(image, np.ones((3, 1)), device="cpu")
    fake.gpuops.empty_cache(0)
    fake.fake.leave_free(600 << 10)
    same(fake.gpuops.correlate(image, np.ones((3, 1))), expected)


def test_it_takes_no_more_memory_than_some_parts(fake):
    image = numbers((640, 64), "u1")
    fake.gpuops.empty_cache(0)
    rows = 64 + 2
    fake.fake.leave_free(2 * -(-rows * 64 // 512) * 512 + 2 * PART_BYTES)
    same(
        fake.gpuops.correlate(image, np.ones((3, 1))),
        fake.gpuops.correlate(image, np.ones((3, 1)), device="cpu"),
    )


@pytest.mark.parametrize("mode", ["once", "from then on"])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaLaunchKernel", "cudaStreamWaitEvent"])
def test_a_call_fails_half_way(fake, function, number, mode):
    image, out = numbers((640, 64), "u1"), np.zeros((640, 64), "u1")
    fake.fake.set_scheduler("lazy")
    with (
        fake.fake.fail(number, DEVICE_ERROR, mode, function) as fault,
        pytest.raises(fake.gpuops.DeviceError, match=function),
    ):
        fake.gpuops.correlate(image, np.ones((3, 3)), output=out)
    assert fault.reached
    out[...] = 7
    fake.fake.run()
    assert (out == 7).all()


def test_no_memory_half_way(fake):
    """With results written already that is an error of the device's, unless nobody sees them."""
    gpuops = fake.gpuops
    image, out = numbers((640, 64), "f4"), np.zeros((640, 64), "f4")
    weights = numbers((40, 40), "f4", 1)  # so many that they take memory of the device

    def attempt(**options):
        launches = 0

        def visit(name, _):
            nonlocal launches
            launches += name == "cudaLaunchKernel"
            if name == "cudaMemcpyAsync" and launches == 4:
                launches += 1
                gpuops.empty_cache(0)  # what the parts before used, the next does not find again

        gpuops.empty_cache(0)
        function = "cudaMallocFromPoolAsync"
        with (
            fake.fake.fail(3, OUT_OF_MEMORY, "from then on", function) as fault,
            fake.fake.visit(visit),
        ):
            gpuops.correlate(image, weights, **options)
        assert fault.reached

    with pytest.raises(MemoryError):
        attempt()
    with pytest.raises(gpuops.DeviceError, match="out of memory"):
        attempt(output=out)


def test_no_memory_half_way_for_a_moment(fake):
    """Of a result that nobody sees all parts are begun anew, in memory that is there again."""
    gpuops = fake.gpuops
    image, out = numbers((640, 64), "f4"), np.zeros((640, 64), "f4")
    weights = numbers((40, 40), "f4", 1)  # so many that they take memory of the device
    expected = gpuops.correlate(image, weights)

    def attempt(**options):
        launches = refusals = 0

        def visit(name, _):
            nonlocal launches, refusals
            launches += name == "cudaLaunchKernel"
            if name == "cudaMemcpyAsync" and launches == 4:
                launches += 1
                gpuops.empty_cache(0)
                fake.fake.leave_free(0)
            elif name == "cudaMallocFromPoolAsync" and launches > 4:
                refusals += 1
                if refusals == 3:  # two for one allocation, which is tried once more
                    fake.fake.set_memory_limit(64 << 20)

        gpuops.empty_cache(0)
        with fake.fake.visit(visit):
            result = gpuops.correlate(image, weights, **options)
        assert refusals >= 3
        return result

    same(attempt(), expected)
    with pytest.raises(gpuops.DeviceError, match="out of memory"):
        attempt(output=out)
    fake.fake.set_memory_limit(64 << 20)


def test_page_locked_images(in_any_order):
    fake = in_any_order
    image, out = numbers((640, 64), "u1"), np.zeros((640, 64), "u1")
    expected = fake.gpuops.correlate(image, np.ones((3, 3)), device="cpu")
    with fake.gpuops.pin(image), fake.gpuops.pin(out):
        fake.gpuops.correlate(image, np.ones((3, 3)), output=out)
    np.testing.assert_array_equal(out, expected)
    x = filled_array((640, 64), "u1")
    same(fake.gpuops.correlate(x, np.ones((1, 1))), x)


def test_threads_call_at_once(in_any_order):
    gpuops = in_any_order.gpuops

    def calls(seed):
        image = numbers((48 + seed, 64), "i4", seed)
        expected = gpuops.correlate(image, np.ones((3, 3)), device="cpu")
        stream = gpuops.Stream(device=seed % 2)
        same(gpuops.correlate(image, np.ones((3, 3)), device=seed % 2, stream=stream), expected)

    run_threads([functools.partial(calls, seed) for seed in range(8)])
