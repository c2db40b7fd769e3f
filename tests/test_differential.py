"""Random calls against NumPy: value, shape and dtype, or the exception's type and text.

`test_random_calls` makes many cheap cases from one seed. It prints the seed, and the failing case's
own seed: GPUOPS_TEST_CASE=<that> runs that case alone, GPUOPS_TEST_SEED and GPUOPS_TEST_CASES
choose others. `test_hypothesis` makes fewer cases, and shrinks the one that fails.
"""

import os
import random

import numpy as np
import pytest
import reference
from helpers import filled_array
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

CASES = {"cpu": 200_000, "fake": 40_000, "cuda": 20_000}

DTYPES = [
    np.dtype(dtype)
    for dtype in "? i1 u1 i2 f2 i4 f4 M8[s] i8 f8 c8 c16 S3 S5 U1 U3 V6 V7 V12 V17 V24 V40".split()
]
DTYPES.append(np.dtype([("a", "u1"), ("b", "f4", (2,))]))
INDEX_DTYPES = [np.dtype(dtype) for dtype in "i1 i2 i4 i8 i8 i8 u1 u2 u4 u8".split()]

# The memory that the arrays view: bytes of any value, but where NumPy itself looks at them.
BOOLS = np.random.default_rng(1).integers(0, 2, size=1 << 16, dtype=np.uint8)
LETTERS = np.random.default_rng(2).integers(97, 123, size=1 << 14, dtype=np.uint32)
BYTES = np.random.default_rng(3).integers(0, 256, size=1 << 16, dtype=np.uint8)


def memory_for(dtype):
    if dtype.kind == "b":
        return BOOLS
    return LETTERS if dtype.kind == "U" else BYTES


