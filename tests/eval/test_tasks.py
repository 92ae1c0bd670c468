"""Tasks for lm-evaluation-harness: files, documents, and runs if lm_eval is installed."""

import importlib.util
import inspect
import json
import sys
from dataclasses import fields

import pytest
import yaml
from marks import mark_slow_except
from tiny import SMALL, tiny_model, tokens
from transformers import AutoTokenizer, LlamaForCausalLM
from words import CHAT_TEMPLATE, TEXT, make_merging_tokenizer, make_tokenizer

from cab_hf import CabConfig, apply_cab, remove_cab
from cab_hf.data.documents import make_recall_document
from cab_hf.data.needles import NOISE_SENTENCES, split_sentences
from cab_hf.data.tasks import TASKS
from cab_hf.eval import harness, passkey
from cab_hf.eval.__main__ import main
from cab_hf.eval.harness import refuse_misspelt
from cab_hf.eval.haystack import Haystack
from cab_hf.experiment.models import smollm2_folder
from cab_hf.experiment.settings import UsageError

LENGTHS = [300, 450]
# lengths in tokens that are large enough for the twelve keys of cab_recall
LONGER = (650, 700)
WITH_KEYS = ["cab_passkey", "cab_passkey_multi", "cab_recall"]
NAMES = [*WITH_KEYS, *(f"cab_{name}" for name in TASKS)]
SPARSE = (
    *("query_block=32", "key_block=16", "min_length=0"),
    *("mass_threshold=0.08", "engine=reference"),
)
# function of the task module -> arguments
MAKERS = {
    "passkey_documents": {"keys": 2},
    "recall_documents": {"keys": 3, "documents": 2},
    "task_documents": {"task_name": "two_facts"},
}


