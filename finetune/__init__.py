"""LoRA fine-tuning on long documents: data, loss, training loop and merging."""
