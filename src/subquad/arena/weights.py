"""Weights out of other runtimes' files: ONNX graphs and CTranslate2 models, as tensors.

Just enough of both formats to read arrays and the names of the operations that use them; no
runtime is needed, nothing is executed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.errors import OptionError

__all__ = ["Graph", "Node", "read_ctranslate2", "read_onnx"]


class Node(NamedTuple):
    """An operation: ``name`` is its path in the exported module, such as ``/encoder/q/MatMul``."""

    name: str
    kind: str
    inputs: tuple[str, ...]


class Graph(NamedTuple):
    """An ONNX graph: its constant arrays by name, its operations in order."""

    arrays: dict[str, Tensor]
    nodes: list[Node]


# ---- ONNX: protocol buffers ----------------------------------------------------------------
# Field numbers of onnx.proto: ModelProto.graph 7; GraphProto.node 1, .initializer 5;
# NodeProto.input 1, .name 3, .op_type 4; TensorProto.dims 1, .data_type 2, .float_data 4,
# .int32_data 5, .int64_data 7, .name 8, .raw_data 9, .data_location 14.

_ONNX_TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
}


def read_onnx(path: Path) -> Graph:
    """Constant arrays and operations of an ONNX file.

    Raises:
        OptionError: it is no ONNX file, or it keeps arrays in other files or other types.
    """
    try:
        return _graph(memoryview(path.read_bytes()))
    except (IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{path} is no ONNX file: {error}") from error


def _graph(view: memoryview) -> Graph:
    arrays: dict[str, Tensor] = {}
    nodes: list[Node] = []
    for number, model_field in _fields(view):
        if number != 7:
            continue
        for kind, value in _fields(model_field):
            if kind == 1:
                nodes.append(_node(value))
            elif kind == 5:
                name, array = _tensor(value)
                arrays[name] = array
    if not arrays:
        raise IndexError("it holds no arrays")
    return Graph(arrays, nodes)


def _node(view: memoryview) -> Node:
    found: dict[int, list[str]] = {1: [], 3: [""], 4: [""]}
    for number, value in _fields(view):
        if number in found:
            found[number].append(str(value, "utf-8"))
    return Node(found[3][-1], found[4][-1], tuple(found[1]))


def _tensor(view: memoryview) -> tuple[str, Tensor]:
    shape: list[int] = []
    kind, name, data = 0, "", None
    for number, value in _fields(view):
        if number == 1:
            shape += [value] if isinstance(value, int) else _varints(value)
        elif number == 2:
            kind = value
        elif number == 8:
            name = str(value, "utf-8")
        elif number == 9 or (number in (4, 5, 7) and not isinstance(value, int)):
            data = (number, value)
        elif number == 14 and value:
            raise OptionError(f"the array {name!r} lies in another file, which is not supported")
    if kind not in _ONNX_TYPES:
        raise OptionError(f"the array {name!r} has ONNX type {kind}, which is not supported")
    dtype = _ONNX_TYPES[kind]
    if data is None or not len(data[1]):
        flat = torch.zeros(0, dtype=dtype)
    elif data[0] in (5, 7):  # integers of any width, as varints in two's complement
        signed = [value - (value >> 63 << 64) for value in _varints(data[1])]
        flat = torch.tensor(signed).to(dtype)
    else:
        flat = _from_bytes(data[1], dtype)
    return name, flat.reshape(shape)


def _from_bytes(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A copy, so that the file can be closed. Both formats and this machine are little-endian."""
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _fields(view: memoryview) -> Iterator[tuple[int, Any]]:
    """(field number, integer or bytes) of a protocol buffer message."""
    at, end = 0, len(view)
    while at < end:
        key, at = _varint(view, at)
        wire = key & 7
        value: Any
        if wire == 0:
            value, at = _varint(view, at)
        elif wire == 2:
            size, at = _varint(view, at)
            value, at = view[at : at + size], at + size
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = view[at : at + size], at + size
        else:
            raise IndexError(f"wire type {wire} at byte {at}")
        if at > end:
            raise IndexError("it ends early")
        yield key >> 3, value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varints(view: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(view):
        value, at = _varint(view, at)
        found.append(value)
    return found


# ---- CTranslate2 ---------------------------------------------------------------------------

_CT2_TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16)


def read_ctranslate2(path: Path) -> dict[str, Tensor]:
    """Arrays of a CTranslate2 ``model.bin``, by name.

    The file is: version (u32), name of the model's class, its revision (u32), number of
    arrays (u32), then for each its name, rank (u8), sizes (u32 each), type (u8), bytes (u32)
    and data. A name is its length with the closing zero (u16), then its bytes.

    Raises:
        OptionError: it is no such file.
    """
    data = memoryview(path.read_bytes())
    at = 0

    def take(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{code}", data, at)
        at += struct.calcsize(f"<{code}")
        return int(value)

    def text() -> str:
        nonlocal at
        size = take("H")
        at += size
        return str(data[at - size : at - 1], "utf-8")

    arrays = {}
    try:
        take("I"), text(), take("I")
        for _ in range(take("I")):
            name = text()
            shape = [take("I") for _ in range(take("B"))]
            dtype = _CT2_TYPES[take("B")]
            size = take("I")
            arrays[name] = _from_bytes(data[at : at + size], dtype).reshape(shape)
            at += size
    except (struct.error, IndexError, ValueError, RuntimeError) as error:
        raise OptionError(f"{path} is no CTranslate2 model: {error}") from error
    return arrays
