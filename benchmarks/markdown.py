"""Write the tables of README.md: ``python -m benchmarks.markdown benchmarks/results/FILE.json``."""

import json
import sys
from pathlib import Path

from .harness import duration, rate


def tables(document: dict) -> str:
    """Write one table for whole calls, with times, and one for kernels, with rates.

    Behind what a peer takes stands how many times as fast the first column is.
    """
    parts = []
    for kind, write in (("gather ", _time_cell), ("kernel ", _rate_cell)):
        cases = [case for case in document["cases"] if case["case"].startswith(kind)]
        # Events say nearly the same as the profiler, so they stay in the files of results.
        names = [
            name
            for name in dict.fromkeys(name for case in cases for name in case["results"])
            if not name.endswith("events")
        ]
        if cases:
            rows = [["", *names], ["---", *("---:" for _ in names)]]
            rows += [
                [case["case"].removeprefix(kind), *(write(case, name) for name in names)]
                for case in cases
            ]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts)


def _time_cell(case: dict, name: str) -> str:
    result = case["results"].get(name)
    return _beside(case, name, duration(result["median_s"])) if result else ""


def _rate_cell(case: dict, name: str) -> str:
    result = case["results"].get(name)
    return _beside(case, name, rate(result)) if result else ""


def _beside(case: dict, name: str, text: str) -> str:
    is_first = name == next(iter(case["results"]))
    return f"**{text}**" if is_first else f"{text} ({_ratio(case['results'][name]['ratio'])})"


def _ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
