"""Deltas restore every bit pattern of every dtype, and are small where little has changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from telegrad.errors import ProtocolError, UsageError
from telegrad.weights import deltas, integers
from telegrad.weights.deltas import Part, Section
from telegrad.weights.layout import Layout, tensors_of

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
# NaN payloads, negative zeros, infinities and denormals of float32, bfloat16 and float16
SPECIAL = np.array(
    [
        0x7FC01234,
        0xFFC00001,
        0x7F800001,
        0x80000000,
        0x00000001,
        0x807FFFFF,
        0x7F800000,
        0x7C01FC01,
    ],
    np.uint32,
)
Kind = tuple[torch.dtype, tuple[int, ...], str]


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of the values in the order of their indices."""
    if not tensor.numel():
        return b""
    flat = tensor.clone(memory_format=torch.contiguous_format).as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def random_bytes(rng: np.random.Generator, kind: Kind) -> npt.NDArray[np.uint8]:
    """Return random bit patterns for a tensor, a quarter of them special."""
    dtype, shape, _ = kind
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    if dtype == torch.bool:
        return rng.integers(0, 2, count, dtype=np.uint8)
    values = rng.integers(0, 256, count, dtype=np.uint8)
    words = values[: count // 4 * 4].view(np.uint32)
    words[::4] = rng.choice(SPECIAL, words[::4].size)
    return values


def changed_bytes(
    rng: np.random.Generator, values: npt.NDArray[np.uint8], share: float, largest: int
) -> npt.NDArray[np.uint8]:
    """Return a copy of which a share of the bytes is changed, by at most `largest`."""
    steps = rng.integers(1, largest + 1, values.size, dtype=np.uint8)
    hit = rng.random(values.size) < share
    return values + steps * hit.astype(np.uint8)


def make_tensor(values: npt.NDArray[np.uint8], kind: Kind) -> Tensor:
    """Return a tensor with these bytes, in some order in memory."""
    dtype, shape, order = kind
    if not values.size:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:
        values = values % 2
    tensor = torch.from_numpy(values.copy()).view(dtype).reshape(shape)
    if order == "strided" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    if order == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if order == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def image_of(layout: Layout, tensors: dict[str, Tensor]) -> Tensor:
    image = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write(tensors, image)
    return image


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_tensor_is_restored_to_the_bit() -> None:
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    orders = st.sampled_from(["contiguous", "strided", "transposed", "channels_last"])
    tensor = st.tuples(st.sampled_from(DTYPES), shapes, orders)

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(tensor, max_size=6),
        st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        st.sampled_from([1, 255]),
        st.integers(0, 2**32),
    )
    def check(kinds: list[Kind], share: float, largest: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        old, new = {}, {}
        for index, kind in enumerate(kinds):
            values = random_bytes(rng, kind)
            old[f"t{index}"] = make_tensor(values, kind)
            new[f"t{index}"] = make_tensor(changed_bytes(rng, values, share, largest), kind)
        layout = Layout.of(old)
        assert Layout.of(new) == layout
        before, after = image_of(layout, old), image_of(layout, new)
        out = torch.full_like(before, 170)
        for part in deltas.encode(deltas.compare(before, after, layout.sections)):
            deltas.apply(part, before, out)
        assert torch.equal(out, after)
        for name, restored in layout.tensors(out).items():
            assert restored.shape == new[name].shape
            assert restored.dtype == new[name].dtype
            assert bits(restored) == bits(new[name])

    check()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.02, 0.13, 0.6, 1.0])
