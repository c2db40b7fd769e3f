"""What a call may touch: its own elements, and of `out` nothing at all if it fails.

Operands lie against pages that nobody may read or write, so that one byte too many ends the
process. All operators are called, by their rows.
"""

import ctypes
import itertools
import mmap

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from operators import OPERATORS
from rtc import SAXPY, SAXPY_TYPES, load, saxpy_twin, twins
from test_every_op import is_in_place, parameters_of

mprotect = ctypes.CDLL(None, use_errno=True).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NO_ACCESS = 0

DTYPES = ["f4", "f8", "f2", "u1", "c8"]
COLUMNS = [1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 65, 257]
ROWS = 3


class Fenced:
    """A copy of an array that begins, or ends, where memory begins that nobody may touch.

    With `steps`, only every other element of the last axis is the array's; what lies between them,
    and on the side without a fence, is watched by `kept_to_its_own`.
    """

    def __init__(self, array, at_end, steps=1):
        array = np.asarray(array)
        shape = array.shape
        if array.ndim:
            shape = (*shape[:-1], max(shape[-1] * steps - steps + 1, 0))
        strides = np.empty(shape, array.dtype).strides
        strides = (*strides[:-1], strides[-1] * steps) if array.ndim else strides
        nbytes = int(np.prod(shape, dtype=np.int64)) * array.itemsize
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
        whole = np.frombuffer(self.map, np.uint8)
        for fence in (0, size + mmap.PAGESIZE):
            assert mprotect(whole.ctypes.data + fence, mmap.PAGESIZE, NO_ACCESS) == 0
        self.bytes = whole[mmap.PAGESIZE : mmap.PAGESIZE + size]
        self.bytes[:] = np.resize(np.arange(251, dtype=np.uint8), size)
        offset = mmap.PAGESIZE + (size - nbytes if at_end else 0)
        self.array = np.ndarray(array.shape, array.dtype, self.map, offset, strides)
        self.array[...] = array
        self.before = self.bytes.copy()

    def untouched(self):
        return bool((self.bytes == self.before).all())

    def kept_to_its_own(self):
        """Nothing has changed but the array's elements, which count as unchanged from here on."""
        now, elements = self.bytes.copy(), self.array.copy()
        self.bytes[:] = self.before
        self.array[...] = elements
        return bool((self.bytes == now).all())


@pytest.fixture(params=OPERATORS, ids=lambda operator: operator.name)
def operator(request):
    return request.param


@pytest.fixture
def function(gpuops, operator):
    return getattr(gpuops, operator.name)


def out_name(operator):
    return next(name for name in parameters_of(operator).parameters if name in ("out", "output"))


def numbers(shape, dtype):
    """Small ones, of which every sum and product is exact or at least finite."""
    return (np.arange(np.prod(shape, dtype=int)) % 11 + 1).astype(dtype).reshape(shape)


def operands_of(operator, columns, dtype):
    """Arguments by their names: matrices of three rows, and what fits them."""
    matrix = numbers((ROWS, columns), dtype)
    if operator.name == "matmul":
        return [matrix, numbers((columns, ROWS), dtype)]
    indices = np.array([2, -1, 0, 1, -3])
    if operator.name == "take_along_axis":
        return [matrix, np.resize(np.arange(columns), (ROWS, 4))]
    if operator.name == "take":
        return [matrix, np.array([ROWS * columns - 1, 0, -1])]
    by_name = {
        "indices": indices,
        "values": numbers((5, columns), dtype),
        "weights": numbers((3, 3), dtype),
        "a": numbers((), dtype),
    }
    required = [
        name
        for name, parameter in parameters_of(operator).parameters.items()
        if parameter.default is parameter.empty
    ]
    return [by_name.get(name, matrix).copy() for name in required]


def takes(operator, dtype):
    """Whether an operator has a result for arrays of this dtype."""
    kind = np.dtype(dtype).kind
    return not (
        (operator.stem == "sigmoid" and kind not in "f")
        or (operator.stem == "correlate" and kind == "c")
    )


