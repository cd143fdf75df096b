"""Runs in processes of their own, quietly."""

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
from pathlib import Path

import torch

from smupar.cli.main import main
from smupar.lm.run.train import train

# Processes are forked from a server that has torch loaded, so that one starts in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["smupar.lm.run.train", "smupar.cli.main"])


@contextlib.contextmanager
def quiet(log, mode="w"):
    """One thread, and all that is printed goes to a file."""
    torch.set_num_threads(1)
    with log.open(mode) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def run_command(argv, log):
    with quiet(log):
        main(argv)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_ranks(work, logs):
    """Two ranks as torchrun would start them. Each calls ``work``, and prints to its log."""
    port = free_port()
    return [start_rank(work, rank, port, log) for rank, log in enumerate(logs)]


def start_rank(work, rank, port, log):
    process = PROCESSES.Process(target=_on_rank, args=(rank, port, work, log))
    process.start()
    return process


def _on_rank(rank, port, work, log):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    torch.manual_seed(rank)  # each rank has a global RNG of its own
    with quiet(log):
        work()


def kill_at_random_moments(start, moments, num_kills, *, earliest=0.0, latest):
    """Starts a process until it ends by itself, and kills it at most so many times before. Returns how often it was killed."""
    kills = 0
    while True:
        process = start()
        process.join(timeout=moments.uniform(earliest, latest) if kills < num_kills else None)
        if process.exitcode is not None:
            assert process.exitcode == 0
            return kills
        process.kill()
        process.join()
        kills += 1


def in_process(config, how, limit=None):
    """Runs in a process of its own, quietly. A limit on the size of files stands for a full disk."""
    process = PROCESSES.Process(target=_run, args=(config, how, limit))
    process.start()
    return process


def _run(config, how, limit):
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with quiet(Path(how.out).with_suffix(".log")):
        try:
            train(config, how)
        except OSError as error:
            print("error:", error)
            raise SystemExit(2) from error
