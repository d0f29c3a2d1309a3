"""Requests to the Hub through the `huggingface_hub` client: resolve a revision, read a file, write
a commit.

The library handles tokens, HF_ENDPOINT, HF_HUB_OFFLINE, proxies and certificates. This module adds
a deadline for every request (a server may answer slowly for ever), a limit on a file's size, and
failures as values that name the file and the rule. It does not know what the files mean, and writes
nothing to the disk.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import HUB_REPOSITORY
from torch_cudal1.core.version import __version__
from torch_cudal1.store.hub.hub_layout import FileListing

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["Client", "HubFailure", "Repo"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ATTEMPTS = 3
_PAUSE_S = 0.2
# Large files extend the deadline by their size at this rate. A slower connection is not worth
# waiting for.
_RATE_BYTES_S = 1 << 20
_CHUNK_BYTES = 1 << 16
# A commit may wait this many times longer than a read.
_PUSH_PATIENCE = 30
_T = TypeVar("_T")


@dataclass(frozen=True)
class HubFailure(Refusal):
    """Why a question has no answer.

    "absent": it is not there; "refused": what came breaks a rule; "unreachable": there was no
    answer; "denied": no right to it; "overtaken": another commit came first.
    """

    kind: Literal["absent", "refused", "unreachable", "denied", "overtaken"]

    @property
    def is_passing(self) -> bool:
        """Whether the same question may be answered another time, of a commit that never changes."""
        return self.kind in ("unreachable", "denied")


@dataclass(frozen=True)
class Repo:
    """A repository of the Hub at a revision: a branch, a tag or a commit."""

    name: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Repo:
        """`REPO` or `REPO@revision`. Raises SettingError for anything else."""
        if not HUB_REPOSITORY.fullmatch(text):
            raise SettingError("REPO", text, "owner/name or owner/name@revision")
        name, _, revision = text.partition("@")
        return cls(name, revision or "main")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which can not change."""
        return bool(_COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        return f"{self.name}@{self.revision[:12] if self.is_pinned else self.revision}"


@dataclass(frozen=True)
class Client:
    """The Hub as far as this package uses it. `timeout_s`: the longest wait for an answer; large
    files get longer by their size.
    """

    timeout_s: float
    # None: the endpoint that the library is configured with (HF_ENDPOINT).
    endpoint: str | None = None
    # None: the token that the library finds.
    token: str | bool | None = None

    @property
    def api(self) -> HfApi:
        """The library's client."""
        from huggingface_hub import HfApi

        return HfApi(
            self.endpoint, self.token, library_name="torch-cudal1", library_version=__version__
        )

    def commit_of(self, repo: Repo) -> str | HubFailure:
        """The commit that a revision is now. A commit is its own answer, without a question."""
        # A commit never changes, so no network is needed.
        if repo.is_pinned:
            return repo.revision

        def ask(_: float) -> str | HubFailure:
            sha = self.api.model_info(
                repo.name, revision=repo.revision, timeout=self.timeout_s, expand=["sha"]
            ).sha
            return (
                sha
                if sha and _COMMIT.fullmatch(sha)
                else HubFailure(f"{repo}: {sha!r} came, expected a commit", "refused")
            )

        return self._ask_with_retries(ask, str(repo), self.timeout_s)

    def read(
        self, repo: Repo, path: str, listed: FileListing | None, limit_bytes: int
    ) -> bytes | HubFailure:
        """The bytes of a file at a commit, which are what `listed` says (None: not known
        beforehand).
        """
        wait_s = self.timeout_s + (listed.size_bytes if listed else 0) / _RATE_BYTES_S
        return self._ask_with_retries(
            lambda until: self._read(repo, path, listed, limit_bytes, until),
            f"{repo}: {path}",
            wait_s,
        )

    def write(
        self,
        repo: Repo,
        files: dict[str, bytes],
        deleted: Sequence[str],
        *,
        parent: str,
        message: str,
    ) -> str | HubFailure:
        """One commit on top of `parent`, or HubFailure("overtaken") where the branch has moved on
        meanwhile.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        def send(_: float) -> str | HubFailure:
            added = [CommitOperationAdd(path, data) for path, data in files.items()]
            removed = [CommitOperationDelete(path) for path in deleted]
            commit = partial(
                self.api.create_commit,
                commit_message=message,
                revision=repo.revision,
                parent_commit=parent,
            )
            try:
                return str(commit(repo.name, [*added, *removed]).oid)
            except ConnectionError as error:
                # Only Xet, the library's own storage protocol, raises the built-in ConnectionError:
                # the HTTP library has errors of its own.
                hint = "a server without Xet storage takes files where HF_HUB_DISABLE_XET=1 is set"
                return HubFailure(f"{repo}: {_format_first_line(error)}; {hint}", "unreachable")

        wait_s = self.timeout_s * _PUSH_PATIENCE + sum(map(len, files.values())) / _RATE_BYTES_S
        # One attempt: a commit whose answer was lost may have been made. `push` looks before it
        # sends again.
        return self._ask_with_retries(send, str(repo), wait_s, attempts=1)

    def create(self, repo: Repo) -> str | HubFailure:
        """Make the repository, private, unless it is there; its address."""

        def ask(_: float) -> str | HubFailure:
            return str(self.api.create_repo(repo.name, private=True, exist_ok=True))

        return self._ask_with_retries(ask, str(repo), self.timeout_s, attempts=1)

    def _read(
        self, repo: Repo, path: str, listed: FileListing | None, limit_bytes: int, until: float
    ) -> bytes | HubFailure:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        file_name, max_bytes = f"{repo}: {path}", listed.size_bytes if listed else limit_bytes
        headers = build_hf_headers(
            token=self.token, library_name="torch-cudal1", library_version=__version__
        )
        url = hf_hub_url(repo.name, path, revision=repo.revision, endpoint=self.endpoint)
        data = bytearray()
        with get_session().stream(
            "GET",
            url,
            headers={**headers, "Accept-Encoding": "identity"},
            timeout=self.timeout_s,
            follow_redirects=True,
        ) as response:
            hf_raise_for_status(response)
            answered = {
                each_response.headers.get("X-Repo-Commit") or repo.revision
                # A large file's last answer comes from the storage server, which sends no commit:
                # the redirect before it does.
                for each_response in (*response.history, response)
            }
            # A server that answers for another commit would mix two of them in one mirror.
            if answered != {repo.revision}:
                return HubFailure(
                    f"{file_name}: the Hub answered for the commit "
                    f"{min(answered - {repo.revision})}",
                    "refused",
                )
            encoding = response.headers.get("Content-Encoding", "identity")
            # A compressed answer may unpack to any size before a byte of it is counted.
            if encoding != "identity":
                return HubFailure(
                    f"{file_name}: it came packed as {encoding!r}, expected 'identity' as asked "
                    f"for",
                    "refused",
                )
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                data += chunk
                # Counted while it comes: a file without end must not fill the memory.
                if len(data) > max_bytes:
                    return HubFailure(
                        f"{file_name}: more than {max_bytes} bytes came, expected "
                        f"{max_bytes if listed else 'no more'}",
                        "refused",
                    )
                # The client's time-out bounds the wait for each chunk, not for the file.
                if time.monotonic() > until:
                    return HubFailure(
                        f"{file_name}: {len(data)} bytes came in time, expected {max_bytes}",
                        "unreachable",
                    )
        return _compare_digest(bytes(data), listed, file_name)

    def _ask_with_retries(
        self,
        ask: Callable[[float], _T | HubFailure],
        subject: str,
        wait_s: float,
        attempts: int = _ATTEMPTS,
    ) -> _T | HubFailure:
        """The answer of `ask`; asked again while the Hub is at fault and there is time. Never
        longer than `wait_s`.
        """
        until, answer = (
            time.monotonic() + wait_s,
            HubFailure(f"{subject}: no answer in {wait_s:g} s", "unreachable"),
        )
        for attempt in range(attempts):
            outcome = _call_within(
                until - time.monotonic(), partial(_call_hub, ask, until, subject), answer
            )
            if not isinstance(outcome, _RetryableFailure):
                return outcome
            answer = HubFailure(outcome.reason, outcome.kind)
            # Retry-After where the Hub sends one, else doubling pauses.
            pause_s = outcome.after_s or _PAUSE_S * 2**attempt
            if attempt + 1 == attempts or time.monotonic() + pause_s > until:
                break
            time.sleep(pause_s)
        return answer


@dataclass(frozen=True)
class _RetryableFailure(HubFailure):
    """A failure that may pass in a moment. `after_s`: the seconds that the Hub asks to wait."""

    after_s: float = 0.0


def _compare_digest(data: bytes, listed: FileListing | None, file_name: str) -> bytes | HubFailure:
    if listed is None:
        return data
    if len(data) != listed.size_bytes:
        return _RetryableFailure(
            f"{file_name}: {len(data)} bytes came, the index says {listed.size_bytes}",
            "unreachable",
        )
    digest = hashlib.sha256(data).hexdigest()
    if digest != listed.sha256:
        return _RetryableFailure(
            f"{file_name}: sha256 is {digest}, the index says {listed.sha256}", "refused"
        )
    return data


def _call_hub(
    ask: Callable[[float], _T | HubFailure], until: float, subject: str
) -> _T | HubFailure:
    """The answer of `ask`; an error of the library as a HubFailure."""
    from huggingface_hub import errors

    # The base classes are OSError and the error of whichever HTTP library the installed client
    # uses: its name differs between versions of huggingface_hub.
    transport: Any = errors.HfHubHTTPError.__bases__
    try:
        return ask(until)
    except errors.OfflineModeIsEnabled:
        return HubFailure(f"{subject}: offline mode is on (HF_HUB_OFFLINE)", "unreachable")
    except errors.RepositoryNotFoundError as error:
        hint = (
            "access is restricted"
            if isinstance(error, errors.GatedRepoError)
            else "no such repository, or no right to read it"
        )
        return HubFailure(
            f"{subject}: {hint}; check the name and the token (`hf auth login`)", "denied"
        )
    except errors.RevisionNotFoundError:
        return HubFailure(f"{subject}: the Hub has no such revision", "refused")
    except errors.EntryNotFoundError:
        return HubFailure(f"{subject}: the Hub has no such file", "absent")
    except errors.HfHubHTTPError as error:
        return _classify_status(error, subject)
    except transport as error:
        return _RetryableFailure(
            f"{subject}: {type(error).__name__}: {_format_first_line(error)}", "unreachable"
        )
    except (
        ValueError,
        RuntimeError,
    ) as error:
        # An answer that is no JSON, a name that the library refuses, or an upload that failed.
        return HubFailure(
            f"{subject}: {type(error).__name__}: {_format_first_line(error)}", "refused"
        )


def _classify_status(error: Any, subject: str) -> HubFailure:
    status = error.response.status_code
    reason = f"{subject}: the Hub answered {status}: {_format_first_line(error)}"
    # Conflict and "precondition failed": the parent commit is no longer the head of the branch.
    if status in (409, 412):
        return HubFailure(f"{subject}: another commit came first ({status})", "overtaken")
    # A time-out, a rate limit, or a fault of the server: the same request may pass a moment later.
    if status in (408, 429) or status >= 500:
        retry_after = str(error.response.headers.get("Retry-After", ""))
        return _RetryableFailure(
            reason, "unreachable", float(retry_after) if retry_after.isdigit() else 0.0
        )
    return HubFailure(reason, "absent" if status == 404 else "denied")


def _call_within(
    seconds: float, work: Callable[[], _T | HubFailure], late_answer: HubFailure
) -> _T | HubFailure:
    """The answer of `work` within `seconds`, else `late_answer`. The thread of a late answer is
    left behind: a server can hold it for ever, and no caller waits for it.
    """
    box: list[_T | HubFailure] = []
    # A thread, because no time-out of an HTTP client bounds a server that sends a byte a minute. A
    # daemon, so that a thread that is left behind does not keep the process from ending.
    thread = threading.Thread(target=lambda: box.append(work()), name="cudal1-hub", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return box[0] if box else late_answer


def _format_first_line(error: BaseException) -> str:
    return next(iter(_iter_lines(str(error))), type(error).__name__)[:300]


def _iter_lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip())
