"""R27: how long after a load begins a bad plugin is quarantined, each kind alone; then a daemon that has them all."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, plugins

from veloxquant.methods import registry

KINDS = {
    "imports_nothing": "import a_package_that_nobody_has\n",
    "raises": "raise RuntimeError('broken')\n",
    "exits": "import sys\nsys.exit(3)\n",
    "leaves": "import os\nos._exit(3)\n",
    "says_nan": plugins.sound("vq_says_nan") + "Mine.key_bits = lambda *_: float('nan')\n",
    "says_negative": plugins.sound("vq_says_negative") + "Mine.fixed_bytes = lambda *_: -1\n",
    "speaks_in_escapes": plugins.sound("vq_speaks_in_escapes") + "Mine.summary = '\\x1b[2J'\n",
    "floods": "import os\nfor _ in range(1600):\n    os.write(1, b'x' * 65536)\n",
    "forks": plugins.sound("vq_forks") + "import os, time\nif not os.fork():\n    time.sleep(600)\n",
    "takes_memory": "held = bytearray(10 * 10**9)\n",
    "replaces": plugins.sound("vq_replaces") + "import json\njson.dumps = str\n",
    "recurses": "def f():\n    f()\nf()\n",
    "hangs": "import time\ntime.sleep(10)\n",
}
_HANG_S = 2.0
"""When an import counts as hanging."""


def main() -> int:
    """Loads in this process, which imports none of them; then a daemon's start, with nothing remembered."""
    figures.options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        for name, source in {**KINDS, "sound": plugins.sound("vq_sound")}.items():
            plugins.lay_out(site, f"vq_{name}", source)
        sys.path.insert(0, str(site))
        took = {name: _quarantine_s(f"vq_{name}", Path(folder) / name) for name in KINDS}
        hang = took.pop("hangs")
        slowest = max(took, key=lambda name: took[name])
        figures.at_most("R27", f"slowest of {len(took)} kinds to be quarantined ({slowest})", took[slowest], "s", 1.0)
        figures.at_most("R27", "an import that hangs is quarantined", hang, "s", _HANG_S + 1)
        _in_a_daemon(site)
    return 0


def _quarantine_s(name: str, cache: Path) -> float:
    began = time.perf_counter()
    loaded = registry.load(only=[name], cache_dir=cache)
    seconds = time.perf_counter() - began
    if [fenced.name for fenced in loaded.quarantined] != [name]:
        raise SystemExit(f"{name} was not quarantined")
    return seconds


def _in_a_daemon(site: Path) -> None:
    with session.private_home() as home:
        home.environment["PYTHONPATH"] = str(site)
        with session.running(home) as daemon, daemon.client() as client:
            fenced = len(client.status().methods.quarantined)
            ready = {row.name for row in client.methods().methods if row.state == "ready"}
    all_of_them = len(KINDS)
    figures.say("R27", "a daemon with all: quarantined", fenced, "plugins", str(all_of_them), met=fenced == all_of_them)
    figures.say("R27", "its sound plugin serves", float("vq_sound" in ready), "", "1", met="vq_sound" in ready)


if __name__ == "__main__":
    raise SystemExit(main())
