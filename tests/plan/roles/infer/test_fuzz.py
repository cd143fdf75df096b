"""Random models whose right numbers are known by construction: a plan has them, or it asks."""

import math
from fnmatch import fnmatchcase

import pytest

import smupar
from tests.plan.roles.infer.grammar import EXAMPLE, Model
from tests.plan.roles.nets import suggested

WIDTH, BASE, ALPHA = 32, 8, 3.0
REMINDER = {"embedding": "input_factor", "unembedding": "output_factor"}  # of what no hook can scale
SETTINGS = {"density": 0.5, "alpha_input": ALPHA, "alpha_output": ALPHA}


def ratio(shape, base_shape, dims):
    return math.prod(shape[dim] / base_shape[dim] for dim in dims)


def expected(truth, shape, base_shape):
    """(role, init std, LR for Adam, LR for SGD), from Table 1 by hand; hidden weights keep half of their entries."""
    m_in, m_out = ratio(shape, base_shape, truth.in_dims), ratio(shape, base_shape, truth.out_dims)
    fan_in = math.prod(base_shape[dim] for dim in truth.in_dims)
    if truth.role == "hidden":
        rho = (math.prod(shape) // 2) / math.prod(shape)
        return "hidden", (fan_in * m_in * rho) ** -0.5, 1 / (m_in * rho), m_out / (m_in * rho)
    if truth.role == "embedding":
        tied = math.prod(base_shape[dim] for dim in truth.out_dims)
        return "embedding", (tied if truth.is_tied else 1 if truth.is_lookup else fan_in) ** -0.5, 1.0, m_out
    if truth.role == "unembedding":
        return "unembedding", fan_in**-0.5, 1.0, m_in
    if truth.role == "router":
        return "router", fan_in**-0.5 / m_in, 1 / m_in, 1 / m_in
    return truth.role, None, 1.0, ratio(shape, base_shape, range(len(shape)))


def wrong(plan, model, base, answered=()):
    """The weights whose numbers are not those of Table 1. A user who calls a raw tensor an embedding cannot say its fan-in."""
    shapes = {name: tuple(parameter.shape) for name, parameter in base.named_parameters()}
    found = []
    for name, truth in model.truth.items():
        row = plan[name]
        role, std, adam, sgd = expected(truth, row.shape, shapes[name])
        same_rates = (row.lr_factors["adam"], row.lr_factors["sgd"]) == pytest.approx((adam, sgd))
        unsaid = name in answered and truth.role == "embedding"
        same_std = unsaid or row.init_std == (None if std is None else pytest.approx(std))
        reached = bool(row.forward) or role not in REMINDER or REMINDER[role] in plan.pending
        if not (row.role == role and same_rates and same_std and reached):
            found.append((name, truth, row))
    if model.by_hand and "output_factor" not in plan.pending:
        found.append("output_factor")
    return found


def question(model, base, settings):
    """A plan, or the question that is raised instead."""
    try:
        return smupar.make_plan(model, base=base, **settings), None
    except ValueError as error:
        return None, error


def outcome(seed, example=None):
    """One of "right" and "asks", or the weights that got wrong numbers. Questions are answered truly, and what is not asked for
    must be right."""
    model, base = Model(WIDTH, seed), Model(BASE, seed)
    answers = {}
    while True:
        plan, error = question(model, base, {**SETTINGS, "roles": answers, "example": example})
        if plan is not None:
            return wrong(plan, model, base, answers) or ("asks" if answers else "right")
        names = [name for name in model.truth for glob in suggested(error) if fnmatchcase(name, glob)]
        assert set(names) - answers.keys(), f"seed {seed}: asked again: {error}"
        if any(model.truth[name].role == "ask" for name in names):
            return "asks"
        answers |= {name: model.truth[name].answer for name in names}


def check(seeds, *, most_questions):
    """Counts questions over many models with and without an example; no number may be wrong in silence."""
    asked = {}
    for example in (None, EXAMPLE):
        outcomes = {seed: outcome(seed, example) for seed in seeds}
        silently = {seed: found for seed, found in outcomes.items() if isinstance(found, list)}
        assert not silently, f"wrong numbers in silence, {'with' if example else 'without'} an example: {silently}"
        asked[example is not None] = sum(found == "asks" for found in outcomes.values()) / len(outcomes)
    assert asked[True] <= most_questions < asked[False]


def test_random_models_get_right_numbers_or_a_question():
    check(range(60), most_questions=0.15)


@pytest.mark.slow
def test_a_thousand_random_models_get_right_numbers_or_a_question():
    check(range(1000), most_questions=0.15)
