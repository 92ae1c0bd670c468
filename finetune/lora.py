"""Fine-tune a causal language model on long documents: ``lora.py --config FILE ...``.

The command trains LoRA adapters, or all weights with ``--train all``. Trained weights are float32,
and products are computed in ``--dtype``.

``accelerate launch --config_file finetune/accelerate/fsdp2_8gpu.yaml finetune/lora.py --config
finetune/configs/llama3_8b_32k.yaml`` uses several GPUs. ``python finetune/lora.py ...`` runs one
process. ``--cp N`` shards every sequence over N processes, for sequences that one process cannot
hold. The same command resumes a run of the same settings in the same folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cab_hf.finetune.settings import PROG, read

__all__ = ["PROG", "main", "read"]


def main(words: Sequence[str] | None = None) -> int:
    """Train as ``words`` (default: the command line) specify; return the exit status."""
    settings = read(sys.argv[1:] if words is None else words)
    # import torch and transformers only if there is work to do
    from cab_hf.finetune import train

    return train.run(settings)


if __name__ == "__main__":
    raise SystemExit(main())
