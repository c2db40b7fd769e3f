/* The kernels in machine code that comes from a disk: any bytes. */
#include "gpuops.h"

#include <string.h>

static bool read_name(const char *name, void *letters)
{
    *(size_t *)letters += strlen(name);
    return true;
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size)
{
    size_t letters = 0;
    cubin_visit_kernels(bytes, size, read_name, &letters);
    return 0;
}
