/* Arrays on a device in another dtype, as numpy.ndarray.astype has it.
 *
 * Every element goes through the widest number of its kind, so that one kernel does for all pairs
 * of dtypes. Nobody calls this but for operands of mixed dtypes, where the bus of the device's
 * memory is what limits it all the same. */
#include "arithmetic.cuh"

#ifdef __CUDACC__

constexpr int THREADS = 256, ITEMS_IN_FLIGHT = 4;

struct Wide {
    enum { SIGNED, UNSIGNED, REAL } kind;
    int64_t integer; /* of the first two kinds; the bits are those of either */
    double real, imaginary;
};

template <class T>
HOST_DEVICE static Wide widen(T value)
{
    const bool is_signed = static_cast<T>(-1) < static_cast<T>(1);
    return {is_signed ? Wide::SIGNED : Wide::UNSIGNED, static_cast<int64_t>(value), 0, 0};
}

HOST_DEVICE static Wide widen_real(double real, double imaginary)
{
    return {Wide::REAL, 0, real, imaginary};
}

HOST_DEVICE static Wide widen(Bool value)
{
    return widen(static_cast<uint8_t>(value.byte != 0));
}

HOST_DEVICE static Wide widen(Half value)
{
    return widen_real(static_cast<float>(value), 0);
}

HOST_DEVICE static Wide widen(BFloat16 value)
{
    return widen_real(static_cast<float>(value), 0);
}

HOST_DEVICE static Wide widen(float value)
{
    return widen_real(value, 0);
}

HOST_DEVICE static Wide widen(double value)
{
    return widen_real(value, 0);
}

template <class Real>
HOST_DEVICE static Wide widen(Complex<Real> value)
{
    return widen_real(value.real, value.imaginary);
}

template <class Real>
HOST_DEVICE static Real to_real(const Wide &wide)
{
    if (wide.kind == Wide::SIGNED) return static_cast<Real>(wide.integer);
    if (wide.kind == Wide::UNSIGNED) return static_cast<Real>(static_cast<uint64_t>(wide.integer));
    return static_cast<Real>(wide.real);
}

/* What does not fit becomes the least integer, as on x86. */
HOST_DEVICE static int64_t to_integer(const Wide &wide)
{
    if (wide.kind != Wide::REAL) return wide.integer;
    const double value = wide.real, bound = 9223372036854775808.0;
    if (value >= bound && value < 2 * bound) return static_cast<int64_t>((uint64_t)value);
    return value >= -bound && value < bound ? static_cast<int64_t>(value) : INT64_MIN;
}

template <class T>
HOST_DEVICE static void narrow(const Wide &wide, T *item)
{
    *item = static_cast<T>(to_integer(wide));
}

HOST_DEVICE static void narrow(const Wide &wide, Bool *item)
{
    *item = Bool(wide.integer != 0 || wide.real != 0 || wide.imaginary != 0);
}

HOST_DEVICE static void narrow(const Wide &wide, Half *item)
{
    *item = Half(round_to_odd(to_real<double>(wide)));
}

HOST_DEVICE static void narrow(const Wide &wide, BFloat16 *item)
{
    *item = BFloat16(round_to_odd(to_real<double>(wide)));
}

HOST_DEVICE static void narrow(const Wide &wide, float *item)
{
    *item = to_real<float>(wide);
}

HOST_DEVICE static void narrow(const Wide &wide, double *item)
{
    *item = to_real<double>(wide);
}

template <class Real>
HOST_DEVICE static void narrow(const Wide &wide, Complex<Real> *item)
{
    *item = {to_real<Real>(wide), static_cast<Real>(wide.imaginary)};
}

template <class Function>
HOST_DEVICE static void with_item(Dtype dtype, const Function &function)
{
    if (dtype == DTYPE_COMPLEX64) return function(Complex<float>());
    if (dtype == DTYPE_COMPLEX128) return function(Complex<double>());
    with_real_on_device(dtype, function);
}

struct ConvertItems {
    static constexpr int MAX_THREADS = THREADS;

    char *target;
    const char *source;
    Dtype target_dtype, source_dtype;
    int64_t items;

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t first =
            thread.block * (int64_t)(THREADS * ITEMS_IN_FLIGHT) + (int64_t)thread.thread;
        Wide wide[ITEMS_IN_FLIGHT];
        with_item(source_dtype, [&](auto zero) {
            using T = decltype(zero);
            UNROLL
            for (int k = 0; k < ITEMS_IN_FLIGHT; k++)
                if (first + k * THREADS < items)
                    wide[k] = widen(reinterpret_cast<const T *>(source)[first + k * THREADS]);
        });
        with_item(target_dtype, [&](auto zero) {
            using T = decltype(zero);
            UNROLL
            for (int k = 0; k < ITEMS_IN_FLIGHT; k++)
                if (first + k * THREADS < items)
                    narrow(wide[k], reinterpret_cast<T *>(target) + first + k * THREADS);
        });
    }
};

static Status convert_packed(const View *target, const View *source, Stream *stream)
{
    ConvertItems body = {};
    body.target = static_cast<char *>(target->data);
    body.source = static_cast<const char *>(source->data);
    body.target_dtype = target->dtype;
    body.source_dtype = source->dtype;
    body.items = view_items(target);
    const int64_t blocks =
        (body.items + THREADS * ITEMS_IN_FLIGHT - 1) / (THREADS * ITEMS_IN_FLIGHT);
    if (blocks > INT32_MAX)
        return fail(STATUS_VALUE_ERROR, "an array of %lld elements is too large to be converted",
                    (long long)body.items);
    return launch(body, Grid{(unsigned)blocks, THREADS}, stream->handle);
}

/* Kernels read whole words: an address that is not a multiple of them is packed as well. */
static bool is_plain(const View *view)
{
    const uintptr_t place = reinterpret_cast<uintptr_t>(view->data);
    return view_is_packed(view) && place % (size_t)view->item_bytes == 0;
}

Status convert_on_device(const View *target, const View *source, Stream *stream)
{
    if (view_items(target) == 0) return STATUS_OK;
    View from, to;
    view_copy(&from, source);
    view_copy(&to, target);
    Memory *packed = NULL, *fresh = NULL;
    Status status = STATUS_OK;
    if (!is_plain(source)) {
        status = pack_on_device(source, stream, &from);
        if (status == STATUS_OK) packed = from.memory;
    }
    if (status == STATUS_OK && !is_plain(target)) {
        status = new_view(target, stream, &to);
        if (status == STATUS_OK) fresh = to.memory;
    }
    if (status == STATUS_OK) status = convert_packed(&to, &from, stream);
    if (status == STATUS_OK && fresh != NULL) status = copy_on_device(target, &to, stream);
    if (packed != NULL) memory_release(packed);
    if (fresh != NULL) memory_release(fresh);
    return status;
}

#endif
