"""The CPU backend computes the same with whatever instructions the processor has: GPUOPS_CPU_LEVEL.

The results of children whose instructions are limited are compared: bit by bit, but for sigmoid and
correlate where there is no fused multiply-add. What is right is for the tests of the operators.
"""

import numpy as np
import pytest
from helpers import refusal_on_cpu, run_child

LEVELS = ["x86-64", "x86-64-v3", "x86-64-v4"]

# Odd lengths, for what is left behind the last vector, and strides.
RESULTS = """
import numpy as np
import gpuops

random = np.random.default_rng(7)

def numbers(dtype, *shape):
    found = 8 * random.standard_normal(shape)
    return (found if dtype[0] in "fc" else np.abs(found)).astype(dtype)

found = {}
for dtype in ("u1", "i2", "i4", "u8", "f2", "f4", "f8", "c8"):
    for count in (1, 15, 16, 17, 1003, 200_003):
        x, y = numbers(dtype, count), numbers(dtype, count)
        found[f"add {dtype} {count}"] = gpuops.add(x, y)
        found[f"mixed {dtype} {count}"] = gpuops.multiply(x[::-1], numbers("i1", count))
        for step in (-2, -1, 2, 3, 4, 5):
            found[f"step {step} {dtype} {count}"] = gpuops.add(x[::step], y[::step])
        found[f"saxpy {dtype} {count}"] = gpuops.saxpy(3, x, y)
        if dtype[0] != "c":
            found[f"sigmoid {dtype} {count}"] = gpuops.sigmoid(x)
            found[f"strided sigmoid {dtype} {count}"] = gpuops.sigmoid(x[::3])
            found[f"backward {dtype} {count}"] = gpuops.sigmoid_backward(x, y)
            image, weights = numbers(dtype, 13, count % 1009), numbers("f4", 3, 5)
            found[f"correlate {dtype} {count}"] = gpuops.correlate(image, weights)
special = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1e-45, 88.8, -88.8, -103.9, -745.2, 1e300]
with np.errstate(all="ignore"):
    for dtype in ("f2", "f4", "f8"):
        found[f"special {dtype}"] = gpuops.sigmoid(np.array(special * 5).astype(dtype))
every = np.arange(0, 1 << 32, 999, dtype=np.uint32).view("f4")
found["every sigmoid f4"] = gpuops.sigmoid(every)
np.savez(PATH, **found)
print(gpuops.show_config(mode="dicts")["cpu_level"])
"""


def results_at(gpuops, folder, level):
    """Return the level that a child has, and its results."""
    path = folder / f"{level}.npz"
    source = f"PATH = {str(path)!r}\n" + RESULTS
    environment = {"GPUOPS_DEVICE": "cpu", "GPUOPS_NUM_THREADS": "2"}
    used = run_child(gpuops, source, GPUOPS_CPU_LEVEL=level, **environment).strip()
    return used, np.load(path)


def ulps(result, expected):
    """The distance of two arrays of floats in units of the last place; NaN is NaN."""
    kind = f"i{result.itemsize}"
    one, other = (
        np.where(bits < 0, np.iinfo(kind).min - bits, bits)
        for bits in (result.view(kind).astype("i8"), expected.view(kind).astype("i8"))
    )
    distance = np.abs(one - other)
    return np.where(np.isnan(result) & np.isnan(expected), 0, distance).max()


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_results_are_the_same_at_every_level(cpu_device, tmp_path, level):
    highest, expected = results_at(cpu_device.gpuops, tmp_path, LEVELS[-1])
    if highest not in LEVELS[LEVELS.index(level) + 1 :]:
        pytest.skip(f"the highest level of the processor is {highest}")
    used, results = results_at(cpu_device.gpuops, tmp_path, level)
    assert used == level
    assert set(results) == set(expected)
    for name in expected:
        result = results[name]
        assert result.dtype == expected[name].dtype
        if level == LEVELS[0] and ("sigmoid" in name or "special" in name):
            assert ulps(result, expected[name]) <= 2, name
        elif level == LEVELS[0] and "correlate" in name and result.dtype in ("f2", "f4"):
            size = np.finfo(result.dtype).eps * np.abs(expected[name]).max()
            assert np.abs(result - expected[name]).max() <= 2 * size, name
        else:
            assert result.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("value", ["v3", "x86-64-v2", "X86-64", " x86-64", "avx2", "é" * 60])
def test_a_wrong_level_is_refused(cpu_device, value):
    output = refusal_on_cpu(cpu_device.gpuops, GPUOPS_CPU_LEVEL=value)
    assert f"GPUOPS_CPU_LEVEL is '{value[:15]}" in output and "x86-64-v3" in output


@pytest.mark.parametrize("value", ["x86-64-v4", ""])
def test_the_highest_level_is_the_default(cpu_device, value):
    source = "import gpuops; print(gpuops.add(1, 2, device='cpu'), gpuops._core._config())"
    default = run_child(cpu_device.gpuops, source)
    assert default.startswith("3 ")
    assert run_child(cpu_device.gpuops, source, GPUOPS_CPU_LEVEL=value) == default


# Behind the last vector as well, and in front of it. An axis of 100 fits all signed types.
BAD_INDICES = """
import numpy as np
import gpuops

def check(x, indices, bad):
    before = x.copy()
    try:
        gpuops.scatter(x, indices, -1)
    except IndexError as error:
        assert f"index {bad} is out of bounds" in str(error), error
    else:
        raise AssertionError(f"{indices.dtype}: {bad} went unnoticed in {indices}")
    assert np.array_equal(x, before)

random, size, found = np.random.default_rng(7), 100, 0
for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"):
    limits = np.iinfo(dtype)
    least = -size if limits.min < 0 else 0
    bad = [number for number in {size, limits.max, least - 1, limits.min}
           if limits.min <= number <= limits.max and not least <= number < size]
    for count in (*range(1, 36), 300, 333):
        x, indices = np.arange(size), random.integers(least, size, count).astype(dtype)
        indices[:1], indices[-1:] = least, size - 1
        gpuops.scatter(x, indices, -1)
        assert np.array_equal(np.flatnonzero(x < 0), np.unique(indices.astype("i8") % size))
        for place in range(max(0, count - 35), count):
            for number in bad:
                wrong = indices.copy()
                wrong[place] = number
                check(x, wrong, number)
                found += 1
print(gpuops.show_config(mode="dicts")["cpu_level"], found)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_bad_indices_are_seen_at_every_level(cpu_device, level):
    said = run_child(cpu_device.gpuops, BAD_INDICES, GPUOPS_CPU_LEVEL=level, GPUOPS_DEVICE="cpu")
    used, *rest = said.split()
    assert rest == [str(24 * 700)]
    if used != level:
        pytest.skip(f"the highest level of the processor is {used}")
