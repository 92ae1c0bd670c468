"""`Trainer` of transformers and `SFTTrainer` of TRL train models with "cab"."""

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


def make_transformers_trainer(model, tokenizer, folder):
    """Return a transformers `Trainer` of a model with LoRA, on random tokens."""
    ids = torch.randint(3, 60, (4, 300), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": x, "labels": x} for x in ids]
    adapted = get_peft_model(model, LORA)
    return Trainer(adapted, TrainingArguments(str(folder), **STEPS), train_dataset=rows)


def make_trl_trainer(model, tokenizer, folder):
    """Return a TRL `SFTTrainer` of a model with LoRA, on packed documents.

    Documents differ, so that attention across document borders would change the loss.
    """
    trl = pytest.importorskip("trl", reason="trl is not installed; `pip install '.[dev]'`")
    words = TEXT.split()
    texts = [" ".join((words[i:] + words[:i]) * (6 + 3 * (i % 3))) for i in range(12)]
    arguments = trl.SFTConfig(str(folder), packing=True, max_length=400, bf16=False, **STEPS)
    rows = Dataset.from_dict({"text": texts})
    return trl.SFTTrainer(
        model, arguments, train_dataset=rows, processing_class=tokenizer, peft_config=LORA
    )


def train(make_trainer, model_folder, folder, config=None):
    """Train a model with "cab" and ``config``, or with "sdpa" if ``config`` is None.

    Returns:
        (loss of each step, density of each layer).
    """
    torch.manual_seed(0)
    attention = "sdpa" if config is None else "cab"
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=attention)
    if config is not None:
        cab_hf.apply_cab(model, config)
    trainer = make_trainer(model, AutoTokenizer.from_pretrained(model_folder), folder)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    densities = [row["density"] for row in cab_hf.stats(trainer.model)]
    return losses, densities


@pytest.mark.slow
@pytest.mark.parametrize("make_trainer", [make_transformers_trainer, make_trl_trainer])
def test_full_budget_losses_match_sdpa_and_threshold_lowers_density(
    make_trainer, model_folder, tmp_path
):
    expected, _ = train(make_trainer, model_folder, tmp_path)
    losses, densities = train(make_trainer, model_folder, tmp_path, FULL)
    assert len(losses) == 2 and losses == pytest.approx(expected, abs=2e-4)
    assert densities == [1.0, 1.0]
    _, densities = train(make_trainer, model_folder, tmp_path, SPARSE)
    assert all(0 < density < 1 for density in densities)
