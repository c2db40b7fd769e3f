/* Modules: machine code that is loaded at run time, and the launches of its kernels.
 *
 * A launch is ordered against the streams of the arrays that it is given as any operator's work is.
 * A module is unloaded when nobody holds it any more and the device has done its work; one whose
 * kernels may be in a graph, which can run again at any time, is never unloaded. */
#include "common.cuh"
#include "transfer.cuh"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#ifdef __CUDACC__

struct Module {
    cudaLibrary_t library;
    int device;
    int references;
    bool launched, captured; /* a kernel of it was, ever; into a graph */
    LaunchLimits limits;
    Module *next; /* in the waiting list */
};

/* A handle of CUDA's, which its functions take in the place of the address of a kernel. */
static inline const void *function_of(Kernel *kernel)
{
    return kernel;
}

/* Calls function with the device of a module current. */
template <class Function>
static Status on_device_of(const Module *module, const Function &function)
{
    int previous;
    Status status = device_enter(module->device, &previous);
    if (status != STATUS_OK) return status;
    status = function();
    device_leave(module->device, previous);
    return status;
}

/* The same for what may take memory: the driver loads code when it is first asked for something. */
template <class Function>
static Status with_code_of(const Module *module, const Function &function)
{
    return on_device_of(module, [&] {
        Status status = STATUS_OK;
        in_spite_of_captures([&] { status = function(); });
        return status;
    });
}

/* Unloading. */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Module *waiting; /* nobody holds them, but a capture keeps the device from waiting */

/* A library must not go while its kernels run. False: it is not known whether they do. */
static bool unload(Module *module)
{
    bool unloaded = false;
    (void)with_code_of(module, [&]() -> Status {
        if (module->launched) CUDA_TRY(cudaDeviceSynchronize());
        cuda_ignore(cudaLibraryUnload(module->library));
        unloaded = true;
        return STATUS_OK;
    });
    if (!unloaded && !runtime_is_lost()) return false;
    free(module);
    return true;
}

static void unload_those_that_wait(void)
{
    if (runtime_is_leaving()) return;
    pthread_mutex_lock(&lock);
    Module *list = waiting;
    waiting = NULL;
    pthread_mutex_unlock(&lock);
    while (list != NULL) {
        Module *module = list;
        list = module->next;
        if (!device_is_capturing(module->device) && unload(module)) continue;
        pthread_mutex_lock(&lock);
        module->next = waiting;
        waiting = module;
        pthread_mutex_unlock(&lock);
    }
}

Module *module_hold(Module *module)
{
    __atomic_add_fetch(&module->references, 1, __ATOMIC_RELAXED);
    return module;
}

