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

# Beside other work an honest call took three times as long on either side by chance, so nearly all of
# these rounds must agree.
_ROUNDS = 12
_MAX_CLOSE_ROUNDS = 1
_MAX_RATIO = 1.5
# A call, by which one may be slower anyway: what a few instructions more cost.
_MIN_EXCESS_US = 2.0
_NOT_APPLICABLE = "not applicable: no floating input can be given other values"


def check_unseen_inputs(child: Child, slot: str, sets: Sequence[str]) -> CheckResult:
    """Compare the two times of the slot, which has been timed on `sets`. Raises CandidateFailure."""
    rounds: list[tuple[float, float]] = []
    close_rounds = 0
    # An honest candidate is done after two or three rounds.
    while len(rounds) < _ROUNDS and close_rounds <= _MAX_CLOSE_ROUNDS:
        answer = child.call("unseen", slot=slot, sets=list(sets))
        try:
            calls = int(answer["calls"])
            times_us = float(answer["familiar_us"]), float(answer["unseen_us"])
        except (KeyError, TypeError, ValueError) as error:
            raise CandidateFailure("timing", f"unusable samples: {error}", "protocol") from error
        if not calls:
            return CheckResult("unseen_inputs", True, detail=_NOT_APPLICABLE)
        familiar_us, unseen_us = (each / calls for each in times_us)
        rounds.append((familiar_us, unseen_us))
        close_rounds += unseen_us <= max(_MAX_RATIO * familiar_us, familiar_us + _MIN_EXCESS_US)
    is_close = close_rounds > _MAX_CLOSE_ROUNDS
    familiar_us, unseen_us = (min(side) for side in zip(*rounds, strict=True))
    verb = "takes" if is_close else "takes too long:"
    return CheckResult(
        "unseen_inputs",
        is_close,
        unseen_us / familiar_us if familiar_us else math.inf,
        _MAX_RATIO,
        f"a call on values that it has not met {verb} {unseen_us:.3g} us, on others {familiar_us:.3g} us",
    )
