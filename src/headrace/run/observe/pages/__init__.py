"""The pages that ``headrace eval`` writes: one self-contained HTML file for each episode, and an index.

Every text is escaped. The pages load no other files and run no script.
"""

from headrace.run.observe.pages.book import PageInputs, PageWriter

__all__ = ["PageInputs", "PageWriter"]
