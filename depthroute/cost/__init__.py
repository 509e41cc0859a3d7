"""What depth routing costs: parameters and FLOPs as closed formulas over plain numbers, and a summary of a model shape."""
