"""The current state of a node's hardware, read from the kernel and the GPU driver. Plain python: neither torch nor ray."""
