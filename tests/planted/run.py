"""Plants one bug after the other, and sees whether the tests notice.

    python tests/planted/run.py             all bugs of plants.toml
    python tests/planted/run.py NAME...     some of them
    python tests/planted/run.py --jobs 8    eight at a time
    python tests/planted/run.py --gpu       those that a tool of compute-sanitizer is to see

It works on copies of the tree, with the build on the fake CUDA runtime as the package under test,
the CPU backend included, or the one for TSan; of that only what a bug makes stale is compiled anew.
First every test that is to catch a bug has to pass without one. Exits with 1 if one is not caught.

What is for compute-sanitizer takes a build for the GPU of the machine; without one it is skipped.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = Path(__file__).with_name("plants.toml")

DEADLINE = 300  # seconds for a check that has a processor; a bug that makes it hang is caught so
TROUBLES = (2, 3, 4, 5)  # exit statuses of pytest that say nothing about the code
RACE = 66  # the exit status where TSan reports

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")  # of compute-sanitizer
FOUND = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: [1-9]", re.MULTILINE)  # where they report


class Plant(NamedTuple):
    """A bug: in `file`, `old` becomes `new`; `check` are the tests that notice, as for pytest, in a
    build for the sanitizer `under`, where it takes one, or on a GPU, under a tool that reports."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    check: str
    under: str = ""

    def planted(self, root):
        """The text of the file with the bug in it, as long as there is one place to put it."""
        text = Path(root, self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            raise LookupError(f"{self.name}: {self.file} has its old text {found} times, not once")
        return text.replace(self.old, self.new)


def read_plants():
    with open(TABLE, "rb") as table:
        return [Plant(name=name, **entries) for name, entries in tomllib.load(table).items()]


def find_sanitizer():
    path = os.environ["PATH"] + os.pathsep + "/usr/local/cuda/bin"
    return shutil.which("compute-sanitizer", path=path)


def missing_for(under):
    """What this machine lacks for a check under that, or None."""
    if under not in TOOLS:
        return None
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "there is no GPU"
    return None if find_sanitizer() else "there is no compute-sanitizer"


def copy_tree(source, target):
    """What a build and the tests need; with the times of the files, by which a build is current."""
    ignore = shutil.ignore_patterns(
        ".git", ".*_cache", ".hypothesis", "__pycache__", "lib.*", "*-asan", "*.lock"
    )
    shutil.copytree(source, target, symlinks=True, ignore=ignore)
    for built in target.glob("gpuops/_core*.so"):  # whose code is not what the bugs are planted in
        built.unlink()


def run(command, tree, **options):
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=tree, text=True, errors="replace", **options)


def build(tree, under=""):
    """Returns what was printed if it fails, else nothing."""
    if under in TOOLS:
        options = ["-q", "build", "--build-base=build/temporary", "--build-lib=build/gpu"]
        command = ["setup.py", *options]
    else:
        command = ["tests/faults/build.py", *(["--sanitize", under] * bool(under))]
    result = run([sys.executable, *command], tree)
    return result.stdout if result.returncode != 0 else ""


