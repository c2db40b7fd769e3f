"""DLPack made and read by hand, with ctypes: what the libraries' own code never gets wrong.

`Producer` is another library's array, which says about itself whatever a test wants it to say.
`Export` reads a capsule as a consumer does. `Pot` is an array type with the C exchange API.
"""

import ctypes
from ctypes import (
    POINTER,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
    pythonapi,
)

import numpy as np

CPU, CUDA, CUDA_HOST, ROCM, METAL, CUDA_MANAGED = 1, 2, 3, 10, 8, 13
READ_ONLY, IS_COPIED = 1, 2

LEGACY, USED_LEGACY = b"dltensor", b"used_dltensor"
VERSIONED, USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"
EXCHANGE_API = b"dlpack_exchange_api"

# Type codes and bits; float8 and bfloat16 are those of ml_dtypes.
DTYPES = {
    "bool": (6, 8),
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64),
    "uint8": (1, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64),
    "float16": (2, 16), "float32": (2, 32), "float64": (2, 64),
    "complex64": (5, 64), "complex128": (5, 128),
}  # fmt: skip
ML_DTYPES = {
    "bfloat16": (4, 16),
    "float8_e3m4": (7, 8), "float8_e4m3": (8, 8), "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8), "float8_e8m0fnu": (14, 8),
}  # fmt: skip


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, c_void_p)


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


def python_function(name, result, *arguments):
    function = ctypes.PYFUNCTYPE(result, *arguments)
    return function((name, pythonapi))


capsule_new = python_function("PyCapsule_New", py_object, c_void_p, c_void_p, c_void_p)
capsule_pointer = python_function("PyCapsule_GetPointer", c_void_p, py_object, c_char_p)
capsule_name = python_function("PyCapsule_GetName", c_char_p, py_object)
capsule_rename = python_function("PyCapsule_SetName", c_int, py_object, c_void_p)
# For a capsule that is about to go, of which no reference can be taken any more.
dying_name = python_function("PyCapsule_GetName", c_char_p, c_void_p)
dying_pointer = python_function("PyCapsule_GetPointer", c_void_p, c_void_p, c_char_p)

# Capsules keep the address of their name, and so these live for ever.
NAMES = {
    name: ctypes.create_string_buffer(name)
    for name in (LEGACY, USED_LEGACY, VERSIONED, USED_VERSIONED, EXCHANGE_API, b"nonsense")
}


def integers(values):
    return None if values is None else (c_int64 * max(len(values), 1))(*values)


def dtype_of(code_and_bits):
    for table in (DTYPES, ML_DTYPES):
        for name, entry in table.items():
            if entry == code_and_bits:
                return name
    return None


def code_of(dtype):
    name = np.dtype(dtype).name
    return DTYPES.get(name) or ML_DTYPES[name]


# The managed tensors that nobody has given back, by address: whose they are, and what they consist
# of. A second deletion of the same one ends up in DELETED_TWICE.
LIVE = {}
DELETED_TWICE = []


@DELETER
def delete(address):
    if address in LIVE:
        LIVE.pop(address)[0].deleted += 1
    else:
        DELETED_TWICE.append(address)


@ctypes.PYFUNCTYPE(None, c_void_p)
def forget(capsule):
    """The destructor of a capsule: nobody has consumed it, unless it has another name by now."""
    name = dying_name(capsule)
    address = dying_pointer(capsule, name)
    if address in LIVE and LIVE[address][1] == name:
        delete(address)


