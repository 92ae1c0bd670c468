"""HTTP endpoints of an engine with two API servers: completions and metrics."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm")
from test_settings import parse_counters
from test_vllm import SPARSE_SETTINGS

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

# timeout in seconds until the servers answer: four processes import vLLM one after the other
START_TIMEOUT_S = 540
# timeout in seconds until workers have published their counters, which they do every second
PUBLISH_TIMEOUT_S = 30


@pytest.fixture(scope="module")
def server_url(llama_folder, tmp_path_factory):
    """Start an engine with two API servers, and yield the URL that both servers share."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    server_options = {
        "--api-server-count": "2",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "1024",
        "--max-num-seqs": "8",
        "--served-model-name": "tiny",
        "--additional-config": json.dumps({"cab": SPARSE_SETTINGS}),
    }
    option_strings = [
        option_string for option in server_options.items() for option_string in option
    ]
    command = [
        sys.executable,
        str(Path(__file__).with_name("serve.py")),
        str(llama_folder),
        *option_strings,
    ]
    environment = os.environ | {"VLLM_LOG_STATS_INTERVAL": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log_file = tmp_path_factory.mktemp("server") / "log"
    with log_file.open("wb") as log_output:
        process = subprocess.Popen(
            [*command, "--skip-tokenizer-init", "--enforce-eager"],
            stdout=log_output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            wait_for_servers(f"http://127.0.0.1:{port}", process, log_file)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for_servers(server_url, server_process, log_file):
    """Wait until the servers answer. Fail the test after ``START_TIMEOUT_S`` seconds."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while server_process.poll() is None and time.monotonic() < deadline:
        try:
            return urlopen(f"{server_url}/health", timeout=5).close()
        except (URLError, OSError):
            time.sleep(1)
    pytest.fail(f"the servers do not answer: {log_file.read_text('utf-8', 'replace')[-2000:]}")


def request_completion(server_url, prompt_length, **body_fields):
    """Send a prompt of ``prompt_length`` tokens, and return the number of generated tokens.

    The first token depends on the length, so that prompts of different lengths share no prefix in
    the prefix cache.
    """
    body = {
        "model": "tiny",
        "prompt": [(token_index + prompt_length) % 500 + 3 for token_index in range(prompt_length)],
        "max_tokens": 4,
        "ignore_eos": True,
        "detokenize": False,
    }
    headers = {"Content-Type": "application/json"}
    request = Request(
        f"{server_url}/v1/completions", json.dumps(body | body_fields).encode(), headers
    )
    with urlopen(request, timeout=60) as response:
        return json.load(response)["usage"]["completion_tokens"]


def read_counters(server_url):
    with urlopen(f"{server_url}/metrics", timeout=60) as response:
        return parse_counters(response.read().decode())


def test_metrics_of_api_servers_count_sparse_prompts_and_pairs(server_url):
    # before the first prompt, all counters exist and are 0
    assert set(read_counters(server_url).values()) == {0}
    assert request_completion(server_url, 300) == request_completion(server_url, 500) == 4
    # not sparse: a prompt shorter than a query block, and a prompt that asks for dense attention
    assert (
        request_completion(server_url, 20)
        == request_completion(server_url, 400, vllm_xargs={"cab": False})
        == 4
    )
    num_pairs = 3 * 4 * sum(length * (length + 1) // 2 for length in (300, 500))
    deadline = time.monotonic() + PUBLISH_TIMEOUT_S
    while (totals := read_counters(server_url))[
        "possible_pairs"
    ] < num_pairs and time.monotonic() < deadline:
        time.sleep(0.5)
    assert totals["sparse_prompts"] == 2
    assert totals["possible_pairs"] == num_pairs
    assert 0.1 < totals["attended_pairs"] / num_pairs < 1
    # the kernel assigns each connection to one of two servers: eight requests probably reach both
    assert [read_counters(server_url) for _ in range(8)] == [totals] * 8
