"""Which variables our processes keep, and what is shown of a text that may hold the others."""

from __future__ import annotations

import os

import pytest

from veloxquant import environment

CANARY = "canary-3f9a"
SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "VELOXQUANT_TEST_PASSWORD", "XDG_TOKEN", "HOUSE_RENT")


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets under the names they usually have, under ours, and under one that says nothing."""
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)


def test_a_variable_is_kept_by_its_name_and_never_with_a_secrets_name() -> None:
    """An allow list, and of it nothing that sounds like a secret."""
    kept = environment.known()
    assert not set(SECRETS) & set(kept)
    assert {"HOME", "PATH", "XDG_STATE_HOME"} <= set(kept)
    assert environment.known({"LC_ALL": "C", "LC_AUTH": "x", "MLX_KEY": "x", "FOO": "x"}) == {"LC_ALL": "C"}


def test_a_process_forgets_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its environment nothing else is left, for it and for what it starts; what is kept stays as it was."""
    variables = {"HOME": "/home/ada", "VELOXQUANT_SOCKET": "/run/d.sock", "HF_TOKEN": CANARY, "EDITOR": "ed"}
    monkeypatch.setattr(os, "environ", variables)
    environment.forget_unknown()
    assert variables == {"HOME": "/home/ada", "VELOXQUANT_SOCKET": "/run/d.sock"}


def test_a_text_is_shown_without_the_values_of_what_is_not_kept() -> None:
    """By the variable's name, also where one value is part of another; what is kept stays readable."""
    env = {"HF_TOKEN": "hf_abcdef", "LONGER": "hf_abcdefgh", "SHORT": "on", "HOME": "/home/ada"}
    said = environment.without_secrets("on hf_abcdefgh and hf_abcdef in /home/ada", env)
    assert said == "on (LONGER) and (HF_TOKEN) in /home/ada"
    assert CANARY not in environment.without_secrets(f"{CANARY}{CANARY}")