@pytest.mark.parametrize("largest", [1, 300, 2**63])
def test_all_ways_to_code_a_chunk(width: int, share: float, largest: int) -> None:
    rng = np.random.default_rng(7)
    count = (deltas.CHUNK // 4 + 4096) // width
    old = rng.integers(0, 2**63, count, dtype=np.uint64).astype(f"<u{width}")
    steps = rng.integers(-largest, largest, count, dtype=np.int64).astype(f"<u{width}")
    new = old + steps * (rng.random(count) < share).astype(f"<u{width}")
    before = torch.from_numpy(old.view(np.uint8))
    after = torch.from_numpy(new.view(np.uint8))
    sections = [Section(0, before.numel(), width)]
    parts = list(deltas.encode(deltas.compare(before, after, sections)))
    out = before.clone()
    for part in parts:
        deltas.apply(part, out, out)  # in place
    assert torch.equal(out, after)
    assert sum(part.changed for part in parts) == int((old != new).sum())
    # never much more than a snapshot
    assert sum(part.nbytes for part in parts) <= before.numel() + 100


def test_parts_cover_images_of_many_chunks() -> None:
    rng = np.random.default_rng(1)
    size = 5 * deltas.CHUNK + 640
    old = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    new = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    sections = [Section(0, 2 * deltas.CHUNK + 64, 4), Section(2 * deltas.CHUNK + 64, size, 2)]
    parts = list(deltas.encode(deltas.compare(old, new, sections)))
    assert len(parts) > 3
    out = torch.empty_like(old)
    for part in reversed(parts):  # they do not depend on each other
        deltas.apply(part, old, out)
    assert torch.equal(out, new)
    copied = torch.empty_like(old)
    for section in deltas.snapshot_parts(new):
        deltas.apply(deltas.snapshot_part(new, section), copied, copied)
    assert torch.equal(copied, new)


def test_few_small_changes_of_bfloat16_become_one_hundredth() -> None:
    rng = np.random.default_rng(2)
    old = rng.standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    hit = rng.random(old.size) < 0.01
    new = old + np.where(hit, rng.choice([1, -1], old.size), 0).astype(np.uint16)
    before, after = (torch.from_numpy(each.view(np.uint8)) for each in (old, new))
    parts = list(deltas.encode(deltas.compare(before, after, [Section(0, before.numel(), 2)])))
    assert sum(part.nbytes for part in parts) < before.numel() / 150


def test_another_base_is_noticed() -> None:
    old = torch.arange(256, dtype=torch.uint8)
    new = old.clone()
    new[17] = 3
    (part,) = deltas.encode(deltas.compare(old, new, [Section(0, 256, 1)]))
    wrong = old.clone()
    wrong[200] = 1
    with pytest.raises(ProtocolError, match="checksum"):
        deltas.apply(part, wrong, wrong)


def test_damaged_parts_raise_an_error() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 256, 4096, dtype=np.uint8)
    old = torch.from_numpy(values)
    new = torch.from_numpy(changed_bytes(rng, values, 0.05, 3))
    (part,) = deltas.encode(deltas.compare(old, new, [Section(0, 4096, 2)]))

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, 2**31), st.integers(1, 255), st.booleans())
    def check(place: int, flip: int, in_table: bool) -> None:
        data = bytearray(part.table if in_table else part.payload.numpy().tobytes())
        data[place % len(data)] ^= flip
        if in_table:
            damaged = Part(bytes(data), part.payload, 0)
        else:
            damaged = part._replace(payload=torch.frombuffer(data, dtype=torch.uint8))
        out = old.clone()
        try:
            deltas.apply(damaged, old, out)
        except ProtocolError:
            return
        assert torch.equal(out, new)  # the damage was in a byte without meaning

    check()
    with pytest.raises(ProtocolError):
        deltas.apply(part._replace(table=part.table[:-1]), old, old.clone())


