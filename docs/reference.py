"""Writes the table of settings into operations.md; with --check, says whether it is up to date."""

import re
import sys
from pathlib import Path

from dubito.service.settings import as_table

PAGE = Path(__file__).with_name("operations.md")


def main() -> None:
    text = PAGE.read_text()
    made = re.sub(
        r"(<!-- settings -->\n).*?(<!-- /settings -->)", lambda m: f"{m[1]}{as_table()}\n{m[2]}", text, flags=re.S
    )
    if "--check" in sys.argv:
        sys.exit(0 if made == text else "docs/operations.md is behind the settings: make reference")
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
