"""gRPC beside HTTP: `inference.GRPCInferenceService` of the Open Inference Protocol, health and reflection."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read as grpc is imported: its core would log lines that are no JSON
