"""Plain data across the process line: numbers, strings, lists, tuples, dicts and tensors, as JSON. Shared by parent and child.

The child runs code nobody has read. So what it sends is never unpickled and never an object: a thing that is not plain data
arrives as `Opaque("module.Type")`, and an object with a clever `__eq__` never reaches the judge.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_FRAME_BYTES = 64 << 20
MAX_DEPTH = 50
MAX_PARTS = 1_000_000
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Opaque:
    """Stands for a value that is not plain data."""

    type_name: str

    def __str__(self) -> str:
        return f"a {self.type_name}"

    def __repr__(self) -> str:
        """Within a list that is shown."""
        return f"<{self.type_name}>"


def pack(value: Any, depth: int = 0) -> Any:
    """A JSON-able stand-in for `value`; numpy scalars become numbers, whatever is not plain becomes Opaque."""
    kind = type(value)
    if depth > MAX_DEPTH:
        return {"$opaque": "structure nested too deeply"}
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if value.bit_length() < 1024 else {"$opaque": "int of more than 300 digits"}
    if kind is list:
        return [pack(v, depth + 1) for v in value]
    if kind is tuple:
        return {"$tuple": [pack(v, depth + 1) for v in value]}
    if kind is dict:
        return {"$dict": [[pack(k, depth + 1), pack(v, depth + 1)] for k, v in value.items()]}
    if kind is Opaque:
        return {"$opaque": value.type_name}
    torch = sys.modules.get("torch")  # no tensors without it, so no need to import it
    if torch is not None and isinstance(value, torch.Tensor):
        return _pack_tensor(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and type(value.item()) in (bool, int, float):
        return value.item()
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    return {"$opaque": name}


def _pack_tensor(tensor: Any) -> Any:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        return {"$opaque": f"tensor of dtype {dtype}"}
    dense = tensor.detach().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)
    return {"$tensor": [dtype, list(dense.shape), base64.b64encode(data.numpy().tobytes()).decode()]}


def unpack(value: Any) -> Any:
    """The inverse of `pack`. Raises ValueError for anything `pack` does not write."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("not plain data: an object with several tags")
    ((tag, body),) = value.items()
    if tag == "$tuple":
        return tuple(unpack(v) for v in body)
    if tag == "$dict":
        return {unpack(k): unpack(v) for k, v in body}
    if tag == "$opaque":
        return Opaque(str(body))
    if tag == "$tensor":
        return _unpack_tensor(*body)
    raise ValueError(f"not plain data: unknown tag {tag!r}")


def _unpack_tensor(dtype: str, shape: list[int], data: str) -> Any:
    import torch

    if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"not plain data: a tensor of {dtype!r}, {shape!r}")
    raw, torch_dtype = base64.b64decode(data), getattr(torch, dtype)
    if len(raw) != math.prod(shape) * torch_dtype.itemsize:
        raise ValueError(f"not plain data: {len(raw)} bytes for a {dtype} tensor of shape {shape}")
    if not raw:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch_dtype).reshape(shape)


def write_frame(stream: BinaryIO, message: Any) -> None:
    """One message: its length in four bytes, then JSON. Raises ValueError if it is over MAX_FRAME_BYTES."""
    body = json.dumps(pack(message)).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body) >> 20} MiB is over the limit of {MAX_FRAME_BYTES >> 20} MiB")
    rest = memoryview(struct.pack(">I", len(body)) + body)
    while rest:  # an unbuffered stream may take less than it is given
        rest = rest[stream.write(rest) :]
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """The next message, or None at the end of the stream (also when it ends in the middle of a message)."""
    header = _read_exactly(stream, 4)
    if header is None:
        return None
    (size,) = struct.unpack(">I", header)
    if size > MAX_FRAME_BYTES:
        raise ValueError("not plain data: an oversized message")
    body = _read_exactly(stream, size)
    if body is None:
        return None
    if body.count(b"[") + body.count(b"{") > MAX_PARTS:  # each takes a hundred bytes of memory here
        raise ValueError("not plain data: a message of too many parts")
    return unpack(json.loads(body))


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = stream.read(size - len(data))
        if not piece:
            return None
        data += piece
    return data
