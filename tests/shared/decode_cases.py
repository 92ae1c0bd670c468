"""Decode steps for tests that compare the kernels with the reference."""

import torch
from tiny import draw_qkv

from cab_hf import CabConfig
from cab_hf.call.call import Call
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.config import block_sizes
from cab_hf.dispatch import dense_masked
from cab_hf.hf.rotary import slow_channels_of_llama
from cab_hf.ops import Workload, decode
from cab_hf.ops.decode import kernels, reference

# by name: (heads, KV heads, cache slots, written slots, D, D_v, number of keys to select, options)
STEP_CASES = {
    "group-of-3": (6, 2, 1500, 1300, 64, 64, 200, {}),
    "padding": (6, 2, 1500, 1300, 64, 64, 200, {"padding": 100}),
    "one-head-each": (4, 4, 1030, 1030, 64, 64, 300, {}),
    "all-channels-of-80": (4, 4, 1024, 1024, 80, 80, 400, {"channels": ()}),
    "odd-heads": (4, 2, 1100, 1000, 35, 35, 200, {"channels": ()}),
    "values-of-32": (8, 2, 1300, 1300, 64, 32, 200, {}),
    "a-group-of-16": (16, 1, 1300, 1200, 64, 64, 150, {}),
    "large-heads": (4, 2, 1300, 1200, 256, 256, 150, {}),
    "all-keys": (8, 2, 1300, 1200, 128, 128, 4000, {}),
    "sinks-and-local-tokens-only": (6, 2, 1500, 1300, 64, 64, 80, {}),
    "far-from-zero": (6, 2, 1500, 1300, 64, 64, 200, {"shift": 40.0}),
    "few-written": (6, 2, 1500, 40, 64, 64, 200, {}),
    # caches so large that `choose` estimates attention weights from a sample of keys
    "a-sample": (8, 2, 35000, 34321, 64, 64, 2000, {}),
    "a-sample-of-padding": (3, 3, 35000, 34321, 64, 64, 2000, {"padding": 9000}),
    "little-of-a-sample": (6, 2, 70000, 900, 64, 64, 200, {}),
    "few-slots": (6, 2, 100, 97, 64, 64, 85, {}),
    "sinks": (6, 2, 1500, 1300, 64, 64, 200, {"sinks": (0.0, 9.0, -3.0, 5.0, 5.0, 40.0)}),
    "one-row-reads-all-keys": (6, 2, 1500, 1300, 64, 64, (2**31 - 1, 200), {"padding": 100}),
}


def make_step_inputs(step_case, dtype=torch.float32, device="cpu", batch=2):
    """Return (q, k, v, arguments) of a decode step for one of `STEP_CASES`.

    The last element is the tuple (scale, length, num_keys, channels, padding_mask, sinks) of
    arguments of `kernels.choose`.
    """
    heads, kv_heads, num_slots, num_written, dim, value_dim, num_selected, case_options = step_case
    generator = torch.Generator().manual_seed(0)

    def draw_noise(num_heads, length, num_channels):
        return torch.randn(batch, num_heads, length, num_channels, generator=generator)

    q = 2 * draw_noise(heads, 1, dim)
    k, v = draw_noise(kv_heads, num_slots, dim), draw_noise(kv_heads, num_slots, value_dim)
    # shift keys along the mean query of their group, which adds a constant to all logits of a head
    k = k + case_options.get("shift", 0.0) * q.unflatten(1, (kv_heads, -1)).mean(2) / 4
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    padding_mask = None
    if "padding" in case_options:
        padding_mask = torch.ones(batch, num_written, dtype=torch.bool, device=device)
        padding_mask[0, : case_options["padding"]] = False
    channels = case_options.get("channels", slow_channels_of_llama(dim))
    num_selected = num_selected if isinstance(num_selected, tuple) else (num_selected,)
    length = torch.tensor([num_written], device=device)
    num_selected = torch.tensor(num_selected, dtype=torch.int32, device=device)
    sinks = torch.tensor(case_options["sinks"], device=device) if "sinks" in case_options else None
    return q, k, v, (dim**-0.5, length, num_selected, channels, padding_mask, sinks)


