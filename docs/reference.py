"""Writes the table of settings into operations.md; with --check, says whether it is up to date."""

import json
import re
import sys
from pathlib import Path

from dubito.service.settings import Settings

PAGE = Path(__file__).with_name("operations.md")


def table() -> str:
    """Name, default and description of each setting."""
    rows = ["| setting | default | |", "|---|---|---|"]
    for name, value in Settings.model_construct().model_dump(mode="json").items():
        rows.append(f"| `{name}` | `{json.dumps(value)}` | {Settings.model_fields[name].description} |")
    return "\n".join(rows)


def main() -> None:
    text = PAGE.read_text()
    pattern = r"(<!-- settings -->\n).*?(<!-- /settings -->)"
    updated = re.sub(pattern, lambda m: f"{m[1]}{table()}\n{m[2]}", text, flags=re.S)
    if "--check" in sys.argv:
        sys.exit(0 if updated == text else "docs/operations.md is behind the settings: make reference")
    PAGE.write_text(updated)


if __name__ == "__main__":
    main()
