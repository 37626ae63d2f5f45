"""HTML pages in one file: style, script and drawings are included, and nothing is loaded from elsewhere.

    page.py     the page: sections, cards, tables          style.py    its style and its script
    svg.py      elements, with every text escaped          axes.py     scales, ticks, number formats
    lines.py    line charts                                colours.py  colours of series and scales
    heatmap.py  heat maps                                  bars.py     a whole and its parts
    parallel.py parallel coordinates

These modules are independent of runs. The page of a run is in run.py, curves.py and ranks.py, that of a sweep in sweep.py and
reach.py.
"""
