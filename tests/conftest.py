"""Fixtures for all tests. Triton and torch are configured before the tests are imported."""

import os

import pytest


@pytest.fixture
def gpu():
    """Return the CUDA device; fail without a GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail("this test needs a CUDA device; `make test` leaves it out")
    yield torch.device("cuda")
    # release cached memory, because parallel test processes share the device
    torch.cuda.empty_cache()


@pytest.fixture
def fill_uninitialised_with_nan():
    """Make `torch.empty` fill tensors with NaN, to detect kernels that skip an element."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def force_pointer_loads(monkeypatch):
    """Make kernels load tiles by pointers, not tensor descriptors, as on GPUs before Hopper."""
    from cab_hf.ops import launch

    monkeypatch.setattr(launch, "reads_by_descriptor", lambda device: False)


@pytest.fixture
def single_process_group(tmp_path):
    """Initialise torch.distributed with gloo and a world size of 1 during the test."""
    import torch

    store_url = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store_url, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def start_ranks(tmp_path):
    """Return a function that starts a `Ranks` of ``num_ranks`` new processes for one test.

    Tests may kill these processes, unlike the processes of fixture ``ranks``.
    """
    from ranks import Ranks

    started_pools = []

    def start_rank_pool(num_ranks, timeout_seconds=60):
        started_pools.append(Ranks(num_ranks, tmp_path, timeout_seconds))
        return started_pools[-1]

    yield start_rank_pool
    for ranks in started_pools:
        ranks.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Save a tiny LLaMA and its tokenizer once; return the folder, which tests must not change."""
    from words import save_llama

    return save_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Return a `Ranks` of eight processes, which all tests share."""
    from ranks import Ranks

    ranks = Ranks(8, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def pytest_configure(config):
    """Set environment variables and torch's number of threads before tests are imported."""
    # Triton's interpreter runs the kernels of this project on a CPU; vLLM's kernels fail in it
    if config.option.markexpr not in ("gpu", "vllm"):
        os.environ["TRITON_INTERPRET"] = "1"
    if "not slow" in config.option.markexpr:
        os.environ.setdefault("FIXED_CASES", "500")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # with pytest-xdist, the main process runs no tests and needs no torch
        return

    import torch

    # tests compute many small matrix products, which more threads make slower
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max(1, min(2, torch.get_num_threads()) // num_workers))
