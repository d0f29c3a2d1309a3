"""What travels between processes comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_cudal1.api.fleet.warmup_task import WarmupAnswer, WarmupOrder, WarmupTask
from torch_cudal1.api.warmup import WarmupResult
from torch_cudal1.core.report import EndToEnd, Explanation, Interval, RegionReport
from torch_cudal1.core.settings import Settings

REGION = RegionReport(
    name="inf",  # a name that looks like a number stays a name
    key="ab" * 32,
    kind="inference",
    granularity="whole",
    runs="fold -> eager",
    origin="builtin",
    techniques=("fold",),
    speedup=1.5,
    low=1.25,
    high=1.75,
    vs_eager=Interval(1.5, 1.25, 1.75),
    baselines_us={"eager": 3.0},
    error_ratio=float("inf"),
    tried=({"label": "a", "decision": "rejected", "reason": "slow"},),
)
EXPLANATION = Explanation(
    target="t",
    device="cpu",
    regions=(REGION,),
    left_out=("one",),
    end_to_end=EndToEnd(
        eager_us=3.0,
        inductor_us=None,
        ours_us=2.0,
        vs_eager=Interval(1.5, 1.4, 1.6),
        vs_inductor=None,
    ),
    gate=("a note",),
)


@pytest.mark.parametrize(
    "answer",
    [
        WarmupAnswer(WarmupTask("t", "[4, 8]"), WarmupResult("t", EXPLANATION, None, 1.5, 2, 3)),
        WarmupAnswer(WarmupTask("t"), WarmupResult("t", None, "it broke", 1.5, 0, 0)),
        WarmupAnswer(WarmupTask("t"), unusable="no file"),
        WarmupAnswer(WarmupTask("t"), died="twice"),
    ],
)
def test_an_answer_comes_back(answer: WarmupAnswer) -> None:
    assert (
        WarmupAnswer.from_json(json.loads(json.dumps(answer.to_json(), allow_nan=False))) == answer
    )


def test_an_answer_is_one_thing() -> None:
    with pytest.raises(ValueError, match="one of"):
        WarmupAnswer(WarmupTask("t"))
    with pytest.raises(ValueError, match="one of"):
        WarmupAnswer(WarmupTask("t"), unusable="a", died="b")


def test_an_order_comes_back_without_what_concerns_serving(tmp_path: Path) -> None:
    settings = Settings(
        cache_dir=tmp_path,
        read_only_caches=(tmp_path / "a", tmp_path / "b"),
        budget_s=7.0,
        on_mismatch=print,
        record=tmp_path / "r",
    )
    order = WarmupOrder.from_json(
        json.loads(json.dumps(WarmupOrder(settings, True, "cuda").to_json()))
    )
    assert order == WarmupOrder(settings.but(on_mismatch=None, record=None), True, "cuda")
    assert order.with_cache(tmp_path / "c").settings.read_only_caches == ()
