"""NVIDIA's own diagnosis where it is installed: `dcgmi diag -r LEVEL -j`, read tolerantly.

The form is that of DCGM 3 and 4 (DCGM documentation, "DCGM Diagnostics", JSON output).  Anything
that is not a test's own `Fail` is unknown: a lost connection to the host engine is no broken GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from .findings import Finding, Settings, Test, failed, passed, unknown

LIMITS = {1: 120.0, 2: 600.0, 3: 3600.0, 4: 7200.0}
"""Seconds; level 4 takes 45 to 90 minutes on HyperPod."""


def diagnose(settings: Settings) -> Iterator[Finding]:
    """Run the diagnosis and tell each of its tests."""
    program = shutil.which("dcgmi")
    if program is None:
        yield unknown("dcgm", "dcgmi is not installed here")
        return
    level = settings.dcgm_level
    try:
        done = subprocess.run(
            [program, "diag", "-r", str(level), "-j"],
            capture_output=True,
            timeout=LIMITS.get(level, LIMITS[4]),
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield unknown("dcgm", f"level {level} did not end in {LIMITS[level]:.0f} s")
        return
    findings = list(read_diagnosis(done.stdout))
    if findings:
        yield from findings
        return
    said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    yield unknown("dcgm", f"dcgmi ended with {done.returncode}: {said[-1] if said else 'silent'}")


def read_diagnosis(text: bytes) -> Iterator[Finding]:
    """A finding for each test of the answer; none where it is no diagnosis."""
    try:
        # dcgmi writes lines for people before the object.
        content = msgspec.json.decode(text[max(0, text.find(b"{")) :])
    except msgspec.DecodeError:
        return
    for name, results in _tests(content):
        broken, ran = [], False
        for result in results:
            status = str(result.get("status", "")).lower()
            ran = ran or status in ("pass", "warn", "fail")
            if status == "fail":
                gpu = result.get("gpu_id", result.get("entity_id", "?"))
                broken.append(f"GPU {gpu}: {_warnings(result) or 'no reason given'}")
        test = f"dcgm-{name.lower().replace(' ', '-')}"
        if broken:
            yield failed(test, "; ".join(broken))
        elif ran:
            yield passed(test)
        else:
            yield unknown(test, "skipped by DCGM")


def _tests(content: Any) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    if not isinstance(content, Mapping):
        return
    for part in content.values():
        categories = part.get("test_categories") if isinstance(part, Mapping) else None
        for category in categories if isinstance(categories, list) else ():
            for test in category.get("tests") or ():
                results = test.get("results") or ()
                yield (
                    str(test.get("name", "")),
                    [result for result in results if isinstance(result, dict)],
                )


def _warnings(result: Mapping[str, Any]) -> str:
    given = result.get("warnings") or result.get("info") or ()
    listed = given if isinstance(given, list) else [given]
    texts = (one.get("warning", "") if isinstance(one, Mapping) else str(one) for one in listed)
    return ", ".join(text for text in texts if text)


TESTS = (Test("dcgm", diagnose, LIMITS[4] + 60.0),)
