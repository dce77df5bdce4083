"""Named objects of the node's broker: tensors that outlive the process that wrote them, mapped without a copy."""

import ctypes
import hashlib
import json
import mmap
import os
import re
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Tuple

from . import _library, _memory, _pools
from ._errors import CisternError

if TYPE_CHECKING:
    from .hints import Device, ObjectInfo, Path

_ALIGN = 512
_PIECE = 64 << 20  # bytes that are copied or read at once
_MOST_HEADER = 16 << 20

# What safetensors calls a type, what PyTorch and __cuda_array_interface__ call it, and its bytes; "" where that has none.
_TYPES = (
    ("F64", "float64", "<f8", 8), ("F32", "float32", "<f4", 4), ("F16", "float16", "<f2", 2), ("BF16", "bfloat16", "", 2),
    ("I64", "int64", "<i8", 8), ("I32", "int32", "<i4", 4), ("I16", "int16", "<i2", 2), ("I8", "int8", "|i1", 1),
    ("U64", "uint64", "<u8", 8), ("U32", "uint32", "<u4", 4), ("U16", "uint16", "<u2", 2), ("U8", "uint8", "|u1", 1),
    ("BOOL", "bool", "|b1", 1), ("F8_E4M3", "float8_e4m3fn", "", 1), ("F8_E5M2", "float8_e5m2", "", 1), ("C64", "complex64", "<c8", 8),
)
_BY_NAME = {t[0]: t for t in _TYPES}
_BY_TORCH = {t[1]: t for t in _TYPES}
_BY_TYPESTR = {t[2].replace("|", "<"): t for t in _TYPES if t[2]}


class _Options(ctypes.Structure):
    """cistern_object_options."""

    _fields_ = [("size", ctypes.c_uint32), ("mode", ctypes.c_uint32), ("layout", ctypes.c_char_p), ("labels", ctypes.c_char_p),
                ("ttl", ctypes.c_double)]


def _text(lib: Any, p: Optional[int]) -> Any:
    """The JSON that a function of the library returned."""
    if not p:
        raise _memory.failure(lib)
    try:
        return json.loads(ctypes.string_at(p))
    finally:
        lib.cistern_string_free(p)


class _Source:
    """Bytes that are copied to an object."""

    def __init__(self, name: str, value: Any) -> None:
        self.stream: int = 0
        self.shape: Tuple[int, ...] = ()
        self.type: Tuple[str, str, str, int] = _BY_NAME["U8"]
        self.address: int = 0
        self.bytes: int = 0
        self._alive: Any = None
        if hasattr(value, "data_ptr"):
            self._of_torch(name, value)
        elif hasattr(value, "__cuda_array_interface__"):
            self._of_interface(name, value, value.__cuda_array_interface__)
        elif hasattr(value, "__array_interface__"):
            self._of_interface(name, value, value.__array_interface__)
        else:
            view = memoryview(value).cast("B")
            self._alive = (ctypes.c_char * max(len(view), 1)).from_buffer_copy(view.tobytes() or b"\0")
            self.shape, self.bytes, self.address = (len(view),), len(view), ctypes.addressof(self._alive)

    def _of_torch(self, name: str, value: Any) -> None:
        value = self._alive = value.detach().contiguous()
        kind = str(value.dtype).replace("torch.", "")
        if kind not in _BY_TORCH:
            raise TypeError("tensor %r: no object has tensors of %s" % (name, value.dtype))
        self.type, self.shape, self.address = _BY_TORCH[kind], tuple(value.shape), value.data_ptr()
        self.bytes = value.numel() * value.element_size()
        if value.is_cuda:
            import torch

            self.stream = torch.cuda.current_stream(value.device).cuda_stream

    def _of_interface(self, name: str, value: Any, i: Dict[str, Any]) -> None:
        kind = _BY_TYPESTR.get(i["typestr"].replace("|", "<"))
        if kind is None:
            raise TypeError("array %r: no object has arrays of type %s" % (name, i["typestr"]))
        if i.get("strides") is not None:
            raise ValueError("array %r: expected a contiguous one" % name)
        self._alive, self.type, self.shape, self.address = value, kind, tuple(i["shape"]), i["data"][0]
        self.stream = i.get("stream") or 0
        self.bytes = kind[3]
        for n in self.shape:
            self.bytes *= n


