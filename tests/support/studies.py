"""What a study leaves in its folder, to compare two studies to the bit."""

import json

from smupar.output.json_files import SEAL


def ends_of(study):
    """What the runs of a study have left, by their ids: summary, rows and trace, without times and speeds."""
    ends = {}
    for folder in study.runs.iterdir():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        for name in ("seconds", "tokens_per_second", "folder", SEAL):
            summary.pop(name, None)
        trace = folder / "trace.json"
        ends[folder.name] = (
            summary,
            [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows],
            trace.read_bytes() if trace.exists() else None,
        )
    return ends


def tables_of(study):
    """The files of a study that its runs decide."""
    names = ("table.csv", "table.json", "best.json")
    return {name: (study.folder / name).read_bytes() for name in names if (study.folder / name).exists()}
