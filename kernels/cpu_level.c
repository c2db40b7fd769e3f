/* Which instructions the CPU backend may use, by the names that the ABI of x86-64 has for its
 * levels: of these x86-64-v3 adds AVX2 and FMA, and x86-64-v4 AVX-512. Loops that gain by a level
 * are compiled for it as well, and chosen when they run. Other processors have one level. */
#include "gpuops.h"

#include <stdlib.h>
#include <string.h>

static const struct {
    int level;
    const char *name;
} LEVELS[] = {{CPU_LEVEL_1, "x86-64"}, {CPU_LEVEL_3, "x86-64-v3"}, {CPU_LEVEL_4, "x86-64-v4"}};
enum { LEVEL_COUNT = sizeof LEVELS / sizeof *LEVELS };

static int known_level; /* atomic; what all threads would find is the same: a race is harmless */

/* Of what a level consists of, what the loops use. */
static int level_of_processor(void)
{
#ifdef __x86_64__
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CPU_LEVEL_1;
    const bool has_4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has_4 ? CPU_LEVEL_4 : CPU_LEVEL_3;
#else
    return CPU_LEVEL_1;
#endif
}

__attribute__((noinline)) static Status find_level(int *level)
{
    const char *wanted = getenv("GPUOPS_CPU_LEVEL");
    *level = level_of_processor();
    if (wanted != NULL && *wanted != '\0') {
        int i = 0;
        while (i < LEVEL_COUNT && strcmp(wanted, LEVELS[i].name) != 0) i++;
        if (i == LEVEL_COUNT)
            return fail(STATUS_VALUE_ERROR,
                        "GPUOPS_CPU_LEVEL is '%.40s': expected x86-64, x86-64-v3 or x86-64-v4",
                        wanted);
        if (LEVELS[i].level < *level) *level = LEVELS[i].level;
    }
    __atomic_store_n(&known_level, *level, __ATOMIC_RELAXED);
    return STATUS_OK;
}

Status cpu_level(int *level)
{
    *level = __atomic_load_n(&known_level, __ATOMIC_RELAXED);
    return *level > 0 ? STATUS_OK : find_level(level);
}

bool cpu_has(int level)
{
    int found;
    return cpu_level(&found) == STATUS_OK && found >= level;
}

const char *cpu_level_name(void)
{
#ifdef __x86_64__
    for (int i = LEVEL_COUNT - 1; i >= 0; i--)
        if (cpu_has(LEVELS[i].level)) return LEVELS[i].name;
#endif
    return NULL;
}
