"""All causal model types of transformers: "cab" equals their own attention, or raises an error.

By default the tests examine the types below. `MODEL_SWEEP=FOLDER pytest -m slow
tests/test_families.py` examines all types, and writes samples.jsonl, results.json and report.md to
FOLDER/families (one process) and FOLDER/families-context-parallel (two ranks). The same command
continues an interrupted sweep.
"""

import json
import math
import os
import re
from pathlib import Path

import model_sweep
import pytest
import torch
from marks import mark_slow_except, skip_before_transformers
from model_sweep import Sweep, examine_in_processes, examine_model_type
from tiny_types import list_causal_types
from torch.multiprocessing import start_processes
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf.eval.experiment import run
from cab_hf.eval.families import (
    EXACT_VERDICT,
    FAILS_VERDICT,
    NOT_BUILT_VERDICT,
    NOT_REACHED_VERDICT,
    PARTLY_REFUSED_VERDICT,
    REFUSED_VERDICT,
    RESULTS_FOLDER_VARIABLE,
    WRONG_VERDICT,
    Settings,
    make_row,
)

SWEEP_FOLDER = os.environ.get(RESULTS_FOLDER_VARIABLE)
FOLDER_NAME_BY_RANKS = {1: "families", 2: "families-context-parallel"}
# types for which "cab" must be exact: with experts, latent attention, windows, recurrent layers,
# cross-attention or layers of different types
EXACT_TYPES = """
    llama mistral ministral mixtral qwen2 qwen3 qwen3_moe gemma gemma3 gemma4_text phi3 phimoe olmo2
    granite cohere2 glm4 deepseek_v3 smollm3 starcoder2 stablelm gpt_neox opt bert minimax
    granitemoehybrid mllama gpt_oss gpt_bigcode
"""
# types whose attention differs in older versions of transformers
VERSION_DEPENDENT_TYPES = [
    pytest.param(("gemma2", 1), marks=skip_before_transformers("5.24", "sdpa caps no logits")),
    pytest.param(
        ("llama4", 1),
        marks=skip_before_transformers("5.24", "chunks are counted from the start of the row"),
    ),
]
# pattern of the error for types whose attention does not use the attention interface
UNREACHED_ERROR_PATTERN = "attn_implementation=.*[.]$"
# by type that "cab" rejects: pattern of the error
REFUSED_TYPES = {
    **dict.fromkeys(("deepseek_v4", "doge", "minimax_m3_vl_text", "deepseek_v32"), ""),
    **dict.fromkeys(
        ("falcon", "bloom", "mpt", "gpt_neo", "xglm", "openai-gpt", "mamba"),
        UNREACHED_ERROR_PATTERN,
    ),
}
# types for which context parallelism must be exact: with experts and router loss, latent
# attention, windows or learnt positions
EXACT_TYPES_OVER_RANKS = "llama mixtral gemma3 deepseek_v3 gpt2"
REFUSED_TYPES_OVER_RANKS = {
    "bamba": r"BambaForCausalLM has layers that mix tokens without attention \(BambaMixer\)",
    "bart": "BartForCausalLM takes no position_ids",
    "roberta": "RobertaForCausalLM counts positions from padding_idx",
    "stablelm": "StableLmForCausalLM does not pass position_ids and cu_seq_lens_q",
    "minimax_m3_vl_text": r"MiniMaxM3VLAttention .* is not computed by 'cab' \(keys chosen",
    "llama4": "attends in chunks of 64 tokens",
    "bloom": "must reach its attention through",
}
# by (type, number of ranks): pattern of the error; None if the type must be exact
EXPECTED_ERRORS = {
    **dict.fromkeys([(type_name, 1) for type_name in EXACT_TYPES.split()]),
    **{(type_name, 1): error_pattern for type_name, error_pattern in REFUSED_TYPES.items()},
    **dict.fromkeys([(type_name, 2) for type_name in EXACT_TYPES_OVER_RANKS.split()]),
    **{
        (type_name, 2): error_pattern
        for type_name, error_pattern in REFUSED_TYPES_OVER_RANKS.items()
    },
    **dict.fromkeys([("gemma2", 1), ("llama4", 1)]),
}
VERSION_DEPENDENT_CASES = {case_param.values[0] for case_param in VERSION_DEPENDENT_TYPES}
CASES = [
    *(case for case in EXPECTED_ERRORS if case not in VERSION_DEPENDENT_CASES),
    *VERSION_DEPENDENT_TYPES,
]
if SWEEP_FOLDER:
    CASES = [
        (model_type, num_ranks)
        for num_ranks in FOLDER_NAME_BY_RANKS
        for model_type in list_causal_types()
    ]


