"""Plans as data: read, written, printed, compared, and made without touching the model."""

import copy
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import smupar
from smupar.plan.globs import layer_glob
from tests.plan.nets import ALPHA_INPUT, MLP, SIGMA, Blocks, Conv, attention_plan, numbers, own_mask, plan_mlp
from tests.support.models import on_meta


def some_plans():
    yield plan_mlp(1088, 256, density=0.1, base_density=0.3, init_std=SIGMA, alpha_input=ALPHA_INPUT, seed=7)
    yield plan_mlp(64, 32, pattern="neuron", density=3 / 8)
    yield plan_mlp(64, 16, density=0.3, pattern="bernoulli", rule="smupar-lr-only")
    yield plan_mlp(64, 16, masks={"fc1.weight": own_mask(17)})
    yield attention_plan(density=1 / 3)
    yield smupar.make_plan(on_meta(Conv, 33), base=on_meta(Conv, 10), density=smupar.erk(0.1))


def test_json_round_trip_is_equal():
    for plan in some_plans():
        again = smupar.Plan.from_json(plan.to_json())
        assert again == plan
        assert numbers(again) == numbers(plan)
        assert again.diff(plan) == []
        assert str(again) == str(plan)
        assert again.to_json() == plan.to_json()


def test_json_round_trip_draws_the_same_masks():
    for pattern in ("random", "neuron"):
        plan = plan_mlp(64, 32, pattern=pattern, density=3 / 8, seed=2)
        again = smupar.Plan.from_json(plan.to_json())
        assert torch.equal(again.draw_mask("fc1.weight"), plan.draw_mask("fc1.weight"))


def test_json_round_trip_keeps_what_is_settled():
    plan = attention_plan()
    plan.settle("output_factor")
    again = smupar.Plan.from_json(plan.to_json())
    assert set(again.pending) == {"attention_scale"}


def test_json_round_trip_keeps_the_kinds_of_notes():
    with pytest.warns(smupar.PlanWarning):
        plan = attention_plan(density=1 / 16)
    again = smupar.Plan.from_json(plan.to_json())
    assert again.notes == plan.notes
    assert [note.kind for note in again.notes] == ["thin"]


def test_plan_of_the_first_version_loads():
    plan = smupar.Plan.from_json((Path(__file__).parents[1] / "fixtures" / "older" / "plan.json").read_text())
    assert len(plan) == 8
    assert plan["attention.qkv.weight"].density == Fraction(1, 4)
    assert int(plan.draw_mask("attention.qkv.weight").sum()) == 768
    assert plan["embed.weight"].forward == (("embed", 2.0),)
    assert [str(note)[:43] for note in plan.notes] == ["2 hidden weights keep fewer than 16 weights"]
    assert "plan.settle('attention_scale')" in plan.pending["attention_scale"]  # what it says to do can be done
    plan.settle("attention_scale")
    assert smupar.Plan.from_json(plan.to_json()) == plan


def without_rows():
    plan = plan_mlp(64, 16).as_json
    del plan["rows"]
    return json.dumps(plan)


@pytest.mark.parametrize("text", ["", "not json", "[]", "3", "{}", '{"format": "smupar-plan/0"}', without_rows()])
def test_from_json_of_something_else_raises(text):
    with pytest.raises(ValueError):
        smupar.Plan.from_json(text)


def test_edited_plan_is_read_with_a_note():
    text = plan_mlp(64, 16).to_json().replace('"adam": 0.25', '"adam": 0.75', 1)
    with pytest.warns(UserWarning, match=r"^plan\.json has changed since smupar wrote it"):
        assert smupar.Plan.from_json(text, source="plan.json").diff(plan_mlp(64, 16)) != []


def test_from_json_of_another_format_says_what_it_wants():
    with pytest.raises(ValueError, match=r"not a plan in format 'smupar-plan/1'"):
        smupar.Plan.from_json('{"format": "smupar-plan/0", "rows": []}')


