"""The build: how setup.py finds its tools and what it says when it cannot, and the built module."""

import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ["75", "80", "90", "100", "103", "120"]

needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")


@pytest.fixture(scope="module")
def setup():
    """setup.py as a module; it only builds something when it is run as a script."""
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("gpuops_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """A machine with nothing installed: no program in PATH, no toolkit, no wheels."""

    def __init__(self, setup, folder, monkeypatch):
        self.folder = folder
        self.environment = monkeypatch
        for name in list(os.environ):
            if name.startswith(("GPUOPS_", "CUDA_", "NVCC_")) or name in ("CC", "CXX"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", str(folder / "path"))
        monkeypatch.setattr(setup, "SYSTEM_CUDA", str(folder / "system"))
        monkeypatch.setattr(sys, "path", [str(folder / "site"), *sys.path])

    def program(self, path, *lines):
        """Put a shell script at a path below the machine's folder, and return the whole path."""
        script = self.folder / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return str(script)

    def nvcc(self, path="path/nvcc"):
        return self.program(path, *(f"echo compute_{name}" for name in KNOWN))


@pytest.fixture
def machine(setup, tmp_path, monkeypatch):
    return Machine(setup, tmp_path, monkeypatch)


# Where nvcc comes from.


def test_nvcc_of_the_environment_goes_first(setup, machine):
    wheel = machine.nvcc("site/nvidia/cu13/bin/nvcc")
    assert setup.find_nvcc() == wheel
    system = machine.nvcc("system/bin/nvcc")
    assert setup.find_nvcc() == system
    path = machine.nvcc("path/nvcc")
    assert setup.find_nvcc() == path
    cuda_path = machine.nvcc("toolkit/bin/nvcc")
    machine.environment.setenv("CUDA_PATH", str(machine.folder / "toolkit"))
    assert setup.find_nvcc() == cuda_path
    cuda_home = machine.nvcc("home/bin/nvcc")
    machine.environment.setenv("CUDA_HOME", str(machine.folder / "home"))
    assert setup.find_nvcc() == cuda_home


def test_a_toolkit_without_nvcc_is_passed_over(setup, machine):
    (machine.folder / "home" / "bin").mkdir(parents=True)
    machine.environment.setenv("CUDA_HOME", str(machine.folder / "home"))
    path = machine.nvcc("path/nvcc")
    assert setup.find_nvcc() == path


def test_no_nvcc_says_what_to_do(setup, machine):
    machine.environment.setattr(sys, "path", [])  # NVIDIA's wheels may be installed
    with pytest.raises(setup.PlatformError) as caught:
        setup.find_nvcc()
    text = str(caught.value)
    assert "there is no nvcc in CUDA_HOME, CUDA_PATH, PATH" in text
    assert "pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime" in text
    assert "GPUOPS_CUDA=0" in text


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_the_backend_asks_for_nvcc_only_where_it_is_missing(setup, machine, kind):
    hook = f"get_requires_for_build_{kind}"
    machine.environment.setattr(setup.build_meta, hook, lambda config_settings: ["others"])
    require = getattr(setup, hook)
    wheels = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime"]
    assert require() == ["others", *(f"{wheel}>=13.0,<14" for wheel in wheels)]
    machine.environment.setenv("GPUOPS_CUDA", "0")
    assert require() == ["others"]
    assert setup.find_nvcc() is None
    machine.environment.delenv("GPUOPS_CUDA")
    machine.nvcc("system/bin/nvcc")
    assert require() == ["others"]


def test_the_cuda_runtime_belongs_to_the_nvcc(setup, machine):
    lines = ["#$ TOP=/t", '#$ LIBRARIES=  "-L/t/lib/stubs" "-L/t/my lib"', "#$ gcc -L/elsewhere"]
    nvcc = machine.program("path/nvcc", *(f"echo '{line}' >&2" for line in lines))
    assert setup.cudart(nvcc) == [
        "-L/t/lib/stubs",
        "-L/t/my lib",
        *("-lcudart_static", "-lrt", "-lpthread", "-ldl"),
    ]


def test_the_fake_cuda_runtime_must_be_there(setup, machine):
    machine.environment.setenv("GPUOPS_CUDART", str(machine.folder))
    with pytest.raises(setup.PlatformError, match=r"there is no libcudart\.so in "):
        setup.cudart("nvcc")
    machine.program("libcudart.so")
    folder = machine.folder
    assert setup.cudart("nvcc") == [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lcudart"]


# GPU architectures.


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("90", ["90"]),
        ("75;80;90", ["75", "80", "90"]),
        (" 75 80,90 ", ["75", "80", "90"]),
        ("9.0 12.0", ["90", "120"]),
        ("sm_90 compute_100", ["90", "100"]),
        ("90a 100F", ["90a", "100f"]),
    ],
)
def test_architectures_are_written_in_many_ways(setup, text, names):
    assert setup.parse_architectures(text, KNOWN) == names


