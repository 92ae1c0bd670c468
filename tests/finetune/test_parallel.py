"""Sequences sharded across processes: equal to one process, resumable, counted once."""

import time
from types import SimpleNamespace

import pytest
import torch
from launches import LAUNCH, MEDDLED, ROOT, TRAIN, assert_same_run, launched, losses, steps
from ranks import Ranks
from tiny import tiny_model
from torch import nn
from words import make_tokenizer, save_llama

from cab_hf.distributed.exchange import failures_of_others
from cab_hf.distributed.sharding import sharding_of
from cab_hf.experiment.log import read_log
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model, dry_run, lora, prepare, train
from cab_hf.finetune.models import load_model
from cab_hf.finetune.parallel import Parallel
from cab_hf.finetune.rank_checks import ending_together, facts_of
from cab_hf.finetune.settings import Settings
from cab_hf.finetune.validation import Validation

# two documents and a rest of padding to a sequence
WORDS = [
    *("--config", str(ROOT / "finetune" / "configs" / "tiny_cpu.yaml"), "--cpu", "--dropout", "0"),
    *("--data", "retrieval:passkey:200", "--validation", "retrieval:passkey:200"),
    *("--steps", "4", "--save-every", "9", "--eval-every", "4", "--held-out", "3"),
]
# one document to a sequence, whose last positions one process holds alone
WHOLE = ["--data", "retrieval:passkey:511", "--validation", "retrieval:passkey:511"]
TILED = ["--tile-tokens", "100", "--offload-layers", "1"]
RUNS = {
    "cab": [],
    "little": TILED,
    # processes draw different samples, except if all blocks are sampled
    "all-sampled": ["--cab", "sampled_one_in=1"],
    "cab_dense": ["--attention", "cab_dense", "--checkpointing", "false"],
    "turns": ["--micro-batch", "2", "--tokens-per-step", "2048"],
}
# accelerate shards weights on GPUs only; on a CPU the device type must be set
SHARDED = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from cab_hf.finetune import checkpoints, lora, train

class Sharding(Accelerator):
    def __init__(self, **told):
        super().__init__(**told)
        if told["project_dir"].endswith("fsdp2"):
            self.state.distributed_type = DistributedType.FSDP
            self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                cpu_ram_efficient_loading=False,
                state_dict_type="FULL_STATE_DICT",
            )

train.Accelerator, learn = Sharding, train.Run.train

def checked(run):
    trained = checkpoints.trained(run.model).values()
    spread = {type(each).__name__ == "DTensor" for each in trained}
    assert spread == {run.out.name == "fsdp2"}
    learn(run)

train.Run.train = checked
"""

ENDS = ("killed", "whole")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Start exactly four processes, because a device mesh spans all processes."""
    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_sequence_parallel_training_equals_one_process(tmp_path):
    """One test covers all runs that need a launcher, because launches are slow."""
    script = tmp_path / "meddled.py"
    script.write_text(SHARDED + MEDDLED)

    def words(name, *own):
        return " ".join([*WORDS, *own, "--out", str(tmp_path / name)])

    few = few_positions(tmp_path / "few")
    runs = {**RUNS, "dynamic": ["--model", few, "--rope", "dynamic", *WHOLE]}
    ends = [" ".join([*TRAIN[1:], "--cp", "2", "--out", str(tmp_path / name)]) for name in ENDS]
    together = [words(f"{name}-of-two", *own, "--cp", "2") for name, own in runs.items()]
    assert launched([*LAUNCH, str(script), " / ".join([*together, ends[0]])]).returncode != 0
    assert [step for _, step, _ in losses(tmp_path / "killed")] == [1, 2]
    others = [*ends, words("replicas"), words("fsdp2", "--cp", "2", *TILED)]
    grid = ["--num_processes", "4", str(script), words("grid", "--cp", "2")]
    for given in ([str(script), " / ".join(others)], grid):
        done = launched([*LAUNCH, *given])
        assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(*(tmp_path / name for name in ENDS))

    for name, own in runs.items():
        assert lora.main([*WORDS, *own, "--out", str(tmp_path / f"{name}-of-one")]) == 0
        assert_runs_are_close(tmp_path / f"{name}-of-two", tmp_path / f"{name}-of-one")
    assert_runs_are_close(tmp_path / "fsdp2", tmp_path / "cab-of-one")
    assert_runs_are_close(tmp_path / "grid", tmp_path / "replicas")
    # one process with accumulation steps equals two replicas
    assert lora.main([*WORDS, "--tokens-per-step", "1024", "--out", str(tmp_path / "one")]) == 0
    assert_runs_are_close(tmp_path / "grid", tmp_path / "one")


