"""The worker process: device, model runner, sleep mode, watchdog."""
