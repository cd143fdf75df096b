"""What a plan remarks: masks of your own, thin layers, roles that were guessed, lists of layers, settings without effect."""

from __future__ import annotations

from torch import nn

from smupar.plan.depth.correspondence import Correspondence
from smupar.plan.globs import layer_glob
from smupar.plan.masks.sparsity import Sparsity
from smupar.plan.notes import Note
from smupar.plan.roles.infer import GUESSED, ParamRole
from smupar.plan.scales.find_attention import named_like_attention
from smupar.plan.scales.multipliers import Multiplier
from smupar.plan.settings import CheckedSettings

# The rules rely on sums over many weights. With fewer than about 16 kept weights per neuron they are inaccurate.
MIN_WEIGHTS_PER_NEURON = 16


def notes_on(
    model: nn.Module,
    roles: list[ParamRole],
    sparsity: Sparsity,
    checked: CheckedSettings,
    depth: Correspondence,
    *,
    shows_no_attention: bool,  # whether an example ran, and computed no attention scores under any name
) -> list[Note]:
    own_masks = Note(
        "given masks",
        "masks of your own: the rule assumes random masks, so run smupar.coord_check if yours come from magnitudes or "
        "gradients",
    )
    notes = [*([own_masks] if sparsity.given else []), *_about_thin(roles, sparsity)]
    noted: dict[Note, list[str]] = {}
    for role in roles:
        if role.note is not None and (role.note is not GUESSED or role.name in sparsity.densities):
            noted.setdefault(role.note, []).append(repr(role.name))
    for note, names in noted.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        text = f"{', '.join(names[:4])}{more} {'is' if len(names) == 1 else 'are'} {note}"
        notes.append(Note(note.kind, text, note.is_caution))
    for path, multiplier in depth.lists.items():
        text = f"{path!r} has {float(multiplier):g} times as many layers as the base; depth rule {checked.depth.title}"
        notes.append(Note("depth", text, False))
    if not checked.rule.has_alphas and any(alpha != 1 for alpha in checked.alphas.values()):
        notes.append(Note("alphas", f"{checked.rule.title} does not use alpha_input and alpha_output", False))
    attention = any(named_like_attention(model))
    if attention and sparsity.live != 1:
        notes.append(
            Note(
                "neurons",
                "pattern 'neuron' also removes neurons inside attention heads: the scale of q.k must count live neurons only",
            )
        )
    has_custom_modules = any(not type(module).__module__.startswith("torch.nn") for module in model.modules())
    if not (attention or shows_no_attention) and has_custom_modules and checked.rule.attention_exponent == -1:
        text = "no attention was recognised; if the model has attention, scale its q.k by plan.attention_scale(head_dim)"
        notes.append(Note("attention", text, False))
    return notes


def about_set_numbers(multipliers: tuple[Multiplier, ...]) -> list[Note]:
    """A note on the numbers that get the base's values."""
    shown = [f"{number.where} {number.value:g} -> {number.base_value:g}" for number in multipliers if number.is_set]
    text = f"set to the base's values, since Table 1 has every power of the width that is needed: {', '.join(shown)}"
    return [Note("multipliers", text, False)] if shown else []


def about_summed_numbers(summed: list[Multiplier]) -> list[Note]:
    """A note on the numbers that have to follow the width, since they multiply sums over it, or are sqrt(d) in a norm."""
    text = (
        "left to follow the width, since they multiply only sums over the width, or vectors that were divided by their "
        f"length: {', '.join(map(str, summed))}"
    )
    return [Note("multipliers", text, False)] if summed else []


def about_unscored(paths: tuple[str, ...]) -> list[Note]:
    """A note on modules that are named like attention but need no scale."""
    globs = dict.fromkeys(map(layer_glob, paths))
    text = (
        f"no attention scale is needed in {', '.join(globs)}: the example multiplies no queries and keys there, or only "
        "vectors of length 1, or vectors of fixed size without a softmax"
    )
    return [Note("attention", text, False)] if paths else []


def _about_thin(roles: list[ParamRole], sparsity: Sparsity) -> list[Note]:
    """A note on hidden weights that keep too few weights per neuron."""
    per_neuron = {
        role.name: sparsity.weights_per_neuron(role)
        for role in roles
        if role.role == "hidden" and role.name in sparsity.densities
    }
    thin = [name for name, kept in per_neuron.items() if kept < MIN_WEIGHTS_PER_NEURON]
    if not thin:
        return []
    fewest = min(thin, key=per_neuron.__getitem__)
    keep = "1 hidden weight keeps" if len(thin) == 1 else f"{len(thin)} hidden weights keep"
    return [
        Note(
            "thin",
            f"{keep} fewer than {MIN_WEIGHTS_PER_NEURON} weights per neuron ({fewest!r}: "
            f"{per_neuron[fewest]:.3g}); the rule relies on sums over many weights and is inaccurate there",
        )
    ]
