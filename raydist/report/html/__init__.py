"""HTML pages in one file: style, scripts and data are included, and nothing is loaded from elsewhere.

    page.py     the page: sections, cards, tables          style.py    its style
    elements.py elements, with every text escaped          bars.py     a whole and its parts
    charts.py   figures: data of lines, heat maps and      looks.js    the same as options of the library in vendor/
                parallel coordinates, and the same in      chart.js    draws them when they are near; zoom, keys, files
                words

These modules are independent of runs. The page of a run is in run.py, curves.py and ranks.py, that of a sweep in sweep.py and
reach.py.
"""
