"""The demo: two-digit addition on a small model made on the spot. The supervised phase imitates a careless teacher who
forgets the carry more often than not; reinforcement learning with a checked answer ends the carelessness.
"""

from headrace.wings.recipes.demo.build import Demo, build_demo, build_teacher, lay_out

__all__ = ["Demo", "build_demo", "build_teacher", "lay_out"]
