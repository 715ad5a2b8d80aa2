"""verl's models without MTP heads, or with heads that are not trained, that have settings of heads."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="verl is not installed")

from verl.workers.config import McoreEngineConfig
from verl.workers.config.model import MtpConfig
from verl.workers.engine.megatron import transformer_impl

pytestmark = pytest.mark.forked("patched")


def test_a_model_without_heads_that_inherits_settings_of_heads_is_built_with_one_line(make_model, caplog):
    """verl's reference model has the actor's override_transformer_config."""
    settings = {"mtp_num_layers": None, "mtp_loss_type": "tv", "mtp_detach_heads": True}
    for _ in range(2):
        make_model(**settings)
    (line,) = [record.message for record in caplog.records if "no MTP heads" in record.message]
    assert "mtp_detach_heads, mtp_loss_type" in line and "mtp.enable=true" in line


@pytest.mark.parametrize(
    "mtp, is_reference, settings, is_said",
    [
        ({"enable": True}, False, {"mtp_detach_heads": True, "mtp_loss_type": "tv"}, True),
        ({"enable": True}, False, {"mtp_detach_heads": False}, False),
        ({"enable": True}, True, {"mtp_detach_heads": True, "mtp_loss_type": "tv"}, False),
        ({"enable": True, "enable_train": True}, False, {"mtp_detach_heads": True}, False),
        ({}, False, {"mtp_detach_heads": True}, False),
    ],
    ids=["loaded", "no settings", "reference", "trained", "no heads"],
)
def test_settings_of_heads_that_are_loaded_and_not_trained_get_one_line(mtp, is_reference, settings, is_said, caplog):
    """As the engine calls it, before it builds its model."""
    model = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=1), mtp=MtpConfig(**mtp))
    engine = McoreEngineConfig(override_transformer_config=dict(settings), forward_only=is_reference)
    transformer_impl.check_mtp_config(model, engine)
    lines = [record.message for record in caplog.records if "trains no MTP heads" in record.message]
    assert len(lines) == is_said
    assert not is_said or ("mtp_detach_heads, mtp_loss_type of verl's" in lines[0] and "mtp.enable_train" in lines[0])
