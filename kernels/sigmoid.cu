/* sigmoid: 1 / (1 + exp(-x)), element by element, and sigmoid_backward: grad * y * (1 - y), which
 * is its derivative times grad, where y is its result.
 *
 * Of float32 and float64, with t = -|x|, so that nothing overflows:
 *
 *     k = round(t / ln 2),  r = t - k ln 2           |r| <= ln(2) / 2; k ln 2 in two parts
 *     exp(t) = 2^k p,  p = 1 + s,  s = r + r^2 series(r)
 *     sigmoid(t) = q 2^k,  q = p / (1 + 2^k p),  sigmoid(-t) = 1 - sigmoid(t)
 *
 * The error that rounding leaves in q is computed, and taken out of it again. Results may be
 * subnormal, where 2^k is no normal float: it is applied as the product of two. No step branches,
 * which lets a compiler make vector instructions of it. The largest error is 0.995 ulp in float32
 * (of all values) and 1.02 ulp in float64. Infinities are no exception, and NaN goes through it.
 *
 * series is the polynomial with the least relative error in exp(r), found by Remez' exchange. */
#include "each.cuh"

template <class Real>
struct Exponential;

template <>
struct Exponential<float> {
    using Bits = uint32_t;
    static constexpr int FRACTION_BITS = 23;
    static constexpr float LOWEST = -104; /* whose sigmoid is rounded to 0 */
    static constexpr float LOG2_E = 0x1.715476p0f;
    static constexpr float LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
    /* A number added to this one is rounded to an integer, which is in the lowest bits of the sum,
     * above twice the bias of exponents. */
    static constexpr float INTEGERS = 0x1.8p23f + 2 * 127;

    template <class Sum>
    ALWAYS_INLINE static HOST_DEVICE inline float series(float r)
    {
        float sum = 0x1.6a2266p-10f;
        sum = Sum::of(sum, r, 0x1.123b04p-7f);
        sum = Sum::of(sum, r, 0x1.5558f8p-5f);
        sum = Sum::of(sum, r, 0x1.55549p-3f);
        return Sum::of(sum, r, 0x1.fffffcp-2f);
    }
};

template <>
struct Exponential<double> {
    using Bits = uint64_t;
    static constexpr int FRACTION_BITS = 52;
    static constexpr double LOWEST = -746;
    static constexpr double LOG2_E = 0x1.71547652b82fep0;
    static constexpr double LN2_HIGH = 0x1.62e42fefa38p-1, LN2_LOW = 0x1.ef35793c7673p-45;
    static constexpr double INTEGERS = 0x1.8p52 + 2 * 1023;

    template <class Sum>
    ALWAYS_INLINE static HOST_DEVICE inline double series(double r)
    {
        double sum = 0x1.ad7e8911cb9a8p-26;
        sum = Sum::of(sum, r, 0x1.28ae345cf3891p-22);
        sum = Sum::of(sum, r, 0x1.71df271fe9ac1p-19);
        sum = Sum::of(sum, r, 0x1.a019994465d51p-16);
        sum = Sum::of(sum, r, 0x1.a01a0128fdc0fp-13);
        sum = Sum::of(sum, r, 0x1.6c16c1846fc3fp-10);
        sum = Sum::of(sum, r, 0x1.1111111128171p-7);
        sum = Sum::of(sum, r, 0x1.5555555550754p-5);
        sum = Sum::of(sum, r, 0x1.55555555554f8p-3);
        return Sum::of(sum, r, 0x1.000000000000ap-1);
    }
};

/* a * b + c with one rounding, and with two where one takes a call of the C library. The error is
 * hardly larger, for the parts of ln 2 are short enough that their products with k are exact. */
struct Fused {
    ALWAYS_INLINE static HOST_DEVICE inline float of(float a, float b, float c)
    {
        return __builtin_fmaf(a, b, c);
    }
    ALWAYS_INLINE static HOST_DEVICE inline double of(double a, double b, double c)
    {
        return __builtin_fma(a, b, c);
    }
};

struct Unfused {
    template <class Real>
    ALWAYS_INLINE static HOST_DEVICE inline Real of(Real a, Real b, Real c)
    {
        return a * b + c;
    }
};

/* 1 / x for 1 <= x <= 2. An approximation will do, since the quotient is corrected. */
ALWAYS_INLINE static HOST_DEVICE inline float inverse_of(float x)
{
#ifdef __CUDA_ARCH__
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
#else
    return 1 / x;
#endif
}

ALWAYS_INLINE static HOST_DEVICE inline double inverse_of(double x)
{
#ifdef __CUDA_ARCH__
    /* Good to 23 bits, which Newton's step doubles. */
    double inverse;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(x));
    return fma(fma(-x, inverse, 1.0), inverse, inverse);
#else
    return 1 / x;
#endif
}

