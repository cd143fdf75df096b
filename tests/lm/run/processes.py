"""Runs in processes of their own, quietly."""

import contextlib
import multiprocessing
import resource
from pathlib import Path

import torch

from smupar.cli.main import main
from smupar.lm.run.train import train

# Processes are forked from a server that has torch loaded, so that one starts in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["smupar.lm.run.train", "smupar.cli.main"])


def in_process(config, how, limit=None):
    """Runs in a process of its own, quietly. A limit on the size of files stands for a full disk."""
    process = PROCESSES.Process(target=_run, args=(config, how, limit))
    process.start()
    return process


def _run(config, how, limit):
    torch.set_num_threads(1)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    log = Path(how.out).with_suffix(".log")
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            train(config, how)
        except OSError as error:
            print("error:", error)
            raise SystemExit(2) from error


def run_command(argv, log):
    torch.set_num_threads(1)
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        main(argv)
