"""Images of device memory: copied in parts while others are sent or received. Here the memory of
the device is that of a CPU tensor; `tests/gpu` runs the same code with CUDA tensors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch

from telegrad.cuda.staging import StagedMemory
from telegrad.transport import host_image, stripes
from telegrad.transport.host_image import PART, HostImage, find_image, image_for, image_of
from telegrad.wire import codec
from telegrad.wire.frames import Kind, bulk_location
from tests.local.gates import until
from tests.transport.pairs import Background, Pair, connected
from tests.transport.test_bulk import LATE, Interceptor, random_bytes

SIZES = [PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 3, 13 * PART]


@pytest.fixture
def bulk(background: Background) -> Iterator[Pair]:
    """Two channels that pull large buffers from each other."""
    for pair in connected("tcp+bulk"):
        yield pair
        counters = pair.near_end.engine.counters
        until(lambda counters=counters: not counters()["bulk_registrations"])  # type: ignore[misc]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let CPU tensors be the memory of the receiving device; return the indices asked for."""
    indices: list[int] = []

    def allocate(nbytes: int, index: int) -> StagedMemory:
        indices.append(index)
        return StagedMemory(torch.zeros(nbytes, dtype=torch.uint8))

    monkeypatch.setattr(host_image._Hooks, "allocate", allocate)
    return indices


def staged(size: int, target: int | None = None) -> tuple[torch.Tensor, HostImage]:
    data = torch.from_numpy(random_bytes(size))
    return data, image_of(StagedMemory(data), size, target)


def received_tensor(buffer: memoryview) -> torch.Tensor:
    image = find_image(buffer)
    assert image is not None
    assert isinstance(image.device_memory, StagedMemory)
    return image.device_memory.bytes


def test_a_part_is_a_multiple_of_a_record() -> None:
    assert PART % stripes.RECORD == 0


def test_the_next_part_is_copied_while_one_is_sent() -> None:
    data, image = staged(4 * PART)
    before = data.clone()
    for number, part in enumerate(image.parts(0, 4 * PART)):
        start = number * PART
        assert bytes(part) == before[start : start + PART].numpy().tobytes()
        data[start : start + 2 * PART] = 0  # the next part has been copied already
        before[start + 2 * PART :] = 7
        data[start + 2 * PART :] = 7  # those after it have not


def test_a_part_is_copied_to_the_device_when_the_next_one_is_taken() -> None:
    target = torch.zeros(3 * PART, dtype=torch.uint8)
    spaces = StagedMemory(target).spaces(0, 3 * PART)
    for number in range(3):
        next(spaces)[:] = bytes([number + 1]) * PART
        assert [int(target[index * PART]) for index in range(3)] == [
            index + 1 if index < number else 0 for index in range(3)
        ]
    assert next(spaces, None) is None
    assert int(target[-1]) == 3


def test_two_copies_of_one_thread_at_the_same_time() -> None:
    (one, first), (other, second) = staged(3 * PART), staged(3 * PART, 1)
    pairs = zip(first.parts(0, 3 * PART), second.parts(0, 3 * PART), strict=True)
    copies = [(bytes(near), bytes(far)) for near, far in pairs]
    assert b"".join(near for near, _ in copies) == one.numpy().tobytes()
    assert b"".join(far for _, far in copies) == other.numpy().tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_device_to_device(bulk: Pair, background: Background, device: list[int], size: int) -> None:
    data, image = staged(size, target=3)
    receiving = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 1, b"", [memoryview(image)])
    (buffer,) = receiving.result(LATE).buffers
    assert torch.equal(received_tensor(buffer), data)
    assert device == [3]
    assert image.device_memory is not None  # it was not copied as a whole


