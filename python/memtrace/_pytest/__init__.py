"""Implements the pytest plugin."""
