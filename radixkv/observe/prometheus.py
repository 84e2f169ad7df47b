"""Metrics of caches and engines for Prometheus, read when they are scraped: requests pay nothing for them.

Names and meanings follow vLLM's (`vllm:prefix_cache_queries_total` is `radixkv:prefix_cache_queries_total` here) where
there is a metric of the same meaning, so that dashboards need a new prefix and little else.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from radixkv.errors import InvalidRequestError, install_hint
from radixkv.observe.histogram import HistogramStats
from radixkv.observe.metrics import CACHE, ENGINE, Metric, ShownCache, ShownEngine, Value, of_cache, of_engine

__all__ = ["Registration", "register", "unregister"]

_PREFIX = "radixkv:"


class Registration:
    """A cache, and perhaps an engine, that a registry shows. Also a context manager: `with register(cache): ...`.

    Attributes:
        labels: What tells its values from those of others.
    """

    def __init__(self, collector: _Collector, cache: Any, engine: Any, labels: dict[str, str]) -> None:
        self._collector = collector
        # Weak: a registry must not keep gigabytes of KV alive for somebody who forgot to unregister.
        self._cache = weakref.ref(cache)
        self._engine = None if engine is None else weakref.ref(engine)
        self.labels = labels

    def unregister(self) -> None:
        """Show it no longer. Nothing happens if it is not shown."""
        self._collector.remove(self)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()

    @property
    def alive(self) -> bool:
        """Whether the cache still exists."""
        return self._cache() is not None

    @property
    def cache(self) -> Any:
        """The cache that it shows; None if that is gone."""
        return self._cache()

    @property
    def engine(self) -> Any:
        """The engine that it shows; None if there is none, or it is gone."""
        return None if self._engine is None else self._engine()

    def values(self, *, engine_only: bool = False) -> dict[str, Value]:
        """All metrics as of now, by name without prefix; empty if the cache is gone.

        Args:
            engine_only: Those of the engine alone.
        """
        cache, engine = self.cache, self.engine
        values = {} if cache is None or engine_only else of_cache(cache)
        return values if engine is None else {**values, **of_engine(engine)}


class _Collector:
    """All that one registry shows of us: a name may appear only once in what is scraped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: list[Registration] = []

    def add(self, cache: Any, engine: Any, labels: dict[str, str] | None) -> Registration:
        with self._lock:
            self._shown = [one for one in self._shown if one.alive]
            for one in self._shown:
                if one.cache is cache and (engine is None or one.engine is engine):
                    what = "cache" if engine is None else "engine"
                    raise InvalidRequestError(
                        f"this {what} is shown in this registry already, with the labels {one.labels}: twice, it would "
                        "count twice in every sum; unregister() that first"
                    )
            # A label that another cache has and this one has not is shown empty, which Prometheus takes for none.
            taken = [_filled(one.labels) for one in self._shown]
            chosen = labels
            if chosen is None:
                chosen = next(
                    {"cache": str(i)} for i in range(len(taken) + 1) if {"cache": str(i)} not in taken
                )
            if _filled(chosen) in taken:
                raise InvalidRequestError(
                    f"the labels {chosen} are those of another cache: give labels that tell the two apart (an empty "
                    "label is the same as none)"
                )
            made = Registration(self, cache, engine, chosen)
            self._shown.append(made)
            return made

    def remove(self, one: Registration) -> None:
        with self._lock:
            self._shown = [other for other in self._shown if other is not one]

    def describe(self) -> Iterator[Any]:
        """The names, for the registry to see whether they are free; no values are read for it."""
        for metric in (*CACHE, *ENGINE):
            yield _family(metric, [])

    def collect(self) -> Iterator[Any]:
        """Called by the registry for each scrape, perhaps in several threads at once."""
        with self._lock:
            shown = list(self._shown)
        caches: list[Any] = []  # the cache of several engines is shown with the first of them
        scraped = []
        for one in shown:
            scraped.append((one.labels, one.values(engine_only=any(one.cache is other for other in caches))))
            caches.append(one.cache)
        # A registry wants the same label names everywhere; an empty label is the same as none.
        names = sorted({name for labels, _ in scraped for name in labels})
        for metric in (*CACHE, *ENGINE):
            own = [metric.label] if metric.label else []
            family = _family(metric, [*names, *own])
            for labels, values in scraped:
                value = values.get(metric.name)
                common = [labels.get(name, "") for name in names]
                if value is None:
                    continue
                if isinstance(value, HistogramStats):
                    family.add_metric(common, _buckets(value), value.total)
                elif isinstance(value, Mapping):
                    for key, number in sorted(value.items()):
                        family.add_metric([*common, key], number)
                else:
                    family.add_metric(common, value)
            if family.samples:
                yield family


