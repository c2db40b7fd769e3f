"""Whole calls on NumPy arrays, by every way that there is: the CPU, the GPU and back, and auto."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

import gpuops

from . import peers
from .harness import Case, Contestant, Run, Target, count_name

MEBI = 1 << 20


@dataclass
class Whole:
    """An operator between NumPy arrays: what everybody calls on what `draw` makes of a size.

    Peers take their library first. `sizes` are those of the curves, and `text` writes one. At the
    size `full`, for which the `targets` are, every way is measured that there is; in a quick run
    that is `quick`, and nothing is larger. `others` are further ways of NumPy's, beside whole calls
    and not along the curves.
    """

    name: str
    draw: Callable[[Run, int], Sequence[numpy.ndarray]]
    ours: Callable[..., Any]
    numpy: Callable[..., numpy.ndarray]
    torch: Callable[..., Any]
    cupy: Callable[..., Any] | None
    text: Callable[[int], str]
    sizes: Sequence[int]
    full: int
    quick: int
    targets: Sequence[Target] = ()
    page_locked: bool = True
    tolerance: float = 0.0
    items: Callable[[int], int | None] = field(default=lambda size: None)
    others: dict[str, Callable[..., numpy.ndarray]] = field(default_factory=dict)


def ways(operator: Whole) -> dict[str, Contestant]:
    """Each device of gpuops, and each peer, with a fresh result."""
    contestants = {}
    devices = ["cuda", "auto", "cpu"] if gpuops.is_available() else ["auto", "cpu"]
    for device in devices:
        call = functools.partial(operator.ours, device=device)
        contestants[f"gpuops {device}"] = Contestant(call)
    contestants["NumPy"] = Contestant(operator.numpy)
    contestants |= peers.torch_cpu("", operator.torch)
    contestants |= peers.torch_from_host("", operator.torch)
    if operator.cupy:
        contestants |= peers.cupy_from_host("", operator.cupy)
    return contestants


def all_ways(operator: Whole) -> dict[str, Contestant]:
    """Those, and the other ways of NumPy's."""
    others = {name: Contestant(call) for name, call in operator.others.items()}
    return ways(operator) | others


def full_cases(run: Run, operator: Whole) -> Iterator[Case]:
    """The large case: with fresh results, also where no memory is kept for them, and with out=.

    There page-locked arrays take part beside those in ordinary memory.
    """
    size = operator.quick if run.quick else operator.full
    arrays = operator.draw(run, size)
    result = operator.numpy(*arrays)
    moved = sum(array.nbytes for array in arrays) + result.nbytes
    contestants = all_ways(operator)
    if gpuops.is_available():
        cold = functools.partial(operator.ours, device="cuda")
        contestants["gpuops cuda, first call"] = Contestant(cold, before=forget)
    targets = operator.targets if not run.quick else ()
    name = f"whole {operator.name} of {operator.text(size)}"

    def case(way: str, contestants: dict[str, Contestant], targets: Sequence[Target]) -> Case:
        items = operator.items(size)
        return Case(f"{name}{way}", contestants, operator.numpy, (), [arrays], moved, items,
                    targets, operator.tolerance)  # fmt: skip

    yield case("", contestants, targets)
    yield case(", out=", into(operator, result), ())


def into(operator: Whole, like: numpy.ndarray) -> dict[str, Contestant]:
    """The ways that write to memory that is there, of ordinary kind or page-locked."""

    def ours(device: str, memory: numpy.ndarray) -> Callable[..., Any]:
        return functools.partial(operator.ours, device=device, out=memory)

    contestants = {}
    if gpuops.is_available():
        contestants["gpuops cuda"] = Contestant(ours("cuda", numpy.zeros_like(like)))
    if gpuops.is_available() and operator.page_locked:
        contestants["gpuops cuda, page-locked"] = Contestant(
            ours("cuda", _page_locked(numpy.zeros_like(like))), convert=_page_locked
        )
    for device in ("auto", "cpu"):
        contestants[f"gpuops {device}"] = Contestant(ours(device, numpy.zeros_like(like)))
    memory = numpy.zeros_like(like)
    contestants["NumPy"] = Contestant(functools.partial(operator.numpy, out=memory))
    if torch := peers.torch_on_gpu():
        target = torch.zeros(like.shape, dtype=getattr(torch, like.dtype.name))

        def call(*arrays: Any) -> Any:
            return target.copy_(operator.torch(torch, *(array.cuda() for array in arrays)))

        contestants["torch GPU and back"] = Contestant(
            call, convert=torch.from_numpy, to_numpy=lambda tensor: tensor.numpy()
        )
    if (cupy := peers.cupy_on_gpu()) and operator.cupy:
        place = numpy.zeros_like(like)
        contestants["CuPy and back"] = Contestant(
            lambda *arrays: operator.cupy(cupy, *map(cupy.asarray, arrays)).get(out=place)
        )
    return contestants


