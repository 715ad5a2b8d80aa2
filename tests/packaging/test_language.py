"""No text uses a word for which Megatron, or plain English, has a better one; docs/glossary.md explains Megatron's."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.forked("python")
ROOT = Path(__file__).resolve().parents[2]
INSTEAD = {
    "trunks?": "main model",
    "guess(es|ed|ing|ers?)?": "prediction, or acceptance rate",
    "norms? of (its|their) own|own norms?": "separate norm",
    "the set(?! of)": "the patches",
    "somebody else|strangers?": "another library",
    "loud(ly)? module": "module with exploding gradients",
    "bits a byte": "bits per byte",
    "waits? (of|for) the (host|device)": "host-device sync",
    "anew": "again, or created",
    "mend(s|ed|ing)?": "fix",
    "gardens?": "a name that says what it is",
    "[\"']nobody[\"']|by nobody": "None, or by no rank",
}
LEFT_OUT = (":!*.png", ":!docs/glossary.md", ":!tests/packaging/test_language.py")


def test_text_uses_the_words_of_megatron():
    listed = subprocess.check_output(["git", "ls-files", "--", ".", *LEFT_OUT], cwd=ROOT, text=True)
    found = []
    for name in listed.splitlines():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = "\n## ".join(text.split("\n## ")[: 2 if name == "CHANGELOG.md" else None])  # its past entries stay
        for word, instead in INSTEAD.items():
            word = word.replace(" ", r"[\s#_]+")  # in a name, and over the end of a line, too
            for match in re.finditer(rf"(?<![a-z])({word})(?![a-z])", text, re.IGNORECASE):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: {match[0]!r}, say {instead}")
    assert not found, "\n".join(found)
