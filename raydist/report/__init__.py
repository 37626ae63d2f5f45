"""Output about runs for people: live displays, tables, summaries and pages. Must not import torch or ray."""
