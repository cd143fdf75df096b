"""What the report of a study says besides its curves."""

from dataclasses import replace

import pytest

from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.study.report import write_report
from smupar.study.store import Study
from tests.study.tiny import summary

TINY = RunConfig(model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=2)


@pytest.mark.parametrize(
    ("decays", "said"),
    [
        ([("independent", 0.1), ("coupled", 0.1), ("coupled", 0.2)], "(runs: coupled in 2, independent in 1)"),
        ([("independent", 0.1), ("coupled", 0.0)], None),  # without decay there is no convention
        ([("coupled", 0.1), ("coupled", 0.2)], None),
    ],
)
def test_study_that_mixes_decay_conventions_says_so_on_its_page(decays, said, tmp_path):
    with Study.open(tmp_path / "study", {"kind": "x"}, "smupar sweep") as study:
        for kind, amount in decays:
            config = replace(TINY, decay=kind, weight_decay=amount)
            study.add(config, summary(config, 4.0))
        found = str(write_report(study))
    page = (tmp_path / "study" / "report.html").read_text()
    assert ("mixes decay conventions" in found) is ("mixes decay conventions" in page) is (said is not None)
    assert said is None or said in page
