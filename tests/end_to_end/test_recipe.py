"""The flags of docs/add-mtp-heads.md do what the page says."""

import re

import pytest

from tests.pages import read_with_patches, shown

from .conftest import ARGUMENTS, HAS_TRAINER, ROOT

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.skipif(not HAS_TRAINER, reason="the 0.16.1 wheel has no megatron.training"),
]
SMALL = ["--ckpt-format", "torch", "--train-iters", "4", "--save-interval", "4"]


def test_the_recipe_gives_heads_with_an_accepted_length(train, run_shown, dataset, tmp_path, tmp_path_factory):
    page = (ROOT / "docs" / "add-mtp-heads.md").read_text(encoding="utf-8")
    flags = re.search(r"<!-- flags of the recipe.*?```text\n(.*?)```", page, re.DOTALL)[1].split()
    base, heads = tmp_path / "base", tmp_path / "heads"
    train(*SMALL, "--save", str(base), heads=())
    flags = [{"BASE": str(base), "HEADS": str(heads)}.get(word, word) for word in flags]
    flags_to_run = [*ARGUMENTS, *SMALL, *flags, "--data-path", str(dataset)]
    check = f'FLAGS="{" ".join(flags_to_run)}"\n' + shown("recipe-check")
    doctor, verified = run_shown(check, {})
    assert "known defect" in doctor.lower() and "unknown to Megatron" not in doctor
    assert re.search(r"has left \d+ tensors of the main model as they were, to the bit", verified)
    (_, patches), _ = read_with_patches(check, tmp_path_factory.mktemp("read"))
    lines, output = train(*SMALL, *flags, heads=(), patches=patches)
    assert sorted(lines) == [1, 2, 3, 4]
    lengths = [float(length) for length in re.findall(r"mtp acceptance length: (\S+) \|", output)]
    assert len(lengths) == 4 and min(lengths) > 1
    assert re.search(r"validation of the MTP heads .* mtp acceptance length value: \d", output)
    assert (heads / "iter_0000004").is_dir()
