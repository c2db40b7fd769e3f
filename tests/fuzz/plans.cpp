/* Every operator on calls that the fuzzer makes up: shapes, strides, dtypes, options, contents.
 *
 * A plan may refuse what it likes. What it accepts is run on the CPU backend, and then
 *
 *     nothing outside of the arrays is touched: each has a piece of memory of its own size (ASan);
 *     the inputs, and what lies between the elements of the result, are as they were;
 *     a failure leaves the caller's own array as it was;
 *     the result does not depend on what was in its memory before. */
#include "gpuops.h"

#include <fuzzer/FuzzedDataProvider.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

using Bytes = std::vector<char>;

enum { MOST_ITEMS = 2048, MOST_RESULT_BYTES = 1 << 18 };

/* The arrays are those without a default. */
static int count_arrays(const std::string &signature)
{
    int arrays = 0;
    for (size_t at = 0; at < signature.size();) {
        const size_t end = std::min(signature.find(", ", at), signature.size());
        const std::string word = signature.substr(at, end - at);
        arrays += word != "/" && word != "*" && word.find('=') == std::string::npos;
        at = end + 2;
    }
    return arrays;
}

static bool has_result(const std::string &signature)
{
    return signature.find("out") != std::string::npos;
}

/* An array and its memory, which ends where the array ends. */
struct Array {
    View view = {};
    Bytes memory;

    void allocate(size_t before, size_t bytes)
    {
        memory.assign(bytes, 0);
        memory.shrink_to_fit();
        view.data = memory.data() + before;
    }
};

/* Which bytes of the memory belong to elements. */
static std::vector<bool> element_bytes(const Array &array)
{
    std::vector<bool> belongs(array.memory.size());
    const View &view = array.view;
    const int64_t items = view_items(&view);
    for (int64_t item = 0; item < items; item++) {
        int64_t at = static_cast<char *>(view.data) - array.memory.data(), rest = item;
        for (int i = view.ndim - 1; i >= 0; i--) {
            at += rest % view.shape[i] * view.strides[i];
            rest /= view.shape[i];
        }
        for (int64_t byte = 0; byte < view.item_bytes; byte++) belongs[at + byte] = true;
    }
    return belongs;
}

template <class Number>
static void fill_with_numbers(Bytes *memory, FuzzedDataProvider *data)
{
    for (size_t at = 0; at + sizeof(Number) <= memory->size(); at += sizeof(Number)) {
        const Number number = static_cast<Number>(data->ConsumeIntegralInRange(-5, 8));
        memcpy(memory->data() + at, &number, sizeof number);
    }
}

/* Small numbers, which are indices more often than not, or any bytes. */
static void fill(Array *array, FuzzedDataProvider *data)
{
    Bytes *memory = &array->memory;
    if (data->ConsumeProbability<float>() < 0.75f) {
        switch (array->view.item_bytes) {
        case 1:
            return fill_with_numbers<int8_t>(memory, data);
        case 2:
            return fill_with_numbers<int16_t>(memory, data);
        case 4:
            return fill_with_numbers<int32_t>(memory, data);
        default:
            return fill_with_numbers<int64_t>(memory, data);
        }
    }
    const Bytes some = data->ConsumeBytes<char>(memory->size());
    for (size_t at = 0; !some.empty() && at < memory->size(); at++)
        (*memory)[at] = some[at % some.size()];
}

static void set_dtype(View *view, Dtype dtype, int64_t opaque_bytes)
{
    view->dtype = dtype;
    view->item_bytes = dtype == DTYPE_OPAQUE ? opaque_bytes : dtype_bytes(dtype);
    view->dtype_name = dtype == DTYPE_OPAQUE ? "void" : dtype_name(dtype);
}

static Dtype draw_dtype(FuzzedDataProvider *data)
{
    return static_cast<Dtype>(data->ConsumeIntegralInRange<int>(0, DTYPE_COMPLEX128));
}

static void choose_dtype(View *view, FuzzedDataProvider *data)
{
    set_dtype(view, draw_dtype(data), data->ConsumeIntegralInRange(0, 40));
}

