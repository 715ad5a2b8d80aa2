"""A setting of global_aux_loss is refused where no router has that loss."""

import pytest
from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("sum-global-aux-loss-over-replicas")]


@pytest.fixture
def configure():
    """configure(types, **settings): a configuration whose routers balance experts by losses of these types."""

    def make(types, **settings):
        sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "num_moe_experts": 4}
        weights = [0.1] * len(types) if isinstance(types, list) else 0.1
        settings = {"moe_router_load_balancing_type": types, "moe_aux_loss_coeff": weights, **sizes, **settings}
        return TransformerConfig(moe_global_aux_loss_over_data_parallel=True, **settings)

    return make


@pytest.mark.parametrize("types", ["aux_loss", ["aux_loss", "seq_aux_loss"]])
def test_without_a_global_aux_loss_it_is_refused(configure, types):
    with pytest.raises(ValueError, match=r"Config.moe_global_aux_loss_over_data_parallel\) has no effect") as error:
        configure(types)
    assert str(types) in str(error.value)


@pytest.mark.parametrize("types", ["global_aux_loss", ["seq_aux_loss", "global_aux_loss"]])
def test_with_one_it_is_taken(configure, types):
    assert configure(types).moe_global_aux_loss_over_data_parallel


def test_a_model_without_experts_may_share_it(configure):
    assert configure("aux_loss", num_moe_experts=None).moe_global_aux_loss_over_data_parallel
