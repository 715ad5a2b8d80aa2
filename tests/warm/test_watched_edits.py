"""A process that watches the edits knows which of their functions it has called."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.forked("patched")


def test_the_edit_of_a_function_that_was_called_is_known():
    import torch
    from megatron.core.pipeline_parallel.schedules import _get_mtp_loss_scale

    from tests.warm import edits

    edits.watch()
    assert not edits.called
    _get_mtp_loss_scale(SimpleNamespace(), torch.device("cpu"))
    assert [name.split(":")[-1] for name in edits.called] == ["_get_mtp_loss_scale"]
