"""Tensors on the wire: every dtype, shape, layout and flavour, and only the bytes they use."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.errors import SerializationError
from telegrad.wire import codec, gradient_tracking, tensors
from telegrad.wire.frames import MAX_BUFFERS
from tests.wire.travel import assert_same, trip, weight

DTYPES = [dtype for dtype in tensors.DTYPES if dtype is not None]
OVERHEAD = 300  # bytes that a message may have beyond those of its tensor

complex_half = pytest.mark.filterwarnings(
    "ignore:B?Complex(Half|32) support is experimental:UserWarning"
)
sparse_beta = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state:UserWarning"
)
quantized_deprecated = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel"
)
typed_storage = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


def of_dtype(dtype: torch.dtype) -> Tensor:
    """A 4 x 6 tensor with as many bit patterns as fit."""
    count = 24 * dtype.itemsize
    pattern = torch.arange(count, dtype=torch.uint8)
    return (pattern % 2 if dtype is torch.bool else pattern * 37).view(dtype).view(4, 6)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "flat": lambda t: t.view(-1),
    "scalar": lambda t: t[1, 2],
    "empty": lambda t: t[:0],
    "row": lambda t: t[1],
    "rows": lambda t: t[1:3],
    "column": lambda t: t[:, 1],
    "columns": lambda t: t[:, 1:3],
    "every other": lambda t: t[::2, ::3],
    "transposed": lambda t: t.t(),
    "permuted": lambda t: t.view(2, 3, 2, 2).permute(2, 0, 3, 1),
    "channels last": lambda t: t.view(1, 2, 3, 4).permute(0, 3, 1, 2),
    "expanded": lambda t: t[:1].expand(5, 6),
    "expanded scalar": lambda t: t[0, 0].expand(3, 4),
    "expanded in front": lambda t: t.expand(3, 4, 6),
    "expanded and transposed": lambda t: t.t().expand(3, 6, 4),
    "expanded with gaps": lambda t: t[:, ::2].expand(3, 4, 3),
    "one of size one, strides odd": lambda t: t.as_strided((1, 4, 3), (0, 6, 2)),
    "windows": lambda t: t.view(-1).unfold(0, 5, 2),
    "diagonal": lambda t: t.diagonal(),
    "with an offset": lambda t: t.view(-1)[5:].view(-1),
}


@complex_half
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_view(dtype: torch.dtype) -> None:
    whole = of_dtype(dtype)
    for name, view in VIEWS.items():
        sent = view(whole)
        try:
            received = trip(sent)
        except Exception as error:
            pytest.fail(f"{dtype} {name}: {type(error).__name__}: {error}")
        assert_same(received, sent)
        assert not received._is_view(), name


def test_the_list_of_dtypes_is_all_that_torch_has() -> None:
    has = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    assert has - quantized - set(DTYPES) == set()


def strides_that_matter(tensor: Tensor) -> list[tuple[int, int]]:
    return [
        (size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]


@pytest.mark.parametrize("name", [name for name in VIEWS if name not in ("column", "diagonal")])
def test_a_dense_tensor_keeps_its_strides(name: str) -> None:
    sent = VIEWS[name](torch.arange(24.0).view(4, 6))
    assert strides_that_matter(trip(sent)) == strides_that_matter(sent)


def test_a_view_of_a_small_part_arrives_contiguous() -> None:
    sent = torch.arange(10_000.0).view(100, 100)[:, 7]
    received = trip(sent)
    assert_same(received, sent)
    assert received.is_contiguous()


def test_channels_last_stays_channels_last() -> None:
    sent = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert trip(sent).is_contiguous(memory_format=torch.channels_last)


def test_zero_dimensions_and_zero_elements() -> None:
    for sent in (
        torch.tensor(3.5),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.empty(0, 5).t(),
    ):
        assert_same(trip(sent), sent)


def test_not_a_number_and_infinity_keep_their_bits() -> None:
    sent = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    assert_same(trip(sent), sent)


shapes = st.lists(st.integers(0, 5), max_size=4)


@settings(deadline=None, max_examples=150)
@given(shapes, st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool]), st.data())
def test_any_view_arrives_equal(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    count = int(np.prod(shape, dtype=int))
    sent = (torch.arange(count) % 251).to(dtype).view(shape)
    for _ in range(data.draw(st.integers(0, 3))):
        if sent.dim() == 0:
            sent = sent.expand(data.draw(st.lists(st.integers(1, 3), max_size=2)))
            continue
        dim = data.draw(st.integers(0, sent.dim() - 1))
        match data.draw(
            st.sampled_from(["narrow", "step", "transpose", "expand", "select", "unfold"])
        ):
            case "narrow":
                start = data.draw(st.integers(0, sent.shape[dim]))
                sent = sent.narrow(dim, start, data.draw(st.integers(0, sent.shape[dim] - start)))
            case "step":
                sent = sent.movedim(dim, 0)[:: data.draw(st.integers(1, 3))].movedim(0, dim)
            case "transpose":
                sent = sent.transpose(dim, data.draw(st.integers(0, sent.dim() - 1)))
            case "expand":
                sent = sent.unsqueeze(dim).expand(
                    *sent.shape[:dim], data.draw(st.integers(1, 3)), *sent.shape[dim:]
                )
            case "select" if sent.shape[dim]:
                sent = sent.select(dim, data.draw(st.integers(0, sent.shape[dim] - 1)))
            case "unfold" if sent.shape[dim]:
                sent = sent.unfold(
                    dim, data.draw(st.integers(1, sent.shape[dim])), data.draw(st.integers(1, 3))
                )
    assert_same(trip(sent), sent)


# Only the bytes a tensor uses


@pytest.mark.parametrize(
    ("view", "used"),
    [
        (lambda t: t[500_000:500_010], 40),
        (lambda t: t[:1000].view(10, 100).t(), 4000),
        (lambda t: t.view(1000, 1000)[:, :10], 40_000),
        (lambda t: t.view(1000, 1000)[:, ::2], 2_000_000),
        (lambda t: t.view(1000, 1000)[::500, ::500], 16),
        (lambda t: t[:100].expand(10_000, 100), 400),
        (lambda t: t[7].expand(1000, 1000), 4),
        (lambda t: t[:100].view(10, 10).t().expand(5000, 10, 10), 400),
        (lambda t: t[:1000].unfold(0, 500, 1), 4000),
    ],
    ids=[
        "slice",
        "transposed",
        "columns",
        "half",
        "corners",
        "rows",
        "scalar",
        "transposed copies",
        "windows",
    ],
)
def test_only_the_bytes_that_a_view_uses_travel(
    view: Callable[[Tensor], Tensor], used: int
) -> None:
    sent = view(torch.zeros(1_000_000))
    assert used <= weight(sent) <= used + OVERHEAD


def test_a_tiny_tensor_is_a_tiny_message() -> None:
    assert weight((torch.ones(1),)) < 80


def test_large_tensors_leave_the_pickle_and_are_not_copied() -> None:
    sent = torch.zeros(100_000)
    body, [buffer] = codec.encode({"weights": sent})
    assert len(body) < OVERHEAD
    assert np.frombuffer(buffer, np.uint8).ctypes.data == sent.data_ptr()


def test_a_large_tensor_sits_on_the_memory_that_it_arrived_in() -> None:
    body, [buffer] = codec.encode(torch.arange(100_000.0))
    memory = bytearray(buffer)
    received = codec.decode(body, [memory])
    received[0] = -1.0
    assert memory[:4] == np.float32(-1.0).tobytes()


def test_more_large_tensors_than_a_frame_has_room_for() -> None:
    sent = [
        torch.full((codec.OUT_OF_BAND,), number % 100, dtype=torch.uint8)
        for number in range(MAX_BUFFERS + 10)
    ]
    body, buffers = codec.encode(sent)
    assert len(buffers) == MAX_BUFFERS
    received = codec.decode(body, [bytearray(buffer) for buffer in buffers])
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))


# The receiver's own


@pytest.mark.parametrize("size", [1, 10, 100_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str
)
def test_writing_to_a_received_tensor_changes_nothing_at_the_sender(
    size: int, dtype: torch.dtype
) -> None:
    sent = torch.zeros(size, dtype=dtype)
    received = trip(sent)
    received.fill_(1)
    assert not sent.any()
    sent.fill_(1)
    assert not trip(torch.zeros(size, dtype=dtype)).any()


def test_a_received_view_is_independent_of_the_memory_it_was_a_view_of() -> None:
    base = torch.zeros(4, 6)
    for name in ("row", "column", "columns", "transposed", "every other"):
        trip(VIEWS[name](base)).fill_(1)
    assert not base.any()


def test_a_received_tensor_can_be_resized_trained_and_turned_into_numpy() -> None:
    received = trip(torch.ones(100_000))
    received.resize_(10)
    assert received.numpy().sum() == 10
    weights = trip(torch.ones(3, requires_grad=True))
    weights.sum().backward()
    assert torch.equal(weights.grad, torch.ones(3))


def test_operations_in_place_on_a_received_tensor_and_on_views_of_it_are_recorded() -> None:
    """Torch refuses some of them on views."""
    weight = torch.ones(3, 3, requires_grad=True)
    received = trip(torch.ones(3, 3))
    received.t().add_(weight)
    received.mul_(2)
    received.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3, 3), 2.0))


# Flavours


def test_conjugated_and_negated_views_arrive_resolved_and_equal() -> None:
    base = torch.randn(4, 3, dtype=torch.complex64)
    for sent in (
        base.conj(),
        base.conj().t(),
        base.conj().imag,
        base.conj()[0],
        base.conj().imag[1, 1],
        base.imag,
    ):
        received = trip(sent)
        assert torch.equal(received, sent)
        assert not received.is_conj()
        assert not received.is_neg()


def test_requires_grad_travels_and_history_does_not() -> None:
    leaf = torch.randn(3, requires_grad=True)
    received, scaled = trip((leaf, leaf * 2))
    assert_same(received, leaf)
    assert scaled.requires_grad
    assert scaled.is_leaf
    assert torch.equal(scaled, leaf * 2)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_arrives_as_a_parameter(requires_grad: bool) -> None:
    sent = nn.Parameter(torch.randn(3, 4), requires_grad=requires_grad)
    assert_same(trip(sent), sent)


def test_attributes_of_tensors_and_parameters_travel() -> None:
    for sent in (
        torch.ones(3),
        torch.ones(3, requires_grad=True),
        nn.Parameter(torch.ones(3)),
        torch.ones(2, 3).t(),
    ):
        sent.tag = {"name": "bias", "scale": torch.tensor(0.5)}  # type: ignore[attr-defined]
        received = trip(sent)
        assert_same(received, sent)
        assert received.tag["name"] == "bias"
        assert received.tag["scale"] == 0.5


def test_a_buffer_of_a_module_arrives_as_one() -> None:
    received = trip(nn.Buffer(torch.ones(3), persistent=False))
    assert isinstance(received, nn.Buffer)
    assert received.persistent is False


def test_a_meta_tensor_is_a_shape_without_bytes() -> None:
    sent = torch.empty(1000, 2000, dtype=torch.bfloat16, device="meta", requires_grad=True).t()
    received = trip(sent)
    assert (
        received.is_meta,
        received.shape,
        received.stride(),
        received.dtype,
        received.requires_grad,
    ) == (
        True,
        sent.shape,
        sent.stride(),
        torch.bfloat16,
        True,
    )
    assert weight(sent) < OVERHEAD


def test_tensors_made_in_inference_mode_travel() -> None:
    with torch.inference_mode():
        sent = torch.arange(6.0).view(2, 3)
        assert torch.equal(trip(sent.t()), sent.t())
    assert torch.equal(trip(sent), sent)
    assert torch.equal(trip(sent.t()), sent.t())


def test_a_tensor_of_a_private_layout_arrives_dense() -> None:
    received = trip(torch.ones(3, 4).to_mkldnn())
    assert torch.equal(received, torch.ones(3, 4))


# Sharing inside one message


def test_a_tensor_that_is_sent_twice_arrives_as_one_object() -> None:
    for sent in (
        torch.ones(3),
        torch.ones(100_000),
        torch.ones(2, 3).t(),
        nn.Parameter(torch.ones(3)),
    ):
        first, second = trip((sent, {"again": sent}))
        assert first is second["again"]


def test_a_tensor_that_is_sent_twice_travels_once() -> None:
    sent = torch.ones(100_000)
    assert weight([sent, sent]) < weight(sent) + OVERHEAD


# Sparse


def coo(*, coalesced: bool) -> Tensor:
    indices = torch.tensor([[0, 2, 2], [1, 0, 0]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.tensor([1.0, 2.0, 3.0]), (3, 4), check_invariants=True
    )
    return sparse.coalesce() if coalesced else sparse


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo(coalesced: bool) -> None:
    sent = coo(coalesced=coalesced)
    received = trip(sent)
    assert received.layout is torch.sparse_coo
    assert received.is_coalesced() == coalesced
    assert torch.equal(received._indices(), sent._indices())
    assert torch.equal(received._values(), sent._values())
    assert received.shape == sent.shape


def test_sparse_coo_with_dense_dimensions_none_at_all_or_gradients() -> None:
    for sent in (
        torch.eye(6).view(3, 2, 6).to_sparse(1),
        torch.zeros(3, 4).to_sparse(),
        coo(coalesced=True),
    ):
        received = trip(sent)
        assert torch.equal(received.to_dense(), sent.to_dense())
        assert received.sparse_dim() == sent.sparse_dim()
    assert trip(coo(coalesced=True).requires_grad_()).requires_grad


@sparse_beta
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_compressed_sparse(layout: str, dtype: torch.dtype) -> None:
    dense = torch.tensor([[1, 0, 0, 2], [0, 0, 3, 0]], dtype=dtype)
    sent = getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout.startswith("b") else []))
    received = trip(sent)
    assert received.layout is sent.layout is getattr(torch, f"sparse_{layout}")
    assert received.dtype is dtype
    assert torch.equal(received.values(), sent.values())
    assert torch.equal(received.to_dense(), dense)


@sparse_beta
def test_compressed_sparse_keeps_small_indices_and_gradients() -> None:
    rows, columns = (
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
    )
    sent = torch.sparse_csr_tensor(
        rows, columns, torch.ones(2), (2, 2), check_invariants=True
    ).requires_grad_()
    received = trip(sent)
    assert received.crow_indices().dtype is torch.int32
    assert received.requires_grad


def test_a_sparse_tensor_weighs_as_much_as_its_values() -> None:
    indices = torch.tensor([[5], [7]])
    sent = torch.sparse_coo_tensor(
        indices, torch.ones(1), (100_000, 100_000), check_invariants=True
    )
    assert weight(sent) < 2 * OVERHEAD


# Quantized


@quantized_deprecated
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_quantized_per_tensor(dtype: torch.dtype) -> None:
    sent = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, dtype)
    for view in (sent, sent[1:], sent.t()):
        received = trip(view)
        assert received.dtype is dtype
        assert (received.q_scale(), received.q_zero_point()) == (0.1, 3)
        assert torch.equal(received.int_repr(), view.int_repr())


@quantized_deprecated
@pytest.mark.parametrize(
    "zeros", [torch.tensor([0, 1, 2]), torch.tensor([0.5, 1.0, 2.0])], ids=["whole", "fractions"]
)
def test_quantized_per_channel(zeros: Tensor) -> None:
    sent = torch.quantize_per_channel(
        torch.randn(3, 4), torch.tensor([0.1, 0.2, 0.3]), zeros, 0, torch.quint8
    )
    received = trip(sent)
    assert received.qscheme() == sent.qscheme()
    assert received.q_per_channel_axis() == 0
    assert torch.equal(received.q_per_channel_scales(), sent.q_per_channel_scales())
    assert torch.equal(received.q_per_channel_zero_points(), sent.q_per_channel_zero_points())
    assert torch.equal(received.int_repr(), sent.int_repr())


@quantized_deprecated
@typed_storage
def test_quantized_to_half_a_byte() -> None:
    sent = torch.quantize_per_channel(
        torch.randn(3, 4), torch.ones(3), torch.zeros(3), 0, torch.quint4x2
    )
    assert torch.equal(trip(sent).dequantize(), sent.dequantize())


# Subclasses


class Tagged(Tensor):
    """A subclass with an attribute, as users write them."""

    tag: str


def test_a_tensor_subclass_keeps_its_type_and_attributes() -> None:
    sent = torch.arange(6.0).view(2, 3).as_subclass(Tagged)
    sent.tag = "loss"
    received = trip(sent)
    assert_same(received, sent)
    assert received.tag == "loss"


def test_a_view_of_a_tensor_subclass_sends_only_the_bytes_that_it_uses() -> None:
    sent = torch.zeros(1_000_000).as_subclass(Tagged)[:10]
    assert weight(sent) < 40 + 3 * OVERHEAD


class Wrapper(Tensor):
    """A subclass that holds its data in an attribute and pickles itself."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.held = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        raise NotImplementedError(f"{func} on a wrapper")

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[Tensor]]:
        return Wrapper, (self.held,)


