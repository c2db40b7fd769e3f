"""What holds for every operator: each test loops over the rows of kernels/ops.def."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import leaving_nothing
from operators import EXAMPLES, OPERATORS, is_in_place, parameters_of, required_arguments


@pytest.fixture(params=OPERATORS, ids=lambda operator: operator.name)
def operator(request):
    return request.param


@pytest.fixture
def function(gpuops, operator):
    return getattr(gpuops, operator.name)


def outcome(operator, function, *arguments, **keywords):
    """The result of a call; in place, the array that it has changed."""
    result = function(*arguments, **keywords)
    if not is_in_place(operator):
        return result
    assert result is None
    return arguments[0]


def test_there_are_operators():
    names = [operator.name for operator in OPERATORS]
    assert {"gather", "take", "take_along_axis"} <= set(names)
    assert len(set(names)) == len(names)


def test_it_is_public(gpuops, operator, function):
    assert callable(function)
    assert function.__name__ == operator.name
    assert operator.name in gpuops.__all__
    assert function.__module__.endswith("_core") or function.__module__ == "gpuops"


def test_signature_is_that_of_the_row(operator, function):
    assert inspect.signature(function) == parameters_of(operator)


def test_every_operator_takes_device_and_stream(operator):
    parameters = parameters_of(operator).parameters
    for name in ("device", "stream"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None


def shape_of(arguments):
    """The names, kinds and defaults of a function in a stub, comparable to inspect's."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    kinds = ["positional only"] * len(arguments.posonlyargs) + ["either"] * len(arguments.args)
    shape = list(zip([a.arg for a in positional], kinds, defaults, strict=True))
    shape += [
        (argument.arg, "keyword only", default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return shape


def test_stub_has_the_signature_of_the_row(gpuops, operator):
    stubs = []
    for path in sorted(Path(gpuops.__path__[0]).glob("*.pyi")):
        stubs += [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == operator.name
        ]
    assert stubs, "no stub"
    expected = shape_of(ast.parse(f"def f({operator.signature}): pass").body[0].args)
    defaults = {name: default and ast.literal_eval(default) for name, _, default in expected}
    seen = {name: set() for name in defaults}
    for stub in stubs:
        shape = shape_of(stub.args)
        # An overload may ask for `out`, by position or by keyword, and leaves the rest alone.
        assert sorted(name for name, _, _ in shape) == sorted(defaults)
        for name, kind, default in shape:
            seen[name].add(kind)
            if default is not None:
                assert ast.literal_eval(default) == defaults[name], (name, default)
    for name, kind, _ in expected:
        assert kind in seen[name]


def test_required_parameters_come_first(operator):
    """Where arguments are bound, nothing is looked for behind the first that has a default."""
    parameters = parameters_of(operator).parameters.values()
    required = [parameter.default is parameter.empty for parameter in parameters]
    assert required == sorted(required, reverse=True)


SECTIONS = ["Parameters", "Returns", "Raises", "See Also", "Notes", "References", "Examples"]


def sections_of(doc):
    found = re.findall(r"^([A-Z][A-Za-z ]+)\n(-+)$", doc, re.MULTILINE)
    assert all(len(title) == len(line) for title, line in found)
    return [title for title, _ in found]


def test_docstring_is_numpydoc(operator, function):
    doc = inspect.getdoc(function)
    assert doc == operator.doc.strip()
    summary, blank = doc.split("\n")[:2]
    assert summary.endswith(".") or "." in doc.split("\n\n")[0]
    assert blank == "" or doc.split("\n\n")[0].count("\n") < 3
    sections = sections_of(doc)
    assert [title for title in sections if title not in SECTIONS] == []
    assert sections == sorted(sections, key=SECTIONS.index)
    assert {"Parameters", "Returns", "Raises", "See Also", "Examples"} <= set(sections)
    # A title that has run into its text is none, and a reference begins with its number.
    assert len(re.findall(r"-{3,}", doc)) == len(sections)
    cited = re.findall(r"\[\d+\]_", doc)
    assert [f"\n.. {mark[:-1]} " in doc for mark in cited] == [True] * ("References" in sections)
    assert all(len(line) <= 100 for line in doc.split("\n"))


def test_every_parameter_is_documented(operator, function):
    doc = inspect.getdoc(function)
    body = doc.split("Parameters\n----------\n")[1].split("\n\n")[0]
    documented = [
        name.strip()
        for line in re.findall(r"^([\w, ]+) :", body, re.MULTILINE)
        for name in line.split(",")
    ]
    assert documented == list(parameters_of(operator).parameters)


def test_a_bar_that_cannot_be_shown_is_documented(operator, function):
    raises = inspect.getdoc(function).split("Raises\n------\n")[1].split("\n\n")[0]
    assert ("\nImportError\n" in raises) == ("progress" in parameters_of(operator).parameters)


def test_examples_work(gpuops, operator, function, monkeypatch):
    # The examples say `import gpuops` and mean the build under test.
    monkeypatch.setitem(__import__("sys").modules, "gpuops", gpuops)
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(function), {"np": np}, operator.name, None, None
    )
    assert test.examples
    printed = []
    result = doctest.DocTestRunner().run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)


