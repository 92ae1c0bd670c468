"""``python -m cab_hf.eval COMMAND``: evaluations of CAB, one command each."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cab_hf.eval.experiment import PROG
from cab_hf.experiment.log import DISK_FULL_ERRORS
from cab_hf.experiment.settings import UsageError, describe_missing_package

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
MODULE_NAMES = {"report": "page"}
# command -> module that defines an `Experiment` class EXPERIMENT, a function ``main(words)``, or
# COMMANDS with subcommands
COMMANDS = {name: f"cab_hf.eval.{MODULE_NAMES.get(name, name.replace('-', '_'))}" for name in NAMES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, such as ``passkey`` or ``speed ttft``.

    Args:
        arguments: the command and its options; None: the arguments in ``sys.argv``.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    return _run_command(arguments, sys.modules[__name__], PROG)


def _run_command(arguments: Sequence[str], group: ModuleType, prog: str) -> int:
    """Run a command and return the exit status.

    Args:
        arguments: the name of the command, followed by its options.
        group: a module with the mapping COMMANDS: name of a command -> name of its module.
        prog: the command line before the name of the command, for error messages.
    """
    command, *options = arguments or [""]
    if command in ("-h", "--help"):
        command_width = max(map(len, group.COMMANDS))
        help_lines = [
            f"  {command:{command_width}}  {_read_purpose(module)}\n"
            for command, module in group.COMMANDS.items()
        ]
        description = group.__doc__.replace("``", "")
        print(f"{description}\n\n{''.join(help_lines)}\nRun COMMAND --help for its options.")
        return 0
    if command not in group.COMMANDS:
        command_names = ", ".join(group.COMMANDS)
        return _print_usage_error(prog, f"command must be one of {command_names}, got {command!r}.")
    try:
        # import only the chosen command: torch and transformers take seconds
        module = importlib.import_module(group.COMMANDS[command])
        if hasattr(module, "COMMANDS"):
            return _run_command(options, module, f"{prog} {command}")
        return module.main(options) if hasattr(module, "main") else module.EXPERIMENT.main(options)
    except UsageError as error:
        return _print_usage_error(prog, f"{command}: {error}")
    except ImportError as error:
        message = describe_missing_package(error)
        if message is None:
            raise
        return _print_usage_error(prog, f"{command}: {message}")
    except OSError as error:
        # the disk may be full in any folder, also in a cache of compiled kernels
        if error.errno not in DISK_FULL_ERRORS:
            raise
        return _print_usage_error(
            prog, f"{command}: {error.strerror}. Free disk space, and the run continues."
        )


def _read_purpose(module_name: str) -> str:
    """Return the line that help shows for the command in ``module_name``.

    The line is the ``purpose`` of the module's `Experiment` class, or the first line of the module
    docstring if there is no such class. Both are read from the source, because importing the module
    takes seconds.
    """
    source_code = Path(importlib.util.find_spec(module_name).origin).read_text()
    purpose_match = re.search('^    purpose = "(.+)"$', source_code, re.MULTILINE)
    return purpose_match[1] if purpose_match else source_code.partition("\n")[0].strip('"')


def _print_usage_error(prog: str, message: str) -> int:
    """Print ``message`` as one line on stderr; return the exit status of a usage error."""
    # error messages of other libraries may have several lines: join these
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
