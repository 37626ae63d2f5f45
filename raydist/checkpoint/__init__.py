"""The format of checkpoints: manifests, which ones are kept, mirrors on other storage, and copies in a node's memory.

Runs in: the driver and each train worker. Imports neither torch nor ray; raydist/worker/checkpoint writes and reads the tensors.
"""