class Producer:
    """An array of another library; the keywords say what is to be wrong with it.

    `data` is an ndarray, or anything with ptr, shape, strides and dtype. Deletions are counted in
    `deleted`, and the keywords of every call of __dlpack__ kept in `calls`.
    """

    def __init__(self, data, /, **wrong):
        self.owner = data
        on_host = isinstance(data, np.ndarray)
        code, bits = code_of(data.dtype)
        self.tensor_device = wrong.pop("device", (CPU, 0) if on_host else (CUDA, data.device))
        self.capsule_name = wrong.pop("name", VERSIONED)
        self.version = wrong.pop("version", (1, 3))
        self.flags = wrong.pop("flags", 0)
        self.has_deleter = wrong.pop("has_deleter", True)
        self.claimed_device = wrong.pop("claimed_device", self.tensor_device)
        self.accepts = wrong.pop("accepts", None)
        self.fields = {
            "data": data.ctypes.data if on_host else data.ptr,
            "ndim": len(data.shape),
            "code": code,
            "bits": bits,
            "lanes": 1,
            "shape": data.shape,
            "strides": tuple(stride // data.dtype.itemsize for stride in data.strides),
            "byte_offset": 0,
        }
        assert wrong.keys() <= self.fields.keys(), wrong
        self.fields.update(wrong)
        self.deleted = 0
        self.made = 0
        self.calls = []
        self.kept = []

    def __dlpack_device__(self):
        return self.claimed_device

    def __dlpack__(self, **keywords):
        if self.accepts is not None and not keywords.keys() <= set(self.accepts):
            raise TypeError(f"got unexpected keywords {sorted(keywords)}")
        self.calls.append(keywords)
        return self.capsule()

    def managed(self, versioned=True, lent=False):
        fields = dict(self.fields)
        shape, strides = integers(fields.pop("shape")), integers(fields.pop("strides"))
        tensor = Tensor(
            device_type=self.tensor_device[0], device_id=self.tensor_device[1], **fields
        )
        if shape is not None:
            tensor.shape = ctypes.cast(shape, POINTER(c_int64))
        if strides is not None:
            tensor.strides = ctypes.cast(strides, POINTER(c_int64))
        managed = (Versioned if versioned else Legacy)(tensor=tensor)
        if versioned:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        kept = (managed, shape, strides)
        if self.has_deleter and not lent:
            managed.deleter = ctypes.cast(delete, c_void_p)
            LIVE[ctypes.addressof(managed)] = (self, self.capsule_name, kept)
        else:
            self.kept.append(kept)
        self.made += not lent
        return managed

    def capsule(self):
        managed = self.managed(self.capsule_name not in (LEGACY, USED_LEGACY))
        return capsule_new(
            ctypes.addressof(managed),
            ctypes.addressof(NAMES[self.capsule_name]),
            ctypes.cast(forget, c_void_p),
        )


class Export:
    """A capsule of ours, as a consumer reads it. It is consumed with `consume` only."""

    def __init__(self, capsule):
        self.capsule = capsule
        self.name = capsule_name(capsule)
        self.address = capsule_pointer(capsule, self.name)
        kind = Versioned if self.name == VERSIONED else Legacy
        self.managed = kind.from_address(self.address)
        tensor = self.managed.tensor
        self.data = tensor.data or 0
        self.device = (tensor.device_type, tensor.device_id)
        self.ndim = tensor.ndim
        self.dtype = (tensor.code, tensor.bits)
        self.lanes = tensor.lanes
        self.byte_offset = tensor.byte_offset
        self.shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
        self.strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
        if kind is Versioned:
            self.version = (self.managed.major, self.managed.minor)
            self.flags = self.managed.flags

    def consume(self):
        """Takes the tensor over, and returns a function that gives it back without the GIL."""
        used = USED_VERSIONED if self.name == VERSIONED else USED_LEGACY
        assert capsule_rename(self.capsule, ctypes.addressof(NAMES[used])) == 0
        deleter, address = DELETER(self.managed.deleter), self.address
        self.managed = None
        return lambda: deleter(address)

    def host_array(self):
        """A view of a tensor on the host, good for as long as nobody gives it back."""
        dtype = np.dtype(dtype_of(self.dtype))
        count = int(np.prod(self.shape))
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.data)
        return np.frombuffer(memory, dtype).reshape(self.shape)


# The C exchange API.

SET_ERROR = ctypes.CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)
ALLOCATE = ctypes.PYFUNCTYPE(c_int, POINTER(Tensor), POINTER(c_void_p), c_void_p, SET_ERROR)
FROM_OBJECT = ctypes.PYFUNCTYPE(c_int, py_object, POINTER(c_void_p))
TO_OBJECT = ctypes.PYFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))
LEND = ctypes.PYFUNCTYPE(c_int, py_object, POINTER(Tensor))
WORK_STREAM = ctypes.PYFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))


class ExchangeAPI(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("previous", c_void_p),
        ("allocate", c_void_p),
        ("from_object", c_void_p),
        ("to_object", c_void_p),
        ("lend", c_void_p),
        ("work_stream", c_void_p),
    ]


