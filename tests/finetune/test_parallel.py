"""Context parallelism in training: results equal one process, and each token is in one shard."""

import time
from types import SimpleNamespace

import pytest
import torch
from launches import (
    LAUNCH_COMMAND,
    PROGRAM_WITH_ERRORS,
    ROOT,
    TRAIN_COMMAND,
    assert_same_run,
    read_losses,
    read_step_field,
    run_process,
)
from ranks import Ranks
from tiny import tiny_model
from torch import nn
from words import make_tokenizer, save_llama

from cab_hf.distributed.exchange import read_failures
from cab_hf.distributed.sharding import get_sharding
from cab_hf.experiment.log import read_log
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model, dry_run, lora, prepare, train
from cab_hf.finetune.models import load_model
from cab_hf.finetune.parallel import Parallel
from cab_hf.finetune.rank_checks import collect_facts, report_errors_to_all_processes
from cab_hf.finetune.settings import Settings
from cab_hf.finetune.validation import Validation

# options of a run whose sequences contain two documents and padding
WORDS = [
    *("--config", str(ROOT / "finetune" / "configs" / "tiny_cpu.yaml"), "--cpu", "--dropout", "0"),
    *("--data", "retrieval:passkey:200", "--validation", "retrieval:passkey:200"),
    *("--steps", "4", "--save-every", "9", "--eval-every", "4", "--held-out", "3"),
]
# one document per sequence: only one process has the last positions, which dynamic RoPE needs
WHOLE = ["--data", "retrieval:passkey:511", "--validation", "retrieval:passkey:511"]
TILED = ["--tile-tokens", "100", "--offload-layers", "1"]
RUNS = {
    "cab": [],
    "little": TILED,
    # random samples of blocks depend on the number of processes, unless all blocks are sampled
    "all-sampled": ["--cab", "sampled_one_in=1"],
    "cab_dense": ["--attention", "cab_dense", "--checkpointing", "false"],
    "turns": ["--micro-batch", "2", "--tokens-per-step", "2048"],
}
# program that makes accelerate use FSDP2 on a CPU in the run "fsdp2", and checks the parameters
SHARDED = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from cab_hf.finetune import checkpoints, lora, train

class Sharding(Accelerator):
    def __init__(self, **options):
        super().__init__(**options)
        if options["project_dir"].endswith("fsdp2"):
            self.state.distributed_type = DistributedType.FSDP
            self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                cpu_ram_efficient_loading=False,
                state_dict_type="FULL_STATE_DICT",
            )

train.Accelerator, learn = Sharding, train.Run.train

def checked(run):
    trained = checkpoints.trained_parameters(run.model).values()
    is_sharded = {type(each).__name__ == "DTensor" for each in trained}
    assert is_sharded == {run.out.name == "fsdp2"}
    learn(run)

train.Run.train = checked
"""

# names of two runs that must be identical: "killed" is resumed, "whole" is not interrupted
IDENTICAL_RUNS = ("killed", "whole")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Return a `Ranks` of exactly four processes, because a device mesh spans all processes."""
    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_sequence_parallel_training_equals_one_process(tmp_path):
    """Compare runs of several processes with runs of one process, by losses and gradient norms.

    Runs of two processes shard each sequence (``--cp 2``), also with FSDP2. The run "grid" has four
    processes, two per sequence, and must equal two processes without sharding ("replicas"). A run
    that is resumed after an error must be identical to an uninterrupted run.

    One test starts all runs, because each launch of processes is slow.
    """
    script = tmp_path / "meddled.py"
    script.write_text(SHARDED + PROGRAM_WITH_ERRORS)

    def command(name, options=()):
        return " ".join([*WORDS, *options, "--out", str(tmp_path / name)])

    model_folder = save_model_with_few_positions(tmp_path / "few")
    runs = {**RUNS, "dynamic": ["--model", model_folder, "--rope", "dynamic", *WHOLE]}
    resumed_runs = [
        " ".join([*TRAIN_COMMAND[1:], "--cp", "2", "--out", str(tmp_path / x)])
        for x in IDENTICAL_RUNS
    ]
    two_process_runs = [
        command(f"{name}-of-two", [*options, "--cp", "2"]) for name, options in runs.items()
    ]
    assert (
        run_process(
            [*LAUNCH_COMMAND, str(script), " / ".join([*two_process_runs, resumed_runs[0]])]
        ).returncode
        != 0
    )
    assert [step for _, step, _ in read_losses(tmp_path / "killed")] == [1, 2]
    other_runs = [*resumed_runs, command("replicas"), command("fsdp2", ["--cp", "2", *TILED])]
    grid_words = ["--num_processes", "4", str(script), command("grid", ["--cp", "2"])]
    for words in ([str(script), " / ".join(other_runs)], grid_words):
        process = run_process([*LAUNCH_COMMAND, *words])
        assert process.returncode == 0, process.stderr[-3000:]
    assert_same_run(*(tmp_path / name for name in IDENTICAL_RUNS))

    for name, options in runs.items():
        assert lora.main([*WORDS, *options, "--out", str(tmp_path / f"{name}-of-one")]) == 0
        assert_runs_are_close(tmp_path / f"{name}-of-two", tmp_path / f"{name}-of-one")
    assert_runs_are_close(tmp_path / "fsdp2", tmp_path / "cab-of-one")
    assert_runs_are_close(tmp_path / "grid", tmp_path / "replicas")
    # one process with accumulation steps equals two replicas
    assert lora.main([*WORDS, "--tokens-per-step", "1024", "--out", str(tmp_path / "one")]) == 0
    assert_runs_are_close(tmp_path / "grid", tmp_path / "one")


