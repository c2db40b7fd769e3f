"""The shortest calls, which do not go the path of all others, and what only looks like one of them.

With mode= or axis= a call goes that path, so that the two can be told apart.
"""

import importlib
import mmap
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from helpers import DTYPES, constant, filled_array, read_only, run_child, run_threads, same

FEW = constant("gpuops.h", "MOST_FEW")
TAKEN = 1 << 10
COUNTS = [0, 1, 7, 8, 9, 100, FEW - 1, FEW, FEW + 1, 2 * FEW, TAKEN - 1, TAKEN, TAKEN + 1]
TAKING = ["gather", "take"]


@pytest.fixture(params=["cpu", "auto"])
def brief(gpuops, monkeypatch, request):
    """Where short calls run; nothing is so large that the machine would be measured for it."""
    measured = []
    calibration = importlib.import_module(f"{gpuops.__name__}._calibration")
    monkeypatch.setattr(calibration, "calibrate", lambda *what: measured.append(what))
    with gpuops.device(request.param):
        yield gpuops
    assert measured == []


def counts(dtype):
    """As many as "auto" takes to the CPU whatever there is."""
    return [count for count in COUNTS if count * (dtype.itemsize + 8) <= 32 << 10]


def positions(count, size, seed=0):
    return np.random.default_rng(seed).integers(-size, size, count)


