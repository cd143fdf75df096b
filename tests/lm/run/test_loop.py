"""The training loop alone, on runs whose losses are given: when it looks, what it tells, how it ends."""

import math
from dataclasses import replace

import pytest
import torch

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.run.distributed import World
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.signals import Stop

CONFIG = RunConfig(model=ModelConfig(width=32, head_dim=16), steps=120, batch_size=2, seq_len=4, warmup=0)


class Given:
    """Runs with these losses at every step; a list instead of a number has one for each."""

    num_parameters = 7
    world = World(0, 1, torch.device("cpu"), "ddp")

    def __init__(self, *losses, steps=120, valid=1.5):
        self.configs = [replace(CONFIG, steps=steps, seed=number) for number in range(len(losses))]
        self.losses, self.valid, self.validations = losses, valid, 0

    @property
    def sparsities(self):
        return [0.25] * len(self.losses)

    def step(self, step):
        return torch.tensor([own if isinstance(own, float) else own[step] for own in self.losses])

    def validate(self, *, until):
        self.validations += 1
        return None if until() else [self.valid] * len(self.losses)


class Kept:
    def __init__(self):
        self.shown, self.rows, self.saved = [], [], []

    def show(self, done, loss, seconds):
        self.shown.append(done)

    def log(self, index, row):
        self.rows.append((index, row))

    def save(self, progress):
        self.saved.append([run.step for run in progress])


def loop_of(runs, cadence, stop=None, progress=None):
    keeper = Kept()
    return Loop(runs, cadence, keeper, stop or Stop(), progress or [Progress() for _ in runs.configs]), keeper


def stacked(steps=120):
    return Cadence(steps, log_every=40, valid_every=steps, look_every=50)


def test_stack_is_looked_at_when_due_and_never_between():
    loop, keeper = loop_of(Given(2.0, 3.0), stacked())
    assert loop.run() == "finished"
    assert keeper.shown == [50, 100, 120]
    assert [(index, row["step"]) for index, row in keeper.rows] == [(i, step) for step in (40, 80, 120) for i in (0, 1)]


def test_single_run_is_looked_at_for_each_row_once_steps_are_known_to_be_fast():
    loop, keeper = loop_of(Given(2.0), Cadence(120, log_every=30, valid_every=60, save_every=50))
    assert loop.run() == "finished"
    assert keeper.shown == [1, 30, 50, 60, 90, 100, 120]
    assert [row["step"] for _, row in keeper.rows] == keeper.shown[1:]
    assert keeper.saved == [[50], [60], [100], [120]]  # 60 was the best so far


def test_rows_are_means_since_the_row_before():
    losses = [float(step) for step in range(1, 121)]
    loop, keeper = loop_of(Given(losses, 2.0), stacked())
    loop.run()
    rows = [row for index, row in keeper.rows if index == 0]
    assert [row["loss"] for row in rows] == [20.5, 60.5, 100.5]
    assert [row["tokens"] for row in rows] == [320, 640, 960]
    assert [row["valid_loss"] for row in rows] == [None, None, 1.5]
    assert loop.progress[0].losses == losses[-6:]  # 5 % of 120


def test_run_that_diverges_is_told_and_the_others_go_on():
    wild = [2.0] * 60 + [math.nan] + [2.0] * 59
    loop, keeper = loop_of(Given(wild, 2.0), stacked())
    first, second = loop.summaries(loop.run(), ["a", "b"])
    assert (first.status, first.steps, first.train_loss, first.valid_loss) == ("diverged", 60, None, None)
    assert (second.status, second.steps, second.train_loss, second.valid_loss) == ("finished", 120, 2.0, 1.5)
    assert (first.best_step, second.best_step) == (None, 120)
    told = [(row["step"], math.isnan(row["loss"])) for index, row in keeper.rows if index == 0]
    assert told == [(40, False), (80, True)]


def test_loop_ends_early_when_every_run_has_diverged():
    loop, _ = loop_of(Given([2.0] * 10 + [math.inf] * 110, [2.0] * 20 + [math.nan] * 100), stacked())
    assert loop.run() == "diverged"
    assert loop.done == 50
    assert loop.runs.validations == 0
    assert [summary.steps for summary in loop.summaries("diverged", ["a", "b"])] == [10, 20]


def test_loss_that_is_no_number_on_validation_is_a_divergence():
    loop, _ = loop_of(Given(2.0, valid=math.nan), stacked())
    (summary,) = loop.summaries(loop.run(), ["a"])
    assert (summary.status, summary.train_loss, summary.best_valid_loss) == ("diverged", None, None)


def test_stop_saves_at_the_step_where_it_was_asked():
    stop = Stop()
    runs = Given(2.0)
    step = runs.step

    def asked_at_37(number):
        stop.requested, stop.status = number >= 36, "interrupted"
        return step(number)

    runs.step = asked_at_37
    loop, keeper = loop_of(runs, Cadence(120, log_every=50, valid_every=120), stop)
    assert loop.run() == "interrupted"
    assert keeper.saved == [[37]]
    again, kept = loop_of(Given(2.0), Cadence(120, log_every=50, valid_every=120), progress=loop.progress)
    assert again.run() == "finished"
    assert [row["step"] for _, row in kept.rows] == [50, 100, 120]
    assert again.progress[0].step == 120


@pytest.mark.parametrize("at", [1, 37, 50, 59, 60, 61, 119])
def test_rows_of_a_stopped_run_are_those_of_the_whole_run(at):
    """At 60 the signal also keeps the run from validating, whose row then waits."""
    losses, cadence = [float(step) for step in range(1, 121)], Cadence(120, log_every=50, valid_every=60)
    whole, expected = loop_of(Given(losses), cadence)
    whole.run()
    stop, runs = Stop(), Given(losses)
    step = runs.step

    def asked(number):
        stop.requested = number >= at - 1
        return step(number)

    runs.step = asked
    loop, keeper = loop_of(runs, cadence, stop)
    assert loop.run() == "terminated"
    again, kept = loop_of(Given(losses), cadence, progress=loop.progress)
    assert again.run() == "finished"
    ours, theirs = ([{**row, "tokens_per_second": 0} for _, row in rows] for rows in (keeper.rows + kept.rows, expected.rows))
    assert ours == theirs


def test_validation_that_was_stopped_is_done_when_the_run_goes_on():
    stop = Stop()
    runs = Given(2.0)

    def validate(*, until):
        stop.requested = True
        return None if until() else [1.5]

    runs.validate = validate
    cadence = Cadence(120, log_every=60, valid_every=60)
    loop, keeper = loop_of(runs, cadence, stop)
    assert loop.run() == "terminated"
    assert keeper.saved == [[60]]
    again, kept = loop_of(Given(2.0), cadence, progress=loop.progress)
    assert again.run() == "finished"
    assert [(row["step"], row["valid_loss"]) for _, row in kept.rows] == [(60, 1.5), (120, 1.5)]


def test_seconds_of_a_stack_are_shared():
    alone, _ = loop_of(Given(2.0), stacked())
    loop, _ = loop_of(Given(2.0, 2.0, 2.0, 2.0), stacked())
    for own in (alone, loop):
        own.run()
    shares = [run.seconds for run in loop.progress]
    assert shares == [shares[0]] * 4
    summary = loop.summaries("finished", ["a"])[0]
    assert summary.tokens_per_second == pytest.approx(960 / shares[0])
