"""A Hub on the loopback: as much of its HTTP API as the `huggingface_hub` client uses for us, with
switches for what goes wrong.

Repositories live in memory, every commit with all of its files. `.safetensors` files are LFS files,
as on the Hub: uploaded to a storage of their own and served by a redirect to it. `Faults` says what
to break; `requests` holds what was asked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Commit:
    """One commit: its id, and all files of the repository then."""

    oid: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """A repository with its branches; every commit that ever was."""

    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False

    def add(self, files: dict[str, bytes], branch: str = "main") -> str:
        """A commit on `branch` that holds exactly `files`."""
        text = json.dumps(
            [
                len(self.commits),
                sorted(
                    (path, hashlib.sha1(content).hexdigest()) for path, content in files.items()
                ),
            ]
        )
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = Commit(oid, dict(files))
        self.branches[branch] = oid
        return oid

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.branches.get(revision, revision))

    @property
    def head(self) -> Commit:
        return self.commits[self.branches["main"]]


@dataclass
class Faults:
    """What goes wrong, for paths that contain a text. `status`: answers with an error so many times
    (-1: always).
    """

    status: dict[str, tuple[int, int]] = field(default_factory=dict)  # path part -> (status, times)
    headers: dict[str, str] = field(default_factory=dict)  # sent with those errors, and with files
    body: dict[str, Callable[[bytes], bytes]] = field(
        default_factory=dict
    )  # path part -> what is sent instead
    half: set[str] = field(
        default_factory=set
    )  # the connection ends after half of the promised bytes
    endless: set[str] = field(default_factory=set)  # more bytes than anybody asked for
    drip: set[str] = field(default_factory=set)  # a byte now and then, for ever
    hang: set[str] = field(default_factory=set)  # no answer at all, until the server ends
    lost_answers: int = 0  # so many commits are made and answered with an error
    before_commit: list[Callable[[], None]] = field(
        default_factory=list
    )  # somebody else's doings, once each


@dataclass
class HubServer:
    """The server's state. `url` is its endpoint; `token`, if set, is asked for by private
    repositories and for every commit.
    """

    url: str = ""
    cdn: str = ""  # another host's address for LFS files, "" for this one
    token: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    storage: dict[str, bytes] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def list_requests(self, part: str = "", method: str = "") -> list[str]:
        """The paths of the requests so far that contain `part`."""
        return [path for verb, path, _ in self.requests if part in path and method in ("", verb)]


@contextmanager
def serving(**state: Any) -> Iterator[HubServer]:
    """A server on a free port of the loopback, until the block ends."""
    hub = HubServer(**state)

    class Handler(_Handler):
        server_state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_state: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    # The frame: what every request goes through
    # ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        hub, path = self.server_state, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with hub.lock:
            hub.requests.append(
                (self.command, path, {name.lower(): value for name, value in self.headers.items()})
            )
        if any(part in path for part in hub.faults.hang):
            hub.ended.wait()
            self.close_connection = True
            return
        if (status := self._find_planned_error(path)) is not None:
            self._json(status, {"error": "planned"}, hub.faults.headers)
            return
        try:
            self._route(path, body)
        except (BrokenPipeError, ConnectionResetError):  # the client has had enough
            self.close_connection = True

    def _find_planned_error(self, path: str) -> int | None:
        faults = self.server_state.faults
        with self.server_state.lock:
            for part, (status, times) in faults.status.items():
                if part in path and times:
                    faults.status[part] = (status, times - 1)
                    return status
        return None

    def _route(self, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "whoami-v2"]:
            return self._json(200, {"name": "tester", "type": "user"})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if parts[0] == "storage":
            return self._storage(parts[1], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        repository = self.server_state.repositories.get(name)
        if repository is None or (repository.private and not self._has_token()):
            return self._json(
                404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
        if parts[:2] == ["api", "models"]:
            return self._api(repository, name, parts[4:], body)
        return self._resolve(repository, parts[3], "/".join(parts[4:]))

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server_state.token}"

    # The API
    # ---------------------------------------------------------------------------------------------------------------------

    def _api(self, repository: Repository, name: str, rest: list[str], body: bytes) -> None:
        route, revision = (rest or ["revision"])[0], unquote("/".join(rest[1:])) or "main"
        commit = repository.at(revision)
        if commit is None:
            return self._json(
                404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"}
            )
        if route == "revision":
            listing = (
                []
                if "expand" in parse_qs(urlsplit(self.path).query)
                else [{"rfilename": path} for path in commit.files]
            )
            return self._json(
                200, {"id": name, "sha": commit.oid, **({"siblings": listing} if listing else {})}
            )
        if route == "preupload":
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            return self._json(200, {"files": files})
        if route == "commit":
            return self._commit(repository, name, revision, body)
        return self._json(404, {"error": f"no such route {route}"})

    def _create(self, request: dict[str, Any]) -> None:
        hub, name = self.server_state, f"{request['organization']}/{request['name']}"
        if hub.token and not self._has_token():
            return self._json(401, {"error": "Invalid username or password."})
        if name in hub.repositories:
            return self._json(409, {"error": "exists", "url": f"{hub.url}/{name}"})
        hub.repositories[name] = Repository(
            private=request.get("visibility") == "private" or bool(request.get("private"))
        )
        hub.repositories[name].add({".gitattributes": b"*.safetensors filter=lfs\n"})
        return self._json(200, {"url": f"{hub.url}/{name}", "name": name})

    def _commit(self, repository: Repository, name: str, branch: str, body: bytes) -> None:
        hub = self.server_state
        if hub.token and not self._has_token():
            return self._json(403, {"error": "no right to write"})
        with hub.lock:
            interloper = hub.faults.before_commit.pop(0) if hub.faults.before_commit else None
        if interloper is not None:
            interloper()
        with hub.lock:
            header, *operations = [json.loads(line) for line in body.splitlines()]
            parent = header["value"].get("parentCommit")
            if parent is not None and parent != repository.branches[branch]:
                return self._json(
                    412, {"error": "A commit has happened since. Please refresh and try again."}
                )
            files = dict(repository.commits[repository.branches[branch]].files)
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = hub.storage[value["oid"]]
                else:
                    del files[value["path"]]
            oid = repository.add(files, branch)
            hub.faults.lost_answers -= 1
            if hub.faults.lost_answers >= 0:
                return self._json(500, {"error": "lost"})
        return self._json(
            200,
            {
                "commitUrl": f"{hub.url}/{name}/commit/{oid}",
                "commitOid": oid,
                "pullRequestUrl": None,
            },
        )

    def _batch(self, request: dict[str, Any]) -> None:
        hub = self.server_state
        objects = []
        for wanted_file in request["objects"]:
            missing = (
                {"actions": {"upload": {"href": f"{hub.url}/storage/{wanted_file['oid']}"}}}
                if wanted_file["oid"] not in hub.storage
                else {}
            )
            objects.append({"oid": wanted_file["oid"], "size": wanted_file["size"], **missing})
        self._json(200, {"transfer": "basic", "objects": objects})

    def _storage(self, oid: str, body: bytes) -> None:
        hub = self.server_state
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return self._json(400, {"error": "sha256 differs"})
            hub.storage[oid] = body
            return self._json(200, {})
        return self._file(
            hub.storage[oid],
            {},
            "/storage/" + parse_qs(urlsplit(self.path).query).get("path", [""])[0],
        )

    # Files
    # -----------------------------------------------------------------------------------------------------------------------

    def _resolve(self, repository: Repository, revision: str, path: str) -> None:
        commit = repository.at(revision)
        if commit is None:
            return self._json(
                404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"}
            )
        facts = {"X-Repo-Commit": commit.oid} | self.server_state.faults.headers
        if path not in commit.files:
            return self._json(
                404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", **facts}
            )
        content = commit.files[path]
        oid = hashlib.sha256(content).hexdigest()
        if not path.endswith(".safetensors"):
            return self._file(content, {"ETag": f'"{oid[:40]}"', **facts}, path)
        self.server_state.storage[oid] = content
        where = f"{self.server_state.cdn or self.server_state.url}/storage/{oid}?path={path}"
        facts |= {
            "Location": where,
            "X-Linked-Etag": f'"{oid}"',
            "X-Linked-Size": str(len(content)),
            "Content-Length": "0",
        }
        return self._head(302, facts)

    def _file(self, content: bytes, facts: dict[str, str], path: str) -> None:
        faults = self.server_state.faults
        for part, change in faults.body.items():
            content = change(content) if part in path else content
        if any(part in path for part in faults.endless):
            self._head(200, {**facts, "Connection": "close"})
            while not self.server_state.ended.is_set():
                self.wfile.write(bytes(1 << 16))
        if any(part in path for part in faults.drip):
            self._head(200, {**facts, "Content-Length": str(len(content))})
            for i in range(len(content)):
                self.wfile.write(content[i : i + 1])
                if self.server_state.ended.wait(0.05):
                    break
            self.close_connection = True
            return
        self._head(200, {**facts, "Content-Length": str(len(content))})
        if any(part in path for part in faults.half):
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self._head(
            status,
            {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **(headers or {}),
            },
        )
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
