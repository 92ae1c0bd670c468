"""The tables and sentences with measured numbers in README.md and docs, one function each.

The name of a function is the NAME in the marker ``<!-- table: NAME -->`` of a page. The function
receives the rows of result folders in ``eval/results``, which its decorator names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from statistics import geometric_mean, median

from pandas import DataFrame, Series

from cab_hf.data.tasks import TASKS
from cab_hf.eval.experiment import Row, find_changed_fields, is_from_earlier_version
from cab_hf.eval.frames import (
    add_fastest_dense,
    add_seconds,
    concatenate_rows,
    format_column,
    format_intervals,
    format_pairs,
    get_only_row,
    get_setting,
    make_bold,
    make_table,
    merge_methods,
    sort_by_label,
)
from cab_hf.eval.intervals import wilson_interval
from cab_hf.eval.report import as_markdown, format_digits, format_percent
from cab_hf.eval.result_folders import (
    Results,
    describe_source,
    read_all_results,
    read_results,
    uses_default_config,
)
from cab_hf.experiment.log import file_exists, read_log
from cab_hf.finetune.curve import STEP_RECORD_KIND
from cab_hf.selection.reference import MAX_KEYS_AT_FULL_THRESHOLD

# NAME in a marker -> function from the folder of all results to the Markdown text after the marker
TABLES: dict[str, Callable[[Path], str]] = {}
# what separates the reason in an error message from the remedy
REASON_END_PATTERN = re.compile(r"; |\. ")
# log of a training run that had the GPU alone, relative to the folder of results
TRAINING_LOG = Path("alone", "log.jsonl")
WARM_UP_STEPS = 3  # first steps of a training run, which include compilation


def register_table(
    folders: Iterable[str] = (), find_results: Callable[[Path], list[Results]] | None = None
) -> Callable:
    """Return a decorator that registers a function from rows to a table in `TABLES`.

    The registered text is the table and a sentence with device, versions and commit of the runs.

    Args:
        folders: names of the result folders whose rows the function receives.
        find_results: function from the folder of all results to the results whose rows the function
            receives; None: the results in ``folders``.
    """

    def register(write_table: Callable[[DataFrame], DataFrame]) -> Callable[[DataFrame], DataFrame]:
        @wraps(write_table)
        def write_markdown(results: Path) -> str:
            runs = (
                find_results(results)
                if find_results
                else [read_results(results / name) for name in folders]
            )
            markdown = as_markdown(write_table(concatenate_rows(runs)))
            origin = f"{describe_source(runs)} Source: [eval/results](eval/results/README.md)."
            return f"{markdown}\n\n{origin}"

        TABLES[write_table.__name__] = write_markdown
        return write_table

    return register


def register_sentence(folder: str) -> Callable:
    """Return a decorator that registers a function from rows to a sentence in `TABLES`.

    Args:
        folder: name of the result folder whose rows the function receives.
    """

    def register(write_sentence: Callable[[DataFrame], str]) -> Callable[[DataFrame], str]:
        TABLES[write_sentence.__name__] = lambda results: write_sentence(
            concatenate_rows([read_results(results / folder)])
        )
        return write_sentence

    return register


DEFAULT_FOLDERS = ("fidelity-strided-32k", "fidelity-strided-131k")
FRONT_FOLDERS = (
    "fidelity-front-8k",
    "fidelity-front-32k",
    "fidelity-front-256-32k",
    "fidelity-front-wide-32k",
    "fidelity-front-typical-32k",
    "fidelity-cascade-32k",
    "fidelity-front-131k",
    "fidelity-front-256-131k",
    "fidelity-front-local-131k",
    "fidelity-front-wide-131k",
    "fidelity-front-typical-131k",
    "fidelity-strided-32k",
    "fidelity-strided-131k",
    "fidelity-front-strided-131k",
)
# today's default, and settings that change one or two fields of it, at 131,072 tokens
CHOICE_FOLDERS = ("fidelity-strided-131k", "fidelity-front-strided-131k")


def average_texts(rows: DataFrame) -> DataFrame:
    """Return a row for each length and method, with means over texts.

    The column ``setting`` lists the changed fields of the method's config (`_describe_setting`),
    and ``threshold`` is the mass threshold that the config applies at the length.
    """
    configs = rows.apply(
        lambda row: row["run"]["settings"]["cab_configs"].get(row["method"], {}), axis=1
    )
    # the method "cab" has the earlier default config in some runs: separate their rows
    rows = rows.assign(config=configs, is_earlier=configs.map(is_from_earlier_version))
    groups = rows.groupby(["length", "method", "is_earlier"], sort=False)
    mean_rows = groups.mean(numeric_only=True).assign(config=groups["config"].first()).reset_index()
    mean_rows["setting"] = mean_rows.apply(_describe_setting, axis=1)
    mean_rows["threshold"] = mean_rows["config"].map(lambda config: config.get("mass_threshold"))
    mean_rows["threshold"] *= (MAX_KEYS_AT_FULL_THRESHOLD / mean_rows["length"]).clip(upper=1)
    return mean_rows.sort_values("length", kind="stable")


def _describe_setting(row: Series) -> str:
    """Return the changed fields of a row's config, such as ``query_block=256``.

    Returns "default" if no field was changed, and the name of a method without a config.
    """
    # left out: min_length=0, which all runs set, and head_map and origin, which calibration writes
    changed_fields = [
        f"{name}={value}"
        for name, value in sorted(find_changed_fields(row["config"]).items())
        if name not in ("head_map", "origin") and (name, value) != ("min_length", 0)
    ]
    if row["is_earlier"]:
        changed_fields = ["earlier default", *changed_fields]
    return ", ".join(changed_fields) or ("default" if row["config"] else row["method"])


# each row shows speed and quality of the same run
@register_table(DEFAULT_FOLDERS)
def default(rows: DataFrame) -> DataFrame:
    rows = average_texts(rows)
    rows["attention_ms"] = rows["predict_ms"] + rows["attend_ms"]
    rows["gain"] = 1 / rows["over_dense"]
    column_names = "length setting threshold density attention_ms gain continuation.kl"
    return make_table(rows, f"{column_names} asked.share recall.share recall_border.share")


def _make_front_table(rows: DataFrame) -> DataFrame:
    """Return a table of density, time and quality for rows of `average_texts`."""
    column_names = "length setting density predict_ms attend_ms continuation.kl"
    return make_table(
        rows, f"{column_names} recall.share recall_border.share perplexity_border.ratio"
    )


@register_table(FRONT_FOLDERS)
def front(rows: DataFrame) -> DataFrame:
    return _make_front_table(average_texts(rows))


@register_table(["fidelity-front-d128"])
def front_of_wide_heads(rows: DataFrame) -> DataFrame:
    return _make_front_table(average_texts(rows))


@register_table(CHOICE_FOLDERS)
def choices(rows: DataFrame) -> DataFrame:
    rows = average_texts(rows)
    names = "length setting density predict_ms attend_ms continuation.kl"
    return make_table(rows, f"{names} asked.share recall.share recall_border.share")


@register_sentence("fidelity-cascade-32k")
def noise(rows: DataFrame) -> str:
    row = get_only_row(average_texts(rows), method="full")
    return f"Two exact kernels differ by a KL of {format_digits(row['continuation.kl'])}."


def _find_default_runs(results: Path) -> list[Results]:
    """Return the `fidelity` runs with the default config, except runs that other tables show."""
    other_folders = {*TRAINING_BY_FOLDER, *FRONT_FOLDERS, *CODE_PATH_FOLDERS}
    return [
        run
        for run in read_all_results(results)
        if run.name not in other_folders and uses_default_config(run)
    ]


@register_table(find_results=_find_default_runs)
def models(rows: DataFrame) -> DataFrame:
    # models of the same name may have different weights
    weight_hashes = get_setting(rows, "model_sha256").fillna("")
    is_earlier = rows["run"].map(
        lambda run: any(map(is_from_earlier_version, run["settings"]["cab_configs"].values()))
    )
    rows = rows.assign(
        model=get_setting(rows, "model"),
        weights=weight_hashes,
        default=is_earlier.map({True: "earlier", False: "today's"}),
    )
    rows = rows.sort_values(["model", "length", "default"], kind="stable")
    key_columns = ["model", "weights", "length", "default"]
    num_texts = rows[rows["method"] == "cab"].groupby(key_columns)["text"].nunique().rename("texts")
    rows = merge_methods(rows, "cab", "method", key_columns).merge(
        num_texts.reset_index(), on=key_columns
    )
    rows["kl"] = format_pairs(rows, "continuation.kl", "full.continuation.kl", format_digits)
    column_names = "model length default texts density over_dense kl"
    column_names += " asked.ratio recall.ratio recall_border.ratio tasks.delta"
    return make_table(rows, column_names, kl="KL (noise)")


def add_task_mean(rows: DataFrame) -> DataFrame:
    """Set the column ``mean`` to the mean share of right answers over tasks.

    Only tasks that all methods of the row's folder have count.
    """
    for _, run_rows in rows.groupby("folder", sort=False):
        shares = run_rows[[name for task in TASKS if (name := f"{task}.share") in run_rows]]
        rows.loc[run_rows.index, "mean"] = shares.dropna(axis=1).mean(axis=1)
    return rows


@register_table(["fidelity-tasks-32k"])
def equal_time(rows: DataFrame) -> DataFrame:
    label_by_method = {
        "cab": "CAB",
        "dense": "dense attention",
        "flexprefill_fitted": "FlexPrefill",
        "vertical_slash": "vertical-slash (MInference)",
        "xattention_fitted": "XAttention",
    }
    rows = sort_by_label(add_task_mean(rows), "method", label_by_method)
    column_names = "label density over_dense mean tasks.delta"
    headings = {
        "label": "method",
        "mean": "mean of nine tasks",
        "tasks.delta": "difference to dense attention",
    }
    return make_table(rows, column_names, **headings)


@register_sentence("fidelity-tasks")
def published(rows: DataFrame) -> str:
    rows = add_task_mean(rows)
    frc_row, dense_row, xattention_row = (
        get_only_row(rows, method=name) for name in ("published", "dense", "xattention_fitted")
    )
    return (
        f"At 8,192 tokens and {frc_row['over_dense']:.2f} times the time of dense attention, "
        "`cab_frc` "
        f"answers {frc_row['mean']:.2f} of three tasks correctly. Dense attention answers "
        f"{dense_row['mean']:.2f}, XAttention {xattention_row['mean']:.2f} "
        "([report](eval/results/fidelity-tasks/report.md))."
    )


@register_table(["fidelity-tasks-32k"])
def tasks(rows: DataFrame) -> DataFrame:
    # bold marks shares of right answers that are significantly below those of dense attention
    rows = add_task_mean(rows.assign(model=get_setting(rows, "model")))
    shares = {
        task.title: make_bold(format_column(rows, f"{name}.share"), rows[f"{name}.delta_high"] < 0)
        for name, task in TASKS.items()
    }
    columns = make_table(rows, "model length method density over_dense").assign(**shares)
    return columns.join(make_table(rows, "mean tasks.delta"))


@register_sentence("speed-ttft")
def headline(rows: DataFrame) -> str:
    row = get_only_row(rows, length=131_072, implementation="cab")
    return (
        "**Block-sparse prefill for Hugging Face models: the first token of a 128k prompt comes "
        f"{row['over_best']:.1f} × sooner, without retraining.**"
    )


@register_sentence("speed-ttft")
def picture(rows: DataFrame) -> str:
    short_row, long_row = (
        get_only_row(rows, length=length, implementation="cab") for length in (32_768, 131_072)
    )
    return (
        f"Right: one {long_row['device']}, random weights, compared with the fastest dense kernel "
        "(FlashAttention-3). CAB attends to a fixed share of the causal (query, key) pairs, "
        f"{long_row['density']:.2f} at 131,072 tokens and {short_row['density']:.2f} at 32,768. "
        "[Report](eval/results/speed-ttft/report.md)."
    )


@register_table(["speed-ttft-variants"])
def variants(rows: DataFrame) -> DataFrame:
    label_by_variant = {
        "plain": "transformers, bfloat16",
        "liger": "liger-kernel, bfloat16",
        "fp8": "transformers, FP8",
        "fp8+liger": "liger-kernel, FP8",
    }
    rows = add_seconds(sort_by_label(rows[rows["ms"].notna()], "variant", label_by_variant))
    column_names = "length label implementation seconds over_best density peak_gib"
    return make_table(rows, column_names, label="norms, RoPE, MLPs by")


@register_table(
    ["speed-prefill-chunk-2048", "speed-prefill-chunk-8192", "speed-prefill-chunk-32768"]
)
def chunks(rows: DataFrame) -> DataFrame:
    columns = make_table(add_seconds(rows), "length chunk seconds tokens_s density rest_gib")
    return columns.assign(density=format_column(rows, "density", "{:.4f}"))


@register_table(["speed-ttft-behind"])
def cached_questions(rows: DataFrame) -> DataFrame:
    rows = add_seconds(rows[rows["implementation"] == "cab"])
    column_names = "behind length baseline_s seconds over_best ceiling density"
    return make_table(rows, column_names, length="tokens of the question", seconds="CAB, s")


@register_sentence("speed-ttft-behind")
def question(rows: DataFrame) -> str:
    row = get_only_row(rows, implementation="cab", length=512)
    return (
        f"After {row['behind']:,.0f} cached tokens, a question of 512 tokens takes "
        f"{row['ratio']:.1f} times as long as with dense attention "
        "([results](eval/results/README.md))."
    )


def _make_serving_table(rows: DataFrame) -> DataFrame:
    """Return a table of serving times, without implementations that served no request."""
    column_names = "longest implementation total_s over_best prompt_tokens_s"
    column_names += " ttft_p50 ttft_p99 tpot_p50 tpot_p99 density"
    return make_table(rows[rows["served"].fillna(0) != 0], column_names)


@register_table(["speed-serve"])
def served(rows: DataFrame) -> DataFrame:
    return _make_serving_table(rows)


@register_table(["speed-serve-vllm", "speed-serve-vllm-short"])
def served_by_vllm(rows: DataFrame) -> DataFrame:
    return _make_serving_table(rows)


@register_table(["speed-serve-vllm-qwen3", "speed-serve-vllm-qwen3-262k", "speed-serve-vllm-fp8"])
def first_tokens_in_vllm(rows: DataFrame) -> DataFrame:
    has_experts = get_setting(rows, "experts") > 0
    has_fp8_weights = get_setting(rows, "quantization") == "fp8"
    rows = rows.assign(
        shape=has_experts.map({True: "Qwen3-30B-A3B", False: "LLaMA-3-8B"})
        + has_fp8_weights.map({True: ", FP8 weights", False: ""}),
        chunk=get_setting(rows, "batch_tokens"),
    )
    rows = merge_methods(rows, "cab", "implementation", ["folder", "shape", "longest", "chunk"])
    return make_table(
        rows,
        "shape longest chunk vllm.ttft_p50 ttft_p50 ttft_over_best density",
        **{
            "longest": "tokens",
            "vllm.ttft_p50": "vLLM, s",
            "ttft_p50": "vLLM with CAB, s",
            "ttft_over_best": "speed-up",
        },
    )


@register_sentence("speed-ttft-qwen3")
def experts_in_transformers(rows: DataFrame) -> str:
    row, dense_row = (get_only_row(rows, implementation=name) for name in ("cab", "FA3"))
    return (
        f"With transformers alone, the same shape computes the first token of {row['length']:,} "
        f"tokens in {row['ms'] / 1000:.1f} s with CAB and in {dense_row['ms'] / 1000:.1f} s with "
        f"FlashAttention-3: {row['over_best']:.2f} × as fast, at density {row['density']:.2f} "
        "([report](../eval/results/speed-ttft-qwen3/report.md))."
    )


@register_sentence("speed-serve-vllm")
def served_in_short(rows: DataFrame) -> str:
    row = get_only_row(rows, implementation="cab")
    return (
        "vLLM answers a trace of prompts of 1,024 to 131,072 tokens "
        f"{row['over_best']:.2f} × as fast ([report](eval/results/speed-serve-vllm/report.md))."
    )


def select_longest(rows: DataFrame, key_columns: Sequence[str]) -> DataFrame:
    """Return the row with the longest length that fits, for each combination of ``key_columns``.

    Columns of implementations other than "cab" have the implementation as prefix, as in
    `merge_methods`.
    """
    rows = rows[rows["fits"].astype(bool)].sort_values("length", kind="stable")
    rows = rows.drop_duplicates(["folder", "implementation"], keep="last").sort_index()
    return merge_methods(rows, "cab", "implementation", key_columns)


@register_table(
    [
        "speed-prefill-24-whole",
        "speed-prefill-24-whole-fragmented",
        "speed-prefill-24-chunks",
        "speed-prefill-48-whole",
        "speed-prefill-48-whole-fragmented",
        "speed-prefill-48-chunks",
        "speed-prefill-80-whole",
        "speed-prefill-80-chunks",
    ]
)
def longest(rows: DataFrame) -> DataFrame:
    has_segments = rows["run"].map(
        lambda run: "expandable_segments:True" in "".join(run.get("environment", ()))
    )
    rows = rows.assign(
        gib=get_setting(rows, "gpu_gib"),
        # 0 and None mean a prompt in one call
        prefill=get_setting(rows, "chunk").map(lambda n: f"in chunks of {n:,}" if n else "whole"),
        segments=has_segments.map({True: "yes", False: "no"}),
    )
    rows = select_longest(rows, ["gib", "prefill", "segments"])
    column_names = "gib prefill segments estimate cab_dense.length length"
    headings = {"cab_dense.length": "dense tokens", "length": "CAB tokens"}
    return make_table(rows, column_names, **headings)


@register_table(["speed-lora-4-bits-24", "speed-lora-4-bits-48"])
def longest_steps(rows: DataFrame) -> DataFrame:
    rows = add_seconds(select_longest(rows.assign(gib=get_setting(rows, "gpu_gib")), ["gib"]))
    column_names = "gib length seconds density offloaded host_gib"
    return make_table(rows, column_names, seconds="seconds per step")


CODE_PATH_FOLDERS = ("fidelity-fp8", "fidelity-code-of-8.0", "fidelity-code-of-8.9")


def _make_quality_table(rows: DataFrame, **headings: str) -> DataFrame:
    """Return a table of density and quality by text; arguments as in `make_table`."""
    rows = rows.assign(kl=format_intervals(rows, "continuation.kl", format_digits))
    return make_table(rows, "label text density kl recall_border.share", kl="KL [95 %]", **headings)


@register_table(CODE_PATH_FOLDERS)
def code_paths(rows: DataFrame) -> DataFrame:
    rows = rows[rows["method"] == "cab"]
    return _make_quality_table(rows.assign(label=rows["device"]), label="code for")


@register_table(["fidelity-fp8"])
def fp8(rows: DataFrame) -> DataFrame:
    label_by_method = {
        "full": "bfloat16, another kernel",
        "cab": "bfloat16, cab",
        "fp8": "FP8, all keys",
    }
    return _make_quality_table(sort_by_label(rows, "method", label_by_method), label="model")


def _make_layer_table(rows: DataFrame, **headings: str) -> DataFrame:
    """Return a table of the times of one layer; arguments as in `make_table`."""
    column_names = "label length direction density predict_ms ms fastest ratio"
    return make_table(add_fastest_dense(rows), column_names, ms="total, ms", **headings)


@register_table(
    ["speed-attention-code-of-9.0", "speed-attention-code-of-8.9", "speed-attention-code-of-8.0"]
)
def code_paths_speed(rows: DataFrame) -> DataFrame:
    rows = rows[rows["length"] == 32_768]
    return _make_layer_table(rows.assign(label=rows["device"]), label="code for")


@register_table(["speed-attention-code-of-9.0", "speed-attention-sinks"])
def sinks(rows: DataFrame) -> DataFrame:
    rows = rows.assign(sinks=get_setting(rows, "sinks"))
    rows = sort_by_label(rows, "sinks", {False: "without", True: "with"})
    return _make_layer_table(rows, label="sinks")


@register_table(["speed-batches"])
def batches(rows: DataFrame) -> DataFrame:
    column_names = "layout batch length density choose_ms attend_ms ms fastest ratio"
    return make_table(add_fastest_dense(rows), column_names)


@register_table(["speed-decode", "speed-decode-model", "speed-decode-model-8k"])
def decode(rows: DataFrame) -> DataFrame:
    rows = rows[rows["budget"].notna()].sort_values(["length", "batch", "budget"], kind="stable")
    # with a budget of at least all tokens, cab decodes densely: give these rows another name
    method_names = rows["part"].where(rows["budget"] < rows["length"], rows["part"] + "_dense")
    rows = rows.assign(way=method_names).drop_duplicates(["length", "batch", "way"])
    rows = merge_methods(rows, "", "way", ["length", "batch"])
    headings = {
        "attention.baseline_ms": "layer, fastest dense, ms",
        "attention.ms": "layer, sparse, ms",
        "model.baseline_ms": "model, sdpa, ms",
        "model_dense.ms": "model, dense, ms",
        "model.ms": "model, sparse, ms",
    }
    return make_table(rows, f"length batch {' '.join(headings)}", **headings)


@register_table(["fidelity-decode"])
def decoded(rows: DataFrame) -> DataFrame:
    rows = merge_methods(rows, "cab:keys", "method", ["text", "length"])
    rows["kl"] = format_pairs(rows, "decode.kl", "full.decode.kl", format_digits)
    rows["agreement"] = format_pairs(
        rows, "decode.agreement", "full.decode.agreement", format_percent
    )
    rows["recall"] = format_pairs(rows, "decode_asked.share", "dense.decode_asked.share", "{:.2f}")
    headings = {
        "density": "prefill density",
        "kl": "KL (noise)",
        "agreement": "greedy agreement (noise)",
        "recall": "recall after the prompt (dense)",
    }
    return make_table(rows, "text length density kl agreement recall", **headings)


TRAINING_BY_FOLDER = {
    "fidelity-smollm2-beyond": "not at all",
    "fidelity-trained-dense": "dense",
    "fidelity-trained-dense-seed-1": "dense",
    "fidelity-trained-cab": "cab",
    "fidelity-trained-sampled-16": "cab, sampling one block in 16",
    "fidelity-trained-sampled-8": "cab, sampling one block in 8",
    "fidelity-trained-sampled-8-seed-1": "cab, sampling one block in 8",
}


@register_table(
    [
        "speed-lora",
        "speed-lora-131k",
        "speed-lora-262k",
        "speed-lora-524k",
        "speed-lora-524k-4-layers",
        "speed-lora-strided",
    ]
)
def lora(rows: DataFrame) -> DataFrame:
    rows = rows[(rows["spread"] == "alone") & ~rows["sought"].astype(bool)]
    rows = add_seconds(rows.assign(layers=get_setting(rows, "layers")))
    # if several folders measured the same length and number of layers, show the last of the list
    last_folder = rows.groupby(["length", "layers"])["folder"].transform("last")
    rows = merge_methods(
        rows[rows["folder"] == last_folder], "cab", "implementation", ["length", "layers"]
    )
    rows = rows.sort_values(["length", "layers"], ascending=[True, False])
    headings = {"sdpa.seconds": "sdpa, s", "FA4.seconds": "FA4, s", "seconds": "CAB, s"}
    column_names = "over_best ceiling density peak_gib"
    return make_table(rows, f"length layers {' '.join(headings)} {column_names}", **headings)


@register_table(["speed-lora-spread"])
def spread(rows: DataFrame) -> DataFrame:
    rows = rows[rows["ms"].notna()].sort_values(["length", "world"], kind="stable")
    column_names = "length world spread implementation seconds tokens_s efficiency"
    headings = {"seconds": "seconds per step", "tokens_s": "tokens/s per GPU"}
    return make_table(add_seconds(rows), column_names, **headings)


@register_table(TRAINING_BY_FOLDER)
def trained(rows: DataFrame) -> DataFrame:
    rows = sort_by_label(rows[rows["length"] == 32_768], "name", TRAINING_BY_FOLDER)
    groups = rows.groupby(["label", "method"], sort=False)
    rows = groups.apply(pool_runs, include_groups=False).infer_objects().reset_index()
    dense_row = get_only_row(rows, label="dense", method="dense")
    for probe in ("recall", "recall_border"):
        is_below_dense = rows[f"{probe}_high"] < dense_row[f"{probe}_low"]
        rows[probe] = make_bold(format_intervals(rows, probe), is_below_dense)
    for probe in ("perplexity", "perplexity_border"):
        ratio = rows[probe] / dense_row[probe]
        # a ratio of 100 or more is not meaningful
        rows[f"{probe}_ratio"] = ratio.where(ratio < 100)
    rows["step_s"] = rows["folder"].map(read_step_seconds)
    column_names = "label runs method density recall recall_border each"
    headings = {
        "label": "training",
        "method": "inference",
        "recall": "recall in the prompt",
        "recall_border": "recall at block starts",
    }
    return make_table(
        rows, f"{column_names} perplexity_ratio perplexity_border_ratio step_s", **headings
    )


def pool_runs(rows: DataFrame) -> Series:
    """Combine the rows of repeated trainings, which differ only in the seed.

    Recall is the share of right answers over the keys of all runs, with Wilson's interval.
    Perplexity is the geometric mean over runs. Both are NaN if a run lacks the probe.
    """
    perplexities = ", ".join(map(format_digits, rows["perplexity.value"]))
    pooled_fields = {"folder": rows["folder"].iloc[0], "runs": len(rows), "each": perplexities}
    pooled_fields["density"] = rows["density"].mean()
    for probe in ("recall", "recall_border"):
        answer_counts = rows[[f"{probe}.correct", f"{probe}.n"]]
        num_right, num_keys = map(int, answer_counts.sum())
        recall_share = low = high = math.nan
        if answer_counts.notna().all(axis=None):
            recall_share, (low, high) = num_right / num_keys, wilson_interval(num_right, num_keys)
        pooled_fields |= {probe: recall_share, f"{probe}_low": low, f"{probe}_high": high}
    for probe in ("perplexity", "perplexity_border"):
        run_perplexities = rows[f"{probe}.value"]
        pooled_fields[probe] = (
            geometric_mean(run_perplexities) if run_perplexities.notna().all() else math.nan
        )
    return Series(pooled_fields)


def read_step_seconds(folder: Path) -> float | None:
    """Return the median seconds of the training steps in `TRAINING_LOG`; None without this log.

    The first `WARM_UP_STEPS` steps are left out.
    """
    if not file_exists(folder / TRAINING_LOG):
        return None
    _, records = read_log(folder / TRAINING_LOG)
    steps = [record for record in records if record["kind"] == STEP_RECORD_KIND]
    return median(step["seconds"] for step in steps if step["step"] > WARM_UP_STEPS)


@register_table(
    [
        "speed-context-parallel",
        "speed-context-parallel-1m",
        "speed-context-parallel-4",
        "speed-context-parallel-4-1m",
        "speed-context-parallel-4-70b",
        "speed-context-parallel-4-1m-70b",
    ]
)
def parallel(rows: DataFrame) -> DataFrame:
    rows = rows[rows["measured"].astype(bool) & rows["direction"].notna()]
    rows_of_most_ranks = rows[rows["world"] == rows.groupby("folder")["world"].transform("max")]
    key_columns = ["folder", "shape", "length", "world", "direction"]
    rows = merge_methods(rows_of_most_ranks, "grouped+cab", "scheme", key_columns)
    rows["gain"] = rows["grouped.ms"] / rows["ms"]
    column_names = "ring.efficiency grouped.efficiency efficiency"
    headings = dict(zip(column_names.split(), ("ring", "grouped", "grouped+cab"), strict=True))
    headings["gain"] = "dense time / CAB time"
    return make_table(rows, f"shape length world direction {column_names} density gain", **headings)


@register_table(["speed-lora-cp", "speed-lora-cp-4", "speed-ttft-1m", "speed-ttft-1m-4"])
def sharded(rows: DataFrame) -> DataFrame:
    label_by_experiment = {"speed lora": "training step", "speed ttft": "first token"}
    rows = rows.assign(measured=rows["run"].map(lambda run: label_by_experiment[run["experiment"]]))
    rows = add_seconds(rows[rows["implementation"] == "cab"])
    column_names = "measured length world baseline_s seconds over_best density peak_gib"
    return make_table(rows, column_names, seconds="CAB, s", peak_gib="GiB per GPU")


MODELS_BY_TYPE = {
    "llama": "Llama 2, 3, 3.1 to 3.3; SmolLM2",
    "llama4_text": "Llama 4",
    "qwen2": "Qwen 2, 2.5",
    "qwen2_moe": "Qwen 2 MoE",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen 3.5",
    "qwen3_5_moe_text": "Qwen 3.5 MoE",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4",
    "mistral": "Mistral",
    "ministral3": "Ministral 3",
    "mixtral": "Mixtral",
    "phi": "Phi 1, 2",
    "phi3": "Phi 3, 4",
    "phimoe": "Phi 3.5 MoE",
    "phi4_multimodal": "Phi 4 multimodal",
    "gpt_oss": "gpt-oss",
    "glm": "GLM 4 (of 2024)",
    "glm4": "GLM 4 (of 2025)",
    "glm4_moe": "GLM 4.5 to 4.7",
    "glm_moe_dsa": "GLM 5",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3, R1",
    "deepseek_v32": "DeepSeek V3.2",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4",
    "smollm3": "SmolLM3",
}


def describe_layers(row: Row) -> dict[str, str | None]:
    """Return which layers of a model type attend sparsely.

    Args:
        row: the row of the model type in the results of `families`.

    Returns:
        ``sparse``: the layers with sparse attention; None if the type is not supported.
        ``exact``: the layers with exact attention; None if there are none.
        ``error``: the reason why the type is not supported; None if it is supported.
    """
    sparse_layers = exact_layers = reason = None
    if row["verdict"] != "exact":
        reason = REASON_END_PATTERN.split(row["said"])[0]
    elif row["sparse"] < row["layers"]:
        sparse_layers, exact_layers = "layers without a window", "sliding windows"
    else:
        # the test also added sliding windows to types that have none by default
        sparse_layers = "all layers"
        exact_layers = "sliding windows, if any" if row.get("windowed") == "exact" else None
    return {"sparse": sparse_layers, "exact": exact_layers, "error": reason}


@register_table(["families"])
def supported(rows: DataFrame) -> DataFrame:
    rows = sort_by_label(rows, "model_type", MODELS_BY_TYPE)
    layer_descriptions = DataFrame([describe_layers(row) for _, row in rows.iterrows()], rows.index)
    return make_table(rows, "label model_type", label="models").join(layer_descriptions)


@register_table(["families"])
def supported_by_layers(rows: DataFrame) -> DataFrame:
    type_rows = supported(rows)
    type_rows["sparse"] = type_rows["sparse"].fillna("raises an error")
    groups = type_rows.groupby(["sparse", "exact"], sort=False, dropna=False)
    models_by_layers = groups["models"].agg("; ".join).reset_index()
    return models_by_layers.rename(columns={"sparse": "sparse layers", "exact": "exact layers"})


@register_sentence("families")
def families(rows: DataFrame) -> str:
    verdict_counts = rows["verdict"].value_counts()
    return (
        f"We tested {len(rows)} causal model types of transformers with every block kept. "
        f"Of these, {verdict_counts['exact']} match dense attention,\n"
        f"{verdict_counts['refused']} raise an error that names the reason, and "
        f"{verdict_counts['not built']} could not be built\n"
        "([list](eval/results/families/report.md))."
    )
