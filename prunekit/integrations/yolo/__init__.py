"""Parts of the integration with ultralytics: calibration images, trainers, checkpoints, callbacks."""
