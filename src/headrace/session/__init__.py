"""The front door: run files, run directories, and the verbs train and evaluate."""

from headrace.session.config import RunConfig, load_config
from headrace.session.evaluating import Evaluation, Measures, evaluate
from headrace.session.training import train

__all__ = ["Evaluation", "Measures", "RunConfig", "evaluate", "load_config", "train"]
