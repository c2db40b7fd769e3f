"""NumPy's own tests of `ufunc.at`, with scatter_add in the place of `np.add.at`.

Every test of the installed NumPy's TestUfunc that uses `.at` runs: in its source, `ufunc.at(...)`
becomes a call of ours where the ufunc is `np.add`, and what comes out is collected by pytest like
any other test. Tests of other ufuncs alone are left out, and single calls go to NumPy for one of
the reasons below.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

SUITE = Path(np.__file__).parent / "_core" / "tests" / "test_ufunc.py"
CLASS = "TestUfunc"

# Tests about nothing but what scatter_add is not for, and why.
OUT_OF_SCOPE = {
    "test_ufunc_at_negative": "another ufunc",
    "test_ufunc_at_dtypes": "another ufunc",
    "test_ufunc_at_boolean": "other ufuncs",
    "test_at_output_casting": "another ufunc",
    "test_at_no_loop_for_op": "the text of NumPy's own error for strings, a TypeError here too",
}

# As many as NumPy 2.0 has, so that a renamed class or method is seen here.
LEAST_TESTS, LEAST_CALLS = 8, 48

calls = defaultdict(Counter)  # of each device
under_test = []


def axis_of(index):
    """The one array of integers in an index, and the axis that it stands for; or None."""
    parts = index if isinstance(index, tuple) else (index,)
    whole = [isinstance(part, slice) and part == slice(None) for part in parts]
    if whole.count(False) != 1:
        return None
    axis = whole.index(False)
    array = np.asarray(parts[axis] if parts[axis] is not Ellipsis else None)
    return (parts[axis], axis) if array.dtype.kind in "iu" else None


def reason_for_numpy(ufunc, a, index, values):
    """Why a call goes to NumPy, or None."""
    if ufunc is not np.add:
        return "another ufunc"
    if values is None or not isinstance(a, np.ndarray):
        return "not an addition to an array"
    if a.dtype.char not in "bBhHiIlLqQfdFD":
        return "float16 is rounded once; long double, str and object are not added"
    if axis_of(index) is None:
        return "an index that is more than positions along one axis"
    operands = [a, np.asarray(axis_of(index)[0]), np.asarray(values)]
    if not all(operand.dtype.isnative for operand in operands):
        return "foreign byte order is refused with advice"
    if not np.can_cast(operands[2].dtype, a.dtype, "same_kind"):
        return "a cast that loses what the values are"
    return None


def at(ufunc, a, index, *values):
    """What stands in the place of `ufunc.at`."""
    if not isinstance(ufunc, np.ufunc):
        return ufunc.at(a, index, *values)
    b = values[0] if values else None
    reason = reason_for_numpy(ufunc, a, index, b)
    device, gpuops = under_test[-1]
    calls[device][reason or "ours"] += 1
    if reason:
        return ufunc.at(a, index, *values)
    indices, axis = axis_of(index)
    return gpuops.scatter_add(a, indices, b, axis=axis)


class PutOursInPlace(ast.NodeTransformer):
    def visit_Call(self, node):
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "at"):
            return node
        name = ast.copy_location(ast.Name("gpuops_at_", ast.Load()), node)
        return ast.copy_location(ast.Call(name, [node.func.value, *node.args], []), node)


def with_ours():
    """The class, with ours in place and no other tests."""
    tree = ast.parse(SUITE.read_text(), str(SUITE))
    for node in tree.body:
        if getattr(node, "name", "") != CLASS:
            continue
        for part in list(node.body):
            name = getattr(part, "name", "")
            uses = any(isinstance(n, ast.Attribute) and n.attr == "at" for n in ast.walk(part))
            if name.startswith("test") and (not uses or name in OUT_OF_SCOPE):
                node.body.remove(part)
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") == CLASS
        or not (isinstance(node, ast.ClassDef) or getattr(node, "name", "").startswith("test"))
    ]
    namespace = {"__name__": SUITE.stem, "gpuops_at_": at}
    tree = ast.fix_missing_locations(PutOursInPlace().visit(tree))
    exec(compile(tree, str(SUITE), "exec"), namespace)
    return namespace[CLASS]


if SUITE.is_file():  # some distributions install NumPy without its tests
    TestUfuncAt = with_ours()

tests_that_called = Counter()


@pytest.fixture(autouse=True)
def ours_in_place(request, gpuops, device):
    """Runs every test of this file on every device."""
    under_test.append((device.name, gpuops))
    before = calls[device.name]["ours"]
    yield
    under_test.pop()
    tests_that_called[device.name] += calls[device.name]["ours"] > before


def test_as_many_ran_as_there_are(request, device):
    """The last test of the file."""
    if not SUITE.is_file():
        pytest.skip("this NumPy was installed without its tests")
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("only some of the tests were asked for")
    assert tests_that_called[device.name] >= LEAST_TESTS
    assert calls[device.name]["ours"] >= LEAST_CALLS
    print(f"{tests_that_called[device.name]} tests; calls: {dict(calls[device.name])}")