def _family(metric: Metric, labels: list[str]) -> Any:
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[metric.kind](_PREFIX + metric.name, metric.help, labels=labels)


def _buckets(stats: HistogramStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    result, so_far = [], 0
    for bound, count in zip((*stats.bounds, float("inf")), stats.counts or (0,), strict=True):
        so_far += count
        result.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(so_far)))
    return result


_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def register(
    cache: ShownCache,
    engine: ShownEngine | None = None,
    registry: Any = None,
    labels: Mapping[str, str] | None = None,
) -> Registration:
    """Show a cache, and an engine that works in it, in a registry of prometheus-client.

    The values are those since the cache was made: `cache.reset_stats()` does not make a counter go down. Neither
    cache nor engine is kept alive; when the cache is gone, its values are, too. Where several engines work in one
    cache, register it with each of them: its own values are shown once, with the first.

    Args:
        cache: A `PrefixCache`.
        engine: An `Engine` that works in this cache.
        registry: A `prometheus_client.CollectorRegistry`; None: the default one, `prometheus_client.REGISTRY`.
        labels: What tells this cache from others of the registry, such as `{"model_name": "llama"}`. None numbers
            them: `cache="0"`, `cache="1"`, ...

    Returns:
        A handle: `unregister()` ends it, as does leaving a `with` block.

    Raises:
        ImportError: prometheus-client is not installed.
        InvalidRequestError: This is no cache, engine or registry; the engine works in another cache; the cache or
            engine is shown in this registry already, or another one with the same labels, an empty label being none;
            a label is none that Prometheus takes; or the registry has metrics of these names from somebody else.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError(
            f"metrics for Prometheus need prometheus-client: {install_hint('observe')}"
        ) from error
    _require(cache, of_cache, "a PrefixCache")
    if engine is not None:
        _require(engine, of_engine, "an Engine")
        if engine.cache is not cache:
            raise InvalidRequestError("the engine works in another cache: register it with engine.cache")
    chosen = None if labels is None else _as_labels(labels)
    if registry is None:
        registry = prometheus_client.REGISTRY
    if not all(callable(getattr(registry, name, None)) for name in ("register", "unregister", "collect")):
        raise InvalidRequestError(
            f"registry is a prometheus_client.CollectorRegistry, got {type(registry).__name__}"
        )
    with _lock:
        collector = _collectors.get(registry)
        fresh = collector is None
        collector = collector or _Collector()
        made = collector.add(cache, engine, chosen)
        if fresh:
            try:
                registry.register(collector)
            except ValueError as error:
                raise InvalidRequestError(f"the registry does not take our metrics: {error}") from error
            _collectors[registry] = collector
    return made


def unregister(registration: Registration) -> None:
    """The same as `registration.unregister()`.

    Args:
        registration: What `register` returned.
    """
    registration.unregister()


_OWN_LABELS = {"le", *(metric.label for metric in (*CACHE, *ENGINE) if metric.label)}


def _require(thing: Any, read: Callable[[Any], object], kind: str) -> None:
    """Its values can be read: better found now than in every scrape."""
    try:
        read(thing)
        weakref.ref(thing)
    except (AttributeError, TypeError) as error:
        raise InvalidRequestError(f"what is registered must be {kind}, got {type(thing).__name__}") from error


def _filled(labels: dict[str, str]) -> dict[str, str]:
    """Labels as Prometheus tells them apart, which takes an empty one for none."""
    return {name: value for name, value in labels.items() if value}


def _as_labels(labels: Any) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise InvalidRequestError(
            f'labels are a mapping such as {{"model_name": "llama"}}, got {type(labels).__name__}'
        )
    for name, value in labels.items():
        if not _is_label(name):
            raise InvalidRequestError(
                f"{name!r} cannot be the name of a label here: use letters, digits and underscores, and none of "
                f"{', '.join(sorted(_OWN_LABELS))}"
            )
        if not isinstance(value, (str, int, float)):
            raise InvalidRequestError(
                f"label {name}: a value is a text or a number, got {type(value).__name__}"
            )
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"label {name}: {value!r} cannot be written as UTF-8, as a scrape has to"
            ) from error
    return {name: str(value) for name, value in labels.items()}


def _is_label(name: str) -> bool:
    return (
        isinstance(name, str)
        and name.isascii()
        and name.isidentifier()
        and not name.startswith("__")
        and name not in _OWN_LABELS
    )
