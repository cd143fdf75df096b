"""What parameterize and attach refuse, leaving the model as it was."""

import copy
import warnings

import pytest
import torch
from torch import nn

import smupar
from tests.model.parameterize.nets import Net, Outer, Tables, frozen_state, hooks_of, make
from tests.support.loops import assert_same_tensors, tokens_of
from tests.support.models import VOCAB, on_meta


@pytest.mark.parametrize(
    ("other", "message"), [(Net(48), "48"), (Net(depth=1), r"norms\.1\.weight"), (nn.Linear(2, 2), "embedding")]
)
def test_attach_of_another_models_plan_is_refused(other, message):
    _, plan = make()
    other = copy.deepcopy(other)
    hooks = hooks_of(other)
    with pytest.raises(ValueError, match=message):
        smupar.attach(other, plan)
    assert not list(other.buffers())
    assert hooks_of(other) == hooks


ONES = torch.ones(32, 32)


NAN = float("nan")


BAD = {
    "density 0": ({"density": 0.0}, "density must lie in"),
    "density -1": ({"density": -1}, "density must lie in"),
    "density 1.5": ({"density": 1.5}, "density must lie in"),
    "density nan": ({"density": NAN}, "density must lie in"),
    "density of a layer nan": ({"density": {"hidden.0.*": NAN, "*": 0.5}}, r"density\['hidden.0.\*'\]"),
    "erk of 0": ({"density": smupar.erk(0.0)}, "density must lie in"),
    "base density 0": ({"base_density": 0.0}, "base_density must lie in"),
    "no weight left": ({"density": 1e-4}, r"'hidden.0.weight' of shape \(32, 32\) would lose every weight"),
    "no weight left in one layer": ({"density": {"hidden.1.*": 1e-4, "*": 0.5}}, "'hidden.1.weight'.*lose every weight"),
    "no weight left per neuron": ({"density": 0.01, "pattern": "fan_in"}, "lose every weight"),
    "no neuron left": ({"density": 0.01, "pattern": "neuron"}, "leaves none of 32 neurons"),
    "empty bernoulli draw": ({"density": 1e-7, "pattern": "bernoulli"}, "'hidden.0.weight' keeps no weight"),
    "empty bernoulli draw late": (
        {"density": {"hidden.1.*": 1e-7, "*": 0.5}, "pattern": "bernoulli"},
        "'hidden.1.weight' keeps no weight",
    ),
    "density glob": ({"density": {"layers.*": 0.5}}, r"density: 'layers.\*' matches none"),
    "density glob of a norm": ({"density": {"norms.*": 0.5}}, r"density: 'norms.\*' matches none"),
    "roles glob": ({"roles": {"layers.*": "hidden"}}, r"roles: 'layers.\*' matches none"),
    "unknown role": ({"roles": {"head.weight": "output"}}, "'head.weight'.*'output'"),
    "init_std glob": ({"init_std": {"layers.*": 0.1, "*": 0.1}}, r"init_std: 'layers.\*' matches none"),
    "init_std incomplete": ({"init_std": {"hidden.*": 0.1}}, "does not cover embedding.weight, head.weight"),
    "init_std nan": ({"init_std": NAN}, "init_std must be a finite number"),
    "init_std -1": ({"init_std": -1.0}, "init_std must not be negative"),
    "init_std text": ({"init_std": "kaiming"}, "'kaiming'"),
    "alpha nan": ({"alpha_output": NAN}, "alpha_output must be a finite number"),
    "base of other class": ({"base": nn.Linear(2, 2)}, "base is a Linear, the model a Net"),
    "base of other depth": ({"base": Net(16, depth=3)}, "only in base: hidden.2"),
    "N:M does not divide": ({"density": None, "pattern": "4:9"}, "4:9 needs dimensions divisible by 9, this one is 32"),
    "N:M at another density": ({"density": 0.25, "pattern": "2:4"}, "2:4 keeps exactly 2/4"),
    "block does not divide": ({"pattern": "block-24"}, "divisible by 24"),
    "unknown rule": ({"rule": "smupr"}, "unknown rule 'smupr': choose one of .*; did you mean smupar"),
    "base is a width": ({"base": 16}, r"base must be a module, got 16: .*make\(base_width\)"),
    "density in percent": ({"density": 94}, "for 94 % write 0.94"),
    "unknown pattern": ({"pattern": "checkerboard"}, "unknown pattern 'checkerboard'"),
    "mask of another model": ({"masks": {"layers.0.weight": ONES}}, "'layers.0.weight' is not a parameter of this model"),
    "mask of another width": ({"masks": {"hidden.0.weight": ONES[:16]}}, r"\(16, 32\), the parameter \(32, 32\)"),
    "mask without a one": ({"masks": {"hidden.0.weight": 0 * ONES}}, "'hidden.0.weight' keeps no weight"),
    "mask of other values": ({"masks": {"hidden.0.weight": 2 * ONES}}, "values other than 0 and 1"),
    "mask of an embedding": ({"masks": {"embedding.weight": torch.ones(VOCAB, 32)}}, "only hidden weights"),
    "second mask bad": ({"masks": {"hidden.0.weight": ONES, "hidden.1.weight": 0 * ONES}}, "'hidden.1.weight' keeps no"),
}


