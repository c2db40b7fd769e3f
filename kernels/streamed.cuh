/* Stores that go around the caches, for what these could not hold until it is read again: they save
 * their room, and the reading of what is overwritten. And how to have them hold something no longer
 * that they could. */
#ifndef GPUOPS_STREAMED_CUH
#define GPUOPS_STREAMED_CUH

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <cpuid.h>
#include <emmintrin.h>
#endif

constexpr int64_t STREAMED_WORD = 16; /* bytes */
constexpr int64_t CACHE_LINE_BYTES = 64;

#ifdef __SSE2__
/* Whether the processor has clflushopt, which need not wait for one line after the other. */
static inline bool drops_unordered()
{
    unsigned a, b = 0, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_CLFLUSHOPT) != 0;
}
#endif

/* The caches of all processors write the lines back and forget them; where a program cannot ask
 * them to, they stay. */
static inline void drop_from_caches(char *lines, int64_t count)
{
#if defined __SSE2__
    static const bool unordered = drops_unordered();
    for (char *line = lines; line < lines + count * CACHE_LINE_BYTES; line += CACHE_LINE_BYTES) {
        if (unordered)
            asm volatile("clflushopt %0" : "+m"(*line));
        else
            _mm_clflush(line);
    }
    _mm_sfence();
#elif defined __aarch64__
    for (char *line = lines; line < lines + count * CACHE_LINE_BYTES; line += CACHE_LINE_BYTES)
        asm volatile("dc civac, %0" : : "r"(line) : "memory");
    asm volatile("dsb ish" : : : "memory");
#else
    (void)lines;
    (void)count;
#endif
}

#if defined __SSE2__ && !defined __SANITIZE_THREAD__ /* which sees no such stores */

/* Whole words, to where a word may begin. */
static inline void stream_words(char *target, const char *source, int64_t bytes)
{
    constexpr int WORDS = 4;
    const auto from = [=](int64_t at) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(source + at));
    };
    const auto to = [=](int64_t at) { return reinterpret_cast<__m128i *>(target + at); };
    int64_t at = 0;
    for (; at + WORDS * STREAMED_WORD <= bytes; at += WORDS * STREAMED_WORD) {
        __m128i words[WORDS];
        for (int i = 0; i < WORDS; i++) words[i] = from(at + i * STREAMED_WORD);
        for (int i = 0; i < WORDS; i++) _mm_stream_si128(to(at + i * STREAMED_WORD), words[i]);
    }
    for (; at < bytes; at += STREAMED_WORD) _mm_stream_si128(to(at), from(at));
}

/* Before other threads are told that something has been written so. */
static inline void end_streaming(void)
{
    _mm_sfence();
}

#else

static inline void stream_words(char *target, const char *source, int64_t bytes)
{
    memcpy(target, source, (size_t)bytes);
}

static inline void end_streaming(void) {}

#endif

static inline bool takes_words(const char *target)
{
    return reinterpret_cast<uintptr_t>(target) % STREAMED_WORD == 0;
}

/* Any bytes. */
static inline void copy_streamed(char *target, const char *source, int64_t bytes)
{
    const int64_t before = -(intptr_t)target & (STREAMED_WORD - 1);
    const int64_t head = before < bytes ? before : bytes;
    const int64_t words = (bytes - head) / STREAMED_WORD * STREAMED_WORD;
    memcpy(target, source, (size_t)head);
    stream_words(target + head, source + head, words);
    memcpy(target + head + words, source + head + words, (size_t)(bytes - head - words));
    end_streaming();
}

#endif
