"""Names and types of kernels: what is read from mangled names, and from declarations."""

import random
import re

import pytest

from gpuops._signatures import demangle, describe_kernels, read_declarations

# What c++filt says of each, with the qualifiers before what they qualify; and the words for the
# types.
MANGLED = [
    ("_Z5emptyv", "empty()", []),
    ("_Z3addPfS_S_i", "add(float*, float*, float*, int)", ["float32*"] * 3 + ["int32"]),
    (
        "_Z1fPKfPVdS0_PKVi",
        "f(const float*, volatile double*, const float*, const volatile int*)",
        ["const float32*", "float64*", "const float32*", "const int32*"],
    ),
    (
        "_Z1fbcahstijlmxy",
        "f(bool, char, signed char, unsigned char, short, unsigned short, int, unsigned int, long,"
        " unsigned long, long long, unsigned long long)",
        "bool char int8 uint8 int16 uint16 int32 uint32 int64 uint64 int64 uint64".split(),
    ),
    ("_Z1fPcPhPa", "f(char*, unsigned char*, signed char*)", ["char*", "uint8*", "int8*"]),
    ("_Z1fPvPKv", "f(void*, const void*)", ["void*", "const void*"]),
    (
        "_Z1fPPfPKS_PKPKf",
        "f(float**, float* const*, const float* const*)",
        ["void*", "const void*", "const void*"],
    ),
    (
        "_Z1f6float2P6float4PK4Pair",
        "f(float2, float4*, const Pair*)",
        [None, "void*", "const void*"],
    ),
    (
        "_Z1f6__halfP13__nv_bfloat16",
        "f(__half, __nv_bfloat16*)",
        ["float16", "bfloat16*"],
    ),
    ("_Z1fPA4_f", "f(float [4]*)", ["float32*"]),
    ("_Z1fPFvifE", "f(void (int, float)*)", ["void*"]),
    ("_ZN2ns5inner1fEiNS_1EE", "ns::inner::f(int, ns::E)", ["int32", None]),
    ("_ZN12_GLOBAL__N_11fEf", "(anonymous namespace)::f(float)", ["float32"]),
    ("_ZL1fPd", "f(double*)", ["float64*"]),
    ("_Z5scaleIfEvPT_S0_", "scale<float>(float*, float)", ["float32*", "float32"]),
    (
        "_ZN2ns5scaleIdLi7ELb1EEEvPT_PKS1_i4Pair",
        "ns::scale<double, 7, true>(double*, const double*, int, Pair)",
        ["float64*", "const float64*", "int32", None],
    ),
    ("_Z1fILin3ELj5ELc65EEvv", "f<-3, 5u, (char)65>()", []),
    ("_Z1fI3BoxIfEEvT_PS1_", "f<Box<float>>(Box<float>, Box<float>*)", [None, "void*"]),
    ("_Z1fIJifEEvDpT_", None, None),
    (
        "_Z1gN4cuda3std3__47complexIfEEPN6thrust7complexIdEE",
        "g(cuda::std::__4::complex<float>, thrust::complex<double>*)",
        ["complex64", "complex128*"],
    ),
    ("_Z1fPSt6vectorIiE", "f(std::vector<int>*)", ["void*"]),
    ("_Z1fRfODn", "f(float&, std::nullptr_t&&)", [None, None]),
    ("_Z1fPfPS_S0_", "f(float*, float**, float**)", ["float32*", "void*", "void*"]),
    ("saxpy", None, None),
    ("_Z", None, None),
    ("_Z999f", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("lowered", "spelling", "words"), MANGLED)
def test_mangled_names(lowered, spelling, words):
    function = demangle(lowered)
    if spelling is None:
        assert function is None
    else:
        assert function.spelling == spelling
        assert [kind.word for kind in function.types] == words


def test_no_mangled_name_is_too_odd():
    dice = random.Random(5)
    letters = "".join(lowered for lowered, _, _ in MANGLED)
    for _ in range(20_000):
        lowered, _, _ = dice.choice(MANGLED)
        at = dice.randrange(2, len(lowered) + 1)
        changed = lowered[:at] + "".join(dice.choices(letters, k=dice.randrange(6)))
        demangle(changed + lowered[at + dice.randrange(4) :])
    assert demangle("_Z1f" + "P" * 100_000 + "f") is None


PARAMETERS = [
    ("", []),
    ("void", []),
    ("float* x, int n", [("x", "float32*"), ("n", "int32")]),
    ("const float *x, float const * y", [("x", "const float32*"), ("y", "const float32*")]),
    ("const float* __restrict__ x", [("x", "const float32*")]),
    ("float *const x, volatile int* y", [("x", "float32*"), ("y", "int32*")]),
    ("float x[], const int y[16], int z[2][3]", [("x", "float32*"), ("y", "const int32*"),
                                                 ("z", "int32*")]),
    ("float*, int, unsigned", [(None, "float32*"), (None, "int32"), (None, "uint32")]),
    ("unsigned n, long long unsigned int m", [("n", "uint32"), ("m", "uint64")]),
    ("signed char a, char b, short int c", [("a", "int8"), ("b", "char"), ("c", "int16")]),
    ("const int n, int const m", [("n", "int32"), ("m", "int32")]),
    ("size_t n, std::uint8_t a, cuda::std::int16_t b", [("n", "uint64"), ("a", "uint8"),
                                                        ("b", "int16")]),
    ("__half h, const nv_bfloat16* b", [("h", "float16"), ("b", "const bfloat16*")]),
    ("cuFloatComplex* c, cuda::std::complex<double> d", [("c", "complex64*"), ("d", "complex128")]),
    ("float2 v, float4* w, const struct Pair* p", [("v", "value"), ("w", "void*"),
                                                   ("p", "const void*")]),
    ("float** x, const char* const* names", [("x", "void*"), ("names", "const void*")]),
    ("void* p, const void *q", [("p", "void*"), ("q", "const void*")]),
    ("const dim3 d, uchar4 const, longlong2 l, float5 f, float2 g[]", [
        ("d", "value"), (None, "value"), ("l", "value"), ("f", None), ("g", "void*")]),
    ("Box<int, 3> b, Box<float, 2>* c", [("b", None), ("c", "void*")]),
    ("void (*f)(int), float (&r)[3], float& s", [(None, None), (None, None), ("s", None)]),
    ("int n = 3, float x /* the , comma */, int m // more\n", [("n", "int32"), ("x", "float32"),
                                                               ("m", "int32")]),
    ("[[maybe_unused]] int n, const __grid_constant__ int m", [("n", "int32"), ("m", "int32")]),
    ("long double x, __int128 y, wchar_t w", [("x", None), ("y", None), ("w", "int32")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), PARAMETERS)
def test_parameters_in_the_source(text, expected):
    source = f'extern "C" __global__ void kernel({text}) {{}}'
    assert read_declarations([source]) == {"kernel": [tuple(expected)]}


ALIASES = [
    ("#define REAL float", "REAL", "float32"),
    ("  #  define REAL \\\n   double", "REAL", "float64"),
    ("#define REAL float // not double", "REAL", "float32"),
    ("using real = float;", "real", "float32"),
    ("typedef unsigned long long word;", "word", "uint64"),
    ("using a = int; using b = a; typedef b c;", "c", "int32"),
    ("#define int long", "int", "int64"),
    # In doubt, nothing is known.
    ("#ifdef X\n#define REAL float\n#else\n#define REAL double\n#endif", "REAL", None),
    ("using a = b; using b = a;", "a", None),
    ("#define REAL(x) x", "REAL", None),
    ("", "unheard_of", None),
    ("typedef float* pointer;", "pointer", None),
    ("typedef float vector[3];", "vector", None),
    ("namespace other { using half = float; }", "half", None),
    ("struct Box { typedef unsigned size_t; };", "size_t", None),
    ("struct cuComplex { double real, imaginary; };", "cuComplex", None),
    ("typedef unsigned char uint8_t;", "uint8_t", "uint8"),
    ("", "float2", "value"),
    ("#define float2 float*", "float2", None),
    ("using pair = float2;", "pair", None),
]


@pytest.mark.parametrize(("before", "word", "expected"), ALIASES)
def test_other_names_of_types(before, word, expected):
    source = f"{before}\n__global__ void kernel({word} x);"
    assert read_declarations([source]) == {"kernel": [(("x", expected),)]}


def test_a_pointer_may_hide_constness_behind_a_name():
    # What such a parameter points to may be written or not, and is not guessed.
    source = "using in = const float; __global__ void kernel(in* x, const in* y, other* z);"
    (parameters,) = read_declarations([source])["kernel"]
    assert parameters == (("x", None), ("y", None), ("z", "void*"))


def test_macros_of_the_command_line():
    source = "__global__ void kernel(REAL x, COUNT n, OTHER m);"
    for options in (
        ["-DREAL=float", "-D", "COUNT=int"],
        ["--define-macro=REAL=float", "-DCOUNT=int"],
    ):
        (parameters,) = read_declarations([source], options)["kernel"]
        assert parameters == (("x", "float32"), ("n", "int32"), ("m", None))


def test_macros_of_the_command_line_have_values_of_several_words():
    source = "__global__ void kernel(BYTE* x, WORD n, LAST m);"
    for options in (
        ["-DBYTE=unsigned char", "-D", "WORD=unsigned long long", " -D LAST=long int "],
        ["--define-macro=BYTE=unsigned char", "-DWORD=unsigned long long", "-DLAST=long int"],
    ):
        (parameters,) = read_declarations([source], options)["kernel"]
        assert parameters == (("x", "uint8*"), ("n", "uint64"), ("m", "int64"))


GUARDED = """
#ifndef REAL
#define REAL float
#endif
typedef int count;
extern "C" __global__ void kernel(REAL* x, const REAL* y, count n, double z);
"""


def test_headers_count_that_have_no_kernels():
    known = (("x", "float32*"), ("y", "const float32*"), ("n", "int32"), ("z", "float64"))
    assert describe_kernels(["kernel"], {}, [GUARDED])["kernel"] == ("kernel", known)
    headers = ["#define REAL double", "typedef int unused;"]
    in_doubt = (("x", None), ("y", None), ("n", "int32"), ("z", "float64"))
    assert describe_kernels(["kernel"], {}, [GUARDED, *headers])["kernel"] == ("kernel", in_doubt)


@pytest.mark.parametrize(
    ("files", "real", "count"),
    [
        (["#define REALLY double"], "float32*", "int32"),
        (["#define REAL double"], None, "int32"),
        (["#define OTHER\n", "namespace ns { typedef long count; }"], "float32*", None),
        (None, None, None),
    ],
)
def test_names_that_included_files_have_too_are_in_doubt(files, real, count):
    kernels = describe_kernels(["kernel"], {}, [GUARDED], [], files)
    const = None if real is None else f"const {real}"
    expected = (("x", real), ("y", const), ("n", count), ("z", "float64"))
    assert kernels["kernel"] == ("kernel", expected)


def test_attributes_before_the_name():
    for attributes in (
        "void __launch_bounds__(256, 2)",
        "__launch_bounds__(N * (2 + 1)) void",
        "[[deprecated]] void",
        "void __attribute__((used))",
        "static void __cluster_dims__(2, 1, 1) __launch_bounds__(128)",
    ):
        declared = read_declarations([f"__global__ {attributes} kernel(int n) {{ f(n); }}"])
        assert declared == {"kernel": [(("n", "int32"),)]}


def test_what_is_no_declaration():
    source = r"""
    // __global__ void in_a_comment(int n);
    /* __global__ void in_another(int n); */
    const char* text = "__global__ void in_a_string(int n);";
    const char* raw = R"x(__global__ void in_a_raw_string(int n);)x";
    #define KERNEL __global__ void in_a_macro(int n)
    char quote = '"'; int big = 1'000'000;
    __global__ void there(int n);
    """
    assert list(read_declarations([source])) == ["there"]


def test_no_source_is_too_odd():
    dice = random.Random(6)
    odd = '__global__ void f(const int* x[3], "a") { } typedef using = ; < > [[ ]] :: // /* */'
    pieces = re.findall(r"\w+|\W", odd + '# define include R"( )" \' \n \\\n')
    for _ in range(5_000):
        source = "__global__ " + " ".join(dice.choices(pieces, k=dice.randrange(30)))
        read_declarations([source])
        read_declarations([source.replace(" ", "")])


SOURCE = """
template <class T> __global__ void scale(T* values, T factor, int count);
namespace ns { __global__ void alone(float* x); }
__global__ void same(float* x, int n);
__global__ void same(double* x);
extern "C" {
__global__ void plain(const float*, int);
__global__ void plain(const float* x, int n) {}
}
"""
LOWERED = ["_Z4samePd", "plain", "_Z4samePfi", "_ZN2ns5aloneEPf", "_Z5scaleIfEvPT_S0_i"]


def test_kernels_are_named_as_in_the_source():
    kernels = describe_kernels(LOWERED, {"scale<float>": LOWERED[4]}, [SOURCE])
    assert kernels == {
        "scale<float>": (
            "_Z5scaleIfEvPT_S0_i",
            (("values", "float32*"), ("factor", "float32"), ("count", "int32")),
        ),
        "ns::alone": ("_ZN2ns5aloneEPf", (("x", "float32*"),)),
        "same(double*)": ("_Z4samePd", (("x", "float64*"),)),
        "same(float*, int)": ("_Z4samePfi", (("x", "float32*"), ("n", "int32"))),
        "plain": ("plain", (("x", "const float32*"), ("n", "int32"))),
    }
    assert list(kernels)[:2] == ["scale<float>", "ns::alone"]


def test_what_is_passed_by_value():
    # float2, an enumeration and a structure of a template are known to be no pointers; a reference
    # is one.
    lowered = "_Z1f6float21E3BoxIPfERKiPS1_e"
    (entry,) = describe_kernels([lowered], {}, []).values()
    words = [word for _, word in entry[1]]
    assert words == ["value", "value", "value", None, "void*", None]


def test_names_of_expressions_go_before():
    kernels = describe_kernels(
        LOWERED, {"&plain": "plain", "scale< float >": LOWERED[4], "ns::alone": LOWERED[3]}, []
    )
    assert set(kernels) == {
        "&plain", "scale< float >", "ns::alone", "same(double*)", "same(float*, int)",
    }  # fmt: skip
    # Without a source there are the types of the mangled names, and no others.
    assert kernels["&plain"] == ("plain", None)
    assert kernels["ns::alone"] == ("_ZN2ns5aloneEPf", ((None, "float32*"),))


def test_an_overload_with_a_name_of_c():
    kernels = describe_kernels(["_Z5plainPf", "plain"], {}, [])
    assert kernels == {
        "plain(float*)": ("_Z5plainPf", ((None, "float32*"),)),
        "plain": ("plain", None),
    }


def test_declarations_that_disagree_are_not_believed():
    source = '#if A\nextern "C" __global__ void f(float* x, int n);\n#else\n' \
             'extern "C" __global__ void f(double* x, int m);\n#endif'  # fmt: skip
    assert describe_kernels(["f"], {}, [source]) == {"f": ("f", ((("x", None), (None, "int32"))))}
    longer = source + '\nextern "C" __global__ void f(int n);'
    assert describe_kernels(["f"], {}, [longer]) == {"f": ("f", None)}


def test_a_kernel_with_an_unknown_mangling_has_its_name_in_the_code():
    assert describe_kernels(["_Z1fIJifEEvDpT_"], {}, []) == {
        "_Z1fIJifEEvDpT_": ("_Z1fIJifEEvDpT_", None)
    }
