"""Turning CAB on and off, and what the model says of itself."""

import copy
import dataclasses
import io
from pathlib import Path

import pytest
import torch
import transformers
from tiny import FULL, SIZES, SPARSE, tiny_model, tokens
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from words import make_tokenizer

import cab_hf
from cab_hf import CabConfig, checks
from cab_hf.config import Origin
from cab_hf.eval.tiny_types import tiny_model as tiny_type
from cab_hf.patches import calibration as passes


@pytest.fixture
def model():
    return tiny_model()


# what has a number for every head
BY_HEAD = {"predictor": "frc"}
OWN = Origin("somebody's", layers=3, heads=6, kv_heads=2, length=4096)


def state(model):
    return model.config._attn_implementation, getattr(model.config, "cab_config", None)


def test_apply_is_idempotent_and_remove_puts_back(model):
    before = state(model)
    assert cab_hf.apply_cab(model, SPARSE) is model
    cab_hf.apply_cab(model, mass_threshold=0.05)
    assert model.config.cab_config["mass_threshold"] == 0.05
    assert model.config.cab_config["key_block"] == SPARSE.key_block
    assert cab_hf.remove_cab(model) is model
    assert state(model) == before
    cab_hf.remove_cab(model)
    assert state(model) == before


def test_a_block_that_raises_leaves_what_it_found(model):
    cab_hf.apply_cab(model, FULL)
    with pytest.raises(RuntimeError, match="from inside"), cab_hf.cab(model, mass_threshold=0.08):
        assert model.config.cab_config["mass_threshold"] == 0.08
        raise RuntimeError("from inside")
    assert CabConfig.from_dict(model.config.cab_config) == FULL
    cab_hf.remove_cab(model)
    assert state(model) == ("sdpa", None)


def wrapped_in_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


def through_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "applied_as",
    [
        lambda m: copy.deepcopy(cab_hf.apply_cab(m, SPARSE)),
        lambda m: through_pickle(cab_hf.apply_cab(m, SPARSE)),
        lambda m: copy.deepcopy(wrapped_in_lora(cab_hf.apply_cab(m, SPARSE))),
        lambda m: wrapped_in_lora(cab_hf.apply_cab(m, SPARSE)).merge_and_unload(),
        lambda m: cab_hf.apply_cab(wrapped_in_lora(m), SPARSE).merge_and_unload(),
        lambda m: cab_hf.apply_cab(wrapped_in_lora(m), SPARSE).get_base_model(),
        lambda m: torch.compile(cab_hf.apply_cab(m, SPARSE)),
    ],
    ids=["copy", "pickle", "copy-adapter", "merged", "adapter-merged", "inside", "compiled"],
)
def test_what_was_there_before_goes_where_the_model_goes(model, applied_as):
    before = state(model)
    moved = applied_as(model)
    assert state(moved)[0] == "cab"
    assert "layers 0-2: sparse" in cab_hf.describe(moved, tokens=200)
    assert [row["layer"] for row in cab_hf.stats(moved)] == [0, 1, 2]
    cab_hf.remove_cab(moved)
    assert state(moved) == before


def test_a_copy_is_switched_alone(model):
    cab_hf.apply_cab(model, SPARSE)
    with cab_hf.cab(model, mass_threshold=0.05):
        other = copy.deepcopy(model)
    cab_hf.remove_cab(model)
    assert state(model) == ("sdpa", None) and state(other)[1]["mass_threshold"] == 0.05
    cab_hf.remove_cab(other)
    assert state(other) == ("sdpa", None)


def test_a_saved_config_has_the_settings_and_nothing_else_of_ours(model, tmp_path):
    plain = model.config.to_dict()
    cab_hf.apply_cab(model, SPARSE).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_dict().keys() == plain.keys() | {"cab_config", "architectures"}
    before = state(loaded)
    assert before[0] == "sdpa" and CabConfig.from_dict(before[1]) == SPARSE
    # nobody has applied it to what was loaded
    assert state(cab_hf.remove_cab(loaded)) == before
    assert state(cab_hf.remove_cab(cab_hf.apply_cab(loaded, mass_threshold=0.08))) == before


