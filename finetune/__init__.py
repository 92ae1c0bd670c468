"""Fine-tuning on long documents, with LoRA or all weights: data, loss, training loop, merging."""
