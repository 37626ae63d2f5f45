"""`raydist dashboard`: live pages of runs and sweeps, drawn from their folders by the code of `raydist report`.

Runs in: one process of the user, anywhere that can read the storage. Needs no cluster, and writes nothing. Must not import torch,
ray, or code that a run names.

    browser                         server.py: one thread        a pool of threads
    GET /run/0/NAME        ------>  access.py: who may ask
                                    cache.py: still new?  ---->  run_page.py, sweep_page.py, list_page.py: read and draw
    live.js: one stream    <------  the parts that have
    of a visible tab                changed since then

`cache.py` bounds the cost: however many browsers look at a page, it is read and drawn again at most every EVERY_S seconds, and
for at most a twentieth of a core's time.
"""
