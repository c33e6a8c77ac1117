"""Removal of secrets from evidence, messages and reasons that are kept and shown.

It recognises well-known forms of tokens, and values whose name calls them a secret. Patterns are in
RE2's language, each of them linear; text without any hint of a secret is scanned only once. Text
that is ordinary in training (`tokens: 4096`, `pad_token=<pad>`, hashes of commits) is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unbroken.spec.job.incident import Incident, Restored, StackGroup, Symptom

REMOVED = "[removed]"

_HINT = re.compile(
    r"(?i)token|secret|passw|pwd|key|credential|bearer|basic |://|hf_|gh[a-z]_|github_pat|glpat|sk-"
    r"|akia|asia|aiza|eyj|xox|npm_|nvapi|dop_v1"
)
# Forms that GitHub, Hugging Face, OpenAI, Anthropic, AWS, Google, Slack, GitLab, npm, NVIDIA and
# DigitalOcean document for their tokens; and JSON web tokens (RFC 7519).
FORMS = (
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bgh[opsur]_[A-Za-z0-9]{16,}",
    r"\bgithub_pat_[A-Za-z0-9_]{16,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bsk-[A-Za-z0-9_-]{16,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"\bnpm_[A-Za-z0-9]{30,}",
    r"\bnvapi-[A-Za-z0-9_-]{16,}",
    r"\bdop_v1_[a-f0-9]{32,}",
    r"\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]*)?",
)
_FORMS = re.compile("|".join(FORMS))
AUTHORIZATION = r"(?i)\b((?:bearer|basic)[ \t]+)[A-Za-z0-9._~+/=-]{8,}"
_AUTHORIZATION = re.compile(AUTHORIZATION)
URL = r"(://)[^/\s@'\"]+(@)"
_URL = re.compile(URL)
# The end of a name that calls its value a secret, and the value: quoted, or up to the next space.
NAMED = (
    r"(?i)(token|secret|password|passwd|passphrase|_pwd|api[_-]?key|access[_-]?key"
    r"|secret[_-]?key|private[_-]?key|auth[_-]?key|credentials?)"
    r"(\\?[\"']?[ \t]*(?::=|=>|[:=])[ \t]*)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;\"'&]+)"
)
_NAMED = re.compile(NAMED)
# Weights & Biases: 40 hexadecimal digits; a commit's hash looks the same, and has another name.
KEY = r"(?i)(\bkey[^A-Za-z0-9\n]{1,4}(?:is )?)[0-9a-f]{40}\b"
_KEY = re.compile(KEY)
PATTERNS = (*FORMS, AUTHORIZATION, URL, NAMED, KEY)
_NUMBER = re.compile(r"^[-+]?[0-9][0-9_.,eE+-]*[A-Za-z%/]{0,3}$")
_PLAIN = re.compile(
    r"^(?:none|null|true|false|nan|unset|empty|missing|invalid|\[removed\])\W*$", re.I
)
_WORDY = re.compile(r"^[<\[{(|]|^[a-z]+$|^[A-Z]?[a-z]*(?:[A-Z][a-z]+)*$")
_PEM_BEGIN = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PEM_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_BASE64 = re.compile(r"^[\s>|]*[A-Za-z0-9+/=]{16,}\s*$")


def clean(text: str) -> str:
    """The text without secrets; lines of it are seen as such."""
    if "PRIVATE KEY-----" in text or "\n" in text:
        return "\n".join(clean_lines(text.split("\n")))
    return _clean_line(text)


def clean_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines without secrets; a private key may span several lines, and be cut at either
    end."""
    found: list[str] = []
    is_key = False
    for line in lines:
        begin, end = _PEM_BEGIN.search(line), _PEM_END.search(line)
        if begin:
            is_key = end is None or end.start() < begin.start()
            rest = line[end.end() :] if end is not None and not is_key else ""
            found.append(_clean_line(line[: begin.start()]) + REMOVED + _clean_line(rest))
        elif end:
            found = found if is_key else _without_tail(found)
            found.append(REMOVED + _clean_line(line[end.end() :]))
            is_key = False
        elif is_key and _BASE64.match(line):
            found.append(REMOVED)
        else:
            is_key = is_key and (not line.strip() or ":" in line)
            found.append(_clean_line(line))
    return tuple(found)


def clean_symptom(symptom: Symptom) -> Symptom:
    """The sign without secrets."""
    return replace(symptom, text=clean(symptom.text), evidence=clean_lines(symptom.evidence))


def clean_incident(incident: Incident) -> Incident:
    """The incident without secrets."""
    symptoms = tuple(clean_symptom(symptom) for symptom in incident.signals)
    return replace(
        incident,
        culprit=clean_symptom(incident.culprit),
        signals=symptoms,
        reason=clean(incident.reason),
        blame=clean(incident.blame),
        groups=tuple(_clean_group(group) for group in incident.groups),
        resumed=clean(incident.resumed),
        restored=tuple(_clean_restored(one) for one in incident.restored),
    )


def _clean_restored(one: Restored) -> Restored:
    return replace(one, name=clean(one.name), source=clean(one.source))


def _clean_group(group: StackGroup) -> StackGroup:
    return replace(group, doing=clean(group.doing), stack=clean_lines(group.stack))


def _clean_line(line: str) -> str:
    if _HINT.search(line) is None:
        return line
    line = _URL.sub(_without_user, line)
    line = _AUTHORIZATION.sub(rf"\1{REMOVED}", line)
    line = _FORMS.sub(REMOVED, line)
    line = _KEY.sub(rf"\1{REMOVED}", line)
    return _NAMED.sub(_without_value, line)


def _without_user(found: re.Match[str]) -> str:
    return f"{found[1]}{REMOVED}{found[2]}"


def _without_value(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    bare = value.strip("\"'")
    is_token = name.lower().endswith("token")
    is_said = REMOVED in value or _PLAIN.match(bare) or _NUMBER.match(bare) or not bare
    # `eos_token: endoftext` is a word; a secret of one word only has a name in capitals.
    if is_said or (is_token and not name.isupper() and _WORDY.match(bare)):
        return found[0]
    return f"{name}{between}{REMOVED}"


def _without_tail(lines: Iterable[str]) -> list[str]:
    """Replace the lines above the end marker of a key whose beginning is missing."""
    kept = list(lines)
    for index in range(len(kept) - 1, -1, -1):
        if not _BASE64.match(kept[index]):
            break
        kept[index] = REMOVED
    return kept
