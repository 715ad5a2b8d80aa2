"""`check-export` names what an exported model lacks or has wrong."""

import json

import pytest
import torch

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def write(tmp_path):
    """write(name, tensors, config={}): the folder of a model with two layers."""
    from safetensors.torch import save_file

    def write(name, tensors, **config):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **config}))
        return folder

    return write


def tensors(**changed):
    names = ("model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w", "model.layers.2.eh_proj.weight")
    values = {name: torch.full((2, 3), float(number)) for number, name in enumerate(names)}
    return values | {name.replace("__", "."): value for name, value in changed.items()}


def problems(done):
    return [line.removeprefix("* ") for line in done.out.splitlines() if line.startswith("* ")]


def test_nothing_is_wrong_with_a_trained_head(command, write):
    base = write("base", tensors(), num_nextn_predict_layers=1)
    done = command("check-export", str(base))
    assert done.code == 0 and "4 tensors, of these 1 of 1 MTP heads" in done.out and "all values are finite" in done.out
    trained = write("trained", tensors(model__layers__2__eh_proj__weight=torch.ones(2, 3)), num_nextn_predict_layers=1)
    done = command("check-export", str(trained), "--base", str(base))
    assert done.code == 0 and "no tensor of the base is gone" in done.out


@pytest.mark.parametrize("prefix", ["model.layers.2", "mtp.layers.0", "model.mtp_layers.0", "model.language_model.mtp"])
def test_a_head_that_is_that_of_the_base(command, write, prefix):
    model = {"model.layers.0.w": torch.zeros(2), f"{prefix}.norm.weight": torch.full((2,), 0.1)}
    base = write("base", model)
    other = {name: tensor.bfloat16() for name, tensor in model.items()} | {"model.layers.0.w": torch.ones(2)}
    export = write("export", other, text_config={"mtp_num_hidden_layers": 1, "num_hidden_layers": 2})
    done = command("check-export", str(export), "--base", str(base))
    says = "these heads are those of the base: they were not trained, or not exported: head 0"
    assert done.code == 1 and problems(done) == [says]


def test_what_is_missing_or_broken(command, write):
    base = write("base", tensors(lm_head__weight=torch.zeros(2)), num_nextn_predict_layers=1)
    model = tensors(model__layers__0__w=torch.tensor([[float("nan")]]))
    del model["model.layers.2.eh_proj.weight"]
    export = write("export", model, num_nextn_predict_layers=1)
    index = {"weight_map": {"model.layers.1.w": "model.safetensors", "model.norm.weight": "other.safetensors"}}
    (export / "model.safetensors.index.json").write_text(json.dumps(index))
    done = command("check-export", str(export), "--base", str(base))
    assert done.code == 1 and problems(done) == [
        "config.json declares 1 MTP heads, and no tensor is of these: head 0",
        "the index names these tensors, and no file has them: model.norm.weight",
        "these tensors are not finite: model.layers.0.w",
        "the base has these tensors, the export has not: lm_head.weight, model.layers.2.eh_proj.weight",
        "these tensors have another shape than in the base: model.layers.0.w ((2, 3) in the base, (1, 1))",
    ]


def test_heads_that_an_engine_leaves_out(command, write):
    done = command("check-export", str(write("export", tensors())))
    says = "config.json declares 0 MTP heads, so an engine leaves these tensors out: model.layers.2.eh_proj.weight"
    assert done.code == 1 and problems(done) == [says]


def test_other_folders_are_refused(command, write, tmp_path):
    export = write("export", tensors())
    file = export / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for folder, answer in {
        tmp_path / "nowhere": "nowhere is no folder of a model: it has no config.json",
        export: "model.safetensors cannot be read (",
    }.items():
        done = command("check-export", str(folder))
        assert done.code == 2 and answer in done.err
    file.unlink()
    assert "has no tensors in *.safetensors" in command("check-export", str(export)).err


def test_without_safetensors(command, write, monkeypatch):
    export = write("export", tensors())
    monkeypatch.setattr("megatron_mtp_patches.cli.check_export.find_spec", lambda name: None)
    done = command("check-export", str(export))
    assert done.code == 125 and "pip install safetensors torch" in done.out
