import time
from dataclasses import replace

import pytest

from smupar.lm.run.train import train
from tests.lm.run.processes import in_process
from tests.lm.run.runs import CONFIG, CURVE, HOW
from tests.support.texts import words


@pytest.fixture(scope="session")
def text():
    return words()


@pytest.fixture(scope="session")
def config():
    return replace(CONFIG, data=words())


@pytest.fixture(scope="package")
def finished(config, tmp_path_factory):
    """The run, uninterrupted: its folder, and the seconds it took."""
    for name in ("first", "run"):  # the first one waits for the server to load torch
        folder = tmp_path_factory.mktemp("finished") / name
        start = time.perf_counter()
        process = in_process(config, replace(HOW, out=str(folder)))
        process.join()
        assert process.exitcode == 0, folder.with_suffix(".log").read_text()
    return folder, time.perf_counter() - start


@pytest.fixture(scope="package")
def short(config):
    """Twenty steps, for curves that are compared."""
    return replace(config, steps=20, model=replace(config.model, depth=2), clip=1.0, weight_decay=0.1)


@pytest.fixture(scope="package")
def one_rank(short, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    train(short, replace(CURVE, out=str(folder)))
    return folder
