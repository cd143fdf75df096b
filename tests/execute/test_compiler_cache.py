"""The cache of torch.compile: a folder that another user made is not used."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from smupar.execute.compiler_cache import guard_compiler_cache

SETTING = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder that all users can write to, as /tmp is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SETTING, "")  # so that it is put back
    monkeypatch.delenv(SETTING)
    return folder


def test_folder_of_torch_is_made_before_others_can(temporary):
    guard_compiler_cache()
    assert SETTING not in os.environ
    assert Path(default_cache_dir()).parent == temporary
    assert stat.S_IMODE(Path(default_cache_dir()).stat().st_mode) == 0o700


def others_can_write():
    Path(default_cache_dir()).mkdir()
    Path(default_cache_dir()).chmod(0o777)


def is_a_link():
    Path(default_cache_dir()).symlink_to("/elsewhere")


def can_be_renamed():
    Path(default_cache_dir()).parent.chmod(0o777)


def belongs_to_another_user():
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    Path(default_cache_dir()).mkdir()
    os.chown(default_cache_dir(), 65534, 65534)


@pytest.mark.parametrize("prepare", [others_can_write, is_a_link, can_be_renamed, belongs_to_another_user])
def test_folder_that_others_control_is_not_used(tmp_path, prepare):
    prepare()
    guard_compiler_cache()
    chosen = Path(os.environ[SETTING])
    assert chosen == tmp_path / "cache" / "smupar" / "torch"
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700


def test_folder_that_torch_has_named_is_checked_too(tmp_path, monkeypatch):
    """As when the compiler was imported before, which is so in training."""
    monkeypatch.setenv(SETTING, default_cache_dir())
    others_can_write()
    guard_compiler_cache()
    assert Path(os.environ[SETTING]) == tmp_path / "cache" / "smupar" / "torch"


def test_folder_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv(SETTING, "/mine")
    others_can_write()
    guard_compiler_cache()
    assert os.environ[SETTING] == "/mine"