static void choose_shape(View *view, FuzzedDataProvider *data)
{
    int64_t items = 1;
    view->ndim = data->ConsumeIntegralInRange(0, 5);
    if (data->ConsumeIntegralInRange(0, 30) == 0) view->ndim = GPUOPS_MAX_DIMS;
    for (int i = 0; i < view->ndim; i++) {
        view->shape[i] = data->ConsumeIntegralInRange(0, view->ndim > 5 ? 2 : 9);
        if (items * view->shape[i] > MOST_ITEMS) view->shape[i] = 1;
        items *= view->shape[i] > 0 ? view->shape[i] : 1;
    }
}

/* Axes in any order, with gaps, backwards, and again and again the same element; at any address. */
static void choose_strides(Array *array, FuzzedDataProvider *data)
{
    View *view = &array->view;
    int order[GPUOPS_MAX_DIMS];
    for (int i = 0; i < view->ndim; i++) order[i] = view->ndim - 1 - i;
    const bool plain = data->ConsumeBool();
    size_t before = plain ? 0 : data->ConsumeIntegralInRange(0, 8), reach = 0;
    int64_t step = view->item_bytes;
    for (int i = 0; i < view->ndim; i++) {
        if (!plain) std::swap(order[i], order[data->ConsumeIntegralInRange(i, view->ndim - 1)]);
        const int64_t size = view->shape[order[i]], span = size > 0 ? size - 1 : 0;
        const int way = plain ? 0 : data->ConsumeIntegralInRange(0, 5);
        int64_t stride = step;
        if (way == 1) stride += data->ConsumeIntegralInRange(0, 9);
        if (way == 2) stride = 0;
        if (stride != 0 && size > 0) step = stride * size;
        if (way == 3) stride = -stride;
        view->strides[order[i]] = stride;
        if (stride < 0)
            before += (size_t)(-stride * span);
        else
            reach += (size_t)(stride * span);
    }
    array->allocate(before,
                    view_items(view) == 0 ? before : before + reach + (size_t)view->item_bytes);
}

static void choose_contents(Array *array, FuzzedDataProvider *data)
{
    choose_strides(array, data);
    fill(array, data);
}

static void choose_array(Array *array, FuzzedDataProvider *data)
{
    View *view = &array->view;
    view->device = DEVICE_CPU;
    choose_dtype(view, data);
    choose_shape(view, data);
    if (view->ndim == 0 && data->ConsumeBool()) {
        view->weak = data->PickValueInArray({WEAK_INT, WEAK_FLOAT, WEAK_COMPLEX});
        set_dtype(view,
                  view->weak == WEAK_INT     ? DTYPE_INT64
                  : view->weak == WEAK_FLOAT ? DTYPE_FLOAT64
                                             : DTYPE_COMPLEX128,
                  0);
    }
    choose_contents(array, data);
}

static void choose_options(Call *call, FuzzedDataProvider *data)
{
    call->axis = data->ConsumeIntegralInRange(-4, 3);
    call->axis_is_none = data->ConsumeIntegralInRange(0, 4) == 0;
    if (call->axis_is_none) call->axis = 0;
    call->mode = data->PickValueInArray({MODE_RAISE, MODE_WRAP, MODE_CLIP, MODE_FILL});
    call->deterministic = data->ConsumeBool();
    call->precision = data->PickValueInArray({PRECISION_FULL, PRECISION_TF32});
    call->border = data->PickValueInArray(
        {BORDER_REFLECT, BORDER_MIRROR, BORDER_NEAREST, BORDER_CONSTANT, BORDER_WRAP});
    call->border_value = data->ConsumeFloatingPoint<double>();
    call->origin_count = data->ConsumeIntegralInRange(0, 3);
    for (int &origin : call->origins) origin = data->ConsumeIntegralInRange(-4, 4);
    if (data->ConsumeIntegralInRange(0, 20) == 0) call->origins[0] = data->ConsumeIntegral<int>();
    call->device = DEVICE_CPU;
    call->slot = -1;
}

/* What the layer above sees to before an operator is run: inputs of the dtype that it computes in,
 * or of one that widens to it. */
