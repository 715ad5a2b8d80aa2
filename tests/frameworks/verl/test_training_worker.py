"""verl's TrainingWorker trains a DeepSeek-V3 that Megatron-Bridge builds, as its PPO trainer has it do."""

import re

import megatron_mtp_patches
import pytest
import torch

from .conftest import PROMPTS, RESPONSES
from .ppo import changed, gae, gradients, grpo, log_probs, model_of, parameters, update

pytestmark = [pytest.mark.forked("verl"), pytest.mark.guards("skip-updates-in-verl")]

DETACHED = {"mtp_detach_heads": True}
CLIPPED = {"mtp_clip_grad": 0.05, "grad_norm_skip_threshold": 100.0}


@pytest.mark.parametrize("estimate", [gae, grpo])
def test_a_ppo_update_trains_the_model_and_its_heads(make_worker, make_batch, estimate, caplog):
    worker = make_worker(DETACHED, CLIPPED)
    before = parameters(worker)
    metrics = update(worker, make_batch(), estimate)
    assert metrics["actor/pg_loss"] == metrics["loss"] and metrics["loss"][0] != 0.0
    assert changed(worker, before) == {"decoder", "embedding", "mtp", "output_layer"}
    assert metrics["grad_norm"][0] > 0.1 and metrics["megatron/mtp_grad_norm"][0] > 1e-3
    assert metrics["megatron/updates_skipped_for_grad_norm"] == [0.0]
    assert 0.0 <= metrics["mtp_losses/mtp_1_acceptance_rate"][0] <= 100.0
    reported = megatron_mtp_patches.metrics(worker.engine.optimizer)
    assert reported["mtp grad norm"] == metrics["megatron/mtp_grad_norm"][0]
    assert not lines_about("no MTP heads", caplog)


def test_the_loss_of_the_head_is_that_of_the_second_token_to_come(make_worker, make_batch):
    """Computed from the head's logits, where that token is one of a response."""
    worker = make_worker(micro_batch_size_per_gpu=4)
    logits = []
    hook = model_of(worker).output_layer.register_forward_hook
    hook(lambda layer, arguments, output: logits.append(output[0].detach()) if layer.training else None)
    batch = make_batch()
    tokens = batch["input_ids"].values()
    metrics = update(worker, batch)
    losses, start = [], 0
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        end = start + prompt + response
        at = torch.arange(start + prompt - 2, end - 2)
        losses.append(torch.nn.functional.cross_entropy(logits[0][at, 0].float(), tokens[at + 2], reduction="none"))
        start = end
    assert metrics["mtp_losses/mtp_1_loss"] == [pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)]


def test_a_pass_for_log_probabilities_leaves_nothing_behind(make_worker, make_batch):
    """verl runs the heads in it, for nothing."""
    metrics, runs = [], []
    for passes in (0, 1):
        worker = make_worker(DETACHED)
        model_of(worker).mtp.layers[0].register_forward_hook(lambda *args: runs.append(args[0].training))
        batch = make_batch(seed=3)
        for _ in range(passes):
            log_probs(worker, batch)
            assert runs.count(False) == 4
        metrics.append(update(worker, batch))
    same = [name for name in metrics[0] if not name.startswith("perf") and name != "mfu"]
    assert "mtp_losses/mtp_1_acceptance_rate" in same
    assert {name: metrics[0][name] for name in same} == {name: metrics[1][name] for name in same}


def test_the_weight_sync_has_the_names_of_the_checkpoint(make_worker, save_model):
    from safetensors.torch import load_file

    (file,) = save_model(1).glob("*.safetensors")
    saved = load_file(file)
    sent = dict(make_worker(DETACHED).engine.get_per_tensor_param()[0])
    assert sent.keys() == saved.keys() and "model.layers.2.eh_proj.weight" in sent
    assert all(torch.equal(sent[name], saved[name]) for name in sent)


# -- settings ------------------------------------------------------------------------------------------------------


def test_training_goes_on_after_a_skipped_update(make_worker, make_batch):
    worker = make_worker(optimizer={"grad_norm_skip_threshold": 1e-3})
    before = parameters(worker)
    metrics = update(worker, make_batch())
    assert metrics["grad_norm"][0] > 0.1 and metrics["megatron/updates_skipped_for_grad_norm"] == [1.0]
    assert not changed(worker, before)
    worker.engine.optimizer.config.grad_norm_skip_threshold = 1e3
    assert update(worker, make_batch())["megatron/updates_skipped_for_grad_norm"] == [1.0]
    assert changed(worker, before)


