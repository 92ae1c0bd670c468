"""One file an op: its kernels and the function that launches them; `reference` defines them all."""

from importlib.util import find_spec

# asked once: torch.compile cannot look for packages
HAS_TRITON = find_spec("triton") is not None
