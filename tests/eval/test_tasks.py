"""Tasks for lm-evaluation-harness: files, documents, and runs if lm_eval is installed."""

import importlib.util
import inspect
import json
import sys
from dataclasses import fields

import pytest
import yaml
from marks import mark_slow_except
from tiny import SMALL_BLOCKS_CONFIG, draw_token_ids, make_tiny_model
from transformers import AutoTokenizer, LlamaForCausalLM
from words import CHAT_TEMPLATE, PROSE_TEXT, make_merging_tokenizer, make_tokenizer

from cab_hf import CabConfig, apply_cab, remove_cab
from cab_hf.data.documents import make_recall_document
from cab_hf.data.needles import NOISE_SENTENCES, split_sentences
from cab_hf.data.tasks import TASKS
from cab_hf.eval import harness, passkey
from cab_hf.eval.__main__ import main
from cab_hf.eval.harness import refuse_misspelt_arguments
from cab_hf.eval.haystack import Haystack
from cab_hf.experiment.models import smollm2_folder
from cab_hf.experiment.settings import UsageError

DOCUMENT_LENGTHS = [300, 450]
# lengths in tokens that are large enough for the twelve keys of cab_recall
HARNESS_LENGTHS = (650, 700)
KEY_TASKS = ["cab_passkey", "cab_passkey_multi", "cab_recall"]
TASK_NAMES = [*KEY_TASKS, *(f"cab_{name}" for name in TASKS)]
SPARSE_ASSIGNMENTS = (
    *("query_block=32", "key_block=16", "min_length=0"),
    *("mass_threshold=0.08", "engine=reference"),
)
# function of the task module -> arguments
OPTIONS_BY_DOCUMENT_MAKER = {
    "make_passkey_documents": {"keys": 2},
    "make_recall_questions": {"keys": 3, "documents": 2},
    "make_task_documents": {"task_name": "two_facts"},
}


