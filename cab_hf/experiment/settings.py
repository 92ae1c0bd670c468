"""Settings of a command: a dataclass whose fields are options of its command line and YAML files.

Every option is read as text, from the command line or from the file, and parsed by `_parse`.
`spelled` is the reverse: it converts recorded settings to the words of a command line.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from cab_hf import checks

Settings = TypeVar("Settings")
# replaces Python's own messages
NUMBERS = {int: "a whole number", float: "a finite number"}
FILE = "config"  # the option that names a YAML file


class UsageError(ValueError):
    """An error in how a run was started, with a message for the user."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")


@contextmanager
def refused_as(sentence: Callable[[Exception], str]) -> Iterator[None]:
    """Turn an error inside the block into a `UsageError` with the message ``sentence(error)``."""
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(sentence(error)) from error


def missing_package(error: ImportError) -> str | None:
    """Return a sentence that names the extra of cab_hf with the missing package, or None."""
    module = (error.name or "").partition(".")[0]
    package = {"yaml": "pyyaml", "markdown_it": "markdown_it_py"}.get(module, module)
    try:
        required = metadata.requires("cab_hf") or []
    except metadata.PackageNotFoundError:
        return None
    for line in required:
        match = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", line)
        if match and match[1].replace("-", "_") == package:
            return f"{package} is not installed. Run `pip install 'cab_hf[{match[2]}]'`."
    return None


def spell(value: Any) -> str:
    """Return a value as typed on a command line; lists are separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def option(
    default: Any,
    help: str,
    parse: Callable[[str], Any] = str,
    *,
    repeatable: bool = False,
    spell: Callable[[Any], str] = spell,
    **more: Any,
) -> Any:
    """Declare a dataclass field that is also an option ``--name``; tuples take several words.

    Args:
        default: the default value.
        help: the help text.
        parse: function from text to value; the message of its ValueError becomes the usage message.
        repeatable: True if the option may be given several times; the value is a tuple of strings.
            Each string is an assignment, or is accepted by ``parse``.
        spell: function from value to text, the reverse of ``parse``; lists are as JSON stores them.
        more: metadata of `operands` and `by_device`.
    """
    noted = {"help": help, "parse": parse, "repeatable": repeatable, "spell": spell}
    noted |= {"operands": False, "defaults": (default,), **more}
    return dataclasses.field(default=default, metadata=noted)


def flag(help: str) -> Any:
    """Declare an `option` that its name alone turns on; the default is False."""
    return option(False, help, parse_flag)


def operands(help: str) -> Any:
    """Declare a field for words without an option name: a tuple of strings."""
    return option((), help, operands=True)


def by_device(gpu: Any, cpu: Any, help: str, parse: Callable[[str], Any] = str, **more: Any) -> Any:
    """Declare an `option` with the default ``gpu``, or ``cpu`` on a CPU; see `fill_by_device`."""
    return option(None, help, parse, defaults=(gpu, cpu), **more)


def fill_by_device(settings: Any, on_cpu: bool) -> None:
    """Set fields declared by `by_device` to the default of the device if they were not given."""
    for field in dataclasses.fields(settings):
        defaults = field.metadata["defaults"]
        if len(defaults) > 1 and getattr(settings, field.name) in (None, ()):
            object.__setattr__(settings, field.name, defaults[on_cpu])


def parse_flag(text: str) -> bool:
    """Parse ``true`` or ``false``, in upper or lower case."""
    if text.lower() not in ("true", "false"):
        raise ValueError(
            f"must be true or false, got {text!r}. The option without a value means true."
        )
    return text.lower() == "true"


def comma_separated(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Return a parser of ``a,b,c`` that drops duplicates."""

    def parse_all(text: str) -> tuple:
        parts = filter(None, map(str.strip, text.split(",")))
        return tuple(dict.fromkeys(map(parse, parts)))

    return parse_all


def parse_length(text: str) -> int:
    """Parse a number of tokens: ``4096``, ``4k`` or ``4K`` (4 x 1,024), ``1M`` (1,048,576)."""
    match = re.fullmatch(r"(-?[0-9][0-9_]*)([kKmM]?)", text.strip())
    if not match:
        raise ValueError(
            f"length must be a number of tokens such as 4096, 32k or 1M, got {text!r}."
        )
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]


def number_or_auto(text: str) -> int | None:
    """Parse a number; ``auto`` returns None."""
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"must be auto or {NUMBERS[int]}, got {text}.") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``name=value`` to (name, value): a Python literal, ``true``, ``false``, or a string."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ValueError(f"assignment must be field=value, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, {"true": True, "false": False}.get(value, value)


