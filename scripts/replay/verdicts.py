"""Judge a test by its outcomes without and with the patches, and put the cause into words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

STILL, FIXED, PASSING, NEW, EITHER, SKIPPED, NOT_RUN = (
    "still passing",
    "fixed",
    "passing",
    "newly failing",
    "failing either way",
    "skipped",
    "not run",
)
VERDICTS = (STILL, FIXED, PASSING, NEW, EITHER, SKIPPED, NOT_RUN)
NOT_ASKED = ("not asked", "it passes with the patches")

Outcomes = dict[str, tuple[str, str]]  # test -> (outcome, cause)


@dataclass
class Verdict:
    word: str
    cause: str = ""


def judge_all(plain: Outcomes, patched: Outcomes, causes: list[dict], device: str) -> dict[str, Verdict]:
    """Return {test: verdict}; a file that cannot be collected has a verdict only if neither run knows its tests."""
    tests = {**plain, **patched}
    files = {test.partition("::")[0] for test in tests if "::" in test}
    return {
        test: judge(_outcome(test, plain), _outcome(test, patched), causes, device)
        for test in sorted(set(tests) - files)
    }


def _outcome(test: str, outcomes: Outcomes) -> tuple[str, str]:
    """Return the outcome of the test, or of its file if that could not be collected."""
    missing = ("not run", "only the other run collected it")
    return outcomes.get(test) or outcomes.get(test.partition("::")[0]) or missing


def judge(plain: tuple[str, str], patched: tuple[str, str], causes: list[dict], device: str) -> Verdict:
    """Return the verdict on a test. One that the patches make fail or skip is newly failing.

    The cause is the message of the patched run; of a test that was fixed, that of the plain run.
    """
    before, after = plain[0], patched[0]
    if "not run" in (before, after):
        return Verdict(NOT_RUN, (plain if before == "not run" else patched)[1])
    if after == "passed":
        if before == NOT_ASKED[0]:
            return Verdict(PASSING)
        return Verdict(STILL) if before == "passed" else Verdict(FIXED, in_words(plain[1], causes, device))
    if before == "passed":
        return Verdict(NEW, f"{after}: {patched[1]}")
    cause = in_words(patched[1], causes, device)
    if after == "skipped" or before == "skipped":
        return Verdict(SKIPPED, cause)
    if in_words(plain[1], causes, device) != cause:
        cause = f"{cause} (plain: {in_words(plain[1], causes, device)})"
    return Verdict(EITHER, cause)


def doubtful(test: str, plain: Outcomes, patched: Outcomes) -> bool:
    """True if one run alone failed, hung or crashed: under load a collective may time out."""
    before, after = _outcome(test, plain)[0], _outcome(test, patched)[0]
    if before == after:
        return False
    is_new = before == "passed" and after in ("failed", "skipped")
    return is_new or len({before, after} & {"hung", "crashed"}) == 1


def all_ranks_say(store: Any, keys: list[str], rank: int, text: str, patience: timedelta) -> bool:
    """True if every rank writes `text` under its key of torch's `store`, in time."""
    store.set(keys[rank], text)
    try:
        store.wait(keys, patience)
    except RuntimeError:  # torch's DistStoreError: not in time
        return False
    return {store.get(key) for key in keys} == {text.encode()}


def in_words(message: str, causes: list[dict], device: str) -> str:
    """Return the first cause of ci/replay.toml that matches, else the message without numbers that change."""
    for cause in causes:
        if device == cause.get("device", device) and re.search(cause["match"], message):
            return cause["text"]
    return re.sub(r"0x[0-9a-f]+|\b\d{5,}\b|\bpytest-\d+\b", "…", message)
