"""The compiler and its machine code, below `compile`: no GPU is needed."""

import ast
import random
import struct
import threading
from pathlib import Path

import pytest
from faults import build
from helpers import run_child
from rtc import cubin, open_nvrtc

SOURCE = """
#include "pair.h"
template <class T> __global__ void scale(T *x, T a, int n) { x[0] *= a * n; }
extern "C" __global__ void first(Pair *pair) { pair->a += pair->b; }
__device__ __noinline__ float helper(float x) { return x * x; }
extern "C" __global__ void second(float *x) { *x = helper(*x); }
"""
HEADERS = {b"pair.h": b"struct Pair { float a; int b; };"}
OPTIONS = (b"--gpu-architecture=sm_90",)


@pytest.fixture
def core(cpu_device):
    open_nvrtc(cpu_device.gpuops)
    return cpu_device.gpuops._core


@pytest.fixture
def code(cpu_device):
    return cubin(cpu_device.gpuops, 'extern "C" __global__ void one(float *x) { *x = 1; }')[0]


def compile_source(core, source=SOURCE, options=OPTIONS, headers=HEADERS, expressions=()):
    return core._nvrtc_compile(source.encode(), b"test.cu", options, headers, expressions)


def test_what_is_compiled(core):
    expressions = (b"scale<float>", b"scale<double>")
    result, code, log, lowered = compile_source(core, expressions=expressions)
    assert (result, log) == (None, b"")
    assert lowered == {
        b"scale<float>": "_Z5scaleIfEvPT_S0_i",
        b"scale<double>": "_Z5scaleIdEvPT_S0_i",
    }
    names = core._cubin_kernels(code)
    assert sorted(names) == ["_Z5scaleIdEvPT_S0_i", "_Z5scaleIfEvPT_S0_i", "first", "second"]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_kernels_of_every_architecture_are_found(core, architecture):
    option = f"--gpu-architecture={architecture}".encode()
    code = compile_source(core, options=(option,))[1]
    assert sorted(core._cubin_kernels(code)) == ["first", "second"]


def test_the_version_is_that_of_a_library_of_today(core):
    major, minor = core._nvrtc_open(None)  # what was opened first stays
    assert major >= 12
    assert core._nvrtc_open("/nowhere/libnvrtc.so") == (major, minor)


def test_a_source_that_is_wrong(core):
    result, code, log, lowered = compile_source(core, "__global__ void f() { wrong; }\n")
    assert (result, code, lowered) == ("NVRTC_ERROR_COMPILATION", None, {})
    assert b"test.cu(1): error" in log and b"wrong" in log


def test_a_warning_is_in_the_log_of_a_success(core):
    result, code, log, _ = compile_source(
        core, "__global__ void f(int *x) { int unused; *x = 1; return; *x = 2; }\n"
    )
    assert result is None and code
    assert b"warning" in log


def test_an_option_that_is_wrong(core):
    result, code, log, _ = compile_source(core, options=(b"--gpu-architecture=sm_7",))
    assert (result, code) == ("NVRTC_ERROR_INVALID_OPTION", None)
    assert b"--gpu-architecture" in log


def test_an_expression_that_names_nothing(core):
    result, code, log, lowered = compile_source(core, expressions=(b"nothing<3>",))
    assert result and code is None and lowered == {}
    assert b"nothing" in log


def test_options_that_make_no_machine_code(core):
    result, code, _, _ = compile_source(core, options=(b"--gpu-architecture=compute_90",))
    assert result is None
    assert code is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((b"a\0b", b"n", (), None, ()), ValueError),
        ((b"a", b"n\0", (), None, ()), ValueError),
        ((b"a", b"n", (b"\0",), None, ()), ValueError),
        ((b"a", b"n", (), {b"h": b"\0"}, ()), ValueError),
        ((b"a", b"n", (), None, (b"\0",)), ValueError),
        ((b"a", b"n", ("text",), None, ()), TypeError),
        ((b"a", b"n", (), {"h": b""}, ()), TypeError),
        ((b"a", b"n", (), [], ()), TypeError),
        (("a", b"n", (), None, ()), TypeError),
        ((b"a", b"n", (), None, ("text",)), TypeError),
        ((b"a", b"n", [], None, ()), TypeError),
    ],
)
def test_what_is_no_text_for_the_compiler(core, arguments, error):
    with pytest.raises(error):
        core._nvrtc_compile(*arguments)


