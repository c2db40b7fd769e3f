"""The benchmarks: the plot of a run that never was, and what a run says where it cannot measure."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_child
from rtc import open_nvrtc

ROOT = Path(__file__).resolve().parent.parent
PLOT = ROOT / "benchmarks" / "plot.py"


def case(operator, size, **seconds):
    results = {name.replace("_", " "): {"median_s": value} for name, value in seconds.items()}
    return {"case": f"curve {operator}", "curve": [operator, size], "results": results}


DOCUMENT = {
    "machine": {"gpus": ["Some GPU"], "processor": "Some processor"},
    "cases": [
        {"case": "transfer up", "results": {"NumPy": {"median_s": 1.0}}},
        case("sigmoid", 4096, gpuops_auto=3e-6, NumPy=9e-6, torch_GPU_and_back_sigmoid=4e-5),
        case("sigmoid", 256, gpuops_auto=1e-6, NumPy=2e-6, gpuops_cuda=2e-5),
        case("matmul", 64, gpuops_auto=1e-6, another_way=2e-6),
        case("matmul", 128, gpuops_auto=2e-6, another_way=9e-6),
    ],
}


@pytest.fixture(scope="module")
def plot():
    specification = importlib.util.spec_from_file_location("benchmarks_plot", PLOT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_curves(plot):
    assert plot.curves(DOCUMENT) == {
        "sigmoid": {
            "gpuops auto": [(256, 1e-6), (4096, 3e-6)],
            "NumPy": [(256, 2e-6), (4096, 9e-6)],
            "torch GPU and back": [(4096, 4e-5)],
            "gpuops cuda": [(256, 2e-5)],
        },
        "matmul": {
            "gpuops auto": [(64, 1e-6), (128, 2e-6)],
            "another way": [(64, 2e-6), (128, 9e-6)],
        },
    }


def drawn(document, folder, ending):
    source, figure = folder / "run.json", folder / f"figure.{ending}"
    source.write_text(json.dumps(document))
    child = subprocess.run(
        [sys.executable, PLOT, source, figure], capture_output=True, text=True, timeout=120
    )
    return child, figure


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    child, figure = drawn(DOCUMENT, tmp_path, "svg")
    assert child.returncode == 0, child.stderr
    text = figure.read_text()
    for name in (
        "Some GPU; Some processor",
        "sigmoid",
        "matmul",
        "another way",
        "rows and columns",
    ):
        assert f">{name}<" in text
    assert text.count(">NumPy<") == 1 and text.count(">gpuops auto<") == 2
    assert text.index(">gpuops cuda<") < text.index(">gpuops auto<")  # which is drawn above it
    child, figure = drawn(DOCUMENT, tmp_path, "png")
    assert child.returncode == 0, child.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_curves(plot, tmp_path):
    pytest.importorskip("matplotlib")
    child, figure = drawn({**DOCUMENT, "cases": DOCUMENT["cases"][:1]}, tmp_path, "svg")
    assert child.returncode != 0 and "no operator at several sizes" in child.stderr
    assert not figure.exists()


def test_how_it_is_called(tmp_path):
    child = subprocess.run([sys.executable, PLOT], capture_output=True, text=True, timeout=60)
    assert child.returncode == 1 and "python -m benchmarks.plot" in child.stderr


@pytest.mark.parametrize("is_named", [True, False])
def test_a_run_draws_its_figure(cpu_device, tmp_path, is_named):
    """As `python -m benchmarks transfer --quick --plot FIGURE` does, or beside its JSON file."""
    pytest.importorskip("matplotlib")
    figure = tmp_path / "figure.svg"
    options = ["transfer", "--quick", "--seconds", "0.01", "--plot"]
    options += [str(figure)] if is_named else ["--output", str(tmp_path / "figure.json")]
    source = f"""
import sys
sys.path.append({str(ROOT)!r})
from benchmarks.__main__ import main
print("ended with", main({options!r}))
"""
    said = run_child(cpu_device.gpuops, source, GPUOPS_CACHE_DIR=str(tmp_path / "cache"))
    assert said.endswith("ended with 0\n"), said
    text = figure.read_text()
    for name in ("sigmoid", "saxpy", "gather", "matmul"):
        assert f">{name}<" in text
    assert text.count(">gpuops auto<") == text.count(">NumPy<") == 4


@pytest.mark.parametrize(
    ("words", "problem"),
    [("transfer --plot", "name the figure"), ("--plot transfer", "transfer is not a figure")],
)
def test_a_figure_without_a_name(cpu_device, tmp_path, words, problem):
    """And one whose name is that of a benchmark, which would be left out."""
    source = f"""
from benchmarks.__main__ import main
try:
    main({["--quick", *words.split()]!r})
