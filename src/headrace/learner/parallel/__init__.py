"""The learner over several ranks: torch's sharding through transformers, exact whatever the cut.

A run file asks for them (``[learner.parallel]``) and ``headrace train`` starts them. A loop of one's own is started by
``torchrun --nproc-per-node=2 loop.py``; every rank does the same::

    config = LearnerConfig.model_validate({"parallel": {"data": 2}})
    with joined(config.parallel, rank_place(), torch.device("cpu")) as ranks:       # mesh.py, environ.py
        model = load_for(ModelConfig(path="model"), ranks)                           # load.py
        core = LearnerCore(model, config, objective, context, ranks)
        core.train(batch)                                                           # the whole batch, on every rank
        core.save(directory)                                                        # into one directory
"""

from headrace.learner.parallel.config import MemoryConfig, OptimizerConfig, ParallelConfig

__all__ = ["MemoryConfig", "OptimizerConfig", "ParallelConfig"]