@pytest.fixture(autouse=True)
def single_torch_thread():
    """Set torch to one thread during the test, as in the processes of a sweep."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def compute_result_row(model_type, num_ranks=1):
    """Examine a type and return its result row; also write results if MODEL_SWEEP is set."""
    if SWEEP_FOLDER:
        out_folder = str(Path(SWEEP_FOLDER, FOLDER_NAME_BY_RANKS[num_ranks]))
        rows = run(Sweep(Settings(types=(model_type,), ranks=num_ranks, out=out_folder)))
        return next(result_row for result_row in rows if result_row["model_type"] == model_type)
    result_record = (
        examine_model_type(model_type)
        if num_ranks == 1
        else examine_in_processes(model_type, num_ranks, 120, 24)
    )
    return make_row({"model_type": model_type, **result_record})


def make_case_params():
    """Yield `CASES` with ids. All are marked as slow, except the first without MODEL_SWEEP."""
    params = [case if hasattr(case, "marks") else pytest.param(case) for case in CASES]
    for param in mark_slow_except(params, *([] if SWEEP_FOLDER else [0])):
        ((model_type, num_ranks),) = param.values
        case_id = f"{model_type}-ranks-{num_ranks}"
        yield pytest.param((model_type, num_ranks), id=case_id, marks=param.marks)


@pytest.mark.parametrize("case", make_case_params())
def test_model_type_is_exact_or_raises(case):
    model_type, num_ranks = case
    result_row = compute_result_row(model_type, num_ranks)
    if case not in EXPECTED_ERRORS:
        assert result_row["verdict"] in (EXACT_VERDICT, REFUSED_VERDICT, NOT_BUILT_VERDICT), (
            result_row
        )
    elif EXPECTED_ERRORS[case] is not None:
        assert result_row["verdict"] == REFUSED_VERDICT and re.search(
            EXPECTED_ERRORS[case], result_row["said"]
        ), result_row
    else:
        assert result_row["verdict"] == EXACT_VERDICT and result_row["layers"] > 0, result_row
        if num_ranks == 1:
            assert (
                result_row["by_name"]
                == result_row["applied"]
                == result_row.get("windowed", EXACT_VERDICT)
                == EXACT_VERDICT
            ), result_row
            assert (
                result_row["layers"] >= result_row["sparse"] > 0
                and result_row["reads_padding"] == []
            )


@pytest.mark.slow
@pytest.mark.parametrize("build_name", ["windowed", "dynamic"])
def test_windows_and_dynamic_rope_are_exact_over_ranks(build_name):
    assert (
        compute_result_row("mistral" if build_name == "dynamic" else "mixtral", 2)[build_name]
        == EXACT_VERDICT
    )


def attend_without_first_key(module, query, key, value, _mask, **options):
    """Attention function with an error: sdpa without the first key."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    mask[1:, 0] = False
    return sdpa(module, query, key, value, mask[None, None], **options)


def return_nan(module, query, *args, **kwargs):
    """Attention function with an error: the output is NaN."""
    return query.transpose(1, 2) * float("nan"), None


def raise_key_error(module, *args, **kwargs):
    """Attention function that raises an error which is not an error of this project."""
    raise KeyError("cab")


@pytest.mark.parametrize(
    ("wrong_attention", "verdict"),
    [
        (attend_without_first_key, WRONG_VERDICT),
        (return_nan, FAILS_VERDICT),
        (raise_key_error, FAILS_VERDICT),
    ],
)
def test_wrong_attention_is_detected(wrong_attention, verdict):
    original_attention = ALL_ATTENTION_FUNCTIONS["cab"]
    AttentionInterface.register("cab", wrong_attention)
    try:
        assert (
            make_row({"model_type": "llama", **examine_model_type("llama")})["verdict"] == verdict
        )
    finally:
        AttentionInterface.register("cab", original_attention)


