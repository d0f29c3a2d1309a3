"""The benchmark of generation: the ways are run alone, and tokens are compared with eager's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.real_models import generate, own_process
from benchmarks.report import load

ANSWERS: dict[str, dict[str, Any]] = {
    "eager": {"first_s": 1.0, "tokens_per_s": 80.0, "tokens": [[1, 2, 3], [4, 5, 6]]},
    "transformers": {"first_s": 9.0, "tokens_per_s": 390.0, "tokens": [[1, 2, 3], [4, 9, 6]]},
}


def test_tokens_count_up_to_the_first_that_differs() -> None:
    assert generate.count_equal([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == 3
    with pytest.raises(ValueError, match="longer"):
        generate.count_equal([[1]], [[1, 2]])


def test_every_way_has_a_process_and_caches_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = []

    def start(command: list[str], env: dict[str, str], **_: Any) -> Any:
        way = command[command.index("--one") + 1]
        caches.append(env["TORCH_CUDAL1_CACHE_DIR"])
        if way not in ANSWERS:
            return subprocess.CompletedProcess([], 1, "", "first\nRuntimeError: no")
        return subprocess.CompletedProcess([], 0, "a warning\n" + json.dumps(ANSWERS[way]), "")

    monkeypatch.setattr(own_process.subprocess, "run", start)
    # It starts programs too.
    monkeypatch.setattr(generate.report, "environment", dict)
    out = tmp_path / "generate.json"
    assert generate.main(["--out", str(out), "--size", "tiny", "--device", "cpu"]) == 1
    assert len(set(caches)) == 3
    document = load(out)
    rows = {row["way"]: row for row in document["rows"]}
    assert (rows["eager"]["equal_tokens"], rows["transformers"]["equal_tokens"]) == (6, 4)
    assert rows["accelerate"] == {"way": "accelerate", "failed": "RuntimeError: no"}
    assert all("tokens" not in row for row in rows.values())
    assert document["command"].startswith("python -m benchmarks.real_models.generate")


def test_a_tiny_llama_generates_the_tokens_that_were_asked_for() -> None:
    pytest.importorskip("transformers")
    args = SimpleNamespace(device="cpu", size="tiny", batch=2, prompt=4, new=3, runs=1)
    facts = generate.generate_tokens("eager", args)  # type: ignore[arg-type]
    assert [len(tokens) for tokens in facts["tokens"]] == [3, 3]
    assert facts["tokens_per_s"] > 0
    assert facts == {**facts, "tokens": generate.generate_tokens("eager", args)["tokens"]}  # type: ignore[arg-type]
