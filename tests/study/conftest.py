import pytest

from smupar.study.axes import grid
from tests.study.tiny import AXES, TINY, run


@pytest.fixture(scope="session")
def serial(tmp_path_factory):
    return run(tmp_path_factory.mktemp("serial") / "study", "serial", list(grid(TINY, AXES)))
