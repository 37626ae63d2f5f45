"""What people read of a run: the live display, tables and summaries. Must not import torch or ray."""
