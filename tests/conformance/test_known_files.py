"""What fingerprints.json says of the installed files is what their syntax trees say."""

from __future__ import annotations

import json
from pathlib import Path

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.engine.source import find_file, parse_bytes
from megatron_mtp_patches.engine.source_cache import hash_bytes
from megatron_mtp_patches.engine.source_questions import answer, questions_about

TABLE = json.loads(Path(megatron_mtp_patches.__file__).with_name("fingerprints.json").read_text(encoding="utf-8"))
QUESTIONS = questions_about((*BASE, *CATALOG))
INSTALLED = [module for module in sorted(QUESTIONS) if find_file(module)]


@pytest.mark.parametrize("module", INSTALLED)
def test_the_table_has_every_answer_of_an_installed_file(module):
    file = find_file(module)
    source = file.read_bytes()
    known = TABLE["files"][module].get(hash_bytes(source))
    assert known is not None, f"{file} is not known: accept it with drift --against FOLDER --accept RELEASE"
    assert known == answer(parse_bytes(source, file), QUESTIONS[module])
