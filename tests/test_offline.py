"""Nothing of the package opens a connection where the user forbids it: in processes where every
attempt is an error, and is counted.

The same process without the word `offline` does try to reach the Hub it is given, so the count can
be something else than nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import plant
from torch_cudal1.api import targets
from torch_cudal1.core.settings import PREFIX, Settings
from torch_cudal1.store.bundle.bundle_file import write_bundle
from torch_cudal1.store.bundle.lockfile import make_lock, write_lock
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.signatures import create_key, load_signer

ROOT = Path(__file__).resolve().parents[1]
MODEL = """\
import torch
from torch import nn

def make(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (torch.ones(2, 8),)
def unknown(): return nn.Linear(8, 3).eval(), (torch.ones(2, 8),)
"""
PROCESS = """\
import json, sys
tried, children = [], []
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto", "socket.bind")

def watch(event, args):
    if event in NETWORK:
        tried.append(event)
        raise OSError(101, "the network is cut")
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        children.append(event)

sys.addaudithook(watch)
import socket

def cut(self, *args):
    tried.append("connect")
    raise OSError(101, "the network is cut")

socket.socket.connect = socket.socket.connect_ex = cut
import torch, cudal1
from model import make, unknown
from torch_cudal1.__main__ import main

offline = ["--offline"] if sys.argv[1] == "offline" else []
trusted = ["--publishers", "publishers.toml"]
codes = {"import": main(["import", "kernels.bundle", "--cache-dir", "new", *offline])}
codes["lock"] = main(["lock", "--check", "--cache-dir", "new", *offline])
codes["coverage"] = main(["coverage", "cudal1.lock", "--cache-dir", "new", *trusted, *offline])
codes["list"] = main(["list", "--cache-dir", "new", *offline])

def start(build, **options):
    module, inputs = build()
    with torch.no_grad():
        expected = module(*inputs)
        module = cudal1.accelerate(module, inputs, strictness="error", offline=bool(offline), **options)
        return bool(torch.equal(module(*inputs), expected)), [region.runs for region in cudal1.explain(module).regions]

own, imported = start(make, cache_dir="cache", on_miss="error"), start(
    make, cache_dir="new", on_miss="error", publishers="publishers.toml", trust="signed")
start(unknown, cache_dir="new")
found = {"codes": codes, "own": own, "imported": imported, "tried": tried, "children": children}
found["judged"] = cudal1.report().counters.get("candidates_judged", 0)
with open("answer.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm cache, signed; the same as a bundle with its lock; and whom to believe."""
    folder = tmp_path_factory.mktemp("shipped")
    (folder / "model.py").write_text(MODEL)
    (loaded,) = targets.load(f"{folder / 'model.py'}:make")
    with torch.no_grad():
        plant(loaded.module, loaded.inputs, folder / "cache")
    public = create_key("team", folder / "team.pem", keep_out_of=())
    (folder / "publishers.toml").write_text(f'[[publisher]]\nname = "team"\nkey = "{public}"\n')
    (folder / "publishers.toml").chmod(0o600)
    cache = cache_for(Settings(cache_dir=folder / "cache"))
    cache.sign(load_signer(folder / "team.pem", keep_out_of=()))
    write_bundle(folder / "kernels.bundle", take_inventory(cache))
    write_lock(make_lock(take_inventory(cache)), folder / "cudal1.lock")
    return folder


def start_process(
    shipped: Path, folder: Path, command_word: str, **environment: str
) -> subprocess.Popen[str]:
    """A new process with a Hub to ask, whose command line has `command_word`; its answer is a file in
    `folder`.
    """
    for name in ("model.py", "publishers.toml", "kernels.bundle", "cudal1.lock", "cache"):
        (folder / name).symlink_to(shipped / name)
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "HF_"))
    }
    variables |= {
        "PYTHONPATH": str(ROOT),
        PREFIX + "HUB": "team/kernels",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        **environment,
    }
    command = [sys.executable, "-c", PROCESS, command_word]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def answers(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three processes found: the one with our setting, the one with the Hub's variable, and
    the one with neither.
    """
    runs: dict[str, tuple[str, dict[str, str]]] = {
        "setting": ("offline", {}),
        "variable": ("nothing", {"HF_HUB_OFFLINE": "1"}),
        "neither": ("nothing", {}),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in runs}
    running = {
        name: start_process(shipped, folders[name], word, **environment)
        for name, (word, environment) in runs.items()
    }
    problems = {name: process.communicate(timeout=300)[1] for name, process in running.items()}
    assert [process.returncode for process in running.values()] == [0, 0, 0], problems
    return {
        name: json.loads((folder / "answer.json").read_text()) for name, folder in folders.items()
    }


@pytest.mark.parametrize("run", ["setting", "variable"])
def test_a_warm_start_an_import_and_a_check_open_no_connection(
    answers: dict[str, Any], run: str
) -> None:
    answer = answers[run]
    assert answer["tried"] == []
    assert answer["children"] == []
    assert answer["codes"] == {"import": 0, "lock": 0, "coverage": 0, "list": 0}
    assert answer["own"] == answer["imported"] == [True, ["planted -> eager"]]
    assert answer["judged"] == 0


def test_without_that_word_the_hub_is_asked_for_what_is_missing(answers: dict[str, Any]) -> None:
    answer = answers["neither"]
    assert answer["tried"] != [], "this test could not see a connection"
    assert answer["imported"] == [True, ["planted -> eager"]]
