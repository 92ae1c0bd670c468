"""Managers of continuous batching: switching attention while they run, and prefix sharing."""

import dataclasses

import pytest
from batching_cases import (
    GREEDY_GENERATION_CONFIG,
    LOW_THRESHOLD_CONFIG,
    PROMPTS,
    apply_config,
    generate_one_by_one,
    list_attention_implementations,
    make_batching_config,
    start_manager,
)
from marks import NEEDS_SERVING
from tiny import FULL_BUDGET_CONFIG, draw_token_ids, make_tiny_model

import cab_hf

pytestmark = NEEDS_SERVING


def test_apply_cab_raises_under_manager_of_other_attention():
    model = make_tiny_model()
    manager = start_manager(model)
    # after a second manager has stopped, the first manager still runs
    start_manager(model).stop()
    try:
        with pytest.raises(NotImplementedError, match="continuous batching runs on LlamaForCausal"):
            cab_hf.apply_cab(model)
        assert model.config._attn_implementation == "sdpa"
    finally:
        manager.stop()
    assert cab_hf.apply_cab(model, min_length=0).config._attn_implementation == "cab"


@pytest.mark.parametrize(
    "switch_attention",
    [lambda model: model.set_attn_implementation("sdpa"), cab_hf.remove_cab],
    ids=["set_attn_implementation", "remove_cab"],
)
def test_remove_cab_raises_under_running_manager(switch_attention):
    model = apply_config(make_tiny_model())
    expected_tokens = generate_one_by_one(model, PROMPTS[:1])
    with model.continuous_batching_context_manager(
        GREEDY_GENERATION_CONFIG, continuous_batching_config=make_batching_config()
    ) as manager:
        with pytest.raises(NotImplementedError, match="runs on LlamaForCausalLM with 'cab'"):
            switch_attention(model)
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=60).generated_tokens == expected_tokens[0]
    assert list_attention_implementations(model) == ["cab", "cab"]
    cab_hf.remove_cab(model)
    assert list_attention_implementations(model) == ["sdpa", "sdpa"]


@pytest.mark.parametrize("initial_attention", ["sdpa", "cab"])
def test_leaving_cab_block_raises_under_running_manager(initial_attention):
    model = make_tiny_model()
    expected_tokens = generate_one_by_one(model, PROMPTS[:1])
    if initial_attention == "cab":
        apply_config(model)
        with cab_hf.cab(model, FULL_BUDGET_CONFIG):
            manager = start_manager(model)
        manager.stop()
    else:
        with (
            pytest.raises(NotImplementedError, match="runs on LlamaForCausalLM with 'cab'"),
            cab_hf.cab(model, FULL_BUDGET_CONFIG),
        ):
            manager = start_manager(model)
        try:
            manager.add_request(PROMPTS[0])
            assert manager.get_result(timeout=60).generated_tokens == expected_tokens[0]
        finally:
            manager.stop()
    assert list_attention_implementations(model) == ["cab", "cab"]
    cab_hf.remove_cab(model)
    assert list_attention_implementations(model) == ["sdpa", "sdpa"]


def test_exception_inside_cab_block_is_not_replaced():
    model = make_tiny_model()
    with pytest.raises(KeyError, match="mine"), cab_hf.cab(model, FULL_BUDGET_CONFIG):
        manager = start_manager(model)
        raise KeyError("mine")
    try:
        assert list_attention_implementations(model) == ["sdpa", "sdpa"]
        manager.add_request(PROMPTS[0])
        # before the first request, the manager remembers the settings at its start
        assert "was switched to 'sdpa' while" in manager.get_result(timeout=60).error
    finally:
        manager.stop()


LONG_PROMPTS = [draw_token_ids(1, 730, seed=prompt_seed)[0].tolist() for prompt_seed in range(2)]
SETTING_CHANGES = {
    "cab_config": lambda model: cab_hf.apply_cab(model, FULL_BUDGET_CONFIG),
    "cab_dense": lambda model: model.set_attn_implementation("cab_dense"),
}


def serve_prompts(manager, prompts):
    """Add all prompts to a manager, and return the generated tokens or the error of each prompt."""
    request_ids = [manager.add_request(prompt) for prompt in prompts]
    results = [manager.get_result(timeout=60) for _ in request_ids]
    return [
        result.error or result.generated_tokens
        for result in sorted(results, key=lambda answer: request_ids.index(answer.request_id))
    ]


