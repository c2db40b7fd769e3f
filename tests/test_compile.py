"""compile(): the real NVRTC, its errors, its options, and what the disk cache has of it.

None of this needs a GPU: code is compiled for sm_90. On the fake runtime, which says that it is an
H200, and on a real GPU, it is loaded as well.
"""

import doctest
import inspect
import os
import pickle
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
from helpers import run_child

from gpuops import _compile

SM_90 = ["--gpu-architecture=sm_90"]
SAXPY = """extern "C" __global__ void saxpy(float a, const float* x, float* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


def nvrtc_problem():
    try:
        _compile.find_nvrtc()
    except _compile.CompileError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of the test's own."""
    problem = nvrtc_problem()
    if problem:
        pytest.skip(problem)
    path = tmp_path / "cache"
    monkeypatch.setenv("GPUOPS_CACHE_DIR", str(path))
    return path


@pytest.fixture
def compiled(cpu_device):
    """compile() for sm_90, wherever this runs."""

    def for_sm_90(source, *, options=(), **keywords):
        return cpu_device.gpuops.compile(source, options=[*SM_90, *options], **keywords)

    return for_sm_90


def error_of(call, *arguments, **keywords):
    with pytest.raises(_compile.CompileError) as caught:
        call(*arguments, **keywords)
    return caught.value


# What comes out.


def test_a_kernel(gpuops):
    module = gpuops.compile(SAXPY, options=SM_90)
    assert isinstance(module, gpuops.Module)
    assert module.kernels == ("saxpy",)
    assert module.cubin[:4] == b"\x7fELF"
    assert b"saxpy" in module.cubin


def test_kernels_go_by_their_names_in_the_source(gpuops):
    module = gpuops.compile(
        """
        template <class T, int N> __global__ void scale(T* x) { *x *= N; }
        namespace ns { __global__ void alone(int* x) { *x = 1; } }
        __global__ void same(float* x) { *x = 1; }
        __global__ void same(double* x, int n) { *x = n; }
        template __global__ void scale<short, 5>(short*);
        """,
        options=SM_90,
        name_expressions=["scale<float, 3>", "scale<int, 2>"],
    )
    assert sorted(module.kernels) == [
        "ns::alone", "same(double*, int)", "same(float*)", "scale<float, 3>", "scale<int, 2>",
        "scale<short, 5>",
    ]  # fmt: skip


def test_the_example_in_the_documentation(cpu_device):
    function = cpu_device.gpuops.compile
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(function), {}, "compile", None, None)
    assert test.examples
    printed = []
    assert doctest.DocTestRunner().run(test, out=printed.append).failed == 0, "".join(printed)


def test_no_kernels(gpuops):
    assert gpuops.compile("", options=SM_90).kernels == ()
    assert gpuops.compile("__device__ int f() { return 1; }", options=SM_90).kernels == ()


def test_the_architecture_is_that_of_the_options(compiled, cpu_device):
    other = cpu_device.gpuops.compile(SAXPY, options=["-arch", "sm_80"])
    assert other.cubin != compiled(SAXPY).cubin


def test_for_the_gpu_at_hand(gpu):
    module = gpu.gpuops.compile(SAXPY)
    assert module.device == 0
    assert module["saxpy"].name == "saxpy"
    assert gpu.gpuops.compile(SAXPY, device="cuda:0").device == 0


def test_an_architecture_that_the_gpu_runs_is_loaded(fake_device, folder):
    compile_one = fake_device.gpuops.compile
    assert compile_one(SAXPY, options=SM_90).device == 0
    assert compile_one(SAXPY, options=["-arch=sm_90a"]).device == 0
    assert compile_one(SAXPY, options=["-arch=sm_80"]).device is None
    assert compile_one(SAXPY, options=["-arch=sm_100"]).device is None
    with pytest.raises(ValueError, match="cuda:0 is an sm_90, which cannot run code for sm_100"):
        compile_one(SAXPY, options=["-arch=sm_100"], device=0)


