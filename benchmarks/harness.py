"""The one way in which every benchmark measures.

A case names contestants that compute the same thing. Their results are compared with NumPy's first;
then they are timed in turn, round after round, so that a busy moment of the machine falls on all of
them. Each round has another order, so that nobody always comes after the same one, whose traces
would become part of the figures. Inputs are random, drawn afresh for every run, and change with
every call, but for those that no cache holds any part of. Figures are medians, ratios are medians
of the ratios within a round, and the limits of the machine (copies without any gathering) are
measured in the same run. Where something is promised, rounds go on until it is certain, as far as
there is time, whether it is kept: the first ones may have had good or bad luck.
"""

import contextlib
import functools
import itertools
import json
import math
import mmap
import os
import platform
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

import gpuops

from . import peers
from .peers import Contestant

Call = Callable[[], Any]

# Of the processor time, from which on it is told what others took.
NOTABLE_PART = 0.02

# Where chance may decide whether a promise is kept, rounds go on, for so many times as long.
DOUBT_TIMES = 100
# That all rounds are so many times within the limit, or beyond it, is no chance.
CLEAR = 1.5
# How probable the outcome may be by chance alone; less where the promise seems to be broken, since
# some hundred are made.
CHANCE_KEPT, CHANCE_BROKEN = 0.05, 0.001


def wall(call: Call) -> float:
    """Time a call that is over when it returns. Short ones are repeated to about 0.2 ms."""
    started = time.perf_counter()
    result = call()  # kept, since giving large memory back is no part of the call
    once = time.perf_counter() - started
    del result
    loops = math.ceil(2e-4 / max(once, 1e-7))
    if loops == 1:
        return once
    started = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - started) / loops


def again(call: Call, *others: Call) -> float:
    """Time a call that comes right after others of its kind, while their threads are awake."""
    for other in others:
        other()
    return wall(call)


def events(call: Call) -> float:
    """Time the work that a call queues on the current stream of the GPU, after emptying its L2.

    It is rehearsed first, for whoever was timed before has left the processor's caches, the GPU's
    address translation and the clocks as its own work needs them. And the time counts if all was
    queued before the flush was over: else the GPU has waited for the processor in the middle of it,
    and the next try has more time. A call that waits for the GPU itself never gets that far; of
    such a call the last try counts.
    """
    gpu = peers.gpu()
    call()
    gpu.synchronize()
    for flushes in (1, 2, 4):
        for _ in range(flushes):
            gpu.flush()
        seconds, has_waited = gpu.elapsed(call)
        if not has_waited:
            break
    return seconds


def told(call: Call) -> float:
    """Return the seconds that a call says it took, in a process that it has started."""
    return call()


def jax_stream(call: Call) -> float:
    """Time the work that a call queues on JAX's stream, after emptying the L2."""
    return peers.jax_timer().elapsed(call)


QUEUED_CALLS = 2000
CALLS_BEFORE = 4


def queued(call: Call) -> float:
    """Time one of many calls that queue work on the GPU and do not wait for it.

    What the processor does for a call is seen where the work itself is shorter than that.
    """
    gpu = peers.gpu()
    call()
    gpu.synchronize()
    loops = range(QUEUED_CALLS)
    started = time.perf_counter()
    for _ in loops:
        call()
    elapsed = time.perf_counter() - started
    gpu.synchronize()
    return elapsed / QUEUED_CALLS


CLOCKS = {
    "wall": wall,
    "again": again,
    "events": events,
    "JAX's stream": jax_stream,
    "queued": queued,
    "told": told,
}


@dataclass
class Case:
    """What the contestants compute, and how much it is.

    `fixed` are inputs for all calls, and each call takes the next tuple of `varying`. `moved_bytes`
    counts every byte read and written once; where `items` is given, rates are items a second.
    Results may differ from the reference by `tolerance`, in parts of its largest value.
    Without a `reference` the contestants do different things, which stand beside each other only
    to see how long each takes. `curve` is the operator and the size of one point of a plot.
    `undecided` names, from all samples so far, what is promised of the case of which it is not
    certain yet whether it is kept.
    """

    name: str
    contestants: dict[str, Contestant]
    reference: Callable[..., numpy.ndarray] | None
    fixed: Sequence[numpy.ndarray] = ()
    varying: Sequence[Sequence[numpy.ndarray]] = ((),)
    moved_bytes: int = 0
    items: int | None = None
    targets: Sequence["Target"] = ()
    tolerance: float = 0.0
    curve: tuple[str, int] | None = None
    undecided: Callable[[dict[str, list[float]]], list[str]] = lambda samples: []