except SystemExit as exit:
    print(exit.code)
"""
    with pytest.raises(AssertionError, match=f"--plot: {problem}"):
        said_by(cpu_device, tmp_path, source)


def said_by(device, folder, source):
    """What a child says that has the benchmarks."""
    prelude = f"""
import sys
sys.path.append({str(ROOT)!r})
from benchmarks.harness import Run
run = Run(case_seconds=0.01)
"""
    environment = {"GPUOPS_CACHE_DIR": str(folder / "cache")}
    if device.fake is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the build may know a GPU that is there
    return run_child(device.gpuops, prelude + source, **environment)


def test_what_others_took_of_the_processors(cpu_device, tmp_path):
    source = """
from benchmarks.harness import processor_ticks, stolen_part
before = processor_ticks()
assert before == (0, 0) or before[0] > 0
print(stolen_part((100, 10), (160, 30)), stolen_part((0, 0), (0, 0)), stolen_part((5, 3), (9, 3)))
run.cases = [{"targets": [], "stolen": part} for part in (0.0, 0.25)]
run.conclude()
run.cases[1]["stolen"] = 0.01
run.conclude()
"""
    said = said_by(cpu_device, tmp_path, source).splitlines()
    assert said == [
        "0.25 0.0 0.0",
        "of a virtual machine: others took up to 25% of the processor time",
    ]


def test_figures_tell_no_folder_of_the_machine(fake_device, tmp_path):
    open_nvrtc(fake_device.gpuops)  # which is told with its path
    source = """
import gpuops, json
assert "/" in gpuops.show_config(mode="dicts")["nvrtc"]
print(json.dumps(run.document()["gpuops"]))
"""
    facts = json.loads(said_by(fake_device, tmp_path, source))
    assert ", libnvrtc.so" in facts["nvrtc"] and " /" not in json.dumps(facts)


def test_some_cases_only(cpu_device, tmp_path):
    source = f"""
import contextlib, io, json, os
from pathlib import Path
from benchmarks.__main__ import main
file = Path({str(tmp_path / "figures.json")!r})
def measured(pattern):
    assert main(["auto", "--quick", "--output", str(file), "--cases", pattern]) == 0
    return [case["case"] for case in json.loads(file.read_text())["cases"]]
assert measured(": (add|take) of 16 f") == ["auto: take of 16 float32", "auto: add of 16 float32"]
assert not Path(os.environ["GPUOPS_CACHE_DIR"]).exists()  # it measures the machine for itself
file.unlink()
def refused(*options):
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):
        main(["auto", *options])
    return said.getvalue()
assert "--cases: missing )" in refused("--quick", "--cases", "(")
assert "none has 'of 17'" in refused("--quick", "--cases", "of 17")
assert "name the file" in refused("--cases", "add")
"""
    said_by(cpu_device, tmp_path, source)


def test_a_size_without_memory(cpu_device, tmp_path):
    source = """
from benchmarks import bench_auto
bench_auto.memory_free = lambda: 100_000
run.quick = True
print([case.name for case in bench_auto.cases(run, "sigmoid", bench_auto.operators()["sigmoid"])])
"""
    sizes = [f"auto: sigmoid of {size} float32" for size in ("1", "16", "64", "256", "1 Ki")]
    assert (
        said_by(cpu_device, tmp_path, source)
        == f"""
auto: sigmoid of 4 Ki float32
  left out: 0.2 MiB of host memory needed, 0.1 MiB to be had

auto: sigmoid of 16 Ki float32
  left out: 0.7 MiB of host memory needed, 0.1 MiB to be had
{sizes}
"""
    )


CALIBRATION = """
from benchmarks import bench_calibration, harness
harness.processor_ticks = lambda: (0, 0)  # what others take would be told at the end
times = {bench_calibration.UNKNOWN: 0.11, bench_calibration.KNOWN: 0.01}
bench_calibration.call = lambda work, cache: (times[cache.name], {"memory": 0.009})
bench_calibration.measure(run)
print([target["reached"] for case in run.cases for target in case["targets"]])
run.conclude()
"""


def test_a_slow_calibration(fake_device, tmp_path):
    said = said_by(fake_device, tmp_path, CALIBRATION)
    assert "  MISSED: gpuops, nothing is known in 110.00 ms, 100.00 ms allowed\n" in said
    assert "  reached: gpuops, known from disk in 10.00 ms, 100.00 ms allowed\n" in said
    for work in ("elements", "rows", "products", "filters"):
        assert f"the first call of {work} under" in said
    assert said.count("    memory           9.00 ms\n") == 8
    assert said.endswith(
        "[False, True, False, True, False, True, False, True]\n\n4 of 8 targets reached\n"
    )


def test_a_slow_calibration_without_a_gpu(cpu_device, tmp_path):
    assert said_by(cpu_device, tmp_path, CALIBRATION).endswith("ms\n[]\n")


PROMISES = """
from benchmarks import bench_auto
def record(name, auto, numpy, cpu):
    seconds = {bench_auto.AUTO: auto, "NumPy": numpy, bench_auto.CPU: cpu}
    results = {way: {"ratio": time / auto} for way, time in seconds.items()}
    return {"case": f"auto: {name}", "stolen": 0.0, "results": results, "targets": []}
