/* What dlpack.c, exchange.c and interface.c share with operand.c: the arrays of other libraries.
 * Whatever another library says is looked at before it is believed. */
#ifndef GPUOPS_FOREIGN_H
#define GPUOPS_FOREIGN_H

#include "core.h"

#include <stdatomic.h>

/* What a type offers. A type that has both DLPack and __cuda_array_interface__ is taken by the
 * latter if that names the stream on which its library works, as CuPy's does: then the order of
 * work can be kept in both directions. Its first object on a GPU decides. */
typedef struct Library {
    const DLPackExchangeAPI *api; /* NULL: there is none */
    bool autograd;                /* requires_grad, is_conj and is_neg are attributes of the type */
    atomic_int interface;
} Library;

enum { INTERFACE_UNKNOWN, INTERFACE_FIRST, INTERFACE_NEVER };

/* operand.c: an attribute of an object, or NULL without an exception where it has none. */
int find_attribute(PyObject *object, const char *name, PyObject **value);

/* operand.c: of an array on a device, whether its library can take the result. */
int kind_on_device(PyObject *object, Kind *kind);

/* operand.c: whether a type has an attribute, for instance a protocol's method; -1 with an
 * exception where there is no telling, for want of memory. */
int type_has(PyTypeObject *type, const char *name);

/* Each of these returns 1: the object is an array of another library, and operand says so; 0: it is
 * none; -1 with an exception. The library is NULL for a type without DLPack. */
int classify_exchange(State *state, const Library *library, Operand *operand);
int classify_dlpack(State *state, Library *library, Operand *operand);
int classify_interface(State *state, Library *library, Operand *operand);

/* dlpack.c: checks. Each fails with an exception, in the name of a parameter. */
int item_bytes_of(DLDataType dtype); /* 0: it does not exist, or not in whole bytes */
/* Sets ndim, shape and strides of a view of some item_bytes. Strides count in units of unit_bytes;
 * NULL is C order, which is also what axes get whose stride means nothing, because nobody ever
 * takes a step. The elements lie between *low and *high bytes from the first one. */
int read_sizes(const char *name, int64_t ndim, const int64_t *shape, const int64_t *strides,
               int64_t unit_bytes, View *view, int64_t *low, int64_t *high);
/* Sets data of a view whose sizes have been read. */
int read_address(const char *name, uintptr_t address, uint64_t offset, int64_t low, int64_t high,
                 View *view);
int read_tensor(const char *name, const DLTensor *tensor, View *view); /* all of these */
int check_alignment(const char *name, const View *view, int64_t alignment);
int check_ordinal(State *state, const char *op, const char *name, int64_t ordinal);
int refuse_device(const char *name, int64_t type);
bool is_host(DLDevice device);
bool is_cuda(DLDevice device);
/* Whether the memory of a view is on its device; where that is not known yet (DEVICE_CPU), it is
 * found out. */
int locate(State *state, const char *op, const char *name, View *view);

/* dlpack.c: what is imported. */
typedef struct Taken {
    Owner owner;
    const DLTensor *tensor;
    int read_only;
} Taken;

void set_dtype(Operand *operand, PyArray_Descr *descr, DLDataType dtype); /* takes over descr */
void drop_owner(Owner owner);
/* Sets operand->array, over the memory of the view, which base keeps alive. Takes over the
 * reference to base, also where it fails. */
int set_host_array(Operand *operand, PyObject *base);
/* Makes memory of what an owner keeps, at home on a stream. These take over the owner, also where
 * they fail; adopt_tensor reads and checks the tensor first, which has to be on view.device. */
int adopt(State *state, Operand *operand, Stream *stream, Owner owner);
int adopt_tensor(State *state, Operand *operand, const Taken *taken, Stream *stream);

/* dlpack.c: what is exported. It holds the memory itself and no Python object, so that whoever has
 * it can let go of it from any thread, and after the interpreter. Only a result on the host, which
 * NumPy has allocated, is held as the object that it is. */
typedef struct Export {
    union {
        DLManagedTensorVersioned versioned;
        DLManagedTensor legacy;
    } tensor;
    Memory *memory;
    Stream *consumer; /* held, or NULL; what it is given uses the memory, until that goes back */
    void *host_data;
    PyObject *object;
    int64_t sizes[]; /* shape, then strides in elements */
} Export;

/* Which form a consumer reads: a negative minor version is the legacy one. */
enum { LEGACY_FORM = -1 };

/* The caller adds what is to be held. */
Export *new_export(const View *view, DLDataType dtype, DLDevice device, uint64_t flags, int minor);
/* Takes over the reference to the stream of the consumer, NULL where that is not known; the caller
 * has made it wait for the array's own. */
Export *export_array(const DeviceArray *array, Stream *consumer, uint64_t flags, int minor);

/* exchange.c: the table of the version that we know, of those that a type offers; or NULL. */
const DLPackExchangeAPI *find_api(PyObject *capsule);
/* The result of a call between arrays on the host, of the kind of an operand. */
PyObject *exchange_host_result(const Operand *like, PyArrayObject *array);

#endif
