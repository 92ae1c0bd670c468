"""The loss in chunks of tokens equals cross-entropy of full logits, with less memory."""

import pytest
import torch
from tensor_bytes import TensorBytes
from torch import nn
from torch.nn import functional as F

from cab_hf.finetune.loss import IGNORED_LABEL, linear_cross_entropy

VOCABULARY_SIZE, HIDDEN_SIZE = 51, 24
# by name of the tokens with labels: slice of the tokens without labels
IGNORED_SLICES = {"all": slice(0, 0), "some": slice(3, 20), "none in the first chunk": slice(0, 9)}
IGNORED_SLICES |= {"one": slice(0, -1), "none": slice(None)}


def make_inputs(num_rows=2, num_tokens=37, ignored_slice=slice(0, 0), dtype=torch.float64, seed=0):
    """Return random hidden [B, N, D], weight [V, D] and labels [B, N].

    Tokens in the range ``ignored_slice`` have no label.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, num_tokens, HIDDEN_SIZE, generator=generator, dtype=dtype)
    weight = torch.randn(VOCABULARY_SIZE, HIDDEN_SIZE, generator=generator, dtype=dtype)
    labels = torch.randint(VOCABULARY_SIZE, (num_rows, num_tokens), generator=generator)
    labels.view(-1)[ignored_slice] = IGNORED_LABEL
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def compute_loss_by_torch(hidden, weight, labels):
    """Return the summed cross-entropy of full logits."""
    logits = (hidden @ weight.T).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def compute_gradients(total_loss, *tensors):
    """Return the gradients of ``total_loss / 7``: the gradient of the loss is 1/7 and not 1."""
    return torch.autograd.grad(total_loss / 7, tensors)


@pytest.mark.parametrize("ignored_slice", IGNORED_SLICES.values(), ids=IGNORED_SLICES)
@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000, None])
def test_loss_equals_torch_cross_entropy(ignored_slice, chunk_tokens):
    hidden, weight, labels = make_inputs(ignored_slice=ignored_slice)
    total_loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    expected_loss = compute_loss_by_torch(hidden, weight, labels)
    torch.testing.assert_close(total_loss, expected_loss, rtol=1e-12, atol=1e-12)
    actual_gradients = compute_gradients(total_loss, hidden, weight)
    torch.testing.assert_close(
        actual_gradients, compute_gradients(expected_loss, hidden, weight), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (1, 111), (3, 63), (1, 205)])
def test_float32_error_is_below_1e_6_at_any_length(num_rows, num_tokens):
    hidden, weight, labels = make_inputs(num_rows, num_tokens, dtype=torch.float32)
    total_loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16)
    float32_results = total_loss, *compute_gradients(total_loss, hidden, weight)
    hidden_64, weight_64 = (
        tensor.detach().double().requires_grad_() for tensor in (hidden, weight)
    )
    total_loss_64 = compute_loss_by_torch(hidden_64, weight_64, labels)
    float64_results = total_loss_64, *compute_gradients(total_loss_64, hidden_64, weight_64)
    for float32_result, float64_result in zip(float32_results, float64_results, strict=True):
        assert (float32_result - float64_result).abs().max() <= 1e-6 * float64_result.abs().max()


def test_ignored_positions_may_be_nan():
    hidden, weight, labels = make_inputs(ignored_slice=slice(5, 12))
    hidden_with_nan = hidden.detach().clone()
    hidden_with_nan.view(-1, HIDDEN_SIZE)[5:12] = torch.nan
    hidden_with_nan.requires_grad_()
    actual_gradients = compute_gradients(
        linear_cross_entropy(hidden_with_nan, weight, labels), hidden_with_nan, weight
    )
    expected_gradients = compute_gradients(
        linear_cross_entropy(hidden, weight, labels), hidden, weight
    )
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype", "has_autocast"),
    [
        *((torch.bfloat16, torch.bfloat16, False), (torch.bfloat16, torch.float32, False)),
        *((torch.float32, torch.bfloat16, False), (torch.float32, torch.float32, True)),
    ],
    ids=["bfloat16", "head trained in float32", "hidden in float32", "autocast"],
)
def test_products_use_low_precision_and_sums_float32(hidden_dtype, weight_dtype, has_autocast):
    hidden, weight, labels = make_inputs(1, 300, dtype=torch.float32)
    hidden, weight = (
        tensor.detach().to(torch.bfloat16).to(dtype).requires_grad_()
        for tensor, dtype in ((hidden, hidden_dtype), (weight, weight_dtype))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        total_loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=64)
    logits = (hidden.to(torch.bfloat16) @ weight.to(torch.bfloat16).T).float()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert total_loss.dtype == torch.float32
    torch.testing.assert_close(total_loss, expected, rtol=1e-6, atol=0)
    exact_gradients = compute_gradients(
        compute_loss_by_torch(hidden.double(), weight.double(), labels), hidden, weight
    )
    for actual_gradient, expected, tensor in zip(
        compute_gradients(total_loss, hidden, weight),
        exact_gradients,
        (hidden, weight),
        strict=True,
    ):
        assert actual_gradient.dtype == tensor.dtype
        assert (actual_gradient - expected).abs().max() <= 0.02 * expected.abs().max()


def test_frozen_inputs_get_no_gradient():
    hidden, weight, labels = make_inputs()
    frozen_weight = weight.detach()
    total_loss = linear_cross_entropy(hidden, frozen_weight, labels)
    expected_gradients = compute_gradients(
        compute_loss_by_torch(hidden, frozen_weight, labels), hidden
    )
    torch.testing.assert_close(compute_gradients(total_loss, hidden), expected_gradients)
    with torch.no_grad():
        loss_without_grad = linear_cross_entropy(hidden, weight, labels)
    assert not loss_without_grad.requires_grad and loss_without_grad == total_loss


@pytest.mark.parametrize("is_head_trained", [False, True], ids=["head frozen", "head trained"])
def test_largest_tensor_is_one_chunk_of_logits(is_head_trained):
    hidden, weight, labels = make_inputs(1, 640, dtype=torch.float32)
    weight.requires_grad_(is_head_trained)
    # full logits, 640 x 51, would be larger than all other tensors
    with TensorBytes(hidden, weight) as tensor_bytes:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=32).backward()
    assert hidden.grad.abs().sum() > 0
    assert (
        tensor_bytes.largest_tensor_bytes
        == 4 * max(hidden.numel(), 32 * VOCABULARY_SIZE)
        == 4 * 640 * HIDDEN_SIZE
    )


class LayerAndHead(nn.Module):
    """A linear layer and a language-model head, whose forward pass returns the loss of labels.

    The weight of the head is trained if ``is_head_trained`` is True, and frozen otherwise.
    """

    def __init__(self, is_head_trained):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCABULARY_SIZE, bias=False).requires_grad_(
            is_head_trained
        )

    def forward(self, hidden, labels):
        return linear_cross_entropy(self.layer(hidden), self.head.weight, labels)


@pytest.mark.parametrize("is_head_trained", [False, True], ids=["head frozen", "head trained"])
@pytest.mark.parametrize(
    "ignored_slice", [IGNORED_SLICES["some"], IGNORED_SLICES["none"]], ids=["some", "none"]
)
def test_ddp_reduces_all_gradients(single_process_group, is_head_trained, ignored_slice):
    hidden, _, labels = make_inputs(ignored_slice=ignored_slice, dtype=torch.float32)
    reference_head, ddp_head = (
        LayerAndHead(is_head_trained),
        nn.parallel.DistributedDataParallel(LayerAndHead(is_head_trained)),
    )
    # two passes, because DDP reports a parameter without gradient in the second pass only
    for _ in range(2):
        ddp_head(hidden, labels).backward()
        reference_head(hidden, labels).backward()
    for parameter, reference_parameter in zip(
        ddp_head.module.parameters(), reference_head.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, reference_parameter.grad)


@pytest.mark.parametrize("label", [51, -1])
def test_labels_outside_of_vocabulary_raise(label):
    hidden, weight, _ = make_inputs()
    with pytest.raises(ValueError, match=f"labels must be from 0 to 50, .*, got {label}"):
        linear_cross_entropy(hidden, weight, torch.full((2, 37), label))