@dataclass
class Target:
    """What a contestant shall reach; exactly one of the figures is given.

    `ratio`: at least so many times as fast as `peer`, a contestant of this case (BEST_PEER: the
    fastest of other libraries, whose names do not begin with "gpuops"). `slower`: at most so many
    seconds slower than `peer`. `rate`: at least so many GB/s or G/s. `seconds`: at most so long.
    `of_case`: at least that part of the rate that it had in an earlier case, `(name, part)`.
    """

    ours: str
    peer: str | None = None
    ratio: float | None = None
    slower: float | None = None
    rate: float | None = None
    seconds: float | None = None
    of_case: tuple[str, float] | None = None


BEST_PEER = "the best peer"


@dataclass
class Run:
    """One run of the benchmarks: its settings, and what was measured so far.

    With `output`, what was measured is there after each case, however the run ends. Cases are
    measured whose names the regular expression `pattern` finds something in.
    """

    quick: bool = False
    case_seconds: float = 3.0
    output: Path | None = None
    pattern: str = ""
    seed: int = field(default_factory=lambda: int.from_bytes(os.urandom(4)))
    limits: dict[str, float] = field(default_factory=dict)
    cases: list[dict] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failed: bool = False  # gpuops gave a wrong result, or none

    def __post_init__(self) -> None:
        self.random = numpy.random.default_rng(self.seed)
        self.started = time.time()

    def say(self, text: str = "") -> None:
        """Print a line, and keep it for the table that goes beside the JSON."""
        print(text, flush=True)
        self.lines.append(text)

    def wants(self, name: str) -> bool:
        """Tell whether the case of this name is to be measured."""
        return re.search(self.pattern, name) is not None

    def measure(self, case: Case) -> bool:
        """Check and time every contestant of a case that is wanted, and print its table."""
        if not self.wants(case.name):
            return False
        self.say(f"\n{case.name}")
        inputs: dict[str, list[tuple]] = {}
        expected = []
        if case.reference is not None:
            expected = [case.reference(*case.fixed, *arrays) for arrays in _ends(case.varying)]
        for name, contestant in case.contestants.items():
            try:
                inputs[name] = _converted(contestant, case)
                if contestant.before is not None:
                    contestant.before()
                if expected:
                    _check(contestant, inputs[name], expected, case.tolerance)
                else:
                    contestant.call(*inputs[name][0])
            except Exception as error:
                # A peer that cannot take part is no reason to stop, but gpuops has to be right.
                self.failed = self.failed or name.startswith("gpuops")
                self.say(f"  {name:34} left out: {type(error).__name__}: {error}")
                inputs.pop(name, None)
        del expected

        before = processor_ticks()
        samples = self._samples(case, inputs)
        stolen = stolen_part(before, processor_ticks())
        for name in list(samples):
            # Such times are differences of larger ones.
            spread = max(samples[name]) / min(samples[name])
            if case.contestants[name].clock == "JAX's stream" and spread > 2:
                self.say(f"  {name:34} left out: its times differ by up to {spread:.1f}x")
                del samples[name]
        results = {name: _summary(case, samples, name) for name in samples}
        record = {
            "case": case.name,
            "moved_bytes": case.moved_bytes,
            "stolen": stolen,
            "results": results,
            "undecided": case.undecided(samples),
        }
        if case.curve is not None:
            record["curve"] = list(case.curve)
        verdicts = [self._verdict(case, target, samples, results) for target in case.targets]
        record["targets"] = [verdict for verdict in verdicts if verdict is not None]
        self.cases.append(record)
        self._print(record)
        self.write()
        inputs.clear()
        peers.free_memory()
        if gpuops.is_available():
            gpuops.empty_cache()
        return True

    def _samples(self, case: Case, inputs: dict[str, list[tuple]]) -> dict[str, list[float]]:
        least, most = (2, 3) if self.quick else (5, 100)
        seconds = 0.05 if self.quick else self.case_seconds
        samples: dict[str, list[float]] = {name: [] for name in inputs}
        deadline = time.perf_counter() + seconds
        rounds = 0
        while rounds < most:
            if rounds >= least and time.perf_counter() > deadline:
                break
            if rounds == 3 and time.perf_counter() > deadline + 2 * seconds:
                break  # a round takes longer than there is time for all
            self._go_round(case, inputs, samples)
            rounds += 1
        deadline = time.perf_counter() + DOUBT_TIMES * seconds
        while rounds < most and not self.quick and case.undecided(samples):
            if time.perf_counter() > deadline:
                break
            self._go_round(case, inputs, samples)
            rounds += 1
        peers.settle()
        return samples

    def _go_round(
        self, case: Case, inputs: dict[str, list[tuple]], samples: dict[str, list[float]]
    ) -> None:
        names = list(inputs)
        turn = sum(map(len, samples.values()))
        for position in self.random.permutation(len(names)):
            name = names[position]
            contestant = case.contestants[name]
            count = 1 + CALLS_BEFORE if contestant.clock == "again" else 1
            calls = [
                functools.partial(contestant.call, *inputs[name][(turn - k) % len(inputs[name])])
                for k in range(count)
            ]
            turn += 1
            if contestant.before is not None:
                contestant.before()
            peers.settle()
            samples[name].append(CLOCKS[contestant.clock](*calls))

    def _print(self, record: dict) -> None:
        for position, (name, result) in enumerate(record["results"].items()):
            beside = f"{result['ratio']:7.2f}x" if position > 0 and result["rate"] else ""
            line = f"  {name:34} {duration(result['median_s']):>10} {rate(result):>15} {beside}"
            self.say(line.rstrip())
        for target in record["targets"]:
            self.say_target(target)

    def say_target(self, target: dict) -> None:
        """Print whether a target is reached; what a quick run measures says nothing of that."""
        if not self.quick:
            self.say(f"  {'reached' if target['reached'] else 'MISSED'}: {target['text']}")

    def _verdict(self, case: Case, target: Target, samples: dict, results: dict) -> dict | None:
        """Compare what was measured with a target; None where somebody did not take part."""
        ours, peer = target.ours, target.peer
        if peer == BEST_PEER:
            others = [
                name
                for name in results
                if case.contestants[name].is_peer and not name.startswith("gpuops")
            ]
            peer = min(others, key=lambda name: results[name]["median_s"], default=BEST_PEER)
        if ours not in samples or not {peer} <= {None, *samples}:
            return None
        if target.ratio is not None:
            # To the digits that are printed: equally fast is not slower.
            value = round(ratio_of(samples, ours, peer), 2)
            text = f"{ours} {value:.2f}x as fast as {peer}, {target.ratio:g}x asked for"
            return {"text": text, "value": value, "reached": value >= target.ratio}
        if target.slower is not None:
            pairs = zip(samples[ours], samples[peer], strict=True)
            value = statistics.median(a - b for a, b in pairs)
            text = (
                f"{ours} {1e6 * value:+.2f} us beside {peer}, {1e6 * target.slower:+g} us allowed"
            )
            return {"text": text, "value": value, "reached": value <= target.slower}
        if target.seconds is not None:
            value = results[ours]["median_s"]
            text = f"{ours} in {duration(value)}, {duration(target.seconds)} allowed"
            return {"text": text, "value": value, "reached": value <= target.seconds}
        value, asked = results[ours]["rate"], target.rate
        text = f"{ours} {rate(results[ours])}"
        if target.of_case is not None:
            name, part = target.of_case
            earlier = next((record for record in self.cases if record["case"] == name), None)
            if earlier is None or ours not in earlier["results"]:
                return None
            text += f", {part:.0%} of that of {name}"
            asked = part * earlier["results"][ours]["rate"]
        text += f", {rate({'rate': asked, 'unit': results[ours]['unit']})} asked for"
        return {"text": text, "value": value, "reached": value >= asked}

    def conclude(self) -> None:
        """Say how many of the targets were reached, and write what was said after the last case."""
        targets = [target for record in self.cases for target in record["targets"]]
        if targets and not self.quick:
            reached = sum(target["reached"] for target in targets)
            self.say(f"\n{reached} of {len(targets)} targets reached")
        stolen = max((record["stolen"] for record in self.cases), default=0)
        if stolen >= NOTABLE_PART:
            self.say(f"of a virtual machine: others took up to {stolen:.0%} of the processor time")
        self.write()

    def document(self) -> dict:
        """Return all that is known of the run, and what it has measured until now."""
        facts = gpuops.show_config(mode="dicts")
        del facts["environment"]
        return {
            "machine": machine(),
            "gpuops": {name: without_folders(facts[name]) for name in sorted(facts)},
            "peers": peers.versions(),
            "seed": self.seed,
            "quick": self.quick,
            "seconds": round(time.time() - self.started, 1),
            "limits": self.limits,
            "cases": self.cases,
        }

    def write(self) -> None:
        """Write everything as JSON, and the printed table beside it."""
        if self.output is None:
            return
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.document(), indent=1) + "\n")
        self.output.with_suffix(".txt").write_text("\n".join(self.lines) + "\n")


