"""Between a rank's process and its node's agent: heartbeat, telemetry mailbox, stack dumps. Shared memory and sockets of one host.

Runs in: each train worker and its agent. Imports neither torch nor ray when it is imported.
"""
