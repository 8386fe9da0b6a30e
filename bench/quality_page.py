"""Draws the picture of the README from the rows that `quality.py` left: `python bench/quality_page.py FILE PICTURE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import quality
import quality_plot


def main() -> None:
    """Print the table and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("picture", type=Path)
    asked = parser.parse_args()
    rows = json.loads(asked.rows.read_text(encoding="utf-8"))["rows"]
    print(quality.table(rows))
    quality_plot.draw(rows, quality.TARGETS, asked.picture)


if __name__ == "__main__":
    main()
