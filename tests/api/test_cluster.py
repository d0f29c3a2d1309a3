"""The cluster pool: the same tasks through anything that behaves like Ray, and through Ray itself
where it is installed.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.api.test_fleet_worker import comparable, plant_target
from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.api.fleet import cluster
from torch_cudal1.api.fleet.cluster import RayPool, run_on_cluster, store_files
from torch_cudal1.api.fleet.fleet_worker import run_task
from torch_cudal1.api.fleet.pool import run_tasks
from torch_cudal1.api.fleet.warmup_journal import find_journal
from torch_cudal1.api.fleet.warmup_task import WarmupAnswer, WarmupOrder, WarmupTask
from torch_cudal1.api.warmup import WarmupResult
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.cache.cache_paths import entry_path, record_path
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.resolve import Hit

KEY = make_entry().region_key
PLACE = str(entry_path(Path(), KEY, HERE, CONTRACT))


class RayError(Exception):
    pass


class Ray:
    """What `RayCrew` uses of the package ray, in this process. `does` stands for the machine that
    is given a task.
    """

    def __init__(self, does: Callable[..., Any], **resources: float) -> None:
        self.does, self.resources, self.asked, self.up = does, resources, [], False
        self.exceptions = SimpleNamespace(RayError=RayError)

    def is_initialized(self) -> bool:
        return self.up

    def init(self, address: str | None, **options: Any) -> None:
        if address == "nobody:1":
            raise ConnectionError("no cluster there")
        self.up = True

    def shutdown(self) -> None:
        self.up = False

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def remote(self, **options: Any) -> Any:
        self.asked.append(options)
        return lambda function: SimpleNamespace(remote=lambda *args: lambda: self.does(*args))

    def get(self, reference: Callable[[], Any]) -> Any:
        return reference()


def result(**changes: Any) -> WarmupAnswer:
    return WarmupAnswer(
        WarmupTask("t"),
        WarmupResult(
            **(
                {"target": "t", "explanation": None, "error": None, "seconds": 0.1}
                | {"built": 1, "reused": 0}
                | changes
            )
        ),
    )


def run(order: WarmupOrder, ray: Ray, *tasks: WarmupTask) -> tuple[WarmupAnswer, ...]:
    return run_tasks(
        tasks,
        RayPool(order, "auto", ray),
        find_journal(order, tasks),
        lambda activity, fraction: None,
    ).answers


@pytest.fixture
def order(tmp_path: Path) -> WarmupOrder:
    return WarmupOrder(Settings(cache_dir=tmp_path / "cache"))


def test_tasks_go_to_the_cluster_with_one_device_each_and_whole_paths(
    order: WarmupOrder, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "model.py").write_text("")
    monkeypatch.chdir(tmp_path)
    events: list[str] = []

    def does(received: Any, target: str, signature: str, mark: str) -> Any:
        assert WarmupOrder.from_json(received) == order
        assert Path(mark).is_file()
        events.append(target)
        return {"answer": result().to_json(), "files": {}}

    ray = Ray(does, CPU=3.0)
    answers = run(order, ray, WarmupTask("model.py:a"), WarmupTask("package.module:b"))
    assert sorted(events) == sorted([f"{tmp_path}/model.py:a", "package.module:b"])
    assert [answer.task.target for answer in answers] == ["model.py:a", "package.module:b"]
    assert [answer.result.target for answer in answers if answer.result] == [
        "model.py:a",
        "package.module:b",
    ]
    assert ray.asked == [{"max_retries": 0, "max_calls": 1, "num_cpus": 1}]
    assert not ray.up
    assert list((order.settings.cache_dir / "warmup").iterdir()) == [], (
        "neither mark nor journal is left"
    )
    gpus = Ray(does, GPU=4.0)
    assert RayPool(WarmupOrder(order.settings, device="cuda"), "auto", gpus).size == 4
    assert gpus.asked[0]["num_gpus"] == 1


def test_a_machine_with_a_cache_of_its_own_sends_what_it_stored(order: WarmupOrder) -> None:
    files = {PLACE: encode_entry(make_entry())}
    run(
        order,
        Ray(lambda *args: {"answer": result().to_json(), "files": files}, CPU=1),
        WarmupTask("t"),
    )
    assert isinstance(LocalCache(order.settings.cache_dir).get(KEY, HERE, CONTRACT), Hit)


def test_a_task_that_dies_there_is_given_out_once_more(order: WarmupOrder) -> None:
    calls: list[int] = []

    def does(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RayError("the node died")
        return {"answer": result().to_json(), "files": {}}

    assert run(order, Ray(does, CPU=1), WarmupTask("t"))[0].is_finished
    assert len(calls) == 2
    calls.clear()

    def never(*args: Any) -> Any:
        calls.append(1)
        raise RayError("the node died")

    assert "the node died" in run(order, Ray(never, CPU=1), WarmupTask("t"))[0].died
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("../outside.safetensors", b"", "no place in a cache"),
        ("/tmp/outside.safetensors", b"", "no place in a cache"),
        ("v1/../../outside", b"", "no place in a cache"),
        ("warmup/x.jsonl", b"", "no place in a cache"),
        (PLACE, b"half", "unreadable"),
        (PLACE.replace("ab" * 32, "cd" * 32), encode_entry(make_entry()), "it holds the entry of"),
        (str(record_path(Path(), "ab" * 32, HERE, CONTRACT)), b"{}", "unreadable"),
    ],
    ids=["up", "absolute", "up inside", "elsewhere", "half", "another key", "alias"],
)
def test_files_that_are_broken_or_lie_about_their_place_are_not_stored(
    order: WarmupOrder, name: str, content: bytes, reason: str
) -> None:
    cache = LocalCache(order.settings.cache_dir)
    assert reason in str(store_files({name: content}, cache))
    assert not cache.root.exists()
    answer = run(
        order,
        Ray(lambda *args: {"answer": result().to_json(), "files": {name: content}}, CPU=1),
        WarmupTask("t"),
    )[0]
    assert reason in answer.died


def test_a_decision_that_is_here_already_stays_unless_its_machine_changed(
    order: WarmupOrder,
) -> None:
    cache = LocalCache(order.settings.cache_dir)
    cache.put(make_entry(package="here"))
    assert store_files({PLACE: encode_entry(make_entry(package="there"))}, cache) is None
    assert cache.get(KEY, HERE, CONTRACT).entry.package == "here"  # type: ignore[union-attr]
    newer = make_entry(package="there").target.__class__(**{**vars(HERE), "torch": "9.9"})
    assert (
        store_files({PLACE: encode_entry(make_entry(package="there", target=newer))}, cache) is None
    )
    assert cache.get(KEY, newer, CONTRACT).entry.package == "there"  # type: ignore[union-attr]


@pytest.mark.parametrize("shared", [True, False])
def test_the_work_itself_is_what_a_local_worker_does(tmp_path: Path, shared: bool) -> None:
    file, order = plant_target(tmp_path)
    task = WarmupTask(f"{file}:make")
    mark = tmp_path / "mark"
    mark.touch()
    if shared:
        answer = run_on_cluster(order.to_json(), task.target, "", str(mark))
        assert comparable(WarmupAnswer.from_json(answer["answer"])) == comparable(
            run_task(order, task, lambda activity, fraction: None)
        )
        assert answer["files"] == {}
        return
    bad = run_on_cluster(order.to_json(), f"{file}:bad", "", str(tmp_path / "not here"))
    assert "no such checkpoint" in bad["answer"]["unusable"]
    assert bad["files"] == {}


def test_what_a_machine_without_the_folder_decides_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, order = plant_target(tmp_path)
    folders: list[Path] = []

    def decides(received: WarmupOrder, task: WarmupTask, say: object) -> WarmupAnswer:
        folders.append(received.settings.cache_dir)
        LocalCache(received.settings.cache_dir).put(make_entry())
        LocalCache(received.settings.cache_dir).put_decision_record(
            "cd" * 32, {"a": 1}, HERE, CONTRACT
        )
        return result()

    monkeypatch.setattr(cluster, "run_task", decides)
    reason = run_on_cluster(order.to_json(), f"{file}:make", "", "")
    assert folders[0] != order.settings.cache_dir
    assert not folders[0].exists()
    assert set(reason["files"]) == {PLACE, str(record_path(Path(), "cd" * 32, HERE, CONTRACT))}
    fresh = LocalCache(tmp_path / "fresh")
    assert store_files(reason["files"], fresh) is None
    assert fresh.get_decision_record("cd" * 32, HERE, CONTRACT) == {"a": 1}


def test_without_ray_the_message_says_what_to_install(
    order: WarmupOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingError, match=r"torch-cudal1\[ray\]"):
        RayPool(order)


def test_a_cluster_that_is_not_there_or_has_no_such_device_is_refused(order: WarmupOrder) -> None:
    with pytest.raises(SettingError, match="no cluster there"):
        RayPool(order, "nobody:1", Ray(lambda: None, CPU=1))
    with pytest.raises(SettingError, match="with a GPU"):
        RayPool(WarmupOrder(order.settings, device="cuda"), "auto", Ray(lambda: None, CPU=1))


def test_offline_there_is_no_cluster(order: WarmupOrder) -> None:
    ray = Ray(lambda: None, CPU=1)
    with pytest.raises(SettingError, match="while the setting 'offline' is on"):
        RayPool(WarmupOrder(order.settings.but(offline=True)), "auto", ray)
    assert not ray.up


def test_ray_itself_carries_tasks_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "needs Ray (extra `ray`): 80 MB and a cluster of processes that give up when a busy machine is slow, so not in CI"
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes a token there
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason=why)
    file, order = plant_target(tmp_path)
    deadly = tmp_path / "deadly.py"
    deadly.write_text("import os\ndef make():\n    os._exit(3)\n")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    tasks = [WarmupTask(f"{file}:make"), WarmupTask(f"{deadly}:make")]
    answer, died = run_tasks(
        tasks, RayPool(order), find_journal(order, tasks), lambda activity, fraction: None
    ).answers
    assert comparable(answer) == comparable(
        run_task(order, tasks[0], lambda activity, fraction: None)
    )
    assert died.died.startswith("given out 2 times")
    assert not ray.is_initialized()
