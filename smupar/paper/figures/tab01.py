"""Table 1: compares the rules that the code executes with the rules that the paper prints."""

from __future__ import annotations

from smupar.output.tables import aligned
from smupar.paper.figure import Claim, Figure, Rows
from smupar.rule_tables import table

# The paper's entries in the notation of `smupar rules`, where m_in is the paper's m_d.
PRINTED = {
    "embedding init variance": ("s^2", "s^2", "s^2"),
    "embedding LR (Adam family)": ("eta", "eta", "eta"),
    "embedding forward": ("x W", "alpha_in x W", "alpha_in x W"),
    "hidden init variance": ("s^2", "s^2 / m_in", "s^2 / (m_in m_rho)"),
    "hidden LR (Adam family)": ("eta", "eta / m_in", "eta / (m_in m_rho)"),
    "unembedding forward": ("x W^T", "alpha_out x W^T / m_in", "alpha_out x W^T / m_in"),
    "attention logits": ("q.k / sqrt(d_head)", "q.k / d_head", "q.k / d_head"),
}


def claim(rows: Rows = ()) -> Claim:
    executed = {row[0]: tuple(row[1:4]) for row in table()}
    different = [what for what, printed in PRINTED.items() if executed.get(what) != printed]
    text = f"{', '.join(different)} differ" if different else f"the code executes all {len(PRINTED)} rows that the paper prints"
    return Claim(not different, text)


FIGURE = Figure(
    title="The rules",
    shows="Init, learning rates and forward factors of SP, muP and SmuPar.",
    text=lambda: aligned(table()),
    claim=claim,
)
