"""Metrics as Prometheus gets them: over HTTP, through its own parser."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.parser import text_string_to_metric_families

import radixkv
from radixkv.errors import InvalidRequestError
from radixkv.observe import prometheus
from radixkv.observe.metrics import CACHE, ENGINE


@pytest.fixture
def registry():
    return CollectorRegistry(auto_describe=True)


@pytest.fixture
def cache(tiny_llama):
    return radixkv.PrefixCache.for_model(tiny_llama, num_blocks=16, block_size=16)


class Scraped:
    """What one scrape over loopback brought."""

    def __init__(self, registry):
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{server.server_port}/metrics", timeout=20
            ) as reply:
                self.text = reply.read().decode()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}

    def get(self, sample, **labels):
        found = [
            s.value
            for family in self.families.values()
            for s in family.samples
            if s.name == "radixkv:" + sample and all(s.labels.get(k) == v for k, v in labels.items())
        ]
        assert len(found) == 1, (sample, labels, found)
        return found[0]


def generate(cache, model, inputs):
    with cache.attached(model):
        model.generate(inputs, max_new_tokens=2, do_sample=False)


def prompt(seed, num=40):
    import torch

    return torch.randint(1, 200, (1, num), generator=torch.Generator().manual_seed(seed))


def test_a_scrape_shows_what_the_statistics_say(registry, cache, tiny_llama):
    engine = radixkv.Engine(tiny_llama, cache=cache)
    prometheus.register(cache, engine, registry=registry, labels={"model_name": "tiny"})
    generate(cache, tiny_llama, prompt(0))
    generate(cache, tiny_llama, prompt(0))
    engine.generate(
        [prompt(0)[0].tolist(), prompt(1, 60)[0].tolist()], radixkv.SamplingParams(max_new_tokens=3)
    )
    for seed in range(2, 9):
        generate(cache, tiny_llama, prompt(seed))
    generate(cache, tiny_llama, prompt(0))
    got, stats, of_engine = Scraped(registry), cache.stats, engine.stats

    assert got.get("prefix_cache_queries_total", model_name="tiny") == stats.prompt_tokens > 0
    assert got.get("prefix_cache_hits_total") == stats.hit_tokens > 0
    assert got.get("prefix_cache_requests_total", outcome="full") == stats.full_hits == 2
    assert got.get("prefix_cache_misses_total", reason="never_seen") == stats.misses["never_seen"]
    assert got.get("prefix_cache_misses_total", reason="evicted") == stats.misses["evicted"] == 1
    assert got.get("evicted_blocks_total") == stats.evicted_blocks > 0
    assert got.get("evicted_tokens_total") == stats.evicted_tokens > 0
    assert got.get("prefill_flops_saved_total") == stats.prefill_flops_saved > 0
    assert got.get("prefill_seconds_saved_total") == stats.prefill_seconds_saved > 0
    assert got.get("generation_tokens_total") == of_engine.generated_tokens == 6
    assert got.get("prompt_tokens_cached_total") == of_engine.hit_tokens == 39
    assert got.get("request_success_total", finished_reason="length") == 2
    assert got.get("num_requests_running") == got.get("num_requests_waiting") == 0
    assert got.get("kv_cache_usage_perc") == 0
    blocks = [got.get("kv_cache_blocks", state=state) for state in ("free", "evictable", "used")]
    assert sum(blocks) == cache.num_blocks
    assert got.get("time_to_first_token_seconds_count") == 2
    assert got.get("time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert got.get("prefix_cache_hit_share_count") == stats.requests
    assert got.get("prefix_cache_hit_share_sum") == pytest.approx(stats.hit_shares.total)
    assert got.get("prefix_cache_hit_share_bucket", le="0.0") == stats.no_hits
    with cache.pin(prompt(0)[0]):
        assert Scraped(registry).get("kv_cache_usage_perc") > 0


def test_every_metric_has_a_help_text_and_is_shown(registry, cache, tiny_llama):
    engine = radixkv.Engine(tiny_llama, cache=cache)
    prometheus.register(cache, engine, registry=registry)
    generate(cache, tiny_llama, prompt(0))
    model_only = {
        "prefix_cache_bypasses",
        "prefix_cache_contiguous",
        "request_success",
    }  # nothing of the kind has happened
    families = Scraped(registry).families
    for metric in (*CACHE, *ENGINE):
        if metric.name not in model_only:
            family = families["radixkv:" + metric.name]
            assert family.documentation == metric.help
            assert family.type == metric.kind


def test_counters_never_go_down(registry, cache, tiny_llama):
    prometheus.register(cache, registry=registry)
    generate(cache, tiny_llama, prompt(0))
    generate(cache, tiny_llama, prompt(0))
    names = [f"{metric.name}_total" for metric in CACHE if metric.kind == "counter" and not metric.label]
    before = Scraped(registry)
    cache.reset_stats()
    assert cache.stats.requests == cache.stats.hit_tokens == 0
    cache.clear()
    after = Scraped(registry)
    assert before.get("prefix_cache_hits_total") > 0
    for name in names:
        assert after.get(name) == before.get(name), name
    generate(cache, tiny_llama, prompt(0))
    assert cache.stats.misses == {"cleared": 1}
    later = Scraped(registry)
    for name in names:
        assert later.get(name) >= before.get(name), name
    assert later.get("prefix_cache_queries_total") == before.get("prefix_cache_queries_total") + 40


def test_several_caches_are_told_apart(registry, cache, tiny_llama):
    other, another, fourth = (radixkv.PrefixCache.for_model(tiny_llama, num_blocks=8) for _ in range(3))
    first = prometheus.register(cache, registry=registry)
    second = prometheus.register(other, registry=registry)
    third = prometheus.register(another, registry=registry, labels={"model_name": "x", "replica": 1})
    assert [first.labels, second.labels, third.labels] == [
        {"cache": "0"},
        {"cache": "1"},
        {"model_name": "x", "replica": "1"},
    ]
    generate(cache, tiny_llama, prompt(0))
    got = Scraped(registry)
    assert got.get("prefix_cache_queries_total", cache="0") == 40
    assert got.get("prefix_cache_queries_total", cache="1") == 0
    assert got.get("prefix_cache_queries_total", model_name="x", replica="1") == 0
    assert got.text.count("# TYPE radixkv:prefix_cache_queries_total counter") == 1
    with pytest.raises(ValueError, match="give labels that tell the two apart"):
        prometheus.register(fourth, registry=registry, labels={"cache": "1"})
    prometheus.unregister(second)
    second.unregister()
    with prometheus.register(other, registry=registry, labels={"cache": "1"}):
        assert 'cache="1"' in Scraped(registry).text
    assert 'cache="1"' not in Scraped(registry).text


def test_a_registry_keeps_no_cache_alive(registry, tiny_llama):
    made = radixkv.PrefixCache.for_model(tiny_llama, num_blocks=8)
    one = prometheus.register(made, radixkv.Engine(tiny_llama, cache=made), registry=registry)
    del made
    gc.collect()
    assert not one.alive
    assert one.values() == {}
    assert "radixkv" not in Scraped(registry).text


def test_a_cache_is_shown_once(registry, cache, tiny_llama):
    first = prometheus.register(cache, registry=registry)
    for labels in (None, {"m": "x"}, {"cache": "0"}):
        with pytest.raises(InvalidRequestError, match=r"shown in this registry already, .*'cache': '0'"):
            prometheus.register(cache, registry=registry, labels=labels)
    prometheus.register(cache, registry=CollectorRegistry())  # another registry is another matter
    first.unregister()
    with prometheus.register(cache, registry=registry, labels={"m": "x"}):
        assert Scraped(registry).text.count("radixkv:prefix_cache_queries_total{") == 1


def test_several_engines_in_one_cache(registry, cache, tiny_llama):
    """Each engine is shown, and their cache once."""
    one, two = (radixkv.Engine(tiny_llama, cache=cache) for _ in "12")
    first = prometheus.register(cache, one, registry=registry)
    prometheus.register(cache, two, registry=registry)
    for engine in (one, two, None):
        with pytest.raises(InvalidRequestError, match="shown in this registry already"):
            prometheus.register(cache, engine, registry=registry)
    two.generate([prompt(0)[0].tolist()], radixkv.SamplingParams(max_new_tokens=3))
    got = Scraped(registry)
    assert got.get("prefix_cache_queries_total") == 40  # the only one
    assert [got.get("generation_tokens_total", cache=name) for name in "01"] == [0, 3]
    first.unregister()
    assert Scraped(registry).get("prefix_cache_queries_total", cache="1") == 40


LABELS = [
    ({"m": "x"}, {"m": "x", "n": ""}),
    ({"m": "x", "n": ""}, {"m": "x", "o": ""}),
    ({}, {"n": ""}),
    ({"m": ""}, {"n": ""}),
]


@pytest.mark.parametrize("pair", [*LABELS, *(pair[::-1] for pair in LABELS)], ids=str)
def test_an_empty_label_tells_nothing_apart(registry, cache, tiny_llama, pair):
    """What Prometheus takes for one series would come twice, and the scrape be refused."""
    other = radixkv.PrefixCache.for_model(tiny_llama, num_blocks=8)
    prometheus.register(cache, registry=registry, labels=pair[0])
    with pytest.raises(InvalidRequestError, match="give labels that tell the two apart"):
        prometheus.register(other, registry=registry, labels=pair[1])
    prometheus.register(other, registry=registry, labels={**pair[1], "more": "x"})
    families = Scraped(registry).families.values()
    series = [
        (sample.name, frozenset((name, value) for name, value in sample.labels.items() if value))
        for family in families
        for sample in family.samples
    ]
    assert len(set(series)) == len(series) > 0


def test_what_cannot_be_registered(registry, cache, tiny_llama):
    other = radixkv.PrefixCache.for_model(tiny_llama, num_blocks=8)
    engine = radixkv.Engine(tiny_llama, cache=cache)
    labels = [
        ({name: "x"}, "cannot be the name of a label")
        for name in ("reason", "le", "a-b", "", "1a", "__x", 3, "é", None)
    ]
    labels += [
        ({"a": "\ud800"}, "cannot be written as UTF-8"),
        ({"a": None}, "a value is a text or a number, got NoneType"),
        ({"a": b"x"}, "a value is a text or a number, got bytes"),
        ("abc", "labels are a mapping .* got str"),
        ([("a", "b")], "labels are a mapping .* got list"),
    ]
    cases = [
        *(((cache,), {"labels": given}, reason) for given, reason in labels),
        ((other, engine), {}, "the engine works in another cache"),
        ((5,), {}, "must be a PrefixCache, got int"),
        ((None,), {}, "must be a PrefixCache, got NoneType"),
        ((cache, 5), {}, "must be an Engine, got int"),
        ((cache, cache), {}, "must be an Engine, got PrefixCache"),
        ((cache,), {"registry": 5}, "registry is .* got int"),
    ]
    for given, options, reason in cases:
        with pytest.raises(InvalidRequestError, match=reason):
            prometheus.register(*given, **{"registry": registry, **options})
    assert Scraped(registry).text.strip() == ""
    prometheus.register(cache, engine, registry=registry, labels={"a": 'q"\\\n}{x="1', "b": "日本"})
    assert Scraped(registry).get("prefix_cache_queries_total", a='q"\\\n}{x="1', b="日本") == 0


def test_names_that_somebody_else_has(registry, cache):
    taken = Counter("radixkv:prefix_cache_queries", "x", registry=registry)
    for _ in "12":
        with pytest.raises(InvalidRequestError, match="the registry does not take our metrics"):
            prometheus.register(cache, registry=registry)
    registry.unregister(taken)
    prometheus.register(cache, registry=registry)
    assert Scraped(registry).get("prefix_cache_queries_total") == 0


def test_scrapes_while_requests_run(registry, cache, tiny_llama):
    """From another thread, in the middle of anything: neither is disturbed."""
    engine = radixkv.Engine(tiny_llama, cache=cache, max_num_seqs=3)
    prometheus.register(cache, engine, registry=registry)
    over, errors, hits = threading.Event(), [], []

    def scrape():
        while not over.is_set():
            try:
                hits.append(registry.get_sample_value("radixkv:prefix_cache_queries_total", {"cache": "0"}))
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        prompts = [[*prompt(seed % 3)[0].tolist(), seed] for seed in range(12)]
        done = engine.generate(prompts, radixkv.SamplingParams(max_new_tokens=8))
        generate(cache, tiny_llama, prompt(1))
    finally:
        over.set()
        thread.join()
    assert not errors
    assert all(completion.error is None for completion in done)
    assert hits == sorted(hits)
    assert hits[-1] > 0
    cache.check()


def test_without_the_package_there_is_one_clear_error():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from radixkv.observe import prometheus\n"
        "try: prometheus.register(None)\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == (
        'metrics for Prometheus need prometheus-client: install the extra "observe": in a clone of radixkv, '
        'pip install ".[observe]"\n'
    )
