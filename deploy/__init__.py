"""Deployment: ONNX export for edge devices, Prometheus and Grafana for a server."""
