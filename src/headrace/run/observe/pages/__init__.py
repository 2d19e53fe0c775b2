"""Episodes as pages for people: one self-contained file for each, and an index. Every text is escaped, nothing is
fetched, nothing runs."""

from headrace.run.observe.pages.book import Book, Shown
from headrace.run.observe.pages.index import Figure

__all__ = ["Book", "Figure", "Shown"]
