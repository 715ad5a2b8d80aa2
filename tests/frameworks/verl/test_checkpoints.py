"""verl's checkpoints: training goes on from them, and a base by whose heads they would lack weights is refused."""

import json
import shutil

import pytest
import torch

from .ppo import changed, parameters, update

pytestmark = pytest.mark.forked("verl")

SETTINGS = {"mtp_detach_heads": True, "mtp_loss_scaling_schedule": "0:0.5,1:0.25,2:0"}
CLIPPED = {"mtp_clip_grad": 0.05, "grad_norm_skip_threshold": 100.0}
LACKING = r"lacking lacks weights of the MTP heads.*mtp\.layers\.0.*verl saves.*add-heads-to-a-hugging-face-model"
UNSAVED = r"with checkpoint.strict=true.*does not save {}.*actor_rollout_ref.actor.checkpoint.strict=false"


@pytest.fixture(scope="session")
def model_with_copies(save_model, tmp_path_factory):
    """The small DeepSeek-V3 with a head that holds copies of embedding and output layer, as DeepSeek's own does."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("copies")
    shutil.copytree(save_model(1), folder, dirs_exist_ok=True)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    weights |= {f"model.layers.2.{name}.weight": weights[f"{of}.weight"].clone() for name, of in copies.items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.guards("schedule-mtp-loss-weight-in-verl")
def test_training_goes_on_from_verl_s_checkpoint(make_worker, make_batch, model_with_copies, tmp_path):
    """In another worker, and in the same one; by default verl does not load the steps of its learning rate schedule."""
    worker, resumed = (
        make_worker(SETTINGS, CLIPPED, path=model_with_copies, checkpoint={"strict": False}) for _ in range(2)
    )
    update(worker, make_batch())
    worker.save_checkpoint(str(tmp_path))
    one = update(worker, make_batch(seed=5))
    after = parameters(worker)
    for each in (resumed, worker):
        each.load_checkpoint(str(tmp_path))
        other = update(each, make_batch(seed=5))
        assert other["mtp_losses/mtp_loss_scaling_factor"] == one["mtp_losses/mtp_loss_scaling_factor"] == [0.25]
        assert other["megatron/mtp_grad_norm"] == one["megatron/mtp_grad_norm"]
        assert all(torch.equal(after[name], value) for name, value in parameters(each).items())


@pytest.mark.guards("schedule-mtp-loss-weight-in-verl")
def test_a_schedule_that_cannot_go_on_is_said_so(make_worker, make_batch, tmp_path, caplog):
    weights_alone = {"save_contents": ["model"], "load_contents": ["model"]}
    worker = make_worker(SETTINGS, checkpoint=weights_alone)
    worker.save_checkpoint(str(tmp_path))
    worker.load_checkpoint(str(tmp_path))
    (line,) = [one.getMessage() for one in caplog.records if "does not go on" in one.getMessage()]
    assert "mtp_loss_scaling_schedule" in line and "use_checkpoint_opt_param_scheduler" in line


@pytest.mark.guards("refuse-heads-that-verl-cannot-save")
def test_a_base_that_keeps_all_weights_out_of_checkpoints_is_refused(make_worker, save_model, model_with_copies):
    with pytest.raises(ValueError, match=UNSAVED.format(r"model\.layers\.2\.embed_tokens.*, .*shared_head\.head")):
        make_worker(path=model_with_copies)
    with pytest.raises(ValueError, match=UNSAVED.format(r"model\.layers\.2\.eh_proj")):
        make_worker(mtp={}, path=save_model(1))


@pytest.mark.parametrize("checkpoint", [{"strict": False}, {"save_contents": ["optimizer", "extra"]}])
def test_it_trains_where_nothing_is_lost(make_worker, make_batch, model_with_copies, checkpoint):
    worker = make_worker(path=model_with_copies, checkpoint=checkpoint)
    before = parameters(worker)
    update(worker, make_batch())
    assert "mtp" in changed(worker, before)


def test_heads_in_a_file_of_their_own_keep_nothing_out_of_checkpoints(make_worker, make_batch, save_model, tmp_path):
    """Without them verl saves a checkpoint from which it goes on."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "two files"
    shutil.copytree(save_model(1), folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    file.unlink()
    places = {name: "heads" if name.startswith("model.layers.2.") else "main" for name in weights}
    for place in ("main", "heads"):
        tensors = {name: value for name, value in weights.items() if places[name] == place}
        save_file(tensors, folder / f"{place}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"{place}.safetensors" for name, place in places.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    worker, resumed = (make_worker(mtp={}, path=folder) for _ in range(2))
    update(worker, make_batch())
    worker.save_checkpoint(str(tmp_path / "checkpoint"))
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    after = parameters(resumed)
    assert all(torch.equal(after[name], value) for name, value in parameters(worker).items())


# -- a base that lacks the heads that its config.json declares ------------------------------------------------------


@pytest.mark.guards("refuse-heads-that-verl-cannot-save")
@pytest.mark.parametrize("settings", [{}, {"mtp_init": "last-layer"}])
def test_heads_that_would_train_and_be_lost_are_refused(make_worker, lacking, settings):
    with pytest.raises(ValueError, match=LACKING):
        make_worker(settings, path=lacking)


@pytest.mark.guards("refuse-heads-that-verl-cannot-save")
def test_heads_without_labels_that_would_train_and_be_lost_are_refused(make_worker, lacking_hybrid_model):
    with pytest.raises(ValueError, match="lacks weights of the MTP heads"):
        make_worker(mtp={"enable": True}, path=lacking_hybrid_model)


@pytest.mark.parametrize(
    "settings, mtp",
    [({}, {}), ({}, {"enable": True}), ({"disable_mtp_loss": True}, {"enable": True})],
    ids=["no heads", "heads that do not train", "heads that do not run"],
)
def test_the_main_model_trains_without_them(make_worker, make_batch, lacking, settings, mtp):
    worker = make_worker(settings, mtp=mtp, path=lacking)
    before = parameters(worker)
    update(worker, make_batch())
    assert changed(worker, before) == {"decoder", "embedding", "output_layer"}


def test_a_reference_model_needs_no_heads_of_its_own(make_worker, lacking):
    make_worker(mtp={"enable": True, "enable_train": True}, path=lacking, forward_only=True)
