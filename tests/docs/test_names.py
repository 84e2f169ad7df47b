"""Names in the text of a page lead to the API pages, where it is sure what they mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

names = pytest.importorskip("docs.tooling.names")


def linked(html: str, markdown: str = "") -> str:
    return names.on_page_content(html, page=SimpleNamespace(markdown=markdown))


def link(name: str, said: str) -> str:
    return f'<autoref identifier="{name}" optional><code>{said}</code></autoref>'


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("BlockPool", "radixkv.BlockPool"),
        ("RadixTree.match", "radixkv.RadixTree.match"),
        ("radixkv.core.policy_names()", "radixkv.core.policy_names"),
        ("TorchBackend", "radixkv.attention.TorchBackend"),
    ],
)
def test_a_name_is_a_link(said, name):
    assert linked(f"<p>A <code>{said}</code>.</p>") == f"<p>A {link(name, said)}.</p>"


@pytest.mark.parametrize(
    "html",
    [
        "<h2><code>BlockPool</code></h2>",
        '<a href="x"><code>BlockPool</code></a>',
        "<pre><code>BlockPool</code></pre>",
        "<strong><code>kv_size</code></strong>",
        "<code>Request</code>",  # of the scheduler, or of a trace
        "<code>register</code>",  # on another page than its own, it may be anything
        "<code>radixkv</code>",
        "<code>blocks</code>",
    ],
)
def test_what_is_no_name_or_not_in_the_text_is_left_alone(html):
    assert linked(html) == html


def test_on_its_own_page_a_name_is_sure():
    page = "::: radixkv.sched.Request\n\n::: radixkv.observe.prometheus.register\n"
    assert linked("<code>Request</code>", page) == link("radixkv.sched.Request", "Request")
    assert linked("<code>register</code>", page) == link("radixkv.observe.prometheus.register", "register")
