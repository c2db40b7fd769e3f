"""device="auto" beside each of the ways that it chooses from, and beside NumPy and SciPy.

Whole calls on host arrays, for every operator and from 1 to 2**28 elements of float32, as far as
memory suffices; products and filters up to 2**24, beyond which NumPy and SciPy take minutes. All
threads come to rest between two turns, and from there a BLAS takes ten times as long for a small
product as in a loop: such are measured right after others as well. Then gather from a large
page-locked table, of which the GPU may read the rows in place. At the end stand the worst ratios:
what it promises is never more than 1.05 times NumPy's time, nor more than 1.15 times that of the
best way. Each is a target of its case.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import numpy

import gpuops
from gpuops import _core

from .harness import (
    Case,
    Contestant,
    Run,
    byte_name,
    count_name,
    duration,
    fresh_cache,
    is_kept,
    memory_free,
)
from .whole import FACTOR

try:
    from scipy import ndimage
except ImportError:
    ndimage = None

AUTO, CPU, GPU = 'gpuops, device="auto"', "gpuops on the CPU", "gpuops on the GPU"
LARGEST, LARGEST_OF_SUMS, LARGEST_QUICK = 28, 24, 14
# What is promised: so many times as long as those at most.
PROMISES = (
    ("NumPy or SciPy", ("NumPy", "SciPy"), 1.05),
    ("the best way", (CPU, GPU), 1.15),
)
DIGITS = 2  # that are printed, by which a promise is kept or not
CASE_SECONDS = 1.0
# Of the page-locked table in float32, quick and not; the width of its rows and how many are taken.
TABLE, TABLE_QUICK = 1 << 28, 1 << 20
TABLE_ROWS = ((1, 1 << 10), (1, 1 << 20), (256, 16), (256, 1 << 10), (256, 1 << 19))


@dataclass
class Operator:
    """An operator: its inputs for a number of elements, and what NumPy or SciPy calls."""

    inputs: Callable[[Run, int], list[numpy.ndarray]]
    numpy: Callable[..., Any]
    in_place: bool = False
    largest: int = LARGEST
    again: range = range(0)  # the sizes that are measured in a loop as well, as powers of two
    tolerance: float = 1e-5
    peer: str = "NumPy"


def _floats(run: Run, count: int, arrays: int) -> list[numpy.ndarray]:
    return [run.random.random(count, dtype=numpy.float32) + 0.5 for _ in range(arrays)]


def _rows(run: Run, count: int, values: int) -> list[numpy.ndarray]:
    table, *rest = _floats(run, count, 1 + values)
    return [table, run.random.integers(0, count, count), *rest]


def _square(run: Run, count: int) -> numpy.ndarray:
    side = math.isqrt(count)
    return run.random.random((side, side), dtype=numpy.float32)


def _assign(x: numpy.ndarray, indices: numpy.ndarray, values: numpy.ndarray) -> None:
    x[indices] = values


def operators() -> dict[str, Operator]:
    """Name every operator of gpuops, with what it does."""

    def elements(arrays: int, function: Callable[..., Any]) -> Operator:
        return Operator(lambda run, count: _floats(run, count, arrays), function)

    def rows(function: Callable[..., Any], values: int = 0, **options: Any) -> Operator:
        return Operator(lambda run, count: _rows(run, count, values), function, **options)

    found = {
        "gather": rows(getitem),
        "take": rows(numpy.take),
        "take_along_axis": rows(lambda x, i: numpy.take_along_axis(x, i, -1)),
        "scatter": rows(_assign, 1, in_place=True),
        "scatter_add": rows(numpy.add.at, 1, in_place=True),
        "add": elements(2, numpy.add),
        "multiply": elements(2, numpy.multiply),
        "saxpy": elements(2, lambda x, y: FACTOR * x + y),
        "sigmoid": elements(1, lambda x: 1 / (1 + numpy.exp(-x))),
        "sigmoid_backward": elements(2, lambda grad, y: grad * y * (1 - y)),
        "matmul": Operator(
            lambda run, count: [_square(run, count), _square(run, count)],
            numpy.matmul,
            largest=LARGEST_OF_SUMS,
            again=range(12, 21, 2),
        ),
    }
    if ndimage is not None:
        for name in ("correlate", "convolve"):
            found[name] = Operator(
                lambda run, count: [_square(run, count), run.random.random((5, 5))],
                getattr(ndimage, name),
                largest=LARGEST_OF_SUMS,
                peer="SciPy",
            )
    return found


def measure(run: Run) -> None:
    """Measure every operator at every size, and name the worst of them."""
    seconds, run.case_seconds = run.case_seconds, min(run.case_seconds, CASE_SECONDS)
    first = len(run.cases)
    # What the contestants make the default ends with this, and what somebody has measured of the
    # machine before, at whatever moment, does not count.
    with gpuops.device(None), fresh_cache():
        for name, operator in operators().items():
            for case in cases(run, name, operator):
                if run.measure(case):
                    add_to_record(run, name, case)
        if gpuops.is_available():
            for case in page_locked_cases(run):
                if run.measure(case):
                    add_to_record(run, "gather", case)
    run.case_seconds = seconds
    if not run.quick and len(run.cases) > first:
        summarize(run, run.cases[first:])


def add_to_record(run: Run, name: str, case: Case) -> None:
    """Judge what was measured, and put beside it what the model expects, by which auto chooses."""
    if not run.quick:
        judge(run, run.cases[-1])
    arguments = [*case.fixed, *case.varying[0]]
    if name == "saxpy":
        arguments.insert(0, FACTOR)
    found = gpuops.explain(name, *arguments, device="auto")
    expected = {each.way: each.seconds for each in found.candidates if each.seconds is not None}
    run.cases[-1]["expected"] = {"chosen": found.chosen.way, "seconds": expected}
    texts = [f"{duration(seconds)} for {way}" for way, seconds in expected.items()]
    run.say(f"  expected: {', '.join(texts) or 'nothing'}; chosen: {found.chosen.way}")
    run.write()


def cases(run: Run, name: str, operator: Operator) -> Iterator[Case]:
    """One case for each size."""
    largest = min(operator.largest, LARGEST_QUICK) if run.quick else operator.largest
    for power in [0, *range(4, largest + 1, 2)]:
        count = 1 << power
        for clock in ("wall", "again") if power in operator.again else ("wall",):
            title = _name(name, count, clock)
            if run.wants(title) and has_memory(run, title, _memory_for(count)):
                yield case_of(run, name, operator, count, clock)


def has_memory(run: Run, name: str, needed: int) -> bool:
    """Tell whether a case has the memory that it takes, and say so where it has not."""
    free = memory_free()
    if needed <= free:
        return True
    run.say(f"\n{name}")
    run.say(f"  left out: {byte_name(needed)} of host memory needed, {byte_name(free)} to be had")
    return False


def _name(operator: str, count: int, clock: str) -> str:
    suffix = ", call after call" if clock == "again" else ""
    return f"auto: {operator} of {count_name(count)} float32{suffix}"


def _memory_for(count: int) -> int:
    """Bytes that a case takes at most: operands, what is changed of them, and results."""
    return count * (24 + 5 * 4)


def case_of(run: Run, name: str, operator: Operator, count: int, clock: str) -> Case:
    """All ways, and NumPy's, on the same arrays; of what is changed, on the same copy.

    Where short arrays lie to one another decides how long it takes to write to one of them, by up
    to three times: what is read may seem to have been written just then, if the addresses are alike
    to the processor.
    """
    inputs = operator.inputs(run, count)
    changed = numpy.empty_like(inputs[0])

    def restore(array: numpy.ndarray) -> numpy.ndarray:
        if array is not inputs[0]:
            return array
        changed[...] = array
        return changed

    ours = getattr(gpuops, name)
    if name == "saxpy":
        ours = functools.partial(ours, FACTOR)

    def contestant(function: Callable[..., Any], **options: Any) -> Contestant:
        if not operator.in_place:
            return Contestant(function, clock=clock, **options)
        return Contestant(
            lambda x, *rest: (function(x, *rest), x)[1], convert=restore, clock=clock, **options
        )

    contestants = {
        way: contestant(ours, before=functools.partial(_core._exchange_device, device))
        for way, device in ways().items()
    }
    contestants[operator.peer] = contestant(operator.numpy)

    def reference(*arrays: numpy.ndarray) -> numpy.ndarray:
        if not operator.in_place:
            return operator.numpy(*arrays)
        result = arrays[0].copy()
        operator.numpy(result, *arrays[1:])
        return result

    moved = sum(array.nbytes for array in inputs)
    return Case(
        _name(name, count, clock),
        contestants,
        reference,
        (),
        [inputs],
        moved,
        tolerance=operator.tolerance,
        undecided=undecided,
    )


def undecided(samples: dict[str, list[float]]) -> list[str]:
    """Name the promises of which it is not certain that auto keeps them, nor that it does not."""

    def is_open(others: tuple[str, ...], most: float) -> bool:
        names = [name for name in others if {AUTO, name} <= samples.keys()]
        kept = [is_kept(samples, AUTO, name, most + 10**-DIGITS / 2) for name in names]
        return None in kept and False not in kept  # broken with one of them, it is broken

    return [what for what, others, most in PROMISES if is_open(others, most)]


def slowness(ratios: dict[str, float], others: tuple[str, ...]) -> float | None:
    """Of how many times as fast auto is, how many times as long it takes as the fastest of others.

    To the digits that are printed, as for all targets. None where none of them took part.
    """
    found = [1 / ratios[name] for name in others if name in ratios]
    return round(max(found), DIGITS) if found else None


def ways() -> dict[str, str]:
    """Name the devices; as the default, since to pass device= takes a third of a small call."""
    return {AUTO: "auto", CPU: "cpu"} | ({GPU: "cuda"} if gpuops.is_available() else {})


def page_locked_cases(run: Run) -> Iterator[Case]:
    """Few and many elements, and few and many rows, of one table in page-locked memory."""
    size = TABLE_QUICK if run.quick else TABLE
    name = f"auto: gather from {byte_name(4 * size)} of page-locked memory"
    if not has_memory(run, name, 3 * 4 * size):  # there are results as large as half the table
        return
    table = gpuops.pinned_empty(size, numpy.float32)
    run.random.random(out=table, dtype=numpy.float32)
    for width, count in TABLE_ROWS:
        yield page_locked_case(run, name, table.reshape(-1, width), count)


def page_locked_case(run: Run, name: str, table: numpy.ndarray, count: int) -> Case:
    """So many rows of the table, or elements where rows have one, by every way."""
    width = table.shape[1]
    table = table.reshape(-1) if width == 1 else table
    count = min(count, len(table) // 2)
    indices = [(run.random.integers(0, len(table), count),) for _ in range(4)]

    def take(x: numpy.ndarray, i: numpy.ndarray) -> numpy.ndarray:
        return numpy.take(x, i, axis=0)

    contestants = {
        way: Contestant(gpuops.gather, before=functools.partial(_core._exchange_device, device))
        for way, device in ways().items()
    }
    contestants["NumPy"] = Contestant(take)
    name += f", {count_name(count)} " + ("elements" if width == 1 else f"rows of {4 * width} bytes")
    moved = 2 * count * width * table.itemsize + indices[0][0].nbytes
    return Case(name, contestants, take, [table], indices, moved, undecided=undecided)


def judge(run: Run, record: dict) -> None:
    """Say of a case whether what is promised is kept: that is its targets."""
    results = record["results"]
    for what, others, most in PROMISES:
        ratio = slowness({name: results[name]["ratio"] for name in results}, others)
        if AUTO not in results or ratio is None:
            continue
        text = f"{AUTO} takes {ratio:.2f} of the time of {what}, {most:g} promised"
        text += _chance(record, what)
        target = {"text": text, "promise": what, "value": ratio, "reached": ratio <= most}
        record["targets"].append(target)
        run.say_target(target)


def _chance(record: dict, what: str) -> str:
    return ", which may be chance" if what in record.get("undecided", ()) else ""


def summarize(run: Run, records: list[dict]) -> None:
    """Print the worst ratios, and the cases in which the promise is broken."""
    run.say("\nthe time under auto, in parts of that of NumPy or SciPy, and of the best way")
    for what, _, most in PROMISES:
        ratios = [
            (target["value"], record["case"].removeprefix("auto: ") + _chance(record, what))
            for record in records
            for target in record["targets"]
            if target["promise"] == what
        ]
        if not ratios:
            continue
        worst, where = max(ratios)
        run.say(f"  {what}: at most {worst:.2f}, {where}; {most:g} promised")
        for ratio, case in sorted(ratios, reverse=True):
            if ratio > most:
                run.say(f"    MISSED: {ratio:.2f} {case}")
