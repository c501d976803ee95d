"""Outputs appear together or not at all."""

import pytest

from mxsim.commands.bad_input import BadInput
from mxsim.commands.output_files import OutputFiles


def test_files_appear_at_the_end(tmp_path):
    (tmp_path / "old.txt").write_text("old")
    with OutputFiles() as files:
        files.reserve(tmp_path / "old.txt").write_text("new")
        folder = files.folder(tmp_path / "folder")
        files.reserve(folder / "a.txt").write_text("a")
        assert (tmp_path / "old.txt").read_text() == "old"
        assert not (folder / "a.txt").exists()
    assert (tmp_path / "old.txt").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "folder", "old.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, error):
    def fail():
        with OutputFiles() as files:
            files.reserve(tmp_path / "a.txt").write_text("half")
            files.reserve(files.folder(tmp_path / "folder") / "b.txt")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path):
    def fail():
        with OutputFiles() as files:
            files.reserve(files.folder(tmp_path) / "a.txt")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_bad_input(tmp_path):
    def fail():
        with OutputFiles() as files:
            files.reserve(tmp_path / "a.txt")
            raise OSError(28, "No space left on device")

    with pytest.raises(BadInput, match=r"cannot write .*a\.txt: No space left"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_bad_places_are_known_at_once(tmp_path):
    (tmp_path / "file").touch()
    for target, reason in (
        (tmp_path, "is a directory"),
        (tmp_path / "missing" / "a.txt", "No such file"),
        (tmp_path / "file" / "a.txt", "Not a directory"),
    ):
        with pytest.raises(BadInput, match=reason):
            OutputFiles().reserve(target)
    for folder, reason in ((tmp_path / "file", "not a directory"), (tmp_path / "a" / "b", "No such file")):
        with pytest.raises(BadInput, match=reason):
            OutputFiles().folder(folder)


def test_a_link_stays_and_the_mode_of_its_target_too(tmp_path):
    link, target = tmp_path / "link.txt", tmp_path / "target.txt"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with OutputFiles() as files:
        files.reserve(link).write_text("new")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "target.txt"]