class Case:
    """One random call, made from a seed: the operator, its operands, and what NumPy says."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.operator = self.random.choice(("gather", "gather", "take", "take_along_axis"))
        self.dtype = self.random.choice(DTYPES)
        self.x = self.array_of(self.shape(4), self.dtype, memory_for(self.dtype))
        self.choose_options()
        self.indices = self.choose_indices()

    def shape(self, most):
        ndim = self.random.choice((0, 1, 1, 1, 2, 2, 3, most))
        lengths = (0, 1, 1, 2, 3, 3) if ndim > 3 else (0, 1, 1, 2, 3, 3, 4, 5, 7)
        return tuple(self.random.choices(lengths, k=ndim))

    def array_of(self, shape, dtype, memory):
        """An array over shared memory: any order of axes, any steps, any alignment."""
        # Letters that begin in the middle of one are none.
        offset = self.random.randrange(0, 64, 4 if dtype.kind == "U" else 1)
        if not shape or self.random.random() < 0.4:
            return np.ndarray(shape, dtype, memory, offset)
        axes = list(range(len(shape)))
        self.random.shuffle(axes)
        strides = [0] * len(shape)
        extent = dtype.itemsize
        for axis in axes:
            step = self.random.choice((1, 1, 1, -1, 2, -2, 0))
            strides[axis] = extent * step
            if step < 0:
                offset -= strides[axis] * max(shape[axis] - 1, 0)
            extent *= max(shape[axis], 1) * max(abs(step), 1)
        if extent > 30_000:
            return np.ndarray(shape, dtype, memory)
        return np.ndarray(shape, dtype, memory, offset, strides)

    def choose_options(self):
        choose = self.random.choice
        self.options = {}
        modes = ("raise", "raise", "wrap", "clip")
        self.mode = choose(modes if self.operator == "take" else (*modes, "fill"))
        if self.mode != "raise" or choose((True, False)):
            self.options["mode"] = self.mode
        ndim = max(self.x.ndim, 1)
        axis = choose((None, *range(-ndim, ndim), *range(-ndim, ndim), ndim, -ndim - 1))
        if choose((True, True, True, False)):
            self.options["axis"] = axis

    def axis_size(self):
        default = {"gather": 0, "take": None, "take_along_axis": -1}[self.operator]
        axis = self.options.get("axis", default)
        if axis is None or self.x.ndim == 0:
            return self.x.size
        return self.x.shape[axis] if -self.x.ndim <= axis < self.x.ndim else 1

    def index_shape(self):
        if self.operator != "take_along_axis":
            return self.shape(2)
        if self.options.get("axis", -1) is None or self.random.random() < 0.05:
            return self.shape(2)
        axis = self.options.get("axis", -1)
        shape = [self.random.choice((n, n, n, 1, 4)) if n == 1 else n for n in self.x.shape]
        for other in range(len(shape)):
            if self.random.random() < 0.15:
                shape[other] = self.random.choice((1, 1, 2))
        if -len(shape) <= axis < len(shape):
            shape[axis] = self.random.choice((0, 1, 2, 3, 6))
        return tuple(shape)

    def choose_indices(self):
        shape, size = self.index_shape(), self.axis_size()
        dtype = self.random.choice(INDEX_DTYPES)
        limits = np.iinfo(dtype)
        low, high = max(-size, limits.min), min(max(size, 1) - 1, limits.max)
        count = 1
        for length in shape:
            count *= length
        values = self.random.choices(range(low, high + 1), k=count)
        if count and self.random.random() < (0.15 if self.mode == "raise" else 0.6):
            for _ in range(self.random.choice((1, 1, 2, 5))):
                bad = self.random.choice((size, size + 1, -size - 1, 3 * size, limits.min,
                                          limits.max, limits.max // 2 + 1))  # fmt: skip
                values[self.random.randrange(count)] = min(max(bad, limits.min), limits.max)
        plain = np.array(values, dtype).reshape(shape)
        if not shape or self.random.random() < 0.5:
            return plain
        odd = self.array_of(shape, dtype, np.zeros(1 << 15, np.uint8))
        if 0 in odd.strides:
            return plain
        odd[...] = plain
        return odd

    def expected(self, **changes):
        """NumPy's answer: an array, a scalar or an exception."""
        try:
            return getattr(reference, self.operator)(
                self.x, self.indices, **{**self.options, **changes}
            )
        except (IndexError, ValueError) as error:
            return error

    def choose_out(self, expected):
        """Mostly nothing, else an array of the right shape, in any layout; or of a wrong kind.

        Returns what to expect then.
        """
        choice = self.random.random()
        if choice < 0.6:
            return expected
        shaped = expected
        if isinstance(expected, Exception):
            shaped = self.expected(mode="clip")
        if isinstance(shaped, Exception) or shaped.size * max(self.dtype.itemsize, 31) > 30_000:
            return expected
        shape, dtype = shaped.shape, self.dtype
        if choice < 0.63:
            shape = (*shape, 2)
            expected = ValueError(f"output array does not match result of {self.operator}")
        elif choice < 0.66:
            dtype = np.dtype("V31")
            expected = TypeError("")
        elif choice < 0.8 and self.x.nbytes:
            # x moves to memory of its own, and out lies somewhere in it.
            memory = np.zeros(self.x.nbytes + 4096, np.uint8)
            x = np.ndarray(self.x.shape, dtype, memory)
            x[...] = self.x
            room = memory.nbytes - shaped.nbytes
            if room >= 0:
                self.x = x
                offset = self.random.randrange(min(room, 64) + 1)
                self.options["out"] = np.ndarray(shape, dtype, memory, offset)
            return expected
        out = self.array_of(shape, dtype, np.zeros(1 << 16, np.uint8))
        self.options["out"] = np.zeros(shape, dtype) if 0 in out.strides else out
        return expected

    def run(self, gpuops):
        """Compares; returns whether the answer is a value."""
        expected = self.expected()
        expected = self.choose_out(expected)
        out = self.options.get("out")
        before = None if out is None else out.tobytes()
        try:
            result = getattr(gpuops, self.operator)(self.x, self.indices, **self.options)
        except (IndexError, ValueError, TypeError) as error:
            assert type(error) is type(expected), (error, expected)
            assert str(error).startswith(str(expected)), (error, expected)
            assert out is None or out.tobytes() == before
            return False
        assert not isinstance(expected, Exception), expected
        if out is not None:
            assert result is out
            # NumPy's scalar strings are as short as what they hold.
            expected = np.asarray(expected, self.dtype)
        else:
            assert type(result) is type(expected), (type(result), type(expected))
        assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
        assert result.shape == expected.shape, (result.shape, expected.shape)
        assert result.tobytes() == expected.tobytes(), (result, expected)
        return True

    def __str__(self):
        def describe(a):
            return f"{a.dtype} {a.shape} strides {a.strides}"

        options = {key: value for key, value in self.options.items() if key != "out"}
        out = self.options.get("out")
        return (
            f"{self.operator} x: {describe(self.x)}; indices: {describe(self.indices)} "
            f"{self.indices.tolist()}; {options}; out: {out if out is None else describe(out)}"
        )


