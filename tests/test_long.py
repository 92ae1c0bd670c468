"""Long prompts: chunks in one cache, last-token logits, few device synchronisations."""

from collections import Counter

import pytest
import torch
from tiny import FULL, SPARSE, tiny_model, tokens
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

import cab_hf
from cab_hf.engines import masked
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan
from cab_hf.selection import api

EXACT = {"atol": 2e-5, "rtol": 1e-4}
CHUNK = 3 * SPARSE.query_block
# the last chunk is not whole, and has more than a query block
LENGTH = 4 * CHUNK + 40


@pytest.fixture(scope="module")
def llama():
    return tiny_model()


def pieces(model, ids, chunk=CHUNK, slots=None, **options):
    """Return the outputs of a model for each chunk of a prompt in one static cache."""
    cache = StaticCache(config=model.config, max_cache_len=slots or ids.shape[1])
    for piece in ids.split(chunk, dim=1):
        with torch.inference_mode():
            yield model(piece, past_key_values=cache, use_cache=True, **options)


@pytest.mark.parametrize("chunk", [LENGTH, CHUNK])
def test_generate_computes_last_token_logits_only(llama, chunk):
    ids = tokens(1, LENGTH)
    shapes = []
    watch = llama.lm_head.register_forward_hook(lambda *call: shapes.append(call[2].shape[1]))
    with cab_hf.cab(llama, SPARSE):
        every = list(pieces(llama, ids, chunk))
        last = list(pieces(llama, ids, chunk, logits_to_keep=1))
    watch.remove()
    assert shapes == [out.logits.shape[1] for out in every] + [1] * len(last)
    for one, out in zip(last, every, strict=True):
        assert one.logits.shape == (1, 1, llama.config.vocab_size)
        torch.testing.assert_close(one.logits, out.logits[:, -1:], **EXACT)


@pytest.mark.parametrize("slots", [LENGTH, LENGTH + 70], ids=["exact-cache", "roomy-cache"])
@pytest.mark.parametrize(
    ("config", "chunk"),
    [
        pytest.param(FULL, CHUNK, id="full-budget"),
        pytest.param(FULL, 50, id="full-budget-odd-chunks"),
        # curvature reads rows of earlier chunks, and a dense tail follows the end of each chunk
        pytest.param(SPARSE, CHUNK, id="sparse-without-curvature"),
    ],
)
def test_chunked_static_cache_equals_one_prefill(llama, config, chunk, slots):
    ids = tokens(1, LENGTH)
    with cab_hf.cab(llama, config, redundancy=0.0, dense_tail_blocks=0), torch.inference_mode():
        complete = llama(ids).logits
        actual = torch.cat([out.logits for out in pieces(llama, ids, chunk, slots)], dim=1)
    torch.testing.assert_close(actual, complete, **EXACT)


class Waits(TorchDispatchMode):
    """Dispatch mode that counts operations that make Python wait for a tensor's value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.overloadpacket.__name__ in ("item", "is_nonzero", "_local_scalar_dense")
        return op(*args, **(kwargs or {}))


def test_layers_do_not_synchronise_with_the_device(monkeypatch):
    """A forward pass may read where its chunk starts, once for all layers."""

    def blind(q, k, v, plan, scale, return_lse=False, softcap=None):
        return torch.zeros_like(q)

    def every_block(q, keys, ranges, config, **_):
        plan = BlockPlan.causal(ranges, q.shape[1], config.query_block, config.key_block)
        return plan.full, plan.partial

    # on a CPU, selection and the reference engine read lengths; the kernels of a GPU do not, see
    # tests/gpu/test_rows.py
    monkeypatch.setattr(reference, "attention", blind)
    monkeypatch.setattr(api, "_select_by_reference", every_block)
    asked = Counter()
    for layers in (1, 3):
        model = tiny_model(num_hidden_layers=layers)
        with cab_hf.cab(model, SPARSE), Waits() as waits:
            for _ in pieces(model, tokens(1, LENGTH)):
                pass
        asked[layers] = waits.count
    assert 0 < asked[1] == asked[3] <= 2 * -(-LENGTH // CHUNK)


@pytest.mark.parametrize("padding", [0, 21])
def test_dense_layers_repeat_no_keys_and_limit_mask_memory(llama, monkeypatch, padding):
    ids = tokens(1, LENGTH)
    ids[:, :padding] = 0
    seen = (ids != 0).long()
    with torch.inference_mode():
        complete = llama(ids, attention_mask=seen).logits[:, padding:]
    limit = 20 * LENGTH
    monkeypatch.setattr(masked, "MASK_AT_A_TIME", limit)
    plain = F.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, **options):
        assert key.shape[1] == llama.config.num_key_value_heads
        assert attn_mask is None or attn_mask.numel() <= limit
        return plain(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    with cab_hf.cab(llama, FULL, min_length=2 * LENGTH):
        cache = StaticCache(config=llama.config, max_cache_len=LENGTH)
        actual = []
        for piece in ids.split(CHUNK, dim=1):
            reach = sum(out.shape[1] for out in actual) + piece.shape[1]
            with torch.inference_mode():
                out = llama(piece, attention_mask=seen[:, :reach], past_key_values=cache)
            actual.append(out.logits)
    torch.testing.assert_close(torch.cat(actual, dim=1)[:, padding:], complete, **EXACT)