run.cases = [record("one", 1.2, 1.0, 1.2), record("two", 1.0, 1.0, 0.8), record("three", 1, 2, 1)]
run.cases[1]["undecided"] = ["the best way"]
for each in run.cases:
    bench_auto.judge(run, each)
bench_auto.summarize(run, run.cases)
print([target["text"][-12:] for target in run.cases[1]["targets"]])
print([[target["reached"] for target in record["targets"]] for record in run.cases])
run.conclude()
"""


def test_what_auto_promises(cpu_device, tmp_path):
    said = said_by(cpu_device, tmp_path, PROMISES)
    takes = 'gpuops, device="auto" takes'
    assert f"  MISSED: {takes} 1.20 of the time of NumPy or SciPy, 1.05 promised\n" in said
    assert f"  reached: {takes} 0.50 of the time of NumPy or SciPy, 1.05 promised\n" in said
    assert "  NumPy or SciPy: at most 1.20, one; 1.05 promised\n    MISSED: 1.20 one\n" in said
    assert "  the best way: at most 1.25, two, which may be chance; 1.15 promised\n" in said
    assert "\n    MISSED: 1.25 two, which may be chance\n" in said
    assert "\n['.05 promised', 'ay be chance']\n" in said
    assert said.endswith("[[False, True], [True, False], [True, True]]\n\n4 of 6 targets reached\n")


def test_what_auto_promises_of_a_case_is_judged_at_once(cpu_device, tmp_path):
    """And so also of a run that is cut short."""
    source = """
from benchmarks import bench_auto
run.pattern = "sigmoid of (16|64) float32"
bench_auto.summarize = lambda run, records: print(len(records), "records")
bench_auto.measure(run)
print([[target["promise"] for target in record["targets"]] for record in run.cases])
"""
    said = said_by(cpu_device, tmp_path, source)
    promises = ["NumPy or SciPy", "the best way"]
    assert said.endswith(f"2 records\n{[promises, promises]}\n")
    assert said.count("1.05 promised") == said.count("1.15 promised") == 2


def test_all_ways_change_the_same_array(cpu_device, tmp_path):
    """Each finds it as it was. Where it lies to the others decides how long that takes."""
    source = """
import numpy
from benchmarks import bench_auto
case = bench_auto.case_of(run, "scatter_add", bench_auto.operators()["scatter_add"], 64, "wall")
right, places = case.reference(*case.varying[0]), set()
for contestant in case.contestants.values():
    arrays = [contestant.convert(array) for array in case.varying[0]]
    places.add(tuple(array.ctypes.data for array in arrays))
    print(numpy.allclose(contestant.call(*arrays), right), end=" ")
print(len(places))
"""
    assert said_by(cpu_device, tmp_path, source) == "True True True 1\n"


ROUNDS = """
from benchmarks import bench_auto, harness
from benchmarks.harness import Case, Contestant

def measured(is_slow, fast=1e-3):
    calls = -2  # the first one is not timed
    def auto():
        nonlocal calls
        calls += 1
        return 1.2e-3 if is_slow(calls) else fast
    contestants = {bench_auto.AUTO: Contestant(auto, clock="told"),
                   "NumPy": Contestant(lambda: 1e-3, clock="told")}
    run.measure(Case("auto: one", contestants, None, undecided=bench_auto.undecided))
    bench_auto.judge(run, run.cases[-1])
    (target,) = run.cases[-1]["targets"]
    print("samples:", run.cases[-1]["results"]["NumPy"]["samples"], target["reached"],
          "maybe" if target["text"].endswith("promised, which may be chance") else "certain")

run.case_seconds, harness.DOUBT_TIMES = 1e-9, 1e12
for is_slow in (lambda i: False, lambda i: i < 3, lambda i: i >= 3, lambda i: True,
                lambda i: i % 2):
    measured(is_slow)
