"""`LaunchPlan`: how the launcher starts one child.

The plan travels on the launcher's command line, which other processes may read; so it holds paths
and numbers, and no secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess

__all__ = ["LaunchPlan"]


@dataclass(frozen=True)
class LaunchPlan:
    """How one child is started. The default is level 1: no confinement, but a supervisor kills the
    child with all processes that it started.

    - parent: process id of the judge; the child is killed when that process ends.
    - scratch: the child's working folder.
    - reach: the paths that Landlock leaves; None: no Landlock, no filter, no no_new_privs.
    - uid: user id to change to, where root starts the child; None: keep the user.
    - keep: numbers of the capabilities to keep.
    - own: the child runs own code; see `seccomp.list_rules`.
    - namespaces: whether the child gets new mount, pid, network and IPC namespaces.
    - rlimits: <name> of RLIMIT_<name> -> soft and hard limit.
    - processes: how many threads the child may add to those of its user; 0: no limit.
    """

    parent: int
    scratch: str
    reach: FilesystemAccess | None = None
    uid: int | None = None
    keep: tuple[int, ...] = ()
    own: bool = True
    namespaces: bool = False
    rlimits: Mapping[str, int] = field(default_factory=dict)
    processes: int = 0

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """A plan from the text of `to_json`."""
        given: dict[str, Any] = json.loads(text)
        reach = given.pop("reach")
        # JSON has no tuples, and the dataclasses are hashable values only with tuples.
        tuples = (
            {name: tuple(paths) for name, paths in reach.items()} if reach is not None else None
        )
        return cls(
            **{
                **given,
                "keep": tuple(given["keep"]),
                "reach": None if tuples is None else FilesystemAccess(**tuples),
            }
        )
