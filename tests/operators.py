"""The rows of kernels/ops.def, for the tests that loop over all operators."""

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


class Operator(NamedTuple):
    name: str
    stem: str
    work: str
    signature: str
    doc: str


def without_comments(source):
    """C source with every comment blanked and every string as it was."""
    pattern = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*', re.DOTALL)
    return pattern.sub(lambda match: match[0] if match[0].startswith('"') else " ", source)


def read_operators():
    source = without_comments((ROOT / "kernels" / "ops.def").read_text())
    string = r'((?:"(?:\\.|[^"\\])*"\s*)+)'
    pattern = rf"OPERATOR\(\s*(\w+)\s*,\s*(\w+)\s*,\s*(\w+)\s*,\s*{string},\s*{string}\)"
    rows = []
    for name, stem, work, signature, doc in re.findall(pattern, source):
        # C and Python join neighbouring strings alike, and agree on these escapes.
        rows.append(
            Operator(
                name, stem, work, ast.literal_eval(f"({signature})"), ast.literal_eval(f"({doc})")
            )
        )
    assert len(rows) == source.count("OPERATOR(")
    return rows


OPERATORS = read_operators()

X = np.arange(12.0).reshape(3, 4)
INDICES = np.array([[0, 1, 2, 0]])

# Arguments for the parameters that have no default. An operator with other names adds them here.
EXAMPLES = {"x": X, "y": X, "a": X, "b": X.T, "arr": X, "grad": X, "indices": INDICES}
EXAMPLES |= {"values": np.float64(5), "input": X, "weights": np.ones((3, 3))}


@functools.cache
def parameters_of(operator):
    # The signature is Python, so Python reads it.
    namespace = {}
    exec(f"def {operator.name}({operator.signature}): pass", namespace)
    return inspect.signature(namespace[operator.name])


def required_arguments(operator):
    """The arguments of a right call, positional ones first; fresh ones, of which one may change."""
    return [
        EXAMPLES[parameter.name].copy()
        for parameter in parameters_of(operator).parameters.values()
        if parameter.default is parameter.empty
    ]


def is_in_place(operator):
    return {"out", "output"}.isdisjoint(parameters_of(operator).parameters)
