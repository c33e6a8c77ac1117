"""The kinds that are served now: built-in ones and those of custom resource definitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unbroken.local.apiserver.http.status import ApiError

from .kinds import Kind, Version


def no_such_page() -> ApiError:
    """404 for a path or a resource that is not served."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


class Catalogue:
    """Finds a kind by the names in a request.  `generation` grows with every change."""

    def __init__(self, builtins: Iterable[Kind]) -> None:
        self._kinds: dict[tuple[str, str], Kind] = {}
        self._builtin = {(kind.group, kind.plural) for kind in builtins}
        for kind in builtins:
            self._kinds[kind.group, kind.plural] = kind
        self.generation = 0

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds.values())

    def find(self, group: str, version: str, plural: str) -> tuple[Kind, Version]:
        """Find a kind and its version. Raises ApiError 404 when they are not served."""
        kind = self._kinds.get((group, plural))
        served = kind.versions.get(version) if kind is not None else None
        if kind is None or served is None:
            raise no_such_page()
        if kind.refusal:
            raise ApiError(404, "NotFound", kind.refusal)
        return kind, served

    def resource(self, plural: str, group: str) -> Kind | None:
        """The kind of a collection; None when it is not served."""
        return self._kinds.get((group, plural))

    def put(self, kind: Kind) -> None:
        """Serve a custom kind, or serve it as it is now."""
        assert (kind.group, kind.plural) not in self._builtin
        self._kinds[kind.group, kind.plural] = kind
        self.generation += 1

    def drop(self, group: str, plural: str) -> None:
        """Serve a custom kind no longer."""
        if self._kinds.pop((group, plural), None) is not None:
            self.generation += 1

    def is_builtin(self, group: str, plural: str) -> bool:
        """True if the name belongs to the server itself."""
        return (group, plural) in self._builtin
