"""Prepare: fetch wheels, make models, read corpora, draw calibration sequences."""
