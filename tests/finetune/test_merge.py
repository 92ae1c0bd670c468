"""A merged model equals its base with the adapter; merging into another base raises an error."""

import json
import shutil
import warnings

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from words import make_tokenizer, save_llama

from cab_hf.experiment.models import BASE_MODEL_FILE
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import merge as merging
from cab_hf.finetune.adapters import WEIGHTS_FILE, initialise_adapter
from cab_hf.finetune.merge import MergeSettings, main, merge
from cab_hf.finetune.models import load_model, save_adapter, with_lora

LINEAR_TARGETS = ("q_proj", "v_proj", "down_proj")
YARN_ROPE_ARGUMENTS = {"length": 4096, "rope": "yarn"}
ADAPTER_CONFIG_FILE = "adapter_config.json"


@pytest.fixture(scope="module")
def base_folders(tmp_path_factory):
    """Return two model folders by name: "llama", and "tied" with tied embeddings."""
    folder, tokenizer = tmp_path_factory.mktemp("bases"), make_tokenizer()
    token_config_fields = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 1}
    make_tiny_model(tie_word_embeddings=True, **token_config_fields).save_pretrained(
        folder / "tied"
    )
    tokenizer.save_pretrained(folder / "tied")
    return {"llama": save_llama(folder / "llama"), "tied": folder / "tied"}


def save_trained_adapter(
    base_folder,
    folder,
    targets=LINEAR_TARGETS,
    dtype="float32",
    rope_arguments=YARN_ROPE_ARGUMENTS,
    **lora_options,
):
    """Save a random adapter of the base model in ``folder``; return the adapted model."""
    model, tokenizer = load_model(
        str(base_folder), cab_config=SPARSE_CONFIG, dtype=dtype, **rope_arguments
    )
    torch.manual_seed(1)
    peft_model = with_lora(model, targets, 4, 8.0, **lora_options)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_adapter(peft_model, tokenizer, folder)
    return peft_model


def merge_adapter(tmp_path, **merge_options):
    """Merge the adapter in the folder ``adapter``; save the model to the folder ``merged``.

    Returns the logit difference that `merge` measures.
    """
    folder_settings = {"adapter": str(tmp_path / "adapter"), "out": str(tmp_path / "merged")}
    return merge(MergeSettings(**folder_settings, **merge_options))


def load_saved_model(folder, **load_options):
    """Return the model in ``folder`` in eval mode, with the dtype of its saved weights."""
    load_options |= {"dtype": "auto", "trust_remote_code": False}
    return AutoModelForCausalLM.from_pretrained(folder, **load_options).eval()


@pytest.mark.parametrize(
    ("base_name", "adapter_options"),
    [
        *(("llama", {}), ("llama", {"targets": "all-linear"})),
        *(("llama", {"targets": (*LINEAR_TARGETS, "lm_head")}), ("llama", {"trains_norms": True})),
        *(("tied", {}), ("llama", {"dtype": "bfloat16"})),
    ],
    ids=["lora", "all linear", "head", "norms", "tied", "bfloat16"],
)
def test_merged_model_equals_base_with_adapter(base_folders, tmp_path, base_name, adapter_options):
    adapted_model = save_trained_adapter(
        base_folders[base_name], tmp_path / "adapter", **adapter_options
    )
    logit_difference = merge_adapter(tmp_path, dtype=adapter_options.get("dtype", ""))
    merged_model, token_ids = load_saved_model(tmp_path / "merged"), draw_token_ids(2, 90)
    adapted_model.set_attn_implementation("sdpa")
    adapted_logits, base_logits = (
        adapted_model(token_ids).logits.float(),
        load_saved_model(base_folders[base_name])(token_ids).logits.float(),
    )
    merged_logits = merged_model(token_ids).logits.float()
    tolerance = 1e-4 if merged_model.dtype == torch.float32 else 0.1
    assert logit_difference < tolerance * adapted_logits.abs().max()
    assert (merged_logits - adapted_logits).abs().max() < tolerance * adapted_logits.abs().max()
    # check of the test: the adapter changes the logits by more than the tolerance
    assert (base_logits - adapted_logits).abs().max() > 3 * tolerance * adapted_logits.abs().max()
    assert merged_model.config.rope_parameters["factor"] == 2.0
    assert merged_model.config.tie_word_embeddings == (base_name == "tied")
    assert (
        merged_model.num_parameters() == load_saved_model(base_folders[base_name]).num_parameters()
    )
    assert merged_model.config.cab_config == SPARSE_CONFIG.to_dict()
    assert sorted(model_file.suffix for model_file in (tmp_path / "merged").glob("model*")) == [
        ".safetensors"
    ]


