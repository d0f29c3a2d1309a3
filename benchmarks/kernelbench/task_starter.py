"""Starts the process of a task: forked from a template, or from nothing where there is no template.

The task's source and its specification are files in the folder of work, its output goes to a log
beside them, and a pipe (`task_channel`) connects it with the pool.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

from benchmarks.kernelbench.job import Job
from benchmarks.kernelbench.task_runs import PendingTask, PoolPlan, TaskRun
from benchmarks.kernelbench.template import ForkedProcess, NoTemplate, Template

__all__ = ["CACHE", "TaskStarter"]

_ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = "cudal1"  # the package's own cache, in the folder of work


class TaskStarter:
    """Starts tasks of one run. Closing it ends the template and what was forked from it."""

    def __init__(self, job: Job, plan: PoolPlan, candidates: Mapping[str, str | None]) -> None:
        self._job, self._plan, self._candidates = job, plan, candidates
        self._template: Template | None = None
        if plan.fork:
            plan.work.mkdir(parents=True, exist_ok=True)
            try:
                self._template = Template(
                    job.device, self._make_environment(), _ROOT, plan.work / "template.log"
                )
            except NoTemplate as error:
                print(f"every task's process is started from nothing: {error}", flush=True)

    def start(self, pending: PendingTask) -> TaskRun:
        """Write the task's files and start its process, without the columns that it has lost."""
        task, folder = pending.task, self._plan.work / "tasks"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"level{task.level}_{task.number}"
        spec, log = folder / f"{name}.json", folder / f"{name}.log"
        spec.with_suffix(".py").write_text(task.source, encoding="utf-8")
        spec_values: dict[str, Any] = {
            "job": self._job.withdraw(pending.lost).to_json(),
            "source": task.source,
            "candidate": self._candidates.get(task.key),
            "cache": str(self._plan.work / CACHE),
            "threads": self._plan.threads,
        }
        spec.write_text(json.dumps(spec_values), encoding="utf-8")
        connection, child_end = Pipe()
        with log.open("wb") as output:
            process = self._start_process(spec, child_end.fileno(), output)
        child_end.close()
        now = time.monotonic()
        return TaskRun(task, process, connection, log, pending.alone, pending.lost, now)

    def close(self) -> None:
        """End the template."""
        if self._template is not None:
            self._template.close()
            self._template = None

    def _start_process(
        self, spec: Path, line: int, output: IO[bytes]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._template is not None:
            try:
                return self._template.start(spec, line, output)
            except NoTemplate as error:
                print(f"no more forks: {error}", flush=True)
                self.close()
        return subprocess.Popen(
            [*self._plan.command, "--line", str(line), "--spec", str(spec)],
            cwd=_ROOT,
            env=self._make_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(line,),
            start_new_session=True,
        )

    def _make_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        search_path = [str(_ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self._plan.work / "inductor")
        environment["TRITON_CACHE_DIR"] = str(self._plan.work / "triton")
        # Whole tasks run side by side: a pool of compilers in each of them would only start more
        # processes.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(self._plan.threads)
        environment["OMP_NUM_THREADS"] = str(self._plan.threads)
        # a question about GPUs must not start the driver in the template
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return environment
