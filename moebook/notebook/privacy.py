"""What must not leave the machine: secrets and absolute paths.

Used twice: the kernel starts without variables that look like secrets, and no page is published
that shows one.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASS|PASSPHRASE|CREDENTIAL|COOKIE|AUTH|API_?KEY|KEY|PAT)S?"
    r"(_|$)",
    re.IGNORECASE,
)
_SECRET_TEXT = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a GitLab token": r"\bglpat-[\w-]{20,}",
    "an API key": r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}",
    "an AWS key": r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b",
    "a Google key": r"\bAIza[\w-]{30,}",
    "a Slack token": r"\bxox[abeprs]-[\w-]{10,}",
    "a signed web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/@]+@",
}
_SHORTEST = 8
"""A variable's value is looked for in a page from this length on; shorter ones are too common."""

_TOPS = "home|root|Users|tmp|var|opt|usr|etc|private|mnt|media|srv|run|work|workspace|content|data"
_PATH = re.compile(
    rf"(?<![\w.:/~-])(?:/(?:{_TOPS})(?:/[\w.@+=-]+)+/?|[A-Za-z]:(?:\\[\w.@+=-]+){{2,}})", re.ASCII
)


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that look like secrets.

    A variable goes when its name has a part such as TOKEN or API_KEY, or its value looks like one.
    """
    return {k: v for k, v in os.environ.items() if not _SECRET_NAME.search(k) and not secret(v, {})}


def secret(text: str, variables: Mapping[str, str] | None = None) -> str | None:
    """Say what kind of secret a text shows, or None.

    Args:
        text: Any text.
        variables: Environment in which secrets are looked up by name, so that the value of any
            variable with a name such as TOKEN is found as well; this process's by default.
    """
    for kind, pattern in _SECRET_TEXT.items():
        if re.search(pattern, text):
            return kind
    for name, value in (os.environ if variables is None else variables).items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and value in text:
            return f"the value of the environment variable {name}"
    return None


def scrub(text: str, folder: Path) -> tuple[str, int]:
    """Replace absolute paths in a text: inside the project by relative ones, else by ``.../name``.

    Args:
        text: Any text.
        folder: The project.

    Returns:
        The text, and how many paths were replaced.
    """
    text, inside = re.subn(rf"{re.escape(str(folder))}(?:/|(?![\w.-]))", "", text)
    count = inside
    for place in {sys.prefix, tempfile.gettempdir(), str(Path.home())} - {"/", ""}:
        text, found = re.subn(rf"{re.escape(place)}(?:[/\\][\w.@+=-]+)+", _shorten, text)
        count += found
    text, found = _PATH.subn(_shorten, text)
    return text, count + found


def _shorten(match: re.Match[str]) -> str:
    return ".../" + re.split(r"[/\\]", match[0].rstrip("/\\"))[-1]
