"""Models of transformers: their layers, their configs, and whether settings fit them."""
