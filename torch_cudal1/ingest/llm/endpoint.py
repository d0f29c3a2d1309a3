"""A client of any OpenAI-compatible server: completions for prompts, retried with patience, within
a budget.

A rate limit, a fault of the server, a slow or broken answer is tried again with growing pauses; a
request that keeps failing is a `Refusal` with its reason, never an empty completion. Tokens are
counted as the server reports, else estimated, and money from the prices given. The key comes from
the settings (TORCH_CUDAL1_LLM_KEY) only; it is sent nowhere but to the URL, never over plain HTTP
to another machine, and redirects are not followed. It keeps no conversation and streams nothing.

It uses urllib: an HTTP client does come with huggingface-hub, but as `httpx` up to 1.x and as
`httpx2` from 2.x on, so neither name can be relied on, and `openai` would be a dependency for one
request. This module also adds what such a client lacks: a deadline for the whole answer, a bound on
its size, and no redirect that would carry the key elsewhere.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

from torch_cudal1.core.errors import Cudal1Error, SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings

__all__ = ["Completion", "Endpoint", "EndpointError", "RetryPolicy", "TokenPrices"]

_MOST_BYTES = 16 << 20
_CHUNK = 1 << 16
# Time-outs, conflicts, rate limits and faults of servers or of the proxies before them (520 to
# 529). Any other status is a refusal, which the same request would get again.
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# Characters of a token, for servers that report no token counts.
_CHARS_PER_TOKEN = 4


class EndpointError(Cudal1Error, ConnectionError):
    """A server cannot be used: it refuses, or gave no answer for all patience."""

    def __init__(self, url: str, found: str) -> None:
        self.url, self.found = url, found
        super().__init__(url, found)

    def __str__(self) -> str:
        return f"the server {self.url} {self.found}"


@dataclass(frozen=True)
class TokenPrices:
    """Money for a million tokens, of prompts and of completions."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True)
class RetryPolicy:
    """`attempts` for one completion, each at most `timeout_s` long; pauses double from `pause_s` up
    to `longest_pause_s`.
    """

    attempts: int = 6
    timeout_s: float = 300.0
    pause_s: float = 1.0
    longest_pause_s: float = 60.0


