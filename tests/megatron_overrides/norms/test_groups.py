"""Norm groups: how --grad-norm-group is read, and which parameters a group gets."""

from types import SimpleNamespace

import pytest
import torch

from megatron_overrides.norms.groups import (
    clip_limit,
    measured_group,
    named_groups,
    separate_groups,
    tag,
    tagged_group,
)
from megatron_overrides.norms.tags import tag_named_groups

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-named-groups-separately")]


def config(*groups, **settings):
    return SimpleNamespace(grad_norm_group=list(groups), **{"clip_grad": 1.0, "mtp_clip_grad": None, **settings})


def test_a_group_is_split_at_the_first_equals_sign_and_the_last_colon():
    (group,) = named_groups(config(r"gdn=(?:in|out)_proj=?:0.5"))
    assert (group.name, group.pattern.pattern, group.limit) == ("gdn", r"(?:in|out)_proj=?", 0.5)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("router", "write NAME=REGEX:LIMIT"),
        ("router=mlp", "write NAME=REGEX:LIMIT"),
        ("=mlp:1", "write NAME=REGEX:LIMIT"),
        ("router=:1", "write NAME=REGEX:LIMIT"),
        ("router=(:1", "not a valid regular expression"),
        ("router=mlp:much", "the limit 'much' must be a number"),
        ("router=mlp:-1", "the limit '-1' must be a number"),
        ("router=mlp:nan", "the limit 'nan' must be a number"),
        ("mtp=mlp:1", "taken by the MTP heads"),
    ],
)
def test_a_group_that_cannot_be_read_is_an_error(text, problem):
    with pytest.raises(ValueError, match="--grad-norm-group") as error:
        named_groups(config(text))
    assert problem in str(error.value)


def test_a_group_that_is_not_in_a_list_is_an_error():
    with pytest.raises(ValueError, match="grad_norm_group. 'router=mlp:1' must be a list of NAME=REGEX:LIMIT"):
        named_groups(SimpleNamespace(grad_norm_group="router=mlp:1"))


def test_one_name_for_two_groups_is_an_error():
    with pytest.raises(ValueError, match="'a' is given to 2 groups"):
        named_groups(config("a=x:1", "b=y:1", "a=z:1"))


def test_each_group_has_its_limit():
    settings = config("router=router:0.5", "loose=proj:0", mtp_clip_grad=2.0)
    assert [clip_limit(settings, group) for group in (None, "mtp", "router", "loose")] == [1.0, 2.0, 0.5, 0.0]
    settings.mtp_clip_grad = None
    assert clip_limit(settings, "mtp") == 1.0


def test_groups_that_another_library_adds_are_measured(monkeypatch):
    """NeMo-RL appends "draft" to upstream's tuple at run time."""
    from megatron.core.optimizer import optimizer

    monkeypatch.setattr(optimizer, "SEPARATE_GRAD_NORM_GROUPS", ("mtp", "draft"))
    assert separate_groups(config("router=router:1")) == ("mtp", "draft", "router")


def test_a_tag_that_no_norm_knows_is_an_error():
    param = torch.nn.Parameter(torch.ones(1))
    tag(param, "router")
    assert tagged_group(param) == "router" and not hasattr(param, "is_mtp_param")
    with pytest.raises(ValueError, match="Unknown grad_norm_group 'router'; known: mtp"):
        measured_group(param, ("mtp",))


@pytest.fixture
def model():
    names = ("router", "in_proj", "out_proj", "head")
    modules = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in names})
    tag(modules["head"].weight, "mtp")
    return torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": modules})})


def groups_of(model):
    return [tagged_group(param) for param in model.parameters()]


def test_the_first_match_wins_and_heads_stay_heads(model):
    tag_named_groups([model], config("in=in_:1", "proj=proj:1", "all_heads=head:1"))
    assert groups_of(model) == [None, "in", "proj", "mtp"]


def test_names_are_searched_without_the_wrappers_of_the_model(model):
    tag_named_groups([model], config(r"router=^router\.:1"))
    assert groups_of(model) == ["router", None, None, "mtp"]


@pytest.mark.parametrize("pattern", [r"^embedding\.word_embeddings", r"^output_layer\."])
def test_copies_of_a_tied_embedding_are_in_one_group_whatever_their_name(model, pattern):
    """The first and the last pipeline stage have a copy each, which must be clipped alike."""
    model["module"]["module"]["router"].weight.shared_embedding = True
    tag_named_groups([model], config(f"embedding={pattern}:1"))
    assert groups_of(model) == ["embedding", None, None, "mtp"]
