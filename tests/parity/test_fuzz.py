"""scripts.fuzz draws runs that Megatron's parser takes, the same ones again, and fails where nothing explains one."""

import argparse
import json
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from megatron_mtp_patches.parity.comparison import Deviation
from megatron_mtp_patches.parity.cuts import Cut
from megatron_mtp_patches.parity.study import Explanation, Result, Study
from megatron_mtp_patches.parity.verdict import Verdict

from scripts.fuzz import __main__ as fuzz
from scripts.fuzz.drawing import Drawing
from scripts.fuzz.features import Feature, Slot, read_slots, unknown_features

pytestmark = pytest.mark.forked("patched")
arguments = pytest.importorskip("megatron.training.arguments", reason="the 0.16.1 wheel has no megatron.training")
CUT = Cut("TP2", 2, ())


@pytest.fixture
def parser():
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def drawing():
    return Drawing(read_slots(), set())


def test_every_feature_is_drawn_and_its_flags_are_known(drawing, parser):
    draws = [drawing.draw(seed) for seed in range(2000)]
    assert {name for one in draws for name in one.features} == set(drawing.features)
    assert unknown_features(read_slots(), parser) == set()
    for one in draws[:100]:
        assert parser.parse_known_args(one.words)[1] == [], one


def test_a_feature_that_this_megatron_does_not_have_is_not_drawn(parser):
    def feature(name, *flags):
        return Feature(name, flags, (), frozenset(), 1.0)

    some = feature("old", "--swiglu"), feature("new", "--no-such-flag"), feature("other", "--optimizer", "no-such-name")
    slots = [Slot(1.0, False, some)]
    unknown = unknown_features(slots, parser)
    assert unknown == {"new", "other"}
    assert {Drawing(slots, unknown).draw(seed).features for seed in range(20)} == {("old",)}


def test_a_seed_is_a_configuration(drawing):
    again = Drawing(read_slots(), set())
    assert [drawing.draw(seed) for seed in range(50)] == [again.draw(seed) for seed in range(50)]
    assert len({drawing.draw(seed).words for seed in range(50)}) > 40


def test_what_a_feature_needs_is_drawn_with_it_and_what_it_excludes_is_not(drawing):
    draws = [*map(drawing.draw, range(300)), *drawing.single_features()]
    for one in draws:
        for feature in map(drawing.features.get, one.features):
            assert not feature.without & set(one.features), one
            assert all(names & set(one.features) for names in feature.needs), one
    assert all(name in alone.features for name, alone in zip(drawing.features, draws[300:], strict=True))


@pytest.mark.parametrize(
    "findings, explanations, outcome, code",
    [
        ([], [], "equal", 0),
        ([Deviation(1, "loss", "lm loss", 0.1)], [], "unexplained", 1),
        ([Deviation(1, "loss", "lm loss", 0.1)], ["known"], "explained", 0),
    ],
)
def test_a_finding_that_nothing_explains_ends_with_1(monkeypatch, capsys, findings, explanations, outcome, code):
    from scripts.fuzz import studying

    explained = [Explanation(SimpleNamespace(id=one, patch=None), None) for one in explanations]
    results = [Result(CUT, 1.0, verdict=Verdict(findings, {}), explanations=explained), Result(CUT, 1.0, "refused")]
    study = create_autospec(Study)
    study.return_value.notes, study.return_value.results.return_value = [], results
    monkeypatch.setattr(studying, "Study", study)
    answer = json.loads(json.dumps(studying.study("script", Drawing(read_slots(), set()).draw(0))))
    assert [cut["outcome"] for cut in answer["cuts"]] == [outcome, "refused"]
    assert fuzz.summarize([answer]) == code
    assert ("loss lm loss, step 1: off by 0.1" in capsys.readouterr().out) == bool(code)
