"""The switch by which a request is read densely, and the keys of what it caches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from cab_hf.checks import short
from cab_hf.config import CabConfig
from cab_hf.vllm import settings_of

# the name in ``SamplingParams.extra_args``, which the API fills from ``vllm_xargs``
SWITCH = "cab"
DENSE = (False, 0, "false", "dense")
SPARSE = (True, 1, "true", "sparse")


def is_dense(params: Any) -> bool:
    """Return whether a request asks that its prompt is read densely.

    Raises:
        ValueError: for a value that says neither.
    """
    value = (getattr(params, "extra_args", None) or {}).get(SWITCH, True)
    value = value.lower() if isinstance(value, str) else value
    if value in DENSE:
        return True
    if value in SPARSE:
        return False
    raise ValueError(
        f"vllm_xargs['{SWITCH}'] must be true or false, got {short(value)}. Set it to false to "
        "read the prompt densely."
    )


def salt_of(config: CabConfig, params: Any, salt: str | None) -> str:
    """Return the cache salt of a request: its own salt, and the settings that compute its KV."""
    settings = "dense" if is_dense(params) else digest_of(config)
    return f"cab-{settings}" + (f"-{salt}" if salt else "")


@lru_cache
def digest_of(config: CabConfig) -> str:
    """Return a short text that differs between settings and is the same in every process."""
    text = json.dumps(config.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def watch_requests() -> None:
    """Have the engine key what it caches, and refuse a wrong switch where requests come in."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    def key(engine: Any, request: Any) -> None:
        if not hasattr(engine, "cab_settings"):
            engine.cab_settings = settings_of(engine.vllm_config)
        if engine.cab_settings is not None:
            params, salt = request.sampling_params, request.cache_salt
            request.cache_salt = salt_of(engine.cab_settings, params, salt)

    def check(
        processor: Any, request_id: str, prompt: Any, params: Any, *_: Any, **__: Any
    ) -> None:
        if settings_of(processor.vllm_config) is not None:
            is_dense(params)

    hook(EngineCore, "preprocess_add_request", before=key)
    hook(InputProcessor, "process_inputs", before=check)


def hook(
    kind: type,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[[Any, Any], None] | None = None,
) -> None:
    """Call a function before or after a method of a class; does nothing the second time.

    Args:
        kind: the class.
        name: of the method.
        before: gets the arguments of the method.
        after: gets the object and what the method returns.
    """
    method = getattr(kind, name)
    if hasattr(method, "of_cab_hf"):
        return

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, *args, **kwargs)
        made = method(self, *args, **kwargs)
        if after is not None:
            after(self, made)
        return made

    call.of_cab_hf = True
    setattr(kind, name, call)
