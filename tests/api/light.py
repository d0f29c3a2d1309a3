"""A worker that speaks the protocol of `torch_cudal1.api.fleet.fleet_worker` and loads no torch: a
target says what becomes of it.

    python light.py FOLDER FD       "do:N" answers after N seconds, "die", "die-once", "die-quietly", "unusable", "garbage", "half"

Every target that is begun is a line of FOLDER/begun.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

KEY = "ab" * 32


def region(key: str) -> dict:
    texts = {
        "name": "r",
        "key": key,
        "kind": "inference",
        "granularity": "whole",
        "runs": "eager",
        "origin": "baseline",
    }
    absent = ("speedup", "low", "high", "vs_eager", "vs_inductor", "runs_us", "error_ratio")
    none = dict.fromkeys(absent) | {
        "worst_error": "inf",
        "schedule": "eager",
        "reason": "nothing beat it",
    }
    return texts | none | {"techniques": [], "tried": [], "baselines_us": {"eager": 2.5}}


def answer(task: dict) -> dict:
    explanation = {
        "target": "t",
        "device": "cpu",
        "regions": [region(KEY)],
        "left_out": [],
        "end_to_end": None,
        "undone": "",
        "gate": [],
    }
    error = "it broke" if task["target"].startswith("fail") else None
    result = {
        "target": task["target"],
        "explanation": explanation,
        "error": error,
        "seconds": 0.5,
        "built": 2,
        "reused": 1,
    }
    unusable = "no such callable" if task["target"].startswith("unusable") else ""
    return task | {"result": None if unusable else result, "unusable": unusable, "died": ""}


def main(folder: Path, descriptor: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    order = json.loads(sys.stdin.readline())
    print("this worker has", len(order["cores"]), "cores")
    for line in sys.stdin:
        task = json.loads(line)
        name = task["target"]
        with open(folder / "begun", "a") as file:
            file.write(f"{name}\n")
        begun_before = (folder / "begun").read_text().splitlines().count(name) > 1
        if name.startswith("die") and not (name.startswith("die-once") and begun_before):
            if "quietly" not in name:
                print("segmentation fault of the driver", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        reply = "garbage" if name.startswith("garbage") else json.dumps({"answer": answer(task)})
        os.write(descriptor, (json.dumps({"say": ["judging", 0.5]}) + "\n").encode())
        seconds = name.partition(":")[2]
        time.sleep(float(seconds) if seconds[:1].isdigit() else 0.0)
        if name.startswith("half"):
            os.write(descriptor, reply[: len(reply) // 2].encode())
            os._exit(3)
        os.write(descriptor, (reply + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
