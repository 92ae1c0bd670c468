"""Documentation: snippets run on a tiny model, commands parse, and sentences are short."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from marks import is_before
from transformers import DynamicCache
from words import TEXT

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
LENGTH = 900  # tokens per prompt
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


SNIPPETS = {
    page.stem: find_code_blocks(page, "python")
    for page in PAGES[1:]
    if find_code_blocks(page, "python")
}


@pytest.fixture
def snippet_names(single_process_group, model_folder, monkeypatch):
    """Return the global names that snippets use, with their values.

    A tiny model replaces all models that snippets load.
    """
    model, tokenizer = cab_hf.load_model(model_folder, device="cpu", cab_config=SMALL_BLOCKS)
    monkeypatch.setattr(cab_hf, "load_model", lambda name: (model, tokenizer))
    monkeypatch.setattr(passes, "LENGTH", LENGTH)
    monkeypatch.setattr(passes, "KEYS", 2)
    ids = torch.randint(3, 60, (1, LENGTH))
    text_inputs = {"input_ids": ids}
    return {
        **{"cab_hf": cab_hf, "torch": torch, "model": model, "tokenizer": tokenizer},
        **{
            "inputs": text_inputs,
            "prompt": text_inputs,
            "document": text_inputs,
            "questions": [text_inputs],
        },
        **{"texts": [TEXT * 40], "cache": DynamicCache(config=model.config)},
        **{"dataset": Dataset.from_dict({"input_ids": ids, "labels": ids})},
        **{"documents": Dataset.from_dict({"text": [TEXT * 10] * 4})},
        **{"batch": {**text_inputs, "labels": ids}, "group": torch.distributed.group.WORLD},
    }


def shrink_code_block(block):
    """Return a code block with smaller numbers, so that it runs fast on a CPU."""
    changes = {"max_new_tokens=64": "max_new_tokens=2", "max_batch_tokens=8192": "num_blocks=8"}
    changes |= {"max_length=32768": "max_length=64, bf16=False"}
    for original_text, smaller_text in changes.items():
        block = block.replace(original_text, smaller_text)
    return block


@pytest.mark.parametrize("page", SNIPPETS)
def test_python_blocks_of_page_run(page, snippet_names, monkeypatch, tmp_path):
    if page in ("decode", "serving") and is_before("5.24"):
        pytest.skip("transformers is older: caches have another name, and batching is refused")
    monkeypatch.chdir(tmp_path)
    Path("quickcheck").mkdir()
    SMALL_BLOCKS.save("quickcheck/cab_config.json")
    for block in SNIPPETS[page]:
        if "from trl import" in block:
            pytest.importorskip("trl", reason="trl is not installed; `pip install '.[dev]'`")
        exec(shrink_code_block(block), snippet_names)


def list_commands(group=evaluations, prefix=()):
    """Yield (words of a command, such as ("speed", "lora"), and its settings class)."""
    for name, module_name in group.COMMANDS.items():
        if name in ("harness", "speed"):
            continue
        module = import_module(module_name)
        has_experiment = hasattr(module, "EXPERIMENT")
        settings_class = module.EXPERIMENT.Settings if has_experiment else module.Settings
        yield (*prefix, name), settings_class


SETTINGS_CLASSES = {**dict(list_commands()), **dict(list_commands(speed, ("speed",)))}


def find_commands(page):
    """Yield each command of this package on a page, as a list of the words after the program."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"-m cab_hf\.eval +([a-z][^`\n]*)|(finetune/lora\.py +[^`\n]*)", text):
        words = shlex.split("".join(line))
        # replace the placeholder FOLDER, and remove the placeholders "..." and COMMAND
        yield [word.replace("FOLDER", ".") for word in words if word not in ("...", "COMMAND")]


def parse_command(words, config_file):
    """Parse a command line, after replacing JSON files in its options with ``config_file``."""
    if words[0].endswith("lora.py"):
        words = [word.replace("finetune/", f"{ROOT}/finetune/") for word in words[1:]]
        return read_settings(finetune.Settings, words, "lora")
    command_name = tuple(words[: 2 if words[0] == "speed" else 1])
    if command_name not in SETTINGS_CLASSES:
        assert command_name[0] == "harness" or len(words) == 1
        return None
    words = [word.replace("FILE.json", str(config_file)) for word in words[len(command_name) :]]
    words = [
        f"{word.partition('=')[0]}={config_file}" if ".json" in word else word for word in words
    ]
    needs_device = (
        "device" in SETTINGS_CLASSES[command_name].__dataclass_fields__ and "--device" not in words
    )
    return read_settings(
        SETTINGS_CLASSES[command_name], [*words, *["--device", "cpu"] * needs_device], "eval"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_page_parse(page, monkeypatch, tmp_path):
    file = tmp_path / "config.json"
    cab_hf.CabConfig().save(file)
    for name in ("a.txt", "b.txt", "your.txt"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for words in find_commands(page):
        if len(words) > 1:
            parse_command(words, file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_named_by_page_exist(page):
    settings_classes = (*SETTINGS_CLASSES.values(), finetune.Settings, merge.MergeSettings)
    names = {name for each in settings_classes for name in each.__dataclass_fields__} | {"config"}
    known_options = EXTERNAL_OPTIONS | {"--" + name.replace("_", "-") for name in names}
    options = set(re.findall(r"(?<![\w<!-])--[a-z][\w-]*", page.read_text()))
    assert options <= known_options, options - known_options


def split_into_sentences(text):
    """Yield the sentences of a page, without code, tables and comments."""
    for pattern in (r"```.*?```", r"<!--.*?-->"):
        text = re.sub(pattern, "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) |\n#+ ", text):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_sentences_are_short(page):
    too_long = [
        each
        for each in split_into_sentences(page.read_text())
        if len(each.split()) > MAX_SENTENCE_WORDS
    ]
    assert not too_long
