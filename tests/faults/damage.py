"""Kinds of damage to one file."""

from __future__ import annotations

import os
import pickle


def flip(path, random):
    """One bit, anywhere."""
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def flip_late(path, random):
    """One bit in the second half: of a safetensors file, in a tensor."""
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data) // 2, len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def cut(path, random):
    path.write_bytes(path.read_bytes()[: random.randrange(1, path.stat().st_size)])


def empty(path, random):
    path.write_bytes(b"")


def zero(path, random):
    path.write_bytes(bytes(path.stat().st_size))


def remove(path, random):
    path.unlink()


def nest(path, random):
    """JSON that is nested deeper than Python can follow."""
    path.write_text("[" * 100_000)


def swap_type(path, random):
    path.write_text("[1, 2]")


def pickled(path, random):
    path.write_bytes(pickle.dumps({"step": 1}))


def not_text(path, random):
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def pipe(path, random):
    """Opening it waits for somebody who writes."""
    path.unlink()
    os.mkfifo(path)


def device(path, random):
    """Reading it never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def circle(path, random):
    path.unlink()
    path.symlink_to(path.name)


KINDS = {
    "flip": flip,
    "flip late": flip_late,
    "cut": cut,
    "empty": empty,
    "zero": zero,
    "remove": remove,
    "nest": nest,
    "a list": swap_type,
    "pickle": pickled,
    "not text": not_text,
    "pipe": pipe,
    "device": device,
    "circle": circle,
}
