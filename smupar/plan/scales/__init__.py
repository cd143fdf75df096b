"""Finds the numbers in a model that follow its width, besides the shapes of parameters, without running the model.

find_attention  attention modules, and the fields that hold the scale of ``q.k``
multipliers     numbers that follow the width but are not sizes, such as sqrt(d) after an embedding
source          what the source of a forward pass does with the module's own numbers
"""