@pytest.mark.parametrize("applied", [False, True], ids=["plain", "applied"])
@pytest.mark.parametrize("first_to_end", [0, 1, 2])
def test_blocks_may_end_in_any_order(model, first_to_end, applied):
    if applied:
        cab_hf.apply_cab(model, FULL)
    before = state(model)
    blocks = [cab_hf.cab(model, mass_threshold=each) for each in (0.5, 0.6, 0.7)]
    for block in blocks:
        block.__enter__()
    blocks.pop(first_to_end).__exit__(None, None, None)
    # the block that began last of those still open is the one that holds
    assert state(model)[1]["mass_threshold"] == (0.6 if first_to_end == 2 else 0.7)
    for block in blocks:
        block.__exit__(None, None, None)
    assert state(model) == before
    cab_hf.remove_cab(model)
    assert state(model) == ("sdpa", None)


INSIDE = {
    "nothing": lambda model: None,
    "remove": lambda model: state(cab_hf.remove_cab(model)) == ("sdpa", None) or 1 / 0,
    "apply": lambda model: cab_hf.apply_cab(model, mass_threshold=0.08),
    "again": lambda model: cab_hf.apply_cab(cab_hf.remove_cab(model), mass_threshold=0.08),
    "eager": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("applied", [False, True], ids=["plain", "applied"])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_a_block_leaves_what_it_found_whatever_happens_inside(model, inside, applied):
    if applied:
        cab_hf.apply_cab(model, FULL)
    before = state(model)
    with cab_hf.cab(model, mass_threshold=0.08):
        assert model.config._attn_implementation == "cab"
        inside(model)
    assert state(model) == before
    cab_hf.remove_cab(model)
    assert state(model) == ("sdpa", None)


def test_a_block_restores_settings_that_were_put_there_by_hand(model):
    cab_hf.apply_cab(model, FULL)
    model.config.cab_config = SPARSE.to_dict()
    model.set_attn_implementation("cab_dense")
    with cab_hf.cab(model, mass_threshold=0.08):
        pass
    assert state(model) == ("cab_dense", SPARSE.to_dict())


def tiny_llava(**implementations):
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=16,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**SIZES),
        image_token_index=5,
        attn_implementation=implementations or None,
    )
    return LlavaForConditionalGeneration(config).eval()


def implementations(model):
    config = model.config
    return {
        name: part._attn_implementation
        for name, part in (("", config), ("v", config.vision_config), ("t", config.text_config))
    }


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"vision_config": "eager"},
        {"text_config": "eager"},
        {"": "eager", "text_config": "sdpa"},
    ],
)
def test_only_the_text_of_a_vision_language_model_is_switched(message):
    model = tiny_llava(**message)
    before = implementations(model)
    ids = tokens(1, 150).clamp(min=6)
    ids[:, 3:7] = 5
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, pixel_values=pixels).logits
        cab_hf.apply_cab(model, FULL)
        assert implementations(model) == before | {"t": "cab"}
        got = model(input_ids=ids, pixel_values=pixels).logits
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert [row["density"] for row in cab_hf.stats(model)] == [1.0, 1.0, 1.0]
    cab_hf.remove_cab(model)
    assert implementations(model) == before
    with cab_hf.cab(model, FULL):
        assert implementations(model) == before | {"t": "cab"}
    assert implementations(model) == before


@pytest.mark.parametrize("message", [{}, {"text_config": "cab"}], ids=["sdpa", "text-cab"])
def test_only_the_text_of_a_vision_language_model_is_calibrated(message, monkeypatch):
    monkeypatch.setattr(passes, "KEYS", 2)
    model = tiny_llava(**message)
    model.resize_token_embeddings(400)
    given = cab_hf.calibrate(
        model, make_tokenizer(), "So it goes.", 0.7, config=SPARSE, length=300, documents=1
    )
    assert implementations(model) == {"": "sdpa", "v": "sdpa", "t": "cab"}
    assert model.config.text_config.cab_config == given.to_dict()
    assert model.config.cab_config is model.config.vision_config.cab_config is None


def test_two_models_of_one_config_do_not_share_the_switch():
    config = LlamaConfig(**SIZES)
    a, b = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    ids = tokens(1, 200)
    with torch.no_grad():
        expected = b(ids).logits
        cab_hf.apply_cab(a, SPARSE)
        assert state(b) == ("sdpa", None) == (config._attn_implementation, None)
        assert torch.equal(b(ids).logits, expected)
        cab_hf.apply_cab(b, FULL)
        assert state(a)[1]["mass_threshold"] == SPARSE.mass_threshold
        cab_hf.remove_cab(a)
        assert state(b)[1]["mass_threshold"] == FULL.mass_threshold
    with cab_hf.cab(b, mass_threshold=0.08):
        born_later = LlamaForCausalLM(b.config)
    cab_hf.remove_cab(b)
    assert state(born_later)[1]["mass_threshold"] == 0.08


