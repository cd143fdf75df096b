"""The paper's figures and tables, one short file each. Each file ends with a ``FIGURE``: what to run, draw and claim."""
