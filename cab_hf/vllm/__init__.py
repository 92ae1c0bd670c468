"""A plugin of vLLM for sparse attention over prompts; vLLM finds the plugin by its entry point.

``vllm serve MODEL --attention-backend CUSTOM`` turns the plugin on. On a CPU, which has one
attention backend, "cab" in ``additional_config`` also turns the plugin on. The settings come from
the first of these sources:

* ``--additional-config '{"cab": ...}'``, a dict of `CabConfig` fields or the path of a calibration,
* ``cab_config`` in the config of the model,
* the defaults of `CabConfig`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from cab_hf.checks import short, warn_once
from cab_hf.config import TABLES, CabConfig
from cab_hf.hf.fit import require_layers, require_origin

# supported versions of vLLM: their backend registry and the arguments of `forward` are the same
OLDEST, NEWEST = "0.22.1", "0.33"
# key that `prepare` adds to the ``additional_config`` of an engine after it has checked the
# settings
PREPARED = "cab_prepared"

logger = logging.getLogger("vllm.cab_hf")
# True after vLLM has called `register` in this process
_registered = False


def register() -> None:
    """Register the attention backend and install the hooks of the plugin.

    vLLM calls this function, the entry point of the plugin, in each of its processes.
    """
    global _registered
    _registered = True
    try:
        from vllm.config import VllmConfig
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        warn_once(("vllm", "registry"), str(_unsupported()))
        return
    if _unsupported() is None:
        register_backend(AttentionBackendEnum[backend_name()], "cab_hf.vllm.backend.CabBackend")
    post_init = VllmConfig.__post_init__

    def post_init_and_prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        prepare(self)

    # do not wrap the method twice: vLLM may call `register` several times in a process
    if post_init.__module__ != __name__:
        VllmConfig.__post_init__ = post_init_and_prepare
    if "vllm.v1.engine.core" in sys.modules:
        # a separate engine process receives a prepared config and does not call `prepare`, which
        # would install these hooks
        from cab_hf.vllm.requests import watch_requests

        watch_requests()


def prepare(vllm_config: Any) -> None:
    """Check the settings of an engine, select its scheduler, and export its counters.

    Changes ``vllm_config`` if the engine uses the plugin, and leaves it unchanged otherwise.

    Raises:
        ValueError: vLLM cannot run with the settings.
    """
    config = settings_of(vllm_config)
    if config is None:
        return
    refusal = _unsupported() or _unrunnable(config, vllm_config)
    if refusal is not None:
        raise ValueError(refusal)
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None:
        name = "CabAsyncScheduler" if scheduler.async_scheduling else "CabScheduler"
        scheduler.scheduler_cls = f"cab_hf.vllm.scheduler.{name}"
    extra = vllm_config.additional_config
    if not isinstance(extra, dict) or PREPARED in extra:
        return
    # the resolved settings, because the calibration file may not exist on other nodes
    vllm_config.additional_config = {**extra, "cab": config.to_dict(), PREPARED: True}
    from cab_hf.vllm import metrics, requests

    metrics.export(vllm_config)
    requests.watch_requests()
    reason = never_sparse(config, vllm_config)
    if reason is not None:
        logger.warning("cab_hf: no prompt is attended sparsely: %s.", reason)


def settings_of(vllm_config: Any) -> CabConfig | None:
    """Return the `CabConfig` of an engine; None if the plugin is off, or for a draft model.

    Raises:
        ValueError: a field does not exist or does not fit the model, the engine has another
            attention backend, or VLLM_PLUGINS excludes this plugin.
    """
    extra, model = vllm_config.additional_config, vllm_config.model_config
    extra = extra if isinstance(extra, dict) else {}
    backend = getattr(vllm_config.attention_config.backend, "name", "selected by vLLM")
    if model is None or getattr(model, "runner_type", None) == "draft":
        return None
    is_on = backend == "CUSTOM" or (backend_name() != "CUSTOM" and "cab" in extra)
    if not is_on and PREPARED in extra:
        # a draft model, for which vLLM selects a backend separately
        return None
    if not is_on and "cab" in extra:
        raise ValueError(
            "attention backend must be CUSTOM if additional_config contains 'cab', got "
            f"{backend}. Start vLLM with --attention-backend CUSTOM."
        )
    if not is_on:
        return None
    if not _registered:
        raise ValueError(
            "VLLM_PLUGINS must contain cab_hf in every process of vLLM, and this process has not "
            "loaded it. Add cab_hf to VLLM_PLUGINS, or unset VLLM_PLUGINS."
        )
    model_config = model.hf_text_config
    config = _config_of(extra.get("cab") or getattr(model_config, "cab_config", None) or {})
    require_origin(config.origin, model_config)
    require_layers(config, model_config)
    # decode steps are never sparse, because vLLM's own attention computes them
    return replace(config, sparse_decode=False)


def _config_of(settings: Any) -> CabConfig:
    """Return the `CabConfig` of settings in one of three forms.

    The settings are a dict of `CabConfig` fields, the path of a calibration file, or a `CabConfig`.

    Raises:
        ValueError: the settings have another type, or are invalid.
    """
    if isinstance(settings, CabConfig):
        return settings
    if isinstance(settings, str):
        return CabConfig.calibrated(settings)
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"additional_config['cab'] must be a dict of CabConfig fields or the path of a "
            f"calibration, got {short(settings)}."
        )
    return CabConfig.from_dict(settings)


def _unrunnable(config: CabConfig, vllm_config: Any) -> str | None:
    """Return an error message if vLLM cannot run with the settings, else None.

    Raises:
        ValueError: the predictor of the settings is not registered.
    """
    from cab_hf.predictors import make_predictor

    # called for its error if the predictor is unknown
    make_predictor(config)
    model, attention = vllm_config.model_config, vllm_config.attention_config
    # with a backend per kind of layers, vLLM's own backend computes the layers with latent
    # attention
    has_backend_per_kind = bool(getattr(attention, "backend_per_kind", None))
    if getattr(model, "use_mla", False) and backend_name() == "CUSTOM" and not has_backend_per_kind:
        return (
            "attention backend must not be CUSTOM for a model with multi-head latent attention, "
            "got CUSTOM. Start vLLM without --attention-backend CUSTOM."
        )
    parallel = vllm_config.parallel_config
    supported = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
    }
    for name, value in supported.items():
        if getattr(parallel, name, value) != value:
            return (
                f"{name} must be {value} for 'cab', got {getattr(parallel, name)}. Start vLLM with "
                f"{value}."
            )
    for connector in _connectors(vllm_config.kv_transfer_config):
        if connector not in KEYED_CONNECTORS:
            return (
                f"kv_connector must be one of {', '.join(KEYED_CONNECTORS)}, got {connector}. "
                "Use one of these connectors, which never load KV of other settings."
            )
    tables = [name for name in TABLES if isinstance(getattr(config, name), tuple)]
    if parallel.tensor_parallel_size > 1 and any(getattr(config, name) for name in tables):
        return (
            "tensor_parallel_size must be 1 if cab_config has tables of all heads, got "
            f"{parallel.tensor_parallel_size}. Use one rank, or one number per setting."
        )
    return None


# KV connectors whose keys contain vLLM's block hashes or the cache salt. Both depend on the
# settings, so that an engine never loads K and V that other settings computed
KEYED_CONNECTORS = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
    "LMCacheMPConnector",
)


def _connectors(transfer: Any) -> Iterator[str]:
    """Yield the names of the KV connectors of an engine; ``transfer`` is its KVTransferConfig."""
    if transfer is None or transfer.kv_connector is None:
        return
    if transfer.kv_connector != "MultiConnector":
        yield transfer.kv_connector
    for connector in transfer.kv_connector_extra_config.get("connectors", ()):
        yield connector["kv_connector"]


def never_sparse(config: CabConfig, vllm_config: Any) -> str | None:
    """Return the reason why the plugin computes no prompt of an engine sparsely.

    Returns None if prompts may be sparse, as far as the config of the engine shows.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(model, "is_attention_free", False):
        return "the model has no attention"
    if getattr(model, "use_mla", False):
        return "the model has multi-head latent attention, which vLLM computes"
    if getattr(model, "runner_type", "generate") != "generate":
        return f"the model runs as {model.runner_type}, and 'cab' reads prompts of generation"
    if cache.cache_dtype not in PLAIN_CACHES:
        return f"kv_cache_dtype is {cache.cache_dtype}, which vLLM's own attention reads"
    if config.min_length > model.max_model_len:
        return (
            f"min_length is {config.min_length:,} and max_model_len {model.max_model_len:,} tokens"
        )
    return None


# values of kv_cache_dtype for unquantised keys and values, the only ones that the plugin can read
PLAIN_CACHES = ("auto", "float32", "float16", "bfloat16")


def _unsupported() -> str | None:
    """Return an error message if this version of vLLM is not supported, else None."""
    from packaging.version import Version
    from vllm import __version__

    release = Version(__version__).release
    if Version(OLDEST).release <= release and release[:2] <= Version(NEWEST).release:
        return None
    return f"vLLM must be {OLDEST} to {NEWEST}, got {__version__}. Install another version."


def backend_name() -> str:
    """Return the name in vLLM's registry under which the plugin registers its backend.

    A CPU has a single backend, which the plugin replaces.
    """
    from vllm.platforms import current_platform

    return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"
