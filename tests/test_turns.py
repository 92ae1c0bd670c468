"""Texts that go on: chunks of a prompt, questions behind one document, and chats."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny import FULL, SPARSE, tiny_model, tokens
from transformers import DynamicCache, StaticCache

import cab_hf
from cab_hf import chunks

DOCUMENT, QUESTION = 256, 96
CHAT = (130, 40, 1, 77, 52)  # tokens of five turns


def cache_of(model, kind):
    if kind == "static":
        return StaticCache(model.config, max_cache_len=512)
    return DynamicCache(config=model.config)


@torch.no_grad()
def read(model, ids, cache):
    return model(ids, past_key_values=cache, use_cache=True).logits


@torch.no_grad()
def whole(model, *parts):
    return model(torch.cat(parts, dim=1), use_cache=False).logits


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("budget", ["full", "sparse"])
def test_a_document_is_read_once_for_many_questions(kind, budget):
    config = {"full": FULL, "sparse": replace(SPARSE, dense_tail_blocks=0)}[budget]
    model = cab_hf.apply_cab(tiny_model(), config)
    document, cache = tokens(1, DOCUMENT), cache_of(model, kind)
    read(model, document, cache)
    for seed in (2, 3):
        question = tokens(1, QUESTION, seed=seed)
        answer = read(model, question, copy.deepcopy(cache))
        expected = whole(model, document, question)[:, DOCUMENT:]
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_is_cropped_to_the_document():
    model = cab_hf.apply_cab(tiny_model(), replace(SPARSE, dense_tail_blocks=0))
    document, cache = tokens(1, DOCUMENT), cache_of(model, "dynamic")
    read(model, document, cache)
    for seed in (2, 3):
        question = tokens(1, QUESTION, seed=seed)
        answer = read(model, question, cache)
        cache.crop(-QUESTION)
        expected = whole(model, document, question)[:, DOCUMENT:]
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_chat_is_one_text_at_full_budget(kind):
    model = cab_hf.apply_cab(tiny_model(), FULL)
    turns = [tokens(1, length, seed=length) for length in CHAT]
    cache = cache_of(model, kind)
    answers = torch.cat([read(model, turn, cache) for turn in turns], dim=1)
    torch.testing.assert_close(answers, whole(model, *turns), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [0, 40])
def test_a_prompt_in_chunks_chooses_what_a_whole_one_does(padding):
    model = cab_hf.apply_cab(tiny_model(), SPARSE)
    ids = tokens(2, 352)
    seen = torch.ones_like(ids)
    # on the left, and of one text alone: then chunks do not end where its query blocks do
    seen[0, :padding] = 0

    def scores(**options):
        told = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True}
        result = model.generate(ids, attention_mask=seen, do_sample=False, **told, **options)
        return torch.stack(result.scores, dim=1)

    whole, chunks = scores(), scores(prefill_chunk_size=96)
    torch.testing.assert_close(chunks[1], whole[1], rtol=1e-4, atol=1e-4)
    if padding == 0:
        torch.testing.assert_close(chunks, whole, rtol=1e-4, atol=1e-4)


def test_calls_outside_of_a_prompt_in_chunks_have_a_tail():
    with chunks.reading(300):
        assert chunks.goes_on(96) and not chunks.goes_on(300)
        with chunks.reading(50):
            assert not chunks.goes_on(96)
        assert chunks.goes_on(96)
    assert not chunks.goes_on(96)
