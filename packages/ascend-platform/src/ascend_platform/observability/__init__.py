"""Prometheus metrics and profilers."""
