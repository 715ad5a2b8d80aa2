"""Declares add-fsdp-gradients-of-all-microbatches."""

from ..declarations.shared_edits import MEGATRON_FSDP
from ..engine import Patch, Probe, PullRequest, Wrap

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp"
_GATHER = f"{_FSDP}:MegatronFSDP.all_gather_and_wait_parameters_ready"
_SUMS = "megatron_overrides.fsdp.gradient_sums"

PATCH = Patch(
    id="add-fsdp-gradients-of-all-microbatches",
    summary="Add up the gradients of all microbatches under Megatron-FSDP's optim and no_shard",
    upstream=(PullRequest(6357, native_since="main", part="gradients are reduced as often as before"),),
    problem="With `--data-parallel-sharding-strategy optim`, and without `--no-gradient-accumulation-fusion`, each "
    "microbatch overwrites the weight gradients of the one before (TransformerEngine from 2.10 on). Only the last "
    "one counts, and its gradients are divided by the number of all. Megatron's own linear layers, as the output "
    "layer is, also do so with `no_shard`, and on main. So do grouped experts under the operation fuser of "
    "TransformerEngine with `optim`, on main only with `--recompute-modules moe` or "
    "`--overlap-moe-expert-parallel-comm`. Nothing in the log shows it.",
    adds=("A step sums the weight gradients of all its microbatches.",),
    repairs=(
        "Megatron's own linear layers, the output layer among them, keep the gradient of the last microbatch.",
        "So do grouped experts under the operation fuser of TransformerEngine, with `--recompute-modules moe` or "
        "`--overlap-moe-expert-parallel-comm`.",
    ),
    numerics="With `optim` or `no_shard`, several microbatches and without `--no-gradient-accumulation-fusion`: the "
    "weight gradients, and with them the gradient norm.",
    notes=(
        "Megatron's own linear layers do not fuse their weight gradients then: each has its gradient in the dtype of "
        "the weight for a moment, before it is added. Those of TransformerEngine stay fused.",
    ),
    is_repair=True,
    probe=Probe(_GATHER, contains="self.data_parallel_sharding_strategy in ['optim_grads', 'optim_grads_params']"),
    edits=(
        Wrap(_GATHER, f"{_SUMS}:add_gradients_of_backward_passes"),
        Wrap(
            "megatron.core.transformer.moe.experts:TEGroupedMLP._ensure_main_grad_for_fused_impl",
            f"{_SUMS}:leave_sums_of_fused_experts",
        ),
        *(Wrap(f"{wrapper}.__init__", f"{_SUMS}:fuse_no_gradients_of_own_layers") for wrapper in MEGATRON_FSDP),
    ),
)
