"""Numbers as people write them in tables."""


def number_in(text: str) -> float | None:
    """The number that a text is; None for other texts, such as 1_0 or digits of other scripts, which Python reads."""
    text = text.strip()  # spaces of other scripts, too
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None
