from __future__ import annotations

import socket

import pytest

from tests.training import loopback as acts
from tests.training.loopback import Loopback, loopback, reply, status
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ingest.llm.endpoint import (
    Completion,
    Endpoint,
    EndpointError,
    RetryPolicy,
    TokenPrices,
)


def client(server: Loopback, pauses: list[float] | None = None, **more: object) -> Endpoint:
    patience = RetryPolicy(attempts=4, timeout_s=30.0, pause_s=1.0, longest_pause_s=20.0)
    record = [] if pauses is None else pauses
    return Endpoint(server.url, "tiny", patience=patience, sleep=record.append, **more)  # type: ignore[arg-type]


def ask(endpoint: Endpoint) -> Completion | Refusal:
    return endpoint.ask("hello", temperature=0.7, seed=3)


def test_a_completion_comes_with_its_tokens_and_its_price() -> None:
    with loopback(reply("hi")) as server:
        completion = ask(client(server, prices=TokenPrices(2.0, 10.0)))
    assert completion == Completion("hi", 100, 10, pytest.approx(0.0003), False, "stop")
    (body,) = server.seen
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["model"], body["temperature"], body["seed"]) == ("tiny", 0.7, 3)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(429), "429"),
        (status(500), "500"),
        (status(503), "told so"),
        (acts.junk, "no completion"),
        (acts.half, ""),
        (acts.empty_choices, "IndexError"),
        (acts.hang_up, ""),
    ],
    ids=["429", "500", "503", "junk", "half", "no choices", "hang up"],
)
def test_a_fault_is_tried_again_and_one_that_stays_is_raised(fault: acts.Act, reason: str) -> None:
    with loopback(fault, fault, reply("hi")) as server:
        assert ask(client(server)) == Completion("hi", 100, 10, 0.0, False, "stop")
        assert len(server.seen) == 3
    with loopback(fault) as server:
        refusal = ask(client(server))
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason
        assert "(4 attempts)" in refusal.reason
        assert len(server.seen) == 4


def test_a_server_that_is_too_slow_is_given_up_and_asked_again() -> None:
    with loopback(acts.slow, reply("hi")) as server:
        patience = RetryPolicy(attempts=20, timeout_s=1.0)
        assert isinstance(
            ask(Endpoint(server.url, "tiny", patience=patience, sleep=lambda s: None)), Completion
        )
    with loopback(acts.slow) as server:
        refusal = ask(
            Endpoint(
                server.url,
                "tiny",
                patience=RetryPolicy(attempts=2, timeout_s=0.2),
                sleep=lambda s: None,
            )
        )
        assert isinstance(refusal, Refusal)
        assert "timed out" in refusal.reason


def test_pauses_double_and_the_servers_wish_is_followed_up_to_a_bound() -> None:
    pauses: list[float] = []
    with loopback(status(500)) as server:
        ask(client(server, pauses))
    assert [
        low <= pause <= 2 * low for low, pause in zip((0.5, 1.0, 2.0), pauses, strict=True)
    ] == [True] * 3
    pauses.clear()
    wishes = [
        status(429, headers={"Retry-After": wish})
        for wish in ("7", "3600", "Wed, 21 Oct 2026 07:28:00 GMT")
    ]
    with loopback(*wishes, reply("hi")) as server:
        ask(client(server, pauses))
    assert pauses[:2] == [7, 20]
    assert 2.0 <= pauses[2] <= 4.0


@pytest.mark.parametrize("code", [400, 401, 403, 404, 302])
def test_a_refusal_is_not_tried_again(code: int) -> None:
    with loopback(status(code, headers={"Location": "http://127.0.0.1:1/v1"})) as server:
        with pytest.raises(EndpointError, match=f"status {code}"):
            ask(client(server))
        assert len(server.seen) == 1


def test_an_address_without_a_server_is_an_error_that_names_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        refusal = ask(
            Endpoint(
                url, "tiny", patience=RetryPolicy(attempts=2, timeout_s=1.0), sleep=lambda s: None
            )
        )
    assert isinstance(refusal, Refusal)
    assert "refused" in refusal.reason


def test_tokens_are_estimated_where_the_server_does_not_say() -> None:
    with loopback(reply("x" * 41, usage=False)) as server:
        completion = ask(client(server))
    assert isinstance(completion, Completion)
    assert (completion.prompt_tokens, completion.completion_tokens, completion.estimated) == (
        2,
        11,
        True,
    )


def test_samples_come_in_the_order_of_prompts_with_seeds_of_their_own() -> None:
    with loopback(answer=lambda prompt: prompt.upper()) as server:
        samples = client(server).sample(["a", "b", "c"], count=2, temperature=1.0, seed=5)
        assert samples == [["A", "A"], ["B", "B"], ["C", "C"]]
        assert sorted(body["seed"] for body in server.seen) == [5, 6, 7, 8, 9, 10]


def test_a_sample_that_cannot_be_had_raises_and_is_no_empty_completion() -> None:
    with loopback(status(500)) as server, pytest.raises(EndpointError, match="gave no completion"):
        client(server).sample(["a"], count=1, temperature=1.0, seed=0)


def test_a_server_with_one_model_needs_no_model_name() -> None:
    with loopback(reply("hi")) as server:
        endpoint = Endpoint(server.url)
        ask(endpoint)
        assert endpoint.model == "tiny"
    with (
        loopback(reply("hi"), models=("a", "b")) as server,
        pytest.raises(EndpointError, match="has 2 models; name one of a, b"),
    ):
        ask(Endpoint(server.url))


def test_the_key_comes_from_the_environment_and_is_shown_nowhere() -> None:
    settings = Settings.from_env({"TORCH_CUDAL1_LLM_KEY": "sk-secret"})
    assert "sk-secret" not in repr(settings)
    with loopback(reply("hi")) as server:
        endpoint = Endpoint.from_settings(server.url, settings, model="tiny")
        ask(endpoint)
        assert server.headers[0]["Authorization"] == "Bearer sk-secret"
        assert "sk-secret" not in repr(endpoint) + endpoint.name


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host/v1",
        "http:///v1",
        "https://user:pass@host/v1",
        "https://host/v1?key=1",
    ],
)
def test_what_is_no_url_is_refused_without_repeating_a_password(url: str) -> None:
    with pytest.raises(SettingError, match="a URL such as") as error:
        Endpoint(url)
    assert "pass" not in str(error.value)


def test_a_key_does_not_travel_over_plain_http_and_offline_means_offline() -> None:
    with pytest.raises(SettingError, match="https: a key is not sent"):
        Endpoint("http://example.com/v1", key="k")
    with pytest.raises(SettingError, match="because 'offline' is set"):
        Endpoint.from_settings("https://example.com/v1", Settings(offline=True))
    Endpoint("https://example.com/v1", key="k")
