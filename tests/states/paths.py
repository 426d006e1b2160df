"""Actions that a chart names by path, for models that record them."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Path:
    """A part of a recording model, or its action: ``act`` is called with the path of the action."""

    def __init__(self, path: str, act: Callable[[str], None]) -> None:
        self._path = path
        self._act = act

    def __call__(self) -> None:
        self._act(self._path)

    def __getattr__(self, name: str) -> Path:
        return Path(f"{self._path}.{name}", self._act)


def parts(actions: Iterable[str]) -> set[str]:
    """The attributes of the model at which the paths begin."""
    return {action.partition(".")[0] for action in actions if "." in action}