@pytest.mark.parametrize(
    ("architecture", "runs"),
    [("sm_90", True), ("sm_90a", True), ("sm_90f", True), ("sm_80", False), ("sm_89", False),
     ("sm_91", False), ("sm_100", False), ("sm_900", False), ("sm_", False), ("sm_90x", False)],
)  # fmt: skip
def test_which_code_runs_where(architecture, runs):
    assert _compile._runs_on(architecture, 9, 0) == runs
    assert _compile._runs_on("sm_86", 8, 9) and _compile._runs_on("sm_100f", 10, 3)
    assert not _compile._runs_on("sm_100a", 10, 3)


def test_without_a_gpu(cpu_device, folder):
    run_child(
        cpu_device.gpuops,
        f"""
import gpuops
source = {SAXPY!r}
module = gpuops.compile(source, options={SM_90!r})
assert module.device is None and module.kernels == ("saxpy",)
try:
    module["saxpy"]
    raise AssertionError
except RuntimeError as error:
    assert "is loaded on no device" in str(error), error
for name in ("nonsense", 5):
    try:
        module[name]
        raise AssertionError
    except (KeyError, TypeError) as error:
        assert "saxpy" in str(error) or "str" in str(error), error
for keywords in ({{}}, {{"device": 0}}, {{"device": "cuda", "options": {SM_90!r}}}):
    try:
        gpuops.compile(source, **keywords)
        raise AssertionError
    except gpuops.DeviceError as error:
        assert str(error).startswith("compile"), error
""",
        CUDA_VISIBLE_DEVICES="",
        GPUOPS_CACHE_DIR=str(folder),
    )


def test_the_default_device_may_be_the_cpu(gpu):
    """It decides for arrays; there is no code for it to compile."""
    with gpu.gpuops.device("cpu"):
        assert gpu.gpuops.compile(SAXPY).device == 0
    with pytest.raises(ValueError, match="cpu.*kernels run on a GPU"):
        gpu.gpuops.compile(SAXPY, device="cpu")


# Options.


def test_options_reach_the_compiler(compiled):
    source = """
    #if N != 7 || !defined FLAG
    #error macros
    #endif
    __global__ void f() {}
    """
    assert compiled(source, options=("-DN=7", "-D", "FLAG")).kernels == ("f",)
    assert "#error" in str(error_of(compiled, source))


def test_cpp17_is_the_default(compiled):
    source = "static_assert(__cplusplus == {}L); __global__ void f() {{}}"
    compiled(source.format("201703"))
    for option in ("-std=c++20", "--std=c++20"):
        compiled(source.format("202002"), options=[option])


def test_fast_maths_is_off(compiled):
    source = "__global__ void f(float* x) { x[0] = sinf(x[1]) / sqrtf(x[2]); }"
    plain = compiled(source).cubin
    exact = ["--ftz=false", "--prec-div=true", "--prec-sqrt=true"]
    # The options stand in the code too, so it is its size that tells.
    assert len(plain) == len(compiled(source, options=exact).cubin)
    assert len(plain) > len(compiled(source, options=["--use_fast_math"]).cubin)


def test_lineinfo(compiled):
    with_lines = compiled(SAXPY, lineinfo=True).cubin
    assert b".debug_line" in with_lines and b"source.cu" in with_lines
    assert b".debug_line" not in compiled(SAXPY).cubin
    assert compiled(SAXPY, lineinfo=True, options=["-lineinfo"]).kernels == ("saxpy",)


def test_headers(compiled):
    headers = {"a.h": '#include "deep/b.h"\n', "deep/b.h": "#define N 3\n", "unused.h": "nonsense"}
    source = '#include "a.h"\n#include <deep/b.h>\n__global__ void f(int* x) { *x = N; }'
    assert compiled(source, headers=headers).kernels == ("f",)
    assert compiled("#include <a.h>\nstatic_assert(N == 3);", headers=headers).kernels == ()


def test_headers_of_cuda_are_found(compiled):
    module = compiled(
        """
        #include <cooperative_groups.h>
        #include <cuda_bf16.h>
        #include <cuda_fp16.h>
        #include <cuda/std/complex>
        #include <cuda/std/cstdint>
        #include <mma.h>
        __global__ void f(__half* h, cuda::std::complex<float>* c) { *h = 1; *c *= 2; }
        """
    )
    assert module.kernels == ("f",)


