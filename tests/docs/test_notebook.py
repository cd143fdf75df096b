"""The notebook runs, and what is stored in it is whole."""

import base64
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
SPOKEN = "best on the dense proxy: "  # with what the finding begins


def pictures(notebook):
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


def printed(notebook):
    return [output["text"] for cell in notebook.cells for output in cell.get("outputs", []) if output.get("name") == "stdout"]


@pytest.mark.filterwarnings("default")  # of Jupyter's own
def test_tour_runs_and_shows_what_is_stored(tmp_path):
    stored = nbformat.read(TOUR, as_version=4)
    fresh = nbformat.from_dict(stored)
    for cell in fresh.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    done = nbclient.NotebookClient(fresh, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(pictures(done)) == len(pictures(stored)) == 3
    assert all(picture.startswith(b"\x89PNG") for picture in pictures(stored))
    assert printed(done)[0] == printed(stored)[0]  # the plan
    assert "SmuPar: PASS" in printed(done)[2]
    assert printed(done)[3].startswith(SPOKEN)


def test_tour_holds_no_error_and_no_path_of_a_machine():
    stored = nbformat.read(TOUR, as_version=4)
    nbformat.validate(stored)
    outputs = [output for cell in stored.cells for output in cell.get("outputs", [])]
    assert {output.get("name") for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert not [output for output in outputs if output.output_type == "error"]
    assert "/home/" not in TOUR.read_text()
    assert "/tmp/" not in TOUR.read_text()
