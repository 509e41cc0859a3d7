"""What depth routing costs: parameters and FLOPs as closed formulas over plain numbers. Knows no module and needs no torch."""