def test_parts_of_the_headers_may_be_elsewhere(monkeypatch, tmp_path):
    beside, toolkit = tmp_path / "wheels" / "include", tmp_path / "toolkit" / "include"
    path = str(tmp_path / "wheels" / "lib" / "libnvrtc.so.13")
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setenv("CUDA_PATH", str(toolkit.parent))

    def add(folder, name):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    add(beside, "cuda_fp16.h")
    for name in ("cuda_fp16.h", "crt/mma.h", "cccl/nv/target"):
        add(toolkit, name)
    folders = [beside, toolkit, toolkit / "cccl"]
    assert _compile._header_folders(path) == tuple(map(str, folders))
    add(beside, "crt/mma.h")
    add(beside, "nv/target")  # as in CUDA 12
    assert _compile._header_folders(path) == (str(beside),)
    add(beside, "cccl/nv/target")
    assert _compile._header_folders(path) == (str(beside), str(beside / "cccl"))


def test_what_a_file_may_define_is_not_guessed(tmp_path):
    # Of a kernel without a mangled name, the types are only in the source.
    source = """#include "precision.h"
    #ifndef REAL
    #define REAL float
    #endif
    extern "C" __global__ void kernel(REAL* x, int n) {}
    """
    (tmp_path / "precision.h").write_text("#define REAL double\n")
    nvrtc = _compile.find_nvrtc()

    def types(source, *options):
        program = _compile.Program("source.cu", source, (*SM_90, *options), (), {})
        return [word for _, word in _compile.run_nvrtc(program, nvrtc).kernels["kernel"][1]]

    included = f"-I{tmp_path}"
    assert types(source, included) == [None, "int32"]
    assert types(source.replace("#include", "//")) == ["float32*", "int32"]
    by_macro = source.replace('"precision.h"', "FILE_NAME")
    assert types(by_macro, included, '-DFILE_NAME="precision.h"') == [None, "int32"]


def test_headers_of_ones_own_are_found(compiled, tmp_path, monkeypatch):
    (tmp_path / "my headers" / "deep").mkdir(parents=True)
    (tmp_path / "my headers" / "outer.h").write_text('#include "deep/inner.h"\n')
    (tmp_path / "my headers" / "deep" / "inner.h").write_text('#include "beside.h"\n')
    (tmp_path / "my headers" / "deep" / "beside.h").write_text("#define N 3\n")
    source = '#include "outer.h"\nstatic_assert(N == 3);'
    for options in (
        [f"-I{tmp_path}/my headers"],
        ["-I", f"{tmp_path}/my headers"],
        [f"--include-path={tmp_path}/my headers"],
    ):
        compiled(source, options=options)
    monkeypatch.chdir(tmp_path / "my headers")
    compiled(source)


def test_text_beyond_ascii(compiled):
    source = "// Prüfung: ∑ 漢\n__global__ void f() {}"
    assert compiled(source).kernels == ("f",)
    assert "Größe" in str(error_of(compiled, '#error "Größe"'))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"options": "-DN=3"}, "options must be a sequence of str, such as .*, not str"),
        ({"options": 3}, "options must be a sequence of str"),
        ({"options": [*SM_90, 3]}, "options must hold str, .*, not int"),
        ({"options": [*SM_90, b"-DN"]}, "not bytes"),
        ({"name_expressions": "f"}, "name_expressions must be a sequence of str"),
        ({"headers": ["a.h"]}, "headers must be a mapping of names to contents"),
        ({"headers": {"a.h": b""}}, "headers must map str to str, not str to bytes"),
        ({"source": SAXPY.encode()}, "source must be a str of CUDA C.., not bytes"),
        ({"source": Path("saxpy.cu")}, "read a file with"),
    ],
)
def test_arguments_of_other_types(cpu_device, keywords, message):
    keywords = {"source": SAXPY, "options": SM_90, **keywords}
    with pytest.raises(TypeError, match=message):
        cpu_device.gpuops.compile(keywords.pop("source"), **keywords)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-architecture=compute_90"], "makes no machine code: expected that of a GPU"),
        (["-arch", "compute_90"], "--gpu-architecture=compute_90 makes no machine code"),
        (["-arch=native"], "--gpu-architecture=native makes no machine code"),
        (["-arch"], "--gpu-architecture= makes no machine code"),
        ([*SM_90, "-dlto"], "-dlto makes code that has to be linked"),
        ([*SM_90, "--relocatable-device-code=true"], "has to be linked before it can be loaded"),
        ([*SM_90, "-rdc=true"], "put all of the source into one string"),
        ([*SM_90, "-rdc", "true"], "-rdc=true makes code that has to be linked"),
        ([*SM_90, " -dc "], "-dc makes code that has to be linked"),
    ],
)
def test_options_that_give_nothing_to_load(cpu_device, options, message):
    with pytest.raises(ValueError, match=message):
        cpu_device.gpuops.compile(SAXPY, options=options)


