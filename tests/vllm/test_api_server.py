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
from test_settings import shown_in
from test_vllm import SPARSE

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

# timeout in seconds until the servers answer: four processes import vLLM one after the other
START_S = 540
# timeout in seconds until workers have published their counters, which they do every second
PUBLISH_S = 30


@pytest.fixture(scope="module")
def url(llama, tmp_path_factory):
    """Start an engine with two API servers, and yield the URL that both servers share."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    options = {
        "--api-server-count": "2",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "1024",
        "--max-num-seqs": "8",
        "--served-model-name": "tiny",
        "--additional-config": json.dumps({"cab": SPARSE}),
    }
    words = [word for pair in options.items() for word in pair]
    command = [sys.executable, str(Path(__file__).with_name("serve.py")), str(llama), *words]
    environment = os.environ | {"VLLM_LOG_STATS_INTERVAL": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--skip-tokenizer-init", "--enforce-eager"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(url, process, log):
    """Wait until the servers answer. After ``START_S`` seconds, fail the test and show the log."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            return urlopen(f"{url}/health", timeout=5).close()
        except (URLError, OSError):
            time.sleep(1)
    pytest.fail(f"the servers do not answer: {log.read_text('utf-8', 'replace')[-2000:]}")


def complete(url, length, **fields):
    """Send a prompt of ``length`` tokens, and return the number of generated tokens.

    The first token depends on the length, so that prompts of different lengths share no prefix in
    the prefix cache.
    """
    body = {
        "model": "tiny",
        "prompt": [(n + length) % 500 + 3 for n in range(length)],
        "max_tokens": 4,
        "ignore_eos": True,
        "detokenize": False,
    }
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/completions", json.dumps(body | fields).encode(), headers)
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def counters(url):
    with urlopen(f"{url}/metrics", timeout=60) as page:
        return shown_in(page.read().decode())


def test_metrics_of_api_servers_count_sparse_prompts_and_pairs(url):
    # before the first prompt, all counters exist and are 0
    assert set(counters(url).values()) == {0}
    assert complete(url, 300) == complete(url, 500) == 4
    # not sparse: a prompt shorter than a query block, and a prompt that asks for dense attention
    assert complete(url, 20) == complete(url, 400, vllm_xargs={"cab": False}) == 4
    pairs = 3 * 4 * sum(n * (n + 1) // 2 for n in (300, 500))
    end = time.monotonic() + PUBLISH_S
    while (totals := counters(url))["possible_pairs"] < pairs and time.monotonic() < end:
        time.sleep(0.5)
    assert totals["sparse_prompts"] == 2
    assert totals["possible_pairs"] == pairs
    assert 0.1 < totals["attended_pairs"] / pairs < 1
    # the kernel assigns each connection to one of two servers: eight requests probably reach both
    assert [counters(url) for _ in range(8)] == [totals] * 8
