"""Models of transformers: layers, configs, and checks that settings fit a model."""
