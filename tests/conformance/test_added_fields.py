"""The fields of TransformerConfig that the patches add, as docs/testing.md counts them."""

import dataclasses
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.forked("patched")

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_upstream_s_golden_test_of_the_configuration_meets_as_many_fields_as_the_page_says():
    from megatron.core.transformer import TransformerConfig
    from megatron_mtp_patches.installed_megatron import find_releases

    sentence = re.search(r"The patches add (.*?), and\s+remove\s+none", PAGE.read_text(encoding="utf-8"), re.S)[1]
    counts = [part.split(" on ") for part in re.split(r",\s+(?=\d+ on)", sentence)]
    (expected,) = (int(count) for count, releases in counts if find_releases() & set(re.split(r"[\s,]+", releases)))
    added = [field.name for field in dataclasses.fields(TransformerConfig) if field.metadata.get("added_in_place")]
    assert len(added) == expected
