from __future__ import annotations

import sys

import pytest

from radixkv.demo.errors import DemoError
from radixkv.demo.plot import check_plot_path, draw, write_plot


@pytest.mark.parametrize(
    ("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("A.PNG", b"\x89PNG")]
)
def test_written_by_suffix_and_nothing_else_left(result, tmp_path, name, magic):
    path = tmp_path / name
    path.write_text("old")
    check_plot_path(path)
    write_plot(result, path, "some model")
    assert path.read_bytes().startswith(magic)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_bar_for_each_request_without_and_with(result):
    figure = draw(result, "some model")
    panels = figure.get_axes()
    assert [panel.get_title().splitlines()[0] for panel in panels] == [w.title for w in result.workloads]
    for panel, workload in zip(panels, result.workloads, strict=True):
        heights = [bar.get_height() for bar in panel.patches]
        requests = workload.requests
        assert heights == [r.without.ttft_s for r in requests] + [r.with_cache.ttft_s for r in requests]
        assert [tick.get_text() for tick in panel.get_xticklabels()] == [r.label for r in requests]


def test_a_failed_write_leaves_the_old_file(result, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def fail(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(DemoError, match="No space left"):
        write_plot(result, path, "some model")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_paths_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    (tmp_path / "dir.png").mkdir()
    for path, message in [
        (tmp_path / "a.pdf", r"must end in \.png or \.svg"),
        (tmp_path / "a", r"must end in \.png or \.svg"),
        (tmp_path / "dir.png", "this is a folder"),
        (tmp_path / "none" / "a.png", "does not exist"),
    ]:
        with pytest.raises(DemoError, match=message):
            check_plot_path(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DemoError, match='install the extra "demo"'):
        check_plot_path(tmp_path / "a.png")
