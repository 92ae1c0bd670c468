"""`Trainer` of transformers and `SFTTrainer` of TRL train models with "cab"."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import FULL_BUDGET_CONFIG, SPARSE_CONFIG
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from words import PROSE_TEXT

import cab_hf

LORA_CONFIG = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
TRAINING_ARGUMENTS = {
    **{"max_steps": 2, "per_device_train_batch_size": 1, "logging_steps": 1, "use_cpu": True},
    **{"learning_rate": 0.05, "report_to": "none", "save_strategy": "no", "seed": 0},
    **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "disable_tqdm": True,
}


def make_transformers_trainer(model, tokenizer, output_folder):
    """Return a transformers `Trainer` of a model with LoRA, on random tokens."""
    token_ids = torch.randint(3, 60, (4, 300), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row_ids, "labels": row_ids} for row_ids in token_ids]
    adapted_model = get_peft_model(model, LORA_CONFIG)
    return Trainer(
        adapted_model,
        TrainingArguments(str(output_folder), **TRAINING_ARGUMENTS),
        train_dataset=rows,
    )


def make_trl_trainer(model, tokenizer, output_folder):
    """Return a TRL `SFTTrainer` of a model with LoRA, on packed documents.

    Documents differ, so that attention across document borders would change the loss.
    """
    trl = pytest.importorskip("trl", reason="trl is not installed; `pip install '.[dev]'`")
    prompt_words = PROSE_TEXT.split()
    texts = [
        " ".join(
            (prompt_words[text_index:] + prompt_words[:text_index]) * (6 + 3 * (text_index % 3))
        )
        for text_index in range(12)
    ]
    sft_config = trl.SFTConfig(
        str(output_folder), packing=True, max_length=400, bf16=False, **TRAINING_ARGUMENTS
    )
    text_rows = Dataset.from_dict({"text": texts})
    return trl.SFTTrainer(
        model,
        sft_config,
        train_dataset=text_rows,
        processing_class=tokenizer,
        peft_config=LORA_CONFIG,
    )


def train(make_trainer, model_folder, output_folder, cab_config=None):
    """Train a model with "cab" and ``cab_config``, or with "sdpa" if ``cab_config`` is None.

    Returns:
        (loss of each step, density of each layer).
    """
    torch.manual_seed(0)
    attn_implementation = "sdpa" if cab_config is None else "cab"
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, attn_implementation=attn_implementation
    )
    if cab_config is not None:
        cab_hf.apply_cab(model, cab_config)
    trainer = make_trainer(model, AutoTokenizer.from_pretrained(model_folder), output_folder)
    trainer.train()
    losses = [log_row["loss"] for log_row in trainer.state.log_history if "loss" in log_row]
    densities = [layer_stats["density"] for layer_stats in cab_hf.stats(trainer.model)]
    return losses, densities


@pytest.mark.slow
@pytest.mark.parametrize("make_trainer", [make_transformers_trainer, make_trl_trainer])
def test_full_budget_losses_match_sdpa_and_threshold_lowers_density(
    make_trainer, model_folder, tmp_path
):
    sdpa_losses, _ = train(make_trainer, model_folder, tmp_path)
    losses, densities = train(make_trainer, model_folder, tmp_path, FULL_BUDGET_CONFIG)
    assert len(losses) == 2 and losses == pytest.approx(sdpa_losses, abs=2e-4)
    assert densities == [1.0, 1.0]
    _, densities = train(make_trainer, model_folder, tmp_path, SPARSE_CONFIG)
    assert all(0 < density < 1 for density in densities)
