"""What the source of a module says about its numbers."""

import ast
import threading
from concurrent.futures import ThreadPoolExecutor

from torch import nn

from smupar.plan.scales.source import divides_by


class Divided(nn.Module):
    def forward(self, x):
        return x / self.scale


def test_division_by_an_attribute_is_seen():
    assert divides_by(Divided(), "scale")
    assert not divides_by(Divided(), "other")


class First(Divided):
    def forward(self, x):
        return x / self.first


class Second(Divided):
    def forward(self, x):
        return x / self.second


def test_two_threads_never_parse_at_once(monkeypatch):
    """Python 3.11 may fail then, and the models of a stack are planned by several threads."""
    both, parse = threading.Barrier(2), ast.parse

    def parse_beside_another(*given, **named):
        both.wait(timeout=0.2)  # an error, unless the other thread is here too
        return parse(*given, **named)

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(ast, "parse", parse_beside_another)
        errors = [future.exception() for future in [pool.submit(divides_by, kind(), "scale") for kind in (First, Second)]]
    assert {type(error) for error in errors} == {threading.BrokenBarrierError}
