/* The kernels in machine code, as CUDA's compilers write it: an ELF file, whose symbols are told
 * without a GPU. The file may come from a disk, so that nothing it says is believed unseen. */
#include "gpuops.h"

#include <elf.h>
#include <string.h>

enum {
    MACHINE_CUDA = 190,  /* EM_CUDA */
    ENTRY_SYMBOL = 0x10, /* among a symbol's st_other: a function that is launched */
};

typedef struct File {
    const char *bytes;
    size_t size;
} File;

/* A stretch of the file, or NULL where it would end beyond. */
static const char *stretch(const File *file, uint64_t offset, uint64_t size)
{
    if (offset > file->size || size > file->size - offset) return NULL;
    return file->bytes + offset;
}

/* A table of equal entries, or NULL. */
static const char *table_at(const File *file, uint64_t offset, uint64_t count, uint64_t given_bytes,
                            uint64_t entry_bytes)
{
    if (count > 0 && given_bytes != entry_bytes) return NULL;
    return stretch(file, offset, count * entry_bytes);
}

static Elf64_Shdr section_at(const char *sections, uint64_t i)
{
    Elf64_Shdr section; /* the file may lie at any address */
    memcpy(&section, sections + i * sizeof section, sizeof section);
    return section;
}

static Status refuse(void)
{
    return fail(STATUS_VALUE_ERROR,
                "this is no machine code of CUDA: it must be a cubin, an ELF file of 64 bits");
}

Status cubin_visit_kernels(const void *cubin, size_t bytes,
                           bool (*visit)(const char *name, void *context), void *context)
{
    const File file = {cubin, bytes};
    Elf64_Ehdr header;
    if (bytes < sizeof header) return refuse();
    memcpy(&header, cubin, sizeof header);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
        header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_machine != MACHINE_CUDA)
        return refuse();
    const char *sections =
        table_at(&file, header.e_shoff, header.e_shnum, header.e_shentsize, sizeof(Elf64_Shdr));
    if (sections == NULL || table_at(&file, header.e_phoff, header.e_phnum, header.e_phentsize,
                                     sizeof(Elf64_Phdr)) == NULL)
        return refuse();
    Elf64_Shdr symbols = {0};
    for (uint64_t i = 0; i < header.e_shnum; i++) {
        const Elf64_Shdr section = section_at(sections, i);
        if (section.sh_type == SHT_SYMTAB) symbols = section;
        if (section.sh_type != SHT_NOBITS &&
            stretch(&file, section.sh_offset, section.sh_size) == NULL)
            return refuse();
    }
    if (symbols.sh_type != SHT_SYMTAB || symbols.sh_link >= header.e_shnum) return refuse();
    const Elf64_Shdr names = section_at(sections, symbols.sh_link);
    const char *text = stretch(&file, names.sh_offset, names.sh_size);
    if (text == NULL || names.sh_size == 0 || text[names.sh_size - 1] != '\0') return refuse();
    const char *table = file.bytes + symbols.sh_offset;
    for (uint64_t i = 0; i < symbols.sh_size / sizeof(Elf64_Sym); i++) {
        Elf64_Sym symbol;
        memcpy(&symbol, table + i * sizeof symbol, sizeof symbol);
        if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !(symbol.st_other & ENTRY_SYMBOL))
            continue;
        if (symbol.st_name >= names.sh_size) return refuse();
        if (!visit(text + symbol.st_name, context)) break;
    }
    return STATUS_OK;
}
