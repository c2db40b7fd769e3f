"""CUDA C++ from a string, compiled at run time by NVRTC, NVIDIA's library for this."""

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from . import _cache, _core, _signatures
from ._jit import CompileError


def compile_named(
    name: str,
    source: str,
    options: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    device: str | int | None = None,
    *,
    lineinfo: bool = False,
) -> "_core.Module":
    """Do what `compile` does, for a source that messages shall call `name`."""
    if not isinstance(source, str):
        raise TypeError(
            f"source must be a str of CUDA C++, not {type(source).__name__}: read a file with "
            "pathlib.Path(...).read_text()"
        )
    # NVRTC takes no notice of blanks around them.
    given = tuple(map(str.strip, _strings("options", options, "options=['-DN=16']")))
    expressions = _strings("name_expressions", name_expressions, "name_expressions=['f<int>']")
    contents = _headers(headers)
    target = _target(given, device)
    nvrtc = find_nvrtc()
    words = (*target.options, *_defaults(given, lineinfo), *given)
    words += tuple(f"--include-path={folder}" for folder in nvrtc.folders)

    program = Program(name, source, words, expressions, contents)
    files = read_included(program, nvrtc.folders)
    key = _cache.key_of([*_identity(program, nvrtc), files]) if files is not None else None
    compiled = _unpacked(_cache.load(key)) if key is not None else None
    if compiled is None:
        compiled = run_nvrtc(program, nvrtc)
        # What has changed on disk meanwhile belongs to another key.
        if key is not None and read_included(program, nvrtc.folders) == files:
            _cache.store(key, _packed(compiled))
    if compiled.log:
        warnings.warn(f"NVRTC warns:\n{compiled.log}", UserWarning, stacklevel=3)
    return _core._load_module(compiled.cubin, compiled.kernels, target.device, compiled.globals)


# Arguments.


def _strings(name: str, values: Sequence[str], example: str) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(
            f"{name} must be a sequence of str, such as {example}, not {type(values).__name__}"
        )
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{name} must hold str, such as {example}, not {type(value).__name__}")
    return tuple(values)


def _headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise TypeError(
            "headers must be a mapping of names to contents, such as {'my.h': '#define N 16'}, "
            f"not {type(headers).__name__}"
        )
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(
                f"headers must map str to str, not {type(name).__name__} to {type(text).__name__}"
            )
    return dict(headers)


class Target(NamedTuple):
    """What to compile for: the options that say it, and where to load the result, if anywhere."""

    options: tuple[str, ...]
    device: int | None


def _target(options: tuple[str, ...], device: str | int | None) -> Target:
    if isinstance(device, str) and device == "cpu":
        raise ValueError(
            'device="cpu": kernels run on a GPU; without one, name an architecture in the options, '
            "such as --gpu-architecture=sm_90, and no device"
        )
    linked = [option for option in options if re.fullmatch(r"--?(dlto|dc|device-c)", option)]
    if _value_of(options, ("-rdc", "--relocatable-device-code")) == "true":
        linked.append("-rdc=true")
    if linked:
        raise ValueError(
            f"{linked[0]} makes code that has to be linked before it can be loaded: leave it out, "
            "and put all of the source into one string, or in headers="
        )
    architecture = _value_of(options, ("-arch", "--gpu-architecture"))
    if architecture is None:
        ordinal, major, minor = _core._find_device(device, "compile")
        return Target((f"--gpu-architecture=sm_{major}{minor}",), ordinal)
    if not architecture.startswith("sm_"):
        raise ValueError(
            f"--gpu-architecture={architecture} makes no machine code: expected that of a GPU, "
            "such as sm_90, or nothing for the GPU at hand"
        )
    if device is None and not _core.is_available():
        return Target((), None)
    ordinal, major, minor = _core._find_device(device, "compile")
    if _runs_on(architecture, major, minor):
        return Target((), ordinal)
    if device is None:
        return Target((), None)
    raise ValueError(
        f"cuda:{ordinal} is an sm_{major}{minor}, which cannot run code for {architecture}: leave "
        "--gpu-architecture out of the options, or device="
    )


