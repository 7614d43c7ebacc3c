"""The page in a real browser: its script runs, orders and filters, and what it draws can be seen.

In `ci`, which installs Chromium where it can.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zlib

import pytest

from tests.trace.conftest import agentspec

pytestmark = pytest.mark.ci

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,800",
    "--enable-logging=stderr",
)
# What page.css calls --full, --light and --tool.
COLOURS = {"decoding": (0x1F, 0x6F, 0xB2), "first token": (0x9C, 0xC5, 0xE8), "tool": (0xD0, 0x8A, 0x1D)}


def browse(tmp_path, address, *flags):
    profile = tmp_path / f"profile-{len(list(tmp_path.iterdir()))}"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, address],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not told, told
    return done.stdout


@pytest.fixture
def shown(recording, tmp_path):
    if CHROMIUM is None:
        assert not os.environ.get("CI"), "CI has to have a Chromium"
        pytest.skip("no Chromium here: apt-get install chromium")
    path = tmp_path / "run.html"
    assert agentspec("trace", "show", recording, "--html", path).returncode == 0
    return path


def rows(html):
    """(kind, acceptance, hidden) of each row, in the page's order."""
    found = re.findall(r'<details class="row [^>]*>', html)
    pick = [dict(re.findall(r'data-(\w+)="([^"]*)"', row)) | {"hidden": "hidden" in row} for row in found]
    return [(row["kind"], row["acceptance"], row["ms"], row["hidden"]) for row in pick]


def test_the_script_orders_and_filters(shown, tmp_path):
    as_it_ran = rows(browse(tmp_path, shown.as_uri(), "--dump-dom"))
    assert not any(hidden for *_, hidden in as_it_ran) and len(as_it_ran) >= 14
    slow = [r for r in rows(browse(tmp_path, shown.as_uri() + "#slow", "--dump-dom")) if not r[3]]
    assert {kind for kind, *_ in slow} == {"call"}
    failed = [r for r in rows(browse(tmp_path, shown.as_uri() + "#failed", "--dump-dom")) if not r[3]]
    assert 2 <= len(failed) < len(as_it_ran)


def test_it_can_be_seen(shown, tmp_path):
    picture = tmp_path / "page.png"
    browse(tmp_path, shown.as_uri(), f"--screenshot={picture}")
    colours = colours_of(picture.read_bytes())
    assert len(colours) > 200, "text is drawn with many shades"
    for name, colour in COLOURS.items():
        assert colour in colours, f"no bar in the colour of {name}"


def colours_of(png):
    """The colours of an 8-bit RGB or RGBA picture, without an imaging library."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, data = 8, b""
    while place < len(png):
        length, kind = int.from_bytes(png[place : place + 4], "big"), png[place + 4 : place + 8]
        body = png[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height = int.from_bytes(body[:4], "big"), int.from_bytes(body[4:8], "big")
            assert body[8] == 8 and body[9] in (2, 6) and body[12] == 0
            size = 3 if body[9] == 2 else 4
        elif kind == b"IDAT":
            data += body
        place += length + 12
    raw, stride = zlib.decompress(data), width * size
    before, found = bytearray(stride), set()
    for row in range(height):
        start = row * (stride + 1)
        filter_, line = raw[start], bytearray(raw[start + 1 : start + 1 + stride])
        for i in range(stride):
            left = line[i - size] if i >= size else 0
            up, corner = before[i], before[i - size] if i >= size else 0
            if filter_ == 1:
                line[i] = line[i] + left & 255
            elif filter_ == 2:
                line[i] = line[i] + up & 255
            elif filter_ == 3:
                line[i] = line[i] + (left + up) // 2 & 255
            elif filter_ == 4:
                guess = left + up - corner
                _, _, near = min((abs(guess - v), k, v) for k, v in enumerate((left, up, corner)))
                line[i] = line[i] + near & 255
        found |= {tuple(line[i : i + 3]) for i in range(0, stride, size)}
        before = line
    return found
