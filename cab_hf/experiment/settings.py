"""Functions that fill a dataclass of settings from a command line and a YAML file.

Each field of the dataclass is an option of the command. `read_settings` reads every option as a
string, and `_parse_option` converts the string to a value. `to_command_line` is the inverse of
`read_settings`: `to_command_line` converts recorded settings to the words of a command line.

A field is declared by `option`, `flag`, `operands` or `by_device`. Its metadata have these keys:

* ``help``: the help text.
* ``parse``: function from string to value.
* ``spell``: function from value to string, the inverse of ``parse``.
* ``repeatable``: True if the option may occur several times.
* ``operands``: True if the field contains the positional arguments of the command.
* ``defaults``: the default, or the defaults on a GPU and on a CPU.
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
# by type of a number: its description in error messages, in place of Python's own messages
NUMBER_DESCRIPTIONS = {int: "a whole number", float: "a finite number"}
# name of the option whose value is the path of a YAML file
CONFIG_OPTION = "config"


class UsageError(ValueError):
    """An error about an argument, option or file of a run; the message says what to change."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")


@contextmanager
def convert_errors(describe_error: Callable[[Exception], str]) -> Iterator[None]:
    """Convert errors inside a ``with`` block to a `UsageError`.

    `MemoryError` and `UsageError` are not converted.

    Args:
        describe_error: function that receives the error, and returns the message of the
            `UsageError`.
    """
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(describe_error(error)) from error


def describe_missing_package(error: ImportError) -> str | None:
    """Return a message with the command that installs the package whose import failed.

    Returns None if no extra of cab_hf contains the package.
    """
    module = (error.name or "").partition(".")[0]
    # by name of a module: name of its package, if the names differ
    package = {"yaml": "pyyaml", "markdown_it": "markdown_it_py"}.get(module, module)
    try:
        requirements = metadata.requires("cab_hf") or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", requirement)
        if match and match[1].replace("-", "_") == package:
            return f"{package} is not installed. Run `pip install 'cab_hf[{match[2]}]'`."
    return None


def spell_value(value: Any) -> str:
    """Convert the value of an option to a string; commas separate the items of a list."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def option(
    default: Any,
    help: str,
    parse: Callable[[str], Any] = str,
    *,
    repeatable: bool = False,
    spell: Callable[[Any], str] = spell_value,
    **more_metadata: Any,
) -> Any:
    """Declare a dataclass field that is also an option ``--name`` of the command line.

    Args:
        default: the default value. An option with a tuple as default takes several words.
        help: the help text.
        parse: function from string to value. The message of its ValueError is shown to the user.
        repeatable: True if the option may occur several times. The value is a tuple of strings.
            Each string must be accepted by ``parse``, or by `parse_assignment` if ``parse`` is str.
        spell: function from value to string, the inverse of ``parse``. In values that were read
            from JSON, tuples are lists.
        more_metadata: other metadata of the field, see the docstring of the module.
    """
    field_metadata = {
        "help": help,
        "parse": parse,
        "repeatable": repeatable,
        "spell": spell,
        "operands": False,
        "defaults": (default,),
        **more_metadata,
    }
    return dataclasses.field(default=default, metadata=field_metadata)


def flag(help: str) -> Any:
    """Declare an `option` with a boolean value: ``--name`` means True, and the default is False."""
    return option(False, help, parse_flag)


def operands(help: str) -> Any:
    """Declare a field for the positional arguments of the command, as a tuple of strings."""
    return option((), help, operands=True)


def by_device(
    gpu_default: Any,
    cpu_default: Any,
    help: str,
    parse: Callable[[str], Any] = str,
    **more_metadata: Any,
) -> Any:
    """Declare an `option` with different defaults on a GPU and on a CPU.

    The field is None until `fill_by_device` sets the default. Arguments as in `option`.
    """
    return option(None, help, parse, defaults=(gpu_default, cpu_default), **more_metadata)


def fill_by_device(settings: Any, is_on_cpu: bool) -> None:
    """Set each field of `by_device` without a value to its default on the device.

    Args:
        settings: an instance of a settings dataclass, modified in place even if frozen.
        is_on_cpu: True for the defaults on a CPU.
    """
    for field in dataclasses.fields(settings):
        defaults = field.metadata["defaults"]
        if len(defaults) > 1 and getattr(settings, field.name) in (None, ()):
            object.__setattr__(settings, field.name, defaults[is_on_cpu])


def parse_flag(text: str) -> bool:
    """Convert "true" or "false", in upper or lower case, to a bool."""
    if text.lower() not in ("true", "false"):
        raise ValueError(
            f"must be true or false, got {text!r}. The option without a value means true."
        )
    return text.lower() == "true"


def comma_separated(parse_item: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Return a function that converts ``a,b,c`` to a tuple of parsed items without duplicates."""

    def parse_all(text: str) -> tuple:
        item_texts = filter(None, map(str.strip, text.split(",")))
        return tuple(dict.fromkeys(map(parse_item, item_texts)))

    return parse_all


