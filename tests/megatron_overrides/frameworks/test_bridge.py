"""Which heads count as uninitialized after a load by Megatron-Bridge, which need not be installed here.

Its own load is in tests/frameworks/test_megatron_bridge.py.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron_mtp_patches.engine.call import Call

from megatron_overrides.frameworks.bridge import refuse_uninitialized_heads

pytestmark = pytest.mark.forked("patched")

SOURCE = SimpleNamespace(model_name_or_path="org/model")


@pytest.fixture
def load(make_gpt):
    """load(fill, has, **config): run the wrapper around a load that calls `fill` for each weight that `has` a name."""

    def run(fill=lambda param: None, has=lambda name: False, **config):
        model = make_gpt(16, 8, **{"perform_initialization": False, "use_cpu_initialization": False, **config})
        filled = [param for name, param in model.named_parameters() if has(name)]
        bridge = SimpleNamespace(
            build_conversion_tasks=lambda source, chunks: [
                None,
                SimpleNamespace(param_weight=None),  # a weight that the checkpoint lacks, or of another stage
                *(SimpleNamespace(param_weight=param) for param in filled),
            ]
        )

        def load_weights_hf_to_megatron(hf_pretrained, megatron_model, allowed_mismatched_params=None):
            with torch.no_grad():
                for param in filled:
                    fill(param)
            return "loaded"

        return refuse_uninitialized_heads(Call(load_weights_hf_to_megatron, bridge, (SOURCE, model), {}))

    return run


def copy(param):
    param.copy_(torch.ones_like(param))


def copy_unseen(param):
    """As a quantized tensor may be copied to."""
    param.data.copy_(torch.ones_like(param))


def test_heads_that_nothing_has_written_to_are_named(load):
    with pytest.raises(ValueError, match="The checkpoint org/model lacks weights of the MTP heads") as error:
        load(copy, lambda name: not name.startswith("mtp."))
    named = str(error.value).partition("initialized them: ")[2].partition(". Set model.perform_initialization=True")[0]
    assert named.startswith("mtp.layers.0.eh_proj.weight, ") and named.count("mtp.layers.") == 4 and " more" in named
    assert "norm" not in named  # they are always initialized, as adapters are


@pytest.mark.parametrize("fill", [copy, copy_unseen])
def test_heads_that_are_loaded_pass(load, fill):
    assert load(fill, lambda name: True) == "loaded"


def test_a_single_missing_weight_is_named(load):
    with pytest.raises(ValueError, match=r"initialized them: mtp\.layers\.1\.eh_proj\.weight\. Set"):
        load(copy, lambda name: name != "mtp.layers.1.eh_proj.weight")


INITIALIZED = {"perform_initialization": True, "use_cpu_initialization": True}  # by writing to param.data


@pytest.mark.parametrize("config", [INITIALIZED, {"mtp_num_layers": None}])
def test_initialized_heads_and_models_without_heads_pass(load, config):
    assert load(**config) == "loaded"