def run_check(tree, checks, deadline, under=""):
    """Runs tests; how it ended, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider"]
    if under in TOOLS:
        tool = [find_sanitizer(), "--tool", under, "--report-api-errors", "no"]
        command = [*tool, *command, "--package=build/gpu", "--require-gpu"]
    else:
        package = "build/fake-tsan" if under == "thread" else "build/fake"
        command += [f"--package={package}", f"--fake={package}", "--require-fake"]
    environment = dict(os.environ)
    if under == "thread":
        library = run(["cc", "-print-file-name=libtsan.so"], tree).stdout.strip()
        environment["LD_PRELOAD"] = library
        environment["TSAN_OPTIONS"] = f"halt_on_error=1:exitcode={RACE}"
        environment["OPENBLAS_NUM_THREADS"] = "1"
    try:
        result = run([*command, *checks], tree, timeout=deadline, env=environment)
    except subprocess.TimeoutExpired as expired:
        return "hangs", (expired.stdout or b"").decode(errors="replace")  # never text
    if under in TOOLS and FOUND.search(result.stdout):
        return "reports", result.stdout
    passed = re.search(r"\d passed", result.stdout)
    if result.returncode in TROUBLES or (result.returncode == 0 and not passed):
        sys.exit(f"{' '.join(checks)} cannot be run:\n{result.stdout[-4000:]}")
    if result.returncode == RACE:
        return "races", result.stdout
    if under in TOOLS:  # which the tool has not seen, whatever the test has
        return "passes", result.stdout
    ending = "passes" if result.returncode == 0 else "fails" if result.returncode > 0 else "crashes"
    return ending, result.stdout


def culprit(ending, output):
    """The test that failed, or was under way at the end."""
    if ending == "fails":
        found = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
        return found[0] if found else "the end of the process"
    word = r"(?: (?:PASSED|FAILED|SKIPPED|ERROR|Fatal).*)?$"
    found = re.findall(rf"^(tests/\S+::.+?){word}", output, re.MULTILINE)
    return f"{found[-1] if found else 'all'} {ending}"


def try_plants(plants, folder, jobs):
    """Yields each plant with the test that caught it, or None, and the seconds it took."""
    for plant in plants:
        plant.planted(ROOT)  # if one has lost its place, that is known before all the work
    if not plants:
        return
    clean = folder / "clean"
    copy_tree(ROOT, clean)
    with ThreadPoolExecutor(jobs) as pool:
        for under in sorted({plant.under for plant in plants}):
            if failure := build(clean, under):
                sys.exit(f"the build failed:\n{failure}")
            checks = [shlex.split(plant.check) for plant in plants if plant.under == under]
            checks = sorted({word for words in checks for word in words})
            parts = [checks[start::jobs] for start in range(min(jobs, len(checks)))]
            deadline = len(checks) * jobs * DEADLINE
            try_part = partial(run_check, clean, deadline=deadline, under=under)
            for ending, output in pool.map(try_part, parts):
                if ending != "passes":
                    found = f"{culprit(ending, output)} {ending}"
                    sys.exit(f"without a bug, {found}:\n{output[-4000:]}")
        deadline = jobs * DEADLINE
        yield from pool.map(
            lambda plant: try_plant(plant, clean, folder / plant.name, deadline), plants
        )


def try_plant(plant, clean, tree, deadline):
    # Compiled files are current in every copy. What is linked is not, because it names the folder
    # that it was linked in, and is looked for there: it is linked anew for each.
    started = time.monotonic()
    shutil.copytree(clean, tree, symlinks=True)
    Path(tree, plant.file).write_text(plant.planted(tree))
    if failure := build(tree, plant.under):
        print(f"{plant.name} does not build:\n{failure[-4000:]}", file=sys.stderr)
        ending, output = "passes", ""
    else:
        ending, output = run_check(tree, shlex.split(plant.check), deadline, plant.under)
    shutil.rmtree(tree)
    caught = None if ending == "passes" else culprit(ending, output)
    if caught and plant.under in TOOLS:
        caught += f" under {plant.under}"
    return plant, caught, time.monotonic() - started


def main():
    plants = {plant.name: plant for plant in read_plants()}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="of a bug (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at a time (default: 1)")
    parser.add_argument("--gpu", action="store_true", help="those that take a GPU")
    arguments = parser.parse_args()
    wanted = arguments.names or list(plants)
    unknown = [name for name in wanted if name not in plants]
    if unknown:
        parser.error(f"there is no bug {', '.join(unknown)} in {TABLE.name}")
    if arguments.gpu:
        wanted = [name for name in wanted if plants[name].under in TOOLS]
    lacking = {name: missing_for(plants[name].under) for name in wanted}
    if arguments.gpu and any(lacking.values()):
        sys.exit(next(filter(None, lacking.values())))
    missed = 0
    print("| bug | what is wrong | caught by | s |\n|---|---|---|--:|", flush=True)
    for name in filter(lacking.get, wanted):
        print(f"| {name} | {plants[name].fault} | skipped: {lacking[name]} | |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [plants[name] for name in wanted if not lacking[name]]
        tried = try_plants(chosen, Path(folder), arguments.jobs)
        for plant, caught, seconds in tried:
            missed += caught is None
            print(
                f"| {plant.name} | {plant.fault} | {caught or '**nothing**'} | {seconds:.0f} |",
                flush=True,
            )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
