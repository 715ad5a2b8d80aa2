"""What README and docs/ show can be typed: each command is run by a test or says why not, each flag exists."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import megatron_mtp_patches
import pytest
from megatron_mtp_patches import functional
from megatron_mtp_patches.cli.parser import make_parser
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.megatrons.known import MEGATRONS

from scripts.common.toml import read_toml
from tests.pages import PAGES, ROOT, blocks, shown
from tests.warm.noticed import CHANGES_NOTHING

pytestmark = pytest.mark.forked("patched")
BLOCKS = blocks()
MATRIX = read_toml(ROOT / "ci/matrix.toml")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = {
    name
    for file in sorted((ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"\bshown\([\"']([\w-]+)[\"']\)", file.read_text(encoding="utf-8"))
}
NEEDS = re.compile(
    r"needs (a GPU|8 GPUs|a network|files of yours|several nodes|several environments|a checkout of Megatron-LM)\b"
)
FLAG = re.compile(r"(?<![\w/#-])--[a-z][\w-]*")
# Of other programs than Megatron's scripts and our command, and of newer releases than the one that tests this.
OTHERS = {
    "pip": {"--find-links", "--no-deps", "--no-index", "--user"},
    "git": {"--depth"},
    "nox": {"--no-venv"},
    "pytest": {"--write-tables"},
    "torchrun": {"--nnodes", "--nproc-per-node"},
    "slime": {"--custom-megatron-init-path"},
    "srun": {"--nodes", "--ntasks", "--ntasks-per-node"},
    "ms-swift": {"--merge-lora", "--packing", "--rlhf-type", "--vllm-enable-lora"}
    | {"--add-version", "--check-model", "--dataloader-num-workers", "--dataset", "--load-from-cache-file"}
    | {"--logging-steps", "--max-length", "--mcore-model", "--model", "--model-type", "--output-dir"}
    | {"--perform-initialization", "--save-safetensors", "--save-steps", "--split-dataset-ratio", "--template"}
    | {"--dist-ckpt-optim-fully-reshardable", "--torch-dtype", "--tuner-type"},
    "verl": {"--cfg"},
    "scripts.bench": {"--kind", "--out", "--parameters", "--python", "--turns"},
    "scripts/test.sh": {"--others"},
    "scripts.docs": {"--runs"},  # of a former commit
    "scripts.fuzz": {"--minutes"},
    "scripts.gpu": {"--all", "--device", "--first", "--megatron", "--rest", "--seconds"},
    "scripts.parity_scores": {"--checkout"},
    "scripts.pins": {"--check"},
    "scripts.replay": {"--megatron", "--ranks", "--release"},
    "megatron-core 0.16": {"--moe-use-legacy-grouped-gemm"},
    "megatron-core 0.19": {"--freeze-all-layers", "--freeze-base-for-mtp", "--qad-train-target"}
    | {"--dataloader-inter-document-masking", "--tensor-parallel-num-weight-shards"}
    | {"--expert-tensor-parallel-num-weight-shards"},
    "megatron.post_training": {"--export-default-te-spec", "--export-kd-teacher-load", "--modelopt-enabled"},
    "main": {"--megatron-fsdp-version", "--mtp-hsm"},
}


def fences():
    for page in PAGES:
        for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
            yield page, language, text


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page.name}: {block.text.split()[0]}")
def test_a_command_is_run_by_a_test_or_says_why_not(block):
    is_run, _, name = block.marker.partition("run by a test: ")
    if is_run == "not ":
        assert NEEDS.match(name)
    else:
        assert is_run == "" and name in RUN


def test_commands_are_in_blocks_of_bash():
    assert len(BLOCKS) == sum(language == "bash" for _, language, _ in fences())
    assert {language for _, language, _ in fences()} == {"bash", "python", "text", "yaml"}
    for page, language, text in fences():
        assert language == "bash" or not re.match(r"\$ |pip |torchrun |megatron-mtp-patches ", text), (page.name, text)


def test_each_row_of_a_table_has_the_cells_of_its_header():
    wrong = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for rows in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            header, *others = rows.splitlines()
            wrong += [f"{page.name}: {row}" for row in others if count_cells(row) != count_cells(header)]
            if not re.fullmatch(r"\|(:?-+:?\|)+", others[0] if others else ""):
                wrong.append(f"{page.name}: {header} (no line below the header)")
    assert not wrong, "\n".join(wrong)


def count_cells(row):
    assert row.rstrip().endswith("|"), row
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def test_each_flag_exists():
    megatron = pytest.importorskip("megatron.training.arguments", reason="the wheel of 0.16.1 has no trainer")
    flags = {*options(make_parser()), *options(megatron.add_megatron_arguments(argparse.ArgumentParser()))}
    flags = flags.union(*OTHERS.values())
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    texts |= {one.id: " ".join((one.effect, one.when, one.only_if, one.instead)) for one in known_defects()}
    named = {flag: name for name, text in texts.items() for flag in FLAG.findall(text)}
    # ms-swift writes them with underscores.
    unknown = sorted(f"{flag} in {page}" for flag, page in named.items() if flag.replace("_", "-") not in flags)
    assert not unknown, "\n".join(unknown)


def options(parser):
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)


def test_the_page_of_the_api_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: megatron_mtp_patches\.([\w.]+)$", page, re.MULTILINE)
    modules = {getattr(functional, name).__module__.partition(".")[2] for name in functional.__all__}
    assert sorted(named) == sorted([*megatron_mtp_patches.__all__, *modules])


def test_the_variable_for_functions_leaves_out_every_patch():
    code = "import megatron_mtp_patches as patches; print(*{str(one.state) for one in patches.status()})"
    line = f"{shown('functional')}\n'{sys.executable}' -c '{code}'"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "patches")}
    done = subprocess.run(["bash", "-euc", line], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "disabled\n"


@pytest.mark.parametrize("page, name", [("megatron-bridge.md", "Megatron-Bridge 0.5.1"), ("ms-swift.md", "ms-swift")])
def test_a_framework_is_installed_as_in_ci(page, name):
    (text,) = [one.text for one in blocks() if one.page.name == page and "those that CI installs" in one.marker]
    words = {word.strip("'") for word in text.split()}
    framework = next(one for one in MATRIX["environment"] if one["name"] == name)
    release = next(one for one in MEGATRONS if one["version"] == framework["release"])
    wanted = {*framework["installs"], *framework.get("alone", ()), f"megatron-core=={framework['release']}"}
    assert wanted | {f"transformer-engine=={release['transformer_engine']}", ".[te]"} <= words


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    missing = {Path(page).name for page in PAGES[1:]} - set(re.findall(r"([\w-]+\.md)$", nav, re.MULTILINE))
    assert not missing, "name them in `nav` of mkdocs.yml"


def test_each_file_of_tests_is_in_a_suite_or_an_environment():
    groups = [*MATRIX["suite"], *MATRIX["environment"]]
    named = [ROOT / path for one in groups for path in [*one["tests"], *one.get("scheduled_tests", [])]]
    files = (ROOT / "tests").rglob("test_*.py")
    assert not [str(file) for file in files if not {file, *file.parents}.intersection(named)]


def test_the_tests_that_notice_edits_exist():
    rows = json.loads((ROOT / "ci" / "noticed_edits.json").read_text(encoding="utf-8"))
    for test in {test for tests in rows.values() for test in tests if test != CHANGES_NOTHING}:
        file, _, function = test.partition("[")[0].partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), test
