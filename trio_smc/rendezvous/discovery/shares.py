"""`Shares`: which user has how many of a listener's places, and which user gives one up.

Theory of operation
-------------------
All members of the group that shares a directory share the places of a listener.  While some are
free, each user may have as many as it wants.  If none is free, a user that has fewer than the
largest one gets a place, and the largest user loses its oldest one.  So a user that has taken all
places keeps no other user out, and users with equally many do not take places from each other.

Cost: `add` and `remove` take constant time; `oldest_of_largest`, which is called only if no place
is free, looks at each user once.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Generic, TypeVar

__all__ = ["Shares"]

_Place = TypeVar("_Place")


class Shares(Generic[_Place]):
    """The places of each user, oldest first."""

    def __init__(self) -> None:
        self._by_user: dict[int, dict[_Place, None]] = {}

    def add(self, user: int, place: _Place) -> None:
        """Note that ``user`` has a place more."""
        self._by_user.setdefault(user, {})[place] = None

    def remove(self, user: int, place: _Place) -> None:
        """Note that ``user`` has given up a place, which it must have."""
        theirs = self._by_user[user]
        del theirs[place]
        if not theirs:
            del self._by_user[user]

    def oldest_of_largest(self, user: int, kept: Container[_Place] = ()) -> _Place | None:
        """The place that ``user`` may take over; None if no user would have more than it then.

        kept: places that may not be taken over.
        """
        largest = max(self._by_user.values(), key=len, default={})
        if len(largest) <= len(self._by_user.get(user, ())) + 1:
            return None
        return next((place for place in largest if place not in kept), None)