def _layout(sources: Mapping[str, _Source]) -> Tuple[Dict[str, Any], int]:
    """The layout of tensors, each aligned, and the object's bytes."""
    layout: Dict[str, Any] = {}
    at = 0
    for name, s in sources.items():
        layout[name] = {"dtype": s.type[0], "shape": list(s.shape), "data_offsets": [at, at + s.bytes]}
        at += -(-s.bytes // _ALIGN) * _ALIGN
    return layout, max(at, 1)


def _labels(labels: Optional[Mapping[str, str]]) -> Optional[bytes]:
    for k, v in (labels or {}).items():
        if "," in k + v or "=" in k:
            raise ValueError("label %s=%s: expected no comma, and no = in the key" % (k, v))
    return ",".join("%s=%s" % kv for kv in labels.items()).encode() if labels else None


class _Build:
    """An object that is written; without a commit the block leaves nothing."""

    def __init__(self, name: str, size: int, layout: bytes, device: "Optional[Device]", mode: int, ttl: float,
                 labels: Optional[Mapping[str, str]]) -> None:
        index = _pools.device_index(device)
        self.lib, self.size, self.ptr = _memory.library(), size, ctypes.c_void_p()
        o = _Options(ctypes.sizeof(_Options), mode, layout, _labels(labels), ttl)
        _library.check(self.lib, self.lib.cistern_node_build(index, name.encode(), size, ctypes.byref(o), ctypes.byref(self.ptr)))

    def write(self, at: int, address: int, size: int, stream: int = 0) -> None:
        if size:
            _library.check(self.lib, self.lib.cistern_node_write(self.ptr, at, address, size, stream))

    def commit(self, checksum: bool) -> None:
        text = _sum(self.lib, self.ptr, self.size).encode() if checksum else None
        p, self.ptr = self.ptr, ctypes.c_void_p()
        _library.check(self.lib, self.lib.cistern_node_commit(p, text))

    def __enter__(self) -> "_Build":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.ptr.value:
            self.lib.cistern_node_abandon(self.ptr)


def _sum(lib: Any, ptr: Any, size: int) -> str:
    """The SHA-256 of the contents."""
    found, buffer = hashlib.sha256(), ctypes.create_string_buffer(min(size, _PIECE))
    for at in range(0, size, _PIECE):
        n = min(_PIECE, size - at)
        _library.check(lib, lib.cistern_node_read(ptr, at, buffer, n, None))
        found.update(memoryview(buffer)[:n])
    return found.hexdigest()


class Array:
    """A tensor of a named object, for CuPy (`cupy.asarray`), numba (`numba.cuda.as_cuda_array`) and others that know
    `__cuda_array_interface__`. It keeps the object mapped. Its memory is for reading only.

    It has `dtype`, as safetensors names types (`"BF16"`), `shape`, `nbytes`, and `ptr`, its address on the device. Types that the
    interface lacks are shown as bytes there.
    """

    def __init__(self, mapping: "_Mapping", dtype: str, shape: Tuple[int, ...], ptr: int, nbytes: int) -> None:
        self._mapping, self.dtype, self.shape, self.ptr, self.nbytes = mapping, dtype, shape, ptr, nbytes

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        kind = _BY_NAME.get(self.dtype)
        if kind is None or not kind[2]:  # bytes then, as the interface has no such type
            return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.ptr, True), "version": 3}
        return {"shape": self.shape, "typestr": kind[2], "data": (self.ptr, True), "version": 3}


