"""Fine-tune a causal language model on long documents: ``lora.py --config FILE ...``.

LoRA is trained, or with ``--train all`` every weight, in float32 with products in ``--dtype``.

``accelerate launch --config_file finetune/accelerate/fsdp2_8gpu.yaml finetune/lora.py --config
finetune/configs/llama3_8b_32k.yaml`` spreads it over GPUs; ``python finetune/lora.py ...`` runs one
process. With ``--cp N`` every sequence is sharded over N of the processes, for what is too long
for one. The same command goes on with what an earlier one of the same settings left in its folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cab_hf.finetune.settings import PROG, read

__all__ = ["PROG", "main", "read"]


def main(words: Sequence[str] | None = None) -> int:
    """Train as ``words`` (default: the command line) have it; the exit status."""
    settings = read(sys.argv[1:] if words is None else words)
    # torch and transformers are imported once there is something to do
    from cab_hf.finetune import train

    return train.run(settings)


if __name__ == "__main__":
    raise SystemExit(main())
