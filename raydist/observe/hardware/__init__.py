"""What a node's hardware is doing, read where the kernel and the driver keep it. Plain python: neither torch nor ray."""
