"""Communication between a rank and its node's agents: heartbeat, mailbox, stack dumps. Shared memory and sockets of one host.

Runs in: each train worker and its agent. Its modules import neither torch nor ray at the top level.
"""

AGENT_PID = "RAYDIST_AGENT"
"""The environment variable with the pid of a rank's agent, which need not be an ancestor of the rank's process."""
RENDEZVOUS_SECRET = "RAYDIST_RENDEZVOUS_SECRET"
"""The variable with an attempt's secret, by which its ranks know each other (raydist/worker/comm/rendezvous.py)."""
