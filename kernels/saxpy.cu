/* saxpy: a * x + y, element by element, for any float, complex or integer dtype.
 *
 * BLAS's name for its float32 form. The product is not rounded before the sum (fma), neither in
 * float32 nor in float64. 16-bit floats are computed in float32 and rounded once. A complex product
 * is one fma for each real one, its second factor first: the real part is
 * fma(a.real, x.real, fma(-a.imaginary, x.imaginary, y.real)). Integers wrap around. */
#include "each.cuh"

#include <type_traits>

struct Saxpy {
    static constexpr int INPUTS = 3;
    static constexpr bool IS_HEAVY = false;
    static constexpr bool FUSES = true;

    template <class Function>
    static bool with_type(Dtype dtype, Function function)
    {
        return with_float(dtype, function) || with_integer_bits(dtype, function) ||
               with_complex(dtype, function);
    }

    template <class T>
    ALWAYS_INLINE static HOST_DEVICE inline float compute(float a, float x, float y)
    {
        return __builtin_fmaf(a, x, y);
    }

    template <class T>
    ALWAYS_INLINE static HOST_DEVICE inline double compute(double a, double x, double y)
    {
        return __builtin_fma(a, x, y);
    }

    template <class T, class Real>
    ALWAYS_INLINE static HOST_DEVICE inline Complex<Real> compute(Complex<Real> a, Complex<Real> x,
                                                                  Complex<Real> y)
    {
        return {
            compute<Real>(a.real, x.real, compute<Real>(-a.imaginary, x.imaginary, y.real)),
            compute<Real>(a.real, x.imaginary, compute<Real>(a.imaginary, x.real, y.imaginary))};
    }

    template <class T, class C, class = std::enable_if_t<std::is_integral_v<C>>>
    ALWAYS_INLINE static HOST_DEVICE inline C compute(C a, C x, C y)
    {
        return static_cast<C>(1u * a * x + y);
    }
};

Status plan_saxpy(Call *call)
{
    const Dtype dtype = result_dtype(call->inputs, call->input_count);
    if (dtype == DTYPE_OPAQUE || dtype == DTYPE_BOOL) return fail_dtype(call, "numbers");
    return plan_each(call, dtype);
}

Status run_saxpy(Call *call)
{
    return run_each<Saxpy>(call);
}
