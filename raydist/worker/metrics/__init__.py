"""What a rank measures of itself: time, memory, communication, gradient noise; and how records leave the loop.

Runs in: each train worker. Torch, never ray.
"""
