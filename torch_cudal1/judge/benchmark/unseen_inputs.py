"""Check `unseen_inputs`: calls on values that no call has had before, beside calls on values that
the measurement has used over and over, in the same memory.

Timed calls take a few input sets in turn, so that their outputs can be judged. A module that
remembers its results by the bytes of its inputs is right in all of them and computes nothing. In a
program each input comes once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

__all__ = ["check_unseen_inputs"]

# Other work on the machine only adds time, so the second smallest of each side is what counts: the
# smallest alone may be an accident. A side that such work delays in every third round has two
# undelayed ones among six but for one time in fifty, and an honest candidate has more rounds yet.
_MIN_ROUNDS, _MAX_ROUNDS = 6, 24
# Of batches that take long: what delays them is in all of them alike.
_MIN_LONG_ROUNDS, _LONG_S = 3, 1.0
_MAX_RATIO = 1.5
# A call, by which one may be slower anyway: what a few instructions more cost.
_MIN_EXCESS_US = 2.0
_NOT_APPLICABLE = "not applicable: no floating input can be given other values"


def check_unseen_inputs(child: Child, slot: str, sets: Sequence[str]) -> CheckResult:
    """Compare the two times of the slot, which has been timed on `sets`. Raises CandidateFailure."""
    familiar_us: list[float] = []
    unseen_us: list[float] = []
    is_close, spent_s = False, 0.0
    while not is_close and len(unseen_us) < _MAX_ROUNDS:
        answer = child.call("unseen", slot=slot, sets=list(sets))
        try:
            calls = int(answer["calls"])
            times_us = float(answer["familiar_us"]), float(answer["unseen_us"])
        except (KeyError, TypeError, ValueError) as error:
            raise CandidateFailure("timing", f"unusable samples: {error}", "protocol") from error
        if not calls:
            return CheckResult("unseen_inputs", True, detail=_NOT_APPLICABLE)
        familiar_us.append(times_us[0] / calls)
        unseen_us.append(times_us[1] / calls)
        spent_s += sum(times_us) / 1e6
        least = _MIN_LONG_ROUNDS if spent_s > _LONG_S else _MIN_ROUNDS
        if len(unseen_us) >= least:
            is_close = _is_close(sorted(familiar_us)[1], sorted(unseen_us)[1])
    familiar, unseen = sorted(familiar_us)[1], sorted(unseen_us)[1]
    verb = "takes" if is_close else "takes too long:"
    return CheckResult(
        "unseen_inputs",
        is_close,
        unseen / familiar if familiar else math.inf,
        _MAX_RATIO,
        f"a call on values that it has not met {verb} {unseen:.3g} us, on others {familiar:.3g} us",
    )


def _is_close(familiar_us: float, unseen_us: float) -> bool:
    return unseen_us <= max(_MAX_RATIO * familiar_us, familiar_us + _MIN_EXCESS_US)
