"""The artifact on disk: one safetensors file, and how its tensors are encoded."""
