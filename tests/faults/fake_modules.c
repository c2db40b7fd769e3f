/* Libraries of the fake CUDA runtime: machine code that is loaded at run time.
 *
 * The code is a cubin, as the real NVRTC compiles it; nothing of it is run. What it says of its
 * kernels and variables is read from where cuobjdump and the driver read it: kernels are symbols
 * with the mark of an entry, their parameters and registers stand in .nv.info, their shared memory
 * and the variables are sections. A launch calls what a test has given as the kernel's twin
 * (fake_set_module_twin) with the bytes of the parameters. */
#define _GNU_SOURCE
#include "fake_cudart.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

enum {
    ENTRY_SYMBOL = 0x10,
    /* Attributes in .nv.info, and how they are written. */
    INFO_MAX_THREADS = 0x05,
    INFO_PARAMETER = 0x17,
    INFO_REGISTERS = 0x2f,
    INFO_SIZED = 4,
    /* A device like the H200. */
    DEVICE_MAJOR = 9,
    REGISTERS = 64 << 10,
    SHARED_BYTES = 228 << 10,
    OPTIN_BYTES = 227 << 10,
    DEFAULT_SHARED_BYTES = 48 << 10,
    RESERVED_SHARED_BYTES = 1 << 10, /* of every block, by the system */
    THREADS = 2048,
    BLOCKS = 32,
    MOST_THREADS = 1024,
    MOST_DEVICES = 16,
    MOST_PARAMETERS = 256,
};

typedef struct Section {
    const char *name;
    Elf64_Shdr header;
    const unsigned char *data;
} Section;

typedef struct Image {
    unsigned char *bytes;
    Section *sections;
    int section_count;
    const Section *symbols;
    const char *names; /* of the symbols */
} Image;

typedef struct ModuleKernel {
    struct ModuleKernel *next; /* of all kernels of all libraries */
    struct Library *library;
    const char *name;
    int parameter_count, registers, most_threads;
    size_t offsets[MOST_PARAMETERS], sizes[MOST_PARAMETERS];
    size_t parameter_bytes, shared_bytes;
    int dynamic_bytes[MOST_DEVICES]; /* the most that a launch may ask for; 0: as by default */
} ModuleKernel;

typedef struct Variable {
    struct Variable *next;
    const char *name;
    int device;
    Block *block;
} Variable;

typedef struct Library {
    struct Library *next;
    Image image;
    Variable *variables;
    long queued; /* launches that have not run yet */
} Library;

static Library *libraries;
static ModuleKernel *module_kernels;

typedef void (*ModuleTwinFunction)(const unsigned *grid, const unsigned *block, size_t shared_bytes,
                                   const void *parameters, size_t bytes);
typedef struct ModuleTwin {
    struct ModuleTwin *next;
    char *name;
    ModuleTwinFunction function;
} ModuleTwin;
static ModuleTwin *twins;

static ModuleTwinFunction twin_of(const char *name)
{
    const ModuleTwin *twin = twins;
    while (twin && strcmp(twin->name, name)) twin = twin->next;
    return twin ? twin->function : NULL;
}

/* Reading machine code. That it is well formed has been made sure of by whoever loads it. */

static size_t image_bytes(const Elf64_Ehdr *header)
{
    size_t sections = header->e_shoff + (size_t)header->e_shnum * sizeof(Elf64_Shdr);
    size_t segments = header->e_phoff + (size_t)header->e_phnum * sizeof(Elf64_Phdr);
    return sections > segments ? sections : segments;
}