def outcome(call):
    """What a call returns, or the type and the text of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def as_the_others(gpuops, name, *arguments):
    """Both ways give the same, which is returned."""
    result = outcome(lambda: getattr(gpuops, name)(*arguments))
    expected = outcome(lambda: getattr(gpuops, name)(*arguments, mode="raise"))
    if isinstance(expected, tuple):
        assert result == expected
    else:
        same(result, expected)
        assert isinstance(result, np.generic) or result.strides == expected.strides
    return result


@pytest.mark.parametrize("name", TAKING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_taking(brief, name, dtype):
    x = filled_array(50, dtype)
    for count in counts(dtype):
        indices = positions(count, 50)
        result = getattr(brief, name)(x, indices)
        same(result, x[indices])
        assert result.flags.owndata and result.flags.writeable
    assert brief.last_route().operator == name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing(brief, dtype):
    """Of several values for an element the last one wins."""
    for count in counts(dtype):
        x, values = filled_array(50, dtype), filled_array(count, dtype, seed=1)
        indices = positions(count, 50)
        expected = x.copy()
        for i, place in enumerate(indices % 50):
            expected[place : place + 1] = values[i : i + 1]  # with the gaps of long doubles
        assert brief.scatter(x, indices, values) is None
        same(x, expected)
    assert brief.last_route().operator == "scatter"


def test_what_is_told_of_it(brief):
    for name, arguments in (("gather", []), ("take", []), ("scatter", [np.ones(2)])):
        getattr(brief, name)(np.zeros(3), np.array([0, 1]), *arguments)
        *route, seconds = brief.last_route()
        assert route == [name, "cpu", "cpu", 0, 0, None]
        assert 0 <= seconds < 1


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0, 3), (2, 1, 2, 1, 2)])
@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_indices_of_any_shape(brief, shape, order):
    indices = np.asarray(positions(shape, 9))
    if order == "strided":
        indices = np.repeat(indices[..., None], 2, -1)[..., 0]
    elif indices.ndim > 0:
        indices = np.asarray(indices, order=order)
    x = np.arange(9.0)
    same(as_the_others(brief, "gather", x, indices), x[indices])


LAYOUTS = {
    "strided": lambda x: x[::2],
    "backward": lambda x: x[::-1],
    "one element": lambda x: np.broadcast_to(x[:1], 20),
    "misaligned": lambda x: np.frombuffer(b"?" + x.tobytes(), x.dtype, offset=1),
    "read-only": read_only,
    "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "masked": np.ma.array,
    "of a subclass": lambda x: x.view(np.recarray),
    "a memoryview": memoryview,
    "a list": list,
    "of two axes": lambda x: x.reshape(2, -1),
    "of no axis": lambda x: x[3, ...],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tables_of_any_layout(brief, layout):
    x = layout(np.arange(40.0))
    result = as_the_others(brief, "gather", x, np.array([0, -1, 1, 0]))
    if type(x) is np.ndarray and x.ndim > 0 and x.dtype.isnative:
        same(result, x[[0, -1, 1, 0]])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_writing_to_any_layout(brief, which, layout):
    """Whichever argument it is that is of the layout."""

    def arguments():
        plain = [np.arange(40.0), np.arange(40) % 7, np.arange(40.0) + 100]
        given = plain[which]
        if which == 0 and layout is LAYOUTS["misaligned"]:
            memory = np.zeros(40 * 8 + 1, np.uint8)
            plain[which] = memory[1:].view(float)
            plain[which][...] = given
        else:
            plain[which] = layout(given)
        return plain

    briefly, otherwise = arguments(), arguments()
    result = outcome(lambda: brief.scatter(*briefly))
    assert result == outcome(lambda: brief.scatter(*otherwise, axis=0))
    np.testing.assert_array_equal(briefly[0], otherwise[0])


@pytest.mark.parametrize("name", [*TAKING, "scatter"])
@pytest.mark.parametrize("bad", [50, -51, 2**63 - 1, -(2**63)])
def test_an_index_out_of_bounds(brief, name, bad):
    x = np.arange(50.0)
    before = x.copy()
    for count, place in [
        (1, 0),
        (8, 0),
        (8, 7),
        (20, 10),
        (20, 19),
        (FEW, 0),
        (TAKEN, 0),
        (TAKEN, TAKEN - 1),
    ]:
        values = [np.zeros(count)] * (name == "scatter")
        indices = positions(count, 50)
        indices[place] = bad
        kind, text = as_the_others(brief, name, x, indices, *values)
        assert kind is IndexError
        assert text == f"index {bad} is out of bounds for axis 0 with size 50"
        same(x, before)


@pytest.mark.parametrize("name", [*TAKING, "scatter"])
def test_nothing_to_take_from(brief, name):
    values = [np.zeros(1)] * (name == "scatter")
    x = np.zeros(0)
    kind, _ = as_the_others(brief, name, x, np.array([0]), *values)
    assert kind is IndexError
    empty = [np.zeros(0)] * (name == "scatter")
    getattr(brief, name)(x, np.zeros(0, int), *empty)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(3), np.zeros((1, 2)), np.zeros(1), np.zeros(2, "f4"), np.zeros(2, int),
        np.zeros(2, complex), np.zeros(2, "M8[s]"), np.float32(3), 1.5, [1, 2],
    ],
    ids=repr,
)  # fmt: skip
def test_values_that_do_not_fit(brief, values):
    """They are cast, repeated or refused."""
    x, y = np.arange(5.0), np.arange(5.0)
    result = outcome(lambda: brief.scatter(x, np.array([1, 2]), values))
    assert result == outcome(lambda: brief.scatter(y, np.array([1, 2]), values, axis=0))
    same(x, y)


def test_there_is_no_memory_for_the_result(brief):
    """Nothing is told of a call that was not made."""
    testing = pytest.importorskip("_testcapi")
    x, indices = np.zeros(3), np.array([1])
    brief.add(x, x)
    gather = brief.gather
    with pytest.raises(MemoryError):
        testing.set_nomemory(0, 1)
        try:
            gather(x, indices)
        finally:
            testing.remove_mem_hooks()
    assert brief.last_route().operator == "add"


def test_times_of_other_units(brief):
    x, values = np.zeros(3, "M8[s]"), np.ones(1, "M8[D]")
    brief.scatter(x, np.array([1]), values)
    assert x[1] == values[0]


@pytest.mark.parametrize("offset", range(-3, 4))
@pytest.mark.parametrize("shared", ["values", "indices"])
def test_operands_that_overlap(brief, shared, offset):
    """They act as if they had been copied first."""
    memory = np.arange(12) % 5
    x = memory[3:8]
    view = memory[3 + offset : 3 + offset + 4]
    others = {"indices": np.array([4, 0, 2, 1]), "values": np.array([10, 20, 30, 40])}
    others[shared] = view
    expected = x.copy()
    for place, value in zip(others["indices"].copy(), others["values"].copy(), strict=True):
        expected[place] = value
    brief.scatter(x, others["indices"], others["values"])
    same(x.copy(), expected)


def test_whoever_writes_is_warned(brief):
    """As by NumPy, of an array that only looks like one of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = np.broadcast_arrays(np.arange(3.0), np.zeros((1, 1)))[0][0]
    assert x.flags.c_contiguous
    with pytest.warns(DeprecationWarning) as warned:
        brief.scatter(x, np.array([1]), np.array([5.0]))
    assert len(warned) == 1


def test_where_the_default_device_says(fake):
    """The GPU of a thread's default is not passed over, however short the call is."""
    x, indices = np.arange(5.0), np.array([1, 2])
    for device, is_gpu in (
        (None, True),
        ("cuda", True),
        (0, True),
        ("auto", False),
        ("cpu", False),
    ):
        with fake.gpuops.device(device):
            for call in (
                lambda: fake.gpuops.gather(x, indices),
                lambda: fake.gpuops.scatter(x, indices, np.ones(2)),
            ):
                before = fake.fake.calls("cudaLaunchKernel")
                call()
                assert (fake.fake.calls("cudaLaunchKernel") > before) == is_gpu, device
                assert (fake.gpuops.last_route().device == "cpu") != is_gpu