def test_a_subclass_that_pickles_itself_is_left_to_do_so() -> None:
    received = trip(Wrapper(torch.arange(3.0)))
    assert type(received) is Wrapper
    assert torch.equal(received.held, torch.arange(3.0))


def test_no_warning_is_raised_for_a_plain_tensor() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (0, 1, 100_000):
            trip(torch.ones(size))


class Labelled(Tensor):
    """A subclass that is pickled like `Tensor`."""


class LabelledParameter(nn.Parameter):
    """A subclass that is pickled like `nn.Parameter`."""


class Own(Tensor):
    """A subclass with a reducer of its own."""

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _make_own, (self.tolist(),)


def _make_own(values: list[float]) -> Tensor:
    return torch.tensor(values).as_subclass(Own)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by make_dual
@pytest.mark.parametrize(
    "sent",
    [
        torch.ones(2),
        nn.Parameter(torch.ones(2)),
        LabelledParameter(torch.ones(2)),
        torch.ones(2).as_subclass(Labelled),
        torch.ones(2).as_subclass(Own),
    ],
    ids=lambda tensor: type(tensor).__name__,
)
def test_only_tensors_with_a_tangent_are_refused(sent: Tensor) -> None:
    with forward_ad.dual_level():  # type: ignore[no-untyped-call]
        received = trip(sent)
        dual = forward_ad.make_dual(sent, torch.ones(2))  # type: ignore[no-untyped-call]
        with pytest.raises(SerializationError, match="forward-mode tangent"):
            codec.encode(dual)
    assert type(received) is type(sent)
    assert received.tolist() == [1, 1]
    assert received.requires_grad == sent.requires_grad


