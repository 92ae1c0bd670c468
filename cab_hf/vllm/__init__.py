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

from cab_hf.checks import short_repr, warn_once
from cab_hf.config import TABLE_FIELDS, CabConfig
from cab_hf.hf.fit import require_layers, require_origin

# supported versions of vLLM: their backend registry and the arguments of `forward` are the same
OLDEST_VLLM_VERSION, NEWEST_VLLM_VERSION = "0.22.1", "0.33"
# key that `prepare_engine` adds to the ``additional_config`` of an engine after it has checked the
# settings
PREPARED_KEY = "cab_prepared"

logger = logging.getLogger("vllm.cab_hf")
# True after vLLM has called `register` in this process
_is_registered = False


def register() -> None:
    """Register the attention backend and install the hooks of the plugin.

    vLLM calls this function, the entry point of the plugin, in each of its processes.
    """
    global _is_registered
    _is_registered = True
    try:
        from vllm.config import VllmConfig
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        warn_once(("vllm", "registry"), str(_unsupported_version_error()))
        return
    if _unsupported_version_error() is None:
        register_backend(AttentionBackendEnum[backend_name()], "cab_hf.vllm.backend.CabBackend")
    post_init = VllmConfig.__post_init__

    def post_init_and_prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        prepare_engine(self)

    # do not wrap the method twice: vLLM may call `register` several times in a process
    if post_init.__module__ != __name__:
        VllmConfig.__post_init__ = post_init_and_prepare
    if "vllm.v1.engine.core" in sys.modules:
        # a separate engine process receives a prepared config and does not call `prepare_engine`,
        # which would install these hooks
        from cab_hf.vllm.requests import install_request_hooks

        install_request_hooks()


def prepare_engine(vllm_config: Any) -> None:
    """Check the settings of an engine, select its scheduler, and export its counters.

    Changes ``vllm_config`` if the engine uses the plugin, and leaves it unchanged otherwise.

    Raises:
        ValueError: vLLM cannot run with the settings.
    """
    config = settings_of(vllm_config)
    if config is None:
        return
    error_message = _unsupported_version_error() or _unrunnable_settings_error(config, vllm_config)
    if error_message is not None:
        raise ValueError(error_message)
    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.scheduler_cls is None:
        scheduler_name = (
            "CabAsyncScheduler" if scheduler_config.async_scheduling else "CabScheduler"
        )
        scheduler_config.scheduler_cls = f"cab_hf.vllm.scheduler.{scheduler_name}"
    additional_config = vllm_config.additional_config
    if not isinstance(additional_config, dict) or PREPARED_KEY in additional_config:
        return
    # the resolved settings, because the calibration file may not exist on other nodes
    vllm_config.additional_config = {
        **additional_config,
        "cab": config.to_dict(),
        PREPARED_KEY: True,
    }
    from cab_hf.vllm import metrics, requests

    metrics.export_counters(vllm_config)
    requests.install_request_hooks()
    reason = never_sparse_reason(config, vllm_config)
    if reason is not None:
        logger.warning("cab_hf: no prompt is attended sparsely: %s.", reason)


def settings_of(vllm_config: Any) -> CabConfig | None:
    """Return the `CabConfig` of an engine; None if the plugin is off, or for a draft model.

    Raises:
        ValueError: a field does not exist or does not fit the model, the engine has another
            attention backend, or VLLM_PLUGINS excludes this plugin.
    """
    additional_config, model_config = vllm_config.additional_config, vllm_config.model_config
    additional_config = additional_config if isinstance(additional_config, dict) else {}
    attention_backend = getattr(vllm_config.attention_config.backend, "name", "selected by vLLM")
    if model_config is None or getattr(model_config, "runner_type", None) == "draft":
        return None
    is_plugin_on = attention_backend == "CUSTOM" or (
        backend_name() != "CUSTOM" and "cab" in additional_config
    )
    if not is_plugin_on and PREPARED_KEY in additional_config:
        # a draft model, for which vLLM selects a backend separately
        return None
    if not is_plugin_on and "cab" in additional_config:
        raise ValueError(
            "attention backend must be CUSTOM if additional_config contains 'cab', got "
            f"{attention_backend}. Start vLLM with --attention-backend CUSTOM."
        )
    if not is_plugin_on:
        return None
    if not _is_registered:
        raise ValueError(
            "VLLM_PLUGINS must contain cab_hf in every process of vLLM, and this process has not "
            "loaded it. Add cab_hf to VLLM_PLUGINS, or unset VLLM_PLUGINS."
        )
    text_config = model_config.hf_text_config
    config = _to_cab_config(
        additional_config.get("cab") or getattr(text_config, "cab_config", None) or {}
    )
    require_origin(config.origin, text_config)
    require_layers(config, text_config)
    # decode steps are never sparse, because vLLM's own attention computes them
    return replace(config, sparse_decode=False)


