"""Profiles of pieces: what is timed, on one device, and how estimates take it."""
