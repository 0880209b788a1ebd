"""Files that are there whole or not at all."""

import os

import pytest

from rollout.cli.files import write_file


def write(path, content):
    write_file(path, lambda file: file.write(content))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_while_writing_leaves_the_old_file_alone(tmp_path, monkeypatch, call):
    write(tmp_path / "file", b"old")

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ValueError, match="could not be written: No space left"):
        write(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_file_keeps_its_permissions(tmp_path):
    (tmp_path / "file").touch(mode=0o600)
    write(tmp_path / "file", b"new")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
