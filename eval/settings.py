"""A command's settings: a dataclass whose fields become command line options."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def option(
    default: Any, help: str, parse: Callable[[str], Any] = str, repeatable: bool = False
) -> Any:
    """A dataclass field that is also an option ``--name``.

    Args:
        parse: from the command line's string; a ValueError it raises becomes the usage message.
        repeatable: the option may be given several times, and its values are a tuple.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "parse": parse, "repeatable": repeatable}
    )


def comma_separated(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    """A parser of ``a,b,c``."""
    return lambda text: tuple(parse(part.strip()) for part in text.split(",") if part.strip())


def parse_assignment(text: str) -> tuple[str, Any]:
    """``name=value`` -> (name, value), the value a Python literal or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"set must be field=value; got {text!r}.")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return name.strip(), value.strip()


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Give ``parser`` one option for every field of the dataclass ``kind``."""
    for field in dataclasses.fields(kind):
        shown = "" if field.default in (None, ()) else f" (default: {_shown(field.default)})"
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            type=_named(field.metadata["parse"], field.name),
            action="append" if field.metadata["repeatable"] else "store",
            help=field.metadata["help"].replace("%", "%%") + shown,
        )


def read_options(arguments: argparse.Namespace, kind: type[Settings]) -> Settings:
    """The settings in ``arguments``, fields that were not given having their defaults."""
    given = {f.name: f for f in dataclasses.fields(kind) if hasattr(arguments, f.name)}
    values = {
        name: tuple(getattr(arguments, name))
        if field.metadata["repeatable"]
        else getattr(arguments, name)
        for name, field in given.items()
    }
    return kind(**values)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _named(parse: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    # argparse shows an ArgumentTypeError's own words, and replaces those of a ValueError
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from error

    return parsed
