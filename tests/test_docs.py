"""Documentation: snippets run on a tiny model, commands parse, and sentences are short."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from marks import is_transformers_before
from transformers import DynamicCache
from words import PROSE_TEXT

import cab_hf
from cab_hf.eval import __main__ as evaluations
from cab_hf.eval import speed
from cab_hf.experiment.settings import read_settings
from cab_hf.finetune import merge
from cab_hf.finetune import settings as finetune
from cab_hf.patches import calibration as passes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "finetune" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_SENTENCE_WORDS = 25  # largest number of words in a sentence
PROMPT_TOKENS = 900  # tokens per prompt
# small blocks, so that a prompt of 900 tokens has many blocks
SMALL_BLOCKS = cab_hf.CabConfig(query_block=16, key_block=16, min_length=0, share_threshold=1.0)
# options in the documentation that belong to other programs
EXTERNAL_OPTIONS = {
    *("--config_file", "--num_processes", "--nproc_per_node"),
    *("--pre", "--help", "--tasks", "--model_args", "--metadata", "--trust_remote_code"),
    *("--attn-implementation", "--continuous-batching", "--attention-backend"),
    *("--additional-config", "--scheduler-cls"),
    # options of vLLM; tests/vllm checks that vLLM has these options
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--nnodes", "--node-rank"),
    *("--master-addr", "--headless", "--api-server-count", "--data-parallel-size"),
    # docker and pip
    *("--gpus", "--no-deps"),
}


def find_code_blocks(page, language):
    """Return the contents of all code blocks of a page that are marked with ``language``."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


SNIPPETS_BY_PAGE = {
    page.stem: find_code_blocks(page, "python")
    for page in PAGES[1:]
    if find_code_blocks(page, "python")
}


@pytest.fixture
def snippet_globals(single_process_group, model_folder, monkeypatch):
    """Return the global names that snippets use, with their values.

    A tiny model replaces all models that snippets load.
    """
    model, tokenizer = cab_hf.load_model(model_folder, device="cpu", cab_config=SMALL_BLOCKS)
    monkeypatch.setattr(cab_hf, "load_model", lambda name: (model, tokenizer))
    monkeypatch.setattr(passes, "DEFAULT_LENGTH_TOKENS", PROMPT_TOKENS)
    monkeypatch.setattr(passes, "KEYS_PER_DOCUMENT", 2)
    ids = torch.randint(3, 60, (1, PROMPT_TOKENS))
    text_inputs = {"input_ids": ids}
    return {
        **{"cab_hf": cab_hf, "torch": torch, "model": model, "tokenizer": tokenizer},
        **{
            "inputs": text_inputs,
            "prompt": text_inputs,
            "document": text_inputs,
            "questions": [text_inputs],
        },
        **{"texts": [PROSE_TEXT * 40], "cache": DynamicCache(config=model.config)},
        **{"dataset": Dataset.from_dict({"input_ids": ids, "labels": ids})},
        **{"documents": Dataset.from_dict({"text": [PROSE_TEXT * 10] * 4})},
        **{"batch": {**text_inputs, "labels": ids}, "group": torch.distributed.group.WORLD},
    }


def shrink_code_block(code_block):
    """Return a code block with smaller numbers, so that it runs fast on a CPU."""
    replacements = {
        "max_new_tokens=64": "max_new_tokens=2",
        "max_batch_tokens=8192": "num_blocks=8",
    }
    replacements |= {"max_length=32768": "max_length=64, bf16=False"}
    for original_text, smaller_text in replacements.items():
        code_block = code_block.replace(original_text, smaller_text)
    return code_block


@pytest.mark.parametrize("page", SNIPPETS_BY_PAGE)
def test_python_blocks_of_page_run(page, snippet_globals, monkeypatch, tmp_path):
    if page in ("decode", "serving") and is_transformers_before("5.24"):
        pytest.skip("transformers is older: caches have another name, and batching is refused")
    monkeypatch.chdir(tmp_path)
    Path("quickcheck").mkdir()
    SMALL_BLOCKS.save("quickcheck/cab_config.json")
    for code_block in SNIPPETS_BY_PAGE[page]:
        if "from trl import" in code_block:
            pytest.importorskip("trl", reason="trl is not installed; `pip install '.[dev]'`")
        exec(shrink_code_block(code_block), snippet_globals)


