"""Decode kernels in Triton's interpreter, compared with the reference."""

import pytest
import torch
from decode_cases import STEP_CASES, assert_step_equals_reference, make_step_inputs
from marks import mark_slow_except

from cab_hf.ops.decode import attend_kernels, kernels, reference

# maximum number of sampled keys from which `choose` estimates attention weights: an eighth of the
# number on a GPU, because the interpreter needs a second for a few thousand keys
MAX_SAMPLED_KEYS = 1024
# cases with more keys than MAX_SAMPLED_KEYS
SAMPLE_CASES = {
    "a-sample": (8, 2, 4400, 4313, 64, 64, 250, {}),
    "a-sample-of-padding": (3, 3, 4400, 4313, 64, 64, 250, {"padding": 1130}),
    "little-of-a-sample": (6, 2, 8800, 900, 64, 64, 200, {}),
}
# cases that `make test` runs
FAST_CASE_NAMES = ("group-of-3", "padding", "odd-heads", "a-sample", "few-slots", "sinks")


@pytest.fixture(autouse=True)
def _fill_empty_tensors():
    """Fill new tensors with NaN or the largest integer, to detect reads of unwritten memory."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _reduce_num_programs(monkeypatch):
    """Reduce the number of programs per launch, because the interpreter runs them one by one."""
    monkeypatch.setattr(attend_kernels, "TARGET_PROGRAMS", 24)


def choose_keys(ops_module, q, key_index, choose_args):
    """Return the `Choice` of ``ops_module``, which is the module `kernels` or `reference`.

    Args:
        choose_args: scale, length, num_keys, channels, padding_mask, sinks of `make_step_inputs`.
    """
    scale, length, num_keys, channels, padding_mask, sinks = choose_args
    return ops_module.choose(
        q,
        key_index,
        scale=scale,
        length=length,
        num_keys=num_keys,
        channels=channels,
        padding_mask=padding_mask,
        sinks=sinks,
    )


def attend(ops_module, qkv, choice, choose_args):
    """Return the attention output over the selected keys, by the module ``ops_module``."""
    q, k, v = qkv
    scale, length, *_ = choose_args
    return ops_module.attend(q, k, v, choice, scale=scale, length=length)


def require_same_choice(choice, expected):
    assert torch.equal(choice.to_mask(), expected.to_mask())
    assert torch.equal(choice.unread_logit, expected.unread_logit)


@pytest.mark.parametrize(
    "case_name", mark_slow_except(STEP_CASES, *map(list(STEP_CASES).index, FAST_CASE_NAMES))
)
def test_decode_step_equals_reference(case_name, monkeypatch):
    if case_name in SAMPLE_CASES:
        monkeypatch.setattr(reference, "MAX_SAMPLED_KEYS", MAX_SAMPLED_KEYS)
    assert_step_equals_reference(SAMPLE_CASES.get(case_name, STEP_CASES[case_name]))


def test_decode_step_with_many_programs_equals_reference(monkeypatch):
    # the merge kernel needs several iterations for the results of this many programs
    monkeypatch.setattr(attend_kernels, "TARGET_PROGRAMS", 280)
    assert attend_kernels.SPLITS_PER_ITERATION < 280 // 4
    assert_step_equals_reference(STEP_CASES["few-slots"])


def test_unused_cache_slots_do_not_change_strided_step():
    q, k, v, choose_args = make_step_inputs(STEP_CASES["group-of-3"])
    key_index = kernels.index_keys(k, choose_args[3])
    choice = choose_keys(kernels, q, key_index, choose_args)
    # pass views of buffers with 300 more slots, so that tensors are not contiguous
    strided_k, strided_v, codes, scales = (
        torch.cat((x, x[:, :, :300]), dim=2)[:, :, :1500] for x in (k, v, *key_index)
    )
    assert not strided_k.is_contiguous()
    actual = choose_keys(kernels, q, reference.Index(codes, scales), choose_args)
    require_same_choice(actual, choice)
    expected = attend(kernels, (q, k, v), choice, choose_args)
    out = attend(kernels, (q, strided_k, strided_v), actual, choose_args)
    assert torch.equal(out, expected)


def test_sequences_in_a_shared_cache_read_their_own_slots():
    """Test the cache of continuous batching, in which each sequence has a list of slots."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 6, 1, 64, generator=generator)
    shared_cache = torch.randn(2, 400, 2, 64, generator=generator)
    k, v = (x.transpose(0, 1).unsqueeze(0).expand(3, -1, -1, -1) for x in shared_cache)
    slots_of_sequences = torch.stack(
        [torch.randperm(400, generator=generator)[:90] for _ in range(3)]
    )
    slots_of_sequences = slots_of_sequences.to(torch.int32).unsqueeze(1).expand(-1, 2, -1)
    num_keys_of_sequences = torch.tensor([90, 1, 33], dtype=torch.int32).unsqueeze(1).expand(-1, 2)
    choice = reference.Choice(slots_of_sequences, num_keys_of_sequences, None)
    expected = reference.attend(q, k, v, choice, scale=0.125)
    torch.testing.assert_close(kernels.attend(q, k, v, choice, scale=0.125), expected)
    slots_of_last_sequence = slots_of_sequences[2, 0, :33].long()
    weights = (q[2].view(2, 3, 64) @ k[2, :, slots_of_last_sequence].mT * 0.125).softmax(-1)
    out_of_last_sequence = weights @ v[2, :, slots_of_last_sequence]
    torch.testing.assert_close(expected[2, :, 0], out_of_last_sequence.flatten(0, 1))


