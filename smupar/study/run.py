"""A study from its first run to its page."""

from __future__ import annotations

from smupar.study.config import EngineConfig
from smupar.study.engines import settle
from smupar.study.kind import Kind
from smupar.study.report import write_report
from smupar.study.store import Study


def run_study(folder: str, kind: Kind, command: str, how: EngineConfig) -> str:
    """Runs what is missing of a study and writes its page; returns what it found, and where."""
    with Study.open(folder, kind.definition, command) as study:
        for propose in kind.stages:
            settle(study, propose, how)
        return write_report(study, kind)
