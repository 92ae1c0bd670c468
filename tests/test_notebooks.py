"""The notebooks in ``examples`` run, and are committed without outputs."""

from pathlib import Path

import pytest
import torch

nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks; `pip install '.[dev]'`")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def as_many_threads_as_here(monkeypatch):
    """Limit notebook processes to the number of torch threads of this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


def executed(name):
    """Run a notebook; return (printed output, number of pictures) of all its cells."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    printed = "".join(each.text for each in outputs if each.output_type == "stream")
    return printed, sum("image/png" in each.get("data", ()) for each in outputs)


@pytest.mark.slow
def test_long_document_notebook_runs(monkeypatch):
    monkeypatch.setenv("CAB_HF_TOKENS", "1024")
    printed, pictures = executed("long_document.ipynb")
    assert pictures == 4
    answers = [line.split("answer ")[1] for line in printed.splitlines() if ", expected " in line]
    assert len(answers) == 2
    for line in answers:
        answer, expected = line.replace("'", "").split(", expected ")
        assert answer.startswith(expected)


@pytest.mark.slow
def test_fine_tuning_notebook_runs(monkeypatch):
    monkeypatch.setenv("CAB_HF_STEPS", "6")
    printed, pictures = executed("finetune.ipynb")
    assert pictures == 1
    assert "layers 0-1: sparse" in printed


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
