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
from tiny import make_tiny_model
from torch import nn
from words import make_tokenizer, save_llama

from cab_hf.distributed.exchange import read_failures
from cab_hf.distributed.sharding import get_sharding
from cab_hf.experiment.log import read_log
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model, dry_run, lora, prepare, train
from cab_hf.finetune.models import load_model
from cab_hf.finetune.parallel import ContextParallelism
from cab_hf.finetune.rank_checks import collect_facts, report_errors_to_all_processes
from cab_hf.finetune.settings import Settings
from cab_hf.finetune.validation import Validation

# options of a run whose sequences contain two documents and padding
RUN_OPTIONS = [
    *("--config", str(ROOT / "finetune" / "configs" / "tiny_cpu.yaml"), "--cpu", "--dropout", "0"),
    *("--data", "retrieval:passkey:200", "--validation", "retrieval:passkey:200"),
    *("--steps", "4", "--save-every", "9", "--eval-every", "4", "--held-out", "3"),
]
# one document per sequence: only one process has the last positions, which dynamic RoPE needs
WHOLE_SEQUENCE_OPTIONS = [
    "--data",
    "retrieval:passkey:511",
    "--validation",
    "retrieval:passkey:511",
]
TILED_OPTIONS = ["--tile-tokens", "100", "--offload-layers", "1"]
OPTIONS_BY_RUN = {
    "cab": [],
    "little": TILED_OPTIONS,
    # random samples of blocks depend on the number of processes, unless all blocks are sampled
    "all-sampled": ["--cab", "sampled_one_in=1"],
    "cab_dense": ["--attention", "cab_dense", "--checkpointing", "false"],
    "turns": ["--micro-batch", "2", "--tokens-per-step", "2048"],
}
# program that makes accelerate use FSDP2 on a CPU in the run "fsdp2", and checks the parameters
FSDP2_PROGRAM = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from cab_hf.finetune import checkpoints, lora, train

class ShardingAccelerator(Accelerator):
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

train.Accelerator, original_train = ShardingAccelerator, train.Run.train

def check_and_train(run):
    parameters = checkpoints.get_trained_parameters(run.model).values()
    is_sharded = {type(parameter).__name__ == "DTensor" for parameter in parameters}
    assert is_sharded == {run.out.name == "fsdp2"}
    original_train(run)

train.Run.train = check_and_train
"""

# names of two runs that must be identical: "killed" is resumed, "whole" is not interrupted
IDENTICAL_RUN_NAMES = ("killed", "whole")


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
    script.write_text(FSDP2_PROGRAM + PROGRAM_WITH_ERRORS)

    def join_command(run_name, run_options=()):
        return " ".join([*RUN_OPTIONS, *run_options, "--out", str(tmp_path / run_name)])

    model_folder = save_model_with_few_positions(tmp_path / "few")
    options_by_run = {
        **OPTIONS_BY_RUN,
        "dynamic": ["--model", model_folder, "--rope", "dynamic", *WHOLE_SEQUENCE_OPTIONS],
    }
    resumed_commands = [
        " ".join([*TRAIN_COMMAND[1:], "--cp", "2", "--out", str(tmp_path / run_name)])
        for run_name in IDENTICAL_RUN_NAMES
    ]
    two_process_commands = [
        join_command(f"{run_name}-of-two", [*run_options, "--cp", "2"])
        for run_name, run_options in options_by_run.items()
    ]
    assert (
        run_process(
            [*LAUNCH_COMMAND, str(script), " / ".join([*two_process_commands, resumed_commands[0]])]
        ).returncode
        != 0
    )
    assert [step for _, step, _ in read_losses(tmp_path / "killed")] == [1, 2]
    other_commands = [
        *resumed_commands,
        join_command("replicas"),
        join_command("fsdp2", ["--cp", "2", *TILED_OPTIONS]),
    ]
    grid_arguments = ["--num_processes", "4", str(script), join_command("grid", ["--cp", "2"])]
    for launch_arguments in ([str(script), " / ".join(other_commands)], grid_arguments):
        process = run_process([*LAUNCH_COMMAND, *launch_arguments])
        assert process.returncode == 0, process.stderr[-3000:]
    assert_same_run(*(tmp_path / run_name for run_name in IDENTICAL_RUN_NAMES))

    for run_name, run_options in options_by_run.items():
        assert (
            lora.main([*RUN_OPTIONS, *run_options, "--out", str(tmp_path / f"{run_name}-of-one")])
            == 0
        )
        assert_runs_are_close(tmp_path / f"{run_name}-of-two", tmp_path / f"{run_name}-of-one")
    assert_runs_are_close(tmp_path / "fsdp2", tmp_path / "cab-of-one")
    assert_runs_are_close(tmp_path / "grid", tmp_path / "replicas")
    # one process with accumulation steps equals two replicas
    assert (
        lora.main([*RUN_OPTIONS, "--tokens-per-step", "1024", "--out", str(tmp_path / "one")]) == 0
    )
    assert_runs_are_close(tmp_path / "grid", tmp_path / "one")


def save_model_with_few_positions(folder):
    """Save the tiny model with 128 positions, fewer than the 512 of the runs; return the path."""
    model, tokenizer = load_model("tiny", attn_implementation="sdpa", dtype="float32")
    model.config.max_position_embeddings = 128
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def assert_runs_are_close(actual_run, expected_run):
    """Assert that the logs in two run folders are equal up to rounding."""
    for field in ("loss", "grad_norm"):
        assert read_step_field(actual_run, field) == pytest.approx(
            read_step_field(expected_run, field), rel=1e-5
        ), field
    # token pairs and tokens are not counted twice
    assert read_step_field(actual_run, "density") == pytest.approx(
        read_step_field(expected_run, "density"), rel=1e-9
    )
    assert count_tokens_per_step(actual_run) == pytest.approx(count_tokens_per_step(expected_run))
    (actual_evaluation,), (expected_evaluation,) = (
        [
            record
            for record in read_log(run_folder / train.LOG_FILE)[1]
            if record["kind"] == "evaluation"
        ]
        for run_folder in (actual_run, expected_run)
    )
    assert actual_evaluation["held_out_loss"] == pytest.approx(
        expected_evaluation["held_out_loss"], rel=1e-5
    )
    assert actual_evaluation["passkey"] == expected_evaluation["passkey"]


def count_tokens_per_step(run_folder):
    """Return a list with the number of tokens of each step of the run in folder ``run_folder``."""
    rates, durations = (
        read_step_field(run_folder, "tokens_per_second"),
        read_step_field(run_folder, "seconds"),
    )
    return [rate * step_seconds for rate, step_seconds in zip(rates, durations, strict=True)]


def make_parallelism(group, cp, attn_implementation="cab"):
    """Return (the `ContextParallelism` of this process, a stand-in for its `Accelerator`)."""
    settings = Settings(model="tiny", data=("a.txt",), attention=attn_implementation, cp=cp)
    accelerator = SimpleNamespace(
        num_processes=group.size(),
        process_index=group.rank(),
        device=torch.device("cpu"),
        reduce=all_reduce,
    )
    model, _ = load_model(
        "tiny", attn_implementation=attn_implementation, dtype="float32", device="cpu"
    )
    return ContextParallelism(settings, model, accelerator), accelerator


def all_reduce(tensor, _):
    """Return the sum of ``tensor`` over all processes, as accelerate's `reduce` does."""
    torch.distributed.all_reduce(tensor)
    return tensor