def test_a_zero_in_a_text(compiled):
    with pytest.raises(ValueError, match="null byte"):
        compiled(SAXPY + "\0")
    with pytest.raises(ValueError, match="null byte"):
        compiled(SAXPY, options=["-DN=\0"])


# Errors.


def test_an_error_shows_the_lines(compiled):
    error = error_of(
        compiled,
        'extern "C" __global__ void f(float* x)\n{\n    int i = 0;\n    x[i] = z;\n    i++;\n}\n',
    )
    assert """\
source.cu(4): error: identifier "z" is undefined

    2 | {
    3 |     int i = 0;
  > 4 |     x[i] = z;
      |            ^
    5 |     i++;
    6 | }

""" in str(error)
    assert str(error).startswith("NVRTC 1")
    assert " could not compile source.cu for sm_90 (NVRTC_ERROR_COMPILATION):\n\n" in str(error)
    assert "\n\nOptions: --std=c++17 --gpu-architecture=sm_90" in str(error)
    assert "1 error detected" in str(error)
    assert isinstance(error, RuntimeError)
    assert error.name == "NVRTC_ERROR_COMPILATION"
    assert 'identifier "z" is undefined' in error.log and ">" not in error.log
    assert SM_90[0] in error.options


def test_every_message_has_its_lines(compiled):
    source = (
        "__device__ int f() { return a; }\n" + "//\n" * 98 + "\t__device__ int g() { return\tb; }"
    )
    text = str(error_of(compiled, source))
    assert "  > 1 | __device__ int f() { return a; }\n" in text
    assert "    3 | //\n" in text and "  4 |" not in text
    assert "  > 100 | \t__device__ int g() { return\tb; }\n" in text
    # The caret stands below its character also where there are tabs.
    at = text.index("  > 100 |")
    line, caret = text[at:].split("\n")[:2]
    assert caret.index("^") == line.index("b;")
    assert caret.count("\t") == 2


def test_errors_in_headers_show_their_lines(compiled):
    text = str(
        error_of(
            compiled,
            '#include "mine.h"\n__global__ void f() {}\n',
            headers={"mine.h": "#pragma once\n__device__ int g() { return q; }\n"},
        )
    )
    assert 'mine.h(2): error: identifier "q" is undefined' in text
    assert "  > 2 | __device__ int g() { return q; }\n      |" in text


def test_an_error_without_a_line(compiled):
    error = error_of(compiled, "", options=["--nonsense"])
    assert error.name == "NVRTC_ERROR_INVALID_OPTION"
    assert "unrecognized option --nonsense" in str(error)


def test_errors_of_the_assembler(compiled):
    error = error_of(compiled, '__global__ void f() { asm("bogus;"); }')
    assert "ptxas" in str(error) and "bogus" in str(error)
    big = "__global__ void f(int* x) { __shared__ int a[1 << 16]; a[*x] = *x; *x = a[x[1]]; }"
    assert "too much shared data" in str(error_of(compiled, big))


@pytest.mark.parametrize(
    ("source", "keywords", "advice"),
    [
        ("#include <stdio.h>", {}, "NVRTC has none of the host's headers, such as stdio.h: printf"),
        ("#include <vector>", {}, "<cuda/std/...> has the C.. library"),
        ('#include "mine.h"', {}, "Pass it as headers=..mine.h.: ..... or its folder as options="),
        ("", {"name_expressions": ["f<int>"]}, "Each of name_expressions must name .*: f<int>"),
    ],
)
def test_advice(compiled, source, keywords, advice):
    with pytest.raises(_compile.CompileError, match=advice):
        compiled(source, **keywords)


