"""Fine-tuning: a model that reads longer texts than it was made for, by LoRA on long documents."""