def test_an_image_for_the_host_beside_other_buffers(
    bulk: Pair, background: Background, device: list[int]
) -> None:
    (to_host, first), (to_device, second) = staged(3 * PART), staged(PART, target=0)
    plain = random_bytes(2 * PART, seed=9)
    receiving = background(bulk.far.recv, LATE)
    buffers = [memoryview(each) for each in (first, plain, second, plain[:100])]
    bulk.near.send(Kind.CALL, 1, b"", buffers)
    received = receiving.result(LATE).buffers
    assert bytes(received[0]) == to_host.numpy().tobytes()
    assert bytes(received[1]) == plain.tobytes()
    assert torch.equal(received_tensor(received[2]), to_device)
    assert bytes(received[3]) == plain[:100].tobytes()


def test_a_device_without_memory(
    bulk: Pair, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int, index: int) -> StagedMemory:
        raise MemoryError("the device is full")

    monkeypatch.setattr(host_image._Hooks, "allocate", refuse)
    data, image = staged(3 * PART, target=0)
    receiving = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 1, b"", [memoryview(image)])
    (buffer,) = receiving.result(LATE).buffers
    assert bytes(buffer) == data.numpy().tobytes()


def test_stripes_that_break_in_the_middle_of_a_chunk(
    bulk: Pair, background: Background, device: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    interceptor = Interceptor(monkeypatch)
    monkeypatch.setattr(
        interceptor, "before", lambda count, stripe: stripe.shut() if count < 6 else None
    )
    data, image = staged(13 * PART, target=0)
    receiving = background(bulk.far.recv, LATE)
    bulk.near.send(Kind.CALL, 1, b"", [memoryview(image)])
    (buffer,) = receiving.result(LATE).buffers
    assert torch.equal(received_tensor(buffer), data)
    assert len(device) == 1


@pytest.mark.parametrize("kind", ["memory", "unix", "unix+shared", "tcp", "tcp+tls"])
def test_other_channels_send_the_bytes(kind: str, background: Background) -> None:
    for pair in connected(kind):
        data, image = staged(3 * PART + 1, target=0)
        receiving = background(pair.far.recv, LATE)
        sending = background(pair.near.send, Kind.CALL, 1, b"", [memoryview(image)])
        frame = receiving.result(LATE)
        assert bytes(frame.buffers[0]) == data.numpy().tobytes()
        sending.result(LATE)
        del frame


def test_a_value_with_more_buffers_than_a_frame_has(monkeypatch: pytest.MonkeyPatch) -> None:
    data, image = staged(PART)
    value = [pickle.PickleBuffer(random_bytes(1 << 16)), pickle.PickleBuffer(image)]
    body, buffers = codec._dump(codec._Pickler, value, max_buffers=1)
    assert len(buffers) == 1
    assert bytes(pickle.loads(body, buffers=buffers)[1]) == data.numpy().tobytes()


@pytest.mark.parametrize("device_index", [None, 0, 7, 65534])
def test_the_device_in_a_buffer_table(device_index: int | None) -> None:
    place = bulk_location(10, 1 << 60, 2000, device_index)
    assert (place.bulk_index, place.device) == (2000, device_index)
    assert 0 <= place.slot < 1 << 32


def test_parts_of_a_view_belong_to_the_image() -> None:
    image = image_for(PART, 0)
    assert find_image(memoryview(image)[5:].cast("B")) is image
    assert find_image(memoryview(bytearray(5))) is None


def test_an_image_is_ordinary_memory_once_it_was_copied() -> None:
    data, image = staged(PART + 7)
    for _ in range(2):  # the second time, there is nothing left to copy
        host_image.fill_images([memoryview(image)])
        assert image.device_memory is None
        assert memoryview(image) == memoryview(data.numpy())
    (part,) = image.parts(3, PART + 5)
    assert part == memoryview(data.numpy())[3 : PART + 5]


def test_without_an_allocator_bytes_arrive_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_image._Hooks, "allocate", None)
    image = image_for(4, 0)
    (space,) = image.spaces(0, 4)
    space[:] = b"abcd"
    assert bytes(image) == b"abcd"
    assert image.device_memory is None
