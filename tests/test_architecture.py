"""Imports follow the layers, both statements and module names in strings."""

import ast
import re
from pathlib import Path

import pytest

import cab_hf

ROOT = Path(__file__).parents[1]
# a module imports from its own floor and from those before it; "a b" share one
FLOORS = [
    *("checks", "capability", "config", "hf", "experiment", "data", "plan"),
    *("ops", "predictors", "call", "engines", "layers", "distributed", "decode", "route"),
    *("calibration", "batching vllm", "attention", "patches", "finetune", "eval"),
]
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names.split()}
# these import whatever is asked for by name
FREE = {"__init__", "registration"}


def imported(source):
    """Return modules of cab_hf named by a source: in statements, attributes and strings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "cab_hf":
            for name in node.names:
                yield cab_hf._HOME.get(name.name, f"cab_hf.{name.name}")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cab_hf":
            yield cab_hf._HOME.get(node.attr, f"cab_hf.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # of import_module, find_spec and tables of them; a message has more words than one
            yield from re.findall(r"^cab_hf\.[\w.]+$", node.value)


def upward(path, source):
    """Return the imports of a file from layers above its own."""
    parts = Path(path).with_suffix("").parts
    floor = parts[1] if parts[0] == "cab_hf" else parts[0]
    if floor in FREE:
        return set()
    names = {name for name in imported(source) if re.match(r"cab_hf\.(?!__)", name)}
    # KeyError: a new module needs a floor
    return {name for name in names if RANK[name.split(".")[1]] > RANK[floor]}


def test_imports_run_one_way():
    result = set()
    for folder in ("cab_hf", "patches", "calibration", "finetune", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            result |= {(path, name) for name in upward(path, file.read_text())}
    assert not result


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from cab_hf.patches.switch import apply_cab", {"cab_hf.patches.switch"}),
        ("from cab_hf import apply_cab, plan", {"cab_hf.patches"}),
        ("import cab_hf.eval", {"cab_hf.eval"}),
        ("import cab_hf\ncab_hf.calibrate(model)", {"cab_hf.patches.calibration"}),
        ("import_module('cab_hf.finetune.merge')", {"cab_hf.finetune.merge"}),
        ("import_module(f'cab_hf.eval.{name}')", {"cab_hf.eval."}),
        ("def late():\n    from cab_hf.eval import report", {"cab_hf.eval"}),
        ("'call cab_hf.apply_cab(model)'; import_module('cab_hf.plan')", set()),
    ],
)
def test_upward_import_is_detected(source, seen):
    assert upward("cab_hf/engines/dense.py", source) == seen


def test_ops_do_not_import_transformers():
    for path in (ROOT / "cab_hf" / "ops").rglob("*.py"):
        assert "transformers" not in path.read_text(), path.name
