"""The picture of a trace."""

from __future__ import annotations

from os import PathLike

from smupar.output.pictures import new_figure
from smupar.plan.settings import layer_glob
from smupar.updates.trace import Trace


def plot(target: Trace, proxy: Trace | None, path: str | PathLike[str]) -> None:
    kinds = list(dict.fromkeys(layer_glob(name) for name in target.effects))
    columns = min(3, len(kinds))
    num_rows = -(-len(kinds) // columns)
    figure = new_figure(figsize=(4.2 * columns, 3 * num_rows))
    axes = figure.subplots(num_rows, columns, squeeze=False, sharex=True)
    for panel, kind in zip(axes.flat, kinds, strict=False):
        for trace, colour, label in ((proxy, "0.45", "proxy"), (target, "#c2410c", "target" if proxy else "effect")):
            names = [name for name in trace.effects if layer_glob(name) == kind] if trace else []
            for number, name in enumerate(names):
                assert trace is not None
                shares = [step / max(1, trace.num_steps) for step in trace.at]
                panel.plot(shares, trace.effects[name], color=colour, lw=1, alpha=0.8, label=None if number else label)
        panel.set_title(kind, fontsize=9)
        panel.set_yscale("log")
        panel.grid(alpha=0.25)
    for panel in axes.flat[len(kinds) :]:
        panel.set_visible(False)
    for panel in axes.flat[max(0, len(kinds) - columns) : len(kinds)]:  # the lowest of each column
        panel.set_xlabel("share of the run")
        panel.tick_params(labelbottom=True)
    for panel in axes[:, 0]:
        panel.set_ylabel("RMS(X dW) / base LR")
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