EXACT_OUTCOME, REFUSED_OUTCOME = {"difference": 1e-5}, {"refused": "cab does not."}
INEXACT_OUTCOME, FAILED_OUTCOME = {"difference": 2e-4}, {"failed": "KeyError: 'cab'"}


def make_result_record(loaded_outcomes, applied_outcomes, num_layers):
    """Return a result record as `examine_model_type` returns for a type.

    Args:
        loaded_outcomes: outcomes of the model that `load_by_name` returns, for the inputs "plain"
            and "left padded".
        applied_outcomes: outcomes of the model that `copy_with_cab` returns, for the same inputs.
        num_layers: number of layers with "cab".
    """
    result_record = {"model_type": "x", "model": "X", "reads_padding": []}
    for switch_name, outcomes in (("by_name", loaded_outcomes), ("applied", applied_outcomes)):
        outcome_by_input = dict(zip(("plain", "left padded"), outcomes, strict=True))
        result_record[switch_name] = {
            "inputs": outcome_by_input,
            "layers": num_layers,
            "sparse": num_layers,
        }
    return result_record


NAN_OUTCOME = {"difference": float("nan")}
EXACT_STEP_OUTCOME = {"loss": 1e-7, "logits": 1e-7, "gradients": 9e-6, "layers": 2}


def make_result_record_over_ranks(one_sequence_outcome, packed_outcome):
    """Return a result record like that of `examine_steps_over_ranks`, for two inputs."""
    return {
        "model_type": "x",
        "model": "X",
        "plain": {"one text": one_sequence_outcome, "packed": packed_outcome},
    }


# by name: (result record, expected verdict)
VERDICT_CASES = {
    "exact": (
        make_result_record([EXACT_OUTCOME, EXACT_OUTCOME], [EXACT_OUTCOME, EXACT_OUTCOME], 2),
        EXACT_VERDICT,
    ),
    "not-reached": (
        make_result_record([EXACT_OUTCOME, EXACT_OUTCOME], [EXACT_OUTCOME, EXACT_OUTCOME], 0),
        NOT_REACHED_VERDICT,
    ),
    "refused": (
        make_result_record(
            [REFUSED_OUTCOME, REFUSED_OUTCOME], [REFUSED_OUTCOME, REFUSED_OUTCOME], 2
        ),
        REFUSED_VERDICT,
    ),
    "one-input-refused": (
        make_result_record([EXACT_OUTCOME, REFUSED_OUTCOME], [EXACT_OUTCOME, REFUSED_OUTCOME], 2),
        PARTLY_REFUSED_VERDICT,
    ),
    "one-switch-refused": (
        make_result_record([EXACT_OUTCOME, EXACT_OUTCOME], [REFUSED_OUTCOME, REFUSED_OUTCOME], 2),
        PARTLY_REFUSED_VERDICT,
    ),
    "one-input-off": (
        make_result_record([EXACT_OUTCOME, INEXACT_OUTCOME], [REFUSED_OUTCOME, REFUSED_OUTCOME], 2),
        WRONG_VERDICT,
    ),
    "one-switch-fails": (
        make_result_record([FAILED_OUTCOME, FAILED_OUTCOME], [REFUSED_OUTCOME, REFUSED_OUTCOME], 2),
        FAILS_VERDICT,
    ),
    "not-a-number": (
        make_result_record([EXACT_OUTCOME, NAN_OUTCOME], [EXACT_OUTCOME, EXACT_OUTCOME], 2),
        WRONG_VERDICT,
    ),
    "ranks-exact": (
        make_result_record_over_ranks(EXACT_STEP_OUTCOME, EXACT_STEP_OUTCOME),
        EXACT_VERDICT,
    ),
    "ranks-refused": (
        make_result_record_over_ranks(REFUSED_OUTCOME, REFUSED_OUTCOME),
        REFUSED_VERDICT,
    ),
    "ranks-one-input-refused": (
        make_result_record_over_ranks(EXACT_STEP_OUTCOME, REFUSED_OUTCOME),
        PARTLY_REFUSED_VERDICT,
    ),
    "ranks-gradients-off": (
        make_result_record_over_ranks(
            EXACT_STEP_OUTCOME, {**EXACT_STEP_OUTCOME, "gradients": 2e-5}
        ),
        WRONG_VERDICT,
    ),
    "ranks-not-a-number": (
        make_result_record_over_ranks(
            {**EXACT_STEP_OUTCOME, "logits": math.inf}, EXACT_STEP_OUTCOME
        ),
        WRONG_VERDICT,
    ),
    "ranks-loss-off": (
        make_result_record_over_ranks({**EXACT_STEP_OUTCOME, "loss": 2e-5}, EXACT_STEP_OUTCOME),
        WRONG_VERDICT,
    ),
    "ranks-an-error": (
        make_result_record_over_ranks(FAILED_OUTCOME, REFUSED_OUTCOME),
        FAILS_VERDICT,
    ),
    "ranks-not-reached": (
        make_result_record_over_ranks({**EXACT_STEP_OUTCOME, "layers": 0}, EXACT_STEP_OUTCOME),
        NOT_REACHED_VERDICT,
    ),
}