def test_advice_where_the_gpu_is_younger(cpu_device):
    with pytest.raises(_compile.CompileError, match="may be older than the GPU: `pip install -U"):
        cpu_device.gpuops.compile("", options=["--gpu-architecture=sm_999"])


def test_advice_where_there_are_no_headers(compiled, monkeypatch):
    nvrtc = _compile.find_nvrtc()._replace(folders=())
    monkeypatch.setattr(_compile, "find_nvrtc", lambda: nvrtc)
    with pytest.raises(_compile.CompileError, match="CUDA's headers were not found beside NVRTC"):
        compiled("#include <cuda_fp16.h>")


def test_an_error_can_be_pickled(compiled):
    error = error_of(compiled, "nonsense")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    assert (copy.name, copy.log, copy.options) == (error.name, error.log, error.options)


def test_warnings_are_warnings(compiled):
    source = "__global__ void f()\n{\n    int unused;\n}\n"
    for _ in range(2):  # the second comes from the cache
        with pytest.warns(UserWarning, match="NVRTC warns:\nsource.cu.3.: warning") as caught:
            compiled(source)
        assert "  > 3 |     int unused;\n      |         ^" in str(caught[0].message)
        assert "Remark" not in str(caught[0].message)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(source, options=["-diag-suppress=177"])


# Finding NVRTC.

MISSING = """
import gpuops
try:
    gpuops.compile("", options=["-arch=sm_90"])
except gpuops.CompileError as error:
    print(error)
assert gpuops.gather([1, 2], 1, device="cpu") == 2
"""


def test_a_path_that_is_wrong(cpu_device, tmp_path):
    said = run_child(cpu_device.gpuops, MISSING, GPUOPS_NVRTC=str(tmp_path / "nowhere.so"))
    assert said.startswith("GPUOPS_NVRTC does not name NVRTC")
    assert "nowhere.so" in said
    (tmp_path / "text.so").write_text("no library")
    said = run_child(cpu_device.gpuops, MISSING, GPUOPS_NVRTC=str(tmp_path / "text.so"))
    assert "text.so" in said


def test_another_library_in_its_place(cpu_device):
    maps = Path("/proc/self/maps").read_text().splitlines()
    other = next(line.split()[-1] for line in maps if "/libc.so" in line or "/libc-" in line)
    said = run_child(cpu_device.gpuops, MISSING, GPUOPS_NVRTC=other)
    assert said.startswith("GPUOPS_NVRTC does not name NVRTC") and other in said


def test_a_path_that_is_right(cpu_device, folder):
    path = _compile.find_nvrtc().path
    if path is None:
        pytest.skip("the dynamic linker has found NVRTC, and does not say where")
    run_child(
        cpu_device.gpuops,
        f"""
import sys
sys.modules["cuda.pathfinder"] = None
import gpuops
from gpuops import _compile
assert gpuops.compile({SAXPY!r}, options={SM_90!r}).kernels == ("saxpy",)
assert _compile.find_nvrtc().path == {path!r}
""",
        GPUOPS_NVRTC=path,
        GPUOPS_CACHE_DIR=str(folder),
    )


def test_where_there_is_none_it_says_where_it_was_looked_for(monkeypatch, tmp_path):
    def not_there(path):
        raise OSError(f"{path or 'libnvrtc.so.13'}: cannot open shared object file")

    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").touch()
    monkeypatch.setattr(_compile, "_opened", not_there)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv("GPUOPS_NVRTC", raising=False)
    with pytest.raises(_compile.CompileError) as caught:
        _compile.look_for_nvrtc()
    text = str(caught.value)
    assert "`pip install 'gpuops[jit]'` installs it" in text
    assert "GPUOPS_NVRTC" in text
    assert "  cuda-pathfinder: not installed\n" in text
    assert "  the dynamic linker: libnvrtc.so.13: cannot open shared object file\n" in text
    assert f"  {tmp_path}/lib64/libnvrtc.so.13: " in text
    assert caught.value.name == ""


