"""What watches a run from beside it: the actor that gathers and stores its records. Must not import torch."""