def test_random_calls(gpuops, device):
    only = os.environ.get("GPUOPS_TEST_CASE")
    if only:
        case = Case(int(only))
        print(case)
        case.run(gpuops)
        return
    seed = int(os.environ.get("GPUOPS_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    count = int(os.environ.get("GPUOPS_TEST_CASES") or CASES[device.name])
    print(f"GPUOPS_TEST_SEED={seed} GPUOPS_TEST_CASES={count}")
    values = 0
    for number in range(count):
        own_seed = (seed << 32) + number
        case = Case(own_seed)
        try:
            values += case.run(gpuops)
        except Exception as error:
            pytest.fail(f"GPUOPS_TEST_CASE={own_seed}\n{case}\n{type(error).__name__}: {error}")
    # A generator that came to make nothing but errors, or none, would test too little.
    assert count // 2 < values < count * 0.95, values


@st.composite
def calls(draw):
    """An operator, its operands and its options."""
    operator = draw(st.sampled_from(["gather", "take", "take_along_axis"]))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=operator == "take_along_axis", max_dims=4, min_side=0))
    x = draw(odd_layouts(filled_array(shape, dtype, draw(st.integers(0, 9)))))
    axis = draw(st.one_of(st.none(), st.integers(-max(x.ndim, 1), max(x.ndim, 1) - 1)))
    modes = ["raise", "wrap", "clip"] + ["fill"] * (operator != "take")
    options = {"axis": axis, "mode": draw(st.sampled_from(modes))}
    size = x.size if axis is None or x.ndim == 0 else x.shape[axis]
    index_dtype = draw(st.sampled_from(INDEX_DTYPES))
    limits = np.iinfo(index_dtype)
    if operator == "take_along_axis" and axis is not None:
        index_shape = list(x.shape)
        index_shape[axis] = draw(st.integers(0, 4))
        index_shape = tuple(1 if draw(st.integers(0, 4)) == 0 else n for n in index_shape)
    elif operator == "take_along_axis":
        index_shape = (draw(st.integers(0, 8)),)
    else:
        index_shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    near = st.integers(max(-size, limits.min), min(max(size - 1, 0), limits.max))
    anything = st.integers(int(limits.min), int(limits.max))
    values = near if draw(st.booleans()) else st.one_of(near, anything)
    indices = draw(hnp.arrays(index_dtype, index_shape, elements=values))
    return operator, x, draw(odd_layouts(indices)), options


@st.composite
def odd_layouts(draw, array):
    """The same array, stored in another way."""
    if array.ndim == 0:
        return array
    order = draw(st.permutations(range(array.ndim)))
    steps = [draw(st.sampled_from([1, 1, -1, 2, -3])) for _ in order]
    shape = tuple(n * abs(step) for n, step in zip(array.shape, steps, strict=True))
    inverse = np.argsort(order)
    big = np.zeros(tuple(shape[axis] for axis in order), array.dtype).transpose(inverse)
    odd = big[tuple(slice(None, None, step) for step in steps)]
    odd[...] = array
    return odd


@settings(max_examples=500)
@given(call=calls())
def test_hypothesis(gpuops, call):
    operator, x, indices, options = call
    try:
        expected = getattr(reference, operator)(x, indices, **options)
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error)) as caught:
            getattr(gpuops, operator)(x, indices, **options)
        assert str(caught.value).startswith(str(error))
    else:
        result = getattr(gpuops, operator)(x, indices, **options)
        assert type(result) is type(expected)
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert result.tobytes() == expected.tobytes()
