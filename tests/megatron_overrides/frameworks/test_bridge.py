"""Which heads a load or an export by Megatron-Bridge misses, and its step; it need not be installed here.

Its own load, export and step are in tests/frameworks/test_bridge_load.py and test_megatron_bridge.py.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from megatron_mtp_patches.engine.call import Call

from megatron_overrides.frameworks.bridge_heads import (
    _language_model,
    initialize_heads,
    initialize_model,
    name_heads_left_out,
    refuse_uninitialized_heads,
)
from megatron_overrides.frameworks.bridge_loss_mask import note_loss_mask, pass_loss_mask
from megatron_overrides.mtp.new_heads.initialization import initialize_from_last_layer

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards(
        "refuse-uninitialized-heads-in-megatron-bridge",
        "initialize-mtp-heads-in-megatron-bridge",
        "name-heads-left-out-in-megatron-bridge",
        "pass-loss-mask-in-megatron-bridge",
    ),
]

SOURCE = SimpleNamespace(model_name_or_path="org/model")


@pytest.fixture
def load(make_gpt):
    """load(fill, has, **config): run the wrapper around a load that calls `fill` for each weight that `has` a name."""

    def run(fill=lambda param: None, has=lambda name: False, wrapper=refuse_uninitialized_heads, start=None, **config):
        model = make_gpt(16, 8, **{"perform_initialization": False, "use_cpu_initialization": False, **config})
        model.config.mtp_init = start
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

        return wrapper(Call(load_weights_hf_to_megatron, bridge, (SOURCE, model), {}))

    return run


def copy(param):
    param.copy_(torch.ones_like(param))


def copy_unseen(param):
    """As a quantized tensor may be copied to."""
    param.data.copy_(torch.ones_like(param))


def test_heads_that_nothing_has_written_to_are_named(load):
    with pytest.raises(ValueError, match="The checkpoint org/model lacks weights of the MTP heads") as error:
        load(copy, lambda name: not name.startswith("mtp."))
    named = str(error.value).partition("initialized them: ")[2].partition(". Set model.mtp_init")[0]
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


RANDOM = {"wrapper": initialize_heads, "start": "random"}


def test_new_heads_stay_as_they_were_built(load, caplog):
    with caplog.at_level(logging.WARNING):
        assert load(copy, lambda name: not name.startswith("mtp."), **RANDOM, **INITIALIZED) == "loaded"
        assert "The checkpoint org/model has no MTP heads: they were initialized (random)" in caplog.text
        caplog.clear()
        assert load(copy, lambda name: True, **RANDOM) == "loaded" and "MTP heads" not in caplog.text


def test_a_part_of_the_heads_is_not_initialized(load):
    with pytest.raises(ValueError, match=r"It lacks mtp\.layers\.1\.eh_proj\.weight\. Set as many heads"):
        load(copy, lambda name: name != "mtp.layers.1.eh_proj.weight", **RANDOM, **INITIALIZED)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"mtp_num_layers": None}, "and the model has none"), ({}, "set model.perform_initialization=True")],
)
def test_what_cannot_be_initialized_is_refused(load, config, message):
    with pytest.raises(ValueError, match=message):
        load(copy, lambda name: not name.startswith("mtp."), **RANDOM, **config)


def test_a_model_with_new_heads_is_built_initialized():
    for start, expected in ((None, False), ("random", True)):
        provider = SimpleNamespace(mtp_init=start, perform_initialization=False)
        initialize_model(Call(lambda: None, provider, (), {}))
        assert provider.perform_initialization is expected


def test_the_heads_of_a_model_that_is_a_part_start_from_its_last_layer(make_gpt):
    """A model of images and text shows the decoder of its language model, and nothing else of it."""
    model = make_gpt(16, 8)
    whole = torch.nn.ModuleDict({"vision": torch.nn.Linear(2, 2), "language_model": model})
    assert _language_model(whole) is model and _language_model(model) is model
    with pytest.raises(ValueError, match="No pipeline stage has MTP heads"):
        initialize_from_last_layer([SimpleNamespace(decoder=model.decoder)])


def test_an_export_without_the_heads_names_them_and_no_adapters(make_gpt, caplog):
    model = make_gpt(16, 8)
    model.mtp.layers[0].eh_proj.adapter = torch.nn.Linear(2, 2)

    def stream_weights_megatron_to_hf(megatron_model, hf_pretrained, conversion_tasks=None):
        return "exported"

    for has, expected in ((lambda name: not name.startswith("mtp."), 1), (lambda name: ".adapter." not in name, 0)):
        tasks = [SimpleNamespace(param_weight=param) for name, param in model.named_parameters() if has(name)]
        bridge = SimpleNamespace(build_conversion_tasks=lambda source, chunks, tasks=tasks: [None, *tasks])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert name_heads_left_out(Call(stream_weights_megatron_to_hf, bridge, (model, SOURCE), {})) == "exported"
        assert caplog.text.count("org/model lacks tensors of their names: mtp.layers.0.") == expected
    source = SimpleNamespace(architectures=["of a configuration"])
    bridge = SimpleNamespace(build_conversion_tasks=lambda source, chunks: [])
    name_heads_left_out(Call(stream_weights_megatron_to_hf, bridge, (model, source), {}))
    assert "This SimpleNamespace gives no names to MTP heads" in caplog.text and "architectures" not in caplog.text


@pytest.mark.parametrize("own", [False, True])
def test_the_model_gets_the_mask_of_its_batch(own):
    """DeepSeek-V4's step has a function of its own that reads a batch."""
    calls = []

    class Model(torch.nn.Module):
        config = SimpleNamespace(mtp_num_layers=1)

        def forward(self, **arguments):
            calls.append(arguments)

    def read(iterator):
        return ("tokens", "labels", next(iterator), None)

    def forward_step(iterator, model, _get_batch_fn=None):
        batch = (_get_batch_fn or (lambda values: note_loss_mask(Call(read, None, (values,), {}))))(iterator)
        model(input_ids=batch[0])

    model, masks = Model(), iter(["first", "second"])
    for _ in range(2):
        pass_loss_mask(Call(forward_step, None, (masks, model), {"_get_batch_fn": read} if own else {}))
    assert [arguments["loss_mask"] for arguments in calls] == ["first", "second"]
    pass_loss_mask(Call(lambda model: model(input_ids="read elsewhere"), None, (model,), {}))
    assert "loss_mask" not in calls[-1]
    model.config = SimpleNamespace(mtp_num_layers=None)
    pass_loss_mask(Call(forward_step, None, (iter(["third"]), model), {}))
    assert "loss_mask" not in calls[-1]
