"""What came out of a sweep: a row a point, the best one, and what can be said about it.

Runs anywhere, from the sweep's folder alone. Must not import torch or ray.

    forecast.py      before it runs: cells, and what they will take
    figures.py       what one cell's run came to
    time_to_loss.py  how soon, and for how much, cells came to a loss
    standing.py      while it runs: which cells ended last, and the best so far
    results.py       a row a point; results.parquet; the best cell's job
    stats.py         Student's t: intervals of means and of differences
    analysis.py      noise, edges of the grid, the optimum in learning rate
    base_values.py   the base's own values beside those that were tried
    conclusions.py   the same in sentences
    curves.py        losses of the best cells over tokens, for the page (raydist/report/html/sweep.py)
    tables.py        all of it on stdout
"""
