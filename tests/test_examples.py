"""The classic examples of this field, by gpuops.compile, with gpuops' own operators beside them.

On the fake runtime a kernel is its host twin, which works on what the launch has handed over.
"""

import contextlib
import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from faults.fake import device_array
from helpers import photograph
from rtc import open_nvrtc, page_locked

random = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def nvrtc(gpu, own_cache):
    open_nvrtc(gpu.gpuops)


@contextlib.contextmanager
def twin(gpu, module, function):
    """Stands for the only kernel of a module, on the fake runtime."""
    if gpu.fake is None:
        yield
        return
    (lowered,) = gpu.gpuops._core._cubin_kernels(module.cubin)
    with gpu.fake.twin(lowered, function):
        yield


class WithoutKernels:
    """The package, of whose kernels the fake runtime only knows that they were launched."""

    def __init__(self, gpu, stack):
        self.gpu, self.stack, self.launches = gpu, stack, []

    def __getattr__(self, name):
        return getattr(self.gpu.gpuops, name)

    def compile(self, *args, **options):
        module = self.gpu.gpuops.compile(*args, **options)
        for lowered in self.gpu.gpuops._core._cubin_kernels(module.cubin):
            self.stack.enter_context(self.gpu.fake.twin(lowered, self.launches.append))
        return module


EXAMPLES = re.findall(
    r"```python\n(.*?)```",
    (Path(__file__).parent.parent / "README.md")
    .read_text()
    .split("## Kernels of your own\n")[1]
    .split("\n## ")[0],
    re.DOTALL,
)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_readme(gpu, example):
    names = {"np": np, "gpuops": gpu.gpuops}
    if "image" in example:
        names["image"] = photograph()[1][40:240, 100:350].copy()
    if gpu.fake is not None:
        with contextlib.ExitStack() as stack:
            names["gpuops"] = package = WithoutKernels(gpu, stack)
            # There is memory for less, and time.
            exec(example.replace("32_768", "32"), names)
            gpu.fake.run()
            assert package.launches
        return
    exec(example, names)
    if "weights[9]" in example:
        weights = names["module"].get_global("weights", dtype=np.float32)
        assert (weights.to_host() == np.full(9, 2, np.float32)).all()
    if "result" in names:
        result, beside = (
            x if isinstance(x, np.ndarray) else x.to_host()
            for x in (names["result"], names["beside"])
        )
        np.testing.assert_allclose(result, beside, rtol=1e-5, atol=1e-3)


def test_multiply_two_matrices_of_4_by_4(gpu):
    module = gpu.gpuops.compile(
        """
        __global__ void multiply_them(float* dest, const float* a, const float* b)
        {
            const int i = threadIdx.x + 4 * threadIdx.y;
            dest[i] = a[i] * b[i];
        }
        """
    )

    def multiply(launch):
        assert (launch.grid, launch.block) == ((1, 1, 1), (4, 4, 1))
        dest, a, b = (device_array(address, 16, "f4") for address in launch.read("p", "p", "p"))
        dest[:] = a * b

    a, b = random.standard_normal((2, 4, 4)).astype(np.float32)
    dest = np.zeros_like(a)
    with twin(gpu, module, multiply):
        module["multiply_them"][1, (4, 4)](gpu.gpuops.Out(dest), a, gpu.gpuops.In(b))
    assert (dest == a * b).all()
    assert (gpu.gpuops.multiply(a, b) == dest).all()