@pytest.fixture(scope="module")
def utils():
    """Return the module of task functions, loaded by path as in lm_eval."""
    spec = importlib.util.spec_from_file_location("utils", harness.TASKS / "utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(model_folder):
    """Return the path of the tiny model as a string, as lm_eval needs it."""
    return str(model_folder)


def read_task(name, utils):
    """Return the content of a task's YAML file, with functions imported and includes merged."""

    class Loader(yaml.SafeLoader):
        pass

    def function(loader, node):
        module, _, name = loader.construct_scalar(node).partition(".")
        assert module == "utils"
        return getattr(utils, name)

    Loader.add_constructor("!function", function)
    task = yaml.load((harness.TASKS / name).read_text(), Loader)
    return {**read_task(task.pop("include"), utils), **task} if "include" in task else task


@pytest.mark.parametrize("name", NAMES)
def test_task_files_resolve_functions(name, utils):
    task = read_task(f"{name}.yaml", utils)
    assert task["task"] == name
    assert {file.stem for file in harness.TASKS.glob("*.yaml")} == set(NAMES)
    assert callable(task["custom_dataset"]) and callable(task["process_results"])
    # lm_eval reports a standard error for means only
    assert {metric["aggregation"] for metric in task["metric_list"]} == {"mean"}
    assert "4096" in {metric["metric"] for metric in task["metric_list"]}


@pytest.mark.parametrize("name", TASKS)
def test_task_file_makes_documents_of_task(name, utils, folder):
    task = read_task(f"cab_{name}.yaml", utils)
    assert task["dataset_kwargs"] == {"task_name": name}
    options = {"max_seq_lengths": [800], "samples": 2, "seed": 3}
    documents = utils.task_documents(**options, pretrained=folder, **task["dataset_kwargs"])
    tokenizer = make_tokenizer()
    for index, document in enumerate(documents):
        example = TASKS[name].make(tokenizer, NOISE_SENTENCES, 800, index=index, seed=3)
        assert tokenizer.decode(example.tokens[: example.prompt]) == document["text"]
        assert document["replies"] == list(example.replies)
        num_tokens = len(tokenizer(document["text"])["input_ids"])
        assert num_tokens + task["generation_kwargs"]["max_gen_toks"] > 800 >= num_tokens


@pytest.mark.parametrize("chat", [None, CHAT_TEMPLATE], ids=["plain", "chat"])
def test_bos_token_is_added_once(chat, utils, tmp_path):
    tokenizer = make_merging_tokenizer()
    tokenizer.chat_template = chat and "<s>" + chat
    tokenizer.save_pretrained(tmp_path)
    options = {"task_name": "two_facts", "max_seq_lengths": [900], "samples": 1}
    (document,) = utils.task_documents(**options, pretrained=str(tmp_path))
    example = TASKS["two_facts"].make(tokenizer, NOISE_SENTENCES, 900, 0)
    # lm_eval adds special tokens to texts that do not start with them
    ids = tokenizer(document["text"], add_special_tokens=chat is None)["input_ids"]
    assert tuple(ids[:9]) == example.tokens[:9]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_passkey_documents_equal_command_prompts(utils, folder):
    options = {"max_seq_lengths": LENGTHS, "samples": 7, "keys": 4, "seed": 3}
    result = utils.passkey_documents(
        **options, pretrained=folder, dtype="float32", mass_threshold=0.08
    )
    haystack = Haystack(make_tokenizer(), keys=4)
    depths_and_indices = [(depth, 0) for depth in passkey.parse_depths("5")]
    depths_and_indices += [(0.0, 1), (0.25, 1)]
    expected = [
        haystack.prompt(length, depth, index, seed=3)
        for depth, index in depths_and_indices
        for length in LENGTHS
    ]
    assert [(d["text"], d["key"]) for d in result] == [(p.text, p.key) for p in expected]
    generation = read_task("cab_passkey.yaml", utils)["generation_kwargs"]
    assert generation["max_gen_toks"] == passkey.ANSWER_TOKENS
    assert generation["do_sample"] is False


@pytest.mark.parametrize("text", [None, TEXT], ids=["noise", "text"])
@pytest.mark.parametrize(("model", "keys"), mark_slow_except([("merging", 4), ("smollm2", 12)], 0))
def test_recall_documents_have_tokens_of_teacher_forcing(model, keys, text, utils, tmp_path):
    """The tokens of a prompt and its key are the first tokens of the teacher-forced document."""
    if model == "merging":
        make_merging_tokenizer().save_pretrained(folder := tmp_path / "tokenizer")
    else:
        folder = smollm2_folder()
    sentences = NOISE_SENTENCES if text is None else split_sentences(text)
    file = None if text is None else tmp_path / "book.txt"
    if file:
        file.write_text(text)
    options = {"keys": keys, "documents": 1, "max_seq_lengths": [900], "haystack": file}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    teacher_forced_document = make_recall_document(tokenizer, sentences, 900, keys, index=0)
    documents = utils.recall_documents(**options, pretrained=folder)
    for document, (start, end) in zip(documents, teacher_forced_document.answers, strict=True):
        assert document["key"] == tokenizer.decode(teacher_forced_document.tokens[start:end])
        assert len(document["key"].strip()) == 5 and (model == "merging" or end - start == 5)
        ids = tokenizer(document["text"] + document["key"])["input_ids"]
        assert tuple(ids) == teacher_forced_document.tokens[:end]


@pytest.mark.parametrize(("maker", "options"), MAKERS.items(), ids=MAKERS)
def test_documents_are_deterministic_and_alternate_lengths(maker, options, utils, folder, tmp_path):
    make, options = getattr(utils, maker), {"max_seq_lengths": LENGTHS, **options}
    actual = make(**options, pretrained=folder)
    assert make(**options, tokenizer=folder) == actual
    assert make(**options, pretrained=folder, seed=1) != actual
    (file := tmp_path / "book.txt").write_text(TEXT)
    for document in make(**options, pretrained=folder, haystack=str(file)):
        assert "It rained all day" in document["text"]
        assert "grass" not in document["text"]
    assert [document["length"] for document in actual] == LENGTHS * (len(actual) // 2)
    # the prompt of a key ends where the document repeats the key, in its second half
    least_share = 0.98 if maker == "passkey_documents" else 0.5
    for document in actual:
        num_tokens = len(make_tokenizer()(document["text"])["input_ids"])
        assert least_share * document["length"] < num_tokens <= document["length"]


def test_default_number_of_documents(utils, folder):
    makers = (utils.passkey_documents, 1, 20), (utils.recall_documents, 12, 48)
    for make, keys, count in makers:
        result = make(keys=keys, pretrained=folder)
        assert [document["length"] for document in result] == [4096] * count
    # a document gives one prompt per key, and all keys differ
    assert [document["index"] for document in result] == [index // 12 for index in range(48)]
    assert len({document["key"] for document in result}) == 48
    with pytest.raises(ValueError, match="tokenizer must be a name or path"):
        utils.passkey_documents(samples=1, dtype="float32")


@pytest.mark.parametrize(
    ("scorer", "reply", "score"),
    [
        *(("found", "48213.", 1.0), ("found", "11111 or 48213", 0.0), ("found", "", 0.0)),
        *(("recalled", (-0.5, True), 1.0), ("recalled", (-0.5, False), 0.0)),
        # the score ignores order, spaces and case
        *(("said", "ABCDE, 48213.", 1.0), ("said", "4 8 2 1 3 and abcde", 1.0)),
        *(("said", "ABCDE, ABCDE.", 0.5), ("said", "", 0.0)),
    ],
)
def test_reply_is_scored_under_its_length(scorer, reply, score, utils):
    document = {"length": 8192, "key": "48213", "replies": ["ABCDE", "48213"]}
    assert getattr(utils, scorer)(document, [reply]) == {"8192": score}


# arguments without names of our models
OTHERS = "--model_args pretrained=gpt2", "-a pretrained=someone/smollm2-large"
# arguments of the command -> arguments of lm_eval, where HERE is the folder of smollm2
PASSED_ON = {
    **{words: words for words in (*OTHERS, '--metadata {"seed":1}')},
    "-a dtype=float32,pretrained=smollm2,mass_threshold=0.08": (
        "-a dtype=float32,pretrained=HERE,mass_threshold=0.08"
    ),
    '--metadata {"tokenizer":"smollm2"}': '--metadata {"tokenizer":"HERE"}',
    "-a pretrained=smollm2-32k,tokenizer=smollm2": "-a pretrained=HERE-32k,tokenizer=HERE",
    "-- --tasks x": "--tasks x",
}


@pytest.mark.parametrize("words", PASSED_ON)
def test_arguments_are_passed_to_lm_eval(words, monkeypatch):
    monkeypatch.setattr(harness, "make_folder", lambda name: name.replace("smollm2", "HERE"))
    own_arguments = ["--include_path", str(harness.TASKS)]
    assert harness.make_lm_eval_arguments(words.split()) == [
        *PASSED_ON[words].split(),
        *own_arguments,
    ]
    # --include_path of the user replaces ours
    for arguments in (["--include_path", "mine"], ["--include_path=mine"]):
        assert harness.make_lm_eval_arguments(arguments) == arguments


def test_misspelt_model_argument_raises():
    known_arguments = {"engine", "min_length", "max_length", "batch_size"}
    refuse_misspelt(
        ["engine", "batch_size", "attn_implementation", "rope_theta", "dtype"], known_arguments
    )
    for misspelt, expected in (("engines", "engine"), ("min_lenght", "min_length")):
        with pytest.raises(
            ValueError, match=f"model_args must .*, got '{misspelt}'; did you mean '{expected}'"
        ):
            refuse_misspelt(["dtype", misspelt], known_arguments)


def test_missing_lm_eval_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert harness.main(["--tasks", "cab_passkey"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "pip install 'cab_hf[harness]'" in error


def test_help_explains_cab_arguments(capsys):
    assert main(["harness", "--help"]) == 0
    assert "--model cab --model_args pretrained=smollm2,min_length=0" in capsys.readouterr().out


def test_config_fields_do_not_clash_with_hflm_arguments():
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    parameters = inspect.signature(huggingface.HFLM).parameters
    assert not {field.name for field in fields(CabConfig)} & set(parameters)


@pytest.mark.parametrize(
    "request_type", ["loglikelihood", "loglikelihood_rolling", "generate_until"]
)
def test_batched_requests_equal_single_requests(request_type, folder):
    """lm_eval pads shorter requests of a batch, on the right for likelihood requests."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from cab_hf.eval.lm import CabLM

    texts = [f"{TEXT[start:]} " * times for start, times in ((0, 25), (22, 9), (41, 20))]
    arguments = {"loglikelihood": (" the end",), "loglikelihood_rolling": ()}
    arguments["generate_until"] = ({"max_gen_toks": 4, "until": []},)
    requests = [Instance(request_type, {}, (text, *arguments[request_type]), 0) for text in texts]
    config = {"query_block": 32, "key_block": 16, "min_length": 0, "mass_threshold": 0.08}

    def answers(batch_size):
        model = CabLM(folder, device="cpu", dtype="float32", batch_size=batch_size, **config)
        return getattr(model, request_type)(requests, disable_tqdm=True)

    single_answers, batched_answers = answers(1), answers(3)
    if request_type == "loglikelihood":
        single_answers, batched_answers = (
            [score for score, _ in each] for each in (single_answers, batched_answers)
        )
    expected = (
        single_answers
        if request_type == "generate_until"
        else pytest.approx(single_answers, abs=1e-3)
    )
    assert batched_answers == expected


def test_harness_reports_density_and_refuses_dense_runs(capsys):
    model = tiny_model()
    apply_cab(model, SMALL, min_length=100, mass_threshold=0.08)
    model(tokens(1, 90))
    with pytest.raises(UsageError, match="min_length must .*, got 100: no layer attended sparsely"):
        harness.report_attention(model)
    remove_cab(model)
    assert harness.report_attention(model) == {}
    thresholds = {"mass_threshold": 0.08, "share_threshold": 0.5}
    config = CabConfig.from_dict(apply_cab(model, SMALL, **thresholds).config.cab_config)
    model(tokens(1, 300))
    result = harness.report_attention(model)
    assert result["cab_config"] == config.to_dict() and 0 < result["cab_density"] < 1
    line = capsys.readouterr().out
    assert line.startswith("cab: 3 of 3 layers attended sparsely, density 0.")
    assert json.loads(line.partition("config ")[2]) == json.loads(json.dumps(config.to_dict()))


def run(out, folder, model, arguments, names=WITH_KEYS, options=()):
    """Run the harness, and return results, and {task: samples}, as lm_eval writes them.

    Args:
        out: folder for the results.
        folder: folder of the model.
        model: "cab" or "hf", the model class of lm_eval.
        arguments: further --model_args.
        names: tasks.
        options: further options of the command.
    """
    metadata = {"max_seq_lengths": LONGER, "samples": 3, "documents": 1}
    words = ["--tasks", ",".join(names), "--model", model, "--device", "cpu", "--log_samples"]
    words += options
    words += ["--model_args", f"pretrained={folder},dtype=float32,{arguments}"]
    words += ["--metadata", json.dumps(metadata), "--output_path", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [])
        assert main(["harness", "--", *words]) == 0
    (results,) = out.rglob("results_*.json")
    samples = {}
    for name in names:
        # the file name ends with the date
        (file,) = out.rglob(f"samples_{name}_2*.jsonl")
        samples[name] = [json.loads(line) for line in file.read_text().splitlines()]
    content = json.loads(results.read_text())
    fields = {"cab_config", "cab_density"} & content["config"].keys()
    assert len(fields) == (2 if model == "cab" else 0)
    return content["results"], samples


@pytest.mark.parametrize(
    ("model", "arguments", "damaged", "message"),
    [
        ("cab", "min_length=5000", False, "no layer attended sparsely"),
        ("cab", "batch_size=1", True, "The model's outputs are not finite"),
        ("hf", "batch_size=1", True, "The model's outputs are not finite"),
    ],
    ids=["dense attention", "cab is not finite", "hf is not finite"],
)
def test_harness_run_without_valid_scores_is_refused(
    model, arguments, damaged, message, folder, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("lm_eval")
    if damaged:
        llama = LlamaForCausalLM.from_pretrained(folder)
        llama.lm_head.weight.data[:] = float("nan")
        for each in (llama, make_tokenizer()):
            each.save_pretrained(folder := tmp_path / "damaged")
    words = ["--tasks", "cab_passkey", "--model", model, "--device", "cpu"]
    words += ["--model_args", f"pretrained={folder},dtype=float32,{arguments}"]
    words += ["--metadata", json.dumps({"max_seq_lengths": [300], "samples": 1})]
    monkeypatch.setattr(sys, "argv", [])
    assert main(["harness", "--", *words, "--output_path", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("results_*.json"))


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Return results of lm_eval: "cab" by our model class, "dense" by lm_eval's class hf."""
    pytest.importorskip("lm_eval")
    out = tmp_path_factory.mktemp("runs")
    return {
        "cab": run(out / "cab", folder, "cab", ",".join(SPARSE)),
        "dense": run(out / "dense", folder, "hf", "attn_implementation=sdpa"),
    }


def test_lm_eval_reports_accuracy_and_stderr_per_length(runs):
    for results, samples in runs.values():
        assert [len(samples[name]) for name in WITH_KEYS] == [6, 6, 24]
        for name in WITH_KEYS:
            fields = {key.split(",")[0] for key in results[name] if "_stderr" not in key}
            assert {metric for metric in fields if metric.isdigit()} == {"650", "700"}
            for length in LONGER:
                assert 0 <= results[name][f"{length},none"] <= 1
                assert isinstance(results[name][f"{length}_stderr,none"], float)


def test_lm_eval_answers_equal_passkey_command_answers(runs, folder):
    options = {"model": folder, "lengths": LONGER, "device": "cpu", "dtype": "float32"}
    command = passkey.Passkey(passkey.Settings(**options, cab=SPARSE))
    for method, (_, samples) in runs.items():
        for sample in samples["cab_passkey"]:
            question = {name: sample["doc"][name] for name in ("length", "depth", "index")}
            case = {"method": method, "keys": 1, "budget": None, **question}
            assert command.measure(case)["answer"] == sample["resps"][0][0]


def test_lm_eval_runs_every_task(folder, tmp_path):
    pytest.importorskip("lm_eval")
    names = [f"cab_{name}" for name in TASKS]
    results, samples = run(
        tmp_path, folder, "cab", ",".join(SPARSE), names=names, options=["--limit", "1"]
    )
    for name in names:
        (sample,) = samples[name]
        assert sample["doc"]["length"] == LONGER[0]
        assert sample[str(LONGER[0])] == results[name][f"{LONGER[0]},none"]


def test_teacher_forced_keys_use_sparse_attention(runs):
    cab, dense = (
        [sample["resps"][0][0][0] for sample in samples["cab_recall"]]
        for _, samples in (runs["cab"], runs["dense"])
    )
    assert cab != dense
