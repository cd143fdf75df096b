"""Table 1 and the table of depth rules as text: for a terminal, and for the page docs/rules.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from smupar.rules import DEPTH_RULES, MUP, SMUPAR, SMUPAR_ALIGNED, SP, TABLE_1, DepthRule, Rule


def table() -> list[list[str]]:
    """Table 1 as text. The first row is the header: the quantity, one column for each rule, and the source."""

    def init(role: str) -> Callable[[Rule], str]:
        return lambda rule: rule.init_var[role].times("s^2")

    def lr(family: str, role: str) -> Callable[[Rule], str]:
        return lambda rule: rule.lr[family][role].times("eta")

    def decay(family: str, role: str) -> Callable[[Rule], str]:
        return lambda rule: rule.decay(family, role).times("lambda")

    def forward(role: str, alpha: str, product: str) -> Callable[[Rule], str]:
        return lambda rule: rule.forward[role].times(f"{alpha} {product}" if rule.has_alphas else product)

    def attention(rule: Rule) -> str:
        return "q.k / d_head" if rule.attention_exponent == -1 else "q.k / sqrt(d_head)"

    sgd_vector = "muP; not printed in the paper"
    tuned = "ours: LR times decay stays as tuned"
    router = "ours: as muP's output weight, with its forward factor folded in"
    lines: list[tuple[str, Callable[[Rule], str], str]] = [
        ("embedding init variance", init("embedding"), "Table 1"),
        ("embedding LR (Adam family)", lr("adam", "embedding"), "Table 1"),
        ("embedding LR (SGD family)", lr("sgd", "embedding"), sgd_vector),
        ("embedding decay (Adam family)", decay("adam", "embedding"), tuned),
        ("embedding forward", forward("embedding", "alpha_in", "x W"), "Table 1"),
        ("hidden init variance", init("hidden"), "Table 1"),
        ("hidden LR (Adam family)", lr("adam", "hidden"), "Table 1"),
        ("hidden LR (SGD family)", lr("sgd", "hidden"), "App. D, and muP where m_out differs from m_in"),
        ("hidden LR (Muon)", lr("muon", "hidden"), "ours: Muon sizes its own update"),
        ("hidden decay (Adam family)", decay("adam", "hidden"), tuned),
        ("hidden decay (SGD family)", decay("sgd", "hidden"), tuned),
        ("unembedding init variance", init("unembedding"), "as the tied embedding"),
        ("unembedding LR (Adam family)", lr("adam", "unembedding"), "as the tied embedding"),
        ("unembedding LR (SGD family)", lr("sgd", "unembedding"), sgd_vector),
        ("unembedding decay (Adam family)", decay("adam", "unembedding"), tuned),
        ("unembedding forward", forward("unembedding", "alpha_out", "x W^T"), "Table 1"),
        ("router init variance", init("router"), router),
        ("router LR (Adam family)", lr("adam", "router"), router),
        ("router LR (SGD family)", lr("sgd", "router"), router),
        ("router decay (Adam family)", decay("adam", "router"), tuned),
        ("norms, biases LR (Adam family)", lr("adam", "vector"), "matches muP"),
        ("norms, biases LR (SGD family)", lr("sgd", "vector"), sgd_vector),
        ("norms, biases decay (Adam family)", decay("adam", "vector"), tuned),
        ("tensors that do not scale, LR", lr("adam", "fixed"), "muP"),
        ("attention logits", attention, "Table 1"),
    ]
    rules = TABLE_1
    header = ["what", *(rule.title for rule in rules), "source"]
    return [header, *([quantity, *map(entry, rules), source] for quantity, entry, source in lines)]


def short_table() -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(header, rows by role) of Table 1 for Adam's family under SP, muP and SmuPar, which fits into a terminal."""
    (_, *titles, _), *rows = table()
    kept = [titles.index(rule.title) for rule in (SP, MUP, SMUPAR)]
    rows_by_role = []
    for name, *cells in rows:
        if "(SGD" not in name and "(Muon" not in name:
            role, quantity = name.removesuffix(" (Adam family)").removesuffix(" variance").rsplit(maxsplit=1)
            rows_by_role.append((role.rstrip(","), [quantity, *(cells[column] for column in kept)]))
    return ["", *(titles[column] for column in kept)], rows_by_role


