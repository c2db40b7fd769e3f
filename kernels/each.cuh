/* Element by element: out[i] = function(inputs[i]...), with broadcasting, on both sides of a GPU.
 *
 * A function is a type with
 *     template <class T> static HOST_DEVICE C compute(C first, ...)       C = Computes<T>::Type
 * where T is the dtype of the elements, and C what it is computed in: float for the 16-bit floats,
 * whose result is rounded once. IS_HEAVY tells that it computes for longer than memory would keep
 * it waiting, and FUSES that it calls fma(). Both sides run the same function:
 *
 *     each_on_cpu     ranges of the output over the worker pool. Stretches that are contiguous, or
 *                     repeat one element, are done by a loop that the compiler turns into vector
 *                     instructions; all others go through small buffers that make them so.
 *     EachWords       a GPU's kernel. Operands that are contiguous along the innermost loop, or
 *                     repeat one element there, are read and written in words of 16 bytes; all
 *                     others an element at a time.
 *
 * run_each chooses. On a GPU operands have the dtype call->compute; run.cu sees to that. The CPU's
 * loops convert those of other dtypes as they read them, as far as they widen. */
#ifndef GPUOPS_EACH_CUH
#define GPUOPS_EACH_CUH

#include "arithmetic.cuh"

/* Reads elements of another dtype, at any step and alignment, as they are in that of target. */
typedef void (*EachCast)(void *target, const char *source, int64_t step, int64_t count);
/* cast.cu: for dtypes of which dtype_widens(from, to) holds, and that are not the same; else NULL.
 */
EachCast each_cast(Dtype from, Dtype to);

/* Loops over all operands at once, the innermost last: neighbours that follow one another in every
 * operand are one loop, and those of one element are none. */
struct EachLoops {
    int operands; /* out included */
    int ndim;     /* at least 1 */
    int64_t counts[GPUOPS_MAX_DIMS];
    int64_t strides[GPUOPS_MAX_INPUTS + 1][GPUOPS_MAX_DIMS]; /* in bytes; out is the last operand */
    char *data[GPUOPS_MAX_INPUTS + 1];
    EachCast casts[GPUOPS_MAX_INPUTS]; /* on the CPU; NULL: the operand has the dtype */
};

/* Sets all but the casts. */
void each_loops(const Call *call, EachLoops *loops);
void each_casts(const Call *call, EachLoops *loops);
/* The plan that all such operators have in common: shape, dtypes, and how run takes the operands.
 */
Status plan_each(Call *call, Dtype compute);
/* each_parts.cu, as Call has it. */
Status run_each_in_parts(Call *call, bool any, bool *done);
/* For the plan of an operator that does not compute in the dtype of its operands. */
Status fail_dtype(const Call *call, const char *expected);

/* The CPU. */

/* A loop over elements that do not depend on each other, also where out is an input. */
#define EACH_LOOP _Pragma("GCC ivdep")

constexpr int EACH_BUFFER_ITEMS = 512;
/* Of the result, what is worth another thread's while. */
constexpr int64_t EACH_LIGHT_BYTES = 512 << 10, EACH_HEAVY_BYTES = 256 << 10;

/* The stretches that have a loop of their own, by which inputs move on while the others repeat one
 * element: all do, or one of two is a scalar, or the first of three, as the factor of saxpy is. */
static inline bool each_has_loop(int inputs, int moves)
{
    const int all = (1 << inputs) - 1;
    return moves == all || (inputs == 2 && moves != 0) || (inputs == 3 && moves == 6);
}

template <class Function, class T, int MOVES>
ALWAYS_INLINE static inline void each_moving(T *out, const T *const *inputs, int64_t count)
{
    using C = typename Computes<T>::Type;
    constexpr int64_t FIRST = MOVES & 1, SECOND = MOVES >> 1 & 1, THIRD = MOVES >> 2 & 1;
    const T *x = inputs[0], *y = inputs[1], *z = inputs[2];
    if constexpr (Function::INPUTS == 1) {
        EACH_LOOP
        for (int64_t i = 0; i < count; i++) out[i] = T(Function::template compute<T>(C(x[i])));
    } else if constexpr (Function::INPUTS == 2) {
        EACH_LOOP
        for (int64_t i = 0; i < count; i++)
            out[i] = T(Function::template compute<T>(C(x[i * FIRST]), C(y[i * SECOND])));
    } else {
        EACH_LOOP
        for (int64_t i = 0; i < count; i++)
            out[i] = T(
                Function::template compute<T>(C(x[i * FIRST]), C(y[i * SECOND]), C(z[i * THIRD])));
    }
}

