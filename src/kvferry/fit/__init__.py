"""Fit: from dumps to moments, probe, layer selection and mapper."""
