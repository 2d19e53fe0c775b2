"""The documentation site.

    docs/*.md ──staged──▶ build/docs ──zensical, warnings are errors──▶ site/ ──checked──▶ done, or list of problems
                 ▲                                                         ▲
    generated from the code: settings, commands, recipes,    every link and anchor has a target; no page
    and a page for each file that a page links to            fetches anything from another host

Pages are written to be read in the repository: a link out of docs/ leads to a file of the repository. The site has
those files as pages of their own.
"""

from tools.site.building import build
from tools.site.checking import problems

__all__ = ["build", "problems"]
