"""A worker pool on a Ray cluster, and the only file that knows Ray (extra `ray`). It implements
`pool.WorkerPool` and nothing else.

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

from torch_cudal1.api.fleet.fleet_worker import run_task
from torch_cudal1.api.fleet.pool import Progress, WorkerDiedError
from torch_cudal1.api.fleet.warmup_task import WarmupAnswer, WarmupOrder, WarmupTask
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.cache.entry_file import decode_entry
from torch_cudal1.store.cache.files import iter_files, read_file, write_file
from torch_cudal1.store.cache.local_cache import LocalCache

__all__ = ["RayPool", "run_on_cluster", "store_files"]

_MARKER_PREFIX = "cluster-"
MAX_FILE_BYTES = 4 << 30


class RayPool:
    """Workers of a Ray cluster: the one at `address` ("auto": found by Ray; None: one started
    here).
    """

    def __init__(self, order: WarmupOrder, address: str | None = "auto", ray: Any = None) -> None:
        # `offline` promises that no connection is opened, and Ray's address is a connection.
        if order.settings.offline:
            raise SettingError(
                "cluster",
                address,
                "no cluster while the setting 'offline' is on: it is reached by network",
            )
        self._order, self._ray = order, ray or _import_ray()
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, OSError, ValueError) as error:
                # Ray reads its token file only in this mode.
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
        # `max_calls=1`: a process for each task, so that no CUDA context or memory of one stays for
        # the next. `max_retries=0`: this package counts the attempts itself, and names the deaths.
        self._remote = self._ray.remote(max_retries=0, max_calls=1, **{f"num_{kind.lower()}s": 1})(
            run_on_cluster
        )
        # A file with a random name shows a worker whether its machine sees this very folder; a path
        # that exists there may be another disk.
        self._mark = order.settings.cache_dir / "warmup" / f"{_MARKER_PREFIX}{secrets.token_hex(8)}"
        shared = write_file(self._mark, b"this machine's cache\n")
        self._seen = "" if isinstance(shared, Refusal) else str(self._mark)

    @property
    def size(self) -> int:
        """GPUs of the cluster, or its CPUs where tasks need no GPU."""
        return self._size

    def submit(self, task: WarmupTask, progress: Progress) -> WarmupAnswer:
        """Wait for the cluster's answer to `task`. Raises WorkerDiedError where the task's process
        ended without one.
        """
        progress("given to the cluster", None)
        try:
            message = self._ray.get(
                self._remote.remote(
                    self._order.to_json(),
                    _resolve_target_path(task.target),
                    task.signature,
                    self._seen,
                )
            )
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(
                "a worker of the cluster", str(error).strip().splitlines()[-1]
            ) from error
        answer = WarmupAnswer.from_json(message["answer"])
        # The files came over the network: they are checked like a folder of unknown origin.
        refusal = store_files(message["files"], LocalCache(self._order.settings.cache_dir))
        if refusal is not None and answer.result is not None and not answer.result.error:
            raise WorkerDiedError("a worker of the cluster", f"sent what was not stored: {refusal}")
        # On the cluster the target had its file's whole path; users know it by the name they gave.
        result = answer.result and replace(answer.result, target=task.target)
        return replace(answer, task=task, result=result)

    def close(self) -> None:
        """Leave the cluster: Ray ends the tasks of a driver that left."""
        self._mark.unlink(missing_ok=True)
        self._mark.with_suffix(".lock").unlink(missing_ok=True)
        self._ray.shutdown()


def run_on_cluster(
    order: Mapping[str, Any], target: str, signature: str, mark: str
) -> dict[str, Any]:
    """Run one task on a machine of the cluster.

    Returns the answer, and the files of the cache if that machine has a cache of its own.
    """
    warmup_order, task = WarmupOrder.from_json(order), WarmupTask(target, signature)

    def ignore_progress(activity: str, fraction: float | None) -> None:
        """Progress is dropped: Ray has no channel back before the answer."""

    if mark and Path(mark).is_file():
        return {"answer": run_task(warmup_order, task, ignore_progress).to_json(), "files": {}}
    with tempfile.TemporaryDirectory(prefix="cudal1-cluster-") as folder:
        root = Path(folder)
        answer = run_task(warmup_order.with_cache(root), task, ignore_progress)
        paths = [
            path for suffix in (".safetensors", ".json") for path in iter_files(root / "v1", suffix)
        ]
        return {
            "answer": answer.to_json(),
            "files": {str(path.relative_to(root)): path.read_bytes() for path in paths},
        }


def store_files(files: Mapping[str, bytes], cache: LocalCache) -> Refusal | None:
    """Store the files of another cache, if all are whole and lie at their own place.

    `files`: content by path below the cache folder. After a refusal nothing more is stored.
    """
    with tempfile.TemporaryDirectory(prefix="cudal1-cluster-") as folder:
        root, paths = Path(folder), []
        for name, data in files.items():
            path = PurePosixPath(name)
            # A name from another machine must not lead to a file outside of the cache.
            if path.is_absolute() or ".." in path.parts or path.parts[:1] != ("v1",):
                return Refusal(f"{name!r} is no place in a cache")
            write_file(root / path, data)
            paths.append(path)
        # All files are checked in a scratch folder before the first one enters the cache.
        if broken := LocalCache(root).verify():
            return Refusal(f"{broken[0].path.relative_to(root)}: {broken[0].reason}")
        for path in paths:
            data = (root / path).read_bytes()
            # A decision made here meanwhile stays: processes may run it already.
            if _is_decided(data, cache.root / path):
                continue
            stored = write_file(cache.root / path, data)
            if isinstance(stored, Refusal):
                return stored
    return None


def _is_decided(data: bytes, path: Path) -> bool:
    """Whether `path` holds a decision of the same key, made on the same kind of machine."""
    file = read_file(path, MAX_FILE_BYTES)
    new, old = decode_entry(data), file if isinstance(file, Refusal) else decode_entry(file)
    return isinstance(new, Entry) and isinstance(old, Entry) and new.target == old.target


def _resolve_target_path(target: str) -> str:
    """The target with its file's whole path: tasks run in another folder there."""
    source, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    path = Path(source).expanduser()
    return f"{path.resolve()}{colon}{name}" if path.is_file() else target


def _import_ray() -> Any:
    try:
        # An optional extra: this file can be imported without it.
        import ray
    except ImportError as error:
        raise SettingError(
            "cluster", "--cluster", "the package Ray: `pip install 'torch-cudal1[ray]'`"
        ) from error
    return ray