def test_plan_is_a_collection_of_rows_by_name():
    plan = plan_mlp(64, 16)
    names = [name for name, _ in MLP(4).named_parameters()]
    assert [row.name for row in plan] == names
    assert len(plan) == 8
    assert "fc1.weight" in plan
    assert "fc9.weight" not in plan
    assert plan["fc1.weight"].shape == (64, 64)


def test_diff_of_equal_plans_is_empty():
    assert plan_mlp(64, 16, density=0.25).diff(plan_mlp(64, 16, density=0.25)) == []


def test_diff_names_what_differs():
    lines = plan_mlp(64, 16, density=0.25, seed=1).diff(plan_mlp(64, 16, density={"fc2.weight": 0.5, "*": 0.25}, seed=2))
    assert lines[0] == "seed: 1 -> 2"
    assert "fc2.weight: density 0.25 -> 0.5" in lines
    assert "fc2.weight: num_kept 1024 -> 2048" in lines
    assert "fc2.weight: init_std 0.25 -> 0.176777" in lines
    assert "fc2.weight: lr_factors adam 1, sgd 4, muon 1 -> adam 0.5, sgd 2, muon 1" in lines
    assert not [line for line in lines if line.startswith(("fc1", "embed", "head"))]


def test_diff_of_rules_and_alphas_is_listed():
    lines = plan_mlp(64, 16, rule="mup").diff(plan_mlp(64, 16, alpha_output=3.0))
    assert lines == [
        "rule: mup -> smupar",
        "alpha_output: 1.0 -> 3.0",
        "output_factor: 0.25 -> 0.75",
        "head.weight: forward (('head', 0.25),) -> (('head', 0.75),)",
    ]


def test_diff_of_depths_names_the_extra_parameters():
    shallow = smupar.make_plan(on_meta(Blocks, 64, 1), base=on_meta(Blocks, 16, 1))
    deep = smupar.make_plan(on_meta(Blocks, 64, 2), base=on_meta(Blocks, 16, 2))
    extra = [f"blocks.1.{leaf}" for leaf in ("norm.weight", "norm.bias", "fc.weight", "fc.bias")]
    assert shallow.diff(deep) == [f"{name}: only in the second" for name in extra]
    assert deep.diff(shallow) == [f"{name}: only in the first" for name in extra]


COLUMNS = [
    "parameter",
    "role",
    "shape",
    "density",
    "m_in",
    "m_out",
    "m_rho",
    "init std",
    "LR Adam",
    "LR SGD",
    "decay Adam",
    "forward",
]


def printed_cells(plan):
    """The table of a printed plan, cut where its header's columns start."""
    lines = str(plan).splitlines()
    header = lines[1]
    starts = [header.index(column) for column in COLUMNS]
    assert starts == sorted(starts)
    table = []
    for line in lines[2:]:
        if line.startswith(("TO DO", "note:")):
            break
        assert all(line[start - 1 : start] in ("", " ") for start in starts[1:]), "a cell runs into the next column"
        table.append([line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)])
    return table


def test_print_has_every_number_of_a_row():
    table = printed_cells(plan_mlp(1088, 256, density=1 / 16, init_std=SIGMA, alpha_input=2.0))
    assert table == [
        ["embed.weight", "embedding", "1088x7", "1", "1", "4.25", "1", "0.086656", "1", "4.25", "1", "2"],
        ["embed.bias", "vector", "1088", "1", "1", "4.25", "1", "kept", "1", "4.25", "1", ""],
        ["fc1.weight", "hidden", "1088x1088", "0.0625", "4.25", "4.25", "0.0625", "0.168137", "3.76471", "16", "0.265625", ""],
        ["fc1.bias", "vector", "1088", "1", "1", "4.25", "1", "kept x 2.06", "1", "4.25", "1", ""],
        ["fc2.weight", "hidden", "1088x1088", "0.0625", "4.25", "4.25", "0.0625", "0.168137", "3.76471", "16", "0.265625", ""],
        ["fc2.bias", "vector", "1088", "1", "1", "4.25", "1", "kept x 2.06", "1", "4.25", "1", ""],
        ["head.weight", "unembedding", "5x1088", "1", "4.25", "1", "1", "0.086656", "1", "4.25", "1", "0.235294"],
        ["head.bias", "fixed", "5", "1", "1", "1", "1", "kept x 2.06", "1", "1", "1", ""],
    ]


