"""The metrics that the controller counts. The loops report events to one object, :class:`RunMetrics`, which creates the
records of steps, the live state and the summary.

    loop      event (method of RunMetrics)          counter                   metrics.jsonl
    rollout   group_started                         attempts                  env/{env}/...
    rollout   episode_ended                         attempts                  straggler_s; spans of the trace
    rollout   held_back                             since.held_back_s         held_back_s
    scoring   answer_graded                         rewards                   reward_failed/{component}, logged/{name}
    scoring   episode_scored                        since.rewards, .lengths   reward_sampled, length_submitted_*
    scoring   episode_scored, episode_set_aside     totals.set_aside          set_aside_episodes
    scoring   the same, group_dropped               totals.wasted_tokens      wasted_tokens
    scoring   count                                 since.sums                pivots/{count}
    learner   step_done: its batch                  BatchStats                reward_*, reward/{component}, length_*,
                                                                              turns_*, truncated_frac, repetition,
                                                                              zero_variance_frac, agent/{agent}/...
    learner   step_done: its ages                   totals.ages               age/{age}, version_*, age_p90
    learner   step_done: the flow's pacing          -                         turns_s, turns_least_s
    learner   step_done: its report                 totals                    trained_tokens, dropped_tokens, seconds,
                                                                              wait_s, exposed_sync_s; loss, ...
    learner   step_done, snapshot_saved             totals.learner_busy_s     learner_busy_frac, learner_s_per_episode
    sync      version_committed                     since.sums                sync/...
    sync      version_committed                     totals.commit_gaps_s      commit_gap_s
    run       evaluation_ended                      totals.evals              eval_accuracy, eval_version

Some metrics are not counted here but read when a step is recorded: the engine's counters (engine_*, generated_*,
cache_*, prefill_frac, preempted, draft_accepted_frac, passes_by_token, trained_tok_s, cost_s_per_episode), the number
of engines, the flow (queue/..., dropped_groups, max_age, capacity), the processes (``system``: memory/{part},
cpu/{part}, cpu_*, disk_free_bytes), and what the learner reports of its step, loss and optimizer.

    summary.json                                         comes from
    eval_before, eval_after                              evaluation_ended, before the first step and after the last
    reward_first, reward_last                            totals.rewards: the reward_mean of every step
    steps, ledger                                        the flow; the ledger's conservation table
    tokens_generated, tokens_trained, wall_s,            account(): the engine's counters and totals, between
    generated_tok_s, trained_tok_s, engine_idle_frac,    training_began and training_ended
    learner_idle_frac, exposed_sync_frac, account
    commit_gap_ms, sequences_restarted, versions         version_committed
    max_token_age, age_histogram                         totals.ages
    mismatch_kl, mismatch_abs                            gap_measured
    mismatch_abs_most                                    totals: the mismatch_abs of every step
    reward_failures                                      rewards
    recoveries                                           part_recovered
    warnings, status, stopped_by, cause, run_dir         the controller
    verdict, versions_agree                              the session: its accountant, and a replay's comparison

To add a sum to ``metrics.jsonl``, call ``state.metrics.count("name", amount)`` where the event happens, and add a row
for ``name`` in :mod:`headrace.base.types.metrics`. A metric of a batch is computed in
:mod:`~headrace.control.metrics.batch`, and an entry of the summary is a field in
:mod:`~headrace.control.metrics.summary`.
"""

from headrace.control.metrics.run import RunMetrics, StepDone
from headrace.control.metrics.summary import Summary

__all__ = ["RunMetrics", "StepDone", "Summary"]
