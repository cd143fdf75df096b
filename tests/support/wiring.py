"""All that smupar hangs on a model and its optimizers, as a value that tests compare before and after a refusal."""

from smupar.model.seam import seam_of


def wiring(model, *optimizers):
    modules = {
        path: [(kind, list(hooks)) for kind, hooks in vars(module).items() if kind.endswith("_hooks")]
        for path, module in model.named_modules()
    }
    parameters = {
        name: (id(parameter), parameter.detach().tolist(), list(parameter._post_accumulate_grad_hooks or ()))
        for name, parameter in model.named_parameters()
    }
    wants = {name: _wants_dense_gradient(parameter) for name, parameter in model.named_parameters()}
    return {
        "modules": modules,
        "parameters": parameters,
        "dense gradients": wants,
        "buffers": {name: (id(buffer), buffer.tolist()) for name, buffer in model.named_buffers()},
        "marks": {name: value for name, value in vars(model).items() if "smupar" in name or "ddp" in name},
        "optimizers": [_of_optimizer(optimizer) for optimizer in optimizers],
    }


def _wants_dense_gradient(parameter):
    return [getattr(hook, "wanted", None) for hook in (parameter._post_accumulate_grad_hooks or {}).values()]


def _of_optimizer(optimizer):
    phases = {name: [id(owner) for owner in owners] for name, owners in seam_of(optimizer).phases.items()}
    groups = [{**group, "params": [id(parameter) for parameter in group["params"]]} for group in optimizer.param_groups]
    return phases, groups, list(optimizer._optimizer_load_state_dict_post_hooks)
