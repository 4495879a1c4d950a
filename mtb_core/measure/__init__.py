"""Measurements: times, memory, collectives, and the result made of them."""
