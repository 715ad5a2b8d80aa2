"""`upgrade --run` from the installed Megatron to a copy of it in which a default and a formula are others."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from megatron_mtp_patches.cli import main
from megatron_mtp_patches.engine.source import find_file

from tests.pages import ROOT

pytestmark = pytest.mark.forked("torch")
pytest.importorskip("megatron.training", reason="the 0.16.1 wheel has no megatron.training")
FLAGS = (
    "--micro-batch-size 1 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --position-embedding-type rope "
    "--seq-length 64 --max-position-embeddings 64 --clip-grad 0.5"
)
CHANGES = {
    "megatron/core/distributed/distributed_data_parallel_config.py": (
        "bucket_size: Optional[int] = None",
        "bucket_size: Optional[int] = 7",
    ),
    "megatron/core/optimizer/clip_grads.py": ("clip_coeff = max_norm / ", "clip_coeff = 0.5 * max_norm / "),
}


@pytest.fixture
def newer_megatron(tmp_path):
    """The folder of the copy."""
    source = find_file("megatron.core").parents[1]
    shutil.copytree(source, tmp_path / "megatron", copy_function=os.symlink, ignore=shutil.ignore_patterns("*.pyc"))
    for name, (before, after) in CHANGES.items():
        file = tmp_path / name
        text = file.read_text()
        assert before in text
        file.unlink()
        file.write_text(text.replace(before, after))
    return tmp_path


def test_it_names_what_is_other_in_the_newer_megatron(newer_megatron, monkeypatch, capfd):
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "none")  # floor-clip-coefficient does not know the changed function
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the script imports others of this repository
    script = Path(ROOT, "scripts", "demo", "train.py")
    options = ("--json", "--run", "--ranks", "1", "--script", str(script))
    code = main(["upgrade", *options, sys.executable, str(newer_megatron), "--", *FLAGS.split()])
    out, err = capfd.readouterr()
    assert code == 3, err
    answer = json.loads(out[out.index("{") :])
    changed = {one["name"]: (one["before"], one["after"]) for one in answer["changed"]}
    assert changed == {"bucket_size": ("None", "7")}
    assert not any(answer[name] for name in ("gone", "new", "added", "dropped", "unknown"))
    assert answer["functions"] == {
        "changed": ["megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32"],
        "new": [],
        "gone": [],
    }
    (one_rank,) = answer["cuts"]
    first, second = one_rank["lines"]
    assert first["lm loss"][0] == first["lm loss"][1] and second["lm loss"][0] != second["lm loss"][1]
    assert one_rank["deviations"][0].startswith("update ")
