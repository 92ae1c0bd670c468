"""Models of transformers: their layers, their configs, and checks that settings fit them."""
