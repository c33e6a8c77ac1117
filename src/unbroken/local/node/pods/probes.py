"""Schedule of a probe, and the result of its answers (kubelet v1.33, prober/worker.go)."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Object, ProbeKind


@dataclass(slots=True)
class ProbeState:
    """One probe of one run of a container."""

    kind: ProbeKind
    spec: Object
    due: float
    """Time of its next run; infinite while one is running."""
    is_passed: bool
    """The verdict so far."""
    is_decided: bool = False
    """A threshold was reached at least once."""
    has_failed: bool = False
    """The failure threshold was reached."""
    _last: bool | None = field(default=None)
    _run: int = 0
    _began: float = 0.0

    @staticmethod
    def begin(kind: ProbeKind, spec: Object, started_at: float, now: float) -> ProbeState:
        """A probe of a container that started at `started_at` and may be probed from `now` on."""
        due = max(now, started_at + float(spec.get("initialDelaySeconds") or 0))
        return ProbeState(kind, spec, due, is_passed=kind is ProbeKind.LIVENESS)

    def take(self) -> None:
        """It is being run now."""
        self._began = self.due
        self.due = float("inf")

    def answer(self, is_ok: bool, now: float) -> None:
        """Count an answer; afterwards `is_passed` and `has_failed` are up to date."""
        period = float(self.spec.get("periodSeconds") or 10)
        self.due = max(self._began + period, now)
        self._run = self._run + 1 if self._last is is_ok else 1
        self._last = is_ok
        threshold = self.spec.get("successThreshold") or 1
        if not is_ok:
            threshold = self.spec.get("failureThreshold") or 3
        if self._run < threshold:
            return
        self.is_passed = is_ok
        self.is_decided = True
        self.has_failed = not is_ok


def timeout_seconds(spec: Object) -> float:
    """Return the seconds that one run of a probe may take."""
    return float(spec.get("timeoutSeconds") or 1)
