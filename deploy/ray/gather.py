"""One Prometheus view of all replicas: each sends its metrics to one actor, and any of them answers with all."""

import re
import time

STALE = 10.0  # seconds after which a replica that sends nothing more is left out
SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")


class Gatherer:
    """The last metrics of each replica, by its name."""

    def __init__(self) -> None:
        self.texts: dict[str, tuple[float, str]] = {}

    def put(self, replica: str, text: str) -> None:
        self.texts[replica] = time.monotonic(), text

    def drop(self, replica: str) -> None:
        self.texts.pop(replica, None)

    def all(self) -> dict[str, str]:
        now = time.monotonic()
        self.texts = {name: one for name, one in self.texts.items() if now - one[0] < STALE}
        return {name: text for name, (_, text) in self.texts.items()}


def joined_metrics(texts: dict[str, str]) -> str:
    """Metrics in the text format, one group of lines per name, each sample with its replica as a label."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in sorted(texts.items()):
        heads, samples = list[str](), list[str]()
        for line in text.splitlines():
            if line.startswith("# HELP "):
                heads, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
            if line.startswith("#"):
                if line not in heads:
                    heads.append(line)
            elif match := SAMPLE.match(line):
                label = f'{match[1]}{{replica="{replica}"'
                samples.append(f"{label},{line[match.end() :]}" if match[2] else f"{label}}}{line[match.end() :]}")
    return "".join(f"{line}\n" for heads, samples in families.values() for line in [*heads, *samples])
