"""The switch with which a client makes its request dense, and the cache salts of requests.

The salts keep requests with different settings from sharing entries of the prefix cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from cab_hf.checks import short
from cab_hf.config import CabConfig
from cab_hf.vllm import settings_of

# key of the switch in ``SamplingParams.extra_args``, which the API fills from ``vllm_xargs``
SWITCH = "cab"
DENSE = (False, 0, "false", "dense")
SPARSE = (True, 1, "true", "sparse")


def is_dense(params: Any) -> bool:
    """Return True if the switch of a request selects dense attention for its prompt.

    Args:
        params: ``SamplingParams`` of the request; None for a request without sampling.

    Raises:
        ValueError: the value of the switch is unknown.
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
    """Return a cache salt of a request that depends on the settings of attention.

    Requests with different salts do not share K and V in the prefix cache.

    Args:
        config: the settings of the engine.
        params: ``SamplingParams`` of the request.
        salt: the salt in the client's request; None if the request has no salt.
    """
    settings = "dense" if is_dense(params) else digest_of(config)
    return f"cab-{settings}" + (f"-{salt}" if salt else "")


@lru_cache
def digest_of(config: CabConfig) -> str:
    """Return 16 hexadecimal digits of a hash of the settings, equal in every process."""
    settings = json.dumps(config.to_dict(), sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def watch_requests() -> None:
    """Install hooks in vLLM that check the switch of each request and set its cache salt.

    Calling the function again has no effect.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    def set_salt(engine: Any, request: Any) -> None:
        if not hasattr(engine, "cab_settings"):
            engine.cab_settings = settings_of(engine.vllm_config)
        if engine.cab_settings is not None:
            params, salt = request.sampling_params, request.cache_salt
            request.cache_salt = salt_of(engine.cab_settings, params, salt)

    def check_switch(
        processor: Any, request_id: str, prompt: Any, params: Any, *_: Any, **__: Any
    ) -> None:
        # `is_dense` raises an error, which the client receives, for an unknown value
        if settings_of(processor.vllm_config) is not None:
            is_dense(params)

    hook(EngineCore, "preprocess_add_request", before=set_salt)
    hook(InputProcessor, "process_inputs", before=check_switch)


def hook(
    cls: type,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[[Any, Any], None] | None = None,
) -> None:
    """Wrap a method so that ``before`` runs before and ``after`` runs after each call.

    Wrapping the same method again has no effect.

    Args:
        cls: the class that has the method.
        name: name of the method.
        before: function that receives the object and the arguments of the call; None for none.
        after: function that receives the object and the result of the call; None for none.
    """
    method = getattr(cls, name)
    if hasattr(method, "of_cab_hf"):
        return

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, *args, **kwargs)
        result = method(self, *args, **kwargs)
        if after is not None:
            after(self, result)
        return result

    call.of_cab_hf = True
    setattr(cls, name, call)
