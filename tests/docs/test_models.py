"""docs/models.md says what happens when its models are run."""

import runpy
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.support.architectures import ALL

MODELS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "models.py"))
SHOWN = MODELS["shown_rows"]()
FEW = (
    "Llama",
    "Mixtral",
    "Mamba",
    "RoBERTa",
    "T5",
    "Whisper",
    "CLIP, projection of fixed size",
    "LSTM",
    "Mixer",
    "weight norm",
)


def test_page_has_every_architecture_once_and_in_order():
    assert list(SHOWN) == list(ALL)
    assert len(SHOWN) >= 40


def test_page_shows_the_stored_rows():
    rows = MODELS["stored"]()
    assert {name: SHOWN.get(name) for name in rows} == {name: row["cells"] for name, row in rows.items()}


@pytest.mark.parametrize("name", FEW)
def test_quick_columns_are_what_happens(name):
    found = MODELS["quick"](ALL[name])
    assert SHOWN[name][1:5] == list(astuple(found)), "stale: run `python docs/models.py`"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_row_is_what_happens(name):
    cells = MODELS["row"](name)["cells"]
    assert SHOWN[name] == cells, "stale: run `python docs/models.py`"
