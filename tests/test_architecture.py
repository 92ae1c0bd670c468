"""Modules import from their own layer and earlier layers only, also by names in strings."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model

import cab_hf

ROOT = Path(__file__).parents[1]
# packages in import order: a module imports from its own layer and earlier layers. Two packages in
# one string, separated by a space, are in the same layer
PACKAGE_LAYERS = [
    *("checks", "capability", "config", "hf", "experiment", "data", "plan", "break_even"),
    *("ops", "selection", "predictors", "call", "engines", "layers", "distributed", "decode"),
    *("route", "dispatch", "calibration", "batching vllm", "attention", "patches", "finetune"),
    "eval",
]
LAYER_RANKS = {
    package: layer_rank
    for layer_rank, layer_packages in enumerate(PACKAGE_LAYERS)
    for package in layer_packages.split()
}
# modules that may import from all layers, because they import lazily by name
LAZY_MODULES = {"__init__", "registration"}


def find_imports(source):
    """Yield the names of modules that a source imports: in statements, attributes and strings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "cab_hf":
            for alias in node.names:
                yield cab_hf._MODULE_OF_NAME.get(alias.name, f"cab_hf.{alias.name}")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cab_hf":
            yield cab_hf._MODULE_OF_NAME.get(node.attr, f"cab_hf.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # strings that are only a module name, such as arguments of import_module and find_spec
            yield from re.findall(r"^cab_hf\.[\w.]+$", node.value)


def find_upward_imports(file_path, source):
    """Return the names of modules that a file imports from later layers, which is not allowed."""
    path_parts = Path(file_path).with_suffix("").parts
    layer = path_parts[1] if path_parts[0] == "cab_hf" else path_parts[0]
    if layer in LAZY_MODULES:
        return set()
    imported_modules = {
        module for module in find_imports(source) if re.match(r"cab_hf\.(?!__)", module)
    }
    # a KeyError here means that a new module is missing in `PACKAGE_LAYERS`
    return {
        module
        for module in imported_modules
        if LAYER_RANKS[module.split(".")[1]] > LAYER_RANKS[layer]
    }


def test_imports_run_one_way():
    upward_imports = set()
    for folder in ("cab_hf", "patches", "calibration", "finetune", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            upward_imports |= {
                (path, module) for module in find_upward_imports(path, file.read_text())
            }
    assert not upward_imports


@pytest.mark.parametrize(
    ("source", "upward_imports"),
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
def test_upward_import_is_detected(source, upward_imports):
    assert find_upward_imports("cab_hf/engines/masked.py", source) == upward_imports


def test_ops_do_not_import_transformers():
    for path in (ROOT / "cab_hf" / "ops").rglob("*.py"):
        assert "transformers" not in path.read_text(), path.name


def find_folder_imports(folder):
    """Return {module: modules of the same folder that it imports}, for a folder of cab_hf."""
    file_by_module = {
        f"cab_hf.{folder}.{file.stem}": file for file in (ROOT / "cab_hf" / folder).glob("*.py")
    }
    imports_by_module = {}
    for module, file in file_by_module.items():
        nodes = ast.walk(ast.parse(file.read_text()))
        from_imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        imported_names = {
            f"{node.module}.{imported_name.name}"
            for node in from_imports
            for imported_name in node.names
        }
        imported_names |= set(find_imports(file.read_text()))
        imports_by_module[module] = {
            imported_name
            for imported_name in imported_names
            if imported_name in file_by_module and imported_name != module
        }
    return imports_by_module


def find_cycle(import_graph):
    """Return the modules of an import graph that are in a cycle, or that import such modules."""
    while import_graph:
        leaf_modules = {
            module
            for module, imported_modules in import_graph.items()
            if not imported_modules & import_graph.keys()
        }
        if not leaf_modules:
            break
        import_graph = {
            module: imported_modules
            for module, imported_modules in import_graph.items()
            if module not in leaf_modules
        }
    return set(import_graph)


@pytest.mark.parametrize("folder", ["call", "batching", "decode", "distributed"])
def test_modules_of_a_folder_have_no_import_cycle(folder):
    import_graph = find_folder_imports(folder)
    assert any(import_graph.values())
    assert not find_cycle(import_graph)


def test_import_cycle_is_found():
    import_graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"b"}, "e": set()}
    assert find_cycle(import_graph) == {"a", "b", "c", "d"}


# modules that "Files of one sparse prefill" in docs/house.md need not list: wrappers of
# transformers functions, and argument checks
UNDOCUMENTED_FILES = {"registration.py", "batching/hooks.py", "batching/batch.py", "checks.py"}


@torch.no_grad()
def test_files_of_a_sparse_prefill_are_listed():
    page_text = (ROOT / "docs" / "house.md").read_text()
    section_text = page_text[
        page_text.index("### Files of one sparse prefill") : page_text.index("## Questions")
    ]
    listed_files = set(re.findall(r"`([\w/]+\.py)`", section_text))
    model = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)
    package_folder, called_files = Path(cab_hf.__file__).parent, set()

    def record_file(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(package_folder):
            called_files.add(file.relative_to(package_folder).as_posix())

    model(draw_token_ids(1, 300))
    sys.setprofile(record_file)
    try:
        model(draw_token_ids(1, 300))
    finally:
        sys.setprofile(None)
    assert called_files - UNDOCUMENTED_FILES == listed_files
    # two files more than the reference engine, which a CPU used for small blocks before
    assert len(listed_files) <= 27