def require(settings: Any, name: str, holds: object, accepted: str, value: object = None) -> None:
    """Call `checks.require` for a field of ``settings``; ``value`` replaces the field's value."""
    checks.require(holds, name, getattr(settings, name) if value is None else value, accepted)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}\n")


def read_settings(
    kind: type[Settings], words: Sequence[str], prog: str, purpose: str = ""
) -> Settings:
    """Parse ``words`` of a command line to settings.

    ``--config FILE`` reads a YAML mapping from option to value. Options on the command line
    override the file. Repeatable options are taken from both, those on the command line last. An
    error ends the process with status 2 and one line on stderr.
    """
    parser = _Parser(prog=prog, description=purpose.replace("``", ""), allow_abbrev=False)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for field in fields.values():
        _add_option(parser, field)
    text = "YAML file of these options; options on the command line override it"
    parser.add_argument(f"--{FILE}", metavar="FILE", help=text)
    try:
        parsed, unknown = parser.parse_known_intermixed_args(words)
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [_option_name(x) for x in fields if not fields[x].metadata["operands"]]
            raise ValueError(f"unknown option {name!r}; {_nearest(name, known)}")
        if parsed.config is not None:
            parser.set_defaults(**_read_yaml(parsed.config, fields))
            parsed = parser.parse_intermixed_args(words)
        del parsed.config
        return kind(**{name: _parse(fields[name], text) for name, text in vars(parsed).items()})
    except ValueError as error:
        parser.error(str(error))


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    metadata, defaults = field.metadata, field.metadata["defaults"]
    # an option that is not given keeps the default of the dataclass
    look: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if metadata["operands"]:
        look |= {"nargs": "*", "metavar": field.name.upper().removesuffix("S")}
    elif metadata["repeatable"]:
        look["action"] = "append"
    elif metadata["parse"] is parse_flag:
        look |= {"nargs": "?", "const": "true"}
    elif any(isinstance(default, tuple) for default in defaults):
        look["nargs"] = "+"
    help = metadata["help"]
    # a number may be 0, which equals False
    given = [value for value in defaults if value is not False and value not in (None, (), "")]
    if given:
        shown = dict.fromkeys(map(metadata["spell"], given))
        help += f" (default: {'; on CPU: '.join(shown)})"
    names = [] if metadata["operands"] else [_option_name(field.name)]
    parser.add_argument(*names, help=help.replace("%", "%%"), **look)


def _option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}."


def _parse(field: dataclasses.Field, given: str | list[str]) -> Any:
    """Parse the value of a field from one string or several."""
    parse, repeatable = field.metadata["parse"], field.metadata["repeatable"]
    text = given if isinstance(given, str) else ",".join(given)
    try:
        if repeatable:
            for each in given:  # raised here, where the option is known
                (parse_assignment if parse is str else parse)(each)
        if repeatable or field.metadata["operands"]:
            return tuple(given)
        value = parse(text)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, float) and not math.isfinite(each):
                raise ValueError(f"must be a finite number, got {each}.")
        return value
    except ValueError as error:
        reason = f"must be {NUMBERS[parse]}, got {text}." if parse in NUMBERS else error
        raise ValueError(f"{field.name}: {reason}") from error


def _read_yaml(path: str, fields: Mapping[str, dataclasses.Field]) -> dict[str, list[str]]:
    """Read the options of the file as strings; lists may be lists, assignments may be mappings."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{FILE} must be a YAML file, got {path} ({first_line(error)}).") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{FILE} must contain a mapping from option to value, got {path} without one."
        )
    texts = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ValueError(
                f"{path} contains the unknown option {key!r}; {_nearest(name, list(fields))}"
            )
        if isinstance(value, dict):
            value = [f"{field}={setting!r}" for field, setting in value.items()]
        if value is not None:
            texts[name] = [str(item) for item in (value if isinstance(value, list) else [value])]
    return texts


def spelled(recorded: Mapping[str, Any], kind: type) -> list[str]:
    """Return the command line of the settings ``recorded`` in results, without defaults.

    ``recorded`` is as JSON stores it, and a file is a mapping with its ``name``. Names that are no
    fields of ``kind`` are ignored.
    """
    on_cpu = str(recorded.get("device", "cpu")).startswith("cpu")
    words = []
    for field in dataclasses.fields(kind):
        value = recorded.get(field.name)
        if value is None:
            continue
        value = value["name"] if isinstance(value, Mapping) else value
        metadata, default = field.metadata, field.metadata["defaults"][-1 if on_cpu else 0]
        values, usual = (each if metadata["repeatable"] else [each] for each in (value, default))
        texts = list(map(metadata["spell"], values))
        if default is None or texts != list(map(metadata["spell"], usual)):
            words += [word for text in texts for word in (_option_name(field.name), text)]
    return words
