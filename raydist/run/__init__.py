"""One run on storage, or one sweep: its folder, its records, its status, who drives it, and what is asked of it.

Runs anywhere. Imports neither torch nor ray.
"""