def parse_length(text: str) -> int:
    """Convert a number of tokens to an int: "4096", "4k" or "4K" (4 * 1,024), "1M" (1,024²)."""
    match = re.fullmatch(r"(-?[0-9][0-9_]*)([kKmM]?)", text.strip())
    if not match:
        raise ValueError(
            f"length must be a number of tokens such as 4096, 32k or 1M, got {text!r}."
        )
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]


def parse_number_or_auto(text: str) -> int | None:
    """Convert a string to an int, and "auto" to None."""
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"must be auto or {NUMBER_DESCRIPTIONS[int]}, got {text}.") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``name=value`` into (name, value).

    The value is parsed as a Python literal. "true" and "false" become bools, and any other value
    stays a string.
    """
    field_name, equals_sign, value = (
        assignment_part.strip() for assignment_part in text.partition("=")
    )
    if not equals_sign:
        raise ValueError(f"assignment must be field=value, got {text!r}.")
    try:
        return field_name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return field_name, {"true": True, "false": False}.get(value, value)


def require(
    settings: Any, field_name: str, condition: object, requirement: str, value: object = None
) -> None:
    """Raise a ValueError about a field of ``settings`` unless ``condition`` is true.

    Args:
        settings: an instance of a settings dataclass.
        field_name: name of the field.
        condition: true for valid settings.
        requirement: description of valid values, for the message "{field_name} must be
            {requirement}".
        value: the value in the message; None means the value of the field.
    """
    checks.require(
        condition,
        field_name,
        getattr(settings, field_name) if value is None else value,
        requirement,
    )


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors as one line, without the usage of the command."""

    def error(self, message: str) -> Any:
        """Print the message and end the process with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def read_settings(
    settings_class: type[Settings], command_line_words: Sequence[str], prog: str, purpose: str = ""
) -> Settings:
    """Read settings from a command line, and from the YAML file of its option ``--config``.

    The file contains a mapping from option to value. Options on the command line override options
    in the file. A repeatable option has the values of the file first, then those of the command
    line. An error ends the process with status 2 and one line on stderr.

    Args:
        settings_class: the settings dataclass.
        command_line_words: the words of the command line.
        prog: name of the command, for help and errors.
        purpose: description of the command, for help.
    """
    parser = _Parser(prog=prog, description=purpose.replace("``", ""), allow_abbrev=False)
    field_by_name = {field.name: field for field in dataclasses.fields(settings_class)}
    for field in field_by_name.values():
        _add_option(parser, field)
    file_help = "YAML file of these options; options on the command line override it"
    parser.add_argument(f"--{CONFIG_OPTION}", metavar="FILE", help=file_help)
    try:
        parsed_options, unknown_words = parser.parse_known_intermixed_args(command_line_words)
        if unknown_words:
            unknown_option = unknown_words[0].partition("=")[0]
            option_names = [
                _option_name(field_name)
                for field_name in field_by_name
                if not field_by_name[field_name].metadata["operands"]
            ]
            raise ValueError(
                f"unknown option {unknown_option!r}; "
                f"{_suggest_option(unknown_option, option_names)}"
            )
        if parsed_options.config is not None:
            parser.set_defaults(**_read_yaml(parsed_options.config, field_by_name))
            parsed_options = parser.parse_intermixed_args(command_line_words)
        del parsed_options.config
        return settings_class(
            **{
                field_name: _parse_option(field_by_name[field_name], option_words)
                for field_name, option_words in vars(parsed_options).items()
            }
        )
    except ValueError as error:
        parser.error(str(error))


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    """Add the option of a settings field to a parser."""
    field_metadata, defaults = field.metadata, field.metadata["defaults"]
    # the parser sets no attribute for an option that the user leaves out, so that the dataclass
    # sets its default
    argparse_arguments: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if field_metadata["operands"]:
        argparse_arguments |= {"nargs": "*", "metavar": field.name.upper().removesuffix("S")}
    elif field_metadata["repeatable"]:
        argparse_arguments["action"] = "append"
    elif field_metadata["parse"] is parse_flag:
        argparse_arguments |= {"nargs": "?", "const": "true"}
    elif any(isinstance(default, tuple) for default in defaults):
        argparse_arguments["nargs"] = "+"
    help_text = field_metadata["help"]
    # compared by identity with False, because the number 0 equals False
    shown_defaults = [
        value for value in defaults if value is not False and value not in (None, (), "")
    ]
    if shown_defaults:
        spelled_defaults = dict.fromkeys(map(field_metadata["spell"], shown_defaults))
        help_text += f" (default: {'; on CPU: '.join(spelled_defaults)})"
    help_text = help_text.replace("%", "%%")
    if field_metadata["operands"]:
        parser.add_argument(help=help_text, **argparse_arguments)
    else:
        parser.add_argument(_option_name(field.name), help=help_text, **argparse_arguments)


def _option_name(field_name: str) -> str:
    """Return the name of a field's option, such as "--out-folder" for "out_folder"."""
    return "--" + field_name.replace("_", "-")


