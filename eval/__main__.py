"""``python -m cab_hf.eval COMMAND``: evaluations of CAB, one command each."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cab_hf.eval.experiment import PROG
from cab_hf.experiment.log import DISK_FULL
from cab_hf.experiment.settings import UsageError, missing_package

NAMES = (
    "calibrate",
    "fidelity",
    "fits",
    "harness",
    "passkey",
    "quickcheck",
    "readme",
    "report",
    "speed",
)
# commands whose module has another name
MODULES = {"report": "page"}
# command -> module with an `Experiment` called EXPERIMENT, or ``main(words)``, or COMMANDS again
COMMANDS = {name: f"cab_hf.eval.{MODULES.get(name, name.replace('-', '_'))}" for name in NAMES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (default: the command line); return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return _run(words, sys.modules[__name__], PROG)


def _run(words: Sequence[str], group: ModuleType, prog: str) -> int:
    """Run the command of ``group.COMMANDS`` with which ``words`` begin."""
    name, *words = words or [""]
    if name in ("-h", "--help"):
        width = max(map(len, group.COMMANDS))
        listed = [f"  {name:{width}}  {_purpose(at)}\n" for name, at in group.COMMANDS.items()]
        purpose = group.__doc__.replace("``", "")
        print(f"{purpose}\n\n{''.join(listed)}\nRun COMMAND --help for its options.")
        return 0
    if name not in group.COMMANDS:
        known = ", ".join(group.COMMANDS)
        return _refuse(prog, f"command must be one of {known}, got {name!r}.")
    try:
        # import only the chosen command: torch and transformers take seconds
        module = importlib.import_module(group.COMMANDS[name])
        if hasattr(module, "COMMANDS"):
            return _run(words, module, f"{prog} {name}")
        return module.main(words) if hasattr(module, "main") else module.EXPERIMENT.main(words)
    except UsageError as error:
        return _refuse(prog, f"{name}: {error}")
    except ImportError as error:
        given = missing_package(error)
        if given is None:
            raise
        return _refuse(prog, f"{name}: {given}")
    except OSError as error:
        # the disk may be full in any folder, also in a cache of compiled kernels
        if error.errno not in DISK_FULL:
            raise
        return _refuse(prog, f"{name}: {error.strerror}. Free disk space, and the run continues.")


def _purpose(module: str) -> str:
    """Return the purpose of an experiment, else the first line of the module.

    The source is read, because importing it takes seconds.
    """
    source = Path(importlib.util.find_spec(module).origin).read_text()
    purpose = re.search('^    purpose = "(.+)"$', source, re.MULTILINE)
    return purpose[1] if purpose else source.partition("\n")[0].strip('"')


def _refuse(prog: str, why: str) -> int:
    # messages of other libraries may have several lines
    print(f"{prog}: {' '.join(why.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