def assert_refused_untouched(model, settings, message, error=ValueError):
    tensors = {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    hooks, versions = hooks_of(model), [p._version for p in model.parameters()]
    state_keys = list(model.state_dict())
    rng = torch.get_rng_state()
    with pytest.raises(error, match=message):
        make(model=model, **settings)
    assert list(model.state_dict()) == state_keys
    assert_same_tensors(dict((*model.named_parameters(), *model.named_buffers())), tensors)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert hooks_of(model) == hooks
    assert [p._version for p in model.parameters()] == versions  # nothing was written, not even the same values
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_leaves_the_model_untouched(settings, message):
    assert_refused_untouched(Net(), settings, message)


def compiled_in_place(part):
    """A compiled forward that has run ignores hooks added later: the factors would be missing without a word."""
    torch._dynamo.reset()
    model = Outer()
    model.get_submodule(part).compile(backend="eager")
    model(tokens_of()[0])
    return model


def around_a_parameterized_one():
    model = Outer()
    make(model=model.inner)
    return model


def with_a_mask_of_its_own(**how):
    """A masked layer of the user's own may well call its mask weight_mask."""
    model = Net()
    if "buffer" in how:
        model.hidden[1].register_buffer("weight_mask", how["buffer"])
    else:
        model.hidden[1].weight_mask = how["attribute"]
    return model


OUTER = {"base": on_meta(Outer, 16)}
SPOILED = {
    "compiled": (lambda: torch.compile(Net(), backend="eager"), {}, r"OptimizedModule.*parameterize first"),
    "in DDP": (lambda: nn.parallel.DistributedDataParallel(Net()), {}, r"DistributedDataParallel.*parameterize first"),
    "in DataParallel": (lambda: nn.DataParallel(Net()), {}, r"DataParallel.*parameterize first"),
    "compiled in place": (lambda: compiled_in_place(""), OUTER, "compile"),
    "part compiled in place": (lambda: compiled_in_place("inner"), OUTER, "compile"),
    "parameterized": (lambda: make()[0], {"seed": 1}, r"parameterized already.*smupar\.attach"),
    "parameterized dense": (lambda: make(density=1.0)[0], {"density": 1.0, "seed": 1}, r"already.*smupar\.attach"),
    "copy of a parameterized one": (lambda: copy.deepcopy(make()[0]), {}, "parameterized already"),
    "around a parameterized one": (around_a_parameterized_one, OUTER, "'inner' is parameterized already"),
    "part of a parameterized one": (
        lambda: make()[0].hidden,
        {"base": on_meta(Net, 16).hidden, "density": 0.5, "seed": 1},
        "parameterized already",
    ),
    "a mask as buffer": (lambda: with_a_mask_of_its_own(buffer=torch.ones(32, 32)), {}, "weight_mask"),
    "a mask as attribute": (lambda: with_a_mask_of_its_own(attribute="mine"), {}, "weight_mask"),
}


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(("spoiled", "settings", "message"), SPOILED.values(), ids=SPOILED)
def test_models_that_are_wrapped_or_taken_are_refused_untouched(spoiled, settings, message):
    assert_refused_untouched(spoiled(), settings, message)


def test_meta_model_is_refused_with_the_remedy():
    model = on_meta(Net)
    with pytest.raises(ValueError, match=r"'embedding.weight'.*to_empty"):
        make(model=model)
    assert not list(model.buffers())


def test_refused_model_can_be_parameterized_with_better_input():
    model = Net()
    assert_refused_untouched(model, {"density": 1e-4}, "lose every weight")
    _, plan = make(model=model)
    smupar.audit(model, plan)


class OwnNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.first = nn.Linear(5, width)
        self.gain = nn.Parameter(torch.ones(width))


def test_reset_of_parameters_without_an_init_of_their_own_is_refused_by_name():
    with torch.device("meta"):
        model, base = OwnNorm(32), OwnNorm(8)
    model.to_empty(device="cpu")
    roles = {"first.weight": "embedding", "head.weight": "unembedding"}
    with pytest.raises(ValueError, match="reset=True, but gain belong to modules without reset_parameters"):
        smupar.parameterize(model, base=base, roles=roles, reset=True)
    with pytest.warns(smupar.PlanWarning, match="These have no init of their own and are left as they are: gain"):
        smupar.parameterize(model, base=base, roles=roles)


def test_warnings_as_errors_leave_the_model_untouched():
    model = Tables(64)
    before = frozen_state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", smupar.PlanWarning)
        with pytest.raises(smupar.PlanWarning):
            smupar.parameterize(model, base=Tables(16), density=1 / 32)
    assert_same_tensors(model.state_dict(), before)


def test_unknown_setting_is_named_with_the_known_ones():
    with pytest.raises(TypeError, match=r"unknown setting 'sparsity'; settings are rule, density.*1 - sparsity"):
        smupar.parameterize(Tables(64), base=Tables(16), sparsity=0.9)
    with pytest.raises(TypeError, match=r"unknown setting 'densty': did you mean density or"):
        smupar.parameterize(Tables(64), base=Tables(16), densty=0.9)
