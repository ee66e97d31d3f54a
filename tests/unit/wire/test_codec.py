"""Layout, write, view and checksum of payloads."""

import google_crc32c
import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import tensor_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.codec import DTYPES, PayloadLayout, check_spec, checksum, plan_layout, view_tensor, write_tensor


def every_dtype() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 100, (7, 5), generator=generator)
    return [(str(dtype), values.to(dtype)) for dtype in DTYPES.values()]


def written(tensors: list[tuple[str, torch.Tensor]]) -> tuple[PayloadLayout, np.ndarray]:
    layout = plan_layout([(name, tensor.dtype, tensor.shape) for name, tensor in tensors])
    buffer = np.zeros(layout.size_bytes, np.uint8)
    for spec, (_, tensor) in zip(layout.specs, tensors, strict=True):
        write_tensor(buffer, spec, tensor)
    return layout, buffer


def test_every_enum_value_has_a_dtype() -> None:
    assert set(DTYPES) == set(pb.DataType.values()) - {pb.DATA_TYPE_UNSPECIFIED}


def test_round_trip_of_every_dtype() -> None:
    tensors = every_dtype()
    layout, buffer = written(tensors)
    assert layout.size_bytes == 64 * 2 + 64 * 2 + 192 + 64 + 192 + 320 + 64  # 35 elements each, rounded up to 64
    for spec, (name, tensor) in zip(layout.specs, tensors, strict=True):
        assert spec.name == name and spec.offset_bytes % 64 == 0 and spec.size_bytes == tensor.nbytes
        assert torch.equal(view_tensor(buffer, spec).view(torch.uint8), tensor.view(torch.uint8))


def test_wire_bytes_are_little_endian_and_row_major() -> None:
    layout, buffer = written([("a", torch.tensor([[1, 2], [3, 258]], dtype=torch.int32))])
    assert buffer[: layout.specs[0].size_bytes].tobytes() == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 2, 1, 0, 0])


def test_writes_strided_tensors() -> None:
    matrix = torch.arange(12, dtype=torch.float32).view(3, 4)
    layout, buffer = written([("t", matrix.t())])
    assert torch.equal(view_tensor(buffer, layout.specs[0]), matrix.t())


def test_view_shares_memory_and_honours_base_offset() -> None:
    layout, buffer = written([("a", torch.zeros(3)), ("b", torch.ones(2, 2))])
    tail = buffer[layout.specs[1].offset_bytes :]
    view = view_tensor(tail, layout.specs[1], base_offset=layout.specs[1].offset_bytes)
    view[1, 1] = 5.0
    assert view_tensor(buffer, layout.specs[1]).tolist() == [[1.0, 1.0], [1.0, 5.0]]


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    layout, buffer = written([("before", torch.ones(1)), ("x", torch.full(shape, 3.0)), ("after", torch.ones(1))])
    assert torch.equal(view_tensor(buffer, layout.specs[1]), torch.full(shape, 3.0))
    assert view_tensor(buffer, layout.specs[2]).item() == 1.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"size_bytes": 12}, "has 12 bytes, not 16"),
        ({"shape": [5]}, "has 16 bytes, not 20"),
        ({"shape": [-2, -2]}, "has 16 bytes"),
        ({"offset_bytes": 4}, "multiple of 64"),
        ({"offset_bytes": -64}, "multiple of 64"),
        ({"offset_bytes": 64}, "bytes at hand are 0..64"),
        ({"data_type": 0}, "does not know"),
        ({"data_type": 99}, "does not know"),
    ],
)
def test_misshapen_entries_are_refused(change: dict[str, object], says: str) -> None:
    fields = {"name": "x", "data_type": pb.DATA_TYPE_FLOAT32, "shape": [4], "offset_bytes": 0, "size_bytes": 16}
    with pytest.raises(SlipstreamError, match=says) as caught:
        view_tensor(np.zeros(64, np.uint8), pb.TensorSpec(**{**fields, **change}))
    assert caught.value.reason is Reason.PAYLOAD_CORRUPT


def test_short_payload_is_refused() -> None:
    layout, buffer = written([("x", torch.ones(16))])
    check_spec(layout.specs[0])
    with pytest.raises(SlipstreamError, match=r"bytes 0\.\.64, but the bytes at hand are 0\.\.63"):
        view_tensor(buffer[:63], layout.specs[0])


def test_checksum_is_crc32c() -> None:
    assert checksum(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283  # the check value of CRC-32C
    data = np.arange(1000, dtype=np.uint8)
    assert checksum(data[10:500]) == google_crc32c.value(data[10:500].tobytes())