static bool read_image(const void *code, Image *image)
{
    const Elf64_Ehdr *header = code;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return false;
    size_t bytes = image_bytes(header);
    image->bytes = malloc(bytes);
    image->sections = calloc(header->e_shnum, sizeof(Section));
    if (!image->bytes || !image->sections) return false;
    memcpy(image->bytes, code, bytes);
    image->section_count = header->e_shnum;
    for (int i = 0; i < header->e_shnum; i++) {
        Section *section = &image->sections[i];
        memcpy(&section->header, image->bytes + header->e_shoff + (size_t)i * sizeof(Elf64_Shdr),
               sizeof(Elf64_Shdr));
        section->data = image->bytes + section->header.sh_offset;
        if (section->header.sh_type == SHT_SYMTAB) image->symbols = section;
    }
    const char *names = (const char *)image->sections[header->e_shstrndx].data;
    for (int i = 0; i < image->section_count; i++)
        image->sections[i].name = names + image->sections[i].header.sh_name;
    if (!image->symbols) return false;
    image->names = (const char *)image->sections[image->symbols->header.sh_link].data;
    return true;
}

static void free_image(Image *image)
{
    free(image->bytes);
    free(image->sections);
}

/* The section with a kernel's name behind its own, or that of all for "". */
static const Section *section_of(const Image *image, const char *prefix, const char *name)
{
    size_t length = strlen(prefix);
    for (int i = 0; i < image->section_count; i++)
        if (!strncmp(image->sections[i].name, prefix, length) &&
            !strcmp(image->sections[i].name + length, name))
            return &image->sections[i];
    return NULL;
}

static unsigned word_at(const unsigned char *data)
{
    unsigned word;
    memcpy(&word, data, sizeof word);
    return word;
}

static void read_attribute(ModuleKernel *kernel, int attribute, const unsigned char *data,
                           unsigned symbol)
{
    if (attribute == INFO_REGISTERS && word_at(data) == symbol)
        kernel->registers = (int)word_at(data + 4);
    if (attribute == INFO_MAX_THREADS)
        kernel->most_threads = (int)(word_at(data) * word_at(data + 4) * word_at(data + 8));
    if (attribute != INFO_PARAMETER) return;
    unsigned number = word_at(data + 4) & 0xffff, offset = word_at(data + 4) >> 16;
    if (number >= MOST_PARAMETERS) return;
    kernel->offsets[number] = offset;
    kernel->sizes[number] = word_at(data + 8) >> 18;
    size_t end = offset + kernel->sizes[number];
    if ((int)number >= kernel->parameter_count) kernel->parameter_count = (int)number + 1;
    if (end > kernel->parameter_bytes) kernel->parameter_bytes = end;
}

static void read_info(ModuleKernel *kernel, const Section *section, unsigned symbol)
{
    if (!section) return;
    const unsigned char *at = section->data, *end = at + section->header.sh_size;
    while (at + 4 <= end) {
        int format = at[0], attribute = at[1];
        size_t bytes = format == INFO_SIZED ? at[2] | (size_t)at[3] << 8 : 0;
        at += 4;
        if (format == INFO_SIZED && at + bytes <= end)
            read_attribute(kernel, attribute, at, symbol);
        at += bytes;
    }
}

static ModuleKernel *read_kernel(Library *library, const char *name, unsigned symbol)
{
    ModuleKernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return NULL;
    const Image *image = &library->image;
    kernel->library = library;
    kernel->name = name;
    read_info(kernel, section_of(image, ".nv.info", ""), symbol);
    kernel->most_threads = MOST_THREADS;
    read_info(kernel, section_of(image, ".nv.info.", name), symbol);
    const Section *shared = section_of(image, ".nv.shared.", name);
    if (shared && shared->header.sh_size > RESERVED_SHARED_BYTES)
        kernel->shared_bytes = shared->header.sh_size - RESERVED_SHARED_BYTES;
    return kernel;
}

static Elf64_Sym symbol_at(const Image *image, unsigned i)
{
    Elf64_Sym symbol;
    memcpy(&symbol, image->symbols->data + i * sizeof symbol, sizeof symbol);
    return symbol;
}

static unsigned symbol_count(const Image *image)
{
    return (unsigned)(image->symbols->header.sh_size / sizeof(Elf64_Sym));
}

static void forget_kernels(const Library *library)
{
    ModuleKernel **link = &module_kernels;
    while (*link) {
        ModuleKernel *kernel = *link;
        if (kernel->library != library) {
            link = &kernel->next;
            continue;
        }
        *link = kernel->next;
        free(kernel);
    }
}

