"""What tests share: models, loops, ranks, texts. Run as programs: golden runs, and the check before a release."""
