"""What every floor stands on: errors, files, configuration. Imports nothing of depthroute but itself, and no torch."""
