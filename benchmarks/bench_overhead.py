"""What a call costs that only queues work on the GPU, and where that time goes."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy

import gpuops

from . import peers
from .driver import Driver
from .harness import Case, Contestant, Run, Target, on_gpu

SIZE, COUNT = 1000, 100
QUEUED: dict[str, Any] = {"clock": "queued"}

# What these calls may take, beside a launch by the driver that takes as long as LAUNCH_SECONDS:
# hosts differ in how long that is, and calls take so much longer there as well.
LAUNCH, LAUNCH_SECONDS = "driver: launch of an empty kernel", 3.7e-6
GATHER_SECONDS, OUT_SECONDS, TORCH_SECONDS, KERNEL_SECONDS = 4.8e-6, 4.2e-6, 6e-6, 4.2e-6
# What a tensor of torch may take to come in, on any host.
TENSOR_SECONDS = 1e-6


def beside_a_launch(ours: str, seconds: float) -> Target:
    """Ask for so many seconds where a launch takes LAUNCH_SECONDS."""
    return Target(ours, LAUNCH, ratio=LAUNCH_SECONDS / seconds)


def measure(run: Run) -> None:
    """Measure small gathers in a loop of calls that nobody waits for, then their parts."""
    if not (gpuops.is_available() and peers.gpu()):
        return
    run.say("\ncalls that queue work on the GPU: what one of many takes")
    for case in cases(run):
        run.measure(case)


def cases(run: Run) -> Iterator[Case]:
    """The gather that every library does, then what its time is made of."""
    table = run.random.random(SIZE, dtype=numpy.float32)
    indices = [(run.random.integers(0, SIZE, COUNT),) for _ in range(4)]
    yield calls(table, indices)
    yield launches(table)
    yield parts(table, indices[0][0])
    if peers.torch_on_gpu():
        yield tensors(table, indices[0][0])


def calls(table: numpy.ndarray, indices: list) -> Case:
    """Gather with every library, into fresh memory and into memory that is there.

    One Python function stands between the loop and the library, for everybody alike.
    """
    nothing = numpy.full(COUNT, numpy.nan, table.dtype)
    out = gpuops.to_device(nothing)
    contestants = {
        "gpuops.gather": on_gpu(lambda x, i: gpuops.gather(x, i), **QUEUED),
        "gpuops.gather, out=": on_gpu(lambda x, i: gpuops.gather(x, i, out=out), **QUEUED),
    }
    # Tensors of torch and arrays of CuPy go in, and the same kind comes out.
    for maker in (peers.torch_gpu, peers.cupy_gpu):
        found = maker("arrays", lambda library, x, i: gpuops.gather(x, i), **QUEUED)
        contestants |= {f"gpuops.gather of {name}": found[name] for name in found}
    contestants |= torch_calls(nothing) | cupy_calls(nothing)
    contestants |= peers.jax_gpu(
        "take, int32 indices", lambda jax, x, i: jax.numpy.take(x, i), **QUEUED
    )
    targets = [
        Target("gpuops.gather", seconds=GATHER_SECONDS),
        Target("gpuops.gather, out=", seconds=OUT_SECONDS),
        Target("gpuops.gather of torch arrays", seconds=TORCH_SECONDS),
    ]
    name = f"overhead {COUNT} of {SIZE} float32"
    return Case(name, contestants, numpy.take, [table], indices, targets=targets)


def torch_calls(nothing: numpy.ndarray) -> dict:
    """Gather as torch does."""
    if not (torch := peers.torch_on_gpu()):
        return {}
    out = torch.from_numpy(nothing).cuda()
    return peers.torch_gpu(
        "index_select", lambda torch, x, i: torch.index_select(x, 0, i), **QUEUED
    ) | peers.torch_gpu(
        "index_select, out=", lambda torch, x, i: torch.index_select(x, 0, i, out=out), **QUEUED
    )


def cupy_calls(nothing: numpy.ndarray) -> dict:
    """Gather as CuPy does."""
    if not (cupy := peers.cupy_on_gpu()):
        return {}
    out = cupy.asarray(nothing)
    return peers.cupy_gpu("take", lambda cupy, x, i: cupy.take(x, i), **QUEUED) | peers.cupy_gpu(
        "take, out=", lambda cupy, x, i: cupy.take(x, i, out=out), **QUEUED
    )


SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, const float* y, float* out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 1000) out[i] = a * x[i] + y[i];
}
"""