def test_the_report_tells_of_it(cpu_device, capsys):
    version = ".".join(map(str, _compile.find_nvrtc().version))
    assert cpu_device.gpuops.show_config(mode="dicts")["nvrtc"].startswith(f"NVRTC {version}, ")
    cpu_device.gpuops.show_config()
    assert f"NVRTC {version}, " in capsys.readouterr().out
    said = run_child(
        cpu_device.gpuops, "import gpuops; gpuops.show_config()", GPUOPS_NVRTC="nowhere.so"
    )
    assert "GPUOPS_NVRTC does not name NVRTC" in said


def test_the_import_opens_nothing(cpu_device):
    run_child(
        cpu_device.gpuops,
        """
import sys
import gpuops
assert "nvrtc" not in open("/proc/self/maps").read()
assert not {"IPython", "cuda", "gpuops.ipython"} & set(sys.modules)
""",
    )


# The disk cache.


@pytest.fixture
def counted(monkeypatch):
    """How often NVRTC was called, as a list."""
    calls = []
    run = _compile.run_nvrtc

    def count(program, nvrtc):
        calls.append(program)
        return run(program, nvrtc)

    monkeypatch.setattr(_compile, "run_nvrtc", count)
    return calls


def test_the_same_is_compiled_once(compiled, counted):
    source = """
    template <class T> __global__ void scale(T* x, T factor) { *x *= factor; }
    namespace ns { __constant__ float weights[9]; }
    extern "C" __global__ void plain(const float* x, int n) {}
    """
    arguments = {"name_expressions": ["scale<float>", "ns::weights"]}
    first = compiled(source, **arguments)
    second = compiled(source, **arguments)
    assert len(counted) == 1
    assert second.cubin == first.cubin
    assert second.kernels == first.kernels == ("scale<float>", "plain")


def test_an_entry_holds_all_that_is_known(cpu_device):
    kernels = {
        "a<int>": ("_Z1aIiEvT_", (("x", "int32"), (None, None))),
        "b": ("b", None),
        "c": ("c", ()),
    }
    compiled = _compile.Compiled(b"\0cubin", kernels, {"ns::w": "_ZN2ns1wE"}, "a warning: ü")
    assert _compile._unpacked(_compile._packed(compiled)) == compiled


def test_everything_that_matters_is_in_the_key(compiled, cpu_device, counted):
    def each():
        yield lambda: compiled(SAXPY)
        yield lambda: compiled(SAXPY + " ")
        yield lambda: compiled(SAXPY, options=["-DN=1"])
        yield lambda: compiled(SAXPY, options=["-DN=1", "-DM=1"])
        yield lambda: compiled(SAXPY, options=["-DM=1", "-DN=1"])
        yield lambda: compiled(SAXPY, lineinfo=True)
        yield lambda: compiled(SAXPY, name_expressions=["saxpy"])
        yield lambda: compiled(SAXPY, headers={"a.h": ""})
        yield lambda: compiled(SAXPY, headers={"a.h": "//"})
        yield lambda: compiled(SAXPY, headers={"b.h": "//"})
        yield lambda: cpu_device.gpuops.compile(SAXPY, options=["--gpu-architecture=sm_80"])

    for number, call in enumerate(each(), 1):
        call()
        assert len(counted) == number
    for call in each():
        call()
        assert len(counted) == number


def test_another_nvrtc_or_driver_has_another_key(compiled, counted, monkeypatch):
    compiled(SAXPY)
    nvrtc = _compile.find_nvrtc()
    monkeypatch.setattr(_compile, "find_nvrtc", lambda: nvrtc._replace(version=(99, 0)))
    compiled(SAXPY)
    assert len(counted) == 2
    monkeypatch.setattr(_compile, "find_nvrtc", lambda: nvrtc)
    compiled(SAXPY)
    assert len(counted) == 2
    newer = _compile._core.__version__ + ".1"
    for name, value in (("_driver_version", lambda: 99_990), ("__version__", newer)):
        core = types.SimpleNamespace(**{**vars(_compile._core), name: value})
        monkeypatch.setattr(_compile, "_core", core)
        count = len(counted)
        compiled(SAXPY)
        assert len(counted) == count + 1