def test_another_failure_still_ends_verl(make_worker, make_batch):
    worker = make_worker()
    worker.engine.optimizer.step = lambda: (False, None, None)
    with pytest.raises(NotImplementedError, match="optimizer step failed"):
        update(worker, make_batch())


def test_heads_train_for_acceptance(make_worker, make_batch):
    worker = make_worker({**DETACHED, "mtp_loss_type": "tv"})
    metrics = update(worker, make_batch())
    # one head: its total variation is what the accepted length lacks to two, up to the weight of its microbatches
    (loss,), (length,) = metrics["mtp_losses/mtp_1_loss"], metrics["mtp_losses/mtp_acceptance_length"]
    assert 0.0 < loss < 1.0 and length == pytest.approx(2.0 - loss, abs=1e-3)


@pytest.mark.guards("schedule-mtp-loss-weight-in-verl")
def test_the_loss_has_the_weight_of_its_schedule(make_worker, make_batch):
    """An iteration is a batch, from which two updates are made here."""
    worker = make_worker({**DETACHED, "mtp_loss_scaling_schedule": "0:0.5,1:0"})
    for weight in (0.5, 0.0):
        metrics = update(worker, make_batch(mini_batch_size=2))
        assert metrics["mtp_losses/mtp_loss_scaling_factor"] == [weight] * 2
        assert [norm > 0.0 for norm in metrics["megatron/mtp_grad_norm"]] == [weight > 0.0] * 2


def test_a_schedule_in_per_cent_is_refused(make_worker, make_batch):
    with pytest.raises(ValueError, match="neither a number of train iterations nor of samples"):
        update(make_worker({"mtp_loss_scaling_schedule": "0:0.5,50%:0.1"}), make_batch())


def test_heads_train_alone(make_worker, make_batch):
    worker = make_worker({"freeze_base_model_for_mtp": True})
    before = parameters(worker)
    update(worker, make_batch())
    assert changed(worker, before) == {"mtp"}


@pytest.mark.parametrize("detach_encoder", [False, True])
def test_detached_heads_stay_detached_under_verl_s_own_patch(make_worker, make_batch, detach_encoder):
    worker = make_worker(DETACHED, mtp={"enable": True, "enable_train": True, "detach_encoder": detach_encoder})
    worker.set_loss_fn(lambda model_output, **_: (0.0 * model_output["log_probs"].values().sum(), {}))
    reached = {name for name, gradient in gradients(worker, make_batch()).items() if gradient.any()}
    assert reached and all(name.startswith("mtp.") for name in reached)


def test_the_logits_of_the_heads_may_be_made_in_chunks(make_worker, make_batch):
    whole, chunked = (
        gradients(make_worker({**DETACHED, "mtp_logits_chunk_size": size}), make_batch()) for size in (0, 8)
    )
    heads = [name for name in whole if name.startswith("mtp.") and whole[name].any()]
    assert heads
    for name in heads:
        assert (chunked[name] - whole[name]).norm() <= 0.02 * whole[name].norm()  # bf16


def test_depth_weights_weigh_the_heads(make_worker, make_batch):
    worker = make_worker({**DETACHED, "mtp_depth_weights": "1,0"}, heads=2)
    reached = {
        name.split(".")[2]
        for name, gradient in gradients(worker, make_batch()).items()
        if gradient.any() and name.startswith("mtp.")
    }
    assert reached == {"0"}


def test_an_mtp_pass_is_refused(make_worker, make_batch):
    """verl's own method computes the loss, and knows nothing of it."""
    worker = make_worker()
    with (
        megatron_mtp_patches.mtp_pass(compute=True),
        pytest.raises(NotImplementedError, match="mtp_pass has no effect"),
    ):
        update(worker, make_batch())


# -- models whose heads do not train -------------------------------------------------------------------------------

INHERITED = {"mtp_detach_heads": True, "mtp_loss_type": "e2e_tv"}