def exchange_api(kind):
    """The table that a type offers."""
    capsule = kind.__dlpack_c_exchange_api__
    return ExchangeAPI.from_address(capsule_pointer(capsule, EXCHANGE_API))


def new_kind(*, lends=True, empty=None, wrong=(), previous=None, stream=0, autograd=False):
    """A new array type that offers the exchange API, with arrays made of ndarrays or DeviceArrays.

    `empty(shape, dtype, device)` allocates for it, and may raise. `wrong` names table entries to
    leave out, or is a dict of values for them. Counts of calls are in `kind.calls`.

    `kind.fails` names functions that fail, and `kind.withholds` those that succeed without a
    result. `kind.complaint` is the kind and the text of the allocator's error, and `kind.flaws`
    says what is wrong with the tensors that it makes.
    """

    class Pot:
        fails = withholds = ()
        complaint = b"MemoryError", b"the pot is full\nof something"

        def __init__(self, data, /, **wrong):
            self.data = data
            self.producer = Producer(data, **wrong)
            if autograd:
                self.requires_grad = self.conjugate = self.negative = False

        @classmethod
        def called(cls, name):
            cls.calls[name] = cls.calls.get(name, 0) + 1
            return -1 if name in cls.fails else 0

    if autograd:
        Pot.requires_grad = False
        Pot.is_conj = lambda self: self.conjugate
        Pot.is_neg = lambda self: self.negative

    alive = {}

    @ALLOCATE
    def allocate(prototype, out, context, set_error):
        if Pot.called("allocate") != 0:
            set_error(context, *Pot.complaint)
            return -1
        if "allocate" in Pot.withholds:
            return 0
        wanted = prototype.contents
        shape = tuple(wanted.shape[: wanted.ndim])
        dtype = dtype_of((wanted.code, wanted.bits))
        data = empty(shape, dtype, (wanted.device_type, wanted.device_id))
        producer = Producer(data, **Pot.flaws)
        managed = producer.managed()
        out[0] = ctypes.addressof(managed)
        alive[out[0]] = producer
        return 0

    @FROM_OBJECT
    def from_object(pot, out):
        if Pot.called("from_object") != 0:
            return -1
        if "from_object" in Pot.withholds:
            return 0
        out[0] = ctypes.addressof(pot.producer.managed())
        return 0

    @TO_OBJECT
    def to_object(address, out):
        managed = Versioned.from_address(address)
        status = Pot.called("to_object")
        if status != 0 or "to_object" in Pot.withholds:
            alive.pop(address, None)
            if managed.deleter:
                DELETER(managed.deleter)(address)
            return status
        if address in alive:
            pot = Pot(alive.pop(address).owner)
            del LIVE[address]
        else:
            export = Export(capsule_new(address, ctypes.addressof(NAMES[VERSIONED]), None))
            pot = Pot(export.host_array().copy())
            DELETER(managed.deleter)(address)
        pythonapi.Py_IncRef(py_object(pot))
        out[0] = id(pot)
        return 0

    @LEND
    def lend(pot, out):
        if Pot.called("lend") != 0:
            return -1
        managed = pot.producer.managed(lent=True)
        ctypes.memmove(out, ctypes.addressof(managed.tensor), ctypes.sizeof(Tensor))
        return 0

    @WORK_STREAM
    def work_stream(device_type, device_id, out):
        if Pot.called("work_stream") != 0:
            return -1
        out[0] = stream
        return 0

    functions = {
        "allocate": allocate,
        "from_object": from_object,
        "to_object": to_object,
        "work_stream": work_stream,
    }
    if lends:
        functions["lend"] = lend
    table = ExchangeAPI(major=1, minor=3)
    for name, function in functions.items():
        setattr(table, name, ctypes.cast(function, c_void_p))
    for name in wrong:
        setattr(table, name, wrong[name] if isinstance(wrong, dict) else None)
    if previous is not None:
        table.previous = ctypes.addressof(previous)
    Pot.calls, Pot.flaws = {}, {}
    Pot.table = table
    Pot.alive = alive
    Pot.kept = [functions, NAMES, previous]
    Pot.__dlpack_c_exchange_api__ = capsule_new(
        ctypes.addressof(table), ctypes.addressof(NAMES[EXCHANGE_API]), None
    )
    return Pot
