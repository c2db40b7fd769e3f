"""The operators called with any objects, in any number and under any names.

    python arguments.py FOLDER [libFuzzer's options and corpora]

FOLDER has the package `gpuops` as run.py builds it, with libFuzzer in its compiled module. A call
may raise what it likes of what callers expect, and then

    it refuses a wrong number or wrong names of arguments just where Python's own binding does;
    it gives back every reference that it took to its arguments.
"""

import ctypes
import inspect
import os
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, sys.argv[1])
import operators

import gpuops

OPERATORS = [getattr(gpuops, row.name) for row in operators.OPERATORS]
SIGNATURES = [inspect.signature(operator) for operator in OPERATORS]

WORDS = [
    "raise", "wrap", "clip", "fill", "reflect", "mirror", "nearest", "constant", "grid-wrap",
    "full", "tf32", "cpu", "cuda", "cuda:0", "cuda:1", "auto", "f4", "i8", "O", "", "\udc80", "é",
]  # fmt: skip
NAMES = sorted({name for signature in SIGNATURES for name in signature.parameters}) + WORDS
INTEGERS = [
    0,
    1,
    -1,
    2,
    -2,
    3,
    7,
    64,
    65,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**63 - 1,
    2**63,
    -(2**64),
]
FLOATS = [0.0, -0.0, 0.5, 1e300, 1e-320, float("inf"), float("nan")]
DTYPES = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "g", "G",
    "M8[s]", "M8[ns]", "m8[s]", "S3", "U2", "V5", "V0", "O", ">i4", ">f8", "i4,f8", "(2,)i2",
]  # fmt: skip

EXPECTED = (TypeError, ValueError, IndexError, OverflowError, MemoryError, BufferError)
EXPECTED += (RuntimeWarning, np.exceptions.ComplexWarning, gpuops.DeviceError, ZeroDivisionError)
BINDING = (
    "positional argument",
    "positional-only",
    "keyword argument",
    "multiple values",
    "missing",
)