def launches(table: numpy.ndarray) -> Case:
    """Launch a kernel of one's own on three arrays and a scalar."""
    blocks, threads = -(-SIZE // 256), 256
    contestants = {}
    try:
        kernel = gpuops.compile(SAXPY)["saxpy"]
    except gpuops.CompileError:
        pass  # There is no NVRTC.
    else:
        ours = [gpuops.to_device(table) for _ in range(3)]
        bound = kernel[blocks, threads]
        contestants["gpuops, kernel[grid, block](...)"] = Contestant(
            lambda: kernel[blocks, threads](2.5, *ours), **QUEUED
        )
        contestants["gpuops, the brackets once"] = Contestant(lambda: bound(2.5, *ours), **QUEUED)
    if cupy := peers.cupy_on_gpu():
        raw = cupy.RawKernel(SAXPY, "saxpy")
        theirs = [cupy.asarray(table) for _ in range(3)]
        scalar = numpy.float32(2.5)
        contestants["CuPy, RawKernel"] = Contestant(
            lambda: raw((blocks,), (threads,), (scalar, *theirs)), **QUEUED
        )
    contestants[LAUNCH] = Contestant(Driver().launch(), **QUEUED)
    targets = []
    for name in contestants:
        if name.startswith("gpuops"):
            targets.append(Target(name, seconds=KERNEL_SECONDS))
            targets.append(beside_a_launch(name, KERNEL_SECONDS))
    return Case("launch of a kernel on three arrays", contestants, reference=None, targets=targets)


def parts(table: numpy.ndarray, indices: numpy.ndarray) -> Case:
    """Time what a call consists of, as far as it can be had alone."""
    x, i = gpuops.to_device(table), gpuops.to_device(indices)
    out, none = gpuops.to_device(table[:COUNT]), i[:0]
    driver = Driver()
    calls = {
        "gpuops.gather": functools.partial(gpuops.gather, x, i),
        "without memory: out=": functools.partial(gpuops.gather, x, i, out=out),
        "without work: no indices": functools.partial(gpuops.gather, x, none),
        "without a GPU: on the CPU": functools.partial(gpuops.gather, table, indices, device="cpu"),
        "gpuops.empty of the result": functools.partial(gpuops.empty, COUNT, numpy.float32),
        "gpuops.current_stream": gpuops.current_stream,
        LAUNCH: driver.launch(),
        "driver: allocate and free": driver.allocate_and_free(out.nbytes),
        "driver: no work": driver.no_work(),
    }
    targets = [
        beside_a_launch("gpuops.gather", GATHER_SECONDS),
        beside_a_launch("without memory: out=", OUT_SECONDS),
    ]
    if torch := peers.torch_on_gpu():
        theirs, where = torch.from_numpy(table).cuda(), torch.from_numpy(indices).cuda()
        in_and_out = "torch arrays in and out"
        calls[in_and_out] = functools.partial(gpuops.gather, theirs, where)
        calls[f"without work, {in_and_out}"] = functools.partial(gpuops.gather, theirs, where[:0])
        targets.append(beside_a_launch(in_and_out, TORCH_SECONDS))
        one = torch.zeros(1, device="cuda")
        calls["torch: fill one element"] = functools.partial(one.fill_, 1)
    contestants = {name: Contestant(call, **QUEUED) for name, call in calls.items()}
    return Case("parts of a call", contestants, reference=None, targets=targets)


def tensors(table: numpy.ndarray, indices: numpy.ndarray) -> Case:
    """Show what tensors of torch take to come in, in calls that do nothing else.

    There are no indices, so that nothing is queued, and `out` is there, so that nothing is made.
    What is left is to look at the arguments. That takes more for a tensor than for an array of our
    own, which is all that is done for it: to export it, to see that autograd does not follow it,
    and to ask for torch's stream.
    """
    torch = peers.torch_on_gpu()
    x, none, out = (gpuops.to_device(array) for array in (table, indices[:0], table[:0]))
    theirs = [torch.from_numpy(array).cuda() for array in (table, indices[:0], table[:0])]
    ours, one, three = (f"gpuops.gather of {what}" for what in ("our arrays", "one", "three"))
    calls = {
        ours: functools.partial(gpuops.gather, x, none, out=out),
        one: functools.partial(gpuops.gather, theirs[0], none, out=out),
        three: functools.partial(gpuops.gather, theirs[0], theirs[1], out=theirs[2]),
    }
    contestants = {name: Contestant(call, **QUEUED) for name, call in calls.items()}
    targets = [
        Target(one, ours, slower=TENSOR_SECONDS),
        Target(three, ours, slower=3 * TENSOR_SECONDS),
    ]
    name = "tensors of torch in, no work and no result"
    return Case(name, contestants, reference=None, targets=targets)
