"""What loading PyTorch leaves behind in the process."""

import gc
import sys

import pytest

from smupar.cli.loading import loading


@pytest.fixture
def before_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    yield
    gc.unfreeze()


@pytest.mark.parametrize("error", [None, ModuleNotFoundError])
def test_garbage_is_collected_again_after_loading(before_torch, error):
    try:
        with loading():
            assert not gc.isenabled()
            if error:
                raise error
    except ModuleNotFoundError:
        pass
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_loading_again_changes_nothing():
    count = gc.get_freeze_count()
    with loading():
        assert gc.isenabled()
    assert gc.get_freeze_count() == count
