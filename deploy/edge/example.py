"""Prediction of an exported model for a grey picture: python example.py model.onnx"""

import sys

import numpy as np
from runtime import EdgeModel  # type: ignore[import-not-found]  # the file beside this one

model = EdgeModel(sys.argv[1])
declared = model.facts["input"]
if declared["takes"] == "image":
    x = np.full((1, 32, 32, declared["shape"][0]), 128, np.uint8)
else:
    x = np.zeros((1, *declared["shape"]), np.float32)

(answer,) = model.answers(model.predict(x, seed=0))
print(f"{model.facts['architecture']}, K = {model.samples}")
for name, value in answer.items():
    print(f"  {name}: {value}")
