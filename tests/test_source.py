"""The rules of the source tree that a reviewer would otherwise have to look for."""

import re
import shutil
import subprocess

import pytest
from operators import OPERATORS, ROOT, without_comments

CODE = {".c", ".h", ".cu", ".cuh", ".def", ".py", ".pyi"}
TEXT = CODE | {".toml", ".md", ".cfg", ".txt", ""}

TOP_LEVEL = {
    "setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md",
    "gpuops", "csrc", "kernels", "tests", "benchmarks",
}  # fmt: skip


def tracked():
    """The files of the repository, as git sees them; without git (an sdist), all but builds."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]
    folders = sorted(TOP_LEVEL & {path.name for path in ROOT.iterdir()})
    return [path for name in folders for path in [ROOT / name, *(ROOT / name).rglob("*")]
            if path.is_file() and "__pycache__" not in path.parts]  # fmt: skip


FILES = tracked()


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def code_in(folder, *suffixes):
    """Name and text, without comments, of the C and CUDA files in a folder."""
    found = {
        name_of(path): without_comments(path.read_text())
        for path in FILES
        if path.parent == ROOT / folder and path.suffix in (suffixes or CODE)
    }
    assert found
    return found


def found_in(files, pattern):
    return [
        f"{name}: {match[0]}"
        for name, text in files.items()
        for match in re.finditer(pattern, text)
    ]


def test_the_lower_layer_knows_no_python():
    files = code_in("kernels")
    assert found_in(files, r"#\s*include\s*[<\"](Python\.h|numpy/|structmember\.h)[^\n]*") == []
    assert found_in(files, r"\b(Py[A-Z]\w*|_Py\w+|NPY_\w+|npy_\w+)\b") == []


def test_the_upper_layer_knows_no_cuda():
    files = code_in("csrc")
    assert found_in(files, r"#\s*include\s*[<\"][^>\"]*cuda[^>\"]*[>\"]") == []
    assert found_in(files, r"\bcu(da)?[A-Z]\w*") == []


def test_the_contract_is_plain():
    header = {"gpuops.h": code_in("kernels")["kernels/gpuops.h"]}
    includes = found_in(header, r"#\s*include\s*[<\"](?!std)[^\n]*")
    assert set(includes) == {'gpuops.h: #include "ops.def"'}
    assert found_in(header, r"\b(template|class|namespace|__global__|cudaError_t)\b") == []


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_each_operator_has_its_files(operator):
    kernel = ROOT / "kernels" / f"{operator.stem}.cu"
    source = kernel.read_text()
    assert f"plan_{operator.name}(" in source and f"run_{operator.name}(" in source
    test = ROOT / "tests" / f"test_{operator.name}.py"
    assert f"gpuops.{operator.name}(" in test.read_text()
    assert (ROOT / "benchmarks" / f"bench_{operator.stem}.py").is_file()


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_memcheck_calls_each_operator(operator):
    assert re.search(rf"gpuops\.{operator.name}\b", (ROOT / "tests/memcheck.py").read_text())


def test_every_kernel_file_belongs_to_something():
    """To an operator, whose stem its name begins with, or to what all share."""
    shared = {"runtime", "stream", "memory", "transfer", "copy", "convert", "each", "index"}
    shared |= {"run", "pipeline", "each_parts", "hello", "module", "pinned", "cast", "measure"}
    shared |= {"slab"}
    stems = {operator.stem for operator in OPERATORS}
    for path in (ROOT / "kernels").glob("*.cu"):
        of_an_operator = any(f"{path.stem}_".startswith(f"{stem}_") for stem in stems)
        assert path.stem in shared or of_an_operator, path.name


def test_kernels_are_launched_by_the_one_helper():
    assert found_in(code_in("kernels") | code_in("csrc"), r"<<<") == []
    assert len(found_in(code_in("kernels"), r"\bcudaLaunchKernel\w*\s*\(")) == 1


def test_cuda_is_called_in_seven_files_only():
    files = code_in("kernels")
    for stem in ("runtime", "stream", "memory", "transfer", "slab", "pinned", "module"):
        del files[f"kernels/{stem}.cu"]
    assert found_in(files, r"\bcuda[A-Z]\w+\s*\(") == []


def test_every_cuda_status_is_looked_at():
    """No call is a statement of its own, but the one that clears an error already looked at."""
    files = code_in("kernels", ".cu", ".cuh")
    assert found_in(files, r"[;{})]\s*cuda(?!GetLastError\b)[A-Z]\w+\s*\([^;]*;") == []


def test_device_code_never_stops_the_context():
    files = code_in("kernels", ".cu", ".cuh")
    assert found_in(files, r"\b(__trap|assert|abort|exit)\s*\(") == []


def test_the_gil_is_released_in_one_place():
    release = r"\b(PyEval_(SaveThread|ReleaseThread)|Py_BEGIN_ALLOW_THREADS|Py_UNBLOCK_THREADS)\b"
    assert len(found_in(code_in("csrc"), release)) == 1


def test_one_exported_symbol():
    files = code_in("csrc") | code_in("kernels")
    exports = found_in(files, r"\bPyMODINIT_FUNC\b(\s+\w+)?")
    assert exports == ["csrc/module.c: PyMODINIT_FUNC PyInit__core"]
    assert found_in(files, r"visibility\(\"default\"\)") == []


def test_the_limited_api_is_asked_for():
    assert "Py_LIMITED_API" in (ROOT / "setup.py").read_text() + "".join(code_in("csrc").values())


def test_nothing_prints_or_exits_across_the_border():
    files = code_in("kernels") | code_in("csrc")
    del files["kernels/hello.cu"]
    assert found_in(files, r"\b(printf|puts|fprintf|perror|abort|exit|_exit)\s*\(") == []


def text_files():
    return [path for path in FILES if path.suffix in TEXT]


def test_no_notes_to_self():
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X"]
    pattern = re.compile(r"\b(" + "|".join(words) + r")\b")
    assert [name_of(path) for path in text_files() if pattern.search(path.read_text())] == []


def test_no_paths_of_one_machine():
    folders = ["ho" + "me", "ro" + "ot", "wo" + "rk", "Us" + "ers", "bui" + "lds"]
    pattern = re.compile(r"(?<![\w.\-/}])/(" + "|".join(folders) + r")/\w")
    assert [name_of(path) for path in text_files() if pattern.search(path.read_text())] == []


def test_plain_text():
    problems = []
    for path in text_files():
        text = path.read_bytes()
        if not text:
            continue
        lines = text.decode().split("\n")
        problems += [f"{name_of(path)}: no newline at the end"] if lines[-1] else []
        problems += [f"{name_of(path)}: blank lines at the end"] if lines[-2:] == ["", ""] else []
        problems += [f"{name_of(path)}: carriage return"] if b"\r" in text else []
        for number, line in enumerate(lines, 1):
            if line != line.rstrip() and path.suffix in CODE:
                problems.append(f"{name_of(path)}:{number}: space at the end")
            if "\t" in line and path.suffix in CODE:
                problems.append(f"{name_of(path)}:{number}: tab")
            if len(line) > 100 and path.suffix in CODE:
                problems.append(f"{name_of(path)}:{number}: {len(line)} columns")
    assert problems == []


def test_top_level():
    entries = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert {entry for entry in entries if not entry.startswith(".")} - TOP_LEVEL == set()


def test_the_package_imports_itself_relatively():
    """The test builds are imported under another name, but for their command line."""
    for path in FILES:
        if path.parent == ROOT / "gpuops" and path.suffix in (".py", ".pyi"):
            found = re.findall(r"^\s*(?:from|import) gpuops\b.*", path.read_text(), re.MULTILINE)
            assert found == [] or path.name == "__main__.py"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_rows_of_a_table_have_as_many_cells_as_its_head(name):
    cells, problems = None, []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        if found is not None and cells not in (None, found):
            problems.append(f"{name}:{number}: {found - 1} cells under a head of {cells - 1}")
        cells = found if found is None or cells is None else cells
    assert problems == []
