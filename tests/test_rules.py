"""Table 1 entry by entry, against the printed table."""

import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from smupar import rule_tables, rules
from smupar.plan.facts import optimizers

# Fractional on purpose (1088 / 256), and all different, so that no entry can be right by using another multiplier.
M_IN, M_OUT, M_RHO = Fraction(17, 4), Fraction(21, 5), Fraction(1, 16)
MULTIPLIERS = (M_IN, M_OUT, M_RHO)

MUP_LIKE = ("mup", "smupar", "smupar-init-only", "smupar-lr-only")
EVERY = ("sp", *MUP_LIKE)

HIDDEN_INIT_VAR = {
    "sp": Fraction(1),
    "mup": Fraction(4, 17),
    "smupar": Fraction(64, 17),
    "smupar-init-only": Fraction(64, 17),
    "smupar-lr-only": Fraction(4, 17),
}
HIDDEN_LR_ADAM = {
    "sp": Fraction(1),
    "mup": Fraction(4, 17),
    "smupar": Fraction(64, 17),
    "smupar-init-only": Fraction(4, 17),
    "smupar-lr-only": Fraction(64, 17),
}
# 21/5 * 4/17, and 16 times that where the density correction enters.
HIDDEN_LR_SGD = {
    "sp": Fraction(1),
    "mup": Fraction(84, 85),
    "smupar": Fraction(1344, 85),
    "smupar-init-only": Fraction(84, 85),
    "smupar-lr-only": Fraction(1344, 85),
}


def test_rules_are_the_five_of_the_paper():
    assert tuple(rules.RULES) == (*EVERY, "smupar-aligned")
    assert [rule.title for rule in rules.TABLE_1] == ["SP", "muP", "SmuPar", "muP + SmuPar init only", "muP + SmuPar LR only"]


@pytest.mark.parametrize("name", EVERY)
def test_learning_rate_times_decay_is_the_same_for_every_role(name):
    rule = rules.get_rule(name)
    for family, powers in rule.lr.items():
        for role, power in powers.items():
            assert power.of(*MULTIPLIERS) * rule.decay(family, role).of(*MULTIPLIERS) == 1
    assert rule.decay("adam", "hidden").of(*MULTIPLIERS) == 1 / HIDDEN_LR_ADAM[name]


@pytest.mark.parametrize("name", EVERY)
def test_init_variance_matches_table_1(name):
    init_var = rules.get_rule(name).init_var
    assert init_var["embedding"].of(*MULTIPLIERS) == 1
    assert init_var["hidden"].of(*MULTIPLIERS) == HIDDEN_INIT_VAR[name]
    assert init_var["unembedding"].of(*MULTIPLIERS) == 1
    # Norms and biases keep the model's own init: an entry here would overwrite it.
    assert set(init_var) == {"embedding", "hidden", "unembedding", "router"}


@pytest.mark.parametrize("name", EVERY)
def test_lr_adam_matches_table_1(name):
    lr = rules.get_rule(name).lr["adam"]
    assert lr["hidden"].of(*MULTIPLIERS) == HIDDEN_LR_ADAM[name]
    assert {role: lr[role].of(*MULTIPLIERS) for role in ("embedding", "unembedding", "vector", "fixed")} == {
        "embedding": 1,
        "unembedding": 1,
        "vector": 1,
        "fixed": 1,
    }


# As an unembedding whose forward factor 1 / m is moved into the weight: std and Adam's rate are divided by m, and the rate of
# SGD, m for the unembedding, by m^2. m is 17/4, or 17/4 * 1/16 where the density correction enters a mask of the user's own.
@pytest.mark.parametrize(
    ("name", "init_var", "lr"),
    [
        ("sp", 1, 1),
        ("mup", Fraction(16, 289), Fraction(4, 17)),
        ("smupar", Fraction(4096, 289), Fraction(64, 17)),
        ("smupar-init-only", Fraction(4096, 289), Fraction(4, 17)),
        ("smupar-lr-only", Fraction(16, 289), Fraction(64, 17)),
    ],
)
def test_router_is_an_unembedding_without_a_forward_factor(name, init_var, lr):
    rule = rules.get_rule(name)
    assert rule.init_var["router"].of(*MULTIPLIERS) == init_var
    assert rule.lr["adam"]["router"].of(*MULTIPLIERS) == rule.lr["sgd"]["router"].of(*MULTIPLIERS) == lr
    assert rule.eps["router"].of(*MULTIPLIERS) == 1
    assert "router" not in rule.forward


@pytest.mark.parametrize("name", EVERY)
def test_lr_sgd_hidden_matches_appendix_d(name):
    assert rules.get_rule(name).lr["sgd"]["hidden"].of(*MULTIPLIERS) == HIDDEN_LR_SGD[name]


