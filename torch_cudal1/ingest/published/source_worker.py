"""The child's loop for published sources,
`python -m torch_cudal1.ingest.published.source_worker FD`: the judge's worker with one verb more.

It decides nothing: what it answers is data, which the parent checks and the judge judges.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ingest.published.trace_source import captured_reference, traced
from torch_cudal1.judge.wire.channel import load_tensors
from torch_cudal1.judge.wire.transport import present, write_payloads
from torch_cudal1.judge.worker.modules import CallForm, imported
from torch_cudal1.judge.worker.session import VERBS as JUDGE_VERBS
from torch_cudal1.judge.worker.session import Request, Session, main

__all__ = ["VERBS"]


def _lower(session: Session, request: Request) -> dict[str, Any]:
    """The Program of a source's module at these tensors, with where each of its inputs comes from;
    or why there is none.
    """
    given = load_tensors(request["layout"], Path(request["given"]), session.device)
    form = CallForm.from_json(request["form"])
    try:
        source = imported(request["text"], session.scratch)
        capture = captured_reference if request["reference"] else traced
        found = capture(source, form, [present(tensor) for tensor in given], session.device)
    except NotLowerableError as error:
        return {"not_lowerable": error.reason}
    payloads = write_payloads(found.program, Path(request["path"]))
    return {"program": found.program.to_json(), "payloads": payloads, **found.to_json()}


VERBS = {**JUDGE_VERBS, "lower": _lower}

if __name__ == "__main__":
    main(int(sys.argv[1]), VERBS)
