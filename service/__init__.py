"""Artifacts to answers: the server, its client and its commands."""
