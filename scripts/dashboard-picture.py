#!/usr/bin/env python3
"""make dashboard-picture: docs/dashboard.svg, what contrib/grafana/braidfs.json shows of a mount with a load on it. Its queries
are asked of a Prometheus that scrapes the mount each second, over this machine's loopback; Grafana is not needed. A query that
Prometheus refuses, or that finds nothing, is an error."""

import html
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import loaded

DASHBOARD = loaded.ROOT / "contrib/grafana/braidfs.json"
SECONDS = 45
# Of a dashboard's grid of 24 columns, in pixels.
COLUMN, ROW, GAP = 40, 26, 8
COLOURS = ["#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0"]
# Queries whose answer is empty where nothing has gone wrong.
MAY_BE_EMPTY = {"Errors, but those of look-ups, attributes, ioctls"}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, path, **query):
    url = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def legend(pattern, labels):
    for key, value in labels.items():
        pattern = pattern.replace("{{" + key + "}}", value)
    return pattern


def series_of(panel, port, start, end):
    found = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", "5s")
        answers = ask(port, "/api/v1/query_range", query=expression, start=start, end=end, step=1)
        for one in answers:
            points = [(float(t), float(v)) for t, v in one["values"] if math.isfinite(float(v))]
            if points:
                found.append((legend(target["legendFormat"], one["metric"]), points))
    if not found and panel["title"] not in MAY_BE_EMPTY:
        sys.exit(f"dashboard-picture: nothing is found for {panel['title']!r}")
    # the largest ones first, as many as there are colours
    found.sort(key=lambda s: -max(v for _, v in s[1]))
    return found[: len(COLOURS)]


def show(value, unit):
    if unit == "s":
        for size, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return "0"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit in ("Bps", "bytes"):
        for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value >= size:
                return f"{value / size:.3g} {name}" + ("/s" if unit == "Bps" else "")
    return f"{value:.3g}" if value < 1000 else f"{value / 1000:.3g} k"


def draw(panel, series, start, end):
    at = panel["gridPos"]
    x, y = at["x"] * COLUMN, at["y"] * ROW
    w, h = at["w"] * COLUMN - GAP, at["h"] * ROW - GAP
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    out = [
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" fill="#1f2229"/>',
        f'<text x="{x + 10}" y="{y + 18}" fill="#d8dee9" font-size="13">{html.escape(panel["title"])}</text>',
    ]
    top = max((v for _, points in series for _, v in points), default=0) or 1
    left, right, upper, lower = x + 64, x + w - 170, y + 30, y + h - 12
    for part in (0, 0.5, 1):
        level = lower - (lower - upper) * part
        out.append(f'<path d="M{left} {level:.1f}H{right}" stroke="#3a3f4b"/>')
        out.append(
            f'<text x="{left - 6}" y="{level + 4:.1f}" text-anchor="end" fill="#8892a2" font-size="10">{show(top * part, unit)}</text>'
        )
    for n, (name, points) in enumerate(series):
        path = " ".join(
            f"{left + (t - start) / (end - start) * (right - left):.1f},{lower - v / top * (lower - upper):.1f}" for t, v in points
        )
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[n]}" stroke-width="1.5"/>')
        line = upper + 6 + n * 15
        out.append(f'<rect x="{right + 10}" y="{line - 8}" width="10" height="3" fill="{COLOURS[n]}"/>')
        out.append(f'<text x="{right + 26}" y="{line - 3}" fill="#d8dee9" font-size="10">{html.escape(name)}</text>')
    if not series:
        out.append(f'<text x="{(left + right) / 2}" y="{(upper + lower) / 2}" fill="#8892a2" font-size="12">none</text>')
    return out


def pictures(port, seconds):
    dashboard = json.loads(DASHBOARD.read_text())
    time.sleep(seconds)
    end = time.time() - 1
    # the first rates are of too few samples
    start = end - seconds + 8
    panels = [(p, series_of(p, port, start, end)) for p in dashboard["panels"]]
    width = max(p["gridPos"]["x"] + p["gridPos"]["w"] for p, _ in panels) * COLUMN
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p, _ in panels) * ROW
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#111217"/>',
    ]
    for panel, series in panels:
        out += draw(panel, series, start, end)
    return "\n".join([*out, "</svg>", ""])


def main():
    metrics, port = free_port(), free_port()
    with loaded.mounted(f"metrics={metrics}"), tempfile.TemporaryDirectory(prefix="braidfs-prometheus-", dir="/var/tmp") as work:
        config = Path(work) / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: braidfs, static_configs: [{{targets: ['127.0.0.1:{metrics}']}}]}}]\n"
        )
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={work}/data", f"--web.listen-address=127.0.0.1:{port}"]
        with open(Path(work) / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
            try:
                svg = pictures(port, SECONDS)
            finally:
                prometheus.terminate()
    path = loaded.ROOT / "docs" / "dashboard.svg"
    path.write_text(svg)
    print(path.relative_to(loaded.ROOT))


if __name__ == "__main__":
    main()