def no_attention_by_name():
    return FalconForCausalLM(
        FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    )


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), {}, "no transformers model"),
        (no_attention_by_name, {}, "keeps attn_implementation='sdpa'"),
        (tiny_model, {"mass_threshold": 7}, "mass_threshold"),
        (tiny_llava, BY_HEAD | {"sparsity": [[0.5] * 5] * 3}, "sparsity"),
    ],
    ids=["no-model", "falcon", "setting", "table"],
)
def test_what_cannot_be_switched_is_refused_and_left_as_it_is(build, options, message):
    model = build()
    config = getattr(model, "config", None)
    before = copy.deepcopy(config)
    with pytest.raises(ValueError, match=message):
        cab_hf.apply_cab(model, **options)
    with pytest.raises(ValueError, match=message), cab_hf.cab(model, **options):
        pass
    assert getattr(model, "config", None) == before
    assert cab_hf.remove_cab(model) is model and getattr(model, "config", None) == before


def test_stats_add_up_until_reset(model):
    cab_hf.apply_cab(model, SPARSE, dense_layers=(1,))
    assert cab_hf.stats(model) == [{"layer": i, "density": None} for i in range(3)]
    with torch.no_grad():
        model(tokens(1, 300))
        once = cab_hf.stats(model)
        model(tokens(1, 300))
    assert cab_hf.stats(model) == once
    assert once[1]["density"] is None
    assert all(0 < once[i]["density"] < 1 for i in (0, 2))
    cab_hf.stats(model, reset=True)
    assert cab_hf.stats(model)[0]["density"] is None


def test_describe_says_what_runs_where_and_why(model):
    assert "'sdpa'" in cab_hf.describe(model)
    cab_hf.apply_cab(model, SPARSE, dense_layers=(0,), min_length=100)
    lines = cab_hf.describe(model, tokens=500).splitlines()
    assert "mass_threshold 0.08" in lines[0] and "32 x 16" in lines[0] and "500 tokens" in lines[0]
    assert lines[1] == "  layer 0: dense, in dense_layers"
    assert lines[2] == "  layers 1-2: sparse, engine reference"
    assert "shorter than min_length=100" in cab_hf.describe(model, tokens=99)
    cab_hf.apply_cab(model, sampled_one_in=16, origin=OWN)
    trained = cab_hf.describe(model, tokens=500, training=True)
    assert "sparse, engine reference, 1 in 16 of the other blocks sampled" in trained
    assert "(calibrated for somebody's at 4,096 tokens):" in trained
    assert "sampled" not in cab_hf.describe(model, tokens=500, training=False)
    sliding = cab_hf.apply_cab(tiny_model("qwen3-some-sliding"), SPARSE)
    assert "layers 1-2: dense, sliding window of 40 tokens" in cab_hf.describe(sliding)


def test_describe_says_which_layer_chooses_for_which(model):
    cab_hf.apply_cab(model, SPARSE, predictor="cascade", anchors=(0, 2))
    lines = cab_hf.describe(model, tokens=500).splitlines()
    assert "predictor cascade (2 anchors, " in lines[0]
    assert lines[1:] == [
        "  layer 0: sparse, engine reference, an anchor",
        "  layer 1: sparse, engine reference, the blocks of layer 0",
        "  layer 2: sparse, engine reference, an anchor",
        "  decode: dense",
        "  generate_batch: each sequence by itself, decode dense",
    ]


def test_describe_finds_layers_that_are_causal_by_call_alone():
    config = transformers.CLIPTextConfig(
        **SIZES | {"num_hidden_layers": 2, "eos_token_id": 2}, projection_dim=48
    )
    model = transformers.CLIPTextModel(config).eval()
    model.config.cab_config = FULL
    model.set_attn_implementation("cab")
    assert "layers 0-1: sparse" in cab_hf.describe(model, tokens=100)
    with torch.no_grad():
        model(tokens(1, 100))
    assert cab_hf.stats(model) == [{"layer": i, "density": 1.0} for i in range(2)]


