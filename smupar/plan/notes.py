"""Remarks on a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A remark on a plan. Programs read ``kind``; people read ``text``."""

    kind: str
    text: str
    is_caution: bool = True  # whether it is also a warning when the plan is made

    def __str__(self) -> str:
        return self.text
