"""Several calls with one KV cache: prompt chunks, questions, chats, drafts, nested calls."""

import copy
from dataclasses import replace

import pytest
import torch
from marks import mark_slow_except
from tiny import FULL_BUDGET_CONFIG, SPARSE_CONFIG, draw_token_ids, make_tiny_model
from transformers import DynamicCache, StaticCache

import cab_hf
from cab_hf.call import scope

DOCUMENT_TOKENS, QUESTION_TOKENS = 256, 96
TURN_LENGTHS = (130, 40, 1, 77, 52)  # tokens of five turns


def make_cache(model, cache_kind):
    """Return an empty KV cache: for ``cache_kind`` "static" with 512 slots, else dynamic."""
    if cache_kind == "static":
        return StaticCache(model.config, max_cache_len=512)
    return DynamicCache(config=model.config)


@torch.no_grad()
def append_tokens(model, ids, cache):
    """Append ``ids`` to the sequence in ``cache``, and return their logits."""
    return model(ids, past_key_values=cache, use_cache=True).logits


@torch.no_grad()
def compute_prefill_logits(model, sequences):
    """Concatenate ``sequences``, and return the logits of one call without cache."""
    return model(torch.cat(sequences, dim=1), use_cache=False).logits


@pytest.mark.parametrize("cache_kind", ["dynamic", "static", "cropped"])
@pytest.mark.parametrize("config_kind", ["full", "sparse"])
def test_document_cache_serves_several_questions(cache_kind, config_kind):
    """Ask questions after a cached document: on a copy of the cache, or cropping it afterwards."""
    config = {"full": FULL_BUDGET_CONFIG, "sparse": replace(SPARSE_CONFIG, dense_tail_blocks=0)}[
        config_kind
    ]
    model = cab_hf.apply_cab(make_tiny_model(), config)
    document, cache = draw_token_ids(1, DOCUMENT_TOKENS), make_cache(model, cache_kind)
    append_tokens(model, document, cache)
    for seed in (2, 3):
        question = draw_token_ids(1, QUESTION_TOKENS, seed=seed)
        if cache_kind == "cropped":
            answer_logits = append_tokens(model, question, cache)
            cache.crop(-QUESTION_TOKENS)
        else:
            answer_logits = append_tokens(model, question, copy.deepcopy(cache))
        expected = compute_prefill_logits(model, [document, question])[:, DOCUMENT_TOKENS:]
        torch.testing.assert_close(answer_logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
def test_chat_turns_equal_one_sequence_at_full_budget(cache_kind):
    model = cab_hf.apply_cab(make_tiny_model(), FULL_BUDGET_CONFIG)
    turn_ids = [draw_token_ids(1, turn_length, seed=turn_length) for turn_length in TURN_LENGTHS]
    cache = make_cache(model, cache_kind)
    turn_logits = torch.cat([append_tokens(model, ids, cache) for ids in turn_ids], dim=1)
    torch.testing.assert_close(
        turn_logits, compute_prefill_logits(model, turn_ids), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("num_padding_tokens", [0, 40])
def test_chunked_generate_selects_same_blocks_as_one_prefill(num_padding_tokens):
    model = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)
    ids = draw_token_ids(2, 352)
    mask = torch.ones_like(ids)
    # with this left padding, chunks end inside query blocks of row 0, which start after the padding
    mask[0, :num_padding_tokens] = 0

    def generate_scores(**generate_options):
        common_options = {
            "max_new_tokens": 4,
            "return_dict_in_generate": True,
            "output_scores": True,
        }
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, **common_options, **generate_options
        )
        return torch.stack(output.scores, dim=1)

    expected, actual = generate_scores(), generate_scores(prefill_chunk_size=96)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-4)
    if num_padding_tokens == 0:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_only_calls_prepared_by_generate_have_a_prompt():
    model, other_model = (cab_hf.apply_cab(make_tiny_model(num_hidden_layers=1)) for _ in range(2))
    config, ids, recorded_prompts = model.config, draw_token_ids(1, 8), []
    hook_handle = model.model.register_forward_hook(
        lambda *_: recorded_prompts.append(
            [scope.current_prompt(1, x.config, None) for x in (model, other_model)]
        )
    )
    prompt = scope.Prompt(300, row_lengths=(300,))
    with scope.set_generation(model):
        generation = scope.FORWARD_CONTEXT.get().generation
        generation.begin_generation(prompt, is_compiled=False)
        model(ids)
        generation.prepare_inputs(model, lambda: {"input_ids": None})
        assert scope.current_prompt(1, config, None) is None
        model(ids)
        # a call with another number of rows (2) is not a chunk of the prompt
        assert scope.current_prompt(2, config, None) is None
        model(ids)
        with scope.hide_prompt():
            generation.prepare_inputs(model, lambda: {"input_ids": None})
            model(ids)
    hook_handle.remove()
    no_prompts = [None, None]
    assert recorded_prompts == [no_prompts, [prompt, None], no_prompts, no_prompts]
    assert not model._forward_pre_hooks and not model._forward_hooks


