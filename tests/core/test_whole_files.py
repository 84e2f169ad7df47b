"""Files written as a whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time

import pytest

from radixkv.core.whole_files import replacing


def test_nobody_sees_half_of_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("ne")
        assert path.read_text() == "old"
        assert part.parent == tmp_path
        assert part.suffix == ".txt"
        part.write_text("new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_one_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail():
        with replacing(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "a.txt"):
        pass


def test_long_and_relative_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "x" * 250 + ".txt", "ü" * 120 + ".svg"):
        with replacing(tmp_path.__class__(name)) as part:
            part.write_text(name)
        assert (tmp_path / name).read_text() == name


@pytest.mark.skipif(sys.platform == "win32", reason="no umask")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_rights_are_those_of_a_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "a.txt") as part:
            assert stat.S_IMODE(part.stat().st_mode) == 0o666 & ~umask
            part.write_text("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o666 & ~umask


@pytest.mark.skipif(sys.platform == "win32", reason="no umask")
@pytest.mark.parametrize("way", ["helper", "tree view", "plot"])
def test_files_of_other_threads_keep_their_rights(tmp_path, monkeypatch, way):
    """Whoever changes the umask to read it makes what other threads write at that moment open to all."""

    def changed(mask):
        raise AssertionError("the umask was changed")

    monkeypatch.setattr(os, "umask", changed)
    if way == "helper":
        with replacing(tmp_path / "a.txt"):
            pass
    elif way == "tree view":
        import radixkv
        from radixkv.core import BlockPool, RadixTree

        radixkv.tree_view(RadixTree(BlockPool(4))).save(tmp_path / "a.txt")
    else:
        figures = pytest.importorskip("matplotlib.figure")
        from radixkv.demo.plot import save_figure

        save_figure(figures.Figure(), tmp_path / "a.png")
    assert len(list(tmp_path.iterdir())) == 1


def test_several_threads_write_one_file(tmp_path):
    path, end, seen = tmp_path / "a.txt", time.monotonic() + 0.3, set()

    def write(text):
        while time.monotonic() < end:
            with replacing(path) as part:
                part.write_text(text * 1000)

    threads = [threading.Thread(target=write, args=(text,)) for text in "abc"]
    path.write_text("a" * 1000)
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        text = path.read_text()
        seen.add((text[:1], len(text), len(set(text))))
    for thread in threads:
        thread.join()
    assert {(length, kinds) for _, length, kinds in seen} == {(1000, 1)}
    assert len(list(tmp_path.iterdir())) == 1
