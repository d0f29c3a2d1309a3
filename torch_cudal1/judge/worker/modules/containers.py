"""What a call does to the lists and dictionaries that it is handed: a caller may use them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["describe_change", "has_containers", "list_members"]


def has_containers(call: Any) -> bool:
    """Whether an argument of a packed call is a list, a dictionary or a tuple."""
    match call:
        case {"dict": {"args": {"tuple": [*args]}, "kwargs": {"dict": kwargs}}}:
            return any(
                isinstance(each, list)
                or (isinstance(each, dict) and not {"dict", "tuple"}.isdisjoint(each))
                for each in (*args, *kwargs.values())
            )
    return True


def list_members(arguments: object) -> list[object]:
    """The members of nested containers, and before them the size or the keys of each container."""
    members: list[object] = []
    waiting = [arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            members.append(tuple(value))
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            members.append(len(value))
            waiting.extend(value)
        else:
            members.append(value)
    return members


def describe_change(before: Sequence[object], after: Sequence[object]) -> str:
    """ "" where the members are the same; else where each comes from, alike for the same change."""
    if len(before) == len(after) and all(map(_is_same, before, after)):
        return ""
    places = {id(member): place for place, member in enumerate(before)}
    sources = [
        repr(member) if isinstance(member, int | tuple) else str(places.get(id(member), "new"))
        for member in after
    ]
    return f"; its arguments become {', '.join(sources)}"


def _is_same(old: object, new: object) -> bool:
    return old is new or (isinstance(old, int | tuple) and old == new)
