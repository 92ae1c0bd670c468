"""Fine-tuning by LoRA over long documents: data, loss, the loop, and merging what it learnt."""
