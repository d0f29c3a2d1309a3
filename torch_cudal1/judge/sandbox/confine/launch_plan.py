"""What a launcher is asked to do, as one value that travels on its command line (so it holds paths
and numbers, no secret).
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
    """How one child is started. The default confines nothing: a process that is watched and killed
    with all it started (level 1).

    - parent: the process whose end is the child's. scratch: the child's working folder.
    - reach: what Landlock leaves; None: no Landlock, no filter (and no_new_privs is not set).
    - uid: a number to become, when started by root; None: stay. keep: capabilities kept, by number.
    - own: the code is ours; see `seccomp.list_rules`. namespaces: own mount, pid, network and IPC
      namespaces.
    - rlimits: RLIMIT_<name> -> soft and hard limit. processes: threads allowed beyond those its
      user has; 0: no limit.
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
        """The plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """A plan from the text of `to_json`."""
        given: dict[str, Any] = json.loads(text)
        reach = given.pop("reach")
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
