"""What every speed op is told: settings that know their device and what identifies a row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch

from cab_hf.config import CabConfig
from cab_hf.runs.settings import (
    by_device,
    comma_separated,
    fill_by_device,
    option,
    parse_assignment,
    require,
)

DTYPES = ("bfloat16", "float16", "float32")
# more of the attention mass than any budget holds: every row of blocks fills its budget
UNREACHED_MASS = {"mass": 0.999}


@dataclass(frozen=True)
class SpeedSettings:
    """What every speed run is told. None stands for a default that depends on the device.

    Attributes:
        KEYS: what identifies a row -> the option that lists its values. A run measures their
            product, the last one varying fastest.
        METHOD: device type -> how it is measured, in words.

    Raises:
        ValueError: naming the option, the value seen and what is accepted.
    """

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths"}
    METHOD: ClassVar[Mapping[str, str]] = {}

    lengths: tuple[int, ...] | None = by_device((), (), "tokens", comma_separated(int))
    dtype: str | None = by_device("bfloat16", "float32", f"one of {', '.join(DTYPES)}")
    config: tuple[str, ...] = option(
        (), "field=value of CabConfig, e.g. mass=0.8; repeatable", repeatable=True
    )
    out: str = option("speed_results", "folder for the results; a run found there goes on")
    seed: int = option(0, "of the inputs", int)
    device: str | None = option(None, "torch device; the default is the GPU, and cpu is for tests")

    def __post_init__(self) -> None:
        device = self.device or "cuda"
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device is {device!r} and torch finds no CUDA device; run it where there is a "
                "GPU, or see it work at tiny lengths with --device cpu."
            )
        self._set("device", device)
        fill_by_device(self, self.on_cpu)
        for name in self.KEYS.values():
            # given twice, measured once
            self._set(name, tuple(dict.fromkeys(getattr(self, name))))
        self._set("lengths", tuple(sorted(self.lengths)))
        self.check("lengths", self.lengths and self.lengths[0] > 0, "numbers of tokens")
        self.check("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        _ = self.cab_config  # refuses bad fields here rather than in the middle of a run

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check(self, name: str, holds: object, accepted: str) -> None:
        """Refuse the field ``name`` unless ``holds``."""
        require(self, name, holds, accepted)

    def check_positive(self, *names: str) -> None:
        """Refuse fields below 1."""
        for name in names:
            self.check(name, getattr(self, name) > 0, "at least 1")

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    def check_heads(self) -> None:
        """Refuse query heads that the key and value heads do not divide."""
        self.check_positive("kv_heads")
        divides = self.heads > 0 and self.heads % self.kv_heads == 0
        self.check("heads", divides, f"a multiple of kv_heads={self.kv_heads}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def method(self) -> str:
        return self.METHOD[torch.device(self.device).type]

    @cached_property
    def cab_config(self) -> CabConfig:
        """CAB's config: ``--config`` over the defaults."""
        return self.configured({})

    def configured(self, defaults: Mapping[str, Any], **fixed: Any) -> CabConfig:
        """``--config`` over ``defaults``; ValueError where it sets what is ``fixed`` elsewhere."""
        given = dict(map(parse_assignment, self.config))
        twice = sorted(fixed.keys() & given.keys())
        if twice:
            raise ValueError(
                f"config sets {twice[0]}, which is an option of its own here, or what is measured."
            )
        return CabConfig.from_dict({**defaults, **given, **fixed})

    def asked(self) -> list[dict[str, Any]]:
        """The keys of the rows asked for: what identifies each of them."""
        lists = (getattr(self, name) for name in self.KEYS.values())
        return [dict(zip(self.KEYS, values, strict=True)) for values in itertools.product(*lists)]

    def follow_up(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Keys that only the rows of all that was asked can name; none for most ops."""
        return []

    def identity(self) -> dict[str, Any]:
        """What a row depends on, without paths. What its key says is left out: a run can grow."""
        left_out = (*self.KEYS.values(), "out", "config")
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return {**kept, "cab_config": self.cab_config.to_dict(), "method": self.method}