@pytest.mark.parametrize("nothing", [None, "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize(
    "function", ["apply_cab", "describe", "stats", "index_cache", "remove_cab", "calibrate"]
)
def test_what_is_no_model_is_refused(function, nothing):
    more = ("a tokenizer",) if function == "calibrate" else ()
    with pytest.raises(ValueError, match="model is "):
        getattr(cab_hf, function)(nothing, *more)


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_describe_knows_layers_without_an_index(name):
    model = cab_hf.apply_cab(tiny_type(name), FULL)
    lines = cab_hf.describe(model, tokens=100).splitlines()
    assert lines[1].startswith("  layers that are in several places: sparse, ")
    with pytest.raises(ValueError, match="sparsity is a table of layers, and this layer has no"):
        cab_hf.apply_cab(model, **BY_HEAD, sparsity=((0.5,) * 4,) * 4)(tokens(1, 100))


def test_describe_says_what_will_be_refused_layer_by_layer():
    config = transformers.MiMoV2FlashConfig(
        **SIZES | {"num_hidden_layers": 2}, layer_types=["full_attention", "sliding_attention"]
    )
    with torch.device("meta"):
        model = transformers.MiMoV2FlashForCausalLM(config)
    model.set_attn_implementation("cab")
    lines = cab_hf.describe(model, tokens=200).splitlines()[1:]
    assert lines[0] == "  layer 0: dense, input shorter than min_length=16384"
    assert lines[1] == "  layer 1: refused, sink logits"


def test_describe_agrees_with_what_runs(model):
    cab_hf.apply_cab(model, SPARSE, dense_layers=(2,))
    with torch.no_grad():
        model(tokens(1, 200))
    ran = [row["density"] is not None for row in cab_hf.stats(model)]
    text = cab_hf.describe(model, tokens=200)
    assert ran == [True, True, False] and "layers 0-1: sparse" in text and "layer 2: dense" in text


# --- settings as they are typed


@pytest.mark.parametrize("kind", [dict, str, Path])
def test_settings_may_be_a_dict_or_a_file(model, tmp_path, kind):
    chosen = dataclasses.replace(SPARSE, dense_layers=(1,))
    chosen.save(tmp_path / "own.json")
    fields = chosen.to_dict() if kind is dict else kind(tmp_path / "own.json")
    with cab_hf.cab(model, fields, mass_threshold=0.05):
        assert state(model) == ("cab", dataclasses.replace(chosen, mass_threshold=0.05).to_dict())
    cab_hf.apply_cab(model, fields)
    assert state(model) == ("cab", chosen.to_dict())
    # what is saved with a model needs no other file
    options = {"attn_implementation": "cab", "cab_config": fields}
    assert state(loaded(tiny_model(), tmp_path / "model", **options)) == ("cab", chosen.to_dict())
    # a dict is all there is
    cab_hf.apply_cab(model, {"mass_threshold": 0.08})
    assert state(model)[1] == CabConfig(mass_threshold=0.08).to_dict()


def loaded(model, folder, **message):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **message)


DEEP = BY_HEAD | {"sparsity": [[0.5] * 6] * 30}
HEAD_MAP = {"predictor": "cascade", "anchors": [0], "head_map": [[0] * 9] * 3}
SHAPES = r"for somebody's \(4 layers, 6 heads, 2 KV heads\), and \w+ has 3 layers, 6 heads, 2 KV"
MISFITS = [
    (DEEP, "sparsity has 30 layers of 6 heads, and this model has 3"),
    (BY_HEAD | {"sparsity": [[0.1] * 6] * 2}, "sparsity has 2 layers of 6 heads, and this model"),
    (BY_HEAD | {"sparsity": [[0.5] * 9] * 3}, "9 heads, and this model has 3 layers of 6"),
    (HEAD_MAP, "head_map has 3 layers of 9 heads"),
    ({"dense_layers": [3]}, "dense_layers has 3; this model has layers 0 to 2"),
    ({"origin": OWN._replace(layers=4)._asdict()}, SHAPES),
    ({"origin": OWN._replace(kv_heads=6)._asdict()}, "3 layers, 6 heads, 6 KV heads"),
    ({"mass_treshold": 0.5}, "CabConfig has no field 'mass_treshold'"),
    ({"mass_threshold": "much"}, "CabConfig.mass_threshold is 'much'; it must be"),
    ({"predictor": "row"}, "predictor"),
]


