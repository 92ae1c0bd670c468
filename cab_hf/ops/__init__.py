"""One file an op: its kernels and the function that launches them; `reference` defines them all."""
