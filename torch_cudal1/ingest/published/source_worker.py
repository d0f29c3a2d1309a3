"""The child's loop for published sources,
`python -m torch_cudal1.ingest.published.source_worker FD`: the judge's worker with one verb more.

It decides nothing: its answers are data, which the parent checks and the judge evaluates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ingest.published.trace_source import trace_candidate, trace_reference
from torch_cudal1.judge.wire.call_spec import CallSpec
from torch_cudal1.judge.wire.channel import load_tensors
from torch_cudal1.judge.wire.transport import require_tensor, write_payloads
from torch_cudal1.judge.worker.modules.source_modules import import_source
from torch_cudal1.judge.worker.session import HANDLERS as JUDGE_HANDLERS
from torch_cudal1.judge.worker.session import Request, Session, main

__all__ = ["HANDLERS"]


def _lower(session: Session, request: Request) -> dict[str, Any]:
    """The Program of a source's module at these tensors, with where each of its inputs comes from;
    or why there is none.
    """
    tensors = load_tensors(request["layout"], Path(request["given"]), session.device)
    form = CallSpec.from_json(request["form"])
    try:
        source = import_source(request["text"], session.scratch)
        capture = trace_reference if request["reference"] else trace_candidate
        traced = capture(
            source, form, [require_tensor(tensor) for tensor in tensors], session.device
        )
    except NotLowerableError as error:
        # An answer and no exception: a source that has no data form has not failed.
        return {"not_lowerable": error.reason}
    payloads = write_payloads(traced.program, Path(request["path"]))
    return {"program": traced.program.to_json(), "payloads": payloads, **traced.to_json()}


HANDLERS = {**JUDGE_HANDLERS, "lower": _lower}

if __name__ == "__main__":
    main(int(sys.argv[1]), HANDLERS)