def assert_step_equals_reference(step_case, dtype=torch.float32, device="cpu"):
    """Assert that index, selection and attention of the kernels match the reference."""
    q, k, v, (scale, length, num_selected, channels, padding_mask, sinks) = make_step_inputs(
        step_case, dtype, device
    )
    key_index, expected_key_index = (
        implementation.index_keys(k, channels) for implementation in (kernels, reference)
    )
    for actual, expected in zip(key_index, expected_key_index, strict=True):
        assert torch.equal(actual, expected)
    cache_arguments = {"length": length, "padding_mask": padding_mask, "sinks": sinks}
    choice, expected = (
        implementation.choose(
            q, key_index, scale, num_keys=num_selected, channels=channels, **cache_arguments
        )
        for implementation in (kernels, reference)
    )
    scored_keys = reference.score_keys(q, key_index, scale, channels=channels, **cache_arguments)
    _, weight_levels, is_sampled, is_always_read = scored_keys
    last_read_level = reference.find_last_read_level(
        weight_levels, is_sampled, is_always_read, length=length, num_keys=num_selected
    )
    is_selected = choice.to_mask()
    assert torch.equal(is_selected.sum(-1), choice.counts)
    # kernels sum in another order, which may change the rounded attention weights by one step
    assert (
        (is_selected == (weight_levels <= last_read_level))
        | ((weight_levels - last_read_level).abs() <= 2)
    ).all()
    assert (is_selected == expected.to_mask()).float().mean() > 0.999
    torch.testing.assert_close(choice.unread_logit, expected.unread_logit, rtol=1e-2, atol=0.1)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for layer_choice in (choice, choice.map_to_layer(q.device)):
        out, expected_out = (
            implementation.attend(q, k, v, layer_choice, scale=scale, **cache_arguments)
            for implementation in (kernels, reference)
        )
        torch.testing.assert_close(out, expected_out, rtol=tolerance, atol=tolerance)


def make_step_masks(device="cpu"):
    """Return `MaskInfo` by name, each of a decode step with 2 rows, one query and 300 slots."""
    padding_mask = torch.ones(2, 300, dtype=torch.bool, device=device)
    padding_mask[0, :77] = False
    q_offset = torch.tensor(250, device=device)
    static_fields = {
        "kv_length": None,
        "q_offset": q_offset,
        "details": MaskDetails(cache_length=300),
    }
    mask_fields_by_name = {
        "static": static_fields,
        "static-padding": {**static_fields, "padding_mask": padding_mask},
        "static-window": {**static_fields, "window": 40},
        "static-all": {**static_fields, "q_offset": torch.tensor(299, device=device)},
        "padding": {"kv_length": 300, "q_offset": 299, "padding_mask": padding_mask},
        "window": {"kv_length": 300, "q_offset": 299, "window": 40},
        "padding-window": {
            "kv_length": 300,
            "q_offset": 299,
            "padding_mask": padding_mask,
            "window": 250,
        },
    }
    return {
        name: MaskInfo(2, 1, **mask_fields) for name, mask_fields in mask_fields_by_name.items()
    }


def assert_dense_step_equals_sdpa(mask, monkeypatch, dtype=torch.float32, device="cpu"):
    """Assert that the kernel of a dense decode step equals SDPA with the token mask of ``mask``."""
    q, k, v = (x.to(device, dtype) for x in draw_qkv(2, q_length=1, kv_length=300, dim=32))
    config = CabConfig()
    workload = Workload.from_tensors(q, k, v, block_sizes(config))
    attention_call = Call(
        q=q,
        k=k,
        v=v,
        scale=0.2,
        layer=None,
        config=config,
        is_sparse=False,
        workload=workload,
        mask=mask,
    )
    actual = dense_masked(attention_call)
    monkeypatch.setattr(decode, "has_kernels", lambda *tensors: False)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(actual, dense_masked(attention_call), rtol=tolerance, atol=tolerance)
