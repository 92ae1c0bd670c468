"""What is installed, what is public, and what importing costs."""

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from marks import slow_but

import cab_hf

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def folder_of(package, places):
    """Where a package's files lie in the tree."""
    for name in sorted(places, key=len, reverse=True):
        if package == name or package.startswith(name + "."):
            return ROOT / places[name] / package[len(name) :].strip(".").replace(".", "/")
    raise AssertionError(f"{package} has no folder")


def test_every_package_folder_is_listed(setup):
    listed = setup["options"]["packages"].split()
    places = dict(line.split(" = ") for line in setup["options"]["package_dir"].strip().split("\n"))
    actual = {folder_of(package, places) for package in listed}
    tops = {ROOT / place for place in places.values()}
    present = {init.parent for top in tops for init in top.rglob("__init__.py")}
    assert actual == present


def test_a_wheel_exposes_cab_hf_alone(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"cab_hf"}
    for path in ("eval/passkey.py", "patches/switch.py", "ops/reference.py", "py.typed"):
        assert f"cab_hf/{path}" in names
    # no packages, so that only setup.cfg's package data names them
    tasks = {path.name for path in (ROOT / "eval" / "tasks").iterdir() if path.is_file()}
    assert tasks == {Path(name).name for name in names if name.startswith("cab_hf/eval/tasks/")}
    page = {f"cab_hf/eval/page.{kind}" for kind in ("py", "html", "css", "js")}
    assert page <= set(names)
    fields = {str(path.relative_to(ROOT)) for path in (ROOT / "finetune").rglob("*.yaml")}
    shipped = {name for name in names if name.startswith("cab_hf/finetune/")}
    assert fields and {f"cab_hf/{name}" for name in fields} <= shipped


def test_the_public_surface_is_this():
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
    for name in cab_hf.__all__:
        assert getattr(cab_hf, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'cabs'"):
        cab_hf.cabs  # noqa: B018


def fresh(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.mark.parametrize("order", slow_but(["cab_hf, transformers", "transformers, cab_hf"], 0))
def test_importing_registers_whatever_comes_first(order):
    code = f"import {order}; from transformers import AttentionInterface as A; print(*A())"
    assert {"cab", "cab_dense"} <= set(fresh(code))


@pytest.mark.slow
def test_importing_after_a_model_class_registers_too():
    code = (
        "from transformers import LlamaForCausalLM, AttentionMaskInterface as A; import cab_hf;"
        "print(*A._global_mapping)"
    )
    assert {"cab", "cab_dense"} <= set(fresh(code))


def test_importing_is_cheap_and_touches_no_gpu():
    code = (
        "import time, sys, transformers; start = time.perf_counter(); import cab_hf;"
        "print(time.perf_counter() - start);"
        "print('triton' in sys.modules or 'torch' in sys.modules and"
        " __import__('torch').cuda.is_initialized())"
    )
    seconds, loaded = fresh(code)
    assert float(seconds) < 0.5
    assert loaded == "False"
