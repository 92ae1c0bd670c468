"""Managers of continuous batching: switching attention while they run, and prefix sharing."""

import dataclasses

import pytest
from batching_cases import (
    GREEDY,
    LOW,
    PROMPTS,
    batching,
    generated,
    implementations,
    managed,
    on_cab,
)
from marks import SERVING
from tiny import FULL, tiny_model, tokens

import cab_hf

pytestmark = SERVING


def test_apply_cab_raises_under_manager_of_other_attention():
    model = tiny_model()
    manager = managed(model)
    # after a second manager has stopped, the first manager still runs
    managed(model).stop()
    try:
        with pytest.raises(NotImplementedError, match="continuous batching runs on LlamaForCausal"):
            cab_hf.apply_cab(model)
        assert model.config._attn_implementation == "sdpa"
    finally:
        manager.stop()
    assert cab_hf.apply_cab(model, min_length=0).config._attn_implementation == "cab"


@pytest.mark.parametrize(
    "switch",
    [lambda model: model.set_attn_implementation("sdpa"), cab_hf.remove_cab],
    ids=["set_attn_implementation", "remove_cab"],
)
def test_remove_cab_raises_under_running_manager(switch):
    model = on_cab(tiny_model())
    expected = generated(model, PROMPTS[:1])
    with model.continuous_batching_context_manager(
        GREEDY, continuous_batching_config=batching()
    ) as manager:
        with pytest.raises(NotImplementedError, match="runs on LlamaForCausalLM with 'cab'"):
            switch(model)
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=60).generated_tokens == expected[0]
    assert implementations(model) == ["cab", "cab"]
    cab_hf.remove_cab(model)
    assert implementations(model) == ["sdpa", "sdpa"]


@pytest.mark.parametrize("before", ["sdpa", "cab"])
def test_leaving_cab_block_raises_under_running_manager(before):
    model = tiny_model()
    expected = generated(model, PROMPTS[:1])
    if before == "cab":
        on_cab(model)
        with cab_hf.cab(model, FULL):
            manager = managed(model)
        manager.stop()
    else:
        with (
            pytest.raises(NotImplementedError, match="runs on LlamaForCausalLM with 'cab'"),
            cab_hf.cab(model, FULL),
        ):
            manager = managed(model)
        try:
            manager.add_request(PROMPTS[0])
            assert manager.get_result(timeout=60).generated_tokens == expected[0]
        finally:
            manager.stop()
    assert implementations(model) == ["cab", "cab"]
    cab_hf.remove_cab(model)
    assert implementations(model) == ["sdpa", "sdpa"]


def test_exception_inside_cab_block_is_not_replaced():
    model = tiny_model()
    with pytest.raises(KeyError, match="mine"), cab_hf.cab(model, FULL):
        manager = managed(model)
        raise KeyError("mine")
    try:
        assert implementations(model) == ["sdpa", "sdpa"]
        manager.add_request(PROMPTS[0])
        # before the first request, the manager remembers the settings at its start
        assert "was switched to 'sdpa' while" in manager.get_result(timeout=60).error
    finally:
        manager.stop()


LONG = [tokens(1, 730, seed=seed)[0].tolist() for seed in range(2)]
CHANGES = {
    "cab_config": lambda model: cab_hf.apply_cab(model, FULL),
    "cab_dense": lambda model: model.set_attn_implementation("cab_dense"),
}


def answered(manager, prompts):
    """Add all prompts to a manager, and return the generated tokens or the error of each prompt."""
    names = [manager.add_request(prompt) for prompt in prompts]
    answers = [manager.get_result(timeout=60) for _ in names]
    return [
        answer.error or answer.generated_tokens
        for answer in sorted(answers, key=lambda answer: names.index(answer.request_id))
    ]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_prefix_blocks_are_not_shared_across_settings(change):
    model = tiny_model()
    exact = generated(model, LONG)
    on_cab(model, LOW)
    sparse = generated(model, LONG)
    assert sparse != exact
    manager = managed(model)
    try:
        assert answered(manager, LONG) == sparse
        cache = manager.batch_processor.cache
        change(model)
        assert answered(manager, LONG) == exact
        # after eviction of cached blocks, all blocks are free
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1
    finally:
        manager.stop()


def test_persistent_manager_does_not_share_blocks_across_settings():
    model = tiny_model()
    exact = generated(model, LONG)
    for config in (LOW, FULL):
        on_cab(model, config)
        result = model.generate_batch(
            LONG, GREEDY, batching(), persistent_manager=True, warmup=False
        )
        answers = [answer.generated_tokens for answer in result.values()]
        assert (answers == exact) == (config is FULL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (CHANGES["cab_config"], "llama received another cab_config while"),
        (CHANGES["cab_dense"], "llama was switched from 'cab' to 'cab_dense' while"),
    ],
    ids=CHANGES,
)
def test_settings_are_fixed_during_a_request(change, message):
    manager = managed(model := on_cab(tiny_model(), LOW))
    try:
        manager.add_request(PROMPTS[0], max_new_tokens=2000, streaming=True, eos_token_id=-1)
        manager.get_result(timeout=60)
        change(model)
        # call get_result, because iteration over a manager stops with its thread and loses results
        manager._generation_thread.join(60)
        answers = iter(lambda: manager.get_result(timeout=0), None)
        errors = (answer.error for answer in answers if answer.error)
        assert message in next(errors)
    finally:
        manager.stop()


def test_chunks_end_at_query_blocks_of_current_settings():
    low = dataclasses.replace(LOW, dense_tail_blocks=0)
    model = on_cab(tiny_model(), low)
    with model.continuous_batching_context_manager(
        GREEDY, continuous_batching_config=batching(max_batch_tokens=96)
    ) as manager:
        for query_block in (32, 64):
            # for query_block 64, chunks of 96 tokens do not end at multiples of the query block
            on_cab(model, dataclasses.replace(low, query_block=query_block))
            for prompt in LONG:
                assert answered(manager, [prompt]) == generated(model, [prompt])


@pytest.mark.parametrize("first", ["cab", "sdpa"])
def test_manager_started_with_other_attention_raises(first):
    model, switches = tiny_model(), [on_cab, cab_hf.remove_cab]
    if first == "cab":
        on_cab(model)
        switches.reverse()
    manager = model.init_continuous_batching(GREEDY, batching())
    switches[0](model)
    with pytest.raises(NotImplementedError, match=f"made for LlamaForCausalLM with '{first}'"):
        manager.start()


def test_persistent_manager_of_other_attention_raises():
    model = on_cab(tiny_model())
    expected = generated(model, PROMPTS[:1])

    def generate():
        answers = model.generate_batch(PROMPTS[:1], GREEDY, batching(), persistent_manager=True)
        return [answer.generated_tokens for answer in answers.values()]

    assert generate() == generate() == expected
    cab_hf.remove_cab(model)
    with pytest.raises(NotImplementedError, match="destroy_cached_continuous_batching_manager()"):
        generate()
    model.destroy_cached_continuous_batching_manager()
    assert generate() == expected
