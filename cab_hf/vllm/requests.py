"""The switch by which a client selects dense attention for its request, and the cache salts.

The salts keep requests with different settings from sharing entries of the prefix cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from cab_hf.checks import short_repr
from cab_hf.config import CabConfig
from cab_hf.vllm import settings_of

# key in ``SamplingParams.extra_args``, which the API fills from the field ``vllm_xargs`` of a
# request. The value of the key switches between dense and sparse attention for the prompt.
SWITCH_KEY = "cab"
DENSE_SWITCH_VALUES = (False, 0, "false", "dense")
SPARSE_SWITCH_VALUES = (True, 1, "true", "sparse")


def is_dense_requested(sampling_params: Any) -> bool:
    """Return True if the `SWITCH_KEY` of a request selects dense attention for its prompt.

    Args:
        sampling_params: ``SamplingParams`` of the request; None for a request without sampling.

    Raises:
        ValueError: the value of the switch is unknown.
    """
    switch_value = (getattr(sampling_params, "extra_args", None) or {}).get(SWITCH_KEY, True)
    switch_value = switch_value.lower() if isinstance(switch_value, str) else switch_value
    if switch_value in DENSE_SWITCH_VALUES:
        return True
    if switch_value in SPARSE_SWITCH_VALUES:
        return False
    raise ValueError(
        f"vllm_xargs['{SWITCH_KEY}'] must be true or false, got {short_repr(switch_value)}. Set it "
        "to false to read the prompt densely."
    )


def make_cache_salt(config: CabConfig, sampling_params: Any, client_salt: str | None) -> str:
    """Return a cache salt of a request that depends on the settings of attention.

    Requests with different salts do not share K and V in the prefix cache.

    Args:
        config: the settings of the engine.
        sampling_params: ``SamplingParams`` of the request.
        client_salt: the salt in the client's request; None if the request has no salt.
    """
    settings_text = "dense" if is_dense_requested(sampling_params) else settings_digest(config)
    return f"cab-{settings_text}" + (f"-{client_salt}" if client_salt else "")


@lru_cache
def settings_digest(config: CabConfig) -> str:
    """Return 16 hexadecimal digits of a hash of the settings, equal in every process."""
    settings_json = json.dumps(config.to_dict(), sort_keys=True)
    return hashlib.sha256(settings_json.encode()).hexdigest()[:16]


def install_request_hooks() -> None:
    """Install hooks in vLLM that check the switch of each request and set its cache salt.

    Calling the function again has no effect.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    def set_cache_salt(engine: Any, request: Any) -> None:
        if not hasattr(engine, "cab_settings"):
            engine.cab_settings = settings_of(engine.vllm_config)
        if engine.cab_settings is not None:
            sampling_params, client_salt = request.sampling_params, request.cache_salt
            request.cache_salt = make_cache_salt(engine.cab_settings, sampling_params, client_salt)

    def check_switch(
        processor: Any, request_id: str, prompt: Any, params: Any, *_: Any, **__: Any
    ) -> None:
        # `is_dense_requested` raises an error, which the client receives, for an unknown value
        if settings_of(processor.vllm_config) is not None:
            is_dense_requested(params)

    wrap_method(EngineCore, "preprocess_add_request", before_call=set_cache_salt)
    wrap_method(InputProcessor, "process_inputs", before_call=check_switch)


def wrap_method(
    cls: type,
    method_name: str,
    before_call: Callable[..., None] | None = None,
    after_call: Callable[[Any, Any], None] | None = None,
) -> None:
    """Wrap a method so that ``before_call`` runs before and ``after_call`` runs after each call.

    Wrapping the same method again has no effect.

    Args:
        cls: the class that has the method.
        method_name: name of the method.
        before_call: function that receives the object and the arguments of the call; None for none.
        after_call: function that receives the object and the result of the call; None for none.
    """
    original_method = getattr(cls, method_name)
    if hasattr(original_method, "of_cab_hf"):
        return

    @wraps(original_method)
    def call_with_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before_call is not None:
            before_call(self, *args, **kwargs)
        result = original_method(self, *args, **kwargs)
        if after_call is not None:
            after_call(self, result)
        return result

    call_with_hooks.of_cab_hf = True
    setattr(cls, method_name, call_with_hooks)
