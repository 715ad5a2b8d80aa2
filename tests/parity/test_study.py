"""Findings of a cut are explained by the fewest patches that remove them, and controls are tried where none does."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.forked("torch")
CUT_FLAGS = ("--tensor-model-parallel-size 2", "--recompute-granularity full")


@pytest.fixture
def study_cut(monkeypatch):
    """study_cut(acting, removes, controls): the result of a cut whose trainings are played.

    It is equal with the patches of a set in `removes`, or more, or where its flags lack one in `controls`.
    """
    from megatron_mtp_patches.parity import study
    from megatron_mtp_patches.parity.cuts import Cut
    from megatron_mtp_patches.parity.flags import split
    from megatron_mtp_patches.parity.verdict import Verdict

    flags = tuple(split(" ".join(CUT_FLAGS).split()))

    def run(acting, removes=(), controls=(), defined_by_cut=(), kind="gradient"):
        finding = SimpleNamespace(kind=kind)

        def train(flags, ranks, patches=None):
            has = set((patches or "").split(","))
            names = {flag.name for flag in flags}
            is_equal = any(has >= one for one in removes) or any(name not in names for name in controls)
            return [SimpleNamespace(arguments={}, is_equal=is_equal or patches == "all" and bool(removes))]

        trainings = SimpleNamespace(train=train, other_reference=lambda flags, patches=None: None)
        reference = SimpleNamespace(record=SimpleNamespace(arguments={}))
        monkeypatch.setattr(
            study,
            "judge_cut",
            lambda one, records: Verdict([] if records[0].is_equal else [finding], {"by cut": defined_by_cut}),
        )
        monkeypatch.setattr(study, "reference_flags", lambda small: flags)
        kinds = {"log": "wrong log"}
        defects = [
            SimpleNamespace(id=f"defect-{one}", patch=one, kind=kinds.get(one, "wrong numbers")) for one in acting
        ]
        monkeypatch.setattr(
            study, "known_explanations", lambda *values: [(one, one.patch == "both") for one in defects]
        )
        self = study.Study.__new__(study.Study)
        vars(self).update(small=None, data="whole", applied=["own"], carriers=(), all_are_applied=False)
        vars(self).update(trainings=trainings, reference=reference)
        return self._study(Cut("TP2", 2, flags))

    return run


def explained(result):
    return {one.defect.patch: one.is_confirmed for one in result.explanations}


def test_patches_that_remove_it_alone_are_confirmed(study_cut):
    result = study_cut(["a", "b", None], removes=[{"own", "a"}])
    assert explained(result) == {"a": True} and result.is_explained
    assert result.goes_away is True and result.controls == {}


def test_patches_that_are_needed_together_are_confirmed_together(study_cut):
    result = study_cut(["a", "b", "c"], removes=[{"own", "a", "c"}])
    assert explained(result) == {"a": True, "c": True}


def test_what_no_patch_removes_is_tried_under_the_controls_that_change_the_run(study_cut):
    result = study_cut(["a"], controls=["--recompute-granularity"])
    assert explained(result) == {"a": False} and not result.is_explained and result.goes_away is False
    assert result.controls["without recomputation"] is True
    assert result.controls["with untied embeddings"] is False and result.controls["with sequence parallelism"] is False
    assert "without MTP heads" not in result.controls


def test_a_defect_without_a_patch_explains_what_remains(study_cut):
    assert study_cut([None]).is_explained


def test_a_defect_that_acts_beside_what_megatron_defines_by_cut_is_named_as_not_told_apart(study_cut):
    numbers, log = (SimpleNamespace(kind=kind) for kind in ("gradient", "log"))
    equal = {"controls": ["--sequence-parallel"]}  # which the cut lacks
    assert [one.patch for one in study_cut(["a", "both"], defined_by_cut=[numbers], **equal).not_told_apart] == ["a"]
    assert study_cut(["a"], defined_by_cut=[log], **equal).not_told_apart == []


def test_a_control_changes_only_runs_that_it_fits():
    from megatron_mtp_patches.parity.controls import CONTROLS
    from megatron_mtp_patches.parity.flags import split

    def names_of_changes(text):
        flags = tuple(split(text.split()))
        return {control.name for control in CONTROLS if control.change(flags) != flags}

    always = {"with untied embeddings", "without fused weight gradients", "with a mean over all tokens"}
    assert names_of_changes("--pipeline-model-parallel-size 2") == always
    assert names_of_changes("--tensor-model-parallel-size 2") == always | {"with sequence parallelism"}
    untied = names_of_changes("--untie-embeddings-and-output-weights --sequence-parallel --mtp-num-layers 1")
    assert untied == always - {"with untied embeddings"} | {"without sequence parallelism", "without MTP heads"}


def test_a_defect_of_the_log_explains_numbers_of_the_log_alone(study_cut):
    assert explained(study_cut(["a", "log"])) == {"a": False}
    assert explained(study_cut(["a", "log"], kind="log")) == {"a": False, "log": False}


@pytest.mark.parametrize("flags", ["", "--transformer-impl transformer_engine"])
def test_layers_of_transformer_engine_need_its_python(monkeypatch, flags):
    from megatron_mtp_patches.parity import study
    from megatron_mtp_patches.parity.flags import split

    monkeypatch.setattr(study.rehearsal, "with_transformer_engine", lambda: False)
    small = SimpleNamespace(flags=split(f"--num-layers 2 {flags}".split()))
    with pytest.raises(study.MissingPackageError, match="--transformer-impl local"):
        study.Study("train.py", small, "whole")


@pytest.mark.parametrize("has_python", [True, False])
def test_what_is_not_fused_without_transformer_engine_is_said(monkeypatch, has_python):
    from megatron_mtp_patches.parity import study
    from megatron_mtp_patches.parity.flags import split

    reference = SimpleNamespace(record=SimpleNamespace(unplaced=[]), tolerance=SimpleNamespace(is_steady=True))
    monkeypatch.setattr(study.rehearsal, "with_transformer_engine", lambda: has_python)
    monkeypatch.setattr(study, "Trainings", lambda *values: SimpleNamespace(reference=reference))
    monkeypatch.setattr(study, "reference_flags", lambda small: ())
    small = SimpleNamespace(flags=split("--transformer-impl local".split()))
    notes = study.Study("train.py", small, "whole").notes
    assert [note for note in notes if "nothing is fused" in note] == notes and bool(notes) is not has_python