template <class Function, class T>
ALWAYS_INLINE static inline void each_stretch(T *out, const T *const *inputs, int moves,
                                              int64_t count)
{
    constexpr int ALL = (1 << Function::INPUTS) - 1;
    if (moves == ALL) return each_moving<Function, T, ALL>(out, inputs, count);
    if constexpr (Function::INPUTS == 2) {
        if (moves == 1) return each_moving<Function, T, 1>(out, inputs, count);
        return each_moving<Function, T, 2>(out, inputs, count);
    } else if constexpr (Function::INPUTS == 3) {
        return each_moving<Function, T, 6>(out, inputs, count);
    }
}

template <class T>
ALWAYS_INLINE static inline bool each_is_aligned(const char *data)
{
    return reinterpret_cast<uintptr_t>(data) % alignof(T) == 0;
}

/* Each element by a variable of its own: of a copy into an array, whose end is known, a fortified
 * memcpy is a call that looks for the end. */
template <class T>
ALWAYS_INLINE static inline void each_take(T *to, const char *from, int64_t step, int64_t count)
{
    EACH_LOOP
    for (int64_t i = 0; i < count; i++) {
        T item;
        memcpy(&item, from + i * step, sizeof item);
        to[i] = item;
    }
}

/* Steps that the compiler knows become vector instructions: backwards, and one of two to four, as
 * the parts of complex numbers and the channels of images lie. */
template <class T>
ALWAYS_INLINE static inline void each_gather(T *to, const char *from, int64_t step, int64_t count)
{
    constexpr int64_t SIZE = sizeof(T);
    if (step == -SIZE) return each_take(to, from, -SIZE, count);
    if (step == 2 * SIZE) return each_take(to, from, 2 * SIZE, count);
    if (step == 3 * SIZE) return each_take(to, from, 3 * SIZE, count);
    if (step == 4 * SIZE) return each_take(to, from, 4 * SIZE, count);
    each_take(to, from, step, count);
}

template <class T>
ALWAYS_INLINE static inline void each_scatter(char *to, int64_t step, const T *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const T item = from[i];
        memcpy(to + i * step, &item, sizeof item);
    }
}

/* One stretch of the innermost loop. Operands that neither follow one another nor repeat go through
 * buffers, and so do those of another dtype. */
template <class Function, class T>
ALWAYS_INLINE static inline void each_inner(char *const *data, const int64_t *steps,
                                            const EachCast *casts, int64_t count)
{
    constexpr int INPUTS = Function::INPUTS;
    alignas(64) T buffers[INPUTS + 1][EACH_BUFFER_ITEMS];
    const T *inputs[GPUOPS_MAX_INPUTS] = {};
    bool buffered[INPUTS + 1], any = false;
    int moves = 0;
    for (int k = 0; k <= INPUTS; k++) {
        const bool follows = steps[k] == (int64_t)sizeof(T) || (k < INPUTS && steps[k] == 0);
        buffered[k] = !follows || !each_is_aligned<T>(data[k]);
        if (k < INPUTS) buffered[k] |= casts[k] != NULL;
        any |= buffered[k];
        if (k < INPUTS && (steps[k] != 0 || buffered[k])) moves |= 1 << k;
    }
    for (int k = 0; k < INPUTS && !each_has_loop(INPUTS, moves); k++) {
        buffered[k] |= (moves >> k & 1) == 0;
        any |= buffered[k];
        moves |= 1 << k;
    }
    const int64_t piece = any ? EACH_BUFFER_ITEMS : count;
    for (int64_t done = 0; done < count; done += piece) {
        const int64_t items = count - done < piece ? count - done : piece;
        for (int k = 0; k < INPUTS; k++) {
            const char *from = data[k] + done * steps[k];
            inputs[k] = buffered[k] ? buffers[k] : reinterpret_cast<const T *>(from);
            if (!buffered[k]) continue;
            if (casts[k] != NULL) {
                casts[k](buffers[k], from, steps[k], items);
                continue;
            }
            each_gather(buffers[k], from, steps[k], items);
        }
        char *to = data[INPUTS] + done * steps[INPUTS];
        T *out = buffered[INPUTS] ? buffers[INPUTS] : reinterpret_cast<T *>(to);
        each_stretch<Function, T>(out, inputs, moves, items);
        if (!buffered[INPUTS]) continue;
        each_scatter(to, steps[INPUTS], buffers[INPUTS], items);
    }
}

