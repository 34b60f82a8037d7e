"""The text format of Prometheus, for the figures of this process.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from django_mq.policy.histogram import BOUNDS, Histogram

#: The media type of this format.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: The bounds to show, of those that are counted: two per power of ten, 1 ms to 10,000 s.
SHOWN_BOUNDS = tuple(n for n in range(len(BOUNDS)) if 0.0009 < BOUNDS[n] < 11_000 and n % 5 == 0)

Labels = Mapping[str, str]


def family(name: str, kind: str, help: str, samples: Iterable[tuple[Labels, float]]) -> str:
    r"""Return one family of counters or gauges.

    >>> print(family("up", "gauge", "Says hello.", [({"who": 'a"b'}, 1.0)]), end="")
    # HELP up Says hello.
    # TYPE up gauge
    up{who="a\"b"} 1
    """
    lines = (_line(name, labels, value) for labels, value in samples)
    return "".join((f"# HELP {name} {help}\n# TYPE {name} {kind}\n", *lines))


def histogram(name: str, help: str, samples: Iterable[tuple[Labels, Histogram]]) -> str:
    """Return one family of histograms.

    >>> ran = Histogram()
    >>> ran.add([0.25, 0.5, 50.0])
    >>> text = histogram("run", "Ran.", [({}, ran)])
    >>> [line for line in text.splitlines() if "1.0" in line or "sum" in line or "Inf" in line]
    ['run_bucket{le="1.0"} 2', 'run_bucket{le="+Inf"} 3', 'run_sum 50.75']
    """
    lines = (line for labels, counted in samples for line in _histogram(name, labels, counted))
    return "".join((f"# HELP {name} {help}\n# TYPE {name} histogram\n", *lines))


def _histogram(name: str, labels: Labels, counted: Histogram) -> Iterator[str]:
    up_to = list(accumulate(counted.buckets))
    for n in SHOWN_BOUNDS:
        yield _line(f"{name}_bucket", {**labels, "le": repr(round(BOUNDS[n], 6))}, up_to[n])
    yield _line(f"{name}_bucket", {**labels, "le": "+Inf"}, counted.count)
    yield _line(f"{name}_sum", labels, counted.mean * counted.count)
    yield _line(f"{name}_count", labels, counted.count)


def _line(name: str, labels: Labels, value: float) -> str:
    listed = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{listed}}} {value:.12g}\n" if listed else f"{name} {value:.12g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