def test_wrong_number_of_arguments(operator, function):
    parameters = parameters_of(operator).parameters.values()
    required = required_arguments(operator)
    positional = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    for count in range(len(required)):
        with pytest.raises(TypeError) as caught:
            function(*required[:count])
        missing = positional[count].name
        assert operator.name in str(caught.value) and missing in str(caught.value)
    with pytest.raises(TypeError, match=operator.name):
        function(*required, *[None] * (len(positional) - len(required) + 1))
    with pytest.raises(TypeError, match=operator.name):
        function(*[None] * 100)


def test_unknown_keyword(operator, function):
    with pytest.raises(TypeError) as caught:
        function(*required_arguments(operator), nonsense=1)
    assert "nonsense" in str(caught.value) and operator.name in str(caught.value)
    with pytest.raises(TypeError, match="keyword"):
        function(*required_arguments(operator), **{"\udcff": 1, "Größe": 2})
    with pytest.raises(TypeError):
        function(*required_arguments(operator), **{"axi": 0, "axis ": 0, "": 0})


def test_an_argument_given_twice(operator, function):
    parameters = parameters_of(operator).parameters.values()
    required = required_arguments(operator)
    for position, parameter in enumerate(parameters):
        if position >= len(required):
            break
        with pytest.raises(TypeError) as caught:
            function(*required, **{parameter.name: required[position]})
        assert parameter.name in str(caught.value)


def test_positional_only_and_keyword_only(operator, function):
    required = required_arguments(operator)
    keywords = {}
    for parameter in parameters_of(operator).parameters.values():
        if parameter.default is parameter.empty:
            keywords[parameter.name] = EXAMPLES[parameter.name].copy()
    kinds = {p.kind for p in parameters_of(operator).parameters.values()}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        with pytest.raises(TypeError):
            function(**keywords)
    else:
        assert function(**keywords).tobytes() == function(*required).tobytes()


def test_defaults_are_what_the_signature_says(operator, function):
    required = required_arguments(operator)
    keywords = {
        parameter.name: parameter.default
        for parameter in parameters_of(operator).parameters.values()
        if parameter.default is not parameter.empty
    }
    expected = outcome(operator, function, *required)
    result = outcome(operator, function, *required_arguments(operator), **keywords)
    assert result.shape == expected.shape and result.tobytes() == expected.tobytes()


def test_keywords_made_at_run_time(operator, function):
    """Names that are equal to the parameters', but not the same objects."""
    name = "".join(["de", "vi", "ce"])
    assert outcome(operator, function, *required_arguments(operator), **{name: None}).size


@pytest.mark.parametrize(
    "device", ["nowhere", "", "cuda:", "cuda:x", "cuda:-1", "CPU", "cpu ", "cpu:0", "cuda:1.0"]
)
def test_devices_that_do_not_exist(operator, cpu_device, device):
    # The text of an unknown name, on the build that the machine has.
    function = getattr(cpu_device.gpuops, operator.name)
    with pytest.raises(ValueError) as caught:
        function(*required_arguments(operator), device=device)
    assert repr(device) in str(caught.value) or device in str(caught.value)


@pytest.mark.parametrize("wrong", [1.5, b"cpu", ["cpu"], object(), True, 1j])
def test_devices_of_a_wrong_kind(operator, function, wrong):
    with pytest.raises((TypeError, ValueError)):
        function(*required_arguments(operator), device=wrong)


@pytest.mark.parametrize("ordinal", [-1, 99, 2**31, 2**32, 2**70])
def test_ordinals_that_do_not_exist(gpuops, operator, function, ordinal):
    with pytest.raises((gpuops.DeviceError, ValueError, OverflowError)):
        function(*required_arguments(operator), device=ordinal)
    if ordinal > 0:
        with pytest.raises((gpuops.DeviceError, ValueError)):
            function(*required_arguments(operator), device=f"cuda:{ordinal}")


@pytest.mark.parametrize("stream", ["0", 1.5, [], object()])
def test_streams_of_a_wrong_kind(operator, function, stream):
    with pytest.raises((TypeError, ValueError)):
        function(*required_arguments(operator), stream=stream)


def test_bad_operands_raise_type_errors(operator, function):
    required = required_arguments(operator)
    for position in range(len(required)):
        for wrong in (object(), None, {}, {1, 2}):
            arguments = list(required)
            arguments[position] = wrong
            with pytest.raises((TypeError, IndexError)):
                function(*arguments)


def test_a_capture_is_not_spoilt_by_host_arrays(fake_device, operator):
    """They are refused, and whoever captures goes on."""
    gpuops, fake = fake_device.gpuops, fake_device.fake
    with leaving_nothing(fake_device):
        stream = gpuops.Stream(device=0)
        fake.set_capturing(stream.ptr, True)
        try:
            with pytest.raises(ValueError, match="captured into a graph"):
                getattr(gpuops, operator.name)(*required_arguments(operator), stream=stream)
        finally:
            fake.set_capturing(stream.ptr, False)
        getattr(gpuops, operator.name)(*required_arguments(operator), stream=stream)
        assert fake.take_misuse() == ""
        del stream


