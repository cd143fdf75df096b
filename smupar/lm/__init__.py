"""Language models: config, model, data and the training loop. ``smupar.lm.run.train.train(config)`` is the one loop."""
