"""Megatron's files are exchanged while a process runs: refused by name, and nothing is half applied."""

from __future__ import annotations

SCENARIO = "unpatched"
TARGET = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"


def test_a_changed_file_of_an_imported_module_is_refused_by_name(found):
    assert f"{TARGET} is not the source of any release" in found["on disk"]


def test_code_that_is_not_that_of_a_known_file_is_refused_by_name(found):
    assert "does not run what is in" in found["behind"] and "Start the process again" in found["behind"]


def test_a_reload_refuses_what_needs_the_changed_function_and_keeps_the_rest(found):
    assert "is refused" in found["reloaded"] and f"{TARGET} is not the source of any release" in found["reloaded"]
    needing = [name for name, (_, needs, _) in found["refused"].items() if needs]
    assert needing
    for name, (state, needs, _) in found["refused"].items():
        assert (state == "refused") == needs, name


def test_once_the_file_is_as_it_was_all_is_in_force(found):
    for name, (state, _, counts) in found["mended"].items():
        assert state in ("applied", "repaired", "native", "pending"), name
        assert state in ("native", "pending") or set(counts) <= {1}, name