def _suggest_option(unknown_option: str, option_names: Sequence[str]) -> str:
    """Return "did you mean ...?" for an unknown option, or the list of all options."""
    close_matches = difflib.get_close_matches(unknown_option, option_names, n=1)
    return (
        f"did you mean {close_matches[0]}?"
        if close_matches
        else f"the options are {', '.join(option_names)}."
    )


def _parse_option(field: dataclasses.Field, option_words: str | list[str]) -> Any:
    """Convert the words of an option to the value of its field.

    Args:
        field: the field of the settings.
        option_words: one word, or the list of words of an option that takes several.

    Raises:
        ValueError: the words are no valid value. The message names the field.
    """
    parse_text, is_repeatable = field.metadata["parse"], field.metadata["repeatable"]
    joined_words = option_words if isinstance(option_words, str) else ",".join(option_words)
    try:
        if is_repeatable:
            # parse to raise errors only: the value of a repeatable option is a tuple of strings
            for word in option_words:
                (parse_assignment if parse_text is str else parse_text)(word)
        if is_repeatable or field.metadata["operands"]:
            return tuple(option_words)
        value = parse_text(joined_words)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"must be a finite number, got {item}.")
        return value
    except ValueError as error:
        reason = (
            f"must be {NUMBER_DESCRIPTIONS[parse_text]}, got {joined_words}."
            if parse_text in NUMBER_DESCRIPTIONS
            else error
        )
        raise ValueError(f"{field.name}: {reason}") from error


def _read_yaml(path: str, field_by_name: Mapping[str, dataclasses.Field]) -> dict[str, list[str]]:
    """Read the options of a YAML file.

    Args:
        path: the file. It maps each option to a word, to a list of words, or to a mapping whose
            items become words ``field=value``.
        field_by_name: fields of the settings by name.

    Returns:
        The words of each option, by name of its field.

    Raises:
        ValueError: the file cannot be read, is no mapping, or contains an unknown option.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{CONFIG_OPTION} must be a YAML file, got {path} ({first_line(error)})."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{CONFIG_OPTION} must contain a mapping from option to value, got {path} without one."
        )
    words_by_field = {}
    for option_name, value in content.items():
        field_name = str(option_name).replace("-", "_")
        if field_name not in field_by_name:
            raise ValueError(
                f"{path} contains the unknown option {option_name!r}; "
                f"{_suggest_option(field_name, list(field_by_name))}"
            )
        if isinstance(value, dict):
            value = [f"{mapping_key}={setting!r}" for mapping_key, setting in value.items()]
        if value is not None:
            words_by_field[field_name] = [
                str(list_item) for list_item in (value if isinstance(value, list) else [value])
            ]
    return words_by_field


def to_command_line(recorded_settings: Mapping[str, Any], settings_class: type) -> list[str]:
    """Convert recorded settings to the words of a command line, without options at their default.

    Args:
        recorded_settings: settings as read from JSON. A setting that is a file was recorded as a
            mapping with the key "name". Names that are no fields of ``settings_class`` are ignored.
        settings_class: the settings dataclass.
    """
    is_on_cpu = str(recorded_settings.get("device", "cpu")).startswith("cpu")
    command_line_words = []
    for field in dataclasses.fields(settings_class):
        value = recorded_settings.get(field.name)
        if value is None:
            continue
        value = value["name"] if isinstance(value, Mapping) else value
        field_metadata, default = field.metadata, field.metadata["defaults"][-1 if is_on_cpu else 0]
        values, default_values = (
            value_or_values if field_metadata["repeatable"] else [value_or_values]
            for value_or_values in (value, default)
        )
        spelled_values = list(map(field_metadata["spell"], values))
        if default is None or spelled_values != list(map(field_metadata["spell"], default_values)):
            for spelled_value in spelled_values:
                command_line_words += [_option_name(field.name), spelled_value]
    return command_line_words
