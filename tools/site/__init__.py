"""The documentation site.

    docs/*.md ──staged──▶ build/docs ──zensical, warnings are errors──▶ site/ ──checked──▶ done, or what is wrong
                 ▲                                                         ▲
    what the code says: settings, verbs, recipes,            every link and anchor leads somewhere; no page
    and a page for each file that a page links to            fetches anything from another host

Pages are written to be read where they lie, on a forge or in an editor: a link out of docs/ leads to a file of the
repository. The site has those files as pages of their own.
"""

from tools.site.building import build
from tools.site.checking import problems

__all__ = ["build", "problems"]