@pytest.mark.parametrize("name", MUP_LIKE)
def test_lr_sgd_of_tensors_with_one_scaling_dimension_is_its_multiplier(name):
    lr = rules.get_rule(name).lr["sgd"]
    assert lr["embedding"].of(*MULTIPLIERS) == Fraction(21, 5)
    assert lr["unembedding"].of(*MULTIPLIERS) == Fraction(17, 4)
    assert lr["vector"].of(*MULTIPLIERS) == Fraction(21, 5)
    assert lr["fixed"].of(*MULTIPLIERS) == 1


def test_lr_sgd_sp_is_flat():
    lr = rules.get_rule("sp").lr["sgd"]
    assert {role: lr[role].of(*MULTIPLIERS) for role in rules.ROLES} == dict.fromkeys(rules.ROLES, 1)


@pytest.mark.parametrize("name", EVERY)
def test_lr_muon_is_flat_and_for_hidden_weights_only(name):
    # Dividing by rho is wrong for Muon.
    lr = rules.get_rule(name).lr["muon"]
    assert set(lr) == {"hidden"}
    assert lr["hidden"].of(*MULTIPLIERS) == 1


@pytest.mark.parametrize("name", MUP_LIKE)
def test_forward_mup_like_divides_the_logits_by_width(name):
    rule = rules.get_rule(name)
    assert rule.has_alphas
    assert rule.forward["embedding"].of(*MULTIPLIERS) == 1
    assert rule.forward["unembedding"].of(*MULTIPLIERS) == Fraction(4, 17)


def test_forward_sp_has_no_factors():
    rule = rules.get_rule("sp")
    assert not rule.has_alphas
    assert rule.forward["embedding"].of(*MULTIPLIERS) == 1
    assert rule.forward["unembedding"].of(*MULTIPLIERS) == 1


@pytest.mark.parametrize("name", MUP_LIKE)
def test_attention_mup_like_divides_by_head_dim(name):
    assert rules.get_rule(name).attention_scale(64) == 1 / 64
    assert rules.get_rule(name).attention_scale(80) == 1 / 80


def test_attention_sp_divides_by_root_of_head_dim():
    assert rules.get_rule("sp").attention_scale(64) == 1 / 8


@pytest.mark.parametrize("name", MUP_LIKE)
def test_eps_mup_like_follows_the_gradients_over_width_and_not_density(name):
    eps = rules.get_rule(name).eps
    assert eps["hidden"].of(*MULTIPLIERS) == Fraction(4, 17)
    # The logits' 1 / m_d is in the gradient of everything before them; the readout bias comes after it.
    assert eps["embedding"].of(*MULTIPLIERS) == Fraction(5, 21)
    assert eps["unembedding"].of(*MULTIPLIERS) == Fraction(4, 17)
    assert eps["vector"].of(*MULTIPLIERS) == Fraction(5, 21)
    assert eps["fixed"].of(*MULTIPLIERS) == 1


def test_eps_sp_is_flat():
    eps = rules.get_rule("sp").eps
    assert {role: eps[role].of(*MULTIPLIERS) for role in rules.ROLES} == dict.fromkeys(rules.ROLES, 1)


def test_smupar_at_base_density_equals_mup_entry_by_entry():
    mup, smupar = rules.get_rule("mup"), rules.get_rule("smupar")
    dense = (M_IN, M_OUT, Fraction(1))
    for role in mup.init_var:
        assert smupar.init_var[role].of(*dense) == mup.init_var[role].of(*dense)
    for family in mup.lr:
        for role in mup.lr[family]:
            assert smupar.lr[family][role].of(*dense) == mup.lr[family][role].of(*dense)
    assert smupar.forward == mup.forward


def test_every_rule_at_base_width_and_density_is_one():
    for rule in rules.RULES.values():
        powers = [*rule.init_var.values(), *rule.forward.values(), *rule.eps.values()]
        powers += [power for family in rule.lr.values() for power in family.values()]
        assert {power.of(Fraction(1), Fraction(1), Fraction(1)) for power in powers} == {1}


# Words


def test_power_times_reads_as_a_formula():
    assert rules.Power().times("eta") == "eta"
    assert rules.Power(m_out=1).times("eta") == "eta m_out"
    assert rules.Power(m_in=-1).times("eta") == "eta / m_in"
    assert rules.Power(m_in=-1, m_out=1, m_rho=-1).times("eta") == "eta m_out / (m_in m_rho)"
    assert rules.Power(m_in=-2).times("s^2") == "s^2 / m_in^2"


def test_table_words_are_the_printed_table():
    header, *rows = rule_tables.table()
    assert header[:4] == ["what", "SP", "muP", "SmuPar"]
    printed = {row[0]: row[1:4] for row in rows if row[-1] == "Table 1"}
    # The seven lines of Table 1; its m_d is the fan-in's multiplier everywhere.
    assert printed == {
        "embedding init variance": ["s^2", "s^2", "s^2"],
        "embedding LR (Adam family)": ["eta", "eta", "eta"],
        "embedding forward": ["x W", "alpha_in x W", "alpha_in x W"],
        "hidden init variance": ["s^2", "s^2 / m_in", "s^2 / (m_in m_rho)"],
        "hidden LR (Adam family)": ["eta", "eta / m_in", "eta / (m_in m_rho)"],
        "unembedding forward": ["x W^T", "alpha_out x W^T / m_in", "alpha_out x W^T / m_in"],
        "attention logits": ["q.k / sqrt(d_head)", "q.k / d_head", "q.k / d_head"],
    }
    assert {len(row) for row in rows} == {len(header)}


