"""A merged model equals its base with the adapter; merging into another base raises an error."""

import json
import shutil
import warnings

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import SPARSE, tiny_model, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer
from words import make_tokenizer, save_llama

from cab_hf.experiment.models import BASE_FILE
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import merge as merging
from cab_hf.finetune.adapters import WEIGHTS_FILE, initialise_adapter
from cab_hf.finetune.merge import MergeSettings, main, merge
from cab_hf.finetune.models import load_model, save_adapter, with_lora

LINEAR_TARGETS = ("q_proj", "v_proj", "down_proj")
LONG_ROPE = {"length": 4096, "rope": "yarn"}
ADAPTER_CONFIG_FILE = "adapter_config.json"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return two model folders by name: "llama", and "tied" with tied embeddings."""
    folder, tokenizer = tmp_path_factory.mktemp("bases"), make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 1}
    tiny_model(tie_word_embeddings=True, **sizes).save_pretrained(folder / "tied")
    tokenizer.save_pretrained(folder / "tied")
    return {"llama": save_llama(folder / "llama"), "tied": folder / "tied"}


def save_trained_adapter(
    base, folder, targets=LINEAR_TARGETS, dtype="float32", rope=LONG_ROPE, **options
):
    """Save a random adapter of ``base`` in ``folder``; return the adapted model."""
    model, tokenizer = load_model(str(base), cab_config=SPARSE, dtype=dtype, **rope)
    torch.manual_seed(1)
    peft_model = with_lora(model, targets, 4, 8.0, **options)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_adapter(peft_model, tokenizer, folder)
    return peft_model


def merge_adapter(tmp_path, **options):
    """Merge the adapter in the folder ``adapter``; save the model to the folder ``merged``.

    Returns the logit difference that `merge` measures.
    """
    folders = {"adapter": str(tmp_path / "adapter"), "out": str(tmp_path / "merged")}
    return merge(MergeSettings(**folders, **options))


def load_saved_model(folder, **options):
    """Return the model in ``folder`` in eval mode, with the dtype of its saved weights."""
    options |= {"dtype": "auto", "trust_remote_code": False}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize(
    ("base", "options"),
    [
        *(("llama", {}), ("llama", {"targets": "all-linear"})),
        *(("llama", {"targets": (*LINEAR_TARGETS, "lm_head")}), ("llama", {"norms": True})),
        *(("tied", {}), ("llama", {"dtype": "bfloat16"})),
    ],
    ids=["lora", "all linear", "head", "norms", "tied", "bfloat16"],
)
def test_merged_model_equals_base_with_adapter(bases, tmp_path, base, options):
    adapted = save_trained_adapter(bases[base], tmp_path / "adapter", **options)
    difference = merge_adapter(tmp_path, dtype=options.get("dtype", ""))
    merged, ids = load_saved_model(tmp_path / "merged"), tokens(2, 90)
    adapted.set_attn_implementation("sdpa")
    expected, base_logits = (
        adapted(ids).logits.float(),
        load_saved_model(bases[base])(ids).logits.float(),
    )
    actual = merged(ids).logits.float()
    tolerance = 1e-4 if merged.dtype == torch.float32 else 0.1
    assert difference < tolerance * expected.abs().max()
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()
    # check of the test: the adapter changes the logits by more than the tolerance
    assert (base_logits - expected).abs().max() > 3 * tolerance * expected.abs().max()
    assert merged.config.rope_parameters["factor"] == 2.0
    assert merged.config.tie_word_embeddings == (base == "tied")
    assert merged.num_parameters() == load_saved_model(bases[base]).num_parameters()
    assert merged.config.cab_config == SPARSE.to_dict()
    assert sorted(x.suffix for x in (tmp_path / "merged").glob("model*")) == [".safetensors"]


def test_merged_model_loads_with_from_pretrained(bases, tmp_path, capsys):
    adapted = save_trained_adapter(bases["llama"], tmp_path / "adapter")
    words = [str(tmp_path / "adapter"), str(tmp_path / "merged")]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cab_config")
        assert main(words) == 0
    assert "merged; the largest difference of a logit is" in capsys.readouterr().out
    assert main(words) == 2 and "out must be a new folder, got " in capsys.readouterr().err
    merged, ids = load_saved_model(tmp_path / "merged", attn_implementation="cab"), tokens(1, 300)
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-3, atol=1e-3)
    merged.set_attn_implementation("sdpa")
    assert (merged(ids).logits - adapted(ids).logits).abs().max() > 0.01
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged", trust_remote_code=False)
    assert tokenizer("It rained.").input_ids == make_tokenizer()("It rained.").input_ids


# by name: arguments of PEFT's `LoraConfig`
LORA_OPTIONS = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "expression": {"target_modules": ".*(q_proj|lm_head)"},
    "embeddings trained": {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "head trained": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("base", ["llama", "tied"])
@pytest.mark.parametrize("options", LORA_OPTIONS.values(), ids=LORA_OPTIONS)
def test_head_and_embeddings_saved_by_peft_are_merged(bases, tmp_path, base, options):
    """Merge adapters whose files also contain base weights, which PEFT saves for these layers."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    adapted = get_peft_model(load_saved_model(bases[base]), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path)
    merged = load_saved_model(tmp_path / "merged")
    expected = adapted(tokens(1, 50)).logits
    torch.testing.assert_close(merged(tokens(1, 50)).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_base_changed", [False, True])
def test_run_starts_from_head_saved_by_peft(bases, tmp_path, is_base_changed):
    adapted, new_model = (
        with_lora(load_model(str(bases["llama"]), dtype="float32")[0], ("lm_head",), 4, 8.0)
        for _ in range(2)
    )
    adapted.get_base_model().lm_head.base_layer.weight.data += is_base_changed
    adapted.save_pretrained(tmp_path / "adapter")
    if not is_base_changed:
        initialise_adapter(new_model, tmp_path / "adapter")
        return
    with pytest.raises(UsageError, match="lm_head.base_layer.weight differs in the adapter"):
        initialise_adapter(new_model, tmp_path / "adapter")


def update_json_fields(file, **fields):
    """Overwrite ``fields`` in the JSON file ``file``."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def llama(bases, tmp_path):
    """Return the folder of an adapter of the base "llama", trained without RoPE scaling."""
    save_trained_adapter(bases["llama"], tmp_path / "adapter", rope={})
    return tmp_path / "adapter"


def test_adapter_without_base_file_is_checked_by_name(bases, llama, tmp_path):
    # adapters that PEFT saved have no file with the hash of the base
    (llama / BASE_FILE).unlink()
    update_json_fields(llama / ADAPTER_CONFIG_FILE, base_model_name_or_path="someone/llama")
    with pytest.raises(UsageError, match="was trained in 'someone/llama', and base is 'tied'"):
        merge_adapter(tmp_path, base=str(bases["tied"]))
    update_json_fields(llama / ADAPTER_CONFIG_FILE, base_model_name_or_path=str(bases["llama"]))
    merge_adapter(tmp_path)


def test_base_is_identified_by_content(bases, llama, tmp_path):
    copied_base = shutil.copytree(bases["llama"], tmp_path / "elsewhere" / "llama")
    merge_adapter(tmp_path, base=str(copied_base))
    weights = load_file(copied_base / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, copied_base / "model.safetensors", {"format": "pt"})
    shutil.rmtree(tmp_path / "merged")
    message = "adapter was trained in a model with SHA-256 [0-9a-f]{12}, and base 'llama' has"
    with pytest.raises(UsageError, match=message):
        merge_adapter(tmp_path, base=str(copied_base))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"hidden_size": 96}, "is of shape .* in the adapter and of shape"),
        ({"num_hidden_layers": 1}, "layers.1.* is .* and missing in the"),
        ({"num_hidden_layers": 3}, "layers.2.* is missing in the adapter"),
    ],
)
def test_adapter_of_other_shapes_raises(llama, tmp_path, sizes, sentence):
    other = tmp_path / "llama"
    tiny_model(**{"num_hidden_layers": 2, "vocab_size": 250, **sizes}).save_pretrained(other)
    make_tokenizer().save_pretrained(other)
    (llama / BASE_FILE).unlink()
    with pytest.raises(UsageError, match=f"does not fit base 'llama': .*{sentence}"):
        merge_adapter(tmp_path, base=str(other))


# (file, damage): None truncates the file, bytes replace its content, and a dict overwrites fields
# of the JSON file with invalid values
DAMAGES = [
    *(
        (WEIGHTS_FILE, None),
        (WEIGHTS_FILE, b"of another program"),
        (ADAPTER_CONFIG_FILE, None),
        (ADAPTER_CONFIG_FILE, b"[]"),
    ),
    *(
        (ADAPTER_CONFIG_FILE, {"peft_type": "OTHER"}),
        (ADAPTER_CONFIG_FILE, {"r": "8"}),
        (ADAPTER_CONFIG_FILE, {"target_modules": 7}),
    ),
    *(
        (ADAPTER_CONFIG_FILE, {"target_modules": "(q_proj"}),
        (BASE_FILE, None),
        (BASE_FILE, {"cab_config": [1]}),
    ),
    (BASE_FILE, {"rope_parameters": 7}),
]


@pytest.mark.parametrize(("file", "change"), DAMAGES)
def test_damaged_or_foreign_file_error_names_file(llama, tmp_path, capsys, file, change):
    path = llama / file
    if isinstance(change, dict):
        update_json_fields(path, **change)
    else:
        path.write_bytes(change or path.read_bytes()[: path.stat().st_size // 2])
    capsys.readouterr()
    assert main([str(llama), str(tmp_path / "merged")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    expected = "must be a file in PEFT's format, got a file that cannot be read ("
    assert f"{file} of adapter adapter {expected}" in line
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("spoilt", ["nothing", "adapter", "positions", "numbers"])
def test_merge_that_fails_verification_is_removed(bases, tmp_path, monkeypatch, spoilt):
    save_trained_adapter(bases["llama"], tmp_path / "adapter", norms=True)
    save = merging.PreTrainedModel.save_pretrained

    def save_spoilt(model, folder, **options):
        with torch.no_grad():
            if spoilt in ("adapter", "numbers"):
                model.model.norm.weight.add_(0.01 if spoilt == "adapter" else torch.nan)
            if spoilt == "positions":
                model.config.rope_parameters["factor"] = 1.0
        save(model, folder, **options)

    monkeypatch.setattr(merging.PreTrainedModel, "save_pretrained", save_spoilt)
    if spoilt == "nothing":
        merge_adapter(tmp_path)
        return
    with pytest.raises(
        UsageError, match="has a logit that differs by .* from that of base and adapter"
    ):
        merge_adapter(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("targets", ["names", "expression"])
def test_model_card_describes_the_merge(bases, tmp_path, targets):
    # ":" and "|" must be escaped in YAML and Markdown
    base = shutil.copytree(bases["llama"], tmp_path / "a: b|c")
    save_trained_adapter(base, tmp_path / "adapter", norms=True)
    layers = "down_proj, q_proj, v_proj"
    if targets == "expression":
        # PEFT accepts an expression in place of a list of names
        layers = r"modules whose full name matches `.*\.(q_proj\|v_proj\|down_proj)`"
        expression = r".*\.(q_proj|v_proj|down_proj)"
        update_json_fields(tmp_path / "adapter" / ADAPTER_CONFIG_FILE, target_modules=expression)
    merge_adapter(tmp_path)
    card = (tmp_path / "merged" / "README.md").read_text()
    for line in (
        "# merged",
        "| base | a: b\\|c |",
        "| adapter | LoRA, rank 4, alpha 8 |",
        f"| layers | {layers} |",
        "| trained completely | input_layernorm, norm, post_attention_layernorm |",
        "| positions | 4096, stretched by yarn |",
    ):
        assert line in card.split("\n"), card
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "a: b|c"
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        *(([], "adapter must be a folder"), (["a"], "out must be a folder")),
        (["a", "b", "--dtpe", "x"], "did you mean --dtype"),
        (["a", "b", "--dtype", "int8"], ", got 'int8'"),
    ],
)
def test_invalid_command_lines_exit(words, sentence, capsys):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2 and sentence in capsys.readouterr().err
