"""Calls every operator of the CPU backend under valgrind's memcheck.

    python tests/memcheck.py                        the installed package
    python tests/memcheck.py --package=build/cpu    the one in a folder

It sees what the sanitizers do not: decisions on numbers that were never written, and results with
such numbers in them. An error counts if a function of the package has a part in it, or if it is
about a result; Python has errors of its own, which do not. Exits with 1 if there are any.

valgrind knows no AVX-512, and tells so whoever asks the processor: it sees the loops for AVX2 and
FMA, which it has.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

# Leaks are looked for by test_leaks.py; Python gives back little at its end.
VALGRIND = ["valgrind", "-q", "--error-limit=no", "--num-callers=50", "--show-leak-kinds=none"]

# NumPy keeps small blocks of memory for itself, which memcheck then takes for used.
COUNT = 4001


def numbers(dtype, *shape):
    """Numbers from 0 to 6, in a block of memory that ends where they end."""
    numbers = np.empty(shape, dtype)
    numbers[...] = np.arange(numbers.size).reshape(shape) % 7
    return numbers


def results():
    """The results of calls, and what the calls in place have changed."""
    import gpuops

    for index_dtype in ("i1", "u2", "i4", "i8"):
        indices = numbers(index_dtype, COUNT)
        for dtype in ("u1", "f2", "i4", "f8", "c16", "V3", "V100"):
            x = np.zeros(COUNT * 7, np.dtype(dtype))
            yield gpuops.gather(x, indices)
            yield gpuops.take(x, indices, mode="clip")
            yield gpuops.gather(x, indices - 7, mode="wrap")
            yield gpuops.gather(x.reshape(7, COUNT), indices[:9])
            yield gpuops.gather(x.reshape(COUNT, 7), indices[:9], axis=1)
            yield gpuops.gather(x, indices + 100, mode="fill")
            yield gpuops.take_along_axis(x.reshape(COUNT, 7), indices.reshape(COUNT, 1), 1)
            gpuops.scatter(x, indices, x[:COUNT])
            yield x
            if dtype[0] != "V":
                gpuops.scatter_add(x, indices, x[:COUNT])
                gpuops.scatter_add(x.reshape(7, COUNT), indices[:9], x[:COUNT])
                yield x
        for function in (gpuops.gather, gpuops.take):
            try:
                function(numbers("f8", 5), indices)
            except IndexError as error:
                yield str(error).encode()
    for dtype in ("i1", "u2", "f2", "f4", "f8", "c8"):
        x, y = numbers(dtype, COUNT), numbers(dtype, COUNT)
        yield gpuops.add(x, y)
        yield gpuops.add(x[::-2], numbers("u1", COUNT)[::2])
        yield gpuops.multiply(x, y)
        yield gpuops.saxpy(3, x, y)
        a, b = numbers(dtype, 37, 41), numbers(dtype, 41, 43)
        yield gpuops.matmul(a, b)
        yield gpuops.matmul(a[0], b)
        yield gpuops.matmul(b.T, a.T)
        if dtype[0] == "f":
            yield gpuops.sigmoid(x)
            yield gpuops.sigmoid_backward(x, y)
        if dtype[0] != "c":
            for mode in ("reflect", "constant", "wrap"):
                for weights in (np.ones((3, 3)), np.arange(20.0).reshape(4, 5)):
                    yield gpuops.correlate(numbers(dtype, 61, 67), weights, mode=mode)
                    yield gpuops.convolve(numbers(dtype, 61, 67), weights, mode=mode)
    with gpuops.device("auto"):  # which looks at calls before there is a result
        for side in (3, 20, 40, 60, 100):
            x, indices = numbers("f4", side, side), numbers("i8", side)
            yield gpuops.add(x, x)
            yield gpuops.sigmoid(x[::-1], out=np.empty_like(x))
            yield gpuops.saxpy(2, x.T, x)
            yield gpuops.gather(x, indices[:3], axis=1)
            yield gpuops.gather(x.ravel(), indices)
            gpuops.scatter(x, indices[:3], 0)
            yield gpuops.matmul(x, x)
            yield gpuops.correlate(x, x[:3, :3])


def make_calls():
    # memcheck looks at what is written to a file, byte by byte.
    with open(os.devnull, "wb", buffering=0) as file:
        for result in results():
            file.write(memoryview(np.ascontiguousarray(result)).cast("B"))


def described(error):
    """A report as text: what is wrong, and the functions that lead there, of each stack."""
    lines = [error.findtext("what") or error.findtext("xwhat/text")]
    for part in error:
        if part.tag == "auxwhat":
            lines.append(part.text)
        for frame in part.iter("frame") if part.tag == "stack" else ():
            where = frame.findtext("file") or frame.findtext("obj")
            lines.append(f"    {frame.findtext('fn')} ({where}:{frame.findtext('line')})")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", metavar="DIR", help="test the package in DIR")
    parser.add_argument("--calls", action="store_true", help="make the calls, without valgrind")
    arguments = parser.parse_args()
    if arguments.package:
        sys.path.insert(0, str(Path(arguments.package).resolve()))
    if arguments.calls:
        return make_calls()

    from gpuops import _core

    environment = os.environ | {"PYTHONMALLOC": "malloc", "GPUOPS_NUM_THREADS": "2"}
    with tempfile.NamedTemporaryFile() as report:
        command = [
            *VALGRIND,
            "--xml=yes",
            f"--xml-file={report.name}",
            sys.executable,
            *sys.argv,
            "--calls",
        ]
        subprocess.run(command, env=environment, check=True)
        errors = ElementTree.parse(report.name).findall("error")
    library = os.path.realpath(_core.__file__)
    ours = [
        error
        for error in errors
        if error.findtext("kind") == "SyscallParam"
        or library in (os.path.realpath(file.text) for file in error.iter("obj"))
    ]
    print(*map(described, ours), sep="\n\n", end="\n" * bool(ours))
    print(f"{len(ours)} errors of the package, {len(errors) - len(ours)} of others")
    sys.exit(1 if ours else 0)


if __name__ == "__main__":
    main()