@pytest.mark.parametrize("change_settings", SETTING_CHANGES.values(), ids=SETTING_CHANGES)
def test_prefix_blocks_are_not_shared_across_settings(change_settings):
    model = make_tiny_model()
    exact_answers = generate_one_by_one(model, LONG_PROMPTS)
    apply_config(model, LOW_THRESHOLD_CONFIG)
    sparse_answers = generate_one_by_one(model, LONG_PROMPTS)
    assert sparse_answers != exact_answers
    manager = start_manager(model)
    try:
        assert serve_prompts(manager, LONG_PROMPTS) == sparse_answers
        cache = manager.batch_processor.cache
        change_settings(model)
        assert serve_prompts(manager, LONG_PROMPTS) == exact_answers
        # after eviction of cached blocks, all blocks are free
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1
    finally:
        manager.stop()


def test_persistent_manager_does_not_share_blocks_across_settings():
    model = make_tiny_model()
    exact_answers = generate_one_by_one(model, LONG_PROMPTS)
    for config in (LOW_THRESHOLD_CONFIG, FULL_BUDGET_CONFIG):
        apply_config(model, config)
        results_by_request = model.generate_batch(
            LONG_PROMPTS,
            GREEDY_GENERATION_CONFIG,
            make_batching_config(),
            persistent_manager=True,
            warmup=False,
        )
        answers = [answer.generated_tokens for answer in results_by_request.values()]
        assert (answers == exact_answers) == (config is FULL_BUDGET_CONFIG)


@pytest.mark.parametrize(
    ("change_settings", "expected_error"),
    [
        (SETTING_CHANGES["cab_config"], "llama received another cab_config while"),
        (SETTING_CHANGES["cab_dense"], "llama was switched from 'cab' to 'cab_dense' while"),
    ],
    ids=SETTING_CHANGES,
)
def test_settings_are_fixed_during_a_request(change_settings, expected_error):
    manager = start_manager(model := apply_config(make_tiny_model(), LOW_THRESHOLD_CONFIG))
    try:
        manager.add_request(PROMPTS[0], max_new_tokens=2000, streaming=True, eos_token_id=-1)
        manager.get_result(timeout=60)
        change_settings(model)
        # call get_result, because iteration over a manager stops with its thread and loses results
        manager._generation_thread.join(60)
        results = iter(lambda: manager.get_result(timeout=0), None)
        error_messages = (result.error for result in results if result.error)
        assert expected_error in next(error_messages)
    finally:
        manager.stop()


def test_chunks_end_at_query_blocks_of_current_settings():
    config = dataclasses.replace(LOW_THRESHOLD_CONFIG, dense_tail_blocks=0)
    model = apply_config(make_tiny_model(), config)
    with model.continuous_batching_context_manager(
        GREEDY_GENERATION_CONFIG,
        continuous_batching_config=make_batching_config(max_batch_tokens=96),
    ) as manager:
        for query_block in (32, 64):
            # for query_block 64, chunks of 96 tokens do not end at multiples of the query block
            apply_config(model, dataclasses.replace(config, query_block=query_block))
            for prompt in LONG_PROMPTS:
                assert serve_prompts(manager, [prompt]) == generate_one_by_one(model, [prompt])


@pytest.mark.parametrize("initial_attention", ["cab", "sdpa"])
def test_manager_started_with_other_attention_raises(initial_attention):
    model, switch_functions = make_tiny_model(), [apply_config, cab_hf.remove_cab]
    if initial_attention == "cab":
        apply_config(model)
        switch_functions.reverse()
    manager = model.init_continuous_batching(GREEDY_GENERATION_CONFIG, make_batching_config())
    switch_functions[0](model)
    with pytest.raises(
        NotImplementedError, match=f"made for LlamaForCausalLM with '{initial_attention}'"
    ):
        manager.start()


def test_persistent_manager_of_other_attention_raises():
    model = apply_config(make_tiny_model())
    expected_tokens = generate_one_by_one(model, PROMPTS[:1])

    def generate_tokens():
        answers = model.generate_batch(
            PROMPTS[:1], GREEDY_GENERATION_CONFIG, make_batching_config(), persistent_manager=True
        )
        return [answer.generated_tokens for answer in answers.values()]

    assert generate_tokens() == generate_tokens() == expected_tokens
    cab_hf.remove_cab(model)
    with pytest.raises(NotImplementedError, match="destroy_cached_continuous_batching_manager()"):
        generate_tokens()
    model.destroy_cached_continuous_batching_manager()
    assert generate_tokens() == expected_tokens
