"""How much of the C files has been run, from gcov's counts.

    python tests/faults/build.py --coverage
    python tests/faults/build.py --coverage --cpu-only
    python tests/faults/coverage.py clear
    GCOV_ERROR_FILE=$PWD/build/gcov.log \\
        python -m pytest --package=build/cpu-gcov --fake=build/fake-gcov --require-fake
    python tests/faults/coverage.py report [--missing]

All processes that use either build add to its counts, and the two builds count together. Of counts
that cannot be added, as where a test lets the disk be full, gcov tells in that log. The exit status
is 1 where less was run than LEAST_LINES and LEAST_BRANCHES ask for.

A line that no test can reach says so: LCOV_EXCL_LINE leaves it out, LCOV_EXCL_BR_LINE only its
branches, each with the reason behind it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OBJECTS = ROOT / "build" / "objects"

LEAST_LINES = 95  # percent
LEAST_BRANCHES = 90


def read_counts():
    """Return how often each line, and each way that a branch goes, was taken: {(file, line): n}
    and {(file, line, branch): n}, in all builds together."""
    lines, branches = defaultdict(int), defaultdict(int)
    for counts in OBJECTS.glob("*/*.gcda"):
        command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", counts]
        answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        for file in json.loads(answer)["files"]:
            name = os.path.normpath(file["file"])
            if os.path.isabs(name):
                continue  # a header of Python or of the system
            seen = defaultdict(int)  # an inline function is there once for each of its copies
            for line in file["lines"]:
                at = (name, line["line_number"])
                lines[at] += line["count"]
                for branch in line["branches"]:
                    branches[*at, seen[at]] += branch["count"]
                    seen[at] += 1
    return leave_out(lines, "LCOV_EXCL_LINE"), leave_out(
        branches, "LCOV_EXCL_LINE", "LCOV_EXCL_BR_LINE"
    )


def leave_out(counts, *words):
    """Return the counts without those of lines that have one of these words."""
    texts = {name: (ROOT / name).read_text().splitlines() for name, *_ in counts}
    return {
        at: count
        for at, count in counts.items()
        if not any(word in texts[at[0]][at[1] - 1] for word in words)
    }


def percent(counts):
    return 100 * sum(count > 0 for count in counts) / max(len(counts), 1)


def report(lines, branches, missing):
    """Print a row for each file and one for all, and return the percentages of all."""
    print(f"{'':24}{'lines':>10}{'':>8}{'branches':>12}")
    for name in [*sorted({name for name, _ in lines}), "all"]:
        counts = [
            [count for at, count in table.items() if name in (at[0], "all")]
            for table in (lines, branches)
        ]
        shares = [percent(some) for some in counts]
        row = "".join(
            f"{share:9.1f} % of {len(some):<5}" for share, some in zip(shares, counts, strict=True)
        )
        print(f"{name:24}{row}")
        if missing:
            show_missing(name, lines, branches)
    return shares


def show_missing(name, lines, branches):
    text = (ROOT / name).read_text().splitlines() if name != "all" else []
    for number, code in enumerate(text, 1):
        ways = [count for at, count in branches.items() if at[:2] == (name, number)]
        if lines.get((name, number), 1) == 0:
            print(f"  {number:5} never    {code}")
        elif not all(ways):
            print(f"  {number:5} {sum(map(bool, ways))} of {len(ways):<3} {code}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["clear", "report"])
    parser.add_argument("--missing", action="store_true", help="show what was not run")
    arguments = parser.parse_args()
    if arguments.what == "clear":
        for counts in OBJECTS.glob("*/*.gcda"):
            counts.unlink()
        return
    counts = read_counts()
    if not counts[0]:
        sys.exit("nothing has been counted")
    lines, branches = report(*counts, arguments.missing)
    if lines < LEAST_LINES or branches < LEAST_BRANCHES:
        sys.exit(f"less than {LEAST_LINES} % of the lines or {LEAST_BRANCHES} % of the branches")


if __name__ == "__main__":
    main()
