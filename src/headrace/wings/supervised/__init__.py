"""Training on the rows of a dataset, without sampling: ``headrace sft`` (cross-entropy), ``dpo`` (preferences),
``distill`` (a teacher's distribution), and ``stages`` (several runs in sequence).

    files ──read──▶ rows ──render──▶ tokens with a loss mask ──order──▶ batches ──▶ the learner ──▶ checkpoints
    (sources)       (reading)        (rendering)               (order)     │  as in ``headrace train``
                                                                           └──▶ ledger: which row in which step

All rows are rendered and checked before the first step. A row that cannot be trained is refused, or left out and
counted. The order of rows is a function of the seed and the position in the run, so a resumed run trains the same
batches without a stored position.
"""
