"""Long prompts: chunked prefill, logits of the last token, GPU synchronisation, mask memory."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny import FULL_BUDGET_CONFIG, SPARSE_CONFIG, draw_token_ids, make_tiny_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

import cab_hf
from cab_hf.engines import masked
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan
from cab_hf.selection import api

TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}
CHUNK_TOKENS = 3 * SPARSE_CONFIG.query_block
# the last chunk is shorter than the others, but longer than a query block
PROMPT_TOKENS = 4 * CHUNK_TOKENS + 40


@pytest.fixture(scope="module")
def llama():
    """Return a tiny LLaMA."""
    return make_tiny_model()


def prefill_in_chunks(model, ids, chunk_tokens=CHUNK_TOKENS, cache_slots=None, **model_options):
    """Prefill a prompt chunk by chunk into a static cache; yield the model output of each chunk.

    ``chunk_tokens`` is the number of tokens per chunk, and ``cache_slots`` the length of
    the cache; None: the length of the prompt.
    """
    cache = StaticCache(config=model.config, max_cache_len=cache_slots or ids.shape[1])
    for chunk_ids in ids.split(chunk_tokens, dim=1):
        with torch.inference_mode():
            yield model(chunk_ids, past_key_values=cache, use_cache=True, **model_options)


@pytest.mark.parametrize("chunk_tokens", [PROMPT_TOKENS, CHUNK_TOKENS])
def test_generate_computes_last_token_logits_only(llama, chunk_tokens):
    ids = draw_token_ids(1, PROMPT_TOKENS)
    logits_lengths = []
    hook_handle = llama.lm_head.register_forward_hook(
        lambda module, args, output: logits_lengths.append(output.shape[1])
    )
    with cab_hf.cab(llama, SPARSE_CONFIG):
        full_outputs = list(prefill_in_chunks(llama, ids, chunk_tokens))
        last_token_outputs = list(prefill_in_chunks(llama, ids, chunk_tokens, logits_to_keep=1))
    hook_handle.remove()
    assert logits_lengths == [out.logits.shape[1] for out in full_outputs] + [1] * len(
        last_token_outputs
    )
    for last_token_output, full_output in zip(last_token_outputs, full_outputs, strict=True):
        assert last_token_output.logits.shape == (1, 1, llama.config.vocab_size)
        torch.testing.assert_close(
            last_token_output.logits, full_output.logits[:, -1:], **TOLERANCE
        )


@pytest.mark.parametrize(
    "cache_slots", [PROMPT_TOKENS, PROMPT_TOKENS + 70], ids=["exact-cache", "larger-cache"]
)
@pytest.mark.parametrize(
    ("config", "chunk_tokens"),
    [
        pytest.param(FULL_BUDGET_CONFIG, CHUNK_TOKENS, id="full-budget"),
        pytest.param(FULL_BUDGET_CONFIG, 50, id="full-budget-odd-chunks"),
        # without curvature and dense tail, which depend on where chunks end
        pytest.param(SPARSE_CONFIG, CHUNK_TOKENS, id="sparse-without-curvature"),
    ],
)
def test_chunked_static_cache_equals_one_prefill(llama, config, chunk_tokens, cache_slots):
    ids = draw_token_ids(1, PROMPT_TOKENS)
    with cab_hf.cab(llama, config, redundancy=0.0, dense_tail_blocks=0), torch.inference_mode():
        expected = llama(ids).logits
        actual = torch.cat(
            [out.logits for out in prefill_in_chunks(llama, ids, chunk_tokens, cache_slots)], dim=1
        )
    torch.testing.assert_close(actual, expected, **TOLERANCE)


class WaitCounter(TorchDispatchMode):
    """Dispatch mode that counts operations that wait for the device, such as ``tensor.item()``."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.overloadpacket.__name__ in ("item", "is_nonzero", "_local_scalar_dense")
        return op(*args, **(kwargs or {}))


def test_layers_do_not_synchronise_with_the_device(monkeypatch):
    """Assert that a forward pass reads the offset of its chunk at most once, not per layer."""

    def return_zeros(q, k, v, plan, scale, return_lse=False, softcap=None):
        return torch.zeros_like(q)

    def select_all_blocks(q, keys, key_ranges, config, **_):
        plan = BlockPlan.causal(key_ranges, q.shape[1], config.query_block, config.key_block)
        return plan.full, plan.partial

    # replace selection and attention of the reference, which synchronise; kernels do not, see
    # tests/gpu/test_rows.py
    monkeypatch.setattr(reference, "attention", return_zeros)
    monkeypatch.setattr(api, "_select_by_reference", select_all_blocks)
    waits_by_num_layers = Counter()
    for num_layers in (1, 3):
        model = make_tiny_model(num_hidden_layers=num_layers)
        config = replace(SPARSE_CONFIG, engine="reference")
        with cab_hf.cab(model, config), WaitCounter() as wait_counter:
            for _ in prefill_in_chunks(model, draw_token_ids(1, PROMPT_TOKENS)):
                pass
        waits_by_num_layers[num_layers] = wait_counter.count
    assert (
        0
        < waits_by_num_layers[1]
        == waits_by_num_layers[3]
        <= 2 * -(-PROMPT_TOKENS // CHUNK_TOKENS)
    )


@pytest.mark.parametrize("num_padding_tokens", [0, 21])
def test_dense_layers_repeat_no_keys_and_limit_mask_memory(llama, monkeypatch, num_padding_tokens):
    ids = draw_token_ids(1, PROMPT_TOKENS)
    ids[:, :num_padding_tokens] = 0
    mask = (ids != 0).long()
    with torch.inference_mode():
        expected = llama(ids, attention_mask=mask).logits[:, num_padding_tokens:]
    max_mask_elements = 20 * PROMPT_TOKENS
    monkeypatch.setattr(masked, "MAX_MASK_ELEMENTS", max_mask_elements)
    original_sdpa = F.scaled_dot_product_attention

    def check_and_call_sdpa(query, key, value, attn_mask=None, **options):
        assert key.shape[1] == llama.config.num_key_value_heads
        assert attn_mask is None or attn_mask.numel() <= max_mask_elements
        return original_sdpa(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", check_and_call_sdpa)
    with cab_hf.cab(llama, FULL_BUDGET_CONFIG, min_length=2 * PROMPT_TOKENS):
        cache = StaticCache(config=llama.config, max_cache_len=PROMPT_TOKENS)
        chunk_logits = []
        for chunk_ids in ids.split(CHUNK_TOKENS, dim=1):
            chunk_end = sum(logits.shape[1] for logits in chunk_logits) + chunk_ids.shape[1]
            with torch.inference_mode():
                out = llama(chunk_ids, attention_mask=mask[:, :chunk_end], past_key_values=cache)
            chunk_logits.append(out.logits)
    torch.testing.assert_close(
        torch.cat(chunk_logits, dim=1)[:, num_padding_tokens:], expected, **TOLERANCE
    )
