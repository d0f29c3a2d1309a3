"""Which paths a child may read follows from trust, its tools and the user's home."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_cudal1.judge.sandbox.filesystem_policy import allow_access, make_environment


def test_foreign_code_sees_neither_homes_nor_the_users_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "8")
    scratch = tmp_path / "scratch"
    for own in (True, False):
        variables = make_environment(scratch, own=own, visible_gpu=False)
        access = allow_access(scratch, variables, own=own, gpu=False)
        assert (str(tmp_path) in variables["PYTHONPATH"].split(":")) == own
        assert (str(tmp_path) in access.read) == own
        assert "/etc" not in access.read
        assert "/" not in access.read
        assert (variables["HOME"] == str(scratch)) != own
        # Compile processes of one side of a benchmark would slow the other's calls or its own.
        assert (variables.get("TORCHINDUCTOR_COMPILE_THREADS") == "1") != own
    assert access.write == (str(scratch),)


def test_a_home_is_never_readable_because_a_tool_lies_in_it(tmp_path: Path) -> None:
    variables = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/bin:{tmp_path}:/",
        "CC": f"{tmp_path}/cc",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i"),
    }
    access = allow_access(tmp_path / "scratch", variables, own=True, gpu=False)
    assert str(tmp_path) not in access.read
    assert "/" not in access.read
    assert f"{tmp_path}/bin" in access.read


def test_foreign_code_may_read_the_compiler_wherever_it_is_installed_but_no_home_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, installed, linked = tmp_path / "home", tmp_path / "opt" / "gcc", tmp_path / "links"
    for folder in (home / "bin", installed / "bin", linked):
        folder.mkdir(parents=True)
    for tool in (home / "bin" / "gcc", installed / "bin" / "g++-13"):
        tool.write_text("")
        tool.chmod(0o755)
    (linked / "g++").symlink_to(installed / "bin" / "g++-13")
    monkeypatch.setattr(Path, "home", lambda: home)
    variables = {"PATH": f"{linked}:{home}/bin", "HOME": str(tmp_path / "scratch")}
    access = allow_access(tmp_path / "scratch", variables, own=False, gpu=False)
    assert str(installed) in access.read
    assert str(home) not in access.read
