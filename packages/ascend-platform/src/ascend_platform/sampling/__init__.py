"""Sampling and rejection sampling."""