def _to_cab_config(settings: Any) -> CabConfig:
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
            f"calibration, got {short_repr(settings)}."
        )
    return CabConfig.from_dict(settings)


def _unrunnable_settings_error(config: CabConfig, vllm_config: Any) -> str | None:
    """Return an error message if vLLM cannot run with the settings, else None.

    Raises:
        ValueError: the predictor of the settings is not registered.
    """
    from cab_hf.predictors import make_predictor

    # called for its error if the predictor is unknown
    make_predictor(config)
    model_config, attention_config = vllm_config.model_config, vllm_config.attention_config
    # with a backend per kind of layers, vLLM's own backend computes the layers with latent
    # attention
    has_backend_per_kind = bool(getattr(attention_config, "backend_per_kind", None))
    if (
        getattr(model_config, "use_mla", False)
        and backend_name() == "CUSTOM"
        and not has_backend_per_kind
    ):
        return (
            "attention backend must not be CUSTOM for a model with multi-head latent attention, "
            "got CUSTOM. Start vLLM without --attention-backend CUSTOM."
        )
    parallel_config = vllm_config.parallel_config
    required_values = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
    }
    for field_name, required_value in required_values.items():
        if getattr(parallel_config, field_name, required_value) != required_value:
            return (
                f"{field_name} must be {required_value} for 'cab', got "
                f"{getattr(parallel_config, field_name)}. Start vLLM with {required_value}."
            )
    for connector_name in _connector_names(vllm_config.kv_transfer_config):
        if connector_name not in SETTINGS_AWARE_KV_CONNECTORS:
            return (
                f"kv_connector must be one of {', '.join(SETTINGS_AWARE_KV_CONNECTORS)}, got "
                f"{connector_name}. Use one of these connectors, which never load KV of other "
                "settings."
            )
    table_fields = [
        field_name for field_name in TABLE_FIELDS if isinstance(getattr(config, field_name), tuple)
    ]
    if parallel_config.tensor_parallel_size > 1 and any(
        getattr(config, field_name) for field_name in table_fields
    ):
        return (
            "tensor_parallel_size must be 1 if cab_config has tables of all heads, got "
            f"{parallel_config.tensor_parallel_size}. Use one rank, or one number per setting."
        )
    return None


# KV connectors whose keys contain vLLM's block hashes or the cache salt. Both depend on the
# settings, so that an engine never loads K and V that other settings computed
SETTINGS_AWARE_KV_CONNECTORS = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
    "LMCacheMPConnector",
)


def _connector_names(transfer_config: Any) -> Iterator[str]:
    """Yield the names of the KV connectors of an engine.

    Args:
        transfer_config: ``KVTransferConfig`` of the engine; None without connectors.
    """
    if transfer_config is None or transfer_config.kv_connector is None:
        return
    if transfer_config.kv_connector != "MultiConnector":
        yield transfer_config.kv_connector
    for connector_config in transfer_config.kv_connector_extra_config.get("connectors", ()):
        yield connector_config["kv_connector"]


def never_sparse_reason(config: CabConfig, vllm_config: Any) -> str | None:
    """Return the reason why the plugin computes no prompt of an engine sparsely.

    Returns None if prompts may be sparse, as far as the config of the engine shows.
    """
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    if getattr(model_config, "is_attention_free", False):
        return "the model has no attention"
    if getattr(model_config, "use_mla", False):
        return "the model has multi-head latent attention, which vLLM computes"
    if getattr(model_config, "runner_type", "generate") != "generate":
        return (
            f"the model runs as {model_config.runner_type}, and 'cab' reads prompts of generation"
        )
    if cache_config.cache_dtype not in UNQUANTISED_CACHE_DTYPES:
        return f"kv_cache_dtype is {cache_config.cache_dtype}, which vLLM's own attention reads"
    if config.min_length > model_config.max_model_len:
        return (
            f"min_length is {config.min_length:,} and max_model_len "
            f"{model_config.max_model_len:,} tokens"
        )
    return None


# values of kv_cache_dtype for unquantised keys and values, the only ones that the plugin can read
UNQUANTISED_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")


def _unsupported_version_error() -> str | None:
    """Return an error message if this version of vLLM is not supported, else None."""
    from packaging.version import Version
    from vllm import __version__

    installed_release = Version(__version__).release
    if (
        Version(OLDEST_VLLM_VERSION).release <= installed_release
        and installed_release[:2] <= Version(NEWEST_VLLM_VERSION).release
    ):
        return None
    return (
        f"vLLM must be {OLDEST_VLLM_VERSION} to {NEWEST_VLLM_VERSION}, got {__version__}. Install "
        "another version."
    )


def backend_name() -> str:
    """Return the name in vLLM's registry under which the plugin registers its backend.

    A CPU has a single backend, which the plugin replaces.
    """
    from vllm.platforms import current_platform

    return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"
