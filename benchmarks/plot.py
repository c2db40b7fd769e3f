"""Draw time against size: ``python -m benchmarks.plot benchmarks/results/FILE.json FIGURE.svg``.

Of each operator that a run measured at several sizes there is a panel, with a line for each way.
The ending of the figure's name says what is written: .svg, .png, .pdf. It takes matplotlib, which
the extra `bench` brings.
"""

import json
import math
import sys
from pathlib import Path

# Ways from the back to the front, by how their names begin: colour, width and style of the line.
STYLES = (
    ("NumPy", "tab:gray", 1.5, "--"),
    ("torch CPU", "tab:orange", 1.5, ":"),
    ("torch GPU and back", "tab:red", 1.5, "--"),
    ("CuPy and back", "tab:purple", 1.5, "--"),
    ("gpuops cpu", "tab:blue", 1.5, "-"),
    ("gpuops cuda", "tab:green", 1.5, "-"),
    ("gpuops auto", "black", 3.0, "-"),
)


def curves(document: dict) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Collect (size, seconds) of each operator and way of a run, from the smallest size on."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for case in document["cases"]:
        if "curve" not in case:
            continue
        operator, size = case["curve"]
        for name, result in case["results"].items():
            way = next((style[0] for style in STYLES if name.startswith(style[0])), name)
            lines = found.setdefault(operator, {}).setdefault(way, [])
            lines.append((size, result["median_s"]))
    for lines in found.values():
        for points in lines.values():
            points.sort()
    return found


def draw(document: dict, path: Path) -> None:
    """Draw a figure of a run, as `Run.document` has it or as its JSON file holds it."""
    import matplotlib
    import matplotlib.figure

    panels = curves(document)
    if not panels:
        raise ValueError("the run has no operator at several sizes: `transfer` measures them")
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    figure = matplotlib.figure.Figure(figsize=(6 * columns, 4.5 * rows), layout="constrained")
    machine = document["machine"]
    figure.suptitle(f"{', '.join(machine['gpus']) or 'no GPU'}; {machine['processor']}")
    for number, (operator, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for way, colour, width, style in (*STYLES, *_unknown(lines)):
            if way in lines:
                axes.plot(*zip(*lines[way], strict=True), style, label=way, color=colour,
                          linewidth=width, marker=".")  # fmt: skip
        axes.set(title=operator, xscale="log", yscale="log", xlabel="elements", ylabel="seconds")
        if operator == "matmul":
            axes.set_xlabel("rows and columns")
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(fontsize="small")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)


def _unknown(lines: dict) -> list[tuple]:
    known = {style[0] for style in STYLES}
    return [(way, None, 1.0, "-.") for way in lines if way not in known]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
