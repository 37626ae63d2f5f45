"""Pages of one file: style, script and drawings are in it, and nothing comes from anywhere else.

    page.py     the page: sections, cards, tables          style.py    its style and its script
    svg.py      elements, with every text escaped          axes.py     scales, ticks, how numbers are written
    lines.py    lines over a number                        colours.py  what is drawn in which colour
    cells.py    heat maps                                  bars.py     a whole and its parts
    parallel.py an axis a parameter, a line a point

These know nothing of runs. What `raydist report` says of one is in run.py, curves.py and ranks.py; sweep.py is the
page of a sweep.
"""
