"""What the report of a study says besides its curves."""

import re
from dataclasses import replace

import pytest

from smupar.lm.config.run_config import ModelConfig, RunConfig
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
        found = " ".join(write_report(study).notes)
    page = (tmp_path / "study" / "report.html").read_text()
    assert ("mixes decay conventions" in found) is ("mixes decay conventions" in page) is (said is not None)
    assert said is None or said in page


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("", "is not a study, but holds some: name one of {}/runs/one, {}/runs/two"),
        ("runs", "is not a study, but holds some: name one of {}/runs/one, {}/runs/two"),
        ("runs/single", "is a single run, which has no report: smupar watch {}/runs/single shows it"),
        ("runs/one", "has no finished run yet: start its command again"),
        ("other", "is not the folder of a study"),
        ("none", "there is no folder {}/none"),
    ],
)
def test_folder_without_a_report_leads_to_one_that_has_it(folder, said, tmp_path):
    for name in ("one/study.json", "two/study.json", "single/config.json"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).write_text("{}")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=re.escape(said.format(*[tmp_path] * 2))):
        write_report(Study(tmp_path / folder))
