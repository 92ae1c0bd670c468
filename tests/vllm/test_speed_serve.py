"""The benchmark command ``speed serve --engine vllm`` runs on a CPU."""

import pytest

pytest.importorskip("vllm")
from bench import BLOCKS, speed_run

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_speed_run_serves_trace_dense_and_sparse(tmp_path):
    words = ["--engine", "vllm", "--lengths", "96,192", "--requests", "2", "--head-dim", "64"]
    words += ["--warm-up", "1", "--page-size", "32", "--max-density", "0.5"]
    for field in (*BLOCKS, "min_length=0"):
        words += ["--cab", field]
    dense, sparse = speed_run("serve", tmp_path, words)["rows"]
    assert (dense["implementation"], sparse["implementation"]) == ("vllm", "cab")
    assert dense["density"] == 1 > sparse["density"]
    assert sparse["baseline"] == "vllm"
    assert dense["ran_as"].endswith(", 0 layers sparse")
    assert sparse["ran_as"].endswith(", 2 layers sparse")
    for row in (dense, sparse):
        assert sorted(x["length"] for x in row["served"]) == [96, 96, 192, 192]
        assert all(0 <= x["arrived"] < x["first"] < x["last"] for x in row["served"])
        assert row["batching"]["max_num_batched_tokens"] == 128
    assert "| vllm |" in (tmp_path / "report.md").read_text()
