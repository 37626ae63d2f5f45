"""One run from the driver's side: attempts, the coordinator, worker groups, recovery, memory checkpoints, monitors.

Runs in: the driver, and actors that it starts. Never imports torch. supervisor.py has the picture of who calls whom.
"""
