"""Magics for Jupyter and IPython; ``%load_ext gpuops`` brings them.

``%%cuda`` compiles a cell of CUDA C++ and puts its kernels into the notebook, ``%gpu_timeit`` takes
the time that a statement needs on the GPU.
"""

import argparse
import math
import re
import shlex
import statistics
import timeit
from typing import NamedTuple, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from . import _core
from ._compile import CompileError, compile_named

__all__ = ["GpuTime", "load_magics"]

# Messages of the compiler name it, with the number of the line in the cell.
CELL_NAME = "cell.cu"
# Events tell half a microsecond, so a run has to last for long.
LEAST_RUN_SECONDS = 0.02


def load_magics(shell: InteractiveShell) -> None:
    """Register the magics with a shell."""
    shell.register_magics(CudaMagics)


class GpuTime(NamedTuple):
    """What ``%gpu_timeit -o`` returns: the seconds on the GPU of each run, for one loop."""

    runs: tuple[float, ...]
    loops: int

    @property
    def best(self) -> float:
        """The fastest run."""
        return min(self.runs)

    @property
    def average(self) -> float:
        """The mean of all runs."""
        return statistics.fmean(self.runs)

    @property
    def deviation(self) -> float:
        """The standard deviation of the runs."""
        return statistics.pstdev(self.runs)

    def __str__(self) -> str:
        plural = "" if len(self.runs) == 1 else "s"
        return (
            f"{_duration(self.average)} ± {_duration(self.deviation)} on the GPU per loop (mean ± "
            f"std. dev. of {len(self.runs)} run{plural}, {self.loops:,} loop"
            f"{'' if self.loops == 1 else 's'} each)"
        )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are messages, and do not end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n{self.format_usage()}")


def _cuda_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="%%cuda", add_help=False, allow_abbrev=False)
    parser.add_argument("--name")
    parser.add_argument("--device")
    parser.add_argument("--lineinfo", action="store_true")
    parser.add_argument("--expression", "-e", action="append", default=[])
    return parser


def _timeit_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="%gpu_timeit", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", type=int, default=0)
    parser.add_argument("-r", type=int, default=7)
    parser.add_argument("-o", action="store_true")
    parser.add_argument("-q", action="store_true")
    parser.add_argument("statement", nargs=argparse.REMAINDER)
    return parser


@magics_class
class CudaMagics(Magics):
    """The magics, for one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell

    @cell_magic
    def cuda(self, line: str, cell: str) -> None:
        """Compile the cell, CUDA C++, and put its kernels into the notebook.

        ::

            %%cuda [--name NAME] [-e EXPRESSION]... [--lineinfo] [--device DEVICE] [OPTION...]
            __global__ void twice(float* x) { x[threadIdx.x] *= 2; }

        Then ``twice[1, 32](x)`` launches it. With ``--name mod`` the `Module` becomes ``mod``; by
        that, kernels are found whose names are none in Python, such as the instances of templates
        that ``-e 'scale<float>'`` asks for. Options that are not known here are for the compiler.
        """
        words = _words("%%cuda", line)
        # To argparse these would be -e with a value.
        others = [word for word in words if re.match("-e[^=]", word)]
        options, rest = _cuda_parser().parse_known_args([w for w in words if w not in others])
        rest += others
        name = options.name
        if name is not None and not name.isidentifier():
            raise UsageError(f"%%cuda: --name {name} is no name for a variable")
        # The cell counts its lines from the magic on, and so do the messages.
        source = f"// %%cuda\n{cell}"
        try:
            module = compile_named(
                CELL_NAME, source, rest, options.expression, None, _device(options.device),
                lineinfo=options.lineinfo,
            )  # fmt: skip
        except CompileError as error:
            # The lines to see are those of the cell, not those of Python that led there.
            text = f"{type(error).__name__}: {error}"
            error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
            raise
        if name:
            self._shell.push({name: module})
        if module.device is not None:
            names = [kernel for kernel in module.kernels if kernel.isidentifier()]
            self._shell.push({kernel: module[kernel] for kernel in names})

    @line_magic
    def gpu_timeit(self, line: str) -> GpuTime | None:
        """Time a statement on the GPU, by events on the current stream of gpuops.

        ::

            %gpu_timeit [-n LOOPS] [-r RUNS] [-o] [-q] STATEMENT

        Each run queues the statement as often as it takes to fill some milliseconds, and is one
        sample. ``-o`` returns a `GpuTime`, ``-q`` prints nothing. A statement of which the GPU is
        done before the next one is queued is timed as slowly as Python queues it.
        """
        words = line.split()
        options = _timeit_parser().parse_args(words)
        if not options.statement:
            raise UsageError(f"%gpu_timeit: no statement\n{_timeit_parser().format_usage()}")
        # As it was written, with the blanks within.
        statement = line.split(None, len(words) - len(options.statement))[-1]
        if options.n < 0 or options.r < 1:
            raise UsageError("%gpu_timeit: -n and -r count from 1")
        transformed = self._shell.transform_cell(statement)
        timer = timeit.Timer(transformed, globals=self._shell.user_ns)
        result = _measure(timer, options.n, options.r)
        if not options.q:
            print(result)
        return result if options.o else None


def _words(magic: str, line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{magic}: {error}") from None


def _device(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isdecimal() else text


def _measure(timer: timeit.Timer, loops: int, runs: int) -> GpuTime:
    seconds = _run(timer, 1)  # a rehearsal, which also shows errors
    if not loops:
        loops = 1
        while (seconds := _run(timer, loops)) < LEAST_RUN_SECONDS:
            loops *= min(10, max(2, math.ceil(LEAST_RUN_SECONDS / max(seconds, 1e-6))))
    return GpuTime(tuple(_run(timer, loops) / loops for _ in range(runs)), loops)


def _run(timer: timeit.Timer, loops: int) -> float:
    """Return the seconds on the GPU between before and after so many loops."""
    start, end = _core.Event(), _core.Event()
    start.record()
    timer.timeit(loops)
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