@pytest.mark.parametrize(("result_record", "verdict"), VERDICT_CASES.values(), ids=VERDICT_CASES)
def test_verdict_is_the_worst_outcome(result_record, verdict):
    assert make_row(result_record)["verdict"] == verdict


def test_inputs_whose_padding_changes_the_model_are_not_compared():
    result_row = make_row({"model_type": "x", **examine_model_type("recurrent_gemma")})
    assert result_row["verdict"] == EXACT_VERDICT and result_row["reads_padding"] == ["left padded"]


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "timeout_seconds", "memory_gib", "error_pattern"),
    [
        ("llama", 1, 0.01, 12, "took longer than 0.01 seconds"),
        ("llama", 2, 0.001, 24, "took longer than 0.001 seconds"),
        ("gemma4_assistant", 1, 120, 12, "hidden_size_per_layer_input|Gemma4AssistantConfig"),
    ],
)
def test_unbuildable_type_does_not_stop_sweep(
    model_type, num_ranks, timeout_seconds, memory_gib, error_pattern
):
    assert re.search(
        error_pattern,
        examine_in_processes(model_type, num_ranks, timeout_seconds, memory_gib)["not_built"],
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dead_process_does_not_stop_sweep(num_ranks, monkeypatch):
    def start_processes_and_kill_first(function, **options):
        process_group = start_processes(function, **options)
        process_group.processes[0].kill()
        return process_group

    with monkeypatch.context() as patch_context:
        patch_context.setattr(model_sweep, "start_processes", start_processes_and_kill_first)
        expected_record = {"not_built": "its process died with exit code -9"}
        assert examine_in_processes("llama", num_ranks, 120, 24) == expected_record
    assert examine_in_processes("gemma", num_ranks, 120, 24)["model"] == "GemmaForCausalLM"


def test_sweep_writes_rows_figure_and_report(tmp_path, monkeypatch):
    record_by_type = {
        "llama": {
            "model": "L",
            "dtype": "float64",
            "plain": {"one text": EXACT_STEP_OUTCOME, "packed": EXACT_STEP_OUTCOME},
        },
        "bamba": {"model": "B", "plain": {"one text": REFUSED_OUTCOME, "packed": REFUSED_OUTCOME}},
        "opt": {"not_built": "no reason"},
    }
    monkeypatch.setattr(
        model_sweep, "examine_in_processes", lambda model_type, *_: record_by_type[model_type]
    )
    for model_type in record_by_type:
        run(Sweep(Settings(types=(model_type,), ranks=2, out=str(tmp_path))))
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    verdicts = {row["model_type"]: row["verdict"] for row in rows}
    assert verdicts == {"bamba": REFUSED_VERDICT, "llama": EXACT_VERDICT, "opt": NOT_BUILT_VERDICT}
    assert (tmp_path / "figure.png").stat().st_size > 0
    report_text = (tmp_path / "report.md").read_text()
    assert "Of 3 types 2 could be built: 1 attend exactly" in report_text
    assert "MODEL_SWEEP=FOLDER python -m pytest" in report_text
