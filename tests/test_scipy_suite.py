"""SciPy's own tests of `ndimage.correlate` and `ndimage.convolve`, with our functions in place.

Of the installed SciPy's tests of filters, every one runs that uses one of the two: its source is
read, `ndimage.correlate(...)` and `ndimage.convolve(...)` in it become calls of ours, and what
comes out is compiled and collected by pytest like any other test.
"""

import ast
import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

ndimage = pytest.importorskip("scipy.ndimage")

FILE = Path(ndimage.__file__).parent / "tests" / "test_filters.py"
USED = ("correlate", "convolve")

# Tests about nothing but what gpuops refuses or leaves out, and why it does.
OUT_OF_SCOPE = {
    "test_correlate_complex_kernel": "complex numbers",
    "test_correlate_complex_kernel_cval": "complex numbers",
    "test_correlate_complex_kernel_invalid_cval": "complex numbers",
    "test_correlate_complex_input": "complex numbers",
    "test_correlate_complex_input_and_kernel": "complex numbers",
    "test_correlate_complex_input_and_kernel_cval": "complex numbers",
    "test_correlate_mode_sequence": "a list of modes is a TypeError, and not a RuntimeError",
    "test_correlate_convolve_axes": "the axes are the last two",
    "test_filter_weights_subset_axes_origins": "the axes are the last two",
    "test_filter_invalid_footprint_ndim": "the axes are the last two",
}

LEAST_TESTS = 15  # as many as SciPy 1.11 has, so that a renamed class is seen here
LEAST_CALLS = 200

calls = defaultdict(Counter)  # of each device
tests_that_called = defaultdict(set)
under_test = []


def reason_for_theirs(image, weights, options):
    """Why a single call inside the other tests goes to SciPy, or None."""
    dtypes = [np.asarray(image).dtype, np.asarray(weights).dtype]
    if any(dtype.kind == "c" for dtype in dtypes):
        return "complex numbers"
    if "axes" in options:
        return "axes"
    if any(size > 1 for size in np.shape(weights)[:-2]):
        return "weights of more than two dimensions"
    return None


def call(name, image, weights, **options):
    reason = reason_for_theirs(image, weights, options)
    device, gpuops = under_test[-1]
    calls[device][reason or "ours"] += 1
    return getattr(ndimage if reason else gpuops, name)(image, weights, **options)


class Ours:
    """What stands in the place of the module `ndimage`."""

    @staticmethod
    def correlate(image, weights, **options):
        return call("correlate", image, weights, **options)

    @staticmethod
    def convolve(image, weights, **options):
        return call("convolve", image, weights, **options)


def is_use(node):
    return isinstance(node, ast.Attribute) and node.attr in USED and is_ndimage(node.value)


def is_ndimage(node):
    return isinstance(node, ast.Name) and node.id == "ndimage"


class PutOursInPlace(ast.NodeTransformer):
    def visit_FunctionDef(self, node):
        # SciPy's decorators tell its own conftest for which array libraries a test is.
        node.decorator_list = [
            decorator for decorator in node.decorator_list if "parametrize" in ast.dump(decorator)
        ]
        for decorator in node.decorator_list:
            # pytest is about to refuse the generators that stand in some of them.
            decorator.args[1] = ast.Call(ast.Name("list", ast.Load()), [decorator.args[1]], [])
        node.body = [self.visit(part) for part in node.body]
        return node

    def visit_ClassDef(self, node):
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Call(self, node):
        # Such parameters look up what SciPy's configuration knows of a function, so not of ours.
        if isinstance(node.func, ast.Name) and node.func.id == "make_xp_pytest_param":
            node.func = ast.parse("pytest.param", mode="eval").body
        return self.generic_visit(node)

    def visit_Attribute(self, node):
        if is_use(node):
            node.value = ast.copy_location(ast.Name("gpuops_ours_", ast.Load()), node.value)
            return node
        return self.generic_visit(node)


def keep_our_tests(body):
    """Tests that use the functions and are ours to run, and all that is no test."""
    return [
        node
        for node in body
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test"))
        or (any(map(is_use, itertools.chain.from_iterable(map(ast.walk, node.body))))
            and node.name not in OUT_OF_SCOPE)
    ]  # fmt: skip


def with_ours():
    """The tests of SciPy's file that are ours to run, with ours in place."""
    tree = ast.parse(FILE.read_text(), str(FILE))
    kept = []
    for node in keep_our_tests(tree.body):
        if isinstance(node, ast.Assign) and "xp_backends" in ast.dump(node):
            continue  # marks that only SciPy's own configuration knows
        if isinstance(node, ast.ClassDef):
            node.body = keep_our_tests(node.body)
            if not any(isinstance(part, ast.FunctionDef) and part.name.startswith("test")
                       for part in node.body):  # fmt: skip
                continue
        kept.append(node)
    tree.body = kept
    namespace = {
        "__name__": "scipy.ndimage.tests.test_filters",
        "__package__": "scipy.ndimage.tests",
        "gpuops_ours_": Ours,
    }
    tree = ast.fix_missing_locations(PutOursInPlace().visit(tree))
    exec(compile(tree, FILE, "exec"), namespace)
    names = [getattr(node, "name", "") for node in tree.body]
    return {
        f"{name}_of_scipy": namespace[name] for name in names if name.lower().startswith("test")
    }


# Some distributions install SciPy without its tests; the last test of this file says so.
if FILE.is_file():
    globals().update(with_ours())


@pytest.fixture
def xp():
    return np


@pytest.fixture
def num_parallel_threads():
    return 1


@pytest.fixture(autouse=True)
def ours_in_place(request, gpuops, device):
    """Runs every test of this file on every device, and notes which call what it is to test."""
    under_test.append((device.name, gpuops))
    before = calls[device.name]["ours"]
    yield
    under_test.pop()
    if calls[device.name]["ours"] > before:
        tests_that_called[device.name].add(request.node.nodeid)


def test_as_many_ran_as_there_are(request, device):
    """The last test of the file."""
    if not FILE.is_file():
        pytest.skip("this SciPy was installed without its tests")
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("only some of the tests were asked for")
    assert len(tests_that_called[device.name]) >= LEAST_TESTS
    assert calls[device.name]["ours"] >= LEAST_CALLS
    print(f"{len(tests_that_called[device.name])} tests; calls: {dict(calls[device.name])}")
