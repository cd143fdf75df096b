"""Language models: config, data, model, run and use. ``run.train.train(config)`` trains one; ``run.loop.Loop`` is its loop."""
