"""The results of a sweep: one row per point, the best point, and conclusions.

Runs anywhere, from the sweep's folder alone. Must not import torch or ray.

    forecast.py      before it runs: its cells, and their time and cost
    figures.py       the figures of one cell's run
    time_to_loss.py  the time and cost at which cells reached a loss
    remaining.py     while it runs: its time and cost until the end
    standing.py      while it runs: which cells ended last, and the best so far
    results.py       one row per point; results.parquet; the best cell's job
    stats.py         Student's t: intervals of means and of differences
    analysis.py      noise, edges of the grid, the optimum in learning rate
    base_values.py   the base's own values, compared with those that were tried
    conclusions.py   the results in sentences
    curves.py        losses of the best cells over tokens, for the page (raydist/report/html/sweep.py)
    tables.py        tables on stdout
"""
