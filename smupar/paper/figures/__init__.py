"""A file for each figure and table of the paper, and for each study of our own, under the name that ``smupar reproduce`` takes.
Each file ends with a ``FIGURE``: what to run, draw and claim."""
