"""Paired experiments: the plan, the cells, and what the pairs say."""
