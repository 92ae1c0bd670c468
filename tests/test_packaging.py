"""The wheel works without the source tree, public names are listed, and imports are fast."""

import configparser
import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from marks import mark_slow_except

import cab_hf

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup_config():
    """Return the parsed setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def find_package_folder(package, package_dirs):
    """Return the folder of a package in the source tree.

    ``package_dirs`` is the option ``package_dir`` of setup.cfg.
    """
    for parent_package in sorted(package_dirs, key=len, reverse=True):
        if package == parent_package or package.startswith(parent_package + "."):
            return (
                ROOT
                / package_dirs[parent_package]
                / package[len(parent_package) :].strip(".").replace(".", "/")
            )
    raise AssertionError(f"{package} has no folder")


def test_every_package_folder_is_listed(setup_config):
    packages = setup_config["options"]["packages"].split()
    package_dir_lines = setup_config["options"]["package_dir"].strip().split("\n")
    package_dirs = dict(package_dir_line.split(" = ") for package_dir_line in package_dir_lines)
    listed_folders = {find_package_folder(package, package_dirs) for package in packages}
    top_folders = {ROOT / folder for folder in package_dirs.values()}
    existing_folders = {
        init_file.parent for folder in top_folders for init_file in folder.rglob("__init__.py")
    }
    assert listed_folders == existing_folders


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel as `python -m build` does, with the setuptools of this environment."""
    wheel_folder = tmp_path_factory.mktemp("wheel")
    if importlib.util.find_spec("build"):
        build_command = ["-m", "build", "-w", "-n", "-o", wheel_folder]
    else:
        build_command = [
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            wheel_folder,
        ]
    subprocess.run([sys.executable, *build_command, ROOT], check=True, stdout=subprocess.DEVNULL)
    (wheel_path,) = wheel_folder.glob("*.whl")
    return wheel_path


# program that tests an installed cab_hf: sparse attention and packaged files
INSTALL_CHECK_PROGRAM = """
import importlib.resources, pathlib, sys
import torch
import cab_hf, cab_hf.patches, cab_hf.eval, cab_hf.finetune
from transformers import LlamaConfig, LlamaForCausalLM

folder = pathlib.Path(cab_hf.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
for module in (cab_hf.patches, cab_hf.eval, cab_hf.finetune):
    assert pathlib.Path(module.__file__).is_relative_to(folder), module
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
blocks = {"min_length": 0, "query_block": 16, "key_block": 16}
cab_hf.apply_cab(model, blocks)
with torch.no_grad():
    logits = model(torch.randint(64, (1, 300))).logits
assert logits.isfinite().all()
(layer,) = cab_hf.stats(model)
assert 0 < layer["density"] <= 1, layer
from cab_hf.eval.pages import TABLES
assert "default" in TABLES
files = importlib.resources.files
assert (files("cab_hf") / "py.typed").is_file()
assert list((files("cab_hf") / "adapters").glob("*/*.safetensors"))
assert (files("cab_hf.finetune") / "configs" / "tiny_cpu.yaml").is_file()
print("works")
"""


