"""Megatron-Bridge's own `finetune` trains MTP heads on a layout as on one rank."""

import pytest
from megatron.bridge.training import gpt_step

from .test_bridge_finetune import DETACHED, NO_CHECKPOINT, folder, train  # noqa: F401 - a fixture

pytestmark = pytest.mark.forked("bridge")


@pytest.mark.skipif(
    not hasattr(gpt_step, "_packed_metadata_for_forward"),
    reason="0.5.1 insists on a tensor on the CPU, and in a rehearsal each says that it is on a GPU",
)
def test_packed_answers_train_the_heads_alike_under_context_parallelism(folder):  # noqa: F811
    settings = (*DETACHED, "model.mtp_loss_type=tv", *NO_CHECKPOINT)
    settings += ("model.calculate_per_token_loss=True", "ddp.average_in_collective=False")  # Bridge asks for both
    whole = train(folder, "packed", *settings)
    cut = train(folder, "packed", *settings, "model.context_parallel_size=2", ranks=2)
    for name in ("lm loss", "mtp_1 loss", "grad norm", "mtp grad norm", "mtp acceptance length"):
        numbers, numbers_of_cut = ([float(step[name]) for step in run] for run in (whole, cut))
        assert numbers_of_cut == pytest.approx(numbers, rel=5e-3), name
