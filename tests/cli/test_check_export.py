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
    assert done.code == 0 and "all values are finite." in done.out
    assert "4 tensors, of these 1 of 1 MTP heads" in done.out
    trained = write("trained", tensors(model__layers__2__eh_proj__weight=torch.ones(2, 3)), num_nextn_predict_layers=1)
    done = command("check-export", str(trained), "--base", str(base))
    assert done.code == 0 and "no head is that of the base." in done.out


PREFIXES = ["model.layers.2", "language_model.model.layers.2", "mtp.layers.0", "model.mtp_layers.0", "model.mtp"]


@pytest.mark.parametrize("prefix", PREFIXES)
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
    model = tensors(model__layers__1__w=torch.tensor([[float("nan")]]))
    del model["model.layers.2.eh_proj.weight"]
    export = write("export", model, num_nextn_predict_layers=1)
    index = {"weight_map": {"model.layers.1.w": "model.safetensors", "model.norm.weight": "other.safetensors"}}
    (export / "model.safetensors.index.json").write_text(json.dumps(index))
    done = command("check-export", str(export), "--base", str(base))
    assert done.code == 1 and problems(done) == [
        "config.json declares 1 MTP heads, and no tensor is of these: head 0",
        "the index names these tensors, but their files do not have them: model.norm.weight",
        "the index does not name these tensors of the files, so they are not loaded: model.embed_tokens.weight, "
        "model.layers.0.w",
        "these tensors are not finite: model.layers.1.w",
        "the base has these tensors, the export does not: lm_head.weight, model.embed_tokens.weight, model.layers.0.w, "
        "model.layers.2.eh_proj.weight",
        "these tensors have another shape than in the base: model.layers.1.w ((2, 3) in the base, (1, 1))",
    ]


def test_layers_of_another_tower_are_no_heads(command, write):
    towers = {f"{tower}.layers.5.w": torch.zeros(2) for tower in ("vision_tower.encoder", "decoder", "visual.mtp")}
    done = command("check-export", str(write("export", {"model.layers.0.mtp.gate": torch.zeros(2), **towers})))
    assert done.code == 0 and "of these 0 of 0 MTP heads" in done.out


def test_a_copy_of_the_embedding_that_the_export_leaves_out_is_not_gone(command, write):
    copies = {"model.layers.2.embed_tokens.weight": torch.zeros(2, 3), "lm_head.weight": torch.zeros(2, 3)}
    base = write("base", tensors() | copies, num_nextn_predict_layers=1)
    trained = tensors(model__layers__2__eh_proj__weight=torch.ones(2, 3))
    export = write("export", trained, num_nextn_predict_layers=1)
    assert command("check-export", str(export), "--base", str(base)).code == 0
    other = write("other", tensors() | copies | {"lm_head.weight": torch.ones(2, 3)}, num_nextn_predict_layers=1)
    done = command("check-export", str(export), "--base", str(other))
    assert problems(done) == ["the base has these tensors, the export does not: lm_head.weight"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int8", "bool", "complex64"])
def test_each_dtype_is_read(command, write, dtype):
    values = torch.tensor([1e300 if dtype == "float64" else 1.0], dtype=torch.float64)
    assert command("check-export", str(write("export", {"w": values.to(getattr(torch, dtype))}))).code == 0


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
    for name, text in {"model.safetensors.index.json": "{}", "config.json": "["}.items():
        (write(name, tensors()) / name).write_text(text)
        done = command("check-export", str(tmp_path / name))
        assert done.code == 2 and f"{name}/{name}" in done.err and "copy it or export it again" in done.err
    file.unlink()
    assert "has no tensors in *.safetensors" in command("check-export", str(export)).err


def test_without_safetensors(command, write, monkeypatch):
    export = write("export", tensors())
    monkeypatch.setattr("megatron_mtp_patches.cli.check_export.find_spec", lambda name: None)
    done = command("check-export", str(export))
    assert done.code == 125 and "pip install safetensors torch" in done.out
