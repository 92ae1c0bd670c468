"""Fine-tune a causal language model on long documents: ``lora.py --config FILE ...``.

The command trains LoRA adapters, or all weights with ``--train all``. Trained weights are float32,
and products are computed in ``--dtype``.

``accelerate launch --config_file finetune/accelerate/fsdp2_8gpu.yaml finetune/lora.py --config
finetune/configs/llama3_8b_32k.yaml`` uses several GPUs. ``python finetune/lora.py ...`` runs one
process. ``--cp N`` shards every sequence over N processes, for sequences that do not fit into the
memory of one GPU. The same command resumes a stopped run if its settings have not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cab_hf.finetune.settings import PROG, read

__all__ = ["PROG", "main", "read"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the options in ``arguments``; return the exit status.

    ``arguments`` are the words of a command line; None: the arguments of this process.
    """
    settings = read(sys.argv[1:] if arguments is None else arguments)
    # imported here, so that --help and errors of options do not wait for torch and transformers
    from cab_hf.finetune import train

    return train.run(settings)


if __name__ == "__main__":
    raise SystemExit(main())