static cudaError_t load_kernels(Library *library)
{
    for (unsigned i = 0; i < symbol_count(&library->image); i++) {
        Elf64_Sym symbol = symbol_at(&library->image, i);
        if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !(symbol.st_other & ENTRY_SYMBOL))
            continue;
        ModuleKernel *kernel = read_kernel(library, library->image.names + symbol.st_name, i);
        if (!kernel) return cudaErrorMemoryAllocation;
        kernel->next = module_kernels;
        module_kernels = kernel;
    }
    return cudaSuccess;
}

/* Libraries. */

static Library *find_library(cudaLibrary_t handle)
{
    Library *library = libraries;
    while (library && library != (Library *)handle) library = library->next;
    return library;
}

/* 90 for sm_90; CUDA 13 has it in another place than those before, and another number for itself.
 */
static int architecture_of(const Image *image)
{
    enum { CUDA_13 = 0x41 };
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image->bytes;
    return header->e_flags >> (header->e_ident[EI_OSABI] == CUDA_13 ? 8 : 0) & 0xff;
}

static cudaError_t load_library(const void *code, Library **made)
{
    Library *library = calloc(1, sizeof *library);
    if (!library) return cudaErrorMemoryAllocation;
    bool valid = read_image(code, &library->image);
    int architecture = valid ? architecture_of(&library->image) : 0;
    cudaError_t code_of = !valid                              ? cudaErrorInvalidKernelImage
                          : architecture / 10 == DEVICE_MAJOR ? load_kernels(library)
                                                              : cudaErrorNoKernelImageForDevice;
    if (code_of != cudaSuccess) {
        forget_kernels(library);
        free_image(&library->image);
        free(library);
        return code_of;
    }
    library->next = libraries;
    libraries = library;
    *made = library;
    return cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *handle, const void *code,
                                enum cudaJitOption *jit_options, void **jit_values,
                                unsigned jit_count, enum cudaLibraryOption *options, void **values,
                                unsigned option_count)
{
    BEGIN();
    REQUIRE(handle && code && jit_count == 0 && option_count == 0, cudaErrorInvalidValue);
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    Library *library = NULL;
    REQUIRE_SUCCESS(load_library(code, &library));
    *handle = (cudaLibrary_t)library;
    return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t handle)
{
    BEGIN_RELEASE();
    Library *library = find_library(handle);
    REQUIRE(library, cudaErrorInvalidResourceHandle);
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    if (library->queued)
        misuse("%s: %ld launches of the library's kernels have not run yet", __func__,
               library->queued);
    REQUIRE(!library->queued, cudaErrorInvalidValue);
    Library **link = &libraries;
    while (*link != library) link = &(*link)->next;
    *link = library->next;
    while (library->variables) {
        Variable *variable = library->variables;
        library->variables = variable->next;
        put_into_quarantine(variable->block);
        free(variable);
    }
    forget_kernels(library);
    free_image(&library->image);
    free(library);
    return done(fault);
}

long count_libraries(void)
{
    long count = 0;
    for (const Library *library = libraries; library; library = library->next) count++;
    return count;
}

/* Each device has its own copy of a variable, which comes into being when it is asked for. */
static cudaError_t make_variable(Library *library, const char *name, Elf64_Sym symbol)
{
    const Section *section = &library->image.sections[symbol.st_shndx];
    Variable *variable = calloc(1, sizeof *variable);
    if (!variable) return cudaErrorMemoryAllocation;
    cudaError_t code =
        new_block(&variable->block, symbol.st_size, cudaMemoryTypeDevice, current_device);
    if (code != cudaSuccess) {
        free(variable);
        return code;
    }
    show_device_memory(current_device);
    if (section->header.sh_type == SHT_NOBITS)
        memset(variable->block->data, 0, symbol.st_size);
    else
        memcpy(variable->block->data, section->data + symbol.st_value, symbol.st_size);
    hide_device_memory();
    variable->name = name;
    variable->device = current_device;
    variable->next = library->variables;
    library->variables = variable;
    return cudaSuccess;
}

