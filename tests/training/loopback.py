"""An OpenAI-compatible server on this machine that answers by a script: what a test wants a server
to do wrong, it does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Loopback", "loopback", "reply"]

Act = Callable[["_LoopbackHandler"], None]


def reply(text: str, *, usage: bool = True, status: int = 200, finish: str = "stop") -> Act:
    """A well-formed completion."""
    body: dict[str, Any] = {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]
    }
    if usage:
        body["usage"] = {"prompt_tokens": 100, "completion_tokens": 10}
    return lambda handler: handler.send(status, json.dumps(body).encode())


def status(
    code: int, *, headers: dict[str, str] | None = None, body: bytes = b'{"error": "told so"}'
) -> Act:
    """A refusal."""
    return lambda handler: handler.send(code, body, headers or {})


def junk(handler: _LoopbackHandler) -> None:
    """A body that is no JSON."""
    handler.send(200, b"<html>502 Bad Gateway</html>")


def half(handler: _LoopbackHandler) -> None:
    """A body that ends before its announced length."""
    handler.send(200, b'{"choices": [{"mess', announced=500)


def empty_choices(handler: _LoopbackHandler) -> None:
    """JSON of another form."""
    handler.send(200, b'{"choices": []}')


def slow(handler: _LoopbackHandler) -> None:
    """No answer for longer than any test's patience."""
    handler.server.stopped.wait(30)  # type: ignore[attr-defined]


def hang_up(handler: _LoopbackHandler) -> None:
    """A connection closed without a word."""
    handler.close_connection = True


@dataclass
class Loopback:
    """`acts`: what is done with each request for a completion, in order; the last one stays.
    `seen`: bodies and headers.
    """

    url: str
    acts: list[Act]
    models: tuple[str, ...] = ("tiny",)
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answer: Callable[[str], str] | None = None

    def act(self, handler: _LoopbackHandler, body: dict[str, Any]) -> None:
        self.seen.append(body)
        self.headers.append(dict(handler.headers))
        if self.acts:
            (self.acts.pop(0) if len(self.acts) > 1 or self.answer else self.acts[0])(handler)
        elif self.answer is not None:
            reply(self.answer(body["messages"][0]["content"]))(handler)


class _LoopbackHandler(BaseHTTPRequestHandler):
    script: Loopback

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        self.script.act(self, body)

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.send(200, json.dumps({"data": [{"id": name} for name in self.script.models]}).encode())

    def send(
        self,
        code: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        announced: int | None = None,
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def loopback(
    *acts: Act, answer: Callable[[str], str] | None = None, models: tuple[str, ...] = ("tiny",)
) -> Iterator[Loopback]:
    """A server for the body. `answer`: what it completes prompts with when the acts are used up."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _LoopbackHandler)
    server.daemon_threads = True
    server.stopped = threading.Event()  # type: ignore[attr-defined]
    script = Loopback(
        f"http://127.0.0.1:{server.server_address[1]}/v1", list(acts), models, answer=answer
    )
    server.RequestHandlerClass = type("Handler", (_LoopbackHandler,), {"script": script})
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield script
    finally:
        server.stopped.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()
        thread.join()
        time.sleep(0)
