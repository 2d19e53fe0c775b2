"""The demo: two-digit addition by a small model that is created when the demo starts. In a supervised phase the model
imitates a careless teacher, who forgets most carries; reinforcement learning with a checked answer corrects this."""

from typing import TYPE_CHECKING

from headrace.base.plugins import lazy_attributes

if TYPE_CHECKING:
    from headrace.wings.recipes.demo.build import Demo, build_demo, build_teacher, lay_out, write_untrained

__all__ = ["Demo", "build_demo", "build_teacher", "lay_out", "write_untrained"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Demo": ".build",
        "build_demo": ".build",
        "build_teacher": ".build",
        "lay_out": ".build",
        "write_untrained": ".build",
    },
)