# options of `generate`: greedy decoding, without end-of-sequence token
GREEDY_OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def generate_logits(model, ids, num_steps=1, **generate_options):
    """Generate ``num_steps`` tokens, and return their logits [batch, steps, vocabulary]."""
    common_options = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "max_new_tokens": num_steps,
    }
    mask = generate_options.pop("attention_mask", torch.ones_like(ids))
    output = model.generate(
        ids, attention_mask=mask, **GREEDY_OPTIONS, **common_options, **generate_options
    )
    return torch.stack(output.logits, dim=1)


def assert_chunks_equal_one_call(prompt_length, num_tail_blocks, chunk_tokens=64, **config_fields):
    """Assert that chunked prefill of a prompt gives the logits of one prefill.

    Args:
        prompt_length: tokens of the prompt.
        num_tail_blocks: number of dense blocks at the end of the prompt.
        chunk_tokens: tokens per chunk.
        config_fields: fields of CabConfig.
    """
    config, ids = (
        replace(SPARSE_CONFIG, dense_tail_blocks=num_tail_blocks, **config_fields),
        draw_token_ids(1, prompt_length, seed=prompt_length),
    )

    def generate_last_logits(mass_threshold, **generate_options):
        model = cab_hf.apply_cab(make_tiny_model(), replace(config, mass_threshold=mass_threshold))
        return generate_logits(model, ids, **generate_options)

    # rounding may move a block's mass across the threshold: then try a slightly larger threshold
    for mass_threshold in (config.mass_threshold, config.mass_threshold * (1 + 1e-5)):
        expected = generate_last_logits(mass_threshold)
        actual = generate_last_logits(mass_threshold, prefill_chunk_size=chunk_tokens)
        if torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
            return
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tail_blocks", [0, 1, 2])
@pytest.mark.parametrize(
    ("prompt_length", "chunk_tokens"),
    [
        pytest.param(200, 64, id="tail-in-two-chunks"),
        pytest.param(129, 64, id="last-chunk-of-one-token"),
        pytest.param(161, 32, id="chunks-of-one-block"),
        pytest.param(40, 64, id="one-chunk"),
        pytest.param(20, 64, id="below-one-block"),
    ],
)
def test_chunks_of_whole_query_blocks_select_same_blocks_as_one_call(
    prompt_length, chunk_tokens, num_tail_blocks
):
    assert_chunks_equal_one_call(prompt_length, num_tail_blocks, chunk_tokens)


def test_min_length_counts_the_whole_chunked_prompt():
    assert_chunks_equal_one_call(300, 1, min_length=150)


@pytest.mark.slow
@pytest.mark.parametrize("num_tail_blocks", [1, 2])
def test_chunks_of_whole_query_blocks_equal_one_call_at_every_length(num_tail_blocks):
    for prompt_length in range(1, 601):
        assert_chunks_equal_one_call(prompt_length, num_tail_blocks)


