"""A job's key from a file or the launcher: which files are accepted."""

from __future__ import annotations

import os

import pytest

from procpipe.job.keys import given_key

CONTENT = "k" * 40


@pytest.fixture(autouse=True)
def _no_key_variables(monkeypatch):
    monkeypatch.delenv("PROCPIPE_KEY", raising=False)
    monkeypatch.delenv("PROCPIPE_KEY_FILE", raising=False)


@pytest.fixture
def key_file(monkeypatch, tmp_path):
    path = tmp_path / "key"
    path.write_text(f"{CONTENT}\n")
    path.chmod(0o600)
    monkeypatch.setenv("PROCPIPE_KEY_FILE", str(path))
    return path


def test_by_default_there_is_no_key():
    assert given_key() is None


def test_the_key_is_the_files_content_without_white_space_around_it(key_file):
    key = given_key()
    assert key is not None
    assert len(key) == 32
    key_file.write_text(CONTENT)
    key_file.chmod(0o400)
    assert given_key() == key
    key_file.chmod(0o600)
    key_file.write_text(CONTENT + "x")
    assert given_key() != key


def test_the_users_file_has_priority_over_the_launchers_key(key_file, monkeypatch):
    key = given_key()
    monkeypatch.setenv("PROCPIPE_KEY", "a" * 64)
    assert given_key() == key
    monkeypatch.delenv("PROCPIPE_KEY_FILE")
    assert given_key() not in (None, key)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_may_use_is_refused(key_file, mode):
    key_file.chmod(mode)

    with pytest.raises(ValueError, match=f"has mode {mode:03o}, so that other users could read"):
        given_key()


@pytest.mark.parametrize("content", ["", "\n \n", "k" * 31])
def test_a_key_that_is_too_short_is_refused(key_file, content):
    key_file.write_text(content)

    with pytest.raises(ValueError, match=f"holds {len(content.strip())} bytes, but a key has at"):
        given_key()


def test_only_a_regular_file_is_accepted(key_file):
    key_file.unlink()
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\): make one"):
        given_key()
    os.mkfifo(key_file, 0o600)  # opening one waits for a writer
    with pytest.raises(ValueError, match="is not a regular file"):
        given_key()
    key_file.unlink()
    key_file.mkdir(0o700)
    with pytest.raises(ValueError, match="is not a regular file"):
        given_key()


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_another_users_file_is_refused(key_file):
    os.chown(key_file, 65534, 65534)

    with pytest.raises(ValueError, match="belongs to user 65534, who could change it"):
        given_key()