def test_included_files_are_in_the_key(compiled, counted, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "deep").mkdir(parents=True)
    second.mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["-I", str(first), f"--include-path={second}", "--pre-include=before.h"]
    source = """
    #include "outer.h"
    #if __has_include(<optional.h>)
    #include <optional.h>
    #endif
    __global__ void f(int* x) { *x = N; }
    """
    (second / "outer.h").write_text('  #  include "deep/inner.h"\n')
    (first / "deep" / "inner.h").write_text('#include "beside.h"\n')
    (first / "deep" / "beside.h").write_text("#define N 1\n")
    (second / "before.h").write_text("")

    def changes(path, text):
        """Compiles anew after the change, and only once; and not where it is taken back."""
        before = path.read_text() if path.exists() else None
        compiled(source, options=options)
        count = len(counted)
        path.write_text(text)
        compiled(source, options=options)
        compiled(source, options=options)
        assert len(counted) == count + 1, path
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
        compiled(source, options=options)
        assert len(counted) == count + 1, path

    changes(first / "deep" / "beside.h", "#define N 2\n")
    changes(first / "deep" / "inner.h", "#define N 3\n")
    changes(second / "outer.h", "#define N 4\n")
    changes(second / "before.h", "#define X 5\n")
    changes(second / "optional.h", "#define Y\n")  # was not there before
    changes(first / "outer.h", "#define N 6\n")  # stands before the other one
    changes(tmp_path / "outer.h", "#define N 7\n")  # in the current folder


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"options": ["-I folder"]}, '#include "number.h"'),
        ({"options": [" -Ifolder "]}, '#include "number.h"'),
        ({"options": ["-Ifolder"]}, '#/* in folder */include "number.h"'),
        ({"headers": {"folder/outer.h": '#include "number.h"'}}, '#include "folder/outer.h"'),
    ],
)
def test_no_way_to_a_file_is_missed(compiled, counted, tmp_path, monkeypatch, keywords, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for number in range(3):
        (tmp_path / "folder" / "number.h").write_text(f"#define NUMBER {number}\n")
        compiled(f"{line}\n__global__ void f(int* x) {{ *x = NUMBER; }}", **keywords)
        assert len(counted) == number + 1


def test_every_part_of_the_headers_is_in_the_key(monkeypatch, tmp_path):
    found = _compile.look_for_nvrtc()
    parts = {"one": "cuda_fp16.h", "two": "crt/mma.h", "three": "nv/target"}
    for folder, header in parts.items():
        (tmp_path / folder / header).parent.mkdir(parents=True)
        (tmp_path / folder / header).write_text("")
    folders = tuple(str(tmp_path / folder) for folder in parts)
    monkeypatch.setattr(_compile, "_header_folders", lambda path: folders)
    facts = _compile._opened(found.path)
    for folder, header in parts.items():
        (tmp_path / folder / header).write_text("// a newer one\n")
        newer = _compile._opened(found.path)
        assert newer != facts
        facts = newer


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ('#include "a.h"', True),
        (" # include <a.h> // WHY", True),
        ("#if __has_include(<a.h>)", True),
        ("#ifdef __has_include", True),
        ("// what includes this", True),
        ("#include A_H", False),
        ("#\\\ninclude A_H", False),
        ("#if defined X || __has_include( A_H )", False),
        ("#include_next <a.h>", False),
        ("#if __has_include_next(<a.h>)", False),
        ('#embed "data"', False),
        ("%:include A_H", False),
        ("#/* a */ include /**/ A_H", False),
        ("char built[] = __DATE__;", False),
        ("char built[] = __TIME__;", False),
    ],
)
def test_what_is_known_without_a_preprocessor(line, known):
    program = _compile.Program("source.cu", f"int i;\n{line}\nint j;", (), (), {})
    assert (_compile.read_included(program, ()) is not None) == known


def test_what_cannot_be_known_is_not_kept(compiled, counted, folder, tmp_path):
    (tmp_path / "a.h").write_text("#define N 1\n")
    source = "#define WHICH <a.h>\n#include WHICH\n__global__ void f() {}"
    for _ in range(2):
        compiled(source, options=[f"-I{tmp_path}"])
    compiled(SAXPY, options=["--pch", f"--pch-dir={tmp_path}"])
    compiled(SAXPY, options=[f" --time={tmp_path}/times.csv"])
    assert len(counted) == 4
    assert not folder.exists()


