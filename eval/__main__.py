"""``python -m cab_hf.eval COMMAND``: the evaluations, one command each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from cab_hf.eval.experiment import PROG
from cab_hf.runs.log import LogError

# command -> module, with an `Experiment` called EXPERIMENT, or ``main(words)``, or COMMANDS again
COMMANDS = {name: f"cab_hf.eval.{name}" for name in ("bridges", "passkey", "readme", "speed")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named in ``arguments`` (default: the command line); the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return _run(words, sys.modules[__name__], PROG)


def _run(words: Sequence[str], group: ModuleType, prog: str) -> int:
    """Run the command of ``group.COMMANDS`` that ``words`` begin with."""
    name, *words = words or [""]
    if name in ("-h", "--help"):
        purposes = {
            name: _purpose(importlib.import_module(group.COMMANDS[name])) for name in group.COMMANDS
        }
        listed = "\n".join(f"  {name:10} {purpose}" for name, purpose in purposes.items())
        print(f"{group.__doc__}\n\n{listed}\n\nCOMMAND --help says more.")
        return 0
    if name not in group.COMMANDS:
        known = ", ".join(group.COMMANDS)
        return _refuse(prog, f"give a command, one of {known}; got {name!r}.")
    # only the chosen command is imported: torch and transformers take seconds
    module = importlib.import_module(group.COMMANDS[name])
    if hasattr(module, "COMMANDS"):
        return _run(words, module, f"{prog} {name}")
    try:
        return module.main(words) if hasattr(module, "main") else module.EXPERIMENT.main(words)
    except LogError as error:
        return _refuse(prog, f"{name}: {error}")


def _purpose(module: ModuleType) -> str:
    told = getattr(module, "EXPERIMENT", None)
    return told.purpose if told else (module.__doc__ or "").splitlines()[0]


def _refuse(prog: str, why: str) -> int:
    print(f"{prog}: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
