"""explain and last_route: where a call would run, and where the last one ran."""

from collections.abc import Callable
from typing import Any, NamedTuple

from . import _core


class Candidate(NamedTuple):
    """A way that a call can take, and what it would take."""

    way: str
    device: str
    bytes_up: int
    bytes_down: int
    seconds: float | None


class Explanation(NamedTuple):
    """What `explain` returns; its text is a table."""

    operator: str
    chosen: Candidate
    reason: str
    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        heads = ("", "way", "device", "bytes up", "bytes down", "expected")
        rows = [
            (
                ">" if candidate == self.chosen else "",
                candidate.way,
                candidate.device,
                f"{candidate.bytes_up:,}",
                f"{candidate.bytes_down:,}",
                _duration(candidate.seconds),
            )
            for candidate in self.candidates
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [f"{self.operator} runs on {self.chosen.device}: {self.reason}"]
        for cells in (heads, *rows):
            texts = [
                cell.rjust(width) if position >= 3 else cell.ljust(width)
                for position, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            lines.append("  ".join(texts).rstrip())
        return "\n".join(lines)


class Route(NamedTuple):
    """What `last_route` returns: the way that a call took."""

    operator: str
    way: str
    device: str
    bytes_up: int
    bytes_down: int
    expected_seconds: float | None
    elapsed_seconds: float | None


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{1e6 * seconds:.3g} us"


def explain(op: str | Callable[..., Any], /, *args: Any, **keywords: Any) -> Explanation:
    """Tell where a call would run, and what that would take, without making it.

    Parameters
    ----------
    op : str or function
        An operator of gpuops, such as ``gpuops.gather``, or its name.
    *args, **keywords
        Its arguments, as the call would have them. They are checked as the call checks them, but
        for the values of indices and of numbers that have to be cast.

    Returns
    -------
    Explanation
        `candidates`, the ways that there are, each with its `way` ('cpu', 'cuda': host arrays go to
        a GPU and the result comes back, 'zero-copy': the same, but what is page-locked is read
        where it is, or 'device': the data are on a GPU), `device`, `bytes_up` and `bytes_down`
        that go to the GPU and come back, and the expected `seconds`, or None where nobody can
        tell; `chosen`, the one that the call would take; `reason`; and `operator`. Its text is a
        table of them.

    Raises
    ------
    TypeError, ValueError, IndexError, numpy.exceptions.AxisError
        As the call would raise them; also where `op` is no operator.
    DeviceError
        If a GPU is asked for that is not there.

    See Also
    --------
    last_route : What a call has taken.

    Notes
    -----
    No memory for the result is made. What a call does with a table on the host may also depend on
    its indices, and on the memory that is free on the GPU: `gather` may send no more up than the
    range of places that is taken, and for an array on the GPU no more than the rows. `last_route`
    tells.

    Expected times come from a cost model, for which the machine is measured once, by the first call
    of each kind of work that asks for it (of elements, rows, products or filters): that takes a
    fraction of a second, and is kept in the folder that GPUOPS_CACHE_DIR names.

    Examples
    --------
    >>> import gpuops
    >>> found = gpuops.explain("gather", [10, 20, 30], [2, 0], device="cpu")
    >>> found.chosen.way, found.chosen.bytes_up
    ('cpu', 0)
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    if not isinstance(name, str) or op not in (name, getattr(_core, name, None)):
        raise TypeError(f"explain() takes an operator of gpuops or its name first, not {op!r}")
    operator, candidates, chosen, reason = _core._explain(name, *args, **keywords)
    found = tuple(Candidate(*candidate) for candidate in candidates)
    return Explanation(operator, found[chosen], reason, found)


def last_route() -> Route | None:
    """Tell where the last call of an operator on this thread ran, and how long it took.

    Returns
    -------
    Route or None
        `operator`; `way`, `device`, `bytes_up` and `bytes_down` as in `explain`, but as they were,
        without indices that came down: 'zero-copy' also where a table was read in place for an
        array on the GPU;
        `expected_seconds`, by the cost model, or None where nothing was expected: of a call on the
        CPU that nobody had to weigh, or before the machine is measured; and `elapsed_seconds`, from
        when arguments were read and memory for the result was made to when the result, or the
        exception, was there, or None of a call on arrays on a GPU, which does not wait for that.
        None where there was no call.

    See Also
    --------
    explain : What a call would take.

    Examples
    --------
    >>> import gpuops
    >>> result = gpuops.gather([10, 20, 30], [2, 0], device="cpu")
    >>> route = gpuops.last_route()
    >>> route.operator, route.way, route.elapsed_seconds > 0
    ('gather', 'cpu', True)
    """
    found = _core._last_route()
    if found is None:
        return None
    operator, (way, device, bytes_up, bytes_down, expected), elapsed = found
    return Route(operator, way, device, bytes_up, bytes_down, expected, elapsed)
