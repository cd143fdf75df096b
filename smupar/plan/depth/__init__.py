"""Compares models of different depth.

correspondence  which layers of a model correspond to which layers of its base
branches        residual branches, and the factor that a depth rule gives each
"""
