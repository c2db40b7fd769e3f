/* Where a call runs. */
#include "gpuops.h"

Status choose_device(Call *call, int wanted)
{
    /* Movement between two host arrays does no arithmetic that a GPU could speed up, and its bytes
     * would cross the bus twice, so the CPU is the faster way on every machine. */
    if (wanted == DEVICE_AUTO) wanted = DEVICE_CPU;

    if (wanted != DEVICE_CPU) {
        int count;
        Status status = cuda_device_count(&count);
        if (status == STATUS_DEVICE_ERROR && wanted == DEVICE_DEFAULT) {
            wanted = DEVICE_CPU;
        } else if (status != STATUS_OK) {
            return status;
        } else if (wanted == DEVICE_DEFAULT || wanted == DEVICE_CUDA) {
            status = cuda_current_device(&wanted);
            if (status != STATUS_OK) return status;
        } else if (wanted >= count) {
            return fail(STATUS_DEVICE_ERROR,
                        "there is no cuda:%d: this process sees %d CUDA device%s, cuda:0%s%.0d",
                        wanted, count, count == 1 ? "" : "s",
                        count == 1 ? "" : " to cuda:", count - 1);
        }
    }
    call->device = wanted;
    if (wanted != DEVICE_CPU) return STATUS_OK;

    if (call->stream != NULL)
        return fail(STATUS_VALUE_ERROR,
                    "stream= orders work on a GPU, but this call runs on the CPU: leave it out, or "
                    "pass device=\"cuda\"");
    int threads;
    return cpu_threads(&threads);
}
