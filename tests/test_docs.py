"""The pages of docs/ say what is so."""

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGES = sorted([REPO / "README.md", *(REPO / "docs").glob("*.md"), REPO / "benchmarks" / "RESULTS.md"])


def check_reference(page: Path) -> int:
    script = (REPO / "docs" / "reference.py").read_text()
    (page.parent / "reference.py").write_text(script)
    return subprocess.run([sys.executable, page.parent / "reference.py", "--check"], capture_output=True).returncode


def test_the_table_of_settings_is_up_to_date(tmp_path: Path) -> None:
    text = (REPO / "docs" / "operations.md").read_text()
    page = tmp_path / "operations.md"
    page.write_text(text)
    assert check_reference(page) == 0
    page.write_text(text.replace("| `port` | `8000` |", "| `port` | `9000` |"))
    assert check_reference(page) == 1


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:")):
                continue
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"
