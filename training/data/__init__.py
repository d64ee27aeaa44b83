"""Data sets by name, their division into parts, and augmentation."""
