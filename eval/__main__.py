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
# command -> name of its module, if the module is not named after the command
MODULES = {"report": "page"}
# command -> module that defines an `Experiment` class EXPERIMENT, a function ``main(words)``, or
# COMMANDS with subcommands
COMMANDS = {name: f"cab_hf.eval.{MODULES.get(name, name.replace('-', '_'))}" for name in NAMES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, such as ``passkey`` or ``speed ttft``.

    Args:
        arguments: the command and its options; None: the arguments in ``sys.argv``.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    return _run(arguments, sys.modules[__name__], PROG)


def _run(arguments: Sequence[str], group: ModuleType, prog: str) -> int:
    """Run a command and return the exit status.

    Args:
        arguments: the name of the command, followed by its options.
        group: a module with the mapping COMMANDS: name of a command -> name of its module.
        prog: the command line before the name of the command, for error messages.
    """
    name, *options = arguments or [""]
    if name in ("-h", "--help"):
        width = max(map(len, group.COMMANDS))
        lines = [
            f"  {name:{width}}  {_purpose(module)}\n" for name, module in group.COMMANDS.items()
        ]
        purpose = group.__doc__.replace("``", "")
        print(f"{purpose}\n\n{''.join(lines)}\nRun COMMAND --help for its options.")
        return 0
    if name not in group.COMMANDS:
        commands = ", ".join(group.COMMANDS)
        return _refuse(prog, f"command must be one of {commands}, got {name!r}.")
    try:
        # import only the chosen command: torch and transformers take seconds
        module = importlib.import_module(group.COMMANDS[name])
        if hasattr(module, "COMMANDS"):
            return _run(options, module, f"{prog} {name}")
        return module.main(options) if hasattr(module, "main") else module.EXPERIMENT.main(options)
    except UsageError as error:
        return _refuse(prog, f"{name}: {error}")
    except ImportError as error:
        message = missing_package(error)
        if message is None:
            raise
        return _refuse(prog, f"{name}: {message}")
    except OSError as error:
        # the disk may be full in any folder, also in a cache of compiled kernels
        if error.errno not in DISK_FULL:
            raise
        return _refuse(prog, f"{name}: {error.strerror}. Free disk space, and the run continues.")


def _purpose(module: str) -> str:
    """Return the line that help shows for the command in ``module``.

    The line is the ``purpose`` of the module's `Experiment` class, or the first line of the module
    docstring if there is no such class. Both are read from the source, because importing the module
    takes seconds.
    """
    source = Path(importlib.util.find_spec(module).origin).read_text()
    purpose = re.search('^    purpose = "(.+)"$', source, re.MULTILINE)
    return purpose[1] if purpose else source.partition("\n")[0].strip('"')


def _refuse(prog: str, message: str) -> int:
    """Print ``message`` as one line on stderr; return the exit status of a usage error."""
    # error messages of other libraries may have several lines: join these
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
