"""Networks of one's own as data: traced when an artifact is written, rebuilt from a list of operators when read."""
