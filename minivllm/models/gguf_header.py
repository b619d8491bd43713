"""The header of a GGUF file, walked once before it is parsed. Built by no lab; may not know models or tensors' contents.

Every count and length in it is a stranger's, and the gguf package believes them: an array that says it has 2^60 entries is
read until memory ends. Here each is held against the bytes that are there, so what comes after can trust the file's form.

    "GGUF" | version | number of tensors, of keys | key, type, value | ... | name, dimensions, type, offset | ... | pad | data
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

MAX_ARRAY = 1 << 22  # entries of one array: a vocabulary has under a million, and the parser makes objects of each
MAX_DIMS = 4
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_DEFAULT_ALIGNMENT = 32


def check_header(path: Path) -> None:
    """Raises ValueError naming the file, and the key or tensor, where the header says more than the file holds."""
    size = path.stat().st_size
    with path.open("rb") as file:
        _Walk(path, file, size).run()


class _Walk:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._left = path, file, size
        self._size = size
        self._order = "<"
        self._where = "its first bytes"

    def run(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError(f"{self._path} is not a GGUF file: it does not start with the bytes 'GGUF'.")
        version = self._take(4)
        self._order = "<" if struct.unpack("<I", version)[0] & 0xFFFF else ">"
        (version_number,) = struct.unpack(self._order + "I", version)
        if version_number not in (2, 3):
            raise ValueError(f"{self._path} is of GGUF version {version_number}; minivllm reads 2 and 3.")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(num_keys):
            alignment = self._key_and_value() or alignment
        tensors = [self._tensor() for _ in range(num_tensors)]
        self._check_data(tensors, alignment)

    # ---------------------------------------------------------------- its parts

    def _key_and_value(self) -> int | None:
        """One metadata entry. Returns its value if it is the file's alignment."""
        self._where = "a metadata key"
        key = self._string()
        self._where = f"the metadata key {key!r}"
        kind = self._number("I")
        if key == "general.alignment" and kind == _UINT32:
            return self._number("I")
        if kind == _ARRAY:
            self._array()
        elif kind == _STRING:
            self._string()
        else:
            self._skip(self._scalar_bytes(kind))
        return None

    def _array(self) -> None:
        kind, length = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise self._damaged("an array of arrays, which GGUF models do not have")
        if length > MAX_ARRAY:
            raise self._damaged(f"an array of {length} entries; minivllm reads up to {MAX_ARRAY}")
        if kind != _STRING:
            self._skip(length * self._scalar_bytes(kind))
            return
        for _ in range(length):
            self._string()

    def _tensor(self) -> tuple[str, list[int], int, int]:
        """Name, dimensions, type and offset of one tensor."""
        self._where = "a tensor's name"
        name = self._string()
        self._where = f"tensor {name!r}"
        num_dims = self._number("I")
        if num_dims > MAX_DIMS:
            raise self._damaged(f"{num_dims} dimensions; there are {MAX_DIMS} at most")
        dims = [self._number("Q") for _ in range(num_dims)]
        return name, dims, self._number("I"), self._number("Q")

    def _check_data(self, tensors: list[tuple[str, list[int], int, int]], alignment: int) -> None:
        """Every tensor's bytes are in the file."""
        from gguf.constants import GGML_QUANT_SIZES

        sizes = {kind.value: size for kind, size in GGML_QUANT_SIZES.items()}
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{self._path}: general.alignment={alignment} is no power of two. The file is damaged.")
        data_start = -(-(self._size - self._left) // alignment) * alignment
        for name, dims, kind, offset in tensors:
            self._where = f"tensor {name!r}"
            if kind not in sizes:
                raise self._damaged(f"the unknown type {kind}")
            per_block, block_bytes = sizes[kind]
            end = data_start + offset + prod(dims) // per_block * block_bytes
            if 0 in dims or end > self._size:
                raise self._damaged(f"shape {dims[::-1]} and ends at byte {end} of {self._size}")

    # ---------------------------------------------------------------- bytes

    def _scalar_bytes(self, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise self._damaged(f"the unknown type {kind}")
        return _SCALAR_BYTES[kind]

    def _string(self) -> str:
        data = self._take(self._number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("text that is not UTF-8") from None

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack(self._order + kind, self._take(struct.calcsize(kind)))
        return int(value)

    def _take(self, n: int) -> bytes:
        self._spend(n)
        return self._file.read(n)

    def _skip(self, n: int) -> None:
        self._spend(n)
        self._file.seek(n, 1)

    def _spend(self, n: int) -> None:
        if n > self._left:
            raise ValueError(
                f"{self._path} is damaged or cut short: {self._where} needs {n} bytes where {self._left} of {self._size} are"
                " left. Fetch the file again."
            )
        self._left -= n

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self._path} is damaged or cut short: {self._where} has {what}. Fetch the file again.")
