"""Layers of the user's own: once registered, they get roles, masks, measurements and audits as torch's layers do."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.measure import SizeRecorder
from smupar.check.coordinates.readings import Cell
from smupar.plan.facts import layers
from smupar.plan.facts.layers import LAYERS, kind_of
from smupar.plan.roles.table import DOUBTS, ROLE_TABLE


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(layers, "REGISTERED", {})


class MyLinear(nn.Module):
    """Stores (in, out), as transformers' Conv1D does."""

    def __init__(self, num_in, num_out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(num_in, num_out)), nn.Parameter(torch.zeros(num_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Kernel(nn.Module):
    """Stores (out, in) under a name of its own, and does more than multiply."""

    def __init__(self, num_in, num_out):
        super().__init__()
        self.W = nn.Parameter(torch.randn(num_out, num_in))
        self.gain = nn.Parameter(torch.ones(num_out))

    def forward(self, x):
        return self.gain * torch.einsum("...i,oi->...o", x, self.W)


class Rows(nn.Module):
    """An embedding of the user's own."""

    def __init__(self, num_rows, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_rows, width))

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Net(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.up, self.down = kind(width, 2 * width), kind(2 * width, width)
        self.head = kind(width, 16)

    def forward(self, ids):
        return self.head(self.down(F.relu(self.up(self.embed(ids)))))


class Reference(nn.Module):
    def __init__(self, num_in, num_out):
        super().__init__()
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x):
        return self.linear(x)


def loss_fn(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batches(number):
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(16, (4, 8), generator=rng) for _ in range(number)]


def register():
    smupar.register_layer(MyLinear, in_dim=0, out_dim=1, product=lambda weight, x: x @ weight)
    smupar.register_layer(Kernel, weight="W", in_dim=1, out_dim=0, product=lambda weight, x: x @ weight.T)


OWN = [MyLinear, Kernel]


@pytest.mark.parametrize("kind", OWN)
def test_unknown_layers_are_asked_for(kind):
    with pytest.raises(ValueError, match=f"belongs to a {kind.__name__}, whose input dimension"):
        smupar.make_plan(Net(64, kind), base=Net(16, kind))


@pytest.mark.parametrize("kind", OWN)
def test_registered_layers_get_the_numbers_of_a_linear(kind):
    register()
    settings = {"density": 1 / 4, "alpha_output": 3.0}
    plan = smupar.make_plan(Net(64, kind), base=Net(16, kind), **settings)
    expected = smupar.make_plan(Net(64, nn.Linear), base=Net(16, nn.Linear), **settings)
    leaf = "W" if kind is Kernel else "weight"
    for path in ("up", "down", "head"):
        row, other = plan[f"{path}.{leaf}"], expected[f"{path}.weight"]
        assert row.role == other.role
        assert (row.width_in, row.width_out, row.density, row.density_mult) == (
            other.width_in, other.width_out, other.density, other.density_mult)  # fmt: skip
        assert row.init_std == other.init_std
        assert row.lr_factors == other.lr_factors
        assert row.forward == other.forward
    assert plan[f"up.{leaf}"].in_dims == ((1,) if kind is Kernel else (0,))


@pytest.mark.parametrize("kind", OWN)
def test_registered_layers_are_masked_scaled_and_audited(kind):
    register()
    model = Net(64, kind)
    plan = smupar.parameterize(model, base=Net(16, kind), density=1 / 4, alpha_output=3.0)
    leaf = "W" if kind is Kernel else "weight"
    mask = getattr(model.down, f"{leaf}_mask")
    assert int(mask.sum()) == mask.numel() // 4
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    assert smupar.audit(model, plan, optimizer) == []
    loss_fn(model, batches(1)[0]).backward()
    assert not getattr(model.down, leaf).grad[~mask].any()
    x = torch.randn(3, 64)
    assert plan[f"head.{leaf}"].forward == (("head", 0.75),)
    torch.testing.assert_close(model.head(x), model.head.forward(0.75 * x))  # the factor is on what the layer reads
    model.head.smupar_factor.fill_(1.0)
    with pytest.raises(smupar.AuditError, match=r"'head' .* multiplies its output by 1, the plan says 0.75"):
        smupar.audit(model, plan)


def test_registered_lookup_is_an_embedding_whose_output_is_scaled():
    smupar.register_layer(Rows, in_dim=0, out_dim=1, lookup=True)

    def make(width):
        model = Net(width, nn.Linear)
        model.embed = Rows(16, width)
        return model

    model = make(64)
    plan = smupar.parameterize(model, base=make(16), alpha_input=2.0)
    assert plan["embed.weight"].role == "embedding"
    assert plan["embed.weight"].init_std == 1.0  # one row is read
    torch.testing.assert_close(model.embed(torch.tensor([3])), 2 * model.embed.weight[3:4])
    assert smupar.audit(model, plan) == []


@pytest.mark.parametrize("kind", OWN)
def test_coord_check_measures_registered_layers_like_a_linear(kind):
    register()
    sizes = {}
    for layer in (kind, Reference):
        report = smupar.coord_check(
            lambda width, layer=layer: Net(width, layer), loss_fn, batches(3), base_width=32, widths=[32, 64],
            densities=[1 / 4], steps=3, seeds=1, progress=False,
        )  # fmt: skip
        assert "not measured on their own" not in report.explain()
        sizes[layer] = {(r.place.removesuffix(".linear"), r.quantity) for r in report.readings if r.kind == "layer"}
    assert sizes[kind] == sizes[Reference]
    assert {("up", "dY"), ("down", "grad X"), ("head", "Y")} <= sizes[kind]


def twins():
    """(model, plan) with a layer of the user's own and with nn.Linear, of the same weights and masks."""
    register()
    model, twin = Net(64, MyLinear), Net(64, nn.Linear)
    plan = smupar.parameterize(model, base=Net(16, MyLinear), density=1 / 4, alpha_output=3.0)
    twin_plan = smupar.parameterize(twin, base=Net(16, nn.Linear), density=1 / 4, alpha_output=3.0)
    with torch.no_grad():
        twin.embed.weight.copy_(model.embed.weight)
        for path in ("up", "down", "head"):
            own, other = model.get_submodule(path), twin.get_submodule(path)
            other.weight.copy_(own.weight.T)
            other.bias.zero_()
            if path != "head":
                other.weight_mask.copy_(own.weight_mask.T)
    return (model, plan), (twin, twin_plan)


def test_updates_of_a_registered_layer_are_measured_like_those_of_the_same_linear():
    effects = []
    for model, plan in twins():
        optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
        with smupar.record_updates(model, plan, optimizer) as trace:
            for batch in batches(4):
                loss_fn(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        effects.append(trace.effects)
    assert effects[0].keys() == {"up.weight", "down.weight"}
    for name, values in effects[0].items():
        assert values == pytest.approx(effects[1][name], rel=1e-3)
        assert all(value > 0 for value in values)


def test_sizes_of_a_registered_layer_are_those_of_the_same_linear():
    sizes = []
    for model, plan in twins():
        optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
        recorder = SizeRecorder(model, plan)
        recorder.step = 1
        loss_fn(model, batches(1)[0]).backward()
        weights = recorder.before_update()
        optimizer.step()
        recorder.after_update(weights)
        found = recorder.readings(Cell("smupar", 64, 0.25, 0))
        sizes.append({(reading.place, reading.quantity): reading.rms for reading in found})
    assert {("up", "dY"), ("down", "grad X"), ("head", "dY"), ("head", "grad X")} <= sizes[0].keys()
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


def test_layers_without_a_product_are_measured_by_the_check_alone():
    smupar.register_layer(MyLinear, in_dim=0, out_dim=1)
    model = Net(64, MyLinear)
    plan = smupar.parameterize(model, base=Net(16, MyLinear), density=1 / 4)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    assert smupar.audit(model, plan, optimizer) == []
    with pytest.raises(ValueError, match="no hidden weight can be measured"):
        smupar.record_updates(model, plan, optimizer)
    report = smupar.coord_check(
        lambda width: Net(width, MyLinear),
        loss_fn,
        batches(2),
        base_width=32,
        widths=[32, 64],
        steps=2,
        seeds=1,
        progress=False,
    )
    assert {reading.kind for reading in report.readings if reading.place == "up.weight"} == {"part"}
    with pytest.raises(ValueError, match="MyLinear is not a plain linear layer"):
        smupar.sparsify_storage(model, plan, backend="csr")


def test_only_a_plain_linear_product_is_kept_as_non_zeros():
    smupar.register_layer(MyLinear, in_dim=0, out_dim=1, product="linear")
    model, ids = Net(64, MyLinear), batches(1)[0]
    plan = smupar.parameterize(model, base=Net(16, MyLinear), density=1 / 4)
    twin = copy.deepcopy(model)
    smupar.sparsify_storage(model, plan, backend="csr")
    assert model.down.weight.shape == (64 * 128 // 4,)
    torch.testing.assert_close(model(ids), twin(ids))
    smupar.sparsify_storage(model, plan, backend="dense")
    assert type(model.down) is MyLinear
    assert (vars(model.down).keys(), model.down._parameters.keys()) == (vars(twin.down).keys(), twin.down._parameters.keys())
    assert torch.equal(model.down.weight, twin.down.weight)


def test_plain_layers_are_timed_by_auto():
    smupar.register_layer(MyLinear, in_dim=0, out_dim=1, product="linear")
    model = Net(64, MyLinear)
    plan = smupar.parameterize(model, base=Net(16, MyLinear), density=1 / 4)
    before = torch.get_rng_state()
    report = smupar.sparsify_storage(model, plan, backend="auto", tokens=32)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(report.layers) == 2
    assert not any("not a plain linear layer" in layer.note for layer in report.layers)


def test_derived_class_of_a_registered_one_counts_but_is_not_plain():
    class Noisy(MyLinear):
        def forward(self, x):
            return super().forward(x) + 1

    smupar.register_layer(MyLinear, in_dim=0, out_dim=1, product="linear")
    assert kind_of(MyLinear(4, 4)).is_plain
    assert kind_of(Noisy(4, 4)) == replace(kind_of(MyLinear(4, 4)), understood=layers.MEASURABLE)
    assert not kind_of(Noisy(4, 4)).is_plain


def test_other_matrices_of_a_registered_layer_are_still_asked_for():
    class Gated(MyLinear):
        def __init__(self, num_in, num_out):
            super().__init__(num_in, num_out)
            self.gate = nn.Parameter(torch.randn(num_in, num_out))

    smupar.register_layer(Gated, in_dim=0, out_dim=1)
    with pytest.raises(ValueError, match=r"up\.gate .*belongs to a Gated, whose input dimension smupar does not know") as error:
        smupar.make_plan(Net(64, Gated), base=Net(16, Gated))
    assert "up.weight" not in str(error.value)


# Refusals

REFUSED = {
    "an instance": (lambda: nn.Linear(2, 2), {}, "takes a class derived from nn.Module, got Linear"),
    "no module": (lambda: dict, {}, "takes a class derived from nn.Module, got <class 'dict'>"),
    "every module": (lambda: nn.Module, {}, "takes a class derived from nn.Module"),
    "torch's own": (lambda: nn.Linear, {}, r"Linear is known already \(`nn.Linear`\)"),
    "torch's attention": (lambda: nn.MultiheadAttention, {}, "MultiheadAttention is known already"),
    "one dimension": (lambda: MyLinear, {"in_dim": 1}, r"name the same dimension: a weight stored as \(in, out\) has in_dim=0"),
    "a dimension twice": (lambda: MyLinear, {"in_dim": (0, 0)}, "name the same dimension"),
    "no input": (lambda: MyLinear, {"in_dim": ()}, "must be whole numbers, 0 or greater"),
    "counted from the end": (lambda: MyLinear, {"in_dim": -2}, "must be whole numbers, 0 or greater, got -2 and 1"),
    "no number": (lambda: MyLinear, {"in_dim": "in"}, "must be whole numbers, 0 or greater, got 'in'"),
    "a bool": (lambda: MyLinear, {"in_dim": False}, "must be whole numbers, 0 or greater, got False"),
    "no name": (lambda: MyLinear, {"weight": "a.weight"}, "the name of a parameter of the layer, got 'a.weight'"),
    "no product": (lambda: MyLinear, {"product": "matmul"}, r"product must be a function of \(weight, x\), 'linear' or None"),
    "product of a tensor": (lambda: MyLinear, {"in_dim": (0, 2), "product": torch.matmul}, "reads rows of one dimension"),
    "linear lookup": (lambda: Rows, {"lookup": True, "product": "linear"}, "product='linear' is for matrices"),
    "linear in other dimensions": (lambda: MyLinear, {"in_dim": 2, "product": "linear"}, "product='linear' is for matrices"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "facts", "message"), REFUSED.values(), ids=REFUSED)
def test_nonsense_is_refused_and_leaves_nothing(make, facts, message):
    with pytest.raises(ValueError, match=message):
        smupar.register_layer(make(), **{"in_dim": 0, "out_dim": 1, **facts})
    assert layers.REGISTERED == {}


def test_registering_twice_is_fine_with_the_same_facts_only():
    for _ in range(2):
        smupar.register_layer(MyLinear, in_dim=0, out_dim=1, product=torch.matmul)
    with pytest.raises(ValueError, match="MyLinear is registered already, with other arguments: register it once"):
        smupar.register_layer(MyLinear, in_dim=1, out_dim=0, product=torch.matmul)
    assert kind_of(MyLinear(2, 3)).in_dims == (0,)


@pytest.mark.parametrize(
    ("facts", "found"),
    [({"weight": "wieght"}, "has no such weight"), ({"in_dim": 2}, r"its weight has shape \(64, 128\)")],
    ids=["name", "dimension"],
)
def test_layer_that_is_not_as_registered_is_refused(facts, found):
    smupar.register_layer(MyLinear, **{"in_dim": 0, "out_dim": 1, **facts})
    with pytest.raises(ValueError, match=f"MyLinear was registered with weight=.*{found}: correct the call"):
        smupar.make_plan(Net(64, MyLinear), base=Net(16, MyLinear))


# The tables


def test_every_module_has_exactly_one_kind():
    assert LAYERS[-1].matches(nn.Module())
    for module in (nn.Linear(2, 2), nn.LayerNorm(2), nn.LSTM(2, 2), Net(2, nn.Linear)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert kind_of(module) in LAYERS


def test_page_shows_the_tables_of_layers_and_roles():
    page = (Path(__file__).parents[3] / "docs" / "roles.md").read_text()
    assert page.count("<!-- table of ") == page.count("<!-- end of the table -->") == 3
    assert all(case.when in page for case in (*ROLE_TABLE, *DOUBTS))
