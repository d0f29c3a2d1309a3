"""A real Hugging Face model, made from nothing, offline: from a folder by `from_pretrained`, and
behind a server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.training.loopback import loopback
from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.endpoint import Endpoint
from torch_cudal1.ingest.llm.policy import (
    LanguageModel,
    TinySpec,
    compute_token_logprobs,
    create_tiny,
    recover_folder,
    replace_folder,
)
from torch_cudal1.training.generators import GENERATORS
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.replay import ReplayEvaluator
from torch_cudal1.training.stages import CollectConfig, build_sft_rows, collect, count_outcomes
from torch_cudal1.training.supervised import FitConfig, fine_tune

SPEC = TinySpec(hidden=32, layers=1, heads=2, context=96)
CODEC = KslCodec("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny(tmp_path_factory.mktemp("model") / "tiny", CODEC.vocabulary, SPEC)


def test_the_same_seed_makes_the_same_weights_and_leaves_the_callers_numbers_alone(
    folder, tmp_path
):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    again, other = (
        create_tiny(tmp_path / "a", CODEC.vocabulary, SPEC),
        create_tiny(tmp_path / "b", CODEC.vocabulary, TinySpec(32, 1, 2, 96, 1)),
    )
    assert torch.equal(torch.rand(3), expected)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_embeddings_are_tied_and_every_word_of_the_language_is_one_token(folder):
    model = LanguageModel.load(folder)
    assert model.model.get_input_embeddings().weight is model.model.get_output_embeddings().weight
    task = ReplayEvaluator.load().split().train[0]
    prompt = CODEC.prompt(task)
    assert len(model.encoded(prompt)) == len(prompt.split())
    assert model.tokenizer.unk_token_id not in model.encoded(prompt)


def test_the_same_seed_samples_the_same_and_another_one_does_not(folder):
    model = LanguageModel.load(folder, max_new_tokens=8)
    first = model.sample(["<task> cpu row", "<go>"], count=3, temperature=1.0, seed=1)
    assert [len(each) for each in first] == [3, 3]
    assert first == model.sample(["<task> cpu row", "<go>"], count=3, temperature=1.0, seed=1)
    assert first != model.sample(["<task> cpu row", "<go>"], count=3, temperature=1.0, seed=2)


def test_batches_are_joined_with_padding_that_moves_nothing(folder):
    model = LanguageModel.load(folder, max_new_tokens=8)
    model.batch = 2
    rollout = model.rollout(
        ["<go>", "<task> cpu row op=max <go>", "<task> <go>"], count=2, temperature=1.0, seed=3
    )
    assert rollout.ids.shape[0] == 6
    logs, _ = compute_token_logprobs(model.model, rollout, 1.0)
    alone = model.rebuilt(
        ["<go>"],
        [
            row[: int(mask.sum())].tolist()
            for row, mask in zip(rollout.ids[:2], rollout.mask[:2], strict=True)
        ],
    )
    expected, _ = compute_token_logprobs(model.model, alone, 1.0)
    width = alone.ids.shape[1]
    torch.testing.assert_close(
        (logs[:2, :width] * alone.mask), expected * alone.mask, atol=1e-5, rtol=1e-5
    )


def test_the_mask_ends_with_the_first_end_token(folder):
    model = LanguageModel.load(folder)
    end = model.tokenizer.eos_token_id
    mask = model.answered(torch.tensor([[5, end, 7, end], [5, 6, 7, 8], [end, end, 5, 6]]))
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(folder):
    with pytest.raises(SettingError, match=r"90 tokens.*1 to 32"):
        LanguageModel.load(folder, max_new_tokens=64).sample(
            ["<go> " * 90], count=1, temperature=1.0, seed=0
        )


@pytest.mark.parametrize("wrong", [{"hidden": 33}, {"layers": 0}, {"context": 4}, {"heads": 0}])
def test_a_size_that_no_model_has_is_refused(wrong):
    with pytest.raises(SettingError):
        TinySpec(**wrong)


def test_a_folder_without_a_model_and_a_word_with_a_space_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"config\.json"):
        LanguageModel.load(tmp_path)
    with pytest.raises(SettingError, match="two words"):
        create_tiny(tmp_path / "x", ["two words"], SPEC)
    assert not (tmp_path / "x").exists()


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "model"
    with replace_folder(target) as fresh:
        (fresh / "a").write_text("first")
    with suppress(KeyboardInterrupt), replace_folder(target) as fresh:
        (fresh / "a").write_text("half")
        raise KeyboardInterrupt
    assert (target / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    target.rename(tmp_path / "model.old")  # what a kill between the two renames leaves
    assert recover_folder(target)
    assert (target / "a").read_text() == "first"


def test_a_model_writes_programs_from_its_folder_and_behind_a_server(folder, tmp_path):
    evaluator = ReplayEvaluator.load()
    tasks = evaluator.split().train[:2]
    taught = LanguageModel.load(folder, max_new_tokens=16)
    with Database(None) as database:
        collect(
            Appraiser(CODEC, evaluator, database),
            tasks,
            tuple(GENERATORS.values()),
            CollectConfig(),
            seed=0,
        )
        fine_tune(
            taught,
            build_sft_rows(CODEC, tasks, database, seed=0),
            FitConfig(steps=60, batch=8, learning_rate=1e-2),
            seed=0,
        )
    taught.save(tmp_path / "taught")
    local, served = (
        LanguageModel.load(tmp_path / "taught", max_new_tokens=16),
        LanguageModel.load(tmp_path / "taught", max_new_tokens=16),
    )
    lock, calls = threading.Lock(), [0]

    def answer(prompt: str) -> str:
        with lock:
            calls[0] += 1
            return served.sample([prompt], count=1, temperature=1.0, seed=calls[0])[0][0]

    with loopback(answer=answer) as server, Database(None) as database:
        endpoint = Endpoint(server.url)
        problems = collect(
            Appraiser(CODEC, evaluator, database),
            tasks,
            [local, endpoint],
            CollectConfig(attempts=8),
            seed=0,
        )
        counts = count_outcomes(database)
    assert problems == []
    assert json.loads(json.dumps(server.seen[0]))["messages"][0]["content"].endswith("<go>")
    assert counts[local.name]["ok"] >= 1, counts
    assert counts[endpoint.name]["ok"] >= 1, counts