def save_model_with_few_positions(folder):
    """Save the tiny model with 128 positions, fewer than the 512 of the runs; return the path."""
    model, tokenizer = load_model("tiny", attn_implementation="sdpa", dtype="float32")
    model.config.max_position_embeddings = 128
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def assert_runs_are_close(actual, expected):
    """Assert that the logs in two run folders are equal up to rounding."""
    for field in ("loss", "grad_norm"):
        assert read_step_field(actual, field) == pytest.approx(
            read_step_field(expected, field), rel=1e-5
        ), field
    # token pairs and tokens are not counted twice
    assert read_step_field(actual, "density") == pytest.approx(
        read_step_field(expected, "density"), rel=1e-9
    )
    assert count_tokens_per_step(actual) == pytest.approx(count_tokens_per_step(expected))
    (actual_evaluation,), (expected_evaluation,) = (
        [each for each in read_log(out / train.LOG_FILE)[1] if each["kind"] == "evaluation"]
        for out in (actual, expected)
    )
    assert actual_evaluation["held_out_loss"] == pytest.approx(
        expected_evaluation["held_out_loss"], rel=1e-5
    )
    assert actual_evaluation["passkey"] == expected_evaluation["passkey"]


def count_tokens_per_step(out):
    """Return a list with the number of tokens of each step of the run in folder ``out``."""
    rates, durations = read_step_field(out, "tokens_per_second"), read_step_field(out, "seconds")
    return [rate * seconds for rate, seconds in zip(rates, durations, strict=True)]


def make_parallel(group, cp, attention="cab"):
    """Return (the `Parallel` of this process, a stand-in for its accelerate `Accelerator`)."""
    settings = Settings(model="tiny", data=("a.txt",), attention=attention, cp=cp)
    accelerator = SimpleNamespace(
        num_processes=group.size(),
        process_index=group.rank(),
        device=torch.device("cpu"),
        reduce=all_reduce,
    )
    model, _ = load_model("tiny", attn_implementation=attention, dtype="float32", device="cpu")
    return Parallel(settings, model, accelerator), accelerator


def all_reduce(x, _):
    """Return the sum of ``x`` over all processes, as accelerate's `reduce` does."""
    torch.distributed.all_reduce(x)
    return x