/* The elements begin..end of the output. */
template <class Function, class T>
ALWAYS_INLINE static inline void each_range(const EachLoops &loops, int64_t begin, int64_t end)
{
    constexpr int OPERANDS = Function::INPUTS + 1;
    const int inner = loops.ndim - 1;
    int64_t position[GPUOPS_MAX_DIMS], steps[OPERANDS];
    char *data[OPERANDS], *at[OPERANDS];
    for (int k = 0; k < OPERANDS; k++) {
        data[k] = loops.data[k];
        steps[k] = loops.strides[k][inner];
    }
    int64_t first = begin, rest = 0;
    if (inner > 0) { /* to divide takes as long as many elements */
        first = begin % loops.counts[inner];
        rest = begin / loops.counts[inner];
    }
    for (int i = inner - 1; i >= 0; i--) {
        position[i] = rest % loops.counts[i];
        rest /= loops.counts[i];
        for (int k = 0; k < OPERANDS; k++) data[k] += position[i] * loops.strides[k][i];
    }
    for (;;) {
        int64_t count = loops.counts[inner] - first;
        if (count > end - begin) count = end - begin;
        for (int k = 0; k < OPERANDS; k++) at[k] = data[k] + first * steps[k];
        each_inner<Function, T>(at, steps, loops.casts, count);
        begin += count;
        if (begin == end) return;
        first = 0;
        for (int i = inner - 1; i >= 0; i--) { /* on to the next stretch */
            const bool wraps = ++position[i] == loops.counts[i];
            const int64_t moved = wraps ? 1 - loops.counts[i] : 1;
            for (int k = 0; k < OPERANDS; k++) data[k] += moved * loops.strides[k][i];
            if (!wraps) break;
            position[i] = 0;
        }
    }
}

template <class Function, class T>
static void each_plain(void *context, int64_t begin, int64_t end)
{
    each_range<Function, T>(*static_cast<const EachLoops *>(context), begin, end);
}

#ifdef TARGET_AVX2
template <class Function, class T>
TARGET_AVX2 static void each_avx2(void *context, int64_t begin, int64_t end)
{
    each_range<Function, T>(*static_cast<const EachLoops *>(context), begin, end);
}

template <class Function, class T>
TARGET_FMA static void each_fma(void *context, int64_t begin, int64_t end)
{
    each_range<Function, T>(*static_cast<const EachLoops *>(context), begin, end);
}

template <class Function, class T>
TARGET_AVX512 static void each_avx512(void *context, int64_t begin, int64_t end)
{
    each_range<Function, T>(*static_cast<const EachLoops *>(context), begin, end);
}
#endif

/* Functions that memory keeps waiting gain nothing by the widest vectors. */
template <class Function, class T>
static RangeFunction each_function(void)
{
#ifdef TARGET_AVX2
    if constexpr (Function::IS_HEAVY)
        if (cpu_has(CPU_LEVEL_4)) return each_avx512<Function, T>;
    if constexpr (Function::FUSES)
        if (cpu_has(CPU_LEVEL_3)) return each_fma<Function, T>;
    if (cpu_has(CPU_LEVEL_3)) return each_avx2<Function, T>;
#endif
    return each_plain<Function, T>;
}

template <class Function, class T>
static void each_in_threads(EachLoops *loops, RangeFunction function)
{
    int64_t items = 1;
    for (int i = 0; i < loops->ndim; i++) items *= loops->counts[i];
    constexpr int64_t GRAIN_BYTES = Function::IS_HEAVY ? EACH_HEAVY_BYTES : EACH_LIGHT_BYTES;
    parallel_for(items, grain_of_cached(items, GRAIN_BYTES / (int64_t)sizeof(T)), function, loops);
}

template <class Function, class T>
static void each_on_cpu(EachLoops *loops)
{
    each_in_threads<Function, T>(loops, each_function<Function, T>());
}

/* The GPU. */

#ifdef __CUDACC__

constexpr int EACH_THREADS = 128;
constexpr int EACH_PACKED_DIMS = 4;

template <class T, int COUNT>
struct alignas(COUNT * sizeof(T)) EachWord {
    T items[COUNT];
};

