"""NumPy's own tests of `take` and `take_along_axis`, with our functions in their place.

Of the installed NumPy's test classes listed below, every test runs that uses one of the two: its
source is read, `np.take(...)`, `x.take(...)` and `take_along_axis(...)` in it become calls of ours,
and what comes out is compiled and collected by pytest like any other test.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

SUITE = {
    "_core/tests/test_item_selection.py": ["TestTake"],
    "_core/tests/test_multiarray.py": ["TestTake", "TestWritebackIfCopy"],
    "_core/tests/test_numeric.py": ["TestNonarrayArgs"],
    "_core/tests/test_regression.py": ["TestRegression"],
    "_core/tests/test_indexing.py": ["TestMultiIndexingAutomated"],
    "_core/tests/test_dtype.py": ["TestStructuredObjectRefcounting"],
    "lib/tests/test_shape_base.py": ["TestTakeAlongAxis", "TestPutAlongAxis"],
    "lib/tests/test_arraysetops.py": ["TestUnique"],
    "fft/tests/test_helper.py": ["TestFFTShift"],
}

# Tests about nothing but what gpuops refuses or leaves out, and why it does.
OUT_OF_SCOPE = {
    "test_refcounting": "object elements cannot be moved without the interpreter",
    "test_take_object_fail": "object elements",
    "test_object_array_refcounting": "object elements",
    "test_structured_object_take_and_repeat": "object elements",
    "test_unique_axis_errors": "object elements",
    "test_byteorder": "foreign byte order is refused with advice",
    "test_out_dtype": "`out` of another dtype is refused",
    "test_attributes": "subclasses come back as plain arrays",
}

# Single calls inside the other tests that go to NumPy, for the same reasons.
REASONS = {
    "object": lambda dtype: dtype.hasobject,
    "byte order": lambda dtype: dtype.byteorder not in "=|",
}

# As many as NumPy 2.0 has, so that a renamed class is seen here.
LEAST_TESTS = 25
LEAST_CALLS = 500

TAKE, TAKE_ALONG_AXIS = "gpuops_take_", "gpuops_take_along_axis_"
BOUND_TAKE = "gpuops_bound_take_"

calls = defaultdict(Counter)  # of each device
tests_that_called = defaultdict(set)
under_test = []


def call(name, a, indices, *arguments, **options):
    dtype = getattr(a, "dtype", None)
    reasons = [reason for reason, applies in REASONS.items() if dtype and applies(dtype)]
    device, gpuops = under_test[-1]
    calls[device][reasons[0] if reasons else "ours"] += 1
    module = np if reasons else gpuops
    return getattr(module, name)(a, indices, *arguments, **options)


def take(a, *arguments, **options):
    return call("take", a, *arguments, **options)


def take_along_axis(arr, *arguments, **options):
    return call("take_along_axis", arr, *arguments, **options)


def bound_take(x):
    """What `x.take` stands for: a method of an array."""
    assert isinstance(x, np.ndarray)
    return lambda *arguments, **options: take(x, *arguments, **options)


def is_use(node):
    name = getattr(node, "attr", getattr(node, "id", None))
    return isinstance(node, (ast.Attribute, ast.Name)) and name in ("take", "take_along_axis")


class PutOursInPlace(ast.NodeTransformer):
    def visit(self, node):
        node = self.generic_visit(node)
        if not is_use(node):
            return node
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        replacement = ast.Name(TAKE if name == "take" else TAKE_ALONG_AXIS, ast.Load())
        is_method = isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id == "np"
        )
        if is_method:
            replacement = ast.Call(ast.Name(BOUND_TAKE, ast.Load()), [node.value], [])
        return ast.copy_location(replacement, node)


def users_of_take(members):
    """The names of the methods that use `take`, themselves or through another method."""
    users = {name for name, node in members.items() if any(map(is_use, ast.walk(node)))}
    while True:
        more = {
            name
            for name, node in members.items()
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and part.attr in users
        }
        if more <= users:
            return users
        users |= more


def keep_our_tests(node):
    """A copy of a class without the tests that are not ours to run."""
    members = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    users = users_of_take(members)
    others = {name for name in members if name.startswith("test")} - users | OUT_OF_SCOPE.keys()
    node.body = [part for part in node.body if getattr(part, "name", "") not in others]
    node.body.append(ast.Pass())
    return node


def with_ours(path, names):
    """The classes of those names in a file of tests, with ours in place and no other tests."""
    tree = ast.parse(path.read_text(), str(path))
    tree.body = [
        keep_our_tests(node) if isinstance(node, ast.ClassDef) else node
        for node in tree.body
        # Other tests may carry marks that only NumPy's own configuration knows.
        if getattr(node, "name", None) in names or not is_test(node)
    ]
    namespace = {"__name__": path.stem, TAKE: take, TAKE_ALONG_AXIS: take_along_axis,
                 BOUND_TAKE: bound_take}  # fmt: skip
    tree = ast.fix_missing_locations(PutOursInPlace().visit(tree))
    exec(compile(tree, path, "exec"), namespace)
    return {f"{name}_{path.stem}": namespace[name] for name in names if name in namespace}


def is_test(node):
    is_function = isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    return is_function or isinstance(node, ast.ClassDef)


for file, names in SUITE.items():
    # Some distributions install NumPy without its tests; the last test of this file says so.
    path = Path(np.__file__).parent / file
    if path.is_file():
        globals().update(with_ours(path, names))


@pytest.fixture(autouse=True)
def ours_in_place(request, gpuops, device):
    """Runs every test of this file on every device, and sees that it calls what it is to test."""
    under_test.append((device.name, gpuops))
    before = calls[device.name]["ours"]
    yield
    under_test.pop()
    if request.cls is not None:
        assert calls[device.name]["ours"] > before, "the test has not called gpuops"
        tests_that_called[device.name].add(request.node.nodeid)


def test_as_many_ran_as_there_are(request, device):
    """The last test of the file."""
    if not (Path(np.__file__).parent / next(iter(SUITE))).is_file():
        pytest.skip("this NumPy was installed without its tests")
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("only some of the tests were asked for")
    assert len(tests_that_called[device.name]) >= LEAST_TESTS
    assert calls[device.name]["ours"] >= LEAST_CALLS
    print(f"{len(tests_that_called[device.name])} tests; calls: {dict(calls[device.name])}")