@pytest.mark.parametrize("text", ["70", "80 ampere", "9", "90b", "sm90", "1", "٩٠"])
def test_unknown_architecture_names_the_known_ones(setup, text):
    with pytest.raises(setup.PlatformError) as caught:
        setup.parse_architectures(text, KNOWN)
    word = text.split()[-1]
    assert str(caught.value) == (
        f"GPUOPS_CUDA_ARCHS={text!r} asks for {word!r}, but nvcc does not know it. Name any of "
        "75, 80, 90, 100, 103, 120, like this: GPUOPS_CUDA_ARCHS='80 90'."
    )


def test_native_without_a_gpu(setup, machine):
    with pytest.raises(setup.PlatformError, match="asks for 'native', but there is no GPU here"):
        setup.parse_architectures("native", KNOWN)


def test_architectures_are_the_wanted_else_the_local_else_the_usual(setup, machine):
    nvcc = machine.nvcc()
    assert setup.architectures(nvcc) == ["75", "80", "90", "100", "120"]
    machine.program("path/nvidia-smi", "echo 12.0", "echo 9.0", "echo 9.0")
    assert setup.architectures(nvcc) == ["90", "120"]
    machine.environment.setenv("GPUOPS_CUDA_ARCHS", "100 90a native 80")
    assert setup.architectures(nvcc) == ["80", "90", "90a", "100", "120"]


@pytest.mark.parametrize("answer", ["echo 'No devices were found'; exit 6", "echo 7.0", "exit 9"])
def test_a_gpu_that_nvcc_cannot_serve_does_not_count(setup, machine, answer):
    machine.program("path/nvidia-smi", answer)
    assert setup.architectures(machine.nvcc()) == ["75", "80", "90", "100", "120"]


def test_nvcc_that_does_not_work(setup, machine):
    nvcc = machine.program("path/nvcc", "echo not today; exit 1")
    with pytest.raises(setup.PlatformError, match=r"nvcc does not say .*\n\nnot today\n"):
        setup.architectures(nvcc)


