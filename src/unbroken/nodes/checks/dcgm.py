"""NVIDIA's own diagnosis where it is installed: `dcgmi diag -r LEVEL -j`, read tolerantly.

The form is that of DCGM 3 and 4 (DCGM documentation, "DCGM Diagnostics", JSON output). Only a
test's own `Fail` is a fault: a lost connection to the host engine is no broken GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from . import tools
from .findings import CheckSettings, Finding, Test, failed, passed, skipped, unknown
from .gpu import gpu_program

LIMITS = {1: 120.0, 2: 600.0, 3: 3600.0, 4: 7200.0}
"""Seconds; level 4 takes 45 to 90 minutes on HyperPod."""
HARMLESS = (0, 1, 3, 5)
"""Severities NONE, MONITOR, UNKNOWN and CONFIG of dcgm_errors.h: disabled persistence mode fails a
test with severity 5."""
TESTS_MAX, NAME_MAX = 200, 60


def diagnose(settings: CheckSettings) -> Iterator[Finding]:
    """Run the diagnosis and yield a finding for each of its tests."""
    program = gpu_program("dcgm", "dcgmi", settings)
    if isinstance(program, Finding):
        yield program
        return
    level = settings.dcgm_level
    done = tools.run([program, "diag", "-r", str(level), "-j"], LIMITS.get(level, LIMITS[4]))
    findings = list(read_diagnosis(done.text))
    if findings:
        yield from findings
    else:
        yield unknown("dcgm", f"dcgmi at level {level} {done.why()}")


def read_diagnosis(text: bytes) -> Iterator[Finding]:
    """A finding for each test of the answer; none where it is no diagnosis."""
    try:
        # dcgmi writes lines for people around the object.
        content = msgspec.json.decode(text[max(0, text.find(b"{")) : text.rfind(b"}") + 1])
    except (msgspec.DecodeError, RecursionError):
        return
    for name, results in islice(_tests(content), TESTS_MAX):
        broken: list[str] = []
        doubtful: list[str] = []
        ran = False
        for result in results:
            status = str(result.get("status", "")).lower()
            ran = ran or status in ("pass", "warn", "fail")
            if status == "fail":
                said = f"GPU {_gpu(result)}: {_warnings(result) or 'no reason given'}"
                (doubtful if _is_harmless(result) else broken).append(said)
        test = f"dcgm-{name.lower().replace(' ', '-')[:NAME_MAX]}"
        if broken:
            yield failed(test, "; ".join(broken))
        elif doubtful:
            yield unknown(test, f"not a fault of the hardware: {'; '.join(doubtful)}")
        elif ran:
            yield passed(test)
        else:
            yield skipped(test, "skipped by DCGM")


def _tests(content: Any) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Name and results of each test, of whatever parts of the content have the right form."""
    if not isinstance(content, Mapping):
        return
    for part in content.values():
        for category in _objects(part, "test_categories"):
            for test in _objects(category, "tests"):
                yield str(test.get("name", "")), _objects(test, "results")


def _objects(value: Any, key: str) -> list[Mapping[str, Any]]:
    listed = value.get(key) if isinstance(value, Mapping) else None
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


def _gpu(result: Mapping[str, Any]) -> str:
    """The GPU of a result: `gpu_ids` is DCGM 1 to 2, `gpu_id` 3, `entity_id` 4."""
    keys = ("gpu_id", "entity_id", "gpu_ids")
    return next((str(result[key])[:NAME_MAX] for key in keys if key in result), "?")


def _is_harmless(result: Mapping[str, Any]) -> bool:
    """True if DCGM itself says of each warning that it is no fault of the GPU."""
    warnings = _objects(result, "warnings")
    return bool(warnings) and all(one.get("error_severity") in HARMLESS for one in warnings)


def _warnings(result: Mapping[str, Any]) -> str:
    given = result.get("warnings") or result.get("info") or ()
    listed = given if isinstance(given, list) else [given]
    texts = (str(one.get("warning", "") if isinstance(one, Mapping) else one) for one in listed)
    return ", ".join(text for text in texts if text)


TESTS = (Test("dcgm", diagnose, LIMITS[4] + 60.0),)