def on_gpu(function: Call, narrow: bool = False, **options: Any) -> Contestant:
    """Make a contestant of gpuops on DeviceArrays; `narrow` makes int32 of int64 indices."""
    convert = (lambda array: gpuops.to_device(peers.narrow(array))) if narrow else gpuops.to_device
    return Contestant(function, convert=convert, to_numpy=lambda array: array.to_host(), **options)


def processor_ticks() -> tuple[int, int]:
    """Return how long all processors have worked, and how long the host gave them to others.

    That is what a virtual machine knows of its neighbours, who make some figures worse.
    """
    try:
        ticks = map(int, Path("/proc/stat").read_text().split()[1:9])
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = ticks
    except (OSError, ValueError):
        return 0, 0
    return user + nice + system + interrupts + soft_interrupts, stolen


def stolen_part(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the part of the processor time that others had of what was asked for meanwhile."""
    worked, stolen = (later - earlier for earlier, later in zip(before, after, strict=True))
    return round(stolen / (worked + stolen), 3) if stolen > 0 else 0.0


def _converted(contestant: Contestant, case: Case) -> list[tuple]:
    fixed = [contestant.convert(array) for array in case.fixed]
    return [(*fixed, *map(contestant.convert, arrays)) for arrays in case.varying]


def _ends(inputs: Sequence) -> Sequence:
    return inputs if len(inputs) == 1 else (inputs[0], inputs[-1])


def _check(
    contestant: Contestant, inputs: list[tuple], expected: list[numpy.ndarray], tolerance: float
) -> None:
    """Compare two results, of the first inputs and, where there are others, of the last ones.

    Two, since memory that was never written may still hold the first.
    """
    for arrays, right in zip(_ends(inputs), expected, strict=True):
        result = contestant.to_numpy(contestant.call(*arrays))
        if result.dtype != right.dtype or not _agree(result, right, tolerance):
            raise ValueError("the result differs from NumPy's")


def _agree(result: numpy.ndarray, right: numpy.ndarray, tolerance: float) -> bool:
    if not tolerance:
        return numpy.array_equal(result, right)
    if result.shape != right.shape:
        return False

    def compare(begin: int) -> tuple[float, float]:
        ours, theirs = (array[begin : begin + piece].astype(kind) for array in flat)
        return numpy.abs(ours - theirs).max(), numpy.abs(theirs).max()

    kind = numpy.complex128 if right.dtype.kind == "c" else numpy.float64
    flat, piece = (result.ravel(), right.ravel()), 1 << 22
    with ThreadPoolExecutor() as pool:
        pieces = list(pool.map(compare, range(0, right.size, piece)))
    differences, sizes = zip((0.0, 0.0), *pieces, strict=True)
    # Not max(), which takes no notice of a NaN.
    return bool(numpy.max(differences) <= tolerance * numpy.max(sizes))


def _summary(case: Case, samples: dict[str, list[float]], name: str) -> dict:
    times = samples[name]
    median = statistics.median(times)
    # The contestants may differ in the width of the indices that they read.
    moved_bytes = case.moved_bytes - case.contestants[name].saved_bytes
    amount, unit = (moved_bytes, "GB/s") if case.items is None else (case.items, "G/s")
    return {
        "median_s": median,
        "best_s": min(times),
        "worst_s": max(times),
        "samples": len(times),
        "rate": 1e-9 * amount / median,
        "unit": unit,
        "ratio": ratio_of(samples, next(iter(samples)), name),
    }


def ratio_of(samples: dict[str, list[float]], ours: str, peer: str) -> float:
    """How many times as fast as the peer ours is."""
    return statistics.median(b / a for a, b in zip(samples[ours], samples[peer], strict=True))


def is_kept(samples: dict[str, list[float]], ours: str, peer: str, most: float) -> bool | None:
    """Tell whether ours takes at most `most` times as long as the peer; None: chance may decide.

    By the medians, and by the sign test: that many rounds, or more, on one side are no chance.
    """
    ratios = [a / b / most for a, b in zip(samples[ours], samples[peer], strict=True)]
    rounds, beyond = len(ratios), sum(ratio > 1 for ratio in ratios)
    kept, fewer = 2 * beyond <= rounds, min(beyond, rounds - beyond)
    if max(ratios) < 1 / CLEAR or min(ratios) > CLEAR:
        return kept
    chance = 2 * sum(math.comb(rounds, count) for count in range(fewer + 1)) / 2**rounds
    return kept if chance <= (CHANCE_KEPT if kept else CHANCE_BROKEN) else None


def measure_limits(run: Run) -> None:
    """Measure what the machine can do at best: plain copies, beside which the rates are read."""
    mebibytes = 8 if run.quick else 512
    source = run.random.integers(0, 256, mebibytes << 20, dtype=numpy.uint8)
    target = numpy.empty_like(source)
    target.fill(0)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    run.limits["host copy, 1 thread"] = _copy_rate(source, target, 1)
    run.limits[f"host copy, {threads} threads"] = _copy_rate(source, target, threads)
    run.limits[f"fresh host memory, {threads} threads"] = _fresh_rate(len(source), threads)
    copied = _fresh_rate(len(source), threads, source[: 2 << 20])
    run.limits[f"copy to fresh memory, {threads} threads"] = copied
    if (gpu := peers.gpu()) is not None:
        run.limits |= gpu.copy_rates(mebibytes << 20)
    run.say(
        "limits of this machine (GB/s, bytes read and written; of fresh and pinned memory once)"
    )
    if gpu is not None and gpuops.is_available():
        try:
            run.limits[READING] = _reading_rate(gpu, mebibytes << 20)
        except gpuops.CompileError as error:  # there is no NVRTC
            run.say(f"  {READING:34} left out: {type(error).__name__}: {error}")
    for name, rate in run.limits.items():
        run.say(f"  {name:34} {rate:9.2f} GB/s")


READING = "pinned memory read by a kernel"
READER = """
__global__ void read(const float* pinned, float* there, long long count)
{
    const long long step = gridDim.x * (long long)blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step)
        ((uint4*)there)[i] = ((const uint4*)pinned)[i];
}
"""


def _reading_rate(gpu: Any, size: int) -> float:
    """Let a kernel copy page-locked memory in its order: rows from all over it come no faster."""
    read = gpuops.compile(READER)["read"][1024, 256]
    pinned = gpuops.pinned_empty(size // 4, numpy.float32)
    pinned.fill(1)
    there = gpuops.empty(size // 4, numpy.float32)
    call = functools.partial(read, pinned, there, size // 16)
    call()
    return 1e-9 * size / statistics.median(gpu.elapsed(call)[0] for _ in range(9))


def _copy_rate(source: numpy.ndarray, target: numpy.ndarray, threads: int) -> float:
    def copy(begin: int, end: int) -> None:
        numpy.copyto(target[begin:end], source[begin:end])

    seconds = statistics.median(
        wall(lambda: _in_parts(copy, len(source), threads)) for _ in range(5)
    )
    return 2e-9 * len(source) / seconds


def _fresh_rate(size: int, threads: int, source: numpy.ndarray | None = None) -> float:
    """Let the system make memory, in huge pages where it has them: a byte of each page is touched.

    It clears what it makes, before which nobody can have a result in fresh memory. A source is
    copied there again and again by NumPy, as a result that comes from the caches would be.
    """

    def make(memory: numpy.ndarray, begin: int, end: int) -> None:
        if source is None:
            memory[begin : end : mmap.PAGESIZE] = 1
            return
        for at in range(begin, end, len(source)):
            piece = memory[at : min(at + len(source), end)]
            numpy.copyto(piece, source[: len(piece)])

    times = []
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    for _ in range(5):
        with mmap.mmap(-1, size, flags=private) as mapped:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapped.madvise(mmap.MADV_HUGEPAGE)
            memory = numpy.frombuffer(mapped, numpy.uint8)
            started = time.perf_counter()
            _in_parts(functools.partial(make, memory), size, threads)
            times.append(time.perf_counter() - started)
            del memory
    return 1e-9 * size / statistics.median(times)


def _in_parts(function: Callable[[int, int], None], size: int, threads: int) -> None:
    """Let each thread do its part of a range."""
    bounds = [size * part // threads for part in range(threads + 1)]
    parts = list(itertools.pairwise(bounds))
    workers = [threading.Thread(target=function, args=part) for part in parts[1:]]
    for worker in workers:
        worker.start()
    function(*parts[0])
    for worker in workers:
        worker.join()


@contextlib.contextmanager
def fresh_cache() -> Iterator[Path]:
    """Keep what gpuops compiles and measures in a folder that is there for the block alone."""
    before = os.environ.get("GPUOPS_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUOPS_CACHE_DIR"] = os.path.join(folder, "cache")
        try:
            yield Path(folder)
        finally:
            del os.environ["GPUOPS_CACHE_DIR"]
            if before is not None:
                os.environ["GPUOPS_CACHE_DIR"] = before


def memory_free() -> int:
    """Return the bytes of the host's memory that a case may take, half of what is free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def byte_name(size: int) -> str:
    """Write a number of bytes: 512 MiB, 4 GiB, 1.3 GiB."""
    unit, shift = ("GiB", 30) if size >= 1 << 30 else ("MiB", 20)
    return f"{round(size / (1 << shift), 1):g} {unit}"