def meet(model, folder, config, way):
    """Give a model settings in one of the ways that there are."""
    if way == "apply":
        cab_hf.apply_cab(model, config)
    elif way == "block":
        with cab_hf.cab(model, config):
            pass
    elif way == "load":
        loaded(model, folder, attn_implementation="cab", cab_config=config)
    else:
        model.config.cab_config = config
        if way == "save":
            loaded(model, folder, attn_implementation="cab")
        elif way == "build":
            model.config._attn_implementation = "cab"
            type(model)(model.config)
        elif way == "switch":
            model.set_attn_implementation("cab")


@pytest.mark.parametrize("way", ["apply", "block", "load", "save", "build", "switch"])
@pytest.mark.parametrize(("config", "sentence"), MISFITS)
def test_settings_of_another_model_are_refused_where_they_meet_one(
    model, tmp_path, way, config, sentence
):
    with pytest.raises(ValueError, match=sentence):
        meet(model, tmp_path, config, way)


def read_compiled(model, length=40):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend="eager")(tokens(1, length))


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (cab_hf.describe, ValueError),
        (lambda model: model(tokens(1, 40)), ValueError),
        (read_compiled, Exception),
    ],
)
def test_the_calibration_of_another_model_is_refused_where_it_is_set_by_hand(model, use, error):
    model.set_attn_implementation("cab")
    model.config.cab_config = dataclasses.replace(SPARSE, origin=OWN._replace(layers=4))
    with pytest.raises(error, match="was calibrated for somebody's"):
        use(model)


def test_settings_that_do_not_fit_are_replaced_by_some_that_do(model):
    model.config.cab_config = DEEP
    cab_hf.apply_cab(model, SPARSE)
    assert state(model) == ("cab", SPARSE.to_dict())
    cab_hf.remove_cab(model)
    assert state(model) == ("sdpa", DEEP)


def test_saved_settings_that_nothing_uses_are_named_once(model, tmp_path, nothing_said, recwarn):
    model.config.cab_config = SPARSE.to_dict()

    def said():
        return [str(each.message) for each in recwarn if "has a cab_config" in str(each.message)]

    for asked in ("cab", "cab_dense", "sdpa", "eager"):
        loaded(model, tmp_path / "own", attn_implementation=asked)
    assert not said()
    for _ in range(2):
        loaded(model, tmp_path / "own")
    (sentence,) = said()
    assert sentence.startswith("The config of own has a cab_config, which nothing uses")
    assert "attn_implementation='cab'" in sentence


@pytest.mark.parametrize("unsaid", ["layers", "heads", "kv_heads"])
def test_what_a_calibration_does_not_say_is_not_compared(model, unsaid):
    cab_hf.apply_cab(model, SPARSE, origin=OWN._replace(**{unsaid: None}))


# --- a model whose positions end before any prompt is long enough


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())


def switched_on(model, min_length):
    cab_hf.apply_cab(model, min_length=min_length)


def switched_on_for_a_block(model, min_length):
    with cab_hf.cab(model, min_length=min_length):
        pass


def read_as_it_was_loaded(model, min_length):
    model.config.cab_config = {"min_length": min_length}
    model.set_attn_implementation("cab")
    with torch.no_grad():
        model(tokens(1, 40))


WAYS_ON = [switched_on, switched_on_for_a_block, read_as_it_was_loaded]


def said(recorded):
    return [str(each.message) for each in recorded if "positions" in str(each.message)]


@pytest.mark.parametrize("turn_on", WAYS_ON)
def test_a_model_that_can_never_be_sparse_says_so_once(model, nothing_said, recwarn, turn_on):
    turn_on(model, 8192)
    (sentence,) = said(recwarn)
    assert sentence.startswith("llama has 2,048 positions and min_length is 8,192, so 'cab' ")
    assert 'set cab_config={"min_length": 1024}' in sentence
    # whatever follows with the same model
    for again in WAYS_ON:
        again(model, 8192)
    assert len(said(recwarn)) == 1
    # other settings are other news
    turn_on(model, 4096)
    assert len(said(recwarn)) == 2


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}


