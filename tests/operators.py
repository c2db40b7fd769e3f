"""The rows of kernels/ops.def, for the tests that loop over all operators."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Operator(NamedTuple):
    name: str
    stem: str
    signature: str
    doc: str


def without_comments(source):
    """C source with every comment blanked and every string as it was."""
    pattern = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*', re.DOTALL)
    return pattern.sub(lambda match: match[0] if match[0].startswith('"') else " ", source)


def read_operators():
    source = without_comments((ROOT / "kernels" / "ops.def").read_text())
    string = r'((?:"(?:\\.|[^"\\])*"\s*)+)'
    pattern = rf"OPERATOR\(\s*(\w+)\s*,\s*(\w+)\s*,\s*{string},\s*{string}\)"
    rows = []
    for name, stem, signature, doc in re.findall(pattern, source):
        # C and Python join neighbouring strings alike, and agree on these escapes.
        rows.append(
            Operator(name, stem, ast.literal_eval(f"({signature})"), ast.literal_eval(f"({doc})"))
        )
    assert len(rows) == source.count("OPERATOR(")
    return rows


OPERATORS = read_operators()