@dataclass(frozen=True)
class Completion:
    """One completion and what it took. `estimated`: the server did not say how many tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    money: float
    estimated: bool = False
    finished: str = ""


class _RetryableError(Exception):
    """This attempt failed; another may not. `after_s`: what the server asks to wait."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """A redirect would carry the key to another place."""


@dataclass
class Endpoint:
    """A model behind a server, as a `records.Policy`.

    `url`: up to and including the version, such as http://localhost:8000/v1. `model`: "" asks the
    server, which must then have exactly one. `parallel`: requests at the same time. `sleep`: for
    tests.
    """

    url: str
    model: str = ""
    key: str = field(default="", repr=False)
    max_tokens: int = 8_192
    parallel: int = 8
    patience: RetryPolicy = RetryPolicy()
    prices: TokenPrices = TokenPrices()
    sleep: Any = field(default=time.sleep, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        # Paths are appended with a slash of their own.
        self.url = self.url.rstrip("/")
        split = urlsplit(self.url)
        if (
            split.scheme not in ("http", "https")
            or not split.hostname
            or split.query
            or split.fragment
            # A URL is recorded and shown; a key in it would be too.
            or split.username
        ):
            raise SettingError(
                "llm",
                _strip_password(self.url),
                "a URL such as http://localhost:8000/v1, without a key in it",
            )
        # Plain HTTP shows the key to every machine on the way.
        if self.key and split.scheme == "http" and split.hostname not in _LOOPBACK:
            raise SettingError(
                "llm", self.url, "https: a key is not sent over plain HTTP to another machine"
            )
        # Redirects are refused: one would carry the key to another machine.
        self._opener = urllib.request.build_opener(_NoRedirect)

    @classmethod
    def from_settings(cls, url: str, settings: Settings, **more: Any) -> Endpoint:
        """With the key of the environment. Raises SettingError, also for another machine when
        `offline` is set.
        """
        if settings.offline and urlsplit(url).hostname not in _LOOPBACK:
            raise SettingError("llm", url, "a server on this machine, because 'offline' is set")
        return cls(url, key=settings.llm_key, **more)

    @property
    def name(self) -> str:
        """For records: model and server."""
        return f"{self.model}@{urlsplit(self.url).netloc}"

    def ask(self, prompt: str, *, temperature: float, seed: int) -> Completion | Refusal:
        """One completion, after as many attempts as patience allows. Raises EndpointError for a
        server that refuses.
        """
        body = {
            "model": self._model(),
            "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature,
            "seed": seed % (1 << 31),
            "max_tokens": self.max_tokens,
        }
        reason = ""
        for attempt in range(self.patience.attempts):
            try:
                return self._answer(self._post("/chat/completions", body), prompt)
            except _RetryableError as error:
                reason = str(error)
                # No pause after the last attempt.
                if attempt + 1 < self.patience.attempts:
                    self.sleep(self._pause_s(attempt, error.after_s))
        return Refusal(f"{reason} ({self.patience.attempts} attempts)")

    def sample(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> list[list[str]]:
        """`count` completions for each prompt. Raises EndpointError if one of them cannot be had."""
        requests = [
            # Another seed for each: with one seed a server would give the same completion `count`
            # times.
            (prompt, seed + i * count + j)
            for i, prompt in enumerate(prompts)
            for j in range(count)
        ]
        texts: list[str] = []
        for answer in self.ask_all(requests, temperature=temperature):
            # A missing completion is an error here: an empty one would be scored as a failure of
            # the model.
            if isinstance(answer, Refusal):
                raise EndpointError(self.url, f"gave no completion: {answer.reason}")
            texts.append(answer.text)
        return [texts[i : i + count] for i in range(0, len(texts), count)]

    def ask_all(
        self, requests: Sequence[tuple[str, int]], *, temperature: float
    ) -> list[Completion | Refusal]:
        """Prompts with their seeds, several at a time, answers in order; a refusal of one costs
        only that one.
        """
        # Asked once, before the threads start.
        self._model()

        def one(request: tuple[str, int]) -> Completion | Refusal:
            try:
                return self.ask(request[0], temperature=temperature, seed=request[1])
            except EndpointError as error:
                return Refusal(error.found)

        with ThreadPoolExecutor(max(1, min(self.parallel, len(requests)))) as pool:
            return list(pool.map(one, requests))

    def _model(self) -> str:
        # Threads of `ask_all` must not each ask the server for its models.
        with self._lock:
            if not self.model:
                self.model = self._only_model()
            return self.model

    def _only_model(self) -> str:
        try:
            listing = json.loads(self._post("/models", None))
            names = [str(model["id"]) for model in listing["data"]]
        except (_RetryableError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise EndpointError(
                self.url, f"does not say which models it has ({error}); name one"
            ) from error
        # With several models a choice by the client would make results depend on the server's
        # order.
        if len(names) != 1:
            raise EndpointError(
                self.url, f"has {len(names)} models; name one of {', '.join(names[:8]) or 'them'}"
            )
        return names[0]

    def _pause_s(self, attempt: int, after_s: float | None) -> float:
        longest = self.patience.longest_pause_s
        if after_s is not None:
            # Bounded: a server may ask for hours.
            return min(longest, after_s)
        doubled: float = self.patience.pause_s * (1 << attempt)
        # Random, so that the parallel requests of a run do not come back at the same moment.
        return min(longest, doubled) * random.uniform(0.5, 1.0)

    def _post(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        # For the whole answer: the `timeout` below bounds only each wait of the socket.
        deadline = time.monotonic() + self.patience.timeout_s
        try:
            with self._opener.open(request, timeout=self.patience.timeout_s) as response:
                return _read_body(response, deadline)
        except urllib.error.HTTPError as error:
            # HTTPError is an OSError too, so it is caught before the faults that are tried again.
            self._raise_refusal(error)
        except (http.client.HTTPException, OSError, ValueError) as error:
            # ValueError for a Content-Length that is no number.
            raise _RetryableError(f"{type(error).__name__}: {error}") from error

    def _raise_refusal(self, error: urllib.error.HTTPError) -> NoReturn:
        with error:
            # Bounded: the error page of a proxy may be of any size.
            body = error.read(2_000).decode(errors="replace").strip()
        reason = f"answered with status {error.code}: {body[:300]}"
        if error.code in _AGAIN:
            raise _RetryableError(
                reason, _parse_retry_after(error.headers.get("Retry-After"))
            ) from error
        raise EndpointError(self.url, reason) from error

    def _answer(self, content: bytes, prompt: str) -> Completion:
        try:
            body = json.loads(content)
            choice = body["choices"][0]
            text = choice["message"]["content"]
            finished = str(choice.get("finish_reason") or "")
            if not isinstance(text, str):
                raise TypeError(f"content is {type(text).__name__}")
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            RecursionError,
        ) as error:
            raise _RetryableError(
                f"the answer is no completion ({type(error).__name__}: {error}): {content[:80]!r}"
            ) from error
        prompt_tokens, completion_tokens, is_reported = _count_tokens(body, prompt, text)
        money = self.prices.of(prompt_tokens, completion_tokens)
        return Completion(text, prompt_tokens, completion_tokens, money, not is_reported, finished)


def _read_body(response: Any, deadline: float) -> bytes:
    """The body of `response`, of bounded length and in bounded time."""
    parts: list[bytes] = []
    size = 0
    # `read1` returns what came: `read` would wait for the whole chunk, and the deadline would not
    # be asked.
    while part := response.read1(_CHUNK):
        size += len(part)
        parts.append(part)
        if size > _MOST_BYTES:
            raise _RetryableError(f"an answer of over {_MOST_BYTES} bytes")
        # The time-out of the socket bounds each wait: a server that sends a byte a minute never
        # meets it.
        if time.monotonic() > deadline:
            raise _RetryableError(f"an answer that took longer than its time ({size} bytes came)")
    # http.client returns what came without an error where a connection ends early.
    expected = response.headers.get("Content-Length")
    if expected is not None and size < int(expected):
        raise _RetryableError(f"an answer cut off after {size} of {expected} bytes")
    return b"".join(parts)


def _count_tokens(body: Mapping[str, Any], prompt: str, text: str) -> tuple[int, int, bool]:
    """Tokens of prompt and completion, and whether the server reported them."""
    try:
        usage = body["usage"]
        counts = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        if min(counts) >= 0:
            return *counts, True
    except (KeyError, TypeError, ValueError):
        pass
    return math.ceil(len(prompt) / _CHARS_PER_TOKEN), math.ceil(len(text) / _CHARS_PER_TOKEN), False


def _parse_retry_after(text: str | None) -> float | None:
    """The Retry-After header as seconds; None for none, or for a date."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    # Also not NaN, for which both comparisons are false.
    return value if 0 <= value < math.inf else None


def _strip_password(url: str) -> str:
    return url.rpartition("@")[2] if "@" in url else url
