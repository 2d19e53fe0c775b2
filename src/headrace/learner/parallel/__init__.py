"""The learner over several ranks. Torch shards the model through transformers, and the results do not depend on the
ranks.

A run file configures the ranks (``[learner.parallel]``) and ``headrace train`` starts them. A user's own loop is
started by ``torchrun --nproc-per-node=2 loop.py``; every rank makes the same calls::

    config = LearnerConfig.model_validate({"parallel": {"data": 2}})
    with join_ranks(config.parallel, rank_place(), torch.device("cpu")) as ranks:       # mesh.py, environ.py
        model = load_on_ranks(ModelConfig(path="model"), ranks)                           # load.py
        core = LearnerCore(model, config, objective, context, ranks)
        core.train(batch)                                                           # the whole batch, on every rank
        core.save(directory)                                                        # into one directory
"""

from headrace.learner.parallel.config import MemoryConfig, OptimizerConfig, ParallelConfig

__all__ = ["MemoryConfig", "OptimizerConfig", "ParallelConfig"]
