"""The paper's figures and tables: one short file each. It ends with a ``FIGURE``, which says what to run, to draw and to
claim."""
