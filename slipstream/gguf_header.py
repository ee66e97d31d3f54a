"""Reads the header of a GGUF file: metadata and tensor shapes, in a moment, without its weights or a library.

The format (version 2 and 3, little-endian): magic, version, counts of tensors and of key-value pairs; then the pairs;
then name, shape, type and offset of every tensor.
"""

import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.target_files import model_error

_MAGIC = b"GGUF"
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LONGEST_TEXT = 1 << 27
_MOST_DIMENSIONS = 8


class ArrayLength(int):
    """Of an array, how many values it has; never to be taken for a value."""


class GgufHeader:
    """`values`: scalars and texts by key; of an array an ArrayLength, or its texts where they were asked for.

    `shapes`: of tensors, innermost first.
    """

    def __init__(self, values: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        self.values = values
        self.shapes = shapes


def read_gguf_header(path: Path, texts: Collection[str] = ()) -> GgufHeader:
    """Read it.

    Args:
        path: of the file.
        texts: keys of arrays whose texts are wanted, as lists.

    Raises:
        SlipstreamError: MODEL_INVALID, it is no GGUF file, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read(file, texts)
    except (OSError, ValueError, struct.error, KeyError, OverflowError) as error:
        raise model_error(
            f"{path} cannot be read as a GGUF file: {error}.", "Copy or download it again, or name another file."
        ) from error


def _read(file: BinaryIO, texts: Collection[str]) -> GgufHeader:
    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = _number(file, "<I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, 2 and 3 are known")
    tensors, pairs = _number(file, "<Q"), _number(file, "<Q")
    values = {}
    for _ in range(pairs):
        key = _text(file)
        values[key] = _value(file, _number(file, "<I"), wanted=key in texts)
    shapes = {}
    for _ in range(tensors):
        name = _text(file)
        dimensions = _number(file, "<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shapes[name] = tuple(_number(file, "<Q") for _ in range(dimensions))
        file.seek(12, 1)  # type and offset
    return GgufHeader(values, shapes)


def _value(file: BinaryIO, kind: int, *, wanted: bool) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _FORMATS[kind])
    # A list for every layer, say: its values are passed over.
    inner, length = _number(file, "<I"), _number(file, "<Q")
    if inner == _STRING and wanted:
        return [_text(file) for _ in range(length)]
    if inner == _STRING:
        for _ in range(length):
            file.seek(_number(file, "<Q"), 1)
    else:
        file.seek(length * struct.calcsize(_FORMATS[inner]), 1)
    return ArrayLength(length)


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    if length > _LONGEST_TEXT:
        raise ValueError(f"a text of {length} bytes")
    content = file.read(length)
    if len(content) != length:
        raise ValueError("it ends within its header")
    return content.decode()


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]
