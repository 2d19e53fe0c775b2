"""An environment of several turns that the model of `headrace demo` can learn: it may try a sum twice.

    headrace demo --dir runs/demo
    headrace train examples/second_try.toml

The model is asked for a sum, as in the demo. After a wrong answer it is asked once more, with what it wrote before its
eyes; a right answer at the second try earns half.
"""

import headrace

TRIES = 2


class SecondTry(headrace.Env):
    """One object per episode: it may keep what it likes."""

    def reset(self, task):
        """Begin an episode with the row ``task``, and return what the model reads first."""
        self.task = task
        self.num_tries = 0
        return task["prompt"]

    def step(self, message):
        """Check ``message``, an answer of three digits, the least significant first."""
        self.num_tries += 1
        written = message.content[::-1]
        right = len(written) == 3 and written.isdigit() and int(written) == self.task["answer"]
        if right or self.num_tries == TRIES:
            return headrace.StepResult(reward=right / self.num_tries, done=True)
        return headrace.StepResult(messages=self.task["prompt"], reward=0.0)
