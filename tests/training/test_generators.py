"""Six generators write programs from prompts alone: unlike each other, and wrong as often as they
should be.
"""

from __future__ import annotations

import pytest

from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.generators import GENERATORS, get_generator
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.tasks import list_tasks, load_split

MANY = 60
CODECS = {device: KslCodec(device) for device in ("cpu", "cuda")}  # type: ignore[arg-type]


def sample_answers(
    name: str, task: TrainingTask, device: str, *, seed: int = 0, prompt: str = ""
) -> list[str]:
    prompt = prompt or CODECS[device].prompt(task)
    return get_generator(name).sample([prompt], count=MANY, temperature=1.0, seed=seed)[0]


def tasks(device: str) -> tuple[TrainingTask, ...]:
    task_of_family: dict[str, TrainingTask] = {}
    for task in load_split(device).train:  # type: ignore[arg-type]
        task_of_family.setdefault(task.family, task)
    return tuple(task_of_family.values())


def share_decoded(name: str, device: str) -> float:
    codec = CODECS[device]
    answers = [
        codec.decode(task, text)
        for task in tasks(device)
        for text in sample_answers(name, task, device)
    ]
    return sum(isinstance(answer, Decoded) for answer in answers) / len(answers)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", GENERATORS)
def test_what_is_written_decodes_unless_the_writer_is_sloppy(name: str, device: str) -> None:
    share = share_decoded(name, device)
    if name == "sloppy":
        assert 0.5 <= share <= 0.8, "30 to 50 in a hundred are no programs"
    else:
        assert share == 1.0


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_writes_the_same_and_another_seed_something_else(name: str) -> None:
    task = tasks("cpu")[0]
    assert sample_answers(name, task, "cpu") == sample_answers(name, task, "cpu")
    assert sample_answers(name, task, "cpu", seed=1) != sample_answers(name, task, "cpu")


def test_no_generator_writes_a_cheat() -> None:
    for name in GENERATORS:
        for task in tasks("cuda"):
            decoded = [
                CODECS["cuda"].decode(task, text) for text in sample_answers(name, task, "cuda")
            ]
            assert not [
                answer
                for answer in decoded
                if isinstance(answer, Decoded) and "hack=" in answer.program
            ], name


def test_the_generators_write_different_programs() -> None:
    task = tasks("cuda")[0]
    sets = {name: set(sample_answers(name, task, "cuda")) for name in GENERATORS}
    for name in GENERATORS:
        for other in GENERATORS:
            assert name == other or len(sets[name] & sets[other]) < min(
                len(sets[name]), len(sets[other])
            ), (name, other)


def test_a_mutant_stays_near_the_best_exemplar() -> None:
    task = next(task for task in tasks("cuda") if task.family == "softmax")
    best = "tpl=row.two block=4096 warps=16 stages=3 mask=on acc=f32"
    shown = [
        Exemplar("tpl=row.one rows=1 warps=4 persist=off mask=on acc=f32", 0.6),
        Exemplar(best, 2.0),
    ]
    for text in sample_answers("mutant", task, "cuda", prompt=CODECS["cuda"].prompt(task, shown)):
        assert len(set(text.removeprefix("<code> ").split()) - set(best.split())) <= 2


def test_rules_of_size_see_the_sizes() -> None:
    codec = CODECS["cuda"]
    wide, narrow = (
        next(
            task
            for task in list_tasks("cuda")
            if task.family == "softmax" and task.shape[1] == size
        )
        for size in (4096, 512)
    )
    blocks = {}
    for task in (wide, narrow):
        texts = get_generator("compiler").sample(
            [codec.prompt(task)], count=MANY, temperature=0.0, seed=0
        )[0]
        blocks[task.shape] = {
            word for text in texts for word in text.split() if word.startswith("block=")
        }
    assert blocks[wide.shape] == {"block=4096"}
    assert blocks[narrow.shape] == {"block=512"}


def test_other_text_than_a_prompt_and_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a prompt"):
        get_generator("uniform").sample(["write a kernel"], count=1, temperature=1.0, seed=0)
    with pytest.raises(ValueError, match="tutorial"):
        get_generator("genius")
