"""A task and its run exchange one JSON object a message; a request waits for its grant."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from benchmarks.kernelbench.task_channel import TaskChannel, receive, send


@pytest.fixture
def pipe() -> tuple[Connection, Connection]:
    """The run's end and the task's."""
    run_end, task_end = Pipe()
    return run_end, task_end


def test_a_task_sends_its_stage_and_its_row(pipe: tuple[Connection, Connection]) -> None:
    run_end, task_end = pipe
    channel = TaskChannel(task_end)
    channel.stage("tune", "cudal1")
    channel.row({"best": "eager"})
    assert receive(run_end) == {"tell": "stage", "name": "tune", "column": "cudal1"}
    assert receive(run_end) == {"tell": "row", "row": {"best": "eager"}}


def test_a_request_for_memory_returns_when_it_is_granted(
    pipe: tuple[Connection, Connection],
) -> None:
    run_end, task_end = pipe
    send(run_end, {"granted": True})
    TaskChannel(task_end).memory(10, 3)
    assert receive(run_end) == {"ask": "memory", "bytes": 10, "kept": 3}


def test_quiet_ends_with_the_body_even_where_it_raises(
    pipe: tuple[Connection, Connection],
) -> None:
    run_end, task_end = pipe
    send(run_end, {"granted": True})
    with pytest.raises(OSError, match="no kernel"), TaskChannel(task_end).quiet():
        raise OSError("no kernel")
    assert [receive(run_end), receive(run_end)] == [{"ask": "quiet"}, {"tell": "loud"}]


def test_another_answer_than_a_grant_is_an_error(pipe: tuple[Connection, Connection]) -> None:
    run_end, task_end = pipe
    send(run_end, {"granted": False})
    with pytest.raises(RuntimeError, match="expected a grant"):
        TaskChannel(task_end).memory(None)


def test_a_number_that_json_does_not_have_is_not_sent(
    pipe: tuple[Connection, Connection],
) -> None:
    with pytest.raises(ValueError, match="JSON"):
        send(pipe[0], {"us": float("nan")})


def test_a_closed_end_is_an_end_of_file(pipe: tuple[Connection, Connection]) -> None:
    pipe[1].close()
    with pytest.raises(EOFError):
        receive(pipe[0])
