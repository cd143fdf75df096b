"""Kinds of damage to one file, and to a JSON value."""

from __future__ import annotations

import os
import pickle
from itertools import islice


def flip_at(path, position, bit=0x40):
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def flip(path, random):
    """One bit, anywhere."""
    flip_at(path, random.randrange(path.stat().st_size), 1 << random.randrange(8))


def flip_late(path, random):
    """One bit in the second half: of a safetensors file, in a tensor."""
    size = path.stat().st_size
    flip_at(path, random.randrange(size // 2, size), 1 << random.randrange(8))


def places(value, most=None, path=()):
    """The paths to all values inside a JSON value, or inside the first ``most`` items of each list and object."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in islice(items, most):
        yield from places(inner, most, (*path, key))


def replaced(value, path, new):
    """A JSON value with another value at this path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


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