@pytest.fixture(scope="module")
def task_utils():
    """Return the module of task functions, loaded by path as in lm_eval."""
    spec = importlib.util.spec_from_file_location("utils", harness.TASKS / "utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_path(model_folder):
    """Return the path of the tiny model as a string, as lm_eval needs it."""
    return str(model_folder)


def read_task(file_name, task_utils):
    """Return the content of a task's YAML file, with functions imported and includes merged."""

    class TaskLoader(yaml.SafeLoader):
        pass

    def load_function(loader, node):
        module, _, name = loader.construct_scalar(node).partition(".")
        assert module == "utils"
        return getattr(task_utils, name)

    TaskLoader.add_constructor("!function", load_function)
    task = yaml.load((harness.TASKS / file_name).read_text(), TaskLoader)
    return {**read_task(task.pop("include"), task_utils), **task} if "include" in task else task


@pytest.mark.parametrize("task_name", TASK_NAMES)
def test_task_files_resolve_functions(task_name, task_utils):
    task = read_task(f"{task_name}.yaml", task_utils)
    assert task["task"] == task_name
    assert {file.stem for file in harness.TASKS.glob("*.yaml")} == set(TASK_NAMES)
    assert callable(task["custom_dataset"]) and callable(task["process_results"])
    # lm_eval reports a standard error for means only
    assert {metric["aggregation"] for metric in task["metric_list"]} == {"mean"}
    assert "4096" in {metric["metric"] for metric in task["metric_list"]}


@pytest.mark.parametrize("task_name", TASKS)
def test_task_file_makes_documents_of_task(task_name, task_utils, model_path):
    task = read_task(f"cab_{task_name}.yaml", task_utils)
    assert task["dataset_kwargs"] == {"task_name": task_name}
    options = {"max_seq_lengths": [800], "samples": 2, "seed": 3}
    documents = task_utils.make_task_documents(
        **options, pretrained=model_path, **task["dataset_kwargs"]
    )
    tokenizer = make_tokenizer()
    for index, document in enumerate(documents):
        example = TASKS[task_name].make(tokenizer, NOISE_SENTENCES, 800, index=index, seed=3)
        assert tokenizer.decode(example.tokens[: example.prompt]) == document["text"]
        assert document["replies"] == list(example.replies)
        num_tokens = len(tokenizer(document["text"])["input_ids"])
        assert num_tokens + task["generation_kwargs"]["max_gen_toks"] > 800 >= num_tokens


@pytest.mark.parametrize("chat_template", [None, CHAT_TEMPLATE], ids=["plain", "chat"])
def test_bos_token_is_added_once(chat_template, task_utils, tmp_path):
    tokenizer = make_merging_tokenizer()
    tokenizer.chat_template = chat_template and "<s>" + chat_template
    tokenizer.save_pretrained(tmp_path)
    options = {"task_name": "two_facts", "max_seq_lengths": [900], "samples": 1}
    (document,) = task_utils.make_task_documents(**options, pretrained=str(tmp_path))
    example = TASKS["two_facts"].make(tokenizer, NOISE_SENTENCES, 900, 0)
    # lm_eval adds special tokens to texts that do not start with them
    ids = tokenizer(document["text"], add_special_tokens=chat_template is None)["input_ids"]
    assert tuple(ids[:9]) == example.tokens[:9]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_passkey_documents_equal_command_prompts(task_utils, model_path):
    options = {"max_seq_lengths": DOCUMENT_LENGTHS, "samples": 7, "keys": 4, "seed": 3}
    documents = task_utils.make_passkey_documents(
        **options, pretrained=model_path, dtype="float32", mass_threshold=0.08
    )
    haystack = Haystack(make_tokenizer(), num_keys=4)
    depths_and_indices = [(depth, 0) for depth in passkey.parse_depths("5")]
    depths_and_indices += [(0.0, 1), (0.25, 1)]
    expected = [
        haystack.make_prompt(length, depth, index, seed=3)
        for depth, index in depths_and_indices
        for length in DOCUMENT_LENGTHS
    ]
    assert [(document["text"], document["key"]) for document in documents] == [
        (prompt.text, prompt.key) for prompt in expected
    ]
    generation_options = read_task("cab_passkey.yaml", task_utils)["generation_kwargs"]
    assert generation_options["max_gen_toks"] == passkey.MAX_ANSWER_TOKENS
    assert generation_options["do_sample"] is False


@pytest.mark.parametrize("text", [None, PROSE_TEXT], ids=["noise", "text"])
@pytest.mark.parametrize(
    ("tokenizer_name", "num_keys"), mark_slow_except([("merging", 4), ("smollm2", 12)], 0)
)
def test_recall_documents_have_tokens_of_teacher_forcing(
    tokenizer_name, num_keys, text, task_utils, tmp_path
):
    """The tokens of a prompt and its key are the first tokens of the teacher-forced document."""
    if tokenizer_name == "merging":
        make_merging_tokenizer().save_pretrained(tokenizer_folder := tmp_path / "tokenizer")
    else:
        tokenizer_folder = smollm2_folder()
    sentences = NOISE_SENTENCES if text is None else split_sentences(text)
    text_file = None if text is None else tmp_path / "book.txt"
    if text_file:
        text_file.write_text(text)
    options = {"keys": num_keys, "documents": 1, "max_seq_lengths": [900], "haystack": text_file}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    teacher_forced_document = make_recall_document(tokenizer, sentences, 900, num_keys, index=0)
    documents = task_utils.make_recall_questions(**options, pretrained=tokenizer_folder)
    for document, (start, end) in zip(documents, teacher_forced_document.answers, strict=True):
        assert document["key"] == tokenizer.decode(teacher_forced_document.tokens[start:end])
        assert len(document["key"].strip()) == 5 and (
            tokenizer_name == "merging" or end - start == 5
        )
        ids = tokenizer(document["text"] + document["key"])["input_ids"]
        assert tuple(ids) == teacher_forced_document.tokens[:end]


@pytest.mark.parametrize(
    ("document_maker_name", "options"),
    OPTIONS_BY_DOCUMENT_MAKER.items(),
    ids=OPTIONS_BY_DOCUMENT_MAKER,
)
def test_documents_are_deterministic_and_alternate_lengths(
    document_maker_name, options, task_utils, model_path, tmp_path
):
    make_documents, options = (
        getattr(task_utils, document_maker_name),
        {"max_seq_lengths": DOCUMENT_LENGTHS, **options},
    )
    documents = make_documents(**options, pretrained=model_path)
    assert make_documents(**options, tokenizer=model_path) == documents
    assert make_documents(**options, pretrained=model_path, seed=1) != documents
    (text_file := tmp_path / "book.txt").write_text(PROSE_TEXT)
    for document in make_documents(**options, pretrained=model_path, haystack=str(text_file)):
        assert "It rained all day" in document["text"]
        assert "grass" not in document["text"]
    assert [document["length"] for document in documents] == DOCUMENT_LENGTHS * (
        len(documents) // 2
    )
    # the prompt of a key ends where the document repeats the key, in its second half
    min_share = 0.98 if document_maker_name == "make_passkey_documents" else 0.5
    for document in documents:
        num_tokens = len(make_tokenizer()(document["text"])["input_ids"])
        assert min_share * document["length"] < num_tokens <= document["length"]


def test_default_number_of_documents(task_utils, model_path):
    document_maker_cases = (
        (task_utils.make_passkey_documents, 1, 20),
        (task_utils.make_recall_questions, 12, 48),
    )
    for make_documents, num_keys, num_documents in document_maker_cases:
        documents = make_documents(keys=num_keys, pretrained=model_path)
        assert [document["length"] for document in documents] == [4096] * num_documents
    # a document gives one prompt per key, and all keys differ
    assert [document["index"] for document in documents] == [index // 12 for index in range(48)]
    assert len({document["key"] for document in documents}) == 48
    with pytest.raises(ValueError, match="tokenizer must be a name or path"):
        task_utils.make_passkey_documents(samples=1, dtype="float32")


@pytest.mark.parametrize(
    ("scorer_name", "reply", "score"),
    [
        *(
            ("score_passkey_reply", "48213.", 1.0),
            ("score_passkey_reply", "11111 or 48213", 0.0),
            ("score_passkey_reply", "", 0.0),
        ),
        *(("score_recall_reply", (-0.5, True), 1.0), ("score_recall_reply", (-0.5, False), 0.0)),
        # the score ignores order, spaces and case
        *(
            ("score_task_reply", "ABCDE, 48213.", 1.0),
            ("score_task_reply", "4 8 2 1 3 and abcde", 1.0),
        ),
        *(("score_task_reply", "ABCDE, ABCDE.", 0.5), ("score_task_reply", "", 0.0)),
    ],
)
def test_reply_is_scored_under_its_length(scorer_name, reply, score, task_utils):
    document = {"length": 8192, "key": "48213", "replies": ["ABCDE", "48213"]}
    assert getattr(task_utils, scorer_name)(document, [reply]) == {"8192": score}


# arguments without names of our models
OTHER_MODEL_ARGUMENTS = "--model_args pretrained=gpt2", "-a pretrained=someone/smollm2-large"
# arguments of the command -> arguments of lm_eval, where HERE is the folder of smollm2
LM_EVAL_ARGUMENTS = {
    **{arguments: arguments for arguments in (*OTHER_MODEL_ARGUMENTS, '--metadata {"seed":1}')},
    "-a dtype=float32,pretrained=smollm2,mass_threshold=0.08": (
        "-a dtype=float32,pretrained=HERE,mass_threshold=0.08"
    ),
    '--metadata {"tokenizer":"smollm2"}': '--metadata {"tokenizer":"HERE"}',
    "-a pretrained=smollm2-32k,tokenizer=smollm2": "-a pretrained=HERE-32k,tokenizer=HERE",
    "-- --tasks x": "--tasks x",
}


@pytest.mark.parametrize("command_arguments", LM_EVAL_ARGUMENTS)
def test_arguments_are_passed_to_lm_eval(command_arguments, monkeypatch):
    monkeypatch.setattr(harness, "make_model_folder", lambda name: name.replace("smollm2", "HERE"))
    added_arguments = ["--include_path", str(harness.TASKS)]
    assert harness.make_lm_eval_arguments(command_arguments.split()) == [
        *LM_EVAL_ARGUMENTS[command_arguments].split(),
        *added_arguments,
    ]
    # --include_path of the user replaces ours
    for arguments in (["--include_path", "mine"], ["--include_path=mine"]):
        assert harness.make_lm_eval_arguments(arguments) == arguments


def test_misspelt_model_argument_raises():
    known_arguments = {"engine", "min_length", "max_length", "batch_size"}
    refuse_misspelt_arguments(
        ["engine", "batch_size", "attn_implementation", "rope_theta", "dtype"], known_arguments
    )
    for misspelt_name, suggested_name in (("engines", "engine"), ("min_lenght", "min_length")):
        with pytest.raises(
            ValueError,
            match=f"model_args must .*, got '{misspelt_name}'; did you mean '{suggested_name}'",
        ):
            refuse_misspelt_arguments(["dtype", misspelt_name], known_arguments)


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
def test_batched_requests_equal_single_requests(request_type, model_path):
    """lm_eval pads shorter requests of a batch, on the right for likelihood requests."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from cab_hf.eval.lm import CabLM

    texts = [
        f"{PROSE_TEXT[text_start:]} " * num_repetitions
        for text_start, num_repetitions in ((0, 25), (22, 9), (41, 20))
    ]
    arguments_by_type = {"loglikelihood": (" the end",), "loglikelihood_rolling": ()}
    arguments_by_type["generate_until"] = ({"max_gen_toks": 4, "until": []},)
    requests = [
        Instance(request_type, {}, (text, *arguments_by_type[request_type]), 0) for text in texts
    ]
    config = {"query_block": 32, "key_block": 16, "min_length": 0, "mass_threshold": 0.08}

    def compute_answers(batch_size):
        model = CabLM(model_path, device="cpu", dtype="float32", batch_size=batch_size, **config)
        return getattr(model, request_type)(requests, disable_tqdm=True)

    single_answers, batched_answers = compute_answers(1), compute_answers(3)
    if request_type == "loglikelihood":
        single_answers, batched_answers = (
            [score for score, _ in scored_answers]
            for scored_answers in (single_answers, batched_answers)
        )
    expected = (
        single_answers
        if request_type == "generate_until"
        else pytest.approx(single_answers, abs=1e-3)
    )
    assert batched_answers == expected


def test_harness_reports_density_and_refuses_dense_runs(capsys):
    model = make_tiny_model()
    apply_cab(model, SMALL_BLOCKS_CONFIG, min_length=100, mass_threshold=0.08)
    model(draw_token_ids(1, 90))
    with pytest.raises(UsageError, match="min_length must .*, got 100: no layer attended sparsely"):
        harness.report_attention(model)
    remove_cab(model)
    assert harness.report_attention(model) == {}
    thresholds = {"mass_threshold": 0.08, "share_threshold": 0.5}
    config = CabConfig.from_dict(
        apply_cab(model, SMALL_BLOCKS_CONFIG, **thresholds).config.cab_config
    )
    model(draw_token_ids(1, 300))
    attention_report = harness.report_attention(model)
    assert (
        attention_report["cab_config"] == config.to_dict()
        and 0 < attention_report["cab_density"] < 1
    )
    printed_text = capsys.readouterr().out
    assert printed_text.startswith("cab: 3 of 3 layers attended sparsely, density 0.")
    assert json.loads(printed_text.partition("config ")[2]) == json.loads(
        json.dumps(config.to_dict())
    )


def run_harness(
    run_folder, model_path, model_class, model_arguments, task_names=KEY_TASKS, options=()
):
    """Run the harness, and return results, and {task: samples}, as lm_eval writes them.

    Args:
        run_folder: folder for the results.
        model_path: folder of the model.
        model_class: "cab" or "hf", the model class of lm_eval.
        model_arguments: further --model_args.
        task_names: tasks.
        options: further options of the command.
    """
    metadata = {"max_seq_lengths": HARNESS_LENGTHS, "samples": 3, "documents": 1}
    harness_arguments = [
        "--tasks",
        ",".join(task_names),
        "--model",
        model_class,
        "--device",
        "cpu",
        "--log_samples",
    ]
    harness_arguments += options
    harness_arguments += [
        "--model_args",
        f"pretrained={model_path},dtype=float32,{model_arguments}",
    ]
    harness_arguments += ["--metadata", json.dumps(metadata), "--output_path", str(run_folder)]
    with pytest.MonkeyPatch.context() as patch_context:
        patch_context.setattr(sys, "argv", [])
        assert main(["harness", "--", *harness_arguments]) == 0
    (results_file,) = run_folder.rglob("results_*.json")
    samples = {}
    for task_name in task_names:
        # the file name ends with the date
        (samples_file,) = run_folder.rglob(f"samples_{task_name}_2*.jsonl")
        samples[task_name] = [json.loads(line) for line in samples_file.read_text().splitlines()]
    content = json.loads(results_file.read_text())
    cab_fields = {"cab_config", "cab_density"} & content["config"].keys()
    assert len(cab_fields) == (2 if model_class == "cab" else 0)
    return content["results"], samples


@pytest.mark.parametrize(
    ("model_class", "model_arguments", "is_damaged", "message"),
    [
        ("cab", "min_length=5000", False, "no layer attended sparsely"),
        ("cab", "batch_size=1", True, "The model's outputs are not finite"),
        ("hf", "batch_size=1", True, "The model's outputs are not finite"),
    ],
    ids=["dense attention", "cab is not finite", "hf is not finite"],
)
def test_harness_run_without_valid_scores_is_refused(
    model_class, model_arguments, is_damaged, message, model_path, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("lm_eval")
    if is_damaged:
        nan_model = LlamaForCausalLM.from_pretrained(model_path)
        nan_model.lm_head.weight.data[:] = float("nan")
        for saved_object in (nan_model, make_tokenizer()):
            saved_object.save_pretrained(model_path := tmp_path / "damaged")
    harness_arguments = ["--tasks", "cab_passkey", "--model", model_class, "--device", "cpu"]
    harness_arguments += [
        "--model_args",
        f"pretrained={model_path},dtype=float32,{model_arguments}",
    ]
    harness_arguments += ["--metadata", json.dumps({"max_seq_lengths": [300], "samples": 1})]
    monkeypatch.setattr(sys, "argv", [])
    assert main(["harness", "--", *harness_arguments, "--output_path", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("results_*.json"))


@pytest.fixture(scope="module")
def lm_eval_runs(model_path, tmp_path_factory):
    """Return results of lm_eval: "cab" by our model class, "dense" by lm_eval's class hf."""
    pytest.importorskip("lm_eval")
    run_folder = tmp_path_factory.mktemp("runs")
    return {
        "cab": run_harness(run_folder / "cab", model_path, "cab", ",".join(SPARSE_ASSIGNMENTS)),
        "dense": run_harness(run_folder / "dense", model_path, "hf", "attn_implementation=sdpa"),
    }


def test_lm_eval_reports_accuracy_and_stderr_per_length(lm_eval_runs):
    for results, samples in lm_eval_runs.values():
        assert [len(samples[task_name]) for task_name in KEY_TASKS] == [6, 6, 24]
        for task_name in KEY_TASKS:
            metric_names = {key.split(",")[0] for key in results[task_name] if "_stderr" not in key}
            assert {metric for metric in metric_names if metric.isdigit()} == {"650", "700"}
            for length in HARNESS_LENGTHS:
                assert 0 <= results[task_name][f"{length},none"] <= 1
                assert isinstance(results[task_name][f"{length}_stderr,none"], float)


def test_lm_eval_answers_equal_passkey_command_answers(lm_eval_runs, model_path):
    options = {"model": model_path, "lengths": HARNESS_LENGTHS, "device": "cpu", "dtype": "float32"}
    passkey_experiment = passkey.Passkey(passkey.Settings(**options, cab=SPARSE_ASSIGNMENTS))
    for method, (_, samples) in lm_eval_runs.items():
        for sample in samples["cab_passkey"]:
            question = {name: sample["doc"][name] for name in ("length", "depth", "index")}
            case = {"method": method, "keys": 1, "budget": None, **question}
            assert passkey_experiment.measure(case)["answer"] == sample["resps"][0][0]


def test_lm_eval_runs_every_task(model_path, tmp_path):
    pytest.importorskip("lm_eval")
    task_names = [f"cab_{name}" for name in TASKS]
    results, samples = run_harness(
        tmp_path,
        model_path,
        "cab",
        ",".join(SPARSE_ASSIGNMENTS),
        task_names=task_names,
        options=["--limit", "1"],
    )
    for name in task_names:
        (sample,) = samples[name]
        assert sample["doc"]["length"] == HARNESS_LENGTHS[0]
        assert sample[str(HARNESS_LENGTHS[0])] == results[name][f"{HARNESS_LENGTHS[0]},none"]


def test_teacher_forced_keys_use_sparse_attention(lm_eval_runs):
    cab_scores, dense_scores = (
        [sample["resps"][0][0][0] for sample in samples["cab_recall"]]
        for _, samples in (lm_eval_runs["cab"], lm_eval_runs["dense"])
    )
    assert cab_scores != dense_scores