def few_positions(folder):
    """Save the tiny model with a quarter of the positions that its runs need in ``folder``."""
    model, tokenizer = load_model("tiny", attn_implementation="sdpa", dtype="float32")
    model.config.max_position_embeddings = 128
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def assert_runs_are_close(actual, meant):
    for field in ("loss", "grad_norm"):
        assert steps(actual, field) == pytest.approx(steps(meant, field), rel=1e-5), field
    # counted once, wherever it was computed
    assert steps(actual, "density") == pytest.approx(steps(meant, "density"), rel=1e-9)
    counted = [
        [tokens * seconds for tokens, seconds in zip(*both, strict=True)]
        for both in (
            (steps(out, "tokens_per_second"), steps(out, "seconds")) for out in (actual, meant)
        )
    ]
    assert counted[0] == pytest.approx(counted[1])
    (one,), (other,) = (
        [each for each in read_log(out / train.LOG)[1] if each["kind"] == "evaluation"]
        for out in (actual, meant)
    )
    assert one["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-5)
    assert one["passkey"] == other["passkey"]


def parallel_of(group, cp, attention="cab"):
    """Return the device mesh of all processes and the accelerator's part of it."""
    settings = Settings(model="tiny", data=("a.txt",), attention=attention, cp=cp)
    accelerator = SimpleNamespace(
        num_processes=group.size(),
        process_index=group.rank(),
        device=torch.device("cpu"),
        reduce=summed,
    )
    model, _ = load_model("tiny", attn_implementation=attention, dtype="float32", device="cpu")
    return Parallel(settings, model, accelerator), accelerator


def summed(x, _):
    torch.distributed.all_reduce(x)
    return x


def sequence(length=1100, documents=(700, 1, 150, 249)):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (2, length), generator=generator)
    positions = torch.cat([torch.arange(size) for size in documents]).expand(2, -1)
    # each has its own, so that none is counted twice
    labels = torch.arange(2 * length).view(2, length)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def dealt_on_a_process(group, batch):
    parallel, _ = parallel_of(group, 2)
    mine = parallel.sharded(batch)
    return parallel.replicas, parallel.replica, mine, parallel.positions(mine)


def test_each_replica_holds_every_token_once(four):
    batch = sequence()
    actual = four.run(4, dealt_on_a_process, batch)
    assert [each[:2] for each in actual] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    for pair in (actual[:2], actual[2:]):
        labels = torch.cat([mine["labels"][0] for _, _, mine, _ in pair])
        ids = torch.cat([mine["input_ids"][0] for _, _, mine, _ in pair])
        held = labels != -100
        assert labels[held].sort().values.tolist() == list(range(2200))
        assert torch.equal(ids[held], batch["input_ids"].flatten()[labels[held]])
        positions = torch.cat([real[0] for *_, real in pair])
        assert torch.equal(positions.sort().values, batch["position_ids"].flatten().sort().values)