@pytest.mark.slow
def test_wheel_works_in_fresh_environment_outside_of_the_tree(wheel, tmp_path):
    """Install the wheel in a new environment that links to the requirements of this environment."""
    environment_folder = tmp_path / "environment"
    venv.create(environment_folder, symlinks=True)
    site_packages = Path(
        sysconfig.get_path(
            "purelib", vars={"base": environment_folder, "platbase": environment_folder}
        )
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    requirements_folder = tmp_path / "requirements"
    requirements_folder.mkdir()
    for site_packages_folder in (
        Path(path_entry) for path_entry in sys.path if path_entry.endswith("site-packages")
    ):
        for package_path in site_packages_folder.iterdir():
            # do not link the cab_hf of this environment, which is the source tree
            if "cab_hf" not in package_path.name and package_path.suffix != ".pth":
                (requirements_folder / package_path.name).unlink(missing_ok=True)
                (requirements_folder / package_path.name).symlink_to(package_path)
    (site_packages / "requirements.pth").write_text(f"{requirements_folder}\n")
    environment_variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    command = [environment_folder / "bin" / "python", "-c", INSTALL_CHECK_PROGRAM]
    process = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment_variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.endswith("works\n"), process.stderr


def test_wheel_has_one_top_level_package(wheel):
    archive_names = zipfile.ZipFile(wheel).namelist()
    top_folders = {
        archive_name.split("/")[0]
        for archive_name in archive_names
        if ".dist-info/" not in archive_name
    }
    assert top_folders == {"cab_hf"}
    for path in ("eval/passkey.py", "patches/switch.py", "ops/reference.py", "py.typed"):
        assert f"cab_hf/{path}" in archive_names
    # eval/tasks has no __init__.py: its files are in the wheel as package data of setup.cfg
    task_files = {path.name for path in (ROOT / "eval" / "tasks").iterdir() if path.is_file()}
    assert task_files == {
        Path(archive_name).name
        for archive_name in archive_names
        if archive_name.startswith("cab_hf/eval/tasks/")
    }
    assert {"cab_hf/eval/page.py", "cab_hf/eval/page.html"} <= set(archive_names)
    config_files = {str(path.relative_to(ROOT)) for path in (ROOT / "finetune").rglob("*.yaml")}
    packaged_files = {
        archive_name
        for archive_name in archive_names
        if archive_name.startswith("cab_hf/finetune/")
    }
    assert (
        config_files and {f"cab_hf/{config_file}" for config_file in config_files} <= packaged_files
    )


def test_public_names_are_listed():
    assert cab_hf.__all__ == sorted(cab_hf.__all__)
    assert cab_hf.__all__ == [
        "BlockPlan",
        "CabConfig",
        "apply_cab",
        "cab",
        "calibrate",
        "context_parallel",
        "describe",
        "index_cache",
        "load_model",
        "plot_plan",
        "register_predictor",
        "remove_cab",
        "stats",
    ]
    for public_name in cab_hf.__all__:
        assert getattr(cab_hf, public_name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'cabs'"):
        cab_hf.cabs  # noqa: B018


def test_metadata_has_author_and_summary(setup_config):
    metadata = setup_config["metadata"]
    assert metadata["author"] and "urvature" not in metadata["description"]
    classifiers = metadata["classifiers"].split("\n")
    assert any(classifier.startswith("Development Status") for classifier in classifiers)


def run_python_code(program):
    """Run ``program`` in a new Python process, and return a list of the words that it prints."""
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.mark.parametrize(
    "import_order", mark_slow_except(["cab_hf, transformers", "transformers, cab_hf"], 0)
)
def test_import_registers_in_any_import_order(import_order):
    program = (
        f"import {import_order}; from transformers import AttentionInterface as A; print(*A())"
    )
    assert {"cab", "cab_dense"} <= set(run_python_code(program))


@pytest.mark.slow
def test_import_after_model_class_registers():
    program = (
        "from transformers import LlamaForCausalLM, AttentionMaskInterface as A; import cab_hf;"
        "print(*A._global_mapping)"
    )
    assert {"cab", "cab_dense"} <= set(run_python_code(program))


def test_import_is_fast_and_loads_no_triton_and_no_cuda():
    program = (
        "import time, sys, transformers; start = time.perf_counter(); import cab_hf;"
        "print(time.perf_counter() - start);"
        "print('triton' in sys.modules or 'torch' in sys.modules and"
        " __import__('torch').cuda.is_initialized())"
    )
    seconds, printed_flag = run_python_code(program)
    assert float(seconds) < 0.5
    assert printed_flag == "False"


def test_import_does_not_load_pandas():
    program = "import sys, cab_hf.eval.experiment; print('pandas' in sys.modules)"
    assert run_python_code(program) == ["False"]