def depth_table() -> list[list[str]]:
    """The depth rules as text. The first row is the header: the quantity, one column for each depth rule, and the source."""

    def power(symbol: str, exponent: Fraction) -> str:
        if exponent == 0:
            return symbol
        size = "m_depth" if abs(exponent) == 1 else "sqrt(m_depth)"
        return f"{symbol} / {size}" if exponent < 0 else f"{symbol} {size}"

    printed = "CompleteP's Table 1"
    lines: list[tuple[str, Callable[[DepthRule], str], str]] = [
        ("residual branch, forward", lambda rule: power("x + F(x)", rule.branch), printed),
        ("weights, norms, biases in blocks: LR (Adam family)", lambda rule: power("eta", rule.lr("adam")), printed),
        ("the same: LR (Muon)", lambda rule: power("eta", rule.lr("muon")), "ours: as Adam"),
        ("the same: LR (SGD family)", lambda rule: power("eta", rule.lr("sgd")), "ours: derived"),
        (
            "the same: decay (Adam family)",
            lambda rule: power("lambda", -rule.lr("adam")),
            "ours: LR times decay stays as tuned",
        ),
        ("the same: Adam's epsilon, where it scales", lambda rule: power("eps", rule.eps), printed),
    ]
    header = ["inside residual blocks, beside the factors above", *(rule.title for rule in DEPTH_RULES.values()), "source"]
    return [header, *([quantity, *map(entry, DEPTH_RULES.values()), source] for quantity, entry, source in lines)]


# How the page writes the letters of the tables. Other letters stay as they are.
_LATEX = {
    "s": r"\sigma",
    "eta": r"\eta",
    "lambda": r"\lambda",
    "eps": r"\epsilon",
    "alpha_in": r"\alpha_\text{in}",
    "alpha_out": r"\alpha_\text{out}",
    "m_in": r"m_\text{in}",
    "m_out": r"m_\text{out}",
    "m_rho": r"m_\rho",
    "m_depth": r"m_\text{depth}",
    "d_head": r"d_\text{head}",
    "T": r"\top",
}


def formula(text: str) -> str:
    """A cell of a table, such as ``eta / sqrt(m_depth)``, as mathematics that GitHub and the site render."""
    roots = re.sub(r"sqrt\((\w+)\)", r"\\sqrt{\1}", text).replace(".", r" \cdot ")
    return "$" + re.sub(r"[A-Za-z]\w*", lambda word: _LATEX.get(word[0], word[0]), roots) + "$"


def _as_page(rows: list[list[str]]) -> list[str]:
    """A table of rules in Markdown. The first and the last column hold words, and the others hold formulas."""
    header, *body = rows
    lines = []
    for quantity, *cells, source in body:
        source = re.sub(r"\bm_\w+", lambda name: formula(name[0]), source)
        lines.append("| " + " | ".join([quantity, *map(formula, cells), source]) + " |")
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *lines]


_INIT_OF_SP = (
    "## Which init SP has",
    "",
    r"SP has no factors: $\sigma$ and $\eta$ are the same at every width and density. Which $\sigma$ that is depends on",
    "where you meet SP:",
    "",
    "| where | SP's init std |",
    "|---|---|",
    '| `parameterize(..., rule="sp", init_std=0.02)` | this number, at every width |',
    '| `parameterize(..., rule="sp")`, so with `init_std="fan_in"` | 1 / sqrt(base fan-in) of each tensor, at every width. '
    "Torch's own init follows the model's fan-in instead, so the plan of a wider model has a note |",
    "| `smupar plan`, `train`, `sweep` and `check` | `--init-std` (0.087 unless a preset has its own), at every width |",
    "| `smupar transfer`, and figures of the paper that do not print another | `--init-std` divided by the root of the "
    "width over the base width, so that it fits each width |",
    "",
    "Transfer studies follow the paper, whose Table 4 gives SP 0.087 / sqrt(16) at width 4096 and base width 256. Dense SP",
    "then starts as muP's hidden weights do, as a model would that was initialised by its fan-in. So a best learning rate",
    "that moves under SP was not moved by an init that is too large for the width.",
)


