"""The roles of an implementation under test."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Role"]


class Role(StrEnum):
    """The role of the implementation under test."""

    SERVER = "server"
    CLIENT = "client"