def test_nan_in_unwritten_slots_does_not_change_step():
    q, k, v, choose_args = make_step_inputs(STEP_CASES["group-of-3"])
    key_index = kernels.index_keys(k, choose_args[3])
    choice = choose_keys(kernels, q, key_index, choose_args)
    out = attend(kernels, (q, k, v), choice, choose_args)
    for x in (k, v):
        x[:, :, 1300:] = float("nan")
    key_index.codes[:, :, 1300:], key_index.scales[:, :, 1300:] = 255, float("inf")
    actual = choose_keys(kernels, q, key_index, choose_args)
    require_same_choice(actual, choice)
    assert torch.equal(attend(kernels, (q, k, v), actual, choose_args), out)


@pytest.mark.parametrize("ops_module", [kernels, reference])
@pytest.mark.parametrize("tensor_name", mark_slow_except(["query", "key"], 0))
def test_nan_row_does_not_change_other_rows(ops_module, tensor_name):
    outputs = []
    for factor in (1.0, float("nan")):
        q, k, v, choose_args = make_step_inputs(STEP_CASES["few-slots"])
        (q if tensor_name == "query" else k[:, :, 50])[0] *= factor
        choice = choose_keys(ops_module, q, ops_module.index_keys(k, choose_args[3]), choose_args)
        outputs.append((choice.to_mask()[1], attend(ops_module, (q, k, v), choice, choose_args)))
    (expected_mask, expected), (actual_mask, actual) = outputs
    assert torch.equal(actual_mask, expected_mask) and torch.equal(actual[1], expected[1])
    assert actual[0].isnan().all() or tensor_name == "key"


