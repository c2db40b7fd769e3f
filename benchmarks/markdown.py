"""Write the tables of README.md: ``python -m benchmarks.markdown benchmarks/results/FILE.json``."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from .harness import duration, rate
from .unchecked import NAME as UNCHECKED


def tables(document: dict) -> str:
    """Write a table for each kind of case: times of whole calls, rates of work on the GPU.

    Behind the figure of a peer stands how many times as fast the first column is.
    """
    parts = []
    rest = list(document["cases"])
    for kind, title, write in KINDS:
        cases = [case for case in rest if case["case"].startswith(kind)]
        rest = [case for case in rest if case not in cases]
        names = list(dict.fromkeys(name for case in cases for name in case["results"]))
        if len({next(iter(case["results"])) for case in cases}) == 1:
            names.sort(key=lambda name: not name.startswith("gpuops"))
        # The other modes, and the kernel without the check, have the price of the bounds check for
        # their point, which is a table of its own.
        modes = [name for name in names if "mode=" in name or name == UNCHECKED]
        parts += _table(title, kind, cases, [name for name in names if name not in modes], write)
        checked = [case for case in cases if set(modes) & set(case["results"])]
        parts += _table("The bounds check", kind, checked, [*names[: bool(modes)], *modes], write)
    parts += _operators([case for case in rest if case["case"].startswith(OPERATORS)])
    parts += [_parts(case) for case in document["cases"] if case["case"] == PARTS]
    return "\n\n".join(parts)


def _table(title: str, kind: str, cases: list, names: list, write: Callable) -> list[str]:
    if not cases or not names:
        return []
    rows = [["", *names], ["---", *("---:" for _ in names)]]
    rows += [
        [case["case"].removeprefix(kind), *(_cell(case, name, write) for name in names)]
        for case in cases
    ]
    return [f"{title}:\n\n{_lines(rows)}"]


def _operators(cases: list) -> list[str]:
    """Write one table of many operators, with a column for each library and not each function."""
    renamed = []
    for case in cases:
        if next(iter(case["results"])) != "gpuops on the CPU":
            continue
        results = {}
        for name, result in case["results"].items():
            results.setdefault(LIBRARIES.get(name) or _library(name), result)
        renamed.append({"case": case["case"], "results": results})
    names = list(dict.fromkeys(name for case in renamed for name in case["results"]))
    names.sort(key=lambda name: not name.startswith("gpuops"))
    return _table("Whole calls of other operators", "", renamed, names, _time)


def _library(name: str) -> str:
    """Return "torch CPU" for "torch CPU index_add_"."""
    return next((library for library in LIBRARIES.values() if name.startswith(library)), name)


def _parts(case: dict) -> str:
    results = case["results"]
    rows = [["", "a call"], ["---", "---:"]]
    rows += [[name, duration(result["median_s"])] for name, result in results.items()]
    return f"What a call consists of:\n\n{_lines(rows)}"


def _lines(rows: list) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(case: dict, name: str, write: Callable) -> str:
    result = case["results"].get(name)
    # Times on JAX's stream are differences of larger ones, and no figures if they vary so much.
    if not result or (name.startswith("JAX") and result["worst_s"] > 2 * result["best_s"]):
        return ""
    if name == next(iter(case["results"])):
        return f"**{write(result)}**"
    return f"{write(result)} ({_ratio(result['ratio'])})"


def _time(result: dict) -> str:
    return duration(result["median_s"])


def _ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"


# A case is of the first kind that its name begins with.
KINDS = (
    ("whole ", "Whole calls by every way, NumPy arrays in and out", _time),
    ("curve ", "The same at every size", _time),
    ("gather host table, ", "From tables on the host to the GPU", rate),
    ("gather ", "Whole calls, NumPy arrays in and out", _time),
    ("device scatter_add ", "scatter_add", rate),
    ("device scatter ", "scatter", rate),
    ("device matmul of ", "matmul, in operations", rate),
    ("device correlate ", "correlate, in pixels", rate),
    ("device add of ", "add", rate),
    ("device multiply of ", "multiply", rate),
    ("device saxpy of ", "saxpy", rate),
    ("device sigmoid of ", "sigmoid", rate),
    ("device sigmoid_backward of ", "sigmoid_backward", rate),
    ("device ", "gather between arrays on the GPU", rate),
    ("overhead ", "Overhead of a call", _time),
    ("transfer ", "To the GPU and back", rate),
)
OPERATORS = ("add ", "multiply ", "saxpy ", "sigmoid", "scatter", "matmul ", "correlate ")
LIBRARIES = {
    "numpy.add.at": "NumPy",
    "x[indices] = values": "NumPy",
    "scipy.special.expit": "SciPy",
    "torch CPU": "torch CPU",
    "torch GPU and back": "torch GPU and back",
    "CuPy and back": "CuPy and back",
    "OpenCV": "OpenCV",
}
PARTS = "parts of a call"

if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
