"""The losses of the heads are those of float64 autograd on full logits, however the positions lie on the ranks."""

import pytest

from scripts.losses.conditions import LAYOUTS, RANKS, conditions
from scripts.losses.table import GRADIENT, LOSS

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(RANKS)]


@pytest.mark.parametrize("condition", [one for layout in LAYOUTS for one in conditions(layout)], ids=str)
def test_loss_and_gradient_are_those_of_full_logits(parallel, condition):
    from scripts.losses.measured import difference

    layout = condition.layout
    parallel(tensor_model_parallel_size=layout.tensor, context_parallel_size=layout.context)
    found = difference(condition)
    assert found.loss < LOSS
    assert found.gradient < GRADIENT