static Variable *find_variable(const Library *library, const char *name)
{
    Variable *variable = library->variables;
    while (variable && (strcmp(variable->name, name) || variable->device != current_device))
        variable = variable->next;
    return variable;
}

cudaError_t cudaLibraryGetGlobal(void **data, size_t *bytes, cudaLibrary_t handle, const char *name)
{
    BEGIN();
    Library *library = find_library(handle);
    REQUIRE(library, cudaErrorInvalidResourceHandle);
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    for (unsigned i = 0; !find_variable(library, name) && i < symbol_count(&library->image); i++) {
        Elf64_Sym symbol = symbol_at(&library->image, i);
        const char *found = library->image.names + symbol.st_name;
        if (ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT && symbol.st_shndx != SHN_UNDEF &&
            !strcmp(found, name))
            REQUIRE_SUCCESS(make_variable(library, found, symbol));
    }
    Variable *variable = find_variable(library, name);
    REQUIRE(variable, cudaErrorSymbolNotFound);
    *data = variable->block->data;
    *bytes = variable->block->bytes;
    return cudaSuccess;
}

/* Kernels. */

ModuleKernel *find_module_kernel(const void *function)
{
    ModuleKernel *kernel = module_kernels;
    while (kernel && kernel != function) kernel = kernel->next;
    return kernel;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *handle, cudaLibrary_t library_handle,
                                 const char *name)
{
    BEGIN();
    const Library *library = find_library(library_handle);
    REQUIRE(library, cudaErrorInvalidResourceHandle);
    ModuleKernel *kernel = module_kernels;
    while (kernel && (kernel->library != library || strcmp(kernel->name, name)))
        kernel = kernel->next;
    REQUIRE(kernel, cudaErrorSymbolNotFound);
    *handle = (cudaKernel_t)kernel;
    return cudaSuccess;
}

cudaError_t cudaFuncGetParamInfo(const void *function, size_t number, size_t *offset, size_t *bytes)
{
    BEGIN();
    const ModuleKernel *kernel = find_module_kernel(function);
    REQUIRE(kernel, cudaErrorInvalidDeviceFunction);
    REQUIRE(number < (size_t)kernel->parameter_count, cudaErrorInvalidValue);
    *offset = kernel->offsets[number];
    *bytes = kernel->sizes[number];
    return cudaSuccess;
}

static int threads_by_registers(const ModuleKernel *kernel)
{
    int registers = (kernel->registers + 7) / 8 * 8;
    int threads = registers ? REGISTERS / registers / 32 * 32 : MOST_THREADS;
    return threads < kernel->most_threads ? threads : kernel->most_threads;
}

static size_t most_dynamic_bytes(const ModuleKernel *kernel)
{
    int set = kernel->dynamic_bytes[current_device];
    return set ? (size_t)set : DEFAULT_SHARED_BYTES - kernel->shared_bytes;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    BEGIN();
    const ModuleKernel *kernel = find_module_kernel(function);
    REQUIRE(kernel, cudaErrorInvalidDeviceFunction);
    REQUIRE_SUCCESS(refuse_while_capturing(__func__));
    *attributes = (struct cudaFuncAttributes){
        .sharedSizeBytes = kernel->shared_bytes,
        .maxThreadsPerBlock = threads_by_registers(kernel),
        .numRegs = kernel->registers,
        .ptxVersion = 10 * DEVICE_MAJOR,
        .binaryVersion = 10 * DEVICE_MAJOR,
        .maxDynamicSharedSizeBytes = (int)most_dynamic_bytes(kernel),
    };
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t handle, enum cudaFuncAttribute attribute,
                                            int value, int device)
{
    BEGIN();
    ModuleKernel *kernel = find_module_kernel(handle);
    REQUIRE(kernel && device >= 0 && device < MOST_DEVICES, cudaErrorInvalidDeviceFunction);
    REQUIRE(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize, cudaErrorInvalidValue);
    REQUIRE(value >= 0 && kernel->shared_bytes + (size_t)value <= OPTIN_BYTES,
            cudaErrorInvalidValue);
    kernel->dynamic_bytes[device] = value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                          int threads, size_t shared_bytes)
{
    BEGIN();
    const ModuleKernel *kernel = find_module_kernel(function);
    REQUIRE(kernel, cudaErrorInvalidDeviceFunction);
    REQUIRE(threads >= 1 && threads <= threads_by_registers(kernel), cudaErrorInvalidValue);
    int registers = (kernel->registers + 7) / 8 * 8 * ((threads + 31) / 32 * 32);
    size_t shared = RESERVED_SHARED_BYTES + kernel->shared_bytes + shared_bytes;
    *blocks = THREADS / threads < BLOCKS ? THREADS / threads : BLOCKS;
    if (registers && REGISTERS / registers < *blocks) *blocks = REGISTERS / registers;
    if ((int)(SHARED_BYTES / shared) < *blocks) *blocks = (int)(SHARED_BYTES / shared);
    return cudaSuccess;
}