def test_formula_is_mathematics_that_katex_and_github_know():
    assert rule_tables.formula("s^2 / (m_in m_rho)") == r"$\sigma^2 / (m_\text{in} m_\rho)$"
    assert rule_tables.formula("lambda sqrt(m_depth)") == r"$\lambda \sqrt{m_\text{depth}}$"
    assert rule_tables.formula("alpha_out x W^T / m_in") == r"$\alpha_\text{out} x W^\top / m_\text{in}$"
    assert rule_tables.formula("q.k / d_head") == r"$q \cdot k / d_\text{head}$"
    known = r"\\(sigma|eta|lambda|epsilon|alpha|kappa|rho|top|cdot|sqrt|frac|qquad)(?![A-Za-z])|\\text\{\w+\}"
    formulas = re.findall(r"\$+([^$]+)\$+", rule_tables.markdown())
    assert len(formulas) > 100
    assert [written for written in formulas if re.search(r"[A-Za-z]{2}|\\", re.sub(known, "", written))] == []


def test_docs_page_equals_the_generated_one():
    page = Path(__file__).parents[1] / "docs" / "rules.md"
    assert page.read_text(encoding="utf-8") == rule_tables.markdown(), "stale: run `make docs`"


# Optimizers


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Lion", "adamw"])
def test_family_of_normalised_updates_is_adam(optimizer):
    assert optimizers.family_of(optimizer) == "adam"


def test_family_of_sgd_and_muon_is_their_own():
    assert optimizers.family_of("SGD") == "sgd"
    assert optimizers.family_of("Muon") == "muon"


def test_family_of_torch_classes_is_known_or_refused():
    # Whatever torch ships is either in a family or refused with words; no class may fail in another way.
    known = set()
    for name in torch.optim.__all__:
        if name in ("Optimizer", "lr_scheduler", "swa_utils"):
            continue
        try:
            optimizers.family_of(name)
            known.add(name)
        except ValueError:
            pass
    assert known == {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "SGD", "Muon"}


@pytest.mark.parametrize("name", ["adafactor", "Adafactor"])
def test_adafactor_is_refused_with_measured_updates_as_remedy(name):
    with pytest.raises(ValueError, match="measured updates"):
        optimizers.family_of(name)


def test_unknown_optimizer_error_names_it_and_the_known_ones():
    with pytest.raises(ValueError, match=r"'Shampoo'.*adamw.*sgd"):
        optimizers.family_of("Shampoo")


@pytest.mark.parametrize("m", [0.25, 1, 8])
def test_two_terms_keep_the_effect_of_an_update_whatever_its_parts(m):
    n0 = 64
    for kappa in (0, 1, 30, 1e12):
        effect = {n: (n * (n + kappa)) ** 0.5 for n in (n0, m * n0)}  # of an update of equal size for each of n weights
        assert rules.two_terms(m, n0, kappa) / m * effect[m * n0] == pytest.approx(effect[n0])
    assert rules.two_terms(m, n0, 0) == 1  # all agree: SmuPar's factor, 1 / m
    assert rules.two_terms(m, n0, 1e15) / m == pytest.approx(m**-0.5)  # none agree
    assert rules.two_terms(1, n0, 7) == 1


def test_aligned_rule_is_smupar_but_for_hidden_rates_of_adam():
    ours, theirs = rules.get_rule("smupar-aligned"), rules.get_rule("smupar")
    assert (ours.init_var, ours.lr, ours.forward, ours.eps, ours.depth) == (
        theirs.init_var,
        theirs.lr,
        theirs.forward,
        theirs.eps,
        theirs.depth,
    )
    assert ours.two_terms == ("adam",)
    assert not any(rule.two_terms for rule in rules.TABLE_1)


def test_unknown_rule_error_lists_the_rules():
    with pytest.raises(ValueError, match=r"'mu_p'.*sp, mup, smupar, smupar-init-only, smupar-lr-only"):
        rules.get_rule("mu_p")


def test_rules_import_nothing_heavy():
    # `smupar --help` and `smupar rules` must not wait for torch.
    code = "import sys; before = set(sys.modules); import smupar.rules; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert "smupar" in packages
    assert packages - {"smupar"} <= set(sys.stdlib_module_names)


def test_rule_in_other_letters_is_named():
    with pytest.raises(ValueError, match=r"unknown rule 'muP': write 'mup'$"):
        rules.get_rule("muP")
