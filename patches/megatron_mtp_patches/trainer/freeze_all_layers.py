"""Declares freeze-all-layers."""

from ..engine import Patch, Probe, PullRequest, Wrap
from ..shared_edits import MEGATRON_FSDP

_DISTRIBUTED = "megatron.core.distributed"
_WRAPPED_BY_NAME = (
    f"{_DISTRIBUTED}.distributed_data_parallel:DistributedDataParallel",
    f"{_DISTRIBUTED}.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel",
)
_FREEZE = "megatron_overrides.trainer.wrappers:freeze_all_layers"

PATCH = Patch(
    id="freeze-all-layers",
    summary="Let --freeze-all-layers freeze a model that a ModelBuilder has built",
    upstream=(PullRequest(5926, native_since="main"),),
    problem=(
        "On 0.19.2 `--freeze-all-layers` acts on models of a model provider alone. Where a script has a ModelBuilder "
        "build the model, the flag is ignored and all weights train, with no word in the log. Older releases do not "
        "have the flag."
    ),
    adds=("The model is frozen before DDP, Megatron-FSDP or FSDP2 wraps it, whoever has built it.",),
    numerics="With `--freeze-all-layers`: no weight changes.",
    is_repair=True,
    probe=Probe("megatron.training.training:_freeze_all_model_chunks"),
    edits=(
        *(Wrap(f"{name}.__init__", _FREEZE, check_source=False) for name in _WRAPPED_BY_NAME),
        *(Wrap(f"{name}.__init__", _FREEZE) for name in MEGATRON_FSDP),
    ),
)