def machine() -> dict:
    """Say what kind of machine this is, without naming the machine itself."""
    processor = platform.processor() or platform.machine()
    try:
        cpu_info = Path("/proc/cpuinfo").read_text()
        processor = re.search(r"^model name\s*:\s*(.*)$", cpu_info, re.MULTILINE).group(1)
    except (OSError, AttributeError):
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "gpus": [device.name for device in gpuops.devices()] if gpuops.is_available() else [],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def without_folders(fact: Any) -> Any:
    """Leave the names of the files in a text, and not where on this machine they are."""
    return re.sub(r"(?<!\S)/\S*/", "", fact) if isinstance(fact, str) else fact


def machine_name() -> str:
    """Name the file of results: the GPU, or the processor and its cores."""
    facts = machine()
    name = facts["gpus"][0] if facts["gpus"] else f"{facts['processor']} {facts['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def count_name(count: int) -> str:
    """Write a number of elements: 1 Mi, 16 Ki, 22,369,621."""
    for shift, unit in ((20, "Mi"), (10, "Ki")):
        if count >> shift and count % (1 << shift) == 0:
            return f"{count >> shift} {unit}"
    return f"{count:,}"


def rate(result: dict) -> str:
    """Write the rate of a result, with the unit that suits it; nothing where it has none."""
    if not result["rate"]:
        return ""
    if result["unit"] == "G/s" and result["rate"] < 1:
        return f"{1e3 * result['rate']:.0f} M/s"
    if result["unit"] == "GB/s" and result["rate"] >= 1e3:
        return f"{1e-3 * result['rate']:.2f} TB/s"
    if result["unit"] == "G/s" and result["rate"] >= 1e4:
        return f"{1e-3 * result['rate']:.1f} T/s"
    return f"{result['rate']:.1f} {result['unit']}"


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it."""
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{scale * seconds:.2f} {unit}"