def test_a_file_that_changes_meanwhile_is_not_kept(compiled, folder, tmp_path, monkeypatch):
    header = tmp_path / "a.h"
    header.write_text("#define N 1\n")
    run = _compile.run_nvrtc

    def change_and_run(program, nvrtc):
        header.write_text("#define N 2\n")
        return run(program, nvrtc)

    monkeypatch.setattr(_compile, "run_nvrtc", change_and_run)
    compiled('#include "a.h"\n__global__ void f() {}', options=[f"-I{tmp_path}"])
    assert list(folder.glob("*")) == []


def test_errors_are_not_kept(compiled, counted, folder):
    for _ in range(2):
        error_of(compiled, "nonsense")
    assert len(counted) == 2
    assert list(folder.glob("*")) == []


def test_a_damaged_entry_is_compiled_anew(compiled, counted, folder):
    right = compiled(SAXPY).cubin
    (entry,) = folder.iterdir()
    contents = entry.read_bytes()
    for damaged in (b"", contents[:-1], contents[:100], contents[:-1] + b"\x01", contents + b"\0"):
        entry.write_bytes(damaged)
        count = len(counted)
        assert compiled(SAXPY).cubin == right
        assert len(counted) == count + 1
        assert entry.read_bytes() == contents
    assert compiled(SAXPY).cubin == right


def test_a_hostile_folder_is_done_without(compiled, counted, folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="is open to other users"):
        compiled(SAXPY)
    assert compiled(SAXPY).kernels == ("saxpy",)
    assert len(counted) == 2
    assert list(folder.iterdir()) == []


def test_turned_off(compiled, counted, monkeypatch):
    monkeypatch.setenv("GPUOPS_CACHE_DIR", "")
    for _ in range(2):
        compiled(SAXPY)
    assert len(counted) == 2


def test_from_the_cache_it_is_quick(compiled):
    started = time.perf_counter()
    compiled(SAXPY)
    cold = time.perf_counter() - started
    best = cold
    for _ in range(20):
        started = time.perf_counter()
        compiled(SAXPY)
        best = min(best, time.perf_counter() - started)
    assert best < cold / 4


# Threads and processes.


def test_many_threads(compiled, counted):
    sources = [SAXPY.replace("saxpy", f"saxpy_{i % 6}") for i in range(24)]
    names = [None] * len(sources)

    def run(i):
        names[i] = compiled(sources[i]).kernels

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == [(f"saxpy_{i % 6}",) for i in range(len(sources))]


def test_the_interpreter_goes_on_meanwhile(compiled):
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        started = time.perf_counter()
        compiled("#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n" + SAXPY)
        ended = time.perf_counter()
    finally:
        done.set()
        thread.join()
    assert sum(started < moment < ended for moment in ticks) > 5


def test_a_fork_compiles(compiled):
    compiled(SAXPY)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ours = compiled(SAXPY.replace("saxpy", "of_the_child"))
            status = 0 if ours.kernels == ("of_the_child",) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_printed(compiled, capfd):
    compiled(SAXPY)
    error_of(compiled, "nonsense")
    assert capfd.readouterr() == ("", "")


# Whether the types of the source reach the launch.

TYPED = """
#define REAL float
struct Pair { int first; float second; };
extern "C" __global__ void plain(const REAL* x, double factor, unsigned char byte) {}
__global__ void mangled(int* indices, float2* points, Pair pair) {}
template <class T> __global__ void scale(T* values, T factor) {}
"""


def test_kernels_tell_their_parameters(gpu):
    module = gpu.gpuops.compile(TYPED, name_expressions=["scale<double>"])
    assert str(module["plain"]) == "plain(x: const float32*, factor: float64, byte: uint8)"
    assert str(module["mangled"]) == "mangled(indices: int32*, points: void*, pair: 8 bytes)"
    assert str(module["scale<double>"]) == "scale<double>(values: float64*, factor: float64)"