class _Bytes:
    """A tensor's bytes for PyTorch, which refuses memory that says it is for reading only."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__cuda_array_interface__ = {"shape": (array.nbytes,), "typestr": "|u1", "data": (array.ptr, False), "version": 3}


class _Mapping:
    """A mapped object. It is unmapped when nothing refers to it any more."""

    def __init__(self, lib: Any, ptr: Any) -> None:
        self.lib, self.ptr = lib, ptr

    def close(self) -> None:
        p, self.ptr = self.ptr, None
        if p:
            code = self.lib.cistern_node_close(p)
            if code:
                self.ptr = p
                raise _library.failure(self.lib, code)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            pass  # as during a capture: it stays mapped until the process ends


class Object(Mapping[str, Any]):
    """A generation of a named object that is mapped here: its tensors by name, for reading only.

    With PyTorch imported an item is a `torch.Tensor`, else an `Array`. The tensors keep the memory mapped, as this object does.
    `info` is what the broker knows of it, a dictionary with `generation`, `bytes`, `labels`, `mode`, `contents_sha256` and others.
    `metadata` is that of a safetensors file. `device` is the index of the device.
    """

    def __init__(self, mapping: _Mapping, device: int, info: "ObjectInfo", layout: Dict[str, Any]) -> None:
        self.info, self.device, self._mapping = info, device, mapping
        self._layout = {k: v for k, v in layout.items() if k != "__metadata__"}
        self.metadata: Dict[str, str] = dict(layout.get("__metadata__") or {})

    def array(self, name: str) -> Array:
        """A tensor as an `Array`, also with PyTorch imported."""
        if not self._mapping.ptr:
            raise CisternError("the object is closed")
        t = self._layout[name]
        begin, end = t["data_offsets"]
        return Array(self._mapping, t["dtype"], tuple(t["shape"]), self._mapping.ptr.value + begin, end - begin)

    def __getitem__(self, name: str) -> Any:
        a, torch = self.array(name), sys.modules.get("torch")
        if torch is None or not hasattr(torch, "as_tensor"):
            return a
        kind = _BY_NAME.get(a.dtype)
        dtype = getattr(torch, kind[1], None) if kind else None
        if kind is None or dtype is None:
            raise CisternError("tensor %r is of type %s, which this PyTorch has not; array(%r) gives its bytes" % (name, a.dtype, name))
        if a.nbytes == 0:
            return torch.empty(a.shape, dtype=dtype, device="cuda:%d" % self.device)
        if a.ptr % kind[3]:
            raise CisternError("tensor %r of type %s begins at an address that is no multiple of %d" % (name, a.dtype, kind[3]))
        return torch.as_tensor(_Bytes(a), device="cuda:%d" % self.device).view(dtype).reshape(a.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    def verify(self) -> None:
        """Compares the contents with the SHA-256 that the writer gave (`checksum=True`). It reads all of it.

        Raises:
            CisternError: they differ, or there is none.
        """
        want = self.info.get("contents_sha256")
        if not want:
            raise CisternError("object %r has no checksum of its contents: put it with checksum=True" % self.info["name"])
        if _sum(self._mapping.lib, self._mapping.ptr, self.info["bytes"]) != want:
            raise CisternError("the contents of object %r are not those that were written" % self.info["name"])

    def close(self) -> None:
        """Unmaps the object, after the device's work is done. Its tensors must not be used any more. Without it the object is unmapped
        when neither it nor a tensor of it is referred to.

        Raises:
            CisternError: a CUDA graph is being captured.
        """
        self._mapping.close()

    def __enter__(self) -> "Object":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def put(name: str, tensors: Mapping[str, object], device: "Optional[Device]" = None, mode: int = 0o600, ttl: float = 0,
        labels: Optional[Mapping[str, str]] = None, checksum: bool = False) -> None:
    """Writes tensors to a named object, which outlives this process. It replaces the object of that name; processes that have that open
    keep it.

    The node's broker (`cistern serve`) keeps the memory. The tensors are copied.

    Args:
        name: 1 to 255 letters, digits and `- _ . : @ + =`, with single slashes in between. It is the user's own.
        tensors: by name: PyTorch tensors, arrays with `__cuda_array_interface__` or `__array_interface__`, or bytes.
        device: where the object is to be; None is the current one.
        mode: rights to read, as of a file: 0o600, 0o640, 0o604, 0o644.
        ttl: seconds without a reader after which the object goes; 0 keeps it.
        labels: up to 8 texts by key, for operators.
        checksum: store the SHA-256 of the contents, for `Object.verify`. It reads all of them back.

    Raises:
        CisternError: there is no broker, a limit of it is reached, or the device has too little memory.

    Example:
        cistern.node.put("weights/llama-8b", model.state_dict())
    """
    sources = {k: _Source(k, v) for k, v in tensors.items()}
    layout, size = _layout(sources)
    with _Build(name, size, json.dumps(layout).encode(), device, mode, ttl, labels) as b:
        for k, s in sources.items():
            b.write(layout[k]["data_offsets"][0], s.address, s.bytes, s.stream)
        b.commit(checksum)


def get(name: str, device: "Optional[Device]" = None, user: Optional[int] = None, generation: int = 0) -> Object:
    """Maps a named object without a copy.

    Writing to a tensor of it breaks this process's CUDA context, and no other process.

    Args:
        name: the object's name.
        device: the device that it is on, or that reaches it; None is the current one.
        user: the number of the user whose object it is; None is this one.
        generation: one of the object's generations; 0 is the latest.

    Returns:
        Its tensors by name.

    Raises:
        CisternError: there is no such object, or no broker, or this user may not read it.

    Example:
        model.load_state_dict(cistern.node.get("weights/llama-8b"), assign=True)
    """
    index = _pools.device_index(device)
    lib, p = _memory.library(), ctypes.c_void_p()
    _library.check(lib, lib.cistern_node_open(index, name.encode(), -1 if user is None else user, generation, ctypes.byref(p)))
    mapping = _Mapping(lib, p)
    about = _text(lib, lib.cistern_node_describe(p))
    return Object(mapping, index, about["object"], about["layout"])


def objects(name: Optional[str] = None, user: Optional[int] = None) -> "List[ObjectInfo]":
    """Lists the named objects that this user may read.

    Args:
        name: only the generations of this object.
        user: with a name, the number of its user; None is this one.

    Returns:
        A dictionary for each generation, with the names that `cistern node ls --objects --json` prints.

    Raises:
        CisternError: there is no broker.
    """
    lib = _memory.library()
    found = _text(lib, lib.cistern_node_objects(None if name is None else name.encode(), -1 if user is None else user))
    return list(found["objects"])


def remove(name: str, user: Optional[int] = None, generation: int = 0) -> None:
    """Removes a named object. Its memory goes when the last process has closed it.

    Args:
        name: the object's name.
        user: the number of the user whose object it is; None is this one.
        generation: one generation; 0 is the latest.

    Raises:
        CisternError: there is no such object, or no broker, or it is another user's.
    """
    lib = _memory.library()
    _library.check(lib, lib.cistern_node_remove(name.encode(), -1 if user is None else user, generation))


def load_safetensors(path: "Path", device: "Optional[Device]" = None, name: Optional[str] = None, mode: int = 0o600, ttl: float = 0,
                     timeout: float = 600) -> Object:
    """Maps the tensors of a safetensors file. The first process of a node reads the file; later ones map what that one wrote.

    Args:
        path: the file.
        device: where the tensors are to be; None is the current device.
        name: the object's name. None makes one of the file's path, size and time of change, so that a changed file is another object.
        mode: as of `put`.
        ttl: as of `put`.
        timeout: seconds to wait for another process that reads the file; then this one reads it too.

    Returns:
        The tensors by name.

    Raises:
        CisternError: there is no broker, or the device has too little memory.
        ValueError: the file is not a safetensors file.
        OSError: the file cannot be read.
    """
    path = os.path.realpath(os.fspath(path))
    with open(path, "rb") as f:
        st = os.fstat(f.fileno())
        if name is None:
            key = "%s\0%d\0%d\0%d\0%s" % (path, st.st_size, st.st_mtime_ns, st.st_ino, _pools.device_index(device))
            base = re.sub("[^A-Za-z0-9._-]", "_", os.path.basename(path))[:100]
            name = "safetensors/%s:%s" % (base, hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32])
        end = time.monotonic() + timeout
        while True:
            states = {o["state"] for o in objects(name)}
            if "committed" in states:
                return get(name, device)
            if "building" not in states or time.monotonic() > end:
                break
            time.sleep(0.02)
        _put_file(f, st.st_size, name, device, mode, ttl, os.path.basename(path))
    return get(name, device)


def _put_file(f: Any, size: int, name: str, device: "Optional[Device]", mode: int, ttl: float, base: str) -> None:
    """Writes the contents of a safetensors file to an object: 8 bytes, the length of the header; the header; the tensors."""
    head = f.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= min(_MOST_HEADER, size - 8):
        raise ValueError("%s: expected a safetensors file with a header of at most %d bytes" % (base, _MOST_HEADER))
    header = f.read(length)
    try:
        if not isinstance(json.loads(header), dict):
            raise ValueError
    except ValueError:
        raise ValueError("%s: the header is no JSON object" % base) from None
    at = 8 + length
    with _Build(name, max(size - at, 1), header.rstrip(b" "), device, mode, ttl, {"file": re.sub("[^A-Za-z0-9._-]", "_", base)[:63]}) as b:
        if size > at:
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as m:
                first = ctypes.c_char.from_buffer(m)
                try:
                    for i in range(at, size, _PIECE):
                        b.write(i - at, ctypes.addressof(first) + i, min(_PIECE, size - i))
                finally:
                    del first
        b.commit(False)
