"""A made-up profile of any size, and a real browser that looks at pages."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.ctl.profile_result import Profile
from veloxquant.measure.comparison import Comparison, Failure
from veloxquant.measure.conditions import Conditions
from veloxquant.measure.measurement import Run, Sample
from veloxquant.profiling import LayerProfile, ProfileReport

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--enable-logging=stderr"),
)
LOOK = """
const frame = document.querySelector("iframe");
const page = frame.contentDocument, root = page.documentElement;
const box = (one) => one.getBoundingClientRect();
const name = (one) => `${one.tagName.toLowerCase()} ${(one.textContent || "").trim().slice(0, 40)}`;
const found = {width: root.clientWidth, scroll_width: root.scrollWidth, scripts: page.scripts.length};
found.svgs = [...page.querySelectorAll("svg")].map((one) => [box(one).width, box(one).height]);
found.wide = [...page.body.querySelectorAll("*")]
  .filter((one) => !one.closest(".scroll > *") && box(one).right > root.clientWidth + 0.5).map(name);
found.overlaps = [];
found.hints = [...page.querySelectorAll(".more")].filter((one) => box(one).height > 0).length;
found.cut = [...page.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth).length;
found.letters = 1000;
found.outside = [];
found.texts = 0;
found.smallest = 1000;
for (const svg of page.querySelectorAll("svg")) {
  const whole = box(svg), texts = [...svg.querySelectorAll("text")].filter((one) => one.textContent.trim());
  found.texts += texts.length;
  texts.forEach((one, at) => {
    const a = box(one);
    const size = parseFloat(frame.contentWindow.getComputedStyle(one).fontSize);
    found.letters = Math.min(found.letters, size * svg.getScreenCTM().a);
    found.smallest = Math.min(found.smallest, Math.min(a.width, a.height));
    if (a.left < whole.left - 1 || a.right > whole.right + 1 || a.top < whole.top - 1 || a.bottom > whole.bottom + 1)
      found.outside.push(one.textContent);
    for (const other of texts.slice(at + 1)) {
      const b = box(other);
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 2) found.overlaps.push([one.textContent, other.textContent]);
    }
  });
}
found.fetched = frame.contentWindow.performance.getEntriesByType("resource").map((one) => one.name);
document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
"""


class Seen(NamedTuple):
    """What a browser found on a page, and what it wrote to its console."""

    found: dict[str, Any]
    console: list[str]


def browser() -> str | None:
    """A Chromium that can be run here, None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def look(program: str, page: Path, width: int, folder: Path) -> Seen:
    """Open a page in a frame of this width and measure it; `folder` takes the frame and the browser's own files."""
    frame = folder / "frame.html"
    script = f"addEventListener('load', () => {{ {LOOK} }});"
    shown = f'<iframe src="{page.as_uri()}" style="width:{width}px;height:3000px;border:0"></iframe>'
    frame.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{shown}<script>{script}</script>", encoding="utf-8")
    words = (f"--user-data-dir={folder / 'browser'}", f"--window-size={width + 100},3200", "--dump-dom")
    done = subprocess.run(
        [program, *QUIET, *words, frame.as_uri()], capture_output=True, text=True, check=True, timeout=90
    )
    answer = re.search(r"FOUND(.*)END", done.stdout)
    assert answer is not None, done.stdout + done.stderr
    return Seen(json.loads(html.unescape(answer[1])), re.findall(r".*:CONSOLE.*", done.stderr))


def made_up(labels: list[str], *, layers: int = 2, text: str = "text", prompt: str = "prompt", **facts: Any) -> Profile:
    """A profile of these methods: the n-th holds n MiB a layer and takes 10 n ms a token."""
    runs = tuple(_run(label, at + 1, layers, text) for at, label in enumerate(labels))
    about = Conditions(
        at="2026-01-31T12:00:00+00:00",
        chip="Apple M4 Max",
        backend="metal",
        gpu_cores=40,
        total_memory_bytes=128 * 2**30,
        os_name="macOS",
        os_version="26.1",
        macos_version="26.1",
        mlx_version="0.32.4",
        mlx_lm_version="0.32.2",
        load_average=1.5,
        on_battery=False,
    )
    failed = (Failure(label="broken-x", method="broken", error="method_refused", message="no layer can keep it"),)
    found = Comparison(conditions=about, prompt_tokens=1000, max_tokens=24, runs=runs, failures=failed)
    settings = {"model_id": "some-model", "architecture": "llama", "num_parameters": 10**9, **facts}
    return Profile(prompt=prompt, decision="quantize", planned=labels[-1] if labels else None, found=found, **settings)


def _run(label: str, number: int, layers: int, text: str) -> Run:
    held = number * 2**20
    profiles = [
        LayerProfile(
            layer_id=index,
            n_quantize_calls=25,
            quantize_ms_total=number * (index % 5 + 1) * 0.5,
            peak_memory_bytes=held,
            tokens_written=1024,
            is_fused=True,
            true_fp16_bytes=2**21,
            resident_bytes=held,
            peak_resident_bytes=held,
            reported_bytes=held,
        )
        for index in range(layers)
    ]
    whole = layers * held
    return Run(
        label=label,
        method=label.partition("-")[0],
        planned=number == 2,
        prefill_step_size=2048,
        prompt_tokens=1000,
        generated_tokens=24,
        tokens=tuple(range(24)),
        text=text,
        resident_bytes=whole,
        peak_bytes=whole,
        reported_bytes=whole,
        number_types=("bfloat16",),
        true_fp16_bytes=layers * 2**21,
        prefill_s=0.5,
        prefill_tok_s=2000.0,
        decode_s=0.23 * number,
        decode_tok_s=100 / number,
        ms_per_token=10.0 * number,
        mlx_peak_bytes=2**31,
        mlx_before_bytes=2**30,
        profiled_s=1.0,
        same_when_profiled=True,
        text_tokens=24,
        allocated_bytes=whole,
        allocator_agrees=True,
        float32_kv_bytes=0,
        timeline=tuple(Sample(done, whole * done // 1024) for done in (0, 999, *range(1001, 1025))),
        report=ProfileReport(profiles, elapsed_s=1.0),
    )