@pytest.mark.parametrize("at_end", [True, False], ids=["fence behind", "fence before"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_operands_is_touched(operator, function, dtype, at_end):
    if not takes(operator, dtype):
        pytest.skip(f"{operator.name} has no result of {dtype}")
    for columns, steps in itertools.product(COLUMNS, (1, 2)):
        plain = operands_of(operator, columns, dtype)
        fenced = [Fenced(operand, at_end, steps) for operand in plain]
        arguments = [one.array for one in fenced]
        if is_in_place(operator):
            assert function(*plain) is None and function(*arguments) is None
            assert arguments[0].tobytes() == plain[0].tobytes(), (columns, steps)
            assert fenced[0].kept_to_its_own()
            sources = fenced[1:]
        else:
            expected = np.asarray(function(*plain))
            out = Fenced(np.zeros_like(expected), at_end, steps)
            assert function(*arguments, **{out_name(operator): out.array}) is out.array
            assert out.array.tobytes() == expected.tobytes(), (columns, steps)
            assert out.kept_to_its_own()
            assert np.asarray(function(*arguments)).tobytes() == expected.tobytes()
            sources = fenced
        assert all(source.untouched() for source in sources)


# An error before work.

WITH_INDICES = [
    operator for operator in OPERATORS if "indices" in parameters_of(operator).parameters
]


@pytest.mark.parametrize("columns", [1, 4, 100, 20_000])
@pytest.mark.parametrize("operator", WITH_INDICES, ids=lambda operator: operator.name)
def test_a_bad_index_leaves_out_as_it_was(gpuops, operator, columns):
    function = getattr(gpuops, operator.name)
    matrix, indices, *values = operands_of(operator, columns, "f4")
    size = matrix.size if operator.name == "take" else ROWS
    if operator.name == "take_along_axis":
        size = columns
    for place, bad in itertools.product((0, indices.size // 2, -1), (size, -size - 1, 2**62)):
        indices = indices.copy()
        good, indices.flat[place] = indices.flat[place], bad
        for steps in (1, 2):
            if is_in_place(operator):
                changed = Fenced(matrix, True, steps)
                arguments = [changed.array, indices, *values]
                keywords = {}
            else:
                indices.flat[place] = good
                changed = Fenced(np.full_like(function(matrix, indices), 7), True, steps)
                indices.flat[place] = bad
                arguments, keywords = [matrix, indices], {"out": changed.array}
            with pytest.raises(IndexError, match=str(bad)):
                function(*arguments, **keywords)
            assert changed.untouched()
        indices.flat[place] = good


def wrong_calls(operator):
    """Calls that fail: what is wrong, the exception, and the change of one of the arguments."""
    wrong_operands = {
        "an object": lambda x: object(),
        "objects": lambda x: x.astype(object),
        "foreign byte order": lambda x: x.astype(x.dtype.newbyteorder()),
        "masked": lambda x: np.ma.array(x),
    }
    for position in range(len(operands_of(operator, 1, "f4"))):
        for what, change in wrong_operands.items():
            error = (TypeError, IndexError) if position == 1 else TypeError
            yield f"{what}, operand {position}", error, position, change, {}
    keywords = {
        "device": (ValueError, {"device": "nowhere"}),
        "stream": ((TypeError, ValueError), {"stream": object()}),
        "keyword": (TypeError, {"nonsense": None}),
    }
    parameters = parameters_of(operator).parameters
    if "mode" in parameters:
        keywords["mode"] = (ValueError, {"mode": "sideways"})
    if "axis" in parameters:
        keywords["axis"] = (ValueError, {"axis": 7})
    for what, (error, extra) in keywords.items():
        yield what, error, None, None, extra


def test_an_error_of_the_caller_leaves_out_as_it_was(operator, function):
    for columns in (1, 4, 100):
        for what, error, position, change, keywords in wrong_calls(operator):
            arguments = operands_of(operator, columns, "f4")
            if is_in_place(operator):
                changed = Fenced(arguments[0], True)
                arguments[0] = changed.array
            else:
                changed = Fenced(np.asarray(function(*arguments)), True)
                keywords = {**keywords, out_name(operator): changed.array}
            if position is not None:
                arguments[position] = change(arguments[position])
            with pytest.raises(error):
                pytest.fail(f"{what}: {function(*arguments, **keywords)!r}")
            assert changed.untouched(), what


def without_writing(array):
    array.flags.writeable = False
    return array


WRONG_OUTPUTS = {
    "longer": (ValueError, lambda shape: (*shape[:-1], shape[-1] + 1), None),
    "shorter": (ValueError, lambda shape: (shape[0] - 1, *shape[1:]), None),
    "one axis more": (ValueError, lambda shape: (1, *shape), None),
    "one axis less": (ValueError, lambda shape: shape[1:], None),
    "another dtype": (TypeError, None, lambda array: array.view("V4")),
    "read-only": (ValueError, None, without_writing),
    "its elements share memory": (
        ValueError, None, lambda array: as_strided(array, array.shape, (4,) * array.ndim),
    ),
    "objects": (TypeError, None, lambda array: array.astype(object)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_a_wrong_out_is_left_as_it_was(operator, function, name):
    error, reshape, change = WRONG_OUTPUTS[name]
    if is_in_place(operator):
        if change is None or name == "another dtype":
            pytest.skip("what is changed in place has the shape and the dtype that it has")
        arguments = operands_of(operator, 4, "f4")
        changed = Fenced(arguments[0], True)
        arguments[0] = change(changed.array)
        with pytest.raises(error):
            function(*arguments)
    else:
        arguments = operands_of(operator, 4, "f4")
        expected = np.asarray(function(*arguments))
        if operator.name == "take":
            arguments[1] = np.resize(arguments[1], (2, 3))
            expected = np.asarray(function(*arguments))
        shape = reshape(expected.shape) if reshape else expected.shape
        changed = Fenced(np.full(shape, 7, "f4"), True)
        out = change(changed.array) if change else changed.array
        with pytest.raises(error):
            function(*arguments, **{out_name(operator): out})
    assert changed.untouched()


# Operands that overlap.


def placements(shape, dtype, buffer):
    """Every view of this shape in a small buffer, at whole and at half elements."""
    item = np.dtype(dtype).itemsize
    steps = (1, 2, 3) if len(shape) == 2 else (-1, 1, 2) if shape else (1,)
    for rows, columns, offset in itertools.product(
        steps if len(shape) == 2 and shape[0] > 1 else (0,),
        steps,
        range(0, buffer.nbytes, item // 2),
    ):
        strides = (rows * item, columns * item)[-len(shape) :] if shape else ()
        reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        low = offset + sum(step for step in reach if step < 0)
        high = offset + sum(step for step in reach if step > 0) + item
        if low < 0 or high > buffer.nbytes:
            continue
        if rows != columns:  # elements of its own would overlap
            yield offset, strides


SMALL = {
    # The shapes of the arguments and of the result, in elements of int64 or float64.
    "gather": [(3,), (3,), (3,)],
    "take": [(3,), (3,), (3,)],
    "take_along_axis": [(3,), (3,), (3,)],
    "scatter": [(3,), (3,), (3,)],
    "scatter_add": [(3,), (3,), (3,)],
    "add": [(3,), (3,), (3,)],
    "multiply": [(3,), (3,), (3,)],
    "saxpy": [(), (3,), (3,), (3,)],
    "sigmoid": [(4,), (4,)],
    "sigmoid_backward": [(3,), (3,), (3,)],
    "matmul": [(2, 2), (2, 2), (2, 2)],
    "correlate": [(2, 2), (1, 2), (2, 2)],
    "convolve": [(2, 2), (1, 2), (2, 2)],
}


def test_there_is_a_small_case_for_every_operator():
    assert set(SMALL) == {operator.name for operator in OPERATORS}


def small_buffer(operator):
    if operator in WITH_INDICES:
        return np.array([0, 1, 2, 1, 2, 0])
    items = 7 if operator.name == "matmul" or operator.stem == "correlate" else 5
    return np.arange(1.0, items + 1)


def overlapping_cases(places, target):
    """Each operand at every place of the target's, the others beside them; and some of all."""
    for moved in range(len(places)):
        if moved == target:
            continue
        for place, out in itertools.product(places[moved], places[target]):
            case = [None] * len(places)
            case[moved], case[target] = place, out
            yield case
    everywhere = list(itertools.product(*places))
    yield from everywhere[:: len(everywhere) // 100 + 1]


def test_every_small_overlap(operator, function, device):
    """Operands anywhere in one small buffer act as if they had been copied before."""
    buffer = small_buffer(operator)
    pristine, shapes = buffer.copy(), SMALL[operator.name]
    target = 0 if is_in_place(operator) else len(shapes) - 1
    places = [list(placements(shape, buffer.dtype, buffer)) for shape in shapes]
    cases = list(overlapping_cases(places, target))
    if device.name != "cpu":  # which all share the code that looks at the operands
        cases = cases[:: len(cases) // 400 + 1]
    for case in cases:
        buffer[:] = pristine
        views = [
            np.resize(pristine, shape)
            if place is None
            else np.ndarray(shape, buffer.dtype, buffer, *place)
            for shape, place in zip(shapes, case, strict=True)
        ]
        arguments, keywords = views, {}
        if not is_in_place(operator):
            *arguments, out = views
            keywords = {out_name(operator): out}
        copies = [argument.copy() for argument in arguments]
        expected = pristine.copy()
        changed = np.ndarray(shapes[target], buffer.dtype, expected, *case[target])
        with np.errstate(all="ignore"):  # half a float may be anything
            try:
                result = function(*copies)
            except IndexError:  # and so may half an index
                with pytest.raises(IndexError):
                    function(*arguments, **keywords)
            else:
                changed[...] = copies[0] if is_in_place(operator) else result
                function(*arguments, **keywords)
        assert np.array_equal(buffer, expected, equal_nan=buffer.dtype.kind == "f"), case


def slices(shape, items):
    """Every slice along the one axis of a buffer that gives a view of this shape."""
    size = int(np.prod(shape, dtype=int))
    for start, step in itertools.product(range(items), (1, 2, -1) if len(shape) == 1 else (1,)):
        last = start + (size - 1) * step
        if 0 <= last < items:
            stop = last + (1 if step > 0 else -1)
            yield slice(start, None if stop < 0 else stop, step)


def test_every_small_overlap_on_a_device(gpu, operator):
    function, to_device = getattr(gpu.gpuops, operator.name), gpu.gpuops.to_device
    pristine, shapes = small_buffer(operator), SMALL[operator.name]
    target = 0 if is_in_place(operator) else len(shapes) - 1
    places = [list(slices(shape, pristine.size)) for shape in shapes]
    for case in overlapping_cases(places, target):
        buffer = to_device(pristine)
        views = [
            to_device(np.resize(pristine, shape)) if place is None else buffer[place].reshape(shape)
            for shape, place in zip(shapes, case, strict=True)
        ]
        arguments, keywords = views, {}
        if not is_in_place(operator):
            *arguments, out = views
            keywords = {out_name(operator): out}
        copies = [argument.copy() for argument in arguments]
        result = function(*copies)
        expected = pristine.copy()
        changed = expected[case[target]].reshape(shapes[target])
        changed[...] = (copies[0] if is_in_place(operator) else result).to_host()
        function(*arguments, **keywords)
        assert buffer.to_host().tolist() == expected.tolist(), case


def elements_share_memory(array):
    """Looked at element by element."""
    offsets = np.zeros(array.shape, np.int64)
    for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        offsets += np.expand_dims(
            np.arange(size) * stride, [other for other in range(array.ndim) if other != axis]
        )
    taken = (offsets[..., None] + np.arange(array.itemsize)).ravel()
    return len(np.unique(taken)) < taken.size


def test_every_out_whose_elements_share_memory(operator, function):
    arguments = operands_of(operator, 2, "f4")
    expected = arguments[0] if is_in_place(operator) else np.asarray(function(*arguments))
    memory = np.zeros(200, "u1")
    for strides in itertools.product((-8, -4, 0, 2, 4, 6, 8, 12, 16, 24), repeat=expected.ndim):
        out = as_strided(memory[60:].view("V4")[:1], expected.shape, strides).view("f4")
        memory[:] = 7
        if is_in_place(operator):
            call_arguments, keywords = [out, *arguments[1:]], {}
        else:
            call_arguments, keywords = arguments, {out_name(operator): out}
        if elements_share_memory(out):
            with pytest.raises(ValueError, match="share memory"):
                function(*call_arguments, **keywords)
            assert (memory == 7).all()
        else:
            function(*call_arguments, **keywords)


# Kernels of one's own.


@pytest.mark.parametrize("at_end", [True, False], ids=["fence behind", "fence before"])
def test_arrays_of_a_launch(gpu, at_end):
    kernel = load(gpu, SAXPY, {"saxpy": SAXPY_TYPES}).get_function("saxpy")
    with twins(gpu, saxpy=saxpy_twin):
        for count, steps in itertools.product(COLUMNS, (1, 2)):
            x, y = (np.arange(count, dtype="f4") + one for one in (1, 2))
            fenced = [Fenced(array, at_end, steps) for array in (x, y)]
            kernel.forall(count)(np.float32(2), *(one.array for one in fenced), count)
            assert fenced[0].untouched()
            assert fenced[1].array.tolist() == (2 * x + y).tolist()
            assert fenced[1].kept_to_its_own()
            before = fenced[1].bytes.copy()
            with pytest.raises(TypeError):
                kernel.forall(count)(np.float32(2), fenced[0].array, fenced[1].array, "n")
            assert (fenced[1].bytes == before).all()
