"""Two test processes share two cores: one thread each. Models here are small, more threads only cost."""

import contextlib
import resource
import signal
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from smupar.cli.main import main

torch.set_num_threads(1)


@pytest.fixture
def one_process_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def small_files():
    """A context in which no file may grow beyond a number of bytes. To a writer this looks like a full disk."""

    @contextlib.contextmanager
    def limited(num_bytes):
        handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limited


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs ``smupar ...`` in this process, as a process of its own would end: ``returncode``, ``stdout``, ``stderr``."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # a command prints warnings in its own way

    def run(*argv):
        capsys.readouterr()
        code = 0
        try:
            main([str(word) for word in argv])
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run
