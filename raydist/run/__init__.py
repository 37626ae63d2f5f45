"""A run or a sweep on storage: its folder, records, status, driver lease, and requests to it.

Runs anywhere. Imports neither torch nor ray.
"""