def test_query_blocks_start_at_first_token_of_sequence():
    # a chunk of 50 tokens ends inside a query block; the outputs after the chunk must equal those
    # of a single call with all tokens
    model = cab_hf.apply_cab(
        make_tiny_model(num_hidden_layers=1), replace(SPARSE_CONFIG, dense_tail_blocks=0)
    )
    ids, cache = draw_token_ids(1, 256), make_cache(model, "dynamic")
    append_tokens(model, ids[:, :50], cache)
    actual = append_tokens(model, ids[:, 50:], cache)
    expected = compute_prefill_logits(model, [ids])
    torch.testing.assert_close(actual[:, 14:], expected[:, 64:], rtol=1e-4, atol=1e-4)


def test_query_blocks_of_padded_rows_start_at_first_real_token():
    model = cab_hf.apply_cab(
        make_tiny_model(num_hidden_layers=1), replace(SPARSE_CONFIG, dense_tail_blocks=0)
    )
    ids, cache, mask = (
        draw_token_ids(2, 256),
        make_cache(model, "dynamic"),
        torch.ones(2, 256).long(),
    )
    mask[0, :45] = 0
    with torch.no_grad():
        model(ids[:, :64], attention_mask=mask[:, :64], past_key_values=cache, use_cache=True)
        actual = model(
            ids[:, 64:], attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits
    padded_row_logits, unpadded_row_logits = (
        compute_prefill_logits(model, [ids[:1, 45:]]),
        compute_prefill_logits(model, [ids[1:]]),
    )
    # the first call ends inside query block 0 of row 0 (19 of 32 tokens): compare from block 1
    torch.testing.assert_close(actual[:1, 13:], padded_row_logits[:, 32:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[1:], unpadded_row_logits[:, 64:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_chunked_rows_have_separate_prompt_ends(padding_side):
    model = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)
    long_ids, short_ids = draw_token_ids(1, 224), draw_token_ids(1, 160, seed=2)
    short_slice = slice(64, 224) if padding_side == "left" else slice(0, 160)
    ids, mask = torch.cat([long_ids, torch.zeros_like(long_ids)]), torch.zeros(2, 224).long()
    ids[1, short_slice], mask[0], mask[1, short_slice] = short_ids, 1, 1
    actual = generate_logits(model, ids, attention_mask=mask, prefill_chunk_size=64)
    expected = generate_logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "generate_options",
    [
        pytest.param({}, id="dynamic-cache"),
        pytest.param(
            {"cache_implementation": "static", "disable_compile": True}, id="static-cache"
        ),
        pytest.param({"num_beams": 2}, id="beams"),
    ],
)
def test_short_right_padded_row_is_dense_in_chunks(generate_options):
    config_fields = {"min_length": 200, "mass_threshold": 0.6, "share_threshold": 1.0}
    model = cab_hf.apply_cab(make_tiny_model(), replace(SPARSE_CONFIG, **config_fields))
    short_ids, ids, mask, chunk_logits = (
        draw_token_ids(1, 190),
        draw_token_ids(2, 400),
        torch.ones(2, 400).long(),
        [],
    )
    ids[0, :190], ids[0, 190:], mask[0, 190:] = short_ids, 0, 0
    expected = compute_prefill_logits(model, [short_ids])
    hook_handle = model.lm_head.register_forward_hook(
        lambda module, args, output: chunk_logits.append(output)
    )
    generate_options = {"prefill_chunk_size": 64, "logits_to_keep": 0, **generate_options}
    generate_logits(model, ids, attention_mask=mask, **generate_options)
    hook_handle.remove()
    actual = torch.cat(chunk_logits, 1)[:1, :190]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


CALIBRATION_ORIGIN = {"model": "llama", "layers": 4, "heads": 6, "kv_heads": 2, "length": 300}


@pytest.mark.parametrize(
    "config_fields",
    [
        pytest.param({"dense_layers": (3,)}, id="dense-layers"),
        pytest.param({"predictor": "cascade", "anchors": (0, 2)}, id="cascade"),
        pytest.param({"origin": CALIBRATION_ORIGIN}, id="calibrated"),
        pytest.param({"dense_layers": (3,), "sparse_decode": True}, id="sparse-steps"),
    ],
)
def test_early_exit_drafts_do_not_change_tokens(config_fields):
    model = cab_hf.apply_cab(
        make_tiny_model(num_hidden_layers=4), replace(SPARSE_CONFIG, **config_fields)
    )
    ids = draw_token_ids(1, 200)
    generation_options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 4,
        **GREEDY_OPTIONS,
    }
    expected = model.generate(ids, **generation_options)
    assert torch.equal(model.generate(ids, assistant_early_exit=2, **generation_options), expected)
    assert model.config.num_hidden_layers == 4


def test_failed_draft_restores_the_model():
    model = cab_hf.apply_cab(make_tiny_model(num_hidden_layers=4), SPARSE_CONFIG)

    def raise_interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_logits(
            model,
            draw_token_ids(1, 40),
            4,
            assistant_early_exit=2,
            logits_processor=[raise_interrupt],
        )
    assert model.config.num_hidden_layers == 4


@pytest.mark.parametrize("step_kind", ["dense-steps", "sparse-steps"])
def test_last_chunk_of_one_token_is_not_a_decode_step(step_kind):
    config_fields = (
        {"sparse_decode": True, "decode_tokens": 128} if step_kind == "sparse-steps" else {}
    )
    assert_chunks_equal_one_call(641, 1, 128, **config_fields)


def make_repeated_prompt(prompt_length, seed):
    """Return a prompt that repeats its tokens, so that prompt lookup decoding finds drafts."""
    return draw_token_ids(1, max(8, prompt_length // 4), seed=seed).repeat(1, 5)[:, :prompt_length]


def count_changed_answers(num_prompts, **config_fields):
    """Generate for prompts with and without drafts; return the number of different answers.

    Drafts are made by prompt lookup, and by an assistant model.
    """
    model = cab_hf.apply_cab(make_tiny_model(), replace(SPARSE_CONFIG, **config_fields))
    assistant_model = make_tiny_model(num_hidden_layers=1)
    num_changed_answers = 0
    for seed in range(num_prompts):
        ids = make_repeated_prompt(150 + 7 * seed % 400, seed)
        generation_options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 12,
            **GREEDY_OPTIONS,
        }
        expected = model.generate(ids, **generation_options)
        for draft_options in (
            {"prompt_lookup_num_tokens": 5},
            {"assistant_model": assistant_model},
        ):
            num_changed_answers += not torch.equal(
                model.generate(ids, **generation_options, **draft_options), expected
            )
    return num_changed_answers


DECODE_FIELDS = [
    pytest.param({}, id="dense-steps"),
    pytest.param({"sparse_decode": True, "decode_tokens": 0.05}, id="sparse-steps"),
    pytest.param({"dense_tail_blocks": 0}, id="no-tail"),
]


@pytest.mark.parametrize("config_fields", DECODE_FIELDS)
@pytest.mark.parametrize("num_prompts", mark_slow_except([6, 200], 0))
def test_drafts_do_not_change_tokens(num_prompts, config_fields):
    assert count_changed_answers(num_prompts, **config_fields) == 0


@pytest.mark.parametrize(
    "generate_options",
    [
        pytest.param({"use_cache": False}, id="without-a-cache"),
        pytest.param({"num_beams": 2}, id="beams"),
        pytest.param({"cache_implementation": "static"}, id="static-cache"),
        pytest.param({"cache_implementation": "static", "prefill_chunk_size": 64}, id="both"),
    ],
)
def test_answer_is_dense_in_every_call_pattern(generate_options):
    model, ids = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG), draw_token_ids(1, 200)
    expected = generate_logits(model, ids, 4, **{"num_beams": generate_options.get("num_beams", 1)})
    actual = generate_logits(model, ids, 4, **{**generate_options, "disable_compile": True})
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class CallbackStreamer:
    """Streamer for `generate` that calls ``callback`` when a token is generated."""

    def __init__(self, callback):
        self._callback = callback

    def put(self, value):
        self._callback()

    def end(self):
        pass


def make_callback_options(callback_kind, callback):
    """Return options of `generate` with a callback that runs ``callback`` at every step."""
    if callback_kind == "processor":
        return {"logits_processor": [lambda _, scores: (callback(), scores)[1]]}
    if callback_kind == "criterion":
        criterion = torch.zeros(1, dtype=torch.bool)
        return {"stopping_criteria": [lambda *_, **__: (callback(), criterion)[1]]}
    if callback_kind == "prefix":
        return {"prefix_allowed_tokens_fn": lambda *_: (callback(), list(range(64)))[1]}
    return {"streamer": CallbackStreamer(callback)}


# by name: function that calls a model, from a callback inside `generate`
NESTED_CALL_FUNCTIONS = {
    "text": lambda model: compute_prefill_logits(model, [draw_token_ids(1, 200, seed=5)]),
    # this call has the same number of rows and tokens as the prompt of `generate`
    "alike": lambda model: compute_prefill_logits(model, [draw_token_ids(1, 300, seed=5)]),
    "padded": lambda model: compute_padded_logits(model, draw_token_ids(2, 420, seed=6)),
    "generate": lambda model: generate_logits(model, draw_token_ids(1, 260, seed=7)),
}


@torch.no_grad()
def compute_padded_logits(model, ids):
    """Return the logits of ``ids``; the first 100 tokens of row 0 are padding."""
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    return model(ids, attention_mask=mask, use_cache=False).logits


DRAFT_OPTIONS, NO_CACHE_OPTIONS = {"prompt_lookup_num_tokens": 4}, {"use_cache": False}


@pytest.mark.parametrize(
    ("callback_kind", "called_model", "generate_options"),
    [
        pytest.param("processor", "same", {}, id="processor"),
        pytest.param("processor", "other", {}, id="processor-of-another-model"),
        pytest.param("criterion", "same", {}, id="criterion"),
        pytest.param("prefix", "same", {}, id="prefix"),
        pytest.param("streamer", "same", NO_CACHE_OPTIONS, id="streamer-without-a-cache"),
        pytest.param("streamer", "same", DRAFT_OPTIONS, id="streamer-with-drafts"),
    ],
)
def test_nested_model_call_inside_generate_has_no_prompt_end(
    callback_kind, called_model, generate_options
):
    model = cab_hf.apply_cab(
        make_tiny_model(num_hidden_layers=2), replace(SPARSE_CONFIG, min_length=210)
    )
    ids = draw_token_ids(1, 300)
    is_same_model = called_model == "same"
    nested_model = model if is_same_model else cab_hf.apply_cab(copy.deepcopy(model))
    expected_nested = {
        call_name: nested_call(nested_model)
        for call_name, nested_call in NESTED_CALL_FUNCTIONS.items()
    }
    expected, nested_logits = generate_logits(model, ids, 2, **generate_options), []

    def record_nested_logits():
        nested_logits.append(
            {
                call_name: nested_call(nested_model)
                for call_name, nested_call in NESTED_CALL_FUNCTIONS.items()
            }
        )

    actual = generate_logits(
        model,
        ids,
        2,
        **generate_options,
        **make_callback_options(callback_kind, record_nested_logits),
    )
    torch.testing.assert_close(nested_logits[-1], expected_nested)
    torch.testing.assert_close(actual, expected)


def test_nested_model_call_inside_forward_has_no_prompt_end():
    model, nested_model = (cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG) for _ in range(2))
    expected, nested_logits = NESTED_CALL_FUNCTIONS["text"](nested_model), []
    hook_handle = model.model.layers[0].register_forward_hook(
        lambda *_: nested_logits.append(NESTED_CALL_FUNCTIONS["text"](nested_model))
    )
    generate_logits(model, draw_token_ids(1, 300))
    hook_handle.remove()
    torch.testing.assert_close(nested_logits[0], expected)


