/* Elements on the host in a wider dtype, bit for bit as numpy.ndarray.astype gives them.
 *
 * The CPU's loops over elements read operands of other dtypes through these functions, a few
 * hundred at a time; and what an operator wants as a whole is copied by such a loop. */
#include "each.cuh"

#include <type_traits>

/* What a number is before it is converted. */
template <class T>
ALWAYS_INLINE static inline T number_of(T value)
{
    return value;
}

ALWAYS_INLINE static inline uint8_t number_of(Bool value)
{
    return value.byte != 0;
}

ALWAYS_INLINE static inline float number_of(Half value)
{
    return static_cast<float>(value);
}

ALWAYS_INLINE static inline float number_of(BFloat16 value)
{
    return static_cast<float>(value);
}

template <class Number>
ALWAYS_INLINE static inline void cast_to(Number number, Half *item)
{
    *item = Half(static_cast<float>(number));
}

template <class Number>
ALWAYS_INLINE static inline void cast_to(Number number, BFloat16 *item)
{
    *item = BFloat16(static_cast<float>(number));
}

template <class Number, class Real>
ALWAYS_INLINE static inline void cast_to(Number number, Complex<Real> *item)
{
    *item = {static_cast<Real>(number), 0};
}

template <class Real>
ALWAYS_INLINE static inline void cast_to(Complex<float> number, Complex<Real> *item)
{
    *item = {number.real, number.imaginary};
}

template <class Number, class T>
ALWAYS_INLINE static inline void cast_to(Number number, T *item)
{
    *item = static_cast<T>(number);
}

/* The same as dtype_widens, of two types. */
template <class From, class To>
constexpr bool widens()
{
    constexpr bool to_double = std::is_same_v<To, double> || std::is_same_v<To, Complex<double>>;
    constexpr bool to_float = std::is_same_v<To, float> || std::is_same_v<To, Complex<float>>;
    constexpr bool to_short = std::is_same_v<To, Half> || std::is_same_v<To, BFloat16>;
    if constexpr (std::is_same_v<From, To> || std::is_same_v<To, Bool>)
        return false;
    else if constexpr (std::is_same_v<From, Bool>)
        return true;
    else if constexpr (std::is_integral_v<From> && std::is_integral_v<To>)
        return sizeof(From) < sizeof(To) && (std::is_signed_v<To> || !std::is_signed_v<From>);
    else if constexpr (std::is_integral_v<From>)
        return to_double || (to_float && sizeof(From) <= 2) || (to_short && sizeof(From) == 1);
    else if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>)
        return to_float || to_double;
    else if constexpr (std::is_same_v<From, float>)
        return to_double || std::is_same_v<To, Complex<float>>;
    else
        return std::is_same_v<To, Complex<double>>;
}

template <class From, class To>
ALWAYS_INLINE static inline void cast_stretch(To *to, const char *from, int64_t step, int64_t count)
{
    From item;
    if (step == (int64_t)sizeof(From)) { /* which becomes vectors */
        for (int64_t i = 0; i < count; i++) {
            memcpy(&item, from + i * (int64_t)sizeof(From), sizeof(From));
            cast_to(number_of(item), to + i);
        }
    } else {
        for (int64_t i = 0; i < count; i++) {
            memcpy(&item, from + i * step, sizeof(From));
            cast_to(number_of(item), to + i);
        }
    }
}

template <class From, class To>
static void cast_plain(void *to, const char *from, int64_t step, int64_t count)
{
    cast_stretch<From>(static_cast<To *>(to), from, step, count);
}

#ifdef TARGET_AVX2
template <class From, class To>
TARGET_AVX2 static void cast_avx2(void *to, const char *from, int64_t step, int64_t count)
{
    cast_stretch<From>(static_cast<To *>(to), from, step, count);
}
#endif

template <class From, class To>
static EachCast cast_of()
{
#ifdef TARGET_AVX2
    if (cpu_has(CPU_LEVEL_3)) return cast_avx2<From, To>;
#endif
    return cast_plain<From, To>;
}

template <class Function>
static void with_number(Dtype dtype, Function function)
{
    if (with_float(dtype, function) || with_complex(dtype, function)) return;
    switch (dtype) {
    case DTYPE_BOOL:
        return function(Bool());
    case DTYPE_INT8:
        return function(int8_t());
    case DTYPE_INT16:
        return function(int16_t());
    case DTYPE_INT32:
        return function(int32_t());
    case DTYPE_INT64:
        return function(int64_t());
    case DTYPE_UINT8:
        return function(uint8_t());
    case DTYPE_UINT16:
        return function(uint16_t());
    case DTYPE_UINT32:
        return function(uint32_t());
    case DTYPE_UINT64:
        return function(uint64_t());
    default: /* opaque */
        return;
    }
}

EachCast each_cast(Dtype from, Dtype to)
{
    EachCast cast = NULL;
    with_number(from, [&](auto source) {
        with_number(to, [&](auto target) {
            using From = decltype(source);
            using To = decltype(target);
            if constexpr (widens<From, To>()) cast = cast_of<From, To>();
        });
    });
    return cast;
}

/* An operand as it is, but for its dtype. */
struct Same {
    static constexpr int INPUTS = 1;
    static constexpr bool IS_HEAVY = false;
    static constexpr bool FUSES = false;

    template <class T, class C>
    ALWAYS_INLINE static HOST_DEVICE inline C compute(C x)
    {
        return x;
    }
};

void cast_on_cpu(const View *target, const View *source)
{
    Call call = {};
    call.input_count = 1;
    call.compute = target->dtype;
    view_copy(&call.inputs[0], source);
    view_copy(&call.out, target);
    EachLoops loops;
    each_loops(&call, &loops);
    each_casts(&call, &loops);
    const auto run = [&](auto zero) { each_on_cpu<Same, decltype(zero)>(&loops); };
    (void)(with_float(target->dtype, run) || with_integer_bits(target->dtype, run) ||
           with_complex(target->dtype, run));
}
