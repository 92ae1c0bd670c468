"""The notebooks in ``examples`` run, and are committed without outputs."""

from pathlib import Path

import pytest
import torch

nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks; `pip install '.[dev]'`")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

EXAMPLES_FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def limited_notebook_threads(monkeypatch):
    """Limit notebook processes to the number of torch threads of this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


def run_notebook(notebook_name):
    """Run a notebook; return (printed output, number of pictures) of all its cells."""
    notebook = nbformat.read(EXAMPLES_FOLDER / notebook_name, as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES_FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    cell_outputs = [
        cell_output for cell in notebook.cells for cell_output in cell.get("outputs", ())
    ]
    printed_text = "".join(
        cell_output.text for cell_output in cell_outputs if cell_output.output_type == "stream"
    )
    return printed_text, sum(
        "image/png" in cell_output.get("data", ()) for cell_output in cell_outputs
    )


@pytest.mark.slow
def test_long_document_notebook_runs(monkeypatch):
    monkeypatch.setenv("CAB_HF_TOKENS", "1024")
    printed_text, num_pictures = run_notebook("long_document.ipynb")
    assert num_pictures == 4
    answer_texts = [
        line.split("answer ")[1] for line in printed_text.splitlines() if ", expected " in line
    ]
    assert len(answer_texts) == 2
    for answer_text in answer_texts:
        answer, expected_answer = answer_text.replace("'", "").split(", expected ")
        assert answer.startswith(expected_answer)


@pytest.mark.slow
def test_fine_tuning_notebook_runs(monkeypatch):
    monkeypatch.setenv("CAB_HF_STEPS", "6")
    printed_text, num_pictures = run_notebook("finetune.ipynb")
    assert num_pictures == 1
    assert "layers 0-1: sparse" in printed_text


@pytest.mark.parametrize(
    "notebook_path", sorted(EXAMPLES_FOLDER.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebooks_are_committed_without_outputs(notebook_path):
    cells = nbformat.read(notebook_path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