def test_later_architectures_share_the_front_half_of_the_work(setup, monkeypatch):
    monkeypatch.delenv("GPUOPS_CUDART", raising=False)
    flags = setup.cuda_flags(["75", "86", "90a", "100", "120"], [])
    assert [flag for flag in flags if "gencode" in flag] == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_80,code=sm_86",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=sm_100",
        "-gencode=arch=compute_90,code=sm_120",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_the_last_architecture_is_built_as_ptx_too(setup):
    flags = setup.cuda_flags(["80", "90"], ["-std=c++17", "-fsanitize=address,undefined"])
    assert [flag for flag in flags if "gencode" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    # nvcc would cut the host flag in two at a bare comma.
    assert flags[-1] == r"-Xcompiler=-fsanitize=address\,undefined"


# The compilers.


def test_no_compiler(setup, machine):
    with pytest.raises(setup.PlatformError) as caught:
        setup.find_compiler(["CC"], ["cc", "gcc"], "C")
    assert str(caught.value) == (
        "there is no C compiler: PATH has none of cc, gcc. Install one (on Debian and Ubuntu "
        "`apt install g++`), or name yours in CC."
    )


def test_compiler_of_the_environment(setup, machine):
    machine.program("path/cc")
    machine.program("path/ccache")
    assert setup.find_compiler(["CC"], ["gcc", "cc"], "C") == ["cc"]
    machine.environment.setenv("CC", "ccache my-cc -m64")
    assert setup.find_compiler(["CC"], ["gcc", "cc"], "C") == ["ccache", "my-cc", "-m64"]
    machine.environment.setenv("CC", "no-such-cc")
    with pytest.raises(setup.PlatformError, match="CC names a compiler that is not there: no-such"):
        setup.find_compiler(["CC"], ["gcc", "cc"], "C")


@needs_cc
def test_flags_are_tried_one_by_one(setup, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-DMINE='a b'")
    wishes = ["-fno-such-flag|-fstack-protector", "-fno-such-flag", "-g"]
    flags = setup.hardened(["cc"], ["-O1"], wishes, setup.user_flags("CFLAGS"), ".c")
    assert flags == ["-O1", "-fstack-protector", "-g", "-DMINE=a b"]


@needs_cc
def test_a_warning_of_the_users_own_flags_costs_no_hardening(setup):
    user = ["-DTWICE=1", "-DTWICE=2"]
    flags = setup.hardened(["cc"], ["-O1"], ["-fstack-protector", "-fno-such-flag"], user, ".c")
    assert flags == ["-O1", "-fstack-protector", *user]


@needs_cc
def test_sanitizers_are_not_fortified(setup):
    user = ["-fsanitize-recover=undefined"]
    flags = setup.hardened(["cc"], ["-O2"], ["-D_FORTIFY_SOURCE=2", "-g"], user, ".c")
    assert flags == ["-O2", "-g", *user]


def test_cxxflags_are_cflags_unless_given(setup, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-g -O1")
    monkeypatch.delenv("CXXFLAGS", raising=False)
    assert setup.cxx_user_flags() == ["-g", "-O1"]
    monkeypatch.setenv("CXXFLAGS", "-O2")
    assert setup.cxx_user_flags() == ["-O2"]
    monkeypatch.setenv("CXXFLAGS", "")
    assert setup.cxx_user_flags() == []


def test_the_users_optimization_comes_last(setup, monkeypatch):
    """nvcc would put an -O of its own behind those of the host compiler."""
    monkeypatch.delenv("GPUOPS_CUDART", raising=False)
    flags = setup.cuda_flags(["90"], ["-O3", "-O1"])
    assert [flag for flag in flags if "-O" in flag] == ["-Xcompiler=-O3", "-Xcompiler=-O1"]


def test_compiler_that_cannot_compile(setup, machine):
    cc = machine.program("path/cc", "echo cannot find stdio.h; exit 1")
    with pytest.raises(setup.CompileError) as caught:
        setup.hardened([cc], ["-O1"], [], [], ".c")
    text = str(caught.value)
    assert text.startswith(f"{cc} cannot build an empty function:\n\ncannot find stdio.h\n")
    assert f"The command was:\n{cc} -O1 -c " in text


def test_host_compiler_that_is_too_new_for_nvcc(setup):
    output = "crt/host_config.h:1: error: #error -- unsupported GNU version! gcc versions later..."
    result = subprocess.CompletedProcess(["nvcc", "-c", "a b.cu"], 1, stdout=output)
    text = setup.explain("could not compile a b.cu", result)
    assert text.startswith(f"could not compile a b.cu:\n\n{output}\n")
    assert "The command was:\nnvcc -c 'a b.cu'\n" in text
    assert text.endswith("name an older one, like CXX=g++-13.")


@pytest.mark.parametrize("numpy", [None, types.SimpleNamespace(__version__="1.26.4")])
def test_no_headers_of_numpy_2(setup, monkeypatch, numpy):
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    with pytest.raises(setup.PlatformError) as caught:
        setup.compile_steps(["no-cc"], ["no-c++"], None, limited_api=True, jobs=1)
    assert str(caught.value).startswith("the C headers of NumPy 2 are missing. Build with `pip ")


def test_no_headers_of_python(setup, monkeypatch, tmp_path):
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(setup.PlatformError, match=r"there is no Python\.h in .*python3-dev"):
        setup.header_folders()


# Only what is stale is compiled again.


@pytest.fixture
def project(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    for name in ("csrc", "kernels"):
        (tmp_path / name).mkdir()
    (tmp_path / "kernels" / "size.h").write_text("#define SIZE 1\n")
    (tmp_path / "csrc" / "file.c").write_text('#include "../kernels/size.h"\nint table[SIZE];\n')
    return tmp_path


@needs_cc
def test_objects_follow_their_headers(setup, project, capfd):
    step = setup.Step(["cc"], project / "objects")
    header = project / "kernels" / "size.h"

    def compiled():
        target = setup.compile_source(step, "csrc/file.c")
        assert target == project / "objects" / "csrc-file.c.o"
        assert target.stat().st_size > 0
        return capfd.readouterr().out.startswith("csrc/file.c: ")

    assert compiled()
    assert not compiled()
    header.touch()
    assert not compiled()
    header.write_text("#define SIZE 2\n")
    assert compiled()
    (project / "kernels" / "unrelated.h").write_text("\n")
    assert not compiled()
    os.utime(header, (0, 0))
    header.write_text("#define SIZE 3\n")
    os.utime(header, (0, 0))
    assert compiled()
    (project / "objects" / "csrc-file.c.o").unlink()
    assert compiled()
    assert sorted(os.listdir(project / "objects")) == ["csrc-file.c.json", "csrc-file.c.o"]


@needs_cc
def test_failed_compilation_shows_the_error_and_stays_stale(setup, project):
    step = setup.Step(["cc"], project / "objects")
    header = project / "kernels" / "size.h"
    target = setup.compile_source(step, "csrc/file.c")
    header.write_text("#define SIZE nonsense\n")
    for _ in range(2):
        with pytest.raises(setup.CompileError) as caught:
            setup.compile_source(step, "csrc/file.c")
        text = str(caught.value)
        assert text.startswith("could not compile csrc/file.c:\n\n")
        assert "nonsense" in text
        assert "The command was:\ncc -MMD" in text
    header.write_text("#define SIZE 3\n")
    assert setup.compile_source(step, "csrc/file.c") == target


def test_objects_belong_to_flags_and_versions_not_to_places(setup):
    step = setup.make_step(["/a/nvcc"], ["-O3"], ["13.0"], ["/a/include"])
    assert step.command == ["/a/nvcc", "-O3", "-Ikernels", "-isystem/a/include"]
    same = setup.make_step(["/b/nvcc"], ["-O3"], ["13.0"], ["/b/include"])
    assert same.objects == step.objects
    assert setup.make_step(["/a/nvcc"], ["-O2"], ["13.0"]).objects != step.objects
    assert setup.make_step(["/a/nvcc"], ["-O3"], ["13.1"]).objects != step.objects


def test_wheels_hold_nothing_of_deleted_modules(setup, project, monkeypatch):
    stale = project / "build" / "lib.linux-x86_64" / "gpuops" / "deleted.py"
    kept = project / "build" / "objects" / "file.o"
    for path in (stale, kept):
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(setup.build_meta, "build_wheel", lambda *arguments: arguments)
    assert setup.build_wheel("folder") == ("folder", None, None)
    assert not stale.exists()
    assert kept.exists()


def test_the_source_archive_holds_what_builds_and_tests(setup):
    from setuptools import Distribution

    files = set(setup.BuildCore(Distribution()).get_source_files())
    assert {"kernels/gpuops.h", "kernels/ops.def", "kernels/gather.cu"} <= files
    assert {"csrc/module.c", "tests/conftest.py", "tests/test_build.py"} <= files
    assert not [name for name in files if name.endswith((".so", ".pyc", ".o"))]


# The built module.


@pytest.fixture(scope="module")
def library():
    from gpuops import _core

    return _core.__file__


def inspect(*command):
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not there")
    environment = {**os.environ, "LC_ALL": "C", "LD_PRELOAD": ""}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


def skip_if_sanitized(library):
    if "san_" in inspect("nm", "-D", "--undefined-only", library):
        pytest.skip("a build for the sanitizers, which needs their libraries")


def test_one_symbol_is_exported(library):
    lines = inspect("nm", "-D", "--defined-only", library).splitlines()
    assert [line.split()[-1] for line in lines] == ["PyInit__core"]


def test_only_the_c_library_is_needed(library):
    skip_if_sanitized(library)
    lines = inspect("readelf", "-dW", library).splitlines()
    needed = {line.split("[")[1].partition(".so")[0] for line in lines if "NEEDED" in line}
    loader = {name for name in needed if name.startswith("ld-linux")}
    assert needed - loader <= {"libc", "libm", "libpthread", "libdl", "librt"}


def test_the_module_is_hardened(library):
    dynamic = inspect("readelf", "-dW", library)
    assert "BIND_NOW" in dynamic or "NOW" in dynamic.partition("FLAGS_1")[2]
    assert "TEXTREL" not in dynamic
    segments = inspect("readelf", "-lW", library)
    assert "GNU_RELRO" in segments
    stack = next(line for line in segments.splitlines() if "GNU_STACK" in line)
    assert "RWE" not in stack
    assert "__stack_chk_fail" in inspect("nm", "-D", "--undefined-only", library)


def test_functions_of_the_c_library_are_fortified(library):
    skip_if_sanitized(library)
    assert "printf_chk" in inspect("nm", "-D", "--undefined-only", library)


@pytest.fixture(scope="module")
def element_loops(library):
    """The machine code of the CPU's loops over elements, by their name and the whole symbol."""
    skip_if_sanitized(library)
    found = {}
    for function in inspect("objdump", "-d", "--no-show-raw-insn", library).split("\n\n"):
        symbol = function.partition("\n")[0]
        # The name with its length, as compilers write it; not one of its outlined parts.
        loop = re.search(r"<_Z\d+(each_plain|each_avx2|each_avx512)I", symbol)
        if loop and ".cold" not in symbol:
            found[loop[1], symbol] = function
    if not found:
        pytest.skip("the names of functions were stripped")
    return found


def test_the_loops_of_a_level_have_its_instructions(element_loops):
    """A compiler may not know the name of an instruction set, and only warn of it."""
    if platform.machine() != "x86_64":
        pytest.skip("this processor has no levels")
    registers = {"each_avx2": "%ymm", "each_avx512": "%zmm"}
    found = dict.fromkeys(registers, 0)
    for (name, symbol), code in element_loops.items():
        if name in registers and "SigmoidOf" in symbol:
            assert registers[name] in code, symbol
            found[name] += 1
    assert min(found.values()) >= 4, found


def test_loops_over_elements_are_not_fortified(element_loops):
    """A memcpy of one element that is checked is a call, and takes ten times as long."""
    for (_, symbol), code in element_loops.items():
        assert "memcpy" not in code, symbol


def test_the_module_serves_every_later_python(library):
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("Python without the GIL has no limited API")
    assert Path(library).name == "_core.abi3.so"


def test_the_version_is_that_of_the_header(setup, library):
    import gpuops

    header = (ROOT / "kernels" / "gpuops.h").read_text()
    assert f'#define GPUOPS_VERSION "{gpuops.__version__}"\n' in header
