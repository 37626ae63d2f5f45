"""Starts a rank's process from a Ray Train worker: agent, fork server, zygote. Also runs the same loop without Ray.

Runs in: each train worker. Only agent.py imports ray.
"""
