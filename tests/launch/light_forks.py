"""A fork server that imports next to nothing: the same code, for tests of all but what it imports."""

from headrace.launch.hosts import forkserver

forkserver.IMPORTED = ("numpy",)

if __name__ == "__main__":
    forkserver.main()
