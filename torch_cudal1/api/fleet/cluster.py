"""A crew on a Ray cluster, and the only file that knows Ray (extra `ray`). It offers what
`crew.Crew` asks for and nothing else.

A task asks Ray for one GPU, or one CPU, and runs in a process of its own. Where that machine sees
the cache folder of this one (a shared disk) it works in it; elsewhere it works in an empty cache
and sends the files back, which are checked and stored here unless a decision for their key is there
already. Targets are loaded there: their files must lie on every machine, under the same path.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from torch_cudal1.api.fleet.fleet_worker import perform
from torch_cudal1.api.fleet.pool import Progress, WorkerDiedError
from torch_cudal1.api.fleet.task import Answer, Order, Task
from torch_cudal1.core.errors import SettingError
from torch_cudal1.ir.records import Entry, Miss
from torch_cudal1.store.cache.entry_file import decode_entry
from torch_cudal1.store.cache.files import NotStored, files_under, read_file, write_file
from torch_cudal1.store.cache.local_cache import LocalCache

__all__ = ["RayCrew", "store", "work"]

_MARK = "cluster-"
_LIMIT_BYTES = 4 << 30


class RayCrew:
    """Workers of a Ray cluster: the one at `address` ("auto": found by Ray; None: one started
    here).
    """

    def __init__(self, order: Order, address: str | None = "auto", ray: Any = None) -> None:
        if order.settings.offline:
            raise SettingError(
                "cluster",
                address,
                "no cluster while the setting 'offline' is on: it is reached by network",
            )
        self._order, self._ray = order, ray or _library()
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, OSError, ValueError) as error:
                # Ray uses its token file only then
                hint = "where it asks for a token, set RAY_AUTH_MODE=token"
                raise SettingError(
                    "cluster", address, f"the address of a running Ray cluster ({error}); {hint}"
                ) from error
        kind = "GPU" if order.device == "cuda" else "CPU"
        self._size = int(self._ray.cluster_resources().get(kind, 0))
        if not self._size:
            raise SettingError(
                "cluster", address, f"a Ray cluster with a {kind}; this one has none"
            )
        self._remote = self._ray.remote(max_retries=0, max_calls=1, **{f"num_{kind.lower()}s": 1})(
            work
        )
        self._mark = order.settings.cache_dir / "warmup" / f"{_MARK}{secrets.token_hex(8)}"
        shared = write_file(self._mark, b"this machine's cache\n")
        self._seen = "" if isinstance(shared, NotStored) else str(self._mark)

    @property
    def size(self) -> int:
        """GPUs of the cluster, or its CPUs where tasks need no GPU."""
        return self._size

    def submit(self, task: Task, say: Progress) -> Answer:
        """The answer, when the cluster has it. Raises WorkerDiedError for whatever ended the task's
        process.
        """
        say("given to the cluster", None)
        try:
            told = self._ray.get(
                self._remote.remote(
                    self._order.to_json(), _absolute(task.target), task.signature, self._seen
                )
            )
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(
                "a worker of the cluster", str(error).strip().splitlines()[-1]
            ) from error
        answer = Answer.from_json(told["answer"])
        refused = store(told["files"], LocalCache(self._order.settings.cache_dir))
        if refused and answer.result is not None and not answer.result.error:
            raise WorkerDiedError("a worker of the cluster", f"sent what was not stored: {refused}")
        result = answer.result and replace(
            answer.result, target=task.target
        )  # there it had its file's whole path
        return replace(answer, task=task, result=result)

    def close(self) -> None:
        """Leave the cluster: Ray ends the tasks of a driver that left."""
        self._mark.unlink(missing_ok=True)
        self._mark.with_suffix(".lock").unlink(missing_ok=True)
        self._ray.shutdown()


def work(order: Mapping[str, Any], target: str, signature: str, mark: str) -> dict[str, Any]:
    """What runs on a machine of the cluster: the answer, and the files of the cache if that machine
    has one of its own.
    """
    told, task = Order.from_json(order), Task(target, signature)

    def say(what: str, fraction: float | None) -> None:
        """Nobody listens there."""

    if mark and Path(mark).is_file():
        return {"answer": perform(told, task, say).to_json(), "files": {}}
    with tempfile.TemporaryDirectory(prefix="cudal1-cluster-") as folder:
        root = Path(folder)
        answer = perform(told.with_cache(root), task, say)
        paths = [
            path
            for suffix in (".safetensors", ".json")
            for path in files_under(root / "v1", suffix)
        ]
        return {
            "answer": answer.to_json(),
            "files": {str(path.relative_to(root)): path.read_bytes() for path in paths},
        }


def store(files: Mapping[str, bytes], cache: LocalCache) -> str:
    """Store the files of another cache that are whole and belong where they say; why not, or ""."""
    with tempfile.TemporaryDirectory(prefix="cudal1-cluster-") as folder:
        root, places = Path(folder), []
        for name, data in files.items():
            place = PurePosixPath(name)
            if place.is_absolute() or ".." in place.parts or place.parts[:1] != ("v1",):
                return f"{name!r} is no place in a cache"
            write_file(root / place, data)
            places.append(place)
        if broken := LocalCache(root).verify():
            return f"{broken[0].path.relative_to(root)}: {broken[0].reason}"
        for place in places:
            data = (root / place).read_bytes()
            stored = (
                NotStored("")
                if _known(data, cache.root / place)
                else write_file(cache.root / place, data)
            )
            if isinstance(stored, NotStored) and stored.reason:
                return stored.reason
    return ""


def _known(data: bytes, path: Path) -> bool:
    """Whether `path` holds a decision of the same key, made on the same kind of machine."""
    held = read_file(path, _LIMIT_BYTES)
    new, old = decode_entry(data), held if isinstance(held, Miss) else decode_entry(held)
    return isinstance(new, Entry) and isinstance(old, Entry) and new.target == old.target


def _absolute(target: str) -> str:
    """The target with its file's whole path: tasks run in another folder there."""
    source, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    path = Path(source).expanduser()
    return f"{path.resolve()}{colon}{name}" if path.is_file() else target


def _library() -> Any:
    try:
        import ray
    except ImportError as error:
        raise SettingError(
            "cluster", "--cluster", "the package Ray: `pip install 'torch-cudal1[ray]'`"
        ) from error
    return ray
