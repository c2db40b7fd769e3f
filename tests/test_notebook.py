"""%%cuda and %gpu_timeit in a notebook that nbclient executes, in a kernel of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import package_parent
from test_compile import nvrtc_problem

for module in ("nbclient", "ipykernel"):
    pytest.importorskip(module)

# In a process of its own, since Jupyter's event loop leaves threads and sockets behind.
EXECUTE = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
client = NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True)
client.execute()
print("RESULT", json.dumps([cell.outputs for cell in notebook.cells]))
"""


@pytest.fixture
def execute(tmp_path):
    """Runs the cells of a notebook, and returns the text and the error of each."""
    if problem := nvrtc_problem():
        pytest.skip(problem)

    def run(device, *cells):
        environment = {**os.environ, "GPUOPS_CACHE_DIR": str(tmp_path / "cache")}
        environment |= {"JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
        environment["PYTHONPATH"] = os.pathsep.join(
            [package_parent(device.gpuops), str(Path(__file__).parent)]
        )
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", EXECUTE],
            input=json.dumps(["%load_ext gpuops", *cells]),
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs = json.loads(re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)[1])
        assert outputs[0] == []
        return [Shown(cell) for cell in outputs[1:]]

    return run


class Shown:
    """What a cell shows: `text` is what it prints and returns, `error` the lines of an error."""

    def __init__(self, outputs):
        self.text = self.error = self.kind = ""
        for output in outputs:
            if output["output_type"] == "error":
                self.kind = output["ename"]
                self.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))
            elif output["output_type"] == "stream":
                self.text += output["text"]
            else:
                self.text += output["data"]["text/plain"]


SM_90 = "--gpu-architecture=sm_90"


def test_a_cell_is_compiled(cpu_device, execute):
    shown = execute(
        cpu_device,
        f"%%cuda --name mod {SM_90} -DN=3 -e 'scale<float>'\n"
        "template <class T> __global__ void scale(T* x) { *x *= N; }\n"
        "__global__ void twice(float* x) { *x *= 2; }\n",
        "mod.kernels",
        "import gpuops; isinstance(mod, gpuops.Module)",
        "mod.cubin[:4]",
    )
    assert [cell.error for cell in shown] == [""] * 4
    assert shown[0].text == ""
    assert shown[1].text == "('scale<float>', 'twice')"
    assert shown[2].text == "True"
    assert shown[3].text == r"b'\x7fELF'"


def test_errors_are_shown_at_their_lines(cpu_device, execute):
    (shown,) = execute(
        cpu_device, f"%%cuda {SM_90}\n__global__ void f(int* x)\n{{\n    *x = unheard;\n}}\n"
    )
    assert shown.kind == "CompileError"
    # As the notebook counts them: the line of the magic is the first one.
    assert 'cell.cu(4): error: identifier "unheard" is undefined\n' in shown.error
    assert "  > 4 |     *x = unheard;\n      |          ^\n" in shown.error
    assert "Traceback" not in shown.error and "_compile.py" not in shown.error


def test_what_is_wrong_with_the_line_is_said(cpu_device, execute):
    shown = execute(
        cpu_device,
        "%%cuda --name 3x\n//",
        "%%cuda --name\n//",
        "%%cuda 'unfinished\n//",
        f"%%cuda {SM_90} --nonsense\n//",
        f"%%cuda {SM_90} -enonsense\n//",
        "%gpu_timeit",
        "%gpu_timeit -n 0 -r 0 1 + 1",
        "%gpu_timeit -n many 1 + 1",
    )
    texts = [cell.error + cell.text for cell in shown]
    assert "--name 3x is no name for a variable" in texts[0]
    assert "expected one argument" in texts[1] and "usage: %%cuda" in texts[1]
    assert "No closing quotation" in texts[2]
    assert "unrecognized option --nonsense" in texts[3]
    assert "unrecognized option -enonsense" in texts[4]
    assert "no statement" in texts[5] and "usage: %gpu_timeit" in texts[5]
    assert "-n and -r count from 1" in texts[6]
    assert "invalid int value: 'many'" in texts[7]


TWIN = """
import faults.fake, pathlib, gpuops
fake = faults.fake.Fake(pathlib.Path(gpuops.__path__[0]).parent / "cudart")

def twin(launch):
    factor, address, count = launch.read("f4", "p", "i4")
    values = faults.fake.device_array(address, count, "f4")
    values *= factor

context = fake.twin("_Z5scalefPfi", twin)
context.__enter__()

def timed():
    return fake.calls("cudaEventElapsedTime")
"""


def test_kernels_become_callables(gpu, execute):
    shown = execute(
        gpu,
        TWIN if gpu.fake else "import gpuops\ntimed = lambda: 0",
        "%%cuda\n__global__ void scale(float factor, float* x, int n)\n{\n"
        "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) x[i] *= factor;\n}\n",
        "import numpy as np\nx = np.arange(5, dtype=np.float32)\nscale[1, 32](2.0, x, x.size)\nx",
        "scale[1, 32](2.0, x.astype(np.float64), x.size)",
        "d = gpuops.to_device(x)\ntime = %gpu_timeit -o -q -n 3 -r 2 scale[1, 32](1.0, d, 5)\n"
        "print(len(time.runs), time.loops, 0 <= time.best <= time.average < 1, timed())",
        "%gpu_timeit -n 2 scale[1, 32](1.0, d, 5)",
        "%gpu_timeit no_such_name",
        "%gpu_timeit -q  -n 2   -r 3  -o said = 'two  blanks'",
        "print(_.loops, len(_.runs))",
        "%gpu_timeit -q -n 1 -r 1 print('two  blanks')",
    )
    assert shown[2].text == "array([0., 2., 4., 6., 8.], dtype=float32)", shown[2].error
    assert shown[3].kind == "TypeError" and "x, float32*" in shown[3].error
    # By events: for each run, and once before them.
    assert shown[4].text == f"2 3 True {3 if gpu.fake else 0}\n", shown[4].error
    assert re.fullmatch(
        r"\S+ .?s ± \S+ .?s on the GPU per loop \(mean ± std\. dev\. of 7 runs, 2 loops each\)\n",
        shown[5].text,
    ), (shown[5].text, shown[5].error)
    assert shown[6].kind == "NameError"
    assert shown[8].text == "2 3\n", shown[7].error
    assert shown[9].text == "two  blanks\n" * 2, shown[9].error
