"""Declares freeze-all-layers."""

from ..declarations.shared_edits import wrap_data_parallel
from ..engine import Patch, Probe, PullRequest

PATCH = Patch(
    id="freeze-all-layers",
    summary="Let --freeze-all-layers freeze a model that a ModelBuilder has built",
    upstream=(PullRequest(5926, native_since="main"),),
    problem="On 0.19.2 `--freeze-all-layers` acts on models of a model provider alone. Where a script has a "
    "ModelBuilder build the model, the flag is ignored and all weights train, with no word in the log. Older "
    "releases do not have the flag.",
    adds=("The model is frozen before DDP, Megatron-FSDP or FSDP2 wraps it, whoever has built it.",),
    numerics="With `--freeze-all-layers`: no weight changes.",
    is_repair=True,
    probe=Probe("megatron.training.training:_freeze_all_model_chunks"),
    edits=wrap_data_parallel("megatron_overrides.trainer.frozen_layers:freeze_all_layers"),
)