def lines_about(text, caplog):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_the_reference_model_inherits_the_settings_of_the_actor(make_worker, make_batch, caplog):
    reference = make_worker(INHERITED, mtp={}, forward_only=True)
    (line,) = lines_about("no MTP heads", caplog)
    assert "mtp_detach_heads, mtp_loss_type" in line and "mtp.enable=true" in line
    assert torch.equal(log_probs(reference, make_batch()), log_probs(make_worker(INHERITED), make_batch()))


RATES = {"mtp_lr": 1e-4, "mtp_clip_grad": 0.05}
NAMED = ", .*".join(rf"Config\.{name}\)" for name in sorted([*INHERITED, *RATES]))


def test_heads_that_are_loaded_and_not_trained_are_said_so(make_worker, make_batch, caplog):
    watched = {"watch_invariants": 1, "watch_action": "raise"}
    worker = make_worker(INHERITED, {**RATES, **watched}, mtp={"enable": True})
    (line,) = lines_about("no effect", caplog)
    assert re.match(rf".*{NAMED} have no effect: verl loads .*Set mtp.enable_train=true$", line)
    before = parameters(worker)
    for seed in range(3):  # after which a watch names what has had no gradient
        metrics = update(worker, make_batch(seed))
    assert "mtp" not in changed(worker, before)
    assert metrics["megatron/watch_findings"] == [0.0] and "megatron/mtp_grad_norm" not in metrics


def test_an_actor_without_heads_names_their_settings(make_worker, lacking, caplog):
    make_worker(INHERITED, RATES, mtp={}, path=lacking)
    (line,) = lines_about("have no effect: the model", caplog)
    assert re.match(rf".*{NAMED} have no effect: the model has no MTP heads. Add mtp.enable=true and", line)


def test_a_frozen_main_model_with_heads_that_do_not_train_is_refused(make_worker):
    with pytest.raises(ValueError, match="freeze_base_model_for_mtp.* verl leaves these as they are"):
        make_worker({"freeze_base_model_for_mtp": True}, mtp={"enable": True})


def test_heads_that_are_not_trained_need_no_gradient(make_worker, make_batch):
    worker = make_worker({"disable_mtp_loss": True}, mtp={"enable": True})
    update(worker, make_batch())
    trained = {name for name, param in model_of(worker).named_parameters() if hasattr(param, "main_grad")}
    assert trained and not any(name.startswith("mtp.") for name in trained)


def test_a_hybrid_model_trains_its_heads_without_labels(make_worker, make_batch, hybrid_model, caplog):
    worker = make_worker(DETACHED, CLIPPED, mtp={"enable": True}, path=hybrid_model)
    (line,) = lines_about("mtp.enable_train is false", caplog)
    assert "The MTP heads of this MambaModel train" in line and "disable_mtp_loss" in line
    before = parameters(worker)
    metrics = update(worker, make_batch())
    assert metrics["megatron/mtp_grad_norm"][0] > 0.0 and 5.0 < metrics["mtp_losses/mtp_1_loss"][0] < 7.0
    assert "mtp" in changed(worker, before)


def test_a_hybrid_model_leaves_its_heads_as_they_are(make_worker, make_batch, hybrid_model, caplog):
    worker = make_worker({"disable_mtp_loss": True}, mtp={"enable": True}, path=hybrid_model)
    assert not lines_about("mtp.enable_train is false", caplog)
    before = parameters(worker)
    update(worker, make_batch())
    assert "mtp" not in changed(worker, before)


def test_the_reference_of_a_hybrid_model_needs_its_pattern_without_heads(make_worker, make_batch, hybrid_model):
    """With the pattern Megatron-Bridge ends in a TypeError, with the patches or without."""
    with pytest.raises(TypeError, match="multiply sequence"):
        make_worker(mtp={}, forward_only=True, path=hybrid_model)
    settings = {"mtp_hybrid_override_pattern": None}
    reference = make_worker(settings, mtp={}, forward_only=True, path=hybrid_model)
    assert log_probs(reference, make_batch()).any()


def test_verl_cannot_give_labels_to_a_hybrid_model(make_worker, make_batch, hybrid_model):
    """It takes the loss that the model returns for logits, with the patches or without."""
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        update(make_worker(path=hybrid_model), make_batch())
