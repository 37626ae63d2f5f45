"""Between a rank's process and its node's agent: heartbeat, telemetry mailbox, stack dumps. Shared memory and sockets of one host.

Runs in: each train worker and its agent. Imports neither torch nor ray when it is imported.
"""

AGENT_PID = "RAYDIST_AGENT"
"""The environment variable that holds the pid of a rank's agent, which need not be an ancestor of the rank's process."""
