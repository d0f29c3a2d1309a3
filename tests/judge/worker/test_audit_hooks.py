"""A hook that is added after the first is counted; it can never be removed, so in a process of its own."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from torch_cudal1.judge.worker import audit_hooks
assert audit_hooks.count_added_hooks() == 0
audit_hooks.watch()
audit_hooks.watch()
assert audit_hooks.count_added_hooks() == 0
open(sys.executable).close()
assert audit_hooks.count_added_hooks() == 0
import filelock
assert audit_hooks.count_added_hooks() == 0, "a package that Inductor imports"
sys.addaudithook(lambda event, arguments: None)
assert audit_hooks.count_added_hooks() == 1
"""


def test_hooks_are_counted_from_the_first_on() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