def make_random_batch(sequence_tokens=1100, document_lengths=(700, 1, 150, 249)):
    """Return a batch of two rows of packed documents with these lengths; all labels differ."""
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(3, 64, (2, sequence_tokens), generator=generator)
    positions = torch.cat(
        [torch.arange(document_length) for document_length in document_lengths]
    ).expand(2, -1)
    # with distinct labels, the test detects tokens that are in two shards
    labels = torch.arange(2 * sequence_tokens).view(2, sequence_tokens)
    return {"input_ids": token_ids, "position_ids": positions, "labels": labels}


def make_shard(group, batch):
    """Shard ``batch`` over two of four processes.

    Returns:
        (number of replicas, index of the replica of this process, its shard, its positions).
    """
    parallelism, _ = make_parallelism(group, 2)
    own_shard = parallelism.shard_batch(batch)
    return (
        parallelism.num_replicas,
        parallelism.replica_index,
        own_shard,
        parallelism.get_local_positions(own_shard),
    )


def test_each_replica_holds_every_token_once(four_ranks):
    batch = make_random_batch()
    rank_results = four_ranks.run(4, make_shard, batch)
    assert [rank_result[:2] for rank_result in rank_results] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    for replica_results in (rank_results[:2], rank_results[2:]):
        labels = torch.cat([own_shard["labels"][0] for _, _, own_shard, _ in replica_results])
        token_ids = torch.cat([own_shard["input_ids"][0] for _, _, own_shard, _ in replica_results])
        has_label = labels != -100
        assert labels[has_label].sort().values.tolist() == list(range(2200))
        assert torch.equal(token_ids[has_label], batch["input_ids"].flatten()[labels[has_label]])
        positions = torch.cat([own_positions[0] for *_, own_positions in replica_results])
        assert torch.equal(positions.sort().values, batch["position_ids"].flatten().sort().values)


class MemorisedDocuments(nn.Module):
    """Stand-in for `Objective` that predicts the correct next token of known documents.

    ``documents`` are the `Validation.documents`. If ``is_wrong`` is True, every prediction is the
    correct token id plus 1.
    """

    def __init__(self, documents, is_wrong):
        super().__init__()
        self.documents, self.is_wrong = documents, is_wrong

    def forward(self, batch, query_indices):
        token_ids, positions = batch["input_ids"][0], batch["position_ids"][0]
        for document in self.documents[int(batch["cu_seq_lens_q"][-1])].values():
            document_tokens = torch.tensor(document.tokens)
            # find the document whose tokens are those of the batch; token 0 is padding
            if ((document_tokens[positions] == token_ids) | (token_ids == 0)).all():
                return document_tokens[positions[query_indices] + 1] + self.is_wrong