void module_release(Module *module)
{
    if (__atomic_sub_fetch(&module->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    if (runtime_is_leaving() || module->captured) return;
    pthread_mutex_lock(&lock);
    module->next = waiting;
    waiting = module;
    pthread_mutex_unlock(&lock);
    unload_those_that_wait();
}

/* Loading. */

static Status find_limits(int device, LaunchLimits *limits)
{
    const struct {
        cudaDeviceAttr attribute;
        int *value;
    } wanted[] = {
        {cudaDevAttrMaxGridDimX, &limits->grid[0]},
        {cudaDevAttrMaxGridDimY, &limits->grid[1]},
        {cudaDevAttrMaxGridDimZ, &limits->grid[2]},
        {cudaDevAttrMaxBlockDimX, &limits->block[0]},
        {cudaDevAttrMaxBlockDimY, &limits->block[1]},
        {cudaDevAttrMaxBlockDimZ, &limits->block[2]},
        {cudaDevAttrMaxThreadsPerBlock, &limits->threads},
    };
    for (const auto &one : wanted)
        CUDA_TRY(cudaDeviceGetAttribute(one.value, one.attribute, device));
    int bytes;
    CUDA_TRY(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    limits->most_dynamic_bytes = bytes;
    return STATUS_OK;
}

/* The driver may look at the code only when something of it is used. */
static Status module_status(cudaError_t code, const char *call)
{
    if (code != cudaErrorInvalidKernelImage && code != cudaErrorNoKernelImageForDevice)
        return cuda_allocation_status(code, call);
    (void)cudaGetLastError();
    return fail_cuda(STATUS_DEVICE_ERROR, code, cudaGetErrorName(code),
                     "the machine code is not for this device: compile it for the device's own "
                     "architecture, by leaving --gpu-architecture out of the options");
}

static Status load(Module *module, const void *cubin)
{
    Status status = find_limits(module->device, &module->limits);
    if (status != STATUS_OK) return status;
    return module_status(cudaLibraryLoadData(&module->library, cubin, NULL, NULL, 0, NULL, NULL, 0),
                         "cudaLibraryLoadData");
}

Status module_load(int device, const void *cubin, size_t bytes, Module **made)
{
    *made = NULL;
    unload_those_that_wait();
    /* The driver is told no size, and believes what the code says. */
    Status status =
        cubin_visit_kernels(cubin, bytes, [](const char *, void *) { return true; }, NULL);
    if (status != STATUS_OK) return status;
    Module *module = static_cast<Module *>(calloc(1, sizeof *module));
    if (module == NULL) return fail(STATUS_MEMORY_ERROR, "out of host memory for a module");
    module->device = device;
    module->references = 1;
    status = with_code_of(module, [&] { return load(module, cubin); });
    if (status == STATUS_OK)
        *made = module;
    else
        free(module);
    return status;
}

void module_limits(const Module *module, LaunchLimits *limits)
{
    *limits = module->limits;
}

Status module_global(Module *module, const char *name, void **data, int64_t *bytes)
{
    return with_code_of(module, [&]() -> Status {
        size_t found = 0;
        cudaError_t code = cudaLibraryGetGlobal(data, &found, module->library, name);
        *bytes = (int64_t)found;
        if (code != cudaErrorSymbolNotFound) return module_status(code, "cudaLibraryGetGlobal");
        (void)cudaGetLastError();
        return fail(STATUS_VALUE_ERROR, "the module has no global variable %s", name);
    });
}

/* Kernels. */

Status kernel_find(Module *module, const char *name, Kernel **kernel)
{
    return with_code_of(module, [&]() -> Status {
        cudaKernel_t handle = NULL;
        cudaError_t code = cudaLibraryGetKernel(&handle, module->library, name);
        *kernel = reinterpret_cast<Kernel *>(handle);
        if (code != cudaErrorSymbolNotFound) return module_status(code, "cudaLibraryGetKernel");
        (void)cudaGetLastError();
        return fail(STATUS_VALUE_ERROR, "the module has no kernel %s", name);
    });
}

Status kernel_parameter(Module *module, Kernel *kernel, int i, int64_t *bytes)
{
    return with_code_of(module, [&]() -> Status {
        size_t offset, found = 0;
        cudaError_t code = cudaFuncGetParamInfo(function_of(kernel), (size_t)i, &offset, &found);
        *bytes = (int64_t)found;
        if (code != cudaErrorInvalidValue) return cuda_status(code, "cudaFuncGetParamInfo");
        (void)cudaGetLastError(); /* there are no more */
        *bytes = 0;
        return STATUS_OK;
    });
}

Status kernel_info(Module *module, Kernel *kernel, KernelInfo *info)
{
    return with_code_of(module, [&]() -> Status {
        cudaFuncAttributes attributes;
        Status status = module_status(cudaFuncGetAttributes(&attributes, function_of(kernel)),
                                      "cudaFuncGetAttributes");
        if (status != STATUS_OK) return status;
        info->registers = attributes.numRegs;
        info->max_threads = attributes.maxThreadsPerBlock;
        info->shared_bytes = (int64_t)attributes.sharedSizeBytes;
        info->local_bytes = (int64_t)attributes.localSizeBytes;
        info->constant_bytes = (int64_t)attributes.constSizeBytes;
        info->max_dynamic_shared_bytes = attributes.maxDynamicSharedSizeBytes;
        info->ptx_version = attributes.ptxVersion;
        info->binary_version = attributes.binaryVersion;
        return STATUS_OK;
    });
}

Status kernel_set_dynamic_bytes(Module *module, Kernel *kernel, int64_t bytes)
{
    return with_code_of(module, [&]() -> Status {
        CUDA_TRY(cudaKernelSetAttributeForDevice(reinterpret_cast<cudaKernel_t>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 (int)bytes, module->device));
        return STATUS_OK;
    });
}

/* Of several sizes that keep as many threads at work, the largest makes the fewest blocks. */
Status kernel_block_size(Module *module, Kernel *kernel, int64_t shared_bytes, int *threads)
{
    constexpr int WARP = 32;
    KernelInfo info = {};
    Status status = kernel_info(module, kernel, &info);
    if (status != STATUS_OK) return status;
    *threads = info.max_threads;
    return with_code_of(module, [&]() -> Status {
        int most = 0;
        for (int size = info.max_threads / WARP * WARP; size >= WARP; size -= WARP) {
            int blocks;
            CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function_of(kernel),
                                                                   size, (size_t)shared_bytes));
            if (blocks * size <= most) continue;
            most = blocks * size;
            *threads = size;
        }
        return STATUS_OK;
    });
}

/* Launches. */

/* What one array needs before and after the kernel. */
struct Prepared {
    bool begun;    /* it is on the device, and was waited for */
    bool in_place; /* it is page-locked, and the device works on it there */
    PinnedUse use; /* of what is in place */
    Memory *copy;  /* of an array on the host, on the device */
    View there;    /* that copy; only set where there is one */
};

/* Packed and aligned memory that is page-locked from its first byte to its last. */
static bool works_in_place(const View *view, void **there)
{
    const int64_t bytes = view_items(view) * view->item_bytes;
    const uint64_t widest = (uint64_t)view->item_bytes | 16;
    const char *first = static_cast<const char *>(view->data);
    return bytes > 0 && view_is_packed(view) &&
           reinterpret_cast<uintptr_t>(first) % (widest & -widest) == 0 &&
           pinned_reach(first, bytes, there);
}

/* The same array given twice is the same array to the kernel. */
static const LaunchArray *find_twin(const Launch *launch, int i)
{
    for (int j = 0; j < i; j++)
        if (views_coincide(launch->arrays[j].view, launch->arrays[i].view))
            return &launch->arrays[j];
    return NULL;
}

static Status bring(const Launch *launch, int i, Prepared *prepared)
{
    const LaunchArray *array = &launch->arrays[i];
    const View *view = array->view;
    const LaunchArray *twin = find_twin(launch, i);
    if (twin != NULL) {
        *array->address = *twin->address;
        return STATUS_OK;
    }
    pinned_hold(view, &prepared->use);
    prepared->in_place = works_in_place(view, array->address);
    if (prepared->in_place) return STATUS_OK;
    pinned_let_go(&prepared->use, launch->stream->device, true);
    bool is_read = array->is_read;
    for (int j = i + 1; j < launch->array_count && !is_read; j++)
        is_read = launch->arrays[j].is_read && views_coincide(launch->arrays[j].view, view);
    Status status = is_read ? pack_on_device(view, launch->stream, &prepared->there, launch->watch)
                            : new_view(view, launch->stream, &prepared->there);
    if (status != STATUS_OK) return status;
    prepared->copy = prepared->there.memory;
    *array->address = prepared->there.data;
    return STATUS_OK;
}

static Status prepare(const Launch *launch, int i, Prepared *prepared)
{
    const LaunchArray *array = &launch->arrays[i];
    prepared->begun = prepared->in_place = false;
    prepared->copy = NULL;
    if (array->view->device == DEVICE_CPU) return bring(launch, i, prepared);
    *array->address = array->view->data;
    prepared->begun = true;
    return array->is_written ? begin_writing(array->view, launch->stream)
                             : begin_reading(array->view, launch->stream);
}

static bool is_written_through(const Launch *launch, int i)
{
    bool is_written = launch->arrays[i].is_written;
    for (int j = i + 1; j < launch->array_count && !is_written; j++)
        is_written = launch->arrays[j].is_written &&
                     views_coincide(launch->arrays[j].view, launch->arrays[i].view);
    return is_written;
}

static Status finish(const Launch *launch, int i, const Prepared *prepared, bool launched)
{
    const LaunchArray *array = &launch->arrays[i];
    Status status = STATUS_OK;
    if (prepared->begun)
        status = array->is_written ? end_writing(array->view, launch->stream)
                                   : end_reading(array->view, launch->stream);
    if (prepared->copy == NULL) return status;
    if (launched && is_written_through(launch, i))
        status = copy_view(array->view, &prepared->there, launch->stream, launch->watch);
    if (!runtime_is_forked()) memory_release(prepared->copy);
    return status;
}

static Status run(const Launch *launch)
{
    const unsigned *grid = launch->grid, *block = launch->block;
    Module *module = launch->module;
    Status status = launch_kernel(function_of(launch->kernel), dim3(grid[0], grid[1], grid[2]),
                                  dim3(block[0], block[1], block[2]), (size_t)launch->shared_bytes,
                                  launch->values, launch->stream->handle);
    if (status != STATUS_OK) return status;
    __atomic_store_n(&module->launched, true, __ATOMIC_RELAXED);
    if (stream_is_capturing(launch->stream))
        __atomic_store_n(&module->captured, true, __ATOMIC_RELAXED);
    else if (launches_block())
        status = stream_await(launch->stream, launch->watch);
    return status;
}

/* The first failure is told, but every array is seen to. */
static Status launch_in_order(const Launch *launch, Prepared *prepared)
{
    int ready = 0;
    Status status = STATUS_OK;
    while (ready < launch->array_count && status == STATUS_OK) {
        status = prepare(launch, ready, &prepared[ready]);
        ready++;
    }
    const bool is_tried = status == STATUS_OK;
    if (is_tried) status = run(launch);
    const bool launched = status == STATUS_OK;
    bool in_place = false;
    for (int i = 0; i < ready && !runtime_is_forked(); i++) {
        in_place = in_place || (is_tried && prepared[i].in_place);
        const bool wanted = launched && status != STATUS_INTERRUPTED;
        status = even_so(status, [&] { return finish(launch, i, &prepared[i], wanted); });
    }
    if (runtime_is_forked()) return status;
    Status last = STATUS_OK;
    if (in_place)
        status = even_so(status, [&] { return last = stream_drain(launch->stream->handle); });
    for (int i = 0; i < ready; i++)
        if (prepared[i].in_place)
            pinned_let_go(&prepared[i].use, launch->stream->device, last == STATUS_OK);
    return status;
}

Status kernel_launch(const Launch *launch)
{
    enum { FEW = 4 };
    Prepared some[FEW], *prepared = some;
    const bool many = launch->array_count > FEW;
    bool on_host = false;
    for (int i = 0; i < launch->array_count; i++)
        on_host = on_host || launch->arrays[i].view->device == DEVICE_CPU;
    if (many) {
        prepared = static_cast<Prepared *>(malloc((size_t)launch->array_count * sizeof *prepared));
        if (prepared == NULL) return fail(STATUS_MEMORY_ERROR, "out of host memory for a launch");
    }
    Status status = on_device_of(launch->module, [&] {
        if (on_host && stream_is_capturing(launch->stream)) return refuse_host_in_capture();
        return launch_in_order(launch, prepared);
    });
    if (many) free(prepared);
    return status;
}

#else /* a build without CUDA, in which there is no module that these could be called with */

static Status none(void)
{
    int count;
    return cuda_device_count(&count);
}

Status module_load(int, const void *, size_t, Module **)
{
    return none();
}

Module *module_hold(Module *module)
{
    return module;
}

void module_release(Module *) {}

void module_limits(const Module *, LaunchLimits *) {}

Status module_global(Module *, const char *, void **, int64_t *)
{
    return none();
}

Status kernel_find(Module *, const char *, Kernel **)
{
    return none();
}

Status kernel_parameter(Module *, Kernel *, int, int64_t *)
{
    return none();
}

Status kernel_info(Module *, Kernel *, KernelInfo *)
{
    return none();
}

Status kernel_set_dynamic_bytes(Module *, Kernel *, int64_t)
{
    return none();
}

Status kernel_block_size(Module *, Kernel *, int64_t, int *)
{
    return none();
}

Status kernel_launch(const Launch *)
{
    return none();
}

#endif