static void cast_inputs(Call *call, Array *inputs, FuzzedDataProvider *data)
{
    bool any = false;
    for (int i = 0; i < call->input_count; i++) {
        View *view = &inputs[i].view;
        if (!(call->cast_inputs >> i & 1) || view->dtype == call->compute) continue;
        if (dtype_widens(view->dtype, call->compute) && data->ConsumeBool()) continue;
        set_dtype(view, call->compute, 0);
        view_pack(view);
        inputs[i].allocate(0, (size_t)(view_items(view) * view->item_bytes));
        fill(&inputs[i], data);
        any = true;
    }
    for (int i = 0; any && i < call->input_count; i++) {
        call->inputs[i] = inputs[i].view;
        call->inputs[i].weak = WEAK_NOT;
    }
}

static void require(bool holds, const Call *call, const char *promise)
{
    if (holds) return;
    fprintf(stderr, "%s: %s\n", call->op->name, promise);
    abort();
}

static void run(Call *call, Array *out, const Array *inputs)
{
    const Bytes before = out->memory;
    std::vector<Bytes> given;
    for (int i = 0; i < call->input_count; i++) given.push_back(inputs[i].memory);
    const Status status = run_call(call);
    for (int i = 0; i < call->input_count; i++)
        require(inputs[i].memory == given[i], call, "an input was written to");
    if (status != STATUS_OK)
        require(call->out_is_fresh || out->memory == before, call,
                "a failure left something in the caller's array");
    const std::vector<bool> belongs = element_bytes(*out);
    for (size_t at = 0; at < before.size(); at++)
        require(belongs[at] || out->memory[at] == before[at], call,
                "something between the elements of the result was written to");
    if (status != STATUS_OK || call->in_place) return;

    const Bytes result = out->memory;
    for (size_t at = 0; at < before.size(); at++)
        if (belongs[at]) out->memory[at] = static_cast<char>(~before[at]);
    require(run_call(call) == STATUS_OK && out->memory == result, call,
            "the result is another one the second time");
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    FuzzedDataProvider data(bytes, size);
    const Operator *op = &operators[data.ConsumeIntegralInRange<size_t>(0, OPERATORS - 1)];
    const bool in_place = !has_result(op->signature);
    Call call = {};
    call.op = op;
    call.input_count = count_arrays(op->signature) - in_place;
    choose_options(&call, &data);

    Array inputs[GPUOPS_MAX_INPUTS], out;
    if (in_place) {
        choose_array(&out, &data);
        call.out = out.view;
        call.out.weak = WEAK_NOT;
    }
    for (int i = 0; i < call.input_count; i++) {
        choose_array(&inputs[i], &data);
        call.inputs[i] = inputs[i].view;
    }
    const bool is_given = in_place || data.ConsumeBool();
    if (!in_place && is_given) call.wanted = draw_dtype(&data);
    if (op->plan(&call) != STATUS_OK) return 0;

    if (in_place && overlaps_itself(&call.out) != 0) return 0;
    for (int i = 0; i < call.input_count; i++)
        if (call.in_place && call.out.dtype == DTYPE_OPAQUE && i == 1 &&
            call.inputs[i].item_bytes != call.out.item_bytes)
            return 0;
    cast_inputs(&call, inputs, &data);
    if (!in_place) {
        int64_t result_bytes = call.out.item_bytes;
        for (int i = 0; i < call.out.ndim; i++)
            if (__builtin_mul_overflow(result_bytes, call.out.shape[i], &result_bytes)) return 0;
        if (result_bytes > MOST_RESULT_BYTES) return 0;
        out.view = call.out;
        out.view.device = DEVICE_CPU;
        if (is_given) {
            choose_strides(&out, &data);
            if (overlaps_itself(&out.view) != 0) return 0;
        } else {
            view_pack(&out.view);
            out.allocate(0, (size_t)(view_items(&out.view) * out.view.item_bytes));
        }
        call.out = out.view;
    }
    call.out_is_fresh = !is_given;
    Bytes one = data.ConsumeBytes<char>((size_t)call.out.item_bytes);
    one.resize((size_t)call.out.item_bytes);
    one.shrink_to_fit();
    if (call.mode == MODE_FILL) call.fill = one.data();
    run(&call, &out, inputs);
    return 0;
}