@pytest.mark.parametrize(
    ("default", "device", "is_gpu"),
    [
        ("cpu", "cuda", True), ("cpu", 0, True), ("cuda", "cpu", False), ("cuda", "auto", False),
        ("cuda", None, True), ("cpu", None, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("name", "values"), [("gather", []), ("scatter", [np.ones(2)])])
def test_where_the_call_says(fake, name, values, default, device, is_gpu):
    """Whatever the default is."""
    before = fake.fake.calls("cudaLaunchKernel")
    with fake.gpuops.device(default):
        call = getattr(fake.gpuops, name)
        call(np.arange(5.0), np.array([1, 2]), *values, device=device)
    assert (fake.fake.calls("cudaLaunchKernel") > before) == is_gpu
    assert (fake.gpuops.last_route().device == "cpu") != is_gpu


class Ordinal:
    """Counts how often it is asked which device it is."""

    asked = 0

    def __index__(self):
        self.asked += 1
        return 0


@pytest.mark.parametrize(
    "keywords",
    [
        {"device": "gpu"}, {"device": "\ud800"}, {"device": 1.5}, {"device": b"cpu"},
        {"mode": "cpu"}, {"axis": "cpu"}, {"devic": "cpu"}, {"device": "cpu", "mode": "up"},
        {"mode": "wrap"}, {"device": "auto", "mode": "clip"}, {"device": "cpu", "axis": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_other_keywords(brief, keywords):
    """Good or bad, they are told of, or heeded, as with a list, which goes the other path."""
    is_good = keywords.get("mode") in ("wrap", "clip")
    x, indices = np.arange(5.0), np.array([1, 7 if is_good else 3])
    result = outcome(lambda: brief.gather(x, indices, **keywords))
    expected = outcome(lambda: brief.gather(x, indices.tolist(), **keywords))
    if is_good:
        same(result, np.take(x, indices, mode=keywords["mode"]))
        same(result, expected)
    else:
        assert isinstance(result, tuple)
        assert result == expected


def test_a_device_is_asked_once(fake):
    ordinal = Ordinal()
    fake.gpuops.gather(np.arange(5.0), np.array([1, 2]), device=ordinal)
    assert ordinal.asked == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("GPUOPS_DEVICE", "gpu"), ("GPUOPS_NUM_THREADS", "many"), ("GPUOPS_CPU_LEVEL", "x86-64-v9")],
)
def test_wrong_settings_are_told_of(gpuops, variable, value):
    source = """
import numpy as np, gpuops
x, indices = np.arange(5.0), np.array([1])
for call in (lambda: gpuops.gather(x, indices), lambda: gpuops.scatter(x, indices, np.ones(1))):
    try:
        call()
    except ValueError as error:
        print(error)
assert x[1] == 1
"""
    device = {} if variable == "GPUOPS_DEVICE" else {"GPUOPS_DEVICE": "cpu"}
    output = run_child(gpuops, source, **{variable: value}, **device)
    assert [line.split(" is ")[0] for line in output.splitlines()] == [variable] * 2


@pytest.mark.not_under_tsan("indices that are written to meanwhile race, as asked")
def test_indices_that_another_thread_changes(brief):
    """What counts is what was seen when they were looked at."""
    count = FEW - 1  # of which the last ones are in no group
    memory = np.zeros(3 * count)
    x, values = memory[count : 2 * count], np.ones(count)
    good, bad = np.zeros(1 << 17, int), np.full(1 << 17, count)
    written = good.copy()  # without the GIL, since they are many
    is_over = threading.Event()

    def change():
        while not is_over.is_set():
            np.copyto(written, bad)
            np.copyto(written, good)

    def use():
        try:
            with brief.device("cpu"):
                for begin in range(0, len(written) - count, 5):
                    indices = written[begin : begin + count]
                    x[:] = 1
                    try:
                        brief.scatter(x, indices, values)
                        assert (brief.gather(x, indices) == 1).all()
                    except IndexError:
                        pass
        finally:
            is_over.set()
        assert not memory[:count].any() and not memory[2 * count :].any()

    run_threads([change, use])


@pytest.mark.parametrize("way", ["many", "far apart"])
def test_others_run_meanwhile(brief, way):
    """Without being in need of it: nobody is made to let go, however long they wait."""
    table = np.arange(1 << 22)
    indices = positions(TAKEN, len(table))
    apart = table[:: mmap.PAGESIZE // table.itemsize][:1024]
    calls = {
        "many": lambda: brief.gather(table, indices),
        "far apart": lambda: brief.multiply(apart, apart),
    }
    before = sys.getswitchinterval()
    came = threading.Event()

    def other():
        time.sleep(0.05)  # which is when the calls have begun
        came.set()

    thread = threading.Thread(target=other)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        deadline = time.perf_counter() + 20
        while not came.is_set() and time.perf_counter() < deadline:
            calls[way]()
        assert came.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_eight_threads_at_once(brief, short_switch_interval):
    x, indices = np.arange(50), positions(100, 50)
    expected = x[indices]

    def work():
        with brief.device("cpu"):
            for _ in range(300):
                np.testing.assert_array_equal(brief.gather(x, indices), expected)
                mine = x.copy()
                brief.scatter(mine, indices, expected)
                np.testing.assert_array_equal(mine, x)

    run_threads([work] * 8)