def measure_passkeys(group, wrong_ranks):
    """Run the pass-key evaluation of `MemorisedDocuments`, which is wrong on ``wrong_ranks``.

    Returns:
        (share of correct keys by length, documents of this process by length).
    """
    parallelism, accelerator = make_parallelism(group, 2)
    _, tokenizer = load_model("tiny", attn_implementation="cab", dtype="float32", device="cpu")
    validation = Validation(
        tokenizer=tokenizer,
        held_out_sequences=[],
        settings=Settings(data=("a.txt",), length=1024, passkeys=7, passkey_lengths=(300, 1024)),
        accelerator=accelerator,
        parallelism=parallelism,
    )
    objective = MemorisedDocuments(validation.documents, group.rank() in wrong_ranks)
    return validation.evaluate(objective)["passkey"], validation.documents


def test_passkey_counts_when_all_ranks_predict_their_part(four_ranks):
    rank_results = four_ranks.run(4, measure_passkeys, ())
    assert [key_shares for key_shares, _ in rank_results] == [{"300": 1.0, "1024": 1.0}] * 4
    # if the second process of each replica predicts wrongly, only keys whose answers are completely
    # in the shard of the first process are correct
    expected_shares = {}
    for length in (300, 1024):
        sharding = get_sharding((length,), 2)
        documents = {**rank_results[0][1][length], **rank_results[2][1][length]}
        # two replicas have four documents of each length
        assert sorted(documents) == list(range(8))
        answer_spans = [document.answers[0] for document in documents.values()]
        is_key_in_first_shard = [
            bool(
                (
                    sharding.shard_index[answer_start - 1 : answer_end - 1]
                    < sharding.tokens_per_rank
                ).all()
            )
            for answer_start, answer_end in answer_spans
        ]
        expected_shares[str(length)] = sum(is_key_in_first_shard) / 8
    assert 0 < expected_shares["1024"] < 1
    assert [
        key_shares_of_rank for key_shares_of_rank, _ in four_ranks.run(4, measure_passkeys, (1, 3))
    ] == [expected_shares] * 4


def test_dry_run_divides_memory_by_ranks(tmp_path):
    model_folder = str(save_llama(tmp_path / "model"))
    common_settings = {
        "data": ("a.txt",),
        "length": 2048,
        "model": model_folder,
        "dtype": "float32",
    }
    settings_of_one_rank, settings_of_four_ranks = (
        Settings(**common_settings, cp=cp) for cp in (1, 4)
    )
    skeleton = prepare.make_trainable(
        settings_of_one_rank, dry_run.build_skeleton(settings_of_one_rank)
    )
    cost = cost_model.Cost.from_model(skeleton)
    available_memory = cost_model.AvailableMemory(2**40, 2**40)
    memory_of_one_rank, memory_of_four_ranks = (
        dry_run.choose_offloading(settings, cost, {}, available_memory).memory
        for settings in (settings_of_one_rank, settings_of_four_ranks)
    )
    assert (
        memory_of_four_ranks.saved_tensor_bytes == memory_of_one_rank.saved_tensor_bytes / 4
        and memory_of_four_ranks.weight_bytes == memory_of_one_rank.weight_bytes
    )
    # working memory shrinks by less than 4, because each rank gathers all keys and values
    assert (
        memory_of_one_rank.temporary_bytes / 4
        < memory_of_four_ranks.temporary_bytes
        < memory_of_one_rank.temporary_bytes
    )


@pytest.mark.parametrize("changed_fact", ["the tokenizer", "the config of the model"])
def test_different_tokenizer_or_config_raises_on_all_ranks(changed_fact):
    settings, model, tokenizer = Settings(data=("a.txt",)), make_tiny_model(), make_tokenizer()
    facts_before = collect_facts(settings, model, tokenizer)
    assert collect_facts(settings, make_tiny_model(), make_tokenizer()) == facts_before
    if changed_fact == "the tokenizer":
        tokenizer.eos_token = "It"
    else:
        model.config.rms_norm_eps *= 2
    facts_after = collect_facts(settings, model, tokenizer)
    assert {fact for fact in facts_before if facts_before[fact] != facts_after[fact]} == {
        changed_fact
    }


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
    first_outcome, second_outcome = start_ranks(2).collect_outcomes(2, stop_on_rank_1, error)
    reason = f"rank 1 stopped: {type(error).__name__}: {error}"
    assert first_outcome.error_type == "UsageError"
    assert f"because another one stopped: {reason}" in first_outcome.message
    assert (second_outcome.error_type, second_outcome.message) == (type(error).__name__, str(error))
