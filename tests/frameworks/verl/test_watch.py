"""A watch of verl's TrainingWorker on two ranks, with weights and optimizer on the CPU between its passes."""

import pytest
import torch
from verl.utils import tensordict_utils

from ..flipped_bit import FLIPPED, flip_bit

pytestmark = [pytest.mark.forked("verl"), pytest.mark.ranks(2)]

WATCHED = {"watch_invariants": 1, "watch_action": "raise"}
LAYOUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OFFLOADED = {"param_offload": True, "optimizer_offload": True}


def test_it_is_silent_until_a_bit_flips_on_a_rank(make_worker, make_batch, caplog):
    """Two updates from a batch, after a pass for log probabilities; then another one, in whose pass a bit flips."""
    from megatron_overrides.watch.findings import WatchError

    worker = make_worker(optimizer=WATCHED, **LAYOUT, **OFFLOADED)
    batch = make_batch(mini_batch_size=2)
    batch["advantages"] = batch["old_log_probs"] = batch["ref_log_prob"] = batch["response_mask"].float()
    asked = batch.clone()
    tensordict_utils.assign_non_tensor(asked, compute_loss=False)
    worker.infer_batch(asked)
    updated = worker.train_mini_batch(batch.clone())
    lines = [record.getMessage() for record in caplog.records if "watch: compares" in record.getMessage()]
    assert len(lines) == 2 * (torch.distributed.get_rank() == 0)  # before there are moments, and then
    if torch.distributed.get_rank() == 0:
        assert tensordict_utils.get(updated, "metrics")["megatron/watch_findings"] == [0, 0]
    flip_bit(passes=0)
    with pytest.raises(WatchError, match=f"watch, step 3: copies differ: weight {FLIPPED} 0:64"):
        worker.train_mini_batch(batch)