/* The twin does the whole grid at once. */
static void run_module_kernel(Operation *operation)
{
    ModuleKernel *kernel = operation->module_kernel;
    kernel->library->queued--;
    if (context_is_lost() || !functor_is_usable(operation, true)) return;
    ModuleTwinFunction twin = twin_of(kernel->name);
    if (!twin) {
        misuse("%s is launched, and has no twin", kernel->name);
        return;
    }
    show_device_memory(operation->target_device);
    twin(operation->grid, operation->block, operation->bytes, operation->copied,
         operation->copied_bytes);
    hide_device_memory();
}

cudaError_t launch_module_kernel(ModuleKernel *kernel, dim3 grid, dim3 block, void **arguments,
                                 size_t shared_bytes, Stream *stream)
{
    unsigned long threads = (unsigned long)block.x * block.y * block.z;
    bool grid_fits = grid.x >= 1 && grid.x <= INT32_MAX && grid.y >= 1 && grid.y <= 65535 &&
                     grid.z >= 1 && grid.z <= 65535;
    bool block_fits = threads >= 1 && block.z <= 64;
    if (!grid_fits || !block_fits) return cudaErrorInvalidConfiguration;
    if (threads > (unsigned long)threads_by_registers(kernel)) return cudaErrorLaunchOutOfResources;
    if (shared_bytes > most_dynamic_bytes(kernel)) return cudaErrorInvalidValue;
    if (device_of(stream) != current_device) {
        misuse("%s is launched on a stream of device %d while device %d is current", kernel->name,
               device_of(stream), current_device);
        return cudaErrorInvalidResourceHandle;
    }
    Operation *operation =
        new_operation(kernel->name, stream, run_module_kernel, kernel->parameter_bytes);
    if (!operation) return cudaErrorMemoryAllocation;
    for (int i = 0; i < kernel->parameter_count; i++)
        memcpy(operation->copied + kernel->offsets[i], arguments[i], kernel->sizes[i]);
    operation->module_kernel = kernel;
    operation->bytes = shared_bytes;
    operation->target_device = current_device;
    memcpy(operation->grid, (unsigned[]){grid.x, grid.y, grid.z}, sizeof operation->grid);
    memcpy(operation->block, (unsigned[]){block.x, block.y, block.z}, sizeof operation->block);
    if (!functor_is_usable(operation, false)) {
        free(operation);
        return cudaSuccess;
    }
    kernel->library->queued++;
    enqueue(operation);
    return cudaSuccess;
}

/* The controls, for tests/faults/fake.py. */

/* What launches of kernels of a name do; NULL: nothing is known of them any more. */
void fake_set_module_twin(const char *name, ModuleTwinFunction function)
{
    LOCKED();
    ModuleTwin *twin = twins;
    while (twin && strcmp(twin->name, name)) twin = twin->next;
    if (!twin) {
        twin = calloc(1, sizeof *twin);
        char *copy = strdup(name);
        if (!twin || !copy) {
            misuse("out of memory for the twin of %s", name);
            free(twin);
            free(copy);
            return;
        }
        twin->name = copy;
        twin->next = twins;
        twins = twin;
    }
    twin->function = function;
}
