"""The check over a whole run: do updates keep their size until the end?

``run`` trains the models of the grid and observes them, ``drift`` says how sizes depend on width, density and depth at each
look, ``causes`` names what may have caused a drift, and ``report`` puts it into words.
"""