def test_the_cpu_leaves_the_gpu_alone(fake_device, operator):
    """Where there is one; its first use has been long before."""
    function = getattr(fake_device.gpuops, operator.name)
    arguments = required_arguments(operator)
    calls = fake_device.fake.calls()
    result = outcome(operator, function, *arguments, device="cpu")
    assert isinstance(result, np.ndarray)
    assert fake_device.fake.calls() == calls


# Every dtype of NumPy's, by its letter; those of times with a unit, and structures.
LETTERS = sorted(set(np.typecodes["All"]) - set("Mm"))
DTYPES = [np.dtype(d) for d in (*LETTERS, "M8[s]", "m8[ns]", "V3", [("a", "i2"), ("b", "f8")])]


def operand_of(dtype, like):
    """An array of the same shape, and of the same values where there is such a thing."""
    whole = like.astype("i8")
    if dtype.fields:
        array = np.zeros(like.shape, dtype)
        for name in dtype.names:
            array[name] = whole
        return array
    if dtype.kind == "V":
        size = dtype.itemsize or 8
        return np.frombuffer(whole.tobytes(), "V8").astype(f"V{size}").reshape(like.shape)
    return whole.astype(dtype)


def misaligned(array):
    memory = np.empty(array.nbytes + 1, np.uint8)
    memory[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return np.ndarray(array.shape, array.dtype, memory, 1)


def told(operator, function, arguments):
    """What comes of a call: the bytes of the result, or the exception."""
    arguments = [a.copy() if a.flags.aligned else misaligned(a) for a in map(np.asarray, arguments)]
    try:
        result = np.asarray(outcome(operator, function, *arguments))
    except (TypeError, ValueError, IndexError) as error:
        return type(error), str(error)
    return result.dtype, result.shape, result.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_taken_or_refused(operator, function, dtype):
    """At any alignment the same; objects never, and other byte orders only within structures."""
    required = required_arguments(operator)
    for position, like in enumerate(required):
        with np.errstate(all="ignore"):
            array = operand_of(dtype, np.asarray(like))

            def call(operand, position=position):
                arguments = [*required[:position], operand, *required[position + 1 :]]
                return told(operator, function, arguments)

            right = call(array)
            if dtype.hasobject:
                assert right[0] is TypeError or issubclass(right[0], IndexError), right
                continue
            assert call(misaligned(array)) == right
            foreign = array.astype(array.dtype.newbyteorder())
            if foreign.dtype.isnative:
                continue
            found = call(foreign)
            if isinstance(found[0], np.dtype):  # a structure's bytes are moved, whatever they mean
                assert dtype.fields and found[0] == foreign.dtype
                moved = np.frombuffer(found[2], found[0]).astype(dtype)
                assert (found[1], moved.tobytes()) == right[1:]
            elif dtype.fields:
                assert found[0] is right[0]
            else:
                assert found[0] is TypeError and "byte" in found[1], found


def test_every_amount_of_memory(fake_device, operator):
    """With too little a call says so and leaves `out` as it was; what fits still works after it.

    Through a slab, small calls take none.
    """
    gpuops, fake = fake_device.gpuops, fake_device.fake
    function, required = getattr(gpuops, operator.name), required_arguments(operator)
    name = next((n for n in ("out", "output") if n in parameters_of(operator).parameters), None)
    with gpuops.device("cuda:0"):
        expected = np.array(outcome(operator, function, *required_arguments(operator)))
        gpuops.empty_cache()
        fake.reset()
        fake.set_slab_bytes(0)
        outcomes, before = [], fake.live().bytes
        for limit in range(0, 1 << 20, 16):
            fake.leave_free(limit)
            arguments, keywords = [np.array(a) for a in required], {}
            target = arguments[0]
            if name:
                target = keywords[name] = np.full_like(expected, 7)
            pristine = target.copy()
            try:
                function(*arguments, **keywords)
            except MemoryError as error:
                outcomes.append("error")
                assert str(error).startswith(operator.name) and "cuda:0" in str(error)
                assert target.tobytes() == pristine.tobytes()
            else:
                outcomes.append("value")
                assert target.tobytes() == expected.tobytes()
                with pytest.raises(MemoryError):
                    gpuops.zeros(limit + 4096, "u1")
                arguments = required_arguments(operator)
                result = outcome(operator, function, *arguments)
                assert np.array(result).tobytes() == expected.tobytes()
            gpuops.empty_cache()
            assert fake.live().bytes == before
            if outcomes[-4:] == ["value"] * 4:
                break
        fake.reset()
    assert outcomes[0] == "error" and outcomes[-1] == "value"
    assert outcomes == sorted(outcomes), "more memory never makes it worse"
    assert fake.take_misuse() == ""