template <class Function, class T, class... Loaded>
HOST_DEVICE inline T each_item(Loaded... loaded)
{
    using C = typename Computes<T>::Type;
    return T(Function::template compute<T>(C(loaded)...));
}

template <class Function, class T>
HOST_DEVICE inline T each_item_of(const T *loaded)
{
    if constexpr (Function::INPUTS == 1)
        return each_item<Function, T>(loaded[0]);
    else if constexpr (Function::INPUTS == 2)
        return each_item<Function, T>(loaded[0], loaded[1]);
    else
        return each_item<Function, T>(loaded[0], loaded[1], loaded[2]);
}

template <int OPERANDS>
struct EachLoop {
    Divider count;
    int64_t size;
    int64_t strides[OPERANDS]; /* in bytes; out is the last operand */
};

/* An input: words that follow one another, or elements that are repeated throughout a word, in
 * memory or in the arguments. */
template <class T>
struct EachInput {
    const char *data; /* NULL: the value */
    bool moves;
    T value;
};

/* Words of COUNT elements, over at most DIMS loops: of 16 bytes where all operands allow it, else
 * single elements. On an H200, more words in flight than these, larger blocks or hints to the
 * caches make it slower by 1 to 10 %. */
template <class Function, class T, int COUNT, int DIMS>
struct EachWords {
    static constexpr int MAX_THREADS = EACH_THREADS;
    static constexpr int INPUTS = Function::INPUTS;
    static constexpr int IN_FLIGHT = COUNT == 1 ? 4 : INPUTS == 1 ? 2 : 1;
    using Word = EachWord<T, COUNT>;

    char *out;
    EachInput<T> inputs[INPUTS];
    int64_t words;
    int rest; /* elements after the last whole word, where there is one loop */
    int ndim;
    EachLoop<INPUTS + 1> loops[DIMS]; /* over words */

    HOST_DEVICE void operator()(Thread thread) const
    {
        const int64_t first = (int64_t)thread.block * EACH_THREADS * IN_FLIGHT + thread.thread;
        Word loaded[IN_FLIGHT][INPUTS];
        char *places[IN_FLIGHT];
        UNROLL
        for (int w = 0; w < IN_FLIGHT; w++) {
            const int64_t number = first + w * EACH_THREADS;
            if (number < words) places[w] = load(number, loaded[w]);
        }
        UNROLL
        for (int w = 0; w < IN_FLIGHT; w++) {
            if (first + w * EACH_THREADS >= words) continue;
            Word result;
            UNROLL
            for (int i = 0; i < COUNT; i++) result.items[i] = item(loaded[w], i);
            *reinterpret_cast<Word *>(places[w]) = result;
        }
        if (COUNT == 1 || thread.block != 0 || (int)thread.thread >= rest) return;
        const int64_t last = words * (int64_t)sizeof(Word) + thread.thread * (int64_t)sizeof(T);
        T operands[INPUTS];
        UNROLL
        for (int k = 0; k < INPUTS; k++) operands[k] = element(k, inputs[k].moves ? last : 0);
        *reinterpret_cast<T *>(out + last) = each_item_of<Function, T>(operands);
    }

    HOST_DEVICE static T item(const Word *loaded, int i)
    {
        T operands[INPUTS];
        UNROLL
        for (int k = 0; k < INPUTS; k++) operands[k] = loaded[k].items[i];
        return each_item_of<Function, T>(operands);
    }

    HOST_DEVICE T element(int k, int64_t offset) const
    {
        if (inputs[k].data == NULL) return inputs[k].value;
        return *reinterpret_cast<const T *>(inputs[k].data + offset);
    }

    HOST_DEVICE char *load(int64_t number, Word *loaded) const
    {
        int64_t offsets[INPUTS + 1] = {};
        decode(number, offsets);
        UNROLL
        for (int k = 0; k < INPUTS; k++) {
            if (inputs[k].moves) {
                loaded[k] = *reinterpret_cast<const Word *>(inputs[k].data + offsets[k]);
                continue;
            }
            const T same = element(k, offsets[k]);
            UNROLL
            for (int i = 0; i < COUNT; i++) loaded[k].items[i] = same;
        }
        return out + offsets[INPUTS];
    }

