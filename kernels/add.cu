/* add, multiply: x + y and x * y, element by element, as NumPy's ufuncs of the same names.
 *
 * Integers wrap around; of two bools, add is "or" and multiply "and"; 16-bit floats are computed in
 * float32 and rounded once, which gives the same as rounding the exact result. */
#include "each.cuh"

#include <type_traits>

/* The types of sums and products. */
struct Arithmetic {
    static constexpr int INPUTS = 2;
    static constexpr bool IS_HEAVY = false;
    static constexpr bool FUSES = false;

    template <class Function>
    static bool with_type(Dtype dtype, Function function)
    {
        if (dtype != DTYPE_BOOL)
            return with_float(dtype, function) || with_integer_bits(dtype, function) ||
                   with_complex(dtype, function);
        function(Bool());
        return true;
    }
};

struct Add : Arithmetic {
    template <class T, class C>
    ALWAYS_INLINE static HOST_DEVICE inline C compute(C x, C y)
    {
        if constexpr (std::is_same_v<C, bool>)
            return x || y;
        else
            return static_cast<C>(x + y);
    }
};

struct Multiply : Arithmetic {
    template <class T, class C>
    ALWAYS_INLINE static HOST_DEVICE inline C compute(C x, C y)
    {
        if constexpr (std::is_same_v<C, bool>)
            return x && y;
        else if constexpr (std::is_integral_v<C>)
            return static_cast<C>(1u * x * y); /* two uint16_t would be computed as int */
        else
            return x * y;
    }
};

Status plan_add(Call *call)
{
    const Dtype dtype = result_dtype(call->inputs, call->input_count);
    if (dtype == DTYPE_OPAQUE) return fail_dtype(call, "numbers and bools");
    return plan_each(call, dtype);
}

Status run_add(Call *call)
{
    return run_each<Add>(call);
}

Status plan_multiply(Call *call)
{
    return plan_add(call);
}

Status run_multiply(Call *call)
{
    return run_each<Multiply>(call);
}