def test_a_jagged_tensor() -> None:
    sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    assert [part.tolist() for part in trip(sent).unbind()] == [[1, 1], [0, 0, 0]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("parts", [[torch.ones(2, 3), torch.zeros(4, 3)], [torch.tensor(7)], []])
@pytest.mark.parametrize("is_many", [False, True])
def test_a_strided_nested_tensor(parts: list[Tensor], is_many: bool) -> None:
    sent = torch.nested.nested_tensor(parts, layout=torch.strided)
    assert codec.encode_small(sent) is None
    received = trip([sent] * 20)[-1] if is_many else trip(sent)
    assert (received.is_nested, received.layout, received.dtype) == (True, sent.layout, sent.dtype)
    assert [part.tolist() for part in received.unbind()] == [part.tolist() for part in parts]
    assert not received.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_strided_nested_tensors_keep_what_tensors_have() -> None:
    plain = torch.nested.nested_tensor([torch.arange(6.0).view(2, 3), torch.ones(1, 3)])
    assert [part.shape for part in trip(plain.transpose(1, 2)).unbind()] == [(3, 2), (3, 1)]
    tagged = plain.clone()
    tagged.tag = "mine"  # type: ignore[attr-defined]
    assert trip(tagged).tag == "mine"
    leaf = plain.clone().requires_grad_()
    assert (trip(leaf).is_leaf, trip(leaf).requires_grad) == (True, True)
    parameter = trip([nn.Parameter(plain)] * 20)[0]
    assert (type(parameter), parameter.requires_grad) == (nn.Parameter, True)
    assert torch.equal(parameter.detach().unbind()[0], plain.unbind()[0])


def test_without_autograd_contexts_gradients_stop_at_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_tracking._Hook, "tracker", None)
    sent = torch.ones(2, requires_grad=True)
    received = trip(sent * 2)
    assert (received.is_leaf, received.requires_grad) == (True, True)
    many = trip([torch.full((2,), float(n), requires_grad=True) for n in range(40)])
    assert all(each.is_leaf and each.requires_grad for each in many)
    assert [each[0].item() for each in many] == list(range(40))
