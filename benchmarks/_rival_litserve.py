"""`python -m benchmarks._rival_litserve --port N`: LitServe with its own defaults."""

import argparse
from typing import Any

import litserve  # type: ignore[import-untyped, import-not-found, unused-ignore]
import torch

from benchmarks._tiny import answer, network


class Api(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.net = network().eval()

    def decode_request(self, request: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(request["inputs"])

    def predict(self, x: torch.Tensor) -> list[list[float]]:
        return answer(self.net, x)

    def encode_response(self, output: list[list[float]]) -> dict[str, list[list[float]]]:
        return {"probabilities": output}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    server = litserve.LitServer(Api(), accelerator="cpu")
    server.run(port=parser.parse_args().port, log_level="warning", generate_client_file=False, access_log=False)


if __name__ == "__main__":
    main()