class Knowing(nn.Module):
    """Model that predicts the next token of memorised documents, except at chosen errors."""

    def __init__(self, documents, errs):
        super().__init__()
        self.documents, self.errs = documents, errs

    def forward(self, batch, places):
        ids, at = batch["input_ids"][0], batch["position_ids"][0]
        for document in self.documents[int(batch["cu_seq_lens_q"][-1])].values():
            tokens = torch.tensor(document.tokens)
            # padding is 0
            if ((tokens[at] == ids) | (ids == 0)).all():
                return tokens[at[places] + 1] + self.errs


def passkeys_on_a_process(group, erring):
    parallel, accelerator = parallel_of(group, 2)
    _, tokenizer = load_model("tiny", attn_implementation="cab", dtype="float32", device="cpu")
    asked = Settings(data=("a.txt",), length=1024, passkeys=7, passkey_lengths=(300, 1024))
    result = Validation(tokenizer, [], asked, accelerator, parallel)
    outcome = result.measure(Knowing(result.documents, group.rank() in erring))["passkey"]
    return outcome, result.documents


def test_passkey_counts_when_all_ranks_predict_their_part(four):
    everyone = four.run(4, passkeys_on_a_process, ())
    assert [result for result, _ in everyone] == [{"300": 1.0, "1024": 1.0}] * 4
    # the second process of each replica errs
    expected = {}
    for length in (300, 1024):
        sharding = sharding_of((length,), 2)
        documents = {**everyone[0][1][length], **everyone[2][1][length]}
        # each replica has four documents of every length
        assert sorted(documents) == list(range(8))
        starts = [document.answers[0] for document in documents.values()]
        first = [
            bool((sharding.shard_index[start - 1 : end - 1] < sharding.tokens).all())
            for start, end in starts
        ]
        expected[str(length)] = sum(first) / 8
    assert 0 < expected["1024"] < 1
    assert [result for result, _ in four.run(4, passkeys_on_a_process, (1, 3))] == [expected] * 4


def test_dry_run_divides_memory_by_ranks(tmp_path):
    model = str(save_llama(tmp_path / "model"))
    fields = {"data": ("a.txt",), "length": 2048, "model": model, "dtype": "float32"}
    one, four = (Settings(**fields, cp=cp) for cp in (1, 4))
    skeleton = prepare.adapted(one, dry_run.skeleton(one))
    cost = cost_model.Cost.of(skeleton)
    room = cost_model.Room(2**40, 2**40)
    alone, shared = (dry_run.fit(each, cost, {}, room).memory for each in (one, four))
    assert shared.layers == alone.layers / 4 and shared.weights == alone.weights
    # every rank gathers keys and values of the whole sequence
    assert alone.working / 4 < shared.working < alone.working


@pytest.mark.parametrize("name", ["the tokenizer", "the config of the model"])
def test_different_tokenizer_or_config_raises_on_all_ranks(name):
    settings, model, tokenizer = Settings(data=("a.txt",)), tiny_model(), make_tokenizer()
    before = facts_of(settings, model, tokenizer)
    assert facts_of(settings, tiny_model(), make_tokenizer()) == before
    if name == "the tokenizer":
        tokenizer.eos_token = "It"
    else:
        model.config.rms_norm_eps *= 2
    after = facts_of(settings, model, tokenizer)
    assert {each for each in before if before[each] != after[each]} == {name}


def stopping(group, error):
    with ending_together():
        if group.rank() == 1:
            raise error
        while not failures_of_others(torch.distributed.group.WORLD):
            time.sleep(0.01)
        # the error of gloo
        raise RuntimeError("Connection closed by peer [127.0.0.1]:21654.")


@pytest.mark.parametrize(
    "error", [UsageError("source 'a' is gone."), KeyError("a bug")], ids=["refused", "a bug"]
)
def test_ranks_report_why_another_rank_stopped(processes, error):
    first, second = processes(2).outcomes(2, stopping, error)
    why = f"rank 1 stopped: {type(error).__name__}: {error}"
    assert first.kind == "UsageError" and f"because another one stopped: {why}" in first.sentence
    assert (second.kind, second.sentence) == (type(error).__name__, str(error))