def markdown() -> str:
    """The page docs/rules.md, generated so that it cannot drift from the code."""
    defaults = ", ".join(f"{rule.title}: {DEPTH_RULES[rule.depth].title}" for rule in (SP, MUP, SMUPAR))
    lines = [
        "# The rules",
        "",
        "`smupar rules --markdown` generates this page from `smupar/rules.py`. A test fails if they differ.",
        "",
        r"$\sigma$ is the base init std, $\eta$ the base learning rate, $\lambda$ the base weight decay. $m_\text{in}$ and",
        r"$m_\text{out}$ are the width multipliers of a tensor's own fan-in and fan-out (the paper's $m_d$ where both are",
        r"equal), and $m_\rho$ is its density over the base density. In a terminal `smupar rules` writes them as `s`, `eta`,",
        "`lambda`, `m_in`, `m_out` and `m_rho`.",
        "",
        "Init variances are those of the kept weights. Embeddings and vectors scale in one dimension, with multiplier",
        r"$m_\text{out}$. The unembedding scales in one too, with multiplier $m_\text{in}$. Norms, biases and tensors that do",
        "not scale keep the model's own init.",
        "",
        "A router writes a fixed number of logits. Their softmax, sigmoid or largest entries decide how the outputs of other",
        "layers are weighted or which of them are chosen, as in mixtures of experts. A router is an output weight inside the",
        r"network (arXiv 2508.09752). A hidden weight's init variance, $1 / m_\text{in}$, would be too large for it. Gradients",
        r"that pass through the router would then outgrow all others like $\sqrt{m_\text{in}}$. They change the layers before",
        r"it, so its logits would change too fast as well. With Table 1's numbers the initial logits shrink like",
        r"$1 / \sqrt{m_\text{in}}$, as the readout's do, and each update moves them equally far at every width. A router stays",
        r"dense, so that $m_\rho$ is 1, unless a density or a mask names it.",
        "",
        *_as_page(table()),
        "",
        *_INIT_OF_SP,
        "",
        "## Two terms",
        "",
        f"The rule `{SMUPAR_ALIGNED.name}` is ours. It is SmuPar, with another learning rate (Adam family) for hidden weights:",
        "",
        "$$",
        r"\frac{\eta}{m} \sqrt{\frac{N_0 + \kappa}{N_0 + \kappa / m}} \qquad\text{where}\qquad m = m_\text{in} m_\rho",
        "$$",
        "",
        r"and $N_0$ is the number of kept weights per neuron of that layer in the base model. An update moves a neuron's",
        "output in two parts: one on which the neuron's weights agree, and one on which they do not. For a neuron of",
        r"$\kappa$ weights both parts are equally large. `smupar.observe` measures $\kappa$ in the base model",
        r"(`observation.kappa()`). If all weights agree, the factor on $\eta$ is SmuPar's $1 / m$; if none do, it is",
        r"$1 / \sqrt{m}$. The decay is multiplied by the inverse, as for all rules. Whether this rule is better than SmuPar",
        "has not been measured.",
        "",
        "## Depth",
        "",
        r"$m_\text{depth}$ is the number of residual blocks over the base model's. A residual branch $F$ is what a block adds",
        f"to its input. Unless you name another depth rule, the rules have these ({defaults}).",
        "",
        *_as_page(depth_table()),
    ]
    return "\n".join(lines) + "\n"