@pytest.mark.parametrize("ops_module", [kernels, reference])
@pytest.mark.parametrize("nonfinite_value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("channel", [20, 3], ids=["scored", "other-channel"])
def test_nonfinite_key_is_always_selected(ops_module, nonfinite_value, channel):
    q, k, v, choose_args = make_step_inputs(
        STEP_CASES["few-written"][:3] + (300, *STEP_CASES["few-written"][4:])
    )
    assert (3 in choose_args[3]) != (20 in choose_args[3])
    expected = choose_keys(ops_module, q, ops_module.index_keys(k, choose_args[3]), choose_args)
    nonfinite_slot = int((~expected.to_mask()[1, 0, :300]).nonzero()[0])
    k[1, 0, nonfinite_slot, channel] = nonfinite_value
    choice = choose_keys(ops_module, q, ops_module.index_keys(k, choose_args[3]), choose_args)
    assert choice.to_mask()[1, 0, nonfinite_slot] and not choice.to_mask()[..., 300:].any()
    assert torch.equal(choice.to_mask()[0], expected.to_mask()[0])
    assert torch.equal(choice.to_mask()[1, 1], expected.to_mask()[1, 1])
    assert choice.to_mask()[1, 0].sum() <= expected.counts[1, 0] + 8
    out = attend(ops_module, (q, k, v), choice, choose_args)
    assert out[1, 3:].isfinite().all()
    logits = q[1, :3, 0, channel] * nonfinite_value
    assert torch.equal(out[1, :3, 0].isfinite().all(-1), logits == -torch.inf)


@pytest.mark.parametrize("nonfinite_value", [torch.nan, torch.inf], ids=str)
def test_nonfinite_query_does_not_change_selection_of_its_group(nonfinite_value):
    q, k, v, choose_args = make_step_inputs(
        STEP_CASES["few-written"][:3] + (300, *STEP_CASES["few-written"][4:])
    )
    q[1, 1, 0, choose_args[3][0]] = nonfinite_value
    key_index = kernels.index_keys(k, choose_args[3])
    choice, expected = (
        choose_keys(ops_module, q, key_index, choose_args) for ops_module in (kernels, reference)
    )
    assert torch.equal(choice.to_mask(), expected.to_mask())
    assert choice.counts[1, 0] > 150
    out = attend(kernels, (q, k, v), choice, choose_args)
    assert not out[1, 1].isfinite().any() and out[1, [0, 2, 3, 4, 5]].isfinite().all()


def test_mask_over_unwritten_slots_does_not_change_step():
    q, k, v, (scale, length, num_keys, channels, padding_mask, _) = make_step_inputs(
        STEP_CASES["padding"]
    )
    key_index = kernels.index_keys(k, channels)

    def choose_and_attend(padding_mask):
        choice = choose_keys(
            kernels, q, key_index, (scale, length, num_keys, channels, padding_mask, None)
        )
        return choice, kernels.attend(
            q, k, v, choice, scale=scale, length=length, padding_mask=padding_mask
        )

    expected_choice, expected = choose_and_attend(padding_mask)
    mask_of_all_slots = torch.nn.functional.pad(
        padding_mask, (0, k.shape[2] - padding_mask.shape[1]), value=True
    )
    choice, out = choose_and_attend(mask_of_all_slots)
    require_same_choice(choice, expected_choice)
    assert torch.equal(out, expected)


def test_registered_ops_pass_opcheck():
    q, k, v, (scale, length, num_keys, channels, padding_mask, _) = make_step_inputs(
        STEP_CASES["padding"]
    )
    registered_ops, channels = torch.ops.cab_hf, list(channels)
    key_index = kernels.index_keys(k, channels)
    choose_inputs = (q, *key_index, scale, length, num_keys, channels, padding_mask)
    slots, counts, unread_logit = registered_ops.decode_choose(*choose_inputs)
    attend_inputs = (q, k, v, slots, counts, unread_logit, scale, length, padding_mask)
    inputs_of_ops = {
        registered_ops.decode_write_index: (*key_index, k[:, :, :3], channels, torch.tensor([5])),
        registered_ops.decode_choose: choose_inputs,
        registered_ops.decode_attend: attend_inputs,
    }
    for registered_op, op_inputs in inputs_of_ops.items():
        opcheck_tests = "test_schema", "test_faketensor"
        outcomes = torch.library.opcheck(registered_op.default, op_inputs, test_utils=opcheck_tests)
        assert set(outcomes.values()) == {"SUCCESS"}
    expected = choose_keys(
        kernels, q, key_index, (scale, length, num_keys, tuple(channels), padding_mask, None)
    )
    require_same_choice(reference.Choice(slots, counts, unread_logit), expected)
    out = kernels.attend(q, k, v, expected, scale=scale, length=length, padding_mask=padding_mask)
    assert torch.equal(registered_ops.decode_attend(*attend_inputs), out)