def test_repeated_generate_does_not_recompile():
    model, ids = (
        cab_hf.apply_cab(make_tiny_model(num_hidden_layers=1), SPARSE_CONFIG),
        draw_token_ids(1, 100),
    )
    graphs = []

    def record_graph(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=record_graph, dynamic=True)
    generate_logits(model, ids, 3)
    num_compiled_graphs = len(graphs)
    generate_logits(model, ids, 3)
    assert len(graphs) == num_compiled_graphs > 0


@pytest.mark.parametrize(
    ("prompt_kind", "generate_options"),
    [
        ("prompt", {}),
        ("prompt", NO_CACHE_OPTIONS),
        ("prompt", {"num_beams": 2}),
        ("p-tuning", {}),
        ("prefix", {}),
    ],
)
def test_virtual_tokens_are_part_of_the_prompt(prompt_kind, generate_options):
    peft = pytest.importorskip("peft")
    config_functions = {
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=40),
        "p-tuning": lambda: peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=40, encoder_hidden_size=16
        ),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=40),
    }
    torch.manual_seed(0)
    model = peft.get_peft_model(make_tiny_model(), config_functions[prompt_kind]()).eval()
    # row 0 has 220 tokens, so that it reaches min_length=250 only with 40 virtual tokens
    ids, mask = draw_token_ids(2, 300), torch.ones(2, 300).long()
    ids[0, :80], mask[0, :80] = 0, 0

    def generate_and_prefill_logits():
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, use_cache=prompt_kind == "prefix").logits[
                :, -1
            ]
        generated_logits = generate_logits(model, ids, attention_mask=mask, **generate_options)[
            :, 0
        ]
        return generated_logits[:: generate_options.get("num_beams", 1)], expected

    actual, expected = generate_and_prefill_logits()
    if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
        pytest.skip("generate of this transformers drops the prefix of this PEFT")
    cab_hf.apply_cab(model, replace(SPARSE_CONFIG, mass_threshold=0.1, min_length=250))
    actual, expected = generate_and_prefill_logits()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_guidance_has_a_separate_prompt_end():
    model, ids = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG), draw_token_ids(1, 200)
    guidance_options = {
        "guidance_scale": 2.0,
        "negative_prompt_ids": draw_token_ids(1, 150, seed=3),
    }
    conditional_logits, unconditional_logits = (
        compute_prefill_logits(model, [prompt_ids])[:, -1].log_softmax(-1)
        for prompt_ids in (ids, guidance_options["negative_prompt_ids"])
    )
    expected = 2 * conditional_logits - unconditional_logits
    output_options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **GREEDY_OPTIONS,
        **guidance_options,
        **output_options,
    )
    torch.testing.assert_close(output.scores[0], expected, rtol=1e-4, atol=1e-4)


def test_question_after_document_is_the_prompt_end():
    # a question of one token is part of the prompt: its dense tail, and not a decode step
    document, question = draw_token_ids(1, DOCUMENT_TOKENS), draw_token_ids(1, 1, seed=2)
    decode_fields = {"sparse_decode": True, "decode_tokens": 0.05}

    def generate_answer_logits(model, cache):
        append_tokens(model, document, cache)
        return generate_logits(model, torch.cat([document, question], 1), past_key_values=cache)

    sparse_decode_model = cab_hf.apply_cab(
        make_tiny_model(), replace(SPARSE_CONFIG, **decode_fields)
    )
    dense_decode_model = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)
    actual = generate_answer_logits(sparse_decode_model, cab_hf.index_cache(sparse_decode_model))
    expected = generate_answer_logits(dense_decode_model, make_cache(dense_decode_model, "dynamic"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
