"""The driver's side of a run: a Ray session, one attempt of Ray Train, and what to do when it fails."""
