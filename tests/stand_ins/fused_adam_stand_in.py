"""A stand-in for TransformerEngine's FusedAdam, which needs a GPU. It is not TransformerEngine's.

It keeps what Megatron relies on: where gradients are read (`grad` or `decoupled_grad`), which state there is and in
which dtype (`master_param` with master weights only, whatever the dtype of the parameter), that state is made for
every parameter and that one without gradient is passed over, one `step` for each group. Its arithmetic is that of
AdamW in fp32, one tensor after the other; what passes on it says nothing about the kernels.
"""

import sys
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

import torch


def local(tensor):
    """The part of a DTensor that this rank has."""
    return getattr(tensor, "_local_tensor", tensor)


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
    ):
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        if not adam_w_mode or capturable or not bias_correction:
            raise NotImplementedError("this stand-in is AdamW with bias correction, not capturable")
        self.master_weights = master_weights
        self.dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32

    def initialize_state(self, param, store_param_remainders=False):
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=self.dtypes[name])
        if self.master_weights:
            state["master_param"] = param.detach().to(self.dtypes["master_param"], copy=True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(param, local(grad).float(), group)

    def _update(self, param, grad, group):
        state = {name: local(value) for name, value in self.state[param].items()}
        beta1, beta2 = group["betas"]
        exp_avg = state["exp_avg"].float().lerp(grad, 1 - beta1)
        exp_avg_sq = state["exp_avg_sq"].float().mul(beta2).addcmul(grad, grad, value=1 - beta2)
        state["exp_avg"].copy_(exp_avg)
        state["exp_avg_sq"].copy_(exp_avg_sq)
        exp_avg, exp_avg_sq = exp_avg / (1 - beta1 ** group["step"]), exp_avg_sq / (1 - beta2 ** group["step"])
        # fp32 parameters are their own master weights, and the copy in the state goes stale, as in the original.
        weights = state.get("master_param") if param.dtype != torch.float32 else None
        weights = local(param) if weights is None else weights
        change = exp_avg / (exp_avg_sq.sqrt() + group["eps"]) + group["weight_decay"] * weights.float()
        weights.copy_(weights.float() - group["lr"] * change)
        if weights is not local(param):
            local(param).copy_(weights)


@contextmanager
def installed():
    """Inside, megatron.core.optimizer builds this FusedAdam, as it would TransformerEngine's."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    module = ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam
    with ExitStack() as changes:
        for owner, name, value in (
            (optimizer, "Adam", FusedAdam),
            (distrib_optimizer, "Adam", FusedAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (optimizer, "USING_PYTORCH_OPTIMIZER", False),
            (optimizer, "is_te_min_version", lambda *args, **kwargs: True),
            (optimizer_config, "is_te_min_version", lambda *args, **kwargs: True),
        ):
            changes.enter_context(mock.patch.object(owner, name, value))
        sys.modules[module.__name__] = module  # looked up when an OptimizerConfig is made
        changes.callback(sys.modules.pop, module.__name__)
        yield
