"""A GPT with detached MTP heads trains under Megatron-FSDP as under DDP, also with passes without gradients between."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron_mtp_patches import mtp_pass

from tests.trainings.fsdp import CLIP, LR, STRATEGIES, WEIGHT_DECAY, strategies_and_overlaps

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("detach-mtp-heads", "freeze-base-model-for-mtp", "disable-mtp-loss"),
    pytest.mark.ranks(2),
]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")

VOCABULARY, LENGTH, STEPS = 32, 12, 2
SHARDS_WEIGHTS = STRATEGIES[-1]  # ZeRO-3: weights are gathered before a layer runs and released after it


@pytest.fixture
def make_net(make_gpt, request):
    """make_net(): a GPT with detached heads, or with the settings that the test gives."""
    settings = getattr(request, "param", {"mtp_detach_heads": True})
    return lambda: make_gpt(VOCABULARY, LENGTH, **settings)


@pytest.fixture
def make(make_fsdp, make_net):
    """make(strategy, overlap, net): the GPT (or `net`) in Megatron-FSDP, and its optimizer."""

    def make(strategy=SHARDS_WEIGHTS, overlap=True, net=None):
        return make_fsdp(
            strategy, torch.float32, overlap=overlap, net=net or make_net(), use_precision_aware_optimizer=False
        )

    return make


@pytest.fixture
def ddp(parallel, make_net):
    """The GPT in DDP with a distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel()
    net = make_net()
    model = DistributedDataParallel(net.config, DistributedDataParallelConfig(use_distributed_optimizer=True), net)
    config = OptimizerConfig(
        optimizer="adam", lr=LR, weight_decay=WEIGHT_DECAY, use_distributed_optimizer=True, clip_grad=CLIP
    )
    return SimpleNamespace(model=model, optimizer=get_megatron_optimizer(config, [model]))


@pytest.fixture
def without_the_patch():
    """with without_the_patch(): all patches but derive-mtp-labels are applied."""
    import megatron_mtp_patches

    @contextmanager
    def others():
        megatron_mtp_patches.apply("-derive-mtp-labels")
        try:
            yield
        finally:
            megatron_mtp_patches.apply()

    return others


def batch_of(step):
    """Different tokens in each step and on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH + 1), generator=generator)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(LENGTH).expand(2, -1).contiguous(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not(),
        "labels": tokens[:, 1:].contiguous(),
    }


def evaluate(model, step):
    with torch.no_grad():
        model(**batch_of(1000 + step))


def measure(model, step):
    with torch.no_grad(), mtp_pass(compute=True) as metrics:
        model(**batch_of(1000 + step))
    assert len(metrics.reduce()) == 6  # two losses, two acceptance rates, two lengths


def nothing(model, step):
    pass


def train(training, before_step=nothing, after_step=nothing):
    """For each step: the losses of the main model and of each head, the norms of the main model and of the heads."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    seen = []
    for step in range(STEPS):
        training.model.zero_grad_buffer()
        training.optimizer.zero_grad()
        if training.model.ddp_config.overlap_grad_reduce:
            with training.model.no_sync():
                pass  # as Megatron's schedules leave it before the last microbatch
        MTPLossLoggingHelper.tracker = {}
        loss = training.model(**batch_of(step)).mean()
        losses = [float(loss), *MTPLossLoggingHelper.tracker.get("values", torch.empty(0)).tolist()]
        loss.backward()
        training.model.finish_grad_sync()
        before_step(training.model, step)
        _, norm, _ = training.optimizer.step()
        after_step(training.model, step)
        seen += [*losses, float(norm), float(training.optimizer.mtp_grad_norm or 0)]
    MTPLossLoggingHelper.tracker = {}
    return seen


@strategies_and_overlaps
def test_heads_train_as_under_ddp(make, ddp, strategy, overlap):
    assert train(make(strategy, overlap), after_step=evaluate) == pytest.approx(train(ddp), rel=1e-5)


@pytest.mark.parametrize(
    "make_net, strategy",
    [
        ({"mtp_loss_type": "e2e_tv", "mtp_detach_heads": True, "mtp_logits_chunk_size": 8}, "optim_grads_params"),
        ({"mtp_loss_type": "kl", "mtp_logits_chunk_size": 8}, "optim_grads"),
    ],
    indirect=["make_net"],
    ids=["e2e_tv, detached", "kl, attached"],
)
def test_heads_train_for_acceptance_as_under_ddp(make, ddp, strategy):
    """The output layer runs for each chunk, that of attached heads in backward again."""
    assert train(make(strategy), after_step=measure) == pytest.approx(train(ddp), rel=1e-5)


