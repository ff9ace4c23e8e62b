"""The scripts import this name and do not use it."""
flat_dist_call = None
