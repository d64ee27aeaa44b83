"""`python -m benchmarks._rival_fastapi --port N`: FastAPI with a pydantic body, as its tutorial has it."""

import argparse

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks._tiny import answer, network


class Body(BaseModel):
    inputs: list[list[list[list[float]]]]


class Answer(BaseModel):
    probabilities: list[list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    app, net = FastAPI(), network().eval()

    @app.post("/predict")
    async def predict(body: Body) -> Answer:
        return Answer(probabilities=answer(net, torch.tensor(body.inputs)))

    uvicorn.run(app, port=parser.parse_args().port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
