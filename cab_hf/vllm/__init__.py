"""Sparse prompts inside vLLM: a plugin that it finds where cab_hf is installed.

``vllm serve MODEL --attention-backend CUSTOM`` turns it on. Settings are the fields of `CabConfig`
in ``--additional-config '{"cab": {...}}'``, else the model's saved ``cab_config``, else the
defaults. On a CPU, which has one attention backend, "cab" in ``additional_config`` turns it on.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from cab_hf.checks import warn_once
from cab_hf.config import TABLES, CabConfig
from cab_hf.hf.fit import require_layers, require_origin

# between these the registry of backends and the arguments of `forward` are the same
OLDEST, NEWEST = "0.22.1", "0.32"


def register() -> None:
    """What vLLM calls in each of its processes, as a plugin of ``vllm.general_plugins``."""
    try:
        from vllm.config import VllmConfig
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        warn_once(("vllm", "registry"), str(_unsupported()))
        return
    if _unsupported() is None:
        register_backend(AttentionBackendEnum[backend_name()], "cab_hf.vllm.backend.CabBackend")
    finish = VllmConfig.__post_init__

    def finish_and_prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        prepare(self)

    if finish.__module__ != __name__:
        VllmConfig.__post_init__ = finish_and_prepare


def prepare(vllm_config: Any) -> None:
    """Choose the scheduler of an engine that attends sparsely; ValueError for what cannot be."""
    config = settings_of(vllm_config)
    if config is None:
        return
    refusal = _unsupported() or _unrunnable(config, vllm_config)
    if refusal is not None:
        raise ValueError(refusal)
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None:
        kind = "CabAsyncScheduler" if scheduler.async_scheduling else "CabScheduler"
        scheduler.scheduler_cls = f"cab_hf.vllm.scheduler.{kind}"
    logging.getLogger("vllm.cab_hf").info(
        "cab_hf: prompts of %s tokens and more are attended sparsely (predictor %s); vLLM itself "
        "attends shorter ones, decodes, and computes layers with a window, sinks or a soft cap.",
        *(f"{config.min_length:,}", config.predictor),
    )


def settings_of(vllm_config: Any) -> CabConfig | None:
    """The `CabConfig` of an engine; None where it does not attend sparsely.

    Raises:
        ValueError: for fields that do not exist or do not fit the model, and for settings of an
            engine with another attention backend.
    """
    extra, model = vllm_config.additional_config, vllm_config.model_config
    given = extra.get("cab") if isinstance(extra, dict) else None
    backend = getattr(vllm_config.attention_config.backend, "name", "chosen by vLLM")
    on = backend == "CUSTOM" if backend_name() == "CUSTOM" else given is not None
    if given is not None and not on:
        raise ValueError(
            f"additional_config has 'cab', and the attention backend is {backend}; start vLLM with "
            "--attention-backend CUSTOM."
        )
    if not on or model is None:
        return None
    text = model.hf_text_config
    fields = given or getattr(text, "cab_config", None) or {}
    config = fields if isinstance(fields, CabConfig) else CabConfig.from_dict(fields)
    require_origin(config.origin, text)
    require_layers(config, text)
    # steps of decode are the parent's
    return replace(config, sparse_decode=False)


def _unrunnable(config: CabConfig, vllm_config: Any) -> str | None:
    """Why the settings would not be what is computed; None where they are."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        tokens, block = getattr(scheduler, name), config.query_block
        if 0 < tokens < block:
            return f"{name} is {tokens}; chunks of prompts need query_block={block} at least."
    usual = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    for name, value in (usual | {"enable_dbo": False}).items():
        if getattr(parallel, name, value) != value:
            return f"{name} is {getattr(parallel, name)}; 'cab' needs {value} in vLLM."
    tables = [name for name in TABLES if isinstance(getattr(config, name), tuple)]
    if parallel.tensor_parallel_size > 1 and any(getattr(config, name) for name in tables):
        return "tensor_parallel_size must be 1 where cab_config has tables of all heads."
    return None


def _unsupported() -> str | None:
    from packaging.version import Version
    from vllm import __version__

    release = Version(__version__).release
    if Version(OLDEST).release <= release and release[:2] <= Version(NEWEST).release:
        return None
    return f"vLLM is {__version__}; 'cab' runs in {OLDEST} to {NEWEST}."


def backend_name() -> str:
    """Under which vLLM's registry has the backend; a CPU has one, which is replaced."""
    from vllm.platforms import current_platform

    return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"
