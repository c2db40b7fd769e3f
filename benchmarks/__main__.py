"""Run every bench_*.py of this folder, or those that are named."""

import argparse
import importlib
import re
import sys
from pathlib import Path

from . import plot
from .harness import Run, machine, machine_name, measure_limits

FOLDER = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    names = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--output", type=Path, help="the JSON file; the table goes beside it, as .txt"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small tables, few rounds: a smoke test"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time for each case (default: 3)"
    )
    parser.add_argument(
        "--cases", default="", metavar="REGEX", help="only those whose names it finds something in"
    )
    parser.add_argument(
        "--plot",
        nargs="?",
        type=Path,
        const=True,
        metavar="FIGURE",
        help="draw time against size, with `transfer` (default: beside the JSON file, as .svg)",
    )
    options = parser.parse_args(arguments)
    if options.cases and not (options.output or options.quick):
        parser.error("--cases: name the file of the figures with --output; the default is for all")
    try:
        re.compile(options.cases)
    except re.error as error:
        parser.error(f"--cases: {error}")
    if unknown := set(options.names) - set(names):
        parser.error(f"there is no benchmark named {', '.join(sorted(unknown))}")

    output = options.output
    if output is None and not options.quick:  # a quick run tells nothing of speed
        output = FOLDER / "results" / f"{machine_name()}.json"
    if isinstance(options.plot, Path) and not options.plot.suffix:
        parser.error(
            f"--plot: {options.plot} is not a figure, which ends like .svg; benchmarks come first"
        )
    if options.plot is True and output is None:
        parser.error("--plot: name the figure, or with --output a file that it can go beside")
    run = Run(
        quick=options.quick, case_seconds=options.seconds, output=output, pattern=options.cases
    )
    facts = machine()
    run.say(f"{', '.join(facts['gpus']) or 'no GPU'}; {facts['processor']}, {facts['cores']} cores")
    measure_limits(run)
    run.say(
        "\nEach line: median time, rate, and how many times as fast the first line of its case is."
    )
    for name in options.names or names:
        importlib.import_module(f".bench_{name}", __package__).measure(run)
    if not run.cases:
        parser.error(f"--cases: none has {options.cases!r} in its name")
    run.conclude()
    if options.plot:
        figure = output.with_suffix(".svg") if options.plot is True else options.plot
        plot.draw(run.document(), figure)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
