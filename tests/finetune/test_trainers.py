"""Trainers of other libraries train a model with CAB as they train it with sdpa."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import FULL, SPARSE
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from words import TEXT

import cab_hf

LORA = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
STEPS = {
    **{"max_steps": 2, "per_device_train_batch_size": 1, "logging_steps": 1, "use_cpu": True},
    **{"learning_rate": 0.05, "report_to": "none", "save_strategy": "no", "seed": 0},
    **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "disable_tqdm": True,
}


def by_transformers(model, tokenizer, folder):
    ids = torch.randint(3, 60, (4, 300), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": x, "labels": x} for x in ids]
    adapted = get_peft_model(model, LORA)
    return Trainer(adapted, TrainingArguments(str(folder), **STEPS), train_dataset=rows)


def by_trl(model, tokenizer, folder):
    """Train with TRL on packed documents; attention across documents would change the loss."""
    trl = pytest.importorskip("trl", reason="trl is not installed; `pip install '.[dev]'`")
    words = TEXT.split()
    texts = [" ".join((words[i:] + words[:i]) * (6 + 3 * (i % 3))) for i in range(12)]
    arguments = trl.SFTConfig(str(folder), packing=True, max_length=400, bf16=False, **STEPS)
    rows = Dataset.from_dict({"text": texts})
    given = {"train_dataset": rows, "processing_class": tokenizer, "peft_config": LORA}
    return trl.SFTTrainer(model, arguments, **given)


def trained(make, model_folder, folder, attention, config=None):
    """Return (loss of each step, density of each layer)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=attention)
    if config is not None:
        cab_hf.apply_cab(model, config)
    trainer = make(model, AutoTokenizer.from_pretrained(model_folder), folder)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    densities = [row["density"] for row in cab_hf.stats(trainer.model)]
    return losses, densities


@pytest.mark.slow
@pytest.mark.parametrize("make", [by_transformers, by_trl])
def test_full_budget_losses_match_sdpa_and_threshold_lowers_density(make, model_folder, tmp_path):
    expected, _ = trained(make, model_folder, tmp_path, "sdpa")
    losses, densities = trained(make, model_folder, tmp_path, "cab", FULL)
    assert len(losses) == 2 and losses == pytest.approx(expected, abs=2e-4)
    assert densities == [1.0, 1.0]
    _, densities = trained(make, model_folder, tmp_path, "cab", SPARSE)
    assert all(0 < density < 1 for density in densities)
