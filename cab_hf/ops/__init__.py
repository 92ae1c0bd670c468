"""One file an op: its kernels and the function that launches them; `reference` defines them all."""

from importlib.util import find_spec

# looked up once: torch.compile cannot trace a search for packages
HAS_TRITON = find_spec("triton") is not None
