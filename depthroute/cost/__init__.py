"""What every residual method costs: parameters, multiply-adds, activations, traffic and pipelines, as formulas for any shape."""