class Source:
    """Decisions, from the fuzzer's bytes; zeros where these are used up."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def byte(self):
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def below(self, count):
        return self.byte() % count

    def choice(self, things):
        return things[self.below(len(things))]


class Odd:
    """An object with some of the special attributes that the operators look at."""

    ATTRIBUTES = (
        "__cuda_array_interface__", "__cuda_stream__", "__dlpack__", "__dlpack_device__",
        "__dlpack_c_exchange_api__", "__array__", "requires_grad",
    )  # fmt: skip

    def __init__(self, answer):
        self.answer = answer

    def __getattr__(self, name):
        if name not in self.ATTRIBUTES:
            raise AttributeError(name)
        return self.answer if name.endswith(("interface__", "grad", "api__")) else self.call

    def call(self, *args, **keywords):
        return self.answer

    def __index__(self):
        return self.answer

    __float__ = __bool__ = __len__ = __index__

    def __getitem__(self, position):
        return self.answer


def array(source):
    """An array of any dtype; sliced, turned round, repeated, read-only."""
    dtype = np.dtype(source.choice(DTYPES))
    shape = tuple(source.below(4) for _ in range(source.below(4)))
    made = np.zeros(shape, dtype)
    if dtype.kind in "iufc" and made.size:
        made[...] = np.resize([source.byte() % 8 - 3 for _ in range(4)], made.shape).astype(dtype)
    way = source.below(12)
    if way == 1:
        made = made.T
    elif way == 2 and made.ndim:
        made = made[::-1]
    elif way == 3 and made.ndim:
        made = made[..., ::2]
    elif way == 4:
        made = np.broadcast_to(made, (2, *made.shape))
    elif way == 5:
        made.flags.writeable = False
    elif way == 6:
        made = made[()]
    elif way == 7:
        made = np.ma.array(made)
        repr(made)  # which makes it hold the number that stands for others, and that a dtype
    elif way == 8 and dtype.kind != "O":
        made = memoryview(made.tobytes())
    return made


def interface(source):
    """Something like the dict of __cuda_array_interface__."""
    made = {
        "shape": tuple(source.choice(INTEGERS) for _ in range(source.below(4))),
        "typestr": source.choice(["<f4", "<i8", "|b1", ">f4", "<f", "", "|O8"]),
        "data": (source.choice([0, 8, 4096]), source.below(2) == 0),
        "strides": source.choice([None, (), (4,), (8, 4), (-4,)]),
        "version": source.choice([0, 2, 3, 99]),
        "stream": source.choice([None, 0, 1, 2, -1]),
    }
    for name in list(made):
        way = source.below(8)
        if way == 1:
            del made[name]
        elif way == 2:
            made[name] = thing(source, 2)
    return made


def thing(source, depth=0):
    kind = source.below(16 if depth < 3 else 8)
    if kind == 0:
        return source.choice([None, True, False, Ellipsis, NotImplemented, int, np.float32, ...])
    if kind == 1:
        return source.choice(INTEGERS)
    if kind == 2:
        return source.choice([*FLOATS, 1j, complex("nan")])
    if kind == 3:
        return source.choice(WORDS)
    if kind == 4:
        return np.dtype(source.choice(DTYPES))
    if kind == 5:
        return np.int32(source.byte()) if source.below(2) else np.float64(source.byte())
    if kind == 6:
        return bytearray(source.data[: source.below(9)])
    if kind in (7, 8, 9, 10):
        return array(source)
    if kind == 11:
        return tuple(thing(source, depth + 1) for _ in range(source.below(4)))
    if kind == 12:
        return Odd(interface(source))
    if kind == 13:
        return Odd(thing(source, depth + 1))
    return [thing(source, depth + 1) for _ in range(source.below(4))]


def fitting(source, name):
    """What suits a parameter of that name, most of the time."""
    way = source.below(8)
    if way == 0:
        return thing(source)
    if name in ("mode", "precision", "device"):
        return source.choice(WORDS)
    if name in ("axis", "origin", "cval", "fill_value"):
        return source.choice([*range(-3, 4), None, (0, 0), [1], 2.5])
    if name == "stream":
        return None
    if name == "deterministic":
        return way > 4
    return array(source)


def make_call(source):
    which = source.below(len(OPERATORS))
    parameters = list(SIGNATURES[which].parameters.values())
    required = [each.name for each in parameters if each.default is each.empty]
    count = len(required) + source.choice([0, 0, 0, 0, 1, 2, -1, -2, 9])
    args = [
        fitting(source, parameters[min(i, len(parameters) - 1)].name) for i in range(max(count, 0))
    ]
    keywords = {}
    for _ in range(source.below(5)):
        name = source.choice(parameters).name if source.below(8) else source.choice(NAMES)
        keywords[name] = fitting(source, name)
    return which, args, keywords


def binds(signature, args, keywords):
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return False
    return True


def check(data):
    # What a first call imports may hold one of its arguments for good, if it is a name, say. Those
    # of the second call are others, as far as there can be others.
    if held(*make_call(Source(data))):
        call = make_call(Source(data))
        more = held(*call)
        assert not more, (call, more)


def held(which, args, keywords):
    """Make a call, and return what has other references after it, with their number before."""
    things = [*args, *keywords.values()]
    before = [sys.getrefcount(each) for each in things]
    fits, problem = binds(SIGNATURES[which], args, keywords), None
    try:
        OPERATORS[which](*args, **keywords)
    except EXPECTED as error:
        problem = error.with_traceback(None)
    refused = isinstance(problem, TypeError) and any(words in str(problem) for words in BINDING)
    assert refused or fits, (OPERATORS[which], args, keywords, problem)
    assert fits or isinstance(problem, TypeError), (OPERATORS[which], args, keywords, problem)
    problem = None
    after = [sys.getrefcount(each) for each in things]
    return [
        (one, was, now)
        for one, was, now in zip(things, before, after, strict=True)
        if was != now and not exists_once(one)
    ]


def exists_once(thing):
    """Whether there is only one of these, which anybody may hold."""
    return (
        any(thing is one for one in (None, ..., NotImplemented))
        or isinstance(thing, type | bool)
        or (type(thing) is int and -5 <= thing <= 256)
        or (type(thing) is str and len(thing) < 2)
    )


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_ubyte), ctypes.c_size_t)
def one_input(data, size):
    try:
        check(bytes(data[:size]))
    except BaseException:
        traceback.print_exc()
        os.abort()  # an exception would end here; libFuzzer keeps the input that aborts
    return 0


def main():
    warnings.simplefilter("ignore")
    words = [sys.argv[0], *sys.argv[2:]]
    count = ctypes.c_int(len(words))
    texts = (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)
    pointer = ctypes.cast(texts, ctypes.POINTER(ctypes.c_char_p))
    run = ctypes.PyDLL(gpuops._core.__file__).LLVMFuzzerRunDriver
    sys.exit(run(ctypes.byref(count), ctypes.byref(pointer), one_input))


if __name__ == "__main__":
    main()
