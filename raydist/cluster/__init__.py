"""The driver: Ray sessions, preflight checks, job submission; one run (`run/`) and sweeps of many trials (`sweep/`)."""