def list_commands(command_group=evaluations, command_prefix=()):
    """Yield (words of a command, such as ("speed", "lora"), and its settings class)."""
    for command_name, module_name in command_group.COMMANDS.items():
        if command_name in ("harness", "speed"):
            continue
        module = import_module(module_name)
        has_experiment = hasattr(module, "EXPERIMENT")
        settings_class = module.EXPERIMENT.Settings if has_experiment else module.Settings
        yield (*command_prefix, command_name), settings_class


SETTINGS_CLASSES = {**dict(list_commands()), **dict(list_commands(speed, ("speed",)))}


def find_commands(page):
    """Yield each command of this package on a page, as a list of the words after the program."""
    page_text = page.read_text().replace("\\\n", " ")
    for command_match in re.findall(
        r"-m cab_hf\.eval +([a-z][^`\n]*)|(finetune/lora\.py +[^`\n]*)", page_text
    ):
        arguments = shlex.split("".join(command_match))
        # replace the placeholder FOLDER, and remove the placeholders "..." and COMMAND
        yield [
            argument.replace("FOLDER", ".")
            for argument in arguments
            if argument not in ("...", "COMMAND")
        ]


def parse_command(arguments, config_file):
    """Parse a command line, after replacing JSON files in its options with ``config_file``."""
    if arguments[0].endswith("lora.py"):
        arguments = [
            argument.replace("finetune/", f"{ROOT}/finetune/") for argument in arguments[1:]
        ]
        return read_settings(finetune.Settings, arguments, "lora")
    command_name = tuple(arguments[: 2 if arguments[0] == "speed" else 1])
    if command_name not in SETTINGS_CLASSES:
        assert command_name[0] == "harness" or len(arguments) == 1
        return None
    arguments = [
        argument.replace("FILE.json", str(config_file))
        for argument in arguments[len(command_name) :]
    ]
    arguments = [
        f"{argument.partition('=')[0]}={config_file}" if ".json" in argument else argument
        for argument in arguments
    ]
    needs_device = (
        "device" in SETTINGS_CLASSES[command_name].__dataclass_fields__
        and "--device" not in arguments
    )
    return read_settings(
        SETTINGS_CLASSES[command_name], [*arguments, *["--device", "cpu"] * needs_device], "eval"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_page_parse(page, monkeypatch, tmp_path):
    config_file = tmp_path / "config.json"
    cab_hf.CabConfig().save(config_file)
    for file_name in ("a.txt", "b.txt", "your.txt"):
        (tmp_path / file_name).write_text(PROSE_TEXT)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for arguments in find_commands(page):
        if len(arguments) > 1:
            parse_command(arguments, config_file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_named_by_page_exist(page):
    settings_classes = (*SETTINGS_CLASSES.values(), finetune.Settings, merge.MergeSettings)
    field_names = {
        field_name
        for settings_class in settings_classes
        for field_name in settings_class.__dataclass_fields__
    } | {"config"}
    known_options = EXTERNAL_OPTIONS | {
        "--" + field_name.replace("_", "-") for field_name in field_names
    }
    page_options = set(re.findall(r"(?<![\w<!-])--[a-z][\w-]*", page.read_text()))
    assert page_options <= known_options, page_options - known_options


def split_into_sentences(page_text):
    """Yield the sentences of a page, without code, tables and comments."""
    for pattern in (r"```.*?```", r"<!--.*?-->"):
        page_text = re.sub(pattern, "\n\n", page_text, flags=re.DOTALL)
    page_text = re.sub(r"^\|.*$", "", page_text, flags=re.MULTILINE)
    page_text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", page_text))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) |\n#+ ", page_text):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_sentences_are_short(page):
    long_sentences = [
        sentence
        for sentence in split_into_sentences(page.read_text())
        if len(sentence.split()) > MAX_SENTENCE_WORDS
    ]
    assert not long_sentences
