"""The page of a trace: effects of updates over the run, with a chart for each kind of layer. It does not import torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smupar.output.json_files import read_text
from smupar.output.page.document import Chart, ChartLine, Document, finite, thinned
from smupar.plan.globs import layer_glob
from smupar.updates.stored import REMEDY, parse_trace

_MOST_POINTS = 200


def trace_document(target: Mapping[str, Any], proxy: Mapping[str, Any] | None = None, *, folder: str = "") -> Document:
    """The document of a trace, with the proxy's trace for comparison if it is given. Both are plain values, as in JSON."""
    num_layers, num_kinds = len(target["effects"]), len({layer_glob(name) for name in target["effects"]})
    kinds = f" of {num_kinds} kinds" if num_kinds > 1 else ""
    return {
        "kind": "trace",
        "title": "Effects of updates",
        "headline": f"Effects of updates on {num_layers} hidden layers{kinds}, over {target['num_steps']} steps.",
        "sentence": "The effect of an update is RMS(X dW), the change of a layer's output, over the base learning rate.",
        "answers": [],
        "charts": trace_charts(target, proxy),
        "table": None,
        "progress": None,
        "curves": {},
        "command": "",
        "folder": folder,
        "details": [("Note", target["note"])] if target.get("note") else [],
        "is_live": False,
        "made": time.time(),
    }


def trace_charts(target: Mapping[str, Any], proxy: Mapping[str, Any] | None = None) -> list[Chart]:
    kinds = dict.fromkeys(layer_glob(name) for name in target["effects"])
    charts: list[Chart] = []
    for kind in kinds:
        lines = [line for trace in (proxy, target) if trace for line in _lines(trace, kind, is_proxy=trace is proxy)]
        charts.append(
            {
                "title": f"Effects of updates: {kind}",
                "rule": "",
                "x_label": "share of the run",
                "y_label": "RMS(X dW) / base learning rate",
                "log_x": False,
                "log_y": True,
                "lines": lines,
                "whole_y": True,
                "group": kind,
            }
        )
    return charts


def _lines(trace: Mapping[str, Any], kind: str, *, is_proxy: bool) -> list[ChartLine]:
    names = [name for name in trace["effects"] if layer_glob(name) == kind]
    last = max(1, len(names) - 1)
    return [
        {
            "label": f"proxy, {name}" if is_proxy else name,
            "points": [
                {
                    "x": finite(step / max(1, trace["num_steps"])) or 0.0,
                    "y": None if effect is None else finite(effect),
                    "runs": [],
                }
                for step, effect in thinned(list(zip(trace["at"], trace["effects"][name], strict=True)), _MOST_POINTS)
            ],
            "shade": number / last,
            "is_reference": is_proxy,
            "is_joined": True,
            "best": None,
        }
        for number, name in enumerate(names)
    ]


def read_trace(path: Path) -> dict[str, Any] | None:
    """A trace as plain values; None if the file holds no intact trace."""
    try:
        return vars(parse_trace(read_text(path, remedy=REMEDY), source=str(path)))
    except ValueError:
        return None
