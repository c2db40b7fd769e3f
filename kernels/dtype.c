/* What is known of a dtype, and which one two of them have in common. */
#include "gpuops.h"

static const struct {
    const char *name;
    int bytes;
} DTYPES[] = {
    [DTYPE_OPAQUE] = {"a dtype without arithmetic", 0},
    [DTYPE_BOOL] = {"bool", 1},
    [DTYPE_INT8] = {"int8", 1},
    [DTYPE_INT16] = {"int16", 2},
    [DTYPE_INT32] = {"int32", 4},
    [DTYPE_INT64] = {"int64", 8},
    [DTYPE_UINT8] = {"uint8", 1},
    [DTYPE_UINT16] = {"uint16", 2},
    [DTYPE_UINT32] = {"uint32", 4},
    [DTYPE_UINT64] = {"uint64", 8},
    [DTYPE_FLOAT16] = {"float16", 2},
    [DTYPE_BFLOAT16] = {"bfloat16", 2},
    [DTYPE_FLOAT32] = {"float32", 4},
    [DTYPE_FLOAT64] = {"float64", 8},
    [DTYPE_COMPLEX64] = {"complex64", 8},
    [DTYPE_COMPLEX128] = {"complex128", 16},
};

int64_t dtype_bytes(Dtype dtype)
{
    return DTYPES[dtype].bytes;
}

const char *dtype_name(Dtype dtype)
{
    return DTYPES[dtype].name;
}

static Dtype promote_integers(Dtype one, Dtype other)
{
    const bool one_is_signed = one <= DTYPE_INT64, other_is_signed = other <= DTYPE_INT64;
    if (one_is_signed == other_is_signed) return one > other ? one : other;
    const Dtype with_sign = one_is_signed ? one : other, without = one_is_signed ? other : one;
    if (dtype_bytes(with_sign) > dtype_bytes(without)) return with_sign;
    /* The next larger one with a sign; of uint64 there is none. */
    if (without == DTYPE_UINT64) return DTYPE_FLOAT64;
    return (Dtype)(without - DTYPE_UINT8 + DTYPE_INT16);
}

/* The smallest float that takes part in NumPy's promotion for a number that is not complex. */
static Dtype float_beside(Dtype dtype)
{
    if (!dtype_is_integer(dtype)) return dtype == DTYPE_BOOL ? DTYPE_FLOAT16 : dtype;
    return dtype_bytes(dtype) == 1   ? DTYPE_FLOAT16
           : dtype_bytes(dtype) == 2 ? DTYPE_FLOAT32
                                     : DTYPE_FLOAT64;
}

static Dtype promote_floats(Dtype one, Dtype other)
{
    if (one == other) return one;
    /* Neither of the two 16-bit floats holds the other. */
    const Dtype larger = one > other ? one : other;
    return larger == DTYPE_BFLOAT16 ? DTYPE_FLOAT32 : larger;
}

static Dtype real_part(Dtype dtype)
{
    return dtype == DTYPE_COMPLEX64    ? DTYPE_FLOAT32
           : dtype == DTYPE_COMPLEX128 ? DTYPE_FLOAT64
                                       : dtype;
}

/* As numpy.promote_types; and bfloat16, for which ml_dtypes leaves some pairs out, is promoted as
 * float16 is. */
Dtype promote(Dtype one, Dtype other)
{
    if (one == DTYPE_OPAQUE || other == DTYPE_OPAQUE) return DTYPE_OPAQUE;
    if (one == other || other == DTYPE_BOOL) return one;
    if (one == DTYPE_BOOL) return other;
    if (dtype_is_integer(one) && dtype_is_integer(other)) return promote_integers(one, other);
    const Dtype first = real_part(one), second = real_part(other);
    Dtype result;
    if (dtype_is_integer(first) && dtype_bytes(first) == 1)
        result = second;
    else if (dtype_is_integer(second) && dtype_bytes(second) == 1)
        result = first;
    else
        result = promote_floats(float_beside(first), float_beside(second));
    if (!dtype_is_complex(one) && !dtype_is_complex(other)) return result;
    return result == DTYPE_FLOAT64 ? DTYPE_COMPLEX128 : DTYPE_COMPLEX64;
}

static Weak kind_of(Dtype dtype)
{
    return dtype_is_complex(dtype)   ? WEAK_COMPLEX
           : dtype_is_float(dtype)   ? WEAK_FLOAT
           : dtype_is_integer(dtype) ? WEAK_INT
                                     : WEAK_NOT;
}

bool dtype_casts(Dtype from, Dtype to)
{
    if (from == DTYPE_OPAQUE || to == DTYPE_OPAQUE) return false;
    if (dtype_is_integer(from) && dtype_is_integer(to)) /* a sign is not given up */
        return from > DTYPE_INT64 || to <= DTYPE_INT64;
    return kind_of(from) <= kind_of(to);
}

bool dtype_widens(Dtype from, Dtype to)
{
    return from != DTYPE_OPAQUE && promote(from, to) == to;
}

Dtype result_dtype(const View *views, int count)
{
    Dtype result = DTYPE_OPAQUE;
    Weak weak = WEAK_NOT;
    for (int i = 0; i < count; i++) {
        if (views[i].weak > weak) weak = views[i].weak;
        if (views[i].weak != WEAK_NOT) continue;
        if (views[i].dtype == DTYPE_OPAQUE) return DTYPE_OPAQUE;
        result = result == DTYPE_OPAQUE ? views[i].dtype : promote(result, views[i].dtype);
    }
    if (result == DTYPE_OPAQUE) { /* Python scalars alone */
        result = weak == WEAK_INT     ? DTYPE_INT64
                 : weak == WEAK_FLOAT ? DTYPE_FLOAT64
                                      : DTYPE_COMPLEX128;
    } else if (weak > kind_of(result)) {
        const bool is_float = dtype_is_float(result);
        if (weak == WEAK_INT)
            result = DTYPE_INT64;
        else if (weak == WEAK_FLOAT)
            result = DTYPE_FLOAT64;
        else
            result = is_float && result != DTYPE_FLOAT64 ? DTYPE_COMPLEX64 : DTYPE_COMPLEX128;
    }
    return result;
}
