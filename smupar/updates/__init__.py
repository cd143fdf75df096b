"""Measured updates: each hidden layer gets the learning rate at which one update changes its output as much as in the proxy.

For a hidden weight W with inputs X and one update dW, made at a base learning rate eta,

    effect = RMS(X dW) / eta

is the change of the layer's output by one update, per unit of base learning rate. ``record_updates`` records this effect while
the small dense proxy trains. The record is called a trace. ``follow_updates`` measures gain = RMS(X dW) / (learning rate of the
layer) in the target, and sets the layer's learning rate to eta * effect of the proxy / gain. Before the first measurement it
uses the plan's factor. dW is read off the weights after ``optimizer.step()``, so optimizer and masks can be of any kind. To
leave out decoupled weight decay, the output after the step is compared with (1 - lr * decay) X W, which decay alone would give.

Effect and gain are averaged over time: each measured step keeps 0.8 of the average and adds 0.2 of the new value
(``law.averages_after``). A trace of another depth is read at the same relative depth. For a trace of another length,
``trace.same_moment`` says which steps correspond.

meter        ``record_updates`` and ``follow_updates``, for one model
stacked      the same for a stack of models
trace        the effects of a run
stored       the file of a trace
page         the page of a trace
law          how updates are measured and followed
sizes        measures, in stacks, the quantity that a law names
probe        keeps inputs of a layer, and measures how an update changes its output
observer     ``observe``: sizes of layers over a run
observation  the record that ``observe`` makes
entropy      the entropy of attention
"""