def _value_of(options: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    """Return the value of an option, which may be a word of its own; the last one counts."""
    value = None
    for option, following in zip(options, (*options, "")[1:], strict=True):
        name, equals, rest = option.partition("=")
        if name in names:
            value = rest if equals else following
    return value


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether a GPU runs code for an architecture: one of its own line that is not younger."""
    found = re.fullmatch(r"sm_(\d+)(\d)([af]?)", architecture)
    if not found:
        return False
    same_line = int(found[1]) == major and int(found[2]) <= minor
    return same_line and (found[3] != "a" or int(found[2]) == minor)


def _defaults(options: tuple[str, ...], lineinfo: bool) -> list[str]:
    defaults = []
    if _value_of(options, ("-std", "--std")) is None:
        defaults.append("--std=c++17")
    if lineinfo and not {"-lineinfo", "--generate-line-info"} & set(options):
        defaults.append("--generate-line-info")
    return defaults


# Finding NVRTC.


class Nvrtc(NamedTuple):
    """The library that was opened, its version, and the folders of CUDA's headers.

    `files` are facts of the files, which tell one installation from another.
    """

    path: str | None
    version: tuple[int, int]
    folders: tuple[str, ...]
    files: tuple[tuple[str, int, int], ...]


_found: Nvrtc | None = None


def find_nvrtc() -> Nvrtc:
    """Open NVRTC; once it is found it stays, and until then every call looks again."""
    global _found
    if _found is None:
        _found = look_for_nvrtc()
    return _found


def look_for_nvrtc() -> Nvrtc:
    """Open NVRTC where it is found first; `CompileError` tells where it was looked for."""
    named = os.environ.get("GPUOPS_NVRTC")
    looked = []
    if named:
        try:
            return _opened(named)
        except OSError as error:
            raise CompileError(
                f"GPUOPS_NVRTC does not name NVRTC, the compiler of CUDA C++ at run time: {error}"
            ) from None
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        return _opened(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except ImportError:
        looked.append("cuda-pathfinder: not installed")
    except (RuntimeError, OSError) as error:
        looked.append(f"cuda-pathfinder: {error}")
    for path in (None, *_toolkit_paths()):
        try:
            return _opened(path)
        except OSError as error:
            looked.append(f"{path or 'the dynamic linker'}: {error}")
    places = "\n".join(f"  {place}" for place in looked)
    raise CompileError(
        "NVRTC, the compiler of CUDA C++ at run time, was not found. `pip install 'gpuops[jit]'` "
        "installs it; where there is one already, set GPUOPS_NVRTC to the path of its "
        f"libnvrtc.so. It was looked for with\n{places}"
    )


def _toolkits() -> list[str]:
    homes = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return [home for home in homes if home and os.path.isdir(home)]


def _toolkit_paths() -> list[str]:
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    paths = [os.path.join(home, "lib64", name) for home in _toolkits() for name in names]
    return [path for path in paths if os.path.exists(path)]


def _opened(path: str | None) -> Nvrtc:
    version = _core._nvrtc_open(path)
    if path is not None:
        _open_builtins(path, version)
    folders = _header_folders(path)
    # Each part of the headers may be renewed without the others.
    files = [path, *(os.path.join(folder, header) for folder in folders for header in _HEADERS)]
    found = [(file, os.stat(file)) for file in files if file is not None and os.path.exists(file)]
    facts = tuple((file, facts.st_size, facts.st_mtime_ns) for file, facts in found)
    return Nvrtc(path, version, folders, facts)


def _open_builtins(path: str, version: tuple[int, int]) -> None:
    """Open the library that NVRTC opens by its bare name when it compiles.

    It lies beside NVRTC, where that of 13.0 does not look, nor any when a sanitizer opens it
    instead; by that name a library is found that is open already.
    """
    major, minor = version
    beside = os.path.dirname(os.path.realpath(path))
    with contextlib.suppress(OSError):
        ctypes.CDLL(os.path.join(beside, f"libnvrtc-builtins.so.{major}.{minor}"))


# CUDA's headers come in parts, each with a wheel of its own, which need not all be there: its own,
# what those of C++ need of the compiler, and its C++ library.
_HEADERS = ("cuda_fp16.h", "crt/mma.h", "nv/target")


def _header_folders(path: str | None) -> tuple[str, ...]:
    """Return the folders of CUDA's headers: of each part that which is found first."""
    found = []
    for header in _HEADERS:
        folders = (each for each in _candidates(path) if os.path.isfile(os.path.join(each, header)))
        found += [*itertools.islice(folders, 1)]
    return tuple(dict.fromkeys(found))


def _candidates(path: str | None) -> Iterator[str]:
    for folder in _include_folders(path):
        yield os.path.join(folder, "cccl")  # CUDA 13's place of the C++ library
        yield folder


def _include_folders(path: str | None) -> Iterator[str]:
    if path:
        beside = os.path.dirname(os.path.dirname(os.path.realpath(path)))
        yield os.path.join(beside, "include")
        yield os.path.join(beside, "targets", "x86_64-linux", "include")
        yield os.path.join(os.path.dirname(beside), "cuda_runtime", "include")
    # Older versions of it look for libraries only.
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        pathfinder = importlib.import_module("cuda.pathfinder")
        if found := pathfinder.find_nvidia_header_directory("cudart"):
            yield found
    yield from (os.path.join(home, "include") for home in _toolkits())


# Compiling.


class Program(NamedTuple):
    """All that the result depends on, but for the files that it includes."""

    name: str
    source: str
    options: tuple[str, ...]
    expressions: tuple[str, ...]
    headers: dict[str, str]


class Compiled(NamedTuple):
    """A program in machine code.

    `globals` are the name expressions that stand for variables, with their names in the code, and
    `log` are the warnings.
    """

    cubin: bytes
    kernels: _signatures.Kernels
    globals: dict[str, str]
    log: str


def run_nvrtc(program: Program, nvrtc: Nvrtc) -> Compiled:
    """Compile a program; `CompileError` says where it cannot be."""
    result, cubin, log, lowered = _core._nvrtc_compile(
        _encoded(program.source),
        _encoded(program.name),
        tuple(map(os.fsencode, program.options)),
        {_encoded(name): _encoded(text) for name, text in program.headers.items()},
        tuple(map(_encoded, program.expressions)),
    )
    text = log.decode(errors="replace").strip()
    if result is not None or cubin is None:
        raise _compile_error(program, nvrtc, result or "NVRTC_SUCCESS", text)
    found = _core._cubin_kernels(cubin)
    expressions = {name.decode(): target for name, target in lowered.items()}
    sources = [program.source, *program.headers.values()]
    files = included_files(program, nvrtc.folders)
    texts = None if files is None else [text.decode(errors="replace") for text in files.values()]
    kernels = _signatures.describe_kernels(found, expressions, sources, program.options, texts)
    variables = {name: target for name, target in expressions.items() if target not in found}
    # What is no warning tells of precompiled headers and the like.
    told = _with_lines(program, text) if "warning" in text else ""
    return Compiled(cubin, kernels, variables, told)


def _encoded(text: str) -> bytes:
    """Encode text that may hold what the file system gave, or a lone surrogate of a notebook."""
    return text.encode(errors="surrogateescape")


def _compile_error(program: Program, nvrtc: Nvrtc, result: str, log: str) -> CompileError:
    version = ".".join(map(str, nvrtc.version))
    architecture = _value_of(program.options, ("-arch", "--gpu-architecture"))
    message = f"NVRTC {version} could not compile {program.name} for {architecture} ({result})"
    parts = [f"{message}:" if log else message, _with_lines(program, log)]
    parts.append(_advice(program, nvrtc, log))
    parts.append(f"Options: {' '.join(program.options)}")
    text = "\n\n".join(part for part in parts if part)
    return CompileError(text, name=result, log=log, options=program.options)


_HOST_HEADERS = re.compile(
    r"(std(io|lib|int|def|arg|bool)|string|math|assert|limits|float|time|errno|iostream|vector|"
    r"c(std\w+|string|math|assert|limits|float|time)|algorithm|type_traits|complex|array|tuple|"
    r"utility|functional|sys/.*|unistd)(\.h)?"
)


def _advice(program: Program, nvrtc: Nvrtc, log: str) -> str:
    missing = re.search(r"(?:cannot|could not) open source file \"([^\"]+)\"", log)
    if missing and _HOST_HEADERS.fullmatch(missing[1]):
        return (
            f"NVRTC has none of the host's headers, such as {missing[1]}: printf, assert and the "
            "functions of maths are there without one, and <cuda/std/...> has the C++ library."
        )
    if missing and not nvrtc.folders:
        return (
            "CUDA's headers were not found beside NVRTC, nor in CUDA_PATH and CUDA_HOME: "
            "`pip install 'gpuops[jit]'` installs them."
        )
    if missing:
        return (
            f"Pass it as headers={{'{missing[1]}': ...}}, or its folder as options=['-I...']. "
            f"These are looked in already: {', '.join(nvrtc.folders)}."
        )
    if "__nv_name_map" in log:
        return (
            "Each of name_expressions must name a kernel or a variable of the source, with all of "
            f"its template arguments: {', '.join(program.expressions)}."
        )
    if "invalid value for --gpu-architecture" in log:
        return "This NVRTC may be older than the GPU: `pip install -U 'gpuops[jit]'`."
    return ""


# Messages of the compiler.

_MESSAGE = re.compile(r"(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic error|error|warning|note)")
_REMARK = "Remark: The warnings can be suppressed with"
_LINES_AROUND = 2


def _with_lines(program: Program, log: str) -> str:
    """Put numbered lines of the source below each message, in place of the one that NVRTC shows."""
    texts = {program.name: program.source, **program.headers}
    sources = {name: text.split("\n") for name, text in texts.items()}
    told = [line.rstrip() for line in log.split("\n") if not line.startswith(_REMARK)]
    lines = []
    at = 0
    while at < len(told):
        lines.append(told[at])
        message = _MESSAGE.match(told[at])
        at += 1
        source = sources.get(message["file"]) if message else None
        if message is None or source is None or not 0 < int(message["line"]) <= len(source):
            continue
        number, caret = int(message["line"]), None
        quoted = told[at : at + 2]
        if len(quoted) == 2 and quoted[1].strip() == "^":
            # NVRTC puts two spaces before the line.
            caret = len(quoted[1]) - len("  ^")
            at += 2
        lines += _excerpt(source, number, caret)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _excerpt(source: list[str], number: int, caret: int | None) -> list[str]:
    first = max(number - _LINES_AROUND, 1)
    last = min(number + _LINES_AROUND, len(source))
    width = len(str(last))
    lines = []
    for i in range(first, last + 1):
        mark = ">" if i == number else " "
        lines.append(f"  {mark} {i:{width}} | {source[i - 1]}".rstrip())
        if i == number and caret is not None:
            # A tab stays one, so that the caret stands below its character.
            before = re.sub(r"[^\t]", " ", source[i - 1][:caret].ljust(caret))
            lines.append(f"    {'':{width}} | {before}^")
    return ["", *lines, ""]


# The cache: what an entry depends on, and what is in it.


def _identity(program: Program, nvrtc: Nvrtc) -> Iterator[bytes]:
    yield repr((_core.__version__, nvrtc, _core._driver_version())).encode()
    yield _encoded(program.source)
    yield repr((program.name, program.options, program.expressions)).encode()
    yield repr(sorted(program.headers.items())).encode()


def _packed(compiled: Compiled) -> bytes:
    head = json.dumps(
        {"kernels": compiled.kernels, "globals": compiled.globals, "log": compiled.log}
    ).encode()
    return len(head).to_bytes(8, "little") + head + compiled.cubin


def _unpacked(entry: bytes | None) -> Compiled | None:
    if entry is None:
        return None
    end = 8 + int.from_bytes(entry[:8], "little")
    head = json.loads(entry[8:end])
    kernels = {
        name: (lowered, None if parameters is None else tuple(map(tuple, parameters)))
        for name, (lowered, parameters) in head["kernels"].items()
    }
    return Compiled(entry[end:], kernels, head["globals"], head["log"])


# What may stand before the word of a directive.
_MARK = r"(?:#|%:)(?:\s|/\*.*?\*/)*+"
_INCLUDE = re.compile(
    _MARK + r"include\s*(?P<quoted>[<\"][^>\"\n]+[>\"])"
    r"|\b__has_include\s*\(\s*(?P<asked>[<\"][^>\"\n]+[>\"])",
    re.DOTALL,
)
# A name that a macro makes up, or the next file of the same name: nobody knows without a
# preprocessor. Nor is the same text always the same program where it asks for the time.
_UNKNOWN_INCLUDE = re.compile(
    _MARK + r"(?:include\s*[^<\"\s]|include_next|embed)"
    r"|\b__has_(?:include_next|embed|include\s*\(\s*[^<\"\s])"
    r"|\b__(?:DATE|TIME)__\b",
    re.DOTALL,
)
_OPTIONS_OF_FILES = re.compile(
    r"--?(pch|create-pch|use-pch|pch-dir|time|fdevice-time-trace)\b.*", re.DOTALL
)


def read_included(program: Program, folders: tuple[str, ...]) -> bytes | None:
    """Return what identifies the files that a program includes; None if that cannot be told."""
    files = included_files(program, folders)
    if files is None:
        return None
    return _cache.key_of(
        part for path, contents in sorted(files.items()) for part in (os.fsencode(path), contents)
    ).encode()


def included_files(program: Program, folders: tuple[str, ...]) -> dict[str, bytes] | None:
    """Return the files that a program includes, with their contents; None if that cannot be told.

    CUDA's own headers are told apart by `Nvrtc.files`. A file that is not found is noted too, for
    it may be there the next time.
    """
    if any(map(_OPTIONS_OF_FILES.fullmatch, program.options)):
        return None
    before = [f'#include "{name}"' for name in _values_of(program.options, _PRE_INCLUDE)]
    waiting = [(text, os.curdir) for text in (*before, program.source)]
    # What they include is looked for beside them, as if they were files.
    waiting += [(text, os.path.dirname(name)) for name, text in program.headers.items()]
    paths = _values_of(program.options, _INCLUDE_PATH)
    of_cuda = tuple(f"{folder}{os.sep}" for folder in folders)
    seen: dict[str, bytes] = {}
    while waiting:
        text, folder = waiting.pop()
        text = text.replace("\\\r\n", "").replace("\\\n", "")
        if _UNKNOWN_INCLUDE.search(text):
            return None
        for match in _INCLUDE.finditer(text):
            quoted = match["quoted"] or match["asked"]
            name = quoted[1:-1]
            if name in program.headers:
                continue
            places = [folder, *paths] if quoted.startswith('"') else paths
            path = _first_file(name, places)
            if path is None:
                seen[quoted] = b"absent"
            elif path not in seen and not path.startswith(of_cuda):
                seen[path] = _read(path)
                waiting.append((seen[path].decode(errors="replace"), os.path.dirname(path)))
    return seen


def _first_file(name: str, folders: Sequence[str]) -> str | None:
    paths = (os.path.join(folder, name) for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        return str(error).encode()


_INCLUDE_PATH = re.compile(r"(?:-I *|--include-path)=?(.*)", re.DOTALL)
_PRE_INCLUDE = re.compile(r"(?:-include|--pre-include)=?(.*)", re.DOTALL)


def _values_of(options: tuple[str, ...], pattern: re.Pattern[str]) -> list[str]:
    """Return the values of an option that may be given often, behind it or as the next word."""
    values = []
    for option, following in zip(options, (*options, "")[1:], strict=True):
        if found := pattern.fullmatch(option):
            values.append(found[1] or following)
    return values
