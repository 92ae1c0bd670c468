"""The options of `fidelity`: methods and their configs, budgets, texts and probes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from cab_hf.config import CabConfig
from cab_hf.data.needles import PERSON_NAMES
from cab_hf.data.tasks import TASKS
from cab_hf.decode.step import decodes_sparsely
from cab_hf.eval.haystack import read_sentences
from cab_hf.eval.long_run import MATCH_BUDGET, LongRunSettings
from cab_hf.eval.methods import CACHES, METHODS, Cab, Method, Published, with_known_predictor
from cab_hf.eval.probes import (
    ALL_TASKS,
    ASKED,
    ASKED_KEY_PROBES,
    CONTINUATION_DIVISOR,
    DECODE,
    DECODE_PROBES,
    DEFAULT_PROBES,
    GREEDY,
    NOISE_TEXT_NAME,
    NUM_TURNS,
    PERPLEXITY_BORDER,
    PROBES,
    RECALL_BORDER,
    TURNS,
    find_border,
)
from cab_hf.eval.teacher_forcing import DEFAULT_CHUNK_TOKENS
from cab_hf.experiment.settings import (
    by_device,
    comma_separated,
    option,
    parse_assignment,
    parse_length,
    require,
)

# values of --equal: the quantity in which baselines equal the method of --match. TIME is also the
# probe that measures the attention time of a cell.
DENSITY, TIME = "density", "time"
# accepted relative difference of a baseline's density or time from its budget
MATCH_TOLERANCE = 0.05
# a comma between assignments; a comma inside a value, such as a list, has no assignment after it
FIELD_SEPARATOR_PATTERN = re.compile(r",(?=\s*\w+\s*=)")
VARIANT_NAME_PATTERN = re.compile(r"[\w.-]+")
YAML_SUFFIXES = (".yaml", ".yml")


def parse_budget(budget_text: str) -> str | float:
    """Return a value of ``--budgets``: a density as float, or `MATCH_BUDGET`."""
    return MATCH_BUDGET if budget_text == MATCH_BUDGET else float(budget_text)


def parse_cab_config(variant_fields: str | Mapping[str, Any]) -> CabConfig:
    """Return the config of a variant, the part of ``--variant`` after ``NAME=``.

    The default of ``min_length`` is 0, so that attention is sparse at any length.

    Args:
        variant_fields: ``field=value,field=value``, the path of a JSON file, or a mapping of
            fields. The ``min_length`` in a JSON file is ignored.

    Raises:
        ValueError: the file does not exist, or a name is no field of CabConfig.
    """
    if isinstance(variant_fields, Mapping):
        return CabConfig.from_dict({"min_length": 0, **variant_fields})
    if not variant_fields.endswith(".json"):
        return parse_cab_config(
            dict(map(parse_assignment, filter(None, FIELD_SEPARATOR_PATTERN.split(variant_fields))))
        )
    try:
        json_content = json.loads(Path(variant_fields).read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"variant must name a JSON file of CabConfig fields ({error}).") from None
    config_fields = (
        json_content.get("cab_config", json_content)
        if isinstance(json_content, dict)
        else json_content
    )
    # the min_length of a saved config may exceed the lengths of the run, whose attention would be
    # dense
    return CabConfig.from_dict(config_fields).changed(min_length=0)


def parse_variant(variant: str) -> dict[str, Any]:
    """Return name -> argument of `parse_cab_config` for one value of ``--variant``.

    Args:
        variant: ``NAME=...``, or the path of a YAML file with fields below each name.

    Raises:
        ValueError: the file does not exist, or contains no configurations by name.
    """
    import yaml

    if "=" in variant or not variant.endswith(YAML_SUFFIXES):
        return dict([parse_assignment(variant)])
    try:
        yaml_content = yaml.safe_load(Path(variant).read_text("utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"variant must be a YAML file of configurations, got {variant} ({reason})."
        ) from None
    has_variants = isinstance(yaml_content, Mapping) and yaml_content
    if not has_variants or not all(isinstance(fields, Mapping) for fields in yaml_content.values()):
        raise ValueError(
            "variant must be a YAML file with names, and fields of CabConfig below each name, got "
            f"{variant}."
        )
    return {str(name): fields for name, fields in yaml_content.items()}


def format_recorded_variant(variant: str) -> str:
    """Return a value of ``--variant`` as results record it: its file without the folder."""
    if variant.endswith(YAML_SUFFIXES):
        return Path(variant).name
    name, value = parse_assignment(variant)
    return f"{name}={Path(value).name if value.endswith('.json') else value}"


def format_texts_option(texts: Sequence[str | Mapping[str, str]]) -> str:
    """Return the value of ``--texts`` for a command line.

    Args:
        texts: paths from the settings, or mappings with the file's ``name`` from recorded settings.
    """
    return ",".join(text["name"] if isinstance(text, Mapping) else text for text in texts)


def find_method_class(method: str) -> type[Method]:
    """Return the class of the method named ``method``; ``cab:NAME`` has the class of cab."""
    return METHODS[method.partition(":")[0]]


@dataclass(frozen=True)
class Settings(LongRunSettings):
    """Settings of a run. None: a default that depends on the device."""

    methods: tuple[str, ...] | None = by_device(
        ("dense", "full", "cab", "published", "streaming", "random", "antidiagonal"),
        ("dense", "full", "cab", "random"),
        f"comma-separated methods: {', '.join(METHODS)}",
        comma_separated(str),
    )
    variant: tuple[str, ...] = option(
        (),
        "another configuration as method cab:NAME: NAME=field=value,... or NAME=FILE.json; "
        "FILE.yaml contains several, with fields below names; repeatable",
        parse_variant,
        repeatable=True,
    )
    lengths: tuple[int, ...] | None = by_device(
        (8192,), (1536,), "comma-separated lengths in tokens", comma_separated(parse_length)
    )
    prefill_chunk: int = option(0, "tokens per chunk of a prompt; 0: the prompt in one call", int)
    budgets: tuple[str | float, ...] = option(
        (MATCH_BUDGET,),
        f"comma-separated densities of the baselines: {MATCH_BUDGET} (the density of "
        f"--{MATCH_BUDGET}) or numbers",
        comma_separated(parse_budget),
    )
    match: str = option(Cab.name, "method whose density is matched: cab or cab:NAME")
    equal: str = option(
        DENSITY,
        f"what is matched: {DENSITY}, or {TIME} of attention including block selection, within "
        f"{MATCH_TOLERANCE:.0%}",
    )
    texts: tuple[str, ...] = option(
        (NOISE_TEXT_NAME,),
        f"comma-separated texts: {NOISE_TEXT_NAME} (five sentences) or UTF-8 files; short texts "
        "repeat",
        comma_separated(str),
        spell=format_texts_option,
    )
    probes: tuple[str, ...] = option(
        DEFAULT_PROBES,
        f"comma-separated probes: {', '.join(PROBES)}; {ALL_TASKS}: the last {len(TASKS)}",
        comma_separated(str),
    )
    depths: int | None = by_device(
        20, 2, "number of depths of the key in a prompt, evenly spaced", int
    )
    pass_samples: int | None = by_device(100, 2, "prompts per length, over all depths", int)
    documents: int | None = by_device(20, 1, "documents per length", int)
    task_samples: int | None = by_device(100, 2, "prompts per length and task", int)
    keys: int | None = by_device(12, 4, "keys per document of recall", int)
    asked: int | None = by_device(
        12,
        4,
        f"keys per prompt of the probe {ASKED}, all asked for after it; 0: none",
        int,
    )
    decoded: int | None = by_device(
        512, 48, f"tokens after a prompt that the probe {DECODE} reads one at a time", int
    )
    continuations: int | None = by_device(100, 2, f"prompts per length for {GREEDY}", int)
    written: int | None = by_device(256, 32, f"tokens that {GREEDY} generates after a prompt", int)
    out: str = option(
        "fidelity_results", "folder for the results; a run in this folder is continued"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        probes = chain.from_iterable(
            (*TASKS,) if probe == ALL_TASKS else (probe,) for probe in self.probes
        )
        object.__setattr__(self, "probes", tuple(dict.fromkeys(probes)))
        self._check_methods_and_budgets(partial(require, self))
        self._check_texts_and_probes(partial(require, self))
        self._check_lengths(partial(require, self))

    def _check_methods_and_budgets(self, require_setting: partial) -> None:
        self.check_methods()
        for method in (name for name in self.methods if find_method_class(name).has_dense_prefill):
            requirement = f"without {method} if no probe decodes, because its prefill is dense"
            require_setting("methods", self.decoding_probes, requirement, method)
            requirement = f"0 with {method}, which reads a prompt in one call"
            require_setting("prefill_chunk", not self.prefill_chunk, requirement)
        # only tokens after the first token of a text can be predicted
        require_setting(
            "lengths", self.lengths and min(self.lengths) > 1, "numbers of tokens, 2 or more"
        )
        require_setting("prefill_chunk", self.prefill_chunk >= 0, "0 or more")
        densities = [budget for budget in self.budgets if budget != MATCH_BUDGET]
        are_budgets_valid = self.budgets and all(0 < density <= 1 for density in densities)
        require_setting("budgets", are_budgets_valid, f"{MATCH_BUDGET} or densities in (0, 1]")
        require_setting("equal", self.equal in (DENSITY, TIME), f"{DENSITY} or {TIME}")
        are_budgets_valid = self.equal == DENSITY or self.budgets == (MATCH_BUDGET,)
        require_setting("budgets", are_budgets_valid, f"{MATCH_BUDGET} with --equal {TIME}")
        # `configs` also raises an error for fields that CabConfig refuses, before the run starts
        require_setting("match", self.match in self.configs, f"one of {', '.join(self.configs)}")
        can_match = MATCH_BUDGET not in self.budgets or self.match in self.compared_methods
        self.check_match("budgets", self.match, can_match)
        cache_methods = (
            [name for name in self.methods if name in CACHES] if self.decoding_probes else []
        )
        require_setting(
            "match",
            not cache_methods
            or MATCH_BUDGET not in self.budgets
            or self.configs[self.match].sparse_decode,
            f"a config with sparse_decode=true, whose steps {', '.join(cache_methods)} match in "
            "bytes",
        )

    def _check_texts_and_probes(self, require_setting: partial) -> None:
        has_questions = self.asked or set(self.probes) - {*ASKED_KEY_PROBES}
        require_setting("asked", has_questions, "at least 1 if all probes ask for keys")
        for probe in self.probes:
            require_setting("probes", probe in PROBES, f"one or more of {', '.join(PROBES)}", probe)
        require_setting("probes", self.probes, "at least one name")
        for text in self.texts:
            require_setting(
                "texts",
                text == NOISE_TEXT_NAME or Path(text).is_file(),
                f"{NOISE_TEXT_NAME} or existing text files",
                text,
            )
        for text in filter(NOISE_TEXT_NAME.__ne__, self.texts):
            read_sentences("texts", text)
        has_distinct_texts = self.texts and len(self.file_by_text) == len(self.texts)
        require_setting(
            "texts",
            has_distinct_texts,
            "at least one, with different names without folder and suffix",
        )
        names_of_counts = ("depths", "pass_samples", "task_samples", "documents", "continuations")
        for name in (*names_of_counts, "decoded", "written"):
            require_setting(name, getattr(self, name) > 0, "at least 1")
        require_setting("keys", 1 <= self.keys <= len(PERSON_NAMES), f"1 to {len(PERSON_NAMES)}")
        require_setting("asked", 0 <= self.asked <= len(PERSON_NAMES), f"0 to {len(PERSON_NAMES)}")
        has_borders = all(
            self.border_interval_tokens % config.query_block == 0
            for config in self.configs.values()
        )
        requirement = (
            "without probes at block starts if query blocks do not divide "
            f"{self.border_interval_tokens}"
        )
        needs_borders = {RECALL_BORDER, PERPLEXITY_BORDER} & set(self.probes)
        require_setting("probes", has_borders or not needs_borders, requirement)

    def _check_lengths(self, require_setting: partial) -> None:
        # tokens of the shortest prompt: at most 1 / CONTINUATION_DIVISOR of a text is decoded
        min_prompt_length = min(self.lengths) * (CONTINUATION_DIVISOR - 1) // CONTINUATION_DIVISOR
        for config in self.configs.values() if self.decoding_probes else ():
            require_setting(
                "lengths",
                not config.sparse_decode or decodes_sparsely(config, min_prompt_length),
                "so long that 7/8 of each is at least 4 times "
                f"decode_tokens={config.decode_tokens}; decoding is dense below",
            )
        query_blocks = [config.query_block for config in self.configs.values()]
        if Published.name in self.methods:
            query_blocks.append(CabConfig.published().query_block)
        min_length = 2 * NUM_TURNS * max(query_blocks)
        require_setting(
            "lengths",
            TURNS not in self.probes or min(self.lengths) >= min_length,
            f"at least {min_length} each for {TURNS}: {NUM_TURNS} turns of 2 query blocks of "
            f"{max(query_blocks)}",
        )

    @cached_property
    def file_by_text(self) -> dict[str, str | None]:
        """Name of each text -> path of its file; None for the built-in text `NOISE_TEXT_NAME`.

        The name is the name of the file without folder and suffix.
        """
        return {Path(text).stem: None if text == NOISE_TEXT_NAME else text for text in self.texts}

    @property
    def border_interval_tokens(self) -> int:
        """Tokens between positions at which a query block starts in every config."""
        return find_border(config.query_block for config in self.configs.values())

    @property
    def decoding_probes(self) -> set[str]:
        """The probes of the run that are in `DECODE_PROBES`."""
        return {*self.probes} & {*DECODE_PROBES}

    @cached_property
    def configs(self) -> dict[str, CabConfig]:
        """The configs by method: ``cab`` from ``--cab``, and ``cab:NAME`` from ``--variant``."""
        config_by_method = {Cab.name: CabConfig.from_dict({"min_length": 0, **self.cab_fields})}
        variants = chain.from_iterable(
            parse_variant(variant_text).items() for variant_text in self.variant
        )
        for name, variant_fields in variants:
            require(
                settings=self,
                field_name="variant",
                condition=VARIANT_NAME_PATTERN.fullmatch(name)
                and isinstance(variant_fields, (str, Mapping))
                and variant_fields,
                requirement="NAME=field=value,... or NAME=FILE.json",
                value=f"{name}={variant_fields}",
            )
            config_by_method[f"{Cab.name}:{name}"] = parse_cab_config(variant_fields)
        return {name: with_known_predictor(config) for name, config in config_by_method.items()}

    @cached_property
    def dense_chunk_tokens(self) -> int:
        """The number of tokens after a prompt that are read per call.

        The number is smaller than the query block of every config, so that calls after a prompt
        attend densely.
        """
        min_query_block = min(config.query_block for config in self.configs.values())
        return min(DEFAULT_CHUNK_TOKENS, min_query_block - 1, CabConfig.published().query_block - 1)

    @cached_property
    def compared_methods(self) -> tuple[str, ...]:
        """The names of all methods, with variants. Methods that get a budget come last.

        The budget may follow from samples of the other methods.
        """
        variant_methods = [name for name in self.configs if name != Cab.name]
        return tuple(
            sorted(
                (*self.methods, *variant_methods),
                key=lambda name: find_method_class(name).is_budget_matched,
            )
        )
