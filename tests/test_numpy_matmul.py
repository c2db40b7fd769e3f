"""NumPy's own tests of `matmul`, with our function in its place.

As in test_numpy_suite.py, the source of the installed NumPy's test classes is read, `np.matmul` and
`self.matmul` in it become calls of ours, and what comes out is collected by pytest.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

FILE = Path(np.__file__).parent / "_core/tests/test_multiarray.py"
CLASSES = ["MatmulCommon", "TestMatmul"]

# Tests about nothing but what gpuops refuses or leaves out, and why it does.
OUT_OF_SCOPE = {
    "test_matmul_object": "object elements cannot be multiplied without the interpreter",
    "test_matmul_object_type_scalar": "object elements",
    "test_matmul_empty": "object elements",
    "test_matmul_exception_multiply": "object elements",
    "test_matmul_exception_add": "object elements",
    "test_empty_out": "the text is NumPy's for ufuncs; that `out` is refused, test_matmul.py tests",
}

# Single calls inside the other tests that go to NumPy. (TestMatmulOperator and TestMatmulInplace
# are about the operators of ndarray, and so NumPy's alone.)
REASONS = {
    "object": lambda a, b, out: a.dtype.hasobject or b.dtype.hasobject,
    "longdouble": lambda a, b, out: a.dtype.char in "gG" or b.dtype.char in "gG",
    "another dtype of out": lambda a, b, out: out is not None and out.dtype != a.dtype,
}

LEAST_TESTS = 44  # as many as NumPy 2.0 has
LEAST_CALLS = 550

calls = defaultdict(Counter)  # of each device
under_test = []


def matmul(a, b, *arguments, **options):
    out = arguments[0] if arguments else options.pop("out", None)
    assert not options
    given = np.asarray(a), np.asarray(b), out
    reasons = [reason for reason, applies in REASONS.items() if applies(*given)]
    device, gpuops = under_test[-1]
    calls[device][reasons[0] if reasons else "ours"] += 1
    return (np if reasons else gpuops).matmul(a, b, out=out)


class PutOursInPlace(ast.NodeTransformer):
    def visit_Attribute(self, node):
        node = self.generic_visit(node)
        if node.attr != "matmul" or getattr(node.value, "id", None) not in ("np", "self"):
            return node
        return ast.copy_location(ast.Name("gpuops_matmul_", ast.Load()), node)


def is_other_test(node):
    name = getattr(node, "name", "")
    is_class = isinstance(node, ast.ClassDef)
    return (is_class and name not in CLASSES) or (name.startswith("test") and not is_class)


def with_ours():
    tree = ast.parse(FILE.read_text(), str(FILE))
    tree.body = [node for node in tree.body if not is_other_test(node)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.body = [
                part for part in node.body if getattr(part, "name", "") not in OUT_OF_SCOPE
            ]
    namespace = {"__name__": FILE.stem, "gpuops_matmul_": matmul}
    tree = ast.fix_missing_locations(PutOursInPlace().visit(tree))
    exec(compile(tree, FILE, "exec"), namespace)
    return namespace["TestMatmul"]


if FILE.is_file():
    TestNumpyMatmul = with_ours()


@pytest.fixture(autouse=True)
def ours_in_place(request, gpuops, device):
    under_test.append((device.name, gpuops))
    called = calls[device.name]
    before = called["ours"]
    yield
    under_test.pop()
    if request.cls is not None:
        assert called["ours"] > before, "the test has not called gpuops"
        called["tests"] += 1


def test_as_many_ran_as_there_are(request, device):
    """The last test of the file."""
    if not FILE.is_file():
        pytest.skip("this NumPy was installed without its tests")
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("only some of the tests were asked for")
    called = calls[device.name]
    assert called["tests"] >= LEAST_TESTS and called["ours"] >= LEAST_CALLS
    print(dict(called))
