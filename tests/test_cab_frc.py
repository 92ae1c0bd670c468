"""attn_implementation "cab_frc" selects the published method, by all entry points of "cab"."""

import pytest
import torch
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from transformers import AutoModelForCausalLM

import cab_hf
from cab_hf import CabConfig
from cab_hf.config import CAB_FRC, IMPLEMENTATION_NAMES
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of

PUBLISHED_CONFIG = CabConfig.published(0.7, query_block=32, key_block=32, min_length=0)


@pytest.fixture
def saved_model_folder(tmp_path):
    """Save a tiny model without CabConfig, and return its folder."""
    make_tiny_model().save_pretrained(tmp_path)
    return tmp_path


def load_model(model_folder, implementation=CAB_FRC, **model_options):
    """Load the model in ``model_folder`` with the attention implementation ``implementation``."""
    return AutoModelForCausalLM.from_pretrained(
        model_folder, attn_implementation=implementation, **model_options
    ).eval()


@torch.no_grad()
def compute_logits(model):
    """Return the logits of 700 random tokens."""
    return model(draw_token_ids(1, 700)).logits


def test_cab_frc_equals_cab_with_published_config(saved_model_folder, monkeypatch):
    assert CAB_FRC in IMPLEMENTATION_NAMES
    config = make_tiny_model().config

    def compute_logits_of_new_model(implementation, **model_options):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, **model_options
        )
        return compute_logits(model.eval())

    # the real published config has a min_length above 700 tokens, and would be dense
    monkeypatch.setattr(CabConfig, "published", lambda: PUBLISHED_CONFIG)
    expected = compute_logits_of_new_model("cab", cab_config=PUBLISHED_CONFIG)
    assert torch.equal(compute_logits_of_new_model(CAB_FRC), expected)
    assert torch.equal(compute_logits_of_new_model(CAB_FRC, cab_config=PUBLISHED_CONFIG), expected)
    assert not torch.equal(compute_logits_of_new_model("sdpa"), expected)


def test_cab_frc_without_config_uses_published_settings(saved_model_folder):
    model = load_model(saved_model_folder)
    assert model.config.cab_config is None
    assert cab_config_in_use(model.config) == CabConfig.published()
    # "cab" does not use the settings of "cab_frc"
    assert cab_config_of(model.config, "cab") == CabConfig()
    model.set_attn_implementation("cab")
    assert cab_config_of(model.config) == CabConfig()
    model.set_attn_implementation(CAB_FRC)
    assert cab_config_of(model.config) == CabConfig.published()


def test_dict_without_predictor_overrides_published_settings(saved_model_folder):
    model = load_model(saved_model_folder, cab_config={"min_length": 0, "sparsity": 0.8})
    assert cab_config_of(model.config) == CabConfig.published(0.8, min_length=0)
    with pytest.raises(ValueError, match="is 0.08, which predictor='frc' does not read"):
        load_model(saved_model_folder, cab_config={"mass_threshold": 0.08})


@pytest.mark.parametrize(
    "cab_config",
    [
        pytest.param(SPARSE_CONFIG, id="cab"),
        pytest.param(CabConfig(min_length=0), id="the-default"),
        pytest.param({"predictor": "cascade", "anchors": [0]}, id="cascade"),
    ],
)
def test_config_of_another_predictor_raises(saved_model_folder, cab_config):
    error_pattern = (
        "cab_config must have predictor 'frc' with attn_implementation 'cab_frc', got '.*'"
    )
    with pytest.raises(ValueError, match=error_pattern):
        load_model(saved_model_folder, cab_config=cab_config)
    model = load_model(saved_model_folder, "cab", cab_config=cab_config)
    with pytest.raises(ValueError, match=error_pattern):
        model.set_attn_implementation(CAB_FRC)
    assert model.config._attn_implementation == "cab"


def test_settings_survive_save_and_load(saved_model_folder, tmp_path):
    model = load_model(saved_model_folder, cab_config=PUBLISHED_CONFIG)
    expected = compute_logits(model)
    model.save_pretrained(tmp_path / "again")
    loaded_model = load_model(tmp_path / "again")
    assert cab_config_of(loaded_model.config) == PUBLISHED_CONFIG
    assert torch.equal(compute_logits(loaded_model), expected)
    load_model(saved_model_folder).save_pretrained(tmp_path / "plain")
    assert cab_config_of(load_model(tmp_path / "plain").config) == CabConfig.published()


def test_describe_and_stats_support_cab_frc(saved_model_folder):
    model = load_model(saved_model_folder, cab_config=PUBLISHED_CONFIG)
    header_line, layers_line, decode_line, batching_line = cab_hf.describe(model, 700).splitlines()
    assert header_line.startswith("cab_frc: predictor frc (forman: sparsity 0.7), blocks 32 x 32; ")
    assert layers_line.strip().startswith("layers 0-2: sparse") and "decode: dense" in decode_line
    assert "each sequence by itself" in batching_line or "refused" in batching_line
    compute_logits(model)
    assert all(0 < layer_stats["density"] < 0.5 for layer_stats in cab_hf.stats(model))


def test_apply_cab_keeps_name_while_predictor_is_frc(saved_model_folder):
    model = load_model(saved_model_folder)
    cab_hf.apply_cab(model, min_length=0, query_block=32, key_block=32, sparsity=0.7)
    assert model.config._attn_implementation == CAB_FRC
    assert cab_config_of(model.config) == PUBLISHED_CONFIG
    with cab_hf.cab(model, SPARSE_CONFIG):
        assert model.config._attn_implementation == "cab"
    assert model.config._attn_implementation == CAB_FRC
    cab_hf.remove_cab(model)
    assert model.config._attn_implementation == CAB_FRC and model.config.cab_config is None


def test_generate_decodes_sparsely_with_cab_frc(saved_model_folder):
    decode_fields = {"sparse_decode": True, "decode_tokens": 128}
    frc_model = load_model(saved_model_folder, cab_config=PUBLISHED_CONFIG.changed(**decode_fields))
    cab_model = load_model(
        saved_model_folder, "cab", cab_config=PUBLISHED_CONFIG.changed(**decode_fields)
    )
    generate_options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    ids = draw_token_ids(1, 700)
    actual, expected = (model.generate(ids, **generate_options) for model in (frc_model, cab_model))
    assert torch.equal(actual.sequences, expected.sequences)
    cache = actual.past_key_values
    assert type(cache.layers[0]).__name__ == "IndexedDynamicLayer"


def test_padded_rows_equal_single_rows(saved_model_folder):
    model = load_model(saved_model_folder, cab_config=PUBLISHED_CONFIG)
    ids, mask = draw_token_ids(2, 600), torch.ones(2, 600, dtype=torch.long)
    mask[0, :45] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        actual = model(ids, attention_mask=mask, position_ids=positions).logits[0, 45:]
        expected = model(ids[:1, 45:]).logits[0]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_load_model_accepts_cab_frc(saved_model_folder):
    # the saved CabConfig has predictor "rows", which "cab_frc" rejects
    load_model(saved_model_folder, "cab", cab_config=SPARSE_CONFIG).save_pretrained(
        saved_model_folder
    )
    with pytest.raises(
        ValueError, match="must have predictor 'frc' with attn_implementation 'cab_frc'"
    ):
        load_model(saved_model_folder)
    model, _ = cab_hf.load_model("tiny", attn_implementation=CAB_FRC, cab_config=PUBLISHED_CONFIG)
    assert cab_config_of(model.config) == PUBLISHED_CONFIG