    HOST_DEVICE void decode(int64_t number, int64_t *offsets) const
    {
        if (ndim == 1) return move(loops[0], number, offsets);
        if (COUNT > 1 || words <= UINT32_MAX) {
            uint32_t outer = static_cast<uint32_t>(number);
            NO_UNROLL
            for (int i = ndim - 1; i >= 0; i--) {
                const uint32_t above = loops[i].count.divide(outer);
                move(loops[i], outer - above * loops[i].count.divisor, offsets);
                outer = above;
            }
        } else {
            NO_UNROLL
            for (int i = ndim - 1; i >= 0; i--) {
                move(loops[i], number % loops[i].size, offsets);
                number /= loops[i].size;
            }
        }
    }

    HOST_DEVICE static void move(const EachLoop<INPUTS + 1> &loop, int64_t position,
                                 int64_t *offsets)
    {
        UNROLL
        for (int k = 0; k <= INPUTS; k++) offsets[k] += position * loop.strides[k];
    }
};

/* each.cu: the operands of a call with those replaced that a kernel cannot read or write: elements
 * that do not lie at multiples of their size. */
struct EachOperands {
    Memory *packed[GPUOPS_MAX_INPUTS];
    Memory *fresh; /* for out */
    View given[GPUOPS_MAX_INPUTS], out;
};
Status each_begin(Call *call, EachOperands *operands);
Status each_end(Call *call, EachOperands *operands, Status status);
/* Whether all operands consist of whole words of 16 bytes, but for the end of a single loop. */
bool each_has_words(const EachLoops &loops, int64_t item_bytes);

template <class Function, class T, int COUNT, int DIMS>
static Status each_launch(const Call *call, const EachLoops &loops)
{
    constexpr int INPUTS = Function::INPUTS;
    const int inner = loops.ndim - 1;
    EachWords<Function, T, COUNT, DIMS> body = {};
    body.out = loops.data[INPUTS];
    for (int k = 0; k < INPUTS; k++) {
        body.inputs[k].moves = loops.strides[k][inner] != 0;
        if (call->inputs[k].device == DEVICE_CPU)
            memcpy(&body.inputs[k].value, loops.data[k], sizeof(T));
        else
            body.inputs[k].data = loops.data[k];
    }
    body.words = 1;
    body.rest = (int)(loops.counts[inner] % COUNT);
    body.ndim = loops.ndim;
    for (int i = 0; i < loops.ndim; i++) {
        const int64_t count = i == inner ? loops.counts[i] / COUNT : loops.counts[i];
        body.loops[i].count = divider_of(count > 0 && count <= UINT32_MAX ? (uint32_t)count : 1);
        body.loops[i].size = count;
        body.words *= count;
        for (int k = 0; k <= INPUTS; k++)
            body.loops[i].strides[k] = loops.strides[k][i] * (i == inner ? COUNT : 1);
    }
    constexpr int64_t WORDS = EACH_THREADS * body.IN_FLIGHT;
    int64_t blocks = (body.words + WORDS - 1) / WORDS;
    if (blocks == 0) blocks = 1; /* for the rest */
    if (blocks > INT32_MAX)
        return fail(STATUS_VALUE_ERROR, "%lld elements are more than one call can take",
                    (long long)(body.words * COUNT));
    return launch(body, Grid{(unsigned)blocks, EACH_THREADS}, call->stream->handle);
}

template <class Function, class T>
static Status each_on_cuda(const Call *call, const EachLoops &loops)
{
    return each_has_words(loops, sizeof(T))
               ? each_launch<Function, T, 16 / sizeof(T), EACH_PACKED_DIMS>(call, loops)
               : each_launch<Function, T, 1, GPUOPS_MAX_DIMS>(call, loops);
}

#endif

/* Function::with_type(dtype, f) calls f with an element of the type of a dtype that it takes. */
template <class Function>
static Status run_each(Call *call)
{
    for (int i = 0; i < call->out.ndim; i++)
        if (call->out.shape[i] == 0) return STATUS_OK;
    EachLoops loops;
    Status status = STATUS_OK;
    if (call->out.device == DEVICE_CPU) {
        each_loops(call, &loops);
        each_casts(call, &loops);
        Function::with_type(call->compute,
                            [&](auto zero) { each_on_cpu<Function, decltype(zero)>(&loops); });
        return status;
    }
#ifdef __CUDACC__
    EachOperands operands;
    status = each_begin(call, &operands);
    if (status == STATUS_OK) {
        each_loops(call, &loops);
        Function::with_type(call->compute, [&](auto zero) {
            status = each_on_cuda<Function, decltype(zero)>(call, loops);
        });
    }
    status = each_end(call, &operands, status);
#endif
    return status;
}

#endif