def curve_cases(run: Run, operator: Whole) -> Iterator[Case]:
    """Every size, for a plot of time against size."""
    for size in operator.sizes:
        if run.quick and size > operator.quick:
            continue
        arrays = operator.draw(run, size)
        yield Case(
            f"curve {operator.name} of {operator.text(size)}", ways(operator), operator.numpy, (),
            [arrays], 0, operator.items(size), (), operator.tolerance,
            curve=(operator.name, size),
        )  # fmt: skip


def forget() -> None:
    """Give back all memory that is kept for later, but for the page-locked buffers of copies.

    Those are made once in the life of a process, by a copy that is too small to leave a result.
    """
    gpuops.empty_cache()
    gpuops.to_device(numpy.zeros(3 * MEBI, numpy.uint8)).to_host()


def _page_locked(array: numpy.ndarray) -> numpy.ndarray:
    copy = gpuops.pinned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


# What is computed.


def _sigmoid(x: numpy.ndarray, out: numpy.ndarray | None = None) -> numpy.ndarray:
    result = numpy.negative(x, out=out)
    for step in (numpy.exp, lambda x, out: numpy.add(x, 1, out=out), numpy.reciprocal):
        step(result, out=result)
    return result


FACTOR = numpy.float32(2.5)


def _our_saxpy(x: numpy.ndarray, y: numpy.ndarray, **options: Any) -> Any:
    return gpuops.saxpy(FACTOR, x, y, **options)


def _saxpy(x: numpy.ndarray, y: numpy.ndarray, out: numpy.ndarray | None = None) -> numpy.ndarray:
    result = numpy.multiply(FACTOR, x, out=out)
    return numpy.add(result, y, out=result)


def _take(x: numpy.ndarray, i: numpy.ndarray, out: numpy.ndarray | None = None) -> numpy.ndarray:
    # With out=, mode="raise" makes NumPy compute in memory of its own first.
    return numpy.take(x, i) if out is None else numpy.take(x, i, out=out, mode="wrap")


def _cupy_expit(cupy: Any, x: Any) -> Any:
    return 1 / (1 + cupy.exp(-x))


def _floats(run: Run, *shape: int) -> numpy.ndarray:
    return 8 * run.random.random(shape, dtype=numpy.float32) - 4


def _picked(run: Run, size: int) -> Sequence[numpy.ndarray]:
    """A table, and positions in it: as many as there are elements, and no more than 1 Mi."""
    indices = run.random.integers(0, size, min(size, MEBI), dtype=numpy.int64)
    return _floats(run, size), indices


POWERS = [1 << power for power in range(8, 28, 2)]

WHOLE = (
    Whole(
        "sigmoid",
        lambda run, size: [_floats(run, size)],
        gpuops.sigmoid,
        _sigmoid,
        lambda torch, x: torch.sigmoid(x),
        _cupy_expit,
        lambda size: f"{count_name(size)} float32",
        POWERS,
        full=128 * MEBI,
        quick=2 * MEBI,
        targets=[Target("gpuops cuda", seconds=14e-3)],
        tolerance=1e-6,
    ),
    Whole(
        "saxpy",
        lambda run, size: [_floats(run, size), _floats(run, size)],
        _our_saxpy,
        _saxpy,
        lambda torch, x, y: torch.add(y, x, alpha=2.5),
        lambda cupy, x, y: cupy.float32(2.5) * x + y,
        lambda size: f"{count_name(size)} float32",
        POWERS,
        full=128 * MEBI,
        quick=2 * MEBI,
        targets=[Target("gpuops cuda", seconds=26e-3)],
        tolerance=1e-6,
    ),
    Whole(
        "gather",
        _picked,
        gpuops.gather,
        _take,
        lambda torch, x, i: torch.index_select(x, 0, i),
        lambda cupy, x, i: cupy.take(x, i),
        lambda size: f"{count_name(min(size, MEBI))} of {count_name(size)} float32",
        POWERS,
        full=128 * MEBI,
        quick=2 * MEBI,
        targets=[
            Target("gpuops cuda", seconds=12.5e-3),
            Target("gpuops auto", seconds=1.3e-3),
        ],
        page_locked=False,
        items=lambda size: min(size, MEBI),
        others={"x[indices]": lambda x, i: x[i]},
    ),
    Whole(
        "matmul",
        lambda run, size: [_floats(run, size, size), _floats(run, size, size)],
        gpuops.matmul,
        numpy.matmul,
        lambda torch, a, b: torch.matmul(a, b),
        lambda cupy, a, b: cupy.matmul(a, b),
        lambda size: f"{size} x {size} float32",
        [1 << power for power in range(4, 13)],
        full=4096,
        quick=128,
        targets=[Target("gpuops cuda", seconds=9e-3)],
        tolerance=1e-5,
        items=lambda size: 2 * size**3,
    ),
)


def small_case(run: Run) -> Case:
    """A call that is all overhead."""
    gather = next(operator for operator in WHOLE if operator.name == "gather")
    targets = [Target("gpuops cuda", seconds=16e-6), Target("gpuops auto", seconds=1e-6)]
    sets = [_picked(run, 1000) for _ in range(4)]
    return Case("whole gather of 1000 of 1,000 float32", all_ways(gather), _take, (), sets, 0, 1000,
                targets if not run.quick else ())  # fmt: skip