def test_merged_model_loads_with_from_pretrained(base_folders, tmp_path, capsys):
    adapted_model = save_trained_adapter(base_folders["llama"], tmp_path / "adapter")
    arguments = [str(tmp_path / "adapter"), str(tmp_path / "merged")]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cab_config")
        assert main(arguments) == 0
    assert "merged; the largest difference of a logit is" in capsys.readouterr().out
    assert main(arguments) == 2 and "out must be a new folder, got " in capsys.readouterr().err
    merged_model, token_ids = (
        load_saved_model(tmp_path / "merged", attn_implementation="cab"),
        draw_token_ids(1, 300),
    )
    torch.testing.assert_close(
        merged_model(token_ids).logits, adapted_model(token_ids).logits, rtol=1e-3, atol=1e-3
    )
    merged_model.set_attn_implementation("sdpa")
    assert (merged_model(token_ids).logits - adapted_model(token_ids).logits).abs().max() > 0.01
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged", trust_remote_code=False)
    assert tokenizer("It rained.").input_ids == make_tokenizer()("It rained.").input_ids


# by name: arguments of PEFT's `LoraConfig`
LORA_CONFIG_CASES = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "expression": {"target_modules": ".*(q_proj|lm_head)"},
    "embeddings trained": {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "head trained": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("base_name", ["llama", "tied"])
@pytest.mark.parametrize("lora_options", LORA_CONFIG_CASES.values(), ids=LORA_CONFIG_CASES)
def test_head_and_embeddings_saved_by_peft_are_merged(
    base_folders, tmp_path, base_name, lora_options
):
    """Merge adapters whose files also contain base weights, which PEFT saves for these layers."""
    torch.manual_seed(1)
    lora_config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **lora_options)
    adapted_model = get_peft_model(load_saved_model(base_folders[base_name]), lora_config).eval()
    adapted_model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path)
    merged_model = load_saved_model(tmp_path / "merged")
    expected_logits = adapted_model(draw_token_ids(1, 50)).logits
    torch.testing.assert_close(
        merged_model(draw_token_ids(1, 50)).logits, expected_logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("is_base_changed", [False, True])
def test_run_starts_from_head_saved_by_peft(base_folders, tmp_path, is_base_changed):
    adapted_model, new_model = (
        with_lora(load_model(str(base_folders["llama"]), dtype="float32")[0], ("lm_head",), 4, 8.0)
        for _ in range(2)
    )
    adapted_model.get_base_model().lm_head.base_layer.weight.data += is_base_changed
    adapted_model.save_pretrained(tmp_path / "adapter")
    if not is_base_changed:
        initialise_adapter(new_model, tmp_path / "adapter")
        return
    with pytest.raises(UsageError, match="lm_head.base_layer.weight differs in the adapter"):
        initialise_adapter(new_model, tmp_path / "adapter")


def update_json_fields(file, **fields):
    """Overwrite ``fields`` in the JSON file ``file``."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def llama_adapter_folder(base_folders, tmp_path):
    """Return the folder of an adapter of the base "llama", trained without RoPE scaling."""
    save_trained_adapter(base_folders["llama"], tmp_path / "adapter", rope_arguments={})
    return tmp_path / "adapter"


def test_adapter_without_base_file_is_checked_by_name(base_folders, llama_adapter_folder, tmp_path):
    # adapters that PEFT saved have no file with the hash of the base
    (llama_adapter_folder / BASE_MODEL_FILE).unlink()
    update_json_fields(
        llama_adapter_folder / ADAPTER_CONFIG_FILE, base_model_name_or_path="someone/llama"
    )
    with pytest.raises(UsageError, match="was trained in 'someone/llama', and base is 'tied'"):
        merge_adapter(tmp_path, base=str(base_folders["tied"]))
    update_json_fields(
        llama_adapter_folder / ADAPTER_CONFIG_FILE,
        base_model_name_or_path=str(base_folders["llama"]),
    )
    merge_adapter(tmp_path)


def test_base_is_identified_by_content(base_folders, llama_adapter_folder, tmp_path):
    copied_base = shutil.copytree(base_folders["llama"], tmp_path / "elsewhere" / "llama")
    merge_adapter(tmp_path, base=str(copied_base))
    base_weights = load_file(copied_base / "model.safetensors")
    base_weights["lm_head.weight"] += 1
    save_file(base_weights, copied_base / "model.safetensors", {"format": "pt"})
    shutil.rmtree(tmp_path / "merged")
    message = "adapter was trained in a model with SHA-256 [0-9a-f]{12}, and base 'llama' has"
    with pytest.raises(UsageError, match=message):
        merge_adapter(tmp_path, base=str(copied_base))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("config_sizes", "misfit_pattern"),
    [
        ({"hidden_size": 96}, "is of shape .* in the adapter and of shape"),
        ({"num_hidden_layers": 1}, "layers.1.* is .* and missing in the"),
        ({"num_hidden_layers": 3}, "layers.2.* is missing in the adapter"),
    ],
)
def test_adapter_of_other_shapes_raises(
    llama_adapter_folder, tmp_path, config_sizes, misfit_pattern
):
    other_base = tmp_path / "llama"
    make_tiny_model(**{"num_hidden_layers": 2, "vocab_size": 250, **config_sizes}).save_pretrained(
        other_base
    )
    make_tokenizer().save_pretrained(other_base)
    (llama_adapter_folder / BASE_MODEL_FILE).unlink()
    with pytest.raises(UsageError, match=f"does not fit base 'llama': .*{misfit_pattern}"):
        merge_adapter(tmp_path, base=str(other_base))


# (file, damage): None truncates the file, bytes replace its content, and a dict overwrites fields
# of the JSON file with invalid values
DAMAGE_CASES = [
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
        (BASE_MODEL_FILE, None),
        (BASE_MODEL_FILE, {"cab_config": [1]}),
    ),
    (BASE_MODEL_FILE, {"rope_parameters": 7}),
]


@pytest.mark.parametrize(("file_name", "damage"), DAMAGE_CASES)
def test_damaged_or_foreign_file_error_names_file(
    llama_adapter_folder, tmp_path, capsys, file_name, damage
):
    damaged_file = llama_adapter_folder / file_name
    if isinstance(damage, dict):
        update_json_fields(damaged_file, **damage)
    else:
        damaged_file.write_bytes(
            damage or damaged_file.read_bytes()[: damaged_file.stat().st_size // 2]
        )
    capsys.readouterr()
    assert main([str(llama_adapter_folder), str(tmp_path / "merged")]) == 2
    error_line = capsys.readouterr().err.splitlines()[-1]
    expected_reason = "must be a file in PEFT's format, got a file that cannot be read ("
    assert f"{file_name} of adapter adapter {expected_reason}" in error_line
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("spoilt_part", ["nothing", "adapter", "positions", "numbers"])
def test_merge_that_fails_verification_is_removed(base_folders, tmp_path, monkeypatch, spoilt_part):
    save_trained_adapter(base_folders["llama"], tmp_path / "adapter", trains_norms=True)
    original_save = merging.PreTrainedModel.save_pretrained

    def save_spoilt_model(model, folder, **options):
        with torch.no_grad():
            if spoilt_part in ("adapter", "numbers"):
                model.model.norm.weight.add_(0.01 if spoilt_part == "adapter" else torch.nan)
            if spoilt_part == "positions":
                model.config.rope_parameters["factor"] = 1.0
        original_save(model, folder, **options)

    monkeypatch.setattr(merging.PreTrainedModel, "save_pretrained", save_spoilt_model)
    if spoilt_part == "nothing":
        merge_adapter(tmp_path)
        return
    with pytest.raises(
        UsageError, match="has a logit that differs by .* from that of base and adapter"
    ):
        merge_adapter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("targets_form", ["names", "expression"])
def test_model_card_describes_the_merge(base_folders, tmp_path, targets_form):
    # ":" and "|" must be escaped in YAML and Markdown
    base_folder = shutil.copytree(base_folders["llama"], tmp_path / "a: b|c")
    save_trained_adapter(base_folder, tmp_path / "adapter", trains_norms=True)
    layers_text = "down_proj, q_proj, v_proj"
    if targets_form == "expression":
        # PEFT accepts an expression in place of a list of names
        layers_text = r"modules whose full name matches `.*\.(q_proj\|v_proj\|down_proj)`"
        target_expression = r".*\.(q_proj|v_proj|down_proj)"
        update_json_fields(
            tmp_path / "adapter" / ADAPTER_CONFIG_FILE, target_modules=target_expression
        )
    merge_adapter(tmp_path)
    card_text = (tmp_path / "merged" / "README.md").read_text()
    for card_line in (
        "# merged",
        "| base | a: b\\|c |",
        "| adapter | LoRA, rank 4, alpha 8 |",
        f"| layers | {layers_text} |",
        "| trained completely | input_layernorm, norm, post_attention_layernorm |",
        "| positions | 4096, stretched by yarn |",
    ):
        assert card_line in card_text.split("\n"), card_text
    assert yaml.safe_load(card_text.split("---")[1])["base_model"] == "a: b|c"
    assert str(tmp_path) not in card_text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(([], "adapter must be a folder"), (["a"], "out must be a folder")),
        (["a", "b", "--dtpe", "x"], "did you mean --dtype"),
        (["a", "b", "--dtype", "int8"], ", got 'int8'"),
    ],
)
def test_invalid_command_lines_exit(arguments, message, capsys):
    with pytest.raises(SystemExit) as error_info:
        main(arguments)
    assert error_info.value.code == 2 and message in capsys.readouterr().err