def test_threads_compile_at_once(core):
    outcomes = []

    def work(number):
        source = f'extern "C" __global__ void k{number}(int *x) {{ *x = {number}; }}'
        result, code, _, _ = compile_source(core, source)
        outcomes.append((result, core._cubin_kernels(code), (f"k{number}",)))

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    for result, names, expected in outcomes:
        assert result is None and names == expected


def test_a_library_that_is_not_there_or_is_another_one(cpu_device):
    script = """
from gpuops import _core
try:
    _core._nvrtc_compile(b"", b"", (), None, ())
except OSError as error:
    print(error)
for path in ("/nowhere/libnvrtc.so", b"/nowhere/libnvrtc.so", "libc.so.6", "libm.so.6"):
    try:
        _core._nvrtc_open(path)
    except OSError as error:
        print(error)
"""
    lines = run_child(cpu_device.gpuops, script).splitlines()
    assert lines[0] == "NVRTC has not been opened"
    assert all("/nowhere/libnvrtc.so" in line for line in lines[1:3])
    assert lines[3] == (
        "NVRTC cannot be opened: libc.so.6 does not have all functions of NVRTC 12 or later"
    )
    assert len(lines) == 5


# Machine code may come from a disk.


def test_machine_code_of_something_else(core):
    for wrong in [b"", b"\x7fELF", b"x" * 5000, Path(core.__file__).read_bytes()]:
        with pytest.raises(ValueError, match="this is no machine code of CUDA: it must be a cubin"):
            core._cubin_kernels(wrong)
    with pytest.raises(TypeError):
        core._cubin_kernels("text")


def test_machine_code_that_is_cut_off(core, code):
    assert core._cubin_kernels(code) == ("one",)
    for size in [*range(0, len(code), 61), len(code) - 1]:
        with pytest.raises(ValueError, match="no machine code"):
            core._cubin_kernels(code[:size])


def test_machine_code_with_wrong_bytes(core, code):
    """Any answer will do, but not a crash; the sanitizers look on."""
    generator = random.Random(1)
    for _ in range(3000):
        wrong = bytearray(code)
        for _ in range(generator.choice([1, 1, 2, 8])):
            wrong[generator.randrange(len(wrong))] = generator.choice([0, 1, 0x7F, 0xFF])
        try:
            names = core._cubin_kernels(bytes(wrong))
        except (ValueError, UnicodeDecodeError):
            continue
        assert isinstance(names, tuple)


@pytest.mark.parametrize("field", [(40, "Q"), (32, "Q"), (60, "H"), (58, "H"), (56, "H")])
@pytest.mark.parametrize("value", [0xFFFF, 0x7FFF])
def test_machine_code_whose_header_lies(core, code, field, value):
    offset, kind = field
    wrong = bytearray(code)
    limit = 8 * struct.calcsize(kind)
    struct.pack_into(f"<{kind}", wrong, offset, value if kind == "H" else (1 << limit) - value)
    with pytest.raises(ValueError, match="no machine code"):
        core._cubin_kernels(bytes(wrong))


# A compiler that fails: one that stands in for NVRTC, in a process of its own.

STAND_IN = """
import ctypes
from gpuops import _core
path = {path!r}
fake = ctypes.CDLL(path)
fake.fake_nvrtc_live.restype = ctypes.c_long

def compile(function="", code=0, sizes=(6, 4)):
    fake.fake_nvrtc_fail(function.encode(), code)
    fake.fake_nvrtc_set_sizes(*map(ctypes.c_size_t, sizes))
    try:
        return _core._nvrtc_compile(b"", b"", (), None, (b"one", b"two"))
    except MemoryError as error:
        return str(error)
    finally:
        assert fake.fake_nvrtc_live() == 0

fake.fake_nvrtc_fail(b"Version", 11)
try:
    _core._nvrtc_open(path)
except OSError as error:
    print(str(error).replace(path, "..."))
fake.fake_nvrtc_fail(b"", 0)
assert _core._nvrtc_open(path) == (77, 3)
"""
NAMES = {b"one": "_Zone", b"two": "_Ztwo"}
INTERNAL = "NVRTC_ERROR_INTERNAL_ERROR"