def test_print_starts_with_the_settings_and_the_sizes():
    plan = plan_mlp(100, 50, density=0.25, base_density=0.5, pattern="fan_in", seed=3)
    # 700 + 100 + 2 * (10,000 + 100) + 500 + 5; 2 * 7,500 of them dropped.
    assert str(plan).splitlines()[0] == ("rule SmuPar, pattern fan_in, base density 0.5, seed 3; 21,505 parameters, 6,505 kept")


@pytest.mark.parametrize("density", [1.0, 0.25, {"blocks.1.*": 0.25, "blocks.3.*": 0.25, "blocks.10.*": 0.5}])
def test_print_shows_every_parameter_once(density):
    # 11 blocks, so that numbers have one and two digits.
    plan = smupar.make_plan(on_meta(Blocks, 64, 11), base=on_meta(Blocks, 16, 11), density=density)
    shown = 0
    for name, *_ in printed_cells(plan):
        folded = re.fullmatch(r"(\S+) \((\d+)x\)", name)
        if folded:
            assert int(folded[2]) == sum(layer_glob(row.name) == folded[1] for row in plan) > 1
            shown += int(folded[2])
        else:
            assert name in plan
            shown += 1
    assert shown == len(plan) == 46


def test_print_folds_equal_blocks():
    plan = smupar.make_plan(on_meta(Blocks, 64, 11), base=on_meta(Blocks, 16, 11), density=0.5)
    assert [cells[0] for cells in printed_cells(plan)] == [
        "embed.weight",
        "blocks.*.norm.weight (11x)",
        "blocks.*.norm.bias (11x)",
        "blocks.*.fc.weight (11x)",
        "blocks.*.fc.bias (11x)",
        "head.weight",
    ]


def test_print_names_every_layer_where_one_differs():
    # Folding those that are alike would not say which of them is meant.
    plan = smupar.make_plan(on_meta(Blocks, 64), base=on_meta(Blocks, 16), density={"blocks.1.*": 0.5})
    densities = {cells[0]: cells[3] for cells in printed_cells(plan) if "fc.weight" in cells[0]}
    assert densities == {"blocks.0.fc.weight": "1", "blocks.1.fc.weight": "0.5", "blocks.2.fc.weight": "1"}


def test_print_of_a_tied_weight_has_both_factors():
    def tied(width):
        model = on_meta(Blocks, width)
        model.head.weight = model.embed.weight
        return model

    plan = smupar.make_plan(tied(64), base=tied(16), alpha_input=2.0)
    assert plan["embed.weight"].forward == (("embed", 2.0), ("head", 0.25))
    assert printed_cells(plan)[0][-1] == "embed 2, head 0.25"


def test_print_ends_with_what_is_pending_and_noted():
    with pytest.warns(smupar.PlanWarning):
        plan = attention_plan(density=1 / 16)
    ends = [line.partition(":")[0] for line in str(plan).splitlines()[-3:]]
    assert ends == ["TO DO attention_scale", "TO DO output_factor", "note"]
    plan.settle("output_factor")
    assert "TO DO output_factor" not in str(plan)


def test_make_plan_leaves_the_model_untouched():
    torch.manual_seed(0)
    model, base = MLP(64), MLP(16)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    for pattern in ("random", "neuron"):
        smupar.make_plan(model, base=base, density=0.25, pattern=pattern, alpha_input=2.0)
    smupar.make_plan(model, base=base, masks={"fc1.weight": own_mask(1024)})
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._buffers
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
        assert parameter._version <= 1  # written by its own init and not since


def test_make_plan_does_not_keep_the_given_settings():
    density, init_std = {"fc1.weight": 0.25}, {"*": 0.5}
    plan = plan_mlp(64, 16, density=density, init_std=init_std)
    text = plan.to_json()
    density["fc1.weight"], init_std["*"] = 0.5, 1.0
    assert plan.to_json() == text
