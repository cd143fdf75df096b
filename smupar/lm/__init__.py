"""Language models: config, data, model, run and use. ``run.train.train(config)`` trains one, with the loop
``run.loop.Loop``."""
