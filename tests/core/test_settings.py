"""Settings are frozen, refuse by name what is misspelt or out of range, and read one environment."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest

from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import (
    Settings,
    append_to_path,
    default_key_folder,
    process_environment,
    select_environment,
)


def test_a_family_that_does_not_exist_is_refused_by_name():
    with pytest.raises(SettingError, match="'spells'; expected some of rewrites"):
        Settings(without=("spells",))
    assert Settings.from_env({"TORCH_CUDAL1_WITHOUT": "kernels, graphs"}).without == (
        "kernels",
        "graphs",
    )


def test_the_environment_fills_what_was_not_given() -> None:
    environ = {
        "TORCH_CUDAL1_BUDGET_S": "7.5",
        "TORCH_CUDAL1_OFFLINE": "Yes",
        "TORCH_CUDAL1_ON_MISS": "tune",
        "TORCH_CUDAL1_CACHE_DIR": "/elsewhere",
        "TORCH_CUDAL1_READ_ONLY_CACHES": f"/a{os.pathsep}/b",
        "TORCH_CUDAL1_PUBLISHERS": "",
        "HOME": "/home/user",
    }
    settings = Settings.from_env(environ, on_miss="error")
    assert (settings.budget_s, settings.offline, settings.on_miss) == (7.5, True, "error")
    assert settings.cache_dir == Path("/elsewhere")
    assert settings.read_only_caches == (Path("/a"), Path("/b"))
    assert settings.publishers is None


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"TORCH_CUDAL1_CACHEDIR": "/x"}, "TORCH_CUDAL1_CACHEDIR"),
        ({"TORCH_CUDAL1_BUDGET_S": "soon"}, "TORCH_CUDAL1_BUDGET_S"),
        ({"TORCH_CUDAL1_OFFLINE": "maybe"}, "TORCH_CUDAL1_OFFLINE"),
        ({"TORCH_CUDAL1_ON_MISS": "guess"}, "on_miss"),
    ],
)
def test_a_variable_that_means_nothing_is_refused_by_name(
    environ: dict[str, str], name: str
) -> None:
    with pytest.raises(SettingError, match=name):
        Settings.from_env(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget_s", -1.0),
        ("budget_s", True),
        ("budget_s", math.nan),
        ("margin", 0.9),
        ("shadow_rate", 1.5),
        ("memory_limit_gib", "4"),
        ("enabled", 1),
        ("strictness", "loud"),
        ("trust", ""),
        ("hub", "no-owner"),
        ("hub", "../../etc"),
        ("hub", "a--b/c"),
        ("on_mismatch", "not a function"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_setting(name: str, value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        Settings(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_copy_differs_in_what_was_named_and_the_original_is_frozen() -> None:
    settings = Settings(budget_s=7.0)
    assert settings.but(autotune=True) == Settings(budget_s=7.0, autotune=True)
    with pytest.raises(SettingError, match="budget"):
        settings.but(budget=3.0)
    with pytest.raises(SettingError, match="one of the settings"):
        Settings.from_env({}, cachedir="/x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.budget_s = 1.0  # type: ignore[misc]


def test_paths_are_expanded_and_the_key_of_a_server_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    settings = Settings(cache_dir="~/c", record="~/calls", publishers="~/p.toml", llm_key="secret")
    assert settings.cache_dir == Path("/home/user/c")
    assert settings.record == Path("/home/user/calls")
    assert settings.publishers == Path("/home/user/p.toml")
    assert "secret" not in repr(settings)


def test_folders_of_the_user_follow_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    assert Settings().cache_dir == Path("/caches/torch_cudal1")
    assert default_key_folder() == Path("/config/torch_cudal1/keys")


def test_a_child_gets_the_variables_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAL1_TEST_A", "1")
    monkeypatch.setenv("CUDAL1_TEST_B", "2")
    assert select_environment({"CUDAL1_TEST_A", "ABSENT"}, ()) == {"CUDAL1_TEST_A": "1"}
    assert select_environment((), ("CUDAL1_TEST_",)) == {"CUDAL1_TEST_A": "1", "CUDAL1_TEST_B": "2"}


def test_variables_that_native_code_set_are_seen() -> None:
    os.putenv("CUDAL1_TEST_NATIVE", "x=y")
    try:
        assert "CUDAL1_TEST_NATIVE" not in os.environ
        assert process_environment()["CUDAL1_TEST_NATIVE"] == "x=y"
    finally:
        os.unsetenv("CUDAL1_TEST_NATIVE")


@pytest.mark.parametrize("before", ["/usr/bin", None])
def test_a_folder_is_at_the_end_of_path_for_a_block(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", before)
    with append_to_path("/shims"):
        assert os.environ["PATH"] == (f"{before}:/shims" if before else "/shims")
    assert os.environ.get("PATH") == before
