"""The paper's figures and tables, one short file each. Each file ends with a ``FIGURE``, which says what to run, what to draw
and what to claim."""
