import gc
import logging
import os

import pytest

# run engines in the test process, so that tests can inspect their schedulers and layers
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="session", autouse=True)
def registered_plugin():
    """Register the plugin before all tests; vLLM registers plugins only when an engine starts."""
    from importlib.util import find_spec

    if find_spec("vllm") is not None:
        from cab_hf.vllm import register

        register()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """Save a tiny LLaMA with large weights, whose answers depend on attention; return folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.ndim > 1 else 1)
    model_folder = tmp_path_factory.mktemp("models") / "llama"
    model.save_pretrained(model_folder)
    return model_folder


@pytest.fixture(scope="module")
def start_engine(llama_folder):
    """Return a function that starts or reuses engines of vLLM.

    The arguments of the function are the settings "cab" (None: an engine without the plugin), the
    folder of the model, and options of `LLM`. A call with equal arguments returns the same engine.
    All engines are shut down together at the end of a test module, because an engine that shuts
    down destroys the process groups of all engines in this process.
    """
    from vllm import LLM

    engine_by_key = {}

    def make_engine(cab_settings, model_folder=llama_folder, **options):
        engine_key = str((cab_settings, model_folder, options))
        if engine_key not in engine_by_key:
            config_options = (
                {} if cab_settings is None else {"additional_config": {"cab": cab_settings}}
            )
            engine_by_key[engine_key] = LLM(
                str(model_folder),
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=8,
                seed=0,
                **config_options,
                **options,
            )
        return engine_by_key[engine_key]

    yield make_engine
    engine_by_key.clear()
    gc.collect()


@pytest.fixture
def plugin_messages(monkeypatch):
    """Return a list to which the messages that the plugin logs are appended during the test."""
    messages, plugin_logger = [], logging.getLogger("vllm.cab_hf")
    # patch the logger's methods, because vLLM resets levels and handlers when an engine starts
    for method_name in ("info", "warning"):
        monkeypatch.setattr(
            plugin_logger, method_name, lambda text, *args: messages.append(text % args)
        )
    return messages


def pytest_collection_modifyitems(items):
    """Move the tests of test_classes.py, which build all model classes, to the end.

    Some model classes import numba, after which vLLM 0.32 cannot start an engine on a CPU.
    """
    items.sort(key=lambda item: "test_classes.py" in item.nodeid)