def test_add_two_vectors_of_100000_elements(gpu):
    gpuops = gpu.gpuops
    module = gpuops.compile(
        """
        extern "C" __global__ void vector_add(const float* a, const float* b, float* c, int n)
        {
            const int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) c[i] = a[i] + b[i];
        }
        """
    )
    n = 100_000

    def add(launch):
        a, b, c, count = launch.read("p", "p", "p", "i4")
        assert count == n <= launch.grid[0] * launch.block[0]
        device_array(c, n, "f4")[:] = device_array(a, n, "f4") + device_array(b, n, "f4")

    a, b = random.random((2, n), np.float32)
    device_a, device_b, c = gpuops.to_device(a), gpuops.to_device(b), gpuops.empty(n, np.float32)
    with twin(gpu, module, add):
        module["vector_add"].forall(n)(device_a, device_b, c, n)
        assert (c.to_host() == a + b).all()
        c.fill(0)
        module["vector_add"][-(-n // 256), 256](device_a, device_b, c, n)
        assert (c.to_host() == a + b).all()
    assert (gpuops.add(device_a, device_b).to_host() == a + b).all()


def test_a_naive_product_of_matrices(gpu):
    gpuops = gpu.gpuops
    module = gpuops.compile(
        """
        template <class T>
        __global__ void matmul(const T* a, const T* b, T* c, int rows, int inner, int columns)
        {
            const int row = blockIdx.y * blockDim.y + threadIdx.y;
            const int column = blockIdx.x * blockDim.x + threadIdx.x;
            if (row >= rows || column >= columns) return;
            T sum = 0;
            for (int k = 0; k < inner; k++) sum += a[row * inner + k] * b[k * columns + column];
            c[row * columns + column] = sum;
        }
        """,
        name_expressions=["matmul<double>"],
    )
    rows, inner, columns = 70, 50, 90

    def multiply(launch):
        a, b, c, *sizes = launch.read("p", "p", "p", "i4", "i4", "i4")
        assert sizes == [rows, inner, columns]
        a = device_array(a, rows * inner, "f8").reshape(rows, inner)
        b = device_array(b, inner * columns, "f8").reshape(inner, columns)
        device_array(c, rows * columns, "f8")[:] = (a @ b).ravel()

    a, b = random.random((rows, inner)), random.random((inner, columns))
    c = np.empty((rows, columns))
    with twin(gpu, module, multiply):
        kernel = module["matmul<double>"]
        kernel[(6, 5), (16, 16)](a, b, gpuops.Out(c), rows, inner, columns)
    np.testing.assert_allclose(c, a @ b, rtol=1e-12)
    np.testing.assert_allclose(gpuops.matmul(a, b), c, rtol=1e-12)


CONVOLVE = """
__constant__ float weights[SIZE * SIZE];

/* Each thread computes a pixel; beyond the borders the picture goes on as it ends there. */
__global__ void convolve(const unsigned char* image, float* result, int height, int width)
{
    const int x = blockIdx.x * 16 + threadIdx.x;
    const int y = blockIdx.y * 16 + threadIdx.y;
    if (x >= width || y >= height) return;
    float sum = 0;
    for (int j = 0; j < SIZE; j++) {
        for (int i = 0; i < SIZE; i++) {
            const int column = min(max(x + SIZE / 2 - i, 0), width - 1);
            const int row = min(max(y + SIZE / 2 - j, 0), height - 1);
            sum += weights[j * SIZE + i] * image[row * width + column];
        }
    }
    result[y * width + x] = sum;
}
"""


def convolve_in_numpy(image, weights):
    radius = len(weights) // 2
    padded = np.pad(image.astype(np.float64), radius, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, weights.shape)
    return np.einsum("yxji,ji->yx", windows, weights[::-1, ::-1])


def test_convolve_a_photograph_in_blocks_of_16_by_16(gpu):
    gpuops = gpu.gpuops
    _, image = photograph()
    image = np.ascontiguousarray(image[40:240, 100:350])
    (height, width), size = image.shape, 5
    weights = np.outer([1, 4, 6, 4, 1], [1, 4, 7, 4, 1]).astype(np.float32) / 272
    module = gpuops.compile(CONVOLVE, options=[f"-DSIZE={size}"])
    constant = module.get_global("weights", dtype=np.float32)
    gpuops.scatter(constant, np.arange(size * size), weights.ravel())
    assert (constant.to_host() == weights.ravel()).all()

    def convolve(launch):
        assert launch.block == (16, 16, 1)
        source, result, *shape = launch.read("p", "p", "i4", "i4")
        source = device_array(source, height * width, "u1").reshape(shape)
        ours = device_array(constant.ptr, size * size, "f4").reshape(size, size)
        device_array(result, height * width, "f4")[:] = convolve_in_numpy(source, ours).ravel()

    result = np.empty((height, width), np.float32)
    grid = (-(-width // 16), -(-height // 16))
    with twin(gpu, module, convolve):
        kernel = module["convolve"][grid, (16, 16)]
        kernel(image, gpuops.Out(result), height, width)
    expected = convolve_in_numpy(image, weights)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)
    beside = gpuops.convolve(image.astype(np.float32), weights, mode="nearest")
    np.testing.assert_allclose(beside, expected, rtol=0, atol=1e-3)


SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, const float* y, float* out, size_t n)
{
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
"""


def saxpy_twin(launch):
    a, x, y, out, n = launch.read("f4", "p", "p", "p", "u8")
    assert n == launch.grid[0] * launch.block[0]
    device_array(out, n, "f4")[:] = a * device_array(x, n, "f4") + device_array(y, n, "f4")


def blocks_and_threads(gpu):
    return (32_768 if gpu.fake is None else 32), 512


def test_saxpy_with_copies_on_a_stream(gpu):
    gpuops = gpu.gpuops
    blocks, threads = blocks_and_threads(gpu)
    n = blocks * threads
    module = gpuops.compile(SAXPY)
    x, y = random.random((2, n), np.float32)
    out = np.empty(n, np.float32)
    with twin(gpu, module, saxpy_twin), gpuops.Stream() as stream:
        device_x, device_y = gpuops.to_device(x), gpuops.to_device(y)
        device_out = gpuops.empty(n, np.float32)
        module["saxpy"][blocks, threads, stream](2.5, device_x, device_y, device_out, n)
        device_out.to_host(out=out)
        stream.synchronize()
    expected = np.float32(2.5) * x + y
    # The compiler rounds once, NumPy twice.
    np.testing.assert_allclose(out, expected, rtol=2e-7)
    beside = gpuops.saxpy(np.float32(2.5), device_x, device_y)
    np.testing.assert_allclose(beside.to_host(), expected, rtol=2e-7)


def queue_copy(gpu, stream, target, source):
    """A copy on a stream of gpuops, by the runtime itself or by torch; nothing waits for it."""
    if gpu.fake is not None:
        up = isinstance(source, np.ndarray)
        host, device = (source, target) if up else (target, source)
        places = [ctypes.c_void_p(host.ctypes.data), ctypes.c_void_p(device.ptr)]
        size, handle = ctypes.c_size_t(host.nbytes), ctypes.c_void_p(stream.ptr)
        to, start = places[::-1] if up else places
        code = gpu.fake.library.cudaMemcpyAsync(to, start, size, 1 if up else 2, handle)
        assert code == 0
        return
    torch = pytest.importorskip("torch")
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        theirs = [
            torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.from_dlpack(x)
            for x in (target, source)
        ]
        theirs[0].copy_(theirs[1], non_blocking=True)


def test_saxpy_between_asynchronous_copies_of_page_locked_memory(gpu):
    """Four steps are queued on a stream, and none of them is waited for before the end."""
    gpuops = gpu.gpuops
    blocks, threads = blocks_and_threads(gpu)
    n = blocks * threads
    module = gpuops.compile(SAXPY)
    with contextlib.ExitStack() as stack:
        x, y = (stack.enter_context(page_locked(gpu, v)) for v in random.random((2, n), np.float32))
        out = stack.enter_context(page_locked(gpu, np.zeros(n, np.float32)))
        stack.enter_context(twin(gpu, module, saxpy_twin))
        stream = stack.enter_context(gpuops.Stream())
        device_x, device_y, device_out = (gpuops.empty(n, np.float32) for _ in range(3))
        launch = module["saxpy"][blocks, threads, stream]
        stream.synchronize()
        if gpu.fake is None:
            torch = pytest.importorskip("torch")
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(100_000_000)  # cycles, some fifty milliseconds
        else:
            gpu.fake.set_scheduler("lazy")
        queue_copy(gpu, stream, device_x, x)
        queue_copy(gpu, stream, device_y, y)
        launch(2.5, device_x, device_y, device_out, n)
        queue_copy(gpu, stream, out, device_out)
        # To ask is to give the fake runtime time to work.
        assert gpu.fake.pending() == 4 if gpu.fake is not None else not stream.query()
        assert not out.any()
        stream.synchronize()
        np.testing.assert_allclose(out, np.float32(2.5) * x + y, rtol=2e-7)


def test_hello_from_every_thread(gpu, capfd):
    module = gpu.gpuops.compile(
        """
        __global__ void hello()
        {
            printf("Hello World From GPU! block %d, thread %d\\n", blockIdx.x, threadIdx.x);
        }
        """
    )
    launches = []
    with twin(gpu, module, launches.append):
        module["hello"][2, 3]()
        gpu.gpuops.synchronize()
    if gpu.fake is not None:
        assert [(launch.grid, launch.block) for launch in launches] == [((2, 1, 1), (3, 1, 1))]
        return
    ctypes.CDLL(None).fflush(None)  # C keeps back what it prints to no terminal
    lines = [f"Hello World From GPU! block {b}, thread {t}" for b in range(2) for t in range(3)]
    assert sorted(capfd.readouterr().out.splitlines()) == lines
    assert gpu.gpuops.hello(2, 3) == lines


def test_a_structure_by_value_and_shared_memory(gpu):
    """What the other examples leave out."""
    gpuops = gpu.gpuops
    module = gpuops.compile(
        """
        struct Range { float low; double high; };
        __global__ void reversed(const float* x, float* y, Range range, bool clamp)
        {
            extern __shared__ float tile[];
            tile[threadIdx.x] = x[threadIdx.x];
            __syncthreads();
            const float value = tile[blockDim.x - 1 - threadIdx.x];
            y[threadIdx.x] = clamp ? fminf(fmaxf(value, range.low), range.high) : value;
        }
        """
    )
    kind = np.dtype([("low", "f4"), ("high", "f8")], align=True)

    def reverse(launch):
        assert launch.shared_bytes == 4 * 64
        x, y, limits, clamp = launch.read("p", "p", kind, "?")
        values = device_array(x, 64, "f4")[::-1]
        device_array(y, 64, "f4")[:] = (
            values.clip(limits["low"], limits["high"]) if clamp else values
        )

    x = random.random(64, np.float32)
    limits = np.array((0.25, 0.75), kind)[()]
    y = np.zeros_like(x)
    with twin(gpu, module, reverse):
        module["reversed"][1, 64, None, 4 * 64](x, y, limits, True)
        assert (y == x[::-1].clip(0.25, 0.75)).all()
        module["reversed"][1, 64, None, 4 * 64](x, y, limits, False)
    assert (y == x[::-1]).all()
