"""Run lm-evaluation-harness with CAB as a model and with tasks that need no hub.

    python -m cab_hf.eval harness --tasks cab_passkey,cab_passkey_multi,cab_recall \\
        --model cab --model_args pretrained=smollm2,min_length=0,mass_threshold=0.004 \\
        --metadata '{"max_seq_lengths": [2048, 4096]}'

In addition to these three, the tasks of `cab_hf.data.tasks` are cab_many_keys, cab_uuid,
cab_tracking and so on; docs/evaluation.md lists them.

lm_eval receives all arguments unchanged, except that `pretrained=smollm2`, `smollm2-32k` and
`smollm2-128k` name models that need no hub. `harness -- --help` prints lm_eval's help. `--model
cab` is lm_eval's `hf` with CAB switched on; its model_args may contain fields of CabConfig.
`--model hf` with attn_implementation=cab runs CAB with the config of the model, and with any other
implementation the baseline. lm_eval's own tasks run in the same way; RULER's tasks need
lm_eval[ruler] and a network.

For a model on CAB, results contain its density and its whole config. If no layer attended sparsely,
the run ends with an error and without scores. This happens if all requests are shorter than
min_length (16384).

Metadata of the tasks, with defaults: max_seq_lengths, in tokens (4096); seed (0); haystack, a UTF-8
file in which keys are hidden (noise); samples, the prompts per length (20); documents, the
documents of recall per length (4), each with twelve keys. The prompts of passkey are those of `eval
passkey`, at five depths. The standard error treats the keys of a document as independent. Notes:

* Prompts contain their chat template already: do not give --apply_chat_template.
* If prompts fill the model's context, lm_eval drops 8 tokens at the start to make room for the
  reply. Give a max_length in model_args that is 8 tokens larger.
* --model hf with attn_implementation=cab does not know the length of each request in a batch, so
  that scores depend on the other requests: give --batch_size 1. --model cab has no such limit.
* --use_cache stores replies without the name of the model: give each model and setting its own
  path.

For models without CAB, lm_eval alone runs the same tasks:

    lm_eval --tasks cab_passkey --model hf --model_args pretrained=gpt2 \\
        --include_path $(python -c 'from cab_hf.eval import harness; print(harness.TASKS)')
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import cab_hf
from cab_hf.eval.experiment import PROG
from cab_hf.experiment.models import is_built_in_model, make_model_folder, refuse_unknown_model
from cab_hf.experiment.settings import UsageError

TASKS = Path(__file__).with_name("tasks")
INCLUDE_OPTION = "--include_path"
# the name of a model or tokenizer in an argument of lm_eval, written as key=value or as JSON
MODEL_NAME_PATTERN = re.compile(r"""(\b(?:pretrained|tokenizer)(?:=|"\s*:\s*"))([^,"]+)""")


def main(arguments: Sequence[str]) -> int:
    """Run lm_eval with the command-line arguments ``arguments``; return the exit status."""
    if list(arguments) in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if importlib.util.find_spec("lm_eval") is None:
        message = "lm_eval is not installed. Run `pip install 'cab_hf[harness]'`."
        print(f"{PROG} harness: {message}", file=sys.stderr)
        return 2
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    from cab_hf.eval.lm import HFLM, CabLM, patch_model_class

    patch_model_class(HFLM)
    register_model("cab")(CabLM)
    sys.argv = ["lm_eval", *make_lm_eval_arguments(arguments)]
    cli_evaluate()
    return 0


def make_lm_eval_arguments(command_arguments: Sequence[str]) -> list[str]:
    """Return the arguments for lm_eval: ``command_arguments`` with two changes.

    Names of offline models, such as ``smollm2``, are replaced by the paths of their folders. If the
    arguments have no ``--include_path``, the folder `TASKS` is added as include path.
    """
    arguments = list(
        command_arguments[1:] if command_arguments[:1] == ["--"] else command_arguments
    )
    arguments = [MODEL_NAME_PATTERN.sub(_insert_model_folder, argument) for argument in arguments]
    has_include = any(argument.partition("=")[0] == INCLUDE_OPTION for argument in arguments)
    return arguments if has_include else [*arguments, INCLUDE_OPTION, str(TASKS)]


def report_attention(model: Any) -> dict[str, Any]:
    """Print and return the fields ``cab_density`` and ``cab_config`` for lm_eval's results.

    The density is the mean over all layers that attended sparsely. A layer's density covers only
    its sparse calls. Returns {} if the attention implementation of the model is not CAB.

    Raises:
        UsageError: no layer has attended sparsely.
    """
    from cab_hf.config import SPARSE_IMPLEMENTATIONS
    from cab_hf.hf.model_config import cab_config_of

    text_config = model.config.get_text_config()
    if text_config._attn_implementation not in SPARSE_IMPLEMENTATIONS:
        return {}
    config = cab_config_of(text_config)
    densities = [layer["density"] for layer in cab_hf.stats(model)]
    sparse_densities = [density for density in densities if density is not None]
    if not sparse_densities:
        raise UsageError(
            f"min_length must be smaller than the requests, got {config.min_length}: no layer "
            "attended sparsely, and the scores would be those of dense attention. Give a smaller "
            "min_length in --model_args, or run --model hf."
        )
    cab_fields = {"cab_density": fmean(sparse_densities), "cab_config": config.to_dict()}
    print(
        f"cab: {len(sparse_densities)} of {len(densities)} layers attended sparsely, density "
        f"{cab_fields['cab_density']:.2f} in their sparse calls; config "
        f"{json.dumps(cab_fields['cab_config'])}"
    )
    return cab_fields


def refuse_misspelt_arguments(arguments: Iterable[str], known_names: Collection[str]) -> None:
    """Raise an error if an unknown model argument is spelled like a known argument.

    Other unknown arguments raise no error, because they may be arguments of transformers.

    Args:
        arguments: names of the arguments.
        known_names: names that cab_hf and lm_eval accept.

    Raises:
        UsageError: the message contains both names.
    """
    for name in arguments:
        similar_names = difflib.get_close_matches(name, known_names, n=1, cutoff=0.8)
        if name not in known_names and similar_names:
            raise UsageError(
                f"model_args must contain known arguments, got {name!r}; did you mean "
                f"{similar_names[0]!r}?"
            )


def _insert_model_folder(model_match: re.Match) -> str:
    """Return the argument with a folder in place of the name of an offline model.

    If the folder does not exist, the model is written to it first.

    Args:
        model_match: a match of `MODEL_NAME_PATTERN`.
    """
    argument_prefix, model_name = model_match.groups()
    if is_built_in_model(model_name):
        return f"{argument_prefix}{make_model_folder(model_name)}"
    refuse_unknown_model(model_name)
    return model_match[0]