measured(lambda i: False, fast=0.6e-3)
measured(lambda i: False, fast=1.8e-3)
measured(lambda i: False, fast=1.0549e-3)
harness.DOUBT_TIMES = 0
measured(lambda i: i < 3)
# A promise that is broken by one of two ways is broken, whatever chance has of the other one.
samples = {bench_auto.AUTO: [1.2] * 12, bench_auto.GPU: [1.0, 1.1] * 6}
print("undecided:", bench_auto.undecided(samples))
print("undecided:", bench_auto.undecided({**samples, bench_auto.CPU: [1.0] * 12}))
"""


def test_rounds_until_a_promise_is_decided(cpu_device, tmp_path):
    said = said_by(cpu_device, tmp_path, ROUNDS).splitlines()
    found = [line.removeprefix("samples: ") for line in said if line.startswith("samples:")]
    # 2 / 2**6 and 2 / 2**11 are chance for 6 and 11 on one side, 0.035 and 0.00086 for all but 3
    # of 15 and 22. What is far within the promise, or beyond it, is decided at once.
    assert found == [
        *("6 True certain", "15 True certain", "22 False certain", "11 False certain"),
        *("100 False maybe", "3 True certain", "3 False certain", "6 True certain"),
        "3 False maybe",
    ]
    assert said[-2:] == ["undecided: ['the best way']", "undecided: []"]


# What the peer without a check is given, and whether it would write all of the result.
UNCHECKED = """
from pathlib import Path
import gpuops, numpy
from benchmarks import unchecked
from faults.fake import Fake, device_array
from rtc import cubin, own_architecture

fake = Fake(Path(gpuops.__path__[0]).parent / "cudart")
generator = numpy.random.default_rng(0)
unchecked.LARGE_TABLE_BYTES, unchecked.FEW_VECTORS = 1 << 16, 20_000

def check(rows, width, count, dtype, items, alone):
    def twin(launch):
        x, places, out, vectors = launch.read("p", "p", "p", "i8")
        blocks = launch.grid[0]
        assert launch.block == (256, 1, 1)
        assert (blocks - 1) * 256 * items < vectors <= blocks * 256 * items
        assert vectors * (4 if width == 1 else 16) == result_bytes
        wide = device_array(x, rows * width, "f4").reshape(rows, width)
        result = device_array(out, count * width, "f4").reshape(count, width)
        result[:] = wide[device_array(places, count, dtype)]

    table = generator.random((rows, width) if width > 1 else rows, dtype=numpy.float32)
    indices = generator.integers(0, rows, count, dtype)
    result_bytes = 4 * count * width
    contestant = unchecked.gathering(table, indices)[unchecked.NAME]
    name = unchecked.expression(width, indices.dtype, items, alone)
    _, lowered = cubin(gpuops, unchecked.SOURCE, own_architecture(gpuops), (name,))
    with fake.twin(lowered[name], twin):
        given = contestant.convert(table), contestant.convert(indices)
        result = contestant.to_numpy(contestant.call(*given))
    assert not contestant.is_peer and numpy.array_equal(result, table[indices])

for dtype in ("int32", "int64"):
    for width in (4, 16, 64, 256, 2048):
        check(1000, width, 301, dtype, 2, False)
    check(10_000, 1, 3001, dtype, 4, False)
    check(20_000, 1, 3001, dtype, 4, True)
    check(20_000, 1, 30_001, dtype, 1, False)
"""


def test_the_kernel_without_the_check(fake_device, tmp_path):
    open_nvrtc(fake_device.gpuops)
    assert said_by(fake_device, tmp_path, UNCHECKED) == ""


PEERS = """
from benchmarks.harness import BEST_PEER, Case, Contestant, Target
from benchmarks.markdown import tables
from benchmarks.unchecked import NAME

def contestant(milliseconds, **options):
    return Contestant(lambda: 1e-3 * milliseconds, clock="told", **options)

contestants = {
    "gpuops": contestant(2),
    "gpuops, mode='wrap'": contestant(2),
    "slow": contestant(8),
    "fast": contestant(4),
    NAME: contestant(1, is_peer=False),
}
targets = [Target("gpuops", peer, ratio=0.98) for peer in (BEST_PEER, NAME)]
run.measure(Case("device rows", contestants, None, moved_bytes=2_000_000, targets=targets))
print(tables(run.document()))
"""


def test_no_peer_however_fast(cpu_device, tmp_path):
    said = said_by(cpu_device, tmp_path, PEERS)
    for line in (
        "  reached: gpuops 2.00x as fast as fast, 0.98x asked for\n",
        "  MISSED: gpuops 0.50x as fast as a kernel without the check, 0.98x asked for\n",
        "|  | gpuops | slow | fast |\n",
        "|  | gpuops | gpuops, mode='wrap' | a kernel without the check |\n",
        "| rows | **1.0 GB/s** | 1.0 GB/s (1.00x) | 2.0 GB/s (0.50x) |\n",
    ):
        assert line in said, said
