"""What a sweep says about its runs."""

from dataclasses import replace

import pytest

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.study.kinds.sweep import define_sweep
from smupar.study.store import Study
from tests.study.tiny import summary

TINY = RunConfig(model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=2)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({0.01: 3.0, 0.02: 2.0, 0.04: 1.0}, "lr 0.04 is the largest that was run: the best may lie above it."),
        ({0.01: 1.0, 0.02: 2.0, 0.04: 3.0}, "lr 0.01 is the smallest that was run: the best may lie below it."),
        ({0.01: 2.0, 0.02: 1.0, 0.04: 3.0}, None),
        ({0.01: 2.0, 0.02: 1.0}, None),  # two values always have the best at an end
    ],
)
def test_sweep_says_if_the_best_is_at_an_edge(losses, said, tmp_path):
    sweep = define_sweep(TINY, {"lr": list(losses)})
    with Study.open(tmp_path / "study", sweep.stored, "smupar sweep") as study:
        for lr, loss in losses.items():
            config = replace(TINY, lr=lr)
            study.add(config, summary(config, loss))
        sentence = sweep.read(study).sentence
    assert ("may lie" in sentence) is (said is not None)
    assert said is None or sentence.endswith(said)
