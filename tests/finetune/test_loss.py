"""The loss in chunks of tokens equals cross-entropy of full logits, with less memory."""

import pytest
import torch
from tensor_bytes import TensorBytes
from torch import nn
from torch.nn import functional as F

from cab_hf.finetune.loss import IGNORED_LABEL, linear_cross_entropy

VOCABULARY, CHANNELS = 51, 24
# by name of the tokens with labels: slice of the tokens without labels
LABELS = {"all": slice(0, 0), "some": slice(3, 20), "none in the first chunk": slice(0, 9)}
LABELS |= {"one": slice(0, -1), "none": slice(None)}


def make_inputs(batch=2, length=37, ignored=slice(0, 0), dtype=torch.float64, seed=0):
    """Return random hidden [B, N, D], weight [V, D] and labels [B, N].

    Tokens in the range ``ignored`` have no label.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, CHANNELS, generator=generator, dtype=dtype)
    weight = torch.randn(VOCABULARY, CHANNELS, generator=generator, dtype=dtype)
    labels = torch.randint(VOCABULARY, (batch, length), generator=generator)
    labels.view(-1)[ignored] = IGNORED_LABEL
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def compute_loss_by_torch(hidden, weight, labels):
    """Return the summed cross-entropy of full logits."""
    logits = (hidden @ weight.T).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def gradients(total, *tensors):
    """Return the gradients of ``total / 7``, so that the gradient of the loss is 1/7 and not 1."""
    return torch.autograd.grad(total / 7, tensors)


@pytest.mark.parametrize("ignored", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("chunk", [1, 8, 1000, None])
def test_loss_equals_torch_cross_entropy(ignored, chunk):
    hidden, weight, labels = make_inputs(ignored=ignored)
    total = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    expected = compute_loss_by_torch(hidden, weight, labels)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    actual = gradients(total, hidden, weight)
    torch.testing.assert_close(actual, gradients(expected, hidden, weight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 111), (3, 63), (1, 205)])
def test_float32_error_is_below_1e_6_at_any_length(batch, length):
    hidden, weight, labels = make_inputs(batch, length, dtype=torch.float32)
    total = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16)
    actual = total, *gradients(total, hidden, weight)
    hidden_64, weight_64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    total_64 = compute_loss_by_torch(hidden_64, weight_64, labels)
    expected = total_64, *gradients(total_64, hidden_64, weight_64)
    for ours, exact in zip(actual, expected, strict=True):
        assert (ours - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_ignored_positions_may_be_nan():
    hidden, weight, labels = make_inputs(ignored=slice(5, 12))
    hidden_with_nan = hidden.detach().clone()
    hidden_with_nan.view(-1, CHANNELS)[5:12] = torch.nan
    hidden_with_nan.requires_grad_()
    actual = gradients(
        linear_cross_entropy(hidden_with_nan, weight, labels), hidden_with_nan, weight
    )
    expected = gradients(linear_cross_entropy(hidden, weight, labels), hidden, weight)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype", "autocast_dtype"),
    [
        *((torch.bfloat16, torch.bfloat16, False), (torch.bfloat16, torch.float32, False)),
        *((torch.float32, torch.bfloat16, False), (torch.float32, torch.float32, True)),
    ],
    ids=["bfloat16", "head trained in float32", "hidden in float32", "autocast"],
)
def test_products_use_low_precision_and_sums_float32(hidden_dtype, weight_dtype, autocast_dtype):
    hidden, weight, labels = make_inputs(1, 300, dtype=torch.float32)
    hidden, weight = (
        x.detach().to(torch.bfloat16).to(dtype).requires_grad_()
        for x, dtype in ((hidden, hidden_dtype), (weight, weight_dtype))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast_dtype):
        total = linear_cross_entropy(hidden, weight, labels, chunk_tokens=64)
    logits = (hidden.to(torch.bfloat16) @ weight.to(torch.bfloat16).T).float()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    exact = gradients(
        compute_loss_by_torch(hidden.double(), weight.double(), labels), hidden, weight
    )
    for ours, expected, tensor in zip(
        gradients(total, hidden, weight), exact, (hidden, weight), strict=True
    ):
        assert ours.dtype == tensor.dtype
        assert (ours - expected).abs().max() <= 0.02 * expected.abs().max()


def test_frozen_inputs_get_no_gradient():
    hidden, weight, labels = make_inputs()
    frozen = weight.detach()
    total = linear_cross_entropy(hidden, frozen, labels)
    expected = gradients(compute_loss_by_torch(hidden, frozen, labels), hidden)
    torch.testing.assert_close(gradients(total, hidden), expected)
    with torch.no_grad():
        without_grad = linear_cross_entropy(hidden, weight, labels)
    assert not without_grad.requires_grad and without_grad == total


@pytest.mark.parametrize("trained", [False, True], ids=["head frozen", "head trained"])
def test_largest_tensor_is_one_chunk_of_logits(trained):
    hidden, weight, labels = make_inputs(1, 640, dtype=torch.float32)
    weight.requires_grad_(trained)
    # full logits, 640 x 51, would be larger than all other tensors
    with TensorBytes(hidden, weight) as tensor_bytes:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=32).backward()
    assert hidden.grad.abs().sum() > 0
    assert tensor_bytes.largest == 4 * max(hidden.numel(), 32 * VOCABULARY) == 4 * 640 * CHANNELS


class Head(nn.Module):
    """A linear layer and a language-model head, whose forward pass returns the loss of labels.

    The weight of the head is trained if ``is_head_trained`` is True, and frozen otherwise.
    """

    def __init__(self, is_head_trained):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(CHANNELS, CHANNELS)
        self.head = nn.Linear(CHANNELS, VOCABULARY, bias=False).requires_grad_(is_head_trained)

    def forward(self, hidden, labels):
        return linear_cross_entropy(self.layer(hidden), self.head.weight, labels)


@pytest.mark.parametrize("is_head_trained", [False, True], ids=["head frozen", "head trained"])
@pytest.mark.parametrize("ignored_indices", [LABELS["some"], LABELS["none"]], ids=["some", "none"])
def test_ddp_reduces_all_gradients(single_process_group, is_head_trained, ignored_indices):
    hidden, _, labels = make_inputs(ignored=ignored_indices, dtype=torch.float32)
    reference_head, ddp_head = (
        Head(is_head_trained),
        nn.parallel.DistributedDataParallel(Head(is_head_trained)),
    )
    # two passes, because DDP reports a parameter without gradient in the second pass only
    for _ in range(2):
        ddp_head(hidden, labels).backward()
        reference_head(hidden, labels).backward()
    for parameter, expected in zip(
        ddp_head.module.parameters(), reference_head.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("label", [51, -1])
def test_labels_outside_of_vocabulary_raise(label):
    hidden, weight, _ = make_inputs()
    with pytest.raises(ValueError, match=f"labels must be from 0 to 50, .*, got {label}"):
        linear_cross_entropy(hidden, weight, torch.full((2, 37), label))
