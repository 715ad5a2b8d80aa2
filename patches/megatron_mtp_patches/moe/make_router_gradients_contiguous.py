"""Declares make-router-gradients-contiguous."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="make-router-gradients-contiguous",
    summary="Make the gradients of routers' logits contiguous before TransformerEngine multiplies them",
    problem="With `--moe-router-load-balancing-type sinkhorn` and `--moe-router-topk 1` the gradient of a router's "
    "logits arrives transposed, because probabilities are permuted in the order of experts. Megatron hands it to a "
    "product of TransformerEngine that takes its address and its shape, and reads memory in the order in which it "
    "lies. The router and all layers before it then get gradients of other tokens and experts, and no error.",
    adds=("A gradient of logits that lies in memory in another order is copied; all others are left as they are.",),
    numerics="Only where the gradient of a router's logits is not contiguous in memory: the gradients of the router "
    "and of all layers before it.",
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.transformer.moe.moe_utils:RouterGatingLinearFunction.backward",
            "megatron_overrides.moe.router_gradients:make_gradient_contiguous",
        ),
    ),
)
