"""A repository's name and revision are read strictly; what fails says whether to try again."""

from __future__ import annotations

import pytest

from torch_cudal1.core.errors import SettingError
from torch_cudal1.store.hub.hub_client import Client, HubFailure, Repo

COMMIT = "ab" * 20


def test_a_repository_is_a_name_and_perhaps_a_revision() -> None:
    assert Repo.parse("team/kernels") == Repo("team/kernels", "main")
    pinned = Repo.parse(f"team/kernels@{COMMIT}")
    assert (pinned.revision, pinned.is_pinned, str(pinned)) == (
        COMMIT,
        True,
        f"team/kernels@{COMMIT[:12]}",
    )
    assert not Repo.parse("team/kernels@v1").is_pinned


@pytest.mark.parametrize("text", ["", "kernels", "a/b/c", "team/../x", "team/kernels@"])
def test_any_other_name_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="owner/name"):
        Repo.parse(text)


def test_a_commit_is_its_own_answer_without_a_request() -> None:
    client = Client(0.001, "http://127.0.0.1:1")
    assert client.commit_of(Repo("team/kernels", COMMIT)) == COMMIT


def test_only_what_may_pass_is_worth_another_try() -> None:
    passing = {kind: HubFailure("why", kind).is_passing for kind in ("absent", "refused", "denied")}
    assert passing == {"absent": False, "refused": False, "denied": True}
    assert str(HubFailure("why", "unreachable")) == "why"
