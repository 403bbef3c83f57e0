"""Hydra configuration, shipped as a package (pkg://conf)."""
