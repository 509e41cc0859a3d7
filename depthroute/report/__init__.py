"""Reports: one page, with figures and tables, from the folder of a study. Reads files only; imports no torch."""

from depthroute.report.page import write_report

__all__ = ["write_report"]
