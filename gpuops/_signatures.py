"""What the kernels of a module are called and take: read from their mangled names and the source.

The compiler mangles the name of a C++ function together with the types of its parameters (Itanium
C++ ABI, chapter 5.1), so that of such kernels the types are known for certain. Of `extern "C"`
kernels, and of the names of parameters, there is the declaration in the source, which is read
without a preprocessor: what it leaves in doubt is unknown here, and then only the sizes of
arguments are checked.

A type is a word that the launch of a kernel understands: "float32", "const int8*", "void*" for a
pointer to anything, "value" for a structure or an enumeration, and None for an unknown type.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Parameters: TypeAlias = tuple[tuple[str | None, str | None], ...]
Kernels: TypeAlias = dict[str, tuple[str, Parameters | None]]


def describe_kernels(
    lowered_names: Iterable[str],
    expressions: Mapping[str, str],
    sources: Sequence[str],
    options: Sequence[str] = (),
    files: Sequence[str] | None = (),
) -> Kernels:
    """Name the kernels of a module as their users do, and tell what they take.

    Parameters
    ----------
    lowered_names : iterable of str
        The names in the machine code.
    expressions : mapping of str to str
        The name expressions, and what they were lowered to.
    sources : sequence of str
        The source, and the headers that came with it.
    options : sequence of str
        Those of the compiler, which may define macros.
    files : sequence of str, optional
        The texts of files that were included, which are not read for declarations; None: it is not
        known which ones were.

    Returns
    -------
    dict
        By public name: the lowered name, and the parameters as pairs of name and type. A kernel
        that a name expression stands for is known by that; any other by its name in the source,
        with its parameters behind it where several have the same name.
    """
    lowered_names = list(lowered_names)
    functions = {lowered: demangle(lowered) for lowered in lowered_names}
    plain = [function.name if function else lowered for lowered, function in functions.items()]
    if None not in functions.values():
        # Nothing but names is wanted then, and no file can give these another meaning.
        sources = [source for source in sources if "__global__" in source]
    declared = read_declarations(sources, options, files)
    # In the order of the source; the machine code has one of its own.
    order = {name: position for position, name in enumerate(declared)}
    short_names = {
        lowered: _short(function.name) if function else lowered
        for lowered, function in functions.items()
    }
    kernels: Kernels = {}
    for lowered in sorted(functions, key=lambda name: order.get(short_names[name], len(order))):
        function = functions[lowered]
        parameters = _parameters(lowered, function, declared)
        names = [name for name, target in expressions.items() if target == lowered]
        if not names and function:
            is_alone = plain.count(function.name) == 1
            names = [function.name if is_alone else function.spelling]
        for name in names or [lowered]:
            kernels[name] = (lowered, parameters)
    return kernels


def _parameters(
    lowered: str, function: "Function | None", declared: Mapping[str, list[Parameters]]
) -> Parameters | None:
    if function is None:
        same = declared.get(lowered, [])
        return _agreed(same) if len({len(one) for one in same}) == 1 else None
    # Parameters of C++ kernels have their names from the source, where it leaves no doubt.
    same = [
        one for one in declared.get(_short(function.name), []) if len(one) == len(function.types)
    ]
    names = [name for name, _ in _agreed(same)] if same else [None] * len(function.types)
    words = map(_word_of_parameter, function.types)
    return tuple(zip(names, words, strict=True))


def _word_of_parameter(kind: "Type") -> str | None:
    """Return the word for the type of a parameter, in which nothing is hidden behind a name."""
    is_reference = kind.spelling.endswith("&")
    is_builtin = kind.spelling in _BUILTIN.values()
    return kind.word or (None if is_reference or is_builtin else "value")


def _short(name: str) -> str:
    """Return a name without its namespaces and template arguments."""
    return re.sub(r"<.*", "", name).rpartition("::")[2]


def _agreed(declarations: Sequence[Parameters]) -> Parameters:
    """Keep what several declarations of one kernel, of equal length, agree about.

    A declaration may leave a name out, but no type.
    """
    agreed = []
    for same in zip(*declarations, strict=True):
        names = {name for name, _ in same if name is not None}
        types = {word for _, word in same}
        agreed.append(
            (names.pop() if len(names) == 1 else None, types.pop() if len(types) == 1 else None)
        )
    return tuple(agreed)


# Types.

SCALARS = {
    "bool": "bool",
    "char": "char",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "long": "int64",
    "unsigned long": "uint64",
    "long long": "int64",
    "unsigned long long": "uint64",
    "float": "float32",
    "double": "float64",
    "char16_t": "uint16",
    "char32_t": "uint32",
    "wchar_t": "int32",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
}
_COMPLEX = {"float": "complex64", "double": "complex128"}
_COMPLEX_TEMPLATES = re.compile(r"(?:thrust::|cuda::std::)(?:\w+::)*complex<(float|double)>")


def _word_of(spelling: str) -> str | None:
    """Return the word for a type that is no pointer; None for a structure or an enumeration."""
    is_complex = _COMPLEX_TEMPLATES.fullmatch(spelling)
    return _COMPLEX[is_complex[1]] if is_complex else SCALARS.get(spelling)


def _pointer_to(word: str | None, is_const: bool) -> str:
    return ("const " if is_const else "") + (word or "void") + "*"


# Mangled names.


class Type(NamedTuple):
    """A type, as C++ spells it and as a word."""

    spelling: str
    word: str | None
    is_const: bool = False


class Function(NamedTuple):
    """A function: its qualified name with template arguments, and the types of its parameters."""

    name: str
    types: tuple[Type, ...]

    @property
    def spelling(self) -> str:
        """The name with the parameters behind it."""
        return f"{self.name}({', '.join(kind.spelling for kind in self.types)})"


def demangle(lowered: str) -> Function | None:
    """Read a mangled name; None for one that is not mangled, or in a way that is not known here."""
    if not lowered.startswith("_Z"):
        return None
    try:
        return _Demangler(lowered).function()
    except (ValueError, IndexError, RecursionError):
        return None


_BUILTIN = {
    "v": "void", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char",
    "s": "short", "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long",
    "m": "unsigned long", "x": "long long", "y": "unsigned long long", "n": "__int128",
    "o": "unsigned __int128", "f": "float", "d": "double", "e": "long double", "w": "wchar_t",
    "Ds": "char16_t", "Di": "char32_t", "Du": "char8_t", "Dn": "std::nullptr_t",
}  # fmt: skip
_LITERALS = {"i": "", "j": "u", "l": "l", "m": "ul", "x": "ll", "y": "ull"}


class _Demangler:
    """One pass over a mangled name. Names are types here too: a substitution can be either."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 2
        self._seen: list[Type] = []
        self._arguments: list[Type] = []

    def function(self) -> Function:
        name = self._name(of_function=True).spelling
        if name.endswith(">"):
            self._type()  # that of the result, which only templates have
        types = []
        while self._at < len(self._text) and self._text[self._at] != ".":
            types.append(self._type())
        if [kind.spelling for kind in types] == ["void"]:
            types = []
        return Function(name, tuple(types))

    def _take(self, *choices: str) -> str:
        for choice in choices:
            if self._text.startswith(choice, self._at):
                self._at += len(choice)
                return choice
        return ""

    def _number(self, digits: str = "0123456789") -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in digits:
            self._at += 1
        return self._text[start : self._at]

    def _remember(self, kind: Type) -> Type:
        self._seen.append(kind)
        return kind

    def _name(self, of_function: bool = False) -> Type:
        if self._take("N"):
            return self._nested(of_function)
        if self._take("St"):
            name = _named(f"std::{self._source_name()}")
        elif self._text[self._at] == "S":
            name = self._substitution()
            return self._instance(name, of_function) if self._text[self._at] == "I" else name
        else:
            name = _named(self._source_name())
        if self._text[self._at : self._at + 1] != "I":
            return name
        return self._instance(self._remember(name), of_function)

    def _nested(self, of_function: bool) -> Type:
        while self._take("r", "V", "K", "R", "O"):
            pass
        name = None
        while not self._take("E"):
            if self._text[self._at] == "I" and name is not None:
                name = self._instance(name, of_function)
            elif self._take("St"):
                name = _named("std")
                continue
            elif self._text[self._at] == "S" and name is None:
                name = self._substitution()
                continue
            elif self._text[self._at] == "T" and name is None:
                name = self._template_parameter()
            else:
                part = self._source_name()
                name = _named(part if name is None else f"{name.spelling}::{part}")
            if self._text[self._at] != "E":
                self._remember(name)
        if name is None:
            raise ValueError("an empty name")
        return name

    def _source_name(self) -> str:
        self._take("L")  # of internal linkage
        length = int(self._number())
        name = self._text[self._at : self._at + length]
        if len(name) < length:
            raise ValueError("a name is cut off")
        self._at += length
        while self._take("B"):  # an ABI tag
            self._source_name()
        return "(anonymous namespace)" if name.startswith("_GLOBAL__N") else name

    def _instance(self, template: Type, of_function: bool) -> Type:
        arguments = self._template_arguments()
        if of_function:
            self._arguments = arguments
        return _named(f"{template.spelling}<{', '.join(one.spelling for one in arguments)}>")

    def _template_arguments(self) -> list[Type]:
        if not self._take("I"):
            raise ValueError("no template arguments")
        arguments = []
        while not self._take("E"):
            if self._take("J"):  # a pack
                while not self._take("E"):
                    arguments.append(self._template_argument())
            else:
                arguments.append(self._template_argument())
        return arguments

    def _template_argument(self) -> Type:
        if not self._take("L"):
            return self._type()
        code = self._text[self._at]
        of_kind = self._type()
        sign = "-" if self._take("n") else ""
        value = sign + self._number()
        if not value or not self._take("E"):
            raise ValueError("a literal of an unknown kind")
        if code == "b":
            return Type("true" if value == "1" else "false", None)
        suffix = _LITERALS.get(code)
        return Type(f"({of_kind.spelling}){value}" if suffix is None else value + suffix, None)

    def _substitution(self) -> Type:
        self._take("S")
        if self._take("_"):
            return self._seen[0]
        digits = self._number("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        if not self._take("_"):
            raise ValueError("an abbreviation of the standard library")
        return self._seen[int(digits, 36) + 1]

    def _template_parameter(self) -> Type:
        self._take("T")
        digits = self._number()
        if not self._take("_"):
            raise ValueError("a template parameter of an unknown kind")
        return self._arguments[int(digits) + 1 if digits else 0]

    def _type(self) -> Type:
        qualifiers = set()
        while qualifier := self._take("r", "V", "K"):
            qualifiers.add(qualifier)
        if qualifiers:
            return self._remember(_qualified(self._type(), qualifiers))
        if self._take("P"):
            return self._remember(_pointer(self._type()))
        if reference := self._take("R", "O"):
            target = self._type()
            return self._remember(Type(target.spelling + {"R": "&", "O": "&&"}[reference], None))
        if self._take("A"):
            length = self._number()
            if not self._take("_"):
                raise ValueError("an array of an unknown kind")
            element = self._type()
            spelling = f"{element.spelling} [{length}]"
            return self._remember(Type(spelling, element.word, element.is_const))
        if self._take("F"):
            self._take("Y")
            result, *types = self._types_until_end()
            inside = ", ".join(kind.spelling for kind in types if kind.spelling != "void")
            return self._remember(Type(f"{result.spelling} ({inside})", None))
        if self._text[self._at] == "T":
            return self._remember(self._template_parameter())
        if self._text[self._at] == "S" and self._text[self._at + 1] != "t":
            found = self._substitution()
            if self._text[self._at : self._at + 1] != "I":
                return found
            return self._remember(self._instance(found, of_function=False))
        if self._text[self._at] in "NS0123456789":
            return self._remember(self._name())
        if code := self._take(*_BUILTIN):
            return _named(_BUILTIN[code])
        raise ValueError("a type of an unknown kind")

    def _types_until_end(self) -> list[Type]:
        types = []
        while not self._take("E"):
            types.append(self._type())
        return types


def _named(spelling: str) -> Type:
    return Type(spelling, _word_of(spelling))


def _qualified(kind: Type, qualifiers: set[str]) -> Type:
    words = [word for code, word in (("K", "const"), ("V", "volatile")) if code in qualifiers]
    behind = kind.spelling.endswith("*")
    spelling = " ".join([kind.spelling, *words] if behind else [*words, kind.spelling])
    return Type(spelling, kind.word, kind.is_const or "K" in qualifiers)


def _pointer(target: Type) -> Type:
    word = None if target.word is None or target.word.endswith("*") else target.word
    return Type(f"{target.spelling}*", _pointer_to(word, target.is_const))


# Declarations in the source.

_TOKEN = re.compile(
    r"""
    (?P<directive> ^[^\S\n]*\#[^\n]* )
  | (?P<skip> //[^\n]* | /\*.*?\*/ | [^\S\n]+ )
  | (?P<raw> \bR"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)" )
  | (?P<text> "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
  | (?P<word> [A-Za-z_]\w* )
  | (?P<number> \.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])* )
  | (?P<mark> :: | \[\[ | \]\] | . | \n )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_DEFINITION = re.compile(r"\s*#\s*define\s+([A-Za-z_]\w*)(\(?)(.*)", re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_OPENING = {"(": ")", "[": "]", "{": "}", "[[": "]]"}

# What may stand between __global__ and the name of a kernel, with an argument in brackets.
_ATTRIBUTES = {
    "__launch_bounds__", "__cluster_dims__", "__block_size__", "__maxnreg__", "__attribute__",
    "__align__", "alignas",
}  # fmt: skip
_NO_PART_OF_TYPE = {
    "__restrict__", "__restrict", "restrict", "__grid_constant__", "register", "struct", "class",
    "enum", "union", "typename", "volatile",
}  # fmt: skip
_ARITHMETIC = {"unsigned", "signed", "int", "long", "short", "char", "float", "double", "bool"}
_NAMED_TYPES = {
    **{f"int{bits}_t": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}_t": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{name: SCALARS[name] for name in ("char16_t", "char32_t", "wchar_t")},
    **{name: SCALARS[name] for name in ("__half", "__nv_bfloat16")},
    "size_t": "uint64",
    "ptrdiff_t": "int64",
    "intptr_t": "int64",
    "uintptr_t": "uint64",
    "half": "float16",
    "nv_bfloat16": "bfloat16",
    "cuComplex": "complex64",
    "cuFloatComplex": "complex64",
    "cuDoubleComplex": "complex128",
}

# CUDA's vectors, which are passed by value.
_VECTOR = re.compile(r"(?:u?(?:char|short|int|long|longlong)|float|double)[1-4]|dim3")

_Aliases: TypeAlias = dict[str, set[tuple[str, ...]]]
# No type is spelled like this, so that a name with this meaning beside another has none.
_IN_DOUBT = ("?",)


def read_declarations(
    sources: Sequence[str], options: Sequence[str] = (), files: Sequence[str] | None = ()
) -> dict[str, list[Parameters]]:
    """Return the parameters of every declaration of a `__global__` function, by its short name.

    A name that one of `files` has too is in doubt, for its meaning may come from there.
    """
    declared: dict[str, list[Parameters]] = {}
    aliases: _Aliases = {}
    for name, value in _defined_by(options):
        aliases.setdefault(name, set()).add(tuple(_tokens(value, {})))
    streams = [_tokens(source, aliases) for source in sources]
    for tokens in streams:
        _read_aliases(tokens, aliases)
    elsewhere = {name for text in files or () for name in re.findall(r"[A-Za-z_]\w*", text)}
    for name in aliases if files is None else elsewhere & aliases.keys():
        aliases[name].add(_IN_DOUBT)
    for tokens in streams:
        for at, token in enumerate(tokens):
            if token == "__global__" and (found := _declaration(tokens, at + 1, aliases)):
                declared.setdefault(found[0], []).append(found[1])
    return declared


def _defined_by(options: Sequence[str]) -> list[tuple[str, str]]:
    """Return the macros that options define, with their values."""
    # A value may be in a word of its own, and may have blanks within.
    words = "\0".join(options)
    return re.findall(r"(?:^|\0)\s*(?:-D|--define-macro)[\s\0=]*([A-Za-z_]\w*)=?([^\0]*)", words)


def _tokens(source: str, aliases: _Aliases) -> list[str]:
    """Split a source into words and marks; object-like macros are added to `aliases`."""
    tokens = []
    for match in _TOKEN.finditer(source.replace("\\\r\n", " ").replace("\\\n", " ")):
        kind = match.lastgroup
        if kind == "directive":
            definition = _DEFINITION.match(_COMMENT.sub(" ", match[0]))
            if definition:
                # One with parameters stands for nothing that could be said here.
                value = [] if definition[2] else _tokens(definition[3], {})
                aliases.setdefault(definition[1], set()).add(tuple(value))
        elif kind in ("word", "number", "text") or (kind == "mark" and match[0] != "\n"):
            tokens.append(match[0])
    return tokens


def _read_aliases(tokens: list[str], aliases: _Aliases) -> None:
    """Add what `using name = type;` and `typedef type name;` declare.

    A structure with a name of CUDA's, such as a `cuComplex` of one's own, brings it in doubt.
    """
    for at, token in enumerate(tokens):
        following = tokens[at + 1 : at + 2]
        if token in ("struct", "class", "union", "enum") and _NAMED_TYPES.keys() & set(following):
            aliases.setdefault(following[0], set()).add(_IN_DOUBT)
        if token not in ("using", "typedef"):
            continue
        end = next((i for i in range(at, len(tokens)) if tokens[i] in (";", "{")), len(tokens))
        words = tokens[at + 1 : end]
        if token == "typedef" and len(words) > 1 and words[-1].isidentifier():
            aliases.setdefault(words[-1], set()).add(tuple(words[:-1]))
        elif token == "using" and "=" in words[1:2]:
            aliases.setdefault(words[0], set()).add(tuple(words[2:]))


def _behind(tokens: list[str], at: int) -> int:
    """Return where the bracket that opens at `at` has closed."""
    expected = []
    for i in range(at, len(tokens)):
        if tokens[i] in _OPENING:
            expected.append(_OPENING[tokens[i]])
        elif expected and tokens[i] == expected[-1]:
            expected.pop()
            if not expected:
                return i + 1
        elif expected[-1:] == ["]"] and tokens[i] == "]]":
            return i + 1
    return len(tokens)


def _declaration(tokens: list[str], at: int, aliases: _Aliases) -> tuple[str, Parameters] | None:
    """Read a declaration from behind `__global__` on."""
    while at + 1 < len(tokens) and tokens[at] not in (";", "{", "}", "="):
        if tokens[at] in _ATTRIBUTES and tokens[at + 1] == "(":
            at = _behind(tokens, at + 1)
        elif tokens[at] == "[[":
            at = _behind(tokens, at)
        elif tokens[at + 1] == "(" and re.fullmatch(r"[A-Za-z_]\w*", tokens[at]):
            inside = tokens[at + 2 : _behind(tokens, at + 1) - 1]
            return tokens[at], tuple(_parameter(part, aliases) for part in _split(inside))
        else:
            at += 1
    return None


def _split(tokens: list[str]) -> list[list[str]]:
    """Split a list of parameters at its commas, those in brackets left out."""
    if tokens in ([], ["void"]):
        return []
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in ("(", "[", "{", "<", "[[")) - (token in (")", "]", "}", ">", "]]"))
        if token == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _parameter(tokens: list[str], aliases: _Aliases) -> tuple[str | None, str | None]:
    """Return the name of a parameter, and the word of its type."""
    words = []
    at = 0
    while at < len(tokens) and tokens[at] != "=":
        if tokens[at] == "[[" or (tokens[at] in _ATTRIBUTES and tokens[at + 1 : at + 2] == ["("]):
            at = _behind(tokens, at + (tokens[at] != "[["))
            continue
        if tokens[at] not in _NO_PART_OF_TYPE:
            words.append(tokens[at])
        at += 1
    is_array = "[" in words
    if is_array:
        words = words[: words.index("[")]
    if not words:
        return None, None
    name = None
    # The last word is a name, unless it is part of the type, or all before it is none yet.
    is_type = words[-2:-1] == ["::"] or words[-1] in _ARITHMETIC | {"const"}
    if not is_type and words[-1].isidentifier() and set(words[:-1]) - {"const"}:
        name = words.pop()
    stars = words.count("*") + is_array
    if "&" in words or "(" in words:
        return name, None
    first = words.index("*") if "*" in words else len(words)
    is_const = "const" in words[:first]
    spelled = [word for word in words[:first] if word != "const"]
    base = _base(spelled, aliases)
    if stars == 0:
        is_vector = _is_plain(spelled, aliases) and _VECTOR.fullmatch("".join(spelled))
        return name, "value" if is_vector else base
    if stars > 1:
        last = len(words) if is_array else len(words) - 1 - words[::-1].index("*")
        return name, _pointer_to(None, "const" in words[first:last])
    if base is None and not _is_plain(words[:first], aliases):
        return name, None
    return name, _pointer_to(base, is_const)


def _is_plain(words: list[str], aliases: _Aliases) -> bool:
    """Whether words stand for themselves, so that no pointer or qualifier hides behind one."""
    return not any(word in aliases for word in words)


def _base(words: list[str], aliases: _Aliases, depth: int = 0) -> str | None:
    """Return the word for a type without pointers, as it is spelled; None where in doubt."""
    if depth > 8:
        return None
    for at, word in enumerate(words):
        if word in aliases:
            values = aliases[word]
            if len(values) != 1:
                return None
            (value,) = values
            # In the scope of the kernel, CUDA's own meaning of the name may be the one that counts.
            if word in _NAMED_TYPES and _base([*value], aliases, depth + 1) != _NAMED_TYPES[word]:
                return None
            return _base([*words[:at], *value, *words[at + 1 :]], aliases, depth + 1)
    if words and all(word in _ARITHMETIC for word in words):
        return _arithmetic(words)
    spelling = "".join(words)
    return _NAMED_TYPES.get(spelling.removeprefix("cuda::").removeprefix("std::")) or _word_of(
        spelling
    )


def _arithmetic(words: list[str]) -> str | None:
    """Return the word for a type of C, whose words may stand in any order."""
    longs = min(words.count("long"), 2)
    sign = "unsigned" if "unsigned" in words else ""
    kind = next(
        (kind for kind in ("char", "short", "bool", "float", "double") if kind in words), ""
    )
    if kind == "char" and "signed" in words:
        sign = "signed"
    kind = kind or " ".join(["long"] * longs) or "int"
    if kind == "double" and longs:
        return None
    return SCALARS.get(f"{sign} {kind}".strip())