def test_a_pass_before_the_step_leaves_the_heads_no_old_weights(make, without_the_patch):
    """Upstream keeps the root's weights of before the step in this order, so its own run is what is right."""
    with without_the_patch():
        right = train(make(), before_step=evaluate)
    assert train(make(), before_step=evaluate) == right


@pytest.mark.parametrize("evaluates_before_it_is_wrapped", [False, True])
def test_a_pass_without_gradients_leaves_as_many_weights_gathered_as_upstream(
    make, make_net, without_the_patch, evaluates_before_it_is_wrapped
):
    """From 0.18 on upstream leaves no layer gathered; up to 0.17 the output layer makes it gather all of them again."""
    with without_the_patch():
        right = after_a_pass_without_gradients(make())
    net = make_net()
    if evaluates_before_it_is_wrapped:
        evaluate(net, 0)
    assert after_a_pass_without_gradients(make(net=net)) == right


def after_a_pass_without_gradients(training):
    """({number of a bucket of weights: whether it is gathered}, which of them nothing has waited for)."""
    train(training)
    evaluate(training.model, STEPS)
    return gathered(training), set(training.model.module.all_gather_pipeline.param_gather_event_map)


def test_the_layers_of_the_heads_run_without_their_logits(make):
    training, ran = make(), []
    net = training.model.module.module
    net.mtp.layers[0].register_forward_hook(lambda *_: ran.append("head"))
    net.output_layer.register_forward_hook(lambda *_: ran.append("output layer"))
    evaluate(training.model, 0)
    assert ran == ["head", "output layer"]


@pytest.mark.parametrize("make_net", [{"freeze_base_model_for_mtp": True}], indirect=True, ids=["frozen"])
@pytest.mark.parametrize("overlap, strategy", [(False, "optim"), (True, "optim"), (True, SHARDS_WEIGHTS)])
def test_heads_that_train_alone_do_so_as_under_ddp(make, ddp, strategy, overlap):
    train_a_part(make(strategy, overlap), ddp)


@pytest.mark.parametrize("make_net", [{"disable_mtp_loss": True}], indirect=True, ids=["disabled"])
def test_the_main_model_trains_without_its_heads_as_under_ddp(make, ddp):
    train_a_part(make(), ddp)


@pytest.mark.parametrize("make_net", [{"disable_mtp_loss": True}], indirect=True, ids=["disabled"])
def test_weights_of_disabled_heads_are_released_after_the_backward_pass(make):
    training = make()
    training.model(**batch_of(0)).mean().backward()
    training.model.finish_grad_sync()
    layers = [
        group.fsdp_unit_id not in (None, -1) for group in training.model.module.param_and_grad_buffer.parameter_groups
    ]
    states = gathered(training)
    assert {states[number, False] for number, is_layer in enumerate(layers) if is_layer} == {"EMPTY"}


@pytest.mark.parametrize(
    "make_net, part",
    [({"freeze_base_model_for_mtp": True}, "decoder"), ({"disable_mtp_loss": True}, "mtp")],
    indirect=["make_net"],
    ids=["frozen", "disabled"],
)
def test_adapters_of_what_does_not_train_do_not_train(make, make_net, part):
    """They are added to a model that is there already."""
    net = make_net()
    adapter = getattr(net, part).adapter = torch.nn.Linear(2, 2)
    make(net=net)
    assert not any(param.requires_grad for param in adapter.parameters())


def gathered(training):
    return {key: status.name for key, status in training.model.module.all_gather_pipeline.bucket_status.items()}


def train_a_part(training, ddp):
    """Train as under DDP, without a change of what does not train."""
    groups = training.model.module.param_and_grad_buffer.parameter_groups
    frozen = [group for group in groups if not group.requires_grad]
    assert frozen and not any(group.main_grad_buffer or group.main_weight_buffer for group in frozen)
    before = [weights_of(group) for group in frozen]
    assert train(training, after_step=evaluate) == pytest.approx(train(ddp), rel=1e-5)
    assert all(torch.equal(weights_of(group), old) for group, old in zip(frozen, before, strict=True))


def weights_of(group):
    """This rank's part of each weight in a group, without the padding between them."""
    buffer = group.model_weight_buffer
    if buffer is None:
        return torch.cat([param.detach().flatten() for param in group.params])
    parts = [buffer.get_item(place, only_shard=buffer.is_data_distributed) for place in range(len(group.params))]
    return torch.cat(parts).clone()
