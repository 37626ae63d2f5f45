"""From a Ray Train worker to the process of a rank: the agent, the fork server, the zygote; and the same loop without Ray.

Runs in: each train worker. Only agent.py imports ray.
"""