# What is left of a compilation in which a function fails.
LEFT = {
    "CreateProgram": (INTERNAL, None, b"", {}),
    "AddNameExpression": (INTERNAL, None, b"a log", {}),
    "CompileProgram": (INTERNAL, None, b"a log", {}),
    "GetProgramLogSize": (INTERNAL, None, b"", {}),
    "GetProgramLog": (INTERNAL, None, b"a log", {}),
    "GetLoweredName": (INTERNAL, None, b"a log", {}),
    "GetCUBINSize": (None, None, b"a log", NAMES),
    "GetCUBIN": (INTERNAL, None, b"a log", {}),
}
# A log of a megabyte is released each time that the names which come after it are not to be had.
LEAK = """
def address_space():
    return int(open("/proc/self/statm").read().split()[0]) * 4096

before = address_space()
for _ in range(500):
    compile("GetLoweredName", 1, (1 << 20, 4))
print(address_space() - before)
"""
NO_MEMORY = "compile: out of host memory for the compiler's results"


def test_a_compiler_that_fails(fake_device, fake_folder):
    path = str(fake_folder.resolve() / "cudart" / build.COMPILER)
    script = STAND_IN.replace("{path!r}", repr(path))
    script += f"print([compile(name, 11) for name in {list(LEFT)!r}])\n"
    script += f"print([compile(name, 1) for name in {list(LEFT)!r}])\n"
    # The log and the code of a size that nobody has, and of none.
    script += "print([compile(sizes=sizes) for sizes in ((1 << 62, 4), (6, 1 << 62))])\n"
    script += "print([compile(sizes=sizes) for sizes in ((0, 4), (6, 0), (6, 4))])\n"
    script += LEAK
    opened, *printed, grown = run_child(fake_device.gpuops, script).splitlines()
    assert int(grown) < 400 << 20  # of 500; a sanitizer keeps 256 of what is freed for a while
    assert opened == (
        "NVRTC cannot be opened: ... does not have all functions of NVRTC 12 or later"
    )
    failed, starved, vast, small = map(ast.literal_eval, printed)
    assert dict(zip(LEFT, failed, strict=True)) == LEFT
    expected = dict.fromkeys(LEFT, NO_MEMORY) | {"GetCUBINSize": LEFT["GetCUBINSize"]}
    assert dict(zip(LEFT, starved, strict=True)) == expected
    assert vast == [NO_MEMORY, NO_MEMORY]
    assert small == [
        (None, b"code", b"", NAMES),
        (None, None, b"a log", NAMES),
        (None, b"code", b"a log", NAMES),
    ]


def test_a_module_without_a_device(core, code, cpu_device):
    module = core._load_module(code, {"one": ("one", None)}, None, {})
    assert module.kernels == ("one",)
    assert module.device is None
    assert module.cubin == code
    assert repr(module) == "<gpuops.Module on no device: one>"
    for use in (lambda: module["one"], lambda: module.get_global("x")):
        with pytest.raises(RuntimeError, match="loaded on no device: compile it without"):
            use()
    with pytest.raises(KeyError, match="no kernel 'two' in this module: it has one"):
        module["two"]
    with pytest.raises(KeyError, match="no kernel 'one' in this module: it has None"):
        core._load_module(code, {}, None, {})["one"]
    with pytest.raises(TypeError, match="by its name, a str"):
        module[0]


def test_the_types_are_not_made_by_hand(cpu_device):
    gpuops = cpu_device.gpuops
    for kind in (gpuops.Module, gpuops.Kernel):
        with pytest.raises(TypeError, match="cannot create"):
            kind()


def test_what_stands_around_arguments(cpu_device):
    gpuops = cpu_device.gpuops
    assert repr(gpuops.Pointer(255)) == "Pointer(0xff)"
    assert int(gpuops.Pointer(2**64 - 1).address) == 2**64 - 1
    assert gpuops.Pointer(7).__index__() == 7
    for wrong in (-1, 2**64):
        with pytest.raises(OverflowError, match="is no address"):
            gpuops.Pointer(wrong)
    with pytest.raises(TypeError):
        gpuops.Pointer(1.5)
    array = [1]
    for kind in (gpuops.In, gpuops.Out, gpuops.InOut):
        assert kind(array).array is array
        assert repr(kind(array)) == f"{kind.__name__}([1])"
        with pytest.raises(TypeError):
            kind()
        with pytest.raises(TypeError):
            kind(array=array)