@pytest.mark.parametrize("turn_on", WAYS_ON)
@pytest.mark.parametrize(("changes", "min_length"), [({}, 2048), (LINEAR, 8192)])
def test_a_model_that_can_be_sparse_says_nothing(
    nothing_said, recwarn, turn_on, changes, min_length
):
    turn_on(tiny_model(**changes), min_length)
    assert not said(recwarn)


def generated(model, length, **message):
    return model.generate(tokens(1, length), max_new_tokens=3, do_sample=False, **message)


def read_in_chunks(model, length):
    model.set_attn_implementation("cab_dense")
    cache = model(tokens(1, length)).past_key_values
    model.set_attn_implementation("cab")
    model(tokens(1, length), past_key_values=cache)


def read_packed(model, length):
    model(tokens(1, 2 * length), position_ids=torch.arange(length).repeat(2)[None])


@pytest.mark.parametrize(
    ("read", "fields", "news"),
    [
        (lambda model, length: model(tokens(1, length)), {}, True),
        (generated, {}, True),
        (read_packed, {}, True),
        (generated, {"min_length": 16383}, False),
        (generated, {"min_length": 0}, False),
        (lambda model, length: model(tokens(1, 1)), {}, False),
        (read_in_chunks, {}, False),
        (read_compiled, {}, False),
    ],
)
def test_a_prompt_too_short_to_be_sparse_is_news_once(nothing_said, recwarn, read, fields, news):
    model = tiny_model(max_position_embeddings=32768, num_hidden_layers=1)
    cab_hf.apply_cab(model, fields)
    with torch.no_grad():
        for _ in range(1 + news):
            read(model, 50)
    sentences = [str(each.message) for each in recwarn if "min_length" in str(each.message)]
    assert len(sentences) == news
    for sentence in sentences:
        assert sentence.startswith("llama reads 50 tokens and min_length is 16,384, so 'cab' ")


def test_nothing_is_said_of_exact_attention_or_while_it_is_compiled(model, nothing_said, recwarn):
    model.set_attn_implementation("cab_dense")
    with torch.no_grad():
        model(tokens(1, 40))
    model.set_attn_implementation("cab")
    read_compiled(model)
    assert not said(recwarn)


def checkpointed(implementation, reentrant):
    model = tiny_model(attn_implementation=implementation, num_hidden_layers=2).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def loss_of(model, **mask):
    ids = tokens(1, 160)
    return model(input_ids=ids, labels=ids, use_cache=False, **mask).loss


def gradient(model):
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def gradient_inside(model):
    """Where the backward pass stands in the block."""
    with cab_hf.cab(model, SPARSE):
        loss_of(model).backward()
    inside = gradient(model)
    model.zero_grad()
    return inside


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "cab", "cab_dense"])
def test_layers_computed_again_behind_the_block_are_refused(implementation, reentrant):
    model = checkpointed(implementation, reentrant)
    inside = gradient_inside(model)
    with cab_hf.cab(model, SPARSE):
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="Call backward inside the bl"):
        loss.backward()
    model.zero_grad()
    # what is refused once leaves nothing behind, and the same settings are no other ones
    cab_hf.apply_cab(model, SPARSE)
    loss = loss_of(model)
    cab_hf.apply_cab(model, SPARSE)
    loss.backward()
    assert torch.equal(gradient(model), inside)
    # without checkpointing a backward pass may come behind the block
    model.zero_grad()
    model.gradient_checkpointing_disable()
    loss = loss_of(model)
    cab_hf.remove_cab(model)
    loss.backward()
    assert torch.equal(gradient(model), inside)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    cab_hf.apply_cab(model, SPARSE)
    loss = loss_of(model)
    cab_hf.remove_cab(model)
    with pytest.raises(RuntimeError, match="remove_cab called"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("implementation", "padded"),
    [("sdpa", False), ("sdpa", True), ("cab", False), ("cab_dense", False)],
)
def test_layers_computed_again_in_a_block_that_began_later_are_refused(
    implementation, padded, reentrant
):
    model = checkpointed(implementation, reentrant)
    with cab_hf.cab(model, SPARSE):
        # an earlier step, which is none of the later one's business
        loss_of(model).backward()
    mask = {"attention_mask": (torch.arange(160) > 4)[None].long()} if padded else {}
    loss = loss_of(model, **mask)
    with (
        cab_hf.cab(model, SPARSE),
        pytest.raises(RuntimeError, match="was left or entered in between"),
    ):
        loss.backward()
