"""The environment variable VLLM_PLUGINS can exclude the plugin: using it must then raise."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

START_SCRIPT = """
import sys
from vllm import LLM

LLM(
    sys.argv[1],
    attention_backend="CUSTOM",
    scheduler_cls="cab_hf.vllm.scheduler.CabScheduler",
    skip_tokenizer_init=True,
    enforce_eager=True,
    dtype="float32",
    max_model_len=64,
)
"""


def test_scheduler_without_plugin_raises(llama_folder):
    """Name the scheduler of cab_hf by ``scheduler_cls``, in a process without the plugin."""
    environment = os.environ | {"VLLM_PLUGINS": "other"}
    command = [sys.executable, "-c", START_SCRIPT, str(llama_folder)]
    completed_process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600
    )
    assert completed_process.returncode != 0
    assert "ValueError: VLLM_PLUGINS must contain cab_hf" in completed_process.stderr
