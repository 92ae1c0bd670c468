"""The benchmark command ``speed serve --engine vllm`` runs on a CPU."""

import pytest

pytest.importorskip("vllm")
from bench import SMALL_BLOCK_ASSIGNMENTS, run_speed

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_speed_run_serves_trace_dense_and_sparse(tmp_path):
    command_arguments = [
        "--engine",
        "vllm",
        "--lengths",
        "96,192",
        "--requests",
        "2",
        "--head-dim",
        "64",
    ]
    command_arguments += ["--warm-up", "1", "--page-size", "32", "--max-density", "0.5"]
    for cab_field in (*SMALL_BLOCK_ASSIGNMENTS, "min_length=0"):
        command_arguments += ["--cab", cab_field]
    dense_row, sparse_row = run_speed("serve", tmp_path, command_arguments)["rows"]
    assert (dense_row["implementation"], sparse_row["implementation"]) == ("vllm", "cab")
    assert dense_row["density"] == 1 > sparse_row["density"]
    assert sparse_row["baseline"] == "vllm"
    assert dense_row["ran_as"].endswith(", 0 layers sparse")
    assert sparse_row["ran_as"].endswith(", 2 layers sparse")
    for row in (dense_row, sparse_row):
        assert sorted(request["length"] for request in row["served"]) == [96, 96, 192, 192]
        assert all(
            0 <= request["arrived"] < request["first"] < request["last"]
            for request in row["served"]
        )
        assert row["batching"]["max_num_batched_tokens"] == 128
    assert "| vllm |" in (tmp_path / "report.md").read_text()
