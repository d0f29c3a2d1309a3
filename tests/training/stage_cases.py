"""Small models, recorders and rows of the synthetic world."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.world import FIRST, SECOND, TASKS, WORDS, SyntheticCodec, SyntheticEvaluator
from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.ingest.llm.policy import LanguageModel, TinySpec, create_tiny
from torch_cudal1.training.recorder import Recorder
from torch_cudal1.training.supervised import FitConfig

CODEC = SyntheticCodec()


EVERY = [f"{first} {second}" for first in FIRST for second in SECOND]


SMALL = FitConfig(steps=60, batch=16, learning_rate=1e-2)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return create_tiny(folder, WORDS, TinySpec(hidden=32, layers=2, heads=2, context=64))


def writer(folder: Path) -> LanguageModel:
    return LanguageModel.load(folder, max_new_tokens=4)


def recorder(folder: Path, evaluator: SyntheticEvaluator, stage: str) -> Recorder:
    """Of a run in `folder`; call `database.close()` on it before the next one."""
    appraiser = Appraiser(CODEC, evaluator, Database(folder / "samples.jsonl"))
    return Recorder(appraiser, TASKS, SampleJournal(folder / f"{stage}.jsonl"), stage, seed=0)
