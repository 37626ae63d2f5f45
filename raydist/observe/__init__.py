"""Monitoring of a run: actors that collect, store and export its records and telemetry. Must not import torch."""