@pytest.mark.parametrize(
    ("kind", "bits", "places", "large", "count", "body"),
    [
        (1, 1, 1, 0, 2**32 - 1, b"\x03\x01"),  # more changes than elements
        (1, 1, 2, 0, 2, b"\xfe\xfe"),  # a position after the end
        (1, 255, 1, 0, 1, b"\x03\x01"),  # more bits than an element has
        (1, 8, 1, 0, 1, b"\x03\x01"),  # bits are missing
        (1, 0, 1, 2**31, 1, b"\x03\x01"),  # large numbers are missing
        (1, 0, 1, 1, 1, b"\x03\x09\x01"),  # a large number of an element that did not change
        (2, 0, 4, 0, 1, b"\x00" * 4),  # no bit is set
        (9, 0, 0, 0, 0, b""),
    ],
)
def test_records_that_are_not_valid_raise_an_error(
    kind: int, bits: int, places: int, large: int, count: int, body: bytes
) -> None:
    table = deltas._RECORD.pack(kind, 1, bits, places, large, count, 0, 64, len(body), 0)
    payload = torch.frombuffer(bytearray(body or b"0"), dtype=torch.uint8)[: len(body)]
    image = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ProtocolError):
        deltas.apply(Part(table, payload, 0), image, image)


def test_every_byte_counts_for_the_checksum() -> None:
    sections = [Section(0, 8256, 2)]
    old = torch.zeros(8256, dtype=torch.uint8)
    old[0] = 1
    (unchanged,) = deltas.encode(deltas.compare(old, old, sections))
    damaged = [old.clone() for _ in range(5)]
    for image, place in zip(damaged, (0, 5000, 8191, 8255), strict=False):
        image[place] += 1
    damaged[4][0] = 0
    damaged[4][4096] = 1  # another word of the same column
    damaged.append(torch.roll(old, 8))  # another word of the same row
    for image in damaged:
        with pytest.raises(ProtocolError, match="checksum"):
            deltas.apply(unchanged, image, image)


def test_large_numbers_are_packed_beside_small_ones() -> None:
    rng = np.random.default_rng(4)

    @settings(max_examples=100, deadline=None)
    @given(
        st.sampled_from([1, 2, 4, 8]),
        st.integers(1, 3000),
        st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        st.integers(0, 63),
    )
    def check(width: int, count: int, share: float, bits: int) -> None:
        small = rng.integers(0, 2, count, dtype=np.uint64)
        large = rng.integers(0, 2**63, count, dtype=np.uint64) >> np.uint64(bits)
        numbers = np.where(rng.random(count) < share, large, small).astype(f"<u{width}")
        packed = integers.pack(numbers)
        assert np.array_equal(integers.unpack(packed, count, width), numbers)
        assert packed.body.size <= count * width + 8 * width

    check()


@pytest.mark.parametrize("size", [0, 7, 64, 4096, 65_544, 524_288])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.002, 0.01, 0.05, 0.2, 1.0])
def test_positions_of_any_share_are_found(size: int, share: float) -> None:
    is_set = np.random.default_rng(size).random(size) < share
    assert integers.positions_of(is_set).tolist() == np.flatnonzero(is_set).tolist()


def test_tied_tensors_are_stored_once() -> None:
    weight = torch.randn(4, 4)
    tensors = {"a": weight, "b": weight, "c": weight.T, "d": torch.ones(3, dtype=torch.int64)}
    layout = Layout.of(tensors)
    assert layout.nbytes == 64 + 64 + 64
    assert layout.entries["a"] == layout.entries["b"]
    restored = layout.tensors(image_of(layout, tensors))
    assert restored["a"] is restored["b"]
    assert list(restored) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(restored[name], tensor)
    assert [section.width for section in layout.sections] == [8, 4]


def test_meta_tensors_and_empty_ones_have_no_bytes() -> None:
    tensors = {"m": torch.empty(7, device="meta"), "e": torch.empty(0, 3)}
    layout = Layout.of(tensors)
    assert layout.nbytes == 0
    restored = layout.tensors(image_of(layout, tensors))
    assert restored["m"].is_meta
    assert restored["e"].shape == (0, 3)


def test_modules_have_parameters_and_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert list(tensors_of(model)) == list(model.state_dict())
    with pytest.raises(UsageError, match="'b' is of the type int"):
        tensors_of({"a": torch.ones(1), "b": 3})  # type: ignore[dict-item]


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'s' is a torch\.sparse_coo tensor"):
        Layout.of({"s": torch.ones(2, 2).to_sparse()})