def make_random_batch(length=1100, documents=(700, 1, 150, 249)):
    """Return a batch of two rows of packed documents with these lengths; all labels differ."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (2, length), generator=generator)
    positions = torch.cat([torch.arange(size) for size in documents]).expand(2, -1)
    # with distinct labels, the test detects tokens that are in two shards
    labels = torch.arange(2 * length).view(2, length)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def make_shard(group, batch):
    """Shard ``batch`` over two of four processes.

    Returns:
        (number of replicas, index of the replica of this process, its shard, its positions).
    """
    parallel, _ = make_parallel(group, 2)
    own_shard = parallel.shard_batch(batch)
    return (
        parallel.num_replicas,
        parallel.replica_index,
        own_shard,
        parallel.local_positions(own_shard),
    )


def test_each_replica_holds_every_token_once(four_ranks):
    batch = make_random_batch()
    actual = four_ranks.run(4, make_shard, batch)
    assert [each[:2] for each in actual] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    for replica in (actual[:2], actual[2:]):
        labels = torch.cat([own_shard["labels"][0] for _, _, own_shard, _ in replica])
        ids = torch.cat([own_shard["input_ids"][0] for _, _, own_shard, _ in replica])
        has_label = labels != -100
        assert labels[has_label].sort().values.tolist() == list(range(2200))
        assert torch.equal(ids[has_label], batch["input_ids"].flatten()[labels[has_label]])
        positions = torch.cat([own_positions[0] for *_, own_positions in replica])
        assert torch.equal(positions.sort().values, batch["position_ids"].flatten().sort().values)


class Memorised(nn.Module):
    """Stand-in for `Objective` that predicts the correct next token of known documents.

    ``documents`` are the `Validation.documents`. If ``is_wrong`` is True, every prediction is the
    correct token id plus 1.
    """

    def __init__(self, documents, is_wrong):
        super().__init__()
        self.documents, self.is_wrong = documents, is_wrong

    def forward(self, batch, query_indices):
        ids, positions = batch["input_ids"][0], batch["position_ids"][0]
        for document in self.documents[int(batch["cu_seq_lens_q"][-1])].values():
            tokens = torch.tensor(document.tokens)
            # find the document whose tokens are those of the batch; token 0 is padding
            if ((tokens[positions] == ids) | (ids == 0)).all():
                return tokens[positions[query_indices] + 1] + self.is_wrong


def measure_passkeys(group, wrong_ranks):
    """Run the pass-key evaluation with a `Memorised` model, which is wrong on ``wrong_ranks``.

    Returns:
        (share of correct keys by length, documents of this process by length).
    """
    parallel, accelerator = make_parallel(group, 2)
    _, tokenizer = load_model("tiny", attn_implementation="cab", dtype="float32", device="cpu")
    validation = Validation(
        tokenizer=tokenizer,
        held_out=[],
        settings=Settings(data=("a.txt",), length=1024, passkeys=7, passkey_lengths=(300, 1024)),
        accelerator=accelerator,
        parallel=parallel,
    )
    objective = Memorised(validation.documents, group.rank() in wrong_ranks)
    return validation.measure(objective)["passkey"], validation.documents


def test_passkey_counts_when_all_ranks_predict_their_part(four_ranks):
    results = four_ranks.run(4, measure_passkeys, ())
    assert [shares for shares, _ in results] == [{"300": 1.0, "1024": 1.0}] * 4
    # if the second process of each replica predicts wrongly, only keys whose answers are completely
    # in the shard of the first process are correct
    expected = {}
    for length in (300, 1024):
        sharding = get_sharding((length,), 2)
        documents = {**results[0][1][length], **results[2][1][length]}
        # two replicas have four documents of each length
        assert sorted(documents) == list(range(8))
        answers = [document.answers[0] for document in documents.values()]
        is_in_first = [
            bool((sharding.shard_index[start - 1 : end - 1] < sharding.tokens_per_rank).all())
            for start, end in answers
        ]
        expected[str(length)] = sum(is_in_first) / 8
    assert 0 < expected["1024"] < 1
    assert [result for result, _ in four_ranks.run(4, measure_passkeys, (1, 3))] == [expected] * 4


def test_dry_run_divides_memory_by_ranks(tmp_path):
    model = str(save_llama(tmp_path / "model"))
    fields = {"data": ("a.txt",), "length": 2048, "model": model, "dtype": "float32"}
    settings_of_one, settings_of_four = (Settings(**fields, cp=cp) for cp in (1, 4))
    skeleton = prepare.make_trainable(settings_of_one, dry_run.build_skeleton(settings_of_one))
    cost = cost_model.Cost.of(skeleton)
    available_memory = cost_model.AvailableMemory(2**40, 2**40)
    memory_of_one, memory_of_four = (
        dry_run.choose_offloading(settings, cost, {}, available_memory).memory
        for settings in (settings_of_one, settings_of_four)
    )
    assert (
        memory_of_four.layers == memory_of_one.layers / 4
        and memory_of_four.weights == memory_of_one.weights
    )
    # working memory shrinks by less than 4, because each rank gathers all keys and values
    assert memory_of_one.working / 4 < memory_of_four.working < memory_of_one.working


@pytest.mark.parametrize("name", ["the tokenizer", "the config of the model"])
def test_different_tokenizer_or_config_raises_on_all_ranks(name):
    settings, model, tokenizer = Settings(data=("a.txt",)), tiny_model(), make_tokenizer()
    before = collect_facts(settings, model, tokenizer)
    assert collect_facts(settings, tiny_model(), make_tokenizer()) == before
    if name == "the tokenizer":
        tokenizer.eos_token = "It"
    else:
        model.config.rms_norm_eps *= 2
    after = collect_facts(settings, model, tokenizer)
    assert {each for each in before if before[each] != after[each]} == {name}


def stop_on_rank_1(group, error):
    """Raise ``error`` on rank 1; then raise gloo's error for a lost connection on rank 0."""
    with report_errors_to_all_processes():
        if group.rank() == 1:
            raise error
        while not read_failures(torch.distributed.group.WORLD):
            time.sleep(0.01)
        # the message of gloo for a lost connection
        raise RuntimeError("Connection closed by peer [127.0.0.1]:21654.")


@pytest.mark.parametrize(
    "error", [UsageError("source 'a' is gone."), KeyError("a bug")], ids=["usage", "bug"]
)
def test_ranks_report_why_another_rank_stopped(start_ranks, error):
    first, second = start_ranks(2).outcomes(2, stop_on_rank_1, error)
    reason = f"rank 1 stopped: {type(error).__name__}: {error}"
    assert first.kind == "UsageError"
    assert f"because another one stopped: {reason}" in first.sentence
    assert (second.kind, second.sentence) == (type(error).__name__, str(error))