template <class Sum, class Real>
ALWAYS_INLINE static HOST_DEVICE inline Real sigmoid_of(Real x)
{
    using E = Exponential<Real>;
    using Bits = typename E::Bits;
    constexpr int SIGN = 8 * sizeof(Real) - 1;
    const Bits bits = bits_as<Bits>(x);
    Real t = bits_as<Real>(bits | Bits(1) << SIGN);
    t = t < E::LOWEST ? E::LOWEST : t;

    const Real sum = Sum::of(t, E::LOG2_E, E::INTEGERS);
    const Real k = sum - E::INTEGERS;
    const Real r = Sum::of(k, -E::LN2_LOW, Sum::of(k, -E::LN2_HIGH, t));
    const Real s = Sum::of(r * r, E::template series<Sum>(r), r);
    /* Two halves of k, with the bias of exponents in each. */
    const Bits all = bits_as<Bits>(sum), some = all >> 1;
    const Real scale = bits_as<Real>(some << E::FRACTION_BITS);
    const Real other_scale = bits_as<Real>((all - some) << E::FRACTION_BITS);

    const Real p = 1 + s;
    const Real numerator = p * scale, lost = (s - (p - 1)) * scale;
    const Real exponential = numerator * other_scale;
    const Real inverse = inverse_of(1 + exponential);
    const Real rough = numerator * inverse;
    /* numerator + lost * inverse - rough * (1 + exponential), of which little is left. */
    const Real rest = Sum::of(lost, inverse, Sum::of(-rough, exponential, numerator - rough));
    const Real below = Sum::of(rest, inverse, rough) * other_scale;
    const Bits is_below = 0 - (bits >> SIGN);
    return bits_as<Real>((bits_as<Bits>(below) & is_below) |
                         (bits_as<Bits>(1 - below) & ~is_below));
}

template <class Sum>
struct SigmoidOf {
    static constexpr int INPUTS = 1;
    static constexpr bool IS_HEAVY = true;
    static constexpr bool FUSES = true;

    template <class Function>
    static bool with_type(Dtype dtype, Function function)
    {
        return with_float(dtype, function);
    }

    template <class T, class C>
    ALWAYS_INLINE static HOST_DEVICE inline C compute(C x)
    {
#ifdef __CUDA_ARCH__
        if constexpr (sizeof(T) == 2) return sigmoid_for_16_bits(x);
#endif
        return sigmoid_of<Sum>(x);
    }

#ifdef __CUDA_ARCH__
    /* Five instructions, good to 17 bits: a GPU's memory delivers more 16-bit elements than it
     * could compute in full. exp(-x) is computed as a multiple of 2^-64, so that it overflows where
     * the result is no longer one that bfloat16 has. */
    static __device__ float sigmoid_for_16_bits(float x)
    {
        float exponential, inverse;
        const float power = fmaf(x, -Exponential<float>::LOG2_E, -64.0f);
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(power));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exponential + 0x1p-64f));
        return inverse * 0x1p-64f;
    }
#endif
};

struct SigmoidBackward {
    static constexpr int INPUTS = 2;
    static constexpr bool IS_HEAVY = false;
    static constexpr bool FUSES = false;

    template <class Function>
    static bool with_type(Dtype dtype, Function function)
    {
        return with_float(dtype, function);
    }

    template <class T, class C>
    ALWAYS_INLINE static HOST_DEVICE inline C compute(C grad, C y)
    {
        return grad * y * (1 - y);
    }
};

/* Integers and bools are computed in float64, as scipy.special.expit does. */
static Status plan_floats(Call *call)
{
    Dtype dtype = result_dtype(call->inputs, call->input_count);
    if (dtype_is_integer(dtype) || dtype == DTYPE_BOOL) dtype = DTYPE_FLOAT64;
    if (!dtype_is_float(dtype)) return fail_dtype(call, "real numbers");
    return plan_each(call, dtype);
}

Status plan_sigmoid(Call *call)
{
    return plan_floats(call);
}

Status run_sigmoid(Call *call)
{
#ifdef __x86_64__
    /* Without the instructions, a fused multiply-add is a call of the C library, and a slow one. */
    if (call->out.device == DEVICE_CPU && !cpu_has(CPU_LEVEL_3)) {
        EachLoops loops;
        each_loops(call, &loops);
        each_casts(call, &loops);
        with_float(call->compute, [&](auto zero) {
            using T = decltype(zero);
            each_in_threads<SigmoidOf<Unfused>, T>(&loops, each_plain<SigmoidOf<Unfused>, T>);
        });
        return STATUS_OK;
    }
#endif
    return run_each<SigmoidOf<Fused>>(call);
}

Status plan_sigmoid_backward(Call *call)
{
    return plan_floats(call);
}

Status run_sigmoid_backward(Call *call)
{
    return run_each<SigmoidBackward>(call);
}
