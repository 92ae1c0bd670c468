"""``python -m cab_hf.eval COMMAND``: the evaluations, one command each."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# command -> what it measures; each is a module with `Settings` and `run(settings)`, or, where it
# has commands of its own, with `main(arguments)`
COMMANDS = {
    "bridges": "which selection formula finds bridges between communities",
    "passkey": "find a number hidden in a long text",
    "readme": "write the tables of README.md from the results",
    "speed": "time an op beside the best dense attention",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named in ``arguments`` (default: the command line); the exit status."""
    from cab_hf.eval.settings import add_options, read_options

    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="python -m cab_hf.eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        if name == chosen:
            # only the chosen command is imported: torch and transformers take seconds
            module = importlib.import_module(f"cab_hf.eval.{name}")
            if hasattr(module, "main"):
                return module.main(arguments[arguments.index(name) + 1 :])
            add_options(command, module.Settings)
    parsed = parser.parse_args(arguments)
    try:
        settings = read_options(parsed, module.Settings)
    except ValueError as error:
        parser.exit(2, f"{parser.prog} {parsed.command}: {error}\n")
    module.run(settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
